"""What a running bridge call tells the traced torch functions inside it.

``as_torch`` compiles a JAX function; the torch functions that it calls, however deep, find here the tracers of the
tensors that they capture, the key of the call's random draws, and where to leave the new values of buffers.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import torch
from jax.extend.core import ClosedJaxpr, get_opaque_trace_state

from ..base import torch_internals as ti
from ..base.versions import mapping_trace, unmapped_trace
from ..memory.dtypes import torch_dtype
from ..memory.trees import Structure, containers_in

if TYPE_CHECKING:
    from ..effects.bindings import Binding, Effect
    from ..effects.sources import Basic
    from ..record.nodes import History
    from ..watch.places import Place


class Left(NamedTuple):
    """What a function inside a call leaves in a place, and the tensors that stand for its inputs and results."""

    places: Sequence[Place]
    effect: Effect
    tensor: Callable[[Basic], torch.Tensor]
    arguments: Sequence[int | None]  # which containers of the call's arguments those of the function's are


@dataclasses.dataclass
class Call:
    """One trace of a compiled call."""

    tensors: dict[int, jax.Array]  # id of a captured tensor -> its tracer
    key: Any
    device: torch.device
    grad: bool  # whether torch records for autograd in the function
    state: object = None  # the trace in which buffers may be written
    mapping: object = None
    missing: list[torch.Tensor] = dataclasses.field(default_factory=list)
    met: set[int] = dataclasses.field(default_factory=set)  # ids of the captured tensors that functions read or write
    # Captured tensors that are written to, their new values, and whether these have a history in autograd.
    mutations: list[tuple[torch.Tensor, jax.Array, bool]] = dataclasses.field(default_factory=list)
    moved: set[int] = dataclasses.field(default_factory=set)  # ids of those that take the memory of the value too
    left: list[Left] = dataclasses.field(default_factory=list)
    arguments: Sequence[object] = ()  # the containers among the arguments, as the call hands them on
    before: list[Binding] = dataclasses.field(default_factory=list)  # what stood in places that hold stand-ins now
    stand_ins: list[torch.Tensor] = dataclasses.field(default_factory=list)
    has_rows: bool = False  # the call runs for each row of torch.func.vmap
    effects: list[Effect] = dataclasses.field(default_factory=list)  # what each call leaves behind
    carried: list[tuple[int, int]] = dataclasses.field(default_factory=list)  # inputs that take results as new values
    # Inputs that take values without history.
    updates: list[tuple[int, jax.Array]] = dataclasses.field(default_factory=list)
    numbers: dict[Hashable, int] = dataclasses.field(default_factory=dict)
    repeats: collections.Counter[Hashable] = dataclasses.field(default_factory=collections.Counter)
    functions: list[Any] = dataclasses.field(default_factory=list)  # kept, for what a derivative asks to record later
    draws: bool = False
    strided: str | None = None  # the line that asks for elements by their place in memory
    # The functions that change what no call can change again: sets, classes, buffers of bytes.
    changing: list[Hashable] = dataclasses.field(default_factory=list)
    regains: bool = False  # whether a function's results have a history though autograd is off around it
    only_maps: bool = False  # the call runs functions in slices or steps, and takes no derivatives of its own
    is_quiet: bool = False  # autograd is off where the call begins, and records what the function switches it on for
    has_floats: bool = False  # Python floats among the arguments are inputs
    strides: dict[int, tuple[int, ...]] = dataclasses.field(
        default_factory=dict
    )  # by id, of arguments in another order
    histories: dict[int, History] = dataclasses.field(
        default_factory=dict
    )  # by id, of arguments, if they are asked for
    # What recorded torch functions compute, by their program and the form of its inputs, while the call is compiled.
    traces: dict[Hashable, ClosedJaxpr] = dataclasses.field(default_factory=dict)
    shape: Structure | None = None  # the structure of the results
    results: int = 0  # how many tensors the call gives, with what it leaves behind
    moving: list[bool] = dataclasses.field(default_factory=list)  # which outputs depend on a needed input
    # What JAX has traced for the call counts until this becomes another object: when a function leaves something behind
    # that others may read.
    traced_for: object = dataclasses.field(default_factory=object)

    def enter_body(self) -> None:
        """Mark the current trace as the one that runs the function once, from start to end."""
        self.state, self.mapping = get_opaque_trace_state(), mapping_trace()
        self.mutations, self.moved, self.left = [], set(), []
        self.repeats.clear()

    def stand_in(self, array: jax.Array) -> torch.Tensor:
        """A tensor that stands for an array while the call is traced: functions that capture it find the array."""
        tensor = ti.blank(torch_dtype(array.dtype), array.shape, self.device)
        self.tensors[id(tensor)] = array
        self.stand_ins.append(tensor)
        return tensor

    def arguments_among(self, args: Sequence[object], kwargs: Mapping[str, object]) -> list[int | None]:
        """Which containers of the call's arguments those are that one of its functions is given."""
        numbers = {id(x): i for i, x in enumerate(self.arguments)}
        return [numbers.get(id(x)) for x in containers_in(args, kwargs)]

    def keep_functions(self) -> None:
        """Where a function is returned, such as a pullback: it may hold no more of them than their recordings."""
        for made in self.functions:
            if made.source is not None:
                made.tracing.keep(made.source)

    def in_body(self) -> bool:
        """Whether no transform (vmap, scan, grad of the user's) stands between the call and the current trace."""
        return self.state is not None and self.state == get_opaque_trace_state()

    def is_mapped(self) -> bool:
        """Whether a transform that runs the function for several rows or steps (vmap, scan) stands in between."""
        return self.mapping is not mapping_trace()

    def is_only_mapped(self) -> bool:
        """Whether nothing but ``vmap`` stands in between: no derivative, and nothing that JAX keeps for one."""
        return self.mapping is unmapped_trace()

    def is_outside(self, value: object) -> bool:
        """Whether a value does not differ between the rows of such a transform."""
        while isinstance(value, jax.core.Tracer) and getattr(value, "primal", None) is not None:
            value = value.primal
        return not isinstance(value, jax.core.Tracer) or value._trace is self.mapping

    def number(self, function: Hashable) -> int:
        """Which key of the call a function draws from.

        One that is called again draws anew, as in torch. Within a transform it draws what it drew first: a derivative
        has the mask of its value.
        """
        again = 0
        if self.in_body():
            again = self.repeats[function]
            self.repeats[function] += 1
        return self.numbers.setdefault((function, again), len(self.numbers))


class _Stack(threading.local):
    calls: list[Call]

    def __init__(self) -> None:
        self.calls = []


_STACK = _Stack()

# A part of the key under which JAX keeps what it has traced, by the function that it was given (jit, checkpoint, cond,
# scan). A torch function that was traced for another call may have read other things, and holds tracers of that call.
_TRACED_FOR: Any = jax.make_user_context(None)


def current_call() -> Call | None:
    """The innermost call that is being traced in this thread."""
    return _STACK.calls[-1] if _STACK.calls else None


@contextlib.contextmanager
def running(call: Call) -> Iterator[Call]:
    """Make a call the current one, for which JAX traces anew each function that it is given."""
    _STACK.calls.append(call)
    try:
        with _TRACED_FOR(call.traced_for):
            yield call
    finally:
        _STACK.calls.pop()


@contextlib.contextmanager
def for_every_call() -> Iterator[None]:
    """A scope in which JAX is given no function of the user's: what it traces there it keeps for all calls."""
    call = current_call()
    before = None if call is None else call.traced_for
    with _TRACED_FOR(None):
        yield
    if call is not None and call.traced_for is not before:
        _TRACED_FOR(call.traced_for).__enter__()  # ends with the scope of the call
