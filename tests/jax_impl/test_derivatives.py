"""Jacobians and Hessians in blocks, in JAX, against ``jax.jacobian``, ``jax.hessian`` and zodiax."""

import functools
import re

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import zodiax
from helpers import marked, printed_by, temporary
from hypothesis import given, settings
from jax.flatten_util import ravel_pytree
from microbatching_cases import assert_same, data

from microtome.jax_impl import hessian, hessian_blocks, hessian_to_pytree, hvp, jacobian, jacobian_blocks
from microtome.jax_impl.batches.matrices import hessian_matrix, jacobian_matrix

FEW = settings(derandomize=True, deadline=None, max_examples=6, database=None)
LENGTHS = st.sampled_from([0, 1, 5, 6])
PIECES = st.sampled_from([{}, {"nbatches": 2}, {"nbatches": 3}, {"batch_size": 1}, {"batch_size": 4},
                          {"batch_size": 9}])  # fmt: skip


def tree(length, dtype=jnp.float32):
    """``length`` numbers and two more, one of them a Python number."""
    return {"a": data(length, dtype=dtype), "b": [data(1, 1, seed=1, dtype=dtype), 0.5]}


def square(x):
    """As many outputs, of rank 2, as ``a`` has entries, and twice."""
    return jnp.stack([jnp.sin(x["a"] * x["b"][1]), x["a"] * x["b"][0][0, 0]])


def few(x):
    return jnp.sum(x["a"] ** 2) * x["b"][1] + x["b"][0][0, 0]


def scalar(x):
    return jnp.sum(jnp.sin(x["a"]) ** 2 * x["b"][1]) + jnp.cos(x["b"][0][0, 0]) * x["b"][1] ** 3


def plain(derivative, f, x):
    vector, unflatten = ravel_pytree(x)
    return jax.jit(derivative(lambda v: f(unflatten(v))))(vector)


def fits(length, pieces):
    return pieces.get("nbatches", 1) <= length + 2


@pytest.mark.slow
@FEW
@given(length=LENGTHS, pieces=PIECES, f=st.sampled_from([square, few]), checkpoint=st.booleans(),
       mode=st.sampled_from(["auto", "forward", "reverse"]))  # fmt: skip
def test_jacobian_equals_the_plain_one(length, pieces, f, checkpoint, mode):
    x = tree(length)
    outputs = jax.eval_shape(f, x).size
    if pieces.get("nbatches", 1) > (outputs if mode == "reverse" else length + 2):
        with pytest.raises(ValueError, match="Choose at most"):
            jacobian(f, x, **pieces, mode=mode)
        return
    actual, unflatten = jacobian(f, x, **pieces, mode=mode, checkpoint=checkpoint)
    expected = plain(jax.jacobian, f, x)
    assert_same(actual, expected)
    assert_same(unflatten(ravel_pytree(x)[0]), ravel_pytree(x)[1](ravel_pytree(x)[0]))


@pytest.mark.slow
@FEW
@given(length=LENGTHS, pieces=PIECES, checkpoint=st.booleans())
def test_hessian_equals_the_plain_one(length, pieces, checkpoint):
    x = tree(length)
    if not fits(length, pieces):
        return
    actual, _ = hessian(scalar, x, **pieces, checkpoint=checkpoint)
    expected = plain(jax.hessian, scalar, x)
    assert_same(actual, expected)
    assert_same(actual, actual.T)


@pytest.mark.parametrize("size", marked([3, 9], quick=(3,)))
def test_blocks_one_by_one(size):
    x = tree(5)
    slices = [slice(i, min(i + size, 7)) for i in range(0, 7, size)]
    rows = list(hessian_blocks(scalar, x, batch_size=size))
    assert [place for place, _ in rows] == slices
    assert_same(jnp.concatenate([block for _, block in rows]), plain(jax.hessian, scalar, x))
    expected = plain(jax.jacobian, square, x)
    columns = list(jacobian_blocks(square, x, batch_size=size))
    assert [place for place, _ in columns] == slices
    assert_same(jnp.concatenate([block for _, block in columns], -1), expected)
    rows = list(jacobian_blocks(square, x, batch_size=size, mode="reverse"))
    assert [place.start for place, _ in rows] == list(range(0, 10, size))
    assert_same(jnp.concatenate([block for _, block in rows]), expected.reshape(10, 7))


