"""Traces a program once more, keeping what the plan allows as factors.

At a variable that was found, a product is not
carried out, and the rules carry it through the operations. What has no rule, or is no larger than its factors, is
computed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var

from ..program.convolutions import bind_fast, bind_mapped
from ..program.dataflow import makers, uses, within
from ..program.evaluate import Atom, evaluate, lookup, own_width, shaped
from ..program.inline import batched_variables
from ..program.sums import is_narrow
from . import contractions, convolution, moves, scans, scatter, slices, squares  # noqa: F401  (their rules)
from .arithmetic import adds
from .explain import Path
from .lazy import Lazy, Squares
from .merging import merged
from .pieces import Piece, Rewritten, packed
from .plan import plan
from .registry import RULES
from .terms import Term, UnsupportedError, whole

_REPEATS = ("broadcast_in_dim", "convert_element_type", "reshape", "copy", "squeeze", "transpose", "slice", "name")
_MOST_TERMS = 8  # terms that cannot be joined cost one product for each pair


def rewrite(closed: ClosedJaxpr, batched: Sequence[bool], wanted: Sequence[bool]) -> Rewritten:
    """Rewrite an inlined program so that it returns factors for the outputs that are wanted as sums."""
    pieces: list[Piece] = []
    paths: list[Path] = []

    def run(*args: Any) -> list[Any]:
        evaluator = _Tracer(closed, batched, wanted)
        flat = []
        for v, value, want in zip(closed.jaxpr.outvars, evaluator.run(args), wanted, strict=True):
            if isinstance(value, Lazy) and want:
                value = Lazy(value.shape, value.dtype, merged(value.terms))
                arrays, terms = packed(value)
                path = _path_of(evaluator, v) if value.is_array else Path("factored", _describe(value), value.stored)
                pieces.append(Piece([flag for _, flag in arrays], terms, value.shape, value.dtype))
                flat += [array for array, _ in arrays]
            else:
                if isinstance(value, (Lazy, Squares)):
                    value = value.dense()
                array = jnp.asarray(value, shaped(v).dtype)
                pieces.append(Piece([evaluator.is_batched(v)], None, array.shape, array.dtype))
                flat.append(array)
                path = _path_of(evaluator, v)
            paths.append(path)
        return flat

    inputs = [jax.core.ShapedArray(shaped(v).shape, shaped(v).dtype) for v in closed.jaxpr.invars]
    return Rewritten(jax.make_jaxpr(run)(*inputs), pieces, paths)


class _Tracer:
    """Traces an inlined jaxpr, keeping what the plan allows as factors."""

    def __init__(self, closed: ClosedJaxpr, batched: Sequence[bool], wanted: Sequence[bool]) -> None:
        self.closed, self.jaxpr = closed, closed.jaxpr
        self.batched = batched_variables(self.jaxpr, batched)
        self.kinds, self.refusals = plan(self.jaxpr, self.batched, wanted)
        self.uses, self.makers = uses(self.jaxpr), makers(self.jaxpr)
        self.env: dict[Var, Any] = {}
        self.scalars: dict[Var, Any] = {}  # variables that repeat one number -> that number
        constants = zip(self.jaxpr.constvars, closed.consts, strict=True)
        self.zeros: set[Var] = {v for v, constant in constants if _is_zero(constant)}
        self.paths: dict[Var, Path] = {}

    def run(self, args: Sequence[Any]) -> list[Any]:
        """Return the outputs: arrays, or :class:`Lazy` where wanted and possible."""
        return evaluate(self.jaxpr, self.closed.consts, args, self._compute, self.env)

    def _compute(self, e: JaxprEqn, values: list[Any]) -> list[Any]:
        with own_width(e):
            self._note(e)
            return self._outputs(e)

    def read(self, v: Atom) -> Any:
        """Return what a variable holds."""
        return lookup(self.env, v)

    def array(self, v: Atom) -> Any:
        """Return what a variable holds, as an array."""
        value = self.read(v)
        if isinstance(value, (Lazy, Squares)) and not isinstance(v, Literal):
            value = self.env[v] = value.dense()
        return value

    def lazy(self, v: Atom) -> Lazy:
        """Return what a variable holds as a lazy value, an array as one term."""
        value = self.read(v)
        if isinstance(value, Squares):
            raise UnsupportedError("squares that are not summed")
        if isinstance(value, Lazy):
            return value
        if self.is_zero(v):
            return Lazy(shaped(v).shape, shaped(v).dtype, ())
        if not jnp.issubdtype(shaped(v).dtype, jnp.floating):
            raise UnsupportedError(f"an array of {shaped(v).dtype.name}")
        return Lazy(value.shape, value.dtype, (whole(value, self.is_batched(v)),))

    def is_batched(self, v: Atom) -> bool:
        """Tell whether it differs between examples."""
        return within(v, self.batched)

    def is_zero(self, v: Atom) -> bool:
        """Tell whether it is known to hold zeros only."""
        if isinstance(v, Literal):
            return not jnp.shape(v.val) and bool(v.val == 0)
        return v in self.zeros

    def replace(self, terms: tuple[Term, ...], others: tuple[Term, ...]) -> None:
        """Let whatever holds these terms, casts of an array among it, hold others of the same sum."""
        for v, value in self.env.items():
            # Each the very term: a comparison would compare arrays.
            if isinstance(value, Lazy) and list(map(id, value.terms)) == list(map(id, terms)):
                self.env[v] = dataclasses.replace(value, terms=others)

    def decided(self, e: JaxprEqn, path: str, reason: str) -> None:
        """Remember why the outputs of an equation are arrays."""
        for v in e.outvars:
            self.paths[v] = Path(path, reason, int(shaped(v).size))

    def _note(self, e: JaxprEqn) -> None:
        """Remember what repeats one number."""
        if e.primitive.name not in _REPEATS:
            return
        v, out = e.invars[0], e.outvars[0]
        if self.is_zero(v):
            self.zeros.add(out)
        if isinstance(v, Literal) or not shaped(v).shape or v in self.scalars:
            value: Any = self.scalars[v] if not isinstance(v, Literal) and v in self.scalars else self.read(v)
            if isinstance(value, (Lazy, Squares)) or jnp.shape(value):
                return
            self.scalars[out] = bind_fast(e, [value])[0] if e.primitive.name == "convert_element_type" else value

    def _outputs(self, e: JaxprEqn) -> list[Any]:
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

    def _only_arrays(self, e: JaxprEqn) -> bool:
        """Tell whether an equation adds up arrays that are there, or scales one in half precision, to no larger one.

        As factors they would be added in another order, and scaled by several numbers at once.
        """
        if not adds(e):
            if e.primitive.name not in ("mul", "div") or not is_narrow(shaped(e.outvars[0]).dtype):
                return False
            if not any(isinstance(v, Literal) or v in self.scalars or not shaped(v).shape for v in e.invars):
                return False
        if not any(shaped(v).shape == shaped(e.outvars[0]).shape and self.is_batched(v) for v in e.invars):
            return False
        values = [self.read(v) for v in e.invars]
        return not any(isinstance(x, Squares) or (isinstance(x, Lazy) and not x.is_array) for x in values)

    def _by_rule(self, e: JaxprEqn) -> list[Any]:
        name = e.primitive.name
        if name not in RULES:
            raise UnsupportedError("no rule")
        result = RULES[name].apply(self, e)
        outs = list(result) if e.primitive.multiple_results else [result]
        return [self.settled(v, out, e) for v, out in zip(e.outvars, outs, strict=True)]

    def settled(self, v: Atom, value: Any, e: JaxprEqn) -> Any:
        """Return a lazy value, or the array where that is no larger than its factors."""
        if isinstance(value, Lazy) and not value.fits(v.aval):
            # A wrong rule must not lead to a wrong number: norms are taken without the array ever being made.
            raise UnsupportedError("its rule gave another shape")
        if not isinstance(value, Lazy) or (v in self.uses and all(adds(use) for use in self.uses[v])):
            return value
        value = Lazy(value.shape, value.dtype, merged(value.terms))
        if not value.terms or value.is_array:
            return value
        small, many = value.stored >= shaped(v).size, len(value.terms) > _MOST_TERMS
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

    def rewrite(self, body: ClosedJaxpr, batched: Sequence[bool], wanted: Sequence[bool]) -> Rewritten:
        """Rewrite the body of a loop."""
        return rewrite(body, batched, wanted)


def _is_zero(constant: Any) -> bool:
    if isinstance(constant, jax.core.Tracer) or not jnp.issubdtype(constant.dtype, jnp.floating):
        return False
    return not np.any(np.asarray(constant))


def _path_of(evaluator: _Tracer, v: Atom) -> Path:
    """Return how an output that is an array came about: from where it was made, moves of axes aside."""
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
    size = int(shaped(v).size)
    if v not in makers:
        return Path("direct", "an input", size)
    e = makers[v]
    if size <= 1 or any(evaluator.is_batched(x) and shaped(x).size >= size for x in e.invars):
        return Path("direct", f"no larger than what {e.primitive.name} makes it from", size)
    reason = evaluator.refusals.get(v, f"no rule for {e.primitive.name}")
    return Path("materialised", reason, size)


def _describe(value: Lazy) -> str:
    shapes = [" x ".join(str(list(f.array.shape)) for f in term.factors) for term in value.terms]
    return "product of " + ", and of ".join(shapes) if shapes else "zero"
