"""Effects by the numbers that their places have in another walk."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ..watch.places import Place
from .bindings import Effect, Moved


def places_in(effects: Sequence[Effect], places: Sequence[Place]) -> list[Place]:
    """The places that effects write to, or take a value from."""
    moved = [places[e.after.place] for e in effects if isinstance(e.after, Moved)]
    return [*(places[e.place] for e in effects), *moved]


def elsewhere(effects: Sequence[Effect], before: Sequence[Place], places: Sequence[Place]) -> list[Effect] | None:
    """The effects for another walk, which leaves out lists that a function appends to; None if it lacks a place."""
    numbers = {id(place.owner): i for i, place in enumerate(places)}
    if not all(id(place.owner) in numbers for place in places_in(effects, before)):
        return None

    def number(place: int) -> int:
        return numbers[id(before[place].owner)]

    return [
        dataclasses.replace(
            e,
            place=number(e.place),
            after=Moved(number(e.after.place), e.after.key) if isinstance(e.after, Moved) else e.after,
        )
        for e in effects
    ]
