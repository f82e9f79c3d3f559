"""Microbatching of torch functions against eager torch: a Python loop over microbatches or examples."""

import collections
import inspect
import math

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import optax.microbatching as optax
import pytest
import torch
import torch.nn.functional as F
from helpers import Pair, crossed, marked
from hypothesis import given, settings
from torch import nn
from torch.func import functional_call
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint
from torch_cases import assert_same, data

from microtome import torch_api as mt

SUM, MEAN = mt.AccumulationType.SUM, mt.AccumulationType.MEAN
RUNNING_MEAN, CONCAT = mt.AccumulationType.RUNNING_MEAN, mt.AccumulationType.CONCAT
PARTITIONS = ("strided", "contiguous")
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64)
FEW = settings(derandomize=True, deadline=None, max_examples=14, database=None)
MODULO = "ignore:Casting complex values to real:UserWarning"


def stacked(trees):
    """A list of trees as one tree of tensors with one axis more."""

    def stack(*rows):
        return None if rows[0] is None else torch.stack([torch.as_tensor(r) for r in rows])

    return pytree.tree_map(stack, *trees)


def summed(trees):
    return pytree.tree_map(lambda x: None if x is None else x.to(_wide(x)).sum(0).to(x.dtype), stacked(trees))


def _wide(x):
    return torch.complex128 if x.is_complex() else torch.float64 if x.is_floating_point() else x.dtype


def rows_of(tree, i, keep=False):
    return pytree.tree_map(lambda x: x[i : i + 1] if keep else x[i], tree)


def loop_of_grads(loss, params, *batch, keep=True, has_aux=False):
    """Gradients of each example, losses and auxiliary outputs, by torch.autograd in a Python loop."""
    leaves, spec = pytree.tree_flatten(params)
    grads, values, extra = [], [], []
    for i in range(len(pytree.tree_leaves(batch)[0])):
        moving = [_is_moving(x) for x in leaves]
        inner = [x.detach().clone().requires_grad_() if m else x for x, m in zip(leaves, moving, strict=True)]
        out = loss(pytree.tree_unflatten(inner, spec), *(rows_of(b, i, keep) for b in batch))
        value, aux = out if has_aux else (out, None)
        asked = [x for x, m in zip(inner, moving, strict=True) if m]
        found = iter(torch.autograd.grad(value, asked, allow_unused=True)) if value.requires_grad else iter([])
        flat = [next(found, None) if m else None for m in moving]
        zeros = [None if x is None else torch.zeros_like(x).detach() for x in leaves]
        flat = [z if g is None else g for g, z in zip(flat, zeros, strict=True)]
        grads.append(pytree.tree_unflatten(flat, spec))
        values.append(value.detach())
        extra.append(pytree.tree_map(lambda x: x.detach() if isinstance(x, torch.Tensor) else x, aux))
    return grads, torch.stack(values), extra


def _is_moving(x):
    frozen = x is None or (isinstance(x, nn.Parameter) and not x.requires_grad)
    return not frozen and (x.is_floating_point() or x.is_complex())


def detached(model):
    return {k: v.detach() for k, v in model.named_parameters()}


@pytest.mark.parametrize(
    "wrong",
    [
        (torch.ones(2), {"b": torch.ones(1), "a": None}),
        (torch.ones(2), {"a": None}),
        [torch.ones(2), {"a": None, "b": torch.ones(1)}],
        (torch.ones(3), {"a": None, "b": torch.ones(1)}),
        (torch.ones(2, dtype=torch.float64), {"a": None, "b": torch.ones(1)}),
        (torch.tensor([1.0, 1.0001]), {"a": None, "b": torch.ones(1)}),
        (torch.ones(2), {"a": None, "b": torch.tensor([math.nan])}),
    ],
)
def test_the_comparison_can_fail(wrong):
    right = (torch.ones(2), {"a": None, "b": torch.ones(1)})
    assert_same(right, right)
    with pytest.raises(AssertionError):
        assert_same(wrong, right)


def test_the_oracle_can_fail():
    grads, values, _ = loop_of_grads(lambda p, x: (p * x).sum() ** 2, torch.ones(1), torch.tensor([[1.0], [2.0]]))
    assert [g.item() for g in grads] == [2.0, 8.0]
    assert values.tolist() == [1.0, 4.0]


# --- microbatch: values ---------------------------------------------------------------------------------------------


def summary(scale, batch):
    x = batch["x"] * scale
    return {
        "rows": (x, None, batch["n"]),
        "nested": {"z": Pair(x.sum(0), x.mean(0)), "a": {"count": batch["n"].sum(), "none": None}},
        "any": (batch["n"] > 3).any(),
        "double": x.repeat_interleave(2, 0),
    }


def joined_by(mean):
    return {
        "rows": CONCAT,
        "nested": {"z": Pair(SUM, mean), "a": {"count": SUM, "none": None}},
        "any": SUM,
        "double": CONCAT,
    }


def summarised(rows, size, dtype, mean=MEAN, partition="strided"):
    batch = {"x": data(rows, 3, dtype=dtype), "n": torch.arange(rows, dtype=torch.int8)}
    scale = torch.tensor(2, dtype=dtype)
    fun = mt.microbatch(summary, 1, size, joined_by(mean), partition=partition)
    actual, expected = fun(scale, batch), summary(scale, batch)
    assert_same(actual, expected)
    assert_same((actual["rows"], actual["double"]), (expected["rows"], expected["double"]), exact=True)


@FEW
@given(
    rows=st.integers(1, 9),
    size=st.none() | st.integers(1, 10),
    partition=st.sampled_from(PARTITIONS),
    dtype=st.sampled_from(FLOATS),
    mean=st.sampled_from([MEAN, RUNNING_MEAN]),
)
def test_microbatch_equals_the_plain_function(rows, size, partition, dtype, mean):
    summarised(rows, size, dtype, mean, partition)


@pytest.mark.parametrize("dtype", FLOATS)
def test_microbatch_keeps_every_dtype(dtype):
    summarised(7, 3, dtype)  # a prime batch: the last microbatch is shorter


@pytest.mark.parametrize("size", [None, 1, 3])
def test_microbatch_of_an_empty_batch(size):
    fun = mt.microbatch(summary, 1, size, joined_by(MEAN))
    x = torch.zeros(0, 3, dtype=torch.bfloat16)
    out = fun(torch.tensor(2, dtype=torch.bfloat16), {"x": x, "n": torch.zeros(0, dtype=torch.int8)})
    assert_same(out["rows"], (x, None, torch.zeros(0, dtype=torch.int8)))
    assert_same(out["nested"]["z"].left, torch.zeros(3, dtype=torch.bfloat16))
    assert_same(out["nested"]["z"].right, torch.full((3,), math.nan, dtype=torch.bfloat16))
    assert_same(out["nested"]["a"], {"count": torch.tensor(0), "none": None})
    assert_same(out["any"], torch.tensor(False))


def test_an_empty_batch_has_zero_gradients():
    rows = torch.zeros(0, 2)
    for how, fun in ((SUM, torch.sum), (MEAN, torch.mean), (CONCAT, lambda y: y)):
        w = torch.ones(2, requires_grad=True)
        out = mt.microbatch(lambda b, w=w, fun=fun: fun(b * w), 0, 2, how)(rows)
        assert_same(out.detach(), fun(rows))
        assert_same(torch.autograd.grad(out.sum(), w)[0], torch.zeros(2))


def test_integers_are_summed_over_examples_as_by_torch():
    rows = [torch.full((300,), 100, dtype=dtype) for dtype in (torch.int8, torch.uint8, torch.int16, torch.int32)]
    sums = mt.micro_vmap(lambda *b: (*b, b[0] > 0), microbatch_size=150, accumulator=SUM)(*rows)
    assert_same(sums, tuple(x.sum() for x in (*rows, rows[0] > 0)), exact=True)


def test_integers_and_booleans():
    x = torch.tensor([3, -1, 4, -1, 5])
    fun = lambda b: ((b > 0).sum(), b * 2, b.sum(), (b > 4).any(), (b > 0), b.to(torch.int32).max())
    largest = mt.Accumulator(torch.zeros_like, lambda carry, v, i: torch.maximum(carry, v), lambda c: c, lambda v: v)
    out = mt.microbatch(fun, 0, 2, (SUM, CONCAT, SUM, SUM, CONCAT, largest))(x)
    assert_same(out, fun(x))
    assert out[0].dtype == torch.int64


