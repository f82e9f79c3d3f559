"""``as_jax``: derivatives of every order, captured tensors, randomness, and what is refused."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import marked

from microtome import jax_impl, torch_api
from microtome.bridge import as_jax, as_torch, to_jax, to_torch
from microtome.bridge.base.versions import enable_x64


class _Cube(torch.autograd.Function):
    """A backward pass of its own, which is not the derivative of the value."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 7 * x**2 * g


def _no_grad(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        w = x * 2
    return (x * w * x).sum()


SMOOTH: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "tanh": lambda x: torch.tanh(x).pow(2).sum(),
    "detach": lambda x: ((x * x).detach() * x.sin()).sum(),
    "no_grad": _no_grad,
    "own backward": lambda x: _Cube.apply(x).sum(),
    "matmul": lambda x: (x[:, None] @ x[None]).softmax(-1).pow(3).sum(),
    "norm": lambda x: x.norm() + torch.linalg.vector_norm(x, 3),
    "views": lambda x: (lambda y: (y.view(-1).mul_(2), y.t().add_(x), y)[-1])(x.clone()).pow(3).sum(),
    "inner gradient": lambda x: torch.func.grad(lambda z: z.sin().sum())(x).pow(2).sum(),
}


def _nested(fun: Any, x: torch.Tensor, order: int) -> torch.Tensor:
    """grad of (sum of grad of ...), by torch."""
    x = x.clone().requires_grad_()
    value = fun(x)
    for _ in range(order):
        (g,) = torch.autograd.grad(value, x, create_graph=True, allow_unused=True) if value.requires_grad else (None,)
        value = torch.zeros(()) if g is None else g.sum()
        result = torch.zeros_like(x) if g is None else g
    return result.detach()


