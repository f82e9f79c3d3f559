"""Single tensors across torch and JAX, over the same memory.

How memory is shared
    `tensor_to_array` and `array_to_tensor` give a second view of the same memory, as `torch.from_numpy` does: what
    torch writes afterwards, JAX sees. JAX takes its arrays to be immutable, so an array over a tensor is for a call
    that starts now, not for keeping. It must never be donated to a compiled function: XLA would write into the tensor.

When memory may be written again
    On the CPU, JAX returns from a call before it has computed. Until the results are there it still reads its inputs,
    so an in-place update of an input right after the call changes the results (tried: ten times in ten).
    `array_to_tensor` waits for its array, and one result is ready only when the whole program that it came from has
    run, thus has read all its inputs: after the first result has crossed, everything may be written. A program
    without results has to be waited for by other means, `jax.block_until_ready` on anything it returned or
    `jax.effects_barrier()`.
    On a GPU nothing waits on the host. Importing makes XLA wait for torch's current stream, exporting makes torch's
    current stream wait for the result, so writes that torch issues after a result has crossed come after the reads.

What is shared with what
    The results of one compiled call have memory of their own, also where the function returns an argument, a
    captured array or the same value twice: XLA copies then. Functions that run op by op give such values back as
    they are. `results_to_tensors` makes a copy of exactly these.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import jax
import numpy as np
import torch
from torch.utils.dlpack import from_dlpack, to_dlpack

from ..base.torch_internals import FakeTensor, is_functorch_wrapped_tensor
from ..base.versions import enable_x64, native_export, native_import
from .dtypes import NUMPY_DTYPES, TO_JAX, has_torch_dtype, jax_dtype, torch_dtype

# XLA takes memory on the CPU as it is only at multiples of this many bytes. From anywhere else it copies, and goes on
# copying after the import has returned: a write to the tensor in the meantime ends up in the array.
_XLA_CPU_ALIGNMENT = 64

_RULE = "only dense tensors with data of their own have a counterpart there"


@functools.cache
def jax_device(device: torch.device) -> jax.Device:
    """Return the JAX device on which a tensor's memory can be used as it is.

    Args:
        device: `cpu` or `cuda:N` (a ROCm device has this name as well); without an index the first one is meant.

    Raises:
        TypeError: tensors on this device hold no data (`meta`).
        ValueError: JAX has no backend for it, or does not see this one.
    """
    if device.type == "meta":
        raise TypeError("A meta tensor holds no data to pass to JAX: make it with torch.empty_like(..., device='cpu').")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"JAX cannot use tensors on {device}: move them with .cpu() first.")
    try:
        devices = jax.local_devices(backend="cpu" if device.type == "cpu" else "gpu")
    except RuntimeError as error:
        raise ValueError(f"JAX has no backend for tensors on {device}: {_missing_backend(device)}.") from error
    if device.type == "cpu":
        return devices[0]
    for candidate in devices:
        if candidate.local_hardware_id == (device.index or 0):
            return candidate
    raise ValueError(
        f"JAX does not see {device}, only {devices}: check JAX's visible devices and CUDA_VISIBLE_DEVICES."
    )


def _missing_backend(device: torch.device) -> str:
    if device.type == "cpu":
        return "add cpu to the JAX_PLATFORMS environment variable"
    if torch.version.hip is not None:
        return "install jax with its ROCm plugin, for example jax[rocm7-local], or move the tensors with .cpu()"
    major = (torch.version.cuda or "13").partition(".")[0]
    return f"install jax[cuda{major}] and check the JAX_PLATFORMS environment variable, or move the tensors with .cpu()"


def torch_device(device: jax.Device) -> torch.device:
    """Return the torch device on which a JAX device's memory can be used as it is.

    Raises:
        ValueError: torch cannot address it (a TPU, or a GPU where torch was built without CUDA).
    """
    if device.platform == "cpu":
        return torch.device("cpu")
    if device.platform in ("gpu", "cuda", "rocm") and torch.cuda.is_available():
        return torch.device("cuda", device.local_hardware_id)
    raise ValueError(
        f"torch cannot use memory on JAX's {device}: copy the array with jax.device_put(array, jax.devices('cpu')[0])."
    )


def tensor_to_array(tensor: torch.Tensor) -> jax.Array:
    """Return the tensor as a `jax.Array` over the same memory, detached, on the same device, in the same dtype.

    Equivalent to `jax.dlpack.from_dlpack(tensor.detach())` with 64-bit types on, at a tenth of the time, and for every
    layout. Contiguous, transposed, permuted and channels-last tensors are not copied (a permuted one keeps its order of
    axes in memory: `jax.jit` compiles once for each order). What XLA cannot address is copied first: gaps and repeats
    (`x[::2]`, `x[:, :5]`, `expand`), lazily conjugated or negated views, and on the CPU slices that do not start at a
    multiple of 64 bytes. Such a copy is complete on return. The result is committed to its device.

    See the module's text for when the tensor may be written again.

    Args:
        tensor: `[*shape]` of any dtype that `jax_dtype` knows; parameters, inference tensors, plain subclasses, 0-d
            and empty tensors included.

    Returns:
        `[*shape]`, a committed array.

    Raises:
        TypeError: the tensor is no dense tensor with data of its own (sparse, nested, quantised, meta, fake, a tensor
            seen inside `torch.func`), or JAX lacks the dtype.
        ValueError: JAX has no backend for the tensor's device.

    >>> tensor = torch.arange(6, dtype=torch.int64).reshape(2, 3)
    >>> array = tensor_to_array(tensor.T)
    >>> array.shape, array.dtype, array.unsafe_buffer_pointer() == tensor.data_ptr()
    ((3, 2), dtype('int64'), True)
    """
    tensor = _plain_memory(tensor)
    try:
        if not (tensor.is_contiguous() or _is_dense(tensor)):
            tensor = tensor.contiguous()
        if tensor.is_cpu and tensor.data_ptr() % _XLA_CPU_ALIGNMENT:
            tensor = tensor.clone()
        return _import(tensor)
    except (RuntimeError, BufferError):
        check_kind(tensor)
        raise


def tensors_to_arguments(tensors: Iterable[torch.Tensor]) -> list[jax.Array | np.ndarray]:
    """Return the tensors in the form that a compiled function takes with the least overhead.

    Equivalent to `[tensor_to_array(tensor) for tensor in tensors]` for the arguments of `jax.jit(fun)`, except that a
    contiguous tensor on the CPU becomes a NumPy view of its memory, which costs the call about an eighth of an array.
    The call must run under `enable_x64()`, else it narrows 64-bit types. A NumPy argument is taken as it is where it
    starts at a multiple of 64 bytes, and is copied by the call elsewhere; it is not committed to its device, so nothing
    becomes a view unless JAX computes on the CPU by default.

    Which form a tensor takes depends on its dtype and on whether it is contiguous, not on its address: calls with the
    same signature do not compile again.

    Raises:
        TypeError, ValueError: as `tensor_to_array`.

    >>> [type(argument).__name__ for argument in tensors_to_arguments([torch.ones(2, 3), torch.ones(2, 3).T])]
    ['ndarray', 'ArrayImpl']
    """
    on_cpu = jax.default_backend() == "cpu" and jax.config.jax_default_device is None  # type: ignore[attr-defined]
    return [_to_argument(tensor) if on_cpu else tensor_to_array(tensor) for tensor in tensors]


def _to_argument(tensor: torch.Tensor) -> jax.Array | np.ndarray:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        tensor = _plain_memory(tensor)
    if tensor.dtype in NUMPY_DTYPES and tensor.is_contiguous():
        try:
            return (tensor.detach() if tensor.requires_grad else tensor).numpy()
        except (RuntimeError, TypeError):
            pass  # not on the CPU, or sign flips are pending, or tensor_to_array says what is wrong with it
    return tensor_to_array(tensor)


def _plain_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor without what memory alone does not say: autograd, subclasses, pending sign flips."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        tensor = _as_plain(tensor)
    if tensor.dtype not in TO_JAX or tensor.layout is not torch.strided:
        check_kind(tensor)
    if tensor.requires_grad:
        tensor = tensor.detach()
    # DLPack has no word for these two: the memory that it passes on holds the numbers before their sign flips.
    if tensor.is_conj():
        tensor = tensor.resolve_conj()
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    return tensor


def _as_plain(tensor: object) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"Expected a torch.Tensor, got {type(tensor).__name__}.")
    # A subclass that handles the ops itself keeps its data elsewhere, if it has any (fake tensors, DTensor, jagged
    # tensors, torchax's); all others are a torch.Tensor with another name.
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        check_kind(tensor)
        raise TypeError(f"Cannot pass a {type(tensor).__name__} to JAX: {_RULE}; convert it to a torch.Tensor first.")
    return tensor.as_subclass(torch.Tensor)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Tell whether the tensor is a permutation of a contiguous one, which is what XLA can address."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:  # its stride is never used and may be anything
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _import(tensor: torch.Tensor) -> jax.Array:
    function = native_import()
    if tensor.is_cpu:
        if function is None:
            return _import_publicly(tensor)
        return function(to_dlpack(tensor), jax_device(tensor.device), None)
    device = jax_device(tensor.device)
    # torch exports from its current device only, and synchronises with that device's current stream.
    with torch.cuda.device(tensor.device):
        if function is None:
            return _import_publicly(tensor)
        stream = device.get_stream_for_external_ready_events()
        return function(tensor.__dlpack__(stream=stream), device, stream)


class _Exporter:
    """A tensor for `jax.dlpack.from_dlpack`, except that pinned memory counts as the plain memory that it is."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __dlpack__(self, *, stream: int | None = None, **_: object) -> object:
        return to_dlpack(self._tensor) if self._tensor.is_cpu else self._tensor.__dlpack__(stream=stream)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0) if self._tensor.is_cpu else self._tensor.__dlpack_device__()


