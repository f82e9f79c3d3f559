"""How the outputs of the microbatches become one result: the accumulators, and their fit to a function's output."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from .partition import Plan, PyTree

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
    types narrower than 32 bits are accumulated in float32; every result has the dtype of the output.

    After ``optax.microbatching.AccumulationType``, where ``MEAN`` divides by all microbatches, also by those that
    ``num_real_microbatches`` leaves out.
    """

    MEAN = enum.auto()
    """The mean over the rows that ran: each microbatch's output counts by its rows. NaN where none ran; TypeError
    for integer outputs. Sums first and divides at the end."""
    SUM = enum.auto()
    """The sum of the outputs. Booleans are joined by "or" in :func:`microbatch` and counted in :func:`micro_vmap`."""
    RUNNING_MEAN = enum.auto()
    """As ``MEAN``, but keeps the mean of what ran so far, for outputs whose sum would overflow."""
    CONCAT = enum.auto()
    """The outputs joined along axis 0, rows in the order of the batch.

    An output with q entries for each row of its microbatch gives q entries for each row of the batch. An output whose
    length is no multiple of the rows, or of shape ``()``, gives its entries microbatch after microbatch. Rows that
    ``num_real_microbatches`` leaves out are zeros."""


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
    booleans count as 0 and 1. Sums are taken in at least float32, results have the dtypes of the outputs.

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

    def init(pair: PyTree) -> PyTree:
        # The empty arrays remember the dtypes of the output for finalize.
        sums = jax.tree.map(lambda x: jnp.zeros(x.shape, _wide(x.dtype)), tuple(pair))
        return sums, jax.tree.map(lambda x: jnp.zeros((0,), _summed(x.dtype)), tuple(pair))

    def update(carry: PyTree, pair: PyTree, index: Any) -> PyTree:
        (total, total_weight), dtypes = carry
        value, weight = pair
        total = jax.tree.map(lambda t, v: t + _weighted(v, weight, t.dtype), total, value)
        return (total, total_weight + weight.astype(total_weight.dtype)), dtypes

    def finalize(carry: PyTree) -> PyTree:
        sums, dtypes = carry
        return jax.tree.map(lambda x, like: x.astype(like.dtype), (_ratio(*sums), sums[1]), dtypes)

    def aggregate(pair: PyTree) -> PyTree:
        value, weight = pair
        total_weight = weight.astype(_wide(weight.dtype)).sum(0)

        def total(v: jax.Array) -> jax.Array:
            weights = weight.reshape(weight.shape + (1,) * (v.ndim - 1))
            return sum_rows(_weighted(v, weights, _wide(v.dtype)), _wide(v.dtype))

        mean = _ratio(jax.tree.map(total, value), total_weight)
        back = jax.tree.map(lambda m, v: m.astype(v.dtype), mean, value)
        return back, total_weight.astype(_summed(weight.dtype))

    return WeightedMean(init, update, finalize, aggregate)


def _weighted(value: jax.Array, weight: jax.Array, dtype: Any) -> jax.Array:
    """``value * weight``, and 0 where the weight is, whatever the value."""
    return jnp.where(weight != 0, value.astype(dtype), 0) * weight.astype(jnp.finfo(dtype).dtype)


def _ratio(total: PyTree, weight: jax.Array) -> PyTree:
    """``total / weight``, and 0 where the weight is."""
    return jax.tree.map(lambda t: t / jnp.where(weight != 0, weight, 1).astype(t.real.dtype), total)


def _wide(dtype: Any) -> Any:
    """The dtype to accumulate in: bfloat16 stops counting ones at 256, float32 holds its sums exactly enough."""
    if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32:
        return jnp.dtype(jnp.float32)
    return _summed(dtype)


def _summed(dtype: Any) -> Any:
    """The dtype of a sum over examples: the same, but booleans are counted."""
    return jax.dtypes.canonicalize_dtype(int) if dtype == jnp.bool_ else jnp.dtype(dtype)


def sum_rows(values: jax.Array, dtype: Any, product: bool = False) -> jax.Array:
    """``values.sum(axis=0, dtype=dtype)``, by the faster of two ways.

    XLA's CPU reduction over a leading axis takes 10 to 50 times as long as contracting it with a vector of ones (195
    against 3 ms for [64, 512, 512]). Where ``product`` tells that the values are a bare matrix product with the
    examples as its batch axis, the reduction is better: XLA merges the two, and the values never exist.
    """
    if product or values.ndim < 2 or not jnp.issubdtype(values.dtype, jnp.floating):
        return jnp.sum(values, axis=0, dtype=dtype)
    ones = jnp.ones(values.shape[0], values.dtype)
    dimensions = (((0,), (0,)), ((), ()))
    return jax.lax.dot_general(
        ones, values, dimensions, precision=jax.lax.Precision.HIGHEST, preferred_element_type=dtype
    )


