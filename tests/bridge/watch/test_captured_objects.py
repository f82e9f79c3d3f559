"""Objects of libraries that a function holds: they count as in eager torch, or are refused by name."""

from __future__ import annotations

import array
import asyncio
import collections
import csv
import gc
import importlib.util
import io
import logging
import math
import runpy
import struct
import sys
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers import marked, through
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from microtome import torch_api as mt

Fun = Callable[..., Any]
X = torch.tensor([1.0, 2.0])


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
        through(fun)(X)
    with pytest.raises(TypeError, match=r"the function leaves mine \(\w+\) other than it found it"):
        through(fun)(X)  # it was put back


@pytest.mark.parametrize("kind", [threading.Event, asyncio.Event])
@pytest.mark.parametrize("name", ["set", "clear"])
def test_a_function_that_sets_or_clears_an_event_is_refused_by_name(name: str, kind: Any) -> None:
    mine = kind()
    if name == "clear":
        mine.set()

    def fun(x: torch.Tensor) -> torch.Tensor:
        if mine.is_set() == (name == "set"):
            return x * 3
        getattr(mine, name)()
        return x * 2

    for _ in range(2):
        with pytest.raises(TypeError, match=r"the function sets or clears a (threading|asyncio).Event"):
            through(fun)(X)
    (mine.set if name == "set" else mine.clear)()
    assert torch.equal(through(fun)(X), X * 3)


def test_what_locks_say_is_never_stale_and_a_function_may_hold_them() -> None:
    lock, semaphore, barrier, event = threading.Lock(), threading.Semaphore(1), threading.Barrier(2), threading.Event()
    inner, outer = threading.RLock(), threading.Condition()

    def fun(x: torch.Tensor) -> torch.Tensor:
        with inner, outer, semaphore if semaphore._value else inner:  # type: ignore[attr-defined]
            return x * (1 + lock.locked() + 2 * barrier.broken + 4 * event.is_set() + 8 * semaphore._value)  # type: ignore[attr-defined]

    made = through(fun)
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


@pytest.mark.parametrize("number", marked(range(len(_ZEROS)), slow=(2, 3)))
def test_a_zero_with_another_sign_is_another_number(number: int) -> None:
    held = types.SimpleNamespace(k=None, left=0.0, pair=(1, 0.0))

    def fun(x: torch.Tensor, k: Any = None) -> torch.Tensor:
        held.left, held.pair = -0.0, (True, -0.0)
        z = held.k if k is None else k
        z = complex(z["k"] if isinstance(z, dict) else z[0] if isinstance(z, tuple) else z)
        return torch.atan2(torch.tensor([z.imag, z.real]), -x)

    made = through(fun)
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
    made = through(lambda x: layer(layer(x)))
    with parametrize.cached():
        with pytest.raises(TypeError, match=r"parametrize.cached\(\) is open around the call"):
            made(X)
        assert torch.equal(through(lambda x: x * 2)(X), X * 2)  # of which there are none

    def inside(x: torch.Tensor) -> torch.Tensor:
        with parametrize.cached():
            return layer(layer(x))

    torch.testing.assert_close(through(inside)(X), inside(X))
    torch.testing.assert_close(made(X), inside(X))
    assert not parametrize._cache  # type: ignore[attr-defined]


def test_a_lazy_module_that_has_not_run_is_refused_by_name() -> None:
    model = nn.Sequential(nn.LazyLinear(2))
    for call in (through(model), mt.chunked_vmap(model, chunk_size=2)):
        with pytest.raises(TypeError, match=r"weight is a parameter of a lazy module.*call the module once"):
            call(torch.ones(2, 2))
    model(torch.ones(2, 2))
    torch.testing.assert_close(through(model)(torch.ones(2, 2)), model(torch.ones(2, 2)))


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_script_module_that_is_captured_runs_or_is_refused_by_name() -> None:
    inner = nn.Linear(2, 2)
    scripts: list[Any] = [torch.jit.script(inner), torch.jit.trace(inner, X)]
    for script in (*scripts, nn.Sequential(nn.Tanh(), scripts[0])):
        with pytest.raises(TypeError, match=r"is a \w+Module, which runs TorchScript's own code"):
            through(lambda x, script=script: script(x) * 2)(X)
    bare: Any = torch.jit.script(nn.Tanh())
    torch.testing.assert_close(through(lambda x: bare(x) * 2)(X), torch.tanh(X) * 2)


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

    made = through(fun)
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

    torch.testing.assert_close(through(fun)(X), (X * 2, X * 2, X * 2))


