"""The recorder: a dispatch mode below autograd and functionalisation that writes down ATen ops.

What depends on an input becomes a node of the graph; what does not runs in eager torch and becomes a constant.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import types
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch.nn.modules.batchnorm import _BatchNorm

from ..base import torch_internals as ti
from ..base.errors import TraceError, calling_object, noting_line, user_line
from ..lowerings import has_lowering
from ..lowerings.checks import Condition
from ..lowerings.conditions import Check, asserted, factorised, reports_failure, required
from ..lowerings.half import HALF, IN_FLOAT32, NORMS
from ..lowerings.signatures import Arguments, Forms, Keywords
from ..memory.dtypes import jax_dtype
from .kernels import kernel_dtype
from .nodes import Const, Meta, Node, Op, Ref, Value

aten = torch.ops.aten
_VALUE_OPS = (aten._local_scalar_dense, aten.is_nonzero, aten.item, aten.equal, aten.allclose)
_ALIASES = (aten.detach.default, aten.alias.default, aten.lift_fresh.default, aten.lift.default)
_FACTORING = (aten._linalg_det, aten._linalg_slogdet)
_STRIDED = (aten.as_strided, aten.as_strided_copy, aten.as_strided_scatter)
_INDEXING = (aten.index, aten.index_put, aten._unsafe_index, aten._unsafe_index_put)


@dataclasses.dataclass(frozen=True)
class Cut:
    """A value that a user's backward pass computed, of which autograd knows nothing although it records that pass."""

    node: int
    line: str
    without_grad: bool  # under no_grad, not by detach


