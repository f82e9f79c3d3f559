"""How a batch is cut, run piece by piece, and joined again: what microbatches, chunks and clipping share.

In comes a call of the user's function, with the options that say which arguments carry the batch, how large a
microbatch is and what becomes of the outputs. Out comes the joined result, of one trace of the function and one loop.

In the order in which the data passes through:

1. :mod:`arguments`: which arguments carry the batch, found by position or by name (``collect`` gives a ``Batch``).
2. :mod:`differentiation`: loss and gradient of one example, for the transforms that take them.
3. :mod:`partition`: how many rows a microbatch has, which ones, and how they are read (``Options``, ``Plan``).
4. :mod:`loop`: runs it all; **start with** ``accumulate``. Where examples are only summed, it hands the program of one
   example to :mod:`factors`.
5. :mod:`accumulation` and :mod:`fitting`: how the outputs become one result, and a tree of accumulators fitted to the
   tree of the outputs.

:mod:`slices` is the simpler loop of chunks and blocks, which write their results one slice after another. Jacobians and
Hessians are batches of columns or rows: :mod:`matrices` checks and flattens, :mod:`blocks` cuts and fills.
"""
