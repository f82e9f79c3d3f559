"""What is kept of each array for each example, and why."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Path:
    """How one array was computed for each example: ``factored``, ``direct`` or ``materialised``, and why."""

    path: str
    reason: str
    stored: int
    """Elements kept for each example."""


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What a parameter's per-example gradients are kept as, by the parameter's name; printed, a table.

    A path is ``"factored"`` (a product that is not carried out), ``"direct"`` (an array no larger than what it is
    computed from, such as a bias's) or ``"materialised"`` (an array, as no rule covers it; the reason says where).
    """

    paths: dict[str, Path]
    dense_bytes: dict[str, int]
    """What the gradients of a microbatch would take as arrays."""
    kept_bytes: dict[str, int]
    """What is kept for a microbatch."""

    def __str__(self) -> str:
        rows = [("parameter", "path", "kept bytes", "as arrays", "why")]
        for name, p in self.paths.items():
            rows.append((name or "all", p.path, str(self.kept_bytes[name]), str(self.dense_bytes[name]), p.reason))
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        cells = [[row[i].ljust(w) for i, w in enumerate(widths)] for row in rows]
        return "\n".join("  ".join([*cell, row[4]]).rstrip() for cell, row in zip(cells, rows, strict=True))
