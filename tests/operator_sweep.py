"""Every operator of torch's own database in eager torch and in ours: what ``test_operators.py`` compares.

``torch.testing._internal`` lists torch's operators with inputs for each, for every dtype. The first three of these run
in eager torch and as one compiled program, in up to eleven modes: each dtype has its values and first-order gradients,
float64 the second order and the forward mode as well, and float32 is also mapped, two rows at once, gradients included.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.autograd.forward_ad as fwad
import torch.utils._pytree as torch_pytree

from microtome.bridge import as_jax
from microtome.bridge.errors import TraceError
from microtome.bridge.values import array_to_tensor, tensor_to_array
from microtome.bridge.versions import enable_x64

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


# In eager torch.


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


def eager(case: Case, seed: int = 0, gradients: bool = True) -> Eager:
    torch.random.default_generator.manual_seed(seed)
    leaves = _leaves(case)
    outputs = case.fun(*leaves)
    moving = [i for i, o in enumerate(outputs) if o.requires_grad and gradients]
    cotangents = dict(zip(moving, _drawn([outputs[i] for i in moving], seed), strict=True))
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


# In ours.


@dataclasses.dataclass
class Trial:
    """What a mode of a case gives in eager torch, and as a function of arrays."""

    mode: str
    case: Case
    expected: Tensors
    program: Callable[..., Any]
    arrays: Any
    checked: bool = True  # else only shapes and dtypes are compared
    exact: Callable[[], Tensors] | None = None


def _apply(traced: Any, arrays: Any, where: Sequence[int], given: Any) -> Any:
    full = list(arrays)
    for i, array in zip(where, given, strict=True):
        full[i] = array
    return traced(*full, key=jax.random.key(0))


def _program(traced: Any, needed: list[int]) -> Callable[..., Any]:
    """(arrays, cotangents) -> results and gradients. JAX's complex gradients are the conjugates of torch's."""

    def program(arrays: list[jax.Array], cotangents: dict[int, jax.Array]) -> Any:
        if not cotangents:
            return traced(*arrays, key=jax.random.key(0)), []

        def differentiated(given: list[jax.Array]) -> Any:
            outputs = _apply(traced, arrays, needed, given)
            return [outputs[i] for i in cotangents], outputs

        _, pull, outputs = jax.vjp(differentiated, [arrays[i] for i in needed], has_aux=True)
        (gradients,) = pull([c.conj() for c in cotangents.values()])
        return outputs, [g.conj() for g in gradients]

    return program


def _raising(error: Exception) -> Callable[..., Any]:
    def program() -> Any:
        raise error

    return program


def _array(tensor: torch.Tensor) -> jax.Array:
    return tensor_to_array(tensor.detach())


def trials(name: str, op: Any, dtype: str) -> Iterator[Trial]:
    """What is compared for an operator in a dtype; what eager torch cannot compute is left out."""
    wanted = modes(op, dtype)
    if not wanted:
        return
    others = list(_tried(lambda: list(cases(op, DTYPES[dtype], seed=1))) or []) if "vmap" in wanted else []
    for number, case in enumerate(cases(op, DTYPES[dtype])):
        expected = _tried(lambda case=case: eager(case)) or _tried(lambda case=case: eager(case, gradients=False))
        if expected is None:
            continue
        again = eager(case, seed=1, gradients=False)
        random_draws = name.startswith(UNSET) or difference(again.outputs, expected.outputs) != ""
        traced = as_jax(case.fun)
        needed = case.needed if expected.cotangents else []
        program = _program(traced, needed)
        try:
            with enable_x64():
                arrays = list(map(_array, case.tensors))
                cotangents = {i: _array(c) for i, c in expected.cotangents.items()}
        except TypeError as error:  # a dtype that JAX does not have
            yield Trial(dtype, case, [], _raising(error), ())
            continue
        yield Trial(
            dtype, case, expected.all, program, (arrays, cotangents), not random_draws, lambda case=case: _exact(case)
        )
        if random_draws:
            continue
        if "second order" in wanted and needed:
            yield from _second(case, expected, program, arrays)
        if "forward mode" in wanted and case.needed:
            yield from _forward(case, traced, arrays)
        if "vmap" in wanted:
            yield from _mapped(case, number, others, program, expected)


def _tried(make: Callable[[], Any]) -> Any:
    try:
        return make()
    except Exception:
        return None


def _exact(case: Case, seed: int = 0) -> Tensors:
    return eager(case.with_tensors(list(map(_double, case.tensors))), seed).all


def _double(tensor: torch.Tensor) -> torch.Tensor:
    wide = torch.complex128 if tensor.is_complex() else torch.float64 if tensor.is_floating_point() else tensor.dtype
    return tensor.detach().to(wide).requires_grad_(tensor.requires_grad)


def _second(case: Case, expected: Eager, program: Any, arrays: Any) -> Iterator[Trial]:
    found = _tried(lambda: eager_second(case, expected.cotangents))
    if found is None:
        return
    result, directions = found

    def second(arrays: Any, cotangents: Any, directions: Any) -> Any:
        def gradients(given: Any, cotangents: Any) -> Any:
            full = list(arrays)
            for i, array in zip(case.needed, given, strict=True):
                full[i] = array
            return program(full, cotangents)[1]

        _, pull = jax.vjp(gradients, [arrays[i] for i in case.needed], cotangents)
        moved, turned = pull([d.conj() for d in directions])
        return [x.conj() for x in [*moved, *turned.values()]]

    with enable_x64():
        given = {i: _array(c) for i, c in expected.cotangents.items()}
        yield Trial("second order", case, result, second, (arrays, given, list(map(_array, directions))))


def _forward(case: Case, traced: Any, arrays: Any) -> Iterator[Trial]:
    found = _tried(lambda: eager_forward(case))
    if found is None:
        return
    result, tangents = found

    def forward(arrays: Any, tangents: Any) -> Any:
        given = [arrays[i] for i in case.needed]
        outputs, moved = jax.jvp(lambda *given: _apply(traced, arrays, case.needed, given), given, tangents)
        return [t for t, o in zip(moved, outputs, strict=True) if jnp.issubdtype(o.dtype, jnp.inexact)]

    with enable_x64():
        yield Trial("forward mode", case, result, forward, (arrays, list(map(_array, tangents))))


def _mapped(case: Case, number: int, others: list[Case], program: Any, expected: Eager) -> Iterator[Trial]:
    """Two rows: this sample and the same one drawn with another seed. Every second case maps its first tensor only."""
    if not case.tensors:
        return
    shapes = [t.shape for t in case.tensors]
    other = others[number] if number < len(others) and [t.shape for t in others[number].tensors] == shapes else case
    only_first = number % 2 == 1 and case.tensors[0].requires_grad
    tensors = [
        b if i == 0 or not only_first else a for i, (a, b) in enumerate(zip(case.tensors, other.tensors, strict=True))
    ]
    row = _tried(lambda: eager(case.with_tensors(tensors), seed=1, gradients=bool(expected.cotangents)))
    if row is None or [o.shape for o in row.all] != [o.shape for o in expected.all]:
        return
    both = [torch.stack(pair) for pair in zip(expected.all, row.all, strict=True)]
    with enable_x64():
        stacked = [
            _array(a if only_first and i else torch.stack([a, b]))
            for i, (a, b) in enumerate(zip(case.tensors, tensors, strict=True))
        ]
        given = {i: _array(torch.stack([c, row.cotangents[i]])) for i, c in expected.cotangents.items()}
    axes: Any = [None if only_first and i else 0 for i in range(len(stacked))]

    def mapped(arrays: Any, cotangents: Any) -> Any:
        return jax.vmap(program, (axes, 0))(arrays, cotangents)

    def exact() -> Tensors:
        pairs = zip(_exact(case), _exact(case.with_tensors(tensors), seed=1), strict=True)
        return list(map(torch.stack, pairs))

    yield Trial("vmap", case, both, mapped, (stacked, given), exact=exact)


def error_cases(op: Any) -> Iterator[Case]:
    """The database's own inputs for which eager torch raises, if there are any."""
    torch.manual_seed(0), random.seed(0), np.random.seed(0)  # noqa: NPY002
    if op.error_inputs_func is None:
        return
    for sample in _tried(lambda: [e.sample_input for e in op.error_inputs("cpu")]) or []:
        case = _case(op.op, sample)
        plain = all(t.layout == torch.strided and not t.is_meta for t in case.tensors)
        if plain and _tried(lambda case=case: eager(case, gradients=False)) is None:
            yield case


