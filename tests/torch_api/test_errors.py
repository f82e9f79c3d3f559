"""Mistakes that torch users make: one error of the standard kind, before anything runs, that says what to do."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import crossed
from torch import nn

from microtome import torch_api as mt

SUM = mt.AccumulationType.SUM
W = {"w": torch.ones(3)}
X = torch.ones(5, 3)


def _loss(p: Any, x: torch.Tensor) -> torch.Tensor:
    return (p["w"] * x).sum()


def _branch(p: Any, x: torch.Tensor) -> torch.Tensor:
    return _loss(p, x) if x.sum() > 0 else -_loss(p, x)


def _writes(p: Any, x: torch.Tensor) -> torch.Tensor:
    x += 1
    return _loss(p, x)


def _calls_backward(p: Any, x: torch.Tensor) -> torch.Tensor:
    _loss(p, x).backward()
    return _loss(p, x)


def _two(p: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return _loss(p, x) * y.sum()


HERE = r"test_errors\.py:\d+"
MISTAKES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "size does not divide": (
        lambda: mt.micro_grad(_loss, microbatch_size=2, remainder="error")(W, X),
        ValueError,
        r"batch_size=5 must be divisible by microbatch_size=2",
    ),
    "lengths differ": (
        lambda: mt.micro_grad(_two, batch_argnums=(1, 2))(W, X, torch.ones(4)),
        ValueError,
        r"x has 5 \(axis 0\), y has 4 \(axis 0\)",
    ),
    "lengths differ within an argument": (
        lambda: mt.microbatch(lambda b: b["a"].sum(), 0, 2)({"a": X, "c": torch.ones(2)}),
        ValueError,
        r"b\['a'\] has 5 \(axis 0\), b\['c'\] has 2",
    ),
    "loss is no scalar": (
        lambda: mt.micro_grad(lambda p, x: p["w"] * x)(W, X),
        TypeError,
        r"scalar loss .* got shape \(1, 3\)",
    ),
    "argnums out of range": (lambda: mt.micro_grad(_loss, argnums=5)(W, X), ValueError, r"argnums.*5"),
    "only integers": (
        lambda: mt.micro_grad(_loss)({"w": torch.ones(3, dtype=torch.int64)}, X),
        TypeError,
        r"p.*only integers|p.*no floating",
    ),
    "accumulator does not match": (
        lambda: mt.micro_grad(_loss, accumulator={"v": SUM})(W, X),
        ValueError,
        r"prefix of .*\{'v': '\*'\}.*\{'w': '\*'\}",
    ),
    "meta tensor": (
        lambda: mt.micro_grad(_loss)({"w": torch.ones(3, device="meta")}, X),
        TypeError,
        r"p\['w'\]: .*meta",
    ),
    "sparse tensor": (lambda: mt.micro_grad(_loss)(W, X.to_sparse()), TypeError, r"x: .*sparse.*\.to_dense\(\)"),
    "tensor without a dtype in JAX": (
        lambda: mt.micro_grad(_loss)(W, X.to(torch.complex32)),
        TypeError,
        r"x: .*complex32.*complex64",
    ),
    "branch on values": (lambda: mt.micro_grad(_branch)(W, X), TypeError, rf"{HERE}: .*torch\.where"),
    "writes to an argument": (
        lambda: mt.micro_grad(_writes)(W, X),
        TypeError,
        rf"{HERE}: .*argument x in place.*clone",
    ),
    "backward inside": (lambda: mt.micro_grad(_calls_backward)(W, X), TypeError, rf"{HERE}: .*torch\.autograd\.grad"),
    "size not positive": (lambda: mt.micro_grad(_loss, microbatch_size=0), ValueError, r"microbatch_size.*0"),
    "unknown remainder": (lambda: mt.micro_grad(_loss, remainder="drop"), ValueError, r"remainder.*'drop'"),
    "mean of integers": (
        lambda: mt.microbatch(lambda x: (x > 0).sum(), 0, 2, mt.AccumulationType.MEAN)(X),
        TypeError,
        r"int64.*mean",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_a_mistake_is_named(name: str) -> None:
    call, kind, words = MISTAKES[name]
    with pytest.raises(kind) as caught:
        call()
    assert re.search(words, str(caught.value), re.DOTALL), str(caught.value)
    assert W["w"].eq(1).all()
    assert X.eq(1).all()


def test_an_unreachable_device_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from microtome.bridge.memory import values

    with pytest.raises(ValueError, match=r"install jax\[cuda"):
        values.jax_device(torch.device("cuda:0"))


@pytest.mark.parametrize(("transform", "rows"), crossed(["micro_grad", "micro_vmap", "microbatch"], [1, 4]))
def test_batch_statistics_are_refused_where_they_have_no_meaning(transform: str, rows: int) -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    p, x = dict(module.named_parameters()), torch.randn(4, 3)
    before = {k: v.clone() for k, v in module.state_dict().items()}

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(module, p, (x.reshape(-1, 3).repeat(rows, 1),)).sum()

    calls = {
        "micro_grad": lambda: mt.micro_grad(loss, microbatch_size=2)(p, x),
        "micro_vmap": lambda: mt.micro_vmap(loss, (None, 0), microbatch_size=2)(p, x),
        "microbatch": lambda: mt.microbatch(loss, 1, 2)(p, x),
    }
    with pytest.raises(TypeError, match=r"BatchNorm1d 'module\.1\.running_mean'.*\.eval\(\).*GroupNorm"):
        calls[transform]()
    for key, value in module.state_dict().items():
        assert type(value) is torch.Tensor
        assert torch.equal(value, before[key])
    module.eval()
    calls[transform]()