@pytest.mark.parametrize("name", marked(SMOOTH, slow=("matmul",)))
@pytest.mark.parametrize("order", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)])
def test_reverse_mode_of_any_order_is_that_of_torch(name: str, order: int) -> None:
    x = torch.tensor([0.3, -0.7, 1.1], dtype=torch.float64)
    fun = as_jax(SMOOTH[name])
    derivative: Any = fun
    for _ in range(order):
        inner = derivative
        derivative = jax.grad(lambda x, inner=inner: jnp.sum(inner(x)))
    with enable_x64():
        got = to_torch(jax.jit(derivative)(to_jax(x)))
    torch.testing.assert_close(got, _nested(SMOOTH[name], x, order), rtol=1e-10, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("name", SMOOTH)
def test_forward_mode_agrees_with_reverse_mode(name: str) -> None:
    fun, x = as_jax(SMOOTH[name]), jnp.array([0.3, -0.7, 1.1])
    tangent = jnp.array([1.0, -2.0, 0.5])
    gradient = jax.grad(fun)(x)
    _, pushed = jax.jvp(fun, (x,), (tangent,))
    np.testing.assert_allclose(pushed, gradient @ tangent, rtol=2e-5)
    forward_over_reverse = jax.jacfwd(jax.grad(fun))(x)
    reverse_over_reverse = jax.jacrev(jax.grad(fun))(x)
    np.testing.assert_allclose(forward_over_reverse, reverse_over_reverse, rtol=2e-5, atol=1e-6)
    _, linear = jax.linearize(fun, x)
    np.testing.assert_allclose(linear(tangent), pushed, rtol=2e-5)


@pytest.mark.parametrize("name", marked(SMOOTH, slow=("tanh", "norm", "detach", "views")))
def test_maps_over_examples_inside_and_outside_of_derivatives(name: str) -> None:
    fun = as_jax(SMOOTH[name])
    rows = jnp.array([[0.3, -0.7, 1.1], [0.9, 0.2, -0.4]])
    expected = jnp.stack([jax.grad(fun)(row) for row in rows])
    np.testing.assert_allclose(jax.vmap(jax.grad(fun))(rows), expected, rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(jax.grad(lambda r: jax.vmap(fun)(r).sum())(rows), expected, rtol=2e-5, atol=1e-6)
    scanned = jax.lax.scan(lambda c, row: (c + fun(row), jax.checkpoint(jax.grad(fun))(row)), jnp.float32(0), rows)[1]
    np.testing.assert_allclose(scanned, expected, rtol=2e-5, atol=1e-6)


def test_gradient_of_a_shared_argument_sums_over_the_mapped_rows() -> None:
    fun = as_jax(lambda w, x: torch.tanh(w @ x).sum())
    w, rows = jnp.arange(6.0).reshape(2, 3) / 6, jnp.arange(12.0).reshape(3, 4)[:, 1:] / 12
    got = jax.grad(lambda w: jax.vmap(fun, (None, 1))(w, rows.T).sum())(w)
    expected = sum(jax.grad(fun)(w, x) for x in rows)
    np.testing.assert_allclose(got, expected, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bfloat16, torch.bool, torch.complex128])
def test_dtypes_keep_their_width_and_the_setting_of_jax_stays(dtype: torch.dtype) -> None:
    x = torch.ones(3).to(dtype)
    got = as_jax(lambda t: t.clone())(to_jax(x))
    assert to_torch(got).dtype == dtype
    assert not jax.config.jax_enable_x64


def test_results_have_the_dtypes_of_torch() -> None:
    x = torch.tensor([1, 2, 3], dtype=torch.int32)
    for fun in (
        lambda t: t.argmax(),
        lambda t: t.sum(),
        lambda t: (t > 1).sum(),
        lambda t: t.cumsum(0),
        lambda t: t / 2,
        lambda t: t * 2.5,
        lambda t: t.half() * 2.5,
        lambda t: F.one_hot(t.long(), 4),
    ):
        assert as_torch(as_jax(fun))(x).dtype == fun(x).dtype


def test_structures_and_static_values_pass_through() -> None:
    def fun(batch: dict[str, torch.Tensor], *, scale: float = 1.0, mask: None = None) -> dict[str, Any]:
        h = batch["x"] * scale
        return {"z": h, "a": (h.sum(), mask), "name": "ok", "n": 3}

    out = as_jax(fun)({"x": jnp.ones(2)}, scale=3.0)
    assert list(out) == ["z", "a", "name", "n"]
    assert out["a"][1] is None
    assert out["name"] == "ok"
    assert float(out["a"][0]) == 6


@pytest.mark.slow
def test_randomness_follows_the_key() -> None:
    fun = as_jax(lambda x: F.dropout(x, 0.5))
    x = jnp.ones(256)
    with pytest.raises(ValueError, match=r"pass key=jax\.random\.key"):
        fun(x)
    one, two = fun(x, key=jax.random.key(0)), fun(x, key=jax.random.key(1))
    assert not jnp.array_equal(one, two)
    assert jnp.array_equal(one, fun(x, key=jax.random.key(0)))
    assert set(np.unique(one)) == {0.0, 2.0}
    keys = jax.random.split(jax.random.key(2), 4)
    rows = jax.vmap(lambda k: fun(x, key=k))(keys)
    assert len({tuple(np.asarray(row)) for row in rows}) == 4


@pytest.mark.slow
def test_a_checkpoint_repeats_its_draws() -> None:
    from torch.utils.checkpoint import checkpoint

    fun = as_jax(lambda x: checkpoint(lambda t: F.dropout(t, 0.5) * t, x, use_reentrant=False).sum())
    x = jnp.full(64, 3.0)
    value, gradient = jax.value_and_grad(fun)(x, key=jax.random.key(0))
    np.testing.assert_allclose(value, (gradient * x / 2).sum(), rtol=1e-6)  # d(m·x²)/dx = 2·m·x for one mask m


def _branch(x: torch.Tensor) -> torch.Tensor:
    return x if x.sum() > 0 else -x


def _python_random(x: torch.Tensor) -> torch.Tensor:
    return x * random.random()


def _numpy_random(x: torch.Tensor) -> torch.Tensor:
    return x * float(np.random.rand())  # noqa: NPY002


WEIGHT = torch.ones(2, requires_grad=True)
REFUSED: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "branch": (_branch, "torch.where"),
    "item": (lambda x: x * x.sum().item(), "torch.where"),
    "float": (lambda x: x * float(x[0]), "torch.where"),
    "while": (lambda x: [x for _ in range(int(x.sum()))], "torch.where"),
    "numpy": (lambda x: x * float(x.detach().numpy().max()), "numpy"),
    "tolist": (lambda x: x * x.tolist()[0], "torch.where"),
    "mask": (lambda x: x[x > 1].sum(), "shape"),
    "nonzero": (lambda x: x.nonzero(), "shape"),
    "backward": (lambda x: (x * WEIGHT).sum().backward(), "autograd.grad"),
    "autograd.backward": (lambda x: torch.autograd.backward((x * WEIGHT).sum()), "autograd.grad"),
    "generator": (lambda x: x + torch.rand(2, generator=torch.Generator()), "generator"),
    "in-place write": (lambda x: x.add_(1), "in place"),
    "in-place write through a view": (lambda x: x[0].zero_(), "in place"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_program_cannot_express_is_refused_with_the_line(name: str) -> None:
    fun, words = REFUSED[name]
    with pytest.raises(TypeError, match=rf"test_as_jax\.py:\d+(.|\n)*{words}"):
        as_jax(fun)(jnp.array([1.0, 2.0]))


_OWN_NUMPY, _OWN_PYTHON = np.random.default_rng(0), random.Random(0)


@pytest.mark.parametrize(
    "fun",
    [
        _python_random,
        _numpy_random,
        lambda x: x * float(_OWN_NUMPY.random()),
        lambda x: x * _OWN_PYTHON.random(),
    ],
)
def test_python_random_numbers_are_never_frozen(fun: Any) -> None:
    with pytest.raises(TypeError, match="generator"):
        as_jax(fun)(jnp.ones(2))


def test_errors_of_torch_itself_pass_through_with_the_line() -> None:
    with pytest.raises(RuntimeError, match="same reduction dim") as caught:
        as_jax(lambda x: x.reshape(1, 3) @ x.reshape(1, 3))(jnp.ones(3))
    assert "test_as_jax.py:" in caught.value.__notes__[0]


def test_unknown_engine() -> None:
    with pytest.raises(ValueError, match='"record" or "torch2jax"'):
        as_jax(torch.sin, engine="other")  # type: ignore[arg-type]


def test_the_second_engine_agrees_and_refuses_by_name() -> None:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))
    x = torch.randn(3, 4)
    results = []
    for engine in ("record", "torch2jax"):
        module.zero_grad()
        out = as_torch(as_jax(module, engine=engine))(x)
        out.pow(2).sum().backward()
        results.append([out.detach(), *(p.grad.clone() for p in module.parameters())])
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(one, two)
    with pytest.raises(TypeError, match=r'test_as_jax\.py:\d+: engine="torch2jax"'):
        as_jax(lambda x: torch.special.i0(x), engine="torch2jax")(jnp.ones(2))


