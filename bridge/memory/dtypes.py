"""Dtypes in both frameworks, by their names."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

# Names that mean the same in both frameworks; a release that lacks one of the narrow types goes without it.
_SHARED_DTYPES = (
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
)
TO_JAX: dict[torch.dtype, np.dtype[Any]] = {torch.bool: np.dtype(np.bool_)} | {
    getattr(torch, name): np.dtype(getattr(jnp, name))
    for name in _SHARED_DTYPES
    if hasattr(torch, name) and hasattr(jnp, name)
}
_TO_TORCH = {theirs: ours for ours, theirs in TO_JAX.items()}
# Where `tensor.numpy()` exists.
NUMPY_DTYPES = frozenset(ours for ours, theirs in TO_JAX.items() if theirs.isbuiltin == 1)


def jax_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """Return JAX's name for a torch dtype, 64-bit types included.

    Raises:
        TypeError: JAX has no such type (quantised and sub-byte types, `torch.complex32`).

    >>> jax_dtype(torch.bfloat16)
    dtype(bfloat16)
    """
    try:
        return TO_JAX[dtype]
    except (KeyError, TypeError):
        raise TypeError(f"JAX has no counterpart of {dtype}: convert the tensor first, {_conversion(dtype)}.") from None


def _conversion(dtype: object) -> str:
    if dtype in (torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4):
        return "for example with .dequantize()"
    if dtype is torch.complex32:
        return "for example with .to(torch.complex64)"
    return "for example with .view(torch.uint8) or .to(torch.int8)"


def torch_dtype(dtype: Any) -> torch.dtype:
    """Return torch's name for a NumPy or JAX dtype (a `dtype`, a scalar type such as `jnp.int32`, or a name).

    Raises:
        TypeError: torch has no such type (`int4`, `float8_e3m4`, `float0`, random keys, strings, ...).

    >>> torch_dtype(jnp.complex64)
    torch.complex64
    """
    try:
        return _TO_TORCH[dtype]  # an array's own dtype, the common case
    except (KeyError, TypeError):
        pass
    if dtype is not None and not jnp.issubdtype(dtype, jax.dtypes.extended):  # np.dtype(None) is float64
        found = _TO_TORCH.get(np.dtype(dtype))
        if found is not None:
            return found
    hint = "take jax.random.key_data(key)" if "key" in str(dtype) else "convert the array first with .astype"
    raise TypeError(f"torch has no counterpart of JAX's {dtype}: {hint}.")


def has_torch_dtype(dtype: object) -> bool:
    """Tell whether torch has a counterpart of an array's dtype."""
    return dtype in _TO_TORCH
