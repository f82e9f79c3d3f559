"""Norms of gradients, and what scales gradients by them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .program.sums import wide
from .program.trees import PyTree, dtype_of, flatten, flatten_with_names, outlined


def global_norm(tree: PyTree) -> jax.Array:
    """The Euclidean norm of all floating-point and complex leaves together, ``[]``.

    Equivalent to ``optax.global_norm``, but squares are summed in at least float32, and its derivative at zero is zero.
    As ``metrics_fn`` of :func:`micro_grad` it costs nothing beyond clipping.

    Example:
        >>> import jax.numpy as jnp
        >>> from microtome.jax_impl import global_norm
        >>> global_norm({"w": jnp.array([3.0, 0.0]), "b": jnp.array(4.0)})
        Array(5., dtype=float32)
    """
    leaves = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(dtype_of(leaf), jnp.inexact)]
    if not leaves:
        return jnp.zeros((), jnp.float32)
    squares: Any = 0.0
    for leaf in map(jnp.asarray, leaves):
        if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
            squares = squares + jnp.sum(jnp.square(leaf.real) + jnp.square(leaf.imag))
        else:
            squares = squares + jnp.sum(jnp.square(leaf.astype(wide(leaf.dtype))))
    empty = squares == 0
    return jnp.where(empty, 0, jnp.sqrt(jnp.where(empty, 1, squares)))


def clip_by_global_norm(max_norm: PyTree, *, nan_safe: bool = True) -> Callable[[PyTree], PyTree]:
    """Scale gradients down to a norm of at most ``max_norm``.

    Equivalent to ``lambda g: jax.tree.map(lambda x: x * jnp.minimum(1, max_norm / global_norm(g)), g)`` on one
    example's gradients. As ``transform_fn`` of :func:`micro_grad` it takes the factored path of :func:`clipped_grad`.

    Args:
        max_norm: A positive number or an array of shape ``()``, which may be traced: a changing norm does not compile
            anew (a traced one that is not positive gives NaN). Or a tree of these that is a prefix of the gradients'
            tree: each part is clipped by itself.
        nan_safe: Gradients whose norm is not finite become zero, so that one bad example spoils nothing; without it a
            norm of NaN makes all of them NaN.

    Returns:
        A function of a gradient tree. Norms are computed in at least float32; dtypes are kept, and integer leaves too.

    Raises:
        TypeError: A norm that is no number.
        ValueError: A norm that is not positive, or, at the call, one below the least normal number of its dtype or
            a tree that is no prefix.

    Example:
        >>> import jax.numpy as jnp
        >>> from microtome.jax_impl import clip_by_global_norm
        >>> clip_by_global_norm(1.0)({"w": jnp.array([3.0, 4.0])})
        {'w': Array([0.6, 0.8], dtype=float32)}
    """
    checked_norms("max_norm", max_norm)
    return lambda grads: clipped(grads, max_norm, "max_norm", nan_safe)


def rescale_by_norm(scale_fn: Callable[[jax.Array], jax.Array], *, nan_safe: bool = True) -> Callable[[PyTree], PyTree]:
    """Multiply gradients by a function of their norm.

    Equivalent to ``lambda g: jax.tree.map(lambda x: x * scale_fn(global_norm(g)), g)``; a ``transform_fn`` of
    :func:`micro_grad` that takes the factored path of :func:`clipped_grad`.

    Args:
        scale_fn: ``norm -> factor``, both of shape ``()``; for instance ``lambda n: 1 / (n + 0.01)``, automatic
            clipping (Bu et al., 2022, arXiv:2206.07136).
        nan_safe: Gradients whose norm or factor is not finite become zero.

    Raises:
        TypeError: ``scale_fn`` is not callable, or, at the call, its factor is complex.
        ValueError: At the call, a factor that is not of shape ``()``.

    Example:
        >>> import jax.numpy as jnp
        >>> from microtome.jax_impl import rescale_by_norm
        >>> rescale_by_norm(lambda n: 2 / n)(jnp.array([3.0, 4.0]))
        Array([1.2, 1.6], dtype=float32)
    """
    if not callable(scale_fn):
        raise TypeError(f"scale_fn must be a function of the norm, got {scale_fn!r}.")

    def transform(grads: PyTree) -> PyTree:
        norm = global_norm(grads)
        scale = jnp.asarray(scale_fn(norm))
        if scale.shape:
            raise ValueError(f"scale_fn must return a number, got shape {scale.shape}.")
        if jnp.iscomplexobj(scale):
            raise TypeError(f"scale_fn must return a real number, got {scale.dtype.name}.")
        keep = jnp.isfinite(norm) & jnp.isfinite(scale) if nan_safe else None
        return jax.tree.map(lambda g: _times(g, scale, keep), grads)

    return transform


def _times(grad: Any, scale: jax.Array, keep: jax.Array | None) -> Any:
    """Scale the gradient; make it zero where it is not to be kept."""
    dtype = dtype_of(grad)
    if not jnp.issubdtype(dtype, jnp.inexact):
        return grad
    working = wide(dtype)
    scaled = (grad.astype(working) * scale.astype(jnp.finfo(working).dtype)).astype(dtype)
    return scaled if keep is None else jnp.where(keep, scaled, jnp.zeros((), dtype))


def checked_norms(option: str, norms: PyTree) -> list[Any]:
    """Return the clip norms of an option, or raise the error that names the one at fault."""
    named, _ = flatten_with_names(norms, option)
    if not named:
        raise ValueError(f"{option} must hold a positive number, got {norms!r}.")
    for name, norm in named:
        rule = "a positive number or an array of shape ()"
        if isinstance(norm, (bool, str)) or not (hasattr(norm, "dtype") or isinstance(norm, (int, float))):
            raise TypeError(f"{name} must be {rule}, got {norm!r} of type {type(norm).__name__}.")
        if np.shape(norm):
            raise ValueError(f"{name} must be {rule}, got shape {np.shape(norm)}.")
        if not jnp.issubdtype(dtype_of(norm), jnp.floating) and not jnp.issubdtype(dtype_of(norm), jnp.integer):
            raise TypeError(f"{name} must be {rule}, got {dtype_of(norm).name}.")
        if not isinstance(norm, jax.core.Tracer) and not float(norm) > 0:
            raise ValueError(f"{name} must be positive, got {norm}. To leave gradients as they are, pass inf.")
    return [norm for _, norm in named]


def clipped(
    grads: PyTree, norms: PyTree, option: str, nan_safe: bool, unit: bool = False, padding: Any = None
) -> PyTree:
    """Clip the gradients of one example, part by part; to zero for padding."""
    given, treedef = flatten(norms)
    try:
        parts = treedef.flatten_up_to(grads)
    except ValueError:
        raise ValueError(
            f"{option} must be a number or a prefix of the gradients' tree. {option}: {outlined(norms)}; gradients: "
            f"{outlined(grads)}."
        ) from None
    lengths = [global_norm(part) for part in parts]
    keep = functools.reduce(jnp.logical_and, map(jnp.isfinite, lengths)) if nan_safe else None
    if padding is not None:
        keep = ~padding if keep is None else keep & ~padding
    scaled = []
    for part, length, norm in zip(parts, lengths, given, strict=True):
        tiny = float(jnp.finfo(length.dtype).tiny)
        if not isinstance(norm, jax.core.Tracer) and float(norm) < tiny:
            raise ValueError(
                f"{option} must be at least {tiny:.3g}, the least normal number of the gradients' {length.dtype.name}: "
                f"smaller ones, such as {norm}, count as zero in XLA."
            )
        norm = jnp.asarray(norm, length.dtype)
        length = length + _of_what_is_flushed(part, length.dtype)
        above = length > norm if nan_safe else ~(length <= norm)  # NaN, where nothing else would clip its example
        # Where a norm is inf, so that inf / inf never occurs; and no division by zero, which a derivative would see.
        divisor = jnp.where(above, length, 1)
        scale = jnp.where(above, 1 / divisor, 1 / norm) if unit else jnp.where(above, norm / divisor, 1)
        # A traced norm cannot raise an error: NaN, unlike gradients that were not clipped, is noticed.
        scale = jnp.where(norm > 0, scale, jnp.nan)
        scaled.append(jax.tree.map(lambda g, scale=scale: _times(g, scale, keep), part))
    return treedef.unflatten(scaled)


def _of_what_is_flushed(part: PyTree, dtype: Any) -> float:
    """Return the largest norm of entries whose squares are subnormal, which XLA takes for zeros on some devices."""
    size = sum(leaf.size for leaf in jax.tree.leaves(part))
    return math.sqrt(size * float(jnp.finfo(wide(dtype)).tiny))
