"""``chunked_vmap`` in JAX against ``jax.vmap``, and against powerpax where the two agree."""

import re

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import powerpax
import pytest
from helpers import Pair, temporary
from hypothesis import given, settings
from microbatching_cases import assert_same, data, weak_types

from microtome.jax_impl import chunked_vmap

FEW = settings(derandomize=True, deadline=None, max_examples=8, database=None)
# Length 0, 1, prime, a multiple of some chunk; chunks that divide, that do not, and that are larger.
LENGTHS, CHUNKS = st.sampled_from([0, 1, 7, 8]), st.sampled_from([None, 1, 2, 3, 8, 11])


def example(x, w, *, scale):
    """Outputs of several dtypes and ranks, one of them the same for all examples, one that no argument reaches."""
    pair = Pair(x["a"] @ w + scale, x["a"].sum(0) > 0)
    return {"pair": pair, "row": x["b"], "shared": w.sum(), "constant": 1.0, "none": None}


def mapped_by(vmap, args, scale):
    axes = ({"a": -2, "b": 1}, None), {"pair": Pair(-1, 1), "row": -1, "shared": None, "constant": 0, "none": 0}
    return jax.jit(lambda args, scale: vmap(example, *axes)(*args, scale=scale))(args, scale)


@FEW
@given(length=LENGTHS, chunk=CHUNKS, dtype=st.sampled_from([jnp.float32, jnp.bfloat16, jnp.complex64]))
def test_equals_vmap(length, chunk, dtype):
    x = {"a": data(2, length, 3, dtype=dtype), "b": jnp.arange(2 * length, dtype=jnp.int32).reshape(2, length)}
    call = (x, data(3, seed=1, dtype=dtype)), data(length, seed=2, dtype=dtype)
    chunked = lambda fun, in_axes, out_axes: chunked_vmap(fun, chunk, in_axes, out_axes)
    actual, expected = mapped_by(chunked, *call), mapped_by(jax.vmap, *call)
    assert_same(actual, expected)
    assert_same(actual["row"], expected["row"], exact=True)


@FEW
@given(length=LENGTHS, chunk=st.sampled_from([1, 2, 3, 8, 11]))
def test_equals_powerpax(length, chunk):
    fun = lambda x, *, y: {"sum": x.sum() * y, "x": x}
    call = lambda mapped: jax.jit(mapped(fun, chunk))(data(length, 2), y=data(length))
    assert_same(call(chunked_vmap), call(powerpax.chunked_vmap))


def test_structured_axes():
    fun = lambda pair, w: (pair[0] * w["a"], {"s": pair[1]["y"] + w["b"]})
    pair, w = (data(4, 7), {"y": data(7, 4)}), {"a": data(4), "b": data(7, 4)}
    for in_axes in (((-1, 0), {"a": None, "b": 0}), [(1, {"y": -2}), {"a": None, "b": 0}]):
        for out_axes in (-1, (-2, {"s": 1})):
            actual = jax.jit(chunked_vmap(fun, 3, in_axes, out_axes))(pair, w)
            assert_same(actual, jax.vmap(fun, in_axes, out_axes)(pair, w))
    assert_same(chunked_vmap(lambda x, *, y: x + y, 3, None)(1.0, y=data(7)), 1 + data(7))
    assert_same(chunked_vmap(lambda x, *, flag: x if flag else -x, 3)(data(7), flag=True), data(7))


@pytest.mark.parametrize("length", [0, 1, 7, 8])
def test_weak_types_are_those_of_vmap(length):
    def fun(x, key, *, shared):
        kept = {"weak": x * 2, "number": 1.0, "whole": 3, "shared": shared + 1, "flag": x > 0}
        return kept | {"strong": jnp.float16(1) * x, "mixed": (x + shared, key, jnp.float32(x))}

    weak = {"x": jnp.full(length, 0.5), "shared": 2.0}
    out_axes = dict.fromkeys(("weak", "number", "whole", "flag", "strong", "mixed"), 0) | {"shared": None}
    for x in (weak, jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), weak)):
        keys = jax.random.split(jax.random.key(0), length)
        map_by = lambda vmap, x=x, keys=keys: jax.eval_shape(
            vmap(lambda a, key: fun(a, key, shared=x["shared"]), in_axes=0, out_axes=out_axes), x["x"], keys
        )
        expected = map_by(jax.vmap)
        assert expected["weak"].weak_type == (x is weak)
        for chunk in (None, 1, 2, 3, 8, 11):
            actual = map_by(lambda fun, chunk=chunk, **axes: chunked_vmap(fun, chunk, **axes))
            assert weak_types(actual) == weak_types(expected)


def loss_by(vmap):
    fun = lambda x, w: (jnp.sin(x @ w) * x, x > 0, x.astype(jnp.float16), w.sum())
    outputs = lambda x, w: vmap(fun, (1, None), (1, 0, -1, None))(x, w)
    return lambda x, w: sum(jnp.sum(out.astype(jnp.float32) ** 2) for out in outputs(x, w))


