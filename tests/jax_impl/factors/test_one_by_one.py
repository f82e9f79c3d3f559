"""Transforms that need whole gradients, which run for one example after another, against the mapped computation."""

from __future__ import annotations

import functools
import math
import operator
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from clipping_cases import CASES
from clipping_models import MODELS
from helpers import temporary
from microbatching_cases import assert_same, norm

from microtome import torch_api as mt
from microtome.jax_impl import AccumulationType, Accumulator, clipped_grad, micro_grad
from microtome.jax_impl.factors import one_by_one

_SLOW = functools.partial(pytest.param, marks=pytest.mark.slow)


def entries(grads):
    return jax.tree.map(lambda g: jnp.clip(g, -0.05, 0.05), grads)


def of_the_norm(grads):
    length = norm(grads)
    return jax.tree.map(lambda g: jnp.sign(g) * jnp.sqrt(jnp.abs(g) / length), grads)


def of_one_entry(grads):
    """The first is needed whole, the others are only scaled and could stay factors."""
    leaves, treedef = jax.tree.flatten(grads)
    largest = jnp.max(jnp.abs(leaves[0])) + 0.1
    return treedef.unflatten([g / largest for g in leaves])


def to_another_tree(grads):
    leaves = jax.tree.leaves(grads)
    return [jnp.cumsum(leaves[0], 0), {"all": sum(jnp.sum(jnp.tanh(g)) for g in leaves)}, jnp.stack([leaves[-1]] * 2)]


TRANSFORMS = (entries, of_the_norm, of_one_entry, to_another_tree)


@pytest.fixture
def always(monkeypatch):
    """Small gradients take the loop as well."""
    monkeypatch.setattr(one_by_one, "_LEAST", 1)
    monkeypatch.setattr(one_by_one, "_LEAST_REDUCED", 1)


def expected(loss, transform, params, batch):
    each = jax.vmap(lambda x: transform(jax.grad(loss)(params, x[None])))(batch)
    return jax.tree.map(lambda g: g.sum(0), each)


def results_of(fun, *args):
    return jax.jit(lambda *a: fun(*a))(*args)


_QUICK = ("weight_normalisation", "embedding_tied_to_the_output")
_OTHERS = [name for name in CASES if name not in _QUICK]


@pytest.mark.parametrize("name", [*(n for n in CASES if n in _QUICK), *(_SLOW(n) for n in _OTHERS)])
def test_each_kind_of_parameter_equals_the_mapped_computation(name, always):
    case = CASES[name]
    with jax.enable_x64(True):
        params, batch = jax.tree.map(jnp.asarray, case.params), jnp.asarray(case.batch)
        transforms = TRANSFORMS[:2] if name in _QUICK else TRANSFORMS
        each = lambda p, x: [micro_grad(case.loss, transform_fn=t)(p, x)[0] for t in transforms]
        plain = lambda p, x: [expected(case.loss, t, p, x) for t in transforms]
        got, want = results_of(each, params, batch), results_of(plain, params, batch)
        assert jax.tree.structure(got) == jax.tree.structure(want)
        for a, e in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert (a.shape, a.dtype) == (e.shape, e.dtype)
            np.testing.assert_allclose(a, e, rtol=0, atol=1e-10 * max(1, np.abs(e).max()))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["MLP", "CNN", "transformer", "embedding", "ResNet"])
def test_models_keep_one_gradient_at_a_time(name):
    loss, params, *batch = MODELS[name](16)
    entries_of = {k: v.size for k, v in enumerate(jax.tree.leaves(params))}
    fun = micro_grad(loss, transform_fn=entries, batch_argnums=(1, 2))
    one = lambda x, y: entries(jax.grad(loss)(params, x[None], y[None]))
    mapped = lambda p, x, y: jax.tree.map(lambda g: g.sum(0), jax.vmap(one)(x, y))
    compiled = jax.jit(lambda *a: fun(*a)[0]).lower(params, *batch).compile()
    assert_same(compiled(params, *batch), results_of(mapped, params, *batch))
    whole = 4 * sum(entries_of.values())
    plain = temporary(jax.grad(loss), params, *batch)
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * plain + 2 * whole
    largest = max(entries_of.values())
    shapes = re.findall(r"f32\[([\d,]+)\]", compiled.as_text())
    assert 16 * largest not in {math.prod(map(int, shape.split(","))) for shape in shapes}
    explanation = fun.explain(params, *batch)
    materialised = {k for k, path in explanation.paths.items() if path.path == "materialised"}
    assert materialised
    assert all(16 * explanation.kept_bytes[k] == explanation.dense_bytes[k] for k in materialised)


def test_nothing_to_differentiate_is_explained_as_nothing():
    explanation = micro_grad(lambda p, x: x.sum()).explain({}, jnp.ones((4, 2)))
    assert explanation.paths == explanation.dense_bytes == explanation.kept_bytes == {}


def loss_of(p, x):
    return jnp.sum(jnp.tanh(jnp.tanh(x @ p["w"] + p["b"]) @ p["v"]) ** 2)


def params_of(dtype=jnp.float32):
    return {k: jnp.asarray(v, dtype) for k, v in CASES["dense"].params.items()}


