"""What a function asks of torch's switches and of autograd has the answer that it would have in eager torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers import marked
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from microtome import torch_api as mt
from microtome.bridge import as_jax, as_torch
from microtome.bridge.watch import flags

Fun = Callable[..., Any]


@contextlib.contextmanager
def _called(setter: Fun, value: Any, back: Any) -> Iterator[None]:
    setter(value)
    try:
        yield
    finally:
        setter(back)


@contextlib.contextmanager
def _set(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    # torch's own test helpers, where they have been imported, freeze the flags of backends.
    with _BACKENDS.__allow_nonbracketed_mutation():
        setattr(owner, name, value)
    try:
        yield
    finally:
        with _BACKENDS.__allow_nonbracketed_mutation():
            setattr(owner, name, before)


_BACKENDS: Any = torch.backends
_SDP: Any = torch.backends.cuda
_AUTOGRAD: Any = torch.autograd
_FLAGS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "grad": (torch.is_grad_enabled, torch.no_grad),
    "inference": (lambda: torch.is_inference_mode_enabled(), torch.inference_mode),
    "anomaly": (lambda: torch.is_anomaly_enabled(), lambda: _AUTOGRAD.set_detect_anomaly(True, check_nan=True)),
    "anomaly in NaN": (
        lambda: torch.is_anomaly_check_nan_enabled(),
        lambda: _AUTOGRAD.set_detect_anomaly(True, check_nan=False),
    ),
    "mkldnn": (lambda: _BACKENDS.mkldnn.enabled, lambda: _set(_BACKENDS.mkldnn, "enabled", False)),
    "mkldnn.deterministic": (
        lambda: _BACKENDS.mkldnn.deterministic,
        lambda: _set(_BACKENDS.mkldnn, "deterministic", True),
    ),
    "reduced precision": (
        lambda: _SDP.matmul.allow_fp16_reduced_precision_reduction,
        lambda: _set(_SDP.matmul, "allow_fp16_reduced_precision_reduction", False),
    ),
    "cudnn": (lambda: _BACKENDS.cudnn.enabled, lambda: _set(_BACKENDS.cudnn, "enabled", False)),
    "cudnn.benchmark": (lambda: _BACKENDS.cudnn.benchmark, lambda: _set(_BACKENDS.cudnn, "benchmark", True)),
    "cudnn.deterministic": (
        lambda: _BACKENDS.cudnn.deterministic,
        lambda: _set(_BACKENDS.cudnn, "deterministic", True),
    ),
    "opt_einsum": (lambda: _BACKENDS.opt_einsum.enabled, lambda: _set(_BACKENDS.opt_einsum, "enabled", False)),
    "flash": (lambda: _SDP.flash_sdp_enabled(), lambda: _called(_SDP.enable_flash_sdp, False, True)),
    "math": (lambda: _SDP.math_sdp_enabled(), lambda: _called(_SDP.enable_math_sdp, False, True)),
    "efficient": (
        lambda: _SDP.mem_efficient_sdp_enabled(),
        lambda: _called(_SDP.enable_mem_efficient_sdp, False, True),
    ),
    "fast path": (
        lambda: _BACKENDS.mha.get_fastpath_enabled(),
        lambda: _called(_BACKENDS.mha.set_fastpath_enabled, False, True),
    ),
    "autocast": (lambda: torch.is_autocast_enabled("cpu"), lambda: torch.autocast("cpu")),
    "autocast dtype": (
        lambda: torch.get_autocast_dtype("cpu") == torch.float16,
        lambda: _called(lambda dtype: torch.set_autocast_dtype("cpu", dtype), torch.float16, torch.bfloat16),
    ),
    "autocast cache": (lambda: torch.is_autocast_cache_enabled(), lambda: torch.autocast("cpu", cache_enabled=False)),
    "default dtype": (
        lambda: torch.get_default_dtype() == torch.float64,
        lambda: _called(torch.set_default_dtype, torch.float64, torch.float32),
    ),
    "threads": (lambda: torch.get_num_threads(), lambda: _called(torch.set_num_threads, 3, torch.get_num_threads())),
    "deterministic": (
        lambda: torch.are_deterministic_algorithms_enabled(),
        lambda: _called(torch.use_deterministic_algorithms, True, False),
    ),
    "debug mode": (
        lambda: torch.get_deterministic_debug_mode(),
        lambda: _called(torch.set_deterministic_debug_mode, 1, 0),
    ),
    "fill": (
        lambda: torch.utils.deterministic.fill_uninitialized_memory,
        lambda: _set(torch.utils.deterministic, "fill_uninitialized_memory", False),
    ),
    "precision": (
        lambda: torch.get_float32_matmul_precision() == "high",
        lambda: _called(torch.set_float32_matmul_precision, "high", "highest"),
    ),
    "warnings": (lambda: torch.is_warn_always_enabled(), lambda: _called(torch.set_warn_always, True, False)),
}


def test_a_function_that_asks_for_a_switch_of_torchs_is_told_what_its_caller_has() -> None:
    asks = [ask for ask, _ in _FLAGS.values()]

    def fun(x: torch.Tensor) -> torch.Tensor:
        return x * torch.tensor([float(ask()) for ask in asks], dtype=torch.float64)

    made, x = as_torch(as_jax(fun)), torch.ones(len(asks), dtype=torch.float64)
    assert torch.equal(made(x), fun(x))
    for name, (_, context) in _FLAGS.items():
        with context():
            expected = fun(x)
            assert torch.equal(made(x), expected), name
        assert not torch.equal(expected, fun(x)), name
    assert torch.equal(made(x), fun(x))
    with torch.inference_mode():  # made anew under each
        assert torch.equal(as_torch(as_jax(fun))(x), fun(x))


def test_a_function_of_torchs_that_is_held_under_another_name_is_never_stale() -> None:
    threads, mha, inference = torch.get_num_threads, _BACKENDS.mha.get_fastpath_enabled, torch.is_inference_mode_enabled
    made = as_torch(as_jax(lambda x: x * threads()))
    for number in (3, 4):
        with _called(torch.set_num_threads, number, torch.get_num_threads()):
            assert made(torch.ones(())) == number
    held = as_torch(as_jax(lambda x: x * (2.0 if inference() else 3.0) + 0 * (mha is None)))
    assert held(torch.ones(())) == 3
    with torch.inference_mode(), pytest.raises(TypeError, match=r"holds torch.is_inference_mode_enabled itself"):
        held(torch.ones(()))


def _by_grad_mode(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x) * (2.0 if torch.is_grad_enabled() else 3.0)


def _stepped(scan: Fun) -> Fun:
    return lambda x: scan(lambda c, row: (c + _by_grad_mode(row), _by_grad_mode(row)), torch.zeros(2), x)[1]


_IN_SLICES: dict[str, Fun] = {
    "microbatch": mt.microbatch(_by_grad_mode, 0, 2, mt.AccumulationType.CONCAT),
    "micro_vmap": mt.micro_vmap(_by_grad_mode, microbatch_size=2),
    "chunked_vmap": mt.chunked_vmap(_by_grad_mode, chunk_size=2),
    "sliced_scan": _stepped(mt.sliced_scan),
    "checkpoint_chunked_scan": _stepped(mt.checkpoint_chunked_scan),
}


@pytest.mark.parametrize("name", marked(_IN_SLICES, quick=("micro_vmap", "chunked_vmap")))
def test_the_grad_mode_in_slices_is_that_of_the_caller(name: str) -> None:
    call, x = _IN_SLICES[name], torch.linspace(-1, 1, 8).view(4, 2)
    leaf = x.clone().requires_grad_()
    for context in (torch.enable_grad, torch.no_grad, torch.inference_mode, torch.enable_grad):
        with context():
            for tensor in (x, leaf):
                torch.testing.assert_close(call(tensor).detach(), _by_grad_mode(tensor).detach())
    call(leaf).sum().backward()
    torch.testing.assert_close(leaf.grad, 2 * (1 - torch.tanh(x) ** 2))


def test_a_derivative_is_taken_whatever_the_grad_mode_around_it() -> None:
    x = torch.tensor([0.5, -1.0])
    inner = mt.microbatch(lambda row: _by_grad_mode(row).sum(), 0, 1)
    expected = torch.func.grad(lambda x: _by_grad_mode(x).sum())(x)
    for context in (torch.no_grad, torch.enable_grad):
        with context():
            torch.testing.assert_close(torch.func.grad(inner)(x), expected)
            torch.testing.assert_close(mt.jacobian(inner, x)[0], expected)
            rows = mt.micro_grad(lambda w, row: (_by_grad_mode(row) * w).sum(), microbatch_size=1)
            torch.testing.assert_close(rows(torch.ones(()), x)[0], 2 * torch.tanh(x).sum())


def test_the_switches_are_as_they_were_after_a_trace() -> None:
    def fun(x: torch.Tensor) -> torch.Tensor:
        return x * float(torch.is_inference_mode_enabled()) + float(torch.backends.mkldnn.enabled)

    asked = torch.is_inference_mode_enabled
    with torch.inference_mode():
        as_torch(as_jax(fun))(torch.ones(1))
    assert torch.is_inference_mode_enabled is asked
    assert not torch.is_inference_mode_enabled()
    assert torch.backends.mkldnn.enabled == torch._C._get_mkldnn_enabled()


def _asks_argument(x: torch.Tensor) -> torch.Tensor:
    return x * (1 + 2 * x.requires_grad + 4 * x.is_leaf + 8 * (x.grad_fn is None) + 16 * (x * 1).requires_grad)


@pytest.mark.parametrize("is_captured", [False, True])
def test_whether_a_tensor_requires_grad_is_answered_as_in_eager_torch(is_captured: bool) -> None:
    leaf = torch.ones(2, requires_grad=True)
    tensors = [torch.ones(2), leaf, leaf * 1, leaf.detach(), (leaf * 1).requires_grad_()]
    held: list[torch.Tensor] = []

    def fun(x: torch.Tensor) -> torch.Tensor:
        return _asks_argument(held[0]) if is_captured else _asks_argument(x)

    made = as_torch(as_jax(fun))
    for context in (torch.enable_grad, torch.no_grad, torch.enable_grad):
        for tensor in tensors:
            held[:] = [tensor]
            with context():
                actual, expected = made(tensor), fun(tensor)
            assert torch.equal(actual, expected)
            assert actual.requires_grad == expected.requires_grad


def test_the_grad_of_an_argument_is_none_or_refused_by_name() -> None:
    x = torch.ones(2, requires_grad=True)
    made = as_torch(as_jax(lambda x: x * 2 if x.grad is None else x * x.grad))
    for tensor in (x, torch.ones(2), x * 1):
        assert torch.equal(made(tensor), tensor * 2)
    made(x).sum().backward()
    with pytest.raises(TypeError, match=r"test_flags.py:\d+: the function reads .grad of an argument"):
        made(x)
    x.grad = None
    assert torch.equal(made(x), x * 2)


def _left(layer: nn.Linear, kept: dict[str, torch.Tensor]) -> Fun:
    def fun(x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            kept["y"] = layer(x).tanh()
        return kept["y"].detach()

    return fun


def _returned(layer: nn.Linear, kept: dict[str, torch.Tensor]) -> Fun:
    def fun(x: torch.Tensor) -> Any:
        before = layer(x)
        with torch.enable_grad():
            y = layer(x * before).tanh()
            with torch.no_grad():
                z = torch.sin(y)
            return y, z, z * x, y + 1

    return fun


def _decorated(layer: nn.Linear, kept: dict[str, torch.Tensor]) -> Fun:
    @torch.enable_grad()
    def fun(x: torch.Tensor) -> torch.Tensor:
        return layer(x).tanh()

    return fun


def _gradient(layer: nn.Linear, kept: dict[str, torch.Tensor]) -> Fun:
    def fun(x: torch.Tensor) -> Any:
        with torch.set_grad_enabled(True):
            energy = layer(x).tanh().sum()
            (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return force, energy * 2, force.detach()

    return fun


def _own_leaf(layer: nn.Linear, kept: dict[str, torch.Tensor]) -> Fun:
    def fun(x: torch.Tensor) -> Any:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(layer(x).tanh().sum(), x)[0]

    return fun


@pytest.mark.parametrize(
    "make", marked([_left, _returned, _decorated, _gradient, _own_leaf], slow=(_returned, _gradient))
)
def test_what_is_computed_where_a_function_switches_autograd_on_has_its_history(make: Fun) -> None:
    def run(transform: Fun) -> Any:
        torch.manual_seed(0)
        layer, kept = nn.Linear(2, 2), dict[str, torch.Tensor]()
        fun = transform(make(layer, kept))
        x = torch.tensor([[0.5, -1.0]], requires_grad=True)
        with torch.no_grad():
            fun(x)
            outs = fun(x)
        outs = [*(outs if isinstance(outs, tuple) else (outs,)), *kept.values()]
        flags, inputs = [o.requires_grad for o in outs], (x, *layer.parameters())
        total = sum((o * o).sum() for o in outs if o.requires_grad)
        found = torch.autograd.grad(total, inputs, allow_unused=True) if any(flags) else ()
        assert not torch.is_grad_enabled() or fun(x) is not None
        return flags, [o.detach() for o in outs], found

    torch.testing.assert_close(run(lambda f: as_torch(as_jax(f))), run(lambda f: f))


class _Doubles(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.sin else result


class _DoublesBelow(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.ops.aten.sin.default else result


@pytest.mark.parametrize("mode", [_Doubles, _DoublesBelow])
def test_a_mode_counts_inside_of_the_function_and_is_refused_around_the_call(mode: Any) -> None:
    def inside(x: torch.Tensor) -> torch.Tensor:
        with mode():
            return torch.sin(x)

    x = torch.ones(2)
    torch.testing.assert_close(as_torch(as_jax(inside))(x), torch.sin(x) * 2)
    call = mt.microbatch(torch.sin, 0, 1, mt.AccumulationType.CONCAT)
    torch.testing.assert_close(call(x), torch.sin(x))
    with pytest.raises(TypeError, match=rf"test_flags\.py:\d+: {mode.__name__} is open around .* inside"), mode():
        call(x)
    with torch.device("cpu"):
        torch.testing.assert_close(call(x), torch.sin(x))


_LEFT: dict[str, Callable[[], object]] = {
    "is_grad_enabled": lambda: torch.set_grad_enabled(False),
    "get_default_dtype": lambda: torch.set_default_dtype(torch.float64),
    "get_float32_matmul_precision": lambda: torch.set_float32_matmul_precision("high"),
    "get_num_threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "are_deterministic_algorithms_enabled": lambda: torch.use_deterministic_algorithms(True),
    "is_autocast_enabled": lambda: torch.set_autocast_enabled("cpu", True),
}


@pytest.mark.parametrize("name", _LEFT)
@pytest.mark.parametrize("once", [True, False])
def test_a_function_that_leaves_a_switch_of_torchs_changed_is_refused(name: str, once: bool) -> None:
    """Its later calls would not change it. What it puts back itself counts while it runs."""

    def fun(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        _LEFT[name]()
        return y

    call = as_torch(as_jax(fun)) if once else mt.chunked_vmap(fun, 2)
    before = [ask() for ask, _ in flags._SWITCHES.values()]
    with pytest.raises(TypeError, match=rf"the function leaves torch\.{name}\(.*\) changed"):
        call(torch.ones(4))
    assert [ask() for ask, _ in flags._SWITCHES.values()] == before


@pytest.mark.parametrize("entry", ["as_torch", "microbatch", "clipped_grad"])
def test_the_dtype_that_autocast_takes_by_default_is_never_stale(entry: str) -> None:
    """torch reads it where the function opens autocast without one."""
    w, x = torch.tensor([[1.0009765625]]), torch.ones(1, 1)  # 1 + 2**-10, which bfloat16 does not hold

    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu"):
            return (x @ w).float().sum()

    call = {
        "as_torch": as_torch(as_jax(loss)),
        "microbatch": mt.microbatch(loss, 1, 1),
        "clipped_grad": lambda w, x: mt.clipped_grad(loss, l2_clip_norm=1e6, return_values=True)(w, x)[1].values[0],
    }[entry]
    for dtype in (torch.bfloat16, torch.float16, torch.bfloat16):
        with _called(lambda d: torch.set_autocast_dtype("cpu", d), dtype, torch.bfloat16):
            assert call(w, x) == loss(w, x)
