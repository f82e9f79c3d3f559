"""A recorded torch function, computed by JAX: node after node, each by the lowering of its op.

A backward op without a lowering pulls its cotangent back through the lowering of the forward op, or through the
smaller ops that torch makes of it, which are recorded in their turn.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import torch
from jax import Array
from jax.typing import ArrayLike

from ...jax_impl.program.trees import Function
from ..base import versions
from ..lowerings import find_lowering
from ..lowerings.bounds import checked
from ..lowerings.moved import SumOfQuotients
from ..lowerings.signatures import Arguments, Forms
from ..lowerings.stored import stored
from ..memory.dtypes import jax_dtype, torch_dtype
from .graph import Graph
from .nodes import Const, Meta, Node, Ref, Value
from .recording import record
from .rewriting import is_constant

aten = torch.ops.aten
Env = dict[int, Any]  # by node: its result, or a list of several


def run(graph: Graph, todo: Sequence[int], values: Env, key: jax.Array) -> None:
    """Evaluate the nodes ``todo`` in order into ``values``; random draws come from ``key`` by their number."""
    for i in todo:
        node = graph.nodes[i]
        assert node is not None
        leaves = [resolve(values, leaf) if type(leaf) in (Ref, Const) else leaf for leaf in node.leaves]
        places = graph.guarded_leaves.get(i, ())
        for j in places:
            leaves[j] = _apart(leaves[j], node, j, graph)
        args, kwargs = node.spec.unflatten(leaves)
        draw_key = None if node.draw is None else jax.random.fold_in(key, node.draw)
        try:
            lower = getattr(node.op, "lower", None) or find_lowering(node.op) or _pulled_back(node.op)
            result = lower(*checked(node.op, args, node.line), **kwargs, _results=node.results, _key=draw_key)
        except (TypeError, ValueError, NotImplementedError, AssertionError, AttributeError, IndexError) as error:
            raise TypeError(f"{node.line}: {node.op} could not be expressed in JAX: {error}") from error
        except RuntimeError as error:  # torch's own refusal
            if type(error) is not RuntimeError:
                raise
            raise RuntimeError(f"{node.line}: {error}") from error
        if node.single:
            value = _as_eager(result, node.results[0])
            value = stored(value) if Ref(i) in graph.stored else value
            values[i] = _out_of_sight(value, node, graph) if i in graph.guarded_results else value
        else:
            found = [_as_eager(r, meta) for r, meta in zip(result, node.results, strict=True)]
            values[i] = [stored(r) if Ref(i, j) in graph.stored else r for j, r in enumerate(found)]


def _apart(operand: Array, node: Node, place: int, graph: Graph) -> Array:
    """Put an operand of an elementwise op out of the sight of XLA's simplifier; a divisor is spread out before."""
    meta = node.results[0]
    if isinstance(node.op, SumOfQuotients):
        operand = node.op.spread(operand) if place == 1 else operand
    elif place == 1 and meta is not None:
        return versions.spread_out_of_sight(operand, tuple(meta.shape))
    elif node.name == "div" and not is_constant(graph.nodes, node.leaves[1]):
        return versions.out_of_sight(operand)
    return jax.lax.optimization_barrier(operand)


def _out_of_sight(value: Array, node: Node, graph: Graph) -> Array:
    if any(is_constant(graph.nodes, leaf) for leaf in node.leaves[:2]):
        return jax.lax.optimization_barrier(value)
    return versions.out_of_sight(value)


def resolve(values: Env, value: Value) -> jax.Array:
    """Return the array that a Ref or a Const stands for."""
    if isinstance(value, Const):
        array = value.array
        return (
            jnp.asarray(array)
            if any(array.strides)
            else jnp.full(array.shape, array.flat[0] if array.size else 0, array.dtype)
        )
    found = values[value.node]
    return found if value.item is None else found[value.item]


def _as_eager(result: ArrayLike | None, meta: Meta | None) -> Any:
    """Return the result with the dtype and shape that eager torch gives (JAX promotes by other rules)."""
    if meta is None or result is None:
        return result
    array = jnp.asarray(result)
    dtype = jax_dtype(meta.dtype)
    if array.dtype != dtype:
        array = array.astype(dtype)
    return array if array.shape == meta.shape else array.reshape(meta.shape)


@functools.cache
def _pulled_back(op: torch._ops.OpOverload) -> Function:
    """Return the lowering of ``f_backward(cotangent, x, *rest)``, an op with its arguments in this order."""
    name = op.overloadpacket.__name__
    base = name.removesuffix("_backward")
    if base == name or not hasattr(aten, base):
        return _no_lowering
    forward = functools.partial(_forward, _overload(getattr(aten, base)))

    def pull_back(g: Array, x: Array, *rest: object, _results: Forms, _key: Array | None) -> Array:
        return jax.vjp(lambda x: forward(x, *rest), x)[1](g)[0]

    def upsample(
        g: Array,
        output_size: Sequence[int],
        input_size: Sequence[int],
        *rest: object,
        _results: Forms,
        _key: Array | None,
    ) -> Array:
        return jax.vjp(lambda x: forward(x, output_size, *rest), jnp.zeros(input_size, g.dtype))[1](g)[0]

    def grid_sampler(
        g: Array, x: Array, grid: Array, *rest: object, _results: Forms, _key: Array | None
    ) -> tuple[Array, ...]:
        return jax.vjp(lambda x, grid: forward(x, grid, *rest[:-1]), x, grid)[1](g)  # without the mask of outputs

    if base.startswith("grid_sampler"):
        return grid_sampler
    return upsample if base.startswith(("upsample", "_upsample")) else pull_back


def _forward(op: torch._ops.OpOverload, *args: object) -> Any:
    lower = find_lowering(op)
    return _recorded(op, args) if lower is None else lower(*args, _results=(), _key=None)


def _overload(packet: torch._ops.OpOverloadPacket) -> torch._ops.OpOverload:
    overloads = packet.overloads()
    return getattr(packet, "default" if "default" in overloads else overloads[0])


def _recorded(op: torch._ops.OpOverload, args: Arguments) -> Any:
    """Compute an op that torch decomposes: record it, and run the smaller ops."""
    where = [i for i, a in enumerate(args) if isinstance(a, jax.Array)]
    metas = [Meta(torch_dtype(args[i].dtype), args[i].shape) for i in where]

    def fun(*tensors: torch.Tensor) -> list[torch.Tensor]:
        full = list(args)
        for i, tensor in zip(where, tensors, strict=True):
            full[i] = tensor
        out = op(*full)
        return [out] if isinstance(out, torch.Tensor) else list(out)

    graph, _ = record(fun, metas, [False] * len(metas), [])
    if any(node is not None and node.op is op for node in graph.nodes):
        _no_lowering()
    values: Env = dict(zip(graph.inputs, [args[i] for i in where], strict=True))
    run(graph, graph.forward_nodes, values, jax.numpy.zeros(2, "uint32"))
    outs = [resolve(values, o) for o in graph.outputs]
    return outs[0] if len(outs) == 1 else outs


def _no_lowering(*args: object, **kwargs: object) -> NoReturn:
    """Refuse an op that has no counterpart in JAX; who calls this as its lowering names the op and the user's line."""
    raise NotImplementedError(
        "no lowering is known for it. Use other torch ops there, or compute this part outside of the function and "
        "pass the result in."
    )