def test_remainder_error_takes_what_divides():
    x = data(6, 2)
    fun = mt.microbatch(torch.mean, 0, 3, MEAN, remainder="error")
    assert_same(fun(x), x.mean())
    with pytest.raises(ValueError, match="batch_size=5 must be divisible by microbatch_size=3"):
        fun(x[:5])


@pytest.mark.parametrize(("partition", "first"), [("strided", [0, 3]), ("contiguous", [0, 1])])
def test_which_rows_make_a_microbatch(partition, first):
    with pytest.raises(ValueError, match=r"CONCAT: it has shape \(1, 2\) .* \(1, 1\) for the rows left over"):
        mt.microbatch(lambda b: b[None], 0, 2, CONCAT, partition=partition)(torch.arange(7))
    pairs = mt.microbatch(lambda b: b[None, :1], 0, 2, CONCAT, partition=partition, num_real_microbatches=1)
    assert pairs(torch.arange(6)).flatten()[0] == 0
    sums = mt.microbatch(lambda b: b.sum(), 0, 2, SUM, partition=partition, num_real_microbatches=1)
    assert sums(torch.arange(6)).item() == sum(first)


def test_reshape_batch_axis():
    tree = {"b": torch.arange(12).reshape(6, 2), "a": (torch.ones(6, dtype=torch.bool), None)}
    out = mt.reshape_batch_axis(tree, 2)
    split = lambda x: None if x is None else x.reshape(2, 3, *x.shape[1:]).transpose(0, 1).contiguous()
    expected = pytree.tree_map(split, tree)
    assert_same(out, expected, exact=True)
    assert_same(mt.reshape_batch_axis(torch.arange(12).reshape(2, 6), 3, 1), torch.tensor(
        [[[0, 2, 4], [1, 3, 5]], [[6, 8, 10], [7, 9, 11]]]), exact=True)  # fmt: skip


def test_batch_axes_and_ways_to_call():
    def fun(scale, x, y, *, shared=None, power=1):
        return (x.sum(1) * y * scale) ** power if shared is None else (x.sum(1) * y * scale + shared) ** power

    x, y, shared = data(3, 5), data(5, seed=1), data(3, seed=2)
    call = mt.microbatch(fun, (1,), 2, argnames="y", in_axes=(1, 0))
    with pytest.raises((ValueError, TypeError, RuntimeError)):  # [3] of two columns and [2] of y do not add up
        call(2.0, x, y)
    fun2 = lambda scale, x, y, *, shared=0.0, power=1: ((x * y).sum(1) * scale + shared) ** power
    call = mt.microbatch(fun2, 1, 5, SUM, argnames="y", in_axes=(1, 0))
    assert_same(call(2.0, x, y), fun2(2.0, x, y))
    small = mt.microbatch(lambda scale, x, y, *, power=1: ((x * y).sum(1) * scale) ** power, 1, 2, SUM,
                          argnames="y", in_axes=(1, 0))  # fmt: skip
    expected = (x * y).sum(1) * 2.0
    assert_same(small(2.0, x, y), expected)
    assert_same(small(2.0, x, y=y), expected)
    assert_same(small(scale=torch.tensor(2.0), y=y, x=x), expected)
    with_none = mt.microbatch(lambda x, s: (x * s).sum(0), (0, 1), 2, in_axes=({"a": 0, "b": None}["a"], None))
    assert_same(with_none(x.T.contiguous(), shared), (x.T * shared).sum(0))
    prefix = mt.microbatch(lambda t: (t["b"] * t["a"][0]).sum(0), 0, 2, in_axes=({"b": 0, "a": (None, 0)},))
    tree = {"b": x.T.contiguous(), "a": (shared, y)}
    assert_same(prefix(tree), (x.T * shared).sum(0))


def test_containers_of_torch_come_back():
    def fun(x):
        return collections.OrderedDict(z=x, a=[x.sum(), (x, {"k": x.mean()})])

    x = data(5)
    out = mt.microbatch(fun, 0, 2, collections.OrderedDict(z=CONCAT, a=[SUM, (CONCAT, MEAN)]))(x)
    assert_same(out, fun(x))


# --- accumulators ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "partition"), crossed(mt.AccumulationType, PARTITIONS))
def test_every_accumulation_type_over_examples(kind, partition):
    x = {"b": data(7, 3), "a": data(7, seed=1, dtype=torch.float64)}
    fun = lambda row: (row["b"] * 2, {"z": row["b"].sum(), "a": row["a"] ** 2})
    whole = torch.func.vmap(fun)(x)
    expected = whole if kind is CONCAT else pytree.tree_map(lambda y: y.sum(0) if kind is SUM else y.mean(0), whole)
    assert_same(mt.micro_vmap(fun, microbatch_size=3, accumulator=kind, partition=partition)(x), expected)


def test_accumulators_stand_for_subtrees():
    x = data(5, 2)
    fun = lambda row: {"z": {"b": row, "a": row.sum()}, "k": (row.mean(), (row > 0).sum(), row.sum() > 0)}
    whole = torch.func.vmap(fun)(x)
    out = mt.micro_vmap(fun, microbatch_size=2, accumulator={"z": SUM, "k": (MEAN, SUM, SUM)})(x)
    mean, count, flag = whole["k"]
    expected = {"z": {"b": x.sum(0), "a": x.sum()}, "k": (mean.mean(), count.sum(), flag.sum())}
    assert_same(out, expected)


def ignoring(logits, targets):
    return F.cross_entropy(logits, targets), (targets != -100).sum()


@pytest.mark.parametrize("partition", marked(PARTITIONS, quick=("strided",)))
def test_weighted_mean_with_a_microbatch_of_ignored_labels(partition):
    targets = torch.tensor([1, 2, -100, -100, 0] if partition == "contiguous" else [1, -100, 2, -100, 0])
    fun = mt.microbatch(ignoring, (0, 1), 2, mt.weighted_mean(), partition=partition)
    logits, plain = data(5, 3).requires_grad_(), data(5, 3).requires_grad_()
    value, weight = fun(logits, targets)
    assert_same((value, weight), (F.cross_entropy(plain, targets), torch.tensor(3)))
    value.backward()
    F.cross_entropy(plain, targets).backward()
    assert_same(logits.grad, plain.grad)
    assert logits.grad[targets == -100].abs().sum() == 0


def test_weighted_mean_of_nothing_and_of_examples():
    logits = data(4, 3).requires_grad_()
    value, weight = mt.microbatch(ignoring, (0, 1), 2, mt.weighted_mean())(logits, torch.full((4,), -100))
    assert (value.item(), weight.item()) == (0.0, 0)
    value.backward()
    assert logits.grad.abs().sum() == 0
    x, w = data(5, 2), torch.tensor([1.0, 0.0, 2.0, 0.5, 0.0])
    fun = lambda x, w: ({"v": x / (w > 0)}, w)
    out = mt.micro_vmap(fun, microbatch_size=2, accumulator=mt.weighted_mean())(x, w)
    assert_same(out, ({"v": (x * w[:, None]).sum(0) / w.sum()}, w.sum()))


def test_sums_of_parts_with_an_ignored_microbatch():
    logits, targets = data(4, 3).requires_grad_(), torch.tensor([1, 2, -100, -100])
    part = lambda z, y: (F.cross_entropy(z, y, reduction="sum"), (y != -100).sum())
    total, count = mt.microbatch(part, (0, 1), 2, SUM, partition="contiguous")(logits, targets)
    (total / count).backward()
    assert count.item() == 2
    assert torch.isfinite(logits.grad).all()
    assert logits.grad[2:].abs().sum() == 0


def logsumexp_accumulator(**marked):
    """Keeps (maximum, sum of exponentials): a carry of another tree than the value's."""

    def update(carry, value, index):
        top = torch.maximum(carry["top"], value.max(0).values)
        return {
            "total": carry["total"] * torch.exp(carry["top"] - top) + torch.exp(value - top).sum(0),
            "top": top,
            "seen": carry["seen"] + index,
        }

    pieces = {
        "init": lambda like: {
            "total": torch.zeros_like(like[0]),
            "top": torch.full_like(like[0], -1e30),
            "seen": torch.zeros((), dtype=torch.int64),
        },
        "update": update,
        "finalize": lambda carry: (carry["top"] + carry["total"].log(), carry["seen"]),
        "aggregate": lambda values: values,
    }
    return mt.Accumulator(**(pieces | marked))


