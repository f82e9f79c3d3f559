"""A tree of accumulators, fitted to the output of a function."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..program.sums import sum_rows, summed, wide
from ..program.trees import PyTree, dtype_of, flatten, flatten_with_names, outlined, structure
from .accumulation import AccumulationType, Accumulator, AccumulatorTree, DividedSum, WeightedMean, weighted_mean
from .partition import Plan


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


def checked_tree(accumulators: AccumulatorTree) -> AccumulatorTree:
    """Return the tree, ``weighted_mean`` called where it was given itself; TypeError for what is no accumulator."""
    named, treedef = flatten_with_names(accumulators, "accumulator")
    leaves = [weighted_mean() if leaf is weighted_mean else leaf for _, leaf in named]
    for (name, _), leaf in zip(named, leaves, strict=True):
        if not isinstance(leaf, (Accumulator, AccumulationType)):
            raise TypeError(f"{name} must be an AccumulationType or an Accumulator of microtome, got {leaf!r}.")
    return treedef.unflatten(leaves)


def match(accumulators: AccumulatorTree, outputs: PyTree) -> list[tuple[Any, PyTree]]:
    """Pair each accumulator with the part of the outputs it stands for; ValueError where the trees do not fit."""
    leaves, treedef = flatten(accumulators)
    try:
        return list(zip(leaves, treedef.flatten_up_to(outputs), strict=True))
    except ValueError:
        raise ValueError(
            "the accumulator tree must be a prefix of the output's tree. "
            f"Accumulators: {_starred(accumulators)}; output: {_starred(outputs)}. One accumulator alone fits every "
            "output."
        ) from None


def _starred(tree: PyTree) -> PyTree:
    """Return the tree as its user would write it, for messages."""
    return jax.tree.map(lambda _: "*", tree)


def fit(accumulators: AccumulatorTree, plan: Plan, outputs: PyTree, per_example: bool) -> Accumulator:
    """Return one accumulator for the whole output, a pytree whose leaves are described by :class:`Output`.

    ``per_example`` tells that outputs are stacked over examples: ``aggregate`` is then called before ``update``.
    """
    treedef = structure(accumulators)
    parts = [_part(kind, plan, part, per_example) for kind, part in match(accumulators, outputs)]

    def each(name: str, *trees: PyTree) -> list[Any]:
        return [getattr(part, name)(*values) for part, *values in zip(parts, *trees, strict=True)]

    return Accumulator(
        init=lambda shapes: each("init", treedef.flatten_up_to(shapes)),
        update=lambda carry, value, i: each("update", carry, treedef.flatten_up_to(value), [i] * len(parts)),
        finalize=lambda carry: treedef.unflatten(each("finalize", carry)),
        aggregate=lambda values: treedef.unflatten(each("aggregate", treedef.flatten_up_to(values))),
    )


def _checked_update(update: Callable[..., PyTree], carry: PyTree, value: PyTree, index: Any) -> PyTree:
    new = update(carry, value, index)
    before, treedef = flatten_with_names(carry, "carry")
    after, new_treedef = flatten_with_names(new, "carry")
    if treedef != new_treedef:
        raise TypeError(
            f"the accumulator's update must return a carry like the one it got, {outlined(carry)}; got {outlined(new)}."
        )
    for (name, old), (_, leaf) in zip(before, after, strict=True):
        if jnp.shape(old) != jnp.shape(leaf) or dtype_of(old) != dtype_of(leaf):
            raise TypeError(
                f"the accumulator's update must keep shapes and dtypes, but {name} was "
                f"{jnp.dtype(dtype_of(old)).name}{list(jnp.shape(old))} and became "
                f"{jnp.dtype(dtype_of(leaf)).name}{list(jnp.shape(leaf))}. Make init return what update returns."
            )
    return new


def _part(kind: Any, plan: Plan, outputs: PyTree, per_example: bool) -> Accumulator:
    """Return the accumulator for one leaf of the accumulator tree."""
    if isinstance(kind, WeightedMean):
        _check_pair(outputs, per_example)
        kind = dataclasses.replace(kind, finalize=functools.partial(_rounded_pair, kind.finalize, outputs))
    if isinstance(kind, Accumulator):
        return dataclasses.replace(kind, update=functools.partial(_checked_update, kind.update))
    described, treedef = flatten(outputs)
    make: Callable[[Plan, Output, bool], Accumulator] = (
        functools.partial(_sum, divisor=kind.divisor)
        if isinstance(kind, DividedSum)
        else {
            AccumulationType.SUM: _sum,
            AccumulationType.MEAN: _mean,
            AccumulationType.RUNNING_MEAN: _running_mean,
            AccumulationType.CONCAT: _concat,
        }[kind]
    )
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
        raise TypeError(f"weighted_mean() needs a pair (value, weight), got {outlined(outputs)}.")
    value, weight = outputs
    for out in jax.tree.leaves(value):
        if not jnp.issubdtype(out.dtype, jnp.inexact):
            raise TypeError(f"{out.path} is {out.dtype.name}, which has no weighted mean. Cast it to a float first.")
    if not isinstance(weight, Output):
        raise TypeError(f"the weight of weighted_mean() must be one array, got {outlined(weight)}.")
    if jnp.issubdtype(weight.dtype, jnp.complexfloating):
        raise TypeError(f"{weight.path} is {weight.dtype.name}; a weight must be real.")
    if len(weight.shape) != per_example:
        raise ValueError(
            f"{weight.path} must be a weight of shape (), got {weight.shape[per_example:]}. Sum it over the rows, and "
            "divide the value by that sum."
        )


def _rounded_pair(finalize: Callable[[PyTree], PyTree], outputs: PyTree, carry: PyTree) -> PyTree:
    """Return :func:`weighted_mean`'s result, which is wide, in the dtypes of the outputs; weights are counted."""
    value, weight = finalize(carry)
    value = jax.tree.map(lambda x, out: x.astype(out.dtype), value, outputs[0])
    return value, weight.astype(summed(outputs[1].dtype))


