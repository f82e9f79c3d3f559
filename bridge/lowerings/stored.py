"""Arrays that XLA computes once and keeps, as torch does, where it would compute them anew for each that reads them."""

from __future__ import annotations

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax import Array
from jax.interpreters import ad, batching, mlir


def stored(array: Array) -> Array:
    """Return the array, which XLA computes once and keeps."""
    return stored_p.bind(array)


def _loop(array: Array) -> Array:
    if not array.size:
        return array
    bits = jnp.dtype(f"int{8 * array.dtype.itemsize}")
    first = (0,) * array.ndim
    # A NaN that no computation gives; of another sign it ends the loop.
    is_marked = lambda x: jax.lax.bitcast_convert_type(x[first], bits) == jnp.iinfo(bits).max
    return jax.lax.while_loop(is_marked, jnp.negative, array)


stored_p = jex.Primitive("stored")
stored_p.def_impl(lambda array: array)
stored_p.def_abstract_eval(lambda array: array)
ad.deflinear2(stored_p, lambda cotangent, array: [cotangent])
batching.defvectorized(stored_p)
mlir.register_lowering(stored_p, mlir.lower_fun(jax.lax.optimization_barrier, multiple_results=False))
mlir.register_lowering(stored_p, mlir.lower_fun(_loop, multiple_results=False), platform="cpu")
