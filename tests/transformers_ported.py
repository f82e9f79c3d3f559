"""A small transformer in torch and its ports to plain JAX and to equinox, with one fault at a time to plant."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import torch
import torch.nn.functional as F
from torch import nn

WORDS, WIDTH, HEADS, LENGTH, LAYERS, RATE = 13, 16, 2, 6, 2, 0.25
# Each fault is planted in the second block alone; the submodule that holds it.
FAULTS = {
    "transposed weight": "blocks.1.attn.q",
    "tanh gelu": "blocks.1.ff.act",
    "epsilon": "blocks.1.norm2",
    "missing scale": "blocks.1.attn",
    "shifted mask": "blocks.1.attn",
    "dropout scaling": "blocks.1.ff.drop",
    "bfloat16": "blocks.1.ff.down",
}


# torch


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.drop = nn.Dropout(RATE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (f(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        scores = q @ k.mT * q.shape[-1] ** -0.5
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        weights = self.drop(scores.masked_fill(~mask, -torch.inf).softmax(-1))
        return self.o((weights @ v).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(RATE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.down(self.act(self.up(x))))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2, self.ff = (
            nn.LayerNorm(WIDTH),
            Attention(),
            nn.LayerNorm(WIDTH),
            FeedForward(),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.ff(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.pos = nn.Embedding(WORDS, WIDTH), nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.pos
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class LanguageLoss(nn.Module):
    """The transformer with its loss, the mean over the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Transformer()

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.model(tokens).flatten(0, 1), targets.flatten())


def make_transformer(seed: int = 0, training: bool = False) -> Transformer:
    """Weights large enough for every part to matter, scales and biases of the norms included."""
    torch.manual_seed(seed)
    model = Transformer().train(training)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_((1.0 if "norm" in name and "weight" in name else 0.0) + 0.3 * torch.randn_like(p))
    return model


def make_tokens(seed: int = 0, batch: int = 3) -> torch.Tensor:
    return torch.randint(WORDS, (batch, LENGTH), generator=torch.Generator().manual_seed(seed))


# Plain JAX: parameters in a dict, kernels [in, out]


def plain_params(model: Transformer) -> dict[str, Any]:
    array = lambda t: jnp.asarray(t.detach().numpy())
    linear = lambda m: {"kernel": array(m.weight.T), "bias": array(m.bias)}
    norm = lambda m: {"scale": array(m.weight), "bias": array(m.bias)}
    layer = lambda b: {
        "ln1": norm(b.norm1),
        "attention": {"wq": linear(b.attn.q), "wk": linear(b.attn.k), "wv": linear(b.attn.v), "wo": linear(b.attn.o)},
        "ln2": norm(b.norm2),
        "mlp": {"up": linear(b.ff.up), "down": linear(b.ff.down)},
    }
    return {
        "embedding": array(model.embed.weight),
        "position": array(model.pos),
        "layers": [layer(block) for block in model.blocks],
        "ln": norm(model.norm),
        "head": linear(model.head),
    }


def _drop(x: Any, key: Any, scaled: bool = True) -> Any:
    if key is None:
        return x if scaled else x * (1 - RATE)
    kept = jnp.where(jax.random.bernoulli(key, 1 - RATE, x.shape), x, 0)
    return kept / (1 - RATE) if scaled else kept


def _linear(p: Any, x: Any, coarse: bool = False) -> Any:
    if coarse:
        half = lambda a: a.astype(jnp.bfloat16)
        return (half(x) @ half(p["kernel"])).astype(x.dtype) + p["bias"]
    return x @ p["kernel"] + p["bias"]


def _norm(p: Any, x: Any, eps: float = 1e-5) -> Any:
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + eps) * p["scale"] + p["bias"]


def _attend(p: Any, x: Any, key: Any, fault: str) -> Any:
    batch, length, _ = x.shape
    heads = lambda y: y.reshape(batch, length, HEADS, -1)
    q, k, v = (heads(_linear(p[name], x)) for name in ("wq", "wk", "wv"))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    if fault != "missing scale":
        scores = scores / jnp.sqrt(q.shape[-1])
    mask = jnp.tril(jnp.ones((length, length), bool), 1 if fault == "shifted mask" else 0)
    weights = _drop(jax.nn.softmax(jnp.where(mask, scores, -jnp.inf)), key)
    return _linear(p["wo"], jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape))


def plain_transformer(params: Any, tokens: Any, key: Any = None, fault: str = "") -> Any:
    x = params["embedding"][tokens] + params["position"]
    for i, p in enumerate(params["layers"]):
        planted = fault if i == 1 else ""
        keys = (None, None) if key is None else jax.random.split(jax.random.fold_in(key, i))
        if planted == "transposed weight":
            wq = p["attention"]["wq"]
            p = {**p, "attention": {**p["attention"], "wq": {**wq, "kernel": wq["kernel"].T}}}
        x = x + _attend(p["attention"], _norm(p["ln1"], x), keys[0], planted)
        y = _linear(p["mlp"]["up"], _norm(p["ln2"], x, 1e-6 if planted == "epsilon" else 1e-5))
        y = jax.nn.gelu(y, approximate=planted == "tanh gelu")
        y = _linear(p["mlp"]["down"], y, planted == "bfloat16")
        x = x + _drop(y, keys[1], planted != "dropout scaling")
    return _linear(params["head"], _norm(params["ln"], x))


