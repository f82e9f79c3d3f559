"""Derivatives through a user's backward pass: right where it has them, else refused or computed by reverse mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import pytest
import torch
import torch.nn.functional as F
from helpers import marked
from torch.autograd.function import once_differentiable
from torch_cases import assert_same

from microtome import torch_api as mt
from microtome.bridge import as_jax, as_torch
from microtome.bridge.base.errors import NoForwardMode, TraceError

X, T = torch.tensor([0.5, 2.0]), torch.tensor([1.0, -1.0])


def _cube(backward: Any, jvp: Any = None) -> Any:
    """x³, with another backward pass."""

    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)
        return x**3

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    if jvp is not None:
        methods["jvp"] = staticmethod(jvp)
    return type("Cube", (torch.autograd.Function,), methods)


def _slope(ctx: Any) -> Any:
    return 3 * ctx.saved_tensors[0] ** 2


def _without_grad(ctx: Any, g: Any) -> Any:
    with torch.no_grad():
        return _slope(ctx) * g


def _partly_without_grad(ctx: Any, g: Any) -> Any:
    with torch.no_grad():
        part = ctx.saved_tensors[0] ** 2 * g
    return part + 2 * ctx.saved_tensors[0] ** 2 * g


def _in_a_buffer(ctx: Any, g: Any) -> Any:
    buffer = torch.empty_like(g)
    buffer.copy_(_slope(ctx) * g)
    return buffer + torch.zeros_like(g)


LINEAR: dict[str, Callable[[Any, Any], Any]] = {
    "plain": lambda ctx, g: _slope(ctx) * g,
    "saved tensor detached": lambda ctx, g: 3 * ctx.saved_tensors[0].detach() ** 2 * g,
    "in place": lambda ctx, g: g.clone().mul_(_slope(ctx)),
    "in a buffer": _in_a_buffer,
    "masked": lambda ctx, g: torch.where(ctx.saved_tensors[0] > 1, _slope(ctx) * g, 3 * ctx.saved_tensors[0] ** 2 * g),
}
# Of these autograd has no derivative.
UNSEEN: dict[str, Callable[[Any, Any], Any]] = {
    "once_differentiable": once_differentiable(lambda ctx, g: _slope(ctx) * g),
    "no_grad": _without_grad,
    "no_grad in part": _partly_without_grad,
}
# These have one, which is not that of a product with the transpose of a Jacobian.
OTHERWISE: dict[str, Callable[[Any, Any], Any]] = {
    "clamp": lambda ctx, g: (_slope(ctx) * g).clamp(-1, 1),
    "clamp before": lambda ctx, g: _slope(ctx) * g.clamp(-1, 1),
    "detach": lambda ctx, g: _slope(ctx) * g.detach(),
    "detach in part": lambda ctx, g: 2 * ctx.saved_tensors[0] ** 2 * g + ctx.saved_tensors[0] ** 2 * g.detach(),
    "data": lambda ctx, g: _slope(ctx) * g.data,
    "sign": lambda ctx, g: g.sign(),
    "rounded": lambda ctx, g: (4 * _slope(ctx) * g).round() / 4,
    "normalised": lambda ctx, g: g / (g.norm() + 1e-6),
    "where": lambda ctx, g: torch.where(g > 0, _slope(ctx) * g, 0),
}
EVERY = LINEAR | UNSEEN | OTHERWISE
QUICK = ("once_differentiable", "clamp")


def _fun(name: str) -> Callable[[Any], Any]:
    cube = _cube(EVERY[name])
    return lambda x: cube.apply(x.sin()) * x


def _jacobian(fun: Any, x: Any = X) -> Any:
    return torch.autograd.functional.jacobian(fun, x)


def _second(call: Any) -> Any:
    x = X.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(call(x).sum(), x, create_graph=True)
    return torch.autograd.grad((gradient**2).sum(), x)[0]


@pytest.mark.filterwarnings("ignore:.*has been compiled:UserWarning")
@pytest.mark.parametrize("name", marked(EVERY, quick=QUICK))
def test_custom_functions(name: str) -> None:
    fun = _fun(name)
    call = as_torch(as_jax(fun))
    push = lambda: torch.func.jvp(call, (X,), (T,))[1]
    assert_same(mt.jacobian(fun, X)[0], _jacobian(fun))
    if name in LINEAR:
        assert_same(push(), _jacobian(fun) @ T)
        assert_same(mt.hessian(lambda x: fun(x).sum(), X)[0], _jacobian(lambda x: _gradient(fun, x)))
        assert_same(_second(call), _second(fun))
        return
    with pytest.raises(NoForwardMode, match=r"test_forward_mode\.py:\d+: forward mode"):
        push()
    with pytest.raises(NoForwardMode, match=r"test_forward_mode\.py:\d+: forward mode"):
        mt.jacobian(fun, X, mode="forward")
    with pytest.raises(TraceError, match=r"test_forward_mode\.py:\d+: "):
        mt.hessian(lambda x: fun(x).sum(), X)
    if name in OTHERWISE:  # as torch differentiates that backward pass
        assert_same(_second(call), _second(fun))
    else:
        with pytest.raises(TraceError, match=r"test_forward_mode\.py:\d+: a backward pass runs without autograd"):
            _second(call)


def _gradient(fun: Any, x: Any) -> Any:
    return torch.autograd.grad(fun(x).sum(), x, create_graph=True)[0]


def test_more_outputs_than_inputs() -> None:
    fun = lambda x: torch.cat([_fun("once_differentiable")(x), x, x])
    for options in ({"nbatches": 2}, {"batch_size": 4, "out": torch.empty(6, 2)}):
        assert_same(mt.jacobian(fun, X, **options)[0], _jacobian(fun))


def test_a_jvp_of_the_users_is_used() -> None:
    own = _cube(UNSEEN["once_differentiable"], lambda ctx, t: 3 * ctx.saved_tensors[0] ** 2 * t)
    other = _cube(LINEAR["plain"], lambda ctx, t: 7 * t)
    call = as_torch(as_jax(lambda x: own.apply(x.sin()) * x))
    right = _jacobian(_fun("plain"))
    assert_same(torch.func.jvp(call, (X,), (T,))[1], right @ T)
    assert_same(torch.func.jvp(as_torch(as_jax(other.apply)), (X,), (T,))[1], 7 * T)
    assert_same(mt.jacobian(lambda x: own.apply(x.sin()) * x, X, mode="forward")[0], right)


def _hooked(hook: Any) -> Callable[[Any], Any]:
    def fun(x: Any) -> Any:
        y = x.sin()
        if y.requires_grad:
            y.register_hook(hook)
        return y**3 * x

    return fun


def test_ops_that_torch_differentiates_only_once() -> None:
    x, t = torch.tensor([-4.0, -1.0, 0.5, 2.0, 5.0]), torch.tensor([1.0, -1.0, 2.0, 3.0, 1.0])
    fun = lambda x: torch.sin(F.hardsigmoid(x) * x) * F.hardsigmoid((x * 2).clone(), inplace=True)
    assert_same(mt.lift(jax.jvp)(fun, (x,), (t,)), torch.func.jvp(fun, (x,), (t,)))
    labels = torch.tensor([1, 2, -1, 0, 0])
    with pytest.raises(NoForwardMode, match=r"test_forward_mode.py:\d+: forward mode .* Use reverse mode"):
        mt.lift(jax.jvp)(lambda x: F.multilabel_margin_loss(x, labels), (x,), (t,))


def test_hooks() -> None:
    # torch's forward mode does not see hooks: where one changes a gradient, reverse mode is another derivative.
    seen: list[Any] = []
    watched, doubled = _hooked(lambda g: seen.append(g.shape)), _hooked(lambda g: 2 * g)
    assert_same(torch.func.jvp(as_torch(as_jax(watched)), (X,), (T,))[1], _jacobian(watched) @ T)
    assert_same(mt.jacobian(doubled, X, mode="reverse")[0], _jacobian(doubled))
    for hook in (lambda g: 2 * g, lambda g: g.clamp(-0.1, 0.1)):
        with pytest.raises(NoForwardMode, match=r"test_forward_mode\.py:\d+: forward mode"):
            torch.func.jvp(as_torch(as_jax(_hooked(hook))), (X,), (T,))
        assert_same(mt.jacobian(_hooked(hook), X)[0], _jacobian(_hooked(hook)))


def test_what_is_detached_by_the_function_itself_has_no_derivative() -> None:
    def fun(x: Any) -> Any:
        with torch.no_grad():
            weight = x.exp()
        return weight * x + (x.round() - x).detach() + x * x.detach() + torch.relu(x) * x.sign()

    assert_same(torch.func.jvp(as_torch(as_jax(fun)), (X,), (T,))[1], _jacobian(fun) @ T)
    assert_same(mt.hessian(lambda x: fun(x).sum(), X)[0], _jacobian(lambda x: _gradient(fun, x)))
    assert_same(_second(as_torch(as_jax(fun))), _second(fun))
