"""What a traced function leaves behind besides its results: attributes, globals, cells, entries of lists and dicts.

A traced function runs once, and its program runs at each call. So each place that the function wrote to is put back
after the trace, and what it wrote is written again at each call, as eager torch would:

- a plain value (a number, a string, None) as it is, and what was deleted is deleted;
- a tensor, or a container of tensors, made anew: the tensors are further results of the program, with their history
  in autograd, or the very arguments and captured tensors if it is these that the function put there.

A function that runs per example or in slices has one trace for all of them. There a tensor that is put into a place is
scratch, if no later call could see it: the place stays as it was. If the function also reads it, it is refused.

Lists that a function appends plain values to (a log) grow once per trace. Anything else stays as the function left it.
"""

from __future__ import annotations

import collections
import dataclasses
import random
from collections.abc import Container, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from ..base import torch_internals as ti
from ..base.errors import TraceError, user_line
from ..memory.trees import Structure, is_tensor, to_jax_tree, to_torch_tree
from ..record.captured import is_update_of
from ..record.nodes import Meta
from ..watch import locks
from ..watch.keys import empty_cache
from ..watch.logs import known_logs
from ..watch.places import ABSENT, ORDER, Place, path_name, put_in_order, read, read_entry, write
from ..watch.uses import is_named, usage
from ..watch.walk import Walk
from .bindings import UNKNOWN, Binding, Effect, Results
from .containers import (
    Bound,
    Moved,
    holds_object,
    is_plain,
    is_put_together,
    made_anew,
    part_at,
    parts_of,
    standing_in,
    tensors_in,
)
from .escapes import traced_tensor_in
from .sources import Constant, Origin

Change: TypeAlias = tuple[int, object, object, object]  # a place by number, the key there, what stood and what stands


class Scratch(NamedTuple):
    """A new value that a function for examples or slices put into a place."""

    place: Place
    key: object
    structure: Structure
    forms: list[tuple[Meta, bool]]  # of its tensors: dtype and shape, and whether they require grad
    is_read: bool  # whether a result or the new value depends on what stood there
    is_same: bool  # whether a value of the same form stood there
    is_added: bool  # whether nothing stood there

    def stand_in(self) -> object:
        """A value of the same form, of tensors that are no others."""
        tensors = [ti.blank(m.dtype, m.shape, m.device).requires_grad_(grad) for m, grad in self.forms]
        return to_torch_tree(self.structure.join(tensors))


