"""Reading and writing the places that a traced function may write to."""

from __future__ import annotations

import collections
import contextvars
import types
from typing import Any

from .captures import Place

ABSENT: Any = object()


def read(place: Place) -> dict[Any, Any]:
    """What stands in a place."""
    owner = place.owner
    if isinstance(owner, types.CellType):
        try:
            return {place.label: owner.cell_contents}
        except ValueError:  # not yet assigned
            return {}
    if isinstance(owner, contextvars.ContextVar):
        value = owner.get(ABSENT)
        return {} if value is ABSENT else {place.label: value}
    if isinstance(owner, type):
        found: dict[Any, Any] = dict(vars(owner))
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
    if isinstance(owner, dict):
        return owner.get(key, ABSENT)
    if isinstance(owner, (list, collections.deque)):
        return owner[key] if key < len(owner) else ABSENT
    return read(place).get(key, ABSENT)


def write(place: Place, key: Any, value: Any) -> None:
    """Put a value into a place, or take it out."""
    owner = place.owner
    if isinstance(owner, types.CellType):
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


def _write_item(place: Place, key: Any, value: Any) -> None:
    owner: Any = place.owner
    if value is ABSENT:
        if key < len(owner) if place.is_sequence else key in owner:
            del owner[key]
        return
    if place.is_sequence and key >= len(owner):  # of a list that shrank
        owner.extend([None] * (key + 1 - len(owner)))
    owner[key] = value
