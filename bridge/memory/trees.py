"""Pytrees across the two frameworks: what goes in as a dict, named tuple or dataclass comes back as one.

JAX sorts the keys of a dict, torch keeps their order; torch registers containers that JAX does not know. On the JAX
side a dict is therefore a :class:`Dict`, which keeps its order, and what only torch knows is a ``_Container``.
"""

from __future__ import annotations

import collections
import dataclasses
import inspect
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as torch_pytree

from ...jax_impl.program.trees import PyTree, flatten

Keys: TypeAlias = tuple[tuple[type, Hashable], ...]


@jax.tree_util.register_pytree_with_keys_class
class Dict(dict):  # type: ignore[type-arg]
    """A dict whose order survives JAX's tree functions, and whose keys 1 and True are two."""

    def tree_flatten_with_keys(self) -> tuple[list[tuple[jax.tree_util.DictKey, PyTree]], Keys]:
        return [(jax.tree_util.DictKey(k), v) for k, v in self.items()], tuple((type(k), k) for k in self)

    @classmethod
    def tree_unflatten(cls, keys: Keys, values: Iterable[PyTree]) -> Dict:
        return cls((key, value) for (_, key), value in zip(keys, values, strict=True))


class _Container:
    """A node that only torch knows: its children, and how to build it again."""

    def __init__(self, children: list[PyTree], build: _Build) -> None:
        self.children, self.build = children, build


@dataclasses.dataclass(frozen=True)
class _Build:
    """How a container is put together: the type, and the context or the field names that belong to it."""

    type: type
    context: object
    fields: tuple[str, ...] | None = None

    def __hash__(self) -> int:
        return hash((self.type, self.fields))

    def __call__(self, children: list[PyTree]) -> PyTree:
        if self.fields is None:
            return torch_pytree.SUPPORTED_NODES[self.type].unflatten_fn(children, self.context)
        made: object = object.__new__(self.type)
        for name, child in zip(self.fields, children, strict=True):
            object.__setattr__(made, name, child)
        return made


jax.tree_util.register_pytree_node(
    _Container, lambda c: (c.children, c.build), lambda build, children: _Container(list(children), build)
)


def container(x: object, children: list[PyTree], fields: tuple[str, ...]) -> _Container:
    """An object as a node of a tree, with the values of its fields as children."""
    return _Container(children, _Build(type(x), None, fields))


class Rows:
    """An argument of a batched call with the number of each of its rows, by which random draws are told apart."""

    def __init__(self, value: PyTree, index: jax.Array | int) -> None:
        self.value, self.index = value, index


class _Unnamed:
    """A key that leaves no trace in the name of a leaf: users do not know of row numbers."""

    def __str__(self) -> str:
        return ""


jax.tree_util.register_pytree_with_keys(
    Rows, lambda r: (((_Unnamed(), r.value), (_Unnamed(), r.index)), None), lambda _, c: Rows(*c)
)

_JAX_NODES = (list, tuple, type(None), collections.OrderedDict, Dict, Rows, _Container)


def to_jax_tree(tree: PyTree, leaf: Callable[[Any], object] = lambda x: x, is_deep: bool = True) -> PyTree:
    """The same tree with containers that JAX can flatten and rebuild, ``leaf`` applied to the leaves.

    If not ``is_deep``, what the outermost container holds counts as leaves.
    """

    def convert(x: PyTree) -> PyTree:
        if type(x) is PackedSequence:
            raise TypeError(
                "a PackedSequence has batch sizes for which XLA would need shapes that depend on values. Pass the "
                "padded tensor and the lengths (torch.nn.utils.rnn.pad_packed_sequence), and mask by the lengths."
            )
        level = _level(x)
        if level is None:
            return leaf(x)
        children, build = level
        return build([inner(c) for c in children])

    inner = convert if is_deep else leaf
    return convert(tree)


def _level(x: Any) -> tuple[list[Any], Callable[[list[PyTree]], PyTree]] | None:
    """What a container of torch's or JAX's holds, and how to build the node that JAX knows; None for a leaf."""
    kind = type(x)
    if isinstance(x, (torch.Tensor, torch.Size)):
        return None
    if kind is dict:
        return list(x.values()), lambda children: Dict(zip(x, children, strict=True))
    if kind in torch_pytree.SUPPORTED_NODES and kind not in _JAX_NODES:  # the exact type: subclasses differ
        children, context = torch_pytree.SUPPORTED_NODES[kind].flatten_fn(x)
        return children, lambda children: _Container(children, _Build(kind, context))
    one_level = _one_level(x)
    if one_level is None and dataclasses.is_dataclass(x) and not isinstance(x, type) and _holds_tensor(x):
        fields = tuple(f.name for f in dataclasses.fields(x))
        return [getattr(x, f) for f in fields], lambda children: container(x, children, fields)
    return one_level


