"""What a running bridge call tells the traced torch functions inside it.

``as_torch`` compiles a JAX function; the torch functions that it calls, however deep, find here the tracers of the
tensors that they capture, the key of the call's random draws, and where to leave the new values of buffers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Hashable, Iterator
from typing import Any

import torch
from jax.extend.core import get_opaque_trace_state

from .side_effects import Effect


@dataclasses.dataclass
class Call:
    """One trace of a compiled call."""

    tensors: dict[int, Any]  # id of a captured tensor -> its tracer
    key: Any
    device: torch.device
    grad: bool  # whether torch records for autograd in the function
    state: Any = None  # the trace in which buffers may be written
    missing: list[torch.Tensor] = dataclasses.field(default_factory=list)
    mutations: list[tuple[torch.Tensor, Any]] = dataclasses.field(default_factory=list)
    effects: list[Effect] = dataclasses.field(default_factory=list)
    numbers: dict[Hashable, int] = dataclasses.field(default_factory=dict)
    draws: bool = False
    shape: Any = None  # the structure of the results
    moving: list[bool] = dataclasses.field(default_factory=list)  # which outputs depend on a needed input

    def enter_body(self) -> None:
        """Mark the current trace as the one that runs the function once, from start to end."""
        self.state = get_opaque_trace_state()
        self.mutations = []

    def in_body(self) -> bool:
        """Whether no transform (vmap, scan, grad of the user's) stands between the call and the current trace."""
        return self.state is not None and self.state == get_opaque_trace_state()

    def number(self, function: Hashable) -> int:
        """Functions of one call draw from different keys; the same function draws the same at the same row."""
        return self.numbers.setdefault(function, len(self.numbers))


class _Stack(threading.local):
    calls: list[Call]

    def __init__(self) -> None:
        self.calls = []


_STACK = _Stack()


def current_call() -> Call | None:
    """The innermost call that is being traced in this thread."""
    return _STACK.calls[-1] if _STACK.calls else None


@contextlib.contextmanager
def running(call: Call) -> Iterator[Call]:
    """Make a call the current one."""
    _STACK.calls.append(call)
    try:
        yield call
    finally:
        _STACK.calls.pop()