def test_without_jit():
    assert_same(jacobian(square, tree(1), 2, False)[0], plain(jax.jacobian, square, tree(1)))
    f = lambda x: jnp.sum(x**3)
    assert_same(hvp(f, data(3), False)(jnp.ones(3)), 6 * data(3))


@pytest.mark.slow
def test_equals_zodiax():
    x = jax.tree.map(jnp.asarray, tree(3))
    for ours, theirs, f in ((jacobian, zodiax.jacobian, square), (hessian, zodiax.hessian, scalar)):
        run = lambda derivative, f=f: jax.jit(lambda x: derivative(f, x, 2, True, True)[0])(x)
        assert_same(run(ours), run(theirs))
    matrix = run(hessian)
    blocks = hessian_to_pytree(matrix, x)
    assert_same(blocks, zodiax.hessian_to_pytree(matrix, x), exact=True)
    assert_same(blocks, jax.jit(jax.hessian(scalar))(x))


def test_an_empty_tree():
    assert hessian(lambda x: jnp.float32(1.0), {})[0].shape == (0, 0)
    assert jacobian(lambda x: jnp.ones((2, 3)), [])[0].shape == (2, 3, 0)
    assert hessian_to_pytree(np.zeros((0, 0)), {}) == {}


def test_mixed_dtypes_come_back_as_they_were():
    big = 2**24 + 1  # is no float32
    x = {"f": jnp.float32([1.5, 2.5]), "h": jnp.bfloat16([0.5]), "i": jnp.int32([big]), "n": 3}
    seen = []

    def f(x):
        seen.append({k: jnp.asarray(v).dtype for k, v in x.items()})
        parity = (x["i"] % 2).astype(jnp.float32)
        return jnp.sum(x["f"] ** 2 * parity) * x["h"].astype(jnp.float32)[0] ** 2 * x["n"]

    matrix, unflatten = hessian(f, x, nbatches=2)
    assert seen == [{"f": jnp.float32, "h": jnp.bfloat16, "i": jnp.int32, "n": jnp.int32}]
    assert matrix.dtype == jnp.float32
    expected = np.zeros((5, 5), np.float32)
    expected[:3, :3] = [[1.5, 0, 9], [0, 1.5, 15], [9, 15, 51]]
    assert_same(matrix, jnp.asarray(expected))
    assert_same(unflatten(ravel_pytree(x)[0] * 1), jax.tree.map(jnp.asarray, x) | {"i": jnp.int32([big - 1])})
    rows, _ = jacobian(f, x, mode="reverse")
    assert_same(rows, jacobian(f, x, mode="forward")[0])
    with jax.enable_x64(True):
        assert hessian(lambda x: jnp.sum(x[0] * x[1]), (np.ones(2), np.ones(2, np.float32)))[0].dtype == jnp.float64


WEAK = {
    "number": 0.5,
    "array": jnp.full(3, 0.5),
    "tree": {"a": 0.5, "b": jnp.full(2, 1.5)},
    "mixed": {"a": jnp.full(2, 1.5), "b": jnp.ones(1)},
    "strong": jnp.ones(3),
}


@pytest.mark.parametrize("case", marked(WEAK, quick=("number", "strong")))
def test_weak_types_are_those_of_the_plain_derivatives(case):
    x = WEAK[case]
    total = lambda x: sum(jnp.sum(leaf**3) for leaf in jax.tree.leaves(x))
    wide = lambda x: total(x) * jnp.ones((2, 4))
    jacobians = {"total": plain(jax.jacobian, total, x), "wide": plain(jax.jacobian, wide, x)}
    weak = plain(jax.hessian, total, x).weak_type
    assert weak == (case not in ("mixed", "strong"))
    for nbatches in range(1, 1 + min(3, jacobians["total"].size)):
        for mode in ("auto", "forward"):
            for name, f in {"total": total, "wide": wide}.items():
                block = functools.partial(jacobian, f, nbatches=nbatches, mode=mode)
                assert jax.eval_shape(lambda x, block=block: block(x)[0], x).weak_type == jacobians[name].weak_type
        assert jax.eval_shape(lambda x, nbatches=nbatches: hessian(total, x, nbatches)[0], x).weak_type == weak
    # From Python, block by block, with the largest number of blocks.
    assert jacobian(total, x, nbatches)[0].weak_type == jacobians["total"].weak_type
    for options in ({}, {"progress": True}):
        assert hessian(total, x, nbatches, **options)[0].weak_type == weak
    assert all(rows.weak_type == weak for _, rows in hessian_blocks(total, x, nbatches))


