"""The equations of a jaxpr, computed: 64-bit types keep their width, convolutions have the layout that XLA is fast in.

On CPU, XLA brings a convolution into the layout of its fast kernels, channels last, but only outside of loops: within
one, a convolution of another layout takes 10 to 40 times as long. Microbatches, chunks and scans are loops, and the
derivatives of a convolution with channels last have other layouts. On other devices XLA chooses the layouts itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun

_WIDE = frozenset(np.dtype(name) for name in ("int64", "uint64", "float64", "complex128"))
_CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr"}


def bind(equation: Any, values: Sequence[Any]) -> list[Any]:
    """The outputs of an equation for these operands."""
    params = equation.primitive.get_bind_params(equation.params)
    functions, params = params if isinstance(params, tuple) else ((), params)  # newer releases have no functions apart
    compute = _convolve if equation.primitive.name == "conv_general_dilated" else equation.primitive.bind
    with equation.ctx.manager, own_width(equation):
        outs = compute(*functions, *values, **params)
    return list(outs) if equation.primitive.multiple_results else [outs]


def _convolve(lhs: Any, rhs: Any, **params: Any) -> Any:
    """A convolution with its channels last. One in groups has no fast kernel, and a given sharding names axes."""
    convolution = jax.lax.conv_general_dilated_p.bind
    grouped = params["feature_group_count"] != 1 or params["batch_group_count"] != 1
    if grouped or params.get("out_sharding") is not None:
        return convolution(lhs, rhs, **params)
    lhs_spec, rhs_spec, out_spec = params["dimension_numbers"]
    last = lhs.ndim - 1
    spatial = tuple(range(1, last))
    numbers = jax.lax.ConvDimensionNumbers((0, last, *spatial), (last, last - 1, *range(last - 1)), (0, last, *spatial))
    lhs = jax.lax.transpose(lhs, (lhs_spec[0], *lhs_spec[2:], lhs_spec[1]))
    rhs = jax.lax.transpose(rhs, (*rhs_spec[2:], rhs_spec[1], rhs_spec[0]))
    out = convolution(lhs, rhs, **params | {"dimension_numbers": numbers})
    order = (out_spec[0], *out_spec[2:], out_spec[1])
    return jax.lax.transpose(out, [order.index(axis) for axis in range(last + 1)])


def own_width(equation: Any) -> contextlib.AbstractContextManager[Any]:
    """Where an equation keeps its 64-bit types: a traced torch function has them whatever the mode of JAX is."""
    return jax.enable_x64(True) if _is_wide(equation) else contextlib.nullcontext()


def _is_wide(equation: Any) -> bool:
    own = (v.aval for v in (*equation.invars, *equation.outvars) if hasattr(v, "aval"))
    if any(getattr(aval, "dtype", None) in _WIDE for aval in own):
        return True
    return any(_is_wide(inner) for jaxpr in _bodies(equation) for inner in jaxpr.eqns)


def _bodies(equation: Any) -> Iterator[Any]:
    for param in equation.params.values():
        for value in param if isinstance(param, (tuple, list)) else (param,):
            if isinstance(value, (ClosedJaxpr, Jaxpr)):
                yield getattr(value, "jaxpr", value)


def run(closed: ClosedJaxpr, *args: Any) -> list[Any]:
    """The outputs of a program. What is behind a derivative rule or in a loop stays as it is."""
    return _run(closed.jaxpr, closed.consts, args) if _convolves(closed.jaxpr) else jaxpr_as_fun(closed)(*args)


def channels_last(fun: Callable[..., Any]) -> Callable[..., Any]:
    """A function of arrays that computes the same, its convolutions with channels last."""

    def computed(*args: Any) -> Any:
        closed, shape = jax.make_jaxpr(fun, return_shape=True)(*args)
        return jax.tree.unflatten(jax.tree.structure(shape), run(closed, *args))

    return computed


def _run(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    env: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
    read = lambda atom: atom.val if isinstance(atom, Literal) else env[atom]
    for equation in jaxpr.eqns:
        values = list(map(read, equation.invars))
        body = equation.params.get(_CALLS.get(equation.primitive.name, ""))
        if body is not None and _convolves(body.jaxpr):
            outs = _run(body.jaxpr, body.consts, values)
        else:
            outs = bind(equation, values)
        env.update(zip(equation.outvars, outs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _convolves(jaxpr: Any) -> bool:
    """Whether there is a convolution that can be reached through calls."""
    for equation in jaxpr.eqns:
        body = equation.params.get(_CALLS.get(equation.primitive.name, ""))
        if equation.primitive.name == "conv_general_dilated" or (body is not None and _convolves(body.jaxpr)):
            return True
    return False
