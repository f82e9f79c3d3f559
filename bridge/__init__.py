"""Values and functions across PyTorch and JAX."""

from .as_jax import as_jax
from .call.as_torch import as_torch
from .lift import jax_function, lift
from .memory.crossing import to_jax, to_torch
from .memory.devices import share_gpu_memory

__all__ = ["as_jax", "as_torch", "jax_function", "lift", "share_gpu_memory", "to_jax", "to_torch"]
