"""``as_torch``: a JAX callable as a torch callable, compiled once per signature and part of torch's autograd."""

from __future__ import annotations

import collections
import dataclasses
import functools
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import torch

from ..base import torch_internals as ti
from ..base.errors import FloatsAreStatic, TraceError, located, user_line
from ..base.user_code import is_partly_users
from ..base.versions import weak_float
from ..effects.bindings import Basic, Bound, Effect, Given, entries, from_basic, is_row, leave, span
from ..effects.side_effects import Watched
from ..memory.devices import forked_child, start_jax
from ..memory.trees import Structure, argument_name, bound_arguments, moves, to_jax_tree, to_torch_tree
from ..memory.values import array_to_tensor, tensor_to_array, unusual_stride
from ..record.captured import Captured, is_traced_tensor, recording
from ..record.nodes import History
from ..watch.keys import Key
from ..watch.names import read_count
from ..watch.places import Place, WrittenContainers, path_name, remember_change, written_count
from ..watch.walk import Walk, is_traced, surroundings
from .autograd import apply, find_program, is_transformed, keep
from .cache import CALLS, LOCK, STATIC_FLOATS
from .compilation import outline
from .flat import Outline, Root

_MADE = "__microtome_made__"
_MAPS = "__microtome_maps__"
_AGAIN = 8  # times that a function is looked at anew, because it read by names that do not stand in it
_MANY = 32  # compilations of one function after which a warning names it
_COMPILED: collections.Counter[Any] = collections.Counter()


def as_torch(jax_fun: Callable[..., Any], *, recompute: bool = False) -> Callable[..., Any]:
    """A JAX callable as a torch callable: ``to_torch(jax.jit(jax_fun)(*to_jax(args)))``, and part of torch's autograd.

    Compiled once for each signature: structure, dtypes and shapes of the arguments, values of the static ones (ints,
    bools, strings, None), and what the function captures. Floats are inputs, unless the function branches on one or
    hands it to torch code: then they are static too. Tensors that torch functions inside capture are
    inputs of the program, read at each call, and receive gradients. The computation runs on the tensors' device.
    64-bit types are on, so that dtypes are torch's: JAX code that makes arrays of its own gets 64-bit ones by default.

    Args:
        jax_fun: a function of pytrees of arrays, such as ``jax.grad(as_jax(loss))`` or a JAX library's.
        recompute: keep no residuals and compile a backward pass only when one runs, which then starts from the inputs.
            For functions whose results are rarely differentiated, such as gradients.

    Returns:
        The torch callable, with the signature of ``jax_fun``. Outputs carry a ``grad_fn`` when an input or a captured
        tensor requires grad; the backward pass is compiled too, and can be differentiated again. ``torch.func``, dual
        numbers and batched backward passes work around it; they start from the inputs, with no residuals.

    Raises:
        TypeError, ValueError: for tensors that XLA cannot take, on mixed devices, or on a device without a JAX backend.
        IndexError: on the CPU, for an index out of range in a torch function.

    >>> import torch
    >>> from microtome.bridge import as_torch
    >>> import jax.numpy as jnp
    >>> x = torch.tensor([1.0, 2.0], requires_grad=True)
    >>> as_torch(lambda a: jnp.sum(a ** 3))(x).backward()
    >>> x.grad
    tensor([ 3., 12.])
    """
    ti.load_dynamo()

    def fun(*args: Any, **kwargs: Any) -> Any:
        return _call(jax_fun, recompute, args, kwargs)

    functools.update_wrapper(fun, jax_fun)
    setattr(fun, _MADE, (fun, jax_fun))
    fun.compiled = lambda *args, **kwargs: find_program(*_prepare(jax_fun, recompute, args, kwargs))  # type: ignore[attr-defined]
    return fun


def only_maps(jax_fun: Callable[..., Any], inner: Callable[..., Any]) -> None:
    """Mark a JAX function that runs a torch function in slices or steps and takes no derivatives of its own."""
    if is_traced(inner):  # one written in JAX may take any
        setattr(jax_fun, _MAPS, jax_fun)


def made_from(fun: Any) -> Any:
    """The JAX function of which ``as_torch`` made this very function, or None."""
    mark = getattr(fun, "__dict__", {}).get(_MADE)
    return mark[1] if mark is not None and mark[0] is fun else None


