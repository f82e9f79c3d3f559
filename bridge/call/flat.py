"""Functions of flat arrays that stand for a call, its derivatives and its maps."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

from ...jax_impl.program.trees import PyTree
from ..base.errors import TraceError
from ..derive.context import Call
from ..derive.primitives import Arrays
from ..effects.bindings import Binding, Effect, restore
from ..effects.containers import Bound, Moved, Replacing, part_at
from ..effects.sources import Basic, Given, Made, Origin, renumbered
from ..memory.trees import Structure, is_array, to_jax_tree
from ..memory.values import unusual_stride
from ..record.nodes import History
from ..watch.logs import Logs, paths_of
from ..watch.places import Place
from ..watch.walk import Walk
from .pullbacks import LinearMap, pull_back


class Flat:
    """A JAX function of a key and a flat list of arrays. Functions with equal ``key`` share their programs."""

    key: Hashable
    base: Flat
    what: str  # is computed
    first_cotangent: int | None = None  # the inputs from here on enter linearly

    @property
    def root(self) -> Root:
        """The call that this is derived from."""
        return self.base.root

    def run(self, call: Call, key: jax.Array, arrays: Arrays) -> list[jax.Array]:
        """The flat outputs, for arrays or tracers."""
        raise NotImplementedError


class Root(Flat):
    """A call: the inputs are the tensors among its arguments, then those that its function captures."""

    what = "the call"

    def __init__(
        self,
        key: Hashable,
        body: Callable[..., PyTree],
        arguments: Sequence[torch.Tensor],
        captured: Sequence[torch.Tensor],
        walk: Walk,
        recompute: bool,
        is_quiet: bool = False,
    ) -> None:
        self.grad, self.is_quiet = torch.is_grad_enabled(), is_quiet
        self.key = key, self.grad, is_quiet
        self.body, self.count, self.recompute, self.walk = body, len(arguments), recompute, walk
        self.inputs = [*arguments, *captured]
        with torch._C.DisableTorchFunction():
            self.device = common_device(self.inputs)
            self.strides = [unusual_stride(t) for t in arguments]
        self.histories: Sequence[History] = ()  # of the arguments, if the function asks for it
        self.only_maps = False  # it takes no derivatives of its own
        self.static: Sequence[object] = ()  # those of its arguments that are no inputs
        self.has_floats = False  # Python floats among the arguments that are inputs of the program
        self.before: list[Binding] = []  # what stood where the call has left something
        self.outline: Outline | None = None

    @property
    def root(self) -> Root:  # no attribute: a reference to itself would keep tensors until the garbage is collected
        return self

    def run(self, call: Call, key: jax.Array, arrays: Arrays) -> list[jax.Array]:
        captured = zip(self.inputs[self.count :], arrays[self.count :], strict=True)
        call.key, call.has_floats, call.is_quiet = key, self.has_floats, self.is_quiet
        call.only_maps = self.only_maps
        call.tensors.update({id(t): a for t, a in captured})
        call.strides = {id(a): s for a, s in zip(arrays, self.strides, strict=False) if s is not None}
        call.histories = {id(a): h for a, h in zip(arrays, self.histories, strict=False)}
        call.enter_body()
        try:
            returned = to_jax_tree(self.body(*arrays[: self.count]), _none_for_integers)
            results, call.shape = Structure.split(returned, is_array)
        finally:
            restore(call.before)
            call.before.clear()
        if any(map(callable, jax.tree.leaves(returned, is_leaf=callable))):
            call.keep_functions()
        outputs = [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in results]
        if not call.missing:
            self._leave(call, arrays, outputs)
        call.results = len(outputs)
        return outputs

    def _leave(self, call: Call, arrays: Arrays, outputs: list[jax.Array]) -> None:
        """Add to the outputs what the call leaves behind."""

        def made(array: Any) -> int:
            known = next((i for i, o in enumerate(outputs) if o is array), None)
            if known is None:
                outputs.append(array)
            return len(outputs) - 1 if known is None else known

        def number(tensor: torch.Tensor) -> Basic:
            given = self.position(tensor)
            array = None if given is not None else call.tensors[id(tensor)]
            if given is None:
                given = next((i for i, a in enumerate(arrays[: self.count]) if a is array), None)
            return Made(made(array)) if given is None else Given(given)

        call.effects = []
        standing: dict[tuple[int, Hashable], Any] = {}  # what functions before have left
        last: Sequence[Place] | None = None

        def replace(part: Origin | Moved, places: Sequence[Place], tensor: Callable[[Basic], torch.Tensor]) -> object:
            if not isinstance(part, Moved):
                return renumbered(part, lambda source: number(tensor(source)))
            at = self._place(places[part.place])
            if at is None:
                raise TraceError(
                    f"the function puts {part.name(places)} into another place, where the call does not see it: "
                    "another function of the call has made what it stands in. Make both in one function."
                )
            moved = dataclasses.replace(part, place=at)
            left = standing.get((moved.place, moved.key), moved)
            return moved if left is moved else part_at(left, part.path)

        for places, effect, tensor, arguments in call.left:
            if places is not last:
                last, standing = places, {(e.place, e.key): e.after for e in call.effects}
                join = functools.partial(_with_parts, arguments=arguments)
                new = Replacing(functools.partial(replace, places=places, tensor=tensor), join)
            place = self._place(places[effect.place])
            if place is None:
                name = places[effect.place].name(effect.key)
                raise TraceError(f"the function writes to {name}, which the call does not see: pass it in.")
            call.effects.append(dataclasses.replace(effect, place=place, after=new(effect.after)))
        # What was left by one function and written to by the next is among the outputs already, with its final value.
        written = [(self.position(t), value, has_history) for t, value, has_history in call.mutations]
        call.updates = [(i, value) for i, value, has_history in written if i is not None and not has_history]
        call.carried = [(i, made(value)) for i, value, has_history in written if i is not None and has_history]

    def _place(self, place: Place) -> int | None:
        return next((i for i, p in enumerate(self.walk.places) if p.owner is place.owner), None)

    def position(self, tensor: torch.Tensor) -> int | None:
        """Which input a tensor is."""
        return next((i for i, t in enumerate(self.inputs) if t is tensor), None)


def _with_parts(bound: Bound, parts: tuple[object, ...], arguments: Sequence[int | None]) -> Bound:
    argument = None if bound.argument is None else arguments[bound.argument]
    return dataclasses.replace(bound, parts=parts, argument=argument)


class VectorJacobianProduct(Flat):
    """Inputs and cotangents of ``live`` outputs -> gradients for the inputs that ``need`` names, as torch has them."""

    what = "the vector-Jacobian product"

    def __init__(self, base: Flat, need: tuple[bool, ...], live: tuple[bool, ...]) -> None:
        self.base, self.need, self.live = base, need, live
        self.key = "product", need, live, base.key
        self.first_cotangent = len(need)

    def run(self, call: Call, key: jax.Array, arrays: Arrays) -> list[jax.Array]:
        call.grad = True
        count = len(self.need)
        inputs = arrays[:count]
        _, move, _ = linearize(self.base, call, key, self.need, inputs)
        return pull_back(move, list(itertools.compress(inputs, self.need)), self.live, arrays[count:])


class Pushforward(Flat):
    """Inputs and the tangents of those that ``need`` names -> the tangents of the outputs that are not integers."""

    what = "the Jacobian-vector product"

    def __init__(self, base: Flat, need: tuple[bool, ...]) -> None:
        self.base, self.need = base, need
        self.key = "pushforward", need, base.key

    def run(self, call: Call, key: jax.Array, arrays: Arrays) -> list[jax.Array]:
        call.grad = True
        count = len(self.need)
        inputs = arrays[:count]

        def run(*needed: jax.Array) -> list[jax.Array]:
            return self.base.run(call, key, _merge(self.need, needed, inputs))

        _, tangents = jax.jvp(run, [a for a, n in zip(inputs, self.need, strict=True) if n], list(arrays[count:]))
        return [t for t in tangents if t.dtype != jax.dtypes.float0]


class Mapped(Flat):
    """The function under ``jax.vmap``; ``axes`` are those of the inputs, the results are mapped over axis 0."""

    what = "the map over rows"

    def __init__(self, base: Flat, axes: tuple[int | None, ...], size: int, same_draws: bool) -> None:
        self.base, self.axes, self.size, self.same_draws = base, axes, size, same_draws
        self.key = "mapped", axes, size, same_draws, base.key

    def run(self, call: Call, key: jax.Array, arrays: Arrays) -> list[jax.Array]:
        call.has_rows = call.has_rows or maps_function(self.base, self.axes)

        def run(row: jax.Array, *arrays: jax.Array) -> list[jax.Array]:
            own = key if self.same_draws else jax.random.fold_in(key, row)
            return self.base.run(call, own, arrays)

        return jax.vmap(run, (0, *self.axes))(jnp.arange(self.size, dtype=jnp.uint32), *arrays)


def maps_function(flat: Flat, axes: Sequence[int | None]) -> bool:
    """Whether a map along these axes runs the function itself for each row, and not only a derivative of it."""
    return any(axis is not None for axis in axes[: len(flat.root.inputs)])


def linearize(
    flat: Flat, call: Call, key: jax.Array, need: Sequence[bool], arrays: Arrays
) -> tuple[list[jax.Array], LinearMap, list[jax.Array]]:
    """``jax.linearize`` in the inputs that ``need`` names: outputs, the linear map, and the new values of buffers."""

    def run(*needed: jax.Array) -> tuple[list[jax.Array], list[jax.Array]]:
        outputs = flat.run(call, key, _merge(need, needed, arrays))
        kind = type(needed[0])
        call.moving = [type(o) is kind for o in outputs]  # the others depend on no needed input
        return outputs, [value for _, value in call.updates]

    return jax.linearize(run, *(a for n, a in zip(need, arrays, strict=True) if n), has_aux=True)


def _merge(need: Sequence[bool], needed: Arrays, arrays: Arrays) -> list[jax.Array]:
    rest = iter(needed)
    return [next(rest) if n else a for n, a in zip(need, arrays, strict=True)]


@dataclasses.dataclass(frozen=True)
class Outline:
    """What a trace of a call has shown, whatever derivatives are taken of it."""

    shape: Structure  # of the results
    results: int  # how many there are, with what is left behind
    draws: bool
    mutated: list[int]  # inputs that take new values: buffers
    moved: set[int]  # those of them that take the memory of the value too
    carried: list[tuple[int, int]]  # inputs that take results as new values, with their history in autograd
    effects: list[Effect]  # what each call leaves in places
    changing: list[Hashable]  # functions that have to be traced in each call
    regains: bool  # whether results have a history though autograd is off
    strided: str | None  # the line that asks for elements by their place in memory
    logs: Logs  # where the walk finds lists that each trace of a function inside would append to
    filled: Logs  # and those that only a first one has appended to
    met: list[int]  # arguments, and captured tensors that functions read or write
    missing: list[torch.Tensor]  # captured tensors that are not among the inputs yet: nothing else counts then

    @classmethod
    def of(cls, call: Call, root: Root) -> Outline:
        assert call.shape is not None
        mutated = [i for i, _ in call.updates]
        moved = {i for i in mutated if id(root.inputs[i]) in call.moved}
        left = mutated, moved, call.carried, call.effects
        met = [i for i, t in enumerate(root.inputs) if i < root.count or id(t) in call.met]
        answers = call.changing, call.regains, call.strided
        containers = root.walk.containers
        logs = paths_of(containers, {id(log) for made in call.functions for log in made.logs})
        filled = paths_of(containers, {id(log) for made in call.functions for log in made.filled})
        return cls(call.shape, call.results, call.draws, *left, *answers, logs, filled, met, call.missing)


def _none_for_integers(leaf: object) -> object:
    """What JAX gives for the gradient of whole numbers has no elements; torch says None."""
    return None if getattr(leaf, "dtype", None) == jax.dtypes.float0 else leaf


def common_device(tensors: Sequence[torch.Tensor]) -> torch.device:
    """The device on which a call runs; ValueError for tensors on several."""
    devices = {t.device for t in tensors}
    if len(devices) > 1:
        names = sorted(map(str, devices))
        raise ValueError(
            f"the tensors are on different devices ({', '.join(names)}); move them to one with .to(device)"
        )
    return devices.pop() if devices else torch.device("cpu")
