"""Where the tensors of a call come from that it binds in places: its inputs, its results, views of them, constants."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import torch

from ..memory.dtypes import jax_dtype


@dataclasses.dataclass(frozen=True)
class Given:
    """An input, an argument or a captured tensor: the very object."""

    index: int


@dataclasses.dataclass(frozen=True)
class Made:
    """A result: a new tensor at each call, the same object in all places and results that show it."""

    index: int


@dataclasses.dataclass(frozen=True)
class View:
    """Another tensor over the memory of an input or a result, such as ``x.detach()`` or ``x[:, -1]``."""

    base: Basic
    base_stride: tuple[int, ...]
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    is_whole: bool
    is_detached: bool
    is_conj: bool
    is_neg: bool
    which: object = dataclasses.field(default_factory=object)  # the tensor: another view of the same form is not it

    def of(self, base: torch.Tensor) -> torch.Tensor:
        """The view of a tensor."""
        base = base.detach() if self.is_detached else base
        if self.is_whole:
            return base.view_as(base)
        if base.dtype != self.dtype and base.element_size() == self.dtype.itemsize:
            base = base.view(self.dtype)
        elif base.dtype != self.dtype:
            flat = base.reshape(-1)
            if flat.is_complex():
                base = torch.view_as_real(flat)
            else:
                base = torch.view_as_complex(flat.view(-1, 2)) if self.dtype.is_complex else flat.view(self.dtype)
        view = base.as_strided(self.size, self.stride, int(base.storage_offset()) + self.offset)
        view = view.conj() if self.is_conj else view
        return torch._neg_view(view) if self.is_neg else view

    def of_array(self, base: jax.Array) -> jax.Array:
        """Its values, for an array."""
        base = jax.lax.stop_gradient(base) if self.is_detached else base
        if self.is_whole:
            return base
        at = self.offset + positions(self.size, self.stride)
        places = positions(base.shape, self.base_stride).ravel()
        if not np.array_equal(places, np.arange(places.size)):
            order = np.zeros(places.max() + 1, np.int64)
            order[places] = np.arange(places.size)
            at = order[at]
        flat, dtype = jnp.ravel(base), jax_dtype(self.dtype)
        if flat.dtype != dtype:
            if jnp.iscomplexobj(flat):
                flat = jnp.stack([flat.real, flat.imag], -1).ravel()
            else:
                flat = jax.lax.complex(flat[::2], flat[1::2]) if self.dtype.is_complex else flat.view(dtype)
        view = flat[at]
        view = jnp.conj(view) if self.is_conj else view
        return -view if self.is_neg else view


def positions(size: Sequence[int], stride: Sequence[int]) -> np.ndarray:
    """Where in memory the elements of a tensor lie."""
    steps = (np.arange(n) * step for n, step in zip(size, stride, strict=True))
    return np.broadcast_to(sum(np.ix_(*steps)) if size else np.zeros((), np.int64), tuple(size))


@dataclasses.dataclass(frozen=True, eq=False)
class Constant:
    """What depends on no input: a copy at each call."""

    tensor: torch.Tensor


Basic = Given | Made
Origin = Basic | View | Constant


def from_basic(tensor: Callable[[Basic], torch.Tensor]) -> Callable[[Origin], torch.Tensor]:
    """The tensors of all sources, for those of the inputs and results."""
    return each_once(lambda view: view.of(tensor(view.base)), lambda constant: constant.tensor.clone(), tensor)


def each_once(
    of_view: Callable[[View], torch.Tensor],
    of_constant: Callable[[Constant], torch.Tensor],
    basic: Callable[[Basic], torch.Tensor],
) -> Callable[[Origin], torch.Tensor]:
    """The tensors of all sources: one that a function keeps in several places is one in each call."""
    made: dict[View | Constant, torch.Tensor] = {}

    def find(source: Origin) -> torch.Tensor:
        if isinstance(source, Given | Made):
            return basic(source)
        if source not in made:
            made[source] = of_view(source) if isinstance(source, View) else of_constant(source)
        return made[source]

    return find


def renumbered(source: Origin, number: Callable[[Basic], Basic]) -> Origin:
    """The same with the numbers of the call around."""
    if isinstance(source, View):
        return dataclasses.replace(source, base=number(source.base))
    return source if isinstance(source, Constant) else number(source)
