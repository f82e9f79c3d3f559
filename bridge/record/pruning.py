"""The backward half of a recording without the cotangents of some outputs.

An output that nobody differentiates has no cotangent, which is not the same as one of zeros: torch does not run its
branch, and zero times a derivative that is infinite would be NaN.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from collections.abc import Sequence

import jax
import numpy as np

from ..base import torch_internals as ti
from ..lowerings.signatures import Forms
from ..memory.dtypes import jax_dtype
from .graph import Graph
from .nodes import Const, Meta, Node, Ref
from .recorder import Barrier, Spec


def for_outputs(graph: Graph, live: Sequence[bool]) -> Graph | None:
    """Return the recording with cotangents of fewer differentiable outputs; None if only torch can say what that is.

    Its residuals are among those of the whole.
    """
    own = list(itertools.compress(graph.own, graph.differentiable))
    kept = functools.reduce(operator.or_, itertools.compress(own, live), 0)
    if any(mine & ~kept for mine in own):  # a backward pass of the user's may return what it was not given
        return None
    half = _Half(graph, live)
    if not all(half.prune(i) for i in range(min(graph.cotangents), len(graph.nodes))):
        return None
    outputs = itertools.compress(range(len(graph.outputs)), graph.differentiable)
    remaining = set(itertools.compress(outputs, live))
    return dataclasses.replace(
        graph,
        nodes=half.nodes,
        cotangents=list(itertools.compress(graph.cotangents, live)),
        differentiable=[i in remaining for i in range(len(graph.outputs))],
        gradients=[None if g is None or half.is_absent(g) else g for g in graph.gradients],
        checks=[check for check in graph.checks if not half.is_absent(check.evidence)],
    )


_JOINS = ("add", "cat", "stack")  # of gradients from several outputs


class _Half:
    """The nodes of a backward half that are computed from the cotangents that are there, and from the others alone."""

    def __init__(self, graph: Graph, live: Sequence[bool]) -> None:
        self.nodes = list(graph.nodes)
        self.has_own = any(graph.own)  # the user's backward passes, whose results need not come from cotangents
        self.absent = {node for node, is_live in zip(graph.cotangents, live, strict=True) if not is_live}
        self.present = set(graph.cotangents) - self.absent
        self.latest = max(self.present)
        metas = itertools.compress(graph.output_metas, graph.differentiable)
        self.metas = dict(zip(graph.cotangents, metas, strict=True))

    def is_absent(self, value: object) -> bool:
        return isinstance(value, Ref) and value.node in self.absent

    def prune(self, i: int) -> bool:
        """Make node ``i`` do without what is absent; False if it cannot."""
        node = self.nodes[i]
        if node is None:
            return True
        leaves = node.leaves
        if isinstance(node.op, Barrier):  # it waits for its last, which it does not read
            if self.is_absent(leaves[-1]):
                self.nodes[i] = dataclasses.replace(node, leaves=(*leaves[:-1], self._latest()))
            leaves = leaves[:-1]
        read = {leaf.node for leaf in leaves if isinstance(leaf, Ref)}
        if self.absent.isdisjoint(read):
            if self.present.isdisjoint(read):
                return True
        elif self.present.isdisjoint(read):
            self.absent.add(i)
            return not (self.has_own and node.name in _JOINS and any(map(self._is_other, leaves)))
        else:
            without = self._without(node)
            if without is None:
                return False
            self.nodes[i] = without
        self.present.add(i)
        self.latest = i
        return True

    def _without(self, node: Node) -> Node | None:
        name = node.name
        if name == "add" and node.leaves[2:] in ((), (1,)):  # autograd adds up what comes from several outputs
            one, other = node.leaves[:2]
            kept = other if self.is_absent(one) else one
            if self._meta(kept) != node.results[0]:
                return None
            spec = Spec(ti.torch_pytree.tree_structure(((kept,), {})))
            return dataclasses.replace(node, op=_Alone(), leaves=(kept,), spec=spec)
        if name in ("cat", "stack"):  # torch too fills in zeros: of split, unbind
            return dataclasses.replace(node, leaves=tuple(map(self._or_zeros, node.leaves)))
        return None

    def _or_zeros(self, leaf: object) -> object:
        if not self.is_absent(leaf):
            return leaf
        meta = self._meta(leaf)
        assert meta is not None
        return Const(np.broadcast_to(np.zeros((), jax_dtype(meta.dtype)), meta.shape))

    def _is_other(self, leaf: object) -> bool:
        return isinstance(leaf, (Ref, Const)) and not self.is_absent(leaf)

    def _latest(self) -> Ref:
        node = self.nodes[self.latest]
        return Ref(self.latest, None if node is None or node.single else 0)

    def _meta(self, leaf: object) -> Meta | None:
        if not isinstance(leaf, Ref):
            return None
        node = self.nodes[leaf.node]
        return self.metas.get(leaf.node) if node is None else node.results[leaf.item or 0]


@dataclasses.dataclass(frozen=True)
class _Alone:
    """What is left of a sum."""

    def lower(self, array: jax.Array, _results: Forms, _key: jax.Array | None) -> jax.Array:
        return array
