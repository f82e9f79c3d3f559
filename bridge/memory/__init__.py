"""Tensors and arrays over the same memory.

In come torch tensors or JAX arrays, out go their counterparts: ``values`` one by one (which memory is shared, and when
a copy is made, is said there), ``trees`` in the containers of both frameworks, ``crossing`` as the public ``to_jax``
and ``to_torch``. ``dtypes`` pairs the dtypes, ``devices`` shares a GPU. Start reading in ``values``.
"""
