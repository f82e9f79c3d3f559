"""What a function captures is never stale, and what it does not change is not traced again.

Each scenario is a function of one tensor and a change of something that it reads. Eager torch is the oracle: before the
change, after it, and with the transform applied anew.
"""

from __future__ import annotations

import argparse
import array
import collections
import contextlib
import contextvars
import copy
import dataclasses
import datetime
import enum
import functools
import gc
import importlib
import itertools
import math
import operator
import os
import pathlib
import random
import re
import secrets
import sys
import time
import types
import uuid
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
import torch
from helpers import having, marked, through
from torch import nn
from torch.nn.utils import prune

from microtome.bridge.call import cache

Fun = Callable[[torch.Tensor], torch.Tensor]
Scenario = tuple[Fun, Callable[[], object]]

SCENARIOS: dict[str, Callable[[], Scenario]] = {}
REFUSABLE: set[str] = set()  # an error is as good as the right number
# The first call adds a key, or keeps a value.
SETTLING = frozenset(("defaultdict", "cached property", "cached function"))

# What fails today, with the reason: an entry that no longer fails is reported and has to go.
_LIVES_LEAK = {"in_class": "caches of what is known of a class refer to it strongly"}


def scenario(name: str, *, may_refuse: bool = False) -> Callable[[Callable[[], Scenario]], Callable[[], Scenario]]:
    def add(make: Callable[[], Scenario]) -> Callable[[], Scenario]:
        assert name not in SCENARIOS
        SCENARIOS[name] = make
        if may_refuse:
            REFUSABLE.add(name)
        return make

    return add


# all through the same harness
pytestmark = [pytest.mark.usefixtures("seeded"), pytest.mark.filterwarnings("ignore:.*has been compiled:UserWarning")]


def _x() -> torch.Tensor:
    return torch.tensor([1.0, -2.0, 0.5])


def bodies_run(call: Callable[..., Any], *args: Any) -> int:
    """How many functions of this file run during a call: none, where nothing is traced."""
    ran = []

    def profile(frame: types.FrameType, event: str, arg: object) -> None:
        if event == "call" and frame.f_code.co_filename == __file__ and frame.f_code.co_name in _BODIES:
            ran.append(frame.f_code.co_name)

    sys.setprofile(profile)
    try:
        call(*args)
    finally:
        sys.setprofile(None)
    return len(ran)


_BODIES = {"fun", "forward", "loss", "<lambda>"}


# Ways to capture a number or a tensor


@scenario("closure number")
def _() -> Scenario:
    number = 2.0

    def fun(x: torch.Tensor) -> torch.Tensor:
        return x * number

    def change() -> None:
        nonlocal number
        number = 5.0

    return fun, change


@scenario("closure tensor rebound")
def _() -> Scenario:
    w = torch.ones(3)

    def fun(x: torch.Tensor) -> torch.Tensor:
        return x * w

    def change() -> None:
        nonlocal w
        w = torch.full((3,), 5.0)

    return fun, change


@scenario("closure tensor of another shape")
def _() -> Scenario:
    w = torch.ones(3)

    def fun(x: torch.Tensor) -> torch.Tensor:
        return x * w

    def change() -> None:
        nonlocal w
        w = torch.full((2, 3), 5.0)

    return fun, change


@scenario("closure tensor of another dtype")
def _() -> Scenario:
    w = torch.ones(3)

    def fun(x: torch.Tensor) -> torch.Tensor:
        return x * w

    def change() -> None:
        nonlocal w
        w = torch.full((3,), 5.0, dtype=torch.float64)

    return fun, change


@scenario("closure tensor in place")
def _() -> Scenario:
    w = torch.ones(3)
    return lambda x: x * w, lambda: w.mul_(4)


@scenario("closure tensor through a view")
def _() -> Scenario:
    base = torch.ones(4)
    w = base[1:]
    return lambda x: x * w, lambda: base.mul_(4)


@scenario("closure tensor through numpy")
def _() -> Scenario:
    memory = np.ones(3, np.float32)
    w = torch.from_numpy(memory)

    def change() -> None:
        memory[:] = 7

    return lambda x: x * w, change


@scenario("closure tensor by data")
def _() -> Scenario:
    w = torch.ones(3, requires_grad=True)

    def change() -> None:
        w.data = torch.full((3,), 3.0)

    return lambda x: x * w, change


@scenario("closure tensor by data of another shape")
def _() -> Scenario:
    w = torch.ones(3, requires_grad=True)

    def change() -> None:
        w.data = torch.full((2, 3), 3.0)

    return lambda x: x * w, change


@scenario("closure tensor by set_")
def _() -> Scenario:
    w = torch.ones(3)
    return lambda x: x * w, lambda: w.set_(torch.full((3,), 3.0))


@scenario("closure tensor swapped")
def _() -> Scenario:
    w, other = torch.ones(3), torch.full((3,), 3.0)
    return lambda x: x * w, lambda: torch.utils.swap_tensors(w, other)


@scenario("two closure tensors exchanged")
def _() -> Scenario:
    a, b = torch.ones(3), torch.full((3,), 3.0)

    def fun(x: torch.Tensor) -> torch.Tensor:
        return x * a + b

    def change() -> None:
        nonlocal a, b
        a, b = b, a

    return fun, change


@scenario("two names for one tensor that part")
def _() -> Scenario:
    a = b = torch.ones(3)

    def fun(x: torch.Tensor) -> torch.Tensor:
        return x * a + b

    def change() -> None:
        nonlocal b
        b = torch.full((3,), 3.0)

    return fun, change


@scenario("two tensors that become one")
def _() -> Scenario:
    a, b = torch.ones(3), torch.full((3,), 3.0)

    def fun(x: torch.Tensor) -> torch.Tensor:
        return x * a + b

    def change() -> None:
        nonlocal b
        b = a

    return fun, change


NUMBER: Any = 2.0
TENSOR = torch.ones(3)
TABLE = {"scale": 2.0}


def _set_global(name: str, value: Any) -> None:
    globals()[name] = value


@pytest.fixture(autouse=True)
def _globals_put_back() -> Iterator[None]:
    kept = {k: v for k, v in globals().items() if k.isupper() or k == "helper"}
    TABLE["scale"] = 2.0
    yield
    globals().update(kept)


@scenario("global number")
def _() -> Scenario:
    return lambda x: x * NUMBER, lambda: _set_global("NUMBER", 5.0)


@scenario("global tensor rebound")
def _() -> Scenario:
    return lambda x: x * TENSOR, lambda: _set_global("TENSOR", torch.full((3,), 5.0))


@scenario("global dict")
def _() -> Scenario:
    return lambda x: x * TABLE["scale"], lambda: TABLE.update(scale=5.0)


