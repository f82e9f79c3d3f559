"""``torch_api.testing``: what it accepts, and what it does not let pass."""

from __future__ import annotations

import re

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from microtome.torch_api import testing
from microtome.torch_api.testing import assert_same

X = torch.tensor([1.0, 2.0, 3.0])


def test_what_is_the_same() -> None:
    assert_same(X, X + 1e-7)
    assert_same({"a": (X, None), "b": [3]}, {"a": (X, None), "b": [3]}, exact=True)
    assert_same(torch.tensor([torch.nan, torch.inf]), torch.tensor([torch.nan, torch.inf]))
    assert_same(jnp.ones(2), np.ones(2, np.float32))
    assert_same(X.bfloat16(), X.bfloat16(), exact=True)
    assert_same(torch.zeros(0), torch.zeros(0))
    assert_same(X.to(torch.complex64), X.to(torch.complex64))


@pytest.mark.parametrize(
    ("actual", "expected", "message"),
    [
        (X, X + 1e-4, "result differs in 3 of 3 places: 1.0 at (0,), not 1.0001"),
        ({"a": X, "b": X}, {"b": X, "a": X}, "has the keys ['a', 'b'], not ['b', 'a']"),
        ([X], (X,), "result is a list, not a tuple"),
        ((X,), (X, X), "has 1 entries, not 2"),
        ({"a": (X, X.double())}, {"a": (X, X)}, "result['a'][1] has shape, dtype"),
        (X[None], X, "((1, 3), torch.float32"),
        (X.numpy(), X, "is a ndarray, not a Tensor"),
        (X, jnp.ones(3), "is a Tensor, not a ArrayImpl"),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), "2 at (1,), not 3"),
        (torch.tensor([True]), torch.tensor([False]), "True at (0,)"),
        (torch.tensor([torch.nan]), torch.tensor([1.0]), "nan at (0,)"),
        (torch.tensor([torch.inf]), torch.tensor([-torch.inf]), "inf at (0,), not -inf"),
        (torch.ones(2, dtype=torch.complex64).conj(), torch.ones(2, dtype=torch.complex64), "still pending"),
        (3, 4, "result is 3, not 4"),
    ],
)
def test_what_is_not(actual: object, expected: object, message: str) -> None:
    with pytest.raises(AssertionError, match=re.escape(message)):
        assert_same(actual, expected)


def test_exact_lets_no_bit_pass() -> None:
    with pytest.raises(AssertionError, match="differs in 1 of 3 places"):
        assert_same(X, torch.nextafter(X, X + torch.tensor([1.0, 0.0, 0.0])), exact=True)


def test_assert_agrees() -> None:
    report = testing.assert_agrees(torch.sin, jnp.sin, X)
    assert {row.against for row in report.rows} == {"jax"}
    with pytest.raises(AssertionError, match="torch and JAX disagree in 2 of 2 leaves"):
        testing.assert_agrees(torch.sin, jnp.cos, X)
