"""Bags of embeddings, in plain torch that can be recorded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..base.errors import TraceError, user_line


def embedding_bag(
    input: Tensor,
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
    """Compute ``F.embedding_bag``; torch's fused op keeps offsets that its backward reads as values."""
    _check(
        (input, weight, offsets, per_sample_weights),
        scale_grad_by_freq=scale_grad_by_freq,
        mode=mode,
        sparse=sparse,
        include_last_offset=include_last_offset,
    )
    if scale_grad_by_freq:
        raise TraceError(
            f"{user_line()}: embedding_bag(scale_grad_by_freq=True) divides by the counts of other rows in torch's own "
            "kernel. F.embedding(..., scale_grad_by_freq=True) and a sum over the bag count each row's own."
        )
    if max_norm is not None:
        with torch.no_grad():
            torch.embedding_renorm_(weight.detach(), input, max_norm, norm_type)
    position = torch.arange(input.numel(), device=input.device)
    counted = torch.ones_like(position, dtype=torch.bool)
    if input.dim() == 2:
        offsets = torch.arange(0, input.numel(), max(input.shape[1], 1), device=input.device)
        input = input.reshape(-1)
    elif include_last_offset and offsets is not None:
        if padding_idx is None:  # else torch counts what lies behind the last offset to the last bag
            counted = position < offsets[-1]
        offsets = offsets[:-1]
    assert offsets is not None
    bag = torch.searchsorted(offsets, position, right=True) - 1
    rows = F.embedding(input, weight)
    if padding_idx is not None:
        counted = counted & (input != padding_idx % weight.shape[0])
    bags = offsets.numel()
    if mode == "max":
        return _largest(rows, counted, bag, bags)
    # As torch's kernel, which adds up in float32.
    dtype = torch.promote_types(rows.dtype, torch.float32)
    rows = torch.where(counted[:, None], rows.to(dtype), 0)
    if per_sample_weights is not None:
        rows = rows * torch.where(counted, per_sample_weights.reshape(-1).to(dtype), 0)[:, None]
    total = torch.zeros(bags, weight.shape[1], dtype=dtype, device=rows.device).index_add(0, bag, rows)
    if mode == "mean":
        number = torch.zeros(bags, dtype=dtype, device=rows.device).index_add(0, bag, counted.to(dtype))
        total = total / number.clamp(min=1)[:, None]
    return total.to(weight.dtype)


def _check(tensors: Sequence[Tensor | None], **options: Any) -> None:
    """Raise what torch raises for these options, by its own function on tensors without memory."""
    without = [None if t is None else torch.empty(t.shape, dtype=t.dtype, device="meta") for t in tensors]
    input, weight, offsets, weights = without
    F.embedding_bag(input, weight, offsets, per_sample_weights=weights, **options)  # type: ignore[arg-type]


def _largest(rows: Tensor, counted: Tensor, bag: Tensor, bags: int) -> Tensor:
    """Return the largest element of each bag in each column, the first of equal ones; zeros for an empty bag.

    As torch's kernel compares: NaN counts where it comes first, and is passed over behind others.
    """
    position = torch.arange(len(rows), device=rows.device)
    last = torch.full((bags,), len(rows), device=rows.device)
    first = last.scatter_reduce(0, bag, torch.where(counted, position, len(rows)), "amin")
    rank = torch.where(rows.isnan(), -torch.inf, rows.detach())
    leads = (position == first[bag])[:, None]
    rank = torch.where(rows.isnan() & leads, torch.inf, rank)
    least = torch.full((bags, rows.shape[1]), -torch.inf, dtype=rank.dtype, device=rows.device)
    columns = bag[:, None].expand_as(rank)
    most = least.scatter_reduce(0, columns, torch.where(counted[:, None], rank, -torch.inf), "amax")
    takes_part = counted[:, None] & (rank == most[bag])
    places = torch.where(takes_part, position[:, None], len(rows))
    winner = last[:, None].expand_as(most).scatter_reduce(0, columns, places, "amin")
    found = rows.gather(0, winner.clamp(max=max(len(rows) - 1, 0))) if len(rows) else torch.zeros_like(most)
    return torch.where(winner < len(rows), found, 0)
