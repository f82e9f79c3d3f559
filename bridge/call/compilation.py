"""The compiled programs of a call, its derivatives and its maps: forward, and backward where an input asks for it."""

from __future__ import annotations

import itertools
import operator
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.experimental.layout import Format, Layout
from jax.extend.core import ClosedJaxpr

from ...jax_impl.program.trees import flatten
from ..base.errors import TraceError
from ..base.versions import enable_x64
from ..derive.context import Call, running
from ..derive.dependence import dependent_outputs
from ..derive.functions import DeletedFunction
from ..effects.bindings import as_before, assign
from ..effects.running import no_derivative_again, where
from ..effects.side_effects import Watched
from ..memory.dtypes import jax_dtype
from ..memory.values import array_to_tensor, jax_device, tensor_to_array, tensors_to_arguments, unusual_stride
from .failures import Checked
from .flat import Flat, Outline, Root, linearize
from .pullbacks import BackwardPass, Pullback, independent, unread

Draw: TypeAlias = np.ndarray | int | None  # the key of a call's draws; in a recording, the number of the draw
ForwardResults: TypeAlias = tuple[Sequence[jax.Array], ...]  # the outputs, the new values of buffers, the residuals

_KEY = jax.ShapeDtypeStruct((2,), "uint32")


def trace(flat: Flat, tensors: Sequence[torch.Tensor]) -> tuple[ClosedJaxpr, Call]:
    """The program of a flat function, its first input the key of its draws, and what its trace has met.

    Nothing is compiled; the tensors may be those of ``torch.func``.
    """
    root = flat.root
    call = Call({}, None, root.device, root.grad)
    with torch._C.DisableTorchFunction():
        avals = [jax.ShapeDtypeStruct(t.shape, jax_dtype(t.dtype)) for t in tensors]
    with enable_x64(), running(call), as_before(root.before):
        return jax.make_jaxpr(lambda key, *arrays: flat.run(call, key, arrays))(_KEY, *avals), call


def outline(root: Root, tensors: Sequence[torch.Tensor]) -> Outline:
    """What a trace of a call shows."""
    return Outline.of(trace(root, tensors)[1], root)


