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
from clipping_models import MODELS
from helpers import crossed, temporary
from microbatching_cases import assert_same, norm

from microtome.jax_impl import (
    AccumulationType,
    clip_by_global_norm,
    clipped_grad,
    global_norm,
    micro_grad,
    rescale_by_norm,
)

_SLOW = functools.partial(pytest.param, marks=pytest.mark.slow)


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


def as_arrays(case, dtype):
    convert = lambda a: jnp.asarray(a, dtype if np.issubdtype(a.dtype, np.floating) else a.dtype)
    return jax.tree.map(convert, case.params), jax.tree.map(convert, case.batch)


# One or two of each kind run always, the others with the slow sweeps.
_SLOW_CASES = {
    "attention", "batched_product", "convolution_1d", "convolution_2d_strided_and_dilated", "convolution_3d",
    "convolution_channels_last", "convolution_of_few_channels", "convolution_transposed", "reshapes_casts_and_scalings",
    "weight_used_three_times",
    "convolution_of_one_channel_used_twice", "convolution_transposed_with_flipped_kernel",
    "convolution_with_a_kernel_of_products", "convolution_with_a_standardised_kernel", "embedding_of_two_indices",
    "embedding_out_of_bounds", "layer_norm", "layers_stacked_in_a_scan", "low_rank_weight", "recurrence_unrolled",
    "scan_in_a_scan", "sequence_longer_than_the_layer", "slices_pads_and_transposes",
    "stacked_and_concatenated_parameters",
}  # fmt: skip
assert CASES.keys() >= _SLOW_CASES


@pytest.mark.parametrize("name", [_SLOW(name) if name in _SLOW_CASES else name for name in CASES])
def test_equals_the_materialised_result_on_the_path_it_says(name):
    case = CASES[name]
    with jax.enable_x64(True):
        params, batch = as_arrays(case, jnp.float64)
        grads = jax.jit(functools.partial(materialised, case.loss))(params, batch)
        max_norm = float(np.median(jax.jit(jax.vmap(norm))(grads)))
        want, norms = jax.jit(expected)(grads, max_norm)
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


@pytest.mark.parametrize("name", ["dense", _SLOW("convolution_1d")])
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


def linear(p, x):
    """Its gradient in ``w`` is the outer product of the example and ones."""
    return jnp.sum(x @ p["w"])


PARAMS = {"w": jnp.ones((4, 6))}
ROWS_OF = jnp.asarray(np.random.default_rng(1).normal(size=(3, 4)), jnp.float32)
LENGTH = lambda rows: jnp.linalg.norm(rows, axis=-1) * 6**0.5


def clipped(rows, max_norm=1.0, **options):
    fun = clipped_grad(linear, l2_clip_norm=max_norm, return_grad_norms=True, return_values=True, **options)
    return fun(PARAMS, rows)


def by_hand(rows, max_norm=1.0):
    scale = np.minimum(1, max_norm / np.maximum(LENGTH(rows), 1e-30))
    return np.outer(scale @ np.asarray(rows), np.ones(6))


def test_zero_gradients_stay_zero():
    rows = ROWS_OF.at[1].set(0.0)
    for unit in (False, True):
        grads, aux = clipped(rows, rescale_to_unit_norm=unit)
        assert aux.grad_norms[1] == 0
        np.testing.assert_allclose(grads["w"], by_hand(rows), rtol=1e-5)


def test_one_example_and_none():
    grads, aux = clipped(ROWS_OF[:1])
    np.testing.assert_allclose(grads["w"], by_hand(ROWS_OF[:1]), rtol=1e-5)
    grads, aux = clipped(ROWS_OF[:0])
    assert_same(grads, {"w": jnp.zeros((4, 6))})
    assert aux.grad_norms.shape == aux.values.shape == (0,)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e30])
def test_examples_that_are_not_finite_count_as_zero(bad):
    rows = jnp.concatenate([ROWS_OF, jnp.full((1, 4), bad)])
    grads, aux = clipped(rows)
    np.testing.assert_allclose(grads["w"], by_hand(ROWS_OF), rtol=1e-5)
    assert not np.isfinite(aux.grad_norms[3])
    assert np.isnan(clipped(jnp.full((1, 4), np.nan), nan_safe=False)[0]["w"]).all()


@pytest.mark.parametrize("size", [_SLOW(None), 2])
def test_padding_counts_as_zero_whatever_it_holds(size):
    rows = jnp.concatenate([ROWS_OF, jnp.full((2, 4), jnp.nan)])
    padding = jnp.array([False, False, False, True, True])
    for nan_safe in (True, False):
        fun = clipped_grad(linear, l2_clip_norm=1.0, microbatch_size=size, remainder="run", nan_safe=nan_safe)
        grads = jax.jit(fun)(PARAMS, rows, is_padding_example=padding)
        np.testing.assert_allclose(grads["w"], by_hand(ROWS_OF), rtol=1e-5)
    none = fun(PARAMS, rows, is_padding_example=jnp.ones(5, bool))
    assert_same(none, {"w": jnp.zeros((4, 6))})


@pytest.mark.parametrize("dtype", [_SLOW(jnp.bfloat16), jnp.float16])
def test_norms_of_half_precision_do_not_overflow(dtype):
    rows = jnp.full((2, 4), 300.0, dtype)  # squares sum to 24 * 9e4, beyond float16
    params = {"w": jnp.ones((4, 6), dtype)}
    grads, aux = clipped_grad(linear, l2_clip_norm=1.0, return_grad_norms=True)(params, rows)
    assert grads["w"].dtype == dtype
    np.testing.assert_allclose(aux.grad_norms, 300 * 24**0.5, rtol=1e-2)
    np.testing.assert_allclose(grads["w"].astype(np.float32), 2 / 24**0.5, rtol=1e-2)
    wide = clipped_grad(linear, l2_clip_norm=1.0, dtype=jnp.float32)(params, rows)
    assert wide["w"].dtype == jnp.float32


