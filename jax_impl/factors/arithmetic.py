"""How products pass uncomputed through operations that add, scale and sum them."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from ..program.convolutions import bind_fast
from ..program.sums import is_narrow, wide
from .centring import centred
from .lazy import Lazy, Squares, lazy
from .moves import placed, repeated
from .norms import balanced, inner, squared_norm
from .terms import (
    Factor,
    Label,
    Places,
    Term,
    UnsupportedError,
    Windows,
    is_half,
    matched,
    narrowed,
    new_label,
    read_at,
    taken,
    whole,
    working,
)

# Arithmetic


def _negative(ev: Any, e: Any) -> Lazy:
    return lazy(ev, e.invars[0]).times(-1.0, False)


def _add(ev: Any, e: Any) -> Lazy:
    left, right = (lazy(ev, v) for v in e.invars)
    if e.primitive.name == "sub":
        right = right.times(-1.0, False)
    if left.shape != right.shape:
        raise UnsupportedError("a number that is added")
    return left.plus(right, True)


def _number(ev: Any, v: Any) -> Any:
    """The number that a variable repeats, or None."""
    if isinstance(v, Literal) or not v.aval.shape:
        value = ev.array(v)
        return value if not jnp.shape(value) else None
    return ev.scalars.get(v)


def _multiply(ev: Any, e: Any) -> Any:
    left, right = e.invars
    if ev.kinds.get(e.outvars[0]) == "squares":
        return _squares(ev, left)
    shape, dtype = e.outvars[0].aval.shape, e.outvars[0].aval.dtype
    for value, other in ((left, right), (right, left)):
        number = _number(ev, other)
        if number is not None and not isinstance(value, Literal):
            return _scaled(ev, value, shape, number, ev.is_batched(other))
    a, b = lazy(ev, left), lazy(ev, right)
    if len(a.terms) * len(b.terms) > 4:
        raise UnsupportedError("a product of sums")
    return Lazy(shape, dtype, tuple(_product(s, t) for s in a.terms for t in b.terms))


def _scaled(ev: Any, v: Any, shape: Sequence[int], number: Any, batched: bool) -> Lazy:
    """A variable times a number, of this shape: the operands of a product are repeated along axes of length 1."""
    value = lazy(ev, v)
    return repeated(value, shape, range(len(shape) - len(value.shape), len(shape))).times(number, batched)


def _product(a: Term, b: Term) -> Term:
    """The product entry by entry."""
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
    return _absorbed(a.replace(axes=tuple(axes), sizes=sizes, scale=(*a.scale, *b.scale), mask=mask), factors)


def _of_products(*dtypes: Any) -> Any:
    """The dtype for products that the program itself never forms: those of float16 and smaller may not fit it."""
    roomy = [wide(dtype) if is_narrow(dtype) else dtype for dtype in dtypes]
    return functools.reduce(jnp.promote_types, roomy)


def _absorbed(term: Term, extra: Sequence[Factor]) -> Term:
    """The term with more factors, each multiplied into one that has its labels, if there is one."""
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
                dtype = _of_products(g.array.dtype, f.array.dtype)
                array = g.array.astype(dtype) * aligned.astype(dtype)
            factors[i] = dataclasses.replace(g, array=array, batched=g.batched or f.batched)
        elif mask:
            factors = [*(_masked(g, f) for g in factors), f]
        else:
            factors.append(f)
    return term.replace(factors=tuple(factors))


def _masked(g: Factor, mask: Factor) -> Factor:
    """The factor without what the mask leaves nothing of, which may be NaN."""
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


def _divide(ev: Any, e: Any) -> Lazy:
    value, other = e.invars
    number = _number(ev, other)
    out = e.outvars[0].aval
    held = number if number is not None else None if ev.is_batched(other) else ev.array(other)
    if held is not None and not isinstance(held, jax.core.Tracer) and not _has_inverse(held, wide(out.dtype)):
        raise UnsupportedError("a divisor near the ends of the range")
    if number is not None:  # the inverse of a number in half precision may not fit it
        return _scaled(ev, value, out.shape, 1 / jnp.asarray(number, wide(out.dtype)), ev.is_batched(other))
    if ev.is_batched(other):
        raise UnsupportedError("a quotient that differs between examples")
    inverse = 1 / ev.array(other).astype(_of_products(out.dtype))
    # Its size apart, so that the factors are balanced where they are squared.
    size = jnp.max(jnp.abs(inverse), initial=0)
    size = jnp.where((size > 0) & jnp.isfinite(size), size, 1)
    term = whole(inverse / size, False)
    term = term.replace(scale=(*term.scale, Factor(size, (), False)))
    return lazy(ev, value).map(lambda t: _product(t, term), out.shape)


def _select(ev: Any, e: Any) -> Lazy:
    which, *cases = e.invars
    if len(cases) != 2:
        raise UnsupportedError("a choice among many")
    pred, batched = _number(ev, which), ev.is_batched(which)
    if pred is not None:
        chosen = [lazy(ev, v) for v in cases]
        masked = lambda value, mask: value.map(lambda t: t.replace(mask=mask if t.mask is None else t.mask & mask))
        return masked(chosen[0], jnp.logical_not(pred)).plus(masked(chosen[1], jnp.asarray(pred)), True)
    if batched:
        raise UnsupportedError("a choice that differs between examples and entries")
    total = Lazy(e.outvars[0].aval.shape, e.outvars[0].aval.dtype, ())
    array = ev.array(which)
    for v, keep in zip(cases, (jnp.logical_not(array), array), strict=True):
        part = whole(keep, False)
        total = total.plus(lazy(ev, v).map(functools.partial(_product, b=part)), True)
    return total


# Sums


def _reduce_sum(ev: Any, e: Any) -> Any:
    v, axes = e.invars[0], e.params["axes"]
    out = e.outvars[0].aval
    value = ev.read(v)
    if isinstance(value, Squares):
        if len(axes) != len(v.aval.shape):
            raise UnsupportedError("squares summed over some axes only")
        return squared_norm(value.of.terms, out.dtype).astype(out.dtype)

    def summed(t: Term) -> Term:
        gone = [x for d in axes for x in t.axes[d]]
        kept = [x for d, axis in enumerate(t.axes) if d not in axes for x in axis]
        if set(gone) & set(kept):
            raise UnsupportedError("a diagonal")
        places = dict(t.places)
        popped = [places.pop(x) for x in gone if x in places]
        t = _absorbed(t, [p.inside for p in popped if not p.static])
        entries = [k for p in popped for k in p.labels]
        held = {x for f in t.factors for x in f.labels} | {k for p in places.values() for k in p.labels}
        free = math.prod(t.sizes[x] for x in {*gone, *entries} - held - t.places.keys())
        scale = t.scale if free == 1 else (*t.scale, Factor(jnp.asarray(float(free), wide(out.dtype)), (), False))
        return t.replace(axes=tuple(axis for d, axis in enumerate(t.axes) if d not in axes), places=places, scale=scale)

    return lazy(ev, v).map(summed, out.shape)


def _squares(ev: Any, v: Any) -> Squares:
    value = lazy(ev, v)
    terms = centred(value.terms, working(value.terms, value.dtype))
    if any(t.centred for t in terms):
        if not any(map(is_half, value.terms)):  # else the wider factors are for the norm alone
            ev.replace(value.terms, terms)
        value = dataclasses.replace(value, terms=terms)
    return Squares(value)


def _square(ev: Any, e: Any) -> Squares:
    if ev.kinds.get(e.outvars[0]) != "squares":
        raise UnsupportedError("squares that are not summed")
    return _squares(ev, e.invars[0])


def _unmoved(ev: Any, v: Any) -> Lazy:
    """An operand from before its axes were moved for this product alone: the copy is then not made."""
    makes = None if isinstance(v, Literal) else ev.makers.get(v)
    if makes is None or makes.primitive.name != "transpose" or not ev.is_batched(v) or len(ev.uses[v]) > 1:
        return lazy(ev, v)
    order = makes.params["permutation"]
    before = _unmoved(ev, makes.invars[0])
    return before.map(lambda t: t.replace(axes=tuple(t.axes[i] for i in order)), v.aval.shape)


def _is_same(ev: Any, a: Any, b: Any) -> bool:
    """Whether two variables are one array, moved and cast in the same way."""
    moves = ("reshape", "squeeze", "transpose", "convert_element_type", "copy")
    while a is not b:
        if any(isinstance(v, Literal) or v not in ev.makers for v in (a, b)):
            return False
        e, f = ev.makers[a], ev.makers[b]
        if e.primitive is not f.primitive or e.primitive.name not in moves or str(e.params) != str(f.params):
            return False
        a, b = e.invars[0], f.invars[0]
    return True


def _dot(ev: Any, e: Any) -> Any:
    left, right = e.invars
    (contract_l, contract_r), (batch_l, batch_r) = e.params["dimension_numbers"]
    held = [isinstance(ev.read(v), Lazy) for v in e.invars]
    a, b = _unmoved(ev, left), _unmoved(ev, right)
    out = e.outvars[0].aval
    if not out.shape and all(held) and contract_l == contract_r and _is_same(ev, left, right):
        return squared_norm(_squares(ev, left).of.terms, out.dtype).astype(out.dtype)
    if not out.shape and all(held):
        order = sorted(range(len(contract_l)), key=lambda i: contract_l[i])
        a = a.map(balanced)
        turned = b.map(lambda t: balanced(t.replace(axes=tuple(t.axes[contract_r[i]] for i in order))))
        products = [inner(s, t, working([s, t], out.dtype)) for s in a.terms for t in turned.terms]
        masks = [[m for m in (s.mask, t.mask) if m is not None] for s in a.terms for t in turned.terms]
        total = jnp.zeros((), wide(out.dtype))
        for value, mask in zip(products, masks, strict=True):
            if value is not None:
                for m in mask:
                    value = jnp.where(m, value, 0)
                total = total + value
        return total.astype(out.dtype)
    if any(held) and ev.is_batched(right if held[0] else left):
        raise UnsupportedError("a product with what differs between examples")
    precision, dtype = _of_sums(e.params.get("precision")), out.dtype

    def join(s: Term, t: Term) -> tuple[Term, list[Factor]]:
        t = t.fresh()
        pairs = [*zip(contract_l, contract_r, strict=True), *zip(batch_l, batch_r, strict=True)]
        s, t = matched(s, t, pairs)
        factors_s, factors_t = list(s.factors), list(t.factors)
        places = {**s.places, **t.places}
        table: dict[Label, Label] = {}
        for i, j in pairs:
            if not s.axes[i] or not t.axes[j]:
                continue  # of length 1
            for x, y in zip(s.axes[i], t.axes[j], strict=True):
                if x in s.places or y in t.places:
                    if i in batch_l or (x in s.places and y in t.places):
                        raise UnsupportedError("an indexed axis in a product")
                    if x in s.places:
                        factors_t = read_at(factors_t, y, s.places[x])
                    else:
                        factors_s = read_at(factors_s, x, t.places[y])
                    places.pop(x if x in s.places else y)
                else:
                    table[y] = x
        factors_t = [dataclasses.replace(f, labels=tuple(table.get(x, x) for x in f.labels)) for f in factors_t]
        axes = [s.axes[i] for i in batch_l]
        axes += [axis for i, axis in enumerate(s.axes) if i not in contract_l and i not in batch_l]
        axes += [axis for j, axis in enumerate(t.axes) if j not in contract_r and j not in batch_r]
        mask = s.mask if t.mask is None else t.mask if s.mask is None else s.mask & t.mask
        return Term(
            tuple(factors_s),
            tuple(axes),
            s.sizes | {table.get(x, x): n for x, n in t.sizes.items()},
            places,
            (*s.scale, *t.scale),
            mask,
            precision if precision is not None else s.precision,
        ), factors_t

    if len(a.terms) * len(b.terms) > 4:
        raise UnsupportedError("a product of sums")
    terms = []
    for s in a.terms:
        for t in b.terms:
            product, extra = join(s, t)
            # With a weight shared by all examples: into the factor that has its summed axis, for one factor less.
            terms.append(
                _contracted(product, extra, dtype) if any(held) else product.replace(factors=(*product.factors, *extra))
            )
    return Lazy(out.shape, out.dtype, tuple(terms))


def _of_sums(precision: Any) -> Any:
    """A product's precision for a sum over examples: not one that weights, or a sum of many, might not fit."""
    default = jax.lax.Precision.DEFAULT
    if isinstance(precision, jax.lax.DotAlgorithmPreset):
        left, _, total = f"{precision.name}_f32_f32".split("_")[:3]  # "DEFAULT" has no more parts
        return default if "F8" in precision.name or left == "F16" or total in ("F16", "BF16") else precision
    if isinstance(precision, jax.lax.DotAlgorithm):
        types = (precision.lhs_precision_type, precision.rhs_precision_type)
        sums = precision.accumulation_type
        return default if any(map(is_narrow, types)) or wide(sums) != sums else precision
    return precision


