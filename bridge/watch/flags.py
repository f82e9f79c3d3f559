"""torch's own switches, for a function that asks about them: as its caller set them, also while it is recorded.

Those that change what a function computes by themselves (the default dtype, autocast) belong to every call's signature.
The others count only where the function's code names them. A recording sets some of them aside.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..base import torch_internals as ti
from ..base.errors import TraceError
from ..base.user_code import reader

_OF_TORCH = (
    *("is_inference_mode_enabled", "is_anomaly_enabled", "is_anomaly_check_nan_enabled", "is_warn_always_enabled"),
    *("get_num_threads", "get_default_device", "initial_seed", "is_autocast_cache_enabled"),
    *("get_deterministic_debug_mode", "is_deterministic_algorithms_warn_only_enabled"),
)
_OF_ATTENTION = tuple(f"{name}_sdp_enabled" for name in ("flash", "mem_efficient", "math", "cudnn"))
_FUNCTIONS: dict[str, types.ModuleType] = {
    **dict.fromkeys(_OF_TORCH, torch),
    **dict.fromkeys(_OF_ATTENTION, torch.backends.cuda),
    "get_fastpath_enabled": torch.backends.mha,
}
_BACKENDS: tuple[object, ...] = (
    torch.backends.mkldnn,
    torch.backends.cudnn,
    torch.backends.opt_einsum,
    torch.backends.cuda.matmul,
)
_is_inference = torch.is_inference_mode_enabled
_MEMORY: types.ModuleType = torch.utils.deterministic
_SETTINGS = (
    *("enabled", "deterministic", "benchmark", "allow_tf32", "fp32_precision", "strategy", "allow_fp16_accumulation"),
    *("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction"),
)


def _function(name: str) -> Callable[[], object]:
    return lambda: getattr(_FUNCTIONS[name], name)()


def _settings() -> tuple[tuple[str, object], ...]:
    found = []
    for backend in _BACKENDS:
        for name in _SETTINGS:
            with contextlib.suppress(AttributeError, RuntimeError):  # of another release; set in two ways
                found.append((name, getattr(backend, name)))
    return tuple(found)


def _autocast_dtypes() -> tuple[torch.dtype, ...]:
    return tuple(torch.get_autocast_dtype(device) for device in ("cpu", "cuda"))


FLAGS: dict[str, Callable[[], object]] = {
    **{name: _function(name) for name, owner in _FUNCTIONS.items() if hasattr(owner, name)},
    **dict.fromkeys(_SETTINGS, _settings),
    "get_autocast_dtype": _autocast_dtypes,
    "get_autocast_cpu_dtype": _autocast_dtypes,
    "get_autocast_gpu_dtype": _autocast_dtypes,
    "fill_uninitialized_memory": lambda: _MEMORY.fill_uninitialized_memory,
}
_MKLDNN: Any = inspect.getattr_static(torch.backends.mkldnn, "enabled", None)


_SET_ASIDE = ("is_inference_mode_enabled", "is_anomaly_enabled", "is_anomaly_check_nan_enabled")

# By the call that asks for a switch: how to ask, and how to set it.
_SWITCHES: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "is_grad_enabled()": (torch.is_grad_enabled, torch._C._set_grad_enabled),
    "get_default_dtype()": (torch.get_default_dtype, torch.set_default_dtype),
    "get_float32_matmul_precision()": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "get_num_threads()": (torch.get_num_threads, torch.set_num_threads),
    "are_deterministic_algorithms_enabled()": (
        torch.are_deterministic_algorithms_enabled,
        torch.use_deterministic_algorithms,
    ),
    "is_autocast_enabled('cpu')": (
        lambda: torch.is_autocast_enabled("cpu"),
        lambda enabled: torch.set_autocast_enabled("cpu", enabled),
    ),
}


@contextlib.contextmanager
def leaving_switches() -> Iterator[None]:
    """Refuse a function that leaves a switch of torch's changed, which later calls would not repeat; put it back."""
    before = {name: ask() for name, (ask, _) in _SWITCHES.items()}
    changed = lambda: {name: value for name, value in before.items() if _SWITCHES[name][0]() != value}
    try:
        yield
        for name, value in changed().items():
            raise TraceError(
                f"the function leaves torch.{name} changed, which was {value}. It runs once, while it is traced, and "
                "later calls would not change it: put it back at the end (by a `with` block where torch has one), or "
                "change it outside of the function."
            )
    finally:
        for name, value in changed().items():
            _SWITCHES[name][1](value)


def asked_by_function(fun: object) -> frozenset[str]:
    """The name of the switch that a function of torch's tells, for one that the user's code holds itself."""
    name = getattr(fun, "__name__", "")
    if name not in FLAGS or getattr(_FUNCTIONS.get(name), name, None) is not fun:
        return frozenset()
    if name in _SET_ASIDE and FLAGS[name]():
        raise TraceError(
            f"the function holds torch.{name} itself, which says no while the function is traced. Call it by its name "
            f"there: torch.{name}()."
        )
    return frozenset({name})


@contextlib.contextmanager
def answering(flags: dict[str, Any]) -> Iterator[None]:
    """While the user's code is recorded in this thread: what it asks has the answers that the caller would get."""
    asked = {name: value for name, value in flags.items() if name in _FUNCTIONS}
    enabled = [value for name, value in flags.get("enabled", ()) if name == "enabled"]
    owner = threading.get_ident()

    def made(original: Callable[[], object], value: Any) -> Callable[[], object]:
        def answer() -> object:  # torch asks too, and is to see what the recording has set
            is_users = threading.get_ident() == owner and reader(sys._getframe(1).f_code.co_filename) != "apart"
            if is_users and original is _is_inference:
                return ti.asks_inference(value)
            return value if is_users else original()

        return answer

    with contextlib.ExitStack() as scope:  # recordings take turns
        for name, value in asked.items():
            module, original = _FUNCTIONS[name], getattr(_FUNCTIONS[name], name)
            scope.callback(setattr, module, name, original)
            setattr(module, name, made(original, value))
        if enabled and hasattr(_MKLDNN, "getter"):
            scope.callback(setattr, _MKLDNN, "getter", _MKLDNN.getter)
            _MKLDNN.getter = _of_property(_MKLDNN.getter, enabled[0], owner)
        yield


def _of_property(getter: Callable[[], object], value: object, owner: int) -> Callable[[], object]:
    def answer() -> object:  # asked by torch's property, which the user's code asks
        frame = sys._getframe(1).f_back
        is_users = frame is not None and threading.get_ident() == owner and reader(frame.f_code.co_filename) != "apart"
        return value if is_users else getter()

    return answer
