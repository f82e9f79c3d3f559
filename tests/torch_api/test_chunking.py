"""``chunked_vmap`` of torch functions against ``torch.func.vmap``."""

import re

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from helpers import marked
from hypothesis import given, settings
from torch import nn
from torch_cases import assert_same, data

from microtome import torch_api as mt

FEW = settings(derandomize=True, deadline=None, max_examples=6, database=None)
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.complex64)


def example(x, w):
    # Keys are not sorted: torch keeps their order.
    return {"row": x["a"] @ w, "b": (x["n"] * 2, x["a"].abs().sum() > 1)}


@FEW
@given(length=st.sampled_from([1, 7, 8]), chunk=st.sampled_from([None, 1, 2, 3, 8, 11]), dtype=st.sampled_from(FLOATS))
def test_equals_vmap(length, chunk, dtype):
    x = {"n": torch.arange(length), "a": data(4, length, dtype=dtype)}
    dims = ({"n": 0, "a": -1}, None), {"row": 0, "b": (0, -1)}
    actual = mt.chunked_vmap(example, chunk, *dims)(x, data(4, dtype=dtype))
    assert_same(actual, torch.func.vmap(example, *dims)(x, data(4, dtype=dtype)))


def test_what_does_not_depend_on_the_example_comes_back_once():
    fun, dims = lambda x, w: (x * w, w.sum()), ((0, None), (0, None))
    assert_same(mt.chunked_vmap(fun, 3, *dims)(data(7), data(1)), torch.func.vmap(fun, *dims)(data(7), data(1)))
    ours, plain = (data(1).requires_grad_() for _ in range(2))
    sum(part.sum() for part in mt.chunked_vmap(fun, 3, *dims)(data(7), ours)).backward()
    sum(part.sum() for part in torch.func.vmap(fun, *dims)(data(7), plain)).backward()
    assert_same(ours.grad, plain.grad)


def test_an_empty_batch():
    assert_same(mt.chunked_vmap(lambda x: x * 2, 3)(torch.ones(0, 2)), torch.ones(0, 2))
    assert_same(mt.chunked_vmap(lambda x: x.sum() > 0, 3)(torch.ones(0, 2)), torch.ones(0, dtype=torch.bool))


INDEXED = {
    "row": lambda table, i: table[i],
    "element": lambda table, i: table[i, 0],
    "column": lambda table, i: table[:, i % 3],
    "beside a list": lambda table, i: table[i, [0, 1]],
    "beside None": lambda table, i: table[i, None],
    "short integer": lambda table, i: table[i.to(torch.int32)],
}


@pytest.mark.parametrize("name", marked(INDEXED, slow=("beside a list", "short integer", "column")))
def test_an_example_may_be_an_index(name):
    fun, rows = INDEXED[name], torch.tensor([0, 3, 3])
    expected = torch.func.vmap(fun, (None, 0))(data(5, 3), rows)
    assert_same(mt.chunked_vmap(fun, 2, (None, 0))(data(5, 3), rows), expected, exact=True)


def test_both_spellings():
    x, w = data(3, 7), data(3)
    expected = torch.func.vmap(torch.mul, (1, None), 1)(x, w)
    assert_same(mt.chunked_vmap(torch.mul, 3, in_dims=(1, None), out_dims=1)(x, w), expected)
    assert_same(mt.chunked_vmap(torch.mul, 3, (1, None), 1, randomness="different")(x, w), expected)
    assert_same(mt.chunked_vmap(lambda x, *, w: x * w, 3)(x.T, w=data(7)), x.T * data(7)[:, None])


def test_a_module_trains():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.GELU(), nn.Linear(5, 2))
    x = data(7, 4).requires_grad_()
    model(x).pow(2).sum().backward()
    expected = [x.grad, *(p.grad for p in model.parameters())]
    mapped = mt.chunked_vmap(model, 3)
    for _ in range(2):  # after a step, with the same program
        x.grad = None
        model.zero_grad()
        result = mapped(x)
        result.pow(2).sum().backward()
        assert_same(result.detach(), model(x).detach())
        assert_same([x.grad, *(p.grad for p in model.parameters())], expected)
        with torch.no_grad():
            model[0].weight.mul_(2)
        model.zero_grad()
        x.grad = None
        model(x).pow(2).sum().backward()
        expected = [x.grad, *(p.grad for p in model.parameters())]


@pytest.mark.slow
def test_dropout_draws_for_each_example_whatever_the_chunk():
    drop = lambda x: F.dropout(x, 0.5)

    def drawn(chunk, **options):
        torch.manual_seed(3)
        return mt.chunked_vmap(drop, chunk, **options)(torch.ones(7, 16))

    whole = drawn(None)
    assert len({tuple(row) for row in whole.tolist()}) == 7
    assert_same(drawn(3), whole, exact=True)
    same = drawn(3, randomness="same")
    assert_same(same, same[:1].expand(7, 16).contiguous(), exact=True)
    assert len(set(same[0].tolist())) == 2
    by_name = mt.chunked_vmap(lambda *, x: drop(x), 3)
    torch.manual_seed(3)
    assert_same(by_name(x=torch.ones(7, 16)), whole, exact=True)
    assert not torch.equal(by_name(x=torch.ones(7, 16)), whole)  # another call


