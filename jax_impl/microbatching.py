"""Microbatched evaluation, vmap and per-example gradients, after ``optax.microbatching``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .batches.accumulation import AccumulationType, Accumulator, AccumulatorTree
from .batches.arguments import Signature, Slot, axis_of_keyword, collect, indices, mapped_axes, slots, wraps
from .batches.differentiation import places_to_differentiate, value_and_grad
from .batches.fitting import checked_tree
from .batches.loop import VmapFn, accumulate, explained
from .batches.partition import Options
from .factors.explain import Explanation
from .program.trees import Function, PyTree


class Aux(NamedTuple):
    """What :func:`micro_grad` returns beside the gradients, the examples on axis 0 of every leaf."""

    values: Any
    """The losses, ``[batch]``."""
    metrics: Any
    """What ``metrics_fn`` returned."""
    aux: Any
    """The function's own auxiliary output; None without ``has_aux``."""


def microbatch(
    fun: Function,
    argnums: int | Sequence[int],
    microbatch_size: int | None,
    accumulator: Accumulator | AccumulationType | AccumulatorTree = AccumulationType.SUM,
    *,
    argnames: str | Sequence[str] = (),
    in_axes: PyTree = 0,
    num_real_microbatches: int | jax.Array | None = None,
    remainder: str = "error",
    partition: str = "strided",
) -> Function:
    """Run a function on one microbatch after another and join the results.

    Equivalent to ``fun``, for a ``fun`` whose result on a batch is the sum, mean or concatenation of its results on
    the parts, as the accumulator says. What differs:

    * Peak memory is that of ``fun`` on ``microbatch_size`` rows plus the accumulated result, whatever the number of
      microbatches: ``M(microbatch_size) + result``, not ``M(batch)``.
    * The same holds for derivatives, in reverse mode at the price of a second forward pass: each microbatch is
      computed again when its turn comes (``jax.checkpoint``), so ``M'(microbatch_size) + gradients``.
    * Microbatches run in sequence, in one scan that does not grow with their number. ``fun`` is traced once at each
      call, and once more for left-over rows. Outside ``jax.jit`` every call compiles anew: wrap the result.

    Random functions: split the key into one per row and pass the keys as a batch argument
    (``jax.random.split(key, batch)``). What a row draws then depends on its key alone, not on how the batch was cut.

    After ``optax.microbatching.microbatch``; ``remainder``, ``partition`` and prefix trees in ``in_axes`` are added.

    Shapes: batch arguments are pytrees of arrays ``[..., batch, ...]`` of any dtype, ``fun`` gets them as
    ``[..., microbatch_size, ...]`` of the same dtype. The result has the tree, shapes and dtypes of the output,
    axis 0 of a ``CONCAT`` apart. On an empty batch ``fun`` is traced, not run: sums are 0, concatenations empty,
    means NaN (nothing was averaged).

    Args:
        fun: The function. What is no batch argument goes to it unchanged.
        argnums: The positions of the batch arguments. Each may be passed by name too.
        microbatch_size: Rows of a microbatch; None for a single microbatch of all rows.
        accumulator: How to join the outputs: an :class:`AccumulationType`, an :class:`Accumulator`, or a tree of
            them that is a prefix of the output's tree.
        argnames: The names of further batch arguments. Each may be passed by position too.
        in_axes: The batch axis: an int for all, or a sequence with one entry for each of ``argnums`` and then
            ``argnames``: an int, None for an argument all rows share, or a tree of these that is a prefix of the
            argument.
        num_real_microbatches: Stop after so many microbatches, the others being padding; an int, or a traced integer
            of shape ``()`` to vary it without compiling anew (clipped to the number there is).
        remainder: ``"error"``, or ``"run"`` to run left-over rows as one smaller microbatch at the end. Means are
            weighted by rows. An :class:`Accumulator` of your own gets its output like the others.
        partition: ``"strided"``: microbatch k of n takes the rows k, k + n, ..., so that a batch spread over devices
            keeps them all busy. ``"contiguous"``: rows in order, as ``num_real_microbatches`` needs where the padding
            stands at the batch's end. Left-over rows are the batch's last ones in both.

    Returns:
        A function with the signature of ``fun``, to be transformed by ``jit``, ``grad``, ``vmap`` or once more.

    Raises:
        TypeError: An option of a wrong type, ``MEAN`` of an integer output, a batch argument missing or no array.
        ValueError: ``argnums`` out of range, an unknown name or option, a size that is not positive or does not
            divide the batch, batch arguments of different length or without batch axis, ``in_axes`` or
            ``accumulator`` that does not fit the tree.

    Example:
        >>> import jax.numpy as jnp
        >>> from microtome.jax_impl import AccumulationType, microbatch
        >>> fun = lambda x: (2 * x, jnp.mean(x))
        >>> joined = (AccumulationType.CONCAT, AccumulationType.MEAN)
        >>> microbatch(fun, argnums=0, microbatch_size=2, accumulator=joined, remainder="run")(jnp.arange(5.0))
        (Array([0., 2., 4., 6., 8.], dtype=float32), Array(2., dtype=float32))
    """
    options = Options.checked(microbatch_size, remainder, partition, num_real_microbatches)
    accumulator = checked_tree(accumulator)
    arguments = Signature.of(fun)
    names = (argnames,) if isinstance(argnames, str) else tuple(argnames)
    if not all(isinstance(name, str) for name in names):
        raise TypeError(f"argnames must be a string or a sequence of strings, got {argnames!r}.")
    targets: list[Slot] = [arguments.check("argnums", i) for i in indices("argnums", argnums)]
    targets += [arguments.check("argnames", name) for name in names]
    axes = _axis_of_each(in_axes, len(targets))

    @wraps(fun)
    def microbatched(*args: Any, **kwargs: Any) -> Any:
        found = slots(arguments, "argnums or argnames", targets, args, kwargs)
        given = [(slot, axis) for slot, axis in zip(found, axes, strict=True) if slot is not None]
        batch = collect(arguments, args, kwargs, given)

        def on_leaves(*leaves: jax.Array) -> Any:
            new_args, new_kwargs = batch.rebuild(leaves)
            return fun(*new_args, **new_kwargs)

        with jax.named_scope("microbatch"):
            return accumulate(on_leaves, batch, options.plan(batch.rows), accumulator)

    return microbatched


