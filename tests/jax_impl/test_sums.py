"""Gradients of what microbatches, chunks, steps and blocks share are summed in float32, in JAX as in torch."""

import jax
import jax.numpy as jnp
import pytest
import torch
from helpers import marked

from microtome import jax_impl
from microtome import torch_api as mt
from microtome.jax_impl import AccumulationType

ROWS, ENTRY, TOTAL = 700, 7, 4900  # adding seven to two thousand, bfloat16 stalls, and float16 rounds to eight
SUM, MEAN, RUNNING_MEAN, CONCAT = (AccumulationType[n] for n in ("SUM", "MEAN", "RUNNING_MEAN", "CONCAT"))
DTYPES = ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)]


def square(w):
    return lambda b: (b * w * w).sum()


def step(w):
    return lambda c, b: (c, b * w * w)


# name -> a function of the API, a weight [1] that all share, and rows [n, 1]: the weight's square times the rows' sum.
PROGRAMS = {
    "microbatch": lambda api, w, x: api.microbatch(square(w), 0, 1)(x),
    "argument": lambda api, w, x: api.microbatch(lambda w, b: b * w * w, 1, 1, CONCAT, partition="contiguous")(w, x),
    "remainder": lambda api, w, x: api.microbatch(square(w), 0, 3, remainder="run")(x),
    "mean": lambda api, w, x: ROWS * api.microbatch(square(w), 0, 1, MEAN)(x),
    "running mean": lambda api, w, x: ROWS * api.microbatch(square(w), 0, 1, RUNNING_MEAN)(x),
    "weighted mean": lambda api, w, x: (
        ROWS * api.microbatch(lambda b: (square(w)(b), b.sum()), 0, 1, api.weighted_mean())(x)[0]
    ),
    "micro_vmap": lambda api, w, x: api.micro_vmap(square(w), microbatch_size=5, accumulator=SUM)(x),
    "micro_grad": lambda api, w, x: api.micro_grad(lambda v, b: (v * square(w)(b)).sum(), microbatch_size=1)(0 * w, x)[
        0
    ],
    "clipped_grad": lambda api, w, x: api.clipped_grad(
        lambda v, b: (v * square(w)(b)).sum(), l2_clip_norm=64.0, microbatch_size=1
    )(0 * w, x),
    "chunked_vmap": lambda api, w, x: api.chunked_vmap(square(w), 3)(x),
    "sliced_scan": lambda api, w, x: api.sliced_scan(step(w), 0 * x[0], x, start=0)[1],
    "strides": lambda api, w, x: 2 * api.sliced_scan(step(w), 0 * x[0], x, reverse=True, unroll=3, step=2)[1],
    "checkpoint_chunked_scan": lambda api, w, x: api.checkpoint_chunked_scan(step(w), 0 * x[0], x, chunk_size=3)[1],
    "weight in the carry": lambda api, w, x: api.sliced_scan(
        lambda c, b: ((c[0], c[1] + b), b * c[0] * c[0]), (w, 0 * x[0]), x, reverse=True
    )[1],
    "jacobian": lambda api, w, x: api.jacobian(lambda v: v * v * w * w / 2, x[:, 0], ROWS)[0],
    "hessian": lambda api, w, x: api.hessian(lambda v: square(w)(v**3) / 6, x[:, 0], ROWS)[0],
}


# A loop that keeps what its derivative needs has JAX compute, outside of it, what all steps share of that: a second
# derivative sums there as JAX does.
TWICE = ("microbatch", "argument", "remainder", "mean", "micro_vmap", "micro_grad", "checkpoint_chunked_scan")


QUICK = ("mean", "micro_vmap", "chunked_vmap", "checkpoint_chunked_scan")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("names", [QUICK, pytest.param(tuple(PROGRAMS), marks=pytest.mark.slow)], ids=["few", "all"])
def test_gradients_of_what_steps_share_in_jax(names, dtype):
    rows = jnp.full((ROWS, 1), ENTRY, dtype)

    def total(weights):
        return sum(PROGRAMS[name](jax_impl, w, rows).astype(jnp.float32).sum() for name, w in weights.items())

    def second(weights):
        return jax.grad(lambda v: sum(g.astype(jnp.float32).sum() for g in jax.grad(total)(v).values()))(weights)

    weights = {name: jnp.ones(1, dtype) for name in names}
    again = {name: weights[name] for name in TWICE if name in names}
    value, *found = jax.jit(lambda weights, again: (total(weights), jax.grad(total)(weights), second(again)))(
        weights, again
    )
    assert value == pytest.approx(len(names) * TOTAL, rel=2 * float(jnp.finfo(dtype).eps))
    for grads in found:
        for name, g in grads.items():
            assert g.dtype == dtype
            assert float(g[0]) == pytest.approx(2 * TOTAL, rel=2 * float(jnp.finfo(dtype).eps)), name


# A recorded function does not tell that it hands on what it got; there the sum is that of eager torch.
IN_TORCH = [name for name in PROGRAMS if name != "weight in the carry"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", marked(IN_TORCH, quick=("mean", "chunked_vmap")))
def test_gradients_of_what_steps_share_in_torch(name, dtype):
    dtype = getattr(torch, dtype)
    w = torch.ones(1, dtype=dtype, requires_grad=True)
    value = PROGRAMS[name](mt, w, torch.full((ROWS, 1), ENTRY, dtype=dtype)).sum(dtype=torch.float32)
    assert float(value.detach()) == pytest.approx(TOTAL, rel=2 * torch.finfo(dtype).eps)
    (first,) = torch.autograd.grad(value, w, create_graph=True)
    derivatives = [first, *torch.autograd.grad(first.sum(), w)] if name in (*TWICE, "chunked_vmap") else [first]
    for g in derivatives:
        assert g.dtype == dtype
        assert g.item() == pytest.approx(2 * TOTAL, rel=2 * torch.finfo(dtype).eps)
