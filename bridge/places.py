"""Places that a traced function may write to, and which of them it was seen to write to."""

from __future__ import annotations

import collections
import types
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .user_code import is_users

if TYPE_CHECKING:
    from .captures import Walk

Path = tuple[Any, str] | None
Slot = tuple[Any, str]  # the code or class that names a container, and the name

# Lists that a traced function was seen to append to, such as a log. They are not part of its key, or each trace would
# invalidate itself.
WRITTEN: set[Slot] = set()


class Place(NamedTuple):
    """Something that the function may write to: an object's attributes, a list, a dict, a cell, a module's globals."""

    owner: Any
    label: str
    names: frozenset[str] | None = None  # only these keys are the function's business
    is_attributes: bool = False
    is_library: bool = False

    @property
    def is_sequence(self) -> bool:
        """Whether keys are positions."""
        return isinstance(self.owner, (list, collections.deque))

    def name(self, key: Any) -> str:
        """The place as the user would write it."""
        if self.is_attributes:
            return f"{self.label}.{key}"
        if self.names is not None or isinstance(self.owner, types.CellType):
            return str(key)
        return f"{self.label}[{key!r}]"


def path_name(path: Path) -> str:
    """``model.1.running_mean``."""
    parts: list[str] = []
    while path is not None:
        path, part = path
        parts.append(part)
    return "".join(p if p.startswith((".", "[")) else f".{p}" for p in reversed(parts) if p).lstrip(".")


def places_of_module(m: torch.nn.Module) -> list[Place]:
    """Where a module keeps its attributes, parameters and buffers."""
    cls: Any = type(m)
    kept = (m.__dict__, m.__dict__["_parameters"], m.__dict__["_buffers"])
    return [Place(fields, cls.__name__, None, True, not is_users(cls)) for fields in kept]


class WrittenContainers:
    """Notices which of the containers that a function captures it writes to while it is traced."""

    def __init__(self, walk: Walk) -> None:
        self._before = [(slot, container, _content(container)) for slot, container in walk.containers]

    def remember(self) -> None:
        """Leave lists that were appended to out of all further keys; what was changed otherwise is traced again."""
        for slot, container, before in self._before:
            content = _content(container)
            if isinstance(container, list) and len(content) > len(before) and content[: len(before)] == before:
                WRITTEN.add(slot)


def _content(container: Any) -> list[Any]:
    values = container.values() if isinstance(container, dict) else container
    return [value if isinstance(value, (int, str)) else id(value) for value in values]


def written_count() -> int:
    """Grows whenever a key that was made before may be out of date."""
    return len(WRITTEN)
