"""State that a function keeps: it ends as in eager torch, the tensors as well as what they share and their history."""

from __future__ import annotations

import collections
import contextvars
import copy
import dataclasses
import functools
import gc
import types
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from helpers import crossed, marked, tensors_in, through
from torch import nn
from torch.autograd import forward_ad
from torch.utils import _pytree as torch_pytree

from microtome import torch_api as mt
from microtome.bridge import as_jax, as_torch
from microtome.bridge.call import cache

X = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]])
ZERO = torch.zeros(2)


class _Net(nn.Module):
    """A linear layer, and state of its own."""

    def __init__(self, step: Callable[[Any, torch.Tensor], Any], **state: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lin = nn.Linear(2, 2)
        self._step = step
        for name, value in state.items():
            if name.startswith("buffer"):
                self.register_buffer(name, value.clone())
            else:
                setattr(self, name, copy.deepcopy(value))

    def forward(self, x: torch.Tensor) -> Any:
        return self._step(self, x)


# Each makes a module, and says what to look at after each call.
PROGRAMS: dict[str, Callable[[], tuple[nn.Module, Callable[[Any], Any]]]] = {}
_SLOW: set[str] = set()
_NEAR = {  # run in few other ways than others
    *("old norms", "queues", "dataclass", "complex", "nothing at first", "modules exchanged", "membrane"),
    *("alias of a parameter", "a module in two places", "reset at the start", "the argument"),
}


def program(make: Any = None, *, slow: bool = False) -> Any:
    if make is None:
        return lambda make: program(make, slow=slow)
    name = make.__name__.replace("_", " ").strip()
    PROGRAMS[name] = make
    if slow:
        _SLOW.add(name)
    return make


def simple(name: str, look: Callable[[Any], Any], slow: bool = False, **state: Any) -> Any:
    """A program that is one step of a module with this state."""

    def register(step: Any) -> Any:
        PROGRAMS[name] = lambda: (_Net(step, **state), look)
        if slow:
            _SLOW.add(name)
        return step

    return register


@simple("membrane", lambda n: n.v, v=ZERO)
def _(net: Any, x: torch.Tensor) -> Any:
    net.v = 0.5 * net.v + net.lin(x)
    return net.v


@simple("hidden state, detached", lambda n: n.v, v=ZERO)
def _(net: Any, x: torch.Tensor) -> Any:
    h = net.v * 0.5 + net.lin(x)
    net.v = h.detach()
    return h


@simple("nothing at first", lambda n: n.h, h=None)
def _(net: Any, x: torch.Tensor) -> Any:
    net.h = net.lin(x) if net.h is None else net.lin(x) + net.h
    return net.h.sum()


@simple("pair", lambda n: n.hidden, hidden=None)
def _(net: Any, x: torch.Tensor) -> Any:
    h, c = net.hidden or (ZERO, ZERO + 1)
    h = torch.tanh(net.lin(x) + h)
    net.hidden = (h, c * 0.5 + h)
    return h


@program(slow=True)
def lstm() -> Any:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.hidden = nn.LSTM(2, 2), None

        def forward(self, x: torch.Tensor) -> Any:
            y, self.hidden = self.lstm(x[None], self.hidden)
            return y

    return Wrapped(), lambda n: n.hidden


@simple("growing list", lambda n: list(n.c), c=[])
def _(net: Any, x: torch.Tensor) -> Any:
    net.c.append(net.lin(x))
    return sum(net.c)


@simple("registered buffer", lambda n: [dict(n.named_buffers())["buffer"], n.state_dict()["buffer"]], buffer=ZERO)
def _(net: Any, x: torch.Tensor) -> Any:
    net.buffer = net.buffer * 2 + x
    return net.buffer + net.lin(x)


@simple("exchange", lambda n: [n.a, n.b], slow=True, a=ZERO + 1, b=ZERO + 2)
def _(net: Any, x: torch.Tensor) -> Any:
    net.a, net.b = net.b, net.a
    return net.a * x


@simple("lists exchanged", lambda n: [n.a[0], n.b[0]], a=[ZERO], b=[ZERO + 5])
def _(net: Any, x: torch.Tensor) -> Any:
    net.a, net.b = net.b, net.a
    net.a[0] = net.a[0] + x
    return net.a[0] * 2


@simple("functions exchanged", lambda n: 0, slow=True, a=torch.sin, b=torch.exp)
def _(net: Any, x: torch.Tensor) -> Any:
    net.a, net.b = net.b, net.a
    return net.a(x)


@simple("the argument", lambda n: [n.last, n.row, n.same], last=None, row=None, same=None)
def _(net: Any, x: torch.Tensor) -> Any:
    net.last, net.row, net.same = x, x[1:], x.detach()
    return net.lin(x)


@simple("a parameter by another name", lambda n: [n.w, n.lin.weight], slow=True, w=None)
def _(net: Any, x: torch.Tensor) -> Any:
    net.w = net.lin.weight
    return net.lin(x)


@program
def alias_of_a_parameter() -> Any:
    def step(net: Any, x: torch.Tensor) -> Any:
        w = net.w
        net.w = w * 0.5 + x.sum()
        return w.sum() * net.lin(x)

    net = _Net(step)
    net.__dict__["w"] = net.lin.weight
    return net, lambda n: [n.w, n.lin.weight]


@program
def two_buffers_of_one_tensor() -> Any:
    def step(net: Any, x: torch.Tensor) -> Any:
        net.a = net.a * 0.5 + x
        return net.a + net.b

    net = _Net(step)
    net.a = net.b = torch.ones(2)
    return net, lambda n: [n.a, n.b]


@simple("one tensor by two names", lambda n: [n.a, n.b, n.c], a=ZERO, b=ZERO, c=None)
def _(net: Any, x: torch.Tensor) -> Any:
    net.a = net.b = net.lin(x) + net.a
    net.c = net.d = [net.a * 2]
    assert net.c is net.d
    return net.a


@simple("in place", lambda n: n.v, slow=True, v=ZERO)
def _(net: Any, x: torch.Tensor) -> Any:
    net.v.mul_(0.5).add_(x)
    net.v *= 2
    return net.v * 2


@simple("in place with a history", lambda n: n.v * 1, v=ZERO)
def _(net: Any, x: torch.Tensor) -> Any:
    net.v.mul_(0.5).add_(net.lin(x))
    return net.v.sum()


@simple("new, then in place", lambda n: n.v, slow=True, v=ZERO)
def _(net: Any, x: torch.Tensor) -> Any:
    net.v = net.lin(x) + net.v
    net.v.mul_(2)
    return net.v * 3


@simple("data", lambda n: n.v, slow=True, v=ZERO)
def _(net: Any, x: torch.Tensor) -> Any:
    net.v.data = net.v * 0.5 + x
    return net.v * 2


@simple("counter", lambda n: n.buffer_n, buffer_n=torch.zeros((), dtype=torch.int64))
def _(net: Any, x: torch.Tensor) -> Any:
    net.buffer_n = net.buffer_n + 1
    return net.lin(x) * net.buffer_n


@simple("growing tensor", lambda n: n.v, slow=True, v=ZERO)
def _(net: Any, x: torch.Tensor) -> Any:
    net.v = torch.cat([net.v, x[:1]])
    return net.v.sum() * x


@simple("another dtype", lambda n: n.v, slow=True, v=ZERO)
def _(net: Any, x: torch.Tensor) -> Any:
    net.v = net.v.double() + x
    return net.v


@simple("complex", lambda n: n.v, v=torch.zeros(2, dtype=torch.complex64))
def _(net: Any, x: torch.Tensor) -> Any:
    net.v = (net.v * 1j + net.lin(x)).conj()
    return net.v * 1


@simple("half and mask", lambda n: [n.v, n.m], slow=True, v=torch.zeros(2, dtype=torch.bfloat16), m=None)
def _(net: Any, x: torch.Tensor) -> Any:
    net.v, net.m = (net.v * 0.5 + x).bfloat16(), x > 2
    return net.lin(x)


@simple("constant", lambda n: n.v.add_(1), v=None)
def _(net: Any, x: torch.Tensor) -> Any:
    net.v = torch.ones(2)
    return net.v * x


@simple("cache", lambda n: n.t, slow=True, t=None)
def _(net: Any, x: torch.Tensor) -> Any:
    if net.t is None:
        net.t = torch.arange(2.0)
    return net.t * x


@simple("deleted", lambda n: getattr(n, "t", None))
def _(net: Any, x: torch.Tensor) -> Any:
    if hasattr(net, "t"):
        del net.t
        return x
    net.t = x * 2
    return x * 3


@simple("entries of a dict", lambda n: dict(n.d), slow=True, d={})
def _(net: Any, x: torch.Tensor) -> Any:
    net.d["k"] = net.lin(x)
    net.d["n"] = net.d.get("n", 0) + net.d["k"]
    return net.d["n"]


@simple("nested", lambda n: n.s, s={"h": {"a": ZERO}, "k": [ZERO + 1, "text"]})
def _(net: Any, x: torch.Tensor) -> Any:
    net.s = {"h": {"a": net.s["h"]["a"] + x}, "k": [net.s["k"][0] * 2, "text"]}
    return net.s["k"][0]


@simple("views", lambda n: [n.v, n.row, n.h, n.w, n.wide], v=ZERO, row=None, h=None, w=None, wide=None)
def _(net: Any, x: torch.Tensor) -> Any:
    net.v.mul_(2).add_(x)
    h = net.lin(x) * 2
    net.row, net.h, net.w, net.wide = net.v[0], h[:1], net.lin.weight.t(), net.v.expand(3, 2)
    return h


@dataclasses.dataclass
class _State:
    v: Any
    n: int = 0


@dataclasses.dataclass(slots=True)
class _Slotted:
    v: Any


_Named = collections.namedtuple("_Named", "h c")


@simple("dataclass", lambda n: [n.s.v, n.t.v, n.u.v], s=_State(ZERO), t=_State(ZERO), u=_Slotted(ZERO))
def _(net: Any, x: torch.Tensor) -> Any:
    net.s.v = net.s.v * 0.5 + net.lin(x)
    net.t = _State(net.t.v + x, 1)
    net.u.v = net.u.v + x
    return net.s.v + net.t.v + net.u.v


@simple("named tuple", lambda n: n.s, slow=True, s=_Named(ZERO, ZERO + 1))
def _(net: Any, x: torch.Tensor) -> Any:
    net.s = _Named(net.s.h + x, net.s.c * 2)
    return net.s.h


class _OnTheClass:
    v: Any = ZERO


GLOBAL: Any = ZERO


@program
def places_outside_of_modules() -> Any:
    global GLOBAL
    _OnTheClass.v = GLOBAL = ZERO
    cell = ZERO

    def step(net: Any, x: torch.Tensor) -> Any:
        nonlocal cell
        global GLOBAL
        cell, GLOBAL, _OnTheClass.v = cell + net.lin(x), GLOBAL * 0.5 + x, _OnTheClass.v - x
        step.v = step.v + GLOBAL
        return cell + step.v

    step.v = ZERO
    return _Net(step), lambda n: [cell, GLOBAL, _OnTheClass.v, step.v]


@program
def a_module_in_two_places() -> Any:
    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.v, self.lin = ZERO, nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> Any:
            self.v = self.v * 0.5 + self.lin(x)
            return self.v

    one, two = Cell(), Cell()
    return nn.Sequential(one, two, one), lambda n: [one.v, two.v]


@program
def modules_exchanged() -> Any:
    def step(net: Any, x: torch.Tensor) -> Any:
        net.lin, net.other = net.other, net.lin
        variable.set(variable.get() + net.lin(x))
        return variable.get() * 2

    variable = contextvars.ContextVar("variable", default=ZERO)
    variable.set(ZERO + 1)
    net = _Net(step)
    net.other = nn.Linear(2, 2)
    return net, lambda n: variable.get()


@program(slow=True)
def batch_norm() -> Any:
    net = nn.Sequential(nn.Linear(2, 2), nn.Unflatten(0, (2, 1)), nn.BatchNorm1d(1))
    return net, lambda n: [b * 1 for b in n.buffers()]


def _old_norms() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.utils.spectral_norm(nn.Linear(2, 2)).eval(), nn.utils.weight_norm(nn.Linear(2, 2))
    return nn.Sequential(*layers, nn.utils.spectral_norm(nn.Linear(2, 2)))


@program
def old_norms() -> Any:
    look = lambda n: [n[0].weight, n[0].weight_orig, n[1].weight, n[1].weight_g, n[2].weight, n[2].weight_u * 1]
    return _old_norms(), look


@program(slow=True)
def norms_by_parametrization() -> Any:
    norms = nn.utils.parametrizations
    net = nn.Sequential(norms.weight_norm(nn.Linear(2, 2)), norms.spectral_norm(nn.Linear(2, 2)))

    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: torch.Tensor) -> Any:
            with nn.utils.parametrize.cached():
                return self.net(self.net(x))

    return Cached(), lambda n: [b * 1 for b in n.buffers()]


