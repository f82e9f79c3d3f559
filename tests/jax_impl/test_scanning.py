"""``sliced_scan``, ``checkpoint_chunked_scan`` and ``Static`` in JAX, against ``lax.scan`` and slices of its output."""

import functools
import math
import pickle
import re

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import powerpax
import pytest
from helpers import marked, temporary
from hypothesis import given, settings
from microbatching_cases import assert_same, data, weak_types

from microtome.jax_impl import Static, checkpoint_chunked_scan, sliced_scan
from microtome.jax_impl.scanning import near_root

FEW = settings(derandomize=True, deadline=None, max_examples=8, database=None)
LENGTHS = st.sampled_from([0, 1, 7, 8, 12])
BOUNDS = st.none() | st.integers(-15, 15)
STEPS = st.none() | st.integers(-9, 9).filter(bool)


def step(carry, x):
    """A carry and outputs of several dtypes; what happens depends on the order of the steps."""
    state = jnp.tanh(carry["state"] * 0.9 + x["a"].sum())
    carry = {"state": state, "count": carry["count"] + x["b"]}
    return carry, {"state": state, "double": 2 * x["a"], "pair": (carry["count"], None), "constant": 1.0}


def case(length, dtype=jnp.float32):
    init = {"state": data(2, dtype=dtype), "count": jnp.int32(0)}
    return init, {"a": data(length, 3, dtype=dtype), "b": jnp.arange(length, dtype=jnp.int32)}


def scan_and_slice(f, init, xs, length=None, reverse=False, unroll=1, **bounds):
    carry, ys = jax.lax.scan(f, init, xs, length, reverse, unroll)
    return carry, jax.tree.map(lambda y: y[slice(*(bounds.get(b) for b in ("start", "stop", "step")))], ys)


@pytest.mark.slow
@FEW
@given(length=LENGTHS, reverse=st.booleans(), unroll=st.sampled_from([1, 3, 40, True]),
       start=BOUNDS, stop=BOUNDS, step_=STEPS)  # fmt: skip
def test_sliced_scan_equals_a_scan_and_a_slice(length, reverse, unroll, start, stop, step_):
    run = lambda scan: jax.jit(
        lambda init, xs: scan(step, init, xs, length, reverse, unroll, start=start, stop=stop, step=step_)
    )(*case(length))
    assert_same(run(sliced_scan), run(scan_and_slice))


@pytest.mark.parametrize("reverse", marked([False, True], quick=(True,)))
def test_every_slice_keeps_the_right_steps(reverse):
    """The bookkeeping over all slices, on a carry that only counts: which entries were kept, in which order."""
    for length in (1, 2, 5):
        for start in (None, 0, 1, 3, -2):
            for stride in (None, 2, 3, 7, -1, -2):
                run = jax.jit(
                    lambda n, xs, s=start, k=stride: sliced_scan(
                        lambda c, x: (c + 1, (c, x)), n, xs, reverse=reverse, start=s, step=k
                    )
                )
                with jax.disable_jit():
                    count, (when, what) = run(0, jnp.arange(length))
                entries = list(range(length))[start::stride]
                assert (count, what.tolist()) == (length, entries)
                assert when.tolist() == [length - 1 - i if reverse else i for i in entries]


@FEW
@given(length=LENGTHS, reverse=st.booleans(), unroll=st.sampled_from([1, 3, 40, True]),
       chunk=st.sampled_from([None, 1, 2, 3, 8, 20, "auto"]))  # fmt: skip
def test_checkpoint_chunked_scan_equals_a_scan(length, reverse, unroll, chunk):
    init, xs = case(length)
    options = {"length": length, "reverse": reverse, "unroll": unroll}
    actual = jax.jit(lambda i, x: checkpoint_chunked_scan(step, i, x, **options, chunk_size=chunk))(init, xs)
    assert_same(actual, jax.jit(lambda i, x: jax.lax.scan(step, i, x, **options))(init, xs))


def test_dtypes():
    init, xs = case(7, jnp.bfloat16)
    run = lambda scan, **options: jax.jit(lambda i, x: scan(step, i, x, **options))(init, xs)
    expected = run(scan_and_slice, step=3)
    assert_same(run(sliced_scan, step=3), expected)
    assert_same(run(checkpoint_chunked_scan, chunk_size=3)[0], expected[0])


