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

from ..base import torch_internals as ti
from ..base.errors import TraceError, user_line
from ..memory.dtypes import jax_dtype
from ..memory.trees import Structure, to_jax_tree, to_torch_tree
from ..record.captured import Captured
from ..watch.places import ABSENT, ORDER, Place, read_entry, write


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
    base_stride: tuple[int, ...]
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    is_whole: bool
    is_detached: bool
    is_conj: bool
    is_neg: bool
    which: object = dataclasses.field(default_factory=object)  # the tensor: another view of the same form is not it

    def of(self, base: torch.Tensor) -> torch.Tensor:
        """The view of a tensor."""
        base = base.detach() if self.is_detached else base
        if self.is_whole:
            return base.view_as(base)
        if base.dtype != self.dtype and base.element_size() == self.dtype.itemsize:
            base = base.view(self.dtype)
        elif base.dtype != self.dtype:
            flat = base.reshape(-1)
            if flat.is_complex():
                base = torch.view_as_real(flat)
            else:
                base = torch.view_as_complex(flat.view(-1, 2)) if self.dtype.is_complex else flat.view(self.dtype)
        view = base.as_strided(self.size, self.stride, int(base.storage_offset()) + self.offset)
        view = view.conj() if self.is_conj else view
        return torch._neg_view(view) if self.is_neg else view

    def of_array(self, base: jax.Array) -> jax.Array:
        """Its values, for an array."""
        base = jax.lax.stop_gradient(base) if self.is_detached else base
        if self.is_whole:
            return base
        at = self.offset + _positions(self.size, self.stride)
        places = _positions(base.shape, self.base_stride).ravel()
        if not np.array_equal(places, np.arange(places.size)):
            order = np.zeros(places.max() + 1, np.int64)
            order[places] = np.arange(places.size)
            at = order[at]
        flat, dtype = jnp.ravel(base), jax_dtype(self.dtype)
        if flat.dtype != dtype:
            if jnp.iscomplexobj(flat):
                flat = jnp.stack([flat.real, flat.imag], -1).ravel()
            else:
                flat = jax.lax.complex(flat[::2], flat[1::2]) if self.dtype.is_complex else flat.view(dtype)
        view = flat[at]
        view = jnp.conj(view) if self.is_conj else view
        return -view if self.is_neg else view


def _positions(size: Sequence[int], stride: Sequence[int]) -> np.ndarray:
    """Where in memory the elements of a tensor lie."""
    steps = (np.arange(n) * step for n, step in zip(size, stride, strict=True))
    return np.broadcast_to(sum(np.ix_(*steps)) if size else np.zeros((), np.int64), tuple(size))


@dataclasses.dataclass(frozen=True, eq=False)
class Constant:
    """What depends on no input: a copy at each call."""

    tensor: torch.Tensor


Basic = Given | Made
Source = Basic | View | Constant
UNKNOWN: object = object()


@dataclasses.dataclass(frozen=True)
class Moved:
    """What stood in a place when the call began: a list, a module, a function that the call puts into another one."""

    place: int
    key: object


@dataclasses.dataclass(frozen=True, eq=False)
class Bound:
    """A value with tensors in it."""

    structure: Structure
    tensors: tuple[Source, ...]

    def build(self, tensor: Callable[[Source], torch.Tensor]) -> object:
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
    key: object
    before: object  # UNKNOWN if it was no plain value: caches keep this
    after: object


def from_basic(tensor: Callable[[Basic], torch.Tensor]) -> Callable[[Source], torch.Tensor]:
    """The tensors of all sources, for those of the inputs and results."""
    return each_once(lambda view: view.of(tensor(view.base)), lambda constant: constant.tensor.clone(), tensor)


def each_once(
    of_view: Callable[[View], torch.Tensor],
    of_constant: Callable[[Constant], torch.Tensor],
    basic: Callable[[Basic], torch.Tensor],
) -> Callable[[Source], torch.Tensor]:
    """The tensors of all sources: one that a function keeps in several places is one in each call."""
    made: dict[View | Constant, torch.Tensor] = {}

    def find(source: Source) -> torch.Tensor:
        if isinstance(source, Given | Made):
            return basic(source)
        if source not in made:
            made[source] = of_view(source) if isinstance(source, View) else of_constant(source)
        return made[source]

    return find


