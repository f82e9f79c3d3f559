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
import decimal
import enum
import functools
import inspect
import os
import random
import sys
import threading
import types
import weakref
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import jax
import numpy as np
import torch
from torch.nn.modules import module as _module

from ..base.errors import TraceError
from ..base.user_code import is_partly_users, is_users, is_users_file
from .contents import EXACTLY_PLAIN, PLAIN, Contents, is_iterator, kind_of
from .flags import FLAGS, asked_by_function
from .keys import Key, Same, has_been_filled, memory_of, registered_at, times_cleared
from .logs import Logs, is_traced_so, logs_of
from .names import (
    EVERY_METHOD,
    HISTORY,
    MATCH_ARGS,
    UNSEEN,
    hands_on,
    names_of,
    names_of_libraries,
    names_read_by,
    slots_of,
)
from .places import AccessPath, Place, change_count, path_name, places_of_module, weakly
from .watching import FROZEN, is_clock, may_read_clocks

_MODULE_FIELDS = frozenset(torch.nn.Module().__dict__)
_CALLED = frozenset({"forward", "backward", "setup_context", "jvp", "vmap"})  # by torch
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_HOOKS_OF_ALL = tuple(f"_global{name}" for name in _HOOKS)
# What code reads of the process, if it mentions the name.
_SURROUNDINGS: dict[str, Callable[[], object]] = {
    "environ": os.environ.items,
    "getenv": os.environ.items,
    "getcwd": os.getcwd,
    "current_thread": lambda: threading.current_thread().name,
    "get_ident": threading.get_ident,
    "default_generator": torch.initial_seed,
    "argv": lambda: tuple(sys.argv),
    "getrecursionlimit": sys.getrecursionlimit,
    "getcontext": lambda: repr(decimal.getcontext()),
}

_TEXTS = frozenset({"__doc__", "__name__", "__qualname__"})  # of a function

SOURCE = "__microtome_source__"

_KNOWN_NAMES: dict[Hashable, frozenset[str]] = {}
_MANY_ROOTS = 4096


