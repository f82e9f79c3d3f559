"""What test files of several folders share: functions through both frameworks, marked names, memory, processes."""

from __future__ import annotations

import gc
import itertools
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import pytest
import torch

from microtome.bridge import as_jax, as_torch


class Pair(NamedTuple):
    """A container that is no plain tuple."""

    left: Any
    right: Any


def through(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Take a torch function to JAX and back: the plain function is what its results are held against."""
    return as_torch(as_jax(fun))


def marked(
    table: Iterable[Any],
    wrong: Mapping[Any, str] | None = None,
    *,
    slow: Collection[Any] = (),
    quick: Collection[Any] | None = None,
) -> list[Any]:
    """Give the names of a table for ``parametrize``, each in its place, with the marks of some.

    Args:
        table: The names.
        wrong: The names of what fails, and why.
        slow: The names that run with the slow sweeps.
        quick: Instead of ``slow``: the names that do not.
    """
    names = list(table)
    wrong = wrong or {}
    given = {*wrong, *slow, *(quick or ())}
    assert given <= set(names), f"not in the table: {given - set(names)}"
    marks = dict.fromkeys(slow if quick is None else set(names) - set(quick), pytest.mark.slow)
    marks |= {name: pytest.mark.xfail(reason=why) for name, why in wrong.items()}
    return [pytest.param(name, marks=marks[name]) if name in marks else name for name in names]


def crossed(*tables: Iterable[Any]) -> list[Any]:
    """Give all combinations of several tables for ``parametrize``: each name in a quick one, the rest with the sweeps.

    The quick ones are the first names, the second ones and so on, where a shorter table begins anew.
    """
    listed = [list(table) for table in tables]
    quick = [tuple(names[i % len(names)] for names in listed) for i in range(max(map(len, listed)))]
    slow = (pytest.mark.slow,)
    return [pytest.param(*each, marks=() if each in quick else slow) for each in itertools.product(*listed)]


def having(thing: Any, **attributes: Any) -> Any:
    """Set attributes of an object, in an expression."""
    for name, value in attributes.items():
        setattr(thing, name, value)
    return thing


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """List the tensors in a pytree of torch's."""
    return [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def live_arrays(shape: tuple[int, ...] | None = None) -> int:
    """Count the arrays of JAX that something holds, those of one shape if one is given."""
    gc.collect()
    gc.collect()  # JAX frees at a collection what C++ code let go before it: what the first one freed as well
    return sum(shape in (None, a.shape) for a in jax.live_arrays())


def temporary(fun: Callable[..., Any], *args: Any) -> int:
    """Read how many bytes a compiled JAX function takes besides its arguments and results."""
    return jax.jit(fun).lower(*args).compile().memory_analysis().temp_size_in_bytes


def printed_by(code: str, *args: str) -> str:
    """Run code in a Python of its own, and return what it prints."""
    done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout
