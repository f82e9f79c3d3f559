"""What a program asks of its values while it runs, and the error that it raises where they differ.

A check is a primitive that hands results of the program on, so that it lives as long as any of them is used. In the
programs that the bridge compiles, ``call/failures.py`` makes what failed an output. In a program of the user's own,
which has no output for it, it is lowered for the CPU to a comparison and a branch that calls back to Python in the bad
case only. Other devices are not checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, SupportsInt

import jax
import jax.numpy as jnp
from jax.extend import core as jex
from jax.interpreters import ad, batching, mlir

from ..base.versions import enable_x64


class Condition(Protocol):
    """``holds`` of each element of the evidence, or of all together; else an error."""

    def holds(self, evidence: jax.Array, /) -> jax.Array:
        """Tell for each element of the evidence whether the condition holds."""

    def error(self, value: int, place: int | None, /) -> Exception:
        """Return the error for the first element that is wrong: a whole number, and its place if there are several."""


def raised(condition: Condition, line: str, value: int, place: int | None) -> Exception:
    """Return the error of a check, with the user's line."""
    error = condition.error(value, place)
    return type(error)(f"{line}: {error}")


def first_failure(condition: Condition, evidence: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return whether the condition fails, the place of the first wrong element, and that element if it is an integer.

    The place counts along the elements in their order. An element that is no integer stands in no message.
    """
    wrong = ~condition.holds(evidence).reshape(-1)
    count = jnp.asarray(wrong.size, jnp.int64)
    places = jnp.where(wrong, jnp.arange(wrong.size), count)
    # Both in one reduction: XLA makes a vectorised loop of it, with no memory. For one alone it writes out its operand.
    least = lambda one, two: (jax.lax.min(one[0], two[0]), one[1] | two[1])
    place, failed = jax.lax.reduce((places, wrong), (count, jnp.asarray(False)), least, (0,))
    if wrong.size != evidence.size or not evidence.size or not jnp.issubdtype(evidence.dtype, jnp.integer):
        return failed, place, jnp.zeros((), jnp.int64)
    return failed, place, jax.lax.dynamic_index_in_dim(evidence.reshape(-1), place, keepdims=False).astype(jnp.int64)


def _lowered(evidence: jax.Array, *results: jax.Array, condition: Condition, line: str) -> Sequence[jax.Array]:
    def fail(place: SupportsInt, value: SupportsInt) -> None:
        raise raised(condition, line, int(value), int(place) if evidence.ndim else None)

    with enable_x64():  # the evidence may be 64-bit in a program that JAX lowers in its 32-bit mode
        failed, *found = first_failure(condition, evidence)
        jax.lax.cond(failed, lambda *found: jax.debug.callback(fail, *found), lambda *_: None, *found)
    return results


def _batched(
    arrays: Sequence[jax.Array], axes: Sequence[int | None], **params: object
) -> tuple[list[jax.Array], Sequence[object]]:
    evidence = arrays[0] if axes[0] is None else jnp.moveaxis(arrays[0], axes[0], 0)
    return check_p.bind(evidence, *arrays[1:], **params), axes[1:]


def _jvp(
    primals: Sequence[jax.Array], tangents: Sequence[object], **params: object
) -> tuple[list[jax.Array], Sequence[object]]:
    return check_p.bind(*primals, **params), tangents[1:]


check_p = jex.Primitive("check")
check_p.multiple_results = True
check_p.def_impl(lambda *arrays, **params: jax.jit(lambda *arrays: check_p.bind(*arrays, **params))(*arrays))
check_p.def_abstract_eval(lambda evidence, *results, **params: results)
batching.primitive_batchers[check_p] = _batched
ad.primitive_jvps[check_p] = _jvp
mlir.register_lowering(check_p, lambda ctx, evidence, *results, **params: results)
mlir.register_lowering(check_p, mlir.lower_fun(_lowered, multiple_results=True), platform="cpu")
