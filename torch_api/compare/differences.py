"""One leaf against another: errors, units in the last place, and the verdict that tells rounding from a difference.

The same computation in a finer precision has a smaller error if the error is rounding, and the same error if it is
none. So both sides run in the dtype that was given and in float64, and an error counts as rounding where it is as much
smaller than what rounding costs in the dtype given as float64's unit roundoff is smaller.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TypeAlias

import jax
import ml_dtypes
import numpy as np
import torch

from ...bridge.memory.dtypes import jax_dtype
from .report import Row

_EPS = float(np.finfo(np.float64).eps)
# Errors in float64 below this part of a leaf's largest value are rounding. XLA's and torch's float64 functions are
# good to about 1e-15, and sums of some thousand terms lose three more digits.
_ALWAYS = 1e-12
# How much better float32 may have come off by luck than the ratio of the unit roundoffs says.
_LUCK = 1e3
# From this size on a number that both sides have to the bit may be a mask's.
_FILLER = 1e4
# Where a float64 run computes in a coarser dtype inside, or there is none: roundings of that dtype.
_ROUNDINGS = 64
# Where JAX alone does, torch shows what rounding is: so many times its own error, and some roundings, as either may
# come off by luck (more easily in few numbers).
_OWN_ERRORS = 16
_LEAST_ROUNDINGS = 8
_FEW, _LEAST_ROUNDINGS_OF_FEW = 32, 32

Pair: TypeAlias = tuple[object, object]  # torch's value and JAX's


@dataclasses.dataclass(frozen=True)
class Precision:
    """What the float64 run is worth.

    Args:
        eps: the unit roundoff of the coarsest dtype within, None without such a run.
        draws: whether the functions draw dropout masks, which are others in float64.
        alone: whether JAX alone computes in that dtype, so that torch's float64 run is one.
    """

    eps: float | None = _EPS
    draws: bool = False
    alone: bool = False

    @property
    def has_float64(self) -> bool:
        """Whether there is a float64 run."""
        return self.eps is not None

    def coarse(
        self, low: np.ndarray, high: np.ndarray, eps: float, scale: float, told: np.ndarray | bool = True
    ) -> float:
        """Return the error up to which a coarser dtype within is to blame, by torch's values as given and in float64.

        Args:
            low: torch's values in the dtype given.
            high: its values in float64.
            eps: the unit roundoff of the dtype given.
            scale: the largest value of the section's leaves.
            told: the numbers whose size says what rounding is.
        """
        if self.eps is None or self.eps <= _EPS:
            return 0.0
        largest = _largest(high, told)
        # A leaf that is zero but for what cancels has the rounding of the others.
        if not self.alone or self.draws or eps == 0 or largest <= _ALWAYS * max(scale, 1.0):
            return _ROUNDINGS * self.eps * max(largest, scale)
        own = _largest(_error(low, high), told) * min(1.0, self.eps / eps)
        return max(
            _OWN_ERRORS * own, (_LEAST_ROUNDINGS_OF_FEW if low.size < _FEW else _LEAST_ROUNDINGS) * self.eps * largest
        )


def as_numpy(value: object) -> np.ndarray:
    """Return a tensor, array or number as a NumPy array of the same dtype, which owns its memory."""
    if isinstance(value, torch.Tensor):
        value = value.detach().resolve_conj().resolve_neg().cpu()
        if value.dtype == torch.bfloat16:
            return value.float().numpy().astype(ml_dtypes.bfloat16)
        return value.numpy().copy()
    return np.array(value)


def compare_leaf(
    against: str, section: str, leaf: str, low: Pair, high: Pair | None, scale: float, exact: Precision
) -> Row:
    """Return the row of one leaf: torch's value and JAX's, in the dtype given and in float64.

    Args:
        against: see :class:`Row`.
        section: see :class:`Row`.
        leaf: see :class:`Row`.
        low: both values in the dtype that was given.
        high: both values in float64, or None.
        scale: the largest value of the section's leaves in float64: noise far below it is no difference.
        exact: the :class:`Precision` of the float64 run.
    """
    named = against, section, leaf
    ours, theirs = as_numpy(low[0]), as_numpy(low[1])
    if ours.shape != theirs.shape:
        return Row(*named, "shape", detail=f"{list(ours.shape)} in torch, {list(theirs.shape)} in JAX")
    if not _same_dtype(low[0], ours.dtype, theirs.dtype):
        return Row(*named, "dtype", detail=f"{ours.dtype} in torch, {theirs.dtype} in JAX")
    if ours.size == 0:
        zero = 0.0 if exact.has_float64 else None
        return Row(*named, "equal", 0.0, 0.0, 0.0, zero, zero)
    wide = _exact(ours), _exact(theirs)
    error = _error(*wide)
    absolute, largest = float(error.max()), _largest(wide[0])
    eps = _eps(ours.dtype)
    numbers = absolute, _ratio(absolute, largest), _ulps(*wide, eps)
    high_error: tuple[float, float] | tuple[None, None] = (None, None)
    told = ~_fillers(*wide)  # the numbers whose size says what rounding is
    if high is not None:
        fine = _exact(as_numpy(high[0])), _exact(as_numpy(high[1]))
        if fine[0].shape != fine[1].shape:
            return Row(*named, "shape", detail="in float64 only")
        error64 = _error(*fine)
        absolute64 = float(error64.max())
        high_error = absolute64, _ratio(absolute64, _largest(fine[0]))
        errors = [error]
        if not exact.draws:  # two errors may cancel by luck, so each side's own error in the dtype given counts as well
            errors += _error(wide[0], fine[0]), _error(wide[1], fine[1])
        noise = max(_largest(e, told) for e in errors)
        if not (wide[0].any() or wide[1].any()):  # zero is exact in float32, and says nothing of what was cancelled
            noise = max(noise, scale, 1.0)
        coarse = exact.coarse(wide[0], fine[0], eps, scale, told)
        same = _is_rounding(noise, absolute64, _largest(fine[0], told), scale, eps, coarse)
        if not same and np.isfinite(absolute):  # rounding may be larger elsewhere than what float64 finds
            error = error64
    else:
        same = absolute <= _ROUNDINGS * max(eps, exact.eps or 0) * max(_largest(wide[0], told), scale)
    if np.array_equal(*wide, equal_nan=True) and same:
        verdict = "equal"
    else:
        verdict = "rounding" if same and np.isfinite(absolute) else "different"
    index = tuple(map(int, np.unravel_index(np.argmax(error), error.shape)))
    values = ours[index].item(), theirs[index].item()
    return Row(*named, verdict, *numbers, high_error[0], high_error[1], index, values[0], values[1])


def largest_value(ours: Sequence[object], theirs: Sequence[object], fine: Sequence[object] = ()) -> float:
    """Return the largest finite absolute value of torch's leaves, fillers aside; 0 without any.

    Args:
        ours: torch's leaves in the dtypes given.
        theirs: JAX's, which tell what a filler is.
        fine: torch's leaves in float64, whose values count if there are any.
    """
    largest = 0.0
    for i, pair in enumerate(zip(map(as_numpy, ours), map(as_numpy, theirs), strict=True)):
        one, two = _exact(pair[0]), _exact(pair[1])
        told = ~_fillers(one, two) if one.shape == two.shape else True
        values = _exact(as_numpy(fine[i])) if fine else one
        if values.size and pair[0].dtype.kind not in "iub":
            largest = max(largest, _largest(values, told if values.shape == one.shape else True))
    return largest


def _fillers(one: np.ndarray, two: np.ndarray) -> np.ndarray:
    """Find where a large number is the same to the bit on both sides, as masks write (-1e9, the lowest float).

    Such a number is put there, not computed: nothing beside it is rounded to its last place.
    """
    with np.errstate(invalid="ignore"):
        return np.asarray((one == two) & (np.abs(one) >= _FILLER))


def _is_rounding(noise: float, high: float, largest: float, scale: float, eps: float, coarse: float) -> bool:
    """Tell whether an error in float64 is rounding.

    ``noise`` is what rounding costs in the dtype given, ``coarse`` what it costs in a coarser one within float64's run.
    """
    if not np.isfinite(high):
        return False
    if eps == 0:  # whole numbers are not rounded; float32 may still have chosen another of two equal maxima
        return high == 0
    allowed = max(_ALWAYS * largest, _LUCK * noise * _EPS / eps)
    if noise >= 0.1 * largest:  # no digit is sure: zero but for the rounding of what cancels
        allowed = max(allowed, 100 * _EPS * max(scale, 1.0))
    return high <= max(allowed, coarse)


def _same_dtype(ours: object, one: np.dtype, two: np.dtype) -> bool:
    """Tell whether dtypes agree: int32 for torch's int64, from JAX without 64-bit types, is no fault of a port."""
    if isinstance(ours, torch.Tensor):
        one = np.dtype(jax_dtype(ours.dtype))
    return one == two or (not jax.config.read("jax_enable_x64") and jax.dtypes.canonicalize_dtype(one) == two)


