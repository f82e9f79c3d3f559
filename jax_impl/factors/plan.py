"""Sums over examples of what each example computes, without computing it for each.

The gradient of a weight is, for one example, a product: ``X[t, i] D[t, o]`` summed over t. Its norm and the weighted
sum of such gradients over a batch follow from the factors (:mod:`networks`), and nothing of size batch x parameters has
to exist. Here the program of one example is rewritten so that it returns factors in the place of such arrays:

1. :func:`plan` finds, from the outputs backwards, the variables that are only ever used in ways that factors allow:
   moved, scaled, added up, squared and summed, and in the end summed over the examples.
2. :class:`_Evaluator` traces the program once more. At a variable that was found, a product is not carried out;
   :mod:`rules` carries it through the operations. What has no rule, or is no larger than its factors, is computed.
3. :class:`Factored` maps the rewritten program over a microbatch and adds up.

For layers with hooks this is known as ghost norms (Li et al., 2021, arXiv:2110.05679) and book-keeping (Bu et al.,
2022, arXiv:2210.00038); on a program it holds for any function.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal

from ..program.convolutions import bind_fast, bind_mapped
from ..program.dataflow import makers, pruned, uses, within
from ..program.evaluate import evaluate, own_width, read, shaped
from ..program.inline import batched_in_scan, batched_variables, inline, run_inlined
from ..program.sums import Sum, is_narrow, summed, wide
from ..program.versions import scan_counts
from . import convolutions  # noqa: F401  (its rule)
from .casts import cast_marks, rounds
from .contract import dense
from .lazy import Lazy, Squares
from .merging import merged
from .one_by_one import dependents, split
from .rules import ACCEPTS, RULES, adds, loop_sums
from .terms import Factor, Label, Term, UnsupportedError, new_label, whole, working

_REPEATS = ("broadcast_in_dim", "convert_element_type", "reshape", "copy", "squeeze", "transpose", "slice", "name")
_MOST_TERMS = 8  # terms that cannot be joined cost one product for each pair


@dataclasses.dataclass(frozen=True)
class Path:
    """How one array was computed for each example: ``factored``, ``direct`` or ``materialised``, and why."""

    path: str
    reason: str
    stored: int
    """Elements kept for each example."""


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What a parameter's per-example gradients are kept as, by the parameter's name; printed, a table.

    A path is ``"factored"`` (a product that is not carried out), ``"direct"`` (an array no larger than what it is
    computed from, such as a bias's) or ``"materialised"`` (an array, as no rule covers it; the reason says where).
    """

    paths: dict[str, Path]
    dense_bytes: dict[str, int]
    """What the gradients of a microbatch would take as arrays."""
    kept_bytes: dict[str, int]
    """What is kept for a microbatch."""

    def __str__(self) -> str:
        rows = [("parameter", "path", "kept bytes", "as arrays", "why")]
        for name, p in self.paths.items():
            rows.append((name or "all", p.path, str(self.kept_bytes[name]), str(self.dense_bytes[name]), p.reason))
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        cells = [[row[i].ljust(w) for i, w in enumerate(widths)] for row in rows]
        return "\n".join("  ".join([*cell, row[4]]).rstrip() for cell, row in zip(cells, rows, strict=True))


def plan(jaxpr: Any, batched: set[Any], wanted: Sequence[bool]) -> tuple[dict[Any, str], dict[Any, str]]:
    """The variables that may stay factors, each ``"lazy"`` or ``"squares"``; and why others may not."""
    verdicts: dict[Any, list[str]] = {}
    made_by = makers(jaxpr)
    kinds: dict[Any, str] = {}
    refusals: dict[Any, str] = {}
    for v, w in zip(jaxpr.outvars, wanted, strict=True):
        if not isinstance(v, Literal):
            verdicts.setdefault(v, []).append("lazy" if w else "its value for each example is asked for")

    def decide(v: Any) -> None:
        found = set(verdicts.get(v, ()))
        if len(found) == 1 and found <= {"lazy", "squares"} and v in batched and _eligible(v.aval):
            kinds[v] = found.pop()
        elif v in batched:
            refusals[v] = next(
                (r for r in verdicts.get(v, ()) if r not in ("lazy", "squares")), "it is used in two ways"
            )

    marks = cast_marks(jaxpr)
    for e in reversed(jaxpr.eqns):
        for v in e.outvars:
            decide(v)
        name = e.primitive.name
        for i, v in enumerate(e.invars):
            if not isinstance(v, Literal):
                verdict = ACCEPTS[name](e, i, kinds, batched, made_by) if name in ACCEPTS else ""
                if verdict:
                    verdict = rounds(e, i, marks, batched) or verdict
                further = next((refusals[out] for out in e.outvars if out in refusals), "") if name in ACCEPTS else ""
                verdicts.setdefault(v, []).append(verdict or further or f"{name} needs it")
    for v in jaxpr.invars:
        decide(v)
    return kinds, refusals


