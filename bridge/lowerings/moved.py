"""Ops that no op of torch's is: several of a recording in one."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from ..memory.dtypes import jax_dtype
from .signatures import Forms

Dimensions = tuple[tuple[int, ...], tuple[int, ...]]  # of axes of the left operand and of the right one


@dataclasses.dataclass(frozen=True)
class Product:
    """A product of two arrays, summed over some axes; the result has the axes of the batch, and then the others."""

    summed: Dimensions
    batch: Dimensions

    def lower(self, a: Array, b: Array, *, _results: Forms, _key: Array | None) -> Array:
        return jax.lax.dot_general(a, b, (self.summed, self.batch), preferred_element_type=a.dtype)


@dataclasses.dataclass(frozen=True)
class SumFromEnd:
    """The sum of each element and all behind it."""

    axis: int

    def lower(self, x: Array, *, _results: Forms, _key: Array | None) -> Array:
        return jax.lax.cumsum(x.astype(jax_dtype(_results[0].dtype)), self.axis, reverse=True)


@dataclasses.dataclass(frozen=True)
class SumOfQuotients:
    """The sum of ``g * ((x / divisor) / divisor)`` over axes over which the divisor is spread, which are kept.

    Only the sum is divided the second time. The quotients are those of the forward pass: XLA would keep them, or the
    divisor spread out, as an array to read here. A barrier lets it compute them anew within the sum.
    """

    shape: tuple[int, ...]

    def spread(self, divisor: Array) -> Array:
        return jnp.broadcast_to(jax.lax.optimization_barrier(divisor), self.shape)

    def lower(self, x: Array, inner: Array, g: Array, outer: Array, *, _results: Forms, _key: Array | None) -> Array:
        """Take the divisor twice: ``inner``, which may be spread out already, and ``outer``."""
        shape = _results[0].shape
        wide = jnp.promote_types(jax_dtype(_results[0].dtype), jnp.float32)
        x, inner, g, outer = (v.astype(wide) for v in (x, inner, g, outer))
        terms = jnp.broadcast_to(g * (x / jax.lax.optimization_barrier(inner)), self.shape)
        axes = tuple(i for i, n in enumerate(self.shape) if not shape or n != shape[i])
        return terms.sum(axes, keepdims=bool(shape)) / outer
