"""Norms and clipped sums of small programs, random ones and known kinds, against gradients that are made one by one."""

from __future__ import annotations

import dataclasses
from typing import Any

import clipping_programs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import marked

from microtome.jax_impl import AccumulationType, clip_by_global_norm, clipped_grad, global_norm, micro_grad
from microtome.jax_impl.factors.registry import RULES

_BOUND = 0.5


def by_factors(loss: Any, params: Any, batch: Any, micro: bool = False) -> tuple[Any, Any]:
    """``(clipped sum, norms)`` as the library computes them."""
    if micro:
        fun = micro_grad(
            loss, microbatch_size=2, keep_batch_dim=False, transform_fn=clip_by_global_norm(_BOUND),
            metrics_fn=global_norm, remainder="run", accumulator=AccumulationType.SUM,
        )  # fmt: skip
        clipped, aux = fun(params, batch)
        return clipped, aux.metrics
    clipped, aux = clipped_grad(loss, l2_clip_norm=_BOUND, keep_batch_dim=False, return_grad_norms=True)(params, batch)
    return clipped, aux.grad_norms


def one_by_one(loss: Any, params: Any, batch: Any) -> tuple[Any, Any]:
    """The same, from the gradient of each example."""
    grads = jax.vmap(jax.grad(loss), (None, 0))(params, batch)
    norms = jax.vmap(global_norm)(grads)
    scale = jnp.where(jnp.isfinite(norms), jnp.minimum(1, _BOUND / norms), 0)

    def total(g):
        kept = scale.reshape(-1, *[1] * (g.ndim - 1)).astype(jnp.promote_types(g.dtype, jnp.float32))
        return jnp.sum(jnp.where(kept > 0, kept * g.astype(kept.dtype), 0), 0)

    return jax.tree.map(total, grads), norms


def assert_same(got: Any, want: Any, tolerance: float) -> None:
    (clipped, norms), (total, lengths) = got, want
    norms, lengths = np.asarray(norms, np.float64), np.asarray(lengths, np.float64)
    finite = np.isfinite(lengths)
    np.testing.assert_array_equal(np.isfinite(norms), finite)
    np.testing.assert_allclose(norms[finite], lengths[finite], rtol=tolerance, atol=tolerance)
    for ours, value in zip(jax.tree.leaves(clipped), jax.tree.leaves(total), strict=True):
        ours = np.asarray(ours, np.float64)
        assert np.isfinite(ours).all()
        np.testing.assert_allclose(ours, value, rtol=0, atol=tolerance * _BOUND * len(norms))


# What the coarsest type in a program allows, by its name in the program's text.
_TOLERANCES = {"bf16[": 0.1, "f16[": 0.02, "f32[": 2e-3, "f64[": 1e-8}


def check(seeds: Any) -> None:
    """Compare random programs, compiled as one; those of odd seeds with 64-bit types."""
    for x64 in (False, True):
        chosen = [seed for seed in seeds if seed % 2 == x64]
        losses = [lambda p, example, seed=seed: clipping_programs.loss(seed, p, *example) for seed in chosen]

        def both(inputs, losses=losses, chosen=chosen):
            triples = list(zip(chosen, losses, inputs, strict=True))
            return [(by_factors(f, p, b, seed % 3 == 0), one_by_one(f, p, b)) for seed, f, (p, *b) in triples]

        with jax.enable_x64(x64):
            inputs = [clipping_programs.inputs(seed, x64) for seed in chosen]
            texts = [
                str(jax.make_jaxpr(jax.grad(f))(p, (x[0], i[0]))) for f, (p, x, i) in zip(losses, inputs, strict=True)
            ]
            results = jax.jit(both)(inputs)
        for seed, (params, *_), text, (got, want) in zip(chosen, inputs, texts, results, strict=True):
            if "f16[" in text.replace("bf16[", "") and not np.isfinite(want[1]).all():
                continue  # products are accumulated in float32, where what overflows in float16 is finite
            assert {k: g.dtype for k, g in got[0].items()} == {k: p.dtype for k, p in params.items()}
            try:
                assert_same(got, want, next(t for name, t in _TOLERANCES.items() if name in text))
            except AssertionError as error:
                raise AssertionError(f"{seed=}: {error}") from error


