"""XLA simplifies as if numbers were real; values and gradients at the ends of the range are still eager torch's."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from torch import Tensor

from microtome import torch_api as mt
from microtome.bridge import as_jax, as_torch, to_jax
from microtome.bridge.record import rewriting

Fun = Callable[..., Tensor]
pytestmark = pytest.mark.filterwarnings("ignore:.*has been compiled:UserWarning")
inf, nan = math.inf, math.nan


def _row(x: Tensor) -> Tensor:
    return torch.stack([x, x * 0.5, -x], -1)


def _divided(e: Tensor, spread: bool = False) -> Tensor:
    total = e.sum(-1, keepdim=True)
    return e / (total.expand_as(e) if spread else total)


FUNCTIONS: dict[str, Fun] = {
    # quotients of quotients
    "sigmoid": lambda x: x.exp() / (1 + x.exp()),
    "swish": lambda x: x * x.exp() / (1 + x.exp()),
    "a / b / c": lambda x: x / (x * x + 1) / (x * x + 2),
    "a / (b / c)": lambda x: 1 / ((x + 1) / (x * x + 1)),
    "(a / b) / (c / d)": lambda x: (x / (1 + x * x)) / ((x + 2) / (x * x + 3)),
    "continued fraction": lambda x: 1 / (1 + 1 / (1 + 1 / x)),
    "quotient, moved": lambda x: (_row(x / (x + 1)).t() / x).sum(0) / x,
    "mean of a quotient": lambda x: (x[:, None] / x[:, None]).expand(-1, 3).mean(-1) / x / x,
    "1 / (1 / x)": lambda x: x.reciprocal().reciprocal(),
    "geman": lambda x: 2 * x**2 / (x**2 + 4),
    "powers below zero": lambda x: x**-1 / x**-2,
    "sigmoids": lambda x: torch.sigmoid(x) / torch.sigmoid(x * 2),
    "softmax over x": lambda x: _row(x).softmax(-1)[:, 0] / x,
    # exponentials, logarithms, powers
    "softmax": lambda x: _divided(_row(x).exp())[:, 0],
    "spread softmax": lambda x: _divided(_row(x).exp(), spread=True)[:, 0],
    "log of a softmax": lambda x: _divided(_row(x).exp()).log()[:, 0],
    "logsumexp": lambda x: _row(x).exp().sum(-1).log(),
    "logsumexp of one": lambda x: x[:, None].exp().sum(-1).log(),
    "tanh": lambda x: (x.exp() - (-x).exp()) / (x.exp() + (-x).exp()),
    "exp exp": lambda x: x.exp() * (x * -2).exp(),
    "exp / exp": lambda x: x.exp() / (x / 2).exp(),
    "exp squared": lambda x: x.exp() ** 2,
    "power of exp": lambda x: x.exp() ** 0.3,
    "log exp": lambda x: (x.abs().exp() + 0).log(),
    "log of a root": lambda x: (x**0.5).log(),
    "log of a cube": lambda x: (x**3).log(),
    "log of a power": lambda x: (x.abs() ** 1.7).log(),
    "normal density": lambda x: (-x * x / 2).exp() / math.sqrt(2 * math.pi),
    "cauchy": lambda x: -(math.pi * (1 + x * x)).log(),
    "student": lambda x: (1 + x * x / 3) ** -2.0,
    # roots
    "root of a square": lambda x: (x * x).sqrt(),
    "root of a power": lambda x: (x**2) ** 0.5,
    "x / |x|": lambda x: x / (x * x + 1e-12).sqrt(),
    "x ** 0.5": lambda x: x**0.5,
    "x ** -0.5": lambda x: x**-0.5,
    # constants
    "x * 0": lambda x: x * 0,
    "x - x": lambda x: x - x,
    "x / x": lambda x: x / x,
    "mask": lambda x: x * (x < 0),
    "+ 1 - 1": lambda x: x + 1 - 1,
    "1 - (1 - x)": lambda x: 1 - (1 - x),
    "rounding": lambda x: (x + 12582912.0) - 12582912.0,
    "* c / c": lambda x: x * 1e30 / 1e30,
    "* c * c": lambda x: x * 1e30 * 1e-30,
    "/ c * c": lambda x: x / 1e30 * 1e30,
    "/ huge": lambda x: x / 3e38,
    "c / (c / x)": lambda x: 1e10 / (1e10 / x),
    "* 2 * 0.5": lambda x: x * 2 * 0.5,
    "2 x + 2 y": lambda x: x * 2 + (-x) * 2,
    "half": lambda x: x.half().to(x.dtype),
    "bfloat16": lambda x: x.bfloat16().to(x.dtype),
}
POINTS = {
    torch.float32: [1e-10, 1e-5, 0.3, 1.0, 2.5, 20.0, 45.0, 86.0, 88.0, 100.0, 1e10, 3e19, 1e30, 3e38],
    torch.float64: [1e-10, 0.3, 1.0, 45.0, 300.0, 700.0, 708.0, 1e100, 1e200, 1.7e308],
    torch.float16: [1e-2, 0.3, 1.0, 2.5, 7.0, 10.0, 11.0, 20.0, 300.0, 1e4, 6e4],
}
POINTS[torch.bfloat16] = POINTS[torch.float32]
TOLERANCES = {torch.float32: 1e-3, torch.float64: 1e-9, torch.float16: 0.02, torch.bfloat16: 0.1}
# Rounding decides what is left of them, or numbers below the normal ones, which XLA takes for zero.
ROUNDING_IN_BFLOAT16 = {"log of a softmax", "(a / b) / (c / d)"}
CANCELLING = {"x / |x|", "root of a power", "sigmoids", "softmax over x", "continued fraction", "log of a softmax"}


def _points(dtype: torch.dtype) -> Tensor:
    found = POINTS[dtype]
    return torch.tensor([*found, *(-x for x in found), 0.0, inf, -inf, nan], dtype=torch.float64).to(dtype)


@contextlib.contextmanager
def _flushing() -> Iterator[None]:
    """XLA takes numbers below the normal ones for zero, and so does the oracle."""
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def _derivatives(everything: Any, x: Tensor, count: int, order: int) -> list[list[Tensor]]:
    leaves = [x.clone().requires_grad_() for _ in range(count)]
    found = [list(everything(*leaves))]
    for i in range(order):
        heads = [o.sum() for o in found[-1] if o.requires_grad]
        gradients = torch.autograd.grad(heads, leaves, create_graph=i + 1 < order, allow_unused=True)
        found.append([torch.zeros_like(x) if g is None else g for g in gradients])
    return found


def _differing(ours: Tensor, right: Tensor, tolerance: float, absolute: float = 0.0) -> Tensor:
    a, b = ours.detach().double(), right.detach().double()
    smallest = torch.finfo(right.dtype).tiny
    close = (a == b) | (a.isnan() & b.isnan()) | ((a - b).abs() <= tolerance * b.abs() + absolute)
    return ~(close | ((a.abs() < smallest) & (b.abs() < smallest)))


def _check(dtype: torch.dtype, order: int) -> None:
    without = {torch.float16: {"rounding"}, torch.bfloat16: ROUNDING_IN_BFLOAT16}  # torch refuses the former's number
    names = [name for name in FUNCTIONS if name not in without.get(dtype, ())]

    def everything(*xs: Tensor) -> list[Tensor]:
        return [FUNCTIONS[name](x) for name, x in zip(names, xs, strict=True)]

    x = _points(dtype)
    ours = _derivatives(as_torch(as_jax(everything)), x, len(names), order)
    with _flushing():
        right = _derivatives(everything, x, len(names), order)
    wrong = []
    for i, (mine, theirs) in enumerate(zip(ours, right, strict=True)):
        for name, a, b in zip(names, mine, theirs, strict=True):
            # The terms of a derivative are about one, and may cancel: some processors add a product in one step.
            where = _differing(a, b, TOLERANCES[dtype], torch.finfo(dtype).eps if i else 0.0)
            if where.any() and not (i and name in CANCELLING):
                wrong.append((name, i, x[where].tolist(), a[where].tolist(), b[where].tolist()))
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.slow  # XLA's older code generator, by which the quick tests compile, rounds log1p to zero
def test_values_and_gradients_at_the_ends_of_the_range() -> None:
    _check(torch.float32, order=1)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_values_and_gradients_in_other_dtypes(dtype: torch.dtype) -> None:
    _check(dtype, order=1)


def test_the_form_is_kept_in_jax_programs_and_per_example() -> None:
    def ratio(w: Tensor, t: Tensor) -> Tensor:
        return ((t * w).exp() / (1 + (t * w).exp())).sum()

    w, t = torch.tensor(1.0), torch.tensor([45.0, 60.0, 80.0, -45.0])
    right = torch.stack([torch.func.grad(ratio)(w, row) for row in t])
    assert (right[:3] == 0).all()
    each = jax.vmap(jax.grad(as_jax(ratio)), (None, 0))
    torch.testing.assert_close(torch.tensor(jax.jit(each)(*to_jax((w, t))).tolist()), right)
    curvature = jax.vmap(jax.grad(jax.grad(as_jax(ratio))), (None, 0))
    second = torch.stack([torch.func.grad(torch.func.grad(ratio))(w, row) for row in t])
    torch.testing.assert_close(torch.tensor(jax.jit(curvature)(*to_jax((w, t))).tolist()), second, rtol=1e-3, atol=1e-3)
    tangents = jax.jvp(jax.vmap(as_jax(ratio), (None, 0)), to_jax((w, t)), (jnp.ones(()), jnp.zeros(4)))[1]
    torch.testing.assert_close(torch.tensor(tangents.tolist()), right)
    rows = mt.micro_vmap(torch.func.grad(ratio), in_axes=(None, 0), microbatch_size=2)(w, t)
    torch.testing.assert_close(rows, right)
    _, aux = mt.clipped_grad(ratio, l2_clip_norm=1.0, keep_batch_dim=False, return_grad_norms=True)(w, t)
    torch.testing.assert_close(aux.grad_norms, right.abs())


def test_numbers_beside_halves_are_not_rounded_to_half() -> None:
    x = torch.tensor([1e-3, 1.0, 100.0, 0.0])

    def everything(x: Tensor) -> list[Tensor]:
        many = x.expand(100_000, 4).mean(0)
        return [x * 1e6, x / 1e6, x * 1e-9, x / 1e-9, 1e5 / x, x * 100_000, x / 100_000, x / x.sum(), many]

    for dtype in (torch.float16, torch.bfloat16):
        for a, b in zip(as_torch(as_jax(everything))(x.to(dtype)), everything(x.to(dtype)), strict=True):
            torch.testing.assert_close(a, b, rtol=0.01, atol=0)
        gradients = []
        for wrap in (lambda fun: as_torch(as_jax(fun)), lambda fun: fun):
            leaf = x.to(dtype).requires_grad_()
            wrap(lambda x: x.expand(100_000, 4).mean(0).sum() + (x / 1e6).sum())(leaf).backward()
            gradients.append(leaf.grad)
        torch.testing.assert_close(*gradients, rtol=0.01, atol=0)


def _lowered(fun: Fun, *inputs: Tensor) -> Any:
    return jax.jit(jax.value_and_grad(as_jax(fun))).lower(*to_jax(inputs))


def test_what_xla_would_leave_as_it_is_meets_no_barrier_and_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    block = torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Softmax(-1))
    text = _lowered(lambda x: (block(x) ** 2).mean(), torch.ones(4, 8)).as_text()
    assert "optimization_barrier" not in text
    x = torch.ones(512, 512)
    # A gradient spread over all elements is divided by one number after another: nothing of its size is written.
    spread = lambda x: ((x / 2.5 - 0.1) * torch.exp(-x * x / 2) / 2.5).mean() / 3
    needed = _lowered(spread, x).compile().memory_analysis().temp_size_in_bytes
    # Between the two divisions nothing is written: the barrier is gone before operations are fused.
    twice = jax.jit(as_jax(lambda x: x.exp() / (1 + x.exp()) / (2 + x))).lower(to_jax(x)).compile()
    assert twice.memory_analysis().temp_size_in_bytes <= 4096
    monkeypatch.setattr(rewriting, "barriers", lambda nodes, outputs: ({}, set()))
    assert needed == _lowered(lambda x: spread(x), x).compile().memory_analysis().temp_size_in_bytes


UNARY = ["exp", "log", "sqrt", "rsqrt", "abs", "neg", "reciprocal", "square", "tanh"]
CONSTANTS = [1e30, 1e-30, 1e10, 3.0, 0.5, 2.0, 1.0, 1e20, 1e-10, -1.0, 2.0**100]
SHIFTS = [7.3e20, 1.7e-12, 1.37, -0.29, 4e-29]  # no two of the values differ by them


def _expression(draw: random.Random, depth: int) -> str:
    inner = lambda: _expression(draw, depth - 1)
    if depth == 0 or draw.random() < 0.12:
        return draw.choice("xyz")
    kind = draw.choices(range(6), (28, 17, 25, 20, 4, 6))[0]
    if kind < 2:
        return f"({inner()} {'/*'[kind]} {inner()})"
    if kind == 2:
        op = draw.choice(["*", "/", "+", "-", "over"])
        constant = repr(draw.choice(SHIFTS if op in "+-" else CONSTANTS))
        return f"({constant} / {inner()})" if op == "over" else f"({inner()} {op} {constant})"
    if kind == 3:
        return f"{inner()}.{draw.choice(UNARY)}()"
    if kind == 4:
        return f"({inner()} ** {draw.choice([2, 3, -1, 0.5, 1.5, 0.3])})"
    return inner() + draw.choice([".view(4, -1).view(-1)", "[:, None].amax(-1)", "[None].expand(3, -1).amax(0)"])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_drawn_expressions(seed: int) -> None:
    """Overflow, NaN and zero are where eager torch has them, in expressions without differences of like numbers."""
    draw = random.Random(seed)
    texts = [_expression(draw, 4) for _ in range(150)]
    funs = [eval(f"lambda x, y, z: {text}") for text in texts]
    values = [1e30, 1e19, 1e10, 86.0, 45.0, 3.0, 1.0, 0.3, 1e-5, 1e-10, 1e-17, 1e-30]
    values = [*values, *(-v for v in values), inf, -inf, nan]
    inputs = [torch.tensor([draw.choice(values) for _ in range(400)]) for _ in range(3)]

    def everything(*inputs: Tensor) -> list[Tensor]:
        return [fun(*inputs) for fun in funs]

    ours = as_torch(as_jax(everything))(*inputs)
    with _flushing():
        right = everything(*inputs)
    wrong = []
    for text, a, b in zip(texts, ours, right, strict=True):
        where = _differing(a, b, 0.25) & ~((a.abs() > 1e37) & (b.abs() > 1e37) & (a * b > 0))
        where &= ~((a.abs() < 1e-36) & (b.abs() < 1e-36))
        if where.sum() > 2:  # one or two: where rounding decides the sign of a difference
            wrong.append((text, int(where.sum()), *(float(v[where][0]) for v in (*inputs, a, b))))
    assert not wrong, "\n".join(map(str, wrong))
