"""The microbatches of a plan, run one after another: one scan, one trace of the function."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import ClosedJaxpr, Literal

from ..factors.explain import Explanation
from ..factors.factored import Factored
from ..program import convolutions
from ..program.dataflow import makers, uses, within
from ..program.sums import Shared
from ..program.trees import (
    Function,
    PyTree,
    as_varying,
    check_width,
    flatten_with_names,
    outlined,
    stand_in,
    structure,
    with_weak_type,
)
from .accumulation import AccumulationType, AccumulatorTree, DividedSum, WeightedMean
from .arguments import Batch
from .fitting import Output, fit, match
from .partition import Plan

VmapFn: TypeAlias = Callable[[Function, Sequence[int], int], Function]


class Traced:
    """A function of flat arrays, traced once and callable any number of times."""

    def __init__(
        self, fun: Function, inputs: Sequence[Any], run: Callable[..., list[Any]] = convolutions.run_fast
    ) -> None:
        self.closed, self.output = jax.make_jaxpr(fun, return_shape=True)(*map(stand_in, inputs))
        self.treedef, self.run, self.shared = structure(self.output), run, Shared(self.closed.consts)

    def __call__(self, *inputs: Any) -> PyTree:
        """Return the function's output."""
        closed = ClosedJaxpr(self.closed.jaxpr, self.shared.read())
        return self.treedef.unflatten(_call(closed, *inputs, run=self.run))


def _call(closed: ClosedJaxpr, *inputs: Any, run: Callable[..., list[Any]] = convolutions.run_fast) -> list[jax.Array]:
    """Return the jaxpr's outputs as arrays; a constant among them comes out as a Python number otherwise."""
    outs = zip(run(closed, *inputs), closed.out_avals, strict=True)
    arrays = [(x if isinstance(x, jax.Array) else jnp.asarray(x, aval.dtype), aval) for x, aval in outs]
    return [with_weak_type(x, aval) for x, aval in arrays]


def accumulate(
    fun: Function,
    batch: Batch,
    plan: Plan,
    accumulators: AccumulatorTree,
    vmap_fn: VmapFn | None = None,
    zeros: Callable[[], frozenset[int]] = frozenset,
    factored: bool = False,
) -> PyTree:
    """Run ``fun`` on every microbatch and join the outputs.

    Args:
        fun: Takes the batch's leaves, flat: cut to a microbatch, or with ``vmap_fn`` a single example's.
        batch: The leaves and their axes.
        plan: How they are cut.
        accumulators: What to do with the outputs.
        vmap_fn: Maps ``fun`` over the examples of a microbatch.
        zeros: Called after tracing: the places, among the flat outputs, of gradients that are zero by definition.
        factored: Whether to sum over examples by factors where the outputs have them (:mod:`factored`).
    """
    fun = guard_weights(fun, accumulators)
    main = _microbatch_fun(fun, batch, plan, plan.size, vmap_fn)
    left = main
    if plan.left and not isinstance(main, _Mapped):
        left = _microbatch_fun(fun, batch, plan, plan.left, vmap_fn)
    check_width(main.output, "output")
    per_example = vmap_fn is not None
    outputs = _describe(main, left, plan, per_example, zeros())
    accumulator = fit(accumulators, plan, outputs, per_example)
    shapes = jax.tree.map(lambda out: jax.ShapeDtypeStruct(out.shape, out.dtype), outputs)
    if per_example:
        shapes = jax.eval_shape(accumulator.aggregate, shapes)

    aggregate = lambda *leaves: accumulator.aggregate(main(*leaves))
    if factored and isinstance(main, _Mapped):
        aggregate = _by_factors(main, batch, summed_outputs(accumulators, main), accumulator.aggregate, plan.full > 1)

    def step(carry: PyTree, index: int | jax.Array) -> PyTree:
        if plan.real is None or isinstance(plan.real, int):
            return run(carry, index)
        return jax.lax.cond(index < plan.real, lambda carry: run(carry, index), lambda carry: carry, carry)

    rows = _never_empty(batch.leaves, batch, plan.size)

    def run(carry: PyTree, index: int | jax.Array) -> PyTree:
        leaves = [plan.take(leaf, index, axis) for leaf, axis in zip(rows, batch.axes, strict=True)]
        last = isinstance(index, int) and index == plan.full
        if not per_example:
            value = (left if last else main)(*leaves)
        elif isinstance(main, _Mapped):
            value = aggregate(*leaves)
        else:
            value = accumulator.aggregate((left if last else main)(*leaves))
        return accumulator.update(carry, value, index)

    return accumulator.finalize(
        _loop(step, as_varying(lambda c: run(c, jnp.zeros((), jnp.int32)), accumulator.init(shapes)), plan)
    )


