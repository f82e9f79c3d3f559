"""Microbatching in JAX against the plain computation, and against optax where the two agree."""

import functools
import inspect

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax.microbatching as optax
import pytest
from hypothesis import given, settings
from microbatching_cases import assert_same, clip, data, norm

from microtome.jax_impl import (
    AccumulationType,
    Accumulator,
    Aux,
    micro_grad,
    micro_vmap,
    microbatch,
    reshape_batch_axis,
    weighted_mean,
)

SUM, MEAN = AccumulationType.SUM, AccumulationType.MEAN
RUNNING_MEAN, CONCAT = AccumulationType.RUNNING_MEAN, AccumulationType.CONCAT
PARTITIONS = ("strided", "contiguous")
SLOW = functools.partial(pytest.param, marks=pytest.mark.slow)
FEW = settings(derandomize=True, deadline=None, max_examples=8, database=None)


@pytest.mark.parametrize(
    "wrong",
    [(jnp.ones(2),), [jnp.ones(2), jnp.ones(1)], (jnp.ones(3), jnp.ones(1)), (jnp.ones(2, int), jnp.ones(1)),
     (jnp.array([1.0, 1.0001]), jnp.ones(1))],
)  # fmt: skip
def test_the_comparison_can_fail(wrong):
    right = (jnp.ones(2), jnp.ones(1))
    assert_same(right, right)
    with pytest.raises(AssertionError):
        assert_same(wrong, right)


# --- microbatch: values ---------------------------------------------------------------------------------------------


def summary(scale, batch):
    x = batch["x"] * scale
    return {
        "rows": (x, batch["n"]),
        "sum": x.sum(0),
        "mean": x.mean(0),
        "count": batch["n"].sum(),
        "double": x.repeat(2, 0),
    }


JOINED = {"rows": CONCAT, "sum": SUM, "mean": MEAN, "count": SUM, "double": CONCAT}


@pytest.mark.slow
@FEW
@given(
    rows=st.integers(1, 9),
    size=st.none() | st.integers(1, 10),
    partition=st.sampled_from(PARTITIONS),
    dtype=st.sampled_from([jnp.float32, jnp.bfloat16, jnp.float16, jnp.complex64]),
    mean=st.sampled_from([MEAN, RUNNING_MEAN]),
)
def test_equals_the_plain_function(rows, size, partition, dtype, mean):
    batch = {"x": data(rows, 3, dtype=dtype), "n": jnp.arange(rows, dtype=jnp.int8)}
    scale = jnp.asarray(2, dtype)
    fun = microbatch(summary, 1, size, JOINED | {"mean": mean}, remainder="run", partition=partition)
    actual, expected = fun(scale, batch), summary(scale, batch)
    expected["count"] = expected["count"].astype(actual["count"].dtype)
    assert_same(actual, expected)
    assert_same(actual["rows"], expected["rows"], exact=True)
    assert_same(actual["double"], expected["double"], exact=True)


@pytest.mark.parametrize("mean", [SLOW(MEAN), RUNNING_MEAN])
def test_means_weigh_rows(mean):
    x = data(7, 2)
    for size in (2, 4, 5, 9):
        run = microbatch(lambda b: (b**2).mean(), 0, size, mean, remainder="run")
        assert_same(run(x), (x**2).mean())
        rows = micro_vmap(lambda row: (row**2).mean(), microbatch_size=size, accumulator=mean, remainder="run")
        assert_same(rows(x), (x**2).mean())


@pytest.mark.parametrize("size", [None, 1, 3])
def test_an_empty_batch_runs_nothing(size):
    ran = []

    def fun(x):
        jax.debug.callback(lambda: ran.append(1))
        return summary(jnp.bfloat16(2), {"x": x, "n": jnp.ones(len(x), jnp.int32)}), (x.sum(), len(x) * 1.0)

    out, (value, weight) = microbatch(fun, 0, size, (JOINED, weighted_mean()))(jnp.zeros((0, 3), jnp.bfloat16))
    jax.effects_barrier()
    assert not ran
    none = jnp.zeros((0, 3), jnp.bfloat16)
    assert_same(out["rows"], (none, jnp.zeros(0, jnp.int32)))
    assert_same(out["sum"], jnp.zeros(3, jnp.bfloat16))
    assert out["mean"].dtype == jnp.bfloat16
    assert jnp.isnan(out["mean"]).all()
    assert (value, weight) == (0, 0)
    assert_same(micro_vmap(lambda x: x.sum(), microbatch_size=size)(none), jnp.zeros(0, jnp.bfloat16))
    grads, aux = micro_grad(lambda w, x: (w * x).sum(), microbatch_size=size)(jnp.ones(3, jnp.bfloat16), none)
    assert_same((grads, aux.values), (jnp.zeros(3, jnp.bfloat16), jnp.zeros(0, jnp.bfloat16)))


