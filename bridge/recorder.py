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
import hashlib
import os
import random
import site
import sys
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from . import torch_internals as ti
from .graph import Const, Graph, Meta, Node, Ref, Value
from .lowerings import has_lowering
from .lowerings.functions import REPLACEMENTS
from .values import jax_dtype

aten = torch.ops.aten
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_OWN = tuple(os.path.join(_PACKAGE, part, "") for part in ("bridge", "jax_impl", "torch_api"))
_LIBRARIES = tuple(
    os.path.join(path, "")
    for path in {
        *site.getsitepackages(),
        os.path.dirname(os.__file__),
        os.path.dirname(os.path.dirname(torch.__file__)),
    }
)
_VALUE_OPS = (aten._local_scalar_dense, aten.is_nonzero, aten.item, aten.equal, aten.allclose)
_VALUE_METHODS = {
    torch.Tensor.numpy: ".numpy()",
    torch.Tensor.__array__: "numpy.asarray",
    torch.Tensor.tolist: ".tolist()",
}
_ALIASES = (aten.detach.default, aten.alias.default, aten.lift_fresh.default, aten.lift.default)
_INDEXING = (aten.index, aten.index_put, aten._unsafe_index, aten._unsafe_index_put)


class TraceError(TypeError):
    """A torch function does something that a compiled program cannot express."""


def user_line(error: BaseException | None = None) -> str:
    """``file.py:12`` of the innermost frame that belongs to no library (of a library's, where there is no other)."""
    if error is None:
        frames = _frames(sys._getframe(1))
    else:
        frames = reversed([(f.f_code.co_filename, line) for f, line in traceback.walk_tb(error.__traceback__)])
    library = "?"
    for name, line in frames:
        if not name.startswith((*_OWN, "<frozen")):
            if not name.startswith(_LIBRARIES):
                return f"{name}:{line}"
            library = f"{name}:{line}" if library == "?" else library
    return library


def _frames(frame: types.FrameType | None) -> Iterator[tuple[str, int]]:
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back


