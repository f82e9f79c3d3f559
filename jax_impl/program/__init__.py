"""Programs as data: jaxprs evaluated, written out and looked through. Imports nothing but JAX.

In comes a ``ClosedJaxpr``, as ``jax.make_jaxpr`` makes it of a function; out come the values that it computes, another
program that computes the same, or what can be known of its variables. Nothing here knows of batches or gradients.

Start with :mod:`evaluate`, the only interpreter: it goes through the equations and asks a function, a hook, to compute
each. All others are such hooks, or read the equations:

* :mod:`convolutions`: runs a program with its convolutions in the forms that XLA is fast in on CPU;
* :mod:`inline`: a program without calls. A primitive that stands for a program but is to stay whole until then, as a
  traced torch function, is registered by :func:`inline.stands_for` where it is defined;
* :mod:`dataflow`: who makes and who reads a variable, what is needed, what depends on what;
* :mod:`sums`: sums over rows and steps that lose no small terms;
* :mod:`trees`: pytrees, dtypes, and the types of the carries of loops;
* :mod:`versions`: what differs between releases of JAX.
"""
