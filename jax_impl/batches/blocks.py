"""A matrix of derivatives in blocks: how it is cut, what a block takes, and how the result is filled."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from ..program.convolutions import channels_last
from ..program.sums import Shared
from ..program.trees import (
    Function,
    as_varying,
    flatten,
    with_weak_type,
)
from .slices import write_rows

Unflatten: TypeAlias = Callable[[jax.Array], Any]
Bar: TypeAlias = Callable[[Iterator[Any], int], Iterator[Any]]

_LOOP_BYTES = 2**14  # more than a loop takes for itself: indices, starts, padding between buffers


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a matrix of derivatives is cut into blocks.

    The blocks of ``"forward"`` are columns, those of ``"reverse"`` and of a ``"hessian"`` rows.
    """

    kind: str
    inputs: int
    outputs: tuple[int, ...]
    dtype: Any
    unit_dtype: Any
    size: int
    weak_type: bool

    @property
    def result_shape(self) -> tuple[int, ...]:
        """The shape of the matrix."""
        return (self.inputs,) * 2 if self.kind == "hessian" else (*self.outputs, self.inputs)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the matrix with an axis for the rows, where there are any."""
        return (self.count, self.inputs) if self.kind == "reverse" else self.result_shape

    @property
    def axis(self) -> int:
        """The axis of ``shape`` along which blocks follow one another."""
        return len(self.outputs) if self.kind == "forward" else 0

    @property
    def count(self) -> int:
        """The number of rows or columns that blocks are made of."""
        return math.prod(self.outputs) if self.kind == "reverse" else self.inputs

    @property
    def number(self) -> int:
        """The number of blocks."""
        return -(-self.count // self.size)

    def may_be_leaner_in_one(self, taken: int, kept: int) -> bool:
        """Tell whether one block might need less temporary memory than a loop that takes ``taken``, ``kept`` included.

        It needs ``number`` times what a block does, less twice the result: what is computed is the result itself, no
        block beside it, and what comes before lies in the memory of the result as long as this is free. In a loop it is
        not: all but the first block find rows there. A loop has costs of its own, too.
        """
        block = taken - kept - _LOOP_BYTES
        return block * (self.number - 1) < 2 * math.prod(self.result_shape) * self.dtype.itemsize

    def block(self, linear: Any, start: Any, size: int) -> jax.Array:
        """Compute so many rows or columns, from the function that was linearised."""
        units = jnp.asarray(start + jnp.arange(size)[:, None] == jnp.arange(self.count), self.unit_dtype)
        whole = size >= self.count  # then it is the program of jax.jacobian or jax.hessian, whose memory it takes
        ready = (lambda fun: fun) if whole else channels_last
        if self.kind == "reverse":
            values = jax.vmap(ready(lambda unit: linear(unit)[0]))(units.reshape(size, *self.outputs))
        else:
            columns = whole or self.kind == "forward"
            values = jax.vmap(ready(linear), out_axes=-1 if columns else 0)(units).astype(self.dtype)
        return with_weak_type(values, self)

    def places(self) -> Iterator[tuple[slice, int]]:
        """Yield the place of each block, and where to start computing it, so that all are of one size."""
        for start in range(0, self.count, self.size):
            yield slice(start, min(start + self.size, self.count)), min(start, self.count - self.size)

    def check_out(self, shape: tuple[int, ...], dtype: str) -> None:
        """Raise an error where ``out`` is not of the shape and dtype of the result."""
        if shape != self.result_shape:
            raise ValueError(f"out must have the shape of the result, {self.result_shape}, got {shape}.")
        if dtype != self.dtype.name:
            raise TypeError(f"out must have the dtype of the result, {self.dtype.name}, got {dtype}.")

    def fill(self, out: Any, blocks: Iterator[tuple[slice, Any]]) -> Any:
        """Write the blocks into ``out``; an error carries a note of how far it went."""
        done = 0
        try:
            for place, block in blocks:
                out[self._index(place)] = block
                done = place.stop
        except BaseException as error:
            kind = "columns" if self.kind == "forward" else "rows"
            error.add_note(f"out is incomplete: {done} of {self.count} {kind} were written.")
            raise
        return out

    def _index(self, place: slice) -> Any:
        if self.shape == self.result_shape:
            return (*[slice(None)] * self.axis, place)
        outputs = self.result_shape[:-1]
        return np.unravel_index(np.arange(place.start, place.stop), outputs) if outputs else (None,)


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A matrix of derivatives: ``linearise`` gives, at the vector ``x``, a linear function that is a pytree."""

    x: jax.Array
    unflatten: Unflatten
    linearise: Callable[[jax.Array], Any]
    layout: Layout

    def whole(self, x: jax.Array) -> jax.Array:
        """Compute the matrix, its blocks in a loop."""
        layout, linear = self.layout, self.linearise(x)
        if layout.size >= layout.count:
            return layout.block(linear, 0, layout.count).reshape(layout.result_shape)

        # Where sizes do not fit, the last block starts earlier and repeats some rows, so that one program serves for
        # all blocks: compiling is most of the time of a single call.
        put = jax.lax.dynamic_update_slice_in_dim if layout.count % layout.size else write_rows

        kept, treedef = flatten(linear)
        shared = Shared(kept)

        def step(result: jax.Array, start: Any) -> jax.Array:
            linear = treedef.unflatten(shared.read())
            return put(result, layout.block(linear, start, layout.size), start, layout.axis)

        starts = jnp.asarray([start for _, start in layout.places()], jnp.int32)
        empty = as_varying(lambda result: step(result, starts[0]), jnp.zeros(layout.shape, layout.dtype))
        result, _ = jax.lax.scan(lambda result, start: (step(result, start), None), empty, starts)
        return with_weak_type(result.reshape(layout.result_shape), layout)

    def leaner(self) -> Matrix:
        """Return the matrix in one block, if XLA plans less temporary memory so; under ``jax.jit`` as it is."""
        if isinstance(self.x, jax.core.Tracer) or self.layout.number < 2:
            return self
        trace = lambda matrix: jax.jit(matrix.whole).trace(matrix.x)
        used = lambda matrix: temporary_bytes(trace(matrix).lower().compile())
        asked = trace(self).jaxpr
        if len(asked.in_avals) > 1 or asked.effects:  # f captures tracers, or names axes: no program on its own
            return self
        if not self.layout.may_be_leaner_in_one(used(self), self.kept_bytes()):
            return self
        return min(self, self.in_one(), key=used)

    def in_one(self) -> Matrix:
        """Return the matrix in one block."""
        return dataclasses.replace(self, layout=dataclasses.replace(self.layout, size=self.layout.count))

    def kept_bytes(self) -> int:
        """Return how many bytes the linearisation keeps for all blocks."""
        linear = jax.eval_shape(self.linearise, self.x)
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(linear))

    def within(self, max_bytes: int | None) -> Matrix:
        """Return the matrix in the largest blocks that fit in ``max_bytes``; ``None`` changes nothing."""
        if max_bytes is None or not self.layout.count:
            return self
        if isinstance(self.x, jax.core.Tracer):
            raise TypeError("max_bytes is found out by compiling, outside of jax.jit. Pass batch_size there.")
        linear = jax.eval_shape(self.linearise, self.x)

        def used(size: int) -> int:
            block = jax.jit(lambda linear, start: self.layout.block(linear, start, size))
            return block_bytes(block.lower(linear, jax.ShapeDtypeStruct((), jnp.int32)).compile())

        size = largest_block(used, self.layout.count, max_bytes)
        return dataclasses.replace(self, layout=dataclasses.replace(self.layout, size=size))

    def blocks(self, jit: bool, bar: Bar) -> Iterator[tuple[slice, jax.Array]]:
        """Yield the blocks with their places, each computed from Python."""
        layout, compiled = self.layout, compiler(jit)
        linear = compiled(self.linearise)(self.x)
        block = compiled(lambda linear, start: layout.block(linear, start, layout.size))
        for place, start in bar(layout.places(), layout.number):
            values = block(linear, start)
            yield place, jax.lax.slice_in_dim(values, place.start - start, place.stop - start, axis=layout.axis)

    def compute(self, jit: bool, out: np.ndarray | None, progress: bool) -> Any:
        """Compute the matrix, in the way that was asked for."""
        bar = progress_bar(progress)
        if out is None and not progress:
            return jax.jit(self.leaner().whole)(self.x) if jit else self.whole(self.x)
        if isinstance(self.x, jax.core.Tracer):
            raise TypeError("out and progress need the values of x, which jax.jit traces. Call this outside of it.")
        if out is None:
            result = self._fill(np.empty(self.layout.result_shape, self.layout.dtype), jit, bar)
            return with_weak_type(jnp.asarray(result), self.layout)
        check_array(out)
        self.layout.check_out(out.shape, out.dtype.name)
        return self._fill(out, jit, bar)

    def _fill(self, out: np.ndarray, jit: bool, bar: Bar) -> np.ndarray:
        return self.layout.fill(out, ((place, np.asarray(block)) for place, block in self.blocks(jit, bar)))


