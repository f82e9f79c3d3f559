"""Outputs that nobody differentiates: they have no cotangent, which is not one of zeros.

Where such an output has an infinite derivative, zero times infinity would make NaN of the gradients. The oracle is
eager torch, which does not run the branch, and of JAX the plain function.
"""

from __future__ import annotations

import gc
import itertools

import jax
import jax.numpy as jnp
import pytest
import torch
import torch.utils.checkpoint
from helpers import crossed, marked
from torch import func

from microtome.bridge import as_jax, as_torch
from microtome.torch_api import (
    AccumulationType,
    chunked_vmap,
    clipped_grad,
    micro_grad,
    micro_vmap,
    microbatch,
    sliced_scan,
)

INF = [0.0, 0.0, 0.5]


class Ignoring(torch.autograd.Function):
    """Its backward pass returns what it was not given."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, g):
        return torch.ones(3)


class Both(torch.autograd.Function):
    """Two outputs and a backward pass that looks which of them has a cotangent."""

    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x)
        return 2 * x, 1 / x

    @staticmethod
    def backward(ctx, a, b):
        (x,) = ctx.saved_tensors
        moved = torch.zeros_like(x) if a is None else 2 * a
        return moved if b is None else moved - b / x**2


def _checkpointed(x):
    run = lambda f: torch.utils.checkpoint.checkpoint(f, x, use_reentrant=False)
    return run(lambda x: x.sin() * 2).sum(), run(lambda x: 1 / x)


def _written(x):
    y = x * 2
    y[0] = 1 / x[0]
    return y[1:].sum(), y


W = torch.tensor([0.0, 1.0, 2.0], requires_grad=True)
FUNCTIONS = {
    "div": lambda x: (x.sum(), 1e5 / x),
    "through one value": lambda x: (lambda y: (y.exp().sum(), y.sqrt(), y.norm().log(), y.int()))(x * x),
    "captured": lambda x: ((x * W).sum(), 1 / W, torch.log(x), W),
    "leaves": lambda x: (x, 1 / x, x.detach()),
    "chunk": lambda x: (lambda a: (a[0].sum(), 1 / a[1], a[2]))((x * 2).chunk(3)),
    "svd": lambda x: torch.linalg.svd(torch.outer(x, x) + torch.eye(3))[1::-1],
    "views": lambda x: (lambda y: (y[:2], 1 / y[1:], y.view(3, 1)))(x * 3),
    "written in place": _written,
    "complex": lambda x: (lambda z: (torch.view_as_real(z).sum(), torch.log(z)))(torch.complex(x, x)),
    "Function": lambda x: (x.sum(), Ignoring.apply(x), 1 / x),
    "two of a Function": Both.apply,
    "checkpoint": _checkpointed,
}


def _gradients(outputs, which, x):
    chosen = [outputs[i] for i in which]
    found = torch.autograd.grad(
        chosen, [x, W], list(map(torch.ones_like, chosen)), allow_unused=True, retain_graph=True
    )
    return list(found)


def _assert_same(ours, right):
    for mine, theirs in zip(ours, right, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            torch.testing.assert_close(mine, theirs, equal_nan=True)


@pytest.mark.parametrize("name", marked(FUNCTIONS, slow=("svd", "captured", "two of a Function", "views", "chunk")))
def test_gradients_of_some_outputs(name):
    fun = FUNCTIONS[name]
    x = torch.tensor(INF, requires_grad=True)
    right, ours = fun(x), as_torch(as_jax(fun))(x)
    moving = [i for i, out in enumerate(right) if out.requires_grad]
    assert [out.requires_grad for out in ours] == [out.requires_grad for out in right]
    for which in [(i,) for i in moving] + [tuple(moving)]:
        _assert_same(_gradients(ours, which, x), _gradients(right, which, x))


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_of_every_set_of_outputs(name, recompute):
    fun = FUNCTIONS[name]
    x = torch.tensor(INF, requires_grad=True)
    right, ours = fun(x), as_torch(as_jax(fun), recompute=recompute)(x)
    moving = [i for i, out in enumerate(right) if out.requires_grad]
    for which in itertools.chain.from_iterable(itertools.combinations(moving, n) for n in range(1, len(moving) + 1)):
        _assert_same(_gradients(ours, which, x), _gradients(right, which, x))
        moved = []
        for outputs in (ours, right):
            chosen = [outputs[i] for i in which]
            first = torch.autograd.grad(
                chosen, [x, W], list(map(torch.ones_like, chosen)), allow_unused=True, create_graph=True
            )
            _assert_same(first, _gradients(right, which, x))
            moved.append(None)
            if first[0] is not None and first[0].requires_grad:
                moved[-1] = torch.autograd.grad(first[0].sum(), x, allow_unused=True, retain_graph=True)[0]
        _assert_same(*([m] for m in moved))


def _wayward(x):
    return x.sum() ** 2 + x.sum(), 1e5 / x


WAYS = {
    "second derivative": lambda f, x: torch.autograd.grad(
        torch.autograd.grad(f(x)[0], x, create_graph=True)[0].sum(), x
    ),
    "func.grad": lambda f, x: [func.grad(lambda x: f(x)[0])(x.detach())],
    "func.grad, has_aux": lambda f, x: func.grad(f, has_aux=True)(x.detach())[:1],
    "func.vjp": lambda f, x: func.vjp(lambda x: f(x)[0], x.detach())[1](torch.tensor(2.0)),
    "func.vjp of both": lambda f, x: func.vjp(f, x.detach() + 1)[1]((torch.tensor(2.0), torch.ones(3))),
    "func.hessian": lambda f, x: [func.hessian(lambda x: f(x)[0])(x.detach())],
    "func.jvp": lambda f, x: [func.jvp(lambda x: f(x)[0], (x.detach(),), (torch.ones(3),))[1]],
    "vmap of grad": lambda f, x: [func.vmap(func.grad(lambda x: f(x)[0]))(torch.stack([x.detach(), x.detach()]))],
    "grad of vmap": lambda f, x: [func.grad(lambda x: func.vmap(f)(x)[0].sum())(torch.stack([x.detach()] * 2))],
    "batched": lambda f, x: torch.autograd.grad(f(x)[0], x, torch.tensor([1.0, 2.0]), is_grads_batched=True),
    "zeros that were given": lambda f, x: torch.autograd.grad(f(x), x, [torch.tensor(1.0), torch.zeros(3)]),
    "zeros that were computed": lambda f, x: torch.autograd.grad(f(x)[0] + 0 * f(x)[1].sum(), x),
}


@pytest.mark.parametrize("way", marked(WAYS, slow=("func.vjp of both", "func.vjp", "func.hessian")))
def test_in_every_way(way):
    x = torch.tensor(INF, requires_grad=True)
    _assert_same(WAYS[way](as_torch(as_jax(_wayward)), x), WAYS[way](_wayward, x))


def test_gradcheck_with_absent_cotangents():
    x = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64, requires_grad=True)
    fun = as_torch(as_jax(lambda x: (x.sum() ** 2, 1 / x)))
    assert torch.autograd.gradcheck(fun, x)
    assert torch.autograd.gradgradcheck(fun, x)


def test_in_jax():
    f, x = as_jax(_wayward), jnp.asarray(INF)
    plain = lambda x: jnp.sum(x) ** 2 + jnp.sum(x)
    first = lambda x: f(x)[0]
    right, ones = jax.grad(plain)(x), jnp.ones(3)
    assert jnp.array_equal(jax.grad(first)(x), right)
    assert jnp.array_equal(jax.jit(jax.grad(lambda x: jax.jit(f)(x)[0]))(x), right)
    assert jnp.array_equal(jax.grad(f, has_aux=True)(x)[0], right)
    assert jnp.array_equal(jax.grad(lambda x: jax.checkpoint(f)(x)[0])(x), right)
    assert jnp.array_equal(jax.grad(lambda x: jax.vmap(f)(x[None])[0].sum())(x), right)
    assert jnp.array_equal(jax.hessian(first)(x), jnp.full((3, 3), 2.0))
    assert jnp.array_equal(jax.grad(lambda x: jnp.vdot(jax.grad(first)(x), ones))(x), jnp.full(3, 6.0))


def test_gradients_that_are_absent_stay_so_before_the_function():
    """An input that the used output does not depend on: what it is made from is not differentiated either."""
    f, x = as_jax(lambda x, y: (x.sum(), y.sum())), jnp.zeros(3)
    assert jnp.array_equal(jax.grad(lambda x: f(x, 1e5 / x)[0])(x), jnp.ones(3))
    assert jnp.array_equal(jax.grad(lambda x: jax.vmap(f)(x[None], 1e5 / x[None])[0].sum())(x), jnp.ones(3))
    both = lambda x: f(x, jnp.zeros(3))
    assert jax.jvp(lambda x: both(x)[0] + jnp.sqrt(both(x)[1]), (x,), (jnp.ones(3),))[1] == 3  # and forward


class Remembering(torch.nn.Module):
    """Leaves two values behind, with their history."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.zeros(3))
        self.last = self.inverse = torch.zeros(())

    def forward(self, x):
        y = x * self.scale
        self.last, self.inverse = y.sum(), 1 / y
        return (y + x).exp()


