"""Loss and gradient of one example, whatever the arguments to differentiate hold beside floats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..factors.one_by_one import named
from ..program.trees import Function, as_array, dtype_of, flatten, flatten_with_names, outlined
from .arguments import Signature, Slot, get_argument, set_argument, slots


def places_to_differentiate(
    arguments: Signature, wanted: Sequence[Slot], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Slot]:
    """Return where the arguments to differentiate are, each checked to hold something with a derivative."""
    places = []
    for target, slot in zip(wanted, slots(arguments, "argnums", wanted, args, kwargs), strict=True):
        if slot is None:
            raise TypeError(f"argument {target}, which argnums names, was left at its default. Pass it to the call.")
        places.append(slot)
        name = arguments.label(slot)
        hint = "Pass what is no array as an argument of its own."
        leaves, _ = flatten_with_names(get_argument(slot, args, kwargs), name)
        dtypes = [as_array(leaf, path, hint).dtype for path, leaf in leaves]
        if any(jnp.issubdtype(dtype, jax.dtypes.extended) for dtype in dtypes):
            raise TypeError(f"{name} holds random keys, which have no gradient. Pass them as an argument of their own.")
        if dtypes and not any(jnp.issubdtype(dtype, jnp.inexact) for dtype in dtypes):
            found = ", ".join(sorted({jnp.dtype(dtype).name for dtype in dtypes}))
            raise TypeError(
                f"{name} is to be differentiated, but holds no floating-point array, only {found}. Cast it to a float, "
                "or name another argument in argnums."
            )
    return places


def value_and_grad(
    fun: Function, has_aux: bool, places: Sequence[Slot], args: list[Any], kwargs: dict[str, Any]
) -> tuple[Any, Any, tuple[Any, ...], list[jax.Array]]:
    """Compute loss, auxiliary output, gradients at ``places``, and those gradient leaves that stand for integers."""
    flat, treedef = flatten(tuple(get_argument(place, args, kwargs) for place in places))
    moving = [i for i, leaf in enumerate(flat) if jnp.issubdtype(dtype_of(leaf), jnp.inexact)]

    def loss(floats: list[Any]) -> tuple[Any, Any]:
        leaves = list(flat)
        for i, leaf in zip(moving, floats, strict=True):
            leaves[i] = leaf
        new_args, new_kwargs = list(args), dict(kwargs)
        for place, tree in zip(places, treedef.unflatten(leaves), strict=True):
            set_argument(place, tree, new_args, new_kwargs)
        return _checked_loss(fun(*new_args, **new_kwargs), has_aux)

    (value, aux), grads = jax.value_and_grad(loss, has_aux=True)([flat[i] for i in moving])
    gradients = dict(zip(moving, named(grads), strict=True))
    zeros = {i: jnp.zeros(jnp.shape(x), dtype_of(x)) for i, x in enumerate(flat) if i not in gradients}
    gradients |= zeros
    return value, aux, treedef.unflatten([gradients[i] for i in range(len(flat))]), list(zeros.values())


def _checked_loss(output: Any, has_aux: bool) -> tuple[Any, Any]:
    if has_aux and not (isinstance(output, (tuple, list)) and len(output) == 2):
        raise TypeError(f"has_aux=True needs fun to return (loss, aux), got {outlined(output)}.")
    value, aux = output if has_aux else (output, None)
    if not jax.tree_util.all_leaves([value]):
        raise TypeError(
            f"fun must return a scalar loss for each example, got {outlined(value)}. Where it returns more, "
            "pass has_aux=True and return (loss, aux)."
        )
    shape, dtype = jnp.shape(value), dtype_of(value)
    if shape:
        raise TypeError(
            f"fun must return a scalar loss for each example, got shape {shape}. Reduce it, for instance with "
            "a mean, or drop the batch axis with keep_batch_dim=False."
        )
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"fun must return a real floating-point loss, got {jnp.dtype(dtype).name}.")
    return value, aux
