"""Casts of per-example gradients and of data: what they round away counts where it is all that is left."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from helpers import crossed, marked

from microtome import torch_api as mt
from microtome.jax_impl import clipped_grad, micro_grad
from microtome.jax_impl.factors.casts import Casts
from microtome.jax_impl.program.inline import batched_variables


def _loss(w, x, y):
    return ((x @ w) * y).sum()


def _to(dtype):
    return lambda g: g.astype(dtype).astype(g.dtype)


def _inputs(dtype):
    rng = np.random.default_rng(0)
    return tuple(jnp.asarray(rng.normal(size=s), dtype) for s in ((6, 5), (3, 4, 6), (3, 4, 5)))


bf16, f16, f32, f64, e8m0 = jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64, jnp.float8_e8m0fnu
SEEN = {
    "residual": (f32, lambda g: g - _to(bf16)(g)),
    "residual, the other way round": (f32, lambda g: _to(bf16)(g) + -1.0 * g),
    "high and low part": (f32, lambda g: {"high": g.astype(bf16), "low": (g - _to(bf16)(g)).astype(bf16)}),
    "residual of a scaled copy": (f32, lambda g: g * 0.5 - _to(bf16)(g * 0.5)),
    "residual in two places": (f32, lambda g: jnp.stack([g.T, -_to(bf16)(g).T]).sum(0)),
    "residual by a product": (f32, lambda g: jnp.einsum("i,iab", jnp.array([1.0, -1]), jnp.stack([g, _to(bf16)(g)]))),
    "residual by scatter": (f32, lambda g: g.at[1:3].add(-_to(bf16)(g)[1:3])),
    "residual of a residual": (f32, lambda g: (r := g - _to(bf16)(g)) - _to(bf16)(r)),
    "residual, stepwise": (f32, lambda g: jax.lax.fori_loop(0, 2, lambda _, r: r - _to(bf16)(r), g)),
    "residual in half": (bf16, lambda g: g.astype(f32) * 1.001 - _to(bf16)(g.astype(f32) * 1.001)),
    "of a gradient that was bfloat16": (bf16, lambda g: g.astype(f32) - _to(bf16)(g.astype(f32))),
    "residual of 64 bits": (f64, lambda g: g - _to(f32)(g)),
    "of a gradient that was of 32 bits": (f32, lambda g: g.astype(f64) - _to(f32)(g.astype(f64))),
    "residual by a transposed map": (f32, lambda g: jax.linear_transpose(lambda g: _to(bf16)(g) - g, g)(g)[0]),
    "residual in an array that is written to": (
        f32,
        lambda g: (
            jax.lax.dynamic_update_slice(jnp.zeros((2, *g.shape), g.dtype).at[0].set(g), -_to(bf16)(g)[None], (1, 0, 0))
        ).sum(0),
    ),
    "between norms": (f32, lambda g: g * ((g**2).sum() - (_to(bf16)(g) ** 2).sum())),
    "between norms, added": (f32, lambda g: g * (-1.0 * (g**2).sum() + (_to(bf16)(g) ** 2).sum())),
    "between scalar products": (f32, lambda g: g * (jnp.vdot(g, g) + jnp.vdot(g, -_to(bf16)(g)))),
    "between norms, roots": (f32, lambda g: g * (jnp.linalg.norm(g) - jnp.linalg.norm(_to(bf16)(g)))),
    "scales without a sign": (f32, lambda g: _to(e8m0)(g * g)),
    "too small": (f16, lambda g: (g.astype(f32) * 1e-9).astype(f16).astype(f32) * 1e9),
    "too small, scaled in half": (f16, lambda g: (g.astype(f32) * 1e-9).astype(f16) * f16(3e4)),
    "too small, its norm": (f16, lambda g: g / (1e-3 + jnp.linalg.norm((g.astype(f32) * 1e-9).astype(f16)))),
    "too large for 32 bits": (f64, lambda g: (g * 1e39).astype(f32).astype(f64)),
    "too large for 32 bits, scaled down": (f64, lambda g: (g * 1e39).astype(f32) * f32(1e-30)),
    "too large for 32 bits, divided": (f64, lambda g: (g * 1e39).astype(f32) / jnp.full((*g.shape[:1], 1), 1e30, f32)),
    "too small for 32 bits, by a constant": (f64, lambda g: (g * 1e-50).astype(f32) * jnp.float32(1e30)),
    "too small for 32 bits": (f64, lambda g: (g * 1e-50).astype(f32).astype(f64) * 1e50),
    "too small for bfloat16": (f64, lambda g: (g * 1e-50).astype(bf16).astype(f64) * 1e50),
}


def _wide(tree):
    return jax.tree.map(lambda g: g.astype(f64), tree)


def _close(result, expected):
    """Up to the rounding of the gradients, which is no residual."""

    def close(a, b):
        size = np.abs(b).max(initial=0, where=np.isfinite(b))
        np.testing.assert_allclose(np.asarray(a, np.float64), b, rtol=0.05, atol=0.02 * size)

    jax.tree.map(close, result, expected)


_NEAR = (  # others of their kind are quick
    *("residual of 64 bits", "residual in two places", "residual, stepwise", "residual, the other way round"),
    *("residual of a scaled copy", "too small, its norm", "residual of a residual"),
    *("residual in an array that is written to", "between norms, added"),
    *("too large for 32 bits, divided", "too large for 32 bits, scaled down", "too small for 32 bits, by a constant"),
    *("too small, scaled in half", "too small for bfloat16", "between norms, roots"),
)


@pytest.mark.parametrize("name", marked(SEEN, slow=_NEAR))
def test_what_a_cast_rounds_away_counts(name):
    dtype, transform = SEEN[name]
    with jax.enable_x64(True):
        w, x, y = _inputs(dtype)
        parts = jax.vmap(lambda x, y: _wide(transform(jax.grad(_loss)(w, x[None], y[None]))))(x, y)
        expected = jax.tree.map(lambda g: g.sum(0), parts)
        fun = micro_grad(_loss, transform_fn=transform, batch_argnums=(1, 2))
        _close(fun(w, x, y)[0], expected)
        _close(jax.jit(fun)(w, x, y)[0], expected)


@pytest.mark.parametrize("name", [name for name in SEEN if name.startswith(("residual", "of", "too small for"))])
def test_clipping_sees_what_a_cast_rounds_away(name):
    dtype, transform = SEEN[name]
    with jax.enable_x64(True):
        w, x, y = _inputs(dtype)
        parts = jax.vmap(lambda x, y: _wide(transform(jax.grad(_loss)(w, x[None], y[None]))))(x, y)
        norms = jnp.sqrt(sum(jnp.square(g).reshape(3, -1).sum(1) for g in jax.tree.leaves(parts)))
        bound = float(jnp.median(norms)) or 1.0
        scales = jnp.minimum(1, bound / jnp.maximum(norms, bound))
        options = {"l2_clip_norm": bound, "batch_argnums": (1, 2), "dtype": f64}
        result = clipped_grad(_loss, pre_clipping_transform=transform, **options)(w, x, y)
        _close(result, jax.tree.map(lambda g: jnp.einsum("i,i...", scales, g), parts))


def _product(w, x):
    return x @ w


def _lookup(w, x):
    return w[jnp.abs(x * 3).astype(jnp.int32) % len(w)]


def _stepwise(w, x):
    return jax.lax.scan(lambda c, row: (c, row @ w), 0, x)[1]


def _convolved(w, x):
    return jax.lax.conv_general_dilated(x[..., None], w[:, None], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))


# A path in float32 beside the same path through a cast, by what is compared.
COMPARED = {
    "products": (_product, lambda a, b: 100 * jnp.square(a - b).sum()),
    "products, with another part": (_product, lambda a, b: 100 * jnp.square(a - b).sum() + a.sum() * 1e-4),
    "functions of products": (_product, lambda a, b: jnp.tanh(a).sum() - jnp.tanh(b).sum()),
    "lookups": (_lookup, lambda a, b: 100 * jnp.square(a - b).sum()),
    "products in a loop": (_stepwise, lambda a, b: 100 * jnp.square(a - b).sum()),
    "convolutions": (_convolved, lambda a, b: 100 * jnp.square(a - b).sum()),
}


@pytest.mark.parametrize(("name", "dtype"), crossed(COMPARED, [bf16, jnp.float8_e5m2]))
def test_a_loss_that_compares_a_parameter_with_its_copy_in_half(name, dtype):
    path, distance = COMPARED[name]

    def loss(w, x):
        return distance(path(w, x), path(_to(dtype)(w), x))

    w, x, _ = _inputs(f32)
    fun = clipped_grad(loss, l2_clip_norm=1e30, keep_batch_dim=False, return_grad_norms=True)
    grads = [jax.grad(loss)(w, row) for row in x]  # what is left is rounding, which the order of sums changes
    result, aux = fun(w, x)
    np.testing.assert_allclose(aux.grad_norms, [jnp.linalg.norm(g) for g in grads], rtol=0.2)
    total = sum(grads)
    assert jnp.linalg.norm(result - total) < 0.3 * jnp.linalg.norm(total)


def test_a_loop_that_compares_a_parameter_with_its_copy_in_half():
    def loss(w, x):
        step = lambda c, row: (c + 100 * jnp.square(row @ w - row @ _to(bf16)(w)).sum(), None)
        return jax.lax.scan(step, 0.0, x)[0]

    w, x, _ = _inputs(f32)
    _, aux = clipped_grad(loss, l2_clip_norm=1e30, keep_batch_dim=False, return_grad_norms=True)(w, x)
    np.testing.assert_allclose(aux.grad_norms, [jnp.linalg.norm(jax.grad(loss)(w, row)) for row in x], rtol=0.2)


def test_norms_of_a_large_tree_in_mixed_precision_keep_factors():
    """The norm of the tree is a sum of a thousand numbers, of which each other one is of a rounded gradient."""

    def squared(gs):
        return sum((jnp.square(_to(bf16)(g) if i % 2 else g).sum() for i, g in enumerate(gs)), start=jnp.zeros(()))

    closed = jax.make_jaxpr(squared)([jnp.ones((3, 2))] * 1200)
    casts = Casts(closed.jaxpr, batched_variables(closed.jaxpr, [True] * 1200))
    found = [casts.rounds(e, 0) for e in closed.jaxpr.eqns if e.primitive.name == "convert_element_type"]
    assert found == [""] * 1200


def _table_and_rows():
    rng = np.random.default_rng(0)
    return jnp.asarray(rng.normal(size=(400, 16)), f32), jnp.asarray(rng.integers(0, 400, (3, 2)))


def test_a_table_that_is_looked_up_and_multiplied_with_in_half_keeps_factors():
    """As language models do whose output layer is their embedding, in mixed precision."""
    w, ids = _table_and_rows()

    def loss(w, ids):
        logits = jnp.tanh(w[ids].astype(bf16)) @ w.astype(bf16).T
        return jax.nn.logsumexp(logits.astype(f32), axis=-1).sum()

    fun = clipped_grad(loss, l2_clip_norm=1.0, keep_batch_dim=False, return_grad_norms=True)
    assert {path.path for path in fun.explain(w, ids).paths.values()} == {"factored"}
    norms = [jnp.linalg.norm(jax.grad(loss)(w, row)) for row in ids]
    np.testing.assert_allclose(jax.jit(fun)(w, ids)[1].grad_norms, norms, rtol=0.02)


@pytest.mark.slow
def test_a_table_that_is_looked_up_and_multiplied_with_under_autocast_keeps_factors():
    def in_torch(w, ids):
        with torch.autocast("cpu", torch.bfloat16):
            logits = torch.nn.functional.linear(torch.nn.functional.embedding(ids, w).tanh(), w)
            return logits.float().logsumexp(-1).sum()

    found = mt.clipped_grad(in_torch, l2_clip_norm=1.0, keep_batch_dim=False)
    arguments = [torch.tensor(np.asarray(a)) for a in _table_and_rows()]
    assert {path.path for path in found.explain(*arguments).paths.values()} == {"factored"}


def test_torch_sees_what_a_cast_rounds_away():
    torch.manual_seed(0)
    w, x, y = torch.randn(6, 5), torch.randn(3, 4, 6), torch.randn(3, 4, 5)
    for transform in (
        lambda g: g - g.bfloat16().float(),
        lambda g: g.double() - g.double().bfloat16(),
        lambda g: torch.stack([g, -g.bfloat16()]).sum(0),
        lambda g: torch.sub(g, g.half(), alpha=1),
        lambda g: torch.lerp(g, g.bfloat16().float(), 1.0) - g,
    ):
        result, _ = mt.micro_grad(_loss, transform_fn=transform, batch_argnums=(1, 2))(w, x, y)
        parts = [transform(torch.func.grad(_loss)(w, x[i : i + 1], y[i : i + 1])) for i in range(3)]
        torch.testing.assert_close(result, sum(parts), rtol=0.05, atol=0.02 * float(sum(parts).abs().max()))


@pytest.mark.parametrize("dtype", marked([f32, bf16], quick=(f32,)))
def test_casts_that_round_only_keep_factors(dtype):
    """Mixed precision: parameters used in bfloat16, gradients clipped in float32, twice."""

    def loss(p, x):
        low = lambda w: w.astype(bf16)
        hidden = jnp.tanh(x.astype(bf16) @ low(p["tied"]))
        return jnp.square((hidden @ low(p["tied"]).T) @ low(p["out"])).sum().astype(f32)

    def clip(grads):
        norm = jnp.sqrt(sum(jnp.square(g.astype(f32)).sum() for g in jax.tree.leaves(grads)))
        return jax.tree.map(lambda g: (g.astype(f32) * jnp.minimum(1, 1 / norm)).astype(g.dtype), grads)

    def example(p, x):
        return clip(jax.grad(loss)(p, x[None]))

    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (4, 3, 16))
    p = {"tied": jax.random.normal(keys[1], (16, 16), dtype), "out": jax.random.normal(keys[2], (16, 16), dtype)}
    fun = micro_grad(loss, transform_fn=lambda g: clip(clip(g)))
    assert {path.path for path in fun.explain(p, x).paths.values()} == {"factored"}
    parts = jax.vmap(example, (None, 0))(p, x)
    _close(jax.jit(fun)(p, x)[0], jax.tree.map(lambda g: g.astype(f32).sum(0), parts))


# Of what an example's data alone say, as written: products of numbers, sums, casts.
DATA = {
    "quantisation error": lambda x, z: x * 3 - _to(bf16)(x * 3),
    "two-sum": lambda x, z: x - ((x + z) - z),
    "two-sum, scaled": lambda x, z: x * 3 - ((x * 3 + z * 2) - z * 2),
    "two-sum in half": lambda x, z: x.astype(f16) - ((x.astype(f16) + z.astype(f16)) - z.astype(f16)),
    "error of 64 bits": lambda x, z: x.astype(f64) / 3 - _to(f32)(x.astype(f64) / 3),
}


@pytest.mark.parametrize(("name", "values"), crossed(DATA, [False, True]))
def test_gradients_that_are_made_of_data_alone_are_computed_as_written(name, values):
    loss = lambda w, x, z: (DATA[name](x, z).astype(f32) * w).sum()
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        w, x, z = (jnp.asarray(rng.normal(size=s), f32) for s in ((4, 6), (5, 4, 6), (5, 4, 6)))
        z = z * 1e3
        options = {"l2_clip_norm": 1e30, "batch_argnums": (1, 2), "keep_batch_dim": False}
        fun = clipped_grad(loss, **options, return_values=values, return_grad_norms=True)
        grads = jax.vmap(jax.grad(loss), (None, 0, 0))(w, x, z)
        result, aux = jax.jit(fun)(w, x, z)
        np.testing.assert_allclose(aux.grad_norms, jnp.linalg.norm(grads.reshape(5, -1), axis=1), rtol=1e-4)
        np.testing.assert_allclose(result, grads.sum(0), rtol=1e-4, atol=1e-4 * float(jnp.abs(grads).max()))
        assert float(jnp.abs(grads).max()) > 0


@pytest.mark.parametrize(
    ("offset", "dtype"),
    [(1024, f16), pytest.param(512, f16, marks=pytest.mark.slow), pytest.param(192, bf16, marks=pytest.mark.slow)],
)
def test_norms_in_half_precision_of_inputs_with_an_offset(offset, dtype):
    """Whole numbers, which half precision holds, and cotangents that add up to zero."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(offset + 2 * rng.integers(0, 4, (4, 6, 32)), dtype)
    v = rng.integers(-8, 9, (4, 6, 8))
    v[:, -1] -= v.sum(1)
    loss = lambda w, x, v: jnp.sum((x.astype(dtype) @ w.astype(dtype)).astype(f32) * v)
    w, v = jnp.zeros((32, 8), f32), jnp.asarray(v, f32)
    options = {"batch_argnums": (1, 2), "keep_batch_dim": False, "return_grad_norms": True}
    _, aux = jax.jit(clipped_grad(loss, l2_clip_norm=1.0, **options))(w, x, v)
    grads = [np.asarray(jax.grad(loss)(w, *row), np.float64) for row in zip(x, v, strict=True)]
    np.testing.assert_allclose(aux.grad_norms, [np.linalg.norm(g) for g in grads], rtol=1e-3)


