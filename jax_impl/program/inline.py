"""Programs without calls: nested ones are written out, what no output needs is dropped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Primitive, Var

from .convolutions import bind_whole
from .dataflow import Flags, dependent, pruned, scan_dependence, within
from .evaluate import called, evaluate, shaped
from .versions import scan_counts

_WHOLE: dict[Primitive, Callable[..., Sequence[Any]]] = {}


def stands_for(primitive: Primitive, program: Callable[..., Sequence[Any]]) -> None:
    """Register a primitive that stays whole in programs but stands for one: a function of operands and parameters.

    To be called where the primitive is defined. Inlining writes the program out.
    """
    _WHOLE[primitive] = program


def inline(closed: ClosedJaxpr, consts_first: bool = False) -> ClosedJaxpr:
    """Return the same program without calls; with ``consts_first`` a function of its constants, then of its inputs.

    Bodies of loops and branches are left as they are. Derivative rules (custom_jvp and custom_vjp) are lost: an inlined
    program is for evaluation.
    """
    jaxpr, consts = closed.jaxpr, closed.consts

    def flat(*args: Any) -> list[Any]:
        if consts_first:
            return _written_out(jaxpr, args[: len(consts)], args[len(consts) :])
        return _written_out(jaxpr, consts, args)

    variables = [*jaxpr.constvars, *jaxpr.invars] if consts_first else jaxpr.invars
    made = pruned(jax.make_jaxpr(flat)(*(jax.core.ShapedArray(shaped(v).shape, shaped(v).dtype) for v in variables)))
    # What was written out may call in its turn.
    return inline(made) if any(e.primitive in _WHOLE or called(e) is not None for e in made.jaxpr.eqns) else made


def run_inlined(closed: ClosedJaxpr, *args: Any) -> list[Any]:
    """Return the outputs of an inlined program, which may hold types that JAX's own mode would narrow."""
    return _written_out(closed.jaxpr, closed.consts, args)


def _written_out(jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    signed: dict[Var, Any] = {}  # what absolute values were taken of

    def compute(equation: JaxprEqn, values: list[Any]) -> Sequence[Any]:
        name, body = equation.primitive.name, called(equation)
        if name == "abs" and shaped(equation.outvars[0]).dtype == shaped(equation.invars[0]).dtype:
            signed[equation.outvars[0]] = values[0]
        if _is_square(equation):
            # One way to write it, so that sums of squares are found; torch writes pow(x, 2) and |x|².
            operand: Any = equation.invars[0]
            return [jax.lax.square(signed.get(operand, values[0]))]
        if equation.primitive in _WHOLE:
            return list(_WHOLE[equation.primitive](*values, **equation.params))
        if body is None:
            return bind_whole(equation, values)
        if equation.params.get("differentiated") and equation.params.get("prevent_cse"):
            # As its lowering does: else XLA would merge the second pass with the first, and keep all of it.
            values = list(jax.lax.optimization_barrier(tuple(values)))
        return _written_out(body.jaxpr, body.consts, values)

    return evaluate(jaxpr, consts, args, compute)


def _is_square(equation: JaxprEqn) -> bool:
    name, operands = equation.primitive.name, equation.invars
    if name == "integer_pow":
        return equation.params["y"] == 2 and not isinstance(operands[0], Literal)
    if name != "pow" or isinstance(operands[0], Literal) or not isinstance(operands[1], Literal):
        return False
    return not jnp.shape(operands[1].val) and bool(operands[1].val == 2)


def batched_variables(jaxpr: Jaxpr, batched: Sequence[bool]) -> set[Var]:
    """Find the variables of an inlined program that differ between examples; these inputs do, constants do not."""

    def outputs(equation: JaxprEqn, given: Flags) -> Flags:
        if equation.primitive.name == "scan":
            return batched_in_scan(equation, given)[1]
        return [True] * len(equation.outvars)

    return dependent(jaxpr, batched, outputs)


def batched_in_scan(equation: JaxprEqn, batched: Sequence[bool]) -> tuple[Flags, Flags]:
    """Find which inputs of a scan's body, and which outputs of the scan, differ between examples."""
    body = inline(equation.params["jaxpr"]).jaxpr

    def outputs(flags: Flags) -> Flags:
        found = batched_variables(body, flags)
        return [within(v, found) for v in body.outvars]

    flags, outs = scan_dependence(equation, batched, outputs)
    constants, carried = scan_counts(equation.params)
    return flags, [*flags[constants : constants + carried], *outs[carried:]]
