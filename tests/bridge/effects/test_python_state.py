"""What a function changes of Python objects, besides tensors and numbers, is changed in each call, as in torch."""

from __future__ import annotations

import array
import collections
import copy
import dataclasses
import functools
import itertools
import os
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
import pytest
import torch
from helpers import crossed, marked
from torch import nn

from microtome import torch_api as mt
from microtome.bridge import as_jax, as_torch

Function = Callable[[torch.Tensor], torch.Tensor]


class Thing:
    k = 2.0

    def __init__(self, k: float = 2.0) -> None:
        self.k = k


class Pair:
    def __init__(self) -> None:
        self.a, self.b = 1.0, 2.0


class One:
    k = 2.0


class Two:
    k = 5.0


@dataclasses.dataclass
class Step:
    number: int


# Objects that are changed


def _set() -> Function:
    seen = {1}

    def fun(x: torch.Tensor) -> torch.Tensor:
        seen.symmetric_difference_update({2})
        return x * sum(seen)

    return fun


def _set_of_objects() -> Function:
    a, b = Thing(1.0), Thing(3.0)
    held = {a}

    def fun(x: torch.Tensor) -> torch.Tensor:
        (held.discard if b in held else held.add)(b)
        return x * sum(t.k for t in held)

    return fun


def _weak_set() -> Function:
    a, b = Thing(1.0), Thing(3.0)
    held = weakref.WeakSet([a])

    def fun(x: torch.Tensor) -> torch.Tensor:
        (held.discard if b in held else held.add)(b)
        return x * sum(t.k for t in held) * (a.k + b.k)

    return fun


def _class_of_an_object() -> Function:
    o = One()

    def fun(x: torch.Tensor) -> torch.Tensor:
        o.__class__ = Two if type(o) is One else One  # type: ignore[assignment]
        return x * o.k

    return fun


def _defaults() -> Function:
    def scale(k: float = 2.0) -> float:
        return k

    def fun(x: torch.Tensor) -> torch.Tensor:
        scale.__defaults__ = (5.0,) if scale.__defaults__ == (2.0,) else (2.0,)
        return x * scale()

    return fun


def _code() -> Function:
    two, three, scale = lambda: 2.0, lambda: 3.0, lambda: 1.0

    def fun(x: torch.Tensor) -> torch.Tensor:
        scale.__code__ = two.__code__ if scale() != 2.0 else three.__code__
        return x * scale()

    return fun


def _buffer(make: Callable[[], Any]) -> Callable[[], Function]:
    def program() -> Function:
        held = make()

        def fun(x: torch.Tensor) -> torch.Tensor:
            held[0] = held[0] % 3 + 1
            return x * held[0]

        return fun

    return program


def _order(entries: Callable[[], Any], of: Callable[[Any], Any] = lambda d: d) -> Callable[[], Function]:
    def program() -> Function:
        held = entries()

        def fun(x: torch.Tensor) -> torch.Tensor:
            found = of(held)
            y = sum(v * 3**i for i, v in enumerate(found.values())) * x
            first = next(iter(found))
            found[first] = found.pop(first)
            return y

        return fun

    return program


def _two_buffers() -> nn.Module:
    module = nn.Module()
    module.register_buffer("a", torch.ones(2))
    module.register_buffer("b", torch.full((2,), 2.0))
    return module


def _least_recently_used() -> Function:
    cache = collections.OrderedDict(a=torch.ones(2), b=torch.full((2,), 2.0))
    turn = {"key": "a"}

    def fun(x: torch.Tensor) -> torch.Tensor:
        turn["key"] = "b" if turn["key"] == "a" else "a"
        cache.move_to_end(turn["key"])
        return cache[next(iter(cache))] * x

    return fun


def _evicted() -> Function:
    cache = collections.OrderedDict(a=torch.ones(2), b=torch.full((2,), 2.0))

    def fun(x: torch.Tensor) -> torch.Tensor:
        key, value = cache.popitem(last=False)
        cache[key] = value * x
        return value + x

    return fun


