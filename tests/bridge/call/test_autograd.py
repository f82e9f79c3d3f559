"""A call is part of torch's autograd: every mode of differentiation, held against the plain function."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import jax
import pytest
import torch
import torch.nn.functional as F
from helpers import live_arrays, marked, through
from torch import nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from microtome import torch_api as mt
from microtome.bridge import as_jax, as_torch

func = torch.func

# What fails today, with the reason: an entry that no longer fails is reported and has to go.
_AROUND_WRONG = {
    "linearize": "it records with make_fx, which cannot look into a call",
    "functionalize": "torch has no rule for it to pass an autograd.Function",
    "autograd.functional.jacobian, forward": "torch.autograd's own vmap gives dual numbers whose memory cannot be read",
}

Fun = Callable[..., Any]
DOUBLE = torch.float64


pytestmark = pytest.mark.usefixtures("seeded")


def _close(got: Any, expected: Any) -> None:
    assert type(got) is type(expected)
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    elif isinstance(expected, dict):
        assert list(got) == list(expected)
        for key in expected:
            _close(got[key], expected[key])
    else:
        assert len(got) == len(expected)
        for one, two in zip(got, expected, strict=True):
            _close(one, two)


def _net(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype)


# gradcheck


_NET = _net(DOUBLE)

CHECKED: dict[str, tuple[Fun, tuple[tuple[int, ...], ...]]] = {
    "products": (lambda x, y: x * y.sum() + (x @ y), ((3,), (3,))),
    "powers and sums": (lambda x: (x**3).cumsum(0).logsumexp(0), ((4,),)),
    "softmax of an outer product": (lambda x: torch.outer(x, x).softmax(-1), ((3,),)),
    "several outputs": (lambda x, y: (x.sin() * y, (x - y).tanh().sum()), ((2, 2), (2, 2))),
    "views and writes": (lambda x: (lambda y: (y[0].mul_(x[1]), y.t().add_(x), y)[-1])(x.clone()), ((2, 2),)),
    "gather": (lambda x: x[torch.tensor([0, 0, 1])].prod(0), ((2, 3),)),
    "solve": (lambda x: torch.linalg.solve(x @ x.T + torch.eye(2, dtype=x.dtype), x), ((2, 2),)),
    "module": (lambda x: _NET(x), ((2, 3),)),
    "module's parameters": (
        lambda w, b: func.functional_call(_NET, {"0.weight": w, "0.bias": b}, torch.ones(2, 3, dtype=DOUBLE)),
        ((4, 3), (4,)),
    ),
    "layer norm and attention": (
        lambda x: F.scaled_dot_product_attention(F.layer_norm(x, (4,)), x, x),
        ((1, 3, 4),),
    ),
}


def _inputs(shapes: tuple[tuple[int, ...], ...]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(s, dtype=DOUBLE, requires_grad=True) for s in shapes)


_SLOW_CHECKED = (
    *("layer norm and attention", "solve", "gather", "products", "module's parameters", "powers and sums"),
    *("softmax of an outer product", "module"),
)


@pytest.mark.parametrize("name", marked(CHECKED, slow=_SLOW_CHECKED))
def test_gradcheck_and_gradgradcheck(name: str) -> None:
    fun, shapes = CHECKED[name]
    call, inputs = through(fun), _inputs(shapes)
    _close(call(*inputs), fun(*inputs))
    assert torch.autograd.gradcheck(call, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(call, inputs, fast_mode=True)


def _per_row(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x * w).sum() ** 2


TRANSFORMED: dict[str, tuple[Fun, Fun]] = {
    "micro_vmap": (
        lambda w, x: mt.micro_vmap(_per_row, (None, 0), microbatch_size=2)(w, x),
        lambda w, x: func.vmap(_per_row, (None, 0))(w, x),
    ),
    "micro_vmap, mean": (
        lambda w, x: mt.micro_vmap(_per_row, (None, 0), microbatch_size=2, accumulator=mt.AccumulationType.MEAN)(w, x),
        lambda w, x: func.vmap(_per_row, (None, 0))(w, x).mean(),
    ),
    "microbatch": (
        lambda w, x: mt.microbatch(_per_row, 1, 2)(w, x),
        lambda w, x: sum((_per_row(w, x[[i, i + 2]] if i == 0 else x[[i]]) for i in (0, 1)), torch.zeros(())),
    ),
    "micro_grad": (
        lambda w, x: mt.micro_grad(_per_row, microbatch_size=2)(w, x)[0],
        lambda w, x: func.grad(lambda w: func.vmap(_per_row, (None, 0))(w, x).sum())(w),
    ),
    "micro_grad, values": (
        lambda w, x: mt.micro_grad(_per_row, microbatch_size=2)(w, x)[1].values,
        lambda w, x: func.vmap(_per_row, (None, 0))(w, x),
    ),
    "micro_grad, clipped": (
        lambda w, x: mt.micro_grad(_per_row, microbatch_size=2, transform_fn=lambda g: g / (1 + g.norm()))(w, x)[0],
        lambda w, x: _clipped(w, x),
    ),
    "chunked_vmap": (
        lambda w, x: mt.chunked_vmap(_per_row, 2, in_dims=(None, 0))(w, x),
        lambda w, x: func.vmap(_per_row, (None, 0))(w, x),
    ),
    "sliced_scan": (
        lambda w, x: mt.sliced_scan(_step, w, x, step=2),
        lambda w, x: _loop(w, x, slice(None, None, 2)),
    ),
    "checkpoint_chunked_scan": (
        lambda w, x: mt.checkpoint_chunked_scan(_step, w, x, chunk_size=2),
        lambda w, x: _loop(w, x, slice(None)),
    ),
    "jacobian": (
        lambda w, x: mt.jacobian(lambda w: torch.tanh(x * w).sum(1), w, nbatches=2, mode="forward")[0],
        lambda w, x: func.jacrev(lambda w: torch.tanh(x * w).sum(1))(w),
    ),
    "jacobian, rows": (
        lambda w, x: mt.jacobian(lambda w: torch.tanh(x * w).sum(1), w, batch_size=2, mode="reverse")[0],
        lambda w, x: func.jacrev(lambda w: torch.tanh(x * w).sum(1))(w),
    ),
    "hessian": (
        lambda w, x: mt.hessian(lambda w: _per_row(w, x), w, nbatches=2)[0],
        lambda w, x: func.hessian(lambda w: _per_row(w, x))(w),
    ),
}


def _step(c: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.sin(c * x) + c, c * x


def _loop(c: torch.Tensor, xs: torch.Tensor, kept: slice) -> tuple[torch.Tensor, torch.Tensor]:
    ys = []
    for x in xs:
        c, y = _step(c, x)
        ys.append(y)
    return c, torch.stack(ys[kept])


def _clipped(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    grads = func.vmap(func.grad(_per_row), (None, 0))(w, x)
    return (grads / (1 + grads.norm(dim=1, keepdim=True))).sum(0)


_SLOW_TRANSFORMED = (
    *("micro_grad", "micro_grad, clipped", "micro_grad, values", "micro_vmap", "micro_vmap, mean"),
    *("chunked_vmap", "sliced_scan", "jacobian", "jacobian, rows", "hessian", "checkpoint_chunked_scan"),
)


@pytest.mark.parametrize("name", marked(TRANSFORMED, slow=_SLOW_TRANSFORMED))
def test_gradcheck_and_gradgradcheck_of_a_transform(name: str) -> None:
    call, plain = TRANSFORMED[name]
    w, x = _inputs(((2,), (3, 2)))
    if name != "microbatch":
        torch.testing.assert_close(call(w, x), plain(w, x))
    assert torch.autograd.gradcheck(call, (w, x), fast_mode=True)
    assert torch.autograd.gradgradcheck(call, (w, x), fast_mode=True)


# torch.func and its relatives around a call


def _vector(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x) * x.sum()


def _scalar(x: torch.Tensor) -> torch.Tensor:
    return (torch.sin(x) * x).sum() ** 2


def _two(x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"z": x.sin() * y.sum(), "a": x * y}


X, Y = torch.tensor([0.3, -1.2, 0.7]), torch.tensor([0.5, 0.1, -0.9])
ROWS = torch.arange(12.0).reshape(4, 3) / 7


def _dual(f: Fun) -> Any:
    with forward_ad.dual_level():
        out = forward_ad.unpack_dual(f(forward_ad.make_dual(X, Y)))
        return out.primal.clone(), out.tangent.clone()


def _dual_of_a_gradient(f: Fun) -> Any:
    x = X.clone().requires_grad_()
    with forward_ad.dual_level():
        out = f(forward_ad.make_dual(x, Y))
        (grad,) = torch.autograd.grad(out, x)
        return forward_ad.unpack_dual(grad).tangent.clone()


def _batched_gradients(f: Fun) -> Any:
    x = X.clone().requires_grad_()
    return torch.autograd.grad(f(x), x, torch.eye(3), is_grads_batched=True)[0]


def _batched_second_gradients(f: Fun) -> Any:
    x = X.clone().requires_grad_()
    (g,) = torch.autograd.grad(f(x), x, create_graph=True)
    return torch.autograd.grad(g, x, torch.eye(3), is_grads_batched=True)[0]


def _ensemble(f: Fun) -> Any:
    models = [_net() for _ in range(2)]
    with torch.no_grad():
        models[1][0].weight.mul_(2)
    params, buffers = func.stack_module_state(models)
    return func.vmap(lambda p, b: f(func.functional_call(models[0], (p, b), (ROWS,)).sum(0)), (0, 0))(params, buffers)


AF = torch.autograd.functional

# name -> (the function inside, what is done around a callable that equals it)
AROUND: dict[str, tuple[Fun, Callable[[Fun], Any]]] = {
    "grad": (_scalar, lambda f: func.grad(f)(X)),
    "grad of the second": (_two, lambda f: func.grad(lambda x, y: f(x, y)["z"].sum(), 1)(X, Y)),
    "grad with aux": (_vector, lambda f: func.grad(lambda x: (f(x).sum(), f(x)), has_aux=True)(X)),
    "grad_and_value": (_scalar, lambda f: func.grad_and_value(f)(X)),
    "grad of a grad": (_scalar, lambda f: func.grad(lambda x: func.grad(f)(x).sum())(X)),
    "third order": (_scalar, lambda f: func.grad(lambda x: func.grad(lambda x: func.grad(f)(x).sum())(x).sum())(X)),
    "vjp": (_vector, lambda f: (lambda out, pull: (out, pull(Y)[0]))(*func.vjp(f, X))),
    "vjp of a tree": (_two, lambda f: (lambda out, pull: pull({"z": Y, "a": X}))(*func.vjp(f, X, Y))),
    "jvp": (_vector, lambda f: func.jvp(f, (X,), (Y,))),
    "jvp of a tree": (_two, lambda f: func.jvp(f, (X, Y), (Y, X))),
    "jvp of a jvp": (_vector, lambda f: func.jvp(lambda x: func.jvp(f, (x,), (Y,))[1], (X,), (X,))),
    "jvp of a grad": (_scalar, lambda f: func.jvp(func.grad(f), (X,), (Y,))),
    "grad of a jvp": (_scalar, lambda f: func.grad(lambda x: func.jvp(f, (x,), (Y,))[1])(X)),
    "vmap": (_vector, lambda f: func.vmap(f)(ROWS)),
    "vmap over columns": (_vector, lambda f: func.vmap(f, in_dims=1)(ROWS.T.contiguous())),
    "vmap over a negative axis": (_vector, lambda f: func.vmap(f, in_dims=-1, out_dims=-1)(ROWS.T.contiguous())),
    "vmap of one argument": (_two, lambda f: func.vmap(f, (None, 0))(X, ROWS)),
    "vmap to another axis": (_vector, lambda f: func.vmap(f, out_dims=1)(ROWS)),
    "vmap in chunks": (_vector, lambda f: func.vmap(f, chunk_size=3)(ROWS)),
    "vmap of a vmap": (_two, lambda f: func.vmap(func.vmap(f, (None, 0)), (0, None))(ROWS, ROWS)),
    "vmap of something captured": (_vector, lambda f: func.vmap(lambda s: f(X) * s)(Y)),
    "vmap of a grad": (_scalar, lambda f: func.vmap(func.grad(f))(ROWS)),
    "grad of a vmap": (_scalar, lambda f: func.grad(lambda r: func.vmap(f)(r).sum())(ROWS)),
    "vmap of a jvp": (_vector, lambda f: func.vmap(lambda t: func.jvp(f, (X,), (t,))[1])(ROWS)),
    "vmap of a vjp": (_vector, lambda f: func.vmap(func.vjp(f, X)[1])(ROWS)),
    "jacrev": (_vector, lambda f: func.jacrev(f)(X)),
    "jacrev in chunks": (_vector, lambda f: func.jacrev(f, chunk_size=2)(X)),
    "jacrev of a tree": (_two, lambda f: func.jacrev(f, argnums=(0, 1))(X, Y)),
    "jacfwd": (_vector, lambda f: func.jacfwd(f)(X)),
    "jacfwd of a jacrev": (_scalar, lambda f: func.jacfwd(func.jacrev(f))(X)),
    "jacrev of a jacrev": (_scalar, lambda f: func.jacrev(func.jacrev(f))(X)),
    "jacfwd of a jacfwd": (_scalar, lambda f: func.jacfwd(func.jacfwd(f))(X)),
    "hessian": (_scalar, lambda f: func.hessian(f)(X)),
    "vmap of a hessian": (_scalar, lambda f: func.vmap(func.hessian(f))(ROWS)),
    "linearize": (_vector, lambda f: (lambda out, jvp: (out, jvp(Y)))(*func.linearize(f, X))),
    "functionalize": (_vector, lambda f: func.functionalize(f)(X)),
    "ensemble": (_vector, _ensemble),
    "dual numbers": (_vector, _dual),
    "dual numbers through a backward pass": (_scalar, _dual_of_a_gradient),
    "batched gradients": (_vector, _batched_gradients),
    "batched second gradients": (_scalar, _batched_second_gradients),
    "autograd.functional.jacobian": (_vector, lambda f: AF.jacobian(f, X)),
    "autograd.functional.jacobian, vectorised": (_vector, lambda f: AF.jacobian(f, X, vectorize=True)),
    "autograd.functional.jacobian, forward": (
        _vector,
        lambda f: AF.jacobian(f, X, vectorize=True, strategy="forward-mode"),
    ),
    "autograd.functional.hessian": (_scalar, lambda f: AF.hessian(f, X)),
    "autograd.functional.hessian, vectorised": (_scalar, lambda f: AF.hessian(f, X, vectorize=True)),
    "autograd.functional.vjp": (_vector, lambda f: AF.vjp(f, X, Y)),
    "autograd.functional.jvp": (_vector, lambda f: AF.jvp(f, X, Y)),
    "autograd.functional.hvp": (_scalar, lambda f: AF.hvp(f, X, Y)),
    "autograd.functional.vhp": (_scalar, lambda f: AF.vhp(f, X, Y)),
    "create_graph": (_scalar, lambda f: _by_hand(f, 2)),
    "create_graph, third order": (_scalar, lambda f: _by_hand(f, 3)),
    "checkpoint": (_scalar, lambda f: _by_hand(lambda x: checkpoint(f, x * 2, use_reentrant=False), 1)),
    "checkpoint, reentrant": (_scalar, lambda f: _backward(lambda x: checkpoint(f, x * 2, use_reentrant=True))),
    "autograd.Function": (_scalar, lambda f: _by_hand(lambda x: f(_Twice.apply(x)), 2)),
}


class _Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g * 2


def _by_hand(f: Fun, order: int) -> torch.Tensor:
    x = X.clone().requires_grad_()
    out = f(x)
    for _ in range(order):
        (g,) = torch.autograd.grad(out, x, create_graph=True)
        out = g.sum()
    return g.detach()


def _backward(f: Fun) -> torch.Tensor:
    x = X.clone().requires_grad_()
    f(x).backward()
    return x.grad


_SLOW_AROUND = (  # compositions of what the others compose, and names for the same
    *("third order", "create_graph, third order", "jvp of a jvp", "grad of a jvp", "vmap over a negative axis"),
    *("vmap of a vmap", "vmap of a jvp", "vmap of a hessian", "jacrev in chunks", "jacfwd of a jacrev"),
    *("jacrev of a jacrev", "jacfwd of a jacfwd", "batched second gradients", "autograd.functional.jvp"),
    *("autograd.functional.vhp", "autograd.functional.hessian, vectorised", "autograd.functional.jacobian"),
    *("autograd.functional.vjp", "grad_and_value", "vjp of a tree", "jvp of a tree", "jacrev of a tree"),
    *("grad of the second", "vmap over columns", "vmap of one argument", "vmap to another axis", "vmap of a vjp"),
    *("autograd.functional.hvp", "dual numbers through a backward pass", "grad of a vmap", "jvp of a grad"),
    *("autograd.functional.hessian", "ensemble"),
)


@functools.cache
def _call(fun: Fun) -> Any:
    return through(fun)


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning")  # linearize, of itself
@pytest.mark.parametrize("name", marked(AROUND, _AROUND_WRONG, slow=_SLOW_AROUND))
def test_what_is_done_around_a_call_gives_what_torch_gives(name: str) -> None:
    fun, around = AROUND[name]
    _close(around(_call(fun)), around(fun))


MICRO: dict[str, tuple[Fun, Fun]] = {
    "micro_vmap": (
        mt.micro_vmap(_vector, microbatch_size=2),
        func.vmap(_vector),
    ),
    "microbatch": (
        mt.microbatch(lambda x: (x.sin() * x).sum(), 0, 2),
        lambda x: (x.sin() * x).sum(),
    ),
    "micro_grad": (
        lambda x: mt.micro_grad(_per_row, microbatch_size=2)(X, x)[0],
        lambda x: func.grad(lambda w: func.vmap(_per_row, (None, 0))(w, x).sum())(X),
    ),
}
AROUND_MICRO: dict[str, Callable[[Fun], Any]] = {
    "grad": lambda f: func.grad(lambda x: f(x).sum())(ROWS),
    "vjp": lambda f: func.vjp(lambda x: f(x).sum(), ROWS)[1](torch.tensor(1.0)),
    "jvp": lambda f: func.jvp(f, (ROWS,), (ROWS.cos(),)),
    "vmap": lambda f: func.vmap(f)(torch.stack([ROWS, ROWS * 2])),
    "jacrev": lambda f: func.jacrev(f)(ROWS),
    "jacfwd": lambda f: func.jacfwd(f)(ROWS),
    "dual numbers": lambda f: _dual_of(f, ROWS, ROWS.cos()),
}


def _dual_of(f: Fun, x: torch.Tensor, t: torch.Tensor) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(x, t))).tangent.clone()


_SLOW_MICRO = (
    *(("micro_grad", a) for a in ("vjp", "jvp", "jacrev", "jacfwd", "dual numbers")),
    *((m, a) for m in ("micro_vmap", "microbatch") for a in ("vjp", "jacfwd")),
    *(("micro_vmap", "jacrev"), ("micro_vmap", "grad"), ("micro_grad", "vmap"), ("microbatch", "jvp")),
)


@pytest.mark.parametrize("pair", marked([(m, a) for m in MICRO for a in AROUND_MICRO], slow=_SLOW_MICRO), ids="-".join)
def test_what_is_done_around_a_transform_gives_what_torch_gives(pair: tuple[str, str]) -> None:
    call, plain = MICRO[pair[0]]
    around = AROUND_MICRO[pair[1]]
    _close(around(call), around(plain))


@pytest.mark.parametrize("randomness", ["different", "same", "error"])
def test_vmap_around_a_call_that_draws(randomness: str) -> None:
    call = _call(F.dropout)
    mapped = func.vmap(call, randomness=randomness)
    x = torch.ones(3, 64)
    if randomness == "error":
        with pytest.raises(RuntimeError, match="randomness"):
            mapped(x)
        return
    rows = mapped(x)
    assert (len({tuple(r.tolist()) for r in rows}) == 1) == (randomness == "same")
    assert set(rows.unique().tolist()) == {0.0, 2.0}


# What a caller may do with inputs and outputs


@pytest.fixture(scope="module")
def square() -> Any:
    return through(lambda x: x * x)


def test_a_call_under_no_grad_and_with_inference_tensors(square: Any) -> None:
    x = X.clone().requires_grad_()
    with torch.no_grad():
        assert square(x).grad_fn is None
        with torch.enable_grad():
            assert square(x).requires_grad
    with torch.inference_mode():
        made = torch.ones(3)
        out = square(made)
        assert out.is_inference()
        assert not square(x).requires_grad
    torch.testing.assert_close(square(made), made)  # outside of the mode, an inference tensor is a plain input
    both = through(lambda a, b: a * b)
    both(x, X).sum().backward()
    torch.testing.assert_close(x.grad, X)


def test_an_inference_tensor_beside_one_that_requires_grad_does_as_torch_does() -> None:
    x, call = X.clone().requires_grad_(), through(lambda a, b: a * b)
    with torch.inference_mode():
        made = torch.full((3,), 2.0)
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        x * made
    with pytest.raises(RuntimeError, match="Inference tensors"):
        call(x, made).sum().backward()


COTANGENTS: dict[str, Callable[[], torch.Tensor]] = {
    "ones of stride zero": lambda: torch.ones(()).expand(2, 3, 4, 4),
    "partly expanded": lambda: torch.randn(2, 3, 1, 4).expand(2, 3, 4, 4),
    "channels last": lambda: torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "transposed": lambda: torch.randn(4, 4, 3, 2).permute(3, 2, 1, 0),
    "every second": lambda: torch.randn(2, 3, 4, 8)[..., ::2],
    "flipped": lambda: torch.randn(2, 3, 4, 4).flip(-1),
    "not aligned": lambda: torch.randn(2 * 3 * 4 * 4 + 1)[1:].view(2, 3, 4, 4),
    "negated": lambda: torch.randn(2, 3, 4, 4, dtype=torch.complex64).conj().imag,
    "real part": lambda: torch.randn(2, 3, 4, 4, dtype=torch.complex64).real,
    "overlapping": lambda: torch.randn(200).as_strided((2, 3, 4, 4), (1, 2, 3, 4)),
    "requires grad": lambda: torch.randn(2, 3, 4, 4, requires_grad=True),
    "zeros": lambda: torch.zeros(2, 3, 4, 4),
}


@pytest.mark.parametrize("name", COTANGENTS)
def test_incoming_gradients_of_any_layout(name: str, square: Any) -> None:
    cotangent = COTANGENTS[name]()
    for layout in (torch.contiguous_format, torch.channels_last):
        x = torch.arange(96.0).reshape(2, 3, 4, 4).to(memory_format=layout).requires_grad_()
        keep = cotangent.detach().clone()
        (got,) = torch.autograd.grad(square(x), x, cotangent)
        torch.testing.assert_close(got, 2 * x.detach() * keep)
        assert torch.equal(cotangent, keep)


def test_incoming_complex_gradients_of_any_layout() -> None:
    z = torch.randn(2, 3, dtype=torch.complex64)
    call = through(lambda t: t * t.conj() * (2 + 1j))
    for cotangent in (
        torch.randn(2, 3, dtype=torch.complex64).conj(),
        torch.randn(3, 2, dtype=torch.complex64).mH,
        torch.ones((), dtype=torch.complex64).expand(2, 3),
    ):
        grads = []
        for f in (call, lambda t: t * t.conj() * (2 + 1j)):
            leaf = z.clone().requires_grad_()
            grads += torch.autograd.grad(f(leaf), leaf, cotangent)
        torch.testing.assert_close(*grads)


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (2, 0, 4)])
def test_zero_size_and_zero_dimensional(shape: tuple[int, ...], square: Any) -> None:
    x = torch.ones(shape, requires_grad=True)
    square(x).sum().backward()
    assert x.grad.shape == shape
    y = torch.tensor(3.0, requires_grad=True)
    square(y).backward()
    assert y.grad.item() == 6


WRITES: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "in place": lambda x, base: base.add_(1),
    "through a view": lambda x, base: base.view(-1)[0].fill_(9),
    "by an optimizer": lambda x, base: torch.optim.SGD([_with_grad(base)], lr=1.0).step(),
    "by copy_": lambda x, base: base.copy_(torch.zeros(3)),
}


def _with_grad(base: torch.Tensor) -> torch.Tensor:
    base.grad = torch.ones(3)
    return base


@pytest.mark.parametrize("recorded", ["argument", "captured"])
@pytest.mark.parametrize("name", WRITES)
def test_an_input_written_before_backward_is_torchs_error(name: str, recorded: str) -> None:
    w = X.clone().requires_grad_()
    call = through(lambda a: a**2) if recorded == "argument" else through(lambda a: w**2 + a)
    out = call(w if recorded == "argument" else Y)
    before = out.detach().clone()
    with torch.no_grad():
        WRITES[name](w, w)
    w.grad = None
    assert torch.equal(out.detach(), before)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_an_input_that_the_derivative_does_not_need_may_be_written() -> None:
    w = X.clone().requires_grad_()
    out = through(lambda a: a * 2 + 1)(w)
    with torch.no_grad():
        w.add_(1)
    out.sum().backward()
    assert torch.equal(w.grad, torch.full((3,), 2.0))


@pytest.mark.parametrize("order", [1, 2])
def test_a_write_that_torch_does_not_count_is_never_half_seen(order: int) -> None:
    """``.data`` goes behind torch's back: the gradient is that of the old or of the new value, as in torch."""
    w = X.clone().requires_grad_()
    out = through(lambda a: a**3)(w)
    w.data.mul_(2)
    (g,) = torch.autograd.grad(out.sum(), w, create_graph=order == 2)
    old, new = 3 * X**2, 3 * (2 * X) ** 2
    assert torch.allclose(g.detach(), old) or torch.allclose(g.detach(), new)


