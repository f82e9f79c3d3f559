"""Dtypes that torch's kernels do not take: what eager torch refuses is refused, and nothing else is."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import marked

from microtome import torch_api as mt
from microtome.bridge import as_jax, as_torch

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool)
Fun = Callable[..., Any]
OF_ONE: dict[str, Fun] = {
    **{f.__name__: f for f in (F.gelu, F.silu, F.softplus, F.logsigmoid, F.hardswish, F.glu, F.elu, F.relu)},
    **{f.__name__: f for f in (torch.exp, torch.var, torch.mean, torch.sum, torch.cumsum, torch.erf, torch.sort)},
    "cumsum": lambda x: x.cumsum(0),
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "layer_norm": lambda x: F.layer_norm(x, (4,)),
    "pool": lambda x: F.avg_pool1d(x[None], 2),
    "larger": lambda x: F.interpolate(x[None], scale_factor=2),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.tensor([0, 1])),
    "norm": lambda x: torch.linalg.vector_norm(x.flatten()),
}
OF_TWO: dict[str, Fun] = {
    "product": lambda x, w: x @ w.mT,
    "linear": lambda x, w: F.linear(x, w),
    "linear with bias": lambda x, w: F.linear(x, w, w[:, 0]),
    "bmm": lambda x, w: torch.bmm(x[None], w.mT[None]),
    "vector": lambda x, w: x @ w[0],
    "dot": lambda x, w: torch.dot(x[0], w[0]),
    "baddbmm": lambda x, w: torch.baddbmm(x[None, :, :1], x[None], w.mT[None]),
    "einsum": lambda x, w: torch.einsum("ij,kj->ik", x, w),
    "convolution": lambda x, w: F.conv1d(x[None], w[:, :2, None]),
    "weight of a norm": lambda x, w: F.layer_norm(x, (4,), w[0]),
    "sum": lambda x, w: x[:1] + w[:1],
    "where": lambda x, w: torch.where(x[:1] > 0, x[:1], w[:1]),
    "lerp": lambda x, w: torch.lerp(x[:1], w[:1], 0.5),
    "distances": lambda x, w: torch.cdist(x, w),
    "cross product": lambda x, w: torch.linalg.cross(x[0, :3], w[0, :3]),
    "squares": lambda x, w: F.mse_loss(x[0], w[0]),
    "Huber": lambda x, w: F.huber_loss(x[0], w[0]),
    "index_add": lambda x, w: x.index_add(0, torch.tensor([0]), w[:1]),
    "concatenation": lambda x, w: torch.cat([x, w]),
    "gather": lambda x, w: x.gather(0, w.long()[:2]),
}


def _result(fun: Fun, *xs: torch.Tensor) -> Any:
    try:
        return fun(*xs)
    except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:
        return type(error)


def _same(fun: Fun, name: str, *xs: torch.Tensor) -> None:
    got, right = _result(as_torch(as_jax(fun)), *xs), _result(fun, *xs)
    assert isinstance(got, type) == isinstance(right, type), (name, [x.dtype for x in xs], got, right)
    if not isinstance(right, type):
        torch.testing.assert_close(got, right, rtol=2e-2, atol=2e-2, msg=lambda text: f"{name}: {text}")


@torch.no_grad()
@pytest.mark.parametrize("dtype", marked(DTYPES, slow=(torch.float64, torch.bfloat16, torch.uint8)), ids=str)
def test_a_function_takes_the_dtypes_that_torch_takes(dtype: torch.dtype) -> None:
    for name, fun in OF_ONE.items():
        _same(fun, name, torch.ones(2, 4, dtype=dtype))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*has been compiled")
@torch.no_grad()
@pytest.mark.parametrize("dtypes", list(itertools.product(DTYPES, DTYPES)), ids=str)
def test_a_function_takes_the_pairs_of_dtypes_that_torch_takes(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    if dtypes[0] == dtypes[1] == torch.bfloat16:
        pytest.skip("one floating dtype is taken everywhere, also where torch has no kernel for half precision")
    for name, fun in OF_TWO.items():
        _same(fun, name, torch.ones(2, 4, dtype=dtypes[0]), torch.ones(3, 4, dtype=dtypes[1]))


@torch.no_grad()
def test_a_layer_does_not_take_images_of_bytes() -> None:
    for name in ("product", "linear", "linear with bias", "bmm", "convolution"):
        _same(OF_TWO[name], name, torch.full((2, 4), 200, dtype=torch.uint8), torch.rand(3, 4))


def test_a_transform_does_not_take_them_either() -> None:
    images, w = torch.full((2, 4), 200, dtype=torch.uint8), torch.rand(4, 3)
    for dtype in (torch.uint8, torch.int64, torch.float64, torch.bfloat16):
        with pytest.raises(RuntimeError, match="same dtype"):
            mt.clipped_grad(lambda p, x: (x @ p).sum(), l2_clip_norm=1.0)(w, images.to(dtype))
        with pytest.raises(RuntimeError, match="same dtype"):
            mt.microbatch(lambda x: (x @ w).sum(), 0, 1)(images.to(dtype))


def test_whole_numbers_are_not_divided_by_zero() -> None:
    one, zero = torch.tensor([3, 4]), torch.tensor([1, 0])
    ways: list[Fun] = [
        *(torch.floor_divide, torch.remainder, torch.fmod),
        *(lambda x, y, mode=mode: torch.div(x, y, rounding_mode=mode) for mode in ("floor", "trunc")),
    ]
    for way in ways:
        call = as_torch(as_jax(way))
        torch.testing.assert_close(call(one, one), way(one, one))
        for run, divisor in itertools.product((way, call, as_torch(as_jax(lambda x, y, f=way: f(x, 0)))), (zero,)):
            with pytest.raises(RuntimeError, match="ZeroDivisionError"):
                run(one, divisor)
        torch.testing.assert_close(call(one.float(), zero), way(one.float(), zero), equal_nan=True)
