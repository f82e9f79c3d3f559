"""Jacobians and Hessians of torch functions in blocks, and Hessian-vector products."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import torch

from .. import jax_impl
from ..bridge import as_torch, to_jax
from ..bridge.base.errors import NoForwardMode
from ..bridge.base.torch_internals import disable_dynamo
from ..bridge.call.autograd import is_transformed
from ..bridge.lifting import to_jax_callable
from ..bridge.memory.dtypes import torch_dtype
from ..bridge.memory.trees import Rows, to_jax_tree, to_torch_tree
from ..bridge.watch.walk import is_traced
from ..jax_impl.batches.blocks import (
    Layout,
    Matrix,
    block_bytes,
    check_array,
    check_no_overlap,
    largest_block,
    progress_bar,
    temporary_bytes,
)
from ..jax_impl.batches.matrices import check_one_size, coordinates, hessian_matrix, jacobian_matrix
from ..jax_impl.program.trees import PyTree, flatten
from .calls import Fun, numbers_to_tensors

Out = torch.Tensor | np.ndarray

Making: TypeAlias = Callable[[PyTree], Matrix]  # at a point


def jacobian(
    f: Fun,
    x: PyTree,
    nbatches: int = 1,
    *,
    checkpoint: bool = False,
    batch_size: int | None = None,
    max_bytes: int | None = None,
    mode: str = "auto",
    out: Out | None = None,
    progress: bool = False,
) -> tuple[Any, Fun]:
    """The Jacobian of a torch function in flattened coordinates, computed in blocks.

    Equivalent, for a tensor ``x``, to ``torch.func.jacrev(f)(x).flatten(-x.dim())``; for a tree of tensors, to the
    Jacobian by ``torch.cat([leaf.flatten() for leaf in leaves])``, dicts in the order of their keys. What differs: a
    block of columns (or rows) is computed at a time, by one linearisation of ``f`` in one compiled program; with
    ``out`` the result may be larger than the device's memory.

    Part of autograd: where ``x`` or a captured tensor requires grad, so does the result, and ``backward()`` works. With
    ``out`` or ``progress`` it does not. Random draws in ``f`` (dropout) are the same for all columns.

    After ``zodiax.jacobian``; ``batch_size``, ``max_bytes``, ``mode``, ``out`` and ``progress`` are added.

    Args:
        f: a function of ``x`` that returns one tensor ``[...]``.
        x: a tensor, or a tree of real tensors, n numbers in all. Several dtypes are promoted as in
            ``jax.flatten_util.ravel_pytree``; integers have columns of zeros.
        nbatches: the number of blocks, from 1 to n.
        checkpoint: keep nothing of ``f`` but x, and compute it again for each block.
        batch_size: the columns (or rows) of a block, in place of ``nbatches``.
        max_bytes: the memory of a block and its intermediate values, in place of ``nbatches``: blocks are as large as
            it allows, beside the linearisation and the result. To find out, programs for a few sizes are compiled.
        mode: ``"forward"`` (columns), ``"reverse"`` (rows), or ``"auto"``: rows where there are fewer outputs than
            inputs, or where ``f`` has no forward mode (a ``torch.autograd.Function`` with ``once_differentiable``).
        out: a tensor, NumPy array or memmap ``[..., n]`` of the dtype of the result, on the CPU (pinned or not) or on
            the device of ``x``, to be filled block by block and returned. If an error interrupts the work, a note on it
            says how much was written.
        progress: show a bar (needs tqdm); blocks then run one by one.

    Returns:
        ``(jacobian, unflatten)``: a tensor ``[..., n]``, or ``out``; ``unflatten`` turns a vector of n numbers into a
        tree like ``x``, dtypes included.

    Raises:
        TypeError: ``f`` returns no single tensor of floats, ``x`` holds complex numbers or no floats, ``out`` of a
            wrong kind or dtype, ``out``, ``progress`` or ``max_bytes`` inside ``torch.func`` or a traced function, an
            option of a wrong type.
        ValueError: a size that is not positive, ``nbatches`` larger than n, several of ``nbatches``, ``batch_size`` and
            ``max_bytes``, a ``max_bytes`` too small for one column (or row), an unknown ``mode``, ``out`` of a wrong
            shape or device, one that requires grad, is sparse, or expanded, or an inference tensor outside of inference
            mode.
        ImportError: ``progress`` without tqdm.

    >>> import torch
    >>> from microtome import torch_api as mt
    >>> x = {"a": torch.ones(2), "b": torch.tensor(3.0)}
    >>> mt.jacobian(lambda x: x["a"] * x["b"] ** 2, x, nbatches=2)[0]
    tensor([[9., 0., 6.],
            [0., 9., 6.]])
    """
    x, fun = numbers_to_tensors(x), _function(f)

    def computed(forward: bool) -> Out:
        make = lambda *sizes: lambda x: jacobian_matrix(fun, x, checkpoint, mode, *sizes, forward=forward)
        return _compute(_sized(make, x, nbatches, batch_size, max_bytes), x, out, progress)

    try:
        return computed(forward=True), _unflatten(x)
    except NoForwardMode:
        if mode != "auto":
            raise
        return computed(forward=False), _unflatten(x)


def hessian(
    f: Fun,
    x: PyTree,
    nbatches: int = 1,
    *,
    checkpoint: bool = False,
    batch_size: int | None = None,
    max_bytes: int | None = None,
    out: Out | None = None,
    progress: bool = False,
) -> tuple[Any, Fun]:
    """The Hessian of a scalar torch function in flattened coordinates, computed in blocks.

    Equivalent, for a tensor ``x``, to ``torch.func.hessian(f)(x).reshape(n, n)``; for the parameters of a module, with
    ``f = lambda params: loss(torch.func.functional_call(model, params, ...))``, to the Hessian by
    ``torch.nn.utils.parameters_to_vector(model.parameters())``. What differs: a block of columns is computed at a time,
    by one linearisation of the gradient, in one compiled program; with ``out`` the result is never on the device as a
    whole. It works where torch's own second derivative fails, as in fused attention. Where products are so cheap that a
    single block takes less memory than a loop over blocks, as in a logsumexp, it is a single block.

    After ``zodiax.hessian``; ``batch_size``, ``max_bytes``, ``out`` and ``progress`` are added. The other arguments,
    autograd and the errors are as in :func:`jacobian`.

    Args:
        f: a function of ``x`` that returns a real tensor ``[]``.
        x: a tensor, or a tree of real tensors, n numbers in all.
        nbatches: the number of blocks, from 1 to n.
        checkpoint: keep nothing of ``f`` but x, and compute it again for each block.
        batch_size: the columns of a block, in place of ``nbatches``.
        max_bytes: the memory of a block and its intermediate values, in place of ``nbatches``.
        out: a tensor, NumPy array or memmap ``[n, n]``, to be filled block by block and returned.
        progress: show a bar.

    Returns:
        ``(hessian, unflatten)``; see :func:`hessian_to_pytree` for its blocks by leaf.

    Raises:
        TypeError, ValueError: as in :func:`jacobian`, and for an ``f`` that returns no real number.

    >>> import torch
    >>> from microtome import torch_api as mt
    >>> mt.hessian(lambda x: x.sum() ** 3 / 6, torch.tensor([1.0, 2.0]), nbatches=2)[0]
    tensor([[3., 3.],
            [3., 3.]])
    """
    x, fun = numbers_to_tensors(x), _function(f)
    make = lambda *sizes: lambda x: hessian_matrix(fun, x, checkpoint, *sizes)
    return _compute(_sized(make, x, nbatches, batch_size, max_bytes), x, out, progress), _unflatten(x)


def jacobian_blocks(
    f: Fun,
    x: PyTree,
    nbatches: int = 1,
    *,
    checkpoint: bool = False,
    batch_size: int | None = None,
    max_bytes: int | None = None,
    mode: str = "forward",
    progress: bool = False,
) -> Iterator[tuple[slice, torch.Tensor]]:
    """The blocks of a Jacobian one after another.

    Equivalent, for ``J, _ = jacobian(f, x)``, to ``(cols, J[..., cols]) for cols in slices`` in forward mode, and to
    ``(rows, J.reshape(-1, n)[rows]) for rows in slices`` in reverse mode. Each block is computed when asked for, by one
    program for all; only this block and the linearisation are in memory. Not part of autograd.

    Arguments and errors are as in :func:`jacobian`; errors are raised at the call. ``mode`` has no ``"auto"``, since it
    decides what a block is.

    >>> import torch
    >>> from microtome import torch_api as mt
    >>> for columns, block in mt.jacobian_blocks(lambda x: x.cumsum(0), torch.ones(3), batch_size=2):
    ...     print(columns, block.tolist())
    slice(0, 2, None) [[1.0, 0.0], [1.0, 1.0], [1.0, 1.0]]
    slice(2, 3, None) [[0.0], [0.0], [1.0]]
    """
    if mode == "auto":
        raise ValueError("mode must be 'forward' (blocks of columns) or 'reverse' (blocks of rows), got 'auto'.")
    x, fun = numbers_to_tensors(x), _function(f)
    make = lambda *sizes: lambda x: jacobian_matrix(fun, x, checkpoint, mode, *sizes)
    return _blocks(_sized(make, x, nbatches, batch_size, max_bytes), x, progress)[1]


def hessian_blocks(
    f: Fun,
    x: PyTree,
    nbatches: int = 1,
    *,
    checkpoint: bool = False,
    batch_size: int | None = None,
    max_bytes: int | None = None,
    progress: bool = False,
) -> Iterator[tuple[slice, torch.Tensor]]:
    """The blocks of a Hessian one after another.

    Equivalent, for ``H, _ = hessian(f, x)``, to ``(rows, H[rows]) for rows in slices``. Each block is computed when
    asked for, by one program for all; only this block and the linearisation are in memory. Not part of autograd.

    Arguments and errors are as in :func:`hessian`; errors are raised at the call.

    >>> import torch
    >>> from microtome import torch_api as mt
    >>> sum(float(rows.sum()) for _, rows in mt.hessian_blocks(lambda x: (x**3).sum(), torch.ones(3), nbatches=3))
    18.0
    """
    x, fun = numbers_to_tensors(x), _function(f)
    make = lambda *sizes: lambda x: hessian_matrix(fun, x, checkpoint, *sizes)
    return _blocks(_sized(make, x, nbatches, batch_size, max_bytes), x, progress)[1]


def hvp(f: Fun, x: PyTree, *, checkpoint: bool = False) -> Callable[[PyTree], PyTree]:
    """A function that multiplies by the Hessian of a torch function, without the Hessian.

    Equivalent to ``lambda v: torch.func.jvp(torch.func.grad(f), (x,), (v,))[1]``. What differs: the gradient is
    linearised once, here, at the values that ``x`` and captured tensors have now; a product then costs about as much as
    the linear half of a gradient. ``v`` may be a flat vector too: ``hvp(f, x)(v) == hessian(f, x)[0] @ v``.

    Products are not part of autograd. After Pearlmutter, "Fast Exact Multiplication by the Hessian" (1994).

    Args:
        f: a function of ``x`` that returns a real tensor ``[]``.
        x: a tensor, or a tree of real tensors, n numbers in all.
        checkpoint: keep nothing of ``f`` but x, and compute it again for each product.

    Returns:
        ``v -> H v`` for a ``v`` like ``x``, or ``[n]``; the product has its form.

    Raises:
        TypeError, ValueError: as in :func:`hessian`; from the product, where ``v`` does not fit ``x``.

    >>> import torch
    >>> from microtome import torch_api as mt
    >>> multiply = mt.hvp(lambda x: x["w"].sum() ** 3 / 6, {"w": torch.tensor([1.0, 2.0])})
    >>> multiply({"w": torch.tensor([1.0, 0.0])})
    {'w': tensor([3., 3.])}
    >>> multiply(torch.ones(2))
    tensor([6., 6.])
    """
    x, fun = numbers_to_tensors(x), _function(f)
    linear, layout = _linearise(lambda x: hessian_matrix(fun, x, checkpoint, 1, None), x, None)
    like = to_torch_tree(to_jax_tree(x, torch.empty_like))  # only its shapes and dtypes count
    with torch.no_grad():  # compiled now: the derivatives of a traced function can be recorded while it exists
        _product.compiled(linear, torch.zeros(layout.inputs, dtype=torch_dtype(layout.dtype), device=_device(x)))

    def multiply(v: PyTree) -> PyTree:
        v = numbers_to_tensors(v)
        with torch.no_grad():
            return _in_the_form_of(v, like, _product(linear, _vector(v, like)))

    return multiply


def hessian_to_pytree(H: Out, x: PyTree) -> PyTree:
    """A Hessian in flattened coordinates as a tree of trees: one block for each pair of leaves.

    Equivalent to ``torch.func.hessian(f)(x)``, for ``H, _ = hessian(f, x)``: the block of the leaves a and b of ``x``
    has the shape ``a.shape + b.shape``. Blocks are views of ``H``, a tensor or NumPy array, where torch can view it so.

    After ``zodiax.hessian_to_pytree``.

    Raises:
        TypeError: ``H`` is no array.
        ValueError: ``H`` is not ``[n, n]`` for the n numbers of ``x``.

    >>> import torch
    >>> from microtome import torch_api as mt
    >>> x = {"a": torch.ones(2), "b": torch.tensor(3.0)}
    >>> H, _ = mt.hessian(lambda x: x["a"].sum() * x["b"] ** 2, x)
    >>> mt.hessian_to_pytree(H, x)["b"]["a"]
    tensor([6., 6.])
    """
    return to_torch_tree(jax_impl.hessian_to_pytree(H, to_jax_tree(x)))


# Functions that capture nothing are told apart by identity, so these are made once.
_product: Any = as_torch(lambda linear, vector: linear(vector))
_vector = as_torch(lambda v, x: coordinates(v, x)[0])
_in_the_form_of = as_torch(lambda v, x, product: coordinates(v, x)[1](product))


def _function(f: Fun) -> Fun:
    """Trace ``f``. What it draws, it draws once: all columns belong to the same function."""
    traced = to_jax_callable(f)
    if not is_traced(traced):
        return traced
    return lambda x: traced(Rows(x, jnp.zeros((), jnp.int32)))


def _sized(
    make: Callable[..., Making],
    x: PyTree,
    nbatches: int,
    batch_size: int | None,
    max_bytes: int | None,
) -> Making:
    """Return the matrix, in blocks of the size that was asked for."""
    if max_bytes is None:
        return make(nbatches, batch_size)
    if is_transformed(()):
        raise TypeError(
            "max_bytes is found out by compiling, outside of torch.func and traced functions. Pass batch_size there."
        )
    check_one_size(nbatches, batch_size, max_bytes)
    linear, layout = _linearise(make(1, 1), x, None)
    start = torch.tensor(0, device=_device(x))

    def used(size: int) -> int:
        block: Any = as_torch(lambda linear, start: layout.block(linear, start, size))
        with torch.no_grad():
            return block_bytes(block.compiled(linear, start))

    return make(1, largest_block(used, layout.count, max_bytes)) if layout.count else make(1, 1)


def _compute(matrix: Making, x: PyTree, out: Out | None, progress: bool) -> Out:
    if out is None and not progress:
        return _leaner(matrix, x)(x)[0]
    if out is not None:
        _check_out(out, x)
    layout, blocks = _blocks(matrix, x, progress, out)
    if out is None:
        out = torch.empty(layout.result_shape, dtype=torch_dtype(layout.dtype), device=_device(x))
    if isinstance(out, np.ndarray):
        return layout.fill(out, ((place, np.asarray(to_jax(block.cpu()))) for place, block in blocks))
    return layout.fill(out, blocks)


@disable_dynamo
def _leaner(matrix: Making, x: PyTree) -> Fun:
    """Return the function that computes the matrix: in one block instead, if XLA plans less temporary memory so."""

    def in_blocks(x: PyTree) -> tuple[jax.Array, jax_impl.Static[tuple[Layout, int]]]:
        made = matrix(x)
        return made.whole(made.x), jax_impl.Static((made.layout, made.kept_bytes()))

    def in_one(x: PyTree) -> tuple[jax.Array, None]:
        made = matrix(x).in_one()
        return made.whole(made.x), None

    choices: Any = as_torch(in_blocks, recompute=True), as_torch(in_one, recompute=True)
    if is_transformed(()):
        return choices[0]
    program = choices[0].compiled(x)
    layout, kept = program.outline.shape.join([None])[1].value
    if layout.number < 2 or not layout.may_be_leaner_in_one(temporary_bytes(program), kept):
        return choices[0]
    return min(choices, key=lambda choice: temporary_bytes(choice.compiled(x)))


def _blocks(
    matrix: Making, x: PyTree, progress: bool, out: Out | None = None
) -> tuple[Layout, Iterator[tuple[slice, torch.Tensor]]]:
    """Return the layout, and the blocks to be computed one by one."""
    bar = progress_bar(progress)
    if is_transformed(()):
        raise TypeError(
            "out, progress and blocks one by one need the values of x, which torch.func transforms and traced "
            "functions hold back. Call this outside of vmap, grad and the like, or without these options."
        )
    linear, layout = _linearise(matrix, x, out)

    block: Any = as_torch(lambda linear, start: layout.block(linear, start, layout.size))
    device = _device(x)
    with torch.no_grad():  # compiled now: the derivatives of a traced function can be recorded while it exists
        block.compiled(linear, torch.tensor(0, device=device))

    def computed() -> Iterator[tuple[slice, torch.Tensor]]:
        for place, start in bar(layout.places(), layout.number):
            with torch.no_grad():
                values = block(linear, torch.tensor(start, device=device))
            yield place, values.narrow(layout.axis, place.start - start, place.stop - place.start)

    return layout, computed()


def _linearise(matrix: Making, x: PyTree, out: Out | None) -> tuple[PyTree, Layout]:
    """Return the function linearised at ``x``, and the layout; check ``out`` before anything runs."""
    # Torch's names of dtypes are NumPy's behind a prefix.
    wanted = None if out is None else (tuple(out.shape), str(out.dtype).removeprefix("torch."))

    def prepare(x: PyTree) -> tuple[PyTree, jax_impl.Static[Layout]]:
        made = matrix(x)
        if wanted is not None:
            made.layout.check_out(*wanted)
        return made.linearise(made.x), jax_impl.Static(made.layout)

    with torch.no_grad():
        linear, layout = as_torch(prepare)(x)
    return linear, layout.value


def _check_out(out: object, x: PyTree) -> None:
    if not isinstance(out, torch.Tensor):
        if not isinstance(out, np.ndarray):
            raise TypeError(f"out must be a tensor, or a NumPy array or memmap, got a {type(out).__name__}.")
        return check_array(out)
    if out.requires_grad:
        raise ValueError("out must not require grad, since it is written in place. Pass out.detach().")
    if out.is_inference() and not torch.is_inference_mode_enabled():
        raise ValueError(
            "out is an inference tensor, which can be written in inference mode alone. Pass out.clone(), or call this "
            "in torch.inference_mode()."
        )
    if out.layout is not torch.strided or out.is_nested:
        raise ValueError(
            f"out must be a dense tensor, got a sparse or nested one ({out.layout}). Pass torch.empty of its shape."
        )
    check_no_overlap(out.shape, out.stride(), 1)
    if out.device.type != "cpu" and out.device != _device(x):
        raise ValueError(f"out must be on the CPU or on the device of x, {_device(x)}, got {out.device}.")
    return None


def _device(x: PyTree) -> torch.device:
    tensors = [leaf for leaf in jax.tree.leaves(to_jax_tree(x)) if isinstance(leaf, torch.Tensor)]
    return tensors[0].device if tensors else torch.device("cpu")


def _unflatten(x: PyTree) -> Fun:
    """Return what turns a vector into a tree like ``x``."""
    leaves, treedef = flatten(to_jax_tree(x))
    like = [(leaf.shape, leaf.dtype) for leaf in leaves]
    sizes = [math.prod(shape) for shape, _ in like]

    def unflatten(vector: torch.Tensor) -> PyTree:
        if tuple(vector.shape) != (sum(sizes),):
            raise ValueError(f"the vector must have shape ({sum(sizes)},), got {tuple(vector.shape)}.")
        pieces = zip(vector.split(sizes), like, strict=True)
        return to_torch_tree(treedef.unflatten([p.reshape(shape).to(dtype) for p, (shape, dtype) in pieces]))

    return unflatten
