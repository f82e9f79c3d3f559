"""What depends on what in a jaxpr with recorded torch functions in it, by what torch's autograd says of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend import core as jex

from ...jax_impl.program.versions import scan_counts
from .functions import Backward, Forward, Linear
from .primitives import Batched


def dependent_outputs(jaxpr: Any, inputs: Sequence[bool]) -> list[bool]:
    """Which results of a closed jaxpr depend on the inputs that are named."""
    return _depend(jaxpr.jaxpr, inputs)


def _depend(jaxpr: Any, inputs: Sequence[bool]) -> list[bool]:
    dependent = {v for v, d in zip(jaxpr.invars, inputs, strict=True) if d}

    def is_dependent(atom: Any) -> bool:
        return not isinstance(atom, jex.Literal) and atom in dependent

    for equation in jaxpr.eqns:
        given = list(map(is_dependent, equation.invars))
        if not any(given):
            continue
        found = [True] * len(equation.outvars)
        program = _program(equation)
        if equation.primitive.name in ("jit", "pjit"):
            found = _depend(equation.params["jaxpr"].jaxpr, given)
        elif equation.primitive.name in ("checkpoint", "remat2"):
            found = _depend(equation.params["jaxpr"], given)
        elif equation.primitive.name == "scan":
            found = _scan_depends(equation.params, given)
        elif isinstance(program, Forward):  # detached results do not
            metas = program.function.metas
            need = tuple(g and m.differentiable for g, m in zip(given[1:], metas, strict=True))
            moving = program.function.differentiable(need) if any(need) else ()
            found = [i in moving or i >= len(program.function.outputs) for i in range(len(found))]
        elif isinstance(program, Backward):
            found = program.depends(given[1:])
        elif isinstance(program, Linear):
            gradients = program.function.graph(program.need).gradients
            tangents = given[len(given) - len(gradients) :]
            if not any(given[: len(given) - len(gradients)]):
                found = [any(t and g is not None for t, g in zip(tangents, gradients, strict=True))] * len(found)
        dependent.update(v for v, f in zip(equation.outvars, found, strict=True) if f)
    return list(map(is_dependent, jaxpr.outvars))


def _scan_depends(params: Any, inputs: list[bool]) -> list[bool]:
    first, carried = scan_counts(params)
    while True:
        found = _depend(params["jaxpr"].jaxpr, inputs)
        carry = [a or b for a, b in zip(inputs[first : first + carried], found, strict=False)]
        if carry == inputs[first : first + carried]:
            return found
        inputs = [*inputs[:first], *carry, *inputs[first + carried :]]


def read_inputs(jaxpr: Any) -> list[bool]:
    """Which inputs of a closed jaxpr have values that count; a linear map is read as its transpose reads it."""
    return _read(jaxpr.jaxpr)


def _read(jaxpr: Any) -> list[bool]:
    read = {v for v in jaxpr.outvars if not isinstance(v, jex.Literal)}
    for equation in jaxpr.eqns:
        reads = [True] * len(equation.invars)
        program = _program(equation)
        if equation.primitive.name in ("jit", "pjit"):
            reads = _read(equation.params["jaxpr"].jaxpr)
        elif isinstance(program, (Backward, Linear)):
            whole = program if isinstance(program, Backward) else program.transposed
            inputs = whole.graph.backward_reads(whole.nodes)
            reads[1 : 1 + len(inputs)] = inputs  # after the key
        read.update(v for v, r in zip(equation.invars, reads, strict=True) if r and not isinstance(v, jex.Literal))
    return [v in read for v in jaxpr.invars]


def _program(equation: Any) -> Any:
    program = equation.params.get("program")
    while isinstance(program, Batched):
        program = program.inner
    return program
