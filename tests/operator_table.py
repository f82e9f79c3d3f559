"""What the sweep over torch's operator database has shown, as a page: ``operator_table.py > docs/operators.md``.

Both lists are strict, so they and the database say what the sweep finds: it need not run for the page.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

_HERE = Path(__file__).resolve().parent
DOCUMENT = _HERE.parent / "docs" / "operators.md"

Table = dict[str, dict[str, str]]
REFUSED: Table = tomllib.loads((_HERE / "operators_refused.toml").read_text())
DIFFERENT: Table = tomllib.loads((_HERE / "operators_different.toml").read_text())

_INTRODUCTION = """\
# torch's operators, one by one

torch ships a database of its operators with inputs for each (`torch.testing._internal`, which torch's own tests use).
The sweep in `tests/bridge/lowerings/test_operators.py` takes every operator and variant of it, up to three samples in
each dtype that eager torch's CPU kernels accept, and compares `as_jax` of it with eager torch: results, dtypes and
shapes, and the gradients for random cotangents. float64 is compared in second order (derivatives of gradients by inputs
and cotangents) and in forward mode too, and float32 under `vmap` with per-example gradients. In half precision, a
result counts as right if it is as near to the one in double precision as eager torch's is, within a factor of four and
rounding.

An operator is *right* in a mode if all its samples are; *refused* if one of them raises an error before there is a
number; and what may *differ* is listed below. The lists are strict in both directions: the sweep fails for a
difference that is not listed, and for an entry that is no longer needed. The database also lists inputs for which
torch raises; there `as_jax` has to raise too, and what does not is listed under "errors".
"""


def reason(table: Table, name: str, mode: str) -> str | None:
    """Why an operator is on a list in a mode, if it is."""
    entries = table.get(name, {})
    return next((why for key, why in entries.items() if key == "all" or mode in key.split(", ")), None)


def listed() -> str:
    """What may differ, by its reason."""
    by_reason: dict[str, list[str]] = {}
    for name, entries in sorted(DIFFERENT.items()):
        for key, why in entries.items():
            by_reason.setdefault(why, []).append(f"`{name}`" + ("" if key == "all" else f" ({key})"))
    return "\n".join(f"- {why[0].upper()}{why[1:]}: {', '.join(names)}." for why, names in by_reason.items())


def _counts() -> str:
    from operator_samples import DTYPES, FURTHER, database, modes

    rows = ["| mode | operators | right | refused | may differ |", "|---|---:|---:|---:|---:|"]
    operators = database()
    for dtype in DTYPES:
        for mode in (dtype, *FURTHER.get(dtype, ())):
            names = [name for name, op in operators.items() if mode in modes(op, dtype)]
            refused = {name for name in names if reason(REFUSED, name, mode)}
            different = {name for name in names if reason(DIFFERENT, name, mode)} - refused
            right = len(names) - len(refused) - len(different)
            title = mode if mode == dtype else f"{mode} ({dtype})"
            rows.append(f"| {title} | {len(names)} | {right} | {len(refused)} | {len(different)} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(_INTRODUCTION, _counts(), "\n## What may differ\n", listed(), sep="\n")
