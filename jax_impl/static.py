"""``Static``: a value in a pytree that is no data, after ``powerpax.Static``."""

from __future__ import annotations

import dataclasses
from typing import Any, Generic, TypeVar

import jax

T = TypeVar("T")


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class Static(Generic[T]):
    """A value in a pytree that transforms leave alone: a node without leaves.

    Equivalent to a static argument of ``jax.jit``, at any place in a tree: the value is part of the tree's structure,
    traced functions see it as it is, and another value compiles anew. It costs no memory.

    Two are equal if their values are equal *and of the same type*, also within tuples: ``Static(1)``, ``Static(1.0)``
    and ``Static(True)`` differ, and so do 0.0 and -0.0, which are equal in Python. What was compiled for one of them is
    never run for another.

    After ``powerpax.Static``.

    Args:
        value: Any hashable value.

    Raises:
        TypeError: The value has no hash.

    Example:
        >>> import jax
        >>> from microtome.jax_impl import Static
        >>> jax.tree.leaves({"x": 1.0, "mode": Static("fast")})
        [1.0]
        >>> jax.jit(lambda mode, x: x + 1 if mode.value == "fast" else x)(Static("fast"), 2.0)
        Array(3., dtype=float32, weak_type=True)
    """

    value: T

    def __post_init__(self) -> None:
        try:
            hash(self.value)
        except TypeError:
            raise TypeError(
                f"the value of Static must be hashable, got a {type(self.value).__name__}: {self.value!r}. Make it a "
                "tuple or a frozenset, or pass arrays beside it."
            ) from None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Static) and _typed(self.value) == _typed(other.value)

    def __hash__(self) -> int:
        return hash(_typed(self.value))


def _typed(value: Any) -> Any:
    """Return the value, such that values that Python takes to be equal differ where a program can tell them apart."""
    kind: type = type(value)
    if isinstance(value, tuple):
        return kind, tuple(map(_typed, value))
    if isinstance(value, frozenset):
        return kind, frozenset(map(_typed, value))
    # repr tells 0.0 from -0.0, and finds nan equal to itself.
    return kind, repr(value) if isinstance(value, (float, complex)) else value
