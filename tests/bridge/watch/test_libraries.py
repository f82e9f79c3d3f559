"""What code names of a library's modules, classes and objects is never stale, nor lost where it writes there."""

from __future__ import annotations

import decimal
import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from microtome.bridge import as_jax, as_torch

ONE = torch.ones(())
LOG = logging.getLogger("microtome-test")
HANDLER = logging.StreamHandler()
THREAD: Any = threading.Thread(target=print, name="2")
CONTEXT = decimal.Context(prec=2)


class _Scaled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.marked


# Per name: the owner and the field, what to make of a number, and the function that reads it.
_FIELDS: dict[str, tuple[Any, str, Callable[[int], Any], Callable[[torch.Tensor], torch.Tensor]]] = {
    "level": (LOG, "level", int, lambda x: x * LOG.level),
    "propagate": (LOG, "propagate", int, lambda x: x * LOG.propagate),
    "handler": (HANDLER, "level", int, lambda x: x * HANDLER.level),
    "thread's name": (THREAD, "name", str, lambda x: x * float(THREAD.name)),
    "thread's field": (THREAD, "marked", int, lambda x: x * THREAD.marked),
    "precision": (CONTEXT, "prec", int, lambda x: x * CONTEXT.prec),
    "module": (torch, "marked", int, lambda x: x * torch.marked),
    "module within": (nn.init, "marked", float, lambda x: x * torch.nn.init.marked),
    "numpy": (np, "marked", int, lambda x: x * np.marked),
    "class": (nn.Linear, "marked", int, lambda x: x * nn.Linear.marked),
    "tensor": (nn.Linear, "marked", lambda n: torch.tensor(float(n)), lambda x: x * nn.Linear.marked),
    "class above": (nn.Module, "marked", int, _Scaled()),
}


@pytest.mark.parametrize("name", _FIELDS)
def test_a_named_field_is_read_at_each_call(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, field, make, fun = _FIELDS[name]
    monkeypatch.setattr(owner, field, make(2), raising=False)
    call = as_torch(as_jax(fun))
    for number in (2, 3, 5, 2):
        setattr(owner, field, make(number))
        assert call(ONE) == fun(ONE) == number


def test_a_counter_on_a_librarys_class_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Linear, "marked", 0, raising=False)

    def count(x: torch.Tensor) -> torch.Tensor:
        nn.Linear.marked += 1
        return x * nn.Linear.marked

    call = as_torch(as_jax(count))
    assert [call(ONE).item() for _ in range(3)] == [1, 2, 3]
    assert nn.Linear.marked == 3


@pytest.mark.parametrize("owner", [LOG, HANDLER, THREAD, torch, nn.Linear], ids=lambda owner: type(owner).__name__)
def test_a_field_may_be_a_weak_proxy_of_what_is_gone(owner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, "other", weakref.proxy(nn.Identity()), raising=False)
    monkeypatch.setattr(owner, "marked", 2, raising=False)
    call = as_torch(as_jax(lambda x: x * owner.marked if owner.marked < 9 else owner.other.scale))
    for number in (2, 3):
        owner.marked = number
        assert call(ONE) == number
