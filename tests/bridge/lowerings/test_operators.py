"""Every operator of torch's own database through ``as_jax``: right, or refused before it gives a number.

``operators_refused.toml`` names the operators that are refused, ``operators_different.toml`` those whose numbers may
differ from eager torch's, both with the modes and the reason; both lists are strict. The table in
``docs/operators.md`` counts the rest (``python tests/operator_table.py > docs/operators.md`` writes it).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import pytest
from operator_samples import DTYPES, database, error_cases, modes
from operator_sweep import is_named, raises, results, trials, wrong
from operator_table import DIFFERENT, DOCUMENT, REFUSED, Table, listed, reason

OPERATORS = database()


@pytest.fixture(autouse=True)
def _without_traces_of_others() -> Iterator[None]:
    yield
    jax.clear_caches()  # thousands of programs, none of which runs twice


def _spread(names: Any) -> list[Any]:
    """Every eighth with the sweeps, the others with those that take long."""
    marks = (pytest.mark.long if i % 8 else pytest.mark.slow for i in range(len(OPERATORS)))
    return [pytest.param(name, marks=mark) for name, mark in zip(names, marks, strict=False)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", _spread(OPERATORS))
def test_operator(name: str) -> None:
    refusals: dict[str, list[str]] = {}
    different: dict[str, list[str]] = {}
    for dtype in DTYPES:
        for trial, got in results(list(trials(name, OPERATORS[name], dtype)), refusals):
            if words := wrong(trial, got):
                different.setdefault(trial.mode, []).append(words)
    unnamed = [f"{mode} raises {e}" for mode, errors in refusals.items() for e in errors if not is_named(e)]
    faults = [*unnamed, *_faults(REFUSED, "is refused", name, refusals)]
    faults += _faults(DIFFERENT, "differs", name, different)
    assert not faults, "\n".join(faults)


def _faults(table: Table, what: str, name: str, found: dict[str, list[str]]) -> Iterator[str]:
    """What is found but not listed, and what is listed but not found; ``all`` stands for one mode at least."""
    for mode, words in found.items():
        if reason(table, name, mode) is None:
            yield f"{mode} {what}: {words[0]}"
    for key in table.get(name, {}):
        gone = [] if key == "all" and found else [mode for mode in key.split(", ") if mode not in (*found, "errors")]
        if gone:
            yield f"{name} no longer {what} in {gone}: take it off the list"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", _spread(name for name, op in OPERATORS.items() if op.error_inputs_func is not None))
def test_raises_where_torch_does(name: str) -> None:
    computed = [number for number, case in enumerate(error_cases(OPERATORS[name])) if not raises(case)]
    listed_alone = any("errors" in key.split(", ") for key in DIFFERENT.get(name, {}))
    assert not computed or reason(DIFFERENT, name, "errors") is not None, f"samples {computed} give numbers"
    assert computed or not listed_alone, "it raises now: take it off the list"


@pytest.mark.parametrize("table", [REFUSED, DIFFERENT], ids=["refused", "different"])
def test_the_lists_name_operators(table: dict[str, dict[str, str]]) -> None:
    for name, entries in table.items():
        able = {"errors", *(mode for dtype in DTYPES for mode in modes(OPERATORS[name], dtype))}
        for key in entries:
            assert key == "all" or set(key.split(", ")) <= able, name


def test_the_document_lists_what_differs() -> None:
    assert listed() in DOCUMENT.read_text(), "run: python tests/operator_table.py > docs/operators.md"