def _exchanged_layer() -> Function:
    layers = nn.Sequential(nn.Tanh(), nn.ReLU())

    def fun(x: torch.Tensor) -> torch.Tensor:
        layers[0] = nn.Sigmoid() if isinstance(layers[0], nn.Tanh) else nn.Tanh()
        return layers(x)

    return fun


def _growing_layers() -> Function:
    layers = nn.Sequential(nn.Tanh())

    def fun(x: torch.Tensor) -> torch.Tensor:
        if len(layers) < 3:
            layers.append(nn.Tanh())
        return layers(x)

    return fun


def _lazy_layer() -> Function:
    module: Any = nn.Module()
    module.layer = None

    def fun(x: torch.Tensor) -> torch.Tensor:
        if module.layer is None:
            module.layer = nn.Tanh()
        return module.layer(x)

    return fun


def _fields_replaced() -> Function:
    o = types.SimpleNamespace()
    thing = Thing()

    def fun(x: torch.Tensor) -> torch.Tensor:
        thing.__dict__ = {"k": 3.0 - thing.k}
        return x * thing.k + len(vars(o))

    return fun


# Values that are bound anew


def _set_number(state: Any) -> Any:
    state.number = state.number + 1
    return state


BOUND: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "list": (lambda: [0], lambda v: [1 - v[0]], lambda v: v[0]),
    "dict": (lambda: {"k": 0}, lambda v: {"k": 1 - v["k"]}, lambda v: v["k"]),
    "Counter": (lambda: collections.Counter(k=1), lambda v: collections.Counter(k=3 - v["k"]), lambda v: v["k"]),
    "set": (lambda: {0}, lambda v: {1 - next(iter(v))}, sum),
    "frozenset": (lambda: frozenset({0}), lambda v: frozenset({1 - next(iter(v))}), sum),
    "slice": (lambda: slice(0, 1), lambda v: slice(0, 3 - v.stop), lambda v: v.stop),
    "range": (lambda: range(1), lambda v: range(3 - len(v)), len),
    "function": (lambda: _one, lambda v: _two if v() == 1 else _one, lambda v: v()),
    "partial": (lambda: functools.partial(int, 1), lambda v: functools.partial(int, 3 - v()), lambda v: v()),
    "array": (lambda: np.array([1.0]), lambda v: 3 - v, lambda v: float(v[0])),
    "dataclass": (lambda: Step(0), lambda v: Step(1 - v.number), lambda v: v.number),
    "replace": (lambda: Step(0), lambda v: dataclasses.replace(v, number=v.number + 1), lambda v: v.number),
    "copy": (lambda: Step(0), lambda v: _set_number(copy.copy(v)), lambda v: v.number),
    "deepcopy": (lambda: Step(0), lambda v: _set_number(copy.deepcopy(v)), lambda v: v.number),
    "namespace": (lambda: types.SimpleNamespace(k=0), lambda v: types.SimpleNamespace(k=1 - v.k), lambda v: v.k),
}


def _one() -> int:
    return 1


def _two() -> int:
    return 2


class Net(nn.Module):
    def __init__(self, step: Callable[[Any], Any], read: Callable[[Any], Any]) -> None:
        super().__init__()
        self.step, self.read = step, read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.value = self.step(self.value)
        return x * self.read(self.value)


def _bound(name: str, of_library: bool) -> Callable[[], Function]:
    first, step, read = BOUND[name]

    def program() -> Function:
        net: Any = nn.Identity() if of_library else Net(step, read)
        net.value = first()

        def fun(x: torch.Tensor) -> torch.Tensor:
            net.value = step(net.value)
            return x * read(net.value)

        return fun if of_library else net

    return program


_NUMBERS = itertools.count()


def _environment() -> Function:
    name = f"MICROTOME_TEST_{next(_NUMBERS)}"
    os.environ[name] = "0"

    def fun(x: torch.Tensor) -> torch.Tensor:
        os.environ[name] = str(int(os.environ[name]) + 1)
        return x * int(os.environ[name])

    return fun


def _on_a_tensor(make: Callable[[], Any]) -> Callable[[], Function]:
    def program() -> Function:
        marked = make()
        marked.count = 0

        def fun(x: torch.Tensor) -> torch.Tensor:
            marked.count += 1
            return x * marked.count

        return fun

    return program


