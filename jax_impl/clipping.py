"""Per-example clipping at the cost of a plain gradient, after ``jax_privacy.clipping``."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .batches.accumulation import AccumulationType, DividedSum
from .batches.arguments import (
    Batch,
    Signature,
    Slot,
    axis_of_keyword,
    collect,
    get_argument,
    indices,
    set_argument,
    slots,
    wraps,
)
from .batches.differentiation import places_to_differentiate, value_and_grad
from .batches.loop import accumulate, explained
from .batches.partition import Options
from .factors.explain import Explanation
from .norms import checked_norms, clipped, global_norm
from .program.sums import wide
from .program.trees import Function, PyTree, as_array, check_width, dtype_of, flatten, flatten_with_names


class ClippedAux(NamedTuple):
    """What :func:`clipped_grad` returns beside the gradients, the examples on axis 0; None for what was not asked."""

    values: Any
    """The losses, ``[batch]``."""
    grad_norms: Any
    """The norms before clipping, ``[batch]``."""
    aux: Any
    """The function's own auxiliary output."""


@dataclasses.dataclass(frozen=True)
class ClippedGrad:
    """What :func:`clipped_grad` returns: a function that knows its sensitivity and can tell how it computes."""

    fun: Function
    l2_norm_bound: Any
    has_aux: bool
    explain: Callable[..., Explanation]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The clipped gradients, and with auxiliary output a pair."""
        return self.fun(*args, **kwargs)

    def sensitivity(self, neighboring_relation: Any = "REPLACE_SPECIAL") -> Any:
        """How far, in Euclidean norm, the gradients can move when one example changes.

        Args:
            neighboring_relation: ``"ADD_OR_REMOVE_ONE"`` and ``"REPLACE_SPECIAL"`` (an example against none) or
                ``"REPLACE_ONE"`` (against another, twice as far); or the member of ``dp_accounting``'s enum.
        """
        name = getattr(neighboring_relation, "name", neighboring_relation)
        if name in ("ADD_OR_REMOVE_ONE", "REPLACE_SPECIAL"):
            return self.l2_norm_bound
        if name == "REPLACE_ONE":
            return 2 * self.l2_norm_bound
        raise ValueError(
            "neighboring_relation must be 'ADD_OR_REMOVE_ONE', 'REPLACE_SPECIAL' or 'REPLACE_ONE', got "
            f"{neighboring_relation!r}."
        )


def clipped_grad(
    fun: Function,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    l2_clip_norm: PyTree,
    rescale_to_unit_norm: bool = False,
    normalize_by: Any = 1.0,
    batch_argnums: int | Sequence[int] = 1,
    keep_batch_dim: bool = True,
    return_values: bool = False,
    return_grad_norms: bool = False,
    pre_clipping_transform: Callable[[PyTree], PyTree] | None = None,
    microbatch_size: int | None = None,
    nan_safe: bool = True,
    dtype: Any = None,
    prng_argnum: int | None = None,
    remainder: str = "error",
    partition: str = "strided",
) -> ClippedGrad:
    """The sum over a batch of per-example gradients, each clipped to a norm.

    Equivalent, for ``fun(params, batch)``, to ``sum(clip(jax.grad(fun)(params, x)) for x in batch) / normalize_by``
    with ``clip = clip_by_global_norm(l2_clip_norm)`` and one row ``x``, its axis of length 1 kept. What differs:

    * **Time and memory are those of the plain gradient** of a microbatch, for almost every parameter of almost every
      model. An example's gradient is a product: for a weight ``X[t, i] D[t, o]``, inputs and cotangents, for an
      embedding cotangents and indices. The norm follows from Gram matrices or from the product, whichever is cheaper,
      and the clipped sum is one matrix product with the factors weighted; nothing of ``batch x parameters`` exists.
      This is derived from the program, not from layers: convolutions, weights used more than once, loops, and
      parameters that are reshaped, sliced, stacked or scaled before use are covered.
    * Where no rule covers an operation, the gradient of that parameter, and of no other, is computed for each example
      of a microbatch. ``explain(*args)`` tells for each parameter which path it takes, and why.
    * Differentiated itself, it is computed the plain way.
    * The squares of each factor have to fit the dtype, not only those of the product: in float32, a layer whose inputs
      are all below 1e-19 (while cotangents are huge) gets no right norm.
    * Norms are about as exact as those of the plain gradient where the inputs of a layer have a large offset or are
      almost equal and their cotangents add up to zero: over the steps of a sequence, or in pairs that a loss compares.
      Where the products that a norm is the sum of cancel in another way, to less than two digits, the norm is
      overestimated: the bound holds, and the example counts for less than it could. float64 has the digits.
    * Norms are computed as exactly as the device can, whatever ``precision`` the program's products have. The sum
      over examples has it, but for algorithms of float16 or 8 bits, or that add up in such: sums would not fit them.
    * In half precision, and with a wider ``dtype``, the sum is more accurate: products are accumulated in float32, or
      in that dtype, and rounded once. So a product beyond float16's range, infinite in the plain computation, is
      clipped like others. (A cast to float16 stays one.)

    An example whose norm is not finite, because its gradient holds NaN or infinity or because its squares do not fit
    the dtype, counts as zero with ``nan_safe``, all of it. (jax_privacy zeroes the entries and keeps the rest, which
    needs each entry.)

    After ``jax_privacy.clipping.clipped_grad`` (De et al., 2022, arXiv:2204.13650); ghost norms and book-keeping (Li et
    al., 2021, arXiv:2110.05679; Bu et al., 2022, arXiv:2210.00038) do for layers what this does for programs. Trees of
    clip norms, ``remainder`` and ``partition`` are added.

    Shapes and dtypes: batch arguments ``[batch, ...]``; gradients as the parameters, or in ``dtype``; losses and norms
    ``[batch]``. An empty batch gives zeros.

    Args:
        fun: The loss, ``fun(params, batch) -> []``, of one example.
        argnums: The positions of the arguments to differentiate.
        has_aux: Whether ``fun`` returns ``(loss, aux)``.
        l2_clip_norm: A positive number, traced or not, or a tree of them that is a prefix of the gradients' tree: each
            part is then clipped by itself. A traced one that turns out not to be positive gives NaN.
        rescale_to_unit_norm: Divide by the clip norm, so that the largest norm is 1.
        normalize_by: Divide the sum by this, for instance the expected batch size.
        batch_argnums: The positions of the arguments that hold the batch, on axis 0. Arrays that ``fun`` takes by
            keyword only are a batch too; ``()`` where there are no others.
        keep_batch_dim: Whether ``fun`` expects a batch axis. If so, an axis of length 1 that auxiliary output has in
            the second place is dropped.
        return_values: Whether to return the losses.
        return_grad_norms: Whether to return the norms of the gradients as they are, before ``pre_clipping_transform``
            and clipping, of all parts together.
        pre_clipping_transform: What to do to an example's gradients before they are clipped.
        microbatch_size: Examples of a microbatch; None for all at once.
        nan_safe: Count examples whose gradient is not finite as zero.
        dtype: The dtype of the gradients from before clipping on; by default that of the parameters.
        prng_argnum: The position of a random key, which is split into one for each example.
        remainder: ``"error"``, or ``"run"`` to run left-over examples as one smaller microbatch at the end.
        partition: ``"strided"`` or ``"contiguous"``; see :func:`microbatch`.

    Returns:
        A function with the arguments of ``fun`` and ``is_padding_example=None``, booleans ``[batch]`` of examples that
        count as zero whatever they hold; their losses and norms mean nothing. It returns the gradients, or
        ``(gradients, ClippedAux)`` where values, norms or auxiliary output were asked for. Its ``sensitivity()`` is the
        bound on one example's part, its ``explain`` tells how it computes.

    Raises:
        TypeError: A parameter that is not of a real floating-point type, or a loss that is not, a clip norm or another
            option of a wrong type.
        ValueError: A clip norm or ``normalize_by`` that is not positive, a tree that is no prefix, an argument that is
            both differentiated and the batch, a size that does not divide the batch, batch arguments or padding flags
            of different length, a loss that reduces over examples by a mapped axis name.

    Example:
        >>> import jax.numpy as jnp
        >>> from microtome.jax_impl import clipped_grad
        >>> loss = lambda w, x: jnp.sum(w * x)
        >>> grad_fn = clipped_grad(loss, l2_clip_norm=1.0, return_grad_norms=True)
        >>> grads, aux = grad_fn(jnp.ones(2), jnp.array([[3.0, 4.0], [0.0, 0.5]]))
        >>> grads, aux.grad_norms, grad_fn.sensitivity()
        (Array([0.6, 1.3], dtype=float32), Array([5. , 0.5], dtype=float32), 1.0)
    """
    norms = checked_norms("l2_clip_norm", l2_clip_norm)
    if not isinstance(normalize_by, jax.core.Tracer) and not float(normalize_by) > 0:
        raise ValueError(f"normalize_by must be positive, got {normalize_by}.")
    if dtype is not None and not jnp.issubdtype(jnp.dtype(dtype), jnp.floating):
        raise TypeError(f"dtype must be a floating-point type, got {jnp.dtype(dtype).name}.")
    options = Options.checked(microbatch_size, remainder, partition, None)
    arguments = Signature.of(fun)
    wanted = [arguments.check("argnums", i) for i in indices("argnums", argnums)]
    batched = arguments.batch(batch_argnums)
    keys = (
        [] if prng_argnum is None else [arguments.check("prng_argnum", i) for i in indices("prng_argnum", prng_argnum)]
    )
    if set(wanted) & {*batched, *keys}:
        raise ValueError(
            f"argnums={argnums} and batch_argnums={batch_argnums} or prng_argnum={prng_argnum} name the same argument. "
            "What has a batch axis cannot be differentiated for each example."
        )
    has_output = has_aux or return_values or return_grad_norms
    divided = isinstance(normalize_by, jax.core.Tracer) or normalize_by != 1.0
    joined = (DividedSum(normalize_by) if divided else AccumulationType.SUM, AccumulationType.CONCAT)

    def prepared(args: tuple[Any, ...], kwargs: dict[str, Any], padding: Any, raw: bool) -> tuple[Function, Batch]:
        places = places_to_differentiate(arguments, wanted, args, kwargs)
        _check_parameters(arguments, places, args, kwargs)
        axes: dict[Slot, PyTree] = {
            slot: 0 for slot in slots(arguments, "batch_argnums", batched, args, kwargs) if slot is not None
        }
        key_slots = [slot for slot in slots(arguments, "prng_argnum", keys, args, kwargs) if slot is not None]
        shared = {*arguments.positional, *places, *key_slots}
        axes |= {n: axis_of_keyword(v) for n, v in kwargs.items() if n not in axes and n not in shared}
        batch = collect(arguments, args, kwargs, list(axes.items()))
        extra = [] if padding is None else [_checked_padding(padding, batch.rows)]
        if extra:
            filled = [_without_padding(x, axis, extra[0]) for x, axis in zip(batch.leaves, batch.axes, strict=True)]
            batch = dataclasses.replace(batch, leaves=filled)
        key_leaves, key_trees = [], []
        for slot in key_slots:
            leaves, treedef = flatten(get_argument(slot, args, kwargs))
            key_leaves += [jax.random.split(key, batch.rows) for key in leaves]
            key_trees.append((slot, treedef))
        count = len(batch.leaves)

        def example(*leaves: jax.Array) -> tuple[Any, ...]:
            own = leaves[:count]
            new_args, new_kwargs = batch.rebuild([jnp.expand_dims(x, 0) for x in own] if keep_batch_dim else own)
            rest = iter(leaves[count : count + len(key_leaves)])
            for slot, treedef in key_trees:
                tree = treedef.unflatten([next(rest) for _ in range(treedef.num_leaves)])
                set_argument(slot, tree, new_args, new_kwargs)
            value, aux, grads, _ = _value_and_grad(fun, has_aux, places, new_args, new_kwargs)
            grads = grads[0] if isinstance(argnums, int) else grads
            norm = global_norm(grads) if return_grad_norms else None
            before = grads if pre_clipping_transform is None else pre_clipping_transform(grads)
            _check_transformed(before)
            before = before if dtype is None else jax.tree.map(lambda g: g.astype(dtype), before)
            is_padding = leaves[-1] if extra else None
            result = clipped(before, l2_clip_norm, "l2_clip_norm", nan_safe, rescale_to_unit_norm, is_padding)
            outputs = result, ClippedAux(value if return_values else None, norm, aux)
            return (*outputs, grads) if raw else outputs

        leaves = [*batch.leaves, *key_leaves, *extra]
        return example, Batch(leaves, [*batch.axes, *[0] * (len(leaves) - count)], batch.rows, batch.rebuild)

    @wraps(fun)
    def grads_of(*args: Any, is_padding_example: Any = None, **kwargs: Any) -> Any:
        with jax.named_scope("clipped_grad"):
            example, batch = prepared(args, kwargs, is_padding_example, raw=False)
            grads, aux = accumulate(example, batch, options.plan(batch.rows), joined, jax.vmap, factored=True)
            if keep_batch_dim:
                aux = aux._replace(aux=jax.tree.map(_without_row_axis, aux.aux))
        return (grads, aux) if has_output else grads

    def explain(*args: Any, is_padding_example: Any = None, **kwargs: Any) -> Explanation:
        """Tell which parameter's per-example gradients stay factors, and which are computed and why; run nothing."""
        example, batch = prepared(args, kwargs, is_padding_example, raw=True)
        return explained(example, batch, joined, options.plan(batch.rows).size)

    known = list(map(_roomy, norms))
    if rescale_to_unit_norm:
        bound: Any = math.sqrt(len(norms))
    elif len(norms) == 1:
        bound = known[0]
    else:
        squares = sum(n * n for n in known)
        bound = math.sqrt(squares) if isinstance(squares, float) else jnp.sqrt(squares)
    return ClippedGrad(grads_of, bound / _roomy(normalize_by), has_output, explain)


