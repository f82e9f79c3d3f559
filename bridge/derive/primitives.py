"""The two JAX primitives that stand for recorded torch functions: the rules are those of the program that each carries.

``torch_call`` evaluates a program, ``torch_linear`` is linear in its last inputs; ``functions.py`` has the programs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax.extend import core as jex
from jax.interpreters import ad, batching, mlir

from ...jax_impl.program.inline import stands_for
from ..base.versions import enable_x64
from .context import current_call, for_every_call

Arrays: TypeAlias = Sequence[jax.Array]
Tangents: TypeAlias = Sequence[jax.Array | None]  # or cotangents; None stands for one that is not there

Array = TypeVar("Array", jax.Array, jax.Array | None)


class Callee:
    """What the two primitives carry. It takes a key first, then arrays."""

    @property
    def avals(self) -> list[jax.core.ShapedArray]:
        """The types of the results."""
        raise NotImplementedError

    def run(self, key: jax.Array, *arrays: jax.Array) -> list[jax.Array]:
        """Compute the results."""
        raise NotImplementedError

    @functools.cached_property
    def compiled(self) -> Callable[..., list[jax.Array]]:
        """``run``, compiled."""
        return jax.jit(self.run)

    def jvp(self, primals: Arrays, tangents: Tangents) -> tuple[Arrays, Tangents]:
        """Compute the results and their tangents; None stands for a tangent that is not there."""
        raise NotImplementedError

    def transpose(self, residuals: Arrays, cotangents: Tangents) -> Tangents:
        """Compute the cotangents of the linear inputs; None stands for one that is not there."""
        raise NotImplementedError

    def mapped_outputs(self, axes: Sequence[int | None]) -> list[bool]:
        """Tell which results differ between rows; more are said to where telling them apart is of no use."""
        return [True] * len(self.avals)

    def batched(self, axes: tuple[int | None, ...], size: int) -> Batched:
        """Return the program mapped over these axes of its inputs, made once."""
        made: dict[tuple[tuple[int | None, ...], int], Batched] = self.__dict__.setdefault("_batched", {})
        if (axes, size) not in made:
            made[axes, size] = Batched(self, axes, size)
        return made[axes, size]


class Batched(Callee):
    """A program mapped over leading axes. Rules of the inner program are applied under ``jax.vmap``, and so map too."""

    def __init__(self, inner: Callee, axes: tuple[int | None, ...], size: int) -> None:
        self.inner, self.axes, self.size = inner, axes, size
        self.mapped = inner.mapped_outputs(axes)

    @functools.cached_property
    def avals(self) -> list[jax.core.ShapedArray]:
        pairs = zip(self.inner.avals, self.mapped, strict=True)
        return [a.update(shape=(self.size, *a.shape)) if mapped else a for a, mapped in pairs]

    def run(self, key: jax.Array, *arrays: jax.Array) -> list[jax.Array]:
        out_axes = [0 if mapped else None for mapped in self.mapped]
        return jax.vmap(self.inner.run, self.axes, out_axes, axis_size=self.size)(key, *arrays)

    def jvp(self, primals: Arrays, tangents: Tangents) -> tuple[Arrays, Tangents]:
        given = [t for t in tangents if t is not None]
        where = [t is not None for t in tangents]
        moved_axes = [a for a, w in zip(self.axes, where, strict=True) if w]
        present: list[bool] = []

        def rule(primals: Arrays, given: Arrays) -> tuple[Arrays, Arrays]:
            rest = iter(given)
            outs, moved = self.inner.jvp(primals, [next(rest) if w else None for w in where])
            present[:] = [t is not None for t in moved]
            return outs, [t for t in moved if t is not None]

        outs, moved = jax.vmap(rule, (list(self.axes), moved_axes), axis_size=self.size)(list(primals), given)
        rest = iter(moved)
        all_moved = [next(rest) if p else None for p in present]
        return self._as_mapped(outs), self._as_mapped(all_moved)

    def _as_mapped(self, rows: Sequence[Array]) -> list[Array]:
        """Return the first row of what is the same for all."""
        first = lambda r: r[0] if self.size else jnp.zeros(r.shape[1:], r.dtype)
        return [r if mapped or r is None else first(r) for r, mapped in zip(rows, self.mapped, strict=True)]

    def transpose(self, residuals: Arrays, cotangents: Tangents) -> Tangents:
        count = len(residuals)
        grads = jax.vmap(self.inner.transpose, (list(self.axes[:count]), 0), axis_size=self.size)(
            list(residuals), list(cotangents)
        )
        # A tangent that every row shares collects from all rows; one mapped over another axis goes back there.
        return [
            None if g is None else g.sum(0) if axis is None else jnp.moveaxis(g, 0, axis)
            for g, axis in zip(grads, self.axes[count:], strict=True)
        ]


torch_call_p = jex.Primitive("torch_call")
torch_call_p.multiple_results = True
torch_linear_p = jex.Primitive("torch_linear")
torch_linear_p.multiple_results = True


def _run(*arrays: jax.Array, program: Callee, linear: int = 0) -> list[jax.Array]:
    return program.run(*arrays)


def _run_now(*arrays: jax.Array, program: Callee, linear: int = 0) -> list[jax.Array]:
    with enable_x64(), for_every_call():
        return program.compiled(*arrays)


def _write_out(*arrays: jax.Array, program: Callee, linear: int = 0) -> list[jax.Array]:
    """Compute it operation by operation: sums over examples look into it, for products that need not be computed."""
    with enable_x64(), for_every_call():
        return program.run(*arrays)


def _lowering(ctx: mlir.LoweringRuleContext, *args: object, **params: object) -> Sequence[mlir.ir.Value[Any]]:
    call = current_call()
    traced = None if call is None else call.traces.get((params["program"], tuple(ctx.avals_in)))
    with enable_x64(), for_every_call():  # what a lowered function calls in its turn is lowered here too
        if traced is not None:
            return mlir.lower_fun(jex.jaxpr_as_fun(traced), multiple_results=True)(ctx, *args)
        return mlir.lower_fun(_run, multiple_results=True)(ctx, *args, **params)


def _abstract(*avals: object, program: Callee, linear: int = 0) -> list[jax.core.ShapedArray]:
    return program.avals


def _jvp(
    primals: Arrays, tangents: Sequence[Any], *, program: Callee, linear: int = 0
) -> tuple[Arrays, list[jax.Array | ad.Zero]]:
    given = [None if type(t) is ad.Zero or t.dtype == jax.dtypes.float0 else t for t in tangents]
    with for_every_call():
        outs, moved = program.jvp(primals, given)
    zeros = [ad.Zero(jax.typeof(o).to_tangent_aval()) for o in outs]
    return outs, [z if t is None else t for z, t in zip(zeros, moved, strict=True)]


def _batch(
    arrays: Arrays, axes: Sequence[int | None], *, program: Callee, **params: int
) -> tuple[Arrays, list[int | None]]:
    size = next(a.shape[d] for a, d in zip(arrays, axes, strict=True) if d is not None)
    primitive = torch_linear_p if params else torch_call_p
    mapped = program.batched(tuple(axes), size)
    outs = primitive.bind(*arrays, program=mapped, **params)
    return outs, [0 if m else None for m in mapped.mapped]


def _transpose(
    cotangents: Sequence[Any], *arrays: Any, program: Callee, linear: int
) -> list[jax.Array | ad.Zero | None]:
    residuals = arrays[: len(arrays) - linear]
    if any(ad.is_undefined_primal(r) for r in residuals):
        raise NotImplementedError("torch_linear is linear in its tangents only")
    given = [None if type(c) is ad.Zero else c for c in cotangents]
    with for_every_call():
        grads = [None] * linear if all(c is None for c in given) else program.transpose(residuals, given)
    zeros = [ad.Zero(a.aval) if ad.is_undefined_primal(a) else None for a in arrays[len(residuals) :]]
    return [None] * len(residuals) + [z if g is None else g for z, g in zip(zeros, grads, strict=True)]


for _primitive in (torch_call_p, torch_linear_p):
    _primitive.def_impl(_run_now)
    _primitive.def_abstract_eval(_abstract)
    ad.primitive_jvps[_primitive] = _jvp
    batching.primitive_batchers[_primitive] = _batch
    mlir.register_lowering(_primitive, _lowering)
    stands_for(_primitive, _write_out)
ad.primitive_transposes[torch_linear_p] = _transpose
