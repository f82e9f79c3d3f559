"""``sliced_scan``, ``checkpoint_chunked_scan`` and ``Static`` of torch functions, against a loop in eager torch."""

import inspect
import re

import hypothesis.strategies as st
import jax
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch import nn
from torch.utils import _pytree as pytree
from torch_cases import assert_same, data

from microtome import jax_impl
from microtome import torch_api as mt

FEW = settings(derandomize=True, deadline=None, max_examples=7, database=None)
LENGTHS = st.sampled_from([1, 7, 8])
FLOATS = (torch.float32, torch.float64)
STRIDES = st.none() | st.integers(-4, 4).filter(bool)
BOUNDS = st.none() | st.integers(-10, 10)


def loop(f, init, xs, reverse=False, start=None, stop=None, step=None):
    """The same by eager torch; slices with a negative stride too."""
    carry, ys = init, []
    length = len(pytree.tree_leaves(xs)[0])
    for i in reversed(range(length)) if reverse else range(length):
        carry, y = f(carry, pytree.tree_map(lambda x, i=i: x[i], xs))
        ys.append(y)
    kept = list(range(length))[start:stop:step]
    ys = ys[::-1] if reverse else ys
    return carry, pytree.tree_map(
        lambda *rows: torch.stack([rows[i] for i in kept]) if kept else rows[0][None][:0], *ys
    )


def step(carry, x):
    state = torch.tanh(0.9 * carry["state"] + x["a"].sum())
    # Keys are not sorted: torch keeps their order.
    return {"state": state, "count": carry["count"] + x["n"]}, {"y": state * x["a"], "count": carry["count"]}


def case(length, dtype=torch.float32):
    init = {"state": data(2, dtype=dtype), "count": torch.tensor(0)}
    return init, {"n": torch.arange(length), "a": data(length, 2, dtype=dtype)}


@FEW
@given(length=LENGTHS, reverse=st.booleans(), start=BOUNDS, stop=BOUNDS, stride=STRIDES, dtype=st.sampled_from(FLOATS))
def test_sliced_scan_equals_a_loop(length, reverse, start, stop, stride, dtype):
    bounds = {"start": start, "stop": stop, "step": stride}
    actual = mt.sliced_scan(step, *case(length, dtype), reverse=reverse, **bounds)
    assert_same(actual, loop(step, *case(length, dtype), reverse, **bounds))


@FEW
@given(length=LENGTHS, reverse=st.booleans(), chunk=st.sampled_from([None, 1, 3, 20, "auto"]))
def test_checkpoint_chunked_scan_equals_a_loop(length, reverse, chunk):
    actual = mt.checkpoint_chunked_scan(step, *case(length), reverse=reverse, chunk_size=chunk)
    assert_same(actual, loop(step, *case(length), reverse))


def test_without_steps():
    carry, ys = mt.sliced_scan(step, *case(0), step=2)
    assert_same(carry, case(0)[0])
    assert_same(ys, {"y": torch.ones(0, 2), "count": torch.ones(0, dtype=torch.int64)})
    assert_same(mt.checkpoint_chunked_scan(lambda c, _: (c * 2, None), 1.5, None, 3), (torch.tensor(12.0), None))


@pytest.mark.parametrize("scan", ["sliced", "checkpointed"])
def test_a_recurrent_network_trains(scan):
    torch.manual_seed(0)
    cell, readout = nn.GRUCell(3, 4), nn.Linear(4, 1)
    init, xs = data(2, 4).requires_grad_(), data(7, 2, 3).requires_grad_()
    leaves = [init, xs, *cell.parameters(), *readout.parameters()]

    def f(h, x):
        h = cell(x, h)
        return h, readout(h).squeeze(-1)

    def gradients(run):
        h, ys = run()
        (h.sum() + ys[1::3].sin().sum() if len(ys) == 7 else h.sum() + ys.sin().sum()).backward()
        found = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        return found

    run = {
        "sliced": lambda: mt.sliced_scan(f, init, xs, start=1, step=3),
        "checkpointed": lambda: mt.checkpoint_chunked_scan(f, init, xs, chunk_size=3),
    }[scan]
    assert_same(gradients(run), gradients(lambda: loop(f, init, xs)))
    with torch.no_grad():
        cell.weight_hh.mul_(2)  # an optimizer's step: read afresh, not recompiled
    assert_same(gradients(run), gradients(lambda: loop(f, init, xs)))


