"""A recorded tensor has no memory: nothing is computed on its values, and what asks for them is refused by name.

Each case is right, as eager torch is, or raises a TraceError that names the line of the user's.
"""

from __future__ import annotations

import copy
import ctypes
import io
import pickle
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
import torch
from helpers import marked, through
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch_cases import assert_same

from microtome.bridge import as_jax, as_torch
from microtome.bridge.base.errors import TraceError
from microtome.bridge.base.torch_internals import FakeTensor
from microtome.bridge.record.nodes import Meta
from microtome.bridge.record.recorder import Recorder

X, Y = torch.tensor([0.5, 1.0]), torch.tensor([2.0, -1.5])
WHOLE, OTHER = torch.tensor([7, -5]), torch.tensor([2, 3])


def test_inputs_of_a_recording_have_no_memory() -> None:
    tensor = Recorder().input(Meta(torch.float32, (1 << 20, 1 << 20)))  # 4 TiB
    assert isinstance(tensor, FakeTensor)


INTEGERS: dict[str, Callable[[Any, Any], Any]] = {
    "//": lambda a, b: a // b,
    "%": lambda a, b: a % b,
    "floor_divide": torch.floor_divide,
    "remainder": torch.remainder,
    "fmod": torch.fmod,
    "in place": lambda a, b: a.clone().floor_divide_(b),
    "7 //": lambda a, b: 7 // b,
    "7 %": lambda a, b: 7 % b,
    "**": lambda a, b: a**b,
    "gcd": torch.gcd,
    "trunc": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "<<": lambda a, b: a << b,
}


@pytest.mark.parametrize("seed", marked(range(3), quick=(2,)))
def test_integers_are_divided_in_every_trace(seed: int) -> None:
    # Memory that nobody wrote is often zero: a trace that divides by it raises now and then.
    call = through(lambda a, b: {k: f(a, b) for k, f in INTEGERS.items()})
    size = 3 + seed
    a, b = torch.arange(-2, size - 2), torch.arange(1, size + 1)
    assert_same(call(a, b), {k: f(a, b) for k, f in INTEGERS.items()})


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning")  # torch's, of itself
def test_linearize_inside() -> None:
    linearize = torch.func.linearize

    def fun(x: Any, y: Any) -> Any:
        out, push = linearize(lambda a, b: {"product": a * b, "sine": (a.sin(), b)}, x, y)
        return out, push(y, x), push(x, x), linearize(torch.sin, Y)[1](x)

    assert_same(through(fun)(X, Y), fun(X, Y))
    rows = torch.stack([X, Y])
    mapped = jax.vmap(as_jax(lambda x: linearize(torch.sin, x)[1](x)))
    assert_same(as_torch(mapped)(rows), rows.cos() * rows)
    loss = lambda x: (linearize(torch.sin, x)[1](x) ** 2).sum()
    assert_same(as_torch(jax.grad(as_jax(loss)))(X), torch.func.grad(lambda x: ((x.cos() * x) ** 2).sum())(X))


_LINEAR = nn.Linear(2, 2)


def test_compiled_functions_run_as_they_were_written() -> None:
    compiled = torch.compile(lambda t: t.sin() * 2, backend="aot_eager")
    module = torch.compile(_LINEAR, backend="aot_eager")
    fun = lambda x: compiled(x) + module(x)
    call = through(fun)
    assert_same(call(X), X.sin() * 2 + _LINEAR(X))
    with torch.no_grad():
        _LINEAR.weight.mul_(2)
    assert_same(call(X), X.sin() * 2 + _LINEAR(X))
    call(X).sum().backward()
    assert_same(_LINEAR.weight.grad, X.expand(2, 2))
    assert torch.compiler.is_compiling() is False


