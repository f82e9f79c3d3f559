"""A torch function as one of flat tensors: the engines run it for a trace, and again for derivatives of it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from ...jax_impl.program.trees import Function
from ..base.errors import TraceError, WrittenLeaf, is_raised_by_jax, noting_line, user_line
from ..lowerings.signatures import Arguments, Keywords
from ..memory.trees import Structure, containers_in, to_jax_tree, to_torch_tree
from ..memory.values import is_interpreted
from ..record.captured import recording
from ..record.nodes import History
from ..watch.flags import answering, leaving_switches
from ..watch.names import HISTORY, remember_read
from ..watch.places import read_entry, write
from ..watch.walk import Walk
from ..watch.watching import watching, watching_fields
from .bindings import UNKNOWN, Effect, Results, unwrapped, whole_memory
from .containers import Bound
from .escapes import opening, traced_tensor_in
from .side_effects import ArgumentContainers, Scratch, Watched
from .sources import Made, View


@dataclasses.dataclass(frozen=True)
class Mode:
    """How a function runs: what torch would show it, besides the arguments."""

    once: bool  # for the whole call, not per example or in chunks
    grad: bool  # whether autograd records
    tracked: tuple[bool, ...]  # which arguments are differentiated
    histories: tuple[History | None, ...]  # of the arguments, where they are known and asked for
    surroundings: Hashable


class FlatFunction:
    """Flat tensors to what the function returns, then what it leaves behind."""

    def __init__(
        self, torch_fun: Callable[..., object], structure: Structure, walk: Walk, mode: Mode, is_interpreted: bool
    ) -> None:
        self._torch_fun, self._structure, self.mode = torch_fun, structure, mode
        self.arguments = sum(structure.moves)
        self._is_interpreted = is_interpreted
        self.walk = walk
        self.shape: Structure | None = None  # of what it returns
        self.effects: list[Effect] = []
        self.scratch: list[Scratch] = []
        self.carried: list[int] = []  # captured tensors that were written to in place, with a history in autograd
        self.regains = False  # whether results have a history though autograd is off
        self.holds_objects = False  # whether it keeps objects that no call could make again
        self.changes = False  # whether it changes what its effects do not put back
        self.strided: str | None = None  # the line that asks for elements by their place in memory
        self.captured: list[torch.Tensor] | None = None  # set when the function has been traced
        self._before_backward: Watched | None = None

    def __call__(self, *tensors: Any) -> list[Any]:
        watched = Watched(self.walk)
        if self.captured is None:
            try:
                results = self._run_first(tensors, watched)
            except BaseException:
                watched.restore()
                raise
        else:
            try:
                results = self._run_again(tensors, watched)
            finally:
                watched.restore()
        self._before_backward = None if self._is_interpreted else Watched(self.walk)
        return results

    def check_backward(self) -> None:
        """Refuse what a hook or a custom backward pass has written, which is recorded after the function has run."""
        watched, self._before_backward = self._before_backward, None
        written = None if watched is None else watched.written()
        if written is not None:
            raise TraceError(
                f"{where(self.walk)}a hook or a backward pass of the function writes to {written}, which it would do "
                "once, while it is traced. Return what is to be kept from the function, or take the hook away."
            )

    def _run_first(self, tensors: Sequence[Any], watched: Watched) -> list[Any]:
        args, kwargs = to_torch_tree(self._structure.join(tensors))
        returned, shape = Structure.split(self._run(tensors, args, kwargs), self._is_tensor)
        watched.check()
        current = None if self._is_interpreted else recording()
        if current is not None:
            current.check_arrays(array for _, array in self.walk.arrays)
        results = Results(tensors, returned, current, self.mode.once, containers_in(args, kwargs))
        self.effects, self.scratch = watched.settle(results, first=self.shape is None)
        self.holds_objects = results.holds_objects
        self._check_returned(shape)
        self.shape = shape
        if current is None:
            return results.tensors
        self.strided = current.strided
        if not self.mode.once:
            return results.tensors
        if not self.mode.grad:
            with torch._C.DisableTorchFunction():
                self.regains = any(t.grad_fn is not None for t in results.tensors)
        stand_ins = [current.stand_ins[id(t)] for t in current.tensors]
        with torch._C.DisableTorchFunction():
            self.carried = [i for i, t in enumerate(stand_ins) if t._version and t.grad_fn is not None]
        return [*results.tensors, *(stand_ins[i] for i in self.carried)]

    def _check_returned(self, shape: Structure) -> None:
        """Refuse what no call could make again: an object with tensors that each call has anew."""
        for x in shape.fixed:
            if isinstance(x, Iterator):
                raise TraceError(
                    f"{where(self.walk)}the function returns a generator, whose tensors would be made after the "
                    "trace. Return a list."
                )
            path = traced_tensor_in(x)
            if path is not None:
                kind = type(x).__name__
                raise TraceError(
                    f"{where(self.walk)}the function returns an object of type {kind}, which is no pytree and holds a "
                    f"tensor of the trace, without values ({kind}{path}). Return the tensors in a tuple, list, dict or "
                    "dataclass, register the type (torch.utils._pytree.register_pytree_node), or leave it out (a cache "
                    "of transformers by use_cache=False)."
                )

    def _run_again(self, tensors: Sequence[Any], watched: Watched) -> list[Any]:
        """For a derivative: the same results, from the same start."""
        assert self.captured is not None
        for effect in self.effects:
            if effect.before is not UNKNOWN:
                write(watched.places[effect.place], effect.key, effect.before)
        if self.changes and not self.walk.is_up_to_date():
            raise no_derivative_again(self.walk)
        again = self._run(tensors, *to_torch_tree(self._structure.join(tensors)))
        returned = Structure.split(again, self._is_tensor)[0]
        left: dict[int, torch.Tensor | None] = {}
        bound = [(e, e.after) for e in self.effects if isinstance(e.after, Bound)]
        for effect, after in bound:
            found = read_entry(watched.places[effect.place], effect.key)
            for source, tensor in ((source, unwrapped(t)) for source, t in after.tensors(found)):
                if isinstance(source, Made):
                    left[source.index] = tensor
                elif isinstance(source, View) and isinstance(source.base, Made):
                    with torch._C.DisableTorchFunction():
                        left.setdefault(source.base.index, whole_memory(tensor))
        extra = [left[i] for i in sorted(left) if i >= len(returned)]
        carried = [self.captured[i] for i in self.carried]
        return [*returned, *extra, *(t.view_as(t) for t in carried)]

    def _run(self, tensors: Sequence[Any], args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        containers = ArgumentContainers(args, kwargs)
        current = recording()
        if current is not None:
            pairs = zip(tensors, self.mode.histories, strict=True)
            current.enables_grad = self._note_autograd
            current.histories = {id(t): history for t, history in pairs if history is not None}
            for tensor, history in zip(tensors, self.mode.histories, strict=True):
                if not self.mode.grad and history is not None and history.requires_grad:  # it may switch autograd on
                    tensor.requires_grad_()
        try:
            with contextlib.ExitStack() as scope:
                scope.enter_context(noting_line())
                if self._is_interpreted:
                    scope.enter_context(watching(self.walk.may_read_clocks))
                else:
                    scope.enter_context(answering(self._flags()))
                    scope.enter_context(watching_fields(self.walk.classes, self.walk.names))
                if not self.mode.once:
                    scope.enter_context(_NoBatchStatistics(self.walk))
                if not self.mode.grad and not self._is_interpreted:
                    scope.enter_context(torch.no_grad())
                    if current is not None:  # whose end is no doing of the function's
                        scope.callback(setattr, current, "enables_grad", lambda: None)
                scope.enter_context(leaving_switches())
                result = to_jax_tree(self._torch_fun(*args, **kwargs), opening(p.owner for p in self.walk.places))
            if self.mode.once:  # per example torch.func makes copies too
                containers.check(where(self.walk))
            return result
        except RuntimeError as error:
            if "leaf Variable that requires grad" not in str(error):
                raise
            raise WrittenLeaf(
                f"{user_line(error)}: a tensor that requires grad is written to in place. Work on a copy: "
                ".clone(), or the op that is not in place."
            ) from error
        except TypeError as error:
            if "FunctionalTensor" not in str(error) or not is_raised_by_jax(error):
                raise
            raise TraceError(
                f"{user_line(error)}: JAX code was given a torch tensor. If the function is written in JAX, "
                "mark it with microtome.torch_api.jax_function; else stay in torch ops there."
            ) from error

    def _flags(self) -> dict[str, object]:
        """What torch's switches say: within a derivative, autograd records whatever the caller does."""
        in_derivative = self.mode.grad and not self.mode.once
        name = "is_inference_mode_enabled"
        return self.walk.flags | ({name: False} if in_derivative and name in self.walk.flags else {})

    def _note_autograd(self) -> None:
        """The function switches autograd on: what its arguments have there matters, whatever the caller has."""
        code = self.walk.user_code
        if self.mode.once and not self.mode.grad and code is not None:
            remember_read(code, (HISTORY,))

    def _is_tensor(self, leaf: object) -> bool:
        return isinstance(leaf, torch.Tensor) or (self._is_interpreted and is_interpreted(leaf))