def scanned_params(params: Any) -> Any:
    """The layers' leaves stacked, for a scan over them."""
    return {**params, "layers": jax.tree.map(lambda *leaves: jnp.stack(leaves), *params["layers"])}


def scanned_transformer(params: Any, tokens: Any, fault: str = "") -> Any:
    def step(x: Any, p: Any) -> Any:
        x = x + _attend(p["attention"], _norm(p["ln1"], x), None, fault)
        y = jax.nn.gelu(_linear(p["mlp"]["up"], _norm(p["ln2"], x)), approximate=fault == "tanh gelu")
        return x + _linear(p["mlp"]["down"], y), None

    x, _ = jax.lax.scan(step, params["embedding"][tokens] + params["position"], params["layers"])
    return _linear(params["head"], _norm(params["ln"], x))


def plain_loss(params: Any, tokens: Any, targets: Any) -> Any:
    logits = jax.nn.log_softmax(plain_transformer(params, tokens))
    return -jnp.take_along_axis(logits, targets[..., None], -1).mean()


# equinox: modules of one example, mapped over the batch


class EqxBlock(eqx.Module):
    norm1: eqx.nn.LayerNorm
    attn: eqx.nn.MultiheadAttention
    norm2: eqx.nn.LayerNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    drop: eqx.nn.Dropout
    fault: str = eqx.field(static=True)

    def __init__(self, fault: str, key: Any) -> None:
        keys = jax.random.split(key, 3)
        bias = {f"use_{name}_bias": True for name in ("query", "key", "value", "output")}
        self.norm1 = eqx.nn.LayerNorm(WIDTH)
        self.attn = eqx.nn.MultiheadAttention(HEADS, WIDTH, dropout_p=RATE, **bias, key=keys[0])
        self.norm2 = eqx.nn.LayerNorm(WIDTH, eps=1e-6 if fault == "epsilon" else 1e-5)
        self.up, self.down = eqx.nn.Linear(WIDTH, 2 * WIDTH, key=keys[1]), eqx.nn.Linear(2 * WIDTH, WIDTH, key=keys[2])
        self.drop, self.fault = eqx.nn.Dropout(RATE), fault

    def __call__(self, x: Any, key: Any) -> Any:
        keys = (None, None) if key is None else jax.random.split(key)
        y = jax.vmap(self.norm1)(x)
        mask = jnp.tril(jnp.ones((LENGTH, LENGTH), bool), 1 if self.fault == "shifted mask" else 0)
        attn = self.attn
        if self.fault == "transposed weight":
            attn = eqx.tree_at(lambda a: a.query_proj.weight, attn, attn.query_proj.weight.T)
        if self.fault == "missing scale":
            larger = lambda m: (m.weight * (WIDTH / HEADS) ** 0.5, m.bias * (WIDTH / HEADS) ** 0.5)
            leaves = lambda a: (a.query_proj.weight, a.query_proj.bias)
            attn = eqx.tree_at(leaves, attn, larger(attn.query_proj))
        x = x + attn(y, y, y, mask, inference=key is None, key=keys[0])
        y = jax.nn.gelu(jax.vmap(self.up)(jax.vmap(self.norm2)(x)), approximate=self.fault == "tanh gelu")
        if self.fault == "bfloat16":
            y = jax.vmap(lambda v: (self.down.weight.astype(jnp.bfloat16) @ v.astype(jnp.bfloat16)).astype(v.dtype))(y)
            y = y + self.down.bias
        else:
            y = jax.vmap(self.down)(y)
        dropped = self.drop(y, inference=key is None, key=keys[1])
        return x + (dropped * (1 - RATE) if self.fault == "dropout scaling" else dropped)


class EqxTransformer(eqx.Module):
    embed: eqx.nn.Embedding
    pos: jax.Array
    blocks: list[EqxBlock]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, fault: str = "") -> None:
        keys = jax.random.split(jax.random.key(0), LAYERS + 2)
        self.embed, self.pos = eqx.nn.Embedding(WORDS, WIDTH, key=keys[0]), jnp.zeros((LENGTH, WIDTH))
        self.blocks = [EqxBlock(fault if i == 1 else "", keys[i + 2]) for i in range(LAYERS)]
        self.norm, self.head = eqx.nn.LayerNorm(WIDTH), eqx.nn.Linear(WIDTH, WORDS, key=keys[1])

    def __call__(self, tokens: Any, key: Any = None) -> Any:
        keys = None if key is None else jax.random.split(key, tokens.shape[0])
        return jax.vmap(self.example, in_axes=(0, None if key is None else 0))(tokens, keys)

    def example(self, tokens: Any, key: Any) -> Any:
        x = jax.vmap(self.embed)(tokens) + self.pos
        for i, block in enumerate(self.blocks):
            x = block(x, None if key is None else jax.random.fold_in(key, i))
        return jax.vmap(self.head)(jax.vmap(self.norm)(x))


def shapes_of(tree: Any) -> Any:
    """A port before its parameters are loaded: the mapping has to fill them."""
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype) if eqx.is_array(a) else a, tree)