def rows_of(n, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(n).normal(size=(n, 12)), dtype)


largest = Accumulator(
    init=lambda shapes: jax.tree.map(lambda s: jnp.full(s.shape, -jnp.inf, s.dtype), shapes),
    update=lambda carry, value, index: jax.tree.map(jnp.maximum, carry, value),
    finalize=lambda carry: carry,
    aggregate=lambda values: jax.tree.map(lambda v: v.max(0), values),
)


@pytest.mark.parametrize(
    "options",
    [
        {"microbatch_size": 3, "remainder": "run"},
        _SLOW({"microbatch_size": 1, "accumulator": AccumulationType.MEAN}),
        _SLOW({"microbatch_size": 4, "remainder": "run", "accumulator": AccumulationType.RUNNING_MEAN}),
        {"accumulator": AccumulationType.CONCAT},
        _SLOW({"microbatch_size": 5, "accumulator": largest}),
        _SLOW({"microbatch_size": 2, "num_real_microbatches": 3}),
        {"microbatch_size": 2, "accumulator": {"w": AccumulationType.SUM, "b": largest, "v": AccumulationType.CONCAT}},
        {"microbatch_size": 2, "metrics_fn": norm},
        _SLOW({"microbatch_size": 2, "metrics_fn": lambda g: g}),
    ],
    ids=lambda options: ", ".join(options),
)
def test_options_mean_what_they_mean_otherwise(options, always, monkeypatch):
    fun = micro_grad(loss_of, transform_fn=entries, **options)
    got = results_of(fun, params_of(), rows_of(10))
    monkeypatch.setattr(jax, "device_count", lambda: 2)  # no loop then
    assert_same(got, results_of(fun, params_of(), rows_of(10)))


def test_a_traced_number_of_microbatches_and_an_empty_batch(always):
    options = {"transform_fn": entries, "microbatch_size": 2, "partition": "contiguous"}
    fun = jax.jit(lambda n, x: micro_grad(loss_of, num_real_microbatches=n, **options)(params_of(), x)[0])
    x = rows_of(6)
    for n in (0, 2, 3):
        assert_same(fun(n, x), expected(loss_of, entries, params_of(), x[: 2 * n]))
    assert_same(micro_grad(loss_of, **options)(params_of(), x[:0])[0], jax.tree.map(jnp.zeros_like, params_of()))


@pytest.mark.parametrize("dtype", ["bfloat16", _SLOW("float16")])
def test_half_precision_is_summed_in_float32(dtype, always):
    ones = lambda grads: jax.tree.map(lambda g: jnp.isfinite(g).astype(g.dtype), grads)
    got = micro_grad(loss_of, transform_fn=ones)(params_of(dtype), rows_of(1000, dtype))[0]
    assert all(g.dtype == dtype and (g == 1000).all() for g in jax.tree.leaves(got))


def test_what_is_left_uncovered_is_clipped_one_by_one(always):
    """NaN examples and padding count as zero there too, whatever the others' factors hold."""

    first = lambda g: {**g, "w": jnp.clip(g["w"], -0.05, 0.05)}
    x = rows_of(6).at[2].set(jnp.nan).at[4].set(jnp.inf)
    padding = jnp.array([False, True, False, False, False, False])
    options = {"l2_clip_norm": 0.5, "microbatch_size": 3, "return_grad_norms": True}
    fun = clipped_grad(loss_of, pre_clipping_transform=first, **options)
    got, aux = results_of(lambda p, x: fun(p, x, is_padding_example=padding), params_of(), x)
    explanation = fun.explain(params_of(), x)
    assert explanation.paths["['w']"].path == "materialised"
    assert explanation.paths["['v']"].path == "factored"
    assert explanation.kept_bytes["['w']"] == 4 * params_of()["w"].size
    clipped = lambda g: jax.tree.map(lambda v: v / jnp.maximum(norm(first(g)) / 0.5, 1), first(g))
    kept = jnp.array([0, 3, 5])
    assert_same(got, expected(loss_of, clipped, params_of(), x[kept]))
    norms = jax.vmap(lambda row: norm(jax.grad(loss_of)(params_of(), row[None])))(x[kept])
    assert_same(aux.grad_norms[kept], norms)


def test_derivatives_are_those_of_the_plain_computation(always):
    with jax.enable_x64(True):
        params, x = params_of(jnp.float64), rows_of(4, jnp.float64)
        ours = lambda p: norm(micro_grad(loss_of, transform_fn=of_the_norm, microbatch_size=2)(p, x)[0])
        plain = lambda p: norm(expected(loss_of, of_the_norm, p, x))
        got, want = results_of(jax.grad(ours), params), results_of(jax.grad(plain), params)
        jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, rtol=0, atol=1e-10), got, want)


def test_it_can_be_mapped(always):
    several = jax.tree.map(lambda v: jnp.stack([v, 2 * v]), params_of())
    fun = lambda p: micro_grad(loss_of, transform_fn=of_one_entry, microbatch_size=2)(p, rows_of(4))[0]
    plain = lambda p: expected(loss_of, of_one_entry, p, rows_of(4))
    assert_same(results_of(jax.vmap(fun), several), results_of(jax.vmap(plain), several))


