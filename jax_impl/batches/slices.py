"""Results written one slice after another: a loop over slices, and a write whose derivative costs no more than it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ..program.trees import PyTree, as_varying


def over_slices(step: Callable[[PyTree, Any, int], PyTree], carry: PyTree, count: int, size: int) -> PyTree:
    """Run ``for start in range(0, count, size): carry = step(carry, start, rows)``, the full slices in one scan.

    ``rows`` is ``size``, and the rest in a last slice that is shorter. A single slice needs no loop.
    """
    full, left = divmod(count, size)
    if full > 1:
        carry = as_varying(lambda c: step(c, jnp.zeros((), jnp.int32), size), carry)
        starts = jnp.arange(full, dtype=jnp.int32) * size
        carry, _ = jax.lax.scan(lambda c, start: (step(c, start, size), None), carry, starts)
    elif full:
        carry = step(carry, 0, size)
    return step(carry, full * size, left) if left else carry


def write_rows(buffer: jax.Array, rows: jax.Array, start: Any, axis: int) -> jax.Array:
    """Put rows into the buffer, at a place that holds zeros and is written only this once.

    XLA writes in place. By JAX's own rule, the derivative of such a write in a loop erases the rows from the gradient
    of the whole buffer, with a copy of it in every step: time that grows with the square of the length. Where zeros are
    overwritten, adding is the same as writing, and the transpose of an addition only reads.
    """
    return _write(axis, buffer, rows, jnp.asarray(start, jnp.int32))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _write(axis: int, buffer: jax.Array, rows: jax.Array, start: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(buffer, rows, start, axis)


@_write.defjvp
def _write_jvp(axis: int, primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[jax.Array, Any]:
    (*_, start), (buffer, rows, _) = primals, tangents
    moved = buffer
    if jnp.issubdtype(buffer.dtype, jnp.inexact):
        numbers = jax.lax.ScatterDimensionNumbers(tuple(range(buffer.ndim)), (), (axis,))
        moved = jax.lax.scatter_add(buffer, start[None], rows, numbers, unique_indices=True, mode="promise_in_bounds")
    return _write(axis, *primals), moved
