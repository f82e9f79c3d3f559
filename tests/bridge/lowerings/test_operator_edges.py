"""Operators at their edges: other dtypes, NaN, sums of nothing, branch cuts, and what eager torch raises for."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
import torch.nn.functional as F
from helpers import marked
from torch_cases import data

from microtome import torch_api as mt
from microtome.bridge import as_jax, as_torch

Fun = Callable[..., Any]
Table = dict[str, tuple[Fun, tuple[torch.Tensor, ...]]]
pytestmark = pytest.mark.filterwarnings("ignore:.*_reduce:UserWarning", "ignore:.*degrees of freedom:UserWarning")

nan, inf = math.nan, math.inf
t = torch.tensor


WHOLE = (torch.int64, torch.int32, torch.uint8, torch.bool)
COUNTS = t([0, 1, 2, 3, 5])
REDUCTIONS = ("sum", "prod", "mean", "amax", "amin")
PLACES = t([[0, 0, 1], [2, 2, 2]])
MISSING = t([[1.0, nan, 3.0, 2.0], [2.0, 5.0, 1.0, 3.0], [nan, 4.0, nan, nan]])
PARTS = (-2.0, -1.0, -0.5, -0.0, 0.0, 0.5, 1.0, 2.0)
CUTS = torch.complex(*(t(list(p)) for p in zip(*itertools.product(PARTS, (0.0, -0.0, 2.0)), strict=True)))
FACTOR = torch.linalg.cholesky(
    (lambda a: a @ a.mH + torch.eye(3))(data(2, 3, 3, dtype=torch.complex64)), upper=True
)  # of a batch, complex and upper
DEGENERATE = torch.stack([torch.diag(t(d)) for d in ([1.0, 1, 1], [1.0, -1, 1], [0.0, 0, 0], [1.0, 1, 0])])
BAGS, ROWS = t([0, 4, 1, 0]), data(5, 2)
HUGE = t([1e8, 5.0, 1e5, -7.3, -2.5, 1.0, inf, 1.0]), t([0.3, 0.1, 6.2831855, 0.7, inf, -inf, 2.0, nan])
NOTHING = torch.full((2, 2), nan)
A, B = data(2, 3), data(3, 2, seed=1)

QUICK: Table = {
    "fmod": (torch.fmod, HUGE),
    "remainder": (torch.remainder, HUGE),
    **{
        f"{name} of {dtype}": (getattr(torch.special, name), (COUNTS.to(dtype),))
        for name, dtype in itertools.product(("digamma", "erfcx", "bessel_j0"), (torch.int64, torch.bool))
    },
    **{
        f"{name} of {dtype}": (getattr(torch.special, name), (COUNTS.to(dtype), t([3, 2, 1, 4, 0])))
        for name, dtype in itertools.product(("hermite_polynomial_h", "laguerre_polynomial_l"), (torch.bool,))
    },
    **{
        f"{op.__name__} of {dtype} of nothing": (op, (torch.empty(0, 3, dtype=dtype),))
        for op in (torch.median, torch.nanmedian)
        for dtype in (torch.float32, torch.int32, torch.uint8)
    },
    **{
        f"{op.__name__} of nothing": (lambda x, op=op: op(x, x.detach() * 2), (torch.empty(0, 3),))
        for op in (F.mse_loss, F.huber_loss, F.smooth_l1_loss, F.l1_loss)
    },
    **{
        f"{op.__name__} of {shape}": (op, tuple(torch.ones(s) for s in (shape, kernel)))
        for op, shape, kernel in (
            (F.conv1d, (0, 3, 5), (2, 3, 2)),
            (F.conv1d, (2, 0, 5), (2, 0, 2)),
            (F.conv2d, (2, 0, 5, 5), (2, 0, 2, 2)),
            (F.conv_transpose2d, (0, 3, 5, 5), (3, 2, 2, 2)),
        )
    },
    "group_norm of nothing": (lambda x: F.group_norm(x, 2), (torch.ones(0, 4, 3),)),
    **{  # XLA would take the product of a mask for a selection
        f"{op.__name__} of a mask and {y}": (lambda m, op=op, y=y: op(m, y), (t([True, False]),))
        for op, y in itertools.product((torch.mul, torch.div), (inf, nan, 0, 0.0))
    },
    **{
        f"{op.__name__} of a mask and an array": (op, (t([True, False, False]), t([0.0, inf, nan])))
        for op in (torch.mul, torch.div)
    },
    **{
        f"scatter_reduce {name} of {dtype}": (
            lambda x, y, name=name: x.scatter_reduce(1, PLACES, y, name, include_self=False),
            (t([[5, 6, 7], [1, 2, 3]]).to(dtype), t([[1, 2, 3], [4, 0, 9]]).to(dtype)),
        )
        for name, dtype in itertools.product(REDUCTIONS, (torch.int32, torch.bool))
        if (name, dtype) != ("mean", torch.bool)
    },
    "cholesky_solve": (lambda b, u: torch.cholesky_solve(b, u, upper=True), (data(3, 2).cfloat(), FACTOR)),
    "cholesky_inverse": (lambda u: torch.cholesky_inverse(u, upper=True), (FACTOR,)),
    "cholesky_ex": (lambda a: torch.linalg.cholesky_ex(a.detach()).info, (DEGENERATE,)),
    "inv_ex": (lambda a: torch.linalg.inv_ex(a.detach()).info, (DEGENERATE,)),
    "lu_factor_ex": (lambda a: torch.linalg.lu_factor_ex(a.detach()).info, (DEGENERATE,)),
    "solve_ex": (lambda a: torch.linalg.solve_ex(a.detach(), torch.ones(4, 3)).info, (DEGENERATE,)),
    **{
        f"embedding_bag {mode}, {padding}, {last}": (
            lambda i, w, options=(mode, padding, last): F.embedding_bag(
                i, w, t([0, 2, 4]), mode=options[0], padding_idx=options[1], include_last_offset=options[2]
            ),
            (BAGS, ROWS),
        )
        for mode, padding, last in (("sum", -1, False), ("mean", -5, True), ("mean", 0, False))
    },
    **{
        f"embedding_bag max, {padding}, {last}": (
            lambda i, w, options=(padding, last): F.embedding_bag(
                i, w, t([0, 2, 4]), mode="max", padding_idx=options[0], include_last_offset=options[1]
            ),
            (BAGS, torch.cat([ROWS[:2], ROWS[:1], NOTHING[:1], ROWS[4:]])),  # ties, and NaN in either place
        )
        for padding, last in ((None, False), (1, False), (None, True))
    },
    **{
        f"embedding_bag max {dtype}": (
            lambda i, w: F.embedding_bag(i, w, mode="max"),
            (t([[3, 1], [0, 3]]), torch.cat([ROWS[:3], NOTHING[:1]]).to(dtype)),
        )
        for dtype in (torch.float64, torch.bfloat16)
    },
    **{
        f"combinations of {r}, {again}": (lambda x, r=r, again=again: torch.combinations(x, r, again), (COUNTS * 1.5,))
        for r, again in ((0, False), (1, False), (2, False), (2, True), (3, False), (6, False))
    },
    **{
        f"{op.__name__} of {a.dtype} by {b}": (lambda a, op=op, b=b: op(a, b), (a,))
        for op in (torch.bitwise_left_shift, torch.bitwise_right_shift, operator.lshift, operator.rshift)
        for a, b in (
            (t([True, False]), 1),
            (t([True, False]), t([3, 1], dtype=torch.int8)),
            (t([3, 1], dtype=torch.int8), t([True, False])),
            (t([True, False]), t(2)),
        )
    },
    **{
        f"lstsq of {name} by {driver}": (
            lambda a, b, driver=driver: tuple(torch.linalg.lstsq(a, b, driver=driver)),
            (a, b),
        )
        for driver in (None, "gels", "gelsy", "gelsd")
        for name, a, b in (
            ("a tall matrix", data(5, 3), data(5, 2)),
            ("a batch of wide ones", data(2, 3, 5), data(2, 3)),
            ("a matrix of rank 1", torch.ones(3, 4), data(3, 2)),
            ("a complex one", data(4, 3, dtype=torch.complex64), data(4, dtype=torch.complex64)),
        )
        if not (driver == "gelsd" and len(a) > a.shape[1]) and not (driver == "gels" and "rank" in name)
    },
    "embedding_bag with NaN in the padding": (
        lambda i, w: F.embedding_bag(i.reshape(2, 2), w, mode="sum", padding_idx=0),
        (BAGS, torch.cat([NOTHING[:1], ROWS[1:]])),
    ),
    "addmm": (lambda c, a, b: (torch.addmm(c, a, b, beta=0), torch.addmm(c, a, b, beta=0, alpha=0)), (NOTHING, A, B)),
    "addmv": (lambda c, a, b: torch.addmv(c, a, b[:, 0], beta=0, alpha=2), (NOTHING[0], A, B)),
    "addbmm": (lambda c, a, b: torch.addbmm(c, a[None], b[None], alpha=0), (A[:, :2], NOTHING, NOTHING)),
    "mode": (lambda x: torch.mode(x)[0], (t([1.0, nan, 3.0, nan]),)),
    "order": (
        lambda x: (*x.median(1), *x.nanmedian(0), *x.topk(2, 1, largest=False), x.sort(0)[0], *x.aminmax(dim=1)),
        (MISSING[:2],),
    ),
    "searchsorted": (lambda s, x: (torch.searchsorted(s, x), torch.bucketize(x, s[0], right=True)), (MISSING, MISSING)),
    "adaptive_max_pool2d": (lambda x: F.adaptive_max_pool2d(x[None], (1, 2), return_indices=True), (MISSING,)),
    "var": (lambda x: (x.var(correction=5), x.std(1, correction=9), *torch.var_mean(x, 0, correction=4)), (A,)),
    **{
        f"prod {x}": (lambda x: (x.prod(), x.prod(0)), (t(x),))
        for x in ([0.0, nan, 2.0], [0.0, 0.0, 3.0], [1.0, nan, 2.0], [2.0, 3.0, 4.0])
    },
    "prod of all": (torch.prod, (t([0.0, 0.0, inf]),)),
    "prod of complex": (torch.prod, (CUTS[6:15],)),
    "slogdet": (lambda a: torch.linalg.slogdet(a.detach())[0], (NOTHING,)),
    "zeta": (
        lambda x, q: torch.special.zeta(x.detach(), q),
        (t([2.0, 3.0, 2.5, 3.0, 4.0]), t([-2.5, -3.5, -0.5, 0.0, -2.0])),
    ),
    **{f"{name} on the cut": (getattr(torch, name), (CUTS,)) for name in ("sqrt", "asin", "acos", "acosh", "log")},
    "solve_triangular": (lambda a, b: torch.linalg.solve_triangular(a, b, upper=False), (DEGENERATE[:2], B)),
}

SLOW: Table = {
    **{f"{name} of {dtype}": (getattr(torch, name), tuple(v.to(dtype) for v in HUGE))
       for name, dtype in itertools.product(("fmod", "remainder"), (torch.float64, torch.float16))},
    **{
        f"{name} of {dtype}": (getattr(torch.special, name), (COUNTS.to(dtype),))
        for name, dtype in itertools.product(
            ("digamma", "erfcx", "erfinv", "i0e", "i1", "bessel_y0", "bessel_j1", "ndtri", "gammaln"),
            WHOLE,
        )
    },
    **{
        f"polygamma {n} of {dtype}": (lambda x, n=n: torch.polygamma(n, x), (COUNTS.to(dtype),))
        for n, dtype in itertools.product(range(3), WHOLE)
    },
    **{
        f"{name} of {dtype}": (
            lambda x, n, name=name: (getattr(torch.special, name)(x, n), getattr(torch.special, name)(x, 3)),
            (COUNTS.to(dtype), t([3, 2, 1, 4, 0]).to(dtype)),
        )
        for name, dtype in itertools.product(
            ("hermite_polynomial_h", "hermite_polynomial_he", "laguerre_polynomial_l", "legendre_polynomial_p"),
            (*WHOLE, torch.float64),
        )
    },
    **{
        f"scatter_reduce {name} of {dtype}, {own}": (
            lambda x, y, name=name, own=own: x.scatter_reduce(1, PLACES, y, name, include_self=own),
            (t([[5, 6, 7], [1, 2, 3]]).to(dtype), t([[1, 2, 3], [4, 0, 9]]).to(dtype)),
        )
        for name, dtype, own in itertools.product(REDUCTIONS, (*WHOLE, torch.float16, torch.float32), (True, False))
        if (name, dtype) != ("mean", torch.bool)
    },
    **{
        f"{name}(beta={beta}, alpha={alpha})": (
            lambda c, x, a, b, name=name, o={"beta": beta, "alpha": alpha}: _product(name, c, x, a, b, o),
            (NOTHING, A[:, :2], A, B),
        )
        for name, beta, alpha in itertools.product(("addmm", "addmv", "baddbmm", "addbmm"), (0, 0.5, 1), (0, 1, 2))
    },
    "logcumsumexp": (lambda x: x.logcumsumexp(1), (t([[1.0, 2.0, -inf, 3.0], [0.5, -inf, -inf, 1.0]]),)),
}  # fmt: skip

# Others of their kind stay quick.
_NEAR = (
    *(
        "lstsq of a batch of wide ones by None",
        "lstsq of a batch of wide ones by gelsy",
        "lstsq of a complex one by gels",
    ),
    *("lstsq of a tall matrix by gels", "lstsq of a matrix of rank 1 by None", "bessel_j0 of torch.bool", "lshift"),
    *("rshift", "bitwise_right_shift of torch.int8", "bitwise_left_shift of torch.bool", "combinations of 2, F"),
    *("combinations of 1", "scatter_reduce amin", "median of torch.uint8", "nanmedian of torch.uint8"),
    *("median of torch.int32", "nanmedian of torch.float32", "huber_loss", "smooth_l1_loss", "embedding_bag mean, 0"),
    *("embedding_bag max, None, F", "embedding_bag max torch.bfloat16", "conv1d of (2", "digamma of torch.bool"),
    *("erfcx of torch.int64", "prod [2", "asin on", "laguerre"),
)
SLOW |= {name: QUICK.pop(name) for name in list(QUICK) if name.startswith(_NEAR)}


def _product(name: str, missing: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, options: Any) -> Any:
    given = missing if options["beta"] == 0 else x
    if name == "addmv":
        return torch.addmv(given[0], a, b[:, 0], **options)
    if name == "addmm":
        return torch.addmm(given, a, b, **options)
    if name == "addbmm":
        return torch.addbmm(given, a[None], b[None], **options)
    return torch.baddbmm(given[None], a[None], b[None], **options)


def _run(program: Fun, table: Table) -> dict[str, list[torch.Tensor]]:
    """Results and gradients of all entries, which ``program`` computes at once."""
    given = {
        n: [x.clone().requires_grad_(x.is_floating_point() or x.is_complex()) for x in xs]
        for n, (_, xs) in table.items()
    }
    outputs = program(given)
    found = {n: [o.detach() for o in torch.utils._pytree.tree_leaves(outputs[n])] for n in table}
    heads = [o for n in table for o in torch.utils._pytree.tree_leaves(outputs[n]) if o.requires_grad]
    leaves = [(n, x) for n in table for x in given[n] if x.requires_grad]
    cotangents = [torch.linspace(0.5, 1.5, o.numel(), dtype=torch.float64).to(o.dtype).reshape(o.shape) for o in heads]
    gradients = torch.autograd.grad(heads, [x for _, x in leaves], cotangents, allow_unused=True)
    for (n, x), g in zip(leaves, gradients, strict=True):
        found[n].append(torch.zeros_like(x) if g is None else g)
    return found


def _check(table: Table, skip: tuple[str, ...] = ()) -> None:
    def everything(given: dict[str, Any]) -> Any:
        return {n: fun(*given[n]) for n, (fun, _) in table.items()}

    got, expected = _run(as_torch(as_jax(everything)), table), _run(everything, table)
    for name in table:
        for i, (a, b) in enumerate(zip(got[name], expected[name], strict=True)):
            tolerance = 2e-3 if a.dtype == torch.float16 else 2e-5
            if not (name in skip and i):
                close = {"rtol": tolerance, "atol": tolerance, "equal_nan": True}
                torch.testing.assert_close(a, b.resolve_conj(), **close, msg=lambda m, n=name: f"{n}: {m}")


# torch's derivative of acosh loses the sign of a zero on its way.
_ONLY_VALUES = ("acosh on the cut", "log on the cut")


def test_as_in_eager_torch() -> None:
    _check(QUICK, skip=_ONLY_VALUES)


@pytest.mark.slow
def test_others_as_in_eager_torch() -> None:
    _check(SLOW)


def test_mapped() -> None:
    """Under vmap as row by row."""
    names = ["fmod", "cholesky_ex", "inv_ex", "searchsorted", "sqrt on the cut", "var"]

    def everything(given: dict[str, Any]) -> Any:
        return {n: QUICK[n][0](*given[n]) for n in names}

    rows = {n: [torch.stack([x, x.flip(0)]) for x in QUICK[n][1]] for n in names}
    got = mt.chunked_vmap(everything, 2)(rows)
    for i in range(2):
        expected = everything({n: [x[i] for x in rows[n]] for n in names})
        torch.testing.assert_close(
            torch.utils._pytree.tree_map(lambda v, i=i: v[i], got), expected, equal_nan=True, rtol=2e-5, atol=2e-5
        )


def test_logcumsumexp_in_forward_mode() -> None:
    x = t([0.0, 1.0, 2.0, -1.0], dtype=torch.float64)
    fun = as_torch(as_jax(lambda y: torch.logcumsumexp(y, 0)))
    torch.testing.assert_close(torch.func.jvp(fun, (x,), (torch.ones_like(x),))[1], torch.ones_like(x))
    assert torch.autograd.gradgradcheck(fun, (x.requires_grad_(),))


E, Z = torch.eye(2), torch.zeros(2, 2)
BATCH = torch.stack([E, Z])
CHOLESKY = torch.cholesky if hasattr(torch.ops.aten, "cholesky") else torch.linalg.cholesky  # gone in torch 2.14
HALVES = t([0.5, 0.5])
RAISES: Table = {
    "inv": (torch.linalg.inv, (Z,)),
    "inv of a batch": (torch.inverse, (BATCH,)),
    "solve": (lambda a: torch.linalg.solve(a, torch.ones(2)), (Z,)),
    "cholesky": (torch.linalg.cholesky, (-E,)),
    "cholesky of a batch": (lambda a: CHOLESKY(a, upper=True), (BATCH,)),
    "cholesky_ex": (lambda a: torch.linalg.cholesky_ex(a, check_errors=True).L, (torch.full((2, 2), nan),)),
    "lu_factor": (torch.linalg.lu_factor, (Z,)),
    "matrix_power": (lambda a: torch.linalg.matrix_power(a, -2), (Z,)),
    "svd": (torch.linalg.svdvals, (torch.full((2, 2), nan),)),
    "cholesky_inverse": (torch.cholesky_inverse, (Z,)),
    "bernoulli": (torch.bernoulli, (t([2.0, 0.5]),)),
    "multinomial": (lambda p: torch.multinomial(p, 1), (t([-1.0, 0.5]),)),
    "multinomial of nothing": (lambda p: torch.multinomial(p, 1), (t([0.0, 0.0]),)),
    "poisson": (torch.poisson, (t([-1.0, 0.5]),)),
    "normal": (lambda s: torch.normal(0.0, s), (t([-1.0, 0.5]),)),
    "binary_cross_entropy": (lambda p: F.binary_cross_entropy(p, HALVES), (t([2.0, 0.5]),)),
    "binary_cross_entropy, target": (lambda y: F.binary_cross_entropy(HALVES * 1, y), (t([-1.0, 0.5]),)),
    "assert": (lambda x: (torch._assert_async((x > 0).all(), "must be positive"), x + 1)[1], (Z,)),
}


_SLOW_RAISES = ("normal", "multinomial", "cholesky of a batch", "inv of a batch", "lu_factor", "cholesky_ex")


@pytest.mark.parametrize("name", marked(RAISES, slow=_SLOW_RAISES))
def test_raises_where_eager_torch_does(name: str) -> None:
    fun, args = RAISES[name]
    with pytest.raises(RuntimeError) as expected:
        fun(*args)
    with pytest.raises(type(expected.value), match=r"test_operator_edges\.py:\d+: ") as got:
        as_torch(as_jax(fun))(*args)
    if isinstance(expected.value, torch.linalg.LinAlgError) and name != "cholesky_inverse":
        assert str(expected.value).split(":", 1)[1] in str(got.value)


def test_raises_wherever_the_call_runs() -> None:
    """In gradients, per example, in microbatches; and the program works again after it raised."""
    invert = as_torch(as_jax(torch.linalg.inv))
    weights, rows, fine = {"w": E.clone()}, t([1.0, 0.0, 2.0]), t([1.0, 1.0, 2.0])

    def loss(p: Any, x: Any) -> Any:
        return torch.linalg.solve(p["w"] * x, torch.ones(2)).sum()

    def sums(b: Any) -> Any:
        return torch.linalg.inv(b[:, None, None] * E).sum()

    calls = {
        "gradient": lambda x: torch.autograd.grad(invert(w := (x[1] * E).requires_grad_()).sum(), w),
        "chunks": lambda x: mt.chunked_vmap(lambda a: torch.linalg.inv(a * E), 2)(x),
        "vmap": lambda x: torch.func.vmap(invert)(x[:, None, None] * E),
        "microbatches": lambda x: mt.microbatch(sums, 0, 1, mt.AccumulationType.SUM)(x),
        "clipping": lambda x: mt.clipped_grad(loss, l2_clip_norm=1.0, keep_batch_dim=False)(weights, x),
        "jvp": lambda x: torch.func.jvp(invert, (x[1] * E,), (E,)),
    }
    for name, call in calls.items():
        call(fine)
        with pytest.raises(torch.linalg.LinAlgError, match=r"test_operator_edges\.py:\d+: .*singular"):
            call(rows)
        call(fine), name


def test_no_check_outside_of_cpu_kernels() -> None:
    """A result that is not used still raises, as in eager torch, and ``info`` is left to those who ask for it."""
    with pytest.raises(torch.linalg.LinAlgError):
        as_torch(as_jax(lambda a: (torch.linalg.inv(a), a + 1)[1]))(Z)
    _, info = as_torch(as_jax(lambda a: torch.linalg.inv_ex(a)))(BATCH)
    assert info.tolist() == [0, 1]


def test_sparse_tensors_are_refused() -> None:
    for name in ("to_sparse", "to_sparse_csr"):
        with pytest.raises(TypeError, match=r"test_operator_edges\.py:\d+: sparse tensors"):
            jax.grad(as_jax(lambda x, name=name: getattr(x, name)().to_dense().sum()))(jnp.ones((2, 2)))


def test_no_factorisation_without_pivots() -> None:
    with pytest.raises(RuntimeError, match=r"test_operator_edges.py:\d+: LU without pivoting"):
        as_torch(as_jax(lambda a: torch.linalg.lu_factor(a, pivot=False)))(E)


SPECIAL = (0.0, -0.0, 1.0, -2.0, 1e15, inf, -inf, nan)
NUMBERS = torch.complex(*(t(list(p)) for p in zip(*itertools.product(SPECIAL, SPECIAL), strict=True)))
PAIRS = (NUMBERS[:, None].expand(64, 64).reshape(-1), NUMBERS.repeat(64))
OF_COMPLEX: dict[str, Fun] = {
    "quotient": lambda x, y: x / y,
    "of a real number": lambda x, y: x.real / y,
    "by a real number": lambda x, y: x / y.real,
    "of a number": lambda x, _: 2 / x,
    "atan": lambda x, _: torch.atan(torch.where(x.isinf(), 0, x)),
    **{f"power {p}": lambda x, _, p=p: x**p for p in (-2, -1, -0.5, 0.5)},
    **{
        name: lambda x, _, name=name: getattr(torch, name)(x)
        for name in ("reciprocal", "rsqrt", "sqrt", "abs", "asinh", "acosh", "asin", "acos")
    },
}


def test_complex_numbers_that_are_not_finite_give_what_torch_gives() -> None:
    ours = as_torch(as_jax(lambda x, y: {name: op(x, y) for name, op in OF_COMPLEX.items()}))(*PAIRS)
    for name, op in OF_COMPLEX.items():
        right, result = op(*PAIRS), ours[name]
        assert torch.equal(result.isnan(), right.isnan()), name
        is_number = ~right.isnan()
        assert torch.equal(result.isinf()[is_number], right.isinf()[is_number]), name
        torch.testing.assert_close(result[right.isfinite()], right[right.isfinite()], msg=name)
