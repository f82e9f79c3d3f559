"""Jacobians and Hessians in blocks, after ``zodiax``, and Hessian-vector products."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun
from jax.flatten_util import ravel_pytree

from .batches.arguments import Function
from .batches.loop import Traced
from .batches.slices import write
from .program.convolutions import channels_last, run_whole
from .program.sums import Shared
from .program.trees import (
    PyTree,
    as_array,
    as_varying,
    check_width,
    flatten,
    flatten_with_names,
    positive,
    structure,
    with_weak_type,
)

Unflatten: TypeAlias = Callable[[jax.Array], Any]
Bar: TypeAlias = Callable[[Iterator[Any], int], Iterator[Any]]

_LOOP_BYTES = 2**14  # more than a loop takes for itself: indices, starts, padding between buffers


def jacobian(
    f: Function,
    x: PyTree,
    nbatches: int = 1,
    jit: bool = True,
    checkpoint: bool = False,
    *,
    batch_size: int | None = None,
    max_bytes: int | None = None,
    mode: str = "auto",
    out: np.ndarray | None = None,
    progress: bool = False,
) -> tuple[Any, Unflatten]:
    """The Jacobian of a function in flattened coordinates, computed in blocks.

    Equivalent to::

        vector, unflatten = ravel_pytree(x)
        return jax.jacobian(lambda v: f(unflatten(v)))(vector), unflatten

    What differs:

    * Columns (or rows) are computed a block at a time, by one linearisation of ``f``. Peak memory is that of the
      linearisation and of one block, ``residuals + M(1) * block``, beside the result, or that of a single block, where
      XLA plans less for it (see :func:`hessian`).
    * With ``out`` the result is written there block by block: it may be larger than the device's memory.
    * ``mode="auto"`` takes rows by reverse mode where there are fewer outputs than inputs, else columns by forward
      mode. It has as many blocks as ``nbatches`` says, but none without a row.
    * Integer leaves of ``x`` reach ``f`` as they are; their columns are zeros.

    Outside a ``jax.jit`` of your own every call traces and compiles anew, as with ``jax.jacobian`` under ``jit``.

    After ``zodiax.jacobian``; ``batch_size``, ``max_bytes``, ``mode``, ``out`` and ``progress`` are added.

    Shapes: ``x`` is a pytree of n real numbers in all, ``f(x)`` one array ``[...]``, real or complex; the Jacobian is
    ``[..., n]``, in the dtype that ``ravel_pytree`` gives ``x`` (that of ``f(x)``, where this is complex).

    Args:
        f: The function.
        x: Where to differentiate, any pytree of arrays and numbers. Leaves of several dtypes are promoted.
        nbatches: The number of blocks, from 1 to n.
        jit: Compile. False runs what is outside the loop operation by operation, which takes longer.
        checkpoint: Keep nothing of ``f`` but x, and compute it again for each block.
        batch_size: The columns (or rows) of a block, in place of ``nbatches``.
        max_bytes: The memory of a block and its intermediate values, in place of ``nbatches``: blocks are as large as
            it allows, beside the linearisation and the result. To find out, programs for a few sizes are compiled.
        mode: ``"forward"`` (columns), ``"reverse"`` (rows) or ``"auto"``.
        out: A NumPy array or memmap of the Jacobian's shape and dtype, to be filled and returned. Only one block is on
            the device then. If an error interrupts the work, a note on it says how much was written.
        progress: Show a bar (needs tqdm). Blocks then run one by one from Python, as with ``out``.

    Returns:
        ``(jacobian, unflatten)``; ``unflatten`` turns a vector of n numbers into a tree like ``x``, dtypes included.

    Raises:
        TypeError: ``f`` returns no single array of floats, ``x`` holds complex numbers, no floats or no numbers,
            ``out`` is no NumPy array of the right dtype, an option of a wrong type, ``max_bytes`` under ``jax.jit``.
        ValueError: A size that is not positive, ``nbatches`` larger than n, several of ``nbatches``, ``batch_size`` and
            ``max_bytes``, a ``max_bytes`` too small for one column (or row), an unknown ``mode``, ``out`` of the wrong
            shape, not writeable, or whose elements share memory.
        ImportError: ``progress`` without tqdm.

    Example:
        >>> import jax.numpy as jnp
        >>> from microtome.jax_impl import jacobian
        >>> matrix, unflatten = jacobian(lambda x: x["a"] * x["b"] ** 2, {"a": jnp.ones(2), "b": 3.0}, nbatches=2)
        >>> matrix
        Array([[9., 0., 6.],
               [0., 9., 6.]], dtype=float32)
    """
    matrix = jacobian_matrix(f, x, checkpoint, mode, nbatches, batch_size, max_bytes)
    return matrix.compute(jit, out, progress), matrix.unflatten


def hessian(
    f: Function,
    x: PyTree,
    nbatches: int = 1,
    jit: bool = True,
    checkpoint: bool = False,
    *,
    batch_size: int | None = None,
    max_bytes: int | None = None,
    out: np.ndarray | None = None,
    progress: bool = False,
) -> tuple[Any, Unflatten]:
    """The Hessian of a scalar function in flattened coordinates, computed in blocks.

    Equivalent to::

        vector, unflatten = ravel_pytree(x)
        return jax.hessian(lambda v: f(unflatten(v)))(vector), unflatten

    What differs:

    * Columns are computed a block at a time, by one linearisation of the gradient (forward over reverse). Beside the
      result, which with ``out`` is never on the device as a whole, memory is at most that of the linearisation and of
      one block, ``residuals + M(1) * n / nbatches``, where ``M(1)`` is every intermediate value of one product with the
      Hessian, its vector included.
    * It is never more than that of ``jax.hessian``, whose program a single block is. Where one product with the Hessian
      is little more than its vectors, as in a logsumexp or a logistic regression with fewer examples than features,
      XLA lays it into the memory of the result, which a loop over blocks cannot. So when blocks take little beside
      the result, the program of a single block is compiled too, and the one that plans less memory runs. Under a
      ``jax.jit`` of your own, which compiles what is asked for, blocks are as many as asked for.
    * Columns are written as rows, since a Hessian is symmetric; this one is up to rounding, as that of
      ``jax.hessian``.

    After ``zodiax.hessian``; ``batch_size``, ``max_bytes``, ``out`` and ``progress`` are added. The other arguments,
    the errors and compilation are as in :func:`jacobian`.

    Shapes: ``x`` is a pytree of n real numbers in all, ``f(x)`` a real number of shape ``()``; the Hessian is
    ``[n, n]`` in the dtype that ``ravel_pytree`` gives ``x``.

    Args:
        f: The function.
        x: Where to differentiate, any pytree of arrays and numbers.
        nbatches: The number of blocks, from 1 to n.
        jit: Compile.
        checkpoint: Keep nothing of ``f`` but x, and compute it again for each block.
        batch_size: The columns of a block, in place of ``nbatches``.
        max_bytes: The memory of a block and its intermediate values, in place of ``nbatches``.
        out: A NumPy array or memmap ``[n, n]``, to be filled and returned.
        progress: Show a bar.

    Returns:
        ``(hessian, unflatten)``; see :func:`hessian_to_pytree` for its blocks by leaf.

    Raises:
        TypeError: ``f`` returns no real number of shape ``()``, and as in :func:`jacobian`.
        ValueError: As in :func:`jacobian`.

    Example:
        >>> import jax.numpy as jnp
        >>> from microtome.jax_impl import hessian
        >>> hessian(lambda x: jnp.sum(x) ** 3 / 6, jnp.array([1.0, 2.0]), nbatches=2)[0]
        Array([[3., 3.],
               [3., 3.]], dtype=float32)
    """
    matrix = hessian_matrix(f, x, checkpoint, nbatches, batch_size, max_bytes)
    return matrix.compute(jit, out, progress), matrix.unflatten


def jacobian_blocks(
    f: Function,
    x: PyTree,
    nbatches: int = 1,
    jit: bool = True,
    checkpoint: bool = False,
    *,
    batch_size: int | None = None,
    max_bytes: int | None = None,
    mode: str = "forward",
    progress: bool = False,
) -> Iterator[tuple[slice, jax.Array]]:
    """The blocks of a Jacobian one after another, for what needs only a part of it, or a function of the parts.

    Equivalent, for ``J, _ = jacobian(f, x)``, to ``(cols, J[..., cols]) for cols in slices`` in forward mode, and to
    ``(rows, J.reshape(-1, n)[rows]) for rows in slices`` in reverse mode. Each block is computed when asked for, by one
    program for all; only this block and the linearisation are in memory.

    Arguments, shapes, dtypes and errors are as in :func:`jacobian`; errors are raised at the call. ``mode`` has no
    ``"auto"``, since it decides what a block is.

    Returns:
        An iterator of pairs ``(slice, block)``; a block is ``[..., columns]`` or ``[rows, n]``.

    Example:
        >>> import jax.numpy as jnp
        >>> from microtome.jax_impl import jacobian_blocks
        >>> for columns, block in jacobian_blocks(jnp.cumsum, jnp.ones(3), batch_size=2):
        ...     print(columns, block.tolist())
        slice(0, 2, None) [[1.0, 0.0], [1.0, 1.0], [1.0, 1.0]]
        slice(2, 3, None) [[0.0], [0.0], [1.0]]
    """
    if mode == "auto":
        raise ValueError("mode must be 'forward' (blocks of columns) or 'reverse' (blocks of rows), got 'auto'.")
    matrix = jacobian_matrix(f, x, checkpoint, mode, nbatches, batch_size, max_bytes)
    return matrix.blocks(jit, progress_bar(progress))


def hessian_blocks(
    f: Function,
    x: PyTree,
    nbatches: int = 1,
    jit: bool = True,
    checkpoint: bool = False,
    *,
    batch_size: int | None = None,
    max_bytes: int | None = None,
    progress: bool = False,
) -> Iterator[tuple[slice, jax.Array]]:
    """The blocks of a Hessian one after another, for what needs only a part of it, or a function of the parts.

    Equivalent, for ``H, _ = hessian(f, x)``, to ``(rows, H[rows]) for rows in slices``. Each block is computed when
    asked for, by one program for all; only this block and the linearisation are in memory.

    Arguments, shapes, dtypes and errors are as in :func:`hessian`; errors are raised at the call.

    Returns:
        An iterator of pairs ``(slice, block)``; a block is ``[rows, n]``.

    Example:
        >>> import jax.numpy as jnp
        >>> from microtome.jax_impl import hessian_blocks
        >>> sum(float(abs(rows).sum()) for _, rows in hessian_blocks(lambda x: jnp.sum(x**3), jnp.ones(3), nbatches=3))
        18.0
    """
    return hessian_matrix(f, x, checkpoint, nbatches, batch_size, max_bytes).blocks(jit, progress_bar(progress))


def hvp(f: Function, x: PyTree, jit: bool = True, checkpoint: bool = False) -> Callable[[PyTree], Any]:
    """A function that multiplies by the Hessian, without the Hessian.

    Equivalent to ``lambda v: jax.jvp(jax.grad(f), (x,), (v,))[1]``. What differs: the gradient is linearised once,
    here; a product then costs about as much as the linear half of a gradient. Memory is that of the linearisation.
    ``v`` may be a flat vector too, and the product is one then: ``hvp(f, x)(v) == hessian(f, x)[0] @ v``.

    After Pearlmutter, "Fast Exact Multiplication by the Hessian" (1994).

    Shapes: ``x`` is a pytree of n real numbers in all, ``f(x)`` a real number of shape ``()``. ``v`` and the product
    are trees like ``x``, or ``[n]`` in the order of ``ravel_pytree(x)``.

    Args:
        f: The function.
        x: Where to differentiate.
        jit: Compile.
        checkpoint: Keep nothing of ``f`` but x, and compute it again for each product.

    Returns:
        ``v -> H v``, of the form of ``v`` and the dtypes of ``x``.

    Raises:
        TypeError: As in :func:`hessian`; from the product, where ``v`` holds complex numbers.
        ValueError: From the product, where ``v`` does not fit ``x``.

    Example:
        >>> import jax.numpy as jnp
        >>> from microtome.jax_impl import hvp
        >>> multiply = hvp(lambda x: jnp.sum(x["w"]) ** 3 / 6, {"w": jnp.array([1.0, 2.0])})
        >>> multiply({"w": jnp.array([1.0, 0.0])})
        {'w': Array([3., 3.], dtype=float32)}
        >>> multiply(jnp.array([1.0, 1.0]))
        Array([6., 6.], dtype=float32)
    """
    matrix = hessian_matrix(f, x, checkpoint, 1, None)
    compiled = _compiler(jit)
    linear = compiled(matrix.linearise)(matrix.x)
    product = compiled(lambda linear, v: linear(v))

    def multiply(v: PyTree) -> Any:
        vector, form = coordinates(v, x)
        return form(product(linear, vector))

    return multiply


def hessian_to_pytree(H: Any, x: PyTree) -> Any:
    """A Hessian in flattened coordinates as a tree of trees: one block for each pair of leaves.

    Equivalent to ``jax.hessian(f)(x)``, for ``H, _ = hessian(f, x)``: the block of the leaves a and b of ``x`` has the
    shape ``a.shape + b.shape``. Blocks are of the dtype of ``H``; where ``H`` is a NumPy array, they are views of it.

    After ``zodiax.hessian_to_pytree``.

    Args:
        H: ``[n, n]``, an array of any kind that can be sliced and reshaped.
        x: The pytree that ``H`` was computed for; only its shapes count.

    Raises:
        TypeError: ``H`` is no array.
        ValueError: ``H`` is not ``[n, n]`` for the n numbers of ``x``.

    Example:
        >>> import jax.numpy as jnp
        >>> from microtome.jax_impl import hessian, hessian_to_pytree
        >>> x = {"a": jnp.ones(2), "b": 3.0}
        >>> hessian_to_pytree(hessian(lambda x: jnp.sum(x["a"]) * x["b"] ** 2, x)[0], x)["b"]["a"]
        Array([6., 6.], dtype=float32)
    """
    if not hasattr(H, "shape") or not hasattr(H, "__getitem__"):
        raise TypeError(f"H must be an array, got a {type(H).__name__}.")
    leaves, treedef = flatten(x)
    shapes = [tuple(getattr(leaf, "shape", ())) for leaf in leaves]
    ends = np.cumsum([math.prod(shape) for shape in shapes], dtype=int).tolist()
    n = ends[-1] if ends else 0
    if tuple(H.shape) != (n, n):
        raise ValueError(
            f"H must have shape ({n}, {n}) for the {n} numbers of x, got {tuple(H.shape)}. Pass the x that H was "
            "computed for."
        )
    parts = [(slice(end - math.prod(shape), end), shape) for end, shape in zip(ends, shapes, strict=True)]
    rows = [treedef.unflatten([H[i, j].reshape(a + b) for j, b in parts]) for i, a in parts]
    return treedef.unflatten(rows)


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
        """The same with an axis for the rows, where there are any."""
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
        """How many blocks there are."""
        return -(-self.count // self.size)

    def may_be_leaner_in_one(self, taken: int, kept: int) -> bool:
        """Whether a single block might need less temporary memory than a loop that takes so much, ``kept`` included.

        It needs ``number`` times what a block does, less twice the result: what is computed is the result itself, no
        block beside it, and what comes before lies in the memory of the result as long as this is free. In a loop it is
        not: all but the first block find rows there. A loop has costs of its own, too.
        """
        block = taken - kept - _LOOP_BYTES
        return block * (self.number - 1) < 2 * math.prod(self.result_shape) * self.dtype.itemsize

    def block(self, linear: Any, start: Any, size: int) -> jax.Array:
        """So many rows or columns, from the function that was linearised."""
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
        """The place of each block, and where to start computing it, so that all are of one size."""
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
        """The matrix, its blocks in a loop."""
        layout, linear = self.layout, self.linearise(x)
        if layout.size >= layout.count:
            return layout.block(linear, 0, layout.count).reshape(layout.result_shape)

        # Where sizes do not fit, the last block starts earlier and repeats some rows, so that one program serves for
        # all blocks: compiling is most of the time of a single call.
        put = jax.lax.dynamic_update_slice_in_dim if layout.count % layout.size else write

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
        """The same in one block, if XLA plans less temporary memory so. Under ``jax.jit`` blocks stay as they are."""
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
        """The same in one block."""
        return dataclasses.replace(self, layout=dataclasses.replace(self.layout, size=self.layout.count))

    def kept_bytes(self) -> int:
        """What the linearisation keeps for all blocks."""
        linear = jax.eval_shape(self.linearise, self.x)
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(linear))

    def within(self, max_bytes: int | None) -> Matrix:
        """The same in the largest blocks that take no more memory; ``None`` changes nothing."""
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
        """The blocks, from Python."""
        layout, compiled = self.layout, _compiler(jit)
        linear = compiled(self.linearise)(self.x)
        block = compiled(lambda linear, start: layout.block(linear, start, layout.size))
        for place, start in bar(layout.places(), layout.number):
            values = block(linear, start)
            yield place, jax.lax.slice_in_dim(values, place.start - start, place.stop - start, axis=layout.axis)

    def compute(self, jit: bool, out: np.ndarray | None, progress: bool) -> Any:
        """The matrix, in the way that was asked for."""
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
    """The memory that a compiled program takes beside its arguments and its result."""
    return int(program.memory_analysis().temp_size_in_bytes)


def block_bytes(program: Any) -> int:
    """The memory that a compiled program takes beside its arguments."""
    return temporary_bytes(program) + int(program.memory_analysis().output_size_in_bytes)


def largest_block(used: Callable[[int], int], count: int, max_bytes: int) -> int:
    """The most rows of ``count``, to a first guess, for which ``used(rows)`` is no more than so many bytes."""
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


def hessian_matrix(
    f: Function, x: PyTree, checkpoint: bool, nbatches: int, batch_size: int | None, max_bytes: int | None = None
) -> Matrix:
    """The Hessian, to be computed; arguments are checked."""
    fun, output, vector, unflatten = _flat(f, x, checkpoint)
    if output.shape or not jnp.issubdtype(output.dtype, jnp.floating):
        raise TypeError(
            f"f must return a real number of shape () for a Hessian, got {output.dtype.name}{list(output.shape)}. "
            "Reduce it, for instance by a sum."
        )
    n = len(vector)
    size = _size(n, n, nbatches, batch_size, max_bytes)
    layout = Layout("hessian", n, (), vector.dtype, vector.dtype, size, vector.weak_type)
    # As in jax.hessian: for the same products, XLA plans up to a fifth less memory than around jax.grad.
    return Matrix(vector, unflatten, lambda v: jax.linearize(jax.jacrev(fun), v)[1], layout).within(max_bytes)


def jacobian_matrix(
    f: Function,
    x: PyTree,
    checkpoint: bool,
    mode: str,
    nbatches: int,
    batch_size: int | None,
    max_bytes: int | None = None,
    *,
    forward: bool = True,
) -> Matrix:
    """The Jacobian, to be computed; arguments are checked. Without ``forward``, ``"auto"`` means rows."""
    if mode not in ("auto", "forward", "reverse"):
        raise ValueError(f"mode must be 'auto', 'forward' or 'reverse', got {mode!r}.")
    fun, output, vector, unflatten = _flat(f, x, checkpoint)
    if not jnp.issubdtype(output.dtype, jnp.inexact):
        raise TypeError(f"f must return floating-point numbers for a Jacobian, got {output.dtype.name}.")
    is_complex = jnp.issubdtype(output.dtype, jnp.complexfloating)
    if is_complex and mode == "reverse":
        raise TypeError(f"f returns {output.dtype.name}, whose rows have no reverse mode. Use mode='forward'.")
    n, m = len(vector), math.prod(output.shape)
    reverse = mode == "reverse" or (mode == "auto" and (m < n or not forward) and not is_complex)
    # What nbatches may be does not depend on what "auto" decides.
    size = _size(m if reverse else n, m if mode == "reverse" else n, nbatches, batch_size, max_bytes)
    dtype, weak = (output.dtype, False) if is_complex else (vector.dtype, vector.weak_type)
    if reverse:
        layout = Layout("reverse", n, output.shape, dtype, output.dtype, size, weak)
        return Matrix(vector, unflatten, lambda v: jax.vjp(fun, v)[1], layout).within(max_bytes)
    layout = Layout("forward", n, output.shape, dtype, vector.dtype, size, weak)
    return Matrix(vector, unflatten, lambda v: jax.linearize(fun, v)[1], layout).within(max_bytes)


def _flat(f: Function, x: PyTree, checkpoint: bool) -> tuple[Function, Any, jax.Array, Unflatten]:
    """``f`` as a function of a vector, what it returns, the vector that stands for ``x``, and the way back."""
    if not callable(f):
        raise TypeError(f"f must be callable, got {f!r}.")
    named, treedef = flatten_with_names(x, "x")
    leaves = [as_array(leaf, name, "Use it in f by a closure.") for name, leaf in named]
    for (name, _), leaf in zip(named, leaves, strict=True):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            raise TypeError(f"{name} holds random keys, which have no derivative. Use them in f by a closure.")
        if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
            raise TypeError(
                f"{name} is {leaf.dtype.name}, but coordinates are real. Make its real and imaginary part two leaves."
            )
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            check_width(leaf, name)
    vector, unflatten = ravel_pytree(treedef.unflatten(leaves))
    if len(vector) and not jnp.issubdtype(vector.dtype, jnp.floating):
        found = ", ".join(f"{name} is {leaf.dtype.name}" for (name, _), leaf in zip(named, leaves, strict=True))
        raise TypeError(f"x is to be differentiated, but holds no floating-point number: {found}. Cast it to a float.")

    def of_vector(v: jax.Array) -> Any:
        # Integers would lose digits on their way through the vector's dtype.
        moved = zip(jax.tree.leaves(unflatten(v)), leaves, strict=True)
        return f(treedef.unflatten([m if jnp.issubdtype(m.dtype, jnp.inexact) else leaf for m, leaf in moved]))

    # Within a loop, where a checkpoint is computed, convolutions need their channels last; outside XLA sees to that.
    as_it_is = lambda closed, *args: jaxpr_as_fun(closed)(*args)
    traced = Traced(of_vector, [vector], run_whole if checkpoint else as_it_is)
    if not jax.tree_util.treedef_is_leaf(traced.treedef):
        raise TypeError(f"f must return a single array, got {traced.treedef}. Join them: ravel_pytree(f(x))[0].")
    fun: Function = traced
    return jax.checkpoint(fun) if checkpoint else fun, traced.output, vector, unflatten


def _size(count: int, most: int, nbatches: int, batch_size: int | None, max_bytes: int | None) -> int:
    """The rows or columns of a block, of which there are ``count``; ``most`` is what ``nbatches`` may be at most."""
    nbatches = check_one_size(nbatches, batch_size, max_bytes)
    if max_bytes is not None:
        return 1
    if batch_size is not None:
        return min(positive("batch_size", batch_size, "or None"), max(count, 1))
    if nbatches > max(most, 1):
        raise ValueError(
            f"nbatches={nbatches} is more than the {most} rows or columns there are. Choose at most {max(most, 1)}."
        )
    return max(-(-count // nbatches), 1)


def check_one_size(nbatches: int, batch_size: int | None, max_bytes: int | None) -> int:
    """``nbatches``, or an error where more than one option sets the size of a block."""
    nbatches = positive("nbatches", nbatches)
    options = {"nbatches": None if nbatches == 1 else nbatches, "batch_size": batch_size, "max_bytes": max_bytes}
    given = [f"{name}={value}" for name, value in options.items() if value is not None]
    if len(given) > 1:
        raise ValueError(f"pass one of nbatches, batch_size and max_bytes, got {', '.join(given)}.")
    if max_bytes is not None:
        positive("max_bytes", max_bytes, "or None")
    return nbatches


def _compiler(jit: bool) -> Callable[[Function], Function]:
    return jax.jit if jit else lambda fun: fun


def coordinates(v: PyTree, x: PyTree) -> tuple[jax.Array, Callable[[jax.Array], Any]]:
    """A vector to multiply with, and how to bring the product into the form that it was given in."""
    like, unflatten = ravel_pytree(x)
    named, treedef = flatten_with_names(v, "v")
    arrays = [as_array(leaf, name, "") for name, leaf in named]
    for (name, _), leaf in zip(named, arrays, strict=True):
        if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
            raise TypeError(f"{name} is {leaf.dtype.name}, but x is real. Multiply its real and imaginary part apart.")
    as_tree = treedef == structure(x)
    expected = [np.shape(leaf) for leaf in jax.tree.leaves(x)]
    if as_tree and [leaf.shape for leaf in arrays] == expected:
        pieces = [leaf.astype(like.dtype).ravel() for leaf in arrays]
        return jnp.concatenate(pieces) if pieces else like, unflatten
    if len(arrays) == 1 and treedef == structure(0) and arrays[0].shape == like.shape:
        return arrays[0].astype(like.dtype), lambda product: product
    if not as_tree:
        raise ValueError(f"v must be a tree like x, {structure(x)}, or a vector of {len(like)}, got {treedef}.")
    wrong = next((n, leaf, e) for (n, _), leaf, e in zip(named, arrays, expected, strict=True) if leaf.shape != e)
    raise ValueError(
        f"v must have the shapes of x, or be a vector of {len(like)}: {wrong[0]} has {wrong[1].shape}, x has "
        f"{wrong[2]} there."
    )


def progress_bar(progress: bool) -> Bar:
    """What shows the progress of an iteration with so many steps."""
    if not progress:
        return lambda iterator, total: iterator
    try:
        from tqdm import tqdm
    except ImportError:
        raise ImportError("progress=True needs tqdm: pip install 'microtome[progress]', or pip install tqdm.") from None
    return lambda iterator, total: tqdm(iterator, total=total, unit="block")
