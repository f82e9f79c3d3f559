"""Jacobians and Hessians of torch functions in blocks, against ``torch.func``."""

import gc
import re

import hypothesis.strategies as st
import jax
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch import nn
from torch.func import functional_call
from torch_cases import assert_same, data

from microtome import jax_impl
from microtome import torch_api as mt
from microtome.bridge import as_jax, to_jax
from microtome.jax_impl.batches.blocks import temporary_bytes
from microtome.jax_impl.batches.matrices import hessian_matrix
from microtome.torch_api.derivatives import _leaner

FEW = settings(derandomize=True, deadline=None, max_examples=5, database=None)


def tree(dtype=torch.float32):
    """Seven numbers; the keys are not sorted: torch keeps their order."""
    return {"b": data(3, dtype=dtype), "a": [data(2, 2, seed=1, dtype=dtype)]}


def scalar(x):
    return (x["b"].sin() ** 2).sum() * x["a"][0].prod() + (x["a"][0] ** 3).sum()


def outer(x):
    return torch.outer(x["b"], x["b"].exp()) * x["a"][0][0, 1]


def flat(x):
    return torch.cat([x["b"], x["a"][0].flatten()])


def of_vector(f):
    return lambda v: f({"b": v[:3], "a": [v[3:].reshape(2, 2)]})


H = torch.func.hessian(of_vector(scalar))(flat(tree()))
J = torch.func.jacrev(of_vector(outer))(flat(tree()))


@pytest.mark.parametrize("pieces", [{}, pytest.param({"nbatches": 3, "checkpoint": True}, marks=pytest.mark.slow)])
def test_equal_torch_func(pieces):
    matrix, unflatten = mt.hessian(scalar, tree(), **pieces)
    assert_same(matrix, H)
    assert_same(matrix, matrix.T)
    assert_same(unflatten(flat(tree())), tree(), exact=True)
    assert_same(mt.jacobian(outer, tree(), **pieces)[0], J)
    assert_same(mt.jacobian(outer, tree(), **pieces, mode="reverse")[0], J)


SIZES = st.sampled_from([1, 2, 3, 7, 9, 20])  # one, odd, all seven columns, all nine rows, more than there are


@FEW
@given(
    dtype=st.sampled_from([torch.float32, torch.float64]),
    mode=st.sampled_from(["auto", "forward", "reverse"]),
    rows=st.integers(1, 4),
    size=SIZES,
    checkpoint=st.booleans(),
)
def test_jacobian_equals_torch_func(dtype, mode, rows, size, checkpoint):
    f = lambda x: torch.outer(x["b"], x["b"].exp())[:, :rows] * x["a"][0][0, 1] + x["a"][0].sum()
    x = tree(dtype)
    matrix, unflatten = mt.jacobian(f, x, checkpoint=checkpoint, batch_size=size, mode=mode)
    assert_same(matrix, torch.func.jacrev(of_vector(f))(flat(x)))
    assert_same(unflatten(flat(x)), x, exact=True)


@pytest.mark.slow
@FEW
@given(dtype=st.sampled_from([torch.float32, torch.float64]), size=SIZES, checkpoint=st.booleans())
def test_hessian_equals_torch_func(dtype, size, checkpoint):
    x = tree(dtype)
    matrix, _ = mt.hessian(scalar, x, checkpoint=checkpoint, batch_size=size)
    assert_same(matrix, torch.func.hessian(of_vector(scalar))(flat(x)))
    assert_same(matrix, matrix.T)


@pytest.mark.slow
def test_double_precision():
    x = tree(torch.float64)
    expected = torch.func.hessian(of_vector(scalar))(flat(x))
    assert_same(mt.hessian(scalar, x, 2)[0], expected)


