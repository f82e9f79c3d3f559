"""Backward ops of torch's autograd, as torch's hand-written kernels compute them.

Those without a lowering pull their cotangent back through the forward op (``record/run.py``). Where JAX's choice of
subgradient differs (ties, zeros), the op has its own lowering, here or beside its forward op.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array

from ._registry import lowering


@lowering("aten._weight_norm_interface_backward")
def weight_norm_backward(g: Array, v: Array, magnitude: Array, norm: Array, dim: int) -> tuple[Array, Array]:
    """Pull back through w = magnitude · v / ‖v‖, the norm over every axis but ``dim``."""
    axes = tuple(i for i in range(v.ndim) if i != dim % v.ndim)
    norm = norm.reshape([-1 if i == dim % v.ndim else 1 for i in range(v.ndim)])
    along = (g * v).sum(axes, keepdims=True)
    return magnitude / norm * (g - v * along / norm**2), (along / norm).reshape(magnitude.shape)


@lowering("aten._cdist_backward")
def cdist_backward(g: Array, x1: Array, x2: Array, p: float, distance: Array) -> Array:
    if p == 0:
        return jnp.zeros_like(x1)
    difference = x1[..., :, None, :] - x2[..., None, :, :]
    return _pulled_difference(g[..., None], difference, p, distance[..., None]).sum(-2)


@lowering("aten._pdist_backward")
def pdist_backward(g: Array, x: Array, p: float, distance: Array) -> Array:
    one, two = np.triu_indices(x.shape[0], 1)
    if p == 0 or not one.size:
        return jnp.zeros_like(x)
    pulled = _pulled_difference(g[:, None], x[one] - x[two], p, distance[:, None])
    return jnp.zeros_like(x).at[one].add(pulled).at[two].add(-pulled)


def _pulled_difference(g: Array, difference: Array, p: float, total: Array) -> Array:
    """Return the cotangent of a difference from that of its p-norm ``total``."""
    size, nonzero = jnp.abs(difference), jnp.where(total == 0, 1, total)
    if p == 1:
        return g * jnp.sign(difference)
    if p == float("inf"):
        weight = jnp.sign(difference) * (size == total)
    else:
        weight = difference * jnp.where(size == 0, 1, size) ** (p - 2) / nonzero ** (p - 1)
    return jnp.where(total == 0, 0, g * weight)
