"""Operators that torch composes take as little memory as the obvious JAX expression: compiled temporary bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import marked

from microtome.bridge import as_jax, as_torch

Fun = Callable[..., Any]


def _gradient(fun: Fun) -> Fun:
    return lambda *xs: jax.grad(lambda *xs: jnp.sum(jnp.sin(fun(*xs))), tuple(range(len(xs))))(*xs)


def _attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jax.nn.softmax(q @ jnp.swapaxes(k, -1, -2) / np.sqrt(q.shape[-1])) @ v


def _distances(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.maximum(jnp.sum(a * a, -1)[:, None] + jnp.sum(b * b, -1) - 2 * a @ b.T, 1e-30))


def _unit(x: jax.Array) -> jax.Array:
    return x / jnp.maximum(jnp.linalg.norm(x, axis=1, keepdims=True), 1e-8)


CASES: dict[str, tuple[Fun, Fun, Fun, tuple[tuple[int, ...], ...]]] = {
    "einsum of three": (
        lambda fun: fun,
        lambda *xs: torch.einsum("bij,bkj,blk->bli", *xs),
        lambda *xs: jnp.einsum("bij,bkj,blk->bli", *xs),
        ((4, 64, 64),) * 3,
    ),
    "attention, mapped": (jax.vmap, F.scaled_dot_product_attention, _attention, ((3, 4, 64, 64),) * 3),
    "gradient of attention": (_gradient, F.scaled_dot_product_attention, _attention, ((2, 4, 64, 64),) * 3),
    "cdist": (lambda fun: fun, torch.cdist, _distances, ((128, 64),) * 2),
    "gradient of cumsum": (_gradient, lambda x: x.cumsum(-1), lambda x: jnp.cumsum(x, -1), ((64, 256),)),
    "gradient of the largest": (
        _gradient,
        lambda x: x.norm(p=torch.inf, dim=-1),
        lambda x: jnp.max(jnp.abs(x), -1),
        ((64, 256),),
    ),
    "gradient of a quotient": (
        _gradient,
        lambda x: x / x.abs().sum(-1, keepdim=True),
        lambda x: x / jnp.abs(x).sum(-1, keepdims=True),
        ((64, 256),),
    ),
    "gradient of a quotient by rows and columns": (
        _gradient,
        lambda x, d, e: x / d[:, None] / e,
        lambda x, d, e: x / d[:, None] / e,
        ((64, 256), (64,), (256,)),
    ),
    "gradient of a quotient, mapped": (
        lambda fun: jax.vmap(_gradient(fun)),
        lambda x: x / x.abs().sum(-1, keepdim=True),
        lambda x: x / jnp.abs(x).sum(-1, keepdims=True),
        ((3, 64, 256),),
    ),
    "median": (
        lambda fun: fun,
        lambda x: x.median(-1).values,
        lambda x: jnp.sort(x, -1)[..., (x.shape[-1] - 1) // 2],
        ((64, 256),),
    ),
    "gradient of normalize": (_gradient, F.normalize, _unit, ((64, 256),)),
    "gradient of cosine_similarity": (
        _gradient,
        F.cosine_similarity,
        lambda a, b: jnp.sum(_unit(a) * _unit(b), 1),
        ((64, 256),) * 2,
    ),
}


_NEAR = (  # one gradient of a quotient and one of a reduction are quick
    *("gradient of a quotient by rows and columns", "gradient of a quotient, mapped", "gradient of the largest"),
    *("gradient of normalize", "gradient of cosine_similarity"),
)


@pytest.mark.parametrize("name", marked(CASES, slow=_NEAR))
def test_as_little_memory_as_in_jax(name: str) -> None:
    way, fun, in_jax, shapes = CASES[name]
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    ours, theirs = (
        jax.jit(way(f)).lower(*arguments).compile().memory_analysis().temp_size_in_bytes for f in (as_jax(fun), in_jax)
    )
    assert ours <= 1.2 * max(theirs, 8192), (ours, theirs)


def _products(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
    """x [2, 3, 4], y [2, 5, 4], w [2, 3, 1]: products with axes moved, merged, spread, dropped, before and behind."""
    transposed = y @ x.mT
    heads = x.view(2, 3, 2, 2).transpose(1, 2)
    return [
        torch.einsum("bij,bkj->bki", x, y),
        torch.einsum("bij,bkj,cij->kbc", x, y, x),
        torch.einsum("bij,bjk->kbi", x, y.mT),
        transposed.mT.sin() + transposed.mT,  # read twice
        (transposed.sin() @ x).mT,
        (x.mT @ w).mT @ x.mT,
        (w.mT @ x).mT.expand(2, 4, 3) @ x,
        x.permute(2, 0, 1).reshape(4, 6) @ x.permute(0, 1, 2).reshape(6, 4),
        x.permute(2, 1, 0).reshape(4, 6) @ y[:, :3].permute(1, 0, 2).reshape(6, 4),
        x.transpose(0, 1).reshape(6, 4) @ y[0].t(),
        (heads @ heads.mT).transpose(1, 2),
        x.mT[:, :, :0] @ x[:, :0],
        x[0].t() @ w[1, :, 0] + w[0, :, 0] @ x[1],
        x.permute(2, 1, 0).reshape(4, 6) @ y[0].reshape(20)[:6],
        x.flip(1).cumsum(1).flip(1),
        x.flip(1).cumsum(2).flip(1),
        x.flip(0, 1).cumsum(1).flip(0, 1),
    ]


def test_moved_axes_leave_products_and_sums_as_they_are() -> None:
    random = torch.Generator().manual_seed(0)
    given = [torch.randn(shape, generator=random, dtype=torch.float64) for shape in ((2, 3, 4), (2, 5, 4), (2, 3, 1))]
    results = []
    for fun in (_products, as_torch(as_jax(_products))):
        leaves = [t.clone().requires_grad_() for t in given]
        outs = fun(*leaves)
        gradients = torch.autograd.grad(sum((o * o.detach().cos()).sum() for o in outs), leaves)
        results.append([*outs, *gradients])
    for right, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, right)


_DIVIDED: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "by rows": lambda x, d: x / d[:, :1],
    "by columns": lambda x, d: x / d[0],
    "by one number": lambda x, d: x / d[0, 0],
    "by what is spread out": lambda x, d: x / d[:, :1].expand_as(x),
    "along all but one axis": lambda x, d: x.expand(2, 3, 4) / d[:, 1:2],
    "spread as well": lambda x, d: x[0] / d[:, :1],
    "twice": lambda x, d: x / d[:, :1] / d[:, :1],
    "of a mapped function": lambda x, d: torch.func.vmap(lambda x, d: x / d[:1])(x, d),
    "of nothing": lambda x, d: x[:, :0] / d[:, :1],
    "of a gradient": lambda x, d: torch.func.grad(lambda d: (x / d[:, :1]).sin().sum())(d),
    "complex": lambda x, d: (torch.complex(x, d) / torch.complex(d, x)[:, :1]).abs(),
    "half": lambda x, d: x.half() / (300 * d[:, :1]).half(),
    "by another dtype": lambda x, d: x.float() / d[0, 0],
}
_FEW = ("by rows", "along all but one axis", "twice", "of a mapped function", "half")


@pytest.mark.parametrize("name", marked(_DIVIDED, quick=_FEW))
def test_gradients_of_divisors_that_are_spread(name: str) -> None:
    random = torch.Generator().manual_seed(0)
    given = [torch.rand(3, 4, generator=random, dtype=torch.float64) + 0.5 for _ in range(2)]
    orders: list[list[torch.Tensor]] = []
    for fun in (_DIVIDED[name], as_torch(as_jax(_DIVIDED[name]))):
        leaves = [t.clone().requires_grad_() for t in given]
        out = fun(*leaves)
        first = torch.autograd.grad(out.sin().sum(), leaves, create_graph=True)
        second = torch.autograd.grad(sum(g.sin().sum() for g in first), leaves)
        orders.append([out, *first, *second])
    wide = name not in ("half", "by another dtype")
    for right, ours in zip(*orders, strict=True):
        torch.testing.assert_close(ours, right, **({} if wide else {"rtol": 0.01, "atol": 0.01}))


def test_attention_under_masks() -> None:
    random = torch.Generator().manual_seed(0)
    q, k, v, bias = (torch.randn(2, 3, 4, generator=random, dtype=torch.float64) for _ in range(4))
    bias, mask = bias[..., :3], torch.tensor([[True, False, True], [False] * 3, [True] * 3])

    def all_ways(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> list[torch.Tensor]:
        attend = F.scaled_dot_product_attention
        return [
            attend(q, k, v),
            attend(q, k, v[..., :2], is_causal=True),
            attend(q, k, v, attn_mask=mask),  # of the second row nothing is left
            attend(q, k, v, bias.masked_fill(~mask, -torch.inf), scale=0.3),
            attend(q[None], k[None, :1], v[None, :1], enable_gqa=True),
            attend(*(x.half() for x in (q, k, v))).double(),
        ]

    results = []
    for fun in (all_ways, as_torch(as_jax(all_ways))):
        leaves = [t.clone().requires_grad_() for t in (q, k, v, bias)]
        outs = fun(*leaves)
        results.append([*outs[:-1], *torch.autograd.grad(sum(o.sin().sum() for o in outs[:-1]), leaves), outs[-1]])
    for right, ours in list(zip(*results, strict=True))[:-1]:
        torch.testing.assert_close(ours, right)
    torch.testing.assert_close(results[1][-1], results[0][-1], rtol=0, atol=2e-3)


def test_sums_are_made_in_the_dtype_that_is_asked_for() -> None:
    x = torch.full((1000,), 100.0).half()
    kept = torch.rand(7, 9, generator=torch.Generator().manual_seed(0)) > 0.5
    fun = lambda x, kept: [
        x.sum(dtype=torch.float32),
        (x > 0).sum(),
        *(kept.sum(dim, dtype=dtype) for dim in (0, (0, 1)) for dtype in (None, torch.int8, torch.float64)),
        kept.expand(40, 7, 9).sum((0, 1), dtype=torch.uint8),
    ]
    for ours, right in zip(as_torch(as_jax(fun))(x, kept), fun(x, kept), strict=True):
        assert ours.dtype == right.dtype
        assert torch.equal(ours, right)
