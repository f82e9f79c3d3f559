"""Which arguments of a call carry the batch: found by position or by name, whichever way they were passed."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax

from ..program.trees import (
    Function,
    PyTree,
    as_array,
    flatten,
    flatten_with_names,
    integer,
    normalized_axis,
    outlined,
)

# Where a call holds an argument: its position, or the keyword it was passed by.
Slot: TypeAlias = int | str


def wraps(fun: Function) -> Callable[[Function], Function]:
    """Return ``functools.wraps`` that also takes callable objects, whose attributes stay their own."""
    return functools.wraps(fun, updated=("__dict__",) if inspect.isroutine(fun) else ())


def indices(name: str, value: Any) -> tuple[int, ...]:
    """Return one int or a sequence of ints as a tuple."""
    items = tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else (value,)
    return tuple(integer(name, item, "an int or a sequence of ints") for item in items)


@dataclasses.dataclass(frozen=True)
class Signature:
    """The parameters of a function by position and by name; both unknown where Python cannot tell its signature."""

    positional: tuple[str, ...] = ()
    names: frozenset[str] = frozenset()
    optional: frozenset[str] = frozenset()
    open_positions: bool = True
    open_names: bool = True

    @classmethod
    def of(cls, fun: Function) -> Signature:
        """Return the parameters of ``fun``."""
        if not callable(fun):
            raise TypeError(f"fun must be callable, got {fun!r}.")
        try:
            parameters = inspect.signature(fun).parameters.values()
        except (TypeError, ValueError):
            return cls()
        kinds = [p.kind for p in parameters]
        by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        return cls(
            tuple(p.name for p in parameters if p.kind in by_position),
            frozenset(p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)),
            frozenset(p.name for p in parameters if p.default is not p.empty),
            inspect.Parameter.VAR_POSITIONAL in kinds,
            inspect.Parameter.VAR_KEYWORD in kinds,
        )

    def check(self, option: str, target: Slot) -> Slot:
        """Return the position or name that an option asks for, from the front, if the function can have it."""
        if isinstance(target, str):
            if target not in self.names and not self.open_names:
                raise ValueError(f"{option} names {target!r}, which is no argument of fun: {sorted(self.names)}.")
            return target
        count = len(self.positional)
        if not self.open_positions and not -count <= target < count:
            takes = ", ".join(self.positional) or "none"
            raise ValueError(f"{option}={target} is out of range: fun takes {count} positional arguments ({takes}).")
        return target % count if target < 0 and not self.open_positions else target

    def batch(self, batch_argnums: Any) -> list[Slot]:
        """Return the batch's positions: none where ``fun`` has its parameters by position and all else by keyword only.

        What a call passes by keyword only is a batch without being named.
        """
        by_keyword = self.open_names or len(self.names) > len(self.positional)
        if batch_argnums == 1 and len(self.positional) == 1 and by_keyword and not self.open_positions:
            return []
        return [self.check("batch_argnums", i) for i in indices("batch_argnums", batch_argnums)]

    def slot(self, option: str, target: Slot, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Slot | None:
        """Return where this call holds the argument; None for one that was left at its default."""
        if isinstance(target, str):
            if target in kwargs:
                return target
            position, name = (self.positional.index(target) if target in self.positional else len(args)), target
        else:
            position = target + len(args) if target < 0 else target
            name = self.positional[position] if 0 <= position < len(self.positional) else ""
        if 0 <= position < len(args):
            return position
        if name in kwargs:
            return name
        if name in self.optional:
            return None
        shown = repr(name) if name else f"number {target}"
        raise TypeError(f"argument {shown}, which {option} names, is missing from the call.")

    def label(self, slot: Slot) -> str:
        """Return the argument's name for messages."""
        if isinstance(slot, str):
            return slot
        return self.positional[slot] if slot < len(self.positional) else f"args[{slot}]"


def slots(
    arguments: Signature, option: str, targets: Sequence[Slot], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Slot | None]:
    """Return the slot of every target; refuse two that are the same argument with a ValueError."""
    found = [arguments.slot(option, target, args, kwargs) for target in targets]
    for i, slot in enumerate(found):
        if slot is not None and slot in found[:i]:
            raise ValueError(f"{option} names the argument {arguments.label(slot)!r} twice.")
    return found