def test_parameters_used_in_half_precision():
    params = {"w": jnp.asarray(np.random.default_rng(0).normal(size=(8, 16)), jnp.float32)}
    rows = jnp.asarray(np.random.default_rng(1).normal(size=(3, 8)), jnp.float32)
    loss = lambda p, x: jnp.sum((x.astype(jnp.bfloat16) @ p["w"].astype(jnp.bfloat16)).astype(jnp.float32) ** 2)
    want, _ = expected(materialised(loss, params, rows), 1.0)
    fun = clipped_grad(loss, l2_clip_norm=1.0)
    got = fun(params, rows)
    assert got["w"].dtype == jnp.float32
    np.testing.assert_allclose(got["w"], want["w"], atol=2e-2 * float(jnp.abs(want["w"]).max()))
    assert fun.explain(params, rows).paths["['w']"].path == "factored"


def test_parts_are_clipped_by_themselves():
    case = CASES["dense"]
    params, batch = as_arrays(case, jnp.float32)
    bounds = {"w": 0.5, "b": jnp.inf, "v": 0.1}
    fun = clipped_grad(case.loss, l2_clip_norm=bounds, return_grad_norms=True)
    got, aux = jax.jit(fun)(params, batch)
    grads = materialised(case.loss, params, batch)
    assert_same(got, {k: expected(grads[k], bounds[k])[0] for k in params})
    assert_same(aux.grad_norms, jax.vmap(norm)(grads))
    assert fun.sensitivity() == math.inf
    assert clipped_grad(case.loss, l2_clip_norm=[3.0, 4.0], normalize_by=5.0).sensitivity() == 1.0


def test_sensitivity():
    fun = clipped_grad(linear, l2_clip_norm=2.0, normalize_by=4.0)
    assert [fun.sensitivity(), fun.sensitivity("REPLACE_ONE"), fun.sensitivity("ADD_OR_REMOVE_ONE")] == [0.5, 1.0, 0.5]
    assert clipped_grad(linear, l2_clip_norm=2.0, rescale_to_unit_norm=True).sensitivity() == 1.0
    with pytest.raises(ValueError, match="neighboring_relation must be"):
        fun.sensitivity("SWAP")


def test_a_traced_clip_norm_does_not_compile_anew():
    traces = []

    @jax.jit
    def step(rows, max_norm):
        traces.append(max_norm)
        return clipped(rows, max_norm)[0]["w"]

    for max_norm in (0.5, 2.0, jnp.inf):
        np.testing.assert_allclose(step(ROWS_OF, max_norm), by_hand(ROWS_OF, max_norm), rtol=1e-5)
    assert len(traces) == 1


def test_returned_pieces_keys_and_transforms():
    def loss(p, x, key, scale=1.0):
        noise = jax.random.normal(key, x.shape)
        return jnp.sum((x + noise) @ p) * scale, x * 2

    keys = jax.random.split(jax.random.key(3), 3)
    params = jnp.ones((4, 2))
    fun = clipped_grad(
        loss, has_aux=True, l2_clip_norm=jnp.inf, prng_argnum=2, return_values=True, normalize_by=2.0,
        pre_clipping_transform=lambda g: {"g": 3 * g},
    )  # fmt: skip
    grads, aux = fun(params, ROWS_OF, jax.random.key(3))
    rows = jnp.stack([x + jax.random.normal(k, (1, 4))[0] for x, k in zip(ROWS_OF, keys, strict=True)])
    np.testing.assert_allclose(grads["g"], 1.5 * np.outer(rows.sum(0), np.ones(2)), rtol=1e-5)
    np.testing.assert_allclose(aux.values, rows.sum(1) * 2, rtol=1e-5)
    assert_same(aux.aux, 2 * ROWS_OF, exact=True)
    assert aux.grad_norms is None


@pytest.mark.parametrize(
    "accumulator", [AccumulationType.MEAN, _SLOW(AccumulationType.RUNNING_MEAN), AccumulationType.CONCAT]
)
def test_other_accumulators(accumulator):
    case = CASES["dense"]
    params, batch = as_arrays(case, jnp.float32)
    grads = materialised(case.loss, params, batch)
    joined = {k: v if accumulator is AccumulationType.CONCAT else v.mean(0) for k, v in grads.items()}
    fun = micro_grad(case.loss, accumulator=accumulator, microbatch_size=1, transform_fn=rescale_by_norm(jnp.ones_like))
    assert_same(fun(params, batch)[0], joined)


def test_automatic_clipping_and_hand_written_clipping_stay_factors():
    case = CASES["dense"]
    params, batch = as_arrays(case, jnp.float32)
    grads = materialised(case.loss, params, batch)
    scale = 1 / (jax.vmap(norm)(grads) + 0.01)
    want = jax.tree.map(lambda g: jnp.tensordot(scale, g, 1), grads)
    by_hand = lambda g: jax.tree.map(lambda v: v / (norm(g) + 0.01), g)
    for transform in (rescale_by_norm(lambda n: 1 / (n + 0.01)), by_hand):
        fun = micro_grad(case.loss, transform_fn=transform)
        assert_same(fun(params, batch)[0], want)
        paths = {k: p.path for k, p in fun.explain(params, batch).paths.items()}
        assert paths == {"['w']": "factored", "['b']": "direct", "['v']": "factored"}


