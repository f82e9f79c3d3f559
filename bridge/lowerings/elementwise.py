"""Elementwise ops where torchax's table gives other numbers than torch, or none."""

from __future__ import annotations

import math
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import Array
from jax.typing import ArrayLike

from ..memory.dtypes import jax_dtype
from ._registry import lowering
from .complex import COMPLEX_POWERS, quotient
from .signatures import Forms

aten = torch.ops.aten
Operand = TypeVar("Operand", bound=ArrayLike)


@lowering("aten.digamma")
def digamma(x: Array) -> Array:
    """Compute digamma; torchax rounds to float32, and JAX gives NaN at zero."""
    return jnp.where(x == 0, jnp.copysign(jnp.inf, -x), jax.scipy.special.digamma(x)).astype(x.dtype)


@lowering("aten.lgamma")
def lgamma(x: Array) -> Array:
    """Compute lgamma; torchax rounds to float32."""
    return jax.scipy.special.gammaln(x)


@lowering("aten.polygamma")
def polygamma(n: int, x: Array) -> Array:
    """Compute polygamma, below zero by reflection: XLA's zeta function leaves out terms there."""
    if n == 0:
        return digamma(x)
    size = math.factorial(n) if n < 171 else math.inf

    def above(x: Array) -> Array:
        return (1 if n % 2 else -1) * size * jax.scipy.special.zeta(n + 1.0, x)

    pole = (x <= 0) & (x == jnp.floor(x)) & jnp.isfinite(x)
    reflected = (-1) ** n * above(1 - x) - jnp.pi * _cotangent_derivative(n, x)
    finite = jnp.where(x < 0, reflected, jnp.where(x == jnp.inf, 0, above(x)))
    return jnp.where(pole, jnp.inf if n % 2 else -jnp.inf, finite)


def _cotangent_derivative(n: int, x: Array) -> Array:
    """Compute the n-th derivative of cot(πx): a polynomial in c = cot(πx), as c' = -π(1 + c²)."""
    polynomial = np.polynomial.Polynomial([0.0, 1.0])
    for _ in range(n):
        polynomial = polynomial.deriv() * np.polynomial.Polynomial([-np.pi, 0.0, -np.pi])
    angle = jnp.pi * (x - jnp.round(x))
    return jnp.polyval(jnp.asarray(polynomial.coef[::-1], x.dtype), jnp.cos(angle) / jnp.sin(angle))


