"""Per-example clipping of torch losses and modules at the cost of a plain gradient."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import jax_impl
from ..bridge.call.compilation import Program
from ..bridge.lifting import to_jax_callable
from ..bridge.memory.dtypes import jax_dtype
from ..bridge.memory.trees import to_jax_tree
from ..bridge.watch.walk import Walk, is_traced
from ..jax_impl import ClippedAux, ClippedGrad, Explanation
from ..jax_impl.program.trees import PyTree
from .calls import Args, Fun, Kwargs, explain_with, finish
from .microbatching import Frozen, frozen_flags, listed, of_gradients, per_example


def global_norm(tree: PyTree) -> torch.Tensor:
    """The Euclidean norm of all floating-point and complex tensors of a tree together, a tensor ``[]``.

    Equivalent to ``torch.nn.utils.get_total_norm``, with squares summed in at least float32. As ``metrics_fn`` of
    :func:`micro_grad` it costs nothing beyond clipping.

    >>> import torch
    >>> from microtome import torch_api as mt
    >>> mt.global_norm({"w": torch.tensor([3.0, 0.0]), "b": torch.tensor(4.0)})
    tensor(5.)
    """
    squares = [part.square().sum() for leaf in _moving(tree) for part in _parts(leaf.to(_wide(leaf)))]
    return torch.sqrt(sum(squares[1:], squares[0])) if squares else torch.zeros(())


def clip_by_global_norm(max_norm: float | torch.Tensor, *, nan_safe: bool = True) -> Callable[[PyTree], PyTree]:
    """Scale gradients down to a norm of at most ``max_norm``.

    Equivalent to ``lambda g: {k: v * (max_norm / global_norm(g)).clamp(max=1) for k, v in g.items()}`` on one example's
    gradients. As ``transform_fn`` of :func:`micro_grad` it takes the factored path of :func:`clipped_grad`; it can be
    called on tensors as well.

    Args:
        max_norm: a positive number, or a tensor ``[]``: it is read at each call, so a clip norm that adapts does not
            compile anew.
        nan_safe: gradients whose norm is not finite become zero; without it a norm of NaN makes all of them NaN.

    Raises:
        TypeError, ValueError: ``max_norm`` is no number, or not positive.

    >>> import torch
    >>> from microtome import torch_api as mt
    >>> mt.clip_by_global_norm(1.0)({"w": torch.tensor([3.0, 4.0])})
    {'w': tensor([0.6000, 0.8000])}
    """
    jax_impl.clip_by_global_norm(_numbers(max_norm))

    def transform(grads: PyTree) -> PyTree:
        norm = global_norm(grads)
        bound = max_norm if isinstance(max_norm, torch.Tensor) else norm.new_tensor(float(max_norm))
        above = norm > bound if nan_safe else ~(norm <= bound)  # NaN, where nothing else would clip its example
        scale = torch.where(above, bound / torch.where(above, norm, 1), 1)
        scale = torch.where(bound > 0, scale, math.nan)  # rather than gradients that were not clipped
        return _scaled(grads, scale, torch.isfinite(norm) if nan_safe else None)

    return transform


def rescale_by_norm(
    scale_fn: Callable[[torch.Tensor], float | torch.Tensor], *, nan_safe: bool = True
) -> Callable[[PyTree], PyTree]:
    """Multiply gradients by a function of their norm; a ``transform_fn`` that takes the factored path.

    Args:
        scale_fn: ``norm -> factor``, tensors ``[]``; for instance ``lambda n: 1 / (n + 0.01)``, automatic clipping (Bu
            et al., 2022, arXiv:2206.07136).
        nan_safe: gradients whose norm or factor is not finite become zero.

    Raises:
        TypeError: ``scale_fn`` is not callable, or, at the call, its factor is complex.
        ValueError: at the call, a factor that is not of shape ``()``.

    >>> import torch
    >>> from microtome import torch_api as mt
    >>> mt.rescale_by_norm(lambda n: 2 / n)(torch.tensor([3.0, 4.0]))
    tensor([1.2000, 1.6000])
    """
    if not callable(scale_fn):
        raise TypeError(f"scale_fn must be a function of the norm, got {scale_fn!r}.")

    def transform(grads: PyTree) -> PyTree:
        norm = global_norm(grads)
        scale = torch.as_tensor(scale_fn(norm))
        if scale.ndim:
            raise ValueError(f"scale_fn must return a number, got shape {tuple(scale.shape)}.")
        if scale.is_complex():
            raise TypeError(f"scale_fn must return a real number, got {scale.dtype}.")
        return _scaled(grads, scale, torch.isfinite(norm) & torch.isfinite(scale) if nan_safe else None)

    return transform


def _scaled(grads: PyTree, scale: torch.Tensor, keep: torch.Tensor | None) -> PyTree:
    """Scale the gradients; make them zero where they are not to be kept."""

    def apply(leaf: PyTree) -> PyTree:
        if not _moves(leaf):
            return leaf
        scaled = (leaf.to(_wide(leaf)) * scale).to(leaf.dtype)
        return scaled if keep is None else torch.where(keep, scaled, torch.zeros_like(scaled))

    return torch.utils._pytree.tree_map(apply, grads)


def _moving(tree: PyTree) -> list[torch.Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if _moves(leaf)]


def _moves(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def _parts(leaf: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (leaf.real, leaf.imag) if leaf.is_complex() else (leaf,)


def _wide(leaf: torch.Tensor) -> torch.dtype:
    return torch.promote_types(leaf.dtype, torch.float32)


def _numbers(norms: PyTree) -> PyTree:
    """Return the values of tensors, for the checks at wrapping time."""
    return torch.utils._pytree.tree_map(lambda n: n.item() if isinstance(n, torch.Tensor) and not n.ndim else n, norms)


def clipped_grad(
    fun: Fun,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    l2_clip_norm: PyTree,
    rescale_to_unit_norm: bool = False,
    normalize_by: float = 1.0,
    batch_argnums: int | Sequence[int] = 1,
    keep_batch_dim: bool = True,
    return_values: bool = False,
    return_grad_norms: bool = False,
    pre_clipping_transform: Fun | None = None,
    microbatch_size: int | None = None,
    nan_safe: bool = True,
    dtype: torch.dtype | None = None,
    remainder: str = "run",
    partition: str = "strided",
) -> Fun:
    """The sum over a batch of per-example gradients of a torch loss, each clipped to a norm.

    Equivalent, for one row ``x``, with its axis of length 1, at a time, to::

        g = torch.func.grad(fun)(params, x)
        grads += clip_by_global_norm(l2_clip_norm)(g) / normalize_by

    What differs: **time and memory are those of the plain gradient** of a microbatch. An example's gradient is a
    product, for a ``Linear`` layer of its inputs and the cotangents of its outputs, and is kept as that; its norm and
    the clipped sum follow from the factors. No hooks and no list of layers are involved: it holds for any code that
    makes such products, convolutions, embeddings, attention, recurrent layers, tied and re-parametrised weights among
    them. What no rule covers is computed for each example, for that parameter only; ``explain(*args)`` tells which.

    Parameters are a tensor or a tree of tensors, as in :func:`micro_grad`; frozen ones get zeros. Dropout draws a mask
    for each example. An example whose gradient holds NaN or infinity counts as zero with ``nan_safe``.

    Source: ``jax_privacy.clipping.clipped_grad`` (De et al., 2022, arXiv:2204.13650), ghost norms and book-keeping (Li
    et al., 2021, arXiv:2110.05679; Bu et al., 2022, arXiv:2210.00038). In place of ``prng_argnum``, examples draw from
    torch's generator.

    Args:
        fun: the loss, ``fun(params, batch) -> []``.
        argnums: positions of the arguments to differentiate.
        has_aux: whether ``fun`` returns ``(loss, aux)``.
        l2_clip_norm: a positive number or a tensor ``[]``, which may change from call to call without compiling anew;
            or a tree of these that is a prefix of the gradients' tree: each part is clipped by itself.
        rescale_to_unit_norm: divide by the clip norm.
        normalize_by: divide the sum by this.
        batch_argnums: positions of the batch arguments, ``[batch, ...]``; tensors that ``fun`` takes by keyword only
            are batch arguments too.
        keep_batch_dim: pass each example as ``[1, ...]`` (else ``[...]``).
        return_values: whether to return the losses.
        return_grad_norms: whether to return the norms before clipping.
        pre_clipping_transform: torch callable on one example's gradients.
        microbatch_size: examples of a microbatch; None for all at once.
        nan_safe: count examples whose gradient is not finite as zero.
        dtype: the dtype of the gradients from before clipping on.
        remainder: ``"run"`` or ``"error"``.
        partition: ``"strided"`` or ``"contiguous"``.

    Returns:
        ``(*args, is_padding_example=None) -> grads``, or ``(grads, ClippedAux(values, grad_norms, aux))`` where these
        were asked for. ``is_padding_example``: booleans ``[batch]`` of examples that count as zero whatever they hold,
        their losses and norms mean nothing. Its ``sensitivity()`` bounds one example's part, ``explain(*args)`` says
        how it computes and ``compiled(*args).memory_analysis()`` what memory it takes.

    Raises:
        TypeError, ValueError: at once for options, at the call for arguments, before anything runs: a clip norm that is
            not positive or no prefix, an integer or complex parameter, batch arguments of different length, batch
            normalisation in training mode.

    >>> import torch
    >>> from microtome import torch_api as mt
    >>> grad_fn = mt.clipped_grad(lambda w, x: (w * x).sum(), l2_clip_norm=1.0, return_grad_norms=True)
    >>> grads, aux = grad_fn(torch.ones(2), torch.tensor([[3.0, 4.0], [0.0, 0.5]]))
    >>> grads, aux.grad_norms, grad_fn.sensitivity()
    (tensor([0.6000, 1.3000]), tensor([5.0000, 0.5000]), 1.0)
    """
    traced = to_jax_callable(fun)
    wanted, batched = listed(argnums), listed(batch_argnums)
    options: dict[str, Any] = {
        "argnums": argnums,
        "has_aux": has_aux,
        "rescale_to_unit_norm": rescale_to_unit_norm,
        "normalize_by": normalize_by,
        "batch_argnums": batch_argnums,
        "keep_batch_dim": keep_batch_dim,
        "return_values": return_values,
        "return_grad_norms": return_grad_norms,
        "microbatch_size": microbatch_size,
        "nan_safe": nan_safe,
        "dtype": None if dtype is None else jax_dtype(dtype),
        "remainder": remainder,
        "partition": partition,
    }
    if pre_clipping_transform is not None:
        options["pre_clipping_transform"] = of_gradients(pre_clipping_transform)
    checked = jax_impl.clipped_grad(traced, l2_clip_norm=to_jax_tree(_numbers(l2_clip_norm)), **options)

    def prepared(
        norms: PyTree, frozen: Frozen, args: Args, kwargs: dict[str, PyTree]
    ) -> tuple[ClippedGrad, Args, Kwargs]:
        padding = kwargs.pop("is_padding_example", None)
        loss, args, kwargs = per_example(traced, wanted, batched, frozen, args, kwargs)
        grad_fn = jax_impl.clipped_grad(loss, l2_clip_norm=norms, **options)
        return grad_fn, args, kwargs | {"is_padding_example": padding}

    def run(norms: PyTree, frozen: Frozen, *args: PyTree, **kwargs: PyTree) -> PyTree:
        grad_fn, args, kwargs = prepared(norms, frozen, args, kwargs)
        return grad_fn(*args, **kwargs)

    def explain(norms: PyTree, frozen: Frozen, *args: PyTree, **kwargs: PyTree) -> Explanation:
        grad_fn, args, kwargs = prepared(norms, frozen, args, kwargs)
        return grad_fn.explain(*args, **kwargs)

    def leading(*args: PyTree, **kwargs: PyTree) -> tuple[PyTree, Frozen]:
        if is_traced(traced):
            _check_modules(fun)
        kwargs.pop("is_padding_example", None)
        return l2_clip_norm, frozen_flags(traced, wanted, args, kwargs)

    call: Any = finish(run, fun, leading, recompute=True)
    call.explain = explain_with(explain, fun, leading)
    call.sensitivity = checked.sensitivity
    return call


def clipped_backward(
    model: torch.nn.Module,
    loss_fn: Callable[..., torch.Tensor],
    *,
    max_grad_norm: float | torch.Tensor,
    noise_multiplier: float = 0.0,
    expected_batch_size: float | None = None,
    microbatch_size: int | None = None,
    generator: torch.Generator | None = None,
    nan_safe: bool = True,
) -> Callable[..., ClippedAux]:
    """``loss.backward()`` for training with per-example clipping, and with noise: DP-SGD's gradient in ``.grad``.

    Equivalent to this, at the cost of ``loss_fn(model, *batch).mean().backward()``::

        for example in batch:
            total += clip_by_global_norm(max_grad_norm)(gradient of loss_fn(model, *example))
        total += max_grad_norm * noise_multiplier * torch.randn(..., generator=generator)
        parameter.grad += total / expected_batch_size

    As ``backward()`` does, a call adds to the ``.grad`` of each parameter that requires a gradient: call
    ``optimizer.zero_grad()`` in each step. Where noise is added, a second call before that is refused, since a step
    takes noise once: pass a larger batch, with ``microbatch_size``. Hooks do not run. What an optimizer, a scheduler or
    a loop does stays as it is.

    Source: DP-SGD (Abadi et al., 2016, arXiv:1607.00133), option names as in Opacus. Privacy accounting is not part of
    it: an accountant needs ``noise_multiplier`` and the sampling rate.

    Args:
        model: the module whose parameters are trained.
        loss_fn: ``loss_fn(model, *batch, **named) -> []`` on a batch of one example; it has to call the model that it
            gets.
        max_grad_norm: the clip norm, a positive number or a tensor ``[]`` that may change.
        noise_multiplier: standard deviation of the noise in units of the clip norm.
        expected_batch_size: what to divide by; by default the number of examples in the batch, without padding. With
            Poisson sampling, pass the expected one: batches may then be empty.
        microbatch_size: examples of a microbatch; None for all at once.
        generator: where noise is drawn from, of the parameters' device; torch's default one otherwise.
        nan_safe: count examples whose gradient is not finite as zero.

    Returns:
        ``(*batch, is_padding_example=None, **named) -> ClippedAux``, with the losses as ``values``, ``[batch]``, and
        ``grad_norms`` before clipping, both without the rows of padding; both are as private as the data. ``compiled``
        and ``explain`` are those of :func:`clipped_grad`, with the arguments of this function.

    Raises:
        TypeError, ValueError: as :func:`clipped_grad`; a ``noise_multiplier`` that is negative; no parameter to train;
            batch normalisation in training mode; a module that several processes share (DistributedDataParallel, FSDP).
        RuntimeError: noise would be added to what an earlier call has left in ``.grad``.

    >>> import torch
    >>> from microtome import torch_api as mt
    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> backward = mt.clipped_backward(model, lambda model, x: model(x).sum(), max_grad_norm=1.0)
    >>> aux = backward(torch.tensor([[3.0, 4.0], [0.0, 0.5]]))
    >>> model.weight.grad, aux.grad_norms
    (tensor([[0.3000, 0.6500]]), tensor([5.0000, 0.5000]))
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}; loss_fn comes second.")
    if noise_multiplier < 0:
        raise ValueError(f"noise_multiplier must not be negative, got {noise_multiplier}.")
    if expected_batch_size is not None and not expected_batch_size > 0:
        raise ValueError(f"expected_batch_size must be positive, got {expected_batch_size}.")
    jax_impl.clip_by_global_norm(_numbers(max_grad_norm))
    whole = _WithLoss(model, loss_fn)
    noisy: list[weakref.ref[torch.Tensor]] = []  # the .grad tensors that the last call added noise to

    def loss(params: dict[str, torch.Tensor], batch: tuple[Args, Kwargs]) -> torch.Tensor:
        args, kwargs = batch
        return torch.func.functional_call(whole, {"model." + k: p for k, p in params.items()}, args, kwargs)

    @functools.cache
    def summing_in(dtype: torch.dtype | None) -> Any:
        return clipped_grad(
            loss,
            l2_clip_norm=max_grad_norm,
            return_values=True,
            return_grad_norms=True,
            microbatch_size=microbatch_size,
            nan_safe=nan_safe,
            dtype=dtype,
        )

    def trained() -> dict[str, torch.nn.Parameter]:
        params = {k: p for k, p in model.named_parameters() if p.requires_grad}
        if not params:
            raise ValueError("model has no parameter that requires a gradient.")
        return params

    def step(params: dict[str, torch.nn.Parameter]) -> Any:
        # What half precision holds is the mean: sums of many, and noise before it is divided, may not fit it.
        narrow = any(p.dtype != _wide(p) for p in params.values())
        dtype = functools.reduce(torch.promote_types, map(_wide, params.values()))
        return summing_in(dtype if narrow and dtype.is_floating_point else None)  # a complex one is refused by name

    def backward(*batch: PyTree, is_padding_example: torch.Tensor | None = None, **named: PyTree) -> ClippedAux:
        params = trained()
        _check_one_process(loss)
        if any(p.grad is not None and any(p.grad is ref() for ref in noisy) and p.grad.any() for p in params.values()):
            raise RuntimeError(
                "an earlier call has left a gradient with noise in .grad, and a step takes noise once. Call "
                "optimizer.zero_grad() before each call; for a batch that does not fit, pass microbatch_size."
            )
        with torch.no_grad():
            grads, aux = step(params)(params, (batch, named), is_padding_example=is_padding_example)
            if is_padding_example is not None:
                real = ~torch.as_tensor(is_padding_example, device=aux.values.device)
                aux = aux._replace(values=aux.values[real], grad_norms=aux.grad_norms[real])
            count = len(aux.values) if expected_batch_size is None else expected_batch_size
            if not count:
                raise ValueError("the batch is empty, so its mean is not defined. Pass expected_batch_size.")
            for name, grad in grads.items():
                if noise_multiplier:
                    noise = torch.randn(grad.shape, dtype=_wide(grad), device=grad.device, generator=generator)
                    grad += noise * noise_multiplier * max_grad_norm
                grad = (grad / count).to(params[name].dtype) if grad.dtype != params[name].dtype else grad.div_(count)
                if params[name].grad is None:
                    params[name].grad = grad
                else:
                    params[name].grad += grad
        noisy[:] = [weakref.ref(p.grad) for p in params.values() if noise_multiplier and p.grad is not None]
        return aux

    def compiled(*batch: PyTree, is_padding_example: torch.Tensor | None = None, **named: PyTree) -> Program:
        params = trained()
        return step(params).compiled(params, (batch, named), is_padding_example=is_padding_example)

    def explain(*batch: PyTree, is_padding_example: torch.Tensor | None = None, **named: PyTree) -> Explanation:
        params = trained()
        return step(params).explain(params, (batch, named), is_padding_example=is_padding_example)

    call: Any = backward
    call.compiled, call.explain = compiled, explain
    return call