def test_second_derivatives():
    f = lambda c, x: (torch.sin(c * x), c * x)
    x = data(5, dtype=torch.float64)
    total = lambda c: mt.checkpoint_chunked_scan(f, c, x, chunk_size=2)[0].sum()
    assert torch.autograd.gradgradcheck(total, data(2, dtype=torch.float64).requires_grad_())


@pytest.mark.slow
def test_dropout_draws_in_each_step_and_the_same_when_computed_again():
    drop = lambda c, x: (c + F.dropout(x, 0.5), F.dropout(x, 0.5))
    ones = torch.ones(6, 8)

    def drawn(scan, **options):
        torch.manual_seed(5)
        return scan(drop, torch.zeros(8), ones, **options)

    carry, ys = drawn(mt.sliced_scan)
    assert len({tuple(row) for row in ys.tolist()}) == 6
    assert_same(drawn(mt.checkpoint_chunked_scan, chunk_size=4), (carry, ys), exact=True)
    x = ones.clone().requires_grad_()
    torch.manual_seed(5)
    total, _ = mt.checkpoint_chunked_scan(drop, torch.zeros(8), x, chunk_size=4)
    total.sum().backward()
    assert_same((x.grad * x).sum(0).detach(), total.detach(), exact=True)  # each mask, as it was in the first pass


def test_the_gradient_takes_a_fraction_of_the_memory():
    def f(c, _):
        for _ in range(4):
            c = torch.sin(c) * c
        return c, None

    def temporary(chunk):
        loss = lambda c: jax_impl.checkpoint_chunked_scan(mt.as_jax(f), c, None, 400, chunk_size=chunk)[0].sum()
        return jax.jit(jax.grad(loss)).lower(jax.numpy.ones(100)).compile().memory_analysis().temp_size_in_bytes

    assert temporary("auto") < temporary(None) / 8
    assert inspect.signature(mt.checkpoint_chunked_scan).parameters["chunk_size"].default == "auto"


def test_static():
    f = lambda c, x: ((c[0] * x, c[1]), c[1].value * x)
    for value in (3, 3.0):
        carry, ys = mt.sliced_scan(f, (torch.tensor(1), mt.Static(value)), torch.arange(1, 5), step=3)
        assert_same(carry[0], torch.tensor(24))
        assert carry[1] == mt.Static(value)
        assert_same(ys, torch.tensor([1, 4]) * value)
    assert pytree.tree_leaves({"a": 1, "s": mt.Static(2)})[-1] == mt.Static(2)


XS = {"a": torch.ones(6, 2), "b": torch.ones(4)}
good = lambda c, x: (c, x)
ERRORS = {
    "lengths": (ValueError, "the number of steps: xs['a'] has 6, xs['b'] has 4", lambda scan: scan(good, 0.0, XS)),
    "length": (ValueError, "xs has 3, length=4", lambda scan: scan(good, 0.0, torch.ones(3), 4)),
    "no length": (ValueError, "xs holds no array", lambda scan: scan(good, 0.0)),
    "scalar": (ValueError, "xs['a'] has shape ()", lambda scan: scan(good, 0.0, {"a": torch.tensor(1.0)})),
    "no pair": (TypeError, "f must return a pair (carry, y)", lambda scan: scan(lambda c, x: c, 0.0, torch.ones(3))),
    "dtype": (TypeError, "init['h'] is int64[2], f returns float32[2] for it",
              lambda scan: scan(lambda c, x: ({"h": c["h"] * x}, x), {"h": torch.ones(2).long()}, torch.ones(3, 2))),
    "shape": (TypeError, "init[1] is float32[2], f returns float32[4] for it",
              lambda scan: scan(lambda c, x: ((c[0], c[1].repeat(2)), x), (0.0, torch.ones(2)), torch.ones(3))),
    "control flow": (TypeError, "test_scanning.py:",
                     lambda scan: scan(lambda c, x: (c if x > 0 else -c, x), 0.0, torch.ones(3))),
}  # fmt: skip


@pytest.mark.parametrize("scan", [mt.sliced_scan, mt.checkpoint_chunked_scan])
@pytest.mark.parametrize("case", ERRORS)
def test_errors(scan, case):
    kind, message, call = ERRORS[case]
    with pytest.raises(kind, match=re.escape(message)):
        call(scan)


def test_errors_of_one():
    with pytest.raises(ValueError, match="step must not be 0"):
        mt.sliced_scan(good, 0.0, torch.ones(3), step=0)
    with pytest.raises(ValueError, match="chunk_size must be a positive int or 'auto'"):
        mt.checkpoint_chunked_scan(good, 0.0, torch.ones(3), chunk_size=0)
    with pytest.raises(TypeError, match="must be hashable"):
        mt.Static([1])
