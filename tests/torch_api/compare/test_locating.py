"""``compare``: faults beside what ports make in another way (masks, tables of positions), and JAX sides in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from microtome import torch_api as mt

ALONE: dict[str, Any] = {"engines": (), "gradients": False, "locate": True}
FLOATS = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
X = torch.randn(3, 6, 4, generator=torch.Generator().manual_seed(0))
KEEP = torch.tensor([[1.0] * 6, [1, 1, 1, 1, 1, 0], [1, 1, 1, 0, 0, 0]])


class Table(nn.Module):
    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = torch.arange(x.shape[1]).to(x)[None, :, None] / torch.tensor([1.0, 4.0]).to(x)
        return torch.cat((angles, angles), -1).cos(), torch.cat((angles, angles), -1).sin()


class Core(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return torch.softmax(q @ k.mT + bias, -1) @ k


class Net(nn.Module):
    """Attention with rotated queries and an added mask."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.position = Table(), nn.Embedding(6, 4)
        self.q, self.k, self.core, self.out = nn.Linear(4, 4), nn.Linear(4, 4), Core(), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        x = x + self.position(torch.arange(6)[None])
        cos, sin = self.table(x)
        turn = lambda x: x * cos + torch.cat((-x[..., 2:], x[..., :2]), -1) * sin
        return self.out(self.core(turn(self.q(x)), turn(self.k(x)), (1 - keep[:, None]) * -1e9))


PARAMS = {"position": FLOATS(6, 4)} | {name: {"kernel": FLOATS(4, 4), "bias": FLOATS(4)} for name in ("q", "k", "out")}


def port(p: Any, x: Any, keep: Any, fault: str = "", halves: bool = False) -> Any:
    dense = lambda name, x: x @ p[name]["kernel"] + (0 if fault == name else p[name]["bias"])
    x = x + p["position"][jnp.broadcast_to(jnp.arange(6), x.shape[:2])]
    angles = jnp.broadcast_to(jnp.arange(6.0), x.shape[:2])[:, :, None] / jnp.array([1.0, 4.0], x.dtype)

    def turn(x: Any) -> Any:
        one, two, cos, sin = x[..., :2], x[..., 2:], jnp.cos(angles), jnp.sin(angles)
        if halves:
            return jnp.concatenate((one * cos - two * sin, two * cos + one * sin), -1)
        return x * jnp.tile(cos, 2) + jnp.concatenate((-two, one), -1) * jnp.tile(sin, 2)

    q, k = turn(dense("q", x)), turn(dense("k", x))
    scores = q @ k.mT * (1.01 if fault == "core" else 1.0)
    return dense("out", jax.nn.softmax(jnp.where(keep[:, None] > 0, scores, -jnp.inf)) @ k)


@pytest.mark.parametrize("halves", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_tables_and_masks_neither_convict_nor_hide(halves: bool) -> None:
    """Both are made in another way in JAX: broadcast over the batch or in halves, and by ``where``."""
    for fault in ("core", "out") if halves else ("", "k", "core"):
        fun = lambda p, x, keep, fault=fault: port(p, x, keep, fault, halves)
        report = mt.compare(Net(), fun, X, KEEP, params=PARAMS, **ALONE)
        assert report.agrees is (fault == "")
        assert (report.location.module if report.location else "") == fault, report


class Chain(nn.Module):
    """A scaling that no parameter reaches, then layers."""

    def __init__(self, scale: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale, self.act, self.b = scale, nn.ReLU(), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.act(self.scale(x)))


class Scale(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 - 0.1


CHAIN = {"kernel": FLOATS(4, 4), "bias": FLOATS(4)}


def located(fun: Callable[..., Any], x: torch.Tensor, net: nn.Module | None = None, **options: Any) -> Any:
    return mt.compare(net or Chain(Scale()), fun, x, params=CHAIN, **{**ALONE, **options})


def test_a_difference_before_all_parameters_is_named() -> None:
    fun = lambda p, x: jax.nn.relu(x * 2 - 0.2) @ p["kernel"] + p["bias"]
    assert located(fun, X).location.module == "scale"


def test_another_input_convicts_what_is_dead_on_the_one_given() -> None:
    fun = lambda p, x: jax.nn.leaky_relu(x * 2 - 0.1) @ p["kernel"] + p["bias"]
    assert located(fun, -X.abs()).location.module == "act"


def test_what_is_done_to_the_last_output_is_named() -> None:
    fun = lambda p, x: (jax.nn.relu(x * 2 - 0.1) @ p["kernel"] + p["bias"]) * 2
    location = located(fun, X).location
    assert (location.module, location.sure) == ("b", False)
    assert "returns other numbers" in location.detail


def test_the_note_says_what_differs() -> None:
    @jax.custom_jvp
    def relu(x: Any) -> Any:
        return jax.nn.relu(x)

    relu.defjvp(lambda primals, tangents: (jax.nn.relu(primals[0]), 2 * tangents[0]))
    fun = lambda p, x: relu(x * 2 - 0.1) @ p["kernel"] + p["bias"]
    assert located(fun, X, gradients=True).notes[-1].endswith("every submodule; the difference is in gradients")
    tiny = lambda p, x: (jax.nn.relu(x * 2 - 0.1) @ p["kernel"] + p["bias"]) * (1 + 1e-11)
    assert "in derivatives" not in str(located(tiny, X))
    assert "too small to be searched for" in str(located(tiny, X))


# A JAX side that computes in float32, whatever it is given


single = lambda x: x.astype(jnp.float32)
LONG = torch.randn(64, 300, generator=torch.Generator().manual_seed(0))
norm = lambda x, eps: (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + eps)
PAIRS: list[tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]] = [
    (torch.tanh, jnp.tanh, lambda x: jnp.tanh(x) * (1 + 5e-6)),
    (lambda x: F.layer_norm(x, (300,)), lambda x: norm(x, 1e-5), lambda x: norm(x, 1.7e-5)),
    (
        lambda x: (x @ x.mT / 300).softmax(-1),
        lambda x: jax.nn.softmax(x @ x.mT / 300),
        lambda x: jax.nn.softmax(x @ x.mT / 300 + jnp.arange(64) * 1e-6),
    ),
    (lambda x: x.square().mean(), lambda x: (x**2).mean(), lambda x: (x**2).mean() + 1e-5),
    (lambda x: x.logsumexp(-1), lambda x: jax.nn.logsumexp(x, -1), lambda x: jax.nn.logsumexp(x, -1) + 1e-5),
]


@pytest.mark.parametrize("pair", PAIRS[:2] + [pytest.param(pair, marks=pytest.mark.slow) for pair in PAIRS[2:]])
def test_the_rounding_of_a_port_in_float32_is_that_of_torch(pair: tuple[Callable[..., Any], ...]) -> None:
    torch_fun, right, wrong = pair
    options = {"engines": (), "gradients": pair is PAIRS[0]}
    report = mt.compare(torch_fun, lambda x: right(single(x)), LONG, **options)
    report.assert_agrees()
    assert "dtype=None" in str(report)
    assert not mt.compare(torch_fun, lambda x: wrong(single(x)), LONG, **options).agrees


def test_a_fault_in_float32_is_located() -> None:
    def fun(p: Any, x: Any) -> Any:
        x = jnp.maximum(single(x) * 2 - jnp.float32(0.1), 1e-4)
        return x @ single(p["kernel"]) + single(p["bias"])

    assert located(fun, X).location.module == "act"
