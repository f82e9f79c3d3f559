"""Functions of flat arrays that stand for a call, its derivatives and its maps, and their compiled programs."""

from __future__ import annotations

import dataclasses
import itertools
import operator
import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax.experimental.layout import Format, Layout

from ..base.errors import TraceError
from ..base.versions import enable_x64
from ..derive.context import Call, running
from ..derive.differentiation import DeletedFunction, dependent_outputs
from ..effects.bindings import Basic, Bound, Effect, Entry, Given, Made, Moved, as_before, put, restore
from ..effects.running import where
from ..effects.side_effects import Watched
from ..memory.trees import Structure, flatten, is_array, to_jax_tree
from ..memory.values import (
    array_to_tensor,
    jax_device,
    jax_dtype,
    tensor_to_array,
    tensors_to_arguments,
    unusual_stride,
)
from ..record.nodes import History
from ..watch.places import Place
from ..watch.walk import Walk
from .pullbacks import Backward, Pullback, independent, pull_back, unread
from .reporting import Checked

_KEY = jax.ShapeDtypeStruct((2,), "uint32")
Arrays = Sequence[Any]


class Flat:
    """A JAX function of a key and a flat list of arrays. Functions with equal ``key`` share their programs."""

    key: Hashable
    base: Flat
    first_cotangent: int | None = None  # the inputs from here on enter linearly

    @property
    def root(self) -> Root:
        """The call that this is derived from."""
        return self.base.root

    def run(self, call: Call, key: Any, arrays: Arrays) -> list[Any]:
        """The flat outputs, for arrays or tracers."""
        raise NotImplementedError


class Root(Flat):
    """A call: the inputs are the tensors among its arguments, then those that its function captures."""

    def __init__(
        self,
        key: Hashable,
        body: Callable[..., Any],
        arguments: Sequence[torch.Tensor],
        captured: Sequence[torch.Tensor],
        walk: Walk,
        recompute: bool,
        is_quiet: bool = False,
    ) -> None:
        self.grad, self.is_quiet = torch.is_grad_enabled(), is_quiet
        self.key = key, self.grad, is_quiet
        self.body, self.count, self.recompute, self.walk = body, len(arguments), recompute, walk
        self.inputs = [*arguments, *captured]
        with torch._C.DisableTorchFunction():
            self.device = common_device(self.inputs)
            self.strides = [unusual_stride(t) for t in arguments]
        self.histories: Sequence[History] = ()  # of the arguments, if the function asks for it
        self.only_maps = False  # it takes no derivatives of its own
        self.has_floats = False  # Python floats among the arguments that are inputs of the program
        self.before: list[Entry] = []  # what stood where the call has left something
        self.outline: Outline | None = None

    @property
    def root(self) -> Root:  # no attribute: a reference to itself would keep tensors until the garbage is collected
        return self

    def run(self, call: Call, key: Any, arrays: Arrays) -> list[Any]:
        captured = zip(self.inputs[self.count :], arrays[self.count :], strict=True)
        call.key, call.has_floats, call.is_quiet = key, self.has_floats, self.is_quiet
        call.only_maps = self.only_maps
        call.tensors.update({id(t): a for t, a in captured})
        call.strides = {id(a): s for a, s in zip(arrays, self.strides, strict=False) if s is not None}
        call.histories = {id(a): h for a, h in zip(arrays, self.histories, strict=False)}
        call.enter_body()
        try:
            returned = to_jax_tree(self.body(*arrays[: self.count]), _none_for_integers)
            results, call.shape = Structure.split(returned, is_array)
        finally:
            restore(call.before)
            call.before.clear()
        if any(map(callable, jax.tree.leaves(returned, is_leaf=callable))):
            call.keep_functions()
        outputs = [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in results]
        if not call.missing:
            self._leave(call, arrays, outputs)
        call.results = len(outputs)
        return outputs

    def _leave(self, call: Call, arrays: Arrays, outputs: list[Any]) -> None:
        """Add to the outputs what the call leaves behind."""

        def made(array: Any) -> int:
            known = next((i for i, o in enumerate(outputs) if o is array), None)
            if known is None:
                outputs.append(array)
            return len(outputs) - 1 if known is None else known

        def number(tensor: torch.Tensor) -> Basic:
            given = self.position(tensor)
            array = None if given is not None else call.tensors[id(tensor)]
            if given is None:
                given = next((i for i, a in enumerate(arrays[: self.count]) if a is array), None)
            return Made(made(array)) if given is None else Given(given)

        call.effects = []
        values: dict[int, Any] = {}  # a container in two places is one
        standing: dict[Any, Any] = {}  # what functions before have left
        last: Any = None
        for places, effect, tensor in call.left:
            if places is not last:
                last, values, standing = places, {}, {(e.place, e.key): e.after for e in call.effects}
            after = effect.after
            if isinstance(after, Bound):
                renumbered = after.renumbered(lambda source, tensor=tensor: number(tensor(source)))  # type: ignore[misc]
                after = values.setdefault(id(after), renumbered)
            elif isinstance(after, Moved):
                after = Moved(self._place(places[after.place], after.key), after.key)
                after = standing.get((after.place, after.key), after)
            number_of_place = self._place(places[effect.place], effect.key)
            call.effects.append(dataclasses.replace(effect, place=number_of_place, after=after))
        # What was left by one function and written to by the next is among the outputs already, with its final value.
        written = [(self.position(t), value, has_history) for t, value, has_history in call.mutations]
        call.updates = [(i, value) for i, value, has_history in written if i is not None and not has_history]
        call.carried = [(i, made(value)) for i, value, has_history in written if i is not None and has_history]

    def _place(self, place: Place, key: Any) -> int:
        found = next((i for i, p in enumerate(self.walk.places) if p.owner is place.owner), None)
        if found is None:
            raise TraceError(f"the function writes to {place.name(key)}, which the call does not see: pass it in.")
        return found

    def position(self, tensor: torch.Tensor) -> int | None:
        """Which input a tensor is."""
        return next((i for i, t in enumerate(self.inputs) if t is tensor), None)


