"""Complex numbers, and the views between complex and real tensors."""

from __future__ import annotations

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
