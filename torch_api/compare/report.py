"""The report of a comparison: a table by leaf, notes, and where the first difference arises."""

from __future__ import annotations

import dataclasses
import html
import json
import math
import os
from collections.abc import Sequence
from typing import Any

AGREEING = ("equal", "rounding")
_SHOWN = 40  # rows that a terminal shows; the JSON has all
_HEAD = ("against", "what", "leaf", "verdict", "abs", "rel", "ulps", "float64 rel", "worst", "torch", "JAX")


@dataclasses.dataclass(frozen=True)
class Row:
    """One leaf, compared between eager torch and one JAX function.

    Attributes:
        against: what torch was compared with: ``"jax"`` (the function given), or an engine that traced the torch
            function, ``"record"`` or ``"torch2jax"``.
        section: ``"outputs"``, ``"gradients"``, ``"per-example gradients"``, ``"hvp"``, or ``"parameters"``.
        leaf: the path of the leaf: an output's, a parameter's name, or ``argument 0``.
        verdict: ``"equal"`` (to the bit), ``"rounding"``, ``"different"``, ``"shape"``, ``"dtype"``, or ``"missing"``
            (one side has no such leaf).
        absolute: the largest absolute error in the dtype that was given.
        relative: the same, divided by the leaf's largest value.
        ulps: the largest error in units of the last place.
        absolute64: the largest absolute error in float64; None where nothing ran in float64.
        relative64: the same, divided by the leaf's largest value.
        index: where the largest error is.
        torch_value: torch's value there.
        jax_value: the other value there.
        detail: what differs where no numbers could be compared, such as two shapes.
    """

    against: str
    section: str
    leaf: str
    verdict: str
    absolute: float | None = None
    relative: float | None = None
    ulps: float | None = None
    absolute64: float | None = None
    relative64: float | None = None
    index: tuple[int, ...] | None = None
    torch_value: float | complex | None = None
    jax_value: float | complex | None = None
    detail: str = ""

    def cells(self) -> list[str]:
        """What a table shows of the row."""
        worst = "" if self.index is None else "[" + ", ".join(map(str, self.index)) + "]"
        numbers = (self.absolute, self.relative, self.ulps, self.relative64)
        values = [self.detail, ""] if self.detail else [_value(self.torch_value), _value(self.jax_value)]
        return [self.against, self.section, self.leaf, self.verdict, *map(_number, numbers), worst, *values]


@dataclasses.dataclass(frozen=True)
class Location:
    """The first submodule of the torch model whose output the JAX function does not compute.

    Attributes:
        module: the submodule's name, as in ``named_modules()``; ``""`` is the model itself.
        detail: how it was found, in a sentence.
        error: how far JAX's nearest value is from the submodule's output, relative to its largest value.
        disagreeing: all submodules whose output JAX does not compute, in the order in which they finish.
        sure: whether JAX computes what the submodule is given, so that the difference is in it and not before it.
    """

    module: str
    detail: str
    error: float
    disagreeing: tuple[str, ...] = ()
    sure: bool = True

    def __str__(self) -> str:
        return f"first difference: {self.module or 'the model itself, outside of its submodules'}. {self.detail}"


