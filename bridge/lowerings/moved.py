"""Ops that no op of torch's is: several of a recording in one."""

from __future__ import annotations

import dataclasses

import jax
from jax import Array

from ..memory.dtypes import jax_dtype
from .signatures import Forms

Pair = tuple[tuple[int, ...], tuple[int, ...]]  # of axes of the left operand and of the right one


@dataclasses.dataclass(frozen=True)
class Product:
    """A product of two arrays, summed over some axes; the result has the axes of the batch, and then the others."""

    summed: Pair
    batch: Pair

    def lower(self, a: Array, b: Array, *, _results: Forms, _key: Array | None) -> Array:
        return jax.lax.dot_general(a, b, (self.summed, self.batch), preferred_element_type=a.dtype)


@dataclasses.dataclass(frozen=True)
class SumFromEnd:
    """The sum of each element and all behind it."""

    axis: int

    def lower(self, x: Array, *, _results: Forms, _key: Array | None) -> Array:
        return jax.lax.cumsum(x.astype(jax_dtype(_results[0].dtype)), self.axis, reverse=True)