def test_what_is_printed_is_printed_for_each_example(always, capfd):
    def transform(grads):
        jax.debug.print("largest {}", jnp.max(grads["w"]))
        return entries(grads)

    got = micro_grad(loss_of, transform_fn=transform)(params_of(), rows_of(3))[0]
    jax.effects_barrier()
    assert capfd.readouterr().out.count("largest") == 3
    assert_same(got, expected(loss_of, entries, params_of(), rows_of(3)))


@pytest.mark.parametrize("size", [_SLOW(1), 4, _SLOW(None)])
def test_torch_losses_with_integer_labels(size, always):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(9, 8), torch.nn.Flatten(), torch.nn.Linear(24, 5))
    params = {k: v.detach() for k, v in model.named_parameters()}
    x, y = torch.randint(0, 9, (8, 3)), torch.randint(0, 5, (8,))

    def loss(p, x, y):
        return torch.nn.functional.cross_entropy(torch.func.functional_call(model, p, (x,)), y)

    def transform(grads):
        largest = torch.stack([g.abs().max() for g in grads.values()]).max()
        return {k: (g / largest).clamp(-0.1, 0.1) for k, g in grads.items()}

    one = lambda p, x, y: transform(torch.func.grad(loss)(p, x[None], y[None]))
    want = torch.func.vmap(one, (None, 0, 0))(params, x, y)
    got, _ = mt.micro_grad(loss, batch_argnums=(1, 2), microbatch_size=size, transform_fn=transform)(params, x, y)
    assert got.keys() == want.keys()
    for k, g in got.items():
        torch.testing.assert_close(g, want[k].sum(0))


_SIDE = 512
_STILL = {
    "stopped": lambda p, x: (x @ jax.lax.stop_gradient(p["w"]) @ p["b"]).sum(),
    "unreached": lambda p, x: jnp.tanh(x @ p["b"]).sum(),
    "times zero": lambda p, x: (x @ p["b"]).sum() + 0 * p["w"].sum(),
    "rounded": lambda p, x: jnp.tanh(x @ jnp.round(p["w"]) @ p["b"]).sum(),
    "the same for all": lambda p, x: (x @ p["b"]).sum() + (p["w"] ** 2).sum(),
    "multiplied by a number of each": lambda p, x: jnp.tanh((x @ p["b"]).sum() + (p["w"] * jnp.int32(0)).sum()),
}
_OPTIONS = [{}, {"transform_fn": entries}, {"metrics_fn": norm, "accumulator": AccumulationType.MEAN}]


@pytest.mark.parametrize("name", [n if n in ("stopped", "rounded") else _SLOW(n) for n in _STILL])
def test_gradients_that_are_the_same_for_all_are_not_stacked(name):
    params = {"w": jnp.full((_SIDE, _SIDE), 0.25), "b": jnp.full((_SIDE, 1), 0.5), "n": jnp.zeros((_SIDE, _SIDE), int)}
    x = jnp.ones((64, _SIDE))
    for options in _OPTIONS:
        fun = micro_grad(_STILL[name], microbatch_size=32, **options)
        compiled = jax.jit(lambda p, fun=fun: fun(p, x)[0]).lower(params).compile()
        assert compiled.memory_analysis().temp_size_in_bytes < 4 * 4 * _SIDE**2  # stacked: 32 times this for each
        floats = {k: params[k] for k in ("b", "w")}
        one = jax.grad(lambda p: _STILL[name](params | p, x[:1]))(floats) | {"n": params["n"]}
        count = 1 if "accumulator" in options else len(x)
        want = jax.tree.map(functools.partial(operator.mul, count), options.get("transform_fn", lambda g: g)(one))
        assert_same(compiled(params), want)


@pytest.mark.parametrize("how", ["frozen", *map(_SLOW, ("detached", "unreached", "trained"))])
def test_frozen_parameters_of_torch_are_not_stacked(how):
    model = torch.nn.Sequential(torch.nn.Linear(_SIDE, _SIDE, bias=False), torch.nn.Linear(_SIDE, 1))
    first, last = model[0].weight.requires_grad_(how != "frozen"), model[1]

    def loss(p, x):
        hidden = x if how == "unreached" else x @ (p["0.weight"].detach() if how == "detached" else p["0.weight"])
        return torch.tanh(hidden @ p["1.weight"].T + p["1.bias"]).sum()

    params, x = dict(model.named_parameters()), torch.ones(64, _SIDE) / _SIDE
    assert first.numel() > last.weight.numel()
    clamp = lambda grads: {k: g.clamp(-1, 1) for k, g in grads.items()}
    for fun in (
        mt.micro_grad(loss, microbatch_size=32),
        mt.micro_grad(loss, microbatch_size=32, transform_fn=clamp, metrics_fn=mt.global_norm),
        mt.clipped_grad(loss, l2_clip_norm=1.0, microbatch_size=32, pre_clipping_transform=clamp),
    ):
        assert fun.compiled(params, x).memory_analysis().temp_size_in_bytes < 4 * 4 * first.numel()
