"""``to_jax`` and ``to_torch``: pytrees of tensors and arrays over the same memory."""

from __future__ import annotations

import jax
import torch

from ...jax_impl.program.trees import PyTree
from ..base.versions import enable_x64
from .devices import start_jax
from .trees import to_jax_tree, to_torch_tree
from .values import array_to_tensor, tensor_to_array


def to_jax(tree: PyTree) -> PyTree:
    """Every tensor in a pytree as a ``jax.Array`` over the same memory.

    A copy is made only where XLA cannot take the layout (strided, expanded, conjugated, unaligned). 64-bit types keep
    their width. Dicts keep the order of their keys. A write to the tensor shows in the array: JAX takes arrays to be
    constant, so write only after the last computation that reads it has ended.

    Raises:
        TypeError: for sparse, quantised, nested, meta or fake tensors.
        ValueError: for a device that JAX has no backend for.
    """
    start_jax()
    with enable_x64():
        return to_jax_tree(tree, lambda x: tensor_to_array(x) if isinstance(x, torch.Tensor) else x)


def to_torch(tree: PyTree) -> PyTree:
    """Every ``jax.Array`` in a pytree as a tensor; the way back of :func:`to_jax`."""
    return to_torch_tree(tree, lambda x: array_to_tensor(x) if isinstance(x, jax.Array) else x)
