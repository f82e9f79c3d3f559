"""Torch functions that are rewritten above autograd, in plain torch that can be recorded."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor


def embedding_bag(
    input: Tensor,  # noqa: A002
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """As ``F.embedding_bag``: the fused op keeps offsets that its backward reads as values."""
    if max_norm is not None or mode == "max" or scale_grad_by_freq:
        raise TypeError('EmbeddingBag with max_norm, scale_grad_by_freq or mode="max" cannot be traced')
    if input.dim() == 2:
        offsets = torch.arange(0, input.numel(), input.shape[1], device=input.device)
        input = input.reshape(-1)  # noqa: A001
    elif include_last_offset and offsets is not None:
        offsets = offsets[:-1]
    assert offsets is not None
    position = torch.arange(input.numel(), device=input.device)
    bag = torch.searchsorted(offsets, position, right=True) - 1
    rows = F.embedding(input, weight)
    counted = torch.ones(input.numel(), dtype=rows.dtype, device=rows.device)
    if padding_idx is not None:
        counted = counted * (input != padding_idx)
    rows = rows * counted[:, None]
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.reshape(-1)[:, None]
    bags = offsets.numel()
    total = torch.zeros(bags, weight.shape[1], dtype=rows.dtype, device=rows.device).index_add(0, bag, rows)
    if mode == "mean":
        number = torch.zeros(bags, dtype=rows.dtype, device=rows.device).index_add(0, bag, counted)
        total = total / number.clamp(min=1)[:, None]
    return total


def gaussian_nll_loss(
    input: Tensor,  # noqa: A002
    target: Tensor,
    var: Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Tensor:
    """As ``F.gaussian_nll_loss``, which asks whether any variance is negative."""
    if isinstance(var, float):
        var = torch.full_like(input, var)
    if var.dim() == input.dim() - 1:
        var = var.unsqueeze(-1)
    var = var + (var.clamp(min=eps) - var).detach()  # clamped in value, not in gradient
    loss = 0.5 * (torch.log(var) + (input - target) ** 2 / var)
    if full:
        loss = loss + 0.5 * math.log(2 * math.pi)
    return loss.mean() if reduction == "mean" else loss.sum() if reduction == "sum" else loss


REPLACEMENTS: dict[Any, Any] = {F.embedding_bag: embedding_bag, F.gaussian_nll_loss: gaussian_nll_loss}
