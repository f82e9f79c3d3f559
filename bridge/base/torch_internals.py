"""The private parts of torch that recording leans on, in one place.

torch has no public way to run a function under its own autograd and functionalisation and to see the ATen ops that
come out below. Where a release moves one of these names, the import of the bridge fails with one sentence instead of
deep inside a trace.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType, ModuleType
from typing import Any, TypeAlias

import torch
import torch.nn.utils.parametrize
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

from ...jax_impl.program.trees import PyTree
from .errors import refuse_seed, refuse_tracer

try:
    from torch import _vmap_internals
    from torch._C import _are_functorch_transforms_active as are_functorch_transforms_active
    from torch._C import _autograd as autograd_internals
    from torch._C._autograd import _get_current_graph_task_keep_graph as graph_is_kept
    from torch._C._functorch import get_unwrapped as unwrap
    from torch._C._functorch import is_batchedtensor as is_batched
    from torch._C._functorch import is_functorch_wrapped_tensor, is_legacy_batchedtensor, unwrap_if_dead
    from torch._compile import _disable_dynamo as disable_dynamo
    from torch._decomp import core_aten_decompositions, decomposition_table
    from torch._functorch import eager_transforms
    from torch._functorch import vmap as functorch_vmap
    from torch._functorch._aot_autograd.functional_utils import from_fun, to_fun
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
    from torch._higher_order_ops import effects
    from torch._ops import OpOverloadPacket, _OpNamespace
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensor,
        FakeTensorMode,
    )
    from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
    from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
    from torch.utils import _pytree as torch_pytree
    from torch.utils._mode_utils import no_dispatch
    from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

    # The function that makes a checkpoint's second pass. Its name differs between releases, and a wrapper that nothing
    # calls keeps the older one: patched there, a second pass would silently read other parameters.
    (CHECKPOINTING,) = (
        name
        for name, value in vars(checkpoint).items()
        if isinstance(value, FunctionType) and "_CheckpointFrame" in value.__code__.co_names
    )
    overloaded = torch.overrides._get_overloaded_args
    # The slot just below functionalisation: ops arrive there after autograd and with every in-place write resolved.
    BELOW_FUNCTIONALISATION = torch._C._TorchDispatchModeKey.PROXY
except (ImportError, AttributeError, ValueError) as error:
    raise ImportError(
        f"microtome records torch functions through parts of torch that torch {torch.__version__} has moved ({error}); "
        "it works with torch 2.13 to 2.15: please install one of these."
    ) from error

__all__ = [
    "BELOW_FUNCTIONALISATION",
    "CHECKPOINTING",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "FunctionalTensor",
    "FunctionalTensorMode",
    "Substitution",
    "TorchDispatchMode",
    "absent_ops",
    "active_substitutions",
    "are_functorch_transforms_active",
    "backward_node",
    "blank",
    "compiling",
    "core_decompositions",
    "decomposition_table",
    "disable_dynamo",
    "dual_level_is_open",
    "entering_functorch",
    "forward_mode_is_active",
    "from_fun",
    "function_modes_in_backward",
    "graph_is_kept",
    "has_own_function",
    "in_backward",
    "is_batched",
    "is_functorch_wrapped_tensor",
    "is_legacy_batchedtensor",
    "legacy_batch",
    "legacy_rows",
    "load_dynamo",
    "map_tensors",
    "no_dispatch",
    "overloaded",
    "parametrizations_are_cached",
    "plain_kernels",
    "proxies_are_active",
    "sequence_number",
    "share_memory",
    "storage_key",
    "substituted",
    "temporarily_clear_interpreter_stack",
    "to_fun",
    "torch_pytree",
    "unwrap",
    "unwrap_if_dead",
    "without_forward_mode",
    "without_inference_mode",
    "without_modes",
    "without_other_tracers",
    "without_saved_tensor_hooks",
]

# A module or a class of torch's, of which a name stands for something else for a while.
Patched: TypeAlias = Any
MaybeTensors: TypeAlias = tuple[torch.Tensor | None, ...]


@functools.cache
def core_decompositions() -> dict[torch._ops.OperatorBase, Callable[..., object]]:
    """Return torch's core decompositions. torch searches all registered ops for them each time that it is asked."""
    return dict(core_aten_decompositions().items())


