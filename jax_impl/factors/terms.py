"""Arrays kept as what they are products of: sums of tensor networks, contracted only when that is cheap.

A :class:`Term` is an einsum that has not been carried out. Its factors are arrays whose axes carry labels; a label
that no axis of the result has is summed over. So the gradient of a weight matrix is ``X[t, i] D[t, o]`` with axes
``(i, o)``. An axis may be reached through :class:`Places`, a one-hot matrix kept as indices: the gradient of an
embedding is ``D[t, o]`` whose ``t`` stands at ``index[t]`` of the vocabulary.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import opt_einsum

from ..program.sums import wide

Label = int
_FEW = 4  # a pair, a triplet: what a loss may compare
_counter = itertools.count()


def new_label() -> Label:
    """A label that no other network has."""
    return next(_counter)


class UnsupportedError(Exception):
    """No rule covers this; the array has to be computed."""


@dataclasses.dataclass(frozen=True)
class Factor:
    """An array with a label for each axis; ``batched`` tells that it differs between examples."""

    array: Any
    labels: tuple[Label, ...]
    batched: bool

    @property
    def stored(self) -> int:
        """The elements that are kept for it."""
        return int(self.array.size)


@dataclasses.dataclass(frozen=True)
class Windows(Factor):
    """The windows of a convolution, ``[..., taps, positions]``, kept as the array that they are cut from.

    ``labels`` are those of the leading axes, then one for the tap and one for the position of each spatial axis.
    Position s of tap k reads entry ``k * stride + s * dilation`` of the array, padded by ``padding``.
    """

    padding: tuple[tuple[int, int, int], ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    taps: tuple[int, ...]
    positions: tuple[int, ...]
    flipped: tuple[bool, ...]
    """Whether the taps of an axis are counted from the last."""

    @property
    def tap_labels(self) -> tuple[Label, ...]:
        """The labels of the taps."""
        return self.labels[-2 * len(self.taps) : -len(self.taps)]

    @property
    def padded(self) -> Any:
        """The array with its padding."""
        if all(p == (0, 0, 0) for p in self.padding):
            return self.array
        padding = [(0, 0, 0)] * (self.array.ndim - len(self.taps)) + list(self.padding)
        return jax.lax.pad(self.array, jnp.zeros((), self.array.dtype), padding)

    def at_taps(self, padded: Any, tap: Sequence[Any]) -> Factor:
        """The factor at a tap of the first spatial axes, whose place may be traced, with all taps of the other axes."""
        spatial, outer = len(self.taps), len(tap)
        lead = padded.ndim - spatial
        extent = [(n - 1) * d + 1 for n, d in zip(self.positions, self.dilation, strict=True)]
        start = [self._start(axis, k) for axis, k in enumerate(tap)]
        place = [jnp.asarray(k, jnp.int32) for k in (*[0] * lead, *start, *[0] * (spatial - outer))]
        sizes = (*padded.shape[:lead], *extent[:outer], *padded.shape[lead + outer :])
        rows = jax.lax.dynamic_slice(padded, place, sizes)
        cuts = []
        for rest in itertools.product(*map(range, self.taps[outer:])):
            first = [0] * (lead + outer) + [self._start(outer + i, k) for i, k in enumerate(rest)]
            last = [*padded.shape[:lead], *(k + n for k, n in zip(first[lead:], extent, strict=True))]
            cuts.append(jax.lax.slice(rows, first, last, (*[1] * lead, *self.dilation)))
        array = jnp.stack(cuts, lead).reshape(*padded.shape[:lead], *self.taps[outer:], *self.positions)
        return Factor(array, (*self.labels[:lead], *self.labels[lead + outer :]), self.batched)

    def _start(self, axis: int, tap: Any) -> Any:
        return (self.taps[axis] - 1 - tap if self.flipped[axis] else tap) * self.stride[axis]

    def expanded(self) -> Factor:
        """The windows as an array."""
        return self.at_taps(self.padded, ())


@dataclasses.dataclass(frozen=True)
class Places:
    """Where entries stand along an axis of length ``size``: entry k at ``index[k]``, nowhere if that is ``size``."""

    index: Any  # a NumPy array where it is known while tracing
    labels: tuple[Label, ...]
    size: int
    batched: bool

    @property
    def static(self) -> bool:
        """Whether the places are known, and no two entries share one."""
        return isinstance(self.index, np.ndarray)

    @property
    def inside(self) -> Factor:
        """One for each entry that stands somewhere."""
        return Factor(self.index < self.size, self.labels, self.batched)


@dataclasses.dataclass(frozen=True)
class Term:
    """``scale * einsum(factors)``; ``axes`` holds the labels of each axis of the result, several for a merged one.

    ``mask``, a boolean of shape (), makes the term zero whatever its factors hold.
    """

    factors: tuple[Factor, ...]
    axes: tuple[tuple[Label, ...], ...]
    sizes: dict[Label, int]
    places: dict[Label, Places] = dataclasses.field(default_factory=dict)
    scale: tuple[Factor, ...] = ()
    mask: Any = None
    precision: Any = None
    """That of the array; norms are computed as exactly as can be."""
    centred: bool = False
    """Whether it is one of those that :func:`centred` makes."""

    @property
    def out(self) -> list[Label]:
        """The labels of the result, row-major."""
        return [label for axis in self.axes for label in axis]

    @property
    def stored(self) -> int:
        """Elements kept for each example."""
        return sum(f.stored for f in self.factors if f.batched)

    def replace(self, **changes: Any) -> Term:
        """A copy with other fields."""
        return dataclasses.replace(self, **changes)

    def relabelled(self, table: dict[Label, Label]) -> Term:
        """The same term under other labels."""
        get = lambda labels: tuple(table.get(x, x) for x in labels)
        return self.replace(
            factors=tuple(dataclasses.replace(f, labels=get(f.labels)) for f in self.factors),
            axes=tuple(map(get, self.axes)),
            sizes={table.get(x, x): n for x, n in self.sizes.items()},
            places={table.get(x, x): dataclasses.replace(p, labels=get(p.labels)) for x, p in self.places.items()},
        )

    def fresh(self) -> Term:
        """The same term under labels of its own."""
        return self.relabelled({x: new_label() for x in self.sizes})


def lengths(term: Term) -> tuple[int, ...]:
    """The shape of the result."""
    return tuple(math.prod(term.sizes[x] for x in axis) for axis in term.axes)


def consistent(term: Term) -> bool:
    """Whether every array in the term has the lengths of its labels."""
    plain = ((f.array.shape, f.labels) for f in (*term.factors, *term.scale) if not isinstance(f, Windows))
    placed = ((p.index.shape, p.labels) for p in term.places.values())
    same = all(shape == tuple(term.sizes[x] for x in labels) for shape, labels in (*plain, *placed))
    return same and all(term.sizes[x] == p.size for x, p in term.places.items())


def whole(array: Any, batched: bool) -> Term:
    """An array as a network of one factor.

    An axis of length 1 has no label in the result. In the factor it keeps one, summed over: so the array stays the
    very array, and a loop that returns it twice can tell.
    """
    labels = tuple(new_label() for _ in array.shape)
    axes = tuple((label,) if n != 1 else () for label, n in zip(labels, array.shape, strict=True))
    return Term((Factor(array, labels, batched),), axes, dict(zip(labels, array.shape, strict=True)))


def _einsum(
    factors: Sequence[Factor], out: Sequence[Label], sizes: dict[Label, int], dtype: Any, precision: Any
) -> Any:
    """The factors contracted to the labels ``out``, in the cheapest order."""
    numbers: dict[Label, int] = {}
    number = lambda labels: [numbers.setdefault(x, len(numbers)) for x in labels]
    operands: list[Any] = []
    scalars = [f for f in factors if not f.labels]
    factors = [f for f in factors if f.labels]
    for f in factors:
        array = f.array if jnp.issubdtype(f.array.dtype, jnp.inexact) else f.array.astype(dtype)
        operands += [array, number(f.labels)]
    present = [x for x in out if x in numbers]
    result = (
        jnp.einsum(
            *operands,
            number(present),
            optimize=_path([f.labels for f in factors], [f.batched for f in factors], present, sizes)[0],
            precision=precision,
            preferred_element_type=dtype,
        )
        if operands
        else jnp.ones((), dtype)
    )
    if len(present) < len(out):
        shape = tuple(sizes[x] for x in out)
        result = jax.lax.broadcast_in_dim(result, shape, [i for i, x in enumerate(out) if x in numbers])
    return _scaled(result, scalars)


_EXAMPLES = 16  # in the count of operations: what all examples share is done once


def _path(
    groups: Sequence[tuple[Label, ...]], batched: Sequence[bool], out: Sequence[Label], sizes: dict[Label, int]
) -> tuple[Any, float]:
    """The cheapest order of a contraction, and its multiplications for each example."""
    groups = [tuple(x for x in dict.fromkeys(g) if sizes[x] != 1) for g in groups]
    present = dict.fromkeys(x for g in groups for x in g)
    symbols = {x: opt_einsum.get_symbol(i + 1) for i, x in enumerate(present)}
    example = opt_einsum.get_symbol(0)
    names = ["".join(symbols[x] for x in g) + example * flag for g, flag in zip(groups, batched, strict=True)]
    target = "".join(symbols[x] for x in dict.fromkeys(out) if x in present) + example * any(batched)
    shapes = [tuple(sizes[x] for x in g) + (_EXAMPLES,) * flag for g, flag in zip(groups, batched, strict=True)]
    if len(shapes) < 2:
        return [(0,)] * len(shapes), float(math.prod(sizes[x] for g in groups for x in g))
    # "optimal" misses the cheapest order where a label is shared by more than two factors, as that of the examples is.
    optimize = "branch-all" if len(shapes) < 7 else "greedy"
    path, info = opt_einsum.contract_path(f"{','.join(names)}->{target}", *shapes, shapes=True, optimize=optimize)
    return path, float(info.opt_cost) / (_EXAMPLES if any(batched) else 1)


def _expanded(factors: Iterable[Factor]) -> list[Factor]:
    return [f.expanded() if isinstance(f, Windows) else f for f in factors]


def _scaled(value: Any, scale: Sequence[Factor]) -> Any:
    for f in scale:
        value = value * f.array.astype(value.dtype)
    return value


def _entry(f: Factor, at: dict[Label, Any]) -> Factor:
    """The factor at one place along some of its labels."""
    for label, place in at.items():
        while label in f.labels:
            i = f.labels.index(label)
            array = jax.lax.dynamic_index_in_dim(f.array, place, i, keepdims=False)
            f = Factor(array, (*f.labels[:i], *f.labels[i + 1 :]), f.batched)
    return f


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


def _looped(term: Term, window: Windows) -> int:
    """How many spatial axes to loop over, from the first.

    The windows of the others are no larger than the one factor that they are multiplied with, which is read less often
    then: that matters where there are few channels. With more factors, products of some of them would be larger.
    """
    looped, others = len(window.taps), [f for f in term.factors if f is not window]
    size = math.prod(window.array.shape[: window.array.ndim - looped]) * math.prod(window.positions)
    while looped and len(others) == 1 and size * window.taps[looped - 1] <= others[0].stored:
        looped -= 1
        size *= window.taps[looped]
    return looped


def _over_taps(terms: Sequence[Term], compute: Callable[..., Any]) -> tuple[Any, list[int]] | None:
    """What ``compute`` makes of terms of one shape at each tap of a convolution window, ``[taps, ...]``; None without.

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


