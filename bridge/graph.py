"""A recorded torch function: ATen nodes over numbered values, and their execution by JAX.

A recording holds the forward pass and, where it was asked for, the vector-Jacobian product that torch's own autograd
recorded behind it. The nodes that do not depend on the cotangents are the forward half; of their results, those that
the other half reads are the residuals.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch

from .bounds import checked
from .conditions import Check
from .lowerings import find_lowering
from .lowerings.stored import stored
from .values import jax_dtype

_CPU = torch.device("cpu")


@dataclasses.dataclass(frozen=True, slots=True)
class Ref:
    """The result of node ``node``; ``item`` picks one of several results."""

    node: int
    item: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Const:
    """A tensor that was made during the recording and depends on no input: a snapshot of its values."""

    array: np.ndarray


@dataclasses.dataclass(frozen=True, slots=True)
class Meta:
    """Dtype and shape that eager torch gives a tensor, and the device that it lives on."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    device: torch.device = _CPU
    stride: tuple[int, ...] | None = None  # of an input that is not contiguous

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Meta:
        return cls(tensor.dtype, tuple(tensor.shape), tensor.device)

    @classmethod
    def of_input(cls, tensor: torch.Tensor) -> Meta:
        """With what the function may ask of the layout."""
        return dataclasses.replace(cls.of(tensor), stride=unusual_stride(tensor))

    @property
    def aval(self) -> jax.core.ShapedArray:
        return jax.core.ShapedArray(self.shape, jax_dtype(self.dtype))

    @property
    def differentiable(self) -> bool:
        return self.dtype.is_floating_point or self.dtype.is_complex


class History(NamedTuple):
    """What autograd says of an argument."""

    requires_grad: bool
    is_leaf: bool
    has_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> History:
        return cls(tensor.requires_grad, tensor.is_leaf, tensor.is_leaf and tensor.grad is not None)


def has_own_data(tensor: torch.Tensor) -> bool:
    """Whether the tensor has data of its own, in order."""
    return tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_nested or tensor.is_meta)