def _axis_of_each(in_axes: PyTree, count: int) -> tuple[PyTree, ...]:
    if isinstance(in_axes, int) and not isinstance(in_axes, bool):
        return (in_axes,) * count
    if not isinstance(in_axes, (tuple, list)):
        raise TypeError(
            f"in_axes must be an int or a sequence with one entry for each batch argument, got {in_axes!r}."
        )
    if len(in_axes) != count:
        raise ValueError(
            f"in_axes must have one entry for each of argnums and argnames, {count}, got {len(in_axes)}: {in_axes!r}."
        )
    return tuple(in_axes)


def micro_vmap(
    fun: Function,
    in_axes: PyTree = 0,
    out_axes: int = 0,
    *,
    microbatch_size: int | None = None,
    vmap_fn: VmapFn = jax.vmap,
    accumulator: Accumulator | AccumulationType | AccumulatorTree = AccumulationType.CONCAT,
    num_real_microbatches: int | jax.Array | None = None,
    remainder: str = "error",
    partition: str = "strided",
) -> Function:
    """Map a function over a batch, one microbatch at a time.

    Equivalent to ``jax.vmap(fun, in_axes)``, and with another accumulator to, say,
    ``jax.tree.map(lambda y: y.sum(0), jax.vmap(fun, in_axes)(*args))``. What differs:

    * Peak memory is that of ``jax.vmap(fun)`` on ``microbatch_size`` examples plus the result:
      ``microbatch_size * M(1) + result``, for derivatives too, where each microbatch is computed twice. With ``SUM``
      or ``MEAN`` the outputs of all examples never exist together.
    * ``fun`` is traced once at each call, for one example.
    * An int ``in_axes`` stands for every positional argument. Keyword arguments are mapped over axis 0, as by
      ``jax.vmap``, unless a sequence ``in_axes`` has an entry for their position; in place of an array they may be
      any Python value, which all examples then share.

    A random ``fun`` takes a key, and the mapped call an array of them (``jax.random.split(key, batch)``).

    After ``optax.microbatching.micro_vmap``; ``remainder``, ``partition`` and prefix trees in ``in_axes`` are added.

    Shapes: mapped arrays ``[..., batch, ...]``, results ``[batch, ...]`` under ``CONCAT``, else without the batch.
    Dtypes are those of ``fun``; a ``SUM`` of booleans or integers has that of ``jnp.sum``.

    Args:
        fun: The function of one example.
        in_axes: An int, or a sequence with one entry for each positional argument: an int, None for one that all
            examples share, or a tree of these that is a prefix of the argument.
        out_axes: 0, the only place the batch can have in the results.
        microbatch_size: Examples of a microbatch; None for all at once.
        vmap_fn: What maps over a microbatch, called like ``jax.vmap`` as ``vmap_fn(f, in_axes, 0)``, for instance
            ``functools.partial(jax.vmap, axis_name="i")``. ``f`` takes the mapped arrays one by one. It is traced once
            more for left-over rows.
        accumulator: How to join the examples' outputs: an :class:`AccumulationType`, an :class:`Accumulator`, or a
            tree of them that is a prefix of the output's tree. Means weigh each example the same.
        num_real_microbatches: Stop after so many microbatches; see :func:`microbatch`.
        remainder: ``"error"``, or ``"run"`` to run left-over examples as one smaller microbatch at the end.
        partition: ``"strided"`` or ``"contiguous"``; see :func:`microbatch`.

    Returns:
        A function with the signature of ``fun`` that takes and returns batches.

    Raises:
        NotImplementedError: ``out_axes`` is not 0.
        TypeError: An option of a wrong type, or ``MEAN`` of an integer output.
        ValueError: As in :func:`microbatch`.

    Example:
        >>> import jax.numpy as jnp
        >>> from microtome.jax_impl import AccumulationType, micro_vmap
        >>> rows = jnp.arange(6.0).reshape(3, 2)
        >>> micro_vmap(jnp.sum, microbatch_size=2, remainder="run")(rows)
        Array([1., 5., 9.], dtype=float32)
        >>> micro_vmap(jnp.sum, microbatch_size=1, accumulator=AccumulationType.MEAN)(rows)
        Array(5., dtype=float32)
    """
    options = Options.checked(microbatch_size, remainder, partition, num_real_microbatches)
    accumulator = checked_tree(accumulator)
    arguments = Signature.of(fun)
    if out_axes != 0:
        raise NotImplementedError(f"out_axes must be 0, got {out_axes!r}. Move the axis in the result instead.")
    if isinstance(in_axes, bool) or not isinstance(in_axes, (int, tuple, list)):
        raise TypeError(f"in_axes must be an int or a sequence with one entry for each argument, got {in_axes!r}.")

    @wraps(fun)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        axes = mapped_axes(arguments, in_axes, args, kwargs)
        batch = collect(arguments, args, kwargs, list(axes.items()))

        def example(*leaves: jax.Array) -> Any:
            new_args, new_kwargs = batch.rebuild(leaves)
            return fun(*new_args, **new_kwargs)

        with jax.named_scope("micro_vmap"):
            return accumulate(example, batch, options.plan(batch.rows), accumulator, vmap_fn)

    return mapped