def test_constants_made_inside() -> None:
    def fun(x: torch.Tensor) -> torch.Tensor:
        a = torch.arange(3, device=x.device) + torch.zeros(3)
        return x * a + x.new_ones(3) + torch.tensor([1.0, 2.0, 3.0]).to(x) + torch.full((3,), 2.0, device="cpu")

    assert as_jax(fun)(jnp.ones(3)).tolist() == [4.0, 6.0, 8.0]


def test_ties_and_zeros_have_the_subgradients_of_torch() -> None:
    for fun, x in (
        (lambda t: t.max(0).values, [2.0, 2.0, 1.0]),
        (lambda t: t.clamp(-1, 1).sum(), [-1.0, 0.0, 1.0]),
        (lambda t: t.norm(), [0.0, 0.0, 0.0]),
        (lambda t: t.abs().sum(), [0.0, 0.0, 1.0]),
        (lambda t: t.amax(), [2.0, 2.0, 1.0]),
        (lambda t: F.relu(t).sum(), [0.0, -1.0, 1.0]),
    ):
        leaf = torch.tensor(x, requires_grad=True)
        fun(leaf).backward()
        np.testing.assert_array_equal(jax.grad(as_jax(fun))(jnp.array(x)), leaf.grad.numpy())


_DERIVATIVES: dict[str, Callable[..., Any]] = {
    "linearize": lambda f, x: (jax.linearize(jax.grad(f), x)[1], lambda g: g(x)),
    "vjp": lambda f, x: (jax.vjp(f, x)[1], lambda g: jax.grad(lambda j: g(j)[0].sum())(jnp.ones(()))),
    "jit": lambda f, x: (jax.jit(lambda x: (jax.hessian(f)(x), gc.collect())[0]), lambda g: g(x)),
}


@pytest.mark.parametrize("name", marked(_DERIVATIVES, slow=("jit",)))
def test_derivatives_outlive_the_function_that_they_came_from(name: str) -> None:
    cube, x = lambda x: (x**3).sum(), jnp.arange(4.0)
    make = _DERIVATIVES[name]
    kept, use = make(as_jax(cube), x)
    gc.collect()
    expected, plain = make(lambda x: (x**3).sum(), x)
    np.testing.assert_allclose(use(kept), plain(expected), rtol=1e-6)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*")
