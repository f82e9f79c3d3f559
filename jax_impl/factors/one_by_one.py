"""The part of a program that has whole gradients in it, run for one example after another and summed.

A transform that needs every entry of an example's gradient is bound by memory: mapped over a microbatch, the gradients
of all its examples are written, read to be transformed, written and read to be summed. The gradient of one example
stays in the cache, and XLA computes the product that it is, the transform and the addition in one pass: entries
clipped one by one in an MLP of 400,000 parameters, batch 512, take 25 ms instead of 390, and 2.8 MB instead of 69 in
microbatches of 64.

:func:`split` cuts a program in two. The first part is mapped over the microbatch as ever: loss, activations,
cotangents. The second begins with the products that are gradients.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr, Literal

from ..program.dataflow import makers, pruned, uses, within
from ..program.evaluate import shaped
from ..program.inline import batched_variables, run_inlined
from ..program.sums import Sum, wide
from ..program.trees import PyTree, as_varying, is_narrowed

_NAME = "microtome.gradient"
# Entries of an example's gradients below which the loop takes longer: where they are only changed one by one, and where
# something is computed from all of them first, which ends the single pass.
_LEAST, _LEAST_REDUCED = 2**9, 2**15
_MOVES = ("transpose", "reshape", "squeeze", "convert_element_type", "copy", "neg", "add", "add_any", "concatenate")
_PRODUCTS = ("dot_general", "conv_general_dilated", "scatter-add", "scatter_add", "broadcast_in_dim", "pad")


def named(grads: PyTree) -> PyTree:
    """Return the gradients of an example, marked, so that they are found in the program."""
    return checkpoint_name(grads, _NAME)


@dataclasses.dataclass(frozen=True)
class Split:
    """A program ``inputs -> outputs`` of one example as two: what is mapped, and what runs for one after another."""

    head: ClosedJaxpr
    """The inputs of the program -> the outputs that are not the tail's, then what the tail takes."""
    tail: ClosedJaxpr
    """What it takes from the head -> its outputs."""
    mapped: list[bool]
    """Which inputs of the tail differ between examples."""
    places: list[int]
    """The tail's outputs, by their place in the program."""
    summed: list[bool]
    """Which of these are summed."""

    def axes(self, outputs: Sequence[int | None]) -> list[int | None]:
        """Return where the head's outputs shall have the examples, if the program's outputs have them there."""
        return [*(a for i, a in enumerate(outputs) if i not in self.places), *(0 if m else None for m in self.mapped)]

    def run(self, values: Sequence[Any], rows: int) -> list[Any]:
        """Return all outputs of the program for those of the head, ``[rows, ...]`` where they are mapped.

        What is summed comes as :class:`Sum`.
        """
        count = len(values) - len(self.tail.jaxpr.invars)
        shared = list(zip(values[count:], self.mapped, strict=True))

        def step(totals: list[jax.Array], row: Any) -> tuple[list[jax.Array], list[jax.Array]]:
            own = [jax.lax.dynamic_index_in_dim(x, row, keepdims=False) if flag else x for x, flag in shared]
            outs = list(zip(run_inlined(self.tail, *own), self.summed, strict=True))
            added = zip(totals, (x for x, flag in outs if flag), strict=True)
            return [total + x.astype(total.dtype) for total, x in added], [x for x, flag in outs if not flag]

        avals = [v.aval for v, flag in zip(self.tail.jaxpr.outvars, self.summed, strict=True) if flag]
        start = [jnp.zeros(aval.shape, wide(aval.dtype)) for aval in avals]
        start = as_varying(lambda totals: step(totals, jnp.zeros((), jnp.int32))[0], start)
        totals, stacked = jax.lax.scan(step, start, jnp.arange(rows, dtype=jnp.int32))
        sums = iter([Sum(total, rows, aval.dtype) for total, aval in zip(totals, avals, strict=True)])
        others = iter(stacked)
        outs = list(values[:count])
        for place, flag in zip(self.places, self.summed, strict=True):
            outs.insert(place, next(sums) if flag else next(others))
        return outs


