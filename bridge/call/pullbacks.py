"""Pullbacks of compiled calls: the backward pass of those outputs that have a cotangent."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr
from jax.interpreters.partial_eval import dce_jaxpr

from ..derive.context import Call
from ..derive.dependence import dependent_outputs, read_inputs
from ..derive.primitives import Arrays
from .failures import Checked

Avals: TypeAlias = Sequence[jax.Array | jax.ShapeDtypeStruct]
LinearMap: TypeAlias = Callable[..., Arrays]  # of tangents, whose forms the function knows from its inputs


def pull_back(move: LinearMap, inputs: Avals, live: Sequence[bool], cotangents: Arrays) -> list[jax.Array]:
    """Transpose what JAX linearised, for cotangents of ``live`` outputs; complex numbers as torch has them.

    The other outputs are taken out before, also of loops, whose transpose knows absent cotangents of carries no more
    than JAX's pullbacks do.
    """
    if not all(live):
        move = _with_outputs(move, inputs, live)
    return [jnp.conj(g) for g in jax.linear_transpose(move, *inputs)([jnp.conj(c) for c in cotangents])]


def _with_outputs(move: LinearMap, inputs: Avals, live: Sequence[bool]) -> LinearMap:
    closed = jax.make_jaxpr(lambda *tangents: list(itertools.compress(move(*tangents), live)))(*inputs)
    jaxpr, used = dce_jaxpr(closed.jaxpr, [True] * len(closed.out_avals))
    return lambda *tangents: jax.core.eval_jaxpr(jaxpr, closed.consts, *itertools.compress(tangents, used))


class BackwardPass(NamedTuple):
    """A compiled backward pass, and which of its gradients there are none (zeros)."""

    compiled: Checked
    absent: list[bool]
    reads: list[bool]  # which of the saved inputs count


@dataclasses.dataclass
class Pullback:
    """What JAX linearised, from which the backward pass of any set of outputs is compiled."""

    treedef: jax.tree_util.PyTreeDef
    which: list[int | None]  # of its leaves that are inputs
    saved: list[jax.ShapeDtypeStruct]
    residuals: list[jax.ShapeDtypeStruct]
    inputs: list[jax.ShapeDtypeStruct]
    outputs: list[jax.ShapeDtypeStruct]

    def _move(self, saved: Arrays, residuals: Arrays) -> LinearMap:
        inputs, made = iter(saved), iter(residuals)
        return self.treedef.unflatten([next(made) if i is None else next(inputs) for i in self.which])

    def compile(self, live: Sequence[bool], call: Call) -> BackwardPass:
        def backward(saved: Arrays, residuals: Arrays, cotangents: Arrays) -> list[jax.Array]:
            return pull_back(self._move(saved, residuals), self.inputs, live, cotangents)

        arguments = self.saved, self.residuals, list(itertools.compress(self.outputs, live))
        traced = jax.jit(backward).trace(*arguments)
        absent = independent(traced.jaxpr, len(self.saved) + len(self.residuals))
        return BackwardPass(Checked(traced, call, arguments), absent, read_inputs(traced.jaxpr)[: len(self.saved)])

    def reads_and_moves(self) -> tuple[list[bool], list[bool]]:
        """Tell which saved inputs the backward pass of all outputs reads, and which inputs have a gradient."""

        def move(saved: Arrays, residuals: Arrays, tangents: Arrays) -> Arrays:
            return self._move(saved, residuals)(*tangents)

        traced = jax.make_jaxpr(move)(self.saved, self.residuals, self.inputs)
        first = len(self.saved) + len(self.residuals)
        places = range(first, first + len(self.inputs))
        moves = [any(dependent_outputs(traced, [i == p for i in range(len(traced.in_avals))])) for p in places]
        return read_inputs(traced)[: len(self.saved)], moves


def independent(jaxpr: ClosedJaxpr, first: int) -> list[bool]:
    """Tell which results do not depend on the inputs from ``first`` on."""
    return [not d for d in dependent_outputs(jaxpr, [i >= first for i in range(len(jaxpr.in_avals))])]


def unread(jaxpr: ClosedJaxpr) -> set[int]:
    """Return the inputs, after the key, that are not read: state that is bound anew leads back to no call before."""
    inner = jaxpr.jaxpr
    read = {id(v) for v in (*inner.outvars, *(v for equation in inner.eqns for v in equation.invars))}
    return {i for i, v in enumerate(inner.invars[1:]) if id(v) not in read}
