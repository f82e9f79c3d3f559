"""A JAX function as the program that it is: every value that it computes, the masks that it draws, its precision."""

from __future__ import annotations

import dataclasses
import importlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias, TypeGuard, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn

from ...jax_impl.program import evaluate as programs
from ...jax_impl.program.dataflow import pruned
from ...jax_impl.program.evaluate import bind, called
from ...jax_impl.program.trees import PyTree
from ...jax_impl.program.versions import scan_counts

T = TypeVar("T")
See: TypeAlias = Callable[[JaxprEqn, list[jax.Array], list[jax.Array]], None]  # (equation, its inputs, its outputs)

_UNROLLED = 128  # steps up to which a scan is looked into
# Operations that move numbers, or make exact ones, and so never round.
_MOVES = frozenset(
    re.findall(
        r"\w+",
        """
    broadcast_in_dim concatenate copy copy_p copy_to_host device_put dynamic_slice dynamic_update_slice expand_dims
    gather iota name neg optimization_barrier pad reduce_precision reshape rev scatter select_n slice sort split
    squeeze stop_gradient transpose abs sign max min clamp reduce_max reduce_min
""",
    )
)


@dataclasses.dataclass(frozen=True)
class Mask:
    """A mask that a function draws: its values, and the probability of True."""

    values: np.ndarray
    probability: float | None


def program_of(fun: Callable[..., PyTree], inputs: Sequence[jax.Array]) -> tuple[ClosedJaxpr, jax.tree_util.PyTreeDef]:
    """Return the program of a function on these inputs, traced anew, and the structure of its results."""
    closed, shapes = jax.make_jaxpr(lambda *inputs: fun(*inputs), return_shape=True)(*inputs)
    return closed, jax.tree.structure(shapes)


def is_same(one: ClosedJaxpr, two: ClosedJaxpr) -> bool:
    """Tell whether two traces of a function gave the same program, constants included."""
    text = lambda closed: re.sub(r" at 0x[0-9a-f]+", "", str(closed.jaxpr))  # functions are printed with addresses
    bits = lambda closed: [np.asarray(c).tobytes() for c in closed.consts if not _is_key(c)]
    return text(one) == text(two) and bits(one) == bits(two)


def _is_key(value: object) -> bool:
    dtype: Any = getattr(value, "dtype", None)
    return bool(jnp.issubdtype(dtype, jax.dtypes.prng_key))


def compiled(fun: Callable[..., T]) -> Callable[..., T]:
    """Compile a function that runs a few times: to code slower than that of ``jax.jit``, in a fifth of the time."""
    return jax.jit(fun, compiler_options={"xla_backend_optimization_level": 0})


def interpret(closed: ClosedJaxpr, inputs: Sequence[jax.Array], see: See) -> list[jax.Array]:
    """Run a program one operation after another, and show each with its inputs and outputs.

    Operations whose results nothing uses are left out, as XLA does: they are not what the function computes.
    Looks into jitted functions, custom derivatives, checkpoints, and scans of up to 128 steps. Conditionals and other
    loops count as one operation.
    """

    def compute(equation: JaxprEqn, values: list[jax.Array]) -> list[jax.Array]:
        outputs = _run(equation, values, see)
        see(equation, values, outputs)
        return outputs

    used = pruned(closed)
    return programs.evaluate(used.jaxpr, used.consts, inputs, compute)


def _run(equation: JaxprEqn, values: list[jax.Array], see: See) -> list[jax.Array]:
    name, parameters = equation.primitive.name, equation.params
    if name == "scan" and parameters["length"] <= _UNROLLED:
        return _run_scan(parameters, values, see)
    inner = called(equation)
    if inner is not None and not _is_draw(equation):
        return interpret(inner, values, see)
    return bind(equation, values)


def _run_scan(parameters: dict[str, Any], values: list[jax.Array], see: See) -> list[jax.Array]:
    constants, carries = scan_counts(parameters)
    fixed, carry, slices = values[:constants], values[constants : constants + carries], values[constants + carries :]
    steps = range(parameters["length"])
    rows: list[tuple[int, list[jax.Array]]] = []
    for i in reversed(steps) if parameters["reverse"] else steps:
        outputs = interpret(parameters["jaxpr"], [*fixed, *carry, *(x[i] for x in slices)], see)
        carry = outputs[:carries]
        rows.append((i, outputs[carries:]))
    if not rows:
        return [*carry, *(jnp.zeros(v.shape, v.dtype) for v in parameters["jaxpr"].out_avals[carries:])]
    columns = zip(*(row for _, row in sorted(rows, key=lambda row: row[0])), strict=True)
    return [*carry, *(jnp.stack(column) for column in columns)]


