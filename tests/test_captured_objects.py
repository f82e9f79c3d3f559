"""Objects of libraries that a function holds: they count as in eager torch, or are refused by name."""

from __future__ import annotations

import math
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from microtome import torch_api as mt
from microtome.bridge import as_jax, as_torch

Fun = Callable[..., Any]
X = torch.tensor([1.0, 2.0])


def _through(fun: Fun) -> Fun:
    return as_torch(as_jax(fun))


_MOVED: dict[str, tuple[Fun, Fun]] = {  # what makes an object, and what a function does with it
    "semaphore": (lambda: threading.Semaphore(2), lambda s: s.acquire(blocking=False)),
    "bounded": (lambda: threading.BoundedSemaphore(2), lambda s: s.acquire(blocking=False)),
    "released": (lambda: threading.Semaphore(2), lambda s: s.release() or True),
    "lock": (threading.Lock, lambda s: s.acquire(blocking=False)),
    "rlock": (threading.RLock, lambda s: s.acquire(blocking=False)),
    "condition": (threading.Condition, lambda s: s.acquire(blocking=False)),
    "barrier": (lambda: threading.Barrier(2), lambda s: s.abort() or True),
}


@pytest.mark.parametrize("name", _MOVED)
def test_a_lock_that_a_function_leaves_other_than_it_found_it_is_refused_by_name(name: str) -> None:
    make, do = _MOVED[name]
    mine = make()

    def fun(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if do(mine) else x

    with pytest.raises(TypeError, match=r"the function leaves mine \(\w+\) other than it found it"):
        _through(fun)(X)
    with pytest.raises(TypeError, match=r"the function leaves mine \(\w+\) other than it found it"):
        _through(fun)(X)  # it was put back


@pytest.mark.parametrize("name", ["set", "clear"])
def test_a_function_that_sets_or_clears_an_event_is_refused_by_name(name: str) -> None:
    mine = threading.Event()
    if name == "clear":
        mine.set()

    def fun(x: torch.Tensor) -> torch.Tensor:
        if mine.is_set() == (name == "set"):
            return x * 3
        getattr(mine, name)()
        return x * 2

    for _ in range(2):
        with pytest.raises(TypeError, match=r"the function sets or clears a threading.Event"):
            _through(fun)(X)
    (mine.set if name == "set" else mine.clear)()
    assert torch.equal(_through(fun)(X), X * 3)


def test_what_locks_say_is_never_stale_and_a_function_may_hold_them() -> None:
    lock, semaphore, barrier, event = threading.Lock(), threading.Semaphore(1), threading.Barrier(2), threading.Event()
    inner, outer = threading.RLock(), threading.Condition()

    def fun(x: torch.Tensor) -> torch.Tensor:
        with inner, outer, semaphore if semaphore._value else inner:  # type: ignore[attr-defined]
            return x * (1 + lock.locked() + 2 * barrier.broken + 4 * event.is_set() + 8 * semaphore._value)  # type: ignore[attr-defined]

    made = _through(fun)
    for change in (lambda: None, lock.acquire, barrier.abort, event.set, semaphore.release, lock.release):
        change()
        assert torch.equal(made(X), fun(X))


_ZEROS: tuple[tuple[Any, Any], ...] = (
    (0.0, -0.0),
    (complex(0.0, 0.0), complex(0.0, -0.0)),
    (complex(0.0, 1.0), complex(-0.0, 1.0)),
    ((complex(0.0, 0.0),), (complex(0.0, -0.0),)),
    ({"k": complex(0.0, 0.0)}, {"k": complex(-0.0, 0.0)}),
    (math.nan, 0.0),
)


@pytest.mark.parametrize("number", range(len(_ZEROS)))
def test_a_zero_with_another_sign_is_another_number(number: int) -> None:
    held = types.SimpleNamespace(k=None, left=0.0, pair=(1, 0.0))

    def fun(x: torch.Tensor, k: Any = None) -> torch.Tensor:
        held.left, held.pair = -0.0, (True, -0.0)
        z = held.k if k is None else k
        z = complex(z["k"] if isinstance(z, dict) else z[0] if isinstance(z, tuple) else z)
        return torch.atan2(torch.tensor([z.imag, z.real]), -x)

    made = _through(fun)
    for k in _ZEROS[number]:
        held.k = k
        torch.testing.assert_close(made(X), fun(X), equal_nan=True)
        if not isinstance(k, float):  # a float is an input
            torch.testing.assert_close(made(X, k), fun(X, k), equal_nan=True)
        held.left, held.pair = 0.0, (1, 0.0)
        made(X)
        assert math.copysign(1, held.left) == -1
        assert repr(held.pair) == "(True, -0.0)"


def test_parametrizations_that_are_cached_around_a_call_are_refused_by_name_and_inside_they_are_eagers() -> None:
    layer = parametrizations.weight_norm(nn.Linear(2, 2))
    made = _through(lambda x: layer(layer(x)))
    with parametrize.cached():
        with pytest.raises(TypeError, match=r"parametrize.cached\(\) is open around the call"):
            made(X)
        assert torch.equal(_through(lambda x: x * 2)(X), X * 2)  # of which there are none

    def inside(x: torch.Tensor) -> torch.Tensor:
        with parametrize.cached():
            return layer(layer(x))

    torch.testing.assert_close(_through(inside)(X), inside(X))
    torch.testing.assert_close(made(X), inside(X))
    assert not parametrize._cache  # type: ignore[attr-defined]


def test_a_lazy_module_that_has_not_run_is_refused_by_name() -> None:
    model = nn.Sequential(nn.LazyLinear(2))
    for call in (_through(model), mt.chunked_vmap(model, chunk_size=2)):
        with pytest.raises(TypeError, match=r"weight is a parameter of a lazy module.*call the module once"):
            call(torch.ones(2, 2))
    model(torch.ones(2, 2))
    torch.testing.assert_close(_through(model)(torch.ones(2, 2)), model(torch.ones(2, 2)))


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_script_module_that_is_captured_runs_or_is_refused_by_name() -> None:
    inner = nn.Linear(2, 2)
    scripts: list[Any] = [torch.jit.script(inner), torch.jit.trace(inner, X)]
    for script in (*scripts, nn.Sequential(nn.Tanh(), scripts[0])):
        with pytest.raises(TypeError, match=r"is a \w+Module, which runs TorchScript's own code"):
            _through(lambda x, script=script: script(x) * 2)(X)
    bare: Any = torch.jit.script(nn.Tanh())
    torch.testing.assert_close(_through(lambda x: bare(x) * 2)(X), torch.tanh(X) * 2)


def test_inference_mode_inside_a_function_switches_autograd_off() -> None:
    layer = nn.Linear(2, 2)

    @torch.inference_mode()
    def decorated(x: torch.Tensor) -> torch.Tensor:
        return layer(x) * 3

    def fun(x: torch.Tensor) -> Any:
        with torch.inference_mode():
            inner = layer(x) * (2.0 + torch.is_inference_mode_enabled())
            with torch.inference_mode(False):
                asked = torch.tensor([float(torch.is_grad_enabled()), float(torch.is_inference_mode_enabled())])
        return inner, decorated(x), asked, layer(x) * (1.0 + torch.is_inference_mode_enabled())

    made = _through(fun)
    for context in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with context():
            actual, expected = made(X), fun(X)
        torch.testing.assert_close([t.detach() for t in actual], [t.detach() for t in expected])
        assert [t.requires_grad for t in actual] == [t.requires_grad for t in expected]


def test_tables_that_the_first_call_fills_are_filled_once_for_derivatives_too() -> None:
    def build() -> tuple[types.SimpleNamespace, Fun]:
        held = types.SimpleNamespace(rows=[torch.zeros(2)], table={}, scale=None)

        def fun(x: torch.Tensor) -> torch.Tensor:
            if held.scale is None:
                held.scale = torch.arange(2.0) + 1
            if len(held.rows) < 3:
                held.rows.append(torch.full((2,), 5.0))
                held.rows.append(torch.full((2,), 7.0))
            table = held.table.setdefault(x.dtype, torch.full((2,), 3.0))
            return (x**3 * held.scale * table * held.rows[1] * held.rows[2]).sum()

        return held, fun

    for number, derivative in enumerate((lambda f: mt.hvp(f, X)(X), lambda f: mt.jacobian(f, X)[0])):
        held, fun = build()
        plain: Any = torch.autograd.functional
        expected = (plain.hvp(build()[1], X, X)[1], plain.jacobian(build()[1], X))[number]
        for _ in range(2):
            torch.testing.assert_close(derivative(fun), expected)
        assert len(held.rows) == 3
        assert torch.equal(held.table[torch.float32], torch.full((2,), 3.0))


def test_a_recording_within_another_knows_its_own_inference_mode() -> None:
    inner = mt.microbatch(lambda row: row * 2, 0, 1, mt.AccumulationType.CONCAT)

    def fun(x: torch.Tensor) -> Any:
        with torch.inference_mode():
            within = inner(x)
            asked = 1.0 + torch.is_inference_mode_enabled()
        return within, inner(x) + torch.is_inference_mode_enabled(), x * asked

    torch.testing.assert_close(_through(fun)(X), (X * 2, X * 2, X * 2))
