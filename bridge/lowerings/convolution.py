"""Convolution and its backward op, for every kind: 1-d to 3-d, strided, dilated, grouped, transposed."""

from __future__ import annotations

from typing import Any

import jax
import torch
from jax import Array

from ..torchax_ops import torchax_table
from ._registry import lowering
from .backward import forward


@lowering("aten.convolution_backward")
def convolution_backward(
    g: Array,
    x: Array,
    weight: Array,
    bias_sizes: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
    mask: Any,
) -> tuple[Array | None, ...]:
    convolve = forward(torch.ops.aten.convolution)

    def apply(x: Array, weight: Array) -> Array:
        return convolve(x, weight, None, stride, padding, dilation, transposed, output_padding, groups)

    _, pull = jax.vjp(apply, x, weight)
    gx, gw = pull(g)
    bias = g.sum(axis=(0, *range(2, g.ndim))) if mask[2] else None
    return gx if mask[0] else None, gw if mask[1] else None, bias


@lowering("aten.convolution")
def convolution(x: Array, weight: Array, *args: Any) -> Array:
    """torchax's, which gives wrong numbers for grouped transposed convolutions: those are refused."""
    transposed, groups = args[4], args[6]
    if transposed and groups > 1:
        raise NotImplementedError("a transposed convolution with groups > 1 is not supported; use groups=1")
    return torchax_table()[torch.ops.aten.convolution](x, weight, *args)
