"""Linear algebra: LU and what rests on it, and factorisations that read one triangle as torch does."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ._registry import lowering


def _lu(a: Array) -> tuple[Array, Array, Array, Array]:
    """Packed LU, pivots counted from 1 as LAPACK does, the diagonal, and the sign of the permutation."""
    lu, pivots, _ = jax.lax.linalg.lu(a)
    diagonal = jnp.diagonal(lu, axis1=-2, axis2=-1)
    swaps = (pivots != jnp.arange(pivots.shape[-1])).sum(-1)
    return lu, (pivots + 1).astype(jnp.int32), diagonal, jnp.where(swaps % 2 == 0, 1, -1).astype(a.dtype)


def _solve(lu: Array, pivots: Array, b: Array, left: bool = True, adjoint: bool = False) -> Array:
    if not left:  # x A = b  is  Aᴴ xᴴ = bᴴ
        flipped = _solve(lu, pivots, jnp.conj(jnp.swapaxes(b, -1, -2)), adjoint=not adjoint)
        return jnp.conj(jnp.swapaxes(flipped, -1, -2))

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
    return sign * jnp.sign(diagonal).prod(-1), jnp.log(jnp.abs(diagonal)).sum(-1), lu, pivots


@lowering("aten.linalg_lu_factor_ex")
def lu_factor(a: Array, pivot: bool = True, check_errors: bool = False) -> tuple[Array, Array, Array]:
    lu, pivots, _, _ = _lu(a)
    return lu, pivots, jnp.zeros(a.shape[:-2], jnp.int32)


@lowering("aten.linalg_lu_solve")
def lu_solve(lu: Array, pivots: Array, b: Array, left: bool = True, adjoint: bool = False) -> Array:
    return _solve(lu, pivots, b, left, adjoint)


@lowering("aten._linalg_solve_ex")
def solve_ex(a: Array, b: Array, left: bool = True, check_errors: bool = False) -> tuple[Array, ...]:
    lu, pivots, _, _ = _lu(a)
    vector = b.ndim == 1 or (b.ndim == a.ndim - 1 and b.shape == a.shape[:-1])
    x = _solve(lu, pivots, b[..., None] if vector else b, True if vector else left)
    return x[..., 0] if vector else x, lu, pivots, jnp.zeros(a.shape[:-2], jnp.int32)


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
def eigh(a: Array, uplo: str = "L", vectors: bool = True) -> tuple[Any, Any]:
    """torch reads one triangle; jnp would average the two."""
    v, w = jax.lax.linalg.eigh(a, lower=uplo == "L", symmetrize_input=False)
    return w, v


@lowering("aten.linalg_lu")
def linalg_lu(a: Array, pivot: bool = True) -> tuple[Array, Array, Array]:
    """torchax slices by a traced size, which does not compile."""
    if not pivot:
        raise NotImplementedError("linalg.lu without pivoting has no counterpart in JAX")
    lu, pivots, _, _ = _lu(a)
    return lu_unpack(lu, pivots)


@lowering("aten.linalg_pinv.atol_rtol_tensor")
def pinv(a: Array, *, atol: Array | None = None, rtol: Array | None = None, hermitian: bool = False) -> Array:
    """torchax heeds neither ``atol`` nor ``hermitian``, which reads one triangle."""
    if a.size == 0:
        return jnp.zeros((*a.shape[:-2], a.shape[-1], a.shape[-2]), a.dtype)
    if hermitian:
        w, left = eigh(a)
        right, size = jnp.conj(jnp.swapaxes(left, -1, -2)), jnp.abs(w)
    else:
        left, w, right = jnp.linalg.svd(a, full_matrices=False)
        size = w
    usual = jnp.finfo(a.dtype).eps * max(a.shape[-2:])
    least = jnp.asarray(0.0 if atol is None else atol)
    relative = jnp.where(least > 0, 0.0, usual) if rtol is None else jnp.asarray(rtol)
    limit = jnp.maximum(least[..., None], relative[..., None] * size.max(-1, keepdims=True))
    inverse = jnp.where(size > limit, 1 / jnp.where(w == 0, 1, w), 0).astype(a.dtype)
    return jnp.conj(jnp.swapaxes((left * inverse[..., None, :]) @ right, -1, -2))


@lowering("aten.geqrf")
def geqrf(a: Array) -> tuple[Array, Array]:
    """Householder reflections: R above the diagonal, the reflections below it, and their factors."""
    packed, factors = jnp.linalg.qr(a, mode="raw")
    return jnp.swapaxes(packed, -1, -2), factors


@lowering("aten.ormqr")
def ormqr(a: Array, tau: Array, other: Array, left: bool = True, transpose: bool = False) -> Array:
    return jax.lax.linalg.ormqr(a, tau, other, left=left, transpose=transpose)


@lowering("aten.linalg_ldl_factor_ex")
def ldl_factor(a: Array, **kwargs: Any) -> Any:
    """torchax goes by way of Cholesky's factors, which an indefinite matrix does not have."""
    raise NotImplementedError("JAX has no factorisation with pivoting of an indefinite matrix")
