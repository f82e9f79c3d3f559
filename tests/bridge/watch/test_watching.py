"""What a function reads by names that do not stand in its code is never stale, and what cannot be watched is refused.

Eager torch is the oracle: each scenario is a function of one tensor and two changes of something that it reads, and the
traced function gives what the plain one gives before them, between them and after them.
"""

from __future__ import annotations

import abc
import argparse
import array
import asyncio
import atexit
import collections
import contextlib
import contextvars
import copy
import ctypes
import dataclasses
import datetime
import decimal
import enum
import functools
import gc
import importlib
import inspect
import io
import json
import logging
import math
import mmap
import multiprocessing
import operator
import os
import pathlib
import random
import secrets
import sqlite3
import string
import sys
import threading
import time
import timeit
import types
import uuid
import warnings
import weakref
from collections.abc import Callable, Iterator
from time import perf_counter
from time import time as aliased_time
from typing import Any

import numpy as np
import pytest
import torch
from helpers import having, marked, through
from torch import nn

from microtome import torch_api as mt
from microtome.bridge import as_jax, as_torch
from microtome.bridge.call import cache, preparing

Fun = Callable[..., torch.Tensor]
Change = Callable[[], object]

pytestmark = pytest.mark.filterwarnings("ignore:.*has been compiled:UserWarning")  # all through the same harness


def _x() -> torch.Tensor:
    return torch.tensor([1.0, 2.0])


def _put(*parts: str) -> str:
    """A name that stands nowhere in the code."""
    return "".join(parts)


def _sets(thing: Any, name: str, *values: Any) -> list[Change]:
    return [functools.partial(setattr, thing, name, value) for value in values or (5.0, 7.0)]


def _items(container: Any, key: Any, *values: Any) -> list[Change]:
    return [functools.partial(operator.setitem, container, key, value) for value in values or (5.0, 7.0)]


NUMBER = 2.0


def _numbers() -> list[Change]:
    return [functools.partial(operator.setitem, globals(), "NUMBER", value) for value in (5.0, 7.0)]


class Thing:
    shared = 2.0
    base = 2.0

    def __init__(self, scale: float = 2.0) -> None:
        self.s0 = scale
        self.s1 = scale + 1
        self.child = types.SimpleNamespace(a=scale)
        self.w0 = torch.full((2,), scale)

    def loss_a(self, x: torch.Tensor) -> torch.Tensor:
        return x * NUMBER

    @staticmethod
    def static_a(x: torch.Tensor) -> torch.Tensor:
        return x * NUMBER

    @classmethod
    def of_class_a(cls, factor: float) -> float:
        return cls.shared * factor

    @property
    def twice(self) -> float:
        return self.s0 * 2

    @functools.cached_property
    def slow(self) -> float:
        return self.base * 3


class Slotted:
    __slots__ = ("aa",)

    def __init__(self) -> None:
        self.aa = 2.0


class Hidden:
    """Attributes that are made up when they are asked for."""

    def __init__(self) -> None:
        self.__dict__["values"] = {"a": 2.0}

    def __getattr__(self, name: str) -> Any:
        return self.__dict__["values"][name]


class Meta(type):
    @property
    def hidden(cls) -> float:
        return cls._hidden

    def __getattr__(cls, name: str) -> float:
        return NUMBER


class WithMeta(metaclass=Meta):
    _hidden = 2.0


class Base:
    inherited = 2.0


class Derived(Base):
    pass


class Kind(enum.Enum):
    ONE = 1


@dataclasses.dataclass
class Pair:
    first: float = 2.0
    second: float = 3.0


@dataclasses.dataclass(slots=True)
class SlottedPair:
    first: float = 2.0
    second: float = 3.0


class Reads:
    def __init__(self) -> None:
        self.scale = NUMBER


class ReadsAnew:
    def __new__(cls) -> ReadsAnew:
        made = object.__new__(cls)
        made.scale = NUMBER
        return made


@dataclasses.dataclass
class ReadsAfter:
    other: float = 1.0

    def __post_init__(self) -> None:
        self.scale = NUMBER


class MyNormal(torch.distributions.Normal):
    pass


class MyUserDict(collections.UserDict):  # type: ignore[type-arg]
    pass


class MyTuple(tuple):  # type: ignore[type-arg]
    pass


class MyDict(dict):  # type: ignore[type-arg]
    @property
    def number(self) -> float:
        return NUMBER


class Net(nn.Module):
    k0 = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.kind = "a"
        self.thing = Thing()

    def step_a(self, x: torch.Tensor) -> torch.Tensor:
        return x * NUMBER

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        step = getattr(self, f"step_{self.kind}")
        return step(x) * getattr(self, f"k{0}") * getattr(self.thing, f"s{0}")


@pytest.fixture(autouse=True)
def _put_back() -> Iterator[None]:
    cwd, threads, thread = os.getcwd(), torch.get_num_threads(), threading.current_thread()
    name = thread.name
    yield
    thread.name = name
    globals()["NUMBER"] = 2.0
    Thing.shared = Thing.base = WithMeta._hidden = Base.inherited = Net.k0 = 2.0
    os.chdir(cwd)
    torch.set_num_threads(threads)


def _of(thing: Any, read: Callable[[Any], Any], changes: list[Change]) -> tuple[Fun, list[Change]]:
    return lambda x: x * read(thing), changes


def _about(make: Callable[[], Any], read: Callable[[Any], Any], changes: Callable[[Any], list[Change]]) -> Any:
    def build() -> tuple[Fun, list[Change]]:
        thing = make()
        return _of(thing, read, changes(thing))

    return build


def _scale(t: Any) -> list[Change]:
    return _sets(t, "s0", 50.0, 700.0)


_SIGNATURES = inspect.signature(lambda a, b: None), inspect.signature(lambda a, b, c: None)


class Shown:
    def __init__(self, s0: Any = 2.0) -> None:
        self.s0 = s0

    def __repr__(self) -> str:
        return f"<{self.s0}>"


def _registered(kind: Any) -> tuple[Fun, list[Change]]:
    one, two = type("One", (), {}), type("Two", (), {})
    things = one(), two()
    registered = [functools.partial(kind.register, made) for made in (one, two)]
    return _of(things, lambda things: 1 + sum(isinstance(thing, kind) for thing in things), registered)