def _contracted(term: Term, extra: Sequence[Factor], dtype: Any) -> Term:
    """Join each further factor with the one factor that shares its summed labels, where that makes it no larger."""
    factors = list(term.factors)
    for f in extra:
        gone = set(f.labels) - set(term.out) - {k for p in term.places.values() for k in p.labels}
        gone = {x for x in gone if term.sizes[x] != 1}
        sharing = [i for i, g in enumerate(factors) if gone & set(g.labels)]
        if len(sharing) == 1 and gone and not isinstance(factors[sharing[0]], Windows):
            g = factors[sharing[0]]
            only = {x for x in gone if x in g.labels}
            labels = [x for x in dict.fromkeys((*g.labels, *f.labels)) if x not in only]
            if math.prod(term.sizes[x] for x in labels) <= 4 * g.stored:
                numbers = {x: i for i, x in enumerate(dict.fromkeys((*g.labels, *f.labels)))}
                number = lambda given, numbers=numbers: [numbers[x] for x in given]
                array = jnp.einsum(
                    *(g.array, number(g.labels), f.array, number(f.labels), number(labels)),
                    precision=term.precision,
                    preferred_element_type=_of_products(g.array.dtype, f.array.dtype, dtype),
                )
                factors[sharing[0]] = Factor(array, tuple(labels), g.batched or f.batched)
                continue
        factors.append(f)
    return term.replace(factors=tuple(factors))