def _roomy(number: Any) -> Any:
    """Return it as Python's float where it is known: whole numbers and half precision would wrap or overflow."""
    if not isinstance(number, jax.core.Tracer):
        return float(number)
    return number.astype(wide(jnp.promote_types(number.dtype, jnp.float16)))


def _value_and_grad(
    fun: Function, has_aux: bool, places: Sequence[Slot], args: list[Any], kwargs: dict[str, Any]
) -> Any:
    try:
        return value_and_grad(fun, has_aux, places, args, kwargs)
    except NameError as error:
        if "unbound axis name" not in str(error):
            raise
        raise ValueError(
            "fun reduces over the examples by an axis name, as batch normalisation does; the gradient of one example "
            "is then not defined. Use a normalisation within the example (group, layer or instance normalisation), or "
            "batch normalisation in evaluation mode."
        ) from error


def _check_parameters(arguments: Signature, places: Sequence[Slot], args: Any, kwargs: Any) -> None:
    for slot in places:
        for name, leaf in flatten_with_names(get_argument(slot, args, kwargs), arguments.label(slot))[0]:
            found = jnp.dtype(dtype_of(leaf))
            if not jnp.issubdtype(found, jnp.floating):
                raise TypeError(
                    f"{name} is {found.name}; clipping needs parameters of a real floating-point type. Pass it as an "
                    "argument of its own, or as two real ones where it is complex."
                )
            if isinstance(leaf, jax.Array):  # NumPy's and numbers become arrays of the width that JAX's mode allows
                check_width(leaf, name)