def _matched(t: Any) -> float:
    match t:
        case Thing(s0=n):
            return n
    return 0.0


def _matched_in_order(p: Any) -> float:
    match p:
        case Pair(n, _):
            return n
    return 0.0


def _executed() -> float:
    found: dict[str, float] = {}
    exec(_put("found['y'] = NUM", "BER"), {"NUMBER": NUMBER, "found": found})
    return found["y"]


def _cleared() -> tuple[Fun, list[Change]]:
    table = {"a": 2.0}

    @functools.cache
    def read() -> float:
        return table["a"]

    read()
    table["a"] = 3.0
    return lambda x: x * read(), [read.cache_clear, functools.partial(table.update, a=7.0)]


def _singly_dispatched() -> tuple[Fun, list[Change]]:
    @functools.singledispatch
    def read(key: Any) -> float:
        return 1.0

    read.register(int, lambda key: NUMBER)
    return lambda x: x * read(1), _numbers()


def _module_of_a_user(name: str) -> types.ModuleType:
    module = types.ModuleType(name)
    module.scale = 2.0  # type: ignore[attr-defined]
    sys.modules[name] = module
    return module


def _method(name: str) -> Callable[[], tuple[Fun, list[Change]]]:
    thing = Thing()
    return lambda: (lambda x: getattr(thing, _put(name, "_a"))(x), _numbers())


# Names that are put together

BY_NAME: dict[str, Callable[[], tuple[Fun, list[Change]]]] = {
    "number": _about(Thing, lambda t: getattr(t, _put("s", "0")), _scale),
    "tensor": _about(
        Thing,
        lambda t: getattr(t, _put("w", "0")),
        lambda t: [*_sets(t, "w0", torch.full((2,), 5.0)), lambda: t.w0.mul_(2)],
    ),
    "name that changes": _about(
        lambda: (Thing(), ["s0"]),
        lambda p: getattr(p[0], p[1][0]),
        lambda p: [*_items(p[1], 0, "s1"), *_sets(p[0], "s1")],
    ),
    "of the class": _about(lambda: Thing, lambda c: getattr(c, _put("sha", "red")), lambda c: _sets(c, "shared")),
    "of the class, through the object": _about(
        Thing, lambda t: getattr(t, _put("sha", "red")), lambda t: _sets(Thing, "shared")
    ),
    "inherited": _about(
        lambda: Derived, lambda c: getattr(c, _put("inhe", "rited")), lambda c: _sets(Base, "inherited")
    ),
    "method": _method("loss"),
    "static method": _method("static"),
    "property": _about(Thing, lambda t: getattr(t, _put("twi", "ce")), _scale),
    "default": _about(Thing, lambda t: getattr(t, _put("mo", "re"), 3.0), lambda t: _sets(t, "more")),
    "hasattr": _about(
        Thing,
        lambda t: 2 if hasattr(t, _put("mo", "re")) else 3,
        lambda t: [*_sets(t, "more", 1.0), lambda: delattr(t, "more")],
    ),
    "reduce": _about(
        Thing, lambda t: functools.reduce(getattr, _put("child", ".a").split("."), t), lambda t: _sets(t.child, "a")
    ),
    "map": _about(
        Thing, lambda t: sum(map(getattr, (t, t), (_put("s", "0"), _put("s", "1")))), lambda t: _sets(t, "s1")
    ),
    "names in a tuple": _about(Thing, lambda t: sum(getattr(t, n) for n in ("s0", "s1")), lambda t: _sets(t, "s1")),
    "partial": _about(
        lambda: (t := Thing(), functools.partial(getattr, t)),
        lambda pair: pair[1](_put("s", "0")),
        lambda pair: _scale(pair[0]),
    ),
    "vars": _about(Thing, lambda t: vars(t)[_put("s", "0")], _scale),
    "vars, one more": _about(
        lambda: types.SimpleNamespace(a=1.0), lambda t: sum(vars(t).values()), lambda t: _sets(t, "b")
    ),
    "vars of the class": _about(lambda: Thing, lambda c: vars(c)[_put("sha", "red")], lambda c: _sets(c, "shared")),
    "__dict__": _about(Thing, lambda t: t.__dict__[_put("s", "0")], _scale),
    "dir": _about(
        Thing, lambda t: len([n for n in dir(t) if n.startswith("s")]), lambda t: [*_sets(t, "sx"), *_sets(t, "sy")]
    ),
    "attrgetter": _about(Thing, lambda t: operator.attrgetter(_put("child", ".a"))(t), lambda t: _sets(t.child, "a")),
    "attrgetter that is captured": _about(
        lambda: (Thing(), operator.attrgetter("child.a")),
        lambda pair: pair[1](pair[0]),
        lambda p: _sets(p[0].child, "a"),
    ),
    "attrgetter of a method": _about(
        Thing, lambda t: operator.attrgetter(_put("of_class", "_a"))(t)(1.0), lambda t: _sets(Thing, "shared")
    ),
    "methodcaller": _about(
        lambda: (Thing(), operator.methodcaller("of_class_a", 1.0)),
        lambda pair: pair[1](pair[0]),
        lambda pair: _sets(Thing, "shared"),
    ),
    "__getattribute__": _about(Thing, lambda t: object.__getattribute__(t, _put("s", "0")), _scale),
    "getmembers": _about(Thing, lambda t: dict(inspect.getmembers(t))[_put("s", "0")], _scale),
    "slot": _about(Slotted, lambda t: getattr(t, _put("a", "a")), lambda t: _sets(t, "aa")),
    "slot by attrgetter": _about(Slotted, lambda t: operator.attrgetter(_put("a", "a"))(t), lambda t: _sets(t, "aa")),
    "made up when asked": _about(Hidden, lambda t: getattr(t, _put("", "a")), lambda t: _items(t.values, "a")),
    "property of the metaclass": _about(lambda: WithMeta, lambda c: c.hidden, lambda c: _sets(c, "_hidden")),
    "made up by the metaclass": _about(lambda: WithMeta, lambda c: c.anything, lambda c: _numbers()),
    "cached property": _about(
        Thing,
        lambda t: getattr(t, _put("sl", "ow")),
        lambda t: [lambda: (setattr(Thing, "base", 5.0), t.__dict__.pop("slow", None)), *_sets(t, "slow", 7.0)],
    ),
    "cached property, kept": _about(
        lambda: _with_slow(Thing()),
        lambda t: t.slow,
        lambda t: [*_sets(Thing, "base", 5.0), lambda: vars(t).pop("slow")],
    ),
    "match": _about(Thing, _matched, _scale),
    "match in order": _about(Pair, _matched_in_order, lambda p: _sets(p, "first")),
    "format": _about(Thing, lambda t: float("{0.s0}".format(t)), _scale),  # noqa: UP030, UP032
    "format_map": _about(Thing, lambda t: float("{t.child.a}".format_map({"t": t})), lambda t: _sets(t.child, "a")),
    "template": _about(Thing, lambda t: float(string.Template("$s0").substitute(vars(t))), _scale),
    "asdict": _about(Pair, lambda p: dataclasses.asdict(p)[_put("fir", "st")], lambda p: _sets(p, "first")),
    "astuple": _about(SlottedPair, lambda p: dataclasses.astuple(p)[0], lambda p: _sets(p, "first")),
    "copy": _about(Thing, lambda t: getattr(copy.copy(t), _put("s", "0")), _scale),
    "json": _about(
        lambda: types.SimpleNamespace(a=2.0),
        lambda t: json.loads(json.dumps(t, default=lambda o: o.__dict__))[_put("", "a")],
        lambda t: _sets(t, "a"),
    ),
    "attribute of a function": _about(
        lambda: having(lambda x: x, aa=2.0), lambda f: getattr(f, _put("a", "a")), lambda f: _sets(f, "aa")
    ),
    "attribute of a tensor": _about(
        lambda: having(torch.ones(2), aa=2.0), lambda w: getattr(w, _put("a", "a")), lambda w: _sets(w, "aa")
    ),
    "attribute of an enumeration member": _about(
        lambda: having(Kind.ONE, weight=2.0),
        lambda k: getattr(Kind[_put("O", "NE")], _put("wei", "ght")),
        lambda k: _sets(k, "weight"),
    ),
    "bases": _about(
        lambda: Derived, lambda c: getattr(c.__bases__[0], _put("inhe", "rited")), lambda c: _sets(Base, "inherited")
    ),
    "subclasses": _about(lambda: Base, lambda c: c.__subclasses__()[0].inherited, lambda c: _sets(Base, "inherited")),
    "eval": lambda: (lambda x: x * eval(_put("NUM", "BER")), _numbers()),
    "eval of compiled code": _about(
        lambda: compile("NUMBER", "<s>", "eval"), lambda code: eval(code), lambda _: _numbers()
    ),
    "eval of an attribute": _about(Thing, lambda t: eval(_put("t", ".s0"), {"t": t}), _scale),
    "exec": lambda: (lambda x: x * _executed(), _numbers()),
    "sys.modules": lambda: (lambda x: x * sys.modules[__name__].__dict__[_put("NUM", "BER")], _numbers()),
    "import_module": _about(
        lambda: _module_of_a_user("settings_that_are_imported"),
        lambda m: importlib.import_module(_put("settings_that", "_are_imported")).scale,
        lambda m: _sets(m, "scale"),
    ),
    "attribute of an imported module": _about(
        lambda: _module_of_a_user("settings_that_are_read"),
        lambda m: getattr(importlib.import_module(_put("settings_that", "_are_read")), _put("sc", "ale")),
        lambda m: _sets(m, "scale"),
    ),
    "module": lambda: (net := Net().requires_grad_(False), [*_sets(Net, "k0", 5.0), *_sets(net.thing, "s0", 7.0)]),
    "method of a module": lambda: (Net(), _numbers()),
    "submodule": _about(
        lambda: nn.Sequential(having(nn.Identity(), aa=2.0)),
        lambda m: m.get_submodule(_put("", "0")).aa,
        lambda m: _sets(m[0], "aa"),
    ),
}


