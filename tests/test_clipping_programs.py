"""Norms and clipped sums of small random programs, by factors, against gradients that are computed one by one."""

from __future__ import annotations

from typing import Any

import clipping_programs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from clipping_programs import ROWS

from microtome.jax_impl import AccumulationType, clip_by_global_norm, clipped_grad, global_norm, micro_grad

_BOUND = 0.5


def _both(seed: int, params: Any, x: Any, i: Any) -> tuple[Any, Any]:
    """``(clipped sum, norms)`` by factors, and from the gradient of each example."""

    def loss(params, example):
        return clipping_programs.loss(seed, params, *example)

    if seed % 3:
        fun = clipped_grad(loss, l2_clip_norm=_BOUND, keep_batch_dim=False, return_grad_norms=True)
        clipped, aux = fun(params, (x, i))
        norms = aux.grad_norms
    else:
        fun = micro_grad(
            loss, microbatch_size=2, keep_batch_dim=False, transform_fn=clip_by_global_norm(_BOUND),
            metrics_fn=global_norm, remainder="run", accumulator=AccumulationType.SUM,
        )  # fmt: skip
        clipped, aux = fun(params, (x, i))
        norms = aux.metrics
    grads = jax.vmap(jax.grad(loss), (None, 0))(params, (x, i))
    want = jax.vmap(global_norm)(grads)
    scale = jnp.where(jnp.isfinite(want), jnp.minimum(1, _BOUND / want), 0)

    def total(g):
        g = g.astype(jnp.promote_types(g.dtype, jnp.float32))
        kept = scale.reshape(-1, *[1] * (g.ndim - 1)).astype(g.dtype)
        return jnp.sum(jnp.where(kept > 0, kept * g, 0), 0)

    return (clipped, norms), (jax.tree.map(total, grads), want)


# What the coarsest type in a program allows, by its name in the program's text.
_TOLERANCES = {"bf16[": 0.1, "f16[": 0.02, "f32[": 2e-3, "f64[": 1e-8}


def check(seed: int, x64: bool) -> None:
    """Compare one program."""
    with jax.enable_x64(x64):
        params, x, i = clipping_programs.inputs(seed, x64)
        traced = jax.jit(lambda *args: _both(seed, *args)).trace(params, x, i)
        text = str(traced.jaxpr)
        (clipped, norms), (want, lengths) = traced.lower().compile()(params, x, i)
    norms, lengths = np.asarray(norms, np.float64), np.asarray(lengths, np.float64)
    finite = np.isfinite(lengths)
    if "f16[" in text.replace("bf16[", "") and not finite.all():
        return  # products are accumulated in float32, where what overflows in float16 is finite
    tolerance = next(t for name, t in _TOLERANCES.items() if name in text)
    np.testing.assert_array_equal(np.isfinite(norms), finite)
    np.testing.assert_allclose(norms[finite], lengths[finite], rtol=tolerance, atol=tolerance)
    for key, value in want.items():
        got = np.asarray(clipped[key], np.float64)
        assert clipped[key].dtype == params[key].dtype
        assert np.isfinite(got).all()
        np.testing.assert_allclose(got, value, rtol=0, atol=tolerance * _BOUND * ROWS, err_msg=key)
