"""Torch functions that are rewritten above autograd, in plain torch that can be recorded."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.types import Number

from ..base.errors import TraceError, user_line
from ..base.torch_internals import is_functorch_wrapped_tensor
from ..lowerings.signatures import Function
from .distributions import is_all_true, item


def embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """Compute ``F.embedding_bag``; torch's fused op keeps offsets that its backward reads as values."""
    if mode not in ("sum", "mean", "max"):
        raise ValueError(f"mode has to be one of sum, mean or max, got {mode!r}")
    if max_norm is not None or mode == "max" or scale_grad_by_freq:
        raise TypeError('EmbeddingBag with max_norm, scale_grad_by_freq or mode="max" cannot be traced')
    position = torch.arange(input.numel(), device=input.device)
    counted = torch.ones_like(position, dtype=torch.bool)
    if input.dim() == 2:
        offsets = torch.arange(0, input.numel(), max(input.shape[1], 1), device=input.device)
        input = input.reshape(-1)
    elif include_last_offset and offsets is not None:
        if padding_idx is None:  # else torch counts what lies behind the last offset to the last bag
            counted = position < offsets[-1]
        offsets = offsets[:-1]
    assert offsets is not None
    bag = torch.searchsorted(offsets, position, right=True) - 1
    rows = F.embedding(input, weight)
    if padding_idx is not None:
        counted = counted & (input != padding_idx % weight.shape[0])
    # As torch's kernel, which adds up in float32.
    dtype = torch.promote_types(rows.dtype, torch.float32)
    rows = torch.where(counted[:, None], rows.to(dtype), 0)
    if per_sample_weights is not None:
        rows = rows * torch.where(counted, per_sample_weights.reshape(-1).to(dtype), 0)[:, None]
    bags = offsets.numel()
    total = torch.zeros(bags, weight.shape[1], dtype=dtype, device=rows.device).index_add(0, bag, rows)
    if mode == "mean":
        number = torch.zeros(bags, dtype=dtype, device=rows.device).index_add(0, bag, counted.to(dtype))
        total = total / number.clamp(min=1)[:, None]
    return total.to(weight.dtype)


def _check_reduction(reduction: str) -> None:
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{reduction!r} is not a valid value for reduction")


