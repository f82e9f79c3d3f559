"""What stands somewhere is moved aside, and something new without tensors is put where it stood: in each call."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import marked

from microtome import torch_api as mt
from microtome.bridge import as_jax, as_torch

State = Any
STEPS: dict[str, Callable[[State, torch.Tensor], torch.Tensor]] = {}


class Record:
    def __init__(self, n: float) -> None:
        self.n = n


def _state() -> State:
    return types.SimpleNamespace(
        d={"n": 1.0}, o=Record(1.0), ns=[1.0], s={1.0}, pair=({"n": 1.0}, {"n": 2.0}), queue=[{"n": 1.0}, {"n": 2.0}],
        before={"n": 0.0}, first={"n": 0.0}, object=Record(0.0), held=None, many=[0.0], seen={0.0},
    )  # fmt: skip


def step(fun: Any) -> Any:
    STEPS[fun.__name__] = fun
    return fun


@step
def a_dict(s: State, x: torch.Tensor) -> torch.Tensor:
    y = x * (s.d["n"] - s.before["n"])
    s.before = s.d
    s.d = {"n": s.d["n"] + 2}
    return y


@step
def a_dict_in_a_chain(s: State, x: torch.Tensor) -> torch.Tensor:
    y = x * (s.d["n"] + 10 * s.before["n"] + 100 * s.first["n"])
    s.first, s.before, s.d = s.before, s.d, {"n": s.d["n"] + 2}
    return y


@step
def an_object(s: State, x: torch.Tensor) -> torch.Tensor:
    y = x * (s.o.n - s.object.n)
    s.object, s.o = s.o, Record(s.o.n + 2)
    return y


@step
def a_list(s: State, x: torch.Tensor) -> torch.Tensor:
    y = x * (sum(s.ns) - s.many[0])
    s.many, s.ns = s.ns, [s.ns[0] + 1, 2.0]
    return y


@step
def a_set(s: State, x: torch.Tensor) -> torch.Tensor:
    y = x * (sum(s.s) - sum(s.seen))
    s.seen, s.s = s.s, s.s | {sum(s.s) + 1}
    return y


@step
def entries_of_a_list(s: State, x: torch.Tensor) -> torch.Tensor:
    y = x * (s.queue[1]["n"] - s.queue[0]["n"])
    s.queue[0], s.queue[1] = s.queue[1], {"n": s.queue[1]["n"] * 3}
    return y


@step
def two_that_change_places(s: State, x: torch.Tensor) -> torch.Tensor:
    y = x * (s.d["n"] - 2 * s.before["n"])
    s.d = {**s.d, "n": s.d["n"] + 3}
    s.before, s.d = s.d, s.before
    return y


@step
def part_of_a_tuple(s: State, x: torch.Tensor) -> torch.Tensor:
    y = x * (s.pair[0]["n"] + 10 * s.before["n"])
    s.before, s.pair = s.pair[1], (s.pair[1], {"n": s.pair[1]["n"] + 1})
    return y


@step
def into_a_container_with_tensors(s: State, x: torch.Tensor) -> torch.Tensor:
    y = x * s.d["n"] + (0 if s.held is None else s.held[0]["n"] * s.held[1])
    s.held, s.d = [s.d, x * 2], {"n": s.d["n"] + 2}
    return y


@step
def written_to_where_it_is_now(s: State, x: torch.Tensor) -> torch.Tensor:
    y = x * (s.d["n"] - s.before["n"])
    s.before, s.d = s.d, {"n": s.d["n"] + 2}
    s.before["n"] += 0.5
    return y


def _look(s: State) -> list[Any]:
    """Values, and which of them are one."""
    values = [s.d, s.before, s.first, *s.queue, *s.pair, vars(s.o), vars(s.object), s.ns, s.many, s.s, s.seen]
    values += [] if s.held is None else [s.held[0], s.held[1].tolist()]
    return [repr(values), [[i for i, v in enumerate(values) if v is w] for w in values]]


def _run(name: str, wrap: Callable[[Any], Any]) -> list[Any]:
    s, found = _state(), []
    call = wrap(lambda x: STEPS[name](s, x))
    for i in range(5):
        found += [call(torch.ones(2) * (i + 1)).tolist(), _look(s)]
    return found


@pytest.mark.filterwarnings("ignore:.*has been compiled")
@pytest.mark.parametrize(
    "name", marked(STEPS, slow=("a_list", "a_set", "a_dict_in_a_chain", "entries_of_a_list", "part_of_a_tuple"))
)
def test_what_is_moved_aside_is_what_stood_there(name: str) -> None:
    assert _run(name, lambda f: as_torch(as_jax(f))) == _run(name, lambda f: f)


@pytest.mark.filterwarnings("ignore:.*has been compiled")
def test_with_gradients_too() -> None:
    def grads(wrap: Callable[[Any], Any]) -> list[Any]:
        s, found = _state(), []
        call = wrap(lambda x: a_dict(s, x).square().sum())
        for i in range(4):
            x = (torch.ones(2) * (i + 1)).requires_grad_()
            found += [torch.autograd.grad(call(x), x)[0].tolist(), _look(s)]
        return found

    assert grads(lambda f: as_torch(as_jax(f))) == grads(lambda f: f)


def test_in_slices_it_is_refused() -> None:
    s = _state()
    with pytest.raises(TypeError, match=r"test_moved_aside\.py"):
        mt.microbatch(lambda x: a_dict(s, x).sum(), 0, 1)(torch.ones(3, 2))
