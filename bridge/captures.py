"""What a function captures: closures, globals, defaults, bound objects, modules.

A walk over a function gives two things. The *key* says whether a trace made earlier is valid for this function: code,
constants, training flags, dtypes and shapes. The *tensors* are read afresh at each call and become inputs of the
compiled program; a function with an equal key captures them in the same order.

Of an object, a class or a Python module of the user's, only attributes are followed whose names occur in code that the
walk reaches, so that a trainer's history or data set is neither read nor watched. Which names those are is known only
at the end of a walk: it starts again when it met new ones, and remembers them for the next time.
"""

from __future__ import annotations

import array
import collections
import contextvars
import dis
import enum
import functools
import inspect
import os
import random
import sys
import types
import weakref
from collections.abc import Hashable, Iterable
from typing import Any, ClassVar, NamedTuple

import jax
import numpy as np
import torch

from .errors import TraceError
from .graph import unusual_stride
from .user_code import is_users_file

_PLAIN = (
    *(bool, int, str, bytes, complex, type(None), enum.Enum, range),
    *(torch.dtype, torch.device, torch.Size, jax.tree_util.PyTreeDef),
)
_EXACTLY_PLAIN = frozenset(_PLAIN)
_MODULE_FIELDS = frozenset(torch.nn.Module().__dict__)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_MANY_FIELDS = 256
# Code that mentions one of these may read any attribute of an object.
_BY_NAME = frozenset({"vars", "__dict__", "getattr", "asdict", "astuple", "fields", "attrgetter"})
_ENVIRONMENT = frozenset({"environ", "getenv"})
_LONG = 10_000  # a longer list is data, not configuration: told apart by identity

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


def _nothing() -> None:
    """A reference to nothing."""


class Key:
    """A long tuple for a dictionary's key: equal tuples give the same object, and the hash is computed once."""

    __slots__ = ("__weakref__", "_hash", "_parts")
    _made: ClassVar[weakref.WeakKeyDictionary[Key, weakref.ref[Key]]] = weakref.WeakKeyDictionary()

    def __init__(self, parts: tuple[Any, ...]) -> None:
        self._parts, self._hash = parts, hash(parts)

    @classmethod
    def of(cls, parts: Iterable[Any]) -> Key:
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
        self._weak: Any = None
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
        if not _ENVIRONMENT.isdisjoint(names):
            self.parts += os.environ.items()
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
        elif isinstance(x, _PLAIN) and not _is_users(kind):
            add((kind, x))
        elif kind is float:
            add(x.hex())
        elif isinstance(x, torch.Tensor):
            self._tensor(x, path)
        elif isinstance(x, types.BuiltinFunctionType) or (isinstance(x, (types.ModuleType, type)) and not _is_users(x)):
            add(Same(x))
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
        self.parts.append((type(x), x.dtype, x.shape, x.requires_grad, x.device, x.layout, unusual_stride(x)))

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
        elif isinstance(x, np.ndarray):
            self.parts.append((x.dtype.str, x.shape, x.tobytes()))
        elif isinstance(x, np.generic):
            self.parts.append((x.dtype.str, x.tobytes()))
        elif isinstance(x, (random.Random, np.random.Generator, np.random.RandomState)):
            self.generators.append(x)
        elif isinstance(x, collections.abc.Iterator) and type(x).__module__ in ("builtins", "itertools"):
            raise TraceError(
                f"{path_name(path) or 'the function'} is an iterator (a {type(x).__name__}), which gives something "
                "else each time, and a traced function runs once. Pass in what it gives as an argument."
            )
        elif isinstance(x, types.MappingProxyType):
            self.parts.append((type(x), len(x)))
            for k, v in x.items():
                self.parts.append((type(k), k))
                self._visit(v, (path, f"[{k!r}]"))
        elif isinstance(x, jax.Array):
            self.parts.append(Same(x))
        elif isinstance(x, (types.ModuleType, type)):
            self._namespace(x, path)
        elif inspect.getattr_static(x, "__wrapped__", None) is not None:
            self.parts.append(type(x))
            self._visit(x.__wrapped__, path)
        elif isinstance(x, (bytearray, memoryview, array.array)):
            self.parts.append((type(x), bytes(x)))
        elif isinstance(x, contextvars.ContextVar):
            self._visit(x.get(None), path)
        else:
            self._attributes(x, path)

    def _container(self, x: Any, path: Path) -> None:
        if self._slot in _WRITTEN:
            self.parts.append("written by the function itself")
            return
        self.parts.append((type(x), len(x)))
        if len(x) > _LONG:
            self.parts.append(Same(x))
            return
        self.containers.append((self._slot, x))
        if isinstance(x, (list, dict, collections.deque)):
            self._places.append(Place(x, path_name(path)))
        if isinstance(x, dict):
            for k, v in list(x.items()):
                self.parts.append((type(k), k))
                self._visit(v, (path, f"[{k!r}]"))
        else:
            for i, v in enumerate(list(x)):
                self._visit(v, (path, f"[{i}]"))

    def _function(self, f: types.FunctionType, path: Path) -> None:
        if is_traced(f):  # what counts is the torch function
            self.parts.append(SOURCE)
            self._visit(f.__dict__[SOURCE][1], None)
            return
        code = f.__code__
        user = is_users_file(code.co_filename)
        if not user and not f.__closure__ and not f.__defaults__ and not f.__kwdefaults__:
            self.parts.append(Same(f))
            return
        self.parts += (code, f.__module__, code.co_filename)
        names = _names(code)
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
            for name in sorted(names & sys.modules.keys()):  # imported inside
                if _is_users(sys.modules[name]):
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
        fields = getattr(x, "__dict__", None)
        if not _is_users(cls) and not isinstance(x, types.SimpleNamespace):
            self._library_object(x, path)
            return
        if isinstance(fields, dict):
            self._places.append(Place(fields, cls.__name__, None, True))
            self._fields(fields, cls, path)
        for name in sorted(self._names & _slots(cls)):
            if hasattr(x, name):
                self.parts.append(name)
                self._visit(getattr(x, name), (path, f".{name}"))
        self._class_part(cls, path)

    def _library_object(self, x: Any, path: Path) -> None:
        """A configuration, a namespace: what its own code reads is unknown, so everything that is plain."""
        self.parts.append(Same(x))
        fields = getattr(x, "__dict__", None)
        if not isinstance(fields, dict) or len(fields) > _MANY_FIELDS:
            return
        self._places.append(Place(fields, type(x).__name__, None, True, True))
        for k, v in list(fields.items()):
            if _is_simple(v, 3):
                self.parts.append(k)
                self._visit(v, (path, f".{k}"))

    def _class_part(self, cls: Any, path: Path) -> None:
        """What an object gets from the user's own classes: methods, properties, class attributes."""
        for base in cls.__mro__:
            if _is_users(base):
                self._visit(base, (path, ""))

    def _namespace(self, x: Any, path: Path) -> None:
        """A class or a Python module of the user's."""
        self.parts.append(Same(x))
        fields = dict(vars(x))
        for name, value in fields.items():  # called without being named
            if isinstance(value, types.FunctionType) and (name == "forward" or _is_special(name)):
                self._visit(value, (path, f".{name}"))
        owner = x if isinstance(x, type) else vars(x)
        self._places.append(Place(owner, x.__name__, self._names, True))
        self._fields(fields, x, path)

    def _fields(self, fields: Any, owner: Any, path: Path) -> None:
        all_of_them = self._names & _BY_NAME and not isinstance(owner, type)
        for k in sorted(fields.keys() if all_of_them else fields.keys() & self._names, key=str):
            value = fields[k]
            value = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
            value = value.fget if isinstance(value, property) else value
            self.parts.append(k)
            self._slot = (owner, str(k))
            self._visit(value, (path, f".{k}"))


