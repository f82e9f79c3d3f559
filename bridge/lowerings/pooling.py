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


def _each(value: Any, n: int) -> list[int]:
    """One number for each axis, from what torch takes for that."""
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    return values * n if len(values) == 1 else values


@lowering("aten.max_pool2d_with_indices", "aten.max_pool3d_with_indices", results=True)
def max_pool(
    x: Array,
    kernel: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    *,
    results: Any,
) -> tuple[Array, Array]:
    """torchax names an element outside of the window where all of it is -inf, and another than NaN where one is."""
    n = len(kernel)
    out, sizes = results[0].shape[-n:], x.shape[-n:]
    kernel, padding, dilation = _each(kernel, n), _each(padding, n), _each(dilation, n)
    stride = _each(stride, n) if stride else kernel
    ends = [(o - 1) * s + (k - 1) * d + 1 for o, s, k, d in zip(out, stride, kernel, dilation, strict=True)]
    pads = [(p, max(e - p - size, 0)) for e, p, size in zip(ends, padding, sizes, strict=True)]
    lead = x.ndim - n
    flat = jnp.broadcast_to(jnp.arange(math.prod(sizes)).reshape(sizes), x.shape)

    def best(one: tuple[Array, Array], other: tuple[Array, Array]) -> tuple[Array, Array]:
        (i, a), (j, b) = one, other
        # The first of those that are equal, the last of several NaN; -1 is no element.
        is_better = jnp.where((a != a) & (b != b), j > i, (b != b) | (b > a) | ((b == a) & (j < i)))
        wins = ((j >= 0) & is_better) | (i < 0)
        return jnp.where(wins, j, i), jnp.where(wins, b, a)

    lowest = -jnp.inf if jnp.issubdtype(x.dtype, jnp.floating) else jnp.iinfo(x.dtype).min
    ones, none = (1,) * lead, ((0, 0),) * lead
    index, _ = jax.lax.reduce_window(
        (flat, jax.lax.stop_gradient(x)),
        (jnp.full((), -1, flat.dtype), jnp.asarray(lowest, x.dtype)),
        best,
        (*ones, *kernel),
        (*ones, *stride),
        (*none, *pads),
        window_dilation=(*ones, *dilation),
    )
    index = index[(..., *(slice(o) for o in out))]
    rows = x.reshape(*x.shape[:lead], -1)
    values = jnp.take_along_axis(rows, index.reshape(*x.shape[:lead], -1), -1)
    return values.reshape(index.shape), index


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
