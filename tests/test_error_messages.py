"""The messages for the most likely mistakes, held against a golden file: each names the user's own line.

After a deliberate change of a message, write the file anew:

    python -m pytest tests/test_error_messages.py --update-golden
"""

from __future__ import annotations

import pathlib
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from microtome import torch_api as mt

GOLDEN = pathlib.Path(__file__).parent / "golden" / "messages.txt"
W, X = torch.ones(3), torch.arange(15.0).reshape(5, 3)
NET = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))

# The line of the mistake holds the mark: the message has to name that line.
MISTAKES: dict[str, Callable[[], Any]] = {}


def mistake(fun: Callable[[], Any]) -> Callable[[], Any]:
    MISTAKES[fun.__name__.replace("_", " ")] = fun
    return fun


@mistake
def a_branch_on_values() -> Any:
    def loss(p: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:  # mark
            return (p * x).sum()
        return p.sum()

    return mt.micro_grad(loss)(W, X)


@mistake
def a_number_taken_out() -> Any:
    return mt.micro_grad(lambda p, x: (p * x).sum() * p.norm().item())(W, X)  # mark


@mistake
def a_detour_through_numpy() -> Any:
    def loss(p: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        weights = torch.from_numpy(x.numpy() ** 2)  # mark
        return (p * weights).sum()

    return mt.micro_grad(loss)(W, X)


@mistake
def a_shape_that_depends_on_values() -> Any:
    return mt.micro_grad(lambda p, x: (p * x)[x > 0].sum())(W, X)  # mark


@mistake
def a_loss_for_each_feature() -> Any:
    return mt.micro_grad(lambda p, x: p * x)(W, X)  # mark


@mistake
def batch_normalisation_per_example() -> Any:
    def loss(p: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return functional_call(NET, p, (x,)).sum()  # mark

    return mt.micro_grad(loss)(dict(NET.named_parameters()), X)


@mistake
def batches_of_different_length() -> Any:
    return mt.micro_grad(lambda p, x, y: (p * x * y).sum(), batch_argnums=(1, 2))(W, X, X[:4])  # mark


@mistake
def integers_to_differentiate() -> Any:
    return mt.micro_grad(lambda p, x: (p * x).sum())(torch.arange(3), X)  # mark


@mistake
def backward_inside() -> Any:
    def loss(p: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        value = (p * x).sum()
        value.backward()  # mark
        return value

    return mt.micro_grad(loss)(W, X)


@mistake
def a_parameter_written_in_place() -> Any:
    return mt.micro_grad(lambda p, x: (p.mul_(2) * x).sum())(W, X)  # mark


@mistake
def random_numbers_of_python() -> Any:
    return mt.micro_grad(lambda p, x: (p * x).sum() * random.random())(W, X)  # mark


@mistake
def a_captured_sparse_tensor() -> Any:
    sparse = torch.eye(3).to_sparse()  # of this function: others in this folder walk over all Python modules
    return mt.microbatch(lambda x: (x @ sparse).sum(), 0, 2)(X)  # mark


@mistake
def a_label_out_of_range() -> Any:
    def loss(p: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(x * p, y)  # mark

    return mt.micro_grad(loss, batch_argnums=(1, 2))(W, X, torch.tensor([0, 1, 2, 3, 0]))


@mistake
def an_activation_kept() -> Any:
    kept = []

    def loss(p: torch.Tensor, x: torch.Tensor) -> torch.Tensor:  # mark
        kept.append(p * x)
        return kept[-1].sum()

    return mt.micro_grad(loss)(W, X)


@mistake
def a_seed_inside() -> Any:
    def loss(p: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(0)  # mark
        return F.dropout(p * x).sum()

    return mt.micro_grad(loss)(W, X)


@mistake
def an_embedding_that_the_table_has_not() -> Any:
    def loss(p: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        return F.embedding(i, p).sum()  # mark

    return mt.clipped_grad(loss, l2_clip_norm=1.0)(torch.ones(3, 2), torch.tensor([[7]]))


def _call(fun: Callable[[torch.Tensor], Any], x: torch.Tensor) -> Any:
    return mt.as_torch(mt.as_jax(fun))(x)


@mistake
def the_inverse_of_a_singular_matrix() -> Any:
    return _call(lambda a: torch.linalg.inv(a), torch.zeros(2, 2))  # mark


@mistake
def a_singular_system() -> Any:
    return _call(lambda a: torch.linalg.solve(a, torch.ones(2)), torch.zeros(2, 2))  # mark


@mistake
def a_cholesky_factor_of_an_indefinite_matrix() -> Any:
    return _call(lambda a: torch.linalg.cholesky(a), -torch.eye(2))  # mark


@mistake
def an_lu_decomposition_without_pivots() -> Any:
    return _call(lambda a: torch.linalg.lu_factor(a, pivot=False), torch.eye(2))  # mark


@mistake
def a_view_of_a_transposed_argument() -> Any:
    return _call(lambda x: x.view(-1), torch.arange(6.0).reshape(3, 2).t())  # mark


@mistake
def a_write_to_a_view_that_overlaps() -> Any:
    return _call(lambda x: x.unfold(0, 2, 1).add_(1), torch.ones(3))  # mark


@mistake
def a_negative_variance() -> Any:
    return _call(lambda v: F.gaussian_nll_loss(torch.ones(2), torch.zeros(2), v), -torch.ones(2))  # mark


@mistake
def an_unknown_reduction() -> Any:
    return _call(lambda x: F.mse_loss(x, torch.ones(2), reduction="total"), torch.ones(2))  # mark


@mistake
def a_module_in_place_of_parameters() -> Any:
    return mt.clipped_grad(lambda net, x: net(x).sum(), l2_clip_norm=1.0)(NET, X)  # mark


@mistake
def bytes_that_a_layer_does_not_take() -> Any:
    return _call(lambda x: F.linear(x, torch.ones(2, 3)), torch.ones(2, 3, dtype=torch.uint8))  # mark


@mistake
def whole_numbers_in_a_softmax() -> Any:
    return _call(lambda x: F.softmax(x, -1), torch.tensor([1, 2, 3]))  # mark


@mistake
def a_division_by_zero() -> Any:
    return _call(lambda x: 7 // x, torch.tensor([1, 0]))  # mark


@mistake
def lengths_that_do_not_fit() -> Any:
    targets = torch.ones(1, 2, dtype=torch.long)
    return _call(lambda x: F.ctc_loss(x.log_softmax(-1), targets, [9], [2]), torch.ones(5, 1, 3))  # mark


@mistake
def shapes_that_do_not_match() -> Any:
    return _call(lambda x: x @ torch.ones(4, 2), torch.ones(2, 3))  # mark


@mistake
def an_axis_that_is_not_there() -> Any:
    return _call(lambda x: x.sum(3), torch.ones(2, 3))  # mark


def _message(fun: Callable[[], Any]) -> tuple[str, str]:
    """The message with its notes, without places, and the source of the line that it names."""
    with pytest.raises((TypeError, ValueError, IndexError, RuntimeError)) as caught:
        fun()
    notes = [note for note in getattr(caught.value, "__notes__", ()) if note.startswith("while microtome")]
    text = "\n".join((f"{type(caught.value).__name__}: {caught.value}", *notes))
    place = re.search(re.escape(__file__) + r":(\d+)", text)
    line = pathlib.Path(__file__).read_text().splitlines()[int(place[1]) - 1] if place else ""
    return re.sub(re.escape(__file__) + r":\d+", "<user>", text), line


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named_with_the_users_line(name: str, request: pytest.FixtureRequest) -> None:
    message, line = _message(MISTAKES[name])
    assert line.endswith("# mark"), (message, line)
    golden = dict(entry.split("\n", 1) for entry in GOLDEN.read_text().strip().split("\n\n")) if GOLDEN.exists() else {}
    if request.config.getoption("--update-golden"):
        golden = {k: v for k, v in golden.items() if k in MISTAKES} | {name: message}
        GOLDEN.write_text("\n\n".join(f"{k}\n{v}" for k, v in sorted(golden.items())) + "\n")
    assert golden[name] == message


def test_the_golden_file_holds_these_and_no_others() -> None:
    assert [entry.split("\n", 1)[0] for entry in GOLDEN.read_text().strip().split("\n\n")] == sorted(MISTAKES)
