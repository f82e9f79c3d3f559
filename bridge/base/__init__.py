"""What every stage stands on: the private parts of both frameworks, whose code is the user's, the error of tracing.

``versions`` has what differs between releases of JAX, ``torch_internals`` what leans on private parts of torch: a new
release of either is met here. ``user_code`` tells the user's files from libraries' and microtome's own, and ``errors``
finds his line for a message.
"""
