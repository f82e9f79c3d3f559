"""What a function captures: closures, globals, defaults, bound objects, modules.

A walk over a function gives two things. The *key* says whether a trace made earlier is valid for this function: code,
constants, training flags, dtypes and shapes. The *tensors* are read afresh at each call and become inputs of the
compiled program; a function with an equal key captures them in the same order.

Of an object, a class or a Python module of the user's, only attributes are followed whose names occur in code that the
walk reaches, so that a trainer's history or data set is neither read nor watched. Which names those are is known only
at the end of a walk: it starts again when it met new ones, and remembers them for the next time.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import enum
import functools
import inspect
import io
import operator
import os
import random
import sys
import types
import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
import torch

from .errors import TraceError
from .keys import Key, Same, of_bytes, of_elements, of_plain, times_cleared
from .names import EVERY_FIELD, EVERY_METHOD, MATCH_ARGS, names_of, names_read_by
from .user_code import is_users, is_users_file
from .watching import is_clock, may_read_clocks

_PLAIN = (
    *(bool, int, str, bytes, complex, type(None), enum.Enum, range),
    *(torch.dtype, torch.device, torch.Size, jax.tree_util.PyTreeDef),
)
_EXACTLY_PLAIN = frozenset(_PLAIN)
_MODULE_FIELDS = frozenset(torch.nn.Module().__dict__)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_MANY = 256  # fields or entries
_LONG = 10_000  # of a longer list of tensors the function reads some: its trace meets those
_DEPTH = 3  # of libraries' objects in one another
# Libraries whose objects hold nothing that a function computes with, and lead everywhere.
_OPAQUE = frozenset({"logging", "threading", "_thread", "asyncio", "concurrent", "multiprocessing", "socket", "io"})
# What code reads of the process, if it mentions the name.
_SURROUNDINGS: dict[str, Callable[[], Any]] = {
    "environ": os.environ.items,
    "getenv": os.environ.items,
    "initial_seed": torch.initial_seed,
    "get_num_threads": torch.get_num_threads,
    "get_default_device": torch.get_default_device,
    "is_inference_mode_enabled": torch.is_inference_mode_enabled,
    "getcwd": os.getcwd,
}

SOURCE = "__microtome_source__"

_KNOWN_NAMES: dict[Hashable, frozenset[str]] = {}
_MANY_ROOTS = 4096

Path = tuple[Any, str] | None
Slot = tuple[Any, str]  # the code or class that names a container, and the name

# Lists that a traced function was seen to append to, such as a log. They are not part of its key, or each trace would
# invalidate itself.
_WRITTEN: set[Slot] = set()


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


def surroundings() -> Hashable:
    """What torch's own state says about a call: the same function gives other results under autocast."""
    autocast = tuple(
        (device, torch.get_autocast_dtype(device)) for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)
    )
    modes = torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()
    return torch.get_default_dtype(), autocast, modes


def is_traced(fun: Any) -> bool:
    """Whether ``as_jax`` made this very function; ``functools.wraps`` copies its mark onto transforms of it."""
    mark = getattr(fun, "__dict__", {}).get(SOURCE)
    return mark is not None and mark[0] is fun


