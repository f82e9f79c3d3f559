"""Complex numbers, and the views between complex and real tensors."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from ._registry import lowering


@lowering("aten.angle")
def angle(x: Array) -> Array:
    return jnp.angle(x)


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


@lowering("aten._neg_view", "aten._neg_view_copy")
def neg_view(x: Array) -> Array:
    """What torch marks on the imaginary part of a conjugate view, without touching the numbers."""
    return -x


def _on_the_cut(name: str, fun: Callable[[Array], Array], real: int = 0, imaginary: int = 0) -> None:
    """A function whose parts have the signs of the parts of its argument, zeros included, which XLA takes for +0.

    On a branch cut that sign says from which side the argument came.
    """

    def lower(x: Array) -> Array:
        y = fun(x)
        if not jnp.issubdtype(x.dtype, jnp.complexfloating):
            return y
        re = jnp.copysign(y.real, real * x.real) if real else y.real
        im = jnp.copysign(y.imag, imaginary * x.imag) if imaginary else y.imag
        return jax.lax.complex(re, im)

    lowering(f"aten.{name}")(lower)


_on_the_cut("sqrt", jnp.sqrt, imaginary=1)
_on_the_cut("asin", jnp.arcsin, imaginary=1)
_on_the_cut("acos", jnp.arccos, imaginary=-1)
_on_the_cut("acosh", jnp.arccosh, imaginary=1)
_on_the_cut("asinh", jnp.arcsinh, real=1)
_on_the_cut("atan", jnp.arctan, real=1)
_on_the_cut("atanh", jnp.arctanh, imaginary=1)