def get_argument(slot: Slot, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return the argument in a slot."""
    return kwargs[slot] if isinstance(slot, str) else args[slot]


def set_argument(slot: Slot, value: Any, args: list[Any], kwargs: dict[str, Any]) -> None:
    """Put an argument into its slot."""
    if isinstance(slot, str):
        kwargs[slot] = value
    else:
        args[slot] = value


def mapped_axes(
    arguments: Signature, in_axes: PyTree, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[Slot, PyTree]:
    """Return the axes by which a ``vmap`` maps each argument of a call."""
    axes: dict[Slot, PyTree] = {}
    if in_axes is None or isinstance(in_axes, int):
        axes.update((i, in_axes) for i in range(len(args)))
    elif len(args) > len(in_axes):
        raise ValueError(
            f"in_axes must have one entry for each positional argument, {len(args)}, got {len(in_axes)}: {in_axes!r}."
        )
    else:
        for i, axis in enumerate(in_axes):
            slot = arguments.slot("in_axes", i, args, kwargs)
            if slot is not None:
                axes[slot] = axis
    return axes | {name: axis_of_keyword(value) for name, value in kwargs.items() if name not in axes}


def axis_of_keyword(value: PyTree) -> PyTree:
    """Return 0 for arrays, as ``jax.vmap`` has it, and None for what cannot be mapped."""
    return jax.tree.map(lambda leaf: 0 if hasattr(leaf, "shape") else None, value)


@dataclasses.dataclass(frozen=True)
class Batch:
    """The arrays of a call that carry the batch, with their batch axes, and the way back to the call's arguments."""

    leaves: list[jax.Array]
    axes: list[int]
    rows: int
    rebuild: Callable[[Sequence[Any]], tuple[list[Any], dict[str, Any]]]


def collect(
    arguments: Signature,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    mapped: Sequence[tuple[Slot, PyTree]],
) -> Batch:
    """Gather what carries the batch; ``mapped`` pairs each slot with its axis, or a tree prefix of axes and Nones."""
    leaves: list[jax.Array] = []
    axes: list[int] = []
    names: list[str] = []
    trees: list[tuple[Slot, Any, list[Any]]] = []
    for slot, axis in mapped:
        value, label = get_argument(slot, args, kwargs), arguments.label(slot)
        named, treedef = flatten_with_names(value, label)
        filled: list[Any] = []
        for (name, leaf), at in zip(named, leaf_axes("in_axes", axis, value, label), strict=True):
            if at is None:
                filled.append(leaf)
                continue
            leaf = as_array(leaf, name)
            axes.append(normalized_axis(at, leaf, name))
            leaves.append(leaf)
            names.append(name)
            filled.append(_HOLE)
        trees.append((slot, treedef, filled))

    def rebuild(values: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        rest, new_args, new_kwargs = iter(values), list(args), dict(kwargs)
        for slot, treedef, filled in trees:
            tree = treedef.unflatten([next(rest) if leaf is _HOLE else leaf for leaf in filled])
            set_argument(slot, tree, new_args, new_kwargs)
        return new_args, new_kwargs

    return Batch(leaves, axes, _common_rows(leaves, axes, names, [arguments.label(s) for s, _ in mapped]), rebuild)


_HOLE = object()


def leaf_axes(option: str, prefix: PyTree, value: PyTree, label: str) -> list[int | None]:
    """Return the axis of each leaf of ``value``, from an option that holds a prefix of its tree."""
    axes, treedef = flatten(prefix, is_leaf=lambda a: a is None)
    try:
        parts = treedef.flatten_up_to(value)
    except ValueError:
        raise ValueError(
            f"{option} of {label} must be an int, None or a prefix of its tree. Axes: {prefix!r}; "
            f"{label}: {outlined(value)}."
        ) from None
    for axis in axes:
        if isinstance(axis, bool) or not (axis is None or isinstance(axis, int)):
            raise TypeError(f"{option} of {label} must hold ints or None, got {axis!r}.")
    return [axis for axis, part in zip(axes, parts, strict=True) for _ in jax.tree.leaves(part)]


def _common_rows(leaves: list[jax.Array], axes: list[int], names: list[str], labels: list[str]) -> int:
    if not leaves:
        raise ValueError(
            f"the batch arguments ({', '.join(labels) or 'none'}) hold no array with a batch axis, so the batch has no "
            "length. Pass at least one array, or call fun itself."
        )
    rows = [leaf.shape[axis] for leaf, axis in zip(leaves, axes, strict=True)]
    if len(set(rows)) > 1:
        shown = ", ".join(dict.fromkeys(f"{n} has {r} (axis {a})" for n, r, a in zip(names, rows, axes, strict=True)))
        raise ValueError(
            f"batch arguments must have the same number of rows: {shown}. Cut them to one length, or set the axis that "
            "holds the batch."
        )
    return rows[0]