def test_python_numbers_in_the_carry_take_the_type_that_the_step_gives():
    for f, init in [
        (lambda c, x: (c + x, c), 0),
        (lambda c, x: (c * 2, c), 0.5),
        (lambda c, x: (c + x.astype(jnp.bfloat16), c), 0.5),
        (lambda c, x: ((c[0] + 1, c[1] * x), c), (jnp.int8(3), 1)),
    ]:
        assert_same(sliced_scan(f, init, data(4), step=2), scan_and_slice(f, init, data(4), step=2))


STEPS_OF_SOME_TYPE = {
    "numbers": (lambda c, x: (c, (1.0, 2, x * 2, x.astype(jnp.float16))), jnp.float32(1)),
    "weak carry": (lambda c, x: (c * 2, c), 0.5),
    "weak carry that x makes strong": (lambda c, x: (c * jnp.float16(x), c + 1), 0.5),
    "strong carry that becomes weak": (lambda c, x: (1.0, c), jnp.float32(1)),
    "several": (lambda c, x: ((c[1], c[0] + x), {"a": c[0], "b": (x, None)}), (0.5, 2.0)),
}


_CARRIES = ("weak carry that x makes strong", "strong carry that becomes weak")


@pytest.mark.parametrize("case", marked(STEPS_OF_SOME_TYPE, quick=_CARRIES))
@pytest.mark.parametrize("weak", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_weak_types_are_those_of_a_scan(case, weak):
    f, init = STEPS_OF_SOME_TYPE[case]
    for length in (0, 1, 7):
        xs = jnp.full(length, 0.5) if weak else jnp.full(length, 0.5, jnp.float32)
        assert xs.weak_type == weak
        types = lambda scan, xs=xs, **options: weak_types(
            jax.eval_shape(functools.partial(scan, f, **options), init, xs)
        )
        expected = types(jax.lax.scan)
        for kept in ({}, {"step": 3}, {"start": 1, "step": 3}, {"step": -2}, {"start": 2, "stop": 2}, {"stop": 1}):
            assert types(sliced_scan, **kept) == expected
        for chunk in (None, 1, 2, 7, "auto"):
            assert types(checkpoint_chunked_scan, chunk_size=chunk) == expected
    whole = jax.lax.scan(f, init, xs)
    assert weak_types(whole) == expected
    for actual, values in (
        (sliced_scan(f, init, xs, start=1, step=3), scan_and_slice(f, init, xs, start=1, step=3)),
        (checkpoint_chunked_scan(f, init, xs, chunk_size=2), whole),
    ):
        assert weak_types(actual) == expected
        assert_same(actual, values)


@pytest.mark.parametrize("jit", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_random_keys_in_the_carry_and_among_entries_and_outputs(jit):
    compiled = jax.jit if jit else lambda fun: fun
    f = lambda key, x: (jax.random.split(key)[0], (key, x["key"], jax.random.uniform(x["key"]) * x["a"]))
    init, xs = jax.random.key(1), {"key": jax.random.split(jax.random.key(2), 7), "a": data(7)}

    def numbers(result):
        carry, (keys, more, draws) = result
        return [jax.random.key_data(k) for k in (carry, keys, more)], draws

    for kept in ({"step": -3}, {"start": 7}, {"start": 1, "step": 2}, {"stop": 1}):
        actual = compiled(lambda init, xs, kept=kept: sliced_scan(f, init, xs, **kept))(init, xs)
        assert_same(numbers(actual), numbers(scan_and_slice(f, init, xs, **kept)), exact=True)
    actual = compiled(lambda init, xs: checkpoint_chunked_scan(f, init, xs, chunk_size=3))(init, xs)
    assert_same(numbers(actual), numbers(jax.lax.scan(f, init, xs)), exact=True)


def test_without_xs():
    count = lambda c, x: (c + 1, (c, x))
    assert_same(sliced_scan(count, 0, None, 5, step=-2), (jnp.int32(5), (jnp.array([4, 2, 0]), None)))
    assert_same(checkpoint_chunked_scan(count, 0, None, 5, chunk_size=2), (jnp.int32(5), (jnp.arange(5), None)))


@pytest.mark.parametrize(
    ("scan", "options"),
    [
        pytest.param(sliced_scan, {"start": 1, "step": 3}, marks=pytest.mark.slow),
        (checkpoint_chunked_scan, {"chunk_size": 3}),
    ],
)
def test_derivatives(scan, options):
    keep = {key: value for key, value in options.items() if key != "chunk_size"}

    def loss(run):
        f = lambda c, x: (jnp.sin(c * x), c * jnp.cos(x))
        return lambda c, xs: sum(jnp.sum(out**2) for out in run(f, c, xs))

    ours, plain = loss(lambda *a: scan(*a, **options)), loss(lambda *a: scan_and_slice(*a, **keep))
    where = data(2), data(7, 2, seed=1)
    grad = lambda fun: jax.grad(fun, (0, 1))
    assert_same(jax.jit(grad(ours))(*where), jax.jit(grad(plain))(*where))
    second = lambda fun: jax.jit(lambda *x: jax.jvp(grad(fun), x, where)[1])(*where)
    assert_same(second(ours), second(plain))


@pytest.mark.slow
def test_equals_powerpax():
    init, xs = case(7)
    for ours, theirs in ((sliced_scan, powerpax.sliced_scan),
                         (checkpoint_chunked_scan, powerpax.checkpoint_chunked_scan)):  # fmt: skip
        options = {"start": -1, "step": -3} if ours is sliced_scan else {"chunk_size": 3}
        run = lambda scan, o=options: jax.jit(lambda i, x: scan(step, i, x, None, True, 2, **o))(init, xs)
        assert_same(run(ours), run(theirs))


def test_traced_once():
    count = 0

    def f(c, x):
        nonlocal count
        count += 1
        return c + x, c

    sliced_scan(f, jnp.float32(0), data(11), start=1, step=3)
    assert count == 1
    checkpoint_chunked_scan(f, jnp.float32(0), data(11), chunk_size=3)
    assert count == 2


def test_vmap_over_scans():
    init, xs = data(3), data(3, 7)
    f = lambda c, x: (c * x, c + x)
    each = jax.vmap(lambda c, x: sliced_scan(f, c, x, step=2))(init, xs)
    assert_same(each, jax.vmap(lambda c, x: scan_and_slice(f, c, x, step=2))(init, xs))


# --- Memory and recomputation ---------------------------------------------------------------------------------------


def wide(c, x):
    """1000 numbers out of each step."""
    return jnp.sin(c), jnp.cumsum(jnp.sin(c * jnp.arange(1000.0)))


@pytest.mark.parametrize(
    ("start", "extra"), [(None, 0), *(pytest.param(n, 0, marks=pytest.mark.slow) for n in (99, 50)), (0, 1)]
)
def test_sliced_scan_never_holds_all_outputs(start, extra):
    # 1000 steps in whole strides, shifted ones, and 1001 steps where the first and the last are kept.
    run = lambda scan: lambda c: scan(wide, c, None, 1000 + extra, start=start, step=100)
    one, kept = 4 * 1000, 10 + extra
    assert temporary(run(scan_and_slice), 1.0) > 1000 * one
    assert temporary(run(sliced_scan), 1.0) < (kept + 8) * one


def test_xs_is_not_copied_in_whole_strides():
    xs = jnp.ones((1000, 1000))
    f = lambda c, x: (c + jnp.sin(x).sum(), c)
    for start in (0, 99):
        used = temporary(lambda xs, s=start: sliced_scan(f, 0.0, xs, start=s, step=100), xs)
        assert used < 1.01 * xs.nbytes / 10  # one stride of 100 steps


def loss_over(scan, size):
    """8 numbers that the derivative needs of each of them, at every step."""

    def f(c, _):
        for _ in range(8):
            c = jnp.sin(c) * c
        return c, None

    return lambda c: jnp.sum(scan(f, c, size)[0])


def test_the_gradient_of_a_checkpointed_scan_takes_a_fraction_of_the_memory():
    c, length = jnp.ones(100), 1024
    plain = loss_over(lambda f, c, n: jax.lax.scan(f, c, None, n), length)
    chunked = lambda size: loss_over(lambda f, c, n: checkpoint_chunked_scan(f, c, None, n, chunk_size=size), length)
    used = {size: temporary(jax.grad(chunked(size)), c) for size in (1, "auto", 256, None)}
    full = temporary(jax.grad(plain), c)
    assert full > 8 * length * c.nbytes
    root = math.isqrt(length)
    # `root` carries, and the residuals of `root` steps, of which there are 24 for each.
    assert used["auto"] < (root + 25 * root) * c.nbytes
    assert used["auto"] < full / 25
    assert used["auto"] < min(used[1], used[256])
    assert used[None] == full


@pytest.mark.parametrize("chunk", marked([None, "auto", 5], quick=("auto",)))
def test_each_step_is_computed_twice_for_the_gradient(chunk):
    ran = []

    @jax.custom_jvp
    def counted(c):
        return jax.pure_callback(lambda value: (ran.append(1), value)[1], jax.ShapeDtypeStruct((), "float32"), c)

    counted.defjvp(lambda primals, tangents: (counted(*primals), tangents[0]))
    f = lambda c, x: (jnp.sin(counted(c) * x), None)

    def runs(fun):
        ran.clear()
        jax.block_until_ready(fun(jnp.float32(1.0)))
        return len(ran)

    scan = lambda c: checkpoint_chunked_scan(f, c, data(12), chunk_size=chunk)[0]
    assert runs(jax.jit(scan)) == 12
    assert runs(jax.jit(jax.value_and_grad(scan))) == 24
    assert runs(jax.jit(jax.value_and_grad(lambda c: jax.lax.scan(f, c, data(12))[0]))) == 12


def test_the_automatic_chunk_is_near_the_root():
    assert [near_root(n) for n in (0, 1, 16, 100, 1000, 10000)] == [1, 1, 4, 10, 25, 100]
    assert near_root(10007) == 101  # a prime: the root, and a shorter last chunk
    for n in range(1, 400):
        assert n <= 4 * near_root(n) ** 2
        assert (near_root(n) - 1) ** 2 <= 4 * n


# --- Static ---------------------------------------------------------------------------------------------------------


def test_static_is_a_node_without_leaves():
    tree = {"x": data(2), "mode": Static(("fast", 3))}
    leaves, treedef = jax.tree.flatten(tree)
    assert len(leaves) == 1
    assert treedef.unflatten(leaves)["mode"] == Static(("fast", 3))
    assert hash(Static("a")) == hash(Static("a"))
    assert pickle.loads(pickle.dumps(Static(3))) == Static(3)
    assert repr(Static(3)) == "Static(value=3)"


def test_static_values_that_python_takes_to_be_equal_are_different_programs():
    traces = []

    @jax.jit
    def fun(static, x):
        traces.append(static.value)
        return x / static.value[0] if isinstance(static.value, tuple) else x * static.value

    for value in (1, 1.0, True, (0.0,), (-0.0,), (1,), (1.0,)):
        expected = jnp.int32(1) / value[0] if isinstance(value, tuple) else jnp.int32(1) * value
        for _ in range(2):
            result = fun(Static(value), jnp.int32(1))
            assert (result, result.dtype) == (expected, expected.dtype)
    assert len(traces) == 7
    assert Static(math.nan) == Static(float("nan"))
    assert Static(frozenset({1})) != Static(frozenset({True}))
    assert Static(1) != 1


def test_static_in_a_scan():
    f = lambda c, x: ((c[0] * x, c[1]), c[1].value)
    carry, ys = sliced_scan(f, (1.0, Static(3)), jnp.arange(1.0, 5.0), step=2)
    assert (float(carry[0]), carry[1], ys.tolist()) == (24.0, Static(3), [3, 3])


# --- Bad input ------------------------------------------------------------------------------------------------------

XS = {"a": np.ones((6, 2)), "b": np.ones(4)}
good = lambda c, x: (c, x)
ERRORS = {
    "lengths": (ValueError, "xs and length must agree on the number of steps: xs['a'] has 6, xs['b'] has 4",
                lambda scan: scan(good, 0.0, XS)),
    "length": (ValueError, "xs has 3, length=4", lambda scan: scan(good, 0.0, np.ones(3), 4)),
    "negative": (ValueError, "length must not be negative, got -1", lambda scan: scan(good, 0.0, None, -1)),
    "length type": (TypeError, "length must be an int or None, got 2.0", lambda scan: scan(good, 0.0, None, 2.0)),
    "no length": (ValueError, "xs holds no array, so the number of steps is unknown. Pass length",
                  lambda scan: scan(good, 0.0)),
    "scalar": (ValueError, "xs['a'] has shape (), so there is no axis to scan over",
               lambda scan: scan(good, 0.0, {"a": 1.0})),
    "no array": (TypeError, "xs must be an array, got a str", lambda scan: scan(good, 0.0, "abc")),
    "init": (TypeError, "init['s'] must be an array, got a str. Wrap it in Static",
             lambda scan: scan(good, {"s": "x"}, np.ones(3))),
    "no callable": (TypeError, "f must be callable, got 3", lambda scan: scan(3, 0.0, np.ones(3))),
    "no pair": (TypeError, "f must return a pair (carry, y)", lambda scan: scan(lambda c, x: c, 0.0, np.ones(3))),
    "dtype": (TypeError, "init['h'] is int32[2], f returns float32[2] for it. Start from float32[2]",
              lambda scan: scan(lambda c, x: ({"h": c["h"] * x}, x), {"h": np.ones(2, np.int32)},
                                np.ones(3, np.float32))),
    "shape": (TypeError, "init[1] is float32[2], f returns float32[4] for it",
              lambda scan: scan(lambda c, x: ((c[0], jnp.tile(c[1], 2)), x), (0.0, jnp.ones(2)), np.ones(3))),
    "tree": (TypeError, "the carry must keep its tree from step to step",
             lambda scan: scan(lambda c, x: ((c,), x), 0.0, np.ones(3))),
    "reverse": (TypeError, "reverse must be a bool, got 'yes'",
                lambda scan: scan(good, 0.0, np.ones(3), reverse="yes")),
    "reverse as a number": (TypeError, "reverse must be a bool, got 2",
                            lambda scan: scan(good, 0.0, np.ones(3), reverse=2)),
    "unroll": (ValueError, "unroll must be a positive int or a bool, got 0",
               lambda scan: scan(good, 0.0, np.ones(3), unroll=0)),
}  # fmt: skip
OWN_ERRORS = {
    "step": (ValueError, "step must not be 0", lambda: sliced_scan(good, 0.0, np.ones(3), step=0)),
    "start": (TypeError, "start must be an int or None, got 1.5",
              lambda: sliced_scan(good, 0.0, np.ones(3), start=1.5)),
    "chunk": (ValueError, "chunk_size must be a positive int or 'auto', or None for a single chunk, got 0",
              lambda: checkpoint_chunked_scan(good, 0.0, np.ones(3), chunk_size=0)),
    "chunk type": (TypeError, "got 2.0 of type float",
                   lambda: checkpoint_chunked_scan(good, 0.0, np.ones(3), chunk_size=2.0)),
    "chunk name": (ValueError, "None for a single chunk, got 'root'",
                   lambda: checkpoint_chunked_scan(good, 0.0, np.ones(3), chunk_size="root")),
    "static": (TypeError, "the value of Static must be hashable, got a list: [1]. Make it a tuple",
               lambda: Static([1])),
}  # fmt: skip


@pytest.mark.parametrize("scan", [sliced_scan, checkpoint_chunked_scan])
@pytest.mark.parametrize("case", ERRORS)
def test_errors(scan, case):
    kind, message, call = ERRORS[case]
    with pytest.raises(kind, match=re.escape(message)):
        call(scan)


@pytest.mark.parametrize("case", OWN_ERRORS)
def test_errors_of_one(case):
    kind, message, call = OWN_ERRORS[case]
    with pytest.raises(kind, match=re.escape(message)):
        call()
