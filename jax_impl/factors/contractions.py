"""How products pass uncomputed through sums and matrix products: what they are contracted with."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from ..program.dataflow import within
from ..program.evaluate import Atom, shaped
from ..program.sums import is_narrow, wide
from .arithmetic import absorbed, of_products
from .lazy import Lazy, Squares
from .norms import balanced, inner, squared_norm
from .registry import Evaluator, Known, if_lazy, rule
from .squares import is_square, squares
from .terms import Factor, Label, Term, UnsupportedError, Windows, matched, read_at, working


def _of_sum(e: JaxprEqn, i: int, known: Known) -> str:
    v = e.invars[0]
    if within(v, known.makers) and is_square(known.makers[v]) and len(e.params["axes"]) == len(shaped(v).shape):
        return "squares"
    return if_lazy()(e, i, known)


@rule("reduce_sum", accepts=_of_sum)
def _reduce_sum(ev: Evaluator, e: JaxprEqn) -> Any:
    v, axes = e.invars[0], e.params["axes"]
    out = shaped(e.outvars[0])
    value = ev.read(v)
    if isinstance(value, Squares):
        if len(axes) != len(shaped(v).shape):
            raise UnsupportedError("squares summed over some axes only")
        return squared_norm(value.of.terms, out.dtype).astype(out.dtype)

    def summed(t: Term) -> Term:
        gone = [x for d in axes for x in t.axes[d]]
        kept = [x for d, axis in enumerate(t.axes) if d not in axes for x in axis]
        if set(gone) & set(kept):
            raise UnsupportedError("a diagonal")
        places = dict(t.places)
        popped = [places.pop(x) for x in gone if x in places]
        t = absorbed(t, [p.inside for p in popped if not p.static])
        entries = [k for p in popped for k in p.labels]
        held = {x for f in t.factors for x in f.labels} | {k for p in places.values() for k in p.labels}
        free = math.prod(t.sizes[x] for x in {*gone, *entries} - held - t.places.keys())
        scale = t.scale if free == 1 else (*t.scale, Factor(jnp.asarray(float(free), wide(out.dtype)), (), False))
        return t.replace(axes=tuple(axis for d, axis in enumerate(t.axes) if d not in axes), places=places, scale=scale)

    return ev.lazy(v).map(summed, out.shape)


def _of_dot(e: JaxprEqn, i: int, known: Known) -> str:
    other = e.invars[1 - i]
    shared = known.is_shared(other)
    if not shaped(e.outvars[0]).shape and not shared:
        return "lazy"
    return "lazy" if shared and known.is_lazy(e.outvars[0]) else ""


@rule("dot_general", accepts=_of_dot)
def _dot(ev: Evaluator, e: JaxprEqn) -> Any:
    left, right = e.invars
    contract_l, contract_r = e.params["dimension_numbers"][0]
    held = [isinstance(ev.read(v), Lazy) for v in e.invars]
    a, b = _unmoved(ev, left), _unmoved(ev, right)
    out = shaped(e.outvars[0])
    if not out.shape and all(held) and contract_l == contract_r and _is_same(ev, left, right):
        return squared_norm(squares(ev, left).of.terms, out.dtype).astype(out.dtype)
    if not out.shape and all(held):
        order = sorted(range(len(contract_l)), key=lambda i: contract_l[i])
        return _inner_product(a, b, [contract_r[i] for i in order], out.dtype)
    if any(held) and ev.is_batched(right if held[0] else left):
        raise UnsupportedError("a product with what differs between examples")
    if len(a.terms) * len(b.terms) > 4:
        raise UnsupportedError("a product of sums")
    terms = []
    for s in a.terms:
        for t in b.terms:
            product, extra = _joined(s, t, e.params["dimension_numbers"], _of_sums(e.params.get("precision")))
            # With a weight shared by all examples: into the factor that has its summed axis, for one factor less.
            if any(held):
                terms.append(_contracted(product, extra, out.dtype))
            else:
                terms.append(product.replace(factors=(*product.factors, *extra)))
    return Lazy(out.shape, out.dtype, tuple(terms))


def _inner_product(a: Lazy, b: Lazy, order: Sequence[int], dtype: Any) -> Any:
    """Contract two lazy values along all axes, those of the second in this order."""
    a = a.map(balanced)
    turned = b.map(lambda t: balanced(t.replace(axes=tuple(t.axes[i] for i in order))))
    products = [inner(s, t, working([s, t], dtype)) for s in a.terms for t in turned.terms]
    masks = [[m for m in (s.mask, t.mask) if m is not None] for s in a.terms for t in turned.terms]
    total = jnp.zeros((), wide(dtype))
    for value, mask in zip(products, masks, strict=True):
        if value is not None:
            for m in mask:
                value = jnp.where(m, value, 0)
            total = total + value
    return total.astype(dtype)


def _joined(s: Term, t: Term, dimension_numbers: Any, precision: Any) -> tuple[Term, list[Factor]]:
    """Make one term of two with the labels of a matrix product; the factors of the second come apart."""
    (contract_l, contract_r), (batch_l, batch_r) = dimension_numbers
    t = t.fresh()
    pairs = [*zip(contract_l, contract_r, strict=True), *zip(batch_l, batch_r, strict=True)]
    s, t = matched(s, t, pairs)
    factors_s, factors_t = list(s.factors), list(t.factors)
    places = {**s.places, **t.places}
    table: dict[Label, Label] = {}
    # An axis of length 1 may have a label in one and none in the other.
    both = [(i, x, y) for i, j in pairs if s.axes[i] and t.axes[j] for x, y in zip(s.axes[i], t.axes[j], strict=True)]
    for i, x, y in both:
        if x not in s.places and y not in t.places:
            table[y] = x
            continue
        if i in batch_l or (x in s.places and y in t.places):
            raise UnsupportedError("an indexed axis in a product")
        if x in s.places:
            factors_t = read_at(factors_t, y, s.places[x])
        else:
            factors_s = read_at(factors_s, x, t.places[y])
        places.pop(x if x in s.places else y)
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


def _unmoved(ev: Evaluator, v: Atom) -> Lazy:
    """Return an operand from before its axes were moved for this product alone: the copy is then not made."""
    if not within(v, ev.makers) or not ev.is_batched(v) or len(ev.uses[v]) > 1:
        return ev.lazy(v)
    e = ev.makers[v]
    if e.primitive.name != "transpose":
        return ev.lazy(v)
    order, before = e.params["permutation"], _unmoved(ev, e.invars[0])
    return before.map(lambda t: t.replace(axes=tuple(t.axes[i] for i in order)), shaped(v).shape)


def _is_same(ev: Evaluator, a: Atom, b: Atom) -> bool:
    """Tell whether two variables are one array, moved and cast in the same way."""
    moves = ("reshape", "squeeze", "transpose", "convert_element_type", "copy")
    while a is not b:
        if not within(a, ev.makers) or not within(b, ev.makers):
            return False
        e, f = ev.makers[a], ev.makers[b]
        if e.primitive is not f.primitive or e.primitive.name not in moves or str(e.params) != str(f.params):
            return False
        a, b = e.invars[0], f.invars[0]
    return True


def _of_sums(precision: Any) -> Any:
    """Return a product's precision for a sum over examples: not one that weights, or a sum of many, might not fit."""
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
                    preferred_element_type=of_products(g.array.dtype, f.array.dtype, dtype),
                )
                factors[sharing[0]] = Factor(array, tuple(labels), g.batched or f.batched)
                continue
        factors.append(f)
    return term.replace(factors=tuple(factors))