def _import_publicly(tensor: torch.Tensor) -> jax.Array:
    with enable_x64():
        return jax.dlpack.from_dlpack(_Exporter(tensor))


def check_kind(tensor: torch.Tensor) -> None:
    """Raise the error that says why JAX cannot have this tensor, if there is a known reason."""
    if is_functorch_wrapped_tensor(tensor):
        kind, way_out = "tensor seen inside torch.func (vmap, grad, jvp, ...)", "call a function made by as_torch there"
    elif isinstance(tensor, FakeTensor):
        kind, way_out = "fake tensor", "call outside FakeTensorMode, torch.compile and torch.export"
    elif tensor.is_nested:
        kind, way_out = "nested tensor", "pad it with torch.nested.to_padded_tensor"
    elif tensor.layout is not torch.strided:
        kind, way_out = f"{str(tensor.layout).removeprefix('torch.').removeprefix('_')} tensor", "use .to_dense()"
    else:
        jax_dtype(tensor.dtype)
        jax_device(tensor.device)
        return
    raise TypeError(f"Cannot pass a {kind} to JAX: {_RULE}; {way_out}.")


def array_to_tensor(array: jax.Array, *, copy: bool = False) -> torch.Tensor:
    """Return the array as a tensor over the same memory, on the same device, in the same dtype.

    Equivalent to `torch.from_dlpack(array)`, at a third of the time. Waits until the array has been computed (on a GPU
    torch's current stream does). Writing to the tensor in place changes the array and whatever else shares its memory:
    pass `copy=True` unless nobody looks at the array again, or use `results_to_tensors` for a call's results.

    Args:
        array: `[*shape]` of any dtype that `torch_dtype` knows, on one device.
        copy: whether to return memory of its own.

    Returns:
        `[*shape]`, without `requires_grad`; its strides follow the array's order of axes in memory.

    Raises:
        TypeError: not a `jax.Array` with data (a traced value), or torch lacks the dtype.
        ValueError: the array is spread over several devices, or torch cannot address its device.

    >>> array_to_tensor(jax.numpy.arange(3, dtype="uint8"))
    tensor([0, 1, 2], dtype=torch.uint8)
    """
    if isinstance(array, jax.core.Tracer) or not isinstance(array, jax.Array):
        raise _no_array(array)
    if not has_torch_dtype(array.dtype):
        torch_dtype(array.dtype)  # raises
    device = _only_device(array.sharding)
    function = native_export()
    if device.type != "cpu":
        tensor = torch.from_dlpack(array)  # passes torch's current stream on
    elif function is None:
        tensor = from_dlpack(array.__dlpack__())
    else:
        tensor = from_dlpack(function(array))
    return tensor.clone() if copy else tensor