@simple("reset at the start", lambda n: n.v, v=None)
def _(net: Any, x: torch.Tensor) -> Any:
    net.v = torch.zeros(2)
    for _ in range(2):
        net.v = net.v * 0.5 + net.lin(x)
    return net.v.sum()


@simple("list that is cleared", lambda n: list(n.c), slow=True, c=[])
def _(net: Any, x: torch.Tensor) -> Any:
    net.c.clear()
    for i in range(2):
        net.c.append(net.lin(x) * i)
    return sum(net.c)


@simple("queues", lambda n: [*n.q, *n.c], q=collections.deque([ZERO]), c=[ZERO, ZERO + 1])
def _(net: Any, x: torch.Tensor) -> Any:
    net.q.append(net.lin(x))
    if len(net.q) > 2:
        net.q.popleft()
    net.c.pop(0)
    net.c.append(net.q[-1] + net.c[0])
    return sum(net.q)


@simple("without grad", lambda n: [n.v, n.buffer_w * 1], slow=True, v=ZERO, buffer_w=torch.zeros(2, 2))
def _(net: Any, x: torch.Tensor) -> Any:
    with torch.no_grad():
        net.v = net.v * 0.5 + net.lin(x)
        net.buffer_w.lerp_(net.lin.weight, 0.1)
    return net.lin(x) + net.v