def test_a_complex_result():
    f = lambda x: jnp.exp(1j * x) * x[0]
    assert_same(jacobian(f, data(5), 2)[0], jax.jit(jax.jacfwd(f))(data(5)))
    assert_same(jacobian(lambda x: f(x)[:2], data(5), 2)[0], jax.jit(jax.jacfwd(f))(data(5))[:2])


def test_fewer_outputs_than_inputs_take_reverse_mode():
    calls = []

    @jax.custom_vjp
    def f(x):
        return x[:2] ** 2

    f.defvjp(lambda x: (f(x), x), lambda x, g: (calls.append(1) or jnp.zeros_like(x).at[:2].set(2 * x[:2] * g),))
    # Forward mode would be an error: there is no rule for it.
    assert_same(jacobian(f, data(5), 5)[0], jax.jacrev(f)(data(5)))
    assert calls
    with pytest.raises(TypeError, match="custom_vjp"):
        jacobian(f, data(5), mode="forward")


def test_hvp():
    x = tree(3)
    multiply, matrix = hvp(scalar, x), hessian(scalar, x)[0]
    v = jax.tree.map(lambda leaf: jnp.cos(jnp.asarray(leaf)), x)
    assert_same(multiply(data(5)), matrix @ data(5))
    at = jax.tree.map(jnp.asarray, x)
    assert_same(multiply(v), jax.jvp(jax.grad(scalar), (at,), (v,))[1])


def test_hvp_of_a_matrix_takes_both_forms():
    f, x = lambda w: jnp.sum(jnp.sin(w) ** 3), data(2, 3)
    whole = hessian(f, x)[0]
    for v in (data(6, seed=1), data(2, 3, seed=1)):
        assert_same(hvp(f, x)(v), (whole @ v.ravel()).reshape(v.shape))


def test_hvp_linearises_once():
    traced, ran = [], []

    def f(x):
        traced.append(1)
        value = jax.pure_callback(
            lambda v: (ran.append(1), v)[1], jax.ShapeDtypeStruct(x.shape, x.dtype), jax.lax.stop_gradient(x)
        )
        return jnp.sum(x**3 * value)

    multiply = jax.block_until_ready(hvp(f, jnp.ones(3)))
    products = [multiply(v) for v in jnp.eye(3)]
    assert_same(jnp.stack(products), 6 * jnp.eye(3))
    assert (len(traced), len(ran)) == (1, 1)


def test_derivatives_of_the_result():
    x, weights = data(5), data(5, 5, seed=1)
    ours = lambda x: jnp.sum(hessian(lambda v: jnp.sum(jnp.sin(v) ** 3) * v[0], x, 2)[0] * weights)
    theirs = lambda x: jnp.sum(jax.hessian(lambda v: jnp.sum(jnp.sin(v) ** 3) * v[0])(x) * weights)
    assert_same(jax.jit(jax.grad(ours))(x), jax.jit(jax.grad(theirs))(x))


# --- Memory ---------------------------------------------------------------------------------------------------------


def network(p):
    hidden = jnp.tanh(data(64, 12) @ p["w"] + p["b"])
    return jnp.mean((hidden @ p["v"] - 1) ** 2)


def logistic(p):
    return -jnp.mean(jax.nn.log_softmax(data(64, 12) @ p["w"] + p["b"])[:, 3])


def attention(p):
    tokens = data(32, 8, 12)
    queries, keys = tokens @ p["w"], tokens @ (p["w"] * p["b"])
    mixed = jax.nn.softmax(queries @ keys.swapaxes(1, 2), -1) @ (tokens @ p["w"])
    return jnp.mean(jnp.tanh(mixed @ p["v"]) ** 2)