def test_mixed_dtypes_and_numbers():
    x = {"n": torch.tensor([3]), "h": torch.ones(2, dtype=torch.bfloat16), "f": 2.0}
    matrix, unflatten = mt.hessian(lambda x: x["f"] ** 3 * x["h"].float().sum() * x["n"][0], x)
    expected = torch.zeros(4, 4)
    expected[3, :] = torch.tensor([0.0, 36.0, 36.0, 72.0 * 1.0])
    expected[:, 3] = expected[3]
    assert_same(matrix, expected)
    assert_same(unflatten(torch.tensor([3.0, 1.0, 1.0, 2.0])), x | {"f": torch.tensor(2.0)}, exact=True)


@pytest.mark.slow
def test_memory_of_pairs_of_points_follows_the_block():
    points, x = 40, data(40, 3)
    energy = lambda x: ((x[:, None] - x[None]).pow(2).sum(-1) + torch.eye(points)).sqrt().sum()
    traced, pairs = as_jax(energy), 4 * 3 * points**2  # bytes of all differences

    def used(size):
        program = jax.jit(lambda x: jax_impl.hessian(traced, x, batch_size=size)[0]).lower(to_jax(x)).compile()
        return program.memory_analysis().temp_size_in_bytes

    for size in (1, 4, 16, 120):
        assert used(size) < (size + 5) * pairs
    assert used(16) > 4 * pairs  # the measure sees a block


@pytest.mark.slow
@pytest.mark.parametrize("name", ["logsumexp", "network"])
def test_memory_is_never_more_than_that_of_a_single_block(name):
    """A captured parameter, gradients of the result and torch.func around it go on working, whatever is chosen."""
    scale, inputs = torch.tensor(2.0, requires_grad=True), data(16, 10)
    fun = {
        "logsumexp": lambda x: x.logsumexp(0) * scale,
        "network": lambda x: ((inputs @ x.view(10, 6)).tanh().sum(1) ** 2).mean() * scale,
    }[name]
    x, traced = data(60), as_jax(fun)
    used = lambda k: temporary_bytes(_leaner(lambda x: hessian_matrix(traced, x, False, k, None), x).compiled(x))
    assert used(4) <= used(1)
    assert (used(4) < used(1) / 2) == (name == "network")
    expected = torch.func.hessian(fun)(x)
    assert_same(mt.hessian(fun, x, 4)[0], expected)
    (grad,) = torch.autograd.grad(mt.hessian(fun, x, 4)[0].sum(), scale)
    assert_same(grad, expected.sum() / 2)
    assert_same(torch.func.vmap(lambda x: mt.hessian(fun, x, 4)[0])(x[None])[0], expected)


def test_blocks():
    rows = list(mt.hessian_blocks(scalar, tree(), batch_size=3))
    assert [place for place, _ in rows] == [slice(0, 3), slice(3, 6), slice(6, 7)]
    assert_same(torch.cat([block for _, block in rows]), H)
    assert_same(torch.cat([b for _, b in mt.jacobian_blocks(outer, tree(), 3)], -1), J)
    rows = torch.cat([b for _, b in mt.jacobian_blocks(outer, tree(), 4, mode="reverse")])
    assert_same(rows, J.reshape(9, 7))


@pytest.mark.slow
def test_blocks_by_bytes():
    """A size in bytes gives the blocks that fit, as the plan of their program says."""
    scale = torch.tensor(2.0, requires_grad=True)
    fun = lambda x: scalar(x) * scale
    blocks = list(mt.hessian_blocks(fun, tree(), max_bytes=1200))
    assert len(blocks) >= 4
    assert_same(torch.cat([rows for _, rows in blocks]), 2 * H)
    matrix, _ = mt.hessian(fun, tree(), max_bytes=10**6)
    assert_same(matrix, 2 * H)
    assert torch.autograd.grad(matrix.sum(), scale)[0].allclose(H.sum(), rtol=1e-4)
    assert_same(mt.jacobian(outer, tree(), max_bytes=10**6)[0], J)
    with pytest.raises(ValueError, match=r"max_bytes=1 is too little: a block of one takes \d+ bytes"):
        mt.hessian(scalar, tree(), max_bytes=1)
    with pytest.raises(ValueError, match="pass one of nbatches, batch_size and max_bytes"):
        mt.jacobian(outer, tree(), 2, max_bytes=10**6)
    with pytest.raises(TypeError, match="max_bytes is found out by compiling"):
        torch.func.grad(lambda x: mt.hessian(scalar, x, max_bytes=10**6)[0].sum())(tree())


