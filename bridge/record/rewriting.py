"""Where XLA's algebraic simplifier would change a recorded function by more than rounding, and what holds it off.

XLA simplifies as if numbers were real: ``(a / b) / c`` becomes ``a / (b * c)``, which overflows where torch's form does
not, ``log(exp(a))`` becomes ``a``, ``(a + 1) - 1`` becomes ``a``. It does so where one op reads the other, so the value
between them goes through an optimization barrier, which stands until the simplifier is done. On CPU it is gone before
operations are fused, and costs nothing, up to jax 0.10 (``bridge/base/versions.py`` has what later ones need); on GPU
it parts two fusions, so pairs that only round in another way are left.

A value is followed by tags that say what XLA may take it for: the words below, and of a product with a constant number,
the number.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, TypeGuard

import torch

from ..lowerings.moved import SumOfQuotients
from .nodes import Const, Node, Ref, Value

Tags = frozenset[Any]

QUOTIENT, EXPONENTIAL, POWER, SQUARE = "quotient", "exponential", "power", "square"
SCALED, SHIFTED = "scaled", "shifted"  # by a constant
CONSTANT = "constant"
UNIT = "unit"  # of inputs only: where such a one is a constant one, as JAX's first cotangent, its product is dropped
SPREAD = "spread"  # over more axes: XLA computes with what it is spread from, which a barrier would forbid
EXPONENTIALS = "exponentials"  # a sum of them: as a divisor, XLA multiplies by its reciprocal, which underflows

_NOTHING: Tags = frozenset()
_MAKES = {
    **dict.fromkeys(("reciprocal", "sigmoid", "_softmax"), frozenset((QUOTIENT,))),
    **dict.fromkeys(("exp", "exp2"), frozenset((EXPONENTIAL,))),
    "rsqrt": frozenset((POWER,)),
    **dict.fromkeys(("mean", "var"), frozenset((SCALED,))),
    **dict.fromkeys(("full_like", "ones_like", "zeros_like", "new_full", "new_ones"), frozenset((CONSTANT,))),
    "square": frozenset((SQUARE,)),
    "expand": frozenset((SPREAD,)),
}
_UNDOES = {
    "reciprocal": frozenset((QUOTIENT, EXPONENTIAL, POWER)),
    "sqrt": frozenset((SQUARE,)),
    "pow": frozenset((SQUARE, EXPONENTIAL, POWER)),
    **dict.fromkeys(("log", "log2", "log10"), frozenset((EXPONENTIAL, POWER))),
}
_MOVES = {"clone", "expand", "permute", "reshape", "squeeze", "t", "transpose", "unsqueeze", "view", "_unsafe_view"}
_REDUCES = {"sum", "mean", "amax", "amin"}  # which only move, or scale, over axes of length 1 or ones spread over


def barriers(nodes: Sequence[Node | None], outputs: Sequence[Value]) -> tuple[dict[int, list[int]], set[int]]:
    """Return the leaves of nodes that go through a barrier, by their place, and the nodes whose results do."""
    tags = {i: frozenset((UNIT,)) for i, node in enumerate(nodes) if node is None}
    found: dict[int, list[int]] = {}
    for i, node in enumerate(nodes):
        meta = None if node is None or not node.single else node.results[0]
        if node is None or meta is None or not meta.differentiable:
            continue
        name = node.name
        seen = [_seen(leaf, tags) for leaf in node.leaves[:2]]
        if places := list(_guarded(name, node, *seen, *[_NOTHING] * (2 - len(seen)))):
            found[i] = places
        keeps = name in _MOVES
        if name in _REDUCES:
            keeps = SPREAD in seen[0] or _size(nodes, node.leaves[0]) == math.prod(meta.shape)
        tags[i] = _made(name, node, seen) | (seen[0] if keeps else _NOTHING)
    # What is done elsewhere with the results is not known: a mean over microbatches divides once more.
    return found, {o.node for o in outputs if isinstance(o, Ref) and QUOTIENT in _seen(o, tags)}


def is_constant(nodes: Sequence[Node | None], leaf: Any) -> bool:
    """Tell whether an operand is a constant, moved or spread: XLA moves constant factors through products."""
    while isinstance(leaf, Ref):
        node = nodes[leaf.node]
        if node is None:
            return False
        if CONSTANT in _MAKES.get(node.name, _NOTHING):
            return True
        if node.name not in (*_MOVES, "_to_copy", "to", "convert_element_type"):
            return False
        leaf = node.leaves[0]
    return True


def _seen(leaf: object, tags: dict[int, Tags]) -> Tags:
    if isinstance(leaf, Ref):
        return tags.get(leaf.node, _NOTHING)
    return frozenset((CONSTANT,)) if isinstance(leaf, Const) or _is_number(leaf) else _NOTHING


def _is_number(leaf: object) -> TypeGuard[float]:
    return isinstance(leaf, (int, float)) and not isinstance(leaf, bool)


def _is_inverse(exponent: object) -> bool:
    return _is_number(exponent) and exponent < 0


def _size(nodes: Sequence[Node | None], leaf: Any) -> int:
    node = nodes[leaf.node] if isinstance(leaf, Ref) else None
    meta = None if node is None else node.results[leaf.item or 0]
    return -1 if meta is None else math.prod(meta.shape)


def _guarded(name: str, node: Node, a: Tags, b: Tags) -> Iterator[int]:
    """Yield the places of the operands, a and b, between which and the op XLA must not see."""
    if isinstance(node.op, SumOfQuotients):
        if QUOTIENT in a:
            yield 0
        if EXPONENTIALS in b:
            yield 1
    elif name == "div":
        if QUOTIENT in a or (EXPONENTIAL in a and EXPONENTIAL in b) or _rescales(node, a, _factor(node, 1, b, True)):
            yield 0
        if b & {QUOTIENT, EXPONENTIAL, POWER, EXPONENTIALS}:
            yield 1
    elif name == "mul":
        if (EXPONENTIAL in a and EXPONENTIAL in b) or _rescales(node, a, _factor(node, 1, b)):
            yield 0
        elif _rescales(node, b, _factor(node, 0, a)):
            yield 1
    elif name in ("add", "sub", "rsub"):
        if (SHIFTED in a and CONSTANT in b) or any(_is_power_of_two(factor) for factor in a & b):
            yield 0  # the latter, as XLA makes (a + b) * c of a * c + b * c
        elif SHIFTED in b and CONSTANT in a:
            yield 1
    elif a & _UNDOES.get("reciprocal" if name == "pow" and _is_inverse(node.leaves[1]) else name, _NOTHING):
        yield 0


def _factor(node: Node, place: int, tags: Tags, inverse: bool = False) -> float | str | None:
    """Return the constant that an operand is, or its inverse: a number, SCALED for an array, None if it is none."""
    leaf = node.leaves[place]
    if CONSTANT not in tags:
        return None
    return SCALED if not _is_number(leaf) or leaf == 0 else 1 / leaf if inverse else float(leaf)


def _rescales(node: Node, scaled: Tags, d: Any) -> bool:
    """Tell whether (a * c) * d may overflow or underflow where a * (c * d) does not, or the other way round."""
    factors = [c for c in scaled if c == SCALED or _is_number(c)]
    if d is None or SPREAD in scaled or not factors:
        return False
    meta = node.results[0]
    if meta is None or d == SCALED or SCALED in factors or meta.dtype.is_complex:
        return True
    info = torch.finfo(meta.dtype)
    return any((abs(c) < 1) != (abs(d) < 1) or not info.tiny <= abs(c * d) <= info.max for c in factors)


def _is_power_of_two(factor: object) -> bool:
    return _is_number(factor) and math.frexp(abs(factor))[0] == 0.5


def _made(name: str, node: Node, seen: Sequence[Tags]) -> Tags:
    """Tell what XLA may take a result for, where the op does not only move its operand."""
    if name in ("mul", "div", "add", "sub", "rsub"):
        return _of_arithmetic(name, node, *seen)
    if isinstance(node.op, SumOfQuotients):
        return _MAKES["reciprocal"]
    if name == "pow":
        return _of_power(node.leaves[1], seen[0])
    if name == "sum" and EXPONENTIAL in seen[0]:
        return frozenset((EXPONENTIALS,))
    if name == "neg":  # to XLA a product with -1
        return frozenset(tag for tag in seen[0] if tag in (SPREAD, SCALED) or _is_number(tag))
    if name in ("_to_copy", "to", "convert_element_type"):
        return seen[0] & {CONSTANT, SPREAD, UNIT}
    return _MAKES.get(name, _NOTHING)


def _of_arithmetic(name: str, node: Node, a: Tags, b: Tags) -> Tags:
    kept = (a | b) & {EXPONENTIALS} if CONSTANT in a | b else _NOTHING
    if all(tags & {SPREAD, CONSTANT} for tags in (a, b)):
        kept |= (a | b) & {SPREAD}
    if name == "mul":
        squares = (SQUARE,) if node.leaves[0] == node.leaves[1] else ()
        factors = {_factor(node, 0, a), _factor(node, 1, b)} - {None}
        return kept.union(squares, factors, _beside(node.leaves[0], a, b), _beside(node.leaves[1], b, a))
    if name == "div":
        if _is_number(node.leaves[1]):  # a product with the reciprocal
            return kept.union((_factor(node, 1, b, inverse=True),), a if node.leaves[1] == 1 else ())
        return kept.union((QUOTIENT,), (SCALED,) if CONSTANT in b else ())
    if CONSTANT not in a | b:
        return kept
    # A number that rounds to zero is dropped, and an array may be zero.
    drops = all(not _is_number(leaf) or abs(leaf) < _smallest(node) for leaf in node.leaves[:2])
    return kept.union((SHIFTED,), (a | b) - {CONSTANT} if drops else ())


def _smallest(node: Node) -> float:
    meta = node.results[0]
    info = torch.finfo(torch.float64 if meta is None or meta.dtype.is_complex else meta.dtype)
    return info.tiny * info.eps


def _beside(leaf: object, tags: Tags, other: Tags) -> Tags:
    """Return the tags of a product's factor where the other factor may be the number one."""
    may_be_one = leaf == 1 if _is_number(leaf) else tags & {UNIT, CONSTANT}
    return other - {CONSTANT, SPREAD} if may_be_one else _NOTHING


def _of_power(exponent: object, a: Tags) -> Tags:
    if not _is_number(exponent):
        return frozenset((POWER,))
    if exponent == 1:
        return a
    if exponent == 2:
        return frozenset((SQUARE,)) | (a & {EXPONENTIAL})
    return frozenset((QUOTIENT, POWER) if _is_inverse(exponent) else (POWER,))
