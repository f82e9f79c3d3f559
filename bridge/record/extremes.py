"""Values that meet their own maximum: they are computed once.

XLA computes a cheap value anew for each operation that reads it. Where it is a product plus something, one of these may
round twice and the other once (by a fused multiply-add), and then no element equals the maximum: the derivative of
``amax`` is 0/0, a mask ``x >= x.amax()`` is empty, ``x.clamp(max=x.amax())`` cuts the largest. In torch a value is what
stands in memory. So what an extreme is taken of, and something else reads too, goes through a loop that ends before its
first step, which XLA cannot know: it has to store the value.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from .nodes import Node, Ref, Value

_EXTREMES = frozenset(
    (
        *("max", "min", "amax", "amin", "aminmax", "_aminmax", "argmax", "argmin", "cummax", "cummin", "histc"),
        *("topk", "sort", "argsort", "msort", "kthvalue", "median", "nanmedian", "mode", "unique_dim", "_unique2"),
    )
)
_NORMS = frozenset(("norm", "linalg_vector_norm"))
# What gives entries of its operands as they are, or of another sign or dtype.
_EXACT = frozenset(
    (
        *("view", "_unsafe_view", "reshape", "expand", "permute", "transpose", "t", "squeeze", "unsqueeze", "alias"),
        *("detach", "clone", "slice", "select", "split", "split_with_sizes", "unbind", "diagonal", "flip", "roll"),
        *("index", "index_select", "gather", "narrow", "cat", "stack", "where", "masked_fill", "maximum", "minimum"),
        *("abs", "neg", "relu", "clamp", "clamp_min", "clamp_max", "_to_copy", "repeat", "constant_pad_nd"),
    )
)
# What XLA does not compute within another operation.
_STORED = frozenset(("mm", "bmm", "mv", "dot", "addmm", "baddbmm", "convolution", "sum", "mean", "prod", "cumsum"))


def compared(nodes: Sequence[Node | None], roots: Sequence[Value], live: set[int]) -> set[Ref]:
    """Find the results that have to be stored: an extreme is taken of them, and something else live reads them."""
    computed = [node for i, node in enumerate(nodes) if node is not None and i in live]
    readers = Counter(root for root in roots if isinstance(root, Ref))
    for node in computed:
        readers.update(node.operands())
    found: set[Ref] = set()
    stack = [(ref, False) for node in computed if _is_extreme(node) for ref in list(node.operands())[:1]]
    while stack:
        ref, shared = stack.pop()
        source = nodes[ref.node]
        meta = None if source is None else source.results[ref.item or 0]
        if source is None or meta is None or not meta.dtype.is_floating_point or ref in found:
            continue
        shared = shared or readers[ref] > 1
        if source.name in _EXACT:
            stack += [(operand, shared) for operand in source.operands()]
        elif shared and source.name not in _STORED:
            found.add(ref)
    return found


def _is_extreme(node: Node) -> bool:
    exponents = [x for x in node.leaves[1:2] if isinstance(x, (int, float))]
    return node.name in _EXTREMES or (node.name in _NORMS and any(map(math.isinf, exponents)))
