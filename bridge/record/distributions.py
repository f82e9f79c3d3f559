"""The checks of ``torch.distributions``: a program makes them in each call.

torch asks for the truth of whether all parameters satisfy their constraints and all values lie in the support, and
raises where they do not. In a recording the answer is yes, and the question becomes a check of the program. (One other
question of torch's has an answer too: whether the mask of an encoder is the causal one.)
"""

from __future__ import annotations

import sys
import types

import torch
from torch import Tensor
from torch.distributions import constraints, continuous_bernoulli, geometric
from torch.nn.modules.transformer import _detect_is_causal_mask
from torch.types import Number

from ..base.torch_internals import FunctionalTensor
from ..base.user_code import OWN
from ..lowerings.conditions import OUTSIDE_OF_SUPPORT

_ASKING = tuple(module.__file__ for module in (constraints, continuous_bernoulli, geometric))
_FUNCTIONAL = sys.modules[FunctionalTensor.__module__].__file__ or ""


def is_all_true(flags: Tensor) -> bool:
    """Answer ``torch._is_all_true``, by which ``Distribution`` checks parameters and values."""
    asked = _asking()
    message = OUTSIDE_OF_SUPPORT
    if asked is not None and isinstance(asked.f_locals.get("self"), torch.distributions.Distribution):
        what = asked.f_locals.get("param", "the value")
        message = f"{OUTSIDE_OF_SUPPORT}: {what} of {type(asked.f_locals['self']).__name__}"
    try:
        torch._assert_async(flags.all(), message)
    except RuntimeError as error:  # of constants, which are checked at once
        raise ValueError(message) from error
    return True


def _asking() -> types.FrameType | None:
    """Return the frame of torch's that asks."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((*OWN, _FUNCTIONAL)):
        frame = frame.f_back
    return frame


def item(tensor: Tensor) -> Number:
    """Answer ``tensor.item()``, by which ``bool`` asks a tensor of a recording, where the answer is known."""
    frame = _asking()
    code = frame.f_code if frame is not None else None
    if code is _detect_is_causal_mask.__code__:
        return False  # the mask is used as it is
    return is_all_true(tensor) if code is not None and code.co_filename in _ASKING else tensor.item()
