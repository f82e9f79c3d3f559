"""Record a torch function as a graph of ATen ops, together with its vector-Jacobian product.

The function runs once, on fake tensors, under torch's own autograd and functionalisation; a dispatch mode below both
writes down every op that depends on an input. What depends on none simply runs in eager torch and becomes a constant.
So ``no_grad``, ``detach``, a user's ``autograd.Function``, hooks, ``torch.autograd.grad`` and ``torch.func`` inside the
function, writes through views and updates of buffers mean what they mean in torch: torch gives them their meaning.

Tensors that the function captures (parameters, closures, globals) become inputs of the graph. They are met above
autograd, by a function mode that puts a recorded stand-in in the place of each tensor that was not made inside.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
import random
import threading
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch._ops import OpOverload

from ..base import torch_internals as ti
from ..base.errors import (
    TraceError,
    WrittenArgument,
    WrittenLeaf,
    asks_for_memory,
    frozen_number,
    memory_refusal,
    refuse_seed,
    user_line,
)
from ..lowerings.signatures import Keywords
from ..watch.watching import refused, watching
from .backward import fill_grads
from .captured import Captured, is_traced_tensor, recording
from .checkpoints import recorded_checkpoints
from .graph import Graph
from .interception import Interception
from .moves import without_moves
from .nodes import Meta, Ref, Value
from .recorder import Recorder

aten = torch.ops.aten


class _Functionalisation(ti.FunctionalTensorMode):
    """torch's functionalisation, out of sight of function modes: what runs in it is torch's own, not the user's."""

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Keywords | None = None
    ) -> object:
        if func is aten.set_.source_Tensor and not isinstance(args[0], ti.FunctionalTensor):
            raise TraceError(f"{user_line()}: a traced function cannot set_ a tensor that it captures. Assign .data.")
        with torch._C.DisableTorchFunction():
            result = super().__torch_dispatch__(func, types, args, kwargs)
        current = recording()
        if func is aten.lift_fresh.default and current is not None and not is_traced_tensor(args[0]):
            current.lifted.append((result, args[0], user_line()))
        return result


def record(
    fun: Callable[..., Sequence[torch.Tensor]],
    metas: Sequence[Meta],
    need: Sequence[bool],
    known: Sequence[torch.Tensor],
    wants: Callable[[torch.Tensor], bool] = lambda _: False,
    clocks: bool = False,
    live: Container[int] | None = None,
) -> tuple[Graph, list[torch.Tensor]]:
    """Record ``fun(*tensors) -> tensors`` and, for the inputs that ``need`` names, its vector-Jacobian product.

    Args:
        fun: takes one tensor for each of ``metas``, and returns a flat list of tensors.
        metas: dtype, shape and device of the arguments.
        need: one flag for each argument and each tensor of ``known``: record its gradient.
        known: captured tensors found by an earlier recording, in order.
        wants: whether to record the gradient of a captured tensor that is met for the first time.
        clocks: whether the function's code may read a clock.
        live: the outputs that have a cotangent; all that are differentiable, unless given.

    Returns:
        The graph, and the captured tensors: ``known`` and then whatever was met for the first time.

    Raises:
        TraceError: the function asks for values, draws Python random numbers, or writes to an argument.
    """
    ti.load_dynamo()
    once = functools.partial(_record_once, fun, metas, need, known, wants, live)
    with _LOCK, _apart_from_callers():
        try:
            with watching(clocks):
                return _writing_to_copies(once)
        except TraceError as error:
            # Libraries skip their checks of values where torch.compile would run them: one more try under that flag.
            with ti.compiling(), contextlib.suppress(Exception), watching(clocks):
                return _writing_to_copies(once)
            raise error


# What a recording sets aside in torch is global: recordings of several threads take turns.
_LOCK = threading.RLock()


@contextlib.contextmanager
def _apart_from_callers() -> Iterator[None]:
    """Keep out of reach of what the caller does: another recording, ``torch.func``, dual numbers, checks, hooks."""
    with (
        ti.temporarily_clear_interpreter_stack(),
        ti.without_forward_mode(),
        ti.without_saved_tensor_hooks(),
        torch.autograd.set_detect_anomaly(False),
        ti.without_inference_mode(),  # under it autograd records nothing: derivatives would be zero
        ti.without_modes() if recording() is not None else contextlib.nullcontext(),
    ):
        yield


def _numpy_state() -> Any:
    return np.random.get_state()  # noqa: NPY002


@contextlib.contextmanager
def _unchanged_generators() -> Iterator[None]:
    torch_state, python_state, numpy_state = torch.get_rng_state(), random.getstate(), _numpy_state()
    seed = torch.initial_seed()
    try:
        yield
        if torch.initial_seed() != seed:  # torch.default_generator.manual_seed, which no mode sees
            refuse_seed()
        if random.getstate() != python_state or pickle.dumps(_numpy_state()) != pickle.dumps(numpy_state):
            raise frozen_number()
    finally:
        if not torch.equal(torch.get_rng_state(), torch_state):  # other threads draw from it too
            torch.set_rng_state(torch_state)
        random.setstate(python_state)
        np.random.set_state(numpy_state)  # noqa: NPY002