@simple("of a derivative", lambda n: [n.g, n.h * 1], slow=True, g=None, h=None)
def _(net: Any, x: torch.Tensor) -> Any:
    def loss(x: torch.Tensor) -> torch.Tensor:
        net.h = net.lin(x)
        return (net.h**2).sum()

    net.g = torch.func.grad(loss)(x)
    return net.g


@program(slow=True)
def forward_hook() -> Any:
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    net.seen = {}  # type: ignore[assignment]
    net[0].register_forward_hook(lambda module, args, out: net.seen.__setitem__("x", out))  # type: ignore[operator]
    return net, lambda n: n.seen["x"]


@simple("buffer registered inside", lambda n: dict(n.named_buffers())["buf"], slow=True)
def _(net: Any, x: torch.Tensor) -> Any:
    if not hasattr(net, "buf"):
        net.register_buffer("buf", torch.zeros(2))
    net.buf = net.buf + x
    return net.buf


@simple("empty", lambda n: [n.m, n.k], slow=True, m=None, k=None)
def _(net: Any, x: torch.Tensor) -> Any:
    net.m, net.k = x[:0], torch.zeros(0)
    return x * 2


def _run(name: str, wrap: Callable[[Any], Any]) -> dict[str, Any]:
    """Three calls: results and states, which of them are one, which share memory, and gradients through all of them."""
    torch.manual_seed(1)
    net, look = PROGRAMS[name]()
    call, seen = wrap(net), []
    for x in X[:3]:
        seen.append([call(x), look(net)])
    tensors = tensors_in(seen)
    shown = torch_pytree.tree_map_only(torch.Tensor, lambda t: (t.detach().clone(), t.requires_grad, type(t)), seen)
    pairs = [(i, j) for i in range(len(tensors)) for j in range(i)]
    moving = [t for t in tensors if t.requires_grad]
    parameters = [p for p in net.parameters() if p.requires_grad]
    grads = (
        torch.autograd.grad(sum((t.abs() ** 2).sum() for t in moving), parameters, allow_unused=True) if moving else ()
    )
    address = [t.untyped_storage().data_ptr() for t in tensors]
    return {
        "values": shown,
        "same": [(i, j) for i, j in pairs if tensors[i] is tensors[j]],
        "shared": [(i, j) for i, j in pairs if address[i] == address[j] and tensors[i].numel()],
        "gradients": grads,
    }


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n in _SLOW | _NEAR else []) for n in PROGRAMS], ids=str
)
def test_state_ends_as_in_torch(name: str) -> None:
    expected, got = _run(name, lambda net: net), _run(name, through)
    for part in expected:
        tolerance = {"atol": 1e-2, "rtol": 1e-2} if "half" in name else {"atol": 1e-5, "rtol": 1e-4}
        one, two = torch_pytree.tree_leaves(got[part]), torch_pytree.tree_leaves(expected[part])
        assert len(one) == len(two), part
        for a, b in zip(one, two, strict=True):
            if isinstance(b, torch.Tensor):
                torch.testing.assert_close(a, b, msg=lambda m, part=part: f"{part}: {m}", **tolerance)
            else:
                assert a == b, f"{part}: {got[part]} is not {expected[part]}"


# One view, or one constant, in several places


def _of_a_result(net: Any, x: torch.Tensor) -> Any:
    made = x * 2
    net.whole = made
    return made[1:], x * 3


def _of_an_argument(net: Any, x: torch.Tensor) -> Any:
    return x[1:], x * 3


def _of_a_buffer(net: Any, x: torch.Tensor) -> Any:
    return net.buffer.detach(), x * 3


def _of_a_returned_one(net: Any, x: torch.Tensor) -> Any:
    made = x * 2
    return made.unsqueeze(0).transpose(0, 1), made


def _of_nothing(net: Any, x: torch.Tensor) -> Any:
    return torch.zeros(3)[1:], x * 3


def _in_several_places(net: Any, x: torch.Tensor) -> Any:
    view, result = net.make(net, x)
    net.one, net.rows, net.named, net.pair = view, [view, None], {"k": [view]}, (view, x[1:])
    net.counts = [*net.counts, view]
    return result


@pytest.mark.parametrize(
    ("make", "calls"),
    crossed([_of_a_result, _of_an_argument, _of_a_buffer, _of_a_returned_one, _of_nothing], [1, 2]),
)
def test_a_tensor_that_is_kept_in_several_places_is_one(make: Any, calls: int) -> None:
    def state(wrap: Any) -> Any:
        net: Any = _Net(_in_several_places, buffer=torch.ones(2), make=make, one=None, rows=None, named=None, counts=[])
        net.pair = net.whole = None
        call = wrap((lambda x: [net(x * i) for i in range(1, calls + 1)][-1]) if calls > 1 else net)
        found = []
        for _ in range(2):
            call(torch.tensor([1.0, 2.0]))
            net.rows[0].add_(10)
            kept = [net.one, net.rows[0], net.named["k"][0], *net.pair, *net.counts]
            found.append(([[a is b for a in kept] for b in kept], [t.tolist() for t in kept]))
        return found

    assert state(through) == state(lambda fun: fun)


def _membrane() -> Any:
    return PROGRAMS["membrane"]()[0]


# What happens around the calls


def _trained(wrap: Any) -> Any:
    net = _membrane()
    call, losses = wrap(net), []
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    for _ in range(3):
        loss = sum(call(x).pow(2).sum() for x in X)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        net.v = net.v.detach()
        losses.append(loss.detach())
    return losses, net.v


def _twice(wrap: Any) -> Any:
    net = _membrane()
    call, x = wrap(net), X[0].clone().requires_grad_()
    out = [call(x * i) for i in range(1, 4)][-1]
    net.v = torch.zeros(2)  # a second derivative is of the calls as they were made
    grad = torch.autograd.grad(out.pow(3).sum(), x, create_graph=True)[0]
    return grad, torch.autograd.grad(grad.sum(), [x, *net.parameters()]), net.v, call(x), net.v


