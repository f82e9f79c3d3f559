"""A warning where a function keeps tensors in slices or per example, which are dropped.

What its code reads again, such as the hidden state of a loop, is its own business, and so is what a library's module
keeps. What the user's code only writes, such as activations that a hook collects, is meant for after the call.
"""

from __future__ import annotations

import dis
import functools
import itertools
import types
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from .captures import Walk
from .places import Place
from .running import NO_MEANING, where
from .side_effects import Scratch
from .user_code import is_users_file

_READING_BY_NAME = frozenset({"getattr", "hasattr", "vars", "__dict__"})
_WRITING_BY_CALL = frozenset({"__setitem__", "setdefault", "update"})


def warn_of_dropped(scratch: Sequence[Scratch], walk: Walk) -> None:
    """Name the places that the user's code writes to and does not read."""
    codes = [code for part in walk.parts if isinstance(part, types.CodeType) for code in _within(part)]
    codes = [code for code in codes if is_users_file(code.co_filename)]
    for name in dict.fromkeys(s.place.name(s.key) for s in scratch if _is_for_later(s.place, s.key, codes)):
        warnings.warn(
            f"{where(walk)}the function keeps a tensor in {name}, {NO_MEANING}: it is dropped, and {name} stays as "
            "it was. Return the tensor.",
            stacklevel=2,
        )


def _within(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _within(constant)


def _is_for_later(place: Place, key: Any, codes: Sequence[types.CodeType]) -> bool:
    uses = [use for code in codes for use in (_uses_of_name if _is_named(place) else _uses_of_entry)(code, key)]
    return "reads" not in uses and ("writes" in uses or not _is_named(place))


def _is_named(place: Place) -> bool:
    """Whether the user's code writes the key as a name: of an attribute or a variable, not of an entry."""
    return place.is_attributes or place.names is not None or isinstance(place.owner, types.CellType)


def _uses_of_name(code: types.CodeType, name: str) -> Iterator[str]:
    if name in code.co_consts:
        if not _READING_BY_NAME.isdisjoint(code.co_names):
            yield "reads"
        if "setattr" in code.co_names:
            yield "writes"
    for opname, argval in _steps(code):
        if argval == name and not opname.endswith(("_CONST", "_FAST")):
            yield "writes" if opname.startswith("STORE_") else "reads" if opname.startswith("LOAD_") else ""


def _uses_of_entry(code: types.CodeType, key: Any) -> Iterator[str]:
    writes_by_call = not _WRITING_BY_CALL.isdisjoint(code.co_names)
    for (opname, argval), (following, _) in itertools.pairwise(_steps(code)):
        is_constant = opname in ("LOAD_CONST", "LOAD_SMALL_INT")
        if is_constant and type(argval) is type(key) and argval == key:
            yield "writes" if writes_by_call or following == "STORE_SUBSCR" else "reads"


@functools.lru_cache(maxsize=1024)
def _steps(code: types.CodeType) -> list[tuple[str, Any]]:
    return [(step.opname, step.argval) for step in dis.get_instructions(code) if step.opname != "CACHE"]