def _eligible(aval: Any) -> bool:
    return hasattr(aval, "shape") and jnp.issubdtype(aval.dtype, jnp.floating) and aval.size > 1


def _is_zero(constant: Any) -> bool:
    if isinstance(constant, jax.core.Tracer) or not jnp.issubdtype(constant.dtype, jnp.floating):
        return False
    return not np.any(np.asarray(constant))


class _Evaluator:
    """Traces an inlined jaxpr, keeping what the plan allows as factors."""

    def __init__(self, closed: ClosedJaxpr, batched: Sequence[bool], wanted: Sequence[bool]) -> None:
        self.closed, self.jaxpr = closed, closed.jaxpr
        self.batched = batched_variables(self.jaxpr, batched)
        self.kinds, self.refusals = plan(self.jaxpr, self.batched, wanted)
        self.uses, self.makers = uses(self.jaxpr), makers(self.jaxpr)
        self.env: dict[Any, Any] = {}
        self.scalars: dict[Any, Any] = {}  # variables that repeat one number -> that number
        constants = zip(self.jaxpr.constvars, closed.consts, strict=True)
        self.zeros: set[Any] = {v for v, constant in constants if _is_zero(constant)}
        self.paths: dict[Any, Path] = {}

    def run(self, args: Sequence[Any]) -> list[Any]:
        """The outputs: arrays, or :class:`Lazy` where wanted and possible."""
        return evaluate(self.jaxpr, self.closed.consts, args, self._compute, self.env)

    def _compute(self, e: Any, values: list[Any]) -> list[Any]:
        with own_width(e):
            self._note(e)
            return self._outputs(e)

    def read(self, v: Any) -> Any:
        """What a variable holds."""
        return read(self.env, v)

    def array(self, v: Any) -> Any:
        """What a variable holds, as an array."""
        value = self.read(v)
        if isinstance(value, (Lazy, Squares)):
            value = self.env[v] = value.dense()
        return value

    def is_batched(self, v: Any) -> bool:
        """Whether it differs between examples."""
        return within(v, self.batched)

    def is_zero(self, v: Any) -> bool:
        """Whether it is known to hold zeros only."""
        if isinstance(v, Literal):
            return not jnp.shape(v.val) and bool(v.val == 0)
        return v in self.zeros

    def replace(self, terms: tuple[Term, ...], others: tuple[Term, ...]) -> None:
        """Let whatever holds these terms, casts of an array among it, hold others of the same sum."""
        for v, value in self.env.items():
            # Each the very term: a comparison would compare arrays.
            if isinstance(value, Lazy) and list(map(id, value.terms)) == list(map(id, terms)):
                self.env[v] = dataclasses.replace(value, terms=others)

    def decided(self, e: Any, path: str, reason: str) -> None:
        """Remember why the outputs of an equation are arrays."""
        for v in e.outvars:
            self.paths[v] = Path(path, reason, int(v.aval.size))

    def _note(self, e: Any) -> None:
        """Remember what repeats one number."""
        if e.primitive.name not in _REPEATS:
            return
        v, out = e.invars[0], e.outvars[0]
        if self.is_zero(v):
            self.zeros.add(out)
        if isinstance(v, Literal) or not v.aval.shape or v in self.scalars:
            value: Any = self.scalars[v] if not isinstance(v, Literal) and v in self.scalars else self.read(v)
            if isinstance(value, (Lazy, Squares)) or jnp.shape(value):
                return
            self.scalars[out] = bind_fast(e, [value])[0] if e.primitive.name == "convert_element_type" else value

    def _outputs(self, e: Any) -> list[Any]:
        planned = any(v in self.kinds for v in e.outvars)
        held = any(isinstance(self.read(v), (Lazy, Squares)) for v in e.invars)
        if self._only_arrays(e):
            self.decided(e, "direct", "no larger than its factors")
        elif planned or held:
            try:
                return self._by_rule(e)
            except UnsupportedError as error:
                self.decided(e, "materialised", f"{e.primitive.name}: {error}")
        kernels = e.primitive.name == "conv_general_dilated" and all(map(self.is_batched, e.invars))
        return (bind_mapped if kernels else bind_fast)(e, [self.array(v) for v in e.invars])

    def _only_arrays(self, e: Any) -> bool:
        """Whether an equation adds up arrays that are there, or scales one in half precision, and makes no larger one.

        As factors they would be added in another order, and scaled by several numbers at once.
        """
        if not adds(e):
            if e.primitive.name not in ("mul", "div") or not is_narrow(e.outvars[0].aval.dtype):
                return False
            if not any(isinstance(v, Literal) or v in self.scalars or not v.aval.shape for v in e.invars):
                return False
        if not any(v.aval.shape == e.outvars[0].aval.shape and self.is_batched(v) for v in e.invars):
            return False
        values = [self.read(v) for v in e.invars]
        return not any(isinstance(x, Squares) or (isinstance(x, Lazy) and not x.is_array) for x in values)

    def _by_rule(self, e: Any) -> list[Any]:
        name = e.primitive.name
        if name == "scan":
            return self._scan(e)
        if name not in RULES:
            raise UnsupportedError("no rule")
        result = RULES[name](self, e)
        outs = list(result) if e.primitive.multiple_results else [result]
        return [self._settled(v, out, e) for v, out in zip(e.outvars, outs, strict=True)]

    def _settled(self, v: Any, value: Any, e: Any) -> Any:
        """A lazy value, or the array where that is no larger than its factors."""
        if isinstance(value, Lazy) and not value.fits(v.aval):
            # A wrong rule must not lead to a wrong number: norms are taken without the array ever being made.
            raise UnsupportedError("its rule gave another shape")
        if not isinstance(value, Lazy) or (v in self.uses and all(adds(use) for use in self.uses[v])):
            return value
        value = Lazy(value.shape, value.dtype, merged(value.terms))
        if not value.terms or value.is_array:
            return value
        small, many = value.stored >= v.aval.size, len(value.terms) > _MOST_TERMS
        if not small and not many:
            return value
        self.decided(e, "direct", "no larger than its factors") if small else self.decided(
            e, "materialised", "a sum of too many terms"
        )
        arrays = [self.read(x) for x in e.invars]
        if e.primitive.name == "dot_general" and not any(isinstance(x, Lazy) for x in arrays):
            array = bind_fast(e, arrays)[0]
        else:
            array = value.dense()
        return Lazy(value.shape, value.dtype, (whole(array, True),))

    def _scan(self, e: Any) -> list[Any]:
        """A loop whose carry only collects, or whose stacked outputs are products, returns factors instead."""
        sums = loop_sums(e, self.kinds)
        body, (n_consts, n_carry) = sums.body, scan_counts(e.params)
        if not sums.parts and not any(v in self.kinds for v in e.outvars[n_carry:]):
            raise UnsupportedError("a carry that is more than a sum")
        flags, _ = batched_in_scan(e, [self.is_batched(v) for v in e.invars])
        kept = [k for k in range(n_carry) if k not in sums.parts]
        inputs = [*range(n_consts), *(n_consts + k for k in kept), *range(n_consts + n_carry, len(e.invars))]
        stacked = e.outvars[n_carry:]
        collected = [(k, v) for k, parts in sums.parts.items() for v in parts]
        outvars = [*(body.jaxpr.outvars[k] for k in kept), *(v for _, v in collected), *body.jaxpr.outvars[n_carry:]]
        inner = body.jaxpr.replace(invars=[body.jaxpr.invars[i] for i in inputs], outvars=outvars)
        wanted = [*[False] * len(kept), *[True] * len(collected), *(v in self.kinds for v in stacked)]
        program = rewrite(pruned(ClosedJaxpr(inner, body.consts)), [flags[i] for i in inputs], wanted)
        values = [self.array(e.invars[i]) for i in inputs]
        pieces = program.pieces[len(kept) :]
        dense_sums = [i for i, _ in enumerate(collected) if pieces[i].terms is None]
        starts = [jnp.zeros(collected[i][1].aval.shape, collected[i][1].aval.dtype) for i in dense_sums]
        carried = [len(kept) + i for i in dense_sums]
        emitted = _Emitted.of(program, len(kept), dense_sums, n_consts, n_consts + len(kept))

        def step(state: Any, x: Any) -> Any:
            outs = run_inlined(program.closed, *values[:n_consts], *state[0], *x)
            added = [a + outs[program.offsets[i]] for a, i in zip(state[1], carried, strict=True)]
            return (outs[: len(kept)], added), [outs[i] for i in emitted.places]

        options = {k: e.params[k] for k in ("length", "reverse", "unroll")}
        start, xs = values[n_consts : n_consts + len(kept)], values[n_consts + len(kept) :]
        (last, added), ys = jax.lax.scan(step, (start, starts), xs, **options)
        outputs: dict[int, Any] = dict(zip(kept, last, strict=True))
        length = e.params["length"]
        totals: dict[int, list[Any]] = {k: [] for k in sums.parts}

        def product(i: int, label: Label | None) -> tuple[Term, ...]:
            arrays, axes = emitted.arrays(i, ys, values)
            if label is not None and any(not p.static for t in pieces[i].terms or () for p in t.places.values()):
                raise UnsupportedError("indexed arrays that a loop stacks")
            terms = []
            for t in pieces[i].terms or ():
                terms.append(_stacked(t, arrays, axes, length, label))
                steps = terms[-1].sizes.keys() - t.sizes.keys()
                held = {x for f in terms[-1].factors for x in f.labels}
                held |= {x for p in terms[-1].places.values() for x in p.labels}
                if label is None and not steps & held:  # the same in every step
                    count = Factor(jnp.asarray(float(length), wide(pieces[i].dtype)), (), False)
                    terms[-1] = terms[-1].replace(scale=(*terms[-1].scale, count))
            return tuple(terms)

        for i, (k, v) in enumerate(collected):
            if i in dense_sums:
                totals[k].append((added[dense_sums.index(i)], self.is_batched(e.outvars[k])))
            else:
                totals[k].append(Lazy(v.aval.shape, v.aval.dtype, product(i, None)))
        for k in sums.parts:
            start = e.invars[n_consts + k]
            total = Lazy(e.outvars[k].aval.shape, e.outvars[k].aval.dtype, ())
            if not self.is_zero(start):
                total = total.plus(self.read(start), self.is_batched(start))
            for part in totals[k]:
                total = total.plus(*part) if isinstance(part, tuple) else total.plus(part, True)
            outputs[k] = self._settled(e.outvars[k], total, e)
        for j, v in enumerate(stacked):
            i = len(collected) + j
            if pieces[i].terms is None:
                outputs[n_carry + j] = emitted.arrays(i, ys, values)[0][0]
                continue
            outputs[n_carry + j] = self._settled(v, Lazy(v.aval.shape, v.aval.dtype, product(i, new_label())), e)
        return [outputs[k] for k in range(len(e.outvars))]


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
        """The arrays of a piece, and which of them are stacked."""
        sources = self.sources[piece]
        found = [ys[i] if kind == "y" else values[i] for kind, i in sources]
        return found, [None if kind == "const" else 0 for kind, _ in sources]


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
        """The flat outputs, those of each piece together."""
        rest = iter(arrays)
        return [[next(rest) for _ in piece.flags] for piece in self.pieces]

    def computed(self, variables: set[Any]) -> Rewritten:
        """The same program, but that it returns arrays in the place of products in which one of the variables is."""
        outs = self.groups(self.closed.jaxpr.outvars)
        used = [any(within(v, variables) and v.aval.size > 1 for v in vs) for vs in outs]
        pieces = [Piece([True], None, p.shape, p.dtype) if u else p for p, u in zip(self.pieces, used, strict=True)]

        def run(*args: Any) -> list[Any]:
            groups = zip(self.pieces, self.groups(run_inlined(self.closed, *args)), used, strict=True)
            return [x for p, arrays, u in groups for x in ([_unpacked(p, arrays).dense()] if u and p.terms else arrays)]

        inputs = [jax.core.ShapedArray(v.aval.shape, v.aval.dtype) for v in self.closed.jaxpr.invars]
        return Rewritten(jax.make_jaxpr(run)(*inputs), pieces, self.paths)


