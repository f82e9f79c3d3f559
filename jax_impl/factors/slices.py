"""How products pass uncomputed through operations that cut axes or put entries into longer ones."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from ..program.evaluate import shaped
from .lazy import Lazy
from .registry import Evaluator, Known, if_lazy, rule
from .terms import Factor, Label, Places, Term, UnsupportedError, Windows, contiguous, new_label


@rule("rev", accepts=if_lazy(0))
def _reverse(ev: Evaluator, e: JaxprEqn) -> Lazy:
    dimensions = e.params["dimensions"]

    def reverse(t: Term) -> Term:
        for label in [x for d in dimensions for x in t.axes[d]]:
            if label in t.places or t.out.count(label) > 1:
                raise UnsupportedError("a reversed axis that is indexed")
            t = t.replace(factors=tuple(_flipped_taps(f, label) for f in t.factors))
            if not any(isinstance(f, Windows) and label in f.tap_labels for f in t.factors):
                t = _on_label(t, label, lambda array, i: jnp.flip(array, i))
        return t

    return ev.lazy(e.invars[0]).map(reverse)


def _flipped_taps(f: Factor, label: Label) -> Factor:
    if not isinstance(f, Windows) or label not in f.tap_labels:
        return f
    axis = f.tap_labels.index(label)
    return dataclasses.replace(f, flipped=tuple(flip != (i == axis) for i, flip in enumerate(f.flipped)))


def _on_label(term: Term, label: Label, change: Callable[[Any, int], Any], entry: bool = False) -> Term:
    """Change every factor of a term that has the label along it; ``entry`` where one index array has it too."""
    if sum(label in p.labels for p in term.places.values()) > entry:
        raise UnsupportedError("an axis that indices depend on")
    factors = []
    for f in term.factors:
        if label in f.labels:
            if isinstance(f, Windows):
                f = f.expanded()
            f = dataclasses.replace(f, array=change(f.array, f.labels.index(label)))
        factors.append(f)
    return term.replace(factors=tuple(factors))


@rule("slice", accepts=if_lazy(0))
def _slice(ev: Evaluator, e: JaxprEqn) -> Lazy:
    given, shape = shaped(e.invars[0]).shape, shaped(e.outvars[0]).shape
    starts, stops = e.params["start_indices"], e.params["limit_indices"]
    strides = e.params["strides"] or (1,) * len(given)

    def cut(t: Term | None) -> Term | None:
        for d, (n, a, b, s) in enumerate(zip(given, starts, stops, strides, strict=True)):
            if t is not None and (a, b, s) != (0, n, 1):
                t = sliced(t, d, a, b, s)
        return t

    # Fresh names: the old ones may stand for the full length elsewhere.
    return ev.lazy(e.invars[0]).map(lambda t: cut(t.fresh()), shape)


def sliced(term: Term, axis: int, start: int, stop: int, stride: int = 1) -> Term | None:
    """Return ``term[start:stop:stride]`` along an axis; None where nothing but zeros is left."""
    labels, length = term.axes[axis], len(range(start, stop, stride))
    if len(labels) != 1 or term.out.count(labels[0]) > 1:
        raise UnsupportedError("a slice of a merged axis")
    label = labels[0]
    if label in term.places:
        p = term.places[label]
        if not p.static or stride != 1:
            raise UnsupportedError("a slice of an axis that is indexed")
        inside = np.flatnonzero((p.index >= start) & (p.index < stop))
        if not len(inside):
            return None
        if len(p.labels) != 1 or not contiguous(inside):
            raise UnsupportedError("a slice of an axis that is indexed")
        first, last = int(inside[0]), int(inside[-1]) + 1
        entry, places = p.labels[0], {x: q for x, q in term.places.items() if x != label}
        term = _on_label(term, entry, lambda x, i: jax.lax.slice_in_dim(x, first, last, axis=i), entry=True)
        index = p.index[first:last] - start
        if len(index) < length:
            places[label] = dataclasses.replace(p, index=index, size=length)
            return term.replace(places=places, sizes=term.sizes | {entry: len(index), label: length})
        axes = tuple((entry,) if axis_labels == labels else axis_labels for axis_labels in term.axes)
        term, label = term.replace(places=places, axes=axes), entry
    else:
        term = _on_label(term, label, lambda x, i: jax.lax.slice_in_dim(x, start, stop, stride, axis=i))
    term = term.replace(sizes=term.sizes | {label: length})
    return _on_label_dropped(term, label) if length == 1 else term


def _on_label_dropped(term: Term, label: Label) -> Term:
    """Return the term without a label of length 1."""
    factors = []
    for f in term.factors:
        if label in f.labels:
            i = f.labels.index(label)
            f = Factor(jnp.squeeze(f.array, i), (*f.labels[:i], *f.labels[i + 1 :]), f.batched)
        factors.append(f)
    axes = tuple(tuple(x for x in axis if x != label) for axis in term.axes)
    sizes = {x: n for x, n in term.sizes.items() if x != label}
    scale = (*term.scale, *(f for f in factors if not f.labels))
    return term.replace(factors=tuple(f for f in factors if f.labels), axes=axes, sizes=sizes, scale=scale)


def _of_split(e: JaxprEqn, i: int, known: Known) -> str:
    return "lazy" if any(map(known.is_lazy, e.outvars)) else ""


@rule("split", accepts=_of_split)
def _split(ev: Evaluator, e: JaxprEqn) -> list[Lazy]:
    axis, value, start, parts = e.params["axis"], ev.lazy(e.invars[0]), 0, []
    for v, n in zip(e.outvars, e.params["sizes"], strict=True):
        shape = shaped(v).shape
        cut = lambda t, start=start, n=n: sliced(t.fresh(), axis, start, start + n, 1)
        parts.append(value.map(cut, shape))
        start += n
    return parts


@rule("unstack", accepts=_of_split)
def _unstack(ev: Evaluator, e: JaxprEqn) -> list[Lazy]:
    axis, value = e.params["axis"], ev.lazy(e.invars[0])
    shape = shaped(e.outvars[0]).shape
    if len(e.outvars) == 1:
        return [value.map(lambda t: _without_axis(t, axis), shape)]

    def cut(t: Term, i: int) -> Term | None:
        return _without_axis(sliced(t.fresh(), axis, i, i + 1), axis)

    return [value.map(functools.partial(cut, i=i), shape) for i in range(len(e.outvars))]


def _without_axis(term: Term | None, axis: int) -> Term | None:
    return None if term is None else term.replace(axes=(*term.axes[:axis], *term.axes[axis + 1 :]))


@rule("stack", accepts=if_lazy())
def _stack(ev: Evaluator, e: JaxprEqn) -> Lazy:
    axis, count, shape = e.params["axis"], len(e.invars), shaped(e.outvars[0]).shape
    total = Lazy(shape, shaped(e.outvars[0]).dtype, ())

    def put(t: Term, i: int) -> Term:
        t = t.replace(axes=(*t.axes[:axis], (), *t.axes[axis:]))
        return t if count == 1 else placed(t, axis, i, count)

    for i, v in enumerate(e.invars):
        total = total.plus(ev.lazy(v).map(functools.partial(put, i=i)), True)
    return total


def placed(term: Term, axis: int, start: int, size: int, stride: int = 1) -> Term:
    """Put a term at every ``stride``-th entry from ``start`` of an axis of length ``size``, the rest being zero."""
    labels = term.axes[axis]
    if len(labels) > 1:
        raise UnsupportedError("a merged axis that is padded")
    out = new_label()
    places, sizes = dict(term.places), term.sizes | {out: size}
    if labels and labels[0] in places:
        old = places.pop(labels[0])
        index = old.index * stride + start
        index = index if old.static else jnp.where(old.index < old.size, index, size)
        places[out] = dataclasses.replace(old, index=index, size=size)
    else:
        n = term.sizes[labels[0]] if labels else 1
        entry = labels or (new_label(),)
        sizes[entry[0]] = n
        places[out] = Places(start + stride * np.arange(n), entry, size, False)
        if not labels:
            term = term.replace(factors=(*term.factors, Factor(jnp.ones(1), entry, False)))
    axes = (*term.axes[:axis], (out,), *term.axes[axis + 1 :])
    return term.replace(axes=axes, places=places, sizes=sizes)


@rule("pad", accepts=if_lazy(0))
def _pad(ev: Evaluator, e: JaxprEqn) -> Lazy:
    if not ev.is_zero(e.invars[1]):
        raise UnsupportedError("padding that is not zero")
    shape = shaped(e.outvars[0]).shape

    def pad(t: Term | None) -> Term | None:
        for d, (low, high, interior) in enumerate(e.params["padding_config"]):
            if t is None or (low, high, interior) == (0, 0, 0):
                continue
            if low < 0 or high < 0:
                if interior:
                    raise UnsupportedError("padding between entries that also cuts")
                length = shaped(e.invars[0]).shape[d]
                t = sliced(t.fresh(), d, max(-low, 0), length - max(-high, 0))
            if t is not None and (low > 0 or high > 0 or interior):
                t = placed(t, d, max(low, 0), shape[d], interior + 1)
        return t

    return ev.lazy(e.invars[0]).map(pad, shape)


@rule("concatenate", accepts=if_lazy())
def _concatenate(ev: Evaluator, e: JaxprEqn) -> Lazy:
    shape, axis = shaped(e.outvars[0]).shape, e.params["dimension"]
    total, start = Lazy(shape, shaped(e.outvars[0]).dtype, ()), 0
    for v in e.invars:
        part = ev.lazy(v)
        total = total.plus(part.map(functools.partial(placed, axis=axis, start=start, size=shape[axis])), True)
        start += shaped(v).shape[axis]
    return total
