"""``compare``: a torch function against its port to JAX, and against what microtome traces of it.

What comes in: a torch function or module, a JAX function, parameters, arguments. ``mapping`` says which torch tensors
the JAX parameters are made of (``proposing`` guesses it). ``torch_side`` and ``jax_side`` compute results and
derivatives, each in two precisions, with one another's dropout masks (``runs``, ``programs``). ``differences`` compares
them leaf by leaf, and tells rounding from a difference; ``locating`` finds the first submodule that differs. What goes
out: a ``report``. Start reading in ``comparison``; ``python -m microtome.torch_api.compare`` is ``__main__``.
"""

from .comparison import compare

__all__ = ["compare"]
