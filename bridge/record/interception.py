"""A function mode above autograd: stand-ins for captured tensors, and what has to be refused or rewritten.

Tensors that a traced function captures (parameters, closures, globals) become inputs of its graph. A tensor that was
not made inside is met here, and a recorded stand-in takes its place.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..base import torch_internals as ti
from ..base.errors import TraceError, memory_refusal, refused_backward, user_line
from ..base.user_code import OWN, asked_by
from ..memory.values import check_kind, has_own_data
from ..watch.names import HISTORY, remember_read
from .functions import REPLACEMENTS
from .nodes import History, Meta, Value, depend
from .packing import PACKED, is_packed
from .recorder import Cut, Recorder

_WHOLE = (torch.int8, torch.int16, torch.int32, torch.int64)
_MASKS = (torch.bool, torch.uint8)
_VALUE_METHODS = {
    torch.Tensor.numpy: ".numpy()",
    torch.Tensor.__array__: "numpy.asarray",
    torch.Tensor.tolist: ".tolist()",
    torch.Tensor.__format__: "a formatted number",
}
_MEMORY_METHODS = {
    torch.Tensor.data_ptr: ".data_ptr()",
    torch.Tensor.storage: ".storage()",
    torch.Tensor.untyped_storage: ".untyped_storage()",
    torch.Tensor.__dlpack__: "DLPack",
    torch.Tensor.share_memory_: ".share_memory_()",
    torch.Tensor.is_shared: ".is_shared()",
    torch.Tensor.is_pinned: ".is_pinned()",
    torch.Tensor.is_set_to: ".is_set_to()",
}

_STRIDED = (
    *(torch.as_strided, torch.as_strided_, torch.as_strided_copy, torch.as_strided_scatter),
    *(torch.Tensor.as_strided, torch.Tensor.as_strided_, torch.Tensor.as_strided_scatter),
    torch.Tensor.storage_offset,
)
_GET_GRAD = torch.Tensor.grad.__get__  # type: ignore[union-attr]
_WRITE_GRAD = (torch.Tensor.grad.__set__, torch.Tensor.grad.__delete__)  # type: ignore[union-attr]
_HISTORY = {
    torch.Tensor.requires_grad.__get__: "requires_grad",  # type: ignore[attr-defined]
    torch.Tensor.is_leaf.__get__: "is_leaf",  # type: ignore[attr-defined]
    torch.Tensor.grad_fn.__get__: "grad_fn",  # type: ignore[union-attr]
    torch.Tensor.grad.__get__: "grad",  # type: ignore[union-attr]
}
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_SWITCHING = (
    *(torch.Tensor.requires_grad_, torch.Tensor.requires_grad.__set__),  # type: ignore[attr-defined]
    *(torch.Tensor.detach_, torch.detach_),
)


class _Active(threading.local):
    def __init__(self) -> None:
        self.recordings: list[Captured] = []  # innermost last
        self.constants: frozenset[int] = frozenset()


_ACTIVE = _Active()


def recording() -> Captured | None:
    """What the innermost recording of this thread captures."""
    return _ACTIVE.recordings[-1] if _ACTIVE.recordings else None


@contextlib.contextmanager
def known_as_constants(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """A scope in which recordings take captured tensors for ones that the function makes, with the values they have."""
    outer, _ACTIVE.constants = _ACTIVE.constants, frozenset(map(id, tensors))
    try:
        yield
    finally:
        _ACTIVE.constants = outer


def is_traced_tensor(tensor: torch.Tensor) -> bool:
    """Whether a tensor stands for others, in a recording or in ``torch.func``, and has no memory of its own."""
    return isinstance(tensor, (ti.FunctionalTensor, ti.FakeTensor)) or ti.is_functorch_wrapped_tensor(tensor)


def is_update_of(tensor: torch.Tensor, captured: torch.Tensor) -> bool:
    """Whether ``tensor`` is the stand-in of a captured tensor, which in-place operators hand back."""
    current = recording()
    return current is not None and current.stand_ins.get(id(captured)) is tensor


class Captured:
    """The tensors that a function captures, in the order in which it met them, each with its recorded stand-in."""

    def __init__(
        self, recorder: Recorder, known: Sequence[torch.Tensor], wants: Callable[[torch.Tensor], bool], copies: bool
    ) -> None:
        """With ``copies``, a stand-in of a tensor that has a history may be written to in place, as the tensor may."""
        self.recorder, self.wants, self.copies = recorder, wants, copies
        self.strided: str | None = None  # the line that asks for elements by their place in memory
        self.switched: dict[int, str] = {}  # by id, the lines that say whether a tensor requires grad
        self.moved: dict[int, str] = {}  # by id, the lines that let a tensor show other memory
        self.arguments: list[torch.Tensor] = []
        self.tensors = list(known)
        self.rows: list[Row] = []
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
        """What the captured tensors hold now."""
        with torch._C.DisableTorchFunction():
            stand_ins: list[Any] = [self.stand_ins[id(t)] for t in self.tensors]
            inner: list[Any] = [ti.from_fun(t) if isinstance(t, ti.FunctionalTensor) else t for t in stand_ins]
            return [self.recorder.value(t) for t in inner]

    def position(self, tensor: torch.Tensor) -> int | None:
        """Which captured tensor this is or stands for; what was not made inside is captured now."""
        for i, known in enumerate(self.tensors):
            if tensor is known or tensor is self.stand_ins[id(known)]:
                return i
        if self.stand_in(tensor) is tensor or id(tensor) in _ACTIVE.constants:
            return None
        return len(self.tensors) - 1

    def constant(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The values of a tensor that was made inside, if it depends on no input."""
        inner: Any = ti.from_fun(tensor.detach()) if isinstance(tensor, ti.FunctionalTensor) else tensor
        return inner.clone() if self.recorder.is_constant(inner) else None

    def depend_on(self, sources: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> bool:
        """Whether some of the tensors are computed from captured ones among the sources."""
        where = self.recorder.where
        shown = [id(ti.from_fun(self.stand_in(t))) for t in tensors]
        inner = {id(t): x for t, x in zip(self.tensors, self.inputs, strict=True)}
        wanted = {where[id(inner[id(s)])].node for s in sources if id(s) in inner}
        made = [where[i] for i in shown if i in where]
        return depend(self.recorder.nodes, made, wanted)

    def check_rows(self, used: Any) -> None:
        """Refuse what is used of rows that are copies here and would be views in torch."""
        tensors = [leaf for leaf in ti.torch_pytree.tree_leaves(used) if isinstance(leaf, torch.Tensor)]
        for row in self.rows:
            row.check_use(tensors)

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

    def moves(self) -> set[int]:
        """Which captured tensors show memory that was made inside, in the place of their own."""
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
        """What the function is to see in the place of a tensor: another one if it was not made inside."""
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


@dataclasses.dataclass(frozen=True, eq=False)
class Row:
    """What ``tensor[index]`` gave for an index that depends on the arguments: a copy, where torch gives a view."""

    copy: torch.Tensor
    tensor: torch.Tensor
    index: tuple[Any, ...]
    line: str
    version: int  # of the tensor, when it was read

    def is_put_back(self, tensor: torch.Tensor, index: tuple[Any, ...], value: Any) -> bool:
        """Whether this is the last step of ``tensor[index] += 1``."""
        same = len(index) == len(self.index) and all(a is b for a, b in zip(index, self.index, strict=True))
        return same and tensor is self.tensor and getattr(value, "_base", None) is self.copy

    def check_use(self, tensors: Iterable[torch.Tensor]) -> None:
        """Raise if the copy is used after the tensor was written to: a view would show what was written."""
        if self.tensor._version != self.version and any(t is self.copy or t._base is self.copy for t in tensors):
            raise self._error()

    def check_writes(self) -> None:
        """Raise if the copy was written to: torch would write to the tensor."""
        if self.copy._version:
            raise self._error()

    def _error(self) -> TraceError:
        return TraceError(
            f"{self.line}: the function reads tensor[index], where the index is a tensor that depends on the "
            "arguments. In torch that is a view: it writes to it, or uses it after writing to the tensor. Assign to "
            "the row (tensor[index] = value), or read it with torch.index_select, which gives a copy."
        )


def row_of(tensor: torch.Tensor, index: tuple[Any, ...], places: list[int]) -> tuple[Row, torch.Tensor]:
    """``tensor[index]``, where the entries of the index at the places are whole numbers known only when it runs."""
    width = lambda i: 0 if i is None or isinstance(i, bool) else i.dim() if getattr(i, "dtype", None) in _MASKS else 1
    used = sum(width(i) for i in index if i is not Ellipsis)
    items, axis, chosen = list(index), 0, tensor
    for k, i in enumerate(index):
        if k in places:
            if axis >= tensor.dim():
                raise IndexError(f"too many indices for tensor of dimension {tensor.dim()}")
            size = tensor.shape[axis]
            chosen = chosen.index_select(axis, torch.where(i < 0, i + size, i).reshape(1))
            items[k] = 0
        axis += tensor.dim() - used if i is Ellipsis else width(i)
    return Row(chosen, tensor, index, user_line(), tensor._version), chosen[tuple(items)]


def set_row(tensor: torch.Tensor, index: tuple[Any, ...], value: Any) -> None:
    """``tensor[index] = value`` for an index of whole numbers."""
    at = [i.reshape(1) if isinstance(i, torch.Tensor) else torch.tensor([i], device=tensor.device) for i in index]
    tensor.index_put_(tuple(at), torch.as_tensor(value, device=tensor.device).to(tensor.dtype))


class Interception(TorchFunctionMode):
    """Above autograd: stand-ins for captured tensors, and what has to be refused or rewritten before it runs."""

    def __init__(self, captured: Captured) -> None:
        super().__init__()
        self.recorder, self.captured = captured.recorder, captured
        self.recording_backward = False  # whether autograd records the backward pass that runs

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        start = len(self.recorder.nodes)
        foreign = any(map(ti.has_own_function, types)) and torch._C._is_torch_function_enabled()
        with self.recorder.noting_refusals():
            result = (
                self._by_objects(func, types, args, kwargs or {}) if foreign else self._run(func, args, kwargs or {})
            )
        if self.recording_backward and ti.in_backward():
            self.recorder.in_backward.update(range(start, len(self.recorder.nodes)))
            self._note_cuts(result)
        return result

    def _by_objects(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """What objects, or tensors of a class with a ``__torch_function__`` of its own, make of an op.

        They see no stand-ins: the ops that they call come here.
        """
        operands = ti.torch_pytree.tree_leaves((args, kwargs), is_leaf=lambda x: type(x) in types)
        with self:
            for operand in ti.overloaded(operands):
                result = operand.__torch_function__(func, types, args, kwargs)
                if result is not NotImplemented:
                    return result
        raise TypeError(f"{user_line()}: no operand of {func} knows it: {', '.join(t.__name__ for t in types)}.")

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if func == _GET_GRAD:
            self._refuse_grad(args[0], "reads")
        if func in _WRITE_GRAD:
            self._refuse_grad(args[0], "writes")
        given = args
        if func in _HISTORY:
            return self._history(_HISTORY[func], args[0])
        args, kwargs = ti.map_tensors(self.captured.stand_in, (args, kwargs))
        if self.captured.rows:
            self.captured.check_rows((args, kwargs))
        if func in _VALUE_METHODS and args[1:] != ("",):  # f"{x}" shows the tensor as it is
            return self._constant_value(func, *args, **kwargs)
        if func in _MEMORY_METHODS:
            return self._constant_value(func, *args, **kwargs)
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            places = [k for k, i in enumerate(index) if self._is_number(i)]
            if places and func is torch.Tensor.__getitem__:
                row, result = row_of(args[0], index, places)
                self.captured.rows.append(row)
                return result
            if places and all(isinstance(i, int) or k in places for k, i in enumerate(index)):
                self.captured.rows = [r for r in self.captured.rows if not r.is_put_back(args[0], index, args[2])]
                return set_row(args[0], index, args[2])
        if func is torch._C._set_grad_enabled and args[0] and not torch.is_grad_enabled():
            self.captured.enables_grad()
        if func in _STRIDED:
            self.captured.strided = user_line()
        if func in _SWITCHING:
            self.captured.switched[id(args[0])] = user_line()
        if func == _SET_DATA:  # every look at a descriptor makes a new object: equal, not the same
            return self._set_data(*args)
        if func is torch.autograd.grad:
            outer, self.recording_backward = self.recording_backward, bool(kwargs.get("create_graph"))
            try:
                with ti.function_modes_in_backward(), self:
                    return func(*args, **kwargs)
            finally:
                self.recording_backward = outer
        if func is torch.Tensor.backward:
            named = ("tensors", "grad_tensors", "retain_graph", "create_graph", "inputs")
            given = dict(zip(named, args, strict=False)) | {
                {"gradient": "grad_tensors"}.get(k, k): v for k, v in kwargs.items()
            }
            with self:
                return self.backward(**given)
        if func is torch.Tensor.register_hook:
            return func(args[0], self._noting(*args[1:], **kwargs))
        if is_packed(func, args):
            return PACKED[func](args[0], self._lengths(args[1]), *args[2:], **kwargs)
        result = REPLACEMENTS.get(func, func)(*args, **kwargs)
        # What works in place hands back the very tensor, as the caller knows it.
        return given[0] if args and result is args[0] and isinstance(given[0], torch.Tensor) else result

    def backward(
        self,
        tensors: Any,
        grad_tensors: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        grad_variables: Any = None,
        inputs: Any = None,
    ) -> None:
        """``torch.autograd.backward`` for leaves that the function has made."""
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        leaves = list(_leaves(tensors) if inputs is None else [inputs] if isinstance(inputs, torch.Tensor) else inputs)
        if not leaves:
            raise RuntimeError(f"{user_line()}: no tensor from which backward() starts requires grad or has a grad_fn")
        with torch._C.DisableTorchFunction():
            for leaf in leaves:
                if any(leaf is argument for argument in self.captured.arguments):
                    raise refused_backward("an argument")
                if self.captured.stand_in(leaf) is not leaf or any(leaf is t for t in self.captured.leaves.values()):
                    raise refused_backward("a tensor that it captures")
        found = torch.autograd.grad(tensors, leaves, grad_tensors, retain_graph, create_graph, allow_unused=True)
        for leaf, gradient in zip(leaves, found, strict=True):
            with torch._C.DisableTorchFunction(), torch.no_grad():
                if gradient is None or leaf.retains_grad:  # which torch.autograd.grad fills in
                    continue
                if leaf.grad is None or create_graph:
                    leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient
                else:
                    leaf.grad += gradient
                hooks: Any = leaf._post_accumulate_grad_hooks if leaf.is_leaf else None
            for hook in list((hooks or {}).values()):
                hook(leaf)

    def _refuse_grad(self, tensor: torch.Tensor, how: str) -> None:
        is_argument = any(tensor is argument for argument in self.captured.arguments)
        with torch._C.DisableTorchFunction():
            is_own = is_traced_tensor(tensor) or id(tensor) in self.recorder.where
        if how == "reads" and not is_own:
            raise TraceError(
                f"{user_line()}: the function reads .grad of a tensor that it captures, which is another one at each "
                "call. Pass the gradient in as an argument."
            )
        if how == "writes" and (is_argument or not is_own):
            whose = "an argument" if is_argument else "a tensor that it captures"
            raise TraceError(
                f"{user_line()}: the function writes to .grad of {whose}, which a call does not repeat. Return the "
                "gradient, and assign it outside."
            )

    def _history(self, name: str, tensor: torch.Tensor) -> Any:
        """What autograd says of a tensor; of arguments and captured ones, what it says outside."""
        frame: types.FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.startswith(OWN):
            frame = frame.f_back
        code = asked_by(frame)
        if code is not None:
            remember_read(code, (HISTORY,))
        stand_in = self.captured.stand_in(tensor)
        with torch._C.DisableTorchFunction():
            known = self.captured.histories.get(id(tensor))
            if known is None:
                known = History(stand_in.requires_grad, tensor.is_leaf, False)
            requires_grad, is_leaf = known.requires_grad or stand_in.requires_grad, known.is_leaf and stand_in.is_leaf
            if name == "grad":
                if known.has_grad:
                    raise TraceError(
                        f"{user_line()}: the function reads .grad of an argument, which is no part of the call. Pass "
                        "the gradient in as an argument."
                    )
                return stand_in.grad
            if name == "requires_grad":
                return requires_grad
            if name == "is_leaf":
                return is_leaf
            if is_leaf or stand_in.grad_fn is not None:
                return stand_in.grad_fn
            with torch.enable_grad():  # one like that of its history, which is outside
                return torch.zeros((), requires_grad=True).view(()).grad_fn

    def _note_cuts(self, result: Any) -> None:
        """Remember what a user's backward pass computed without autograd, which is asked for its derivative."""
        for tensor in ti.torch_pytree.tree_leaves(result):
            if isinstance(tensor, ti.FunctionalTensor) and Meta.of(tensor).differentiable:
                with torch._C.DisableTorchFunction():
                    tracked = tensor.requires_grad
                node = None if tracked else self.recorder.node_of(tensor)
                if node is not None:
                    self.recorder.cuts.append(Cut(node, user_line(), not torch.is_grad_enabled()))

    def _noting(self, hook: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
        """The hook, which is remembered where it changes a gradient."""
        line = user_line()

        def noted(gradient: torch.Tensor) -> Any:
            result = hook(gradient)
            if result is not None and result is not gradient:
                self.recorder.hooked.append(line)
            return result

        return noted

    def _is_number(self, index: Any) -> bool:
        """Whether an index is a whole number that depends on the arguments."""
        if not isinstance(index, torch.Tensor) or index.dim() or index.dtype not in _WHOLE:
            return False
        with torch._C.DisableTorchFunction():
            inner: Any = ti.from_fun(index.detach()) if isinstance(index, ti.FunctionalTensor) else index
            return ti.is_functorch_wrapped_tensor(inner) or not self.recorder.is_constant(inner)

    def _set_data(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """``tensor.data = value``: the memory of the value, unseen by autograd."""
        if (tensor.shape, tensor.dtype) != (value.shape, value.dtype):
            raise TraceError(
                f"{user_line()}: the function assigns .data of another shape or dtype. Make a new tensor instead."
            )
        self.captured.moved[id(tensor)] = user_line()
        with torch.no_grad():
            ti.share_memory(tensor, value)

    def _lengths(self, tensor: torch.Tensor) -> Any:
        try:
            return self._constant_value(torch.Tensor.tolist, tensor)
        except TraceError:
            raise TraceError(
                f"{user_line()}: the lengths of a packed sequence are a tensor that depends on the arguments or is "
                "captured, and the shape of the result depends on them. Give them as a Python list, of which each new "
                "one compiles, or keep the padding and mask it."
            ) from None

    def _constant_value(self, func: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            inner = ti.from_fun(tensor.detach()) if isinstance(tensor, ti.FunctionalTensor) else tensor
            if (
                isinstance(inner, torch.Tensor)
                and self.recorder.is_constant(inner)
                and not ti.is_functorch_wrapped_tensor(inner)
            ):
                with ti.no_dispatch():
                    return func(inner, *args, **kwargs)
        if func in _MEMORY_METHODS:
            raise memory_refusal(user_line(), _MEMORY_METHODS[func])
        raise TraceError(
            f"{user_line()}: {_VALUE_METHODS[func]} was asked of a tensor that depends on the arguments or is "
            "captured. A traced function runs once and must not depend on values: stay in torch ops, or compute it "
            "outside and pass it in."
        )


def _leaves(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The leaves that a backward pass from the tensors goes to."""
    found: dict[int, torch.Tensor] = {}
    with torch._C.DisableTorchFunction():
        stack: list[Any] = [t.grad_fn for t in tensors]
        found.update((id(t), t) for t in tensors if t.grad_fn is None and t.requires_grad)
    seen: set[Any] = {None}
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found[id(node.variable)] = node.variable
        stack += [following for following, _ in node.next_functions]
    return list(found.values())


def _check_supported(tensor: torch.Tensor) -> None:
    if not has_own_data(tensor):
        try:
            check_kind(tensor)
        except (TypeError, ValueError) as error:
            raise TraceError(f"{user_line()}: {error}") from None