def summed_outputs(accumulators: AccumulatorTree, traced: Traced) -> list[bool]:
    """Tell which flat outputs are only summed over the examples."""
    sums = (AccumulationType.SUM, AccumulationType.MEAN, AccumulationType.RUNNING_MEAN)
    is_sum = lambda kind: kind in sums or isinstance(kind, DividedSum)
    return [is_sum(kind) for kind, part in match(accumulators, traced.output) for _ in jax.tree.leaves(part)]


def _by_factors(
    main: _Mapped, batch: Batch, summed: Sequence[bool], aggregate: Callable[[PyTree], PyTree], in_loop: bool
) -> Callable[..., PyTree]:
    """Make ``aggregate(main(*leaves))`` run by factors; its derivative is that of the plain computation."""
    closed, axes = main.closed, tuple(batch.axes)
    count = len(closed.consts)
    by_factors = Factored(closed, axes, summed, in_loop)

    def fast(*flat: Any) -> PyTree:
        return aggregate(main.treedef.unflatten(by_factors(flat[:count], *flat[count:])))

    def plain(*flat: Any) -> PyTree:
        one = ClosedJaxpr(closed.jaxpr, list(flat[:count]))
        return aggregate(main.treedef.unflatten(jax.vmap(lambda *x: _call(one, *x), axes, 0)(*flat[count:])))

    # Calls were inlined, and with them went their own rules of differentiation.
    call = jax.custom_jvp(fast)

    @functools.partial(call.defjvp, symbolic_zeros=True)
    def rule(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[PyTree, PyTree]:
        moved = [place for place, tangent in enumerate(tangents) if not isinstance(tangent, SymbolicZero)]

        def at(*chosen: Any) -> PyTree:
            flat = list(primals)
            for place, value in zip(moved, chosen, strict=True):
                flat[place] = value
            return plain(*flat)

        return jax.jvp(at, [primals[p] for p in moved], [tangents[p] for p in moved])

    return lambda *leaves: call(*main.shared.read(), *leaves)


def explained(example: Function, batch: Batch, joined: AccumulatorTree, rows: int) -> Explanation:
    """Tell how the gradients are computed that an example returns last, after a result and auxiliary output."""
    main = _Mapped(example, example_shapes(batch), batch.axes)
    grads = flatten_with_names(main.output[-1], "")[0]
    flags = summed_outputs((*joined, AccumulationType.SUM), main)
    by_factors = Factored(main.closed, batch.axes, flags, in_loop=False)
    own = slice(len(by_factors.program.paths) - len(grads), None)
    paths = by_factors.program.paths[own]
    held = [1 if alone else rows for alone in by_factors.is_kept_for_one()[own]]
    return Explanation(
        {name: path for (name, _), path in zip(grads, paths, strict=True)},
        {name: int(g.size) * g.dtype.itemsize * rows for name, g in grads},
        {name: path.stored * g.dtype.itemsize * n for (name, g), path, n in zip(grads, paths, held, strict=True)},
    )


def _loop(step: Callable[[PyTree, Any], PyTree], carry: PyTree, plan: Plan) -> PyTree:
    """Run the full microbatches in a scan, then the one of the rows left over."""
    run = plan.real if isinstance(plan.real, int) else plan.count
    full = min(run, plan.full)
    if plan.full == 1 and full:
        carry = step(carry, 0)
    elif full or not run:
        # None is a loop as well, so that the result depends on what it would have been made from: zero gradients.
        # Without the checkpoint the derivative would store what every microbatch computed. It has to enclose the
        # choice of rows and the early stop: what it keeps is then the index alone, and the batch, once.
        remat = jax.checkpoint(step, prevent_cse=False)  # a scan needs no guard against merging the passes
        carry, _ = jax.lax.scan(lambda c, i: (remat(c, i), None), carry, jnp.arange(full, dtype=jnp.int32))
    return step(carry, plan.full) if run > plan.full else carry


class _Mapped(Traced):
    """One example's function, traced once and mapped over microbatches of any size."""

    def __init__(self, fun: Function, inputs: Sequence[Any], axes: Sequence[int]) -> None:
        super().__init__(fun, inputs)
        self.mapped = jax.vmap(super().__call__, tuple(axes), 0)

    def __call__(self, *inputs: Any) -> PyTree:
        """Return the examples' outputs, stacked on axis 0."""
        return self.mapped(*inputs)


def _microbatch_fun(fun: Function, batch: Batch, plan: Plan, rows: int, vmap_fn: VmapFn | None) -> Traced:
    """Trace ``fun`` as a function of the leaves of a microbatch."""
    if vmap_fn is None:
        return Traced(fun, _shapes(batch, plan, rows))
    if vmap_fn is jax.vmap:
        return _Mapped(fun, example_shapes(batch), batch.axes)
    return Traced(vmap_fn(fun, tuple(batch.axes), 0), _shapes(batch, plan, rows))


def example_shapes(batch: Batch) -> list[Any]:
    """Return the shapes and dtypes of one example's leaves."""

    def first(*leaves: jax.Array) -> list[jax.Array]:
        pairs = zip(_never_empty(leaves, batch, 1), batch.axes, strict=True)
        return [jax.lax.index_in_dim(leaf, 0, axis, keepdims=False) for leaf, axis in pairs]

    return jax.eval_shape(first, *batch.leaves)


def _shapes(batch: Batch, plan: Plan, rows: int) -> list[Any]:
    """Return the leaves' shapes and dtypes, cut to so many rows."""

    def cut(*leaves: jax.Array) -> list[jax.Array]:
        pairs = zip(_never_empty(leaves, batch, plan.size), batch.axes, strict=True)
        return [jax.lax.slice_in_dim(leaf, 0, rows, axis=axis) for leaf, axis in pairs]

    return jax.eval_shape(cut, *batch.leaves)


def _never_empty(leaves: Sequence[jax.Array], batch: Batch, rows: int) -> list[jax.Array]:
    """Return the leaves; in place of empty ones, which cannot be cut, others of so many rows."""
    if batch.rows:
        return list(leaves)
    pairs = zip(leaves, batch.axes, strict=True)
    return [jnp.zeros_like(leaf, shape=(*leaf.shape[:axis], rows, *leaf.shape[axis + 1 :])) for leaf, axis in pairs]


def _describe(main: Traced, left: Traced, plan: Plan, per_example: bool, zeros: frozenset[int]) -> PyTree:
    """Return the output's tree with an :class:`Output` at each leaf."""
    named, treedef = flatten_with_names(main.output, "output")
    if treedef != structure(left.output):
        raise ValueError(
            "fun must return the same tree for the rows left over as for a full microbatch, got "
            f"{outlined(left.output)} and {outlined(main.output)}."
        )
    mapped = isinstance(main, _Mapped)
    products = bare_products(main.closed) if mapped else frozenset()

    def shape(x: Any, rows: int) -> tuple[int, ...]:
        return (rows, *x.shape) if mapped else x.shape

    described = [
        Output(
            name,
            shape(x, plan.size),
            x.dtype,
            shape(last, plan.left) if plan.left else None,
            product=place in products,
            zero=place in zeros,
        )
        for place, ((name, x), last) in enumerate(zip(named, jax.tree.leaves(left.output), strict=True))
    ]
    return treedef.unflatten(described)


def bare_products(closed: ClosedJaxpr) -> frozenset[int]:
    """Return which flat outputs are a matrix product that nothing else reads, at most transposed or reshaped."""
    jaxpr = closed.jaxpr
    made_by, read_by = makers(jaxpr), uses(jaxpr)
    returned = collections.Counter(var for var in jaxpr.outvars if not isinstance(var, Literal))

    def is_product(var: Any) -> bool:
        while within(var, made_by) and len(read_by.get(var, ())) + returned[var] == 1:
            eqn = made_by[var]
            if eqn.primitive.name == "dot_general":
                return True
            if eqn.primitive.name not in ("transpose", "reshape", "squeeze", "name"):
                return False
            var = eqn.invars[0]
        return False

    return frozenset(place for place, var in enumerate(jaxpr.outvars) if is_product(var))


def guard_weights(fun: Function, accumulators: AccumulatorTree) -> Function:
    """Return ``fun`` whose pairs for :func:`weighted_mean` have value and derivatives 0 where their weight is 0.

    Masking the value alone is not enough: its zero cotangent, sent back through 0/0, is 0 * inf = NaN. So what enters
    is masked too, ``where(weight != 0, x, stop_gradient(x))``: the same values, and cotangents that are dropped
    rather than multiplied. That takes the weight before the value, hence a second evaluation; as a derivative rule it
    costs nothing until somebody differentiates.
    """
    if not any(isinstance(leaf, WeightedMean) for leaf in jax.tree.leaves(accumulators)):
        return fun

    def guarded(*inputs: jax.Array) -> PyTree:
        traced = Traced(fun, inputs)
        places = iter(range(traced.treedef.num_leaves))
        numbered = jax.tree.map(lambda _: next(places), traced.output)
        pairs = []
        for kind, part in match(accumulators, numbered):
            if isinstance(kind, WeightedMean):
                *values, weight = jax.tree.leaves(part) or [0]
                pairs.append((values, weight))
        consts = traced.closed.consts
        return traced.treedef.unflatten(_guarded(traced.closed, pairs)(*consts, *inputs))

    return guarded


def _guarded(closed: ClosedJaxpr, pairs: list[tuple[list[int], int]]) -> Callable[..., list[jax.Array]]:
    """Return the jaxpr as a function of its constants and inputs, each pair's values guarded by its weight."""
    count = len(closed.consts)

    def plain(*flat: Any) -> list[jax.Array]:
        return _call(ClosedJaxpr(closed.jaxpr, flat[:count]), *flat[count:])

    def masked(moved: Sequence[int], *flat: Any) -> list[jax.Array]:
        outs = plain(*flat)
        for values, weight in pairs:
            alive = jax.lax.stop_gradient(outs[weight]).astype(bool)
            if alive.shape:
                continue  # refused with a message once the accumulators meet the output
            kept = list(flat)
            for place in moved:
                kept[place] = jnp.where(alive, flat[place], jax.lax.stop_gradient(flat[place]))
            again = plain(*kept)
            for place in values:
                outs[place] = jnp.where(alive, again[place], jnp.zeros_like(again[place]))
        return outs

    call = jax.custom_jvp(plain)

    @functools.partial(call.defjvp, symbolic_zeros=True)
    def rule(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[list[Any], list[Any]]:
        moved = [place for place, tangent in enumerate(tangents) if not isinstance(tangent, SymbolicZero)]

        def at(*chosen: Any) -> list[Any]:
            flat = list(primals)
            for place, value in zip(moved, chosen, strict=True):
                flat[place] = value
            return masked(moved, *flat)

        return jax.jvp(at, [primals[p] for p in moved], [tangents[p] for p in moved])

    return call