class Walk:
    """The key and the captured tensors of a callable and of the values that are passed to it besides tensors."""

    def __init__(self, root: object, values: tuple[Any, ...] = ()) -> None:
        identity = _identity(root)
        names = _KNOWN_NAMES.get(identity, frozenset())
        while True:
            self._start(names)
            with torch._C.DisableTorchFunction():  # a recording around takes each tensor that is asked for captured
                self._visit(root, None)
                self._visit(values, None)
            if self._met == names:
                break
            # Remembered names of another function are no use: the key must not depend on what was called before.
            names = names | self._met if self._met >= names else frozenset()
        _KNOWN_NAMES[identity] = names
        if len(_KNOWN_NAMES) > _MANY_ROOTS:
            _KNOWN_NAMES.pop(next(iter(_KNOWN_NAMES)))
        for name in sorted(names & _SURROUNDINGS.keys()):
            found = _SURROUNDINGS[name]()
            self.parts.append((name, tuple(found) if isinstance(found, collections.abc.ItemsView) else found))
        self.may_read_clocks = self._met_clock or may_read_clocks(names)
        self.key = Key.of(self.parts)

    def _start(self, names: frozenset[str]) -> None:
        self.parts: list[Any] = []
        self.tensors: list[torch.Tensor] = []
        self.paths: list[Path] = []
        self.owners: list[torch.nn.Module | None] = []
        self._places: list[Place | torch.nn.Module] = []
        self.containers: list[tuple[Slot, Any]] = []
        self.generators: list[Any] = []  # of Python's and NumPy's random numbers
        self._seen: dict[int, int] = {}
        self._keep: list[object] = []
        self._names = names
        self._met: frozenset[str] = frozenset()
        self._met_clock = False
        self._depth = 0
        self._owner: torch.nn.Module | None = None
        self._slot: Slot = (None, "")

    @property
    def places(self) -> list[Place]:
        """What the function may write to."""
        found: list[Place] = []
        for place in self._places:
            found += _of_module(place) if isinstance(place, torch.nn.Module) else [place]
        return found

    @property
    def modules(self) -> list[torch.nn.Module]:
        """The modules that were met."""
        return [place for place in self._places if isinstance(place, torch.nn.Module)]

    @property
    def user_code(self) -> types.CodeType | None:
        """The code of the first function met that is the user's own."""
        return next((p for p in self.parts if isinstance(p, types.CodeType) and is_users_file(p.co_filename)), None)

    def describe(self, tensor: torch.Tensor) -> tuple[str, torch.nn.Module | None]:
        """Where a captured tensor was found, and the module that owns it."""
        for found, path, owner in zip(self.tensors, self.paths, self.owners, strict=True):
            if found is tensor:
                return path_name(path), owner
        return "a captured tensor", None

    def _visit(self, x: Any, path: Path) -> None:
        add = self.parts.append
        kind = _type(x)
        if kind in _EXACTLY_PLAIN:
            add((kind, x))
        elif kind is torch.nn.Parameter:
            self._tensor(x, path)
        elif isinstance(x, torch.nn.Module) and id(x) not in self._seen:
            self._seen[id(x)] = len(self._seen)
            self._keep.append(x)
            self._module(x, path)
        elif isinstance(x, slice):
            add(slice)
            self._visit((x.start, x.stop, x.step), path)
        elif isinstance(x, _PLAIN) and not is_users(kind):
            add((kind, x))
        elif kind is float:
            add(x.hex())
        elif isinstance(x, torch.Tensor):
            self._tensor(x, path)
        elif isinstance(x, (types.BuiltinFunctionType, types.MethodWrapperType)):
            self._builtin(x, path)
        elif isinstance(x, (types.ModuleType, type)) and not is_users(x):
            self._met_clock = self._met_clock or is_clock(x)
            add(Same(x))
        elif isinstance(x, type):
            self._base(x, path)
            self._constructors(x, path)
        elif id(x) in self._seen:
            add(("seen", self._seen[id(x)]))
        else:
            self._seen[id(x)] = len(self._seen)
            self._keep.append(x)
            self._object(x, path)

    def _tensor(self, x: torch.Tensor, path: Path) -> None:
        position = self._seen.get(id(x))
        if position is not None:
            self.parts.append(("tensor", position))
            return
        self._seen[id(x)] = len(self._seen)
        self.tensors.append(x)
        self.paths.append(path)
        self.owners.append(self._owner)
        self.parts.append((type(x), x.dtype, x.shape, x.requires_grad, x.device, x.layout))

    def _builtin(self, x: Any, path: Path) -> None:
        """A function or a bound method written in C: ``table.get`` holds its table."""
        owner = getattr(x, "__self__", None)
        self._met_clock = self._met_clock or is_clock(x)
        if x is getattr or x is hasattr:
            self._met |= EVERY_METHOD  # called with names that cannot be seen
        if owner is None or isinstance(owner, (types.ModuleType, type)):
            self.parts.append(Same(x))
        else:
            self.parts.append((type(x), x.__name__))
            self._visit(owner, path)

    def _object(self, x: Any, path: Path) -> None:
        if isinstance(x, (list, tuple, set, frozenset, dict, collections.deque)):
            self._container(x, path)
        elif isinstance(x, types.FunctionType):
            self._function(x, path)
        elif isinstance(x, functools.partial):
            for part in (x.func, x.args, x.keywords):
                self._visit(part, (path, ""))
        elif isinstance(x, types.MethodType):
            self._visit(x.__func__, path)
            self._visit(x.__self__, (path, "self"))
        elif isinstance(x, (np.ndarray, np.generic)):
            self._array(x, path)
        elif isinstance(x, random.SystemRandom):
            self._met_clock = True
            self.parts.append(Same(x))
        elif isinstance(x, (random.Random, np.random.Generator, np.random.RandomState)):
            self.generators.append(x)
        elif _is_iterator(x):
            if self._depth:  # a library's own
                return
            raise TraceError(
                f"{path_name(path) or 'the function'} is an iterator (a {type(x).__name__}), which gives something "
                "else each time, and a traced function runs once. Pass in what it gives as an argument."
            )
        elif isinstance(x, types.MappingProxyType):
            self.parts.append((type(x), len(x)))
            self._items(x, path)
        elif isinstance(x, jax.Array):
            self.parts.append(Same(x))
        elif isinstance(x, types.ModuleType):
            self._namespace(x, path)
        elif inspect.getattr_static(x, "__wrapped__", None) is not None:
            self.parts.append((type(x), times_cleared(x)))
            self._visit(x.__wrapped__, path)
        elif isinstance(x, contextvars.ContextVar):
            self._visit(x.get(None), path)
        else:
            self._attributes(x, path)

    def _array(self, x: Any, path: Path) -> None:
        self.parts.append((type(x), x.dtype.str, x.shape))
        if x.dtype.hasobject:
            self._visit(x.tolist(), path)
        else:
            self.parts.append(of_bytes(x.tobytes()))
        if type(x) is not np.ndarray and getattr(x, "__dict__", None):  # a mask, or what a class of the user's adds
            self._attributes(x, path)

    def _container(self, x: Any, path: Path) -> None:
        if self._slot in _WRITTEN:
            self.parts.append("written by the function itself")
            return
        self.parts.append((type(x), len(x)))
        self.containers.append((self._slot, x))
        if isinstance(x, (list, dict, collections.deque)):
            self._places.append(Place(x, path_name(path)))
        if len(x) <= _MANY or not self._many(x, path):
            if isinstance(x, dict):
                self._items(x, path)
            else:
                for i, v in enumerate(list(x)):
                    self._visit(v, (path, f"[{i}]"))
        if is_users(_type(x)):
            self._attributes(x, path)
        elif isinstance(x, collections.defaultdict):
            self._visit(x.default_factory, path)

    def _many(self, x: Any, path: Path) -> bool:
        """Whether the key holds a long collection as a whole."""
        values: list[Any] = [*x.keys(), *x.values()] if isinstance(x, dict) else list(x)
        plain = of_plain(values)
        if plain is not None:
            self.parts.append(plain)
        elif len(x) <= _LONG and not self._depth:
            return False
        elif isinstance(x, (list, tuple)) and all(isinstance(v, torch.Tensor) for v in x):
            self.parts.append(of_elements(x))
        elif self._depth:  # a library's: told apart by the objects that it holds
            self.parts += map(Same, values)
        else:
            raise TraceError(
                f"{path_name(path) or 'the function'} holds {len(x)} objects, too many to look at in each call. Keep "
                "numbers in a tensor or an array, or pass what the function reads of it in as an argument."
            )
        return True

    def _items(self, x: Any, path: Path) -> None:
        for k, v in list(x.items()):
            if isinstance(k, torch.Tensor):
                self.parts.append(Same(k))
            else:
                self.parts.append((type(k), k))
                if not isinstance(k, (float, tuple, frozenset, *_PLAIN)):
                    self._visit(k, path)
            self._visit(v, (path, f"[{k!r}]"))

    def _function(self, f: types.FunctionType, path: Path, constructs: bool = False) -> None:
        if is_traced(f):  # what counts is the torch function
            self.parts.append(SOURCE)
            self._visit(f.__dict__[SOURCE][1], None)
            return
        code = f.__code__
        user = is_users_file(code.co_filename)
        if not user and not f.__closure__ and not f.__defaults__ and not f.__kwdefaults__:
            self._met_clock = self._met_clock or is_clock(f)
            self.parts.append(Same(f))
            return
        self.parts += (code, f.__module__, code.co_filename)
        names = names_read_by(code) if constructs else names_of(code)
        self._met |= names
        for defaults in (f.__defaults__, f.__kwdefaults__):
            self._visit(defaults, (path, "defaults"))
        for name, cell in zip(code.co_freevars, f.__closure__ or (), strict=True):
            try:
                content = cell.cell_contents
            except ValueError:  # not yet assigned
                content = None
            self._slot = (code, name)
            self._places.append(Place(cell, name))
            self._visit(content, (path, name))
        if user:
            if f.__dict__:
                self._places.append(Place(f.__dict__, f.__name__, None, True))
                self._fields(f.__dict__, f, path)
            imported = sys.modules.keys() if {"sys", "modules"} <= names else names & sys.modules.keys()
            for name in sorted(imported):  # imported inside
                if is_users(sys.modules[name]):
                    self._visit(sys.modules[name], (path, name))
            self._places.append(Place(f.__globals__, "", names))
            for name in sorted(names & f.__globals__.keys()):
                self.parts.append(name)
                self._slot = (code, name)
                self._visit(f.__globals__[name], (path, name))

    def _module(self, m: torch.nn.Module, path: Path) -> None:
        cls, fields, add = type(m), m.__dict__, self.parts.append
        self.parts += (cls, m.training)
        self._places.append(m)
        outer, self._owner = self._owner, m
        for k, p in fields["_parameters"].items():
            add(k)
            if p is None:
                add(None)
            else:
                self._tensor(p, (path, k))
        for name in ("_buffers", "_modules"):
            for k, v in fields[name].items():
                add(k)
                self._visit(v, (path, k))
        for k, v in fields.items():
            if k not in _MODULE_FIELDS:
                add(k)
                self._slot = (cls, k)
                self._visit(v, (path, k))
        for name in _HOOKS:
            if fields[name]:
                self._visit(list(fields[name].values()), (path, name))
        self._class_part(cls, path)
        self._owner = outer

    def _attributes(self, x: Any, path: Path) -> None:
        cls: Any = type(x)
        self.parts.append(cls)
        if isinstance(x, (float, *_PLAIN)):
            self.parts.append(repr(x))
        if not _is_partly_users(cls) and not isinstance(x, types.SimpleNamespace):
            self._library_object(x, path)
            return
        depth, self._depth = self._depth, 0
        fields = getattr(x, "__dict__", None)
        if isinstance(fields, dict):
            self._places.append(Place(fields, cls.__name__, None, True))
            self._fields(fields, x, path)
        slots = _slots(cls) if self._reads_all() else self._names & _slots(cls)
        if slots:
            self._places.append(Place(x, cls.__name__, slots, True))
        for name in sorted(slots):
            if hasattr(x, name):
                self.parts.append(name)
                self._visit(getattr(x, name), (path, f".{name}"))
        if _has_library_base(cls):  # whose code reads what no code of the user's names
            self._content(x, path)
        self._class_part(cls, path)
        self._depth = depth

    def _library_object(self, x: Any, path: Path) -> None:
        self.parts.append(Same(x))
        if isinstance(x, weakref.ReferenceType):
            self._visit(x(), path)
        elif isinstance(x, weakref.ProxyTypes):
            self._visit(x.__repr__.__self__, path)
        elif isinstance(x, torch.Generator):
            self.parts.append(x.initial_seed())
        elif isinstance(x, (operator.attrgetter, operator.methodcaller)):
            self._met |= set(_strings_in(x.__reduce__()))
        elif isinstance(x, io.IOBase):
            if not self._depth and not x.closed and x.readable() and not x.writable():
                raise TraceError(
                    f"{path_name(path) or 'the function'} is an open file, which gives something else each time, and "
                    "a traced function runs once. Pass in what it holds as an argument."
                )
        else:
            self._content(x, path)

    def _content(self, x: Any, path: Path) -> None:
        """All that an object holds, where the code that reads it is a library's and not looked into."""
        if self._depth >= _DEPTH or type(x).__module__.partition(".")[0] in _OPAQUE:
            return
        self._depth += 1
        fields = getattr(x, "__dict__", None)
        slots = _slots(_type(x))
        if isinstance(fields, dict):
            self._places.append(Place(fields, type(x).__name__, None, True, not _is_partly_users(_type(x))))
        elif not slots:
            with contextlib.suppress(TypeError, BufferError, ValueError, AttributeError):
                self.parts.append(of_bytes(memoryview(x).tobytes()))
        for k, v in [*(fields or {}).items(), *((k, getattr(x, k)) for k in sorted(slots) if hasattr(x, k))]:
            if not isinstance(v, (types.ModuleType, type)):
                self.parts.append(k)
                self._visit(v, (path, f".{k}"))
        self._depth -= 1

    def _class_part(self, cls: Any, path: Path) -> None:
        """What an object gets from the user's own classes: methods, properties, class attributes."""
        for base in cls.__mro__:
            if is_users(base):
                self._base(base, (path, ""))

    def _base(self, cls: Any, path: Path) -> None:
        if id(cls) in self._seen:
            self.parts.append(("seen", self._seen[id(cls)]))
        else:
            self._seen[id(cls)] = len(self._seen)
            self._namespace(cls, path)

    def _namespace(self, x: Any, path: Path) -> None:
        """A class or a Python module of the user's."""
        self.parts.append(Same(x))
        fields = dict(vars(x))
        for name, value in fields.items():  # called without being named
            if isinstance(value, types.FunctionType) and (name == "forward" or _is_special(name)):
                self._visit(value, (path, f".{name}"))
        if MATCH_ARGS in self._names:
            self._met |= set(fields.get(MATCH_ARGS, ()))
        owner = x if isinstance(x, type) else vars(x)
        self._places.append(Place(owner, x.__name__, self._names, True))
        self._fields(fields, x, path)
        if isinstance(x, type):
            self._class_part(type(x), path)

    def _constructors(self, cls: type, path: Path) -> None:
        """What runs when a class is called that the code holds: of an object that exists already, it never runs."""
        for base in cls.__mro__:
            for name in ("__new__", "__init__", "__post_init__") if is_users(base) else ():
                made = vars(base).get(name)
                made = getattr(made, "__func__", made)
                if isinstance(made, types.FunctionType) and id(made) not in self._seen:
                    self._seen[id(made)] = len(self._seen)
                    self._keep.append(made)
                    self._function(made, (path, name), constructs=True)

    def _reads_all(self) -> bool:
        """Whether code that was met may read attributes that it does not name."""
        return not self._names.isdisjoint(EVERY_FIELD | EVERY_METHOD)

    def _fields(self, fields: Any, owner: Any, path: Path) -> None:
        named = fields.keys() & self._names
        if self._reads_all():
            named |= {k for k, v in fields.items() if self._may_be_read(k, v, owner)}
        place = owner if isinstance(owner, (type, types.ModuleType, types.FunctionType)) else type(owner)
        for k in sorted(named, key=str):
            value = fields[k]
            value = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
            value = value.fget if isinstance(value, property) else value
            value = value.func if isinstance(value, functools.cached_property) else value
            self.parts.append(k)
            self._slot = (place, str(k))
            self._visit(value, (path, f".{k}"))

    def _may_be_read(self, name: Any, value: Any, owner: Any) -> bool:
        """Whether ``vars`` and the like may read a field that no code names."""
        if _is_iterator(value) or (isinstance(name, str) and name.startswith("__")):
            return False
        if not isinstance(owner, (type, types.ModuleType)):
            return True
        if isinstance(value, (types.FunctionType, property, staticmethod, classmethod, functools.cached_property)):
            return not self._names.isdisjoint(EVERY_METHOD)
        return not isinstance(value, (types.ModuleType, type))


