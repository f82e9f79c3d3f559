"""``propose_mapping``: from names and shapes to the torch source of each leaf."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from torch import nn
from transformers_ported import EqxTransformer, make_transformer, plain_params, scanned_params, shapes_of

from microtome import torch_api as mt
from microtome.torch_api.compare.mapping import leaf_tensors, named_tensors

shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)


def proposed(module: nn.Module, params: Any) -> dict[str, str]:
    return {path: str(source) for path, source in mt.propose_mapping(module, params).items()}


def test_flax_names_of_a_convolutional_network() -> None:
    module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.GroupNorm(2, 8), nn.Flatten(), nn.Linear(32, 10))
    params = {
        "Conv_0": {"kernel": shape(3, 3, 3, 8), "bias": shape(8)},
        "Conv_1": {"kernel": shape(3, 3, 8, 8), "bias": shape(8)},
        "GroupNorm_0": {"scale": shape(8), "bias": shape(8)},
        "Dense_0": {"kernel": shape(32, 10), "bias": shape(10)},
    }
    assert proposed(module, {"params": params}) == {
        "params.Conv_0.kernel": "0.weight; axes in the order (2, 3, 1, 0)",
        "params.Conv_0.bias": "0.bias",
        "params.Conv_1.kernel": "1.weight; axes in the order (2, 3, 1, 0)",
        "params.Conv_1.bias": "1.bias",
        "params.GroupNorm_0.scale": "2.weight",
        "params.GroupNorm_0.bias": "2.bias",
        "params.Dense_0.kernel": "4.weight; axes in the order (1, 0)",
        "params.Dense_0.bias": "4.bias",
    }


def test_fused_projections_with_heads() -> None:
    params = {name: {"kernel": shape(8, 2, 4), "bias": shape(2, 4)} for name in ("query", "key", "value")}
    params["out"] = {"kernel": shape(2, 4, 8), "bias": shape(8)}
    found = proposed(nn.MultiheadAttention(8, 2), params)
    assert found["query.kernel"] == "in_proj_weight; rows 0 to 8; axes in the order (1, 0); shape (8, 2, 4)"
    assert found["key.bias"] == "in_proj_bias; rows 8 to 16; shape (2, 4)"
    assert found["value.kernel"] == "in_proj_weight; rows 16 to 24; axes in the order (1, 0); shape (8, 2, 4)"
    assert found["out.kernel"] == "out_proj.weight; axes in the order (1, 0); shape (2, 4, 8)"


def test_projections_that_the_port_fuses() -> None:
    module = nn.ModuleDict({name: nn.Linear(4, 4) for name in ("q_proj", "k_proj", "v_proj", "o_proj")})
    params = {"qkv": {"kernel": shape(4, 12), "bias": shape(12)}, "out": {"kernel": shape(4, 4), "bias": shape(4)}}
    mapping = mt.propose_mapping(module, params)
    assert str(mapping["qkv.bias"]) == "q_proj.bias, k_proj.bias, v_proj.bias; concatenated along axis 0"
    assert mapping["qkv.kernel"].concat == 1
    made = leaf_tensors(mapping, named_tensors(module))
    assert torch.equal(made["qkv.kernel"][:, 4:8], module["k_proj"].weight.T)
    assert torch.equal(made["out.kernel"], module["o_proj"].weight.T)


@pytest.mark.parametrize("kind", ["plain", "scanned", "equinox"])
def test_a_transformer(kind: str) -> None:
    model = make_transformer()
    values = {"plain": plain_params(model), "scanned": scanned_params(plain_params(model))}
    params = values.get(kind, EqxTransformer())
    made = leaf_tensors(mt.propose_mapping(model, shapes_of(params)), named_tensors(model))
    if kind == "equinox":  # its names are torch's but for a few
        assert torch.equal(made["blocks.1.attn.query_proj.weight"], model.blocks[1].attn.q.weight)
        assert torch.equal(made["blocks.0.attn.output_proj.bias"], model.blocks[0].attn.o.bias)
        assert torch.equal(made["blocks.1.up.weight"], model.blocks[1].ff.up.weight)
        assert len(made) == len(list(model.parameters()))
        return
    for path, value in jax.tree_util.tree_flatten_with_path(params)[0]:
        name = ".".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path)
        assert torch.equal(made[name], torch.from_numpy(jax.device_get(value).copy())), name


def test_values_tell_how_square_weights_lie() -> None:
    module = nn.ModuleList(nn.Linear(3, 3, bias=False) for _ in range(3))
    array = lambda i: jnp.asarray(module[i].weight.detach().numpy())
    as_they_are = [{"kernel": array(i)} for i in range(3)]
    assert all(source.permute is None for source in mt.propose_mapping(module, as_they_are).values())
    turned = [{"kernel": array(i).T} for i in range(3)]
    turned[1]["kernel"] = array(1)  # loaded wrongly: the others outvote it
    assert all(source.permute == (1, 0) for source in mt.propose_mapping(module, turned).values())


@pytest.mark.parametrize("names", [("wi", "wh"), ("Wx", "Wh"), ("w_ih", "w_hh"), ("kernel_input", "kernel_recurrent")])
def test_recurrent_weights_of_one_shape(names: tuple[str, str]) -> None:
    """With as many inputs as states only the names tell the two apart."""
    params = {"cell": {names[0]: shape(5, 20), names[1]: shape(5, 20), "bi": shape(20), "bh": shape(20)}}
    mapping = mt.propose_mapping(nn.ModuleDict({"rnn": nn.LSTM(5, 5)}), params)
    assert mapping[f"cell.{names[0]}"] == mt.Source("rnn.weight_ih_l0", permute=(1, 0))
    assert mapping[f"cell.{names[1]}"] == mt.Source("rnn.weight_hh_l0", permute=(1, 0))
    assert (str(mapping["cell.bi"]), str(mapping["cell.bh"])) == ("rnn.bias_ih_l0", "rnn.bias_hh_l0")


def test_what_does_not_fit_is_left_out() -> None:
    mapping = mt.propose_mapping(nn.Linear(3, 2), {"kernel": shape(3, 2), "table": shape(7, 5)})
    assert list(mapping) == ["kernel"]
    assert str(mapping) == "kernel <- weight; axes in the order (1, 0)"
    assert mt.propose_mapping(nn.ReLU(), {"kernel": shape(3, 2)}) == {}


def array(tensor: torch.Tensor) -> jax.Array:
    return jnp.asarray(tensor.detach().numpy())


def test_values_tell_the_order_of_axes_of_equal_sizes() -> None:
    torch.manual_seed(0)
    conv, turned, uneven, line = (
        nn.Conv2d(3, 3, 3),
        nn.ConvTranspose2d(4, 4, 4),
        nn.ConvTranspose1d(3, 5, 2),
        nn.Linear(4, 4),
    )
    for module, order, flip in (
        (conv, (2, 3, 1, 0), None),
        (conv, (1, 2, 3, 0), None),
        (conv, None, None),
        (turned, (2, 3, 1, 0), None),
        (turned, (2, 3, 0, 1), (2, 3)),
        (uneven, (2, 0, 1), (2,)),
        (line, (1, 0), None),
        (line, None, None),
    ):
        source = mt.Source("weight", permute=order, flip=flip)
        for dtype in (jnp.float32, jnp.bfloat16):
            for name in ("kernel", "weight"):
                params = {name: array(source(named_tensors(module))).astype(dtype)}
                assert mt.propose_mapping(module, params) == {name: source}
    assert "axes (2, 3) reversed; axes in the order (2, 3, 0, 1)" in str(
        mt.Source("w", permute=(2, 3, 0, 1), flip=(2, 3))
    )
    nn.init.zeros_(conv.weight)  # values that tell nothing
    assert mt.propose_mapping(conv, {"kernel": jnp.zeros((3, 3, 3, 3))})["kernel"].permute == (2, 3, 1, 0)


def test_values_tell_which_tensor_a_leaf_holds() -> None:
    torch.manual_seed(0)
    module = nn.ModuleDict({name: nn.Linear(4, 4, bias=False) for name in ("q_proj", "k_proj", "v_proj")})
    q, k, v = (array(linear.weight) for linear in module.values())
    mapping = mt.propose_mapping(module, {"first": q.T, "second": v.T, "third": k})
    assert [source.names for source in mapping.values()] == ["q_proj.weight", "v_proj.weight", "k_proj.weight"]
    assert [source.permute for source in mapping.values()] == [(1, 0), (1, 0), None]
    fused = mt.propose_mapping(module, {"qkv": {"kernel": jnp.concatenate([k, q, v], 1)}})["qkv.kernel"]
    assert fused == mt.Source(("k_proj.weight", "q_proj.weight", "v_proj.weight"), concat=1)
    layer = nn.ParameterDict({"w": torch.randn(2, 3, 5), "c": torch.randn(3, 3, dtype=torch.complex64)})
    made = {"w": array(layer["w"].permute(1, 0, 2)), "c": array(layer["c"].T)}
    assert mt.propose_mapping(layer, made) == {
        "c": mt.Source("c", permute=(1, 0)),
        "w": mt.Source("w", permute=(1, 0, 2)),
    }


def test_shapes_of_other_convolutions_tell_the_order_of_axes() -> None:
    module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 8))
    params = {"Conv_0": {"kernel": shape(3, 3, 3, 8)}, "Conv_1": {"kernel": shape(8, 8, 8, 8)}}
    assert all(source.permute == (2, 3, 1, 0) for source in mt.propose_mapping(module, params).values())


def test_a_port_whose_sizes_are_equal_agrees() -> None:
    torch.manual_seed(0)
    conv, x = nn.ConvTranspose2d(3, 3, 3, bias=False), torch.randn(2, 3, 5, 5)
    params = {"kernel": array(conv.weight.flip(2, 3).permute(2, 3, 0, 1))}
    layout = ("NCHW", "HWIO", "NCHW")
    port = lambda p, x: jax.lax.conv_general_dilated(x, p["kernel"], (1, 1), [(2, 2), (2, 2)], dimension_numbers=layout)
    mt.compare(conv, port, x, params=params, engines=()).assert_agrees()