def test_an_output_written_by_the_caller(square: Any) -> None:
    """A write to a result touches neither the inputs nor what the backward pass reads."""
    for call in (square, through(torch.exp), through(lambda x: x), through(lambda x: (x * 1)[:2])):
        x = X.clone().requires_grad_()
        out = call(x)
        (expected,) = torch.autograd.grad(call(x).sum(), x)
        with contextlib.suppress(RuntimeError):
            out.detach().mul_(0)  # exp in torch: an error of the version counter
            out.sum().backward()
            assert torch.equal(x.detach(), X)
            torch.testing.assert_close(x.grad, expected)
    x = X.clone().requires_grad_()
    out = square(x)
    out.mul_(3)  # part of the graph
    out.sum().backward()
    torch.testing.assert_close(x.grad, 6 * X)


def test_an_output_without_gradient_and_a_part_of_the_outputs() -> None:
    call = through(lambda x: (x.sin(), x.exp(), x.argmax(), (x > 0), x.long(), x.detach() * 2, torch.ones(2)))
    x = X.clone().requires_grad_()
    outs = call(x)
    assert [o.requires_grad for o in outs] == [True, True, False, False, False, False, False]
    assert [o.dtype for o in outs[2:5]] == [torch.int64, torch.bool, torch.int64]
    outs[1].sum().backward()
    torch.testing.assert_close(x.grad, X.exp())
    with pytest.raises(RuntimeError, match="does not require grad"):
        outs[5].sum().backward()


