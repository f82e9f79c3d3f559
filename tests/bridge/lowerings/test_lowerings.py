"""Own lowerings and rewritten functions in float64: values, gradients and second derivatives are torch's."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import marked
from torch_cases import data

from microtome.bridge import as_jax, as_torch, to_jax
from microtome.bridge.base.versions import enable_x64

Fun = Callable[..., Any]
pytestmark = pytest.mark.filterwarnings("ignore:index_reduce:UserWarning", "ignore:.*has been compiled:UserWarning")

_randn = functools.partial(data, dtype=torch.float64)


def _check(fun: Fun, *tensors: torch.Tensor, tolerance: float = 1e-9) -> None:
    """Outputs and gradients for one random cotangent, against eager torch."""
    results = []
    for f in (fun, as_torch(as_jax(fun))):
        leaves = [t.clone().requires_grad_(t.is_floating_point()) for t in tensors]
        outputs = [o for o in torch.utils._pytree.tree_leaves(f(*leaves)) if isinstance(o, torch.Tensor)]
        heads = [o for o in outputs if o.requires_grad]
        cotangents = [_randn(*o.shape, seed=1).to(o.dtype) for o in heads]
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        gradients = torch.autograd.grad(heads, wanted, cotangents, allow_unused=True) if heads else ()
        results.append([*outputs, *(torch.zeros(()) if g is None else g for g in gradients)])
    for expected, got in zip(*results, strict=True):
        assert got.dtype == expected.dtype
        torch.testing.assert_close(got, expected.resolve_neg(), rtol=tolerance, atol=tolerance, equal_nan=True)


KINDS = [
    (dimensions, stride, padding, dilation, groups, transposed)
    for dimensions, stride, padding, dilation, groups, transposed in itertools.product(
        (1, 2, 3), (1, 2), (0, 1), (1, 2), (1, 2), (False, True)
    )
    if (stride == 2) == (padding == 1) and (transposed or dilation == groups)
]


@pytest.mark.slow
@pytest.mark.parametrize(("dimensions", "stride", "padding", "dilation", "groups", "transposed"), KINDS)
def test_convolutions(dimensions: int, stride: int, padding: int, dilation: int, groups: int, transposed: bool) -> None:
    x, bias = _randn(2, 4, *(7, 6, 5)[:dimensions]), _randn(6)
    kernel = (2, 3, 2)[:dimensions]
    if transposed:
        options = {"output_padding": 1} if max(stride, dilation) > 1 else {}
        op, weight = getattr(F, f"conv_transpose{dimensions}d"), _randn(4, 6 // groups, *kernel, seed=2)
    else:
        options = {}
        op, weight = getattr(F, f"conv{dimensions}d"), _randn(6, 4 // groups, *kernel, seed=2)
    options |= {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    _check(lambda *tensors: op(*tensors, **options), x, weight, bias)


@pytest.mark.slow
def test_grouped_transposed_convolution_has_second_derivatives_and_maps() -> None:
    fun = as_jax(lambda x, w: F.conv_transpose2d(x, w, stride=2, groups=2).pow(3).sum())
    x, w = jnp.asarray(np.random.default_rng(0).normal(size=(2, 1, 4, 3, 3))), jnp.ones((4, 2, 2, 2))
    each = jax.vmap(jax.grad(fun), (0, None))(x, w)
    np.testing.assert_allclose(each[1], jax.grad(fun)(x[1], w), rtol=1e-5)
    tangent = jnp.ones_like(w)
    forward = jax.jvp(lambda w: jax.grad(fun, 1)(x[0], w), (w,), (tangent,))[1]
    reverse = jax.grad(lambda w: jnp.vdot(jax.grad(fun, 1)(x[0], w), tangent))(w)
    np.testing.assert_allclose(forward, reverse, rtol=1e-4)


SYMMETRIC = (lambda a: a + a.T)(_randn(4, 4))
INDEX = torch.tensor([2, 0, 2])
MASK = torch.tensor([[True, False, True], [False, True, True]])
CAUSAL = torch.nn.Transformer.generate_square_subsequent_mask(3, dtype=torch.float64)
OTHERS = torch.where(torch.eye(3, dtype=torch.bool), 0.0, -1.0).double()


def _encoder(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    layer = torch.nn.TransformerEncoderLayer(4, 2, 6, 0.0, batch_first=True, dtype=torch.float64)
    encoder = torch.nn.TransformerEncoder(layer, 1)
    params = {k: torch.full_like(p, 0.1 + 0.05 * i).detach() for i, (k, p) in enumerate(encoder.named_parameters())}
    return torch.func.functional_call(encoder, params, (x,), {"mask": mask})


POINTS = torch.tensor([-8.3, -4.7, -2.5, -0.5, 0.05, 0.3, 1.0, 2.5, 40.0], dtype=torch.float64)
COUNTS = torch.tensor([1, 2, 0, 3])
INT = torch.tensor([[1, 2, 4], [3, 5, 7]], dtype=torch.int32)
GRID = torch.tanh(_randn(2, 2, 3, 2, 3)) * 1.3

LOWERINGS: dict[str, tuple[Fun, tuple[torch.Tensor, ...]]] = {
    "digamma": (torch.digamma, (POINTS,)),
    "lgamma": (torch.lgamma, (POINTS,)),
    "mvlgamma": (lambda x: torch.mvlgamma(x + 10, 3), (POINTS,)),
    **{f"polygamma {n}": (lambda x, n=n: torch.special.polygamma(n, x), (POINTS,)) for n in range(5)},
    "pinv": (lambda a: torch.linalg.pinv(a, rtol=0.1), (_randn(2, 4, 3),)),
    "pinv, atol": (lambda a: torch.linalg.pinv(a, atol=torch.tensor([0.2, 1.5])), (_randn(2, 4, 3),)),
    "pinv, hermitian": (lambda a: torch.linalg.pinv(a, hermitian=True), (SYMMETRIC,)),
    "geqrf": (lambda a: torch.geqrf(a.detach()), (_randn(4, 3),)),
    "ormqr": (lambda a, b: torch.ormqr(*torch.geqrf(a.detach()), b.detach()), (_randn(4, 3), _randn(4, 2))),
    "lu_solve": (lambda a, b: torch.linalg.lu_solve(*torch.linalg.lu_factor(a), b), (_randn(3, 3), _randn(3, 2))),
    "median": (lambda x: (x.median(1), x.median()), (_randn(3, 4),)),
    "nanmedian": (lambda x: torch.where(x > 0, x, math.nan).nanmedian(0), (_randn(5, 4),)),
    "mean of integers": (lambda x: (x.mean(dtype=torch.float64), x.mean(1, True, dtype=torch.float64)), (INT,)),
    "take": (lambda x: torch.take(x, INDEX[1]), (_randn(3, 2),)),
    "masked_scatter": (lambda x, y: x.masked_scatter(MASK, y), (_randn(2, 3), _randn(5))),
    "nonzero_static": (lambda x: torch.nonzero_static(x > 0, size=7), (_randn(3, 4),)),
    **{
        f"index_reduce {name}, {own}": (
            lambda x, y, name=name, own=own: x.index_reduce(1, INDEX, y, name, include_self=own),
            (_randn(2, 4), _randn(2, 3, seed=3)),
        )
        for name, own in itertools.product(("prod", "mean", "amax", "amin"), (True, False))
    },
    "index_fill": (lambda x, v: x.index_fill(1, INDEX, v), (_randn(2, 4), _randn())),
    "irfft2 of odd sizes": (
        lambda x: (torch.fft.irfft2(torch.complex(x, x), s=(3, 5)), torch.fft.irfftn(torch.complex(x, x), s=(2, 7))),
        (_randn(3, 4),),
    ),
    "mask of an encoder": (_encoder, (_randn(2, 3, 4), OTHERS)),
    "causal mask of an encoder": (lambda x: _encoder(x, CAUSAL), (_randn(2, 3, 4),)),
    "captured mask of an encoder": (lambda x: _encoder(x, OTHERS), (_randn(2, 3, 4),)),
    "negative view": (lambda x: torch.view_as_complex(x).conj().imag * 2, (_randn(3, 2),)),
    "pdist": (lambda x: (F.pdist(x), F.pdist(x, 1), F.pdist(x, math.inf), F.pdist(x, 3)), (_randn(4, 3),)),
    "multilabel_margin": (
        lambda x: F.multilabel_margin_loss(x, torch.tensor([[2, 0, -1], [1, -1, 2]]), reduction="none"),
        (_randn(2, 3),),
    ),
    "ctc": (
        lambda x: F.ctc_loss(x, torch.tensor([[1, 1, 2], [3, 0, 0]]), [6, 4], [3, 1]),
        (_randn(6, 2, 4).log_softmax(2),),
    ),
    "cov": (lambda x, a: torch.cov(x, fweights=COUNTS, aweights=a.abs()), (_randn(3, 4), _randn(4))),
    "tensor_split": (lambda x: x.tensor_split(torch.tensor([1, 3])), (_randn(4, 2),)),
    **{
        f"grid_sample {mode}, {padding}, {align}": (
            lambda x, grid, options=(mode, padding, align): F.grid_sample(x, grid, *options),
            (_randn(2, 3, 4, 3, 5), GRID),
        )
        for mode, padding, align in (
            ("bilinear", "zeros", False),
            ("nearest", "border", True),
            ("nearest", "reflection", True),
            ("nearest", "reflection", False),
            ("bilinear", "reflection", False),
        )
    },
    **{
        f"antialiased {mode}, {size}": (
            lambda x, mode=mode, size=size: F.interpolate(x, size, mode=mode, antialias=True),
            (_randn(1, 2, 7, 6),),
        )
        for mode, size in itertools.product(("bilinear", "bicubic"), ((3, 4), (9, 2)))
    },
}


_SLOW_LOWERINGS = (
    *("grid_sample", "ctc", "cov", "pdist", "causal mask", "index_reduce amin", "index_reduce mean"),
    *(
        "index_reduce prod, T",
        "index_reduce amax, F",
        "polygamma 1",
        "polygamma 3",
        "polygamma 4",
        "lgamma",
        "mvlgamma",
    ),
    *("mask of an encoder", "pinv, ", "antialiased bilinear, (9", "antialiased bicubic, (3", "nanmedian"),
)


@pytest.mark.parametrize("name", marked(LOWERINGS, slow=[n for n in LOWERINGS if n.startswith(_SLOW_LOWERINGS)]))
def test_values_and_gradients(name: str) -> None:
    _check(LOWERINGS[name][0], *LOWERINGS[name][1])


ORDERS = torch.tensor([-1, 0, 1, 2, 3, 7, 12])
FAMILIES = ["chebyshev_polynomial_", "shifted_chebyshev_polynomial_"]
POLYNOMIALS = [f + kind for f in FAMILIES for kind in "tuvw"] + ["legendre_polynomial_p"]
QUICK_POLYNOMIALS = ("chebyshev_polynomial_t", "shifted_chebyshev_polynomial_w", "legendre_polynomial_p")


@pytest.mark.parametrize("name", marked(POLYNOMIALS, quick=QUICK_POLYNOMIALS))
def test_polynomials(name: str) -> None:
    op = getattr(torch.special, name)
    x = torch.tensor([[-1.0], [-0.4], [0.0], [0.7], [1.0], [1.5]], dtype=torch.float64)
    _check(lambda x: op(x.detach(), ORDERS), x)


@pytest.mark.parametrize("name", ["scaled_modified_bessel_k0", "scaled_modified_bessel_k1", "spherical_bessel_j0"])
def test_bessel_functions(name: str) -> None:
    op = getattr(torch.special, name)
    x = torch.tensor([0.0, 1e-6, 0.3, 1.9, 2.1, 30.0, 900.0, 1e6, math.inf], dtype=torch.float64)
    _check(lambda x: op(x.detach()), x)


@pytest.mark.slow
def test_the_gradient_of_ctc_has_none_of_its_own() -> None:
    fun = as_jax(lambda x: F.ctc_loss(x, torch.tensor([[1, 2]]), [4], [2]))
    x = jax.nn.log_softmax(jnp.arange(12.0).reshape(4, 1, 3) % 5)
    gradient, tangent = jax.grad(fun)(x), jnp.ones_like(x)
    np.testing.assert_allclose(jax.jvp(fun, (x,), (tangent,))[1], gradient.sum(), atol=1e-5)
    with pytest.raises(TypeError, match="cannot be differentiated"):
        jax.hessian(fun)(x)


PRODUCTS: dict[str, tuple[Fun, tuple[torch.Tensor, ...]]] = {
    "mv": (lambda a, b: a @ b, (_randn(3, 4), _randn(4))),
    "dot": (torch.dot, (_randn(4), _randn(4, seed=1))),
    "vdot": (torch.vdot, (torch.complex(_randn(4), _randn(4, seed=1)), torch.complex(_randn(4, seed=2), _randn(4)))),
    "mv of whole numbers": (torch.mv, (torch.arange(12).reshape(3, 4), torch.arange(4))),
    "bilinear": (F.bilinear, (_randn(2, 5, 3), _randn(2, 5, 4), _randn(6, 3, 4), _randn(6))),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_stay_products(name: str) -> None:
    """torch's decompositions multiply and sum: under a map that takes many times as long."""
    fun, tensors = PRODUCTS[name]
    _check(fun, *tensors)
    rows = as_torch(jax.vmap(as_jax(fun)))(*(torch.stack([t, t + 1]) for t in tensors))
    expected = [fun(*(t + i for t in tensors)) for i in range(2)]
    torch.testing.assert_close(rows, torch.stack(expected), rtol=1e-9, atol=1e-9)
    program = jax.jit(as_jax(fun)).lower(*map(to_jax, tensors)).as_text()
    assert "dot_general" in program
    assert "stablehlo.reduce" not in program