def parameters():
    return {"w": data(12, 24), "b": data(24), "v": data(24, 4)}  # 408 numbers


def regression(p):
    """With more features than examples."""
    return jnp.mean(jnp.logaddexp(0, data(32, 408) @ ravel_pytree(p)[0]))


def logsumexp(p):
    return jax.nn.logsumexp(ravel_pytree(p)[0])


def pairwise_energy(p):
    points = ravel_pytree(p)[0].reshape(-1, 6)
    squares = jnp.sum((points[:, None] - points[None]) ** 2, -1)
    return jnp.sum(jnp.sqrt(squares + jnp.eye(len(points))))


def strided(p):
    """An image of one channel, whose convolution is computed by phases where time counts more than memory."""
    image = ravel_pytree(p)[0].reshape(1, 1, 24, 17)
    return jnp.sum(jnp.sin(jax.lax.conv(image, data(3, 1, 3, 3), (2, 2), "SAME")) ** 2)


def largest(p):
    return jnp.max(ravel_pytree(p)[0]) ** 2


@pytest.mark.slow
@pytest.mark.parametrize("derivative", [hessian_matrix, jacobian_matrix])
def test_blocks_are_the_largest_that_fit_the_bytes(derivative):
    options = (1, None) if derivative is hessian_matrix else ("forward", 1, None)
    make = lambda **size: derivative(network, parameters(), False, *options, **size)

    def used(size):
        layout, linear = make().layout, make().linearise(make().x)
        program = jax.jit(lambda linear, start: layout.block(linear, start, size)).lower(linear, jnp.int32(0)).compile()
        return program.memory_analysis().temp_size_in_bytes + program.memory_analysis().output_size_in_bytes

    one = used(1)
    for limit in (one, 10 * one, 10**9):
        matrix = make(max_bytes=limit)
        size = matrix.layout.size
        assert used(size) <= limit
        assert size == matrix.layout.count or used(2 * size + 1) > limit
        assert_same(matrix.compute(True, None, False), make().compute(True, None, False))
    assert make(max_bytes=10 * one).layout.size > 4


def test_blocks_by_bytes():
    whole, pieces = hessian(loss, X)[0], list(hessian_blocks(loss, X, max_bytes=10**6))
    assert_same(hessian(loss, X, max_bytes=10**6)[0], whole)
    assert_same(jnp.concatenate([rows for _, rows in pieces]), whole)
    assert_same(jacobian(loss, X, max_bytes=10**6)[0], jacobian(loss, X)[0])
    assert sum(rows.size for _, rows in jacobian_blocks(loss, X, max_bytes=10**6)) == 5
    assert jacobian(lambda x: x[:0], jnp.ones(3), max_bytes=1, mode="reverse")[0].shape == (0, 3)


NUMBERS = (1, 2, 3, 4, 8, 16)


def used_by(f, p):
    """Temporary memory by the number of blocks, and that of ``jax.hessian``."""
    used = {k: temporary(lambda p, k=k: hessian(f, p, k)[0], p) for k in NUMBERS}
    return used, temporary(lambda p: jax.hessian(lambda v: f(ravel_pytree(p)[1](v)))(ravel_pytree(p)[0]), p)


@pytest.mark.slow
@pytest.mark.parametrize("f", [network, logistic, attention])
def test_hessian_memory_follows_the_block(f):
    p = parameters()
    used, plain = used_by(f, p)
    assert max(used.values()) <= plain
    kept = temporary(jax.grad(f), p)  # what a linearisation needs, however small the block
    for k in NUMBERS[1:]:
        assert used[k] < 1.6 * used[1] / k + 4 * kept


def values_in(jaxpr):
    """Bytes of all that a jaxpr computes, wherever it calls another."""
    inner = [[p.jaxpr for p in eqn.params.values() if hasattr(p, "jaxpr")] for eqn in jaxpr.eqns]
    return sum(
        sum(map(values_in, bodies)) if bodies else sum(v.aval.size * v.aval.dtype.itemsize for v in eqn.outvars)
        for eqn, bodies in zip(jaxpr.eqns, inner, strict=True)
    )