class _WithLoss(torch.nn.Module):
    """A model and its loss as one module, so that its parameters can be replaced."""

    def __init__(self, model: torch.nn.Module, loss_fn: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.model, self.loss_fn = model, loss_fn

    def __call__(self, *batch: PyTree, **named: PyTree) -> torch.Tensor:
        """Return the loss. Around a ``forward`` torch would run hooks of all modules: this is none of the user's."""
        return self.loss_fn(self.model, *batch, **named)


def _check_one_process(fun: Fun) -> None:
    """Raise a ValueError for parameters that several processes share: hooks that would add up gradients do not run."""
    walk = Walk(fun)
    parts = (part for module in walk.modules for part in module.modules())
    for kind in dict.fromkeys(map(type, (*walk.tensors, *parts))):
        if (name := _shares_parameters(kind)) is not None:
            raise ValueError(
                f"{name} shares its parameters with other processes, and each would be left with the gradient of its "
                "own examples. Keep the module as it was before it was wrapped: take its clipped_grad, sum the "
                "gradients over the processes by torch.distributed.all_reduce, add the same noise in each, and write "
                "them by assign_grads."
            )


@functools.cache
def _shares_parameters(kind: type) -> str | None:
    """Return the name of torch's class that spreads a module or a parameter over processes, if this is one."""
    for base in kind.__mro__:
        # Checkpointed and offloaded activations stand among the algorithms.
        if base.__module__.startswith(("torch.nn.parallel.distributed", "torch.distributed.")):
            return None if base.__module__.startswith("torch.distributed.algorithms.") else base.__name__
    return None


def _check_modules(fun: Fun) -> None:
    """Raise a ValueError for batch normalisation in training mode in a module that the function is or refers to."""
    seen: set[torch.nn.Module] = set()
    for module in Walk(fun).modules:
        for name, part in module.named_modules(seen):
            if isinstance(part, torch.nn.modules.batchnorm._BatchNorm) and _uses_batch(part):
                where = f"{name or 'the module'} ({type(part).__name__})"
                raise ValueError(
                    f"{where} normalises over the batch in training mode, so the loss mixes examples and the gradient "
                    "of one example is not defined. Replace it by GroupNorm, LayerNorm or InstanceNorm, or call "
                    ".eval() on it."
                )


def _uses_batch(norm: torch.nn.modules.batchnorm._BatchNorm) -> bool:
    return norm.training or (norm.running_mean is None and norm.running_var is None)