def _index(ev: Any, v: Any) -> Any:
    """Indices, in a type that the lengths of all axes fit."""
    array = ev.array(v)
    return array.astype(jnp.int32) if array.dtype.itemsize < 4 else array


def _scatter_add(ev: Any, e: Any) -> Lazy:
    target, indices, updates = e.invars
    numbers = e.params["dimension_numbers"]
    if numbers.operand_batching_dims:
        raise UnsupportedError("a scatter with batch axes")
    value, where = lazy(ev, updates), _index(ev, indices)
    given, shape = updates.aval.shape, target.aval.shape
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

    return lazy(ev, target).plus(value.map(put, shape), True)


def _without(t: Term, entries: Sequence[Label], alive: Any, batched: bool, placed: Collection[Label]) -> Term:
    """The term whose entries out of range, dropped also where it was promised that there are none, are zero.

    They may hold NaN, which is what is read out of range. If no array has them, that they stand nowhere is enough.
    """
    fits = any(set(entries) <= set(f.labels) and not isinstance(f, Windows) for f in t.factors)
    return _absorbed(t, [Factor(alive, tuple(entries), batched)]) if fits or not placed else t


def one_place(e: Any) -> bool:
    """Whether a scatter writes one window, so that no two updates meet."""
    return math.prod(e.invars[1].aval.shape[:-1]) == 1


