"""Programs that return what failed in them, and calls that raise for it.

A callback to Python would keep a program out of JAX's persistent cache, and run in a thread of XLA's. So before a
program is lowered, its checks are written as values: each gives a report of three whole numbers, which loops carry and
branches return, and the first report of a failure is an output. Derivatives have been taken by then.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.interpreters.partial_eval import dce_jaxpr

from ...jax_impl.program.evaluate import CALLS, bind, evaluate, inner_programs
from ...jax_impl.program.trees import PyTree
from ...jax_impl.program.versions import scan_counts
from ..derive.context import Call
from ..derive.primitives import Arrays
from ..lowerings.checks import Condition, check_p, first_failure, raised
from ..memory.values import jax_device

# The number of a check, counted from 1, or 0 if none failed; the place and the value of the first wrong element.
Finding = jax.Array
Outputs = tuple[list[jax.Array], list[Finding]]
Carry = tuple[list[jax.Array], Finding]  # what a loop carries, or a branch returns

_CALLS = CALLS | {"custom_vmap_call": "call"}


class Checked:
    """A compiled program. A call raises for the first of its checks that failed."""

    def __init__(self, traced: jax.stages.Traced, call: Call, arguments: Sequence[PyTree]) -> None:
        """Compile a program; ``arguments`` are the shapes that ``traced`` was traced with."""
        writer = _Writer(call)
        self._reports = jax_device(call.device).platform == "cpu" and writer.asks(traced.jaxpr.jaxpr)
        if self._reports:
            traced = jax.jit(writer.program(traced)).trace(*arguments)
        self._checks = writer.checks
        self.compiled = traced.lower().compile()
        call.traces.clear()

    def __call__(self, *args: PyTree) -> PyTree:
        """Return the program's outputs."""
        if not self._reports:
            return self.compiled(*args)
        outputs, report = self.compiled(*args)
        number, place, value = np.asarray(report).tolist()
        if number:
            condition, line, is_single = self._checks[number - 1]
            raise raised(condition, line, value, None if is_single else place)
        return outputs

    def memory_analysis(self) -> Any:
        """Return XLA's figures of the memory that the program takes."""
        return self.compiled.memory_analysis()


