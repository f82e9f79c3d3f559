"""torch functions that are rewritten before they are recorded: what they write, refuse and name."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import crossed
from torch_cases import data

from microtome import torch_api as mt
from microtome.bridge import as_jax, as_torch

t = torch.tensor
BAGS, ROWS = t([0, 4, 1, 0]), data(5, 2)


@pytest.mark.parametrize(("norm_type", "kind"), crossed([2.0, 1.0, inf], [torch.nn.Embedding, torch.nn.EmbeddingBag]))
def test_rows_that_are_looked_up_are_scaled_in_place(kind: Any, norm_type: float) -> None:
    """``max_norm`` writes to the weight, in each call to the rows of that call alone."""
    own, other = (kind(5, 3, max_norm=0.5, norm_type=norm_type) for _ in range(2))
    other.load_state_dict(own.state_dict())
    fun = as_torch(as_jax(lambda i: own(i).sin()))
    for rows in ([[0, 1], [1, 1]], [[3, 1], [4, 3]]):
        got, expected = fun(t(rows)), other(t(rows)).sin()
        torch.testing.assert_close((got, own.weight), (expected, other.weight))
        got.sum().backward()
        expected.sum().backward()
        torch.testing.assert_close(own.weight.grad, other.weight.grad)
    with pytest.raises(TypeError, match=r"writes to its argument p\['weight'\] in place"):
        mt.clipped_grad(lambda p, i: torch.func.functional_call(own, p, i).sum(), l2_clip_norm=1.0)(
            dict(own.named_parameters()), t(rows)
        )


@pytest.mark.parametrize(
    "options",
    [{"mode": "avg"}, {"mode": "max", "sparse": True}, {"per_sample_weights": ROWS[:4, 0]}, {"offsets": None}],
)
def test_options_that_torch_refuses(options: dict[str, Any]) -> None:
    def bag(i: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.embedding_bag(i, w, **{"offsets": t([0, 2]), **options})

    with pytest.raises((ValueError, NotImplementedError)) as expected:
        bag(BAGS, ROWS)
    with pytest.raises(type(expected.value)) as got:
        as_torch(as_jax(bag))(BAGS, ROWS)
    assert str(expected.value) in str(got.value)


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        *(
            pytest.param(options, marks=pytest.mark.slow)
            for options in (
                *({"num_layers": 2, "bidirectional": True}, {"bias": False}, {"proj_size": 2}),
                {"dtype": torch.float64},
            )
        ),
    ],
    ids=str,
)
def test_an_lstm_under_autocast(dtype: torch.dtype, options: dict[str, Any]) -> None:
    """Autocast takes the kernel of CPUs as a whole: its results, but not those of other recurrent layers."""
    torch.manual_seed(0)
    lstm = torch.nn.LSTM(3, 4, **options)
    x = data(5, 2, 3, dtype=options.get("dtype", torch.float32))

    def fun(x: torch.Tensor) -> Any:
        with torch.autocast("cpu", dtype):
            return lstm(x)

    with torch.no_grad():  # the kernel has no derivatives in float16
        expected, precise = fun(x), lstm(x)
    got = as_torch(as_jax(fun))(x)
    for a, b, c in zip(*map(torch.utils._pytree.tree_leaves, (got, expected, precise)), strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=0.02, atol=0.01)
        torch.testing.assert_close(a.to(c.dtype), c, rtol=0.02, atol=0.01)
    found = torch.autograd.grad(got[0].float().sum(), list(lstm.parameters()))
    for a, b in zip(found, torch.autograd.grad(lstm(x)[0].sum(), list(lstm.parameters())), strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "fun",
    [
        torch.linalg.pinv,
        *(pytest.param(fun, marks=pytest.mark.slow) for fun in (torch.pinverse, torch.Tensor.pinverse)),
        lambda x: torch.linalg.pinv(x @ x.T + torch.eye(3), hermitian=True),
        lambda x: F.affine_grid(size=[1, 1, 2, 2], theta=x[None, :2], align_corners=False),
        lambda x: torch.affine_grid_generator(x[None, :2], [1, 1, 2, 2], True),
        lambda x: torch.linalg.lstsq(x, x[:, :2]).solution,
        lambda x: torch.linalg.lstsq(x, x[:, 0], driver="gels").solution,
    ],
)
@pytest.mark.filterwarnings("ignore:.* has been compiled 32 times")
def test_what_kernels_multiply_under_autocast(dtype: torch.dtype, fun: Any) -> None:
    """By matrices: in its dtype, whatever the recording sees of it."""

    def autocast(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype):
            return fun(x)

    for wide in (torch.float32, torch.float64):
        x = data(3, 3, dtype=wide)
        got, expected = as_torch(as_jax(autocast))(x), autocast(x)
        assert got.dtype == expected.dtype
        torch.testing.assert_close(got, expected, rtol=0.05, atol=0.05)
        assert as_torch(as_jax(fun))(x).dtype == wide


def test_a_program_that_torch_exported() -> None:
    """It keeps tensors without data, of its shapes."""
    layer, x = torch.nn.Linear(3, 2), data(4, 3)
    program = torch.export.export(layer, (x,)).module()
    torch.testing.assert_close(as_torch(as_jax(lambda x: program(x)))(x), layer(x))


def test_an_error_of_ours_names_the_line_within_the_function() -> None:
    def of_rank(a: torch.Tensor) -> torch.Tensor:
        return torch.linalg.lstsq(a, a, driver="gelsd").residuals

    line = of_rank.__code__.co_firstlineno + 1
    with pytest.raises(TypeError, match=rf"test_functions\.py:{line}: .*driver='gelsy'"):
        as_torch(as_jax(of_rank))(ROWS)
    with pytest.raises(TypeError, match=r"test_functions\.py:\d+: .*scale_grad_by_freq"):
        as_torch(as_jax(lambda w: F.embedding_bag(BAGS[None], w, scale_grad_by_freq=True)))(ROWS)
