"""Pytrees: flattening with one type for what comes out, and the arrays at the leaves."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

PyTree: TypeAlias = Any
Function: TypeAlias = Callable[..., Any]  # of arguments that each one has of its own


def flatten(tree: PyTree, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], Any]:
    """``jax.tree.flatten``, whose tree definition no type checker knows."""
    return jax.tree.flatten(tree, is_leaf=is_leaf)


def structure(tree: PyTree) -> Any:
    """``jax.tree.structure``, likewise."""
    return jax.tree.structure(tree)


def outlined(tree: PyTree) -> str:
    """Return the tree as its user would write it, with a star for each leaf, for messages."""
    return str(jax.tree.map(lambda _: "*", tree)).replace("'*'", "*")


def flatten_with_names(tree: PyTree, name: str) -> tuple[list[tuple[str, Any]], Any]:
    """Return the leaves, each with a name like ``batch['x']``, and the tree definition."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
    return [(name + jax.tree_util.keystr(path), leaf) for path, leaf in leaves], treedef


def integer(name: str, value: Any, rule: str) -> int:
    """Return the value as a Python int, or a TypeError that names it and the rule."""
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        return operator.index(value)
    except (TypeError, jax.errors.TracerIntegerConversionError):
        raise TypeError(f"{name} must be {rule}, got {value!r} of type {type(value).__name__}.") from None


def positive(name: str, value: Any, otherwise: str = "") -> int:
    """Return the value as a positive Python int, or an error that says what else is allowed."""
    rule = f"a positive int {otherwise}".rstrip()
    number = integer(name, value, rule)
    if number < 1:
        raise ValueError(f"{name} must be {rule}, got {number}.")
    return number


def dtype_of(leaf: Any) -> Any:
    """Return the dtype of an array, or the one a Python number has in JAX."""
    return leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)


def is_weak(x: Any) -> bool:
    """Tell whether an array takes the dtype of what it meets, as a Python number does. Random keys do not say."""
    return bool(getattr(x, "weak_type", False))


def with_weak_type(x: jax.Array, like: Any) -> jax.Array:
    """Return the array, weakly typed where ``like`` is."""
    if is_weak(x) == like.weak_type:
        return x
    convert: Any = jax.lax.convert_element_type_p.bind  # jax.lax.convert_element_type makes every type a strong one
    result: jax.Array = convert(x, new_dtype=x.dtype, weak_type=like.weak_type, sharding=None)
    return result


def stand_in(x: Any) -> Any:
    """Return what to trace with in place of an array: 64-bit types keep their width in JAX's 32-bit mode too.

    There, JAX narrows those of a ``ShapeDtypeStruct``, though arrays may have them, as labels do that come from torch.
    """
    if not isinstance(x, jax.ShapeDtypeStruct) or jnp.issubdtype(x.dtype, jax.dtypes.extended):
        return x
    if jax.dtypes.canonicalize_dtype(x.dtype) != x.dtype:
        return jax.core.ShapedArray(x.shape, x.dtype, weak_type=x.weak_type)
    return x


def is_narrowed(dtype: Any) -> bool:
    """Tell whether JAX narrows the type where a loop collects it: 64 bits in its 32-bit mode."""
    return not jnp.issubdtype(dtype, jax.dtypes.extended) and jax.dtypes.canonicalize_dtype(dtype) != dtype


def check_width(tree: PyTree, name: str) -> None:
    """Raise a TypeError for a leaf whose type JAX would narrow where a loop collects it."""
    for path, leaf in flatten_with_names(tree, name)[0]:
        if is_narrowed(leaf.dtype):
            raise TypeError(
                f"{path} is {leaf.dtype.name}, which JAX narrows in its 32-bit mode. Call this under "
                "jax.enable_x64(True), or cast it in the function."
            )


def varying_axes(aval: Any) -> frozenset[Any]:
    """Return the mesh axes of ``jax.shard_map`` over which a value of this type differs."""
    # Some releases name it `vma`.
    kind = getattr(aval, "manual_axis_type", None)
    return frozenset(kind.varying if kind is not None else getattr(aval, "vma", None) or ())


def as_varying(step: Callable[[PyTree], PyTree], carry: PyTree) -> PyTree:
    """Return the carry of a loop with the types that a step gives it inside ``jax.shard_map``.

    There, types tell over which mesh axes a value differs; zeros do not differ, what is added to them may.
    """
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return carry

    def cast(start: jax.Array, end: Any) -> jax.Array:
        axes = tuple(varying_axes(end) - varying_axes(jax.typeof(start)))
        return jax.lax.pcast(start, axes, to="varying") if axes else start

    return jax.tree.map(cast, carry, jax.eval_shape(step, carry))


def as_array(leaf: Any, name: str, hint: str = "Leave it out of the batch arguments.") -> jax.Array:
    """Return the leaf as an array of JAX, or a TypeError that names it."""
    if isinstance(leaf, jax.Array):
        return leaf
    try:
        if isinstance(leaf, (str, bytes)):  # NumPy takes some for the name of a dtype
            raise TypeError
        return jnp.asarray(leaf)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be an array, got a {type(leaf).__name__}. {hint}") from None


def normalized_axis(axis: int, leaf: jax.Array, name: str) -> int:
    """Return the axis counted from the front, or a ValueError that names the array."""
    if not leaf.ndim:
        raise ValueError(
            f"{name} needs a batch axis, but has shape (). Leave a value that all rows share out of the batch "
            "arguments, or give it one entry for each row."
        )
    if not -leaf.ndim <= axis < leaf.ndim:
        raise ValueError(f"{name} has shape {leaf.shape}, so its batch axis cannot be {axis}. Set the axis to match.")
    return axis % leaf.ndim
