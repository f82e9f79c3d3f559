"""Jacobians and Hessians in blocks, after ``zodiax``, and Hessian-vector products."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from .batches.blocks import Unflatten, compiler, progress_bar
from .batches.matrices import coordinates, hessian_matrix, jacobian_matrix
from .program.trees import (
    Function,
    PyTree,
    flatten,
)


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
    compiled = compiler(jit)
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
