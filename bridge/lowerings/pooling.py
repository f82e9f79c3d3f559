"""Pooling: maxima by window with their flat indices, and the backward ops."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import Array

from ._registry import lowering
from .backward import forward

aten = torch.ops.aten


def _scatter_to_maxima(g: Array, x: Array, indices: Array, spatial: int) -> Array:
    """Each cotangent goes to the element that the window's index names: torch's choice at ties."""
    planes = math.prod(x.shape[: x.ndim - spatial])
    flat = jnp.zeros((planes, math.prod(x.shape[x.ndim - spatial :])), g.dtype)
    rows = jnp.arange(planes)[:, None]
    return flat.at[rows, indices.reshape(planes, -1)].add(g.reshape(planes, -1)).reshape(x.shape)


@lowering("aten.max_pool2d_with_indices_backward", "aten.max_pool3d_with_indices_backward")
def max_pool_backward(
    g: Array, x: Array, kernel: Sequence[int], stride: Any, padding: Any, dilation: Any, ceil: bool, indices: Array
) -> Array:
    return _scatter_to_maxima(g, x, indices, len(kernel))


@lowering("aten.adaptive_max_pool2d_backward")
def adaptive_max_pool2d_backward(g: Array, x: Array, indices: Array) -> Array:
    return _scatter_to_maxima(g, x, indices, 2)


@lowering("aten.adaptive_max_pool3d_backward")
def adaptive_max_pool3d_backward(g: Array, x: Array, indices: Array) -> Array:
    return _scatter_to_maxima(g, x, indices, 3)


@lowering("aten.adaptive_max_pool2d", "aten.adaptive_max_pool3d")
def adaptive_max_pool(x: Array, out: Sequence[int]) -> tuple[Array, Array]:
    """Windows of unequal size, as torch cuts them: from floor(i·s/k) to ceil((i+1)·s/k)."""
    sizes = x.shape[-len(out) :]
    flat = jnp.arange(math.prod(sizes)).reshape(sizes)
    values, indices = [], []
    for cell in itertools.product(*[range(k) for k in out]):
        window = tuple(slice(i * s // k, -(-(i + 1) * s // k)) for i, s, k in zip(cell, sizes, out, strict=True))
        block = x[(..., *window)].reshape(*x.shape[: -len(out)], -1)
        best = jnp.argmax(block, -1)
        values.append(jnp.take_along_axis(block, best[..., None], -1)[..., 0])
        indices.append(flat[window].reshape(-1)[best])
    shape = (*x.shape[: -len(out)], *out)
    return jnp.stack(values, -1).reshape(shape), jnp.stack(indices, -1).reshape(shape)


@lowering("aten._adaptive_avg_pool2d_backward")
def adaptive_avg_pool2d_backward(g: Array, x: Array) -> Array:
    return jax.vjp(lambda x: forward(aten._adaptive_avg_pool2d)(x, list(g.shape[-2:])), x)[1](g)[0]


@lowering("aten._adaptive_avg_pool3d_backward")
def adaptive_avg_pool3d_backward(g: Array, x: Array) -> Array:
    return jax.vjp(lambda x: forward(aten._adaptive_avg_pool3d)(x, list(g.shape[-3:])), x)[1](g)[0]


@lowering("aten.avg_pool2d_backward")
def avg_pool2d_backward(g: Array, x: Array, kernel: Any, stride: Any, *rest: Any) -> Array:
    return jax.vjp(lambda x: forward(aten.avg_pool2d)(x, kernel, stride or kernel, *rest), x)[1](g)[0]


@lowering("aten.avg_pool3d_backward")
def avg_pool3d_backward(g: Array, x: Array, kernel: Any, stride: Any, *rest: Any) -> Array:
    return jax.vjp(lambda x: forward(aten.avg_pool3d)(x, kernel, stride or kernel, *rest), x)[1](g)[0]