def _writing_to_copies(once: Callable[..., tuple[Graph, list[torch.Tensor]]]) -> tuple[Graph, list[torch.Tensor]]:
    """Record, once more with copies in the place of leaves where the function writes to them."""
    try:
        return once()
    except WrittenLeaf:
        # To record a gradient every captured tensor is a leaf, which one that has a history is not outside.
        try:
            return once(copies=True)
        except WrittenLeaf as error:
            raise TraceError(str(error)) from error.__cause__


@contextlib.contextmanager
def _naming_refusals(recorder: Recorder) -> Iterator[None]:
    """Raise a refusal as it was, whatever became of it on its way; name what torch refuses for our tensors."""
    try:
        yield
    except TraceError:
        raise
    except Exception as error:
        refusal = recorder.refusal or refused()
        if refusal is not None:
            raise refusal from error
        if "FunctionalTensor on its own" in str(error):
            raise TraceError(
                f"{user_line(error)}: a tensor that depends on the arguments is made one of a subclass of torch.Tensor "
                "(as_subclass, or super().__torch_function__), which a trace cannot follow. Work on plain tensors here."
            ) from error
        if asks_for_memory(error):
            raise memory_refusal(user_line(error), "the memory") from error
        raise


def _record_once(
    fun: Callable[..., Sequence[torch.Tensor]],
    metas: Sequence[Meta],
    need: Sequence[bool],
    known: Sequence[torch.Tensor],
    wants: Callable[[torch.Tensor], bool],
    live: Container[int] | None,
    copies: bool = False,
) -> tuple[Graph, list[torch.Tensor]]:
    """Run the function among the modes that record it, and its backward pass behind it."""
    recorder = Recorder()
    captured = Captured(recorder, known, wants, copies)
    interception = Interception(captured)
    inner = [recorder.input(meta) for meta in metas]
    with (
        _naming_refusals(recorder),
        _unchanged_generators(),
        ti.plain_kernels(functools.partial(fill_grads, captured)),
        ti.without_other_tracers(),
        recorded_checkpoints(recorder),
        torch.enable_grad(),
        recorder,
        _Functionalisation(),
    ):
        arguments = [ti.to_fun(t).requires_grad_(n) for t, n in zip(inner, need, strict=False)]
        for tensor, is_needed in zip(known, need[len(metas) :], strict=True):
            captured.add(tensor, is_needed or tensor.requires_grad)
        captured.arguments = arguments
        with interception, captured, ti.entering_functorch(captured.stand_in):
            outputs = [_functional(captured.stand_in(o)) for o in fun(*arguments)]
            with torch._C.DisableTorchFunction():  # to ask for a version is a use as well
                for view in captured.views:
                    view.check_use(outputs)
                    view.check_writes()
            captured.check_switches()
            refusal = recorder.refusal or refused()
            if refusal is not None:  # the function caught it, and went another way than it would in torch
                raise refusal
            wanted = [a for a, n in zip(arguments, need, strict=False) if n]
            new = captured.tensors[len(known) :]
            need = [*need, *(Meta.of(t).differentiable and wants(t) for t in new)]
            wanted_captured = [t for t, n in zip(captured.tensors, need[len(metas) :], strict=True) if n]
            reach, own = _reached(outputs, [*arguments, *captured.tensors], need, captured)
            differentiable = [bool(r) and (live is None or i in live) for i, r in enumerate(reach)]
            cotangents = [recorder.input(Meta.of(o)) for o, d in zip(outputs, differentiable, strict=True) if d]
            written = captured.finals()
            gradients = _gradients(
                [o for o, d in zip(outputs, differentiable, strict=True) if d],
                wanted,
                wanted_captured,
                captured,
                [ti.to_fun(c) for c in cotangents],
            )
            need += [False] * (len(metas) + len(captured.tensors) - len(need))  # met in the backward pass alone
            for before, after in zip(written, captured.finals(), strict=False):
                if before != after:
                    line = recorder.line_of(after.node) if isinstance(after, Ref) else user_line()
                    raise TraceError(
                        f"{line}: the backward pass writes to a captured tensor in place (a hook, or a layer with "
                        "running statistics in a block that torch.utils.checkpoint runs again), which a compiled call "
                        "does not repeat there. Leave it out of the block, or call .eval() on the layer."
                    )
        graph = _graph(
            recorder, captured, inner, arguments, cotangents, outputs, differentiable, reach, own, gradients, need
        )
    return graph, captured.tensors


def _functional(out: torch.Tensor) -> torch.Tensor:
    return out if isinstance(out, ti.FunctionalTensor) else aten.lift_fresh(out)