PROGRAMS: dict[str, Callable[[], Function]] = {
    "environment": _environment,
    "attribute of a tensor": _on_a_tensor(lambda: torch.ones(2)),
    "attribute of a parameter": _on_a_tensor(lambda: nn.Parameter(torch.ones(2))),
    "memoryview": _buffer(lambda: memoryview(bytearray(b"\x01"))),
    "set": _set,
    "set of objects": _set_of_objects,
    "weak set": _weak_set,
    "class of an object": _class_of_an_object,
    "defaults": _defaults,
    "code": _code,
    "bytearray": _buffer(lambda: bytearray(b"\x01")),
    "array.array": _buffer(lambda: array.array("d", [1.0])),
    "order of a dict": _order(lambda: {"a": 1, "b": 2}),
    "order of tensors": _order(lambda: {"a": torch.ones(2), "b": torch.full((2,), 2.0)}),
    "order of modules' buffers": _order(_two_buffers, lambda m: m._buffers),
    "order of attributes": _order(Pair, vars),
    "least recently used": _least_recently_used,
    "evicted": _evicted,
    "exchanged layer": _exchanged_layer,
    "growing layers": _growing_layers,
    "lazy layer": _lazy_layer,
    "fields replaced": _fields_replaced,
    **{f"{name}, bound anew": _bound(name, False) for name in BOUND},
    **{f"{name}, bound in an object of a library": _bound(name, True) for name in BOUND},
}
ALWAYS = {
    *(
        "set",
        "class of an object",
        "order of a dict",
        "least recently used",
        "evicted",
        "exchanged layer",
        "lazy layer",
    ),
    *("dict, bound anew", "copy, bound anew", "list, bound in an object of a library"),
}


@pytest.mark.parametrize("name", marked(PROGRAMS, quick=ALWAYS))
@pytest.mark.filterwarnings("ignore:.* has been compiled 32 times")
def test_what_a_function_changes_is_changed_in_each_call(name: str) -> None:
    x = torch.tensor([0.5, 0.25])
    plain, traced = PROGRAMS[name](), as_torch(as_jax(PROGRAMS[name]()))
    expected = [plain(x) for _ in range(5)]
    torch.testing.assert_close([traced(x) for _ in range(5)], expected)
    if name != "growing layers" and name != "lazy layer":
        assert not torch.equal(expected[0], expected[1]) or not torch.equal(expected[1], expected[2])


def _in_turn(fun: Function, modes: Iterable[bool]) -> list[torch.Tensor] | str:
    """The results of calls with autograd on or off, or what was refused."""
    results, x = [], torch.tensor([0.5, 0.25], requires_grad=True)
    for mode in modes:
        with torch.set_grad_enabled(mode):
            try:
                results.append(fun(x).detach())
            except TypeError as error:
                return str(error)
    return results


@pytest.mark.parametrize("modes", [(True, False, True, False), (False, True, False, True)], ids=str)
@pytest.mark.parametrize("name", marked(PROGRAMS, quick=("set", "class of an object")))
@pytest.mark.filterwarnings("ignore:.* has been compiled 32 times")
def test_what_is_changed_once_in_each_call_whether_or_not_autograd_records(name: str, modes: tuple[bool, ...]) -> None:
    expected = _in_turn(PROGRAMS[name](), modes)
    torch.testing.assert_close(_in_turn(as_torch(as_jax(PROGRAMS[name]())), modes), expected)
    got = _in_turn(as_torch(as_jax(PROGRAMS[name]()), recompute=True), modes)
    if isinstance(got, str):  # the gradient would start from what the call has left
        assert "a derivative that starts from the inputs runs the function again" in got
    else:
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("name", ["set", "order of a dict", pytest.param("class of an object", marks=pytest.mark.slow)])
def test_in_slices_such_changes_are_refused_by_name(name: str) -> None:
    fun = PROGRAMS[name]()
    with pytest.raises(TypeError, match=r"test_python_state\.py:\d+: the function changes (something|the order of)"):
        mt.microbatch(lambda x: fun(x).sum(), 0, 1)(torch.ones(3, 2))


