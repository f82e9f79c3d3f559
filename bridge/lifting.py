"""``lift``: a JAX transform as a torch transform, by one rule in both directions."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
import os
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import torch

from ..jax_impl.program.trees import PyTree
from .call.as_torch import as_torch, made_from, only_maps
from .memory.trees import Structure, to_jax_tree, to_torch_tree
from .memory.values import array_to_tensor
from .tracing import as_jax
from .watch.walk import is_traced

FunT = TypeVar("FunT", bound=Callable[..., PyTree])
T = TypeVar("T")
_MARK = "__microtome_jax__"
_JAX_MODULES = ("jax", "jaxlib", "optax", "microtome.jax_impl")
_MAPS = (jax.vmap, jax.jit, jax.checkpoint, jax.lax.map, jax.lax.scan)  # they take no derivatives
_QUESTIONS = itertools.count()
_JAX_CODE = os.path.join(os.path.dirname(jax.__file__), "")


def jax_function(fun: FunT) -> FunT:
    """Mark a callable as written in JAX, so that :func:`lift` passes it on untraced.

    >>> import jax.numpy as jnp
    >>> from microtome.bridge import jax_function
    >>> loss = jax_function(lambda p, x: jnp.sum(p * x))
    """

    @functools.wraps(fun)
    def marked(*args: PyTree, **kwargs: PyTree) -> PyTree:
        return to_jax_tree(fun(*args, **kwargs))

    setattr(marked, _MARK, True)
    return marked  # type: ignore[return-value]


def lift(transform: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """A JAX transform as a torch transform.

    Callables go in traced (:func:`as_jax`) and come out as torch callables; tensors go in as arrays and come out as
    tensors. For transforms from function to function, ``lift(t)(fun, …) == as_torch(t(as_jax(fun), …))``; where a
    tensor is among the arguments, the call itself is compiled, as ``as_torch(lambda x: t(as_jax(f), x))(x)``.

    Callables marked by :func:`jax_function`, those that JAX made (``jax.jit(f)``, ``jax.vmap(f)``, ``custom_vjp``), and
    those that JAX, optax or ``microtome.jax_impl`` define, pass as they are. Functions within a result come out as
    torch callables (``out, pull = lift(jax.vjp)(f, x)``). Works on transforms of other libraries:
    ``lift(optax.microbatching.micro_vmap)``.

    Raises:
        TypeError: ``transform`` is not callable, or a function written in JAX was given unmarked.

    >>> import jax, torch
    >>> from microtome.bridge import lift
    >>> lift(jax.grad)(lambda x: (x ** 3).sum())(torch.tensor([1.0, 2.0]))
    tensor([ 3., 12.])
    """
    if not callable(transform):
        raise TypeError(f"lift expects a transform, a callable; got {type(transform).__name__}.")

    @functools.wraps(transform)
    def lifted(*args: PyTree, **kwargs: PyTree) -> PyTree:
        tree = to_jax_tree((args, kwargs), to_jax_callable)
        tensors, structure = Structure.split(tree, lambda leaf: isinstance(leaf, torch.Tensor))

        def apply(*arrays: jax.Array) -> PyTree:
            args, kwargs = structure.join(arrays)
            return transform(*args, **kwargs)

        made = apply if tensors else apply()
        if getattr(transform, "func", transform) in _MAPS:
            only_maps(made, *filter(callable, structure.fixed))
        return _out(as_torch(made)(*tensors) if tensors else made)

    return lifted


def to_jax_callable(leaf: PyTree) -> PyTree:
    """A torch callable traced; everything else, and what is JAX already, as it is."""
    if not callable(leaf) or isinstance(leaf, (type, torch.Tensor)):
        return leaf
    original = made_from(leaf)
    if original is not None:
        return original
    return leaf if _is_jax(leaf) else as_jax(leaf)


def _is_jax(fun: Any) -> bool:
    if getattr(fun, _MARK, False) or is_traced(fun):
        return True
    if isinstance(fun, functools.partial):
        return _is_jax(fun.func)
    if _is_of(type(fun).__module__) or getattr(fun, "__code__", _is_jax.__code__).co_filename.startswith(_JAX_CODE):
        return True
    return _is_of(getattr(inspect.unwrap(fun) if hasattr(fun, "__wrapped__") else fun, "__module__", None) or "")


def _is_of(module: str) -> bool:
    return module in _JAX_MODULES or module.startswith(tuple(m + "." for m in _JAX_MODULES))


def asking(question: Callable[..., T]) -> Callable[..., T]:
    """A JAX function that returns no arrays, such as ``explain``, of torch's arguments: traced, and never run."""

    def ask(*args: PyTree, **kwargs: PyTree) -> T:
        answers: dict[int, T] = {}
        number = next(_QUESTIONS)  # makes the probe another function each time: one that was traced would not run

        @functools.wraps(question)
        def probe(*args: PyTree, **kwargs: PyTree) -> jax.Array:
            answers[number] = question(*args, **kwargs)
            return jnp.zeros(())

        call: Any = as_torch(probe)
        call.compiled(*args, **kwargs)
        return answers[number]

    return ask


def _with_compiled(made: Any) -> Any:
    """A function with what is known of it, and the ``compiled`` of the field that it calls, which comes first."""
    compiled = next(
        (c for f in dataclasses.fields(made) if (c := getattr(getattr(made, f.name), "compiled", None))), None
    )
    if compiled is not None and not hasattr(made, "compiled"):
        with contextlib.suppress(AttributeError):  # slots
            object.__setattr__(made, "compiled", compiled)
    return made


def _torch_callable(fun: Any) -> Any:
    made: Any = as_torch(fun)
    if callable(getattr(fun, "explain", None)):
        made.explain = asking(fun.explain)
    return made


def _out(result: PyTree) -> PyTree:
    """A result for torch: functions become torch callables, arrays become tensors."""

    def convert(leaf: object) -> object:
        if isinstance(leaf, jax.Array):
            return array_to_tensor(leaf, copy=True)
        if dataclasses.is_dataclass(leaf) and callable(leaf) and not isinstance(leaf, type):
            # A function with what is known of it, as jax_privacy's clipped_grad returns: it calls one of its fields.
            fields = {f.name: getattr(leaf, f.name) for f in dataclasses.fields(leaf) if f.init}
            made = dataclasses.replace(leaf, **{name: convert(value) for name, value in fields.items()})
            return _with_compiled(made)
        return _torch_callable(leaf) if inspect.isroutine(leaf) or hasattr(leaf, "__wrapped__") else leaf

    if callable(result) and not jax.tree_util.all_leaves([result]):  # such as the pullback of jax.vjp
        return functools.partial(as_torch(lambda function, *args, **kwargs: function(*args, **kwargs)), result)
    if type(result) in (tuple, list):
        return type(result)(map(_out, result))
    if type(result) is dict:
        return {key: _out(value) for key, value in result.items()}
    return to_torch_tree(result, convert)
