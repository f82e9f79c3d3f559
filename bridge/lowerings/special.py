"""Special functions that torchax's table lacks: orthogonal polynomials by recurrence, Bessel functions."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from ..memory.dtypes import jax_dtype
from ._registry import lowering
from .signatures import Forms

_State = tuple[Array, Array, Array, Array]


def _by_recurrence(x: Array, n: Array, first: Array, following: Callable[[Array, Array, Array], Array]) -> Array:
    """Compute element n of p₀ = 1, p₁ = ``first``, p(k+1) = ``following(k, p(k-1), p(k))``; 0 where n < 0."""
    n = jnp.where(jnp.abs(n) < 2.0**31, jnp.trunc(n), -1).astype(jnp.int64)  # beyond, torch's conversion overflows too
    x, n, first = jnp.broadcast_arrays(x, n, first)

    def body(state: _State) -> _State:
        k, before, now, found = state
        return k + 1, now, following(k.astype(x.dtype), before, now), jnp.where(n == k, now, found)

    start = (jnp.ones((), jnp.int64), jnp.ones_like(x), first, (n == 0).astype(x.dtype))
    return jax.lax.while_loop(lambda state: state[0] <= jnp.max(n, initial=0), body, start)[3]


def _polynomial(name: str, first: Callable[[Array], Array], shifted: bool = False) -> None:
    """Lower a family that shares the recurrence of the Chebyshev polynomials."""

    def lower(x: ArrayLike, n: ArrayLike, *, results: Forms) -> Array:
        x = jnp.asarray(x, jax_dtype(results[0].dtype))
        y = 2 * x - 1 if shifted else x
        return _by_recurrence(y, jnp.asarray(n), first(y), lambda k, before, now: 2 * y * now - before)

    lowering(f"aten.special_{name}", results=True)(lower)


_polynomial("chebyshev_polynomial_t", lambda x: x)
_polynomial("chebyshev_polynomial_u", lambda x: 2 * x)
_polynomial("chebyshev_polynomial_v", lambda x: 2 * x - 1)
_polynomial("chebyshev_polynomial_w", lambda x: 2 * x + 1)
_polynomial("shifted_chebyshev_polynomial_t", lambda x: x, shifted=True)
_polynomial("shifted_chebyshev_polynomial_u", lambda x: 2 * x, shifted=True)
_polynomial("shifted_chebyshev_polynomial_v", lambda x: 2 * x - 1, shifted=True)
_polynomial("shifted_chebyshev_polynomial_w", lambda x: 2 * x + 1, shifted=True)


_RECURRENCES: dict[str, tuple[Callable[[Array], Array], Callable[..., Array]]] = {
    "hermite_polynomial_h": (lambda x: 2 * x, lambda x, k, before, now: 2 * (x * now - k * before)),
    "hermite_polynomial_he": (lambda x: x, lambda x, k, before, now: x * now - k * before),
    "laguerre_polynomial_l": (
        lambda x: 1 - x,
        lambda x, k, before, now: ((2 * k + 1 - x) * now - k * before) / (k + 1),
    ),
    "legendre_polynomial_p": (lambda x: x, lambda x, k, before, now: ((2 * k + 1) * x * now - k * before) / (k + 1)),
}


def _orthogonal(name: str, first: Callable[[Array], Array], following: Callable[..., Array]) -> None:
    """Lower a family of polynomials; torchax computes in the dtype of its arguments, which may be that of a mask."""

    def lower(x: ArrayLike, n: ArrayLike, *, results: Forms) -> Array:
        x = jnp.asarray(x, jax_dtype(results[0].dtype))
        return _by_recurrence(x, jnp.asarray(n), first(x), lambda k, *two: following(x, k, *two))

    lowering(f"aten.special_{name}", results=True)(lower)


for _name, _terms in _RECURRENCES.items():
    _orthogonal(_name, *_terms)


@lowering("prims.zeta", "aten.special_zeta", results=True)
def zeta(x: ArrayLike, q: ArrayLike, *, results: Forms) -> Array:
    """Compute zeta.

    Below zero the first terms are added one by one: XLA's function adds nine, and looks at ``q`` before ``x``.
    """
    dtype = jax_dtype(results[0].dtype)
    x, q = jnp.broadcast_arrays(jnp.asarray(x, dtype), jnp.asarray(q, dtype))

    def is_below(q: Array) -> Array:
        return (q < 0) & (q != jnp.floor(q))

    def add(state: tuple[Array, Array]) -> tuple[Array, Array]:
        q, total = state
        return jnp.where(is_below(q), q + 1, q), total + jnp.where(is_below(q), q**-x, 0)

    # Other than for whole powers the terms are not real; from -1e6 down they are too many.
    above = jnp.where(is_below(q) & ((x < 1) | (x != jnp.floor(x)) | (q < -1e6)), jnp.nan, q)
    above, first = jax.lax.while_loop(lambda state: is_below(state[0]).any(), add, (above, jnp.zeros_like(x)))
    found = first + jax.scipy.special.zeta(x, above)
    limit = jnp.where(q > 1, 0, jnp.where(q == 1, 1, jnp.where(q < 1, jnp.inf, jnp.nan)))
    found = jnp.where(x == jnp.inf, limit, found)
    found = jnp.where((x == 1) | ((q <= 0) & (q == jnp.floor(q))), jnp.inf, found)
    return jnp.where(x < 1, jnp.nan, found)


@lowering("prims.spherical_bessel_j0", "aten.special_spherical_bessel_j0")
def spherical_bessel_j0(x: Array) -> Array:
    safe = jnp.where((x == 0) | jnp.isinf(x), 1, x)
    return jnp.where(x == 0, 1, jnp.where(jnp.isinf(x), 0, jnp.sin(safe) / safe))


@lowering("prims.erfcx", "aten.special_erfcx")
def erfcx(x: Array) -> Array:
    """Compute exp(x²) erfc(x).

    torchax multiplies in the dtype of x, and in float32 the square overflows from x = 9.4 on. In float64 the product
    holds up to 26; beyond 20, eight terms of the asymptotic series are exact to rounding.
    """
    wide = x.astype(jnp.float64)
    near = jnp.where(wide < 20, wide, 0)
    far = jnp.where(wide < 20, 20, wide)
    z = -0.5 / far**2
    series = jnp.ones_like(z)
    for k in range(15, 0, -2):
        series = 1 + k * z * series
    far_value = series / (far * jnp.sqrt(jnp.pi))
    return jnp.where(wide < 20, jnp.exp(near**2) * jax.scipy.special.erfc(near), far_value).astype(x.dtype)


def _scaled_k(x: Array, order: int) -> Array:
    """Compute exp(x) K(x) = ∫ exp(-x (cosh t - 1)) cosh(order t) dt over t > 0.

    The trapezoidal rule converges exponentially here. The integrand is cut off where its exponent reaches -750, below
    what float64 can hold.
    """
    steps = 512
    x = x.astype(jnp.float64)
    width = jnp.arccosh(1 + 750 / jnp.where(x > 0, x, 1)) / steps

    def add(i: Array, total: Array) -> Array:
        t = i * width
        return total + jnp.exp(-2 * x * jnp.sinh(t / 2) ** 2) * jnp.cosh(order * t)

    total = jax.lax.fori_loop(1, steps, add, jnp.full_like(x, 0.5)) * width
    total = jnp.where(jnp.isinf(x), 0, total)
    return jnp.where(x > 0, total, jnp.where(x == 0, jnp.inf, jnp.nan))


@lowering("aten.special_scaled_modified_bessel_k0")
def scaled_modified_bessel_k0(x: Array) -> Array:
    return _scaled_k(x, 0)


@lowering("aten.special_scaled_modified_bessel_k1")
def scaled_modified_bessel_k1(x: Array) -> Array:
    return _scaled_k(x, 1)
