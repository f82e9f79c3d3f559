"""Losses whose per-example gradients stay factors, one for each kind of parameter use: name -> Case."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

ROWS = 5
CASES: dict[str, Case] = {}


@dataclasses.dataclass(frozen=True)
class Case:
    """``loss(params, example)`` with a batch; ``factored`` names parameters that must not become arrays."""

    loss: Callable[..., Any]
    params: dict[str, Any]
    batch: Any
    factored: tuple[str, ...]


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape) + len(shape)).normal(size=shape) * 0.4


def tokens(*shape: int, size: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, size, shape).astype(np.int32)


def case(params: dict[str, Any], batch: Any, factored: str) -> Any:
    """Register a loss; ``factored`` lists names."""

    def register(loss: Any) -> Any:
        CASES[loss.__name__] = Case(loss, params, batch, tuple(factored.split()))
        return loss

    return register


def total(h: Any) -> Any:
    return jnp.sum(jnp.tanh(h) ** 2)


@case({"w": normal(12, 20), "b": normal(20), "v": normal(20, 9)}, normal(ROWS, 12), "w v")
def dense(p, x):
    return total(jnp.tanh(x @ p["w"] + p["b"]) @ p["v"])


@case({"w": normal(20, 30), "v": normal(30, 24)}, normal(ROWS, 3, 20), "w v")
def sequence_by_gram_matrices(p, x):
    return total(jnp.tanh(x @ p["w"]) @ p["v"])


@case({"w": normal(4, 5), "v": normal(5, 3)}, normal(ROWS, 40, 4), "")
def sequence_longer_than_the_layer(p, x):
    return total(jnp.tanh(x @ p["w"]) @ p["v"])


@case({"w": normal(40, 4, 5)}, normal(ROWS, 40, 6, 4), "")
def batched_product(p, x):
    return total(jnp.einsum("ntab,abc->ntac", x.transpose(0, 2, 1, 3), p["w"]))


def _conv(x: Any, w: Any, spatial: int, **options: Any) -> Any:
    letters = "HWD"[:spatial]
    numbers = ("NC" + letters, "OI" + letters, "NC" + letters)
    options = {"window_strides": (1,) * spatial, "padding": "SAME"} | options
    return jax.lax.conv_general_dilated(x, w, dimension_numbers=numbers, **options)


@case({"a": normal(16, 8, 3), "b": normal(4, 16, 5)}, normal(ROWS, 8, 6), "a b")
def convolution_1d(p, x):
    return total(_conv(jnp.tanh(_conv(x, p["a"], 1)), p["b"], 1, window_strides=(2,)))


@case({"a": normal(12, 6, 3, 3), "b": normal(3, 12, 3, 3)}, normal(ROWS, 6, 5, 5), "a b")
def convolution_2d_strided_and_dilated(p, x):
    h = jnp.tanh(_conv(x, p["a"], 2, window_strides=(2, 1), padding=((1, 0), (2, 1))))
    return total(_conv(h, p["b"], 2, rhs_dilation=(1, 2)))


@case({"a": normal(8, 1, 5, 4), "b": normal(26, 1, 5, 5), "c": normal(9, 2, 3, 4)}, normal(ROWS, 1, 5, 5), "a b c")
def convolution_of_few_channels(p, x):
    """The taps of a row of the kernel are taken together, or all of them."""
    h = _conv(x, p["a"], 2, window_strides=(3, 3)), _conv(x, p["b"], 2, window_strides=(3, 3))
    twice = jnp.concatenate([x, x[:, :, ::-1]], 1)
    return sum(map(total, h)) + total(_conv(twice, p["c"], 2, rhs_dilation=(2, 1), padding="VALID"))


@case({"a": normal(8, 6, 2, 3, 2)}, normal(ROWS, 6, 3, 3, 3), "a")
def convolution_3d(p, x):
    return total(_conv(x, p["a"], 3))


@case({"a": normal(16, 4, 3, 3), "b": normal(16, 1, 3, 3)}, normal(ROWS, 8, 3, 3), "a")
def convolution_grouped_and_depthwise(p, x):
    h = jnp.tanh(_conv(x, p["a"], 2, feature_group_count=2))
    return total(_conv(h, p["b"], 2, feature_group_count=16))


@case({"a": normal(3, 3, 6, 10)}, normal(ROWS, 3, 3, 6), "a")
def convolution_transposed(p, x):
    numbers = ("NHWC", "HWIO", "NHWC")
    return total(jax.lax.conv_transpose(x, p["a"], (2, 2), "SAME", dimension_numbers=numbers))


@case({"a": normal(16, 10, 3, 3)}, normal(ROWS, 16, 3, 3), "a")
def convolution_transposed_with_flipped_kernel(p, x):
    return total(_conv(x, jnp.flip(p["a"], (2, 3)).swapaxes(0, 1), 2, lhs_dilation=(2, 2), padding=((2, 2), (2, 2))))


@case({"a": normal(3, 3, 5, 12)}, normal(ROWS, 4, 4, 5), "a")
def convolution_channels_last(p, x):
    return total(jax.lax.conv_general_dilated(x, p["a"], (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")))


@case({"a": normal(30, 6, 3, 3)}, normal(ROWS, 6, 4, 4), "a")
def convolution_with_a_standardised_kernel(p, x):
    a = p["a"] - p["a"].mean((1, 2, 3), keepdims=True)
    return total(_conv(x, a / a.std((1, 2, 3), keepdims=True), 2))


@case({"a": normal(30, 6, 3, 3), "m": normal(30, 6, 3, 3), "b": normal(30, 6, 3)}, normal(ROWS, 6, 3, 3), "a b m")
def convolution_with_a_kernel_of_products(p, x):
    """The kernel's gradient is multiplied by arrays that have its taps, all of them or along one axis."""
    mask = np.arange(9).reshape(3, 3) % 2
    h = jnp.tanh(_conv(x, p["a"] * mask * jnp.exp(p["a"]), 2)) + _conv(x, p["b"][..., None] * mask, 2)
    return total(h + _conv(x, p["a"] * jnp.tanh(p["m"]), 2))


