"""Compiled calls as nodes of torch's graph, and under ``torch.func`` and forward mode.

Ordinary reverse mode keeps the residuals that XLA computed, as torch keeps its saved tensors. Everything else (a
backward pass that is itself differentiated or mapped, ``torch.func``, forward mode) starts from the inputs: the
derivative or the map of a call is a flat function of its own, and is called as the first one was.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import torch
from torch.autograd import forward_ad

from ..base import torch_internals as ti
from ..base.versions import enable_x64
from ..derive.context import Call, running
from ..derive.dependence import dependent_outputs
from ..effects.running import no_place_for_updates
from ..memory.dtypes import has_torch_dtype, jax_dtype, torch_dtype
from ..memory.values import array_to_tensor, tensor_to_array
from ..record.captured import recording
from ..record.nodes import Meta
from ..watch.keys import Key
from .cache import DEPENDENT, LOCK, PROGRAMS
from .compilation import Draw, Program, memory_order, trace
from .flat import Flat, Mapped, Pushforward, VectorJacobianProduct, maps_function

Gradients: TypeAlias = Sequence[torch.Tensor | None]
Again: TypeAlias = tuple[Flat, Draw, list[torch.Tensor], list[int | None]]  # a call, its inputs, their versions


def apply(flat: Flat, key: Draw, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor | None]:
    """Run a flat function, as part of whatever torch does around it; None stands for a gradient that is zero."""
    outer = recording()
    if outer is not None:
        tensors = [outer.stand_in(ti.substituted(t)) for t in tensors]
    if is_transformed(tensors):
        apart = _written_apart(flat)
        with ti.temporarily_clear_interpreter_stack():
            tensors = [t.clone() if i in apart else t for i, t in enumerate(tensors)]
        return _Transformed.apply(flat, key, *tensors)
    program = find_program(flat, tensors)
    if any(program.need):
        tensors = [t.detach() if _is_apart(flat, program, i, t) else t for i, t in enumerate(tensors)]
        return _present(program, _Differentiable.apply(flat, program, key, *tensors))
    return _present(program, program.forward(key, tensors)[0])


def _written_apart(flat: Flat) -> set[int]:
    """Return which inputs a call writes to while its derivatives start from copies, which have what stood there."""
    root = flat.root
    if flat is not root or root.outline is None or recording() is not None:
        return set()
    plain = lambda t: not (ti.is_functorch_wrapped_tensor(t) or t.requires_grad)
    return {i for i in root.outline.mutated if plain(root.inputs[i])}


def _is_apart(flat: Flat, program: Program, i: int, tensor: torch.Tensor) -> bool:
    """Tell whether an input is no part of the call's graph: not read, or state that is only read as a number."""
    is_state = i >= flat.root.count and tensor.grad_fn is not None
    if i in program.unread:  # what is written to where autograd does not record keeps its history
        return i in program.flat or i not in program.written
    return is_state and i in program.flat


def _present(program: Program, outputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor | None]:
    if not any(program.absent_outputs):
        return outputs
    return [None if absent else out for absent, out in zip(program.absent_outputs, outputs, strict=True)]


def is_transformed(tensors: Sequence[torch.Tensor]) -> bool:
    """Tell whether the call is inside ``torch.func`` or a recording, or a tensor is a dual number."""
    if (
        recording() is not None
        or ti.are_functorch_transforms_active()
        or any(map(ti.is_functorch_wrapped_tensor, tensors))
    ):
        return True
    return ti.forward_mode_is_active() and any(forward_ad.unpack_dual(t).tangent is not None for t in tensors)


def find_program(flat: Flat, tensors: Sequence[torch.Tensor]) -> Program:
    """Return the program for tensors of this form, compiled.

    It is not kept if its trace met captured tensors for the first time.
    """
    signature = _signature(flat, tensors)
    with LOCK:
        program = PROGRAMS.find(signature)
        if program is None:
            program = Program(flat, tensors)
            if not program.outline.missing:
                keep(program, flat, tensors)
        return program


def keep(program: Program, flat: Flat, tensors: Sequence[torch.Tensor]) -> None:
    """Remember a program for later calls."""
    PROGRAMS.keep(_signature(flat, tensors), program)


def _signature(flat: Flat, tensors: Sequence[torch.Tensor]) -> Hashable:
    grad = torch.is_grad_enabled()
    return Key.of(
        (flat.key, *((t.dtype, t.shape, t.device, grad and t.requires_grad, memory_order(t)) for t in tensors))
    )


