"""The comparison that the tests of microbatching share."""

import jax
import jax.numpy as jnp
import numpy as np


def assert_same(actual, expected, exact=False):
    """Equal in structure, shape, dtype and value; sums to a few roundings of the largest entry."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        a, e = jnp.asarray(a), jnp.asarray(e)
        assert (a.shape, a.dtype) == (e.shape, e.dtype)
        if exact or not jnp.issubdtype(a.dtype, jnp.inexact):
            np.testing.assert_array_equal(a, e)
            continue
        eps = float(jnp.finfo(a.dtype).eps)
        a, e = (np.asarray(x.astype(jnp.promote_types(x.dtype, jnp.float32))) for x in (a, e))
        scale = np.abs(np.where(np.isfinite(e), e, 0)).max(initial=1.0)
        np.testing.assert_allclose(a, e, rtol=0, atol=32 * eps * scale)


def weak_types(tree):
    """Which leaves take the dtype of what they meet, as a Python number does."""
    return jax.tree.map(lambda leaf: getattr(leaf, "weak_type", False), tree)


def data(*shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape)).astype(dtype)


def clip(grads):
    scale = 1 / jnp.maximum(norm(grads), 0.5)
    return jax.tree.map(lambda g: g * scale if jnp.issubdtype(g.dtype, jnp.inexact) else g, grads)


def norm(grads):
    leaves = [jnp.asarray(g, jnp.promote_types(g.dtype, jnp.float32)) for g in jax.tree.leaves(grads)]
    return jnp.sqrt(sum(jnp.sum(g**2) for g in leaves))