def map_tensors(fun: Callable[[torch.Tensor], object], tree: PyTree) -> PyTree:
    """Replace the tensors of a tree. A ``torch.Size`` stays one: ``x.new(shape)`` takes a tuple for data."""
    return torch_pytree.tree_map_only(torch.Tensor, fun, tree, is_leaf=lambda x: isinstance(x, torch.Size))


def op_name(op: object) -> str:
    """Return an op's name without its overload, such as ``aten.mul``; of what is no op of torch's, what it prints."""
    return str(getattr(op, "overloadpacket", op))


def storage_key(tensor: torch.Tensor) -> int:
    """Return a number that tensors have in common which share their memory, in a recording too."""
    key: int = tensor.untyped_storage()._cdata
    return key


def blank(dtype: torch.dtype, shape: Sequence[int], device: torch.device) -> torch.Tensor:
    """Make a tensor of a form that takes no memory, for a place in a trace; whatever is active around, a plain one."""
    with without_modes(), temporarily_clear_interpreter_stack(), without_inference_mode():
        return torch.zeros((), dtype=dtype, device=device).expand(tuple(shape))


class _Substitutions(threading.local):
    def __init__(self) -> None:
        self.active: list[Substitution] = []


_SUBSTITUTIONS = _Substitutions()


def active_substitutions() -> list[Substitution]:
    """Return the substitutions that this thread is under, innermost last."""
    return list(_SUBSTITUTIONS.active)


def substituted(tensor: torch.Tensor) -> torch.Tensor:
    """Return what active substitutions show in place of a tensor, where no torch function is called that they see."""
    for substitution in reversed(_SUBSTITUTIONS.active):
        tensor = substitution.swap(tensor)
    return tensor