def helper(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def other_helper(x: torch.Tensor) -> torch.Tensor:
    return x * 5


def deep_helper(x: torch.Tensor) -> torch.Tensor:
    return helper(x) * NUMBER


@scenario("global function replaced")
def _() -> Scenario:
    return lambda x: helper(x), lambda: _set_global("helper", other_helper)


@scenario("global number of a helper's helper")
def _() -> Scenario:
    return lambda x: deep_helper(x), lambda: _set_global("NUMBER", 5.0)


@scenario("global read by name", may_refuse=True)
def _() -> Scenario:
    return lambda x: x * globals()["".join(("NUM", "BER"))], lambda: _set_global("NUMBER", 5.0)


@scenario("global read by eval", may_refuse=True)
def _() -> Scenario:
    return lambda x: eval("x * NUMBER", globals(), {"x": x}), lambda: _set_global("NUMBER", 5.0)


@scenario("variable of the environment")
def _() -> Scenario:
    os.environ["MICROTOME_TEST_SCALE"] = "2.0"
    fun = lambda x: x * float(os.environ["MICROTOME_TEST_SCALE"]) + float(os.getenv("MICROTOME_TEST_SCALE", "0"))
    return fun, lambda: os.environ.__setitem__("MICROTOME_TEST_SCALE", "5.0")


@scenario("attribute of a module made by hand")
def _() -> Scenario:
    settings: Any = types.ModuleType("settings")
    settings.scale = 2.0
    return lambda x: x * settings.scale, lambda: setattr(settings, "scale", 5.0)


@scenario("default argument rebound")
def _() -> Scenario:
    def fun(x: torch.Tensor, scale: Any = 2.0) -> torch.Tensor:
        return x * scale

    def change() -> None:
        fun.__defaults__ = (5.0,)

    return fun, change


@scenario("default argument changed in place")
def _() -> Scenario:
    def fun(x: torch.Tensor, w: Any = torch.ones(3), options: Any = {"a": 1.0}) -> torch.Tensor:  # noqa: B006, B008
        return x * w * options["a"]

    def change() -> None:
        fun.__defaults__[1]["a"] = 4.0
        fun.__defaults__[0].mul_(2)

    return fun, change


@scenario("keyword default rebound")
def _() -> Scenario:
    def fun(x: torch.Tensor, *, scale: Any = 2.0) -> torch.Tensor:
        return x * scale

    def change() -> None:
        fun.__kwdefaults__["scale"] = 5.0

    return fun, change


@scenario("attribute of the function itself")
def _() -> Scenario:
    def fun(x: torch.Tensor) -> torch.Tensor:
        return x * fun.scale

    fun.scale = 2.0
    return fun, lambda: setattr(fun, "scale", 5.0)


@scenario("code replaced")
def _() -> Scenario:
    def fun(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def change() -> None:
        fun.__code__ = other_helper.__code__

    return fun, change


@scenario("nested functions")
def _() -> Scenario:
    number = 2.0

    def fun(x: torch.Tensor) -> torch.Tensor:
        def inner(y: torch.Tensor) -> torch.Tensor:
            return (lambda z: z * number)(y)

        return inner(x)

    def change() -> None:
        nonlocal number
        number = 5.0

    return fun, change


@scenario("decorated function")
def _() -> Scenario:
    factor = 2.0

    def scaled(f: Fun) -> Fun:
        @functools.wraps(f)
        def wrapper(x: torch.Tensor) -> torch.Tensor:
            return f(x) * factor

        return wrapper

    def change() -> None:
        nonlocal factor
        factor = 5.0

    return scaled(lambda x: x + 1), change


@scenario("partial with a tensor")
def _() -> Scenario:
    w = torch.ones(3)
    return functools.partial(torch.mul, w), lambda: w.mul_(3)


@scenario("partial with a list")
def _() -> Scenario:
    scales = [2.0]

    def fun(scales: Any, x: torch.Tensor) -> torch.Tensor:
        return x * scales[0]

    return functools.partial(fun, scales), lambda: scales.__setitem__(0, 5.0)


@scenario("partial of a partial")
def _() -> Scenario:
    def fun(x: torch.Tensor, a: Any, b: Any) -> torch.Tensor:
        return x * a["k"] + b

    a = {"k": 2.0}
    return functools.partial(functools.partial(fun, a=a), b=1.0), lambda: a.update(k=5.0)


@scenario("cached function", may_refuse=True)
def _() -> Scenario:
    table = {"scale": 2.0}

    def fun(x: torch.Tensor) -> torch.Tensor:
        return x * read(1)

    read = functools.lru_cache(lambda key: table["scale"])

    def change() -> None:
        table["scale"] = 5.0
        read.cache_clear()

    return fun, change


@scenario("generator function")
def _() -> Scenario:
    scales = [1.0, 2.0]

    def parts(x: torch.Tensor) -> Iterator[torch.Tensor]:
        for s in scales:
            yield x * s

    def fun(x: torch.Tensor) -> torch.Tensor:
        return sum(parts(x), torch.zeros(()))

    return fun, lambda: scales.append(4.0)


# Containers

SEVERAL = {
    "list": lambda: ([2.0], lambda c: c[0], lambda c: c.__setitem__(0, 5.0)),
    "longer list": lambda: ([2.0], sum, lambda c: c.append(5.0)),
    "reordered list": lambda: ([2.0, 3.0], lambda c: c[0], lambda c: c.reverse()),
    "dict": lambda: ({"a": 2.0}, lambda c: c["a"], lambda c: c.update(a=5.0)),
    "dict order": lambda: ({"a": 2.0, "b": 3.0}, lambda c: next(iter(c.values())), lambda c: c.update(a=c.pop("a"))),
    "dict keys": lambda: ({2.0: 1.0}, lambda c: next(iter(c)), lambda c: (c.clear(), c.update({5.0: 1.0}))),
    "dict key of an equal number": lambda: (
        {1: 1.0},
        lambda c: 3.0 if isinstance(next(iter(c)), bool) else 2.0,
        lambda c: (c.clear(), c.update({True: 1.0})),
    ),
    "set": lambda: ({2.0}, sum, lambda c: (c.clear(), c.add(5.0))),
    "deque": lambda: (collections.deque([2.0]), lambda c: c[-1], lambda c: c.append(5.0)),
    "OrderedDict": lambda: (
        collections.OrderedDict(a=2.0, b=3.0),
        lambda c: next(iter(c.values())),
        lambda c: c.move_to_end("a"),
    ),
    "defaultdict": lambda: (collections.defaultdict(float), lambda c: c["a"] + 1, lambda c: c.update(a=5.0)),
    "Counter": lambda: (collections.Counter(a=2), lambda c: c["a"], lambda c: c.update(a=5)),
    "ChainMap": lambda: (collections.ChainMap({}, {"a": 2.0}), lambda c: c["a"], lambda c: c.update(a=5.0)),
    "UserDict": lambda: (collections.UserDict(a=2.0), lambda c: c["a"], lambda c: c.update(a=5.0)),
    "UserList": lambda: (collections.UserList([2.0]), lambda c: c[0], lambda c: c.insert(0, 5.0)),
    "nested": lambda: (
        {"a": [({"b": collections.deque([2.0])},)]},
        lambda c: c["a"][0][0]["b"][0],
        lambda c: c["a"][0][0]["b"].appendleft(5.0),
    ),
    "array.array": lambda: (array.array("d", [2.0]), lambda c: c[0], lambda c: c.__setitem__(0, 5.0)),
    "bytearray": lambda: (bytearray(b"\2"), lambda c: c[0], lambda c: c.__setitem__(0, 5)),
    "numpy array": lambda: (np.array([2.0]), lambda c: float(c[0]), lambda c: c.__setitem__(0, 5.0)),
    "object array": lambda: (
        np.array([[2.0], [3.0]], dtype=object)[:, 0],
        lambda c: c[0],
        lambda c: c.__setitem__(0, 5.0),
    ),
    "memoryview": lambda: (memoryview(bytearray(b"\2")), lambda c: c[0], lambda c: c.__setitem__(0, 5)),
    "mapping proxy": lambda: (
        types.MappingProxyType(TABLE),
        lambda c: c["scale"],
        lambda c: TABLE.update(scale=5.0),
    ),
    "context variable": lambda: (
        contextvars.ContextVar("scale", default=2.0),
        lambda c: c.get(),
        lambda c: c.set(5.0),
    ),
    "long list": lambda: ([2.0] * 10_001, lambda c: c[0], lambda c: c.__setitem__(0, 5.0)),
    "list of a list": lambda: ([[2.0]], lambda c: c[0][0], lambda c: c.__setitem__(0, [5.0])),
    "list of tensors": lambda: ([torch.ones(3)], lambda c: c[0], lambda c: c.__setitem__(0, torch.full((3,), 5.0))),
    "dict of tensors": lambda: ({"w": torch.ones(3)}, lambda c: c["w"], lambda c: c.update(w=torch.full((3,), 5.0))),
    "UserDict of tensors": lambda: (
        collections.UserDict(w=torch.ones(3)),
        lambda c: c["w"],
        lambda c: c.update(w=torch.full((3,), 5.0)),
    ),
    "dict with tensor keys": lambda: (
        {TENSOR: 2.0},
        lambda c: c[TENSOR],
        lambda c: c.update({TENSOR: 5.0}),
    ),
    "SimpleNamespace": lambda: (
        types.SimpleNamespace(a=2.0),
        lambda c: c.a,
        lambda c: setattr(c, "a", 5.0),
    ),
    "nested SimpleNamespace": lambda: (
        types.SimpleNamespace(b=types.SimpleNamespace(a=2.0)),
        lambda c: c.b.a,
        lambda c: setattr(c.b, "a", 5.0),
    ),
    "argparse.Namespace": lambda: (
        argparse.Namespace(a=2.0),
        lambda c: c.a,
        lambda c: setattr(c, "a", 5.0),
    ),
    "argparse.Namespace with a tensor": lambda: (
        argparse.Namespace(w=torch.ones(3)),
        lambda c: c.w,
        lambda c: setattr(c, "w", torch.full((3,), 5.0)),
    ),
    "weak reference": lambda: (
        [_Plain(2.0), _Plain(5.0)],
        lambda c: weakref.ref(c[0])().scale,
        lambda c: setattr(c[0], "scale", 5.0),
    ),
    "param groups of an optimizer": lambda: (
        torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=2.0),
        lambda c: c.param_groups[0]["lr"],
        lambda c: c.param_groups[0].update(lr=5.0),
    ),
    "state of an optimizer": lambda: (
        torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=2.0),
        lambda c: c.state["a"]["b"] if "a" in c.state else 2.0,
        lambda c: c.state["a"].update(b=5.0),
    ),
    "distribution rebound": lambda: (
        [torch.distributions.Normal(torch.ones(3), 1.0)],
        lambda c: c[0].mean,
        lambda c: c.__setitem__(0, torch.distributions.Normal(torch.full((3,), 5.0), 1.0)),
    ),
    "tensor of a distribution rebound": lambda: (
        torch.distributions.Normal(torch.ones(3), 1.0),
        lambda c: c.mean,
        lambda c: setattr(c, "loc", torch.full((3,), 5.0)),
    ),
    "generator of torch": lambda: (
        torch.Generator().manual_seed(2),
        lambda c: float(c.initial_seed()),
        lambda c: c.manual_seed(5),
    ),
}


class _Plain:
    def __init__(self, scale: float) -> None:
        self.scale = scale


def _add_container(name: str) -> None:
    @scenario(name)
    def _() -> Scenario:
        content, read, change = SEVERAL[name]()

        def fun(x: torch.Tensor) -> torch.Tensor:
            return x * read(content)

        return fun, lambda: change(content)


