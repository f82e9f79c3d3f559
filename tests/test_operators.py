"""Every operator of torch's own database through ``as_jax``: right, or refused before it gives a number.

``torch.testing._internal`` lists torch's operators with inputs for each. The first three of these run in eager torch
and as one compiled program; results, their dtypes and shapes, and the gradients for one random cotangent are compared.
``operators_refused.toml`` names the operators that are refused, with the reason. That list may only become shorter.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import re
import tomllib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import hypothesis
import jax
import numpy as np
import pytest
import torch
import torch.utils._pytree as torch_pytree

from microtome.bridge import as_jax
from microtome.bridge.errors import TraceError
from microtome.bridge.values import array_to_tensor, tensor_to_array
from microtome.bridge.versions import enable_x64

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

REFUSED: dict[str, str] = tomllib.loads(Path(__file__).with_name("operators_refused.toml").read_text())
SAMPLES = 3
UNSET = ("empty", "new_empty")  # memory as it was found: compared in shape and dtype, as random draws are

Tensors = list[torch.Tensor]


def _database() -> dict[str, Any]:
    """torch's operators in float32. The import changes settings of hypothesis and torch, which are put back."""
    profile, frozen = hypothesis.settings.get_current_profile_name(), torch.backends.flags_frozen()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    hypothesis.settings.load_profile(profile)
    torch.backends.__allow_nonbracketed_mutation_flag = not frozen
    named = {".".join(filter(None, (op.name, op.variant_test_name))): op for op in op_db}
    return {name: op for name, op in named.items() if torch.float32 in op.dtypes}


OPERATORS = _database()


@dataclasses.dataclass
class Case:
    """One sample of an operator, as a function of its tensors."""

    fun: Callable[..., list[torch.Tensor]]
    tensors: Tensors


def _cases(op: Any) -> Iterator[Case]:
    torch.manual_seed(0), random.seed(0), np.random.seed(0)  # noqa: NPY002
    samples = op.sample_inputs("cpu", torch.float32, requires_grad=op.supports_autograd)
    for sample in itertools.islice(samples, SAMPLES):
        yield _case(op.op, sample)


def _case(op: Callable[..., Any], sample: Any) -> Case:
    """Free choices of the operator, such as signs of eigenvectors, are taken out as torch's own tests do."""
    leaves, spec = torch_pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
    where = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    tensors, settle = [leaves[i] for i in where], sample.output_process_fn_grad
    for i in where:
        leaves[i] = None

    def fun(*tensors: torch.Tensor) -> list[torch.Tensor]:
        full = list(leaves)
        for i, tensor in zip(where, tensors, strict=True):
            full[i] = tensor.clone()  # some operators write to their argument
        first, args, kwargs = torch_pytree.tree_unflatten(full, spec)
        with mock.patch.object(torch, "manual_seed"):  # operators that draw set a seed of their own
            found = torch_pytree.tree_leaves(settle(op(first, *args, **kwargs)))
        return [torch.as_tensor(leaf) for leaf in found if leaf is not None]

    return Case(fun, tensors)


@dataclasses.dataclass
class Results:
    outputs: Tensors
    gradients: Tensors


def _eager(case: Case, seed: int) -> tuple[Results, dict[int, torch.Tensor]]:
    """What torch gives, and the cotangents that it was given, by the number of their output."""
    torch.random.default_generator.manual_seed(seed)
    leaves = [t.detach().clone().requires_grad_(t.requires_grad) for t in case.tensors]
    outputs = case.fun(*leaves)
    torch.random.default_generator.manual_seed(seed)
    cotangents = {i: torch.randn_like(o.detach()) for i, o in enumerate(outputs) if o.requires_grad}
    wanted = [t for t in leaves if t.requires_grad] if cotangents else []
    gradients: list[Any] = []
    if wanted:
        heads = [outputs[i] for i in cotangents]
        gradients += torch.autograd.grad(heads, wanted, list(cotangents.values()), allow_unused=True)
    gradients = [torch.zeros_like(t) if g is None else g for t, g in zip(wanted, gradients, strict=True)]
    return Results([o.detach() for o in outputs], gradients), cotangents


@dataclasses.dataclass
class Trial:
    """A case, what eager torch gives for it, and the traced operator as a program to outputs and gradients."""

    case: Case
    expected: Results
    program: Any
    arrays: Any


def _trial(case: Case, expected: Results, cotangents: dict[int, torch.Tensor]) -> Trial:
    traced = as_jax(case.fun)
    needed = [i for i, t in enumerate(case.tensors) if t.requires_grad] if cotangents else []

    def program(arrays: list[jax.Array], cotangents: dict[int, jax.Array]) -> Any:
        def differentiated(given: list[jax.Array]) -> Any:
            full = list(arrays)
            for i, array in zip(needed, given, strict=True):
                full[i] = array
            outputs = traced(*full, key=jax.random.key(0))
            return [outputs[i] for i in cotangents], outputs

        _, pull, outputs = jax.vjp(differentiated, [arrays[i] for i in needed], has_aux=True)
        (gradients,) = pull([c.conj() for c in cotangents.values()])
        return outputs, [g.conj() for g in gradients]

    arrays = [tensor_to_array(t.detach()) for t in case.tensors]
    return Trial(case, expected, jax.jit(program), (arrays, {i: tensor_to_array(c) for i, c in cotangents.items()}))


