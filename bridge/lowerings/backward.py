"""Backward ops of torch's autograd that have no lowering: the cotangent is pulled back through the forward op's own.

torch computes the same derivative in a hand-written kernel. Where JAX's choice of subgradient differs (ties, zeros),
the op has its own lowering in the other files.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import Array

from ._registry import lowering

aten = torch.ops.aten


def forward(op: Any) -> Callable[..., Any]:
    """The lowering of a forward op, for use by another lowering, which JAX may differentiate."""
    from . import find_lowering, has_lowering

    if isinstance(op, torch._ops.OpOverloadPacket):
        overloads = op.overloads()
        op = getattr(op, "default" if "default" in overloads else overloads[0])
    if has_lowering(op) is None:
        return lambda *args: _recorded(op, args)
    found = find_lowering(op)
    return lambda *args, **kwargs: found(*args, _results=(), _key=None, **kwargs)


def _recorded(op: torch._ops.OpOverload, args: tuple[Any, ...]) -> Any:
    """An op that torch decomposes: record it, and run the smaller ops."""
    from ..graph import Meta, read, run
    from ..recording import record
    from ..values import torch_dtype

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
        raise no_lowering()
    values: dict[int, Any] = dict(zip(graph.inputs, [args[i] for i in where], strict=True))
    run(graph, graph.forward_nodes, values, jax.numpy.zeros(2, "uint32"))
    outs = [read(values, o) for o in graph.outputs]
    return outs[0] if len(outs) == 1 else outs


def no_lowering() -> NotImplementedError:
    """For an op that has no counterpart in JAX; who calls a lowering names the op and the user's line."""
    return NotImplementedError(
        "no lowering is known for it. Use other torch ops there, or compute this part outside of the function and "
        "pass the result in."
    )


def pull_back(op: torch._ops.OpOverload) -> Callable[..., Any]:
    """``f_backward(cotangent, x, *rest)`` from the lowering of ``f``, for an op with its arguments in this order."""
    name = op.overloadpacket.__name__
    base = name.removesuffix("_backward")
    if base == name or not hasattr(aten, base):

        def refuse(*args: Any, **kwargs: Any) -> Any:
            raise no_lowering()

        return refuse
    packet = getattr(aten, base)
    if base.startswith(("upsample", "_upsample")):

        def upsample(g: Array, output_size: Any, input_size: Any, *rest: Any) -> Array:
            zeros = jnp.zeros(input_size, g.dtype)
            return jax.vjp(lambda x: forward(packet)(x, output_size, *rest), zeros)[1](g)[0]

        return upsample
    return lambda g, x, *rest: jax.vjp(lambda x: forward(packet)(x, *rest), x)[1](g)[0]


@lowering("aten.grid_sampler_2d_backward", "aten.grid_sampler_3d_backward")
def grid_sampler_backward(
    g: Array, x: Array, grid: Array, interpolation: int, padding: int, align: bool, mask: Any
) -> Any:
    op = aten.grid_sampler_2d if x.ndim == 4 else aten.grid_sampler_3d
    return jax.vjp(lambda x, grid: forward(op)(x, grid, interpolation, padding, align), x, grid)[1](g)


@lowering("aten._weight_norm_interface_backward")
def weight_norm_backward(g: Array, v: Array, magnitude: Array, norm: Array, dim: int) -> tuple[Array, Array]:
    """w = magnitude · v / ‖v‖, the norm over every axis but ``dim``."""
    axes = tuple(i for i in range(v.ndim) if i != dim % v.ndim)
    norm = norm.reshape([-1 if i == dim % v.ndim else 1 for i in range(v.ndim)])
    along = (g * v).sum(axes, keepdims=True)
    return magnitude / norm * (g - v * along / norm**2), (along / norm).reshape(magnitude.shape)


@lowering("aten._cdist_backward")
def cdist_backward(g: Array, x1: Array, x2: Array, p: float, distance: Array) -> Array:
    if p == 0:
        return jnp.zeros_like(x1)
    difference = x1[..., :, None, :] - x2[..., None, :, :]
    return _pulled_difference(g[..., None], difference, p, distance[..., None]).sum(-2)


@lowering("aten._pdist_backward")
def pdist_backward(g: Array, x: Array, p: float, distance: Array) -> Array:
    one, two = np.triu_indices(x.shape[0], 1)
    if p == 0 or not one.size:
        return jnp.zeros_like(x)
    pulled = _pulled_difference(g[:, None], x[one] - x[two], p, distance[:, None])
    return jnp.zeros_like(x).at[one].add(pulled).at[two].add(-pulled)


def _pulled_difference(g: Array, difference: Array, p: float, total: Array) -> Array:
    """The cotangent of a difference from that of its p-norm ``total``."""
    size, nonzero = jnp.abs(difference), jnp.where(total == 0, 1, total)
    if p == 1:
        return g * jnp.sign(difference)
    if p == float("inf"):
        weight = jnp.sign(difference) * (size == total)
    else:
        weight = difference * jnp.where(size == 0, 1, size) ** (p - 2) / nonzero ** (p - 1)
    return jnp.where(total == 0, 0, g * weight)