@lowering("aten.logcumsumexp")
def logcumsumexp(x: Array, dim: int) -> Array:
    """Add up exponentials, each exponent at or below zero by a running maximum; torchax sums them as they are."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return _complex_logcumsumexp(x, dim)
    return x if x.ndim == 0 else jax.lax.cumlogsumexp(x, axis=dim % x.ndim)


def _complex_logcumsumexp(x: Array, dim: int) -> Array:
    """Add one element after another, as the turns that the imaginary part counts depend on the order."""

    def add(total: Array, now: Array) -> tuple[Array, Array]:
        ahead = total.real >= now.real
        large, small = jnp.where(ahead, total, now), jnp.where(ahead, now, total)
        nothing = small.real == -jnp.inf
        sum_ = large + jnp.log1p(jnp.exp(jnp.where(nothing, 0, small - large)))
        total = jnp.where(nothing, large, sum_)
        return total, total

    if x.ndim == 0:
        return x
    rows = jnp.moveaxis(x, dim, 0)
    return jnp.moveaxis(jax.lax.scan(add, jnp.full_like(rows[0], -jnp.inf), rows)[1], 0, dim) if x.size else x


@lowering("aten.linalg_matrix_exp")
def matrix_exp(x: Array) -> Array:
    return jax.scipy.linalg.expm(x) if x.size else x


def _integers(results: Forms) -> np.dtype | None:
    """Return the dtype of the result, if it is one of whole numbers: torchax computes these in floating point."""
    dtype = jax_dtype(results[0].dtype)
    return dtype if jnp.issubdtype(dtype, jnp.integer) else None


def _torchax(op: torch._ops.OpOverload, *args: object, **kwargs: object) -> Array:
    from . import from_torchax

    table = from_torchax(op)
    assert table is not None
    return table(*args, **kwargs)


def _numbers(x: Operand, dtype: np.dtype) -> Operand | Array:
    """Make a mask ones and zeros: by conversion, XLA would take a product with it for a selection, inf * 0 for 0."""
    is_mask = getattr(x, "dtype", None) == np.bool_
    return jnp.where(x, jnp.ones((), dtype), jnp.zeros((), dtype)) if is_mask else x


def _beside_number(x: ArrayLike, y: ArrayLike, results: Forms) -> tuple[ArrayLike, ArrayLike]:
    """Return both operands in float32, where a half meets a Python number: torch does not round the number to half."""
    half = results[0].dtype in (torch.float16, torch.bfloat16)
    if half and (isinstance(x, (int, float)) or isinstance(y, (int, float))):
        return jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)
    return x, y


@lowering("aten.mul.Tensor", "aten.mul.Scalar", results=True)
def mul(x: ArrayLike, y: ArrayLike, *, results: Forms) -> Array:
    dtype = jax_dtype(results[0].dtype)
    if jnp.issubdtype(dtype, jnp.inexact):
        x, y = _numbers(x, dtype), _numbers(y, dtype)
    return _torchax(aten.mul.Tensor, *_beside_number(x, y, results))


@lowering("aten.div.Tensor", "aten.div.Scalar", results=True)
def div(x: ArrayLike, y: ArrayLike, *, results: Forms) -> Array:
    """Divide, half in float32 as torch does: XLA multiplies by a reciprocal of what is broadcast, which must not round.

    The reciprocal of a number near the ends of the range is none: the number is scaled by a power of two.
    """
    dtype = jax_dtype(results[0].dtype)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return quotient(jnp.asarray(x, dtype), jnp.asarray(y, dtype))
    if not jnp.issubdtype(dtype, jnp.floating):
        return _torchax(aten.div.Tensor, x, y)
    dtype = jnp.dtype(jnp.float32) if dtype.itemsize < 4 else dtype
    x = jnp.asarray(_numbers(x, dtype), dtype)
    if isinstance(y, (int, float)):
        info = jnp.finfo(dtype)
        normal, step = float(info.tiny), 2.0 ** (info.nmant + 1)
        scale = 1 / step if 0.25 / normal < abs(y) <= info.max else step if 0 < abs(y) < normal else 1.0
        if scale != 1:
            return jax.lax.optimization_barrier(x / jnp.asarray(y * scale, dtype)) * jnp.asarray(scale, dtype)
    return x / jnp.asarray(y, dtype)


@lowering("aten._to_copy", "aten.to", "prims.convert_element_type", results=True)
def to_copy(x: Array, *_: object, results: Forms, **kwargs: object) -> Array:
    dtype = jax_dtype(results[0].dtype)
    converted = (_numbers(x, dtype) if jnp.issubdtype(dtype, jnp.inexact) else x).astype(dtype)
    rounds = jnp.issubdtype(x.dtype, jnp.floating) and jnp.issubdtype(dtype, jnp.floating)
    if rounds and jnp.finfo(dtype).nmant < jnp.finfo(x.dtype).nmant:
        # XLA would otherwise be free to take x itself for what is converted back from it.
        return jax.lax.optimization_barrier(converted)
    return converted


@lowering("aten.sign", "aten.sgn")
def sign(x: Array) -> Array:
    """Return the sign: that of NaN is zero in torch, and so is the gradient of ``abs`` there."""
    if x.dtype == np.bool_:
        return x
    return jnp.sign(x) if jnp.issubdtype(x.dtype, jnp.complexfloating) else jnp.where(x != x, 0, jnp.sign(x))


@lowering("aten.softshrink_backward")
def softshrink_backward(g: Array, x: Array, limit: float) -> Array:
    """Let the cotangent through outside of the limits; torchax gives zero at NaN."""
    return jnp.where((x >= -limit) & (x <= limit), 0, g)


@lowering("aten.pow.Tensor_Scalar", results=True)
def power_by_scalar(x: Array, exponent: Any, *, results: Forms) -> Array:
    dtype = _integers(results)
    if jnp.issubdtype(x.dtype, jnp.complexfloating) and exponent in COMPLEX_POWERS:
        return COMPLEX_POWERS[exponent](x)
    if abs(exponent) == 0.5 and x.dtype in (jnp.bfloat16, jnp.float32, jnp.float64):
        # Torch takes the root: NaN at -inf, and -inf at -0.
        return jnp.sqrt(x) if exponent > 0 else jax.lax.rsqrt(x)
    if dtype is None:
        return _torchax(aten.pow.Tensor_Scalar, x, exponent)
    if exponent < 0:
        raise ValueError("Integers to negative integer powers are not allowed.")
    return jax.lax.integer_pow(x.astype(dtype), int(exponent))


@lowering("aten.pow.Tensor_Tensor", results=True)
def power(x: Array, exponent: Array, *, results: Forms) -> Array:
    dtype = _integers(results)
    if dtype is None:
        return _torchax(aten.pow.Tensor_Tensor, x, exponent)
    return _integer_power(x.astype(dtype), exponent.astype(dtype))


def _integer_power(x: Array, exponent: Array) -> Array:
    """Raise to a power by squaring, over all bits of the exponent: jnp.power looks at six of them."""
    base, result = x, jnp.ones_like(x * exponent)
    for bit in range(jnp.iinfo(exponent.dtype).bits):
        result = jnp.where((exponent >> bit) & 1 != 0, result * base, result)
        base = base * base
    sign = jnp.where(exponent % 2 == 0, 1, -1)
    inverse = jnp.where(x == 1, 1, jnp.where(x == -1, sign, 0)).astype(x.dtype)  # one over any other rounds to zero
    return jnp.where(exponent < 0, inverse, result)


@lowering("aten.neg")
def neg(x: Array) -> Array:
    """Negate; torchax multiplies."""
    return -x


@lowering("aten.square")
def square(x: Array) -> Array:
    return x * x


@lowering("aten.fmod.Tensor", "aten.fmod.Scalar", results=True)
def fmod(x: Array, y: ArrayLike, *, results: Forms) -> Array:
    """Compute the remainder.

    torchax rounds the quotient, which leaves no digit of a large one, and gives NaN for an infinite divisor.
    """
    dtype = jax_dtype(results[0].dtype)
    x, y = jnp.broadcast_arrays(jnp.asarray(x).astype(dtype), jnp.asarray(y).astype(dtype))
    return jax.lax.rem(x, y)


@lowering("aten.div.Tensor_mode", "aten.div.Scalar_mode", results=True)
def divide(x: Array, y: ArrayLike, *, rounding_mode: str | None = None, results: Forms) -> Array:
    dtype = _integers(results)
    if dtype is None or rounding_mode != "trunc":
        return _torchax(aten.div.Tensor_mode, x, y, rounding_mode=rounding_mode)
    return jax.lax.div(*jnp.broadcast_arrays(jnp.asarray(x).astype(dtype), jnp.asarray(y).astype(dtype)))


@lowering("aten._new_zeros_with_same_feature_meta", results=True)
def new_zeros(x: Array, other: Array, *, results: Forms, self_num_batch_dims: int = 0) -> Array:
    """Return zeros: the tangent that forward mode makes for a tensor that is written to."""
    return jnp.zeros(results[0].shape, jax_dtype(results[0].dtype))


@lowering("aten.view.dtype", results=True)
def view_dtype(x: Array, _: torch.dtype, *, results: Forms) -> Array:
    """Read the same memory as another dtype: the last axis is split or joined where the sizes differ."""
    dtype = jnp.dtype(jax_dtype(results[0].dtype))
    if dtype == x.dtype:
        return x
    if jnp.iscomplexobj(x):  # as its real and imaginary parts
        x = jnp.stack([x.real, x.imag], -1).reshape(*x.shape[:-1], -1) if x.ndim else x
    if x.dtype == np.bool_:
        x = x.astype(np.uint8)
    part = jnp.finfo(dtype).dtype if jnp.issubdtype(dtype, jnp.complexfloating) else dtype
    part = jnp.dtype(np.uint8) if part == np.bool_ else part
    if part.itemsize > x.dtype.itemsize:
        x = x.reshape(*x.shape[:-1], -1, part.itemsize // x.dtype.itemsize)
    x = jax.lax.bitcast_convert_type(x, part)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        pairs = x.reshape(*results[0].shape, 2)
        return jax.lax.complex(pairs[..., 0], pairs[..., 1])
    return x.reshape(results[0].shape).astype(dtype)