class _Differentiable(torch.autograd.Function):
    """A compiled call as a node of torch's graph, with the residuals that XLA computed."""

    @staticmethod
    def forward(ctx: Any, flat: Flat, program: Program, key: Draw, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)  # an output without a cotangent is not one with a cotangent of zeros
        if any(tensors[i].is_inference() for i in program.read):
            raise RuntimeError(
                "Inference tensors cannot be saved for backward: make a copy outside of inference mode (.clone()), and "
                "use that."
            )
        # A buffer that the call writes to: a second derivative starts from the value that it had.
        before = [t.clone() if i in program.written else t for i, t in enumerate(tensors)]
        made, residuals = program.forward(key, tensors)
        # As tensors, so that torch frees, offloads or recomputes them as it does its own.
        crossing = [has_torch_dtype(r.dtype) for r in residuals]
        ctx.save_for_backward(*(array_to_tensor(r) for r, c in zip(residuals, crossing, strict=True) if c))
        ctx.crossing, ctx.rest = crossing, [r for r, c in zip(residuals, crossing, strict=True) if not c]
        ctx.program, ctx.again = program, (flat, key, before, list(map(_version, before)))
        ctx.mark_non_differentiable(*(m for m, d in zip(made, program.moving, strict=True) if not d))
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> Gradients:
        program: Program = ctx.program
        given = [c for c in cotangents if c is not None]
        if not given:
            return None, None, None, *(None for _ in program.need)
        saved = ctx.saved_tensors  # raises torch's own error if they were freed
        if ctx.again is None:
            raise RuntimeError(
                "Trying to backward through the graph a second time: the values that the call saved were freed. "
                "Specify retain_graph=True in the first backward pass."
            )
        grads: Gradients | None = None
        if not (torch.is_grad_enabled() or program.recompute or is_transformed(given) or _is_batched(given)):
            tensors, rest = iter(saved), iter(ctx.rest)
            residuals = [tensor_to_array(next(tensors)) if c else next(rest) for c in ctx.crossing]
            _, _, before, versions = ctx.again
            check = functools.partial(_check_unwritten, before, versions)
            grads = program.backward(before, residuals, cotangents, check)
        if grads is None:
            grads = _from_inputs(ctx.again, program.need, cotangents)
        if not ti.graph_is_kept():
            ctx.again = ctx.rest = None
        found = iter(grads)
        return None, None, None, *(next(found) if n else None for n in program.need)


def _version(tensor: torch.Tensor) -> int | None:
    """Return how often a tensor was written to; torch does not count for one that was made in inference mode."""
    return None if tensor.is_inference() else tensor._version


def _check_unwritten(tensors: Sequence[torch.Tensor], versions: Sequence[int | None], read: Iterable[int]) -> None:
    """Refuse what was written to since the forward pass and is read by a backward pass."""
    for i in read:
        if _version(tensors[i]) != versions[i]:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{tensors[i].type()} {list(tensors[i].shape)}] is at version {tensors[i]._version}; expected version "
                f"{versions[i]} instead."
            )


def _is_batched(cotangents: Sequence[torch.Tensor]) -> bool:
    return any(map(ti.is_legacy_batchedtensor, cotangents))


def _from_inputs(again: Again, need: tuple[bool, ...], cotangents: Sequence[torch.Tensor | None]) -> Gradients:
    flat, key, tensors, versions = again
    _check_unwritten(tensors, versions, range(len(tensors)))
    given = [c for c in cotangents if c is not None]
    if not given:
        return [None] * sum(need)
    product = VectorJacobianProduct(flat, need, tuple(c is not None for c in cotangents))
    if not _is_batched(given):
        return apply(product, key, [*tensors, *given])
    # torch.autograd.grad(..., is_grads_batched=True) has a vmap of its own, which autograd.Function does not know.
    batched = [ti.is_legacy_batchedtensor(c) for c in given]
    rows = [ti.legacy_rows(c) if b else c for c, b in zip(given, batched, strict=True)]
    size = next(r.shape[0] for r, b in zip(rows, batched, strict=True) if b)
    axes = (*(None for _ in tensors), *(0 if b else None for b in batched))
    return [
        None if g is None else ti.legacy_batch(g)
        for g in apply(Mapped(product, axes, size, True), key, [*tensors, *rows])
    ]


