"""What values hold that are no code of the user's: tensors, arrays, containers, objects of libraries."""

from __future__ import annotations

import asyncio
import collections
import decimal
import enum
import gc
import inspect
import io
import logging
import operator
import threading
import types
import weakref
from collections.abc import Collection, Hashable, Mapping

import jax
import numpy as np
import torch

from ..base.errors import TraceError
from ..base.user_code import is_partly_users, is_users
from ..memory.values import has_own_data, unusual_stride
from . import locks
from .flags import asked_by_function
from .keys import Cached, Same, of_bytes, of_elements, of_plain
from .logs import Container, Logs
from .names import EVERY_METHOD, HISTORY, slots_of, strings_in
from .places import AccessPath, Place, Site, path_name, weakly
from .watching import is_clock

PLAIN = (
    *(bool, int, str, bytes, complex, type(None), enum.Enum),
    *(torch.dtype, torch.device, torch.Size, jax.tree_util.PyTreeDef),
)
EXACTLY_PLAIN = frozenset(PLAIN) - {complex}
_NAMED = (float, *PLAIN, torch.Tensor, types.ModuleType, type)
_MANY = 256  # fields or entries
_LONG = 10_000  # of a longer list of tensors the function reads some: its trace meets those
_DEPTH = 3  # of libraries' objects in one another
# Libraries whose objects hold nothing that a function computes with, and lead everywhere.
_OPAQUE = frozenset({"logging", "threading", "asyncio", "concurrent", "multiprocessing", "socket", "io"})