def _check_transformed(grads: PyTree) -> None:
    for name, leaf in flatten_with_names(grads, "the result of pre_clipping_transform")[0]:
        if not jnp.issubdtype(dtype_of(leaf), jnp.inexact):
            raise TypeError(
                f"{name} is {dtype_of(leaf).name}, which has no norm to clip. Return floating-point arrays."
            )


def _checked_padding(padding: Any, rows: int) -> jax.Array:
    flags = as_array(padding, "is_padding_example", "Pass one boolean for each example.")
    if flags.dtype != jnp.bool_:
        raise TypeError(f"is_padding_example must hold booleans, got {flags.dtype.name}.")
    if flags.shape != (rows,):
        raise ValueError(f"is_padding_example must have shape ({rows},), one flag for each example, got {flags.shape}.")
    return flags


def _without_padding(leaf: jax.Array, axis: int, padding: jax.Array) -> jax.Array:
    """Put the first real example in place of padding, zeros where there is none: a label of -1 would be refused."""
    if not padding.size:
        return leaf
    real = jax.lax.dynamic_index_in_dim(leaf, jnp.argmin(padding), axis)
    if not jnp.issubdtype(leaf.dtype, jax.dtypes.extended):  # random keys
        real = jnp.where(padding.all(), 0, real).astype(leaf.dtype)
    return jnp.where(jnp.expand_dims(padding, [i for i in range(leaf.ndim) if i != axis]), real, leaf)


def _without_row_axis(leaf: jax.Array) -> jax.Array:
    return jnp.squeeze(leaf, 1) if leaf.ndim > 1 and leaf.shape[1] == 1 else leaf
