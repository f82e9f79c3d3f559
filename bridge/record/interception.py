"""A function mode above autograd: stand-ins for captured tensors, and what has to be refused or rewritten."""

from __future__ import annotations

import sys
import types
from collections.abc import Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ...jax_impl.program.trees import Function
from ..base import torch_internals as ti
from ..base.errors import TraceError, memory_refusal, user_line
from ..base.user_code import OWN, asked_by
from ..lowerings.signatures import Arguments, Keywords
from ..watch.names import HISTORY, remember_read
from .backward import fill_grads, noting, refuse_grad
from .captured import Captured
from .functions import REPLACEMENTS
from .indexing import read_index, write_index
from .nodes import History, Meta
from .packing import PACKED, is_packed
from .recorder import Cut

_WHOLE = (torch.int8, torch.int16, torch.int32, torch.int64)
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


class Interception(TorchFunctionMode):
    """Above autograd: stand-ins for captured tensors, and what has to be refused or rewritten before it runs."""

    def __init__(self, captured: Captured) -> None:
        super().__init__()
        self.recorder, self.captured = captured.recorder, captured
        self.recording_backward = False  # whether autograd records the backward pass that runs

    def __torch_function__(
        self, func: Function, types: Sequence[type], args: Arguments = (), kwargs: Keywords | None = None
    ) -> object:
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

    def _by_objects(self, func: Function, types: Sequence[type], args: Arguments, kwargs: Keywords) -> object:
        """Return what objects, or tensors of a class with a ``__torch_function__`` of its own, make of an op.

        They see no stand-ins: the ops that they call come here.
        """
        operands = ti.torch_pytree.tree_leaves((args, kwargs), is_leaf=lambda x: type(x) in types)
        with self:
            for operand in ti.overloaded(operands):
                result = operand.__torch_function__(func, types, args, kwargs)
                if result is not NotImplemented:
                    return result
        raise TypeError(f"{user_line()}: no operand of {func} knows it: {', '.join(t.__name__ for t in types)}.")

    def _run(self, func: Function, args: Arguments, kwargs: Keywords) -> Any:
        if func == _GET_GRAD:
            refuse_grad(self.captured, args[0], "reads")
        if func in _WRITE_GRAD:
            refuse_grad(self.captured, args[0], "writes")
        given: Any = args
        if func in _HISTORY:
            return self._history(_HISTORY[func], args[0])
        args, kwargs = ti.map_tensors(self.captured.stand_in, (args, kwargs))
        if self.captured.views:
            self.captured.check_views((args, kwargs))
        if func in _VALUE_METHODS and args[1:] != ("",):  # f"{x}" shows the tensor as it is
            return self._constant_value(func, *args, **kwargs)
        if func in _MEMORY_METHODS:
            return self._constant_value(func, *args, **kwargs)
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            places = [k for k, i in enumerate(index) if self._is_number(i)]
            if places and func is torch.Tensor.__getitem__:
                view, result = read_index(args[0], index, places)
                self.captured.views.append(view)
                return result
            if places and all(isinstance(i, int) or k in places for k, i in enumerate(index)):
                self.captured.views = [v for v in self.captured.views if not v.is_put_back(args[0], index, args[2])]
                return write_index(args[0], index, args[2])
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
                return fill_grads(self.captured, **given)
        if func is torch.Tensor.register_hook:
            return func(args[0], noting(self.recorder, *args[1:], **kwargs))
        if is_packed(func, args):
            return PACKED[func](args[0], self._lengths(args[1]), *args[2:], **kwargs)
        result = REPLACEMENTS.get(func, func)(*args, **kwargs)
        # What works in place hands back the very tensor, as the caller knows it.
        return given[0] if args and result is args[0] and isinstance(given[0], torch.Tensor) else result

    def _history(self, name: str, tensor: torch.Tensor) -> object:
        """Return what autograd says of a tensor; of arguments and captured ones, what it says outside."""
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

    def _note_cuts(self, result: object) -> None:
        """Remember what a user's backward pass computed without autograd, which is asked for its derivative."""
        for tensor in ti.torch_pytree.tree_leaves(result):
            if isinstance(tensor, ti.FunctionalTensor) and Meta.of(tensor).differentiable:
                with torch._C.DisableTorchFunction():
                    tracked = tensor.requires_grad
                node = None if tracked else self.recorder.node_of(tensor)
                if node is not None:
                    self.recorder.cuts.append(Cut(node, user_line(), not torch.is_grad_enabled()))

    def _is_number(self, index: object) -> bool:
        """Tell whether an index is a whole number that depends on the arguments."""
        if not isinstance(index, torch.Tensor) or index.dim() or index.dtype not in _WHOLE:
            return False
        with torch._C.DisableTorchFunction():
            inner: Any = ti.from_fun(index.detach()) if isinstance(index, ti.FunctionalTensor) else index
            return ti.is_functorch_wrapped_tensor(inner) or not self.recorder.is_constant(inner)

    def _set_data(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Assign ``tensor.data = value``: the memory of the value, unseen by autograd."""
        if (tensor.shape, tensor.dtype) != (value.shape, value.dtype):
            raise TraceError(
                f"{user_line()}: the function assigns .data of another shape or dtype. Make a new tensor instead."
            )
        self.captured.moved[id(tensor)] = user_line()
        with torch.no_grad():
            ti.share_memory(tensor, value)

    def _lengths(self, tensor: torch.Tensor) -> list[int]:
        try:
            return self._constant_value(torch.Tensor.tolist, tensor)
        except TraceError:
            raise TraceError(
                f"{user_line()}: the lengths of a packed sequence are a tensor that depends on the arguments or is "
                "captured, and the shape of the result depends on them. Give them as a Python list, of which each new "
                "one compiles, or keep the padding and mask it."
            ) from None

    def _constant_value(self, func: Function, tensor: torch.Tensor, *args: object, **kwargs: object) -> Any:
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
