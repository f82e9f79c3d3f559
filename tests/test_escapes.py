"""What would carry tensors of a trace out of it is refused by name."""

from __future__ import annotations

import dataclasses
import functools
import types
from typing import Any

import pytest
import torch
from torch import nn

from microtome.bridge import as_jax, as_torch


class _Object:
    def __init__(self, held: Any) -> None:
        self.held = held


class _Slotted:
    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held


class _Dict(dict):  # type: ignore[type-arg]
    pass


class _List(list):  # type: ignore[type-arg]
    pass


@dataclasses.dataclass
class _Fields:
    one: Any
    two: Any = None


def _layer_with(x: torch.Tensor) -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.held = x
    return layer


RETURNED: dict[str, tuple[Any, str]] = {
    "object": (_Object, r"_Object\.held"),
    "slots": (_Slotted, r"_Slotted\.held"),
    "in a tuple": (lambda x: (x, [_Object(x)]), r"_Object\.held"),
    "in a dict": (lambda x: {"a": x, "b": {"c": _Object([{"k": x}])}}, r"_Object\.held\[0\]\['k'\]"),
    "in a dataclass": (lambda x: _Fields(x, _Object(x)), r"_Object\.held"),
    "dataclass of objects": (lambda x: _Fields([_Object(x)]), r"_Fields\.one\[0\]\.held"),
    "deep": (lambda x: _Object(_Object([_Slotted({"k": (_Object(x),)})])), r"held\.held\[0\]\.held\['k'\]\[0\]\.held"),
    "subclasses": (lambda x: (_Dict(a=1), _Dict(a=x)), r"_Dict\['a'\]"),
    "list": (lambda x: _List([1, x]), r"_List\[1\]"),
    "set": (lambda x: (x, frozenset([x])), "frozenset"),
    "closure": (lambda x: lambda y: x + y, r"function\.x"),
    "default": (lambda x: lambda y, held=x: held + y, "function"),
    "partial": (lambda x: functools.partial(torch.add, x), r"partial\.args\[0\]"),
    "method": (lambda x: types.MethodType(lambda self: self.held, _Object(x)), r"method\.__self__\.held"),
    "builtin": (lambda x: x.sum, "__self__"),
    "module": (_layer_with, r"Linear\.held"),
    "error": (lambda x: ValueError("text", x), r"ValueError\.args\[1\]"),
}


def test_an_object_with_tensors_of_the_trace_is_not_returned() -> None:
    for name, (make, held) in RETURNED.items():
        match = rf"test_escapes.py:\d+: the function returns an object .*holds a tensor of the trace.*{held}"
        with pytest.raises(TypeError, match=match):
            as_torch(as_jax(lambda x, make=make: make(x * 2)))(torch.ones(2))
        with pytest.raises(TypeError, match=match):
            as_torch(as_jax(lambda x, make=make: make(x.new_ones(2))))(torch.ones(2)), name


def test_objects_without_tensors_of_the_trace_are_returned_as_they_are() -> None:
    layer, objects = nn.Linear(2, 2), (_Object(3), _Object(torch.ones(2)), _Dict(a=1), lambda y: y)

    def fun(x: torch.Tensor) -> Any:
        layer.kept = x * 2
        return x + 1, layer, objects

    call = as_torch(as_jax(fun))
    for step in range(2):
        out, same, more = call(torch.full((2,), float(step)))
        assert torch.equal(out, torch.full((2,), step + 1.0))
        assert same is layer
        assert all(a is b for a, b in zip(more, objects, strict=True))
        assert torch.equal(layer.kept, torch.full((2,), 2.0 * step))