def _with_slow(thing: Thing) -> Thing:
    assert thing.slow
    return thing


# What values hold


def _bound(make: Callable[[], Any], method: str, *args: Any) -> Callable[[], tuple[Fun, list[Change]]]:
    def build() -> tuple[Fun, list[Change]]:
        container = make()
        read = getattr(container, method)
        return lambda x: x * read(*args), _items(container, args[0] if args else 0)

    return build


def _weakly(wrap: Callable[[Any], Any], read: Callable[[Any], Any]) -> Callable[[], tuple[Fun, list[Change]]]:
    def build() -> tuple[Fun, list[Change]]:
        thing = Thing()
        weak = wrap(thing)
        return lambda x: x * read(weak), _scale(thing)

    return build


def _buffer(make: Callable[[], Any], read: Callable[[Any], Any] = lambda b: b[0], one: Any = 5, two: Any = 7) -> Any:
    return _about(make, read, lambda b: _items(b, 0, one, two))


def _written(make: Callable[[], Any], *values: Any) -> Any:
    def write(stream: Any, value: Any) -> None:
        stream.seek(0)
        stream.write(value)

    return _about(make, lambda s: float(int(s.getvalue())), lambda s: [functools.partial(write, s, v) for v in values])


HELD: dict[str, Callable[[], tuple[Fun, list[Change]]]] = {
    "dict.get": _bound(lambda: {"a": 2.0}, "get", "a"),
    "dict.__getitem__": _bound(lambda: {"a": 2.0}, "__getitem__", "a"),
    "list.__getitem__": _bound(lambda: [2.0], "__getitem__", 0),
    "deque.__getitem__": _bound(lambda: collections.deque([2.0]), "__getitem__", 0),
    "array.item": _bound(lambda: np.array([2.0]), "item", 0),
    "list.__len__": _about(
        lambda: (c := [2.0], c.__len__),
        lambda p: p[1](),
        lambda p: [lambda: p[0].append(1.0), lambda: p[0].append(1.0)],
    ),
    "partial of dict.get": _about(
        lambda: (d := {"a": 2.0}, functools.partial(d.get, "a")), lambda p: p[1](), lambda p: _items(p[0], "a")
    ),
    "bound method as an attribute": _about(
        lambda: (d := {"a": 2.0}, having(Thing(), look=d.get)),
        lambda p: p[1].look("a"),
        lambda p: _items(p[0], "a"),
    ),
    "ContextVar.get": _about(
        lambda: (c := contextvars.ContextVar("c", default=2.0), c.get),
        lambda p: p[1](),
        lambda p: [lambda: p[0].set(5.0), lambda: p[0].set(7.0)],
    ),
    "itemgetter": _about(
        lambda: ({"a": 2.0}, operator.itemgetter("a")), lambda p: p[1](p[0]), lambda p: _items(p[0], "a")
    ),
    "long list": _about(lambda: [2.0] * 20_001, lambda c: c[7], lambda c: _items(c, 7)),
    "long list, another type": _about(
        lambda: [1] * 20_001,
        lambda c: (True, 1, 1.0).index(c[7]) + {bool: 1, int: 2, float: 3}[type(c[7])],
        lambda c: _items(c, 7, True, 1.0),
    ),
    "long list, minus zero": _about(
        lambda: [0.0] * 20_001, lambda c: math.copysign(1, c[7]), lambda c: _items(c, 7, -0.0, 0.0)
    ),
    "long list of tensors": _about(
        lambda: [torch.full((2,), 2.0)] * 20_001,
        lambda c: c[7],
        lambda c: [*_items(c, 7, torch.full((2,), 5.0)), lambda: c[7].fill_(7.0)],
    ),
    "long list of pairs": _about(
        lambda: [("a", 2.0)] * 20_001, lambda c: c[7][1], lambda c: _items(c, 7, ("a", 5.0), ("a", 7.0))
    ),
    "long list of an object": _about(
        lambda: having(Thing(), table=[2.0] * 20_001), lambda t: t.table[7], lambda t: _items(t.table, 7)
    ),
    "long list of a namespace": _about(
        lambda: argparse.Namespace(table=[2.0] * 300), lambda t: t.table[7], lambda t: _items(t.table, 7)
    ),
    "list of 300 lists": _about(lambda: [[float(i)] for i in range(300)], lambda c: c[7][0], lambda c: _items(c[7], 0)),
    "long dict": _about(lambda: dict.fromkeys(range(20_001), 2.0), lambda c: c[7], lambda c: _items(c, 7)),
    "long set": _about(
        lambda: set(range(20_001)),
        lambda c: 2 if -1 in c else 3,
        lambda c: [lambda: c.add(-1), lambda: c.remove(-1)],
    ),
    "long deque": _about(lambda: collections.deque([2.0] * 20_001), lambda c: c[7], lambda c: _items(c, 7)),
    "long tuple": _about(
        lambda: [(2.0,) * 20_001], lambda c: c[0][7], lambda c: _items(c, 0, (5.0,) * 20_001, (7.0,) * 20_001)
    ),
    "object array": _about(lambda: np.array([[2.0], None], dtype=object), lambda c: c[0][0], lambda c: _items(c[0], 0)),
    "masked array": _about(
        lambda: np.ma.array([2.0, 3.0], mask=[False, False]),
        lambda c: float(c.sum()),
        lambda c: _sets(c, "mask", [True, False], [False, True]),
    ),
    "array of a class of the user's": _about(
        lambda: having(np.ones(2).view(type("Mine", (np.ndarray,), {})), scale=2.0),
        lambda c: c.scale,
        lambda c: _sets(c, "scale"),
    ),
    "ctypes array": _buffer(lambda: (ctypes.c_double * 2)(2.0, 3.0)),
    "ctypes number": _about(lambda: ctypes.c_double(2.0), lambda c: c.value, lambda c: _sets(c, "value")),
    "mmap": _buffer(lambda: mmap.mmap(-1, 16), lambda b: b[0] + 1),
    "array.array": _buffer(lambda: array.array("d", [2.0])),
    "BytesIO": _written(lambda: io.BytesIO(b"2"), b"5", b"7"),
    "StringIO": _written(lambda: io.StringIO("2"), "5", "7"),
    "thread-local": _about(lambda: having(threading.local(), a=2.0), lambda t: t.a, lambda t: _sets(t, "a")),
    "weak reference": _weakly(weakref.ref, lambda r: r().s0),
    "weak proxy": _weakly(weakref.proxy, lambda r: r.s0),
    "WeakValueDictionary": _weakly(lambda t: weakref.WeakValueDictionary(a=t), lambda d: d["a"].s0),
    "WeakSet": _weakly(lambda t: weakref.WeakSet([t]), lambda d: sum(t.s0 for t in d)),
    "WeakKeyDictionary": _about(
        lambda: (t := Thing(), weakref.WeakKeyDictionary({t: 2.0})), lambda p: p[1][p[0]], lambda p: _items(p[1], p[0])
    ),
    "object as a key": _about(lambda: {Thing(): 1.0}, lambda d: next(iter(d)).s0, lambda d: _scale(next(iter(d)))),
    "nested namespaces": _about(
        lambda: argparse.Namespace(sub=argparse.Namespace(a=2.0)), lambda t: t.sub.a, lambda t: _sets(t.sub, "a")
    ),
    "object of the user's in a namespace": _about(
        lambda: argparse.Namespace(sub=Thing()), lambda t: t.sub.s0, lambda t: _scale(t.sub)
    ),
    "function in a namespace": _about(
        lambda: argparse.Namespace(read=lambda: NUMBER), lambda t: t.read(), lambda t: _numbers()
    ),
    "module in a namespace": _about(
        lambda: argparse.Namespace(m=nn.Identity()),
        lambda t: 1 if t.m.training else 2,
        lambda t: [t.m.eval, t.m.train],
    ),
    "object in a ChainMap": _about(
        lambda: collections.ChainMap({"a": Thing()}), lambda c: c["a"].s0, lambda c: _scale(c["a"])
    ),
    "distribution of the user's": _about(
        lambda: MyNormal(torch.ones(2), torch.ones(2)),
        lambda n: n.log_prob(torch.zeros(2)),
        lambda n: [*_sets(n, "loc", torch.full((2,), 5.0)), *_sets(n, "scale", torch.full((2,), 5.0))],
    ),
    "distribution in another": _about(
        lambda: torch.distributions.Independent(torch.distributions.Normal(torch.ones(2), torch.ones(2)), 1),
        lambda n: n.log_prob(torch.zeros(2)),
        lambda n: _sets(n.base_dist, "loc", torch.full((2,), 5.0), torch.full((2,), 7.0)),
    ),
    "UserDict of the user's": _about(lambda: MyUserDict(a=2.0), lambda d: d["a"], lambda d: _items(d, "a")),
    "attribute of a tuple": _about(lambda: having(MyTuple((1.0,)), s=2.0), lambda t: t.s, lambda t: _sets(t, "s")),
    "property of a dict": _about(MyDict, lambda d: d.number, lambda d: _numbers()),
    "constructor": lambda: (lambda x: x * Reads().scale, _numbers()),
    "__new__": lambda: (lambda x: x * ReadsAnew().scale, _numbers()),
    "__post_init__": lambda: (lambda x: x * ReadsAfter().scale, _numbers()),
    "emptied cache": _cleared,
    "single dispatch": _singly_dispatched,
    "key function": _about(
        lambda: functools.cmp_to_key(lambda a, b: NUMBER - 6.0),
        lambda key: sorted([1, 2], key=key)[0],
        lambda key: _numbers(),
    ),
    "seed of torch": lambda: (
        lambda x: x * (torch.initial_seed() % 97),
        [lambda: torch.manual_seed(5), lambda: torch.manual_seed(6)],
    ),
    "seed of a generator": _about(
        lambda: torch.Generator().manual_seed(3),
        lambda g: g.initial_seed(),
        lambda g: [lambda: g.manual_seed(5), lambda: g.manual_seed(6)],
    ),
    "number of threads": lambda: (
        lambda x: x * torch.get_num_threads(),
        [lambda: torch.set_num_threads(3), lambda: torch.set_num_threads(1)],
    ),
    "folder": lambda: (lambda x: x * len(os.getcwd()), [lambda: os.chdir("/"), lambda: os.chdir("/usr")]),
    "thread's name": lambda: (
        lambda x: x * len(threading.current_thread().name),
        _sets(threading.current_thread(), "name", "a", "bc"),
    ),
    "class registered at one of the user's": lambda: _registered(abc.ABCMeta("Kindred", (), {})),
    "class registered at one of a library": lambda: _registered(collections.abc.Sized),
    "signature": _about(
        lambda: lambda a: None,
        lambda f: len(inspect.signature(f).parameters),
        lambda f: _sets(f, "__signature__", *_SIGNATURES),
    ),
    "__repr__": _about(Shown, lambda t: len(repr(t)), _scale),
    "__repr__, in an f-string": _about(Shown, lambda t: len(f"{t}"), _scale),
    "__repr__, in others": _about(lambda: [Shown(Shown(2.0))], lambda t: len(f"{t!r}"), lambda t: _scale(t[0].s0)),
    "asyncio.Event": _about(asyncio.Event, lambda e: 2 if e.is_set() else 3, lambda e: [e.set, e.clear]),
    "array of no dimension": _about(lambda: np.array(2.0), float, lambda a: _items(a, ())),
}

