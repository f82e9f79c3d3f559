"""What depends on what in a jaxpr with recorded torch functions in it, by what torch's autograd says of them."""

from __future__ import annotations

from collections.abc import Sequence

from jax.extend import core as jex

from ...jax_impl.program.dataflow import dependent, scan_dependence, within
from ...jax_impl.program.evaluate import PLAIN_CALLS, called
from .functions import Backward, Forward, Linear
from .primitives import Batched, Callee

# What has no derivative rule of its own: its results depend on its operands as those of its program do.
_CALLS = PLAIN_CALLS | {"checkpoint": "jaxpr", "remat2": "jaxpr"}


def dependent_outputs(jaxpr: jex.ClosedJaxpr, inputs: Sequence[bool]) -> list[bool]:
    """Tell which results of a closed jaxpr depend on the inputs that are named."""
    return _depend(jaxpr.jaxpr, inputs)


def _depend(jaxpr: jex.Jaxpr, inputs: Sequence[bool]) -> list[bool]:
    found = dependent(jaxpr, inputs, _dependence)
    return [within(v, found) for v in jaxpr.outvars]


def _dependence(equation: jex.JaxprEqn, given: list[bool]) -> list[bool]:
    """Tell which results of an operation depend on these operands."""
    every, program, body = [True] * len(equation.outvars), _program(equation), called(equation, _CALLS)
    if body is not None:
        return _depend(body.jaxpr, given)
    if equation.primitive.name == "scan":
        return scan_dependence(equation, given, lambda flags: _depend(equation.params["jaxpr"].jaxpr, flags))[1]
    if isinstance(program, Forward):  # detached results do not
        metas = program.function.metas
        need = tuple(g and m.differentiable for g, m in zip(given[1:], metas, strict=True))
        moving = program.function.differentiable(need) if any(need) else ()
        return [i in moving or i >= len(program.function.outputs) for i in range(len(every))]
    if isinstance(program, Backward):
        return program.depends(given[1:])
    if isinstance(program, Linear):
        gradients = program.function.graph(program.need).gradients
        tangents = given[len(given) - len(gradients) :]
        if not any(given[: len(given) - len(gradients)]):
            return [any(t and g is not None for t, g in zip(tangents, gradients, strict=True))] * len(every)
    return every


def read_inputs(jaxpr: jex.ClosedJaxpr) -> list[bool]:
    """Tell which inputs of a closed jaxpr have values that count; a linear map is read as its transpose reads it."""
    return _read(jaxpr.jaxpr)


def _read(jaxpr: jex.Jaxpr) -> list[bool]:
    read = {v for v in jaxpr.outvars if not isinstance(v, jex.Literal)}
    for equation in jaxpr.eqns:
        reads = [True] * len(equation.invars)
        program = _program(equation)
        body = called(equation, PLAIN_CALLS)
        if body is not None:
            reads = _read(body.jaxpr)
        elif isinstance(program, (Backward, Linear)):
            whole = program if isinstance(program, Backward) else program.transposed
            inputs = whole.graph.backward_reads(whole.nodes)
            reads[1 : 1 + len(inputs)] = inputs  # after the key
        read.update(v for v, r in zip(equation.invars, reads, strict=True) if r and not isinstance(v, jex.Literal))
    return [v in read for v in jaxpr.invars]


def _program(equation: jex.JaxprEqn) -> Callee | None:
    program = equation.params.get("program")
    while isinstance(program, Batched):
        program = program.inner
    return program