GROUPS = torch.tensor([2, 2, 8], dtype=torch.int32)
GROUPED = {
    "rows": (lambda a, b: F.grouped_mm(a, b, offs=GROUPS), (8, 8), (3, 8, 16)),
    "rows, some in no group": (
        lambda a, b: F.grouped_mm(torch.cat([a, a.detach()[:4]]), b, offs=GROUPS)[:8],
        (8, 8),
        (3, 8, 16),
    ),
    "columns": (lambda a, b: F.grouped_mm(a, b.mT, offs=GROUPS), (3, 8, 12), (8, 12)),
    "terms": (lambda a, b: F.grouped_mm(a, b, offs=GROUPS), (16, 8), (8, 12)),
    "batches": (F.grouped_mm, (3, 8, 8), (3, 8, 8)),
}


@pytest.mark.parametrize("name", marked(GROUPED, slow=("rows", "columns")))
def test_products_in_groups(name: str) -> None:
    fun, *shapes = GROUPED[name]
    a, b = (_randn(*shape, seed=i).float() for i, shape in enumerate(shapes))
    _check(fun, a, b, tolerance=1e-5)
    b[1:2] = math.nan  # no element of another group is reached
    forward = as_torch(as_jax(fun))(a, b)
    torch.testing.assert_close(forward, fun(a, b), rtol=1e-5, atol=1e-5, equal_nan=True)


