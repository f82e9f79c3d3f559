"""How products pass through the operations of a program uncomputed: one rule for each primitive.

A rule gets the evaluator and an equation, and returns the outputs or raises :class:`UnsupportedError`, upon which the
operands are computed. ``ACCEPTS`` tells the planner which operands a rule would take uncomputed.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal

from .inlining import bind, inline
from .networks import (
    Factor,
    Label,
    Places,
    Term,
    UnsupportedError,
    Windows,
    contiguous,
    dense,
    inner,
    matched,
    new_label,
    split_label,
    squared_norm,
    taken,
    whole,
)
from .sums import wide


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

    def dense(self) -> jax.Array:
        """The array."""
        total = jnp.zeros(self.shape, self.dtype)
        for i, term in enumerate(self.terms):
            part = dense(term, wide(self.dtype))
            total = part if i == 0 else total + part
        return total.astype(self.dtype)

    def map(self, change: Callable[[Term], Term | None], shape: Sequence[int] | None = None) -> Lazy:
        """The sum of the changed terms; None drops one."""
        terms = tuple(t for t in map(change, self.terms) if t is not None)
        return Lazy(self.shape if shape is None else tuple(shape), self.dtype, terms)

    def plus(self, value: Any, batched: bool) -> Lazy:
        """The sum with another lazy value, or with an array."""
        terms = value.terms if isinstance(value, Lazy) else (whole(value, batched),)
        return Lazy(self.shape, self.dtype, (*self.terms, *terms))

    def times(self, scalar: Any, batched: bool) -> Lazy:
        """The product with a number."""
        factor = Factor(jnp.asarray(scalar), (), batched)
        return self.map(lambda t: t.replace(scale=(*t.scale, factor)))


@dataclasses.dataclass(frozen=True)
class Squares:
    """The squares of a lazy value's entries, of which only the sum will be asked for."""

    of: Lazy

    def dense(self) -> jax.Array:
        """The array."""
        return jnp.square(self.of.dense())


def _lazy(ev: Any, v: Any) -> Lazy:
    value = ev.read(v)
    if isinstance(value, Squares):
        raise UnsupportedError("squares that are not summed")
    if isinstance(value, Lazy):
        return value
    if ev.is_zero(v):
        return Lazy(v.aval.shape, v.aval.dtype, ())
    return Lazy(value.shape, value.dtype, (whole(value, ev.is_batched(v)),))


# Moves


def _transpose(ev: Any, e: Any) -> Lazy:
    order = e.params["permutation"]
    return _lazy(ev, e.invars[0]).map(
        lambda t: t.replace(axes=tuple(t.axes[i] for i in order)), e.outvars[0].aval.shape
    )


def _reshape(ev: Any, e: Any) -> Lazy:
    shape = e.outvars[0].aval.shape
    if e.params.get("dimensions") is not None:
        raise UnsupportedError("a reshape that also transposes")
    return _lazy(ev, e.invars[0]).map(lambda t: _regrouped(t, shape), shape)