def rewrite(closed: ClosedJaxpr, batched: Sequence[bool], wanted: Sequence[bool]) -> Rewritten:
    """Rewrite an inlined program so that it returns factors for the outputs that are wanted as sums."""
    pieces: list[Piece] = []
    paths: list[Path] = []

    def run(*args: Any) -> list[Any]:
        evaluator = _Evaluator(closed, batched, wanted)
        flat = []
        for v, value, want in zip(closed.jaxpr.outvars, evaluator.run(args), wanted, strict=True):
            if isinstance(value, Lazy) and want:
                value = Lazy(value.shape, value.dtype, merged(value.terms))
                arrays, terms = _packed(value)
                path = _path_of(evaluator, v) if value.is_array else Path("factored", _describe(value), value.stored)
                pieces.append(Piece([flag for _, flag in arrays], terms, value.shape, value.dtype))
                flat += [array for array, _ in arrays]
            else:
                if isinstance(value, (Lazy, Squares)):
                    value = value.dense()
                array = jnp.asarray(value, v.aval.dtype)
                pieces.append(Piece([evaluator.is_batched(v)], None, array.shape, array.dtype))
                flat.append(array)
                path = _path_of(evaluator, v)
            paths.append(path)
        return flat

    inputs = [jax.core.ShapedArray(v.aval.shape, v.aval.dtype) for v in closed.jaxpr.invars]
    return Rewritten(jax.make_jaxpr(run)(*inputs), pieces, paths)


