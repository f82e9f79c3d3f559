"""A call before it runs: which arguments are inputs of its program, what it is recognised by, what is known of it."""

from __future__ import annotations

import collections
import copy
import dataclasses
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch

from ...jax_impl.program.trees import PyTree
from ..base import torch_internals as ti
from ..base.errors import FloatsAreStatic, TraceError, user_line, warn
from ..base.user_code import is_partly_users
from ..base.versions import weak_float
from ..derive.context import current_call
from ..effects.renumbering import elsewhere, places_in
from ..effects.side_effects import Watched
from ..memory.devices import forked_child, start_jax
from ..memory.trees import Structure, argument_name, bound_arguments, containers_in, moves, to_jax_tree
from ..memory.values import array_to_tensor, tensor_to_array, unusual_stride
from ..record.captured import is_traced_tensor, recording
from ..record.nodes import History
from ..watch.keys import Key
from ..watch.logs import Logs, WrittenContainers, written_count
from ..watch.names import read_count
from ..watch.places import path_name
from ..watch.walk import Walk, is_traced, surroundings
from .autograd import find_program, is_transformed, keep
from .cache import LOCK, OUTLINES, STATIC_FLOATS
from .compilation import Program, outline
from .flat import Outline, Root

MAPS = "__microtome_maps__"
_AGAIN = 8  # times that a function is looked at anew, because it read by names that do not stand in it
_MANY = 32  # compilations of one function after which a warning names it
_COMPILED: collections.Counter[types.CodeType] = collections.Counter()
_Known = tuple[Outline, list[torch.Tensor]]


def prepare(
    jax_fun: Callable[..., PyTree],
    recompute: bool,
    args: tuple[PyTree, ...],
    kwargs: dict[str, PyTree],
    is_quiet: bool,
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
        kind: type = type(mode)
        if is_partly_users(kind):
            raise TraceError(
                f"{user_line()}: {kind.__name__} is open around a compiled call, and would see none of the "
                "operations in it. Open it inside of the function."
            )
    call = jax_fun, recompute, args, kwargs, is_quiet
    tree = to_jax_tree((args, kwargs))
    if any(type(leaf) is float for leaf in jax.tree.leaves(tree)) and not is_traced(jax_fun) and recording() is None:
        subject = Walk(jax_fun).key, jax.tree.structure(tree)
        if not STATIC_FLOATS.find(subject):
            try:
                return _prepare_as(Structure.split(tree, _moves_or_is_float), *call)
            except (FloatsAreStatic, jax.errors.JAXTypeError):
                STATIC_FLOATS.keep(subject, True)
    return _prepare_as(Structure.split(tree, moves), *call)


def _prepare_as(split: tuple[list[Any], Structure], *call: Any) -> tuple[Root, list[torch.Tensor]]:
    """Prepare a call with these of its arguments as inputs, anew where the function reads by names that it makes up."""
    for again in reversed(range(_AGAIN + 1)):
        prepared = _Preparation(split, *call)
        with LOCK:
            found = prepared.known() or prepared.learn(is_last=not again)
        if found is not None:
            break
    assert found is not None
    seen, hidden = found
    root, tensors = prepared.root(hidden)
    root.outline = seen
    return root, tensors


class _Preparation:
    """A call before it runs: what it is recognised by, and what is known of it."""

    def __init__(
        self,
        split: tuple[list[Any], Structure],
        jax_fun: Callable[..., PyTree],
        recompute: bool,
        args: tuple[PyTree, ...],
        kwargs: dict[str, PyTree],
        is_quiet: bool,
    ) -> None:
        leaves, self.structure = split
        self.fun, self.args, self.kwargs, self.recompute, self.is_quiet = jax_fun, args, kwargs, recompute, is_quiet
        if any(isinstance(leaf, torch.Tensor) and leaf.is_nested for leaf in leaves):
            _check_arguments(jax_fun, args, kwargs)
        device = next((leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)), None)
        self.arguments = [_tensor(leaf, device) for leaf in leaves]
        _check_classes(self.arguments)
        self.floats = frozenset(i for i, leaf in enumerate(leaves) if type(leaf) is float)
        strides = tuple(map(unusual_stride, self.arguments))
        self.grad = torch.is_grad_enabled()
        with torch._C.DisableTorchFunction():
            forms = tuple((t.dtype, t.shape, t.device, self.grad and t.requires_grad) for t in self.arguments)
        structure = self.structure.treedef, self.structure.moves, self.floats
        self.only_maps = is_mapping(jax_fun)
        fixed = *structure, recompute, surroundings(), strides, is_quiet, self.only_maps
        self.forms = forms, self.grad
        self.walk = Walk(jax_fun, self.structure.fixed, (fixed, self.forms))
        _check_parametrizations(self.walk)
        with torch._C.DisableTorchFunction():
            self.histories = tuple(map(History.of, self.arguments)) if self.walk.asks_history else ()
        self.fixed = *fixed, self.histories

    def walk_again(self, logs: Logs | None = None) -> Walk:
        """What the function captures now."""
        return Walk(self.fun, self.structure.fixed, self.walk.form, logs)

    @property
    def signature(self) -> Key:
        """What the call is recognised by."""
        return Key.of((self.walk.key, self.fixed, *self.forms))

    def known(self) -> _Known | None:
        """What an earlier call has shown, if the captured tensors are there that only its trace met."""
        found = OUTLINES.find(self.signature)
        if found is None:
            return None
        hidden = [t for t in (ref() for ref in found[1]) if t is not None]
        return (found[0], hidden) if len(hidden) == len(found[1]) else None

    def learn(self, is_last: bool) -> _Known | None:
        """Trace the call and keep what it shows; None where the function is to be looked at anew."""
        if recording() is None:
            _check_arguments(self.fun, self.args, self.kwargs)
            _check_captured(self.walk)
        containers = WrittenContainers(self.walk)
        written, read, start = written_count(), read_count(), Watched(self.walk)
        hidden: list[torch.Tensor] = []
        while True:
            seen = program = None
            try:
                root, tensors = self.root(hidden)
                program = None if is_transformed(tensors) else find_program(root, tensors)
                seen = outline(root, tensors) if program is None else program.outline
            except Exception:
                if read_count() == read or is_last:
                    start.restore()
                    raise
            if read_count() != read and not is_last:  # names that it puts together are followed from now on
                if not self._stays(start, seen if program is not None else None):
                    return None
                break
            assert seen is not None
            if not seen.missing:
                break
            hidden += seen.missing
        assert seen is not None
        containers.remember(self.walk_again, places_in(seen.effects, self.walk.places), seen.logs, seen.filled)
        if written_count() != written:  # the key leaves out now what the function was seen to write to
            seen = self._follow_logs(seen, program, hidden)
        OUTLINES.keep(self.signature, (seen, [weakref.ref(t) for t in hidden]))
        _warn_of_many(self.walk)
        return seen, hidden

    def _follow_logs(self, seen: Outline, program: Program | None, hidden: list[torch.Tensor]) -> Outline:
        """What was seen, for the walk that leaves out the lists which the function appends to."""
        walk = self.walk_again()
        effects = elsewhere(seen.effects, self.walk.places, walk.places)
        if effects is None:
            return seen
        self.walk = walk
        seen = dataclasses.replace(seen, effects=effects, logs=frozenset(walk.left_out))
        if program is not None:
            program = copy.copy(program)
            program.outline = seen
            keep(program, *self.root(hidden))
        return seen

    def _stays(self, start: Watched, seen: Outline | None) -> bool:
        """Whether the key is the same with the names that the function was seen to put together; else start again.

        What the function has changed for good it would change twice, and what was traced serves for this call alone.
        """
        left = Watched(self.walk)
        start.restore()
        now = self.walk_again()
        is_same = (now.key, now.asks_history) == (self.walk.key, self.walk.asks_history)
        stays = seen is not None and not seen.missing and (is_same or bool(seen.changing))
        if stays:
            left.restore()
        return stays

    def root(self, hidden: list[torch.Tensor]) -> tuple[Root, list[torch.Tensor]]:
        """The call as a flat function, and its inputs; ``hidden`` are captured tensors that only its trace met."""
        captured = [*self.walk.tensors, *hidden]
        key = self.walk.key, self.fixed
        root = Root(key, self._body, self.arguments, captured, self.walk, self.recompute, self.is_quiet)
        root.has_floats, root.histories, root.static = bool(self.floats), self.histories, self.structure.fixed
        root.only_maps = self.only_maps
        return root, list(map(ti.unwrap_if_dead, root.inputs))  # state may be left by a transform that is over

    def _body(self, *arrays: jax.Array) -> PyTree:
        leaves = (weak_float(a) if i in self.floats else a for i, a in enumerate(arrays))
        args, kwargs = self.structure.join(leaves)
        call = current_call()
        assert call is not None
        call.arguments = containers_in(args, kwargs)
        return self.fun(*args, **kwargs)


