"""``torch.utils.checkpoint`` inside a traced function: its second forward pass, recorded in the backward pass.

By then ``torch.func.functional_call`` has put the module's own parameters back, and the second pass would read those in
the place of the ones that it was called with. Here it sees what the first one saw, and waits for the cotangents: memory
is saved only if it does not run before they are there.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils.checkpoint
from torch.nn.utils import stateless

from ...jax_impl.program.trees import Function
from ..base import torch_internals as ti
from .recorder import Recorder

Swap = tuple[torch.nn.Module, dict[str, torch.Tensor], dict[str, object]]


@contextlib.contextmanager
def recorded_checkpoints(recorder: Recorder) -> Iterator[None]:
    """Let the checkpoints of this thread be recorded: a scope around a recording."""
    checkpoints: Any = torch.utils.checkpoint
    swapping: Any = stateless
    reentrant = checkpoints.CheckpointFunction
    run, swap = getattr(checkpoints, ti.CHECKPOINTING), swapping._reparametrize_module
    apply, own_apply = reentrant.apply, vars(reentrant).get("apply")
    owner = threading.get_ident()
    swaps: list[Swap] = []

    @contextlib.contextmanager
    def noted_swap(module: torch.nn.Module, tensors: dict[str, torch.Tensor], **options: object) -> Iterator[None]:
        with swap(module, tensors, **options):
            if threading.get_ident() != owner:
                yield
                return
            swaps.append((module, tensors, options))
            try:
                yield
            finally:
                swaps.pop()

    def seeing_the_same(fun: Function, *args: object, **kwargs: object) -> object:
        if threading.get_ident() != owner:
            return run(fun, *args, **kwargs)
        first = [(module, dict(tensors), options) for module, tensors, options in swaps]
        substitutions = ti.active_substitutions()

        def again(*args: object, **kwargs: object) -> object:
            leaves, spec = ti.torch_pytree.tree_flatten((args, kwargs))
            late = iter(recorder.after_latest([x for x in leaves if isinstance(x, torch.Tensor)]))
            leaves = [next(late) if isinstance(x, torch.Tensor) else x for x in leaves]
            args, kwargs = ti.torch_pytree.tree_unflatten(leaves, spec)
            with contextlib.ExitStack() as scope:
                for module, tensors, options in first[len(swaps) :]:
                    scope.enter_context(swap(module, tensors, **options))
                for substitution in substitutions[len(ti.active_substitutions()) :]:
                    scope.enter_context(substitution)
                return fun(*args, **kwargs)

        return run(again, *args, **kwargs)

    def not_reentrant(fun: Function, keep: bool, *args: object) -> object:
        # The reentrant checkpoint refuses torch.autograd.grad, with which the backward pass is recorded.
        if threading.get_ident() != owner:
            return apply(fun, keep, *args)
        return checkpoints.checkpoint(fun, *args, use_reentrant=False, preserve_rng_state=keep)

    try:
        setattr(checkpoints, ti.CHECKPOINTING, seeing_the_same)
        swapping._reparametrize_module = noted_swap
        reentrant.apply = staticmethod(not_reentrant)
        yield
    finally:
        setattr(checkpoints, ti.CHECKPOINTING, run)
        swapping._reparametrize_module = swap
        if own_apply is None:
            del reentrant.apply
        else:  # within another recording
            reentrant.apply = own_apply