for _name in SEVERAL:
    _add_container(_name)


# Objects and classes


class Base:
    inherited = 2.0
    table: dict[str, float]

    def from_base(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.inherited


class Meta(type):
    @property
    def of_the_class(cls) -> float:
        return cls._hidden


class Thing(Base, metaclass=Meta):
    _hidden = 2.0
    shared = 2.0

    def __init__(self) -> None:
        self.number = 2.0
        self.w0 = torch.ones(3)
        self.w1 = torch.full((3,), 2.0)
        self.table = {"a": 2.0}
        self.child = Slotted(2.0)
        self._private = 2.0

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.number

    @property
    def double(self) -> float:
        return self._private * 2

    @functools.cached_property
    def slow(self) -> float:
        return self._private * 3

    @classmethod
    def of_class(cls, x: torch.Tensor) -> torch.Tensor:
        return x * cls.shared

    @staticmethod
    def static(x: torch.Tensor) -> torch.Tensor:
        return x * NUMBER

    def overridden(self, x: torch.Tensor) -> torch.Tensor:
        return super().from_base(x)

    def __getitem__(self, key: str) -> float:
        return self.table[key]

    def __matmul__(self, x: torch.Tensor) -> torch.Tensor:
        return x * self._private

    def __len__(self) -> int:
        return int(self.number)

    def __iter__(self) -> Iterator[float]:
        yield self.number

    def __float__(self) -> float:
        return self.number

    def __enter__(self) -> float:
        return self.number

    def __exit__(self, *error: object) -> None:
        pass


class Dynamic:
    """An attribute dictionary, as configuration libraries have them."""

    def __init__(self, **values: Any) -> None:
        object.__setattr__(self, "_values", values)

    def __getattr__(self, name: str) -> Any:
        try:
            return self._values[name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self._values[name] = value


class Careless(Dynamic):
    """For a name that it does not have it raises KeyError, where Python expects AttributeError."""

    def __getattr__(self, name: str) -> Any:
        return self._values[name]


class AttrDict(dict):  # type: ignore[type-arg]
    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__  # type: ignore[assignment]


class Slotted:
    __slots__ = ("_scale",)

    def __init__(self, scale: Any) -> None:
        self._scale = scale

    @property
    def scale(self) -> Any:
        return self._scale


class Computed:
    """A descriptor of the user's own."""

    def __get__(self, thing: Any, owner: Any) -> float:
        return 0.0 if thing is None else thing.store["v"]

    def __set__(self, thing: Any, value: float) -> None:
        thing.store["v"] = value


class Described:
    value = Computed()

    def __init__(self) -> None:
        self.store = {"v": 2.0}


class Kind(enum.Enum):
    ONE = 1.0
    TWO = 5.0


class Row(NamedTuple):
    scale: Any
    items: list[float]


@dataclasses.dataclass
class Config:
    scale: Any = 2.0
    kind: Kind = Kind.ONE
    items: list[float] = dataclasses.field(default_factory=lambda: [2.0])


@dataclasses.dataclass(frozen=True)
class Frozen:
    scale: float = 2.0


@dataclasses.dataclass(slots=True)
class SlottedConfig:
    scale: float = 2.0


class TupleOfMine(tuple):  # type: ignore[type-arg]
    scale: Any


class FloatOfMine(float):
    extra: float


OBJECTS: dict[str, tuple[Callable[[], Any], Callable[[Any, Any], Any], Callable[[Any], object]]] = {
    "attribute": (Thing, lambda t, x: x * t.number, lambda t: setattr(t, "number", 5.0)),
    "attribute deleted": (
        Thing,
        lambda t, x: x * getattr(t, "number", 7.0),
        lambda t: delattr(t, "number"),
    ),
    "attribute added": (Thing, lambda t, x: x * getattr(t, "more", 7.0), lambda t: setattr(t, "more", 5.0)),
    "hasattr": (Thing, lambda t, x: x * (3.0 if hasattr(t, "more") else 2.0), lambda t: setattr(t, "more", 5.0)),
    "attribute of an attribute": (Thing, lambda t, x: x * t.child.scale, lambda t: setattr(t.child, "_scale", 5.0)),
    "attribute named by a format": (
        Thing,
        lambda t, x: sum((x * getattr(t, f"w{i}") for i in range(2)), torch.zeros(())),
        lambda t: setattr(t, "w1", torch.full((3,), 7.0)),
    ),
    "attribute named by a format, in place": (
        Thing,
        lambda t, x: sum((x * getattr(t, f"w{i}") for i in range(2)), torch.zeros(())),
        lambda t: t.w1.mul_(3),
    ),
    "number named by a format": (
        Thing,
        lambda t, x: x * getattr(t, "".join(("num", "ber"))),
        lambda t: setattr(t, "number", 5.0),
    ),
    "attrgetter": (
        Thing,
        lambda t, x: x * operator.attrgetter("child._scale")(t),
        lambda t: setattr(t.child, "_scale", 5.0),
    ),
    "vars": (Thing, lambda t, x: x * vars(t)["".join(("num", "ber"))], lambda t: setattr(t, "number", 5.0)),
    "property": (Thing, lambda t, x: x * t.double, lambda t: setattr(t, "_private", 5.0)),
    "cached property": (
        Thing,
        lambda t, x: x * t.slow,
        lambda t: (setattr(t, "_private", 5.0), t.__dict__.pop("slow", None)),
    ),
    "class method": (Thing, lambda t, x: t.of_class(x), lambda t: setattr(type(t), "shared", 5.0)),
    "static method": (Thing, lambda t, x: t.static(x), lambda t: _set_global("NUMBER", 5.0)),
    "inherited attribute": (Thing, lambda t, x: t.overridden(x), lambda t: setattr(Base, "inherited", 5.0)),
    "inherited attribute shadowed": (Thing, lambda t, x: t.from_base(x), lambda t: setattr(t, "inherited", 5.0)),
    "property of the metaclass": (
        Thing,
        lambda t, x: x * type(t).of_the_class,
        lambda t: setattr(Thing, "_hidden", 5.0),
    ),
    "method replaced on the object": (
        Thing,
        lambda t, x: t.loss(x),
        lambda t: setattr(t, "loss", lambda x: x * 5),
    ),
    "method replaced on the class": (
        lambda: type("Fresh", (Thing,), {"loss": lambda self, x: x * 2, "__module__": __name__})(),
        lambda t, x: t.loss(x),
        lambda t: setattr(type(t), "loss", lambda self, x: x * 5),
    ),
    "class of the object replaced": (
        Thing,
        lambda t, x: t.loss(x),
        lambda t: setattr(t, "__class__", _OtherThing),
    ),
    "subscript": (Thing, lambda t, x: x * t["a"], lambda t: t.table.update(a=5.0)),
    "operator": (Thing, lambda t, x: t @ x, lambda t: setattr(t, "_private", 5.0)),
    "len": (Thing, lambda t, x: x * len(t), lambda t: setattr(t, "number", 5.0)),
    "iteration": (Thing, lambda t, x: x * sum(t), lambda t: setattr(t, "number", 5.0)),
    "float": (Thing, lambda t, x: x * float(t), lambda t: setattr(t, "number", 5.0)),
    "with": (Thing, lambda t, x: _entered(t, x), lambda t: setattr(t, "number", 5.0)),
    "bound method of an attribute": (Thing, lambda t, x: t.table.get("a") * x, lambda t: t.table.update(a=5.0)),
    "dynamic attribute": (lambda: Dynamic(scale=2.0), lambda t, x: x * t.scale, lambda t: setattr(t, "scale", 5.0)),
    "dynamic attribute tensor": (
        lambda: Dynamic(w=torch.ones(3)),
        lambda t, x: x * t.w,
        lambda t: setattr(t, "w", torch.full((3,), 5.0)),
    ),
    "dynamic attribute that is looked up in a dict": (
        lambda: Careless(scale=2.0),
        lambda t, x: x * t.scale,
        lambda t: setattr(t, "scale", 5.0),
    ),
    "attribute dict": (lambda: AttrDict(scale=2.0), lambda t, x: x * t.scale, lambda t: setattr(t, "scale", 5.0)),
    "slot": (lambda: Slotted(2.0), lambda t, x: x * t._scale, lambda t: setattr(t, "_scale", 5.0)),
    "slot behind a property": (lambda: Slotted(2.0), lambda t, x: x * t.scale, lambda t: setattr(t, "_scale", 5.0)),
    "slot with a tensor": (
        lambda: Slotted(torch.ones(3)),
        lambda t, x: x * t.scale,
        lambda t: setattr(t, "_scale", torch.full((3,), 5.0)),
    ),
    "descriptor": (Described, lambda t, x: x * t.value, lambda t: setattr(t, "value", 5.0)),
    "dataclass": (Config, lambda t, x: x * t.scale, lambda t: setattr(t, "scale", 5.0)),
    "dataclass, enumeration": (Config, lambda t, x: x * t.kind.value, lambda t: setattr(t, "kind", Kind.TWO)),
    "dataclass, list": (Config, lambda t, x: x * t.items[0], lambda t: t.items.insert(0, 5.0)),
    "dataclass, asdict": (Config, lambda t, x: x * dataclasses.asdict(t)["scale"], lambda t: setattr(t, "scale", 5.0)),
    "dataclass, fields": (
        Config,
        lambda t, x: x * next(getattr(t, f.name) for f in dataclasses.fields(t)),
        lambda t: setattr(t, "scale", 5.0),
    ),
    "dataclass, replace": (
        Config,
        lambda t, x: x * dataclasses.replace(t, kind=Kind.TWO).scale,
        lambda t: setattr(t, "scale", 5.0),
    ),
    "frozen dataclass": (
        lambda: [Frozen()],
        lambda t, x: x * t[0].scale,
        lambda t: t.__setitem__(0, Frozen(5.0)),
    ),
    "dataclass with slots": (SlottedConfig, lambda t, x: x * t.scale, lambda t: setattr(t, "scale", 5.0)),
    "named tuple": (lambda: Row(2.0, [2.0]), lambda t, x: x * t.items[0], lambda t: t.items.insert(0, 5.0)),
    "attribute of a tuple of the user's": (
        lambda: having(TupleOfMine((1.0,)), scale=2.0),
        lambda t, x: x * t.scale,
        lambda t: setattr(t, "scale", 5.0),
    ),
    "attribute of a float of the user's": (
        lambda: having(FloatOfMine(2.0), extra=2.0),
        lambda t, x: x * t.extra,
        lambda t: setattr(t, "extra", 5.0),
    ),
    "copy": (Thing, lambda t, x: x * copy.copy(t).number, lambda t: setattr(t, "number", 5.0)),
    "deep copy": (Thing, lambda t, x: x * copy.deepcopy(t.table)["a"], lambda t: t.table.update(a=5.0)),
    "class instantiated inside": (
        lambda: type("Made", (), {"scale": 2.0, "__module__": __name__}),
        lambda t, x: x * t().scale,
        lambda t: setattr(t, "scale", 5.0),
    ),
    "constructor reads a global": (lambda: _Reads, lambda t, x: x * t().scale, lambda t: _set_global("NUMBER", 5.0)),
    "attribute of an enumeration member": (
        lambda: having(Kind.ONE, weight=2.0),
        lambda t, x: x * t.weight,
        lambda t: setattr(t, "weight", 5.0),
    ),
}


class _OtherThing(Thing):
    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.number * 3


class _Reads:
    def __init__(self) -> None:
        self.scale = NUMBER


def _entered(t: Any, x: torch.Tensor) -> torch.Tensor:
    with t as number:
        return x * number


@pytest.fixture(autouse=True)
def _classes_put_back() -> Iterator[None]:
    yield
    Thing.shared, Thing._hidden, Base.inherited = 2.0, 2.0, 2.0


def _add_object(name: str) -> None:
    @scenario(name)
    def _() -> Scenario:
        make, use, change = OBJECTS[name]
        thing = make()

        def fun(x: torch.Tensor) -> torch.Tensor:
            return use(thing, x)

        return fun, lambda: change(thing)


for _name in OBJECTS:
    _add_object(_name)


@scenario("object with __call__")
def _() -> Scenario:
    class Callable_:
        def __init__(self) -> None:
            self.scale = 2.0

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

    thing = Callable_()
    return thing, lambda: setattr(thing, "scale", 5.0)


@scenario("bound method")
def _() -> Scenario:
    thing = Thing()
    return thing.loss, lambda: setattr(thing, "number", 5.0)


@scenario("bound class method")
def _() -> Scenario:
    return Thing.of_class, lambda: setattr(Thing, "shared", 5.0)


@scenario("method descriptor of torch")
def _() -> Scenario:
    w = torch.ones(3)
    return w.mul, lambda: w.mul_(4)


@scenario("partial method")
def _() -> Scenario:
    class Holder:
        def base(self, scale: list[float], x: torch.Tensor) -> torch.Tensor:
            return x * scale[0]

        scales = [2.0]  # noqa: RUF012
        loss = functools.partialmethod(base, scales)

    return Holder().loss, lambda: Holder.scales.__setitem__(0, 5.0)


# Python modules


def _module_file(folder: pathlib.Path, name: str, text: str) -> Any:
    (folder / f"{name}.py").write_text(text)
    importlib.invalidate_caches()
    return importlib.import_module(name)


@pytest.fixture
def modules(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(tmp_path))
    settings = _module_file(tmp_path, "settings_of_a_user", "import torch\nscale = 2.0\nw = torch.ones(3)\n")
    text = (
        "import settings_of_a_user as settings\nfrom settings_of_a_user import scale\n"
        "def by_attribute(x):\n    return x * settings.scale\n"
        "def by_name(x):\n    return x * scale\n"
        "def inside(x):\n    from settings_of_a_user import scale as s\n    return x * s\n"
        "def whole(x):\n    import settings_of_a_user\n    return x * settings_of_a_user.scale\n"
        "def tensor(x):\n    return x * settings.w\n"
    )
    yield settings, _module_file(tmp_path, "model_of_a_user", text)
    for name in ("settings_of_a_user", "model_of_a_user"):
        sys.modules.pop(name, None)


IMPORTS = {
    "by_attribute": lambda settings, model: setattr(settings, "scale", 5.0),
    "by_name": lambda settings, model: setattr(model, "scale", 5.0),
    "inside": lambda settings, model: setattr(settings, "scale", 5.0),
    "whole": lambda settings, model: setattr(settings, "scale", 5.0),
    "tensor": lambda settings, model: setattr(settings, "w", torch.full((3,), 5.0)),
}


@pytest.mark.parametrize("name", IMPORTS)
def test_attributes_of_python_modules_are_never_stale(name: str, modules: Any) -> None:
    error, ran = _outcome(getattr(modules[1], name), lambda: IMPORTS[name](*modules))
    if error is not None:
        raise error
    assert ran == [0, 0]


# Torch modules


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("b", torch.ones(3))
        self.register_buffer("c", torch.full((3,), 2.0), persistent=False)
        self.scales = nn.ParameterList([torch.ones(3), torch.full((3,), 2.0)])
        self.named = nn.ParameterDict({"a": torch.ones(3)})
        self.options = {"k": 1.0}
        self.plain = torch.ones(3)
        self.config = types.SimpleNamespace(scale=1.0)
        self.number = 1.0
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x) * self.b + self.c
        y = y * self.scales[0] + self.scales[1] * self.named["a"]
        return self.drop(y) * self.options["k"] * self.plain * self.config.scale * self.number


def _exchange_buffers(m: Any) -> None:
    m.b, m.c = m.c, m.b


def _hook(m: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
    return out * 3


def _in_double(m: nn.Module, args: Any) -> Any:
    return (args[0].double(),)


class _Double(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


MODULE_CHANGES: dict[str, Callable[[Any], object]] = {
    "parameter in place": lambda m: m.first.weight.data.mul_(3),
    "parameter replaced": lambda m: setattr(m.first, "weight", nn.Parameter(torch.ones(3, 3))),
    "parameter data assigned": lambda m: setattr(m.first.weight, "data", torch.ones(3, 3)),
    "parameter removed": lambda m: m.first.register_parameter("bias", None),
    "buffer in place": lambda m: m.b.add_(1),
    "buffer replaced": lambda m: setattr(m, "b", torch.full((3,), 4.0)),
    "buffers exchanged": _exchange_buffers,
    "buffer of another shape": lambda m: setattr(m, "b", torch.full((1,), 4.0)),
    "parameter list": lambda m: m.scales.__setitem__(0, nn.Parameter(torch.full((3,), 4.0))),
    "parameter dict": lambda m: m.named.update({"a": nn.Parameter(torch.full((3,), 4.0))}),
    "dict": lambda m: m.options.update(k=3.0),
    "plain tensor": lambda m: setattr(m, "plain", torch.full((3,), 4.0)),
    "config": lambda m: setattr(m.config, "scale", 4.0),
    "number": lambda m: setattr(m, "number", 4.0),
    "submodule replaced": lambda m: setattr(m, "first", nn.Linear(3, 3)),
    "submodule of another kind": lambda m: setattr(m, "drop", _Double()),
    "state dict": lambda m: m.load_state_dict({k: v + 1 for k, v in m.state_dict().items()}),
    "state dict assigned": lambda m: m.load_state_dict({k: v + 1 for k, v in m.state_dict().items()}, assign=True),
    "parameters and buffers in double": lambda m: (m.double(), m.register_forward_pre_hook(_in_double)),
    "to bfloat16": lambda m: m.first.to(torch.bfloat16).to(torch.float32),
    "forward hook added": lambda m: m.first.register_forward_hook(_hook),
    "forward pre-hook added": lambda m: m.first.register_forward_pre_hook(lambda m, args: (args[0] * 2,)),
    "forward hook with keywords": lambda m: m.first.register_forward_hook(
        lambda m, args, kwargs, out: out * 2, with_kwargs=True
    ),
    "forward replaced": lambda m: setattr(m, "forward", lambda x: x * 9),
    "forward of a part replaced": lambda m: setattr(m.first, "forward", lambda x: x * 9),
    "parametrisation": lambda m: nn.utils.parametrize.register_parametrization(m.first, "weight", _Double()),
    "weight norm": lambda m: (
        nn.utils.parametrizations.weight_norm(m.first),
        m.first.parametrizations.weight.original0.data.mul_(2),
    ),
    "spectral norm": lambda m: nn.utils.parametrizations.spectral_norm(m.first).eval(),
    "pruned": lambda m: prune.l1_unstructured(m.first, "weight", 4),
    "class patched": lambda m: setattr(m, "__class__", _LoudNet),
    "every tensor swapped": lambda m: [
        torch.utils.swap_tensors(p, nn.Parameter(p.detach() + 1)) for p in m.parameters()
    ],
}


class _LoudNet(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 3


def _add_module(name: str) -> None:
    @scenario(f"module: {name}")
    def _() -> Scenario:
        m = Net().requires_grad_(False)  # no backward pass to compile
        return m, lambda: MODULE_CHANGES[name](m)


for _name in MODULE_CHANGES:
    _add_module(_name)


# torch's own state


@scenario("grad mode read inside")
def _() -> Scenario:
    return lambda x: x * (2 if torch.is_grad_enabled() else 3), lambda: torch.set_grad_enabled(False)


@scenario("default dtype")
def _() -> Scenario:
    return lambda x: x * torch.ones(3) + torch.full((3,), 1 / 3), lambda: torch.set_default_dtype(torch.float64)


@scenario("default dtype read inside")
def _() -> Scenario:
    return (
        lambda x: x * (2 if torch.get_default_dtype() == torch.float32 else 3),
        lambda: torch.set_default_dtype(torch.float64),
    )


@scenario("deterministic algorithms read inside", may_refuse=True)
def _() -> Scenario:
    return (
        lambda x: x * (2 if torch.are_deterministic_algorithms_enabled() else 3),
        lambda: torch.use_deterministic_algorithms(True),
    )


@scenario("matrix product precision read inside", may_refuse=True)
def _() -> Scenario:
    return (
        lambda x: x * (2 if torch.get_float32_matmul_precision() == "highest" else 3),
        lambda: torch.set_float32_matmul_precision("high"),
    )


@scenario("seed read inside", may_refuse=True)
def _() -> Scenario:
    return lambda x: x * (torch.initial_seed() % 7), lambda: torch.manual_seed(3)


@pytest.fixture(autouse=True)
def _torch_put_back() -> Iterator[None]:
    grad, dtype = torch.is_grad_enabled(), torch.get_default_dtype()
    yield
    torch.set_grad_enabled(grad)
    torch.set_default_dtype(dtype)
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision("highest")


# The tests over all scenarios


def _equal(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected)
    assert got.requires_grad == expected.requires_grad


def _outcome(fun: Any, change: Callable[[], object], settles: bool = False) -> tuple[Exception | None, list[int]]:
    """What went wrong, and how many bodies ran in a second call before and in a second call after the change.

    ``settles``: the first call changes what the second one reads, so that it is the third one that traces nothing.
    """
    x, call, ran = _x(), through(fun), []
    try:
        for _ in range(2 if settles else 1):
            _equal(call(x), fun(x))
        ran.append(bodies_run(call, x))
        before = fun(x).detach()
        change()
        after = fun(x)
        assert after.shape != before.shape or after.dtype != before.dtype or not torch.equal(after, before)
        for _ in range(2 if settles else 1):
            _equal(call(x), after)
        ran.append(bodies_run(call, x))
        _equal(through(fun)(x), after)
    except (AssertionError, TypeError, ValueError, RuntimeError, KeyError, AttributeError) as error:
        return error, ran
    return None, ran


_SLOW_MODULES = (
    *("parameter list", "parameter replaced", "parameter dict", "parameters and buffers in double", "weight norm"),
    *("spectral norm", "submodule of another kind", "forward hook with keywords", "number", "config", "dict"),
    *("forward hook added", "class patched", "parameter in place", "buffer replaced", "buffer of another shape"),
    *("state dict assigned", "pruned", "forward of a part replaced", "parameter removed", "every tensor swapped"),
)
_SLOW = (  # close to another one that runs always
    *(
        "closure tensor of another shape",
        "closure tensor by data of another shape",
        "two names for one tensor that part",
    ),
    *(
        "default argument rebound",
        "keyword default rebound",
        "partial of a partial",
        "bound class method",
        "class method",
    ),
    *("list of a list", "longer list", "dict order", "dict keys", "OrderedDict", "Counter", "nested SimpleNamespace"),
    *("argparse.Namespace", "UserList", "UserDict", "global dict", "global number", "deep copy", "static method"),
    *("attribute of an attribute", "bound method of an attribute", "slot behind a property", "inherited attribute"),
    *("dataclass with slots", "dataclass, replace", "dataclass, list", "frozen dataclass", "state of an optimizer"),
    *("number named by a format", "attribute of a float of the user's", "operator", "iteration", "float", "copy"),
    *("dataclass, fields", "dataclass, asdict", "attribute named by a format, in place", "attribute dict"),
    *("closure tensor by set_", "closure tensor through a view", "closure tensor swapped", "attribute added"),
    *("global function replaced", "attrgetter", "property of the metaclass", "method descriptor of torch", "long list"),
    *(
        "dynamic attribute tensor",
        "dynamic attribute that is looked up in a dict",
        "object array",
        "partial with a list",
    ),
    *("default dtype", "attribute of an enumeration member", "attribute of a tuple of the user's"),
    "matrix product precision read inside",
    *(f"module: {change}" for change in _SLOW_MODULES),
)


@pytest.mark.parametrize("name", marked(SCENARIOS, slow=_SLOW))
def test_what_a_function_reads_is_never_stale_and_a_second_call_runs_none_of_its_code(name: str) -> None:
    error, ran = _outcome(*SCENARIOS[name](), settles=name in SETTLING)
    if error is None:
        assert ran == [0, 0]
    elif not (name in REFUSABLE and isinstance(error, (TypeError, ValueError, RuntimeError))):
        raise error


# Python state that the function itself changes

STATES: dict[str, Callable[[], tuple[Any, Callable[[], Any], str]]] = {}


def state(name: str) -> Callable[[Any], Any]:
    def add(make: Any) -> Any:
        assert name not in STATES
        STATES[name] = make
        return make

    return add


def _attribute_state(make: Callable[[], Any], read: Callable[[Any], Any], word: str) -> Any:
    def build() -> tuple[Any, Callable[[], Any], str]:
        thing = make()
        return thing, lambda: read(thing), word

    return build


class _Stateful(nn.Module):
    """Each subclass changes itself in ``step``, and returns what to multiply by."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Any = 0
        self.log: list[Any] = []
        self.cache: Any = None
        self.seen: dict[str, Any] = {"n": 0}
        self.inner = types.SimpleNamespace(count=0)
        self.average: Any = torch.zeros(3)
        self.slotted = Slotted(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.step(x)

    def step(self, x: torch.Tensor) -> Any:
        raise NotImplementedError


class _Counts(_Stateful):
    def step(self, x: torch.Tensor) -> Any:
        self.count += 1
        return self.count


class _CountsInTraining(_Stateful):
    def step(self, x: torch.Tensor) -> Any:
        if self.training:
            self.count = self.count + 1
        return self.count


class _CountsUnread(_Stateful):
    def step(self, x: torch.Tensor) -> Any:
        self.count += 1
        return 2


class _CountsByName(_Stateful):
    def step(self, x: torch.Tensor) -> Any:
        name = "".join(("co", "unt"))
        setattr(self, name, getattr(self, name) + 1)
        return getattr(self, name)


class _CountsBeside(_Stateful):
    def step(self, x: torch.Tensor) -> Any:
        self.inner.count += 1
        return self.inner.count


class _CountsInASlot(_Stateful):
    def step(self, x: torch.Tensor) -> Any:
        self.slotted._scale += 1
        return self.slotted._scale


class _CountsInADict(_Stateful):
    def step(self, x: torch.Tensor) -> Any:
        self.seen["n"] += 1
        return self.seen["n"]


class _CountsOnTheClass(_Stateful):
    total = 0

    def step(self, x: torch.Tensor) -> Any:
        self.counts()
        return self.total

    @classmethod
    def counts(cls) -> None:
        cls.total += 1


class _CountsItsLog(_Stateful):
    def step(self, x: torch.Tensor) -> Any:
        self.log.append(1)
        return len(self.log)


class _PopsItsLog(_Stateful):
    def __init__(self) -> None:
        super().__init__()
        self.log = [4, 3, 2, 1]

    def step(self, x: torch.Tensor) -> Any:
        return self.log.pop()


class _Toggles(_Stateful):
    def step(self, x: torch.Tensor) -> Any:
        self.count = not self.count
        return 2 if self.count else 3


class _Caches(_Stateful):
    def step(self, x: torch.Tensor) -> Any:
        if self.cache is None:
            self.cache = x.detach() * 2
        return self.cache


class _CachesAConstant(_Stateful):
    def step(self, x: torch.Tensor) -> Any:
        if self.cache is None:
            self.cache = torch.arange(3.0)
        return self.cache


class _CachesInADict(_Stateful):
    def step(self, x: torch.Tensor) -> Any:
        if "w" not in self.seen:
            self.seen["w"] = x.detach() * 2
        return self.seen["w"]


class _KeepsActivations(_Stateful):
    def step(self, x: torch.Tensor) -> Any:
        self.log.append(x.detach() * 2)
        return 2


class _KeepsTheLastActivation(_Stateful):
    def step(self, x: torch.Tensor) -> Any:
        self.seen["last"] = x.detach() * 2
        return 2


class _KeepsItBeside(_Stateful):
    def step(self, x: torch.Tensor) -> Any:
        self.inner.last = x.detach() * 2
        return 2


class _Averages(_Stateful):
    def step(self, x: torch.Tensor) -> Any:
        self.average = self.average * 0.5 + x.detach()
        return self.average


class _AveragesInPlace(_Stateful):
    def step(self, x: torch.Tensor) -> Any:
        self.average.mul_(0.5).add_(x.detach())
        return self.average


class _AveragesByData(_Stateful):
    def step(self, x: torch.Tensor) -> Any:
        self.average.data = self.average.data * 0.5 + x.detach()
        return self.average


class _AveragesInAList(_Stateful):
    def __init__(self) -> None:
        super().__init__()
        self.log = [torch.zeros(3)]

    def step(self, x: torch.Tensor) -> Any:
        self.log[0] = self.log[0] * 0.5 + x.detach()
        return self.log[0]


class _ExchangesBuffers(_Stateful):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("b", torch.ones(3))
        self.register_buffer("c", torch.full((3,), 2.0))

    def step(self, x: torch.Tensor) -> Any:
        self.b, self.c = self.c, self.b
        return self.b


class _RotatesBuffers(_Stateful):
    def __init__(self) -> None:
        super().__init__()
        for i in range(3):
            self.register_buffer(f"b{i}", torch.full((3,), i + 1.0))

    def step(self, x: torch.Tensor) -> Any:
        self.b0, self.b1, self.b2 = self.b1, self.b2, self.b0 + 1
        return self.b0


class _GrowsABuffer(_Stateful):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("b", torch.ones(1))

    def step(self, x: torch.Tensor) -> Any:
        self.b = torch.cat([self.b, torch.ones(1)])
        return self.b.sum()


class _FreezesItself(_Stateful):
    def step(self, x: torch.Tensor) -> Any:
        was = self.training
        self.eval()
        return 2 if was else 3


_STATEFUL: dict[str, tuple[type[_Stateful], Callable[[Any], Any], str]] = {
    "attribute": (_Counts, lambda m: m.count, "count"),
    "attribute in training mode": (_CountsInTraining, lambda m: m.count, "count"),
    "attribute that is not read": (_CountsUnread, lambda m: m.count, "count"),
    "attribute by name": (_CountsByName, lambda m: m.count, "count"),
    "attribute of a namespace": (_CountsBeside, lambda m: m.inner.count, "count"),
    "slot": (_CountsInASlot, lambda m: m.slotted.scale, "_scale|slotted"),
    "dict": (_CountsInADict, lambda m: m.seen["n"], "seen"),
    "class attribute": (_CountsOnTheClass, lambda m: m.total, "total"),
    "length of a list": (_CountsItsLog, lambda m: list(m.log), "log"),
    "list that shrinks": (_PopsItsLog, lambda m: list(m.log), "log"),
    "toggle": (_Toggles, lambda m: m.count, "count"),
    "cached tensor": (_Caches, lambda m: m.cache, "cache"),
    "cached constant": (_CachesAConstant, lambda m: m.cache, "cache"),
    "tensor cached in a dict": (_CachesInADict, lambda m: dict(m.seen), "seen"),
    "list of activations": (_KeepsActivations, lambda m: list(m.log), "log"),
    "last activation in a dict": (_KeepsTheLastActivation, lambda m: dict(m.seen), "seen"),
    "last activation in a namespace": (_KeepsItBeside, lambda m: dict(vars(m.inner)), "last"),
    "average": (_Averages, lambda m: m.average, "average"),
    "average in place": (_AveragesInPlace, lambda m: m.average, "average"),
    "average by data": (_AveragesByData, lambda m: m.average, "average|data"),
    "average in a list": (_AveragesInAList, lambda m: list(m.log), "log"),
    "buffers exchanged": (_ExchangesBuffers, lambda m: [m.b, m.c], r"\bb\b|\bc\b"),
    "buffers rotated": (_RotatesBuffers, lambda m: [m.b0, m.b1, m.b2], "b0|b1|b2"),
    "growing buffer": (_GrowsABuffer, lambda m: m.b, r"\bb\b"),
    "training flag": (_FreezesItself, lambda m: m.training, "training|eval"),
}

for _name, (_kind, _read, _word) in _STATEFUL.items():
    state(_name)(_attribute_state(_kind, _read, _word))


@state("nonlocal")
def _() -> Any:
    count = 0

    def fun(x: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += 1
        return x * count

    return fun, lambda: count, "count"


@state("nonlocal tensor")
def _() -> Any:
    total: Any = torch.zeros(3)

    def fun(x: torch.Tensor) -> torch.Tensor:
        nonlocal total
        total = total + x
        return total * 2

    return fun, lambda: total, "total"


@state("global")
def _() -> Any:
    _set_global("NUMBER", 0)

    def fun(x: torch.Tensor) -> torch.Tensor:
        global NUMBER
        NUMBER += 1
        return x * NUMBER

    return fun, lambda: NUMBER, "NUMBER"


@state("list item")
def _() -> Any:
    count = [0]

    def fun(x: torch.Tensor) -> torch.Tensor:
        count[0] += 1
        return x * count[0]

    return fun, lambda: list(count), "count"


@state("attribute of the function")
def _() -> Any:
    def fun(x: torch.Tensor) -> torch.Tensor:
        fun.count += 1
        return x * fun.count

    fun.count = 0
    return fun, lambda: fun.count, "count"


@state("itertools.count")
def _() -> Any:
    numbers = itertools.count(1)

    def fun(x: torch.Tensor) -> torch.Tensor:
        return x * next(numbers)

    return fun, lambda: repr(numbers), "numbers"


@state("generator")
def _() -> Any:
    numbers = (i for i in range(1, 10))

    def fun(x: torch.Tensor) -> torch.Tensor:
        return x * next(numbers)

    return fun, lambda: 0, "numbers"


@pytest.mark.parametrize("kind", ["captured", "in a list", "attribute", "global"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: (i for i in range(9)),
        lambda: iter([1, 2, 3]),
        lambda: zip([1, 2], [3, 4], strict=True),
        lambda: map(abs, [1, 2]),
        lambda: enumerate([1, 2]),
        lambda: itertools.cycle([1, 2]),
        lambda: reversed([1, 2]),
    ],
    ids=["generator", "list", "zip", "map", "enumerate", "cycle", "reversed"],
)
def test_an_iterator_is_refused_by_name_and_not_moved(make: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = make()
    holder = types.SimpleNamespace(stream=stream)
    streams = [stream]
    monkeypatch.setitem(globals(), "STREAM", stream)
    fun = {
        "captured": lambda x: x * len(str(next(stream))),
        "in a list": lambda x: x * len(str(next(streams[0]))),
        "attribute": lambda x: x * len(str(next(holder.stream))),
        "global": lambda x: x * len(str(next(STREAM))),  # type: ignore[name-defined]  # noqa: F821
    }[kind]
    with pytest.raises(TypeError, match=r"(?i)stream.* is an iterator"):
        through(fun)(_x())
    assert next(stream) == next(make())


@state("deque that rotates")
def _() -> Any:
    numbers = collections.deque([1, 2, 3])

    def fun(x: torch.Tensor) -> torch.Tensor:
        numbers.rotate(1)
        return x * numbers[0]

    return fun, lambda: list(numbers), "numbers"


@state("set")
def _() -> Any:
    seen: set[int] = set()

    def fun(x: torch.Tensor) -> torch.Tensor:
        seen.add(len(seen))
        return x * len(seen)

    return fun, lambda: set(seen), "seen"


@state("forward hook that keeps what it sees")
def _() -> Any:
    m, seen = nn.Linear(3, 3, bias=False), {}
    with torch.no_grad():
        m.weight.copy_(torch.eye(3))
    m.register_forward_hook(lambda m, args, out: seen.update(out=out.detach()))
    return m, lambda: dict(seen), "seen"


def _draws(numbers: Any) -> Any:
    def fun(x: torch.Tensor) -> torch.Tensor:
        return x * float(numbers.normal())

    return fun, lambda: str(numbers.bit_generator.state if hasattr(numbers, "bit_generator") else numbers.get_state())


@state("running random generator of NumPy")
def _() -> Any:
    return (*_draws(np.random.default_rng(0)), "generator")


@state("running random state of NumPy")
def _() -> Any:
    return (*_draws(np.random.RandomState(0)), "generator")


@state("running random generator of Python")
def _() -> Any:
    numbers = random.Random(0)

    def fun(x: torch.Tensor) -> torch.Tensor:
        return x * numbers.random()

    return fun, lambda: numbers.getstate(), "generator"


def _same_state(one: Any, two: Any) -> None:
    if isinstance(two, torch.Tensor):
        assert type(one) is type(two), f"{type(one)} was left behind"
        torch.testing.assert_close(one, two)
    elif isinstance(two, dict):
        assert one.keys() == two.keys()
        for key in two:
            _same_state(one[key], two[key])
    elif isinstance(two, list):
        assert len(one) == len(two)
        for a, b in zip(one, two, strict=True):
            _same_state(a, b)
    else:
        assert one == two


def _copied(value: Any) -> Any:
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.detach().clone(), value)


_NEAR_STATES = (
    *("attribute that is not read", "attribute by name", "attribute of a namespace", "list of activations"),
    *("last activation in a namespace", "cached constant", "average by data", "average in a list", "toggle"),
    *("growing buffer", "buffers rotated", "deque that rotates"),
)


@pytest.mark.parametrize("name", marked(STATES, slow=_NEAR_STATES))
def test_state_that_a_function_changes_ends_as_in_torch_or_is_refused_by_name(name: str) -> None:
    xs, eager = [_x() + i for i in range(3)], []
    fun, read, _ = STATES[name]()
    start = _copied(read())
    for x in xs:
        eager.append((fun(x).detach(), _copied(read())))
    _CountsOnTheClass.total = 0
    fun, read, word = STATES[name]()
    call, ended = through(fun), start
    for x, (expected, after) in zip(xs, eager, strict=True):
        try:
            got = call(x)
        except (TypeError, ValueError, RuntimeError) as error:
            assert re.search(word, str(error)), str(error)  # noqa: PT017
            _same_state(read(), ended)  # as if the call had not been made
            return
        torch.testing.assert_close(got.detach(), expected)
        _same_state(read(), after)
        ended = after
    _CountsOnTheClass.total = 0


CLOCKS: dict[str, Callable[[], float]] = {
    "time.time": lambda: time.time() % 1,
    "perf_counter_ns": lambda: float(time.perf_counter_ns() % 10**6),
    "datetime": lambda: float(datetime.datetime.now(datetime.UTC).microsecond),
    "os.urandom": lambda: float(os.urandom(1)[0] + os.urandom(1)[0] * 256),
    "uuid": lambda: float(uuid.uuid4().int % 10**6),
    "secrets": lambda: float(secrets.randbelow(10**6)),
    "system random": lambda: random.SystemRandom().random(),
}


@pytest.mark.parametrize("name", CLOCKS)
def test_clocks_and_the_randomness_of_the_system_are_refused_or_read_at_each_call(name: str) -> None:
    read = CLOCKS[name]
    call = through(lambda x: x * read())
    with contextlib.suppress(TypeError):
        assert len({call(_x())[0].item() for _ in range(4)}) > 1


# Arguments that are no tensors


def _scale_of(x: torch.Tensor, thing: Any) -> torch.Tensor:
    return x * (thing if isinstance(thing, (int, float)) else thing.scale)


ARGUMENTS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Any]] = {
    "int": (lambda: 2, lambda a: 3, _scale_of),
    "float": (lambda: 2.0, lambda a: 3.0, _scale_of),
    "bool for an int": (lambda: 1, lambda a: True, lambda x, a: x * (5 if isinstance(a, bool) else 2)),
    "float for an int": (lambda: 2, lambda a: 2.0, lambda x, a: x * (5 if isinstance(a, float) else 2)),
    "minus zero": (lambda: 0.0, lambda a: -0.0, lambda x, a: x * math.copysign(2.0, a)),
    "string": (lambda: "a", lambda a: "b", lambda x, a: x * (5 if a == "b" else 2)),
    "None": (lambda: None, lambda a: 3, lambda x, a: x * (5 if a is None else 2)),
    "dtype": (lambda: torch.float32, lambda a: torch.float64, lambda x, a: x.to(a)),
    "slice": (lambda: slice(0, 2), lambda a: slice(1, 3), lambda x, a: x[a]),
    "range": (lambda: range(2), lambda a: range(3), lambda x, a: x * sum(a)),
    "enumeration": (lambda: Kind.ONE, lambda a: Kind.TWO, lambda x, a: x * a.value),
    "complex": (lambda: 2j, lambda a: 3j, lambda x, a: x * a.imag),
    "set": (lambda: {2}, lambda a: {3}, lambda x, a: x * sum(a)),
    "set in place": (lambda: {2}, lambda a: (a.add(3), a)[1], lambda x, a: x * sum(a)),
    "frozen set": (lambda: frozenset({2}), lambda a: frozenset({3}), lambda x, a: x * sum(a)),
    "bytes": (lambda: b"a", lambda a: b"b", lambda x, a: x * a[0]),
    "list in place": (lambda: [2.0], lambda a: (a.append(3.0), a)[1], lambda x, a: x * sum(a)),
    "dict in place": (lambda: {"k": 2.0}, lambda a: (a.update(k=3.0), a)[1], lambda x, a: x * a["k"]),
    "function": (lambda: torch.sin, lambda a: torch.cos, lambda x, a: a(x)),
    "lambda": (lambda: lambda x: x * 2, lambda a: lambda x: x * 3, lambda x, a: a(x)),
    "lambda with a number": (lambda: _multiplier(2.0), lambda a: _multiplier(3.0), lambda x, a: a(x)),
    "lambda with a tensor": (
        lambda: _multiplier(torch.ones(3)),
        lambda a: _multiplier(torch.full((3,), 3.0)),
        lambda x, a: a(x),
    ),
    "module": (lambda: nn.Linear(3, 3), lambda a: nn.Linear(3, 3), lambda x, a: a(x)),
    "module in place": (lambda: nn.Linear(3, 3), lambda a: (a.weight.data.mul_(2), a)[1], lambda x, a: a(x)),
    "module to eval": (
        lambda: nn.Sequential(_Loud(), nn.Identity()),
        lambda a: a.eval(),
        lambda x, a: a(x),
    ),
    "object": (lambda: _Plain(2.0), lambda a: _Plain(3.0), _scale_of),
    "object in place": (lambda: _Plain(2.0), lambda a: (setattr(a, "scale", 3.0), a)[1], _scale_of),
    "object with a tensor": (lambda: _Plain(torch.ones(3)), lambda a: _Plain(torch.full((3,), 3.0)), _scale_of),
    "object with a tensor, in place": (lambda: _Plain(torch.ones(3)), lambda a: (a.scale.mul_(3), a)[1], _scale_of),
    "object with a tensor rebound": (
        lambda: _Plain(torch.ones(3)),
        lambda a: (setattr(a, "scale", torch.full((3,), 3.0)), a)[1],
        _scale_of,
    ),
    "namespace in place": (
        lambda: types.SimpleNamespace(scale=2.0),
        lambda a: (setattr(a, "scale", 3.0), a)[1],
        _scale_of,
    ),
    "dataclass in place": (Config, lambda a: (setattr(a, "scale", 3.0), a)[1], _scale_of),
    "dataclass with a tensor": (
        lambda: Config(torch.ones(3)),
        lambda a: (setattr(a, "scale", torch.full((3,), 3.0)), a)[1],
        _scale_of,
    ),
    "number beside the tensor of a dataclass": (
        lambda: Config(torch.ones(3), items=[2.0]),
        lambda a: Config(torch.ones(3), items=[3.0]),
        lambda x, a: x * a.scale * a.items[0],
    ),
    "frozen dataclass": (Frozen, lambda a: Frozen(3.0), _scale_of),
    "named tuple": (lambda: Row(2.0, []), lambda a: Row(3.0, []), _scale_of),
    "equal but not the same": (lambda: _AlwaysEqual(2.0), lambda a: _AlwaysEqual(3.0), _scale_of),
    "numpy number": (lambda: np.float32(2), lambda a: np.float32(3), lambda x, a: x * a),
    "numpy array in place": (
        lambda: np.full(3, 2.0, np.float32),
        lambda a: (a.fill(3), a)[1],
        lambda x, a: x * torch.as_tensor(a),
    ),
}


class _AlwaysEqual(_Plain):
    def __eq__(self, other: object) -> bool:
        return isinstance(other, _AlwaysEqual)

    def __hash__(self) -> int:
        return 0


class _Loud(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (2 if self.training else 3)


def _multiplier(number: Any) -> Fun:
    return lambda x: x * number


_NEAR_ARGUMENTS = (
    *("frozen set", "frozen dataclass", "bytes", "slice", "dtype", "module to eval", "object with a tensor rebound"),
    *("number beside the tensor of a dataclass", "string", "set in place", "object in place", "numpy number"),
)


@pytest.mark.parametrize("name", marked(ARGUMENTS, slow=_NEAR_ARGUMENTS))
def test_arguments_that_are_no_tensors_are_never_stale(name: str) -> None:
    make, change, fun = ARGUMENTS[name]
    keyword = len(name) % 2 == 0  # both ways to pass one are met

    def both(x: torch.Tensor, thing: Any) -> torch.Tensor:
        return fun(x, thing)

    call: Any = through(both)
    x, thing = _x(), make()
    before = fun(x, thing).detach()
    try:
        _equal(call(x, thing=thing) if keyword else call(x, thing), fun(x, thing))
        thing = change(thing)
        after = fun(x, thing)
        assert after.shape != before.shape or after.dtype != before.dtype or not torch.equal(after, before)
        _equal(call(x, thing=thing) if keyword else call(x, thing), after)
    except (TypeError, ValueError) as error:
        assert re.search(r"thing|argument", str(error))  # noqa: PT017


# Caches


def _lives() -> dict[str, Callable[[torch.Tensor], Any]]:
    """Functions of one argument that capture a tensor in some way."""

    def default(w: torch.Tensor) -> Any:
        def fun(x: torch.Tensor, w: torch.Tensor = w) -> torch.Tensor:
            return x * w

        return fun

    def in_module(w: torch.Tensor) -> Any:
        m = nn.Module()
        m.register_buffer("w", w)
        return lambda x: x * m.w

    def in_long_list(w: torch.Tensor) -> Any:
        several = [w] * 10_001
        return lambda x: x * several[0]

    def in_object(w: torch.Tensor) -> Any:
        thing = _Plain(w)  # type: ignore[arg-type]
        return lambda x: x * thing.scale

    def in_slots(w: torch.Tensor) -> Any:
        thing = Slotted(w)
        return lambda x: x * thing.scale

    def in_namespace(w: torch.Tensor) -> Any:
        thing = argparse.Namespace(w=w)
        return lambda x: x * thing.w

    def in_user_dict(w: torch.Tensor) -> Any:
        thing = collections.UserDict(w=w)
        return lambda x: x * thing["w"]

    def in_chain_map(w: torch.Tensor) -> Any:
        thing = collections.ChainMap({"w": w})
        return lambda x: x * thing["w"]

    def in_distribution(w: torch.Tensor) -> Any:
        thing = torch.distributions.Normal(w, 1.0)
        return lambda x: x * thing.mean

    def in_class(w: torch.Tensor) -> Any:
        cls = type("Holds", (), {"w": w, "__module__": __name__})
        return lambda x: x * cls.w

    def in_proxy(w: torch.Tensor) -> Any:
        thing = types.MappingProxyType({"w": w})
        return lambda x: x * thing["w"]

    def in_optimizer(w: torch.Tensor) -> Any:
        thing = torch.optim.SGD([w.requires_grad_()], lr=0.1)
        return lambda x: x * thing.param_groups[0]["lr"]

    def in_array(w: torch.Tensor) -> Any:
        thing = np.empty(1, dtype=object)
        thing[0] = w
        return lambda x: x * thing[0]

    return {
        "closure": lambda w: lambda x: x * w,
        "closure that requires grad": lambda w: (w.requires_grad_(), lambda x: x * w)[1],
        "bound method of the tensor": lambda w: w.mul,
        "partial": lambda w: functools.partial(torch.mul, w),
        "dict key": lambda w: (lambda d: lambda x: x * next(iter(d)))({w: 1}),
        **{f.__name__: f for f in list(locals().values())},
    }


_SLOW_LIVES = (  # containers of a kind with others
    *("in_array", "in_chain_map", "in_class", "in_distribution", "in_long_list", "in_namespace", "in_proxy"),
    *("in_slots", "in_user_dict", "closure that requires grad", "partial", "bound method of the tensor"),
    *("in_optimizer", "default"),
)


@pytest.mark.parametrize("name", marked(_lives(), _LIVES_LEAK, slow=_SLOW_LIVES))
def test_no_cache_keeps_a_captured_tensor_alive(name: str) -> None:
    def scope() -> list[Any]:
        w = torch.ones(3)
        refs = [weakref.ref(w)]
        fun = _lives()[name](w)
        call = through(fun)
        with contextlib.suppress(TypeError):
            out = call(_x())
            if out.requires_grad:
                out.sum().backward()
        return refs

    refs = scope()
    gc.collect()
    assert [r() for r in refs] == [None]


OPAQUE = {
    "object": lambda w: _Plain(w),
    "slots": lambda w: Slotted(w),
    "namespace": lambda w: argparse.Namespace(scale=w),
    "dataclass": lambda w: Config(w),
    "object in a dict": lambda w: {"k": _Plain(w)},
    "module": lambda w: having(nn.Module(), scale=w),
    "unhashable": lambda w: types.SimpleNamespace(scale=w),
    "lambda": lambda w: having(lambda: None, scale=w),
    "user dict": lambda w: having(collections.UserDict(), scale=w),
}


@pytest.mark.parametrize("name", marked(OPAQUE, quick=("object", "module", "unhashable", "lambda")))
def test_no_cache_keeps_an_argument_alive(name: str) -> None:
    def scope() -> Any:
        w = torch.ones(3)
        ref, thing = weakref.ref(w), OPAQUE[name](w)
        with contextlib.suppress(TypeError, ValueError):
            through(lambda x, thing: x * (thing["k"] if isinstance(thing, dict) else thing).scale)(_x(), thing)
        return ref

    ref = scope()
    gc.collect()
    assert ref() is None


def _fails_by_branch(x: torch.Tensor, w: torch.Tensor) -> Any:
    return x * w if x.sum() > 0 else x


def _fails_by_itself(x: torch.Tensor, w: torch.Tensor) -> Any:
    raise LookupError("of the user's")


def _fails_by_writing(x: torch.Tensor, w: torch.Tensor) -> Any:
    return x.mul_(w)


FAILURES = {f.__name__.removeprefix("_fails_"): f for f in (_fails_by_branch, _fails_by_itself, _fails_by_writing)}


@pytest.mark.parametrize("name", FAILURES)
def test_a_failed_trace_keeps_nothing_alive(name: str) -> None:
    def scope() -> Any:
        w, x = torch.ones(3), _x()
        with pytest.raises((TypeError, LookupError)):
            through(lambda x: FAILURES[name](x, w))(x)
        return [weakref.ref(w), weakref.ref(x)]

    refs = scope()
    gc.collect()
    assert [r() for r in refs] == [None, None]


def _small_caches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The caches of programs and of what is known of a call, both empty and with room for four."""
    monkeypatch.setattr(cache, "SIZE", 4)
    caches = [cache.PROGRAMS, cache.OUTLINES]
    for kept in caches:
        kept.clear()
    return caches


def test_the_caches_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    caches = _small_caches(monkeypatch)
    call = through(lambda x, n: x * n)
    for n in [*range(7), 0, 6]:
        assert torch.equal(call(_x(), n), _x() * n)
    assert [len(c) for c in caches] == [4, 4]


@pytest.mark.slow
def test_functions_that_are_gone_leave_no_compiled_program_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    _small_caches(monkeypatch)
    client = jax.devices("cpu")[0].client
    counts = []
    for n in range(14):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            through(eval(f"lambda x: x * {n}"))(_x())
        if n in (6, 13):
            gc.collect()
            counts.append(len(client.live_executables()))
    assert counts[1] <= counts[0]


# Flags of parameters and modes of torch


def test_requires_grad_is_read_at_each_call() -> None:
    m, x = nn.Linear(3, 3), _x()
    call = through(m)
    for flags in [(True, True), (False, True), (True, False), (False, False), (True, True)]:
        m.weight.requires_grad_(flags[0])
        m.bias.requires_grad_(flags[1])
        m.zero_grad()
        out = call(x)
        assert out.requires_grad == any(flags)
        if any(flags):
            out.sum().backward()
        assert [p.grad is not None for p in (m.weight, m.bias)] == list(flags)
    leaf = _x().requires_grad_()
    assert call(leaf).requires_grad
    assert not call(x.detach()).requires_grad or any(flags)


def test_train_and_eval_of_any_part_are_read_at_each_call() -> None:
    m, x = nn.Sequential(nn.Dropout(0.5), nn.Sequential(nn.Dropout(0.5)), _Loud()), torch.ones(64)
    call = through(m)
    for train in (True, False, True):
        m.train(train)
        assert torch.equal(call(x), call(x)) != train
    m[0].eval()
    m[1][0].eval()
    torch.testing.assert_close(call(x), m(x))
    m[2].eval()
    torch.testing.assert_close(call(x), m(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_read_at_each_call(dtype: torch.dtype) -> None:
    m, x = nn.Linear(4, 4), torch.randn(2, 4)
    call = through(lambda x: (m(x), x * 2, m(x).sum()))
    for enabled, cached in ((False, True), (True, True), (True, False), (False, True)):
        with torch.autocast("cpu", dtype, enabled=enabled, cache_enabled=cached):
            got, expected = call(x), (m(x), x * 2, m(x).sum())
        assert [g.dtype for g in got] == [e.dtype for e in expected]
        for one, two in zip(got, expected, strict=True):
            torch.testing.assert_close(one, two, rtol=2e-2, atol=2e-2)


def test_autocast_inside_and_switched_off_inside() -> None:
    m, x = nn.Linear(4, 4), torch.randn(2, 4)

    def fun(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.autocast("cpu", torch.bfloat16):
            half = m(x)
            with torch.autocast("cpu", enabled=False):
                full = m(x)
        return half, full, m(x)

    call = through(fun)
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            assert [o.dtype for o in call(x)] == [o.dtype for o in fun(x)]


def test_grad_mode_tells_two_calls_apart() -> None:
    w = torch.ones(3, requires_grad=True)
    call, x = through(lambda x: x * w), _x()
    for enabled in (True, False, True):
        with torch.set_grad_enabled(enabled):
            assert call(x).requires_grad is enabled
    with torch.inference_mode():
        assert call(x).is_inference()
        assert not call(x).requires_grad
    assert not call(x).is_inference()
