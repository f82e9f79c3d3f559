"""Convolutions in the forms that XLA is fast in on CPU.

There, XLA brings a convolution into the layout of its fast kernels, channels last, but only outside of loops: within
one, a convolution of another layout takes 10 to 40 times as long. Microbatches, chunks and scans are loops, and the
derivatives of a convolution with channels last have other layouts. On other devices XLA chooses the layouts itself.

Three kinds are slow there in any layout. The gradient of a weight, whose kernel is the whole cotangent, takes up to
five times as long as a sum over parts of the batch (16 channels of 32 x 32, 128 examples: 52 ms, in parts 12, with a
thirtieth of the memory). A strided one of a single channel takes four times as long as the same one of the strides'
phases as channels. The gradient of a strided one's input multiplies the zeros between the cotangent's entries: 28 ms
for 512 examples of 16 channels, 7 x 7, and 3 where each phase of the result is a channel. :func:`bind_fast` computes
them so; :func:`bind_whole` and :func:`channels_last` leave them for rules that look at convolutions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, jaxpr_as_fun

from .evaluate import PLAIN_CALLS, Compute, bind, called, evaluate


def run_fast(closed: ClosedJaxpr, *args: Any) -> list[Any]:
    """Return the outputs of a program. What is behind a derivative rule or in a loop stays as it is."""
    return _run(closed, args, bind_fast)


def run_whole(closed: ClosedJaxpr, *args: Any) -> list[Any]:
    """Run a program with each convolution left whole: what it is made of elsewhere can take more memory."""
    return _run(closed, args, bind_whole)


def channels_last(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of arrays that computes the same, its convolutions with channels last."""

    def computed(*args: Any) -> jax.Array:
        closed, shape = jax.make_jaxpr(fun, return_shape=True)(*args)
        return jax.tree.unflatten(jax.tree.structure(shape), run_whole(closed, *args))

    return computed


def _run(closed: ClosedJaxpr, args: Sequence[Any], convolve: Compute) -> list[Any]:
    def compute(equation: JaxprEqn, values: list[Any]) -> Sequence[Any]:
        body = called(equation, PLAIN_CALLS)
        if body is not None and _convolves(body.jaxpr):
            return evaluate(body.jaxpr, body.consts, values, compute)
        return convolve(equation, values)

    if not _convolves(closed.jaxpr):
        return jaxpr_as_fun(closed)(*args)
    return evaluate(closed.jaxpr, closed.consts, args, compute)


def _convolves(jaxpr: Jaxpr) -> bool:
    """Tell whether there is a convolution that can be reached through calls."""
    for equation in jaxpr.eqns:
        body = called(equation, PLAIN_CALLS)
        if _is_convolution(equation) or (body is not None and _convolves(body.jaxpr)):
            return True
    return False


def _is_convolution(equation: JaxprEqn) -> bool:
    return equation.primitive.name == "conv_general_dilated"


def bind_fast(equation: JaxprEqn, values: Sequence[Any]) -> list[Any]:
    """Compute an equation, a convolution in the form that is fast."""
    return bind(equation, values, _convolve if _is_convolution(equation) else None)


def bind_whole(equation: JaxprEqn, values: Sequence[Any]) -> list[Any]:
    """Compute an equation, a convolution left whole but for its layout: for rules that look at convolutions."""
    return bind(equation, values, _with_channels_last if _is_convolution(equation) else None)


def bind_mapped(equation: JaxprEqn, values: Sequence[Any]) -> list[Any]:
    """Compute a convolution mapped over examples of which each has a kernel of its own: they become groups."""
    return bind(equation, values, _kept_apart) if _spreads(values[0].dtype) else bind_fast(equation, values)


# In the gradient of a weight: what fills the registers, and products enough to outweigh the loop around them.
_EXAMPLES, _PRODUCTS = 8, 2048