ALWAYS = (
    *(
        "number",
        "tensor",
        "of the class",
        "of the class, through the object",
        "inherited",
        "method",
        "hasattr",
        "reduce",
    ),
    *("partial", "vars", "vars, one more", "vars of the class", "attrgetter", "attrgetter that is captured", "slot"),
    *("methodcaller", "property of the metaclass", "cached property", "match in order", "asdict", "eval"),
    *("import_module", "attribute of a tensor", "dict.get", "list.__getitem__", "long list"),
    *("object array", "StringIO", "weak reference", "WeakSet"),
    *("object as a key", "nested namespaces", "function in a namespace", "distribution of the user's", "constructor"),
    *("emptied cache", "seed of torch", "thread's name", "class registered at one of the user's", "asyncio.Event"),
    "__repr__, in an f-string",
)
SCENARIOS = {**BY_NAME, **HELD}


@pytest.mark.parametrize("name", marked(SCENARIOS, quick=ALWAYS))
def test_what_is_read_by_names_that_do_not_stand_in_the_code_is_never_stale(name: str) -> None:
    torch.manual_seed(0)
    fun, changes = SCENARIOS[name]()
    call, x, seen = through(fun), _x(), []
    for change in [lambda: None, *changes]:
        change()
        got, expected = call(x), fun(x)
        torch.testing.assert_close(got, expected)
        seen.append(str(expected))
    assert len(set(seen)) > 1  # the changes make a difference


