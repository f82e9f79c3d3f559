"""What eager torch asks of values on the CPU, and raises for: singular matrices, probabilities out of range, asserts.

A recording notes each such condition with its evidence, the tensor it is asked of. The check is a primitive that hands
the results of the program on, so that it lives as long as any of them is used. It is lowered for the CPU to a
comparison and a branch that calls back to Python in the bad case only. Other devices are not checked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.extend import core as jex
from jax.interpreters import ad, batching, mlir

from .bounds import Failures
from .context import current_call
from .versions import enable_x64

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class Condition:
    """``holds`` of each element of the evidence, or the error that torch raises."""

    holds: Callable[[Any], Any]
    error: Callable[[np.ndarray], Exception]


def asserted(message: str = "Expected Tensor with single nonzero value, but got zero") -> Condition:
    """A flag that has to be set: ``torch._assert_async``."""
    return Condition(lambda flag: flag != 0, lambda _: RuntimeError(message))


def factorised(name: str, is_matrix: bool) -> Condition:
    """That LAPACK's ``info`` is zero; torch's own check writes the message."""

    def error(info: np.ndarray) -> Exception:
        try:
            infos = torch.from_numpy(np.array(info, np.int32))
            aten._linalg_check_errors(infos, name, is_matrix=is_matrix and info.ndim == 0)
        except RuntimeError as error:
            return error
        return RuntimeError(f"{name}: info {info}")

    return Condition(lambda info: info == 0, error)


def _says(message: str, kind: type[Exception] = RuntimeError) -> Callable[[np.ndarray], Exception]:
    return lambda _: kind(message)


_SVD = Condition(
    lambda a: ~jnp.isnan(a),
    _says(
        "linalg.svd: The algorithm failed to converge because the input matrix contained non-finite values.",
        torch.linalg.LinAlgError,
    ),
)
_EIG = Condition(jnp.isfinite, _says("torch.linalg.eig: input tensor should not contain infs or NaNs."))
_REGULAR = Condition(
    lambda factor: jnp.diagonal(factor, axis1=-2, axis2=-1) != 0,
    _says(
        "cholesky_inverse: A diagonal element is zero, the inversion could not be completed because the input matrix "
        "is singular.",
        torch.linalg.LinAlgError,
    ),
)


def _between(name: str) -> Condition:
    return Condition(lambda p: (p >= 0) & (p <= 1), _says(f"all elements of {name} should be between 0 and 1"))


_PROBABILITY = Condition(
    lambda p: (p >= 0) & (p <= 1), _says("Expected p_in >= 0 && p_in <= 1 to be true, but got false.")
)
_NOT_NEGATIVE = Condition(lambda x: x >= 0, _says("invalid Poisson rate, expected rate to be non-negative"))
_SCALE = Condition(lambda std: std >= 0, _says("normal expects all elements of std >= 0.0"))
_WEIGHTS = Condition(
    lambda p: (p >= 0) & (p < jnp.inf), _says("probability tensor contains either `inf`, `nan` or element < 0")
)
_SUM = Condition(lambda p: p.sum(-1) != 0, _says("invalid multinomial distribution (sum of probabilities <= 0)"))

# The conditions that an op asks of its arguments, by their place.
_REQUIRED: dict[Any, list[tuple[int, Condition]]] = {
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


def reports_failure(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether this is a factorisation that was asked to raise where it fails."""
    return getattr(op, "overloadpacket", None) in _CHECKING and bool(kwargs.get("check_errors"))


@dataclasses.dataclass(frozen=True)
class Check:
    """A condition, and the value of a graph that shows whether it holds."""

    condition: Condition
    evidence: Any  # a value of the graph
    line: str


def required(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[tuple[torch.Tensor, Condition]]:
    """The conditions that an op asks of its arguments."""
    if op is aten.repeat_interleave.Tensor:
        size = kwargs.get("output_size")
        return [(args[0], Condition(lambda n: n.sum() == size, _says("allocated size does not match required size")))]
    if kwargs.get("hermitian"):  # by eigenvalues, which may be NaN
        return []
    asked = [(args[i], condition) for i, condition in _REQUIRED.get(op, ()) if i < len(args)]
    return [(tensor, condition) for tensor, condition in asked if isinstance(tensor, torch.Tensor)]


def watched(checks: Sequence[Check], read: Callable[[Any], Any], results: list[Any]) -> list[Any]:
    """The results of a program, in which these conditions are to hold."""
    call = current_call()
    for check in checks if results else ():
        results = check_p.bind(
            read(check.evidence),
            *results,
            condition=check.condition,
            line=check.line,
            failures=None if call is None else call.failures,
        )
    return results


def _lowered(
    evidence: jax.Array, *results: jax.Array, condition: Condition, line: str, failures: Failures | None
) -> Sequence[jax.Array]:
    def fail(evidence: Any) -> None:
        error = condition.error(np.asarray(evidence))
        located = type(error)(f"{line}: {error}")
        if failures is None:  # in a program of the user's own
            raise located
        failures.add(located)

    with enable_x64():
        jax.lax.cond(condition.holds(evidence).all(), lambda _: None, lambda e: jax.debug.callback(fail, e), evidence)
    return results


def _batched(arrays: Sequence[Any], axes: Sequence[int | None], **params: Any) -> tuple[list[Any], Sequence[Any]]:
    evidence = arrays[0] if axes[0] is None else jnp.moveaxis(arrays[0], axes[0], 0)
    return check_p.bind(evidence, *arrays[1:], **params), axes[1:]


check_p = jex.Primitive("check")
check_p.multiple_results = True
check_p.def_impl(lambda *arrays, **params: jax.jit(lambda *arrays: check_p.bind(*arrays, **params))(*arrays))
check_p.def_abstract_eval(lambda evidence, *results, **params: results)
batching.primitive_batchers[check_p] = _batched
ad.primitive_jvps[check_p] = lambda primals, tangents, **params: (check_p.bind(*primals, **params), tangents[1:])
mlir.register_lowering(check_p, lambda ctx, evidence, *results, **params: results)
mlir.register_lowering(check_p, mlir.lower_fun(_lowered, multiple_results=True), platform="cpu")
