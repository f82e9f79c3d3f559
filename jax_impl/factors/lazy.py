"""Arrays of a program that are not computed: sums of products of stored factors."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..program.sums import wide
from .dense import dense
from .terms import Factor, Term, consistent, lengths, whole, working


@dataclasses.dataclass(frozen=True)
class Lazy:
    """An array that is a sum of terms, not computed."""

    shape: tuple[int, ...]
    dtype: Any
    terms: tuple[Term, ...]

    @property
    def stored(self) -> int:
        """Elements kept for each example; an array that several terms have is kept once."""
        return sum({id(f.array): f.stored for t in self.terms for f in t.factors if f.batched}.values())

    @property
    def is_array(self) -> bool:
        """Whether it is one array, at most moved and scaled."""
        return (
            len(self.terms) == 1
            and len(self.terms[0].factors) == 1
            and not self.terms[0].places
            and (self.stored == math.prod(self.shape))
        )

    def fits(self, aval: Any) -> bool:
        """Tell whether it stands for an array of this type: its terms have the shape, factors that of their labels."""
        same = self.shape == aval.shape and self.dtype == aval.dtype
        return same and all(lengths(t) == self.shape and consistent(t) for t in self.terms)

    def dense(self) -> jax.Array:
        """Return the array."""
        total = jnp.zeros(self.shape, self.dtype)
        for i, term in enumerate(self.terms):
            part = dense(term, working([term], self.dtype))
            total = part if i == 0 else total + part
        return total.astype(self.dtype)

    def map(self, change: Callable[[Term], Term | None], shape: Sequence[int] | None = None) -> Lazy:
        """Return the sum of the changed terms; None drops one."""
        terms = tuple(t for t in map(change, self.terms) if t is not None)
        return Lazy(self.shape if shape is None else tuple(shape), self.dtype, terms)

    def plus(self, value: Any, batched: bool) -> Lazy:
        """Return the sum with another lazy value, or with an array."""
        terms = value.terms if isinstance(value, Lazy) else (whole(value, batched),)
        return Lazy(self.shape, self.dtype, (*self.terms, *terms))

    def times(self, scalar: Any, batched: bool) -> Lazy:
        """Return the product with a number."""
        factor = Factor(jnp.asarray(scalar, wide(self.dtype) if isinstance(scalar, float) else None), (), batched)
        return self.map(lambda t: t.replace(scale=(*t.scale, factor)))


@dataclasses.dataclass(frozen=True)
class Squares:
    """The squares of a lazy value's entries, of which only the sum will be asked for."""

    of: Lazy

    def dense(self) -> jax.Array:
        """Return the array."""
        return jnp.square(self.of.dense())
