"""What a function reads, before and while it is traced.

In comes a callable. ``walk`` goes through its code, closure, globals and objects, and gives a key: a trace made earlier
is valid as long as the key is the same. It also lists the tensors that the function captures and the places that it may
write to. ``contents`` reads values that are no code, ``names`` the names that code looks up, ``keys`` makes parts of
keys; ``places``, ``uses``, ``flags`` and ``locks`` know one kind of thing each, ``logs`` which lists keys leave out.
What bytecode does not tell is seen by ``watching`` while the function runs. Start reading in ``walk``.
"""
