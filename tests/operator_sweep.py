"""Every operator of torch's own database in ours, against eager torch: what ``test_operators.py`` asks of each.

The samples of an operator run as one compiled program, in up to eleven modes: each dtype has its values and first-order
gradients, float64 the second order and the forward mode as well, and float32 is also mapped, two rows at once,
gradients included.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from operator_samples import (
    DTYPES,
    UNSET,
    Case,
    Eager,
    Tensors,
    attempt,
    cases,
    eager,
    eager_forward,
    eager_second,
    exact_results,
    modes,
)

from microtome.bridge import as_jax
from microtome.bridge.base.errors import TraceError
from microtome.bridge.base.versions import enable_x64
from microtome.bridge.memory.values import array_to_tensor, tensor_to_array


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
    others = list(attempt(lambda: list(cases(op, DTYPES[dtype], seed=1))) or []) if "vmap" in wanted else []
    for number, case in enumerate(cases(op, DTYPES[dtype])):
        expected = attempt(lambda case=case: eager(case)) or attempt(lambda case=case: eager(case, gradients=False))
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
            dtype,
            case,
            expected.all,
            program,
            (arrays, cotangents),
            not random_draws,
            functools.partial(exact_results, case, expected),
        )
        if random_draws:
            continue
        if "second order" in wanted and needed:
            yield from _second(case, expected, program, arrays)
        if "forward mode" in wanted and case.needed:
            yield from _forward(case, traced, arrays)
        if "vmap" in wanted:
            yield from _mapped(case, number, others, program, expected)


def _second(case: Case, expected: Eager, program: Any, arrays: Any) -> Iterator[Trial]:
    found = attempt(lambda: eager_second(case, expected.cotangents))
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
    found = attempt(lambda: eager_forward(case))
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
    row = attempt(lambda: eager(case.with_tensors(tensors), seed=1, gradients=bool(expected.cotangents)))
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
        pairs = zip(exact_results(case, expected), exact_results(case.with_tensors(tensors), row), strict=True)
        return list(map(torch.stack, pairs))

    yield Trial("vmap", case, both, mapped, (stacked, given), exact=exact)


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


NAMED = "could not be expressed in JAX|only dense tensors|no counterpart of|is not implemented"


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
    exact = attempt(trial.exact)
    if exact is None or len(exact) != len(got):
        return found
    far = zip(got, trial.expected, exact, strict=True)
    return "" if all(_as_near(*three) for three in far) else found


def _as_near(mine: torch.Tensor, theirs: torch.Tensor, exact: torch.Tensor) -> bool:
    """Whether a tensor is as near to the exact one as eager torch's is, within a factor of four and rounding.

    Where a step of eager torch's overflows and the exact result does not, a number is right too.
    """
    if not (mine.is_floating_point() or mine.is_complex()):
        return torch.equal(mine, theirs)
    odd = ~theirs.isfinite()
    left_out = odd & ~(mine.isfinite() & exact.isfinite())
    if not mine[~odd].isfinite().all() or not torch.equal(mine[left_out].nan_to_num(), theirs[left_out].nan_to_num()):
        return False
    own = _size((mine.to(exact.dtype) - exact).masked_fill(left_out, 0))
    eager_torch = _size((theirs.to(exact.dtype) - exact).masked_fill(odd, 0))
    return own <= 4 * eager_torch + 4 * torch.finfo(mine.dtype).eps * max(1.0, _size(exact))
