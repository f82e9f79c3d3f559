"""Norms and clipped sums of small random torch programs against gradients that are computed one by one."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import marked

from microtome import torch_api as mt

ROWS, _BOUND, _LARGEST = 3, 0.5, 48
_LENGTHS = (1, 1, 2, 3)


def inputs(seed: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    rng = np.random.default_rng([seed, 1])
    width = [torch.float32, torch.float64][rng.integers(2)]
    params = {}
    for name in "abc":
        shape = tuple(int(n) for n in rng.choice(_LENGTHS, rng.integers(1, 4)))
        dtype = [width, width, width, torch.bfloat16, torch.float16][rng.integers(5)]
        params[name] = torch.from_numpy(rng.normal(size=shape)).to(dtype)
    return params, torch.from_numpy(rng.normal(size=(ROWS, 2, 3))).to(width)


def loss(seed: int, params: dict[str, torch.Tensor], x: torch.Tensor, seen: Any = None) -> torch.Tensor:
    """The loss of one example ``[2, 3]``; what it does is drawn from the seed and the shapes alone.

    The dtypes of what is computed are added to ``seen``.
    """
    rng = np.random.default_rng([seed, 0])
    pool = list(params.values())
    for _ in range(rng.integers(2, 7)):
        v = pool[max(rng.integers(len(pool)), rng.integers(len(pool)))]
        new = _STEPS[rng.integers(len(_STEPS))](rng, v, x)
        if 0 < new.numel() <= _LARGEST:
            pool.append(new)
    if seen is not None:
        seen.update(v.dtype for v in pool)
    total = x.new_zeros(())
    for v in pool[-3:]:
        v = (v.real if v.is_complex() else v).to(x.dtype)
        total = total + [torch.tanh, torch.square, lambda v: v * _like(rng, v, x)][rng.integers(3)](v).sum()
    return total * (1 + x.sum())


def _like(rng: Any, v: torch.Tensor, x: torch.Tensor, shape: Any = None) -> torch.Tensor:
    """Of this shape or another: of the example, a constant, or a number repeated."""
    shape = [int(n) for n in (v.shape if shape is None else shape)]
    kind = rng.integers(4)
    if kind == 0:
        u = x.flatten().repeat(-(-math.prod(shape) // 6) or 1)[: math.prod(shape)].reshape(shape)
    elif kind == 1:
        u = torch.from_numpy(rng.normal(size=shape))
    else:
        u = torch.full(shape, 0.7) if kind == 2 else x[0, 1].expand(shape)
    return u.to(v.dtype)


def _thinned(rng: Any, shape: Any) -> list[int]:
    return [int(n) if rng.integers(2) else 1 for n in shape]


def _grow(rng: Any, v: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    shape = [int(rng.choice(_LENGTHS)) if n == 1 else n for n in v.shape]
    return v.expand(shape) if rng.integers(2) else v * _like(rng, v, x, shape)


def _divide(rng: Any, v: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return v / (1 + _like(rng, v, x, _thinned(rng, v.shape)).abs())


def _slice(rng: Any, v: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    cuts = [slice(None), slice(1, None), slice(None, 1), slice(None, None, 2)]
    new = v[tuple(cuts[rng.integers(4)] for _ in v.shape)]
    return new if new.numel() else v.flip(tuple(range(v.ndim)))


def _reduce(rng: Any, v: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    if not v.ndim:
        return v[None]
    axis, keep = int(rng.integers(v.ndim)), bool(rng.integers(2))
    return v.sum(axis, keepdim=keep) if rng.integers(2) else v.mean(axis, keepdim=keep)


def _move(rng: Any, v: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    kind = rng.integers(4)
    if kind == 0:
        return v.permute(*(int(d) for d in rng.permutation(v.ndim)))
    if kind == 1:
        return v.unsqueeze(int(rng.integers(v.ndim + 1)))
    return v.reshape(-1, 1) if kind == 2 else v.flatten()


def _matrix(rng: Any, v: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    m = v.reshape(-1, v.shape[-1] if v.ndim else 1)
    n = m.shape[1]
    kind = rng.integers(5)
    if kind == 0:
        return m @ _like(rng, m, x, (n, 2))
    if kind == 1:
        return torch.mv(m, _like(rng, m, x, (n,)))
    if kind == 2 and m.numel() <= 12:
        return F.bilinear(_like(rng, m, x, (2, n)), _like(rng, m, x, (2, 3)), m[:, :, None].expand(-1, -1, 3))
    if kind == 3:
        return torch.baddbmm(m[None], _like(rng, m, x, (1, len(m), 2)), _like(rng, m, x, (1, 2, n)))
    return torch.outer(m.flatten(), _like(rng, m, x, (2,)))


def _cast(rng: Any, v: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    if v.is_complex():
        return [torch.real, torch.imag, torch.abs, torch.conj][rng.integers(4)](v)
    kind = rng.integers(6)
    if kind < 2 and v.dtype == torch.float16:  # few operators have complex numbers of half precision
        return v.to(x.dtype)
    if kind == 0:
        return v.to(torch.complex128 if x.dtype == torch.float64 else torch.complex64)
    if kind == 1:
        return v * torch.exp(1j * x[0, 0])
    if kind == 2:
        return v + v.int() + (v > 0)
    return v.to([torch.bfloat16, torch.float16, x.dtype][kind - 3])


def _join(rng: Any, v: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    if not v.ndim:
        return torch.stack([v, 2 * v])
    axis = int(rng.integers(v.ndim))
    kind = rng.integers(3)
    if kind == 0:
        return torch.cat([v, _like(rng, v, x)], axis)
    return torch.stack([v, v * 2], axis) if kind == 1 else F.pad(v, (1, 0) if rng.integers(2) else (0, 2))


def _where(rng: Any, v: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    mask = torch.from_numpy(rng.integers(0, 2, _thinned(rng, v.shape)).astype(bool))
    other = [v.detach(), torch.zeros_like(v), _like(rng, v, x)][rng.integers(3)]
    return torch.where(mask if rng.integers(2) else x[0, 0] > 0, v, other)


def _unary(rng: Any, v: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    v = v.abs() if v.is_complex() else v
    return [torch.tanh, lambda v: v / (1 + v.square().sum()).sqrt(), lambda v: v**2, torch.neg][rng.integers(4)](v)


_STEPS = [
    *[lambda rng, v, x: v * _like(rng, v, x, _thinned(rng, v.shape))] * 2, *[_grow] * 3, _divide, _slice,
    *[_reduce] * 2, *[_move] * 2, *[_matrix] * 3, *[_cast] * 3, _join, _where, _unary,
]  # fmt: skip


# What the coarsest type in a program allows.
_TOLERANCES = {torch.bfloat16: 0.1, torch.float16: 0.02, torch.float32: 2e-3, torch.float64: 1e-6}


def check(seed: int) -> None:
    params, x = inputs(seed)
    grads, dtypes = [], {x.dtype}
    for row in x:
        leaves = {k: p.clone().requires_grad_() for k, p in params.items()}
        found = torch.autograd.grad(loss(seed, leaves, row, dtypes), list(leaves.values()), allow_unused=True)
        grads.append([torch.zeros_like(p) if g is None else g for g, p in zip(found, leaves.values(), strict=True)])
    wide = [[g.double() for g in row] for row in grads]
    norms = torch.stack([torch.sqrt(sum(g.square().sum() for g in row)) for row in wide])
    if not norms.isfinite().all():
        return  # of float16; products are accumulated in float32 here
    fun = mt.clipped_grad(
        lambda p, row: loss(seed, p, row), l2_clip_norm=_BOUND, keep_batch_dim=False, return_grad_norms=True
    )
    got, aux = fun(params, x)
    tolerance = next(t for dtype, t in _TOLERANCES.items() if dtype in dtypes)
    torch.testing.assert_close(aux.grad_norms.double(), norms, rtol=tolerance, atol=tolerance)
    for i, (k, p) in enumerate(params.items()):
        want = sum(row[i] * min(1.0, _BOUND / float(n)) for row, n in zip(wide, norms, strict=True) if n)
        assert got[k].dtype == p.dtype
        torch.testing.assert_close(
            got[k].double(), want + torch.zeros(p.shape).double(), rtol=0, atol=tolerance * _BOUND
        )


@pytest.mark.parametrize("seed", marked(range(4), quick=(0,)))
def test_random_programs(seed):
    check(seed)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:<lambda> .* has been compiled:UserWarning")
@pytest.mark.parametrize("seed", range(100, 180))
def test_more_random_programs(seed):
    check(seed)
