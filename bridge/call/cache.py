"""What calls keep for later calls, and the lock under which they do; what was not used for longest goes first.

To find out why a function was compiled again, compare the lines that ``held`` gives for it.
"""

from __future__ import annotations

import collections
import threading
import weakref
from collections.abc import Hashable
from typing import Generic, TypeVar

import torch

from .compilation import Program
from .flat import Outline

T = TypeVar("T")

LOCK = threading.RLock()
SIZE = 256


class Cache(collections.OrderedDict[Hashable, T], Generic[T]):
    """Values by signature, at most ``SIZE``."""

    def find(self, signature: Hashable) -> T | None:
        """Return what is kept for a signature, which counts as used."""
        found = self.get(signature)
        if found is not None:
            self.move_to_end(signature)
        return found

    def keep(self, signature: Hashable, value: T) -> None:
        """Keep a value for a signature."""
        self[signature] = value
        if len(self) > SIZE:
            self.popitem(last=False)


PROGRAMS: Cache[Program] = Cache()
# What is known of a call before it runs, and the captured tensors that only its trace met.
OUTLINES: Cache[tuple[Outline, list[weakref.ref[torch.Tensor]]]] = Cache()
# Which outputs of a call inside another one depend on its inputs, in the sense of autograd.
DEPENDENT: Cache[list[bool]] = Cache()
# Functions that need the values of the floats among their arguments, by their key and the arguments' structure.
STATIC_FLOATS: Cache[bool] = Cache()


def held() -> list[str]:
    """Describe the programs that are kept, the last one last: the line of the function, and what is computed of it.

    Then the form of each input, the values of static arguments, the inputs by which there are gradients, and a number
    that changes with what the function captures besides tensors.
    """
    with LOCK:
        return [program.title for program in PROGRAMS.values()]
