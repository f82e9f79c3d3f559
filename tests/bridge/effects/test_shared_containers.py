"""A list, a dict or an object that stands in several places, or in other containers, is one after each call."""

from __future__ import annotations

import collections
import copy
import dataclasses
import gc
import types
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from helpers import crossed
from torch import nn

from microtome import torch_api as mt
from microtome.bridge import as_jax, as_torch

pytestmark = pytest.mark.filterwarnings("ignore:.* has been compiled")
X = torch.tensor([1.0, 2.0])
Make = Callable[[Any], Any]


@dataclasses.dataclass
class State:
    h: Any
    n: int = 0


class Pair(NamedTuple):
    one: Any
    two: Any


class Thing:
    def __init__(self, given: Any = None) -> None:  # by another name: no code that is traced names the attribute
        self.h = given


_OBJECTS = (State, Thing, types.SimpleNamespace)
# Containers of a tensor, which stands under "h", at 0, or in the attribute h.
NEW: dict[str, Make] = {
    "list": lambda t: [t],
    "dict": lambda t: {"h": t},
    "OrderedDict": lambda t: collections.OrderedDict(h=t),
    "defaultdict": lambda t: collections.defaultdict(list, h=t),
    "deque": lambda t: collections.deque([t], maxlen=3),
    "dataclass": State,
}
THERE: dict[str, Make] = {**NEW, "namespace": lambda t: types.SimpleNamespace(h=t), "object": Thing}
# What a container is put into, and how it is found there.
OUTER: dict[str, tuple[Make, Make]] = {
    "list": (lambda c: [c], lambda b: b[0]),
    "dict": (lambda c: {"k": c}, lambda b: b["k"]),
    "OrderedDict": (lambda c: collections.OrderedDict(k=c), lambda b: b["k"]),
    "deque": (lambda c: collections.deque([0, c]), lambda b: b[1]),
    "tuple": (lambda c: (c, 1), lambda b: b[0]),
    "NamedTuple": (lambda c: Pair(X * 2, c), lambda b: b.two),
    "dataclass": (lambda c: State((c, X * 2)), lambda b: b.h[0]),
    "deep": (lambda c: {"k": [(c, {"l": c})]}, lambda b: b["k"][0][1]["l"]),
}


def get(c: Any) -> Any:
    return c.h if isinstance(c, _OBJECTS) else c["h"] if isinstance(c, dict) else c[0]


def put(c: Any, t: Any) -> None:
    if isinstance(c, _OBJECTS):
        c.h = t
    else:
        c["h" if isinstance(c, dict) else 0] = t


def picture(state: Any) -> list[Any]:
    """All that stands in a state, with the containers and objects that are one."""
    seen: dict[int, int] = {}
    found: list[Any] = []

    def look(x: Any) -> None:
        if isinstance(x, (torch.Tensor, int, str, type(None))):
            found.append(x.tolist() if isinstance(x, torch.Tensor) else x)
        elif id(x) in seen:
            found.append(("seen", seen[id(x)]))
        else:
            seen[id(x)] = len(seen)
            fields = vars(x) if isinstance(x, _OBJECTS) else x if isinstance(x, dict) else dict(enumerate(x))
            found.append((type(x), list(fields)))
            for value in fields.values():
                look(value)

    look(state)
    return found


def check(make: Callable[[], Any], fun: Callable[[Any, Any], Any], user: Callable[[Any], Any] = lambda s: None) -> None:
    """Four calls, with what the user does after each, give what they give in torch."""
    wraps: list[Callable[[Any], Any]] = [lambda f: f, lambda f: as_torch(as_jax(f))]
    found = []
    for wrap in wraps:
        s = make()
        call, seen = wrap(lambda x, s=s: fun(s, x)), []
        for i in range(4):
            seen += [call(X + i).tolist(), picture(s)]
            user(s)
            seen.append(picture(s))
        found.append(seen)
    assert found[1] == found[0]


def holder(**fields: Any) -> Any:
    return types.SimpleNamespace(**{"a": None, "b": None} | fields)


@pytest.mark.parametrize(("inner", "outer"), crossed(NEW, OUTER))
def test_a_new_container_in_a_place_and_inside_of_another(inner: str, outer: str) -> None:
    make, (wrap, find) = NEW[inner], OUTER[outer]

    def fun(s: Any, x: Any) -> Any:
        if s.a is None:
            s.a = make(x * 1)
            s.b = wrap(s.a)
        put(s.a, get(s.a) * 0.5 + x)
        return get(find(s.b)).sum()

    check(holder, fun)
    check(holder, fun, lambda s: put(find(s.b), get(s.a) + 1))