def test_what_no_rule_covers_is_materialised_alone_and_said():
    def loss(p, x):
        return total_of(x @ jnp.sort(p["a"], axis=0)) + total_of(x @ p["b"])

    total_of = lambda h: jnp.sum(jnp.tanh(h) ** 2)
    params = {k: jnp.asarray(np.random.default_rng(i).normal(size=(4, 9)), jnp.float32) for i, k in enumerate("ab")}
    fun = clipped_grad(loss, l2_clip_norm=0.5)
    assert_same(jax.jit(fun)(params, ROWS_OF), expected(materialised(loss, params, ROWS_OF), 0.5)[0])
    explanation = fun.explain(params, ROWS_OF)
    assert explanation.paths["['a']"].path == "materialised"
    assert explanation.paths["['b']"].path == "factored"
    assert explanation.kept_bytes == {"['a']": 3 * 36 * 4, "['b']": 3 * 13 * 4}
    assert "materialised" in str(explanation)

    def looked_up(p, x):  # indices that change in a loop whose steps stay apart
        index = jnp.argmax(x[0])
        return total_of(jax.lax.scan(lambda c, row: (c + row[index] ** 2, None), 0.0, p["a"])[0]) + total_of(x @ p["b"])

    fun = clipped_grad(looked_up, l2_clip_norm=0.5)
    assert_same(jax.jit(fun)(params, ROWS_OF), expected(materialised(looked_up, params, ROWS_OF), 0.5)[0])
    signs = micro_grad(loss, transform_fn=lambda g: jax.tree.map(jnp.sign, g))
    assert "sign" in signs.explain(params, ROWS_OF).paths["['b']"].reason


def test_an_operand_is_kept_from_before_its_axes_were_moved():
    """The moved copy, which nothing else reads, is then not made."""
    loss = lambda p, x: jnp.sum(jnp.sort(jnp.swapaxes(x @ p["w"], 1, 2), axis=-1)[..., 1:] ** 2)
    params = {"w": jnp.asarray(np.random.default_rng(0).normal(size=(12, 20)), jnp.float32)}
    rows = jnp.asarray(np.random.default_rng(1).normal(size=(3, 7, 12)), jnp.float32)
    fun = clipped_grad(loss, l2_clip_norm=0.5)
    assert fun.explain(params, rows).paths["['w']"].reason == "product of [20, 7] x [7, 12], and of [20] x [12]"
    assert_same(jax.jit(fun)(params, rows), expected(materialised(loss, params, rows), 0.5)[0])


@pytest.mark.parametrize("name", [_SLOW("dense"), _SLOW("attention"), _SLOW("lstm_in_a_scan"), "weight_normalisation"])
def test_derivatives_are_those_of_the_plain_computation(name):
    case = CASES[name]
    with jax.enable_x64(True):
        params, batch = as_arrays(case, jnp.float64)
        plain = lambda p, x: norm(expected(materialised(case.loss, p, x), 0.5)[0])
        ours = lambda p, x: norm(clipped_grad(case.loss, l2_clip_norm=0.5)(p, x))
        assert_same(jax.jit(jax.grad(ours))(params, batch), jax.jit(jax.grad(plain))(params, batch))


def test_memory_is_that_of_the_plain_gradient():
    sizes = [(64, 256), (256, 256), (256, 10)]
    params = [(jnp.zeros((i, o)), jnp.zeros(o)) for i, o in sizes]
    rows = jnp.zeros((128, 64))

    def loss(p, x):
        for w, b in p[:-1]:
            x = jax.nn.gelu(x @ w + b)
        return jnp.sum(jax.nn.log_softmax(x @ p[-1][0] + p[-1][1])[:, 0])

    plain = temporary(jax.grad(loss), params, rows)
    fun = clipped_grad(loss, l2_clip_norm=1.0)
    assert temporary(fun.fun, params, rows) <= 1.25 * plain
    small = clipped_grad(loss, l2_clip_norm=1.0, microbatch_size=16)
    assert temporary(small.fun, params, rows) <= 0.6 * plain


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_memory_of_whole_networks(name):
    """No array in the optimised program has as many elements as the gradients of the largest parameter."""
    rows = 256 if name in ("MLP", "embedding") else 16
    loss, params, x, y = MODELS[name](rows)
    plain = temporary(jax.grad(loss), params, x, y)
    fun = clipped_grad(loss, l2_clip_norm=1.0, batch_argnums=(1, 2))
    compiled = jax.jit(fun.fun).lower(params, x, y).compile()
    assert compiled.memory_analysis().temp_size_in_bytes <= 1.25 * plain
    assert largest_array(compiled) < rows * max(leaf.size for leaf in jax.tree.leaves(params))
    options = {"batch_argnums": (1, 2), "microbatch_size": 16 if rows == 256 else 4}
    plain = temporary(micro_grad(loss, **options), params, x, y)
    assert temporary(clipped_grad(loss, l2_clip_norm=1.0, **options).fun, params, x, y) <= 1.25 * plain


@pytest.mark.parametrize(
    ("bound", "error", "message"),
    [
        (0.0, ValueError, "l2_clip_norm must be positive, got 0.0"),
        (jnp.float32(-1), ValueError, "l2_clip_norm must be positive"),
        (float("nan"), ValueError, "l2_clip_norm must be positive"),
        ("1", TypeError, "l2_clip_norm must be a positive number"),
        ({"w": jnp.ones(2)}, ValueError, r"l2_clip_norm\['w'\] must be a positive number or an array of shape"),
        ({}, ValueError, "must hold a positive number"),
    ],
)
def test_bad_clip_norms(bound, error, message):
    with pytest.raises(error, match=message):
        clipped_grad(linear, l2_clip_norm=bound)