def test_rows_of_each_microbatch():
    seen = microbatch(lambda x: x[None], 0, 2, CONCAT, remainder="run")
    with pytest.raises(ValueError, match=r"shape \(1, 2\) for a full microbatch and \(1, 1\) for the rows left over"):
        seen(jnp.arange(7))
    ends = lambda x: jnp.stack([x[0], x[-1], x[0]])  # 3 entries: no multiple of 2 rows, so in the microbatches' order
    for partition, expected in [("strided", [0, 3, 0, 1, 4, 1, 2, 5, 2]), ("contiguous", [0, 1, 0, 2, 3, 2, 4, 5, 4])]:
        out = microbatch(ends, 0, 2, CONCAT, partition=partition)(jnp.arange(6))
        assert out.tolist() == expected
        total = microbatch(jnp.sum, 0, 2, CONCAT, partition=partition, remainder="run")(jnp.arange(7))
        assert total.tolist() == [expected[3 * k] + expected[3 * k + 1] for k in range(3)] + [6]


@pytest.mark.parametrize("dtype", [SLOW(jnp.float16), jnp.bfloat16])
def test_half_precision_sums_do_not_stall(dtype):
    ones = jnp.ones(1000, dtype)
    assert_same(microbatch(jnp.sum, 0, 1)(ones), dtype(1000), exact=True)
    assert_same(micro_vmap(lambda x: x, microbatch_size=500, accumulator=SUM)(ones), dtype(1000), exact=True)
    assert_same(microbatch(jnp.mean, 0, 1, MEAN)(ones), dtype(1), exact=True)
    pair = lambda x: (x[0], x[0])
    assert_same(microbatch(pair, 0, 1, weighted_mean())(ones), (dtype(1), dtype(1000)), exact=True)
    w = jnp.ones((2, 2), dtype)
    grads, _ = micro_grad(lambda w, x: (w * x).sum(), microbatch_size=250)(w, ones)
    assert_same(grads, 1000 * w, exact=True)


@pytest.mark.parametrize("wide", [False, SLOW(True)])
def test_integers_and_booleans_are_added_by_plus_and_summed_over_examples(wide):
    with jax.enable_x64(wide):
        x = jnp.array([3, -1, 4, -1], jnp.int8)
        fun = lambda b: ((b > 0).any(), b.sum(dtype=jnp.int8), b)
        assert_same(microbatch(fun, 0, 2, (SUM, SUM, CONCAT))(x), fun(x), exact=True)
        rows = [jnp.full(300, 100, dtype) for dtype in (jnp.int8, jnp.int16, jnp.uint8, jnp.int32)]
        each = micro_vmap(lambda *b: (b[0] > 0, *b), microbatch_size=150, accumulator=SUM)(*rows)
        sums = [row.sum() for row in ((rows[0] > 0), *rows)]
        sums[3] = sums[3].astype(int) if wide else sums[3]
        assert_same(each, tuple(sums), exact=True)


def test_weights_neither_wrap_nor_overflow():
    rows = jnp.full(300, 2.0)
    for dtype, one, total in (
        (jnp.int8, 100, jnp.int32(30000)),
        (jnp.float16, 6e4, jnp.float16(jnp.inf)),
        (bool, 1, 300),
    ):
        weights = jnp.full(300, one, dtype)
        both = micro_vmap(lambda x, w: (x, w), microbatch_size=150, accumulator=weighted_mean())(rows, weights)
        assert_same(both, (jnp.float32(2), jnp.asarray(total)), exact=True)
        pair = lambda x, w: (x[0], w[0])
        both = microbatch(pair, (0, 1), 1, weighted_mean())(rows, weights)
        assert_same(both, (jnp.float32(2), jnp.asarray(total)), exact=True)


