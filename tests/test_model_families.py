"""Families of models: forward pass, gradient and clipped gradient, against eager torch, one example at a time."""

from __future__ import annotations

import gc
import importlib
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import image_families
import model_families
import pytest
import torch
from conftest import FIRST_CALLS
from torch import nn

from microtome import torch_api as mt
from microtome.bridge import as_jax, as_torch
from microtome.bridge.call import cache

REFUSED = {"Longformer": "a Python number or bool was asked"}  # whether a token attends to all others
CLOSE = {"rtol": 2e-3, "atol": 2e-5}


@pytest.fixture(autouse=True)
def _programs_are_forgotten() -> Iterator[None]:
    """Each program of a model takes hundreds of mappings, of which Linux gives a process 65,530: XLA crashes then."""
    yield
    cache.PROGRAMS.clear()
    gc.collect()


def _gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    return found


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # what transformers and torch say while models are built is theirs
@pytest.mark.parametrize("name", model_families.FAMILIES)
def test_a_family_computes_as_in_eager_torch(name: str, record_property: Callable[[str, object], None]) -> None:
    record_property(FIRST_CALLS, _check(name, *model_families.make(name)))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", image_families.FAMILIES)
def test_a_family_of_torchvision_or_timm_computes_as_in_eager_torch(
    name: str, record_property: Callable[[str, object], None]
) -> None:
    library = name.split()[0]
    try:
        importlib.import_module(library)
    except (ImportError, RuntimeError) as error:  # RuntimeError: built for another torch, as one without CUDA
        pytest.skip(f"{library} cannot be imported here (pip install 'microtome[models]'): {error}")
    record_property(FIRST_CALLS, _check(name, *image_families.make(name)))


def _check(name: str, model: nn.Module, batch: tuple[torch.Tensor, ...], apply: Any) -> list[float]:
    """CPU seconds of the first calls: forward, with gradient, clipped."""
    seconds: list[float] = []

    def first(call: Callable[[], Any]) -> Any:
        start = time.process_time()
        result = call()
        seconds.append(round(time.process_time() - start, 1))
        return result

    def loss(model: nn.Module, *batch: torch.Tensor) -> torch.Tensor:
        return apply(model, *batch).log_softmax(-1)[..., 0].mean()

    if name in REFUSED:
        with pytest.raises(TypeError, match=REFUSED[name]):
            as_torch(as_jax(lambda *b: apply(model, *b)))(*batch)
        return seconds

    with torch.no_grad():
        result = first(lambda: as_torch(as_jax(lambda *b: apply(model, *b)))(*batch))
        torch.testing.assert_close(result, apply(model, *batch), **CLOSE)

    loss(model, *batch).backward()
    expected: Any = _gradients(model)
    first(lambda: as_torch(as_jax(lambda *b: loss(model, *b)))(*batch).backward())
    torch.testing.assert_close(_gradients(model), expected, **CLOSE)

    examples = []
    for i in range(3):
        # Twice: for one row whose cotangent is transposed, torch's batch norm in evaluation mode has wrong gradients.
        loss(model, *(x[[i, i]] for x in batch)).backward()
        examples.append(_gradients(model))
    norms = [math.sqrt(sum(float(g.double().square().sum()) for g in grads.values())) for grads in examples]
    bound = 0.7 * sorted(norms)[1]
    aux = first(lambda: mt.clipped_backward(model, loss, max_grad_norm=bound)(*batch))
    torch.testing.assert_close(aux.grad_norms, torch.tensor(norms), **CLOSE)
    scales = [min(1, bound / norm) / 3 for norm in norms]
    expected = {n: sum(s * grads[n] for s, grads in zip(scales, examples, strict=True)) for n in examples[0]}
    torch.testing.assert_close(_gradients(model), expected, **CLOSE)
    return seconds
