"""``compare``: ports that agree, faults that are found and located, rounding that is called rounding, bad input."""

from __future__ import annotations

import functools
import importlib.util
import json
import pathlib
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn
from transformers_ported import (
    FAULTS,
    EqxTransformer,
    LanguageLoss,
    make_tokens,
    make_transformer,
    plain_loss,
    plain_params,
    plain_transformer,
    scanned_params,
    scanned_transformer,
    shapes_of,
)

from microtome import torch_api as mt

KEY = jax.random.key(3)
ALONE: dict[str, Any] = {"engines": ()}  # the port alone: nothing is traced
apply_eqx = lambda model, tokens, key=None: model(tokens, key)


def transformer_port(kind: str, fault: str = "", training: bool = False) -> tuple[Any, Any, Any]:
    """The torch model, the port, and the port's parameters."""
    model, key = make_transformer(training=training), KEY if training else None
    if kind == "plain":
        return model, functools.partial(plain_transformer, key=key, fault=fault), plain_params(model)
    return model, functools.partial(apply_eqx, key=key), shapes_of(EqxTransformer(fault))


# Agreement


_SLOW = functools.partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "training"), [("plain", False), ("plain", True), ("equinox", False), ("equinox", True)]
)
def test_a_transformer_and_its_port_agree(kind: str, training: bool) -> None:
    model, fun, params = transformer_port(kind, training=training)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    report = mt.compare(model, fun, make_tokens(), params=params, **ALONE)
    report.assert_agrees()
    assert report.verdict("blocks.1.attn.q.weight", "gradients") in ("equal", "rounding")
    assert len([row for row in report.rows if row.section == "gradients"]) == len(list(model.parameters()))
    assert all(row.relative64 < 1e-12 for row in report.rows if row.section == "outputs")
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.slow
def test_a_port_that_scans_over_stacked_layers_agrees() -> None:
    model = make_transformer()
    params = shapes_of(scanned_params(plain_params(model)))
    mt.compare(model, scanned_transformer, make_tokens(), params=params, gradients=False, **ALONE).assert_agrees()
    fun = functools.partial(scanned_transformer, fault="tanh gelu")
    report = mt.compare(model, fun, make_tokens(), params=params, gradients=False, locate=True, **ALONE)
    assert report.location.module == "blocks.0.ff.act"


@pytest.mark.slow
def test_every_kind_of_derivative() -> None:
    model, shape = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), jax.ShapeDtypeStruct
    params = [
        (shape((3, 4), jnp.float32), shape((4,), jnp.float32)),
        (shape((4, 2), jnp.float32), shape((2,), jnp.float32)),
    ]
    port = lambda p, x: jnp.tanh(x @ p[0][0] + p[0][1]) @ p[1][0] + p[1][1]
    mapping = {"0.0": mt.Source("0.weight", permute=(1, 0)), "0.1": "0.bias"}
    mapping |= {"1.0": mt.Source("2.weight", permute=(1, 0)), "1.1": "2.bias"}
    options = {"params": params, "mapping": mapping, "batch_argnums": 0, "hvp": True, "random_inputs": 2}
    report = mt.compare(model, port, torch.randn(5, 3), engines=("record",), **options)
    report.assert_agrees()
    found = {(row.against, row.section) for row in report.rows}
    sections = {"outputs", "gradients", "per-example gradients", "hvp", "outputs, random input 2"}
    assert found >= {(against, section) for against in ("jax", "record") for section in sections}


@pytest.mark.slow
def test_every_kind_of_derivative_of_a_language_model() -> None:
    torch_loss = LanguageLoss()
    torch_loss.model = make_transformer()
    inner = plain_params(torch_loss.model)
    report = mt.compare(
        torch_loss,
        plain_loss,
        make_tokens(),
        make_tokens(1),
        params=inner,
        batch_argnums=(0, 1),
        hvp=True,
        random_inputs=2,
        **ALONE,
    )
    report.assert_agrees()
    assert {"outputs, random input 1", "outputs, random input 2"} <= {row.section for row in report.rows}


@pytest.mark.slow
def test_a_transformer_agrees_with_what_is_traced_of_it() -> None:
    report = mt.compare(make_transformer(), None, make_tokens(), hvp=True)
    report.assert_agrees()
    assert {row.against for row in report.rows} >= {"record"}


def test_both_engines_are_compared() -> None:
    layer = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
    report = mt.compare(layer, None, torch.randn(2, 3))
    report.assert_agrees()
    assert {row.against for row in report.rows} == {"record", "torch2jax"}
    # Its exact GELU is the tanh form: an opinion that is shown and does not count.
    report = mt.compare(torch.nn.functional.gelu, None, torch.linspace(-2, 2, 9))
    assert report.verdict("output", against="torch2jax") == "different"
    assert report.agrees