_SLOW = functools.partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("f", "numbers"),
    [
        (strided, (1, 2)),
        _SLOW(logsumexp, (2, 408)),
        *(_SLOW(f, NUMBERS) for f in (logsumexp, pairwise_energy, regression, network, logistic, attention)),
        *(_SLOW(f, (*NUMBERS, 136, 204, 408)) for f in (strided, largest)),
    ],
)
def test_hessian_memory_is_never_more_than_that_of_the_whole(f, numbers):
    """The program that runs outside of jax.jit is chosen by the memory that it takes."""
    vector, unflatten = ravel_pytree(parameters())
    plain = temporary(jax.hessian(lambda v: f(unflatten(v))), vector)
    for k in numbers:
        chosen = hessian_matrix(f, parameters(), False, k, None).leaner()
        assert chosen.layout.number in (1, k)
        assert temporary(chosen.whole, chosen.x) <= plain


@pytest.mark.slow
def test_a_single_block_is_chosen_only_where_it_takes_less():
    numbers = lambda f: [hessian_matrix(f, parameters(), False, k, None).leaner().layout.number for k in (1, 2, 8)]
    assert numbers(logsumexp) == [1, 1, 1]
    assert numbers(network) == [1, 2, 8]
    assert_same(hessian(logsumexp, parameters(), 8)[0], hessian(logsumexp, parameters())[0])
    wide = lambda x: jnp.cumsum(x) * 2
    assert jacobian_matrix(wide, data(40), False, "forward", 4, None).leaner().layout.number in (1, 4)
    assert_same(jacobian(wide, data(40), 4)[0], plain(jax.jacobian, wide, data(40)))


def test_blocks_within_transformations_that_f_looks_out_of():
    """What f captures there, and the axes that it names, belong to no program that could be compiled to choose one."""
    x, f = data(6), lambda y: lambda x: jnp.sum(jnp.sin(x) ** 3) * y
    ours, theirs = (lambda y: hessian(f(y), x, 3)[0]), lambda y: jax.hessian(f(y))(x)
    ys = jnp.arange(1.0, 4)
    assert_same(jax.jit(ours)(ys[0]), jax.jit(theirs)(ys[0]))
    assert_same(jax.vmap(ours)(ys), jax.jit(jax.vmap(theirs))(ys))
    assert_same(jax.jacobian(ours)(ys[0]), jax.jit(jax.jacobian(theirs))(ys[0]))
    total = jax.vmap(lambda y: hessian(lambda x: f(jax.lax.psum(y, "i"))(x), x, 3)[0], axis_name="i")
    assert_same(total(ys), jax.jit(jax.vmap(theirs))(jnp.full(3, 6.0)))
    placed = jax.vmap(lambda y: hessian(lambda x: f(y + jax.lax.axis_index("i"))(x), x, 3)[0], axis_name="i")
    assert_same(placed(ys), jax.jit(jax.vmap(theirs))(ys + jnp.arange(3)))
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("i")
    spread = jax.shard_map(lambda y: ours(y[0]), mesh=mesh, in_specs=spec, out_specs=spec)
    assert_same(spread(ys), jax.jit(theirs)(ys[0]))