def _describe(value: Lazy) -> str:
    shapes = [" x ".join(str(list(f.array.shape)) for f in term.factors) for term in value.terms]
    return "product of " + ", and of ".join(shapes) if shapes else "zero"


def _path_of(evaluator: _Evaluator, v: Any) -> Path:
    """How an output that is an array came about: from where it was made, moves of axes aside."""
    makers = evaluator.makers
    while not isinstance(v, Literal) and v in makers and v not in evaluator.paths:
        e = makers[v]
        if e.primitive.name not in ("transpose", "reshape", "squeeze", "convert_element_type", "neg", "copy", "name"):
            break
        v = e.invars[0]
    if isinstance(v, Literal) or not evaluator.is_batched(v):
        return Path("direct", "the same for all examples", 0)
    if v in evaluator.paths:
        return evaluator.paths[v]
    size = int(v.aval.size)
    if v not in makers:
        return Path("direct", "an input", size)
    e = makers[v]
    if size <= 1 or any(evaluator.is_batched(x) and shaped(x).size >= size for x in e.invars):
        return Path("direct", f"no larger than what {e.primitive.name} makes it from", size)
    reason = evaluator.refusals.get(v, f"no rule for {e.primitive.name}")
    return Path("materialised", reason, size)


def _packed(value: Lazy) -> tuple[list[tuple[Any, bool]], tuple[Term, ...]]:
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


