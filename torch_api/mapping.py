"""Which torch tensors a JAX pytree of parameters is made of: transposed, renamed, stacked, split or fused."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import torch

State = Mapping[str, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Source:
    """One JAX leaf in terms of torch tensors: ``Source(...)(state_dict)`` is the tensor that the leaf holds.

    The steps are taken in this order: rows, permutation, joining, shape. Any torch callable from a state dict to a
    tensor may stand in a mapping instead.

    Args:
        names: the torch tensor's name; several for a leaf that stacks or concatenates them.
        rows: ``(start, stop)`` of axis 0, where torch fuses what JAX keeps apart (``in_proj_weight``).
        permute: the order of the axes, ``(1, 0)`` for a transposed weight, ``(2, 3, 1, 0)`` for a convolution's.
        concat: the axis to concatenate several tensors along; None stacks them along a new axis 0.
        shape: the leaf's shape, where JAX splits an axis into heads.

    >>> import torch
    >>> from microtome.torch_api import Source
    >>> Source("linear.weight", permute=(1, 0))({"linear.weight": torch.zeros(3, 2)}).shape
    torch.Size([2, 3])
    """

    names: str | tuple[str, ...]
    rows: tuple[int, int] | None = None
    permute: tuple[int, ...] | None = None
    concat: int | None = None
    shape: tuple[int, ...] | None = None

    def __call__(self, state: State) -> torch.Tensor:
        """The tensor for the leaf."""
        names = (self.names,) if isinstance(self.names, str) else self.names
        parts = []
        for name in names:
            part = state[name]
            if self.rows is not None:
                part = part[slice(*self.rows)]
            parts.append(part if self.permute is None else part.permute(self.permute))
        if isinstance(self.names, str):
            made = parts[0]
        else:
            made = torch.stack(parts) if self.concat is None else torch.cat(parts, self.concat)
        return made if self.shape is None else made.reshape(self.shape)

    def __str__(self) -> str:
        """The steps in words."""
        names = self.names if isinstance(self.names, str) else ", ".join(self.names)
        words = [names]
        if self.rows is not None:
            words.append(f"rows {self.rows[0]} to {self.rows[1]}")
        if self.permute is not None:
            words.append(f"axes in the order {self.permute}")
        if not isinstance(self.names, str):
            words.append("stacked" if self.concat is None else f"concatenated along axis {self.concat}")
        if self.shape is not None:
            words.append(f"shape {self.shape}")
        return "; ".join(words)


Entry = str | Source | Callable[[State], torch.Tensor]


class ParameterMapping(dict[str, Entry]):
    """The torch source of each JAX leaf by the leaf's path, ``"blocks.0.attention.kernel"``; print it to read it."""

    def __str__(self) -> str:
        return "\n".join(f"{path} <- {source}" for path, source in self.items())


class Unmapped(Exception):
    """Parameters and state dict do not match; ``side`` is what can be compared all the same."""

    def __init__(self, problems: list[str], side: Any) -> None:
        super().__init__(problems)
        self.problems, self.side = problems, side


def leaf_paths(tree: Any) -> list[tuple[str, Any]]:
    """The leaves of a pytree with their dotted paths."""
    return [(".".join(map(_key, path)), leaf) for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]]


def _key(entry: Any) -> str:
    for name in ("key", "idx", "name"):
        if hasattr(entry, name):
            return str(getattr(entry, name))
    return str(entry)


def apply(mapping: Mapping[str, Entry], state: State) -> dict[str, torch.Tensor]:
    """The tensor of each leaf by its path; differentiable.

    Raises:
        KeyError: the state dict lacks a name that the mapping uses.
    """
    return {path: state[entry] if isinstance(entry, str) else entry(state) for path, entry in mapping.items()}


def problems(mapping: Mapping[str, Entry], state: State, params: Any) -> list[str]:
    """What is wrong with a mapping for these parameters: names and leaves that are not there, shapes that differ."""
    leaves = {path: leaf for path, leaf in leaf_paths(params) if is_parameter(leaf)}
    found = [f"the mapping names {path!r}, which the JAX parameters lack" for path in mapping if path not in leaves]
    found += [f"the mapping has no source for the JAX leaf {path!r}" for path in leaves if path not in mapping]
    for path, entry in mapping.items():
        if path not in leaves:
            continue
        try:
            made = tuple(apply({path: entry}, state)[path].shape)
        except KeyError as error:
            found.append(f"the mapping takes {path!r} from {error}, which the state dict lacks")
            continue
        except Exception as error:  # a callable of the user's, or a permutation that does not fit
            found.append(f"the source of {path!r} fails: {type(error).__name__}: {error}")
            continue
        if made != tuple(leaves[path].shape):
            found.append(f"{path!r} is {list(leaves[path].shape)} in JAX, and {list(made)} by its source ({entry})")
    return found


