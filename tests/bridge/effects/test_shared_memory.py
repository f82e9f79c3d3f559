"""State that shares memory with other state does so after each call, as in eager torch."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import crossed, marked

from microtome.bridge import as_jax, as_torch

State = Any
STEPS: list[Callable[[State, torch.Tensor], Any]] = []
_EMPTY = ("v", "q", "u", "h")


def _state() -> State:
    torch.manual_seed(0)
    s = types.SimpleNamespace(m=torch.zeros(3), a=torch.arange(4.0).view(2, 2), w=torch.randn(2, 2, requires_grad=True))
    s.t, s.part = torch.arange(6.0).view(2, 3).t(), torch.arange(12.0).view(3, 4)[:, 1:3]
    s.z, s.list, s.named = torch.ones(2, dtype=torch.complex64), [None, None], {}
    vars(s).update(dict.fromkeys(_EMPTY))
    return s


def step(fun: Any) -> Any:
    STEPS.append(fun)
    return fun


@step
def views_of_state_that_are_returned(s: State, x: torch.Tensor) -> Any:
    s.v, s.q, s.u, s.h = s.m[:1], s.a.detach(), s.w.t(), s.a.view(4)
    return x * 1, s.v, s.q, s.u, s.h


@step
def views_of_new_state_that_are_returned(s: State, x: torch.Tensor) -> Any:
    s.m = s.m + x.sum()
    s.v, s.q = s.m[:1], s.m
    return s.v, x * 1


@step
def bound_to_its_transpose(s: State, x: torch.Tensor) -> Any:
    s.a = s.a.t()
    s.a[1:] = x.sum()
    return x * 1


@step
def bound_to_its_transpose_and_returned(s: State, x: torch.Tensor) -> Any:
    s.a = s.a.t()
    s.a[1:] = x.sum()
    return s.a, x * 1


@step
def views_of_other_layouts(s: State, x: torch.Tensor) -> Any:
    s.v, s.q, s.u = s.t[1:], s.part[1:], s.part.t()
    s.t[0] = x.sum()
    s.part[:] = x.sum()
    return x * 1


@step
def expanded_and_as_other_numbers(s: State, x: torch.Tensor) -> Any:
    s.a, s.v, s.q = s.a.expand(2, *[-1] * s.a.dim()), s.t.view(torch.int32), s.part.view(torch.int32)[0]
    return x * 1, s.a


@step
def views_before_their_base(s: State, x: torch.Tensor) -> Any:
    s.q = torch.tanh(x.outer(x) * s.w)
    s.list[0], s.h, s.named["v"] = s.q.t(), s.q[0], (s.q[:1], s.q[1:])
    return x * 1


@step
def views_of_what_is_not_kept(s: State, x: torch.Tensor) -> Any:
    q = torch.tanh(x.outer(x) * s.w)
    s.v, s.u = q.t(), q[0]
    with torch.no_grad():
        r = q * 2
        s.list[:] = [r.detach()[1:], r.expand(2, 2, 2)]
    return q.sum()


@step
def with_its_history_and_without(s: State, x: torch.Tensor) -> Any:
    q, r = torch.tanh(x.outer(x) * s.w), torch.sin(x * s.w[0])
    s.h, s.q, s.m, s.list[0], s.list[1] = q.detach(), q, q.t(), q[0].detach(), q[0]
    s.u, s.v = r.unsqueeze(0), r.detach()  # the other way around
    return q.sum()


@step
def a_part_without_history_of_what_is_not_kept(s: State, x: torch.Tensor) -> Any:
    q = torch.tanh(x.outer(x) * s.w)
    s.h, s.q, s.u = q.detach()[:1], q[:, 1], q.data.t()
    return q.detach()


@step
def transposed_results(s: State, x: torch.Tensor) -> Any:
    s.q = torch.tanh(x.outer(x) * s.w).t()
    s.v, s.u = s.q[0], s.q[:1]
    return s.q


@step
def new_axes(s: State, x: torch.Tensor) -> Any:
    s.u = torch.tanh(x.outer(x))[None]
    s.v, s.h = s.u.permute(2, 0, 1)[1:], s.u.unfold(2, 2, 1)
    s.u.mul_(2)
    return s.u


@step
def parts_of_a_list(s: State, x: torch.Tensor) -> Any:
    s.q = torch.tanh(x) * s.w[0]
    s.list = list(s.q.unbind(0))
    return s.q.sum()


@step
def other_dtypes(s: State, x: torch.Tensor) -> Any:
    s.q = x * 2
    s.v, s.u, s.h = s.q.view(torch.int32), s.z.real, s.z.conj()
    s.z.mul_(2j)
    s.list[0], s.list[1] = s.z.conj().imag, torch.view_as_real(s.z)
    return x * 1


@step
def other_dtypes_of_new_state(s: State, x: torch.Tensor) -> Any:
    s.z = s.z * x
    s.v, s.u, s.list[0] = s.z.real, s.z.conj(), s.z.imag
    s.q = torch.tanh(x.outer(x))
    s.h = torch.view_as_complex(s.q)
    return x * 1


_QUICK = (views_of_state_that_are_returned, bound_to_its_transpose, views_before_their_base, other_dtypes)


def _named(s: State) -> list[tuple[str, torch.Tensor]]:
    found: list[tuple[str, torch.Tensor]] = []
    for name, value in sorted(vars(s).items()):
        values = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else [value]
        flat = [t for v in values for t in (v if isinstance(v, tuple) else [v])]
        found += [(f"{name}{i}", t) for i, t in enumerate(flat) if isinstance(t, torch.Tensor)]
    return found


def _run(fun: Any, wrap: Callable[[Any], Any]) -> tuple[list[Any], list[Any]]:
    """Three calls with writes between them: values, and which states are one or share memory."""
    s, values, relations = _state(), [], []
    first = [t for t in vars(s).values() if isinstance(t, torch.Tensor)]
    call = wrap(lambda x: fun(s, x))
    for i in range(3):
        out = call(torch.ones(2) * (i + 1) * 0.3)
        named = _named(s)
        values += [t.detach().clone() for t in (*(out if isinstance(out, tuple) else [out]), *(t for _, t in named))]
        relations += [(name, t.requires_grad, tuple(t.shape), t.stride()) for name, t in named]
        for n, a in named:
            shared = [m for m, b in named if a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()]
            relations.append((n, shared, [m for m, b in named if a is b]))
        for _, tensor in named:
            if 0 not in tensor.stride() and tensor is not s.w:
                tensor.detach().mul_(2)
        values += [t.detach().clone() for t in (*(t for _, t in _named(s)), *first)]
    return values, relations


_NEAR = (
    *(views_of_new_state_that_are_returned, bound_to_its_transpose_and_returned, other_dtypes_of_new_state),
    *(with_its_history_and_without, views_of_other_layouts, transposed_results),
)


@pytest.mark.filterwarnings("ignore:.*has been compiled")
@pytest.mark.parametrize("fun", marked(STEPS, slow=_NEAR), ids=lambda fun: fun.__name__)
def test_memory_is_shared_as_in_torch(fun: Any) -> None:
    got, expected = _run(fun, lambda f: as_torch(as_jax(f))), _run(fun, lambda f: f)
    torch.testing.assert_close(got[0], expected[0])
    assert got[1] == expected[1]


def _differentiated(fun: Any, wrap: Callable[[Any], Any]) -> Any:
    """Gradients through outputs and states, twice, and by ``torch.func``."""
    s = _state()
    call, x = wrap(lambda x: fun(s, x)), torch.tensor([0.3, 0.5], requires_grad=True)

    def total(x: torch.Tensor) -> torch.Tensor:
        out = call(x)
        kept = [t for name, t in _named(s) if t.requires_grad and name != "w0"]
        moving = [*kept, *(out if isinstance(out, tuple) else [out])]
        return sum((i + 1) * t.abs().square().sum() for i, t in enumerate(moving))  # type: ignore[return-value]

    total(x)
    variables = [x, s.w]
    grads = torch.autograd.grad(total(x), variables, create_graph=True, allow_unused=True)
    again = torch.autograd.grad(sum(g.square().sum() for g in grads if g is not None), variables, allow_unused=True)
    s.__dict__.update(vars(_state()), w=s.w)
    moved = torch.func.jvp(
        lambda x: call(x)[0] if isinstance(call(x), tuple) else call(x), (x.detach(),), (x.detach(),)
    )
    return [torch.zeros(()) if g is None else g for g in (*grads, *again, *moved)]


@pytest.mark.filterwarnings("ignore:.*has been compiled")
@pytest.mark.parametrize(
    "fun",
    marked(
        (
            views_before_their_base,
            views_of_what_is_not_kept,
            with_its_history_and_without,
            a_part_without_history_of_what_is_not_kept,
        ),
        slow=(views_before_their_base, views_of_what_is_not_kept, with_its_history_and_without),
    ),
)
def test_gradients_through_state_that_shares_memory(fun: Any) -> None:
    got, expected = _differentiated(fun, lambda f: as_torch(as_jax(f))), _differentiated(fun, lambda f: f)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("fun", marked(STEPS, quick=_QUICK), ids=lambda fun: fun.__name__)
def test_functions_of_one_call_see_views_that_the_others_left(fun: Any) -> None:
    one, two, x = _state(), _state(), torch.tensor([0.3, 0.5])
    step, other = as_jax(lambda x: fun(one, x)), as_jax(lambda x: x + 1)
    last = lambda out: out[-1].sum() if isinstance(out, (list, tuple)) else out.sum()
    call = as_torch(lambda x: other(last(step(x)) + last(step(x * 2))))
    torch.testing.assert_close(call(x), last(fun(two, x)) + last(fun(two, x * 2)) + 1)
    torch.testing.assert_close([t for _, t in _named(one)], [t for _, t in _named(two)])


VIEWS: dict[str, Any] = {
    "detach": lambda b: b.detach(),
    "data": lambda b: b.data,
    "part": lambda b: b[0],
    "view": lambda b: b.view(-1),
    "transpose": lambda b: b.t(),
    "part of detach": lambda b: b.detach()[1:],
}
WRITTEN = {
    "view": ("view", False),
    "both with a history": ("both", True),
    "view with a history": ("view", True),
    "both": ("both", False),
}
BASES: dict[str, Any] = {
    "dense": lambda: torch.arange(6.0).view(2, 3) + 1,
    "rows of another": lambda: (torch.arange(12.0).view(4, 3) + 1)[1:3],
    "columns of another": lambda: (torch.arange(12.0).view(2, 6) + 1)[:, ::2],
}


@pytest.mark.filterwarnings("ignore:.* has been compiled")
@pytest.mark.parametrize(("written", "view", "base"), crossed(WRITTEN, VIEWS, BASES))
def test_a_view_of_what_was_there_shares_its_memory_or_is_refused(written: str, view: str, base: str) -> None:
    """One that is written to gets a history of its own, or memory in another order: what no call could do again."""
    writes_to, with_grad = WRITTEN[written]

    def run(wrap: Any) -> list[Any]:
        s = types.SimpleNamespace(b=BASES[base](), k=None)
        scale = torch.tensor(2.0, requires_grad=with_grad)

        def fun(x: torch.Tensor) -> Any:
            s.k = VIEWS[view](s.b)
            s.k.mul_(scale)
            if writes_to == "both":
                s.b.detach().add_(x.sum())
            return s.b.detach().sum() * x

        call, found = wrap(fun), []
        for i in range(3):
            found += [call(torch.ones(2) + i).tolist(), s.k.tolist(), s.b.tolist()]
            s.k.detach().add_(10)
            found.append(s.b.tolist())
        return found

    expected, refusal = run(lambda fun: fun), ""
    try:
        assert run(lambda fun: as_torch(as_jax(fun))) == expected
    except TypeError as error:
        refusal = str(error)
    assert not refusal or "in a way that no call could repeat. Keep a copy: .clone()" in refusal
    assert not refusal or with_grad or base == "columns of another"