def test_an_accumulator_of_torch_pieces():
    x = data(7, 3, dtype=torch.float64)
    out = mt.microbatch(lambda b: b * 2, 0, 2, logsumexp_accumulator())(x)
    assert_same(out, ((x * 2).logsumexp(0), torch.tensor(0 + 1 + 2 + 3)))
    finish = mt.jax_function(lambda carry: (carry["top"] + jnp.log(carry["total"]), carry["seen"]))
    marked = mt.microbatch(lambda b: b * 2, 0, 2, {"r": logsumexp_accumulator(finalize=finish)} and
                           logsumexp_accumulator(finalize=finish))(x)  # fmt: skip
    assert_same(marked, out)
    each = mt.micro_vmap(lambda row: {"lse": row, "n": row.sum()}, microbatch_size=3,
                         accumulator={"lse": logsumexp_accumulator(), "n": SUM})(x)  # fmt: skip
    assert_same(each["lse"][0], x.logsumexp(0))


def test_an_accumulator_with_a_gradient_and_a_captured_tensor():
    scale = torch.tensor(2.0)
    largest = mt.Accumulator(
        init=lambda like: torch.full_like(like, -torch.inf),
        update=lambda carry, value, index: torch.maximum(carry, value * scale),
        finalize=lambda carry: carry,
        aggregate=lambda values: values.max(0).values,
    )
    x = torch.tensor([[3.0, 1.0], [9.0, -1.0], [4.0, 5.0]], requires_grad=True)
    fun = mt.microbatch(lambda b: b.max(0).values, 0, 2, largest)
    out = fun(x)
    assert out.tolist() == [18.0, 10.0]
    out.sum().backward()
    assert x.grad.tolist() == [[0.0, 0.0], [2.0, 0.0], [0.0, 2.0]]
    scale.fill_(3.0)
    assert fun(x).tolist() == [27.0, 15.0]


@pytest.mark.slow
def test_sums_in_half_precision_do_not_stall():
    ones = torch.ones(1000, 1, dtype=torch.bfloat16)
    for size in (1, 7):
        assert mt.microbatch(lambda b: b.sum(), 0, size)(ones).item() == 1000
        assert mt.microbatch(lambda b: b.mean(), 0, size, MEAN)(ones).item() == 1
        assert mt.micro_vmap(lambda b: b.sum(), microbatch_size=size, accumulator=SUM)(ones).item() == 1000
        grads, _ = mt.micro_grad(lambda p, x: (p * x).sum(), microbatch_size=size)(ones[0], ones)
        assert_same(grads, torch.tensor([1000], dtype=torch.bfloat16), exact=True)
    assert mt.micro_vmap(lambda b: b.sum(), accumulator=SUM)(ones).item() == 1000


# --- micro_vmap -----------------------------------------------------------------------------------------------------


def of_one_example(x, n, w):
    y = torch.sin(x) @ w
    return {"z": y, "a": (y.sum(), None, n * 2), "flag": y.real.sum() > 0, "k": Pair([x], n)}


@FEW
@given(
    rows=st.integers(0, 9),
    size=st.none() | st.integers(1, 10),
    partition=st.sampled_from(PARTITIONS),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.complex64]),
    axis=st.sampled_from([0, 1, -1]),
)
def test_micro_vmap_equals_vmap(rows, size, partition, dtype, axis):
    x, n, w = data(rows, 3, dtype=dtype), torch.arange(rows), data(3, 2, seed=1, dtype=dtype)
    x = x if axis == 0 else x.T.contiguous()
    call = mt.micro_vmap(of_one_example, (axis, 0, None), microbatch_size=size, partition=partition)
    if rows:
        expected = stacked([of_one_example(x.select(axis, i), n[i], w) for i in range(rows)])
    else:
        one = of_one_example(torch.zeros(3, dtype=dtype), torch.tensor(0), w)
        expected = pytree.tree_map(lambda y: None if y is None else y.new_zeros(0, *y.shape), one)
    assert_same(call(x, n, w), expected)


def test_micro_vmap_maps_keywords_and_shares_python_values():
    fun = lambda x, *, y=None, power=1, name="s": (x + y) ** power if name == "s" else x
    x, y = data(5, 2), data(5, 2, seed=1)
    assert_same(mt.micro_vmap(fun, microbatch_size=2)(x, y=y, power=2, name="s"), (x + y) ** 2)
    assert_same(mt.micro_vmap(lambda t: t["b"] * t["a"], microbatch_size=2)({"b": x, "a": y}), x * y)
    mapped = mt.micro_vmap(lambda t: t["b"] * t["a"], ({"b": 0, "a": None},), microbatch_size=2)
    assert_same(mapped({"b": x, "a": y[0]}), x * y[0])


@pytest.mark.slow
def test_modules_methods_and_jax_functions_can_be_mapped():
    torch.manual_seed(0)
    layer = nn.Linear(3, 2)
    x = data(5, 3)
    assert_same(mt.micro_vmap(layer, microbatch_size=2)(x), layer(x))
    assert_same(mt.micro_vmap(layer.forward, microbatch_size=2)(x), layer(x))
    assert_same(mt.microbatch(layer, 0, 2, CONCAT)(x), layer(x))
    assert_same(mt.micro_vmap(mt.jax_function(jnp.sum), microbatch_size=2)(x), x.sum(1))
    assert_same(mt.micro_vmap(jnp.cumsum, microbatch_size=2)(x), x.cumsum(1))
    assert_same(mt.microbatch(mt.jax_function(lambda b: b.sum(0)), 0, 2)(x), x.sum(0))


def test_results_keep_their_signature():
    def loss(params, batch, *, flag=True):
        """A loss."""

    for made in (mt.microbatch(loss, 1, 2), mt.micro_vmap(loss), mt.micro_grad(loss)):
        assert inspect.signature(made) == inspect.signature(loss)
        assert (made.__name__, made.__doc__) == ("loss", "A loss.")
    assert list(inspect.signature(mt.microbatch(nn.Linear(1, 1), 0, 2)).parameters) == ["input"]


# --- micro_grad: values ---------------------------------------------------------------------------------------------


def regression(params, x, y):
    hidden = torch.tanh(x @ params["w"] + params["b"][0])
    return ((hidden.sum(-1) - y).abs() ** 2).mean()


def regression_data(rows, dtype):
    params = {"w": data(3, 2, dtype=dtype), "b": (data(2, seed=1, dtype=dtype),)}
    return params, data(rows, 3, seed=2, dtype=dtype), data(rows, seed=3, dtype=dtype)


@FEW
@given(
    rows=st.integers(1, 9),
    size=st.none() | st.integers(1, 10),
    partition=st.sampled_from(PARTITIONS),
    dtype=st.sampled_from(FLOATS),
    keep=st.booleans(),
    kind=st.sampled_from([SUM, MEAN, RUNNING_MEAN]),
)
def test_micro_grad_equals_the_loop(rows, size, partition, dtype, keep, kind):
    params, x, y = regression_data(rows, dtype)
    call = mt.micro_grad(regression, batch_argnums=(1, 2), keep_batch_dim=keep, microbatch_size=size,
                         accumulator=kind, partition=partition)  # fmt: skip
    grads, aux = call(params, x, y)
    expected, values, _ = loop_of_grads(regression, params, x, y, keep=keep)
    total = pytree.tree_map(lambda g: g if kind is SUM else g / rows, summed(expected))
    assert_same(grads, total)
    assert_same(tuple(aux), (values, None, None))


@pytest.mark.parametrize("size", [None, 1, 4])
def test_micro_grad_of_the_empty_batch_of_poisson_sampling(size):
    params = {"w": torch.ones(3, dtype=torch.bfloat16), "step": torch.tensor(3)}
    clip = lambda g: {"w": g["w"] / (g["w"].norm() + 1e-6), "step": g["step"]}
    call = mt.micro_grad(lambda p, x: (p["w"] * x).sum(), microbatch_size=size, transform_fn=clip,
                         metrics_fn=lambda g: g["w"].norm())  # fmt: skip
    grads, aux = call(params, torch.zeros(0, 3))
    assert_same(grads, {"w": torch.zeros(3, dtype=torch.bfloat16), "step": torch.tensor(0)})
    assert_same(tuple(aux), (torch.zeros(0), torch.zeros(0, dtype=torch.bfloat16), None))


