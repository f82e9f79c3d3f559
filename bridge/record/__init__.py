"""torch records a function: once, on fake tensors, under its own autograd and functionalisation.

In comes a flat torch function with the forms of its arguments; out comes a ``graph``: ATen ops over numbered values
(``nodes``), of the forward pass and of the vector-Jacobian product behind it. ``recording`` makes it, ``recorder``
writes the ops down below autograd; ``interception`` stands above autograd: it puts stand-ins in the place of what the
function captures (``captured``), rewrites a few functions in plain torch (``functions``, ``packing``,
``distributions``, ``backward``, ``indexing``), and refuses what has no values yet. ``pruning``, ``moves``,
``rewriting`` and ``extremes`` change or mark a finished graph; ``run`` computes it with JAX. Start reading in
``recording``, then ``graph``.
"""
