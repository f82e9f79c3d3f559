"""Every transform has every property that a user of torch relies on: one matrix, so that a new one gets all in a line.

A function of rows ``[..., 3] -> [..., 3]`` goes through the transform, and its result is held against eager torch's.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import pytest
import torch
import torch.nn.functional as F
from helpers import crossed, through
from torch_cases import assert_same, data

from microtome import torch_api as mt
from microtome.bridge import lift

Tensor = torch.Tensor
Fun = Callable[[Tensor], Tensor]
CONCAT = mt.AccumulationType.CONCAT
pytestmark = pytest.mark.filterwarnings("ignore:.*has been compiled 32 times:UserWarning")  # one code for all of them


class Transform(NamedTuple):
    """A transform, and what eager torch computes in its place; both take a function of rows to one of ``x [5, 3]``."""

    of: Callable[[Fun], Fun]
    plain: Callable[[Fun], Fun] = lambda fun: fun
    once: bool = False  # whether the function runs once for the whole call, where state has a meaning
    rows: bool = True  # whether the result has a row for each row of x
    draws: bool = True  # whether the function may draw random numbers, which needs to know of rows


def _loss(fun: Fun) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda w, x: fun(x * w).sum()


def _ones(x: Tensor) -> Tensor:
    return torch.ones(3, dtype=x.dtype)


def _gradient(fun: Fun) -> Fun:
    def gradient(x: Tensor) -> Tensor:
        w = _ones(x).requires_grad_()
        with torch.enable_grad():
            found = torch.autograd.grad(_loss(fun)(w, x), w, create_graph=True)[0]
        return found if torch.is_grad_enabled() else found.detach()

    return gradient


def _matrix(f: Callable[..., Tensor]) -> Callable[[Fun], Fun]:
    return lambda fun: lambda x: f(fun)(x).reshape(-1, x.numel())


def _scanned(scan: Callable[..., Any]) -> Callable[[Fun], Fun]:
    return lambda fun: lambda x: scan(lambda count, row: (count + 1, fun(row)), torch.tensor(0), x)[1]


TRANSFORMS = {
    "as_torch": Transform(through, once=True),
    "microbatch": Transform(lambda fun: mt.microbatch(fun, 0, 2, CONCAT)),
    "micro_vmap": Transform(lambda fun: mt.micro_vmap(fun, microbatch_size=2)),
    "chunked_vmap": Transform(lambda fun: mt.chunked_vmap(fun, 2)),
    "sliced_scan": Transform(_scanned(mt.sliced_scan)),
    "checkpoint_chunked_scan": Transform(_scanned(mt.checkpoint_chunked_scan)),
    "lift(jax.vmap)": Transform(lambda fun: lift(jax.vmap)(fun), draws=False),
    "lift(jax.jit)": Transform(lambda fun: lift(jax.jit)(fun), draws=False),
    "micro_grad": Transform(
        lambda fun: lambda x: mt.micro_grad(_loss(fun), microbatch_size=2)(_ones(x), x)[0], _gradient, rows=False
    ),
    "clipped_grad": Transform(
        lambda fun: lambda x: mt.clipped_grad(_loss(fun), l2_clip_norm=1e6, microbatch_size=2)(_ones(x), x),
        _gradient,
        rows=False,
    ),
    "jacobian": Transform(
        lambda fun: lambda x: mt.jacobian(fun, x)[0].reshape(-1, x.numel()), _matrix(torch.func.jacrev), rows=False
    ),
    "hessian": Transform(
        lambda fun: lambda x: mt.hessian(lambda x: fun(x).sum(), x)[0],
        _matrix(lambda fun: torch.func.hessian(lambda x: fun(x).sum())),
        rows=False,
    ),
}


def _smooth(scale: Tensor) -> Fun:
    return lambda row: torch.tanh(row * scale) * row.exp() + scale


def check_values(t: Transform) -> None:
    """Of each dtype, also by one function that captures nothing."""
    same = lambda row: torch.tanh(row) * row.exp()
    call, plain = t.of(same), t.plain(same)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        fun, x = _smooth(data(3, seed=1, dtype=dtype)), data(5, 3, dtype=dtype)
        assert_same(t.of(fun)(x), t.plain(fun)(x))
        assert_same(call(x), plain(x))


def check_autograd(t: Transform) -> None:
    """Gradients by the batch and by what the function captures, and gradients of these."""
    found = []
    for transform in (t.of, t.plain):
        x, scale = (v.requires_grad_() for v in (data(5, 3, dtype=torch.float64), data(3, seed=1, dtype=torch.float64)))
        out = transform(_smooth(scale))(x)
        once = torch.autograd.grad(out.sin().sum(), (x, scale), create_graph=True)
        found.append([out, once, torch.autograd.grad(sum(g.pow(2).sum() for g in once), (x, scale))])
    assert_same(found[0], found[1])


def check_no_grad(t: Transform) -> None:
    x, scale = data(5, 3), data(3, seed=1).requires_grad_()
    call = t.of(_smooth(scale))
    assert call(x).requires_grad
    for off in (torch.no_grad, torch.inference_mode):
        with off():
            got = call(x)
        assert not got.requires_grad
    assert not t.of(_smooth(scale.detach()))(x).requires_grad


def check_freshness(t: Transform) -> None:
    """What is captured is read at each call: tensors, numbers, functions, entries."""
    scale, other = data(3, seed=1), {"number": 2.0, "function": torch.sin}
    fun = lambda row: other["function"](row * scale).pow(2) * other["number"]
    call, plain, x = t.of(fun), t.plain(fun), data(5, 3)
    for change in (
        lambda: None,
        lambda: scale.mul_(2),
        lambda: other.update(number=3.0),
        lambda: other.update(function=torch.cos),
        lambda: scale.data.copy_(data(3, seed=2)),
    ):
        change()
        assert_same(call(x), plain(x))


def check_compilation(t: Transform) -> None:
    """A second call does not trace, nor the transform applied anew to a function of the same code and captures."""
    ran, scale = [], data(3, seed=1)
    make = lambda: t.of(lambda row: (ran.append(1), torch.tanh(row * scale))[1])
    call = make()
    call(data(5, 3))
    first = len(ran)
    assert first > 0
    call(data(5, 3, seed=2))
    make()(data(5, 3, seed=3))
    assert len(ran) == first
    call(data(4, 3))
    call(data(5, 3).double())
    assert len(ran) > first  # other forms do: the count can rise


def check_randomness(t: Transform) -> None:
    """Seeds repeat a call, calls differ, rows differ, and the generator stays where nothing is drawn."""
    x = torch.ones(5, 3, dtype=torch.float64)
    call = t.of(lambda row: F.dropout(row, 0.5) * row.pow(2) * torch.rand_like(row))
    if not t.draws:
        with pytest.raises(TypeError, match=r"test_properties\.py:\d+: .*every row would draw the same"):
            call(x)
        return
    torch.manual_seed(1)
    first, second = call(x), call(x)
    torch.manual_seed(1)
    assert torch.equal(call(x), first)
    assert not torch.equal(first, second)
    if t.rows:
        assert len({tuple(row) for row in first.tolist()}) == 5
    state = torch.get_rng_state()
    t.of(torch.sin)(x)
    assert torch.equal(torch.get_rng_state(), state)


LAYOUTS: dict[str, Fun] = {
    "transposed": lambda x: x.T.contiguous().T,
    "sliced": lambda x: torch.cat([x, x], 1)[:, 3:],
    "strided": lambda x: x.repeat_interleave(2, 0)[::2],
    "expanded": lambda x: x[:1].expand(5, 3),
    "negated": lambda x: torch.complex(x, -x).conj().imag,
    "scalar behind": lambda x: x[:, :1].expand(5, 3),
}


def check_layouts(t: Transform) -> None:
    fun = _smooth(data(6, seed=1)[::2])
    for layout in LAYOUTS.values():
        x = layout(data(5, 3))
        assert_same(t.of(fun)(x), t.plain(fun)(x.clone(memory_format=torch.contiguous_format)))


def check_memory(t: Transform) -> None:
    """Inputs are never written; a result may be, without a trace in them or in the next one; nothing stays alive."""

    def scope() -> list[weakref.ref[Tensor]]:
        x, scale = data(5, 3), data(3, seed=1)
        before = [(v.data_ptr(), v._version, v.clone()) for v in (x, scale)]
        call = t.of((lambda row: row * scale) if t.rows else _smooth(scale))
        first, second = call(x), call(x)
        expected = second.clone()
        first.add_(7)
        assert_same(second, expected, exact=True)
        assert_same(call(x), expected, exact=True)
        for v, (pointer, version, value) in zip((x, scale), before, strict=True):
            assert (v.data_ptr(), v._version) == (pointer, version)
            assert torch.equal(v, value)
        return [weakref.ref(v) for v in (x, scale, first, second)]

    held = scope()
    gc.collect()
    assert [ref() for ref in held] == [None] * 4


def check_errors(t: Transform) -> None:
    """Python code that depends on values is refused with the user's line."""

    def branches(row: Tensor) -> Tensor:
        return row if row.sum() > 0 else -row

    line = branches.__code__.co_firstlineno + 1
    with pytest.raises(TypeError, match=rf"test_properties\.py:{line}: .*torch\.where"):
        t.of(branches)(data(5, 3))


def check_state(t: Transform) -> None:
    """State that is written in place is kept where the function runs once, and refused by name elsewhere."""
    count = torch.zeros(3)

    def counts(row: Tensor) -> Tensor:
        count.add_(1)
        return row * count

    x = data(5, 3)
    if t.once:
        assert_same([t.of(counts)(x) for _ in range(2)], [x, x * 2])
        assert count.tolist() == [2, 2, 2]
    else:
        with pytest.raises(TypeError, match=r"test_properties\.py:\d+: .*count"):
            t.of(counts)(x)
        assert count.tolist() == [0, 0, 0]


PROPERTIES = {
    name.removeprefix("check_"): check for name, check in list(globals().items()) if name.startswith("check_")
}


@pytest.mark.parametrize(("transform", "of"), crossed(TRANSFORMS, PROPERTIES))
def test_property(transform: str, of: str) -> None:
    PROPERTIES[of](TRANSFORMS[transform])