@pytest.mark.parametrize("order", [pytest.param("reverse", marks=pytest.mark.slow), "forward", "second"])
def test_derivatives(order):
    # Chunks of 3 in 7: the loop, and the chunk after it.
    where = data(2, 7), data(2, seed=1)
    grad = lambda loss: jax.grad(loss, (0, 1))
    derivative = {
        "reverse": grad,
        "forward": lambda loss: lambda *x: jax.jvp(loss, x, where),
        "second": lambda loss: lambda *x: jax.jvp(grad(loss), x, where),
    }[order]
    ours = lambda fun, in_axes, out_axes: chunked_vmap(fun, 3, in_axes, out_axes)
    assert_same(jax.jit(derivative(loss_by(ours)))(*where), jax.jit(derivative(loss_by(jax.vmap)))(*where))


def test_composes():
    x = data(5, 6, 2)
    inner = lambda row: chunked_vmap(jnp.sum, 4)(row)
    assert_same(jax.jit(chunked_vmap(inner, 2))(x), x.sum(2))
    assert_same(jax.vmap(inner)(x), x.sum(2))


@pytest.mark.slow
def test_what_an_example_draws_depends_on_its_key_alone():
    keys = jax.random.split(jax.random.key(3), 7)
    draw = lambda key, x: (jax.random.bernoulli(key, 0.5, (8,)) * x, jax.random.fold_in(key, 1))
    whole, new_keys = jax.vmap(draw)(keys, data(7))
    assert len({tuple(row) for row in (whole != 0).tolist()}) > 1
    out, out_keys = jax.jit(chunked_vmap(draw, 3))(keys, data(7))
    assert_same(out, whole, exact=True)
    assert out_keys.dtype == new_keys.dtype
    assert_same(jax.random.key_data(out_keys), jax.random.key_data(new_keys), exact=True)


def operations(jaxpr):
    """The operations of a jaxpr with what they compute, wherever it calls another."""
    found = []
    for eqn in jaxpr.eqns:
        inner = [p.jaxpr for p in eqn.params.values() if hasattr(p, "jaxpr")]
        if inner:
            found += [op for body in inner for op in operations(body)]
        else:
            found.append((eqn.primitive.name, [str(v.aval) for v in (*eqn.invars, *eqn.outvars)]))
    return found


def layer(x, w, b):
    return jax.nn.softmax(jnp.tanh(x @ w) + b, axis=-1)


def test_a_chunk_has_the_operations_of_a_batch_written_by_hand():
    x, w, b = data(4, 5), data(5, 6), data(6)
    by_hand = operations(jax.make_jaxpr(layer)(x, w, b).jaxpr)
    assert [name for name, _ in by_hand].count("dot_general") == 1
    # One chunk that holds everything is the batch.
    mapped = operations(jax.make_jaxpr(chunked_vmap(layer, None, (0, None, None)))(x, w, b).jaxpr)
    compute = lambda ops: [op for op in ops if op[0] not in ("broadcast_in_dim", "reshape")]
    assert compute(mapped) == compute(by_hand)
    # In a loop over chunks of 4, its body is: one read of the rows, the batch of 4, one write of the results.
    in_chunks = operations(jax.make_jaxpr(chunked_vmap(layer, 4, (0, None, None)))(data(12, 5), w, b).jaxpr)
    names = [name for name, _ in compute(in_chunks)]
    first, last = names.index("dynamic_slice"), names.index("dynamic_update_slice")
    body = compute(in_chunks)[first + 1 : last]
    assert [op for op in body if "int32[]" not in op[1]] == compute(by_hand)  # without the arithmetic of the place


def wide(x):
    """One example: 4 numbers in, 4 out, and 1000 between."""
    return jnp.sort(jnp.sin(jnp.outer(x, jnp.arange(250.0))).reshape(-1))[:4]


@pytest.mark.parametrize("length", [pytest.param(1024, marks=pytest.mark.slow), 1021])
def test_memory_follows_the_chunk(length):
    x, between = jnp.ones((length, 4)), 4 * 1000
    used = {chunk: temporary(lambda x, c=chunk: chunked_vmap(wide, c)(x), x) for chunk in (8, 32, 128, None)}
    assert used[None] >= length * between
    for chunk in (8, 32, 128):
        assert chunk * between <= used[chunk] <= 2.5 * chunk * between + 4096


@pytest.mark.parametrize(("length", "axis"), [(1024, 0), (1021, 0), (1021, 1)])
def test_neither_arguments_nor_results_are_copied(length, axis):
    x = jnp.ones((length, 512) if axis == 0 else (512, length))
    used = temporary(lambda x: chunked_vmap(lambda row: jnp.sin(row) * row.sum(), 8, axis, axis)(x), x)
    assert used < x.nbytes / 20