def surroundings() -> Hashable:
    """What torch's own state says about a call: the same function gives other results under autocast."""
    # The dtype also where autocast is off: it is what an autocast that the function opens takes by default.
    autocast = tuple((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda"))
    validates = torch.distributions.Distribution._validate_args
    modes = torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision(), validates
    hooks = tuple(Same(hook) for name in _HOOKS_OF_ALL for hook in getattr(_module, name, {}).values())
    return torch.get_default_dtype(), autocast, modes, hooks


def is_traced(fun: object) -> bool:
    """Whether ``as_jax`` made this very function; ``functools.wraps`` copies its mark onto transforms of it."""
    mark = getattr(fun, "__dict__", {}).get(SOURCE)
    return mark is not None and mark[0] is fun


class Walk(Contents):
    """The key and the captured tensors of a callable and of the values that are passed to it besides tensors."""

    def __init__(
        self,
        root: object,
        values: tuple[object, ...] = (),
        form: Hashable = None,
        logs: Logs | None = None,
        names: frozenset[str] | None = None,
    ) -> None:
        """``form`` is that of the other arguments; ``logs`` are the lists that the key leaves out, if they are known.

        ``names`` are those that an earlier walk has followed, to compare with it.
        """
        self.root, self.values, self.form = root, values, form
        self.identity = _identity(root)
        if logs is not None:
            self._look(logs, names)
            return
        for logs in logs_of(self.identity):
            self._look(logs)
            if is_traced_so(self, logs):
                return
        if logs is None or self.left_out:
            self._look(frozenset())

    def _look(self, logs: Logs, names: frozenset[str] | None = None) -> None:
        """Visit all but the lists that are left out."""
        identity = self.identity
        if names is None:
            names = self._follow(logs)
        else:
            self._visit_all(names, logs)
        for name in sorted(names & _SURROUNDINGS.keys()):
            found = _SURROUNDINGS[name]()
            self.parts.append((name, tuple(found) if isinstance(found, collections.abc.ItemsView) else found))
        if count := change_count(identity):
            self.parts.append(count)
        self.flags = {name: FLAGS[name]() for name in sorted(names & FLAGS.keys())}
        self.asks_history = HISTORY in names
        self.may_read_clocks = self.met_clock or may_read_clocks(names)
        self.key = Key.of((*self.parts, *self.histories, *self.flags.items()))
        self.keep.clear()  # what is reached by weak references would outlive them

    def _follow(self, logs: Logs) -> frozenset[str]:
        """Visit all until no more names are met; these names."""
        names = _KNOWN_NAMES.get(self.identity, frozenset())
        while True:
            self._visit_all(names, logs)
            if self.met == names:
                break
            # Remembered names of another function are no use: the key must not depend on what was called before.
            names = names | self.met if self.met >= names else frozenset()
        _KNOWN_NAMES[self.identity] = names
        if len(_KNOWN_NAMES) > _MANY_ROOTS:
            _KNOWN_NAMES.pop(next(iter(_KNOWN_NAMES)))
        return names

    def _visit_all(self, names: frozenset[str], logs: Logs) -> None:
        self.start(names, logs)
        with torch._C.DisableTorchFunction():  # a recording around takes each tensor that is asked for captured
            self.visit(self.root, None)
            self.visit(self.values, None)
            self._namespaces_handed_on()

    def is_up_to_date(self) -> bool:
        """Whether the function would find everything but tensors as it did then."""
        return Walk(self.root, self.values, self.form, frozenset(self.left_out), self.names).parts == self.parts

    @property
    def places(self) -> list[Place]:
        """What the function may write to."""
        found: list[Place] = []
        for place in self.found_places:
            found += places_of_module(place) if isinstance(place, torch.nn.Module) else [place]
        return found

    @property
    def modules(self) -> list[torch.nn.Module]:
        """The modules that were met."""
        return [place for place in self.found_places if isinstance(place, torch.nn.Module)]

    @property
    def user_code(self) -> types.CodeType | None:
        """The code of the first function met that is the user's own."""
        return next((p for p in self.parts if isinstance(p, types.CodeType) and is_users_file(p.co_filename)), None)

    def logs_left_out(self) -> list[object]:
        """The lists that the function appends to, and that the key leaves out."""
        return [found.value for found in self.containers if found.path in self.left_out]

    def describe(self, tensor: torch.Tensor) -> tuple[str, torch.nn.Module | None]:
        """Where a captured tensor was found, and the module that owns it."""
        for found, path, owner in zip(self.tensors, self.paths, self.owners, strict=True):
            if found is tensor:
                return path_name(path), owner
        return "a captured tensor", None

    def visit(self, x: Any, path: AccessPath) -> None:
        add = self.parts.append
        kind = kind_of(x)
        if kind in EXACTLY_PLAIN:
            add((kind, x))
        elif kind is torch.nn.Parameter:
            self.tensor(x, path)
        elif kind in weakref.ProxyTypes:  # whose class is that of what it stands for, while that is there
            add(kind)
            with contextlib.suppress(ReferenceError):
                self.visit(x.__repr__.__self__, path)
        elif isinstance(x, torch.nn.Module) and id(x) not in self.seen:
            self.seen[id(x)] = len(self.seen)
            self.keep.append(x)
            self._module(x, path)
        elif kind is complex:
            add((x.real.hex(), x.imag.hex()))  # which tell 0.0 from -0.0
        elif isinstance(x, (slice, range)):  # ranges of the same numbers are equal
            add(kind)
            self.visit((x.start, x.stop, x.step), path)
        elif isinstance(x, PLAIN) and not is_users(kind):
            add((kind, x if kind.__hash__ is not None else repr(x)))
        elif kind is float:
            add(x.hex())
        elif isinstance(x, torch.Tensor):
            self.tensor(x, path)
        elif isinstance(x, (types.BuiltinFunctionType, types.MethodWrapperType)):
            self.builtin(x, path)
        elif isinstance(x, (types.ModuleType, type)) and not is_users(x):
            self.met_clock = self.met_clock or is_clock(x)
            self.parts += (Same(x), registered_at(x))
            self.plain_fields(x, path)
        elif isinstance(x, type):
            self._class_part(x, path)
            self._constructors(x, path)
            if "__subclasses__" in self.names:
                for below in list[Any](type.__subclasses__(x)):
                    self.visit(below, path)
        elif id(x) in self.seen:
            add(("seen", self.seen[id(x)]))
        else:
            self.seen[id(x)] = len(self.seen)
            self.keep.append(x)
            self._object(x, path)

    def _object(self, x: Any, path: AccessPath) -> None:
        if isinstance(x, (list, tuple, set, frozenset, dict, collections.deque)):
            self.container(x, path)
        elif isinstance(x, types.FunctionType):
            self._function(x, path)
        elif isinstance(x, functools.partial):
            if is_clock(x.func) and self.is_strict():
                raise TraceError(f"{path_name(path) or 'the function'} is a partial of {x.func}: {FROZEN}.")
            for part in (x.func, x.args, x.keywords):
                self.visit(part, (path, ""))
        elif isinstance(x, types.MethodType):
            self.visit(x.__func__, path)
            self.visit(x.__self__, (path, "self"))
        elif isinstance(x, (np.ndarray, np.generic)):
            self.array(x, path)
        elif isinstance(x, random.SystemRandom):
            self.met_clock = True
            self.parts.append(Same(x))
        elif isinstance(x, (random.Random, np.random.Generator, np.random.RandomState)):
            self.generators.append(x)
        elif is_iterator(x):
            if not self.is_strict():
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
            if hasattr(x, "cache_clear"):
                self.caches.append(x)
                if has_been_filled(x):
                    self.parts.append(Same(x))
            self.visit(x.__wrapped__, path)
            if isinstance(x, (jax.custom_vjp, jax.custom_jvp)):  # its rules may run torch functions of their own
                self.visit([getattr(x, rule, None) for rule in ("fwd", "bwd", "jvp")], path)
        elif isinstance(x, contextvars.ContextVar):
            self.found_places.append(Place(x, path_name(path)))
            self.visit(x.get(None), path)
        else:
            self.visit_attributes(x, path)

    def _function(self, f: types.FunctionType, path: AccessPath, constructs: bool = False) -> None:
        if is_traced(f):  # what counts is the torch function
            self.parts.append(SOURCE)
            self.visit(f.__dict__[SOURCE][1], None)
            return
        code = f.__code__
        user = is_users_file(code.co_filename)
        if not user and not f.__closure__ and not f.__defaults__ and not f.__kwdefaults__:
            self.met_clock = self.met_clock or is_clock(f)
            self.met |= asked_by_function(f)
            self.parts.append(Same(f))
            return
        self.parts += (code, f.__module__, code.co_filename)
        self.parts += (repr(getattr(f, name)) for name in sorted(_TEXTS & self.names))
        names = names_read_by(code) if constructs else names_of(code)
        self.met |= names
        for defaults in (f.__defaults__, f.__kwdefaults__):
            self.visit(defaults, (path, "defaults"))
        for name, cell in zip(code.co_freevars, f.__closure__ or (), strict=True):
            try:
                content = cell.cell_contents
            except ValueError:  # not yet assigned
                content = None
            self.slot = (code, name)
            self.found_places.append(Place(cell, name))
            self.visit(content, (path, name))
        if user:
            depth, self.depth = self.depth, 0
            if f.__dict__:
                self.found_places.append(Place(f.__dict__, f.__name__, None, True))
                self.visit_fields(f.__dict__, f, path)
            for name in sorted(names & sys.modules.keys()):  # imported inside
                if is_users(sys.modules[name]):
                    self.visit(sys.modules[name], (path, name))
            if {"sys", "modules"} <= names or "__import__" in names:
                self.unnamed({k: m for k, m in sys.modules.items() if is_users(m)}, path)
            self.found_places.append(Place(f.__globals__, "", names))
            for name in sorted(names & f.__globals__.keys()):
                self.parts.append(name)
                self.slot = (code, name)
                self.visit(f.__globals__[name], (path, name))
            if "__globals__" in names:
                module = sys.modules.get(f.__module__)
                rest = {k: v for k, v in f.__globals__.items() if k not in names and self._may_be_read(k, v, module)}
                self.unnamed(rest, path)
            self.depth = depth

    def _module(self, m: torch.nn.Module, path: AccessPath) -> None:
        if isinstance(m, torch.jit.ScriptModule):
            self._script(m, path)
            return
        cls, fields, add = type(m), m.__dict__, self.parts.append
        self.parts += (cls, m.training)
        self.found_places.append(m)
        outer, self.owner = self.owner, m
        for k, p in fields["_parameters"].items():
            add(k)
            if p is None:
                add(None)
            else:
                self.tensor(p, (path, k))
        for name in ("_buffers", "_modules"):
            for k, v in fields[name].items():
                add(k)
                self.visit(v, (path, k))
        for k, v in fields.items():
            if k not in _MODULE_FIELDS:
                add(k)
                self.slot = (cls, k)
                self.visit(v, (path, k))
        for name in _HOOKS:
            if fields[name]:
                self.visit(list(fields[name].values()), (path, name))
        self._class_part(cls, path)
        self.owner = outer

    def _script(self, m: torch.jit.ScriptModule, path: AccessPath) -> None:
        self.parts += (Same(m), m.training)
        if self.is_strict() and any(True for held in (m.parameters(), m.buffers()) for _ in held):
            raise TraceError(
                f"{path_name(path) or 'the function'} is a {type(m).__name__}, which runs TorchScript's own code and "
                "cannot be traced with what it holds. Use the Python module that it was made from."
            )

    def visit_attributes(self, x: object, path: AccessPath) -> None:
        cls: type = type(x)
        self.parts.append(cls)
        if isinstance(x, (float, *PLAIN)):
            self.parts.append(repr(x))
        memory = memory_of(x)
        if memory is not None:
            self.parts.append(memory)
        if not is_partly_users(cls) and not isinstance(x, types.SimpleNamespace):
            self.library_object(x, path)
            return
        if cls is types.SimpleNamespace:
            self.namespaces.append((x, path if not self.lenient else None))
        self.classes.add(cls)
        depth, self.depth = self.depth, 0
        fields = getattr(x, "__dict__", None)
        names, outer = self.names | names_of_libraries(cls), self.names
        self.names = names
        if isinstance(fields, dict):
            self.found_places.append(Place(fields, cls.__name__, None, True, of=weakly(x)))
            self.visit_fields(fields, x, path)
        slots = slots_of(cls) if UNSEEN & names else names & slots_of(cls)
        if slots:
            self.found_places.append(Place(x, cls.__name__, slots, True, of=weakly(x)))
        for name in sorted(slots):
            if hasattr(x, name):
                self.parts.append(name)
                self.visit(getattr(x, name), (path, f".{name}"))
        self._class_part(cls, path)
        self.names = outer
        self.depth = depth

    def _class_part(self, cls: type, path: AccessPath) -> None:
        """What an object gets from the user's own classes: methods, properties, class attributes."""
        for base in cls.__mro__:
            if is_users(base):
                self._base(base, (path, ""))
            else:
                self.plain_fields(base, path)

    def _base(self, cls: type, path: AccessPath) -> None:
        if id(cls) in self.seen:
            self.parts.append(("seen", self.seen[id(cls)]))
        else:
            self.seen[id(cls)] = len(self.seen)
            self._namespace(cls, path)

    def _namespace(self, x: type | types.ModuleType, path: AccessPath) -> None:
        """A class or a Python module of the user's."""
        self.parts += (Same(x), registered_at(x))
        fields = dict(vars(x))
        for name, value in fields.items():  # called without being named
            value = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
            if isinstance(value, types.FunctionType) and (name in _CALLED or _is_special(name)):
                self.visit(value, (path, f".{name}"))
        if MATCH_ARGS in self.names:
            self.met |= set(fields.get(MATCH_ARGS, ()))
        owner = x if isinstance(x, type) else vars(x)
        self.found_places.append(Place(owner, x.__name__, self.names, True))
        self.visit_fields(fields, x, path)
        if isinstance(x, type):
            self._class_part(type(x), path)
        if isinstance(x, enum.EnumMeta):
            members: Mapping[str, object] = x.__members__
            for member in members.values():
                if not all(name.startswith("_") for name in vars(member)):
                    self.visit(member, path)

    def _constructors(self, cls: type, path: AccessPath) -> None:
        """What runs when a class is called that the code holds: of an object that exists already, it never runs."""
        for base in cls.__mro__:
            for name in ("__new__", "__init__", "__post_init__") if is_users(base) else ():
                made = vars(base).get(name)
                made = getattr(made, "__func__", made)
                if isinstance(made, types.FunctionType) and id(made) not in self.seen:
                    self.seen[id(made)] = len(self.seen)
                    self.keep.append(made)
                    self._function(made, (path, name), constructs=True)

    def visit_fields(self, fields: Mapping[str, object], owner: object, path: AccessPath) -> None:
        place = owner if isinstance(owner, (type, types.ModuleType, types.FunctionType)) else type(owner)
        for k in sorted(fields.keys() & self.names):
            value = fields[k]
            value = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
            value = value.fget if isinstance(value, property) else value
            value = value.func if isinstance(value, functools.cached_property) else value
            self.parts.append(k)
            self.slot = (place, str(k))
            self.visit(value, (path, f".{k}"))

        if not UNSEEN.isdisjoint(self.names):
            rest = {k: v for k, v in fields.items() if k not in self.names and self._may_be_read(k, v, owner)}
            self.unnamed(rest, path)

    def unnamed(self, fields: Mapping[str, object], path: AccessPath) -> None:
        """What code may read without naming it, and need not: nothing here is refused."""
        self.lenient += 1
        for k, v in fields.items():
            value = v.__func__ if isinstance(v, (staticmethod, classmethod)) else v
            value = value.fget if isinstance(value, property) else value
            self.parts.append(k)
            self.visit(value, (path, f".{k}"))
        self.lenient -= 1

    def _namespaces_handed_on(self) -> None:
        """Of a namespace that the user's code may give to a library's, whose reads cannot be seen, all counts."""
        for x, path in self.namespaces:  # which grows
            name = path[1].lstrip(".") if path is not None else ""
            codes = [part for part in self.parts if isinstance(part, types.CodeType)]
            if not name.isidentifier() or any(hands_on(c, name) for c in codes if is_users_file(c.co_filename)):
                self.unnamed({k: v for k, v in vars(x).items() if k not in self.names}, path)

    def _may_be_read(self, name: object, value: object, owner: object) -> bool:
        """Whether ``vars`` and the like may read a field that no code names."""
        if is_iterator(value) or (isinstance(name, str) and name.startswith("__")):
            return False
        if not isinstance(owner, (type, types.ModuleType)):
            return True
        if isinstance(value, (types.FunctionType, property, staticmethod, classmethod, functools.cached_property)):
            return not self.names.isdisjoint(EVERY_METHOD)
        return not isinstance(value, (types.ModuleType, type))


def _is_special(name: str) -> bool:
    # A constructor names all attributes, also those that nothing reads later.
    return name.startswith("__") and name.endswith("__") and name not in ("__init__", "__new__", "__repr__", "__del__")


def _identity(root: object) -> Hashable:
    """A name for a root that is the same in each step: its code, and that of the torch functions in its closure."""
    cells = [c.cell_contents for c in getattr(root, "__closure__", None) or () if _is_filled(c)]
    inner = tuple(_code(f.__dict__[SOURCE][1]) for f in (root, *cells) if is_traced(f))
    return _code(root), inner


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _code(fun: object) -> Hashable:
    fun = getattr(fun, "__func__", fun)
    kind: type = type(fun)
    return getattr(fun, "__code__", kind)