def test_bad_input():
    fun = clipped_grad(linear, l2_clip_norm=1.0)
    with pytest.raises(ValueError, match="prefix of the gradients' tree"):
        clipped_grad(linear, l2_clip_norm={"v": 1.0})(PARAMS, ROWS_OF)
    with pytest.raises(ValueError, match=r"l2_clip_norm must be at least 1.18e-38, .* such as 1e-40, count as zero"):
        clipped_grad(linear, l2_clip_norm=1e-40)(PARAMS, ROWS_OF)
    with pytest.raises(TypeError, match=r"p\['w'\] is complex64; clipping needs"):
        fun({"w": jnp.ones((4, 6), complex)}, ROWS_OF)
    with pytest.raises(TypeError, match=r"p\['n'\] is int32; clipping needs"):
        fun({**PARAMS, "n": jnp.arange(3)}, ROWS_OF)
    with pytest.raises(ValueError, match=r"is_padding_example must have shape \(3,\)"):
        fun(PARAMS, ROWS_OF, is_padding_example=jnp.zeros(2, bool))
    with pytest.raises(TypeError, match="is_padding_example must hold booleans"):
        fun(PARAMS, ROWS_OF, is_padding_example=jnp.zeros(3))
    with pytest.raises(ValueError, match="name the same argument"):
        clipped_grad(linear, l2_clip_norm=1.0, batch_argnums=0)
    with pytest.raises(ValueError, match="normalize_by must be positive"):
        clipped_grad(linear, l2_clip_norm=1.0, normalize_by=0)
    whole = lambda g: jax.tree.map(lambda x: jnp.round(x).astype(int), g)
    with pytest.raises(TypeError, match=r"pre_clipping_transform\['w'\] is int32, which has no norm to clip"):
        clipped_grad(linear, l2_clip_norm=1.0, pre_clipping_transform=whole)(PARAMS, ROWS_OF)
    two = clipped_grad(lambda p, x, y: linear(p, x), l2_clip_norm=1.0, batch_argnums=(1, 2))
    with pytest.raises(ValueError, match="same number of rows"):
        two(PARAMS, ROWS_OF, ROWS_OF[:2])
    with pytest.raises(ValueError, match="reduces over the examples by an axis name"):
        clipped_grad(lambda p, x: linear(p, x - jax.lax.pmean(x, "batch")), l2_clip_norm=1.0)(PARAMS, ROWS_OF)
    with pytest.raises(TypeError, match="scale_fn must be a function"):
        rescale_by_norm(1.0)
    with pytest.raises(ValueError, match="scale_fn must return a number"):
        micro_grad(linear, transform_fn=rescale_by_norm(lambda n: n[None]))(PARAMS, ROWS_OF)


def test_a_batch_that_is_taken_by_keyword_only():
    def by_keyword(p, *, x):
        return linear(p, x)

    options = {"l2_clip_norm": 1.0, "microbatch_size": 1, "return_grad_norms": True}
    for result, expected in (
        (clipped_grad(by_keyword, **options), clipped_grad(linear, **options)),
        (clipped_grad(by_keyword, **options, batch_argnums=()), clipped_grad(linear, **options)),
        (clipped_grad(lambda p, **rows: linear(p, **rows), **options), clipped_grad(linear, **options)),
        (micro_grad(by_keyword), micro_grad(linear)),
    ):
        jax.tree.map(np.testing.assert_allclose, result(PARAMS, x=ROWS_OF), expected(PARAMS, ROWS_OF))
    for fun in (clipped_grad(by_keyword, l2_clip_norm=1.0), micro_grad(by_keyword)):
        with pytest.raises(ValueError, match="hold no array with a batch axis"):
            fun(PARAMS)
    for transform in (lambda f: clipped_grad(f, l2_clip_norm=1.0), micro_grad):
        with pytest.raises(ValueError, match="batch_argnums=1 is out of range"):
            transform(lambda p: linear(p, ROWS_OF))


def test_a_traced_clip_norm_that_is_not_positive_gives_nan():
    for bad in (-1.0, 0.0, math.nan):
        assert np.isnan(jax.jit(lambda bound: clipped(ROWS_OF, bound)[0]["w"])(bad)).all()
        fun = lambda bound: micro_grad(linear, transform_fn=clip_by_global_norm(bound))(PARAMS, ROWS_OF)[0]["w"]
        assert np.isnan(jax.jit(fun)(bad)).all()


def _difference(h):
    return h[0] - h[1]


def _instance_norm(h, axis):
    return jnp.tanh((h - h.mean(axis, keepdims=True)) * jax.lax.rsqrt(h.var(axis, keepdims=True) + 1e-3))


def _mlp(p, x):
    return jnp.tanh(x @ p["w"] * 0.2) @ p["w"][0]


