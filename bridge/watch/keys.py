"""Keys of what was captured: equal where a trace made earlier is valid."""

from __future__ import annotations

import abc
import collections
import hashlib
import itertools
import marshal
import weakref
from collections.abc import Collection, Hashable, Iterable
from typing import Any, ClassVar

_SHORT = 4096  # bytes that a key holds as they are
_MARSHALLED = 2  # the last version of the format whose bytes do not depend on how often an object is referred to
_NUMBERS = frozenset((bool, int, float, complex, str, bytes, type(None)))


def _nothing() -> None:
    """A reference to nothing."""


class Key:
    """A long tuple for a dictionary's key: equal tuples give the same object, and the hash is computed once."""

    __slots__ = ("__weakref__", "_hash", "_parts")
    _made: ClassVar[weakref.WeakKeyDictionary[Key, weakref.ref[Key]]] = weakref.WeakKeyDictionary()

    def __init__(self, parts: tuple[object, ...]) -> None:
        self._parts, self._hash = parts, hash(parts)

    @classmethod
    def of(cls, parts: Iterable[object]) -> Key:
        """The one key for these parts."""
        key = cls(tuple(parts))
        found = cls._made.get(key, _nothing)()
        if found is None:
            cls._made[key] = weakref.ref(key)
        return key if found is None else found

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Key) and self._hash == other._hash and self._parts == other._parts)


class Same:
    """Equal only to the same object, which it does not keep alive where Python allows that."""

    __slots__ = ("_hash", "_strong", "_weak")

    def __init__(self, value: object) -> None:
        self._hash = id(value)
        self._strong: object = None
        self._weak: weakref.ref[object] | None = None
        try:
            self._weak = weakref.ref(value)
        except TypeError:
            self._strong = value

    def _get(self) -> object:
        return self._strong if self._weak is None else self._weak()

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Same):
            return NotImplemented
        mine = self._get()
        return mine is not None and mine is other._get()


def of_bytes(data: bytes) -> bytes:
    """The bytes, or for long ones their digest, so that keys of large arrays stay small."""
    return data if len(data) <= _SHORT else hashlib.blake2b(data, digest_size=32).digest()


def of_plain(values: Iterable[Any]) -> Hashable:
    """What tells a long collection of numbers and strings, or of tuples of these, from others; None for another."""
    values = list(values)
    kinds = set(map(type, values))
    if kinds and kinds <= {tuple, list}:
        kinds = set(map(type, itertools.chain.from_iterable(values)))
    return of_bytes(marshal.dumps(values, _MARSHALLED)) if kinds <= _NUMBERS else None


_ELEMENTS: collections.OrderedDict[int, tuple[list[weakref.ref[Any]], list[int], object]] = collections.OrderedDict()
_MANY_LISTS = 64


def of_elements(values: Collection[object]) -> Hashable:
    """What tells a collection from one of other elements, without looking into them or keeping them alive."""
    # An object has one weak reference for as long as somebody keeps that: the same references, the same objects.
    references = list(map(weakref.ref, values))
    places = list(map(id, references))
    _, before, token = _ELEMENTS.pop(id(values), (None, None, None))
    if before != places:
        token = object()
    _ELEMENTS[id(values)] = references, places, token
    if len(_ELEMENTS) > _MANY_LISTS:
        _ELEMENTS.popitem(last=False)
    return token


Cached = Any  # a function with a ``functools.cache``
_MISSES: weakref.WeakKeyDictionary[object, tuple[int, int]] = weakref.WeakKeyDictionary()


def times_cleared(fun: object) -> int | None:
    """How often the cache of a ``functools.cache`` was seen to have been emptied; None for another function."""
    info = getattr(fun, "cache_info", None)
    if info is None:
        return None
    misses, times = info().misses, 0
    if fun in _MISSES:
        before, times = _MISSES[fun]
        times += misses < before
    _MISSES[fun] = misses, times
    return times


_FILLED: weakref.WeakSet[object] = weakref.WeakSet()


def has_been_filled(fun: Cached) -> bool:
    """Whether a ``functools.cache`` was seen to hold something, which nobody can look at, from outside of traces."""
    if fun.cache_info().currsize:
        _FILLED.add(fun)
    return fun in _FILLED


def empty_cache(fun: Cached) -> None:
    """Empty the cache of a ``functools.cache`` without counting it as the user's doing."""
    fun.cache_clear()
    _MISSES[fun] = 0, _MISSES.get(fun, (0, 0))[1]


def registered_at(x: object) -> Hashable:
    """The classes that were registered at an abstract one; None for anything else."""
    if not isinstance(x, abc.ABCMeta):
        return None
    registry: set[weakref.ref[type]] = abc._get_dump(x)[0]  # type: ignore[attr-defined]
    return frozenset(registry)


_NO_MEMORY: weakref.WeakSet[type] = weakref.WeakSet()


def memory_of(x: Any) -> bytes | None:
    """The bytes of an object that shares its memory with others, as ``bytearray`` and ``ctypes`` do."""
    kind = type(x)
    if kind in _NO_MEMORY:
        return None
    try:
        return of_bytes(memoryview(x).tobytes())
    except (TypeError, BufferError, ValueError, AttributeError):
        _NO_MEMORY.add(kind)
        return None
