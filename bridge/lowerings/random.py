"""Random draws: each from the key that the recording numbered it with, never from a generator."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ..memory.dtypes import jax_dtype
from ._registry import lowering
from .signatures import Forms


def _normal(key: Array, results: Forms) -> Array:
    return jax.random.normal(key, results[0].shape, jax_dtype(results[0].dtype))


def _uniform(key: Array, results: Forms) -> Array:
    return jax.random.uniform(key, results[0].shape, jax_dtype(results[0].dtype))


@lowering("aten.randn", "aten.randn_like", results=True, key=True)
def randn(*args: object, key: Array, results: Forms, **kwargs: object) -> Array:
    return _normal(key, results)


@lowering("aten.rand", "aten.rand_like", results=True, key=True)
def rand(*args: object, key: Array, results: Forms, **kwargs: object) -> Array:
    return _uniform(key, results)


@lowering("aten.normal_functional", results=True, key=True)
def normal_functional(
    x: Array, mean: float = 0.0, std: float = 1.0, *, key: Array, results: Forms, generator: None = None
) -> Array:
    return mean + std * _normal(key, results)


@lowering(
    "aten.normal.Tensor_Tensor",
    "aten.normal.Tensor_float",
    "aten.normal.float_Tensor",
    "aten.normal.float_float",
    results=True,
    key=True,
)
def normal(
    mean: Array | float, std: Array | float = 1.0, *args: object, key: Array, results: Forms, **kwargs: object
) -> Array:
    return mean + std * _normal(key, results)


@lowering("aten.uniform", results=True, key=True)
def uniform(
    x: Array, low: float = 0.0, high: float = 1.0, *, key: Array, results: Forms, generator: None = None
) -> Array:
    if low > high:
        raise ValueError(f"uniform_ from {low} to {high}")
    return low + (high - low) * _uniform(key, results)


@lowering("aten.bernoulli.default", key=True)
def bernoulli(p: Array, *, key: Array, generator: None = None) -> Array:
    return jax.random.bernoulli(key, p, p.shape).astype(p.dtype)


@lowering("aten.bernoulli.p", "aten.bernoulli.Tensor", key=True)
def bernoulli_p(x: Array, p: Array | float = 0.5, *, key: Array, generator: None = None) -> Array:
    if isinstance(p, float) and not 0 <= p <= 1:
        raise ValueError(f"bernoulli_ with probability {p}")
    return jax.random.bernoulli(key, p, x.shape).astype(x.dtype)


@lowering("aten.native_dropout", key=True)
def native_dropout(x: Array, p: float, train: bool | None = True, *, key: Array) -> tuple[Array, Array]:
    if not train or p == 0:
        return x, jnp.ones(x.shape, bool)
    if p == 1:
        return jnp.zeros_like(x), jnp.zeros(x.shape, bool)
    keep = jax.random.bernoulli(key, 1 - p, x.shape)
    return jnp.where(keep, x / (1 - p), 0), keep


@lowering("aten.exponential", key=True)
def exponential(x: Array, lambd: float = 1.0, *, key: Array, generator: None = None) -> Array:
    return jax.random.exponential(key, x.shape, x.dtype) / lambd


@lowering("aten.cauchy", key=True)
def cauchy(x: Array, median: float = 0.0, sigma: float = 1.0, *, key: Array, generator: None = None) -> Array:
    return median + sigma * jax.random.cauchy(key, x.shape, x.dtype)


@lowering("aten.log_normal", key=True)
def log_normal(x: Array, mean: float = 1.0, std: float = 2.0, *, key: Array, generator: None = None) -> Array:
    return jnp.exp(mean + std * jax.random.normal(key, x.shape, x.dtype))


@lowering("aten.geometric", key=True)
def geometric(x: Array, p: float, *, key: Array, generator: None = None) -> Array:
    dtype = x.dtype if jnp.issubdtype(x.dtype, jnp.floating) else jnp.float32
    draw = jax.random.uniform(key, x.shape, dtype, minval=jnp.finfo(dtype).tiny)
    return jnp.ceil(jnp.log(draw) / jnp.log1p(-p)).clip(1)


@lowering("aten.poisson", key=True)
def poisson(rate: Array, *, key: Array, generator: None = None) -> Array:
    return jax.random.poisson(key, rate, rate.shape)


@lowering("aten.binomial", key=True)
def binomial(count: Array, probability: Array, *, key: Array, generator: None = None) -> Array:
    return jax.random.binomial(key, count, probability, dtype=count.dtype)


@lowering("aten._standard_gamma", key=True)
def standard_gamma(alpha: Array, *, key: Array, generator: None = None) -> Array:
    return jax.random.gamma(key, alpha, dtype=alpha.dtype)


@lowering("aten._standard_gamma_grad")
def standard_gamma_grad(alpha: Array, sample: Array) -> Array:
    return jax.lax.random_gamma_grad(alpha, sample)


@lowering("aten._sample_dirichlet", key=True)
def sample_dirichlet(alpha: Array, *, key: Array, generator: None = None) -> Array:
    return jax.random.dirichlet(key, alpha, dtype=alpha.dtype)


@lowering("aten.rrelu_with_noise_functional", key=True)
def rrelu(
    x: Array,
    noise: Array,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    *,
    key: Array,
    generator: None = None,
) -> tuple[Array, Array]:
    if not training:
        return jnp.where(x > 0, x, x * ((lower + upper) / 2)), noise
    slopes = jnp.where(x > 0, 1, jax.random.uniform(key, x.shape, x.dtype, lower, upper))
    return x * slopes, slopes


def _integers(low: Any, high: int, key: Array, results: Forms) -> Array:
    if low >= high:
        raise ValueError(f"integers from {low} to below {high}")
    draw = jax.random.randint(key, results[0].shape, low, high, jnp.int64)
    return draw.astype(jax_dtype(results[0].dtype))


@lowering("aten.randint.low", "aten.randint.low_generator", results=True, key=True)
def randint_low(low: int, high: int, *args: object, key: Array, results: Forms, **kwargs: object) -> Array:
    return _integers(low, high, key, results)


@lowering("aten.randint.default", "aten.randint.generator", results=True, key=True)
def randint(high: int, *args: object, key: Array, results: Forms, **kwargs: object) -> Array:
    return _integers(0, high, key, results)


@lowering("aten.randint_like.low_dtype", results=True, key=True)
def randint_like_low(x: Array, low: int, high: int, *, key: Array, results: Forms, **kwargs: object) -> Array:
    return _integers(low, high, key, results)


@lowering("aten.randint_like.default", results=True, key=True)
def randint_like(x: Array, high: int, *, key: Array, results: Forms, **kwargs: object) -> Array:
    return _integers(0, high, key, results)


@lowering("aten.random.from", "aten.random.to", "aten.random.default", results=True, key=True)
def random(x: Array, *bounds: int | None, key: Array, results: Forms, generator: None = None) -> Array:
    """Draw integers in the range asked for, or from all those that the dtype holds exactly."""
    if jnp.issubdtype(x.dtype, jnp.floating):
        top = 1 << (jnp.finfo(x.dtype).nmant + 1)
    elif x.dtype == jnp.bool_:
        top = 2
    else:
        top = int(jnp.iinfo(x.dtype).max) if x.dtype == jnp.int64 else int(jnp.iinfo(x.dtype).max) + 1
    low, high = (0, *bounds) if len(bounds) == 1 else bounds or (0, None)
    return _integers(low, top if high is None else high, key, results)


@lowering("aten.randperm", results=True, key=True)
def randperm(n: int, *, key: Array, results: Forms, **kwargs: object) -> Array:
    return jax.random.permutation(key, n)


@lowering("aten.multinomial", key=True)
def multinomial(p: Array, n: int, replacement: bool = False, *, key: Array, generator: None = None) -> Array:
    """Draw places; without replacement: the n largest of the Gumbel-perturbed log probabilities."""
    if n <= 0:
        raise ValueError(f"cannot draw {n} samples")
    logits = jnp.log(p)
    if replacement or n == 1:
        return jnp.moveaxis(jax.random.categorical(key, logits, -1, shape=(n, *p.shape[:-1])), 0, -1)
    return jax.lax.top_k(logits + jax.random.gumbel(key, p.shape, p.dtype), n)[1]
