"""Losses whose backward op is not that of the forward op with one more argument in front."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from ._registry import lowering


@lowering("aten.multilabel_margin_loss_backward")
def multilabel_margin_loss_backward(g: Array, x: Array, target: Array, reduction: int, is_target: Array) -> Array:
    """The labels of a row end at the first negative number; each is compared with all classes that are no label."""
    rows, labels = jnp.atleast_2d(x), jnp.atleast_2d(target)
    valid = jnp.cumprod(labels >= 0, -1)[:, :, None] * (1 - is_target.reshape(rows.shape))[:, None, :]

    def loss(rows: Array) -> Array:
        chosen = jnp.take_along_axis(rows, jnp.maximum(labels, 0), -1)
        margin = 1 - chosen[:, :, None] + rows[:, None, :]
        each = jnp.where(margin > 0, margin * valid, 0).sum((1, 2)) / rows.shape[-1]
        return (each.mean() if reduction == 1 else each.sum()) if reduction else each

    return jax.vjp(loss, rows)[1](g.reshape(loss(rows).shape))[0].reshape(x.shape)
