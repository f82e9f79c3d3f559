"""One call of a compiled function, from its signature to its results in torch's autograd.

``as_torch`` prepares a call: which arguments are tensors, which program was made for them. ``flat`` is the call as a
function of flat arrays, its derivatives and maps included; ``compilation`` makes their programs, ``reporting`` lets
them return what failed in them, ``pullbacks`` keeps what a backward pass needs. ``autograd`` puts programs into torch's
graph, ``torch.func`` and forward mode, and holds the cache of programs. Start reading in ``as_torch``.
"""