class Recorder(ti.TorchDispatchMode):
    """Writes down the ops that depend on an input; runs the others."""

    def __init__(self) -> None:
        super().__init__()
        self._mode_key = ti.BELOW_FUNCTIONALISATION
        self.tracer = types.SimpleNamespace(tensor_tracker={})  # torch looks for one in this slot
        self.fake = ti.FakeTensorMode(allow_non_fake_inputs=True)
        self.nodes: list[Node | None] = []
        self.where: dict[int, Ref] = {}
        self.keep: list[torch.Tensor] = []  # ids stay unique while their tensors live
        self.in_backward: set[int] = set()  # nodes of a user's own backward passes, where autograd records them
        self.cuts: list[Cut] = []
        self.hooked: list[str] = []  # lines of hooks that changed a gradient
        self.lines: dict[int, str] = {}  # by the number that autograd gives to an op
        self.pushes_forward = False  # whether torch's forward mode computes the tangents
        self.draws: dict[str, int] = {}
        self.refusal: TraceError | None = None  # Tensor's operators, C++ and the function itself may catch it
        self.checks: list[Check] = []
        self.core = ti.core_decompositions()

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True

    def input(self, meta: Meta) -> torch.Tensor:
        tensor = self._without_values(meta, meta.stride)
        self.nodes.append(None)
        self._bind(tensor, Ref(len(self.nodes) - 1))
        return tensor

    def value(self, tensor: torch.Tensor) -> Value:
        """Return what a tensor below functionalisation stands for."""
        ref = self.where.get(id(tensor))
        return ref if ref is not None else Const(_snapshot(tensor))

    def node_of(self, tensor: torch.Tensor) -> int | None:
        """Return the node that made a tensor, which may be one above functionalisation."""
        with torch._C.DisableTorchFunction():
            inner: Any = ti.from_fun(tensor.detach()) if isinstance(tensor, ti.FunctionalTensor) else tensor
            ref = self.where.get(id(inner))
        return None if ref is None else ref.node

    def line_of(self, node: int | None) -> str:
        """Return the user's line that made a node."""
        made = None if node is None else self.nodes[node]
        return user_line() if made is None else made.line

    def _line(self) -> str:
        """Return the user's line for an op: in a backward pass that torch wrote, the line of what is differentiated."""
        node = ti.backward_node()
        if node is None:
            line = user_line()
            self.lines[ti.sequence_number()] = line
            return line
        return self.lines.get(node._sequence_nr()) or user_line()

    def is_constant(self, tensor: torch.Tensor) -> bool:
        return id(tensor) not in self.where and not isinstance(tensor, ti.FakeTensor)

    supports_higher_order_operators = True  # to refuse them by name

    def __torch_dispatch__(
        self,
        func: OpOverload | HigherOrderOperator,
        types: Sequence[type],
        args: Arguments = (),
        kwargs: Keywords | None = None,
    ) -> object:
        with torch._C.DisableTorchFunction(), self.noting_refusals():  # what runs down here is torch's, not the user's
            return self._dispatch(func, args, kwargs or {})

    @contextlib.contextmanager
    def noting_refusals(self) -> Iterator[None]:
        """Remember a refusal, in case that it does not get through."""
        try:
            yield
        except TraceError as error:
            self.refusal = error
            raise

    def _dispatch(self, func: OpOverload | HigherOrderOperator, args: Arguments, kwargs: Keywords) -> Any:
        """Write an op down, or the smaller ones it is made of; one that depends on no input runs in eager torch."""
        if isinstance(func, torch._ops.HigherOrderOperator):
            raise TraceError(
                f"{user_line()}: {func} (control flow such as torch.cond, or a custom op that writes to its arguments) "
                "cannot be expressed in JAX. Use torch ops there, or do this outside and pass the result in."
            )
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
        with noting_line():
            dtype = kernel_dtype(func, args, kwargs, tensors)
        if func is aten.is_same_size.default:
            return tuple(args[0].shape) == tuple(args[1].shape)
        if func is aten._linalg_check_errors.default:
            return self._check(args[0], factorised(args[1], **kwargs))
        if func in (aten._assert_async.msg, aten._assert_async.default):
            return self._check(args[0], asserted(*args[1:]))
        if reports_failure(func, args, kwargs):
            return self._factor_with_check(func, args, {**kwargs, "check_errors": False})
        with noting_line():
            conditions = required(func, args, kwargs)
        for tensor, condition in conditions:
            self._check(tensor, condition)
        if func.overloadpacket in _STRIDED:
            self._check_within(func, args, kwargs)
        if func.overloadpacket in _INDEXING:
            args = (args[0], self._index(args[1]), *args[2:])
        if torch.Tag.pointwise in func.tags and not any(t.is_floating_point() or t.is_complex() for t in tensors):
            args = self._promoted(func, args, kwargs)
        if func.overloadpacket in IN_FLOAT32 and any(t.dtype in HALF for t in tensors):
            return self._in_float32(func, args, kwargs)
        if func is aten.native_group_norm.default and not args[0].numel():
            return self._of_nothing(func, args, kwargs)
        try:
            decomposed = self._decompose(func, args, kwargs, random)
            if decomposed is NotImplemented:
                return self._record(func, args, kwargs, tensors, random)
            if isinstance(decomposed, torch.Tensor) and decomposed.dtype != (dtype or decomposed.dtype):
                with self:
                    return decomposed.to(dtype)
            return decomposed
        except ZeroDivisionError:
            if all(t.numel() for t in tensors):
                raise
            return self._of_nothing(func, args, kwargs)

    def _check(self, evidence: torch.Tensor, condition: Condition) -> None:
        self.checks.append(Check(condition, self.value(evidence), user_line()))

    def _factor_with_check(self, func: OpOverload, args: Arguments, kwargs: Keywords) -> object:
        with self:
            results = func(*args, **kwargs)
        self._check(results[-1], factorised(f"torch.linalg.{func.overloadpacket.__name__}", args[0].dim() == 2))
        return results

    def _refuse_values(self, func: OpOverload, kwargs: Keywords) -> None:
        if func.overloadpacket in _VALUE_OPS:
            layer = calling_object(_BatchNorm.forward)
            if layer is not None:
                raise TraceError(
                    f"{user_line()}: {type(layer).__name__} with momentum=None needs the number of its batches as a "
                    "Python number, which a program that is compiled once cannot give. Set a momentum, call .eval() on "
                    "the module, or use a layer without running statistics (GroupNorm, LayerNorm)."
                )
            raise TraceError(
                f"{user_line()}: a Python number or bool was asked of a tensor that depends on the arguments or is "
                "captured (.item(), int(), bool(), if, while). A traced function runs once and must not depend on "
                "values: use torch.where, or compute the number outside and pass it in."
            )
        if kwargs.get("generator") is not None:
            raise TraceError(
                f"{user_line()}: {func.overloadpacket} was given a generator. A traced function draws from a key that "
                "each call takes from torch's default generator: leave `generator` out and use torch.manual_seed."
            )

    def _index(self, indices: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Turn constant boolean masks into plain integer indices."""
        result: list[torch.Tensor | None] = []
        for index in indices:
            if isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8) and self.is_constant(index):
                with ti.no_dispatch():
                    result += index.nonzero().unbind(1)
            else:
                result.append(index)
        return result

    def _check_within(self, func: OpOverload, args: Arguments, kwargs: Keywords) -> None:
        """Refuse an ``as_strided`` that sees more than the tensor's own elements in their order."""
        given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
        tensor, offset, size = given["self"], given.get("storage_offset"), given["size"]
        last = (offset or 0) + sum((n - 1) * step for n, step in zip(size, given["stride"], strict=True))
        part = offset is not None and tensor.storage_offset() != 0  # the offset counts from where the whole starts
        if part or not tensor.is_contiguous() or (0 not in size and last >= tensor.numel()):
            raise TraceError(
                f"{user_line()}: {func.overloadpacket} reads memory that XLA does not lay out that way: the tensor is "
                "not contiguous, or it is a view of a part of another, which is read beyond it or by the other's "
                "offset. Call .contiguous() or .clone() first, or index the tensor."
            )

    def _promoted(self, func: OpOverload, args: Arguments, kwargs: Keywords) -> Arguments:
        """Convert whole numbers to floats for an elementwise op whose result is a float: torch converts first."""
        with self.fake:
            out = ti.torch_pytree.tree_leaves(func(*args, **kwargs))[0]
        if not out.is_floating_point() or func.overloadpacket is aten.where:
            return args
        with self:
            return ti.map_tensors(lambda t: t.to(out.dtype), args)

    def _in_float32(self, func: OpOverload, args: Arguments, kwargs: Keywords) -> object:
        """Compute an op on half-precision tensors in float32, and round at the end."""
        with self.fake:
            narrow, spec = ti.torch_pytree.tree_flatten(func(*args, **kwargs))
        dtypes = {t.dtype for t in ti.torch_pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        if kwargs.get("dtype") in HALF:
            kwargs = {**kwargs, "dtype": torch.float32}
        with self:
            args, kwargs = ti.map_tensors(lambda t: t.float() if t.dtype in HALF else t, (args, kwargs))
            wide = ti.torch_pytree.tree_leaves(func(*args, **kwargs))
            if func.overloadpacket in NORMS and torch.float32 in dtypes:  # so are then mean and deviation in torch
                narrow[1:] = wide[1:]
            rounded = [w.to(n.dtype) if isinstance(n, torch.Tensor) else n for w, n in zip(wide, narrow, strict=True)]
        return ti.torch_pytree.tree_unflatten(rounded, spec)

    def _decompose(self, func: OpOverload, args: Arguments, kwargs: Keywords, random: bool) -> object:
        """Run smaller ops where no lowering is ours: torch's decompositions are exact, torchax's table less so."""
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

    def _of_nothing(self, func: OpOverload, args: Arguments, kwargs: Keywords) -> object:
        """Return the results of an op on empty tensors, which decompositions divide by their size or count wrongly."""
        device = next(t.device for t in ti.torch_pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor))
        with ti.no_dispatch():
            given = ti.map_tensors(lambda t: torch.zeros(t.shape, dtype=t.dtype), (args, kwargs))
            results = func(*given[0], **given[1])
        with self:
            return ti.map_tensors(lambda t: t.to(device), results)

    def _record(
        self, func: OpOverload, args: Arguments, kwargs: Keywords, tensors: list[torch.Tensor], random: bool
    ) -> object:
        try:
            with self.fake, noting_line():
                out = func(*args, **kwargs)
        except (ti.DynamicOutputShapeException, ti.DataDependentOutputException):
            raise TraceError(
                f"{user_line()}: the shape of the result of {func.overloadpacket} depends on values, which a compiled "
                "program cannot express. Keep the shape fixed: a mask with torch.where, or a weighted sum."
            ) from None
        except Exception as error:
            if func.namespace not in ("aten", "prims", "microtome"):
                raise TraceError(
                    f"{user_line()}: {func} is a custom op that cannot be traced ({error}). Use torch ops there, or "
                    "compute this part outside of the function and pass the result in."
                ) from error
            if func is aten.view.default and isinstance(error, ValueError):
                raise RuntimeError(f"{user_line()}: view: {error} Use .reshape(...), as torch says too.") from error
            raise
        outs = ti.torch_pytree.tree_leaves(out)
        if func.overloadpacket in _FACTORING:
            # torch factors the transpose of a contiguous real matrix, and its backward pass counts on that.
            kwargs = {**kwargs, "of_transpose": args[0].is_contiguous() and not args[0].is_complex()}
        leaves, spec = ti.torch_pytree.tree_flatten((args, kwargs))
        values = tuple(self.value(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
        index, single = len(self.nodes), isinstance(out, torch.Tensor)
        results = tuple(Meta.of(o) if isinstance(o, torch.Tensor) else None for o in outs)
        draw = self.draw_number() if random else None
        self.nodes.append(Node(func, values, Spec(spec), results, single, draw, self._line()))
        if single:
            return self._own(out, tensors, Ref(index))
        owned = [self._own(o, tensors, Ref(index, j)) if isinstance(o, torch.Tensor) else o for j, o in enumerate(outs)]
        return ti.torch_pytree.tree_unflatten(owned, ti.torch_pytree.tree_structure(out))

    def call(
        self,
        op: Op,
        tensors: Sequence[torch.Tensor],
        results: Sequence[Meta],
        draw: int | None,
        more: tuple[Value, ...] = (),
    ) -> list[torch.Tensor]:
        """Write down a call of another compiled function; return what it returns, as tensors of this trace."""
        with torch._C.DisableTorchFunction():
            inner: list[Any] = [ti.from_fun(t.detach()) if isinstance(t, ti.FunctionalTensor) else t for t in tensors]
            values = (*map(self.value, inner), *more)
            index = len(self.nodes)
            spec = Spec(ti.torch_pytree.tree_structure((values, {})))
            self.nodes.append(Node(op, values, spec, tuple(results), False, draw, user_line()))
            outs = []
            for j, meta in enumerate(results):
                out = self._without_values(meta)
                self._bind(out, Ref(index, j))
                outs.append(ti.to_fun(out))
            return outs

    def after_latest(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors, to be read only once what was recorded last has been computed."""
        held = self._latest()
        if held is None or not tensors:
            return list(tensors)
        results = [Meta.of(t) for t in tensors]
        made = self.call(Barrier(), tensors, results, None, (held,))
        return [new.requires_grad_(t.requires_grad) for new, t in zip(made, tensors, strict=True)]

    def _latest(self) -> Ref | None:
        """Return the tensor that was recorded last: the cotangent itself, where nothing was computed from it yet."""
        for i in reversed(range(len(self.nodes))):
            node = self.nodes[i]
            if node is None:
                return Ref(i)
            for item, meta in enumerate(node.results):
                if meta is not None:
                    return Ref(i, None if node.single else item)
        return None

    def _without_values(self, meta: Meta, stride: Sequence[int] | None = None) -> ti.FakeTensor:
        """Make a tensor without memory: what escaped the recorder would compute on values that nobody wrote."""
        with torch._C.DisableTorchFunction(), ti.no_dispatch():
            shape = torch.empty(meta.shape, dtype=meta.dtype, device="meta")
            if stride is not None:
                shape = torch.empty_strided(meta.shape, stride, dtype=meta.dtype, device="meta")
            return ti.FakeTensor(self.fake, shape, meta.device)

    def _alias(self, tensor: torch.Tensor) -> torch.Tensor:
        with self.fake:
            out = tensor.detach()
        self._bind(out, self.where[id(tensor)])
        return out

    def _own(self, out: torch.Tensor, tensors: list[torch.Tensor], ref: Ref) -> torch.Tensor:
        if any(out is t for t in tensors):  # an op that hands its argument back must not rebind it
            out = self._without_values(Meta.of(out), out.stride())
        self._bind(out, ref)
        return out

    def _bind(self, tensor: torch.Tensor, ref: Ref) -> None:
        self.where[id(tensor)] = ref
        self.keep.append(tensor)

    def draw_number(self) -> int:
        """Number a draw: those that torch itself would repeat (checkpoint restores the generator) get the same one."""
        with torch._C.DisableTorchFunction(), ti.no_dispatch():
            state = hashlib.sha1(torch.get_rng_state().numpy().tobytes()).hexdigest()
            number = self.draws.setdefault(state, len(self.draws))
            torch.rand(1)  # the next draw finds the generator moved on
        return number


@dataclasses.dataclass(frozen=True)
class Barrier:
    """Values that wait for another: XLA neither merges what is computed from them with what was before, nor starts it.

    Without it, all second passes of checkpoints could run at once, which would take the memory that they are to save.
    """

    def lower(self, *arrays: jax.Array, _results: Forms, _key: jax.Array | None) -> Sequence[jax.Array]:
        *values, latest = jax.lax.optimization_barrier(arrays)
        if jax.default_backend() != "cpu" or not latest.size:
            return values
        # XLA's CPU compiler drops a barrier before it merges. It does not know that of 64 bits none is the 65th.
        bits = latest.ravel()[0]
        bits = bits.real if jnp.iscomplexobj(bits) else bits
        bits = bits.astype(jnp.uint8) if bits.dtype == jnp.bool_ else bits
        whole = bits if jnp.issubdtype(bits.dtype, jnp.integer) else bits.view(f"uint{8 * bits.dtype.itemsize}")
        zero = jax.lax.population_count(whole) >> 7
        return [x | zero.astype(x.dtype) if x.dtype == jnp.bool_ else x * (1 - zero).astype(x.dtype) for x in values]


class Spec:
    """A torch pytree structure with the one method that running a graph needs."""

    __slots__ = ("spec",)

    def __init__(self, spec: ti.torch_pytree.TreeSpec) -> None:
        self.spec = spec

    def unflatten(self, leaves: Sequence[object]) -> tuple[Arguments, Keywords]:
        return ti.torch_pytree.tree_unflatten(leaves, self.spec)


def _snapshot(tensor: torch.Tensor) -> np.ndarray:
    with ti.no_dispatch():
        plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        dtype = jax_dtype(plain.dtype)
        if plain.dtype in (torch.bfloat16, *_FLOAT8):
            plain = plain.view(torch.int16 if plain.dtype == torch.bfloat16 else torch.uint8)
        return np.array(plain.numpy(), copy=True).view(dtype)


_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