def _scatter(ev: Any, e: Any) -> Lazy:
    """Entries set to zero, as the gradient of what was overwritten: a product with a mask. Or a window in zeros."""
    target, indices, updates = e.invars
    if ev.is_zero(target) and (one_place(e) or e.params["unique_indices"]):
        return _scatter_add(ev, e)
    if not ev.is_zero(updates) or ev.is_batched(indices):
        raise UnsupportedError("entries that are overwritten")
    ones = jnp.ones(target.aval.shape, target.aval.dtype)
    mask = whole(bind_fast(e, [ones, ev.array(indices), ev.array(updates)])[0] != 0, False)
    return lazy(ev, target).map(lambda t: _product(t, mask))


def _update_slice(ev: Any, e: Any) -> Lazy:
    target, update, *starts = e.invars
    if not ev.is_zero(target):
        raise UnsupportedError("an update of what is not zero")
    shape = target.aval.shape
    value = lazy(ev, update)
    if not value.terms:
        return Lazy(shape, value.dtype, ())
    if not isinstance(ev.read(update), Lazy) and not ev.is_batched(update):
        raise UnsupportedError("an update that all examples share")

    def put(t: Term) -> Term:
        for d, (n, width, start) in enumerate(zip(shape, update.aval.shape, starts, strict=True)):
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


# By the name of the primitive.
PRODUCTS: dict[str, Callable[[Any, Any], Any]] = {
    "neg": _negative,
    "add": _add,
    "add_any": _add,
    "sub": _add,
    "mul": _multiply,
    "div": _divide,
    "select_n": _select,
    "reduce_sum": _reduce_sum,
    "square": _square,
    "dot_general": _dot,
    "scatter": _scatter,
    "scatter-add": _scatter_add,
    "scatter_add": _scatter_add,
    "dynamic_update_slice": _update_slice,
}
