"""``as_jax``: a torch callable as a JAX-traceable callable."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
import torch
import torch.nn.functional as F
from jax.interpreters import ad
from torch.overrides import TorchFunctionMode

from .captures import SOURCE, Walk, WrittenContainers, surroundings
from .context import Call, current_call
from .differentiation import Source, TorchFunction
from .errors import FloatsAreStatic, TraceError, WrittenArgument, frozen_number, is_raised_by_jax, user_line
from .graph import Meta
from .interception import is_traced_tensor, recording
from .side_effects import Effect, Generators, Watched
from .torch2jax_engine import InterpretedFunction, is_interpreted
from .trees import Structure, argument_name, bound_arguments, is_array, to_jax_tree, to_torch_tree, without_rows
from .values import array_to_tensor, jax_dtype, tensor_to_array, torch_dtype
from .versions import enable_x64

Engine = Literal["record", "torch2jax"]
_CACHE_SIZE = 64


def as_jax(torch_fun: Callable[..., Any], engine: Engine = "record") -> Callable[..., Any]:
    """A torch callable as a JAX-traceable callable: ``jax.jit``, ``grad``, ``jvp``, ``vmap`` and ``scan`` apply to it.

    The function runs once per signature on fake tensors; JAX runs what torch recorded. Values and dtypes are eager
    torch's, 64-bit types included. Derivatives of every order, forward and reverse, are those of torch's autograd
    (JAX's convention for complex numbers holds inside JAX: the conjugate of torch's).

    Tensors that the function captures (parameters, closures, globals) are read at each call. Inside :func:`as_torch`
    they are inputs of the compiled program; under a ``jax.jit`` of your own they are constants of that trace, as any
    captured array is: pass parameters as arguments there.

    Args:
        torch_fun: a function, lambda, bound method or ``nn.Module`` from pytrees of tensors to pytrees of tensors.
            Ints, bools, strings, None and floats among the arguments are static.
        engine: ``"record"`` (torch records, JAX runs) or ``"torch2jax"``, an independent second opinion for
            cross-checks: it differentiates by JAX's rules, refuses to update buffers, and supports fewer ops.

    Returns:
        ``fun(*args, key=None, **kwargs)``: arrays where the torch function has tensors. ``key`` (a ``jax.random`` key)
        is required when the function draws random numbers outside :func:`as_torch`, which passes its own.

    Raises:
        TypeError: when called, if the function asks for the value of a tensor (``.item()``, ``if``), has a result whose
            shape depends on values, or uses an op without a lowering. The message names the line.
        ValueError: for an unknown engine, or a random draw without a key.

    >>> import jax, torch
    >>> from microtome.bridge import as_jax
    >>> square = as_jax(lambda x: (x * x).sum())
    >>> print(jax.grad(square)(jax.numpy.array([1.0, 2.0])))
    [2. 4.]
    """
    if engine not in ("record", "torch2jax"):
        raise ValueError(f'engine must be "record" or "torch2jax", not {engine!r}')
    if isinstance(torch_fun, (torch.jit.ScriptModule, torch.jit.ScriptFunction)):
        raise TypeError(
            f"a {type(torch_fun).__name__} runs TorchScript's own code, which cannot be traced: pass the Python "
            "function or module that it was made from."
        )
    traced = _Traced(torch_fun, engine)
    own_key = "key" in _parameters(torch_fun)

    def fun(*args: Any, **kwargs: Any) -> Any:
        key = None if own_key else kwargs.pop("key", None)
        return traced(args, kwargs, key)

    _wrap(fun, torch_fun)
    return fun


def python_function(fun: Any) -> Any:
    """What has the name, the docstring and the signature of a callable: of a module, its ``forward``."""
    return fun.forward if isinstance(fun, torch.nn.Module) else fun


def _wrap(fun: Any, original: Any) -> None:
    functools.update_wrapper(fun, python_function(original))
    setattr(fun, SOURCE, (fun, original))
    try:
        inspect.signature(fun)
    except ValueError:  # of a builtin
        del fun.__wrapped__
    if isinstance(original, torch.nn.Module):
        fun.__name__ = type(original).__name__


def _parameters(fun: Any) -> Any:
    try:
        return inspect.signature(python_function(fun)).parameters
    except (TypeError, ValueError):
        return {}


class Tracing(Protocol):
    """What an engine makes of a flat torch function: inputs are the arguments, then the captured tensors."""

    @property
    def captured(self) -> list[torch.Tensor]:
        """The tensors that the function captures."""

    @property
    def mutated(self) -> Sequence[int]:
        """Inputs whose final value ``call`` returns after the outputs."""

    def call(self, make_key: Callable[[], jax.Array], arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """Evaluate on arrays or tracers; ``make_key`` is asked for a key if the function draws."""


@dataclasses.dataclass(frozen=True)
class _Mode:
    """How a function runs: what torch would show it, besides the arguments."""

    once: bool  # for the whole call, not per example or in chunks
    grad: bool  # whether autograd records
    tracked: tuple[bool, ...]  # which arguments are differentiated
    surroundings: Hashable


@dataclasses.dataclass
class _Made:
    """What an engine made of a function, for one signature."""

    tracing: Tracing
    unflatten: Callable[[Sequence[Any]], Any]
    source: Source | None  # kept alive here, for further recordings
    effects: list[Effect]
    places: list[int | None]  # where the walk finds the captured tensors
    strided: str | None  # the line that asks for elements by their place in memory

    def is_of(self, walk: Walk) -> bool:
        """Whether the captured tensors are still the same objects."""
        pairs = zip(self.places, self.tracing.captured, strict=True)
        return all(i is None or walk.tensors[i] is tensor for i, tensor in pairs)


class _Traced:
    """A torch function with what its engine made of it, for each signature."""

    def __init__(self, torch_fun: Callable[..., Any], engine: Engine) -> None:
        self.torch_fun, self.engine = torch_fun, engine
        self._made: dict[Any, _Made] = {}

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any], key: Any) -> Any:
        with enable_x64():
            tree, rows = without_rows(to_jax_tree((args, kwargs), _to_array))
            leaves, structure = Structure.split(tree, is_array)
            arrays = list(map(jnp.asarray, leaves))
            outer = current_call()
            if outer is not None and outer.has_floats and any(a.weak_type and a.ndim == 0 for a in arrays):
                raise FloatsAreStatic
            device = torch.device("cpu") if outer is None else outer.device
            # An argument of the call itself is laid out as its tensor; slices have their elements in order.
            strides = {} if outer is None else outer.strides
            metas = [Meta(torch_dtype(a.dtype), a.shape, device, strides.get(id(a))) for a in arrays]
            walk = Walk(self.torch_fun, structure.fixed)
            once = outer.in_body() if outer is not None else not any(isinstance(a, jax.core.Tracer) for a in arrays)
            grad = outer is None or not once or outer.grad
            mode = _Mode(once, grad, tuple(map(_is_differentiated, arrays)), surroundings())
            form = structure.treedef, structure.moves, tuple(metas), mode
            made = self._made.get((form, walk.key))
            if made is None or not made.is_of(walk):
                if len(self._made) >= _CACHE_SIZE:
                    self._made.pop(next(iter(self._made)))
                written, generators = WrittenContainers(walk), Generators(walk)
                made = self._trace(structure, metas, walk, mode, functools.partial(_is_wanted, outer))
                if generators.put_back():
                    raise frozen_number()
                written.remember()
                self._made[form, Walk(self.torch_fun, structure.fixed).key] = made
            captured = self._captured(made.tracing, outer)
            make_key = functools.partial(_draw_key, key, rows, outer, walk.key, arrays)
            results = made.tracing.call(make_key, [*arrays, *captured])
            count = len(results) - len(made.tracing.mutated)
            self._write_back(made.tracing, len(arrays), results[count:], walk, outer)
            if outer is None:
                for effect in made.effects:
                    effect.apply()
            else:
                outer.effects += made.effects
                outer.strided = outer.strided or made.strided
            return made.unflatten(results[:count])

    def _trace(
        self,
        structure: Structure,
        metas: list[Meta],
        walk: Walk,
        mode: _Mode,
        wants: Callable[[torch.Tensor], bool],
    ) -> _Made:
        torch_fun = self.torch_fun
        shape: list[Structure] = []
        effects: list[Effect] = []
        strided: list[str | None] = []

        def flat(*tensors: Any) -> list[Any]:
            args, kwargs = to_torch_tree(structure.join(tensors))
            watched = Watched(walk)
            for effect in effects:  # a later recording starts where the first one did
                effect.undo()
            try:
                with contextlib.ExitStack() as scope:
                    if not mode.once:
                        scope.enter_context(_NoBatchStatistics(walk))
                    if not mode.grad and self.engine == "record":
                        scope.enter_context(torch.no_grad())
                    result = to_jax_tree(torch_fun(*args, **kwargs))
            except BaseException as error:
                watched.restore()
                if isinstance(error, RuntimeError) and "leaf Variable that requires grad" in str(error):
                    raise TraceError(
                        f"{user_line(error)}: a tensor that requires grad is written to in place. Work on a copy: "
                        ".clone(), or the op that is not in place."
                    ) from error
                if isinstance(error, TypeError) and "FunctionalTensor" in str(error) and is_raised_by_jax(error):
                    raise TraceError(
                        f"{user_line(error)}: JAX code was given a torch tensor. If the function is written in JAX, "
                        "mark it with microtome.torch_api.jax_function; else stay in torch ops there."
                    ) from error
                raise
            found = watched.settle(first=not shape)
            current = recording()
            strided.append(None if current is None else current.strided)
            if not shape:
                effects[:] = found
            outputs, out = Structure.split(result, self._is_tensor)
            if any(isinstance(x, Iterator) for x in out.fixed):
                raise TraceError(
                    f"{user_line()}: the function returns a generator, whose tensors would be made after the trace. "
                    "Return a list."
                )
            shape[:] = [out]
            return outputs

        def unflatten(arrays: Sequence[Any]) -> Any:
            result = shape[0].join(arrays)
            return result if mode.once else jax.tree.map(_as_array, result)

        if self.engine == "record":
            # Inside, a tensor of a trace counts as one of the function's own: those from outside are known here.
            source = Source(flat, [t for t in walk.tensors if is_traced_tensor(t)])
            try:
                tracing: Tracing = TorchFunction(source, metas, mode.tracked, wants, keep=current_call() is None)
            except WrittenArgument as error:
                raise self._written_argument(error.index, structure, walk) from None
        else:
            source, tracing = None, InterpretedFunction(flat, metas, walk.tensors)
        indices = {id(t): i for i, t in enumerate(walk.tensors)}
        captured = [indices.get(id(t)) for t in tracing.captured]
        # The engine torch2jax runs the function only when it is called.
        return _Made(tracing, unflatten, source, effects, captured, strided[0] if strided else None)

    def _written_argument(self, index: int, structure: Structure, walk: Walk) -> TraceError:
        args, kwargs = to_torch_tree(structure.join(map(_Number, itertools.count())))
        named = jax.tree_util.tree_flatten_with_path(bound_arguments(self.torch_fun, args, kwargs))[0]
        name = next(argument_name(path) for path, leaf in named if isinstance(leaf, _Number) and leaf.value == index)
        subject = name if name.startswith("argument ") else f"its argument {name}"
        code = walk.user_code
        where = f"{code.co_filename}:{code.co_firstlineno}: " if code is not None else ""
        return TraceError(
            f"{where}the function writes to {subject} in place, but a traced function leaves its inputs "
            f"as they are. Work on a copy: {name.split('[')[0]}.clone(), or the op that is not in place."
        )

    def _is_tensor(self, leaf: Any) -> bool:
        return isinstance(leaf, torch.Tensor) or (self.engine == "torch2jax" and is_interpreted(leaf))

    def _captured(self, function: Tracing, outer: Call | None) -> list[Any]:
        if outer is None:
            return [tensor_to_array(t) for t in function.captured]
        arrays = []
        for tensor in function.captured:
            if id(tensor) not in outer.tensors:
                outer.missing.append(tensor)
                outer.tensors[id(tensor)] = tensor_to_array(tensor)
            arrays.append(outer.tensors[id(tensor)])
        return arrays

    def _write_back(
        self, function: Tracing, arguments: int, values: Sequence[Any], walk: Walk, outer: Call | None
    ) -> None:
        for i, value in zip(function.mutated, values, strict=True):
            tensor = function.captured[i - arguments]
            if outer is not None and outer.in_body():
                outer.mutations.append((tensor, value))
                outer.tensors[id(tensor)] = value
            elif outer is None and not isinstance(value, jax.core.Tracer):
                with torch.no_grad():
                    tensor.copy_(array_to_tensor(value))
            else:
                raise _no_place_for_updates(tensor, walk)


def _no_place_for_updates(tensor: torch.Tensor, walk: Walk) -> TypeError:
    path, owner = walk.describe(tensor)
    module = f"{type(owner).__name__} " if owner is not None else ""
    return TraceError(
        f"{module}{path!r} is updated in place by the function, but the function runs per example, in microbatches "
        "or in chunks, where one update per call has no meaning (in BatchNorm it would also mix the examples). Call "
        ".eval() on the module, or use a layer without running statistics (GroupNorm, LayerNorm)."
    )


@dataclasses.dataclass(frozen=True)
class _Number:
    """Marks the place of a tensor among the arguments."""

    value: int


class _NoBatchStatistics(TorchFunctionMode):
    """Refuses to update running statistics where the function sees one example or one chunk at a time."""

    def __init__(self, walk: Walk) -> None:
        super().__init__()
        self.walk = walk

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.batch_norm:
            given = dict(zip(("input", "mean", "var", "weight", "bias", "training"), args, strict=False)) | kwargs
            mean = given.get("mean", given.get("running_mean"))
            if given.get("training") and isinstance(mean, torch.Tensor):
                raise _no_place_for_updates(mean, self.walk)
        return func(*args, **kwargs)


def _is_wanted(outer: Call | None, tensor: torch.Tensor) -> bool:
    """Whether the gradient of a captured tensor is asked for."""
    if outer is None or not outer.grad:
        return False
    if id(tensor) in outer.tensors:
        return _is_differentiated(outer.tensors[id(tensor)])
    with torch._C.DisableTorchFunction():
        return tensor.requires_grad


def _is_differentiated(array: Any) -> bool:
    """Whether JAX is differentiating with respect to this array."""
    while isinstance(array, jax.core.Tracer):
        tangent = getattr(array, "tangent", None)
        if tangent is not None and type(tangent) is not ad.Zero:
            return True
        array = getattr(array, "primal", getattr(array, "val", None))
    return False


def _as_array(leaf: Any) -> Any:
    """A result of a function that JAX maps or loops over, a Python number as torch would make a tensor of it."""
    if isinstance(leaf, (bool, int, float, complex)):
        return jnp.asarray(leaf, jax_dtype(torch.tensor(leaf).dtype))
    if not is_array(leaf):
        raise TraceError(
            f"the function returns a {type(leaf).__name__} ({leaf!r}) among its results, where each example or "
            "microbatch returns one: return tensors and numbers only."
        )
    return leaf


def _to_array(leaf: Any) -> Any:
    return tensor_to_array(leaf) if isinstance(leaf, torch.Tensor) else leaf


def _runs_once(outer: Call, arrays: Sequence[Any]) -> bool:
    """Whether the function runs for one row or step only, at most along several directions (``jax.jacfwd``)."""
    if not outer.is_mapped():
        return True
    points = [getattr(a, "primal", a) for a in arrays]
    return any(map(_is_differentiated, arrays)) and all(outer.is_outside(p) for p in points)


def _draw_key(key: Any, rows: Any, outer: Call | None, identity: Any, arrays: Sequence[Any]) -> Any:
    """The raw key of one call of a function: of its own, of its row, or refused."""
    if key is None:
        if outer is None:
            raise ValueError(
                "the torch function draws random numbers: pass key=jax.random.key(seed) to the traced function"
            )
        outer.draws = True
        if rows is None and not _runs_once(outer, arrays):
            raise TraceError(
                "the torch function draws random numbers inside a transform that does not say which row it works on, "
                "so that every row would draw the same. Use the transform of microtome.torch_api, and draw in the "
                "function that it maps (not in transform_fn); or pass the numbers in as an argument."
            )
        key = jax.random.fold_in(outer.key, outer.number(identity))
    elif jnp.issubdtype(key.dtype, jax.dtypes.prng_key) or key.shape != (2,):
        key = jax.random.bits(key, (2,), "uint32")
    if rows is not None:
        key = jax.random.fold_in(key, jnp.ravel(rows)[0])
    return key