class _Functionalisation(ti.FunctionalTensorMode):
    """torch's, out of sight of function modes: what runs in it is torch's own, not the user's."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            return super().__torch_dispatch__(func, types, args, kwargs)


class WrittenArgument(TraceError):
    """The function writes in place to the tensor argument of this number."""

    def __init__(self, index: int) -> None:
        super().__init__(f"the function writes to its tensor argument {index} in place; clone it first.")
        self.index = index


class _Recorder(ti.TorchDispatchMode):
    """Writes down the ops that depend on an input; runs the others."""

    def __init__(self) -> None:
        super().__init__()
        self._mode_key = ti.BELOW_FUNCTIONALISATION
        self.tracer = types.SimpleNamespace(tensor_tracker={})  # torch looks for one in this slot
        self.fake = ti.FakeTensorMode(allow_non_fake_inputs=True)
        self.nodes: list[Node | None] = []
        self.where: dict[int, Ref] = {}
        self.keep: list[torch.Tensor] = []  # ids stay unique while their tensors live
        self.draws: dict[str, int] = {}
        self.core = ti.core_aten_decompositions()

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True

    def input(self, meta: Meta) -> torch.Tensor:
        with ti.no_dispatch(), self.fake:
            tensor = torch.empty(meta.shape, dtype=meta.dtype, device=meta.device)
        self.nodes.append(None)
        self._bind(tensor, Ref(len(self.nodes) - 1))
        return tensor

    def value(self, tensor: torch.Tensor) -> Value:
        """What a tensor below functionalisation stands for."""
        ref = self.where.get(id(tensor))
        return ref if ref is not None else Const(_snapshot(tensor))

    def is_constant(self, tensor: torch.Tensor) -> bool:
        return id(tensor) not in self.where and not isinstance(tensor, ti.FakeTensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():  # what runs down here is torch's own, not the user's
            return self._dispatch(func, args, kwargs or {})

    def _dispatch(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        tensors = [t for t in ti.torch_pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if any(isinstance(t, ti.FunctionalTensor) for t in tensors):
            return NotImplemented
        if func.namespace == "prim" or func in ti.FunctionalTensor.metadata_fns:
            with self.fake:
                return func(*args, **kwargs)
        if func is aten._efficientzerotensor.default:  # a zero without storage: JAX has no such thing
            func, kwargs = aten.zeros.default, {k: v for k, v in kwargs.items() if k in ("dtype", "device")}
        random = torch.Tag.nondeterministic_seeded in func.tags
        if not random and not any(id(t) in self.where or t.requires_grad for t in tensors):
            context = self.fake if any(isinstance(t, ti.FakeTensor) for t in tensors) else contextlib.nullcontext()
            with ti.no_dispatch(), context:
                return func(*args, **kwargs)
        if any(t.requires_grad for t in tensors if self.is_constant(t)):
            raise TraceError(
                f"{user_line()}: {func} reads a captured tensor that could not be made an input; pass it in."
            )
        self._refuse_values(func, kwargs)
        if func in _ALIASES:
            return self._alias(args[0])
        if func is aten.is_same_size.default:
            return tuple(args[0].shape) == tuple(args[1].shape)
        if func in (aten._linalg_check_errors.default, aten._assert_async.msg, aten._assert_async.default):
            return None
        if func is aten.as_strided.default and not args[0].is_contiguous():
            raise TraceError(
                f"{user_line()}: as_strided on a tensor that is not contiguous reads memory that XLA does not lay out "
                "that way; call .contiguous() first, or index the tensor."
            )
        if func.overloadpacket in _INDEXING:
            args = (args[0], self._index(args[1]), *args[2:])
        decomposed = self._decompose(func, args, kwargs, random)
        return self._record(func, args, kwargs, tensors, random) if decomposed is NotImplemented else decomposed

    def _refuse_values(self, func: Any, kwargs: dict[str, Any]) -> None:
        if func.overloadpacket in _VALUE_OPS:
            raise TraceError(
                f"{user_line()}: a Python number or bool was asked of a tensor that depends on the arguments (.item(), "
                "int(), bool(), if, while). A traced function runs once and must not depend on values: use "
                "torch.where, or compute the number outside and pass it in."
            )
        if kwargs.get("generator") is not None:
            raise TraceError(
                f"{user_line()}: {func.overloadpacket} was given a generator. A traced function draws from a key that "
                "each call takes from torch's default generator: leave `generator` out and use torch.manual_seed."
            )

    def _index(self, indices: Sequence[Any]) -> list[Any]:
        """Constant boolean masks become plain integer indices."""
        result: list[Any] = []
        for index in indices:
            if isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8) and self.is_constant(index):
                with ti.no_dispatch():
                    result += index.nonzero().unbind(1)
            else:
                result.append(index)
        return result

    def _decompose(self, func: Any, args: Any, kwargs: Any, random: bool) -> Any:
        """Smaller ops, for what has no lowering of ours: torch's decompositions are exact, torchax's table less so."""
        known = has_lowering(func)
        if known == "own":
            return NotImplemented
        tables = [self.core] if random or known else [self.core, ti.decomposition_table]
        for table in tables:
            if func in table and not (random and known):
                with self:
                    result = table[func](*args, **kwargs)
                if result is not NotImplemented:
                    return result
        if not known and not random and func._can_decompose():
            with self:
                return func.decompose(*args, **kwargs)
        return NotImplemented

    def _record(self, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor], random: bool) -> Any:
        try:
            with self.fake:
                out = func(*args, **kwargs)
        except (ti.DynamicOutputShapeException, ti.DataDependentOutputException):
            raise TraceError(
                f"{user_line()}: the shape of the result of {func.overloadpacket} depends on values, which a compiled "
                "program cannot express. Keep the shape fixed: a mask with torch.where, or a weighted sum."
            ) from None
        except Exception as error:
            error.add_note(f"while microtome traced {user_line()}")
            raise
        outs = ti.torch_pytree.tree_leaves(out)
        leaves, spec = ti.torch_pytree.tree_flatten((args, kwargs))
        values = tuple(self.value(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
        index, single = len(self.nodes), isinstance(out, torch.Tensor)
        results = tuple(Meta.of(o) if isinstance(o, torch.Tensor) else None for o in outs)
        draw = self._draw_number() if random else None
        self.nodes.append(Node(func, values, _Spec(spec), results, single, draw, user_line()))
        if single:
            return self._own(out, tensors, Ref(index))
        owned = [self._own(o, tensors, Ref(index, j)) if isinstance(o, torch.Tensor) else o for j, o in enumerate(outs)]
        return ti.torch_pytree.tree_unflatten(owned, ti.torch_pytree.tree_structure(out))

    def _alias(self, tensor: torch.Tensor) -> torch.Tensor:
        with self.fake:
            out = tensor.detach()
        self._bind(out, self.where[id(tensor)])
        return out

    def _own(self, out: torch.Tensor, tensors: list[torch.Tensor], ref: Ref) -> torch.Tensor:
        if any(out is t for t in tensors):  # an op that hands its argument back must not rebind it
            with ti.no_dispatch(), self.fake:
                out = torch.empty_strided(out.shape, out.stride(), dtype=out.dtype, device=out.device)
        self._bind(out, ref)
        return out

    def _bind(self, tensor: torch.Tensor, ref: Ref) -> None:
        self.where[id(tensor)] = ref
        self.keep.append(tensor)

    def _draw_number(self) -> int:
        """Draws that torch itself would repeat (checkpoint restores the generator) get the same number."""
        state = hashlib.sha1(torch.get_rng_state().numpy().tobytes()).hexdigest()
        number = self.draws.setdefault(state, len(self.draws))
        with ti.no_dispatch():
            torch.rand(1)  # the next draw finds the generator moved on
        return number


class _Spec:
    """A torch pytree structure with the one method that running a graph needs."""

    __slots__ = ("spec",)

    def __init__(self, spec: Any) -> None:
        self.spec = spec

    def unflatten(self, leaves: Sequence[Any]) -> Any:
        return ti.torch_pytree.tree_unflatten(leaves, self.spec)


def _snapshot(tensor: torch.Tensor) -> np.ndarray:
    with ti.no_dispatch():
        plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        dtype = jax_dtype(plain.dtype)
        if plain.dtype in (torch.bfloat16, *_FLOAT8):
            plain = plain.view(torch.int16 if plain.dtype == torch.bfloat16 else torch.uint8)
        return np.array(plain.numpy(), copy=True).view(dtype)


_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


_ACTIVE: list[Captured] = []  # innermost last


def is_update_of(tensor: torch.Tensor, captured: torch.Tensor) -> bool:
    """Whether ``tensor`` is the stand-in of a captured tensor, which in-place operators hand back."""
    return bool(_ACTIVE) and _ACTIVE[-1].stand_ins.get(id(captured)) is tensor


class Captured:
    """The tensors that a function captures, in the order in which it met them, each with its recorded stand-in."""

    def __init__(self, known: Sequence[torch.Tensor]) -> None:
        self.tensors = list(known)
        self.inputs: list[torch.Tensor] = []
        self.stand_ins: dict[int, torch.Tensor] = {}

    def __enter__(self) -> Captured:
        _ACTIVE.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        _ACTIVE.pop()

    def add(self, tensor: torch.Tensor, recorder: _Recorder, differentiable: bool) -> torch.Tensor:
        inner = recorder.input(Meta.of(tensor))
        stand_in = ti.to_fun(inner).requires_grad_(differentiable)
        self.inputs.append(inner)
        self.stand_ins[id(tensor)] = stand_in
        return stand_in


class _Interception(TorchFunctionMode):
    """Above autograd: stand-ins for captured tensors, and what has to be refused or rewritten before it runs."""

    def __init__(self, recorder: _Recorder, captured: Captured) -> None:
        super().__init__()
        self.recorder, self.captured = recorder, captured

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        args, kwargs = ti.torch_pytree.tree_map_only(torch.Tensor, self.stand_in, (args, kwargs))
        if func is torch.Tensor.backward:
            raise TraceError(
                f"{user_line()}: .backward() inside a traced function would write .grad of tensors that exist only "
                "during the trace. Use torch.autograd.grad(..., create_graph=True) or torch.func.grad."
            )
        if func in _VALUE_METHODS:
            return self._constant_value(func, *args, **kwargs)
        if func is torch.autograd.grad:
            with ti.function_modes_in_backward(), self:
                return func(*args, **kwargs)
        return REPLACEMENTS.get(func, func)(*args, **kwargs)

    def stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        """What the function is to see in the place of a tensor: another one if it was not made inside."""
        with torch._C.DisableTorchFunction():  # also called from where this mode is active
            if isinstance(tensor, (ti.FunctionalTensor, ti.FakeTensor)) or ti.is_functorch_wrapped_tensor(tensor):
                return tensor
            known = self.captured.stand_ins.get(id(tensor))
            if known is not None:
                return known
            if id(tensor) in self.recorder.where or torch._is_functional_tensor(tensor):
                return tensor
            _check_supported(tensor)
            with ti.temporarily_clear_interpreter_stack():
                self.captured.tensors.append(tensor)
                return self.captured.add(tensor, self.recorder, tensor.requires_grad)

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
        raise TraceError(
            f"{user_line()}: {_VALUE_METHODS[func]} was asked of a tensor that depends on the arguments. A traced "
            "function runs once and must not depend on values: stay in torch ops, or compute it outside and pass it in."
        )


def _check_supported(tensor: torch.Tensor) -> None:
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested or tensor.device.type == "meta":
        raise TypeError(
            f"{user_line()}: a captured tensor is sparse, quantised, nested or on the meta device "
            f"(layout={tensor.layout}, dtype={tensor.dtype}, device={tensor.device}); only dense tensors can be traced."
        )


def record(
    fun: Callable[..., Sequence[torch.Tensor]],
    metas: Sequence[Meta],
    need: Sequence[bool],
    known: Sequence[torch.Tensor],
) -> tuple[Graph, list[torch.Tensor]]:
    """Record ``fun(*tensors) -> tensors`` and, for the inputs that ``need`` names, its vector-Jacobian product.

    Args:
        fun: takes one tensor for each of ``metas``, and returns a flat list of tensors.
        metas: dtype, shape and device of the arguments.
        need: one flag for each argument and each tensor of ``known``: record its gradient.
        known: captured tensors found by an earlier recording, in order.

    Returns:
        The graph, and the captured tensors: ``known`` and then whatever was met for the first time.

    Raises:
        TraceError: the function asks for values, draws Python random numbers, or writes to an argument.
    """
    try:
        return _record_once(fun, metas, need, known)
    except TraceError as error:
        # Libraries skip their checks of values where torch.compile would run them: one more try under that flag.
        with ti.compiling(), contextlib.suppress(Exception):
            return _record_once(fun, metas, need, known)
        raise error


def _numpy_state() -> Any:
    return np.random.get_state()  # noqa: NPY002


@contextlib.contextmanager
def _unchanged_generators() -> Iterator[None]:
    torch_state, python_state, numpy_state = torch.get_rng_state(), random.getstate(), _numpy_state()
    try:
        yield
        if random.getstate() != python_state or str(_numpy_state()) != str(numpy_state):
            raise TraceError(
                "the function draws from Python's or NumPy's generator. A traced function runs once, and the "
                "number would be frozen: draw with torch, or pass the number in as an argument."
            )
    finally:
        torch.set_rng_state(torch_state)
        random.setstate(python_state)
        np.random.set_state(numpy_state)  # noqa: NPY002


def _record_once(fun: Any, metas: Any, need: Any, known: Any) -> tuple[Graph, list[torch.Tensor]]:
    recorder, captured = _Recorder(), Captured(known)
    inner = [recorder.input(meta) for meta in metas]
    with _unchanged_generators(), ti.plain_kernels(), torch.enable_grad(), recorder, _Functionalisation():
        arguments = [ti.to_fun(t).requires_grad_(n) for t, n in zip(inner, need, strict=False)]
        for tensor, differentiable in zip(known, need[len(metas) :], strict=True):
            captured.add(tensor, recorder, differentiable)
        interception = _Interception(recorder, captured)
        with interception, captured, ti.entering_functorch(interception.stand_in):
            outputs = [_functional(interception.stand_in(o)) for o in fun(*arguments)]
            differentiable = [o.requires_grad for o in outputs]
            cotangents = [recorder.input(Meta.of(o)) for o, d in zip(outputs, differentiable, strict=True) if d]
            wanted = [a for a, n in zip(arguments, need, strict=False) if n]
            wanted_captured = [t for t, n in zip(known, need[len(metas) :], strict=True) if n]
            gradients = _gradients(
                [o for o, d in zip(outputs, differentiable, strict=True) if d],
                wanted,
                wanted_captured,
                captured,
                [ti.to_fun(c) for c in cotangents],
            )
        graph = _graph(recorder, captured, inner, arguments, cotangents, outputs, differentiable, gradients)
    return graph, captured.tensors


def _functional(out: Any) -> torch.Tensor:
    return out if isinstance(out, ti.FunctionalTensor) else aten.lift_fresh(out)


def _gradients(outputs: Any, wanted: Any, wanted_captured: Any, captured: Captured, cotangents: Any) -> list[Any]:
    if not outputs or not (wanted or wanted_captured):
        return [None] * (len(wanted) + len(wanted_captured))
    stand_ins = [captured.stand_ins[id(t)] for t in wanted_captured]
    # A user's autograd.Function receives a captured tensor itself, not its stand-in: both lead to its gradient.
    direct = [t for t in wanted_captured if t.requires_grad]
    found = torch.autograd.grad(outputs, [*wanted, *stand_ins], cotangents, allow_unused=True, retain_graph=True)
    with torch._C.DisableTorchFunction():
        extra = torch.autograd.grad(outputs, direct, cotangents, allow_unused=True) if direct else ()
    gradients = list(found)
    for tensor, more in zip(direct, extra, strict=True):
        if more is not None:
            i = len(wanted) + next(j for j, t in enumerate(wanted_captured) if t is tensor)
            gradients[i] = more if gradients[i] is None else gradients[i] + more
    return gradients


def _graph(
    recorder: _Recorder,
    captured: Captured,
    inner: Any,
    arguments: Any,
    cotangents: Any,
    outputs: Any,
    differentiable: Any,
    gradients: Any,
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
    for i, (tensor, original) in enumerate(zip(captured.tensors, captured.inputs, strict=True)):
        final = value(captured.stand_ins[id(tensor)])
        if final != recorder.value(original):
            mutations.append((i, final))
    return Graph(
        nodes=recorder.nodes,
        inputs=[position(t) for t in inner],
        captured=[position(t) for t in captured.inputs],
        cotangents=[position(t) for t in cotangents],
        outputs=[value(o) for o in outputs],
        output_metas=[Meta.of(o) for o in outputs],
        differentiable=list(differentiable),
        gradients=[None if g is None else value(g) for g in gradients],
        mutations=mutations,
    )