class Program:
    """A flat function compiled for inputs of one form: forward, and where an input requires grad, backward.

    It keeps compiled code and shapes, no tensors. Where several outputs can be differentiated it also keeps what JAX
    linearised: which of them have cotangents is seen in a backward pass, and compiled for then.
    """

    def __init__(self, flat: Flat, tensors: Sequence[torch.Tensor]) -> None:
        root = flat.root
        self.need = tuple(torch.is_grad_enabled() and is_differentiable(t) for t in tensors)
        self.title = f"{where(root.walk)}{flat.what} of {_described(root, tensors, self.need)}"
        self.device, self.grad = root.device, root.grad
        self.recompute = root.recompute and flat is root
        call = Call({}, None, root.device, root.grad)
        self._lock = threading.Lock()
        self.read: list[int] = []  # inputs that the backward pass of all outputs reads
        self.flat: set[int] = set()  # inputs whose gradient is zero whatever the cotangents are
        avals = _avals(tensors, root.device)
        again = Watched(root.walk) if root.outline is not None and root.outline.changing else None
        with enable_x64(), running(call), as_before(root.before):
            if flat is not root and again is None and not root.walk.is_up_to_date():
                raise TraceError(
                    f"{where(root.walk)}something that the function reads (an attribute, a global, an entry of a list) "
                    "has changed between the call and a derivative that starts from its inputs, as second derivatives "
                    "and recompute=True do: that would be one of another function. Take the derivative before the "
                    "change, or pass in what changes as an argument."
                )
            if any(self.need) and not self.recompute:
                self._compile_both(flat, call, avals)
            else:
                self._compile_forward(flat, call, avals)
        if again is not None and call.changing and flat is not root:
            again.restore()
            raise no_derivative_again(root.walk)
        if call.missing and flat is not root:
            raise RuntimeError(
                "a tensor that the function captures was replaced by another one between the call and a derivative "
                "that starts from its inputs"
            )
        self.outline = Outline.of(call, root)
        self.mutated = self.outline.mutated if flat is root else []
        self.written = {*self.mutated, *(i for i, _ in self.outline.carried)} if flat is root else set()

    def _compile_forward(self, flat: Flat, call: Call, avals: Sequence[jax.ShapeDtypeStruct]) -> None:
        def forward(key: jax.Array, *arrays: jax.Array) -> ForwardResults:
            outputs = flat.run(call, key, arrays)
            return outputs, [value for _, value in call.updates] if flat is flat.root else [], []

        traced = jax.jit(forward).trace(_KEY, *avals)
        self.unread = unread(traced.jaxpr)
        self.saved: list[int] = []
        depends = dependent_outputs(traced.jaxpr, [False, *self.need])
        self.moving = [d and _inexact(aval.dtype) for d, aval in zip(depends, traced.out_info[0], strict=False)]
        self.absent_outputs = self._zero_gradients(flat, traced)
        self._forward = None if call.missing else Checked(traced, call, [_KEY, *avals])

    def _compile_both(self, flat: Flat, call: Call, avals: Sequence[jax.ShapeDtypeStruct]) -> None:
        kept: list[Any] = []

        def forward(key: jax.Array, *arrays: jax.Array) -> ForwardResults:
            outputs, move, updates = linearize(flat, call, key, self.need, arrays)
            leaves, treedef = flatten(move)
            written = {i for i, _ in (*call.updates, *call.carried)}
            # A residual that is an input is kept as the tensor: a write to it before backward can be seen.
            which = [next((i for i, a in enumerate(arrays) if a is leaf and i not in written), None) for leaf in leaves]
            kept[:] = [treedef, which]
            updates = updates if flat is flat.root else []
            return outputs, updates, [leaf for leaf, i in zip(leaves, which, strict=True) if i is None]

        traced = jax.jit(forward).trace(_KEY, *avals)
        self.unread = unread(traced.jaxpr)
        treedef, which = kept
        outputs, _, residuals = traced.out_info
        self.saved = [i for i in which if i is not None]
        self.moving = [m and _inexact(aval.dtype) for m, aval in zip(call.moving, outputs, strict=True)]
        self.absent_outputs = self._zero_gradients(flat, traced)
        if call.missing:
            return
        self._forward = Checked(traced, call, [_KEY, *avals])
        saved, inputs = [avals[i] for i in self.saved], list(itertools.compress(avals, self.need))
        pullback = Pullback(treedef, which, saved, residuals, inputs, outputs)
        self._backwards: dict[tuple[bool, ...], BackwardPass | None] = {}
        self._pullback: Pullback | None = None
        needed = (i for i, n in enumerate(self.need) if n)
        reads, moves = pullback.reads_and_moves()
        self.read = list(itertools.compress(self.saved, reads))
        self.flat = {i for i, has_gradient in zip(needed, moves, strict=True) if not has_gradient}
        if sum(self.moving) > 1:
            self._pullback = pullback
        elif any(self.moving):
            self._backwards[tuple(self.moving)] = pullback.compile(self.moving, call)

    @staticmethod
    def _zero_gradients(flat: Flat, traced: jax.stages.Traced) -> list[bool]:
        """Which outputs are gradients that do not depend on the cotangents: these are zero, and torch says None."""
        if flat.first_cotangent is None:
            return []
        return independent(traced.jaxpr, flat.first_cotangent + 1)[: len(traced.out_info[0])]

    def forward(
        self, key: Draw, tensors: Sequence[torch.Tensor], written: Sequence[torch.Tensor] | None = None
    ) -> tuple[list[torch.Tensor], list[jax.Array]]:
        """Outputs and residuals; buffers are updated, of the inputs or of those ``written`` in their place."""
        with enable_x64():
            outputs, updates, residuals = self._forward(key, *tensors_to_arguments(tensors))  # type: ignore[misc]
            made = [array_to_tensor(o) for o in outputs]
            for i, value in zip(self.mutated, updates, strict=True):
                assign((written or tensors)[i], array_to_tensor(value), i in self.outline.moved)
        return made, residuals

    def backward(
        self,
        tensors: Sequence[torch.Tensor],
        residuals: Sequence[jax.Array],
        cotangents: Sequence[torch.Tensor | None],
        check: Callable[[Iterable[int]], None],
    ) -> list[torch.Tensor | None] | None:
        """Gradients for the needed inputs, None where there is none; None if they have to start from the inputs.

        ``check`` refuses inputs, of those that the backward pass reads, which were written to after the call.
        """
        live = tuple(m and c is not None for m, c in zip(self.moving, cotangents, strict=True))
        if not any(live):
            return [None] * sum(self.need)
        program = self._backward_of(live)
        if program is None:
            return None
        check(i for i, is_read in zip(self.saved, program.reads, strict=True) if is_read)
        with enable_x64():
            given = [tensor_to_array(c.contiguous()) for c, alive in zip(cotangents, live, strict=True) if alive]  # type: ignore[union-attr]
            found = program.compiled([tensor_to_array(tensors[i]) for i in self.saved], residuals, given)
            return [None if absent else array_to_tensor(g) for absent, g in zip(program.absent, found, strict=True)]

    def _backward_of(self, live: tuple[bool, ...]) -> BackwardPass | None:
        with self._lock:
            if live not in self._backwards:
                assert self._pullback is not None
                call = Call({}, None, self.device, self.grad)
                with enable_x64(), running(call):
                    try:
                        self._backwards[live] = self._pullback.compile(live, call)
                    except DeletedFunction:
                        self._backwards[live] = None
            return self._backwards[live]

    def memory_analysis(self) -> Any:
        """XLA's figures for the compiled forward program; ``temp_size_in_bytes`` is the peak of its temporaries."""
        return self._forward.memory_analysis()  # type: ignore[union-attr]


