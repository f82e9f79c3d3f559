"""Pooling: maxima by window with their flat indices, and the backward ops."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import Array

from . import find_lowering
from ._registry import lowering
from .signatures import Forms

aten = torch.ops.aten
Sizes = list[int] | tuple[int, ...]
Each = int | Sizes  # for each axis, or for all


def _scatter_to_maxima(g: Array, x: Array, indices: Array, spatial: int) -> Array:
    """Add each cotangent to the element that the window's index names: torch's choice at ties."""
    planes, windows = math.prod(x.shape[: x.ndim - spatial]), math.prod(g.shape[g.ndim - spatial :])
    flat = jnp.zeros((planes, math.prod(x.shape[x.ndim - spatial :])), g.dtype)
    rows = jnp.arange(planes)[:, None]
    return flat.at[rows, indices.reshape(planes, windows)].add(g.reshape(planes, windows)).reshape(x.shape)


def _each(value: Each, n: int) -> list[int]:
    """Return one number for each axis, from what torch takes for that."""
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    return values * n if len(values) == 1 else values


class _Windows:
    """Where the windows of a pooling lie along its spatial axes, the last of ``x``."""

    def __init__(
        self, x: Array, out: Sequence[int], kernel: Each, stride: Each | None, padding: Each, dilation: Each
    ) -> None:
        n = len(out)
        self.sizes, self.out, self.lead = x.shape[-n:], tuple(out), x.ndim - n
        self.kernel, self.padding, self.dilation = _each(kernel, n), _each(padding, n), _each(dilation, n)
        self.stride = _each(stride, n) if stride else self.kernel
        axes = zip(self.out, self.stride, self.kernel, self.dilation, strict=True)
        ends = [(o - 1) * s + (k - 1) * d + 1 for o, s, k, d in axes]
        pads = zip(ends, self.padding, self.sizes, strict=True)
        self.pads = [(p, max(e - p - size, 0)) for e, p, size in pads]

    @property
    def taps(self) -> list[tuple[int, ...]]:
        """The places in a window, in torch's order, as the offset of each axis from the window's start."""
        axes = zip(self.kernel, self.dilation, strict=True)
        return list(itertools.product(*(range(0, k * d, d) for k, d in axes)))

    def inside(self, tap: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        """Return the flat index of the element at this place of each window, and whether there is one."""
        places = np.indices(self.out)
        flat, exists = np.zeros(self.out, int), np.ones(self.out, bool)
        for axis, (offset, size) in enumerate(zip(tap, self.sizes, strict=True)):
            place = places[axis] * self.stride[axis] + (offset - self.padding[axis])
            flat, exists = flat * size + place, exists & (place >= 0) & (place < size)
        return flat, exists

    def read(self, padded: Array, tap: tuple[int, ...]) -> Array:
        """Return the element at this place of each window."""
        stop = [t + (o - 1) * s + 1 for t, o, s in zip(tap, self.out, self.stride, strict=True)]
        lead = padded.shape[: self.lead]
        return jax.lax.slice(padded, [*[0] * self.lead, *tap], [*lead, *stop], [*[1] * self.lead, *self.stride])

    def spread(self, g: Array, tap: tuple[int, ...]) -> Array:
        """Compute the transpose of ``read``, without the padding."""
        places = zip(tap, self.padding, self.out, self.stride, self.sizes, strict=True)
        edges = [(t - p, size - (t - p + (o - 1) * s + 1), s - 1) for t, p, o, s, size in places]
        return jax.lax.pad(g, jnp.zeros((), g.dtype), [*[(0, 0, 0)] * self.lead, *edges])

    @property
    def tile(self) -> bool:
        """Whether each window begins where the one before it ends."""
        return self.stride == self.kernel and set(self.dilation) == {1}

    def tiled(self, g: Array, indices: Array) -> Array:
        """Put the cotangents at the elements that the indices name, where windows tile the axes."""
        lengths = [o * k for o, k in zip(self.out, self.kernel, strict=True)]
        flat = jnp.zeros(lengths, indices.dtype)
        for axis, (size, padding) in enumerate(zip(self.sizes, self.padding, strict=True)):
            flat = flat * size + (jax.lax.broadcasted_iota(flat.dtype, flat.shape, axis) - padding)
        whole = jnp.where(self._repeated(indices) == flat, self._repeated(g), jnp.zeros((), g.dtype))
        edges = zip(self.padding, self.sizes, lengths, strict=True)
        low_and_high = [(-p, size - (length - p), 0) for p, size, length in edges]
        return jax.lax.pad(whole, jnp.zeros((), g.dtype), [*[(0, 0, 0)] * self.lead, *low_and_high])

    def _repeated(self, a: Array) -> Array:
        """Repeat each window's entry at all places of the window."""
        lead, pairs = a.shape[: self.lead], list(zip(self.out, self.kernel, strict=True))
        kept = [n for o, _ in pairs for n in (o, 1)]
        a = jnp.broadcast_to(a.reshape(*lead, *kept), (*lead, *(n for pair in pairs for n in pair)))
        return a.reshape(*lead, *(o * k for o, k in pairs))


