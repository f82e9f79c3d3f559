"""What eager torch asks of values on the CPU, and raises for: singular matrices, probabilities out of range, asserts.

A recording notes each such condition with its evidence, the tensor it is asked of.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import torch
from jax import Array

from .checks import Condition, check_p
from .signatures import Arguments, Keywords

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class _Asked:
    """``holds`` of each element of the evidence, or the error that torch raises."""

    holds: Callable[[Array], Any]
    error: Callable[[int, int | None], Exception]


OUTSIDE_OF_SUPPORT = "outside of what a distribution takes (validate_args=False turns the check off)"


def asserted(message: str = "Expected Tensor with single nonzero value, but got zero") -> Condition:
    """Return the condition that a flag is set: ``torch._assert_async``."""
    kind = ValueError if message.startswith(OUTSIDE_OF_SUPPORT) else RuntimeError
    return _Asked(lambda flag: flag != 0, _says(message, kind))


def factorised(name: str, is_matrix: bool) -> Condition:
    """Return the condition that LAPACK's ``info`` is zero; torch's own check writes the message."""

    def error(info: int, place: int | None) -> Exception:
        infos = torch.tensor(info if place is None else [0] * place + [info], dtype=torch.int32)
        try:
            aten._linalg_check_errors(infos, name, is_matrix=is_matrix and place is None)
        except RuntimeError as error:
            return error
        return RuntimeError(f"{name}: info {info}")

    return _Asked(lambda info: info == 0, error)


def _says(message: str, kind: type[Exception] = RuntimeError) -> Callable[[int, int | None], Exception]:
    return lambda _, place: kind(message)


_SVD = _Asked(
    lambda a: ~jnp.isnan(a),
    _says(
        "linalg.svd: The algorithm failed to converge because the input matrix contained non-finite values.",
        torch.linalg.LinAlgError,
    ),
)
_EIG = _Asked(jnp.isfinite, _says("torch.linalg.eig: input tensor should not contain infs or NaNs."))
_REGULAR = _Asked(
    lambda factor: jnp.diagonal(factor, axis1=-2, axis2=-1) != 0,
    _says(
        "cholesky_inverse: A diagonal element is zero, the inversion could not be completed because the input matrix "
        "is singular.",
        torch.linalg.LinAlgError,
    ),
)


def _between(name: str) -> Condition:
    return _Asked(lambda p: (p >= 0) & (p <= 1), _says(f"all elements of {name} should be between 0 and 1"))


_PROBABILITY = _Asked(
    lambda p: (p >= 0) & (p <= 1), _says("Expected p_in >= 0 && p_in <= 1 to be true, but got false.")
)
_NOT_NEGATIVE = _Asked(lambda x: x >= 0, _says("invalid Poisson rate, expected rate to be non-negative"))
_SCALE = _Asked(lambda std: std >= 0, _says("normal expects all elements of std >= 0.0"))
_WEIGHTS = _Asked(
    lambda p: (p >= 0) & (p < jnp.inf), _says("probability tensor contains either `inf`, `nan` or element < 0")
)
_SUM = _Asked(lambda p: p.sum(-1) != 0, _says("invalid multinomial distribution (sum of probabilities <= 0)"))

_DIVISOR = _Asked(lambda divisor: divisor != 0, _says("ZeroDivisionError: whole numbers are divided by zero"))
_DIVIDING = (aten.floor_divide, aten.remainder, aten.fmod)

# The conditions that an op asks of its arguments, by their place.
_REQUIRED: dict[object, list[tuple[int, Condition]]] = {
    aten.bernoulli.default: [(0, _PROBABILITY)],
    aten.bernoulli.Tensor: [(1, _PROBABILITY)],
    aten.poisson.default: [(0, _NOT_NEGATIVE)],
    aten.normal.Tensor_Tensor: [(1, _SCALE)],
    aten.normal.float_Tensor: [(1, _SCALE)],
    aten.multinomial.default: [(0, _WEIGHTS), (0, _SUM)],
    aten._linalg_svd.default: [(0, _SVD)],
    aten.linalg_pinv.atol_rtol_tensor: [(0, _SVD)],
    aten.linalg_eig.default: [(0, _EIG)],
    aten.linalg_eigvals.default: [(0, _EIG)],
    aten._linalg_eigvals.default: [(0, _EIG)],
    aten.cholesky_inverse.default: [(0, _REGULAR)],
    aten.binary_cross_entropy.default: [(0, _between("input")), (1, _between("target"))],
}
_CHECKING = (aten.linalg_cholesky_ex, aten.linalg_inv_ex, aten.linalg_lu_factor_ex, aten._linalg_solve_ex)


def reports_failure(op: object, args: Sequence[object], kwargs: dict[str, object]) -> bool:
    """Tell whether this is a factorisation that was asked to raise where it fails."""
    return getattr(op, "overloadpacket", None) in _CHECKING and bool(kwargs.get("check_errors"))


@dataclasses.dataclass(frozen=True)
class Check:
    """A condition, and the value of a graph that shows whether it holds."""

    condition: Condition
    evidence: Any  # a value of the graph
    line: str


def required(op: object, args: Arguments, kwargs: Keywords) -> list[tuple[torch.Tensor, Condition]]:
    """Return the conditions that an op asks of its arguments."""
    if op is aten.repeat_interleave.Tensor:
        size = kwargs.get("output_size")
        return [(args[0], _Asked(lambda n: n.sum(-1) == size, _says("allocated size does not match required size")))]
    if _divides_integers(op, args, kwargs):
        if isinstance(args[1], torch.Tensor):
            return [(args[1], _DIVISOR)]
        if args[1] == 0 and args[0].numel():
            raise _DIVISOR.error(0, None)
    if kwargs.get("hermitian"):  # by eigenvalues, which may be NaN
        return []
    asked = [(args[i], condition) for i, condition in _REQUIRED.get(op, ()) if i < len(args)]
    return [(tensor, condition) for tensor, condition in asked if isinstance(tensor, torch.Tensor)]


def _divides_integers(op: object, args: Sequence[object], kwargs: dict[str, object]) -> bool:
    packet = getattr(op, "overloadpacket", None)
    if packet not in _DIVIDING and not (packet is aten.div and kwargs.get("rounding_mode")):
        return False
    return not any(x.is_floating_point() if isinstance(x, torch.Tensor) else isinstance(x, float) for x in args[:2])


def watched(checks: Sequence[Check], read: Callable[[Any], Array], results: list[Array]) -> list[Array]:
    """Return the results of a program, in which these conditions are to hold."""
    for check in checks if results else ():
        results = check_p.bind(read(check.evidence), *results, condition=check.condition, line=check.line)
    return results
