"""What differs between releases of JAX and jaxlib, in one place.

Names outside JAX's public interface are looked up here and tried once; where a release lacks one, or gives it other
arguments, `None` comes back and the caller takes the public way, which is slower and otherwise the same.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax
import torch
from torch.utils.dlpack import to_dlpack

__all__ = ["enable_x64", "native_export", "native_import"]


def enable_x64() -> AbstractContextManager[None]:
    """Return a scope in which JAX keeps 64-bit types, for this thread; the process-wide setting stays as it is."""
    return jax.enable_x64(True)


def _native(name: str) -> Callable[..., Any] | None:
    try:
        return getattr(importlib.import_module("jaxlib._jax"), name, None)
    except ImportError:
        return None


@functools.cache
def native_import() -> Callable[[Any, jax.Device, int | None], jax.Array] | None:
    """Return jaxlib's import of a DLPack capsule, `(capsule, device, stream) -> array`, or None.

    It is what `jax.dlpack.from_dlpack` calls. The public function spends ten times as long around it and narrows
    64-bit types unless they are enabled. One small tensor is tried before the function is trusted.
    """
    function = _native("dlpack_managed_tensor_to_buffer")
    if function is None:
        return None
    probe = torch.arange(3)
    try:
        array = function(to_dlpack(probe), jax.local_devices(backend="cpu")[0], None)
        works = array.dtype == "int64" and array.unsafe_buffer_pointer() == probe.data_ptr()
    except Exception:  # whatever it raises, the public way remains
        works = False
    return function if works else None


@functools.cache
def native_export() -> Callable[[jax.Array], Any] | None:
    """Return jaxlib's export of an array on the CPU, `(array) -> capsule`, or None; `array.__dlpack__()` calls it."""
    function = _native("buffer_to_dlpack_managed_tensor")
    if function is None:
        return None
    try:
        probe = jax.device_put(1, jax.local_devices(backend="cpu")[0])
        works = torch.utils.dlpack.from_dlpack(function(probe)).item() == 1
    except Exception:
        works = False
    return function if works else None