class _Writer:
    """An evaluator of a jaxpr, its checks as reports. What asks for nothing is left as it is."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.checks: list[tuple[Condition, str, bool]] = []
        self._asks: dict[Jaxpr, bool] = {}

    def program(self, traced: jax.stages.Traced) -> Callable[..., tuple[PyTree, Finding]]:
        """Return the traced function with a report beside its outputs."""
        structure, closed = jax.tree.structure(traced.out_info), traced.jaxpr

        def program(*args: PyTree) -> tuple[PyTree, Finding]:
            jaxpr, _ = dce_jaxpr(closed.jaxpr, [True] * len(closed.out_avals), instantiate=True)
            outputs, reports = self.run(jaxpr, closed.consts, jax.tree.leaves(args))
            return jax.tree.unflatten(structure, outputs), _first(reports)

        program.__name__ = traced.fun_name
        return program

    def asks(self, jaxpr: Jaxpr) -> bool:
        """Tell whether there is a check in a jaxpr, or in one within it."""
        if jaxpr not in self._asks:
            self._asks[jaxpr] = any(map(self._has_check, jaxpr.eqns))
        return self._asks[jaxpr]

    def _has_check(self, equation: JaxprEqn) -> bool:
        if equation.primitive is check_p:
            return True
        called = self._called(equation)
        return any(self.asks(jaxpr) for jaxpr in ([called.jaxpr] if called is not None else inner_programs(equation)))

    def _called(self, equation: JaxprEqn) -> ClosedJaxpr | None:
        """Return what a recorded torch function computes: traced here, and lowered from that trace."""
        if "program" not in equation.params:
            return None
        program, avals = equation.params["program"], tuple(v.aval for v in equation.invars)
        if (program, avals) not in self.call.traces:
            self.call.traces[program, avals] = jax.make_jaxpr(program.run)(*avals)
        return self.call.traces[program, avals]

    def run(self, jaxpr: Jaxpr, consts: Arrays, args: Arrays) -> Outputs:
        """Return outputs, and the reports of the checks, in their order."""
        reports: list[Finding] = []

        def compute(equation: JaxprEqn, values: list[jax.Array]) -> list[jax.Array]:
            source = equation.source_info
            names = source_info_util.current_name_stack() + source.name_stack
            with source_info_util.user_context(source.traceback, name_stack=names), equation.ctx.manager:
                outs, found = self._outputs(equation, values)
            reports.extend(found)
            return outs

        return evaluate(jaxpr, consts, args, compute), reports

    def _outputs(self, equation: JaxprEqn, values: list[jax.Array]) -> Outputs:
        name, called = equation.primitive.name, self._called(equation)
        if equation.primitive is check_p:
            return values[1:], self._report(values[0], **equation.params)
        if not self._has_check(equation):
            return bind(equation, values), []
        if called is not None:
            return self.run(called.jaxpr, called.consts, values)
        if name in _CALLS:
            return self._run_body(equation.params, equation.params[_CALLS[name]], values)
        match name:
            case "scan":
                return self._scan(equation.params, values)
            case "while":
                return self._while(equation.params, values)
            case "cond":
                return self._cond(equation.params, values)
            case "custom_linear_solve":
                return self._solve(equation.params, values)
        return bind(equation, values), []  # lowered to a callback

    def _report(self, evidence: jax.Array, condition: Condition, line: str) -> list[Finding]:
        evidence = jnp.asarray(evidence)
        if not evidence.size:
            return []
        self.checks.append((condition, line, evidence.ndim == 0))
        failed, place, value = first_failure(condition, evidence)
        return [jnp.stack([jnp.where(failed, len(self.checks), 0), place, value])]

    def _run_body(self, params: dict[str, Any], body: ClosedJaxpr | Jaxpr, values: list[jax.Array]) -> Outputs:
        if params.get("differentiated") and params["prevent_cse"]:
            # As its lowering does: else XLA would merge the second pass with the first, and keep all of it.
            chosen = params["prevent_cse"]
            chosen = [True] * len(values) if chosen is True else chosen
            apart = iter(jax.lax.optimization_barrier(list(itertools.compress(values, chosen))))
            values = [next(apart) if c else v for v, c in zip(values, chosen, strict=True)]
        return self._run(body, values)

    def _run(self, body: Any, values: Arrays) -> Outputs:
        return self.run(getattr(body, "jaxpr", body), getattr(body, "consts", ()), values)

    def _scan(self, params: dict[str, Any], values: list[jax.Array]) -> Outputs:
        first, count = scan_counts(params)
        fixed, carried, rows = values[:first], values[first : first + count], values[first + count :]

        def step(state: Carry, row: list[jax.Array]) -> tuple[Carry, list[jax.Array]]:
            carried, report = state
            outs, found = self._run(params["jaxpr"], [*fixed, *carried, *row])
            return (outs[:count], _first([report, *found])), outs[count:]

        options = {name: params[name] for name in ("length", "reverse", "unroll")}
        (carried, report), columns = jax.lax.scan(step, (carried, _first([])), rows, **options)
        return [*carried, *columns], [report]

    def _while(self, params: dict[str, Any], values: list[jax.Array]) -> Outputs:
        first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]

        def goes_on(carried: Arrays, report: Finding) -> tuple[jax.Array, Finding]:
            (more,), found = self._run(params["cond_jaxpr"], [*values[:first], *carried])
            return more, _first([report, *found])

        def step(state: Any) -> Carry:
            carried, report, *_ = state
            outs, found = self._run(params["body_jaxpr"], [*values[first:second], *carried])
            return outs, _first([report, *found])

        def step_and_look(state: Any) -> Any:
            outs, report = step(state)
            return outs, *reversed(goes_on(outs, report))

        start = values[second:], _first([])
        if not self.asks(params["cond_jaxpr"].jaxpr):
            carried, report = jax.lax.while_loop(lambda state: goes_on(*state)[0], step, start)
            return carried, [report]
        more, report = goes_on(*start)
        carried, report, _ = jax.lax.while_loop(lambda state: state[2], step_and_look, (values[second:], report, more))
        return carried, [report]

    def _cond(self, params: dict[str, Any], values: list[jax.Array]) -> Outputs:
        def run(branch: ClosedJaxpr) -> Callable[..., Carry]:
            def chosen(*operands: jax.Array) -> Carry:
                outs, found = self._run(branch, operands)
                return outs, _first(found)

            return chosen

        outs, report = jax.lax.switch(values[0], list(map(run, params["branches"])), *values[1:])
        return outs, [report]

    def _solve(self, params: dict[str, Any], values: list[jax.Array]) -> Outputs:
        counts = params["const_lengths"]
        first = counts.matvec + counts.vecmat
        return self._run(params["jaxprs"].solve, [*values[first : first + counts.solve], *values[sum(counts) :]])


def _first(reports: Sequence[Finding]) -> Finding:
    """Return the first report of a failure, or one of none."""
    none = [] if reports else [jnp.zeros(3, jnp.int64)]
    return functools.reduce(lambda one, two: jax.lax.select(one[0] != 0, one, two), [*none, *reports])
