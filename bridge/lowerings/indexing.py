"""Gathers, scatters and searches."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from ...jax_impl.program.sums import wide
from ._registry import lowering
from .signatures import Number

Indices = Sequence[Array | None]  # by axis


class _Elements(Protocol):
    """The elements of an array that ``array.at[...]`` names."""

    def set(self, values: Array, /) -> Array: ...

    def add(self, values: Array, /) -> Array: ...

    def max(self, values: Array, /) -> Array: ...


@lowering("aten.index.Tensor", "aten._unsafe_index.Tensor")
def index(x: Array, indices: Indices) -> Array:
    if any(i is not None and i.dtype == jnp.bool_ for i in indices):
        raise TypeError(
            "x[mask] with a mask that depends on the arguments has a shape that depends on values; keep the shape "
            "fixed with torch.where"
        )
    return x[tuple(slice(None) if i is None else i for i in indices)]


@lowering("aten.index_put", "aten._unsafe_index_put", "aten._index_put_impl")
def index_put(x: Array, indices: Indices, value: Array, accumulate: bool = False, unsafe: bool = False) -> Array:
    if any(i is not None and i.dtype == jnp.bool_ for i in indices):
        return _mask_put(x, indices, value, accumulate)
    at = x.at[tuple(slice(None) if i is None else i for i in indices)]
    return _add(at, value.astype(x.dtype)) if accumulate else at.set(value.astype(x.dtype))


def _add(at: _Elements, value: Array) -> Array:
    """Add values to elements; truth values add up as in torch: by or."""
    added: Array = at.max(value) if value.dtype == np.bool_ else at.add(value)
    return added


@lowering("aten.index_add")
def index_add(x: Array, dim: int, index: Array, source: Array, *, alpha: Number = 1) -> Array:
    """Add a source at indices.

    torch's decomposition stretches a source of another shape and takes negative indices, which the op refuses.
    """
    if x.ndim == 0:
        return index_add(x[None], 0, index, source[None], alpha=alpha)[0]
    dim, index = dim % x.ndim, index.reshape(-1)
    if source.shape != (*x.shape[:dim], index.size, *x.shape[dim + 1 :]):
        raise ValueError(f"source of shape {source.shape} for {index.size} rows of a tensor of shape {x.shape}")
    if source.dtype != np.bool_ and alpha != 1:
        source = source * alpha
    return _add(x.at[(*[slice(None)] * dim, index)], source.astype(x.dtype))


def _mask_put(x: Array, indices: Indices, value: Array, accumulate: bool) -> Array:
    """Compute ``x[mask] = value`` as a choice, where the shape of ``value`` does not depend on the number of True."""
    masks = [i for i in indices if i is not None]
    mask = masks[0]
    if len(masks) > 1 or (value.size != 1 and value.ndim >= x.ndim - mask.ndim + 1):
        raise TypeError(
            "x[mask] = value needs a value whose shape does not depend on how many elements the mask selects; use "
            "torch.where"
        )
    lead = next(k for k, i in enumerate(indices) if i is not None)
    mask = mask.reshape((1,) * lead + mask.shape + (1,) * (x.ndim - lead - mask.ndim))
    return jnp.where(mask, x + value if accumulate else value, x).astype(x.dtype)


@lowering("aten.put")
def put(x: Array, indices: Array, value: Array, accumulate: bool = False) -> Array:
    at, value = x.reshape(-1).at[indices.reshape(-1)], value.reshape(-1)
    return (_add(at, value) if accumulate else at.set(value)).reshape(x.shape)


def _memory(size: Sequence[int], stride: Sequence[int], storage_offset: int | None) -> np.ndarray:
    """Return which elements of a contiguous tensor (the recorder refuses others) a strided view shows."""
    where = np.full((), storage_offset or 0)
    for length, step in zip(size, stride, strict=True):
        where = where[..., None] + np.arange(length) * step
    return where


@lowering("aten.as_strided", "aten.as_strided_copy")
def as_strided(x: Array, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None) -> Array:
    return x.reshape(-1)[_memory(size, stride, storage_offset)]


@lowering("aten.as_strided_scatter")
def as_strided_scatter(
    x: Array, source: Array, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Array:
    return x.reshape(-1).at[_memory(size, stride, storage_offset)].set(source).reshape(x.shape)


def _along(dim: int, indices: Array) -> tuple[Array, ...]:
    """Return where the elements of a source lie whose place on one axis is given by ``indices``."""
    where: list[Array] = list(jnp.indices(indices.shape, sparse=True))
    where[dim] = indices
    return tuple(where)


@lowering("aten.scatter.src", "aten.scatter.value")
def scatter(x: Array, dim: int, indices: Array, source: ArrayLike) -> Array:
    """Write values in the dtype of ``x``; torchax writes those of another dtype, which JAX is about to refuse."""
    if x.ndim == 0:
        return jnp.broadcast_to(jnp.asarray(source, x.dtype), x.shape) if indices.size else x
    where = _along(dim, indices)
    if not isinstance(source, jax.Array):
        return x.at[where].set(jnp.asarray(source, x.dtype))
    if source.ndim:
        source = source[tuple(slice(n) for n in indices.shape)]
    return x.at[where].set(source.astype(x.dtype))


@lowering("aten.slice_scatter")
def slice_scatter(
    x: Array, source: Array, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Array:
    where: list[slice] = [slice(None)] * x.ndim
    where[dim] = slice(start, end, step)
    return x.at[tuple(where)].set(source)


@lowering("aten.diagonal_scatter")
def diagonal_scatter(x: Array, source: Array, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Array:
    moved = jnp.moveaxis(x, (dim1, dim2), (-2, -1))
    i = jnp.arange(source.shape[-1])
    moved = moved.at[..., i + max(-offset, 0), i + max(offset, 0)].set(source)
    return jnp.moveaxis(moved, (-2, -1), (dim1, dim2))


@lowering("aten.searchsorted.Tensor", "aten.searchsorted.Scalar")
def searchsorted(
    sequence: Array,
    values: ArrayLike,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Array | None = None,
) -> Array:
    values = jnp.asarray(values)
    if sorter is not None:
        sequence = jnp.take_along_axis(sequence, sorter, -1)
    right = right or side == "right"
    if sequence.ndim <= 1 or values.ndim == 0:
        return _search(sequence.reshape(-1), values, right)
    search = jax.vmap(lambda s, v: _search(s, v, right))
    rows = search(sequence.reshape(-1, sequence.shape[-1]), values.reshape(-1, values.shape[-1]))
    return rows.reshape(values.shape)


@lowering("aten.bucketize.Tensor", "aten.bucketize.Scalar")
def bucketize(values: ArrayLike, boundaries: Array, *, out_int32: bool = False, right: bool = False) -> Array:
    return _search(boundaries, jnp.asarray(values), right)


def _search(sequence: Array, values: Array, right: bool) -> Array:
    """Bisect as torch does, comparison by comparison: it finds NaN, and its way among NaN, as torch does."""
    size = sequence.shape[0]
    low, high = jnp.zeros(values.shape, jnp.int64), jnp.full(values.shape, size, jnp.int64)
    for _ in range(size.bit_length()):
        middle = (low + high) // 2
        there = sequence[jnp.minimum(middle, size - 1)]
        stays = there > values if right else there >= values
        low, high = (
            jnp.where((low < high) & ~stays, middle + 1, low),
            jnp.where((low < high) & stays, middle, high),
        )
    return low


@lowering("aten.embedding_dense_backward")
def embedding_dense_backward(g: Array, indices: Array, rows: int, padding: int, scale_by_frequency: bool) -> Array:
    width = g.shape[-1]
    indices = indices.reshape(-1)
    g = g.reshape(indices.shape[0], width)
    if scale_by_frequency:
        g = g / jnp.zeros(rows, jnp.int32).at[indices].add(1)[indices][:, None].astype(g.dtype)
    if padding >= 0:
        g = jnp.where((indices == padding)[:, None], 0, g)
    return jnp.zeros((rows, width), g.dtype).at[indices].add(g)


@lowering("aten.embedding_renorm")
def embedding_renorm(weight: Array, indices: Array, max_norm: float, norm_type: float) -> Array:
    """Scale the rows that are looked up to a norm of at most ``max_norm``."""
    rows = weight.astype(wide(weight.dtype))
    norms = jnp.linalg.norm(rows, norm_type, axis=-1)
    used = jnp.zeros(weight.shape[0], jnp.bool_).at[indices.reshape(-1)].set(True)
    scaled = rows * (max_norm / (norms + 1e-7))[:, None]
    return jnp.where((used & (norms > max_norm))[:, None], scaled, rows).astype(weight.dtype)


@lowering("aten.take")
def take(x: Array, indices: Array) -> Array:
    """Take elements at indices; torch's decomposition asks for the value of a single index."""
    return x.reshape(-1)[indices]


