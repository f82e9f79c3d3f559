"""``as_torch``: caching, autograd, structures, layouts, lifetime of tensors."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import gc
import math
import threading
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import Pair, crossed, live_arrays, marked, through
from torch import nn

from microtome.bridge import as_jax, as_torch, jax_function, lift

traces: list[int] = []


pytestmark = pytest.mark.usefixtures("seeded")


@pytest.fixture(autouse=True)
def _cleared() -> None:
    traces.clear()


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))


# Caching and freshness


def test_a_training_loop_traces_in_its_first_step_only() -> None:
    model, x = _model(), torch.randn(3, 4)
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(4):
        optimizer.zero_grad()
        loss = through(lambda x: (traces.append(1), model(x).pow(2).mean())[1])(x)
        torch.testing.assert_close(loss, model(x).pow(2).mean())
        loss.backward()
        grad = model[0].weight.grad.clone()
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        torch.testing.assert_close(grad, model[0].weight.grad)
        optimizer.step()
        if step == 0:
            first = len(traces)
    assert len(traces) == first


def test_two_lengths_compile_twice_whatever_the_order() -> None:
    for i in range(12):
        through(lambda v: (traces.append(1), v.sum())[1])(torch.randn(7 if i % 3 == 2 else 32, 4))
    assert len(traces) == 2


SCALE = torch.tensor(2.0)


@pytest.mark.parametrize("change", ["in place", "data", "rebound", "frozen", "mode"])
def test_captured_tensors_are_never_stale(change: str) -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)).eval()
    call, x = through(module), torch.randn(2, 3)
    torch.testing.assert_close(call(x), module(x))
    if change == "in place":
        with torch.no_grad():
            module[0].weight.add_(1)
    elif change == "data":
        module[0].weight.data.mul_(3)
    elif change == "rebound":
        module[0].weight = nn.Parameter(torch.ones(3, 3))
    elif change == "frozen":
        module[0].weight.requires_grad_(False)
        call(x).sum().backward()
        assert module[0].weight.grad is None
        assert module[0].bias.grad is not None
    else:
        module.train()
        assert not torch.equal(call(torch.ones(2, 3)), call(torch.ones(2, 3)))
        module.eval()
    torch.testing.assert_close(call(x), module(x))


def test_a_global_and_a_python_number_may_change() -> None:
    global SCALE
    number = 2.0
    call = through(lambda x: x * SCALE + number)
    old = SCALE
    try:
        assert call(torch.ones(1)).item() == 4
        SCALE = torch.tensor(5.0)
        assert call(torch.ones(1)).item() == 7
        SCALE.add_(1)
        assert call(torch.ones(1)).item() == 8
        number = 0.0
        assert call(torch.ones(1)).item() == 6
    finally:
        SCALE = old


def test_captured_parameters_under_torch_func_are_inputs_too() -> None:
    net, x = nn.Linear(2, 1), torch.randn(5, 2)

    def fun(x: torch.Tensor) -> torch.Tensor:
        gradient = torch.func.grad(lambda p: torch.func.functional_call(net, p, (x,)).pow(2).mean())
        return gradient(dict(net.named_parameters()))["weight"].pow(2).sum()

    call = through(fun)
    for _ in range(2):
        net.zero_grad()
        fun(x).backward()
        expected = net.weight.grad.clone()
        net.zero_grad()
        call(x).backward()
        torch.testing.assert_close(net.weight.grad, expected)
        with torch.no_grad():
            net.weight.mul_(2)


@pytest.mark.slow
def test_a_function_that_keeps_compiling_is_named() -> None:
    def busy(x: torch.Tensor, n: int) -> torch.Tensor:
        return x * n

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for n in range(33):
            through(busy)(torch.ones(1), n)
    assert [str(w.message)[:4] for w in caught] == ["busy"]


# Autograd


@pytest.mark.parametrize(
    "fun",
    [
        torch.sin,
        lambda x: x.pow(3).cumsum(0),
        pytest.param(lambda x: torch.outer(x, x).softmax(-1), marks=pytest.mark.slow),
    ],
)
def test_gradcheck(fun: Any) -> None:
    x = torch.randn(4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(through(fun), (x,))
    assert torch.autograd.gradgradcheck(through(fun), (x,))


def test_third_derivative_and_mixed_ones() -> None:
    x = torch.tensor([2.0], requires_grad=True)
    w = torch.tensor([3.0], requires_grad=True)
    for _ in range(2):
        y = through(lambda t: w * t**4)(x)
        for expected in (4 * 8 * 3, 12 * 4 * 3, 24 * 2 * 3):
            (y,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            assert y.item() == pytest.approx(expected)
        (mixed,) = torch.autograd.grad(y.sum(), w)
        assert mixed.item() == pytest.approx(48)


def test_a_second_derivative_is_compiled_once() -> None:
    x = torch.tensor([2.0], requires_grad=True)
    counts = []
    for _ in range(3):
        y = through(lambda t: (traces.append(1), t**4)[1])(x)
        (y,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        torch.autograd.grad(y.sum(), x)
        counts.append(len(traces))
    assert counts[0] == counts[1] == counts[2]


def test_outputs_require_grad_only_where_torch_says_so() -> None:
    x, c = torch.ones(2, requires_grad=True), torch.ones(2)
    outs = through(lambda x, c: (x * c, c * 2, x.detach() * 2, (x > 0), x.argmax()))(x, c)
    assert [o.requires_grad for o in outs] == [True, False, False, False, False]
    with torch.no_grad():
        assert not through(lambda x: x * 2)(x).requires_grad


def test_cotangents_of_any_layout() -> None:
    x = torch.randn(3, 2, requires_grad=True)
    through(lambda t: t * 1.0)(x).sum().backward()
    assert torch.equal(x.grad, torch.ones(3, 2))
    weight = torch.randn(2, 3)
    x.grad = None
    through(lambda t: t * 2.0)(x).backward(weight.T)
    assert torch.equal(x.grad, 2 * weight.T)
    x.grad = None
    through(lambda t: t * 2.0)(x).backward(torch.randn(3, 4)[:, ::2] * 0 + 1)
    assert torch.equal(x.grad, torch.full((3, 2), 2.0))


def test_an_input_written_between_forward_and_backward() -> None:
    w = torch.ones(64, requires_grad=True)
    y = through(lambda t: t**2)(w)
    keep = y.detach().clone()
    with torch.no_grad():
        w.add_(10)
    assert torch.equal(y.detach(), keep)
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        y.sum().backward()


def test_backward_twice_is_the_usual_error_and_parts_may_go_unused() -> None:
    x = torch.randn(3, requires_grad=True)
    one, two = through(lambda t: (t * t, t.exp()))(x)
    one.sum().backward(retain_graph=True)
    two.sum().backward()
    torch.testing.assert_close(x.grad, 2 * x.detach() + x.detach().exp())


def test_complex_gradients_follow_torch() -> None:
    z = torch.tensor([3 + 4j], requires_grad=True)
    through(lambda t: (t.real**2 + t.imag**2).sum())(z).backward()
    assert z.grad.item() == 6 + 8j


def test_batch_norm_statistics_and_counters_end_as_in_torch() -> None:
    module, reference, x = nn.BatchNorm1d(3), nn.BatchNorm1d(3), torch.randn(8, 3) + 5
    for _ in range(2):
        torch.testing.assert_close(through(module)(x), reference(x))
    for got, expected in zip(module.buffers(), reference.buffers(), strict=True):
        torch.testing.assert_close(got, expected)


def test_a_failed_trace_leaves_the_module_as_it_was() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("n", torch.tensor(0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.n = self.n + 1
            return x * self.n if x.sum() > 0 else x

    module = Counts()
    with pytest.raises(TypeError, match=r"torch\.where"):
        through(module)(torch.ones(2))
    assert type(module.n) is torch.Tensor
    assert module.n.item() == 0


def test_randomness_is_torchs_to_seed() -> None:
    call, x = through(lambda t: F.dropout(t, 0.5)), torch.ones(256)
    assert not torch.equal(call(x), call(x))
    torch.manual_seed(1)
    first = call(x)
    torch.manual_seed(1)
    assert torch.equal(call(x), first)


# Structures, layouts, memory


@dataclasses.dataclass
class _Output:
    logits: torch.Tensor
    name: str


def test_structures_come_back_as_they_went_in() -> None:
    x = torch.ones(2)
    tree = {
        "z": x,
        "a": [x, None, "text", 3],
        "pair": Pair(x, {"y": x, "b": x}),
        "ordered": collections.OrderedDict(q=x, c=x),
        "data": _Output(x, "n"),
        "default": collections.defaultdict(list, k=x),
    }
    out = through(lambda t: t)(tree)
    assert list(out) == list(tree)
    assert type(out["pair"]) is Pair
    assert list(out["pair"].right) == ["y", "b"]
    assert type(out["ordered"]) is collections.OrderedDict
    assert list(out["ordered"]) == ["q", "c"]
    assert out["a"][1:] == [None, "text", 3]
    assert type(out["data"]) is _Output
    assert out["data"].name == "n"
    assert type(out["default"]) is collections.defaultdict


def _layouts() -> dict[str, torch.Tensor]:
    base = torch.arange(24.0).reshape(2, 3, 4)
    return {
        "transposed": base.transpose(0, 2),
        "sliced": base[:, 1:],
        "strided": base[..., ::2],
        "flipped": base.flip(0),
        "expanded": base[:1].expand(5, 3, 4),
        "channels last": torch.arange(24.0).reshape(1, 2, 3, 4).contiguous(memory_format=torch.channels_last),
        "empty": base[:0],
        "zero-dimensional": torch.tensor(3.0),
        "size one": torch.arange(3.0).as_strided((1, 3), (77, 1)),
        "conjugated": torch.tensor([1 + 2j, 3 - 1j]).conj(),
        "negated": torch.tensor([1 + 2j]).conj().imag,
        "unaligned": torch.arange(9.0)[1:],
    }


@pytest.mark.parametrize("name", marked(_layouts(), slow=("sliced", "strided", "flipped", "size one")))
def test_layouts(name: str) -> None:
    x = _layouts()[name]
    keep = x.clone()
    for _ in range(2):  # the second call finds the program
        assert torch.equal(through(lambda t: t * 1)(x), x)
        leaf = x.detach().requires_grad_()
        out = through(lambda t: (t * t.conj()).real)(leaf) if x.is_complex() else through(lambda t: t * t)(leaf)
        out.sum().backward()
        torch.testing.assert_close(leaf.grad, 2 * x)
    assert torch.equal(x, keep)


STRIDED: dict[str, Any] = {
    "of an argument": lambda x: x.as_strided((2, 2), (4, 1)),
    "of an argument, from an offset": lambda x: torch.as_strided(x, (2, 2), (2, 1), 1),
    "of a product": lambda x: (x * 2).as_strided((2, 2), (4, 1)),
    "of a transpose": lambda x: x.t().as_strided((2, 2), (1, 4)),
    "of a copy of a transpose": lambda x: (x.t() * 2).as_strided((2, 2), (4, 1)),
    "of columns": lambda x: x[:, 1:].as_strided((2, 2), (4, 1)),
    "of rows": lambda x: x[1:].as_strided((2, 2), (1, 1)),
    "of rows, from an offset": lambda x: x[1:].as_strided((2, 2), (1, 1), 0),
    "beyond a row": lambda x: x[0].as_strided((6,), (1,)),
    "copied": lambda x: torch.as_strided_copy(x, (2, 2), (1, 2)),
    "scattered": lambda x: torch.as_strided_scatter(x, torch.zeros(2, 2), (2, 2), (4, 1)),
    "scattered into a transpose": lambda x: torch.as_strided_scatter(x.t(), torch.zeros(2, 2), (2, 2), (4, 1)),
    "written": lambda x: _writes_strided(x * 1),
    "of a constant": lambda x: x.sum() + torch.arange(6.0).reshape(2, 3).t().as_strided((2, 2), (1, 2)),
}
RIGHT = {
    "of an argument",
    "of an argument, from an offset",
    "of rows",
    "copied",
    "scattered",
    "written",
    "of a constant",
}


def _writes_strided(x: torch.Tensor) -> torch.Tensor:
    x.as_strided((2, 2), (4, 1)).mul_(-1)
    return x


_NEAR_STRIDED = (
    *("of an argument, from an offset", "of a product", "of a copy of a transpose", "of columns", "beyond a row"),
    *("of rows, from an offset", "scattered into a transpose"),
)


@pytest.mark.parametrize("name", marked(STRIDED, slow=_NEAR_STRIDED))
def test_elements_by_their_place_in_memory_are_those_of_torch_or_refused(name: str) -> None:
    fun, call = STRIDED[name], through(STRIDED[name])
    base = torch.arange(24.0)
    arguments = {
        "in order": base[:12].reshape(3, 4),
        "transposed": base[:12].reshape(4, 3).t(),
        "strided": base.reshape(3, 8)[:, ::2],
        "expanded": base[:4].expand(3, 4),
        "part": base[12:].reshape(3, 4),
    }
    for layout, x in arguments.items():
        got = _result_or_message(call, x)
        if isinstance(got, str):
            assert "as_strided" in got
            assert got.startswith(f"{__file__}:")
            assert layout != "in order" or name not in RIGHT
        else:
            torch.testing.assert_close(got, fun(x), rtol=0, atol=0)


def _result_or_message(call: Any, *args: Any) -> Any:
    try:
        return call(*args)
    except TypeError as error:
        return str(error)


def test_a_captured_tensor_read_by_its_place_in_memory_is_in_order_or_refused() -> None:
    ordered = torch.arange(6.0).reshape(2, 3)
    torch.testing.assert_close(
        through(lambda x: x + ordered.as_strided((2, 2), (1, 2)))(torch.ones(2)),
        1 + ordered.as_strided((2, 2), (1, 2)),
    )
    turned = ordered.t()
    with pytest.raises(TypeError, match="as_strided"):
        through(lambda x: x + turned.as_strided((2, 2), (1, 2)))(torch.ones(2))


def test_results_may_be_written_without_touching_anything_else() -> None:
    x, w = torch.ones(64), torch.ones(64)
    outs = through(lambda t: (t, t, w, t * 1, torch.zeros(64)))(x)
    for i, out in enumerate(outs):
        out.fill_(i + 10)
    assert [o[0].item() for o in outs] == [10, 11, 12, 13, 14]
    assert x.eq(1).all()
    assert w.eq(1).all()
    again = through(lambda t: (t, t, w, t * 1, torch.zeros(64)))(x)
    assert again[4].eq(0).all()


def test_nothing_that_is_cached_keeps_a_tensor_alive() -> None:
    def scope() -> list[Any]:
        module, x, c = nn.Linear(3, 3), torch.randn(2, 3), torch.randn(3, requires_grad=True)
        through(lambda t: (module(t) * c).sum())(x).backward()
        with torch.no_grad():
            through(lambda t: module(t) * c)(x)
        return [weakref.ref(t) for t in (module.weight, x, c, c.grad)]

    refs = scope()
    gc.collect()
    assert [r() for r in refs] == [None] * 4


def test_residuals_die_with_the_output() -> None:
    x = torch.randn(64, requires_grad=True)
    y = through(lambda t: t.exp())(x)
    ref = weakref.ref(y.grad_fn)
    gc.disable()
    try:
        del y
        assert ref() is None
    finally:
        gc.enable()


def test_live_arrays_do_not_grow() -> None:
    # Of a shape of its own: what other tests left alive, in threads or in caches, is none of its concern.
    shape, counts = (37, 37), []
    w = torch.randn(shape, requires_grad=True)
    for i in range(60):
        through(lambda a: a @ a)(w).backward(torch.ones(shape))
        w.grad = None
        if i in (20, 59):
            counts.append(live_arrays(shape))
    assert counts[1] <= counts[0]


def test_threads() -> None:
    call, x, results = through(lambda t: torch.tanh(t).sum()), torch.randn(5), []
    threads = [threading.Thread(target=lambda: results.append(call(x))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    for result in results:
        torch.testing.assert_close(result, torch.tanh(x).sum())


def test_many_compilations_are_named_in_a_warning_at_the_line_that_calls() -> None:
    call = through(lambda x: x * 2)
    with pytest.warns(UserWarning, match=r"test_as_torch\.py:\d+\) has been compiled 32 times") as seen:
        results = [call(torch.ones(i + 1)) for i in range(40)]
    assert len(results[-1]) == 40
    assert [(warning.filename, warning.lineno) for warning in seen] == [(__file__, seen[0].lineno)]


# lift


def test_lift_of_transforms_from_function_to_function() -> None:
    def loss(p: dict[str, torch.Tensor]) -> torch.Tensor:
        return (p["b"] * p["a"]).sum()

    p = {"b": torch.ones(2), "a": torch.tensor([1.0, 2.0])}
    out = lift(jax.grad)(loss)(p)
    assert list(out) == ["b", "a"]
    assert torch.equal(out["b"], p["a"])


def test_lift_compiles_the_call_where_tensors_are_among_the_arguments() -> None:
    def newton(f: Any, x: Any, steps: int) -> Any:
        for _ in range(steps):
            x = x - f(x) / jax.grad(f)(x)
        return x

    root = lift(newton)(lambda x: x * x - 2, torch.tensor(1.0, dtype=torch.float64), 6)
    assert root.item() == pytest.approx(2**0.5, abs=1e-12)
    assert root.dtype == torch.float64


def test_jax_functions_pass_untraced() -> None:
    loss = jax_function(lambda x: jnp.sum(jnp.sin(x)))
    x = torch.randn(3)
    torch.testing.assert_close(lift(jax.grad)(loss)(x), x.cos())
    torch.testing.assert_close(lift(jax.grad)(jnp.sum)(x), torch.ones(3))


def test_lift_of_a_transform_of_another_library() -> None:
    import optax

    x, y = torch.randn(6, 3), torch.randn(6, 3)
    mapped = lift(optax.microbatching.micro_vmap)(lambda a, b: {"z": (a * b).sum(), "c": a}, (0, 0), microbatch_size=2)
    out = mapped(x, y)
    assert list(out) == ["z", "c"]
    torch.testing.assert_close(out["z"], (x * y).sum(1))
    torch.testing.assert_close(out["c"], x)
    with pytest.raises(TypeError, match="which row"):
        lift(optax.microbatching.micro_vmap)(lambda a: F.dropout(a), (0,), microbatch_size=2)(x)


def test_different_transforms_of_one_function_are_different_programs() -> None:
    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (w * x.sin()).sum()

    w, x = torch.tensor([1.0, 2.0]), torch.tensor([0.3, 0.5])
    for _ in range(2):  # the second time every program is in the cache
        torch.testing.assert_close(lift(jax.grad)(loss)(w, x), x.sin())
        torch.testing.assert_close(lift(jax.grad)(loss, argnums=1)(w, x), w * x.cos())
        value, gradient = lift(jax.value_and_grad)(loss)(w, x)
        torch.testing.assert_close(value, loss(w, x))
        torch.testing.assert_close(gradient, x.sin())
        torch.testing.assert_close(lift(jax.hessian)(loss, argnums=1)(w, x), torch.diag(-w * x.sin()))
        rows = torch.stack([x, 2 * x, 3 * x])
        for axis in (0, 1):
            mapped = lift(jax.vmap)(lambda r: r.sin(), out_axes=axis)(rows)
            torch.testing.assert_close(mapped, torch.func.vmap(torch.sin, out_dims=axis)(rows))
    traced = as_jax(loss)
    torch.testing.assert_close(as_torch(jax.grad(traced))(w, x), x.sin())
    torch.testing.assert_close(as_torch(traced)(w, x), loss(w, x))


@pytest.mark.parametrize("layout", [pytest.param("contiguous", marks=pytest.mark.slow), "transposed"])
@pytest.mark.parametrize("dtype", [torch.float64, pytest.param(torch.complex128, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", marked(["det", "slogdet", "logdet", "inv", "solve", "lu"], quick=("det", "inv")))
def test_factorisations_of_matrices_that_are_not_symmetric(name: str, dtype: torch.dtype, layout: str) -> None:
    functions = {
        "det": lambda a: torch.det(a),
        "slogdet": lambda a: torch.linalg.slogdet(a)[1],
        "logdet": lambda a: torch.logdet(a @ a.mH).real,
        "inv": lambda a: torch.linalg.inv(a),
        "solve": lambda a: torch.linalg.solve(a, a.mT * 2 + 1),
        "lu": lambda a: torch.linalg.lu(a)[2],
    }
    fun = functions[name]
    base = torch.randn(2, 3, 3, dtype=dtype)
    grads = []
    for call in (through(fun), fun):
        leaf = base.clone().requires_grad_()
        out = call(leaf.mT if layout == "transposed" else leaf * 1)
        torch.view_as_real(out).sum().backward() if out.is_complex() else out.sum().backward()
        grads.append(leaf.grad)
    torch.testing.assert_close(*grads)


def test_autocast_and_the_default_dtype_are_part_of_a_call() -> None:
    layer, x = nn.Linear(4, 4), torch.randn(2, 4)
    call = through(lambda x: layer(x))
    for autocast in (True, False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out, expected = call(x), layer(x)
        assert out.dtype == expected.dtype
    made = through(lambda x: x.double() * torch.ones(2))
    assert through(lambda x: torch.ones(2) + x.sum().long())(x).dtype == torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert through(lambda x: torch.ones(2) + x.sum().long())(x).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert made(torch.ones(2)).dtype == torch.float64


@pytest.mark.parametrize("fun", [lambda t: t.max(1), lambda t: t.sort(1), lambda t: t.topk(2), lambda t: t.median(1)])
def test_named_results_of_torch_come_back(fun: Any) -> None:
    x = torch.randn(3, 4)
    got, expected = through(fun)(x), fun(x)
    assert type(got) is type(expected)
    for one, two in zip(got, expected, strict=True):
        torch.testing.assert_close(one, two)


class _Settings:
    scale = 2.0


class _Trainer:
    __slots__ = ("__dict__", "slot")
    shared = 1.0

    def __init__(self, scale: float) -> None:
        self.scale, self.slot = scale, 1.0
        self.weight = torch.full((3,), scale)
        self.layer = nn.Linear(3, 3, bias=False)
        self.options = {"a": 1.0}
        self.queue = collections.deque([1.0])
        self.default: Any = collections.defaultdict(float, q=1.0)
        self.history: list[float] = []

    @property
    def doubled(self) -> float:
        return self.options["a"] * 2

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        traces.append(1)
        return self.inner(x)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        numbers = self.doubled * self.slot * self.shared * self.queue[-1] * self.default["q"] * _Settings.scale
        return (self.layer(x) * self.weight * self.scale * numbers * getattr(self, "extra", 1.0)).sum()

    __call__ = loss


def _changes() -> dict[str, Any]:
    return {
        "number": lambda t: setattr(t, "scale", 9.0),
        "tensor rebound": lambda t: setattr(t, "weight", torch.ones(3)),
        "tensor in place": lambda t: t.weight.mul_(3),
        "module rebound": lambda t: setattr(t, "layer", nn.Linear(3, 3, bias=False)),
        "state dict": lambda t: t.layer.load_state_dict({"weight": torch.ones(3, 3)}),
        "dict behind a property": lambda t: t.options.update(a=5.0),
        "slot": lambda t: setattr(t, "slot", 4.0),
        "deque": lambda t: t.queue.append(6.0),
        "defaultdict": lambda t: t.default.update(q=7.0),
        "attribute by name": lambda t: setattr(t, "extra", 3.0),
        "class attribute shadowed": lambda t: setattr(t, "shared", 5.0),
    }


@pytest.mark.parametrize(("kind", "name"), crossed(["bound method", "callable", "partial", "lambda"], _changes()))
def test_what_an_object_holds_is_never_stale(kind: str, name: str) -> None:
    trainer, x = _Trainer(2.0), torch.randn(3)
    fun: Any = {
        "bound method": trainer.loss,
        "callable": trainer,
        "partial": functools.partial(trainer.loss),
        "lambda": lambda x: trainer.loss(x),
    }[kind]
    call = through(fun)
    torch.testing.assert_close(call(x), fun(x))
    before = fun(x)
    with torch.no_grad():
        _changes()[name](trainer)
    assert not torch.allclose(fun(x), before)
    torch.testing.assert_close(call(x), fun(x))
    torch.testing.assert_close(through(fun)(x), fun(x))


def test_two_objects_of_one_class_are_two_functions() -> None:
    one, two, x = _Trainer(1.0), _Trainer(5.0), torch.randn(3)
    for method in ("loss", "inner"):
        for trainer in (one, two, one):
            torch.testing.assert_close(through(getattr(trainer, method))(x), getattr(trainer, method)(x))
    through(two.loss)(x).backward()
    assert one.layer.weight.grad is None
    assert two.layer.weight.grad is not None


def test_a_class_attribute_may_change() -> None:
    trainer, x = _Trainer(1.0), torch.randn(3)
    call = through(trainer.loss)
    call(x)
    try:
        _Settings.scale = 11.0
        torch.testing.assert_close(call(x), trainer.loss(x))
    finally:
        _Settings.scale = 2.0


def test_what_the_function_does_not_read_traces_nothing() -> None:
    """A trainer's history grows, and other functions are called between two calls of one."""
    trainer, x = _Trainer(2.0), torch.randn(3)
    counts = []
    for step in range(4):
        through(trainer.loss)(x)
        counts.append(len(traces))
        trainer.history.append(step)
        through(lambda y: trainer.inner(y) * 2 + trainer.weight.sum())(x)
        trainer.unread = step
    assert counts == [counts[0]] * 4