def dense(term: Term, dtype: Any) -> Any:
    """The term as an array."""
    shape = lengths(term)
    found = _over_taps([term], lambda part: dense(part, dtype))
    if found is not None:
        parts, order = found
        looped = parts.ndim - len(order)
        parts = parts.squeeze(tuple(range(looped, 2 * looped)))
        return parts.transpose([order.index(axis) for axis in range(len(order))])
    spread = [x for x in term.out if x in term.places]
    plain = [x for x in term.out if x not in term.places]
    entries = list(dict.fromkeys(k for x in spread for k in term.places[x].labels))
    values = _einsum(_expanded(term.factors), [*entries, *plain], term.sizes, dtype, term.precision)
    values = _scaled(values, term.scale)
    if spread:
        values = _spread(term, values, spread, plain, entries)
    order = [*spread, *plain]
    values = values.transpose([order.index(x) for x in term.out]).reshape(shape)
    return values if term.mask is None else jnp.where(term.mask, values, 0)


def _spread(term: Term, values: Any, spread: list[Label], plain: list[Label], entries: list[Label]) -> Any:
    """``[entries, plain] -> [spread, plain]``: the entries added at their places."""
    places = [term.places[x] for x in spread]
    if all(
        p.static and contiguous(p.index) and p.labels == (k,) for p, k in zip(places, entries, strict=False)
    ) and len(entries) == len(places):
        padding = [(int(p.index[0]), p.size - int(p.index[-1]) - 1, 0) for p in places]
        return jax.lax.pad(values, jnp.zeros((), values.dtype), [*padding, *[(0, 0, 0)] * len(plain)])
    counts = [term.sizes[k] for k in entries]
    where = []
    for p in places:
        shape = [term.sizes[k] if k in p.labels else 1 for k in entries]
        at = [entries.index(label) for label in p.labels]
        order = sorted(range(len(at)), key=at.__getitem__)
        where.append(jnp.broadcast_to(jnp.transpose(jnp.asarray(p.index), order).reshape(shape), counts))
    target = jnp.zeros((*(p.size for p in places), *(term.sizes[x] for x in plain)), values.dtype)
    return target.at[tuple(where)].add(values, mode="drop")