def test_what_a_call_leaves_behind_has_no_cotangent():
    x = torch.tensor([1.0, 2.0, 3.0])
    ours, right = Remembering(), Remembering()
    run = as_torch(lambda x: as_jax(ours)(x))
    for _ in range(2):
        run(x).sum().backward()
        right(x).sum().backward()
    torch.testing.assert_close(ours.scale.grad, right.scale.grad)
    assert [following for following, _ in run(x).grad_fn.next_functions if following is not None] == [
        torch.autograd.graph.get_gradient_edge(ours.scale).node
    ]  # not the call before
    right(x)
    ours.last.backward()
    right.last.backward()
    torch.testing.assert_close(ours.scale.grad, right.scale.grad)


def test_auxiliary_results():
    p, x = torch.zeros(3), torch.arange(1.0, 5).reshape(4, 1)
    loss = lambda p, x: ((p * x + x).square().sum(), 1e5 / (p * x))
    right = func.grad(lambda p: loss(p, x)[0])(p)
    torch.testing.assert_close(micro_grad(loss, has_aux=True, microbatch_size=2)(p, x)[0], right)
    torch.testing.assert_close(clipped_grad(loss, has_aux=True, l2_clip_norm=1e6)(p, x)[0], right)


def test_outputs_of_microbatches():
    p, x = torch.zeros(3, requires_grad=True), torch.arange(1.0, 5).reshape(4, 1)
    fun = lambda p, x: ((p * x + x).square().sum(), (1e5 / (p * x)).sum())
    right = torch.autograd.grad(fun(p, x)[0], p)
    _assert_same(torch.autograd.grad(microbatch(fun, 1, 2)(p, x)[0], p), right)