def is_parameter(leaf: Any) -> bool:
    """Whether a leaf of a JAX tree is data of floats: an array, or the shape of one."""
    return hasattr(leaf, "dtype") and hasattr(leaf, "shape") and jax.numpy.issubdtype(leaf.dtype, np.inexact)


def propose_mapping(state: State | torch.nn.Module, params: Any) -> ParameterMapping:
    """Propose the torch source of each leaf of a JAX pytree, from shapes and names.

    Recognises renamed leaves (``kernel``, ``scale``, ``wq``), transposed and convolution kernels, axes split into
    heads, leaves that stack a tensor of each layer, and fused ones on either side. Names are compared word by word.
    Where the shape does not tell (square weights), leaves of the same kind are taken alike, by those whose shape or
    value tells. Read what comes back (``print``), and correct entries by assigning to them: it is a dict.

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


def named_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name, tied ones under each of their names, buffers that are not saved included."""
    return dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))


def _names(source: Source) -> tuple[str, ...]:
    return (source.names,) if isinstance(source.names, str) else source.names


# Candidates


def _reshaped(shape: Sequence[int], wanted: tuple[int, ...]) -> list[dict[str, Any]]:
    """The ways from a torch tensor's shape to a leaf's: as it is, transposed as kernels are, axes split or merged."""
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


def _units(state: State, leaves: Mapping[str, Any]) -> list[tuple[str, int, int]]:
    """What a leaf may be made of alone: each tensor, and the parts of those that look fused (name, part, parts)."""
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
        if not tensor.dim():
            units.append((name, 0, 1))
    return units


def _assign(leaves: Mapping[str, Any], units: list[tuple[str, int, int]], state: State) -> dict[str, Source]:
    """The pairing of leaves and units with the best names in all."""
    from scipy.optimize import linear_sum_assignment  # JAX requires scipy; only this needs it

    if not leaves or not units:
        return {}
    scores = np.full((len(leaves), len(units)), -1e3)
    sources: dict[tuple[int, int], Source] = {}
    words = [_words(name) + (["query", "key", "value"][i : i + 1] if n == 3 else []) for name, i, n in units]
    for row, (path, leaf) in enumerate(leaves.items()):
        for column, (name, i, parts) in enumerate(units):
            length = state[name].shape[0] // parts if parts > 1 else 0
            shape = (length, *state[name].shape[1:]) if parts > 1 else tuple(state[name].shape)
            ways = _reshaped(shape, tuple(leaf.shape))
            if ways:
                cut = (i * length, (i + 1) * length) if parts > 1 else None
                sources[row, column] = Source(name, rows=cut, **ways[0])
                distance = abs(row / len(leaves) - column / len(units))
                scores[row, column] = _likeness(_words(path), words[column]) - 0.1 * distance
    pairs = zip(*linear_sum_assignment(scores, maximize=True), strict=True)
    paths = list(leaves)
    return {paths[row]: sources[row, column] for row, column in pairs if (row, column) in sources}


def _join(leaves: Mapping[str, Any], state: State) -> dict[str, Source]:
    """The leaves made of several tensors (one of each layer, stacked; query, key and value, fused), by better names."""
    offers: list[tuple[float, str, Source]] = []
    layers, siblings = _layers(state), _siblings(state)
    for path, leaf in leaves.items():
        shape, words = tuple(leaf.shape), _words(path)
        alone = [_likeness(words, _words(name)) for name, t in state.items() if _reshaped(t.shape, shape)]
        least = max(alone, default=0.0)
        for stem, names in layers.items():
            if shape[:1] == (len(names),):
                for way in _reshaped(state[names[0]].shape, shape[1:])[:1]:
                    way = {**way, "shape": shape} if "shape" in way else way
                    offers.append((_likeness(words, _words(stem)), path, Source(tuple(names), **way)))
        for stem, names in siblings.items():
            for order in (None, (1, 0)) if state[names[0]].dim() == 2 else (None,):
                part = state[names[0]].shape if order is None else state[names[0]].shape[::-1]
                for axis in range(len(part)):
                    if (*part[:axis], part[axis] * len(names), *part[axis + 1 :]) == shape:
                        offers.append((_likeness(words, _words(stem)), path, Source(tuple(names), None, order, axis)))
        offers = [offer for offer in offers if offer[1] != path or offer[0] > least]
    found: dict[str, Source] = {}
    used: set[str] = set()
    for _, path, source in sorted(offers, key=lambda offer: -offer[0]):
        if path not in found and not used & set(_names(source)):
            found[path] = source
            used |= set(_names(source))
    return found


def _layers(state: State) -> dict[str, list[str]]:
    """Names that differ in one number, such as ``layers.*.weight``, in the order of the number."""
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
    """Query, key and value of the same module, in this order."""
    groups: dict[str, dict[str, str]] = {}
    for name in state:
        kinds = [w for w in _words(name) if w in ("query", "key", "value")]
        if len(kinds) == 1:
            stem = " ".join(w for w in _words(name) if w != kinds[0])
            groups.setdefault(stem, {})[kinds[0]] = name
    return {s: [g["query"], g["key"], g["value"]] for s, g in groups.items() if len(g) == 3}


