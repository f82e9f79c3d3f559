"""Reductions over axes where torchax's table gives other numbers than torch, or none."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import torch
from jax import Array

from ..memory.dtypes import jax_dtype
from ._registry import lowering
from .signatures import Forms

Dims = Sequence[int] | None


@lowering("aten.mean", results=True)
def mean(
    x: Array,
    dim: Dims | int = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
    results: Forms,
) -> Array:
    """Compute the mean; torchax refuses integers with a ``dtype``."""
    axes = None if dim is None or dim == [] else tuple(dim) if isinstance(dim, (list, tuple)) else dim
    return jnp.mean(x.astype(jax_dtype(results[0].dtype)), None if x.ndim == 0 else axes, keepdims=keepdim)


@lowering("aten.sum", results=True)
def sum_(
    x: Array,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
    results: Forms,
) -> Array:
    """Sum; truth values are counted in float32 if all counts fit it: XLA writes out the 64-bit numbers that it sums."""
    axes = None if dim is None or dim == [] or x.ndim == 0 else tuple(dim)
    if x.dtype != jnp.bool_ or x.size > 2**24:
        return jnp.sum(x.astype(jax_dtype(results[0].dtype)), axes, keepdims=keepdim)
    return jnp.sum(x.astype(jnp.float32), axes, keepdims=keepdim).astype(jnp.int32)


@lowering("aten._safe_softmax", results=True)
def safe_softmax(x: Array, dim: int, dtype: torch.dtype | None = None, *, results: Forms) -> Array:
    """Compute the softmax, zero where all is -inf. torch's decomposition looks for that element by element."""
    x = x.astype(jax_dtype(results[0].dtype))
    if not x.size:
        return x
    least = jnp.finfo(x.dtype)
    powers = jnp.exp(x - jnp.maximum(x.max(dim, keepdims=True), least.min))
    return powers / jnp.maximum(powers.sum(dim, keepdims=True), least.tiny)  # which is one at least, or zero


@lowering("aten.sort")
def sort(x: Array, dim: int = -1, descending: bool = False, *, stable: bool | None = None) -> tuple[Array, Array]:
    """Sort, stable always, as torch is when asked and up to 16 elements.

    torchax takes ties from the last on to descend.
    """
    if x.ndim == 0:
        return x, jnp.zeros((), jnp.int64)
    turn = (lambda v: jnp.flip(v, dim)) if descending else lambda v: v
    pair = turn(x), turn(jax.lax.broadcasted_iota(jnp.int64, x.shape, dim % x.ndim))
    values, order = jax.lax.sort(pair, dimension=dim % x.ndim, num_keys=1)
    return turn(values), turn(order)


@lowering("aten.var.correction")
def var(x: Array, dim: Dims = None, *, correction: float | None = 1, keepdim: bool = False) -> Array:
    return var_mean(x, dim, correction=correction, keepdim=keepdim)[0]


@lowering("aten.var_mean.correction")
def var_mean(x: Array, dim: Dims = None, *, correction: float | None = 1, keepdim: bool = False) -> tuple[Array, Array]:
    """Compute variance and mean.

    No degrees of freedom are left where the correction exceeds the number of elements: a division by zero.
    """
    axes = tuple(range(x.ndim)) if dim is None or dim == [] or x.ndim == 0 else tuple(dim)
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    mean = wide.mean(axes, keepdims=True)
    square = jnp.square(jnp.abs(wide - mean)) if jnp.iscomplexobj(x) else jnp.square(wide - mean)
    left = max(math.prod(x.shape[a] for a in axes) - (1 if correction is None else correction), 0)
    total = square.sum(axes, keepdims=keepdim) / jnp.asarray(left, square.dtype)
    return total, mean if keepdim else mean.squeeze(axes)


@lowering("aten.topk")
def topk(x: Array, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Array, Array]:
    """Find the largest or smallest; torchax looks for the smallest among the negated: there NaN would come first."""
    if x.ndim == 0:
        return x, jnp.zeros((), jnp.int64)
    rows = jnp.moveaxis(x, dim, -1)
    if largest:
        values, index = jax.lax.top_k(rows, k)
    else:
        index = jnp.argsort(rows, -1, stable=True)[..., :k]
        values = jnp.take_along_axis(rows, index, -1)
    return jnp.moveaxis(values, -1, dim), jnp.moveaxis(index, -1, dim)