@ti.disable_dynamo  # torch.compile breaks its graph here
def _call(jax_fun: Callable[..., Any], recompute: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        root, tensors = _prepare(jax_fun, recompute, args, kwargs)
        assert root.outline is not None
        if root.outline.regains and not torch.is_grad_enabled():
            with torch.enable_grad():
                return _run(*_prepare(jax_fun, recompute, args, kwargs, is_quiet=True))
    except (TypeError, ValueError) as error:
        raise located(error) from error.__cause__
    return _run(root, tensors)


def _run(root: Root, tensors: list[torch.Tensor]) -> Any:
    assert root.outline is not None
    outer = recording()
    key: Any = None
    if outer is None:
        key = _new_key(root.outline.draws)
    else:
        _check_inside(root.outline)
        if root.outline.draws:
            key = outer.recorder.draw_number()
    if root.outline.strided is not None:
        _check_contiguous(root, outer)
    if root.outline.mutated or root.outline.carried:
        _check_apart(root)
    places = root.walk.places if root.outline.effects else []
    root.before = entries(root.outline.effects, places)
    outputs = apply(root, key, tensors)
    _leave(root, places, outputs)
    if root.outline.changing:
        for identity in (*root.outline.changing, root.walk.identity):
            remember_change(identity)
    return to_torch_tree(root.outline.shape.join(outputs))


def _leave(root: Root, places: list[Place], outputs: Sequence[Any]) -> None:
    """Put what the call leaves behind into its places."""
    left = root.outline
    assert left is not None
    for i, result in left.carried:
        root.inputs[i].copy_(outputs[result])

    def tensor(source: Basic) -> Any:
        if isinstance(source, Given):
            return root.inputs[source.index]
        # A call that torch.func.vmap runs for each row gives no more than its results.
        return outputs[source.index] if left.results == len(outputs) else None

    def is_kept(effect: Effect) -> bool:
        bases = effect.after.bases if isinstance(effect.after, Bound) else ()
        return not any(tensor(base) is None or is_row(tensor(base)) for base in bases)

    leave(list(filter(is_kept, left.effects)), places, from_basic(tensor))


def _prepare(
    jax_fun: Callable[..., Any],
    recompute: bool,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    is_quiet: bool = False,
) -> tuple[Root, list[torch.Tensor]]:
    """The call as a flat function with its outline, and its inputs."""
    if forked_child():
        raise RuntimeError(
            "microtome was called in a process forked after JAX had started (a DataLoader worker, say), where XLA "
            "would hang. Call it in the parent, or start workers with multiprocessing_context='spawn'."
        )
    start_jax()
    if ti.proxies_are_active() and recording() is None:
        raise TraceError(
            "make_fx, torch.export and torch.func.linearize cannot look into a compiled call, and would take its "
            "result for a constant. Use torch.func.jvp or vjp, or leave the call out of what they trace."
        )
    for mode in ti.open_modes():
        kind: Any = type(mode)
        if is_partly_users(kind):
            raise TraceError(
                f"{user_line()}: {kind.__name__} is open around a compiled call, and would see none of the "
                "operations in it. Open it inside of the function."
            )
    tree = to_jax_tree((args, kwargs))
    if any(type(leaf) is float for leaf in jax.tree.leaves(tree)) and not is_traced(jax_fun) and recording() is None:
        subject = Walk(jax_fun).key, jax.tree.structure(tree)
        if not STATIC_FLOATS.find(subject):
            try:
                return _prepare_as(
                    jax_fun, recompute, args, kwargs, Structure.split(tree, _moves_or_is_float), is_quiet
                )
            except (FloatsAreStatic, jax.errors.JAXTypeError):
                STATIC_FLOATS.keep(subject, True)
    return _prepare_as(jax_fun, recompute, args, kwargs, Structure.split(tree, moves), is_quiet)


def _prepare_as(
    jax_fun: Callable[..., Any],
    recompute: bool,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    split: tuple[list[Any], Structure],
    is_quiet: bool,
    again: int = _AGAIN,
) -> tuple[Root, list[torch.Tensor]]:
    leaves, structure = split
    if any(isinstance(leaf, torch.Tensor) and leaf.is_nested for leaf in leaves):
        _check_arguments(jax_fun, args, kwargs)
    device = next((leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)), None)
    arguments = [_tensor(leaf, device) for leaf in leaves]
    for kind in {type(t) for t in arguments}:
        if ti.has_own_function(kind):
            raise TypeError(
                f"{user_line()}: an argument is a {kind.__name__}, a tensor with a __torch_function__ of its own, "
                "which a compiled call would pass over. Let the function capture it, or pass "
                "x.as_subclass(torch.Tensor)."
            )
    floats = tuple(i for i, leaf in enumerate(leaves) if type(leaf) is float)
    walk = Walk(jax_fun, structure.fixed)
    if ti.parametrizations_are_cached() and any(map(torch.nn.utils.parametrize.is_parametrized, walk.modules)):
        raise TraceError(
            "parametrize.cached() is open around the call of a function with parametrized modules, which computes them "
            "at each call, and so would not use what is cached. Open it inside of the function."
        )
    strides = tuple(map(unusual_stride, arguments))
    with torch._C.DisableTorchFunction():
        histories = tuple(map(History.of, arguments)) if walk.asks_history else ()
    fixed = structure.treedef, structure.moves, floats, recompute, surroundings(), strides, histories, is_quiet

    def body(*arrays: Any) -> Any:
        args, kwargs = structure.join(weak_float(a) if i in floats else a for i, a in enumerate(arrays))
        return jax_fun(*args, **kwargs)

    def prepared(hidden: list[torch.Tensor]) -> tuple[Root, list[torch.Tensor]]:
        root = Root((walk.key, fixed), body, arguments, [*walk.tensors, *hidden], walk, recompute, is_quiet)
        root.has_floats, root.histories = bool(floats), histories
        root.only_maps = getattr(jax_fun, "__dict__", {}).get(_MAPS) is jax_fun
        return root, list(map(ti.unwrap_if_dead, root.inputs))  # state may be left by a transform that is over

    grad = torch.is_grad_enabled()
    with torch._C.DisableTorchFunction():
        forms = tuple((t.dtype, t.shape, t.device, grad and t.requires_grad) for t in arguments)
    signature = Key.of((walk.key, fixed, forms, grad))
    with LOCK:
        found = CALLS.find(signature)
        hidden = [] if found is None else [t for t in (ref() for ref in found[1]) if t is not None]
        if found is None or len(hidden) < len(found[1]):
            if recording() is None:
                _check_arguments(jax_fun, args, kwargs)
                _check_captured(walk)
            containers, written, read = WrittenContainers(walk.identity, walk.containers), written_count(), read_count()
            watched = Watched(walk)
            hidden = []
            while True:
                root, tensors = prepared(hidden)
                program = None
                try:
                    program = None if is_transformed(tensors) else find_program(root, tensors)
                    seen = outline(root, tensors) if program is None else program.outline
                except Exception:
                    if read_count() == read or not again:
                        raise
                if read_count() != read and again:  # names that it puts together are followed from now on
                    left = Watched(walk)
                    watched.restore()
                    now, is_done = Walk(jax_fun, structure.fixed), program is not None and not seen.missing
                    if is_done and (now.key, now.asks_history) == (walk.key, walk.asks_history):
                        left.restore()
                        break
                    return _prepare_as(jax_fun, recompute, args, kwargs, split, is_quiet, again - 1)
                if not seen.missing:
                    break
                hidden += seen.missing
            containers.remember()
            if written_count() != written:  # the key leaves out now what the function was seen to write to
                before, walk = walk, Walk(jax_fun, structure.fixed)
                signature = Key.of((walk.key, fixed, forms, grad))
                seen = dataclasses.replace(seen, effects=_elsewhere(seen.effects, before.places, walk.places))
                if program is not None:
                    keep(program, *prepared(hidden))
            found = seen, [weakref.ref(t) for t in hidden]
            CALLS.keep(signature, found)
            _warn_of_many(walk)
    root, tensors = prepared(hidden)
    root.outline = found[0]
    return root, tensors


