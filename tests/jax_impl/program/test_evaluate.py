"""Convolutions are computed in the forms that XLA is fast in on CPU: channels last, in parts, by phases."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from helpers import marked
from microbatching_cases import data

from microtome.jax_impl import chunked_vmap, clipped_grad, hessian, jacobian, micro_grad, microbatch
from microtome.jax_impl.program.convolutions import channels_last, run_fast
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


def convolution(table, kind):
    """A convolution, and operands in float64."""
    shape, kernel, numbers, options = table[kind]
    options = {"window_strides": (1,) * (len(shape) - 2), "padding": "VALID"} | options
    fun = lambda x, w: jax.lax.conv_general_dilated(x, w, **options, dimension_numbers=numbers)
    return fun, data(*shape, dtype=jnp.float64), data(*kernel, seed=1, dtype=jnp.float64)


@pytest.mark.parametrize("kind", marked(KINDS, quick=("2d", "transposed")))
def test_values_and_derivatives_are_those_of_the_function(kind):
    with jax.enable_x64(True):
        convolve, *args = convolution(KINDS, kind)
        # In a call, as jnp's functions are, and behind a rule for derivatives.
        inner = jax.jit(lambda x, w: jax.nn.relu(convolve(x, w)))
        fun = lambda x, w: jnp.sum(jnp.tanh(inner(x, w)) ** 2)
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


@pytest.mark.parametrize("name", marked(TRANSFORMS, quick=("micro_grad", "chunked_vmap")))
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


OF_ONE_CHANNEL = {
    "2d": ((2, 1, 9, 9), (4, 1, 4, 4), ("NCHW", "OIHW", "NCHW"), {"window_strides": (2, 2), "padding": "SAME"}),
    "channels last": ((2, 9, 8, 1), (4, 4, 1, 3), ("NHWC", "HWIO", "NHWC"), {"window_strides": (2, 2)}),
    "mixed": ((8, 2, 1, 9), (1, 4, 2, 3), ("WNCH", "IOHW", "HNWC"), {"window_strides": (2, 3)}),
    "uneven": (
        (2, 1, 11, 13),
        (3, 1, 5, 3),
        ("NCHW", "OIHW", "NCHW"),
        {"window_strides": (3, 1), "padding": ((2, 0), (0, 3))},
    ),
    "stride beyond the kernel": ((2, 1, 12, 9), (3, 1, 2, 1), ("NCHW", "OIHW", "NCHW"), {"window_strides": (3, 2)}),
    "cropped": (
        (2, 1, 12, 12),
        (3, 1, 3, 3),
        ("NCHW", "OIHW", "NCHW"),
        {"window_strides": (2, 2), "padding": ((-1, 2), (1, -3))},
    ),
    "1d": ((2, 1, 17), (3, 1, 4), ("NCH", "OIH", "NCH"), {"window_strides": (3,), "padding": ((2, 1),)}),
    "3d": ((2, 1, 6, 7, 8), (3, 1, 3, 2, 4), ("NCDHW", "OIDHW", "NCDHW"), {"window_strides": (2, 2, 2)}),
}
SPREAD = {
    "2d": ((2, 3, 5, 4), (4, 3, 3, 4), ("NCHW", "OIHW", "NCHW"), {"lhs_dilation": (2, 2), "padding": ((1, 2), (2, 1))}),
    "channels last": (
        (2, 5, 4, 3),
        (2, 3, 3, 2),
        ("NHWC", "HWIO", "NHWC"),
        {"lhs_dilation": (3, 1), "padding": ((0, 1), (2, 0))},
    ),
    "mixed": (
        (4, 2, 3, 5),
        (3, 4, 2, 3),
        ("WNCH", "IOHW", "HNWC"),
        {"lhs_dilation": (2, 3), "padding": ((4, 0), (0, 5))},
    ),
    "kernel of one": (
        (2, 3, 5, 4),
        (4, 3, 1, 1),
        ("NCHW", "OIHW", "NCHW"),
        {"lhs_dilation": (3, 2), "padding": ((0, 0), (1, 2))},
    ),
    "cropped": (
        (2, 3, 5, 6),
        (4, 3, 2, 3),
        ("NCHW", "OIHW", "NCHW"),
        {"lhs_dilation": (2, 3), "padding": ((-1, -2), (3, -4))},
    ),
    "1d": ((2, 1, 6), (3, 1, 5), ("NCH", "OIH", "NCH"), {"lhs_dilation": (4,), "padding": ((3, 7),)}),
    "3d": (
        (2, 2, 3, 4, 2),
        (3, 2, 3, 2, 2),
        ("NCDHW", "OIDHW", "NCDHW"),
        {"lhs_dilation": (2, 1, 3), "padding": ((1, 1), (0, 1), (2, 2))},
    ),
}
OF_MANY_EXAMPLES = {
    "2d": ((70, 3, 12, 12), (4, 3, 3, 3), ("NCHW", "OIHW", "NCHW"), {"padding": "SAME"}),
    "channels last": ((90, 12, 12, 3), (3, 2, 3, 4), ("NHWC", "HWIO", "NHWC"), {}),
    "strided and dilated": (
        (300, 2, 15, 14),
        (4, 2, 3, 2),
        ("NCHW", "OIHW", "NCHW"),
        {"window_strides": (2, 3), "rhs_dilation": (2, 1), "padding": ((1, 2), (0, 1))},
    ),
    "transposed": (
        (70, 3, 12, 11),
        (4, 3, 3, 3),
        ("NCHW", "OIHW", "NCHW"),
        {"lhs_dilation": (2, 2), "padding": ((0, 1), (2, 0))},
    ),
    "1d": ((40, 2, 260), (3, 2, 5), ("NCH", "OIH", "NCH"), {}),
    "3d": ((40, 2, 7, 8, 9), (3, 2, 2, 3, 2), ("NCDHW", "OIDHW", "NCDHW"), {}),
}


def bound(fun, *args):
    """The outputs of a function, its equations computed by ``bind``."""
    closed, shape = jax.make_jaxpr(fun, return_shape=True)(*args)
    return jax.tree.unflatten(jax.tree.structure(shape), run_fast(closed, *args))


def close(found, want):
    scale = abs(np.asarray(want)).max()
    np.testing.assert_allclose(found, want, rtol=0, atol=1e-12 * scale)


def check_form(table, kind, name):
    """Computed with all parameters of this name 1, a convolution has the same values and derivatives."""
    with jax.enable_x64(True):
        fun, x, w = convolution(table, kind)
        ours = functools.partial(bound, fun)
        assert {max(values) for values in parameters(ours, name, x, w)} == {1}
        close(jax.jit(ours)(x, w), fun(x, w))
        slope = lambda f: jax.jit(jax.grad(lambda x, w: jnp.sum(jnp.sin(f(x, w))), (0, 1)))
        jax.tree.map(close, slope(ours)(x, w), slope(fun)(x, w))
        close(jax.vmap(ours, (None, 0))(x, jnp.stack([w, 2 * w]))[1], fun(x, 2 * w))


@pytest.mark.parametrize("kind", marked(OF_ONE_CHANNEL, quick=("uneven",)))
def test_a_strided_convolution_of_one_channel_takes_its_phases_as_channels(kind):
    check_form(OF_ONE_CHANNEL, kind, "window_strides")


@pytest.mark.parametrize("kind", marked(SPREAD, quick=("cropped",)))
def test_zeros_between_entries_are_not_multiplied(kind):
    check_form(SPREAD, kind, "lhs_dilation")


def test_the_input_gradient_of_a_strided_convolution_multiplies_no_zeros():
    kind = {"": ((2, 3, 9, 9), (4, 3, 4, 4), ("NCHW", "OIHW", "NCHW"), {"window_strides": (2, 2)})}
    with jax.enable_x64(True):
        fun, x, w = convolution(kind, "")
        slope = jax.grad(lambda x, w: jnp.sum(jnp.sin(fun(x, w))))
        ours = functools.partial(bound, slope)
        assert {max(dilation) for dilation in parameters(ours, "lhs_dilation", x, w)} == {1}
        close(jax.jit(ours)(x, w), jax.jit(slope)(x, w))


@pytest.mark.parametrize("kind", marked(OF_MANY_EXAMPLES, quick=("channels last",)))
def test_the_gradient_of_a_weight_is_summed_over_parts_of_the_batch(kind):
    with jax.enable_x64(True):
        fun, x, w = convolution(OF_MANY_EXAMPLES, kind)
        slope = jax.grad(lambda w, x: jnp.sum(jnp.sin(fun(x, w))))
        ours = functools.partial(bound, slope)
        assert parameters(ours, "length", w, x)
        assert not parameters(ours, "length", w, x[:1])
        close(jax.jit(ours)(w, x), slope(w, x))
        second = lambda f: jax.jit(jax.grad(lambda w, x: jnp.sum(f(w, x) ** 2), (0, 1)))
        jax.tree.map(close, second(ours)(w, x), second(slope)(w, x))


def parameters(fun, name, *args):
    """The values of a parameter, in all equations that have it."""

    def within(jaxpr):
        for equation in jaxpr.eqns:
            if name in equation.params:
                yield equation.params[name]
            for value in equation.params.values():
                if hasattr(value, "jaxpr"):
                    yield from within(value.jaxpr)

    return list(within(jax.make_jaxpr(fun)(*args).jaxpr))


def same(x, w):
    return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NCHW", "OIHW", "NCHW"))


def test_the_gradient_of_a_weight_takes_the_memory_of_a_part():
    x, w = data(256, 8, 16, 16), data(8, 8, 3, 3, seed=1)
    slope = lambda x, y: jax.linear_transpose(lambda w: same(x, w), w)(y)[0]
    plain, ours = (
        jax.jit(f).lower(x, x).compile().memory_analysis().temp_size_in_bytes
        for f in (slope, functools.partial(bound, slope))
    )
    assert ours < plain / 8


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_is_summed_as_one(dtype):
    x, w = data(70, 3, 12, 12).astype(dtype), data(4, 3, 3, 3, seed=1).astype(dtype)
    slope = jax.grad(lambda w, x: jnp.sum(same(x, w).astype(jnp.float32)))
    np.testing.assert_array_equal(jax.jit(functools.partial(bound, slope))(w, x), jax.jit(slope)(w, x))