@pytest.mark.slow
@pytest.mark.parametrize("partition", ["strided", "contiguous"])
def test_num_real_microbatches(partition):
    x = data(7, 2)
    order = {"strided": [[0, 3], [1, 4], [2, 5], [6]], "contiguous": [[0, 1], [2, 3], [4, 5], [6]]}[partition]
    fun = lambda b: (b.sum(0), b.mean(0), b.mean(0), b, (b.mean(), len(b)))
    how = (SUM, MEAN, RUNNING_MEAN, CONCAT, weighted_mean())
    make = functools.partial(microbatch, fun, 0, 2, how, remainder="run", partition=partition)
    traced = jax.jit(lambda x, n: make(num_real_microbatches=n)(x))
    for count in range(5):
        rows = np.array([row for rows in order[:count] for row in rows], int)
        kept = jnp.zeros_like(x).at[rows].set(x[rows])
        mean = x[rows].mean(0) if count else jnp.full(2, jnp.nan)
        pair = (x[rows].mean() if count else jnp.float32(0), jnp.int32(len(rows)))
        expected = (x[rows].sum(0), mean, mean, kept, pair)
        assert_same(traced(x, count), expected)
        if count in (2, 4):
            assert_same(make(num_real_microbatches=count)(x), expected)
            assert_same(make(num_real_microbatches=jnp.int32(count))(x), expected)
    assert traced._cache_size() == 1
    assert_same(traced(x, 99), traced(x, 4), exact=True)


def test_contiguous_padding_at_the_end_is_left_out():
    x = jnp.concatenate([data(6, 2), jnp.full((6, 2), jnp.nan)])
    how = functools.partial(microbatch, microbatch_size=3, argnums=0, partition="contiguous", num_real_microbatches=2)
    assert_same(how(lambda b: b.mean(0), accumulator=MEAN)(x), x[:6].mean(0))
    grads, aux = micro_grad(
        lambda w, b: (w * b).sum(), microbatch_size=3, partition="contiguous", num_real_microbatches=2, accumulator=MEAN
    )(jnp.ones(2), x)
    assert_same(grads, x[:6].mean(0))
    assert_same(aux.values, jnp.concatenate([x[:6].sum(1), jnp.zeros(6)]))


# --- accumulators ---------------------------------------------------------------------------------------------------

LARGEST = Accumulator(
    init=lambda tree: jax.tree.map(lambda x: jnp.full(x.shape, -jnp.inf, x.dtype), tree),
    update=lambda carry, value, index: jax.tree.map(jnp.maximum, carry, value),
    finalize=lambda carry: carry,
    aggregate=lambda tree: jax.tree.map(lambda x: x.max(0), tree),
)


@pytest.mark.parametrize("partition", ["contiguous", SLOW("strided")])
def test_accumulators_of_ones_own(partition):
    x = data(7, 3)
    how = {"microbatch_size": 2, "remainder": "run", "partition": partition}
    fun = lambda b: {"top": {"a": b.max(0), "b": b.max()}, "all": b}
    actual = microbatch(fun, 0, accumulator={"top": LARGEST, "all": CONCAT}, **how)(x)
    assert_same(actual, fun(x), exact=True)
    each = lambda row: (row, {"s": row.sum()})
    actual = micro_vmap(each, accumulator=(LARGEST, LARGEST), **how)(x)
    assert_same(actual, (x.max(0), {"s": x.sum(1).max()}))
    slope = jax.grad(lambda x: microbatch(lambda b: b.max(0), 0, accumulator=LARGEST, **how)(x).sum())(x)
    assert_same(slope, jax.grad(lambda x: x.max(0).sum())(x), exact=True)


def token_loss(w, x, mask):
    """A product with a float mask: unlike where, it lets the NaN of 0/0 through when differentiated."""
    return (jnp.tanh(x @ w).sum(-1) * mask).sum() / mask.sum(), mask.sum()


# Strided by 2, the rows 1 and 4 share a microbatch and count nothing, contiguously the rows 4 and 5.
MASK = jnp.array([1.0, 0, 0, 2, 0, 0, 1])


