"""Sums over rows and over the steps of loops, fast on every backend, which do not lose small terms."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp


def wide(dtype: Any) -> Any:
    """Return the dtype to accumulate in: bfloat16 stops counting ones at 256, float32 holds its sums exactly enough."""
    is_narrow = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
    return jnp.dtype(jnp.float32 if is_narrow else dtype)


def is_narrow(dtype: Any) -> bool:
    """Tell whether it is a floating-point type that numbers of usual size do not fit: float16, or one of 8 bits."""
    return bool(jnp.issubdtype(dtype, jnp.floating) and (jnp.finfo(dtype).maxexp < 100 or not is_signed(dtype)))


def is_signed(dtype: Any) -> bool:
    """Tell whether a floating-point type has negative numbers; that of scales (float8_e8m0fnu) has not even a zero."""
    return bool(jnp.finfo(dtype).min < 0)


def summed(dtype: Any) -> Any:
    """Return the dtype of a sum over examples, as ``jnp.sum`` has it: booleans and narrow integers get wider ones.

    With 64-bit types, where a signed one holds every sum of narrow unsigned ones, it is that, as in torch.
    """
    if dtype != jnp.bool_ and not jnp.issubdtype(dtype, jnp.integer):
        return jnp.dtype(dtype)
    found = jax.eval_shape(jnp.sum, jax.ShapeDtypeStruct((), dtype)).dtype
    return jnp.dtype(jnp.int64) if found == jnp.uint64 != dtype else found


@dataclasses.dataclass(frozen=True)
class Sum:
    """The sum over axis 0 of an array ``[rows, ...]`` that never existed."""

    total: jax.Array
    rows: int
    dtype: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """The array's shape."""
        return (self.rows, *self.total.shape)


def sum_rows(values: Any, dtype: Any, product: bool = False) -> jax.Array:
    """Compute ``values.sum(axis=0, dtype=dtype)``, by the faster of two ways.

    XLA's CPU reduction over a leading axis takes 10 to 50 times as long as contracting it with a vector of ones (195
    against 3 ms for [64, 512, 512]). Where ``product`` tells that the values are a bare matrix product with the
    examples as its batch axis, the reduction is better: XLA merges the two, and the values never exist.
    """
    if isinstance(values, Sum):
        return values.total.astype(dtype)
    if product or values.ndim < 2 or not jnp.issubdtype(values.dtype, jnp.floating):
        return jnp.sum(values, axis=0, dtype=dtype)
    ones = jnp.ones(values.shape[0], values.dtype)
    dimensions = (((0,), (0,)), ((), ()))
    return jax.lax.dot_general(
        ones, values, dimensions, precision=jax.lax.Precision.HIGHEST, preferred_element_type=dtype
    )


class Shared:
    """Arrays that the steps of a loop share, such that their gradients add up in float32 where they are narrower.

    A gradient of what every step reads is a sum over steps, which JAX makes in the array's own dtype: in bfloat16,
    that of a thousand steps stalls at 256. Here a derivative goes through a wide copy, made before the loop, which
    each step narrows: its transpose widens each step's part, and rounds the sum once. Unless something is
    differentiated nobody reads the copy, and it is not made.
    """

    def __init__(self, arrays: Sequence[Any]) -> None:
        self._arrays = [(x, x.astype(wide(x.dtype)) if _is_summed_wide(x) else None) for x in arrays]

    def read(self) -> list[Any]:
        """Return the arrays, for a step."""
        return [x if copy is None else _narrowed(jax.lax.stop_gradient(x), copy) for x, copy in self._arrays]


def _is_summed_wide(x: Any) -> bool:
    # Only what is traced has a derivative.
    return isinstance(x, jax.core.Tracer) and jnp.issubdtype(x.dtype, jnp.floating) and wide(x.dtype) != x.dtype


@jax.custom_jvp
def _narrowed(x: jax.Array, copy: jax.Array) -> jax.Array:
    return x


@_narrowed.defjvp
def _narrowed_jvp(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[jax.Array, jax.Array]:
    return _narrowed(*primals), tangents[1].astype(primals[0].dtype)  # again, for the next derivative