def _sum(plan: Plan, out: Output, per_example: bool, divisor: Any = None) -> Accumulator:
    # What microbatches return is added as by `+`, which joins booleans by "or"; examples are counted, as by `sum`.
    result = summed(out.dtype) if per_example and not out.zero else out.dtype
    dtype = wide(result)
    return Accumulator(
        init=lambda x: jnp.zeros(x.shape, dtype),
        update=lambda carry, value, i: carry + value.astype(dtype),
        finalize=lambda carry: (carry if divisor is None else carry / jnp.asarray(divisor, dtype)).astype(result),
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
    dtype = wide(out.dtype)
    # Examples are summed before they get here. Otherwise a microbatch brings the mean of its rows; where all have
    # the same number it is enough to count microbatches.
    by_rows = per_example or plan.left
    count = plan.rows_run if by_rows else plan.count_run

    def update(carry: jax.Array, value: jax.Array, index: Any) -> jax.Array:
        value = value.astype(dtype)
        return carry + (value * plan.rows_of(index) if plan.left and not per_example else value)

    return dataclasses.replace(
        total,
        update=update,
        finalize=lambda carry: (carry / jnp.asarray(count, jnp.finfo(dtype).dtype)).astype(out.dtype),
    )


def _running_mean(plan: Plan, out: Output, per_example: bool) -> Accumulator:
    if out.zero:
        return _sum(plan, out, per_example)
    _check_mean(out)
    dtype = wide(out.dtype)
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
    """Make an accumulator that writes rows where they belong in the result: reordering at the end would copy it."""
    length, *rest = out.shape or (1,)
    left_shape = out.left_shape or (1,)
    left = left_shape[0] if plan.left else 0
    if plan.left and list(left_shape[1:]) != rest:
        raise ValueError(
            f"{out.path} cannot be joined by CONCAT: it has shape {out.shape} for a full microbatch and "
            f"{out.left_shape} for the rows left over, which differ in more than axis 0. Return the rows on axis 0, or "
            'use remainder="error".'
        )
    each, over = divmod(length, plan.size)
    by_rows = bool(out.shape) and not over and (not plan.left or left == each * plan.left)
    if by_rows and plan.partition == "strided" and plan.full > 1:
        return _concat_strided(plan, out, each, left)

    def update(carry: jax.Array, value: jax.Array, index: Any) -> jax.Array:
        rows = value.reshape(-1, *rest)[: len(carry)]  # of an empty batch, a microbatch that does not run
        return jax.lax.dynamic_update_slice_in_dim(carry, rows, index * length, 0)

    return Accumulator(
        init=lambda x: jnp.zeros((plan.full * length + left, *rest), out.dtype),
        update=update,
        finalize=lambda carry: carry,
        aggregate=lambda values: values,
    )


def _concat_strided(plan: Plan, out: Output, each: int, left: int) -> Accumulator:
    """Make an accumulator of strided rows: row j of microbatch k is row ``j * full + k``; left-over rows are last."""
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
