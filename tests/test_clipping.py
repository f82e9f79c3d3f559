"""Clipped per-example gradients against those that are computed one by one."""

from __future__ import annotations

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from clipping_cases import CASES, ROWS
from microbatching_cases import assert_same

from microtome.jax_impl import (
    AccumulationType,
    clip_by_global_norm,
    clipped_grad,
    global_norm,
    micro_grad,
    rescale_by_norm,
)


def norm(tree):
    leaves = [jnp.asarray(leaf, jnp.promote_types(leaf.dtype, jnp.float32)) for leaf in jax.tree.leaves(tree)]
    return jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in leaves))


def materialised(loss, params, batch):
    """The gradient of each example, ``[rows, ...]``."""
    return jax.vmap(lambda x: jax.grad(loss)(params, x[None]))(batch)


def expected(grads, max_norm):
    """The clipped sum and the norms, from the gradient of each example."""
    norms = jax.vmap(norm)(grads)
    scale = jnp.minimum(1, max_norm / norms)
    return jax.tree.map(lambda g: jnp.tensordot(scale.astype(g.dtype), g, 1), grads), norms


def largest_array(compiled):
    """Elements of the largest array anywhere in the optimised program."""
    shapes = re.findall(r"\b(?:f|bf|s|u|pred)\d*\[([\d,]+)\]", compiled.as_text())
    return max(math.prod(map(int, shape.split(","))) for shape in shapes)


def temporary(fun, *args):
    return jax.jit(fun).lower(*args).compile().memory_analysis().temp_size_in_bytes


def as_arrays(case, dtype):
    convert = lambda a: jnp.asarray(a, dtype if np.issubdtype(a.dtype, np.floating) else a.dtype)
    return jax.tree.map(convert, case.params), jax.tree.map(convert, case.batch)


@pytest.mark.parametrize("name", CASES)
def test_equals_the_materialised_result_on_the_path_it_says(name):
    case = CASES[name]
    with jax.enable_x64(True):
        params, batch = as_arrays(case, jnp.float64)
        grads = jax.jit(functools.partial(materialised, case.loss))(params, batch)
        max_norm = float(jnp.median(jax.vmap(norm)(grads)))
        want, norms = expected(grads, max_norm)
        fun = clipped_grad(case.loss, l2_clip_norm=max_norm, return_grad_norms=True)
        compiled = jax.jit(fun.fun).lower(params, batch).compile()
        got, aux = compiled(params, batch)
        for key in params:
            scale = float(jnp.abs(want[key]).max()) or 1.0
            np.testing.assert_allclose(got[key], want[key], rtol=0, atol=1e-10 * scale)
        np.testing.assert_allclose(aux.grad_norms, norms, rtol=1e-10)
        explanation = fun.explain(params, batch)
    paths = {key: path.path for key, path in explanation.paths.items()}
    assert {key for key, path in paths.items() if path == "factored"} == {f"['{key}']" for key in case.factored}
    assert "materialised" not in paths.values(), explanation
    if case.factored:
        assert largest_array(compiled) < ROWS * sum(leaf.size for leaf in case.params.values())


@pytest.mark.parametrize("name", ["dense", "convolution_1d", "lstm_in_a_scan", "attention"])
def test_single_precision_and_microbatches(name):
    case = CASES[name]
    params, batch = as_arrays(case, jnp.float32)
    want, norms = expected(materialised(case.loss, params, batch), 0.5)
    for size in (2, 5):
        fun = micro_grad(
            case.loss,
            microbatch_size=size,
            transform_fn=clip_by_global_norm(0.5),
            metrics_fn=global_norm,
            remainder="run",
        )
        got, aux = jax.jit(fun)(params, batch)
        assert_same(got, want)
        assert_same(aux.metrics, norms)