@pytest.mark.slow
def test_hvp():
    multiply, v = mt.hvp(scalar, tree()), data(7, seed=2)
    unflatten = mt.hessian(scalar, tree())[1]
    assert_same(multiply(v), H @ v)
    assert_same(multiply(unflatten(v)), unflatten(H @ v))


def test_hessian_to_pytree():
    assert_same(mt.hessian_to_pytree(H, tree()), torch.func.hessian(scalar)(tree()))
    blocks = mt.hessian_to_pytree(H.numpy(), tree())
    assert np.shares_memory(blocks["b"]["b"], H.numpy())


def test_parameters_of_a_module():
    torch.manual_seed(0)
    model, x, y = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), data(5, 3), torch.tensor([0, 1, 1, 0, 1])
    params = {name: p.detach() for name, p in model.named_parameters()}
    loss = lambda params: F.cross_entropy(functional_call(model, params, (x,)), y)
    matrix, unflatten = mt.hessian(loss, params, nbatches=4)
    assert_same(mt.hessian_to_pytree(matrix, params), torch.func.hessian(loss)(params))
    vector = nn.utils.parameters_to_vector(model.parameters()).detach()
    assert_same(unflatten(vector), params, exact=True)


def test_attention_whose_second_derivative_torch_lacks():
    x, w = data(1, 1, 3, 2), data(6, 2, seed=1) / 2

    def by_hand(w):
        q, k, v = x @ w[:2], x @ w[2:4], x @ w[4:]
        return (torch.softmax(q @ k.mT / 2**0.5, -1) @ v).pow(2).sum()

    attention = lambda w: F.scaled_dot_product_attention(x @ w[:2], x @ w[2:4], x @ w[4:]).pow(2).sum()
    assert_same(mt.hessian(attention, w, 3)[0], torch.func.hessian(by_hand)(w).reshape(12, 12))
    with pytest.raises(NotImplementedError, match="does not support it"):
        torch.func.hessian(attention)(w)


def test_the_result_is_part_of_autograd():
    x, scale = data(4, dtype=torch.float64).requires_grad_(), torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    f = lambda x: (x**4).sum() * scale
    matrix, _ = mt.hessian(f, x, 2)
    matrix.pow(2).sum().backward()
    expected = torch.diag(12 * x**2 * scale).pow(2).sum()
    assert_same([x.grad, scale.grad], list(torch.autograd.grad(expected, (x, scale))))
    with torch.no_grad():
        scale.mul_(2)  # captured tensors are read afresh
    assert_same(mt.hessian(f, x, 2)[0].detach(), torch.diag(12 * x**2 * scale).detach())
    assert not mt.hessian(f, x, 2, out=torch.empty(4, 4, dtype=torch.float64))[0].requires_grad


def test_compiled_once():
    traces = []

    def f(x):
        traces.append(1)
        return (x**3).sum()

    out, counts = torch.empty(3, 3), []
    for x in (data(3), data(3, seed=1)):
        assert_same(mt.hessian(f, x, 3)[0], torch.diag(6 * x))
        assert_same(mt.hessian(f, x, 3, out=out)[0], torch.diag(6 * x))
        assert_same(mt.hvp(f, x)(torch.ones(3)), 6 * x)
        counts.append(len(traces))
    assert counts[0] == counts[1]


@pytest.mark.slow
def test_what_was_linearised_outlives_the_function():
    for _ in range(2):  # the second time, the first one's programs serve
        multiply, blocks = mt.hvp(lambda x: (x**3).sum(), data(3)), mt.hessian_blocks(lambda x: (x**3).sum(), data(3))
        gc.collect()
        assert_same(multiply(torch.ones(3)), 6 * data(3))
        assert_same(next(blocks)[1], torch.diag(6 * data(3)))


