"""``backward()`` in a traced function, for tensors that the function makes itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import marked
from torch import nn

from microtome import torch_api as mt
from microtome.bridge import as_jax, as_torch

torch.manual_seed(0)
LINEAR = nn.Linear(3, 2)


def _weights(value: float = 1.0) -> torch.Tensor:
    return torch.full((3,), value, requires_grad=True)


def _once(x: torch.Tensor) -> Any:
    w = _weights()
    ((w * x) ** 2).sum().backward()
    return w.grad * 2 + x  # type: ignore[operator]


def _twice(x: torch.Tensor) -> Any:
    w = _weights()
    ((w * x) ** 2).sum().backward()
    first = w.grad
    (w * x).sin().sum().backward()  # adds to the very tensor
    return w.grad * 2 + first  # type: ignore[operator]


def _of_several(x: torch.Tensor) -> Any:
    w, v = _weights(), _weights(2.0)
    torch.autograd.backward([(w * x * v).sum(), (v**2).sum()])
    return w.grad + v.grad  # type: ignore[operator]


def _with_cotangent(x: torch.Tensor) -> Any:
    w = _weights()
    (w * x).backward(x * 2, retain_graph=True)
    (w * x).backward(gradient=x * 3)
    return w.grad


def _differentiable(x: torch.Tensor) -> Any:
    w = _weights()
    ((w * x) ** 3).sum().backward(create_graph=True)
    return (w.grad**2).sum()  # type: ignore[operator]


def _of_what_is_no_leaf(x: torch.Tensor) -> Any:
    w = _weights()
    y = w * x
    y.retain_grad()
    (y**2).sum().backward()
    return y.grad + w.grad  # type: ignore[operator]


def _hooked(x: torch.Tensor) -> Any:
    w = _weights()
    w.register_hook(lambda g: g * 3)
    (w * x).sum().backward()
    return w.grad


def _perturbed(x: torch.Tensor) -> Any:
    """The fast gradient sign method, which asks for the gradient of the perturbation alone."""
    delta = torch.zeros_like(x, requires_grad=True)
    F.mse_loss(LINEAR(x + delta), torch.zeros(2)).backward(inputs=[delta])
    return F.mse_loss(LINEAR(x + 0.1 * delta.grad.sign()), torch.zeros(2))  # type: ignore[union-attr]


def _named_and_retained(x: torch.Tensor) -> Any:
    """What keeps its gradient by itself is not given it twice."""
    w = _weights()
    y = w * x
    z = y * 3
    for t in (y, z):
        t.retain_grad()
    (z**2).sum().backward(inputs=[w, z], retain_graph=True)
    (z**2).sum().backward(inputs=[y])
    return w.grad + y.grad * 2 + z.grad * 5  # type: ignore[operator]


def _double(leaf: torch.Tensor) -> None:
    leaf.grad.mul_(2)  # type: ignore[union-attr]


def _hooked_afterwards(x: torch.Tensor) -> Any:
    w, seen = _weights(), []
    w.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    w.register_post_accumulate_grad_hook(_double)
    for _ in range(2):
        ((w * x) ** 2).sum().backward()
    return w.grad + 10 * seen[1]  # type: ignore[operator]


def _fitted_in_backward(x: torch.Tensor) -> Any:
    w = _weights(0.0)
    steps = torch.optim.SGD([w], lr=0.1)

    def hook(_: torch.Tensor) -> None:
        steps.step()
        steps.zero_grad()

    w.register_post_accumulate_grad_hook(hook)
    for _ in range(3):
        ((w - x) ** 2).sum().backward()
    return w.detach() * x


def _fitted(optimizer: Callable[..., Any]) -> Callable[[torch.Tensor], Any]:
    def fun(x: torch.Tensor) -> Any:
        w = _weights(0.0)
        steps = optimizer([w], lr=0.1)
        for _ in range(3):
            steps.zero_grad()
            ((w - x) ** 2).sum().backward()
            steps.step()
        return w.detach() * x

    return fun


FUNCTIONS = {
    **{f.__name__: f for f in (_once, _twice, _of_several, _with_cotangent, _differentiable, _of_what_is_no_leaf)},
    **{f.__name__: f for f in (_hooked, _perturbed)},
    **{f.__name__: f for f in (_named_and_retained, _hooked_afterwards, _fitted_in_backward)},
    "_fitted by SGD": _fitted(torch.optim.SGD),
    "_fitted by Adam": _fitted(torch.optim.Adam),
}
_NEAR = ("_fitted by Adam", "_named_and_retained", "_twice", "_of_several", "_fitted_in_backward")


@pytest.mark.filterwarnings("ignore:Using backward")  # torch warns of a cycle of references
@pytest.mark.parametrize("name", marked(FUNCTIONS, slow=_NEAR))
def test_it_fills_what_the_function_makes(name: str) -> None:
    fun, xs = FUNCTIONS[name], torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
    x = xs[0].clone().requires_grad_(name == "_perturbed")  # the others would add to its .grad, were it a leaf
    expected, got = fun(x), as_torch(as_jax(fun))(x)
    torch.testing.assert_close(got, expected)
    if x.requires_grad:
        wanted = torch.autograd.grad(expected.sum(), x)
        torch.testing.assert_close(torch.autograd.grad(got.sum(), x), wanted)
    each = torch.stack([fun(row) for row in xs]).detach()
    torch.testing.assert_close(mt.micro_vmap(fun)(xs).detach(), each)
    LINEAR.zero_grad()


@pytest.mark.parametrize("whose", ["a tensor that it captures", "an argument"])
def test_it_is_refused_for_what_comes_from_outside(whose: str) -> None:
    def fun(x: torch.Tensor) -> Any:
        (LINEAR(x) if whose != "an argument" else x).sum().backward()
        return x

    with pytest.raises(TypeError, match=rf"test_backward_inside\.py:\d+: \.backward\(\) .* {whose}.*inputs="):
        as_torch(as_jax(fun))(torch.ones(3, requires_grad=True))
    with pytest.raises(RuntimeError, match=r"test_backward_inside\.py:\d+: no tensor .* requires grad"):
        as_torch(as_jax(lambda x: (x.sum().backward(), x)[1]))(torch.ones(3))