class Substitution(TorchFunctionMode):
    """Every torch function sees other tensors in the place of given ones."""

    def __init__(self, replacements: dict[int, torch.Tensor]) -> None:
        super().__init__()
        self.replacements = replacements

    def __enter__(self) -> Substitution:
        _SUBSTITUTIONS.active.append(self)
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        _SUBSTITUTIONS.active.remove(self)

    def swap(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor to be seen in the place of another."""
        return self.replacements.get(id(tensor), tensor)

    def __torch_function__(
        self, func: Callable[..., object], types: object, args: PyTree = (), kwargs: PyTree = None
    ) -> object:
        if func in _OF_HISTORY and id(args[0]) in self.replacements:  # which a derivative of the function leaves alone
            with torch._C.DisableTorchFunction():
                return func(args[0])
        args, kwargs = map_tensors(self.swap, (args, kwargs or {}))
        return func(*args, **kwargs)


_OF_HISTORY = (torch.Tensor.requires_grad.__get__, torch.Tensor.is_leaf.__get__)  # type: ignore[attr-defined]


def _this_thread() -> Callable[[], bool]:
    """Return a function that tells whether it runs in the thread that asked for it: others see torch as it is."""
    owner = threading.get_ident()
    return lambda: threading.get_ident() == owner


class _AbsentOp:
    """Stands for an op that torch does not have, and for its overloads: equal to no op."""

    def __getattr__(self, name: str) -> _AbsentOp:
        if name.startswith("__"):
            raise AttributeError(name)
        return self


@contextlib.contextmanager
def absent_ops() -> Iterator[None]:
    """Let another library name ops of several releases of torch: those that this one lacks are no error inside."""
    kinds: tuple[Patched, Patched] = (_OpNamespace, OpOverloadPacket)
    originals = [kind.__getattr__ for kind in kinds]
    here = _this_thread()

    def tolerant(original: Callable[[object, str], object]) -> Callable[[object, str], object]:
        def find(owner: object, name: str) -> object:
            try:
                return original(owner, name)
            except AttributeError:
                if name.startswith("__") or not here():
                    raise
                return _AbsentOp()

        return find

    try:
        for kind, original in zip(kinds, originals, strict=True):
            kind.__getattr__ = tolerant(original)
        yield
    finally:
        for kind, original in zip(kinds, originals, strict=True):
            kind.__getattr__ = original


@contextlib.contextmanager
def entering_functorch(swap: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Let ``torch.func``, which wraps its inputs without asking a function mode, wrap what ``swap`` gives for them."""
    grads: Patched = eager_transforms
    maps: Patched = functorch_vmap
    wrap, add = grads._wrap_for_grad, maps._add_batch_dim
    here = _this_thread()
    grads._wrap_for_grad = lambda tensor, level: wrap(swap(tensor) if here() else tensor, level)
    maps._add_batch_dim = lambda tensor, dim, level: add(swap(tensor) if here() else tensor, dim, level)
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
    autograd: Patched = torch.autograd
    original = autograd.has_torch_function
    here = _this_thread()
    autograd.has_torch_function = lambda tensors: not here() and original(tensors)
    try:
        yield
    finally:
        autograd.has_torch_function = original


class _Inference(threading.local):
    def __init__(self) -> None:
        self.modes: list[bool] = []  # of the code that is recorded, innermost last


_INFERENCE = _Inference()


def asks_inference(default: bool) -> bool:
    """Tell whether inference mode is on for the code that is recorded, where ``default`` says that of its caller."""
    return _INFERENCE.modes[-1] if _INFERENCE.modes else default


@contextlib.contextmanager
def without_inference_mode() -> Iterator[None]:
    """Leave inference mode inside, whatever the code that is recorded thinks."""
    with torch._C._InferenceMode(False):
        yield


@contextlib.contextmanager
def inference_as_no_grad() -> Iterator[None]:
    """Let inference mode only switch autograd off while recording: its tensors cannot be told of writes."""
    inference: Patched = torch.inference_mode
    enter, leave = inference.__enter__, inference.__exit__
    here = _this_thread()

    def entered(mode: Patched) -> None:
        if not here():
            enter(mode)
            return
        _INFERENCE.modes.append(mode.mode)
        mode._inference_mode_context = torch.set_grad_enabled(not mode.mode)

    def left(mode: Patched, *error: object) -> None:
        if not here():
            leave(mode, *error)
            return
        _INFERENCE.modes.pop()
        mode._inference_mode_context.__exit__(*error)  # not by a recording around this one

    inference.__enter__, inference.__exit__ = entered, left
    outer, _INFERENCE.modes = _INFERENCE.modes, []  # this may be a recording within another
    try:
        yield
    finally:
        inference.__enter__, inference.__exit__ = enter, leave
        _INFERENCE.modes = outer


def _with_none(
    fun: Callable[..., MaybeTensors], in_dims: PyTree = 0, out_dims: PyTree = 0, **options: object
) -> Callable[..., MaybeTensors]:
    """Return ``torch.func.vmap`` of a function that may return None in places, as a gradient does."""
    absent: list[bool] = []

    def present(*args: object) -> tuple[torch.Tensor, ...]:
        outs = fun(*args)
        absent[:] = [out is None for out in outs]
        return tuple(out for out in outs if out is not None)

    def mapped(*args: object) -> MaybeTensors:
        found = iter(torch.func.vmap(present, in_dims, out_dims, randomness="same")(*args))
        return tuple(None if a else next(found) for a in absent)

    return mapped


@contextlib.contextmanager
def newer_vmaps() -> Iterator[None]:
    """Let ``is_grads_batched`` and ``vectorize=True`` do without torch's older ``vmap``, which cannot be recorded."""
    internals: Patched = _vmap_internals
    functional: Patched = torch.autograd.functional
    older, forward = internals._vmap, functional._jacfwd
    here = _this_thread()

    def jacobian(fun: Callable[..., object], inputs: PyTree, strict: bool = False, vectorize: bool = False) -> PyTree:
        if not here():
            return forward(fun, inputs, strict, vectorize)
        return functional.jacobian(fun, inputs, create_graph=True, vectorize=True)  # in reverse: the same derivative

    try:
        internals._vmap = lambda *args, **options: (_with_none if here() else older)(*args, **options)
        functional._jacfwd = jacobian
        yield
    finally:
        internals._vmap, functional._jacfwd = older, forward


@functools.cache
def load_dynamo() -> None:
    """Import what recording makes torch import anyway, without the environment variable that it leaves behind."""
    name = "TORCHINDUCTOR_CACHE_DIR"
    before = os.environ.get(name)
    importlib.import_module("torch._dynamo")
    if before is None:
        os.environ.pop(name, None)


def parametrizations_are_cached() -> bool:
    """Tell whether ``torch.nn.utils.parametrize.cached()`` is open."""
    parametrizing: ModuleType = torch.nn.utils.parametrize
    return bool(parametrizing._cache_enabled)


def proxies_are_active() -> bool:
    """Tell whether torch itself is tracing: ``make_fx``, ``torch.export``, ``torch.func.linearize``."""
    return torch._C._get_dispatch_mode(BELOW_FUNCTIONALISATION) is not None


@contextlib.contextmanager
def without_other_tracers() -> Iterator[None]:
    """Keep torch's own tracers out while recording: they would take the tensors of the recording for constants.

    ``torch.func.linearize`` pushes each tangent forward instead of tracing that, and what ``torch.compile`` made runs
    as it was written. Whatever else traces is refused.
    """
    grads: Patched = eager_transforms
    proxies: Patched = ProxyTorchDispatchMode
    disallow, enter = grads.lazy_dynamo_disallow, proxies.__enter__
    here = _this_thread()

    # linearize wraps the two steps by which it makes a graph
    def untraced(step: Callable[..., object]) -> Callable[..., object]:
        if not here():
            return disallow(step)
        if step is not grads.make_fx:
            return lambda graph: graph
        return lambda push: lambda _: lambda *tangents: torch_pytree.tree_leaves(push(tangents))

    grads.lazy_dynamo_disallow = untraced
    proxies.__enter__ = lambda mode: (refuse_tracer if here() else enter)(mode)
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        grads.lazy_dynamo_disallow, proxies.__enter__ = disallow, enter


def share_memory(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Assign ``tensor.data = value`` for tensors of a recording: torch does not count it as a write."""
    version = tensor._version
    with torch._C._AutoDispatchBelowAutograd():  # which would begin a new history
        torch.ops.aten.set_.source_Tensor(tensor, value)
        with no_dispatch():  # what stands around the recorded tensor
            torch.ops.aten.set_.source_Tensor(tensor, value)
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


@functools.lru_cache(maxsize=4096)
def has_own_function(kind: object) -> bool:
    """Tell whether a class says itself, by ``__torch_function__``, what an op is of its objects."""
    function = getattr(kind, "__torch_function__", None)
    if function is None or function is torch._C._disabled_torch_function_impl:
        return False
    default: Any = torch.Tensor.__torch_function__
    return getattr(function, "__func__", function) is not default.__func__


def in_backward() -> bool:
    """Tell whether a backward pass runs in this thread."""
    return torch._C._current_graph_task_id() != -1


def backward_node() -> torch.autograd.graph.Node | None:
    """Return what autograd's engine runs in this thread, if torch wrote it."""
    node = torch._C._current_autograd_node()
    return None if hasattr(node, "_forward_cls") else node


def sequence_number() -> int:
    """Return the sequence number of the autograd node that was made last."""
    return torch.autograd._get_sequence_nr() - 1


def forward_mode_is_active() -> bool:
    """Tell whether tensors may be dual numbers."""
    return dual_level_is_open() and torch._C._is_fwd_grad_enabled()


def dual_level_is_open() -> bool:
    """Tell whether there may be dual numbers somewhere, if not here."""
    return forward_ad._current_level >= 0


def without_forward_mode() -> contextlib.AbstractContextManager[None]:
    """Return a scope in which dual numbers are their primals."""
    return forward_ad._set_fwd_grad_enabled(False)


def open_modes() -> list[object]:
    """Return the function modes and the dispatch modes that are active in this thread."""
    functions = [torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack())]
    return functions + [torch._C._get_dispatch_stack_at(i) for i in range(torch._C._len_torch_dispatch_stack())]


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """Keep all dispatch modes and function modes inactive inside."""
    stack: list[object] = []
    with _disable_current_modes():
        while torch._C._len_torch_function_stack():
            stack.append(torch._C._pop_torch_function_stack())
        try:
            yield
        finally:
            for mode in reversed(stack):
                torch._C._push_on_torch_function_stack(mode)


@contextlib.contextmanager
def without_saved_tensor_hooks() -> Iterator[None]:
    """Let autograd keep its saved tensors itself inside; a checkpoint around it would take them away."""
    hooks: list[tuple[object, object]] = []
    while (top := autograd_internals._top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(top)
        autograd_internals._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            autograd_internals._push_saved_tensors_default_hooks(pack, unpack)


def _legacy_level() -> int:
    level: int = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    return level


def legacy_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return the rows, on axis 0, of what ``torch.autograd.grad(..., is_grads_batched=True)`` shows as one."""
    return torch._remove_batch_dim(tensor, _legacy_level(), 1, 0)


def legacy_batch(rows: torch.Tensor) -> torch.Tensor:
    """Show rows, on axis 0, as one again: the way back of :func:`legacy_rows`."""
    return torch._add_batch_dim(rows, 0, _legacy_level())


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Make ``torch.compiler.is_compiling()`` true: libraries then skip the checks that read values."""
    old = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = old


@contextlib.contextmanager
def plain_kernels(backward_inside: Callable[..., None]) -> Iterator[None]:
    """Keep fused CPU kernels out while recording: nothing can lower their backward ops.

    ``backward_inside`` is what ``torch.autograd.backward`` does then.
    """
    has_effects = effects.has_effects
    autograd: Patched = torch.autograd
    seeding: Patched = torch
    random: Patched = torch.random
    backward, seed, outer_seed = autograd.backward, random.manual_seed, seeding.manual_seed
    here = _this_thread()
    rnn: Patched = torch.nn.RNNBase
    parametrizing: Patched = torch.nn.utils.parametrize
    cached = parametrizing._cache
    flatten_parameters = rnn.flatten_parameters
    mkldnn = torch._C._get_mkldnn_enabled()
    fastpath = torch.backends.mha.get_fastpath_enabled()
    skipped = torch.ops.aten._linalg_check_errors.default
    fake_log = logging.getLogger("torch._subclasses.fake_tensor")  # prints a traceback before each error it raises
    try:
        fake_log.disabled = True
        autograd.backward = lambda *args, **kwargs: (backward_inside if here() else backward)(*args, **kwargs)
        random.manual_seed = lambda number: (refuse_seed if here() else seed)(number)
        seeding.manual_seed = lambda number: (refuse_seed if here() else outer_seed)(number)
        # Functionalisation would thread an effect token through the error check; it is dropped when recorded.
        effects.has_effects = lambda op: op is not skipped and has_effects(op)
        # cuDNN wants the weights side by side in memory, which they do not have here.
        parametrizing._cache = {}  # what is computed here is of this trace
        rnn.flatten_parameters = lambda module: None if here() else flatten_parameters(module)
        torch.backends.mha.set_fastpath_enabled(False)
        torch._C._set_mkldnn_enabled(False)  # (torch.backends.mkldnn.flags would also touch, and warn of, TF32)
        # A compiled module or function runs as what it was compiled from.
        with (
            sdpa_kernel(SDPBackend.MATH),
            newer_vmaps(),
            inference_as_no_grad(),
            torch.compiler.set_stance("force_eager"),
        ):
            yield
    finally:
        fake_log.disabled = False
        autograd.backward = backward
        random.manual_seed, seeding.manual_seed = seed, outer_seed
        rnn.flatten_parameters = flatten_parameters
        parametrizing._cache = cached
        torch._C._set_mkldnn_enabled(mkldnn)
        torch.backends.mha.set_fastpath_enabled(fastpath)
        effects.has_effects = has_effects