def no_derivative_again(walk: Walk) -> TraceError:
    """Return the refusal of a derivative for which a function would run from another start than its call did."""
    return TraceError(
        f"{where(walk)}a derivative that starts from the inputs runs the function again, which changes Python objects "
        "that it captures. Keep what changes in numbers or tensors, or call it without recompute=True and second "
        "derivatives."
    )


def where(walk: Walk) -> str:
    """Where the user's function begins, in front of a message about the whole of it."""
    code = walk.user_code
    return f"{code.co_filename}:{code.co_firstlineno}: " if code is not None else ""


class _NoBatchStatistics(TorchFunctionMode):
    """Refuses to update running statistics where the function sees one example or one chunk at a time."""

    def __init__(self, walk: Walk) -> None:
        super().__init__()
        self.walk = walk

    def __torch_function__(
        self, func: Function, types: Sequence[type], args: Arguments = (), kwargs: Keywords | None = None
    ) -> object:
        kwargs = kwargs or {}
        if func is F.batch_norm:
            given = dict(zip(("input", "mean", "var", "weight", "bias", "training"), args, strict=False)) | kwargs
            mean = given.get("mean", given.get("running_mean"))
            if given.get("training") and isinstance(mean, torch.Tensor):
                raise no_place_for_updates(mean, self.walk)
        return func(*args, **kwargs)


