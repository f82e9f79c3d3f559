"""Values that a function binds in a place: each call of its program puts tensors of that call there, as torch would.

A function that is traced knows its own inputs and results by number; the compiled call around it has its own numbers.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import jax
import numpy as np
import torch

from ..base import torch_internals as ti
from ..base.errors import TraceError, user_line
from ..memory.trees import is_leaf, join_level, split_level
from ..record.captured import Captured
from ..watch.places import ABSENT, ORDER, Place, read_entry, write
from .containers import Bound, Moved, Replacing, is_known_by_name, is_object, is_plain
from .sources import Constant, Given, Made, Origin, View, positions

UNKNOWN: object = object()


@dataclasses.dataclass(frozen=True, eq=False)
class Effect:
    """What each call leaves in a place: a plain value, a :class:`Bound` or :class:`Moved` one, or ABSENT."""

    place: int  # which one of the walk
    key: object
    before: object  # UNKNOWN if it was no plain value: caches keep this
    after: object


def assign(tensor: torch.Tensor, value: torch.Tensor, moves: bool) -> None:
    """Give a tensor its new value: in its memory, or, as ``.data`` does, with memory that nothing else shows."""
    with torch.no_grad():
        if moves:
            tensor.data = value.clone()
        else:
            tensor.copy_(value)


Binding = tuple[Place, Any, object]  # a place, the key there, and the value


def leave(
    effects: Sequence[Effect],
    places: Sequence[Place],
    tensor: Callable[[Origin], torch.Tensor],
    argument: Callable[[int], object] | None = None,
) -> list[Binding]:
    """Write what a call leaves behind; what stood in these places before.

    ``argument`` gives the containers among the arguments, where the caller is to find his own.
    """

    def join(bound: Bound, parts: tuple[object, ...]) -> object:
        if argument is None or bound.argument is None:
            return join_level(bound.form, parts)
        return argument(bound.argument)

    value = Replacing(lambda part: part.find(places) if isinstance(part, Moved) else tensor(part), join)
    values = [value(effect.after) for effect in effects]  # all are read before any is written
    before = entries(effects, places)
    for effect, new in zip(effects, values, strict=True):
        write(places[effect.place], effect.key, new)
    return before


def entries(effects: Sequence[Effect], places: Sequence[Place]) -> list[Binding]:
    """What stands where the effects will be."""
    return [(places[e.place], e.key, read_entry(places[e.place], e.key)) for e in effects]


def restore(before: Sequence[Binding]) -> list[Binding]:
    """Write into places what they held; what they hold now, for the way back."""
    first: dict[object, Binding] = {}
    for entry in before:
        first.setdefault((id(entry[0].owner), entry[1]), entry)
    # What is taken out of a list goes last, from its end; then dicts are put in order.
    order = sorted(first.values(), key=lambda e: (e[1] is ORDER, e[2] is ABSENT, -e[1] if e[0].is_sequence else 0))
    now = [(place, key, read_entry(place, key)) for place, key, _ in order]
    for place, key, value in order:
        write(place, key, value)
    return now


@contextlib.contextmanager
def as_before(before: Sequence[Binding]) -> Iterator[None]:
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


_UNFINISHED = Bound(jax.tree.structure(()), ())  # of a container whose content is being bound


class Results:
    """The tensors that a recorded function gives: those that it returns, then those that it leaves behind.

    ``once`` says that the function runs for a whole call. Per example or in slices nothing is left behind but what is
    the same for all of them.
    """

    def __init__(
        self,
        arguments: Sequence[Any],
        returned: Iterable[Any],
        captured: Captured | None,
        once: bool,
        containers: Sequence[object],
    ) -> None:
        self.tensors: list[Any] = list(returned)
        self._arguments, self._captured, self.once = list(arguments), captured, once
        # The containers among the arguments, by their ids. An example has none of the caller's.
        self.given = {id(x): i for i, x in enumerate(containers)} if once else {}
        self.holds_objects = False  # whether an object is kept that no call could make again
        self._kept: list[torch.Tensor] = []
        self._standing: Mapping[int, object] = {}
        self._values: dict[int, tuple[object, Bound | None]] = {}  # the value keeps its id from being given away
        self._sources: dict[int, tuple[torch.Tensor, Origin | None]] = {}

    def bind(self, value: object, name: str) -> Bound | None:
        """A value with tensors in it, as each call has to make it; None if it is different for each example."""
        if id(value) not in self._values:
            self._values[id(value)] = value, _UNFINISHED
            children, form = split_level(value)
            parts = [self._part(child, name) for child in children]
            is_known = not any(part is UNKNOWN for part in parts)
            if id(value) not in self.given:
                self.holds_objects |= any(
                    part is child and is_object(child) for part, child in zip(parts, children, strict=True)
                )
            self._values[id(value)] = value, Bound(form, tuple(parts), self.given.get(id(value))) if is_known else None
        bound = self._values[id(value)][1]
        if bound is _UNFINISHED:
            raise TraceError(
                f"{user_line()}: the traced function assigns to {name} a new container that holds itself, which no "
                "call could make again. Make it before the call, or keep its parts apart."
            )
        return bound

    def _part(self, value: object, name: str) -> object:
        """What a container holds: a source, a value that is bound itself, what stood somewhere, or what stays."""
        if isinstance(value, torch.Tensor):
            with torch._C.DisableTorchFunction():
                if id(value) not in self._sources:
                    self._sources[id(value)] = value, self._source(value, name)
                source = self._sources[id(value)][1]
            return UNKNOWN if source is None else source
        if is_plain(value) or is_known_by_name(value):
            return value
        if id(value) in self._standing:
            return self._standing[id(value)]
        if is_leaf(value):
            return value
        bound = self.bind(value, name)
        return UNKNOWN if bound is None else bound

    def depend_on(self, sources: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> bool:
        """Whether what the function returns, or one of the tensors, depends on one of the sources."""
        if self._captured is None:
            return bool(sources)
        with torch._C.DisableTorchFunction():
            return self._captured.depend_on(sources, [unwrapped(t) for t in (*self.tensors, *tensors)])

    def _source(self, tensor: torch.Tensor, name: str) -> Origin | None:
        if self._captured is None:  # torch2jax runs the function at each call
            return Constant(tensor)
        if ti.is_functorch_wrapped_tensor(tensor):
            if self.once and is_row(tensor):
                raise TraceError(
                    f"{user_line()}: the traced function assigns a row of torch.func.vmap to {name}, which has no "
                    "meaning after it. Return it from the function that is mapped, and assign what vmap returns."
                )
            tensor = unwrapped(tensor)
        argument = next((i for i, t in enumerate(self._arguments) if t is tensor), None)
        if argument is not None:
            return Given(argument) if self.once else None
        captured = self._captured.position(tensor)
        if captured is not None:
            return Given(len(self._arguments) + captured)
        if not self.once:
            constant = self._captured.constant(tensor)
            return None if constant is None else Constant(constant)
        return self._made(tensor, name)

    def expect(self, values: Iterable[torch.Tensor], standing: Mapping[int, object]) -> None:
        """Take note of all tensors that are about to be bound: some may be views of others, or of one that is not.

        And of what stood somewhere before, by its id: where it is put into a container, it stays the same one.
        """
        self._standing = standing
        self._kept = list({id(t): t for t in map(unwrapped, values)}.values())

    def _made(self, tensor: torch.Tensor, name: str) -> Origin:
        if tensor.requires_grad and tensor.is_leaf:
            raise TraceError(
                f"{user_line()}: the traced function makes a tensor that requires grad of its own (a Parameter, "
                f"requires_grad_()) and assigns it to {name}. Make it before the call."
            )
        assert self._captured is not None
        inputs = [(t, t) for t in self._arguments]
        inputs += ((self._captured.stand_ins[id(t)], t) for t in self._captured.tensors)
        for i, (other, given) in enumerate(inputs):
            if _is_base(other, tensor):
                view = _view(tensor, other, Given(i))
                if view.is_whole or tuple(given.stride()) == view.base_stride:
                    return view
        # With a history that only one of them has, say, or of memory that is laid out in another way than in the trace.
        if any(_share_memory(other, tensor) and not _is_unknown(other) for other, _ in inputs):
            raise _not_repeated(name, "one from before the call")
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
        for other in (*self.tensors, *self._kept, *map(whole_memory, group)):
            if other is not None and _is_in_order(other) and all(_is_base(other, t) for t in group):
                return other
        raise _not_repeated(name, "another one that it keeps")


def _not_repeated(name: str, other: str) -> TraceError:
    return TraceError(
        f"{user_line()}: the traced function assigns to {name} a tensor that shares its memory with {other}, in a way "
        "that no call could repeat. Keep a copy: .clone()."
    )


def _is_base(other: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether a view of one tensor is the other, with its history in autograd."""
    return _shows(other, tensor) and bool(other.requires_grad or not tensor.requires_grad)