def raises(case: Case) -> bool:
    """Whether ours refuses it as well, by whatever error."""
    try:
        with enable_x64():
            jax.block_until_ready(as_jax(case.fun)(*map(_array, case.tensors), key=jax.random.key(0)))
            jax.effects_barrier()  # where checks of values raise
    except Exception:
        return True
    return False


def run(tried: list[Trial]) -> list[Tensors]:
    """All programs as one, which compiles faster, and without optimisations that cost more than they save here."""

    def everything(arguments: list[Any]) -> Any:
        return [t.program(*arrays) for t, arrays in zip(tried, arguments, strict=True)]

    with enable_x64():
        quickly = jax.jit(everything, compiler_options={"xla_backend_optimization_level": 0})
        found = quickly([t.arrays for t in tried])
        return [[array_to_tensor(a) for a in jax.tree.leaves(result)] for result in found]


NAMED = "could not be expressed in JAX|only dense tensors|no counterpart of"


def results(tried: list[Trial], refusals: dict[str, list[str]]) -> Iterator[tuple[Trial, Tensors]]:
    """Together if all can run, else one by one; what is refused is noted by its mode."""
    if not tried:
        return
    try:
        yield from zip(tried, run(tried), strict=True)
    except Exception as error:
        if len(tried) > 1:
            for trial in tried:
                yield from results([trial], refusals)
        else:
            refusals.setdefault(tried[0].mode, []).append(f"{type(error).__name__}: {error}")