# What cannot be watched


def _caught() -> float:
    try:
        return time.time()
    except Exception:
        return 1.0


def _imported() -> float:
    from time import monotonic as clock

    return clock()


_CLOCK_HOLDER = types.SimpleNamespace(clock=time.time)
_PARTIAL = functools.partial(time.time)
_SYSTEM = random.SystemRandom()

OUTSIDE: dict[str, tuple[Callable[[], Any], str]] = {
    "time": (lambda: time.time(), r"reads a clock by time\.time"),
    "perf_counter": (lambda: perf_counter(), "time.perf_counter"),
    "alias": (lambda: aliased_time(), "time.time"),
    "time_ns": (lambda: time.time_ns() % 1000, "time.time_ns"),
    "process_time": (lambda: time.process_time(), "time.process_time"),
    "localtime": (lambda: time.localtime().tm_sec, "time.localtime"),
    "imported inside": (_imported, "time.monotonic"),
    "by name": (lambda: getattr(time, _put("perf_", "counter"))(), "time.perf_counter"),
    "default_timer": (lambda: timeit.default_timer(), "time.perf_counter"),
    "attribute": (lambda: _CLOCK_HOLDER.clock(), "time.time"),
    "partial": (lambda: _PARTIAL(), "PARTIAL is a partial of <built-in function time>"),
    "error that is caught": (_caught, "time.time"),
    "datetime.now": (lambda: datetime.datetime.now(datetime.UTC).timestamp(), "datetime.now"),
    "date.today": (lambda: datetime.date.today().day, "date.today"),
    "times": (lambda: os.times().elapsed, "times"),
    "urandom": (lambda: os.urandom(1)[0], r"randomness of the system by os\.urandom"),
    "uuid4": (lambda: uuid.uuid4().int % 1000, "os.urandom"),
    "uuid1": (lambda: uuid.uuid1().int % 1000, "generate_time_safe|time_ns"),
    "secrets": (lambda: secrets.randbelow(1000), "os.urandom"),
    "token": (lambda: len(secrets.token_hex(3)), "os.urandom"),
    "SystemRandom": (lambda: random.SystemRandom().random(), "os.urandom"),
    "SystemRandom that is captured": (lambda: _SYSTEM.random(), "os.urandom"),
    "unseeded generator of Python": (lambda: random.Random().random(), "Random.seed"),
    "unseeded generator of NumPy": (lambda: np.random.default_rng().random(), "os.urandom"),
    "unseeded generator of torch": (lambda: torch.Generator().seed() % 100, "Generator.seed"),
    "state of torch's generator": (lambda: torch.get_rng_state()[0], "state of torch's generator"),
    "state, by an alias": (lambda: _get_rng_state()[0], "state of torch's generator"),
    "state that is set": (lambda: torch.set_rng_state(_STATE) or 1, "state of torch's generator"),
    "state that is put back": (lambda: _forked(), "state of torch's generator"),
    "new seed": (lambda: torch.seed() % 10, "state of torch's generator"),
    "state of a generator": (lambda: torch.default_generator.get_state()[0], "state of a torch.Generator"),
    "globals()": (lambda: globals()[_put("NUM", "BER")], r"asks for globals\(\)"),
    "frame": (lambda: sys._getframe(0).f_globals[_put("NUM", "BER")], "_getframe"),
    "currentframe": (lambda: inspect.currentframe().f_globals[_put("NUM", "BER")], "_getframe"),  # type: ignore[union-attr]
    "file": (lambda: len(open(__file__).read()), "reads the file"),  # noqa: SIM115
    "path": (lambda: len(pathlib.Path(__file__).read_bytes()), "reads the file"),
    "array of a file": (lambda: np.fromfile(__file__, np.uint8)[0], "reads the file"),
    "file descriptor": (lambda: os.open(__file__, os.O_RDONLY), "reads the file"),
    "whether a file exists": (lambda: 2 if os.path.exists(__file__) else 3, "asks the file system"),
    "folder": (lambda: len(os.listdir(".")), "asks the file system"),
    "input": (lambda: float(input()), "asks the user"),
    "finalizer": (lambda: weakref.finalize(Thing(), print) and 1, "registers a call by finalize"),
    "call at exit": (lambda: atexit.register(print) and 1, "registers a call by register"),
}
_get_rng_state, _STATE = torch.get_rng_state, torch.Generator().manual_seed(0).get_state()