@pytest.mark.slow
def test_dropout_is_one_mask_for_all_columns():
    f = lambda x: F.dropout(x**2, 0.5).sum()
    for options in ({"batch_size": 3}, {"batch_size": 3, "out": torch.empty(16, 16)}):
        torch.manual_seed(1)
        diagonal = mt.hessian(f, torch.ones(16), **options)[0].diag().tolist()
        assert set(diagonal) == {0.0, 4.0}
        torch.manual_seed(1)
        assert mt.hessian(f, torch.ones(16), **options)[0].diag().tolist() == diagonal
        assert mt.hessian(f, torch.ones(16), **options)[0].diag().tolist() != diagonal


@pytest.mark.parametrize("mode", ["forward", pytest.param("reverse", marks=pytest.mark.slow)])
def test_out_of_any_kind(mode, tmp_path):
    outs = [
        torch.full((3, 3, 7), torch.nan),
        torch.full((7, 3, 3), torch.nan).permute(2, 1, 0),
        np.memmap(tmp_path / "out", np.float32, "w+", shape=(3, 3, 7)),
        torch.full((3, 3, 14), torch.nan)[..., ::2],
    ]
    for out in outs:
        result, _ = mt.jacobian(outer, tree(), mode=mode, batch_size=2, out=out)
        assert result is out
        assert_same(torch.as_tensor(out).clone(), J)
    one = torch.empty(7)
    mt.jacobian(scalar, tree(), mode=mode, out=one)
    assert_same(one, torch.func.grad(of_vector(scalar))(flat(tree())))


@pytest.mark.slow
def test_progress(capsys):
    assert_same(mt.hessian(scalar, tree(), batch_size=3, progress=True)[0], H)
    assert "3/3" in capsys.readouterr().err


@pytest.mark.gpu
def test_out_on_the_host():
    x = data(5).cuda()
    for out in (torch.empty(5, 5), torch.empty(5, 5, pin_memory=True), torch.empty(5, 5, device="cuda")):
        result, _ = mt.hessian(lambda x: (x**3).sum(), x, 3, out=out)
        assert_same(result.cpu(), torch.diag(6 * x).cpu())
    with pytest.raises(ValueError, match="out must be on the CPU or on the device of x, cpu, got cuda:0"):
        mt.hessian(lambda x: (x**3).sum(), x.cpu(), out=torch.empty(5, 5, device="cuda"))


X = tree()
ERRORS = {
    "no scalar": (TypeError, "f must return a real number of shape () for a Hessian, got float32[3, 3]",
                  lambda: mt.hessian(outer, X)),
    "too many": (ValueError, "nbatches=9 is more than the 7 rows or columns", lambda: mt.hessian(scalar, X, 9)),
    "zero": (ValueError, "nbatches must be a positive int, got 0", lambda: mt.jacobian(outer, X, 0)),
    "both": (ValueError, "pass one of nbatches, batch_size and max_bytes",
             lambda: mt.hessian_blocks(scalar, X, 2, batch_size=2)),
    "mode": (ValueError, "mode must be 'auto'", lambda: mt.jacobian(outer, X, mode="x")),
    "complex": (TypeError, "x['a'][0] is complex64, but coordinates are real",
                lambda: mt.hessian(scalar, {"b": data(3), "a": [data(2, 2) * 1j]})),
    "integers": (TypeError, "holds no floating-point number: x is int64",
                 lambda: mt.jacobian(lambda x: x * 1.0, torch.arange(3))),
    "tree": (TypeError, "f must return a single array", lambda: mt.jacobian(lambda x: (x, x), torch.ones(2))),
    "H": (ValueError, "H must have shape (7, 7) for the 7 numbers of x, got (3, 3)",
          lambda: mt.hessian_to_pytree(torch.ones(3, 3), X)),
    "unflatten": (ValueError, "the vector must have shape (7,), got (3,)",
                  lambda: mt.hessian(scalar, X)[1](torch.ones(3))),
    "v": (ValueError, "v must have the shapes of x, or be a vector of 7: v['b'] has (2,), x has (3,) there",
          lambda: mt.hvp(scalar, X)(X | {"b": torch.ones(2)})),
}  # fmt: skip
OUTS = {
    "shape": (ValueError, "out must have the shape of the result, (7, 7), got (6, 6)", torch.zeros(6, 6)),
    "dtype": (TypeError, "out must have the dtype of the result, float32, got float64",
              torch.zeros(7, 7, dtype=torch.float64)),
    "kind": (TypeError, "out must be a tensor, or a NumPy array or memmap, got a list", [1.0]),
    "grad": (ValueError, "out must not require grad", torch.zeros(7, 7, requires_grad=True)),
    "a part of what requires grad": (ValueError, "out must not require grad",
                                     torch.zeros(8, 7, requires_grad=True)[1:]),
    "expanded": (ValueError, "out must hold each element at a place of its own", torch.zeros(7).expand(7, 7)),
    "overlapping": (ValueError, "expanded or overlapping view (shape (7, 7), strides (1, 1))",
                    torch.zeros(13).as_strided((7, 7), (1, 1))),
    "sparse": (ValueError, "out must be a dense tensor, got a sparse or nested one (torch.sparse_coo)",
               torch.zeros(7, 7).to_sparse()),
    "inference": (ValueError, "out is an inference tensor", torch.inference_mode()(torch.zeros)(7, 7)),
    "device": (ValueError, "out must be on the CPU or on the device of x, cpu, got meta",
               torch.zeros(7, 7, device="meta")),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case):
    kind, message, call = ERRORS[case]
    with pytest.raises(kind, match=re.escape(message)):
        call()