def _no_array(value: object) -> TypeError:
    if isinstance(value, jax.core.Tracer):
        return TypeError(
            f"Cannot pass the traced value {value} to torch: inside jax.jit, jax.grad or jax.vmap there is no data "
            "yet; call a torch function there through as_jax."
        )
    return TypeError(f"Expected a jax.Array, got {type(value).__name__}.")


@functools.lru_cache(maxsize=256)
def _only_device(sharding: jax.sharding.Sharding) -> torch.device:
    if len(sharding.device_set) != 1:
        raise ValueError(
            f"Cannot pass an array on {len(sharding.device_set)} devices to torch: a tensor lies on one device; "
            "gather it with jax.device_put(array, device) first."
        )
    (device,) = sharding.device_set
    return torch_device(device)


def results_to_tensors(
    arrays: Iterable[jax.Array], inputs: Iterable[torch.Tensor | jax.Array] = ()
) -> list[torch.Tensor]:
    """Return a call's results as tensors that may each be written in place without touching another or an input.

    Equivalent to `[array_to_tensor(array) for array in arrays]`, except that a result in the memory of one of `inputs`
    or of an earlier result is copied. Compiled functions return no such results; functions that run op by op do.

    Args:
        arrays: the results, which nobody else keeps.
        inputs: the tensors and arrays that were passed to the function or captured by it.

    Returns:
        One tensor for each array.

    Raises:
        TypeError, ValueError: as `array_to_tensor`.

    >>> x = torch.zeros(2)
    >>> same, twice = results_to_tensors([tensor_to_array(x)] * 2, inputs=[x])
    >>> _ = same.add_(1), twice.add_(2)
    >>> x, same, twice
    (tensor([0., 0.]), tensor([1., 1.]), tensor([2., 2.]))
    """
    taken = {value.data_ptr() if isinstance(value, torch.Tensor) else value.unsafe_buffer_pointer() for value in inputs}
    tensors = []
    for array in arrays:
        tensor = array_to_tensor(array)
        if tensor.data_ptr() in taken:
            tensor = tensor.clone()
        elif tensor.numel():  # empty tensors share the null pointer, and nothing else
            taken.add(tensor.data_ptr())
        tensors.append(tensor)
    return tensors


def has_own_data(tensor: torch.Tensor) -> bool:
    """Tell whether the tensor has data of its own, in order; an exported program notes shapes by tensors without."""
    is_dense = tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_nested or tensor.is_meta)
    return is_dense and type(tensor) is not FakeTensor


def unusual_stride(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Return the strides of a tensor that is not contiguous."""
    with torch._C.DisableTorchFunction():
        if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_contiguous():
            return None
        return tensor.stride()


def is_interpreted(value: object) -> bool:
    """Tell whether a value is what stands for a tensor in torch2jax."""
    import torch2jax

    return isinstance(value, torch2jax.Torchish)
