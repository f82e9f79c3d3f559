"""``as_jax``: a torch callable as a JAX-traceable callable."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import torch
from jax.interpreters import ad

from ..jax_impl.program.trees import PyTree
from .base.errors import FloatsAreStatic, TraceError, WrittenArgument, frozen_number
from .base.versions import enable_x64
from .derive.context import Call, Left, current_call, for_every_call
from .derive.functions import Original, TorchFunction
from .derive.primitives import Arrays
from .derive.repeating import check_second_call
from .derive.specialised import Specialised, Tracing
from .effects import bindings, sources
from .effects.dropping import warn_of_dropped, warn_of_moving
from .effects.renumbering import places_in
from .effects.running import FlatFunction, Mode, no_place_for_updates, where
from .effects.side_effects import Generators, Watched
from .memory.dtypes import jax_dtype, torch_dtype
from .memory.trees import (
    Structure,
    argument_name,
    bound_arguments,
    is_array,
    moves,
    to_jax_tree,
    to_torch_tree,
    without_rows,
)
from .memory.values import array_to_tensor, tensor_to_array
from .record.captured import is_traced_tensor
from .record.nodes import Meta
from .torch2jax_engine import InterpretedFunction
from .watch.logs import WrittenContainers, paths_of, written_count
from .watch.names import read_count
from .watch.places import remember_change
from .watch.walk import SOURCE, Walk, surroundings

Engine = Literal["record", "torch2jax"]
_CACHE_SIZE = 64


def as_jax(torch_fun: Callable[..., PyTree], engine: Engine = "record") -> Callable[..., PyTree]:
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

    def fun(*args: PyTree, **kwargs: PyTree) -> PyTree:
        key = None if own_key else kwargs.pop("key", None)
        return traced(args, kwargs, key)

    _wrap(fun, torch_fun)
    return fun


def python_function(fun: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """What has the name, the docstring and the signature of a callable: of a module, its ``forward``."""
    return fun.forward if isinstance(fun, torch.nn.Module) else fun


def _wrap(fun: Any, original: Callable[..., PyTree]) -> None:
    functools.update_wrapper(fun, python_function(original))
    setattr(fun, SOURCE, (fun, original))
    try:
        inspect.signature(fun)
    except ValueError:  # of a builtin
        del fun.__wrapped__
    if isinstance(original, torch.nn.Module):
        fun.__name__ = type(original).__name__


def _parameters(fun: Callable[..., PyTree]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(python_function(fun)).parameters
    except (TypeError, ValueError):
        return {}


class _Traced:
    """A torch function with what its engine made of it, for each signature."""

    def __init__(self, torch_fun: Callable[..., PyTree], engine: Engine) -> None:
        self.torch_fun, self.engine = torch_fun, engine
        self._made: dict[Hashable, Specialised] = {}

    def __call__(self, args: tuple[PyTree, ...], kwargs: dict[str, PyTree], key: jax.Array | None) -> PyTree:
        with enable_x64(), for_every_call():
            tree, rows = without_rows(to_jax_tree((args, kwargs), _to_array))
            leaves, structure = Structure.split(tree, moves)
            arrays = [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in leaves]
            outer = current_call()
            if outer is not None and outer.has_floats and any(a.weak_type and a.ndim == 0 for a in arrays):
                raise FloatsAreStatic
            made, walk = self._find(structure, arrays, outer)
            if outer is not None:
                outer.functions.append(made)
                outer.regains = outer.regains or made.flat.regains
            captured = self._captured(made.tracing, outer)
            make_key = functools.partial(_draw_key, key, rows, outer, walk.key, arrays)
            results = made.tracing.call(make_key, [*arrays, *captured])
            count = len(results) - len(made.tracing.mutated)
            outputs, finals = results[:count], results[count:]
            carried = dict(zip(made.flat.carried, outputs[count - len(made.flat.carried) :], strict=True))
            _write_back(made, arrays, finals, carried, walk, outer)
            _leave(made, arrays, outputs, walk, outer, args, kwargs)
            assert made.flat.shape is not None
            result = made.flat.shape.join(outputs)
            return result if made.flat.mode.once else jax.tree.map(_as_array, result)

    def _find(self, structure: Structure, arrays: list[jax.Array], outer: Call | None) -> tuple[Specialised, Walk]:
        """What was made for this signature, or is made now, and what the function captures."""
        device = torch.device("cpu") if outer is None else outer.device
        # An argument of the call itself is laid out as its tensor; slices have their elements in order.
        strides = {} if outer is None else outer.strides
        metas = [Meta(torch_dtype(a.dtype), a.shape, device, strides.get(id(a))) for a in arrays]
        once = _runs_whole(outer, arrays)
        if once:
            grad = outer is None or (outer.grad and not outer.is_quiet)
        else:  # of a derivative that the call takes, whatever autograd does around it
            grad = outer is None or outer.grad or not (outer.only_maps or outer.is_only_mapped())
        histories = {} if outer is None else outer.histories
        own = tuple(histories.get(id(a)) for a in arrays)
        mode = Mode(once, grad, tuple(map(_is_differentiated, arrays)), own, surroundings())
        form = structure.treedef, structure.moves, tuple(metas), mode
        walk = Walk(self.torch_fun, structure.fixed, form)
        made = self._made.get((form, walk.key))
        if made is None:
            wants = functools.partial(_is_wanted, outer)
            trace: Callable[[Walk], Specialised] = lambda walk: self._trace(structure, metas, walk, mode, wants)
            return self._make(trace, walk, outer), walk
        made.adopt(walk)
        return made, walk

    def _make(self, trace: Callable[[Walk], Specialised], walk: Walk, outer: Call | None) -> Specialised:
        if len(self._made) >= _CACHE_SIZE:
            self._made.pop(next(iter(self._made)))
        written, generators, start = WrittenContainers(walk), Generators(walk), Watched(walk)
        before = written_count(), read_count()
        walk_again: Callable[..., Walk] = lambda *logs: Walk(walk.root, walk.values, walk.form, *logs)
        made = trace(walk)
        try:
            is_repeatable = walk_again().key == walk.key
            moving, made.filled = check_second_call(made, trace, walk, walk_again, written.appended(), is_repeatable)
        except TraceError:
            start.restore()
            raise
        if generators.put_back():
            raise frozen_number()
        warn_of_dropped(made.flat.scratch, walk)
        warn_of_moving(moving, walk)
        filled = paths_of(walk.containers, set(map(id, made.filled)))
        made.logs = written.remember(walk_again, places_in(made.flat.effects, walk.places), filled=filled)
        places = [id(place.owner) for place in walk.places]
        # Of what is left as the function changed it (sets, classes, buffers of bytes) each call has to change it again.
        now = walk_again()
        changes = now.key != walk.key
        if changes and (written_count(), read_count()) != before:  # the key has learned more of the function since
            left = Watched(walk)
            start.restore()
            changes = now.key != walk_again().key or not walk.is_up_to_date()
            left.restore()
        made.flat.changes = changes
        if changes or made.flat.holds_objects:
            (remember_change if outer is None else outer.changing.append)(walk.identity)
        if written_count() != before[0]:  # the key leaves out now what the function was seen to write to
            walk = now
        made.find_in(walk)
        # With names that the function put together there is another key for it.
        if read_count() == before[1] and places == [id(place.owner) for place in walk.places]:
            self._made[walk.form, walk.key] = made
        return made

    def _trace(
        self,
        structure: Structure,
        metas: list[Meta],
        walk: Walk,
        mode: Mode,
        wants: Callable[[torch.Tensor], bool],
    ) -> Specialised:
        flat = FlatFunction(self.torch_fun, structure, walk, mode, self.engine == "torch2jax")
        if self.engine == "record":
            # Inside, a tensor of a trace counts as one of the function's own: those from outside are known here.
            known = [t for t in walk.tensors if is_traced_tensor(t)]
            source = Original(flat, known, walk.may_read_clocks, flat.check_backward)
            try:
                tracing: Tracing = TorchFunction(source, metas, mode.tracked, wants, keep=current_call() is None)
            except WrittenArgument as error:
                raise self._written_argument(error.index, structure, walk) from None
            flat.captured = tracing.captured
        else:
            source, tracing = None, InterpretedFunction(flat, metas, walk.tensors)
        return Specialised(tracing, flat, source)

    def _written_argument(self, index: int, structure: Structure, walk: Walk) -> TraceError:
        args, kwargs = to_torch_tree(structure.join(map(_Number, itertools.count())))
        named = jax.tree_util.tree_flatten_with_path(bound_arguments(self.torch_fun, args, kwargs))[0]
        name = next(argument_name(path) for path, leaf in named if isinstance(leaf, _Number) and leaf.value == index)
        subject = name if name.startswith("argument ") else f"its argument {name}"
        return TraceError(
            f"{where(walk)}the function writes to {subject} in place, but a traced function leaves its inputs "
            f"as they are. Work on a copy: {name.split('[')[0]}.clone(), or the op that is not in place."
        )

    def _captured(self, function: Tracing, outer: Call | None) -> list[jax.Array]:
        if outer is None:
            return [tensor_to_array(t) for t in function.captured]
        arrays = []
        for tensor in function.captured:
            outer.met.add(id(tensor))
            if id(tensor) not in outer.tensors:
                outer.missing.append(tensor)
                outer.tensors[id(tensor)] = tensor_to_array(tensor)
            arrays.append(outer.tensors[id(tensor)])
        return arrays


def _write_back(
    made: Specialised,
    arrays: Arrays,
    values: Arrays,
    carried: dict[int, jax.Array],
    walk: Walk,
    outer: Call | None,
) -> None:
    """Give captured tensors that the function writes to in place their new values."""
    if outer is None and made.tracing.mutated:
        met = dict(enumerate(made.tracing.captured, len(arrays)))
        written = set(made.tracing.mutated).difference(made.tracing.moved)
        bindings.check_apart(met, written, lambda i: walk.describe(met[i])[0])
    for i, value in zip(made.tracing.mutated, values, strict=True):
        position = i - len(arrays)
        tensor = made.tracing.captured[position]
        if not made.flat.mode.once:
            raise no_place_for_updates(tensor, walk)
        if outer is None:
            bindings.assign(tensor, array_to_tensor(value), i in made.tracing.moved)
        else:
            if i in made.tracing.moved:
                outer.moved.add(id(tensor))
            value = carried.get(position, value)
            outer.mutations.append((tensor, value, position in carried))
            outer.tensors[id(tensor)], outer.traced_for = value, object()


def _leave(made: Specialised, arrays: Arrays, outputs: Arrays, walk: Walk, outer: Call | None, *given: Any) -> None:
    """Put what the function leaves behind into its places; a compiled call does so each time that it runs."""
    effects, captured = made.flat.effects, made.tracing.captured
    tensors: dict[sources.Basic, torch.Tensor] = {}

    def basic(source: sources.Basic) -> torch.Tensor:
        if isinstance(source, sources.Given) and source.index >= len(arrays):
            return captured[source.index - len(arrays)]
        if source not in tensors:
            array = (arrays if isinstance(source, sources.Given) else outputs)[source.index]
            # The tensor may be written to, and JAX's arrays may not.
            tensors[source] = array_to_tensor(array, copy=True) if outer is None else outer.stand_in(array)
        return tensors[source]

    if outer is None:
        bindings.leave(effects, walk.places, sources.from_basic(basic))
        return

    within = sources.each_once(
        lambda view: outer.stand_in(view.of_array(outer.tensors[id(basic(view.base))])),
        lambda constant: constant.tensor,
        basic,
    )
    outer.strided = outer.strided or made.flat.strided
    places = walk.places
    arguments = outer.arguments_among(*given) if effects else []
    outer.left += [Left(places, effect, basic, arguments) for effect in effects]
    if made.flat.mode.once:  # the next function that the call runs finds what this one left
        outer.before += bindings.leave(effects, places, within)
        outer.traced_for = object() if effects else outer.traced_for


@dataclasses.dataclass(frozen=True)
class _Number:
    """Marks the place of a tensor among the arguments."""

    value: int


def _runs_whole(outer: Call | None, arrays: Arrays) -> bool:
    """Whether a function runs for the whole call, not per example or in slices."""
    if outer is None:
        return not any(isinstance(a, jax.core.Tracer) for a in arrays)
    return outer.in_body() and not outer.has_rows


def _is_wanted(outer: Call | None, tensor: torch.Tensor) -> bool:
    """Whether the gradient of a captured tensor is asked for."""
    if outer is None or not outer.grad:
        return False
    if id(tensor) in outer.tensors:
        return _is_differentiated(outer.tensors[id(tensor)])
    with torch._C.DisableTorchFunction():
        return tensor.requires_grad


def _is_differentiated(array: object) -> bool:
    """Whether JAX is differentiating with respect to this array."""
    while isinstance(array, jax.core.Tracer):
        tangent = getattr(array, "tangent", None)
        if tangent is not None and type(tangent) is not ad.Zero:
            return True
        array = getattr(array, "primal", getattr(array, "val", None))
    return False


def _as_array(leaf: object) -> PyTree:
    """A result of a function that JAX maps or loops over, a Python number as torch would make a tensor of it."""
    if isinstance(leaf, (bool, int, float, complex)):
        return jnp.asarray(leaf, jax_dtype(torch.tensor(leaf).dtype))
    if not is_array(leaf):
        raise TraceError(
            f"the function returns a {type(leaf).__name__} ({leaf!r}) among its results, where each example or "
            "microbatch returns one: return tensors and numbers only."
        )
    return leaf


def _to_array(leaf: object) -> object:
    return tensor_to_array(leaf) if isinstance(leaf, torch.Tensor) else leaf


def _runs_once(outer: Call, arrays: Arrays) -> bool:
    """Whether the function runs for one row or step only, at most along several directions (``jax.jacfwd``)."""
    if not outer.is_mapped():
        return True
    points = [getattr(a, "primal", a) for a in arrays]
    return any(map(_is_differentiated, arrays)) and all(outer.is_outside(p) for p in points)


def _draw_key(
    key: jax.Array | None, rows: jax.Array | int | None, outer: Call | None, identity: Hashable, arrays: Arrays
) -> jax.Array:
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
