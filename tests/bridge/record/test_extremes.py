"""A value equals its own maximum, whatever XLA computes twice: products that are added to, in every transform."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from helpers import marked
from torch import Tensor

from microtome import torch_api as mt
from microtome.bridge import as_jax, as_torch

Fun = Callable[[Tensor, Tensor], Tensor]
pytestmark = pytest.mark.filterwarnings("ignore:.*has been compiled:UserWarning")
inf = float("inf")


def _of(fun: Callable[[Tensor], Tensor]) -> Fun:
    """A function of an affine map, such as a norm's scale and shift, or a step of an optimizer."""
    return lambda w, x: fun(x * w + 0.3)


def _scaled_between(o: Tensor) -> Tensor:
    return ((o - o.min()) / (o.max() - o.min())).square().sum()


def _spread(o: Tensor) -> Tensor:
    low, high = o.aminmax()
    return high - low


FUNCTIONS: dict[str, Fun] = {
    "max": _of(lambda o: o.max()),
    "max of a part": lambda w, x: (w * x[:, :1] + 0.25).max(),
    "amax": _of(lambda o: o.amax(1).square().sum()),
    "amin of a transposed": _of(lambda o: o.T.amin(1).square().sum()),
    "amax of a joined": _of(lambda o: torch.stack([o, -o * 0.5]).amax((0, 2)).sum()),
    "aminmax": _of(_spread),
    "inf norm": _of(lambda o: o.norm(inf)),
    "inf norms of rows": _of(lambda o: torch.linalg.vector_norm(o, inf, dim=1).sum()),
    "inf norm of a matrix": _of(lambda o: torch.linalg.matrix_norm(o, inf)),
    "distances": lambda w, x: torch.cdist(x * 2 + 0.1, w * 0.3 + 0.7, p=inf).sum(),
    "scaled between": _of(_scaled_between),
    "scaled to the largest": _of(lambda o: (o / o.abs().amax(1, keepdim=True)).square().sum()),
    "clamped to the largest": _of(lambda o: o.clamp(max=o.detach().amax()).sum()),
    "cut at one": _of(lambda o: ((o / o.abs().amax()).clamp(-1, 1) * o.detach()).sum()),
    "mask of the largest": _of(lambda o: ((o >= o.amax(1, keepdim=True)) * o).sum()),
    "mask of the chosen": _of(lambda o: ((o == o.gather(1, o.argmax(1, keepdim=True))) * o).sum()),
    "mask of the best": _of(lambda o: torch.where(o >= o.topk(2, 1).values[:, -1:], o, 0).sum()),
    "mask by order": _of(lambda o: torch.where(o >= o.sort(1).values[:, 3:4], o, 0).square().sum()),
    "mask of the median": _of(lambda o: torch.where(o <= o.median(1, keepdim=True).values, o, 0).square().sum()),
    "not below itself": _of(lambda o: F.relu(o - o.amax(1, keepdim=True)).sum() + (o.cummax(1).values == o).sum() * w1),
    "normalised before": lambda w, x: (F.layer_norm(x, (6,)) * w[0] + w[1]).amax(0).square().sum(),
    "of group norm": lambda w, x: F.group_norm(x[None], 2, w[:, 0], w[:, 1]).amax(2).square().sum(),
    "of an activation": lambda w, x: F.gelu(x * w + 0.3).amax(1).square().sum(),
    "in bfloat16": lambda w, x: (x.bfloat16() * w.bfloat16() + 0.3).amax(1).float().square().sum(),
}
w1 = 0.5


def _inputs(rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(4, 6, generator=generator), torch.randn(rows, 4, 6, generator=generator)


def _check(name: str, rows: int) -> None:
    fun = FUNCTIONS[name]
    w, xs = _inputs(rows)
    w.requires_grad_()
    losses = torch.stack([fun(w, x) for x in xs])
    grads = [torch.autograd.grad(loss, w, retain_graph=True, allow_unused=True)[0] for loss in losses]
    each = torch.stack([torch.zeros_like(w) if g is None else g for g in grads])
    close = {"rtol": 2e-2, "atol": 2e-2} if "bfloat" in name else {"rtol": 1e-3, "atol": 1e-4}

    through = as_torch(as_jax(fun))
    for x, loss, grad in zip(xs[:8], losses, each, strict=False):
        found = through(w, x)
        torch.testing.assert_close(found, loss, **close)
        torch.testing.assert_close(torch.autograd.grad(found, w)[0], grad, **close)
    mapped = mt.micro_vmap(fun, in_axes=(None, 0), microbatch_size=rows // 2)(w, xs)
    torch.testing.assert_close(mapped, losses, **close)
    torch.testing.assert_close(torch.autograd.grad(mapped.sum(), w)[0], each.sum(0), **close)
    loss = lambda w, x: fun(w, x[0])
    found, aux = mt.micro_grad(loss, accumulator=mt.AccumulationType.CONCAT, microbatch_size=rows // 2)(w.detach(), xs)
    torch.testing.assert_close(found, each, **close)
    torch.testing.assert_close(aux.values, losses.detach(), **close)
    clipped, aux = mt.clipped_grad(loss, l2_clip_norm=1.0, return_grad_norms=True)(w.detach(), xs)
    norms = each.flatten(1).norm(dim=1)
    torch.testing.assert_close(aux.grad_norms, norms, **close)
    torch.testing.assert_close(clipped, torch.einsum("i,i...", 1 / norms.clamp(min=1), each), **close)


@pytest.mark.parametrize(
    "name", marked(["scaled between", "mask of the best", "cut at one"], quick=("mask of the best",))
)
def test_a_value_equals_its_own_extreme(name: str) -> None:
    _check(name, 6)


@pytest.mark.slow
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_value_equals_its_own_extreme_as_xla_compiles_by_default(name: str) -> None:
    _check(name, 24)


def test_only_what_is_read_again_is_stored() -> None:
    x = torch.randn(64, 1024)
    call = as_torch(as_jax(lambda x: (x * 2 + 1).amax(1)))
    memory = call.compiled(x).memory_analysis()
    assert memory.temp_size_in_bytes < x.nbytes / 8
