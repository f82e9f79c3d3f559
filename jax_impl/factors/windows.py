"""Terms with windows of a convolution, computed at one tap after another: the shifted copies never exist together."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .terms import Factor, Label, Term, Windows


def over_taps(terms: Sequence[Term], compute: Callable[..., Any]) -> tuple[Any, list[int]] | None:
    """Compute something of terms of one shape at each tap of a convolution window, ``[taps, ...]``; None without one.

    Some axes of the window one tap after another, in a loop: at no time do all the shifted copies of the input exist.
    With it comes the order of the terms' axes in what is computed: the taps are first, those of the loop of length 1.
    """
    found = [(t, f) for t in terms for f in t.factors if isinstance(f, Windows)]
    if not found or any(found[0][0].axes.count((k,)) != 1 for k in found[0][1].tap_labels):
        return None
    window, cuts = found[0][1], []
    looped = _looped(terms[0], window) if len(terms) == 1 else len(window.taps)
    first = [found[0][0].axes.index((k,)) for k in window.tap_labels]
    # Else XLA makes the windows anew with the taps as their last axis, which takes longer than the product.
    order = [*first, *(axis for axis in range(len(found[0][0].axes)) if axis not in first)]
    where = first[:looped]
    for t in terms:
        taps = {label: i for i, axis in enumerate(where) for label in t.axes[axis]}
        placed = {k for p in t.places.values() for k in p.labels} | t.places.keys()
        if any(len(t.axes[axis]) > 1 for axis in where) or any(k in placed or t.out.count(k) > 1 for k in taps):
            return None
        cuts.append(_cut_at_taps(t, taps, order))

    counts = window.taps[:looped]

    def at(number: Any) -> Any:
        tap = [number // math.prod(counts[axis + 1 :]) % n for axis, n in enumerate(counts)]
        return compute(*(cut(tap) for cut in cuts))

    count = math.prod(counts)
    parts = at(0)[None] if count == 1 else jax.lax.map(at, jnp.arange(count, dtype=jnp.int32))
    return parts.reshape(*counts, *parts.shape[1:]), order


def _looped(term: Term, window: Windows) -> int:
    """Return how many spatial axes to loop over, from the first.

    The windows of the others are no larger than the one factor that they are multiplied with, which is read less often
    then: that matters where there are few channels. With more factors, products of some of them would be larger.
    """
    looped, others = len(window.taps), [f for f in term.factors if f is not window]
    size = math.prod(window.array.shape[: window.array.ndim - looped]) * math.prod(window.positions)
    while looped and len(others) == 1 and size * window.taps[looped - 1] <= others[0].stored:
        looped -= 1
        size *= window.taps[looped]
    return looped


def _cut_at_taps(term: Term, taps: dict[Label, int], order: Sequence[int]) -> Callable[[Sequence[Any]], Term]:
    """For a place in each of some axes of the result, by their labels: the term there, its axes in the order."""
    axes = tuple(() if axis and axis[0] in taps else axis for axis in (term.axes[i] for i in order))
    inside = [isinstance(f, Windows) and f.tap_labels[: len(taps)] == tuple(taps) for f in term.factors]
    # Others may have the taps' axes too: what a kernel is multiplied by before it is used.
    factors = [
        f.expanded() if isinstance(f, Windows) and not window and set(f.labels) & taps.keys() else f
        for f, window in zip(term.factors, inside, strict=True)
    ]
    padded = [f.padded if isinstance(f, Windows) else None for f in factors]

    def cut(f: Factor, array: Any, window: bool, tap: Sequence[Any]) -> Factor:
        if window and isinstance(f, Windows):
            return f.at_taps(array, [tap[i] for i in taps.values()])
        return _entry(f, {label: tap[i] for label, i in taps.items()})

    def at(tap: Sequence[Any]) -> Term:
        # The windows last: einsum has the last of two factors on the left, where XLA needs no other layout of it.
        triples = sorted(zip(factors, padded, inside, strict=True), key=lambda triple: triple[-1])
        return term.replace(factors=tuple(cut(*triple, tap) for triple in triples), axes=axes)

    return at


def _entry(f: Factor, at: dict[Label, Any]) -> Factor:
    """Return the factor at one place along some of its labels."""
    for label, place in at.items():
        while label in f.labels:
            i = f.labels.index(label)
            array = jax.lax.dynamic_index_in_dim(f.array, place, i, keepdims=False)
            f = Factor(array, (*f.labels[:i], *f.labels[i + 1 :]), f.batched)
    return f
