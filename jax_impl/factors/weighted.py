"""The sum over examples of what pieces stand for: one product, with the examples' weights in a factor."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..program.sums import wide
from .dense import dense
from .pieces import Piece, stacked
from .terms import Factor, Label, Term, working


def sum_of(piece: Piece, arrays: Sequence[Any], axes: Sequence[int | None], rows: int, after: Any) -> jax.Array:
    """Return the sum over the examples of the arrays that a piece stands for, computed after another one if given."""
    total = jnp.zeros(piece.shape, wide(piece.dtype))
    for i, term in enumerate(piece.terms or ()):
        part = _sum_of_term(term, arrays, axes, rows, after, _working(term, arrays, total.dtype)).astype(total.dtype)
        total = part if i == 0 else total + part
    return total


def _working(term: Term, arrays: Sequence[Any], dtype: Any) -> Any:
    """Return the dtype to compute a packed term in."""
    put = lambda factors: tuple(dataclasses.replace(f, array=arrays[f.array]) for f in factors)
    return working([term.replace(factors=put(term.factors), scale=put(term.scale))], dtype)


def _sum_of_term(
    term: Term, arrays: Sequence[Any], axes: Sequence[int | None], rows: int, after: Any, dtype: Any
) -> jax.Array:
    weight = jnp.ones((), dtype)
    for f in term.scale:
        weight = weight * arrays[f.array].astype(dtype)
    if after is not None and term.scale:
        # Never so, which XLA cannot know. It computes independent products all before it adds the first to the sum of
        # the microbatches, and keeps them side by side.
        entry = after[(0,) * after.ndim].astype(dtype)
        weight = jnp.where(jnp.isnan(entry) & (entry > 0), entry, weight)
    mask = None if term.mask is None else arrays[term.mask]
    product = stacked(term.replace(scale=(), mask=None), arrays, axes, rows, None)
    label = next(x for x in product.sizes if x not in term.sizes)
    own = sum(label in f.labels for f in product.factors)
    if not own and not any(label in p.labels for p in product.places.values()):
        kept = weight if mask is None else jnp.where(mask, weight, 0)
        total = dense(product, dtype) * (jnp.sum(kept) if kept.ndim else kept * rows)
        return total if mask is None else jnp.where(jnp.any(mask), total, 0)
    # A single factor is masked as it is weighted. XLA then adds what is scattered to the sum of the microbatches in
    # place; a bias better shares what its layer weighs.
    if mask is None or (product.places and own < 2):
        total = dense(_weighted(product, label, weight, mask), dtype)
    else:
        # Zero times NaN is NaN: what a masked example holds has to be erased from each factor, which takes a copy.
        total = jax.lax.cond(
            jnp.all(mask),
            lambda: dense(_weighted(product, label, weight, None), dtype),
            lambda: dense(_weighted(product, label, weight, mask), dtype),
        )
    shared = any(label not in f.labels for f in product.factors)  # it may be what spoilt all examples
    return jnp.where(jnp.any(mask), total, 0) if mask is not None and shared else total


def _weighted(term: Term, label: Label, weight: Any, mask: Any) -> Term:
    """Return the term with the examples' weights in its smallest factor."""
    own = [i for i, f in enumerate(term.factors) if label in f.labels]
    smallest = min(own, key=lambda i: term.factors[i].stored, default=None)
    # Derivatives put the cotangent first. If it carries the weights, a layer's bias can share the product.
    if own and term.factors[own[0]].stored <= 2 * term.factors[smallest or 0].stored:
        smallest = own[0]
    factors = list(term.factors)

    def along(values: Any, f: Factor) -> Any:
        at = f.labels.index(label)
        return values.reshape([-1 if i == at else 1 for i in range(f.array.ndim)]) if values.ndim else values

    for i in own:
        f = factors[i]
        array = f.array
        if mask is not None:
            array = jnp.where(along(mask, f), array, 0)
        if i == smallest:
            w = weight if mask is None or not weight.ndim else jnp.where(mask, weight, 0)
            # In at least 32 bits: a weight far from 1 would not fit a half-precision factor.
            array = array.astype(jnp.promote_types(wide(array.dtype), w.dtype)) * along(w, f)
        factors[i] = dataclasses.replace(f, array=array, batched=False)
    if smallest is None:  # only indices differ between examples
        kept = weight if mask is None else jnp.where(mask, weight, 0)
        factors.append(Factor(jnp.broadcast_to(kept, (term.sizes[label],)), (label,), False))
    return term.replace(factors=tuple(factors))