def _forked() -> torch.Tensor:
    with torch.random.fork_rng():
        return torch.rand(())


_ALWAYS_OUTSIDE = (
    *("state, by an alias", "state that is put back"),
    *("time", "alias", "by name", "attribute", "partial", "error that is caught", "datetime.now", "urandom", "uuid4"),
    *("unseeded generator of Python", "unseeded generator of NumPy", "globals()", "currentframe", "file", "path"),
    *("whether a file exists", "finalizer", "call at exit"),
)


@pytest.mark.parametrize("name", marked(OUTSIDE, quick=_ALWAYS_OUTSIDE))
def test_what_no_walk_can_follow_is_refused_with_the_line_and_the_name(name: str) -> None:
    read, words = OUTSIDE[name]
    before = getattr, hasattr, eval, exec, globals, open, input, os.stat, sys.getprofile()
    with pytest.raises(TypeError, match=rf"test_watching\.py:\d+: .*({words})"):
        through(lambda x: x * read())(_x())
    after = getattr, hasattr, eval, exec, globals, open, input, os.stat, sys.getprofile()
    assert before == after


def test_an_open_file_and_a_long_list_of_objects_are_refused_by_name() -> None:
    things = [Thing() for _ in range(10_001)]
    with pytest.raises(TypeError, match=r"test_watching\.py:\d+: things holds 10001 objects"):
        through(lambda x: x * things[0].s0)(_x())
    with open(__file__) as stream, pytest.raises(TypeError, match=r"test_watching\.py:\d+: stream is an open file"):
        through(lambda x: x * len(stream.readline()))(_x())
    with (
        contextlib.closing(sqlite3.connect(":memory:")) as base,
        pytest.raises(TypeError, match="base is a connection"),
    ):
        through(lambda x: x * base.execute("select 2").fetchone()[0])(_x())


class Scaled(torch.autograd.Function):
    base = 2.0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * NUMBER

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return g * NUMBER * getattr(Scaled, _put("ba", "se"))


def _slope(fun: Fun) -> torch.Tensor:
    x = _x().requires_grad_()
    fun(x).sum().backward()
    assert x.grad is not None
    return x.grad