def whole_memory(tensor: torch.Tensor) -> torch.Tensor | None:
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


def check_apart(tensors: Mapping[int, torch.Tensor], written: Set[int], name: Callable[[int], str]) -> None:
    """Refuse a write to a tensor whose memory another one shows too: the program has them as two."""
    with torch._C.DisableTorchFunction():
        spans = {i: (t.untyped_storage().data_ptr(), *_span(t)) for i, t in tensors.items() if t.numel()}
    for i in spans.keys() & written:
        memory, start, end = spans[i]
        for j, (other, first, last) in spans.items():
            if j != i and other == memory and first < end and start < last:
                raise TraceError(
                    f"the function writes in place to {name(i)}, whose memory {name(j)} shows too, and would not see "
                    "there what was written. Make one of the other inside of the function, or write to a copy."
                )


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Where the elements of a tensor begin and end in its memory, in bytes."""
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    start, size = int(tensor.storage_offset()), tensor.element_size()
    return start * size, (start + last + 1) * size


def _overlap(one: torch.Tensor, two: torch.Tensor) -> bool:
    (start, end), (first, last) = _span(one), _span(two)
    return one is two or (_share_memory(one, two) and start < last and first < end)


def _is_unknown(other: torch.Tensor) -> bool:
    """Whether a tensor stands for a result of a function before, of whose memory nothing is known."""
    return not any(other.stride()) and not _in_order(other).is_contiguous()


def _shows(other: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether a tensor of a trace is a part of the memory of another."""
    if not _share_memory(other, tensor) or other.storage_offset():
        return False
    if tensor.dtype != other.dtype and (other.is_conj() or other.is_neg()):
        return False
    if tensor.dtype != other.dtype and tensor.element_size() != other.element_size() and not other.is_contiguous():
        return False
    if _in_order(other).is_contiguous():
        return _span(tensor)[1] <= other.numel() * other.element_size()
    if _is_unknown(other):
        return False
    places = int(tensor.storage_offset()) + _different_positions(tensor)
    return bool(np.isin(places, _different_positions(other)).all())


def _different_positions(tensor: torch.Tensor) -> np.ndarray:
    stride = tuple(tensor.stride())
    return positions([n if step else 1 for n, step in zip(tensor.shape, stride, strict=True)], stride)


def _view(tensor: torch.Tensor, other: torch.Tensor, base: Given | Made) -> View:
    size, stride, offset = tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset())
    is_conj, is_neg = tensor.is_conj() != other.is_conj(), tensor.is_neg() != other.is_neg()
    is_same = (tensor.dtype, size) == (other.dtype, tuple(other.shape)) and not (is_conj or is_neg)
    is_whole = is_same and stride == tuple(other.stride()) and not offset
    own = tuple(other.stride())
    return View(base, own, tensor.dtype, size, stride, offset, is_whole, not tensor.requires_grad, is_conj, is_neg)