# Losses of examples {"x": [6, 32], "d": [6, 32], "v": [6, 32]}: the inputs x have a large offset, or x + 1e-4 d is
# compared with them, and what is left of the products of a norm is far smaller than they are.
CANCELLING = {
    "pairs": lambda p, b: jnp.sum(_difference(b["x"] @ p["w"]) * b["v"]),
    "pairs_weighed_by_a_constant": lambda p, b: jnp.sum(b["x"] @ p["w"] * jnp.array([1.0, -1, 1, -1, 1, -1])[:, None]),
    "two_uses": lambda p, b: jnp.sum((b["x"] @ p["w"] - (b["x"] + b["d"]) @ p["w"]) * b["v"]),
    "two_uses_of_slices": lambda p, b: jnp.sum(
        (b["x"] @ p["w"][:, :16] - (b["x"] + b["d"]) @ p["w"][:, :16])[0] * b["v"][0, :16]
    ),
    "transposed_use": lambda p, b: jnp.sum(b["x"] @ p["w"] * b["v"]) - jnp.sum(b["v"] @ p["w"].T * (b["x"] + b["d"])),
    "attention": lambda p, b: jnp.sum((jax.nn.softmax(b["x"] @ p["w"] @ b["v"][0] * 0.01) @ b["d"]) * b["v"][1]),
    "instance_norm": lambda p, b: jnp.sum(_instance_norm(b["x"] @ p["w"], 0) * b["v"]),
    "convolution_and_instance_norm": lambda p, b: jnp.sum(
        _instance_norm(jax.lax.conv(b["x"].T[None], p["k"], (1,), "SAME"), 2)[0] * b["v"].T
    ),
    "convolution_used_twice": lambda p, b: jnp.sum(
        (lambda f: f(b["x"]) - f(b["x"] + 1e-3 * b["d"]))(
            lambda x: jax.lax.conv(x.T[None], p["k"], (1,), "SAME")
        )[0] * b["v"].T
    ),
    "loop": lambda p, b: jax.lax.scan(
        lambda h, x: (h + x[0] @ p["w"] * x[1], None), jnp.zeros(32), (b["x"], jnp.array([1.0, -1, 1, -1, 1, -1]))
    )[0] @ b["v"][0],
    "embedding": lambda p, b: jnp.sum(
        p["w"][jnp.array([1, 1, 2, 2, 1, 1])] * b["x"] * jnp.array([1.0, -1, 1, -1, 1, -1])[:, None]
    ),
    "near_duplicates": lambda p, b: jax.nn.softplus(100 * _difference(_mlp(p, jnp.stack([b["v"], b["n"]])[:, 0]))),
    "near_duplicates_row_by_row": lambda p, b: jnp.sum(jnp.tanh(_difference(_mlp(p, jnp.stack([b["v"], b["n"]]))))),
    "near_duplicates_in_two_calls": lambda p, b: jnp.sum(jnp.tanh(_mlp(p, b["v"]) - _mlp(p, b["n"]))),
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [name if name == "embedding" else _SLOW(name) for name in CANCELLING],
)
def test_norms_are_right_where_products_cancel(name):
    rng = np.random.default_rng(0)
    loss = CANCELLING[name]
    params = {"w": rng.normal(size=(32, 32)), "k": rng.normal(size=(32, 32, 3)) / 10}
    batch = {key: rng.normal(size=(3, 6, 32)) for key in "xdv"}
    batch["x"] += 0 if name == "convolution_used_twice" else 1000
    batch["n"] = batch["v"] + 1e-4 * batch["d"]
    narrow = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), (params, batch))
    with jax.enable_x64(True):
        exact = jax.tree.map(lambda a: jnp.asarray(np.asarray(a), jnp.float64), narrow)
        right = jax.jit(jax.vmap(lambda p, b: norm64(jax.grad(loss)(p, b)), (None, 0)))(*exact)
    vdot = lambda g: jnp.sqrt(sum(jnp.vdot(x, x) for x in jax.tree.leaves(g)))
    options = {"l2_clip_norm": 1e-3, "keep_batch_dim": False}

    @jax.jit
    def norms(params, batch):
        own = micro_grad(loss, transform_fn=lambda g: g, metrics_fn=vdot, keep_batch_dim=False)(params, batch)[1]
        ours = clipped_grad(loss, return_grad_norms=True, **options)(params, batch)[1].grad_norms
        one = lambda row: norm(clipped_grad(loss, **options)(params, jax.tree.map(lambda a: a[row][None], batch)))
        return ours, own.metrics, jnp.stack([one(0)])

    ours, own, parts = norms(*narrow)
    np.testing.assert_allclose(ours, right, rtol=1e-3)
    np.testing.assert_allclose(own, right, rtol=1e-3)
    np.testing.assert_allclose(parts, 1e-3, rtol=1e-3)


@pytest.mark.parametrize("factor", [1e3, pytest.param(1 / 1e-3, marks=pytest.mark.slow), 0.5])
def test_what_overflows_a_cast_to_half_precision_overflows_when_it_is_clipped(factor):
    rng = np.random.default_rng(0)
    w, x = (jnp.asarray(rng.normal(size=shape), jnp.float16) for shape in ((12, 12), (3, 12)))
    scaled = lambda w: w / jnp.float32(1e-3) if factor == 1 / 1e-3 else w * factor
    loss = lambda w, x: 1e3 * jnp.sum((x @ scaled(w.astype(jnp.float32)).astype(jnp.float16)).astype(jnp.float32))
    norms = clipped_grad(loss, l2_clip_norm=1.0, return_grad_norms=True)(w, x)[1].grad_norms
    plain = [jnp.linalg.norm(jax.grad(loss)(w, row[None]).astype(jnp.float32)) for row in x]
    np.testing.assert_allclose(norms, jnp.stack(plain), rtol=3e-3)