def test_an_engine_that_cannot_trace_is_a_note() -> None:
    report = mt.compare(torch.special.bessel_j0, jax.scipy.special.bessel_jn, torch.rand(3), engines=("torch2jax",))
    assert any("torch2jax" in note and "cannot trace" in note for note in report.notes)


def test_parameters_in_an_argument() -> None:
    def torch_loss(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(x @ params["layer.weight"].T) ** 2).sum()

    state, x = {"layer.weight": torch.randn(4, 3)}, torch.randn(5, 3)
    params = {"kernel": jax.ShapeDtypeStruct((3, 4), jnp.float32)}
    port = lambda p, x: (jnp.tanh(x @ p["kernel"]) ** 2).sum()
    report = mt.compare(torch_loss, port, state, x, params=params, batch_argnums=1, **ALONE)
    report.assert_agrees()
    assert report.verdict("layer.weight", "per-example gradients") in ("equal", "rounding")
    mt.compare(torch_loss, lambda p, x: (jnp.tanh(x @ p["layer.weight"].T) ** 2).sum(), state, x).assert_agrees()


def test_structures_dtypes_and_complex_numbers() -> None:
    torch_fun = lambda x: {"b": x.argmax(), "a": (x.exp(), torch.fft.fft(x)), "n": x > 0}
    jax_fun = lambda x: {"n": x > 0, "a": [jnp.exp(x), jnp.fft.fft(x)], "b": x.argmax()}
    mt.compare(torch_fun, jax_fun, torch.randn(5)).assert_agrees()
    z = torch.randn(4, dtype=torch.complex64)
    mt.compare(lambda z: (z * z).abs(), lambda z: jnp.abs(z * z), z).assert_agrees()


# Faults


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "training"), [("plain", False), ("plain", True), ("equinox", False), ("equinox", True)]
)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_and_located(fault: str, kind: str, training: bool) -> None:
    model, fun, params = transformer_port(kind, fault, training)
    report = mt.compare(model, fun, make_tokens(), params=params, gradients=False, locate=True, **ALONE)
    assert report.verdict("output") == "different"
    with pytest.raises(AssertionError, match="disagree"):
        report.assert_agrees()
    assert report.location is not None
    assert report.location.module == FAULTS[fault], report.location


def test_a_weight_that_was_loaded_transposed() -> None:
    model = make_transformer()
    params = plain_params(model)
    loaded = params["layers"][0]["attention"]["wo"]
    loaded["kernel"] = loaded["kernel"].T
    report = mt.compare(model, plain_transformer, make_tokens(), params=params, gradients=False, locate=True, **ALONE)
    row = report.disagreements()[0]
    assert {r.detail for r in report.disagreements() if r.section == "parameters"} == {"transposed"}
    assert row.verdict == "different"
    assert report.location.module == "blocks.0.attn.o"
    assert report.verdict("layers.0.attention.wo.kernel", "parameters") == "different"
    assert report.verdict("layers.1.attention.wo.kernel", "parameters") == "equal"


def test_a_wrong_derivative_alone_is_found() -> None:
    @jax.custom_jvp
    def square(x: Any) -> Any:
        return x * x

    square.defjvp(lambda primals, tangents: (primals[0] ** 2, 1.99 * primals[0] * tangents[0]))
    report = mt.compare(torch.square, square, torch.randn(3), **ALONE)
    assert report.verdict("output") in ("equal", "rounding")
    assert report.verdict("argument 0", "gradients") == "different"


@pytest.mark.slow
def test_a_rate_of_dropout_that_differs_is_a_problem() -> None:
    model = nn.Sequential(nn.Linear(3, 64), nn.Dropout(0.25)).train()
    x, w, b = torch.randn(9, 3), jnp.asarray(model[0].weight.detach()), jnp.asarray(model[0].bias.detach())
    drop = lambda x, keep: jnp.where(jax.random.bernoulli(KEY, keep, x.shape), x, 0) / keep
    right = lambda x: drop(x @ w.T + b, 0.75)
    mt.compare(model, right, x, **ALONE).assert_agrees()
    report = mt.compare(model, lambda x: drop(x @ w.T + b, 0.5), x, **ALONE)
    assert "torch keeps 0.75 of the values, JAX 0.5" in str(report)
    assert not report.agrees
    dropped_instead_of_kept = lambda x: jnp.where(jax.random.bernoulli(KEY, 0.25, (9, 64)), 0, x @ w.T + b) / 0.75
    mt.compare(model, dropped_instead_of_kept, x, **ALONE).assert_agrees()
    forgotten = mt.compare(model.eval(), right, x, **ALONE)
    assert "torch none: is the model in evaluation mode?" in str(forgotten)
    forgotten = mt.compare(model.train(), lambda x: x @ w.T + b, x, **ALONE)
    assert "the JAX function 0" in str(forgotten)


