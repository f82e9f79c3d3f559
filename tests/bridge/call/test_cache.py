"""What the bridge keeps between calls, and what it says of it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from microtome.bridge import as_jax, as_torch
from microtome.bridge.call import cache


@pytest.fixture
def programs() -> Iterator[None]:
    """Start with empty caches, and bring back the other tests' programs afterwards."""
    caches: list[Any] = [cache.PROGRAMS, cache.OUTLINES, cache.DEPENDENT, cache.STATIC_FLOATS]
    before = [dict(kept) for kept in caches]
    for kept in caches:
        kept.clear()
    yield
    for kept, others in zip(caches, before, strict=True):
        kept.clear()
        kept.update(others)


def _product(x: torch.Tensor, n: int = 1) -> torch.Tensor:
    return (x * n).sin()


def _lines() -> list[str]:
    """What is held, without the file in front and the number of what is captured at the end."""
    where = f"{__file__}:{inspect.getsourcelines(_product)[1]}: "
    held = [line.rpartition(", captured values ") for line in cache.held()]
    assert all(line.startswith(where) for line, _, _ in held)
    return [line.removeprefix(where) for line, _, _ in held]


@pytest.mark.usefixtures("programs")
def test_what_is_held_tells_why_a_call_compiled_again() -> None:
    call: Any = as_torch(as_jax(_product))
    call(torch.ones(2))
    call(torch.ones(2))
    assert _lines() == ["the call of float32[2]"]
    call(torch.ones(3))
    call(torch.ones(2, dtype=torch.float64))
    assert _lines()[1:] == ["the call of float32[3]", "the call of float64[2]"]
    call(torch.ones(2, requires_grad=True))
    assert _lines()[3:] == ["the call of float32[2], with gradients by input 0"]
    call(torch.ones(2), 2)
    assert _lines()[4:] == ["the call of float32[2], static 2"]
    call(torch.ones(3, 2).t())
    assert _lines()[5:] == ["the call of float32[2, 3] with strides (1, 2)"]


@pytest.mark.usefixtures("programs")
def test_another_captured_value_has_another_number() -> None:
    scale = [2.0]
    call: Any = as_torch(as_jax(lambda x: x * scale[0]))
    call(torch.ones(2))
    scale[0] = 3.0
    call(torch.ones(2))
    one, two = cache.held()
    assert one != two
    assert one.rpartition(" ")[0] == two.rpartition(" ")[0]


@pytest.mark.usefixtures("programs")
def test_derivatives_of_a_call_are_named() -> None:
    call: Any = as_torch(as_jax(_product))
    torch.func.jvp(call, (torch.ones(2),), (torch.ones(2),))
    assert "the Jacobian-vector product of float32[2], float32[2]" in _lines()
    torch.func.grad(lambda x: call(x).sum())(torch.ones(2))
    assert any(line.startswith("the vector-Jacobian product of float32[2], float32[2]") for line in _lines())


@pytest.mark.usefixtures("programs")
def test_what_was_not_used_for_longest_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "SIZE", 2)
    call: Any = as_torch(as_jax(_product))
    for n in (2, 3, 2, 4):
        call(torch.ones(n))
    assert _lines() == ["the call of float32[2]", "the call of float32[4]"]
