"""A jaxpr without calls: nested programs are written out, what no output needs is dropped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal

from .evaluate import bind_whole
from .versions import scan_counts

# Primitives of other packages that stand for a program: name -> function of the operands and parameters.
CALLS: dict[str, Callable[..., Sequence[Any]]] = {}

# Where a primitive that only calls keeps what it calls. Derivative rules (custom_jvp and custom_vjp) are lost: an
# inlined program is for evaluation.
BODY = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "eval_jaxpr": "call_jaxpr",  # in the place of both from jax 0.12 on
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
    "checkpoint": "jaxpr",
    "remat2": "jaxpr",
}


def inline(closed: ClosedJaxpr, consts_first: bool = False) -> ClosedJaxpr:
    """The same program without calls; with ``consts_first`` a function of its constants, then of its inputs.

    Bodies of loops and branches are left as they are.
    """
    jaxpr, consts = closed.jaxpr, closed.consts

    def run(*args: Any) -> list[Any]:
        if consts_first:
            return _run(jaxpr, args[: len(consts)], args[len(consts) :])
        return _run(jaxpr, consts, args)

    variables = [*jaxpr.constvars, *jaxpr.invars] if consts_first else jaxpr.invars
    flat = pruned(jax.make_jaxpr(run)(*(jax.core.ShapedArray(v.aval.shape, v.aval.dtype) for v in variables)))
    # What was written out may call in its turn.
    return inline(flat) if any(e.primitive.name in (*BODY, *CALLS) for e in flat.jaxpr.eqns) else flat


def _run(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    env: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
    read = lambda atom: atom.val if isinstance(atom, Literal) else env[atom]
    signed: dict[Any, Any] = {}
    for equation in jaxpr.eqns:
        values = list(map(read, equation.invars))
        name = equation.primitive.name
        if name == "abs" and equation.outvars[0].aval.dtype == equation.invars[0].aval.dtype:
            signed[equation.outvars[0]] = values[0]
        if _is_square(equation):
            # One way to write it, so that sums of squares are found; torch writes pow(x, 2) and |x|².
            outs = [jax.lax.square(signed.get(equation.invars[0], values[0]))]
        elif name in CALLS:
            outs = list(CALLS[name](*values, **equation.params))
        elif name in BODY:
            if equation.params.get("differentiated") and equation.params.get("prevent_cse"):
                # As its lowering does: else XLA would merge the second pass with the first, and keep all of it.
                values = list(jax.lax.optimization_barrier(tuple(values)))
            body = equation.params[BODY[name]]
            outs = _run(getattr(body, "jaxpr", body), getattr(body, "consts", ()), values)
        else:
            outs = bind_whole(equation, values)
        env.update(zip(equation.outvars, outs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _is_square(equation: Any) -> bool:
    name, operands = equation.primitive.name, equation.invars
    if name == "integer_pow":
        return equation.params["y"] == 2 and not isinstance(operands[0], Literal)
    if name != "pow" or isinstance(operands[0], Literal) or not isinstance(operands[1], Literal):
        return False
    return not jnp.shape(operands[1].val) and bool(operands[1].val == 2)


def evaluate(closed: ClosedJaxpr, *args: Any) -> list[Any]:
    """The outputs of an inlined program, which may hold types that JAX's own mode would narrow."""
    return _run(closed.jaxpr, closed.consts, args)


def pruned(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The program without equations that no output needs."""
    needed = {v for v in closed.jaxpr.outvars if not isinstance(v, Literal)}
    kept = []
    for equation in reversed(closed.jaxpr.eqns):
        if equation.effects or not needed.isdisjoint(equation.outvars):
            kept.append(equation)
            needed.update(v for v in equation.invars if not isinstance(v, Literal))
    return ClosedJaxpr(closed.jaxpr.replace(eqns=kept[::-1]), closed.consts)


def batched_variables(jaxpr: Any, batched: Sequence[bool]) -> set[Any]:
    """Which variables of an inlined jaxpr differ between examples, where these inputs do (constants do not)."""
    found = {v for v, flag in zip(jaxpr.invars, batched, strict=True) if flag}
    for equation in jaxpr.eqns:
        given = [not isinstance(v, Literal) and v in found for v in equation.invars]
        if not any(given):
            continue
        outs = scan_flags(equation, given)[1] if equation.primitive.name == "scan" else [True] * len(equation.outvars)
        found.update(v for v, flag in zip(equation.outvars, outs, strict=True) if flag)
    return found


def scan_flags(equation: Any, batched: Sequence[bool]) -> tuple[list[bool], list[bool]]:
    """Which inputs of a scan's body, and which outputs, differ between examples."""
    body = inline(equation.params["jaxpr"]).jaxpr
    consts, carried = scan_counts(equation.params)
    flags = list(batched)
    while True:
        found = batched_variables(body, flags)
        outs = [not isinstance(v, Literal) and v in found for v in body.outvars]
        carry = [a or b for a, b in zip(flags[consts : consts + carried], outs[:carried], strict=True)]
        if carry == flags[consts : consts + carried]:
            return flags, [*carry, *outs[carried:]]
        flags[consts : consts + carried] = carry
