"""The examples run as a user runs them, with small settings, and what they print holds."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name: str, *options: str | Path) -> subprocess.CompletedProcess[str]:
    """A process of its own: the workers of a DataLoader are forked, which may not happen where JAX already runs."""
    # A warning that a user would see is an error here, as in the tests.
    command = (sys.executable, "-W", "error::UserWarning", "-W", "error::RuntimeWarning", EXAMPLES / name, *options)
    return subprocess.run(
        tuple(map(os.fspath, command)), capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )


def number(pattern: str, text: str) -> float:
    found = re.search(pattern, text, re.MULTILINE)
    assert found is not None, f"{pattern} not in:\n{text}"
    return float(found[1])


@pytest.mark.slow
def test_private_digits(tmp_path: Path) -> None:
    picture = tmp_path / "new" / "memory.png"
    small = ("--epochs", "1", "--examples", "40", "--batch-size", "16", "--microbatch-size", "4")
    result = run("private_digits.py", *small, "--output", picture)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Warning" not in result.stderr
    out = result.stdout

    assert number(r"microtome in float32 +(\S+) ", out) < 1e-5
    assert number(r"microtome in float64 +(\S+) ", out) < 1e-10
    assert out.count(", ok)") == 2
    assert "no epsilon is computed" in out
    assert re.search(r"^first step +[\d.]+ s, tracing and compilation included$", out, re.MULTILINE)
    assert 0 <= number(r"^clipped examples +([\d.]+)% of 32 gradients$", out) <= 100
    assert 0 <= number(r"^test accuracy +([\d.]+)% \(\d+ of 360 ", out) <= 100

    rows = re.findall(r"^ +(\d+) +([\d.]+) kB +[\d.]+ ms$", out, re.MULTILINE)
    sizes, kilobytes = [int(size) for size, _ in rows], [float(kb) for _, kb in rows]
    one_gradient = number(r"\(([\d.]+) kB is one gradient\)", out)
    assert sizes == [1, 4, 16]
    # Each example of a microbatch has its gradient, beside what does not depend on the microbatch.
    assert one_gradient < kilobytes[0] < kilobytes[1] < kilobytes[2] / 2

    assert f"plotted in {picture}" in out
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_hessian_spectrum(tmp_path: Path) -> None:
    picture = tmp_path / "new" / "spectrum.png"
    small = ("--hidden", "4", "--examples", "60", "--steps", "60", "--batch-size", "50")
    result = run("hessian_spectrum.py", *small, "--output", picture)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("Hessian (118, 118)") == 2
    assert "3/3" in result.stderr  # the bar
    before, after = (number(rf"^{when} training: loss (\S+),", result.stdout) for when in ("before", "after"))
    assert after < before
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_recurrent_simulation(tmp_path: Path) -> None:
    picture = tmp_path / "new" / "memory.png"
    small = ("--steps", "900", "--pendulums", "4", "--updates", "100")
    result = run("recurrent_simulation.py", *small, "--output", picture)
    assert result.returncode == 0, result.stdout + result.stderr
    assert number(r"relative error (\S+)$", result.stdout) < 1e-5
    assert number(r"^  stiffness +(\S+) ", result.stdout) == pytest.approx(4.0, rel=0.05)
    used = {int(s): float(kb) for s, kb in re.findall(r"chunks of +(\d+) steps +([\d.]+) kB", result.stdout)}
    assert used[30] < min(used[1], used[900]) / 5
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.fixture(scope="module")
def private_digits() -> ModuleType:
    spec = importlib.util.spec_from_file_location("private_digits", EXAMPLES / "private_digits.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_comparison_of_private_digits_can_fail(private_digits: ModuleType) -> None:
    expected = {"w": torch.tensor([1.0, -2.0], dtype=torch.float64), "b": torch.tensor([4.0], dtype=torch.float64)}
    wrong = {"w": torch.tensor([1.0, -2.0]), "b": torch.tensor([3.0])}
    assert private_digits.relative_error(expected, expected) == 0
    assert private_digits.relative_error(wrong, expected) == 0.25


def test_private_digits_refuses_what_it_cannot_use(
    private_digits: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        private_digits.parse(["--microbatch-size", "0"])
    assert "--microbatch-size" in capsys.readouterr().err


@pytest.mark.slow
def test_private_training() -> None:
    result = run("private_training.py", "--examples", "64", "--epochs", "2", "--batch-size", "32")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Warning" not in result.stderr
    both = importlib.util.find_spec("opacus") is not None
    assert len(re.findall(r"accuracy on what it was trained on [\d.]+%", result.stdout)) == 1 + both
    if both:
        assert number(r"largest difference between the two trained models (\S+)$", result.stdout) < 1e-4
