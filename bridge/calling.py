"""``as_torch``: a JAX callable as a torch callable, compiled once per signature and part of torch's autograd."""

from __future__ import annotations

import collections
import functools
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from .captures import Walk, forked_child, hashable, surroundings, written_count
from .compilation import Body, Trace, common_device, is_differentiable, jax_cotangents, memory_order
from .context import current_call, running
from .trees import Structure, argument_name, bound_arguments, to_jax_tree, to_torch_tree
from .values import array_to_tensor, tensor_to_array, tensors_to_arguments
from .versions import enable_x64

_CACHE_SIZE = 256
_MANY = 32  # compilations of one function after which a warning names it
_LOCK = threading.RLock()
_PROGRAMS: collections.OrderedDict[Any, Program] = collections.OrderedDict()
_COMPILED: collections.Counter[Any] = collections.Counter()


def as_torch(jax_fun: Callable[..., Any], *, recompute: bool = False) -> Callable[..., Any]:
    """A JAX callable as a torch callable: ``to_torch(jax.jit(jax_fun)(*to_jax(args)))``, and part of torch's autograd.

    Compiled once for each signature: structure, dtypes and shapes of the arguments, values of the static ones (ints,
    bools, strings, None, floats), and what the function captures. Tensors that torch functions inside capture are
    inputs of the program, read at each call, and receive gradients. The computation runs on the tensors' device.

    Args:
        jax_fun: a function of pytrees of arrays, such as ``jax.grad(as_jax(loss))`` or a JAX library's.
        recompute: keep no residuals and compile a backward pass only when one runs, which then starts from the inputs.
            For functions whose results are rarely differentiated, such as gradients.

    Returns:
        The torch callable, with the signature of ``jax_fun``. Outputs carry a ``grad_fn`` when an input or a captured
        tensor requires grad; the backward pass is compiled too, and can be differentiated again.

    Raises:
        TypeError, ValueError: for tensors that XLA cannot take, on mixed devices, or on a device without a JAX backend.

    >>> import torch
    >>> from microtome.bridge import as_torch
    >>> import jax.numpy as jnp
    >>> x = torch.tensor([1.0, 2.0], requires_grad=True)
    >>> as_torch(lambda a: jnp.sum(a ** 3))(x).backward()
    >>> x.grad
    tensor([ 3., 12.])
    """

    def fun(*args: Any, **kwargs: Any) -> Any:
        return _call(jax_fun, recompute, args, kwargs)

    functools.update_wrapper(fun, jax_fun)
    fun.compiled = lambda *args, **kwargs: _program(jax_fun, recompute, args, kwargs)[0]  # type: ignore[attr-defined]
    return fun