def test_what_is_changed_the_same_way_in_each_slice_is_no_state() -> None:
    seen, table = {1}, {"a": 1, "b": 2}

    def fun(x: torch.Tensor) -> torch.Tensor:
        seen.add(2)
        table["c"] = 3
        return x.sum() * sum(seen)

    torch.testing.assert_close(mt.microbatch(fun, 0, 1)(torch.ones(3, 2)), torch.tensor(18.0))


def test_after_a_refusal_dicts_stand_in_their_order() -> None:
    table = {"a": torch.ones(2), "b": torch.ones(2)}

    def fun(x: torch.Tensor) -> torch.Tensor:
        table["a"] = table.pop("a") * 2
        raise ValueError("refused")

    with pytest.raises(ValueError, match="refused"):
        as_torch(as_jax(fun))(torch.ones(2))
    assert list(table) == ["a", "b"]


def _plugin() -> Iterable[Any]:
    source = (
        "class M(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.held = [torch.ones(2), torch.full((2,), 2.0)]\n"
        "    def forward(self, x):\n"
        "        self.held = self.held[1:] + [x]\n"
        "        return self.held[0] * x\n"
    )
    names: dict[str, Any] = {"torch": torch, "__name__": "plugin_that_is_not_registered"}
    exec(compile(source, "<plugin>", "exec"), names)
    return names["M"](), names["M"]()


def test_classes_of_modules_that_python_does_not_know_are_the_users() -> None:
    plain, net = _plugin()
    call = as_torch(as_jax(net))
    for i in range(4):
        x = torch.full((2,), float(i))
        torch.testing.assert_close(call(x), plain(x))
        torch.testing.assert_close(net.held, plain.held)