@pytest.mark.parametrize(("inner", "outer"), crossed(NEW, OUTER))
def test_a_new_container_inside_of_two_others_in_each_call(inner: str, outer: str) -> None:
    make, (wrap, find) = NEW[inner], OUTER[outer]

    def fun(s: Any, x: Any) -> Any:
        y = 0 if s.a is None else get(find(s.a)) + get(s.b["there"])
        c = make(x * 1)
        s.a, s.b["there"] = wrap(c), c
        return (x + y).sum()

    check(lambda: holder(b={}), fun)
    check(lambda: holder(b={}), fun, lambda s: put(find(s.a), get(s.b["there"]) + 1))


@pytest.mark.parametrize(("where", "inner", "outer"), crossed(["place", "list", "tuple"], THERE, OUTER))
def test_a_container_from_before_the_call_inside_of_a_new_one(inner: str, outer: str, where: str) -> None:
    make, (wrap, find) = THERE[inner], OUTER[outer]
    hold: dict[str, tuple[Make, Make]] = {"place": (lambda c: c, lambda a: a), **OUTER}
    keep, take = hold[where]

    def fun(s: Any, x: Any) -> Any:
        s.b = wrap(take(s.a)) if s.b is None or s.again else s.b
        put(find(s.b), get(find(s.b)) * 0.5 + x)
        return get(take(s.a)).sum()

    for again in (False, True):
        start = lambda again=again: holder(a=keep(make(torch.zeros(2))), again=again)
        check(start, fun)
        check(start, fun, lambda s: put(take(s.a), get(find(s.b)) + 1))
        check(start, fun, lambda s: setattr(s, "a", keep(make(torch.ones(2)))))


def test_containers_that_are_copied_and_sliced_hold_the_same_ones() -> None:
    def fun(s: Any, x: Any) -> Any:
        s.copied, s.rest = copy.copy(s.a), s.layers[-1:]
        s.layers.append(s.layers[0])
        s.a["l"][0] = s.a["l"][0] + x
        s.rest[0]["k"] = s.rest[0]["k"] * 2 + x
        return (s.copied["l"][0] + s.layers[1]["k"]).sum()

    start = lambda: holder(a={"l": [X * 1], "t": X}, layers=[{"k": X * 1}, {"k": X * 2}], copied=None, rest=None)
    check(start, fun, lambda s: s.copied["l"].append(X * 3))


def test_what_holds_no_tensor_is_one_too_where_it_is_kept_beside_tensors() -> None:
    def fun(s: Any, x: Any) -> Any:
        inner = {"n": 1}
        outer = {"inner": inner, "s": [s.a]}
        s.b, s.c, s.d = outer, inner, {"t": x * 2, "outer": [outer]}
        s.log.append(inner)
        return x.sum() * (s.a["n"] + s.a2["n"])

    def start() -> Any:
        a = {"n": 2}
        return holder(a=a, a2=a, c=None, d=None, log=[])

    check(start, fun)
    check(start, fun, lambda s: s.c.update(n=s.c["n"] + 1))
    check(start, fun, lambda s: (s.b["s"][0].update(n=3), s.d["outer"][0].update(m=1)))


def test_a_new_container_that_holds_the_one_that_it_is_put_into() -> None:
    def fun(s: Any, x: Any) -> Any:
        s.a["ring"] = [s.a, x * 1]
        s.a["h"] = s.a["h"] + x
        return s.a["ring"][0]["h"].sum()

    check(lambda: holder(a={"h": X * 0}), fun, lambda s: s.a["ring"][0].update(h=X))


def test_a_new_container_that_holds_itself_is_refused_by_name() -> None:
    s = holder()

    def fun(x: Any) -> Any:
        a: list[Any] = [x * 1]
        a.append({"a": a})
        s.a = a
        return x.sum()

    with pytest.raises(
        TypeError, match=r"test_shared_containers\.py:\d+: .* assigns to .*\.a a new container that holds"
    ):
        as_torch(as_jax(fun))(X)
    assert s.a is None


@pytest.mark.parametrize("take", [lambda log: log[0], lambda log: [log[0]]])
def test_what_stands_in_a_log_is_refused_in_another_place(take: Any) -> None:
    s = holder(log=[{"n": 1, "in": {}}])

    def fun(x: Any) -> Any:
        s.a, s.b = take(s.log), [x * 2, take(s.log)]
        s.log.append(1)
        return x.sum()

    with pytest.raises(TypeError, match=r"appends to .*\. Keep what is moved in a place of its own too"):
        as_torch(as_jax(fun))(X)


def test_what_stands_further_inside_of_a_list_that_grows_is_moved() -> None:
    def fun(s: Any, x: Any) -> Any:
        s.a, s.b = (s.log[0]["in"],), [x * 2, (s.log[0]["in"],)]
        s.log.append(1)
        return x.sum() * len(s.a[0])

    check(lambda: holder(log=[{"n": 1, "in": {}}]), fun, lambda s: s.a[0].update({len(s.a[0]): 1}))


