"""The verdicts of ``compare``: a difference is never called rounding, and rounding never a difference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from helpers import crossed, marked

from microtome import torch_api as mt

X = torch.randn(64, generator=torch.Generator().manual_seed(0))
EVEN = torch.arange(64) % 2 == 0
LOWEST = torch.finfo(torch.float32).min
ADDED = torch.where(EVEN, -1e9, 0.0)


def verdicts(torch_fun: Callable[..., Any], jax_fun: Callable[..., Any], *args: Any, **options: Any) -> dict[str, str]:
    report = mt.compare(torch_fun, jax_fun, *args, engines=(), **{"gradients": False, **options})
    assert not report.problems
    return {row.leaf: row.verdict for row in report.rows}


@pytest.mark.parametrize("filler", marked([-1e4, -1e9, LOWEST], quick=(LOWEST,)))
def test_what_a_mask_writes_hides_no_difference(filler: float) -> None:
    mask = EVEN.numpy()
    torch_fun = lambda x: {"masked": x.exp().masked_fill(EVEN, filler), "beside": x.exp()}
    port = lambda factor: lambda x: {"masked": jnp.where(mask, filler, jnp.exp(x) * factor), "beside": jnp.exp(x)}
    assert set(verdicts(torch_fun, port(1), X).values()) <= {"equal", "rounding"}
    assert verdicts(torch_fun, port(1 + 1e-6), X)["masked"] == "different"
    wrong = lambda x: {"masked": jnp.where(mask, filler, jnp.exp(x)), "beside": jnp.exp(x) * (1 + 1e-6)}
    found = verdicts(torch_fun, wrong, X)
    assert found["masked"] in ("equal", "rounding")
    assert found["beside"] == "different"


def test_what_a_mask_writes_hides_nothing_where_float32_is_all_there_is() -> None:
    single = lambda x: x.astype(jnp.float32)
    torch_fun = lambda x: x.float().exp().masked_fill(EVEN, LOWEST)
    port = lambda factor: lambda x: jnp.where(EVEN.numpy(), LOWEST, jnp.exp(single(x)) * factor)
    assert verdicts(torch_fun, port(1), X)["output"] in ("equal", "rounding")
    assert verdicts(torch_fun, port(1 + 1e-4), X) == {"output": "different"}


def test_a_mask_that_is_added() -> None:
    added = ADDED.numpy()
    assert verdicts(lambda x: x + ADDED, lambda x: x + added, X) == {"output": "equal"}
    assert verdicts(lambda x: x + ADDED, lambda x: x * (1 + 1e-6) + added, X) == {"output": "different"}


@pytest.mark.parametrize("size", [3, 10**15, 2**62])
def test_whole_numbers_are_equal_or_different(size: int) -> None:
    torch_fun = lambda x: (x * 1e17, torch.tensor([size, -size]))
    with jax.enable_x64(True):
        port = lambda more: lambda x: (x * 1e17, jnp.asarray([size + more, -size]))
        assert verdicts(torch_fun, port(0), X)["1"] == "equal"
        assert verdicts(torch_fun, port(1), X)["1"] == "different"


def test_an_index_that_rounding_chose() -> None:
    """In float32 the two entries are equal, and either index is right; float64 tells them apart."""
    torch_fun = lambda x: torch.stack([x, x + 1e-12]).argmax(0)
    port = lambda x: 1 - jnp.stack([x + 1e-12, x]).argmax(0)
    assert verdicts(torch_fun, port, X) == {"output": "rounding"}
    assert verdicts(torch_fun, lambda x: 1 - port(x), X) == {"output": "different"}


def test_a_large_leaf_hides_no_difference_in_a_small_one() -> None:
    torch_fun = lambda large, small: (large * 1.1e12).sum() + (small**2).sum()
    wrong = jax.custom_jvp(lambda x: x**2)
    wrong.defjvp(lambda primals, tangents: (primals[0] ** 2, 2.002 * primals[0] * tangents[0]))
    for square, verdict in ((lambda x: x**2, "rounding"), (wrong, "different")):
        port = lambda large, small, f=square: (large * 1.1e12).sum() + f(small).sum()
        found = verdicts(torch_fun, port, X, X, gradients=True)["argument 1"]
        assert found == verdict or (found, verdict) == ("equal", "rounding")


CANCELLING: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "sum of deviations": (lambda x: (x - x.mean()).sum(), lambda x: (x - x.mean()).sum()),
    "sum both ways": (lambda x: x.sum() - x.flip(0).sum(), lambda x: x.sum() - x[::-1].sum()),
    "softmax sums to one": (lambda x: x.softmax(0).sum() - 1, lambda x: jax.nn.softmax(x).sum() - 1),
    "product with the inverse": (
        lambda x: x.view(8, 8) @ torch.linalg.inv(x.view(8, 8)),
        lambda x: x.reshape(8, 8) @ jnp.linalg.inv(x.reshape(8, 8)),
    ),
    "variance by moments": (
        lambda x: (x + 100).var(unbiased=False),
        lambda x: ((x + 100) ** 2).mean() - (x + 100).mean() ** 2,
    ),
}


@pytest.mark.parametrize(("name", "seed"), crossed(CANCELLING, range(2)))
def test_what_is_zero_but_for_rounding(name: str, seed: int) -> None:
    x = torch.randn(64, generator=torch.Generator().manual_seed(seed))
    assert set(verdicts(*CANCELLING[name], x).values()) <= {"equal", "rounding"}


def test_derivatives_that_vanish_but_for_cancelled_numbers() -> None:
    """Of a saturated softmax: zero in float32, and in float64 what is left of numbers of 1e12."""
    torch_fun = lambda w, x: (x @ w).softmax(-1)
    report = mt.compare(
        torch_fun, lambda w, x: jax.nn.softmax(x @ w), 10 * X.view(8, 8), 1e4 * X.view(8, 8), hvp=True, engines=()
    )
    report.assert_agrees()


@pytest.mark.parametrize("scale", marked([1e-30, 1e-12, 1.0, 1e12], quick=(1e-30, 1e12)))
def test_no_scale_hides_a_difference(scale: float) -> None:
    right, wrong = lambda x: jnp.exp(x) * scale, lambda x: jnp.exp(x) * (scale * (1 + 1e-7))
    assert verdicts(lambda x: x.exp() * scale, right, X)["output"] in ("equal", "rounding")
    assert verdicts(lambda x: x.exp() * scale, wrong, X)["output"] == "different"


def test_the_worst_element_is_the_one_that_differs() -> None:
    """Rounding is larger elsewhere, but it is float64 that tells."""
    port = lambda x: jnp.exp(x * 50).at[5].multiply(1 + 1e-6)
    report = mt.compare(lambda x: (x * 50).exp(), port, torch.linspace(0, 1, 8), gradients=False, engines=())
    assert report.verdict("output") == "different"
    assert report.rows[0].index == (5,)


def test_one_element_in_a_million() -> None:
    x = torch.randn(1_000_000, generator=torch.Generator().manual_seed(0))
    report = mt.compare(torch.sin, lambda x: jnp.sin(x).at[777_777].add(1e-6), x, gradients=False, engines=())
    assert report.verdict("output") == "different"
    assert report.rows[0].index == (777_777,)


def test_nan_and_infinities_stand_in_the_same_places() -> None:
    assert verdicts(lambda x: x.log(), jnp.log, X)["output"] in ("equal", "rounding")
    assert verdicts(lambda x: x / 0, lambda x: x / 0, X)["output"] == "equal"
    assert verdicts(lambda x: x / 0, lambda x: jnp.abs(x) / 0, X)["output"] == "different"
    assert (
        verdicts(lambda x: x.log(), lambda x: jnp.log(jnp.where(x > -0.5, jnp.abs(x), x)), X)["output"] == "different"
    )


def test_a_port_that_computes_in_float32_when_float64_is_given() -> None:
    port = lambda x: jnp.sin(x.astype(jnp.float32))
    report = mt.compare(torch.sin, port, X.double(), gradients=False, engines=())
    assert "the arguments are float64, but JAX computes in float32" in str(report)
    assert not report.agrees
    mt.compare(torch.sin, jnp.sin, X.double(), engines=()).assert_agrees()
    mt.compare(lambda x: torch.sin(x.float()), port, X.double(), engines=()).assert_agrees()


def test_tensors_that_the_function_captured_are_widened() -> None:
    w = torch.randn(64, 3, generator=torch.Generator().manual_seed(1))
    array = w.numpy()
    for torch_fun in (lambda x: x @ w, lambda x: torch.nn.functional.linear(x, w.T)):
        report = mt.compare(torch_fun, lambda x: x @ array, X, engines=())
        report.assert_agrees()
        assert not report.notes
        assert all(row.relative64 is not None for row in report.rows)
    assert verdicts(lambda x: x @ w, lambda x: x @ (array * np.float64(1 + 1e-9)), X) == {"output": "different"}
