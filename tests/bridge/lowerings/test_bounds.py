"""Indices out of range and unknown options raise where eager torch refuses them: in values, gradients, per example."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import pytest
import torch
import torch.nn.functional as F
from helpers import marked
from torch_cases import assert_same

from microtome import torch_api as mt
from microtome.bridge import as_jax, as_torch

ROWS = torch.arange(6.0).reshape(3, 2) + 1
TABLE = {"w": ROWS}


def _scores(w: Any, i: Any) -> Any:
    return w[:, :1].t().expand(i.shape[0], 3)


# Functions of a table with three rows and of a vector of whole numbers.
READS: dict[str, Callable[[Any, Any], Any]] = {
    "embedding": lambda w, i: F.embedding(i, w),
    "cross_entropy": lambda w, i: F.cross_entropy(_scores(w, i), i),
    "embedding, padding": lambda w, i: F.embedding(i, w, padding_idx=0),
    "embedding, by frequency": lambda w, i: F.embedding(i, w, scale_grad_by_freq=True),
    "embedding_bag": lambda w, i: F.embedding_bag(i[None], w, mode="sum"),
    "embedding_bag, offsets": lambda w, i: F.embedding_bag(i, w, torch.zeros(1, dtype=torch.int64)),
    "index_select": lambda w, i: w.index_select(0, i),
    "index_select, axis 1": lambda w, i: w.t().index_select(1, i),
    "gather": lambda w, i: w.gather(0, i[:, None]),
    "one_hot": lambda w, i: F.one_hot(i, 3).float() @ w,
    "nll_loss, weights": lambda w, i: F.nll_loss(_scores(w, i), i, weight=torch.ones(3)),
    "label smoothing": lambda w, i: F.cross_entropy(_scores(w, i), i, label_smoothing=0.1),
    "multi_margin": lambda w, i: F.multi_margin_loss(_scores(w, i), i),
}
# Negative numbers count from the end.
WRAPS: dict[str, Callable[[Any, Any], Any]] = {
    "w[i]": lambda w, i: w[i],
    "w[:, i]": lambda w, i: w.t().contiguous()[:, i],
    "w[i, j]": lambda w, i: w[i, torch.zeros_like(i)],
    "w[number]": lambda w, i: w[i[0]],
    "take": lambda w, i: w[:, 0].take(i),
}
WRITES: dict[str, Callable[[Any, Any], Any]] = {
    "index_add": lambda w, i: w.index_add(0, i, w[:1].expand(i.shape[0], 2)),
    "index_copy": lambda w, i: w.index_copy(0, i, w[:1].expand(i.shape[0], 2)),
    "index_reduce": lambda w, i: w.index_reduce(0, i, w[:1].expand(i.shape[0], 2), "prod"),
    "scatter": lambda w, i: w.scatter(0, i[:, None], 2.0),
    "scatter_add": lambda w, i: w.scatter_add(0, i[:, None], w[:1, :1].expand(i.shape[0], 1)),
    "scatter_reduce": lambda w, i: w.scatter_reduce(0, i[:, None], w[:1, :1].expand(i.shape[0], 1), "amax"),
    "max_unpool": lambda w, i: F.max_unpool1d(w[: i.shape[0], 0][None, None], i[None, None], 2, output_size=(3,)),
}
WRAPPING_WRITES: dict[str, Callable[[Any, Any], Any]] = {
    "index_fill": lambda w, i: w.index_fill(0, i, 2.0),
    "index_put": lambda w, i: w.index_put((i,), torch.tensor(2.0)),
    "accumulate": lambda w, i: w.index_put((i,), w[0], accumulate=True),
    "put": lambda w, i: w[:, 0].put(i, w[: i.shape[0], 0]),
}
EVERY = READS | WRAPS | WRITES | WRAPPING_WRITES
OUTSIDE = {name: (3, 7, -9) if name in WRAPS | WRAPPING_WRITES else (3, 7, -1, -9) for name in EVERY}
QUICK = ("embedding",)
NAMES = marked(EVERY, quick=QUICK)


@pytest.mark.filterwarnings("ignore:.*has been compiled:UserWarning", "ignore:index_reduce:UserWarning")
@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_examples(name: str) -> None:
    # The loss is a sum: no gradient needs the values that were read, so that only the backward pass sees the index.
    loss = lambda p, i: EVERY[name](p["w"], i).sum()
    calls = {
        "clipped_grad": mt.clipped_grad(loss, l2_clip_norm=1.0),
        "micro_grad": mt.micro_grad(loss, microbatch_size=1),
        "microbatch": lambda p, i: mt.microbatch(loss, 1, 1)({"w": p["w"].clone().requires_grad_()}, i).backward(),
    }
    for call in calls.values():
        call(TABLE, torch.tensor([0, 2]))
        for outside in OUTSIDE[name]:
            with pytest.raises(IndexError, match="out of range"):
                call(TABLE, torch.tensor([0, outside]))


@pytest.mark.filterwarnings("ignore:index_reduce:UserWarning")
@pytest.mark.parametrize("name", marked(EVERY, quick=("index_fill",)))
def test_values_and_gradients_of_calls(name: str) -> None:
    call = as_torch(as_jax(EVERY[name]))
    inside = (0, 2) if OUTSIDE[name][2] == -1 else (0, 2, -1)
    for i in inside:
        assert_same(call(ROWS, torch.tensor([i])), EVERY[name](ROWS, torch.tensor([i])))
    for outside in OUTSIDE[name]:
        with pytest.raises((IndexError, RuntimeError)):
            EVERY[name](ROWS, torch.tensor([outside]))
        with pytest.raises(IndexError, match="out of range"):
            call(ROWS, torch.tensor([outside]))
        with pytest.raises(IndexError, match="out of range"):
            call(ROWS.clone().requires_grad_(), torch.tensor([outside])).sum().backward()


@pytest.mark.parametrize("name", ["index_add", "embedding"])
def test_a_gradient_without_the_value(name: str) -> None:
    loss = lambda w, i: (EVERY[name](w, i) ** 2).sum()
    gradient = as_torch(jax.grad(as_jax(loss)))
    assert_same(gradient(ROWS, torch.tensor([2, 2])), torch.func.grad(loss)(ROWS, torch.tensor([2, 2])))
    for outside in (3, -1):
        with pytest.raises(IndexError, match="out of range"):
            gradient(ROWS, torch.tensor([0, outside]))


def test_labels_that_are_ignored_are_no_indices() -> None:
    def loss(w: Any, i: Any) -> Any:
        return F.cross_entropy(_scores(w, i), i, ignore_index=-7, reduction="sum")

    gradient = as_torch(jax.grad(as_jax(loss)))
    for labels in (torch.tensor([0, -7]), torch.tensor([-7, -7])):
        assert_same(gradient(ROWS, labels), torch.func.grad(loss)(ROWS, labels))
    with pytest.raises(IndexError, match="out of range"):
        gradient(ROWS, torch.tensor([0, -100]))


def test_writes_along_an_axis() -> None:
    # Lowerings of our own, since torch's decompositions take negative indices.
    wide, index, source = torch.randn(2, 4, 3), torch.tensor([3, 0]), torch.randn(2, 2, 3)
    half, numbers = wide.half(), torch.arange(6).reshape(2, 3)

    def fun(x: Any, i: Any, s: Any, h: Any, n: Any) -> Any:
        return {
            "add": x.index_add(1, i, s, alpha=0.5),
            "add, half": h.index_add(-2, i, s.half()),
            "add, whole numbers": n.index_add(0, i[1:], n[:1], alpha=3),
            "copy": x.index_copy(-2, i, s),
            "fill": x.index_fill(1, i - 1, 2.5),
            "fill, tensor": x.index_fill(1, i, x[0, 0, 0]),
            "of a number": torch.zeros(()).index_add(0, i[1:], x[0, 0, 0]),
            "number filled": x[0, 0, 0].index_fill(0, i[1:], 3),
            "vector": x[0, :, 0].index_add(0, i, s[0, :, 0]),
            "unpool": F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2, output_size=(4, 3)),
        }

    given = (wide, index, source, half, numbers)
    assert_same(as_torch(as_jax(fun))(*given), fun(*given))


OPTIONS: dict[str, Callable[[Any], Any]] = {
    "gaussian_nll_loss": lambda x: F.gaussian_nll_loss(x, x, x.exp(), reduction="avg"),
    "mse_loss": lambda x: F.mse_loss(x, x, reduction="avg"),
    "cross_entropy": lambda x: F.cross_entropy(x, x, reduction="avg"),
    "ctc_loss": lambda x: F.ctc_loss(x[:, None], torch.ones(1, 1).long(), [3], [1], reduction="avg"),
    "embedding_bag": lambda x: F.embedding_bag(torch.zeros(1, 1).long(), x, mode="avg"),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_that_do_not_exist(name: str) -> None:
    for call in (OPTIONS[name], as_torch(as_jax(OPTIONS[name]))):
        with pytest.raises(ValueError, match=r"reduction|mode|not valid"):
            call(ROWS)
