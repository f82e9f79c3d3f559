"""Values that a function binds in a place: each call of its program puts tensors of that call there, as torch would.

A value is kept as its structure, with a source for each tensor in it. A function that is traced knows its own inputs
and results by number; the compiled call around it has numbers of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from . import torch_internals as ti
from .errors import TraceError, user_line
from .interception import Captured
from .places import ABSENT, Place, read_entry, write
from .trees import Structure, to_jax_tree, to_torch_tree


@dataclasses.dataclass(frozen=True)
class Given:
    """An input, an argument or a captured tensor: the very object."""

    index: int


@dataclasses.dataclass(frozen=True)
class Made:
    """A result: a new tensor at each call, the same object in all places and results that show it."""

    index: int


@dataclasses.dataclass(frozen=True)
class View:
    """Another tensor over the memory of an input or a result, such as ``x.detach()`` or ``x[:, -1]``."""

    base: Basic
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    is_whole: bool
    is_detached: bool

    def of(self, base: torch.Tensor) -> torch.Tensor:
        """The view of a tensor."""
        base = base.detach() if self.is_detached else base
        if self.is_whole:
            return base.view_as(base)
        # The trace has every input contiguous; of another layout this is a copy.
        flat = base.reshape(-1)
        return flat.as_strided(self.size, self.stride, flat.storage_offset() + self.offset)

    def of_array(self, base: Any) -> Any:
        """Its values, for an array."""
        base = jax.lax.stop_gradient(base) if self.is_detached else base
        if self.is_whole:
            return base
        steps = (np.arange(n) * step for n, step in zip(self.size, self.stride, strict=True))
        at = sum(np.ix_(*steps)) if self.size else 0
        return jnp.ravel(base)[np.broadcast_to(self.offset + at, self.size)]


@dataclasses.dataclass(frozen=True, eq=False)
class Constant:
    """What depends on no input: a copy at each call."""

    tensor: torch.Tensor


Basic = Given | Made
Source = Basic | View | Constant
UNKNOWN: Any = object()


@dataclasses.dataclass(frozen=True)
class Moved:
    """What stood in a place when the call began: a list, a module, a function that the call puts into another one."""

    place: int
    key: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Bound:
    """A value with tensors in it."""

    structure: Structure
    tensors: tuple[Source, ...]

    def build(self, tensor: Callable[[Source], torch.Tensor]) -> Any:
        """The value of a call, with the tensors that belong to the sources there."""
        return to_torch_tree(self.structure.join(map(tensor, self.tensors)))

    @property
    def bases(self) -> list[Basic]:
        """The inputs and results that the value is made of."""
        bases = (source.base if isinstance(source, View) else source for source in self.tensors)
        return [base for base in bases if not isinstance(base, Constant)]

    def renumbered(self, number: Callable[[Basic], Basic]) -> Bound:
        """The same with the numbers of the call around."""

        def renumber(source: Source) -> Source:
            if isinstance(source, View):
                return dataclasses.replace(source, base=number(source.base))
            return source if isinstance(source, Constant) else number(source)

        return Bound(self.structure, tuple(map(renumber, self.tensors)))


@dataclasses.dataclass(frozen=True, eq=False)
class Effect:
    """What each call leaves in a place: a plain value, a :class:`Bound` or :class:`Moved` one, or ABSENT."""

    place: int  # which one of the walk
    key: Any
    before: Any  # UNKNOWN if it was no plain value: caches keep this
    after: Any


def from_basic(tensor: Callable[[Basic], torch.Tensor]) -> Callable[[Source], torch.Tensor]:
    """The tensors of all sources, for those of the inputs and results."""

    def find(source: Source) -> torch.Tensor:
        if isinstance(source, View):
            return source.of(tensor(source.base))
        return source.tensor.clone() if isinstance(source, Constant) else tensor(source)

    return find


Entry = tuple[Place, Any, Any]  # a place, the key there, and the value


def leave(effects: Sequence[Effect], places: Sequence[Place], tensor: Callable[[Source], torch.Tensor]) -> list[Entry]:
    """Write what a call leaves behind; what stood in these places before."""
    values: dict[int, Any] = {}
    for after in (effect.after for effect in effects):  # all are read before any is written
        if isinstance(after, Bound) and id(after) not in values:  # a container in two places is one
            values[id(after)] = after.build(tensor)
        elif isinstance(after, Moved):
            values[id(after)] = read_entry(places[after.place], after.key)
    before = entries(effects, places)
    for effect in effects:
        write(places[effect.place], effect.key, values.get(id(effect.after), effect.after))
    return before


def entries(effects: Sequence[Effect], places: Sequence[Place]) -> list[Entry]:
    """What stands where the effects will be."""
    return [(places[e.place], e.key, read_entry(places[e.place], e.key)) for e in effects]


def restore(before: Sequence[Entry]) -> list[Entry]:
    """Write into places what they held; what they hold now, for the way back."""
    first: dict[Any, Entry] = {}
    for entry in before:
        first.setdefault((id(entry[0].owner), entry[1]), entry)
    # What is taken out of a list goes last, from its end.
    order = sorted(first.values(), key=lambda e: (e[2] is ABSENT, -e[1] if e[0].is_sequence else 0))
    now = [(place, key, read_entry(place, key)) for place, key, _ in order]
    for place, key, value in order:
        write(place, key, value)
    return now


@contextlib.contextmanager
def as_before(before: Sequence[Entry]) -> Iterator[None]:
    """A scope in which places hold what they held before a call."""
    now = restore(before)
    try:
        yield
    finally:
        restore(now)


class Results:
    """The tensors that a recorded function gives: those that it returns, then those that it leaves behind.

    ``once`` says that the function runs for a whole call. Per example or in slices nothing is left behind but what is
    the same for all of them.
    """

    def __init__(
        self, arguments: Sequence[Any], returned: Iterable[Any], captured: Captured | None, once: bool
    ) -> None:
        self.tensors: list[Any] = list(returned)
        self._arguments, self._captured, self._once = list(arguments), captured, once
        self._values: dict[int, tuple[Any, Bound | None]] = {}  # the value keeps its id from being given away

    def bind(self, value: Any, name: str) -> Bound | None:
        """A value with tensors in it, as each call has to make it; None if it is different for each example."""
        if id(value) not in self._values:
            tensors, structure = Structure.split(to_jax_tree(value), lambda leaf: isinstance(leaf, torch.Tensor))
            with torch._C.DisableTorchFunction():
                sources = [self._source(t, name) for t in tensors]
            present = tuple(s for s in sources if s is not None)
            self._values[id(value)] = value, Bound(structure, present) if len(present) == len(sources) else None
        return self._values[id(value)][1]

    def depend_on(self, sources: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> bool:
        """Whether what the function returns, or one of the tensors, depends on one of the sources."""
        if self._captured is None:
            return bool(sources)
        with torch._C.DisableTorchFunction():
            return self._captured.depend_on(sources, [unwrapped(t) for t in (*self.tensors, *tensors)])

    def _source(self, tensor: Any, name: str) -> Source | None:
        if self._captured is None:  # torch2jax runs the function at each call
            return Constant(tensor)
        if ti.is_functorch_wrapped_tensor(tensor):
            if self._once and is_row(tensor):
                raise TraceError(
                    f"{user_line()}: the traced function assigns a row of torch.func.vmap to {name}, which has no "
                    "meaning after it. Return it from the function that is mapped, and assign what vmap returns."
                )
            tensor = unwrapped(tensor)
        argument = next((i for i, t in enumerate(self._arguments) if t is tensor), None)
        if argument is not None:
            return Given(argument) if self._once else None
        captured = self._captured.position(tensor)
        if captured is not None:
            return Given(len(self._arguments) + captured)
        if not self._once:
            constant = self._captured.constant(tensor)
            return None if constant is None else Constant(constant)
        return self._made(tensor, name)

    def _made(self, tensor: Any, name: str) -> Source:
        known = next((i for i, t in enumerate(self.tensors) if t is tensor), None)
        if known is not None:
            return Made(known)
        if tensor.requires_grad and tensor.is_leaf:
            raise TraceError(
                f"{user_line()}: the traced function makes a tensor that requires grad of its own (a Parameter, "
                f"requires_grad_()) and assigns it to {name}. Make it before the call."
            )
        assert self._captured is not None
        inputs = [*self._arguments, *(self._captured.stand_ins[id(t)] for t in self._captured.tensors)]
        for kind, others in ((Given, inputs), (Made, self.tensors)):
            for i, other in enumerate(others):
                if _shares_memory(tensor, other) and (other.requires_grad or not tensor.requires_grad):
                    return _view(tensor, other, kind(i))
        self.tensors.append(tensor)
        return Made(len(self.tensors) - 1)


def is_row(tensor: Any) -> bool:
    """Whether a tensor stands for the rows of ``torch.func.vmap``."""
    while ti.is_functorch_wrapped_tensor(tensor):
        if ti.is_batched(tensor):
            return True
        tensor = ti.unwrap(tensor)
    return False


def unwrapped(tensor: Any) -> Any:
    """The tensor below what ``torch.func`` wraps around it."""
    while ti.is_functorch_wrapped_tensor(tensor):
        tensor = ti.unwrap(tensor)
    return tensor


def _shares_memory(tensor: Any, other: Any) -> bool:
    """Whether a tensor of a trace is a part of the memory of another, which the other has whole and in order."""
    if not isinstance(other, ti.FunctionalTensor) or not other.is_contiguous() or other.storage_offset():
        return False
    if tensor.dtype != other.dtype or tensor.is_conj() != other.is_conj() or tensor.is_neg() != other.is_neg():
        return False
    if 0 in tensor.shape or ti.storage_key(tensor) != ti.storage_key(other):
        return False
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.storage_offset()) + last < other.numel()


def _view(tensor: Any, other: Any, base: Given | Made) -> View:
    size, stride, offset = tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset())
    is_whole = size == tuple(other.shape) and tensor.is_contiguous() and not offset
    return View(base, size, stride, offset, is_whole, not tensor.requires_grad)
