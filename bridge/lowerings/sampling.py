"""Images read between their pixels: grids in three dimensions, and resizing with antialiasing."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from ._registry import lowering

Kernel = Callable[[np.ndarray], np.ndarray]
_NEAREST, _BORDER, _REFLECTION = 1, 1, 2


@lowering("aten.grid_sampler_3d")
def grid_sampler_3d(x: Array, grid: Array, interpolation: int, padding: int, align: bool) -> Array:
    sizes = x.shape[2:]
    places = [_place(grid[..., 2 - i], n, padding, align) for i, n in enumerate(sizes)]  # the grid counts from the last
    if interpolation == _NEAREST:
        return _read(x, [jnp.round(p) for p in places])
    total: Any = 0
    for corner in itertools.product((0, 1), repeat=3):
        cells = [jnp.floor(p) + c for p, c in zip(places, corner, strict=True)]
        weight = math.prod(1 - jnp.abs(p - cell) for p, cell in zip(places, cells, strict=True))
        total = total + _read(x, cells) * jnp.asarray(weight)[:, None]
    return total


def _place(g: Array, size: int, padding: int, align: bool) -> Array:
    """Turn the range -1 to 1 into pixels, with what lies outside brought in as ``padding`` says."""
    place = (g + 1) / 2 * (size - 1) if align else ((g + 1) * size - 1) / 2
    if padding == _REFLECTION:
        low, span = (0.0, size - 1) if align else (-0.5, size)
        away = jnp.abs(place - low)
        turns, rest = jnp.floor(away / max(span, 1)), jnp.mod(away, max(span, 1))
        place = jnp.where(turns % 2 == 0, rest, span - rest) + low if span else jnp.zeros_like(place)
    if padding in (_BORDER, _REFLECTION):  # written so that the derivative at the border is torch's, zero
        place = jnp.where(place <= 0, 0, jnp.where(place >= size - 1, size - 1, place))
    return place


def _read(x: Array, cells: list[Array]) -> Array:
    """Read the pixels at whole-numbered places, of every channel; 0 outside."""
    inside: Any = True
    for cell, n in zip(cells, x.shape[2:], strict=True):
        inside = inside & (cell >= 0) & (cell < n)
    where = [jnp.where(inside, cell, 0).astype(jnp.int32) for cell in cells]
    row = jnp.arange(x.shape[0]).reshape(-1, *[1] * (where[0].ndim - 1))
    pixels = jnp.moveaxis(x, 1, -1)[(row, *where)]
    return jnp.moveaxis(jnp.where(inside[..., None], pixels, 0), -1, 1)


def _triangle(t: np.ndarray) -> np.ndarray:
    return np.maximum(1 - np.abs(t), 0)


def _cubic(t: np.ndarray) -> np.ndarray:
    """Compute Keys' kernel with a = -1/2."""
    t = np.abs(t)
    return np.where(t < 1, (1.5 * t - 2.5) * t**2 + 1, np.where(t < 2, ((-0.5 * t + 2.5) * t - 4) * t + 2, 0))


def _weights(size: int, out: int, align: bool, scale: float | None, reach: int, kernel: Kernel) -> np.ndarray:
    """Return one row for each pixel of the result: the kernel, as wide as the pixels that it stands for."""
    if align:
        step = (size - 1) / (out - 1) if out > 1 else 0.0
    else:
        step = 1 / scale if scale else size / out
    wide = max(step, 1.0)
    rows = np.zeros((out, size))
    for i in range(out):
        centre = step * (i + 0.5)
        first = max(int(centre - reach * wide + 0.5), 0)
        last = min(int(centre + reach * wide + 0.5), size)
        row = kernel((np.arange(first, last) - centre + 0.5) / wide)
        rows[i, first:last] = row / row.sum()
    return rows


def _resize(
    x: Array,
    output: Sequence[int],
    align: bool,
    scales: Sequence[float | None],
    reach: int,
    kernel: Kernel,
) -> Array:
    height, width = (
        jnp.asarray(_weights(n, out, align, scale, reach, kernel), x.dtype)
        for n, out, scale in zip(x.shape[-2:], output, scales, strict=True)
    )
    return height @ x @ width.T


@lowering("aten._upsample_bilinear2d_aa.default")
def upsample_bilinear2d_aa(
    x: Array, output: Sequence[int], align: bool, scale_h: float | None = None, scale_w: float | None = None
) -> Array:
    """Resize by a triangular kernel, with antialiasing; torchax takes the scales by other names."""
    return _resize(x, output, align, (scale_h, scale_w), 1, _triangle)


@lowering("aten._upsample_bicubic2d_aa.default")
def upsample_bicubic2d_aa(
    x: Array, output: Sequence[int], align: bool, scale_h: float | None = None, scale_w: float | None = None
) -> Array:
    """Resize by a cubic kernel, with antialiasing; torchax takes the scales by other names."""
    return _resize(x, output, align, (scale_h, scale_w), 2, _cubic)