def gaussian_nll_loss(
    input: Tensor,
    target: Tensor,
    var: Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Tensor:
    """Compute ``F.gaussian_nll_loss``; torch's own asks whether any variance is negative."""
    _check_reduction(reduction)
    if isinstance(var, float):
        var = torch.full_like(input, var)
    if var.dim() == input.dim() - 1:
        var = var.unsqueeze(-1)
    torch._assert_async((var >= 0).all(), "var has negative entry/entries")
    var = var + (var.clamp(min=eps) - var).detach()  # clamped in value, not in gradient
    loss = 0.5 * (torch.log(var) + (input - target) ** 2 / var)
    if full:
        loss = loss + 0.5 * math.log(2 * math.pi)
    return loss.mean() if reduction == "mean" else loss.sum() if reduction == "sum" else loss


@torch.library.custom_op("microtome::ctc_loss", mutates_args=())
def _ctc(
    log_probs: Tensor, targets: Tensor, steps: Tensor, labels: Tensor, blank: int, zero_infinity: bool
) -> tuple[Tensor, Tensor]:
    """Compute the loss of each row, and torch's gradient of that loss."""
    given = (log_probs, targets, steps, labels)
    loss, alpha = torch.ops.aten._ctc_loss.Tensor(*given, blank, zero_infinity)
    one = torch.ones_like(loss)
    gradient = torch.ops.aten._ctc_loss_backward.Tensor(one, *given, loss, alpha, blank, zero_infinity)
    return torch.where(loss == math.inf, 0, loss) if zero_infinity else loss, gradient


@_ctc.register_fake
def _(log_probs: Tensor, *args: object) -> tuple[Tensor, Tensor]:
    return log_probs.new_empty(log_probs.shape[1]), torch.empty_like(log_probs)


class _Ctc(torch.autograd.Function):
    @staticmethod
    def forward(log_probs: Tensor, *args: object) -> tuple[Tensor, Tensor]:
        return torch.ops.microtome.ctc_loss(log_probs, *args)

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(inputs[0], output[1])

    @staticmethod
    def backward(ctx: Any, g: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        log_probs, gradient = ctx.saved_tensors
        return g[:, None] * _Final.apply(gradient, log_probs), None, None, None, None, None


class _Final(torch.autograd.Function):
    """A gradient that torch cannot differentiate once more."""

    @staticmethod
    def forward(gradient: Tensor, log_probs: Tensor) -> Tensor:
        return gradient.clone()

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        pass

    @staticmethod
    def backward(ctx: FunctionCtx, g: Tensor) -> NoReturn:
        raise TypeError("the gradient of ctc_loss cannot be differentiated, in torch as here")


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor | Sequence[int],
    target_lengths: Tensor | Sequence[int],
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """Compute ``F.ctc_loss``; the shapes of torch's fused op depend on the lengths."""
    _check_reduction(reduction)
    batched = log_probs.dim() == 3
    if not batched:
        log_probs = log_probs.unsqueeze(1)
    steps = torch.as_tensor(input_lengths).reshape(-1)
    labels = torch.as_tensor(target_lengths).reshape(-1)
    if targets.dim() == 1:  # the labels of all rows, one after another
        targets = torch.nn.utils.rnn.pad_sequence(targets.split(labels.tolist()), batch_first=True)
    for name, lengths, most in (("input", steps, log_probs.shape[0]), ("target", labels, targets.shape[1])):
        fits = (lengths >= 0) & (lengths <= most)
        torch._assert_async(fits.all(), f"ctc_loss: Expected {name}_lengths to have values from 0 to {most}")
    loss, _ = _Ctc.apply(log_probs, targets, steps, labels, blank, zero_infinity)
    if reduction == "mean":
        return (loss / labels.clamp(min=1)).mean()
    return loss.sum() if reduction == "sum" else loss if batched else loss[0]


def cov(
    input: Tensor, *, correction: int = 1, fweights: Tensor | None = None, aweights: Tensor | None = None
) -> Tensor:
    """Compute ``torch.cov``; torch's own asks on the spot whether any weight is negative."""
    rows = input.reshape(1, -1) if input.dim() < 2 else input
    for name, given in (("fweights", fweights), ("aweights", aweights)):
        if given is not None and (given.dim() > 1 or given.numel() != rows.shape[1]):
            raise ValueError(f"cov(): {name} has shape {tuple(given.shape)} for {rows.shape[1]} observations")
        if given is not None:
            torch._assert_async((given >= 0).all(), f"cov(): {name} cannot be negative")
    if input.dtype == torch.bool:
        raise ValueError("cov(): bool dtype is not supported for input")
    if fweights is not None and (fweights.is_floating_point() or fweights.is_complex()):
        raise ValueError(f"cov(): fweights must be integers, not {fweights.dtype}")
    weights = fweights
    if aweights is not None:
        weights = aweights if fweights is None else fweights * aweights
    total: Any = rows.shape[1] if weights is None else weights.sum()
    mean = (rows if weights is None else rows * weights).sum(1, keepdim=True) / total
    if aweights is None or correction == 0 or weights is None:
        number = total - correction
    else:
        number = total - correction * (weights * aweights).sum() / total
    centred = rows - mean
    right = centred if weights is None else centred * weights
    number = number.clamp(min=0) if isinstance(number, Tensor) else max(number, 0)
    return (centred @ right.t().conj() / number).squeeze()


def tensor_split(input: Tensor, indices_or_sections: Tensor | int | Sequence[int], dim: int = 0) -> tuple[Tensor, ...]:
    """Compute ``torch.tensor_split``; torch's own reads a tensor of indices from memory."""
    if isinstance(indices_or_sections, Tensor):
        indices_or_sections = indices_or_sections.tolist()
    return torch.tensor_split(input, indices_or_sections, dim)


def index_fill(input: Tensor, dim: int, index: Tensor, value: Tensor | Number) -> Tensor:
    """Compute ``torch.index_fill``; torch's own gradient for ``value`` lists each index once."""
    if not isinstance(value, Tensor):
        return torch.index_fill(input, dim, index, value)
    chosen = torch.zeros_like(input, dtype=torch.bool).index_fill(dim, index, True)
    return torch.where(chosen, value.to(input.dtype), input)


@torch.library.custom_op("microtome::decaying_sum", mutates_args=())
def _decaying_sum(x: Tensor, decay: Tensor, reverse: bool) -> Tensor:
    """Compute, along the last axis, h(i) = x(i) + decay(i) h(i - 1), or with h(i + 1) in reverse."""
    raise NotImplementedError("it runs in traces only")


@_decaying_sum.register_fake
def _(x: Tensor, decay: Tensor, reverse: bool) -> Tensor:
    return torch.empty_like(x)


def _moved(x: Tensor, reverse: bool) -> Tensor:
    """Return what stands before each place of the last axis, or in reverse what stands behind it."""
    nothing = torch.zeros_like(x[..., :1])
    return torch.cat([x[..., 1:], nothing] if reverse else [nothing, x[..., :-1]], -1)


def _sum_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, decay, ctx.reverse = inputs
    ctx.save_for_backward(decay, output)


def _sum_backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None]:
    decay, total = ctx.saved_tensors
    pulled = torch.ops.microtome.decaying_sum(g, _moved(decay, not ctx.reverse), not ctx.reverse)
    return pulled, pulled * _moved(total, ctx.reverse), None


_decaying_sum.register_autograd(_sum_backward, setup_context=_sum_context)


class _LogCumSumExp(torch.autograd.Function):
    """``logcumsumexp`` on the last axis. torch's own derivative takes logarithms of cotangents: not linear in code."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return torch.ops.aten.logcumsumexp(x, -1)

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs, output)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        # The cotangents of y(i) weighted by exp(x(j) - y(i)) for all i from j on. As y rises, no exponent is positive.
        x, y = ctx.saved_tensors
        none = y == -math.inf
        level = torch.where(none, 0, y)
        decay = torch.where(none, 0, torch.exp(level - torch.cat([level[..., 1:], level[..., -1:]], -1)))
        gone = x == -math.inf
        share = torch.exp(torch.where(gone, level, x) - level)
        return torch.where(gone, 0, share * torch.ops.microtome.decaying_sum(g, decay, True))


def logcumsumexp(input: Tensor, dim: int) -> Tensor:
    """Compute ``torch.logcumsumexp``, with a derivative that can be differentiated at a cotangent of zero."""
    if input.dim() == 0 or not input.is_floating_point() or is_functorch_wrapped_tensor(input):
        return torch.logcumsumexp(input, dim)
    rows = input.movedim(dim, -1)
    wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
    return _LogCumSumExp.apply(wide).to(input.dtype).movedim(-1, dim)


def prod(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Compute ``torch.prod``, whose derivative in torch asks how many zeros there are.

    Where there is none it divides the product by each element, so that NaN reaches all; where there are several in a
    product of all elements it is zero, beside NaN and infinities too.
    """
    if not (input.is_floating_point() or input.is_complex()):
        return torch.prod(input, *args, **kwargs)
    zero, missing = input == 0, input != input
    moving = input * torch.where(missing & ~zero.any(), math.nan, 1).to(input.dtype)
    if not args and "dim" not in kwargs:
        moving = torch.where((zero.sum() > 1) & ~input.isfinite().all(), input.detach(), moving)
    return torch.prod(moving, *args, **kwargs)


def cholesky(input: Tensor, upper: bool = False) -> Tensor:
    """Compute ``torch.cholesky``, with the check of ``torch.linalg.cholesky``."""
    return torch.linalg.cholesky(input, upper=upper)


def floor_divide(input: Tensor, other: Tensor | Number) -> Tensor:
    """Compute ``torch.floor_divide``, whose gradient torch has not written: it is zero, as that of this quotient."""
    return torch.div(input, other, rounding_mode="floor")


def grouped_mm(
    mat_a: Tensor,
    mat_b: Tensor,
    *,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute ``F.grouped_mm``: each group times all rows, of which those of others are zero, as shapes are fixed.

    torch's own takes bfloat16 only in a trace.
    """
    if bias is not None:
        raise RuntimeError("Bias not supported yet")
    if offs is None:
        return torch.bmm(mat_a, mat_b).to(out_dtype or mat_a.dtype)
    if mat_a.dim() == 3:  # the groups are columns of the other
        transposed = grouped_mm(mat_b.mT, mat_a.mT, offs=offs, out_dtype=out_dtype)
        return transposed.mT
    groups = torch.arange(len(offs), device=offs.device)
    place = torch.arange(mat_a.shape[0] if mat_b.dim() == 3 else mat_a.shape[1], device=offs.device)
    own = (torch.searchsorted(offs, place, right=True) == groups[:, None])[:, :, None]  # [groups, places, 1]
    if mat_b.dim() == 3:
        rows = torch.where(own, mat_a, 0) @ mat_b
        return torch.where(own, rows, 0).sum(0).to(out_dtype or mat_a.dtype)
    return (torch.where(own.mT, mat_a, 0) @ torch.where(own, mat_b, 0)).to(out_dtype or mat_a.dtype)


def hardsigmoid(input: Tensor, inplace: bool = False) -> Tensor:
    """Compute ``F.hardsigmoid``, of whose backward pass torch has no derivative."""
    inside = torch.where((input > -3) & (input < 3), input, input.detach().clamp(-3, 3))
    result = ((inside.to(torch.promote_types(input.dtype, torch.float32)) + 3) / 6).to(input.dtype)
    return input.copy_(result) if inplace else result


def one_hot(tensor: Tensor, num_classes: int = -1) -> Tensor:
    """Compute ``F.one_hot``; torch's own does not check its classes where it compares them, as it does in a trace."""
    if num_classes < 1:
        return F.one_hot(tensor, num_classes)
    classes = torch.arange(num_classes, device=tensor.device)
    return (classes.index_select(0, tensor.reshape(-1)).reshape(tensor.shape).unsqueeze(-1) == classes).long()


def setitem(tensor: Tensor, index: Any, value: Tensor | Number) -> None:
    """Write ``tensor[index] = value``; torch's own asks for the value of a mask that is one number."""
    if not isinstance(index, Tensor) or index.dtype != torch.bool or index.dim():
        tensor[index] = value
        return
    new = torch.as_tensor(value, dtype=tensor.dtype, device=tensor.device).expand(1, *tensor.shape)[0]
    tensor.copy_(torch.where(index, new, tensor))


def deepcopy(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    """Return ``copy.deepcopy`` of a tensor; torch's own copies memory."""
    if not tensor.is_leaf:
        raise RuntimeError("Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol")
    if id(tensor) not in memo:
        memo[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    return memo[id(tensor)]


def linear_cross_entropy(*args: Any, options: object = None, **kwargs: Any) -> Tensor:
    """Compute ``F.linear_cross_entropy``; how it is cut into chunks is left to XLA."""
    return F.linear_cross_entropy(*args, **kwargs)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute ``F.scaled_dot_product_attention``; its composite scales copies of both operands, not the product.

    torch's kernel for the CPU scales the product. In half precision it might not fit, which the kernel has in float32.
    """
    dtype = query.dtype
    tensors = (query, key, value)
    simple = (
        dtype in (torch.float32, torch.float64)
        and all(t.dtype == dtype and t.dim() > 1 and t.numel() for t in tensors)
        and (attn_mask is None or (attn_mask.dtype in (dtype, torch.bool) and not is_causal))
        and not (dropout_p or enable_gqa or torch.is_autocast_enabled(query.device.type))
    )
    if not simple:
        return F.scaled_dot_product_attention(
            *(query, key, value, attn_mask, dropout_p, is_causal), scale=scale, enable_gqa=enable_gqa
        )
    if is_causal:
        attn_mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
    scores = (query @ key.mT) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if attn_mask is not None:
        closed = torch.full((), -math.inf, dtype=dtype, device=query.device)
        scores = scores + (torch.where(attn_mask, 0, closed) if attn_mask.dtype == torch.bool else attn_mask)
    return torch._safe_softmax(scores, -1) @ value


def refuse_sparse(*args: object, **kwargs: object) -> NoReturn:
    """Refuse to make a tensor sparse: torch itself ends the process where some such ops meet a tensor of a trace."""
    raise TraceError(
        f"{user_line()}: sparse tensors have no counterpart in JAX. Keep the tensor dense, or take the sparse part out "
        "of the function."
    )


REPLACEMENTS: dict[object, Function] = {
    **{
        getattr(torch.Tensor, f"to_sparse{layout}"): refuse_sparse
        for layout in ("", "_coo", "_csr", "_csc", "_bsr", "_bsc")
        if hasattr(torch.Tensor, f"to_sparse{layout}")
    },
    # Since torch 2.14 these only raise; later ones may lack them.
    **{owner.cholesky: cholesky for owner in (torch, torch.Tensor) if hasattr(owner, "cholesky")},
    torch.Tensor.__deepcopy__: deepcopy,
    torch.Tensor.__floordiv__: floor_divide,
    torch.Tensor.floor_divide: floor_divide,
    torch.Tensor.index_fill: index_fill,
    torch.Tensor.cov: cov,
    torch.Tensor.tensor_split: tensor_split,
    torch.Tensor.prod: prod,
    torch.cov: cov,
    torch.floor_divide: floor_divide,
    torch.index_fill: index_fill,
    torch.Tensor.logcumsumexp: logcumsumexp,
    torch.logcumsumexp: logcumsumexp,
    torch.prod: prod,
    torch.tensor_split: tensor_split,
    F.linear_cross_entropy: linear_cross_entropy,
    F.ctc_loss: ctc_loss,
    F.embedding_bag: embedding_bag,
    F.gaussian_nll_loss: gaussian_nll_loss,
    F.grouped_mm: grouped_mm,
    F.hardsigmoid: hardsigmoid,
    torch._grouped_mm: grouped_mm,
    torch._C._nn.hardsigmoid: hardsigmoid,
    torch._C._nn.hardsigmoid_: functools.partial(hardsigmoid, inplace=True),
    F.one_hot: one_hot,
    torch._is_all_true: is_all_true,
    torch.Tensor.item: item,
    torch.Tensor.__setitem__: setitem,
    F.scaled_dot_product_attention: scaled_dot_product_attention,
}
