"""Elementwise ops where torchax's table gives other numbers than torch, or none."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ._registry import lowering


@lowering("aten.digamma")
def digamma(x: Array) -> Array:
    """torchax rounds to float32."""
    return jax.scipy.special.digamma(x)


@lowering("aten.lgamma")
def lgamma(x: Array) -> Array:
    """torchax rounds to float32."""
    return jax.scipy.special.gammaln(x)


@lowering("aten.polygamma")
def polygamma(n: int, x: Array) -> Array:
    """Below zero by reflection: XLA's zeta function leaves out terms there."""
    if n == 0:
        return jax.scipy.special.digamma(x)
    size = math.factorial(n) if n < 171 else math.inf

    def above(x: Array) -> Array:
        return (1 if n % 2 else -1) * size * jax.scipy.special.zeta(n + 1.0, x)

    pole = (x <= 0) & (x == jnp.floor(x))
    reflected = (-1) ** n * above(1 - x) - jnp.pi * _cotangent_derivative(n, x)
    return jnp.where(pole, jnp.inf if n % 2 else -jnp.inf, jnp.where(x < 0, reflected, above(x)))


def _cotangent_derivative(n: int, x: Array) -> Array:
    """The n-th derivative of cot(πx): a polynomial in c = cot(πx), as c' = -π(1 + c²)."""
    polynomial = np.polynomial.Polynomial([0.0, 1.0])
    for _ in range(n):
        polynomial = polynomial.deriv() * np.polynomial.Polynomial([-np.pi, 0.0, -np.pi])
    angle = jnp.pi * (x - jnp.round(x))
    return jnp.polyval(jnp.asarray(polynomial.coef[::-1], x.dtype), jnp.cos(angle) / jnp.sin(angle))


@lowering("aten.logcumsumexp")
def logcumsumexp(x: Array, dim: int) -> Array:
    """A running maximum keeps every exponent at or below zero; torchax sums the exponentials as they are."""
    return x if x.ndim == 0 else jax.lax.cumlogsumexp(x, axis=dim % x.ndim)


@lowering("aten.linalg_matrix_exp")
def matrix_exp(x: Array) -> Array:
    return jax.scipy.linalg.expm(x) if x.size else x
