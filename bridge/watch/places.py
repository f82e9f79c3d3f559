"""Places that a traced function may write to."""

from __future__ import annotations

import collections
import contextvars
import types
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch

from ..base.user_code import is_users

AccessPath = tuple["AccessPath", str] | None
Site = tuple[object, str]  # the code or class that names a container, and the name

# How often functions were seen to change what a compiled call cannot change: as a part of their keys, it lets each
# call trace them anew.
_CHANGES: collections.Counter[Hashable] = collections.Counter()


ABSENT: object = object()
ORDER: object = object()  # under this key stands the order of a dict's entries


class Place(NamedTuple):
    """Something that the function may write to: an object's attributes, a list, a dict, a cell, a module's globals."""

    owner: Any
    label: str
    names: frozenset[str] | None = None  # only these keys are the function's business
    is_attributes: bool = False
    is_library: bool = False
    of: Callable[[], Any] | None = None  # gives the object whose attributes these are, while it is there

    @property
    def is_sequence(self) -> bool:
        """Whether keys are positions."""
        return isinstance(self.owner, (list, collections.deque))

    @property
    def has_order(self) -> bool:
        """Whether this is a dict of the user's, who may go through its entries one after another."""
        return isinstance(self.owner, dict) and self.names is None and not (self.is_attributes or self.is_library)

    def name(self, key: object) -> str:
        """The place as the user would write it."""
        if key is ORDER:
            return f"the order of {self.label}"
        if self.is_attributes:
            return f"{self.label}.{key}"
        if self.names is not None or isinstance(self.owner, (types.CellType, contextvars.ContextVar)):
            return str(key)
        return f"{self.label}[{key!r}]"


def weakly(x: object) -> Callable[[], Any]:
    """What gives an object as long as it is there, without keeping it where someone may ask whether it still is."""
    try:
        return weakref.ref(x)
    except TypeError:
        return lambda: x


def path_name(path: AccessPath) -> str:
    """``model.1.running_mean``."""
    parts: list[str] = []
    while path is not None:
        path, part = path
        parts.append(part)
    return "".join(p if p.startswith((".", "[")) else f".{p}" for p in reversed(parts) if p).lstrip(".")


def places_of_module(m: torch.nn.Module) -> list[Place]:
    """Where a module keeps its attributes, parameters and buffers."""
    cls: type = type(m)
    kept = (m.__dict__, *(m.__dict__[name] for name in ("_parameters", "_buffers", "_modules")))
    return [Place(fields, cls.__name__, None, True, not is_users(cls), weakly(m)) for fields in kept]


def read(place: Place) -> dict[Any, object]:
    """What stands in a place."""
    owner = place.owner
    if isinstance(owner, types.CellType):
        try:
            return {place.label: owner.cell_contents}
        except ValueError:  # not yet assigned
            return {}
    if isinstance(owner, contextvars.ContextVar):
        try:
            return {place.label: owner.get()}  # its default, where it was not set
        except LookupError:
            return {}
    if isinstance(owner, type):
        found: dict[Any, object] = dict(vars(owner))
    elif isinstance(owner, dict):
        found = owner if place.names is not None else dict(owner)
    elif isinstance(owner, (list, collections.deque)):
        return dict(enumerate(owner))
    else:  # an object with slots
        return {k: getattr(owner, k) for k in place.names or () if hasattr(owner, k)}
    return found if place.names is None else {k: found[k] for k in place.names if k in found}


def read_entry(place: Place, key: Any) -> Any:
    """What stands in a place under one key, or ABSENT."""
    owner = place.owner
    if key is ORDER:
        return tuple(owner)
    if isinstance(owner, dict):
        return owner.get(key, ABSENT)
    if isinstance(owner, (list, collections.deque)):
        return owner[key] if key < len(owner) else ABSENT
    return read(place).get(key, ABSENT)


def write(place: Place, key: Any, value: Any) -> None:
    """Put a value into a place, or take it out."""
    owner = place.owner
    if key is ORDER:
        put_in_order(owner, value)
    elif isinstance(owner, types.CellType):
        if value is ABSENT:
            del owner.cell_contents
        else:
            owner.cell_contents = value
    elif isinstance(owner, contextvars.ContextVar):
        if value is not ABSENT:
            owner.set(value)
    elif isinstance(owner, (dict, list, collections.deque)):
        _write_item(place, key, value)
    elif value is not ABSENT:
        setattr(owner, key, value)
    elif key in read(place):
        delattr(owner, key)


def put_in_order(owner: dict[object, object], keys: Sequence[object]) -> None:
    """Let the entries of a dict stand in the order of the keys."""
    present = [key for key in keys if key in owner]
    if present != list(owner):
        for key in present:
            owner[key] = owner.pop(key)


def _write_item(place: Place, key: Any, value: object) -> None:
    owner: Any = place.owner
    if value is ABSENT:
        while place.is_sequence and key < len(owner):
            owner.pop()
        if not place.is_sequence:
            owner.pop(key, None)
        return
    if place.is_sequence and key >= len(owner):  # of a list that shrank
        owner.extend([None] * (key + 1 - len(owner)))
    owner[key] = value


def remember_change(function: Hashable) -> None:
    """Trace a function anew in its next call."""
    _CHANGES[function] += 1


def change_count(function: Hashable) -> int:
    """How often the function has changed what a compiled call cannot change."""
    return _CHANGES[function]
