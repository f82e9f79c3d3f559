"""What a function asks of a tensor's layout is answered as for the tensor that was passed, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import marked
from torch import nn
from torch_cases import assert_same

from microtome import torch_api as mt
from microtome.bridge import as_jax, as_torch
from microtome.bridge.base.errors import TraceError

BASE = torch.arange(48.0).reshape(4, 3, 4) + 1
LAYOUTS = {
    "contiguous": BASE,
    "transposed": (torch.arange(48.0).reshape(3, 4, 4) + 1).transpose(0, 1),
    "sliced": torch.arange(96.0).reshape(4, 3, 8)[..., 1:5],
    "every other": torch.arange(96.0).reshape(4, 3, 8)[..., ::2],
    "expanded": torch.arange(12.0).reshape(1, 3, 4).expand(4, 3, 4),
    "channels behind": torch.arange(48.0).reshape(4, 4, 3).permute(0, 2, 1),
}


def _asks(x: Any) -> Any:
    y = x + 1
    return {
        "strides": x * sum(k * s for k, s in zip((1, 10, 100), x.stride(), strict=True)),
        "contiguous": x * (2 if x.is_contiguous() else 3),
        "transposed back": x * (2 if x.transpose(0, 1).is_contiguous() else 3),
        "dense": x * (2 if torch.ops.aten.is_non_overlapping_and_dense(x) else 3),
        "result": y * y.stride(0),
        "like": torch.empty_like(x).fill_(2) * torch.empty_like(x).stride(0),
        "contiguous()": x.contiguous().view(-1),
        "reshape": x.reshape(-1) * (2 if x.reshape(-1).is_contiguous() else 3),
        "splits an axis": x.view(2, 2, 3, 4) if x.stride(0) else x.reshape(2, 2, 3, 4),
    }


def _writes(x: Any) -> Any:
    """Through a reshape that is a view or a copy, as the layout has it."""
    y = torch.empty_like(x).copy_(x)
    y.reshape(-1)[0] = 7
    y.flatten(1)[0, 1] = 5
    return y


def _view(x: Any) -> Any:
    return x.view(-1)


def _viewed_as(x: Any) -> Any:
    return x.view(4, 12) * 2


@pytest.mark.parametrize("layout", marked(LAYOUTS, slow=("sliced", "every other")))
def test_arguments(layout: str) -> None:
    x = LAYOUTS[layout]
    fun = lambda x: (_asks(x), _writes(x))
    assert_same(as_torch(as_jax(fun))(x), fun(x))
    for viewed in (_view, _viewed_as):
        call = as_torch(as_jax(viewed))
        try:
            right = viewed(x)
        except RuntimeError:
            with pytest.raises(RuntimeError, match=r"test_layout_questions\.py:\d+: view"):
                call(x)
        else:
            assert_same(call(x), right)


_TRACES: list[int] = []


def test_one_function_with_several_layouts() -> None:
    def fun(x: Any) -> Any:
        _TRACES.append(1)
        return x * (2 if x.is_contiguous() else 3)

    call = as_torch(as_jax(fun))
    for _ in range(2):
        for x in LAYOUTS.values():
            assert_same(call(x), x * (2 if x.is_contiguous() else 3))
    assert len(_TRACES) == len({x.stride() for x in LAYOUTS.values()})
    for start in range(4):  # another slice of the same kind is no other layout
        assert_same(call(torch.ones(4, 3, 12)[..., start : start + 4]), torch.full((4, 3, 4), 3.0))
    assert len(_TRACES) == len({x.stride() for x in LAYOUTS.values()}) + 1


def test_captured_tensors() -> None:
    linear = nn.Linear(3, 3)
    linear.weight = nn.Parameter(torch.arange(9.0).reshape(3, 3).t())
    fun = lambda x: x * (2 if linear.weight.is_contiguous() else 3) * linear.weight.stride(0)
    call = as_torch(as_jax(fun))
    assert_same(call(BASE[0, 0, :3]), fun(BASE[0, 0, :3]))
    linear.weight = nn.Parameter(torch.arange(9.0).reshape(3, 3))
    assert_same(call(BASE[0, 0, :3]), fun(BASE[0, 0, :3]))


def test_gradients_and_further_derivatives() -> None:
    fun = lambda x: (x**3 * (2 if x.is_contiguous() else 3)).sum()
    call = as_torch(as_jax(fun))
    for x in (BASE, LAYOUTS["transposed"], LAYOUTS["sliced"]):
        x = x.detach().requires_grad_()
        got, right = (torch.autograd.grad(f(x), x, create_graph=True)[0] for f in (call, fun))
        assert_same(got.detach(), right.detach())
        assert_same(torch.autograd.grad(got.sum(), x)[0], torch.autograd.grad(right.sum(), x)[0])


def test_slices_of_a_batch_have_their_elements_in_order() -> None:
    fun = lambda x: x * (2 if x.is_contiguous() else 3)
    rows = LAYOUTS["transposed"]
    assert_same(mt.chunked_vmap(fun, 2)(rows), rows * 2)
    assert_same(mt.microbatch(lambda x: fun(x).sum(), 0, 2)(rows), (rows * 2).sum())


def _offset(x: Any) -> Any:
    return x * x.storage_offset()


def test_the_place_in_memory_is_told_where_it_is_the_usual_one() -> None:
    call = as_torch(as_jax(_offset))
    assert_same(call(BASE), BASE * 0)
    for x in (BASE[1:], LAYOUTS["sliced"], LAYOUTS["transposed"]):
        with pytest.raises(TraceError, match=r"test_layout_questions\.py:\d+: "):
            call(x)
