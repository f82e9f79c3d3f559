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
import enum
import functools
import os
import random
import sys
import types
import weakref
from collections.abc import Hashable
from typing import Any

import jax
import numpy as np
import torch

from .user_code import is_users_file

_PLAIN = (
    *(bool, int, str, bytes, complex, type(None), enum.Enum, range),
    *(torch.dtype, torch.device, torch.Size, jax.tree_util.PyTreeDef),
)
_MODULE_FIELDS = frozenset(torch.nn.Module().__dict__)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_LONG = 10_000  # a longer list is data, not configuration: told apart by identity

SOURCE = "__microtome_source__"

_KNOWN_NAMES: dict[Hashable, frozenset[str]] = {}
_MANY_ROOTS = 4096

Path = tuple[Any, str] | None
Slot = tuple[Any, str]  # the code or class that names a container, and the name

# Lists that a traced function was seen to append to, such as a log. They are not part of its key, or each trace would
# invalidate itself.
_WRITTEN: set[Slot] = set()


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
    return torch.get_default_dtype(), autocast


def hashable(value: Any) -> Hashable:
    """A static argument as part of a signature: 1, 1.0 and True differ, NaN equals itself."""
    try:
        hash(value)
    except TypeError:
        return Same(value)
    return (type(value), value.hex() if isinstance(value, float) else value)


def is_traced(fun: Any) -> bool:
    """Whether ``as_jax`` made this very function; ``functools.wraps`` copies its mark onto transforms of it."""
    mark = getattr(fun, "__dict__", {}).get(SOURCE)
    return mark is not None and mark[0] is fun


class Walk:
    """The key and the captured tensors of a callable (or any other value)."""

    def __init__(self, root: object) -> None:
        identity = _identity(root)
        names = _KNOWN_NAMES.get(identity, frozenset())
        while True:
            self._start(names)
            self._visit(root, None)
            if self._met == names:
                break
            # Remembered names of another function are no use: the key must not depend on what was called before.
            names = names | self._met if self._met >= names else frozenset()
        _KNOWN_NAMES[identity] = names
        if len(_KNOWN_NAMES) > _MANY_ROOTS:
            _KNOWN_NAMES.pop(next(iter(_KNOWN_NAMES)))
        self.key = tuple(self.parts)

    def _start(self, names: frozenset[str]) -> None:
        self.parts: list[Any] = []
        self.tensors: list[torch.Tensor] = []
        self.paths: list[Path] = []
        self.owners: list[torch.nn.Module | None] = []
        self.holders: list[Any] = []  # objects whose attributes were followed
        self.containers: list[tuple[Slot, Any]] = []
        self.generators: list[Any] = []  # of Python's and NumPy's random numbers
        self._seen: dict[int, int] = {}
        self._keep: list[object] = []
        self._names = names
        self._met: frozenset[str] = frozenset()
        self._owner: torch.nn.Module | None = None
        self._slot: Slot = (None, "")

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
        if isinstance(x, _PLAIN):
            add((type(x), x))
        elif isinstance(x, float):
            add((float, x.hex()))
        elif isinstance(x, slice):  # not hashable before Python 3.12
            add(slice)
            for bound in (x.start, x.stop, x.step):
                self._visit(bound, path)
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
        self.parts.append((type(x), x.dtype, x.shape, x.requires_grad, x.device, x.layout))

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
        elif isinstance(x, torch.nn.Module):
            self._module(x, path)
        elif isinstance(x, np.ndarray):
            self.parts.append((x.dtype.str, x.shape, x.tobytes()))
        elif isinstance(x, np.generic):
            self.parts.append((x.dtype.str, x.tobytes()))
        elif isinstance(x, (random.Random, np.random.Generator)):
            self.generators.append(x)
        elif isinstance(x, jax.Array):
            self.parts.append(Same(x))
        elif isinstance(x, (types.ModuleType, type)):
            self._namespace(x, path)
        elif hasattr(x, "__wrapped__"):
            self.parts.append(type(x))
            self._visit(x.__wrapped__, path)
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
        if isinstance(x, dict):
            for k, v in list(x.items()):
                self.parts.append(k if isinstance(k, Hashable) else None)
                self._visit(v, (path, f"[{k!r}]"))
        else:
            for i, v in enumerate(list(x)):
                self._visit(v, (path, f"[{i}]"))

    def _function(self, f: types.FunctionType, path: Path) -> None:
        if is_traced(f):  # what counts is the torch function
            self.parts.append(SOURCE)
            self._visit(f.__dict__[SOURCE][1], path)
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
            self._visit(content, (path, name))
        if user:
            for name in sorted(names & f.__globals__.keys()):
                self.parts.append(name)
                self._slot = (code, name)
                self._visit(f.__globals__[name], (path, name))

    def _module(self, m: torch.nn.Module, path: Path) -> None:
        cls: Any = type(m)
        self.parts += (cls, m.training)
        self.holders.append(m)
        outer, self._owner = self._owner, m
        fields = m.__dict__
        for name in ("_parameters", "_buffers", "_modules"):
            for k, v in fields[name].items():
                self.parts.append(k)
                self._visit(v, (path, f".{k}"))
                self._owner = m
        for k, v in fields.items():
            if k not in _MODULE_FIELDS:
                self.parts.append(k)
                self._slot = (cls, k)
                self._visit(v, (path, f".{k}"))
                self._owner = m
        for name in _HOOKS:
            if fields[name]:
                self._visit(list(fields[name].values()), (path, f".{name}"))
        self._class_part(cls, path)
        self._owner = outer

    def _attributes(self, x: Any, path: Path) -> None:
        cls: Any = type(x)
        self.parts.append(cls)
        fields = getattr(x, "__dict__", None)
        if not _is_users(cls) and not isinstance(x, types.SimpleNamespace):
            self.parts.append(Same(x))
            return
        if isinstance(fields, dict):
            self.holders.append(x)
            self._fields(fields, cls, path)
        for name in sorted(self._names & _slots(cls)):
            if hasattr(x, name):
                self.parts.append(name)
                self._visit(getattr(x, name), (path, f".{name}"))
        self._class_part(cls, path)

    def _class_part(self, cls: Any, path: Path) -> None:
        """What an object gets from the user's own classes: methods, properties, class attributes."""
        for base in cls.__mro__:
            if _is_users(base):
                self._visit(base, (path, ""))

    def _namespace(self, x: Any, path: Path) -> None:
        """A class or a Python module of the user's."""
        self.parts.append(Same(x))
        fields = dict(vars(x))
        for name in ("__call__", "forward"):
            if isinstance(fields.get(name), types.FunctionType):
                self._visit(fields[name], (path, f".{name}"))
        self._fields(fields, x, path)

    def _fields(self, fields: Any, owner: Any, path: Path) -> None:
        for k in sorted(fields.keys() & self._names, key=str):
            value = fields[k]
            value = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
            value = value.fget if isinstance(value, property) else value
            self.parts.append(k)
            self._slot = (owner, str(k))
            self._visit(value, (path, f".{k}"))


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
    return frozenset(code.co_names).union(strings, *inner)


