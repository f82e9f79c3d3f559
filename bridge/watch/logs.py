"""Lists that a traced function was seen to append to, such as a log: keys leave them out.

Otherwise each trace would invalidate itself. A list is left out only where the function was seen to append to it with
the very same key and arguments of the same form: everything else it may read, and other functions of its code too.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import NamedTuple, Protocol

from torch.utils._pytree import tree_leaves

from ..memory.trees import is_tensor
from .places import AccessPath, Place, Site

Logs = frozenset[AccessPath]  # where a walk finds the lists

_MANY = 1024  # keys
_MANY_FUNCTIONS = 4096
_MANY_SETS = 8  # of lists, for one function
_LOCK = threading.Lock()
# By function, which lists traces of it were seen to append to, of late use first.
_SEEN: dict[Hashable, tuple[Logs, ...]] = {}
# The keys, with what they leave out, of traces that append to just that.
_TRACED: collections.OrderedDict[Hashable, None] = collections.OrderedDict()
_count = 0


class Container(NamedTuple):
    """A container that a walk met."""

    slot: Site
    path: AccessPath
    value: Collection[object]


class Found(Protocol):
    """What a walk has found."""

    identity: Hashable
    form: Hashable
    containers: list[Container]
    left_out: set[AccessPath]

    @property
    def key(self) -> Hashable:
        """The key that says whether a trace is valid."""

    @property
    def places(self) -> Sequence[Place]:
        """What the function may write to."""


def logs_of(function: Hashable) -> tuple[Logs, ...]:
    """The lists that a key of the function may leave out."""
    return _SEEN.get(function, ())


def known_logs(function: Hashable) -> Logs:
    """All lists that the function was seen to append to."""
    return frozenset().union(*logs_of(function))


def is_traced_so(walk: Found, logs: Logs) -> bool:
    """Whether a trace with this key appends to just those lists that the key leaves out."""
    entry = walk.identity, walk.form, walk.key
    with _LOCK:
        if entry not in _TRACED:
            return False
        _TRACED.move_to_end(entry)
        _put_first(walk.identity, logs)
    return True


def _put_first(function: Hashable, logs: Logs) -> None:
    sets = _SEEN.get(function, ())
    if not sets or sets[0] != logs:
        _SEEN[function] = (logs, *(other for other in sets if other != logs))[:_MANY_SETS]
        if len(_SEEN) > _MANY_FUNCTIONS:
            _SEEN.pop(next(iter(_SEEN)))


class WrittenContainers:
    """Notices which of the containers that a function captures it writes to while it is traced."""

    def __init__(self, walk: Found) -> None:
        self._walk = walk
        self._before = [(found.slot, found.value, _content(found.value)) for found in walk.containers]

    def appended(self) -> list[tuple[Site, list[object]]]:
        """The lists that were appended to."""
        found = []
        for slot, container, before in self._before:
            content = _content(container)
            if isinstance(container, list) and len(content) > len(before) and content[: len(before)] == before:
                found.append((slot, container))
        return found

    def remember(
        self,
        walk_again: Callable[[Logs], Found],
        written: Iterable[Place],
        logs: Logs = frozenset(),
        filled: Logs = frozenset(),
    ) -> list[object]:
        """Leave lists that were appended to out of keys like this, and give them.

        ``written`` are the places that each call writes to, which a key without the lists must find as well; ``logs``
        are lists that earlier traces of functions inside have grown, and ``filled`` those that no later one would.
        """
        global _count
        appended = [content for _, content in self.appended() if not any(map(is_tensor, tree_leaves(content)))]
        grown = set(map(id, appended)) - {id(c.value) for c in self._walk.containers if c.path in filled}
        grown |= {id(c.value) for c in self._walk.containers if c.path in logs}
        walk, left_out = self._walk, frozenset(self._walk.left_out)
        for _ in range(_MANY_SETS):  # what a list holds is found elsewhere, if at all, without the list
            found = paths_of(walk.containers, grown)
            if found == left_out:
                break
            walk, left_out = walk_again(found), found
        if walk is not self._walk and not {id(p.owner) for p in written} <= {id(p.owner) for p in walk.places}:
            walk, left_out = self._walk, frozenset()
        entry = walk.identity, walk.form, walk.key
        with _LOCK:
            _count += walk is not self._walk
            _TRACED[entry] = None
            if left_out or walk.identity in _SEEN:
                _put_first(walk.identity, left_out)
            if len(_TRACED) > _MANY:
                _TRACED.popitem(last=False)
        return [found.value for found in walk.containers if found.path in left_out]


def paths_of(containers: Iterable[Container], wanted: Collection[int]) -> Logs:
    """Where these lists are found, and nothing else."""
    others = {found.path for found in containers if id(found.value) not in wanted} if wanted else ()
    return frozenset(found.path for found in containers if id(found.value) in wanted).difference(others)


def _content(container: Collection[object]) -> list[object]:
    values = container.values() if isinstance(container, dict) else container
    return [value if issubclass(type(value), (int, str)) else id(value) for value in values]


def written_count() -> int:
    """Grows whenever a key that was made before may be out of date."""
    return _count