def _regrouped(term: Term, shape: Sequence[int]) -> Term:
    """The term with its labels, in order, distributed over axes of these lengths."""
    term = term.replace(axes=(tuple(term.out),))
    axes, taken_labels = [], 0
    for n in shape:
        length, start = 1, taken_labels
        while length < n:
            label = term.axes[0][taken_labels]
            if length * term.sizes[label] > n:
                if n % length:
                    raise UnsupportedError("a reshape across axes")
                term = split_label(term, label, n // length)
                label = term.axes[0][taken_labels]
            length *= term.sizes[label]
            taken_labels += 1
        if length != n:
            raise UnsupportedError("a reshape across axes")
        axes.append((start, taken_labels))
    return term.replace(axes=tuple(term.axes[0][a:b] for a, b in axes))


def _squeeze(ev: Any, e: Any) -> Lazy:
    shape = e.outvars[0].aval.shape
    return _lazy(ev, e.invars[0]).map(lambda t: _regrouped(t, shape), shape)


def _broadcast(ev: Any, e: Any) -> Any:
    v, shape, where = e.invars[0], e.params["shape"], e.params["broadcast_dimensions"]
    if isinstance(v, Literal) or not ev.is_batched(v):
        return bind(e, [ev.array(v)])[0]
    given = v.aval.shape

    def spread(t: Term) -> Term:
        axes, sizes = [], dict(t.sizes)
        for i, n in enumerate(shape):
            if i in where and (given[where.index(i)] == n):
                axes.append(t.axes[where.index(i)])
            elif n == 1:
                axes.append(())
            else:
                label = new_label()
                sizes[label] = n
                axes.append((label,))
        return t.replace(axes=tuple(axes), sizes=sizes)

    return _lazy(ev, v).map(spread, shape)


def _convert(ev: Any, e: Any) -> Lazy:
    dtype = jnp.dtype(e.params["new_dtype"])
    value = _lazy(ev, e.invars[0])
    if not jnp.issubdtype(dtype, jnp.floating):
        raise UnsupportedError(f"a cast to {dtype.name}")
    if dtype == jnp.float64 and value.dtype != jnp.float64:

        def widened(t: Term) -> Term:
            factors = (dataclasses.replace(f, array=f.array.astype(dtype)) for f in t.factors)
            return t.replace(factors=tuple(factors))

        value = value.map(widened)
    return Lazy(value.shape, dtype, value.terms)


def _same(ev: Any, e: Any) -> Lazy:
    return _lazy(ev, e.invars[0])


def _on_label(term: Term, label: Label, change: Callable[[Any, int], Any], entry: bool = False) -> Term:
    """The term with every factor that has the label changed along it; ``entry`` where one index array has it too."""
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


def _reverse(ev: Any, e: Any) -> Lazy:
    dimensions = e.params["dimensions"]

    def reverse(t: Term) -> Term:
        for label in [x for d in dimensions for x in t.axes[d]]:
            if label in t.places or t.out.count(label) > 1:
                raise UnsupportedError("a reversed axis that is indexed")
            t = t.replace(factors=tuple(_flipped_taps(f, label) for f in t.factors))
            if not any(isinstance(f, Windows) and label in f.tap_labels for f in t.factors):
                t = _on_label(t, label, lambda array, i: jnp.flip(array, i))
        return t

    return _lazy(ev, e.invars[0]).map(reverse)


def _flipped_taps(f: Factor, label: Label) -> Factor:
    if not isinstance(f, Windows) or label not in f.tap_labels:
        return f
    axis = f.tap_labels.index(label)
    return dataclasses.replace(f, flipped=tuple(flip != (i == axis) for i, flip in enumerate(f.flipped)))


def _slice(ev: Any, e: Any) -> Lazy:
    given, shape = e.invars[0].aval.shape, e.outvars[0].aval.shape
    starts, stops = e.params["start_indices"], e.params["limit_indices"]
    strides = e.params["strides"] or (1,) * len(given)

    def cut(t: Term | None) -> Term | None:
        for d, (n, a, b, s) in enumerate(zip(given, starts, stops, strides, strict=True)):
            if t is not None and (a, b, s) != (0, n, 1):
                t = _cut(t, d, a, b, s)
        return t

    # Fresh names: the old ones may stand for the full length elsewhere.
    return _lazy(ev, e.invars[0]).map(lambda t: cut(t.fresh()), shape)


def _cut(term: Term, axis: int, start: int, stop: int, stride: int = 1) -> Term | None:
    """``term[start:stop:stride]`` along an axis; None where nothing but zeros is left."""
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


def _without_axis(term: Term | None, axis: int) -> Term | None:
    return None if term is None else term.replace(axes=(*term.axes[:axis], *term.axes[axis + 1 :]))


def _unstack(ev: Any, e: Any) -> list[Lazy]:
    axis, value = e.params["axis"], _lazy(ev, e.invars[0])
    shape = e.outvars[0].aval.shape
    if len(e.outvars) == 1:
        return [value.map(lambda t: _without_axis(t, axis), shape)]

    def cut(t: Term, i: int) -> Term | None:
        return _without_axis(_cut(t.fresh(), axis, i, i + 1), axis)

    return [value.map(functools.partial(cut, i=i), shape) for i in range(len(e.outvars))]


def _stack(ev: Any, e: Any) -> Lazy:
    axis, count, shape = e.params["axis"], len(e.invars), e.outvars[0].aval.shape
    total = Lazy(shape, e.outvars[0].aval.dtype, ())

    def put(t: Term, i: int) -> Term:
        t = t.replace(axes=(*t.axes[:axis], (), *t.axes[axis:]))
        return t if count == 1 else _placed(t, axis, i, count)

    for i, v in enumerate(e.invars):
        total = total.plus(_lazy(ev, v).map(functools.partial(put, i=i)), True)
    return total


def _on_label_dropped(term: Term, label: Label) -> Term:
    """The term without a label of length 1."""
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


def _placed(term: Term, axis: int, start: int, size: int, stride: int = 1) -> Term:
    """The term put at every ``stride``-th entry from ``start`` of an axis of length ``size``, the rest being zero."""
    labels = term.axes[axis]
    if len(labels) > 1:
        raise UnsupportedError("a merged axis that is padded")
    out = new_label()
    places, sizes = dict(term.places), term.sizes | {out: size}
    if labels and labels[0] in places:
        old = places.pop(labels[0])
        places[out] = dataclasses.replace(old, index=old.index * stride + start, size=size)
    else:
        n = term.sizes[labels[0]] if labels else 1
        entry = labels or (new_label(),)
        sizes[entry[0]] = n
        places[out] = Places(start + stride * np.arange(n), entry, size, False)
        if not labels:
            term = term.replace(factors=(*term.factors, Factor(jnp.ones(1), entry, False)))
    axes = (*term.axes[:axis], (out,), *term.axes[axis + 1 :])
    return term.replace(axes=axes, places=places, sizes=sizes)


def _pad(ev: Any, e: Any) -> Lazy:
    if not ev.is_zero(e.invars[1]):
        raise UnsupportedError("padding that is not zero")
    shape = e.outvars[0].aval.shape

    def pad(t: Term | None) -> Term | None:
        for d, (low, high, interior) in enumerate(e.params["padding_config"]):
            if t is None or (low, high, interior) == (0, 0, 0):
                continue
            if low < 0 or high < 0:
                if interior:
                    raise UnsupportedError("padding between entries that also cuts")
                length = e.invars[0].aval.shape[d]
                t = _cut(t.fresh(), d, max(-low, 0), length - max(-high, 0))
            if t is not None and (low > 0 or high > 0 or interior):
                t = _placed(t, d, max(low, 0), shape[d], interior + 1)
        return t

    return _lazy(ev, e.invars[0]).map(pad, shape)


def _concatenate(ev: Any, e: Any) -> Lazy:
    shape, axis = e.outvars[0].aval.shape, e.params["dimension"]
    total, start = Lazy(shape, e.outvars[0].aval.dtype, ()), 0
    for v in e.invars:
        part = _lazy(ev, v)
        total = total.plus(part.map(functools.partial(_placed, axis=axis, start=start, size=shape[axis])), True)
        start += v.aval.shape[axis]
    return total


# Arithmetic


def _negative(ev: Any, e: Any) -> Lazy:
    return _lazy(ev, e.invars[0]).times(-1.0, False)


def _split(ev: Any, e: Any) -> list[Lazy]:
    axis, value, start, parts = e.params["axis"], _lazy(ev, e.invars[0]), 0, []
    for v, n in zip(e.outvars, e.params["sizes"], strict=True):
        shape = v.aval.shape
        cut = lambda t, start=start, n=n: _cut(t.fresh(), axis, start, start + n, 1)
        parts.append(value.map(cut, shape))
        start += n
    return parts


def _add(ev: Any, e: Any) -> Lazy:
    left, right = (_lazy(ev, v) for v in e.invars)
    if e.primitive.name == "sub":
        right = right.times(-1.0, False)
    if left.shape != right.shape:
        raise UnsupportedError("a number that is added")
    return left.plus(right, True)


def _number(ev: Any, v: Any) -> Any:
    """The number that a variable repeats, or None."""
    if isinstance(v, Literal) or not v.aval.shape:
        value = ev.array(v)
        return value if not jnp.shape(value) else None
    return ev.scalars.get(v)


def _multiply(ev: Any, e: Any) -> Any:
    left, right = e.invars
    if ev.kinds.get(e.outvars[0]) == "squares":
        return Squares(_lazy(ev, left))
    for value, other in ((left, right), (right, left)):
        number = _number(ev, other)
        if number is not None and not isinstance(value, Literal):
            return _lazy(ev, value).times(number, ev.is_batched(other))
    a, b = _lazy(ev, left), _lazy(ev, right)
    if len(a.terms) * len(b.terms) > 4:
        raise UnsupportedError("a product of sums")
    shape, dtype = e.outvars[0].aval.shape, e.outvars[0].aval.dtype
    return Lazy(shape, dtype, tuple(_product(s, t) for s in a.terms for t in b.terms))


def _product(a: Term, b: Term) -> Term:
    """The product entry by entry."""
    if sum(f.batched for f in a.factors) < sum(f.batched for f in b.factors):
        a, b = b, a
    if b.places:
        raise UnsupportedError("a product of two indexed arrays")
    a, b = matched(a, b.fresh(), [(i, i) for i in range(len(a.axes))])
    factors, table, axes = list(b.factors), {}, []
    for ours, theirs in zip(a.axes, b.axes, strict=True):
        axes.append(ours or theirs)
        for x, y in zip(ours, theirs, strict=False):  # an axis of length 1 has no label: it is repeated
            if x in a.places:
                factors = [taken(f, y, a.places[x]) for f in factors]
            else:
                table[y] = x
    factors = [dataclasses.replace(f, labels=tuple(table.get(x, x) for x in f.labels)) for f in factors]
    mask = a.mask if b.mask is None else b.mask if a.mask is None else a.mask & b.mask
    sizes = a.sizes | {table.get(x, x): n for x, n in b.sizes.items()}
    return _absorbed(a.replace(axes=tuple(axes), sizes=sizes, scale=(*a.scale, *b.scale), mask=mask), factors)


def _narrowed(f: Factor, term: Term) -> Factor:
    """The factor without axes of length 1 that nothing else has."""
    single = [i for i, x in enumerate(f.labels) if term.sizes[x] == 1 and x not in term.out]
    if isinstance(f, Windows) or not single:
        return f
    return Factor(jnp.squeeze(f.array, single), tuple(x for i, x in enumerate(f.labels) if i not in single), f.batched)


def _absorbed(term: Term, extra: Sequence[Factor]) -> Term:
    """The term with more factors, each multiplied into one that has its labels, if there is one."""
    factors = list(term.factors)
    for f in [_narrowed(f, term) for f in extra]:
        fits = [
            i
            for i, g in enumerate(factors)
            if set(f.labels) <= set(g.labels) and not isinstance(g, Windows) and not isinstance(f, Windows)
        ]
        if not f.labels:
            term = term.replace(scale=(*term.scale, f))
        elif fits and len(set(f.labels)) == len(f.labels):
            i = min(fits, key=lambda i: factors[i].stored)
            g = factors[i]
            at = [g.labels.index(label) for label in f.labels]
            order = sorted(range(len(at)), key=at.__getitem__)
            shape = [term.sizes[x] if x in f.labels else 1 for x in g.labels]
            # A mask takes no more digits than the factor has; numbers keep theirs, a small scale in half precision too.
            dtype = jnp.promote_types(g.array.dtype, f.array.dtype)
            array = g.array.astype(dtype) * f.array.transpose(order).reshape(shape).astype(dtype)
            factors[i] = dataclasses.replace(g, array=array, batched=g.batched or f.batched)
        else:
            factors.append(f)
    return term.replace(factors=tuple(factors))


def _divide(ev: Any, e: Any) -> Lazy:
    value, other = e.invars
    number = _number(ev, other)
    dtype = e.outvars[0].aval.dtype
    if number is not None:
        return _lazy(ev, value).times(1 / jnp.asarray(number, dtype), ev.is_batched(other))
    if ev.is_batched(other):
        raise UnsupportedError("a quotient that differs between examples")
    inverse = whole(1 / ev.array(other), False)
    return _lazy(ev, value).map(lambda t: _product(t, inverse), e.outvars[0].aval.shape)


def _select(ev: Any, e: Any) -> Lazy:
    which, *cases = e.invars
    if len(cases) != 2:
        raise UnsupportedError("a choice among many")
    pred, batched = _number(ev, which), ev.is_batched(which)
    if pred is not None:
        chosen = [_lazy(ev, v) for v in cases]
        masked = lambda value, mask: value.map(lambda t: t.replace(mask=mask if t.mask is None else t.mask & mask))
        return masked(chosen[0], jnp.logical_not(pred)).plus(masked(chosen[1], jnp.asarray(pred)), True)
    if batched:
        raise UnsupportedError("a choice that differs between examples and entries")
    total = Lazy(e.outvars[0].aval.shape, e.outvars[0].aval.dtype, ())
    array = ev.array(which)
    for v, keep in zip(cases, (jnp.logical_not(array), array), strict=True):
        part = whole(keep.astype(bool), False)
        total = total.plus(_lazy(ev, v).map(functools.partial(_product, b=part)), True)
    return total


# Sums


def _reduce_sum(ev: Any, e: Any) -> Any:
    v, axes = e.invars[0], e.params["axes"]
    out = e.outvars[0].aval
    value = ev.read(v)
    if isinstance(value, Squares):
        if len(axes) != len(v.aval.shape):
            raise UnsupportedError("squares summed over some axes only")
        return squared_norm(value.of.terms, out.dtype).astype(out.dtype)

    def summed(t: Term) -> Term:
        gone = [x for d in axes for x in t.axes[d]]
        kept = [x for d, axis in enumerate(t.axes) if d not in axes for x in axis]
        if set(gone) & set(kept):
            raise UnsupportedError("a diagonal")
        places = dict(t.places)
        entries = [k for x in gone if x in places for k in places.pop(x).labels]
        held = {x for f in t.factors for x in f.labels} | {k for p in places.values() for k in p.labels}
        free = math.prod(t.sizes[x] for x in {*gone, *entries} - held - t.places.keys())
        scale = t.scale if free == 1 else (*t.scale, Factor(jnp.asarray(float(free)), (), False))
        return t.replace(axes=tuple(axis for d, axis in enumerate(t.axes) if d not in axes), places=places, scale=scale)

    return _lazy(ev, v).map(summed, out.shape)


def _square(ev: Any, e: Any) -> Squares:
    if ev.kinds.get(e.outvars[0]) != "squares":
        raise UnsupportedError("squares that are not summed")
    return Squares(_lazy(ev, e.invars[0]))


def _dot(ev: Any, e: Any) -> Any:
    left, right = e.invars
    (contract_l, contract_r), (batch_l, batch_r) = e.params["dimension_numbers"]
    held = [isinstance(ev.read(v), Lazy) for v in e.invars]
    a, b = _lazy(ev, left), _lazy(ev, right)
    out = e.outvars[0].aval
    if not out.shape and all(held):
        order = sorted(range(len(contract_l)), key=lambda i: contract_l[i])
        turned = b.map(lambda t: t.replace(axes=tuple(t.axes[contract_r[i]] for i in order)))
        products = [inner(s, t, wide(out.dtype)) for s in a.terms for t in turned.terms]
        masks = [[m for m in (s.mask, t.mask) if m is not None] for s in a.terms for t in turned.terms]
        total = jnp.zeros((), wide(out.dtype))
        for value, mask in zip(products, masks, strict=True):
            if value is not None:
                for m in mask:
                    value = jnp.where(m, value, 0)
                total = total + value
        return total.astype(out.dtype)
    if any(held) and ev.is_batched(right if held[0] else left):
        raise UnsupportedError("a product with what differs between examples")
    precision = e.params.get("precision")

    def join(s: Term, t: Term) -> tuple[Term, list[Factor]]:
        t = t.fresh()
        pairs = [*zip(contract_l, contract_r, strict=True), *zip(batch_l, batch_r, strict=True)]
        s, t = matched(s, t, pairs)
        factors_s, factors_t = list(s.factors), list(t.factors)
        places = {**s.places, **t.places}
        table: dict[Label, Label] = {}
        for i, j in pairs:
            if not s.axes[i] or not t.axes[j]:
                continue  # of length 1
            for x, y in zip(s.axes[i], t.axes[j], strict=True):
                if x in s.places or y in t.places:
                    if i in batch_l or (x in s.places and y in t.places):
                        raise UnsupportedError("an indexed axis in a product")
                    if x in s.places:
                        factors_t = [taken(f, y, s.places[x]) for f in factors_t]
                    else:
                        factors_s = [taken(f, x, t.places[y]) for f in factors_s]
                    places.pop(x if x in s.places else y)
                else:
                    table[y] = x
        factors_t = [dataclasses.replace(f, labels=tuple(table.get(x, x) for x in f.labels)) for f in factors_t]
        axes = [s.axes[i] for i in batch_l]
        axes += [axis for i, axis in enumerate(s.axes) if i not in contract_l and i not in batch_l]
        axes += [axis for j, axis in enumerate(t.axes) if j not in contract_r and j not in batch_r]
        mask = s.mask if t.mask is None else t.mask if s.mask is None else s.mask & t.mask
        return Term(
            tuple(factors_s),
            tuple(axes),
            s.sizes | {table.get(x, x): n for x, n in t.sizes.items()},
            places,
            (*s.scale, *t.scale),
            mask,
            precision if precision is not None else s.precision,
        ), factors_t

    if len(a.terms) * len(b.terms) > 4:
        raise UnsupportedError("a product of sums")
    terms = []
    for s in a.terms:
        for t in b.terms:
            product, extra = join(s, t)
            # With a weight shared by all examples: into the factor that has its summed axis, for one factor less.
            terms.append(
                _contracted(product, extra) if any(held) else product.replace(factors=(*product.factors, *extra))
            )
    return Lazy(out.shape, out.dtype, tuple(terms))


def _contracted(term: Term, extra: Sequence[Factor]) -> Term:
    """Join each further factor with the one factor that shares its summed labels, where that makes it no larger."""
    factors = list(term.factors)
    for f in extra:
        gone = set(f.labels) - set(term.out) - {k for p in term.places.values() for k in p.labels}
        gone = {x for x in gone if term.sizes[x] != 1}
        sharing = [i for i, g in enumerate(factors) if gone & set(g.labels)]
        if len(sharing) == 1 and gone and not isinstance(factors[sharing[0]], Windows):
            g = factors[sharing[0]]
            only = {x for x in gone if x in g.labels}
            labels = [x for x in dict.fromkeys((*g.labels, *f.labels)) if x not in only]
            if math.prod(term.sizes[x] for x in labels) <= 4 * g.stored:
                numbers = {x: i for i, x in enumerate(dict.fromkeys((*g.labels, *f.labels)))}
                number = lambda given, numbers=numbers: [numbers[x] for x in given]
                array = jnp.einsum(g.array, number(g.labels), f.array, number(f.labels), number(labels))
                factors[sharing[0]] = Factor(array, tuple(labels), g.batched or f.batched)
                continue
        factors.append(f)
    return term.replace(factors=tuple(factors))


def _scatter_add(ev: Any, e: Any) -> Lazy:
    target, indices, updates = e.invars
    numbers = e.params["dimension_numbers"]
    if numbers.operand_batching_dims:
        raise UnsupportedError("a scatter with batch axes")
    value, where = _lazy(ev, updates), ev.array(indices)
    given, shape = updates.aval.shape, target.aval.shape
    windows = [d for d in range(len(shape)) if d not in numbers.inserted_window_dims]
    window_axis = dict(zip(windows, numbers.update_window_dims, strict=True))
    entry_axes = [d for d in range(len(given)) if d not in numbers.update_window_dims]
    lead = tuple(given[d] for d in entry_axes if given[d] != 1)
    mode, batched = str(e.params["mode"]).upper(), ev.is_batched(indices)

    def put(t: Term) -> Term:
        if any(len(axis) > 1 or any(x in t.places for x in axis) for axis in t.axes) or len(set(t.out)) < len(t.out):
            raise UnsupportedError("a scatter of an indexed or merged axis")
        entries = tuple(x for d in entry_axes for x in t.axes[d])
        sizes, places, axes, alive = dict(t.sizes), dict(t.places), [], jnp.ones(lead, bool)
        for d, n in enumerate(shape):
            own = t.axes[window_axis[d]] if d in window_axis else ()
            width = given[window_axis[d]] if d in window_axis else 1
            if d not in numbers.scatter_dims_to_operand_dims:
                if n != width:
                    raise UnsupportedError("a scatter into a part of an axis")
                axes.append(own)
                continue
            start = where[..., numbers.scatter_dims_to_operand_dims.index(d)].reshape(lead)
            if "CLIP" not in mode:
                alive = alive & (start >= 0) & (start <= n - width)
            if n == 1:
                axes.append(())
                continue
            start, out = jnp.clip(start, 0, n - width), new_label()
            sizes[out] = n
            index = start[..., None] + jnp.arange(width) if own else start
            places[out] = Places(index, (*entries, *own), n, batched)
            axes.append((out,))
        t = t.replace(axes=tuple(axes), sizes=sizes, places=places)
        if "CLIP" in mode or "PROMISE" in mode:
            return t
        return _absorbed(t, [Factor(alive, entries, batched)])

    return _lazy(ev, target).plus(value.map(put, shape), True)


def _one_place(e: Any) -> bool:
    """Whether a scatter writes one window, so that no two updates meet."""
    return math.prod(e.invars[1].aval.shape[:-1]) == 1


def _scatter(ev: Any, e: Any) -> Lazy:
    """Entries set to zero, as the gradient of what was overwritten: a product with a mask. Or a window in zeros."""
    target, indices, updates = e.invars
    if ev.is_zero(target) and (_one_place(e) or e.params["unique_indices"]):
        return _scatter_add(ev, e)
    if not ev.is_zero(updates) or ev.is_batched(indices):
        raise UnsupportedError("entries that are overwritten")
    ones = jnp.ones(target.aval.shape, target.aval.dtype)
    mask = whole(bind(e, [ones, ev.array(indices), ev.array(updates)])[0], False)
    return _lazy(ev, target).map(lambda t: _product(t, mask))


def _update_slice(ev: Any, e: Any) -> Lazy:
    target, update, *starts = e.invars
    if not ev.is_zero(target):
        raise UnsupportedError("an update of what is not zero")
    shape = target.aval.shape
    value = _lazy(ev, update)
    if not value.terms:
        return Lazy(shape, value.dtype, ())
    if not isinstance(ev.read(update), Lazy) and not ev.is_batched(update):
        raise UnsupportedError("an update that all examples share")

    def put(t: Term) -> Term:
        for d, (n, width, start) in enumerate(zip(shape, update.aval.shape, starts, strict=True)):
            if n == width:
                continue
            if isinstance(start, Literal):
                t = _placed(t, d, min(max(int(start.val), 0), n - width), n)
                continue
            labels = t.axes[d]
            if len(labels) > 1 or (labels and labels[0] in t.places):
                raise UnsupportedError("an update along a merged axis")
            at = jnp.clip(ev.array(start), 0, n - width)
            index = at + jnp.arange(width) if labels else at
            out = new_label()
            t = t.replace(
                axes=(*t.axes[:d], (out,), *t.axes[d + 1 :]),
                sizes=t.sizes | {out: n},
                places={**t.places, out: Places(index, labels, n, ev.is_batched(start))},
            )
        return t

    return value.map(put, shape)


def _barrier(ev: Any, e: Any) -> list[Any]:
    values = [ev.read(v) for v in e.invars]
    arrays = [i for i, x in enumerate(values) if not isinstance(x, (Lazy, Squares))]
    for i, x in zip(arrays, jax.lax.optimization_barrier([values[i] for i in arrays]), strict=True):
        values[i] = x
    return values


RULES: dict[str, Callable[[Any, Any], Any]] = {
    "transpose": _transpose,
    "reshape": _reshape,
    "squeeze": _squeeze,
    "broadcast_in_dim": _broadcast,
    "convert_element_type": _convert,
    "copy": _same,
    "copy_p": _same,
    "rev": _reverse,
    "slice": _slice,
    "split": _split,
    "stack": _stack,
    "unstack": _unstack,
    "pad": _pad,
    "concatenate": _concatenate,
    "neg": _negative,
    "add": _add,
    "add_any": _add,
    "sub": _add,
    "mul": _multiply,
    "div": _divide,
    "select_n": _select,
    "reduce_sum": _reduce_sum,
    "square": _square,
    "dot_general": _dot,
    "scatter": _scatter,
    "scatter-add": _scatter_add,
    "scatter_add": _scatter_add,
    "dynamic_update_slice": _update_slice,
    "optimization_barrier": _barrier,
}

# For the planner: (equation, operand, kinds of later variables, batched variables, makers) -> "lazy", "squares" or "".
Accepts = Callable[[Any, int, dict[Any, str], set[Any], dict[Any, Any]], str]


def _if_lazy(*operands: int) -> Accepts:
    def accepts(e: Any, i: int, kinds: Any, batched: Any, makers: Any) -> str:
        return "lazy" if kinds.get(e.outvars[0]) == "lazy" and (not operands or i in operands) else ""

    return accepts


def adds(e: Any) -> bool:
    """Whether an equation only adds."""
    return e.primitive.name in ("add", "add_any", "sub")


def is_square(e: Any) -> bool:
    """Whether an equation squares its operand."""
    same = e.primitive.name == "mul" and not isinstance(e.invars[0], Literal) and e.invars[0] is e.invars[1]
    return same or e.primitive.name == "square"


def _of_square(e: Any, i: int, kinds: Any, batched: Any, makers: Any) -> str:
    return "lazy" if is_square(e) and kinds.get(e.outvars[0]) == "squares" else ""


def _of_product(e: Any, i: int, kinds: Any, batched: Any, makers: Any) -> str:
    return _of_square(e, i, kinds, batched, makers) or _if_lazy()(e, i, kinds, batched, makers)


def _of_sum(e: Any, i: int, kinds: Any, batched: Any, makers: Any) -> str:
    v = e.invars[0]
    if v in makers and is_square(makers[v]) and len(e.params["axes"]) == len(v.aval.shape):
        return "squares"
    return _if_lazy()(e, i, kinds, batched, makers)


def _of_dot(e: Any, i: int, kinds: Any, batched: Any, makers: Any) -> str:
    other = e.invars[1 - i]
    shared = isinstance(other, Literal) or other not in batched
    if not e.outvars[0].aval.shape and not shared:
        return "lazy"
    return "lazy" if shared and kinds.get(e.outvars[0]) == "lazy" else ""


def _of_scatter(e: Any, i: int, kinds: Any, batched: Any, makers: Any) -> str:
    moves = i == 0 or (i == 2 and (_one_place(e) or e.params["unique_indices"]))
    return "lazy" if moves and kinds.get(e.outvars[0]) == "lazy" else ""


def _of_barrier(e: Any, i: int, kinds: Any, batched: Any, makers: Any) -> str:
    return "lazy" if kinds.get(e.outvars[i]) == "lazy" else ""


def _of_split(e: Any, i: int, kinds: Any, batched: Any, makers: Any) -> str:
    return "lazy" if any(kinds.get(v) == "lazy" for v in e.outvars) else ""


def _of_scan(e: Any, i: int, kinds: Any, batched: Any, makers: Any) -> str:
    k = i - e.params["num_consts"]
    return "lazy" if 0 <= k < e.params["num_carry"] and k in loop_sums(e, kinds).parts else ""


ACCEPTS: dict[str, Accepts] = {
    **{name: _if_lazy(0) for name in ("transpose", "reshape", "squeeze", "broadcast_in_dim", "convert_element_type")},
    **{name: _if_lazy(0) for name in ("copy", "copy_p", "rev", "slice", "pad", "neg", "div")},
    **{name: _if_lazy() for name in ("add", "add_any", "sub", "concatenate", "stack")},
    "dynamic_update_slice": _if_lazy(0, 1),
    "scatter": _of_scatter,
    "scatter-add": _if_lazy(0, 2),
    "scatter_add": _if_lazy(0, 2),
    "select_n": _if_lazy(1, 2),
    "mul": _of_product,
    "square": _of_square,
    "reduce_sum": _of_sum,
    "dot_general": _of_dot,
    "optimization_barrier": _of_barrier,
    "scan": _of_scan,
    "split": _of_split,
    "unstack": _of_split,
}


@dataclasses.dataclass(frozen=True)
class LoopSums:
    """The carries of a scan that only collect: what is added to each in a step, by its place."""

    body: ClosedJaxpr
    parts: dict[int, list[Any]]


def loop_sums(e: Any, kinds: dict[Any, str]) -> LoopSums:
    """Find, among the carries that may stay factors, those that nothing but an addition reads."""
    body = inline(e.params["jaxpr"])
    jaxpr, first = body.jaxpr, e.params["num_consts"]
    uses: dict[Any, list[Any]] = {}
    for equation in jaxpr.eqns:
        for v in equation.invars:
            if not isinstance(v, Literal):
                uses.setdefault(v, []).append(equation)
    outs = [v for v in jaxpr.outvars if not isinstance(v, Literal)]
    parts: dict[int, list[Any]] = {}
    for k in range(e.params["num_carry"]):
        if kinds.get(e.outvars[k]) != "lazy":
            continue
        v, added = jaxpr.invars[first + k], []
        while v is not jaxpr.outvars[k]:
            found = uses.get(v, [])
            if len(found) != 1 or found[0].primitive.name not in ("add", "add_any") or v in outs:
                break
            others = [x for x in found[0].invars if x is not v]
            if len(others) != 1 or isinstance(others[0], Literal) or others[0].aval.shape != v.aval.shape:
                break
            added.append(others[0])
            v = found[0].outvars[0]
        if v is jaxpr.outvars[k] and outs.count(v) == 1 and not uses.get(v):
            parts[k] = added
    return LoopSums(body, parts)
