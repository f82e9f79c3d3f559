"""A second call of a function, to see whether it computes what the first one computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..effects import bindings
from ..effects.containers import tensors_in
from ..effects.running import no_place_for_exchange, no_place_for_state, no_place_for_values
from ..effects.side_effects import Watched, constants_left, first_replaced, is_value
from ..record.captured import known_as_constants
from ..watch.names import read_count
from ..watch.places import Site, read_entry, write
from ..watch.walk import Walk
from .functions import TorchFunction
from .specialised import Specialised


def check_second_call(
    first: Specialised,
    trace: Callable[[Walk], Specialised],
    walk: Walk,
    walk_again: Callable[[], Walk],
    appended: Sequence[tuple[Site, list[Any]]],
    is_repeatable: bool,
) -> tuple[list[str], list[list[Any]]]:
    """Refuse what is kept where nothing is: a second call, or slice, would start from what the first one left.

    ``is_repeatable`` says that the function has changed nothing else that it reads. Names what each slice would change
    once more, such as a counter, without computing with it; and gives the lists that only the first call appends to.
    """
    flat, one = first.flat, first.tracing
    changed = [] if flat.mode.once else [walk.places[e.place].name(e.key) for e in flat.effects]
    changed += [slot[1] for slot, _ in appended]
    if not (flat.mode.once or is_repeatable):
        changed.append("something that it captures (a set, the order of a dict, the class of an object)")
    if not isinstance(one, TorchFunction) or not (changed or any(s.is_read or not s.is_same for s in flat.scratch)):
        return [], []  # the first call has started from such a state
    blanks: list[torch.Tensor] = []
    lengths = [(container, len(container)) for _, container in appended]
    left: list[bindings.Binding] = []
    watched = Watched(walk)
    replaced: str | None = None
    moving: list[str] = []
    if not flat.mode.once:
        left = first.leave(walk)
        left += [(s.place, s.key, read_entry(s.place, s.key)) for s in flat.scratch]
    tables = [] if flat.mode.once else constants_left(flat.effects, walk.places)
    try:
        for s in flat.scratch:
            value = s.stand_in()
            blanks += tensors_in(value)
            write(s.place, s.key, value)
        again = walk_again()
        start, names_known = Watched(again), read_count()
        with known_as_constants(tables):
            second = trace(again)
        filled = [container for container, length in lengths if len(container) == length]
        if not flat.mode.once:
            values = [(again.places[e.place], e.key) for e in second.flat.effects if is_value(e.after)]
            moving += [place.name(key) for place, key in values if not place.is_library]
            moving += [name for (owner, name), _ in appended if isinstance(owner, type)]  # others are logs
            for container, length in lengths:
                del container[length:]
            if read_count() == names_known and walk_again().key != again.key:
                moving += start.changed()
            before = second.leave(again)
            left += before
            tables += constants_left(second.flat.effects, again.places)
            replaced = first_replaced(before, tables)
    finally:
        bindings.restore(left)
        watched.restore()
        for container, length in lengths:
            del container[length:]
    two = second.tracing
    assert isinstance(two, TorchFunction)
    read = next((s for s in second.flat.scratch if s.is_read or s.is_added), None)
    met = [i for i, t in enumerate(two.captured) if any(t is blank for blank in blanks)]
    if read is None and flat.scratch and (two.first.reads(met) or one.first.forward_ops != two.first.forward_ops):
        read = flat.scratch[0]
    if read is not None:
        raise no_place_for_state(read, walk)
    positions = {id(t): i for i, t in enumerate(two.captured)}
    same = [(i, positions[id(t)]) for i, t in enumerate(one.captured) if id(t) in positions]
    if changed and not one.first.computes_as(two.first, same):
        raise no_place_for_values(changed[0], walk, flat.mode.once)
    if replaced is not None:
        raise no_place_for_exchange(replaced, walk)
    return list(dict.fromkeys(moving)), filled
