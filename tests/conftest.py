"""What all tests share: the marker `gpu` skips where torch and JAX do not both reach a CUDA device."""

import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest

FIRST_CALLS = "CPU seconds of the first calls"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the golden files of messages anew")


@pytest.fixture
def seeded() -> None:
    """Torch's numbers are the same in each run, and whichever tests run."""
    import torch

    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_thread_stays() -> Iterator[None]:
    """What a thread does after its test, others see: it may trace, which puts torch's generator back."""
    before = threading.enumerate()
    yield
    left = [thread for thread in threading.enumerate() if thread not in before and not thread.daemon]
    assert not left, f"threads that run on: {left}"


def _gpu_is_missing() -> str:
    import jax
    import torch

    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    try:
        jax.local_devices(backend="gpu")
    except RuntimeError:
        return "JAX sees no CUDA device"
    return ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    # The frameworks are imported only if a test asks for them: some tests are about what imports load.
    if marked and (reason := _gpu_is_missing()):
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # what the imports have made stays: without it, each collection takes a third of a second


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What tests have measured on the way, which none of them judges."""
    passed = terminalreporter.getreports("passed")
    rows = [(r.nodeid.split("::")[-1], dict(r.user_properties).get(FIRST_CALLS)) for r in passed if r.when == "call"]
    if measured := sorted((name, values) for name, values in rows if values):
        terminalreporter.section(FIRST_CALLS)
        for name, values in measured:
            terminalreporter.write_line(f"{name}: {', '.join(map(str, values))}")


def pytest_unconfigure() -> None:
    gc.unfreeze()  # else triton's modules, which newer releases of torch bring, report themselves as leaked