def _convolve(lhs: jax.Array, rhs: jax.Array, **params: Any) -> jax.Array:
    """Return a convolution in the form that is fast on CPU, where JAX computes there."""
    usual = _is_usual(params) and lhs.dtype in (jnp.float32, jnp.float64)
    if not usual or jax.default_backend() != "cpu":
        return _with_channels_last(lhs, rhs, **params)
    lhs_spec, rhs_spec, out_spec = params["dimension_numbers"]
    shape = jax.eval_shape(lambda *args: _convolution(*args, **params), lhs, rhs).shape
    if 0 in (*lhs.shape, *rhs.shape, *shape):
        return _with_channels_last(lhs, rhs, **params)
    channels = lhs.shape[lhs_spec[1]]
    dilated = any(d != 1 for d in (*params["lhs_dilation"], *params["rhs_dilation"]))
    if channels == 1 and not dilated and any(s != 1 for s in params["window_strides"]):
        return _by_phases(lhs, rhs, **params)
    # A kernel that is larger than what comes out is that of a weight's gradient, whose channels are the examples.
    window, places = (math.prod(x[d] for d in spec[2:]) for x, spec in ((rhs.shape, rhs_spec), (shape, out_spec)))
    size = -(-max(_PRODUCTS // window, 1) // _EXAMPLES) * _EXAMPLES
    if window > places and channels >= 2 * size and channels * window >= 4 * _PRODUCTS:
        return _in_parts(lhs, rhs, size, **params)
    spread = any(d != 1 for d in params["lhs_dilation"])
    if spread and window <= places and {*params["window_strides"], *params["rhs_dilation"]} == {1}:
        return _in_phases(lhs, rhs, shape, **params)
    return _with_channels_last(lhs, rhs, **params)


def _in_parts(lhs: jax.Array, rhs: jax.Array, size: int, **params: Any) -> jax.Array:
    """Return a convolution as a sum of those of so many of its input channels."""
    axes = [spec[1] for spec in params["dimension_numbers"][:2]]
    channels = lhs.shape[axes[0]]

    def part(start: Any, size: int) -> jax.Array:
        pieces = [jax.lax.dynamic_slice_in_dim(x, start, size, d) for x, d in zip((lhs, rhs), axes, strict=True)]
        return _with_channels_last(*pieces, **params)

    first = channels % size or size
    starts = jnp.arange(first, channels, size, dtype=jnp.int32)
    total, _ = jax.lax.scan(lambda total, start: (total + part(start, size), None), part(0, first), starts)
    return total


def _by_phases(lhs: jax.Array, rhs: jax.Array, **params: Any) -> jax.Array:
    """Return a strided convolution of one channel as a plain one that has a channel for each place within a stride."""
    lhs_spec, rhs_spec, out_spec = params["dimension_numbers"]
    strides, padding = params["window_strides"], params["padding"]
    lhs, rhs = _moved(lhs, rhs, lhs_spec, rhs_spec)
    lhs, rhs = lhs.squeeze(-1), rhs.squeeze(-2)
    edges, ends = [], []
    for n, k, (low, high), s in zip(lhs.shape[1:], rhs.shape[:-1], padding, strides, strict=True):
        taps = -(-k // s)
        reach = ((n + low + high - k) // s + taps) * s
        edges.append((low, reach - n - low, 0))
        ends.append((0, taps * s - k, 0))
    zero, alone = jnp.zeros((), lhs.dtype), (0, 0, 0)
    lhs = _phases_as_channels(jax.lax.pad(lhs, zero, [alone, *edges]), 1, strides)
    rhs = _phases_as_channels(jax.lax.pad(rhs, zero, [*ends, alone]), 0, strides)
    numbers = _numbers(lhs.ndim)
    plain = {"window_strides": (1,) * len(strides), "padding": ((0, 0),) * len(strides), "dimension_numbers": numbers}
    return _as_asked(_convolution(lhs, rhs, **params | plain), out_spec)


def _in_phases(lhs: jax.Array, rhs: jax.Array, shape: Sequence[int], **params: Any) -> jax.Array:
    """Convolve an input between whose entries zeros stand, as the input itself with a channel for each phase.

    Such is the gradient of a strided convolution's input. Its outputs at the places ``d * q + r`` see every ``d``-th
    entry of the kernel alone, from one on that ``r`` and the padding choose.
    """
    lhs_spec, rhs_spec, out_spec = params["dimension_numbers"]
    dilation, count = params["lhs_dilation"], len(params["lhs_dilation"])
    lhs, rhs = _moved(lhs, rhs, lhs_spec, rhs_spec)
    edges, padding, taps = [], [], []
    outputs = [shape[d] for d in out_spec[2:]]
    sizes = zip(lhs.shape[1:-1], rhs.shape[:count], outputs, params["padding"], dilation, strict=True)
    for n, k, out, (low, _), d in sizes:
        before, front = low // d, d - 1 - low % d
        window = (k + d - 2 - low) // d + before + 1
        edges.append((front, window * d - front - k, 0))
        padding.append((before, -(-out // d) - 1 + window - n - before))
        taps.append(window)
    rhs = jax.lax.pad(rhs, jnp.zeros((), rhs.dtype), [*edges, (0, 0, 0), (0, 0, 0)])
    features = rhs.shape[-1]
    # Reversed, as the kernel's entries go down where the places go up.
    rhs = jax.lax.rev(_phases_as_channels(rhs, 0, dilation), (count,))
    rhs = jnp.moveaxis(rhs, count, -2).reshape(*taps, lhs.shape[-1], -1)
    plain = {"lhs_dilation": (1,) * count, "padding": tuple(padding), "dimension_numbers": _numbers(lhs.ndim)}
    out = _convolution(lhs, rhs, **params | plain)
    places = out.shape[1:-1]
    out = out.reshape(len(out), *places, *dilation, features)
    order = [axis for i in range(count) for axis in (1 + i, 1 + count + i)]
    out = out.transpose(0, *order, 1 + 2 * count)
    out = out.reshape(len(out), *(p * d for p, d in zip(places, dilation, strict=True)), features)
    return _as_asked(out[(slice(None), *map(slice, outputs))], out_spec)


def _phases_as_channels(x: jax.Array, first: int, strides: Sequence[int]) -> jax.Array:
    """Make ``[*lead, *spatial, *rest]`` to ``[*lead, *spatial / strides, product of strides, *rest]``."""
    last = first + len(strides)
    lead, spatial, rest = x.shape[:first], x.shape[first:last], x.shape[last:]
    split = [size for n, s in zip(spatial, strides, strict=True) for size in (n // s, s)]
    end = first + len(split)
    order = (*range(first), *range(first, end, 2), *range(first + 1, end, 2), *range(end, end + len(rest)))
    x = x.reshape(*lead, *split, *rest).transpose(order)
    return x.reshape(*lead, *split[::2], math.prod(strides), *rest)


def _with_channels_last(lhs: jax.Array, rhs: jax.Array, **params: Any) -> jax.Array:
    """Return a convolution with its channels last, where there is a fast kernel for them."""
    if not _is_usual(params):
        return _convolution(lhs, rhs, **params)
    lhs_spec, rhs_spec, out_spec = params["dimension_numbers"]
    lhs, rhs = _moved(lhs, rhs, lhs_spec, rhs_spec)
    return _as_asked(_convolution(lhs, rhs, **params | {"dimension_numbers": _numbers(lhs.ndim)}), out_spec)


def _convolution(lhs: jax.Array, rhs: jax.Array, **params: Any) -> jax.Array:
    spread = params["feature_group_count"] > 1 and _spreads(lhs.dtype)
    return _kept_apart(lhs, rhs, **params) if spread else jax.lax.conv_general_dilated_p.bind(lhs, rhs, **params)


def _spreads(dtype: Any) -> bool:
    """Tell whether XLA on CPU makes one dense kernel, with zeros, of groups that have one channel each."""
    return jax.default_backend() == "cpu" and dtype in (jnp.float64, jnp.complex128)


def _kept_apart(lhs: jax.Array, rhs: jax.Array, **params: Any) -> jax.Array:
    """Return a convolution whose groups have two channels, and two features, at least: NaN stays in its group.

    Each group that has one gets a second, of zeros. Else NaN would meet the zeros of a kernel that is made dense.
    """
    (_, channels, *_), (features, inputs, *_), out_spec = params["dimension_numbers"]
    groups = params["feature_group_count"]
    if rhs.shape[inputs] == 1:
        lhs, rhs = _doubled(lhs, channels), _doubled(rhs, inputs)
    alone = rhs.shape[features] == groups
    out = jax.lax.conv_general_dilated_p.bind(lhs, _doubled(rhs, features) if alone else rhs, **params)
    return jax.lax.slice_in_dim(out, 0, None, 2, out_spec[1]) if alone else out


def _doubled(x: jax.Array, axis: int) -> jax.Array:
    """Return the array with zeros behind each entry along an axis."""
    padding = [(0, 1, 1) if i == axis else (0, 0, 0) for i in range(x.ndim)]
    return jax.lax.pad(x, jnp.zeros((), x.dtype), padding)


def _is_usual(params: dict[str, Any]) -> bool:
    """Not in groups, which have no fast kernel, nor with a given sharding, which names axes."""
    grouped = params["feature_group_count"] != 1 or params["batch_group_count"] != 1
    return not grouped and params.get("out_sharding") is None


def _numbers(ndim: int) -> jax.lax.ConvDimensionNumbers:
    """Those of channels last."""
    last, spatial = ndim - 1, tuple(range(1, ndim - 1))
    return jax.lax.ConvDimensionNumbers((0, last, *spatial), (last, last - 1, *range(last - 1)), (0, last, *spatial))


def _moved(
    lhs: jax.Array, rhs: jax.Array, lhs_spec: Sequence[int], rhs_spec: Sequence[int]
) -> tuple[jax.Array, jax.Array]:
    """Return the operands with their channels last."""
    lhs = jax.lax.transpose(lhs, (lhs_spec[0], *lhs_spec[2:], lhs_spec[1]))
    return lhs, jax.lax.transpose(rhs, (*rhs_spec[2:], rhs_spec[1], rhs_spec[0]))


def _as_asked(out: jax.Array, spec: Sequence[int]) -> jax.Array:
    """From channels last to the axes that were asked for."""
    order = (spec[0], *spec[2:], spec[1])
    return jax.lax.transpose(out, [order.index(axis) for axis in range(out.ndim)])