@dataclasses.dataclass(frozen=True)
class Output:
    """One array among the outputs of a microbatch.

    ``left_shape`` is its shape from the smaller last microbatch. ``product`` marks a bare product (:func:`sum_rows`),
    ``zero`` the gradient of an integer, zero by definition.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    left_shape: tuple[int, ...] | None = None
    product: bool = False
    zero: bool = False


def check_tree(accumulators: AccumulatorTree) -> None:
    """Raise a TypeError unless every leaf is an accumulator."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(accumulators)[0]:
        if not isinstance(leaf, (Accumulator, AccumulationType)):
            raise TypeError(
                f"accumulator{jax.tree_util.keystr(path)} must be an AccumulationType or an Accumulator of microtome, "
                f"got {leaf!r}."
            )


def match(accumulators: AccumulatorTree, outputs: PyTree) -> list[tuple[Any, PyTree]]:
    """Each accumulator with the part of the outputs it stands for; a ValueError where the trees do not fit."""
    leaves, treedef = jax.tree.flatten(accumulators)
    try:
        return list(zip(leaves, treedef.flatten_up_to(outputs), strict=True))
    except ValueError as error:
        raise ValueError(
            "the accumulator tree must be a prefix of the output's tree. "
            f"Accumulators: {treedef}; output: {jax.tree.structure(outputs)}. {error}"
        ) from None


def bind(accumulators: AccumulatorTree, plan: Plan, outputs: PyTree, per_example: bool) -> Accumulator:
    """One accumulator for the whole output, a pytree whose leaves are described by :class:`Output`.

    ``per_example`` tells that outputs are stacked over examples: ``aggregate`` is then called before ``update``.
    """
    treedef = jax.tree.structure(accumulators)
    parts = [_part(kind, plan, part, per_example) for kind, part in match(accumulators, outputs)]

    def each(name: str, *trees: PyTree) -> list[Any]:
        return [getattr(part, name)(*values) for part, *values in zip(parts, *trees, strict=True)]

    return Accumulator(
        init=lambda shapes: each("init", treedef.flatten_up_to(shapes)),
        update=lambda carry, value, i: each("update", carry, treedef.flatten_up_to(value), [i] * len(parts)),
        finalize=lambda carry: treedef.unflatten(each("finalize", carry)),
        aggregate=lambda values: treedef.unflatten(each("aggregate", treedef.flatten_up_to(values))),
    )


def _part(kind: Any, plan: Plan, outputs: PyTree, per_example: bool) -> Accumulator:
    """The accumulator for one leaf of the accumulator tree."""
    if isinstance(kind, WeightedMean):
        _check_pair(outputs, per_example)
    if isinstance(kind, Accumulator):
        return kind
    described, treedef = jax.tree.flatten(outputs)
    make = {
        AccumulationType.SUM: _sum,
        AccumulationType.MEAN: _mean,
        AccumulationType.RUNNING_MEAN: _running_mean,
        AccumulationType.CONCAT: _concat,
    }[kind]
    if kind is not AccumulationType.CONCAT and not per_example:
        for out in described:
            if out.left_shape not in (None, out.shape):
                raise ValueError(
                    f"{out.path} has shape {out.shape} from a full microbatch and {out.left_shape} from the rows left "
                    f"over, so {kind.name} cannot join them. Use CONCAT for what has one entry for each row."
                )
    leaves = [make(plan, out, per_example) for out in described]

    def each(name: str, *columns: Sequence[Any]) -> PyTree:
        return treedef.unflatten([getattr(leaf, name)(*values) for leaf, *values in zip(leaves, *columns, strict=True)])

    return Accumulator(
        init=lambda shapes: each("init", jax.tree.leaves(shapes)),
        update=lambda carry, value, i: each(
            "update", treedef.flatten_up_to(carry), jax.tree.leaves(value), [i] * len(leaves)
        ),
        finalize=lambda carry: each("finalize", treedef.flatten_up_to(carry)),
        aggregate=lambda values: each("aggregate", jax.tree.leaves(values)),
    )


def _check_pair(outputs: PyTree, per_example: bool) -> None:
    if not isinstance(outputs, (tuple, list)) or len(outputs) != 2:
        raise TypeError(f"weighted_mean() needs a pair (value, weight), got {jax.tree.structure(outputs)}.")
    value, weight = outputs
    for out in jax.tree.leaves(value):
        if not jnp.issubdtype(out.dtype, jnp.inexact):
            raise TypeError(f"{out.path} is {out.dtype.name}, which has no weighted mean. Cast it to a float first.")
    if not isinstance(weight, Output):
        raise TypeError(f"the weight of weighted_mean() must be one array, got {jax.tree.structure(weight)}.")
    if jnp.issubdtype(weight.dtype, jnp.complexfloating):
        raise TypeError(f"{weight.path} is {weight.dtype.name}; a weight must be real.")
    if len(weight.shape) != per_example:
        raise ValueError(
            f"{weight.path} must be a weight of shape (), got {weight.shape[per_example:]}. Sum it over the rows, and "
            "divide the value by that sum."
        )


