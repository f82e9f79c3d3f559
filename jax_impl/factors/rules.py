"""How products pass through the operations of a program uncomputed: one rule for each primitive.

A rule gets the evaluator and an equation, and returns the outputs or raises :class:`UnsupportedError`, upon which the
operands are computed. ``ACCEPTS`` tells the planner which operands a rule would take uncomputed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Literal

from ..program.dataflow import uses
from ..program.evaluate import shaped
from ..program.inline import inline
from ..program.versions import scan_counts
from .arithmetic import PRODUCTS, one_place
from .lazy import Lazy, Squares
from .moves import MOVES


def _barrier(ev: Any, e: Any) -> list[Any]:
    values = [ev.read(v) for v in e.invars]
    arrays = [i for i, x in enumerate(values) if not isinstance(x, (Lazy, Squares))]
    for i, x in zip(arrays, jax.lax.optimization_barrier([values[i] for i in arrays]), strict=True):
        values[i] = x
    return values


RULES: dict[str, Callable[[Any, Any], Any]] = {**MOVES, **PRODUCTS, "optimization_barrier": _barrier}

# For the planner: (equation, operand, kinds of later variables, batched variables, makers) -> "lazy", "squares" or "".
Accepts = Callable[[Any, int, dict[Any, str], set[Any], dict[Any, Any]], str]


def _if_lazy(*operands: int) -> Accepts:
    def accepts(e: Any, i: int, kinds: Any, batched: Any, makers: Any) -> str:
        return "lazy" if kinds.get(e.outvars[0]) == "lazy" and (not operands or i in operands) else ""

    return accepts


def adds(e: Any) -> bool:
    """Whether an equation only adds."""
    return e.primitive.name in ("add", "add_any", "sub")


def is_square(e: Any) -> bool:
    """Whether an equation squares its operand."""
    same = e.primitive.name == "mul" and not isinstance(e.invars[0], Literal) and e.invars[0] is e.invars[1]
    return same or e.primitive.name == "square"


def _of_square(e: Any, i: int, kinds: Any, batched: Any, makers: Any) -> str:
    return "lazy" if is_square(e) and kinds.get(e.outvars[0]) == "squares" else ""


def _of_product(e: Any, i: int, kinds: Any, batched: Any, makers: Any) -> str:
    return _of_square(e, i, kinds, batched, makers) or _if_lazy()(e, i, kinds, batched, makers)


def _of_sum(e: Any, i: int, kinds: Any, batched: Any, makers: Any) -> str:
    v = e.invars[0]
    if v in makers and is_square(makers[v]) and len(e.params["axes"]) == len(v.aval.shape):
        return "squares"
    return _if_lazy()(e, i, kinds, batched, makers)


def _of_dot(e: Any, i: int, kinds: Any, batched: Any, makers: Any) -> str:
    other = e.invars[1 - i]
    shared = isinstance(other, Literal) or other not in batched
    if not e.outvars[0].aval.shape and not shared:
        return "lazy"
    return "lazy" if shared and kinds.get(e.outvars[0]) == "lazy" else ""


def _of_scatter(e: Any, i: int, kinds: Any, batched: Any, makers: Any) -> str:
    moves = i == 0 or (i == 2 and (one_place(e) or e.params["unique_indices"]))
    return "lazy" if moves and kinds.get(e.outvars[0]) == "lazy" else ""


def _of_barrier(e: Any, i: int, kinds: Any, batched: Any, makers: Any) -> str:
    return "lazy" if kinds.get(e.outvars[i]) == "lazy" else ""


def _of_split(e: Any, i: int, kinds: Any, batched: Any, makers: Any) -> str:
    return "lazy" if any(kinds.get(v) == "lazy" for v in e.outvars) else ""


def _of_scan(e: Any, i: int, kinds: Any, batched: Any, makers: Any) -> str:
    constants, carried = scan_counts(e.params)
    k = i - constants
    return "lazy" if 0 <= k < carried and k in loop_sums(e, kinds).parts else ""


ACCEPTS: dict[str, Accepts] = {
    **{name: _if_lazy(0) for name in ("transpose", "reshape", "squeeze", "broadcast_in_dim", "convert_element_type")},
    **{name: _if_lazy(0) for name in ("copy", "copy_p", "name", "rev", "slice", "pad", "neg", "div")},
    **{name: _if_lazy() for name in ("add", "add_any", "sub", "concatenate", "stack")},
    "dynamic_update_slice": _if_lazy(0, 1),
    "scatter": _of_scatter,
    "scatter-add": _if_lazy(0, 2),
    "scatter_add": _if_lazy(0, 2),
    "select_n": _if_lazy(1, 2),
    "mul": _of_product,
    "square": _of_square,
    "reduce_sum": _of_sum,
    "dot_general": _of_dot,
    "optimization_barrier": _of_barrier,
    "scan": _of_scan,
    "split": _of_split,
    "unstack": _of_split,
}


@dataclasses.dataclass(frozen=True)
class LoopSums:
    """The carries of a scan that only collect: what is added to each in a step, by its place."""

    body: ClosedJaxpr
    parts: dict[int, list[Any]]


def loop_sums(e: Any, kinds: dict[Any, str]) -> LoopSums:
    """Find, among the carries that may stay factors, those that nothing but an addition reads."""
    body = inline(e.params["jaxpr"])
    jaxpr = body.jaxpr
    first, carried = scan_counts(e.params)
    read_by = uses(jaxpr)
    outs = [v for v in jaxpr.outvars if not isinstance(v, Literal)]
    parts: dict[int, list[Any]] = {}
    for k in range(carried):
        if kinds.get(e.outvars[k]) != "lazy":
            continue
        v, added = jaxpr.invars[first + k], []
        while v is not jaxpr.outvars[k]:
            found = read_by.get(v, [])
            if len(found) != 1 or found[0].primitive.name not in ("add", "add_any") or v in outs:
                break
            others = [x for x in found[0].invars if x is not v]
            if len(others) != 1 or isinstance(others[0], Literal) or shaped(others[0]).shape != v.aval.shape:
                break
            added.append(others[0])
            v = found[0].outvars[0]
        if v is jaxpr.outvars[k] and outs.count(v) == 1 and not read_by.get(v):
            parts[k] = added
    return LoopSums(body, parts)