class Contents:
    """What a walk has found so far, and how it looks into values that are no code."""

    identity: Hashable  # of the function that the walk is over

    def start(self, names: frozenset[str], logs: Logs) -> None:
        self.parts: list[object] = []
        self.tensors: list[torch.Tensor] = []
        self.arrays: list[tuple[str, np.ndarray]] = []
        self.caches: list[Cached] = []  # functions with a ``functools.cache``
        self.paths: list[AccessPath] = []
        self.owners: list[torch.nn.Module | None] = []
        self.histories: list[tuple[bool, bool | None]] = []  # of the tensors, which a call may change itself
        self.found_places: list[Place | torch.nn.Module] = []
        self.containers: list[Container] = []
        self.logs = logs  # lists that the function appends to
        self.left_out: set[AccessPath] = set()  # those of them that were met
        self.namespaces: list[tuple[object, AccessPath]] = []
        self.classes: set[type] = set()  # the user's own, of objects that are followed by name
        self.locks: list[tuple[str, object]] = []
        self.generators: list[object] = []  # of Python's and NumPy's random numbers
        self.seen: dict[int, int] = {}
        self.keep: list[object] = []
        self.names = names
        self.met: frozenset[str] = frozenset()
        self.met_clock = False
        self.depth = 0  # of objects of libraries in one another
        self.lenient = 0  # in what code may read, but does not name
        self.owner: torch.nn.Module | None = None
        self.slot: Site = (None, "")

    def visit(self, x: object, path: AccessPath) -> None:
        """Look at a value, and at what it holds."""
        raise NotImplementedError

    def visit_fields(self, fields: Mapping[str, object], owner: object, path: AccessPath) -> None:
        """Look at those attributes that code may read."""
        raise NotImplementedError

    def visit_attributes(self, x: object, path: AccessPath) -> None:
        """Look at what an object holds, and at the code of its class."""
        raise NotImplementedError

    def tensor(self, x: torch.Tensor, path: AccessPath) -> None:
        position = self.seen.get(id(x))
        if position is not None:
            self.parts.append(("tensor", position))
            return
        self.seen[id(x)] = len(self.seen)
        if torch.nn.parameter.is_lazy(x):
            raise TraceError(
                f"{path_name(path)} is a parameter of a lazy module, which has no shape before the module has run: "
                "call the module once on an example first, as for its optimizer."
            )
        if not has_own_data(
            x
        ):  # a skeleton's, or one that stands beside what is read: refused where the function reads it
            self.parts.append((type(x), x.dtype, x.layout, x.device))
            return
        self.tensors.append(x)
        self.paths.append(path)
        self.owners.append(self.owner)
        self.parts.append((type(x), x.dtype, x.shape, x.device, x.layout, unusual_stride(x)))
        self.histories.append((x.requires_grad, x.is_leaf if HISTORY in self.names else None))
        if x.__dict__:
            self.visit_fields(x.__dict__, x, path)

    def is_strict(self) -> bool:
        """Whether what cannot be watched is refused: the function reads it, as far as its code tells."""
        return not self.depth and not self.lenient

    def builtin(self, x: types.BuiltinFunctionType | types.MethodWrapperType, path: AccessPath) -> None:
        """A function or a bound method written in C: ``table.get`` holds its table."""
        owner = getattr(x, "__self__", None)
        self.met_clock = self.met_clock or is_clock(x)
        self.met |= asked_by_function(x)
        if x is getattr or x is hasattr:
            self.met |= EVERY_METHOD  # called with names that cannot be seen
        if x is vars or x is dir:
            self.met |= {x.__name__}
        if owner is None or isinstance(owner, (types.ModuleType, type)):
            self.parts.append(Same(x))
        else:
            self.parts.append((type(x), x.__name__))
            self.visit(owner, path)

    def array(self, x: np.ndarray | np.generic, path: AccessPath) -> None:
        if isinstance(x, np.ndarray):
            self.arrays.append((path_name(path), x))
        self.parts.append((type(x), x.dtype.str, x.shape))
        if x.dtype.hasobject:
            self.visit(x.tolist(), path)
        else:
            self.parts.append(of_bytes(x.tobytes()))
        if type(x) is not np.ndarray and getattr(x, "__dict__", None):  # a mask, or what a class of the user's adds
            self.visit_attributes(x, path)

    def container(self, x: Collection[object], path: AccessPath) -> None:
        self.containers.append(Container(self.slot, path, x))
        if self.logs and isinstance(x, list) and path in self.logs:
            self.left_out.add(path)
            self.parts.append("written by the function itself")
            return
        self.parts.append((type(x), len(x), x.maxlen if isinstance(x, collections.deque) else None))
        if isinstance(x, (list, dict, collections.deque)):
            self.found_places.append(Place(x, path_name(path)))
        if len(x) <= _MANY or not self._many(x, path):
            if isinstance(x, dict):
                self._items(x, path)
            else:
                for i, v in enumerate(list(x)):
                    self.visit(v, (path, f"[{i}]"))
        if is_users(kind_of(x)):
            self.visit_attributes(x, path)
        elif isinstance(x, collections.defaultdict):
            self.visit(x.default_factory, path)

    def _many(self, x: Collection[object], path: AccessPath) -> bool:
        """Whether the key holds a long collection as a whole."""
        values: list[object] = [*x.keys(), *x.values()] if isinstance(x, dict) else list(x)
        plain = of_plain(values)
        if plain is not None:
            self.parts.append(plain)
        elif len(x) <= _LONG and self.is_strict():
            return False
        elif isinstance(x, (list, tuple)) and all(isinstance(v, torch.Tensor) for v in x):
            self.parts.append(of_elements(x))
        elif not self.is_strict():  # told apart by the objects that it holds
            self.parts += map(Same, values)
        else:
            raise TraceError(
                f"{path_name(path) or 'the function'} holds {len(x)} objects, too many to look at in each call. Keep "
                "numbers in a tensor or an array, or pass what the function reads of it in as an argument."
            )
        return True

    def _items(self, x: Mapping[object, object], path: AccessPath) -> None:
        for k, v in list(x.items()):
            # In the namespace of an exec; Python's own. (Some keys, such as torch's dispatch keys, cannot be compared.)
            if isinstance(k, str) and k == "__builtins__":
                continue
            if isinstance(k, torch.Tensor):
                self.parts.append(Same(k))
            else:
                self.parts.append((type(k), k))
                if not isinstance(k, (float, tuple, frozenset, *PLAIN)):
                    self.visit(k, path)
            self.visit(v, (path, f"[{k!r}]"))

    def library_object(self, x: object, path: AccessPath) -> None:
        self.parts.append(Same(x))
        if isinstance(x, weakref.ReferenceType):
            self.visit(x(), path)
        elif isinstance(x, torch.Generator):
            self.parts.append(x.initial_seed())
        elif isinstance(x, locks.LOCKS):
            if isinstance(x, (threading.Event, asyncio.Event)):
                self.parts.append(x.is_set())
            elif not locks.MOVES.isdisjoint(self.names):  # with statements put back what they take
                self.locks.append((path_name(path), x))
                self.parts.append(locks.state(x))
        elif isinstance(x, logging.Logger):
            self.parts.append((x.getEffectiveLevel(), x.manager.disable))
            self.plain_fields(x, path)
        elif isinstance(x, decimal.Context):
            self.parts.append(repr(x))
        elif type(x).__module__ == "multiprocessing.sharedctypes" and hasattr(x, "get_obj"):
            self.visit(x.get_obj(), path)
        elif isinstance(x, torch.autocast):  # the rest is what it found when it was entered
            self.parts += (x.device, x.fast_dtype, x._enabled, x._cache_enabled)
        elif isinstance(x, (operator.attrgetter, operator.methodcaller)):
            self.met |= set(strings_in(gc.get_referents(x)))
        elif isinstance(x, (io.BytesIO, io.StringIO)):
            self.parts.append((x.getvalue(), x.tell()))
        elif (type(x).__module__, type(x).__name__) == ("sqlite3", "Connection"):
            if self.is_strict():
                raise TraceError(
                    f"{path_name(path) or 'the function'} is a connection to a database, which may give something else "
                    "each time, and a traced function runs once. Pass in what it gives as an argument."
                )
        elif isinstance(x, io.IOBase):
            if self.is_strict() and not x.closed and x.readable():
                raise TraceError(
                    f"{path_name(path) or 'the function'} is an open file, which gives something else each time, and "
                    "a traced function runs once. Pass in what it holds as an argument."
                )
        else:
            self._content(x, path)

    def plain_fields(self, x: object, path: AccessPath) -> None:
        """Look at what the code names, but functions, of what leads everywhere: a library's module, class or log."""
        is_namespace = isinstance(x, (type, types.ModuleType))
        if is_namespace and id(x) in self.seen:
            return
        self.seen.setdefault(id(x), len(self.seen))
        fields = getattr(x, "__dict__", {})
        names = self.names if is_namespace else self.names | {f"_{name}" for name in self.names}  # behind a property
        found = {k: fields[k] for k in names & fields.keys() if issubclass(kind_of(fields[k]), _NAMED)}
        if found and is_namespace:
            owner = x if isinstance(x, type) else fields
            self.found_places.append(Place(owner, getattr(x, "__name__", type(x).__name__), frozenset(found), True))
        for name in sorted(found):
            self.parts.append(name)
            self.visit(found[name], (path, f".{name}"))

    def _content(self, x: object, path: AccessPath) -> None:
        """All that an object holds, where the code that reads it is a library's and not looked into."""
        if type(x).__module__.partition(".")[0] in _OPAQUE:
            self.plain_fields(x, path)
            return
        if self.depth >= _DEPTH:
            return
        self.depth += 1
        fields = getattr(x, "__dict__", None)
        slots = slots_of(kind_of(x))
        if isinstance(fields, dict):
            is_library = not is_partly_users(kind_of(x))
            self.found_places.append(Place(fields, type(x).__name__, None, True, is_library, weakly(x)))
        elif not isinstance(x, (types.FrameType, types.CodeType, types.TracebackType)):
            slots = frozenset()
            fields = dict(enumerate(gc.get_referents(x)))  # all that Python tells of an object that is written in C
        held = {k: getattr(x, k) for k in sorted(slots) if hasattr(x, k)} | (fields or {})
        for k, v in held.items():
            if not issubclass(kind_of(v), (types.ModuleType, type)):
                self.parts.append(k)
                self.visit(v, (path, f".{k}"))
        self.depth -= 1


def is_iterator(x: object) -> bool:
    """Whether an object written in C, of whose state nobody can tell, gives something else each time it is asked."""
    apart: tuple[type, ...] = io.IOBase, torch.Tensor, *weakref.ProxyTypes
    if not isinstance(x, collections.abc.Iterator) or issubclass(kind_of(x), apart):
        return False
    return not isinstance(inspect.getattr_static(kind_of(x), "__next__"), types.FunctionType)


def kind_of(x: object) -> type:
    """The class of an object, for what takes any."""
    return type(x)
