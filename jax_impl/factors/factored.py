"""Maps the rewritten program of one example over microbatches, and adds up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal

from ..program.evaluate import shaped
from ..program.inline import inline, run_inlined
from ..program.sums import Sum, summed, wide
from ..program.versions import scan_counts
from .evaluator import rewrite
from .one_by_one import dependents, split
from .weighted import sum_of


class Factored:
    """A program of one example, ``(constants, leaves) -> outputs``, mapped over microbatches of any size.

    Outputs that are only to be summed over the examples come out as :class:`Sum` where they have factors, or where they
    are the same for all examples.
    """

    def __init__(self, closed: ClosedJaxpr, axes: Sequence[int], summed: Sequence[bool], in_loop: bool) -> None:
        self.count, self.axes = len(closed.consts), tuple(axes)
        self.in_order = in_loop and jax.default_backend() == "cpu"
        flat = inline(closed, consts_first=True)
        batched = [*[False] * self.count, *[True] * len(self.axes)]
        self.summed = list(summed)
        wanted = [
            s and jnp.issubdtype(shaped(v).dtype, jnp.floating) for v, s in zip(flat.jaxpr.outvars, summed, strict=True)
        ]
        self.program = rewrite(flat, batched, wanted)
        self.split = None
        if whole := dependents(self.program.closed, batched):
            program = self.program.computed(whole)
            arrays = [w and p.terms is None for p, w in zip(program.pieces, wanted, strict=True) for _ in p.flags]
            if one_by_one := split(program.closed, batched, arrays):
                self.program, self.split = program, one_by_one
        self.out_axes = self._example_axes()

    def _example_axes(self) -> list[int | None]:
        """Find where the examples stand in each output; what a loop stacked has them behind its steps."""
        jaxpr = self.program.closed.jaxpr
        scans = [e for e in jaxpr.eqns if e.primitive.name == "scan"]
        stacked = {v for e in scans for v in e.outvars[scan_counts(e.params)[1] :]}
        axes: list[int | None] = []
        outvars = iter(jaxpr.outvars)
        for piece in self.program.pieces:
            for flag in piece.flags:
                v = next(outvars)
                moved = piece.terms is not None and not isinstance(v, Literal) and v in stacked and shaped(v).ndim > 0
                axes.append(None if not flag else 1 if moved else 0)
        for place in self.split.places if self.split else ():
            axes[place] = 0
        return axes

    def is_kept_for_one(self) -> list[bool]:
        """Return which outputs are made and summed for one example after another, and so kept for one alone."""
        places = self.split.places if self.split else []
        alone = [i in places for i in range(len(self.program.closed.jaxpr.outvars))]
        return [all(group) for group in self.program.groups(alone)]

    def __call__(self, consts: Sequence[Any], *leaves: Any) -> list[Any]:
        """Return the outputs for a microbatch, the examples on axis 0."""
        out_axes, rows = self.out_axes, leaves[0].shape[self.axes[0]]
        closed, axes = (self.split.head, self.split.axes(out_axes)) if self.split else (self.program.closed, out_axes)
        mapped = jax.vmap(lambda *x: run_inlined(closed, *consts, *x), self.axes, axes)(*leaves)
        mapped = self.split.run(mapped, rows) if self.split else mapped
        groups = list(zip(self.program.groups(mapped), self.program.groups(out_axes), strict=True))
        sums = self._sums(groups, rows)
        outs: list[Any] = []
        for i, (piece, (arrays, _)) in enumerate(zip(self.program.pieces, groups, strict=True)):
            if i in sums:
                outs.append(sums[i])
            elif piece.flags[0]:
                outs.append(arrays[0])
            elif self.summed[i]:  # the same for all examples, as the zeros of a frozen parameter: never stacked
                outs.append(Sum(arrays[0].astype(wide(summed(piece.dtype))) * rows, rows, piece.dtype))
            else:
                outs.append(jnp.broadcast_to(arrays[0], (rows, *piece.shape)))
        return outs

    def _sums(self, groups: Sequence[tuple[list[Any], list[int | None]]], rows: int) -> dict[int, Sum]:
        """Return the sums of the pieces that are factors, in a loop on CPU one after another; see :mod:`weighted`."""
        pieces = self.program.pieces
        variables = self.program.groups(self.program.closed.jaxpr.outvars)
        sums: dict[int, Sum] = {}
        last = None
        waited: dict[Any, Any] = {}  # factor -> what its sum waited for: others can share the weighted factor
        for i in sorted(range(len(pieces)), key=lambda i: -math.prod(pieces[i].shape)):
            terms = pieces[i].terms
            if terms is None:
                continue
            # Else XLA computes the factors once more, fused with their weighting, and keeps all that this takes.
            arrays = [jax.lax.optimization_barrier(array) for array in groups[i][0]]
            factors = [v for v in variables[i] if not isinstance(v, Literal) and shaped(v).size > 1]
            after = next((waited[v] for v in factors if v in waited), last)
            waited.update((v, after) for v in factors)
            total = sum_of(pieces[i], arrays, groups[i][1], rows, after)
            sums[i] = Sum(total, rows, pieces[i].dtype)
            # What is scattered is added in place, and nothing should read it before.
            if self.in_order and total.size and not any(t.places for t in terms):
                last = total
        return sums