def test_the_gradient_erases_nothing_in_the_gradient_of_the_result():
    def by_jax(x):
        step = lambda y, i: (
            jax.lax.dynamic_update_slice(y, jnp.sin(jax.lax.dynamic_slice(x, (i, 0), (4, 3))), (i, 0)),
            0,
        )
        return jax.lax.scan(step, jnp.zeros_like(x), 4 * jnp.arange(3))[0]

    def writes(mapped):
        gradient = jax.make_jaxpr(jax.grad(lambda x: jnp.sum(mapped(x) ** 2)))(data(12, 3))
        return [name for name, _ in operations(gradient.jaxpr)].count("dynamic_update_slice")

    # One writes the result, one the gradient of the arguments; the third is the erasure.
    assert (writes(chunked_vmap(jnp.sin, 4)), writes(by_jax)) == (2, 3)


def test_traced_once():
    count = 0

    def fun(x):
        nonlocal count
        count += 1
        return x * 2

    chunked_vmap(fun, 3)(data(7))
    assert count == 1


@pytest.mark.slow
def test_inside_shard_map():
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.P("i")
    fun = jax.shard_map(chunked_vmap(jnp.sum, 2), mesh=mesh, in_specs=spec, out_specs=spec)
    assert_same(fun(data(5, 2)), data(5, 2).sum(1))


X, Y = jnp.ones((6, 2)), jnp.ones((4, 2))
pair_sum = lambda params, batch: batch["x"].sum() + params
ERRORS = {
    "zero": (ValueError, "chunk_size must be a positive int or None for all examples at once, got 0",
             lambda: chunked_vmap(jnp.sum, 0)),
    "negative": (ValueError, "got -3", lambda: chunked_vmap(jnp.sum, -3)),
    "float": (TypeError, "chunk_size must be a positive int or None for all examples at once, got 2.0 of type float",
              lambda: chunked_vmap(jnp.sum, 2.0)),
    "bool": (TypeError, "got True of type bool", lambda: chunked_vmap(jnp.sum, True)),
    "no callable": (TypeError, "fun must be callable, got 3", lambda: chunked_vmap(3, 2)),
    "in_axes type": (TypeError, "in_axes must be an int, None or a sequence with an entry for each argument, got 'x'",
                     lambda: chunked_vmap(jnp.sum, 2, "x")),
    "in_axes length": (ValueError, "in_axes must have one entry for each positional argument, 2, got 1",
                       lambda: chunked_vmap(jnp.add, 2, (0,))(X, X)),
    "in_axes leaf": (TypeError, "in_axes of batch must hold ints or None, got 1.5",
                     lambda: chunked_vmap(pair_sum, 2, (None, 1.5))(1.0, {"x": X})),
    "in_axes tree": (ValueError, "in_axes of batch must be an int, None or a prefix of its tree",
                     lambda: chunked_vmap(pair_sum, 2, (None, {"z": 0}))(1.0, {"x": X})),
    "lengths": (ValueError, "batch arguments must have the same number of rows: batch['x'] has 6 (axis 0), "
                "batch['y'] has 4 (axis 0)", lambda: chunked_vmap(pair_sum, 2, (None, 0))(1.0, {"x": X, "y": Y})),
    "length of a keyword": (ValueError, "batch['x'] has 6 (axis 0), params has 4 (axis 0)",
                            lambda: chunked_vmap(pair_sum, 2)(batch={"x": X}, params=jnp.ones(4))),
    "scalar": (ValueError, "params needs a batch axis, but has shape ()",
               lambda: chunked_vmap(pair_sum, 2)(1.0, {"x": X})),
    "rank": (ValueError, "batch['x'] has shape (6, 2), so its batch axis cannot be 2",
             lambda: chunked_vmap(pair_sum, 2, (None, 2))(1.0, {"x": X})),
    "nothing mapped": (ValueError, "hold no array with a batch axis",
                       lambda: chunked_vmap(jnp.sum, 2, (None,))(X)),
    "out_axes rank": (ValueError, "output['a'] has shape () for one example, so out_axes must be from -1 to 0 for it, "
                      "got 1", lambda: chunked_vmap(lambda x: {"a": x.sum()}, 2, 0, 1)(X)),
    "out_axes tree": (ValueError, "out_axes of output must be an int, None or a prefix of its tree",
                      lambda: chunked_vmap(jnp.sum, 2, 0, {"a": 0})(X)),
    "out_axes none": (ValueError, "output depends on the example, so out_axes cannot be None for it",
                      lambda: chunked_vmap(jnp.sum, 2, 0, None)(X)),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case):
    kind, message, call = ERRORS[case]
    with pytest.raises(kind, match=re.escape(message)):
        call()


def test_the_memory_test_can_fail():
    x = jnp.ones((1024, 512))
    copying = lambda x: jnp.concatenate([jnp.sin(x[:512]).sort(0), x[512:]])
    assert temporary(copying, x) > x.nbytes / 20
    np.testing.assert_array_less(0, temporary(jax.vmap(wide), jnp.ones((64, 4))))
