"""How torch and JAX share the memory of a GPU."""

from __future__ import annotations

import functools
import os
import sys
import warnings
from typing import NamedTuple

import jax
import torch

from ..base.versions import backends_are_initialized

# What JAX reads when it starts; where the user has set one of these, it stands.
_SETTINGS = (
    "XLA_PYTHON_CLIENT_PREALLOCATE",
    "XLA_PYTHON_CLIENT_ALLOCATOR",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "XLA_CLIENT_MEM_FRACTION",
)


@functools.cache
def start_jax() -> None:
    """Start JAX such that it takes memory of a GPU as it needs it, and leaves the rest to torch.

    By itself it takes three quarters of every card when it starts. Nothing happens where there is no GPU, or where the
    user has said how much JAX may take. It warns where JAX runs already.
    """
    if not torch.cuda.is_available() or any(name in os.environ for name in _SETTINGS):
        return
    if not backends_are_initialized():
        _start({"XLA_PYTHON_CLIENT_PREALLOCATE": "false"})
    elif any(device.platform == "gpu" for device in jax.local_devices()):
        warnings.warn(
            "JAX had started before the first call of microtome, and holds three quarters of the GPU's memory, which "
            "torch cannot use. Call microtome.bridge.share_gpu_memory() before JAX computes anything, or set "
            "XLA_PYTHON_CLIENT_PREALLOCATE=false in the environment.",
            stacklevel=2,
        )


def _start(settings: dict[str, str]) -> None:
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        jax.devices()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class GpuMemory(NamedTuple):
    """The memory of one GPU, in bytes.

    Attributes:
        device: torch's name of it.
        total: all there is.
        free: what no process holds.
        torch_held: what torch's allocator holds, in use or cached; ``torch.cuda.empty_cache()`` gives the cache back.
        torch_used: of this, what tensors occupy.
        jax_held: what JAX's allocator holds, which it never gives back; None if JAX does not see the device or say.
        jax_used: of this, what arrays occupy; buffers of compiled programs count while they run.
        jax_limit: the most that JAX will hold.
    """

    device: torch.device
    total: int
    free: int
    torch_held: int
    torch_used: int
    jax_held: int | None
    jax_used: int | None
    jax_limit: int | None


def share_gpu_memory(jax_fraction: float | None = None) -> list[GpuMemory]:
    """Say how torch and JAX share the memory of each GPU, after setting it, if asked.

    Both frameworks have an allocator that keeps what it was once given. JAX takes three quarters of a card when it
    starts; the first call of anything in microtome starts it so that it takes what it needs, unless the environment
    says otherwise (``XLA_PYTHON_CLIENT_PREALLOCATE``, ``XLA_CLIENT_MEM_FRACTION``). Call this function first in a
    program that uses JAX before microtome.

    Args:
        jax_fraction: the share of each GPU that JAX may hold at most, between 0 and 1; torch is limited to the rest.
            Has to be set before JAX has started. None leaves both as they are.

    Returns:
        One record for each GPU that torch sees; an empty list without any.

    Raises:
        TypeError, ValueError: ``jax_fraction`` is no number between 0 and 1.
        RuntimeError: JAX has started already, so that its share is fixed.

    >>> import torch
    >>> from microtome.bridge import share_gpu_memory
    >>> len(share_gpu_memory()) == torch.cuda.device_count()
    True
    """
    if jax_fraction is not None:
        if isinstance(jax_fraction, bool) or not isinstance(jax_fraction, (int, float)):
            raise TypeError(f"jax_fraction must be a number between 0 and 1, or None, got {jax_fraction!r}.")
        if not 0 < jax_fraction < 1:
            raise ValueError(f"jax_fraction must be between 0 and 1, got {jax_fraction!r}.")
        if backends_are_initialized():
            raise RuntimeError("JAX has started already, and its share of GPU memory is fixed. Call this before.")
        if torch.cuda.is_available():
            _start({"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_CLIENT_MEM_FRACTION": str(jax_fraction)})
            for index in range(torch.cuda.device_count()):
                torch.cuda.set_per_process_memory_fraction(1 - jax_fraction, index)
    start_jax()
    return [_memory(torch.device("cuda", i)) for i in range(torch.cuda.device_count())]


def _memory(device: torch.device) -> GpuMemory:
    free, total = torch.cuda.mem_get_info(device)
    try:
        seen = {d.local_hardware_id: d for d in jax.local_devices(backend="gpu")}
    except RuntimeError:  # JAX has no backend for GPUs
        seen = {}
    stats = (seen[device.index].memory_stats() or {}) if device.index in seen else {}
    return GpuMemory(
        device,
        total,
        free,
        torch.cuda.memory_reserved(device),
        torch.cuda.memory_allocated(device),
        stats.get("pool_bytes"),
        stats.get("bytes_in_use"),
        stats.get("bytes_limit"),
    )


def forked_child() -> bool:
    """Tell whether this process was forked from one in which JAX was loaded."""
    return _forked


_forked = False


def _mark_forked() -> None:
    global _forked
    _forked = "jax" in sys.modules


os.register_at_fork(after_in_child=_mark_forked)