# With more places in a window, a loop of XLA's is quicker than as many comparisons written out.
_MOST_TAPS = 32


@lowering("aten.max_pool2d_with_indices", "aten.max_pool3d_with_indices", results=True)
def max_pool(
    x: Array,
    kernel: Sizes,
    stride: Each | None = None,
    padding: Each = 0,
    dilation: Each = 1,
    ceil_mode: bool = False,
    *,
    results: Forms,
) -> tuple[Array, Array]:
    """Return the maximum of each window, and its index.

    torchax names an element outside of the window where all of it is -inf, and another than NaN where one is. Torch
    names the first of those that are equal, and the last of several NaN.
    """
    windows = _Windows(x, results[0].shape[-len(kernel) :], kernel, stride, padding, dilation)
    lowest = -jnp.inf if jnp.issubdtype(x.dtype, jnp.floating) else jnp.iinfo(x.dtype).min
    lowest = jnp.asarray(lowest, x.dtype)
    if math.prod(windows.kernel) > _MOST_TAPS:
        return _max_pool_in_a_loop(x, windows, lowest)
    # As torch's kernel does it. XLA's reduce_window, of pairs, takes several times as long on CPU.
    padded = jax.lax.pad(x, lowest, [*[(0, 0, 0)] * windows.lead, *((low, high, 0) for low, high in windows.pads)])
    shape = (*x.shape[: windows.lead], *windows.out)
    index, best = jnp.full(shape, -1, int), jnp.full(shape, lowest)
    found = np.zeros(windows.out, bool)
    for tap in windows.taps:
        value, (flat, exists) = windows.read(padded, tap), windows.inside(tap)
        wins = (value > best) | (value != value)
        if not found.all():
            wins = wins | ~found
        if not exists.all():
            wins = wins & exists
        found = found | exists
        index, best = jnp.where(wins, flat, index), jnp.where(wins, value, best)
    return best, index


def _max_pool_in_a_loop(x: Array, windows: _Windows, lowest: Array) -> tuple[Array, Array]:
    flat = jnp.broadcast_to(jnp.arange(math.prod(windows.sizes)).reshape(windows.sizes), x.shape)

    def best(one: tuple[Array, Array], other: tuple[Array, Array]) -> tuple[Array, Array]:
        (i, a), (j, b) = one, other
        # In any order; -1 is no element.
        is_better = jnp.where((a != a) & (b != b), j > i, (b != b) | (b > a) | ((b == a) & (j < i)))
        wins = ((j >= 0) & is_better) | (i < 0)
        return jnp.where(wins, j, i), jnp.where(wins, b, a)

    ones, none = (1,) * windows.lead, ((0, 0),) * windows.lead
    index, _ = jax.lax.reduce_window(
        (flat, jax.lax.stop_gradient(x)),
        (jnp.full((), -1, flat.dtype), lowest),
        best,
        (*ones, *windows.kernel),
        (*ones, *windows.stride),
        (*none, *windows.pads),
        window_dilation=(*ones, *windows.dilation),
    )
    index = index[(..., *(slice(o) for o in windows.out))]
    rows = x.reshape(*x.shape[: windows.lead], math.prod(windows.sizes))
    values = jnp.take_along_axis(rows, index.reshape(*x.shape[: windows.lead], math.prod(windows.out)), -1)
    return values.reshape(index.shape), index