@pytest.mark.slow
@pytest.mark.parametrize("f", [regression, logsumexp, pairwise_energy])
def test_hessian_memory_where_products_are_cheap(f):
    vector, unflatten = ravel_pytree(parameters())
    used, plain = used_by(f, parameters())
    assert used[1] <= plain
    multiply = jax.linearize(jax.grad(lambda v: f(unflatten(v))), vector)[1]
    residuals = sum(leaf.nbytes for leaf in jax.tree.leaves(multiply))
    product = vector.nbytes + values_in(jax.make_jaxpr(multiply)(vector).jaxpr)
    for k, size in used.items():
        assert size <= residuals + product * -(-len(vector) // k)
    assert used[16] < used[2] / 2


def test_blocks_are_written_into_the_result():
    # The Hessian itself, 408² numbers, is the program's result; a copy of it would be temporary.
    p = parameters()
    assert temporary(lambda p: hessian(network, p, batch_size=3)[0], p) < 408 * 408 * 4 / 4


def test_jacobian_memory_follows_the_block():
    matrices = [data(200, 200, seed=i) / 10 for i in range(3)]

    def f(x):
        for matrix in matrices:
            x = jnp.sin(matrix @ x)
        return x

    for mode in ("forward", "reverse"):
        used = {k: temporary(lambda x, k=k, m=mode: jacobian(f, x, k, mode=m)[0], data(200)) for k in (1, 4, 20)}
        # A block and what it is computed from.
        assert all(used[k] < 2 * 200 * 200 / k * 4 + 4096 for k in (4, 20))
        assert used[1] > 200 * 200 * 4


def test_checkpoint_keeps_nothing():
    def f(x):
        for _ in range(30):
            x = jnp.sin(x) * x
        return x

    # What 30 steps on 1000 numbers keep is more than one column at a time.
    used = {
        c: temporary(lambda x, c=c: jacobian(f, x, 1000, checkpoint=c, mode="forward")[0], data(1000))
        for c in (False, True)
    }
    assert used[True] < used[False] / 4


# --- Output on the host ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", marked(["forward", "reverse"], quick=("reverse",)))
def test_out_of_any_layout(mode, tmp_path):
    x = tree(5)
    expected = plain(jax.jacobian, square, x)
    outs = [
        np.memmap(tmp_path / "out", np.float32, "w+", shape=expected.shape),
        np.zeros(expected.shape[::-1], np.float32).T,
        np.zeros((2, 10, 7), np.float32)[:, ::2],
    ]
    for out in outs:
        result, _ = jacobian(square, x, 3, mode=mode, out=out)
        assert result is out
        assert_same(jnp.asarray(np.array(out)), expected)
    scalar_out = np.zeros(7, np.float32)
    jacobian(few, x, 2, mode=mode if mode == "forward" else "auto", out=scalar_out)
    assert_same(jnp.asarray(scalar_out), plain(jax.jacobian, few, x))


def test_progress(capsys):
    result, _ = hessian(scalar, tree(5), 4, progress=True)
    assert_same(result, plain(jax.hessian, scalar, tree(5)))
    assert "4/4" in capsys.readouterr().err
    assert len(list(jacobian_blocks(square, tree(5), batch_size=2, progress=True))) == 4
    assert "4/4" in capsys.readouterr().err


def test_progress_without_tqdm():
    code = (
        "import sys; sys.modules['tqdm'] = None\n"
        "import jax.numpy as jnp\n"
        "from microtome.jax_impl import hessian\n"
        "try: hessian(jnp.sum, jnp.ones(2), progress=True)\n"
        "except ImportError as error: print(error)\n"
    )
    assert printed_by(code) == "progress=True needs tqdm: pip install 'microtome[progress]', or pip install tqdm.\n"


def test_an_interruption_says_how_much_was_written():
    ran = []

    def fail(v):
        ran.append(1)
        if len(ran) == 3:
            raise RuntimeError("no more")
        return v

    @jax.custom_jvp
    def f(x):
        return x**2

    def rule(x, t):
        passed = jax.pure_callback(fail, jax.ShapeDtypeStruct(t[0].shape, t[0].dtype), t[0], vmap_method="expand_dims")
        return f(x[0]), 2 * x[0] * passed

    f.defjvp(rule)
    out = np.zeros((6, 6), np.float32)
    with pytest.raises(Exception, match="no more") as raised:
        jacobian(lambda x: f(x), data(6), batch_size=2, mode="forward", jit=False, out=out)
    assert any("out is incomplete: " in note and "of 6 columns" in note for note in raised.value.__notes__)


# --- Bad input ------------------------------------------------------------------------------------------------------

X = {"w": np.ones((2, 2), np.float32), "b": np.ones(1, np.float32)}
loss = lambda x: jnp.sum(x["w"]) * x["b"][0]
out_of = lambda shape, dtype=np.float32: np.full(shape, 7, dtype)
READ_ONLY = out_of((5, 5))
READ_ONLY.flags.writeable = False


def view(shape, strides):
    """A writeable view whose elements are so many floats apart."""
    return np.lib.stride_tricks.as_strided(out_of(60), shape, [4 * stride for stride in strides])


SHARED = {"expanded": (0, 1), "constant": (0, 0), "diagonals": (1, 1), "rows that overlap": (4, 1),
          "columns that overlap": (1, 4), "backwards": (-0, 2), "an axis that reaches too far": (3, 2)}  # fmt: skip
APART = {"rows": (5, 1), "columns": (1, 5), "gaps": (11, 2), "columns with gaps": (2, 11), "tight": (9, 2)}
BOTH = {
    "nbatches zero": (ValueError, "nbatches must be a positive int, got 0", lambda d: d(loss, X, 0)),
    "nbatches float": (TypeError, "nbatches must be a positive int, got 2.0 of type float", lambda d: d(loss, X, 2.0)),
    "batch_size": (ValueError, "batch_size must be a positive int or None, got -1",
                   lambda d: d(loss, X, batch_size=-1)),
    "too many": (ValueError, "nbatches=6 is more than the 5 rows or columns there are. Choose at most 5",
                 lambda d: d(loss, X, 6)),
    "both": (ValueError, "pass one of nbatches, batch_size and max_bytes, got nbatches=2, batch_size=3",
             lambda d: d(loss, X, 2, batch_size=3)),
    "both, bytes": (ValueError, "pass one of nbatches, batch_size and max_bytes, got batch_size=3, max_bytes=99",
                    lambda d: d(loss, X, batch_size=3, max_bytes=99)),
    "bytes": (ValueError, "max_bytes must be a positive int or None, got 0", lambda d: d(loss, X, max_bytes=0)),
    "few bytes": (ValueError, "max_bytes=1 is too little: a block of one takes", lambda d: d(loss, X, max_bytes=1)),
    "no callable": (TypeError, "f must be callable, got 3", lambda d: d(3, X)),
    "complex": (TypeError, "x['w'] is complex64, but coordinates are real. Make its real and imaginary part two leaves",
                lambda d: d(loss, {"w": np.ones(2, np.complex64), "b": np.ones(1)})),
    "integers": (TypeError, "x is to be differentiated, but holds no floating-point number: x['a'] is int32",
                 lambda d: d(loss, {"a": np.ones(2, np.int32)})),
    "no number": (TypeError, "x['s'] must be an array, got a str", lambda d: d(loss, {"s": "x"})),
    "keys": (TypeError, "x holds random keys", lambda d: d(jnp.sum, jax.random.key(0))),
    "integer result": (TypeError, "int32", lambda d: d(lambda x: jnp.int32(1), X)),
    "tree": (TypeError, "f must return a single array", lambda d: d(lambda x: (loss(x), 1.0), X)),
}  # fmt: skip
WITH_OUT = {
    "shape": (ValueError, "out must have the shape of the result, (5, 5), got (5, 4)", out_of((5, 4))),
    "dtype": (TypeError, "out must have the dtype of the result, float32, got float64", out_of((5, 5), np.float64)),
    "kind": (TypeError, "out must be a NumPy array or memmap, got a list", [[1.0]]),
    "jax": (TypeError, "out must be a NumPy array or memmap, got a ArrayImpl", jnp.ones((5, 5))),
    "read only": (ValueError, "out must be writeable", READ_ONLY),
}  # fmt: skip
OWN = {
    "no scalar": (TypeError, "f must return a real number of shape () for a Hessian, got float32[2, 2]",
                  lambda: hessian(lambda x: x["w"], X)),
    "no scalar, length 1": (TypeError, "got float32[1]", lambda: hvp(lambda x: x["b"], X)),
    "complex scalar": (TypeError, "got complex64[]", lambda: hessian(lambda x: 1j * loss(x), X)),
    "mode": (ValueError, "mode must be 'auto', 'forward' or 'reverse', got 'both'",
             lambda: jacobian(loss, X, mode="both")),
    "mode of blocks": (ValueError, "mode must be 'forward' (blocks of columns) or 'reverse'",
                       lambda: jacobian_blocks(loss, X, mode="auto")),
    "rows": (ValueError, "nbatches=2 is more than the 1 rows or columns", lambda: jacobian(loss, X, 2, mode="reverse")),
    "complex rows": (TypeError, "f returns complex64, whose rows have no reverse mode",
                     lambda: jacobian(lambda x: 1j * x["w"], X, mode="reverse")),
    "blocks": (ValueError, "nbatches=9 is more than the 5", lambda: hessian_blocks(loss, X, 9)),
    "bytes under jit": (TypeError, "max_bytes is found out by compiling, outside of jax.jit. Pass batch_size there.",
                        lambda: jax.jit(lambda x: hessian(loss, x, max_bytes=10**6)[0])(X)),
    "under jit": (TypeError, "out and progress need the values of x, which jax.jit traces",
                  lambda: jax.jit(lambda x: hessian(loss, x, out=out_of((5, 5)))[0])(X)),
    "H": (ValueError, "H must have shape (5, 5) for the 5 numbers of x, got (4, 4)",
          lambda: hessian_to_pytree(jnp.ones((4, 4)), X)),
    "H of lists": (TypeError, "H must be an array, got a list", lambda: hessian_to_pytree([[1.0]], {"a": 1.0})),
    "H rank": (ValueError, "got (5,)", lambda: hessian_to_pytree(jnp.ones(5), X)),
    "v": (ValueError, "v must have the shapes of x, or be a vector of 5: v['w'] has (2,), x has (2, 2) there",
          lambda: hvp(loss, X)({"w": jnp.ones(2), "b": jnp.ones(1)})),
    "v tree": (ValueError, "v must be a tree like x", lambda: hvp(loss, X)({"w": jnp.ones((2, 2))})),
    "v length": (ValueError, "v must be a tree like x", lambda: hvp(loss, X)(jnp.ones(4))),
    "v complex": (TypeError, "v is complex64, but x is real", lambda: hvp(loss, X)(1j * jnp.ones(5))),
}  # fmt: skip


@pytest.mark.parametrize("derivative", [jacobian, hessian])
@pytest.mark.parametrize("case", BOTH)
def test_errors(derivative, case):
    kind, message, call = BOTH[case]
    with pytest.raises(kind, match=re.escape(message)):
        call(derivative)


@pytest.mark.parametrize("case", OWN)
def test_errors_of_one(case):
    kind, message, call = OWN[case]
    with pytest.raises(kind, match=re.escape(message)):
        call()


@pytest.mark.parametrize("case", WITH_OUT)
def test_errors_of_out(case):
    kind, message, out = WITH_OUT[case]
    before = np.array(out)
    with pytest.raises(kind, match=re.escape(message)):
        hessian(loss, X, out=out)
    assert np.array_equal(before, np.array(out))


@pytest.mark.parametrize("derivative", marked([hessian, jacobian], quick=(jacobian,)))
def test_out_whose_elements_share_memory(derivative):
    f = loss if derivative is hessian else lambda x: jnp.concatenate([x["w"].ravel() ** 2, x["b"]])
    for strides in SHARED.values():
        out = view((5, 5), strides)
        with pytest.raises(ValueError, match="out must hold each element at a place of its own"):
            derivative(f, X, 2, out=out)
        assert (out == 7).all()
    expected = derivative(f, X)[0]
    for strides in APART.values():
        assert_same(jnp.asarray(derivative(f, X, 2, out=view((5, 5), strides))[0]), expected)
    assert_same(jnp.asarray(derivative(f, X, 2, out=view((5, 5), (5, 1))[::-1, ::-1])[0]), expected)
    alone = np.broadcast_to(np.zeros(1, np.float32), (1, 1))  # a single element overlaps with none
    alone.flags.writeable = True
    assert hessian(lambda x: x**2, 1.0, out=alone)[0] == 2


@pytest.mark.parametrize("nbatches", [1, 2, 5])
def test_out_over_the_memory_of_x(nbatches):
    x = np.arange(1.0, 6.0, dtype=np.float32)
    expected = 3 * x**2
    assert_same(jnp.asarray(jacobian(lambda x: jnp.sum(x**3), x, nbatches, mode="forward", out=x)[0]), expected)
