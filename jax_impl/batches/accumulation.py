"""How the outputs of the microbatches become one result."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from ..program.sums import sum_rows, summed, wide
from ..program.trees import PyTree

AccumulatorTree: TypeAlias = Any


@dataclasses.dataclass(frozen=True)
class Accumulator:
    """A way to combine the outputs of the microbatches.

    For outputs ``x_0, ..., x_{n-1}`` it stands for this program::

        carry = init(shapes_and_dtypes_of(x_0))
        for i in range(n):
            carry = update(carry, x_i, i)
        return finalize(carry)

    The four functions get the part of the output that the accumulator stands for in the accumulator tree: an array,
    or a pytree where it stands for a whole subtree.

    With ``remainder="run"`` the last output comes from fewer rows. ``update`` has to take it like the others, and is
    not told: an accumulator whose result depends on the number of rows reads it from the output, as
    :func:`weighted_mean` reads the weight. An output whose own shape follows the rows then arrives in a second shape.

    Gradients: ``update`` runs inside the rematerialised step, so a carry that enters linearly costs nothing, while
    one whose value the derivative needs (a maximum, a product) is kept once for each microbatch.

    After ``optax.microbatching.Accumulator``.

    Attributes:
        init: ``shape_dtype_tree -> carry``; the leaves are ``jax.ShapeDtypeStruct``.
        update: ``(carry, value, index) -> carry``, of the same shapes and dtypes as the carry it got.
        finalize: ``carry -> result``.
        aggregate: ``[rows, ...] -> value``: the outputs of a microbatch's examples as one value; used by
            :func:`micro_vmap` and :func:`micro_grad`.

    Example:
        >>> import jax.numpy as jnp
        >>> from microtome.jax_impl import Accumulator, microbatch
        >>> largest = Accumulator(
        ...     init=lambda x: jnp.full(x.shape, -jnp.inf, x.dtype),
        ...     update=lambda carry, value, index: jnp.maximum(carry, value),
        ...     finalize=lambda carry: carry,
        ...     aggregate=lambda values: values.max(0),
        ... )
        >>> microbatch(jnp.max, 0, 2, largest)(jnp.array([3.0, 9.0, 4.0, 1.0]))
        Array(9., dtype=float32)
    """

    init: Callable[[PyTree], PyTree]
    update: Callable[[PyTree, PyTree, Any], PyTree]
    finalize: Callable[[PyTree], PyTree]
    aggregate: Callable[[PyTree], PyTree]


class AccumulationType(enum.Enum):
    """The accumulators that come with the library.

    An enum, since what they compute depends on the number of rows and microbatches, known only at the call. Floating
    types narrower than 32 bits are accumulated in float32; every result has the dtype of the output, but that integers
    summed over examples are counted in the dtype of ``jnp.sum``.

    After ``optax.microbatching.AccumulationType``, where ``MEAN`` divides by all microbatches, also by those that
    ``num_real_microbatches`` leaves out.
    """

    MEAN = enum.auto()
    """The mean over the rows that ran: each microbatch's output counts by its rows. NaN where none ran; TypeError
    for integer outputs. Sums first and divides at the end."""
    SUM = enum.auto()
    """The sum of the outputs: as by ``+`` in :func:`microbatch`, which joins booleans by "or", and as by ``jnp.sum`` in
    :func:`micro_vmap`, which counts them."""
    RUNNING_MEAN = enum.auto()
    """As ``MEAN``, but keeps the mean of what ran so far, for outputs whose sum would overflow."""
    CONCAT = enum.auto()
    """The outputs joined along axis 0, rows in the order of the batch.

    An output with q entries for each row of its microbatch gives q entries for each row of the batch. An output whose
    length is no multiple of the rows, or of shape ``()``, gives its entries microbatch after microbatch. Rows that
    ``num_real_microbatches`` leaves out are zeros."""


@dataclasses.dataclass(frozen=True, eq=False)
class DividedSum:
    """The sum of ``AccumulationType.SUM``, divided by a number before it is rounded to the dtype of the output."""

    divisor: Any


@dataclasses.dataclass(frozen=True)
class WeightedMean(Accumulator):
    """An Accumulator of ``(value, weight)``; the type tells that weights of 0 need guarding (``guard_weights``)."""


def weighted_mean() -> Accumulator:
    """The accumulator for functions that return ``(value, weight)``, value being a mean under that weight.

    Equivalent to ``fun(batch)``, for a ``fun`` that averages over something else than rows, as a loss averages over
    tokens: of the microbatches' ``(v_k, w_k)`` it makes ``(sum(v_k * w_k) / sum(w_k), sum(w_k))``. What differs:

    * A microbatch of weight 0 adds nothing, to the value and to its derivatives of any order, even where its own
      value or derivative is NaN (the 0/0 of a mean over no tokens).
    * Where all weights are 0 the result is ``(0, 0)`` with zero gradients, so that a training step on nothing leaves
      the parameters alone; the total weight tells.

    A function that returns *sums* needs no weights: use ``(SUM, SUM)`` and divide.

    Memory: one value and one weight, whatever the number of microbatches. To differentiate, the weight is computed
    a second time; in :func:`micro_vmap` differentiation keeps one gradient for each example of a microbatch.

    Shapes: ``value`` is a pytree of float or complex arrays, ``weight`` a real array of shape ``()``, not negative;
    booleans count as 0 and 1. Sums are taken in at least float32, results have the dtypes of the outputs, but that
    integer weights are counted in the dtype of ``jnp.sum``.

    Returns:
        An :class:`Accumulator` for a pair, alone or within an accumulator tree.

    Raises:
        TypeError: At the call, where the output is no such pair or holds integer values.
        ValueError: At the call, where the weight is no array of shape ``()``.

    Example:
        >>> import jax.numpy as jnp
        >>> from microtome.jax_impl import microbatch, weighted_mean
        >>> def loss(tokens, mask):
        ...     return (tokens * mask).sum() / mask.sum(), mask.sum()
        >>> tokens = jnp.array([[1.0, 2.0], [3.0, 4.0]])
        >>> mask = jnp.array([[1.0, 1.0], [1.0, 0.0]])
        >>> microbatch(loss, argnums=(0, 1), microbatch_size=1, accumulator=weighted_mean())(tokens, mask)
        (Array(2., dtype=float32), Array(3., dtype=float32))
    """

    # Sums stay wide, and weights are counted; the result is rounded once, where the accumulator is fitted to outputs.
    def init(pair: PyTree) -> PyTree:
        value, weight = pair
        zeros = lambda x, dtype: jnp.zeros(x.shape, wide(dtype))
        return jax.tree.map(lambda x: zeros(x, x.dtype), value), zeros(weight, summed(weight.dtype))

    def update(carry: PyTree, pair: PyTree, index: Any) -> PyTree:
        total, total_weight = carry
        value, weight = pair
        total = jax.tree.map(lambda t, v: t + _weighted(v, weight, t.dtype), total, value)
        return total, total_weight + weight.astype(total_weight.dtype)

    def finalize(carry: PyTree) -> PyTree:
        total, total_weight = carry
        return _ratio(total, total_weight), total_weight

    def aggregate(pair: PyTree) -> PyTree:
        value, weight = pair
        total_weight = weight.astype(wide(summed(weight.dtype))).sum(0)

        def total(v: jax.Array) -> jax.Array:
            weights = weight.reshape(weight.shape + (1,) * (v.ndim - 1))
            return sum_rows(_weighted(v, weights, wide(v.dtype)), wide(v.dtype))

        return _ratio(jax.tree.map(total, value), total_weight), total_weight

    return WeightedMean(init, update, finalize, aggregate)


def _weighted(value: jax.Array, weight: jax.Array, dtype: Any) -> jax.Array:
    """Multiply a value by its weight; 0 where the weight is, whatever the value."""
    return jnp.where(weight.astype(bool), value.astype(dtype), 0) * weight.astype(jnp.finfo(dtype).dtype)


def _ratio(total: PyTree, weight: jax.Array) -> PyTree:
    """Divide a total by its weight; 0 where the weight is."""
    return jax.tree.map(lambda t: t / jnp.where(weight.astype(bool), weight, 1).astype(t.real.dtype), total)
