"""The models of benchmarks/clipping.py: name -> (loss(params, x, y), params, x, y), each for one batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Model = tuple[Callable[..., Any], Any, Any, Any]


def normal(*shape: int, fan_in: int = 0) -> jax.Array:
    values = np.random.default_rng(sum(shape)).normal(size=shape) / (fan_in or shape[0]) ** 0.5
    return jnp.asarray(values, jnp.float32)


def cross_entropy(logits: Any, y: Any) -> Any:
    return -jnp.sum(jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], 1))


def mlp(batch: int) -> Model:
    sizes = [(256, 512), (512, 512), (512, 10)]
    params = [(normal(i, o), jnp.zeros(o)) for i, o in sizes]

    def loss(p: Any, x: Any, y: Any) -> Any:
        for w, b in p[:-1]:
            x = jax.nn.gelu(x @ w + b, approximate=False)
        return cross_entropy(x @ p[-1][0] + p[-1][1], y)

    return loss, params, normal(batch, 256, fan_in=1), jnp.arange(batch) % 10


def conv(x: Any, w: Any, stride: int = 1) -> Any:
    return jax.lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=("NCHW", "OIHW", "NCHW"))


def cnn(batch: int) -> Model:
    p = {
        "a": normal(16, 1, 8, 8, fan_in=64),
        "b": normal(32, 16, 4, 4, fan_in=256),
        "c": normal(512, 32),
        "d": normal(32, 10),
    }

    def loss(p: Any, x: Any, y: Any) -> Any:
        x = jax.nn.relu(conv(x, p["a"], 2))
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")
        x = jax.nn.relu(conv(x, p["b"], 2))
        return cross_entropy(jax.nn.relu(x.reshape(len(x), -1) @ p["c"]) @ p["d"], y)

    return loss, p, normal(batch, 1, 28, 28, fan_in=1), jnp.arange(batch) % 10


def group_norm(x: Any, scale: Any, shift: Any) -> Any:
    grouped = x.reshape(len(x), 4, -1)
    mean, var = grouped.mean(-1, keepdims=True), grouped.var(-1, keepdims=True)
    x = ((grouped - mean) * jax.lax.rsqrt(var + 1e-5)).reshape(x.shape)
    return x * scale[:, None, None] + shift[:, None, None]


def resnet(batch: int) -> Model:
    widths = [(3, 16, 1), (16, 16, 1), (16, 32, 2), (32, 32, 1), (32, 64, 2), (64, 64, 1)]
    params: dict[str, Any] = {"out": normal(64, 10)}
    for k, (i, o, _) in enumerate(widths):
        params[f"c{k}"] = normal(o, i, 3, 3, fan_in=9 * i)
        params[f"s{k}"], params[f"h{k}"] = jnp.ones(o), jnp.zeros(o)

    def loss(p: Any, x: Any, y: Any) -> Any:
        for k, (i, o, stride) in enumerate(widths):
            h = jax.nn.relu(group_norm(conv(x, p[f"c{k}"], stride), p[f"s{k}"], p[f"h{k}"]))
            x = x + h if i == o else h
        return cross_entropy(x.mean((2, 3)) @ p["out"], y)

    return loss, params, normal(batch, 3, 32, 32, fan_in=1), jnp.arange(batch) % 10


def layer_norm(x: Any, scale: Any) -> Any:
    return scale * (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


def transformer(batch: int) -> Model:
    width, length, heads, vocabulary = 128, 32, 4, 1000
    params: dict[str, Any] = {
        "e": normal(vocabulary, width, fan_in=1),
        "p": normal(length, width),
        "out": normal(width, 10),
    }
    for k in range(2):
        params[f"layer{k}"] = {
            "qkv": normal(width, 3 * width), "o": normal(width, width), "u": normal(width, 4 * width),
            "d": normal(4 * width, width), "s": jnp.ones(width), "t": jnp.ones(width),
        }  # fmt: skip

    def block(q: Any, x: Any) -> Any:
        split = lambda a: a.reshape(len(x), length, heads, -1).swapaxes(1, 2)
        query, key, value = map(split, jnp.split(layer_norm(x, q["s"]) @ q["qkv"], 3, -1))
        mixed = jax.nn.softmax(query @ key.swapaxes(2, 3) / (width / heads) ** 0.5) @ value
        x = x + mixed.swapaxes(1, 2).reshape(x.shape) @ q["o"]
        return x + jax.nn.gelu(layer_norm(x, q["t"]) @ q["u"]) @ q["d"]

    def loss(p: Any, x: Any, y: Any) -> Any:
        h = p["e"][x] + p["p"]
        for k in range(2):
            h = block(p[f"layer{k}"], h)
        return cross_entropy(h.mean(1) @ p["out"], y)

    tokens = np.random.default_rng(0).integers(0, vocabulary, (batch, length))
    return loss, params, jnp.asarray(tokens), jnp.arange(batch) % 10


def lstm(batch: int) -> Model:
    width, length = 128, 32
    p = {"w": normal(64, 4 * width), "u": normal(width, 4 * width), "b": jnp.zeros(4 * width), "out": normal(width, 10)}

    def loss(p: Any, x: Any, y: Any) -> Any:
        def step(state: Any, xt: Any) -> Any:
            h, c = state
            i, f, g, o = jnp.split(h @ p["u"] + xt + p["b"], 4, -1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            return (jax.nn.sigmoid(o) * jnp.tanh(c), c), None

        zeros = jnp.zeros((len(x), width))
        (h, _), _ = jax.lax.scan(step, (zeros, zeros), (x @ p["w"]).swapaxes(0, 1))
        return cross_entropy(h @ p["out"], y)

    return loss, p, normal(batch, length, 64, fan_in=1), jnp.arange(batch) % 10


def embedding(batch: int) -> Model:
    p = {"e": normal(20000, 64, fan_in=1), "w": normal(64, 128), "out": normal(128, 10)}

    def loss(p: Any, x: Any, y: Any) -> Any:
        return cross_entropy(jax.nn.relu(p["e"][x].mean(1) @ p["w"]) @ p["out"], y)

    tokens = np.random.default_rng(0).integers(0, 20000, (batch, 64))
    return loss, p, jnp.asarray(tokens), jnp.arange(batch) % 10


MODELS: dict[str, Callable[[int], Model]] = {
    "MLP": mlp,
    "CNN": cnn,
    "transformer": transformer,
    "LSTM": lstm,
    "embedding": embedding,
    "ResNet": resnet,
}
