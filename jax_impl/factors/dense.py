"""Terms carried out: the cheapest order of their contraction, and the array that they stand for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import opt_einsum

from .terms import Factor, Label, Term, contiguous, expanded, lengths, new_label
from .windows import over_taps

_EXAMPLES = 16  # in the count of operations: what all examples share is done once


def dense(term: Term, dtype: Any) -> jax.Array:
    """Return the term as an array."""
    shape = lengths(term)
    found = over_taps([term], lambda part: dense(part, dtype))
    if found is not None:
        parts, order = found
        looped = parts.ndim - len(order)
        parts = parts.squeeze(tuple(range(looped, 2 * looped)))
        return parts.transpose([order.index(axis) for axis in range(len(order))])
    spread = [x for x in term.out if x in term.places]
    plain = [x for x in term.out if x not in term.places]
    entries = list(dict.fromkeys(k for x in spread for k in term.places[x].labels))
    values = einsum(expanded(term.factors), [*entries, *plain], term.sizes, dtype, term.precision)
    values = scaled(values, term.scale)
    if spread:
        values = _spread(term, values, spread, plain, entries)
    order = [*spread, *plain]
    values = values.transpose([order.index(x) for x in term.out]).reshape(shape)
    return values if term.mask is None else jnp.where(term.mask, values, 0)


def _spread(term: Term, values: Any, spread: list[Label], plain: list[Label], entries: list[Label]) -> jax.Array:
    """Add entries at their places, ``[entries, plain] -> [spread, plain]``."""
    places = [term.places[x] for x in spread]
    if all(
        p.static and contiguous(p.index) and p.labels == (k,) for p, k in zip(places, entries, strict=False)
    ) and len(entries) == len(places):
        padding = [(int(p.index[0]), p.size - int(p.index[-1]) - 1, 0) for p in places]
        return jax.lax.pad(values, jnp.zeros((), values.dtype), [*padding, *[(0, 0, 0)] * len(plain)])
    counts = [term.sizes[k] for k in entries]
    where = []
    for p in places:
        shape = [term.sizes[k] if k in p.labels else 1 for k in entries]
        at = [entries.index(label) for label in p.labels]
        order = sorted(range(len(at)), key=at.__getitem__)
        where.append(jnp.broadcast_to(jnp.transpose(jnp.asarray(p.index), order).reshape(shape), counts))
    target = jnp.zeros((*(p.size for p in places), *(term.sizes[x] for x in plain)), values.dtype)
    return target.at[tuple(where)].add(values, mode="drop")


def einsum(
    factors: Sequence[Factor], out: Sequence[Label], sizes: dict[Label, int], dtype: Any, precision: Any
) -> jax.Array:
    """Return the factors contracted to the labels ``out``, in the cheapest order."""
    numbers: dict[Label, int] = {}
    number = lambda labels: [numbers.setdefault(x, len(numbers)) for x in labels]
    operands: list[Any] = []
    scalars = [f for f in factors if not f.labels]
    factors = [f for f in factors if f.labels]
    for f in factors:
        array = f.array if jnp.issubdtype(f.array.dtype, jnp.inexact) else f.array.astype(dtype)
        operands += [array, number(f.labels)]
    present = [x for x in out if x in numbers]
    result = (
        jnp.einsum(
            *operands,
            number(present),
            optimize=cheapest_path([f.labels for f in factors], [f.batched for f in factors], present, sizes)[0],
            precision=precision,
            preferred_element_type=dtype,
        )
        if operands
        else jnp.ones((), dtype)
    )
    if len(present) < len(out):
        shape = tuple(sizes[x] for x in out)
        result = jax.lax.broadcast_in_dim(result, shape, [i for i, x in enumerate(out) if x in numbers])
    return scaled(result, scalars)


def cheapest_path(
    groups: Sequence[tuple[Label, ...]], batched: Sequence[bool], out: Sequence[Label], sizes: dict[Label, int]
) -> tuple[Any, float]:
    """Return the cheapest order of a contraction, and its multiplications for each example."""
    groups = [tuple(x for x in dict.fromkeys(g) if sizes[x] != 1) for g in groups]
    present = dict.fromkeys(x for g in groups for x in g)
    symbols = {x: opt_einsum.get_symbol(i + 1) for i, x in enumerate(present)}
    example = opt_einsum.get_symbol(0)
    names = ["".join(symbols[x] for x in g) + example * flag for g, flag in zip(groups, batched, strict=True)]
    target = "".join(symbols[x] for x in dict.fromkeys(out) if x in present) + example * any(batched)
    shapes = [tuple(sizes[x] for x in g) + (_EXAMPLES,) * flag for g, flag in zip(groups, batched, strict=True)]
    if len(shapes) < 2:
        return [(0,)] * len(shapes), float(math.prod(sizes[x] for g in groups for x in g))
    # "optimal" misses the cheapest order where a label is shared by more than two factors, as that of the examples is.
    optimize = "branch-all" if len(shapes) < 7 else "greedy"
    path, info = opt_einsum.contract_path(f"{','.join(names)}->{target}", *shapes, shapes=True, optimize=optimize)
    return path, float(info.opt_cost) / (_EXAMPLES if any(batched) else 1)


def scaled(value: Any, scale: Sequence[Factor]) -> jax.Array:
    """Multiply by the numbers of a scale."""
    for f in scale:
        value = value * f.array.astype(value.dtype)
    return value


def entries_of(term: Term) -> list[Label]:
    """Return the labels that tell the entries of the result apart, of those that stand in it at known places."""
    return [k for x in term.out for k in (term.places[x].labels if x in term.places else (x,))]


def is_direct(term: Term) -> bool:
    """Tell whether the squared norm is taken from the array itself."""
    entries = entries_of(term)
    if not all(p.static for p in term.places.values()) or len(set(entries)) < len(entries):
        return False
    groups, flags = [f.labels for f in term.factors], [f.batched for f in term.factors]
    copy = {x: new_label() for x in term.sizes if x not in entries}
    sizes = term.sizes | {copy[x]: n for x, n in term.sizes.items() if x in copy}
    again = [tuple(copy.get(x, x) for x in g) for g in groups]
    # Writing and reading the array costs more than as many multiplications.
    direct = cheapest_path(groups, flags, entries, sizes)[1] + 8 * math.prod(sizes[x] for x in entries)
    return direct <= cheapest_path([*groups, *again], [*flags, *flags], (), sizes)[1]