def two_sided(a, b, x):
    return (a["u"] * x).sum() * b + b**2


ARGNUMS = [(0, 2), (-3, -1), (1, 2), ((0, 1), 2), ((1, 0), (2,)), ([-2], [-1]), ((0, 1, 2), 2), (2, 2)]


@pytest.mark.parametrize(("numbers", "keep"), crossed(ARGNUMS, [True, False]))
def test_argnums(numbers, keep):
    argnums, batch_argnums = numbers
    a, b, x = {"u": data(3), "n": torch.tensor([1, 2])}, torch.tensor(1.5), data(5, 3, seed=1)
    positions = [argnums] if isinstance(argnums, int) else list(argnums)
    join = lambda p: CONCAT if p % 3 == 2 else SUM
    accumulator = join(argnums) if isinstance(argnums, int) else tuple(map(join, positions))
    call = mt.micro_grad(two_sided, argnums=argnums, batch_argnums=batch_argnums, keep_batch_dim=keep,
                         microbatch_size=2, accumulator=accumulator)  # fmt: skip
    grads, _ = call(a, b, x)
    each = [loop_of_grads(lambda p, i: two_sided(*p[:2], p[2]), [a, b, x[i : i + 1] if keep else x[i]],
                          torch.arange(1))[0][0] for i in range(5)]  # fmt: skip
    total = [summed([g[0] for g in each]), summed([g[1] for g in each]), stacked([g[2] for g in each])]
    expected = total[argnums] if isinstance(argnums, int) else tuple(total[p] for p in positions)
    assert_same(grads, expected)


@pytest.mark.slow
def test_ways_to_call():
    def loss(params, batch, scale=1.0, *, weights=None, power=2):
        value = ((params * batch).sum() * scale) ** power
        return value if weights is None else value * weights.sum()

    params, x, weights = data(3), data(5, 3, seed=1), data(5, seed=2)
    call = mt.micro_grad(loss, microbatch_size=2)
    expected = summed(loop_of_grads(loss, params, x)[0])
    for args, kwargs in [((params, x), {}), ((params,), {"batch": x}), ((), {"batch": x, "params": params})]:
        grads, aux = call(*args, **kwargs)
        assert_same(grads, expected)
        assert aux.values.shape == (5,)
    scaled = summed(loop_of_grads(lambda p, b: loss(p, b, 0.5, power=3), params, x)[0])
    assert_same(call(params, x, 0.5, power=3)[0], scaled)
    assert_same(call(params, x, scale=torch.tensor(0.5), power=3)[0], scaled)
    weighted = summed(loop_of_grads(lambda p, b, w: loss(p, b, weights=w), params, x, weights)[0])
    assert_same(call(params, x, weights=weights)[0], weighted)  # a keyword-only tensor is mapped


@pytest.mark.parametrize("keep", [True, False])
def test_aux_metrics_and_transforms(keep):
    def loss(p, x):
        y = x * p["w"]
        return y.sum() ** 2, {"z": y, "a": (y.argmax(), None), "flag": y.sum() > 0}

    metrics = lambda g: {"norm": g["w"].norm(), "big": g["w"].abs().max() > 1}
    clip = lambda g: (g["w"] / g["w"].norm().clamp(min=1.0), g["w"].norm())
    params, x = {"w": data(3)}, data(5, 3, seed=1)
    call = mt.micro_grad(loss, True, keep_batch_dim=keep, microbatch_size=2, transform_fn=clip, metrics_fn=metrics,
                         accumulator=(SUM, CONCAT))  # fmt: skip
    grads, aux = call(params, x)
    expected, values, extra = loop_of_grads(loss, params, x, keep=keep, has_aux=True)
    clipped = [clip(g) for g in expected]
    assert_same(grads, (summed([c for c, _ in clipped]), stacked([n for _, n in clipped])))
    assert_same(tuple(aux), (values, stacked([metrics(g) for g in expected]), stacked(extra)))
    assert aux._fields == ("values", "metrics", "aux")


@pytest.mark.parametrize(("of_fun", "of_transform", "of_metrics"), crossed(*[["torch", "jax"]] * 3))
def test_pieces_written_in_jax(of_fun, of_transform, of_metrics):
    params, x = {"w": data(3)}, data(5, 3, seed=1)
    loss = lambda p, x: (p["w"] * x).sum() ** 2
    clip = lambda g: {"w": g["w"] / g["w"].norm().clamp(min=1.0)}
    jax_loss = mt.jax_function(lambda p, x: jnp.sum(p["w"] * x) ** 2)
    jax_clip = mt.jax_function(lambda g: {"w": g["w"] / jnp.maximum(jnp.linalg.norm(g["w"]), 1.0)})
    jax_norm = mt.jax_function(lambda g: jnp.linalg.norm(g["w"]))
    grads, values, _ = loop_of_grads(loss, params, x)
    norms = torch.stack([g["w"].norm() for g in grads])
    expected = summed([clip(g) for g in grads])
    fun, transform = {"torch": loss, "jax": jax_loss}[of_fun], {"torch": clip, "jax": jax_clip}[of_transform]
    metrics = {"torch": lambda g: g["w"].norm(), "jax": jax_norm}[of_metrics]
    call = mt.micro_grad(fun, microbatch_size=2, transform_fn=transform, metrics_fn=metrics)
    out, aux = call(params, x)
    assert_same(out, expected)
    assert_same((aux.values, aux.metrics), (values, norms))


def test_clipping_an_example_of_zero_gradient():
    x = torch.tensor([[0.0, 0.0], [3.0, 4.0]])
    clip = lambda g: {k: v / g["w"].norm().clamp(min=1.0) for k, v in g.items()}
    grads, _ = mt.micro_grad(lambda p, r: (p["w"] * r).sum(), transform_fn=clip)({"w": torch.zeros(2)}, x)
    assert_same(grads["w"], torch.tensor([0.6, 0.8]))


def test_sum_and_mean_of_transformed_gradients():
    x = torch.tensor([[3.0], [4.0], [5.0]])
    sign = lambda g: g / g.abs()
    for kind, expected in ((SUM, 3.0), (MEAN, 1.0), (RUNNING_MEAN, 1.0)):
        call = mt.micro_grad(lambda p, r: (p * r).sum(), microbatch_size=2, transform_fn=sign, accumulator=kind)
        assert call(torch.zeros(1), x)[0].item() == pytest.approx(expected, abs=1e-6)
    kept = mt.micro_grad(lambda p, r: (p * r).sum(), microbatch_size=2, accumulator=CONCAT)
    assert_same(kept(torch.zeros(1), x)[0], x)


# --- micro_grad: parameters of every kind ---------------------------------------------------------------------------


def test_unused_frozen_and_integer_parameters_get_zeros():
    frozen = nn.Parameter(data(2, seed=1), requires_grad=False)
    params = {
        "used": data(2),
        "unused": torch.ones(3, dtype=torch.float64),
        "frozen": frozen,
        "step": torch.tensor(3, dtype=torch.int32),
        "mask": torch.tensor([True, False]),
        "none": None,
        "plain": data(2, seed=2).requires_grad_(False),
    }
    loss = lambda p, x: (p["used"] * p["frozen"] * p["plain"] * x).sum() * p["step"] + (p["mask"] * x).sum()
    x = data(4, 2, seed=3)
    grads, aux = mt.micro_grad(loss, microbatch_size=3)(params, x)
    expected, values, _ = loop_of_grads(loss, params, x)
    assert_same((grads, aux.values), (summed(expected), values))
    assert grads["frozen"].abs().sum() == 0
    assert grads["plain"].abs().sum() > 0
    assert frozen.grad is None
    means, _ = mt.micro_grad(loss, microbatch_size=3, accumulator=MEAN)(params, x)
    assert_same(means["step"], torch.tensor(0, dtype=torch.int32))
    assert_same(means["used"], grads["used"] / 4)


def test_frozen_parameters_of_a_model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    model[0].requires_grad_(False)
    loss = lambda p, x: functional_call(model, p, (x,)).pow(2).sum()
    x = data(5, 3)
    grads, _ = mt.micro_grad(loss, microbatch_size=2)(dict(model.named_parameters()), x)
    model(x).pow(2).sum().backward()
    for name, p in model.named_parameters():
        assert_same(grads[name], torch.zeros_like(p).detach() if p.grad is None else p.grad)
    model[0].requires_grad_(True)  # thawed: no stale program
    thawed, _ = mt.micro_grad(loss, microbatch_size=2)(dict(model.named_parameters()), x)
    assert thawed["0.weight"].abs().sum() > 0


