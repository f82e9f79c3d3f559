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
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import torch

from ..base.errors import TraceError
from ..base.versions import enable_x64
from ..lowerings.conditions import watched
from ..record.graph import Graph
from ..record.nodes import Meta
from ..record.pruning import for_outputs
from ..record.recording import record
from ..record.run import resolve, run
from .derivatives import jvp_rule, vjp_rule, with_captured
from .primitives import Arrays, Callee, Tangents, torch_call_p, torch_linear_p

P = TypeVar("P", bound=Callee)
T = TypeVar("T")


class DeletedFunction(RuntimeError):
    """The error of a function that is gone and was to be recorded once more."""


class Original:
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
        """Hold the function and the ``known`` ones of the tensors that it captures.

        ``clocks`` says whether its code may read a clock; ``check`` refuses what its backward pass leaves behind.
        """
        self.fun, self.clocks, self.check = fun, clocks, check
        self.captured = list(known)
        self.derived: dict[tuple[str, tuple[bool, ...], tuple[int, ...]], tuple[TorchFunction, Original]] = {}

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
        source: Original,
        metas: Sequence[Meta],
        need: Sequence[bool] | None = None,
        wants: Callable[[torch.Tensor], bool] = lambda _: False,
        keep: bool = False,
    ) -> None:
        """Record the function, with the gradients of the arguments and captured tensors that are known to be needed.

        Programs are kept in caches, and must not keep the function alive; with ``keep`` they do, for JAX code of the
        user's, which may hold nothing else of it and differentiate it later.
        """
        self._source: Callable[[], Original | None] = weakref.ref(source)
        if keep:
            self.keep(source)
        self.arguments = list(metas)
        self._programs: dict[Hashable, Any] = {}
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

    def keep(self, source: Original) -> None:
        """Hold the function, as long as this is held."""
        self._source = lambda: source

    @property
    def source(self) -> Original:
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
        """Compute outputs, then the final values of the captured tensors that the function writes to."""
        key = make_key() if self.draws else np.zeros(2, np.uint32)
        return torch_call_p.bind(key, *arrays, program=self.program(Forward))

    def graph(self, need: tuple[bool, ...]) -> Graph:
        """Return the recording with the gradients of the inputs that ``need`` names."""
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
        """Return the recording with cotangents of some differentiable outputs, and if it reads the usual residuals."""
        whole = self.graph(need)
        part = whole if all(live) else for_outputs(whole, live)
        if part is not None:
            return part, True
        return self._record(need, list(itertools.compress(self.differentiable(need), live))), False

    def program(self, kind: Callable[..., P], *args: object) -> P:
        """Return the program of a kind, made once: equal calls then share their compiled code."""
        if (kind, args) not in self._programs:
            self._programs[kind, args] = kind(self, *args)
        return self._programs[kind, args]

    def vjp(self, need: tuple[bool, ...], live: tuple[bool, ...]) -> TorchFunction:
        """Return (inputs, cotangents of the live differentiable outputs) -> gradients, as another torch function."""
        outputs = tuple(itertools.compress(self.differentiable(need), live))
        return self._derive("vjp", need, outputs, [self.outputs[i] for i in outputs])

    def jvp(self, need: tuple[bool, ...]) -> TorchFunction:
        """Return (inputs, tangents of the needed inputs) -> tangents of the differentiable outputs."""
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

            inner = Original(derived, clocks=source.clocks, check=source.check)
            source.derived[kind, need, outputs] = TorchFunction(inner, [*self.metas, *extra]), inner
        return source.derived[kind, need, outputs][0]


class Forward(Callee):
    """Inputs -> outputs, then the final values of the captured tensors that the function writes to."""

    need: tuple[bool, ...] | None = None

    def __init__(self, function: TorchFunction) -> None:
        self.function = function

    @functools.cached_property
    def avals(self) -> list[jax.core.ShapedArray]:
        function = self.function
        return [m.aval for m in (*function.outputs, *(function.metas[i] for i in function.mutated))]

    def mapped_outputs(self, axes: Sequence[int | None]) -> list[bool]:
        if type(self) is not Forward or axes[0] is not None or None not in axes[1:]:
            return super().mapped_outputs(axes)
        graph = self.function.first
        given = zip([*graph.inputs, *graph.captured], axes[1:], strict=True)
        return list(graph.made_from({node for node, axis in given if axis is not None}))

    def run(self, key: jax.Array, *arrays: jax.Array) -> list[jax.Array]:
        return _evaluate(self.function.first, key, arrays, saving=False)

    def jvp(self, primals: Arrays, tangents: Tangents) -> tuple[Arrays, Tangents]:
        """Compute outputs and their tangents; residuals and mutations carry none."""
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
        out_tangents: list[jax.Array | None] = [None] * len(outs)
        for i, tangent in zip(differentiable, moved, strict=True):
            out_tangents[i] = tangent
        return outs, out_tangents


