"""Losses: the connectionist temporal classification, and backward ops that pull back through no forward op as it is."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from ._registry import lowering


def _multilabel_margin(rows: Array, labels: Array, reduction: int) -> tuple[Array, Array]:
    """Compare each label with all classes that are no label; the labels of a row end at the first negative number."""
    valid = jnp.cumprod(labels >= 0, -1)
    row = jnp.arange(rows.shape[0])[:, None]
    is_target = jnp.zeros_like(rows).at[row, jnp.where(valid, labels, rows.shape[1])].set(1, mode="drop")
    margin = 1 - jnp.take_along_axis(rows, jnp.maximum(labels, 0), 1)[:, :, None] + rows[:, None, :]
    counted = valid[:, :, None] * (1 - is_target)[:, None, :]
    each = jnp.where(margin > 0, margin * counted, 0).sum((1, 2)) / rows.shape[1]
    return (each if reduction == 0 else each.mean() if reduction == 1 else each.sum()), is_target


@lowering("aten.multilabel_margin_loss_forward")
def multilabel_margin_loss_forward(x: Array, target: Array, reduction: int) -> tuple[Array, Array]:
    """Compute the loss; torch's decomposition goes on counting labels behind the first negative number."""
    return _multilabel_margin(jnp.atleast_2d(x), jnp.atleast_2d(target), reduction)


@lowering("aten.multilabel_margin_loss_backward")
def multilabel_margin_loss_backward(g: Array, x: Array, target: Array, reduction: int, is_target: Array) -> Array:
    rows, labels = jnp.atleast_2d(x), jnp.atleast_2d(target)
    loss, pull = jax.vjp(lambda rows: _multilabel_margin(rows, labels, reduction)[0], rows)
    return pull(g.reshape(loss.shape))[0].reshape(x.shape)


@lowering("aten.smooth_l1_loss_backward")
def smooth_l1_loss_backward(g: Array, x: Array, target: Array, reduction: int, beta: float) -> Array:
    """Compute the input's cotangent; torch's decomposition gives zero at NaN."""
    d = x - target
    slope = jnp.where(d <= -beta, -1, jnp.where(d >= beta, 1, d / beta))
    return g * slope / d.size if reduction == 1 else g * slope


@lowering("microtome.ctc_loss")
def ctc_loss(
    log_probs: Array, targets: Array, steps: Array, labels: Array, blank: int, zero_infinity: bool
) -> tuple[Array, Array]:
    """Compute the loss by the recursion of Graves et al. (2006).

    torch's gradient takes exp(log_probs) to sum to one.
    """
    loss, pull = jax.vjp(lambda given: _ctc(given, targets, steps, labels, blank), log_probs)
    (gradient,) = pull(jnp.ones_like(loss))
    inside = (jnp.arange(log_probs.shape[0])[:, None] < steps)[..., None]
    gradient = jnp.where(inside, jnp.exp(log_probs) + gradient, 0)
    otherwise = 0 if zero_infinity else jnp.nan
    gradient = jnp.where(jnp.isfinite(loss)[:, None], gradient, jnp.where(inside, otherwise, 0))
    return jnp.where(jnp.isinf(loss), 0, loss) if zero_infinity else loss, gradient


def _ctc(log_probs: Array, targets: Array, steps: Array, labels: Array, blank: int) -> Array:
    # A path visits blank, label, blank, label, ..., blank; a label may follow another label that differs from it.
    length, rows, _ = log_probs.shape
    path = jnp.full((rows, 2 * targets.shape[1] + 1), blank, jnp.int64).at[:, 1::2].set(targets)
    differs = jnp.pad((path[:, 2:] != blank) & (path[:, 2:] != path[:, :-2]), ((0, 0), (2, 0)))[:, : path.shape[1]]
    impossible = jnp.finfo(log_probs.dtype).min / 4  # finite: the gradient of logsumexp over -inf alone is NaN
    emitted = jnp.take_along_axis(log_probs, jnp.broadcast_to(path, (length, *path.shape)), 2)

    def behind(alpha: Array, k: int) -> Array:
        return jnp.pad(alpha, ((0, 0), (k, 0)), constant_values=impossible)[:, : path.shape[1]]

    def move(alpha: Array, now: tuple[Array, Array]) -> tuple[Array, None]:
        t, emitted = now
        ways = jnp.stack([alpha, behind(alpha, 1), jnp.where(differs, behind(alpha, 2), impossible)])
        moved = jnp.maximum(jax.nn.logsumexp(ways, 0) + emitted, impossible)
        return jnp.where((t < steps)[:, None], moved, alpha), None

    start = jnp.where(jnp.arange(path.shape[1]) < 2, emitted[0], impossible)
    alpha, _ = jax.lax.scan(move, start, (jnp.arange(1, length), emitted[1:]))
    last = jnp.take_along_axis(alpha, 2 * labels[:, None], 1)
    before = jnp.take_along_axis(alpha, jnp.maximum(2 * labels[:, None] - 1, 0), 1)
    ends = jnp.concatenate([last, jnp.where(labels[:, None] > 0, before, impossible)], 1)
    loss = -jax.nn.logsumexp(ends, 1)
    loss = jnp.where(loss < -impossible / 2, loss, jnp.inf)
    return jnp.where(steps > 0, loss, jnp.where(labels == 0, 0.0, jnp.inf)).astype(log_probs.dtype)