def _median(x: Array, dim: int, keepdim: bool, skip_nan: bool) -> tuple[Array, Array]:
    """Return the lower of two middle elements. torchax counts NaN among the elements that ``nanmedian`` leaves out."""
    if x.ndim == 0:
        return x, jnp.zeros((), jnp.int64)
    missing = jnp.isnan(x)
    # NaN come last. Both are sorted at once: where nobody reads the order, XLA leaves it out.
    ordered, order = sort(x, dim)
    if skip_nan:
        counted = (~missing).sum(dim, keepdims=True)
        middle = (jnp.maximum(counted, 1) - 1) // 2
        value, index = (jnp.take_along_axis(v, middle, dim) for v in (ordered, order))
    else:
        last, axis = x.shape[dim] - 1, dim % x.ndim
        value, index = (jax.lax.index_in_dim(v, last // 2, axis) for v in (ordered, order))
        greatest = jax.lax.index_in_dim(ordered, last, axis)
        value = jnp.where(jnp.isnan(greatest), greatest, value)
        index = jnp.where(jnp.isnan(greatest), jnp.argmax(missing, dim, keepdims=True), index)
    return (value, index) if keepdim else (value.squeeze(dim), index.squeeze(dim))


def _median_of_all(x: Array, skip_nan: bool) -> Array:
    if x.size == 0:
        return jnp.asarray(jnp.nan if jnp.issubdtype(x.dtype, jnp.floating) else jnp.iinfo(x.dtype).min, x.dtype)
    return _median(x.reshape(-1), 0, False, skip_nan)[0]


@lowering("aten.median.default")
def median(x: Array) -> Array:
    return _median_of_all(x, skip_nan=False)


@lowering("aten.median.dim")
def median_dim(x: Array, dim: int, keepdim: bool = False) -> tuple[Array, Array]:
    return _median(x, dim, keepdim, skip_nan=False)


@lowering("aten.nanmedian.default")
def nanmedian(x: Array) -> Array:
    return _median_of_all(x, skip_nan=True)


@lowering("aten.nanmedian.dim")
def nanmedian_dim(x: Array, dim: int, keepdim: bool = False) -> tuple[Array, Array]:
    return _median(x, dim, keepdim, skip_nan=True)


@lowering("aten.mode")
def mode(x: Array, dim: int = -1, keepdim: bool = False) -> tuple[Array, Array]:
    """Find the smallest of the most frequent elements, and where it stands last. NaN equals nothing, and comes last."""
    if x.ndim == 0:
        return x, jnp.zeros((), jnp.int64)
    rows = jnp.moveaxis(x, dim, -1)
    order = jnp.argsort(rows, -1, stable=True)
    ordered = jnp.take_along_axis(rows, order, -1)
    place = jax.lax.broadcasted_iota(jnp.int32, ordered.shape, ordered.ndim - 1)
    begins = jnp.concatenate([jnp.ones_like(ordered[..., :1], bool), ordered[..., 1:] != ordered[..., :-1]], -1)
    run = place - jax.lax.cummax(jnp.where(begins, place, 0), axis=ordered.ndim - 1)
    last = jnp.argmax(run, -1, keepdims=True)
    value, index = (jnp.take_along_axis(v, last, -1) for v in (ordered, order))
    if keepdim:
        return jnp.moveaxis(value, -1, dim), jnp.moveaxis(index, -1, dim)
    return value[..., 0], index[..., 0]


@lowering("aten.cumsum", results=True)
def cumsum(x: Array, dim: int, *, dtype: torch.dtype | None = None, results: Forms) -> Array:
    """Add up along an axis; torchax adds up narrow integers in their own dtype."""
    x = x.astype(jax_dtype(results[0].dtype))
    return jnp.cumsum(x, dim) if x.ndim else x


@lowering("aten.cumprod", results=True)
def cumprod(x: Array, dim: int, *, dtype: torch.dtype | None = None, results: Forms) -> Array:
    """Multiply along an axis; torchax multiplies narrow integers in their own dtype."""
    x = x.astype(jax_dtype(results[0].dtype))
    return jnp.cumprod(x, dim) if x.ndim else x


@lowering("microtome.decaying_sum")
def decaying_sum(x: Array, decay: Array, reverse: bool) -> Array:
    def joined(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
        return a[0] * b[0], b[0] * a[1] + b[1]

    found: tuple[Array, Array] = jax.lax.associative_scan(joined, (decay, x), reverse=reverse, axis=x.ndim - 1)
    return found[1]


def _running(x: Array, dim: int, is_better: Callable[[Array, Array], Array]) -> tuple[Array, Array]:
    """Return the best element up to each place, with its index: the later one of two equals, and the last NaN."""
    if x.ndim == 0:
        return x, jnp.zeros((), jnp.int64)
    index = jax.lax.broadcasted_iota(jnp.int64, x.shape, dim % x.ndim)

    def later(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
        take = (b[0] != b[0]) | ((a[0] == a[0]) & is_better(b[0], a[0]))
        return jnp.where(take, b[0], a[0]), jnp.where(take, b[1], a[1])

    found: tuple[Array, Array] = jax.lax.associative_scan(later, (x, index), axis=dim % x.ndim)
    return found


@lowering("aten.cummax")
def cummax(x: Array, dim: int) -> tuple[Array, Array]:
    """Return the largest element up to each place; torchax stays at the first NaN."""
    return _running(x, dim, jnp.greater_equal)


@lowering("aten.cummin")
def cummin(x: Array, dim: int) -> tuple[Array, Array]:
    """Return the smallest element up to each place; torchax stays at the first NaN."""
    return _running(x, dim, jnp.less_equal)