def _of_module(m: torch.nn.Module) -> list[Place]:
    cls: Any = type(m)
    kept = (m.__dict__, m.__dict__["_parameters"], m.__dict__["_buffers"])
    return [Place(fields, cls.__name__, None, True, not is_users(cls)) for fields in kept]


def _is_special(name: str) -> bool:
    # A constructor names all attributes, also those that nothing reads later.
    return name.startswith("__") and name.endswith("__") and name not in ("__init__", "__new__", "__repr__", "__del__")


def _is_iterator(x: Any) -> bool:
    return isinstance(x, collections.abc.Iterator) and type(x).__module__ in ("builtins", "itertools")


def _strings_in(x: Any) -> Iterator[str]:
    if isinstance(x, (tuple, dict)):
        for part in x:
            yield from _strings_in(part)
    elif isinstance(x, str):
        yield from (x, *x.split("."))


def path_name(path: Path) -> str:
    """``model.1.running_mean``."""
    parts: list[str] = []
    while path is not None:
        path, part = path
        parts.append(part)
    return "".join(p if p.startswith((".", "[")) else f".{p}" for p in reversed(parts) if p).lstrip(".")


def _type(x: Any) -> Any:
    return type(x)


@functools.lru_cache(maxsize=4096)
def _is_partly_users(cls: Any) -> bool:
    return any(is_users(base) for base in cls.__mro__)