def _elsewhere(effects: Sequence[Effect], before: Sequence[Place], places: Sequence[Place]) -> list[Effect]:
    """The effects by the number of their places in another walk, which leaves out lists that a function appends to."""
    numbers = {id(place.owner): i for i, place in enumerate(places)}
    found = [(effect, numbers.get(id(before[effect.place].owner))) for effect in effects]
    return [dataclasses.replace(effect, place=i) for effect, i in found if i is not None]


def _check_inside(outline: Outline) -> None:
    """A call in a function that is being traced may compute, but not leave anything behind."""
    if outline.mutated or outline.carried or outline.effects:
        raise TraceError(
            f"{user_line()}: a compiled call inside a traced function updates buffers or Python state there, which "
            "would be lost. Call the torch function itself instead, or put the module into .eval() mode."
        )


def _check_apart(root: Root) -> None:
    """Refuse a write to a tensor whose memory another one shows too: the program has them as two."""
    assert root.outline is not None
    written = {*root.outline.mutated, *(i for i, _ in root.outline.carried)} - root.outline.moved
    with torch._C.DisableTorchFunction():
        spans = {
            i: (t.untyped_storage().data_ptr(), *span(t))
            for i, t in ((i, root.inputs[i]) for i in root.outline.met)
            if t.numel() and not is_traced_tensor(t)
        }
    for i in written & spans.keys():
        memory, start, end = spans[i]
        for j, (other, first, last) in spans.items():
            if j != i and other == memory and first < end and start < last:
                raise TraceError(
                    f"the function writes in place to {_input_name(root, i)}, whose memory {_input_name(root, j)} "
                    "shows too, and would not see there what was written. Make one of the other inside of the "
                    "function, or write to a copy."
                )