def test_what_torch_cannot_show_is_refused_with_the_way_out() -> None:
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(2, 2)])
    with pytest.raises(TypeError, match="pad_packed_sequence"):
        as_torch(as_jax(torch.nn.LSTM(2, 3)))(packed)
    linear = torch.nn.Linear(2, 3)
    for scripted in (torch.jit.script(linear), torch.jit.trace(linear, torch.ones(1, 2))):
        with pytest.raises(TypeError, match="made from"):
            as_jax(scripted)
    with pytest.raises(TypeError, match="writes to argument 0 in place"):
        as_torch(as_jax(torch.Tensor.mul_))(torch.ones(2), 2)
    with pytest.raises(TypeError, match=r"airy_ai.* no lowering is known for it\. Use other torch ops"):
        as_torch(as_jax(torch.special.airy_ai))(torch.ones(2))


_NARROWED: dict[str, Callable[..., Any]] = {
    "microbatch": lambda f, x: jax_impl.microbatch(f, argnums=0, microbatch_size=2)(x),
    "micro_vmap": lambda f, x: jax_impl.micro_vmap(f, microbatch_size=2)(x),
    "chunked_vmap": lambda f, x: jax_impl.chunked_vmap(f, 3)(x),
    "micro_grad": lambda f, x: jax_impl.micro_grad(lambda w, x: f(w), microbatch_size=2)(x, x),
    "clipped_grad": lambda f, x: jax_impl.clipped_grad(lambda w, x: f(w), l2_clip_norm=1.0, microbatch_size=2)(x, x),
    "hessian": lambda f, x: jax_impl.hessian(f, x, 2),
    "jacobian": lambda f, x: jax_impl.jacobian(f, x),
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, jnp.float64) for name in _NARROWED]
    + [(name, jnp.int64) for name in ("microbatch", "micro_vmap", "chunked_vmap")],
)
def test_a_result_that_jax_would_narrow_is_refused(name: str, dtype: Any) -> None:
    with enable_x64():
        x = jnp.arange(4, dtype=dtype)
    f = torch_api.as_jax(lambda x: (x * x).sum())
    with pytest.raises(TypeError, match=r"(int|float)64, which JAX narrows in its 32-bit mode\. Call this under"):
        _NARROWED[name](f, x)
    with enable_x64():
        _NARROWED[name](f, x)


def _labels(p: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(x @ p["w"] + p["b"], y, reduction="sum") + (p["e"][y] ** 2).sum()


_WITH_LABELS: dict[str, Callable[..., Any]] = {
    "grad": jax.grad,
    "micro_grad": lambda f: jax_impl.micro_grad(f, batch_argnums=(1, 2), microbatch_size=2),
    "micro_grad by examples": lambda f: jax_impl.micro_grad(
        f, batch_argnums=(1, 2), microbatch_size=2, transform_fn=lambda g: jax.tree.map(jnp.tanh, g)
    ),
    "clipped_grad": lambda f: jax_impl.clipped_grad(f, l2_clip_norm=0.5, batch_argnums=(1, 2), microbatch_size=2),
    "microbatch": lambda f: jax_impl.microbatch(f, argnums=(1, 2), microbatch_size=2),
    "chunked_vmap": lambda f: lambda p, x, y: jax_impl.chunked_vmap(f, 3, (None, 0, 0))(p, x[:, None], y[:, None]),
    "hessian": lambda f: lambda p, x, y: jax_impl.hessian(lambda p: f(p, x, y), p, 4)[0],
    "hvp": lambda f: lambda p, x, y: jax_impl.hvp(lambda p: f(p, x, y), p)(p),
    "scan": lambda f: (
        lambda p, x, y: jax_impl.checkpoint_chunked_scan(
            lambda c, xy: (c + f(p, xy[0][None], xy[1][None]), xy[0]), jnp.zeros(()), (x, y), chunk_size=2
        )
    ),
}


_SLOW_WITH_LABELS = _WITH_LABELS.keys() - {"micro_grad"}


@pytest.mark.parametrize("name", marked(_WITH_LABELS, slow=_SLOW_WITH_LABELS))
def test_labels_of_torch_stay_64_bit_in_every_transform_whatever_the_mode_of_jax(name: str) -> None:
    torch.manual_seed(0)
    params = {"w": torch.randn(5, 3), "b": torch.randn(3), "e": torch.randn(3, 2)}
    p, x, y = to_jax(params), to_jax(torch.randn(4, 5)), to_jax(torch.tensor([2, 0, 1, 2]))
    assert y.dtype == jnp.int64
    assert not jax.config.jax_enable_x64
    fun = _WITH_LABELS[name](torch_api.as_jax(_labels))
    got, narrow = fun(p, x, y), fun(p, x, jnp.array([2, 0, 1, 2], jnp.int32))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, narrow)
    assert [a.dtype for a in jax.tree.leaves(got)] == [b.dtype for b in jax.tree.leaves(narrow)]
