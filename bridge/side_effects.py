"""What a traced function leaves behind besides its results: attributes, globals, cells, entries of lists and dicts.

A traced function runs once, and its program runs at each call. So each place that the function wrote to is put back
after the trace, and what stood there decides:

- a new tensor where one of the same shape and dtype stood is an update of that buffer, and becomes a result;
- a plain value (a number, a string, None) is written again at each call, as eager torch would;
- a tensor that depends on no input, such as a table in a cache, stays;
- any other tensor would be one of the trace, without values: refused.

Lists that a function appends to (a log) grow once per trace. Anything else stays as the function left it.
"""

from __future__ import annotations

import dataclasses
import random
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as torch_pytree

from .captures import Walk
from .errors import TraceError, user_line
from .interception import as_outside, is_update_of
from .places import Place

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
ABSENT: Any = object()


@dataclasses.dataclass(frozen=True)
class Effect:
    """A plain value that each call leaves in a place."""

    place: Place
    key: Any
    before: Any
    after: Any

    def apply(self) -> None:
        write(self.place, self.key, self.after)

    def undo(self) -> None:
        write(self.place, self.key, self.before)


class Watched:
    """The places that a walk found, as they were before the function ran."""

    def __init__(self, walk: Walk) -> None:
        self._before = [(place, read(place)) for place in walk.places]

    def restore(self) -> None:
        """Put everything back."""
        for place, key, old, _ in list(self._changes()):
            write(place, key, old)

    def settle(self, first: bool) -> list[Effect]:
        """Put everything back, update buffers, and return what each call has to write.

        ``first`` is false for further recordings of the same function, of which nothing is kept.
        """
        effects: list[Effect] = []
        updates: list[tuple[torch.Tensor, torch.Tensor]] = []
        refused: list[str] = []
        # Lists first: an attribute that held one may be judged by what stands in it.
        for place, key, old, new in sorted(self._changes(), key=lambda change: not change[0].is_sequence):
            kept = _ends_as(old, new, place)
            if kept is _UPDATE:
                updates.append((old, new))
            elif kept is _EFFECT:
                effects.append(Effect(place, key, old, new))
            elif kept is _REFUSED:
                refused.append(place.name(key))
            elif first and kept is not _BACK:
                if kept is not new:
                    write(place, key, kept)
                continue
            write(place, key, old)
        if refused:
            raise TraceError(
                f"{user_line()}: the traced function assigns a new tensor to {refused[0]}, which would keep a tensor "
                "of the trace, without values, alive. Return it instead, or register a buffer of the same shape and "
                "dtype."
            )
        values = [new.detach().clone() for _, new in updates]  # all are read before any is written: they may be swapped
        for (old, _), value in zip(updates, values, strict=True):
            old.detach().copy_(value)
        return effects

    def _changes(self) -> Iterator[tuple[Place, Any, Any, Any]]:
        for place, before in self._before:
            after = read(place)
            keys = [*before, *(k for k in after if k not in before)]
            # Entries that were appended to a list are taken away from its end.
            for key in reversed(keys) if place.is_sequence else keys:
                old, new = before.get(key, ABSENT), after.get(key, ABSENT)
                if old is not new and not (_is_plain(old) and type(old) is type(new) and old == new):
                    yield place, key, old, new


_UPDATE, _EFFECT, _REFUSED, _BACK = (object() for _ in range(4))


def _ends_as(old: Any, new: Any, place: Place) -> Any:
    """What becomes of a change: one of the four, or the value that stays there."""
    if new is ABSENT:
        return new
    if not _holds_tensors(new):
        if place.is_library and not _is_plain(new):  # what a library keeps for itself is made again
            return _BACK
        appended = place.is_sequence and old is ABSENT
        return _EFFECT if _is_plain(new) and not appended else new
    if isinstance(old, torch.Tensor) and is_update_of(new, old):
        return _BACK
    if isinstance(old, torch.nn.Parameter) and place.is_sequence:  # mirrors parameters, such as an RNN's flat weights
        return _BACK
    if isinstance(old, list) and old and all(isinstance(x, torch.nn.Parameter) for x in old):
        return _BACK
    if place.is_library and not isinstance(new, torch.Tensor):
        return _BACK
    if _is_buffer(old) and isinstance(new, torch.Tensor) and _form(old) == _form(new):
        return _UPDATE
    outside = torch_pytree.tree_map_only(torch.Tensor, as_outside, new)
    return _REFUSED if any(x is None for x in torch_pytree.tree_leaves(outside)) else outside


def _is_buffer(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter)


def _form(tensor: torch.Tensor) -> Any:
    return tensor.shape, tensor.dtype, tensor.device


def _holds_tensors(value: Any) -> bool:
    return any(isinstance(x, torch.Tensor) for x in torch_pytree.tree_leaves(value))


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)


def read(place: Place) -> dict[Any, Any]:
    """What stands in a place."""
    owner = place.owner
    if isinstance(owner, types.CellType):
        try:
            return {place.label: owner.cell_contents}
        except ValueError:  # not yet assigned
            return {}
    if isinstance(owner, type):
        found: dict[Any, Any] = dict(vars(owner))
    elif isinstance(owner, dict):
        found = owner if place.names is not None else dict(owner)
    else:
        return dict(enumerate(owner))
    return found if place.names is None else {k: found[k] for k in place.names if k in found}


def write(place: Place, key: Any, value: Any) -> None:
    """Put a value into a place, or take it out."""
    owner = place.owner
    if isinstance(owner, types.CellType):
        if value is ABSENT:
            del owner.cell_contents
        else:
            owner.cell_contents = value
    elif isinstance(owner, type):
        setattr(owner, key, value) if value is not ABSENT else delattr(owner, key)
    elif value is not ABSENT:
        if place.is_sequence and key >= len(owner):  # of a list that shrank
            owner.extend([None] * (key + 1 - len(owner)))
        owner[key] = value
    elif place.is_sequence or key in owner:
        del owner[key]


class Generators:
    """Where the random generators of Python and NumPy that a function captures stand before it is traced."""

    def __init__(self, walk: Walk) -> None:
        self._before = [(generator, _state(generator)) for generator in walk.generators]

    def put_back(self) -> bool:
        """Put all back where they stood; whether one had moved."""
        moved = False
        for generator, before in self._before:
            if repr(_state(generator)) != repr(before):
                moved = True
                _set_state(generator, before)
        return moved


def _state(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        state = generator.get_state(legacy=False)
        return state | {"state": {k: np.asarray(v).tolist() for k, v in state["state"].items()}}
    return generator.bit_generator.state


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state | {"state": {k: np.asarray(v) for k, v in state["state"].items()}})
    else:
        generator.bit_generator.state = state
