"""Where it counts that a cast rounds: a product that is not carried out passes through casts unrounded.

A sum over examples is the same up to rounding, whether each example's product was rounded first or not. That ends where
what rounding took away is all that is left, as in ``g - g.astype(bfloat16).astype(float32)``, and where a cast's range
counts: what was too small or too large for it is made larger or smaller again. Such products are carried out.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from ..program.sums import is_narrow

_WIDENED = "widened"  # it holds less than its dtype would: it was cast to a wider one, or to a narrower one and back
_JOINED = "joined"  # something widened stands beside others in it
_CUT = "cut"  # it was cast to a dtype of smaller range
_NARROW = "narrow"  # to one that numbers of usual size overflow

Marks = dict[Any, frozenset[str]]


def holds(dtype: Any, given: Any) -> bool:
    """Tell whether a floating-point type has all numbers of another."""
    if not (jnp.issubdtype(dtype, jnp.floating) and jnp.issubdtype(given, jnp.floating)):
        return False
    ours, theirs = jnp.finfo(dtype), jnp.finfo(given)
    return bool(ours.nmant >= theirs.nmant) and _reaches(dtype, given)


def _reaches(dtype: Any, given: Any) -> bool:
    ours, theirs = jnp.finfo(dtype), jnp.finfo(given)
    return bool(ours.maxexp >= theirs.maxexp and ours.minexp <= theirs.minexp)


def enlarges(e: Any) -> bool:
    """Tell whether an equation multiplies by a number above one: then a large number may not fit a cast any more."""
    numbers = [abs(np.asarray(x.val)).max() for x in e.invars if isinstance(x, Literal) and np.size(x.val)]
    inverse = e.primitive.name == "div"
    return e.primitive.name in ("mul", "div") and any(n < 1 if inverse else n > 1 for n in numbers)


def cast_marks(jaxpr: Any) -> Marks:
    """Return what the casts of a program have done to each of its variables."""
    marks: Marks = {}
    for e in jaxpr.eqns:
        found = frozenset[str]().union(*(_of(marks, v) for v in e.invars))
        if e.primitive.name == "scan":
            found = found.union(*cast_marks(e.params["jaxpr"].jaxpr).values())
        elif e.primitive.name == "convert_element_type":
            found = _cast(found, e.invars[0].aval.dtype, jnp.dtype(e.params["new_dtype"]))
        elif e.primitive.name in ("concatenate", "stack") and _WIDENED in found:
            found |= {_JOINED}
        if found:
            marks.update((v, found) for v in e.outvars)
    return marks


def _of(marks: Marks, v: Any) -> frozenset[str]:
    return frozenset() if isinstance(v, Literal) else marks.get(v, frozenset())


def _cast(found: frozenset[str], given: Any, dtype: Any) -> frozenset[str]:
    if given == dtype or not all(jnp.issubdtype(d, jnp.floating) for d in (given, dtype)):
        return found
    if holds(dtype, given):
        return found | {_WIDENED}
    cut = frozenset[str]() if _reaches(dtype, given) else {_CUT, _NARROW} if is_narrow(dtype) else {_CUT}
    return found - {_WIDENED, _JOINED} | cut


def rounds(e: Any, i: int, marks: Marks, batched: set[Any]) -> str:
    """Return why the operand of an equation has to be rounded as the program says; "" where it has not."""
    name, own, found = e.primitive.name, _of(marks, e.invars[i]), [_of(marks, v) for v in e.invars]
    # Autodiff's own sums (add_any) are of parts of one gradient, which no part cancels.
    sums = name in ("add", "sub") or (name.startswith("scatter") and e.invars[0] in batched)
    if (sums and any(_WIDENED in f for f in found)) or (name in ("reduce_sum", "dot_general") and _JOINED in own):
        return f"{name} may leave what a cast rounds away"
    widens = name == "convert_element_type" and holds(jnp.dtype(e.params["new_dtype"]), e.invars[0].aval.dtype)
    scales = name in ("mul", "div", "dot_general", "square")
    if _CUT in own and (widens or (scales and (_NARROW in own or enlarges(e)))):
        return f"{name} may bring back what did not fit a cast"
    return ""
