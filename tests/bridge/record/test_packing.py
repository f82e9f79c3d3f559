"""Packed sequences inside traced functions: lengths are constants, values and gradients those of eager torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import through
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence, pad_packed_sequence


def _slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (nn.GRU, {"batch_first": True}),
        _slow(nn.LSTM, {"bidirectional": True, "num_layers": 2}),
        _slow(nn.RNN, {"nonlinearity": "relu", "bias": False}),
        _slow(nn.RNN, {}),
    ],
)
def test_recurrent_layers(cls: Any, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    layer, first = cls(2, 3, **options), options.get("batch_first", False)
    x = torch.randn((3, 5, 2) if first else (5, 3, 2), requires_grad=True)

    def run(x: torch.Tensor) -> Any:
        results = []
        for lengths, is_sorted in (([5, 3, 3], True), ([2, 4, 1], False)):
            packed = pack_padded_sequence(x, lengths, batch_first=first, enforce_sorted=is_sorted)
            out, state = layer(packed)
            results += [*pad_packed_sequence(out, first, padding_value=-1.0, total_length=6), state]
        return results, pack_sequence([x[0], x[1, :2]]).data

    got, want = through(run)(x), run(x)
    losses = []
    for results in (got, want):
        leaves = torch.utils._pytree.tree_leaves(results)
        losses.append(sum(leaf.sin().sum() for leaf in leaves if leaf.is_floating_point()))
    torch.testing.assert_close(got, want)
    for g, w in zip(*(torch.autograd.grad(loss, [x, *layer.parameters()]) for loss in losses), strict=True):
        torch.testing.assert_close(g, w)


def test_bad_lengths() -> None:
    x = torch.randn(5, 2, 3)
    cases = (([2, 3], "decreasing order"), ([6, 1], "between 1 and 5"), ([0, 0], "between 1"), ([3], "len"))
    for lengths, message in cases:
        with pytest.raises(RuntimeError, match=message):
            through(lambda x, n=lengths: pack_padded_sequence(x, n).data)(x)
    captured = torch.tensor([3, 2])
    with pytest.raises(TypeError, match=r"test_packing.py:\d+: the lengths of a packed sequence.*Python list"):
        through(lambda x: pack_padded_sequence(x, captured).data)(x)