class Watched:
    """The places that a walk found, as they were before the function ran."""

    def __init__(self, walk: Walk) -> None:
        self.places, self._walk = walk.places, walk
        self._before = list(map(read, self.places))
        self._arrays = [(name, array, array.copy()) for name, array in walk.arrays]
        self._sets = [(slot[1], x, set(x)) for slot, _, x in walk.containers if isinstance(x, set)]
        logs = known_logs(walk.identity)
        self._logs = [
            (slot[1], x, len(x))
            for slot, path, x in walk.containers
            if isinstance(x, list) and (path in walk.left_out or (path in logs and not all(map(is_tensor, x))))
        ]
        self._locks = [(name, lock, locks.state(lock)) for name, lock in walk.locks]
        self._caches = [(fun, fun.cache_info().misses) for fun in walk.caches]
        self._fields = [
            (t, dict(t.__dict__), path_name(path)) for t, path in zip(walk.tensors, walk.paths, strict=True)
        ]

    def restore(self) -> None:
        """Put everything back."""
        for number, key, old, _ in list(self._changes()):
            write(self.places[number], key, old)
        for place, entries in zip(self.places, self._before, strict=True):
            if place.has_order:
                put_in_order(place.owner, list(entries))
        for _, array, before in self._arrays:
            if array.tobytes() != before.tobytes():
                array[...] = before
        for _, members, started in self._sets:
            members.intersection_update(started)
            members.update(started)
        for _, lock, state in self._locks:
            locks.put_back(lock, state)
        self._empty_caches()

    def _empty_caches(self) -> None:
        """What a cache was given while the function was traced is of this trace: it is computed again."""
        for fun, misses in self._caches:
            if fun.cache_info().misses != misses:
                empty_cache(fun)

    def check(self) -> None:
        """Refuse writes that no call could repeat: to NumPy's arrays and locks, and of tensors to sets."""
        for name, array, before in self._arrays:
            if array.tobytes() != before.tobytes():
                raise TraceError(
                    f"the function writes to {name}, a NumPy array, which it would do once, while it is traced. Make "
                    "it a tensor, or pass it in."
                )
        for name, lock, state in self._locks:
            if locks.state(lock) != state:
                raise TraceError(
                    f"{user_line()}: the function leaves {name} ({type(lock).__name__}) other than it found it, "
                    "which it would do once, while it is traced. Do that outside of it."
                )
        for name, log, length in self._logs:  # whose length no key holds
            if any(traced_tensor_in(value, depth=3) is not None for value in log[length:]):
                del log[length:]
                raise TraceError(
                    f"{user_line()}: the function appends a tensor to {name}, to which it has appended other objects "
                    "in an earlier call. Keep tensors in a list of their own."
                )
        for name, members, started in self._sets:
            for value in members - started:
                _check_holds_no_trace(value, name)
        for tensor, fields, name in self._fields:
            new = [k for k, v in tensor.__dict__.items() if fields.get(k) is not v]
            values = [tensor.__dict__[k] for k in new]
            if new:
                tensor.__dict__.clear()
                tensor.__dict__.update(fields)
            for key, value in zip(new, values, strict=True):
                if tensors_in(value):
                    raise TraceError(
                        f"{user_line()}: the function assigns a tensor to the attribute {key} of {name or 'a tensor'}. "
                        "Return it, or keep it in an object or a module."
                    )
                tensor.__dict__[key] = value
        self._empty_caches()

    def written(self) -> str | None:
        """The first place that is not a library's and that holds something else now; all are put back then.

        Lists that plain values are appended to are logs, which may grow once for each trace.
        """
        for number, key, old, new in self._changes():
            place = self.places[number]
            is_log = place.is_sequence and old is ABSENT and not tensors_in(new)
            if not place.is_library and not is_log:
                self.restore()
                return place.name(key)
        return None

    def changed(self) -> list[str]:
        """The places, but a library's own, and the sets that hold something else now."""
        found = [
            self.places[number].label if self.places[number].is_sequence else self.places[number].name(key)
            for number, key, old, new in self._changes()
            if not self.places[number].is_library and (type(old) is not type(new) or repr(old) != repr(new))
        ]
        return found + [name for name, members, started in self._sets if members != started]

    def settle(self, results: Results, first: bool) -> tuple[list[Effect], list[Scratch]]:
        """Put everything back; what each call has to write, and what is only scratch.

        ``first`` is false if the function ran before in this trace: nothing more is kept of what it appends to lists.
        """
        effects: list[Effect] = []
        scratch: list[Scratch] = []
        kept: list[tuple[object, str]] = []  # what no call makes anew, and in which place it is
        logs: set[int] = set()
        # Lists first: an attribute that held one may be judged by what stands in it.
        changes = sorted(self._changes(), key=lambda change: not self.places[change[0]].is_sequence)
        standing: dict[int, object] = dict(standing_in(self._before, self.places) if changes else {})
        results.expect((t for _, _, _, new in changes for t in tensors_in(new)), standing)
        orders = list(self._orders())
        made = made_anew((new for _, _, _, new in changes), standing) | results.given.keys()
        made |= self._put_together(changes, standing) if results.once else set()
        growing = {number for number, _, old, new in changes if old is ABSENT and id(new) in made}
        left = self._left_as_it_is(changes, made | standing.keys(), growing, standing)
        for number, key, old, new in changes:
            place = self.places[number]
            is_mirror = _is_mirror(old, new, place) and not (place.is_library and self._is_users(place, key, new))
            is_appended = place.is_sequence and old is ABSENT
            before = old if old is ABSENT or is_plain(old) else UNKNOWN
            if (number, key) in left:
                kept += [] if id(new) in standing else [(new, place.name(key))]
                # What others do to it later need not show in the key: the function may not name what they change.
                results.holds_objects |= not is_appended and holds_object(new, standing)
                if first:
                    logs |= {number} if is_appended else set()
                    continue
            elif id(new) in standing and not (id(new) in made and is_mirror):
                effects.append(Effect(number, key, UNKNOWN, standing[id(new)]))
            elif id(new) in made:
                if not is_mirror:
                    bound = results.bind(new, place.name(key))
                    if bound is None:
                        scratch.append(_scratch(place, key, old, new, results))
                    else:
                        effects.append(Effect(number, key, before, bound))
                        kept += (
                            (value, place.name(key))
                            for value in bound.leaves()
                            if not isinstance(value, (Moved, Origin))
                        )
            elif self._is_repeated(number, old, new, growing):
                effects.append(Effect(number, key, before, new))
            else:  # what a library keeps for itself is made again
                kept.append((new, place.name(key)))
            write(place, key, old)
        for number, before, after in orders:
            effects.append(Effect(number, ORDER, before, after))
            write(self.places[number], ORDER, before)
        self._check_logs(effects, logs)
        for value, name in kept:  # now that objects from before the call hold what they held
            _check_holds_no_trace(value, name)
        return effects, scratch

    def _put_together(self, changes: Sequence[Change], standing: Container[int]) -> set[int]:
        """Find the containers without tensors that each call can make again: no object may hold parts of them too."""
        new = [
            value
            for number, key, old, value in changes
            if not (value is ABSENT or is_tensor(value) or is_plain(value) or id(value) in standing)
            and not (self.places[number].is_sequence and old is ABSENT)
            and (not self.places[number].is_library or self._is_users(self.places[number], key, value))
        ]
        return set(map(id, new)) if all(is_put_together(value, standing) for value in new) else set()

    def _is_repeated(self, number: int, old: object, new: object, growing: Container[int]) -> bool:
        """Tell whether each call can write a value without tensors again: a plain one, but for what a log grows by."""
        is_log = self.places[number].is_sequence and old is ABSENT and number not in growing
        return new is ABSENT or (is_plain(new) and not is_log)

    def _left_as_it_is(
        self, changes: Sequence[Change], known: Container[int], growing: Container[int], standing: dict[int, object]
    ) -> set[tuple[int, object]]:
        """Find the changes that no call makes again, since each is traced: new objects without tensors, and logs.

        What stood there before is not to be found there at the end of a call: where the function has moved it, it
        stays too, and ``standing`` has it in the place of where it stood.
        """
        left = {
            (number, key)
            for number, key, old, new in changes
            if id(new) not in known
            and not self._is_repeated(number, old, new, growing)
            and (is_plain(new) or not self.places[number].is_library or self._is_users(self.places[number], key, new))
        }
        while gone := {i: x for i, x in standing.items() if isinstance(x, Moved) and (x.place, x.key) in left}:
            standing.update({i: part_at(self._before[x.place][x.key], x.path) for i, x in gone.items()})
            left |= {(number, key) for number, key, _, new in changes if id(new) in gone}
        return left

    def _check_logs(self, effects: Sequence[Effect], logs: set[int]) -> None:
        """Refuse to keep what stands in a list that grows once for each trace: no key holds what it is."""
        for e in effects:
            for part in parts_of(e.after):
                if isinstance(part, Moved) and part.place in logs:
                    raise TraceError(
                        f"{user_line()}: the function appends to {self.places[part.place].label} and puts what it "
                        f"finds there into {self.places[e.place].name(e.key)}, but calls do not look into a list that "
                        "grows with each of them. Keep what is moved in a place of its own too."
                    )

    def _is_users(self, place: Place, key: object, new: object) -> bool:
        """Whether the user's code puts a value into an object of a library."""
        return isinstance(new, torch.nn.Module) or (is_named(place) and "writes" in usage(place, key, self._walk))

    def _orders(self) -> Iterator[tuple[int, tuple[object, ...], tuple[object, ...]]]:
        """The dicts whose entries stand in another order than those that stay and then those that came."""
        for number, (place, before) in enumerate(zip(self.places, self._before, strict=True)):
            after = place.owner if place.has_order else {}
            if after and [*after] != [*(k for k in before if k in after), *(k for k in after if k not in before)]:
                yield number, tuple(before), tuple(after)

    def _changes(self) -> Iterator[tuple[int, Any, object, object]]:
        for number, (place, before) in enumerate(zip(self.places, self._before, strict=True)):
            after = read(place)
            keys = [*before, *(k for k in after if k not in before)]
            # Entries that were appended to a list are taken away from its end.
            for key in reversed(keys) if place.is_sequence else keys:
                old, new = before.get(key, ABSENT), after.get(key, ABSENT)
                if old is not new and not _is_same(old, new):
                    yield number, key, old, new