def test_floor_division_runs_forward_and_has_the_gradient_zero() -> None:
    """In eager torch the result requires a gradient, and asking for it is an error."""
    x = torch.tensor([-3.0, 5.0], requires_grad=True)
    got = as_torch(as_jax(lambda x: (x // 2 + x, torch.floor_divide(x, 3))))(x)
    assert [t.tolist() for t in got] == [[-5.0, 7.0], [-1.0, 1.0]]
    assert torch.autograd.grad(got[0].sum(), x)[0].tolist() == [1.0, 1.0]


def test_factors_of_an_indefinite_matrix_are_refused() -> None:
    with pytest.raises(TypeError, match="ldl_factor"):
        as_jax(torch.linalg.ldl_factor)(jnp.eye(2))


def test_lowerings_keep_float64_under_jit() -> None:
    with enable_x64():
        got = jax.jit(as_jax(torch.digamma))(to_jax(torch.tensor([0.1], dtype=torch.float64)))
    np.testing.assert_allclose(got, torch.digamma(torch.tensor([0.1], dtype=torch.float64)).numpy(), rtol=1e-14)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(
    "fun",
    [
        lambda x: x.cumsum(0),
        lambda x: x.cumprod(1),
        lambda x: x**2,
        lambda x: x**7,
        lambda x: x.square(),
        lambda x: x.fmod(7),
        lambda x: torch.div(x, 3, rounding_mode="trunc"),
    ],
    ids=["cumsum", "cumprod", "square by power", "power", "square", "fmod", "div"],
)
def test_whole_numbers_are_computed_as_whole_numbers(fun: Any, dtype: torch.dtype) -> None:
    """They wrap as in torch, and keep every digit."""
    x = torch.tensor([[100, 101], [1, 127], [int(torch.iinfo(dtype).max) - 4, 7]], dtype=dtype)
    got, expected = as_torch(as_jax(fun))(x), fun(x)
    assert got.dtype == expected.dtype
    assert torch.equal(got, expected)


# Numbers that are none, infinities and signed zeros

_MASK = torch.tensor([True, False, False, True])
SPECIAL: dict[str, Fun] = {
    "amax": lambda x: x.amax(0),
    "amin": lambda x: x.amin(0),
    "aminmax": lambda x: torch.stack(torch.aminmax(x)),
    "max": lambda x: x.max(),
    "max of an axis": lambda x: x.max(0).values,
    "min": lambda x: x.min(),
    "abs": torch.abs,
    "sign": torch.sign,
    "sgn": torch.sgn,
    "angle": torch.angle,
    "digamma": torch.digamma,
    "lgamma": torch.lgamma,
    "relu": torch.relu,
    "relu6": F.relu6,
    "clamp": lambda x: x.clamp(0, 1),
    "hardtanh": F.hardtanh,
    "leaky_relu": F.leaky_relu,
    "elu": F.elu,
    "gelu": F.gelu,
    "softplus": F.softplus,
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "hardshrink": F.hardshrink,
    "softshrink": F.softshrink,
    "threshold": lambda x: F.threshold(x, 0.1, 5),
    "maximum": lambda x: torch.maximum(x, torch.ones(4)),
    "fmax": lambda x: torch.fmax(x, torch.ones(4)),
    "norm": torch.norm,
    "largest": lambda x: x.norm(math.inf),
    "sum of sizes": lambda x: x.norm(1),
    "cummax": lambda x: x.cummax(0),
    "cummin": lambda x: x.cummin(0),
    "median": lambda x: x.median(),
    "nanmedian": lambda x: x.nanmedian(),
    "nansum": lambda x: x.nansum(),
    "sort": lambda x: x.sort(stable=True),
    "l1_loss": lambda x: F.l1_loss(x, torch.zeros(4)),
    "huber_loss": lambda x: F.huber_loss(x, torch.zeros(4)),
    "smooth_l1_loss": lambda x: F.smooth_l1_loss(x, torch.zeros(4), reduction="sum"),
    "hinge_embedding_loss": lambda x: F.hinge_embedding_loss(x, torch.tensor([1, -1, 1, -1])),
    "max_pool1d": lambda x: F.max_pool1d(x[None, None], 2),
    "logsumexp": lambda x: x.logsumexp(0),
    "std": lambda x: x.std(),
    "round": torch.round,
    "nan_to_num": torch.nan_to_num,
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "dist": lambda x: torch.dist(x, torch.ones(4)),
    "power": lambda x: x**2,
    "times a mask": lambda x: x * _MASK,
    "times a mask of its own": lambda x: x * (x > 0),
    "times a mask as numbers": lambda x: x * (x > 0).float(),
    "times a mask of the type": lambda x: x * (x > 0).to(x),
    "times a mask in place": lambda x: x.clone().mul_(_MASK),
    "masked twice": lambda x: (x * _MASK) * (x < 2),
}


@pytest.fixture
def no_onednn() -> Iterator[None]:
    """Its float32 gelu(inf) is NaN on some processors, where torch's own code, and one element alone, give inf."""
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    yield
    torch._C._set_mkldnn_enabled(enabled)


@pytest.mark.slow
@pytest.mark.usefixtures("no_onednn")
@pytest.mark.parametrize("name", SPECIAL)
def test_special_values_give_what_they_give_in_torch(name: str) -> None:
    """XLA may take a product with a mask for a selection; NaN and infinities show it."""
    inf, nan = math.inf, math.nan
    fun = SPECIAL[name]
    call = as_torch(as_jax(fun))
    for values in ([1.0, nan, 2.0, nan], [inf, 1.0, -inf, 0.0], [0.0, -0.0, 0.5, 1.0], [nan, inf, -1.5, -0.0]):
        results: list[Any] = []
        for f in (fun, call):
            x = torch.tensor(values, requires_grad=True)
            out = [o for o in torch.utils._pytree.tree_leaves(f(x)) if isinstance(o, torch.Tensor)]
            moving = [o.sum() for o in out if o.requires_grad]
            results.append([*(o.detach() for o in out), torch.autograd.grad(sum(moving), x)[0]])
        for ours, eager in zip(results[1], results[0], strict=True):
            assert ours.dtype == eager.dtype
            torch.testing.assert_close(ours, eager, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.slow
@pytest.mark.parametrize("dimensions", [2, 3])
def test_max_pool_names_the_element_that_torch_names(dimensions: int) -> None:
    """At ties, at NaN, and where a window holds nothing but -inf (a mask); its gradient goes there.

    Windows that overlap, tile the axes, leave elements out or reach beyond the end, small and large ones.
    """
    pool = (F.max_pool2d, F.max_pool3d)[dimensions - 2]
    x = _randn(2, 3, *(9, 8, 5)[:dimensions]).mul(2).round()
    x[..., :2] = -math.inf
    x.flatten()[3::17] = math.nan
    large = (6, 7, 3)[:dimensions]  # more places than are compared one by one
    for kernel, options in [
        (2, {}),
        (2, {"stride": 1}),
        (2, {"stride": 3}),
        (2, {"padding": 1}),
        (2, {"padding": 1, "ceil_mode": True}),
        (2, {"dilation": 2, "padding": 1}),
        (2, {"dilation": 2, "stride": 2}),
        (2, {"ceil_mode": True, "stride": 3}),
        ((3, 2, 1)[:dimensions], {"stride": (2, 3, 1)[:dimensions]}),
        ((2, 3, 1)[:dimensions], {"padding": (1, 1, 0)[:dimensions]}),
        (large, {}),
        (large, {"stride": 2, "padding": 1}),
    ]:
        fun = lambda t, kernel=kernel, options=options: pool(t, kernel, return_indices=True, **options)
        ours, plain = (x.clone().requires_grad_() for _ in range(2))
        (values, indices), expected = as_torch(as_jax(fun))(ours), fun(plain)
        assert torch.equal(indices, expected[1])
        torch.testing.assert_close(values, expected[0], equal_nan=True)
        g = _randn(*values.shape)
        gradients = [torch.autograd.grad(v, t, g)[0] for v, t in ((values, ours), (expected[0], plain))]
        torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-6)
        assert [v.shape for v in as_torch(as_jax(fun))(x[:0])] == [v.shape for v in fun(x[:0])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["erfcx", "log_ndtr"])
def test_a_scaled_function_neither_overflows_nor_loses_digits(name: str, dtype: torch.dtype) -> None:
    fun = getattr(torch.special, name)
    x = torch.cat([torch.linspace(-30, 60, 181), torch.tensor([1e4, 1e30, math.inf, -math.inf])]).to(dtype)
    tolerance = 5e-6 if dtype is torch.float32 else 1e-12
    call, (ours, eager) = as_torch(as_jax(fun)), (x.clone().requires_grad_() for _ in range(2))
    got, expected = call(ours), fun(eager)
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=torch.finfo(dtype).tiny)
    moving = x.isfinite() & (x.abs() < 1e5)
    gradients = [torch.autograd.grad(y[moving].sum(), x)[0][moving] for y, x in ((got, ours), (expected, eager))]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)


T, ROWS = torch.tensor, torch.tensor([0, 0, 2])
EXACT: dict[str, tuple[Any, ...]] = {
    "ties in descending order": (lambda x: x.sort(0, descending=True), T([1.0, 0, 1, 0, 0, 2, 2])),
    "truth values in order": (lambda x: torch.argsort(x, descending=True), T([True, False, True, False])),
    "the sign of truth values": (torch.sign, T([True, False])),
    "index_add by or": (lambda x, y: x.index_add(0, ROWS, y), T([True, False, False]), T([True, False, True])),
    "index_put by or": (lambda x, y: x.index_put((ROWS,), y, True), T([True, False, False]), T([True, False, True])),
    "put by or": (lambda x, y: x.put(ROWS, y, True), T([True, False, False]), T([True, False, True])),
    "scaled index_add": (lambda x, y: x.index_add(-1, ROWS, y, alpha=0.5), torch.ones(2, 3), torch.ones(2, 3)),
    "index_add to one number": (lambda x, y: x.index_add(0, ROWS[:1], y), T(1.0), T(2.0)),
    "masked_scatter by rows": (lambda x, y: x.masked_scatter(ROWS == 0, y), torch.zeros(2, 3), torch.arange(5.0)),
    "masked_scatter from nothing": (lambda x, y: x.masked_scatter(ROWS < 0, y), torch.zeros(2, 3), torch.zeros(0)),
    "scatter_add by or": (lambda x, y: x.scatter_add(0, ROWS, y), T([True, False, False]), T([True, False, True])),
    "scatter of a number": (lambda x: x.scatter(0, ROWS, 3, reduce="multiply"), T([1, 2, 4])),
    "covariance of whole numbers": (torch.cov, T([[1, 2, 4], [3, 1, 0]])),
}


@pytest.mark.parametrize("name", marked(EXACT, slow=("index_put by or", "put by or", "scatter_add by or")))
def test_truth_values_ties_and_whole_numbers(name: str) -> None:
    fun, *tensors = EXACT[name]
    _check(fun, *tensors, tolerance=1e-6)


_FACTORS = ("cholesky_ex", "inv_ex", "solve_ex", "slogdet", "lu_factor_ex", "eigvals")


@pytest.mark.parametrize("name", marked(_FACTORS, quick=("lu_factor_ex", "eigvals")))
def test_matrices_without_rows_are_factored(name: str) -> None:
    op = getattr(torch.linalg, name)
    for x in (torch.zeros(0, 0), torch.zeros(2, 0, 0)):
        _check(lambda x: op(x, x) if name == "solve_ex" else op(x), x.double())


def test_zeta_on_both_sides_of_its_poles() -> None:
    values = T([-math.inf, -20.5, -3.25, -2, -0.5, -0.0, 0, 0.3, 1, 1.5, 2, 3, 7.5, math.nan, math.inf]).double()
    # At x = inf torch gives zero or NaN, as its kernel for vectors or for single numbers is used.
    x, q = (v.reshape(-1) for v in torch.meshgrid(values[:-1], values, indexing="ij"))
    got, expected = as_torch(as_jax(torch.special.zeta))(x, q), torch.special.zeta(x, q)
    torch.testing.assert_close(got, expected, rtol=1e-11, atol=0, equal_nan=True)
    _check(lambda x: torch.special.zeta(x, T([False])), T([True, False]))


def test_the_logarithm_of_complex_sums_counts_turns_as_torch_does() -> None:
    x = torch.complex(_randn(9) * 3, 8 * _randn(9, seed=1))
    x[3] = -math.inf
    fun = lambda x: torch.logcumsumexp(x, 0)
    torch.testing.assert_close(as_torch(as_jax(fun))(x), fun(x))


REFUSED_BY_TORCH: dict[str, tuple[Any, ...]] = {
    "index_add of a shorter source": (lambda x, y: x.index_add(0, ROWS, y), torch.ones(3, 2), torch.ones(3)),
    "index_add of rows to a number": (lambda x, y: x.index_add(0, ROWS[:1], y), T(1.0), T([2.0])),
    "masked_scatter under bytes": (lambda x, y: x.masked_scatter(ROWS.byte(), y), torch.ones(3), torch.ones(3)),
    "weights of too few observations": (lambda x, w: torch.cov(x, fweights=w), torch.ones(2, 3), T([1])),
    "weights in two dimensions": (lambda x, w: torch.cov(x, aweights=w), torch.ones(2, 3), torch.ones(1, 3)),
    "frequencies that are no integers": (lambda x, w: torch.cov(x, fweights=w), torch.ones(2, 3), torch.ones(3)),
    "covariance of truth values": (torch.cov, T([[True, False], [True, True]])),
    "uniform from above": (lambda x: x.clone().uniform_(3, -1), torch.ones(2)),
    "integers from above": (lambda x: torch.randint_like(x, 3, 1), torch.ones(2)),
    "negative weights": (lambda x, w: torch.cov(x, aweights=w), torch.ones(2, 3), T([1.0, -1.0, 1.0])),
    "no draws": (lambda p: torch.multinomial(p, 0), torch.ones(2)),
    "more than certain": (lambda x: x.clone().bernoulli_(1.5), torch.ones(2)),
}


@pytest.mark.parametrize("name", REFUSED_BY_TORCH)
def test_what_torch_refuses_gives_no_number(name: str) -> None:
    fun, *tensors = REFUSED_BY_TORCH[name]
    with pytest.raises((RuntimeError, ValueError)):
        fun(*tensors)
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        as_torch(as_jax(fun))(*tensors)


def test_memory_read_as_another_dtype() -> None:
    torch.manual_seed(0)
    real = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128)
    whole = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
    tensors = [*((torch.randn(3, 16) * 5).to(dtype) for dtype in (*real, *whole)), torch.randn(3, 16) > 0]

    def views(*tensors: torch.Tensor) -> dict[str, torch.Tensor]:
        return {f"{x.dtype} as {dtype}": x.view(dtype) for x in tensors for dtype in (*real, *whole)}

    got, want = as_torch(as_jax(views))(*tensors), views(*tensors)
    assert len(got) == 132
    for name, view in want.items():
        assert got[name].dtype == view.dtype, name
        assert torch.equal(got[name].view(torch.uint8), view.view(torch.uint8)), name