# Objects and tensors that say themselves what an op is of them


class _Operator:
    """A linear operator, say: no tensor, but torch's functions take it."""

    calls = 0

    def __init__(self, t: torch.Tensor) -> None:
        self.t, self.k, self.seen = t, 2.0, torch.zeros(2)

    @classmethod
    def __torch_function__(cls, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*(a.dense() if isinstance(a, _Operator) else a for a in args), **(kwargs or {}))

    def dense(self) -> torch.Tensor:
        return self.t * self.k


class _Counting(_Operator):
    def dense(self) -> torch.Tensor:
        _Counting.calls += 1
        self.seen = self.seen + self.t
        return self.t * _Counting.calls + self.seen


class _Doubled(nn.Parameter):
    """A weight that is kept as its half."""

    @classmethod
    def __torch_function__(cls, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **(kwargs or {}))
        return result * 2 if function is nn.functional.linear else result


class _Tripled(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(function, kinds, args, kwargs or {})
        return result * 3 if function is torch.mul else result


def _of_what_it_reads(wrap: Fun) -> Any:
    operator = _Operator(torch.ones(2))
    call = wrap(lambda x: torch.mul(x, operator).sum() + torch.matmul(operator, x))
    results = [call(X)]
    operator.t.mul_(3)
    results.append(call(X))
    operator.t = torch.ones(2) * 7
    results.append(call(X))
    operator.k = 5.0
    return torch.stack([*results, call(X)])


def _of_another_one(wrap: Fun) -> Any:
    module = nn.Module()
    module.op = _Operator(torch.ones(2))
    call = wrap(lambda x: torch.matmul(module.op, x))
    first = call(X)
    module.op = _Operator(torch.full((2,), 11.0))
    return first, call(X)


def _of_what_it_writes(wrap: Fun) -> Any:
    _Counting.calls, operator = 0, _Counting(torch.ones(2))
    call = wrap(lambda x: torch.mul(x, operator).sum())
    return [call(X) for _ in range(3)], operator.seen, _Counting.calls


def _of_its_gradient(wrap: Fun) -> Any:
    operator, x = _Operator(torch.ones(2, requires_grad=True)), X.clone().requires_grad_()
    wrap(lambda x: (torch.mul(x, operator) ** 2).sum())(x).backward()
    return x.grad, operator.t.grad


def _of_a_parameter(wrap: Fun) -> Any:
    layer, x = nn.Linear(2, 2, bias=False), X.clone().requires_grad_()
    layer.weight = _Doubled(torch.ones(2, 2))
    out = wrap(layer)(x)
    out.square().sum().backward()
    return out, x.grad, layer.weight.grad


@pytest.mark.parametrize(
    "case", [_of_what_it_reads, _of_another_one, _of_what_it_writes, _of_its_gradient, _of_a_parameter]
)
def test_what_has_a_torch_function_of_its_own_is_asked(case: Fun) -> None:
    torch.testing.assert_close(case(through), case(lambda fun: fun))


def test_tensors_with_a_torch_function_of_their_own_are_refused_where_a_trace_cannot_have_them() -> None:
    with pytest.raises(TypeError, match="an argument is a _Tripled, a tensor with a __torch_function__ of its own"):
        through(lambda x: x * 2)(X.as_subclass(_Tripled))
    captured = X.as_subclass(_Tripled)
    for fun in (lambda x: torch.mul(x, captured), lambda x: torch.mul(x.as_subclass(_Tripled), x)):
        with pytest.raises(TypeError, match=r"is made one of a subclass of torch.Tensor"):
            through(fun)(X)


# What tells itself from another only when it is looked at closely

_SOURCE = "class Config:\n    scale = 2.0\n    sizes = [1]\n    class Inner: rate = 2.0\nclass Below(Config): pass\n"


def _by_path(path: Any) -> dict[str, Any]:
    return runpy.run_path(str(path))


def _by_spec(path: Any) -> dict[str, Any]:
    spec: Any = importlib.util.spec_from_file_location("configuration_of_mine", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return vars(module)


def _by_exec(path: Any) -> dict[str, Any]:
    namespace: dict[str, Any] = {}
    exec(path.read_text(), namespace)
    return namespace


@pytest.mark.parametrize("load", [_by_path, _by_spec, _by_exec])
def test_a_configuration_that_is_no_module_is_read_at_each_call(load: Fun, tmp_path: Any) -> None:
    path = tmp_path / "configuration.py"
    path.write_text(_SOURCE)
    namespace = load(path)
    Config, Below = namespace["Config"], namespace["Below"]
    one = Config()
    calls = [
        through(lambda x: x * Config.scale),
        through(lambda x: x * len(Config.sizes)),
        through(lambda x: x * Config.Inner.rate),
        through(lambda x: x * one.scale * Below.scale),
    ]
    for call in calls:
        call(X)
    Config.scale, Config.Inner.rate = 5.0, 7.0
    Config.sizes.append(2)
    torch.testing.assert_close([call(X) for call in calls], [X * k for k in (5, 2, 7, 25)])


class _Held:
    k = 2.0


def _nothing(*_: Any) -> int:
    """Of one line."""
    return 0


def test_values_that_are_equal_and_differ_are_two() -> None:
    held: Any = types.SimpleNamespace(value=None)
    read: dict[str, tuple[Fun, list[Any]]] = {
        "range": (lambda: held.value.stop, [range(0, 3, 2), range(0, 4, 2)]),
        "empty range": (lambda: held.value.start, [range(0), range(5, 5)]),
        "window": (lambda: held.value.maxlen, [collections.deque([1.0], maxlen=n) for n in (2, 4)]),
        "key": (lambda: len(str(next(iter(held.value)))), [{1: 0}, {True: 0}, {1.0: 0}]),
    }
    for number, values in read.values():
        call, argument = through(lambda x, n=number: x * n()), through(lambda x, v, n=number: x * _with(held, v, n))
        for value in values:
            held.value = value
            expected = X * number()
            torch.testing.assert_close(call(X), expected)
            held.value = None
            torch.testing.assert_close(argument(X, value), expected)


def _with(held: Any, value: Any, number: Fun) -> Any:
    before, held.value = held.value, value
    try:
        return number()
    finally:
        held.value = before


def test_what_code_asks_of_functions_references_and_the_process_is_never_stale(monkeypatch: Any) -> None:
    held: Any = types.SimpleNamespace(one=_Held())
    reference = weakref.ref(held.one)
    calls = {
        "reference": (lambda: 9.0 if reference() is None else 2.0, lambda: delattr(held, "one")),
        "text": (lambda: len(_nothing.__doc__ or ""), lambda: monkeypatch.setattr(_nothing, "__doc__", "longer text")),
        "name": (lambda: len(_nothing.__name__), lambda: monkeypatch.setattr(_nothing, "__name__", "f")),
        "arguments": (lambda: len(sys.argv), lambda: monkeypatch.setattr(sys, "argv", ["a"] * 50)),
        "logging": (lambda: 1 + _LOG.isEnabledFor(logging.ERROR), lambda: logging.disable(logging.CRITICAL)),
    }
    try:
        for number, change in calls.values():
            call = through(lambda x, n=number: x * n())
            torch.testing.assert_close(call(X), X * number())
            change()
            torch.testing.assert_close(call(X), X * number())
    finally:
        logging.disable(logging.NOTSET)


_LOG = logging.getLogger(__name__)


@pytest.mark.parametrize(
    "make",
    [
        lambda: iter(collections.deque([1, 2, 3])),
        lambda: reversed(collections.deque([1, 2, 3])),
        lambda: iter(array.array("i", [1, 2, 3])),
        lambda: csv.reader(io.StringIO("1\n2\n")),
        lambda: struct.iter_unpack("b", b"\1\2"),
        lambda: np.arange(4).flat,
        lambda: np.nditer(np.arange(3)),
    ],
)
def test_an_iterator_written_in_c_is_refused_by_name(make: Fun) -> None:
    mine = make()
    with pytest.raises(TypeError, match="mine is an iterator"):
        through(lambda x: x * len(str(next(mine))))(X)


@pytest.mark.parametrize("kind", [nn.Identity, type("Thing", (), {})])
def test_what_a_weak_proxy_stood_for_may_be_gone(kind: Any) -> None:
    thing = kind()
    thing.scale = 2.0
    held: list[Any] = [weakref.proxy(thing), 5.0]
    call = through(lambda x: x * (held[0].scale if held[1] == 5 else held[1]))
    assert call(torch.ones(())) == 2
    thing.scale = 3.0
    assert call(torch.ones(())) == 3
    del thing
    gc.collect()
    held[1] = 7.0
    assert call(torch.ones(())) == 7