def contiguous(index: Any) -> bool:
    """Whether indices follow one another."""
    return index.ndim == 1 and bool((np.diff(index) == 1).all()) and len(index) > 0


def matched(a: Term, b: Term, pairs: Sequence[tuple[int, int]]) -> tuple[Term, Term]:
    """Both terms with the paired axes cut into labels of the same lengths."""
    for i, j in pairs:
        position = 0
        if not a.axes[i] or not b.axes[j]:
            continue  # of length 1: repeated along the other
        while position < max(len(a.axes[i]), len(b.axes[j])):
            if position >= min(len(a.axes[i]), len(b.axes[j])):
                raise UnsupportedError("axes of different cut")
            m, n = a.sizes[a.axes[i][position]], b.sizes[b.axes[j][position]]
            if m > n:
                a = split_label(a, a.axes[i][position], n)
            elif n > m:
                b = split_label(b, b.axes[j][position], m)
            position += 1
    return a, b


def split_label(term: Term, label: Label, first: int) -> Term:
    """``label`` of length n as two, of lengths ``first`` and ``n / first``."""
    size = term.sizes[label]
    if size % first or label in term.places or any(label in p.labels for p in term.places.values()):
        raise UnsupportedError("an axis that cannot be cut there")
    pair = new_label(), new_label()
    factors = []
    for f in term.factors:
        if label in f.labels:
            if isinstance(f, Windows):
                f = f.expanded()
            i = f.labels.index(label)
            shape = (*f.array.shape[:i], first, size // first, *f.array.shape[i + 1 :])
            f = Factor(f.array.reshape(shape), (*f.labels[:i], *pair, *f.labels[i + 1 :]), f.batched)
        factors.append(f)
    axes = tuple(tuple(y for x in axis for y in (pair if x == label else (x,))) for axis in term.axes)
    sizes = {k: v for k, v in term.sizes.items() if k != label} | {pair[0]: first, pair[1]: size // first}
    return term.replace(factors=tuple(factors), axes=axes, sizes=sizes)


def _compared(x: Places, y: Places) -> tuple[Any, Any]:
    """The indices of both, equal where entries meet: not where neither stands anywhere."""
    right = jnp.asarray(y.index)
    return jnp.asarray(x.index), right if x.static or y.static else jnp.where(right < y.size, right, -1)


def _meetings(x: Places, y: Places) -> Any:
    """How many pairs of entries meet; in a loop, as XLA on CPU would write out all comparisons to sum them."""
    left, right = _compared(x, y)
    count = lambda _, i: (None, jnp.sum(i == right, dtype=jnp.int32))
    return jnp.sum(jax.lax.scan(count, None, left.reshape(-1), unroll=8)[1])


def inner(a: Term, b: Term, dtype: Any) -> Any:
    """The inner product of two terms of one shape; None where it is zero whatever the factors hold."""
    zero = jnp.zeros((), dtype)
    found = _over_taps([a, b], lambda s, t: zero if (value := inner(s, t, dtype)) is None else value)
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
    ours, theirs = _expanded(a.factors), _expanded(b.factors)
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
    value = _einsum(factors, (), sizes, dtype, jax.lax.Precision.HIGHEST)
    # A label that no factor has is an axis along which the product is constant.
    free = [x for t in (a, b) for x in t.out if x not in t.places]
    free += [k for t in (a, b) for p in t.places.values() for k in p.labels]
    value = value * math.prod(sizes[x] for x in dict.fromkeys(table.get(x, x) for x in free) if x not in held)
    one = jnp.ones((), value.dtype)
    return value * _scaled(one, a.scale) * _scaled(one, b.scale)  # each by itself: together they might overflow


def taken(f: Factor, label: Label, places: Places) -> Factor:
    """The factor read at the places: what a one-hot matrix does to it."""
    if label not in f.labels:
        return f
    i = f.labels.index(label)
    if places.static and contiguous(places.index):
        array = jax.lax.slice_in_dim(f.array, int(places.index[0]), int(places.index[-1]) + 1, axis=i)
    elif places.static:
        array = jnp.take(f.array, jnp.asarray(places.index), axis=i, mode="clip")
    else:
        array = jnp.take(f.array, places.index, axis=i, mode="fill", fill_value=0)
    labels = (*f.labels[:i], *places.labels, *f.labels[i + 1 :])
    return Factor(array, labels, f.batched or places.batched)


def read_at(factors: Sequence[Factor], label: Label, places: Places) -> list[Factor]:
    """Factors read at the places along an axis that is summed over: what stands nowhere counts as zero."""
    found = [taken(f, label, places) for f in factors]
    return found if places.static or any(label in f.labels for f in factors) else [*found, places.inside]


def self_inner(term: Term, dtype: Any) -> Any:
    """The squared norm of a term: by Gram matrices or from the array itself, whichever multiplies less."""
    if _is_direct(term):
        values = _einsum(_expanded(term.factors), _entries(term), term.sizes, dtype, jax.lax.Precision.HIGHEST)
        return jnp.sum(jnp.square(_scaled(values, term.scale)))
    value = _at_entries(term, dtype) if _is_placed(term) else inner(term, term, dtype)
    return jnp.zeros((), dtype) if value is None else value


def _is_placed(term: Term) -> bool:
    """Whether it is one array, put in places along one axis, as the gradient of an embedding is."""
    if len(term.places) != 1 or len(term.factors) != 1:
        return False
    (p,), (f,) = term.places.values(), term.factors
    plain = [x for x in term.out if x not in term.places]
    return not p.static and len({*p.labels, *plain}) == len(p.labels) + len(plain) and set(p.labels) <= set(f.labels)


def _at_entries(term: Term, dtype: Any) -> Any:
    """The squared norm from what stands, in all, in the place of each entry, as the array has it.

    The products of entries that stand in one place might cancel.
    """
    (p,), plain = term.places.values(), [x for x in term.out if x not in term.places]
    copy = {k: new_label() for k in p.labels}
    left, right = _compared(p, p)
    met = left == right.reshape(*right.shape, *[1] * left.ndim)
    same = Factor(met, (*copy.values(), *p.labels), p.batched)
    sizes = term.sizes | {copy[k]: term.sizes[k] for k in p.labels}
    values = _einsum(
        [*_expanded(term.factors), same], [*copy.values(), *plain], sizes, dtype, jax.lax.Precision.HIGHEST
    )
    count = jnp.sum(met, tuple(range(right.ndim, met.ndim)), dtype=dtype)
    squares = jnp.sum(jnp.square(_scaled(values, term.scale)), tuple(range(right.ndim, values.ndim)))
    return jnp.sum(squares / jnp.maximum(count, 1))


def centred(terms: Sequence[Term], dtype: Any) -> tuple[Term, ...]:
    """The same sum, of terms whose norms do not cancel where those of inputs with an offset do.

    Inputs with an offset, or that are almost equal, have products far larger than what is left of them where the
    cotangents add up to zero. So each product becomes one of factors without what their rows have in common, and one
    of that. A factor is not needed twice: the same are used for the sum over the examples.
    """
    terms = merged(terms, shared=True)
    if len(terms) == 1 and (any(isinstance(f, Windows) for f in terms[0].factors) or _is_direct(terms[0])):
        return terms
    return tuple(part for t in terms for part in _centred(t, dtype))


def narrowed(f: Factor, term: Term) -> Factor:
    """The factor without axes of length 1 that nothing else has."""
    single = [i for i, x in enumerate(f.labels) if term.sizes[x] == 1 and x not in term.out]
    if isinstance(f, Windows) or not single:
        return f
    return Factor(jnp.squeeze(f.array, single), tuple(x for i, x in enumerate(f.labels) if i not in single), f.batched)


def is_half(term: Term) -> bool:
    """Whether some factor is kept in half precision."""
    return any(wide(f.array.dtype) != f.array.dtype for f in term.factors)


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
    # A short axis may be that of what is compared, row by row.
    short = [[x] for x in pairs[pair] if term.sizes[x] <= _FEW]
    long = [x for x in pairs[pair] if term.sizes[x] > _FEW]
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
    """What of two factors is orthogonal to one direction along some of the labels that they meet in, and what is not.

    Rows of both are brought to about the same size first, so that none loses digits beside a larger one whose partner
    is smaller; the direction is that of these sizes, so that of rows with an offset nothing is left but what they
    differ in. All sizes are powers of two, which round nothing: then rows of one size lose the very same.
    """
    # Without axes of length 1, which XLA would take off for the norm alone, in a second copy.
    rest = [narrowed(f, term) for f in term.factors]
    means = list(rest)
    axes = tuple(met.index(x) for x in shared)
    # A factor that all examples share stays one array: then the direction is that of its rows, in its own size.
    shares = [i for i in pair if not rest[i].batched]
    sized = pair if len(shares) != 1 else shares * 2
    one, two = (_exponents(rest[i], met, axes, dtype) for i in sized)
    ends = jnp.max(one + two, axes, keepdims=True)
    power = lambda exponent: jnp.ldexp(jnp.ones((), jnp.finfo(dtype).dtype), exponent)
    direction = power(one + two - ends)
    length = jnp.sum(jnp.square(direction), axes, keepdims=True)
    apart = [x for x in met if x not in shared]
    for i, stretch in zip(pair, (power(two - one), power(one - two)), strict=True):
        f = rest[i]
        # As a product, for which XLA writes out no array of this size.
        weights = Factor((direction * stretch).astype(dtype), tuple(met), f.batched)
        left = tuple(x for x in f.labels if x not in shared)
        total = Factor(_einsum([weights, f], left, term.sizes, dtype, jax.lax.Precision.HIGHEST), left, f.batched)
        mean = dataclasses.replace(total, array=total.array / _along(jnp.squeeze(length, axes), total, apart))
        means[i] = mean if i == pair[0] else total
        common = jnp.expand_dims(mean.array, [f.labels.index(x) for x in shared])
        array = f.array * _along(stretch, f, met) - common * _along(direction, f, met)
        rest[i] = dataclasses.replace(f, array=array)
    return [term.replace(factors=tuple(factors), centred=True) for factors in (rest, means)]


def _exponents(f: Factor, met: Sequence[Label], axes: tuple[int, ...], dtype: Any) -> Any:
    """The size of each row of a factor as a power of four of the largest one's, ``[met]``."""
    array, own = f.array.astype(dtype), tuple(i for i, x in enumerate(f.labels) if x not in met)
    if jnp.iscomplexobj(array):
        sizes = jnp.max(jnp.abs(array), own)
    else:  # XLA would write out the array of absolute values
        sizes = jnp.maximum(jnp.max(array, own), -jnp.min(array, own))
    sizes = jax.lax.optimization_barrier(sizes)  # else it would take the largest of all from the array again
    kept = [x for x in f.labels if x in met]
    sizes = jax.lax.stop_gradient(sizes.transpose([kept.index(x) for x in met]))
    largest = jnp.max(sizes, axes, keepdims=True)
    exponents = jnp.round(jnp.log2(sizes / jnp.where(largest == 0, 1, largest)) / 2)
    return jnp.clip(exponents, -60, 0).astype(jnp.int32)


def _along(values: Any, f: Factor, labels: Sequence[Label]) -> Any:
    """Values with these labels, for a product with a factor that has them all."""
    order = [labels.index(x) for x in f.labels if x in labels]
    values = values.transpose(order)
    return jnp.expand_dims(values, [i for i, x in enumerate(f.labels) if x not in labels])


def _entries(term: Term) -> list[Label]:
    """The labels that tell the entries of the result apart, of those that stand in it at known places."""
    return [k for x in term.out for k in (term.places[x].labels if x in term.places else (x,))]


def _is_direct(term: Term) -> bool:
    """Whether the squared norm is taken from the array itself."""
    entries = _entries(term)
    if not all(p.static for p in term.places.values()) or len(set(entries)) < len(entries):
        return False
    groups, flags = [f.labels for f in term.factors], [f.batched for f in term.factors]
    copy = {x: new_label() for x in term.sizes if x not in entries}
    sizes = term.sizes | {copy[x]: n for x, n in term.sizes.items() if x in copy}
    again = [tuple(copy.get(x, x) for x in g) for g in groups]
    # Writing and reading the array costs more than as many multiplications.
    direct = _path(groups, flags, entries, sizes)[1] + 8 * math.prod(sizes[x] for x in entries)
    return direct <= _path([*groups, *again], [*flags, *flags], (), sizes)[1]


def _reach(term: Term, dtype: Any) -> Any:
    """What the norm of a term would be if nothing in it cancelled."""
    kept = {x for x in term.out if x not in term.places}
    lengths = []
    for f in term.factors:
        square = jnp.square(f.array.astype(dtype))
        own = tuple(i for i, x in enumerate(f.labels) if x in kept)
        labels = tuple(x for x in f.labels if x not in kept)
        lengths.append(Factor(jnp.sqrt(jnp.sum(square, own)), labels, f.batched))
    value = _einsum(lengths, (), term.sizes, dtype, jax.lax.Precision.HIGHEST)
    return _masked(jnp.abs(_scaled(value, term.scale)), term.mask)


def _trusted(total: Any, terms: Sequence[Term], dtype: Any) -> Any:
    """A squared norm that rounding has not made too small.

    A sum of products of factors (Gram matrices, several terms) loses digits where they cancel, which the gradient
    itself keeps: inputs with an offset, whose cotangents add up to zero. Where less than two digits are left, the norm
    is taken for as large as it may be: an example is then clipped more than it had to be, but never less.
    """
    exact = lambda t: _is_direct(t) or _is_placed(t) or all(n == 1 for n in _summed(t).values())
    if len(terms) == 1 and exact(terms[0]):
        return total
    reach = sum(_reach(t, dtype) for t in terms)
    error = jnp.square(2 * math.sqrt(jnp.finfo(dtype).eps) * reach)
    return jnp.where(total < 100 * error, total + error, total)


def _summed(term: Term) -> dict[Label, int]:
    """The labels that are summed over, or that meet where indices do, with their lengths."""
    kept = {x for x in term.out if x not in term.places}
    return {x: term.sizes[x] for f in term.factors for x in f.labels if x not in kept}


def squared_norm(terms: Sequence[Term], dtype: Any) -> Any:
    """The squared norm of a sum of terms, products of different terms included."""
    if not terms:
        return jnp.zeros((), wide(dtype))
    dtype = working(terms, dtype)
    found = _over_taps(terms, lambda *parts: squared_norm(parts, dtype))
    if found is not None:
        return jnp.sum(found[0])
    terms = [t.replace(factors=tuple(_expanded(t.factors))) for t in terms]
    terms = [balanced(t) for t in centred(terms, dtype)]
    total = jnp.zeros((), dtype)
    for i, a in enumerate(terms):
        total = total + _masked(self_inner(a, dtype), a.mask)
        for b in terms[:i]:
            product = inner(a, b, dtype)
            if product is not None:
                total = total + 2 * _masked(_masked(product, a.mask), b.mask)
    # Where entries of a product cancel, rounding may leave less than nothing.
    return _trusted(jnp.maximum(total, 0), terms, dtype)


def working(terms: Sequence[Term], dtype: Any) -> Any:
    """The dtype to compute terms of an array of this dtype in: no narrower than what they are made of."""
    parts = [f.array.dtype for t in terms for f in (*t.factors, *t.scale) if f.array.dtype != jnp.bool_]
    return functools.reduce(jnp.promote_types, parts, wide(dtype))


def balanced(term: Term) -> Term:
    """A scaled term whose factors have entries up to 1: what is scaled up or down might not be squared without."""
    usual = lambda x: not isinstance(x, jax.core.Tracer) and 1e-6 < abs(float(x)) < 1e6
    if all(usual(f.array) for f in term.scale):
        return term
    factors, sizes = [], []
    for f in term.factors:
        if f.array.dtype != jnp.bool_ and f.array.size:
            array = f.array.astype(wide(f.array.dtype))
            size = jnp.max(jnp.abs(array))
            size = jnp.where(size == 0, 1, size)
            sizes.append(Factor(size, (), f.batched))
            f = dataclasses.replace(f, array=array / size)
        factors.append(f)
    return term.replace(factors=tuple(factors), scale=(*term.scale, *sizes))


def _masked(value: Any, mask: Any) -> Any:
    return value if mask is None else jnp.where(mask, value, 0)


def folded(term: Term) -> Term:
    """The term with its scale multiplied into the smallest factor."""
    if not term.scale or not term.factors:
        return term
    factors = list(term.factors)
    is_mask = lambda f: f.array.dtype == jnp.bool_
    i = min(range(len(factors)), key=lambda i: (is_mask(factors[i]), not factors[i].batched, factors[i].stored))
    f = factors[i]
    dtype = term.scale[0].array.dtype if is_mask(f) else f.array.dtype
    value = _scaled(f.array.astype(wide(dtype)), term.scale)
    factors[i] = dataclasses.replace(f, array=value, batched=f.batched or any(s.batched for s in term.scale))
    return term.replace(factors=tuple(factors), scale=())


def merged(terms: Sequence[Term], shared: bool = False) -> tuple[Term, ...]:
    """Terms that differ only in what they sum over as one, its factors joined along that axis.

    With ``shared`` also those whose factors are the same for all examples, where only a norm will be taken.
    """
    groups: dict[Any, list[Term]] = {}
    for term in terms:
        key = _kind(term, shared)
        groups.setdefault(key if key is not None else object(), []).append(term)
    return tuple(_joined(group) if len(group) > 1 else group[0] for group in groups.values())


def _kept(term: Term) -> list[Label]:
    """The labels that are not summed over, row-major: those of known places stand for the axis that they are put in."""
    placed = {x: p.labels for x, p in term.places.items() if p.static}
    return [k for x in term.out for k in placed.get(x, (x,))]


def _kind(term: Term, shared: bool) -> Any:
    """What terms have to share to be joined; None for one that cannot be."""
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
    apart = len(terms) <= _FEW and counts[0] > 1 and len(set(counts)) == 1
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
