"""How products pass uncomputed into places of a larger array: gradients of what was indexed."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Literal

from ..program.convolutions import bind_fast
from ..program.evaluate import Atom, shaped
from .arithmetic import absorbed, multiplied
from .lazy import Lazy
from .registry import Evaluator, Known, if_lazy, rule
from .slices import placed
from .terms import Factor, Label, Places, Term, UnsupportedError, Windows, new_label, whole


def _one_place(e: JaxprEqn) -> bool:
    """Tell whether a scatter writes one window, so that no two updates meet."""
    return math.prod(shaped(e.invars[1]).shape[:-1]) == 1


@rule("scatter-add", "scatter_add", accepts=if_lazy(0, 2))
def _scatter_add(ev: Evaluator, e: JaxprEqn) -> Lazy:
    target, indices, updates = e.invars
    numbers = e.params["dimension_numbers"]
    if numbers.operand_batching_dims:
        raise UnsupportedError("a scatter with batch axes")
    value, where = ev.lazy(updates), _index(ev, indices)
    given, shape = shaped(updates).shape, shaped(target).shape
    windows = [d for d in range(len(shape)) if d not in numbers.inserted_window_dims]
    window_axis = dict(zip(windows, numbers.update_window_dims, strict=True))
    entry_axes = [d for d in range(len(given)) if d not in numbers.update_window_dims]
    lead = tuple(given[d] for d in entry_axes if given[d] != 1)
    mode, batched = str(e.params["mode"]).upper(), ev.is_batched(indices)

    def put(t: Term) -> Term:
        if any(len(axis) > 1 or any(x in t.places for x in axis) for axis in t.axes) or len(set(t.out)) < len(t.out):
            raise UnsupportedError("a scatter of an indexed or merged axis")
        entries = tuple(x for d in entry_axes for x in t.axes[d] if given[d] != 1)
        sizes, axes, alive = dict(t.sizes), [], jnp.ones(lead, bool)
        indices: dict[Label, tuple[Any, tuple[Label, ...]]] = {}
        for d, n in enumerate(shape):
            own = t.axes[window_axis[d]] if d in window_axis else ()
            width = given[window_axis[d]] if d in window_axis else 1
            if d not in numbers.scatter_dims_to_operand_dims:
                if n != width:
                    raise UnsupportedError("a scatter into a part of an axis")
                axes.append(own)
                continue
            start = where[..., numbers.scatter_dims_to_operand_dims.index(d)].reshape(lead)
            if "CLIP" not in mode:
                alive = alive & (start >= 0) & (start <= n - width)
            if n == 1:
                axes.append(())
                continue
            start, out = jnp.clip(start, 0, n - width), new_label()
            sizes[out] = n
            indices[out] = (start, own)
            axes.append((out,))
        places = dict(t.places)
        for x, (start, own) in indices.items():
            index, kept = (start[..., None] + jnp.arange(sizes[own[0]]), alive[..., None]) if own else (start, alive)
            index = index if "CLIP" in mode else jnp.where(kept, index, sizes[x])
            places[x] = Places(index, (*entries, *own), sizes[x], batched)
        t = t.replace(axes=tuple(axes), sizes=sizes, places=places)
        return t if "CLIP" in mode else _without(t, entries, alive, batched, indices.keys())

    return ev.lazy(target).plus(value.map(put, shape), True)


def _without(t: Term, entries: Sequence[Label], alive: Any, batched: bool, placed: Collection[Label]) -> Term:
    """Return the term whose entries out of range, dropped also where it was promised that there are none, are zero.

    They may hold NaN, which is what is read out of range. If no array has them, that they stand nowhere is enough.
    """
    fits = any(set(entries) <= set(f.labels) and not isinstance(f, Windows) for f in t.factors)
    return absorbed(t, [Factor(alive, tuple(entries), batched)]) if fits or not placed else t


def _of_scatter(e: JaxprEqn, i: int, known: Known) -> str:
    moves = i == 0 or (i == 2 and (_one_place(e) or e.params["unique_indices"]))
    return "lazy" if moves and known.is_lazy(e.outvars[0]) else ""


@rule("scatter", accepts=_of_scatter)
def _scatter(ev: Evaluator, e: JaxprEqn) -> Lazy:
    """Set entries to zero, as the gradient of what was overwritten: a product with a mask. Or put a window in zeros."""
    target, indices, updates = e.invars
    if ev.is_zero(target) and (_one_place(e) or e.params["unique_indices"]):
        return _scatter_add(ev, e)
    if not ev.is_zero(updates) or ev.is_batched(indices):
        raise UnsupportedError("entries that are overwritten")
    ones = jnp.ones(shaped(target).shape, shaped(target).dtype)
    mask = whole(bind_fast(e, [ones, ev.array(indices), ev.array(updates)])[0] != 0, False)
    return ev.lazy(target).map(lambda t: multiplied(t, mask))


def _index(ev: Evaluator, v: Atom) -> Any:
    """Read indices, in a type that the lengths of all axes fit."""
    array = ev.array(v)
    return array.astype(jnp.int32) if array.dtype.itemsize < 4 else array


@rule("dynamic_update_slice", accepts=if_lazy(0, 1))
def _update_slice(ev: Evaluator, e: JaxprEqn) -> Lazy:
    target, update, *starts = e.invars
    if not ev.is_zero(target):
        raise UnsupportedError("an update of what is not zero")
    shape = shaped(target).shape
    value = ev.lazy(update)
    if not value.terms:
        return Lazy(shape, value.dtype, ())
    if not isinstance(ev.read(update), Lazy) and not ev.is_batched(update):
        raise UnsupportedError("an update that all examples share")

    def put(t: Term) -> Term:
        for d, (n, width, start) in enumerate(zip(shape, shaped(update).shape, starts, strict=True)):
            if n == width:
                continue
            if isinstance(start, Literal):
                t = placed(t, d, min(max(int(start.val), 0), n - width), n)
                continue
            labels = t.axes[d]
            if len(labels) > 1 or (labels and labels[0] in t.places):
                raise UnsupportedError("an update along a merged axis")
            at = jnp.clip(_index(ev, start), 0, n - width)
            index = at + jnp.arange(width) if labels else at
            out = new_label()
            t = t.replace(
                axes=(*t.axes[:d], (out,), *t.axes[d + 1 :]),
                sizes=t.sizes | {out: n},
                places={**t.places, out: Places(index, labels, n, ev.is_batched(start))},
            )
        return t

    return value.map(put, shape)
