"""Indices out of range raise, as in eager torch on the CPU, where XLA would read another element.

The check is a primitive that hands its index on. It is lowered for the CPU to a comparison and a branch that calls back
to Python in the bad case only, so it costs one pass over the index. Other devices are not checked: there XLA clamps
reads and drops writes, where eager CUDA stops the process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex
from jax.interpreters import ad, batching, mlir

from .context import current_call
from .versions import enable_x64

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
_OTHERS: dict[str, tuple[int, Callable[[Sequence[Any]], tuple[int, int]]]] = {
    "aten.embedding": (1, lambda args: (0, args[0].shape[0])),
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


def checked(op: Any, args: Sequence[Any], line: str) -> Sequence[Any]:
    """The arguments of an op, its indices watched."""
    name = _name(op)
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


def _name(op: Any) -> str:
    return str(getattr(op, "overloadpacket", op))


def _watch_several(x: Any, indices: Sequence[Any], line: str) -> list[Any]:
    watched, axis = [], 0
    for index in indices:
        is_mask = index is not None and getattr(index, "dtype", None) == np.bool_
        if index is not None and not is_mask:
            index = _watch(index, x.shape[axis], -x.shape[axis], line)
        watched.append(index)
        axis += index.ndim if is_mask else 1
    return watched


def _watch(index: Any, size: int, least: int, line: str) -> Any:
    if not isinstance(index, jax.Array) or not jnp.issubdtype(index.dtype, jnp.integer):
        return index
    call = current_call()
    return check_index_p.bind(
        index, size=size, least=least, line=line, failures=None if call is None else call.failures
    )


class Failures:
    """The checks that failed in a program: XLA calls back in a thread of its own."""

    def __init__(self) -> None:
        self._errors: list[Exception] = []

    def add(self, error: Exception) -> None:
        self._errors.append(error)

    def check(self) -> None:
        """Raise for a check that failed since the last time."""
        if self._errors:
            error = self._errors[0]
            self._errors.clear()
            raise error


def _lowered(index: jax.Array, *, size: int, least: int, line: str, failures: Failures | None) -> jax.Array:
    def fail(index: Any, bad: Any) -> Any:
        worst = np.asarray(index)[np.asarray(bad)][0]
        message = f"{line}: index {worst} is out of range for an axis of length {size}."
        if failures is None:  # in a program of the user's own
            raise IndexError(message)
        failures.add(IndexError(message))
        return np.zeros((), index.dtype)

    def call() -> jax.Array:
        return jax.pure_callback(fail, jax.ShapeDtypeStruct((), index.dtype), index, bad)

    with enable_x64():  # the index may be 64-bit in a program that JAX lowers in its 32-bit mode
        bad = (index < least) | (index >= size)
        return index + jax.lax.cond(bad.any(), call, lambda: jnp.zeros((), index.dtype))


check_index_p = jex.Primitive("check_index")
check_index_p.def_impl(lambda index, **params: jax.jit(lambda x: check_index_p.bind(x, **params))(index))
check_index_p.def_abstract_eval(lambda index, **params: index)
batching.primitive_batchers[check_index_p] = lambda xs, axes, **params: (check_index_p.bind(*xs, **params), axes[0])
ad.primitive_jvps[check_index_p] = lambda primals, tangents, **params: (
    check_index_p.bind(*primals, **params),
    ad.Zero(jax.typeof(primals[0]).to_tangent_aval()),
)
mlir.register_lowering(check_index_p, lambda ctx, index, **params: [index])
mlir.register_lowering(check_index_p, mlir.lower_fun(_lowered, multiple_results=False), platform="cpu")