@lowering("aten.masked_scatter")
def masked_scatter(x: Array, mask: Array, source: Array) -> Array:
    """Put the elements of a source under the mask, in order.

    A source that is too short, which torch refuses for its values, shows as NaN, or as the dtype's limit.
    """
    if mask.dtype != np.bool_:
        raise ValueError(f"masked_scatter takes a mask of dtype bool, not {mask.dtype}")
    x, mask = jnp.broadcast_arrays(x, mask)
    if not source.size:
        return x
    place = jnp.where(mask, jnp.cumsum(mask).reshape(mask.shape) - 1, source.size)
    return jnp.where(mask, source.reshape(-1).at[place].get(mode="fill"), x)


@lowering("aten.masked_scatter_backward")
def masked_scatter_backward(g: Array, mask: Array, sizes: Sequence[int]) -> Array:
    """Put the cotangents under the mask, in order, at the front of the source."""
    mask = jnp.broadcast_to(mask, g.shape).reshape(-1)
    size = math.prod(sizes)
    where = jnp.where(mask, jnp.cumsum(mask) - 1, size)
    return jnp.zeros(size, g.dtype).at[where].add(g.reshape(-1), mode="drop").reshape(sizes)


@lowering("aten.nonzero_static")
def nonzero_static(x: Array, *, size: int, fill_value: int = -1) -> Array:
    if x.ndim == 0:
        return jnp.zeros((size, 0), jnp.int64)
    return jnp.stack(jnp.nonzero(x, size=size, fill_value=fill_value), -1)


