"""README.md: its Python blocks run as written and print what they say; its table names what there is."""

import contextlib
import importlib
import io
import re
from pathlib import Path

import pytest
import torch

README = Path(__file__).parent.parent / "README.md"
PACKAGES = {"T": "torch_api", "J": "jax_impl", "B": "bridge"}
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)


def promised(block: str) -> list[str]:
    """What the block's calls of ``print`` show, by the comments after them."""
    return re.findall(r"^print\(.*\)  # (.+)$", block, re.MULTILINE)


def run(block: str) -> list[str]:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(block, str(README), "exec"), {"__name__": "readme"})
    return printed.getvalue().splitlines()


@pytest.mark.parametrize("block", BLOCKS, ids=range(1, len(BLOCKS) + 1))
def test_block_runs_and_prints_what_it_says(block: str) -> None:
    torch.manual_seed(0)
    assert promised(block)
    assert run(block) == promised(block)


def test_a_wrong_comment_is_noticed() -> None:
    block = "print(1 + 1)  # 3\n"
    assert run(block) == ["2"]
    assert promised(block) == ["3"]


def test_there_are_blocks_for_both_frameworks() -> None:
    assert any("jax_impl" in block for block in BLOCKS)
    assert any("torch_api as mt" in block for block in BLOCKS)


def test_the_table_names_every_public_function() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([TJB ]+) \| .+ \|$", README.read_text(), re.MULTILINE)
    for letter, package in PACKAGES.items():
        named = {name for name, where in rows if letter in where.split()}
        assert named == set(importlib.import_module(f"microtome.{package}").__all__), package


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)]+)\)", README.read_text()):
        assert (README.parent / target).exists(), target
