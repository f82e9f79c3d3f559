"""torch's own database of operators: each with a few inputs for every dtype, and what eager torch gives for them."""

from __future__ import annotations

import dataclasses
import itertools
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import hypothesis
import numpy as np
import torch
import torch.autograd.forward_ad as fwad
import torch.utils._pytree as torch_pytree

SAMPLES = 3
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool),
        torch.complex64,
    )
}
# Modes that are tried beside the values and gradients of a dtype.
FURTHER = {"float64": ("second order", "forward mode"), "float32": ("vmap",)}
UNSET = ("empty", "new_empty")  # memory as it was found: compared in shape and dtype, as random draws are

Tensors = list[torch.Tensor]


def database() -> dict[str, Any]:
    """torch's operators. The import changes settings of hypothesis and torch, which are put back."""
    profile, frozen = hypothesis.settings.get_current_profile_name(), torch.backends.flags_frozen()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    hypothesis.settings.load_profile(profile)
    torch.backends.__allow_nonbracketed_mutation_flag = not frozen
    return {".".join(filter(None, (op.name, op.variant_test_name))): op for op in op_db}


def modes(op: Any, dtype: str) -> list[str]:
    """What is compared for an operator in a dtype."""
    if DTYPES[dtype] not in op.dtypes:
        return []
    able = {"second order": op.supports_gradgrad, "forward mode": op.supports_forward_ad, "vmap": True}
    differentiable = op.supports_autograd and DTYPES[dtype] in op.supported_backward_dtypes("cpu")
    return [dtype, *(m for m in FURTHER.get(dtype, ()) if able[m] and (differentiable or m == "vmap"))]


@dataclasses.dataclass
class Case:
    """One sample of an operator, as a function of its tensors."""

    fun: Callable[..., list[torch.Tensor]]
    tensors: Tensors

    @property
    def needed(self) -> list[int]:
        return [i for i, t in enumerate(self.tensors) if t.requires_grad]

    def with_tensors(self, tensors: Tensors) -> Case:
        return Case(self.fun, tensors)


def cases(op: Any, dtype: torch.dtype, seed: int = 0) -> Iterator[Case]:
    torch.manual_seed(seed), random.seed(seed), np.random.seed(seed)  # noqa: NPY002
    differentiable = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
    for sample in itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=differentiable), SAMPLES):
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
class Eager:
    """Results, the gradients for random cotangents, and these, by the number of their output."""

    outputs: Tensors
    gradients: Tensors
    cotangents: dict[int, torch.Tensor]

    @property
    def all(self) -> Tensors:
        return self.outputs + self.gradients


def _leaves(case: Case) -> Tensors:
    return [t.detach().clone().requires_grad_(t.requires_grad) for t in case.tensors]


def _drawn(tensors: Sequence[torch.Tensor], seed: int) -> Tensors:
    torch.random.default_generator.manual_seed(seed)
    return [torch.randn_like(t.detach()) for t in tensors]


def _gradients(outputs: Any, wanted: Any, cotangents: Any, **options: Any) -> Tensors:
    found = torch.autograd.grad(outputs, wanted, cotangents, allow_unused=True, **options)
    return [torch.zeros_like(t) if g is None else g for t, g in zip(wanted, found, strict=True)]


def eager(case: Case, seed: int = 0, gradients: bool = True, given: dict[int, torch.Tensor] | None = None) -> Eager:
    """What eager torch gives, with the gradients for ``given`` cotangents or random ones."""
    torch.random.default_generator.manual_seed(seed)
    leaves = _leaves(case)
    outputs = case.fun(*leaves)
    moving = [i for i, o in enumerate(outputs) if o.requires_grad and gradients]
    drawn = _drawn([outputs[i] for i in moving], seed) if given is None else list(given.values())
    cotangents = dict(zip(moving, drawn, strict=True))
    wanted = [t for t in leaves if t.requires_grad] if cotangents else []
    found = _gradients([outputs[i] for i in moving], wanted, list(cotangents.values())) if wanted else []
    return Eager([o.detach() for o in outputs], found, cotangents)


def eager_second(case: Case, cotangents: dict[int, torch.Tensor]) -> tuple[Tensors, Tensors]:
    """The derivative of the gradients with respect to inputs and cotangents, and the directions it was taken in."""
    torch.random.default_generator.manual_seed(0)
    leaves = _leaves(case)
    outputs = case.fun(*leaves)
    given = [c.clone().requires_grad_() for c in cotangents.values()]
    wanted = [t for t in leaves if t.requires_grad]
    first = _gradients([outputs[i] for i in cotangents], wanted, given, create_graph=True)
    directions = _drawn(first, 2)
    pairs = [(g, d) for g, d in zip(first, directions, strict=True) if g.requires_grad]
    if not pairs:
        return [torch.zeros_like(t) for t in [*wanted, *given]], directions
    return _gradients([g for g, _ in pairs], [*wanted, *given], [d for _, d in pairs]), directions


def eager_forward(case: Case) -> tuple[Tensors, Tensors]:
    """The tangents of all results for random tangents of the differentiable inputs, and these."""
    torch.random.default_generator.manual_seed(0)
    tangents = _drawn([case.tensors[i] for i in case.needed], 3)
    torch.random.default_generator.manual_seed(0)
    leaves = [t.detach() for t in case.tensors]
    with fwad.dual_level():
        for i, tangent in zip(case.needed, tangents, strict=True):
            leaves[i] = fwad.make_dual(leaves[i].clone(), tangent)
        pairs = [fwad.unpack_dual(o) for o in case.fun(*leaves)]
        moved = [torch.zeros_like(primal) if t is None else t.clone() for primal, t in pairs]
        inexact = [primal.is_floating_point() or primal.is_complex() for primal, _ in pairs]
    return [t for t, wanted in zip(moved, inexact, strict=True) if wanted], tangents


def attempt(make: Callable[[], Any]) -> Any:
    try:
        return make()
    except Exception:
        return None


def exact_results(case: Case, eager_one: Eager) -> Tensors:
    """The same in double precision, with the same cotangents."""
    given = {i: _double(c) for i, c in eager_one.cotangents.items()}
    return eager(case.with_tensors(list(map(_double, case.tensors))), given=given).all


def _double(tensor: torch.Tensor) -> torch.Tensor:
    wide = torch.complex128 if tensor.is_complex() else torch.float64 if tensor.is_floating_point() else tensor.dtype
    return tensor.detach().to(wide).requires_grad_(tensor.requires_grad)


def error_cases(op: Any) -> Iterator[Case]:
    """The database's own inputs for which eager torch raises, if there are any."""
    torch.manual_seed(0), random.seed(0), np.random.seed(0)  # noqa: NPY002
    if op.error_inputs_func is None:
        return
    for sample in attempt(lambda: [e.sample_input for e in op.error_inputs("cpu")]) or []:
        case = _case(op.op, sample)
        plain = all(t.layout == torch.strided and not t.is_meta for t in case.tensors)
        if plain and attempt(lambda case=case: eager(case, gradients=False)) is None:
            yield case
