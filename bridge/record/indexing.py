"""Entries at whole numbers that are known only when the program runs: copies, where torch gives views."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch

from ..base.errors import TraceError, user_line

Index = tuple[Any, ...]  # by axis: numbers, slices, tensors, None or an ellipsis

_MASKS = (torch.bool, torch.uint8)


@dataclasses.dataclass(frozen=True, eq=False)
class CopiedView:
    """What ``tensor[index]`` gave for an index that depends on the arguments: a copy, where torch gives a view."""

    copy: torch.Tensor
    tensor: torch.Tensor
    index: Index
    line: str
    version: int  # of the tensor, when it was read

    def is_put_back(self, tensor: torch.Tensor, index: Index, value: object) -> bool:
        """Tell whether this is the last step of ``tensor[index] += 1``."""
        same = len(index) == len(self.index) and all(a is b for a, b in zip(index, self.index, strict=True))
        return same and tensor is self.tensor and getattr(value, "_base", None) is self.copy

    def check_use(self, tensors: Iterable[torch.Tensor]) -> None:
        """Raise if the copy is used after the tensor was written to: a view would show what was written."""
        if self.tensor._version != self.version and any(t is self.copy or t._base is self.copy for t in tensors):
            raise self._error()

    def check_writes(self) -> None:
        """Raise if the copy was written to: torch would write to the tensor."""
        if self.copy._version:
            raise self._error()

    def _error(self) -> TraceError:
        return TraceError(
            f"{self.line}: the function reads tensor[index], where the index is a tensor that depends on the "
            "arguments. In torch that is a view: it writes to it, or uses it after writing to the tensor. Assign to "
            "the row (tensor[index] = value), or read it with torch.index_select, which gives a copy."
        )


def read_index(tensor: torch.Tensor, index: Index, places: list[int]) -> tuple[CopiedView, torch.Tensor]:
    """Read ``tensor[index]``, whose entries at the places are whole numbers that are known only when it runs."""
    width = lambda i: 0 if i is None or isinstance(i, bool) else i.dim() if getattr(i, "dtype", None) in _MASKS else 1
    used = sum(width(i) for i in index if i is not Ellipsis)
    items, axis, chosen = list(index), 0, tensor
    for k, i in enumerate(index):
        if k in places:
            if axis >= tensor.dim():
                raise IndexError(f"too many indices for tensor of dimension {tensor.dim()}")
            size = tensor.shape[axis]
            chosen = chosen.index_select(axis, torch.where(i < 0, i + size, i).reshape(1))
            items[k] = 0
        axis += tensor.dim() - used if i is Ellipsis else width(i)
    return CopiedView(chosen, tensor, index, user_line(), tensor._version), chosen[tuple(items)]


def write_index(tensor: torch.Tensor, index: Index, value: object) -> None:
    """Write ``tensor[index] = value`` for an index of whole numbers."""
    at = [i.reshape(1) if isinstance(i, torch.Tensor) else torch.tensor([i], device=tensor.device) for i in index]
    tensor.index_put_(tuple(at), torch.as_tensor(value, device=tensor.device).to(tensor.dtype))
