"""Packed sequences, above autograd: their lengths are constants of the trace, given as Python lists."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import _VF, Tensor
from torch._decomp import decomposition_table

from ...jax_impl.program.trees import Function

aten = torch.ops.aten


def pack(input: Tensor, lengths: Sequence[int], batch_first: bool) -> tuple[Tensor, Tensor]:
    """Pack as ``pack_padded_sequence``: the rows that are long enough for each step in turn, and how many each has."""
    padded = input.transpose(0, 1) if batch_first else input
    if len(lengths) != padded.shape[1]:
        raise RuntimeError(f"Expected `len(lengths)` to be equal to batch_size, but got {len(lengths)}.")
    if min(lengths) <= 0 or max(lengths) > padded.shape[0]:
        raise RuntimeError(f"lengths must be between 1 and {padded.shape[0]}, the steps of the input: {list(lengths)}.")
    if sorted(lengths, reverse=True) != list(lengths):
        raise RuntimeError(
            "`lengths` array must be sorted in decreasing order when `enforce_sorted` is True. You can pass "
            "`enforce_sorted=False` to pack_padded_sequence."
        )
    counts = [sum(n > step for n in lengths) for step in range(lengths[0])]
    places = [step * len(lengths) + row for step, count in enumerate(counts) for row in range(count)]
    data = padded.flatten(0, 1).index_select(0, torch.tensor(places, device=input.device))
    return data, torch.tensor(counts)


def unpack(
    data: Tensor, counts: Sequence[int], batch_first: bool, padding_value: float, total_length: int
) -> tuple[Tensor, Tensor]:
    """Unpack as ``pad_packed_sequence``."""
    if 0 < total_length < len(counts):
        raise RuntimeError(
            f"Expected total_length to be at least the length of the longest sequence in input, but got {total_length} "
            f"and a sequence of length {len(counts)}."
        )
    padding, places, start = data.shape[0], [], 0
    for step in range(max(len(counts), total_length)):
        count = counts[step] if step < len(counts) else 0
        places.append([start + row if row < count else padding for row in range(counts[0])])
        start += count
    rows = torch.cat([data, data.new_full((1, *data.shape[1:]), padding_value)])
    index = torch.tensor(places, device=data.device)
    padded = rows.index_select(0, index.flatten()).unflatten(0, index.shape)
    lengths = torch.tensor([sum(count > row for count in counts) for row in range(counts[0])])
    return padded.transpose(0, 1) if batch_first else padded, lengths


def _recurrent(op: torch._ops.OpOverload) -> Function:
    return lambda data, counts, *args: decomposition_table[op](data, counts, *args)


# By the torch function: what runs in its place, with the second argument as a list of ints.
PACKED: dict[object, Function] = {
    _VF._pack_padded_sequence: pack,
    _VF._pad_packed_sequence: unpack,
    _VF.lstm: _recurrent(aten.lstm.data),
    _VF.gru: _recurrent(aten.gru.data),
    _VF.rnn_tanh: _recurrent(aten.rnn_tanh.data),
    _VF.rnn_relu: _recurrent(aten.rnn_relu.data),
}


def is_packed(func: object, args: Sequence[object]) -> bool:
    """Tell whether a call works on a packed sequence: a layer has its weights one place later then."""
    return func in PACKED and (len(args) < 6 or isinstance(args[3], (list, tuple)))
