"""The examples in the packages' docstrings, run as tests: one test a module.

pytest's own `--doctest-modules` would import each module a second time, named after the checkout's folder, because the
repository's root has an `__init__.py`.
"""

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("bridge", "jax_impl", "torch_api")


def _module_names() -> list[str]:
    files = [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]
    paths = [file.relative_to(ROOT).with_suffix("").parts for file in files if ">>>" in file.read_text()]
    return [".".join(("microtome", *(part for part in path if part != "__init__"))) for path in paths]


@pytest.mark.parametrize("name", _module_names())
def test_docstring_examples(name: str) -> None:
    module = importlib.import_module(name)
    assert Path(module.__file__).is_relative_to(ROOT), "another copy of microtome is installed"
    results = doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert results.attempted > 0
    assert results.failed == 0, "see the captured output"