def test_random_programs():
    check(range(4))


@pytest.mark.parametrize(
    "first", [pytest.param(n, marks=pytest.mark.long if n % 500 else pytest.mark.slow) for n in range(1000, 3000, 20)]
)
def test_more_random_programs(first):
    check(range(first, first + 20))


def x_of(rows: int = 2, *shape: int, dtype: Any = jnp.float32) -> Any:
    return jnp.asarray(np.random.default_rng(rows).normal(size=(rows, *shape)) + 1, dtype)


def same(losses: Any, params: Any, batch: Any, tolerance: float = 1e-4) -> None:
    """Compare losses of the same parameters and examples, compiled as one program."""
    got = jax.jit(lambda *args: [(by_factors(f, *args), one_by_one(f, *args)) for f in losses])(params, batch)
    for place, (ours, right) in enumerate(got):
        try:
            assert_same(ours, right, tolerance)
        except AssertionError as error:
            raise AssertionError(f"loss {place}: {error}") from error


def test_operands_of_a_product_are_repeated_along_axes_of_length_1():
    def loss(p, x):
        one, row = x[:1, None], x[None]
        total = jnp.sum(p["b"][None] * jnp.ones((3, 1)) * one) + jnp.sum(p["b"][None] / jnp.full((4, 1), 2.0))
        total += jnp.sum(p["w"] * jnp.full((3, 1), 0.5) * row) + jnp.sum(jnp.broadcast_to(p["w"], (3, 2)) * one)
        return total + jnp.sum(p["c"] * row) + jnp.sum((p["c"] * jnp.ones((1, 2))) @ x)

    same([loss], {"b": jnp.ones(2), "w": jnp.ones((1, 2)), "c": jnp.ones((3, 1))}, x_of(3, 2))


def test_a_rule_that_gives_another_shape_is_not_trusted(monkeypatch):
    right = RULES["mul"].apply
    loss = lambda w, x: jnp.sum((w[None] * jnp.ones((3, 1))) * x)

    def wrong(ev, e):
        value = right(ev, e)
        return value.map(lambda t: t.replace(axes=((), *t.axes[1:])), (1, *value.shape[1:]))

    asked = []
    apply = lambda ev, e: asked.append(e) or wrong(ev, e)
    monkeypatch.setitem(RULES, "mul", dataclasses.replace(RULES["mul"], apply=apply))
    same([loss], jnp.ones(4), x_of(2, 3, 1))
    assert asked


