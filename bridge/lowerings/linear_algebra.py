"""Linear algebra: LU and what rests on it, and factorisations that read one triangle as torch does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

import jax
import jax.numpy as jnp
from jax import Array

from ._registry import lowering
from .signatures import Forms, Number


def _adjoint(a: Array) -> Array:
    return jnp.conj(jnp.swapaxes(a, -1, -2))


def _lu(a: Array) -> tuple[Array, Array, Array, Array]:
    """Return packed LU, pivots counted from 1 as LAPACK does, the diagonal, and the sign of the permutation."""
    lu, pivots, _ = jax.lax.linalg.lu(a)
    diagonal = jnp.diagonal(lu, axis1=-2, axis2=-1)
    swaps = (pivots != jnp.arange(pivots.shape[-1])).sum(-1)
    return lu, (pivots + 1).astype(jnp.int32), diagonal, jnp.where(swaps % 2 == 0, 1, -1).astype(a.dtype)


def _solve(lu: Array, pivots: Array, b: Array, left: bool = True, adjoint: bool = False) -> Array:
    if not left:  # x A = b  is  Aᴴ xᴴ = bᴴ
        return _adjoint(_solve(lu, pivots, _adjoint(b), adjoint=not adjoint))

    def solve(lu: Array, pivots: Array, b: Array) -> Array:
        return jax.scipy.linalg.lu_solve((lu, pivots - 1), b, trans=2 if adjoint else 0)

    for _ in range(max(lu.ndim, b.ndim) - 2):
        solve = jax.vmap(solve)
    lead = jnp.broadcast_shapes(lu.shape[:-2], b.shape[:-2])
    spread = [jnp.broadcast_to(v, (*lead, *v.shape[v.ndim - k :])) for v, k in ((lu, 2), (pivots, 1), (b, 2))]
    return solve(*spread)


@lowering("aten._linalg_det")
def det(a: Array, of_transpose: bool = False) -> tuple[Array, Array, Array]:
    lu, pivots, diagonal, sign = _lu(jnp.swapaxes(a, -1, -2) if of_transpose else a)
    return sign * diagonal.prod(-1), lu, pivots


@lowering("aten._linalg_slogdet")
def slogdet(a: Array, of_transpose: bool = False) -> tuple[Array, Array, Array, Array]:
    lu, pivots, diagonal, sign = _lu(jnp.swapaxes(a, -1, -2) if of_transpose else a)
    signs = jnp.where(diagonal != diagonal, 0, jnp.sign(diagonal))  # that of NaN is zero in torch
    return sign * signs.prod(-1), jnp.log(jnp.abs(diagonal)).sum(-1), lu, pivots


@lowering("aten.linalg_lu_factor_ex")
def lu_factor(a: Array, pivot: bool = True, check_errors: bool = False) -> tuple[Array, Array, Array]:
    _check_pivots(pivot)
    lu, pivots, diagonal, _ = _lu(a)
    return lu, pivots, _first(diagonal == 0)


def _check_pivots(pivot: bool) -> None:
    if not pivot:
        raise RuntimeError("LU without pivoting has no counterpart in JAX, and is not implemented in torch on the CPU")


def _first(bad: Array) -> Array:
    """Return LAPACK's ``info``: the first place, counted from 1, where something is bad; 0 if nothing is."""
    if not bad.shape[-1]:
        return jnp.zeros(bad.shape[:-1], jnp.int32)
    return jnp.where(bad.any(-1), jnp.argmax(bad, -1) + 1, 0).astype(jnp.int32)


@lowering("aten.linalg_inv_ex")
def inv_ex(a: Array, check_errors: bool = False) -> tuple[Array, Array]:
    lu, pivots, diagonal, _ = _lu(a)
    identity = jnp.broadcast_to(jnp.eye(a.shape[-1], dtype=a.dtype), a.shape)
    return _solve(lu, pivots, identity), _first(diagonal == 0)


