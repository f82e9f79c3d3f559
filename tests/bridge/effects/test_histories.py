"""State and its history in autograd: what writes keep of it, and which writes a backward pass minds."""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import marked, through

Fun = Callable[..., Any]


_WRITES: tuple[Fun, ...] = (
    lambda c, x: c.copy_(x),
    lambda c, x: c.fill_(0.5),
    lambda c, x: c.zero_(),
    lambda c, x: c.mul_(x),
    lambda c, x: c.add_(x, alpha=0.5),
    lambda c, x: c.clamp_(max=0.3),
    lambda c, x: c.masked_fill_(x > 0, 0.25),
    lambda c, x: c.__setitem__(0, x[1]),
    lambda c, x: c.__setitem__(slice(None), x * 0.5),
    lambda c, x: c[:1].copy_(x[:1]),
    lambda c, x: c.data.copy_(x),
    lambda c, x: c.detach().mul_(0.5),
    lambda c, x: c.index_fill_(0, torch.tensor([1]), 0.75),
)


def _writing(state: types.SimpleNamespace, weight: torch.Tensor) -> Fun:
    def fun(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for c, write in zip(state.cells, _WRITES, strict=True):
                write(c, x)
        found = sum(torch.tanh(c) * (i + 1) for i, c in enumerate(state.cells))
        for c in state.cells[:: state.step]:
            c.add_(weight)
        return torch.as_tensor(found)

    return fun


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_write_where_autograd_is_off_keeps_the_history_of_what_it_writes_to(step: int) -> None:
    def run(transform: Fun) -> Any:
        torch.manual_seed(0)
        weight = torch.tensor([0.3, -0.7], requires_grad=True)
        cells = [torch.randn(2) for _ in _WRITES]
        state = types.SimpleNamespace(cells=cells, step=step)
        fun = transform(_writing(state, weight))
        seen = []
        for i in range(3):
            y = fun(torch.tensor([0.2, -0.4]) * (i + 1))
            seen.append((y.requires_grad, y.detach(), [(c.requires_grad, c.detach().clone()) for c in cells]))
        y.sum().backward()
        return seen, weight.grad, all(a is b for a, b in zip(cells, state.cells, strict=True))

    torch.testing.assert_close(run(through), run(lambda f: f))


_FREE: dict[str, Fun] = {  # of x, w, m
    "added": lambda x, w, m: torch.tanh(x @ w) + m,
    "multiplied with a constant": lambda x, w, m: x * m * w,
    "half of it is read": lambda x, w, m: (torch.tanh(x * w), w * 2 + m),
    "chosen by": lambda x, w, m: torch.where(m > 0, x * w, w),
    "copied": lambda x, w, m: torch.cat([x * w, m]),
}


@pytest.mark.parametrize("name", marked(_FREE, slow=("added", "chosen by")))
def test_what_a_backward_pass_does_not_read_may_be_written_to_before_it(name: str) -> None:
    for captured, written, part in itertools.product((False, True), range(3), range(2)):

        def run(transform: Fun, captured: bool = captured, written: int = written, part: int = part) -> Any:
            x, w, m = torch.full((2, 2), 0.5), torch.eye(2) + 0.3, torch.full((2, 2), -0.5)
            w.requires_grad_()
            fun = transform((lambda x: _FREE[name](x, w, m)) if captured else _FREE[name])
            out = fun(x) if captured else fun(x, w, m)
            with torch.no_grad():
                (x, w, m)[written].mul_(3)
            (out[part] if isinstance(out, tuple) else out).sum().backward()
            return w.grad

        try:
            expected = run(lambda f: f)
        except RuntimeError:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                run(through)
        else:
            torch.testing.assert_close(run(through), expected)


def test_state_that_no_gradient_reaches_leads_to_no_second_backward_pass() -> None:
    def run(transform: Fun) -> Any:
        weight = torch.tensor([0.5, -0.5], requires_grad=True)
        state = types.SimpleNamespace(h=torch.zeros(2))

        def cell(x: torch.Tensor) -> Any:
            state.h = torch.tanh(x * weight) + state.h.detach()
            return state.h.sum(), state.h * 2

        fun = transform(cell)
        for i in range(3):
            fun(torch.ones(2) * i)[i % 2].sum().backward()
        return weight.grad, state.h.detach()

    torch.testing.assert_close(run(through), run(lambda f: f))


def test_second_derivatives_of_what_was_written_to_are_refused() -> None:
    w, m = torch.ones(2, requires_grad=True), torch.ones(2)
    out = through(lambda x: x * w + m)(torch.ones(2))
    m.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out.sum(), w, create_graph=True)


@pytest.mark.parametrize("is_read", [False, True])
def test_state_that_was_made_in_inference_mode_is_as_torch_has_it(is_read: bool) -> None:
    def run(transform: Fun) -> Any:
        weight, state = torch.tensor([0.5, -0.5], requires_grad=True), types.SimpleNamespace(m=torch.ones(2))

        def fun(x: torch.Tensor) -> torch.Tensor:
            h = x * weight
            kept, state.m = state.m, state.m + h.detach()
            return h * (kept if is_read else state.m)

        made = transform(fun)
        with torch.inference_mode():
            made(torch.ones(2))
        made(torch.ones(2)).sum().backward()
        return weight.grad, state.m

    if is_read:
        for transform in (through, lambda f: f):
            with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
                run(transform)
    else:
        torch.testing.assert_close(run(through), run(lambda f: f))