def test_what_runs_in_the_backward_pass_is_watched_too(monkeypatch: pytest.MonkeyPatch) -> None:
    thing = Thing()

    def fun(x: torch.Tensor) -> torch.Tensor:
        y = Scaled.apply(x)
        if y.requires_grad:
            y.register_hook(lambda g: g * getattr(thing, _put("s", "0")))
        return y

    call = through(fun)
    for owner, name in ((globals(), "NUMBER"), (Scaled, "base"), (thing, "s0")):
        torch.testing.assert_close(_slope(call), _slope(fun))
        if isinstance(owner, dict):
            owner[name] = 5.0
        else:
            monkeypatch.setattr(owner, name, 5.0)
        torch.testing.assert_close(_slope(call), _slope(fun))

    def timed(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        if y.requires_grad:
            y.register_hook(lambda g: g * time.time())
        return y

    with pytest.raises(TypeError, match=r"test_watching\.py:\d+: .* by time\.time"):
        _slope(through(timed))


class Tabled(nn.Module):
    length = 2

    @functools.cached_property
    def table(self) -> torch.Tensor:
        return torch.arange(self.length, self.length + 2.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.table


def test_a_constant_that_the_first_call_keeps_is_read_from_there() -> None:
    m = Tabled()
    call = through(m)
    for change in (
        lambda: None,
        lambda: (setattr(m, "length", 5), m.__dict__.pop("table")),
        lambda: m.table.fill_(7.0),
        lambda: setattr(m, "length", 3),
    ):
        change()
        torch.testing.assert_close(call(_x()), _x() * m.table)


# What is let through


class Trainer:
    """Beside what the loss reads it has a loader, a history and much data."""

    def __init__(self) -> None:
        self.scale = 2.0
        self.history: list[float] = []
        self.loader = iter([1, 2])
        self.data = [object()] * 20_000
        self.times = False

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        if self.times:
            self.history.append(perf_counter())
        return x * getattr(self, _put("sc", "ale"))

    def whole(self, x: torch.Tensor) -> torch.Tensor:
        return x * vars(self)[_put("sc", "ale")]

    def fit(self) -> None:
        for _ in self.loader:
            self.history.append(time.time())


def test_what_a_function_does_not_read_is_not_in_its_way() -> None:
    for method in (Trainer.loss, Trainer.whole):
        trainer = Trainer()
        call = through(functools.partial(method, trainer))
        torch.testing.assert_close(call(_x()), _x() * 2)
        trainer.scale = 5.0
        torch.testing.assert_close(call(_x()), _x() * 5)


def test_what_libraries_read_for_themselves_is_let_through(tmp_path: pathlib.Path) -> None:
    log, thing = (tmp_path / "log").open("a"), Thing()

    def fun(x: torch.Tensor) -> torch.Tensor:
        import colorsys  # noqa: F401

        logging.getLogger("microtome.test").warning("once, at %s", "some time")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.warn("hm", stacklevel=1)
        log.write("once")
        with (tmp_path / "more").open("w") as more:
            more.write("once")
        pair = collections.namedtuple("pair", "a b")(thing.s0, time)
        return torch.nn.functional.relu(x) * pair.a

    with log:
        torch.testing.assert_close(through(fun)(_x()), _x() * 2)


def test_garbage_that_is_collected_meanwhile_reads_what_it_likes() -> None:
    read: list[float] = []

    def note(phase: str, info: dict[str, int]) -> None:
        read.append(perf_counter())

    class Leaving:
        def __del__(self) -> None:
            read.append(time.monotonic())

    def fun(x: torch.Tensor) -> torch.Tensor:
        Leaving()
        gc.collect(0)
        return x * (2.0 if time else 3.0)  # the name makes the trace look for clocks

    gc.callbacks.append(note)
    try:
        torch.testing.assert_close(through(fun)(_x()), _x() * 2)
    finally:
        gc.callbacks.remove(note)
    assert len(read) >= 3


def test_names_that_were_put_together_are_known_the_next_time() -> None:
    thing = Thing()

    def fun(x: torch.Tensor) -> torch.Tensor:
        return x * getattr(thing, _put("s", "0"))

    def count() -> int:
        return preparing._COMPILED[fun.__code__]

    for scale, expected in ((2.0, 1), (2.0, 1), (5.0, 2), (5.0, 2), (2.0, 2)):
        thing.s0 = scale
        thing.s1 += 1  # which nobody reads
        torch.testing.assert_close(through(fun)(_x()), fun(_x()))
        assert count() == expected


def test_a_name_that_is_another_one_in_each_trace_ends() -> None:
    thing, counter = Thing(), types.SimpleNamespace(number=0)

    def fun(x: torch.Tensor) -> torch.Tensor:
        counter.number += 1
        return x * getattr(thing, f"cache_{counter.number}", 3.0)

    call = through(fun)
    for _ in range(3):
        torch.testing.assert_close(call(_x()), _x() * 3)


def test_names_are_followed_in_losses_of_transforms() -> None:
    thing = Thing()

    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (w * x).sum() * getattr(thing, _put("s", "0"))

    clipped = mt.clipped_grad(loss, l2_clip_norm=1e6, keep_batch_dim=False)
    for scale in (2.0, 5.0, 7.0):
        thing.s0 = scale
        torch.testing.assert_close(clipped(torch.ones(2), torch.ones(3, 2)), torch.full((2,), 3 * scale))


def test_other_threads_and_profilers_are_left_alone() -> None:
    seen: list[str] = []
    entered, done = list[int](), threading.Event()
    error: list[BaseException] = []

    def other() -> None:
        try:
            while not entered:
                time.sleep(0.01)
            assert time.time() > 0
            assert getattr(Thing(), _put("s", "0")) == 2.0
            assert globals()["NUMBER"] == 2.0
            with open(__file__) as file:
                file.readline()
        except BaseException as e:
            error.append(e)
        done.set()

    def fun(x: torch.Tensor) -> torch.Tensor:
        entered.append(1)
        done.wait(60)
        return x * (2.0 if time else 3.0)  # the name makes the trace look for clocks

    def profile(frame: types.FrameType, event: str, arg: object) -> None:
        if event == "call":
            seen.append(frame.f_code.co_name)

    thread = threading.Thread(target=other)
    thread.start()
    sys.setprofile(profile)
    try:
        torch.testing.assert_close(through(fun)(_x()), _x() * 2)
        assert sys.getprofile() is profile
    finally:
        sys.setprofile(None)
        entered.append(1)
        thread.join()
    assert not error
    assert "fun" in seen
    assert isinstance(getattr, types.BuiltinFunctionType)


def test_an_autocast_object_that_is_held_compiles_once() -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(3, 2)
    layer.forward = torch.autocast("cpu", torch.bfloat16)(layer.forward)
    call = mt.as_torch(mt.as_jax(lambda x: layer(x)))
    x, traced = torch.ones(2, 3), []
    for _ in range(3):
        got = call(x)
        traced.append(len(cache.OUTLINES))
        assert got.dtype == torch.bfloat16
        torch.testing.assert_close(got, layer(x), rtol=2e-2, atol=4e-3)  # the sum is rounded before the bias is added
    assert traced[0] == traced[2]


def test_states_of_the_standard_library_and_hooks_of_all_modules() -> None:
    event, shared = threading.Event(), multiprocessing.Value("d", 1.0)
    logger, layer = logging.getLogger("microtome.watched"), torch.nn.Linear(1, 1)
    with decimal.localcontext() as context, torch.no_grad():
        layer.weight.fill_(1)
        layer.bias.fill_(0)
        hook: list[Any] = []
        changes = {
            "event": (lambda x: x * 2 if event.is_set() else x, event.set),
            "value": (lambda x: x * shared.value, lambda: setattr(shared, "value", 4.0)),
            "level": (lambda x: x * 2 if logger.isEnabledFor(logging.DEBUG) else x, lambda: logger.setLevel(10)),
            "context": (lambda x: x * decimal.getcontext().prec, lambda: setattr(context, "prec", 7)),
            "hook": (
                lambda x: layer(x),
                lambda: hook.append(nn.modules.module.register_module_forward_hook(lambda m, i, out: out * 3)),
            ),
        }
        for name, (fun, change) in changes.items():
            call, x = mt.as_torch(mt.as_jax(fun)), torch.ones(1)
            before = call(x)
            try:
                change()
                assert torch.equal(call(x), fun(x)), name
                assert not torch.equal(call(x), before), name
            finally:
                while hook:
                    hook.pop().remove()


_LIBRARY = """
def number(x, thing): return x * thing.factor
def tensor(x, thing): return x * thing.weight
def held(x, thing): return x * thing.inner.factor
def method(x, thing): return thing.compute(x)
def attribute_of_class(x, thing): return x * thing.shared
def derived(x, thing): return x * thing.twice
def slot(x, thing): return x * thing.slotted.factor
def chosen(x, thing): return x * thing.factor if thing.flag else x
def by_default(x, thing): return x * getattr(thing, "missing", 3.0)
"""


class _Slotted:
    __slots__ = ("factor",)

    def __init__(self) -> None:
        self.factor = 2.0


class _Handed:
    shared = 2.0

    def __init__(self) -> None:
        self.factor, self.weight, self.flag, self.slotted = 2.0, torch.ones(2), True, _Slotted()
        self.inner = self if type(self) is not _Handed else _Inner()

    @property
    def twice(self) -> float:
        return 2 * self.factor

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        return x + _OFFSETS["a"]


class _Inner(_Handed):
    pass


_OFFSETS = {"a": 1.0}
_CHANGES: dict[str, Callable[[Any], list[Change]]] = {
    "number": lambda t: _sets(t, "factor", 3.0),
    "tensor": lambda t: [*_sets(t, "weight", torch.full((2,), 5.0)), lambda: t.weight.mul_(2)],
    "held": lambda t: _sets(t.inner, "factor", 3.0),
    "method": lambda t: _items(_OFFSETS, "a", 4.0),
    "attribute_of_class": lambda t: _sets(type(t), "shared", 3.0),
    "derived": lambda t: _sets(t, "factor", 3.0),
    "slot": lambda t: _sets(t.slotted, "factor", 3.0),
    "chosen": lambda t: _sets(t, "flag", False),
    "by_default": lambda t: [lambda: setattr(t, "missing", 5.0)],
}


@pytest.mark.parametrize("name", _CHANGES)
def test_what_a_library_reads_of_an_object_of_the_users_is_never_stale(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(_OFFSETS, "a", 1.0)
    monkeypatch.setattr(_Handed, "shared", 2.0)
    library: dict[str, Any] = {}
    file = os.path.join(os.path.dirname(os.path.dirname(np.__file__)), "somebodys", "code.py")
    exec(compile(_LIBRARY, file, "exec"), library)
    thing, inside = _Handed(), library[name]
    fun = lambda x: inside(x, thing)
    made, x = as_torch(as_jax(fun)), torch.ones(2)
    assert torch.equal(made(x), fun(x))
    for change in _CHANGES[name](thing):
        change()
        assert torch.equal(made(x), fun(x))
    assert "__getattribute__" not in vars(_Handed)


_NAMESPACES: dict[str, Callable[[Any, Any, torch.Tensor], Any]] = {
    "closure": lambda read, t, x: read(x, t),
    "partial": lambda read, t, x: functools.partial(read, thing=t)(x),
    "local": lambda read, t, x: next(read(x, local) for local in [t]),
    "in a list": lambda read, t, x: read(x, [t][0]),
    "packed": lambda read, t, x: read(*(x, t)),
}


@pytest.mark.parametrize("name", ["number", "tensor", "held", "slot", "chosen", "by_default"])
def test_what_a_library_reads_of_a_namespace_is_never_stale(name: str) -> None:
    library: dict[str, Any] = {}
    file = os.path.join(os.path.dirname(os.path.dirname(np.__file__)), "somebodys", "code.py")
    exec(compile(_LIBRARY, file, "exec"), library)
    inside, x = library[name], torch.ones(2)
    for pass_on in list(_NAMESPACES.values()) if name == "number" else [_NAMESPACES["closure"]]:
        thing = types.SimpleNamespace(factor=2.0, weight=torch.ones(2), flag=True, slotted=_Slotted())
        thing.inner = types.SimpleNamespace(factor=2.0)
        fun = lambda x: pass_on(inside, thing, x)  # noqa: B023
        made = as_torch(as_jax(fun))
        assert torch.equal(made(x), fun(x))
        for change in _CHANGES[name](thing):
            change()
            assert torch.equal(made(x), fun(x))


def test_of_a_namespace_whose_fields_are_named_no_others_count() -> None:
    state, traced = types.SimpleNamespace(scale=2.0, calls=1, steps=0, last=None), []

    def fun(x: torch.Tensor) -> torch.Tensor:
        traced.append(1)
        state.calls = 1
        return x * state.scale

    call, counts = as_torch(as_jax(fun)), []
    for _ in range(3):
        call(torch.ones(2))
        state.steps += 1
        state.last = [torch.ones(2)]
        counts.append(len(traced))
    assert counts[2] == counts[0]


def test_what_a_cache_holds_is_its_own() -> None:
    def make(is_filled: bool) -> tuple[Fun, dict[str, float]]:
        table = {"a": 2.0}
        read = functools.cache(lambda key: table["a"])
        if is_filled:
            read(1)
        return lambda x: x * read(1) * read(2) / read(2), table

    x = torch.ones(2)
    for is_filled in (True, False):  # the code of both is the same
        fun, table = make(is_filled)
        table["a"] = 5.0
        call = through(fun)
        for _ in range(2):  # a trace that adds to a cache empties it
            assert torch.equal(call(x), x * (2 if is_filled else 5))
