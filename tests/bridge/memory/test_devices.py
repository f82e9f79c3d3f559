"""How torch and JAX share the memory of a GPU. What JAX is started with can be seen without one."""

from __future__ import annotations

import os
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
import pytest
import torch

from microtome import bridge
from microtome.bridge import as_torch, share_gpu_memory
from microtome.bridge.memory import devices

PREALLOCATE, FRACTION = "XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_CLIENT_MEM_FRACTION"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str | None, str | None]]]:
    """What JAX is started with, on a machine whose torch sees a card and where JAX has not started."""
    found: list[tuple[str | None, str | None]] = []
    real = jax.devices

    def note(*args: Any) -> Any:
        found.append((os.environ.get(PREALLOCATE), os.environ.get(FRACTION)))
        return real(*args)

    for name in devices._SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(jax, "devices", note)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(devices, "backends_are_initialized", lambda: bool(found))
    devices.start_jax.cache_clear()
    yield found
    assert not any(name in os.environ for name in devices._SETTINGS)
    devices.start_jax.cache_clear()


FIRST_CALLS: dict[str, Callable[[], Any]] = {
    "as_torch": lambda: as_torch(jax.numpy.sin)(torch.ones(2)),
    "as_jax": lambda: as_torch(bridge.as_jax(torch.sin))(torch.ones(2)),
    "to_jax": lambda: bridge.to_jax(torch.ones(2)),
    "share_gpu_memory": share_gpu_memory,
}


@pytest.mark.parametrize("call", FIRST_CALLS)
def test_the_first_call_starts_jax_without_its_reserve(call: str, started: Any) -> None:
    FIRST_CALLS[call]()
    FIRST_CALLS[call]()
    assert started == [("false", None)]


@pytest.mark.parametrize("name", devices._SETTINGS)
def test_what_the_user_has_set_stands(name: str, started: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setenv(name, "0.5")
        devices.start_jax()
    assert started == []


def test_a_limit_is_set_for_both(started: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *args: limits.append(args))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60, 80))
    report = share_gpu_memory(0.25)
    assert started == [("false", "0.25")]
    assert limits == [(0.75, 0), (0.75, 1)]
    assert [(m.device, m.free, m.total, m.jax_used) for m in report] == [
        (torch.device("cuda", i), 60, 80, None) for i in range(2)
    ]


def test_a_jax_that_holds_the_card_already_is_warned_of(started: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    jax.devices()
    monkeypatch.setattr(jax, "local_devices", lambda: [types.SimpleNamespace(platform="gpu")])
    with pytest.warns(UserWarning, match="JAX had started before the first call"):
        devices.start_jax()
    devices.start_jax()  # once is enough
    assert len(started) == 1


@pytest.mark.parametrize("fraction", [0, 1, 1.5, -0.1, float("nan")])
def test_a_fraction_out_of_range(fraction: float) -> None:
    with pytest.raises(ValueError, match="jax_fraction must be between 0 and 1"):
        share_gpu_memory(fraction)


@pytest.mark.parametrize("fraction", ["half", True])
def test_a_fraction_of_a_wrong_type(fraction: Any) -> None:
    with pytest.raises(TypeError, match="jax_fraction must be a number"):
        share_gpu_memory(fraction)


def test_a_limit_after_jax_has_started() -> None:
    as_torch(lambda x: x)(torch.ones(1))
    with pytest.raises(RuntimeError, match="started already"):
        share_gpu_memory(0.5)


@pytest.mark.gpu
def test_the_report_of_a_card() -> None:
    x = torch.ones(1 << 20, device="cuda")
    as_torch(lambda t: t * 2)(x)
    first = share_gpu_memory()[0]
    assert first.total > first.free > 0
    assert first.torch_held >= first.torch_used >= 4 << 20
    assert first.jax_used is not None
