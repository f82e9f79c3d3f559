"""Indices out of range raise, as in eager torch on the CPU, where XLA would read another element.

A check costs one pass over the index. Other devices are not checked: there XLA clamps reads and drops writes, where
eager CUDA stops the process.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ..base import torch_internals as ti
from .checks import check_p
from .signatures import Arguments

# Ops with the arguments (self, dim, index, ...).
_ALONG_ONE_AXIS = frozenset(
    f"aten.{name}"
    for name in (
        *("gather", "scatter", "scatter_add", "scatter_reduce", "index_select", "index_add", "index_copy"),
        "index_reduce",
    )
)
_BY_SEVERAL = frozenset(
    {"aten.index", "aten.index_put", "aten._unsafe_index", "aten._unsafe_index_put", "aten._index_put_impl"}
)
# The place of the index among the arguments, and from the arguments the least index and the first that is too large.
_OTHERS: dict[str, tuple[int, Callable[[Arguments], tuple[int, int]]]] = {
    "aten.embedding": (1, lambda args: (0, args[0].shape[0])),
    "aten.embedding_renorm": (1, lambda args: (0, args[0].shape[0])),
    "aten.embedding_dense_backward": (1, lambda args: (0, args[2])),
    # -1 ends the labels of a row
    "aten.multilabel_margin_loss_forward": (1, lambda args: (-1, args[0].shape[-1] if args[0].ndim else 1)),
    "aten.multilabel_margin_loss_backward": (2, lambda args: (-1, args[1].shape[-1] if args[1].ndim else 1)),
    "aten.index_fill": (2, lambda args: (-(n := args[0].shape[args[1]] if args[0].ndim else 1), n)),
    "aten.take": (1, lambda args: (-args[0].size, args[0].size)),
    "aten.put": (1, lambda args: (-args[0].size, args[0].size)),
    "aten.max_unpool2d": (1, lambda args: (0, math.prod(args[2]))),
    "aten.max_unpool3d": (1, lambda args: (0, math.prod(args[2]))),
}


def checked(op: object, args: Arguments, line: str) -> Sequence[object]:
    """Return the arguments of an op, its indices watched."""
    name = ti.op_name(op)
    if name in _BY_SEVERAL:
        return [args[0], _watch_several(args[0], args[1], line), *args[2:]]
    if name in _ALONG_ONE_AXIS:
        place, least, end = 2, 0, args[0].shape[args[1]] if args[0].ndim else 1
    elif name in _OTHERS:
        place, limits = _OTHERS[name]
        least, end = limits(args)
    else:
        return args
    return [*args[:place], _watch(args[place], end, least, line), *args[place + 1 :]]


def _watch_several(x: jax.Array, indices: Arguments, line: str) -> list[object]:
    watched, axis = [], 0
    for index in indices:
        is_mask = index is not None and getattr(index, "dtype", None) == np.bool_
        if index is not None and not is_mask:
            index = _watch(index, x.shape[axis], -x.shape[axis], line)
        watched.append(index)
        axis += index.ndim if is_mask else 1
    return watched


def _watch(index: object, size: int, least: int, line: str) -> object:
    if not isinstance(index, jax.Array) or not jnp.issubdtype(index.dtype, jnp.integer):
        return index
    (index,) = check_p.bind(index, index, condition=_Within(least, size), line=line)
    return index


@dataclasses.dataclass(frozen=True)
class _Within:
    """The condition that indices are neither below the least one nor past the end."""

    least: int
    size: int

    def holds(self, index: jax.Array) -> jax.Array:
        return (index >= self.least) & (index < self.size)

    def error(self, index: int, _: int | None) -> IndexError:
        return IndexError(f"index {index} is out of range for an axis of length {self.size}.")