def test_complex_parameters_follow_torch():
    loss = lambda p, x: (p["z"] * x).abs().pow(2).sum() + p["z"].real.sum() * p["r"]
    params = {"z": torch.tensor(1 + 1j), "r": torch.tensor(0.0)}
    grads, _ = mt.micro_grad(lambda p, x: (p["z"] * x).abs().pow(2).sum(), microbatch_size=2)(params, torch.ones(3, 1))
    assert abs(grads["z"].item() - (6 + 6j)) < 1e-5
    x = data(5, 2, dtype=torch.complex64)
    params = {"z": data(2, seed=1, dtype=torch.complex64), "r": torch.tensor(0.5)}
    turn = lambda g: {"z": g["z"] * 1j, "r": g["r"]}
    for transform in (None, turn):
        grads, aux = mt.micro_grad(loss, microbatch_size=2, transform_fn=transform)(params, x)
        expected, values, _ = loop_of_grads(loss, params, x)
        assert_same(grads, summed([transform(g) if transform else g for g in expected]))
        assert_same(aux.values, values)
    stepped = {k: v - 0.05 * g for (k, v), g in zip(params.items(), grads.values(), strict=True)}
    assert stepped["z"].shape == (2,)


class TiedWeights(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.out = nn.Linear(3, 5, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, ids):
        return self.out(self.embed(ids))


@pytest.mark.slow
def test_tied_weights():
    torch.manual_seed(0)
    model, ids = TiedWeights(), torch.tensor([0, 3, 3])
    params = dict(model.named_parameters())
    assert list(params) == ["embed.weight"]
    loss = lambda p, i: F.cross_entropy(functional_call(model, p, (i,)), i)
    norm = lambda g: g["embed.weight"].norm()
    grads, aux = mt.micro_grad(loss, microbatch_size=2, metrics_fn=norm)(params, ids)
    expected, values, _ = loop_of_grads(loss, params, ids)
    assert_same(grads, summed(expected))
    assert_same((aux.values, aux.metrics), (values, torch.stack([norm(g) for g in expected])))
    table = {"E": model.embed.weight.detach()}  # one tensor, used twice
    twice = lambda p, i: F.cross_entropy(p["E"][i] @ p["E"].T, i)
    assert_same(mt.micro_grad(twice, microbatch_size=2)(table, ids)[0], {"E": grads["embed.weight"]})
    # One tensor under two names: each name has the gradient of its own use.
    named = dict(model.named_parameters(remove_duplicate=False))
    apart = lambda p, i: F.cross_entropy(p["embed.weight"][i] @ p["out.weight"].T, i)
    both, _ = mt.micro_grad(apart, microbatch_size=2)(named, ids)
    assert list(both) == ["embed.weight", "out.weight"]
    assert_same(both["embed.weight"] + both["out.weight"], grads["embed.weight"])


def test_tied_weights_of_single_tokens():
    table, ids = data(5, 3), torch.tensor([0, 3, 3])
    loss = lambda p, i: F.cross_entropy(p["E"][i] @ p["E"].T, i)
    expected = summed(loop_of_grads(loss, {"E": table}, ids, keep=False)[0])
    assert_same(mt.micro_grad(loss, microbatch_size=2, keep_batch_dim=False)({"E": table}, ids)[0], expected)


class LastState(nn.Module):
    def __init__(self, cell):
        super().__init__()
        self.cell = cell

    def forward(self, x):
        return self.cell(x)[0][:, -1]


class SelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x):
        y = self.norm(x)
        return x + self.attention(y, y, y, need_weights=False)[0]


MODELS = {
    "mlp": (lambda: nn.Sequential(nn.Linear(4, 3), nn.GELU(), nn.Linear(3, 2)), lambda: data(5, 4)),
    "cnn": (
        lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.GroupNorm(1, 2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        lambda: data(3, 1, 6, 6),
    ),
    "batch norm in eval mode": (
        lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)).eval(),
        lambda: data(5, 4),
    ),
    "lstm": (lambda: LastState(nn.LSTM(4, 2, batch_first=True)), lambda: data(3, 3, 4)),
    "gru": (lambda: LastState(nn.GRU(4, 2, batch_first=True)), lambda: data(3, 3, 4)),
    "attention": (SelfAttention, lambda: data(3, 3, 4)),
    "embedding": (
        lambda: nn.Sequential(nn.Embedding(6, 3), nn.Flatten(), nn.Linear(6, 2)),
        lambda: torch.tensor([[0, 1], [5, 5], [2, 0]]),
    ),
}


_SLOW_MODELS = ("lstm", "gru", "attention", "cnn")


@pytest.mark.parametrize("name", marked(MODELS, slow=_SLOW_MODELS))
def test_models(name):
    torch.manual_seed(0)
    make, batch = MODELS[name]
    model, x = make(), batch()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    loss = lambda p, row: functional_call(model, p, (row,)).pow(2).sum()
    params = dict(model.named_parameters())
    grads, aux = mt.micro_grad(loss, microbatch_size=2)(params, x)
    expected, values, _ = loop_of_grads(loss, params, x)
    assert_same((grads, aux.values), (summed(expected), values))
    again, _ = mt.micro_grad(loss, microbatch_size=2)(params, x)
    assert_same(again, grads, exact=True)
    assert_same(dict(model.state_dict()), before, exact=True)
    assert all(type(v) is torch.Tensor for v in model.state_dict().values())
    assert model(x).shape[0] == len(x)  # the module works as before


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp", "gru"])
def test_microbatch_of_a_model_trains_it(name):
    torch.manual_seed(0)
    make, batch = MODELS[name]
    model, x = make(), batch()
    total = mt.microbatch(lambda b: model(b).pow(2).mean(), 0, 2, MEAN)
    for _ in range(2):
        model.zero_grad()
        total(x).backward()
        found = {k: p.grad.clone() for k, p in model.named_parameters()}
        model.zero_grad()
        model(x).pow(2).mean().backward()
        assert_same(found, {k: p.grad for k, p in model.named_parameters()})
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.1)


def test_a_loss_that_closes_over_the_model():
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    ran = []

    def loss(p, x):
        ran.append(1)
        return (model(x) * p).pow(2).sum()

    params, x, counts = data(2), data(5, 3, seed=1), []
    for _ in range(3):
        grads, aux = mt.micro_grad(loss, microbatch_size=2)(params, x)
        counts.append(len(ran))
        expected, values, _ = loop_of_grads(loss, params, x)
        del ran[counts[-1] :]
        assert_same((grads, aux.values), (summed(expected), values))
        optimizer.zero_grad()
        mt.microbatch(lambda b: model(b).pow(2).mean(), 0, 2, MEAN)(x).backward()
        optimizer.step()
    assert len(set(counts)) == 1


def test_derivatives_inside_the_loss():
    def physics(p, x):  # a residual of a differential equation
        x = x.detach().clone().requires_grad_()
        u = torch.tanh(x * p["w"]).sum() + p["b"]
        (slope,) = torch.autograd.grad(u, x, create_graph=True)
        return (slope - x).pow(2).sum()

    def meta(p, x):  # one inner step, differentiated through
        inner = lambda w: (w * x).sum().cos()
        return inner(p["w"] - 0.1 * torch.func.grad(inner)(p["w"])) + p["b"] * 0

    params, x = {"w": data(2), "b": torch.tensor(0.3)}, data(5, 2, seed=1)
    for loss in (physics, meta):
        grads, aux = mt.micro_grad(loss, microbatch_size=2)(params, x)
        expected, values, _ = loop_of_grads(loss, params, x)
        assert_same((grads, aux.values), (summed(expected), values))


@pytest.mark.parametrize("reentrant", marked([True, False], quick=(False,)))
def test_checkpoint_inside_the_loss(reentrant):
    def loss(p, x):
        block = lambda w, y: torch.sin(y * w)
        y = checkpoint(block, p["w"], x, use_reentrant=reentrant)
        return checkpoint(block, p["w"], y, use_reentrant=reentrant).sum()

    params, x = {"w": data(2)}, data(5, 2, seed=1)
    plain = lambda p, x: torch.sin(torch.sin(x * p["w"]) * p["w"]).sum()
    assert_same(mt.micro_grad(loss, microbatch_size=2)(params, x)[0], summed(loop_of_grads(plain, params, x)[0]))
    w = data(2).requires_grad_()
    mt.microbatch(lambda b: loss({"w": w}, b), 0, 2)(x).backward()
    other = data(2).requires_grad_()
    plain({"w": other}, x).backward()
    assert_same(w.grad, other.grad)