def _twice_in_place(wrap: Any) -> Any:
    net = PROGRAMS["in place with a history"]()[0]
    call, x = wrap(net), X[0].clone().requires_grad_()
    out = [call(x * i) for i in range(1, 4)][-1]
    grad = torch.autograd.grad(out.pow(3), x, create_graph=True)[0]
    return grad, torch.autograd.grad(grad.sum(), [x, *net.parameters()]), net.v * 1


def _transforms_of_torch(wrap: Any) -> Any:
    net = _membrane()
    call = wrap(net)
    grads = [torch.func.grad(lambda x: call(x).sum())(x) for x in X[:2]]
    moved = torch.func.jvp(call, (X[0],), (X[1],))
    jacobian = torch.func.jacrev(call)(X[0])
    x = X[0].clone().requires_grad_()
    batched = torch.autograd.grad(call(x), x, torch.eye(2), is_grads_batched=True)
    return grads, moved, jacobian, batched, (net.v * 1).detach()


def _without_grad(wrap: Any) -> Any:
    net = _membrane()
    call = wrap(net)
    with torch.inference_mode():
        one = call(X[0])
        was = net.v.is_inference()
    net.v = torch.zeros(2)
    with torch.no_grad():
        two = call(X[0])
    return one, was, two, net.v.requires_grad, call(X[1]), net.v.requires_grad


def _life_of_a_module(wrap: Any) -> Any:
    net = PROGRAMS["registered buffer"]()[0]
    start, seen = copy.deepcopy(net.state_dict()), [wrap(net)(X[0])]
    twin = copy.deepcopy(net)
    seen += [wrap(twin)(X[1]), wrap(net)(X[2])]
    net.load_state_dict(start)
    seen += [wrap(net)(X[1]), net.buffer, twin.buffer]
    net.buffer = torch.ones(2, dtype=torch.float64)
    return seen, wrap(net)(X[0]), net.buffer


def _mode(wrap: Any) -> Any:
    def step(net: Any, x: torch.Tensor) -> Any:
        if net.training:
            net.v = net.v + x
        return net.v * x

    net, seen = _Net(step, v=ZERO), []
    for training in (True, False, True):
        seen.append(wrap(net.train(training))(X[0]))
    return seen, net.v


def _failure(wrap: Any) -> Any:
    def step(net: Any, x: torch.Tensor) -> Any:
        net.w = x
        if net.fail:
            raise ValueError("on purpose")
        net.v = net.v + x
        return x

    net = _Net(step, v=ZERO, w=None, fail=False)
    call = wrap(net)
    call(X[0])
    net.fail = True
    with pytest.raises(ValueError, match="on purpose"):
        call(X[1])
    net.fail = False
    return call(X[2]), net.v, net.w


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(_trained, marks=pytest.mark.slow),
        *(_twice, pytest.param(_twice_in_place, marks=pytest.mark.slow), _transforms_of_torch),
        *(pytest.param(p, marks=pytest.mark.slow) for p in (_without_grad, _life_of_a_module, _mode)),
        _failure,
    ],
)
def test_what_is_done_around_the_calls_means_the_same(program: Any) -> None:
    torch.testing.assert_close(program(through), program(lambda fun: fun), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["membrane", "lists exchanged", "growing list", "new, then in place"])
def test_functions_of_one_call_see_what_the_others_left(name: str) -> None:
    net, look = PROGRAMS[name]()
    plain, other = copy.deepcopy(net), as_jax(lambda x: x + 1)
    step = as_jax(net)
    call = as_torch(lambda x: other(step(step(x) * 2)))
    for x in X[:2]:
        torch.testing.assert_close(call(x), plain(plain(x) * 2) + 1)
        torch.testing.assert_close(look(net), look(plain))
        assert all(type(t) is torch.Tensor and t.untyped_storage().nbytes() for t in tensors_in(look(net)))


@pytest.mark.parametrize("name", ["membrane", "the argument", "pair", "in place", "growing list"])
def test_a_traced_function_called_from_jax_leaves_tensors(name: str) -> None:
    net, look = PROGRAMS[name]()
    plain, call = copy.deepcopy(net), as_jax(net)
    for x in X[:3]:
        got = call(jnp.asarray(x.numpy()))
        np.testing.assert_allclose(got, plain(x).detach(), rtol=1e-5)
        torch.testing.assert_close(tensors_in(look(net)), [t.detach() for t in tensors_in(look(plain))])
        before = np.array(got)
        for tensor in tensors_in(look(net)):
            tensor.detach().add_(0)
            assert tensor.data_ptr() != got.unsafe_buffer_pointer()
        np.testing.assert_array_equal(got, before)


# Per example and in slices


def _chunked(net: Any) -> Any:
    return mt.chunked_vmap(net, 2)(X)


def _mapped(net: Any) -> Any:
    return torch.func.vmap(through(net))(X)


def _in_a_jit(net: Any) -> Any:
    return torch.from_numpy(np.array(jax.jit(as_jax(net))(jnp.asarray(X[0].numpy()))))[None]


def _per_example_gradients(net: Any) -> Any:
    params = {k: p.detach() for k, p in net.named_parameters()}
    loss = lambda p, x: torch.func.functional_call(net, p, (x[0],)).sum()
    return mt.micro_grad(loss, microbatch_size=2)(params, X)[0]


def _cached_once(net: Any, x: torch.Tensor) -> Any:
    if net.k is None:
        net.k = net.lin(x)
    return net.k * x


def _read_and_kept(net: Any, x: torch.Tensor) -> Any:
    net.e = net.e * 0.9 + net.lin(x).detach()
    return net.lin(x)


def _made_once(net: Any, x: torch.Tensor) -> Any:
    if not net.ready:
        net.v, net.ready = torch.zeros(2), True
    net.v = net.v * 0.5 + net.lin(x)
    return net.v


def _toggled(net: Any, x: torch.Tensor) -> Any:
    if net.t is not None:
        net.t = None
        return x
    net.t = x * 2
    return x * 3


KEPT: dict[str, tuple[Callable[[], Any], str]] = {
    "membrane": (_membrane, "_Net.v"),
    "nothing at first": (lambda: PROGRAMS["nothing at first"]()[0], "_Net.h"),
    "pair": (lambda: PROGRAMS["pair"]()[0], "_Net.hidden"),
    "average that is not read": (lambda: _Net(_read_and_kept, e=ZERO), "_Net.e"),
    "cached once": (lambda: _Net(_cached_once, k=None), "_Net.k"),
    "made once": (lambda: _Net(_made_once, v=None, ready=False), "_Net.v"),
    "toggled": (lambda: _Net(_toggled, t=None), "_Net.t"),
    "two names of one": (lambda: PROGRAMS["two buffers of one tensor"]()[0], "_Net.a"),
}


