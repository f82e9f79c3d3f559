"""Memory-saving transforms for PyTorch, executed by XLA.

The package has three parts, each imported by its own name:

- ``microtome.torch_api``: the transforms for torch functions and tensors; the usual import is
  ``from microtome import torch_api as mt``.
- ``microtome.jax_impl``: the same transforms for JAX; importing it never imports torch.
- ``microtome.bridge``: values and functions across the two frameworks.

Importing ``microtome`` alone loads neither torch nor JAX.
"""

__version__ = "0.1.0.dev0"