# --- microbatches that do not run -----------------------------------------------------------------------------------


def test_num_real_microbatches():
    ran = []

    def fun(x):
        ran.append(1)
        return x.sum(0), x, x.mean()

    x, counts = data(7, 2), []
    for real in [0, 1, 3, 4, torch.tensor(0), torch.tensor(2), torch.tensor(4), torch.tensor(3), torch.tensor(9)]:
        call = mt.microbatch(fun, 0, 2, (SUM, CONCAT, MEAN), num_real_microbatches=real, partition="contiguous")
        total, rows, mean = call(x)
        counts.append(len(ran))
        kept = x[: 2 * int(real)]
        assert_same((total, mean), (kept.sum(0), kept.mean()))
        assert_same(rows, torch.cat([kept, torch.zeros(7 - len(kept), 2)]))
    assert len(set(counts[4:])) == 1, "a new value of the tensor traces again"


def test_num_real_microbatches_of_gradients():
    ran = []

    def loss(p, x):
        ran.append(1)
        return (p * x).sum() ** 2

    params, x, counts = data(2), data(6, 2, seed=1), []
    grads, values, _ = loop_of_grads(loss, params, x)
    ran.clear()
    for real in (torch.tensor(1), torch.tensor(3, dtype=torch.int32), torch.tensor(2), torch.tensor(1)):
        call = mt.micro_grad(loss, microbatch_size=2, num_real_microbatches=real.long(), partition="contiguous",
                             accumulator=MEAN)  # fmt: skip
        found, aux = call(params, x)
        counts.append(len(ran))
        n = 2 * int(real)
        assert_same(found, summed(grads[:n]) / n)
        assert_same(aux.values, torch.cat([values[:n], torch.zeros(6 - n)]))
    assert len(set(counts)) == 1
    each = mt.micro_vmap(lambda r: r.sum(), microbatch_size=2, num_real_microbatches=1, partition="contiguous")
    assert_same(each(x), torch.cat([x[:2].sum(1), torch.zeros(4)]))


# --- randomness -----------------------------------------------------------------------------------------------------


def dropped(x):
    return F.dropout(x, 0.5)


def noisy_loss(p, x):
    return (F.dropout(p * x, 0.5) + F.dropout(p * x, 0.5) * 10).sum()


def masks(call, *args, seed=None):
    if seed is not None:
        torch.manual_seed(seed)
    out = call(*args)
    out = out[0] if isinstance(out, tuple) else out
    return [tuple(row) for row in out.flatten(1).tolist()]


RANDOM = {
    "micro_vmap": lambda **options: (mt.micro_vmap(dropped, **options), torch.ones(7, 48)),
    "micro_grad": lambda **options: (
        mt.micro_grad(noisy_loss, accumulator=CONCAT, **options), torch.ones(48), torch.ones(7, 48)
    ),
}  # fmt: skip


@pytest.mark.parametrize("transform", RANDOM)
def test_each_example_draws_its_own(transform):
    call, *args = RANDOM[transform](microbatch_size=2)
    first = masks(call, *args, seed=1)
    assert len(set(first)) == 7
    second = masks(call, *args)
    assert not set(first) & set(second)
    assert masks(call, *args, seed=1) == first
    assert masks(call, *args) == second
    assert masks(call, *args, seed=2) != first
    if transform == "micro_vmap":
        assert {v for row in first for v in row} == {0.0, 2.0}
        kept = sum(v > 0 for row in first for v in row)
        assert 7 * 48 * 0.35 < kept < 7 * 48 * 0.65
    else:  # the two masks of a loss differ
        assert {v for row in first for v in row} == {0.0, 2.0, 20.0, 22.0}


CUTS = [
    {"microbatch_size": None},
    {"microbatch_size": 1},
    {"microbatch_size": 7, "remainder": "error"},
    {"microbatch_size": 9},
    {"microbatch_size": 3, "partition": "contiguous"},
]


@pytest.mark.parametrize(("transform", "options"), crossed(RANDOM, CUTS))
def test_what_an_example_draws_does_not_depend_on_the_cut(transform, options):
    call, *args = RANDOM[transform](microbatch_size=2)
    other, *_ = RANDOM[transform](**options)
    assert masks(call, *args, seed=3) == masks(other, *args, seed=3)


@pytest.mark.slow
def test_dropout_modules_draw_per_example_too():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Dropout(0.5), nn.Identity())
    mapped = mt.micro_vmap(model, microbatch_size=2)
    first = masks(mapped, torch.ones(5, 48))
    assert len(set(first)) == 5
    model.eval()
    assert_same(mapped(torch.ones(5, 48)), torch.ones(5, 48))
    model.train()
    assert not set(masks(mapped, torch.ones(5, 48))) & set(first)


@pytest.mark.parametrize("partition", PARTITIONS)
def test_each_microbatch_draws_its_own(partition):
    call = mt.microbatch(dropped, 0, 2, CONCAT, partition=partition)
    first = masks(call, torch.ones(7, 48), seed=1)
    assert len(set(first)) == 7
    assert masks(call, torch.ones(7, 48), seed=1) == first
    assert not set(masks(call, torch.ones(7, 48))) & set(first)


def test_backward_uses_the_masks_of_the_forward_pass():
    x = torch.ones(5, 32, requires_grad=True)
    for call in (mt.micro_vmap(dropped, microbatch_size=2), mt.microbatch(dropped, 0, 2, CONCAT)):
        out = call(x)
        (grad,) = torch.autograd.grad(out.sum(), x)
        assert_same(grad, out.detach(), exact=True)


# --- compilation ----------------------------------------------------------------------------------------------------