def test_repeated_elements_of_a_size_that_is_given() -> None:
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
    fun = lambda x, n: torch.repeat_interleave(x, n, dim=1, output_size=4)
    for counts in ([1, 3], [0, 4]):
        n = torch.tensor(counts)
        got, want = as_torch(as_jax(fun))(x, n), fun(x, n)
        assert torch.equal(got, want)
        grads = [torch.autograd.grad((out * torch.arange(4)).sum(), x)[0] for out in (got, want)]
        assert torch.equal(*grads)
    with pytest.raises(RuntimeError, match="allocated size does not match"):
        as_torch(as_jax(fun))(x, torch.tensor([1, 1]))


@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [(1, 1), pytest.param(2, 1, marks=pytest.mark.slow), pytest.param(1, 2, marks=pytest.mark.slow)],
)
def test_nan_stays_in_its_group_of_a_convolution(inputs: int, outputs: int) -> None:
    """Also where a group has one channel, forwards or backwards, and in the types that XLA spreads the groups of."""
    torch.manual_seed(0)
    x = torch.randn(2, 4 * inputs, 7, dtype=torch.float64)
    x[0, 0, 3] = math.nan
    w = torch.randn(4 * outputs, inputs, 3, dtype=torch.float64)
    t = torch.randn(4 * inputs, outputs, 3, dtype=torch.float64)

    def loss(x: Any, w: Any, t: Any) -> Any:
        plain = F.conv1d(x, w, groups=4, stride=2, padding=1)
        transposed = F.conv_transpose1d(x, t, groups=4, dilation=2)
        return plain.sin().sum() + transposed.sin().sum(), (plain, transposed)

    def both(x: Any, w: Any, t: Any) -> Any:
        grads, outs = torch.func.grad(loss, (0, 1, 2), has_aux=True)(x, w, t)
        return *grads, *outs

    got = as_torch(lambda *args: jax.jit(as_jax(both))(*args))(x, w, t)
    derived = as_torch(lambda *args: jax.grad(lambda *a: as_jax(loss)(*a)[0], (0, 1, 2))(*args))(x, w, t)
    want = both(x, w, t)
    for ours, right in zip([*got, *derived], [*want, *want[:3]], strict=True):
        torch.testing.assert_close(ours, right, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_numbers_near_the_ends_of_the_range_as_divisors(dtype: torch.dtype) -> None:
    """XLA multiplies by the inverse, which rounds to zero or to infinity."""
    large = torch.finfo(dtype).max / 3
    x = torch.tensor([large, -3 * large, large / 1e10, 1.0, 0.0], dtype=dtype)
    quotients = lambda x: (x / large, x / -large, x.div(large * 2))
    for ours, right in zip(as_torch(as_jax(quotients))(x), quotients(x), strict=True):
        torch.testing.assert_close(ours[:3], right[:3], rtol=1e-6, atol=0)
        torch.testing.assert_close(ours, right)
