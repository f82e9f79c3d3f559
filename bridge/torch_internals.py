"""The private parts of torch that recording leans on, in one place.

torch has no public way to run a function under its own autograd and functionalisation and to see the ATen ops that
come out below. Where a release moves one of these names, the import of the bridge fails with one sentence instead of
deep inside a trace.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.checkpoint
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from .errors import refuse_backward

try:
    from torch._C._functorch import is_functorch_wrapped_tensor
    from torch._decomp import core_aten_decompositions, decomposition_table
    from torch._functorch import eager_transforms
    from torch._functorch import vmap as functorch_vmap
    from torch._functorch._aot_autograd.functional_utils import from_fun, to_fun
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
    from torch._higher_order_ops import effects
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensor,
        FakeTensorMode,
    )
    from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
    from torch.utils import _pytree as torch_pytree
    from torch.utils._mode_utils import no_dispatch
    from torch.utils._python_dispatch import TorchDispatchMode

    # The slot just below functionalisation: ops arrive there after autograd and with every in-place write resolved.
    BELOW_FUNCTIONALISATION = torch._C._TorchDispatchModeKey.PROXY
except (ImportError, AttributeError) as error:
    raise ImportError(
        f"microtome records torch functions through parts of torch that torch {torch.__version__} has moved ({error}); "
        "it is tested with torch 2.13: please install that one."
    ) from error

__all__ = [
    "BELOW_FUNCTIONALISATION",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "FunctionalTensor",
    "FunctionalTensorMode",
    "Substitution",
    "TorchDispatchMode",
    "compiling",
    "core_decompositions",
    "decomposition_table",
    "entering_functorch",
    "from_fun",
    "function_modes_in_backward",
    "is_functorch_wrapped_tensor",
    "no_dispatch",
    "plain_kernels",
    "temporarily_clear_interpreter_stack",
    "to_fun",
    "torch_pytree",
]


@functools.cache
def core_decompositions() -> dict[Any, Callable[..., Any]]:
    """torch's core decompositions. torch searches all registered ops for them each time that it is asked."""
    return dict(core_aten_decompositions().items())


class Substitution(TorchFunctionMode):
    """Every torch function sees other tensors in the place of given ones."""

    def __init__(self, replacements: dict[int, torch.Tensor]) -> None:
        super().__init__()
        self.replacements = replacements

    def swap(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor to be seen in the place of another."""
        return self.replacements.get(id(tensor), tensor)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = torch_pytree.tree_map_only(torch.Tensor, self.swap, (args, kwargs or {}))
        return func(*args, **kwargs)


@contextlib.contextmanager
def entering_functorch(swap: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """``torch.func`` wraps its inputs without asking a function mode: let it wrap what ``swap`` gives for them."""
    grads: Any = eager_transforms
    maps: Any = functorch_vmap
    wrap, add = grads._wrap_for_grad, maps._add_batch_dim
    grads._wrap_for_grad = lambda tensor, level: wrap(swap(tensor), level)
    maps._add_batch_dim = lambda tensor, dim, level: add(swap(tensor), dim, level)
    try:
        yield
    finally:
        grads._wrap_for_grad, maps._add_batch_dim = wrap, add


@contextlib.contextmanager
def function_modes_in_backward() -> Iterator[None]:
    """Let ``torch.autograd.grad`` run under the function modes that are active.

    It hands itself to the innermost mode, which is off while it is served: Python that runs inside the backward pass
    (hooks, a user's backward, a checkpoint's second forward pass) would then not be seen.
    """
    autograd: Any = torch.autograd
    original = autograd.has_torch_function
    autograd.has_torch_function = lambda _: False
    try:
        yield
    finally:
        autograd.has_torch_function = original


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Make ``torch.compiler.is_compiling()`` true: libraries then skip the checks that read values."""
    old = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = old


def _call_without_checkpoint(fun: object, preserve_rng_state: bool, *args: object) -> object:
    return fun(*args)  # type: ignore[operator]


@contextlib.contextmanager
def plain_kernels() -> Iterator[None]:
    """While recording: no fused CPU kernels, whose backward ops nothing can lower, and no checks that read values."""
    distribution = torch.distributions.Distribution
    checkpoint = torch.utils.checkpoint.CheckpointFunction
    validate = distribution._validate_args
    has_effects = effects.has_effects
    autograd: Any = torch.autograd
    backward = autograd.backward
    mkldnn = torch._C._get_mkldnn_enabled()
    fastpath = torch.backends.mha.get_fastpath_enabled()
    skipped = torch.ops.aten._linalg_check_errors.default
    fake_log = logging.getLogger("torch._subclasses.fake_tensor")  # prints a traceback before each error it raises
    try:
        fake_log.disabled = True
        distribution._validate_args = False
        autograd.backward = refuse_backward  # Tensor.backward calls it too
        # Functionalisation would thread an effect token through the error check; it is dropped when recorded.
        effects.has_effects = lambda op: op is not skipped and has_effects(op)
        # The reentrant checkpoint refuses torch.autograd.grad, with which the backward pass is recorded.
        checkpoint.apply = staticmethod(_call_without_checkpoint)  # type: ignore[method-assign]
        torch.backends.mha.set_fastpath_enabled(False)
        torch._C._set_mkldnn_enabled(False)  # (torch.backends.mkldnn.flags would also touch, and warn of, TF32)
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        fake_log.disabled = False
        autograd.backward = backward
        torch._C._set_mkldnn_enabled(mkldnn)
        torch.backends.mha.set_fastpath_enabled(fastpath)
        del checkpoint.apply
        effects.has_effects = has_effects
        distribution._validate_args = validate