def _input_name(root: Root, i: int) -> str:
    if i < root.count:
        return f"tensor argument {i}"
    path = root.walk.paths[i - root.count] if i - root.count < len(root.walk.paths) else None
    return path_name(path) or "a captured tensor"


def _check_contiguous(root: Root, outer: Captured | None) -> None:
    """``as_strided`` counts in memory, where the program has each tensor in order."""
    assert root.outline is not None
    if outer is not None:
        outer.strided = outer.strided or root.outline.strided
    elif not all(t.is_contiguous() and t.storage_offset() == 0 for t in root.inputs):
        raise TraceError(
            f"{root.outline.strided}: as_strided in a call with a tensor that is not contiguous, or a part of another, "
            "counts in memory that the compiled program does not see. Pass copies of such tensors: "
            ".clone(memory_format=torch.contiguous_format)."
        )


def _warn_of_many(walk: Walk) -> None:
    code = walk.user_code
    if code is None:
        return
    _COMPILED[code] += 1
    if _COMPILED[code] == _MANY:
        where = f"{code.co_name} ({code.co_filename}:{code.co_firstlineno})"
        warnings.warn(
            f"{where} has been compiled {_MANY} times: shapes, static arguments or captured Python values change "
            "between calls. Pass numbers that change as 0-d tensors, and keep shapes fixed (pad the last batch).",
            stacklevel=4,
        )


def _check_arguments(jax_fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Name the argument that holds a tensor which XLA cannot take, before anything is traced."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(to_jax_tree(bound_arguments(jax_fun, args, kwargs)))[0]:
        if isinstance(leaf, torch.Tensor) and not is_traced_tensor(leaf):
            try:
                with ti.temporarily_clear_interpreter_stack():
                    tensor_to_array(leaf)
            except (TypeError, ValueError) as error:
                raise type(error)(f"{argument_name(path)}: {error}") from None


def _check_captured(walk: Walk) -> None:
    for tensor, path in zip(walk.tensors, walk.paths, strict=True):
        if not is_traced_tensor(tensor):
            try:
                with ti.temporarily_clear_interpreter_stack():  # torch.func would wrap what it is shown
                    tensor_to_array(tensor)
            except (TypeError, ValueError) as error:
                raise type(error)(f"{path_name(path)}, which the function captures: {error}") from None


def _moves_or_is_float(leaf: Any) -> bool:
    return type(leaf) is float or moves(leaf)


def _tensor(leaf: Any, device: torch.device | None) -> torch.Tensor:
    if isinstance(leaf, torch.Tensor):
        return leaf
    if type(leaf) is float:
        return torch.tensor(leaf, dtype=torch.float64, device=device)
    return array_to_tensor(leaf) if isinstance(leaf, jax.Array) else torch.as_tensor(leaf)


def _new_key(draws: bool) -> np.ndarray:
    """A key from torch's default generator, taken only if the program draws."""
    if not draws:
        return np.zeros(2, np.uint32)
    with ti.temporarily_clear_interpreter_stack():  # torch.func.vmap decides by itself what its rows share
        return torch.randint(0, 2**32, (2,), dtype=torch.int64).numpy().astype(np.uint32)