@case({"e": normal(30, 7), "w": normal(7, 11)}, tokens(ROWS, 9, size=4), "e")
def embedding_with_repeated_indices(p, x):
    return total(jnp.tanh(p["e"][x]) @ p["w"])


@case({"e": normal(30, 7), "f": normal(7, 30)}, tokens(ROWS, 3, size=6), "e f")
def embedding_tied_to_the_output(p, x):
    return total(jnp.tanh(p["e"][x]) @ p["e"].T) + total(p["f"][:, x[0]])


@case({"e": normal(4, 6, 9)}, tokens(ROWS, 2, size=4), "e")
def embedding_of_two_indices(p, x):
    return total(p["e"][x[0, 0], x[0, 1]]) + total(p["e"][x[0, 1]][2])


@case({"e": normal(9, 8)}, tokens(ROWS, 4, size=6), "e")
def embedding_with_a_gradient_that_all_share(p, x):
    return jnp.sum(p["e"][x]) + jnp.sum(p["e"][:2])


@case({"e": normal(20, 6)}, tokens(ROWS, 3, size=25), "e")
def embedding_out_of_bounds(p, x):
    return total(jnp.take(p["e"], x, axis=0, mode="fill", fill_value=0.5)) + total(p["e"].at[x].get(mode="clip"))


@case({"w": normal(16, 16), "s": normal(16), "o": normal(16)}, normal(ROWS, 2, 16), "w")
def layer_norm(p, x):
    h = x @ p["w"]
    h = (h - h.mean(-1, keepdims=True)) / jnp.sqrt(h.var(-1, keepdims=True) + 1e-5)
    return total(h * p["s"] + p["o"])


@case({"w": normal(18, 18)}, normal(ROWS, 18), "w")
def weight_used_three_times(p, x):
    h = jnp.tanh(x @ p["w"])
    return total(jnp.tanh(h @ p["w"]) @ p["w"].T)


@case({"u": normal(14, 56), "w": normal(10, 56), "b": normal(56)}, normal(ROWS, 4, 10), "u w")
def lstm_in_a_scan(p, x):
    def step(carry, xt):
        h, c = carry
        i, f, g, o = jnp.split(h @ p["u"] + xt @ p["w"] + p["b"], 4)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        return (jax.nn.sigmoid(o) * jnp.tanh(c), c), None

    (h, _), _ = jax.lax.scan(step, (jnp.zeros(14), jnp.zeros(14)), x[0])
    return total(h)


@case({"u": normal(14, 14), "w": normal(10, 14)}, normal(ROWS, 4, 10), "u w")
def recurrence_unrolled(p, x):
    h = jnp.zeros((1, 14))
    for t in range(4):
        h = jnp.tanh(h @ p["u"] + x[:, t] @ p["w"])
    return total(h)


@case({"w": normal(3, 12, 12), "b": normal(3, 12)}, normal(ROWS, 12), "w")
def layers_stacked_in_a_scan(p, x):
    def layer(h, p):
        return jax.checkpoint(lambda h, p: jnp.tanh(h @ p["w"] + p["b"]))(h, p), None

    return total(jax.lax.scan(layer, x, p)[0])