def is_mapping(fun: Callable[..., PyTree]) -> bool:
    """Whether a JAX function is marked as one that takes no derivatives of its own."""
    return getattr(fun, "__dict__", {}).get(MAPS) is fun


def _check_classes(arguments: Sequence[torch.Tensor]) -> None:
    for kind in {type(t) for t in arguments}:
        if ti.has_own_function(kind):
            raise TypeError(
                f"{user_line()}: an argument is a {kind.__name__}, a tensor with a __torch_function__ of its own, "
                "which a compiled call would pass over. Let the function capture it, or pass "
                "x.as_subclass(torch.Tensor)."
            )


def _check_parametrizations(walk: Walk) -> None:
    if ti.parametrizations_are_cached() and any(map(torch.nn.utils.parametrize.is_parametrized, walk.modules)):
        raise TraceError(
            "parametrize.cached() is open around the call of a function with parametrized modules, which computes them "
            "at each call, and so would not use what is cached. Open it inside of the function."
        )


def _warn_of_many(walk: Walk) -> None:
    code = walk.user_code
    if code is None:
        return
    _COMPILED[code] += 1
    if _COMPILED[code] == _MANY:
        where = f"{code.co_name} ({code.co_filename}:{code.co_firstlineno})"
        warn(
            f"{where} has been compiled {_MANY} times: shapes, static arguments or captured Python values change "
            "between calls. Pass numbers that change as 0-d tensors, and keep shapes fixed (pad the last batch).",
        )


def _check_arguments(jax_fun: Callable[..., PyTree], args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> None:
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


def _moves_or_is_float(leaf: object) -> bool:
    return type(leaf) is float or moves(leaf)


def _tensor(leaf: object, device: torch.device | None) -> torch.Tensor:
    if isinstance(leaf, torch.Tensor):
        return leaf
    if type(leaf) is float:
        return torch.tensor(leaf, dtype=torch.float64, device=device)
    return array_to_tensor(leaf) if isinstance(leaf, jax.Array) else torch.as_tensor(leaf)