@pytest.mark.parametrize(
    ("partition", "size"),
    [
        SLOW("contiguous", 2),
        ("contiguous", 7),
        ("strided", 7),
        SLOW("strided", 2),
        SLOW("strided", 1),
        ("contiguous", 1),
    ],
)
def test_weighted_mean(partition, size):
    w, x = data(3, 2), data(7, 3, seed=1)
    fun = microbatch(token_loss, (1, 2), size, weighted_mean(), remainder="run", partition=partition)
    assert_same(fun(w, x, MASK), token_loss(w, x, MASK))
    first, plain = (lambda w, x, f=f: f(w, x, MASK)[0] for f in (fun, token_loss))
    assert_same(jax.jit(jax.grad(first, (0, 1)))(w, x), jax.grad(plain, (0, 1))(w, x))
    if size == 2:  # higher orders and forward mode
        assert_same(jax.jit(jax.hessian(first))(w, x), jax.hessian(plain)(w, x))
        assert_same(jax.jvp(first, (w, x), (w, x)), jax.jvp(plain, (w, x), (w, x)))


@pytest.mark.parametrize("vmap_fn", [SLOW(jax.vmap), lambda *args: jax.vmap(*args)])
def test_weighted_mean_of_examples(vmap_fn):
    w, x = data(3, 2), data(7, 3, seed=1)
    fun = micro_vmap(
        token_loss,
        (None, 0, 0),
        microbatch_size=2,
        accumulator=weighted_mean,
        remainder="run",
        vmap_fn=vmap_fn,  # uncalled
    )
    assert_same(fun(w, x, MASK), token_loss(w, x, MASK))
    actual = jax.grad(lambda w: fun(w, x, MASK)[0])(w)
    assert_same(actual, jax.grad(lambda w: token_loss(w, x, MASK)[0])(w))


@pytest.mark.slow
def test_weighted_mean_of_nothing_is_zero():
    x = data(4, 3)
    fun = lambda w: microbatch(token_loss, (1, 2), 2, weighted_mean())(w, x, jnp.zeros(4))
    (value, weight), slope = fun(jnp.ones((3, 2))), jax.grad(lambda w: fun(w)[0])(jnp.ones((3, 2)))
    assert (value, weight, abs(slope).max()) == (0, 0, 0)


@pytest.mark.slow
def test_weighted_mean_beside_other_accumulators():
    w, x = data(3, 2), data(6, 3, seed=1)

    def fun(w, x, mask):
        return {
            "loss": token_loss(w, x, mask),
            "rows": jnp.tanh(x @ w),
            "grads": (({"w": w * x.mean()},), x[0, 0] > 9),
        }

    how = {"loss": weighted_mean(), "rows": CONCAT, "grads": weighted_mean()}
    run = microbatch(fun, (1, 2), 2, how)
    out = run(w, x, MASK[:6])
    assert_same((out["loss"], out["rows"]), (token_loss(w, x, MASK[:6]), jnp.tanh(x @ w)))
    assert_same(out["grads"], (({"w": 0 * w},), jnp.int32(0)))
    both = lambda f: lambda w: (lambda out: out["loss"][0] + out["rows"].sum())(f(w, x, MASK[:6]))
    assert_same(jax.grad(both(run))(w), jax.grad(both(fun))(w))


# --- calling conventions --------------------------------------------------------------------------------------------


def test_batch_arguments_by_position_or_name():
    def fun(a, b, *, c=None, flag="sum"):
        assert flag in ("sum", "other")
        return (a * b).sum() + (0 if c is None else c.sum())

    a, b, c = data(4, seed=1), data(4, seed=2), data(4, seed=3)
    make = functools.partial(microbatch, fun, microbatch_size=2)
    for run in (
        make(argnums=(0, 1)),
        make(argnums=0, argnames="b"),
        make(argnums=(), argnames=("b", "a")),
        make((-2, -1)),
    ):
        for result in (run(a, b), run(a, b=b), run(b=b, a=a, flag="other")):
            assert_same(result, fun(a, b))
    both = make(argnums=(0, 1), argnames="c")
    assert_same((both(a, b, c=c), both(a, b), both(a, b, c=None)), (fun(a, b, c=c), fun(a, b), fun(a, b)))
    assert inspect.signature(both) == inspect.signature(fun)
    assert both.__name__ == "fun"
    assert_same(microbatch(lambda *args: (args[0] * args[2]).sum(), (0, 2), 2)(a, 3, b), fun(a, b))
    assert_same(microbatch(functools.partial(fun, flag="other"), (0, 1), 2)(a, b), fun(a, b))