@pytest.mark.parametrize(("name", "way"), crossed(KEPT, [_chunked, _mapped, _in_a_jit]))
def test_state_that_is_kept_is_refused_by_name_where_it_has_no_meaning(name: str, way: Any) -> None:
    make, place = KEPT[name]
    net = make()
    before = dict(vars(net))
    with pytest.raises(TypeError, match=rf"assigns a new tensor to {place} and reads .* return the new one") as error:
        way(net)
    assert "GroupNorm" not in str(error.value)
    assert all(vars(net)[k] is v for k, v in before.items())


def _zeros_like_the_old(net: Any, x: torch.Tensor) -> Any:
    net.v = torch.zeros_like(net.v)
    for _ in range(2):
        net.v = net.v * 0.5 + net.lin(x)
    return net.v


def _features(net: Any, x: torch.Tensor) -> Any:
    net.h, net.last, net.rows = net.lin(x), x, [x[0]]
    return net.h * 2


def _weight_kept(net: Any, x: torch.Tensor) -> Any:
    net.w = net.lin.weight * 2
    return x @ net.w


def _weight_kept_at_first() -> Any:
    net = _Net(_weight_kept)
    net.__dict__["w"] = net.lin.weight
    return net


SCRATCH: dict[str, Callable[[], Any]] = {
    "reset at the start": lambda: PROGRAMS["reset at the start"]()[0],
    "zeros like the old": lambda: _Net(_zeros_like_the_old, v=ZERO),
    "features": lambda: _Net(_features, h=None, last=None, rows=None),
    "a weight at first": _weight_kept_at_first,
    "old norms": lambda: _old_norms().eval(),
}


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:.*the function keeps a tensor in _Net.(last|rows)")
@pytest.mark.parametrize(("name", "way"), crossed(SCRATCH, [_chunked, _mapped, _in_a_jit, _per_example_gradients]))
def test_what_no_later_call_reads_is_computed_and_left_as_it_was(name: str, way: Any) -> None:
    net = SCRATCH[name]()
    plain, before = SCRATCH[name](), [dict(vars(m)) for m in net.modules()]
    got = way(net)
    if way is _per_example_gradients:
        total = sum(plain(x).sum() for x in X)
        parameters = dict(plain.named_parameters())
        grads = torch.autograd.grad(total, list(parameters.values()), allow_unused=True)
        expected = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters.values(), grads, strict=True)]
        got = [g.detach() for g in got.values()]
    else:
        expected = torch.stack([plain(x) for x in X[: len(got)]]).detach()
        got = got.detach()
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    for module, attributes in zip(net.modules(), before, strict=True):
        assert all(vars(module)[k] is v for k, v in attributes.items())


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("make", "place"),
    [
        (lambda: nn.utils.spectral_norm(nn.Linear(2, 2)), "Linear 'weight_[uv]'"),
        (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2)), r"_SpectralNorm 'param\S*_[uv]'"),
        (lambda: PROGRAMS["in place"]()[0], "_Net 'v'"),
    ],
    ids=["spectral norm", "parametrization", "in place"],
)
def test_writes_in_place_are_refused_with_a_way_out_that_fits(make: Any, place: str) -> None:
    with pytest.raises(TypeError, match=rf"{place} is updated in place.*\.eval\(\).*argument") as error:
        _chunked(make())
    assert "BatchNorm" not in str(error.value)


# What cannot be bound


def _new_parameter(net: Any, x: torch.Tensor) -> Any:
    net.p = nn.Parameter(x.detach())
    return net.p * x


def _new_leaf(net: Any, x: torch.Tensor) -> Any:
    net.p = torch.zeros(2, requires_grad=True)
    return net.p * x


def _row(net: Any, x: torch.Tensor) -> Any:
    def inner(x: torch.Tensor) -> torch.Tensor:
        net.p = x * 2
        return net.p

    return torch.func.vmap(inner)(x)


def _object(net: Any, x: torch.Tensor) -> Any:
    net.p = types.SimpleNamespace(v=x * 2)
    return net.p.v


def test_writes_that_no_call_could_repeat_are_refused_by_name() -> None:
    tensors: set[torch.Tensor] = set()
    counts = np.zeros(2)

    def collect(x: torch.Tensor) -> torch.Tensor:
        tensors.add(x * 2)
        return x

    def count(x: torch.Tensor) -> torch.Tensor:
        counts[0] += 1
        return x * float(counts[0])

    with pytest.raises(TypeError, match="tensors of the trace, without values, to tensors"):
        through(collect)(X[0])
    with pytest.raises(TypeError, match="writes to counts, a NumPy array"):
        through(count)(X[0])
    assert not tensors
    assert counts.tolist() == [0, 0]


@pytest.mark.parametrize("shown", [torch.from_numpy, torch.as_tensor, lambda a: torch.asarray(a)[1:]])
def test_a_write_to_what_shows_an_array_of_numpy_is_refused(shown: Any) -> None:
    """The array is no tensor: no call would change it. A copy of it may be written to, and what is made inside."""
    counts = np.zeros(2, np.float32)
    fun = lambda x, make: shown(make(counts)).add_(x.sum()) * 1
    with pytest.raises(TypeError, match=r"test_state\.py:\d+: the function writes to a tensor that shows .* NumPy"):
        through(lambda x: fun(x, lambda a: a))(X[0])
    assert counts.tolist() == [0, 0]
    torch.testing.assert_close(through(lambda x: fun(x, np.copy))(X[0]), fun(X[0], np.copy))
    torch.testing.assert_close(
        through(lambda x: torch.tensor(counts).add_(x.sum()) + shown(counts).sum())(X[0]), X[0].sum().expand(2)
    )


@pytest.mark.parametrize("step", [_new_parameter, _new_leaf, _row, _object])
def test_what_cannot_be_bound_is_refused_by_name(step: Any) -> None:
    net = _Net(step)
    with pytest.raises(TypeError, match=r"assigns .*_Net\.p"):
        through(net)(X[0])
    assert not hasattr(net, "p")


def _writes_an_entry(state: Any, x: torch.Tensor) -> Any:
    state["v"] = state["v"] * 0.5 + x
    return state["v"]


def _appends(state: Any, x: torch.Tensor) -> Any:
    state["list"].append(x)
    return x


def _sets_a_field(state: Any, x: torch.Tensor) -> Any:
    state["object"].v = x
    return x


def _removes(change: Any) -> Any:
    def fun(state: Any, x: torch.Tensor) -> Any:
        change(state)
        return x

    return fun