NO_MEANING = (
    "but the function runs per example, in microbatches or in chunks (or in a jax.jit of your own), where one update "
    "per call has no meaning"
)


def no_place_for_updates(tensor: torch.Tensor, walk: Walk) -> TraceError:
    """The refusal to write to a captured tensor in place."""
    path, owner = walk.describe(tensor)
    module = f"{type(owner).__name__} " if owner is not None else ""
    if owner is not None and hasattr(owner, "running_mean"):
        why = " (in BatchNorm it would also mix the examples)"
        way_out = "Call .eval() on the module, or use a layer without running statistics (GroupNorm, LayerNorm)."
    else:
        why, way_out = "", f"{'' if owner is None else 'Call .eval() if the module then leaves it alone, or p'}"
        way_out = f"{way_out or 'P'}ass the tensor in as an argument and return its new value."
    return TraceError(f"{module}{path!r} is updated in place by the function, {NO_MEANING}{why}. {way_out}")


def no_place_for_state(scratch: Scratch, walk: Walk) -> TraceError:
    """The refusal to bind a tensor in a place whose old one the function reads."""
    name = scratch.place.name(scratch.key)
    what = f"assigns a new tensor to {name} and reads the one that an earlier call has left there"
    if scratch.is_added:
        what = f"adds a tensor to {scratch.place.label}"
    return TraceError(
        f"{where(walk)}the function {what}, {NO_MEANING}. Pass the state in as an argument and return the new one, "
        "or reset it at the start of the function (in training mode only: call .eval())."
    )


def no_place_for_values(name: str, walk: Walk, once: bool) -> TraceError:
    """The refusal to change what is no tensor and to compute with it."""
    if once:
        return TraceError(
            f"{where(walk)}the function appends to {name} and computes with what it holds, but a traced function runs "
            "once. Pass in what changes as an argument, or keep a tensor."
        )
    return TraceError(
        f"{where(walk)}the function changes {name} and computes with it, {NO_MEANING}. Pass in what changes as an "
        "argument."
    )


def no_place_for_exchange(name: str, walk: Walk) -> TraceError:
    """The refusal to put another tensor, list or module into a place in each slice."""
    return TraceError(
        f"{where(walk)}the function puts something else into {name} each time that it runs (it exchanges or reorders "
        f"what it finds there), {NO_MEANING}. Pass in what changes as an argument, or reset it at the start."
    )
