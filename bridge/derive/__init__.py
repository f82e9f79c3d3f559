"""A recorded function as JAX primitives, with derivatives of every order by torch's own autograd.

In comes a flat torch function, out comes one that JAX can trace. ``functions`` keeps its recordings and the programs of
its derivatives, each of which one of the two ``primitives`` carries; ``derivatives`` has the rules by which torch
differentiates further, as torch functions that are recorded in their turn. ``specialised`` is what an engine made of a
function for one signature, ``context`` what a running call tells the traced functions inside it; ``dependence`` says
what depends on what in a jaxpr with such functions in it; ``repeating`` calls a function a second time, to see whether
slices would compute what the first call did. Start reading in ``functions``.
"""
