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
import jax.numpy as jnp
import numpy as np

__all__ = [
    "backends_are_initialized",
    "enable_x64",
    "mapping_trace",
    "native_export",
    "native_import",
    "out_of_sight",
    "spread_out_of_sight",
    "weak_float",
]


def enable_x64() -> AbstractContextManager[None]:
    """Return a scope in which JAX keeps 64-bit types, for this thread; the process-wide setting stays as it is."""
    return jax.enable_x64(True)


def backends_are_initialized() -> bool:
    """Tell whether JAX has started: what it reads from the environment then is fixed. False where it does not say."""
    try:
        return bool(importlib.import_module("jax._src.xla_bridge").backends_are_initialized())
    except (ImportError, AttributeError):
        return False


def mapping_trace() -> object:
    """Return what JAX traces now, seen through ``grad``, ``jvp`` and ``linearize``: the same in and around these."""
    return _trace_around("JVPTrace", "LinearizeTrace")


def unmapped_trace() -> object:
    """Return what JAX traces now, seen through ``vmap``: the same in and around it."""
    return _trace_around("BatchTrace")


def _trace_around(*kinds: str) -> object:
    try:
        core = importlib.import_module("jax._src.core")
        trace = core.trace_ctx.trace
        while type(trace).__name__ in kinds:
            trace = trace.parent_trace
        return trace
    except AttributeError:
        return object()  # equal to no other: nothing is known


def weak_float(value: jax.Array) -> jax.Array:
    """Return a float64 scalar that takes part in promotion as a Python float does."""
    convert: Callable[..., jax.Array] = importlib.import_module("jax._src.lax.lax")._convert_element_type
    result: jax.Array = convert(value, weak_type=True)
    return result


_BARRIERS_ARE_FREE = jax.__version_info__ < (0, 11)  # on CPU: XLA drops them before it fuses operations


def out_of_sight(value: jax.Array) -> jax.Array:
    """Return a value of which XLA's simplifier does not see how it was made.

    From jax 0.11 on what stands behind a barrier takes an array of its own, on the CPU too. There only the number one
    does, by which the value is multiplied, which for real numbers changes nothing.
    """
    if _BARRIERS_ARE_FREE or not jnp.issubdtype(value.dtype, jnp.floating):
        return jax.lax.optimization_barrier(value)
    return value * jax.lax.optimization_barrier(jnp.ones((), value.dtype))


def spread_out_of_sight(value: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Return a value spread to a shape so that XLA's simplifier does not see that it is.

    From jax 0.11 on it is multiplied by ones along an axis over which it is spread. (It would see through a product
    with one number.)
    """
    wide = jnp.broadcast_to(value, shape)
    aligned = (1,) * (len(shape) - value.ndim) + value.shape
    axes = [i for i, n in enumerate(shape) if n != aligned[i]]
    is_real = jnp.issubdtype(value.dtype, jnp.floating)
    if _BARRIERS_ARE_FREE or not is_real or not axes or value.size <= 1:
        return jax.lax.optimization_barrier(wide)
    ones = jnp.ones([n if i == axes[-1] else 1 for i, n in enumerate(shape)], value.dtype)
    return wide * jax.lax.optimization_barrier(ones)


def _native(name: str) -> Callable[..., Any] | None:
    try:
        return getattr(importlib.import_module("jaxlib._jax"), name, None)
    except ImportError:
        return None


@functools.cache
def native_import() -> Callable[[object, jax.Device, int | None], jax.Array] | None:
    """Return jaxlib's import of a DLPack capsule, `(capsule, device, stream) -> array`, or None.

    It is what `jax.dlpack.from_dlpack` calls. The public function spends ten times as long around it and narrows
    64-bit types unless they are enabled.
    """
    function = _native("dlpack_managed_tensor_to_buffer")
    try:
        works = function is not None and _import_probe(function).dtype == np.int64
    except Exception:  # whatever it raises, the public way remains
        works = False
    return function if works else None


@functools.cache
def native_export() -> Callable[[jax.Array], object] | None:
    """Return jaxlib's export of an array on the CPU, `(array) -> capsule`, or None; `array.__dlpack__()` calls it."""
    function, importer = _native("buffer_to_dlpack_managed_tensor"), native_import()
    if function is None or importer is None:
        return None
    try:
        works = "capsule" in repr(function(_import_probe(importer)))
    except Exception:
        works = False
    return function if works else None


def _import_probe(importer: Callable[..., jax.Array]) -> jax.Array:
    # From NumPy, and not computed by JAX: the first crossing may happen under a mode of torch's or while JAX traces,
    # where torch.arange or jnp.arange would give something else than data.
    return importer(np.arange(3, dtype=np.int64).__dlpack__(), jax.local_devices(backend="cpu")[0], None)
