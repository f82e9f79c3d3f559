"""Memory-saving transforms in JAX. Importing this package never imports torch."""

from .batches.accumulation import AccumulationType, Accumulator, weighted_mean
from .batches.partition import reshape_batch_axis
from .chunking import chunked_vmap
from .clipping import ClippedAux, ClippedGrad, clipped_grad
from .derivatives import hessian, hessian_blocks, hessian_to_pytree, hvp, jacobian, jacobian_blocks
from .factors.explain import Explanation
from .microbatching import Aux, micro_grad, micro_vmap, microbatch
from .norms import clip_by_global_norm, global_norm, rescale_by_norm
from .scanning import checkpoint_chunked_scan, sliced_scan
from .static import Static

__all__ = [
    "AccumulationType",
    "Accumulator",
    "Aux",
    "ClippedAux",
    "ClippedGrad",
    "Explanation",
    "Static",
    "checkpoint_chunked_scan",
    "chunked_vmap",
    "clip_by_global_norm",
    "clipped_grad",
    "global_norm",
    "hessian",
    "hessian_blocks",
    "hessian_to_pytree",
    "hvp",
    "jacobian",
    "jacobian_blocks",
    "micro_grad",
    "micro_vmap",
    "microbatch",
    "rescale_by_norm",
    "reshape_batch_axis",
    "sliced_scan",
    "weighted_mean",
]