def to_torch_tree(tree: PyTree, leaf: Callable[[Any], object] = lambda x: x) -> PyTree:
    """The way back of :func:`to_jax_tree`."""

    def convert(x: PyTree) -> PyTree:
        kind = type(x)
        if kind in (Dict, dict):
            return {k: convert(v) for k, v in x.items()}
        if kind is _Container:
            return x.build([convert(c) for c in x.children])
        if kind is Rows:
            return convert(x.value)
        if kind is torch.Size:
            return leaf(x)
        one_level = _one_level(x)
        if one_level is not None:
            children, build = one_level
            return build([convert(c) for c in children])
        return leaf(x)

    return convert(tree)


class _Child:
    """A leaf, whatever it holds."""

    def __init__(self, value: Any) -> None:
        self.value = value


def split_level(x: object) -> tuple[list[Any], jax.tree_util.PyTreeDef]:
    """What a container holds, and its form; of a leaf, the leaf."""
    children, form = flatten(to_jax_tree(x, _Child, is_deep=False))
    return [child.value for child in children], form


def join_level(form: jax.tree_util.PyTreeDef, children: Iterable[object]) -> PyTree:
    """A container of a form, as torch has it."""
    made = form.unflatten(children)
    if type(made) is Dict:
        return dict(made)
    return made.build(made.children) if type(made) is _Container else made


def is_leaf(x: object) -> bool:
    """Whether a value is no container that could be put together again."""
    form = split_level(x)[1]
    return bool(jax.tree_util.treedef_is_leaf(form) and form.num_leaves == 1)


def containers_in(args: Iterable[object], kwargs: Mapping[str, object]) -> list[Any]:
    """The containers among the arguments of a call, each before those in it."""
    found, rest = [], [*args, *kwargs.values()][::-1]
    while rest:
        x = rest.pop()
        level = _level(x)
        if level is not None:
            found.append(x)
            rest += level[0][::-1]
    return found


def without_rows(tree: PyTree) -> tuple[PyTree, jax.Array | int | None]:
    """The tree with each :class:`Rows` replaced by its value, and the first row numbers found (None without any)."""
    found: list[jax.Array | int] = []

    def strip(x: PyTree) -> PyTree:
        if isinstance(x, Rows):
            found.append(x.index)
            return x.value
        return x

    stripped = jax.tree.map(strip, tree, is_leaf=lambda x: isinstance(x, Rows))
    return stripped, (found[0] if found else None)


def bound_arguments(
    fun: Callable[..., object], args: tuple[PyTree, ...], kwargs: dict[str, PyTree]
) -> dict[str, PyTree]:
    """The arguments of a call by parameter name, for messages."""
    try:
        return dict(inspect.signature(fun).bind(*args, **kwargs).arguments)
    except (TypeError, ValueError):
        return {f"argument {i}": value for i, value in enumerate(args)} | kwargs


def argument_name(path: tuple[object, ...]) -> str:
    """``params['w']`` for the path of a leaf of :func:`bound_arguments`."""
    first, *rest = path
    return str(getattr(first, "key", first)) + jax.tree_util.keystr(tuple(rest))


class Structure(NamedTuple):
    """A tree without the leaves that move through a program: what stays, and how to put others in their places."""

    treedef: jax.tree_util.PyTreeDef
    moves: tuple[bool, ...]
    fixed: tuple[object, ...]

    @classmethod
    def split(cls, tree: PyTree, moves: Callable[[object], bool]) -> tuple[list[Any], Structure]:
        """The leaves that move, and the rest."""
        leaves, treedef = flatten(tree)
        flags = tuple(map(moves, leaves))
        moving = [leaf for leaf, m in zip(leaves, flags, strict=True) if m]
        return moving, cls(treedef, flags, tuple(leaf for leaf, m in zip(leaves, flags, strict=True) if not m))

    def join(self, moving: Iterable[object]) -> PyTree:
        """The tree with other leaves in the places of those that move."""
        rest, fixed = iter(moving), iter(self.fixed)
        return self.treedef.unflatten([next(rest) if m else next(fixed) for m in self.moves])


def is_tensor(leaf: object) -> bool:
    """Whether a leaf is a torch tensor."""
    return isinstance(leaf, torch.Tensor)


def is_array(leaf: object) -> bool:
    """Whether JAX takes a leaf as an array: tracers and NumPy's scalars included, Python's numbers not."""
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic))


def moves(leaf: object) -> bool:
    """Whether a leaf of the arguments is a tensor for a torch function, to which NumPy's scalars are numbers."""
    return isinstance(leaf, (torch.Tensor, jax.Array, np.ndarray))


def _one_level(x: PyTree) -> tuple[list[PyTree], Callable[[Iterable[PyTree]], PyTree]] | None:
    """Children and builder of a node known to JAX; None for a leaf."""
    children, treedef = flatten(x, is_leaf=lambda y: y is not x)
    if jax.tree_util.treedef_is_leaf(treedef) and treedef.num_leaves == 1:
        return None
    return children, treedef.unflatten


def _holds_tensor(x: Any) -> bool:
    values = [getattr(x, f.name) for f in dataclasses.fields(x)]
    return any(isinstance(v, torch.Tensor) for value in values for v in torch_pytree.tree_leaves(value))
