"""Which torch tensors a JAX pytree of parameters is made of: transposed, renamed, stacked, split or fused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, TypeGuard

import jax
import numpy as np
import torch

from ...jax_impl.program.trees import PyTree

Parameter: TypeAlias = jax.Array | np.ndarray | jax.ShapeDtypeStruct
State = Mapping[str, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Source:
    """One JAX leaf in terms of torch tensors: ``Source(...)(state_dict)`` is the tensor that the leaf holds.

    The steps are taken in this order: rows, flip, permutation, joining, shape. Any torch callable from a state
    dict to a tensor may stand in a mapping instead.

    Args:
        names: the torch tensor's name; several for a leaf that stacks or concatenates them.
        rows: ``(start, stop)`` of axis 0, where torch fuses what JAX keeps apart (``in_proj_weight``).
        permute: the order of the axes, ``(1, 0)`` for a transposed weight, ``(2, 3, 1, 0)`` for a convolution's.
        concat: the axis to concatenate several tensors along; None stacks them along a new axis 0.
        shape: the leaf's shape, where JAX splits an axis into heads.
        flip: the axes of the torch tensor to reverse, ``(2, 3)`` for the window of a transposed convolution.

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
    flip: tuple[int, ...] | None = None

    def __call__(self, state: State) -> torch.Tensor:
        """The tensor for the leaf."""
        names = (self.names,) if isinstance(self.names, str) else self.names
        parts = []
        for name in names:
            part = state[name]
            if self.rows is not None:
                part = part[slice(*self.rows)]
            if self.flip is not None:
                part = part.flip(self.flip)
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
        if self.flip is not None:
            words.append(f"axes {self.flip} reversed")
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
    """The error that parameters and state dict do not match; ``side`` is what can be compared all the same."""

    def __init__(self, problems: list[str], side: Any) -> None:
        super().__init__(problems)
        self.problems, self.side = problems, side


def leaf_paths(tree: PyTree) -> list[tuple[str, Any]]:
    """Return the leaves of a pytree with their dotted paths."""
    return [(".".join(map(_key, path)), leaf) for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]]


def _key(entry: object) -> str:
    for name in ("key", "idx", "name"):
        if hasattr(entry, name):
            return str(getattr(entry, name))
    return str(entry)


def leaf_tensors(mapping: Mapping[str, Entry], state: State) -> dict[str, torch.Tensor]:
    """Return the tensor of each leaf by its path; differentiable.

    Raises:
        KeyError: the state dict lacks a name that the mapping uses.
    """
    return {path: state[entry] if isinstance(entry, str) else entry(state) for path, entry in mapping.items()}


def problems(mapping: Mapping[str, Entry], state: State, params: PyTree) -> list[str]:
    """Say what is wrong with a mapping for these parameters: names and leaves that are missing, shapes that differ."""
    leaves = {path: leaf for path, leaf in leaf_paths(params) if is_parameter(leaf)}
    found = [f"the mapping names {path!r}, which the JAX parameters lack" for path in mapping if path not in leaves]
    found += [f"the mapping has no source for the JAX leaf {path!r}" for path in leaves if path not in mapping]
    for path, entry in mapping.items():
        if path not in leaves:
            continue
        try:
            made = tuple(leaf_tensors({path: entry}, state)[path].shape)
        except KeyError as error:
            found.append(f"the mapping takes {path!r} from {error}, which the state dict lacks")
            continue
        except Exception as error:  # a callable of the user's, or a permutation that does not fit
            found.append(f"the source of {path!r} fails: {type(error).__name__}: {error}")
            continue
        if made != tuple(leaves[path].shape):
            found.append(f"{path!r} is {list(leaves[path].shape)} in JAX, and {list(made)} by its source ({entry})")
    return found


def is_parameter(leaf: Any) -> TypeGuard[Parameter]:
    """Tell whether a leaf of a JAX tree is data of floats: an array, or the shape of one."""
    return hasattr(leaf, "dtype") and hasattr(leaf, "shape") and jax.numpy.issubdtype(leaf.dtype, np.inexact)


def named_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and buffers by name, tied ones under all their names, also buffers that are not saved."""
    return dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))
