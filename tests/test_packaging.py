"""What the wheel ships, and what importing the packages loads."""

import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest
from test_readme import BLOCKS, promised

import microtome
from microtome.jax_impl.program.versions import scan_counts

ROOT = Path(__file__).parent.parent
PARTS = ("bridge", "jax_impl", "torch_api")


PIP = ("-m", "pip", "--disable-pip-version-check")


def _run(*command: str | Path, input: str = "", **where: Any) -> str:
    command = tuple(map(os.fspath, command))
    result = subprocess.run(command, input=input, capture_output=True, text=True, check=False, **where)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def _tree(suffix: str) -> set[str]:
    """The packages' files with this suffix, as the wheel should name them."""
    files = [path for part in PARTS for path in (ROOT / part).rglob(f"*{suffix}")]
    files += ROOT.glob(f"*{suffix}")
    return {(Path("microtome") / path.relative_to(ROOT)).as_posix() for path in files}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Built from a copy: setuptools keeps what it copied into build/ from earlier runs and would ship that again.
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE", "__init__.py", "py.typed"):
        shutil.copy(ROOT / name, source)
    for part in PARTS:
        shutil.copytree(ROOT / part, source / part, ignore=shutil.ignore_patterns("__pycache__"))
    target = tmp_path_factory.mktemp("wheel")
    options = ("--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", target)
    _run(sys.executable, *PIP, "wheel", *options, source)
    (wheel,) = target.glob("microtome-*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel_names(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


def test_wheel_holds_the_modules_of_the_tree(wheel_names: set[str]) -> None:
    assert {name for name in wheel_names if name.endswith(".py")} == _tree(".py")


def test_wheel_holds_nothing_else(wheel_names: set[str]) -> None:
    kinds = {name.rsplit("/", 1)[-1] for name in wheel_names if not name.endswith(".py")}
    assert {kind for kind in kinds if "dist-info" not in kind} <= {
        "py.typed",
        "METADATA",
        "WHEEL",
        "RECORD",
        "LICENSE",
        "top_level.txt",
    }


def test_the_package_is_typed(wheel_names: set[str]) -> None:
    """One mark holds for all packages inside (PEP 561)."""
    assert [name for name in wheel_names if name.endswith("py.typed")] == ["microtome/py.typed"]


# Prints where microtome was imported from, then what each of the README's blocks printed.
README_PROGRAM = """
import contextlib, io, json, sys
blocks, printed = json.load(sys.stdin), []
for block in blocks:
    with contextlib.redirect_stdout(io.StringIO()) as text:
        exec(compile(block, "README.md", "exec"), {"__name__": "readme"})
    printed.append(text.getvalue().splitlines())
import microtome
print(json.dumps([microtome.__file__, printed]))
"""


@pytest.mark.slow
def test_the_wheel_alone_runs_the_readme_with_the_newest_releases(wheel: Path) -> None:
    if shutil.disk_usage(tempfile.gettempdir()).free < 13e9:
        pytest.skip("the disk has no 13 GB for a second torch, which may be one with CUDA")
    with tempfile.TemporaryDirectory() as folder:  # pytest would keep it for three runs
        venv.create(folder, with_pip=True)
        python = Path(folder, "bin", "python")
        # Nothing of the environment around points into this repository, or bounds a release.
        outside = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
        outside["PIP_CONSTRAINT"] = os.devnull
        try:
            _run(python, *PIP, "install", wheel, env=outside, cwd=folder)
        except AssertionError as error:
            if "ResolutionImpossible" in str(error) or "No matching distribution" in str(error):
                raise
            pytest.skip("pip could not fetch or unpack the newest releases here")
        command = (python, "-I", "-W", "error::UserWarning", "-W", "error::RuntimeWarning", "-c", README_PROGRAM)
        out = _run(*command, input=json.dumps(BLOCKS), env=outside, cwd=folder)
    found, printed = json.loads(out)
    assert Path(found).is_relative_to(Path(folder).resolve())
    assert printed == [promised(block) for block in BLOCKS]


def _requirements(*, without: tuple[str, ...] = ()) -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = (wanted for name, wanted in project["optional-dependencies"].items() if name not in without)
    return [*project["dependencies"], *itertools.chain.from_iterable(extras)]


def test_pyproject_pins_nothing() -> None:
    assert [wanted for wanted in _requirements() if ">=" not in wanted or "==" in wanted] == []


def _pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def test_constraints_pin_every_requirement() -> None:
    pins = _pins()
    # What needs CUDA cannot be installed where these versions were recorded.
    assert {wanted.split(">=")[0] for wanted in _requirements(without=("cuda", "models"))} <= set(pins)
    assert [version for version in pins.values() if "+" in version or "@" in version] == []


def test_the_oldest_releases_that_are_promised_are_the_pinned_ones() -> None:
    promised = dict(wanted.split(",")[0].split(">=") for wanted in _requirements(without=("cuda",)))
    for name in ("torch", "jax", "torchax", "torch2jax"):
        assert f"{_pins()[name]}.".startswith(f"{promised[name]}."), name


def _loaded_after(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(*{{'jax', 'torch', 'torchax', 'torch2jax'}} & set(sys.modules))"
    return set(_run(sys.executable, "-c", code).split())


def test_a_release_that_moved_what_is_leant_on_is_refused_with_those_that_work() -> None:
    code = (
        "import sys, torch; sys.modules['torch._subclasses.functional_tensor'] = None\n"
        "try: import microtome.bridge\n"
        "except ImportError as error: print(error)"
    )
    assert "it works with torch 2.13 to 2.15: please install one of these." in _run(sys.executable, "-c", code)
    with pytest.raises(RuntimeError, match=r"it works with jax 0.10 to 0.12: please install one of these."):
        scan_counts({"length": 3})


def test_importing_microtome_loads_no_framework() -> None:
    assert _loaded_after("import microtome") == set()


def test_importing_jax_impl_loads_no_torch() -> None:
    assert _loaded_after("import microtome.jax_impl") <= {"jax"}


def test_the_tests_run_on_this_tree() -> None:
    assert Path(microtome.__file__).parent == ROOT
    under_a_second_name = {
        name
        for name, module in sys.modules.items()
        if not name.startswith(("microtome", "tests", "conftest"))
        and name != "__main__"
        and any((getattr(module, "__file__", None) or "").startswith(os.fspath(ROOT / part)) for part in PARTS)
    }
    assert under_a_second_name == set()
