"""Terms that differ only in what they sum over, joined to one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from ..program.sums import wide
from .dense import scaled
from .terms import Factor, Label, Places, Term, Windows, new_label

FEW = 4  # a pair, a triplet: what a loss may compare


def merged(terms: Sequence[Term], shared: bool = False) -> tuple[Term, ...]:
    """Join terms that differ only in what they sum over, their factors along that axis.

    With ``shared`` also those whose factors are the same for all examples, where only a norm will be taken.
    """
    groups: dict[Any, list[Term]] = {}
    for term in terms:
        key = _kind(term, shared)
        groups.setdefault(key if key is not None else object(), []).append(term)
    return tuple(_joined(group) if len(group) > 1 else group[0] for group in groups.values())


def _kept(term: Term) -> list[Label]:
    """Return the labels not summed over, row-major: those of known places stand for the axis that they are put in."""
    placed = {x: p.labels for x, p in term.places.items() if p.static}
    return [k for x in term.out for k in placed.get(x, (x,))]


def _kind(term: Term, shared: bool) -> Any:
    """Return what terms have to share to be joined; None for one that cannot be."""
    out, places = _kept(term), {x: p for x, p in term.places.items() if not p.static}
    summed = {x for f in term.factors for x in f.labels} | {k for p in places.values() for k in p.labels}
    summed = {x for x in summed - set(out) if term.sizes[x] != 1}
    parts = [f.labels for f in term.factors] + [p.labels for p in places.values()]
    if any(isinstance(f, Windows) or not (f.batched or shared) for f in term.factors) or term.mask is not None:
        return None
    if any(not summed <= set(labels) for labels in parts) or any(len(set(labels)) < len(labels) for labels in parts):
        return None
    if term.centred or len(set(out)) < len(out) or not term.factors:
        return None
    sizes = tuple(tuple(term.sizes[x] for x in axis) for axis in term.axes)
    held = tuple(sorted(tuple(i for i, x in enumerate(out) if x in f.labels) for f in term.factors))
    placed = tuple(i for i, x in enumerate(out) if x in places)
    known = tuple((term.out.index(x), p.index.shape, p.index.tobytes()) for x, p in term.places.items() if p.static)
    dtypes = tuple(f.array.dtype for f in term.factors)
    return sizes, held, placed, known, str(term.precision), dtypes if len(set(dtypes)) > 1 else dtypes[:1]


def _joined(terms: Sequence[Term]) -> Term:
    first, label, row = terms[0], new_label(), new_label()
    columns: list[list[Factor]] = [[] for _ in first.factors]
    indices: dict[int, list[Places]] = {}
    counts = []
    for term in map(folded, terms):
        out = _kept(term)
        summed = sorted(x for x in set(term.factors[0].labels) - set(out) if term.sizes[x] != 1)
        counts.append(math.prod(term.sizes[x] for x in summed))
        position = lambda f, out=out: tuple(i for i, x in enumerate(out) if x in f.labels)
        for column, f in zip(columns, sorted(term.factors, key=position), strict=True):
            kept = [x for x in out if x in f.labels]
            single = [x for x in f.labels if x not in kept and x not in summed]
            array = f.array.transpose([f.labels.index(x) for x in (*single, *summed, *kept)])
            array = array.reshape(counts[-1], *(term.sizes[x] for x in kept))
            column.append(Factor(array, tuple(i for i, x in enumerate(out) if x in f.labels), f.batched))
        for x, p in term.places.items():
            if not p.static:
                flat = jnp.transpose(p.index, [p.labels.index(k) for k in summed]).reshape(counts[-1])
                indices.setdefault(out.index(x), []).append(dataclasses.replace(p, index=flat))
    # A few of the same length stay apart, as what is compared may be: each row with that of the others.
    apart = len(terms) <= FEW and counts[0] > 1 and len(set(counts)) == 1
    rows = (label, row) if apart else (label,)
    lengths = (len(terms), counts[0]) if apart else (sum(counts),)
    join = lambda arrays: jnp.concatenate(arrays).reshape(*lengths, *arrays[0].shape[1:])
    out = _kept(first)
    factors = tuple(
        Factor(
            join([f.array for f in column]),
            (*rows, *(out[i] for i in column[0].labels)),
            any(f.batched for f in column),
        )
        for column in columns
    )
    places = {x: p for x, p in first.places.items() if p.static} | {
        out[i]: Places(join([p.index for p in ps]), rows, ps[0].size, any(p.batched for p in ps))
        for i, ps in indices.items()
    }
    sizes = {x: first.sizes[x] for x in (*first.out, *out)} | dict(zip(rows, lengths, strict=True))
    return Term(factors, first.axes, sizes, places, (), None, first.precision)


def folded(term: Term) -> Term:
    """Return the term with its scale multiplied into the smallest factor."""
    if not term.scale or not term.factors:
        return term
    factors = list(term.factors)
    is_mask = lambda f: f.array.dtype == jnp.bool_
    i = min(range(len(factors)), key=lambda i: (is_mask(factors[i]), not factors[i].batched, factors[i].stored))
    f = factors[i]
    dtype = term.scale[0].array.dtype if is_mask(f) else f.array.dtype
    value = scaled(f.array.astype(wide(dtype)), term.scale)
    factors[i] = dataclasses.replace(f, array=value, batched=f.batched or any(s.batched for s in term.scale))
    return term.replace(factors=tuple(factors), scale=())
