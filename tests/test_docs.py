"""The guides: their Python blocks run, one page after another, and print what they say; the site builds."""

from __future__ import annotations

import contextlib
import html
import importlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted(page.name for page in (ROOT / "docs").glob("*.md") if "```python" in page.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_blocks_run_and_print_what_they_say(page: str) -> None:
    text = (ROOT / "docs" / page).read_text()
    scope: dict[str, object] = {"__name__": "guide"}
    promised: list[str] = []
    printed = io.StringIO()
    for block in re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        promised += re.findall(r"^print\(.*\)  # (.+)$", block, re.MULTILINE)
        with contextlib.redirect_stdout(printed):
            exec(compile(block, page, "exec"), scope)
    assert promised
    assert printed.getvalue().splitlines() == promised


def test_both_guides_are_there() -> None:
    assert PAGES == ["checking-a-port.md", "porting-clipping.md"]


@pytest.mark.slow
def test_the_site_builds_and_has_every_public_name(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="the extra docs is not installed")
    links = ROOT / "build" / "typing" / "microtome"
    links.mkdir(parents=True, exist_ok=True)
    for part in ("__init__.py", "py.typed", "bridge", "jax_impl", "torch_api"):
        if not (links / part).exists():
            (links / part).symlink_to(os.path.relpath(ROOT / part, links))
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", os.fspath(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    for package in ("torch_api", "jax_impl", "bridge"):
        page = (tmp_path / "api" / package / "index.html").read_text()
        if package == "torch_api":  # `compare` is the name of a module too, and documented beside its report
            report = (tmp_path / "api/testing/index.html").read_text()
            page += report.replace("torch_api.compare.comparison.", "torch_api.")
        module = importlib.import_module(f"microtome.{package}")
        for name in module.__all__:
            _, heading, rest = page.partition(f'id="microtome.{package}.{name}"')
            assert heading, f"{package}.{name}"
            text = html.unescape(re.sub(r"<[^>]+>", "", re.split(r"<h2 id=", rest)[0]))
            assert _first_words(getattr(module, name)) in re.sub(r"\W+", " ", text), (
                f"{package}.{name} has no docstring"
            )


def _first_words(documented: object) -> str:
    """The beginning of a docstring, without marks."""
    line = re.sub(r":(?:func|class|meth|mod):", "", documented.__doc__ or "no docstring at all").strip().splitlines()[0]
    return " ".join(re.findall(r"\w+", line)[:8])