@pytest.mark.parametrize("size", marked([1e-18, 1e-19, 5e-20, 1e-21, 1e-25], quick=(1e-25,)))
def test_the_bound_holds_where_squares_are_flushed_to_zero(size):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(5, 4, 6)), f32)
    fun = clipped_grad(lambda w, x: (w * x).sum() * size, l2_clip_norm=1e-21, keep_batch_dim=False)
    for row in x:
        clipped = np.asarray(fun(jnp.ones((4, 6)), row[None]), np.float64)
        assert np.linalg.norm(clipped) <= 1e-21 * (1 + 1e-5)


@pytest.mark.parametrize(("size", "dtype"), crossed([1, None], [jnp.float8_e4m3fn, jnp.float8_e5m2]))
def test_parameters_of_8_bits(dtype, size):
    """JAX promotes them to no other type by itself."""
    losses = {
        "entries": lambda w, x: jnp.sum(w.astype(f32) * x),
        "product": lambda w, x: (x.astype(w.dtype) @ w).astype(f32).sum(),
        "sequence": lambda w, x: jnp.tanh(jnp.outer(x[0], x[0]) @ w.astype(f32)).sum(),
    }
    w, x = jnp.ones(2, dtype), jnp.array([[1.0, 2], [0.5, 0.25], [8, 4]])
    for loss in losses.values():
        each = jax.vmap(jax.grad(loss), (None, 0))(w, x[:, None]).astype(f32)
        parts = each * jnp.minimum(1, 1 / jnp.linalg.norm(each, axis=1, keepdims=True))
        for fun, expected in (
            (lambda *args, f=loss: micro_grad(f, microbatch_size=size)(*args)[0], each.sum(0)),
            (clipped_grad(loss, l2_clip_norm=1.0, microbatch_size=size), parts.sum(0)),
        ):
            got = fun(w, x)
            assert got.dtype == dtype
            np.testing.assert_allclose(got.astype(f32), expected, rtol=0.15)


@pytest.mark.parametrize("number", [0.1, 2.0, np.float64(0.5), 3])
def test_parameters_times_numbers_of_python(number):
    loss = lambda b, y: jnp.sum(jnp.stack([b * number, b + b * number]) * y)
    y = jnp.arange(6.0).reshape(3, 2)
    got = clipped_grad(loss, l2_clip_norm=1e6, keep_batch_dim=False)(jnp.ones(2), y)
    np.testing.assert_allclose(got, jax.vmap(jax.grad(loss), (None, 0))(jnp.ones(2), y).sum(0), rtol=1e-6)