# Losses of examples {"x": [2, 20], "c": [2, 20]}, in whose products one factor is small where the other is large.
UNEVEN = {
    "transposed_use": lambda p, b, k: k * jnp.sum((b["x"] @ (p["w"] + p["w"].T)) ** 2),
    "tied_autoencoder": lambda p, b, k: k * jnp.mean((jax.nn.relu(b["x"] @ p["w"].T) @ p["w"] - b["x"]) ** 2),
    "rows": lambda p, b, k: jnp.sum((b["x"] * jnp.array([[k], [1 / k]])) @ p["w"] * b["c"] / jnp.array([[k], [1 / k]])),
    "uses": lambda p, b, k: jnp.sum((b["x"][0] * k) @ p["w"] * b["c"][0] / k) + jnp.sum(b["x"][1] @ p["w"] * b["c"][1]),
    "normalised_between": lambda p, b, k: jnp.sum(jnp.tanh(_root_mean_square((b["x"] * k) @ p["w"]) @ p["w"]) * b["c"]),
    "of_an_offset": lambda p, b, k: jnp.sum(
        (100 + b["x"]) @ p["w"] * b["c"] * jnp.array([[k], [-k]]) + (100 + b["c"]) @ p["w"] * b["x"] / k
    ),
}  # fmt: skip


def _root_mean_square(x):
    return x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True))


@pytest.mark.parametrize("name", [name if name == "transposed_use" else _SLOW(name) for name in UNEVEN])
def test_norms_do_not_depend_on_how_size_is_shared_between_the_factors(name):
    rng = np.random.default_rng(0)
    loss, params = UNEVEN[name], {"w": rng.normal(size=(20, 20)) / 4}
    batch = {key: rng.normal(size=(8, 2, 20)) for key in "xc"}
    narrow = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), (params, batch))
    scales = [10.0**e for e in (-9, -6, -3, -2, -1, 0, 1, 2, 4, 6, 9)]
    if name != "transposed_use" and name != "tied_autoencoder":
        scales = [k for k in scales if 1e-6 <= k <= 1e6]  # beyond, float32 itself has no digits left
    with jax.enable_x64(True):
        exact = jax.tree.map(lambda a: jnp.asarray(np.asarray(a), jnp.float64), narrow)
        one = lambda p, b, k: norm64(jax.grad(loss)(p, b, k))
        right = jax.jit(jax.vmap(jax.vmap(one, (None, 0, None)), (None, None, 0)))(*exact, jnp.array(scales))
    fun = clipped_grad(loss, l2_clip_norm=1.0, return_grad_norms=True, keep_batch_dim=False, batch_argnums=1)
    ours = jax.jit(jax.vmap(lambda p, b, k: fun(p, b, k)[1].grad_norms, (None, None, 0)))
    np.testing.assert_allclose(ours(*narrow, jnp.array(scales, jnp.float32)), right, rtol=1e-5)


def norm64(tree):
    return jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(tree)))


def test_the_bound_holds_where_products_cancel_in_other_ways():
    """Almost equal rows among others: no one mean is that of both rows of a pair."""
    rng = np.random.default_rng(0)
    w, v = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((32, 32), (3, 4, 32)))
    noise = rng.normal(size=(3, 4, 32))
    x = jnp.asarray(np.stack([noise, noise + 1e-4 * noise[::-1]], 2).reshape(3, 8, 32), jnp.float32)
    loss = lambda w, batch: jnp.sum(batch[1] * ((batch[0] @ w)[::2] - (batch[0] @ w)[1::2]))
    clipped = jax.jit(clipped_grad(loss, l2_clip_norm=1e-6, return_grad_norms=True, keep_batch_dim=False))
    right = jax.vmap(lambda x, v: jnp.linalg.norm(jax.grad(loss)(w, (x, v))))(x, v)
    assert (clipped(w, (x, v))[1].grad_norms > 0.99 * right).all()
    assert jnp.linalg.norm(clipped(w, (x[:1], v[:1]))[0]) < 1e-6 * 1.01


@pytest.mark.parametrize(
    "precision", [jax.lax.DotAlgorithmPreset.F16_F16_F16, _SLOW(jax.lax.DotAlgorithmPreset.BF16_BF16_F32)]
)
def test_norms_are_exact_whatever_the_precision_of_products(precision):
    rng = np.random.default_rng(0)
    w = jnp.asarray(rng.normal(size=(100, 64)), jnp.float32)
    x, v = (jnp.asarray(rng.normal(size=(3, 4, n)) * scale, jnp.float32) for n, scale in ((100, 30), (64, 1 / 30)))

    each = jnp.einsum("bti,bto->bio", x, v)
    product = functools.partial(jax.lax.dot_general, dimension_numbers=(((1,), (0,)), ((), ())), precision=precision)
    loss = lambda w, b: jnp.sum(product(b[0], w) * b[1])
    # The examples are weighed by numbers that float16 does not hold.
    clipped = clipped_grad(loss, l2_clip_norm=1e-7, return_grad_norms=True, keep_batch_dim=False)
    grads, aux = jax.jit(clipped)(w, (x, v))
    want, norms = expected(each, 1e-7)
    np.testing.assert_allclose(aux.grad_norms, norms, rtol=1e-2)
    np.testing.assert_allclose(grads, want, atol=2e-9)


def test_norms_are_exact_whatever_the_precision_of_products_by_default():
    rng = np.random.default_rng(0)
    w = jnp.asarray(rng.normal(size=(100, 64)), jnp.float32)
    x, v = (jnp.asarray(rng.normal(size=(3, 4, n)) * scale, jnp.float32) for n, scale in ((100, 30), (64, 1 / 30)))
    each = jnp.einsum("bti,bto->bio", x, v)
    with jax.default_matmul_precision("F16_F16_F16"):
        aux = jax.jit(clipped_grad(lambda w, b: jnp.sum((b[0] @ w) * b[1]), **{
            "l2_clip_norm": 1.0, "return_grad_norms": True, "keep_batch_dim": False,
        }))(w, (x, v))[1]  # fmt: skip
    np.testing.assert_allclose(aux.grad_norms, expected(each, 1.0)[1], rtol=1e-2)