@pytest.mark.parametrize("case", OUTS)
def test_errors_of_out(case):
    kind, message, out = OUTS[case]
    calls = []
    f = lambda x: (calls.append(1), scalar(x))[1]
    with pytest.raises(kind, match=re.escape(message)):
        mt.hessian(f, X, out=out)
    assert not calls or case in ("shape", "dtype")  # those of the result are known from a trace
    if isinstance(out, torch.Tensor) and out.device.type == "cpu":
        assert not out.to_dense().any()


def test_out_in_inference_mode():
    with torch.inference_mode():
        out = torch.zeros(7, 7)
        assert_same(mt.hessian(scalar, tree(), 2, out=out)[0].clone(), H)


@pytest.mark.parametrize("transform", ["vmap", "grad", "jvp", "jacrev", "chunked_vmap", "hessian"])
def test_out_and_blocks_need_values(transform):
    calls = {
        "out": lambda x: mt.hessian(lambda x: (x**3).sum(), x, 2, out=torch.zeros(3, 3))[0].sum(),
        "numpy": lambda x: torch.as_tensor(mt.jacobian(lambda x: x**3, x, out=np.zeros((3, 3), np.float32))[0]).sum(),
        "progress": lambda x: mt.hessian(lambda x: (x**3).sum(), x, progress=True)[0].sum(),
        "blocks": lambda x: next(mt.hessian_blocks(lambda x: (x**3).sum(), x))[1].sum(),
        "blocks of columns": lambda x: next(mt.jacobian_blocks(lambda x: x**3, x))[1].sum(),
    }
    for call in calls.values():
        run = {
            "vmap": lambda call=call: torch.func.vmap(call)(data(2, 3)),
            "grad": lambda call=call: torch.func.grad(call)(data(3)),
            "jvp": lambda call=call: torch.func.jvp(call, (data(3),), (data(3),)),
            "jacrev": lambda call=call: torch.func.jacrev(call)(data(3)),
            "chunked_vmap": lambda call=call: mt.chunked_vmap(call, 2)(data(5, 3)),
            "hessian": lambda call=call: mt.hessian(call, data(3)),
        }[transform]
        with pytest.raises(TypeError, match=r"need the values of x, which torch\.func transforms and traced"):
            run()


def test_out_over_the_memory_of_x():
    x = data(3)
    expected = 3 * x**2
    mt.jacobian(lambda x: (x**3).sum(), x, 3, mode="forward", out=x)
    assert_same(x, expected)
