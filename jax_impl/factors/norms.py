"""Norms and inner products of terms, from their factors or from the array, whichever multiplies less."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..program.sums import wide
from .centring import centred
from .dense import einsum, entries_of, is_direct, scaled
from .terms import Factor, Label, Places, Term, expanded, matched, new_label, read_at, unit_sized, working
from .windows import over_taps


def squared_norm(terms: Sequence[Term], dtype: Any) -> jax.Array:
    """Return the squared norm of a sum of terms, products of different terms included."""
    if not terms:
        return jnp.zeros((), wide(dtype))
    dtype = working(terms, dtype)
    found = over_taps(terms, lambda *parts: squared_norm(parts, dtype))
    if found is not None:
        return jnp.sum(found[0])
    terms = [t.replace(factors=tuple(expanded(t.factors))) for t in terms]
    terms = centred(terms, dtype)
    if len(terms) > 1 or not is_direct(terms[0]) or _has_unusual_scale(terms[0]):
        terms = [balanced(t) for t in terms]
    total = jnp.zeros((), dtype)
    for i, a in enumerate(terms):
        total = total + _masked(self_inner(a, dtype), a.mask)
        for b in terms[:i]:
            product = inner(a, b, dtype)
            if product is not None:
                total = total + 2 * _masked(_masked(product, a.mask), b.mask)
    # Where entries of a product cancel, rounding may leave less than nothing.
    return _trusted(jnp.maximum(total, 0), terms, dtype)


def self_inner(term: Term, dtype: Any) -> jax.Array:
    """Return the squared norm of a term: by Gram matrices or from the array itself, whichever multiplies less."""
    if is_direct(term):
        values = einsum(expanded(term.factors), entries_of(term), term.sizes, dtype, jax.lax.Precision.HIGHEST)
        return jnp.sum(jnp.square(scaled(values, term.scale)))
    value = _at_entries(term, dtype) if _is_placed(term) else inner(term, term, dtype)
    return jnp.zeros((), dtype) if value is None else value


def inner(a: Term, b: Term, dtype: Any) -> jax.Array | None:
    """Return the inner product of two terms of one shape; None where it is zero whatever the factors hold."""
    zero = jnp.zeros((), dtype)
    found = over_taps([a, b], lambda s, t: zero if (value := inner(s, t, dtype)) is None else value)
    if found is not None:
        return jnp.sum(found[0])
    a, b = matched(a, b.fresh(), [(i, i) for i in range(len(a.axes))])
    sizes = a.sizes | b.sizes
    table: dict[Label, Label] = {}
    pairs: list[tuple[Places, Places]] = []
    gathered: list[tuple[bool, Label, Places]] = []
    # An axis of length 1 may have a label in one and none in the other.
    both = [pair for pair in zip(a.axes, b.axes, strict=True) if all(pair)]
    for x, y in [labels for pair in both for labels in zip(*pair, strict=True)]:
        at_x, at_y = a.places.get(x), b.places.get(y)
        if at_x is None and at_y is None:
            table[y] = x
        elif at_x is not None and at_y is not None:
            if at_x.static and at_y.static:
                if not np.isin(at_x.index, at_y.index).any():
                    return None
                if (
                    at_x.index.shape == at_y.index.shape
                    and (at_x.index == at_y.index).all()
                    and at_x.labels != at_y.labels
                ):
                    table.update(zip(at_y.labels, at_x.labels, strict=True))
                    continue
            pairs.append((at_x, at_y))
        else:
            gathered.append((at_x is not None, y if at_x is not None else x, at_x or at_y))  # type: ignore[arg-type]
    ours, theirs = expanded(a.factors), expanded(b.factors)
    for from_b, label, p in gathered:
        if from_b:
            theirs = read_at(theirs, label, p)
        else:
            ours = read_at(ours, label, p)
    theirs = [dataclasses.replace(f, labels=tuple(table.get(x, x) for x in f.labels)) for f in theirs]
    factors = [*ours, *theirs]
    placed = [tuple(table.get(k, k) for p in pair for k in p.labels) for pair in pairs]
    uses = collections.Counter(k for labels in [*(f.labels for f in factors), *placed] for k in set(labels))
    held = uses.keys() | {label for _, label, _ in gathered}
    for (at_x, at_y), labels in zip(pairs, placed, strict=True):
        alone = len(set(labels)) == len(labels) and all(uses[k] == 1 for k in labels)
        batched = at_x.batched or at_y.batched
        if alone:
            factors.append(Factor(_meetings(at_x, at_y).astype(dtype), (), batched))
        else:
            left, right = _compared(at_x, at_y)
            met = left.reshape(*left.shape, *[1] * right.ndim) == right
            factors.append(Factor(met.astype(dtype), labels, batched))
    value = einsum(factors, (), sizes, dtype, jax.lax.Precision.HIGHEST)
    # A label that no factor has is an axis along which the product is constant.
    free = [x for t in (a, b) for x in t.out if x not in t.places]
    free += [k for t in (a, b) for p in t.places.values() for k in p.labels]
    value = value * math.prod(sizes[x] for x in dict.fromkeys(table.get(x, x) for x in free) if x not in held)
    one = jnp.ones((), value.dtype)
    return value * scaled(one, a.scale) * scaled(one, b.scale)  # each by itself: together they might overflow


def _compared(x: Places, y: Places) -> tuple[jax.Array, jax.Array]:
    """Return the indices of both, equal where entries meet: not where neither stands anywhere."""
    right = jnp.asarray(y.index)
    return jnp.asarray(x.index), right if x.static or y.static else jnp.where(right < y.size, right, -1)


def _meetings(x: Places, y: Places) -> jax.Array:
    """Return how many pairs of entries meet; in a loop, as XLA on CPU would write out all comparisons to sum them."""
    left, right = _compared(x, y)
    count = lambda _, i: (None, jnp.sum(i == right, dtype=jnp.int32))
    return jnp.sum(jax.lax.scan(count, None, left.reshape(-1), unroll=8)[1])


def _is_placed(term: Term) -> bool:
    """Tell whether it is one array, put in places along one axis, as the gradient of an embedding is."""
    if len(term.places) != 1 or len(term.factors) != 1:
        return False
    (p,), (f,) = term.places.values(), term.factors
    plain = [x for x in term.out if x not in term.places]
    return not p.static and len({*p.labels, *plain}) == len(p.labels) + len(plain) and set(p.labels) <= set(f.labels)


def _at_entries(term: Term, dtype: Any) -> jax.Array:
    """Return the squared norm from what stands, in all, in the place of each entry, as the array has it.

    The products of entries that stand in one place might cancel.
    """
    (p,), plain = term.places.values(), [x for x in term.out if x not in term.places]
    copy = {k: new_label() for k in p.labels}
    left, right = _compared(p, p)
    met = left == right.reshape(*right.shape, *[1] * left.ndim)
    same = Factor(met, (*copy.values(), *p.labels), p.batched)
    sizes = term.sizes | {copy[k]: term.sizes[k] for k in p.labels}
    values = einsum([*expanded(term.factors), same], [*copy.values(), *plain], sizes, dtype, jax.lax.Precision.HIGHEST)
    count = jnp.sum(met, tuple(range(right.ndim, met.ndim)), dtype=dtype)
    squares = jnp.sum(jnp.square(scaled(values, term.scale)), tuple(range(right.ndim, values.ndim)))
    return jnp.sum(squares / jnp.maximum(count, 1))


def _trusted(total: Any, terms: Sequence[Term], dtype: Any) -> jax.Array:
    """Return a squared norm that rounding has not made too small.

    A sum of products of factors (Gram matrices, several terms) loses digits where they cancel, which the gradient
    itself keeps: inputs with an offset, whose cotangents add up to zero. Where less than two digits are left, the norm
    is taken for as large as it may be: an example is then clipped more than it had to be, but never less.
    """
    exact = lambda t: is_direct(t) or _is_placed(t) or all(n == 1 for n in _summed(t).values())
    if len(terms) == 1 and exact(terms[0]):
        return total
    reach = sum(_reach(t, dtype) for t in terms)
    error = jnp.square(2 * math.sqrt(jnp.finfo(dtype).eps) * reach)
    return jnp.where(total < 100 * error, total + error, total)


def _reach(term: Term, dtype: Any) -> jax.Array:
    """Return what the norm of a term would be if nothing in it cancelled."""
    kept = {x for x in term.out if x not in term.places}
    lengths = []
    for f in term.factors:
        square = jnp.square(f.array.astype(dtype))
        own = tuple(i for i, x in enumerate(f.labels) if x in kept)
        labels = tuple(x for x in f.labels if x not in kept)
        lengths.append(Factor(jnp.sqrt(jnp.sum(square, own)), labels, f.batched))
    value = einsum(lengths, (), term.sizes, dtype, jax.lax.Precision.HIGHEST)
    return _masked(jnp.abs(scaled(value, term.scale)), term.mask)


def _summed(term: Term) -> dict[Label, int]:
    """Return the labels that are summed over, or that meet where indices do, with their lengths."""
    kept = {x for x in term.out if x not in term.places}
    return {x: term.sizes[x] for f in term.factors for x in f.labels if x not in kept}


def balanced(term: Term) -> Term:
    """Bring factors to entries up to 1: their own squares may leave the range in which those of the product are."""
    several = sum(f.array.dtype != jnp.bool_ for f in term.factors) > 1
    if term.centred or not (several or _has_unusual_scale(term)):
        return term
    found = [unit_sized(f) for f in term.factors]
    return term.replace(
        factors=tuple(f for f, _ in found), scale=(*term.scale, *(size for _, size in found if size is not None))
    )


def _has_unusual_scale(term: Term) -> bool:
    usual = lambda x: not isinstance(x, jax.core.Tracer) and 1e-6 < abs(float(x)) < 1e6
    return not all(usual(f.array) for f in term.scale)


def _masked(value: jax.Array, mask: Any) -> jax.Array:
    return value if mask is None else jnp.where(mask, value, 0)
