"""Where a torch model and a JAX function part ways: the first submodule whose output JAX does not compute.

The JAX function needs no names for this. Both run on the same numbers in float64. A submodule agrees if its output
stands among the values that the JAX program computes, up to the order of the axes and broadcasting: that all numbers
of a tensor agree to ten digits by accident does not happen. The first difference arises in the innermost submodule
whose output is missing although its inputs are there.

A port may be organised differently, and never compute what some submodule returns (a scale folded into a weight). Such
a submodule is no suspect if anything computed from its output, by torch's autograd graph, is found again. What no
parameter reaches (masks, tables of positions) is made in many ways: it convicts nobody while there is another suspect,
and being made in another way it does not excuse the submodule that takes it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.extend.core import ClosedJaxpr

from .differences import Precision, as_numpy, double
from .programs import probe, unseen
from .report import Location
from .runs import ModuleCall, Seen, before

_NEITHER = (
    "JAX computes neither its output nor all of its inputs: the difference is in it, or in the code around it that "
    "makes them."
)
_LARGEST = 2**22  # numbers of a value up to which it is kept for the search


class Values:
    """The values of a JAX program that have as many numbers as some tensor of the torch model."""

    def __init__(self, wanted: Sequence[np.ndarray]) -> None:
        sizes = {size for array in wanted for size in (array.size, _once(array).size)}
        # What torch broadcasts along the batch, JAX may have made for each example.
        lengths = {array.shape[0] for array in wanted if array.ndim}
        sizes |= {array.size * n for array in wanted if array.shape[:1] == (1,) for n in lengths}
        self._arrays: dict[int, list[np.ndarray]] = {size: [] for size in sizes if 1 <= size <= _LARGEST}
        self._sorted: dict[int, np.ndarray] = {}

    def takes(self, value: Any) -> bool:
        """Tell whether a value may be searched for."""
        dtype: Any = getattr(value, "dtype", None)
        return (
            dtype is not None and bool(jnp.issubdtype(dtype, jnp.inexact)) and int(np.prod(value.shape)) in self._arrays
        )

    def add(self, value: object) -> None:
        """Keep one value, if it may be searched for; without what is repeated along an axis, too."""
        if self.takes(value):
            array = double(np.asarray(value)).squeeze()
            self._arrays[array.size].append(array)
            once = _once(array)
            if once.size < array.size and once.size in self._arrays:
                self._arrays[once.size].append(once)

    def distance(self, wanted: np.ndarray) -> float:
        """Return how far the nearest value is, relative to the largest number; up to order of axes and broadcasting."""
        once = _once(wanted)
        nearest = self._nearest(wanted.squeeze())
        return nearest if once.size == wanted.size else min(nearest, self._nearest(once))

    def _nearest(self, wanted: np.ndarray) -> float:
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
        """Find a number, not 1, such that JAX computes ``wanted`` times it, and not on the way to ``wanted`` itself."""
        wanted = wanted.squeeze()
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


class _Judged:
    """A call of a submodule, and what of it JAX computes.

    Attributes:
        call: the call.
        error: how far JAX is from its outputs, relative to their largest values; None where they tell nothing.
        found: whether JAX computes the outputs.
        learned: whether a parameter reaches the outputs.
        missing: the telling inputs that JAX does not compute.
        there: whether it computes others that tell.
    """

    def __init__(self, call: ModuleCall, values: Values) -> None:
        self.call, self._values = call, values
        outputs = [seen for seen in call.outputs if _tells(seen)]
        outputs = [seen for seen in outputs if seen.learned] or outputs  # a mask that is handed on says nothing
        self.learned = any(seen.learned for seen in outputs)
        errors = [values.distance(_array(seen)) for seen in outputs]
        self.error = max(errors, default=None)
        self.found = bool(errors) and all(e <= seen.tolerance for e, seen in zip(errors, outputs, strict=True))

    @functools.cached_property
    def missing(self) -> list[Seen]:
        """The telling inputs that JAX does not compute."""
        return [s for s in self.call.inputs if _tells(s) and self._values.distance(_array(s)) > s.tolerance]

    @property
    def there(self) -> bool:
        """Whether JAX computes an input that tells, or there are no numbers to compute."""
        floats = [s for s in self.call.inputs if _is_float(s) and s.value.numel()]
        return not floats or sum(map(_tells, floats)) > len(self.missing)

    @property
    def informed(self) -> bool:
        """Whether anything is known of its inputs, or there is nothing to be known."""
        floats = [s for s in self.call.inputs if _is_float(s) and s.value.numel()]
        return not floats or any(map(_tells, floats))

    @property
    def convicted(self) -> bool:
        """Whether the difference is in the submodule: what it learned from is there, and its output is not.

        An input that no parameter reaches (a mask, a table of positions) may be made in another way.
        """
        return self.learned and self.there and not any(seen.learned for seen in self.missing)

    def feeds(self, other: _Judged) -> bool:
        """Tell whether an output is among the other's missing inputs."""
        return any(_same(mine, theirs) for mine in self.call.outputs for theirs in other.missing)


