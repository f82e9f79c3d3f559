"""Memory-saving transforms for torch functions and modules, executed by XLA."""

from ..bridge import as_jax, as_torch, jax_function, lift, to_jax, to_torch
from ..jax_impl import Aux
from .microbatching import (
    AccumulationType,
    Accumulator,
    assign_grads,
    micro_grad,
    micro_vmap,
    microbatch,
    reshape_batch_axis,
    weighted_mean,
)

__all__ = [
    "AccumulationType",
    "Accumulator",
    "Aux",
    "as_jax",
    "as_torch",
    "assign_grads",
    "jax_function",
    "lift",
    "micro_grad",
    "micro_vmap",
    "microbatch",
    "reshape_batch_axis",
    "to_jax",
    "to_torch",
    "weighted_mean",
]