def _split(value: object) -> tuple[list[torch.Tensor], Structure]:
    return Structure.split(to_jax_tree(value), lambda leaf: isinstance(leaf, torch.Tensor))


def constants_left(effects: Sequence[Effect], places: Sequence[Place]) -> list[torch.Tensor]:
    """The tensors that a call has just left in places and that depend on none of its inputs."""
    return [
        tensor
        for e in effects
        if isinstance(e.after, Bound)
        for source, tensor in e.after.tensors(read_entry(places[e.place], e.key))
        if isinstance(source, Constant)
    ]


def first_replaced(before: Sequence[Binding], constants: Sequence[torch.Tensor]) -> str | None:
    """The first place with another tensor, container or object than before; of constants the values count."""
    known = set(map(id, constants))

    def same(one: torch.Tensor, two: torch.Tensor) -> bool:
        if one is two or not {id(one), id(two)} <= known or (one.dtype, one.shape) != (two.dtype, two.shape):
            return one is two
        return torch.allclose(one, two, rtol=0, atol=0, equal_nan=True)

    for place, key, old in before:
        new = read_entry(place, key)
        if old is new or ((new is ABSENT or is_plain(new)) and not tensors_in(old)):
            continue
        (olds, form), (news, new_form) = _split(old), _split(new)
        if form != new_form or not all(map(same, olds, news)):
            return place.name(key)
    return None