# Rounding


def test_rounding_is_told_from_a_difference_of_the_same_size() -> None:
    x = 3 + torch.randn(64, generator=torch.Generator().manual_seed(0))
    report = mt.compare(lambda x: (x - x.mean()).square().mean(), lambda x: (x**2).mean() - x.mean() ** 2, x, **ALONE)
    assert report.verdict("output") == "rounding"
    report = mt.compare(lambda x: x * 1.0, lambda x: x * (1 + 1e-7), x, **ALONE)
    assert report.verdict("output") == "different"
    assert report.rows[0].relative < 3e-7
    report = mt.compare(lambda x: x + 1, lambda x: 1 + x, x, **ALONE)
    assert report.verdict("output") == "equal"


def test_gradients_that_are_zero_but_for_rounding() -> None:
    """A bias before a softmax has no influence: both gradients are noise, and unlike each other."""
    b, x = torch.randn(4), torch.randn(5, 4)
    torch_fun = lambda b, x: ((x + b.mean()).softmax(-1) ** 2).sum()
    jax_fun = lambda b, x: (jax.nn.softmax(x + b.mean()) ** 2).sum()
    mt.compare(torch_fun, jax_fun, b, x, **ALONE).assert_agrees()


def test_both_in_bfloat16() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh()).bfloat16()
    w, b = (jnp.asarray(p.detach().float().numpy()).astype(jnp.bfloat16) for p in model.parameters())
    report = mt.compare(model, lambda x: jnp.tanh(x @ w.T.astype(x.dtype) + b), torch.randn(3, 8).bfloat16(), **ALONE)
    report.assert_agrees()


SMALL = importlib.util.spec_from_file_location("models", pathlib.Path(__file__).parents[2] / "cases" / "models.py")