def _unpacked(piece: Piece, arrays: Sequence[Any]) -> Lazy:
    """The value of one example that a piece stands for."""
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


def _stacked(term: Term, arrays: Sequence[Any], stacked: Sequence[int | None], length: int, axis: Label | None) -> Term:
    """A packed term with its arrays, each stacked along an axis or not; they are summed, or stay apart as an axis."""
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


def _sum_of(piece: Piece, arrays: Sequence[Any], axes: Sequence[int | None], rows: int, after: Any) -> jax.Array:
    """The sum over the examples of the arrays that a piece stands for, computed after another one if given."""
    total = jnp.zeros(piece.shape, wide(piece.dtype))
    for i, term in enumerate(piece.terms or ()):
        part = _sum_of_term(term, arrays, axes, rows, after, _working(term, arrays, total.dtype)).astype(total.dtype)
        total = part if i == 0 else total + part
    return total


def _working(term: Term, arrays: Sequence[Any], dtype: Any) -> Any:
    """The dtype to compute a packed term in."""
    put = lambda factors: tuple(dataclasses.replace(f, array=arrays[f.array]) for f in factors)
    return working([term.replace(factors=put(term.factors), scale=put(term.scale))], dtype)


def _sum_of_term(
    term: Term, arrays: Sequence[Any], axes: Sequence[int | None], rows: int, after: Any, dtype: Any
) -> jax.Array:
    weight = jnp.ones((), dtype)
    for f in term.scale:
        weight = weight * arrays[f.array].astype(dtype)
    if after is not None and term.scale:
        # Never so, which XLA cannot know. It computes independent products all before it adds the first to the sum of
        # the microbatches, and keeps them side by side.
        entry = after[(0,) * after.ndim].astype(dtype)
        weight = jnp.where(jnp.isnan(entry) & (entry > 0), entry, weight)
    mask = None if term.mask is None else arrays[term.mask]
    product = _stacked(term.replace(scale=(), mask=None), arrays, axes, rows, None)
    label = next(x for x in product.sizes if x not in term.sizes)
    own = sum(label in f.labels for f in product.factors)
    if not own and not any(label in p.labels for p in product.places.values()):
        kept = weight if mask is None else jnp.where(mask, weight, 0)
        total = dense(product, dtype) * (jnp.sum(kept) if kept.ndim else kept * rows)
        return total if mask is None else jnp.where(jnp.any(mask), total, 0)
    # A single factor is masked as it is weighted. XLA then adds what is scattered to the sum of the microbatches in
    # place; a bias better shares what its layer weighs.
    if mask is None or (product.places and own < 2):
        total = dense(_weighted(product, label, weight, mask), dtype)
    else:
        # Zero times NaN is NaN: what a masked example holds has to be erased from each factor, which takes a copy.
        total = jax.lax.cond(
            jnp.all(mask),
            lambda: dense(_weighted(product, label, weight, None), dtype),
            lambda: dense(_weighted(product, label, weight, mask), dtype),
        )
    shared = any(label not in f.labels for f in product.factors)  # it may be what spoilt all examples
    return jnp.where(jnp.any(mask), total, 0) if mask is not None and shared else total


