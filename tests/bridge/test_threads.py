"""Several threads at once: traces do not meet, and what other threads do in torch goes on as if nothing was traced."""

from __future__ import annotations

import contextlib
import queue
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from helpers import marked, through
from torch import nn

from microtome import torch_api as mt
from microtome.bridge import lift

pytestmark = pytest.mark.usefixtures("seeded")


def _together(jobs: list[Callable[[], Any]]) -> list[Any]:
    """Run the jobs in threads that start at the same moment; their results, or the first error."""
    barrier, results = threading.Barrier(len(jobs)), [None] * len(jobs)

    def run(i: int) -> None:
        barrier.wait()
        try:
            results[i] = jobs[i]()
        except BaseException as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a thread hangs"
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


@pytest.mark.slow
def test_eight_threads_trace_different_functions() -> None:
    x = torch.linspace(-1, 1, 5)
    nets = [nn.Sequential(nn.Linear(5, 4), nn.Tanh()) for _ in range(2)]
    functions: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda x: x.sin(),
        lambda x: x * 2,
        nets[0],
        nets[1],
        lambda x: torch.func.grad(lambda v: (v**3).sum())(x),
        lambda x: torch.utils.checkpoint.checkpoint(torch.cos, x, use_reentrant=False),
        lambda x: x.softmax(0),
        lambda x: torch.outer(x, x),
    ]

    def job(f: Any) -> Any:
        leaf = x.clone().requires_grad_()
        out = through(f)(leaf)
        return out.detach(), torch.autograd.grad(out.sum(), leaf)[0]

    results = _together([lambda f=f: job(f) for f in functions])
    for f, (value, grad) in zip(functions, results, strict=True):
        leaf = x.clone().requires_grad_()
        out = f(leaf)
        torch.testing.assert_close(value, out.detach())
        torch.testing.assert_close(grad, torch.autograd.grad(out.sum(), leaf)[0])


def test_eight_threads_call_one_function_for_the_first_time() -> None:
    bodies, x = [], torch.linspace(-1, 1, 5)

    def fun(x: torch.Tensor) -> torch.Tensor:
        bodies.append(1)
        return x.sin() * 3

    for got in _together([lambda i=i: through(fun)(x * i) for i in range(8)]):
        assert got.shape == (5,)
    first = len(bodies)
    for i, got in enumerate(_together([lambda i=i: through(fun)(x * i) for i in range(8)])):
        torch.testing.assert_close(got, (x * i).sin() * 3)
    assert len(bodies) == first


def test_threads_with_transforms_and_lifted_functions() -> None:
    x, w = torch.linspace(-1, 1, 12).reshape(4, 3), torch.ones(3)

    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return ((w * x).sum() - 1) ** 2

    jobs = [
        lambda: mt.micro_grad(loss, microbatch_size=2)(w, x)[0],
        lambda: mt.micro_vmap(loss, (None, 0), microbatch_size=2)(w, x),
        lambda: mt.microbatch(torch.sum, 0, 2)(x),
        lambda: lift(jax.hessian)(loss)(w, x[0]),
    ]
    alone = [job() for job in jobs]
    for got, expected in zip(_together(jobs * 2), alone * 2, strict=True):
        torch.testing.assert_close(got, expected)


def test_random_draws_in_threads_are_all_different() -> None:
    call = through(lambda x: torch.rand_like(x))
    call(torch.ones(64))
    results = _together([lambda: call(torch.ones(64)) for _ in range(8)])
    assert len({tuple(r.tolist()) for r in results}) == 8