def _run(trials: list[Trial]) -> list[Results]:
    """All programs as one, which compiles faster, and without optimisations that cost more than they save here."""

    def everything(arguments: list[Any]) -> Any:
        return [t.program(*arrays) for t, arrays in zip(trials, arguments, strict=True)]

    with enable_x64():
        quickly = jax.jit(everything, compiler_options={"xla_backend_optimization_level": 0})
        found = quickly([t.arrays for t in trials])
    return [Results(*([array_to_tensor(a) for a in arrays] for arrays in result)) for result in found]


def _difference(got: Tensors, expected: Tensors, values: bool = True) -> str:
    """How tensors differ, in words; empty if they agree."""
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return f"{i}: {a.dtype} {tuple(a.shape)} instead of {b.dtype} {tuple(b.shape)}"
        try:
            if values:
                torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5 * max(1.0, _size(b)), equal_nan=True)
        except AssertionError as error:
            return f"{i}: {error}"
    return ""


def _size(tensor: torch.Tensor) -> float:
    wide = tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
    return wide.abs().nan_to_num(0, 0, 0).max().item() if tensor.numel() else 0.0


def _errors(results: Results, exact: Results) -> list[float]:
    """The largest error of each tensor, relative to the size of the exact one where that is above 1."""
    pairs = zip(results.outputs + results.gradients, exact.outputs + exact.gradients, strict=True)
    return [
        _size(a.to(b.dtype) - b) / max(1.0, _size(b)) if torch.equal(a.isfinite(), b.isfinite()) else math.inf
        for a, b in pairs
    ]


def _wrong(name: str, trial: Trial, got: Results) -> str:
    """How results differ from eager torch's, in words; empty if they are right.

    What differs by the seed there has to agree in shape and dtype. Where eager torch is itself far from what it gives
    in double precision, as far is right.
    """
    case, eager = trial.case, trial.expected
    again, _ = _eager(case, seed=1)
    values = not name.startswith(UNSET) and not _difference(again.outputs, eager.outputs)
    pairs = got.outputs + got.gradients, eager.outputs + eager.gradients
    wrong = _difference(*pairs, values)
    if not wrong or _difference(*pairs, values=False):
        return wrong
    try:
        exact, _ = _eager(Case(case.fun, [_double(t) for t in case.tensors]), seed=0)
    except RuntimeError:
        return wrong
    errors = zip(_errors(got, exact), _errors(eager, exact), strict=True)
    return "" if all(mine <= 4 * theirs + 1e-5 for mine, theirs in errors) else wrong


def _double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().double().requires_grad_(tensor.requires_grad) if tensor.is_floating_point() else tensor


NAMED = "could not be expressed in JAX|only dense tensors|no counterpart of"


def _refusal(error: Exception) -> Exception:
    """An error that names the operator or the rule; any other is a fault."""
    if isinstance(error, TraceError) or re.search(NAMED, str(error)):
        return error
    raise error


def _attempt(make: Callable[[], Any], refusals: list[Exception]) -> Any:
    try:
        return make()
    except (TypeError, ValueError) as error:
        refusals.append(_refusal(error))
    return None


@pytest.mark.parametrize("name", OPERATORS)
def test_operator(name: str) -> None:
    trials: list[Trial] = []
    refusals: list[Exception] = []
    failure: Exception | None = None
    for case in _cases(OPERATORS[name]):
        try:
            eager = _eager(case, seed=0)
        except (AssertionError, RuntimeError) as error:
            failure = error
            continue
        trial = _attempt(lambda case=case, eager=eager: _trial(case, *eager), refusals)
        trials += [] if trial is None else [trial]
    if not trials and not refusals:
        pytest.skip(f"eager torch fails: {failure}")
    for trial, got in _results(trials, refusals):
        assert _wrong(name, trial, got) == ""
    if name in REFUSED:
        assert refusals, f"{name} works now: take it off the list"
    elif refusals:
        raise refusals[0]


def _results(trials: list[Trial], refusals: list[Exception]) -> Iterator[tuple[Trial, Results]]:
    """Together if all can run, else one by one."""
    refused: list[Exception] = []
    together = _attempt(lambda: _run(trials), refused)
    if together is not None:
        yield from zip(trials, together, strict=True)
    elif len(trials) == 1:
        refusals += refused
    else:
        for trial in trials:
            yield from _results([trial], refusals)


def test_the_list_names_operators() -> None:
    assert set(REFUSED) <= set(OPERATORS)
    assert len(REFUSED) <= 32, "the list may only become shorter"
