"""Finds what need not be computed: what is only moved, scaled, added up, squared and summed, as the rules accept it."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from jax.extend.core import Jaxpr, Literal, Var

from ..program.dataflow import makers
from ..program.evaluate import shaped
from .casts import Casts
from .registry import RULES, Known


def plan(jaxpr: Jaxpr, batched: set[Var], wanted: Sequence[bool]) -> tuple[dict[Var, str], dict[Var, str]]:
    """Return the variables that may stay factors, each ``"lazy"`` or ``"squares"``; and why others may not."""
    verdicts: dict[Var, list[str]] = {}
    kinds: dict[Var, str] = {}
    refusals: dict[Var, str] = {}
    for v, w in zip(jaxpr.outvars, wanted, strict=True):
        if not isinstance(v, Literal):
            verdicts.setdefault(v, []).append("lazy" if w else "its value for each example is asked for")

    def decide(v: Var) -> None:
        found = set(verdicts.get(v, ()))
        if len(found) == 1 and found <= {"lazy", "squares"} and v in batched and _eligible(v):
            kinds[v] = found.pop()
        elif v in batched:
            refusals[v] = next(
                (r for r in verdicts.get(v, ()) if r not in ("lazy", "squares")), "it is used in two ways"
            )

    known = Known(kinds, batched, makers(jaxpr))
    casts = Casts(jaxpr, batched)
    for e in reversed(jaxpr.eqns):
        for v in e.outvars:
            decide(v)
        name = e.primitive.name
        accepts = RULES[name].accepts if name in RULES else None
        for i, v in enumerate(e.invars):
            if not isinstance(v, Literal):
                verdict = accepts(e, i, known) if accepts else ""
                if verdict:
                    verdict = casts.rounds(e, i) or verdict
                further = next((refusals[out] for out in e.outvars if out in refusals), "") if accepts else ""
                verdicts.setdefault(v, []).append(verdict or further or f"{name} needs it")
    for v in jaxpr.invars:
        decide(v)
    return kinds, refusals


def _eligible(v: Var) -> bool:
    aval = shaped(v)
    return hasattr(aval, "shape") and jnp.issubdtype(aval.dtype, jnp.floating) and aval.size > 1