def _sum(plan: Plan, out: Output, per_example: bool) -> Accumulator:
    # A boolean is joined by "or" where a microbatch returns it, as `+` does; over examples it is a count.
    counts = per_example or out.dtype != jnp.bool_
    dtype = _wide(out.dtype) if counts else out.dtype
    result = _summed(out.dtype) if counts else out.dtype
    return Accumulator(
        init=lambda x: jnp.zeros(x.shape, dtype),
        update=lambda carry, value, i: carry + value.astype(dtype),
        finalize=lambda carry: carry.astype(result),
        aggregate=lambda values: sum_rows(values, dtype, out.product),
    )


def _check_mean(out: Output) -> None:
    if not jnp.issubdtype(out.dtype, jnp.inexact):
        raise TypeError(
            f"{out.path} is {out.dtype.name}, which has no mean of its own dtype. Use SUM or CONCAT for it, or cast it "
            "to a float first."
        )


def _mean(plan: Plan, out: Output, per_example: bool) -> Accumulator:
    total = _sum(plan, out, per_example)
    if out.zero:
        return total
    _check_mean(out)
    dtype = _wide(out.dtype)
    # Examples are summed before they get here. Otherwise a microbatch brings the mean of its rows; where all have
    # the same number it is enough to count microbatches.
    by_rows = per_example or plan.left
    count = plan.rows_run if by_rows else plan.count_run

    def update(carry: jax.Array, value: jax.Array, index: Any) -> jax.Array:
        value = value.astype(dtype)
        return carry + (value * plan.rows_of(index) if plan.left and not per_example else value)

    return dataclasses.replace(total, update=update, finalize=lambda carry: (carry / count).astype(out.dtype))


def _running_mean(plan: Plan, out: Output, per_example: bool) -> Accumulator:
    if out.zero:
        return _sum(plan, out, per_example)
    _check_mean(out)
    dtype = _wide(out.dtype)
    real = jnp.finfo(dtype).dtype

    def update(carry: jax.Array, value: jax.Array, index: Any) -> jax.Array:
        rows = plan.rows_of(index)
        old = jnp.asarray(index, real) * plan.size / (jnp.asarray(index, real) * plan.size + rows)
        return carry * old + value.astype(dtype) * (1 - old)

    def finalize(carry: jax.Array) -> jax.Array:
        return jnp.where(plan.rows_run == 0, jnp.nan, carry).astype(out.dtype)

    return Accumulator(
        init=lambda x: jnp.zeros(x.shape, dtype),
        update=update,
        finalize=finalize,
        aggregate=lambda values: sum_rows(values, dtype, out.product) / values.shape[0],
    )


def _concat(plan: Plan, out: Output, per_example: bool) -> Accumulator:
    """Rows are written where they belong in the result; reordering them at the end would copy it."""
    length, *rest = out.shape or (1,)
    left_shape = out.left_shape or (1,)
    left = left_shape[0] if plan.left else 0
    each, over = divmod(length, plan.size)
    by_rows = bool(out.shape) and not over and (not plan.left or left == each * plan.left)
    if by_rows and plan.partition == "strided" and plan.full > 1:
        return _concat_strided(plan, out, each, left)

    def update(carry: jax.Array, value: jax.Array, index: Any) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(carry, value.reshape(-1, *rest), index * length, 0)

    return Accumulator(
        init=lambda x: jnp.zeros((plan.full * length + left, *rest), out.dtype),
        update=update,
        finalize=lambda carry: carry,
        aggregate=lambda values: values,
    )


def _concat_strided(plan: Plan, out: Output, each: int, left: int) -> Accumulator:
    """Row j of microbatch k is row ``j * full + k`` of the batch; the rows left over stand at the end."""
    rest = out.shape[1:]
    head = plan.full * plan.size * each

    def update(carry: tuple[jax.Array, ...], value: jax.Array, index: Any) -> tuple[jax.Array, ...]:
        if isinstance(index, int) and index == plan.full:
            return carry[0], value
        column = value.reshape(plan.size, each, *rest)
        return jax.lax.dynamic_update_index_in_dim(carry[0], column, index, 1), *carry[1:]

    def init(x: PyTree) -> tuple[jax.Array, ...]:
        rows = jnp.zeros((plan.size, plan.full, each, *rest), out.dtype)
        return (rows, jnp.zeros((left, *rest), out.dtype)) if left else (rows,)

    def finalize(carry: tuple[jax.Array, ...]) -> jax.Array:
        rows = carry[0].reshape(head, *rest)
        return jnp.concatenate([rows, carry[1]]) if left else rows

    return Accumulator(init, update, finalize, lambda values: values)
