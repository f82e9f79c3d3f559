"""JAX lowerings of ATen ops: torchax's table, and our own where that table is missing, wrong or not compilable.

One small function an op, grouped by kind in the files of this folder. A lowering takes what the op takes, with arrays
in the place of tensors, and returns arrays; the caller casts each to the dtype and shape that eager torch gives.
``bounds`` and ``conditions`` are what eager torch asks of indices and values, and raises for (``checks`` is the
primitive that does); ``half`` lists what torch computes in float32; ``moved`` and ``stored`` are no ops of torch's, but
what a recording makes of some; ``signatures`` are the types. Start reading in ``_registry`` and any file by its kind.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any, Literal

import torch
from jax import Array

from ...jax_impl.program.trees import Function
from ._registry import LOWERINGS, Lowering
from .signatures import Forms
from .torchax_ops import torchax_table

_FILES = (
    "backward",
    "complex",
    "convolution",
    "elementwise",
    "indexing",
    "linear_algebra",
    "losses",
    "pooling",
    "random",
    "reductions",
    "sampling",
    "special",
)

# Lowerings of torchax that give wrong numbers, frozen draws or do not compile, and whose decomposition is right.
_WRONG_IN_TORCHAX = {
    "aten.cauchy_",
    "aten.embedding_dense_backward",
    "aten.exponential_",
    "aten.geometric_",
    "aten.log_normal_",
    "aten.max_pool2d_with_indices_backward",
}


@functools.cache
def _load() -> None:
    for file in _FILES:
        importlib.import_module(f"{__name__}.{file}")


def _own(op: torch._ops.OpOverload) -> Lowering | None:
    _load()
    return LOWERINGS.get(str(op)) or LOWERINGS.get(str(op.overloadpacket))


def from_torchax(op: torch._ops.OpOverload) -> Function | None:
    """Return torchax's lowering of an op, if it has one that can be used."""
    table = torchax_table()
    if str(op.overloadpacket) in _WRONG_IN_TORCHAX:
        return None
    return table.get(op) or table.get(op.overloadpacket)


@functools.cache
def has_lowering(op: torch._ops.OpOverload) -> Literal["own", "torchax"] | None:
    """Tell where the lowering of an op comes from, if there is one."""
    if _own(op) is not None:
        return "own"
    return "torchax" if from_torchax(op) is not None else None


@functools.cache
def find_lowering(op: torch._ops.OpOverload) -> Function | None:
    """Return ``lowering(*args, **kwargs, _results, _key)``, with the metas of the results and a random op's key."""
    own = _own(op)
    if own is not None:
        return own
    table = from_torchax(op)
    if table is None:
        return None

    def call(*args: object, _results: Forms, _key: Array | None, **kwargs: object) -> Any:
        for name in ("pin_memory", "layout", "device"):
            kwargs.pop(name, None)
        return table(*args, **kwargs)

    return call