def _call(jax_fun: Callable[..., Any], recompute: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    program, tensors, body = _program(jax_fun, recompute, args, kwargs)
    key = _new_key(program.draws)
    if any(program.need):
        outputs = _Differentiable.apply(program, body, key, *tensors)
    else:
        outputs = program.forward(key, tensors)[0]
    return program.unflatten(outputs)


def _program(
    jax_fun: Callable[..., Any], recompute: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Program, list[torch.Tensor], Body]:
    if forked_child():
        raise RuntimeError(
            "microtome was called in a process forked after JAX had started (a DataLoader worker, say), where XLA "
            "would hang. Call it in the parent, or start workers with multiprocessing_context='spawn'."
        )
    leaves, structure = Structure.split(to_jax_tree((args, kwargs)), _moves)
    arguments = list(map(_tensor, leaves))
    walk = Walk(jax_fun)
    shapes = tuple((t.dtype, t.shape, t.device, t.layout, t.requires_grad) for t in arguments)
    fixed_part = (
        structure.treedef,
        structure.moves,
        shapes,
        tuple(map(hashable, structure.fixed)),
        torch.is_grad_enabled(),
        recompute,
        surroundings(),
    )
    orders = tuple(map(memory_order, (*arguments, *walk.tensors)))
    signature = (walk.key, orders, fixed_part)

    def body(*arrays: Any) -> Any:
        args, kwargs = structure.join(arrays)
        return jax_fun(*args, **kwargs)

    with _LOCK:
        program = _PROGRAMS.get(signature)
        if program is None or any(ref() is None for ref in program.hidden):
            _check_arguments(jax_fun, args, kwargs)
            written = written_count()
            program = Program(body, arguments, walk.tensors, recompute)
            if written_count() != written:
                signature = (Walk(jax_fun).key, orders, fixed_part)
            _PROGRAMS[signature] = program
            if len(_PROGRAMS) > _CACHE_SIZE:
                _PROGRAMS.popitem(last=False)
            _warn_of_many(walk)
        _PROGRAMS.move_to_end(signature)
        hidden = [t for t in (ref() for ref in program.hidden) if t is not None]
    return program, [*arguments, *walk.tensors, *hidden], body


def _warn_of_many(walk: Walk) -> None:
    code = walk.user_code
    if code is None:
        return
    _COMPILED[code] += 1
    if _COMPILED[code] == _MANY:
        where = f"{code.co_name} ({code.co_filename}:{code.co_firstlineno})"
        warnings.warn(
            f"{where} has been compiled {_MANY} times: shapes, static arguments or captured Python values change "
            "between calls. Pass numbers that change as 0-d tensors, and keep shapes fixed (pad the last batch).",
            stacklevel=4,
        )


def _check_arguments(jax_fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Name the argument that holds a tensor which XLA cannot take, before anything is traced."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(to_jax_tree(bound_arguments(jax_fun, args, kwargs)))[0]:
        if isinstance(leaf, torch.Tensor):
            try:
                tensor_to_array(leaf)
            except (TypeError, ValueError) as error:
                raise type(error)(f"{argument_name(path)}: {error}") from None


def _moves(leaf: Any) -> bool:
    return isinstance(leaf, (torch.Tensor, jax.Array, np.ndarray))


def _tensor(leaf: Any) -> torch.Tensor:
    if isinstance(leaf, torch.Tensor):
        return leaf
    return array_to_tensor(leaf) if isinstance(leaf, jax.Array) else torch.as_tensor(leaf)


def _new_key(draws: bool) -> np.ndarray:
    """A key from torch's default generator, taken only if the program draws."""
    if not draws:
        return np.zeros(2, np.uint32)
    return torch.randint(0, 2**32, (2,), dtype=torch.int64).numpy().astype(np.uint32)


class Program:
    """A JAX function compiled for one signature: forward, and where an input requires grad, backward.

    It keeps compiled programs and shapes, no tensors and no functions. Its inputs are the arguments, the tensors that a
    walk over the function found, and ``hidden`` ones that only the trace met.
    """

    def __init__(
        self, body: Body, arguments: Sequence[torch.Tensor], captured: Sequence[torch.Tensor], recompute: bool
    ) -> None:
        self.device = common_device([*arguments, *captured])
        self.count, self.recompute = len(arguments), recompute
        inputs = [*arguments, *captured]
        while True:
            self.need = tuple(torch.is_grad_enabled() and is_differentiable(t) for t in inputs)
            trace = Trace(body, inputs, self.count, self.device)
            residuals = any(self.need) and not recompute
            compiled = trace.compile_backward(self.need) if residuals else trace.compile_forward()
            if not trace.call.missing:
                break
            inputs = [*inputs, *trace.call.missing]
        self._compiled, self.saved, self.moving, self._backward = compiled
        self.hidden = [weakref.ref(t) for t in inputs[len(arguments) + len(captured) :]]
        assert trace.shape is not None
        self.draws, self._shape = trace.call.draws, trace.shape
        self.mutated = [trace.position(t) for t, _ in trace.call.mutations]

    def forward(self, key: Any, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Any]:
        """Outputs and residuals; buffers are updated."""
        with enable_x64():
            outputs, updates, residuals = self._compiled(key, *tensors_to_arguments(tensors))
            made = [array_to_tensor(o) for o in outputs]
            with torch.no_grad():
                for i, value in zip(self.mutated, updates, strict=True):
                    tensors[i].copy_(array_to_tensor(value))
        return made, residuals

    def backward(self, saved: Sequence[torch.Tensor], residuals: Any, cotangents: Sequence[torch.Tensor]) -> Any:
        with enable_x64():
            given = [tensor_to_array(c.contiguous()) for c in cotangents]
            found = self._backward(list(map(tensor_to_array, saved)), residuals, given)
            return [array_to_tensor(g) for g in found]

    def unflatten(self, outputs: Sequence[torch.Tensor]) -> Any:
        return to_torch_tree(self._shape.join(outputs))

    def memory_analysis(self) -> Any:
        """XLA's figures for the compiled forward program; ``temp_size_in_bytes`` is the peak of its temporaries."""
        return self._compiled.memory_analysis()


class _Differentiable(torch.autograd.Function):
    """A compiled call as a node of torch's graph."""

    @staticmethod
    def forward(ctx: Any, program: Program, body: Body, key: Any, *tensors: torch.Tensor) -> Any:
        # A buffer that the call writes to: a second derivative starts from the value that it had.
        before = [t.clone() if i in program.mutated else t for i, t in enumerate(tensors)]
        made, ctx.residuals = program.forward(key, tensors)
        ctx.save_for_backward(*(tensors[i] for i in program.saved))
        ctx.program, ctx.again = program, (body, key, before, [t._version for t in before])
        ctx.mark_non_differentiable(
            *(
                m
                for m, d in zip(made, program.moving, strict=True)
                if not d or not (m.is_floating_point() or m.is_complex())
            )
        )
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> Any:
        if torch.is_grad_enabled() or ctx.program.recompute:
            grads = _differentiable_backward(ctx.program, ctx.again, cotangents)
        else:
            grads = ctx.program.backward(ctx.saved_tensors, ctx.residuals, cotangents)
        rest = iter(grads)
        return None, None, None, *(next(rest) if n else None for n in ctx.program.need)


def _differentiable_backward(program: Program, again: Any, cotangents: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The backward pass as a call of its own, from the inputs, so that torch can differentiate it again."""
    body, key, tensors, versions = again
    if [t._version for t in tensors] != list(versions):
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation between "
            "the forward pass and a backward pass that starts from the inputs"
        )
    count, device, need = program.count, program.device, program.need

    def product(key: Any, inputs: Any, cotangents: Any) -> list[Any]:
        outer = current_call()
        trace = Trace(body, tensors, count, device)
        with running(trace.call):
            _, pull, _ = trace.pull(need, key, inputs)
        if outer is not None:
            outer.draws = outer.draws or trace.call.draws
        return [jnp.conj(g) for g in pull(jax_cotangents(cotangents))]

    return as_torch(product)(torch.from_numpy(key), list(tensors), list(cotangents))