def _gradients(
    outputs: Sequence[torch.Tensor],
    wanted: Sequence[torch.Tensor],
    wanted_captured: Sequence[torch.Tensor],
    captured: Captured,
    cotangents: Sequence[torch.Tensor],
) -> Sequence[torch.Tensor | None]:
    if not outputs or not (wanted or wanted_captured):
        return [None] * (len(wanted) + len(wanted_captured))
    stand_ins = [captured.leaves[id(t)] for t in wanted_captured]
    # A user's autograd.Function receives a captured tensor itself, not its stand-in: both lead to its gradient.
    with torch._C.DisableTorchFunction():  # of the tensors themselves, not of their stand-ins
        direct = [t for t in wanted_captured if t.requires_grad and not is_traced_tensor(t)]
    found = torch.autograd.grad(outputs, [*wanted, *stand_ins], cotangents, allow_unused=True, retain_graph=True)
    with ti.function_modes_in_backward():  # the Function's own backward may use what it was given
        extra = torch.autograd.grad(outputs, direct, cotangents, allow_unused=True) if direct else ()
    gradients = list(found)
    for tensor, more in zip(direct, extra, strict=True):
        if more is not None:
            i = len(wanted) + next(j for j, t in enumerate(wanted_captured) if t is tensor)
            gradients[i] = more if gradients[i] is None else gradients[i] + more
    return gradients


def _reached(
    outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], need: Sequence[bool], captured: Captured
) -> tuple[list[int], list[int]]:
    """Return for each output, as bits, the needed inputs that autograd goes back to, and the user's Functions met."""
    bit: dict[object, int] = {}
    with torch._C.DisableTorchFunction():
        for i, (tensor, needed) in enumerate(zip(inputs, need, strict=True)):
            for leaf in (tensor, captured.leaves.get(id(tensor), tensor)) if needed else ():
                bit[id(leaf) if leaf.grad_fn is None else leaf.grad_fn] = 1 << i
        masks: dict[object, tuple[int, int]] = {None: (0, 0)}
        functions = 0
        stack: list[Any] = [o.grad_fn for o in outputs]
        while stack:
            node = stack[-1]
            if node in masks:
                stack.pop()
                continue
            is_own = hasattr(node, "_forward_cls")
            end = node if node in bit or is_own else id(getattr(node, "variable", None))  # of a leaf
            following = [] if end in bit else [following for following, _ in node.next_functions]
            missing = [n for n in following if n not in masks]
            if missing:
                stack += missing
                continue
            own = 0
            if is_own:
                own, functions = 1 << functions, functions + 1
            reach = bit.get(end, 0)
            for n in following:
                reach, own = reach | masks[n][0], own | masks[n][1]
            masks[node] = reach, own
        found = [masks[o.grad_fn] if o.grad_fn is not None else (bit.get(id(o), 0), 0) for o in outputs]
    return [reach for reach, _ in found], [own for _, own in found]


def _graph(
    recorder: Recorder,
    captured: Captured,
    inner: Sequence[torch.Tensor],
    arguments: Sequence[torch.Tensor],
    cotangents: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    differentiable: Sequence[bool],
    reach: list[int],
    own: list[int],
    gradients: Sequence[torch.Tensor | None],
    need: Sequence[bool],
) -> Graph:
    def value(tensor: torch.Tensor) -> Value:
        inner: Any = ti.from_fun(tensor) if isinstance(tensor, ti.FunctionalTensor) else tensor
        return recorder.value(inner)

    def position(tensor: torch.Tensor) -> int:
        return recorder.where[id(tensor)].node

    for i, (argument, tensor) in enumerate(zip(arguments, inner, strict=True)):
        if value(argument) != recorder.value(tensor):
            raise WrittenArgument(i)
    mutations = []
    for i, final in enumerate(captured.finals()):
        if final != captured.initial[i]:
            mutations.append((i, final))
    inputs = [*inner, *captured.inputs, *cotangents]
    found = [None if g is None else value(g) for g in gradients]
    results = [value(o) for o in outputs]
    evidence = [check.evidence for check in recorder.checks]
    nodes = without_moves(
        recorder.nodes,
        [*results, *found, *(final for _, final in mutations), *evidence],
        {position(t): tuple(t.shape) for t in inputs},
        min(map(position, cotangents), default=len(recorder.nodes)),
    )
    return Graph(
        nodes=nodes,
        inputs=[position(t) for t in inner],
        captured=[position(t) for t in captured.inputs],
        cotangents=[position(t) for t in cotangents],
        outputs=results,
        output_metas=[Meta.of(o) for o in outputs],
        differentiable=list(differentiable),
        reach=reach,
        own=own,
        need=tuple(need),
        gradients=found,
        mutations=mutations,
        moves=captured.moves(),
        checks=recorder.checks,
    )
