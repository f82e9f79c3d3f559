"""Convolution and its backward op, for every kind: 1-d to 3-d, strided, dilated, grouped, transposed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ...jax_impl.program.convolutions import channels_last
from ._registry import lowering
from .signatures import Forms


@lowering("aten.convolution", "aten._convolution", results=True)
def convolution(
    x: Array,
    weight: Array,
    bias: Array | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    *flags: bool,
    results: Forms = (),
) -> Array:
    """Convolve; torchax gives wrong numbers for grouped transposed convolutions."""
    spatial = weight.ndim - 2
    stride, padding, dilation, output_padding = (
        list(v) * spatial if len(v) == 1 else list(v) for v in (stride, padding, dilation, output_padding)
    )
    pads = [(p, p) for p in padding]
    dilated = [1] * spatial
    if transposed:  # a plain convolution with the flipped kernel over an input that is dilated by the stride
        weight = jnp.flip(_transposed_kernel(weight, groups), range(2, weight.ndim))
        reach = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
        pads = [(r - p, r - p + o) for r, p, o in zip(reach, padding, output_padding, strict=True)]
        stride, dilated = dilated, stride
    options: dict[str, Any] = {"lhs_dilation": dilated, "rhs_dilation": dilation, "feature_group_count": groups}
    if results and 0 in results[0].shape:  # torch has no channels there where none come in
        return jnp.zeros(results[0].shape, x.dtype)
    out = channels_last(lambda x, w: jax.lax.conv_general_dilated(x, w, stride, pads, **options))(x, weight)
    return out if bias is None else out + bias.reshape(-1, *[1] * spatial)


def _transposed_kernel(weight: Array, groups: int) -> Array:
    """Turn a kernel (inputs, outputs of a group, ...) into (outputs, inputs of a group, ...)."""
    inputs, outputs, *kernel = weight.shape
    grouped = weight.reshape(groups, inputs // groups, outputs, *kernel)
    return jnp.swapaxes(grouped, 1, 2).reshape(groups * outputs, inputs // groups, *kernel)


@lowering("aten.convolution_backward")
def convolution_backward(
    g: Array,
    x: Array,
    weight: Array,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    mask: Sequence[bool],
) -> tuple[Array | None, ...]:
    def apply(x: Array, weight: Array) -> Array:
        return convolution(x, weight, None, stride, padding, dilation, transposed, output_padding, groups)

    if not g.size:
        return jnp.zeros_like(x), jnp.zeros_like(weight), jnp.zeros(bias_sizes, g.dtype) if bias_sizes else None
    gx, gw = channels_last(lambda x, weight, g: jax.vjp(apply, x, weight)[1](g))(x, weight, g)
    bias = g.sum(axis=(0, *range(2, g.ndim))) if mask[2] else None
    return gx if mask[0] else None, gw if mask[1] else None, bias
