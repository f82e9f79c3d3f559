"""The table that the files of this folder fill."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from jax import Array

from ...jax_impl.program.trees import Function
from .signatures import Forms

FunT = TypeVar("FunT", bound=Function)
LOWERINGS: dict[str, Lowering] = {}


class Lowering:
    """A lowering, called with the metas of the results and the key of the draw where it asks for them."""

    __slots__ = ("fun", "key", "results")

    def __init__(self, fun: Function, results: bool, key: bool) -> None:
        self.fun, self.results, self.key = fun, results, key

    def __call__(self, *args: object, _results: Forms, _key: Array | None, **kwargs: object) -> Any:
        if self.results:
            kwargs["results"] = _results
        if self.key:
            kwargs["key"] = _key
        return self.fun(*args, **kwargs)


def lowering(*ops: str, results: bool = False, key: bool = False) -> Callable[[FunT], FunT]:
    """Register a lowering for ops (``aten.put``) or single overloads (``aten.index.Tensor``).

    ``results=True`` passes ``results``, the metas of what eager torch returns; ``key=True`` passes a JAX key.

    Raises:
        ValueError: an op has a lowering already; which one would hold depends on the order of imports.
    """

    def decorate(fun: FunT) -> FunT:
        for op in ops:
            if op in LOWERINGS:
                raise ValueError(f"{op} is lowered twice: by {LOWERINGS[op].fun.__name__} and by {fun.__name__}")
            LOWERINGS[op] = Lowering(fun, results, key)
        return fun

    return decorate
