"""``vmap`` in chunks, after ``powerpax.chunked_vmap``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .batches.arguments import Batch, Signature, collect, leaf_axes, mapped_axes, wraps
from .batches.loop import Traced, example_shapes
from .batches.slices import over_slices, write_rows
from .program.trees import Function, PyTree, check_width, flatten_with_names, positive, with_weak_type


def chunked_vmap(
    fun: Function,
    chunk_size: int | None = None,
    in_axes: PyTree = 0,
    out_axes: PyTree = 0,
) -> Function:
    """Map a function over a batch, at most ``chunk_size`` examples at once.

    Equivalent to ``jax.vmap(fun, in_axes, out_axes)``, whatever the chunk size. What differs:

    * Peak memory is that of ``jax.vmap(fun)`` on ``chunk_size`` examples plus the result,
      ``chunk_size * M(1) + result``: chunks run one after another, each is read straight from the arguments, along
      any axis, and written straight into the result. A length that is no multiple leaves a smaller last chunk.
    * Derivatives keep what they need of each example, as those of ``jax.vmap`` do: nothing is computed twice, and
      their memory grows with the batch. Where that is too much, map ``jax.checkpoint(fun)``, or use
      :func:`micro_vmap`, which computes each microbatch a second time.
    * ``fun`` is traced once at each call, for one example. Outside ``jax.jit`` every call compiles anew: wrap the
      result.
    * In a keyword argument, what is no array (a flag, a string) is shared by all examples, where ``jax.vmap`` refuses
      it. Examples cannot communicate (``axis_name``), since not all of them run together.

    A random ``fun`` takes a key, and the mapped call an array of them (``jax.random.split(key, batch)``): what an
    example draws then depends on its key alone.

    After ``powerpax.chunked_vmap``, which maps every argument over axis 0; ``in_axes``, ``out_axes`` and
    ``chunk_size=None`` are added.

    Shapes: mapped arrays ``[..., batch, ...]`` of any dtype; results with the batch at ``out_axes``, of the dtypes that
    ``fun`` returns. The batch may be empty.

    Args:
        fun: The function of one example.
        chunk_size: The largest number of examples at once; None for all.
        in_axes: As in ``jax.vmap``: an int or None, or a sequence with one entry for each positional argument: an
            int, None for an argument that all examples share, or a tree of these that is a prefix of the argument.
            Keyword arguments are mapped over axis 0.
        out_axes: Where the batch stands in the results: an int, or a tree of ints and None that is a prefix of the
            output. None is for what does not depend on the example; it comes back once.

    Returns:
        A function with the signature of ``fun`` that takes and returns batches.

    Raises:
        TypeError: ``chunk_size``, ``in_axes`` or ``out_axes`` of a wrong type, a mapped argument that is no array.
        ValueError: ``chunk_size`` is not positive, mapped arrays of different length or without the axis, axes that do
            not fit the tree or the rank, ``out_axes=None`` for what depends on the example.

    Example:
        >>> import jax.numpy as jnp
        >>> from microtome.jax_impl import chunked_vmap
        >>> rows = jnp.arange(10.0).reshape(5, 2)
        >>> chunked_vmap(jnp.sum, chunk_size=2)(rows)
        Array([ 1.,  5.,  9., 13., 17.], dtype=float32)
        >>> chunked_vmap(jnp.dot, 2, in_axes=(0, None))(rows, jnp.array([1.0, 10.0]))
        Array([10., 32., 54., 76., 98.], dtype=float32)
    """
    return mapped_in_chunks(fun, chunk_size, in_axes, out_axes, lambda chunk: chunk)


def mapped_in_chunks(
    fun: Function, chunk_size: int | None, in_axes: PyTree, out_axes: PyTree, kept: Callable[[Function], Function]
) -> Function:
    """Map as :func:`chunked_vmap`; where there are several chunks, ``kept`` says what derivatives keep of each."""
    if chunk_size is not None:
        chunk_size = positive("chunk_size", chunk_size, "or None for all examples at once")
    if isinstance(in_axes, bool) or not (in_axes is None or isinstance(in_axes, (int, tuple, list))):
        raise TypeError(f"in_axes must be an int, None or a sequence with an entry for each argument, got {in_axes!r}.")
    arguments = Signature.of(fun)

    @wraps(fun)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        batch = collect(arguments, args, kwargs, list(mapped_axes(arguments, in_axes, args, kwargs).items()))

        def example(*leaves: jax.Array) -> Any:
            new_args, new_kwargs = batch.rebuild(leaves)
            return fun(*new_args, **new_kwargs)

        with jax.named_scope("chunked_vmap"):
            one = Traced(example, example_shapes(batch))
            outputs = jax.tree.leaves(one.output)
            flat = lambda *leaves: jax.tree.leaves(one(*leaves))
            axes = _output_axes(out_axes, one.output)
            _check_shared(flat, axes, batch, one.output)
            vmapped = jax.vmap(flat, tuple(batch.axes), axes)
            if chunk_size is None or batch.rows <= chunk_size:
                return one.treedef.unflatten(vmapped(*batch.leaves))

            in_loop = kept(vmapped)

            def chunk(results: list[jax.Array], start: Any, rows: int) -> list[jax.Array]:
                pairs = zip(batch.leaves, batch.axes, strict=True)
                values = in_loop(*(jax.lax.dynamic_slice_in_dim(leaf, start, rows, axis) for leaf, axis in pairs))
                return [
                    value if axis is None else write_rows(result, value, start, axis)
                    for result, value, axis in zip(results, values, axes, strict=True)
                ]

            check_width(one.output, "output")
            shapes = [_with_axis(out.shape, axis, batch.rows) for out, axis in zip(outputs, axes, strict=True)]
            start = [jnp.zeros(shape, out.dtype) for shape, out in zip(shapes, outputs, strict=True)]
            results = over_slices(chunk, start, batch.rows, chunk_size)
            return one.treedef.unflatten(map(with_weak_type, results, outputs))

    return mapped


def _output_axes(out_axes: PyTree, output: PyTree) -> list[int | None]:
    """Return the batch axis of each leaf of the output, counted from the front."""
    named, _ = flatten_with_names(output, "output")
    axes = leaf_axes("out_axes", out_axes, output, "output")
    for (name, out), axis in zip(named, axes, strict=True):
        if axis is not None and not -out.ndim - 1 <= axis <= out.ndim:
            raise ValueError(
                f"{name} has shape {out.shape} for one example, so out_axes must be from {-out.ndim - 1} to {out.ndim} "
                f"for it, got {axis}."
            )
    return [None if axis is None else axis % (out.ndim + 1) for (_, out), axis in zip(named, axes, strict=True)]


def _check_shared(flat: Function, axes: list[int | None], batch: Batch, output: PyTree) -> None:
    """Raise a ValueError for an output that is to come back once, but differs between examples."""
    named, _ = flatten_with_names(output, "output")
    for place, ((name, _), axis) in enumerate(zip(named, axes, strict=True)):
        if axis is not None:
            continue
        alone = jax.vmap(lambda *leaves, place=place: flat(*leaves)[place], tuple(batch.axes), None)
        try:
            jax.eval_shape(alone, *batch.leaves)
        except ValueError:
            raise ValueError(
                f"{name} depends on the example, so out_axes cannot be None for it. Say where its batch axis goes."
            ) from None


def _with_axis(shape: tuple[int, ...], axis: int | None, length: int) -> tuple[int, ...]:
    return shape if axis is None else (*shape[:axis], length, *shape[axis:])