class Saving(Forward):
    """Inputs -> what :class:`Forward` returns, and then the residuals that the backward half reads."""

    def __init__(self, function: TorchFunction, need: tuple[bool, ...]) -> None:
        super().__init__(function)
        self.need: tuple[bool, ...] = need

    @functools.cached_property
    def avals(self) -> list[jax.core.ShapedArray]:
        return [*Forward(self.function).avals, *(m.aval for m in self.function.graph(self.need).saved_metas())]

    def run(self, key: jax.Array, *arrays: jax.Array) -> list[jax.Array]:
        return _evaluate(self.function.graph(self.need), key, arrays, saving=True)


class Backward(Callee):
    """Inputs, residuals, cotangents -> gradients, complex ones in JAX's convention (the conjugate of torch's).

    The cotangents are those of the ``live`` ones among the differentiable outputs: the others have none.
    """

    def __init__(self, function: TorchFunction, need: tuple[bool, ...], live: tuple[bool, ...]) -> None:
        self.function, self.need, self.live = function, need, live
        self.graph, self.from_residuals = function.backward(need, live)
        self.saved = function.graph(need).saved
        self.nodes = self.graph.backward_nodes if self.from_residuals else self.graph.all_backward_nodes

    @functools.cached_property
    def avals(self) -> list[jax.core.ShapedArray]:
        return [m.aval for m, n in zip(self.function.metas, self.need, strict=True) if n]

    def depends(self, given: Sequence[bool]) -> list[bool]:
        """Tell which gradients depend on the inputs, residuals and cotangents that are named."""
        graph, first = self.graph, len(given) - len(self.graph.cotangents)
        needed = list(itertools.compress(itertools.count(), graph.need))
        ways = list(itertools.compress(itertools.compress(graph.reach, graph.differentiable), given[first:]))
        return [
            gradient is not None and (any(given[:first]) or any(way >> i & 1 for way in ways))
            for i, gradient in zip(needed, graph.gradients, strict=True)
        ]

    def _split(self, arrays: Sequence[T]) -> tuple[Sequence[T], Sequence[T], Sequence[T]]:
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
                else jnp.conj(resolve(values, gradient)).astype(aval.dtype).reshape(aval.shape)
                for gradient, aval in zip(graph.gradients, self.avals, strict=True)
            ]
            return watched(graph.backward_checks, functools.partial(resolve, values), gradients)

    def jvp(self, primals: Arrays, tangents: Tangents) -> tuple[Arrays, Tangents]:
        outs = torch_call_p.bind(*primals, program=self)
        inputs, _, cotangents = self._split(primals[1:])
        moved_inputs, _, moved_cotangents = self._split(tangents[1:])
        product = self.function.vjp(self.need, self.live).program(Forward)
        _, moved = product.jvp(
            [primals[0], *inputs, *map(jnp.conj, cotangents)],
            [None, *moved_inputs, *(None if t is None else jnp.conj(t) for t in moved_cotangents)],
        )
        return outs, [None if t is None else jnp.conj(t) for t in moved[: len(outs)]]


class Linear(Callee):
    """Inputs, residuals, tangents -> tangents of the differentiable outputs; linear in the tangents."""

    def __init__(self, function: TorchFunction, need: tuple[bool, ...]) -> None:
        self.function, self.need = function, need

    @functools.cached_property
    def avals(self) -> list[jax.core.ShapedArray]:
        return [self.function.outputs[i].aval for i in self.function.differentiable(self.need)]

    def _inputs(self, arrays: Sequence[T]) -> Sequence[T]:
        count = len(self.function.metas)
        return [*arrays[:count], *arrays[len(arrays) - sum(self.need) :]]

    def run(self, key: jax.Array, *arrays: jax.Array) -> list[jax.Array]:
        return self.function.jvp(self.need).program(Forward).run(key, *self._inputs(arrays))

    def jvp(self, primals: Arrays, tangents: Tangents) -> tuple[Arrays, Tangents]:
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

    def transpose(self, residuals: Arrays, cotangents: Tangents) -> Tangents:
        """Compute gradients for cotangents, None for one that is not there."""
        live = tuple(c is not None for c in cotangents)
        program = self.function.program(Backward, self.need, live)
        grads = torch_call_p.bind(*residuals, *itertools.compress(cotangents, live), program=program)
        return [None if made is None else g for g, made in zip(grads, program.graph.gradients, strict=True)]


def _evaluate(graph: Graph, key: jax.Array, arrays: Arrays, saving: bool) -> list[jax.Array]:
    values: dict[int, Any] = dict(zip([*graph.inputs, *graph.captured], arrays, strict=True))
    with enable_x64():
        run(graph, graph.saving_nodes if saving else graph.forward_nodes, values, key)
        results = [resolve(values, o) for o in (*graph.outputs, *(v for _, v in graph.mutations))]
        results += [resolve(values, ref) for ref in graph.saved] if saving else []
        return watched(graph.forward_checks, functools.partial(resolve, values), results)


def _needed(metas: Sequence[Meta], tangents: Tangents) -> tuple[bool, ...]:
    return tuple(t is not None and m.differentiable for m, t in zip(metas, tangents, strict=True))
