"""Comparisons across torch and JAX for test suites: microtome's own tests use them, and so can yours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import torch

from ..jax_impl.program.trees import PyTree
from .compare import compare
from .compare.differences import as_numpy
from .compare.report import Report

__all__ = ["assert_agrees", "assert_same"]

_ROUNDINGS = 32


def assert_agrees(
    torch_fun: Callable[..., PyTree], jax_fun: Callable[..., PyTree] | None = None, *args: PyTree, **options: Any
) -> Report:
    """Assert that a torch function and its port to JAX agree: ``compare(...).assert_agrees()`` in one line of a test.

    Without ``engines`` among the options only the port is compared, which is faster.

    Args:
        torch_fun: as in :func:`compare`.
        jax_fun: as in :func:`compare`.
        *args: as in :func:`compare`.
        **options: as in :func:`compare`. With ``locate=True`` the failure names the first submodule that differs.

    Returns:
        The report.

    Raises:
        AssertionError: they differ by more than rounding; pytest shows the report.

    >>> import jax, torch
    >>> from microtome.torch_api import testing
    >>> print(testing.assert_agrees(torch.tanh, jax.numpy.tanh, torch.ones(2)).agrees)
    True
    """
    __tracebackhide__ = True
    if jax_fun is not None:
        options.setdefault("engines", ())
    report = compare(torch_fun, jax_fun, *args, **options)
    report.assert_agrees()
    return report


def assert_same(actual: PyTree, expected: PyTree, exact: bool = False) -> None:
    """Assert that two trees are the same: structure (types, order of keys), shapes, dtypes, values.

    Leaves may be torch tensors, or JAX or NumPy arrays, but tensors only where tensors are expected. Floats may
    differ by 32 units of roundoff of the leaf's dtype, relative to the larger of 1 and the leaf's largest finite value:
    the rounding of a sum of some hundred terms. Whole numbers and bools are equal, NaN equals NaN.

    Args:
        actual: what the code under test returned.
        expected: what it should return.
        exact: whether floats have to be equal to the bit, as for data that was only moved.

    Raises:
        AssertionError: they differ; the message begins with the path of the leaf.

    >>> import torch
    >>> from microtome.torch_api.testing import assert_same
    >>> assert_same({"a": torch.ones(2)}, {"a": torch.ones(2) + 1e-7})
    """
    __tracebackhide__ = True
    for problem in _differences("result", actual, expected, exact):
        raise AssertionError(problem)


def _differences(path: str, actual: PyTree, expected: PyTree, exact: bool) -> list[str]:
    if isinstance(expected, (torch.Tensor, jax.Array, np.ndarray)):
        return _leaf_differences(path, actual, expected, exact)
    if type(actual) is not type(expected):
        return [f"{path} is a {type(actual).__name__}, not a {type(expected).__name__}"]
    if isinstance(expected, dict):
        if list(actual) != list(expected):
            return [f"{path} has the keys {list(actual)}, not {list(expected)}"]
        pairs = [(f"{path}[{key!r}]", actual[key], expected[key]) for key in expected]
    elif isinstance(expected, (tuple, list)):
        if len(actual) != len(expected):
            return [f"{path} has {len(actual)} entries, not {len(expected)}"]
        pairs = [(f"{path}[{i}]", *pair) for i, pair in enumerate(zip(actual, expected, strict=True))]
    else:
        return [] if actual == expected else [f"{path} is {actual!r}, not {expected!r}"]
    return [problem for where, one, two in pairs for problem in _differences(where, one, two, exact)]


def _leaf_differences(path: str, actual: PyTree, expected: PyTree, exact: bool) -> list[str]:
    if isinstance(expected, torch.Tensor):
        if type(actual) is not torch.Tensor:
            return [f"{path} is a {type(actual).__name__}, not a Tensor"]
        if actual.is_conj() or actual.is_neg():
            return [f"{path} is a view with its conjugation or sign still pending"]
        forms: list[tuple[object, ...]] = [(tuple(t.shape), t.dtype, t.device) for t in (actual, expected)]
    elif isinstance(actual, (jax.Array, np.ndarray)):
        forms = [(tuple(a.shape), a.dtype) for a in (actual, expected)]
    else:
        return [f"{path} is a {type(actual).__name__}, not a {type(expected).__name__}"]
    if forms[0] != forms[1]:
        return [f"{path} has shape, dtype and device {forms[0]}, not {forms[1]}"]
    one, two = as_numpy(actual), as_numpy(expected)
    if not one.size:
        return []
    exact = exact or one.dtype.kind in "iub"
    eps = 0.0 if exact else float(jax.numpy.finfo(one.dtype).eps)
    if one.dtype.kind not in "iub":
        wide = np.complex128 if one.dtype.kind == "c" else np.float64
        one, two = one.astype(wide), two.astype(wide)
    sizes = np.abs(two)
    scale = float(np.max(sizes, initial=1.0, where=np.isfinite(sizes)))
    with np.errstate(invalid="ignore"):
        error = np.abs(one - two) if one.dtype != bool else one ^ two
        wrong = ~((one == two) | ((one != one) & (two != two)) | (error <= _ROUNDINGS * eps * scale))
    if not wrong.any():
        return []
    worst = tuple(map(int, np.argwhere(wrong)[0]))
    return [f"{path} differs in {int(wrong.sum())} of {one.size} places: {one[worst]} at {worst}, not {two[worst]}"]
