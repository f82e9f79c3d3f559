"""Losses that are rewritten above autograd, in plain torch that can be recorded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx


def _check_reduction(reduction: str) -> None:
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{reduction!r} is not a valid value for reduction")


def gaussian_nll_loss(
    input: Tensor,
    target: Tensor,
    var: Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Tensor:
    """Compute ``F.gaussian_nll_loss``; torch's own asks whether any variance is negative."""
    _check_reduction(reduction)
    if isinstance(var, float):
        var = torch.full_like(input, var)
    if var.dim() == input.dim() - 1:
        var = var.unsqueeze(-1)
    torch._assert_async((var >= 0).all(), "var has negative entry/entries")
    var = var + (var.clamp(min=eps) - var).detach()  # clamped in value, not in gradient
    loss = 0.5 * (torch.log(var) + (input - target) ** 2 / var)
    if full:
        loss = loss + 0.5 * math.log(2 * math.pi)
    return loss.mean() if reduction == "mean" else loss.sum() if reduction == "sum" else loss


@torch.library.custom_op("microtome::ctc_loss", mutates_args=())
def _ctc(
    log_probs: Tensor, targets: Tensor, steps: Tensor, labels: Tensor, blank: int, zero_infinity: bool
) -> tuple[Tensor, Tensor]:
    """Compute the loss of each row, and torch's gradient of that loss."""
    given = (log_probs, targets, steps, labels)
    loss, alpha = torch.ops.aten._ctc_loss.Tensor(*given, blank, zero_infinity)
    one = torch.ones_like(loss)
    gradient = torch.ops.aten._ctc_loss_backward.Tensor(one, *given, loss, alpha, blank, zero_infinity)
    return torch.where(loss == math.inf, 0, loss) if zero_infinity else loss, gradient


@_ctc.register_fake
def _(log_probs: Tensor, *args: object) -> tuple[Tensor, Tensor]:
    return log_probs.new_empty(log_probs.shape[1]), torch.empty_like(log_probs)


class _Ctc(torch.autograd.Function):
    @staticmethod
    def forward(log_probs: Tensor, *args: object) -> tuple[Tensor, Tensor]:
        return torch.ops.microtome.ctc_loss(log_probs, *args)

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(inputs[0], output[1])

    @staticmethod
    def backward(ctx: Any, g: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        log_probs, gradient = ctx.saved_tensors
        return g[:, None] * _Final.apply(gradient, log_probs), None, None, None, None, None


class _Final(torch.autograd.Function):
    """A gradient that torch cannot differentiate once more."""

    @staticmethod
    def forward(gradient: Tensor, log_probs: Tensor) -> Tensor:
        return gradient.clone()

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        pass

    @staticmethod
    def backward(ctx: FunctionCtx, g: Tensor) -> NoReturn:
        raise TypeError("the gradient of ctc_loss cannot be differentiated, in torch as here")


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor | Sequence[int],
    target_lengths: Tensor | Sequence[int],
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """Compute ``F.ctc_loss``; the shapes of torch's fused op depend on the lengths."""
    _check_reduction(reduction)
    batched = log_probs.dim() == 3
    if not batched:
        log_probs = log_probs.unsqueeze(1)
    steps = torch.as_tensor(input_lengths).reshape(-1)
    labels = torch.as_tensor(target_lengths).reshape(-1)
    if targets.dim() == 1:  # the labels of all rows, one after another
        targets = torch.nn.utils.rnn.pad_sequence(targets.split(labels.tolist()), batch_first=True)
    for name, lengths, most in (("input", steps, log_probs.shape[0]), ("target", labels, targets.shape[1])):
        fits = (lengths >= 0) & (lengths <= most)
        torch._assert_async(fits.all(), f"ctc_loss: Expected {name}_lengths to have values from 0 to {most}")
    loss, _ = _Ctc.apply(log_probs, targets, steps, labels, blank, zero_infinity)
    if reduction == "mean":
        return (loss / labels.clamp(min=1)).mean()
    return loss.sum() if reduction == "sum" else loss if batched else loss[0]


def linear_cross_entropy(*args: Any, options: object = None, **kwargs: Any) -> Tensor:
    """Compute ``F.linear_cross_entropy``; how it is cut into chunks is left to XLA."""
    return F.linear_cross_entropy(*args, **kwargs)
