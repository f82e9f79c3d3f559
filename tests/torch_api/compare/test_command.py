"""``python -m microtome.torch_api.compare``: exit status, table and JSON."""

from __future__ import annotations

import importlib
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from microtome import torch_api as mt
from microtome.torch_api.compare.__main__ import main

PROJECT = """
import jax.numpy as jnp, torch
torch.manual_seed(0)
model = torch.nn.Linear(3, 2)
power = lambda x, y: x ** 2 * y
port = lambda x, y: x ** 2 * y
wrong = lambda x, y: x ** 2.01 * y
def linear(params, x):
    return x @ params["kernel"] + params["bias"]
def params():
    return {"kernel": jnp.asarray(model.weight.detach().T.numpy()), "bias": jnp.asarray(model.bias.detach().numpy())}
mapping = {"kernel": mt_source, "bias": "bias"}
"""


@pytest.fixture
def project(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    source = "from microtome.torch_api import Source\nmt_source = Source('weight', permute=(1, 0))\n" + PROJECT
    (tmp_path / "their_project.py").write_text(source)
    np.savez(tmp_path / "inputs.npz", y=np.float32([3, 4]), x=np.float32([1, 2]))
    np.savez(tmp_path / "rows.npz", np.ones((4, 3), np.float32))
    np.save(tmp_path / "one.npy", np.ones(2, np.float32))
    (tmp_path / "cut.npz").write_bytes((tmp_path / "rows.npz").read_bytes()[:60])
    (tmp_path / "broken_project.py").write_text("raise RuntimeError('no licence')")
    (tmp_path / "misspelt_project.py").write_text("def power(x) return x")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "their_project", raising=False)
    return tmp_path


def test_agreement_and_difference(project: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["their_project:power", "their_project:port", "--inputs", "inputs.npz"]) == 0
    assert "torch and JAX agree" in capsys.readouterr().out
    assert main(["their_project:power", "their_project:wrong", "--inputs", "inputs.npz", "--json", "report.json"]) == 1
    assert "different" in capsys.readouterr().out
    content = json.loads((project / "report.json").read_text())
    assert content["agrees"] is False
    assert {row["verdict"] for row in content["rows"]} >= {"different"}
    output = next(row for row in content["rows"] if row["leaf"] == "output")
    assert output["torch_value"] == 16  # x and y went in by name, though the file has y first


def test_parameters_and_a_mapping(project: pathlib.Path) -> None:
    names = ["their_project:model", "their_project:linear", "--inputs", "rows.npz", "--params", "their_project:params"]
    options = ["--mapping", "their_project:mapping", "--batch-argnums", "0", "--locate"]
    assert main([*names, *options]) == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["their_project", "their_project:port", "--inputs", "inputs.npz"],
        ["their_project:power", "their_project:nothing", "--inputs", "inputs.npz"],
        ["no_such_project:power", "--inputs", "inputs.npz"],
        ["broken_project:power", "--inputs", "inputs.npz"],
        ["misspelt_project:power", "--inputs", "inputs.npz"],
        ["their_project:power", "their_project:port", "--inputs", "none.npz"],
        ["their_project:power", "their_project:port", "--inputs", "their_project.py"],
        ["their_project:power", "their_project:port", "--inputs", "cut.npz"],
        ["their_project:power", "their_project:port", "--inputs", "one.npy"],
        ["their_project:power", "their_project:port", "--inputs", "inputs.npz", "--json", "no/such/folder.json"],
        ["their_project:model", "their_project:linear", "--inputs", "rows.npz", "--params", "their_project:absent"],
        ["their_project:power", "their_project:port", "--inputs", "inputs.npz", "--batch-argnums", "7"],
    ],
)
def test_a_wrong_command_line(project: pathlib.Path, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert ": error: " in capsys.readouterr().err


@pytest.mark.slow
def test_as_a_process(project: pathlib.Path) -> None:
    command = [sys.executable, "-W", "error", "-m", "microtome.torch_api.compare"]
    command += ["their_project:power", "their_project:wrong", "--inputs", "inputs.npz", "--no-gradients"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
    assert result.returncode == 1, result.stderr
    assert result.stdout.startswith("torch and JAX disagree in 1 of 1 leaves.")


def test_the_function_stays_when_the_module_is_imported() -> None:
    importlib.import_module("microtome.torch_api.compare")
    assert callable(mt.compare)
    assert mt.compare.__name__ == "compare"
