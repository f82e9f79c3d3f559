"""``vmap`` of torch functions in chunks."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from .. import jax_impl
from ..bridge.call.as_torch import only_maps
from ..bridge.lifting import to_jax_callable
from ..bridge.memory.trees import to_jax_tree
from ..jax_impl.chunking import mapped_in_chunks
from ..jax_impl.program.trees import PyTree
from .calls import Fun, finish, number_rows, parameter_names


def chunked_vmap(
    fun: Fun,
    chunk_size: int | None = None,
    in_axes: PyTree = 0,
    out_axes: PyTree = 0,
    *,
    in_dims: PyTree = 0,
    out_dims: PyTree = 0,
    randomness: str = "different",
) -> Fun:
    """Map a torch function over a batch, at most ``chunk_size`` examples at once.

    Equivalent to ``torch.func.vmap(fun, in_dims, out_dims, randomness, chunk_size=chunk_size)``. What differs: the
    chunks run one after another in one compiled program, which reads each straight from the arguments and writes it
    straight into the result, ``chunk_size * M(1) + result``; keyword arguments are mapped too, over their first axis;
    what an example draws (a dropout mask) does not depend on the chunk size. ``fun`` is traced for one example.

    Part of autograd. Where there is more than one chunk, ``backward()`` computes each a second time when its turn
    comes, as ``torch.utils.checkpoint`` around it would, so that it keeps only the examples themselves;
    ``torch.func.vmap`` keeps what the derivative needs of all of them, whatever its chunk size.

    After ``powerpax.chunked_vmap``; ``in_axes``, ``out_axes`` and ``chunk_size=None`` are added.

    Args:
        fun: the function of one example.
        chunk_size: the largest number of examples at once; None for all. Leftover rows are a smaller last chunk.
        in_axes: the batch axis of each positional argument: an int or None for all, or a sequence of ints, None
            (shared by all examples) and trees of these.
        out_axes: where the batch stands in the results: an int, or a tree of ints and None (what does not depend on
            the example, and comes back once).
        in_dims: torch's name for ``in_axes``.
        out_dims: torch's name for ``out_axes``.
        randomness: ``"different"`` draws for each example, ``"same"`` once for all.

    Returns:
        A function with the signature of ``fun`` on batches; ``.compiled(*args).memory_analysis()`` tells its memory.

    Raises:
        TypeError, ValueError: at once for sizes and options; at the call, before anything runs, for axes that do not
            fit and for mapped arguments of different length.

    >>> import torch
    >>> from microtome import torch_api as mt
    >>> mt.chunked_vmap(torch.dot, 2, in_dims=(0, None))(torch.arange(6.0).reshape(3, 2), torch.tensor([1.0, 10.0]))
    tensor([10., 32., 54.])
    """
    in_axes = _either("in_axes", in_axes, "in_dims", in_dims)
    out_axes = _either("out_axes", out_axes, "out_dims", out_dims)
    if randomness not in ("different", "same"):
        raise ValueError(f"randomness must be 'different' or 'same', got {randomness!r}.")
    traced = to_jax_callable(fun)
    jax_impl.chunked_vmap(traced, chunk_size, in_axes, out_axes)

    def run(*args: PyTree, **kwargs: PyTree) -> PyTree:
        one_for_all = in_axes is None or isinstance(in_axes, int)
        axes = [in_axes] * len(args) if one_for_all else list(to_jax_tree(in_axes))
        count = len(axes)
        others = [name for name in kwargs if name not in parameter_names(traced)[:count]]
        axes += [0] * len(others)
        numbers = jnp.arange if randomness == "different" else jnp.zeros
        args, kwargs = number_rows(traced, [*range(count), *others], axes, args, kwargs, numbers)
        again = functools.partial(jax.checkpoint, prevent_cse=False)  # a scan needs no guard against merging the passes
        return mapped_in_chunks(traced, chunk_size, tuple(axes[:count]), to_jax_tree(out_axes), again)(*args, **kwargs)

    only_maps(run, traced)
    return finish(run, fun, lambda *args, **kwargs: ())


def _either(name: str, value: PyTree, torch_name: str, torch_value: PyTree) -> PyTree:
    """Return the value of one option that has two names."""
    if torch_value == 0:
        return value
    if value != 0:
        raise TypeError(f"{name} and {torch_name} are two names of one option; pass one of them.")
    return torch_value
