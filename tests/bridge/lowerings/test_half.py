"""float16 and bfloat16: no operator rounds where eager torch, which computes in float32 inside, does not."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import crossed

from microtome import torch_api as mt
from microtome.bridge import as_jax, as_torch

Fun = Callable[..., Any]
Tensors = list[torch.Tensor]
Table = dict[str, tuple[Fun, tuple[torch.Tensor, ...]]]

_GENERATOR = torch.Generator().manual_seed(0)


def _randn(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, generator=_GENERATOR) * scale


def _positive(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (_randn(*shape).abs() + 0.1) * scale


# 500² is beyond what float16 holds, and a sum of more than 2048 ones in float16, or 256 in bfloat16, stays there.
LARGE = _randn(4, 48, scale=500)
ONES, SAME = torch.ones(4096), torch.zeros(4096, dtype=torch.long)
NORMS, SLOW_NORMS = ({f"vector_norm {p}": p for p in ps} for ps in ((0, 2, 3, math.inf), (0.5, 1, -math.inf)))

QUICK: Table = {
    "layer_norm": (lambda x, w: F.layer_norm(x, (48,), w), (LARGE, _randn(48))),
    "group_norm": (lambda x, w: F.group_norm(x.reshape(1, 4, 48), 2, w), (LARGE, _randn(4))),
    **{name: (lambda x, p=p: torch.linalg.vector_norm(x, p, 1), (LARGE.abs() + 1,)) for name, p in NORMS.items()},
    "vector_norm in float32": (
        lambda x: torch.linalg.vector_norm(x, dtype=torch.promote_types(x.dtype, torch.float32)),
        (LARGE,),
    ),
    "norm": (lambda x: (x.norm(), x.norm(dim=0)), (LARGE,)),
    "matrix_norm": (torch.linalg.matrix_norm, (LARGE,)),
    "dist": (torch.dist, (LARGE, LARGE.flip(0))),
    "renorm": (lambda x: x.renorm(2, 0, 5.0), (LARGE,)),
    "cosine_similarity": (F.cosine_similarity, (LARGE, LARGE.flip(0))),
    "weight_norm": (lambda v, g: torch._weight_norm(v, g, 0), (LARGE, _positive(4, 1))),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 32), (_positive(1, 1, 32, 32),)),
    "avg_pool1d, overlapping": (lambda x: F.avg_pool1d(x, 64, 8, padding=3), (_positive(1, 1, 256),)),
    "scatter_add": (lambda x: x.new_zeros(1).scatter_add(0, SAME, x), (ONES,)),
    **{
        f"scatter_reduce {name}": (lambda x, name=name: x.new_zeros(1).scatter_reduce(0, SAME, x, name), (ONES,))
        for name in ("sum", "mean")
    },
    "gather": (lambda x: x.gather(0, SAME), (_randn(2),)),
    "embedding by frequency": (lambda w: F.embedding(SAME, w, scale_grad_by_freq=True), (_randn(2, 3),)),
    "embedding_bag": (lambda w: F.embedding_bag(SAME[None], w, mode="sum"), (_positive(2, 3),)),
    "cumsum": (lambda x: x.cumsum(-1), (_randn(2, 512),)),
    "cumprod": (lambda x: x.cumprod(-1), (1 + _randn(2, 64, scale=0.05),)),
    "logcumsumexp": (lambda x: x.logcumsumexp(-1), (_randn(2, 64),)),
    "fmod": (torch.fmod, (LARGE, _positive(4, 48))),
    "grid_sample in 3-d": (
        lambda x, g: F.grid_sample(x, g, align_corners=False),
        (_randn(1, 1, 4, 4, 64), torch.tanh(_randn(1, 2, 2, 8, 3))),
    ),
}

SLOW: Table = {
    **{name: (lambda x, p=p: torch.linalg.vector_norm(x, p, 1), (LARGE.abs() + 1,)) for name, p in SLOW_NORMS.items()},
    "rms_norm": (lambda x, w: F.rms_norm(x, (48,), w), (LARGE, _randn(48))),
    "instance_norm": (lambda x: F.instance_norm(x[None]), (LARGE,)),
    "batch_norm": (lambda x: F.batch_norm(x, None, None, training=True), (LARGE,)),
    "pairwise_distance": (F.pairwise_distance, (LARGE, LARGE.flip(0))),
    "lp_pool2d": (lambda x: F.lp_pool2d(x, 2.0, 16), (_positive(1, 1, 32, 32),)),
    **{
        f"adaptive_avg_pool{n}d": (
            lambda x, n=n: getattr(F, f"adaptive_avg_pool{n}d")(x, 3),
            (_positive(1, 1, *[size] * n),),
        )
        for n, size in ((1, 2048), (2, 32), (3, 8))
    },
    "index_add": (lambda x: x.new_zeros(1).index_add(0, SAME, x), (ONES,)),
    "index_put": (lambda x: x.new_zeros(1).index_put((SAME,), x, accumulate=True), (ONES,)),
    "embedding": (lambda w: F.embedding(SAME, w), (_randn(2, 3),)),
    "embedding_bag mean": (lambda w: F.embedding_bag(SAME[None, :1000], w, mode="mean"), (_positive(2, 3),)),
    "embedding_bag weighted": (
        lambda w, p: F.embedding_bag(SAME[None], w, mode="sum", per_sample_weights=p[None]),
        (_positive(2, 3), ONES),
    ),
    "mean": (lambda x: (x.mean(), x.mean(0)), (_positive(4096, 2, scale=500),)),
    "sum": (lambda x: (x.sum(), x.nansum(0)), (ONES,)),
    "var": (lambda x: (x.var(0), x.std(0), *torch.var_mean(x, 0)), (50 + _randn(1024, 2),)),
    "logsumexp": (lambda x: (x.logsumexp(0), x.softmax(0)), (_randn(4096, 2),)),
    "losses": (
        lambda x, y: (F.mse_loss(x, y), F.l1_loss(x, y), F.smooth_l1_loss(x, y), F.huber_loss(x, y, reduction="sum")),
        (_randn(4096, scale=10), _randn(4096)),
    ),
    "cross_entropy": (lambda x: F.cross_entropy(x, torch.arange(1024) % 8), (_randn(1024, 8),)),
    "conv2d": (F.conv2d, (torch.ones(1, 64, 8, 8), torch.ones(1, 64, 8, 8), _randn(1))),
    "matmul": (lambda a, b: (a @ b, a @ b[:, 0], a[0].dot(b[:, 0])), (torch.ones(2, 4096), torch.ones(4096, 2))),
    "addmm": (
        lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=0.3),
        (_randn(2, 2), _randn(2, 256), _randn(256, 2)),
    ),
    "linear": (F.linear, (_randn(2048, 4), _randn(3, 4), _randn(3))),
    "bilinear": (F.bilinear, (_randn(8, 32), _randn(8, 32), _randn(3, 32, 32), _randn(3))),
    "interpolate": (lambda x: F.interpolate(x, scale_factor=8, mode="bilinear"), (_randn(1, 1, 8, 8),)),
    "grid_sample": (
        lambda x, g: F.grid_sample(x, g, align_corners=False),
        (_randn(1, 1, 64, 64), torch.tanh(_randn(1, 16, 16, 2))),
    ),
    "trapezoid": (lambda y: (torch.trapezoid(y), torch.cumulative_trapezoid(y)), (ONES,)),
    "cov": (lambda x: (torch.cov(x), torch.corrcoef(x)), (_randn(3, 256, scale=50),)),
    "fold": (lambda x: F.fold(x, (16, 16), 8), (_positive(1, 64, 81),)),
    "unfold": (lambda x: F.unfold(x, 8), (_randn(1, 1, 16, 16),)),
    "broadcasting": (lambda x, b, w: F.prelu(x * b + b, w), (_randn(4096, 2), _randn(2), _randn(2))),
    "trace": (torch.trace, (_randn(256, 256),)),
}


def _run(program: Fun, table: Table, given: dict[str, Tensors]) -> dict[str, Tensors]:
    """Results and gradients of all entries, which ``program`` computes at once."""
    outputs = program(given)
    pairs = [(n, o) for n in table for o in torch.utils._pytree.tree_leaves(outputs[n])]
    generator = torch.Generator().manual_seed(1)
    heads = [o for _, o in pairs if o.requires_grad]
    cotangents = [(torch.rand(o.shape, generator=generator) + 0.5).bfloat16().to(o.dtype) for o in heads]
    leaves = [(n, t) for n in table for t in given[n] if t.requires_grad]
    pulled = torch.autograd.grad(heads, [t for _, t in leaves], cotangents, allow_unused=True)
    gradients = [torch.zeros_like(t) if g is None else g for (_, t), g in zip(leaves, pulled, strict=True)]
    found = [*pairs, *zip((n for n, _ in leaves), gradients, strict=True)]
    return {n: [t.detach() for name, t in found if name == n] for n in table}


def _error(got: torch.Tensor, exact: torch.Tensor) -> float:
    """Relative to the largest of the tensor; infinite where one of the two is not a number and the other is."""
    a, b = got.double(), exact.to(got.dtype).double()
    finite = b.isfinite()
    if not torch.equal(a[~finite], b[~finite]) or not a[finite].isfinite().all():
        return math.inf
    return float((a - b)[finite].abs().max() / b[finite].abs().max().clamp(min=1e-30)) if finite.any() else 0.0


def _check(table: Table, dtype: torch.dtype) -> None:
    def given(wanted: torch.dtype) -> dict[str, Tensors]:
        rounded = {n: [t.to(dtype) for t in tensors] for n, (_, tensors) in table.items()}
        return {n: [t.to(wanted).requires_grad_() for t in tensors] for n, tensors in rounded.items()}

    def everything(tensors: dict[str, Tensors]) -> Any:
        return {n: fun(*tensors[n]) for n, (fun, _) in table.items()}

    got = _run(as_torch(as_jax(everything)), table, given(dtype))
    eager, exact = (_run(everything, table, given(d)) for d in (dtype, torch.float64))
    wrong = []
    for name in table:
        for a, b, c in zip(got[name], eager[name], exact[name], strict=True):
            assert (a.dtype, a.shape) == (b.dtype, b.shape), name
            if _error(a, c) > max(2 * _error(b, c), 2 * torch.finfo(dtype).eps) and _error(a, b) > 0:
                wrong.append(f"{name}: off by {_error(a, c):.2g}, where torch is by {_error(b, c):.2g}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=str)
def test_as_exact_as_eager_torch(dtype: torch.dtype) -> None:
    _check(QUICK, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_others_as_exact_as_eager_torch(dtype: torch.dtype) -> None:
    _check(SLOW, dtype)


_MIXED: dict[str, Callable[[], torch.nn.Module]] = {
    "group": lambda: torch.nn.GroupNorm(2, 4),
    "layer": lambda: torch.nn.LayerNorm([4, 8, 8]),
    "batch": lambda: torch.nn.BatchNorm2d(4).eval(),
    "batch, training": lambda: torch.nn.BatchNorm2d(4),
    "instance": lambda: torch.nn.InstanceNorm2d(4, affine=True),
}


@pytest.mark.parametrize(("name", "dtype"), crossed(_MIXED, [torch.float16, torch.bfloat16]))
def test_normalisations_with_weights_of_float32(name: str, dtype: torch.dtype) -> None:
    """As after a convolution under autocast: mean and deviation are float32, the result is not."""
    layer, x = _MIXED[name](), (50 + _randn(3, 4, 8, 8, scale=2)).to(dtype)

    def gradients(fun: Fun, x: torch.Tensor) -> Tensors:
        leaf = x.clone().requires_grad_()
        out = fun(leaf)
        return [out.detach(), *torch.autograd.grad(out.double().sin().sum(), [leaf, *layer.parameters()])]

    got, eager = gradients(as_torch(as_jax(lambda x: layer(x))), x), gradients(layer, x)
    exact = gradients(layer.double(), x.double())
    for ours, theirs, right in zip(got, eager, exact, strict=True):
        assert ours.dtype == theirs.dtype
        assert _error(ours, right) <= 4 * _error(theirs, right) + torch.finfo(ours.dtype).eps


def test_a_network_under_autocast_is_clipped() -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Conv2d(2, 4, 2), torch.nn.GroupNorm(2, 4), torch.nn.Flatten())
    x = torch.randn(3, 2, 4, 4)

    def loss(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(x).float().square().sum().sqrt() + model(x).float().sin().sum()

    mt.clipped_backward(net, loss, max_grad_norm=0.5, expected_batch_size=1)(x)
    clipped = [torch.zeros_like(p) for p in net.parameters()]
    for row in x:
        each = torch.autograd.grad(loss(net, row[None]), [*net.parameters()])
        norm = torch.stack([g.square().sum() for g in each]).sum().sqrt()
        clipped = [c + g * (0.5 / norm).clamp(max=1) for c, g in zip(clipped, each, strict=True)]
    for p, expected in zip(net.parameters(), clipped, strict=True):
        torch.testing.assert_close(p.grad, expected, rtol=3e-2, atol=3e-3)