@pytest.mark.parametrize("fun", [_writes_an_entry, _appends, _sets_a_field])
def test_writes_to_containers_among_the_arguments_are_refused(fun: Any) -> None:
    state = {"v": ZERO, "list": [ZERO], "object": _State(ZERO)}
    with pytest.raises(TypeError, match=r"writes to argument 0\['.*container among its arguments"):
        through(fun)(state, X[0])


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s.pop("v"),
        lambda s: s.popitem(),
        lambda s: s.clear(),
        lambda s: s.__delitem__("list"),
        lambda s: s["list"].pop(),
        lambda s: s["list"].clear(),
        lambda s: s["inner"]["deque"].popleft(),
        lambda s: s["inner"].pop("deque"),
        lambda s: delattr(s["object"], "v"),
    ],
)
def test_removing_entries_of_containers_among_the_arguments_is_refused(change: Any) -> None:
    """The caller would see them still, and the next call too."""
    inner = {"deque": collections.deque([1.0, 2.0])}
    state = {"v": ZERO, "list": [ZERO], "inner": inner, "object": _State(ZERO)}
    with pytest.raises(TypeError, match=r"container among its arguments, which the caller would not see"):
        through(_removes(change))(state, X[0])
    with pytest.raises(TypeError, match=r"test_state.py:\d+: the function removes options\['v'\]"):
        through(lambda x, *, options: (options.pop("v"), x)[1])(X[0], options=state)
    torch.testing.assert_close(through(lambda s, x: dict(s).pop("v") + x)(state, X[0]), X[0])
    assert list(state) == ["v", "list", "inner", "object"]


def test_another_order_of_a_dict_among_the_arguments_is_refused() -> None:
    with pytest.raises(TypeError, match="changes the order of argument 0"):
        through(_removes(lambda s: s.move_to_end("a")))(collections.OrderedDict(a=ZERO, b=ZERO), X[0])


# Cost


@pytest.mark.parametrize("name", ["membrane", "pair", "lists exchanged"])
def test_state_of_a_constant_form_compiles_for_its_first_forms_only(name: str) -> None:
    net, _ = PROGRAMS[name]()
    for i in range(4):
        before = len(cache.PROGRAMS)
        through(net)(X[i])
        assert i < 3 or len(cache.PROGRAMS) == before
    call = as_jax(net)
    traced = next(c.cell_contents for c in call.__closure__ if hasattr(c.cell_contents, "_made"))
    net.lin.requires_grad_(False)
    for x in X:
        call(jnp.asarray(x.numpy()))
    assert len(traced._made) <= 2


@pytest.mark.parametrize("name", marked(["membrane", "hidden state, detached", "pair"], quick=("membrane",)))
def test_states_of_earlier_calls_are_freed(name: str) -> None:
    net, look = PROGRAMS[name]()
    seen = []
    for _ in range(8):
        through(net)(X[0]).sum().backward()
        seen += map(weakref.ref, tensors_in(look(net)))
        for key, value in list(vars(net).items()):
            vars(net)[key] = torch_pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, value)
    gc.collect()
    assert sum(ref() is not None for ref in seen) <= 4