def temporary_bytes(program: Any) -> int:
    """Return how many bytes a compiled program takes beside its arguments and its result."""
    return int(program.memory_analysis().temp_size_in_bytes)


def block_bytes(program: Any) -> int:
    """Return how many bytes a compiled program takes beside its arguments."""
    return temporary_bytes(program) + int(program.memory_analysis().output_size_in_bytes)


def largest_block(used: Callable[[int], int], count: int, max_bytes: int) -> int:
    """Return the most rows of ``count``, to a first guess, for which ``used(rows)`` is at most so many bytes."""
    one = used(1)
    if one > max_bytes:
        raise ValueError(f"max_bytes={max_bytes} is too little: a block of one takes {one} bytes. Pass at least that.")
    size = min(max_bytes // max(one, 1), count)
    while size > 1 and (taken := used(size)) > max_bytes:
        size = max(min(size * max_bytes // taken, size - 1), 1)
    return max(size, 1)


def check_array(out: Any) -> None:
    """Raise an error unless ``out`` is an array of NumPy's that can be written to."""
    if not isinstance(out, np.ndarray):
        raise TypeError(f"out must be a NumPy array or memmap, got a {type(out).__name__}.")
    if not out.flags.writeable:
        raise ValueError("out must be writeable. Open a memmap with mode 'r+' or 'w+'.")
    check_no_overlap(out.shape, out.strides, out.itemsize)


def check_no_overlap(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> None:
    """Raise a ValueError for an ``out`` whose elements share memory: what is written to one would change another."""
    reach = itemsize  # of what the axes with smaller strides span
    for stride, length in sorted((abs(stride), length) for stride, length in zip(strides, shape, strict=True)):
        if length > 1 and stride < reach and 0 not in shape:
            raise ValueError(
                "out must hold each element at a place of its own, got an expanded or overlapping view (shape "
                f"{tuple(shape)}, strides {tuple(strides)}). Pass one with memory of its own, as that of empty()."
            )
        reach += stride * (length - 1)


def compiler(jit: bool) -> Callable[[Function], Function]:
    """Return what compiles a function, or leaves it as it is."""
    return jax.jit if jit else lambda fun: fun


def progress_bar(progress: bool) -> Bar:
    """Return what shows the progress of an iteration with so many steps."""
    if not progress:
        return lambda iterator, total: iterator
    try:
        from tqdm import tqdm
    except ImportError:
        raise ImportError("progress=True needs tqdm: pip install 'microtome[progress]', or pip install tqdm.") from None
    return lambda iterator, total: tqdm(iterator, total=total, unit="block")