def dependents(closed: ClosedJaxpr, batched: Sequence[bool]) -> set[Any]:
    """Return the marked gradients of an inlined program, and what is computed from them; none where nothing is gained.

    Only on a CPU: other devices take the examples of a microbatch at once, and would wait for each kernel of a loop.
    With several devices, rows that are spread over them would have to be fetched one by one.
    """
    if jax.default_backend() != "cpu" or jax.device_count() > 1:
        return set()
    varying = batched_variables(closed.jaxpr, batched)
    found = {v for e in closed.jaxpr.eqns if _marks(e) for v in e.outvars if v in varying}
    entries, least = sum(v.aval.size for v in found), _LEAST
    for e in closed.jaxpr.eqns:
        read = [shaped(v).size for v in e.invars if within(v, found)]
        if read and e.effects:
            return set()  # what is printed, say, keeps its order
        if read:
            found.update(e.outvars)
            least = _LEAST_REDUCED if max(read) > max(v.aval.size for v in e.outvars) else least
    return found if entries >= least else set()


def split(closed: ClosedJaxpr, batched: Sequence[bool], summed: Sequence[bool]) -> Split | None:
    """Cut an inlined program where the gradients begin that it holds as arrays; None where nothing is gained."""
    jaxpr, inside = closed.jaxpr, dependents(closed, batched)
    places = [i for i, v in enumerate(jaxpr.outvars) if within(v, inside)]
    added, kept = (sum(jaxpr.outvars[i].aval.size for i in places if summed[i] == flag) for flag in (True, False))
    narrowed = any(is_narrowed(jaxpr.outvars[i].aval.dtype) for i in places)
    if added <= 2 * kept or narrowed:
        return None
    varying = batched_variables(jaxpr, batched)
    _extend(jaxpr, varying, inside)
    products = [e.invars[0] for e in jaxpr.eqns if _marks(e) and within(e.outvars[0], inside)]
    if 2 * sum(v.aval.size for v in products if v not in inside) > sum(v.aval.size for v in products):
        return None  # made in a loop, say, and there for all examples in any case
    taken: dict[Any, None] = {}
    equations: tuple[list[Any], list[Any]] = ([], [])
    for e in jaxpr.eqns:
        late = any(v in inside for v in e.outvars)
        equations[late].append(e)
        if late:
            taken.update((v, None) for v in e.invars if not isinstance(v, Literal) and v not in inside)
    others = [v for i, v in enumerate(jaxpr.outvars) if i not in places]
    head = jaxpr.replace(outvars=[*others, *taken], eqns=equations[False])
    outvars = [jaxpr.outvars[i] for i in places]
    tail = jaxpr.replace(constvars=[], invars=list(taken), outvars=outvars, eqns=equations[True])
    return Split(
        pruned(ClosedJaxpr(head, closed.consts)),
        pruned(ClosedJaxpr(tail, [])),
        [v in varying for v in taken],
        places,
        [summed[i] for i in places],
    )


def _marks(e: Any) -> bool:
    return e.primitive.name == "name" and e.params["name"] == _NAME


def _extend(jaxpr: Any, varying: set[Any], inside: set[Any]) -> None:
    """Let the second part begin earlier, with the products that the gradients are, where nothing else reads them."""
    made_by = makers(jaxpr)
    readers = {v: {out for e in read_by for out in e.outvars or (None,)} for v, read_by in uses(jaxpr).items()}
    outs = {v for v in jaxpr.outvars if not isinstance(v, Literal)}
    late = [e for e in jaxpr.eqns if any(v in inside for v in e.outvars)]
    waiting = [v for e in late for v in e.invars if _marks(e) or v.aval.size >= _LEAST]
    while waiting:
        v = waiting.pop()
        if not within(v, varying) or v in inside or v not in made_by or v in outs or not inside.issuperset(readers[v]):
            continue
        e = made_by[v]
        name = e.primitive.name
        own = [x for x in e.invars if within(x, varying)]
        moves = name in _MOVES or (name == "mul" and len(own) == 1)  # the same for all, but for a number
        if len(e.outvars) == 1 and (moves or (name in _PRODUCTS and sum(shaped(x).size for x in own) < shaped(v).size)):
            inside.add(v)
            waiting += [x for x in e.invars if moves]