def small_models(seed: int) -> dict[str, Any]:
    module = importlib.util.module_from_spec(SMALL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        SMALL.loader.exec_module(module)
    torch.manual_seed(seed)
    return {name: (model.eval(), x) for name, (model, x) in module.mk().items() if x is not None}


@pytest.mark.slow
@pytest.mark.parametrize("name", small_models(0))
def test_no_false_alarm(name: str) -> None:
    seed = 100 + len(name)
    model, x = small_models(seed)[name]
    mt.compare(model, None, x, seed=seed, engines=("record",)).assert_agrees()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_no_false_alarm_on_ported_transformers(seed: int) -> None:
    model = make_transformer(seed, training=seed % 2 == 1)
    fun = functools.partial(plain_transformer, key=jax.random.key(seed) if seed % 2 else None)
    params = plain_params(model)
    mt.compare(model, fun, make_tokens(seed), params=params, seed=seed, hvp=seed < 4, **ALONE).assert_agrees()


# Bad input


def test_structures_that_differ() -> None:
    report = mt.compare(lambda x: {"a": x, "b": x + 1}, lambda x: {"a": x, "c": x}, torch.randn(3), **ALONE)
    assert {(r.leaf, r.verdict, r.detail) for r in report.rows if r.verdict == "missing"} == {
        ("b", "missing", "only in torch"),
        ("c", "missing", "only in JAX"),
    }
    assert not report.agrees


def test_shapes_and_dtypes_that_differ() -> None:
    report = mt.compare(lambda x: x.sum(0), lambda x: x.sum(1), torch.randn(2, 3), **ALONE)
    assert report.verdict("output") == "shape"
    assert "[3] in torch, [2] in JAX" in str(report)
    report = mt.compare(lambda x: x, lambda x: x.astype(jnp.float16), torch.randn(2), **ALONE)
    assert report.verdict("output") == "dtype"
    assert not report.agrees


def test_exceptions_are_in_the_report() -> None:
    def broken(x: Any) -> Any:
        raise RuntimeError("out of luck")

    report = mt.compare(torch.sin, broken, torch.randn(2), **ALONE)
    assert "the JAX function raises RuntimeError: out of luck" in str(report)
    assert not report.agrees
    report = mt.compare(broken, jnp.sin, torch.randn(2))
    assert "the torch function raises RuntimeError: out of luck" in str(report)
    assert not report.agrees


def test_functions_that_change_from_run_to_run() -> None:
    report = mt.compare(lambda x: x + torch.randn(2), lambda x: x, torch.randn(2))
    assert "the torch function is not deterministic" in str(report)
    assert "randn" in str(report)
    generator = np.random.default_rng(0)
    report = mt.compare(torch.sin, lambda x: jnp.sin(x) + generator.normal(), torch.randn(2), **ALONE)
    assert "the JAX function is not deterministic" in str(report)
    assert not report.agrees


def test_a_jax_function_that_asks_for_values() -> None:
    report = mt.compare(
        torch.sin, lambda x: jnp.asarray(np.sin(np.asarray(x))), torch.randn(2), gradients=False, **ALONE
    )
    report.assert_agrees()


def test_options_are_checked() -> None:
    with pytest.raises(TypeError, match="torch_fun must be callable"):
        mt.compare(torch.randn(2), torch.sin)
    with pytest.raises(TypeError, match="jax_fun must be callable, got Tensor"):
        mt.compare(torch.sin, torch.randn(2))
    with pytest.raises(ValueError, match="engines must be"):
        mt.compare(torch.sin, None, torch.randn(2), engines=("xla",))
    with pytest.raises(ValueError, match="argnums must be positions among 1"):
        mt.compare(torch.sin, None, torch.randn(2), argnums=1)
    with pytest.raises(ValueError, match="one length"):
        mt.compare(torch.dot, None, torch.randn(2), torch.randn(3), batch_argnums=(0, 1))
    with pytest.raises(TypeError, match="parameters first"):
        mt.compare(torch.sin, jnp.sin, torch.randn(2), params={"w": jnp.ones(2)})


# Mappings


def test_a_mapping_with_faults_is_reported() -> None:
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    params = {"kernel": jnp.asarray(model.weight.detach().T.numpy()), "bias": jnp.asarray(model.bias.detach().numpy())}
    port = lambda p, x: x @ p["kernel"] + p["bias"]
    right = {"kernel": mt.Source("weight", permute=(1, 0)), "bias": lambda state: state["bias"]}
    mt.compare(model, port, x, params=params, mapping=right, **ALONE).assert_agrees()
    for mapping, message in (
        ({"bias": "bias"}, "no source for the JAX leaf 'kernel'"),
        ({**right, "scale": "bias"}, "names 'scale', which the JAX parameters lack"),
        ({**right, "bias": "biass"}, "'biass', which the state dict lacks"),
        ({**right, "kernel": "weight"}, r"'kernel' is [3, 2] in JAX, and [2, 3] by its source"),
        ({**right, "kernel": mt.Source("weight", permute=(0, 1, 2))}, "the source of 'kernel' fails"),
    ):
        report = mt.compare(model, port, x, params=params, mapping=mapping, **ALONE)
        assert message in str(report)
        assert not report.agrees
        assert mt.compare(model, port, x, params=shapes_of(params), mapping=mapping, **ALONE).agrees is False


def test_tied_weights_have_one_gradient() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
            self.outer.weight = self.inner.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.outer(self.inner(x).tanh())

    params = {name: {"kernel": jax.ShapeDtypeStruct((3, 3), jnp.float32)} for name in ("inner", "outer")}
    port = lambda p, x: jnp.tanh(x @ p["inner"]["kernel"]) @ p["outer"]["kernel"]
    report = mt.compare(Tied(), port, torch.randn(4, 3), params=params, hvp=True, **ALONE)
    report.assert_agrees()
    assert report.verdict("inner.weight", "hvp") in ("equal", "rounding")


# The report


def test_the_report_is_shown_saved_and_plotted(tmp_path: pathlib.Path) -> None:
    report = mt.compare(lambda x: x / (x - x), lambda x: jnp.tanh(x), torch.randn(2, 3), **ALONE)
    (row, *_) = report.disagreements()
    assert row.index == (0, 0)
    assert row.absolute == np.inf
    text = str(report)
    assert text.startswith("torch and JAX disagree in ")
    assert "[0, 0]" in text
    content = json.loads(report.to_json(tmp_path / "report.json"))
    assert content == json.loads((tmp_path / "report.json").read_text())
    assert content["agrees"] is False
    assert content["rows"][0]["leaf"] == "output"
    assert content["rows"][0]["absolute"] == "inf"
    assert "<td>different</td>" in report._repr_html_()
    report.plot(tmp_path / "errors.png")
    assert (tmp_path / "errors.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(KeyError, match="no leaf 'other'"):
        report.verdict("other")
    assert not mt.Report().agrees