@case({"u": normal(80, 80)}, normal(ROWS, 2, 3, 80), "u")
def scan_in_a_scan(p, x):
    inner = lambda h, xt: (jnp.tanh(h @ p["u"] / 8 + xt), None)
    outer = lambda h, xs: (jax.lax.scan(inner, h, xs)[0], None)
    return total(jax.lax.scan(outer, jnp.zeros(80), x[0])[0])


@case({"v": normal(16, 20), "g": normal(16, 1)}, normal(ROWS, 20), "v")
def weight_normalisation(p, x):
    return total(x @ (p["v"] * (p["g"] / jnp.linalg.norm(p["v"], axis=1, keepdims=True))).T)


@case({"a": normal(20, 3), "b": normal(3, 20)}, normal(ROWS, 20), "a b")
def low_rank_weight(p, x):
    return total(x @ (p["a"] @ p["b"]))


@case({"a": normal(20, 19), "b": normal(20, 19)}, normal(ROWS, 20), "a b")
def stacked_and_concatenated_parameters(p, x):
    layers = jnp.stack([p["a"], p["b"]])
    wide = jnp.concatenate([p["a"], p["b"][:, :4]], axis=1)
    tall = jnp.concatenate([p["a"], p["b"]])
    return total(x @ layers[1]) + total(x @ wide) + total(jnp.concatenate([x, x], 1) @ tall)


@case({"w": normal(20, 30)}, normal(ROWS, 20), "w")
def slices_pads_and_transposes(p, x):
    w = p["w"]
    padded = jnp.pad(w[2:10:2], ((1, 2), (0, 0)))
    return total(x @ w[:, :8]) + total(x @ w[:, 8:]) + total(x[:, :7] @ padded) + total(w.T @ x[0])


@case({"w": normal(40, 20)}, normal(ROWS, 20), "w")
def reshapes_casts_and_scalings(p, x):
    w = p["w"].reshape(2, 20, 20) * 0.5
    return total(x @ w[0] / 3 - x @ -w[1]) + total(x @ p["w"].reshape(20, 40))


@case({"w": normal(12, 20)}, normal(ROWS, 12), "w")
def penalty_of_the_weights(p, x):
    return total(x @ p["w"]) + 0.1 * jnp.sum(p["w"] ** 2) * jnp.sum(x**2)


@case({"w": normal(20, 30)}, normal(ROWS, 20), "w")
def half_frozen(p, x):
    w = p["w"].at[:, :6].set(jax.lax.stop_gradient(p["w"][:, :6]))
    mask = np.arange(30) % 2 == 0
    return total(x @ w) + total(x @ jnp.where(mask, p["w"], jax.lax.stop_gradient(p["w"])))


@case({"q": normal(16, 16), "kv": normal(16, 32), "o": normal(16, 16)}, normal(ROWS, 3, 16), "q kv o")
def attention(p, x):
    heads = lambda a: a.reshape(1, 3, 2, 8).transpose(0, 2, 1, 3)
    k, v = jnp.split(x @ p["kv"], 2, -1)
    q, k, v = heads(x @ p["q"]), heads(k), heads(v)
    mixed = jax.nn.softmax(q @ k.swapaxes(2, 3) / 8**0.5) @ v
    return total(mixed.transpose(0, 2, 1, 3).reshape(1, 3, 16) @ p["o"])


@case({"w": normal(3, 16, 8)}, normal(ROWS, 16), "w")
def experts_chosen_by_index(p, x):
    return total(x @ p["w"][jnp.argmax(x[0, :3])])


@case({"w": normal(9, 9), "unused": normal(4, 4)}, normal(ROWS, 9), "w")
def unreached(p, x):
    return total(x @ p["w"])


@case({"w": normal(20, 20)}, normal(ROWS, 20), "w")
def the_same_in_every_step_of_a_loop(p, x):
    """What the loop adds to a gradient does not depend on the step."""
    step = lambda c, _: (c + jnp.sum(x @ p["w"]) * 0.1, None)
    return total(x @ p["w"]) + jax.lax.scan(step, 0.0, None, length=3)[0]


@case({"a": normal(12, 1, 3, 3), "w": normal(12, 40)}, normal(ROWS, 1, 5, 5), "w")
def convolution_of_one_channel_used_twice(p, x):
    h = jnp.tanh(_conv(x, p["a"], 2)) + _conv(x, p["a"] * 2, 2, window_strides=(1, 1))
    return total(h) + total(h.mean((2, 3)) @ p["w"])