class _Transformed(torch.autograd.Function):
    """A call under ``torch.func`` or with dual numbers: every derivative and map starts from the inputs."""

    @staticmethod
    def forward(flat: Flat, key: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outer = recording()
        if outer is None:
            apart = _written_apart(flat)
            written = [flat.root.inputs[i] if i in apart else t for i, t in enumerate(tensors)]
            return tuple(find_program(flat, tensors).forward(key, tensors, written)[0])
        call = _Call(flat)
        return tuple(outer.recorder.call(call, tensors, call.results(tensors), key))

    @staticmethod
    def setup_context(ctx: Any, inputs: Sequence[Any], output: Sequence[torch.Tensor]) -> None:
        flat, key, *tensors = inputs
        ctx.set_materialize_grads(False)
        ctx.flat, ctx.key = flat, key
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        depends = [True] * len(output)
        around = ti.are_functorch_transforms_active() or ti.dual_level_is_open()  # which do not say what is needed
        if recording() is not None and not around:
            depends = _dependent(flat, tensors, ctx.needs_input_grad[2:])
        ctx.moving = [_inexact(o) and d for o, d in zip(output, depends, strict=False)]
        ctx.mark_non_differentiable(*(o for o, m in zip(output, ctx.moving, strict=True) if not m))

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> Gradients:
        need = tuple(n and _inexact(t) for n, t in zip(ctx.needs_input_grad[2:], ctx.saved_tensors, strict=True))
        live = tuple(c is not None for c in cotangents)
        if not any(live):
            return None, None, *(None for _ in need)
        given = [c for c in cotangents if c is not None]
        found = iter(apply(VectorJacobianProduct(ctx.flat, need, live), ctx.key, [*ctx.saved_tensors, *given]))
        return None, None, *(next(found) if n else None for n in need)

    @staticmethod
    def jvp(ctx: Any, _: None, __: None, *tangents: torch.Tensor | None) -> Gradients:
        tensors = ctx.saved_tensors
        need = tuple(d is not None and _inexact(t) for d, t in zip(tangents, tensors, strict=True))
        given = [d for d in tangents if d is not None and _inexact(d)]
        with ti.without_forward_mode():  # the saved tensors may still be dual
            moved = iter(apply(Pushforward(ctx.flat, need), ctx.key, [*tensors, *given]))
        return tuple(next(moved) if d else None for d in ctx.moving)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], flat: Flat, key: Draw, *tensors: torch.Tensor
    ) -> tuple[tuple[torch.Tensor | None, ...], tuple[int, ...]]:
        outline = flat.root.outline
        assert outline is not None
        written = *outline.mutated, *(i for i, _ in outline.carried)
        for i in written if maps_function(flat, in_dims[2:]) else ():
            raise no_place_for_updates(flat.root.inputs[i], flat.root.walk)
        if outline.draws and info.randomness == "error":
            raise RuntimeError(
                "vmap: called random operation while in randomness error mode. Please either use the 'same' or "
                "'different' randomness flags on vmap or perform the randomness operation out of vmap"
            )
        mapped = Mapped(flat, tuple(in_dims[2:]), info.batch_size, info.randomness == "same")
        outputs = apply(mapped, key, tensors)
        return tuple(outputs), (0,) * len(outputs)


def _dependent(flat: Flat, tensors: Sequence[torch.Tensor], need: Sequence[bool]) -> list[bool]:
    """Tell which outputs of a flat function depend on the needed inputs, in the sense of autograd."""
    forms = tuple((t.dtype, t.shape) for t in tensors)
    signature = Key.of((flat.key, tuple(need), forms))
    with LOCK:
        found = DEPENDENT.find(signature)
        if found is None:
            found = dependent_outputs(trace(flat, tensors)[0], [False, *need])
            DEPENDENT.keep(signature, found)
        return found


class _Call:
    """A call inside a function that is being recorded: an op of its graph."""

    def __init__(self, flat: Flat) -> None:
        self.flat = flat

    def results(self, tensors: Sequence[torch.Tensor]) -> list[Meta]:
        """Return dtypes and shapes of what the call returns."""
        avals = [jax.ShapeDtypeStruct(t.shape, jax_dtype(t.dtype)) for t in tensors]
        key = jax.ShapeDtypeStruct((2,), "uint32")
        found = jax.eval_shape(lambda key, *arrays: self.lower(*arrays, _results=None, _key=key), key, *avals)
        return [Meta(torch_dtype(a.dtype), a.shape, self.flat.root.device) for a in found]

    def lower(self, *arrays: jax.Array, _results: object, _key: jax.Array | None) -> list[jax.Array]:
        root = self.flat.root
        key = jnp.zeros(2, "uint32") if _key is None else _key
        call = Call({}, None, root.device, root.grad)
        with enable_x64(), running(call):
            return self.flat.run(call, key, arrays)


def _inexact(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