def tolerant(call: ModuleCall, rough: ModuleCall, precision: Precision) -> ModuleCall:
    """Return the call with the errors up to which JAX's values are the same: by its tensors in the dtypes given."""
    if (len(call.inputs), len(call.outputs)) != (len(rough.inputs), len(rough.outputs)):
        raise ValueError(f"{call.name} takes or returns other tensors in float64 than in the dtypes given")
    pairs = zip((*call.inputs, *call.outputs), (*rough.inputs, *rough.outputs), strict=True)
    seen = [dataclasses.replace(fine, tolerance=_tolerance(fine, low, precision)) for fine, low in pairs]
    return dataclasses.replace(call, inputs=seen[: len(call.inputs)], outputs=seen[len(call.inputs) :])


def _tolerance(fine: Seen, low: Seen, precision: Precision) -> float:
    if not _tells(fine) or fine.value.shape != low.value.shape:
        return fine.tolerance
    array, eps = _array(fine), torch.finfo(low.value.dtype).eps
    largest = float(np.max(np.abs(array), where=np.isfinite(array), initial=0.0)) or 1.0
    return max(fine.tolerance, precision.coarse(_array(low), array, eps, 0.0) / largest)


def locate(calls: list[ModuleCall], closed: ClosedJaxpr, inputs: list[jax.Array]) -> Location | None:
    """Find the first submodule whose output the JAX program does not compute; None if it computes and returns all.

    Args:
        calls: the calls of the torch model's submodules, in float64.
        closed: the JAX function's program, in float64.
        inputs: what the program is run on.
    """
    everything = [_array(seen) for call in calls for seen in (*call.inputs, *call.outputs) if _is_float(seen)]
    values, returned = Values(everything), Values(everything)
    results, _, taken = probe(closed, inputs, values.takes)
    for value in (*inputs, *closed.consts, *taken):
        values.add(value)
    for value in results:
        returned.add(value)

    judged = [_Judged(call, values) for call in calls]
    settled = before([seen.node for one in judged if one.found for seen in one.call.outputs])
    suspects = [
        one
        for one in judged
        if one.error is not None and not one.found and not any(seen.node in settled for seen in one.call.outputs)
    ]
    if not any(one.learned or one is judged[-1] for one in suspects):
        return _returned(judged, returned)
    disagreeing = tuple(dict.fromkeys(one.call.name for one in suspects))
    culprit, sure = _culprit(suspects)
    name, detail = culprit.call.name, _NEITHER
    if not any(seen.learned for seen in culprit.missing):
        name, detail = _explain(culprit, judged, suspects, values)
    if hidden := unseen(closed):
        detail += f" Not looked into: {', '.join(hidden)}; a submodule ported there may be named wrongly."
    return Location(name, detail, float(culprit.error or 0.0), disagreeing, sure)


def _culprit(suspects: list[_Judged]) -> tuple[_Judged, bool]:
    """Return the suspect that holds the difference, and if that is known; the model itself only where it is alone."""
    inner = [one for one in suspects if one.call.name]
    learned = [one for one in inner if one.learned]
    for one in suspects:
        if one.convicted and (one.call.name or not learned):
            return one, one.informed
        if one.learned and one.missing and not one.there and not any(seen.learned for seen in one.missing):
            # All that it was given was made without parameters, by a submodule that differs (a scaling of the inputs).
            maker: _Judged | None = one
            while maker is not None and maker.missing:
                later = maker
                maker = next((other for other in inner if not other.learned and other.feeds(later)), None)
            if maker is not None:
                return maker, True
    if not learned:
        return next((one for one in suspects if not one.missing), suspects[0]), True
    return learned[0], False


def _returned(judged: list[_Judged], returned: Values) -> Location | None:
    """Find the submodule whose output JAX computes, and then returns something else; None if it returns the model's."""
    whole = judged[-1]
    outputs = [seen for seen in whole.call.outputs if _tells(seen)]
    errors = [returned.distance(_array(seen)) for seen in outputs]
    if all(error <= seen.tolerance for error, seen in zip(errors, outputs, strict=True)):
        return None
    last = [one for one in judged if any(_same(s, t) for s in one.call.outputs for t in outputs)]
    return Location(last[0].call.name, "JAX computes its output, but returns other numbers.", max(errors), (), False)