def _exact(array: np.ndarray) -> np.ndarray:
    """Return the numbers as wide as there is, whole ones as whole ones."""
    return array.astype(np.int64) if array.dtype.kind in "iub" and array.dtype != np.uint64 else double(array)


def double(array: np.ndarray) -> np.ndarray:
    """Return the numbers in double precision."""
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


def _error(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.asarray(np.abs(ours - theirs), np.float64)
    if ours.dtype.kind in "iu":  # the difference of two whole numbers may be more than they can hold
        error = np.maximum(np.abs(ours.astype(np.float64) - theirs.astype(np.float64)), 1.0)
    error = np.where((ours == theirs) | (np.isnan(ours) & np.isnan(theirs)), 0.0, error)
    return np.where(np.isnan(error), np.inf, error)


def _largest(array: np.ndarray, where: np.ndarray | bool = True) -> float:
    sizes = np.abs(array)
    return float(np.max(sizes, where=np.isfinite(sizes) & where, initial=0.0))


def _ratio(error: float, largest: float) -> float:
    return error / largest if largest > 0 else (0.0 if error == 0 else np.inf)


def _eps(dtype: np.dtype) -> float:
    return 0.0 if dtype.kind in "iub" else float(ml_dtypes.finfo(dtype).eps)


def _ulps(ours: np.ndarray, theirs: np.ndarray, eps: float) -> float | None:
    """Return the largest error in units of the last place of the larger value."""
    if eps == 0:
        return None
    error, size = _error(ours, theirs), np.maximum(np.abs(ours), np.abs(theirs))
    size = np.where(np.isfinite(size) & (size > 0), size, 1.0)
    return float(np.max(np.where(error == 0, 0.0, error / (eps * 2.0 ** np.floor(np.log2(size))))))
