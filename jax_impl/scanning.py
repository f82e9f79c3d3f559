"""Scans that keep part of their outputs, or little of what their gradient needs, after ``powerpax``."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .batches.loop import Traced
from .program.sums import Shared
from .program.trees import PyTree, as_array, flatten_with_names, integer, is_weak, positive, structure, with_weak_type

Step = Callable[[Any, Any], tuple[Any, Any]]
Leaves = list[jax.Array]


def sliced_scan(
    f: Step,
    init: PyTree,
    xs: PyTree = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    *,
    start: int | None = None,
    stop: int | None = None,
    step: int | None = None,
) -> tuple[Any, Any]:
    """Scan, and keep only a slice of the outputs.

    Equivalent to::

        carry, ys = jax.lax.scan(f, init, xs, length, reverse, unroll)
        ys = jax.tree.map(lambda y: y[start:stop:step], ys)

    for every slice that Python allows. What differs:

    * The full ``ys`` never exist. Memory is that of the kept outputs. They exist twice where ``step`` is negative, and
      where fewer than ``abs(step) - 1`` steps lie before the first and after the last kept one together (as in
      ``[::k]`` of a length that is no multiple of k, whose last stride is cut short).
    * What ``f`` computes for an output that is not kept, and for nothing else, is left out by XLA.
    * ``xs`` is read one stride at a time. It is copied as a whole unless the scan consists of whole strides, as for
      ``[::k]`` and ``[k - 1 :: k]`` with a length that is a multiple of k.
    * ``f`` is traced once, or a second time where a Python number in ``init`` takes the type that ``f`` gives it.

    All steps run, and the carry is that of the last. Derivatives keep what they need of every step, as those of
    ``jax.lax.scan`` do; :func:`checkpoint_chunked_scan` is for those.

    After ``powerpax.sliced_scan``.

    Shapes: leaves of ``xs`` are ``[length, ...]``; those of ``ys`` ``[kept, ...]``. Dtypes are those of ``f``.

    Args:
        f: ``(carry, x) -> (carry, y)``; the carry keeps its tree, shapes and dtypes.
        init: The first carry.
        xs: What to scan over, or None with a ``length``.
        length: The number of steps; has to agree with ``xs``.
        reverse: Run from the last entry to the first.
        unroll: How many steps to write out in a loop, at most; True for all.
        start: Where the slice starts, as in ``y[start:stop:step]``.
        stop: Where it ends.
        step: Its stride, which may be negative but not 0.

    Returns:
        ``(carry, ys)``.

    Raises:
        TypeError: ``f`` returns no pair, or the carry changes its tree, shape or dtype; a slice that holds no ints.
        ValueError: No length or several, a leaf of ``xs`` without axis, ``step=0``, a ``length`` that is negative.

    Example:
        >>> import jax.numpy as jnp
        >>> from microtome.jax_impl import sliced_scan
        >>> add = lambda total, x: (total + x, total + x)
        >>> sliced_scan(add, 0.0, jnp.arange(6.0), step=2)
        (Array(15., dtype=float32), Array([ 0.,  3., 10.], dtype=float32))
    """
    for name, value in (("start", start), ("stop", stop), ("step", step)):
        if value is not None:
            integer(name, value, "an int or None")
    if step is not None and operator.index(step) == 0:
        raise ValueError("step must not be 0. Pass None or 1 to keep every output.")
    loop = _Loop.of(f, init, xs, length, reverse, unroll)
    with jax.named_scope("sliced_scan"):
        carry, ys = _sliced(loop, range(loop.length)[start:stop:step])
    return loop.result(carry, ys)


def checkpoint_chunked_scan(
    f: Step,
    init: PyTree,
    xs: PyTree = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    *,
    chunk_size: int | str | None = None,
) -> tuple[Any, Any]:
    """Scan with little memory for the gradient: only the carry at the start of each chunk is kept.

    Equivalent to ``jax.lax.scan(f, init, xs, length, reverse, unroll)``. What differs is its derivative in reverse
    mode. A plain scan keeps what the derivative needs of every step, ``length * residuals``. This one keeps the
    carries between chunks, and computes each chunk a second time when its turn comes::

        length / chunk_size * carry + chunk_size * residuals

    which is smallest for a chunk of about √length: with ``chunk_size="auto"``, 10000 steps take the memory of some
    200. ``f`` runs twice for each step, once forward and once before its derivative.

    ``f`` is traced once, or a second time where a Python number in ``init`` takes the type that ``f`` gives it. A
    length that is no multiple of the chunk has a shorter last chunk, and ``xs`` and ``ys`` are then copied.

    After ``powerpax.checkpoint_chunked_scan``, and the checkpointing of Chen et al., "Training Deep Nets with Sublinear
    Memory Cost" (2016); ``chunk_size="auto"`` is added.

    Shapes: leaves of ``xs`` are ``[length, ...]``, those of ``ys`` too. Dtypes are those of ``f``.

    Args:
        f: ``(carry, x) -> (carry, y)``; the carry keeps its tree, shapes and dtypes.
        init: The first carry.
        xs: What to scan over, or None with a ``length``.
        length: The number of steps; has to agree with ``xs``.
        reverse: Run from the last entry to the first.
        unroll: How many steps to write out in a loop, at most; True for all.
        chunk_size: Steps of a chunk; ``"auto"`` for the divisor of the length nearest to its root, or the root
            itself where no divisor is near; None for one chunk, which keeps ``init`` and ``xs`` alone.

    Returns:
        ``(carry, ys)``.

    Raises:
        TypeError: ``f`` returns no pair, or the carry changes its tree, shape or dtype; ``chunk_size`` of a wrong type.
        ValueError: No length or several, a leaf of ``xs`` without axis, ``chunk_size`` not positive.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from microtome.jax_impl import checkpoint_chunked_scan
        >>> def final(x):
        ...     step = lambda c, _: (jnp.sin(c), None)
        ...     return checkpoint_chunked_scan(step, x, length=100, chunk_size="auto")[0]
        >>> print(f"{jax.grad(final)(1.0):.4f}")
        0.0037
    """
    rule = "'auto', or None for a single chunk"
    if isinstance(chunk_size, str) and chunk_size != "auto":
        raise ValueError(f"chunk_size must be a positive int, {rule}, got {chunk_size!r}.")
    if chunk_size is not None and chunk_size != "auto":
        chunk_size = positive("chunk_size", chunk_size, "or " + rule)
    loop = _Loop.of(f, init, xs, length, reverse, unroll)
    size = near_root(loop.length) if chunk_size == "auto" else chunk_size or max(loop.length, 1)
    with jax.named_scope("checkpoint_chunked_scan"):
        carry, ys = _checkpointed(loop, int(size))
    return loop.result(carry, ys)


def near_root(length: int) -> int:
    """Return the divisor of the length that is nearest to its root, within a factor of two; else the root."""
    root = math.isqrt(max(length, 1))
    if root * root < length:
        root += 1
    near = [d for d in range(max(1, (root + 1) // 2), 2 * root + 1) if length % d == 0]
    return min(near, key=lambda d: abs(math.log(d * d / max(length, 1))), default=root)


@dataclasses.dataclass(frozen=True)
class _Loop:
    """A scan to be run in parts: its step on flat arrays, and what to start from.

    Parts are given by iterations, which count from the first that runs: with ``reverse`` that is the last entry.
    """

    step: Callable[[Leaves, Leaves], tuple[Leaves, Leaves]]
    carry: Leaves
    xs: Leaves
    length: int
    reverse: bool
    unroll: int | bool
    y_shapes: Sequence[Any]
    result: Callable[[Leaves, Leaves], tuple[Any, Any]]

    @classmethod
    def of(cls, f: Step, init: PyTree, xs: PyTree, length: int | None, reverse: bool, unroll: int | bool) -> _Loop:
        """Check the arguments and trace the step."""
        if not callable(f):
            raise TypeError(f"f must be callable, got {f!r}.")
        if not isinstance(reverse, (bool, np.bool_)):
            raise TypeError(f"reverse must be a bool, got {reverse!r}.")
        if not isinstance(unroll, bool):
            unroll = positive("unroll", unroll, "or a bool")
        named, xs_treedef = flatten_with_names(xs, "xs")
        leaves = [as_array(leaf, name, "Pass what all steps share by a closure.") for name, leaf in named]
        count = _common_length([name for name, _ in named], leaves, length)
        x = [jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype, weak_type=is_weak(leaf)) for leaf in leaves]
        named, treedef = flatten_with_names(init, "init")
        carry = [as_array(leaf, name, "Wrap it in Static, or leave it out of the carry.") for name, leaf in named]
        names = [name for name, _ in named]

        def flat(*inputs: Any) -> Any:
            return f(treedef.unflatten(inputs[: len(carry)]), xs_treedef.unflatten(inputs[len(carry) :]))

        traced = Traced(flat, [*carry, *x])
        if _is_step(traced.output, treedef):
            new = _promoted(carry, traced.output[0])
            if new is not None:
                carry = new
                traced = Traced(flat, [*carry, *x])
        _check_step(traced.output, treedef, names, carry)
        y_treedef = structure(traced.output[1])

        # What every step hands on as it got it, a weight say, is shared by all steps.
        jaxpr = traced.closed.jaxpr
        kept = [k for k, v in enumerate(jaxpr.invars[: len(carry)]) if jaxpr.outvars[k] is v]
        shared = Shared([carry[k] for k in kept])

        def step(carry: Leaves, x: Leaves) -> tuple[Leaves, Leaves]:
            given = dict(enumerate(carry)) | dict(zip(kept, shared.read(), strict=True))
            out = jax.tree.leaves(traced(*given.values(), *x))
            return [carry[k] if k in kept else out[k] for k in range(len(carry))], out[len(carry) :]

        carry_shapes, y_shapes = map(jax.tree.leaves, traced.output)

        def result(carry: Leaves, ys: Leaves) -> tuple[Any, Any]:
            typed = map(with_weak_type, carry, carry_shapes), map(with_weak_type, ys, y_shapes)
            return treedef.unflatten(typed[0]), y_treedef.unflatten(typed[1])

        return cls(step, carry, leaves, count, reverse, unroll, y_shapes, result)

    def part(self, first: int, last: int) -> _Loop:
        """Return the iterations from ``first`` up to ``last``, which is left out."""
        low, high = (self.length - last, self.length - first) if self.reverse else (first, last)
        xs = self.xs if (low, high) == (0, self.length) else [x[low:high] for x in self.xs]
        return dataclasses.replace(self, xs=xs, length=last - first)

    def run(self, carry: Leaves) -> tuple[Leaves, Leaves]:
        """Run all iterations; return the carry and the outputs."""
        return self._scan(self.step, carry)

    def skip(self, carry: Leaves) -> Leaves:
        """Run all iterations for their carry."""
        return self._scan(lambda c, x: (self.step(c, x)[0], None), carry)[0] if self.length else carry

    def run_in_parts(self, size: int, run: Callable[[_Loop, Leaves], tuple[Leaves, Leaves]], carry: Leaves) -> Any:
        """Run ``run(part, carry)`` for one part of ``size`` iterations after another, in a scan."""
        xs = [x.reshape(self.length // size, size, *x.shape[1:]) for x in self.xs]
        unroll = self.unroll if isinstance(self.unroll, bool) else max(self.unroll // size, 1)
        outer = dataclasses.replace(self, xs=xs, length=self.length // size, unroll=unroll)
        return outer._scan(lambda c, part: run(dataclasses.replace(self, xs=part, length=size), c), carry)

    def _scan(self, body: Callable[[Leaves, Leaves], Any], carry: Leaves) -> Any:
        unroll = self.unroll if isinstance(self.unroll, bool) else min(self.unroll, max(self.length, 1))
        return jax.lax.scan(body, carry, self.xs, self.length, self.reverse, unroll)

    def join(self, earlier: Leaves, later: Leaves) -> Leaves:
        """Join outputs of earlier and of later iterations, in the order of the entries."""
        pairs = zip(later, earlier, strict=True) if self.reverse else zip(earlier, later, strict=True)
        return [jnp.concatenate(pair) for pair in pairs]


def _sliced(loop: _Loop, kept: range) -> tuple[Leaves, Leaves]:
    """Compute the carry and the outputs of the entries ``kept``."""
    length, count, stride = loop.length, len(kept), abs(kept.step)
    if not count:
        return loop.skip(loop.carry), [jnp.zeros((0, *y.shape), y.dtype) for y in loop.y_shapes]
    first, last = min(kept), max(kept)
    if loop.reverse:  # from places of entries to numbers of iterations
        first, last = length - 1 - last, length - 1 - first
    if count == 1 or stride == 1:
        carry = loop.part(0, first).skip(loop.carry)
        carry, ys = loop.part(first, last + 1).run(carry)
        carry = loop.part(last + 1, length).skip(carry)
    else:
        carry, ys = _strided(loop, first, last, stride)
    return carry, [jnp.flip(y, 0) for y in ys] if kept.step < 0 else ys


def _strided(loop: _Loop, first: int, last: int, stride: int) -> tuple[Leaves, Leaves]:
    """Compute the carry and the outputs of the iterations ``first, first + stride, ..., last``."""
    # The scan is cut into blocks of one stride, each with one kept iteration at the same place. As many iterations as
    # there are before the first kept one go into its block, up to a whole stride.
    place = min(first, stride - 1)

    def keep_one(block: _Loop, carry: Leaves) -> tuple[Leaves, Leaves]:
        carry = block.part(0, place).skip(carry)
        carry, y = block.part(place, place + 1).run(carry)
        return block.part(place + 1, stride).skip(carry), [leaf[0] for leaf in y]

    begin = first - place
    end = last - place + stride
    carry = loop.part(0, begin).skip(loop.carry)
    if end <= loop.length:
        carry, ys = loop.part(begin, end).run_in_parts(stride, keep_one, carry)
        return loop.part(end, loop.length).skip(carry), ys
    # The last block would reach beyond the scan, so its kept iteration stands alone.
    end -= stride
    carry, ys = loop.part(begin, end).run_in_parts(stride, keep_one, carry)
    carry = loop.part(end, last).skip(carry)
    carry, y = loop.part(last, last + 1).run(carry)
    return loop.part(last + 1, loop.length).skip(carry), loop.join(ys, y)


def _checkpointed(loop: _Loop, size: int) -> tuple[Leaves, Leaves]:
    """Compute the carry and the outputs of all iterations, in chunks that the derivative computes again."""

    def chunk(part: _Loop, carry: Leaves, in_scan: bool) -> tuple[Leaves, Leaves]:
        # Inside a scan nothing can merge the two computations, so the guard against it is only in the way.
        run = lambda carry, xs: dataclasses.replace(part, xs=xs).run(carry)
        return jax.checkpoint(run, prevent_cse=not in_scan)(carry, part.xs)

    end = loop.length - loop.length % size
    if not end or end == size == loop.length:
        return chunk(loop, loop.carry, False)
    carry, ys = loop.part(0, end).run_in_parts(size, lambda part, carry: chunk(part, carry, True), loop.carry)
    ys = [y.reshape(end, *y.shape[2:]) for y in ys]
    if end == loop.length:
        return carry, ys
    carry, last = chunk(loop.part(end, loop.length), carry, False)
    return carry, loop.join(ys, last)


def _common_length(names: Sequence[str], leaves: Leaves, length: int | None) -> int:
    for name, leaf in zip(names, leaves, strict=True):
        if not leaf.ndim:
            raise ValueError(
                f"{name} has shape (), so there is no axis to scan over. Give it one entry for each step, or use it in "
                "f by a closure."
            )
    lengths = {name: len(leaf) for name, leaf in zip(names, leaves, strict=True)}
    if length is not None:
        length = integer("length", length, "an int or None")
        if length < 0:
            raise ValueError(f"length must not be negative, got {length}.")
        lengths["length"] = length
    if not lengths:
        raise ValueError("xs holds no array, so the number of steps is unknown. Pass length.")
    if len(set(lengths.values())) > 1:
        shown = ", ".join(
            f"{name} has {steps}" if name != "length" else f"length={steps}" for name, steps in lengths.items()
        )
        raise ValueError(f"xs and length must agree on the number of steps: {shown}. Cut them to one length.")
    return next(iter(lengths.values()))


def _is_step(output: PyTree, treedef: Any) -> bool:
    return isinstance(output, (tuple, list)) and len(output) == 2 and structure(output[0]) == treedef


def _promoted(carry: Leaves, after: PyTree) -> Leaves | None:
    """Return the carry, Python numbers in the types that ``f`` gives them, as in ``lax.scan``; None if none changes."""

    def moves(before: jax.Array, after: Any) -> bool:
        return is_weak(before) and before.dtype != after.dtype == jnp.result_type(before, after.dtype)

    pairs = list(zip(carry, jax.tree.leaves(after), strict=True))
    if not any(moves(c, a) for c, a in pairs):
        return None
    return [jax.lax.convert_element_type(c, a.dtype) if moves(c, a) else c for c, a in pairs]


def _check_step(output: PyTree, treedef: Any, names: Sequence[str], carry: Leaves) -> None:
    """Raise a TypeError unless the step gives a pair whose carry is of the type that it got."""
    if not (isinstance(output, (tuple, list)) and len(output) == 2):
        raise TypeError(f"f must return a pair (carry, y), got {structure(output)}. Return None for what there is not.")
    if structure(output[0]) != treedef:
        raise TypeError(
            f"the carry must keep its tree from step to step: init is {treedef}, f returns {structure(output[0])}."
        )
    for name, before, after in zip(names, carry, jax.tree.leaves(output[0]), strict=True):
        if (before.shape, before.dtype) != (after.shape, after.dtype):
            raise TypeError(
                f"the carry must keep its type from step to step: {name} is {_type(before)}, f returns {_type(after)} "
                f"for it. Start from {_type(after)}, or have f return what it got."
            )


def _type(x: Any) -> str:
    return f"{x.dtype.name}{list(x.shape)}"