@pytest.mark.parametrize("microbatch_size", [_SLOW(None), 64])
def test_sums_of_half_precision_are_divided_before_they_are_rounded(microbatch_size):
    loss = lambda w, x: jnp.sum(w["w"] * x).astype(jnp.float32)
    w, x = {"w": jnp.ones(4, jnp.float16)}, jnp.full((256, 4), 400, jnp.float16)
    for divisor in (256.0, jnp.float16(256)):
        clipped = clipped_grad(
            loss, l2_clip_norm=1000.0, normalize_by=divisor, keep_batch_dim=False, microbatch_size=microbatch_size
        )
        grads = clipped(w, x)["w"]
        assert grads.dtype == jnp.float16
        np.testing.assert_allclose(grads, 400)
    traced = lambda n: clipped_grad(loss, l2_clip_norm=1000.0, normalize_by=n, keep_batch_dim=False)(w, x)["w"]
    np.testing.assert_allclose(jax.jit(traced)(256), 400)


def test_nan_stays_in_its_example_where_each_has_a_kernel_of_its_own():
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        w, scale = jnp.asarray(rng.normal(size=(1, 1, 5))), jnp.asarray(rng.normal(size=3))
        x = jnp.asarray(rng.normal(size=(3, 1, 1, 7))).at[1, 0, 0, 2].set(jnp.nan)
        convolve = lambda w, b: jax.lax.conv_general_dilated(b[0], w * b[1], (1,), [(1, 2)])
        loss = lambda w, b: jnp.tanh(convolve(w, b)).sum()
        options = {"l2_clip_norm": 1.0, "return_values": True, "return_grad_norms": True, "keep_batch_dim": False}
        grads, aux = jax.jit(clipped_grad(loss, **options))(w, (x, scale))
        each = [jax.grad(loss)(w, (x[i], scale[i])) for i in (0, 2)]
        want, norms = expected(jnp.stack(each), 1.0)
        np.testing.assert_array_equal(jnp.isnan(aux.values), [False, True, False])
        np.testing.assert_allclose(aux.grad_norms[::2], norms, rtol=1e-12)
        np.testing.assert_allclose(grads, want, rtol=1e-12)


