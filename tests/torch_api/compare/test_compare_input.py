"""``compare`` on input that is awkward or bad: a report that says so, and nothing of the caller's is changed."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

from microtome import torch_api as mt

ALONE: dict[str, Any] = {"engines": ()}  # the port alone: nothing is traced
X = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
FLOATS = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)


class Net(nn.Module):
    """A frozen layer, a norm with buffers, and two layers that share their weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.frozen, self.norm = nn.Linear(3, 4).requires_grad_(False), nn.BatchNorm1d(4)
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.two.weight = self.one.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(self.norm(self.frozen(x))))


MAPPING = {"frozen": "frozen.weight", "b0": "frozen.bias", "mean": "norm.running_mean", "var": "norm.running_var"}
MAPPING |= {"scale": "norm.weight", "shift": "norm.bias", "w": "one.weight", "b1": "one.bias", "b2": "two.bias"}


def port(p: Any, x: Any, training: bool) -> Any:
    x = x @ p["frozen"].T + p["b0"]
    mean, var = (x.mean(0), x.var(0)) if training else (p["mean"], p["var"])
    x = (x - mean) / jnp.sqrt(var + 1e-5) * p["scale"] + p["shift"]
    return (x @ p["w"].T + p["b1"]) @ p["w"].T + p["b2"]


_SLOW = functools.partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("context", "training"),
    [
        _SLOW(torch.no_grad, False),
        (torch.inference_mode, True),
        _SLOW(torch.no_grad, True),
        _SLOW(torch.inference_mode, False),
        _SLOW(contextlib.nullcontext, True),
        _SLOW(contextlib.nullcontext, False),
    ],
)
def test_everything_stays_as_it_was(context: Callable[[], Any], training: bool) -> None:
    net = Net().train(training)
    net.one.weight.grad = torch.ones(4, 4)
    x = X.clone().requires_grad_()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    random, params = torch.get_rng_state(), {k: FLOATS(*net.state_dict()[v].shape) for k, v in MAPPING.items()}
    with context():
        enabled = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        fun = lambda p, x: port(p, x, training)
        report = mt.compare(net, fun, x, params=params, mapping=MAPPING, hvp=True, locate=True, **ALONE)
        made_here = mt.compare(net, fun, torch.ones(5, 3) * X, params=params, mapping=MAPPING, **ALONE)
        assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == enabled
    report.assert_agrees()
    made_here.assert_agrees()
    assert report.verdict("frozen.weight", "gradients") in ("equal", "rounding")
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(net.one.weight.grad, torch.ones(4, 4))
    assert net.two.weight is net.one.weight
    assert net.training is training
    assert x.grad is None
    assert net.frozen.weight.requires_grad is False
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())


def test_a_function_that_works_in_place_on_its_arguments() -> None:
    x = X.clone()
    mt.compare(lambda x: x.mul_(2).relu_(), lambda x: jax.nn.relu(2 * x), x, hvp=True, **ALONE).assert_agrees()
    mt.compare(nn.Sequential(nn.ReLU(inplace=True), nn.Tanh()), lambda x: jnp.tanh(jax.nn.relu(x)), x, **ALONE)
    assert torch.equal(x, X)


def test_what_a_port_computes_in_vain_is_not_found() -> None:
    """A dead line that computes the right value must not exonerate the one that is used."""
    net = nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 2))
    params = [FLOATS(4, 3), FLOATS(4), FLOATS(2, 4), FLOATS(2)]

    def wrong(p: Any, x: Any) -> Any:
        y = x @ p[0].T + p[1]
        jax.nn.gelu(y, approximate=False)
        return jax.nn.gelu(y, approximate=True) @ p[2].T + p[3]

    mapping = dict(zip("0123", ("0.weight", "0.bias", "2.weight", "2.bias"), strict=True))
    report = mt.compare(net, wrong, X, params=params, mapping=mapping, gradients=False, locate=True, **ALONE)
    assert report.location.module == "1"


