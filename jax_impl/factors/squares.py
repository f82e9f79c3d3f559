"""How products become squares, of which only the sum is asked for."""

from __future__ import annotations

import dataclasses

from jax.extend.core import JaxprEqn, Literal

from ..program.evaluate import Atom
from .centring import centred
from .lazy import Squares
from .registry import Evaluator, Known, rule
from .terms import UnsupportedError, is_half, working


def is_square(e: JaxprEqn) -> bool:
    """Tell whether an equation squares its operand."""
    same = e.primitive.name == "mul" and not isinstance(e.invars[0], Literal) and e.invars[0] is e.invars[1]
    return same or e.primitive.name == "square"


def of_square(e: JaxprEqn, i: int, known: Known) -> str:
    """Accept the operand of a square whose sum alone is asked for."""
    return "lazy" if is_square(e) and known.kinds.get(e.outvars[0]) == "squares" else ""


@rule("square", accepts=of_square)
def _square(ev: Evaluator, e: JaxprEqn) -> Squares:
    if ev.kinds.get(e.outvars[0]) != "squares":
        raise UnsupportedError("squares that are not summed")
    return squares(ev, e.invars[0])


def squares(ev: Evaluator, v: Atom) -> Squares:
    """Square what a variable holds, of terms whose norms do not cancel."""
    value = ev.lazy(v)
    terms = centred(value.terms, working(value.terms, value.dtype))
    if any(t.centred for t in terms):
        if not any(map(is_half, value.terms)):  # else the wider factors are for the norm alone
            ev.replace(value.terms, terms)
        value = dataclasses.replace(value, terms=terms)
    return Squares(value)
