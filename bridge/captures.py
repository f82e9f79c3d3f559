"""What a function captures: closures, globals, defaults, bound objects, modules.

A walk over a function gives two things. The *key* says whether a trace made earlier is valid for this function: code,
constants, training flags, dtypes and shapes. The *tensors* are read afresh at each call and become inputs of the
compiled program; a function with an equal key captures them in the same order.

Of an object that is no module, only attributes are followed whose names occur in the function's code, so that a
trainer's history or data set is neither read nor watched.
"""

from __future__ import annotations

import enum
import functools
import os
import random
import site
import sys
import types
import weakref
from collections.abc import Hashable, Iterator
from typing import Any

import jax
import numpy as np
import torch

_LIBRARIES = tuple(
    os.path.join(path, "")
    for path in {
        *site.getsitepackages(),
        os.path.dirname(os.__file__),
        *(os.path.dirname(m.__file__ or "") for m in (jax, torch)),
    }
)
_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
_OWN = tuple(os.path.join(_PACKAGE + part, "") for part in ("bridge", "jax_impl", "torch_api"))
_PLAIN = (
    *(bool, int, str, bytes, complex, type(None), enum.Enum, range, slice),
    *(torch.dtype, torch.device, torch.Size, jax.tree_util.PyTreeDef),
)
_MODULE_FIELDS = frozenset(torch.nn.Module().__dict__)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_LONG = 10_000  # a longer list is data, not configuration: told apart by identity

SOURCE = "__microtome_source__"

Path = tuple[Any, str] | None
Slot = tuple[Any, str]  # the code or class that names a container, and the name

# Lists, dicts and sets that a traced function was seen to write to: a log, a counter of its own calls. They are not
# part of its key, or each trace would invalidate itself.
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
        self.parts: list[Any] = []
        self.tensors: list[torch.Tensor] = []
        self.paths: list[Path] = []
        self.owners: list[torch.nn.Module | None] = []
        self.holders: list[Any] = []  # objects whose attributes were followed
        self.containers: list[tuple[Slot, Any]] = []
        self.generators: list[Any] = []  # of Python's and NumPy's random numbers
        self._seen: dict[int, int] = {}
        self._keep: list[object] = []
        self._names: frozenset[str] = frozenset()
        self._owner: torch.nn.Module | None = None
        self._slot: Slot = (None, "")
        self._visit(root, None)
        self.key = tuple(self.parts)

    @property
    def user_code(self) -> types.CodeType | None:
        """The code of the first function met that is the user's own."""
        return next((p for p in self.parts if isinstance(p, types.CodeType) and _is_user_code(p)), None)

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
        elif isinstance(x, torch.Tensor):
            self._tensor(x, path)
        elif isinstance(x, (types.ModuleType, type, types.BuiltinFunctionType)):
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
        if isinstance(x, (list, tuple, set, frozenset, dict)):
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
        user = _is_user_code(code)
        if not user and not f.__closure__ and not f.__defaults__ and not f.__kwdefaults__:
            self.parts.append(Same(f))
            return
        self.parts += (code, f.__module__, code.co_filename)
        outer, names = self._names, _names(code)
        self._names = self._names | names
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
        self._names = outer

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
        for f in _user_methods(cls):
            self._visit(f, (path, ""))
        self._owner = outer

    def _attributes(self, x: Any, path: Path) -> None:
        fields = getattr(x, "__dict__", None)
        cls: Any = type(x)
        self.parts.append(cls)
        if not isinstance(fields, dict) or cls.__module__.partition(".")[0] in ("jax", "jaxlib", "torch"):
            self.parts.append(Same(x))
            return
        self.holders.append(x)
        methods = [f for f in _user_methods(cls) if f.__name__ in self._names or f.__name__ == "__call__"]
        outer = self._names
        for f in methods:
            self._names = self._names | _names(f.__code__)
        for k in sorted(fields.keys() & self._names, key=str):
            self.parts.append(k)
            self._slot = (cls, str(k))
            self._visit(fields[k], (path, f".{k}"))
        for f in methods:
            self._visit(f, (path, ""))
        self._names = outer


def _is_user_code(code: types.CodeType) -> bool:
    return not code.co_filename.startswith((*_LIBRARIES, *_OWN))


def path_name(path: Path) -> str:
    """``model.1.running_mean``."""
    parts: list[str] = []
    while path is not None:
        path, part = path
        parts.append(part)
    return "".join(p if p.startswith((".", "[")) else f".{p}" for p in reversed(parts) if p).lstrip(".")


@functools.lru_cache(maxsize=4096)
def _names(code: types.CodeType) -> frozenset[str]:
    """Every name that the code and the functions defined in it look up."""
    inner = (_names(c) for c in code.co_consts if isinstance(c, types.CodeType))
    return frozenset(code.co_names).union(*inner)


@functools.lru_cache(maxsize=4096)
def _user_methods(cls: Any) -> tuple[types.FunctionType, ...]:
    """The methods that a class gets from the user's own code."""
    found = {}
    for base in reversed(cls.__mro__):
        found.update({k: v for k, v in vars(base).items() if isinstance(v, types.FunctionType)})
    return tuple(f for k, f in sorted(found.items()) if k != "__init__" and _is_user_code(f.__code__))


def generator_states(walk: Walk) -> list[Any]:
    """Where the random generators that a function captures stand."""
    return [g.getstate() if isinstance(g, random.Random) else str(g.bit_generator.state) for g in walk.generators]


class WrittenContainers:
    """Notices which of the containers that a function captures it writes to while it is traced."""

    def __init__(self, walk: Walk) -> None:
        self._before = [(slot, container, _content(container)) for slot, container in walk.containers]

    def remember(self) -> None:
        """Leave what was written to out of all further keys."""
        _WRITTEN.update(slot for slot, container, before in self._before if _content(container) != before)


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

    def changes(self) -> Iterator[tuple[Any, str, Any, Any]]:
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
        return iter(changed)


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