def test_axes():
    x, y = data(3, 6), data(6, 2, seed=1)
    fun = lambda x, y: (x["x"] @ y, x["scale"].sum() * y.sum())
    plain = fun({"x": x, "scale": jnp.ones(2)}, y)
    for x_axis in (1, -1):
        run = microbatch(fun, (0, 1), 2, in_axes=({"x": x_axis, "scale": None}, 0))
        assert_same(run({"x": x, "scale": jnp.ones(2)}, y), plain)
    run = microbatch(lambda x, y: x @ y, (0, 1), 4, in_axes=[1, 0], remainder="run")
    assert_same(run(x, np.asarray(y)), x @ y)


def test_vmap_equals_vmap():
    x, w = data(3, 7), data(3, seed=1)
    fun = lambda c, w, *, k=1.0: (c * w * k, {"s": c @ w})
    for size in (None, 1, 2, 3, 7, 8):
        how = {"microbatch_size": size, "remainder": "run"}
        plain = jax.vmap(fun, (1, None))(x, w)
        assert_same(micro_vmap(fun, (1, None), **how)(x, w), plain)
        assert_same(micro_vmap(fun, (1, None), **how)(x, w=w), plain)
    assert_same(micro_vmap(fun, (1, None))(x, w, k=2.0), jax.vmap(lambda c: fun(c, w, k=2.0), 1)(x))
    k = data(7, seed=2)
    assert_same(micro_vmap(fun, [1, None], microbatch_size=7)(x, w, k=k), jax.vmap(fun, (1, None))(x, w, k=k))
    assert_same(micro_vmap(jnp.add, 1, microbatch_size=7)(x, 2 * x), jax.vmap(jnp.add, 1)(x, 2 * x))
    mean = micro_vmap(fun, (1, None), microbatch_size=3, remainder="run", accumulator=(MEAN, {"s": SUM}))(x, w)
    assert_same(mean, (plain[0].mean(0), {"s": plain[1]["s"].sum()}))
    named = functools.partial(jax.vmap, axis_name="i")
    centred = micro_vmap(lambda v: v - jax.lax.pmean(v, "i"), microbatch_size=2, vmap_fn=named, partition="contiguous")
    assert_same(centred(jnp.arange(4.0)), jnp.array([-0.5, 0.5, -0.5, 0.5]))


# --- per-example gradients ------------------------------------------------------------------------------------------


def loss(params, x, y):
    hidden = jnp.tanh(x @ params["w"] + params["b"])
    return jnp.mean((hidden.sum(-1) - y) ** 2) + 0 * params["step"]


PARAMS = {"w": data(3, 2), "b": data(2, seed=1), "step": jnp.int32(7), "unused": data(2, seed=2)}


ONE_GRADIENT = jax.jit(jax.value_and_grad(lambda p, x, y: loss(p | {"step": PARAMS["step"]}, x, y)))


def plain_micro_grad(x, y, transform, metrics):
    """The docstring's loop."""
    floats = {k: v for k, v in PARAMS.items() if k != "step"}
    one = ONE_GRADIENT
    pairs = [one(floats, x[i : i + 1], y[i : i + 1]) for i in range(len(x))]
    grads = [g | {"step": jnp.zeros((), jnp.int32)} for _, g in pairs]
    stack = lambda *trees: jax.tree.map(lambda *a: jnp.stack(a), *trees)
    return stack(*map(transform, grads)), stack(*[v for v, _ in pairs]), stack(*map(metrics, grads))


@pytest.mark.slow
@FEW
@given(
    rows=st.integers(1, 7),
    size=st.none() | st.integers(1, 8),
    accumulator=st.sampled_from([SUM, MEAN, RUNNING_MEAN, CONCAT]),
    partition=st.sampled_from(PARTITIONS),
    transform=st.sampled_from([lambda g: g, clip]),
)
def test_per_example_gradients(rows, size, accumulator, partition, transform):
    x, y = data(rows, 3, seed=3), data(rows, seed=4)
    run = micro_grad(
        loss, batch_argnums=(1, 2), microbatch_size=size, accumulator=accumulator, partition=partition,
        transform_fn=transform, metrics_fn=norm, remainder="run",
    )  # fmt: skip
    grads, aux = jax.jit(run)(PARAMS, x, y)
    each, values, metrics = plain_micro_grad(x, y, transform, norm)
    reduce = {SUM: lambda g: g.sum(0), CONCAT: lambda g: g}.get(accumulator, lambda g: g.mean(0).astype(g.dtype))
    assert_same(grads, jax.tree.map(reduce, each))
    assert_same(aux, Aux(values, metrics, None))


