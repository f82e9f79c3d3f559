"""Which ops torch computes in float32 where their arguments are float16 or bfloat16, and rounds at the end."""

from __future__ import annotations

import torch

aten = torch.ops.aten

HALF = (torch.float16, torch.bfloat16)

# torch's kernels for the CPU sum and multiply in float32 here; torch's decompositions and torchax's table do not.
# What XLA itself accumulates in float32 (products of matrices, convolutions, sums over axes) is not among them.
NORMS = frozenset(
    getattr(aten, name)
    for name in (
        *("native_layer_norm", "native_group_norm", "native_batch_norm", "_native_batch_norm_legit"),
        *("_native_batch_norm_legit_functional", "_native_batch_norm_legit_no_training"),
    )
)
IN_FLOAT32 = NORMS | frozenset(
    getattr(aten, name)
    for name in (
        *("native_layer_norm_backward", "native_group_norm_backward", "native_batch_norm_backward"),
        *("avg_pool2d", "avg_pool2d_backward", "avg_pool3d", "avg_pool3d_backward"),
        *("_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward"),
        *("scatter_add", "scatter_reduce"),
        *("cumsum", "cumprod", "logcumsumexp"),
        *("linalg_vector_norm", "norm", "dist", "renorm", "_weight_norm_interface", "_weight_norm_interface_backward"),
        *("_cdist_forward", "_cdist_backward", "_pdist_forward", "_pdist_backward"),
        *("_softmax", "_safe_softmax", "_log_softmax", "i0", "sigmoid"),
        *("_softmax_backward_data", "_log_softmax_backward_data", "sigmoid_backward"),
        *("grid_sampler_2d", "grid_sampler_2d_backward", "grid_sampler_3d", "grid_sampler_3d_backward"),
        "linalg_matrix_exp",
    )
)