@pytest.mark.parametrize("thing", [Thing, lambda t: types.SimpleNamespace(h=t), lambda t: lambda: t])
def test_new_objects_with_tensors_are_refused_inside_of_containers_too(thing: Any) -> None:
    s = holder()

    def fun(x: Any) -> Any:
        s.a = {"t": x * 2, "l": [thing(x * 3)]}
        return x.sum()

    with pytest.raises(
        TypeError, match=r"assigns an object that holds tensors of the trace, without values, to .*\.a\."
    ):
        as_torch(as_jax(fun))(X)
    assert s.a is None


def test_each_object_of_a_class_keeps_its_own() -> None:
    """Calls with one key share a program: what it moves is what stands in the object that is called."""

    class Keeping:
        def __init__(self) -> None:
            self.sub, self.table, self.things = nn.Linear(2, 2), {"t": torch.zeros(2)}, frozenset({Thing(3)})
            self.pair: Any = ({"u": torch.zeros(2)},)
            self.ring: Any = None

        def __call__(self, x: Any, thing: Any) -> Any:
            one = next(iter(self.things))
            self.ring = [self.sub, x * one.h * thing.h, {"table": self.table, "u": self.pair[0]}, self, one, thing]
            return x + self.table["t"]

    call = as_torch(as_jax(lambda each, x, thing: each(x, thing)))
    for each in (Keeping(), Keeping()):
        thing = Thing(2)
        call(each, X, thing)
        expected = each.sub, each.table, each.pair[0], each, *each.things, thing
        ring = each.ring
        assert [*map(id, (ring[0], *ring[2].values(), *ring[3:]))] == [*map(id, expected)]


def test_in_derivatives_and_with_recompute() -> None:
    def run(wrap: Any) -> Any:
        s, w = holder(), torch.ones(2, requires_grad=True)

        def fun(x: Any) -> Any:
            if s.a is None:
                s.a = {"h": [torch.sin(w * x)]}
                s.b = [(s.a, s.a["h"])]
            s.b[0][1][0] = torch.sin(s.b[0][1][0] * w + x)
            return s.a["h"][0].sum() * w.sum()

        call = wrap(fun)
        outs = [call(X + i) for i in range(3)]
        (first,) = torch.autograd.grad(sum(outs) + get(s.a["h"]).sum(), w, create_graph=True)
        return first, *torch.autograd.grad(first.square().sum(), w)

    expected = run(lambda f: f)
    torch.testing.assert_close(run(lambda f: as_torch(as_jax(f))), expected)
    torch.testing.assert_close(run(lambda f: as_torch(as_jax(f), recompute=True)), expected)


def test_what_a_call_has_kept_is_freed_when_another_replaces_it() -> None:
    s = holder(c={"h": X})

    def fun(x: Any) -> Any:
        s.a = {"h": [x * 2]}
        s.b = (s.a["h"], s.c)
        return x.exp()

    call, x = as_torch(as_jax(fun)), torch.ones(2, requires_grad=True)
    gc.disable()
    try:
        for _ in range(3):
            result = call(x)
            refs = [weakref.ref(t) for t in (result.grad_fn, s.b[0][0], s.b[0][0].grad_fn)]
            del result
            s.a = s.b = None
            assert [ref() for ref in refs] == [None] * 3
    finally:
        gc.enable()


def test_functions_of_one_call_leave_one_container() -> None:
    def run(wrap: Any, both: Any) -> Any:
        s = holder(c=None)

        def one(x: Any) -> Any:
            a = {"h": [x * 2]}
            s.a, s.c = a, (a["h"], X)
            return x * 3

        def two(x: Any) -> Any:
            s.b = {"l": [s.a], "m": s.c[0]}
            return s.b["m"][0] * x

        call, seen = both(wrap(one), wrap(two)), []
        for i in range(3):
            seen += [call(X + i).tolist(), picture(s)]
            s.b["m"].append(X)
            seen.append(picture(s))
        return seen

    together = lambda one, two: lambda x: two(one(x))
    expected = run(lambda f: f, together)
    assert run(as_jax, lambda one, two: as_torch(together(one, two))) == expected


def test_what_another_function_of_the_call_has_made_is_refused_where_the_call_does_not_see_it() -> None:
    s = holder()

    def one(x: Any) -> Any:
        s.a = {"h": [x * 2]}
        return x

    def two(x: Any) -> Any:
        s.b = [s.a["h"], x]
        return x * s.b[0][0]

    one, two = as_jax(one), as_jax(two)
    with pytest.raises(TypeError, match=r"the function puts .*\['h'\] into another place.* Make both in one function"):
        as_torch(lambda x: two(one(x)))(X)


