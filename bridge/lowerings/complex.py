"""Complex numbers, and the views between complex and real tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import torch
from jax import Array

from ._registry import lowering
from .torchax_ops import torchax_table


@lowering("aten.angle")
def angle(x: Array) -> Array:
    """Compute the angle; torchax gives pi for -0."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jnp.angle(x)
    dtype = x.dtype if jnp.issubdtype(x.dtype, jnp.floating) else jnp.float32
    return jnp.where(x < 0, jnp.pi, jnp.where(x != x, x, 0)).astype(dtype)


@lowering("aten._conj", "aten.conj", "aten._conj_physical", "aten.conj_physical")
def conj(x: Array) -> Array:
    return jnp.conj(x)


@lowering("aten.view_as_real", "aten.view_as_real_copy")
def view_as_real(x: Array) -> Array:
    return jnp.stack([x.real, x.imag], -1)


@lowering("aten.view_as_complex", "aten.view_as_complex_copy")
def view_as_complex(x: Array) -> Array:
    return jax.lax.complex(x[..., 0], x[..., 1])


@lowering("aten.complex")
def complex_(real: Array, imag: Array) -> Array:
    real, imag = jnp.broadcast_arrays(real, imag)
    return jax.lax.complex(real, imag)


@lowering("aten._fft_c2r")
def real_from_half_spectrum(x: Array, dim: Sequence[int], normalization: int, last_dim_size: int) -> Array:
    """Transform half a spectrum back; torchax takes an even last size for granted where there are several axes."""
    sizes = [x.shape[d] for d in dim[:-1]] + [last_dim_size]
    return jnp.fft.irfftn(x, sizes, dim, ("forward", "ortho", "backward")[normalization])


@lowering("aten._neg_view", "aten._neg_view_copy")
def neg_view(x: Array) -> Array:
    """Negate: torch marks it on the imaginary part of a conjugate view, without touching the numbers."""
    return -x


def quotient(x: Array, y: Array) -> Array:
    """Divide by Smith's method (Communications of the ACM 5, 1962), as torch: NaN where all of ``y`` is infinite.

    XLA divides as C does, where a divisor with one infinite part gives zero, whatever the other is.
    """
    x, y = jnp.broadcast_arrays(x, y)
    a, b, c, d = x.real, x.imag, y.real, y.imag
    is_first = jnp.abs(c) >= jnp.abs(d)  # the larger part
    large, small = jnp.where(is_first, c, d), jnp.where(is_first, d, c)
    ratio = small / large
    inverse = 1 / (large + small * ratio)
    re = jnp.where(is_first, a + b * ratio, a * ratio + b) * inverse
    im = jnp.where(is_first, b - a * ratio, b * ratio - a) * inverse
    is_zero = (c == 0) & (d == 0)
    return jax.lax.complex(jnp.where(is_zero, a / jnp.abs(c), re), jnp.where(is_zero, b / jnp.abs(d), im))


def _of_complex(name: str, fun: Callable[..., Array]) -> None:
    """Lower an op by ``fun`` for complex numbers alone: by torchax's for others."""
    real = torchax_table()[getattr(torch.ops.aten, name)]

    def lower(x: Array, *args: object, **kwargs: object) -> Array:
        return (fun if jnp.issubdtype(x.dtype, jnp.complexfloating) else real)(x, *args, **kwargs)

    lowering(f"aten.{name}")(lower)


def _on_the_cut(fun: Callable[[Array], Array], real: int = 0, imaginary: int = 0) -> Callable[[Array], Array]:
    """Return ``fun`` with parts that have the signs of its argument's parts, zeros included, which XLA takes for +0.

    On a branch cut that sign says from which side the argument came. XLA gives a finite number at some NaN.
    """

    def lower(x: Array) -> Array:
        y = fun(x)
        if not jnp.issubdtype(x.dtype, jnp.complexfloating):
            return y
        re = jnp.copysign(y.real, real * x.real) if real else y.real
        im = jnp.copysign(y.imag, imaginary * x.imag) if imaginary else y.imag
        y = jax.lax.complex(re, im)
        return jnp.where(jnp.isnan(x) & ~jnp.isinf(x.real) & ~jnp.isinf(x.imag), jnp.nan, y)

    return lower


def _root(x: Array) -> Array:
    """Compute the square root: infinite where the imaginary part of its argument is, whatever the real one."""
    y = _on_the_cut(jnp.sqrt, imaginary=1)(x)
    if not jnp.issubdtype(x.dtype, jnp.complexfloating):
        return y
    return jnp.where(jnp.isinf(x.imag), jax.lax.complex(jnp.abs(x.imag), x.imag), y)


lowering("aten.sqrt")(_root)
lowering("aten.asin")(_on_the_cut(jnp.arcsin, imaginary=1))
lowering("aten.acos")(_on_the_cut(jnp.arccos, imaginary=-1))
lowering("aten.acosh")(_on_the_cut(jnp.arccosh, imaginary=1))
lowering("aten.asinh")(_on_the_cut(jnp.arcsinh, real=1))
lowering("aten.atan")(_on_the_cut(jnp.arctan, real=1))
lowering("aten.atanh")(_on_the_cut(jnp.arctanh, imaginary=1))


def _one_over(x: Array) -> Array:
    return quotient(jnp.ones_like(x), x)


# Powers that torch takes by other functions.
COMPLEX_POWERS: dict[float, Callable[[Array], Array]] = {
    0.5: _root,
    -0.5: lambda x: _one_over(_root(x)),
    -1: _one_over,
    -2: lambda x: _one_over(x * x),
}

_of_complex("reciprocal", _one_over)
_of_complex("rsqrt", COMPLEX_POWERS[-0.5])
_of_complex("sigmoid", lambda x: _one_over(1 + jnp.exp(-x)))
_of_complex("abs", lambda x: jnp.where(jnp.isinf(x.real) | jnp.isinf(x.imag), jnp.inf, jnp.abs(x)))