def test_compiled_once_and_memory_follows_the_chunk():
    wide = lambda x: torch.sin(torch.outer(x, torch.arange(250.0))).flatten().sort().values[:4]
    x = torch.ones(1021, 4)
    used = [mt.chunked_vmap(wide, chunk).compiled(x).memory_analysis().temp_size_in_bytes for chunk in (8, 64, None)]
    assert used[0] < 3 * 8 * 4000 + 4096
    assert used[1] < 3 * 64 * 4000 + 4096
    assert used[2] >= 1021 * 4000
    traces = []

    def fun(x):
        traces.append(1)
        return x * 2

    for _ in range(2):
        mt.chunked_vmap(fun, 3)(data(7))
    assert len(traces) == 1


X, Y = torch.ones(6, 2), torch.ones(4, 2)
pair_sum = lambda params, batch: batch["x"].sum() + params


@pytest.mark.slow
def test_a_training_step_keeps_the_examples_alone_and_computes_each_chunk_again():
    w, x = (data(64, 64) / 8).requires_grad_(), data(128, 64)
    fun = lambda row: F.dropout(torch.tanh(torch.tanh(torch.tanh(row @ w) @ w) @ w), 0.5)

    def step(chunk):
        saved = []
        torch.manual_seed(0)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            out = mt.chunked_vmap(fun, chunk)(x)
        return sum(t.nbytes for t in saved), torch.autograd.grad(out.square().sum(), w)

    kept, gradients = zip(*map(step, chunks := (None, 128, 16, 1)), strict=True)
    kept = dict(zip(chunks, kept, strict=True))
    for gradient in gradients:
        assert_same(gradient, gradients[0])
    assert kept[None] == kept[128] >= 4 * x.nbytes + w.nbytes
    assert kept[1] < kept[16] + 1024 < 2 * x.nbytes + w.nbytes + 4096
    programs = {c: mt.chunked_vmap(fun, c).compiled(x)._backwards for c in (64, 4)}
    backward = {
        c: next(iter(made.values())).compiled.memory_analysis().temp_size_in_bytes for c, made in programs.items()
    }
    assert backward[4] < backward[64] / 3


ERRORS = {
    "zero": (ValueError, "chunk_size must be a positive int or None", lambda: mt.chunked_vmap(torch.sum, 0)),
    "float": (TypeError, "got 2.0 of type float", lambda: mt.chunked_vmap(torch.sum, 2.0)),
    "randomness": (ValueError, "randomness must be 'different' or 'same', got 'error'",
                   lambda: mt.chunked_vmap(torch.sum, 2, randomness="error")),
    "two names": (TypeError, "in_axes and in_dims are two names of one option",
                  lambda: mt.chunked_vmap(torch.mul, 2, (0, None), in_dims=(0, None))),
    "lengths": (ValueError, "batch['x'] has 6 (axis 0), batch['y'] has 4 (axis 0)",
                lambda: mt.chunked_vmap(pair_sum, 2, (None, 0))(1.0, {"x": X, "y": Y})),
    "scalar": (ValueError, "params needs a batch axis, but has shape ()",
               lambda: mt.chunked_vmap(pair_sum, 2)(1.0, {"x": X})),
    "out_dims": (ValueError, "output['a'] has shape () for one example, so out_axes must be from -1 to 0 for it, got 1",
                 lambda: mt.chunked_vmap(lambda x: {"a": x.sum()}, 2, out_dims=1)(X)),
    "out_dims none": (ValueError, "output depends on the example, so out_axes cannot be None for it",
                      lambda: mt.chunked_vmap(torch.sum, 2, out_dims=None)(X)),
    "batch norm": (TypeError, "is updated in place by the function",
                   lambda: mt.chunked_vmap(nn.BatchNorm1d(2), 2)(X[None])),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case):
    kind, message, call = ERRORS[case]
    with pytest.raises(kind, match=re.escape(message)):
        call()


def of(a, b=None, *, c=None):
    return a


LENGTHS = {
    "arguments": ((0, 1), (torch.ones(3), torch.ones(2, 4)), {}, "a has 3 (axis 0), b has 4 (axis 1)"),
    "another axis first": ((1, 0), (torch.ones(2, 3), torch.ones(4)), {}, "a has 3 (axis 1), b has 4 (axis 0)"),
    "a tree of one length": ((1, 0), ({"x": torch.ones(2, 3), "y": torch.ones(1, 3)}, torch.ones(4)), {},
                             "a['x'] has 3 (axis 1), a['y'] has 3 (axis 1), b has 4 (axis 0)"),
    "within a tree": (0, ({"x": torch.ones(3), "y": [torch.ones(4)]},), {},
                      "a['x'] has 3 (axis 0), a['y'][0] has 4 (axis 0)"),
    "a keyword": ((1,), (torch.ones(2, 3),), {"c": {"z": torch.ones(4)}}, "a has 3 (axis 1), c['z'] has 4 (axis 0)"),
    "a shared argument first": ((None, -1), (torch.ones(5), torch.ones(2, 3)), {"c": torch.ones(4)},
                                "b has 3 (axis 1), c has 4 (axis 0)"),
}  # fmt: skip


@pytest.mark.parametrize("case", LENGTHS)
@pytest.mark.parametrize("transform", ["chunked_vmap", "micro_vmap"])
def test_lengths_that_differ_are_named_as_they_were_passed(transform, case):
    axes, args, kwargs, shown = LENGTHS[case]
    mapped = mt.chunked_vmap(of, 2, axes) if transform == "chunked_vmap" else mt.micro_vmap(of, axes)
    with pytest.raises(ValueError, match=re.escape(f"must have the same number of rows: {shown}. ")):
        mapped(*args, **kwargs)