def _is_mirror(old: Any, new: object, place: Place) -> bool:
    """Whether a change is none: the result of an operator in place, or the list of its parameters that an RNN keeps."""
    if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor):
        return is_update_of(new, old)
    is_list = place.is_library and isinstance(old, list) and bool(old)
    return is_list and all(isinstance(x, torch.nn.Parameter) for x in old)


def _scratch(place: Place, key: object, old: object, new: object, results: Results) -> Scratch:
    tensors, structure = _split(new)
    before, form = ([], None) if old is ABSENT else _split(old)
    with torch._C.DisableTorchFunction():
        forms = [(Meta.of(t), t.requires_grad) for t in tensors]
        is_same = form == structure and [(Meta.of(t), t.requires_grad) for t in before] == forms
        return Scratch(place, key, structure, forms, results.depend_on(before, tensors), is_same, old is ABSENT)


def _check_holds_no_trace(value: object, name: str) -> None:
    """Refuse an object with tensors of the trace in its attributes: they have no values, and it would outlive them."""
    if traced_tensor_in(value, depth=3) is not None:
        raise TraceError(
            f"{user_line()}: the traced function assigns an object that holds tensors of the trace, without values, to "
            f"{name}. Assign the tensor itself, or a tuple, list, dict or dataclass of tensors; what a library keeps "
            "there, such as a metric that is logged, return from the function and log outside of it."
        )


def is_value(after: object) -> bool:
    """Whether what a call leaves in a place is neither a tensor nor something that it found: a number, nothing."""
    return not isinstance(after, (Bound, Moved))


def _is_same(old: object, new: object) -> bool:
    """Whether plain values are the same, 0.0 and -0.0 told apart, and 1 and True in tuples."""
    return is_plain(old) and type(old) is type(new) and bool(old == new) and repr(old) == repr(new)


class ArgumentContainers:
    """The lists, dicts and dataclasses among the arguments: they are the call's own, and writes to them are lost."""

    def __init__(self, args: Sequence[object], kwargs: dict[str, object]) -> None:
        self._before: list[tuple[str, object, dict[object, object]]] = []
        for i, value in enumerate(args):
            self._add(value, f"argument {i}")
        for name, value in kwargs.items():
            self._add(value, name)

    def _add(self, value: object, name: str) -> None:
        content = _content(value)
        if content is not None:
            self._before.append((name, value, content))
            for key, inner in content.items():
                self._add(inner, f"{name}[{key!r}]")

    def check(self, where: str) -> None:
        """Refuse what the function has put into one of them, taken out of it or put in another order."""
        for name, container, before in self._before:
            after = _content(container) or {}
            for key in {**before, **after}:
                old, value = before.get(key, ABSENT), after.get(key, ABSENT)
                if value is not old and not _is_same(old, value):
                    verb = "removes" if value is ABSENT else "writes to"
                    raise _not_seen(where, f"{verb} {name}[{key!r}], an entry of a container")
            if isinstance(container, dict) and [*after] != [*before]:
                raise _not_seen(where, f"changes the order of {name}, a container")


def _not_seen(where: str, what: str) -> TraceError:
    return TraceError(
        f"{where}the function {what} among its arguments, which the caller would not see. Return the new value, or "
        "work on a copy of the container."
    )


def _content(value: object) -> dict[object, object] | None:
    if isinstance(value, dict):
        return dict(value)
    if isinstance(value, (list, tuple, collections.deque)):
        return dict(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if hasattr(value, f.name)}
    return None


class Generators:
    """Where the random generators of Python and NumPy that a function captures stand before it is traced."""

    def __init__(self, walk: Walk) -> None:
        self._before = [(generator, _state(generator)) for generator in walk.generators]

    def put_back(self) -> bool:
        """Put all back where they stood; whether one had moved."""
        moved = False
        for generator, before in self._before:
            if repr(_state(generator)) != repr(before):
                moved = True
                _set_state(generator, before)
        return moved


def _state(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        state = generator.get_state(legacy=False)
        return state | {"state": {k: np.asarray(v).tolist() for k, v in state["state"].items()}}
    return generator.bit_generator.state


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state | {"state": {k: np.asarray(v) for k, v in state["state"].items()}})
    else:
        generator.bit_generator.state = state