def test_the_same_tensor_twice_and_an_output_that_is_an_input() -> None:
    x = X.clone().requires_grad_()
    out, same = through(lambda a, b: (a * b, a))(x, x)
    (out + same).sum().backward()
    torch.testing.assert_close(x.grad, 2 * X + 1)


def test_retain_graph_and_the_error_without_it(square: Any) -> None:
    x = X.clone().requires_grad_()
    out = square(x).sum()
    out.backward(retain_graph=True)
    out.backward(retain_graph=True)
    torch.testing.assert_close(x.grad, 4 * X)
    out.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        out.backward()
    out = through(torch.exp)(x).sum()
    out.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        out.backward()
    net = through(_net())
    out = net(X).sum()
    out.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        out.backward()


def test_a_second_derivative_after_the_graph_was_freed_is_torchs_error() -> None:
    x = X.clone().requires_grad_()
    (g,) = torch.autograd.grad(through(torch.exp)(x).sum(), x, create_graph=True)
    torch.autograd.grad(g.sum(), x)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(g.sum(), x)


# Residuals


KEPT = {
    "output kept": lambda out, x: out.sum().backward(),
    "gradient by autograd.grad": lambda out, x: torch.autograd.grad(out.sum(), x),
    "through a larger graph": lambda out, x: (out.exp() * 2).sum().backward(),
    "graph kept and then freed": lambda out, x: (out.sum().backward(retain_graph=True), out.sum().backward()),
}


