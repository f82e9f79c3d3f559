"""Objects that would carry tensors of a trace, which have no values, out of it: made anew by each call, or refused."""

from __future__ import annotations

import collections
import functools
import gc
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..memory.trees import container, to_jax_tree
from ..memory.values import is_interpreted
from ..record.captured import is_traced_tensor, recording
from ..watch.names import slots_of

_ENDS = (type, types.ModuleType, types.CodeType, bool, int, float, complex, str, bytes, type(None), torch.dtype)
_NOT_PLAIN = (type, types.ModuleType, types.FunctionType, torch.Tensor, torch.nn.Module, BaseException)
_MANY = 10_000  # objects to look at


def opening(known: Iterable[object]) -> Callable[[object], object]:
    """A function of the leaves of a result: objects with tensors in their attributes become containers.

    Each call makes them anew, as the function does: a cache of transformers, say. Not so those that are ``known``,
    which are there before the call, themselves or by their ``__dict__``.
    """
    closed = {id(x) for x in known}

    def opened(x: object) -> object:
        kind: Any = type(x)
        fields: Any = getattr(x, "__dict__", None)
        is_plain = type(fields) is dict and kind.__new__ is object.__new__ and not slots_of(kind)
        is_made_here = is_plain and not isinstance(x, _NOT_PLAIN) and closed.isdisjoint((id(x), id(fields)))
        if not is_made_here or traced_tensor_in(x) is None:
            return x
        closed.add(id(x))  # within itself it stays as it is, and is refused
        try:
            return container(x, [to_jax_tree(v, opened) for v in fields.values()], tuple(fields))
        finally:
            closed.discard(id(x))

    return opened


def traced_tensor_in(value: object, depth: int | None = None) -> str | None:
    """Where an object holds a tensor of a trace, as ``.layers[0].keys``; None if it holds none."""
    queue, seen = collections.deque([(value, "", 0)]), {id(value)}
    keep = [value]  # an id is given away again
    while queue and len(seen) < _MANY:
        x, path, level = queue.popleft()
        if isinstance(x, torch.Tensor):
            if is_traced_tensor(x):
                return path
        elif recording() is None and is_interpreted(x):
            return path
        if isinstance(x, (torch.Tensor, *_ENDS)) or level == depth:
            continue
        for name, inner in _held_by(x):
            if id(inner) not in seen:
                seen.add(id(inner))
                keep.append(inner)
                queue.append((inner, path + name, level + 1))
    return None


def _held_by(x: object) -> Iterable[tuple[str, object]]:
    """What an object holds, each with how it is reached."""
    if isinstance(x, types.FunctionType):
        yield from ((f".{k}", cell) for k, cell in zip(x.__code__.co_freevars, x.__closure__ or (), strict=True))
        yield from (("", part) for part in (x.__defaults__, x.__kwdefaults__, x.__dict__))
        return
    if isinstance(x, (types.MethodType, types.BuiltinFunctionType)):
        yield from ((".__self__", x.__self__), ("", getattr(x, "__func__", None)))
        return
    if isinstance(x, functools.partial):
        yield from ((".args", x.args), (".keywords", x.keywords), (".func", x.func))
    elif isinstance(x, BaseException):
        yield ".args", x.args
    elif isinstance(x, dict):
        yield from ((f"[{k!r}]", v) for k, v in list(x.items()))
    elif isinstance(x, (list, tuple, collections.deque)):
        yield from ((f"[{i}]", v) for i, v in enumerate(list(x)))
    fields = getattr(x, "__dict__", None)
    if isinstance(fields, dict):
        yield from ((f".{k}", v) for k, v in list(fields.items()))
    kind: type = type(x)
    slots = slots_of(kind)
    yield from ((f".{name}", getattr(x, name)) for name in slots if hasattr(x, name))
    if fields is None and not slots:  # a cell, a set, the values of a dict
        yield from (("", inner) for inner in gc.get_referents(x))
