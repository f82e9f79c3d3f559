"""What an engine makes of a torch function for one signature: a flat function, and where its tensors belong."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import jax
import torch

from ..effects import bindings, sources
from ..effects.running import FlatFunction
from ..watch.walk import Walk
from .functions import Original


class Tracing(Protocol):
    """What an engine makes of a flat torch function: inputs are the arguments, then the captured tensors."""

    @property
    def captured(self) -> list[torch.Tensor]:
        """The tensors that the function captures."""

    @property
    def mutated(self) -> Sequence[int]:
        """Inputs whose final value ``call`` returns after the outputs."""

    @property
    def moved(self) -> Collection[int]:
        """Those of them that take the memory of that value too."""

    def call(self, make_key: Callable[[], jax.Array], arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """Evaluate on arrays or tracers; ``make_key`` is asked for a key if the function draws."""


@dataclasses.dataclass
class Specialised:
    """What an engine made of a function, for one signature."""

    tracing: Tracing
    flat: FlatFunction
    source: Original | None  # kept alive here, for further recordings
    places: Sequence[int | None] = ()  # where the walk finds the captured tensors
    logs: Sequence[object] = ()  # lists that each of its traces would append to
    filled: Sequence[object] = ()  # lists that only its first trace appends to

    def find_in(self, walk: Walk) -> None:
        """Note where the walk finds the captured tensors."""
        indices = {id(t): i for i, t in enumerate(walk.tensors)}
        self.places = [indices.get(id(t)) for t in self.tracing.captured]

    def leave(self, walk: Walk) -> list[bindings.Binding]:
        """Write what a call leaves of captured tensors and constants; what stood there before."""
        find = lambda source: self.tracing.captured[source.index - self.flat.arguments]
        return bindings.leave(self.flat.effects, walk.places, sources.from_basic(find))

    def adopt(self, walk: Walk) -> None:
        """Take the tensors of a function with the same key, or of this one when other tensors stand in their places."""
        self.flat.walk, self.logs, self.filled = walk, walk.logs_left_out(), ()
        captured = self.tracing.captured
        captured[:] = [t if i is None else walk.tensors[i] for i, t in zip(self.places, captured, strict=True)]