@pytest.mark.parametrize("name", marked(KEPT, quick=("output kept", "gradient by autograd.grad")))
def test_residuals_are_freed_by_backward_while_the_output_is_kept(name: str) -> None:
    call, x = _call(_residual), torch.randn(64, requires_grad=True)
    call(x).sum().backward()
    before = live_arrays()
    outs = [call(x) for _ in range(3)]
    assert live_arrays() > before + len(outs), "nothing is saved: this test shows nothing"
    for out in outs:
        KEPT[name](out, x)
    x.grad = None
    assert live_arrays() <= before + len(outs)  # the outputs themselves may be JAX's memory


def _residual(x: torch.Tensor) -> torch.Tensor:
    return torch.exp(torch.sin(torch.exp(x * 2)))


def test_residuals_die_with_outputs_that_nobody_backpropagates() -> None:
    call, x = _call(_residual), torch.randn(64, requires_grad=True)
    counts = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(6):
            call(x)
            counts.append(len(jax.live_arrays()))
        assert counts[-1] <= counts[0]  # by counting references alone
    finally:
        gc.enable()


def test_tensors_passed_in_are_not_kept_alive_by_a_freed_graph() -> None:
    call = through(lambda x, w: x * w)
    w = torch.randn(8, requires_grad=True)
    x = torch.randn(8)
    ref = weakref.ref(x)
    out = call(x, w)
    del x
    out.sum().backward()
    gc.collect()
    assert ref() is None


