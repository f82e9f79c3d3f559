"""One call of a compiled function, from its signature to its results in torch's autograd.

In come a JAX function and torch's arguments. ``preparing`` tells inputs from static arguments, and whether the call is
known; ``flat`` is the call as a function of flat arrays, its derivatives and maps included; ``compilation`` makes their
programs, ``failures`` lets them return what failed in them, ``pullbacks`` keeps what a backward pass needs;
``autograd`` runs them as part of torch's graph, of ``torch.func`` and of forward mode. Out come tensors. ``cache``
holds what later calls use again, and says what that is. Start reading in ``as_torch``, then ``preparing``.
"""
