"""A list that a function appends plain values to: it is left out of what is watched, and nothing else is."""

from __future__ import annotations

import collections
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import marked
from torch import nn

from microtome import torch_api as mt
from microtome.bridge import as_jax, as_torch
from microtome.bridge.call.cache import PROGRAMS

Case = tuple[Callable[..., Any], Callable[[int], Any], Callable[[], Any]]


def _nothing(*_: object) -> None:
    """For cases that change or keep nothing."""


def _setting_beside() -> Case:
    state = types.SimpleNamespace(d={"scale": 1.0, "log": []})

    def fun(x: torch.Tensor) -> torch.Tensor:
        state.d["log"].append("step")
        return x.sum() * state.d["scale"]

    return fun, lambda i: state.d.update(scale=i + 1.0), _nothing


def _phases() -> Case:
    class Phases(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.state: dict[str, Any] = {"phase": "a", "events": []}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.state["events"].append(self.state["phase"])
            return x.sum() * (1 if self.state["phase"] == "a" else 10)

    net = Phases()
    return net, lambda i: net.state.update(phase="ab"[i % 2]), _nothing


def _setting_in_a_closure() -> Case:
    d: dict[str, Any] = {"scale": 1.0, "log": []}

    def fun(x: torch.Tensor) -> torch.Tensor:
        d["log"].append("step")
        return x.sum() * d["scale"]

    return fun, lambda i: d.update(scale=i + 1.0), _nothing


def _counter_beside() -> Case:
    state = types.SimpleNamespace(d={"n": 0, "log": []})

    def fun(x: torch.Tensor) -> torch.Tensor:
        state.d["n"] += 1
        state.d["log"].append("step")
        return x.sum() * state.d["n"]

    return fun, _nothing, lambda: state.d["n"]


def _tensor_beside() -> Case:
    state = types.SimpleNamespace(d={"h": torch.zeros(3), "log": []})

    def fun(x: torch.Tensor) -> torch.Tensor:
        state.d["h"] = state.d["h"] + x
        state.d["log"].append("step")
        return state.d["h"].sum()

    return fun, _nothing, lambda: state.d["h"].tolist()


def _new_tensor_beside() -> Case:
    state = types.SimpleNamespace(d={"log": []}, k=1.0)

    def fun(x: torch.Tensor) -> torch.Tensor:
        state.d["out"] = x * state.k
        state.d["log"].append("step")
        return x.sum()

    return fun, lambda i: setattr(state, "k", i // 2 + 1.0), lambda: state.d["out"].tolist()


def _tuple() -> Case:
    held: Any = ([], {"k": 1.0}, torch.ones(3))

    def fun(x: torch.Tensor) -> torch.Tensor:
        held[0].append("step")
        return (x * held[2]).sum() * held[1]["k"]

    def change(i: int) -> None:
        held[1]["k"] = i + 1.0
        held[2].mul_(2)

    return fun, change, _nothing


def _list_of_lists() -> Case:
    state = types.SimpleNamespace(runs=[[1.0], []])

    def fun(x: torch.Tensor) -> torch.Tensor:
        state.runs[1].append(3)
        return x.sum() * state.runs[0][0]

    return fun, lambda i: state.runs[0].__setitem__(0, i + 1.0), _nothing


def _defaultdict() -> Case:
    metrics: Any = collections.defaultdict(list, temperature=[1.0])

    def fun(x: torch.Tensor) -> torch.Tensor:
        metrics["calls"].append(1)
        return x.sum() * metrics["temperature"][-1]

    return fun, lambda i: metrics["temperature"].append(i + 1.0), _nothing


class _Layer(nn.Module):
    def __init__(self, options: list[Any], logs: bool) -> None:
        super().__init__()
        self.options, self.logs = options, logs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.logs:
            self.options.append("called")
            return x * 2
        return x * sum(self.options)


def _other_object() -> Case:
    net = nn.Sequential(_Layer([], True), _Layer([1.0], False))
    return net, lambda i: net[1].options.__setitem__(0, i + 1.0), _nothing


def _same_list_in_another_state() -> Case:
    net = _Layer([], True)

    def change(i: int) -> None:
        net.logs = i < 2
        if not net.logs:
            net.options[:] = [float(i)]

    return net, change, _nothing


def _same_list_for_other_arguments() -> Case:
    state = types.SimpleNamespace(options=[])

    def fun(x: torch.Tensor) -> torch.Tensor:
        if x.dim() == 1:
            state.options.append(2.0)
            return x.sum()
        return x.sum() * sum(state.options)

    def change(i: int) -> Any:
        if i < 2:
            return torch.ones(3)
        state.options[:] = [float(i)]
        return torch.ones(1, 3)

    return fun, change, _nothing


def _filled_once() -> Case:
    state: Any = types.SimpleNamespace(options=[], log=[])

    def fun(x: torch.Tensor) -> torch.Tensor:
        if not state.options:
            state.options.append(2.0)
        state.log.append("step")
        return x.sum() * sum(state.options)

    def change(i: int) -> None:
        if i > 1:
            state.options[:] = [] if i == 3 else [float(i)]

    return fun, change, lambda: list(state.options)


def _records() -> Case:
    state: Any = types.SimpleNamespace(log=[{"n": 0}])

    def fun(x: torch.Tensor) -> torch.Tensor:
        state.log[0]["n"] += 1  # in an entry of the list itself
        state.log.append({"n": -1})
        return x.sum()

    return fun, _nothing, lambda: (state.log[0]["n"], len(state.log))


def _moved_beside() -> Case:
    state: Any = types.SimpleNamespace(log=[{"x": [0]}, {"y": {}}], z={"a": {"n": 1, "h": torch.ones(3)}, "b": None})

    def fun(x: torch.Tensor) -> torch.Tensor:
        state.log.append("step")
        state.z["b"] = state.z["a"]
        return x.sum() + (state.z["b"]["h"] * state.z["a"]["n"]).sum()

    def change(i: int) -> None:
        state.z["a"] = {"n": i // 2, "h": torch.full((3,), float(i))}

    return fun, change, lambda: state.z["b"] is state.z["a"]


_CASES = [
    *(_setting_beside, _setting_in_a_closure, _phases, _counter_beside, _tensor_beside, _new_tensor_beside, _tuple),
    *(_list_of_lists, _defaultdict, _other_object, _same_list_in_another_state, _same_list_for_other_arguments),
    *(_filled_once, _records, _moved_beside),
]
_NEAR = (_tuple, _new_tensor_beside, _defaultdict, _list_of_lists, _counter_beside, _moved_beside)


def _run(case: Callable[[], Case], wrap: Callable[..., Any]) -> list[Any]:
    fun, change, look = case()
    call, seen = wrap(fun), []
    for i in range(5):
        x = change(i)
        seen.append((call(torch.ones(3) if x is None else x).tolist(), look()))
    return seen


@pytest.mark.filterwarnings("ignore:.*each time.*")
@pytest.mark.parametrize("case", marked(_CASES, slow=_NEAR))
def test_what_stands_beside_a_log_is_read_and_written_at_each_call(case: Callable[[], Case]) -> None:
    assert _run(case, lambda fun: as_torch(as_jax(fun))) == _run(case, lambda fun: fun)


def test_another_function_of_the_same_code_reads_its_list_at_each_call() -> None:
    def make(logs: bool, held: list[Any]) -> Callable[[torch.Tensor], torch.Tensor]:
        def fun(x: torch.Tensor) -> torch.Tensor:
            if logs:
                held.append("step")
                return x.sum()
            return x.sum() * sum(held)

        return as_torch(as_jax(fun))

    options: list[Any] = [1.0]
    nets = _Layer([], True), _Layer([1.0], False)
    functions, modules = (make(True, []), make(False, options)), [as_torch(as_jax(net)) for net in nets]
    for i in range(3):
        options[0] = nets[1].options[0] = i + 1.0
        for first, second in (functions, modules):
            first(torch.ones(3))
            assert second(torch.ones(3)).sum() == 3 * (i + 1)


def test_what_stands_beside_a_log_is_read_in_slices_too() -> None:
    d: dict[str, Any] = {"log": [], "k": 1.0}

    def fun(x: torch.Tensor) -> torch.Tensor:
        d["log"].append("step")
        return x.sum() * d["k"]

    call = mt.microbatch(fun, argnums=0, microbatch_size=2)
    for d["k"] in (1.0, 2.0, 3.0, 2.0):
        assert call(torch.ones(4)) == 4 * d["k"]


def _compiled(call: Callable[[], object]) -> int:
    before = set(PROGRAMS)
    call()
    return len(set(PROGRAMS) - before)


def test_a_log_does_not_have_its_function_compiled_anew() -> None:
    def fun(x: torch.Tensor) -> torch.Tensor:
        traced.append(1)
        state.d["log"].append("step")
        state.nested[0].append({"n": 1})
        return (x * state.w).sum() * state.d["k"]

    traced: list[int] = []
    state = types.SimpleNamespace(d={"k": 1.0, "log": []}, nested=[[], 2], w=torch.ones(3, requires_grad=True))
    call = as_torch(as_jax(fun))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for k in (1.0, 2.0, 1.0, 2.0, 2.0):
            state.d["k"] = k
            call(torch.ones(3)).backward()
        before, grown = len(traced), len(state.d["log"])
        assert grown > 0
        for i in range(4):  # other lists in its place, and longer ones
            state.d = {"k": 1.0 + i % 2, "log": ["a"] * (i // 2)}
            state.nested[0].append(i)
            assert _compiled(lambda: call(torch.ones(3)).backward()) == 0
        state.d["k"] = 3.0
        call(torch.ones(3))
        assert len(traced) > before
        assert len(state.d["log"]) > 1
        assert state.w.grad.tolist() == [1 + 2 + 1 + 2 + 2 + 1 + 2 + 1 + 2] * 3


def test_programs_around_one_function_agree_on_its_logs() -> None:
    def fun(x: torch.Tensor) -> torch.Tensor:
        state.log.append("step")
        return x.sum() * state.k

    state = types.SimpleNamespace(log=[], k=2.0)
    inner = as_jax(fun)
    calls = as_torch(inner), as_torch(lambda x: inner(x) * 2), as_torch(inner, recompute=True)
    for call in calls:
        for _ in range(2):
            call(torch.ones(3))
            state.log.append("outside")
    for factor, call in zip((1, 2, 1), calls, strict=True):
        state.log.append("outside")
        assert _compiled(lambda call=call: call(torch.ones(3))) == 0
        assert call(torch.ones(3)) == 6 * factor
    state.k = 3.0
    assert [call(torch.ones(3)).item() for call in calls] == [9, 18, 9]


def test_a_log_inside_of_a_log_is_found_where_it_stands_otherwise() -> None:
    def fun(x: torch.Tensor) -> torch.Tensor:
        state.outer.append(1)
        state.inner.append(2)
        return x.sum() * state.k

    inner: list[Any] = []
    state = types.SimpleNamespace(inner=inner, outer=[inner], k=1.0)
    call = as_torch(as_jax(fun))
    for state.k in (1.0, 2.0):
        call(torch.ones(3))
    assert _compiled(lambda: call(torch.ones(3))) == 0
    assert call(torch.ones(3)) == 6