def _is_draw(equation: JaxprEqn) -> bool:
    return str(equation.params.get("name", "")).strip("_") == "bernoulli"


def equations(closed: ClosedJaxpr) -> Iterator[JaxprEqn]:
    """Yield all operations of a program, those of its inner programs included, draws taken as one."""
    for equation in closed.jaxpr.eqns:
        yield equation
        inner = called(equation)
        inners = [inner] if inner is not None and not _is_draw(equation) else []
        if equation.primitive.name in ("scan", "cond", "while"):
            parts = ("jaxpr", "branches", "body_jaxpr", "cond_jaxpr")
            for part in parts:
                found = equation.params.get(part, ())
                inners += found if isinstance(found, (tuple, list)) else [found]
        for inner in inners:
            yield from equations(inner)


def probe(
    closed: ClosedJaxpr, inputs: Sequence[jax.Array], wanted: Callable[[jax.Array], bool] = lambda value: False
) -> tuple[list[jax.Array], list[Mask], list[jax.Array]]:
    """Run a program, compiled, and take out what it computes on the way.

    Args:
        closed: the program.
        inputs: what it is run on.
        wanted: which values to take.

    Returns:
        The results, the masks drawn by ``jax.random.bernoulli`` in their order, and the wanted values.
    """

    def whole(*inputs: jax.Array) -> tuple[list[jax.Array], list[tuple[jax.Array, jax.Array | float]], list[jax.Array]]:
        drawn: list[tuple[jax.Array, jax.Array | float]] = []
        taken: list[jax.Array] = []

        def see(equation: JaxprEqn, values: list[jax.Array], outputs: list[jax.Array]) -> None:
            taken.extend(filter(wanted, outputs))
            if _is_draw(equation):
                floats = [v for v in values if jnp.issubdtype(jnp.result_type(v), np.floating)]
                drawn.append((outputs[0], jnp.ravel(floats[0])[0] if floats else jnp.nan))

        return interpret(closed, inputs, see), drawn, taken

    results, drawn, taken = compiled(whole)(*inputs)
    masks = [Mask(np.asarray(m), None if np.isnan(p) else float(p)) for m, p in drawn]
    return results, masks, taken


def unseen(closed: ClosedJaxpr) -> list[str]:
    """Return the loops and conditionals that :func:`interpret` takes as one operation, each with its line."""
    found = []
    for equation in equations(closed):
        name = equation.primitive.name
        if name in ("while", "cond") or (name == "scan" and equation.params["length"] > _UNROLLED):
            found.append(f"{name} ({_line(equation)})")
    return list(dict.fromkeys(found))


def coarse_operations(closed: ClosedJaxpr) -> dict[str, str]:
    """Return the dtypes coarser than float64 in which a program computes, each with its first operation's line."""
    found: dict[str, str] = {}
    for equation in equations(closed):
        if equation.primitive.name in _MOVES or _is_draw(equation) or called(equation) is not None:
            continue
        wide = any(_is_float(atom.aval, 8) for atom in equation.invars)
        for variable in equation.outvars:
            if not _is_float(variable.aval, 1) or _is_float(variable.aval, 8):
                continue
            if equation.primitive.name == "convert_element_type" and not wide:
                continue  # from whole numbers, or from a coarser dtype
            found.setdefault(str(variable.aval.dtype), _line(equation))
    return found


def _is_float(aval: object, least: int) -> TypeGuard[jax.core.ShapedArray]:
    dtype = getattr(aval, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.inexact):
        return False
    return dtype.itemsize // (2 if jnp.issubdtype(dtype, jnp.complexfloating) else 1) >= least


def _line(equation: JaxprEqn) -> str:
    """Return the user's line, as ``file.py:12``."""
    try:
        source_info_util: Any = importlib.import_module("jax._src.source_info_util")
        frame = source_info_util.user_frame(equation.source_info.traceback)
        return f"{frame.file_name}:{frame.start_line}"
    except Exception:  # private, and only a help to the reader
        return "unknown line"
