"""How the rows of a batch are dealt out to microbatches: sizes, which rows go where, and how one microbatch is read."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..program.trees import PyTree, as_array, flatten_with_names, integer, normalized_axis

REMAINDERS = ("error", "run")
PARTITIONS = ("strided", "contiguous")


@dataclasses.dataclass(frozen=True)
class Options:
    """The choices that every microbatching transform shares, checked when the function is wrapped."""

    microbatch_size: int | None
    remainder: str
    partition: str
    num_real_microbatches: int | jax.Array | None

    @classmethod
    def checked(cls, microbatch_size: Any, remainder: Any, partition: Any, num_real_microbatches: Any) -> Options:
        """Return the options, or raise the error that names the one at fault."""
        for name, value, allowed in (("remainder", remainder, REMAINDERS), ("partition", partition, PARTITIONS)):
            if value not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}.")
        size = microbatch_size
        if size is not None:
            size = integer("microbatch_size", size, "a positive int, or None for a single microbatch")
            if size < 1:
                raise ValueError(f"microbatch_size must be positive, got {size}. Pass None for a single microbatch.")
        return cls(size, remainder, partition, _checked_real(num_real_microbatches))

    def plan(self, rows: int) -> Plan:
        """Return how a batch of so many rows is cut."""
        # An empty batch has microbatches too: of one row, or of the size asked for, and none of them.
        size = max(rows, 1) if self.microbatch_size is None else self.microbatch_size
        if rows % size and self.remainder == "error":
            raise ValueError(
                f"batch_size={rows} must be divisible by microbatch_size={size}: {rows % size} rows are left over. "
                "Pass remainder='run' to run them as a smaller microbatch, or choose a size that divides the batch."
            )
        if rows < size and rows:
            size = rows  # remainder="run": one microbatch holds all rows
        plan = Plan(rows, size, self.partition, self.num_real_microbatches)
        if isinstance(plan.real, int) and plan.real > plan.count:
            raise ValueError(
                f"num_real_microbatches={plan.real} exceeds the number of microbatches, {plan.count}: "
                f"batch_size={rows} with microbatch_size={size}."
            )
        return plan


def _checked_real(real: Any) -> int | jax.Array | None:
    rule = "an int or an integer array of shape ()"
    if real is None:
        return None
    if not hasattr(real, "dtype") or isinstance(real, np.generic):
        real = integer("num_real_microbatches", real, rule)
        if real < 0:
            raise ValueError(f"num_real_microbatches must not be negative, got {real}.")
        return real
    if real.shape != () or not jnp.issubdtype(real.dtype, jnp.integer):
        raise TypeError(f"num_real_microbatches must be {rule}, got {real.dtype.name}{list(real.shape)}.")
    return jnp.asarray(real)


@dataclasses.dataclass(frozen=True)
class Plan:
    """``full`` microbatches of ``size`` rows, then one of the ``left`` rows that remain, if any do.

    ``real`` is how many of them run: a Python int, a traced integer, or None for all.
    """

    rows: int
    size: int
    partition: str = "strided"
    real: int | jax.Array | None = None

    @property
    def full(self) -> int:
        """The number of microbatches that hold ``size`` rows."""
        return self.rows // self.size

    @property
    def left(self) -> int:
        """The rows of the smaller last microbatch; 0 where there is none."""
        return self.rows % self.size

    @property
    def count(self) -> int:
        """The number of microbatches, the smaller one included."""
        return self.full + bool(self.left)

    @property
    def count_run(self) -> int | jax.Array:
        """The number of microbatches that run."""
        if self.real is None:
            return self.count
        return self.real if isinstance(self.real, int) else jnp.clip(self.real, 0, self.count)

    @property
    def rows_run(self) -> int | jax.Array:
        """The rows in the microbatches that run."""
        count = self.count_run
        if isinstance(count, int):
            return min(count * self.size, self.rows)
        return jnp.minimum(count * self.size, self.rows)

    def rows_of(self, index: int | jax.Array) -> int | jax.Array:
        """Return the number of rows in microbatch ``index``."""
        # Full microbatches run in the scan (a traced index), the smaller one after it (a Python int).
        return self.left if isinstance(index, int) and index == self.full else self.size

    def take(self, leaf: jax.Array, index: int | jax.Array, axis: int) -> jax.Array:
        """Return microbatch ``index`` of one array, cut along ``axis``."""
        if isinstance(index, int) and index == self.full:
            return jax.lax.slice_in_dim(leaf, self.rows - self.left, None, axis=axis)
        if self.full == 1:
            return jax.lax.slice_in_dim(leaf, 0, self.size, axis=axis)
        if self.partition == "contiguous":
            return jax.lax.dynamic_slice_in_dim(leaf, index * self.size, self.size, axis)
        # XLA reads the rows straight from `leaf`: neither the head nor the split view is stored, so temporary memory
        # does not grow with the batch (scanning over the transposed batch would copy it: measured).
        head = jax.lax.slice_in_dim(leaf, 0, self.rows - self.left, axis=axis) if self.left else leaf
        return jax.lax.dynamic_index_in_dim(_split_rows(head, self.size, axis), index, axis + 1, keepdims=False)


def _split_rows(leaf: jax.Array, size: int, axis: int) -> jax.Array:
    """Split the rows, ``[…, batch, …] -> […, size, batch / size, …]``: row r goes to ``[r // n, r % n]``."""
    shape = (*leaf.shape[:axis], size, leaf.shape[axis] // size, *leaf.shape[axis + 1 :])
    sharding = jax.typeof(leaf).sharding
    if not sharding.mesh.are_all_axes_explicit:
        return leaf.reshape(shape)
    # With explicit sharding the new axes need one: what the batch axis was split over goes to the rows of a
    # microbatch, so every device holds its part of each of them.
    spec = [*sharding.spec, *[None] * (leaf.ndim - len(sharding.spec))]
    shards = leaf.shape[axis] // sharding.shard_shape(leaf.shape)[axis]
    if size % shards:
        raise ValueError(f"microbatch_size={size} must be divisible by {shards}, the shards of the batch axis.")
    split = jax.P(*spec[: axis + 1], None, *spec[axis + 1 :])
    return jax.lax.reshape(leaf, shape, out_sharding=jax.sharding.NamedSharding(sharding.mesh, split))


def reshape_batch_axis(tree: PyTree, microbatch_size: int, axis: int = 0) -> PyTree:
    """Split the batch axis of every array into microbatches, dealing the rows out in turn.

    Equivalent to ``jax.tree.map(lambda x: x.reshape(microbatch_size, -1, *x.shape[1:]).swapaxes(0, 1), tree)`` for
    ``axis=0``: ``[batch, ...] -> [batch // microbatch_size, microbatch_size, ...]``, where microbatch k holds the
    rows k, k + n, k + 2n, ... of the n microbatches. A batch axis that is spread over devices stays spread over
    them inside each microbatch, which is why rows are not taken in order.

    After ``optax.microbatching.reshape_batch_axis``. Outside ``jax.jit`` the result is a copy, one batch in size.

    Args:
        tree: A pytree of arrays of any dtype, each with the batch on ``axis``.
        microbatch_size: Rows of a microbatch; has to divide the batch.
        axis: The axis to split; negative counts from the end.

    Returns:
        The pytree with the same dtypes and one axis more, the microbatches' index at ``axis``.

    Raises:
        TypeError: ``microbatch_size`` is no int.
        ValueError: It is not positive or does not divide the batch, or an array lacks the axis.

    Example:
        >>> import jax.numpy as jnp
        >>> from microtome.jax_impl import reshape_batch_axis
        >>> reshape_batch_axis(jnp.arange(6), 2)
        Array([[0, 3],
               [1, 4],
               [2, 5]], dtype=int32)
    """
    options = Options.checked(microbatch_size, "error", "strided", None)

    named, treedef = flatten_with_names(tree, "tree")
    split = []
    for name, leaf in named:
        array = as_array(leaf, name)
        at = normalized_axis(axis, array, name)
        size = options.plan(array.shape[at]).size
        split.append(_split_rows(array, size, at).swapaxes(at, at + 1))
    return treedef.unflatten(split)
