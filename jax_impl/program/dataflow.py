"""What flows where in a program: who makes a variable, who reads it, what is needed, what depends on what."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import TypeAlias, TypeGuard

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from .evaluate import Atom
from .versions import scan_counts

Flags: TypeAlias = list[bool]
Dependence: TypeAlias = Callable[[JaxprEqn, Flags], Flags]  # an equation, which operands -> which outputs


def within(atom: Atom, variables: Container[Var]) -> TypeGuard[Var]:
    """Tell whether an operand is one of the variables; a literal, which has no hash, is none."""
    return not isinstance(atom, Literal) and atom in variables


def makers(jaxpr: Jaxpr) -> dict[Var, JaxprEqn]:
    """Return the equation that makes each variable."""
    return {v: equation for equation in jaxpr.eqns for v in equation.outvars}


def uses(jaxpr: Jaxpr) -> dict[Var, list[JaxprEqn]]:
    """Return the equations that read each variable, once for each operand that it is."""
    found: dict[Var, list[JaxprEqn]] = {}
    for equation in jaxpr.eqns:
        for v in equation.invars:
            if not isinstance(v, Literal):
                found.setdefault(v, []).append(equation)
    return found


def pruned(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Return the program without equations that no output needs."""
    needed = {v for v in closed.jaxpr.outvars if not isinstance(v, Literal)}
    kept = []
    for equation in reversed(closed.jaxpr.eqns):
        if equation.effects or not needed.isdisjoint(equation.outvars):
            kept.append(equation)
            needed.update(v for v in equation.invars if not isinstance(v, Literal))
    return ClosedJaxpr(closed.jaxpr.replace(eqns=kept[::-1]), closed.consts)


def dependent(jaxpr: Jaxpr, inputs: Sequence[bool], outputs: Dependence) -> set[Var]:
    """Return the variables that depend on these inputs; ``outputs`` says what an equation that does hands on."""
    found = {v for v, flag in zip(jaxpr.invars, inputs, strict=True) if flag}
    for equation in jaxpr.eqns:
        given = [within(v, found) for v in equation.invars]
        if any(given):
            found.update(v for v, flag in zip(equation.outvars, outputs(equation, given), strict=True) if flag)
    return found


def scan_dependence(equation: JaxprEqn, given: Sequence[bool], body: Callable[[Flags], Flags]) -> tuple[Flags, Flags]:
    """Return which inputs of a scan's body depend on these, once steps have handed it on, and which of its outputs."""
    constants, carried = scan_counts(equation.params)
    flags = list(given)
    while True:
        outs = body(flags)
        carry = [a or b for a, b in zip(flags[constants : constants + carried], outs[:carried], strict=True)]
        if carry == flags[constants : constants + carried]:
            return flags, outs
        flags = [*flags[:constants], *carry, *flags[constants + carried :]]
