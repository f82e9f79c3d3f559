"""Pullbacks of compiled calls: the backward pass of those outputs that have a cotangent."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .differentiation import dependent_outputs


def gate(live: Sequence[bool], i: int, output: Any) -> Any:
    """The output itself, whose cotangent counts for absent if ``live`` says so when the pullback runs.

    JAX's pullbacks take a cotangent of zeros for one that is absent, but not what it stands for.
    """

    @jax.custom_vjp
    def same(output: Any) -> Any:
        return output

    same.defvjp(lambda output: (output, None), lambda _, cotangent: (cotangent if live[i] else None,))
    return same(output)


def jax_cotangents(cotangents: Sequence[Any]) -> list[Any]:
    """JAX's cotangents: the conjugates of torch's, and none for integers."""
    return [
        jnp.conj(c) if jnp.issubdtype(c.dtype, jnp.inexact) else np.zeros(c.shape, jax.dtypes.float0)
        for c in cotangents
    ]


class Backward(NamedTuple):
    """A compiled backward pass, and which of its gradients there are none: these are zeros."""

    compiled: Any
    absent: list[bool]


@dataclasses.dataclass
class Pullback:
    """What JAX linearised, from which the backward pass of any set of outputs is compiled."""

    treedef: Any
    which: list[int | None]  # of its leaves that are inputs
    saved: list[Any]
    residuals: list[Any]
    outputs: list[Any]
    live: list[bool]  # read by the gates

    def compile(self, live: Sequence[bool]) -> Backward:
        def backward(saved: Sequence[Any], residuals: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
            inputs, made, given = iter(saved), iter(residuals), iter(cotangents)
            pull = self.treedef.unflatten([next(made) if i is None else next(inputs) for i in self.which])
            everything = [
                next(given) if alive else jnp.zeros(o.shape, o.dtype)
                for alive, o in zip(live, self.outputs, strict=True)
            ]
            return [jnp.conj(g) for g in pull(jax_cotangents(everything))]

        self.live[:] = live
        traced = jax.jit(backward).trace(self.saved, self.residuals, list(itertools.compress(self.outputs, live)))
        absent = independent(traced.jaxpr, len(self.saved) + len(self.residuals))
        return Backward(traced.lower().compile(), absent)


def independent(jaxpr: Any, first: int) -> list[bool]:
    """Which results do not depend on the inputs from ``first`` on."""
    return [not d for d in dependent_outputs(jaxpr, [i >= first for i in range(len(jaxpr.in_avals))])]


def unread(jaxpr: Any) -> set[int]:
    """The inputs, after the key, that are not read: state that is bound anew leads back to no call before."""
    inner = jaxpr.jaxpr
    read = {id(v) for v in (*inner.outvars, *(v for equation in inner.eqns for v in equation.invars))}
    return {i for i, v in enumerate(inner.invars[1:]) if id(v) not in read}