def _of_module(m: torch.nn.Module) -> list[Place]:
    cls: Any = type(m)
    kept = (m.__dict__, m.__dict__["_parameters"], m.__dict__["_buffers"])
    return [Place(fields, cls.__name__, None, True, not _is_users(cls)) for fields in kept]


def _is_special(name: str) -> bool:
    # A constructor names all attributes, also those that nothing reads later.
    return name.startswith("__") and name.endswith("__") and name not in ("__init__", "__new__", "__repr__", "__del__")


def _is_simple(value: Any, depth: int) -> bool:
    """Plain values and tensors, and small containers of these."""
    if isinstance(value, (float, torch.Tensor, np.ndarray, *_PLAIN)):
        return True
    if depth == 0 or not isinstance(value, (list, tuple, dict, set, frozenset, collections.deque)) or len(value) > 256:
        return False
    return all(_is_simple(v, depth - 1) for v in (value.values() if isinstance(value, dict) else value))


def path_name(path: Path) -> str:
    """``model.1.running_mean``."""
    parts: list[str] = []
    while path is not None:
        path, part = path
        parts.append(part)
    return "".join(p if p.startswith((".", "[")) else f".{p}" for p in reversed(parts) if p).lstrip(".")


@functools.lru_cache(maxsize=4096)
def _names(code: types.CodeType) -> frozenset[str]:
    """Every name that the code and the functions defined in it look up, ``getattr(x, "name")`` included."""
    inner = (_names(c) for c in code.co_consts if isinstance(c, types.CodeType))
    strings = (c for c in code.co_consts if isinstance(c, str) and c.isidentifier())
    own = set(code.co_names)
    if "getattr" in own and not _makes_names(code):
        own.remove("getattr")
    return frozenset(own).union(strings, *inner)


def _makes_names(code: types.CodeType) -> bool:
    """Whether some ``getattr`` is called with a name that is not written out."""
    pending = written = False
    for instruction in dis.get_instructions(code):
        if instruction.argval == "getattr":
            if pending:
                return True
            pending, written = True, False
        elif not pending:
            continue
        elif instruction.opname == "LOAD_CONST" and isinstance(instruction.argval, str):
            written = instruction.argval.isidentifier()
        elif instruction.opname in ("BUILD_STRING", "FORMAT_VALUE", "FORMAT_SIMPLE", "BINARY_OP"):
            return True
        elif instruction.opname.startswith("CALL"):
            if not written:
                return True
            pending = False
    return pending


def _type(x: Any) -> Any:
    return type(x)


@functools.lru_cache(maxsize=4096)
def _is_users(x: Any) -> bool:
    """Whether a class or a Python module is the user's own."""
    if isinstance(x, type):
        x = sys.modules.get(x.__module__)
    file = getattr(x, "__file__", None)
    if x is None or file is None:  # defined at a prompt, made by hand, or built in
        return x is not None and (x.__name__ == "__main__" or x.__spec__ is None)
    return is_users_file(os.path.abspath(file))


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
