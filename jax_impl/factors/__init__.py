"""Sums over examples of what each example computes, without computing it for each.

Take ``y = x @ w`` for one example, ``x [t, i]``, with a cotangent ``d [t, o]``. The gradient of ``w`` is the product
``g[i, o] = sum over t of x[t, i] d[t, o]``. Clipping asks two things of it, and neither needs ``g`` for every example:

* its squared norm, ``sum over s, t of (x[s] . x[t]) (d[s] . d[t])``, two Gram matrices; where t is long, from ``g``
  itself, of one example after another, whichever multiplies less;
* the sum over a batch of the ``g``, each times a number ``c``: one matrix product of ``x`` with ``c * d``, the
  examples being one more axis that is summed over.

So ``g`` stays what it is, a product that is not carried out: a :class:`terms.Term` with the factors ``x`` and ``d``,
whose axes carry labels, and the axes of the result. What a program does with ``g`` before it is summed changes labels
or numbers: a transpose exchanges two labels, a reshape groups them, a scale is kept beside, a sum of gradients is a
list of terms, a gradient put into a larger array is a term with :class:`terms.Places`. This is what a rule does. It
holds for any function, since it is derived from the program and not from layers.

In: the program of one example, which inputs differ between examples, which outputs are only summed
(:class:`factored.Factored`). Out: a function of a microbatch whose sums come as :class:`program.sums.Sum`.

Start reading in :mod:`terms`, and then in this order:

1. :mod:`plan` finds, from the outputs backwards, the variables that are only ever used in ways that rules allow.
2. :mod:`evaluator` traces the program once more. At a variable that was found, a product is not carried out; the rules
   carry it through the operations. What has no rule, or is no larger than its factors, is computed; :mod:`explain` says
   which and why. The program that this gives returns the factors (:mod:`pieces`).
3. :mod:`factored` maps that program over a microbatch, and :mod:`weighted` adds up. What has to be a whole gradient
   runs for one example after another (:mod:`one_by_one`).

Terms: :mod:`terms` (what they are), :mod:`windows` (of convolutions), :mod:`dense` (to an array), :mod:`norms`,
:mod:`centring` (so that norms do not cancel), :mod:`merging`, :mod:`lazy` (sums of terms in the place of arrays).

Rules: :mod:`registry` says how one is written; they are in the file of their kind, :mod:`moves`, :mod:`slices`,
:mod:`arithmetic`, :mod:`squares`, :mod:`contractions`, :mod:`scatter`, :mod:`convolution`, :mod:`scans`. :mod:`casts`
says where the rounding of a cast counts, so that no rule applies.

For layers with hooks this is known as ghost norms (Li et al., 2021, arXiv:2110.05679) and book-keeping (Bu et al.,
2022, arXiv:2210.00038).
"""