def test_a_loop_that_is_not_looked_into_is_said() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.GELU())
    weight, bias = (jnp.asarray(p.detach().numpy()) for p in net.parameters())
    wrong = lambda x: jax.nn.gelu(x @ weight.T + bias, approximate=True)
    port = lambda x: jax.lax.cond(x[0, 0] > -1e9, wrong, lambda x: wrong(x) * 0, x)
    report = mt.compare(net, port, X, gradients=False, locate=True, **ALONE)
    assert "Not looked into: cond (" in report.location.detail
    assert "a submodule ported there may be named wrongly" in report.location.detail
    assert "looked into" not in mt.compare(net, wrong, X, gradients=False, locate=True, **ALONE).location.detail


def problems(torch_fun: Any, jax_fun: Any, *args: Any, **options: Any) -> str:
    report = mt.compare(torch_fun, jax_fun, *args, **{**ALONE, **options})
    assert not report.agrees
    return "\n".join(report.problems)


def test_results_that_cannot_be_compared() -> None:
    for made, name in (("text", "output is a str"), (object(), "output is a object"), (None, "there are no outputs")):
        assert name in problems(lambda x, made=made: made, lambda x: x, X)
    assert "0 is a tensor without dense data" in problems(lambda x: (x.to_sparse(), x), lambda x: (x, x), X)
    assert "without dense data" in problems(lambda x: x, lambda x: x, X.to("meta"))
    assert "not a valid JAX type" in problems(lambda x: x, lambda x: "text", X)


def test_functions_that_fail_in_a_later_run() -> None:
    def failing(after: int) -> Callable[[Any], Any]:
        runs = iter(range(after))

        def fun(x: Any) -> Any:
            if next(runs, None) is None:
                raise RuntimeError("out of luck")
            return x * 1

        return fun

    for after in range(6):
        assert "RuntimeError: out of luck" in problems(failing(after), lambda x: x * 1, X)
    for after in range(3):
        assert "RuntimeError: out of luck" in problems(lambda x: x * 1, failing(after), X)


def test_a_wrong_number_of_arguments() -> None:
    assert "the JAX function raises TypeError" in problems(torch.sin, lambda x, y: x, X)
    assert "the torch function raises TypeError" in problems(torch.add, lambda x: x, X)


def test_a_port_that_asks_for_values_says_how_to_compare_it() -> None:
    assert "pass gradients=False" in problems(torch.sin, np.sin, X)
    mt.compare(torch.sin, np.sin, X, gradients=False, **ALONE).assert_agrees()
    mt.compare(torch.sum, lambda x: float(np.sum(np.asarray(x))), X, gradients=False, **ALONE).assert_agrees()


def test_outputs_of_other_names_are_compared_in_their_order() -> None:
    report = mt.compare(lambda x: (x, x + 1), lambda x: {"a": x, "b": x + 1}, X, gradients=False, **ALONE)
    report.assert_agrees()
    assert "other names (0, 1 in torch, a, b in JAX)" in report.notes[0]


def test_arrays_of_every_kind_as_arguments() -> None:
    for array in (np.float32([1, 2]), jnp.ones(2, jnp.bfloat16), np.ones(2, np.int8), np.bool_([True])):
        mt.compare(lambda x: x, lambda x: x, array, gradients=False, **ALONE).assert_agrees()
    for array in (np.array(["a"]), np.array([None]), jax.random.key(0)):
        with pytest.raises(TypeError, match="args must be trees of tensors, or of arrays of numbers"):
            mt.compare(lambda x: x, lambda x: x, array, **ALONE)


def test_no_examples() -> None:
    report = mt.compare(lambda x: x.sum(), lambda x: x.sum(), X[:0], batch_argnums=0, hvp=True, **ALONE)
    report.assert_agrees()
    assert report.notes == ["per-example gradients were not compared: there are no examples"]


def test_options_that_mean_nothing() -> None:
    with pytest.raises(ValueError, match="there is no tensor in these arguments"):
        mt.compare(torch.mul, jnp.multiply, X, 3, batch_argnums=1, **ALONE)
    with pytest.raises(ValueError, match="random_inputs must be a number of times"):
        mt.compare(torch.sin, jnp.sin, X, random_inputs=-1, **ALONE)


def test_a_module_that_cannot_be_copied_is_compared_with_the_other_engine() -> None:
    net = nn.Linear(3, 2)
    net.cached = net.weight * 2  # no leaf of autograd's graph: copy.deepcopy refuses
    report = mt.compare(net, None, X)
    report.assert_agrees()
    assert any("torch2jax" in note and "deepcopy" in note for note in report.notes)