half, brain = jnp.float16, jnp.bfloat16
_W = jnp.asarray(np.random.default_rng(0).normal(size=(4, 2)), jnp.float32)
_CASTS = {
    "real to complex": (lambda w, x: jnp.sum((jnp.exp(1j * x) @ w.T).imag) ** 2, _W),
    "real part": (lambda w, x: jnp.real(jnp.sum(w * (1 + 2j) @ x) ** 2), _W),
    "complex of two": (lambda w, x: jnp.sum(jnp.square(jnp.abs(jax.lax.complex(w, 2 * w) @ x))), _W),
    "complex number": (lambda w, x: jnp.abs(jnp.sum((w * jnp.full((1, 2), 1 - 2j)) @ x)), _W),
    "truncated numbers": (lambda w, x: jnp.sum(w * jnp.full((4, 2), 2.7).astype(jnp.int32) @ x), _W),
    "number as boolean": (lambda w, x: jnp.sum(w * jnp.full((4, 1), 2.7).astype(bool) @ x), _W),
    "truncated values": (lambda w, x: jnp.sum((3 * w * x).astype(jnp.int8).astype(jnp.float32) * w), _W),
    "booleans": (lambda w, x: jnp.sum((w > x) * w) + jnp.sum((x > 1) @ w.T), _W),
    "integers": (lambda w, x: jnp.sum(w @ (100 * x).astype(jnp.int32)), _W),
    "through float16, too large": (lambda w, x: jnp.sum(w.astype(half).astype(x.dtype) @ x) * 3e4, _W),
    "through float16, too small": (lambda w, x: jnp.sum(w.astype(half).astype(x.dtype) @ x) * 1e-9, _W),
    "float16, too large": (lambda w, x: jnp.sum(w.astype(x.dtype) @ x) * 3e4, _W.astype(half)),
    "8 bits, too large": (lambda w, x: jnp.sum(w.astype(jnp.float8_e5m2).astype(x.dtype) @ x) * 3e4, _W),
    "bfloat16": (lambda w, x: jnp.sum(jnp.tanh(w.astype(brain) @ x.astype(brain))), _W.astype(brain)),
    "mixed product": (lambda w, x: jnp.einsum("oi,i->", w, x, preferred_element_type=x.dtype), _W.astype(brain)),
    "rounded": (lambda w, x: jnp.sum(jax.lax.reduce_precision(w, 5, 10) @ x) * 3e4, _W),
    # Reassociated products: what the program multiplies in this order fits, what the factors are made of would not.
    "scaled in float16": (
        lambda w, x: jnp.sum((w * half(900)) @ (x.astype(half) * half(1e-3))) * half(900),
        _W.astype(half),
    ),
    "divided in float16": (lambda w, x: jnp.sum((w / half(6e4)) @ (x.astype(half) * half(99))), _W.astype(half)),
    "divided by an array": (lambda w, x: jnp.sum((w / jnp.array([6e4, 5e4], half)) @ x.astype(half)), _W.astype(half)),
    "masked in float16": (
        lambda w, x: jnp.sum((w * jnp.array([900, 8], half)) @ (x.astype(half) * half(1e-3)) * jnp.full(4, 900, half)),
        _W.astype(half),
    ),
}  # fmt: skip
_WIDE = {
    "float32 used as float64": (lambda w, x: jnp.sum(w @ x), _W),
    "beyond float32": (lambda w, x: jnp.sum((w @ (x * 1e60)) * 1e-60), _W),
    "scaled beyond float32": (lambda w, x: jnp.sum(((w.astype(x.dtype) * 1e60) @ x) * 1e-60), _W),
    "float64 used as float32": (lambda w, x: jnp.sum(w.astype(jnp.float32) @ x.astype(jnp.float32)), _W),
    "float16 used as float64": (lambda w, x: jnp.sum(w @ x), _W.astype(half)),
}


@pytest.mark.slow
@pytest.mark.parametrize("x64", [False, True])
def test_casts(x64):
    with jax.enable_x64(x64):
        x = x_of(2, 2, dtype=jnp.float64 if x64 else jnp.float32)
        cases = _CASTS | (_WIDE if x64 else {})
        got = jax.jit(lambda: [(by_factors(f, w, x), one_by_one(f, w, x)) for f, w in cases.values()])()
    for name, (ours, right) in zip(cases, got, strict=True):
        try:
            assert_same(ours, right, 5e-2 if "float8" in name or "bfloat16" in name else 5e-3)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


def test_scales_that_cancel_are_not_squared_alone():
    losses = [
        lambda w, x: jnp.sum((w * 1e25) @ x) * 1e-25,
        lambda w, x: jnp.sum((w * jnp.full((1, 2), 1e-25)) @ x) * 1e25,
        lambda w, x: jnp.sum((w / 1e-30) @ (x * 1e-30)),
    ]
    same(losses, _W, x_of(2, 2))