def _weighted(term: Term, label: Label, weight: Any, mask: Any) -> Term:
    """The term with the examples' weights in its smallest factor."""
    own = [i for i, f in enumerate(term.factors) if label in f.labels]
    smallest = min(own, key=lambda i: term.factors[i].stored, default=None)
    # Derivatives put the cotangent first. If it carries the weights, a layer's bias can share the product.
    if own and term.factors[own[0]].stored <= 2 * term.factors[smallest or 0].stored:
        smallest = own[0]
    factors = list(term.factors)

    def along(values: Any, f: Factor) -> Any:
        at = f.labels.index(label)
        return values.reshape([-1 if i == at else 1 for i in range(f.array.ndim)]) if values.ndim else values

    for i in own:
        f = factors[i]
        array = f.array
        if mask is not None:
            array = jnp.where(along(mask, f), array, 0)
        if i == smallest:
            w = weight if mask is None or not weight.ndim else jnp.where(mask, weight, 0)
            # In at least 32 bits: a weight far from 1 would not fit a half-precision factor.
            array = array.astype(jnp.promote_types(array.dtype, w.dtype)) * along(w, f)
        factors[i] = dataclasses.replace(f, array=array, batched=False)
    if smallest is None:  # only indices differ between examples
        kept = weight if mask is None else jnp.where(mask, weight, 0)
        factors.append(Factor(jnp.broadcast_to(kept, (term.sizes[label],)), (label,), False))
    return term.replace(factors=tuple(factors))


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
            s and jnp.issubdtype(v.aval.dtype, jnp.floating) for v, s in zip(flat.jaxpr.outvars, summed, strict=True)
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
        """Where the examples stand in each output; what a loop stacked has them behind its steps, and keeps them."""
        jaxpr = self.program.closed.jaxpr
        scans = [e for e in jaxpr.eqns if e.primitive.name == "scan"]
        stacked = {v for e in scans for v in e.outvars[scan_counts(e.params)[1] :]}
        axes: list[int | None] = []
        outvars = iter(jaxpr.outvars)
        for piece in self.program.pieces:
            for flag in piece.flags:
                v = next(outvars)
                moved = piece.terms is not None and not isinstance(v, Literal) and v in stacked and v.aval.ndim > 0
                axes.append(None if not flag else 1 if moved else 0)
        for place in self.split.places if self.split else ():
            axes[place] = 0
        return axes

    def is_kept_for_one(self) -> list[bool]:
        """Which outputs are made and summed for one example after another, and so kept for one alone."""
        places = self.split.places if self.split else []
        alone = [i in places for i in range(len(self.program.closed.jaxpr.outvars))]
        return [all(group) for group in self.program.groups(alone)]

    def __call__(self, consts: Sequence[Any], *leaves: Any) -> list[Any]:
        """The outputs for a microbatch, the examples on axis 0."""
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
        """The sums of the pieces that are factors, in a loop on CPU one after another; see :func:`_sum_of_term`."""
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
            factors = [v for v in variables[i] if not isinstance(v, Literal) and v.aval.size > 1]
            after = next((waited[v] for v in factors if v in waited), last)
            waited.update((v, after) for v in factors)
            total = _sum_of(pieces[i], arrays, groups[i][1], rows, after)
            sums[i] = Sum(total, rows, pieces[i].dtype)
            # What is scattered is added in place, and nothing should read it before.
            if self.in_order and total.size and not any(t.places for t in terms):
                last = total
        return sums