@pytest.mark.parametrize("divisor", [3e38, np.float32(2e-38), _SLOW(np.full((6, 5), 1e38, np.float32))])
def test_parameters_divided_by_numbers_near_the_ends_of_the_range(divisor):
    rng = np.random.default_rng(0)
    size = 1e18 if np.max(divisor) > 1 else 1e-18
    x, y = (jnp.asarray(rng.normal(size=(3, n)) * size, jnp.float32) for n in (6, 5))
    loss = lambda w, b: b[0] @ (w / divisor) @ b[1]
    each = jax.vmap(lambda x, y: jax.grad(loss)(jnp.ones((6, 5)), (x, y)))(x, y)
    clipped = clipped_grad(loss, l2_clip_norm=1e-3, return_grad_norms=True, keep_batch_dim=False)
    grads, aux = jax.jit(clipped)(jnp.ones((6, 5)), (x, y))
    want, norms = expected(each, 1e-3)
    np.testing.assert_allclose(aux.grad_norms, norms, rtol=1e-4)
    np.testing.assert_allclose(grads, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("largest", [1e38, *map(_SLOW, (1e19, 1e37, 3e38, 1e-19, 2e-38))])
@pytest.mark.parametrize(
    ("kind", "scaled", "dtype"),
    crossed(["entries", "product", "sequence", "quotient", "lookup"], [False, True], [jnp.float32, jnp.bfloat16]),
)
def test_the_bound_holds_at_the_ends_of_the_range(kind, scaled, dtype, largest):
    """Sizes are divided by, and XLA multiplies by the inverse: that of a number above 8.5e37 is zero."""
    losses = {
        "entries": lambda w, y, f: jnp.sum(w[0] * y[0]) * f,
        "product": lambda w, y, f: (w @ y[0]).sum() * f,
        "sequence": lambda w, y, f: jnp.sum((y @ w) * y[:, :1]) * f,
        "quotient": lambda w, y, f: (y @ (w / jnp.full((3, 3), 1e-3, dtype))).sum() * f,
        "lookup": lambda w, y, f: jnp.sum(w[jnp.array([0, 2])] * y) * f,
    }
    rows = jnp.ones((3, 2, 3), dtype).at[0, 0, 0].set(largest)
    factor = jnp.asarray([1.5, 0.5, 2.0] if scaled else [1.0, 1.0, 1.0], dtype)
    loss = lambda w, b: losses[kind](w, *b)
    grads, aux = clipped_grad(loss, l2_clip_norm=1.0, return_grad_norms=True, keep_batch_dim=False)(
        jnp.ones((3, 3), dtype), (rows, factor)
    )
    each = jax.vmap(jax.grad(loss), (None, 0))(jnp.ones((3, 3), dtype), (rows, factor))
    norms = np.linalg.norm(np.asarray(each, np.float64).reshape(3, -1), axis=1)
    np.testing.assert_allclose(aux.grad_norms[1:], norms[1:], rtol=1e-2)
    assert aux.grad_norms[0] >= 0.98 * norms[0] if np.isfinite(norms[0]) else not np.isfinite(aux.grad_norms[0])
    assert float(jnp.linalg.norm(jnp.asarray(grads, jnp.float32))) <= 3.03


_CONVOLVED = lambda w, x: jax.lax.conv(x[:, None], w, (1,), "VALID")
# By name: the rows of an example's inputs and cotangents, and a loss of a weight [40, 30], so large that the norm of a
# few rows is taken from products of factors, or [6, 1, 3] to convolve with.
FACTORED = {
    "a row": (1, lambda w, x, d: jnp.sum((x @ w) * d)),
    "a few rows": (3, lambda w, x, d: jnp.sum((x @ w) * d)),
    "many rows": (60, lambda w, x, d: jnp.sum((x @ w) * d)),
    "used twice": (2, lambda w, x, d: jnp.sum((x @ w) * d) + jnp.sum((d @ w.T) * x)),
    "a product by itself": (1, lambda w, x, d: (x @ w @ d.T)[0, 0]),
    "a third factor": (40, lambda w, x, d: jnp.sum((x @ (w * jnp.arange(1.0, 31.0))) * d)),
    "looked up": (4, lambda w, x, d: jnp.sum(w[jnp.array([0, 2, 5, 2])] * d) * x[0, 0]),
    "convolution": (4, lambda w, x, d: jnp.sum(_CONVOLVED(w, x) * d[:, :1, None])),
}


@pytest.mark.parametrize("dtype", [jnp.float32, _SLOW(jnp.bfloat16)])
@pytest.mark.parametrize("by", ["clipped_grad", _SLOW("a norm by hand")])
@pytest.mark.parametrize("name", [k if k in ("many rows", "used twice") else _SLOW(k) for k in FACTORED])
def test_factors_whose_own_squares_leave_the_range(name, by, dtype):
    """The gradient's do not: inputs of one end of the range meet cotangents of the other."""
    rows, loss = FACTORED[name]
    rng = np.random.default_rng(0)
    sizes = jnp.asarray([1e-20, 1e18, 1e-25, 1e25, 1e-30, 1e30, 1.0], jnp.float32)[:, None, None]
    x, d = (jnp.asarray(rng.normal(size=(7, rows, n)) * s, dtype) for n, s in ((40, sizes), (30, 1 / sizes)))
    w = jnp.ones((6, 1, 3) if name == "convolution" else (40, 30), dtype)
    real = lambda w, b: loss(w, *b).astype(jnp.float32)
    if by == "clipped_grad":
        grads, aux = clipped_grad(real, l2_clip_norm=0.1, return_grad_norms=True, keep_batch_dim=False)(w, (x, d))
        norms = aux.grad_norms
    else:
        clip = lambda g: g * jnp.minimum(1, 0.1 / jnp.sqrt(jnp.sum(g**2)))
        grads, aux = micro_grad(real, transform_fn=clip, metrics_fn=norm, keep_batch_dim=False)(w, (x, d))
        norms = aux.metrics
    want, right = expected(jax.vmap(jax.grad(real), (None, 0))(w, (x, d)), 0.1)
    tolerance = 0.05 if dtype == jnp.bfloat16 else 1e-4
    np.testing.assert_allclose(norms, right, rtol=tolerance)
    scale = float(jnp.max(jnp.abs(want)))
    np.testing.assert_allclose(np.asarray(grads, float), np.asarray(want, float), atol=tolerance * scale, rtol=0)


@pytest.mark.parametrize("shape", [(3,), (2, 2)])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_without_nan_safe_no_entry_passes_unclipped(bad, shape):
    grads = {"w": jnp.full(shape, 100.0).at[(0,) * len(shape)].set(bad), "b": jnp.ones(2)}
    found = clip_by_global_norm(1.0, nan_safe=False)(grads)
    by_hand = jax.tree.map(lambda g: g * jnp.minimum(1, 1 / global_norm(grads)), grads)
    assert_same(found, by_hand)


@pytest.mark.parametrize(
    "number", [jnp.int8(100), jnp.uint8(200), jnp.int32(50_000), jnp.float16(60_000), jnp.bfloat16(3)]
)
@pytest.mark.parametrize("by", ["clip norm", "divisor"])
def test_sensitivity_does_not_wrap_or_overflow(number, by):
    """Noise is scaled by it: one that is too small would protect nobody."""

    def sensitivity(x):
        norms = {"a": x, "b": x} if by == "clip norm" else {"a": 1e-3, "b": 1e-3}
        options = {"l2_clip_norm": norms, "normalize_by": x if by == "divisor" else 1.0}
        return clipped_grad(lambda p, x: (p["a"] * p["b"] * x).sum(), **options).sensitivity()

    expected = math.sqrt(2) * (float(number) if by == "clip norm" else 1e-3 / float(number))
    for found in (sensitivity(number), jax.jit(sensitivity)(number), sensitivity(np.asarray(number)[()])):
        assert float(found) == pytest.approx(expected, rel=1e-3)


def test_norms_of_narrow_types_and_large_divisors():
    loss = lambda w, x: jnp.sum(w * x)
    eight = {"a": np.int8(100), "b": np.int8(100)}
    assert clipped_grad(loss, l2_clip_norm=eight).sensitivity() == pytest.approx(141.42, rel=1e-4)
    assert clipped_grad(loss, l2_clip_norm=np.float16(300)).sensitivity() == 300
    w, x = jnp.ones(4, jnp.float16), jnp.full((256, 4), 2, jnp.float16)
    got = clipped_grad(loss, l2_clip_norm=1.0, normalize_by=70000.0, keep_batch_dim=False)(w, x)
    np.testing.assert_allclose(np.asarray(got, np.float32), 256 / 2 / 70000, rtol=1e-2)
    with pytest.raises(TypeError, match="scale_fn must return a real number"):
        rescale_by_norm(lambda n: n * 1j)(w)
