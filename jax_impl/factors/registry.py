"""The registry of rules: how a product passes through an operation uncomputed, by the name of the primitive.

A rule gets the evaluator and an equation and returns the outputs, or raises :class:`UnsupportedError`, upon which the
operands are computed. With it stands what the planner may expect: which operands the rule would take uncomputed. To add
one, write in the file of its kind::

    @rule("my_primitive", accepts=if_lazy(0))
    def _mine(ev: Evaluator, e: JaxprEqn) -> Lazy: ...
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

from jax.extend.core import ClosedJaxpr, JaxprEqn, Var

from ..program.dataflow import within
from ..program.evaluate import Atom
from .lazy import Lazy
from .pieces import Rewritten
from .terms import Term


class Evaluator(Protocol):
    """What a rule may ask of the evaluator: what variables hold, who makes and reads them, what was planned."""

    kinds: dict[Var, str]
    """The variables that may stay factors: ``"lazy"``, or ``"squares"`` of which only the sum is asked for."""
    scalars: dict[Var, Any]
    """The variables that repeat one number, and that number."""
    makers: dict[Var, JaxprEqn]
    uses: dict[Var, list[JaxprEqn]]

    def read(self, v: Atom) -> Any:
        """Return what a variable holds."""

    def array(self, v: Atom) -> Any:
        """Return what a variable holds, as an array."""

    def lazy(self, v: Atom) -> Lazy:
        """Return what a variable holds as a lazy value, an array as one term."""

    def is_batched(self, v: Atom) -> bool:
        """Tell whether it differs between examples."""

    def is_zero(self, v: Atom) -> bool:
        """Tell whether it is known to hold zeros only."""

    def replace(self, terms: tuple[Term, ...], others: tuple[Term, ...]) -> None:
        """Let whatever holds these terms, casts of an array among it, hold others of the same sum."""

    def decided(self, e: JaxprEqn, path: str, reason: str) -> None:
        """Remember why the outputs of an equation are arrays."""

    def settled(self, v: Var, value: Any, e: JaxprEqn) -> Any:
        """Return a lazy value, or the array where that is no larger than its factors."""

    def rewrite(self, body: ClosedJaxpr, batched: Sequence[bool], wanted: Sequence[bool]) -> Rewritten:
        """Rewrite the body of a loop so that it returns factors for the outputs that are wanted as sums."""


@dataclasses.dataclass(frozen=True)
class Known:
    """What the planner, which goes from the outputs backwards, knows at an equation."""

    kinds: dict[Var, str]
    """Of the variables that are made later, or by this equation."""
    batched: set[Var]
    makers: dict[Var, JaxprEqn]

    def is_lazy(self, v: Var) -> bool:
        """Tell whether a variable was found that may stay factors."""
        return self.kinds.get(v) == "lazy"

    def is_shared(self, v: Atom) -> bool:
        """Tell whether it is the same for all examples."""
        return not within(v, self.batched)


Accepts: TypeAlias = Callable[[JaxprEqn, int, Known], str]  # an equation, the operand -> "lazy", "squares" or ""


@dataclasses.dataclass(frozen=True)
class Rule:
    """How a primitive takes products uncomputed."""

    apply: Callable[[Evaluator, JaxprEqn], Any]
    accepts: Accepts | None
    """Which operands; None for a rule that makes products of arrays only."""


RULES: dict[str, Rule] = {}


def rule(*primitives: str, accepts: Accepts | None) -> Callable[..., Any]:
    """Register a rule for primitives; none may have two."""

    def register(apply: Callable[[Evaluator, Any], Any]) -> Callable[[Evaluator, Any], Any]:
        for name in primitives:
            if name in RULES:
                raise ValueError(f"{name} has a rule already, {RULES[name].apply.__name__}.")
            RULES[name] = Rule(apply, accepts)
        return apply

    return register


def if_lazy(*operands: int) -> Accepts:
    """Accept these operands, or all, where the output may stay factors."""

    def accepts(e: JaxprEqn, i: int, known: Known) -> str:
        return "lazy" if known.is_lazy(e.outvars[0]) and (not operands or i in operands) else ""

    return accepts