def _identity(tree: PyTree) -> PyTree:
    return tree


def _nothing(tree: PyTree) -> None:
    return None


def micro_grad(
    fun: Function,
    has_aux: bool = False,
    argnums: int | Sequence[int] = 0,
    *,
    batch_argnums: int | Sequence[int] = 1,
    keep_batch_dim: bool = True,
    microbatch_size: int | None = None,
    accumulator: Accumulator | AccumulationType | AccumulatorTree = AccumulationType.SUM,
    transform_fn: Callable[[PyTree], PyTree] = _identity,
    metrics_fn: Callable[[PyTree], PyTree] = _nothing,
    num_real_microbatches: int | jax.Array | None = None,
    remainder: str = "error",
    partition: str = "strided",
) -> Callable[..., tuple[Any, Aux]]:
    """Transform the gradient of each example, then accumulate them.

    Equivalent, for ``fun(params, batch)`` and one row ``x`` (with its axis of length 1) at a time, to::

        pairs = [jax.value_and_grad(fun)(params, x) for x in batch]
        grads = sum(transform_fn(g) for _, g in pairs)
        aux = Aux(values=[v for v, _ in pairs], metrics=[metrics_fn(g) for _, g in pairs], aux=None)

    What differs:

    * Where ``transform_fn`` only scales by functions of norms, as :func:`clip_by_global_norm` and any hand-written
      clipping do, no example's gradient is computed: it stays the product that it is (see :func:`clipped_grad`), at
      the time and memory of the plain gradient of a microbatch. So it does without a transform.
    * Otherwise, on a CPU, the gradients of a microbatch are made, transformed and added up one after another: peak
      memory is ``microbatch_size * M(1)`` and a few times the parameters, where ``M(1)`` is what the loss of an
      example and its derivatives keep of activations. Small gradients, and all of them on other devices, or where an
      accumulator or ``metrics_fn`` keeps each, exist for a microbatch: ``microbatch_size * (parameters + M(1))``.
    * ``fun``, its derivative, ``transform_fn`` and ``metrics_fn`` are traced once at each call, for one example.
    * The loss has to be a function of each example by itself: what mixes examples (batch normalisation) sees one.

    Integer leaves beside floats in a differentiated argument get zeros of their own dtype, as do parameters that the
    loss does not reach. Gradients with respect to complex parameters follow JAX: the conjugate of torch's.

    A random ``fun`` takes its key as a batch argument (``jax.random.split(key, batch)``; index it with ``[0]`` under
    ``keep_batch_dim``), so each example draws by its own.

    After ``optax.microbatching.micro_grad``; ``remainder`` and ``partition`` are added, integer leaves are allowed,
    and arguments may be passed by name. Keyword-only arrays are mapped over axis 0 and, unlike there, keep their
    axis of length 1 under ``keep_batch_dim``.

    Shapes: batch arguments ``[batch, ...]``; ``fun`` gets ``[1, ...]``, or ``[...]`` without ``keep_batch_dim``, and
    returns a real loss of shape ``()``. Dtypes are those of the parameters, through ``transform_fn``.

    Args:
        fun: The loss.
        has_aux: Whether ``fun`` returns ``(loss, aux)``.
        argnums: The positions of the arguments to differentiate.
        batch_argnums: The positions of the arguments that hold the batch, on axis 0. Arrays that ``fun`` takes by
            keyword only are a batch too; ``()`` where there are no others.
        keep_batch_dim: Whether ``fun`` expects a batch axis.
        microbatch_size: Examples of a microbatch; None for all at once.
        accumulator: How to join the transformed gradients: ``SUM`` (the default), ``MEAN`` over the examples that
            ran, ``CONCAT`` to keep each, an :class:`Accumulator`, or a tree of them that is a prefix of the
            transformed gradient's tree.
        transform_fn: What to do to the gradient of an example; it may change the tree.
        metrics_fn: A small summary of an example's gradient before ``transform_fn``, kept for each example.
        num_real_microbatches: Stop after so many microbatches; what did not run has zeros in ``aux``. See
            :func:`microbatch`.
        remainder: ``"error"``, or ``"run"`` to run left-over examples as one smaller microbatch at the end.
        partition: ``"strided"`` or ``"contiguous"``; see :func:`microbatch`.

    Returns:
        A function with the arguments of ``fun`` that returns ``(grads, Aux(values, metrics, aux))``. As with
        ``jax.grad``, ``grads`` is a tuple where ``argnums`` is a sequence, before the transform. Its method
        ``explain``, of the same arguments, tells for each parameter what its per-example gradients are kept as.

    Raises:
        TypeError: A loss that is not a real number, an argument to differentiate that holds only integers, ``MEAN``
            of an integer, an option of a wrong type.
        ValueError: As in :func:`microbatch`.

    Example:
        >>> import jax.numpy as jnp
        >>> from microtome.jax_impl import micro_grad
        >>> loss = lambda w, x: jnp.sum(w * x)
        >>> clip = lambda g: g / jnp.maximum(jnp.linalg.norm(g), 1.0)
        >>> grad_fn = micro_grad(loss, microbatch_size=1, transform_fn=clip, metrics_fn=jnp.linalg.norm)
        >>> grads, aux = grad_fn(jnp.ones(2), jnp.array([[3.0, 4.0], [0.0, 0.5]]))
        >>> grads, aux.values, aux.metrics
        (Array([0.6, 1.3], dtype=float32), Array([7. , 0.5], dtype=float32), Array([5. , 0.5], dtype=float32))
    """
    options = Options.checked(microbatch_size, remainder, partition, num_real_microbatches)
    accumulator = checked_tree(accumulator)
    arguments = Signature.of(fun)
    wanted = [arguments.check("argnums", i) for i in indices("argnums", argnums)]
    batched = arguments.batch(batch_argnums)

    def prepared(args: tuple[Any, ...], kwargs: dict[str, Any], raw: bool) -> tuple[Function, Any, Any]:
        """Return the program of one example, the batch, and what tells, after tracing, which gradients are zero.

        The program also returns the bare gradients if asked to.
        """
        places = places_to_differentiate(arguments, wanted, args, kwargs)
        axes: dict[Slot, PyTree] = {
            slot: 0 for slot in slots(arguments, "batch_argnums", batched, args, kwargs) if slot is not None
        }
        shared = {*arguments.positional, *places}
        axes |= {n: axis_of_keyword(v) for n, v in kwargs.items() if n not in axes and n not in shared}
        batch = collect(arguments, args, kwargs, list(axes.items()))
        unchanged: frozenset[int] = frozenset()

        def example(*leaves: jax.Array) -> tuple[Any, ...]:
            nonlocal unchanged
            rows = [jnp.expand_dims(leaf, 0) for leaf in leaves] if keep_batch_dim else leaves
            new_args, new_kwargs = batch.rebuild(rows)
            value, aux, grads, zeros = value_and_grad(fun, has_aux, places, new_args, new_kwargs)
            grads = grads[0] if isinstance(argnums, int) else grads
            result = transform_fn(grads)
            unchanged = frozenset(
                place for place, leaf in enumerate(jax.tree.leaves(result)) if any(leaf is zero for zero in zeros)
            )
            outputs = result, Aux(value, metrics_fn(grads), aux)
            return (*outputs, grads) if raw else outputs

        return example, batch, lambda: unchanged

    joined = (accumulator, AccumulationType.CONCAT)

    @wraps(fun)
    def grads_of(*args: Any, **kwargs: Any) -> tuple[Any, Aux]:
        with jax.named_scope("micro_grad"):
            example, batch, unchanged = prepared(args, kwargs, raw=False)
            return accumulate(example, batch, options.plan(batch.rows), joined, jax.vmap, unchanged, factored=True)

    def explain(*args: Any, **kwargs: Any) -> Explanation:
        """Tell which parameter's per-example gradients stay factors, and which are computed and why; run nothing."""
        example, batch, _ = prepared(args, kwargs, raw=True)
        return explained(example, batch, joined, options.plan(batch.rows).size)

    grads_of.explain = explain  # type: ignore[attr-defined]
    return grads_of