def test_a_failure_in_one_thread_is_not_one_in_another() -> None:
    def bad(x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x

    def fails() -> str:
        with pytest.raises(TypeError, match=r"torch\.where"):
            through(bad)(torch.ones(3))
        return "refused"

    def works() -> torch.Tensor:
        return through(lambda x: x * 7)(torch.ones(3))

    results = _together([fails, works] * 4)
    assert results[::2] == ["refused"] * 4
    assert all(r.eq(7).all() for r in results[1::2])


# What another thread does while a function is in the middle of being traced


def _leaf() -> torch.Tensor:
    return torch.ones(3, requires_grad=True)


def _backward() -> bool:
    x = _leaf()
    (x * 2).sum().backward()
    return x.grad.tolist() == [2.0] * 3


def _backward_of_torch_autograd() -> bool:
    x = _leaf()
    torch.autograd.backward((x * 2).sum())
    return x.grad.tolist() == [2.0] * 3


def _validates() -> bool:
    try:
        torch.distributions.Categorical(probs=torch.tensor([-1.0, 2.0]), validate_args=True)
    except ValueError:
        return True
    return False


def _reentrant_checkpoint() -> bool:
    x, seen = _leaf(), []

    def counted(x: torch.Tensor) -> torch.Tensor:
        seen.append(1)
        return x * 2

    torch.utils.checkpoint.checkpoint(counted, x, use_reentrant=True).sum().backward()
    return len(seen) == 2 and x.grad.tolist() == [2.0] * 3


def _func() -> bool:
    grad = torch.func.vmap(torch.func.grad(lambda v: (v**2).sum()))(torch.ones(2, 3))
    return grad.eq(2).all().item()


def _own_random(draw: Callable[[], float]) -> bool:
    return len({draw() for _ in range(4)}) == 4


ELSEWHERE: dict[str, Callable[[], Any]] = {
    "backward": _backward,
    "torch.autograd.backward": _backward_of_torch_autograd,
    "torch.autograd.grad": lambda: torch.autograd.grad((_x := _leaf()).sum(), _x)[0].tolist() == [1.0] * 3,
    "distributions check their arguments": _validates,
    "reentrant checkpoint": _reentrant_checkpoint,
    "torch.func": _func,
    "compiling flag": lambda: not torch.compiler.is_compiling(),
    "mkldnn": lambda: torch._C._get_mkldnn_enabled(),
    "fast path of attention": lambda: torch.backends.mha.get_fastpath_enabled(),
    "flash attention": lambda: torch.backends.cuda.flash_sdp_enabled(),
    "grad mode": lambda: torch.is_grad_enabled(),
    "default dtype": lambda: torch.get_default_dtype() is torch.float32,
    "function modes": lambda: torch._C._len_torch_function_stack() == 0,
    "dispatch modes": lambda: torch._C._len_torch_dispatch_stack() == 0,
    "values of tensors": lambda: torch.ones(3).sum().item() == 3 and bool(torch.ones(1)),
    "types of tensors": lambda: type(torch.ones(3) * 2) is torch.Tensor,
    "writes in place": lambda: torch.ones(3).add_(1).tolist() == [2.0] * 3,
    "batch norm": lambda: nn.BatchNorm1d(3)(torch.randn(4, 3)).shape == (4, 3),
    "jax": lambda: float(jax.jit(lambda v: v * 2)(1.0)) == 2.0,
    "numbers of Python": lambda: _own_random(random.random),
    "numbers of numpy": lambda: _own_random(np.random.rand),
    "numbers of torch": lambda: _own_random(lambda: torch.rand(1).item()),
    "width of integers in jax": lambda: str(jax.numpy.arange(3).dtype) == "int32",
}
_ELSEWHERE_WRONG = dict.fromkeys(
    ("mkldnn", "fast path of attention", "flash attention"),
    "a trace turns switches of torch for all threads",
)


@contextlib.contextmanager
def _while_tracing(action: Callable[[], Any], in_time: list[bool] | None = None) -> Iterator[list[Any]]:
    """Do something in another thread while the body of a traced function runs, and note whether it was done then."""
    inside, done, results = queue.SimpleQueue(), threading.Event(), []  # setting an event is refused in a trace

    def other() -> None:
        inside.get(timeout=30)
        try:
            results.append(action())
        except BaseException as error:
            results.append(error)
        done.set()

    def fun(x: torch.Tensor) -> torch.Tensor:
        inside.put(None)
        is_done = done.wait(2)
        if in_time is not None:
            in_time.append(is_done)
        return x * 2

    thread = threading.Thread(target=other)
    thread.start()
    try:
        results.append(through(fun)(torch.ones(3)))
        yield results
    finally:
        inside.put(None)
        thread.join(30)


@pytest.mark.parametrize("name", marked(ELSEWHERE, _ELSEWHERE_WRONG))
def test_another_thread_sees_nothing_of_a_trace(name: str) -> None:
    with _while_tracing(ELSEWHERE[name]) as results:
        seen, out = results
    if isinstance(seen, BaseException):
        raise seen
    assert seen
    assert out.tolist() == [2.0] * 3


GENERATORS: dict[str, tuple[Callable[[int], Any], Callable[[], float]]] = {
    "torch": (torch.manual_seed, lambda: torch.rand(1).item()),
    "python": (random.seed, random.random),
    "numpy": (np.random.seed, np.random.rand),
}
_GENERATORS_WRONG = dict.fromkeys(GENERATORS, "a trace puts the generators of all threads back")


@pytest.mark.slow
@pytest.mark.parametrize("name", marked(GENERATORS, _GENERATORS_WRONG))
def test_numbers_drawn_elsewhere_during_a_trace_do_not_come_again(name: str) -> None:
    seed, draw = GENERATORS[name]
    seed(5)
    expected = [draw() for _ in range(4)]
    seed(5)
    with _while_tracing(lambda: [draw(), draw()]) as results:
        pass
    assert [*results[0], draw(), draw()] == expected


def test_the_grad_mode_of_a_thread_is_its_own() -> None:
    call = through(lambda x: x * 2)

    def job(enabled: bool) -> bool:
        with torch.set_grad_enabled(enabled):
            return call(_leaf()).requires_grad

    assert _together([lambda i=i: job(i % 2 == 0) for i in range(8)]) == [True, False] * 4


@pytest.mark.slow
@pytest.mark.xfail(reason="one lock is held while a function is traced and compiled")
def test_a_compiled_function_does_not_wait_for_a_trace_elsewhere() -> None:
    ready = through(lambda x: x + 5)
    ready(torch.ones(3))
    in_time: list[bool] = []
    with _while_tracing(lambda: ready(torch.ones(3)), in_time):
        pass
    assert in_time[0]


# The state of torch after a trace, also one that failed


def _snapshot() -> dict[str, Any]:
    return {
        "mkldnn": torch._C._get_mkldnn_enabled(),
        "fast path": torch.backends.mha.get_fastpath_enabled(),
        "flash": torch.backends.cuda.flash_sdp_enabled(),
        "math": torch.backends.cuda.math_sdp_enabled(),
        "efficient": torch.backends.cuda.mem_efficient_sdp_enabled(),
        "validate": torch.distributions.Distribution._validate_args,
        "backward": torch.autograd.backward,
        "has_torch_function": torch.autograd.has_torch_function,
        "checkpoint": vars(torch.utils.checkpoint.CheckpointFunction).get("apply"),
        "wrap": torch._functorch.eager_transforms._wrap_for_grad,
        "map": torch._functorch.vmap._add_batch_dim,
        "compiling": torch.compiler.is_compiling(),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "dtype": torch.get_default_dtype(),
        "function modes": torch._C._len_torch_function_stack(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "rng": torch.get_rng_state().tolist(),
        "python rng": random.getstate(),
        "numpy rng": np.random.get_state()[1].tolist(),  # noqa: NPY002
        "x64": jax.config.jax_enable_x64,
        "width": str(jax.numpy.arange(3).dtype),
    }


class _Own(Exception):
    pass


def _raises(x: torch.Tensor) -> torch.Tensor:
    raise _Own


def _interrupts(x: torch.Tensor) -> torch.Tensor:
    raise KeyboardInterrupt


def _fails_in_backward(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    if y.requires_grad:
        y.register_hook(lambda g: _raises(g))
    return y


def _fails_within_modes(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        return x if x.sum() > 0 else -x


def _fails_within_func(x: torch.Tensor) -> torch.Tensor:
    return torch.func.vmap(torch.func.grad(lambda v: v.sum() if v.sum() > 0 else -v.sum()))(x[None])


ENDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "success": lambda x: torch.tanh(x),
    "dropout": lambda x: x * 1.5,
    "branch": lambda x: x if x.sum() > 0 else -x,
    "an error of the user's": _raises,
    "an interruption": _interrupts,
    "an error of torch's": lambda x: x @ torch.ones(5),
    "an error in the backward pass": _fails_in_backward,
    "an error within modes": _fails_within_modes,
    "an error within torch.func": _fails_within_func,
    "own random numbers": lambda x: x * random.random(),
    "write to an argument": lambda x: x.mul_(2),
}


@pytest.mark.parametrize("name", ENDS)
def test_the_state_of_torch_is_the_same_after_a_trace(name: str) -> None:
    before = _snapshot()
    with contextlib.suppress(TypeError, RuntimeError, _Own, KeyboardInterrupt):
        through(ENDS[name])(_leaf())
    after = _snapshot()
    assert before == after, [k for k in before if before[k] != after[k]]


def test_what_the_user_has_switched_off_stays_off() -> None:
    torch.backends.mha.set_fastpath_enabled(False)
    torch.distributions.Distribution.set_default_validate_args(False)
    flags = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        before = _snapshot()
        through(lambda x: x * 2.5)(torch.ones(3))
        assert _snapshot() == before
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
        torch.distributions.Distribution.set_default_validate_args(True)
        torch._C._set_mkldnn_enabled(flags)
