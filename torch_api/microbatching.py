"""Microbatched evaluation, vmap and per-example gradients of torch functions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import torch

from .. import jax_impl
from ..bridge import lift
from ..bridge.base.errors import user_line
from ..bridge.call.as_torch import only_maps
from ..bridge.lifting import to_jax_callable
from ..bridge.memory.dtypes import jax_dtype
from ..bridge.memory.trees import Rows, to_jax_tree, without_rows
from ..jax_impl import AccumulationType, weighted_mean
from ..jax_impl.program.trees import PyTree, flatten
from .calls import (
    Args,
    Fun,
    Kwargs,
    explain_with,
    finish,
    number_rows,
    number_rows_by_name,
    parameter_names,
    place_of,
    replace,
)

__all__ = [
    "AccumulationType",
    "Accumulator",
    "assign_grads",
    "micro_grad",
    "micro_vmap",
    "microbatch",
    "reshape_batch_axis",
    "weighted_mean",
]

Count: TypeAlias = int | jax.Array | None  # of the microbatches that are real
Frozen: TypeAlias = tuple[tuple[bool, ...], ...]  # for each differentiated argument, which of its leaves are frozen


def Accumulator(init: Fun, update: Fun, finalize: Fun, aggregate: Fun) -> jax_impl.Accumulator:
    """An accumulator of your own, from torch callables.

    For outputs ``x_0, ..., x_{n-1}`` of the microbatches it stands for ``carry = init(zeros_like(x_0))``, then
    ``carry = update(carry, x_i, i)`` for each, then ``finalize(carry)``.

    Args:
        init: ``like -> carry``; ``like`` holds zeros with the shapes and dtypes of an output.
        update: ``(carry, value, index) -> carry`` of the same shapes and dtypes; ``index`` is an integer tensor ``[]``.
        finalize: ``carry -> result``.
        aggregate: ``[rows, ...] -> value``: the outputs of a microbatch's examples as one value, for
            :func:`micro_vmap` and :func:`micro_grad`.

    Returns:
        What ``accumulator=`` takes, alone or within a tree. Each callable may be marked by ``jax_function``.

    >>> import torch
    >>> from microtome import torch_api as mt
    >>> largest = mt.Accumulator(
    ...     init=lambda like: torch.full_like(like, -torch.inf),
    ...     update=lambda carry, value, index: torch.maximum(carry, value),
    ...     finalize=lambda carry: carry,
    ...     aggregate=lambda values: values.max(0).values,
    ... )
    >>> mt.microbatch(torch.max, 0, 2, largest)(torch.tensor([3.0, 9.0, 4.0]))
    tensor(9.)
    """
    start, step, end, join = map(to_jax_callable, (init, update, finalize, aggregate))

    def init_from_shapes(shapes: PyTree) -> PyTree:
        return start(jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes))

    def update_at(carry: PyTree, value: PyTree, index: jax.Array | int) -> PyTree:
        return step(carry, value, jnp.asarray(index, jnp.int64))

    return jax_impl.Accumulator(init_from_shapes, update_at, end, join)


def reshape_batch_axis(tree: PyTree, microbatch_size: int, axis: int = 0) -> PyTree:
    """Split the batch axis of every tensor of a tree: ``[batch, ...] -> [batch / size, size, ...]``.

    The rows of microbatch k of n are k, k + n, k + 2n, ... (the strided partition of :func:`microbatch`).

    Raises:
        ValueError: the size is not positive, or does not divide the batch.

    >>> import torch
    >>> from microtome import torch_api as mt
    >>> mt.reshape_batch_axis(torch.arange(6), 2)
    tensor([[0, 3],
            [1, 4],
            [2, 5]])
    """
    return lift(jax_impl.reshape_batch_axis)(tree, microbatch_size, axis)


def microbatch(
    fun: Fun,
    argnums: int | Sequence[int],
    microbatch_size: int | None,
    accumulator: PyTree = AccumulationType.SUM,
    *,
    argnames: str | Sequence[str] = (),
    in_axes: PyTree = 0,
    num_real_microbatches: int | torch.Tensor | None = None,
    remainder: str = "run",
    partition: str = "strided",
) -> Fun:
    """Run a torch function on one microbatch after another and join the results.

    Equivalent to ``fun``, for a ``fun`` whose result on a batch is the sum, mean or concatenation of its results on the
    parts, as the accumulator says. What differs: peak memory is that of ``fun`` on ``microbatch_size`` rows plus the
    joined result, in ``backward()`` too, where each microbatch is computed a second time when its turn comes.

    Tensors that ``fun`` captures (a model's parameters) are read at each call and get gradients. Dropout draws a new
    mask for each microbatch and each call, repeatable by ``torch.manual_seed``. A module that updates buffers
    (BatchNorm in training mode) raises.

    Source: ``optax.microbatching.microbatch``; ``remainder``, ``partition`` and prefix trees are added.

    Args:
        fun: torch callable of pytrees of tensors.
        argnums: positions of the batch arguments, ``[batch, ...]`` each; each may be passed by name too.
        microbatch_size: rows of a microbatch; None for all at once.
        accumulator: ``SUM``, ``MEAN`` (weighted by rows), ``RUNNING_MEAN``, ``CONCAT``, :func:`weighted_mean`, an
            :func:`Accumulator`, or a tree of these that is a prefix of the output's.
        argnames: names of further batch arguments.
        in_axes: the batch axis, one for all or one for each batch argument; None for an argument all rows share.
        num_real_microbatches: stop after so many microbatches, the rest being padding.
        remainder: ``"run"`` runs left-over rows as one smaller microbatch, ``"error"`` refuses them.
        partition: ``"strided"`` or ``"contiguous"``.

    Returns:
        A torch callable with the signature of ``fun``, whose results have the dtypes of ``fun``'s.

    Raises:
        TypeError, ValueError: at the call, before anything runs, for arguments that do not fit; the message names the
            argument, the rule, what was received and the way out.

    >>> import torch
    >>> from microtome import torch_api as mt
    >>> mean_square = mt.microbatch(lambda x: (x ** 2).mean(), 0, 2, mt.AccumulationType.MEAN)
    >>> mean_square(torch.tensor([1.0, 2.0, 3.0]))
    tensor(4.6667)
    """
    traced = to_jax_callable(fun)
    targets = [*listed(argnums), *listed(argnames)]
    transform = functools.partial(
        jax_impl.microbatch,
        traced,
        argnums,
        microbatch_size,
        to_jax_tree(accumulator),
        argnames=argnames,
        remainder=remainder,
        partition=partition,
    )
    transform(in_axes=in_axes, num_real_microbatches=_host(num_real_microbatches))

    def run(num_real: Count, *args: PyTree, **kwargs: PyTree) -> PyTree:
        axes = [in_axes] * len(targets) if isinstance(in_axes, int) else list(to_jax_tree(in_axes))
        args, kwargs = number_rows(traced, targets, axes, args, kwargs)
        return transform(in_axes=tuple(axes), num_real_microbatches=num_real)(*args, **kwargs)

    only_maps(run, traced)
    return finish(run, fun, lambda *args, **kwargs: (num_real_microbatches,))


def micro_vmap(
    fun: Fun,
    in_axes: PyTree = 0,
    out_axes: int = 0,
    *,
    microbatch_size: int | None = None,
    accumulator: PyTree = AccumulationType.CONCAT,
    num_real_microbatches: int | torch.Tensor | None = None,
    remainder: str = "run",
    partition: str = "strided",
) -> Fun:
    """Map a torch function over a batch, one microbatch at a time.

    Equivalent to ``torch.func.vmap(fun, in_axes)``, and with another accumulator to its results joined over the batch.
    What differs: peak memory is that of ``microbatch_size`` examples plus the result; with ``SUM`` or ``MEAN`` the
    outputs of all examples never exist together. Random functions draw differently for each example, and what an
    example draws does not depend on the microbatch size.

    Source: ``optax.microbatching.micro_vmap``. Arguments, results and errors as in :func:`microbatch`.

    >>> import torch
    >>> from microtome import torch_api as mt
    >>> mt.micro_vmap(torch.sum, microbatch_size=2)(torch.arange(6.0).reshape(3, 2))
    tensor([1., 5., 9.])
    """
    traced = to_jax_callable(fun)
    transform = functools.partial(
        jax_impl.micro_vmap,
        traced,
        out_axes=out_axes,
        microbatch_size=microbatch_size,
        accumulator=to_jax_tree(accumulator),
        remainder=remainder,
        partition=partition,
    )
    transform(in_axes=in_axes, num_real_microbatches=_host(num_real_microbatches))

    def run(num_real: Count, *args: PyTree, **kwargs: PyTree) -> PyTree:
        axes = [in_axes] * len(args) if isinstance(in_axes, int) else list(to_jax_tree(in_axes))
        count = len(axes)
        others = [name for name in kwargs if name not in parameter_names(traced)[:count]]
        axes += [0] * len(others)
        args, kwargs = number_rows(traced, [*range(count), *others], axes, args, kwargs)
        return transform(in_axes=tuple(axes[:count]), num_real_microbatches=num_real)(*args, **kwargs)

    only_maps(run, traced)
    return finish(run, fun, lambda *args, **kwargs: (num_real_microbatches,))


def micro_grad(
    fun: Fun,
    has_aux: bool = False,
    argnums: int | Sequence[int] = 0,
    *,
    batch_argnums: int | Sequence[int] = 1,
    keep_batch_dim: bool = True,
    microbatch_size: int | None = None,
    accumulator: PyTree = AccumulationType.SUM,
    transform_fn: Fun | None = None,
    metrics_fn: Fun | None = None,
    num_real_microbatches: int | torch.Tensor | None = None,
    remainder: str = "run",
    partition: str = "strided",
) -> Callable[..., tuple[PyTree, jax_impl.Aux]]:
    """Transform the gradient of each example of a torch loss, then accumulate them.

    Equivalent, for one row ``x`` (with its axis of length 1) at a time, to::

        g = torch.func.grad(fun)(params, x)
        grads += transform_fn(g)

    What differs: the loop is one compiled program. Where ``transform_fn`` only scales by functions of norms, as
    :func:`clip_by_global_norm` and hand-written clipping do, no example's gradient is computed and the cost is that of
    a plain gradient (see :func:`clipped_grad`). Otherwise, on a CPU, the gradients of a microbatch are made,
    transformed and added up one after another, and peak memory is the loss's of ``microbatch_size`` examples and a few
    gradients; on other devices, or where an accumulator or ``metrics_fn`` keeps each, ``microbatch_size`` gradients.
    Any torch code can be the loss: recurrent layers, attention, ``torch.autograd.grad`` inside.

    Parameters are a tensor or any tree of tensors: ``dict(model.named_parameters())`` with
    ``torch.func.functional_call(model, params, ...)`` in the loss. Integer tensors get zeros of their own dtype;
    parameters that the loss does not reach, and frozen ones (``nn.Parameter`` with ``requires_grad=False``), get zeros
    where torch's ``grad`` is None. Complex gradients follow torch's convention. Dropout draws a mask for each example,
    independent of the microbatch size. Where gradients are summed over several processes, all-reduce the result: no
    ``.grad`` is touched, so no DistributedDataParallel hook fires.

    Source: ``optax.microbatching.micro_grad``; ``remainder`` and ``partition`` are added.

    Args:
        fun: the loss, ``fun(params, batch) -> []``.
        has_aux: whether ``fun`` returns ``(loss, aux)``.
        argnums: positions of the arguments to differentiate.
        batch_argnums: positions of the batch arguments, ``[batch, ...]``; tensors that ``fun`` takes by keyword only
            are batch arguments too.
        keep_batch_dim: pass each example as ``[1, ...]`` (else ``[...]``).
        microbatch_size: examples of a microbatch; None for all at once.
        accumulator: how to join the transformed gradients; see :func:`microbatch`.
        transform_fn: torch callable on one example's gradients, such as clipping; it may change the tree.
        metrics_fn: torch callable, a small summary of one example's gradients before ``transform_fn``.
        num_real_microbatches: stop after so many microbatches, the rest being padding.
        remainder: ``"run"`` or ``"error"``.
        partition: ``"strided"`` or ``"contiguous"``.

    Returns:
        ``(*args) -> (grads, aux)``, where ``aux.values`` are the losses ``[batch]``, ``aux.metrics`` what
        ``metrics_fn`` returned and ``aux.aux`` the loss's own auxiliary output, each with the batch on axis 0. Its
        ``explain(*args)`` tells for each parameter what its per-example gradients are kept as.

    Raises:
        TypeError, ValueError: at the call, before anything runs: a loss that is not a scalar, ``argnums`` out of range,
            an argument to differentiate that holds only integers, batch arguments of different length, a loss that
            branches on values, a module that updates buffers (BatchNorm in training mode).

    >>> import torch
    >>> from microtome import torch_api as mt
    >>> loss = lambda p, x: ((p["w"] * x).sum() - 1) ** 2
    >>> clip = lambda g: {"w": g["w"] / g["w"].norm().clamp(min=1.0)}
    >>> grads, aux = mt.micro_grad(loss, microbatch_size=2, transform_fn=clip)({"w": torch.zeros(2)}, torch.eye(2))
    >>> grads, aux.values
    ({'w': tensor([-1., -1.])}, tensor([1., 1.]))
    """
    traced = to_jax_callable(fun)
    wanted, batched = listed(argnums), listed(batch_argnums)
    options: dict[str, Any] = {
        "has_aux": has_aux,
        "argnums": argnums,
        "batch_argnums": batch_argnums,
        "keep_batch_dim": keep_batch_dim,
        "microbatch_size": microbatch_size,
        "accumulator": to_jax_tree(accumulator),
        "remainder": remainder,
        "partition": partition,
    }
    if transform_fn is not None:
        options["transform_fn"] = of_gradients(transform_fn)
    if metrics_fn is not None:
        options["metrics_fn"] = of_gradients(metrics_fn)
    jax_impl.micro_grad(traced, num_real_microbatches=_host(num_real_microbatches), **options)

    def prepared(num_real: Count, frozen: Frozen, args: Args, kwargs: Kwargs) -> tuple[Any, Args, Kwargs]:
        loss, args, kwargs = per_example(traced, wanted, batched, frozen, args, kwargs)
        return jax_impl.micro_grad(loss, num_real_microbatches=num_real, **options), args, kwargs

    def run(num_real: Count, frozen: Frozen, *args: PyTree, **kwargs: PyTree) -> PyTree:
        grad_fn, args, kwargs = prepared(num_real, frozen, args, kwargs)
        return grad_fn(*args, **kwargs)

    def explain(num_real: Count, frozen: Frozen, *args: PyTree, **kwargs: PyTree) -> jax_impl.Explanation:
        grad_fn, args, kwargs = prepared(num_real, frozen, args, kwargs)
        return grad_fn.explain(*args, **kwargs)

    def leading(*args: PyTree, **kwargs: PyTree) -> tuple[int | torch.Tensor | None, Frozen]:
        return num_real_microbatches, frozen_flags(traced, wanted, args, kwargs)

    call: Any = finish(run, fun, leading, recompute=True)
    call.explain = explain_with(explain, fun, leading)
    return call


def assign_grads(model: torch.nn.Module, grads: Mapping[str, torch.Tensor]) -> None:
    """Write gradients into ``.grad`` by parameter name, replacing what is there; then ``optimizer.step()`` as usual.

    Equivalent to ``for k, p in model.named_parameters(): p.grad = grads[k]`` with checks. Parameters that ``grads``
    does not name keep their ``.grad``; frozen ones (``requires_grad=False``) are skipped. The tensors are not copied.

    Raises:
        ValueError: a name that the model does not have, or a tensor of another shape, dtype or device.

    >>> import torch
    >>> from microtome import torch_api as mt
    >>> layer = torch.nn.Linear(2, 1, bias=False)
    >>> mt.assign_grads(layer, {"weight": torch.ones(1, 2)})
    >>> layer.weight.grad
    tensor([[1., 1.]])
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    unknown = [name for name in grads if name not in parameters]
    if unknown:
        raise ValueError(
            f"grads names parameters that the model does not have: {unknown}; it has {sorted(parameters)}."
        )
    for name, grad in grads.items():
        parameter = parameters[name]
        for what in ("shape", "dtype", "device"):
            if getattr(grad, what) != getattr(parameter, what):
                found, expected = getattr(grad, what), getattr(parameter, what)
                raise ValueError(f"grads[{name!r}] has {what} {found}, but the parameter has {expected}.")
    for name, grad in grads.items():
        if parameters[name].requires_grad:
            parameters[name].grad = grad.detach()


def of_gradients(fun: Fun) -> Fun:
    """Return a function of one example's gradients, without the row number that a batch argument carries."""
    traced = to_jax_callable(fun)
    return lambda grads: traced(without_rows(grads)[0])


def listed(value: int | str | Sequence[int | str]) -> list[Any]:
    """Return ``argnums`` or ``argnames``, which may be one or several, as a list."""
    return [value] if isinstance(value, (int, str)) else list(value)


def _host(num_real: int | torch.Tensor | None) -> int | None:
    """Return a number for the checks at wrapping time; None, which stands for some number, for a tensor."""
    return None if isinstance(num_real, torch.Tensor) else num_real


def per_example(
    traced: Fun, wanted: Sequence[int], batched: Sequence[int], frozen: Frozen, args: Args, kwargs: Kwargs
) -> tuple[Fun, Args, Kwargs]:
    """Return a loss for the transforms that differentiate each example, and the arguments to pass to it.

    It leaves frozen parameters alone, follows torch's convention for complex ones, and draws for each row by number.
    """

    @functools.wraps(traced)
    def loss(*args: PyTree, **kwargs: PyTree) -> PyTree:
        for position, flags in zip(wanted, frozen, strict=True):
            args, kwargs = replace(traced, position, args, kwargs, functools.partial(_restore, flags))
        return traced(*args, **kwargs)

    for position in wanted:
        args, kwargs = replace(traced, position, args, kwargs, _conjugate)
    args, kwargs = number_rows(traced, batched, [0] * len(batched), args, kwargs)
    return loss, args, number_rows_by_name(traced, args, kwargs)


def frozen_flags(fun: Fun, wanted: Sequence[int], args: Args, kwargs: Kwargs) -> Frozen:
    """Tell, for each differentiated argument, which of its tensors are frozen parameters."""
    flags = []
    for position in wanted:
        place = place_of(fun, position, args, kwargs)
        value = args[place] if isinstance(place, int) else kwargs[place] if place is not None else ()
        leaves = jax.tree.leaves(to_jax_tree(value))
        if any(isinstance(x, torch.nn.Module) for x in leaves):
            raise TypeError(
                f"{user_line()}: a module is no argument to differentiate: pass dict(module.named_parameters()), and "
                "call the module by torch.func.functional_call(module, params, args); or use clipped_backward."
            )
        flags.append(tuple(isinstance(x, torch.nn.Parameter) and not x.requires_grad for x in leaves))
    return tuple(flags)


def _conjugate(tree: PyTree) -> PyTree:
    """Conjugate complex parameters: a derivative in the conjugate is torch's gradient where JAX's is the conjugate."""

    def convert(leaf: PyTree) -> PyTree:
        if isinstance(leaf, float):
            leaf = jnp.asarray(leaf, jax_dtype(torch.get_default_dtype()))
        return jnp.conj(leaf) if jnp.iscomplexobj(leaf) else leaf

    return jax.tree.map(convert, tree)


def _restore(frozen: Sequence[bool], tree: PyTree) -> PyTree:
    if isinstance(tree, Rows):
        return Rows(_restore(frozen, tree.value), tree.index)
    leaves, treedef = flatten(_conjugate(tree))
    return treedef.unflatten([jax.lax.stop_gradient(x) if f else x for x, f in zip(leaves, frozen, strict=True)])