@pytest.mark.parametrize("way", [mt.micro_vmap, lambda f: mt.microbatch(f, 0, 1, mt.AccumulationType.CONCAT)])
def test_in_slices_what_stays_the_same_is_one(way: Any) -> None:
    s = holder(a={"h": X * 1}, c=None)

    def fun(x: Any) -> Any:
        s.b = [s.a, (s.a["h"],)]
        s.c = {"b": s.b}
        return (x * s.b[0]["h"]).sum(-1, keepdim=True)

    way(fun)(torch.ones(3, 2))
    assert s.b[0] is s.a
    assert s.c["b"] is s.b
    assert s.b[1][0] is s.a["h"]


# Arguments with a container in them, from a tensor, and how the container is found there.
GIVEN: dict[str, tuple[Make, Make]] = {
    **{name: (make, lambda argument: argument) for name, make in NEW.items()},
    "tuple": (lambda t: (t, 1), lambda argument: argument),
    "without tensors": (lambda t: [1, "a", {"b": 2.5}], lambda argument: argument),
    "inner": (lambda t: {"rows": [t, {"n": 1}]}, lambda argument: argument["rows"]),
    "inner without tensors": (lambda t: [t, {"n": 1}], lambda argument: argument[1]),
}
KEPT: dict[str, tuple[Make, Make]] = {"itself": (lambda c: c, lambda kept: kept), **OUTER}
KEPT["beside a new list"] = lambda c: {"c": c, "n": [1]}, lambda kept: kept["c"]


@pytest.mark.parametrize(("by_name", "given", "outer"), crossed([False, True], GIVEN, KEPT))
def test_a_container_among_the_arguments_that_is_kept_is_the_callers(given: str, outer: str, by_name: bool) -> None:
    (make, find), (keep, back) = GIVEN[given], KEPT[outer]
    s = holder(a=None, x=None)

    def fun(x: torch.Tensor, batch: Any) -> Any:
        s.a, s.x = keep(find(batch)), x * 2
        return x * 3

    call = as_torch(as_jax(fun))
    for i in range(4):
        batch = make(X + i)
        assert call(X, **{"batch": batch}).tolist() == [3, 6] if by_name else call(X, batch).tolist() == [3, 6]
        assert back(s.a) is find(batch)
        assert s.x.tolist() == [2, 4]


def test_containers_that_jax_code_makes_for_a_torch_function_are_its_own() -> None:
    s = holder(a=None)

    def keeps(batch: Any) -> Any:
        s.a = batch
        return batch["x"] * 2

    inner = as_jax(keeps)
    call = as_torch(lambda batch: inner({"x": batch["x"] + 1}))
    for i in range(3):
        batch = {"x": X + i}
        assert torch.equal(call(batch), (X + i + 1) * 2)
        assert s.a is not batch
        assert torch.equal(s.a["x"], X + i + 1)


# What a function makes anew, the way to change it, and what holds no tensor.
ANEW: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "list": (lambda: [1, 2], lambda c: c.append(3)),
    "dict": (lambda: {"a": "b"}, lambda c: c.update(c="d")),
    "deque": (lambda: collections.deque([1], maxlen=2), lambda c: c.append(2)),
    "nested": (lambda: {"a": [1, (2, [3])]}, lambda c: c["a"][1][1].append(4)),
    "set": (lambda: {1, 2}, lambda c: c.add(3)),
    "object": (lambda: Thing([1]), lambda c: c.h.append(2)),
    "bytearray": (lambda: bytearray(b"a"), lambda c: c.extend(b"b")),
}
WITH: dict[str, tuple[Callable[[Any, Any], Any], Make]] = {
    "alone": (lambda c, x: c, lambda kept: kept),
    "in a dict with a tensor": (lambda c, x: {"c": c, "t": x * 2}, lambda kept: kept["c"]),
    "in a list with a list": (lambda c, x: [c, [c]], lambda kept: kept[0]),
}


@pytest.mark.parametrize(("changes", "anew", "beside"), crossed([(), (0, 1, 2), (2,)], ANEW, WITH))
def test_what_is_made_anew_is_so_in_each_call(anew: str, beside: str, changes: tuple[int, ...]) -> None:
    (make, change), (keep, find) = ANEW[anew], WITH[beside]
    s = holder(a=None, t=None)

    def fun(x: torch.Tensor) -> Any:
        s.a, s.t = keep(make(), x), x * 2
        return x * 3

    def content(c: Any) -> Any:
        return copy.deepcopy(c.h if isinstance(c, Thing) else c)

    call, older = as_torch(as_jax(fun)), list[Any]()
    for i in range(5):
        call(X + i)
        found = find(s.a)
        assert content(found) == content(make())
        if beside == "in a dict with a tensor" or anew not in ("set", "object", "bytearray"):
            assert not any(found is one for one in older)
        older.append(found)
        if i in changes:
            change(found)