def test_floats_are_inputs_where_the_function_allows_it() -> None:
    x = torch.ones(3)
    call = as_torch(lambda x, c: (traces.append(1), x * c)[1])
    for c in (0.5, 0.25, 0.1):
        assert torch.equal(call(x, c), x * c)
        assert call(x.bfloat16(), c).dtype == torch.bfloat16  # a Python float does not promote
    assert len(traces) == 2
    branches = as_torch(lambda x, c: x if c > 0.3 else -x)
    assert torch.equal(branches(x, 0.5), x)
    assert torch.equal(branches(x, 0.1), -x)
    inside = as_torch(lambda x, c: as_jax(lambda a, b: a * b if b > 0.3 else a)(x.astype(int), c))
    assert torch.equal(inside(x, 0.5), torch.full((3,), 0.5))
    assert torch.equal(inside(x, 0.1), torch.ones(3, dtype=torch.int64))


@pytest.mark.parametrize("index", [3, -4])
@pytest.mark.parametrize(
    "fun",
    [
        lambda x, i: x[i],
        pytest.param(lambda x, i: x.index_select(0, i.abs()), marks=pytest.mark.slow),
        lambda x, i: x.clone().index_put_((i,), torch.ones(1, 2)),
        lambda x, i: x[:, None].expand(3, 1, 2).sum(1)[i],
        pytest.param(lambda x, i: torch.take(x, i * 2), marks=pytest.mark.slow),
        lambda x, i: x.gather(0, i.abs()[:, None]),
        lambda x, i: torch.nn.functional.embedding(i.abs(), x),
        pytest.param(lambda x, i: x.clone().put(i * 2, torch.ones(1)), marks=pytest.mark.slow),
        lambda x, i: x[0] * torch.nn.functional.one_hot(i, 2),
        pytest.param(
            lambda x, i: torch.func.vmap(lambda i: torch.nn.functional.one_hot(i, 2))(i) * x, marks=pytest.mark.slow
        ),
        pytest.param(
            lambda x, i: torch.nn.functional.multilabel_margin_loss(x[:1], torch.stack([i.abs(), i.abs()], 1)),
            marks=pytest.mark.slow,
        ),
    ],
    ids=[
        *("index", "one axis", "written", "after a view", "take", "gather", "embedding", "put"),
        *("one_hot", "one_hot of each", "labels"),
    ],
)
def test_an_index_out_of_range_raises_as_in_torch(fun: Any, index: int) -> None:
    x, i = torch.arange(6.0).reshape(3, 2), torch.tensor([index])
    with pytest.raises(IndexError, match=r"test_as_torch\.py:\d+: index -?\d+ is out of range"):
        through(fun)(x, i)
    leaf = x.clone().requires_grad_()
    with pytest.raises(IndexError):
        through(fun)(leaf, i)
    assert torch.equal(through(lambda x, i: x[i])(x, torch.tensor([-3, 2])), x[[0, 2]])


