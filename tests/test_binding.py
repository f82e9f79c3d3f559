"""Convolutions are computed with channels last: XLA is many times slower at others in a loop on CPU."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from microbatching_cases import data

from microtome.jax_impl import chunked_vmap, clipped_grad, hessian, jacobian, micro_grad, microbatch
from microtome.jax_impl.binding import channels_last
from microtome.torch_api import as_jax

KINDS = {
    "1d": ((2, 3, 8), (4, 3, 3), ("NCH", "OIH", "NCH"), {"window_strides": (2,)}),
    "2d": ((2, 3, 8, 7), (4, 3, 3, 2), ("NCHW", "OIHW", "NCHW"), {"rhs_dilation": (2, 1)}),
    "3d": ((2, 3, 4, 5, 6), (4, 3, 2, 3, 1), ("NCDHW", "OIDHW", "NCDHW"), {}),
    "channels last": ((2, 8, 7, 3), (3, 2, 3, 4), ("NHWC", "HWIO", "NHWC"), {"padding": "SAME"}),
    "mixed": ((7, 2, 3, 8), (3, 4, 2, 3), ("WNCH", "IOHW", "HNWC"), {"window_strides": (2, 1)}),
    "transposed": (
        (2, 3, 4, 4),
        (3, 5, 3, 3),
        ("NCHW", "IOHW", "NCHW"),
        {"lhs_dilation": (2, 2), "padding": ((2, 2), (1, 2))},
    ),
    "grouped": ((2, 4, 6, 6), (6, 2, 3, 3), ("NCHW", "OIHW", "NCHW"), {"feature_group_count": 2}),
}


def convolution(kind):
    *shapes, numbers, options = KINDS[kind]
    strides = options.get("window_strides", (1,) * (len(shapes[0]) - 2))
    options = {"padding": "VALID"} | options | {"window_strides": strides, "dimension_numbers": numbers}
    # In a call, as jnp's functions are, and behind a rule for derivatives.
    inner = jax.jit(lambda x, w: jax.nn.relu(jax.lax.conv_general_dilated(x, w, **options)))
    return lambda x, w: jnp.sum(jnp.tanh(inner(x, w)) ** 2), data(*shapes[0]), data(*shapes[1], seed=1)


_SLOW = {"1d", "3d", "channels last", "grouped", "mixed"}


@pytest.mark.parametrize("kind", [pytest.param(k, marks=pytest.mark.slow) if k in _SLOW else k for k in KINDS])
def test_values_and_derivatives_are_those_of_the_function(kind):
    with jax.enable_x64(True):
        fun, *args = convolution(kind)
        args = [a.astype(jnp.float64) for a in args]
        for derivative in (lambda f: f, lambda f: jax.grad(f, (0, 1)), lambda f: lambda *x: jax.jvp(f, x, x)[1]):
            for ours in (channels_last(derivative(fun)), derivative(channels_last(fun))):
                got, want = jax.jit(ours)(*args), jax.jit(derivative(fun))(*args)
                jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12), got, want)


def layouts(fun, *args):
    """Of the convolutions in the optimised program: the order of axes in the operands and the result."""
    text = jax.jit(fun).lower(*args).compile().as_text()
    return set(re.findall(r"dim_labels=(\S+?)[,\s]", text))


def of_torch(fun):
    """A torch function with two layers, as a loss in JAX."""
    return as_jax(lambda w, x: torch.tanh(fun(torch.tanh(fun(x, w["a"], padding=1)), w["b"], stride=2)).sum())


def of_jax(w, x):
    numbers = ("NCHW", "OIHW", "NCHW")
    x = jnp.tanh(jax.lax.conv_general_dilated(x, w["a"], (1, 1), "SAME", dimension_numbers=numbers))
    return jnp.sum(jnp.tanh(jax.lax.conv_general_dilated(x, w["b"], (2, 2), "VALID", dimension_numbers=numbers)))


TRANSFORMS = {
    "micro_grad": lambda f: micro_grad(f, microbatch_size=2),
    "by examples": lambda f: micro_grad(f, microbatch_size=2, transform_fn=lambda g: jax.tree.map(jnp.tanh, g)),
    "clipped_grad": lambda f: clipped_grad(f, l2_clip_norm=1.0, microbatch_size=2).fun,
    "microbatch": lambda f: microbatch(jax.grad(f), argnums=1, microbatch_size=2),
    "chunked_vmap": lambda f: lambda w, x: chunked_vmap(lambda x: f(w, x[None]), 2)(x),
    "jacobian": lambda f: (
        lambda w, x: jacobian(lambda b: jax.vmap(lambda x: f(w | {"b": b}, x[None]))(x), w["b"], 27)[0]
    ),
    "hessian": lambda f: lambda w, x: hessian(lambda a: f(w | {"a": a}, x), w["a"], 27)[0],
}


_SLOW_TRANSFORMS = {"by examples", "hessian", "jacobian", "microbatch"}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in _SLOW_TRANSFORMS else n for n in TRANSFORMS]
)
@pytest.mark.parametrize("loss", [of_jax, of_torch(torch.conv2d)], ids=["jax", "torch"])
def test_a_loop_has_convolutions_with_channels_last_only(loss, name):
    w, x = {"a": data(3, 3, 3, 3), "b": data(4, 3, 3, 3, seed=1)}, data(6, 3, 9, 9, seed=2)
    assert layouts(lambda w, xs: jax.lax.map(lambda x: of_jax(w, x[None]), xs), w, x) == {"bf01_oi01->bf01"}
    found = layouts(TRANSFORMS[name](loss), w, x)
    assert found
    # Of the weight of each example, convolutions in as many groups as examples have no fast layout.
    assert {f for f in found if f != "b01f_01io->b01f"} <= ({"f01b_i01o->01bf"} if name == "by examples" else set())


def test_chunks_of_torch_have_it_in_backward_too():
    loss = of_torch(torch.conv2d)
    w, x = {"a": data(3, 3, 3, 3), "b": data(4, 3, 3, 3, seed=1)}, data(6, 3, 9, 9, seed=2)
    grad = jax.grad(lambda w, x: jnp.sum(jax.lax.map(lambda x: loss(w, x[None]), x)))
    assert layouts(grad, w, x) == {"b01f_01io->b01f"}
