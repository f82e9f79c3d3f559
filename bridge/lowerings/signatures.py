"""What ops and their lowerings take and return, as types."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

Number = int | float | complex
Arguments = Sequence[Any]  # of an op: arrays or tensors, numbers, flags, lists of these
Keywords = dict[str, Any]  # the same by name


class Form(Protocol):
    """What is known of a result: dtype and shape that eager torch gives it."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


Forms = Sequence[Form]
