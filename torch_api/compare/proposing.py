"""``propose_mapping``: which torch tensors the leaves of a JAX pytree are made of, from names, shapes and values."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np
import torch

from ...jax_impl.program.trees import PyTree
from .differences import double
from .mapping import Parameter, ParameterMapping, Source, State, is_parameter, leaf_paths, named_tensors
from .naming import kind, likeness, words


def propose_mapping(state: State | torch.nn.Module, params: PyTree) -> ParameterMapping:
    """Propose the torch source of each leaf of a JAX pytree, from names, shapes and values.

    Recognises renamed leaves (``kernel``, ``scale``, ``wq``), transposed and convolution kernels, axes split into
    heads, leaves that stack a tensor of each layer, and fused ones on either side. Names are compared word by word.
    Arrays tell by their values which tensor they hold, in which order of the axes, and whether a convolution's window
    is reversed. Where neither shape nor value tells (square weights), leaves of the same kind are taken alike; so is
    the odd one out, which was loaded wrongly. Read what comes back (``print``), and correct entries by assigning to
    them: it is a dict.

    Args:
        state: a module or its state dict.
        params: a pytree of arrays, or of ``jax.ShapeDtypeStruct`` as ``jax.eval_shape`` returns it.

    Returns:
        The mapping, path to :class:`Source`. Leaves for which nothing fits are left out; :func:`compare` names them.

    >>> import jax, torch
    >>> from microtome import torch_api as mt
    >>> params = {"dense": {"kernel": jax.numpy.zeros((2, 3)), "bias": jax.numpy.zeros(3)}}
    >>> print(mt.propose_mapping(torch.nn.ModuleDict({"dense": torch.nn.Linear(2, 3)}), params))
    dense.bias <- dense.bias
    dense.kernel <- dense.weight; axes in the order (1, 0)
    """
    if isinstance(state, torch.nn.Module):
        state = named_tensors(state)
    state = {name: tensor for name, tensor in state.items() if tensor.is_floating_point() or tensor.is_complex()}
    leaves = {path: leaf for path, leaf in leaf_paths(params) if is_parameter(leaf)}
    found = _join(leaves, state)
    used = {name for source in found.values() for name in _names(source)}
    rest = {name: tensor for name, tensor in state.items() if name not in used}
    single = {path: leaf for path, leaf in leaves.items() if path not in found}
    found |= _assign(single, _units(rest, single), state)
    _orient(found, leaves, state)
    return ParameterMapping({path: found[path] for path in leaves if path in found})


_EQUAL = 10.0  # what equal values weigh, more than any name


def _names(source: Source) -> tuple[str, ...]:
    return (source.names,) if isinstance(source.names, str) else source.names


# Candidates


def _reshaped(shape: Sequence[int], wanted: tuple[int, ...]) -> list[dict[str, Any]]:
    """List ways from a torch tensor's shape to a leaf's: as it is, transposed as kernels are, axes split or merged."""
    shape = tuple(shape)
    orders: list[tuple[int, ...] | None] = [None]
    if len(shape) >= 2:
        orders.append((*range(2, len(shape)), 1, 0))  # [out, in, *window] -> [*window, in, out]
    ways: list[dict[str, Any]] = []
    for order in orders:
        permuted = shape if order is None else tuple(shape[i] for i in order)
        if permuted == wanted:
            ways.append({"permute": order})
    # Splitting an axis into heads keeps the order of the numbers, and the length of a leading or a trailing part.
    if not ways and len(shape) >= 1 and len(wanted) != len(shape) and np.prod(shape) == np.prod(wanted):
        for order in reversed(orders):
            permuted = shape if order is None else tuple(shape[i] for i in order)
            if len(shape) == 1 or permuted[0] == wanted[0] or permuted[-1] == wanted[-1]:
                ways.append({"permute": order, "shape": wanted})
                break
    return ways


def _units(state: State, leaves: Mapping[str, Parameter]) -> list[tuple[str, int, int]]:
    """List what a leaf may be made of alone: each tensor, and parts of those that look fused (name, part, parts)."""
    shapes = {tuple(leaf.shape) for leaf in leaves.values()}
    units = []
    for name, tensor in state.items():
        whole = any(_reshaped(tensor.shape, shape) for shape in shapes)
        for parts in (1,) if whole or not tensor.dim() else (3, 2, 4):
            if tensor.dim() and tensor.shape[0] % parts == 0:
                part = (tensor.shape[0] // parts, *tensor.shape[1:])
                if parts == 1 or any(_reshaped(part, shape) for shape in shapes):
                    units += [(name, i, parts) for i in range(parts)]
                    break
        else:  # a value may still tell that its axes are in another order
            units.append((name, 0, 1))
    return units


def _assign(leaves: Mapping[str, Parameter], units: list[tuple[str, int, int]], state: State) -> dict[str, Source]:
    """Return the pairing of leaves and units with the most equal values, and then with the best names in all."""
    from scipy.optimize import linear_sum_assignment  # JAX requires scipy; only this needs it

    if not leaves or not units:
        return {}
    scores = np.full((len(leaves), len(units)), -1e3)
    sources: dict[tuple[int, int], Source] = {}
    named = [words(name) + (["query", "key", "value"][i : i + 1] if n == 3 else []) for name, i, n in units]
    wholes = [_cut(name, i, parts, state) for name, i, parts in units]
    some = any(_given(leaf) is not None for leaf in leaves.values())
    extents = [_extent(_array(whole(state))) if some else None for whole in wholes]
    for row, (path, leaf) in enumerate(leaves.items()):
        wanted, given = tuple(leaf.shape), _given(leaf)
        extent = _extent(given)
        for column, whole in enumerate(wholes):
            shape = _part(whole, state).shape
            ways = _reshaped(shape, wanted)
            source = dataclasses.replace(whole, **ways[0]) if ways else None
            equal = None
            if given is not None and extent is not None and _close(extent, extents[column]):
                other = whole if len(shape) == len(wanted) else dataclasses.replace(whole, shape=wanted)
                equal = next(_equal(source or other, given, leaf.dtype, state), None)
            if (chosen := equal or source) is not None:
                sources[row, column] = chosen
                distance = abs(row / len(leaves) - column / len(units))
                scores[row, column] = likeness(words(path), named[column]) - 0.1 * distance
                scores[row, column] += _EQUAL if equal is not None else 0.0
    pairs = zip(*linear_sum_assignment(scores, maximize=True), strict=True)
    paths = list(leaves)
    return {paths[row]: sources[row, column] for row, column in pairs if (row, column) in sources}


def _cut(name: str, i: int, parts: int, state: State) -> Source:
    """Return a tensor, or one of the parts that it fuses."""
    length = state[name].shape[0] // parts if parts > 1 else 0
    return Source(name, rows=(i * length, (i + 1) * length) if parts > 1 else None)


def _extent(array: np.ndarray | None) -> tuple[float, float] | None:
    """Return the smallest and largest size of the numbers; None where they are one and the same: that tells nothing."""
    if array is None or array.size < 2 or bool((array == array.ravel()[0]).all()):
        return None
    sizes = np.abs(array)
    return float(sizes.min()), float(sizes.max())


def _close(one: tuple[float, float], two: tuple[float, float] | None) -> bool:
    return two is not None and all(
        math.isclose(a, b, rel_tol=1e-2, abs_tol=1e-6) for a, b in zip(one, two, strict=True)
    )


def _join(leaves: Mapping[str, Parameter], state: State) -> dict[str, Source]:
    """Find leaves made of several tensors (one of each layer, stacked; query, key, value, fused), by better names."""
    offers: list[tuple[float, str, Source]] = []
    layers, siblings = _layers(state), _siblings(state)
    for path, leaf in leaves.items():
        shape, named = tuple(leaf.shape), words(path)
        alone = [likeness(named, words(name)) for name, t in state.items() if _reshaped(t.shape, shape)]
        least = max(alone, default=0.0)
        for stem, names in layers.items():
            if shape[:1] == (len(names),):
                for way in _reshaped(state[names[0]].shape, shape[1:])[:1]:
                    way = {**way, "shape": shape} if "shape" in way else way
                    offers.append((likeness(named, words(stem)), path, Source(tuple(names), **way)))
        for stem, names in siblings.items():
            like, fused = likeness(named, words(stem)), _fused(names, state[names[0]].shape, shape)
            offers += [(like, path, source) for source in fused]
        offers = [offer for offer in offers if offer[1] != path or offer[0] > least]
    found: dict[str, Source] = {}
    used: set[str] = set()
    for _, path, source in sorted(offers, key=lambda offer: -offer[0]):
        if path not in found and not used & set(_names(source)):
            found[path] = source
            used |= set(_names(source))
    return found


def _fused(names: Sequence[str], part: torch.Size, shape: tuple[int, ...]) -> Iterator[Source]:
    """Yield how a leaf may consist of tensors of one shape side by side, as they are or transposed."""
    for order in (None, (1, 0)) if len(part) == 2 else (None,):
        sizes = tuple(part) if order is None else tuple(part[::-1])
        for axis, size in enumerate(sizes):
            if (*sizes[:axis], size * len(names), *sizes[axis + 1 :]) == shape:
                yield Source(tuple(names), None, order, axis)


def _layers(state: State) -> dict[str, list[str]]:
    """Return names that differ in one number, such as ``layers.*.weight``, in the order of the number."""
    groups: dict[str, dict[int, str]] = {}
    for name in state:
        parts = name.split(".")
        for i, part in enumerate(parts):
            if part.isdigit():
                groups.setdefault(".".join([*parts[:i], "*", *parts[i + 1 :]]), {})[int(part)] = name
    return {
        stem: [group[i] for i in sorted(group)]
        for stem, group in groups.items()
        if len({state[name].shape for name in group.values()}) == 1
    }


def _siblings(state: State) -> dict[str, list[str]]:
    """Return query, key and value of the same module, in this order."""
    groups: dict[str, dict[str, str]] = {}
    for name in state:
        kinds = [w for w in words(name) if w in ("query", "key", "value")]
        if len(kinds) == 1:
            stem = " ".join(w for w in words(name) if w != kinds[0])
            groups.setdefault(stem, {})[kinds[0]] = name
    return {s: [g["query"], g["key"], g["value"]] for s, g in groups.items() if len(g) == 3}


# Values


def _given(leaf: Parameter) -> np.ndarray | None:
    """Return the numbers of a leaf; None for a shape alone."""
    return None if isinstance(leaf, jax.ShapeDtypeStruct) else double(np.asarray(leaf))


def _array(tensor: torch.Tensor) -> np.ndarray | None:
    """Return the numbers of a tensor; None for a shape alone."""
    if tensor.is_meta:
        return None
    return tensor.detach().to(torch.complex128 if tensor.is_complex() else torch.float64).cpu().numpy()


def _equal(source: Source, given: np.ndarray, dtype: np.dtype, state: State) -> Iterator[Source]:
    """Find sources like this one that make the numbers of a leaf: other orders of axes and names, windows reversed."""
    part = _part(source, state)
    if part.is_meta:
        return
    slack = max(1e-5, 4 * float(ml_dtypes.finfo(dtype).eps), 4 * torch.finfo(part.dtype).eps)
    least = max(float(ml_dtypes.finfo(dtype).smallest_normal), torch.finfo(part.dtype).smallest_normal)
    joined = not isinstance(source.names, str) and source.concat is not None
    names = itertools.permutations(source.names) if joined and len(source.names) <= 4 else [source.names]
    flips = [None] if part.dim() < 3 else [None, tuple(range(2, part.dim()))]
    orders = itertools.permutations(range(part.dim())) if part.dim() <= 6 else []
    unique = dict.fromkeys((source.permute, None, *orders))
    for each, flip, order in itertools.product(names, flips, [o for o in unique if o != tuple(range(part.dim()))]):
        other = dataclasses.replace(source, names=each, flip=flip, permute=order)
        if not _fits(dataclasses.replace(other, flip=None), given.shape, state):
            continue
        made = _array(other(state))
        if made is not None and np.allclose(made, given, rtol=slack, atol=least, equal_nan=True):
            yield other


def _part(source: Source, state: State) -> torch.Tensor:
    """Return the tensor that the source permutes."""
    part = state[_names(source)[0]]
    return part if source.rows is None else part[slice(*source.rows)]


def _fits(source: Source, shape: Sequence[int], state: State) -> bool:
    try:
        return tuple(source({name: state[name].to("meta") for name in _names(source)}).shape) == tuple(shape)
    except RuntimeError:
        return False


# Where the shape leaves the order of the axes open


Way = tuple[tuple[int, ...], tuple[int, ...]]  # the order of the axes, and those that are reversed


def _orient(found: dict[str, Source], leaves: Mapping[str, Parameter], state: State) -> None:
    """Choose the order of the axes by value, as leaves of the same kind have it by value or shape, else by custom."""
    votes: dict[str, Counter[Way]] = {}
    telling: dict[str, tuple[list[Source], bool]] = {}
    for path, source in found.items():
        dim, given = _part(source, state).dim(), _given(leaves[path])
        if dim < 2:
            continue
        equal = [] if given is None else list(_equal(source, given, leaves[path].dtype, state))
        orders = (None, (*range(2, dim), 1, 0)) if source.flip is None else (source.permute,)
        alike = [dataclasses.replace(source, permute=order) for order in orders]
        fitting = [other for other in alike if _fits(other, leaves[path].shape, state)]
        telling[path] = equal or fitting, bool(equal)
        if len(telling[path][0]) == 1:
            votes.setdefault(kind(path), Counter())[_way(telling[path][0][0], dim)] += 1
    everywhere = Counter[Way]()
    for name, counted in votes.items():
        if not {"embed", "position"} & set(name.split()):  # tables are no kernels
            everywhere += counted
    for path, (choices, sure) in telling.items():
        dim, ballot = _part(found[path], state).dim(), votes.get(kind(path), Counter())
        most = _most(ballot)
        if most is None and (ballot or not sure):  # no other of its kind tells, or they contradict each other
            most = _most(Counter({way: n for way, n in everywhere.items() if len(way[0]) == dim}))
        found[path] = _choice(path, found[path], choices, sure, most, tuple(leaves[path].shape), state)


def _choice(
    path: str, source: Source, choices: list[Source], sure: bool, most: Way | None, shape: tuple[int, ...], state: State
) -> Source:
    """Return the source of one leaf: the way of most others where that fits, else its own."""
    dim = _part(source, state).dim()
    if most is not None:
        like = [choice for choice in choices if _way(choice, dim) == most]
        order = None if most[0] == tuple(range(dim)) else most[0]
        other = dataclasses.replace(source, permute=order, flip=most[1] or None)
        if like or _fits(dataclasses.replace(other, flip=None), shape, state):
            return like[0] if like else other
    if len(choices) > 1 and (sure or dim == 2):
        order = None if path.split(".")[-1] == "weight" else (*range(2, dim), 1, 0)
        usual = dataclasses.replace(source, permute=order)
        return usual if usual in choices else choices[0]
    return source if source in choices or not choices else choices[0]


def _way(source: Source, dim: int) -> Way:
    return source.permute or tuple(range(dim)), source.flip or ()


def _most(votes: Counter[Way]) -> Way | None:
    """Return what more voted for than for anything else."""
    first = votes.most_common(2)
    return first[0][0] if first and (len(first) == 1 or first[0][1] > first[1][1]) else None
