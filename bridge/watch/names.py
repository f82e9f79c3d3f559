"""The names that code looks up: those in its bytecode, and those that it was seen to put together when it ran."""

from __future__ import annotations

import dis
import functools
import itertools
import re
import types
import weakref
from collections.abc import Iterable, Iterator

from ..base.user_code import is_users

# Code that mentions one of these may read any attribute of an object, and one of the second kind any method too.
EVERY_FIELD = frozenset({"vars", "__dict__", "dir", "__getstate__", "__reduce__", "__reduce_ex__"})
EVERY_METHOD = frozenset({"attrgetter", "methodcaller", "__getattribute__", "getmembers", "getattr_static"})
UNSEEN = EVERY_FIELD | EVERY_METHOD
MATCH_ARGS = "__match_args__"
# Stands among the names of code that was seen to ask for a tensor's part in autograd (no name has a dot in it).
HISTORY = ".requires_grad"

_IN_BRACES = re.compile(r"\{\w*((?:\.\w+|\[\w+\])+)")
# What code was seen to look up by names that do not stand in it. Code is compared by its content.
_READ: weakref.WeakKeyDictionary[types.CodeType, frozenset[str]] = weakref.WeakKeyDictionary()
_count = 0


@functools.lru_cache(maxsize=4096)
def names_of(code: types.CodeType) -> frozenset[str]:
    """Every name that the code and the functions defined in it look up, as an attribute, a global or a string."""
    inner = (names_of(c) for c in code.co_consts if isinstance(c, types.CodeType))
    matched = {MATCH_ARGS} if any(i.opname == "MATCH_CLASS" for i in dis.get_instructions(code)) else ()
    return frozenset(code.co_names).union(strings_in(code.co_consts), matched, _READ.get(code, ()), *inner)


@functools.lru_cache(maxsize=4096)
def names_read_by(code: types.CodeType) -> frozenset[str]:
    """The names that code reads, without those of the attributes that it only assigns: for constructors."""
    assigned = {i.argval for i in dis.get_instructions(code) if i.opname in ("STORE_ATTR", "DELETE_ATTR")}
    loading = [i for i in dis.get_instructions(code) if i.opname.startswith(("LOAD_", "IMPORT_"))]
    loaded = {i.argval for i in loading if not i.opname.startswith("LOAD_FAST")}  # a parameter is no attribute
    return names_of(code) - {name for name in assigned - loaded if isinstance(name, str)}


@functools.lru_cache(maxsize=4096)
def hands_on(code: types.CodeType, name: str) -> bool:
    """Whether code, or a function defined in it, does more with what has a name than look up attributes of it."""
    steps = [(step.opname, step.argval) for step in dis.get_instructions(code) if step.opname != "CACHE"]
    for (opname, argval), (following, _) in itertools.pairwise(steps):
        is_loaded = argval == name and opname.startswith("LOAD_") and not opname.endswith(("_CONST", "_CLOSURE"))
        if is_loaded and not following.endswith(("_ATTR", "_METHOD")) and following != "COPY":  # as for +=
            return True
    return any(hands_on(c, name) for c in code.co_consts if isinstance(c, types.CodeType))


@functools.lru_cache(maxsize=4096)
def names_of_libraries(cls: type) -> frozenset[str]:
    """What the code looks up that a class of the user's inherits from libraries."""
    bases = (b for b in cls.__mro__ if not is_users(b) and b.__module__ not in ("abc", "enum", "typing"))
    functions = (f for base in bases for f in vars(base).values() if isinstance(f, types.FunctionType))
    return frozenset().union(*(names_of(f.__code__) for f in functions))


@functools.lru_cache(maxsize=4096)
def slots_of(cls: type) -> frozenset[str]:
    """The names of what an object keeps outside of its ``__dict__``."""
    return frozenset(
        k for base in cls.__mro__ for k, v in vars(base).items() if isinstance(v, types.MemberDescriptorType)
    )


def remember_read(code: types.CodeType, names: Iterable[str]) -> None:
    """The code was seen to look these names up: from now on they count as if they stood in it."""
    global _count
    new = frozenset(names) - names_of(code)
    if new:
        _READ[code] = _READ.get(code, frozenset()) | new
        _count += 1
        names_of.cache_clear()
        names_read_by.cache_clear()


def read_count() -> int:
    """Grows whenever a name is remembered: what was found out about a function before may lack something."""
    return _count


def strings_in(constants: Iterable[object]) -> Iterator[str]:
    """Strings that may name attributes: ``"a"``, ``"a.b"`` and ``"{x.a}"``, in tuples of constants too."""
    for constant in constants:
        if isinstance(constant, (tuple, frozenset)):
            yield from strings_in(constant)
        elif isinstance(constant, str):
            parts = constant.split(".")
            if all(map(str.isidentifier, parts)):
                yield constant
                yield from parts
            elif "{" in constant:
                for found in _IN_BRACES.findall(constant):
                    yield from re.findall(r"\w+", found)
