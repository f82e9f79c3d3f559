"""Recorded torch functions as JAX primitives whose derivatives, of any order, are torch's own.

Two primitives stand for a recorded function f:

- ``torch_call`` evaluates it. Its JVP rule evaluates f once more with the residuals of its recorded vector-Jacobian
  product, and gives the tangents by the second primitive.
- ``torch_linear`` is the linear map t -> J(x) t. Evaluated, it runs a recording of torch's Jacobian-vector product;
  transposed, it runs the backward half of f's recording, from the residuals. So reverse mode is torch's backward pass.

Derivatives of derivatives do not differentiate the recorded ops, whose detached values and custom backward passes JAX
cannot see: the product itself is a torch function (x, cotangents) -> gradients, recorded with ``create_graph=True``,
and its derivatives are again torch's. Every level is recorded when it is first asked for.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.extend import core as jex
from jax.interpreters import ad, batching, mlir

from ...jax_impl.program.dataflow import dependent, scan_dependence, within
from ...jax_impl.program.evaluate import PLAIN_CALLS, called
from ...jax_impl.program.inline import stands_for
from ..base.errors import TraceError
from ..base.versions import enable_x64
from ..lowerings.conditions import watched
from ..record.graph import Graph
from ..record.nodes import Meta
from ..record.pruning import for_outputs
from ..record.recording import record
from ..record.run import read, run
from .context import current_call
from .derivatives import jvp_rule, vjp_rule, with_captured

Arrays = Sequence[jax.Array]

# What has no derivative rule of its own: its results depend on its operands as those of its program do.
_CALLS = PLAIN_CALLS | {"checkpoint": "jaxpr", "remat2": "jaxpr"}


class DeletedFunction(RuntimeError):
    """A function that is gone was to be recorded once more."""


class Source:
    """A flat torch function and the tensors that it captures, ``known`` ones first.

    Whoever traces the function holds this. The recordings, which JAX's caches keep for long, refer to it weakly.
    """

    def __init__(
        self,
        fun: Callable[..., Sequence[torch.Tensor]],
        known: Sequence[torch.Tensor] = (),
        clocks: bool = False,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """``clocks`` says whether its code may read one; ``check`` refuses what its backward pass leaves behind."""
        self.fun, self.clocks, self.check = fun, clocks, check
        self.captured = list(known)
        self.derived: dict[Any, tuple[TorchFunction, Source]] = {}

    def record(
        self,
        metas: Sequence[Meta],
        need: Sequence[bool],
        wants: Callable[[torch.Tensor], bool] = lambda _: False,
        live: Sequence[int] | None = None,
    ) -> tuple[Graph, list[torch.Tensor]]:
        """Record the function, and the gradients that are needed, of all outputs or of the ``live`` ones."""
        try:
            recorded = record(self.fun, metas, need, self.captured, wants, self.clocks, live)
        except BaseException:
            with contextlib.suppress(TraceError):
                self.check()
            raise
        self.check()
        return recorded


class TorchFunction:
    """The recordings of a flat torch function: one for each set of inputs whose gradient was asked for.

    Its inputs are the arguments and then the captured tensors, which the first recording finds.
    """

    def __init__(
        self,
        source: Source,
        metas: Sequence[Meta],
        need: Sequence[bool] | None = None,
        wants: Callable[[torch.Tensor], bool] = lambda _: False,
        keep: bool = False,
    ) -> None:
        """Record the function, with the gradients of the arguments and captured tensors that are known to be needed.

        Programs are kept in caches, and must not keep the function alive; with ``keep`` they do, for JAX code of the
        user's, which may hold nothing else of it and differentiate it later.
        """
        self._source: Callable[[], Source | None] = weakref.ref(source)
        if keep:
            self.keep(source)
        self.arguments = list(metas)
        self._programs: dict[Any, Any] = {}
        needed = [m.differentiable and n for m, n in zip(metas, need or [False] * len(metas), strict=True)]
        needed += [Meta.of(t).differentiable and wants(t) for t in source.captured]
        graph, source.captured = source.record(self.arguments, needed, wants)
        self.metas = [*self.arguments, *(Meta.of_input(t) for t in source.captured)]
        self.first = graph
        self._graphs: dict[tuple[bool, ...], Graph] = {graph.need: graph}
        self.outputs = graph.output_metas
        self.mutated = [len(self.arguments) + i for i, _ in graph.mutations]
        self.moved = {len(self.arguments) + i for i in graph.moves}
        self.draws = graph.draws

    def keep(self, source: Source) -> None:
        """Hold the function, as long as this is held."""
        self._source = lambda: source

    @property
    def source(self) -> Source:
        """The function itself, for further recordings."""
        source = self._source()
        if source is None:
            raise DeletedFunction("a torch function was asked for a further derivative after it had been deleted")
        return source

    @property
    def captured(self) -> list[torch.Tensor]:
        """The captured tensors, in the order of the inputs."""
        return self.source.captured

    def call(self, make_key: Callable[[], jax.Array], arrays: Arrays) -> list[jax.Array]:
        """Outputs, then the final values of the captured tensors that the function writes to."""
        key = make_key() if self.draws else np.zeros(2, np.uint32)
        return torch_call_p.bind(key, *arrays, program=self.program(Forward))

    def graph(self, need: tuple[bool, ...]) -> Graph:
        """The recording with the gradients of the inputs that ``need`` names."""
        if need not in self._graphs:
            larger = (graph.for_inputs(need) for graph in list(self._graphs.values()))
            self._graphs[need] = next((g for g in larger if g is not None), None) or self._record(need)
        return self._graphs[need]

    def _record(self, need: tuple[bool, ...], live: Sequence[int] | None = None) -> Graph:
        graph, captured = self.source.record(self.arguments, need, live=live)
        if len(captured) != len(self.captured):
            raise TypeError("a tensor is captured only while the function is differentiated; pass it as an argument")
        return graph

    def backward(self, need: tuple[bool, ...], live: tuple[bool, ...]) -> tuple[Graph, bool]:
        """The recording with the cotangents of some differentiable outputs; whether it reads the usual residuals."""
        whole = self.graph(need)
        part = whole if all(live) else for_outputs(whole, live)
        if part is not None:
            return part, True
        return self._record(need, list(itertools.compress(self.differentiable(need), live))), False

    def program(self, kind: type[Any], *args: Any) -> Any:
        """The program of a kind, made once: equal calls then share their compiled code."""
        if (kind, args) not in self._programs:
            self._programs[kind, args] = kind(self, *args)
        return self._programs[kind, args]

    def vjp(self, need: tuple[bool, ...], live: tuple[bool, ...]) -> TorchFunction:
        """(inputs, cotangents of the live differentiable outputs) -> gradients, as a torch function of its own."""
        outputs = tuple(itertools.compress(self.differentiable(need), live))
        return self._derive("vjp", need, outputs, [self.outputs[i] for i in outputs])

    def jvp(self, need: tuple[bool, ...]) -> TorchFunction:
        """(inputs, tangents of the needed inputs) -> tangents of the differentiable outputs."""
        tangents = [meta for meta, n in zip(self.metas, need, strict=True) if n]
        return self._derive("jvp", need, tuple(self.differentiable(need)), tangents)

    def differentiable(self, need: tuple[bool, ...]) -> list[int]:
        return [i for i, d in enumerate(self.graph(need).differentiable) if d]

    def _derive(self, kind: str, need: tuple[bool, ...], outputs: tuple[int, ...], extra: list[Meta]) -> TorchFunction:
        source = self.source
        if (kind, need, outputs) not in source.derived:
            rule = vjp_rule if kind == "vjp" else jvp_rule
            mutated = set(self.mutated)
            call = functools.partial(with_captured, source.fun, len(self.arguments), source.captured, mutated)
            inputs = len(self.metas)

            def derived(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
                return rule(call, tensors[:inputs], tensors[inputs:], need, outputs)

            inner = Source(derived, clocks=source.clocks, check=source.check)
            source.derived[kind, need, outputs] = TorchFunction(inner, [*self.metas, *extra]), inner
        return source.derived[kind, need, outputs][0]


# Programs: what the two primitives carry. Each takes a key first, then arrays.


class Forward:
    """Inputs -> outputs, then the final values of the captured tensors that the function writes to."""

    need: tuple[bool, ...] | None = None

    def __init__(self, function: TorchFunction) -> None:
        self.function = function

    @functools.cached_property
    def avals(self) -> list[Any]:
        function = self.function
        return [m.aval for m in (*function.outputs, *(function.metas[i] for i in function.mutated))]

    def run(self, key: jax.Array, *arrays: jax.Array) -> list[jax.Array]:
        return _evaluate(self.function.first, key, arrays, saving=False)

    def jvp(self, primals: Arrays, tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Outputs and their tangents; residuals and mutations carry none."""
        function = self.function
        need = _needed(function.metas, tangents[1:])
        if not any(need):
            outs = torch_call_p.bind(*primals, program=self)
            return outs, [None] * len(outs)
        differentiable = function.differentiable(need)
        saving = function.program(Saving, need)
        everything = torch_call_p.bind(*primals, program=saving)
        count = len(function.outputs) + len(function.mutated)
        outs, saved = everything[:count], everything[count:]
        if self.need is not None:
            outs = everything if self.need == need else torch_call_p.bind(*primals, program=self)
        given = [t for t, n in zip(tangents[1:], need, strict=True) if n]
        moved = torch_linear_p.bind(*primals, *saved, *given, program=function.program(Linear, need), linear=len(given))
        out_tangents: list[Any] = [None] * len(outs)
        for i, tangent in zip(differentiable, moved, strict=True):
            out_tangents[i] = tangent
        return outs, out_tangents


