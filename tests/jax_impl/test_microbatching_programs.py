"""Microbatching under other transforms: derivatives, nesting, traces, memory and the size of the program."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from microbatching_cases import assert_same, clip, data, norm

from microtome.jax_impl import AccumulationType, micro_grad, micro_vmap, microbatch, weighted_mean

SUM, MEAN = AccumulationType.SUM, AccumulationType.MEAN
RUNNING_MEAN, CONCAT = AccumulationType.RUNNING_MEAN, AccumulationType.CONCAT
PARTITIONS = ("strided", "contiguous")


def energy(w, x):
    return jnp.sum(jnp.tanh(x @ w) ** 2)


@pytest.mark.slow
@pytest.mark.parametrize("partition", PARTITIONS)
def test_composes_with_other_transforms(partition):
    w, x = data(3, 3), data(7, 3, seed=1)
    run = microbatch(energy, 1, 2, remainder="run", partition=partition)
    assert_same(jax.jit(run)(w, x), energy(w, x))
    assert_same(jax.jit(jax.grad(run, (0, 1)))(w, x), jax.grad(energy, (0, 1))(w, x))
    assert_same(jax.jit(jax.hessian(run))(w, x), jax.hessian(energy)(w, x))
    assert_same(jax.jvp(run, (w, x), (w, x)), jax.jvp(energy, (w, x), (w, x)))
    many = jnp.stack([x, 2 * x])
    assert_same(jax.vmap(run, (None, 0))(w, many), jax.vmap(energy, (None, 0))(w, many))


@pytest.mark.slow
def test_nests():
    w, x = data(3, 3), data(7, 3, seed=1)
    many = jnp.stack([x, 2 * x])
    run = microbatch(energy, 1, 2, remainder="run")
    nested = microbatch(run, 1, 4, remainder="run")
    assert_same(jax.jit(jax.grad(nested))(w, x), jax.grad(energy)(w, x))
    both = jax.grad(energy)(w, x) + jax.grad(energy)(w, 2 * x)
    per_row = micro_vmap(lambda row: jax.grad(run)(w, row), microbatch_size=1, accumulator=SUM)
    assert_same(jax.jit(per_row)(many), both)
    slopes = micro_grad(run, microbatch_size=1, keep_batch_dim=False)
    assert_same(jax.jit(slopes)(w, many)[0], both)
    outer = jax.grad(lambda w: micro_grad(energy, microbatch_size=2, remainder="run")(w, x)[0].sum())
    assert_same(jax.jit(outer)(w), jax.grad(lambda w: jax.grad(energy)(w, x).sum())(w))


@pytest.mark.slow
def test_early_stop_composes():
    w, x = data(3, 3), data(7, 3, seed=1)
    run = lambda w, x, n: microbatch(energy, 1, 2, num_real_microbatches=n, remainder="run", partition="contiguous")(
        w, x
    )
    assert_same(jax.jit(jax.grad(run, (0, 1)))(w, x, 2), jax.grad(lambda w, x: energy(w, x[:4]), (0, 1))(w, x))
    assert_same(jax.vmap(run, (None, None, 0))(w, x, jnp.arange(5)),
                jnp.stack([energy(w, x[: 2 * n]) for n in range(5)]))  # fmt: skip


def test_custom_derivatives_survive():
    @jax.custom_vjp
    def fun(w, x):
        return jnp.sum(x @ w)

    fun.defvjp(lambda w, x: (fun(w, x), (w, x)), lambda kept, g: (2 * g * kept[0], 3 * g * kept[1]))
    w, x = data(3), data(4, 3, seed=1)
    assert_same(jax.grad(microbatch(fun, 1, 2), (0, 1))(w, x), (4 * w, 3 * x))
    assert_same(micro_grad(fun, microbatch_size=2)(w, x)[0], 8 * w)
    pair = microbatch(lambda w, x: (fun(w, x), len(x)), 1, 2, weighted_mean())
    assert_same(jax.grad(lambda w, x: pair(w, x)[0], (0, 1))(w, x), (2 * w, 1.5 * x))


@pytest.mark.slow
def test_needs_no_implicit_promotion():
    fun = lambda x: (x.sum(), x.mean(), x.mean(), x, (x.mean(), x[0, 0] > 0))
    how = (SUM, MEAN, RUNNING_MEAN, CONCAT, weighted_mean())
    x = data(5, 2)
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        for dtype in (jnp.float32, jnp.bfloat16):
            run = jax.jit(lambda x, n: microbatch(fun, 0, 2, how, remainder="run", num_real_microbatches=n)(x))
            assert_same(run(x.astype(dtype), 3)[3], x.astype(dtype), exact=True)
        assert_same(micro_vmap(lambda row: (row, row[0] > 0), accumulator=weighted_mean())(x)[1], (x[:, 0] > 0).sum())


def test_traces_once():
    traces = []

    def fun(w, x):
        traces.append(x.shape)
        return energy(w, x)

    w, x = data(3, 3), data(7, 3, seed=1)

    def count(transform, *args):
        traces.clear()
        jax.block_until_ready(transform(*args))
        return len(traces)

    assert count(microbatch(fun, 1, 1), w, x) == 1
    assert count(microbatch(fun, 1, 2, remainder="run"), w, x) == 2
    assert count(jax.grad(microbatch(fun, 1, 1)), w, x) == 1
    assert count(micro_vmap(fun, (None, 0), microbatch_size=2, remainder="run"), w, x[:, None]) == 1
    assert count(micro_grad(fun, microbatch_size=2, remainder="run", transform_fn=clip), w, x) == 1
    assert count(microbatch(lambda w, x: (fun(w, x), 1.0), 1, 1, weighted_mean()), w, x) == 1
    jitted = jax.jit(microbatch(fun, 1, 1))
    assert (count(jitted, w, x), count(jitted, w, x)) == (1, 0)


# --- memory and size of the program ---------------------------------------------------------------------------------

WIDTH = 64


def deep(w, x):
    for _ in range(4):
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def temporary_bytes(fun, *args):
    return jax.jit(fun).lower(*args).compile().memory_analysis().temp_size_in_bytes


VARIANTS = {
    "strided": lambda size: microbatch(deep, 1, size, MEAN),
    "contiguous": lambda size: microbatch(deep, 1, size, RUNNING_MEAN, partition="contiguous"),
    "remainder": lambda size: microbatch(deep, 1, size - 1, MEAN, remainder="run"),
    "weighted": lambda size: (
        lambda w, x: microbatch(lambda w, x: (deep(w, x), (x[:, 0] > 0).sum()), 1, size, weighted_mean())(w, x)[0]
    ),
    "vmap": lambda size: micro_vmap(deep, (None, 0), microbatch_size=size, accumulator=SUM),
}


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_memory_is_flat_in_the_number_of_microbatches(variant):
    w, few, many = data(WIDTH, WIDTH), data(4 * 16, WIDTH), data(32 * 16, WIDTH)
    make = VARIANTS[variant]
    for derive in (lambda f: f, jax.grad):
        plain = temporary_bytes(derive(deep), w, many)
        small, same = (temporary_bytes(derive(make(16)), w, x) for x in (few, many))
        assert same <= 1.1 * small, "grows with the number of microbatches"
        assert small < temporary_bytes(derive(make(256)), w, many), "does not fall with the microbatch"
        # (On CPU one library call runs the whole plain forward pass, and its buffers are not counted.)
        assert same < plain / 2 or derive is not jax.grad


@pytest.mark.slow
def test_memory_of_per_example_gradients():
    w, x = data(WIDTH, WIDTH), data(64, WIDTH)
    scale = lambda g: g / jnp.maximum(norm(g), 1.0)
    peak = {n: temporary_bytes(micro_grad(deep, microbatch_size=n, transform_fn=scale), w, x) for n in (4, 16, 64)}
    assert peak[4] < 0.7 * peak[16] < 0.3 * peak[64]
    assert peak[4] == pytest.approx(
        temporary_bytes(micro_grad(deep, microbatch_size=4, transform_fn=scale), w, x[:16]), rel=0.1
    )
    # Untransformed, XLA merges the products over the examples: no example's gradient ever exists.
    linear = lambda w, x: (x @ w).mean()
    assert temporary_bytes(micro_grad(linear, microbatch_size=64), w, x) < 4 * 64 * WIDTH * WIDTH / 4


def test_one_scan_whatever_the_number():
    text = {n: str(jax.make_jaxpr(microbatch(energy, 1, 2))(data(3, 3), data(2 * n, 3))) for n in (3, 30)}
    assert text[3].count("scan[") == 1
    assert text[3].count("\n") == text[30].count("\n")
    assert str(jax.make_jaxpr(microbatch(energy, 1, None))(data(3, 3), data(6, 3))).count("scan[") == 0
    assert "microbatch" in jax.jit(microbatch(energy, 1, 2)).lower(data(3, 3), data(6, 3)).as_text(debug_info=True)


@pytest.mark.slow
def test_sharded_batches():
    """In a process of its own, since the number of CPU devices is fixed when JAX starts."""
    code = """if True:
        import jax, jax.numpy as jnp
        from jax.sharding import NamedSharding, PartitionSpec as P
        from microtome.jax_impl import *
        mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
        x = jnp.arange(16.0).reshape(8, 2)
        spread = jax.device_put(x, NamedSharding(mesh, P("d")))
        kinds = (AccumulationType.SUM, AccumulationType.CONCAT)
        fun = lambda x: microbatch(lambda b: (b.sum(0), b * 2), 0, 4, kinds)(x)
        compiled = jax.jit(fun).lower(spread).compile()
        assert "all-gather" not in compiled.as_text() and "all-to-all" not in compiled.as_text()
        total, rows = compiled(spread)
        assert (total == x.sum(0)).all() and (rows == 2 * x).all()
        local = lambda x: jax.lax.psum(microbatch(jnp.sum, 0, 2)(x), "d")
        assert jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("d"), out_specs=P()))(spread) == x.sum()
        explicit = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
        with jax.set_mesh(explicit):
            split = reshape_batch_axis(jax.device_put(x, P("d")), 4)
            assert jax.typeof(split).sharding.spec == P(None, "d", None)
    """
    env = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu", "PATH": ""}
    subprocess.run([sys.executable, "-W", "error", "-c", code], env=env, check=True, timeout=300)
