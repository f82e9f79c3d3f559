"""Where it counts that a cast rounds: a product that is not carried out passes through casts unrounded.

A sum over examples is the same up to rounding, whether each example's product was rounded first or not. That ends where
what rounding took away is all that is left, as in ``g - g.astype(bfloat16).astype(float32)`` or the difference of their
norms, and where a cast's range counts: what was too small or too large for it is made larger or smaller again. Such
products are carried out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from ..program.dataflow import within
from ..program.evaluate import Atom, shaped
from ..program.sums import is_narrow, is_signed

_WIDENED = "widened"  # it holds less than its dtype would: it was cast to a wider one, or to a narrower one and back
_JOINED = "joined"  # something widened stands beside others in it
_CUT = "cut"  # it was cast to a dtype of smaller range
_NARROW = "narrow"  # to one that numbers of usual size overflow
_SCATTERED = "scattered"  # rows of examples stand in it among zeros, as in the gradient of a lookup
_SUMS = ("add", "sub", "add_any")
_JOINING = ("concatenate", "stack", "dynamic_update_slice", "scatter")
_KEEPING_SIGNS = (
    "add",
    "add_any",
    "mul",
    "div",
    "reduce_sum",
    "convert_element_type",
    "reshape",
    "squeeze",
    "max",
    "copy",
)
_SMALL = 1e-9  # below the factors of means, above what brings numbers back that did not fit into 32 bits

Marks: TypeAlias = frozenset[str]


def holds(dtype: Any, given: Any) -> bool:
    """Tell whether a floating-point type has all numbers of another."""
    if not (jnp.issubdtype(dtype, jnp.floating) and jnp.issubdtype(given, jnp.floating)):
        return False
    ours, theirs = jnp.finfo(dtype), jnp.finfo(given)
    return bool(ours.nmant >= theirs.nmant) and _reaches(dtype, given)


def _reaches(dtype: Any, given: Any) -> bool:
    ours, theirs = jnp.finfo(dtype), jnp.finfo(given)
    is_signed_as_given = is_signed(dtype) or not is_signed(given)
    return is_signed_as_given and bool(ours.maxexp >= theirs.maxexp and ours.minexp <= theirs.minexp)


def enlarges(e: JaxprEqn) -> bool:
    """Tell whether an equation multiplies by a number above one: then a large number may not fit a cast any more."""
    inverse = e.primitive.name == "div"
    return e.primitive.name in ("mul", "div") and any(abs(n) < 1 if inverse else abs(n) > 1 for n in _literals(e))


def _literals(e: JaxprEqn) -> list[Any]:
    """Return the largest of the numbers in each constant operand."""
    values = [np.real(np.asarray(x.val)).ravel() for x in e.invars if isinstance(x, Literal) and np.size(x.val)]
    return [value[abs(value).argmax()] for value in values]


class Casts:
    """What the casts of a program have done to each of its variables."""

    def __init__(self, jaxpr: Jaxpr, batched: set[Var]) -> None:
        self._batched, self._positive = batched, _never_negative(jaxpr, batched)
        self._marks = _marks(jaxpr, batched)
        self._rounded = self._lost_in_sums(jaxpr)

    def __getitem__(self, v: Atom) -> Marks:
        return _of(self._marks, v)

    def rounds(self, e: JaxprEqn, i: int) -> str:
        """Return why the operand of an equation has to be rounded as the program says; "" where it has not."""
        name, own = e.primitive.name, self[e.invars[i]]
        if self._cancels(e) or (name in ("reduce_sum", "dot_general") and _JOINED in own):
            return f"{name} may leave what a cast rounds away"
        widens = name == "convert_element_type" and holds(e.params["new_dtype"], shaped(e.invars[0]).dtype)
        if widens and e.outvars[0] in self._rounded:
            return "a sum of numbers may be what a cast rounds away"
        scales = name in ("mul", "div", "dot_general", "square") if _NARROW in own else self._rescales(e, i)
        if _CUT in own and (widens or scales):
            return f"{name} may bring back what did not fit a cast"
        return ""

    def _rescales(self, e: JaxprEqn, i: int) -> bool:
        """Tell whether the operand may be made much larger or smaller, other than by the factors of clipping."""
        if e.primitive.name not in ("mul", "div"):
            return False
        numbers = [abs(n) for n in _literals(e)]
        if numbers:
            return enlarges(e) or any(not _SMALL <= n <= 1 / _SMALL for n in numbers if n)
        other = e.invars[1 - i]
        return other is not e.invars[i] and bool(shaped(other).shape or not within(other, self._batched))

    def _cancels(self, e: JaxprEqn) -> bool:
        """Tell whether a sum may be of a value and of the same one rounded."""
        name, found = e.primitive.name, [self[v] for v in e.invars]
        widened = [_WIDENED in f for f in found]
        if not any(widened):
            return False
        if name.startswith("scatter"):
            return within(e.invars[0], self._batched)
        if name not in _SUMS or not all(within(v, self._batched) for v in e.invars):
            return False
        if len({_SCATTERED in f for f in found}) > 1:  # the gradient of a lookup and that of a product
            return False
        # Autodiff's own sums (add_any) are of parts of one gradient, which cancel where the loss itself compares them.
        return name != "add_any" or not all(widened)

    def _lost_in_sums(self, jaxpr: Jaxpr) -> set[Var]:
        """Return what was widened and leads to a number that is added to one that was not, of either sign."""
        needed: set[Var] = set()
        for e in reversed(jaxpr.eqns):
            mixed = len({_WIDENED in self[v] for v in e.invars}) > 1 and not shaped(e.outvars[0]).shape
            if (mixed and self._may_cancel(e)) or not needed.isdisjoint(e.outvars):
                needed.update(v for v in e.invars if not isinstance(v, Literal) and _WIDENED in self[v])
        return needed

    def _may_cancel(self, e: JaxprEqn) -> bool:
        if e.primitive.name not in _SUMS or not all(within(v, self._batched) for v in e.invars):
            return False
        return e.primitive.name == "sub" or not all(_is_positive(v, self._positive) for v in e.invars)


def _never_negative(jaxpr: Jaxpr, batched: set[Var]) -> set[Var]:
    """Return the variables that hold no negative number, as the squared norms that add up to that of a tree.

    What such a sum starts from, the same for all examples, does not matter: no part of a gradient cancels with it.
    """
    found: set[Var] = set()
    for e in jaxpr.eqns:
        name = e.primitive.name
        is_square = name in ("mul", "dot_general") and e.invars[0] is e.invars[1]
        is_even = name == "integer_pow" and e.params["y"] % 2 == 0
        parts = [v for v in e.invars if name not in _SUMS or within(v, batched)]
        keeps = name in _KEEPING_SIGNS and all(_is_positive(v, found) for v in parts)
        if is_square or is_even or keeps or name in ("square", "abs", "exp", "sqrt", "logistic"):
            found.update(e.outvars)
    return found


def _is_positive(v: Atom, positive: set[Var]) -> bool:
    return bool(np.all(np.real(v.val) >= 0)) if isinstance(v, Literal) else v in positive


def are_rounded_alike(jaxpr: Jaxpr, parts: Sequence[Atom]) -> bool:
    """Tell whether all parts of a sum, or none, are values that a cast has rounded."""
    if len(parts) < 2:
        return True
    marks = _marks(jaxpr, set())
    return len({_WIDENED in _of(marks, v) for v in parts}) <= 1


def _marks(jaxpr: Jaxpr, batched: set[Var]) -> dict[Var, Marks]:
    marks: dict[Var, Marks] = {}
    for e in jaxpr.eqns:
        each = [_of(marks, v) for v in e.invars]
        name, found = e.primitive.name, Marks().union(*each)
        if name == "scan":
            found = found.union(*_marks(e.params["jaxpr"].jaxpr, set()).values())
        elif name == "convert_element_type":
            found = _cast(found, shaped(e.invars[0]).dtype, jnp.dtype(e.params["new_dtype"]))
        elif name in _JOINING and _WIDENED in found:
            found |= {_JOINED}
        elif name in ("dot_general", "conv_general_dilated"):
            # A product holds what its dtype can hold; one number may be a norm.
            found -= {_WIDENED, _JOINED, _SCATTERED} if shaped(e.outvars[0]).shape else {_JOINED, _SCATTERED}
        elif name in _SUMS and not all(_WIDENED in f for f in each):  # and so does a sum with what was not cast
            found -= {_WIDENED, _JOINED}
        elif name.startswith("scatter") and not within(e.invars[0], batched) and within(e.invars[1], batched):
            found |= {_SCATTERED}
        if found:
            marks.update((v, found) for v in e.outvars)
    return marks


def _of(marks: dict[Var, Marks], v: Atom) -> Marks:
    return Marks() if isinstance(v, Literal) else marks.get(v, Marks())


def _cast(found: Marks, given: Any, dtype: Any) -> Marks:
    if given == dtype or not all(jnp.issubdtype(d, jnp.floating) for d in (given, dtype)):
        return found
    if holds(dtype, given):
        return found | {_WIDENED}
    cut = Marks() if _reaches(dtype, given) else {_CUT, _NARROW} if is_narrow(dtype) else {_CUT}
    return found - {_WIDENED, _JOINED} | cut
