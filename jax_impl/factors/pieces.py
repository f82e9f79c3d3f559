"""Programs whose outputs are arrays and factors: which arrays belong to which product."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Var

from ..program.dataflow import within
from ..program.evaluate import shaped
from ..program.inline import run_inlined
from .explain import Path
from .lazy import Lazy
from .terms import Factor, Label, Term, UnsupportedError, new_label


@dataclasses.dataclass(frozen=True)
class Piece:
    """What an output became: ``count`` arrays that differ between examples or not, and the terms they belong to.

    ``terms`` is None for an output that is just an array. In the terms, integers stand for the arrays.
    """

    flags: list[bool]
    terms: tuple[Term, ...] | None
    shape: tuple[int, ...]
    dtype: Any


@dataclasses.dataclass(frozen=True)
class Rewritten:
    """A program of one example whose outputs are arrays and factors."""

    closed: ClosedJaxpr
    pieces: list[Piece]
    paths: list[Path]

    @property
    def offsets(self) -> list[int]:
        """Where the flat outputs of each piece begin."""
        counts = [len(piece.flags) for piece in self.pieces]
        return [sum(counts[:i]) for i in range(len(counts))]

    def groups(self, arrays: Sequence[Any]) -> list[list[Any]]:
        """Return the flat outputs, those of each piece together."""
        rest = iter(arrays)
        return [[next(rest) for _ in piece.flags] for piece in self.pieces]

    def computed(self, variables: set[Var]) -> Rewritten:
        """Return a program with arrays in the place of products in which one of the variables is."""
        outs = self.groups(self.closed.jaxpr.outvars)
        used = [any(within(v, variables) and shaped(v).size > 1 for v in vs) for vs in outs]
        pieces = [Piece([True], None, p.shape, p.dtype) if u else p for p, u in zip(self.pieces, used, strict=True)]

        def run(*args: Any) -> list[Any]:
            groups = zip(self.pieces, self.groups(run_inlined(self.closed, *args)), used, strict=True)
            return [x for p, arrays, u in groups for x in ([unpacked(p, arrays).dense()] if u and p.terms else arrays)]

        inputs = [jax.core.ShapedArray(shaped(v).shape, shaped(v).dtype) for v in self.closed.jaxpr.invars]
        return Rewritten(jax.make_jaxpr(run)(*inputs), pieces, self.paths)


def packed(value: Lazy) -> tuple[list[tuple[Any, bool]], tuple[Term, ...]]:
    """Take the arrays out of a value, each with whether it differs between examples; numbers stand for them."""
    arrays: list[tuple[Any, bool]] = []

    def keep(array: Any, batched: bool) -> int:
        arrays.append((array, batched))
        return len(arrays) - 1

    terms = []
    for t in value.terms:
        terms.append(
            t.replace(
                factors=tuple(dataclasses.replace(f, array=keep(f.array, f.batched)) for f in t.factors),
                places={
                    x: p if p.static else dataclasses.replace(p, index=keep(p.index, p.batched))
                    for x, p in t.places.items()
                },
                scale=tuple(dataclasses.replace(f, array=keep(f.array, f.batched)) for f in t.scale),
                mask=None if t.mask is None else keep(t.mask, True),
            )
        )
    return arrays, tuple(terms)


def unpacked(piece: Piece, arrays: Sequence[Any]) -> Lazy:
    """Return the value of one example that a piece stands for."""
    terms = [
        t.replace(
            factors=tuple(dataclasses.replace(f, array=arrays[f.array]) for f in t.factors),
            places={x: p if p.static else dataclasses.replace(p, index=arrays[p.index]) for x, p in t.places.items()},
            scale=tuple(dataclasses.replace(f, array=arrays[f.array]) for f in t.scale),
            mask=None if t.mask is None else arrays[t.mask],
        )
        for t in piece.terms or ()
    ]
    return Lazy(piece.shape, piece.dtype, tuple(terms))


def stacked(term: Term, arrays: Sequence[Any], stacked: Sequence[int | None], length: int, axis: Label | None) -> Term:
    """Put arrays into a packed term, each stacked along an axis or not; they are summed, or stay apart as an axis."""
    label = new_label() if axis is None else axis

    def labelled(i: int, labels: tuple[Label, ...]) -> tuple[Label, ...]:
        at = stacked[i]
        return labels if at is None else (*labels[:at], label, *labels[at:])

    factors = [dataclasses.replace(f, array=arrays[f.array], labels=labelled(f.array, f.labels)) for f in term.factors]
    for f in term.scale:
        factors.append(Factor(arrays[f.array], labelled(f.array, ()), f.batched))
    if term.mask is not None:
        raise UnsupportedError("a mask that changes in a loop")
    places = {
        x: p if p.static else dataclasses.replace(p, index=arrays[p.index], labels=labelled(p.index, p.labels))
        for x, p in term.places.items()
    }
    scale = tuple(f for f in factors if not f.labels)
    axes = term.axes if axis is None else ((label,), *term.axes)
    rest = tuple(f for f in factors if f.labels)
    return term.replace(factors=rest, scale=scale, places=places, axes=axes, sizes=term.sizes | {label: length})