@pytest.mark.slow
def test_gradient_trees():
    x, y = data(4, 3), data(4, seed=1)
    fun = lambda w, x, y, *, z: (((x @ w - y) ** 2).sum() + z.sum(), {"shape": jnp.array(x.shape), "z": z})
    w = data(3, seed=2)
    run = micro_grad(fun, True, (0, 1), batch_argnums=(1, 2), microbatch_size=2, accumulator=CONCAT)
    (gw, gx), aux = run(y=y, w=w, x=x, z=y)
    residual = 2 * (x @ w - y)[:, None]
    assert_same((gw, gx), (residual * x, (residual * w)[:, None]))
    assert_same(aux.aux, {"shape": jnp.tile(jnp.array([1, 3]), (4, 1)), "z": y[:, None]})
    run = micro_grad(lambda w, x: x @ w, keep_batch_dim=False, argnums=[0], transform_fn=lambda g: (g[0], g[0] ** 2))
    assert_same(run(w, x)[0], (x.sum(0), (x**2).sum(0)))
    run = micro_grad(lambda w, x: (w.real * x).sum() ** 2 + (w.imag * x).sum() ** 2, microbatch_size=2)
    c = w + 1j
    assert_same(run(c, x)[0], jax.grad(lambda c: jnp.sum((x @ c.real) ** 2 + (x @ c.imag) ** 2))(c))
    own = lambda g: (g, jnp.float32(1))
    assert_same(micro_grad(lambda w, x: (x @ w).sum(), transform_fn=own, accumulator=weighted_mean())(w, x)[0],
                (x.mean(0), jnp.float32(4)))  # fmt: skip


@pytest.mark.slow
def test_random_functions_do_not_depend_on_the_cut():
    keys, w = jax.random.split(jax.random.key(0), 6), jnp.ones(3)
    draw = lambda key: jax.random.normal(key, (3,))
    noise = jax.vmap(draw)(keys)
    for size, partition in [(1, "strided"), (4, "contiguous")]:
        how = {"microbatch_size": size, "partition": partition, "remainder": "run"}
        assert_same(micro_vmap(draw, **how)(keys), noise, exact=True)
        assert_same(
            micro_grad(lambda w, k: (w * draw(k[0])).sum(), accumulator=CONCAT, **how)(w, keys)[0], noise, exact=True
        )


# --- against optax --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_agrees_with_optax():
    x, y = data(6, 3), data(6, seed=1)
    fun = lambda b: {"a": (b, b.sum(0)), "b": b.mean(), "c": b.max(0)}
    how = lambda kinds: {"a": (kinds.CONCAT, kinds.SUM), "b": kinds.MEAN, "c": kinds.RUNNING_MEAN}
    for size in (2, 6):
        theirs = optax.microbatch(fun, 0, size, how(optax.AccumulationType))(x)
        assert_same(microbatch(fun, 0, size, how(AccumulationType))(x), theirs)
        assert_same(reshape_batch_axis({"x": x}, size), optax.reshape_batch_axis({"x": x}, size), exact=True)
    assert_same(reshape_batch_axis(x.T, 2, -1), optax.reshape_batch_axis(x.T, 2, 1), exact=True)
    for kind in ("CONCAT", "SUM", "RUNNING_MEAN"):  # its MEAN divides by the microbatches that did not run, too
        theirs = optax.microbatch(lambda b: b * 2, 0, 2, optax.AccumulationType[kind], num_real_microbatches=2)(x)
        ours = microbatch(lambda b: b * 2, 0, 2, AccumulationType[kind], num_real_microbatches=2)(x)
        assert_same(ours, theirs)
    for size in (2, 3):
        how = {
            "batch_argnums": (1, 2),
            "microbatch_size": size,
            "transform_fn": lambda g: (g, g**2),
            "metrics_fn": norm,
        }
        fun = lambda w, x, y: (((x @ w - y) ** 2).mean(), x.sum())
        theirs, aux = optax.micro_grad(fun, True, **how)(jnp.ones(3), x, y)
        ours, our_aux = micro_grad(fun, True, **how)(jnp.ones(3), x, y)
        assert_same((ours, tuple(our_aux)), (theirs, tuple(aux)))
        assert our_aux._fields == aux._fields
    assert_same(micro_vmap(jnp.sum, 1, microbatch_size=3)(x.T), optax.micro_vmap(jnp.sum, 1, microbatch_size=3)(x.T))