def is_named(error: str) -> bool:
    """Whether an error names the operator or the rule; any other is a fault."""
    return error.startswith(TraceError.__name__) or re.search(NAMED, error) is not None


# Comparison.

_RTOL = {
    torch.float64: 1e-7,
    torch.complex128: 1e-7,
    torch.float32: 1e-4,
    torch.complex64: 1e-4,
    torch.float16: 4e-3,
    torch.bfloat16: 3e-2,
}


def difference(got: Tensors, expected: Tensors, values: bool = True) -> str:
    """How tensors differ, in words; empty if they agree."""
    if len(got) != len(expected):
        return f"{len(got)} results instead of {len(expected)}"
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return f"{i}: {a.dtype} {tuple(a.shape)} instead of {b.dtype} {tuple(b.shape)}"
        if not values:
            continue
        rtol = _RTOL.get(b.dtype, 0.0)
        atol = rtol / 10 * max(1.0, _size(b))
        try:
            torch.testing.assert_close(a, b, rtol=rtol, atol=atol, equal_nan=True)
        except AssertionError as error:
            return f"{i}: {error}"
    return ""


def _size(tensor: torch.Tensor) -> float:
    wide = tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
    return wide.abs().nan_to_num(0, 0, 0).max().item() if tensor.numel() else 0.0


def wrong(trial: Trial, got: Tensors) -> str:
    """How results differ from eager torch's, in words; empty if they are right.

    Where eager torch is itself far from what it gives in double precision, as far is right.
    """
    found = difference(got, trial.expected, trial.checked)
    if not found and not trial.checked:
        return "drawn or unset: only dtypes and shapes are compared"
    if not found or trial.exact is None or difference(got, trial.expected, values=False):
        return found
    exact = _tried(trial.exact)
    if exact is None or len(exact) != len(got):
        return found
    far = zip(got, trial.expected, exact, strict=True)
    return "" if all(_as_near(*three) for three in far) else found


def _as_near(mine: torch.Tensor, theirs: torch.Tensor, exact: torch.Tensor) -> bool:
    """Whether a tensor is as near to the exact one as eager torch's is, within a factor of four and rounding."""
    if not (mine.is_floating_point() or mine.is_complex()):
        return torch.equal(mine, theirs)
    if not torch.equal(mine.isfinite(), theirs.isfinite()):
        return False
    odd = ~mine.isfinite()
    if not torch.equal(mine[odd].nan_to_num(), theirs[odd].nan_to_num()):
        return False
    errors = [(t.to(exact.dtype) - exact).masked_fill(odd, 0) for t in (mine, theirs)]
    rounding = 4 * torch.finfo(mine.dtype).eps * max(1.0, _size(exact))
    return _size(errors[0]) <= 4 * _size(errors[1]) + rounding
