"""What the user's code does with a place, as far as its bytecode tells."""

from __future__ import annotations

import dis
import functools
import itertools
import types
from collections.abc import Iterator
from typing import Any

from ..base.user_code import is_users_file
from .places import Place
from .walk import Walk

_READING_BY_NAME = frozenset({"getattr", "hasattr", "vars", "__dict__"})
_WRITING_BY_CALL = frozenset({"__setitem__", "setdefault", "update"})


def usage(place: Place, key: Any, walk: Walk) -> set[str]:
    """Of "reads" and "writes" what there is, and "" where the name only occurs."""
    codes = (code for part in walk.parts if isinstance(part, types.CodeType) for code in _within(part))
    of = _of_name if is_named(place) else _of_entry
    return {use for code in codes if is_users_file(code.co_filename) for use in of(code, key)}


def is_named(place: Place) -> bool:
    """Whether the user's code writes the key as a name: of an attribute or a variable, not of an entry."""
    return place.is_attributes or place.names is not None or isinstance(place.owner, types.CellType)


def _within(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _within(constant)


def _of_name(code: types.CodeType, name: str) -> Iterator[str]:
    if name in code.co_consts:
        if not _READING_BY_NAME.isdisjoint(code.co_names):
            yield "reads"
        if "setattr" in code.co_names:
            yield "writes"
    for opname, argval in _steps(code):
        if (
            argval == name and not opname.endswith("_CONST") and "_FAST" not in opname
        ):  # also LOAD_FAST_CHECK, ..._BORROW
            yield "writes" if opname.startswith("STORE_") else "reads" if opname.startswith("LOAD_") else ""


def _of_entry(code: types.CodeType, key: object) -> Iterator[str]:
    writes_by_call = not _WRITING_BY_CALL.isdisjoint(code.co_names)
    for (opname, argval), (following, _) in itertools.pairwise(_steps(code)):
        is_constant = opname in ("LOAD_CONST", "LOAD_SMALL_INT")
        if is_constant and type(argval) is type(key) and argval == key:
            yield "writes" if writes_by_call or following == "STORE_SUBSCR" else "reads"


@functools.lru_cache(maxsize=1024)
def _steps(code: types.CodeType) -> list[tuple[str, object]]:
    return [(step.opname, step.argval) for step in dis.get_instructions(code) if step.opname != "CACHE"]