@functools.lru_cache(maxsize=4096)
def _has_library_base(cls: Any) -> bool:
    """Whether a class of the user's inherits Python code of a library, which reads attributes of its objects."""
    return any(not is_users(base) and _has_code(base) for base in cls.__mro__)


def _has_code(cls: type) -> bool:
    if cls.__module__ in ("abc", "typing", "builtins", "enum") or issubclass(cls, torch.nn.Module):
        return False
    return any(isinstance(value, types.FunctionType) for value in vars(cls).values())


@functools.lru_cache(maxsize=4096)
def _slots(cls: Any) -> frozenset[str]:
    return frozenset(
        k for base in cls.__mro__ for k, v in vars(base).items() if isinstance(v, types.MemberDescriptorType)
    )


def _identity(root: Any) -> Hashable:
    """A name for a root that is the same in each step: its code, and that of the torch functions in its closure."""
    cells = [c.cell_contents for c in getattr(root, "__closure__", None) or () if _is_filled(c)]
    inner = tuple(_code(f.__dict__[SOURCE][1]) for f in (root, *cells) if is_traced(f))
    return _code(root), inner


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _code(fun: Any) -> Hashable:
    fun = getattr(fun, "__func__", fun)
    kind: Any = type(fun)
    return getattr(fun, "__code__", kind)


class WrittenContainers:
    """Notices which of the containers that a function captures it writes to while it is traced."""

    def __init__(self, walk: Walk) -> None:
        self._before = [(slot, container, _content(container)) for slot, container in walk.containers]

    def remember(self) -> None:
        """Leave lists that were appended to out of all further keys; what was changed otherwise is traced again."""
        for slot, container, before in self._before:
            content = _content(container)
            if isinstance(container, list) and len(content) > len(before) and content[: len(before)] == before:
                _WRITTEN.add(slot)


def _content(container: Any) -> list[Any]:
    values = container.values() if isinstance(container, dict) else container
    return [value if isinstance(value, (int, str)) else id(value) for value in values]


def written_count() -> int:
    """Grows whenever a key that was made before may be out of date."""
    return len(_WRITTEN)


def forked_child() -> bool:
    """Whether this process was forked from one in which JAX was loaded."""
    return _forked


_forked = False


def _mark_forked() -> None:
    global _forked
    _forked = "jax" in sys.modules


os.register_at_fork(after_in_child=_mark_forked)
