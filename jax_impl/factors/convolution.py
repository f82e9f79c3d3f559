"""The rule for the weight gradient of a convolution: windows of the input times the cotangent of the output.

``vmap`` of a convolution with one kernel for each example is a grouped convolution, which is slow on most backends.
Seen from one example it is, at each tap of the kernel, a matrix product of a shifted input with the cotangent.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from ..program.evaluate import shaped
from ..program.sums import wide
from .dense import dense
from .lazy import Lazy
from .registry import Evaluator, rule
from .terms import Factor, Label, Term, UnsupportedError, Windows, new_label, whole


@rule("conv_general_dilated", accepts=None)  # of two arrays
def _convolution(ev: Evaluator, e: JaxprEqn) -> Any:
    """Compute ``out[n, f, k] = sum over c, s of lhs[n, c, k * stride + s * dilation] rhs[f, c, s]``, with groups."""
    left, right = e.invars
    if not (ev.is_batched(left) and ev.is_batched(right)):
        raise UnsupportedError("an operand that all examples share")
    p = e.params
    numbers, groups, batch_groups = p["dimension_numbers"], p["feature_group_count"], p["batch_group_count"]
    lhs = ev.array(left).transpose(numbers.lhs_spec)
    rhs = ev.array(right).transpose(numbers.rhs_spec)
    out = shaped(e.outvars[0])
    taps = tuple(out.shape[d] for d in numbers.out_spec[2:])
    if 0 in out.shape:
        raise UnsupportedError("an empty array")
    spatial = len(taps)
    positions = rhs.shape[2:]
    count = groups * batch_groups
    n, c = lhs.shape[0] // batch_groups, lhs.shape[1] // groups
    sizes: dict[Label, int] = {}

    def label(size: int) -> Label:
        made = new_label()
        sizes[made] = size
        return made

    group, row, channel, feature = label(count), label(n), label(c), label(rhs.shape[0] // count)
    tap_labels, position_labels = [label(k) for k in taps], [label(s) for s in positions]
    # Either groups of channels or groups of rows: their axis comes before the channels or before the rows.
    shape = (batch_groups, n, groups, c, *lhs.shape[2:])
    keep = (1, 2, 3) if groups > 1 else (0, 1, 3)
    grouped = lhs.reshape(shape).squeeze(0 if groups > 1 else 2)
    names = {0: group, 1: row, 2: group, 3: channel}
    window = Windows(
        grouped,
        (*(names[i] for i in keep), *tap_labels, *position_labels),
        True,
        tuple((low, high, d - 1) for (low, high), d in zip(p["padding"], p["lhs_dilation"], strict=True)),
        tuple(p["window_strides"]),
        tuple(p["rhs_dilation"]),
        taps,
        tuple(positions),
        (False,) * spatial,
    )
    features_last = jnp.moveaxis(rhs.reshape(count, rhs.shape[0] // count, *rhs.shape[1:]), 1, -1)
    cotangent = Factor(features_last, (group, channel, *position_labels, feature), True)
    axes: list[tuple[Label, ...]] = [()] * (2 + spatial)
    axes[numbers.out_spec[0]] = (row,)
    axes[numbers.out_spec[1]] = (group, feature)
    for d, k in zip(numbers.out_spec[2:], tap_labels, strict=True):
        axes[d] = (k,)
    term = Term((window, cotangent), tuple(axes), sizes, precision=p["precision"])
    value = Lazy(out.shape, out.dtype, (term,))
    if value.stored >= math.prod(out.shape):
        ev.decided(e, "direct", "no larger than its factors")
        array = dense(term, wide(out.dtype)).astype(out.dtype)
        return Lazy(out.shape, out.dtype, (whole(array, True),))
    return value