def test_with_recompute_a_backward_pass_leaves_state_as_it_is() -> None:
    w, kept = torch.ones(2, requires_grad=True), []

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.v = torch.zeros(2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kept.append(x * 2)
            self.v = (x * w).detach() + self.v
            return x * w

    net = Counting()
    call = as_torch(as_jax(net), recompute=True)
    results = [call(torch.full((2,), float(i))) for i in range(4)]
    assert not net.v.requires_grad
    results[1].sum().backward()
    torch.testing.assert_close(kept, [torch.full((2,), 2.0 * i) for i in range(4)])
    torch.testing.assert_close((net.v, w.grad), (torch.full((2,), 6.0), torch.ones(2)))


def test_a_derivative_that_would_change_python_objects_again_is_refused() -> None:
    w, holder = torch.ones(2, requires_grad=True), types.SimpleNamespace(counts={0})

    def fun(x: torch.Tensor) -> torch.Tensor:
        holder.counts = {max(holder.counts) + 1}
        return x * w * max(holder.counts)

    with pytest.raises(TypeError, match=r"test_python_state\.py:\d+: a derivative .* recompute=True"):
        as_torch(as_jax(fun), recompute=True)(torch.ones(2))
    assert holder.counts == {0}
    assert as_torch(as_jax(fun))(torch.ones(2)).tolist() == [1, 1]


def test_a_derivative_that_makes_a_list_of_numbers_again_leaves_it_as_the_call_did() -> None:
    w, holder = torch.ones(2, requires_grad=True), types.SimpleNamespace(counts=[0])

    def fun(x: torch.Tensor) -> torch.Tensor:
        holder.counts = [holder.counts[0] + 1]
        return x * w * holder.counts[0]

    call = as_torch(as_jax(fun), recompute=True)
    for i in (1, 2, 3):
        y = call(torch.ones(2))
        assert torch.autograd.grad(y.sum(), w)[0].tolist() == [i, i]
        assert holder.counts == [i]


def _of_a_number(holder: Any) -> Any:
    return lambda x: torch.sigmoid(x * holder.k)


def _of_a_function(holder: Any) -> Any:
    return lambda x: holder.act(x * 2)


def _of_an_entry(holder: Any) -> Any:
    return lambda x: torch.sigmoid(x * holder.table["k"])


CHANGES: dict[str, tuple[Any, Callable[[Any], None]]] = {
    "number": (_of_a_number, lambda h: setattr(h, "k", 7.0)),
    "function": (_of_a_function, lambda h: setattr(h, "act", torch.cos)),
    "entry": (_of_an_entry, lambda h: h.table.update(k=9.0)),
}
CALLS: dict[str, Callable[[Any], Any]] = {
    "as_torch": lambda fun: as_torch(as_jax(fun)),
    "recompute": lambda fun: as_torch(as_jax(fun), recompute=True),
    "microbatch": lambda fun: mt.microbatch(fun, 0, 1, mt.AccumulationType.CONCAT),
    "micro_vmap": mt.micro_vmap,
}


@pytest.mark.parametrize(("change", "call"), crossed(CHANGES, CALLS))
def test_a_derivative_of_what_a_call_has_read_is_not_one_of_what_stands_there_now(change: str, call: str) -> None:
    """Second derivatives, and first ones that start from the inputs, trace the function again."""
    make, move = CHANGES[change]

    def gradients(fun: Any, holder: Any) -> Any:
        x = torch.linspace(-1, 1, 3)[:, None].requires_grad_()
        out = fun(x)
        move(holder)
        (first,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        return first, *torch.autograd.grad(first.square().sum(), x)

    holders = [types.SimpleNamespace(k=2.0, act=torch.sin, table={"k": 2.0}) for _ in range(3)]
    with pytest.raises(TypeError, match=r"something that the function reads .* has changed between the call"):
        gradients(CALLS[call](make(holders[0])), holders[0])
    still, move = holders[1], lambda holder: None
    torch.testing.assert_close(gradients(CALLS[call](make(still)), still), gradients(make(holders[2]), holders[2]))


def test_what_a_function_counts_itself_is_as_before_in_its_derivatives() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.step = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.step += 1
            return torch.sigmoid(x * self.step)

    def gradients(fun: Any) -> Any:
        x = torch.linspace(-1, 1, 3).requires_grad_()
        outs = [fun(x) for _ in range(3)]
        (first,) = torch.autograd.grad(outs[1].square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)

    torch.testing.assert_close(gradients(as_torch(as_jax(Counting()))), gradients(Counting()))


def test_a_captured_tensor_requires_grad_in_derivatives_as_outside() -> None:
    w, x = torch.tensor([1.0, 2.0]).requires_grad_(), torch.ones(2)
    fun = lambda x: x * w * (2 if w.requires_grad else 3) * (5 if w.is_leaf else 7)
    torch.testing.assert_close(mt.jacobian(fun, x)[0], torch.func.jacrev(fun)(x))
    got = mt.lift(jax.jvp)(fun, (x,), (x,))
    torch.testing.assert_close(got, torch.func.jvp(fun, (x,), (x,)))


def test_parameters_that_are_listed_anew_in_an_object_of_a_library() -> None:
    layer: Any = nn.Linear(1, 1)
    layer.both = [nn.Parameter(torch.tensor([1.0])), nn.Parameter(torch.tensor([2.0]))]

    def fun(x: torch.Tensor) -> torch.Tensor:
        layer.both = [layer.both[1], layer.both[0]]
        return x * layer.both[0]

    call = as_torch(as_jax(fun))
    assert [call(torch.ones(1)).item() for _ in range(4)] == [2.0, 1.0, 2.0, 1.0]


@pytest.mark.parametrize("tail", [False, True])
def test_beside_a_log_state_changes_once_in_each_call(tail: bool) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.log, self.queue, self.seen, self.counts = [], collections.deque(), set(), [0]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not tail:
                self.log.append("call")
            self.queue.append(1)
            self.seen.add(len(self.seen))
            self.counts = [self.counts[0] + 1]
            if tail:
                self.log.append("call")
            return x * 2

    for net in (Net(), Net()):  # a second one may not find the state of the first
        call = as_torch(as_jax(net))
        for i in range(1, 4):
            call(torch.ones(1))
            assert (len(net.queue), net.seen, net.counts) == (i, set(range(i)), [i])
