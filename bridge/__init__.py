"""Values and functions across PyTorch and JAX."""

from .calling import as_torch
from .crossing import to_jax, to_torch
from .devices import share_gpu_memory
from .lifting import jax_function, lift
from .tracing import as_jax

__all__ = ["as_jax", "as_torch", "jax_function", "lift", "share_gpu_memory", "to_jax", "to_torch"]