class _Carrying(nn.Module):
    """State that is read as a number, as in truncated backpropagation through time."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.state = nn.Linear(3, 3), None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = 0 if self.state is None else self.state.detach()
        self.state = self.layer(x) + before
        return self.state


def _recording_hook() -> nn.Module:
    layer = nn.Linear(3, 3)
    layer.register_forward_hook(lambda module, _, out: setattr(module, "last", out))
    return layer


@pytest.mark.parametrize(
    "make",
    [_Carrying, lambda: nn.utils.weight_norm(nn.Linear(3, 3)), _recording_hook],
    ids=["carry", "old norm", "hook"],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_each_call_has_a_backward_pass_of_its_own(make: Any) -> None:
    plain, traced = make(), make()
    traced.load_state_dict(plain.state_dict())
    call = as_torch(as_jax(traced))
    for step in range(3):
        x = torch.full((2, 3), float(step))
        for fun in (plain, call):
            fun(x).square().sum().backward()
        for p, q in zip(plain.parameters(), traced.parameters(), strict=True):
            torch.testing.assert_close(q.grad, p.grad)


def test_what_a_backward_pass_writes_is_refused_by_name() -> None:
    kept: dict[str, torch.Tensor] = {}
    hooked = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    hooked[0].register_full_backward_hook(lambda module, _, out: kept.__setitem__("g", out[0].clone()))
    block = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    again = lambda x: torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
    x = torch.randn(4, 3, requires_grad=True)
    for fun, message in ((hooked, r"writes to .*kept\['g'\]"), (again, "writes to a captured tensor in place")):
        with pytest.raises(TypeError, match=rf"test_state.py:\d+: .*{message}|{message}"):
            as_torch(as_jax(fun))(x).sum().backward()
    assert not kept
    assert not block[1].num_batches_tracked


def _added_to(b: torch.Tensor) -> Any:
    return lambda x: (b.add_(1), x * x * b)[1]


def _partly_written_to(b: torch.Tensor) -> Any:
    return lambda x: (b[1:].mul_(2).add_(1), x * x * b)[1]


def _given_other_data(b: torch.Tensor) -> Any:
    return lambda x: (setattr(b, "data", b + 1), x * x * b)[1]


@pytest.mark.parametrize("make", [_added_to, _partly_written_to, _given_other_data])
def test_derivatives_that_start_from_the_inputs_read_what_the_call_has_read(make: Any) -> None:
    """Forward mode and ``torch.func``, beside a call that writes in place to what it captures."""
    x = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    buffers = [torch.zeros(3, dtype=torch.float64) for _ in range(2)]
    plain, call = make(buffers[0]), as_torch(as_jax(make(buffers[1])))
    for _ in range(2):
        found = []
        for fun in (plain, call):
            with forward_ad.dual_level():
                found.append(tuple(forward_ad.unpack_dual(fun(forward_ad.make_dual(x, x)))))
        torch.testing.assert_close(found[1], found[0])
        torch.testing.assert_close(buffers[1], buffers[0])
    for transformed in (
        lambda: torch.func.jvp(call, (x,), (torch.ones_like(x),))[1],
        lambda: torch.func.vjp(call, x)[1](torch.ones_like(x))[0],
        lambda: torch.func.grad(lambda x: call(x).sum())(x),
        lambda: torch.func.jacfwd(call)(x).diag(),
    ):
        y = plain(x)
        torch.testing.assert_close(transformed(), 2 * y / x)
        torch.testing.assert_close(buffers[1], buffers[0])


def test_tensors_that_share_memory_are_not_written_to_as_two() -> None:
    base = torch.zeros(3, 2)
    row, rows, wide = base[1], [base[0], base[2]], base.expand(2, 3, 2)
    x = torch.ones(2)

    def refused(x: torch.Tensor, read: torch.Tensor) -> torch.Tensor:
        base.add_(x)
        return read * 2

    for fun in (lambda x: refused(x, row), lambda x: refused(x, wide), lambda x: (rows[0].copy_(x), base.sum(0))[1]):
        for call in (as_torch(as_jax(fun)), lambda x, fun=fun: as_jax(fun)(jnp.ones(2))):
            with pytest.raises(TypeError, match=r"writes in place to \w+.*, whose memory \w+.* shows too"):
                call(x)
    with pytest.raises(TypeError, match="whose memory tensor argument 0 shows too"):
        as_torch(as_jax(lambda given: (base.add_(1), given * 2)[1]))(base[2])
    assert not base.any()
    assert torch.equal(as_torch(as_jax(lambda x: (rows[0].copy_(x), rows[1] + 1)[1]))(x), torch.ones(2))
    assert torch.equal(base[0], x)


def test_no_tensor_of_a_trace_is_left_behind_where_nothing_is_written_back() -> None:
    @functools.lru_cache
    def table(n: int) -> torch.Tensor:
        return torch.arange(float(n))

    call = as_torch(as_jax(lambda x: x + table(3)))
    for _ in range(2):
        assert torch.equal(call(torch.ones(3)), table(3) + 1)
    held = torch.ones(2)
    zeros = torch.zeros(2)
    variable = contextvars.ContextVar("variable", default=zeros)

    def marks(x: torch.Tensor) -> torch.Tensor:
        held.mark = x * 2
        return held * x

    def counts(x: torch.Tensor) -> torch.Tensor:
        variable.set(variable.get() + x)
        return variable.get() * 1

    with pytest.raises(TypeError, match=r"test_state.py:\d+: .*assigns a tensor to the attribute mark of held"):
        as_torch(as_jax(marks))(torch.ones(2))
    assert not hasattr(held, "mark")
    counting = as_torch(as_jax(counts))
    for step in (1, 2):
        assert torch.equal(counting(torch.ones(2)), torch.full((2,), float(step)))
    assert torch.equal(variable.get(), torch.full((2,), 2.0))


def test_gradients_that_are_read_and_weights_that_are_renormed_in_place() -> None:
    layer = nn.Linear(2, 2)
    with pytest.raises(TypeError, match=r"test_state.py:\d+: the function reads \.grad of a tensor that it captures"):
        as_torch(as_jax(lambda x: layer(x) if layer.weight.grad is None else layer(x) * 2))(torch.ones(1, 2))

    def renormed(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            layer.weight /= layer.weight.norm(dim=1, keepdim=True)
        return layer(x)

    weight, x = layer.weight, torch.ones(1, 2)
    want = copy.deepcopy(layer)
    got = as_torch(as_jax(renormed))(x)
    with torch.no_grad():
        want.weight /= want.weight.norm(dim=1, keepdim=True)
    torch.testing.assert_close(got, want(x))
    assert layer.weight is weight
    torch.testing.assert_close(layer.weight, want.weight)


def _switches(layer: Any, free: torch.Tensor, kept: torch.Tensor) -> list[Any]:
    def attribute(x: torch.Tensor) -> Any:
        free.requires_grad = True
        return free * x

    return [
        attribute,
        lambda x: free.requires_grad_() * x,
        lambda x: layer.requires_grad_(False)(x),
        lambda x: (layer.bias.detach_(), layer(x))[1],
        lambda x: (kept.detach_(), kept * x)[1],
    ]


@pytest.mark.parametrize("wrap", [through, lambda fun: mt.chunked_vmap(fun, 2)], ids=["whole", "slices"])
def test_whether_captured_tensors_require_grad_stays_as_it_was(wrap: Any) -> None:
    layer, free, x = nn.Linear(2, 2), torch.ones(2), torch.ones(2, 2)
    kept = torch.ones(2, requires_grad=True) * 2
    for fun in _switches(layer, free, kept):
        with pytest.raises(
            TypeError, match=r"test_state.py:\d+: the function changes whether a tensor that it captures"
        ):
            wrap(fun)(x)
    assert (free.requires_grad, kept.requires_grad, layer.bias.requires_grad) == (False, True, True)

    def frozen_for_a_while(x: torch.Tensor) -> torch.Tensor:
        layer.requires_grad_(False)
        out = layer(x)
        layer.requires_grad_(True)
        own = (x * 2).detach().requires_grad_()
        return out + 2 * layer(x) + torch.autograd.grad(own.square().sum(), own)[0]

    grads = []
    for call in (wrap(frozen_for_a_while), frozen_for_a_while):
        call(x).sum().backward()
        grads.append(layer.weight.grad)
        layer.zero_grad()
    torch.testing.assert_close(*grads)


def test_writes_to_gradients_are_refused() -> None:
    layer = nn.Linear(2, 2)

    def assigned(x: torch.Tensor) -> Any:
        layer.weight.grad = x.new_ones(2, 2)
        return layer(x)

    def cleared(x: torch.Tensor) -> Any:
        layer.weight.grad = None
        return layer(x)

    def deleted(x: torch.Tensor) -> Any:
        del layer.weight.grad
        return layer(x)

    def of_an_argument(x: torch.Tensor) -> Any:
        x.grad = x * 2
        return layer(x)

    def added(x: torch.Tensor) -> Any:
        layer.weight.grad += 1
        return layer(x)

    x = torch.ones(2, 2)
    for step in (assigned, cleared, deleted, of_an_argument, added, lambda x: (layer.zero_grad(), layer(x))[1]):
        for fun in (through(step), mt.chunked_vmap(step, 2)):
            with pytest.raises(TypeError, match=r"test_state.py:\d+: the function (writes to|reads) \.grad of a"):
                fun(x)
    assert layer.weight.grad is None
    assert x.grad is None


class _Plain(nn.Module):
    """What is no tensor, changed by the function."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        self.layer, self.count, self.started, self.log, self.change = nn.Linear(2, 2), 0, False, [], change
        self.pair = [[1.0], [2.0]]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.change(self, x)


def _counts(net: _Plain, x: torch.Tensor) -> torch.Tensor:
    net.count += 1
    return net.layer(x) * net.count


def _starts(net: _Plain, x: torch.Tensor) -> torch.Tensor:
    if net.started:
        return net.layer(x)
    net.started = True
    return net.layer(x) * 3


def _exchanges(net: _Plain, x: torch.Tensor) -> torch.Tensor:
    net.pair[0], net.pair[1] = net.pair[1], net.pair[0]
    return net.layer(x) * net.pair[0][0]


def _logs(net: _Plain, x: torch.Tensor) -> torch.Tensor:
    net.log.append(1.0)
    return net.layer(x) * len(net.log)


def _only_counts(net: _Plain, x: torch.Tensor) -> torch.Tensor:
    net.count += 1
    net.log.append(1.0)
    return net.layer(x)


def _makes_tables(net: _Plain, x: torch.Tensor) -> torch.Tensor:
    if not net.started:
        net.started, net.table = True, torch.arange(2.0)
    return net.layer(x) * net.table


