"""What the torch transforms share: where a call holds an argument, the numbers of its rows, the finished callable."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import torch

from ..bridge import as_torch
from ..bridge.base.torch_internals import disable_dynamo
from ..bridge.lifting import asking
from ..bridge.memory.trees import Rows, to_jax_tree, to_torch_tree
from ..bridge.tracing import python_function
from ..bridge.watch.walk import is_traced
from ..jax_impl.program.trees import PyTree

Fun: TypeAlias = Callable[..., PyTree]
Args: TypeAlias = tuple[PyTree, ...]
Kwargs: TypeAlias = dict[str, PyTree]


def finish(run: Fun, fun: Fun, leading: Callable[..., Args], recompute: bool = False) -> Fun:
    """Return ``run(*leading(*args), *args)`` as a torch callable that looks like ``fun``."""
    call: Any = as_torch(_signed(run, fun), recompute=recompute)

    @disable_dynamo
    @functools.wraps(python_function(fun))
    def wrapped(*args: PyTree, **kwargs: PyTree) -> PyTree:
        return call(*leading(*args, **kwargs), *args, **kwargs)

    wrapped.compiled = lambda *args, **kwargs: call.compiled(*leading(*args, **kwargs), *args, **kwargs)  # type: ignore[attr-defined]
    return wrapped


def explain_with(explain: Fun, fun: Fun, leading: Callable[..., Args]) -> Fun:
    """Return ``explain(*leading(*args), *args)``, a JAX function that returns no arrays, for torch's arguments."""
    ask = asking(_signed(lambda *args, **kwargs: explain(*args, **kwargs), fun))

    @functools.wraps(python_function(fun))
    def explained(*args: PyTree, **kwargs: PyTree) -> PyTree:
        return ask(*leading(*args, **kwargs), *args, **kwargs)

    return explained


def _signed(run: Fun, fun: Fun) -> Fun:
    """Give ``run`` the parameters of ``fun`` in the place of ``*args, **kwargs``, so that messages can name them."""
    own = [p for p in inspect.signature(run).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    with contextlib.suppress(TypeError, ValueError):
        users = inspect.signature(python_function(fun)).parameters.values()
        positional = [p.replace(kind=p.POSITIONAL_ONLY) for p in own]
        run.__signature__ = inspect.Signature([*positional, *users])  # type: ignore[attr-defined]
    return run


def parameter_names(fun: Fun) -> list[str]:
    """Return the names of the parameters that can be passed by position."""
    try:
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        return [p.name for p in inspect.signature(fun).parameters.values() if p.kind in kinds]
    except (TypeError, ValueError):
        return []


def place_of(fun: Fun, target: int | str, args: Args, kwargs: Kwargs) -> int | str | None:
    """Return where a call passes an argument: its position, its name, or None."""
    names = parameter_names(fun)
    if isinstance(target, str):
        if target in kwargs:
            return target
        target = names.index(target) if target in names else len(args)
    if target < 0:
        target += max(len(names), len(args))
    if 0 <= target < len(args):
        return target
    return names[target] if 0 <= target < len(names) and names[target] in kwargs else None


def replace(fun: Fun, target: int | str, args: Args, kwargs: Kwargs, change: Fun) -> tuple[Args, Kwargs]:
    """Return the arguments of a call with one of them changed, where the call passes it."""
    place = place_of(fun, target, args, kwargs)
    if isinstance(place, int):
        return (*args[:place], change(args[place]), *args[place + 1 :]), kwargs
    if isinstance(place, str):
        return args, {**kwargs, place: change(kwargs[place])}
    return args, kwargs


def number_rows(
    fun: Fun, targets: Sequence[int | str], axes: list[PyTree], args: Args, kwargs: Kwargs, numbers: Fun = jnp.arange
) -> tuple[Args, Kwargs]:
    """Attach the row numbers to one batch argument, so that random draws can tell rows apart; ``axes`` is updated."""
    if not is_traced(fun):  # written in JAX: its keys are arguments
        return args, kwargs
    found = []
    for i, (target, axis) in enumerate(zip(targets, axes, strict=False)):
        place = place_of(fun, target, args, kwargs)
        if axis is not None and place is not None:
            found.append((i, target, _lengths(args[place] if isinstance(place, int) else kwargs[place], axis)))
    rows = _common([lengths for *_, lengths in found])
    if rows is None:
        return args, kwargs
    i, target = next((i, target) for i, target, lengths in found if lengths)
    axes[i] = Rows(axes[i], 0)
    return replace(fun, target, args, kwargs, lambda value: Rows(value, numbers(rows, dtype=jnp.int32)))


def number_rows_by_name(fun: Fun, args: Args, kwargs: Kwargs) -> Kwargs:
    """Attach the row numbers to an argument that is passed by name, and mapped over axis 0, if none has them yet."""
    if not is_traced(fun) or any(isinstance(value, Rows) for value in (*args, *kwargs.values())):
        return kwargs
    found = {name: _lengths(value, 0) for name, value in kwargs.items()}
    rows = _common(list(found.values()))
    if rows is None:
        return kwargs
    name = next(name for name, lengths in found.items() if lengths)
    return {**kwargs, name: Rows(kwargs[name], jnp.arange(rows, dtype=jnp.int32))}


def numbers_to_tensors(tree: PyTree) -> PyTree:
    """Return the tree with its Python numbers as tensors, on the device of the first tensor in it."""
    tree = to_jax_tree(tree)
    found = next((leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, torch.Tensor)), None)
    device = None if found is None else found.device

    def convert(leaf: object) -> object:
        return torch.tensor(leaf, device=device) if isinstance(leaf, (bool, int, float, complex)) else leaf

    return to_torch_tree(tree, convert)


def _common(lengths: Sequence[set[int]]) -> int | None:
    """Return the one length there is; None where the transform itself will complain, of what its user passed."""
    every = set().union(*lengths)
    return every.pop() if len(every) == 1 else None


def _lengths(value: PyTree, axis: PyTree) -> set[int]:
    """Return the lengths of the batch axes of those leaves that have one."""
    try:
        spread = jax.tree.map(
            lambda a, part: [a] * len(jax.tree.leaves(part)), axis, value, is_leaf=lambda a: a is None
        )
    except ValueError:
        return set()
    found: set[int] = set()
    flat = jax.tree.leaves(spread, is_leaf=lambda a: a is None)
    for a, leaf in zip(flat, jax.tree.leaves(value), strict=False):
        shape = getattr(leaf, "shape", ())
        if a is not None and isinstance(a, int) and -len(shape) <= a < len(shape):
            found.add(int(shape[a]))
    return found