# Names

_SAME = {
    "weight": ("w", "kernel", "weights", "scale", "gamma", "g", "table", "matrix"),
    "bias": ("b", "beta", "offset"),
    "layer": ("layers", "block", "blocks", "h"),
    "norm": ("ln", "layernorm", "norms", "batchnorm", "bn", "groupnorm", "rmsnorm"),
    "attention": ("attn", "attns", "self"),
    "query": ("q", "wq", "bq"),
    "key": ("k", "wk", "bk"),
    "value": ("v", "wv", "bv"),
    "input": ("ih", "wi", "bi", "wx", "bx"),
    "hidden": ("hh", "wh", "bh", "recurrent"),
    "out": ("o", "wo", "bo", "output"),
    "embed": ("emb", "embedding", "embeddings", "wte", "tok", "token"),
    "position": ("pos", "wpe", "positional"),
    "mlp": ("ffn", "ff", "feedforward"),
    "linear": ("dense", "fc", "proj", "lin", "projection"),
    "head": ("lm", "classifier", "unembed", "readout"),
}
_WORD = {alias: word for word, aliases in _SAME.items() for alias in aliases}
_LETTER = {"w": "weight", "b": "bias"}


@functools.lru_cache(maxsize=4096)
def _words(name: str) -> list[str]:
    """A name as words, aliases replaced: ``blocks.0.wq`` is layer, 0, query, weight."""
    words = []
    for part in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+", name):
        part = part.lower()
        words.append(_WORD.get(part, part))
        if len(part) == 2 and part[0] in _LETTER and part[1] in "qkvoihx":
            words.append(_LETTER[part[0]])
    return words


def _likeness(one: list[str], two: list[str]) -> float:
    """How alike two names are: the words that they share, the numbers in their order, and the letters."""
    shared = sum((Counter(one) & Counter(two)).values())
    numbers = [[w for w in words if w.isdigit()] for words in (one, two)]
    same_kind = (one[-1:] == ["bias"]) == (two[-1:] == ["bias"])
    letters = [_pairs(" ".join(words)) for words in (one, two)]
    common = len(letters[0] & letters[1]) / max(1, len(letters[0] | letters[1]))
    return 2 * shared / max(1, len(one) + len(two)) + (numbers[0] == numbers[1]) + 0.5 * same_kind + 0.3 * common


@functools.lru_cache(maxsize=4096)
def _pairs(text: str) -> frozenset[str]:
    return frozenset(text[i : i + 2] for i in range(len(text) - 1))


# Square weights


def _orient(found: dict[str, Source], leaves: Mapping[str, Any], state: State) -> None:
    """Transpose square weights as the leaves of the same kind are, by shape, by value, and else as JAX code does."""
    votes: dict[str, Counter[bool]] = {}
    open_: dict[str, Source] = {}
    for path, source in found.items():
        leaf, plain = leaves[path], dataclasses.replace(source, permute=None)
        turned = dataclasses.replace(source, permute=(1, 0))
        if _part(source, state).dim() != 2:
            continue
        choices = _fits(plain, leaf, state), _fits(turned, leaf, state)
        if all(choices):
            open_[path] = source
        by_value = _equals(plain, leaf, state), _equals(turned, leaf, state)
        telling = by_value if any(by_value) else choices
        if telling[0] != telling[1]:
            votes.setdefault(_kind(path), Counter())[telling[1]] += 1
    everywhere = Counter[bool]()
    for kind, counted in votes.items():
        if "embed" not in kind:
            everywhere += counted
    for path, source in open_.items():
        ballot = votes.get(_kind(path), Counter())
        if ballot[True] == ballot[False]:
            ballot = everywhere
        turn = ballot[True] > ballot[False] or (ballot[True] == ballot[False] and path.split(".")[-1] != "weight")
        found[path] = dataclasses.replace(source, permute=(1, 0) if turn else None)


def _part(source: Source, state: State) -> torch.Tensor:
    return state[_names(source)[0]]


def _kind(path: str) -> str:
    return " ".join(w for w in _words(path) if not w.isdigit() and w != "layer")


def _fits(source: Source, leaf: Any, state: State) -> bool:
    try:
        return tuple(source(state).shape) == tuple(leaf.shape)
    except RuntimeError:
        return False


def _equals(source: Source, leaf: Any, state: State) -> bool:
    if isinstance(leaf, jax.ShapeDtypeStruct) or not _fits(source, leaf, state):
        return False
    return np.allclose(source(state).detach().double().cpu().numpy(), np.asarray(leaf, np.float64), rtol=1e-5, atol=0)
