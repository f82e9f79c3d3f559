"""The nodes of a recorded torch function: ATen ops over numbered values, as data."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
import torch

from ..base import torch_internals as ti
from ..lowerings.signatures import Arguments, Keywords
from ..memory.dtypes import jax_dtype
from ..memory.values import unusual_stride

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
        """Return the meta of an input, with what the function may ask of the layout."""
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


Op = Any  # an overload of an op of torch's, or what has a method ``lower`` of its own


class ArgSpec(Protocol):
    """The arguments of an op, whose leaves stand apart."""

    def unflatten(self, leaves: Sequence[object], /) -> tuple[Arguments, Keywords]: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """One call of an ATen op, or of another compiled function.

    ``leaves`` are its flattened arguments, in which a Ref or a Const stands for a tensor.
    """

    op: Op
    leaves: tuple[Any, ...]
    spec: ArgSpec
    results: tuple[Meta | None, ...]
    single: bool
    draw: int | None
    line: str

    @property
    def name(self) -> str:
        """The op's name, without namespace and overload; empty for what is no op of torch's."""
        return getattr(getattr(self.op, "overloadpacket", None), "__name__", "")

    def operands(self) -> Iterable[Ref]:
        return (leaf for leaf in self.leaves if type(leaf) is Ref)

    def refs(self) -> Iterable[int]:
        return (ref.node for ref in self.operands())


Value = Ref | Const


# Ops that take no more than dtype and shape from a tensor.
OF_FORM = frozenset(
    f"aten.{name}"
    for name in (
        *("zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "randint_like"),
        *("new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided"),
    )
)


def depend(nodes: Sequence[Node | None], values: Iterable[Value], inputs: set[int]) -> bool:
    """Tell whether some of the values are computed from what some of the inputs hold."""
    stack = [value.node for value in values if isinstance(value, Ref)]
    seen: set[int] = set()
    while stack:
        i = stack.pop()
        node = nodes[i]
        if i not in seen and node is not None and ti.op_name(node.op) not in OF_FORM:
            stack += node.refs()
        seen.add(i)
    return not seen.isdisjoint(inputs)