_SLICED: dict[str, Any] = {
    "microbatch": lambda net, x: mt.microbatch(net, 0, 2, mt.AccumulationType.CONCAT)(x),
    "chunked_vmap": lambda net, x: mt.chunked_vmap(net, 2)(x),
    "micro_grad": lambda net, x: mt.micro_grad(lambda w, x: (net(x) * w).sum())(torch.ones(2), x)[0],
}


@pytest.mark.parametrize("name", ["chunked_vmap", *(pytest.param(n, marks=pytest.mark.slow) for n in _SLICED)])
def test_numbers_that_a_function_changes_and_computes_with_have_no_place_in_slices(name: str) -> None:
    x = torch.randn(4, 2)
    for change in (_counts, _starts, _exchanges, _logs):
        with pytest.raises(TypeError, match=r"test_state.py:\d+: the function changes .* and computes with it"):
            _SLICED[name](_Plain(change), x)
    net = _Plain(_only_counts)
    with pytest.warns(UserWarning, match=r"changes (_Plain.count|\S*log) each time"):
        got = [_SLICED[name](net, x) for _ in range(2)][1]
    if name != "micro_grad":
        torch.testing.assert_close(got, net(x))
    net = _Plain(_makes_tables)
    for _ in range(2):
        got = _SLICED[name](net, x)
    if name != "micro_grad":
        torch.testing.assert_close(got, net(x))


def test_a_list_that_is_appended_to_is_not_computed_with() -> None:
    with pytest.raises(TypeError, match=r"test_state.py:\d+: the function appends to log and computes with"):
        as_torch(as_jax(_Plain(_logs)))(torch.ones(1, 2))


def test_a_list_of_tensors_and_numbers_grows_as_in_torch_and_a_log_takes_no_tensors() -> None:
    class Logs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kept, self.seen = [], []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.kept.append(x.sum() if self.training else 1.0)
            if self.number_first:
                self.seen.append(2.0 if self.training else x.sum())
            return x * 2

    x = torch.ones(2)
    net, plain = Logs(), Logs()
    net.number_first = plain.number_first = False
    call = as_torch(as_jax(net))
    for training in (True, False, True, False, False):
        for module, run in ((net, call), (plain, plain)):
            module.train(training)
            run(x)
    assert net.kept == plain.kept
    net.number_first = True
    net.train()
    call(x)
    net.eval()
    with pytest.raises(
        TypeError, match=r"test_state.py:\d+: the function appends a tensor to seen, .* list of their own"
    ):
        call(x)
    assert net.seen == [2.0]


# Tensors whose memory is exchanged by .data


class Exchanging(nn.Module):
    def __init__(self, step: Any) -> None:
        super().__init__()
        self.step = step
        self.p = nn.Parameter(torch.tensor([0.5, -0.3, 0.8]))
        self.register_buffer("b", torch.full((3,), 3.0))
        self.shadow = torch.full((3,), 2.0)
        self.big = torch.arange(6.0)
        self.low = self.big[:3]
        self.views, self.kept = [self.p.data, self.b.view(3)], []

    def forward(self, x: torch.Tensor) -> Any:
        return self.step(self, x)

    def state(self) -> Any:
        return [t.detach().clone() for t in (self.p, self.b, self.shadow, self.big, *self.views, *self.kept)]


def _averages_for_a_while(net: Any, x: torch.Tensor) -> Any:
    saved = net.p.data
    net.p.data = net.shadow
    y = ((net.p * x) ** 2).sum()
    net.p.data = saved
    return y + (net.p * x).sin().sum()


def _perturbed_for_a_while(net: Any, x: torch.Tensor) -> Any:
    saved = net.p.data.clone()
    net.p.data = net.p.data + 0.1 * x.sign()
    y = ((net.p * x) ** 2).sum()
    net.p.data = saved
    return y + (net.p**2).sum()


def _two_assignments(net: Any, x: torch.Tensor) -> Any:
    net.b.data = net.b + x
    net.b.data = net.b * 0.5
    return net.b * net.p


def _assigned_then_written(net: Any, x: torch.Tensor) -> Any:
    net.b.data = net.b * 0.5 + x
    net.b.add_(1)
    return net.b * net.p


def _the_parameter(net: Any, x: torch.Tensor) -> Any:
    net.p.data = net.p.data - 0.1 * x
    return net.p * x


def _a_view(net: Any, x: torch.Tensor) -> Any:
    net.low.data = x * 0 - 1
    return net.big[:3] * x


def _old_memory_kept(net: Any, x: torch.Tensor) -> Any:
    net.kept = [net.b.data]
    net.b.data = net.b * 0.5
    return net.kept[0] + net.b * x


def _new_memory_kept(net: Any, x: torch.Tensor) -> Any:
    new = x * 2
    net.kept = [new]
    net.b.data = new
    return net.b * x


@pytest.mark.parametrize(
    "step",
    [
        pytest.param(_averages_for_a_while, marks=pytest.mark.slow),
        *(_perturbed_for_a_while, _two_assignments, _assigned_then_written, _the_parameter),
        *(_a_view, _old_memory_kept, _new_memory_kept),
    ],
)
def test_data_that_is_assigned_shows_the_memory_that_it_shows_in_torch(step: Any) -> None:
    plain, net = Exchanging(step), Exchanging(step)
    call = as_torch(as_jax(net))
    for i in range(3):
        x = torch.tensor([0.3, -0.6, 0.2]) + i
        expected, got = plain(x), call(x)
        torch.testing.assert_close(got.detach(), expected.detach())
        if expected.requires_grad:
            wanted = torch.autograd.grad(expected.sum(), plain.p)
            torch.testing.assert_close(torch.autograd.grad(got.sum(), net.p), wanted)
        torch.testing.assert_close(net.state(), plain.state())
        for other in (plain, net):  # what is written from outside shows where torch shows it
            with torch.no_grad():
                other.b.mul_(2)
                other.p.add_(1)
                other.shadow.mul_(3)
        torch.testing.assert_close(net.state(), plain.state())


@pytest.mark.parametrize(
    "assign",
    [
        lambda net, x: setattr(net.b, "data", net.shadow),
        lambda net, x: setattr(net.b, "data", x),
        lambda net, x: setattr(net.b, "data", net.big[3:]),
        lambda net, x: [setattr(t, "data", y) for y in (x * 2,) for t in (net.b, net.shadow)],
        lambda net, x: [setattr(t, "data", y) for t, y in ((net.b, net.shadow), (net.shadow, net.b.data))],
        lambda net, x: net.b.set_(x * 2),
    ],
)
def test_data_that_is_to_show_the_memory_of_another_tensor_is_refused(assign: Any) -> None:
    def step(net: Any, x: torch.Tensor) -> Any:
        assign(net, x)
        return net.b * x

    with pytest.raises(TypeError, match=r"test_state.py:\d+: .*(memory of another one \(\.data\)|cannot set_)"):
        as_torch(as_jax(Exchanging(step)))(torch.ones(3))
