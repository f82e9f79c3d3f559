"""Scans of torch functions: compiled loops with bounded memory, which torch itself does not have."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .. import jax_impl
from ..bridge import as_torch
from ..bridge.call.as_torch import only_maps
from ..bridge.lifting import to_jax_callable
from ..bridge.memory.trees import Rows
from ..bridge.watch.walk import is_traced
from ..jax_impl.program.trees import PyTree
from .calls import Fun, numbers_to_tensors


def sliced_scan(
    f: Fun,
    init: PyTree,
    xs: PyTree = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    *,
    start: int | None = None,
    stop: int | None = None,
    step: int | None = None,
) -> tuple[PyTree, PyTree]:
    """Run a loop of a torch function as one compiled program, and keep a slice of its outputs.

    Equivalent to::

        carry, ys = init, []
        for i in reversed(range(length)) if reverse else range(length):
            carry, y = f(carry, xs[i])
            ys.append(y)
        ys = torch.stack(ys[::-1] if reverse else ys)[start:stop:step]

    for trees of tensors, and for negative strides too. What differs: only the outputs that are kept ever exist, and the
    loop does not grow with its length. ``f`` is traced once.

    Part of autograd. ``backward()`` needs what the derivative keeps of every step, as a loop in torch does; use
    :func:`checkpoint_chunked_scan` where that is too much.

    After ``powerpax.sliced_scan``, a ``jax.lax.scan`` with a slice.

    Args:
        f: ``(carry, x) -> (carry, y)``; the carry keeps its tree, shapes and dtypes. Random draws differ in each step.
        init: the first carry, a tree of tensors and numbers (taken as tensors of torch's default dtype).
        xs: a tree of tensors ``[length, ...]``, or None with a ``length``.
        length: the number of steps; has to agree with ``xs``.
        reverse: run from the last entry to the first.
        unroll: how many steps to write out in a loop, at most; True for all.
        start: where the slice starts.
        stop: where it ends.
        step: its stride, not 0.

    Returns:
        ``(carry, ys)``, the leaves of ``ys`` ``[kept, ...]``.

    Raises:
        TypeError: ``f`` returns no pair, or the carry changes its tree, shape or dtype, before anything runs.
        ValueError: no length or several, a leaf of ``xs`` without axis, ``step=0``, a negative ``length``.

    >>> import torch
    >>> from microtome import torch_api as mt
    >>> mt.sliced_scan(lambda total, x: (total + x, total + x), 0.0, torch.arange(6.0), step=2)
    (tensor(15.), tensor([ 0.,  3., 10.]))
    """
    options = {"length": length, "reverse": reverse, "unroll": unroll, "start": start, "stop": stop, "step": step}
    return _scan(jax_impl.sliced_scan, f, init, xs, options)


def checkpoint_chunked_scan(
    f: Fun,
    init: PyTree,
    xs: PyTree = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    *,
    chunk_size: int | str | None = "auto",
) -> tuple[PyTree, PyTree]:
    """Run a loop of a torch function as one compiled program, with little memory for ``backward()``.

    Equivalent to the loop in :func:`sliced_scan` without its slice. What differs: autograd keeps only the carry at the
    start of each chunk, ``length / chunk_size * carry``, and ``backward()`` computes the chunks a second time, one
    after another, ``chunk_size * residuals``. By default, 10000 steps take the memory of some 200. It is
    what ``torch.utils.checkpoint`` around every chunk would do, in a loop that does not grow with its length.

    After ``powerpax.checkpoint_chunked_scan``, and the checkpointing of Chen et al., "Training Deep Nets with Sublinear
    Memory Cost" (2016); ``chunk_size="auto"`` is added.

    Args:
        f: ``(carry, x) -> (carry, y)``; the carry keeps its tree, shapes and dtypes. Random draws differ in each step
            and are the same when it is computed again.
        init: the first carry, a tree of tensors and numbers (taken as tensors of torch's default dtype).
        xs: a tree of tensors ``[length, ...]``, or None with a ``length``.
        length: the number of steps; has to agree with ``xs``.
        reverse: run from the last entry to the first.
        unroll: how many steps to write out in a loop, at most; True for all.
        chunk_size: steps of a chunk; by default about √length. None for a single chunk, which saves nothing.

    Returns:
        ``(carry, ys)``.

    Raises:
        TypeError: ``f`` returns no pair, or the carry changes its tree, shape or dtype, before anything runs.
        ValueError: no length or several, a leaf of ``xs`` without axis, ``chunk_size`` not positive.

    >>> import torch
    >>> from microtome import torch_api as mt
    >>> x = torch.tensor(1.0, requires_grad=True)
    >>> final, _ = mt.checkpoint_chunked_scan(lambda c, _: (c.sin(), None), x, length=100)
    >>> final.backward()
    >>> print(f"{x.grad:.4f}")
    0.0037
    """
    options = {"length": length, "reverse": reverse, "unroll": unroll, "chunk_size": chunk_size}
    return _scan(jax_impl.checkpoint_chunked_scan, f, init, xs, options)


def _scan(scan: Fun, f: Fun, init: PyTree, xs: PyTree, options: dict[str, Any]) -> PyTree:
    traced = to_jax_callable(f)

    def run(init: PyTree, xs: PyTree) -> PyTree:
        return scan(traced, init, _numbered(traced, xs, options["length"]), **options)

    only_maps(run, traced)
    return as_torch(run)(*numbers_to_tensors((init, xs)))


def _numbered(f: Fun, xs: PyTree, length: int | None) -> PyTree:
    """Return ``xs`` with the number of each entry, so that random draws can tell steps apart."""
    lengths = {leaf.shape[0] if getattr(leaf, "shape", ()) else None for leaf in jax.tree.leaves(xs)}
    lengths |= {length} - {None}
    if len(lengths) != 1 or not all(isinstance(n, int) and n >= 0 for n in lengths) or not is_traced(f):
        return xs  # written in JAX, or refused with a message that speaks of what was passed
    return Rows(xs, jnp.arange(lengths.pop(), dtype=jnp.int32))