def steps(make_call, count=5):
    """Train a model; the number of times that the loss's body had run, after each step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    x, ran, counts, losses = data(6, 3), [], [], []
    call_of_step = make_call(model, ran)
    for _ in range(count):
        params = dict(model.named_parameters())
        grads, aux = call_of_step()(params, x)
        counts.append(len(ran))
        plain = lambda p, row: functional_call(model, p, (row,)).pow(2).sum()
        assert_same(grads, summed(loop_of_grads(plain, params, x)[0]))
        losses.append(aux.values.sum().item())
        mt.assign_grads(model, grads)
        optimizer.step()
    assert losses[-1] < losses[0]
    return counts


def test_a_transform_applied_anew_in_each_step_traces_once():
    def make(model, ran):
        def loss(p, x):
            ran.append(1)
            return functional_call(model, p, (x,)).pow(2).sum()

        return lambda: mt.micro_grad(loss, microbatch_size=2)

    counts = steps(make)
    assert counts[0] > 0
    assert len(set(counts)) == 1


def test_a_lambda_defined_in_each_step_traces_once():
    def make(model, ran):
        return lambda: mt.micro_grad(
            lambda p, x: (ran.append(1), functional_call(model, p, (x,)).pow(2).sum())[1],
            microbatch_size=2,
            transform_fn=lambda g: {k: v * 1.0 for k, v in g.items()},
        )

    counts = steps(make)
    assert counts[0] > 0
    assert len(set(counts)) == 1


@pytest.mark.slow
def test_a_training_flag_traces_again():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5))
    ran = []

    def loss(p, x):
        ran.append(1)
        return functional_call(model, p, (x,)).pow(2).sum()

    params, x = detached(model), data(5, 3)
    call = mt.micro_grad(loss, microbatch_size=2)
    first, _ = call(params, x)
    trained = len(ran)
    second, _ = call(params, x)
    assert len(ran) == trained
    assert not torch.equal(first["0.weight"], second["0.weight"])
    model.eval()
    grads, _ = call(params, x)
    assert len(ran) > trained
    evaluated = len(ran)
    assert_same(grads, summed(loop_of_grads(loss, params, x)[0]))
    del ran[evaluated:]
    model.train()
    call(params, x)
    assert len(ran) == evaluated  # both programs are kept


def test_other_options_do_not_share_a_program():
    x = torch.arange(6.0)
    results = [
        mt.microbatch(torch.mean, 0, size, kind, partition=p, num_real_microbatches=1)(x).item()
        for size, kind, p in [(2, SUM, "strided"), (2, SUM, "contiguous"), (3, SUM, "strided"), (3, MEAN, "contiguous")]
    ]
    assert results == [1.5, 0.5, 2.0, 1.0]


# --- memory ---------------------------------------------------------------------------------------------------------


def temporary(call, *args):
    return call.compiled(*args).memory_analysis().temp_size_in_bytes


def max_entry(grads):
    return torch.stack([g.abs().max() for g in grads.values()]).max()


def test_memory_of_micro_grad_follows_the_microbatch():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32))
    params, x = detached(model), data(64, 32)
    size_of_params = 4 * sum(p.numel() for p in params.values())
    # The largest entry needs each example's gradient: it does not follow from factors.
    clip = lambda g: {k: v / max_entry(g).clamp(min=1.0) for k, v in g.items()}
    loss = lambda p, row: functional_call(model, p, (row,)).pow(2).sum()
    used = {
        size: temporary(mt.micro_grad(loss, microbatch_size=size, transform_fn=clip), params, x)
        for size in (1, 4, 16, 64)
    }
    assert used[16] < 0.4 * used[64]
    assert used[4] < 0.4 * used[16]
    assert used[1] < 5 * size_of_params
    assert used[64] > 32 * size_of_params  # the measure sees the gradients


def test_memory_is_flat_in_the_number_of_microbatches():
    w = data(64, 64)
    fun = mt.microbatch(lambda b: (torch.tanh(b @ w @ w) ** 2).mean(), 0, 8, MEAN)
    few, many = (temporary(fun, data(8 * n, 64)) for n in (4, 64))
    assert many <= 1.1 * few


@pytest.mark.slow
def test_memory_of_backward_is_flat_too():
    w = data(64, 64).requires_grad_()

    def peak(n):
        program = mt.microbatch(lambda b: (torch.tanh(b @ w @ w) ** 2).mean(), 0, 8, MEAN).compiled(data(8 * n, 64))
        forward, backward = (
            program.memory_analysis(),
            next(iter(program._backwards.values())).compiled.memory_analysis(),
        )
        batch = 4 * 64 * 8 * n
        kept = forward.output_size_in_bytes  # the result and what backward needs beside the inputs
        given = backward.argument_size_in_bytes
        assert kept < batch / 2 + 1024
        assert given < batch + 3 * 4 * 64 * 64
        return forward.temp_size_in_bytes + backward.temp_size_in_bytes

    assert peak(64) <= 1.1 * peak(4)


@pytest.mark.slow
def test_micro_vmap_keeps_of_an_example_nothing_but_itself_for_backward():
    w = data(32, 32).requires_grad_()
    deep = lambda row: torch.tanh(torch.tanh(torch.tanh(row @ w) @ w) @ w).sum()
    x = data(64, 32, seed=1)

    def peak(call):
        program = call.compiled(x)
        forward, backward = (
            program.memory_analysis(),
            next(iter(program._backwards.values())).compiled.memory_analysis(),
        )
        return max(forward.temp_size_in_bytes, backward.temp_size_in_bytes) + forward.output_size_in_bytes

    sliced = peak(mt.micro_vmap(deep, microbatch_size=4))
    assert sliced < 0.5 * peak(mt.micro_vmap(deep, microbatch_size=64))
    layers = 3 * 4 * 64 * 32  # what backward needs of all examples
    assert sliced < layers
    assert peak(mt.chunked_vmap(deep, 4)) < layers < peak(mt.chunked_vmap(deep))


# --- autograd -------------------------------------------------------------------------------------------------------


def test_backward_fires_hooks_once():
    w = data(3).requires_grad_()
    hits = []
    w.register_post_accumulate_grad_hook(lambda p: hits.append(p.grad.clone()))
    w.register_hook(lambda g: hits.append(g.clone()))
    x = data(6, 3, seed=1)
    mt.microbatch(lambda b: ((b @ w) ** 2).mean(), 0, 2, MEAN)(x).backward()
    assert len(hits) == 2
    plain = data(3).requires_grad_()
    ((x @ plain) ** 2).mean().backward()
    assert_same(w.grad, plain.grad)
    mt.microbatch(lambda b: ((b @ w) ** 2).mean(), 0, 2, MEAN)(x).backward()
    assert_same(w.grad, 2 * plain.grad)  # accumulated, as ever


@pytest.mark.parametrize(("size", "partition"), crossed([None, 2, 3, 9], PARTITIONS))
def test_backward_equals_the_full_batch(size, partition):
    fun = lambda w, b: ((b["x"] @ w).sin().mean(), (b["x"] * w).sum(0), b["x"] * w, b["n"].sum())
    grads = []
    for call in (fun, mt.microbatch(fun, 1, size, (MEAN, SUM, CONCAT, SUM), partition=partition)):
        w, x = data(3).requires_grad_(), data(7, 3, seed=1).requires_grad_()
        mean, total, rows, count = call(w, {"x": x, "n": torch.arange(7)})
        assert not count.requires_grad
        assert all(t.requires_grad for t in (mean, total, rows))
        (mean * 3 + total.pow(2).sum() + (rows * rows.detach()).sum()).backward()
        grads.append((w.grad, x.grad))
    assert_same(grads[1], grads[0])


def test_gradients_carry_a_graph():
    """A hypergradient: the gradient of a function of clipped per-example gradients."""
    bias = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    loss = lambda p, x: torch.tanh((p["w"] * x).sum() + bias) ** 2
    scale = lambda g: {"w": g["w"] / (1 + g["w"].pow(2).sum()), "step": g["step"]}
    p = {"w": data(3, dtype=torch.float64).requires_grad_(), "step": torch.tensor(1)}
    x = data(5, 3, seed=1, dtype=torch.float64).requires_grad_()
    grads, aux = mt.micro_grad(loss, microbatch_size=2, transform_fn=scale, metrics_fn=lambda g: g["w"].norm())(p, x)
    assert grads["w"].grad_fn is not None
    assert not grads["step"].requires_grad

    def expected(w, x, bias):
        inner = lambda w, row: torch.tanh((w * row).sum() + bias) ** 2
        each, values = torch.func.vmap(torch.func.grad_and_value(inner), (None, 0))(w, x)
        total = (each / (1 + each.pow(2).sum(1, keepdim=True))).sum(0)
        return total.pow(2).sum() + values.sin().sum() + each.norm(dim=1).sum()

    outer = grads["w"].pow(2).sum() + aux.values.sin().sum() + aux.metrics.sum()
    reference = expected(p["w"], x, bias)
    assert_same(outer, reference)
    found = torch.autograd.grad(outer, (p["w"], x, bias))
    assert_same(found, torch.autograd.grad(reference, (p["w"], x, bias)))


def test_gradients_of_gradients_of_gradients():
    w = data(2, dtype=torch.float64).requires_grad_()
    x = data(3, 2, seed=1, dtype=torch.float64)
    call = mt.micro_grad(lambda p, r: torch.exp((p * r).sum()), microbatch_size=2)
    once, _ = call(w, x)
    (twice,) = torch.autograd.grad(once.sum(), w, create_graph=True)
    (thrice,) = torch.autograd.grad(twice.sum(), w)
    e = torch.exp(x @ w)[:, None]
    s = x.sum(1, keepdim=True)
    assert_same((once, twice, thrice), ((e * x).sum(0), (e * s * x).sum(0), (e * s * s * x).sum(0)))


GRADCHECKED = {
    "microbatch": lambda w: mt.microbatch(lambda b: ((b @ w).sin().mean(), b * w.sum(0)), 0, 2, (MEAN, CONCAT)),
    "micro_vmap": lambda w: mt.micro_vmap(lambda b: (torch.sin(b @ w), (b.exp() * w.sum(1)).sum()), microbatch_size=2),
    "summed": lambda w: mt.micro_vmap(lambda b: torch.sin(b @ w) * b.sum(), microbatch_size=2, accumulator=SUM),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", GRADCHECKED)
def test_gradcheck(case):
    if case == "microbatch":
        w = data(3, 3, dtype=torch.float64).requires_grad_()
    else:
        w = data(3, 2, dtype=torch.float64).requires_grad_()
    x = data(5, 3, seed=1, dtype=torch.float64).requires_grad_()
    call = lambda x, w: GRADCHECKED[case](w)(x)
    assert torch.autograd.gradcheck(call, (x, w))
    assert torch.autograd.gradgradcheck(call, (x, w))


def test_complex_batches_follow_torch():
    z = data(5, 2, dtype=torch.complex128).requires_grad_()
    w = data(2, seed=1, dtype=torch.complex128).requires_grad_()
    call = lambda z, w: mt.microbatch(lambda b: ((b * w).abs() ** 2).sum() + (b * w).imag.sum(), 0, 2)(z)
    assert torch.autograd.gradcheck(call, (z, w))


def test_one_transform_within_another():
    x, w = data(4, 3, 2), data(2, seed=1)
    inner = lambda rows: mt.micro_vmap(lambda r: (r * w).sum().sin(), microbatch_size=2)(rows).sum()
    outer = mt.micro_vmap(inner, microbatch_size=3)
    expected = torch.stack([inner_plain(rows, w) for rows in x])
    assert_same(outer(x), expected)
    got = mt.micro_grad(lambda p, rows: mt.micro_vmap(lambda r: (r * p).sum().sin(), microbatch_size=1)(rows[0]).sum())
    assert_same(got(w, x)[0], torch.func.grad(lambda p: sum(inner_plain(rows, p) for rows in x))(w))


def inner_plain(rows, w):
    return torch.stack([(r * w).sum().sin() for r in rows]).sum()


# --- memory of torch ------------------------------------------------------------------------------------------------


def snapshot(*tensors):
    return [(t.data_ptr(), t._version, t.detach().clone()) for t in tensors]


def test_inputs_are_never_changed():
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    params, x, y = dict(model.named_parameters()), data(5, 3), torch.arange(5)
    tensors = [*params.values(), x, y]
    before = snapshot(*tensors)
    loss = lambda p, x, y: functional_call(model, p, (x,)).pow(2).sum() * y.sum()
    call = mt.micro_grad(loss, batch_argnums=(1, 2), microbatch_size=2)
    first, second = call(params, x, y), call(params, x, y)
    assert_same(first[0], second[0], exact=True)
    mt.microbatch(lambda x: model(x).sum(), 0, 2)(x).backward()
    mt.micro_vmap(model, microbatch_size=2)(x)
    for tensor, (pointer, version, value) in zip(tensors, before, strict=True):
        assert (tensor.data_ptr(), tensor._version) == (pointer, version)
        assert torch.equal(tensor, value)
    assert params["weight"].grad is model.weight.grad


@pytest.mark.parametrize("size", [None, 2, 9])
def test_results_may_be_written(size):
    x, scale = data(5, 3), torch.ones(3)
    fun = lambda b: (b, b, scale, b.sum(0))
    call = mt.microbatch(fun, 0, size, (CONCAT, CONCAT, SUM, SUM))
    before = snapshot(x, scale)
    first, second, third, total = call(x)
    assert len({t.data_ptr() for t in (x, scale, first, second, third, total)}) == 6
    first.zero_()
    third.fill_(7.0)
    total.mul_(3.0)
    assert_same(second, x, exact=True)
    for tensor, (_, _, value) in zip((x, scale), before, strict=True):
        assert torch.equal(tensor, value)
    assert_same(call(x)[0], x, exact=True)
    grads, aux = mt.micro_grad(lambda p, b: (p["w"] * b).sum(), microbatch_size=size)(
        {"w": scale, "n": torch.tensor([1, 2])}, x
    )
    for tensor in (grads["w"], grads["n"], aux.values):
        tensor.add_(1)
    assert torch.equal(scale, torch.ones(3))


# --- optax ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", marked(["SUM", "MEAN", "RUNNING_MEAN", "CONCAT"], slow=("RUNNING_MEAN",)))
def test_agrees_with_optax_lifted(kind):
    x, w = data(6, 3), data(3, 2, seed=1)
    fun = lambda row: {"z": row @ w, "a": row.sum()}
    theirs = mt.lift(optax.micro_vmap)(fun, microbatch_size=2, accumulator=optax.AccumulationType[kind])
    ours = mt.micro_vmap(fun, microbatch_size=2, accumulator=mt.AccumulationType[kind])
    assert_same(ours(x), theirs(x))


@pytest.mark.parametrize("keep", marked([True, False], quick=(False,)))
def test_gradients_agree_with_optax_lifted(keep):
    params, x, y = regression_data(6, torch.float32)
    clip = lambda g: {"w": g["w"] / g["w"].norm().clamp(min=1.0), "b": g["b"]}
    options = {"batch_argnums": (1, 2), "keep_batch_dim": keep, "microbatch_size": 3}
    options |= {"transform_fn": clip, "metrics_fn": lambda g: g["w"].norm()}
    theirs, their_aux = mt.lift(optax.micro_grad)(regression, **options)(params, x, y)
    ours, aux = mt.micro_grad(regression, **options)(params, x, y)
    assert_same(ours, theirs)
    assert_same((aux.values, aux.metrics), (their_aux.values, their_aux.metrics))


# --- assign_grads ---------------------------------------------------------------------------------------------------


def test_assign_grads_replaces_by_name():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    model[1].bias.requires_grad_(False)
    model[0].bias.grad = kept = torch.full((3,), 5.0)
    model[0].weight.grad = torch.full((3, 2), 7.0)
    grads = {"1.weight": torch.ones(1, 3), "0.weight": torch.ones(3, 2), "1.bias": torch.ones(1)}
    assert mt.assign_grads(model, grads) is None
    assert_same(model[0].weight.grad, torch.ones(3, 2))
    assert_same(model[1].weight.grad, torch.ones(1, 3))
    assert model[0].bias.grad is kept
    assert model[1].bias.grad is None
    before = {k: v.detach().clone() for k, v in model.named_parameters()}
    torch.optim.SGD(model.parameters(), 0.5).step()
    after = dict(model.named_parameters())
    assert_same(after["0.weight"].detach(), before["0.weight"] - 0.5)
    assert_same(after["0.bias"].detach(), before["0.bias"] - 2.5)
    assert torch.equal(after["1.bias"], before["1.bias"])


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_an_optimizer_step_with_assigned_gradients(optimizer):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.Tanh())
    other = nn.Sequential(nn.Linear(3, 2), nn.Tanh())
    other.load_state_dict(model.state_dict())
    x = data(5, 3)
    loss = lambda p, row: functional_call(model, p, (row,)).pow(2).sum()
    for m, opt in ((model, optimizer(model.parameters(), 0.1)), (other, optimizer(other.parameters(), 0.1))):
        for _ in range(2):
            if m is model:
                mt.assign_grads(m, mt.micro_grad(loss, microbatch_size=2)(dict(m.named_parameters()), x)[0])
            else:
                opt.zero_grad()
                m(x).pow(2).sum().backward()
            assert all(p.grad.grad_fn is None and not p.grad.requires_grad for p in m.parameters())
            opt.step()
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_assign_grads_to_tied_weights():
    model = TiedWeights()
    mt.assign_grads(model, {"out.weight": torch.ones(5, 3)})
    assert_same(model.embed.weight.grad, torch.ones(5, 3))


@pytest.mark.parametrize(
    ("grads", "message"),
    [
        ({"wieght": torch.ones(1, 2)}, r"wieght.*it has \['bias', 'weight'\]"),
        ({"bias": torch.ones(1), "weight": torch.ones(2)}, r"grads\['weight'\] has shape .*2.*\(?\[?1, 2"),
        ({"weight": torch.ones(1, 2, dtype=torch.float64)}, r"grads\['weight'\] has dtype torch.float64.*float32"),
        ({"weight": torch.ones(1, 2, device="meta")}, r"grads\['weight'\] has device meta.*cpu"),
    ],
)
def test_assign_grads_refuses_what_does_not_fit(grads, message):
    layer = nn.Linear(2, 1)
    with pytest.raises(ValueError, match=message):
        mt.assign_grads(layer, grads)
    assert layer.weight.grad is None
    assert layer.bias.grad is None


def test_jax_keeps_its_settings():
    before = (jax.config.jax_enable_x64, jax.numpy.ones(1).dtype)
    mt.micro_vmap(lambda x: x * 2, microbatch_size=2)(torch.arange(3, dtype=torch.float64))
    assert (jax.config.jax_enable_x64, jax.numpy.ones(1).dtype) == before