@pytest.mark.parametrize(
    ("shape", "strides"),
    [((2, 1, 2, 2), (4, 1, 2, 1)), ((3, 1), (1, 7)), ((1, 3), (1, 1)), ((1, 1, 2), (5, 9, 1)), ((2, 3, 1), (3, 1, 8))],
)
def test_an_axis_of_length_1_may_have_any_stride(shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    """Such a tensor is contiguous to torch; the weight of a layer in channels_last is one."""
    values = torch.arange(12.0)[: math.prod(shape)] + 1
    w = values.as_strided(shape, strides).requires_grad_()
    assert w.is_contiguous()
    call = as_torch(as_jax(lambda w, x: (w.sin() * x).sum() + (w * w).sum()))
    for again in (w, values.reshape(shape).requires_grad_()):  # the usual strides, after the others, and before
        (g,) = torch.autograd.grad(call(again, w.detach()), again)
        torch.testing.assert_close(g, w.detach() * w.detach().cos() + 2 * w.detach())


def test_a_skeleton_on_the_meta_device_whose_parameters_are_all_replaced() -> None:
    linear = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2).eval())
    skeleton = copy.deepcopy(linear).to("meta")
    state = {k: v.detach() for k, v in linear.state_dict().items()}
    x = torch.randn(3, 2)
    through = lambda x: torch.func.functional_call(skeleton, state, (x,))
    torch.testing.assert_close(as_torch(as_jax(through))(x), linear(x).detach())
    del state["1.weight"]
    with pytest.raises(TypeError, match=r"test_as_torch.py:\d+: A meta tensor holds no data"):
        as_torch(as_jax(through))(x)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: torch.eye(2).to_sparse(), r"\.to_dense\(\)"),
        (lambda: torch.eye(2).to_mkldnn(), r"\.to_dense\(\)"),
        (lambda: torch.quantize_per_tensor(torch.eye(2), 0.1, 0, torch.qint8), r"\.dequantize\(\)"),
        (lambda: torch.eye(2, device="meta"), "holds no data"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*uantiz:UserWarning")
def test_a_captured_tensor_without_a_counterpart_is_refused_only_where_it_is_read(
    make: Callable[[], torch.Tensor], says: str
) -> None:
    holder = types.SimpleNamespace(w=torch.ones(2), other=make())
    x = torch.tensor([1.0, 2.0])
    read = lambda name, x: x * getattr(holder, name)  # the name is not seen, so that everything is walked over
    torch.testing.assert_close(as_torch(as_jax(read))("w", x), x)
    with pytest.raises(TypeError, match=rf"test_as_torch.py:\d+: .*{says}"):
        as_torch(as_jax(read))("other", x)


def test_forward_mode_inside_over_writes_into_views() -> None:
    def filled(v: torch.Tensor) -> torch.Tensor:
        m = torch.zeros(2, 3)
        m[0, :2] = v.sin()
        m[:, 1].mul_(v)
        m[1] += v.sum()
        return m

    x = torch.tensor([0.3, 0.7])
    for derive in (torch.func.jacfwd, torch.func.hessian):
        torch.testing.assert_close(as_torch(as_jax(derive(filled)))(x), derive(filled)(x))


_SLOW_SCALARS = [pytest.param(k, marks=pytest.mark.slow) for k in (np.float32(0.5), np.int8(2))]
_SCALARS = [np.float64(0.5), np.bool_(True), np.int64(2), *_SLOW_SCALARS]


@pytest.mark.parametrize("k", _SCALARS, ids=repr)
def test_scalars_of_numpy_are_numbers_to_torch(k) -> None:
    functions = [
        lambda x, k: x * k,
        lambda x, k: torch.where(x > 0, k, 0.0),
        lambda x, k: torch.full((3,), k) + x,
        lambda x, k: x * (2 if isinstance(k, float) else 3),
        lambda x, k: x if k else x * 2,
    ]
    for x in (torch.arange(3), torch.ones(3), torch.tensor([True, False, True])):
        for fun in functions:
            torch.testing.assert_close(as_torch(as_jax(fun))(x, k), fun(x, k))
