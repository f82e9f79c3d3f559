"""Elementwise ops where torchax's table gives other numbers than torch, or none."""

from __future__ import annotations

import jax
from jax import Array

from ._registry import lowering


@lowering("aten.polygamma")
def polygamma(n: int, x: Array) -> Array:
    return jax.scipy.special.digamma(x) if n == 0 else jax.scipy.special.polygamma(n, x)


@lowering("aten.logcumsumexp")
def logcumsumexp(x: Array, dim: int) -> Array:
    """A running maximum keeps every exponent at or below zero; torchax sums the exponentials as they are."""
    return x if x.ndim == 0 else jax.lax.cumlogsumexp(x, axis=dim % x.ndim)


@lowering("aten.linalg_matrix_exp")
def matrix_exp(x: Array) -> Array:
    return jax.scipy.linalg.expm(x) if x.size else x
