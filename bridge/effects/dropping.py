"""A warning where a function keeps tensors in slices or per example, which are dropped.

What its code reads again, such as the hidden state of a loop, is its own business, and so is what a library's module
keeps. What the user's code only writes, such as activations that a hook collects, is meant for after the call.
Numbers and logs are left as after one run.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..base.errors import warn
from ..watch.places import Place
from ..watch.uses import is_named, usage
from ..watch.walk import Walk
from .running import NO_MEANING, where
from .side_effects import Scratch


def warn_of_dropped(scratch: Sequence[Scratch], walk: Walk) -> None:
    """Name the places that the user's code writes to and does not read."""
    for name in dict.fromkeys(s.place.name(s.key) for s in scratch if _is_for_later(s.place, s.key, walk)):
        warn(
            f"{where(walk)}the function keeps a tensor in {name}, {NO_MEANING}: it is dropped, and {name} stays as "
            "it was. Return the tensor.",
        )


def warn_of_moving(names: Sequence[str], walk: Walk) -> None:
    """Name what each slice or example would change once more: counters, logs."""
    for name in names:
        warn(
            f"{where(walk)}the function changes {name} each time that it runs, {NO_MEANING}: it is not done "
            "once for each of them. Count and collect outside of the function, from what it returns.",
        )


def _is_for_later(place: Place, key: object, walk: Walk) -> bool:
    found = usage(place, key, walk)
    return "reads" not in found and ("writes" in found or not is_named(place))
