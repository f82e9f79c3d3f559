"""Evaluates programs: the one interpreter of jaxprs, with a hook for each equation.

Whoever does something else with some operations (writes calls out, keeps products uncomputed, shows every value) hands
:func:`evaluate` a function of an equation and its operands; what it leaves alone, :func:`bind` computes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias, cast

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

Atom: TypeAlias = Var | Literal
Compute: TypeAlias = Callable[[JaxprEqn, list[Any]], Sequence[Any]]  # an equation and its operands -> its outputs

_WIDE = frozenset(np.dtype(name) for name in ("int64", "uint64", "float64", "complex128"))
# Where a primitive that only calls keeps what it calls. The first ones have no rules of their own for derivatives.
PLAIN_CALLS = {
    "jit": "jaxpr",
    "closed_call": "call_jaxpr",
    "eval_jaxpr": "call_jaxpr",  # in the place of closed_call from jax 0.12 on
}
CALLS = PLAIN_CALLS | {
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "checkpoint": "jaxpr",
    "remat2": "jaxpr",
}


def evaluate(
    jaxpr: Jaxpr,
    consts: Sequence[Any],
    args: Sequence[Any],
    compute: Compute | None = None,
    env: dict[Var, Any] | None = None,
) -> list[Any]:
    """Return the outputs of a program, each equation computed by a function, :func:`bind` if none is given.

    With ``env`` it is left there what every variable holds, for a function that looks at others than the operands.
    """
    compute, env = compute or bind, {} if env is None else env
    env.update(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
    for equation in jaxpr.eqns:
        outs = compute(equation, [lookup(env, atom) for atom in equation.invars])
        env.update(zip(equation.outvars, outs, strict=True))
    return [lookup(env, atom) for atom in jaxpr.outvars]


def lookup(env: dict[Var, Any], atom: Atom) -> Any:
    """Return what a variable holds, or the number that a literal is."""
    return atom.val if isinstance(atom, Literal) else env[atom]


def bind(equation: JaxprEqn, values: Sequence[Any], compute: Callable[..., Any] | None = None) -> list[Any]:
    """Compute an equation for these operands, in its own width; by its primitive, if by nothing else."""
    primitive = equation.primitive
    with equation.ctx.manager, own_width(equation):
        outs = (compute or primitive.bind)(*values, **primitive.get_bind_params(equation.params))
    return list(outs) if primitive.multiple_results else [outs]


def called(equation: JaxprEqn, calls: dict[str, str] = CALLS) -> ClosedJaxpr | None:
    """Return the program that an equation does nothing but call; None for any other equation."""
    body = equation.params.get(calls.get(equation.primitive.name, ""))
    return ClosedJaxpr(body, ()) if isinstance(body, Jaxpr) else body


def shaped(atom: Atom) -> jax.core.ShapedArray:
    """Return the type of an array, shape and dtype."""
    return cast(jax.core.ShapedArray, atom.aval)


def own_width(equation: JaxprEqn) -> contextlib.AbstractContextManager[Any]:
    """Let an equation keep its 64-bit types: a traced torch function has them whatever the mode of JAX is."""
    return jax.enable_x64(True) if _is_wide(equation) else contextlib.nullcontext()


def _is_wide(equation: JaxprEqn) -> bool:
    own = (v.aval for v in (*equation.invars, *equation.outvars) if hasattr(v, "aval"))
    if any(getattr(aval, "dtype", None) in _WIDE for aval in own):
        return True
    return any(_is_wide(inner) for jaxpr in inner_programs(equation) for inner in jaxpr.eqns)


def inner_programs(equation: JaxprEqn) -> Iterator[Jaxpr]:
    """Yield all programs that an equation holds: what it calls, the bodies of loops, branches."""
    for param in equation.params.values():
        for value in param if isinstance(param, (tuple, list)) else (param,):
            if isinstance(value, (ClosedJaxpr, Jaxpr)):
                yield value.jaxpr if isinstance(value, ClosedJaxpr) else value