def test_what_is_not_selected_may_be_nan():
    nan, rows = jnp.nan, np.array([1, 0, 1, 0], bool)
    mixed = np.array([[1, 0], [0, 0], [1, 1], [0, 0]], bool)
    still = jax.lax.stop_gradient
    spoilt = jnp.array([1, nan, 1, 1])
    losses = [
        lambda w, x: jnp.sum(jnp.where(rows[:, None], w, still(w)) @ x * spoilt),
        lambda w, x: jnp.sum(jnp.where(mixed, w, 1) @ x * spoilt),
        lambda w, x: jnp.sum(jnp.where(np.array([1, 0], bool), w, 1) @ (x * jnp.array([1, nan]))),
        lambda w, x: jnp.sum(jnp.where(w > 0, jnp.sqrt(jnp.where(w > 0, w, 0)), 0) @ x),
        lambda w, x: jnp.sum(w.at[1].set(0.0) @ x * spoilt),
        # All examples are spoilt, by what they share: they count as zero.
        lambda w, x: jnp.sum(jnp.sum(w) * jnp.array([nan, 1])) + jnp.sum(w @ x),
        lambda w, x: jnp.sum((w @ x)[:, None] * jnp.full((4, 3), nan)),
    ]
    same(losses, _W, x_of(2, 2))


_INDEX = jnp.array([[1, 7, -1, -5], [0, 2, 3, -4], [5, 6, 9, -9]])


@pytest.mark.parametrize("mode", marked([None, "clip", "fill", "wrap"], quick=(None,)))
def test_an_index_out_of_range_counts_as_it_does_in_the_plain_gradient(mode):
    def read(p, i):
        return p.at[i].get(mode=mode) if mode != "wrap" else jnp.take(p, i, axis=0, mode=mode)

    pairs = lambda p, i: p.at[i, i[::-1]].get(mode="clip" if mode == "wrap" else mode)
    window = lambda p, i: jax.lax.dynamic_slice(p, (i[1], i[0]), (2, 1))
    losses = [
        lambda p, i: jnp.sum(jnp.tanh(read(p, i)) ** 2),  # NaN where it is read out of range by "fill"
        lambda p, i: jnp.sum(read(p, i)),  # the same for all entries: nothing is kept but where they stand
        lambda p, i: jnp.sum(jnp.tanh(read(p, i[1]))),
        lambda p, i: jnp.sum(jnp.tanh(read(p[:1], i))) + jnp.sum(read(p[:1], i)),
        lambda p, i: jnp.sum(jnp.tanh(pairs(p, i))),
        lambda p, i: jnp.sum(jnp.tanh(read(jnp.pad(p, ((3, 2), (1, 0)))[1:], i)) * jnp.arange(4.0)),
        lambda p, i: jnp.sum(read(p * jnp.array([[1.0], [2], [3]]), i) @ jnp.ones((3, 2))),
        lambda p, i: jnp.sum(jnp.tanh(read(jnp.broadcast_to(p[0, 0], (5,)) * p[0, 1], i))) + jnp.sum(p),
        lambda p, i: jnp.sum(read(p @ jnp.arange(6.0).reshape(3, 2), i)) + jnp.sum(p.T @ read(p, i[:3])),
        lambda p, i: jnp.sum(jnp.tanh(window(p, i))) + jnp.sum(read(p, i.astype(jnp.int8)) * 2),
    ]
    p = jnp.arange(9.0).reshape(3, 3) / 5
    same(losses, p, _INDEX)


@pytest.mark.slow  # XLA's older code generator, by which the quick tests compile, takes them for signed
def test_indices_of_few_bits_reach_all_rows():
    loss = lambda p, i: jnp.sum(jnp.tanh(jax.lax.dynamic_slice(p, (i[0], i[1]), (2, 1))))
    same([loss], jnp.arange(900.0).reshape(300, 3) / 900, jnp.array([[200, 1], [255, 9]], jnp.uint8))