def _inexact(dtype: np.dtype) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.inexact))


def _avals(tensors: Sequence[torch.Tensor], device: torch.device) -> list[jax.ShapeDtypeStruct]:
    where = jax.sharding.SingleDeviceSharding(jax_device(device))
    return [
        jax.ShapeDtypeStruct(t.shape, jax_dtype(t.dtype), sharding=where if order is None else _format(order, where))
        for t, order in zip(tensors, map(memory_order, tensors), strict=True)
    ]


def memory_order(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """The order of the axes in memory that a program has to be compiled for; None for the usual one."""
    if tensor.layout is not torch.strided or _has_usual_strides(tensor):
        return None
    array: Any = tensor_to_array(tensor)
    order = tuple(array.format.layout.major_to_minor)
    return None if order == tuple(range(tensor.dim())) else order


def _has_usual_strides(tensor: torch.Tensor) -> bool:
    """Whether the tensor is contiguous, and in the usual order of axes.

    To torch the stride of an axis of length 1 does not matter: a contiguous tensor may have its axes in another order.
    """
    if not tensor.is_contiguous() or 1 not in tensor.shape:
        return tensor.is_contiguous()
    usual = itertools.accumulate(reversed(tensor.shape[1:]), operator.mul, initial=1)
    return tensor.stride() == tuple(usual)[::-1]


def _format(order: tuple[int, ...], where: jax.sharding.Sharding) -> Format:
    return Format(Layout(order), where)


def is_differentiable(tensor: torch.Tensor) -> bool:
    """Whether torch would track gradients of the tensor."""
    return tensor.requires_grad and (tensor.is_floating_point() or tensor.is_complex())


def _described(root: Root, tensors: Sequence[torch.Tensor], need: Sequence[bool]) -> str:
    """What tells the programs of one function apart."""
    parts = [_form(t) for t in tensors] or ["no tensors"]
    parts += [f"static {x!r:.40}" if _is_plain(x) else f"a static {type(x).__name__}" for x in root.static]
    needed = [str(i) for i, n in enumerate(need) if n]
    parts += [f"with gradients by input {' and '.join(needed)}"] if needed else []
    return ", ".join([*parts, f"captured values {hash(root.walk.key) & 0xFFFF:04x}"])


def _form(tensor: torch.Tensor) -> str:
    with torch._C.DisableTorchFunction():
        form = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
        form += "" if tensor.device.type == "cpu" else f" on {tensor.device}"
        return form if unusual_stride(tensor) is None else f"{form} with strides {tensor.stride()}"


def _is_plain(x: object) -> bool:
    return x is None or type(x) in (bool, int, float, complex, str, bytes)
