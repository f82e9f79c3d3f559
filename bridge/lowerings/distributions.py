"""The checks of ``torch.distributions``: a program makes them in each call.

torch asks for the truth of whether all parameters satisfy their constraints and all values lie in the support, and
raises where they do not. In a recording the answer is yes, and the question becomes a check of the program.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import torch
from torch import Tensor
from torch.distributions import constraints, continuous_bernoulli, geometric

from ..conditions import OUTSIDE_OF_SUPPORT
from ..torch_internals import FunctionalTensor
from ..user_code import OWN

_ASKING = tuple(module.__file__ for module in (constraints, continuous_bernoulli, geometric))
_FUNCTIONAL = sys.modules[FunctionalTensor.__module__].__file__ or ""


def is_all_true(flags: Tensor) -> bool:
    """As ``torch._is_all_true``, by which ``Distribution`` checks parameters and values."""
    try:
        torch._assert_async(flags.all(), OUTSIDE_OF_SUPPORT)
    except RuntimeError as error:  # of constants, which are checked at once
        raise ValueError(OUTSIDE_OF_SUPPORT) from error
    return True


def item(tensor: Tensor) -> Any:
    """As ``tensor.item()``, by which ``bool`` asks a tensor of a recording: it has a value in these checks alone."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((*OWN, _FUNCTIONAL)):
        frame = frame.f_back
    is_check = frame is not None and frame.f_code.co_filename in _ASKING
    return is_all_true(tensor) if is_check else tensor.item()