@dataclasses.dataclass
class Report:
    """What :func:`compare` found.

    ``print(report)`` shows the table, the leaves that disagree first; a notebook shows it in colour.

    Attributes:
        rows: one :class:`Row` for each leaf.
        problems: why the comparison is incomplete or meaningless; with any, the report does not agree.
        notes: what else is worth knowing, such as operations that an engine does not support.
        location: where the first difference arises, with ``locate=True``.
    """

    rows: list[Row] = dataclasses.field(default_factory=list)
    problems: list[str] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    location: Location | None = None

    @property
    def agrees(self) -> bool:
        """Whether nothing differs by more than rounding. The engine torch2jax, an opinion, does not count."""
        counted = [row for row in self.rows if row.against != "torch2jax"]
        return bool(counted) and not self.problems and all(row.verdict in AGREEING for row in counted)

    def disagreements(self) -> list[Row]:
        """The rows that differ by more than rounding, the largest differences first."""
        rows = [row for row in self.rows if row.verdict not in AGREEING]
        return sorted(rows, key=lambda row: (row.against == "torch2jax", -_size(row)))

    def verdict(self, leaf: str, section: str = "outputs", against: str = "jax") -> str:
        """The verdict of one leaf.

        Raises:
            KeyError: there is no such row.
        """
        for row in self.rows:
            if (row.leaf, row.section, row.against) == (leaf, section, against):
                return row.verdict
        raise KeyError(f"no leaf {leaf!r} in {section!r} against {against!r}.")

    def assert_agrees(self) -> None:
        """Raise an ``AssertionError`` that shows the report, unless all agrees.

        Raises:
            AssertionError: something differs by more than rounding, or could not be compared.
        """
        __tracebackhide__ = True
        if not self.agrees:
            raise AssertionError(str(self))

    def summary(self) -> str:
        """One sentence."""
        if self.agrees:
            by_rounding = sum(row.verdict == "rounding" for row in self.rows)
            return f"torch and JAX agree: {len(self.rows)} leaves, {by_rounding} differ by rounding."
        rows = [row for row in self.disagreements() if row.against != "torch2jax"]
        if rows:
            return f"torch and JAX disagree in {len(rows)} of {len(self.rows)} leaves."
        return "torch and JAX could not be compared."

    def __str__(self) -> str:
        """The table for a terminal."""
        lines = [self.summary(), *self._remarks(), ""]
        rows = self._ordered()
        lines += _columns([list(_HEAD), *(row.cells() for row in rows[:_SHOWN])]) if rows else []
        if len(rows) > _SHOWN:
            lines.append(f"... and {len(rows) - _SHOWN} more leaves; to_json() has them.")
        return "\n".join(lines).rstrip()

    def _repr_html_(self) -> str:
        colours = {"equal": "#dff0d8", "rounding": "#f3f9ee"}
        cells = lambda tag, texts: "".join(f"<{tag}>{html.escape(text)}</{tag}>" for text in texts)
        body = "".join(
            f'<tr style="background:{colours.get(row.verdict, "#f8d7da")};color:#000">{cells("td", row.cells())}</tr>'
            for row in self._ordered()
        )
        remarks = "".join(f"<p>{html.escape(text)}</p>" for text in (self.summary(), *self._remarks()))
        return f"{remarks}<table><thead><tr>{cells('th', _HEAD)}</tr></thead><tbody>{body}</tbody></table>"

    def _ordered(self) -> list[Row]:
        return [*self.disagreements(), *(row for row in self.rows if row.verdict in AGREEING)]

    def _remarks(self) -> list[str]:
        located = [] if self.location is None else [str(self.location)]
        return [*located, *(f"problem: {text}" for text in self.problems), *(f"note: {text}" for text in self.notes)]

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """The whole report as JSON, written to ``path`` too if one is given; numbers that JSON lacks become strings."""
        content = {
            "agrees": self.agrees,
            "summary": self.summary(),
            "location": None if self.location is None else dataclasses.asdict(self.location),
            "problems": self.problems,
            "notes": self.notes,
            "rows": [dataclasses.asdict(row) for row in self.rows],
        }
        text = json.dumps(_plain(content), indent=2)
        if path is not None:
            with open(path, "w", encoding="utf-8") as file:
                file.write(text + "\n")
        return text

    def plot(self, path: str | os.PathLike[str] | None = None) -> Any:
        """The relative error of each leaf as bars, in the dtype given and in float64 (needs matplotlib).

        Returns:
            The figure; it is saved to ``path`` too if one is given.

        Raises:
            ImportError: matplotlib is not installed.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError("Report.plot needs matplotlib: pip install matplotlib.") from error
        rows = [row for row in self.rows if row.relative is not None]
        figure = Figure(figsize=(9, 1.5 + 0.3 * len(rows)), layout="constrained")
        axes = figure.subplots()
        for shift, name, label in ((-0.2, "relative", "as given"), (0.2, "relative64", "float64")):
            sizes = [_finite(getattr(row, name)) for row in rows]
            axes.barh([i + shift for i in range(len(rows))], sizes, 0.4, label=label)
        for i, row in enumerate(rows):
            if row.verdict not in AGREEING:
                axes.axhspan(i - 0.5, i + 0.5, color="red", alpha=0.12)
        axes.set_yticks(range(len(rows)), [f"{row.against}: {row.section}: {row.leaf}" for row in rows], fontsize=7)
        axes.set_xscale("symlog", linthresh=1e-17)
        axes.set_xlabel("largest error / largest value (red: more than rounding)")
        axes.invert_yaxis()
        axes.legend()
        if path is not None:
            figure.savefig(path)
        return figure


def _size(row: Row) -> float:
    size = row.relative64 if row.relative64 is not None else row.relative
    return math.inf if size is None or math.isnan(size) else size


def _finite(value: float | None) -> float:
    return 0.0 if value is None or math.isnan(value) else min(value, 1e6)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2g}"


def _value(value: object) -> str:
    return "" if value is None else f"{value:.8g}" if isinstance(value, (float, complex)) else str(value)


def _columns(table: Sequence[Sequence[str]]) -> list[str]:
    """Return the rows of a table, its columns aligned, with a line under the first row."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in table]
    return [lines[0], "-" * (sum(widths) + 2 * len(widths) - 2), *lines[1:]]


def _plain(value: object) -> object:
    """Return the value with what JSON lacks (NaN, infinities, complex numbers) as text."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, complex) or (isinstance(value, float) and not math.isfinite(value)):
        return str(value)
    return value
