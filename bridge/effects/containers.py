"""Values with tensors in them as each call makes them anew, where a container in several places is one.

A value is kept as the form of its outermost container, with a source for each tensor in it and a value of the same kind
for each container. What stood somewhere when the call began, and is put into a new container, stays the same object.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import types
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import torch

from ..memory.trees import is_leaf, split_level
from ..watch.places import ABSENT, Place, read_entry
from .sources import Basic, Given, Made, Origin, View

ITSELF: object = object()  # under this key stands what a place belongs to: a list, a dict, an object
_PLAIN = (
    *(bool, int, float, complex, str, bytes, type(None), enum.Enum),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


@dataclasses.dataclass(frozen=True)
class Moved:
    """What stood in a place when the call began: a list, a module, a function that the call puts into another one."""

    place: int
    key: object
    path: tuple[int, ...] = ()  # in tuples that stand there

    def name(self, places: Sequence[Place]) -> str:
        """Where it stood, as the user would write it."""
        place = places[self.place]
        return (place.label if self.key is ITSELF else place.name(self.key)) + "".join(f"[{i}]" for i in self.path)

    def find(self, places: Sequence[Place]) -> Any:
        """What stands there now."""
        place = places[self.place]
        value: Any = whole_of(place) if self.key is ITSELF else read_entry(place, self.key)
        for i in self.path:
            value = value[i]
        return value


@dataclasses.dataclass(frozen=True, eq=False)
class Bound:
    """A value with tensors in it: a tensor, or a container."""

    form: jax.tree_util.PyTreeDef
    parts: tuple[object, ...]  # a source, a Bound or a Moved value; what is none of these stays
    argument: int | None = None  # which container among the arguments it is, if any: the caller's own

    @property
    def bases(self) -> list[Basic]:
        """The inputs and results that the value is made of."""
        bases = (part.base if isinstance(part, View) else part for part in self.leaves())
        return [base for base in bases if isinstance(base, Given | Made)]

    def tensors(self, value: object) -> Iterator[tuple[Origin, torch.Tensor]]:
        """The tensors in a value that a call has left, without those in what it found, each with its source."""
        for part, child in zip(self.parts, split_level(value)[0], strict=True):
            if isinstance(part, Bound):
                yield from part.tensors(child)
            elif isinstance(part, Origin):
                yield part, child

    def leaves(self) -> Iterator[object]:
        """The parts of the value and of the containers in it."""
        for part in self.parts:
            if isinstance(part, Bound):
                yield from part.leaves()
            else:
                yield part


def parts_of(after: object) -> Iterator[object]:
    """Give the parts of what an effect leaves, of the containers in it too; what is no container is its own part."""
    return after.leaves() if isinstance(after, Bound) else iter((after,))


class Replacing:
    """A function of what effects leave: something else for each source and what stood somewhere, put together again.

    A container in several places and containers is put together once.
    """

    def __init__(
        self,
        of: Callable[[Origin | Moved], object],
        join: Callable[[Bound, tuple[object, ...]], object] = lambda bound, parts: dataclasses.replace(
            bound, parts=parts
        ),
    ) -> None:
        self._of, self._join = of, join
        self._made: dict[int, object] = {}

    def __call__(self, after: object) -> object:
        if isinstance(after, Bound):
            if id(after) not in self._made:
                self._made[id(after)] = self._join(after, tuple(map(self, after.parts)))
            return self._made[id(after)]
        return self._of(after) if isinstance(after, (Moved, Origin)) else after


def part_at(after: object, path: Sequence[int]) -> object:
    """What stands in the tuples of what an effect leaves."""
    for step, i in enumerate(path):
        if isinstance(after, Moved):
            return dataclasses.replace(after, path=(*after.path, *path[step:]))
        after = after.parts[i] if isinstance(after, Bound) else after[i]  # type: ignore[index]
    return after


def is_plain(value: object) -> bool:
    """Whether a value is a number, a string or the like, or a tuple of such."""
    if isinstance(value, (tuple, frozenset)):
        return all(map(is_plain, value))
    return isinstance(value, _PLAIN)


def is_known_by_name(value: object) -> bool:
    """Whether a value is the same for all calls with one key: a class, a Python module, a function written in C."""
    return isinstance(value, (type, types.ModuleType, types.BuiltinFunctionType))


def is_object(value: object) -> bool:
    """Whether a value is something that may change, and that no call could make again: a set, an object of a class."""
    fixed = is_plain(value) or is_known_by_name(value) or isinstance(value, (torch.Tensor, types.FunctionType))
    return not fixed and is_leaf(value)


def standing_in(contents: Sequence[Mapping[Any, object]], places: Sequence[Place]) -> dict[int, Moved]:
    """Where containers and objects stand before a call, by their ids: first where, of several places."""
    found: dict[int, Moved] = {}
    for number, content in enumerate(contents):
        for key, value in content.items():
            _add_standing(value, Moved(number, key), found)
    for number, place in enumerate(places):
        whole = whole_of(place)
        if whole is not None:
            found.setdefault(id(whole), Moved(number, ITSELF))
    return found


def _add_standing(value: object, moved: Moved, found: dict[int, Moved]) -> None:
    if not isinstance(value, (torch.Tensor, *_PLAIN)):
        found.setdefault(id(value), moved)
        for i, inner in enumerate(value) if isinstance(value, tuple) else ():
            _add_standing(inner, dataclasses.replace(moved, path=(*moved.path, i)), found)


def whole_of(place: Place) -> object:
    """The list, dict or object that a place belongs to; None for cells, classes and the like, which move nowhere."""
    is_container = isinstance(place.owner, (dict, list, collections.deque)) and not place.is_attributes
    if is_container and place.names is None:
        return place.owner
    return None if place.of is None else place.of()


def held_in(value: object, standing: Container[int] = ()) -> list[object]:
    """A value, and the containers and tensors in it, each once; nothing of what is in those that stood somewhere."""
    found: dict[int, object] = {}
    rest = [value]
    while rest:
        x = rest.pop()
        if is_plain(x) or id(x) in found:
            continue
        if isinstance(x, torch.Tensor):
            found[id(x)] = x
        elif id(x) not in standing and not is_leaf(x):
            found[id(x)] = x
            rest += reversed(split_level(x)[0])
    return list(found.values())


def holds_object(value: object, standing: Container[int]) -> bool:
    """Whether a value is, or a container in it holds, a new object that no call could make again."""
    containers = [x for x in held_in(value, standing) if not isinstance(x, torch.Tensor)]
    parts = [value, *(part for x in containers for part in split_level(x)[0])]
    return any(is_object(part) and id(part) not in standing for part in parts)


def is_put_together(value: object, standing: Container[int]) -> bool:
    """Whether a value is a container of tensors, plain values and what stood somewhere, and of such containers."""
    seen: set[int] = set()
    rest = [] if is_leaf(value) else [value]
    while rest:
        for x in split_level(rest.pop())[0]:
            if isinstance(x, torch.Tensor) or is_plain(x) or is_known_by_name(x) or id(x) in standing or id(x) in seen:
                continue
            if is_leaf(x):
                return False
            seen.add(id(x))
            rest.append(x)
    return not is_leaf(value)


def tensors_in(value: object) -> list[torch.Tensor]:
    """The tensors in a value that is about to be bound."""
    return [x for x in held_in(value) if isinstance(x, torch.Tensor)]


def made_anew(values: Iterable[object], standing: Mapping[int, object]) -> set[int]:
    """The ids of the values that each call makes: those with tensors, and those that share a container with such."""
    values = [value for value in values if value is not ABSENT and not is_plain(value)]
    containers = {id(v): {id(x) for x in held_in(v, standing) if not isinstance(x, torch.Tensor)} for v in values}
    made: set[int] = set()
    more = {id(value) for value in values if tensors_in(value)}
    while more:
        made |= more
        shared = set().union(*(containers[i] for i in made))
        more = {i for i in containers.keys() - made if not shared.isdisjoint(containers[i])}
    return made
