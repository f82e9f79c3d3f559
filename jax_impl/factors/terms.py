"""Arrays kept as what they are products of: sums of tensor networks, contracted only when that is cheap.

A :class:`Term` is an einsum that has not been carried out. Its factors are arrays whose axes carry labels; a label
that no axis of the result has is summed over. So the gradient of a weight matrix is ``X[t, i] D[t, o]`` with axes
``(i, o)``. An axis may be reached through :class:`Places`, a one-hot matrix kept as indices: the gradient of an
embedding is ``D[t, o]`` whose ``t`` stands at ``index[t]`` of the vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..program.sums import wide

Label = int
_counter = itertools.count()


def new_label() -> Label:
    """Return a label that no other network has."""
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
        """Cut out a tap of the first spatial axes, whose place may be traced, with all taps of the other axes."""
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
        """Return the windows as an array."""
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
        """Return a copy with other fields."""
        return dataclasses.replace(self, **changes)

    def relabelled(self, table: dict[Label, Label]) -> Term:
        """Return the same term under other labels."""
        get = lambda labels: tuple(table.get(x, x) for x in labels)
        return self.replace(
            factors=tuple(dataclasses.replace(f, labels=get(f.labels)) for f in self.factors),
            axes=tuple(map(get, self.axes)),
            sizes={table.get(x, x): n for x, n in self.sizes.items()},
            places={table.get(x, x): dataclasses.replace(p, labels=get(p.labels)) for x, p in self.places.items()},
        )

    def fresh(self) -> Term:
        """Return the same term under labels of its own."""
        return self.relabelled({x: new_label() for x in self.sizes})


def lengths(term: Term) -> tuple[int, ...]:
    """Return the shape of the result."""
    return tuple(math.prod(term.sizes[x] for x in axis) for axis in term.axes)


def consistent(term: Term) -> bool:
    """Tell whether every array in the term has the lengths of its labels."""
    plain = ((f.array.shape, f.labels) for f in (*term.factors, *term.scale) if not isinstance(f, Windows))
    placed = ((p.index.shape, p.labels) for p in term.places.values())
    same = all(shape == tuple(term.sizes[x] for x in labels) for shape, labels in (*plain, *placed))
    return same and all(term.sizes[x] == p.size for x, p in term.places.items())


def whole(array: Any, batched: bool) -> Term:
    """Return an array as a network of one factor.

    An axis of length 1 has no label in the result. In the factor it keeps one, summed over: so the array stays the
    very array, and a loop that returns it twice can tell.
    """
    labels = tuple(new_label() for _ in array.shape)
    axes = tuple((label,) if n != 1 else () for label, n in zip(labels, array.shape, strict=True))
    return Term((Factor(array, labels, batched),), axes, dict(zip(labels, array.shape, strict=True)))


def expanded(factors: Iterable[Factor]) -> list[Factor]:
    """Make arrays of the windows among factors."""
    return [f.expanded() if isinstance(f, Windows) else f for f in factors]


def narrowed(f: Factor, term: Term) -> Factor:
    """Return the factor without axes of length 1 that nothing else has."""
    single = [i for i, x in enumerate(f.labels) if term.sizes[x] == 1 and x not in term.out]
    if isinstance(f, Windows) or not single:
        return f
    return Factor(jnp.squeeze(f.array, single), tuple(x for i, x in enumerate(f.labels) if i not in single), f.batched)


def is_half(term: Term) -> bool:
    """Tell whether some factor is kept in half precision."""
    return any(wide(f.array.dtype) != f.array.dtype for f in term.factors)


def invertible(size: jax.Array) -> jax.Array:
    """Return a size to divide by: 1 for 0, and none whose inverse, by which XLA multiplies, is no normal number."""
    tiny = float(jnp.finfo(size.dtype).tiny)
    return jnp.where(size >= tiny, jnp.minimum(size, 0.25 / tiny), 1)


def unit_sized(f: Factor) -> tuple[Factor, Factor | None]:
    """Return a factor with entries up to 1, and the number that it was divided by; None for one of flags."""
    if f.array.dtype == jnp.bool_ or not f.array.size:
        return f, None
    array = f.array.astype(wide(f.array.dtype))
    size = invertible(jnp.max(jnp.abs(array)))
    return dataclasses.replace(f, array=array / size), Factor(size, (), f.batched)


def working(terms: Sequence[Term], dtype: Any) -> Any:
    """Return the dtype to compute terms of an array of this dtype in: no narrower than what they are made of."""
    parts = [wide(f.array.dtype) for t in terms for f in (*t.factors, *t.scale) if f.array.dtype != jnp.bool_]
    return functools.reduce(jnp.promote_types, parts, wide(dtype))


def contiguous(index: Any) -> bool:
    """Tell whether indices follow one another."""
    return index.ndim == 1 and bool((np.diff(index) == 1).all()) and len(index) > 0


def matched(a: Term, b: Term, pairs: Sequence[tuple[int, int]]) -> tuple[Term, Term]:
    """Cut the paired axes of two terms into labels of the same lengths."""
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
    """Cut a label of length n into two, of lengths ``first`` and ``n / first``."""
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


def taken(f: Factor, label: Label, places: Places) -> Factor:
    """Return the factor read at the places: what a one-hot matrix does to it."""
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
    """Read factors at the places along an axis that is summed over: what stands nowhere counts as zero."""
    found = [taken(f, label, places) for f in factors]
    return found if places.static or any(label in f.labels for f in factors) else [*found, places.inside]
