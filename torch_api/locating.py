"""Where a torch model and a JAX function part ways: the first submodule whose output JAX does not compute.

The JAX function needs no names for this. Both run on the same numbers in float64. A submodule agrees if its output
stands among the values that the JAX program computes, up to the order of the axes: that all numbers of a tensor agree
to ten digits by accident does not happen. The first difference arises in the innermost submodule whose output is
missing although its inputs are there.

A port may be organised differently, and never compute what some submodule returns (a scale folded into a weight). Such
a submodule is no suspect if anything computed from its output, by torch's autograd graph, is found again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np

from .differences import as_numpy
from .programs import run, unseen
from .report import Location
from .runs import ModuleCall

_LARGEST = 2**22  # numbers of a value up to which it is kept for the search


class Values:
    """The values of a JAX program that have as many numbers as some tensor of the torch model."""

    def __init__(self, sizes: Iterable[int]) -> None:
        self._arrays: dict[int, list[np.ndarray]] = {size: [] for size in sizes if 1 <= size <= _LARGEST}
        self._sorted: dict[int, np.ndarray] = {}

    def takes(self, value: Any) -> bool:
        """Whether a value may be searched for."""
        dtype: Any = getattr(value, "dtype", None)
        return (
            dtype is not None and bool(jnp.issubdtype(dtype, jnp.inexact)) and int(np.prod(value.shape)) in self._arrays
        )

    def add(self, value: Any) -> None:
        """Keep one value, if it may be searched for."""
        if self.takes(value):
            array = np.asarray(value)
            self._arrays[array.size].append(array.astype(np.complex128 if array.dtype.kind == "c" else np.float64))

    def distance(self, wanted: np.ndarray) -> float:
        """How far the nearest value is, relative to the largest number; up to the order of the axes."""
        in_order = _in_order(wanted)
        scale = float(np.max(np.abs(in_order))) or 1.0
        nearest = np.inf
        for array in self._arrays.get(wanted.size, ()):
            if id(array) not in self._sorted:
                self._sorted[id(array)] = _in_order(array)
            # Sorted, a transposed or reshaped copy has the same numbers; this also bounds the distance from below.
            if (bound := float(np.max(np.abs(self._sorted[id(array)] - in_order))) / scale) >= nearest:
                continue
            nearest = min(
                nearest, bound if array.ndim != wanted.ndim else max(bound, _over_axes(array, wanted) / scale)
            )
        return nearest

    def multiple(self, wanted: np.ndarray, tolerance: float) -> float | None:
        """A number other than 1 such that JAX computes ``wanted`` times it, and not on the way to ``wanted`` itself."""
        in_order, size = _in_order(wanted), float(np.max(np.abs(wanted)))
        found = False
        factors: list[float] = []
        for array in self._arrays.get(wanted.size, ()):
            factor = float(np.max(np.abs(array))) / size if np.isfinite(array).all() else 0.0
            if factor == 0 or np.max(np.abs(_in_order(array) / factor - in_order)) > tolerance * size:
                continue
            if abs(factor - 1) > 1e-6:
                factors.append(factor)
            elif not found:
                found, factors = True, []
        return factors[0] if factors else None


def locate(calls: list[ModuleCall], closed: Any, inputs: list[Any], tolerance: float) -> Location | None:
    """The first submodule whose output the JAX program does not compute; None if it computes all.

    Args:
        calls: the calls of the torch model's submodules, in float64.
        closed: the JAX function's program, in float64.
        inputs: what the program is run on.
        tolerance: the relative error up to which values are the same.
    """
    values = Values({seen.value.numel() for call in calls for seen in (*call.inputs, *call.outputs)})

    for value in (*inputs, *closed.consts, *run(closed, inputs, values.takes)[2]):
        values.add(value)

    distances = [_furthest(values, call.outputs) for call in calls]
    found = [distance is not None and distance <= tolerance for distance in distances]
    settled = _before([seen.node for call, ok in zip(calls, found, strict=True) if ok for seen in call.outputs])
    suspects = [
        i
        for i, (call, distance) in enumerate(zip(calls, distances, strict=True))
        if distance is not None and not found[i] and not any(seen.node in settled for seen in call.outputs)
    ]
    if not suspects:
        return None
    disagreeing = tuple(dict.fromkeys(calls[i].name for i in suspects))
    caution = ""
    if hidden := unseen(closed):
        caution = f" Not looked into: {', '.join(hidden)}; a submodule ported there may be named wrongly."
    for i in suspects:
        there = _furthest(values, calls[i].inputs)
        if there is None or there <= tolerance:
            name, detail = _explain(i, calls, distances, values, tolerance)
            return Location(name, detail + caution, float(distances[i] or 0.0), disagreeing)
    first = calls[suspects[0]]
    return Location(
        first.name, f"JAX does not compute its inputs either.{caution}", float(distances[suspects[0]] or 0), disagreeing
    )


def _explain(
    i: int, calls: list[ModuleCall], distances: list[float | None], values: Values, tolerance: float
) -> tuple[str, str]:
    """The submodule's name and what is known of the difference within it."""
    call, distance = calls[i], distances[i]
    children = [j for j in range(i) if _is_child(calls[j].name, call.name)]
    for j in children:  # dropout is found in evaluation, where it returns its input, whatever JAX makes of that
        child = calls[j]
        if _is_dropout(child) and (factor := values.multiple(_array(child.outputs[0]), tolerance)) is not None:
            return child.name, f"JAX computes its inputs, and goes on with {factor:.6g} times its output."
    nearest = "no value has its size" if distance == np.inf else f"the nearest value is off by {distance:.1e}"
    detail = f"JAX computes its inputs but not its output; {nearest}."
    factor = values.multiple(_array(call.outputs[0]), tolerance) if call.outputs else None
    if factor is not None:
        detail = f"JAX computes its inputs, and {factor:.6g} times its output."
    agree = [calls[j].name for j in children if (d := distances[j]) is not None and d <= tolerance]
    if agree:
        detail += f" Its submodules {', '.join(dict.fromkeys(agree))} agree: the difference is in the code around them."
    return call.name, detail