# Hooks


def test_hooks_of_tensors_and_parameters_fire_once() -> None:
    net, fired = _net(), []
    for p in net.parameters():
        p.register_hook(lambda g: fired.append("grad"))
        p.register_post_accumulate_grad_hook(lambda p: fired.append("accumulated"))
    x = X.clone().requires_grad_()
    x.register_hook(lambda g: (fired.append("input"), g * 2)[1])
    out = through(net)(x)
    out.register_hook(lambda g: (fired.append("output"), g * 3)[1])
    out.sum().backward()
    assert sorted(fired) == ["accumulated"] * 4 + ["grad"] * 4 + ["input", "output"]
    plain = X.clone().requires_grad_()
    reference = copy.deepcopy(net)
    torch.testing.assert_close(x.grad, 6 * torch.autograd.grad(reference(plain).sum(), plain)[0])


def test_hooks_of_an_enclosing_module_fire() -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = _net()
            self.call = through(self.net)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.call(x * 2)

    module, seen = Around(), {}
    module.register_forward_pre_hook(lambda m, args: (args[0] + 1,))
    module.register_forward_hook(lambda m, args, out: out * 2)
    module.register_full_backward_hook(lambda m, gi, go: seen.update(inputs=gi, outputs=go))
    module.register_full_backward_pre_hook(lambda m, go: seen.update(before=go))
    x = X.clone().requires_grad_()
    module(x).sum().backward()
    assert set(seen) == {"inputs", "outputs", "before"}
    plain = X.clone().requires_grad_()
    (expected,) = torch.autograd.grad(2 * module.net((plain + 1) * 2).sum(), plain)
    torch.testing.assert_close(x.grad, expected)


def test_hooks_of_modules_inside_of_the_function_act() -> None:
    net = _net()
    net[0].register_forward_hook(lambda m, args, out: out * 2)
    net[2].register_forward_pre_hook(lambda m, args: (args[0] + 1,))
    net[0].register_full_backward_hook(lambda m, gi, go: tuple(None if g is None else g * 3 for g in gi))
    grads = []
    for call in (through(net), net):
        x = X.clone().requires_grad_()
        call(x[None]).sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(*grads)


def test_hooks_of_graph_nodes_and_saved_tensors_see_a_call() -> None:
    x, packed = X.clone().requires_grad_(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (packed.append(t.shape), t)[1], lambda t: t):
        out = through(lambda a: a * a * a)(x)
    out.grad_fn.register_hook(lambda gi, go: packed.append("node"))
    out.sum().backward()
    torch.testing.assert_close(x.grad, 3 * X**2)
    assert "node" in packed
    assert x.shape in packed


def test_parameters_that_are_captured_but_not_used_keep_no_gradient() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    module = Half()
    through(module)(X).sum().backward()
    assert module.used.weight.grad is not None
    assert module.unused.weight.grad is None


def test_an_argument_without_influence_is_unused_to_autograd() -> None:
    call = through(lambda x, y: x * 2 + y.detach())
    x, y = X.clone().requires_grad_(), Y.clone().requires_grad_()
    assert torch.autograd.grad(call(x, y).sum(), [x, y], allow_unused=True)[1] is None
    with pytest.raises(RuntimeError, match="appears to not have been used"):
        torch.autograd.grad(call(x, y).sum(), [x, y])


# torch's modes and tools around a call


@pytest.fixture
def _anomaly() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autograd.detect_anomaly():
            yield


def test_anomaly_mode_around_a_call(square: Any, request: pytest.FixtureRequest) -> None:
    nan = through(lambda a: (a * 0).sqrt() * 0)
    x = X.clone().requires_grad_()
    square(x)
    nan(x)
    request.getfixturevalue("_anomaly")
    square(x).sum().backward()
    torch.testing.assert_close(x.grad, 2 * X)
    with pytest.raises(RuntimeError, match="nan"):
        torch.autograd.grad(nan(x).sum(), x)


@pytest.mark.usefixtures("_anomaly")
def test_a_first_call_in_anomaly_mode() -> None:
    x = X.clone().requires_grad_()
    through(lambda a: a * a * 1.5)(x).sum().backward()
    torch.testing.assert_close(x.grad, 3 * X)


def test_a_backward_pass_in_the_thread_of_the_caller(square: Any) -> None:
    x = X.clone().requires_grad_()
    with torch.autograd.set_multithreading_enabled(False):
        torch.testing.assert_close(torch.autograd.grad(square(x).sum(), x)[0], 2 * X)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("kind", ["as_torch", "micro_vmap", "microbatch"])