def put(tensor: torch.Tensor, value: torch.Tensor, moves: bool) -> None:
    """Give a tensor its new value: in its memory, or, as ``.data`` does, with memory that nothing else shows."""
    with torch.no_grad():
        if moves:
            tensor.data = value.clone()
        else:
            tensor.copy_(value)


Entry = tuple[Place, Any, object]  # a place, the key there, and the value


def leave(effects: Sequence[Effect], places: Sequence[Place], tensor: Callable[[Source], torch.Tensor]) -> list[Entry]:
    """Write what a call leaves behind; what stood in these places before."""
    values: dict[int, object] = {}
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
    first: dict[object, Entry] = {}
    for entry in before:
        first.setdefault((id(entry[0].owner), entry[1]), entry)
    # What is taken out of a list goes last, from its end; then dicts are put in order.
    order = sorted(first.values(), key=lambda e: (e[1] is ORDER, e[2] is ABSENT, -e[1] if e[0].is_sequence else 0))
    now = [(place, key, read_entry(place, key)) for place, key, _ in order]
    for place, key, value in order:
        write(place, key, value)
    return now


@contextlib.contextmanager
def as_before(before: Sequence[Entry]) -> Iterator[None]:
    """A scope in which places hold what they held before a call."""
    # Later calls may have added to a list.
    lists = {id(place.owner): (place.owner, list(place.owner)) for place, _, _ in before if place.is_sequence}
    now = restore(before)
    try:
        yield
    finally:
        restore(now)
        for owner, content in lists.values():
            owner.clear()
            owner.extend(content)


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
        self._kept: list[torch.Tensor] = []
        self._values: dict[int, tuple[object, Bound | None]] = {}  # the value keeps its id from being given away
        self._sources: dict[int, tuple[torch.Tensor, Source | None]] = {}

    def bind(self, value: object, name: str) -> Bound | None:
        """A value with tensors in it, as each call has to make it; None if it is different for each example."""
        if id(value) not in self._values:
            tensors, structure = Structure.split(to_jax_tree(value), lambda leaf: isinstance(leaf, torch.Tensor))
            with torch._C.DisableTorchFunction():
                for t in tensors:
                    if id(t) not in self._sources:
                        self._sources[id(t)] = t, self._source(t, name)
                sources = [self._sources[id(t)][1] for t in tensors]
            present = tuple(s for s in sources if s is not None)
            self._values[id(value)] = value, Bound(structure, present) if len(present) == len(sources) else None
        return self._values[id(value)][1]

    def depend_on(self, sources: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> bool:
        """Whether what the function returns, or one of the tensors, depends on one of the sources."""
        if self._captured is None:
            return bool(sources)
        with torch._C.DisableTorchFunction():
            return self._captured.depend_on(sources, [unwrapped(t) for t in (*self.tensors, *tensors)])

    def _source(self, tensor: torch.Tensor, name: str) -> Source | None:
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

    def expect(self, values: Iterable[torch.Tensor]) -> None:
        """Take note of all tensors that are about to be bound: some may be views of others, or of one that is not."""
        self._kept = list({id(t): t for t in map(unwrapped, values)}.values())

    def _made(self, tensor: torch.Tensor, name: str) -> Source:
        if tensor.requires_grad and tensor.is_leaf:
            raise TraceError(
                f"{user_line()}: the traced function makes a tensor that requires grad of its own (a Parameter, "
                f"requires_grad_()) and assigns it to {name}. Make it before the call."
            )
        assert self._captured is not None
        inputs = [*self._arguments, *(self._captured.stand_ins[id(t)] for t in self._captured.tensors)]
        for i, other in enumerate(inputs):
            if _is_base(other, tensor):
                return _view(tensor, other, Given(i))
        group = [t for t in self._kept if _overlap(t, tensor)]
        base = self._base(tensor, group, name) if len(group) > 1 else tensor
        known = next((i for i, t in enumerate(self.tensors) if t is base), None)
        if known is None and base is tensor:
            shown = next((i for i, t in enumerate(self.tensors) if _is_in_order(t) and _is_base(t, tensor)), None)
            if shown is not None:
                return _view(tensor, self.tensors[shown], Made(shown))
        if known is None:
            known = len(self.tensors)
            self.tensors.append(base)
        return Made(known) if base is tensor else _view(tensor, base, Made(known))

    def _base(self, tensor: torch.Tensor, group: Sequence[torch.Tensor], name: str) -> torch.Tensor:
        """A result that shows the memory of all tensors of a group, and has the history of those that have one."""
        for other in (*self.tensors, *self._kept, *map(whole, group)):
            if other is not None and _is_in_order(other) and all(_is_base(other, t) for t in group):
                return other
        raise TraceError(
            f"{user_line()}: the traced function assigns to {name} a tensor that shares its memory with another "
            "one that it keeps, in a way that no call could repeat. Keep a copy: .clone()."
        )


def _is_base(other: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether a view of one tensor is the other, with its history in autograd."""
    return _shows(other, tensor) and bool(other.requires_grad or not tensor.requires_grad)


def whole(tensor: torch.Tensor) -> torch.Tensor | None:
    """All of the memory of which a tensor of a trace shows a part, in order; None if autograd does not know it."""
    base = tensor if tensor._base is None else tensor._base
    if not base.is_contiguous() and _in_order(base).is_contiguous():
        base = _in_order(base).view(-1)
    return base if _is_in_order(base) else None


def is_row(tensor: torch.Tensor) -> bool:
    """Whether a tensor stands for the rows of ``torch.func.vmap``."""
    while ti.is_functorch_wrapped_tensor(tensor):
        if ti.is_batched(tensor):
            return True
        tensor = ti.unwrap(tensor)
    return False


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor below what ``torch.func`` wraps around it."""
    while ti.is_functorch_wrapped_tensor(tensor):
        tensor = ti.unwrap(tensor)
    return tensor


def _in_order(tensor: Any) -> torch.Tensor:
    """A tensor with its axes in the order of its memory."""
    return tensor.permute(sorted(range(tensor.dim()), key=lambda axis: -tensor.stride(axis)))


def _is_in_order(tensor: torch.Tensor) -> bool:
    """Whether a tensor of a trace has its elements in order from the start of its memory."""
    return isinstance(tensor, ti.FunctionalTensor) and tensor.is_contiguous() and not tensor.storage_offset()


def _share_memory(one: torch.Tensor, two: torch.Tensor) -> bool:
    if not (isinstance(one, ti.FunctionalTensor) and isinstance(two, ti.FunctionalTensor)):
        return False
    return bool(one.numel() and two.numel()) and ti.storage_key(one) == ti.storage_key(two)


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """Where the elements of a tensor begin and end in its memory, in bytes."""
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    start, size = int(tensor.storage_offset()), tensor.element_size()
    return start * size, (start + last + 1) * size


def _overlap(one: torch.Tensor, two: torch.Tensor) -> bool:
    (start, end), (first, last) = span(one), span(two)
    return one is two or (_share_memory(one, two) and start < last and first < end)


def _shows(other: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether a tensor of a trace is a part of the memory of another."""
    if not _share_memory(other, tensor) or other.storage_offset():
        return False
    if tensor.dtype != other.dtype and (other.is_conj() or other.is_neg()):
        return False
    if tensor.dtype != other.dtype and tensor.element_size() != other.element_size() and not other.is_contiguous():
        return False
    if _in_order(other).is_contiguous():
        return span(tensor)[1] <= other.numel() * other.element_size()
    if not any(other.stride()):  # stands for a result of a function before, of which nothing is known
        return False
    places = int(tensor.storage_offset()) + _different_positions(tensor)
    return bool(np.isin(places, _different_positions(other)).all())


def _different_positions(tensor: torch.Tensor) -> np.ndarray:
    stride = tuple(tensor.stride())
    return _positions([n if step else 1 for n, step in zip(tensor.shape, stride, strict=True)], stride)


def _view(tensor: torch.Tensor, other: torch.Tensor, base: Given | Made) -> View:
    size, stride, offset = tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset())
    is_conj, is_neg = tensor.is_conj() != other.is_conj(), tensor.is_neg() != other.is_neg()
    is_same = (tensor.dtype, size) == (other.dtype, tuple(other.shape)) and not (is_conj or is_neg)
    is_whole = is_same and stride == tuple(other.stride()) and not offset
    own = tuple(other.stride())
    return View(base, own, tensor.dtype, size, stride, offset, is_whole, not tensor.requires_grad, is_conj, is_neg)