@functools.lru_cache(maxsize=4096)
def _is_users(x: Any) -> bool:
    """Whether a class or a Python module is the user's own."""
    if isinstance(x, type):
        x = sys.modules.get(x.__module__)
    file = getattr(x, "__file__", None)
    if x is None or file is None:  # defined at a prompt, or built in
        return x is not None and x.__name__ == "__main__"
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


def generator_states(walk: Walk) -> list[Any]:
    """Where the random generators that a function captures stand."""
    return [g.getstate() if isinstance(g, random.Random) else str(g.bit_generator.state) for g in walk.generators]


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


class Restored:
    """Puts the attributes of objects back after a trace, and finds what the trace left in them."""

    def __init__(self, holders: list[Any]) -> None:
        self._saved = [(d, dict(d), holder) for holder in holders for d in _dicts(holder)]
        # Lists that mirror parameters, such as an RNN's flat weights.
        self._mirrors = [
            (live, k, v, list(v))
            for live, before, _ in self._saved
            for k, v in before.items()
            if isinstance(v, list) and any(isinstance(x, torch.Tensor) for x in v)
        ]

    def changes(self) -> list[tuple[Any, str, Any, Any]]:
        """(object, attribute, before, after) for every attribute that now holds another tensor; all are put back."""
        changed = []
        for live, k, mirror, elements in self._mirrors:
            mirror[:] = elements
            live[k] = mirror
        for live, before, holder in self._saved:
            for k in [k for k in live if isinstance(live[k], torch.Tensor) and live[k] is not before.get(k)]:
                changed.append((holder, k, before.get(k), live[k]))
                if k in before:
                    live[k] = before[k]
                else:
                    del live[k]
        return changed


def _dicts(holder: Any) -> list[dict[str, Any]]:
    fields = holder.__dict__
    return [fields, fields["_parameters"], fields["_buffers"]] if isinstance(holder, torch.nn.Module) else [fields]


def forked_child() -> bool:
    """Whether this process was forked from one in which JAX was loaded."""
    return _forked


_forked = False


def _mark_forked() -> None:
    global _forked
    _forked = "jax" in sys.modules


os.register_at_fork(after_in_child=_mark_forked)
