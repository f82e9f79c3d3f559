"""Sums over rows that are fast on every backend and do not lose small terms."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp


def wide(dtype: Any) -> Any:
    """The dtype to accumulate in: bfloat16 stops counting ones at 256, float32 holds its sums exactly enough."""
    if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32:
        return jnp.dtype(jnp.float32)
    return summed(dtype)


def is_narrow(dtype: Any) -> bool:
    """Whether it is a floating-point type that numbers of usual size overflow: float16, or one of 8 bits."""
    return bool(jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).maxexp < 100)


def summed(dtype: Any) -> Any:
    """The dtype of a sum over examples: the same, but booleans are counted."""
    return jax.dtypes.canonicalize_dtype(int) if dtype == jnp.bool_ else jnp.dtype(dtype)


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
    """``values.sum(axis=0, dtype=dtype)``, by the faster of two ways.

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
