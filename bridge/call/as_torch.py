"""``as_torch``: a JAX callable as a torch callable, compiled once per signature and part of torch's autograd."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ...jax_impl.program.trees import PyTree
from ..base import torch_internals as ti
from ..base.errors import TraceError, located, user_line
from ..effects.bindings import Effect, check_apart, entries, is_row, leave
from ..effects.containers import Bound
from ..effects.sources import Basic, Given, from_basic
from ..memory.trees import containers_in, to_torch_tree
from ..record.captured import Captured, is_traced_tensor, recording
from ..watch.places import Place, path_name, remember_change
from ..watch.walk import is_traced
from .autograd import apply, find_program
from .compilation import Draw
from .flat import Outline, Root
from .preparing import MAPS, is_mapping, prepare

_MADE = "__microtome_made__"


def as_torch(jax_fun: Callable[..., PyTree], *, recompute: bool = False) -> Callable[..., PyTree]:
    """A JAX callable as a torch callable: ``to_torch(jax.jit(jax_fun)(*to_jax(args)))``, and part of torch's autograd.

    Compiled once for each signature: structure, dtypes and shapes of the arguments, values of the static ones (ints,
    bools, strings, None), and what the function captures. Floats are inputs, unless the function branches on one or
    hands it to torch code: then they are static too. Tensors that torch functions inside capture are
    inputs of the program, read at each call, and receive gradients. The computation runs on the tensors' device.
    64-bit types are on, so that dtypes are torch's: JAX code that makes arrays of its own gets 64-bit ones by default.

    Args:
        jax_fun: a function of pytrees of arrays, such as ``jax.grad(as_jax(loss))`` or a JAX library's.
        recompute: keep no residuals and compile a backward pass only when one runs, which then starts from the inputs.
            For functions whose results are rarely differentiated, such as gradients.

    Returns:
        The torch callable, with the signature of ``jax_fun``. Outputs carry a ``grad_fn`` when an input or a captured
        tensor requires grad; the backward pass is compiled too, and can be differentiated again. ``torch.func``, dual
        numbers and batched backward passes work around it; they start from the inputs, with no residuals.

    Raises:
        TypeError, ValueError: for tensors that XLA cannot take, on mixed devices, or on a device without a JAX backend.
        IndexError: on the CPU, for an index out of range in a torch function.

    >>> import torch
    >>> from microtome.bridge import as_torch
    >>> import jax.numpy as jnp
    >>> x = torch.tensor([1.0, 2.0], requires_grad=True)
    >>> as_torch(lambda a: jnp.sum(a ** 3))(x).backward()
    >>> x.grad
    tensor([ 3., 12.])
    """
    ti.load_dynamo()

    def fun(*args: PyTree, **kwargs: PyTree) -> PyTree:
        return _call(jax_fun, recompute, args, kwargs)

    functools.update_wrapper(fun, jax_fun)
    setattr(fun, _MADE, (fun, jax_fun))
    fun.compiled = lambda *args, **kwargs: find_program(*_prepared(jax_fun, recompute, args, kwargs, False))  # type: ignore[attr-defined]
    return fun


def only_maps(jax_fun: Callable[..., PyTree], *inner: Callable[..., PyTree]) -> None:
    """Mark a JAX function that runs torch functions in slices or steps and takes no derivatives of its own."""
    if all(is_traced(fun) or is_mapping(fun) for fun in inner):  # one written in JAX may take any
        setattr(jax_fun, MAPS, jax_fun)


def made_from(fun: object) -> Callable[..., PyTree] | None:
    """The JAX function of which ``as_torch`` made this very function, or None."""
    mark = getattr(fun, "__dict__", {}).get(_MADE)
    return mark[1] if mark is not None and mark[0] is fun else None


@ti.disable_dynamo  # torch.compile breaks its graph here
def _call(
    jax_fun: Callable[..., PyTree], recompute: bool, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]
) -> PyTree:
    root, tensors = _prepared(jax_fun, recompute, args, kwargs, False)
    assert root.outline is not None
    if root.outline.regains and not torch.is_grad_enabled():
        with torch.enable_grad():
            return _run(*_prepared(jax_fun, recompute, args, kwargs, True), args, kwargs)
    return _run(root, tensors, args, kwargs)


def _prepared(
    jax_fun: Callable[..., PyTree], recompute: bool, args: tuple[PyTree, ...], kwargs: dict[str, PyTree], is_quiet: bool
) -> tuple[Root, list[torch.Tensor]]:
    try:
        return prepare(jax_fun, recompute, args, kwargs, is_quiet)
    except (TypeError, ValueError) as error:
        raise located(error) from error.__cause__


def _run(root: Root, tensors: list[torch.Tensor], args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> PyTree:
    assert root.outline is not None
    outer = recording()
    key: Draw = None
    if outer is None:
        key = _new_key(root.outline.draws)
    else:
        _check_inside(root.outline)
        if root.outline.draws:
            key = outer.recorder.draw_number()
    if root.outline.strided is not None:
        _check_contiguous(root, outer)
    if root.outline.mutated or root.outline.carried:
        _check_apart(root)
    places = root.walk.places if root.outline.effects else []
    root.before = entries(root.outline.effects, places)
    outputs = apply(root, key, tensors)
    _leave(root, places, outputs, lambda i: containers_in(args, kwargs)[i])
    if root.outline.changing:
        for identity in (*root.outline.changing, root.walk.identity):
            remember_change(identity)
    return to_torch_tree(root.outline.shape.join(outputs))


def _leave(root: Root, places: list[Place], outputs: Sequence[Any], argument: Callable[[int], object]) -> None:
    """Put what the call leaves behind into its places."""
    left = root.outline
    assert left is not None
    for i, result in left.carried:
        root.inputs[i].copy_(outputs[result])

    def tensor(source: Basic) -> Any:
        if isinstance(source, Given):
            return root.inputs[source.index]
        # A call that torch.func.vmap runs for each row gives no more than its results.
        return outputs[source.index] if left.results == len(outputs) else None

    def is_kept(effect: Effect) -> bool:
        bases = effect.after.bases if isinstance(effect.after, Bound) else ()
        return not any(tensor(base) is None or is_row(tensor(base)) for base in bases)

    leave(list(filter(is_kept, left.effects)), places, from_basic(tensor), argument)


def _check_inside(outline: Outline) -> None:
    """A call in a function that is being traced may compute, but not leave anything behind."""
    if outline.mutated or outline.carried or outline.effects:
        raise TraceError(
            f"{user_line()}: a compiled call inside a traced function updates buffers or Python state there, which "
            "would be lost. Call the torch function itself instead, or put the module into .eval() mode."
        )


def _check_apart(root: Root) -> None:
    """Refuse a write to a tensor whose memory another one shows too."""
    assert root.outline is not None
    written = {*root.outline.mutated, *(i for i, _ in root.outline.carried)} - root.outline.moved
    met = {i: root.inputs[i] for i in root.outline.met if not is_traced_tensor(root.inputs[i])}
    check_apart(met, written, lambda i: _input_name(root, i))


def _input_name(root: Root, i: int) -> str:
    if i < root.count:
        return f"tensor argument {i}"
    path = root.walk.paths[i - root.count] if i - root.count < len(root.walk.paths) else None
    return path_name(path) or "a captured tensor"


def _check_contiguous(root: Root, outer: Captured | None) -> None:
    """``as_strided`` counts in memory, where the program has each tensor in order."""
    assert root.outline is not None
    if outer is not None:
        outer.strided = outer.strided or root.outline.strided
    elif not all(t.is_contiguous() and t.storage_offset() == 0 for t in root.inputs):
        raise TraceError(
            f"{root.outline.strided}: as_strided in a call with a tensor that is not contiguous, or a part of another, "
            "counts in memory that the compiled program does not see. Pass copies of such tensors: "
            ".clone(memory_format=torch.contiguous_format)."
        )


def _new_key(draws: bool) -> np.ndarray:
    """A key from torch's default generator, taken only if the program draws."""
    if not draws:
        return np.zeros(2, np.uint32)
    with ti.temporarily_clear_interpreter_stack():  # torch.func.vmap decides by itself what its rows share
        return torch.randint(0, 2**32, (2,), dtype=torch.int64).numpy().astype(np.uint32)
