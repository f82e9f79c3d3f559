"""How products pass uncomputed through operations that add and scale them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal

from ..program.evaluate import Atom, shaped
from ..program.sums import is_narrow, wide
from .lazy import Lazy
from .moves import repeated
from .registry import Evaluator, Known, if_lazy, rule
from .squares import of_square, squares
from .terms import Factor, Term, UnsupportedError, Windows, invertible, matched, narrowed, taken, whole


@rule("neg", accepts=if_lazy(0))
def _negative(ev: Evaluator, e: JaxprEqn) -> Lazy:
    return ev.lazy(e.invars[0]).times(-1.0, False)


def adds(e: JaxprEqn) -> bool:
    """Tell whether an equation only adds."""
    return e.primitive.name in ("add", "add_any", "sub")


@rule("add", "add_any", "sub", accepts=if_lazy())
def _add(ev: Evaluator, e: JaxprEqn) -> Lazy:
    left, right = (ev.lazy(v) for v in e.invars)
    if e.primitive.name == "sub":
        right = right.times(-1.0, False)
    if left.shape != right.shape:
        raise UnsupportedError("a number that is added")
    return left.plus(right, True)


def _number(ev: Evaluator, v: Atom) -> Any:
    """Return the number that a variable repeats, or None."""
    if isinstance(v, Literal) or not shaped(v).shape:
        value = ev.array(v)
        return value if not jnp.shape(value) else None
    return ev.scalars.get(v)


def _of_product(e: JaxprEqn, i: int, known: Known) -> str:
    return of_square(e, i, known) or if_lazy()(e, i, known)


@rule("mul", accepts=_of_product)
def _multiply(ev: Evaluator, e: JaxprEqn) -> Any:
    left, right = e.invars
    if ev.kinds.get(e.outvars[0]) == "squares":
        return squares(ev, left)
    shape, dtype = shaped(e.outvars[0]).shape, shaped(e.outvars[0]).dtype
    for value, other in ((left, right), (right, left)):
        number = _number(ev, other)
        if number is not None and not isinstance(value, Literal):
            return _scaled(ev, value, shape, number, ev.is_batched(other))
    a, b = ev.lazy(left), ev.lazy(right)
    if len(a.terms) * len(b.terms) > 4:
        raise UnsupportedError("a product of sums")
    return Lazy(shape, dtype, tuple(multiplied(s, t) for s in a.terms for t in b.terms))


def _scaled(ev: Evaluator, v: Atom, shape: Sequence[int], number: Any, batched: bool) -> Lazy:
    """Multiply a variable by a number, at this shape: operands of a product are repeated along axes of length 1."""
    value = ev.lazy(v)
    return repeated(value, shape, range(len(shape) - len(value.shape), len(shape))).times(number, batched)


def multiplied(a: Term, b: Term) -> Term:
    """Return the product entry by entry."""
    if sum(f.batched for f in a.factors) < sum(f.batched for f in b.factors):
        a, b = b, a
    if b.places:
        raise UnsupportedError("a product of two indexed arrays")
    a, b = matched(a, b.fresh(), [(i, i) for i in range(len(a.axes))])
    factors, table, axes = list(b.factors), {}, []
    for ours, theirs in zip(a.axes, b.axes, strict=True):
        axes.append(ours or theirs)
        for x, y in zip(ours, theirs, strict=False):  # an axis of length 1 has no label: it is repeated
            if x in a.places:
                factors = [taken(f, y, a.places[x]) for f in factors]
            else:
                table[y] = x
    factors = [dataclasses.replace(f, labels=tuple(table.get(x, x) for x in f.labels)) for f in factors]
    mask = a.mask if b.mask is None else b.mask if a.mask is None else a.mask & b.mask
    sizes = a.sizes | {table.get(x, x): n for x, n in b.sizes.items()}
    return absorbed(a.replace(axes=tuple(axes), sizes=sizes, scale=(*a.scale, *b.scale), mask=mask), factors)


def of_products(*dtypes: Any) -> Any:
    """Return the dtype for products that the program itself never forms: those of float16 may not fit it."""
    roomy = [wide(dtype) if is_narrow(dtype) else dtype for dtype in dtypes]
    return functools.reduce(jnp.promote_types, roomy)


def absorbed(term: Term, extra: Sequence[Factor]) -> Term:
    """Return the term with more factors, each multiplied into one that has its labels, if there is one."""
    factors = list(term.factors)
    for f in [narrowed(f, term) for f in extra]:
        fits = [
            i
            for i, g in enumerate(factors)
            if set(f.labels) <= set(g.labels) and not isinstance(g, Windows) and not isinstance(f, Windows)
        ]
        mask = f.array.dtype == jnp.bool_
        if not f.labels and not (mask and fits):
            term = term.replace(scale=(*term.scale, f))
        elif fits and len(set(f.labels)) == len(f.labels):
            i = min(fits, key=lambda i: factors[i].stored)
            g = factors[i]
            at = [g.labels.index(label) for label in f.labels]
            order = sorted(range(len(at)), key=at.__getitem__)
            shape = [term.sizes[x] if x in f.labels else 1 for x in g.labels]
            aligned = f.array.transpose(order).reshape(shape)
            if mask:
                array = jnp.where(aligned, g.array, jnp.zeros((), g.array.dtype))  # whatever stands there
            else:
                dtype = of_products(g.array.dtype, f.array.dtype)
                array = g.array.astype(dtype) * aligned.astype(dtype)
            factors[i] = dataclasses.replace(g, array=array, batched=g.batched or f.batched)
        elif mask:
            factors = [*(_masked(g, f) for g in factors), f]
        else:
            factors.append(f)
    return term.replace(factors=tuple(factors))


def _masked(g: Factor, mask: Factor) -> Factor:
    """Return the factor without what the mask leaves nothing of, which may be NaN."""
    twice = any(len(set(f.labels)) < len(f.labels) for f in (g, mask))
    if twice or not set(g.labels) & set(mask.labels) or isinstance(g, Windows):
        return g
    kept = jnp.any(mask.array, [i for i, x in enumerate(mask.labels) if x not in g.labels])
    labels = [x for x in mask.labels if x in g.labels]
    order = sorted(range(len(labels)), key=lambda i: g.labels.index(labels[i]))
    shape = [n if x in labels else 1 for x, n in zip(g.labels, g.array.shape, strict=True)]
    array = jnp.where(kept.transpose(order).reshape(shape), g.array, jnp.zeros((), g.array.dtype))
    return dataclasses.replace(g, array=array, batched=g.batched or mask.batched)


def _has_inverse(array: Any, dtype: Any) -> bool:
    size = np.abs(np.asarray(array, np.float64))
    info = jnp.finfo(dtype)
    return bool(((size >= float(info.tiny)) & (size < 0.25 / float(info.tiny)) | (size == 0)).all())


@rule("div", accepts=if_lazy(0))
def _divide(ev: Evaluator, e: JaxprEqn) -> Lazy:
    value, other = e.invars
    number = _number(ev, other)
    out = shaped(e.outvars[0])
    held = number if number is not None else None if ev.is_batched(other) else ev.array(other)
    if held is not None and not isinstance(held, jax.core.Tracer) and not _has_inverse(held, wide(out.dtype)):
        raise UnsupportedError("a divisor near the ends of the range")
    if number is not None:  # the inverse of a number in half precision may not fit it
        return _scaled(ev, value, out.shape, 1 / jnp.asarray(number, wide(out.dtype)), ev.is_batched(other))
    if ev.is_batched(other):
        raise UnsupportedError("a quotient that differs between examples")
    inverse = 1 / ev.array(other).astype(of_products(out.dtype))
    # Its size apart, so that the factors are balanced where they are squared.
    size = invertible(jnp.max(jnp.abs(inverse), initial=0))
    term = whole(inverse / size, False)
    term = term.replace(scale=(*term.scale, Factor(size, (), False)))
    return ev.lazy(value).map(lambda t: multiplied(t, term), out.shape)


@rule("select_n", accepts=if_lazy(1, 2))
def _select(ev: Evaluator, e: JaxprEqn) -> Lazy:
    which, *cases = e.invars
    if len(cases) != 2:
        raise UnsupportedError("a choice among many")
    pred, batched = _number(ev, which), ev.is_batched(which)
    if pred is not None:
        chosen = [ev.lazy(v) for v in cases]
        masked = lambda value, mask: value.map(lambda t: t.replace(mask=mask if t.mask is None else t.mask & mask))
        return masked(chosen[0], jnp.logical_not(pred)).plus(masked(chosen[1], jnp.asarray(pred)), True)
    if batched:
        raise UnsupportedError("a choice that differs between examples and entries")
    total = Lazy(shaped(e.outvars[0]).shape, shaped(e.outvars[0]).dtype, ())
    array = ev.array(which)
    for v, keep in zip(cases, (jnp.logical_not(array), array), strict=True):
        part = whole(keep, False)
        total = total.plus(ev.lazy(v).map(functools.partial(multiplied, b=part)), True)
    return total
