"""How products pass uncomputed through operations that move their entries: reshapes, repetitions, casts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Literal

from ..program.convolutions import bind_fast
from ..program.evaluate import Atom, shaped
from ..program.sums import is_narrow
from .casts import enlarges, holds
from .lazy import Lazy, Squares
from .registry import Evaluator, Known, if_lazy, rule
from .terms import Term, UnsupportedError, new_label, split_label


@rule("transpose", accepts=if_lazy(0))
def _transpose(ev: Evaluator, e: JaxprEqn) -> Lazy:
    order = e.params["permutation"]
    moved = lambda t: t.replace(axes=tuple(t.axes[i] for i in order))
    return ev.lazy(e.invars[0]).map(moved, shaped(e.outvars[0]).shape)


@rule("reshape", accepts=if_lazy(0))
def _reshape(ev: Evaluator, e: JaxprEqn) -> Lazy:
    shape = shaped(e.outvars[0]).shape
    if e.params.get("dimensions") is not None:
        raise UnsupportedError("a reshape that also transposes")
    return ev.lazy(e.invars[0]).map(lambda t: _regrouped(t, shape), shape)


def _regrouped(term: Term, shape: Sequence[int]) -> Term:
    """Return the term with its labels, in order, distributed over axes of these lengths."""
    term = term.replace(axes=(tuple(term.out),))
    axes, taken_labels = [], 0
    for n in shape:
        length, start = 1, taken_labels
        while length < n:
            label = term.axes[0][taken_labels]
            if length * term.sizes[label] > n:
                if n % length:
                    raise UnsupportedError("a reshape across axes")
                term = split_label(term, label, n // length)
                label = term.axes[0][taken_labels]
            length *= term.sizes[label]
            taken_labels += 1
        if length != n:
            raise UnsupportedError("a reshape across axes")
        axes.append((start, taken_labels))
    return term.replace(axes=tuple(term.axes[0][a:b] for a, b in axes))


@rule("squeeze", accepts=if_lazy(0))
def _squeeze(ev: Evaluator, e: JaxprEqn) -> Lazy:
    shape = shaped(e.outvars[0]).shape
    return ev.lazy(e.invars[0]).map(lambda t: _regrouped(t, shape), shape)


@rule("broadcast_in_dim", accepts=if_lazy(0))
def _broadcast(ev: Evaluator, e: JaxprEqn) -> Any:
    v, shape, where = e.invars[0], e.params["shape"], e.params["broadcast_dimensions"]
    if isinstance(v, Literal) or not ev.is_batched(v):
        return bind_fast(e, [ev.array(v)])[0]
    return repeated(ev.lazy(v), shape, where)


def repeated(value: Lazy, shape: Sequence[int], where: Sequence[int]) -> Lazy:
    """Return the value repeated to a shape, in which its own axes stand at the places ``where``."""
    given = value.shape
    if given == tuple(shape):
        return value

    def spread(t: Term) -> Term:
        axes, sizes = [], dict(t.sizes)
        for i, n in enumerate(shape):
            if i in where and (given[where.index(i)] == n):
                axes.append(t.axes[where.index(i)])
            elif n == 1:
                axes.append(())
            else:
                label = new_label()
                sizes[label] = n
                axes.append((label,))
        return t.replace(axes=tuple(axes), sizes=sizes)

    return value.map(spread, shape)


@rule("convert_element_type", accepts=if_lazy(0))
def _convert(ev: Evaluator, e: JaxprEqn) -> Any:
    v, dtype = e.invars[0], jnp.dtype(e.params["new_dtype"])
    given = shaped(v).dtype
    exact = holds(dtype, given)
    if not isinstance(ev.read(v), Lazy) and not exact:
        return bind_fast(e, [ev.array(v)])[0]
    if not jnp.issubdtype(dtype, jnp.floating):
        raise UnsupportedError(f"a cast to {dtype.name}")
    if not exact and is_narrow(dtype) and not _was(ev, v, dtype):
        raise UnsupportedError(f"a cast to {dtype.name}, which large numbers do not fit")
    value = ev.lazy(v)
    if (dtype == jnp.float64 and given != dtype) or jnp.finfo(given).bits < 16:  # einsum does not promote 8 bits

        def widened(t: Term) -> Term:
            cast = lambda x: x if x.dtype == jnp.bool_ else x.astype(dtype)
            return t.replace(factors=tuple(dataclasses.replace(f, array=cast(f.array)) for f in t.factors))

        value = value.map(widened)
    return Lazy(value.shape, dtype, value.terms)


def _was(ev: Evaluator, v: Atom, dtype: Any) -> bool:
    """Tell whether a variable was of this dtype, then scaled or masked: so are half-precision gradients clipped."""
    while not isinstance(v, Literal) and v in ev.makers:
        e = ev.makers[v]
        name = e.primitive.name
        if name == "convert_element_type":
            return bool(shaped(e.invars[0]).dtype == dtype)
        if name not in ("mul", "div", "neg", "select_n", "copy", "name"):
            return False
        lazies = [x for x in e.invars if not isinstance(x, Literal) and isinstance(ev.read(x), Lazy)]
        if len(lazies) != 1 or enlarges(e):
            return False
        v = lazies[0]
    return False


@rule("copy", "copy_p", "name", accepts=if_lazy(0))
def _same(ev: Evaluator, e: JaxprEqn) -> Lazy:
    return ev.lazy(e.invars[0])


def _of_barrier(e: JaxprEqn, i: int, known: Known) -> str:
    return "lazy" if known.is_lazy(e.outvars[i]) else ""


@rule("optimization_barrier", accepts=_of_barrier)
def _barrier(ev: Evaluator, e: JaxprEqn) -> list[Any]:
    values = [ev.read(v) for v in e.invars]
    arrays = [i for i, x in enumerate(values) if not isinstance(x, (Lazy, Squares))]
    for i, x in zip(arrays, jax.lax.optimization_barrier([values[i] for i in arrays]), strict=True):
        values[i] = x
    return values
