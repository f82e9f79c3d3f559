"""Products of matrices that read their operands as they lie, and sums that run from the end.

torch multiplies matrices in one order of their axes: einsum, attention and all derivatives of products permute the
operands before, and the result behind. XLA multiplies over any axes, and copies an operand of several matrices that is
permuted for it. So the product is recorded as one over the axes that lie there. Likewise a sum that runs from the end,
as the derivative of ``cumsum``, is one that is reversed twice in torch; and the gradient of a divisor that is spread
over axes is an array of quotients, each divided once more, of which torch takes the sum.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from ..base import torch_internals as ti
from ..lowerings.moved import Product, SumFromEnd, SumOfQuotients
from .nodes import Const, Node, Op, Ref, Value
from .recorder import Spec

aten = torch.ops.aten
Shape = tuple[int, ...]
Axes = tuple[tuple[int, ...], ...]  # for each axis the axes of another array that it is made of, without those of one

_PRODUCTS = (aten.mm.default, aten.bmm.default, aten.mv.default)
_PERMUTES = (aten.permute.default, aten.transpose.int, aten.t.default)
_SUMS = (aten.sum.dim_IntList, aten.sum.default)
_IN_ORDER = (
    *(aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.clone.default, aten.expand.default),
    *(aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims),
)


def without_moves(
    nodes: Sequence[Node | None], roots: Iterable[Value | None], shapes: dict[int, Shape], start: int
) -> list[Node | None]:
    """Return the nodes, with ops that do themselves what axes were moved for.

    ``shapes`` are those of the inputs. What is computed before node ``start``, where the backward half begins, is so
    still.
    """
    moves = _Moves(nodes, {root.node for root in roots if isinstance(root, Ref)}, shapes)
    for i, node in enumerate(nodes):
        if node is not None and node.op in _PRODUCTS:
            moves.transpose_result(i, node, start)
    for i, node in enumerate(moves.nodes):
        if node is not None and node.op in _PRODUCTS:
            moves.nodes[i] = moves.product(node, node) or node
        elif node is not None and node.op is aten.flip.default:
            moves.nodes[i] = moves.sum_from_end(i, node, start) or node
        elif node is not None and node.op in _SUMS:
            moves.nodes[i] = moves.sum_of_quotients(i, node) or node
    return moves.nodes


class _Moves:
    def __init__(self, nodes: Sequence[Node | None], roots: set[int], shapes: dict[int, Shape]) -> None:
        self.nodes, self.roots, self.shapes = list(nodes), roots, shapes
        self.readers: dict[int, list[int]] = {}  # by what is used itself
        live: set[int] = set()
        stack = list(roots)
        while stack:
            i = stack.pop()
            node = nodes[i]
            if node is None or i in live:
                continue
            live.add(i)
            for j in node.refs():
                self.readers.setdefault(j, []).append(i)
                stack.append(j)

    def shape(self, value: Value) -> Shape:
        if isinstance(value, Const):
            return value.array.shape
        node = self.nodes[value.node]
        meta = None if node is None else node.results[value.item or 0]
        return self.shapes[value.node] if meta is None else meta.shape

    def only_reader(self, i: int) -> int | None:
        readers = self.readers.get(i, [])
        return readers[0] if len(readers) == 1 and i not in self.roots else None

    def origin(self, value: Value, batch: int, deep: bool) -> tuple[Value, Axes]:
        """Return the array that a value shows with its axes moved, and of which of them each axis is made.

        The axes of the batch are the first there too: elsewhere XLA would copy the array for each product, where now
        they share what was moved.
        """
        for source, axes in self._origins(value, deep):
            leading = _flat(axes[:batch])
            if leading == tuple(sorted(_flat(axes)))[: len(leading)]:
                return source, axes
        raise AssertionError("a value lies as it is read itself")

    def _origins(self, value: Value, deep: bool) -> Iterator[tuple[Value, Axes]]:
        """Yield the arrays that a value shows, from the first on; through a mere merging of axes only if ``deep``."""
        node = self.nodes[value.node] if isinstance(value, Ref) else None
        if node is not None and node.op in (*_PERMUTES, *_IN_ORDER):
            for source, axes in self._origins(node.leaves[0], deep):
                moved = _moved(node, axes, self.shape(source))
                if moved is not None and (deep or not _in_order(moved) or all(len(axis) < 2 for axis in moved)):
                    yield source, moved
        yield value, _own_axes(self.shape(value))

    def transpose_result(self, i: int, node: Node, start: int) -> None:
        """Multiply operands in the other order, where all that is read of their product is its transpose."""
        shape = self.shape(Ref(i))
        last, axes = i, _own_axes(shape)
        while (reader := self.only_reader(last)) is not None and (reader < start) == (i < start):
            move = self.nodes[reader]
            assert move is not None
            moved = _moved(move, axes, shape) if move.op in (*_PERMUTES, *_IN_ORDER) else None
            if moved is None:
                break
            last, axes = reader, moved
        *batch, rows, columns = ((), *_own_axes(shape))  # a vector has no rows
        if not _in_order(axes) and _flat(axes) == _flat((*batch, columns, rows)):
            self.nodes[last] = self.product(node, self.nodes[last], transposed=True) or self.nodes[last]

    def product(self, node: Node, result: Any, transposed: bool = False) -> Node | None:
        """Return the product that a node is, of its operands as they lie; None if it is that already."""
        batch = int(node.op is aten.bmm.default)
        for deep in (True, False) if batch else (False,):
            (a, left), (b, right) = (self.origin(operand, batch, deep) for operand in node.leaves)
            merged = any(len(axis) > 1 for axis in left[:batch])  # several axes of a batch, that XLA may have apart
            if not (transposed or merged) and _in_order(left) and _in_order(right):
                continue
            pairs = [(left[-1], right[batch]), *zip(left[:batch], right[:batch], strict=True)]
            sizes = [([self.shape(a)[x] for x in one], [self.shape(b)[y] for y in other]) for one, other in pairs]
            free = left[batch : batch + 1], right[batch + 1 :]
            if any(one != other for one, other in sizes) or not all(map(_in_order, free)):
                continue
            op, leaves = Product(pairs[0], (_flat(left[:batch]), _flat(right[:batch]))), (a, b)
            if transposed or not free[1]:  # a row vector times a matrix, in the place of the matrix moved
                op, leaves = Product(op.summed[::-1], op.batch[::-1]), (b, a)
            return dataclasses.replace(result, op=op, leaves=leaves, spec=node.spec, line=node.line)
        return None

    def sum_from_end(self, i: int, node: Node, start: int) -> Node | None:
        """Return, as one sum from the end, the sum that a node reverses, if it is one of what is reversed already."""
        summing, at = self._made_by(node.leaves[0], aten.cumsum.default)
        turned, _ = self._made_by(summing.leaves[0], aten.flip.default) if summing else (None, -1)
        if summing is None or turned is None or self.only_reader(at) != i or (at < start) != (i < start):
            return None
        axes = [node.leaves[1:], summing.leaves[1:2], turned.leaves[1:]]
        rank = len(self.shape(node.leaves[0]))
        if any(len(a) != 1 or a[0] % rank != axes[0][0] % rank for a in axes):
            return None
        return _replaced(node, SumFromEnd(axes[0][0] % rank), turned.leaves[0])

    def sum_of_quotients(self, i: int, node: Node) -> Node | None:
        """Return, as one op, the gradient of a divisor of several elements: ``sum(g * ((x / divisor) / divisor))``."""
        product, at = self._made_by(node.leaves[0], aten.mul.Tensor)
        if product is None or self.only_reader(at) != i:
            return None
        meta, total = product.results[0], node.results[0]
        assert meta is not None
        assert total is not None
        for g, twice in (product.leaves, product.leaves[::-1]):
            outer, place = self._made_by(twice, aten.div.Tensor)
            inner, _ = self._made_by(outer.leaves[0], aten.div.Tensor) if outer else (None, -1)
            if outer is None or inner is None or self.only_reader(place) != at:
                continue
            x, divisor = inner.leaves
            if type(divisor) is not Ref or divisor != outer.leaves[1]:
                continue
            spread, _ = self._made_by(divisor, aten.expand.default)
            divisor = divisor if spread is None else spread.leaves[0]
            shape, keeps = self.shape(divisor), len(total.shape) in (0, len(meta.shape))
            if not keeps or meta.dtype != total.dtype or 0 in meta.shape or len(shape) > len(total.shape):
                continue
            arrays = all(isinstance(v, (Ref, Const)) for v in (x, g))
            if arrays and torch.broadcast_shapes(shape, total.shape) == total.shape:
                return _replaced(node, SumOfQuotients(meta.shape), x, divisor, g, divisor)
        return None

    def _made_by(self, value: Any, op: Op) -> tuple[Node | None, int]:
        node = self.nodes[value.node] if isinstance(value, Ref) else None
        return (node, value.node) if node is not None and node.op is op else (None, -1)


def _replaced(node: Node, op: Op, *leaves: Value) -> Node:
    spec = Spec(ti.torch_pytree.tree_structure((leaves, {})))
    return dataclasses.replace(node, op=op, leaves=leaves, spec=spec)


def _moved(node: Node, axes: Axes, sizes: Shape) -> Axes | None:
    """Tell of what the axes of a move's result are made, from what its operand's are; None if one would be cut."""
    meta = node.results[0]
    assert meta is not None
    if node.op in _IN_ORDER:
        return _grouped(_flat(axes), sizes, meta.shape)
    order = list(range(len(axes)))
    args = node.leaves[1:]
    if node.op is aten.permute.default:
        order = [d % len(axes) for d in args]
    elif len(order) > 1:
        i, j = args or (0, 1)
        order[i], order[j] = order[j], order[i]
    return tuple(axes[d] for d in order)


def _grouped(flat: Sequence[int], sizes: Shape, shape: Shape) -> Axes | None:
    left, groups = list(flat), []
    for n in shape:
        group: list[int] = []
        size = 1
        while size < n and left:
            group.append(left.pop(0))
            size *= sizes[group[-1]]
        if size != n:
            return None
        groups.append(tuple(group))
    return None if left else tuple(groups)


def _own_axes(shape: Shape) -> Axes:
    return tuple((i,) if n != 1 else () for i, n in enumerate(shape))


def _flat(axes: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(x for axis in axes for x in axis)


def _in_order(axes: Axes) -> bool:
    flat = _flat(axes)
    return flat == tuple(sorted(flat))