def _is_child(name: str, parent: str) -> bool:
    return name != parent and (not parent or name.startswith(f"{parent}."))


def _is_dropout(call: ModuleCall) -> bool:
    """Whether the call is one of dropout, or of another module that returned its input as it was."""
    if len(call.outputs) != 1 or not call.inputs or _is_trivial(_array(call.outputs[0])):
        return False
    given, made = call.inputs[0].value, call.outputs[0].value
    return "Dropout" in type(call.module).__name__ or (given.shape == made.shape and bool((given == made).all()))


def _furthest(values: Values, seen: list[Any]) -> float | None:
    """The largest distance of the tensors that tell anything; None if none does."""
    arrays = [_array(s) for s in seen if s.value.is_floating_point() or s.value.is_complex()]
    telling = [a for a in arrays if not _is_trivial(a) and a.size <= _LARGEST]
    return max((values.distance(a) for a in telling), default=None)


def _is_trivial(array: np.ndarray) -> bool:
    """Whether the tensor is found anywhere: it is empty, or all its numbers are one and the same."""
    return array.size == 0 or bool((array == array.ravel()[0]).all() and (array.size > 1 or array.ravel()[0] in (0, 1)))


def _array(seen: Any) -> np.ndarray:
    array = as_numpy(seen.value)
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


def _in_order(array: np.ndarray) -> np.ndarray:
    flat = np.nan_to_num(array.ravel())
    if flat.dtype.kind == "c":
        return np.concatenate([np.sort(flat.real), np.sort(flat.imag)])
    return np.sort(flat)


def _over_axes(array: np.ndarray, wanted: np.ndarray) -> float:
    """The smallest error over the orders of the axes that give the same shape."""
    errors = [
        np.max(np.abs(np.nan_to_num(array.transpose(order)) - np.nan_to_num(wanted)))
        for order in itertools.permutations(range(array.ndim))
        if tuple(array.shape[i] for i in order) == wanted.shape
    ]
    return float(min(errors, default=0.0))  # of another shape: reshaped, the sorted numbers decide


def _before(nodes: list[Any]) -> set[Any]:
    """These nodes of autograd's graph and all that they were computed from."""
    reached: set[Any] = set()
    waiting = [node for node in nodes if node is not None]
    while waiting:
        node = waiting.pop()
        if node not in reached:
            reached.add(node)
            waiting += [following for following, _ in node.next_functions if following is not None]
    return reached
