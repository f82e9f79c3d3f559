"""Models and programs as people write them, traced: values, gradients, dtypes, buffers and draws are eager torch's.

``cases/models.py`` holds 23 small models, ``cases/models_real.py`` 64 programs; none is left out.
"""

from __future__ import annotations

import copy
import importlib.util
import pathlib
import warnings
from typing import Any

import pytest
import torch
from helpers import marked, tensors_in

from microtome.bridge import as_jax, as_torch

_FOLDER = pathlib.Path(__file__).parent / "cases"


def _load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, _FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what transformers and torch say while models are built is theirs
        spec.loader.exec_module(module)
    return module


class _SelfAttention(torch.nn.Module):
    def __init__(self, attention: torch.nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: torch.Tensor) -> Any:
        return self.attention(x, x, x)


_REAL = _load("models_real")


def _small() -> dict[str, Any]:
    made = {}
    for name, (module, x) in _load("models").mk().items():
        if x is None:
            module, x = _SelfAttention(module), torch.randn(2, 3, 8)
        made[name] = _REAL.Case(module, (x,), name=name)
    return made


_SMALL = _small()


def test_none_is_left_out() -> None:
    assert len(_SMALL) == 23
    assert len(_REAL.CASES) == 64, "transformers and einops have to be installed: some cases need them"


def _build(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return copy.deepcopy(_SMALL[name]) if name in _SMALL else _REAL.build(name)


def _differentiable(t: torch.Tensor) -> bool:
    return t.is_floating_point() or t.is_complex()


def _run(module: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Outputs, and gradients of one fixed random combination of the outputs that have any."""
    inputs = tuple(x.clone().requires_grad_() if _differentiable(x) else x for x in inputs)
    outputs = tensors_in(module(*inputs))
    generator = torch.Generator().manual_seed(0)
    moving = [torch.view_as_real(o) if o.is_complex() else o for o in outputs if o.requires_grad]
    total = sum((o * torch.randn(o.shape, generator=generator, dtype=torch.float64)).sum() for o in moving)
    if moving:
        total.backward()
    parameters = module.named_parameters() if isinstance(module, torch.nn.Module) else ()
    leaves = {**dict(parameters), **{f"input {i}": x for i, x in enumerate(inputs)}}
    return outputs, {name: None if t.grad is None else t.grad.detach() for name, t in leaves.items()}


def _check(name: str, got: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    assert got.dtype == expected.dtype, name
    assert got.shape == expected.shape, name
    wide = torch.complex128 if expected.is_complex() else torch.float64
    scale = max(1.0, expected.abs().max().item()) if expected.numel() else 1.0
    torch.testing.assert_close(
        got.detach().to(wide),
        expected.detach().to(wide),
        rtol=tolerance,
        atol=tolerance * scale,
        msg=lambda m: f"{name}: {m}",
    )


# The largest programs, and those that others resemble.
_SLOW = {
    *("bert_train", "bert", "distilbert", "gpt2_labels", "vit_hf", "vit_hand", "lstm_bidir_h0", "lstm_lm", "lstm"),
    *("resnet_bn_eval", "resnet_bn_train", "neural_ode_rk4", "sort_cumsum", "tel_eval", "rnn_cell_loop", "mlp_mixer"),
    *("dropout_train", "interpolate", "inplace_random", "convnext", "moe_topk", "gru", "vae_rsample", "maml_inner"),
    *("ctc", "dropout_module", "gpt2", "losses_inside", "tel"),
    *("bf16_params", "activations", "deconv_upsample", "gnn_index_add", "losses", "dist_logprob"),
    *("misc", "gp_linalg", "cnn_gn_avgpool", "randn_ctor", "pinn_autograd_grad", "func_grad_novmap", "embedding_bag"),
    *(
        "tied_embeddings",
        "depthwise_conv",
        "conv3d",
        "complex_layer",
        "einops_fn",
        "sqrt_norm_zero",
        "bool_index_const",
    ),
    *("spectral_norm", "frozen_params", "pixel_shuffle", "mask", "siren", "float64_params", "randn_like_noise"),
    *("func_vmap", "dtype_promotion", "mlp", "bn_eval", "sdpa_bool_mask", "dropout_eval", "inplace_view_alias"),
}


@pytest.mark.parametrize("name", marked((*_SMALL, *_REAL.CASES), slow=_SLOW))
def test_case(name: str) -> None:
    case = _build(name)
    traced = copy.deepcopy(case.mod)
    call = as_torch(as_jax(traced))
    if case.expect == "error":
        with pytest.raises(TypeError, match=r"models_real\.py:\d+: "):
            call(*case.inputs)
        assert all(type(t) in (torch.Tensor, torch.nn.Parameter) for t in traced.state_dict(keep_vars=True).values())
        return
    if case.random:
        _check_random(case, call)
        return

    def module(*inputs: torch.Tensor) -> Any:
        return call(*inputs)

    outputs, gradients = _run(module, case.inputs)
    gradients |= {k: None if p.grad is None else p.grad for k, p in traced.named_parameters()}
    expected_outputs, expected_gradients = _run(case.mod, case.inputs)
    assert len(outputs) == len(expected_outputs)
    for i, (got, expected) in enumerate(zip(outputs, expected_outputs, strict=True)):
        _check(f"output {i}", got, expected, case.tol)
        assert got.requires_grad == expected.requires_grad, f"output {i}"
    assert gradients.keys() == expected_gradients.keys()
    for key, expected in expected_gradients.items():
        got = gradients[key]
        if expected is None:  # unreached: None in torch, zeros here
            assert got is None or not got.any(), key
        else:
            _check(f"gradient of {key}", got, expected, 5 * case.tol)
    changed = False
    start = dict(_build(name).mod.named_buffers())
    for (key, got), expected in zip(traced.named_buffers(), case.mod.buffers(), strict=True):
        _check(f"buffer {key}", got, expected, case.tol)
        changed |= not torch.equal(got, start[key])
    assert changed == case.mutates


def _check_random(case: Any, call: Any) -> None:
    torch.manual_seed(1)
    first = tensors_in(call(*case.inputs))
    second = tensors_in(call(*case.inputs))
    torch.manual_seed(1)
    again = tensors_in(call(*case.inputs))
    for one, two, three in zip(first, second, again, strict=True):
        assert not torch.equal(one, two), "two calls drew the same"
        assert torch.equal(one, three), "the same seed drew something else"
    for got, expected in zip(first, tensors_in(case.mod(*case.inputs)), strict=True):
        assert got.dtype == expected.dtype
        assert got.shape == expected.shape
    if case.stat is not None:
        torch.manual_seed(2)
        expected = case.stat([o.detach() for o in tensors_in(case.mod(*case.inputs))])
        assert case.stat([o.detach() for o in first]) == pytest.approx(expected, abs=0.15 * max(1.0, abs(expected)))
    _, gradients = _run(call, case.inputs)
    assert all(g is None or torch.isfinite(g).all() for g in gradients.values())
