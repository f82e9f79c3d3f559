"""The tensors that a traced function captures, and what stands in for each of them while it is recorded.

Tensors that a traced function captures (parameters, closures, globals) become inputs of its graph. A tensor that was
not made inside is met by the mode of ``interception.py``, and a recorded stand-in takes its place.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from ..base import torch_internals as ti
from ..base.errors import TraceError, user_line
from ..memory.values import check_kind, has_own_data
from .indexing import CopiedView
from .nodes import History, Meta, Value, depend
from .recorder import Recorder


class _Active(threading.local):
    def __init__(self) -> None:
        self.recordings: list[Captured] = []  # innermost last
        self.constants: frozenset[int] = frozenset()


_ACTIVE = _Active()


def recording() -> Captured | None:
    """Return what the innermost recording of this thread captures."""
    return _ACTIVE.recordings[-1] if _ACTIVE.recordings else None


@contextlib.contextmanager
def known_as_constants(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Let recordings inside take captured tensors for ones that the function makes, with the values they have."""
    outer, _ACTIVE.constants = _ACTIVE.constants, frozenset(map(id, tensors))
    try:
        yield
    finally:
        _ACTIVE.constants = outer


def is_traced_tensor(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor stands for others, in a recording or in ``torch.func``, and has no memory of its own."""
    return isinstance(tensor, (ti.FunctionalTensor, ti.FakeTensor)) or ti.is_functorch_wrapped_tensor(tensor)


def is_update_of(tensor: torch.Tensor, captured: torch.Tensor) -> bool:
    """Tell whether ``tensor`` is the stand-in of a captured tensor, which in-place operators hand back."""
    current = recording()
    return current is not None and current.stand_ins.get(id(captured)) is tensor


class Captured:
    """The tensors that a function captures, in the order in which it met them, each with its recorded stand-in."""

    def __init__(
        self, recorder: Recorder, known: Sequence[torch.Tensor], wants: Callable[[torch.Tensor], bool], copies: bool
    ) -> None:
        """Let, with ``copies``, a stand-in of a tensor that has a history be written to in place, as the tensor may."""
        self.recorder, self.wants, self.copies = recorder, wants, copies
        self.strided: str | None = None  # the line that asks for elements by their place in memory
        self.switched: dict[int, str] = {}  # by id, the lines that say whether a tensor requires grad
        self.moved: dict[int, str] = {}  # by id, the lines that let a tensor show other memory
        self.lifted: list[tuple[torch.Tensor, torch.Tensor, str]] = []  # of memory from outside: what stands for it
        self.arguments: list[torch.Tensor] = []
        self.tensors = list(known)
        self.views: list[CopiedView] = []
        self.inputs: list[torch.Tensor] = []
        self.stand_ins: dict[int, torch.Tensor] = {}
        self.leaves: dict[int, torch.Tensor] = {}  # to which the gradients belong
        self.initial: list[Value] = []  # of the stand-ins
        self.memories: list[int] = []  # which they show at first
        self.enables_grad: Callable[[], None] = lambda: None  # called when the function switches autograd on
        self.histories: dict[int, History] = {}  # by id, of arguments

    def __enter__(self) -> Captured:
        _ACTIVE.recordings.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        _ACTIVE.recordings.pop()

    def finals(self) -> list[Value]:
        """Return what the captured tensors hold now."""
        with torch._C.DisableTorchFunction():
            stand_ins = [self.stand_ins[id(t)] for t in self.tensors]
            inner: list[Any] = [ti.from_fun(t) if isinstance(t, ti.FunctionalTensor) else t for t in stand_ins]
            return [self.recorder.value(t) for t in inner]

    def position(self, tensor: torch.Tensor) -> int | None:
        """Return which captured tensor this is or stands for; what was not made inside is captured now."""
        for i, known in enumerate(self.tensors):
            if tensor is known or tensor is self.stand_ins[id(known)]:
                return i
        if self.stand_in(tensor) is tensor or id(tensor) in _ACTIVE.constants:
            return None
        return len(self.tensors) - 1

    def constant(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the values of a tensor that was made inside, if it depends on no input."""
        inner: Any = ti.from_fun(tensor.detach()) if isinstance(tensor, ti.FunctionalTensor) else tensor
        return inner.clone() if self.recorder.is_constant(inner) else None

    def depend_on(self, sources: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> bool:
        """Tell whether some of the tensors are computed from captured ones among the sources."""
        where = self.recorder.where
        shown = [id(ti.from_fun(self.stand_in(t))) for t in tensors]
        inner = {id(t): x for t, x in zip(self.tensors, self.inputs, strict=True)}
        wanted = {where[id(inner[id(s)])].node for s in sources if id(s) in inner}
        made = [where[i] for i in shown if i in where]
        return depend(self.recorder.nodes, made, wanted)

    def check_views(self, used: object) -> None:
        """Refuse what is used of copies here and would be views in torch."""
        tensors = [leaf for leaf in ti.torch_pytree.tree_leaves(used) if isinstance(leaf, torch.Tensor)]
        for view in self.views:
            view.check_use(tensors)

    def check_switches(self) -> None:
        """Refuse to leave a captured tensor as one that requires grad if it did not, or the other way round."""
        with torch._C.DisableTorchFunction():
            for tensor in self.tensors:
                stand_in = self.stand_ins[id(tensor)]
                line = self.switched.get(id(stand_in))
                if line is not None and stand_in.grad_fn is None and stand_in.requires_grad != tensor.requires_grad:
                    raise TraceError(
                        f"{line}: the function changes whether a tensor that it captures requires grad, which no later "
                        "call would find so. Change it before the call, or put it back in the function."
                    )

    def check_arrays(self, captured: Iterable[np.ndarray]) -> None:
        """Refuse writes to a tensor that shows a captured array of NumPy's, in which the caller would see them."""
        spans = [range(start := x.__array_interface__["data"][0], start + x.nbytes) for x in captured]
        for stand_in, tensor, line in self.lifted if spans else ():
            with torch._C.DisableTorchFunction(), ti.no_dispatch():
                memory = tensor.untyped_storage()
                own = range(memory.data_ptr(), memory.data_ptr() + memory.nbytes())
            if stand_in._version and any(s.start in own or own.start in s for s in spans if s):
                raise TraceError(
                    f"{line}: the function writes to a tensor that shows the memory of a captured NumPy array. "
                    "A call would not change the array: write to a copy (torch.tensor), or keep a tensor in its place."
                )

    def moves(self) -> set[int]:
        """Return which captured tensors show memory that was made inside, in the place of their own."""
        stand_ins = [self.stand_ins[id(t)] for t in self.tensors]
        found: set[int] = set()
        with torch._C.DisableTorchFunction():
            for i, stand_in in enumerate(stand_ins):
                line, key = self.moved.get(id(stand_in)), ti.storage_key(stand_in)
                if line is None or key == self.memories[i]:
                    continue
                others = [*self.arguments, *(t for t in stand_ins if t is not stand_in)]
                if key in {*self.memories, *map(ti.storage_key, others)}:
                    raise TraceError(
                        f"{line}: the function lets a tensor that it captures show the memory of another one (.data), "
                        "where a call leaves it with memory of its own. Assign a copy: .clone()."
                    )
                found.add(i)
        return found

    def add(self, tensor: torch.Tensor, differentiable: bool) -> torch.Tensor:
        inner = self.recorder.input(Meta.of_input(tensor))
        leaf = stand_in = ti.to_fun(inner).requires_grad_(differentiable)
        if self.copies and tensor.grad_fn is not None:
            with torch.enable_grad():  # wherever it is met
                stand_in = leaf.clone()
        self.inputs.append(inner)
        self.leaves[id(tensor)], self.stand_ins[id(tensor)] = leaf, stand_in
        inner = ti.from_fun(stand_in)  # type: ignore[assignment]
        self.initial.append(self.recorder.value(inner))
        self.memories.append(ti.storage_key(stand_in))
        return stand_in

    def stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what the function is to see in the place of a tensor: another one if it was not made inside."""
        with torch._C.DisableTorchFunction():  # also called from where this mode is active
            known = self.stand_ins.get(id(tensor))
            if known is not None:
                return known
            if is_traced_tensor(tensor):
                return tensor
            if id(tensor) in self.recorder.where or torch._is_functional_tensor(tensor):
                return tensor
            _check_supported(tensor)
            with ti.temporarily_clear_interpreter_stack():
                if id(tensor) in _ACTIVE.constants:
                    self.stand_ins[id(tensor)] = made = ti.to_fun(tensor)
                    return made
                self.tensors.append(tensor)
                wanted = Meta.of(tensor).differentiable and self.wants(tensor)
                return self.add(tensor, tensor.requires_grad or wanted)


def _check_supported(tensor: torch.Tensor) -> None:
    if not has_own_data(tensor):
        try:
            check_kind(tensor)
        except (TypeError, ValueError) as error:
            raise TraceError(f"{user_line()}: {error}") from None