def test_backward_passes_are_compiled_once():
    fun = as_torch(as_jax(lambda x: (x.sum(), 1 / x)))
    single = as_torch(as_jax(lambda x: x.exp()))
    x = torch.tensor(INF, requires_grad=True)
    assert len(single.compiled(x)._backwards) == 1  # as there is one way only
    assert len(fun.compiled(x)._backwards) == 0
    for _ in range(2):
        fun(x)[0].backward()
        assert len(fun.compiled(x)._backwards) == 1
    sum(out.sum() for out in fun(x)).backward()
    assert len(fun.compiled(x)._backwards) == 2


def test_a_function_that_is_gone():
    """What torch would have to record once more then starts from the inputs."""
    fun = FUNCTIONS["Function"]

    def body(x):
        made = as_jax(fun)(x)
        gc.collect()
        return made

    x = torch.tensor(INF, requires_grad=True)
    ours = as_torch(body)(x)
    _assert_same(_gradients(ours, (0,), x), _gradients(fun(x), (0,), x))
    (first,) = torch.autograd.grad(as_torch(lambda x: body(x)[2])(x), x, torch.ones(3), create_graph=True)
    assert first.requires_grad


W = torch.ones(3, requires_grad=True)
BATCHED = {
    "microbatch": lambda fun: microbatch(fun, 0, 2, AccumulationType.CONCAT),
    "micro_vmap": lambda fun: micro_vmap(fun, microbatch_size=2),
    "chunked_vmap": lambda fun: chunked_vmap(fun, chunk_size=2),
    "sliced_scan": lambda fun: lambda xs: sliced_scan(lambda c, x: (c + fun(x)[0], fun(x)[1]), torch.zeros(3), xs),
    "as_torch": lambda fun: as_torch(as_jax(fun)),
}


@pytest.mark.parametrize(("name", "output"), crossed(BATCHED, [0, 1]))
def test_a_parameter_that_an_output_does_not_reach_has_no_gradient(name, output):
    xs = torch.randn(4, 3, requires_grad=True)
    out = BATCHED[name](lambda x: (x * W, torch.tanh(x)))(xs)[output]
    wanted, of_xs = torch.autograd.grad(out.sum(), (W, xs), allow_unused=True)
    assert (wanted is None) == (output == 1)
    assert of_xs is not None


@pytest.mark.parametrize("name", marked([n for n in BATCHED if n != "sliced_scan"], quick=("as_torch",)))
def test_results_of_a_call_inside_a_traced_function_require_grad_as_outside(name):
    inner = BATCHED[name](lambda x: (x * W, (x * W).detach(), x > 0, torch.tanh(x), torch.relu(x * W + torch.zeros(3))))
    asked = lambda x: [torch.tensor(float(y.requires_grad)) for y in inner(x)]
    for x in (torch.randn(4, 3), torch.randn(4, 3, requires_grad=True)):
        assert as_torch(as_jax(asked))(x) == asked(x)
    outer = as_torch(as_jax(lambda x: inner(x)[1] * 2))
    assert not outer(torch.randn(4, 3)).requires_grad
