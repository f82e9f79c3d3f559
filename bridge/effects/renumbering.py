"""Effects by the numbers that their places have in another walk."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ..watch.places import Place
from .bindings import Effect
from .containers import Moved, Replacing, parts_of


def places_in(effects: Sequence[Effect], places: Sequence[Place]) -> list[Place]:
    """Return the places that effects write to, or take a value from."""
    moved = [places[part.place] for e in effects for part in parts_of(e.after) if isinstance(part, Moved)]
    return [*(places[e.place] for e in effects), *moved]


def elsewhere(effects: Sequence[Effect], before: Sequence[Place], places: Sequence[Place]) -> list[Effect] | None:
    """Return the effects for another walk, which leaves out lists that grow with calls; None if it lacks a place."""
    numbers = {id(place.owner): i for i, place in enumerate(places)}
    if not all(id(place.owner) in numbers for place in places_in(effects, before)):
        return None

    def number(place: int) -> int:
        return numbers[id(before[place].owner)]

    renumbered = Replacing(lambda x: dataclasses.replace(x, place=number(x.place)) if isinstance(x, Moved) else x)
    return [dataclasses.replace(e, place=number(e.place), after=renumbered(e.after)) for e in effects]
