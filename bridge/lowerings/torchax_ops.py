"""torchax's table of JAX lowerings for ATen ops, loaded without torchax's import-time effects.

Importing torchax 0.0.13 renames torch's private backend, turns the attention fast path off, sets an environment
variable and a JAX config entry; since torch 2.13 it does not import at all, because it names ops and overloads that
are gone (those of named tensors, ``aten.cholesky``, ``aten.qr``). Only its module ``torchax.ops.jaten`` is wanted
here: pure functions from arrays to arrays. So that module alone is executed, under a stand-in parent package that is
taken away afterwards: a later ``import torchax`` by the user finds nothing changed and does all of its own work.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import types
from typing import Protocol

from ...jax_impl.program.trees import Function
from ..base.torch_internals import absent_ops

_NAME = "torchax"


class _Entry(Protocol):
    func: Function
    is_jax_function: bool
    needs_env: bool


def _is_torchax(module: str) -> bool:
    return module == _NAME or module.startswith(_NAME + ".")


@functools.cache
def torchax_table() -> dict[object, Function]:
    """Return, by op overload or overload packet, functions from arrays and Python values to arrays (no random ops)."""
    registry = _load()
    return {op: entry.func for op, entry in registry.items() if entry.is_jax_function and not entry.needs_env}


def _load() -> dict[object, _Entry]:
    if _NAME in sys.modules:  # the user's own import came first, and its effects are the user's
        importlib.import_module(f"{_NAME}.ops.jaten")
        table: dict[object, _Entry] = sys.modules[f"{_NAME}.ops.ops_registry"].all_aten_ops
        return table
    spec = importlib.util.find_spec(_NAME)
    if spec is None or spec.submodule_search_locations is None:
        raise ImportError("microtome needs torchax for its JAX lowerings of torch ops: pip install torchax")
    parent = types.ModuleType(_NAME)
    parent.__path__ = list(spec.submodule_search_locations)
    parent.__spec__ = spec
    sys.modules[_NAME] = parent
    try:
        with absent_ops():
            importlib.import_module(f"{_NAME}.ops.jaten")
        return sys.modules[f"{_NAME}.ops.ops_registry"].all_aten_ops
    finally:
        for module in [name for name in sys.modules if _is_torchax(name)]:
            del sys.modules[module]
