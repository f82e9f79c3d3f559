"""Jacobians and Hessians to be computed, in flattened coordinates: arguments checked, ready to be cut into blocks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun
from jax.flatten_util import ravel_pytree

from ..program.convolutions import run_whole
from ..program.trees import (
    Function,
    PyTree,
    as_array,
    check_width,
    flatten_with_names,
    positive,
    structure,
)
from .blocks import Layout, Matrix, Unflatten
from .loop import Traced


def hessian_matrix(
    f: Function, x: PyTree, checkpoint: bool, nbatches: int, batch_size: int | None, max_bytes: int | None = None
) -> Matrix:
    """Return the Hessian, to be computed; check the arguments."""
    fun, output, vector, unflatten = _flat(f, x, checkpoint)
    if output.shape or not jnp.issubdtype(output.dtype, jnp.floating):
        raise TypeError(
            f"f must return a real number of shape () for a Hessian, got {output.dtype.name}{list(output.shape)}. "
            "Reduce it, for instance by a sum."
        )
    n = len(vector)
    size = _size(n, n, nbatches, batch_size, max_bytes)
    layout = Layout("hessian", n, (), vector.dtype, vector.dtype, size, vector.weak_type)
    # As in jax.hessian: for the same products, XLA plans up to a fifth less memory than around jax.grad.
    return Matrix(vector, unflatten, lambda v: jax.linearize(jax.jacrev(fun), v)[1], layout).within(max_bytes)


def jacobian_matrix(
    f: Function,
    x: PyTree,
    checkpoint: bool,
    mode: str,
    nbatches: int,
    batch_size: int | None,
    max_bytes: int | None = None,
    *,
    forward: bool = True,
) -> Matrix:
    """Return the Jacobian, to be computed; check the arguments. Without ``forward``, ``"auto"`` means rows."""
    if mode not in ("auto", "forward", "reverse"):
        raise ValueError(f"mode must be 'auto', 'forward' or 'reverse', got {mode!r}.")
    fun, output, vector, unflatten = _flat(f, x, checkpoint)
    if not jnp.issubdtype(output.dtype, jnp.inexact):
        raise TypeError(f"f must return floating-point numbers for a Jacobian, got {output.dtype.name}.")
    is_complex = jnp.issubdtype(output.dtype, jnp.complexfloating)
    if is_complex and mode == "reverse":
        raise TypeError(f"f returns {output.dtype.name}, whose rows have no reverse mode. Use mode='forward'.")
    n, m = len(vector), math.prod(output.shape)
    reverse = mode == "reverse" or (mode == "auto" and (m < n or not forward) and not is_complex)
    # What nbatches may be does not depend on what "auto" decides.
    size = _size(m if reverse else n, m if mode == "reverse" else n, nbatches, batch_size, max_bytes)
    dtype, weak = (output.dtype, False) if is_complex else (vector.dtype, vector.weak_type)
    if reverse:
        layout = Layout("reverse", n, output.shape, dtype, output.dtype, size, weak)
        return Matrix(vector, unflatten, lambda v: jax.vjp(fun, v)[1], layout).within(max_bytes)
    layout = Layout("forward", n, output.shape, dtype, vector.dtype, size, weak)
    return Matrix(vector, unflatten, lambda v: jax.linearize(fun, v)[1], layout).within(max_bytes)


def _flat(f: Function, x: PyTree, checkpoint: bool) -> tuple[Function, Any, jax.Array, Unflatten]:
    """Return ``f`` as a function of a vector, what it returns, the vector that stands for ``x``, and the way back."""
    if not callable(f):
        raise TypeError(f"f must be callable, got {f!r}.")
    named, treedef = flatten_with_names(x, "x")
    leaves = [as_array(leaf, name, "Use it in f by a closure.") for name, leaf in named]
    for (name, _), leaf in zip(named, leaves, strict=True):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            raise TypeError(f"{name} holds random keys, which have no derivative. Use them in f by a closure.")
        if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
            raise TypeError(
                f"{name} is {leaf.dtype.name}, but coordinates are real. Make its real and imaginary part two leaves."
            )
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            check_width(leaf, name)
    vector, unflatten = ravel_pytree(treedef.unflatten(leaves))
    if len(vector) and not jnp.issubdtype(vector.dtype, jnp.floating):
        found = ", ".join(f"{name} is {leaf.dtype.name}" for (name, _), leaf in zip(named, leaves, strict=True))
        raise TypeError(f"x is to be differentiated, but holds no floating-point number: {found}. Cast it to a float.")

    def of_vector(v: jax.Array) -> Any:
        # Integers would lose digits on their way through the vector's dtype.
        moved = zip(jax.tree.leaves(unflatten(v)), leaves, strict=True)
        return f(treedef.unflatten([m if jnp.issubdtype(m.dtype, jnp.inexact) else leaf for m, leaf in moved]))

    # Within a loop, where a checkpoint is computed, convolutions need their channels last; outside XLA sees to that.
    as_it_is = lambda closed, *args: jaxpr_as_fun(closed)(*args)
    traced = Traced(of_vector, [vector], run_whole if checkpoint else as_it_is)
    if not jax.tree_util.treedef_is_leaf(traced.treedef):
        raise TypeError(f"f must return a single array, got {traced.treedef}. Join them: ravel_pytree(f(x))[0].")
    fun: Function = traced
    return jax.checkpoint(fun) if checkpoint else fun, traced.output, vector, unflatten


def _size(count: int, most: int, nbatches: int, batch_size: int | None, max_bytes: int | None) -> int:
    """Return how many of ``count`` rows or columns are in a block; ``most`` is what ``nbatches`` may be at most."""
    nbatches = check_one_size(nbatches, batch_size, max_bytes)
    if max_bytes is not None:
        return 1
    if batch_size is not None:
        return min(positive("batch_size", batch_size, "or None"), max(count, 1))
    if nbatches > max(most, 1):
        raise ValueError(
            f"nbatches={nbatches} is more than the {most} rows or columns there are. Choose at most {max(most, 1)}."
        )
    return max(-(-count // nbatches), 1)


def check_one_size(nbatches: int, batch_size: int | None, max_bytes: int | None) -> int:
    """Return ``nbatches``; refuse more than one option that sets the size of a block."""
    nbatches = positive("nbatches", nbatches)
    options = {"nbatches": None if nbatches == 1 else nbatches, "batch_size": batch_size, "max_bytes": max_bytes}
    given = [f"{name}={value}" for name, value in options.items() if value is not None]
    if len(given) > 1:
        raise ValueError(f"pass one of nbatches, batch_size and max_bytes, got {', '.join(given)}.")
    if max_bytes is not None:
        positive("max_bytes", max_bytes, "or None")
    return nbatches


def coordinates(v: PyTree, x: PyTree) -> tuple[jax.Array, Callable[[jax.Array], Any]]:
    """Return a vector to multiply with, and how to bring the product into the form that it was given in."""
    like, unflatten = ravel_pytree(x)
    named, treedef = flatten_with_names(v, "v")
    arrays = [as_array(leaf, name, "") for name, leaf in named]
    for (name, _), leaf in zip(named, arrays, strict=True):
        if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
            raise TypeError(f"{name} is {leaf.dtype.name}, but x is real. Multiply its real and imaginary part apart.")
    as_tree = treedef == structure(x)
    expected = [np.shape(leaf) for leaf in jax.tree.leaves(x)]
    if as_tree and [leaf.shape for leaf in arrays] == expected:
        pieces = [leaf.astype(like.dtype).ravel() for leaf in arrays]
        return jnp.concatenate(pieces) if pieces else like, unflatten
    if len(arrays) == 1 and treedef == structure(0) and arrays[0].shape == like.shape:
        return arrays[0].astype(like.dtype), lambda product: product
    if not as_tree:
        raise ValueError(f"v must be a tree like x, {structure(x)}, or a vector of {len(like)}, got {treedef}.")
    wrong = next((n, leaf, e) for (n, _), leaf, e in zip(named, arrays, expected, strict=True) if leaf.shape != e)
    raise ValueError(
        f"v must have the shapes of x, or be a vector of {len(like)}: {wrong[0]} has {wrong[1].shape}, x has "
        f"{wrong[2]} there."
    )