def unusual_stride(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """The strides of a tensor that is not contiguous."""
    with torch._C.DisableTorchFunction():
        if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_contiguous():
            return None
        return tensor.stride()


@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """One call of an ATen op, or of another compiled function.

    ``leaves`` are its flattened arguments, in which a Ref or a Const stands for a tensor.
    """

    op: Any
    leaves: tuple[Any, ...]
    spec: Any
    results: tuple[Meta | None, ...]
    single: bool
    draw: int | None
    line: str

    @property
    def name(self) -> str:
        """The op's, without namespace and overload; empty for what is no op of torch's."""
        return getattr(getattr(self.op, "overloadpacket", None), "__name__", "")

    def operands(self) -> Iterable[Ref]:
        return (leaf for leaf in self.leaves if type(leaf) is Ref)

    def refs(self) -> Iterable[int]:
        return (ref.node for ref in self.operands())


Value = Ref | Const


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
        from .extremes import compared
        from .rewriting import barriers

        self.stored = compared(self.nodes, [*roots, *backward_roots], forward | backward)
        self.guarded_leaves, self.guarded_results = barriers(self.nodes, [*roots, *backward_roots])

    def reads(self, captured: Iterable[int]) -> bool:
        """Whether results depend on what some of the captured tensors hold."""
        inputs = {self.captured[i] for i in captured}
        return depend(self.nodes, [*self.outputs, *(value for _, value in self.mutations)], inputs)

    @property
    def forward_ops(self) -> list[Any]:
        """The ops of the forward half."""
        return [self.nodes[i].op for i in self.forward_nodes]  # type: ignore[union-attr]

    def computes_as(self, other: Graph, captured: Iterable[tuple[int, int]]) -> bool:
        """Whether the forward halves are the same ops on the same values; ``captured`` pairs the captured tensors."""
        if len(self.forward_nodes) != len(other.forward_nodes) or len(self.outputs) != len(other.outputs):
            return False
        numbers = dict(zip(self.inputs, other.inputs, strict=True))
        numbers.update((self.captured[i], other.captured[j]) for i, j in captured)
        numbers.update(zip(self.forward_nodes, other.forward_nodes, strict=True))

        def same(mine: Any, theirs: Any) -> bool:
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
        """Whether the backward half does again what the forward half did, as a checkpoint makes torch do."""
        first: dict[Any, int] = {}
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
        """The recording with the gradients of fewer inputs."""
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
        """Which outputs and final values of mutations are computed from some of these inputs."""
        found = set(inputs)
        for i, node in enumerate(self.nodes):
            if node is not None and not found.isdisjoint(node.refs()):
                found.add(i)
        return [isinstance(v, Ref) and v.node in found for v in (*self.outputs, *(v for _, v in self.mutations))]

    def backward_reads(self, nodes: Iterable[int]) -> list[bool]:
        """Which inputs the nodes of a backward half read."""
        results = [*self.gradients, *(check.evidence for check in self.backward_checks)]
        read = {ref.node for i in nodes for ref in self._refs(i)} | {r.node for r in results if isinstance(r, Ref)}
        return [node in read for node in (*self.inputs, *self.captured)]

    def saved_metas(self) -> list[Meta]:
        """What the backward half reads of the forward half, without the inputs themselves."""
        metas = []
        for ref in self.saved:
            node = self.nodes[ref.node]
            assert node is not None
            meta = node.results[ref.item or 0]
            assert meta is not None
            metas.append(meta)
        return metas


def bits(flags: Iterable[bool]) -> int:
    """The flags as the bits of one number, the first as the lowest."""
    return sum(1 << i for i, flag in enumerate(flags) if flag)


# Ops that take no more than dtype and shape from a tensor.
OF_FORM = frozenset(
    f"aten.{name}"
    for name in (
        *("zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "randint_like"),
        *("new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided"),
    )
)


def depend(nodes: Sequence[Node | None], values: Iterable[Value], inputs: set[int]) -> bool:
    """Whether some of the values are computed from what some of the inputs hold."""
    stack = [value.node for value in values if isinstance(value, Ref)]
    seen: set[int] = set()
    while stack:
        i = stack.pop()
        node = nodes[i]
        if i not in seen and node is not None and str(getattr(node.op, "overloadpacket", node.op)) not in OF_FORM:
            stack += node.refs()
        seen.add(i)
    return not seen.isdisjoint(inputs)


def _is_same_op(one: Any, two: Any) -> bool:
    """Whether two ops are one; calls of compiled functions are made anew in each trace."""
    if type(one) is not type(two) or not hasattr(one, "flat"):
        return bool(one == two)
    return bool(one.flat.key == two.flat.key)


def _same_array(one: np.ndarray, two: np.ndarray) -> bool:
    return (one.dtype, one.shape) == (two.dtype, two.shape) and one.tobytes() == two.tobytes()


# torch's derivatives of simple ops are made of these: of a quotient, a sine, an absolute value.
_OWN_DERIVATIVES = ("div", "sin", "cos", "sinh", "cosh", "sgn")


def _is_view(op: Any) -> bool:
    schema = getattr(op, "_schema", None)
    return schema is not None and any(r.alias_info is not None for r in schema.returns)


def run(graph: Graph, todo: Sequence[int], values: dict[int, Any], key: jax.Array) -> None:
    """Evaluate the nodes ``todo`` in order into ``values``; random draws come from ``key`` by their number."""
    for i in todo:
        node = graph.nodes[i]
        assert node is not None
        leaves = [read(values, leaf) if type(leaf) in (Ref, Const) else leaf for leaf in node.leaves]
        places = graph.guarded_leaves.get(i, ())
        for j in places:
            leaves[j] = _apart(leaves[j], node, j)
        args, kwargs = node.spec.unflatten(leaves)
        draw_key = None if node.draw is None else jax.random.fold_in(key, node.draw)
        try:
            lower = getattr(node.op, "lower", None) or find_lowering(node.op)
            result = lower(*checked(node.op, args, node.line), **kwargs, _results=node.results, _key=draw_key)
        except (TypeError, ValueError, NotImplementedError, AssertionError, AttributeError, IndexError) as error:
            raise TypeError(f"{node.line}: {node.op} could not be expressed in JAX: {error}") from error
        except RuntimeError as error:  # torch's own refusal
            if type(error) is not RuntimeError:
                raise
            raise RuntimeError(f"{node.line}: {error}") from error
        if node.single:
            value = _as_eager(result, node.results[0])
            value = stored(value) if Ref(i) in graph.stored else value
            values[i] = jax.lax.optimization_barrier(value) if i in graph.guarded_results else value
        else:
            found = [_as_eager(r, meta) for r, meta in zip(result, node.results, strict=True)]
            values[i] = [stored(r) if Ref(i, j) in graph.stored else r for j, r in enumerate(found)]


def _apart(operand: Any, node: Node, place: int) -> Any:
    """An operand of an elementwise op, out of the sight of XLA's simplifier; a divisor is spread out before."""
    meta = node.results[0]
    if place == 1 and meta is not None:
        operand = jnp.broadcast_to(operand, meta.shape)
    return jax.lax.optimization_barrier(operand)


def read(values: dict[int, Any], value: Value) -> jax.Array:
    """The array that a Ref or a Const stands for."""
    if isinstance(value, Const):
        array = value.array
        return (
            jnp.asarray(array)
            if any(array.strides)
            else jnp.full(array.shape, array.flat[0] if array.size else 0, array.dtype)
        )
    found = values[value.node]
    return found if value.item is None else found[value.item]


def _as_eager(result: Any, meta: Meta | None) -> Any:
    """The result with the dtype and shape that eager torch gives (JAX promotes by other rules)."""
    if meta is None or result is None:
        return result
    array = jnp.asarray(result)
    dtype = jax_dtype(meta.dtype)
    if array.dtype != dtype:
        array = array.astype(dtype)
    return array if array.shape == meta.shape else array.reshape(meta.shape)