class Saving(Forward):
    """As Forward, and then the residuals that the backward half reads."""

    def __init__(self, function: TorchFunction, need: tuple[bool, ...]) -> None:
        super().__init__(function)
        self.need: tuple[bool, ...] = need

    @functools.cached_property
    def avals(self) -> list[Any]:
        return [*Forward(self.function).avals, *(m.aval for m in self.function.graph(self.need).saved_metas())]

    def run(self, key: jax.Array, *arrays: jax.Array) -> list[jax.Array]:
        return _evaluate(self.function.graph(self.need), key, arrays, saving=True)


class Backward:
    """Inputs, residuals, cotangents -> gradients, complex ones in JAX's convention (the conjugate of torch's).

    The cotangents are those of the ``live`` ones among the differentiable outputs: the others have none.
    """

    def __init__(self, function: TorchFunction, need: tuple[bool, ...], live: tuple[bool, ...]) -> None:
        self.function, self.need, self.live = function, need, live
        self.graph, self.from_residuals = function.backward(need, live)
        self.saved = function.graph(need).saved
        self.nodes = self.graph.backward_nodes if self.from_residuals else self.graph.all_backward_nodes

    @functools.cached_property
    def avals(self) -> list[Any]:
        return [m.aval for m, n in zip(self.function.metas, self.need, strict=True) if n]

    def depends(self, given: Sequence[bool]) -> list[bool]:
        """Which gradients depend on the inputs, residuals and cotangents that are named."""
        graph, first = self.graph, len(given) - len(self.graph.cotangents)
        needed = list(itertools.compress(itertools.count(), graph.need))
        ways = list(itertools.compress(itertools.compress(graph.reach, graph.differentiable), given[first:]))
        return [
            gradient is not None and (any(given[:first]) or any(way >> i & 1 for way in ways))
            for i, gradient in zip(needed, graph.gradients, strict=True)
        ]

    def _split(self, arrays: Arrays) -> tuple[Arrays, Arrays, Arrays]:
        inputs = len(self.function.metas)
        return (
            arrays[:inputs],
            arrays[inputs : inputs + len(self.saved)],
            arrays[inputs + len(self.saved) :],
        )

    def run(self, key: jax.Array, *arrays: jax.Array) -> list[jax.Array]:
        graph = self.graph
        if graph.recomputes:  # else XLA would merge the second forward pass with the first, and keep all of it
            arrays = jax.lax.optimization_barrier(arrays)
        inputs, saved, cotangents = self._split(arrays)
        values: dict[int, Any] = dict(zip([*graph.inputs, *graph.captured], inputs, strict=True))
        for ref, value in zip(self.saved, saved, strict=True) if self.from_residuals else ():
            if ref.item is None:
                values[ref.node] = value
            else:
                values.setdefault(ref.node, {})[ref.item] = value
        values.update(zip(graph.cotangents, map(jnp.conj, cotangents), strict=True))
        with enable_x64():
            run(graph, self.nodes, values, key)
            gradients = [
                jnp.zeros(aval.shape, aval.dtype)
                if gradient is None
                else jnp.conj(read(values, gradient)).astype(aval.dtype).reshape(aval.shape)
                for gradient, aval in zip(graph.gradients, self.avals, strict=True)
            ]
            return watched(graph.backward_checks, functools.partial(read, values), gradients)

    def jvp(self, primals: Arrays, tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        outs = torch_call_p.bind(*primals, program=self)
        inputs, _, cotangents = self._split(primals[1:])
        moved_inputs, _, moved_cotangents = self._split(tangents[1:])
        product = self.function.vjp(self.need, self.live).program(Forward)
        _, moved = product.jvp(
            [primals[0], *inputs, *map(jnp.conj, cotangents)],
            [None, *moved_inputs, *(None if t is None else jnp.conj(t) for t in moved_cotangents)],
        )
        return outs, [None if t is None else jnp.conj(t) for t in moved[: len(outs)]]


class Linear:
    """Inputs, residuals, tangents -> tangents of the differentiable outputs; linear in the tangents."""

    def __init__(self, function: TorchFunction, need: tuple[bool, ...]) -> None:
        self.function, self.need = function, need

    @functools.cached_property
    def avals(self) -> list[Any]:
        return [self.function.outputs[i].aval for i in self.function.differentiable(self.need)]

    def _inputs(self, arrays: Arrays) -> Arrays:
        count = len(self.function.metas)
        return [*arrays[:count], *arrays[len(arrays) - sum(self.need) :]]

    def run(self, key: jax.Array, *arrays: jax.Array) -> list[jax.Array]:
        return self.function.jvp(self.need).program(Forward).run(key, *self._inputs(arrays))

    def jvp(self, primals: Arrays, tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        linear = sum(self.need)
        outs = torch_linear_p.bind(*primals, program=self, linear=linear)
        if all(t is None for t in self._inputs(tangents[1:])[:-linear]):
            given = [
                jnp.zeros_like(p) if t is None else t
                for p, t in zip(primals[-linear:], tangents[-linear:], strict=True)
            ]
            return outs, torch_linear_p.bind(*primals[:-linear], *given, program=self, linear=linear)
        product = self.function.jvp(self.need).program(Forward)
        _, moved = product.jvp([primals[0], *self._inputs(primals[1:])], [None, *self._inputs(tangents[1:])])
        return outs, moved[: len(outs)]

    @property
    def transposed(self) -> Backward:
        """The map from cotangents of all outputs."""
        every = (True,) * len(self.avals)
        found: Backward = self.function.program(Backward, self.need, every)
        return found

    def transpose(self, residuals: Arrays, cotangents: Sequence[Any]) -> list[Any]:
        """Gradients for cotangents, None for one that is not there."""
        live = tuple(c is not None for c in cotangents)
        program = self.function.program(Backward, self.need, live)
        grads = torch_call_p.bind(*residuals, *itertools.compress(cotangents, live), program=program)
        return [None if made is None else g for g, made in zip(grads, program.graph.gradients, strict=True)]


def _evaluate(graph: Graph, key: jax.Array, arrays: Arrays, saving: bool) -> list[jax.Array]:
    values: dict[int, Any] = dict(zip([*graph.inputs, *graph.captured], arrays, strict=True))
    with enable_x64():
        run(graph, graph.saving_nodes if saving else graph.forward_nodes, values, key)
        results = [read(values, o) for o in (*graph.outputs, *(v for _, v in graph.mutations))]
        results += [read(values, ref) for ref in graph.saved] if saving else []
        return watched(graph.forward_checks, functools.partial(read, values), results)


def _needed(metas: Sequence[Meta], tangents: Sequence[Any]) -> tuple[bool, ...]:
    return tuple(t is not None and m.differentiable for m, t in zip(metas, tangents, strict=True))


class Batched:
    """A program mapped over leading axes. Rules of the inner program are applied under ``jax.vmap``, and so map too."""

    def __init__(self, inner: Any, axes: tuple[int | None, ...], size: int) -> None:
        self.inner, self.axes, self.size = inner, axes, size
        self.mapped = _mapped_outputs(inner, axes)

    @functools.cached_property
    def avals(self) -> list[Any]:
        pairs = zip(self.inner.avals, self.mapped, strict=True)
        return [a.update(shape=(self.size, *a.shape)) if mapped else a for a, mapped in pairs]

    def run(self, *arrays: jax.Array) -> list[jax.Array]:
        out_axes = [0 if mapped else None for mapped in self.mapped]
        return jax.vmap(self.inner.run, self.axes, out_axes, axis_size=self.size)(*arrays)

    def jvp(self, primals: Arrays, tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        given = [t for t in tangents if t is not None]
        where = [t is not None for t in tangents]
        moved_axes = [a for a, w in zip(self.axes, where, strict=True) if w]
        present: list[bool] = []

        def rule(primals: Arrays, given: Arrays) -> tuple[list[Any], list[Any]]:
            rest = iter(given)
            outs, moved = self.inner.jvp(primals, [next(rest) if w else None for w in where])
            present[:] = [t is not None for t in moved]
            return outs, [t for t in moved if t is not None]

        outs, moved = jax.vmap(rule, (list(self.axes), moved_axes), axis_size=self.size)(list(primals), given)
        rest = iter(moved)
        all_moved = [next(rest) if p else None for p in present]
        return self._as_mapped(outs), self._as_mapped(all_moved)

    def _as_mapped(self, rows: Sequence[Any]) -> list[Any]:
        """The first row of what is the same for all."""
        first = lambda r: r[0] if self.size else jnp.zeros(r.shape[1:], r.dtype)
        return [r if mapped or r is None else first(r) for r, mapped in zip(rows, self.mapped, strict=True)]

    def transpose(self, residuals: Arrays, cotangents: Sequence[Any]) -> list[Any]:
        count = len(residuals)
        grads = jax.vmap(self.inner.transpose, (list(self.axes[:count]), 0), axis_size=self.size)(
            list(residuals), list(cotangents)
        )
        # A tangent that every row shares collects from all rows; one mapped over another axis goes back there.
        return [
            None if g is None else g.sum(0) if axis is None else jnp.moveaxis(g, 0, axis)
            for g, axis in zip(grads, self.axes[count:], strict=True)
        ]


def _mapped_outputs(program: Any, axes: Sequence[int | None]) -> list[bool]:
    """Which outputs differ between rows; more than that are said to where telling them apart is of no use."""
    if type(program) is not Forward or axes[0] is not None or None not in axes[1:]:
        return [True] * len(program.avals)
    graph = program.function.first
    given = zip([*graph.inputs, *graph.captured], axes[1:], strict=True)
    return list(graph.made_from({node for node, axis in given if axis is not None}))


def _batched(inner: Any, axes: tuple[int | None, ...], size: int) -> Batched:
    made: dict[Any, Batched] = inner.__dict__.setdefault("batched", {})
    if (axes, size) not in made:
        made[axes, size] = Batched(inner, axes, size)
    return made[axes, size]


torch_call_p = jex.Primitive("torch_call")
torch_call_p.multiple_results = True
torch_linear_p = jex.Primitive("torch_linear")
torch_linear_p.multiple_results = True


def _run(*arrays: jax.Array, program: Any, linear: int = 0) -> list[jax.Array]:
    return program.run(*arrays)


def _run_now(*arrays: jax.Array, program: Any, linear: int = 0) -> list[jax.Array]:
    if "compiled" not in program.__dict__:
        program.compiled = jax.jit(program.run)
    with enable_x64():
        return program.compiled(*arrays)


def _write_out(*arrays: jax.Array, program: Any, linear: int = 0) -> list[jax.Array]:
    """Compute it operation by operation: sums over examples look into it, for products that need not be computed."""
    with enable_x64():
        return program.run(*arrays)


def _lowering(ctx: Any, *args: Any, **params: Any) -> Any:
    call = current_call()
    traced = None if call is None else call.traces.get((params["program"], tuple(ctx.avals_in)))
    with enable_x64():  # what a lowered function calls in its turn is lowered here too
        if traced is not None:
            return mlir.lower_fun(jex.jaxpr_as_fun(traced), multiple_results=True)(ctx, *args)
        return mlir.lower_fun(_run, multiple_results=True)(ctx, *args, **params)


def _abstract(*avals: Any, program: Any, linear: int = 0) -> list[Any]:
    return program.avals


def _jvp(primals: Arrays, tangents: Sequence[Any], *, program: Any, linear: int = 0) -> tuple[list[Any], list[Any]]:
    given = [None if type(t) is ad.Zero or t.dtype == jax.dtypes.float0 else t for t in tangents]
    outs, moved = program.jvp(primals, given)
    zeros = [ad.Zero(jax.typeof(o).to_tangent_aval()) for o in outs]
    return outs, [z if t is None else t for z, t in zip(zeros, moved, strict=True)]


def _batch(arrays: Arrays, axes: Sequence[int | None], *, program: Any, **params: Any) -> tuple[list[Any], list[Any]]:
    size = next(a.shape[d] for a, d in zip(arrays, axes, strict=True) if d is not None)
    primitive = torch_linear_p if params else torch_call_p
    mapped = _batched(program, tuple(axes), size)
    outs = primitive.bind(*arrays, program=mapped, **params)
    return outs, [0 if m else None for m in mapped.mapped]


def _transpose(cotangents: Sequence[Any], *arrays: Any, program: Any, linear: int) -> list[Any]:
    residuals = arrays[: len(arrays) - linear]
    if any(ad.is_undefined_primal(r) for r in residuals):
        raise NotImplementedError("torch_linear is linear in its tangents only")
    given = [None if type(c) is ad.Zero else c for c in cotangents]
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


def dependent_outputs(jaxpr: Any, inputs: Sequence[bool]) -> list[bool]:
    """Which results of a closed jaxpr depend on the inputs that are named."""
    return _depend(jaxpr.jaxpr, inputs)


def _depend(jaxpr: Any, inputs: Sequence[bool]) -> list[bool]:
    found = dependent(jaxpr, inputs, _dependence)
    return [within(v, found) for v in jaxpr.outvars]


def _dependence(equation: Any, given: list[bool]) -> list[bool]:
    """Which results of an operation depend on these operands."""
    every, program, body = [True] * len(equation.outvars), _program(equation), called(equation, _CALLS)
    if body is not None:
        return _depend(body.jaxpr, given)
    if equation.primitive.name == "scan":
        return scan_dependence(equation, given, lambda flags: _depend(equation.params["jaxpr"].jaxpr, flags))[1]
    if isinstance(program, Forward):  # detached results do not
        metas = program.function.metas
        need = tuple(g and m.differentiable for g, m in zip(given[1:], metas, strict=True))
        moving = program.function.differentiable(need) if any(need) else ()
        return [i in moving or i >= len(program.function.outputs) for i in range(len(every))]
    if isinstance(program, Backward):
        return program.depends(given[1:])
    if isinstance(program, Linear):
        gradients = program.function.graph(program.need).gradients
        tangents = given[len(given) - len(gradients) :]
        if not any(given[: len(given) - len(gradients)]):
            return [any(t and g is not None for t, g in zip(tangents, gradients, strict=True))] * len(every)
    return every


def read_inputs(jaxpr: Any) -> list[bool]:
    """Which inputs of a closed jaxpr have values that count; a linear map is read as its transpose reads it."""
    return _read(jaxpr.jaxpr)


def _read(jaxpr: Any) -> list[bool]:
    read = {v for v in jaxpr.outvars if not isinstance(v, jex.Literal)}
    for equation in jaxpr.eqns:
        reads = [True] * len(equation.invars)
        program = _program(equation)
        body = called(equation, PLAIN_CALLS)
        if body is not None:
            reads = _read(body.jaxpr)
        elif isinstance(program, (Backward, Linear)):
            whole = program if isinstance(program, Backward) else program.transposed
            inputs = whole.graph.backward_reads(whole.nodes)
            reads[1 : 1 + len(inputs)] = inputs  # after the key
        read.update(v for v, r in zip(equation.invars, reads, strict=True) if r and not isinstance(v, jex.Literal))
    return [v in read for v in jaxpr.invars]


def _program(equation: Any) -> Any:
    program = equation.params.get("program")
    while isinstance(program, Batched):
        program = program.inner
    return program