def _explain(culprit: _Judged, judged: list[_Judged], suspects: list[_Judged], values: Values) -> tuple[str, str]:
    """Return the submodule's name and what is known of the difference within it."""
    call = culprit.call
    children = [one for one in judged[: judged.index(culprit)] if _is_child(one.call.name, call.name)]
    for child in children:  # dropout is found in evaluation, where it returns its input, whatever JAX makes of that
        if _is_dropout(child.call) and (factor := values.multiple(*_number(child.call.outputs[0]))) is not None:
            return child.call.name, f"JAX computes its inputs, and goes on with {factor:.6g} times its output."
    nearest = "no value has its size" if culprit.error == np.inf else f"the nearest value is off by {culprit.error:.1e}"
    detail = f"JAX computes its inputs but not its output; {nearest}."
    factor = values.multiple(*_number(call.outputs[0])) if call.outputs else None
    if factor is not None:
        detail = f"JAX computes its inputs, and {factor:.6g} times its output."
    agree = [one.call.name for one in children if one.found]
    if agree:
        detail += f" Its submodules {', '.join(dict.fromkeys(agree))} agree: the difference is in the code around them."
    if not culprit.informed:
        detail += " Its inputs are all of one number, which tells nothing of what made them."
    if culprit.missing:
        makers = dict.fromkeys(one.call.name for one in suspects if not one.learned and one.feeds(culprit))
        made = f" (by {', '.join(makers)} in torch)" if makers else ""
        detail += (
            f" An input that no parameter reaches{made}, such as a mask, is made in another way in JAX, or differs."
        )
    return call.name, detail


def _is_child(name: str, parent: str) -> bool:
    return name != parent and (not parent or name.startswith(f"{parent}."))


def _is_dropout(call: ModuleCall) -> bool:
    """Tell whether the call is one of dropout, or of another module that returned its input as it was."""
    if len(call.outputs) != 1 or not call.inputs or _is_trivial(_array(call.outputs[0])):
        return False
    given, made = call.inputs[0].value, call.outputs[0].value
    return "Dropout" in type(call.module).__name__ or (given.shape == made.shape and bool((given == made).all()))


def _is_float(seen: Seen) -> bool:
    return seen.value.is_floating_point() or seen.value.is_complex()


def _tells(seen: Seen) -> bool:
    """Tell whether finding the tensor says anything: it has numbers, and not one and the same everywhere."""
    return _is_float(seen) and seen.value.numel() <= _LARGEST and not _is_trivial(_array(seen))


def _same(one: Seen, two: Seen) -> bool:
    return (
        one.value.shape == two.value.shape and one.value.dtype == two.value.dtype and torch.equal(one.value, two.value)
    )


def _is_trivial(array: np.ndarray) -> bool:
    """Tell whether the tensor is found anywhere: it is empty, or all its numbers are one and the same."""
    return array.size == 0 or bool((array == array.ravel()[0]).all() and (array.size > 1 or array.ravel()[0] in (0, 1)))


def _array(seen: Seen) -> np.ndarray:
    return double(as_numpy(seen.value))


def _number(seen: Seen) -> tuple[np.ndarray, float]:
    return _array(seen), seen.tolerance


def _once(array: np.ndarray) -> np.ndarray:
    """Return the array without axes of one entry, and without those along which it is repeated, but for rounding."""
    array = array.squeeze()
    for axis in reversed(range(array.ndim)):
        first, last = array.take([0], axis), array.take([-1], axis)
        if array.shape[axis] > 1 and np.allclose(first, last, 1e-12, 0) and np.allclose(array, first, 1e-12, 0):
            array = first.squeeze(axis)
    return array


def _in_order(array: np.ndarray) -> np.ndarray:
    flat = np.nan_to_num(array.ravel())
    if flat.dtype.kind == "c":
        return np.concatenate([np.sort(flat.real), np.sort(flat.imag)])
    return np.sort(flat)


def _over_axes(array: np.ndarray, wanted: np.ndarray) -> float:
    """Return the smallest error over the orders of the axes that give the same shape."""
    errors = [
        np.max(np.abs(np.nan_to_num(array.transpose(order)) - np.nan_to_num(wanted)))
        for order in itertools.permutations(range(array.ndim))
        if tuple(array.shape[i] for i in order) == wanted.shape
    ]
    return float(min(errors, default=0.0))  # of another shape: reshaped, the sorted numbers decide