def test_a_call_under_torch_compile(kind: str) -> None:
    call = {
        "as_torch": through(torch.sin),
        "micro_vmap": mt.micro_vmap(torch.sin, microbatch_size=2),
        "microbatch": mt.microbatch(torch.sin, 0, 2, mt.AccumulationType.CONCAT),
    }[kind]
    step = torch.compile(lambda t: call(t * 2).sum() + 1, backend="eager")
    for _ in range(2):
        x = X.clone().requires_grad_()
        out = step(x)
        torch.testing.assert_close(out, (X * 2).sin().sum() + 1)
        out.backward()
        torch.testing.assert_close(x.grad, 2 * (2 * X).cos())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_a_training_step_under_torch_compile() -> None:
    net, reference = _net(), _net()
    call = through(net)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (net, reference)]

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = call(x).pow(2).mean()
        loss.backward()
        return loss

    compiled = torch.compile(step, backend="eager")
    for _ in range(3):
        loss = reference(ROWS).pow(2).mean()
        loss.backward()
        torch.testing.assert_close(compiled(ROWS), loss)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_compiled_function_inside_of_a_call() -> None:
    inner = torch.compile(lambda t: t.sin() * 2, backend="eager")
    torch.testing.assert_close(through(lambda x: inner(x) + 1)(X), X.sin() * 2 + 1)


@pytest.fixture(autouse=True, scope="module")
def _dynamo_put_back() -> Any:
    yield
    torch._dynamo.reset()


def test_checkpoint_inside_of_a_call() -> None:
    net = _net()
    for reentrant in (False, True):
        call = through(lambda x, r=reentrant: checkpoint(net, x * 2, use_reentrant=r))
        x = X.clone().requires_grad_()
        got = torch.autograd.grad(call(x).sum(), [x, *net.parameters()])
        expected = torch.autograd.grad(net(x * 2).sum(), [x, *net.parameters()])
        _close(got, expected)


def test_distributed_data_parallel_style_hooks_and_accumulation() -> None:
    """Gradients add up over two calls, whatever the hooks replace them by."""
    net = _net()
    call = through(net)
    call(X).sum().backward()
    once = [p.grad.clone() for p in net.parameters()]
    call(X).sum().backward()
    for p, g in zip(net.parameters(), once, strict=True):
        torch.testing.assert_close(p.grad, 2 * g)
    net.zero_grad()
    net[0].weight.register_hook(torch.zeros_like)
    call(X).sum().backward()
    assert not net[0].weight.grad.any()


def test_gradients_may_be_written_by_the_caller(square: Any) -> None:
    x = X.clone().requires_grad_()
    square(x).sum().backward()
    x.grad.mul_(0)
    other = X.clone().requires_grad_()
    square(other).sum().backward()
    torch.testing.assert_close(other.grad, 2 * X)
    assert torch.equal(x.detach(), X)
    identity = through(lambda a: a * 1)
    cotangent = torch.ones(3)
    (g,) = torch.autograd.grad(identity(x), x, cotangent)
    g.mul_(0)
    assert cotangent.eq(1).all()


def test_dtypes_of_gradients_follow_the_inputs() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.complex64):
        x = X.to(dtype).requires_grad_()
        call = through(lambda a: (a * a).abs().float().sum())
        call(x).backward()
        plain = X.to(dtype).requires_grad_()
        (plain * plain).abs().float().sum().backward()
        assert x.grad.dtype == dtype
        torch.testing.assert_close(x.grad, plain.grad, rtol=1e-2, atol=1e-2)


COMPLEX: dict[str, Fun] = {
    "holomorphic": lambda z: z**2 * (1 + 2j),
    "absolute value": lambda z: z.abs() ** 2,
    "real and imaginary": lambda z: torch.complex(z.imag, z.real * 2),
    "product with a conjugate": lambda z: z * z.conj() + z.conj().sin(),
    "view as real": lambda z: torch.view_as_real(z).sin(),
    "fft": lambda z: torch.fft.fft(z) * z,
    "from real": lambda z: torch.fft.rfft(z.real),
    "matrix product": lambda z: torch.outer(z, z.conj()) @ z,
    "angle": lambda z: z.angle() * z.abs(),
}


@pytest.mark.parametrize(
    "name",
    marked(
        COMPLEX,
        slow=("absolute value", "matrix product", "angle", "from real", "product with a conjugate", "holomorphic"),
    ),
)
def test_complex_gradients_of_first_and_second_order(name: str) -> None:
    fun = COMPLEX[name]
    start = torch.randn(3, dtype=torch.complex128)
    results = []
    for call in (through(fun), fun):
        torch.manual_seed(3)
        z = start.clone().requires_grad_()
        out = call(z)
        weight = torch.randn(out.shape, dtype=out.dtype)
        (first,) = torch.autograd.grad(out, z, weight, create_graph=True)
        second = ()
        if first.requires_grad:
            second = torch.autograd.grad(first, z, torch.randn(3, dtype=first.dtype), allow_unused=True)
        results.append([out.detach(), first.detach(), *(s if s is not None else torch.zeros(3) for s in second)])
    for one, two in zip(*results, strict=False):
        torch.testing.assert_close(one.to(two.dtype), two)


# Inside of the function