class Product(Flat):
    """Inputs and cotangents of ``live`` outputs -> gradients for the inputs that ``need`` names, as torch has them."""

    def __init__(self, base: Flat, need: tuple[bool, ...], live: tuple[bool, ...]) -> None:
        self.base, self.need, self.live = base, need, live
        self.key = "product", need, live, base.key
        self.first_cotangent = len(need)

    def run(self, call: Call, key: Any, arrays: Arrays) -> list[Any]:
        call.grad = True
        count = len(self.need)
        inputs = arrays[:count]
        _, move, _ = linearize(self.base, call, key, self.need, inputs)
        return pull_back(move, list(itertools.compress(inputs, self.need)), self.live, arrays[count:])


class Pushforward(Flat):
    """Inputs and the tangents of those that ``need`` names -> the tangents of the outputs that are not integers."""

    def __init__(self, base: Flat, need: tuple[bool, ...]) -> None:
        self.base, self.need = base, need
        self.key = "pushforward", need, base.key

    def run(self, call: Call, key: Any, arrays: Arrays) -> list[Any]:
        call.grad = True
        count = len(self.need)
        inputs = arrays[:count]

        def run(*needed: Any) -> list[Any]:
            return self.base.run(call, key, _merge(self.need, needed, inputs))

        _, tangents = jax.jvp(run, [a for a, n in zip(inputs, self.need, strict=True) if n], list(arrays[count:]))
        return [t for t in tangents if t.dtype != jax.dtypes.float0]


class Mapped(Flat):
    """The function under ``jax.vmap``; ``axes`` are those of the inputs, the results are mapped over axis 0."""

    def __init__(self, base: Flat, axes: tuple[int | None, ...], size: int, same_draws: bool) -> None:
        self.base, self.axes, self.size, self.same_draws = base, axes, size, same_draws
        self.key = "mapped", axes, size, same_draws, base.key

    def run(self, call: Call, key: Any, arrays: Arrays) -> list[Any]:
        call.has_rows = call.has_rows or maps_function(self.base, self.axes)

        def run(row: Any, *arrays: Any) -> list[Any]:
            own = key if self.same_draws else jax.random.fold_in(key, row)
            return self.base.run(call, own, arrays)

        return jax.vmap(run, (0, *self.axes))(jnp.arange(self.size, dtype=jnp.uint32), *arrays)


def maps_function(flat: Flat, axes: Sequence[int | None]) -> bool:
    """Whether a map along these axes runs the function itself for each row, and not only a derivative of it."""
    return any(axis is not None for axis in axes[: len(flat.root.inputs)])


def linearize(flat: Flat, call: Call, key: Any, need: Sequence[bool], arrays: Arrays) -> tuple[Any, Any, Any]:
    """``jax.linearize`` in the inputs that ``need`` names: outputs, the linear map, and the new values of buffers."""

    def run(*needed: Any) -> Any:
        outputs = flat.run(call, key, _merge(need, needed, arrays))
        kind = type(needed[0])
        call.moving = [type(o) is kind for o in outputs]  # the others depend on no needed input
        return outputs, [value for _, value in call.updates]

    return jax.linearize(run, *(a for n, a in zip(need, arrays, strict=True) if n), has_aux=True)


def _merge(need: Sequence[bool], needed: Arrays, arrays: Arrays) -> list[Any]:
    rest = iter(needed)
    return [next(rest) if n else a for n, a in zip(need, arrays, strict=True)]


