"""Terms whose norms do not cancel where those of inputs with an offset do."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..program.sums import wide
from .dense import einsum, is_direct
from .merging import FEW, merged
from .terms import Factor, Label, Term, Windows, is_half, narrowed, unit_sized


def centred(terms: Sequence[Term], dtype: Any) -> tuple[Term, ...]:
    """Return the same sum, of terms whose norms do not cancel where those of inputs with an offset do.

    Inputs with an offset, or that are almost equal, have products far larger than what is left of them where the
    cotangents add up to zero. So each product becomes one of factors without what their rows have in common, and one
    of that. A factor is not needed twice: the same are used for the sum over the examples.
    """
    terms = merged(terms, shared=True)
    if len(terms) == 1 and (any(isinstance(f, Windows) for f in terms[0].factors) or is_direct(terms[0])):
        return terms
    return tuple(part for t in terms for part in _centred(t, dtype))


def _centred(term: Term, dtype: Any) -> list[Term]:
    pairs: dict[tuple[int, ...], list[Label]] = {}
    entries = {k for p in term.places.values() for k in p.labels}
    for x in dict.fromkeys(x for f in term.factors for x in f.labels):
        holders = tuple(i for i, f in enumerate(term.factors) if x in f.labels)
        once = all(term.factors[i].labels.count(x) == 1 for i in holders)
        if term.sizes[x] > 1 and x not in entries and x not in term.out and len(holders) == 2 and once:
            pairs.setdefault(holders, []).append(x)
    if not pairs or term.centred or any(isinstance(f, Windows) for f in term.factors):
        return [term]
    if is_half(term):  # in which the rounding of what is left would count
        widened = [dataclasses.replace(f, array=f.array.astype(wide(f.array.dtype))) for f in term.factors]
        term = term.replace(factors=tuple(widened))
    pair = max(pairs, key=lambda pair: math.prod(term.sizes[x] for x in pairs[pair]))
    others = {i: unit_sized(f) for i, f in enumerate(term.factors) if i not in pair}
    sizes = [size for _, size in others.values() if size is not None]
    factors = tuple(others[i][0] if i in others else f for i, f in enumerate(term.factors))
    term = term.replace(factors=factors, scale=(*term.scale, *sizes))
    # A short axis may be that of what is compared, row by row.
    short = [[x] for x in pairs[pair] if term.sizes[x] <= FEW]
    long = [x for x in pairs[pair] if term.sizes[x] > FEW]
    parts = [(term, pairs[pair])]
    for shared in [*short, long] if long else short:
        split = [(met, _apart(t, pair, met, shared, dtype)) for t, met in parts]
        parts = [
            (t, labels)
            for met, (rest, means) in split
            for t, labels in ((rest, met), (means, [x for x in met if x not in shared]))
        ]
    return [t for t, _ in parts]


def _apart(term: Term, pair: tuple[int, ...], met: Sequence[Label], shared: Sequence[Label], dtype: Any) -> list[Term]:
    """Split two factors: what is orthogonal to one direction along some of the labels that they meet in, and the rest.

    Rows of both are brought to about the same size first, so that none loses digits beside a larger one whose partner
    is smaller; the direction is that of these sizes, so that of rows with an offset nothing is left but what they
    differ in. All sizes are powers of two, which round nothing: then rows of one size lose the very same. The factors
    themselves are brought to entries of about 1, for their products with one another.
    """
    # Without axes of length 1, which XLA would take off for the norm alone, in a second copy.
    rest = [narrowed(f, term) for f in term.factors]
    means = list(rest)
    axes = tuple(met.index(x) for x in shared)
    # A factor that all examples share stays one array: then the direction is that of its rows, in its own size.
    shares = [i for i in pair if not rest[i].batched]
    sizes = {i: _sizes(rest[i], met, dtype) for i in pair}
    one, two = (_exponents(sizes[i], axes) for i in (pair if len(shares) != 1 else shares * 2))
    limit = jnp.finfo(dtype).maxexp - 3
    whole = {i: jnp.clip(jnp.frexp(jnp.max(sizes[i]))[1], -limit, limit) for i in pair}
    ends = jnp.max(one + two, axes, keepdims=True)
    power = lambda exponent: jnp.ldexp(jnp.ones((), jnp.finfo(dtype).dtype), exponent)
    direction = power(one + two - ends)
    length = jnp.sum(jnp.square(direction), axes, keepdims=True)
    apart = [x for x in met if x not in shared]
    for i, stretch in zip(pair, (power(two - one), power(one - two)), strict=True):
        f = rest[i]
        # As a product, for which XLA writes out no array of this size.
        down, up = power(jnp.minimum(-whole[i], 0)), power(jnp.maximum(-whole[i], 0))
        weights = Factor((direction * stretch * down).astype(dtype), tuple(met), f.batched)
        left = tuple(x for x in f.labels if x not in shared)
        total = Factor(einsum([weights, f], left, term.sizes, dtype, jax.lax.Precision.HIGHEST) * up, left, f.batched)
        mean = dataclasses.replace(total, array=total.array / _along(jnp.squeeze(length, axes), total, apart))
        means[i] = mean if i == pair[0] else total
        common = jnp.expand_dims(mean.array, [f.labels.index(x) for x in shared])
        array = f.array * _along(stretch, f, met) * down * up - common * _along(direction, f, met)
        rest[i] = dataclasses.replace(f, array=array)
    scale = (*term.scale, *(Factor(power(whole[i]), (), rest[i].batched) for i in pair))
    return [term.replace(factors=tuple(factors), scale=scale, centred=True) for factors in (rest, means)]


def _sizes(f: Factor, met: Sequence[Label], dtype: Any) -> jax.Array:
    """Return the largest entry of each row of a factor, ``[met]``."""
    array, own = f.array.astype(dtype), tuple(i for i, x in enumerate(f.labels) if x not in met)
    if jnp.iscomplexobj(array):
        sizes = jnp.max(jnp.abs(array), own)
    else:  # XLA would write out the array of absolute values
        sizes = jnp.maximum(jnp.max(array, own), -jnp.min(array, own))
    sizes = jax.lax.optimization_barrier(sizes)  # else it would take the largest of all from the array again
    kept = [x for x in f.labels if x in met]
    return jax.lax.stop_gradient(sizes.transpose([kept.index(x) for x in met]))


def _exponents(sizes: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Return each size as a power of four of the largest one's along these axes."""
    largest = jnp.max(sizes, axes, keepdims=True)
    exponents = jnp.round(jnp.log2(sizes / jnp.where(largest == 0, 1, largest)) / 2)
    return jnp.clip(exponents, -60, 0).astype(jnp.int32)


def _along(values: Any, f: Factor, labels: Sequence[Label]) -> jax.Array:
    """Values with these labels, for a product with a factor that has them all."""
    order = [labels.index(x) for x in f.labels if x in labels]
    values = values.transpose(order)
    return jnp.expand_dims(values, [i for i, x in enumerate(f.labels) if x not in labels])
