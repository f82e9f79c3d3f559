"""How products pass uncomputed through loops: a carry that only collects, outputs that a loop stacks.

The loop runs a rewritten body that returns the factors of each step, stacked. The step is one more axis of the
products then: summed over in what was collected, the first one in what is stacked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var

from ..program.dataflow import pruned, uses
from ..program.evaluate import shaped
from ..program.inline import batched_in_scan, inline, run_inlined
from ..program.sums import wide
from ..program.versions import scan_counts
from .casts import are_rounded_alike
from .lazy import Lazy
from .pieces import Rewritten, stacked
from .registry import Evaluator, Known, rule
from .terms import Factor, Label, Term, UnsupportedError, new_label


@dataclasses.dataclass(frozen=True)
class LoopSums:
    """The carries of a scan that only collect: what is added to each in a step, by its place."""

    body: ClosedJaxpr
    parts: dict[int, list[Var]]


def loop_sums(e: JaxprEqn, kinds: dict[Var, str]) -> LoopSums:
    """Find, among the carries that may stay factors, those that nothing but an addition reads."""
    body = inline(e.params["jaxpr"])
    jaxpr = body.jaxpr
    first, carried = scan_counts(e.params)
    read_by = uses(jaxpr)
    outs = [v for v in jaxpr.outvars if not isinstance(v, Literal)]
    parts: dict[int, list[Var]] = {}
    for k in range(carried):
        if kinds.get(e.outvars[k]) != "lazy":
            continue
        v, added = jaxpr.invars[first + k], []
        while v is not jaxpr.outvars[k]:
            found = read_by.get(v, [])
            if len(found) != 1 or found[0].primitive.name not in ("add", "add_any") or v in outs:
                break
            others = [x for x in found[0].invars if x is not v]
            if len(others) != 1 or isinstance(others[0], Literal) or shaped(others[0]).shape != shaped(v).shape:
                break
            added.append(others[0])
            v = found[0].outvars[0]
        if v is jaxpr.outvars[k] and outs.count(v) == 1 and not read_by.get(v) and are_rounded_alike(jaxpr, added):
            parts[k] = added
    return LoopSums(body, parts)


def _of_scan(e: JaxprEqn, i: int, known: Known) -> str:
    constants, carried = scan_counts(e.params)
    k = i - constants
    return "lazy" if 0 <= k < carried and k in loop_sums(e, known.kinds).parts else ""


@rule("scan", accepts=_of_scan)
def _scan(ev: Evaluator, e: JaxprEqn) -> list[Any]:
    """Let a loop whose carry only collects, or whose stacked outputs are products, return factors instead."""
    loop = _Loop(ev, e)
    last, sums = loop.run()
    outputs: dict[int, Any] = dict(zip(loop.kept, last, strict=True))
    totals: dict[int, list[Any]] = {k: [] for k in loop.sums.parts}
    for i, (k, v) in enumerate(loop.collected):
        if i in loop.dense_sums:
            totals[k].append((sums[loop.dense_sums.index(i)], ev.is_batched(e.outvars[k])))
        else:
            totals[k].append(Lazy(shaped(v).shape, shaped(v).dtype, loop.product(i, None)))
    for k, parts in totals.items():
        start = e.invars[loop.constants + k]
        total = Lazy(shaped(e.outvars[k]).shape, shaped(e.outvars[k]).dtype, ())
        if not ev.is_zero(start):
            total = total.plus(ev.read(start), ev.is_batched(start))
        for part in parts:
            total = total.plus(*part) if isinstance(part, tuple) else total.plus(part, True)
        outputs[k] = ev.settled(e.outvars[k], total, e)
    for j, v in enumerate(e.outvars[loop.carried :]):
        i = len(loop.collected) + j
        if loop.pieces[i].terms is None:
            outputs[loop.carried + j] = loop.arrays(i)[0][0]
            continue
        value = Lazy(shaped(v).shape, shaped(v).dtype, loop.product(i, new_label()))
        outputs[loop.carried + j] = ev.settled(v, value, e)
    return [outputs[k] for k in range(len(e.outvars))]


class _Loop:
    """A scan whose body returns factors."""

    def __init__(self, ev: Evaluator, e: JaxprEqn) -> None:
        self.e, self.sums = e, loop_sums(e, ev.kinds)
        self.constants, self.carried = scan_counts(e.params)
        outs = e.outvars[self.carried :]
        if not self.sums.parts and not any(v in ev.kinds for v in outs):
            raise UnsupportedError("a carry that is more than a sum")
        flags, _ = batched_in_scan(e, [ev.is_batched(v) for v in e.invars])
        self.kept = [k for k in range(self.carried) if k not in self.sums.parts]
        first, last = self.constants, self.constants + self.carried
        inputs = [*range(first), *(first + k for k in self.kept), *range(last, len(e.invars))]
        self.collected = [(k, v) for k, parts in self.sums.parts.items() for v in parts]
        body: Any = self.sums.body.jaxpr
        outvars = [
            *(body.outvars[k] for k in self.kept),
            *(v for _, v in self.collected),
            *body.outvars[self.carried :],
        ]
        inner = body.replace(invars=[body.invars[i] for i in inputs], outvars=outvars)
        wanted = [*[False] * len(self.kept), *[True] * len(self.collected), *(v in ev.kinds for v in outs)]
        closed = pruned(ClosedJaxpr(inner, self.sums.body.consts))
        self.program = ev.rewrite(closed, [flags[i] for i in inputs], wanted)
        self.values = [ev.array(e.invars[i]) for i in inputs]
        self.pieces = self.program.pieces[len(self.kept) :]
        self.dense_sums = [i for i, _ in enumerate(self.collected) if self.pieces[i].terms is None]
        self.emitted = _Emitted.of(self.program, len(self.kept), self.dense_sums, first, first + len(self.kept))
        self.ys: Sequence[Any] = ()

    def run(self) -> tuple[Sequence[Any], Sequence[Any]]:
        """Run it, and return the last values of the carries that stay and the sums that are arrays."""
        kept, offsets, shared = len(self.kept), self.program.offsets, self.values[: self.constants]
        avals = [shaped(self.collected[i][1]) for i in self.dense_sums]
        starts = [jnp.zeros(aval.shape, aval.dtype) for aval in avals]
        carried = [kept + i for i in self.dense_sums]

        def step(state: Any, x: Any) -> Any:
            outs = run_inlined(self.program.closed, *shared, *state[0], *x)
            added = [a + outs[offsets[i]] for a, i in zip(state[1], carried, strict=True)]
            return (outs[:kept], added), [outs[i] for i in self.emitted.places]

        options = {k: self.e.params[k] for k in ("length", "reverse", "unroll")}
        start, xs = self.values[self.constants : self.constants + kept], self.values[self.constants + kept :]
        (last, added), self.ys = jax.lax.scan(step, (start, starts), xs, **options)
        return last, added

    def arrays(self, i: int) -> tuple[list[Any], list[int | None]]:
        """Return the arrays of a piece, and which of them are stacked."""
        return self.emitted.arrays(i, self.ys, self.values)

    def product(self, i: int, label: Label | None) -> tuple[Term, ...]:
        """Return the terms of a piece with its steps as an axis of this label, or summed over."""
        arrays, axes = self.arrays(i)
        piece, length = self.pieces[i], self.e.params["length"]
        if label is not None and any(not p.static for t in piece.terms or () for p in t.places.values()):
            raise UnsupportedError("indexed arrays that a loop stacks")
        terms = []
        for t in piece.terms or ():
            terms.append(stacked(t, arrays, axes, length, label))
            steps = terms[-1].sizes.keys() - t.sizes.keys()
            held = {x for f in terms[-1].factors for x in f.labels}
            held |= {x for p in terms[-1].places.values() for x in p.labels}
            if label is None and not steps & held:  # the same in every step
                count = Factor(jnp.asarray(float(length), wide(piece.dtype)), (), False)
                terms[-1] = terms[-1].replace(scale=(*terms[-1].scale, count))
        return tuple(terms)


@dataclasses.dataclass(frozen=True)
class _Emitted:
    """Where a scan's pieces come from: what its body hands through is not stacked again, equal outputs only once."""

    places: list[int]  # flat outputs of the body that the scan stacks
    sources: dict[int, list[tuple[str, int]]]  # piece -> for each array ("y", n-th stacked) or ("x" or "const", input)

    @classmethod
    def of(cls, program: Rewritten, kept: int, carried: Sequence[int], n_consts: int, first_x: int) -> _Emitted:
        """For a body with so many constants, then carries, then slices."""
        inputs = {v: i for i, v in enumerate(program.closed.jaxpr.invars)}
        seen: dict[Any, int] = {}
        places: list[int] = []
        sources: dict[int, list[tuple[str, int]]] = {}
        for i, piece in enumerate(program.pieces[kept:]):
            if i in carried:
                continue
            found = sources.setdefault(i, [])
            for place in range(program.offsets[kept + i], program.offsets[kept + i] + len(piece.flags)):
                v = program.closed.jaxpr.outvars[place]
                given = None if isinstance(v, Literal) else inputs.get(v)
                if given is not None and given >= first_x:
                    found.append(("x", given))
                elif given is not None and given < n_consts and piece.terms is not None:
                    found.append(("const", given))
                else:
                    key = place if isinstance(v, Literal) else v
                    if key not in seen:
                        seen[key] = len(places)
                        places.append(place)
                    found.append(("y", seen[key]))
        return cls(places, sources)

    def arrays(self, piece: int, ys: Sequence[Any], values: Sequence[Any]) -> tuple[list[Any], list[int | None]]:
        """Return the arrays of a piece, and which of them are stacked."""
        sources = self.sources[piece]
        found = [ys[i] if kind == "y" else values[i] for kind, i in sources]
        return found, [None if kind == "const" else 0 for kind, _ in sources]