@lowering("aten.max_pool2d_with_indices_backward", "aten.max_pool3d_with_indices_backward")
def max_pool_backward(
    g: Array,
    x: Array,
    kernel: Sizes,
    stride: Each | None,
    padding: Each,
    dilation: Each,
    ceil: bool,
    indices: Array,
) -> Array:
    windows = _Windows(x, g.shape[-len(kernel) :], kernel, stride, padding, dilation)
    if math.prod(windows.kernel) > _MOST_TAPS:
        return _scatter_to_maxima(g, x, indices, len(kernel))
    if windows.tile:
        return windows.tiled(g, indices)
    total = jnp.zeros(x.shape, g.dtype)
    for tap in windows.taps:
        chosen = indices == windows.inside(tap)[0]
        total = total + windows.spread(jnp.where(chosen, g, jnp.zeros((), g.dtype)), tap)
    return total


@lowering("aten.adaptive_max_pool2d_backward")
def adaptive_max_pool2d_backward(g: Array, x: Array, indices: Array) -> Array:
    return _scatter_to_maxima(g, x, indices, 2)


@lowering("aten.adaptive_max_pool3d_backward")
def adaptive_max_pool3d_backward(g: Array, x: Array, indices: Array) -> Array:
    return _scatter_to_maxima(g, x, indices, 3)


@lowering("aten.adaptive_max_pool2d", "aten.adaptive_max_pool3d")
def adaptive_max_pool(x: Array, out: Sequence[int]) -> tuple[Array, Array]:
    """Pool windows of unequal size, as torch cuts them: from floor(i·s/k) to ceil((i+1)·s/k)."""
    sizes = x.shape[-len(out) :]
    flat = jnp.arange(math.prod(sizes)).reshape(sizes)
    values, indices = [], []
    for cell in itertools.product(*[range(k) for k in out]):
        window = tuple(slice(i * s // k, -(-(i + 1) * s // k)) for i, s, k in zip(cell, sizes, out, strict=True))
        block = x[(..., *window)].reshape(*x.shape[: -len(out)], flat[window].size)
        best = jnp.argmax(block, -1)
        if jnp.issubdtype(x.dtype, jnp.floating):  # the last of several NaN, as in max_pool
            missing = block != block
            last = block.shape[-1] - 1 - jnp.argmax(missing[..., ::-1], -1)
            best = jnp.where(missing.any(-1), last, best)
        values.append(jnp.take_along_axis(block, best[..., None], -1)[..., 0])
        indices.append(flat[window].reshape(-1)[best])
    shape = (*x.shape[: -len(out)], *out)
    return jnp.stack(values, -1).reshape(shape), jnp.stack(indices, -1).reshape(shape)


def _pulled_back(op: torch._ops.OpOverloadPacket, g: Array, x: Array, *rest: object) -> Array:
    lower = find_lowering(op.default)
    assert lower is not None
    return jax.vjp(lambda x: lower(x, *rest, _results=(), _key=None), x)[1](g)[0]


@lowering("aten._adaptive_avg_pool2d_backward")
def adaptive_avg_pool2d_backward(g: Array, x: Array) -> Array:
    return _pulled_back(aten._adaptive_avg_pool2d, g, x, list(g.shape[-2:]))


@lowering("aten._adaptive_avg_pool3d_backward")
def adaptive_avg_pool3d_backward(g: Array, x: Array) -> Array:
    return _pulled_back(aten._adaptive_avg_pool3d, g, x, list(g.shape[-3:]))


@lowering("aten.avg_pool2d_backward")
def avg_pool2d_backward(g: Array, x: Array, kernel: Each, stride: Each | None, *rest: object) -> Array:
    return _pulled_back(aten.avg_pool2d, g, x, kernel, stride or kernel, *rest)


@lowering("aten.avg_pool3d_backward")
def avg_pool3d_backward(g: Array, x: Array, kernel: Each, stride: Each | None, *rest: object) -> Array:
    return _pulled_back(aten.avg_pool3d, g, x, kernel, stride or kernel, *rest)
