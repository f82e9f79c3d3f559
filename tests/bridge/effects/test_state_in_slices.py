"""State of functions that run in slices or per example: refused by name where slices would find it changed."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import marked
from torch import nn

from microtome import torch_api as mt

TRANSFORMS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "microbatch": lambda net, x: mt.microbatch(net, 0, 2, mt.AccumulationType.CONCAT)(x),
    "micro_vmap": lambda net, x: mt.micro_vmap(net, microbatch_size=2)(x),
    "chunked_vmap": lambda net, x: mt.chunked_vmap(net, 2)(x),
    "sliced_scan": lambda net, x: mt.sliced_scan(lambda c, x: (c, net(x)), torch.zeros(1), x)[1],
    "checkpoint_chunked_scan": lambda net, x: mt.checkpoint_chunked_scan(
        lambda c, x: (c, net(x)), torch.zeros(1), x, chunk_size=2
    )[1],
    "micro_grad": lambda net, x: mt.micro_grad(lambda w, x: (net(x) * w).sum())(torch.ones(2), x)[0],
    "clipped_grad": lambda net, x: mt.clipped_grad(lambda w, x: (net(x) * w).sum(), l2_clip_norm=1.0)(torch.ones(2), x),
    "clipped_backward": lambda net, x: mt.clipped_backward(net, lambda m, x: m(x).sum(), max_grad_norm=1.0)(x),
}
_QUICK = "chunked_vmap"
_ALL = [pytest.param(n, marks=[] if n == _QUICK else [pytest.mark.slow]) for n in TRANSFORMS]


class _Net(nn.Module):
    def __init__(self, step: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.step, self.table, self.count, self.cache = nn.Linear(2, 2), step, None, 0, {}
        self.a, self.b = torch.ones(2), torch.full((2,), 2.0)
        self.register_buffer("u", torch.ones(2))
        self.register_buffer("w", torch.full((2,), 3.0))
        self.rows, self.other = [torch.ones(2), torch.zeros(2)], [torch.zeros(2), torch.ones(2)]
        self.queue = collections.deque([torch.ones(2), torch.zeros(2)])
        self.named = {"a": torch.ones(2), "b": torch.zeros(2)}
        self.layers, self.listed = [nn.Linear(2, 2), nn.Linear(2, 2)], nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.step(self, x)


def _attributes(net: Any, x: torch.Tensor) -> Any:
    net.a, net.b = net.b, net.a
    return net.layer(x) + net.a


def _buffers(net: Any, x: torch.Tensor) -> Any:
    net.u, net.w = net.w, net.u
    return net.layer(x) + net.u


def _reversed(net: Any, x: torch.Tensor) -> Any:
    net.rows.reverse()
    return net.layer(x) * net.rows[0]


def _rotated(net: Any, x: torch.Tensor) -> Any:
    net.rows.append(net.rows.pop(0))
    return net.layer(x) * net.rows[0]


def _queued(net: Any, x: torch.Tensor) -> Any:
    net.queue.rotate(1)
    return net.layer(x) * net.queue[0]


def _entries(net: Any, x: torch.Tensor) -> Any:
    net.named["a"], net.named["b"] = net.named["b"], net.named["a"]
    return net.layer(x) * net.named["a"]


def _lists(net: Any, x: torch.Tensor) -> Any:
    net.rows, net.other = net.other, net.rows
    return net.layer(x) * net.rows[0]


def _modules(net: Any, x: torch.Tensor) -> Any:
    net.layers.reverse()
    return net.layers[0](x)


def _listed_modules(net: Any, x: torch.Tensor) -> Any:
    net.listed[0], net.listed[1] = net.listed[1], net.listed[0]
    return net.listed[0](x)


def _unused(net: Any, x: torch.Tensor) -> Any:
    net.a, net.b = net.b, net.a
    return net.layer(x)


def _constant_after_use(net: Any, x: torch.Tensor) -> Any:
    before, net.a = net.a, torch.zeros(2)
    return net.layer(x) + before


def _first_time(net: Any, x: torch.Tensor) -> Any:
    if net.table is None:
        net.table = torch.arange(2.0)
        return net.layer(x) * 3
    return net.layer(x) * net.table


def _another_constant(net: Any, x: torch.Tensor) -> Any:
    net.count += 1
    net.table = torch.tensor(float(net.count))
    return net.layer(x)


def _toggled(net: Any, x: torch.Tensor) -> Any:
    net.table = torch.ones(2) if net.table is None else None
    return net.layer(x)


CHANGED = {
    _attributes: "_Net.a",
    _buffers: "_Net.u",
    _reversed: r"rows\[1\]",
    _rotated: r"rows\[1\]",
    _queued: r"queue\[1\]",
    _entries: r"named\['a'\]",
    _lists: "_Net.rows",
    _modules: r"layers\[1\]",
    _listed_modules: "ModuleList.0",
    _unused: "_Net.a",
    _constant_after_use: "_Net.a",
    _first_time: "_Net.table",
    _another_constant: "_Net.table",
    _toggled: "_Net.table",
}


@pytest.mark.parametrize("name", marked(TRANSFORMS, quick=(_QUICK, "microbatch", "clipped_grad")))
def test_what_each_slice_would_find_in_another_place_is_refused(name: str) -> None:
    for step, place in list(CHANGED.items())[:: 1 if name == _QUICK else 3]:
        net = _Net(step)
        before = dict(vars(net)), list(net.rows), list(net.queue), dict(net.named), list(net.layers)
        match = rf"in_slices.py:\d+: the function (changes|puts something .*into) \S*{place}"
        with pytest.raises(TypeError, match=match):
            TRANSFORMS[name](net, torch.ones(4, 2))
        for one, two in zip(before, (vars(net), net.rows, net.queue, net.named, net.layers), strict=True):
            values = [x.values() if isinstance(x, dict) else x for x in (one, two)]
            assert all(x is y for x, y in zip(*values, strict=True))


def _the_same(net: Any, x: torch.Tensor) -> Any:
    net.a, net.u, net.table, net.other = net.a, net.w, net.layer.weight, [net.layer.bias]
    return net.layer(x) * net.u + net.table[0]


def _tables(net: Any, x: torch.Tensor) -> Any:
    if net.table is None:
        net.table, net.cache[2] = torch.arange(2.0) * 2, torch.ones(2)
    if not hasattr(net, "mask") or net.mask.size(0) < 2:
        net.register_buffer("mask", torch.tril(torch.ones(2, 2)).bool(), persistent=False)
    return net.layer(x) * (net.table + net.cache[2]) @ net.mask[:2, :2].float()


def _reset(net: Any, x: torch.Tensor) -> Any:
    net.table, net.a = torch.zeros(2), torch.full((2,), torch.nan)
    net.table = net.table + x
    return net.layer(x) * net.table


def _there_and_back(net: Any, x: torch.Tensor) -> Any:
    net.rows.reverse()
    out = net.layer(x) * net.rows[0]
    net.rows.reverse()
    return out


@pytest.mark.filterwarnings("ignore:.*keeps a tensor in _Net.other:UserWarning")  # where parameters are replaced
@pytest.mark.parametrize("name", _ALL)
def test_what_each_slice_finds_as_it_was_is_no_change(name: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 2)
    for step in (_the_same, _tables, _reset, _there_and_back):
        net = _Net(step)
        for _ in range(2):
            got = TRANSFORMS[name](net, x)
        if "grad" not in name and "clipped" not in name:
            torch.testing.assert_close(got, torch.stack([net(row) for row in x]))


# What is kept for after the call


def _attribute(net: Any, x: torch.Tensor) -> Any:
    net.last = x * 2
    return net.layer(x)


def _entry(net: Any, x: torch.Tensor) -> Any:
    net.cache["last"] = net.layer(x)
    return net.layer(x)


def _of_a_library(net: Any, x: torch.Tensor) -> Any:
    setattr(net.layer, "last", x.detach())  # noqa: B010
    return net.layer(x)


def _variable(net: Any, x: torch.Tensor) -> Any:
    global LAST
    LAST = x * 2
    return net.layer(x)


def _hook(net: Any, seen: Any) -> None:
    net.layer.register_forward_hook(lambda module, args, out: seen.__setitem__("out", out))


def _named_hooks(net: Any, seen: Any) -> None:
    for name, module in net.named_children():
        module.register_forward_hook(lambda module, args, out, name=name: seen.update({name: out}))


LAST: Any = None
LATER = {_attribute: "_Net.last", _entry: r"cache\['last'\]", _of_a_library: "Linear.last", _variable: "LAST"}


@pytest.mark.parametrize("name", _ALL)
def test_what_is_kept_for_later_is_dropped_with_a_warning(name: str) -> None:
    x = torch.ones(4, 2)
    for step, place in list(LATER.items())[:: 1 if name == _QUICK else 2]:
        net = _Net(step)
        expected = rf"in_slices.py:\d+: the function keeps a tensor in .*{place}.*Return"
        with pytest.warns(UserWarning, match=expected) as seen:
            TRANSFORMS[name](net, x)
        assert seen[0].filename == __file__  # where the user calls, not where the warning is raised
        assert (net.cache, LAST) == ({}, None)
        assert not any(hasattr(module, "last") for module in net.modules())
    for register, place in ((_hook, r"seen\['out'\]"), (_named_hooks, r"seen\['layer'\]")):
        net, seen = _Net(lambda net, x: net.layer(x)), {}
        register(net, seen)
        with pytest.warns(UserWarning, match=rf"the function keeps a tensor in .*{place}"):
            TRANSFORMS[name](net, x)
        assert not seen


# What each slice would change once more


def _counter(net: Any, x: torch.Tensor) -> Any:
    net.count += 1
    return net.layer(x)


def _counted_entry(net: Any, x: torch.Tensor) -> Any:
    net.cache["n"] = net.cache.get("n", 0) + 1
    return net.layer(x)


def _new_entry(net: Any, x: torch.Tensor) -> Any:
    net.cache[len(net.cache)] = None
    return net.layer(x)


def _log(net: Any, x: torch.Tensor) -> Any:
    net.log.append("call")
    return net.layer(x)


def _log_anew(net: Any, x: torch.Tensor) -> Any:
    net.words = [*net.words, "call"]
    return net.layer(x)


def _taken_out(net: Any, x: torch.Tensor) -> Any:
    net.words.pop()
    return net.layer(x)


def _bounded_log(net: Any, x: torch.Tensor) -> Any:
    net.times.append(1)
    return net.layer(x)


def _members(net: Any, x: torch.Tensor) -> Any:
    net.members.add(len(net.members))
    return net.layer(x)


def _switched(net: Any, x: torch.Tensor) -> Any:
    net.training = not net.training
    return net.layer(x)


def _counter_of_a_function(net: Any, x: torch.Tensor) -> Any:
    _counter_of_a_function.calls += 1  # type: ignore[attr-defined]
    return net.layer(x)


_counter_of_a_function.calls = 0  # type: ignore[attr-defined]
MOVING = {
    _counter: "_Net.count",
    _counted_entry: r"\S*cache\['n'\]",
    _new_entry: r"\S*cache\[1\]",
    _log: r"\S*log",
    _log_anew: "_Net.words",
    _taken_out: r"\S*words\[7\]",
    _bounded_log: r"\S*times",
    _members: r"\S*members",
    _switched: "_Net.training",
    _counter_of_a_function: "_counter_of_a_function.calls",
}


def _moving(step: Any) -> Any:
    net: Any = _Net(step)
    net.log, net.words, net.members = [], ["a"] * 9, {0}
    net.times = collections.deque([0], maxlen=4)
    return net


@pytest.mark.parametrize("name", _ALL)
def test_what_each_slice_would_change_once_more_is_named_in_a_warning(name: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 2)
    for step, place in list(MOVING.items())[:: 1 if name == _QUICK else 3]:
        net = _moving(step)
        with pytest.warns(UserWarning, match=rf"in_slices.py:\d+: the function changes {place} each time.*outside"):
            got = TRANSFORMS[name](net, x)
        if name == _QUICK:
            torch.testing.assert_close(got, torch.stack([net(row) for row in x]))


def _settled(net: Any, x: torch.Tensor) -> Any:
    net.count, net.cache["shape"], net.words = 7, x.shape, ["call"]
    net.members.add(1)
    net.cache.setdefault(net.count, []).clear()
    net.times.append(1)
    net.times.pop()
    net.mark = True
    del net.mark
    return net.layer(x)


@pytest.mark.parametrize("name", _ALL)
def test_what_each_slice_changes_in_the_same_way_is_no_change(name: str) -> None:
    net = _moving(_settled)
    for _ in range(2):
        TRANSFORMS[name](net, torch.ones(4, 2))
    assert (net.count, net.members, net.words) == (7, {0, 1}, ["call"])


def _hidden(net: Any, x: torch.Tensor) -> Any:
    net.table = torch.zeros(2)
    for _ in range(2):
        net.table = net.table * 0.5 + net.layer(x)
    net.cache["k"] = net.table * 2
    net.named["a"] = net.cache.get("k")
    return net.table + net.cache["k"] * net.named["a"]


def _read_by_name(net: Any, x: torch.Tensor) -> Any:
    net.found = x * 2
    return net.layer(x) + getattr(net, "found")  # noqa: B009


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_what_a_function_reads_again_is_dropped_in_silence() -> None:
    x = torch.ones(4, 2)
    nets = [_Net(_hidden), _Net(_read_by_name), nn.utils.weight_norm(nn.Linear(2, 2))]
    for net in nets:
        torch.testing.assert_close(TRANSFORMS[_QUICK](net, x), torch.stack([net(row) for row in x]))


def test_what_a_library_counts_for_itself_is_in_no_warning() -> None:
    compiled = torch.compile(torch.nn.Linear(2, 2), backend="eager")
    assert mt.microbatch(lambda x: compiled(x).sum(), 0, 2)(torch.ones(4, 2)).shape == ()
