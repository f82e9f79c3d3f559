"""Values and functions across PyTorch and JAX."""

from .call.as_torch import as_torch
from .lifting import jax_function, lift
from .memory.crossing import to_jax, to_torch
from .memory.devices import share_gpu_memory
from .tracing import as_jax

__all__ = ["as_jax", "as_torch", "jax_function", "lift", "share_gpu_memory", "to_jax", "to_torch"]