class _Surrogate(torch.autograd.Function):
    """A step with a smooth gradient, as in spiking networks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return (x > 0).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return g / (1 + x.abs()) ** 2


class _ByContext(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        return x * n, x.argmax()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.n = inputs[1]
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor, _: Any) -> Any:
        return g * ctx.n * 10, None


class _Linear(torch.autograd.Function):
    """Its backward pass uses the weight, which the function may have captured, as it was given or as it was saved."""

    saves = True

    @classmethod
    def forward(cls, ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.x, ctx.w = x, w
        if cls.saves:
            ctx.save_for_backward(x, w)
        return x @ w

    @classmethod
    def backward(cls, ctx: Any, g: torch.Tensor) -> Any:
        x, w = ctx.saved_tensors if cls.saves else (ctx.x, ctx.w)
        return g @ w.T, torch.outer(x, g) if x.dim() == 1 else x.T @ g


class _LinearKept(_Linear):
    saves = False


class _LinearSetUp(_Linear):
    @classmethod
    def forward(cls, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x @ w

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)


_HELD = _Linear.apply  # bound before


@pytest.mark.parametrize(
    "layer",
    [
        lambda x, w: _Linear.apply(x, w),
        pytest.param(lambda x, w: _LinearKept.apply(x, w) * w.sum(), marks=pytest.mark.slow),
        lambda x, w: _LinearSetUp.apply(_HELD(x, w).tanh(), w),
        pytest.param(lambda x, w: _Linear.apply(x, w * 2), marks=pytest.mark.slow),
        pytest.param(lambda x, w: _Linear.apply(x.detach(), w), marks=pytest.mark.slow),
        lambda x, w: _Linear.apply(x, w.detach()),
        lambda x, w: checkpoint(lambda y: _HELD(_HELD(y, w).sin(), w), x, use_reentrant=False),
    ],
)
def test_a_function_of_the_users_may_use_what_it_captures_in_its_backward_pass(layer: Any) -> None:
    module, x = torch.nn.Linear(3, 3, bias=False), torch.randn(3, requires_grad=True)
    fun = lambda x: layer(x, module.weight)
    results = []
    for call in (fun, as_torch(as_jax(fun))):
        out = call(x)
        grads = torch.autograd.grad(out.square().sum(), (x, module.weight), allow_unused=True)
        results.append((out, *grads))
    torch.testing.assert_close(*results)
    rows = torch.randn(4, 3)
    torch.testing.assert_close(mt.micro_vmap(fun, microbatch_size=2)(rows), torch.stack([fun(row) for row in rows]))
    loss = lambda module, x: layer(x, module.weight).square().sum()
    if loss(module, rows[:1]).requires_grad:
        norms = [torch.autograd.grad(loss(module, row[None]), module.weight)[0].norm() for row in rows]
        aux = mt.clipped_backward(module, loss, max_grad_norm=1.0)(rows)
        torch.testing.assert_close(aux.grad_norms, torch.stack(norms))


def _physics(x: torch.Tensor) -> torch.Tensor:
    x = x if x.requires_grad else x.detach().requires_grad_()
    u = (x.sin() * x).sum()
    (du,) = torch.autograd.grad(u, x, create_graph=True)
    (ddu,) = torch.autograd.grad(du.sum(), x, create_graph=True)
    return (ddu + u) ** 2


def _hooked(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    if y.requires_grad:
        y.register_hook(lambda g: g.clamp(max=0.5))
    return y.sin()


def _no_grad(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        w = x * 2
        with torch.enable_grad():
            v = x * 3
    return x * w + v


def _straight_through(x: torch.Tensor) -> torch.Tensor:
    return x + (x.round() - x).detach()


def _fresh_leaf(x: torch.Tensor) -> torch.Tensor:
    leaf = torch.ones(3, requires_grad=True)
    (g,) = torch.autograd.grad((leaf * x).sum(), leaf, create_graph=True)
    return g * x


@torch.no_grad()
def _decorated(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def _inference(x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        w = torch.ones(3) * 2
    return x * w.clone()


def _inner_func(x: torch.Tensor) -> torch.Tensor:
    return (
        func.vmap(func.grad(lambda v: (v**3).sum()))(x[None].expand(2, 3)).sum(0) + func.jvp(torch.sin, (x,), (x,))[1]
    )


INSIDE: dict[str, Fun] = {
    "own backward": lambda x: _Surrogate.apply(x) * x,
    "own backward by context": lambda x: _ByContext.apply(x, 2)[0] * x,
    "derivatives": _physics,
    "hook on an intermediate": _hooked,
    "no_grad and enable_grad": _no_grad,
    "straight through": _straight_through,
    "gradient in a fresh leaf": _fresh_leaf,
    "decorated by no_grad": lambda x: _decorated(x) * x,
    "inference mode": _inference,
    "torch.func": _inner_func,
    "set_grad_enabled": lambda x: _switch(x),
    "requires_grad_ on an intermediate": lambda x: (x.detach() * 2).requires_grad_().sin() + x,
    "checkpoint": lambda x: checkpoint(lambda t: t.sin() * t, x, use_reentrant=False),
    "retain_grad": lambda x: _retains(x),
    "grad_fn read": lambda x: x * (2 if (x * 2).grad_fn is not None else 3),
    "requires_grad read": lambda x: x * (2 if x.requires_grad else 3),
    "is_leaf read": lambda x: x * (2 if x.is_leaf else 3),
}


def _switch(x: torch.Tensor) -> torch.Tensor:
    with torch.set_grad_enabled(False):
        w = x.exp()
    return w * x


def _retains(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    if y.requires_grad:
        y.retain_grad()
    return y.sin()


_SLOW_INSIDE = ("decorated by no_grad", "set_grad_enabled", "is_leaf read", "requires_grad_ on an intermediate")


@pytest.mark.parametrize(
    "name",
    marked(
        INSIDE,
        slow=("derivatives", "own backward by context", "gradient in a fresh leaf", "retain_grad", *_SLOW_INSIDE),
    ),
)
def test_what_is_done_inside_of_the_function_means_what_it_means_in_torch(name: str) -> None:
    fun = INSIDE[name]
    call = through(fun)
    results = []
    for f in (call, fun):
        with torch.no_grad():
            values = [] if name in ("derivatives", "gradient in a fresh leaf") else [f(X)]
        x = X.clone().requires_grad_()
        out = f(x)
        (first,) = torch.autograd.grad(
            out.sum(), x, create_graph=name not in ("own backward", "hook on an intermediate")
        )
        results.append([*values, f(X).detach(), out.detach(), first.detach()])
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(one, two)


_MODES = {"grad": contextlib.nullcontext, "no_grad": torch.no_grad, "inference": torch.inference_mode}


@pytest.mark.parametrize("name", _MODES)
def test_the_grad_mode_inside_is_the_one_outside(name: str) -> None:
    number = len(name)  # a program of its own for each case

    def fun(x: torch.Tensor) -> torch.Tensor:
        by_mode = (2.0 if torch.is_grad_enabled() else 3.0) * (5.0 if torch.is_inference_mode_enabled() else 1.0)
        return x * by_mode * number

    call = through(fun)
    for mode in _MODES.values():
        with mode():
            call(X)
    with _MODES[name]():
        torch.testing.assert_close(call(X), fun(X))
        torch.testing.assert_close(call(X.clone().requires_grad_()).detach(), fun(X))


POINT, WEIGHT, EXAMPLES = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([[1.0, 2.0], [3.0, -1.0]]), torch.ones(3, 2)


def _trained(cubes: Fun) -> torch.Tensor:
    with torch.inference_mode(False), torch.enable_grad():
        leaf = POINT.clone().requires_grad_()
        mt.chunked_vmap(cubes, chunk_size=2)(leaf).sum().backward()
        assert leaf.grad is not None
        return leaf.grad


def _last_carry(cubes: Fun, xs: torch.Tensor) -> torch.Tensor:
    return mt.checkpoint_chunked_scan(lambda c, x: (c * cubes(x), x), torch.tensor(1.0), xs, chunk_size=2)[0]


def _energy(cubes: Fun) -> Fun:
    return lambda x: cubes(x).sum()


def _loss(cubes: Fun) -> Fun:
    return lambda w, x: cubes(x @ w.T).sum()


DERIVATIVES: dict[str, Callable[[Fun], torch.Tensor]] = {
    "jacobian": lambda f: mt.jacobian(f, POINT)[0],
    "jacobian by rows": lambda f: mt.jacobian(f, POINT, mode="reverse")[0],
    "hessian": lambda f: mt.hessian(_energy(f), POINT)[0],
    "hessian into out": lambda f: mt.hessian(_energy(f), POINT, out=torch.zeros(3, 3))[0],
    "hessian_blocks": lambda f: torch.cat(
        [block for _, block in mt.hessian_blocks(_energy(f), POINT, batch_size=1)], -1
    ),
    "hvp": lambda f: mt.hvp(_energy(f), POINT)(torch.ones(3)),
    "micro_grad": lambda f: mt.micro_grad(_loss(f), microbatch_size=1)(WEIGHT, EXAMPLES)[0],
    "clipped_grad": lambda f: mt.clipped_grad(_loss(f), l2_clip_norm=1.0)(WEIGHT, EXAMPLES),
    "lift": lambda f: mt.lift(jax.grad)(_energy(f))(POINT),
    "torch.func.grad around": lambda f: func.grad(lambda v: mt.chunked_vmap(f, chunk_size=2)(v).sum())(POINT),
    "torch.func.grad around a scan": lambda f: func.grad(functools.partial(_last_carry, f))(POINT),
    "torch.func.jvp around": lambda f: func.jvp(mt.chunked_vmap(f, chunk_size=2), (POINT,), (torch.ones(3),))[1],
    "grad mode enabled again": _trained,
}


_SLOW_DERIVATIVES = (
    *("hessian_blocks", "jacobian by rows", "torch.func.grad around", "torch.func.jvp around", "hessian into out"),
    *("hessian", "torch.func.grad around a scan"),
)


@pytest.mark.parametrize("first", ["inference", pytest.param("no_grad", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", marked(DERIVATIVES, slow=_SLOW_DERIVATIVES))
def test_derivatives_do_not_depend_on_the_grad_mode_around_nor_on_that_of_an_earlier_call(
    name: str, first: str
) -> None:
    """As torch.func's: a transform differentiates under no_grad and inference mode too, where autograd does not."""
    number = 1 + len(name) + len(first) / 100  # a program of its own for each case
    found = {}
    for mode in (first, *_MODES):
        with _MODES[mode]():
            found[mode] = DERIVATIVES[name](lambda x: number * x**3)
    assert found["grad"].abs().sum() > 0
    for mode, derivative in found.items():
        torch.testing.assert_close(derivative.clone(), found["grad"], rtol=0, atol=0, msg=mode)