@lowering("aten.scatter_reduce")
def scatter_reduce(x: Array, dim: int, index: Array, source: Array, reduce: str, *, include_self: bool = True) -> Array:
    """Reduce at indices; torchax starts whole numbers at an infinity, as a number, where ``x`` does not count."""
    if x.ndim == 0:
        x, index, source = x[None], index.reshape(-1), source.reshape(-1)
        return scatter_reduce(x, 0, index, source, reduce, include_self=include_self)[0]
    source = source[tuple(slice(n) for n in index.shape)].astype(x.dtype)
    return _reduced(x, _along(dim, index), source, reduce, include_self)


@lowering("aten.scatter_add")
def scatter_add(x: Array, dim: int, index: Array, source: Array) -> Array:
    """Add at indices; torchax cannot add truth values, here and in the lowerings below."""
    return scatter_reduce(x, dim, index, source, "sum")


@lowering("aten.scatter.reduce", "aten.scatter.value_reduce")
def scatter_with(x: Array, dim: int, index: Array, source: Any, *, reduce: str) -> Array:
    source = jnp.broadcast_to(source, index.shape) if jnp.ndim(source) == 0 else source
    return scatter_reduce(x, dim, index, source, {"add": "sum", "multiply": "prod"}[reduce])


@lowering("aten.index_reduce")
def index_reduce(x: Array, dim: int, index: Array, source: Array, reduce: str, *, include_self: bool = True) -> Array:
    if x.ndim == 0:
        x, source = x[None], source.reshape(-1)
        return index_reduce(x, 0, index, source, reduce, include_self=include_self)[0]
    index = index.reshape(-1)
    x, source = jnp.moveaxis(x, dim, 0), jnp.moveaxis(source.astype(x.dtype), dim, 0)
    return jnp.moveaxis(_reduced(x, index, source, reduce, include_self), 0, dim)


