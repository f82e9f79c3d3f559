"""Objects with tensors of a trace are made anew by each call, or refused by name."""

from __future__ import annotations

import dataclasses
import functools
import types
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from microtome import torch_api as mt
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


def _cycle(x: torch.Tensor) -> Any:
    one = _Object(x)
    one.other = _Object([one])
    return one


RETURNED: dict[str, tuple[Any, str]] = {
    "slots": (_Slotted, r"_Slotted\.held"),
    "deep": (lambda x: _Object(_Object([_Slotted({"k": (_Object(x),)})])), r"_Slotted\.held\['k'\]\[0\]\.held"),
    "cycle": (_cycle, r"_Object\.held"),
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


MADE: dict[str, Any] = {
    "object": _Object,
    "in a tuple": lambda x: (x, [_Object(x)]),
    "in a dict": lambda x: {"a": x, "b": {"c": _Object([{"k": x}])}},
    "in a dataclass": lambda x: _Fields(x, _Object(x)),
    "dataclass of objects": lambda x: _Fields([_Object(x)]),
    "deep": lambda x: _Object(_Object([{"k": (_Object(x), 3, "text")}])),
}


def _tensors(x: Any) -> list[torch.Tensor]:
    if isinstance(x, (_Object, _Fields)):
        x = vars(x)
    if isinstance(x, (dict, list, tuple)):
        return [t for v in (x.values() if isinstance(x, dict) else x) for t in _tensors(v)]
    return [x] if isinstance(x, torch.Tensor) else []


def test_an_object_that_the_function_makes_is_made_by_each_call() -> None:
    fun = lambda x: {name: make(torch.tanh(x)) for name, make in MADE.items()}
    call = as_torch(as_jax(fun))
    x = torch.randn(4, 2, generator=torch.Generator().manual_seed(0), requires_grad=True)
    first, second = call(x), call(x)
    assert type(first["object"]) is _Object is type(first["deep"].held.held[0]["k"][0])
    assert first["deep"].held.held[0]["k"][1:] == (3, "text")
    assert first["object"] is not second["object"]
    expected = _tensors(fun(x))
    torch.testing.assert_close(_tensors(second), expected)
    got, wanted = (torch.autograd.grad(sum(t.sum() for t in ts), x)[0] for ts in (_tensors(first), expected))
    torch.testing.assert_close(got, wanted)
    parts = lambda x: {name: part for name, part in fun(x).items() if name != "deep"}  # which holds a text
    expected = _tensors(parts(x))
    slices = mt.microbatch(parts, 0, 2, mt.AccumulationType.CONCAT, partition="contiguous")(x)
    torch.testing.assert_close(_tensors(slices), expected)


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
def test_the_cache_of_a_language_model_is_returned() -> None:
    config = transformers.LlamaConfig(
        vocab_size=11, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )
    torch.manual_seed(0)
    model, ids = transformers.LlamaForCausalLM(config).eval(), torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        got, expected = as_torch(as_jax(lambda ids: model(input_ids=ids)))(ids), model(input_ids=ids)
        torch.testing.assert_close(got.logits, expected.logits)
        caches = (output.past_key_values for output in (got, expected))
        steps = [model(input_ids=torch.tensor([[4]]), past_key_values=cache).logits for cache in caches]
    torch.testing.assert_close(*steps)


def test_objects_without_tensors_of_the_trace_are_returned_as_they_are() -> None:
    layer, known = nn.Linear(2, 2), _Object(None)
    objects = (_Object(3), _Object(torch.ones(2)), _Dict(a=1), lambda y: y)

    def fun(x: torch.Tensor) -> Any:
        layer.kept = known.held = x * 2
        return x + 1, layer, (*objects, known)

    call = as_torch(as_jax(fun))
    for step in range(2):
        out, same, more = call(torch.full((2,), float(step)))
        assert torch.equal(out, torch.full((2,), step + 1.0))
        assert same is layer
        assert all(a is b for a, b in zip(more, (*objects, known), strict=True))
        assert torch.equal(layer.kept, torch.full((2,), 2.0 * step))
        assert layer.kept is known.held
