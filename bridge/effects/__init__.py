"""What a traced function leaves behind besides its results.

A traced function runs once, and its program at each call. In come the places that the walk found and what stands there
after the run (``side_effects``); out go rules by which each call puts its own values there (``bindings``), made of
containers (``containers``) and of tensors that come from somewhere (``sources``), by the numbers of places in another
walk where need be (``renumbering``). ``running`` runs the function for a trace, among what it may meet and must not
leave; ``escapes`` looks after objects that would carry tensors of the trace out of it, ``dropping`` warns of state that
slices cannot keep. Start reading in ``running``.
"""