@dataclasses.dataclass(frozen=True)
class Outline:
    """What a trace of a call has shown, whatever derivatives are taken of it."""

    shape: Structure  # of the results
    results: int  # how many there are, with what is left behind
    draws: bool
    mutated: list[int]  # inputs that take new values: buffers
    moved: set[int]  # those of them that take the memory of the value too
    carried: list[tuple[int, int]]  # inputs that take results as new values, with their history in autograd
    effects: list[Effect]  # what each call leaves in places
    changing: list[Hashable]  # functions that have to be traced in each call
    regains: bool  # whether results have a history though autograd is off
    strided: str | None  # the line that asks for elements by their place in memory
    met: list[int]  # arguments, and captured tensors that functions read or write
    missing: list[torch.Tensor]  # captured tensors that are not among the inputs yet: nothing else counts then

    @classmethod
    def of(cls, call: Call, root: Root) -> Outline:
        assert call.shape is not None
        mutated = [i for i, _ in call.updates]
        moved = {i for i in mutated if id(root.inputs[i]) in call.moved}
        left = mutated, moved, call.carried, call.effects
        met = [i for i, t in enumerate(root.inputs) if i < root.count or id(t) in call.met]
        answers = call.changing, call.regains, call.strided
        return cls(call.shape, call.results, call.draws, *left, *answers, met, call.missing)


def trace(flat: Flat, tensors: Sequence[torch.Tensor]) -> tuple[Any, Call]:
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
            raise TraceError(
                f"{where(root.walk)}a derivative that starts from the inputs runs the function again, which changes "
                "Python objects that it captures. Keep what changes in numbers or tensors, or call it without "
                "recompute=True and second derivatives."
            )
        if call.missing and flat is not root:
            raise RuntimeError(
                "a tensor that the function captures was replaced by another one between the call and a derivative "
                "that starts from its inputs"
            )
        self.outline = Outline.of(call, root)
        self.mutated = self.outline.mutated if flat is root else []
        self.written = {*self.mutated, *(i for i, _ in self.outline.carried)} if flat is root else set()

    def _compile_forward(self, flat: Flat, call: Call, avals: Sequence[Any]) -> None:
        def forward(key: Any, *arrays: Any) -> Any:
            outputs = flat.run(call, key, arrays)
            return outputs, [value for _, value in call.updates] if flat is flat.root else [], []

        traced = jax.jit(forward).trace(_KEY, *avals)
        self.unread = unread(traced.jaxpr)
        self.saved: list[int] = []
        depends = dependent_outputs(traced.jaxpr, [False, *self.need])
        self.moving = [d and _inexact(aval.dtype) for d, aval in zip(depends, traced.out_info[0], strict=False)]
        self.absent_outputs = self._zero_gradients(flat, traced)
        self._forward = None if call.missing else Checked(traced, call, [_KEY, *avals])

    def _compile_both(self, flat: Flat, call: Call, avals: Sequence[Any]) -> None:
        kept: list[Any] = []

        def forward(key: Any, *arrays: Any) -> Any:
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
        self._backwards: dict[tuple[bool, ...], Backward | None] = {}
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
    def _zero_gradients(flat: Flat, traced: Any) -> list[bool]:
        """Which outputs are gradients that do not depend on the cotangents: these are zero, and torch says None."""
        if flat.first_cotangent is None:
            return []
        return independent(traced.jaxpr, flat.first_cotangent + 1)[: len(traced.out_info[0])]

    def forward(self, key: Any, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[Any]]:
        """Outputs and residuals; buffers are updated."""
        with enable_x64():
            outputs, updates, residuals = self._forward(key, *tensors_to_arguments(tensors))  # type: ignore[misc]
            made = [array_to_tensor(o) for o in outputs]
            for i, value in zip(self.mutated, updates, strict=True):
                put(tensors[i], array_to_tensor(value), i in self.outline.moved)
        return made, residuals

    def backward(
        self,
        tensors: Sequence[torch.Tensor],
        residuals: Any,
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

    def _backward_of(self, live: tuple[bool, ...]) -> Backward | None:
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


def _none_for_integers(leaf: Any) -> Any:
    """What JAX gives for the gradient of whole numbers has no elements; torch says None."""
    return None if getattr(leaf, "dtype", None) == jax.dtypes.float0 else leaf


def _inexact(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.inexact))


def _avals(tensors: Sequence[torch.Tensor], device: torch.device) -> list[Any]:
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


def common_device(tensors: Sequence[torch.Tensor]) -> torch.device:
    """The device on which a call runs; ValueError for tensors on several."""
    devices = {t.device for t in tensors}
    if len(devices) > 1:
        names = sorted(map(str, devices))
        raise ValueError(
            f"the tensors are on different devices ({', '.join(names)}); move them to one with .to(device)"
        )
    return devices.pop() if devices else torch.device("cpu")
