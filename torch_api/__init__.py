"""Memory-saving transforms for torch functions and modules, executed by XLA."""

from ..bridge import as_jax, as_torch, jax_function, lift, share_gpu_memory, to_jax, to_torch
from ..jax_impl import Aux, ClippedAux, Explanation, Static
from .chunking import chunked_vmap
from .clipping import clip_by_global_norm, clipped_backward, clipped_grad, global_norm, rescale_by_norm
from .compare import compare
from .compare.mapping import Source
from .compare.proposing import propose_mapping
from .compare.report import Report
from .derivatives import hessian, hessian_blocks, hessian_to_pytree, hvp, jacobian, jacobian_blocks
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
from .scanning import checkpoint_chunked_scan, sliced_scan

__all__ = [
    "AccumulationType",
    "Accumulator",
    "Aux",
    "ClippedAux",
    "Explanation",
    "Report",
    "Source",
    "Static",
    "as_jax",
    "as_torch",
    "assign_grads",
    "checkpoint_chunked_scan",
    "chunked_vmap",
    "clip_by_global_norm",
    "clipped_backward",
    "clipped_grad",
    "compare",
    "global_norm",
    "hessian",
    "hessian_blocks",
    "hessian_to_pytree",
    "hvp",
    "jacobian",
    "jacobian_blocks",
    "jax_function",
    "lift",
    "micro_grad",
    "micro_vmap",
    "microbatch",
    "propose_mapping",
    "rescale_by_norm",
    "reshape_batch_axis",
    "share_gpu_memory",
    "sliced_scan",
    "to_jax",
    "to_torch",
    "weighted_mean",
]
