"""A recorded torch function: its nodes, which of them each pass needs, and what the passes hand on.

A recording holds the forward pass and, where it was asked for, the vector-Jacobian product that torch's own autograd
recorded behind it. The nodes that do not depend on the cotangents are the forward half; of their results, those that
the other half reads are the residuals.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

import numpy as np

from ..lowerings.conditions import Check
from .extremes import compared
from .nodes import Const, Meta, Node, Op, Ref, Value, depend
from .rewriting import barriers


@dataclasses.dataclass
class Graph:
    """``nodes[i] is None`` marks an input: an argument, a captured tensor or a cotangent."""

    nodes: list[Node | None]
    inputs: list[int]
    captured: list[int]
    cotangents: list[int]
    outputs: list[Value]
    output_metas: list[Meta]
    differentiable: list[bool]
    reach: list[int]  # for each output, bit by bit, the inputs to which autograd goes back from it
    own: list[int]  # and the user's own backward passes on the way
    need: tuple[bool, ...]  # the inputs, arguments and then captured tensors, to which the gradients belong
    gradients: list[Value | None]
    mutations: list[tuple[int, Value]]  # (index into the captured tensors, the value that it ends with)
    moves: set[int]  # the captured tensors that end with memory of their own, apart from what shows that of before
    checks: list[Check]

    def __post_init__(self) -> None:
        # The backward half is what torch recorded in its backward pass: its residuals are torch's saved tensors.
        start = min(self.cotangents, default=len(self.nodes))
        later = [isinstance(c.evidence, Ref) and c.evidence.node >= start for c in self.checks]
        self.forward_checks = [c for c, is_later in zip(self.checks, later, strict=True) if not is_later]
        self.backward_checks = [c for c, is_later in zip(self.checks, later, strict=True) if is_later]
        evidence = [c.evidence for c in self.forward_checks]
        roots = [*self.outputs, *(value for _, value in self.mutations), *evidence]
        evidence = [c.evidence for c in self.backward_checks] if any(self.need) else []
        backward_roots = [*(g for g in self.gradients if g is not None), *evidence]
        forward, backward = self._live(roots), self._live(backward_roots)
        after = set(range(start, len(self.nodes)))
        numbered = [i for i, node in enumerate(self.nodes) if node is not None]
        self.forward_nodes = [i for i in numbered if i in forward]
        self.saving_nodes = [i for i in numbered if i in forward or (i in backward and i not in after)]
        self.backward_nodes = [i for i in numbered if i in backward and i in after]
        self.all_backward_nodes = [i for i in numbered if i in backward]
        inner = set(self.saving_nodes)
        read = {Ref(leaf.node, leaf.item) for i in self.backward_nodes for leaf in self._refs(i) if leaf.node in inner}
        read |= {g for g in self.gradients if type(g) is Ref and g.node in inner}
        self.saved = sorted(read, key=lambda ref: (ref.node, ref.item or 0))
        self.draws = any(self.nodes[i].draw is not None for i in numbered)  # type: ignore[union-attr]
        self.recomputes = self._recomputes(numbered, start)
        self.stored = compared(self.nodes, [*roots, *backward_roots], forward | backward)
        self.guarded_leaves, self.guarded_results = barriers(self.nodes, [*roots, *backward_roots])

    def reads(self, captured: Iterable[int]) -> bool:
        """Tell whether results depend on what some of the captured tensors hold."""
        inputs = {self.captured[i] for i in captured}
        return depend(self.nodes, [*self.outputs, *(value for _, value in self.mutations)], inputs)

    @property
    def forward_ops(self) -> list[Op]:
        """The ops of the forward half."""
        return [self.nodes[i].op for i in self.forward_nodes]  # type: ignore[union-attr]

    def computes_as(self, other: Graph, captured: Iterable[tuple[int, int]]) -> bool:
        """Tell whether the forward halves are the same ops on the same values; ``captured`` pairs captured tensors."""
        if len(self.forward_nodes) != len(other.forward_nodes) or len(self.outputs) != len(other.outputs):
            return False
        numbers = dict(zip(self.inputs, other.inputs, strict=True))
        numbers.update((self.captured[i], other.captured[j]) for i, j in captured)
        numbers.update(zip(self.forward_nodes, other.forward_nodes, strict=True))

        def same(mine: object, theirs: object) -> bool:
            if type(mine) is Ref:
                return type(theirs) is Ref and (numbers.get(mine.node), mine.item) == (theirs.node, theirs.item)
            if type(mine) is Const:
                return type(theirs) is Const and _same_array(mine.array, theirs.array)
            return type(mine) is type(theirs) and (mine is theirs or repr(mine) == repr(theirs))

        for i, j in zip(self.forward_nodes, other.forward_nodes, strict=True):
            one, two = self.nodes[i], other.nodes[j]
            assert one is not None
            assert two is not None
            if not _is_same_op(one.op, two.op) or len(one.leaves) != len(two.leaves) or one.draw != two.draw:
                return False
            pairs = zip(one.leaves, two.leaves, strict=True)
            # What is drawn goes into memory that nobody wrote.
            if not all(same(a, b) for a, b in pairs if one.draw is None or type(a) is not Const):
                return False
        return all(map(same, self.outputs, other.outputs))

    def _recomputes(self, numbered: Sequence[int], start: int) -> bool:
        """Tell whether the backward half does again what the forward half did, as a checkpoint makes torch do."""
        first: dict[object, int] = {}
        same: dict[int, int] = {}
        for i in numbered:
            node = self.nodes[i]
            assert node is not None
            leaves = tuple((same.get(x.node, x.node), x.item) if type(x) is Ref else repr(x) for x in node.leaves)
            same[i] = first.setdefault((node.op, leaves, node.draw), i)
            if same[i] < start <= i and not _is_view(node.op) and node.name not in _OWN_DERIVATIVES:
                return True
        return False

    def for_inputs(self, need: tuple[bool, ...]) -> Graph | None:
        """Return the recording with the gradients of fewer inputs."""
        if any(n and not mine for n, mine in zip(need, self.need, strict=True)):
            return None
        gradients = iter(self.gradients)
        found = [(n, next(gradients)) for n, mine in zip(need, self.need, strict=True) if mine]
        wanted = bits(need)
        moving = [d and bool(reach & wanted) for d, reach in zip(self.differentiable, self.reach, strict=True)]
        return dataclasses.replace(
            self,
            need=need,
            gradients=[gradient for n, gradient in found if n],
            differentiable=moving,
            cotangents=list(itertools.compress(self.cotangents, itertools.compress(moving, self.differentiable))),
        )

    def _refs(self, i: int) -> Iterable[Ref]:
        node = self.nodes[i]
        return () if node is None else node.operands()

    def _live(self, roots: Sequence[Value]) -> set[int]:
        live: set[int] = set()
        stack = [root.node for root in roots if isinstance(root, Ref)]
        while stack:
            i = stack.pop()
            if i not in live:
                live.add(i)
                node = self.nodes[i]
                if node is not None:
                    stack.extend(node.refs())
        return live

    def made_from(self, inputs: set[int]) -> list[bool]:
        """Tell which outputs and final values of mutations are computed from some of these inputs."""
        found = set(inputs)
        for i, node in enumerate(self.nodes):
            if node is not None and not found.isdisjoint(node.refs()):
                found.add(i)
        return [isinstance(v, Ref) and v.node in found for v in (*self.outputs, *(v for _, v in self.mutations))]

    def backward_reads(self, nodes: Iterable[int]) -> list[bool]:
        """Tell which inputs the nodes of a backward half read."""
        results = [*self.gradients, *(check.evidence for check in self.backward_checks)]
        read = {ref.node for i in nodes for ref in self._refs(i)} | {r.node for r in results if isinstance(r, Ref)}
        return [node in read for node in (*self.inputs, *self.captured)]

    def saved_metas(self) -> list[Meta]:
        """Return the metas of what the backward half reads of the forward half, without the inputs themselves."""
        metas = []
        for ref in self.saved:
            node = self.nodes[ref.node]
            assert node is not None
            meta = node.results[ref.item or 0]
            assert meta is not None
            metas.append(meta)
        return metas


def bits(flags: Iterable[bool]) -> int:
    """Return the flags as the bits of one number, the first as the lowest."""
    return sum(1 << i for i, flag in enumerate(flags) if flag)


def _is_same_op(one: Op, two: Op) -> bool:
    """Tell whether two ops are one; calls of compiled functions are made anew in each trace."""
    if type(one) is not type(two) or not hasattr(one, "flat"):
        return bool(one == two)
    return bool(one.flat.key == two.flat.key)


def _same_array(one: np.ndarray, two: np.ndarray) -> bool:
    return (one.dtype, one.shape) == (two.dtype, two.shape) and one.tobytes() == two.tobytes()


# torch's derivatives of simple ops are made of these: of a quotient, a sine, an absolute value.
_OWN_DERIVATIVES = ("div", "sin", "cos", "sinh", "cosh", "sgn")


def _is_view(op: object) -> bool:
    schema = getattr(op, "_schema", None)
    return schema is not None and any(r.alias_info is not None for r in schema.returns)