def test_copies_and_constants() -> None:
    gru = nn.GRU(2, 2)

    def fun(x: Any) -> Any:
        gru.flatten_parameters()
        table = torch.arange(4.0)
        constants = float(table.numpy()[1]) + table.tolist()[2] + table.untyped_storage().nbytes()
        again = copy.deepcopy(_LINEAR)(x), copy.deepcopy(x) * 2, copy.copy(x) + 1, gru(x[None])[0]
        return again, x * constants, torch.equal(table, table), hash(x) == hash(x), len([x, x]), torch.tensor(x)

    with pytest.warns(UserWarning, match="To copy construct"):
        assert_same(through(fun)(X), fun(X))


@torch.library.custom_op("microtome_tests::sine", mutates_args=())
def _sine(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.sin(x.numpy()))


@torch.library.custom_op("microtome_tests::fill", mutates_args=("x",))
def _fill(x: torch.Tensor) -> None:
    x.fill_(7)


def _saved(x: Any) -> Any:
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file)


def _filled(x: Any) -> Any:
    y = x.clone()
    _fill(y)
    return y


def _caught(x: Any) -> Any:
    try:
        return x * x.data_ptr()
    except TypeError:
        return x


REFUSED: dict[str, Callable[[Any], Any]] = {
    "make_fx": lambda x: make_fx(torch.sin)(x)(x),
    "make_fx of a constant": lambda x: x + make_fx(torch.sin)(torch.ones(2))(x),
    "export": lambda x: torch.export.export(nn.Linear(2, 2), (x,)).module()(x),
    "data_ptr": lambda x: x * x.data_ptr(),
    "data_ptr, caught": _caught,
    "ctypes": lambda x: x * ctypes.cast(x.data_ptr(), ctypes.POINTER(ctypes.c_float))[0],
    "storage": lambda x: x * x.untyped_storage()[0],
    "storage's size": lambda x: x * x.untyped_storage().nbytes(),
    "numpy": lambda x: x * float(x.detach().cpu().numpy()[0]),
    "asarray": lambda x: x * float(np.asarray(x)[0]),
    "tolist": lambda x: x * x.tolist()[0],
    "item": lambda x: x * x[0].item(),
    "torch.from_dlpack": lambda x: x * torch.from_dlpack(x),
    "np.from_dlpack": lambda x: x * float(np.from_dlpack(x)[0]),
    "jax.dlpack": lambda x: x * float(jax.dlpack.from_dlpack(x)[0]),
    "to_dlpack": lambda x: torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(x)),
    "equal": lambda x: x * torch.equal(x, x),
    "allclose": lambda x: x * torch.allclose(x, x),
    "in": lambda x: x * (1.0 in x),
    "formatted": lambda x: x * float(f"{x.sum():.1f}"),
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "save": _saved,
    "_assert": lambda x: torch._assert((x > 0).all(), "negative") or x,
    "sorted": lambda x: torch.stack(sorted(x)),
    "tensor of tensors": lambda x: torch.tensor([x[0], x[1]]),
    "new_tensor": lambda x: x.new_tensor([x[0], 1]),
    "share_memory_": lambda x: x.share_memory_(),
    "apply_": lambda x: x.clone().apply_(lambda v: v + 1),
    "set_": lambda x: torch.empty(0).set_(x.clone().untyped_storage(), 0, (2,)),
    "custom op without a lowering": _sine,
    "custom op that writes": _filled,
}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("kind", REFUSED)
def test_what_asks_for_memory_is_refused_by_name(kind: str) -> None:
    with pytest.raises(TraceError, match=rf"{__name__.split('.')[-1]}.py:\d+: "):
        through(REFUSED[kind])(X)


def test_a_refusal_comes_through_torchscript() -> None:
    @torch.jit.script
    def scripted(x):  # type: ignore[no-untyped-def]
        if bool((x > 0).all()):
            return x.sin()
        return x

    with pytest.raises(TraceError, match=r"a Python number or bool was asked"):
        through(scripted_call := lambda x: scripted(x))(X)
    assert scripted_call(X) is not None