def _reduced(x: Array, where: Array | tuple[Array, ...], source: Array, reduce: str, include_self: bool) -> Array:
    if x.dtype == jnp.bool_:
        reduce = {"sum": "amax", "prod": "amin"}.get(reduce, reduce)
    counted = reduce == "mean" or not include_self
    number = jnp.zeros(x.shape, jnp.int32).at[where].add(1) if counted else jnp.zeros((), jnp.int32)
    start = x if include_self else jnp.where(number > 0, _neutral(reduce, x.dtype), x)
    if reduce == "sum":
        return start.at[where].add(source)
    if reduce == "prod":
        return start.at[where].multiply(source)
    if reduce == "mean":
        total, count = start.at[where].add(source), jnp.maximum(number + int(include_self), 1)
        exact = jnp.issubdtype(x.dtype, jnp.inexact)
        return total / count.astype(x.dtype) if exact else jnp.floor_divide(total, count.astype(x.dtype))
    return start.at[where].max(source) if reduce == "amax" else start.at[where].min(source)


def _neutral(reduce: str, dtype: np.dtype) -> ArrayLike:
    if reduce in ("sum", "prod", "mean"):
        return jnp.asarray(reduce == "prod", dtype)
    if dtype == jnp.bool_:
        return jnp.asarray(reduce == "amin", dtype)
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.asarray(-jnp.inf if reduce == "amax" else jnp.inf, dtype)
    return jnp.iinfo(dtype).min if reduce == "amax" else jnp.iinfo(dtype).max


@lowering("aten.index_copy")
def index_copy(x: Array, dim: int, index: Array, source: Array) -> Array:
    """Copy a source to indices; torch's decomposition takes negative indices, which torch refuses."""
    return _written_along(x, dim, index, source, lambda at, rows: at.set(rows))


@lowering("aten.index_fill")
def index_fill(x: Array, dim: int, index: Array, value: ArrayLike) -> Array:
    """Fill at indices; torch's decomposition is by ``index_copy``, which takes no negative indices."""
    return _written_along(x, dim, index, x, lambda at, _: at.set(jnp.asarray(value, x.dtype)))


def _written_along(
    x: Array, dim: int, index: Array, source: Array, write: Callable[[_Elements, Array], Array]
) -> Array:
    if x.ndim == 0:
        return _written_along(x[None], 0, index, source.reshape(-1), write)[0]
    source = source.astype(x.dtype).reshape(-1) if x.ndim == 1 else source.astype(x.dtype)
    return write(x.at[(*(slice(None),) * (dim % x.ndim), index.reshape(-1))], source)


@lowering("aten.max_unpool2d", "aten.max_unpool3d")
def max_unpool(x: Array, indices: Array, output_size: Sequence[int], *window: object) -> Array:
    """Put maxima back at indices; torch's decomposition takes negative indices, which the op refuses."""
    lead = x.shape[: x.ndim - len(output_size)]
    rows, where = x.reshape(math.prod(lead), -1), indices.reshape(math.prod(lead), -1)
    empty = jnp.zeros((rows.shape[0], math.prod(output_size)), x.dtype)
    return empty.at[jnp.arange(rows.shape[0])[:, None], where].set(rows).reshape(*lead, *output_size)


@lowering("aten.repeat_interleave.Tensor")
def repeat_interleave(repeats: Array, *, output_size: int | None = None) -> Array:
    """Repeat each index as often as its number says; torch gives a length that is known before."""
    return jnp.repeat(jnp.arange(repeats.size), repeats, total_repeat_length=output_size).astype(repeats.dtype)