def test_integer_inputs_and_outputs_beside_floats() -> None:
    call = through(lambda i, x: (x[i] * 2, i + 1, x.argsort()))
    i, x = torch.tensor([2, 0, 0]), X.clone().requires_grad_()
    out, more, order = call(i, x)
    assert torch.equal(more, i + 1)
    assert torch.equal(order, X.argsort())
    out.sum().backward()
    torch.testing.assert_close(x.grad, torch.tensor([4.0, 0.0, 2.0]))


def test_captured_tensors_that_are_no_leaves_pass_gradients_on() -> None:
    base = X.clone().requires_grad_()
    w = base * 2
    call = through(lambda x: x * w)
    for _ in range(2):
        (g,) = torch.autograd.grad(call(Y).sum(), base, retain_graph=True)
        torch.testing.assert_close(g, 2 * Y)
    (x_grad,) = torch.autograd.grad(call(base).sum(), base)
    torch.testing.assert_close(x_grad, 4 * X)


def test_a_captured_tensor_under_torch_func_around_the_call() -> None:
    """What torch.func differentiates may reach the function by its closure."""
    expected = func.grad(lambda w: (X * w).sin().sum())(Y)
    got = func.grad(lambda w: through(lambda x: (x * w).sin())(X).sum())(Y)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("transform", ["grad", "jacrev", "vjp"])
def test_torch_func_around_a_transform_of_an_ordinary_model(transform: str) -> None:
    """Its parameters require grad and are captured."""
    net, x = nn.Linear(3, 1), torch.randn(4, 3)
    plain = lambda rows: net(rows).pow(2).sum()
    call = mt.microbatch(plain, 0, 2)
    take = {
        "grad": lambda f: func.grad(f)(x),
        "jacrev": lambda f: func.jacrev(f)(x),
        "vjp": lambda f: func.vjp(f, x)[1](torch.tensor(2.0))[0],
    }[transform]
    torch.testing.assert_close(take(call), take(plain))


@pytest.mark.slow
def test_derivatives_of_a_call_within_a_call_with_captured_parameters() -> None:
    w, x = torch.randn(3, requires_grad=True), torch.randn(4, 3)
    call = mt.microbatch(lambda rows: (rows * w).sin().sum(), 0, 2)
    torch.testing.assert_close(mt.lift(jax.grad)(call)(x), (x * w).cos() * w)
    expected = func.hessian(lambda rows: (rows * w).sin().sum())(x).reshape(12, 12)
    torch.testing.assert_close(mt.hessian(call, x)[0], expected)


def test_results_for_detached_parameters_do_not_require_grad():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    detached = {k: p.detach().clone() for k, p in model.named_parameters()}
    x = torch.randn(4, 3)
    loss = lambda p, x: torch.func.functional_call(model, p, (x,)).square().sum()
    calls = (
        lambda p: mt.micro_grad(loss, microbatch_size=2)(p, x)[0],
        lambda p: mt.clipped_grad(loss, l2_clip_norm=1.0)(p, x),
        lambda p: mt.hessian(lambda q: loss(q, x), p)[0],
    )
    for call in calls:  # the module's own parameters, which are replaced, are captured all the same
        assert not any(t.requires_grad for t in torch.utils._pytree.tree_leaves(call(detached)))
    tracked = {k: p.clone().requires_grad_() for k, p in detached.items()}
    assert all(g.requires_grad for g in mt.clipped_grad(loss, l2_clip_norm=1.0)(tracked, x).values())


_VECTORIZED: dict[str, Fun] = {
    "is_grads_batched": lambda x: torch.autograd.grad(x.sin(), x, torch.eye(2), is_grads_batched=True)[0],
    "is_grads_batched, create_graph": lambda x: (
        torch.autograd.grad(x.sin(), x, torch.eye(2), is_grads_batched=True, create_graph=True)[0].sin().sum()
    ),
    "is_grads_batched, unused": lambda x: torch.stack(
        [
            x if g is None else g[0]
            for g in torch.autograd.grad(
                x.sin(), (x, x.detach().requires_grad_()), torch.eye(2), is_grads_batched=True, allow_unused=True
            )
        ]
    ),
    "jacobian": lambda x: torch.autograd.functional.jacobian(lambda t: t.sin() * t.sum(), x, vectorize=True),
    "jacobian, forward": lambda x: torch.autograd.functional.jacobian(
        lambda t: t.sin() * t.sum(), x, vectorize=True, strategy="forward-mode"
    ),
    "jacobian, create_graph": lambda x: torch.autograd.functional.jacobian(
        lambda t: t.sin() * t.sum(), x, vectorize=True, create_graph=True
    ),
    "hessian": lambda x: torch.autograd.functional.hessian(lambda t: t.sin().prod(), x, vectorize=True),
    "hessian, forward": lambda x: torch.autograd.functional.hessian(
        lambda t: t.sin().prod(), x, vectorize=True, outer_jacobian_strategy="forward-mode"
    ),
}


def test_vectorized_derivatives_inside_of_a_call() -> None:
    x = torch.tensor([0.3, 0.7], requires_grad=True)
    run = lambda x: {name: fun(x) for name, fun in _VECTORIZED.items()}
    got, want = through(run)(x), run(x)
    torch.testing.assert_close(got, want)
    sums = [sum(t.sum() for name, t in found.items() if "create" in name) for found in (got, want)]
    torch.testing.assert_close(*(torch.autograd.grad(total, x) for total in sums))
