"""``lift``: a JAX transform as a torch transform, by one rule in both directions."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from .calling import as_torch
from .tracing import as_jax
from .trees import Structure, to_jax_tree

Fun = TypeVar("Fun", bound=Callable[..., Any])
_MARK = "__microtome_jax__"
_JAX_MODULES = ("jax", "jaxlib", "optax", "microtome.jax_impl")


def jax_function(fun: Fun) -> Fun:
    """Mark a callable as written in JAX, so that :func:`lift` passes it on untraced.

    >>> import jax.numpy as jnp
    >>> from microtome.bridge import jax_function
    >>> loss = jax_function(lambda p, x: jnp.sum(p * x))
    """

    @functools.wraps(fun)
    def marked(*args: Any, **kwargs: Any) -> Any:
        return to_jax_tree(fun(*args, **kwargs))

    setattr(marked, _MARK, True)
    return marked  # type: ignore[return-value]


def lift(transform: Callable[..., Any]) -> Callable[..., Any]:
    """A JAX transform as a torch transform.

    Callables go in traced (:func:`as_jax`) and come out as torch callables; tensors go in as arrays and come out as
    tensors. For transforms from function to function, ``lift(t)(fun, …) == as_torch(t(as_jax(fun), …))``; where a
    tensor is among the arguments, the call itself is compiled, as ``as_torch(lambda x: t(as_jax(f), x))(x)``.

    Callables marked by :func:`jax_function`, and those that JAX, optax or ``microtome.jax_impl`` define, pass as they
    are. Works on transforms of other libraries: ``lift(optax.microbatching.micro_vmap)``.

    >>> import jax, torch
    >>> from microtome.bridge import lift
    >>> lift(jax.grad)(lambda x: (x ** 3).sum())(torch.tensor([1.0, 2.0]))
    tensor([ 3., 12.])
    """

    @functools.wraps(transform)
    def lifted(*args: Any, **kwargs: Any) -> Any:
        tree = to_jax_tree((args, kwargs), to_jax_callable)
        tensors, structure = Structure.split(tree, lambda leaf: isinstance(leaf, torch.Tensor))

        def apply(*arrays: Any) -> Any:
            args, kwargs = structure.join(arrays)
            return transform(*args, **kwargs)

        return as_torch(apply)(*tensors) if tensors else _out(apply())

    return lifted


def to_jax_callable(leaf: Any) -> Any:
    """A torch callable traced; everything else, and what is JAX already, as it is."""
    if not callable(leaf) or isinstance(leaf, (type, torch.Tensor)) or _is_jax(leaf):
        return leaf
    return as_jax(leaf)


def _is_jax(fun: Any) -> bool:
    if getattr(fun, _MARK, False):
        return True
    module = getattr(inspect.unwrap(fun) if hasattr(fun, "__wrapped__") else fun, "__module__", None) or ""
    return module.startswith(tuple(m + "." for m in _JAX_MODULES)) or module in _JAX_MODULES


def _out(result: Any) -> Any:
    return as_torch(result) if callable(result) else result