@lowering("aten.linalg_cholesky_ex")
def cholesky_ex(a: Array, upper: bool = False, check_errors: bool = False) -> tuple[Array, Array]:
    if not a.size:
        return a, jnp.zeros(a.shape[:-2], jnp.int32)
    lower = _adjoint(a) if upper else a
    factor = jax.lax.linalg.cholesky(lower, symmetrize_input=False)
    return _adjoint(factor) if upper else factor, _not_definite(lower, jnp.diagonal(factor, axis1=-2, axis2=-1))


def _not_definite(lower: Array, diagonal: Array) -> Array:
    """Return the order of the first leading minor that is not positive; 0 where the factor has a finite ``diagonal``.

    By elimination, one column after another: in no step where all diagonals are finite.
    """
    failed = ~jnp.isfinite(diagonal).all(-1)
    strict = jnp.tril(lower, -1)
    real = jnp.diagonal(lower, axis1=-2, axis2=-1).real.astype(lower.dtype)
    whole = strict + _adjoint(strict) + real[..., None] * jnp.eye(lower.shape[-1], dtype=lower.dtype)
    size = lower.shape[-1]

    def searches(state: tuple[Array, Array, Array]) -> Array:
        k, _, info = state
        return (k < size) & (failed & (info == 0)).any()

    def eliminate(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        k, rest, info = state
        column = jax.lax.dynamic_index_in_dim(rest, k, -1, keepdims=False)
        pivot = jax.lax.dynamic_index_in_dim(column, k, -1)
        bad = ~(pivot[..., 0].real > 0)
        info = jnp.where(failed & (info == 0) & bad, k + 1, info).astype(jnp.int32)
        return k + 1, rest - (column / pivot)[..., :, None] * jnp.conj(column)[..., None, :], info

    start = jnp.zeros((), jnp.int32), whole, jnp.zeros(lower.shape[:-2], jnp.int32)
    _, _, info = jax.lax.while_loop(searches, eliminate, start)
    return jnp.where(jnp.isnan(diagonal).any(-1) & (info == 0), size, info).astype(jnp.int32)


def _spread(*matrices: Array) -> list[Array]:
    """Give matrices the same leading axes."""
    lead = jnp.broadcast_shapes(*(m.shape[:-2] for m in matrices))
    return [jnp.broadcast_to(m, (*lead, *m.shape[-2:])) for m in matrices]


@lowering("aten.linalg_solve_triangular")
def solve_triangular(a: Array, b: Array, *, upper: bool, left: bool = True, unitriangular: bool = False) -> Array:
    """Solve by a triangular matrix; torchax does not spread the leading axes."""
    a, b = _spread(a, b)
    return jax.lax.linalg.triangular_solve(a, b, left_side=left, lower=not upper, unit_diagonal=unitriangular)


@lowering("aten.cholesky_solve")
def cholesky_solve(b: Array, factor: Array, upper: bool = False) -> Array:
    """Solve by Cholesky's factor; torchax transposes all axes of an upper factor, and conjugates none."""
    b, factor = _spread(b, factor)
    lower = _adjoint(factor) if upper else factor
    half = jax.lax.linalg.triangular_solve(lower, b, left_side=True, lower=True)
    return jax.lax.linalg.triangular_solve(lower, half, left_side=True, lower=True, transpose_a=True, conjugate_a=True)


@lowering("aten.cholesky_inverse")
def cholesky_inverse(factor: Array, upper: bool = False) -> Array:
    """Invert by Cholesky's factor; torchax takes any factor for a lower one, and reads both of its triangles."""
    return cholesky_solve(jnp.eye(factor.shape[-1], dtype=factor.dtype), factor, upper)


@lowering("aten.linalg_lu_solve")
def lu_solve(lu: Array, pivots: Array, b: Array, left: bool = True, adjoint: bool = False) -> Array:
    return _solve(lu, pivots, b, left, adjoint)


@lowering("aten._linalg_solve_ex")
def solve_ex(a: Array, b: Array, left: bool = True, check_errors: bool = False) -> tuple[Array, ...]:
    lu, pivots, diagonal, _ = _lu(a)
    vector = b.ndim == 1 or (b.ndim == a.ndim - 1 and b.shape == a.shape[:-1])
    x = _solve(lu, pivots, b[..., None] if vector else b, True if vector else left)
    return x[..., 0] if vector else x, lu, pivots, _first(diagonal == 0)


@lowering("aten.lu_unpack")
def lu_unpack(lu: Array, pivots: Array, data: bool = True, with_pivots: bool = True) -> tuple[Array, Array, Array]:
    rows, columns = lu.shape[-2:]
    inner = min(rows, columns)
    lower = jnp.tril(lu, -1)[..., :inner] + jnp.eye(rows, inner, dtype=lu.dtype)
    permutation = jax.lax.linalg.lu_pivots_to_permutation((pivots - 1).astype(jnp.int32), rows)
    p = jnp.swapaxes(jax.nn.one_hot(permutation, rows, dtype=lu.dtype), -1, -2)
    nothing = jnp.zeros(0, lu.dtype)  # what torch gives for the factors that were not asked for
    factors = (lower, jnp.triu(lu)[..., :inner, :]) if data else (nothing, nothing)
    return (p if with_pivots else nothing, *factors)


@lowering("aten._linalg_eigh")
def eigh(a: Array, uplo: str = "L", vectors: bool = True) -> tuple[Array, Array]:
    """Compute eigenvalues and eigenvectors: torch reads one triangle; jnp would average the two."""
    v, w = jax.lax.linalg.eigh(a, lower=uplo == "L", symmetrize_input=False)
    return w, v


@lowering("aten.linalg_lu")
def linalg_lu(a: Array, pivot: bool = True) -> tuple[Array, Array, Array]:
    """Factor into P, L and U; torchax slices by a traced size, which does not compile."""
    _check_pivots(pivot)
    lu, pivots, _, _ = _lu(a)
    return lu_unpack(lu, pivots)


@lowering("aten.linalg_pinv.atol_rtol_tensor")
def pinv(a: Array, *, atol: Array | None = None, rtol: Array | None = None, hermitian: bool = False) -> Array:
    """Compute the pseudo-inverse; torchax heeds neither ``atol`` nor ``hermitian``, which reads one triangle."""
    if a.size == 0:
        return jnp.zeros((*a.shape[:-2], a.shape[-1], a.shape[-2]), a.dtype)
    if hermitian:
        w, left = eigh(a)
        right, size = _adjoint(left), jnp.abs(w)
    else:
        left, w, right = jnp.linalg.svd(a, full_matrices=False)
        size = w
    usual = jnp.finfo(a.dtype).eps * max(a.shape[-2:])
    least = jnp.asarray(0.0 if atol is None else atol)
    relative = jnp.where(least > 0, 0.0, usual) if rtol is None else jnp.asarray(rtol)
    limit = jnp.maximum(least[..., None], relative[..., None] * size.max(-1, keepdims=True))
    inverse = jnp.where(size > limit, 1 / jnp.where(w == 0, 1, w), 0).astype(a.dtype)
    return _adjoint((left * inverse[..., None, :]) @ right)


@lowering("aten.geqrf")
def geqrf(a: Array) -> tuple[Array, Array]:
    """Return Householder reflections: R above the diagonal, the reflections below it, and their factors."""
    packed, factors = jnp.linalg.qr(a, mode="raw")
    return jnp.swapaxes(packed, -1, -2), factors


@lowering("aten.linalg_qr")
def qr(a: Array, mode: str = "reduced") -> tuple[Array, Array]:
    """Factor into Q and R; torchax gives R alone in the mode that leaves out Q."""
    if mode == "r":
        return jnp.zeros(0, a.dtype), jnp.linalg.qr(a, mode="r")
    q, r = jnp.linalg.qr(a, mode=mode)
    return q, r


@lowering("aten.mv", "aten.dot")
def product(a: Array, b: Array) -> Array:
    """Multiply; torch's decomposition multiplies and sums, which is no product of matrices to XLA under a map."""
    return a @ b


@lowering("aten._euclidean_dist")
def euclidean_distance(a: Array, b: Array) -> Array:
    """Compute distances by one product, as in torch, which puts the squares into copies of both operands."""
    wide = jnp.promote_types(a.dtype, jnp.float32)
    squares = [jnp.square(x.astype(wide)).sum(-1) for x in (a, b)]
    product = jnp.matmul(a, jnp.swapaxes(b, -1, -2), preferred_element_type=wide)
    return jnp.sqrt(jnp.maximum(squares[0][..., :, None] + squares[1][..., None, :] - 2 * product, 0))


@lowering("aten.vdot")
def product_of_conjugate(a: Array, b: Array) -> Array:
    return jnp.conj(a) @ b


@lowering("aten._trilinear")
def trilinear(
    a: Array,
    b: Array,
    c: Array,
    expand_a: Sequence[int],
    expand_b: Sequence[int],
    expand_c: Sequence[int],
    summed: Sequence[int],
    unroll: int = 1,
) -> Array:
    """Multiply three arrays, each without the axes that it is to be expanded by, and sum over some axes."""
    axes = range(a.ndim + len(expand_a))
    labels = [[i for i in axes if i not in expanded] for expanded in (expand_a, expand_b, expand_c)]
    # Two at a time: the array of all products is never made.
    return jnp.einsum(a, labels[0], b, labels[1], c, labels[2], [i for i in axes if i not in summed], optimize=True)


@lowering("aten.addmm", "aten.addmv", results=True)
def add_product(x: Array, a: Array, b: Array, *, beta: Number = 1, alpha: Number = 1, results: Forms) -> Array:
    return _scaled_sum(jnp.broadcast_to(x, results[0].shape), lambda: a @ b, beta, alpha)


@lowering("aten.addbmm", results=True)
def add_products(x: Array, a: Array, b: Array, *, beta: Number = 1, alpha: Number = 1, results: Forms) -> Array:
    return _scaled_sum(jnp.broadcast_to(x, results[0].shape), lambda: jnp.einsum("bij,bjk->ik", a, b), beta, alpha)


def _scaled_sum(x: Array, product: Callable[[], Array], beta: Number, alpha: Number) -> Array:
    """Compute ``beta * x + alpha * product()``; what is multiplied by zero is not read: it may be NaN."""

    def scaled(v: Array, by: Number) -> Array:
        return v if by == 1 else v * jnp.asarray(by, v.dtype)

    if alpha == 0:
        return jnp.zeros_like(x) if beta == 0 else scaled(x, beta)
    made = scaled(product(), alpha)
    return made if beta == 0 else scaled(x, beta) + made


@lowering("aten.ormqr")
def ormqr(a: Array, tau: Array, other: Array, left: bool = True, transpose: bool = False) -> Array:
    return jax.lax.linalg.ormqr(a, tau, other, left=left, transpose=transpose)


@lowering("aten.linalg_ldl_factor_ex")
def ldl_factor(a: Array, **kwargs: object) -> NoReturn:
    """Refuse; torchax goes by way of Cholesky's factors, which an indefinite matrix does not have."""
    raise NotImplementedError("JAX has no factorisation with pivoting of an indefinite matrix")


def _of_groups(rows: Array, ends: Array) -> Array:
    """Return each group's rows, ``[groups, rows, ...]``, those of others zero; a group ends where the next begins."""
    group = jnp.searchsorted(ends, jnp.arange(rows.shape[0]), side="right")
    return jnp.where((group == jnp.arange(ends.size)[:, None])[..., None], rows, 0)


@lowering("transformers.grouped_mm_fallback")
def product_of_groups(rows: Array, weights: Array, ends: Array) -> Array:
    """Compute the layers of a mixture of experts, where transformers cannot take ``torch.nn.functional.grouped_mm``."""
    return jnp.einsum("gri,gio->ro", _of_groups(rows, ends), weights)


@lowering("transformers.grouped_mm_fallback_backward")
def gradients_of_groups(rows: Array, weights: Array, ends: Array, g: Array) -> tuple[Array, Array]:
    own = _of_groups(g, ends)
    return jnp.einsum("gro,gio->ri", own, weights), jnp.einsum("ri,gro->gio", rows, own)
