"""``compare``: a torch function against its port to JAX, and against what microtome traces of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import torch

from ...bridge.memory.trees import to_jax_tree
from ...jax_impl.program.trees import PyTree
from . import mapping as mappings
from .differences import Precision, as_numpy, compare_leaf, largest_value
from .jax_side import JaxSide, from_numpy, port, traced
from .locating import locate as locate_difference
from .locating import tolerant
from .mapping import Entry, leaf_paths
from .programs import coarse_operations
from .report import Location, Report, Row
from .runs import Draws
from .torch_side import TorchSide

_TRIES = 3  # inputs on which a difference is searched for, until it is known where it is
_SECTIONS = ("parameters", "outputs", "gradients", "hvp", "per-example gradients")
_COARSE = {"float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10, "complex64": 2.0**-23}


def compare(
    torch_fun: Callable[..., PyTree],
    jax_fun: Callable[..., PyTree] | None = None,
    *args: PyTree,
    params: PyTree = None,
    mapping: Mapping[str, Entry] | None = None,
    argnums: int | Sequence[int] | None = None,
    gradients: bool = True,
    batch_argnums: int | Sequence[int] | None = None,
    hvp: bool = False,
    engines: Sequence[str] = ("record", "torch2jax"),
    random_inputs: int = 0,
    locate: bool = False,
    seed: int = 0,
) -> Report:
    """Compare a torch function with its port to JAX: values, derivatives, and where they part ways.

    Equivalent to ``numpy.testing.assert_allclose(jax_fun(...), torch_fun(...))`` for outputs and derivatives, without a
    tolerance to choose: all runs twice, in the dtypes given and in float64, and an error is called rounding if it
    shrinks as the unit roundoff does. Eager torch is the reference; it is compared with ``jax_fun``, and with itself as
    :func:`as_jax` traces it under each engine.

    Dropout in training mode is compared too: torch gets the masks that the JAX function draws by
    ``jax.random.bernoulli``, in the same order. Bind the JAX function's key beforehand (``functools.partial``).
    Nothing of the caller's changes: no buffer, no ``.grad``, no generator's state.

    Derivatives are those of one number, the outputs' sum with fixed random weights, so that functions with any outputs
    have them.

    Limits: in float64 an error counts from 1e-12 of its leaf's largest value on. Where JAX alone computes in float32
    all the same, it counts from 16 times the error of torch's own float32 in that leaf on (and 8 units of roundoff, 32
    in leaves of less than 32 numbers); where torch casts to float32 inside, from 64 units on. Dropout masks that the
    port does not draw by ``jax.random.bernoulli``, one for each of torch's and in its order, do not fit. ``locate``
    finds no difference that is in derivatives alone, and does not look into ``while_loop``, ``cond`` and scans of more
    than 128 steps. The guide "Checking a port" has more.

    Args:
        torch_fun: a module or function. A module's parameters and buffers are compared too; a function whose
            parameters are compared takes their dict first, and ``args[0]`` is that dict.
        jax_fun: called as ``jax_fun(params, *args)`` where there are ``params``, else as ``jax_fun(*args)``. An
            equinox module (a callable pytree) is its own ``params``. None compares the engines alone.
        *args: trees of tensors (NumPy arrays are made tensors).
        params: the port's parameters: a pytree of arrays, or of ``jax.ShapeDtypeStruct``, which ``mapping`` fills.
        mapping: the torch source of each leaf of ``params``, by its dotted path: a name of the state dict, a
            :class:`Source`, or a torch callable from the state dict. Proposed by :func:`propose_mapping` if not given.
        argnums: the positions in ``args`` to differentiate beside the parameters; None for all that hold floats.
        gradients: whether to compare gradients.
        batch_argnums: the positions in ``args`` of the batch, ``[batch, ...]``, to compare gradients of each example.
        hvp: whether to compare a product with the Hessian in a random direction.
        engines: which of ``"record"`` and ``"torch2jax"`` to compare. The latter supports few operations, and is an
            opinion: what it says does not change the verdict.
        random_inputs: how many times to compare the outputs on random inputs of the same shapes and ranges as well.
        locate: whether to name the first submodule whose output the JAX function does not compute, on two random
            inputs as well where the given ones do not tell. Needs a module. Takes the memory of all intermediate
            values in float64: use a small batch.
        seed: of the random weights, directions and inputs.

    Returns:
        The :class:`Report`. What goes wrong in the functions compared (an exception, other structures or shapes,
        missing leaves, results that change from run to run) is in the report.

    Raises:
        TypeError: ``torch_fun`` or ``jax_fun`` is not callable.
        ValueError: an unknown engine, ``argnums`` or ``batch_argnums`` out of range, batches of different length.

    >>> import torch, jax
    >>> from microtome import torch_api as mt
    >>> report = mt.compare(torch.nn.functional.gelu, lambda x: jax.nn.gelu(x, approximate=True), torch.randn(8))
    >>> report.agrees, report.verdict("output")
    (False, 'different')
    """
    for name, fun in (("torch_fun", torch_fun), ("jax_fun", jax_fun)):
        if not callable(fun) and not (name == "jax_fun" and fun is None):
            raise TypeError(
                f"{name} must be callable, got {type(fun).__name__}: compare(torch_fun, jax_fun, *args), with None for "
                "jax_fun to compare the engines alone."
            )
    unknown = [engine for engine in engines if engine not in ("record", "torch2jax")]
    if isinstance(engines, str) or unknown:
        raise ValueError(f'engines must be a sequence of "record" and "torch2jax", got {engines!r}.')
    if random_inputs < 0:
        raise ValueError(f"random_inputs must be a number of times, 0 or more, got {random_inputs}.")
    tensors = tuple(to_jax_tree(arg, _as_tensor) for arg in args)
    functional = params is not None and not isinstance(torch_fun, torch.nn.Module)
    ours = TorchSide.of(torch_fun, tensors, functional, argnums, batch_argnums)
    devices = sorted({t.device.index for t in ours.tensors() if t.is_cuda})
    # The caller may be in no_grad() or inference_mode(), where nothing could be differentiated.
    with torch.inference_mode(False), torch.enable_grad(), torch.random.fork_rng(devices):
        run = _Comparison(ours, seed, gradients, hvp, locate, Report())
        run.against(jax_fun, params, mapping, engines)
        for i in range(random_inputs):
            again = dataclasses.replace(ours, args=_random(ours.args, seed + i + 1))
            other = _Comparison(again, seed + i + 1, False, False, False, Report())
            other.against(jax_fun, params, mapping, engines)
            run.report.problems += [p for p in other.report.problems if p not in run.report.problems]
            run.report.rows += [
                dataclasses.replace(row, section=f"outputs, random input {i + 1}")
                for row in other.report.rows
                if row.section == "outputs"
            ]
    return run.report


def _as_tensor(leaf: object) -> object:
    if isinstance(leaf, (np.ndarray, np.generic, jax.Array)):
        try:
            return from_numpy(as_numpy(leaf))
        except TypeError as error:
            raise TypeError(
                f"args must be trees of tensors, or of arrays of numbers, got an array of dtype {leaf.dtype}: bind it, "
                "functools.partial(fun, ...)."
            ) from error
    return leaf


@dataclasses.dataclass
class _Comparison:
    """One set of inputs: torch's results in both precisions, and each JAX function's against them."""

    ours: TorchSide
    seed: int
    gradients: bool
    hvp: bool
    locate: bool
    report: Report
    precisions: dict[str, Precision] = dataclasses.field(default_factory=dict)

    def against(
        self,
        jax_fun: Callable[..., PyTree] | None,
        params: PyTree,
        mapping: Mapping[str, Entry] | None,
        engines: Sequence[str],
    ) -> None:
        sides: list[JaxSide] = []
        if jax_fun is not None:
            sides += self._port(jax_fun, params, mapping)
        given = sides[0] if sides else None
        low, high = self._masks(given, False), self._masks(given, True)
        if not self._reference_works(low):
            return
        draws = bool(low.count)
        if draws and jax_fun is None:
            self.report.problems.append("the torch function draws random numbers, which the engines draw otherwise")
            return
        if draws and engines:
            self.report.notes.append("the engines were not compared: the torch function draws random numbers")
        elif not draws:
            sides += self._traced(engines)
        for side in sides:
            try:
                self._compare(side, low, high)
            except Exception as error:  # of the user's function, in a run after the first
                self.report.problems.append(f"the comparison with {side.name!r} stopped: {_said(error)}")
        for remark in dict.fromkeys(low.remarks + high.remarks):
            self.report.problems.append(remark)
        if self.locate:
            self._locate(sides, low, high)

    def _traced(self, engines: Sequence[str]) -> list[JaxSide]:
        sides = []
        for engine in engines:
            try:
                sides.append(traced(self.ours, engine))
            except Exception as error:  # a module that cannot be copied
                self.report.notes.append(f"engine {engine!r} cannot trace the torch function: {_said(error)}")
        return sides

    def _port(
        self, jax_fun: Callable[..., PyTree], params: PyTree, mapping: Mapping[str, Entry] | None
    ) -> list[JaxSide]:
        try:
            side = port(self.ours, jax_fun, params, mapping)
        except mappings.Unmapped as error:
            self.report.problems += error.problems
            if error.side is None:
                return []
            side = error.side
        self.report.rows += side.parameter_rows(self.ours)
        return [side]

    def _masks(self, side: JaxSide | None, high: bool) -> Draws:
        """Return the masks that the port draws; whatever else is wrong with it shows where outputs are compared."""
        if side is None:
            return Draws()
        try:
            return Draws(side.results(self.ours, high).masks)
        except Exception:
            return Draws()

    def _reference_works(self, draws: Draws) -> bool:
        try:
            first, second = (self.ours.outputs(False, draws) for _ in range(2))
        except Exception as error:
            self.report.problems.append(f"the torch function raises {_said(error)}")
            return False
        odd = [f"{path} is {what}" for path, leaf in _leaves(first) if (what := _incomparable(leaf))]
        if odd or not _leaves(first):
            what = "; ".join(odd) or "there are no outputs"
            self.report.problems.append(f"the torch function returns what cannot be compared: {what}")
            return False
        changed = [
            path
            for (path, one), (_, two) in zip(_leaves(first), _leaves(second), strict=False)
            if not _same_bits(one, two)
        ]
        if changed or len(_leaves(first)) != len(_leaves(second)):
            by = f" (it calls {', '.join(sorted(draws.others))})" if draws.others else ""
            self.report.problems.append(
                f"the torch function is not deterministic: {', '.join(changed)} changed between two runs on the same "
                f"inputs{by}. Only dropout can be given the same draws; pass other random numbers in as arguments."
            )
            return False
        if draws.given and not draws.count:
            self.report.problems.append(
                f"the JAX function draws {len(draws.given)} dropout masks, torch none: is the model in evaluation mode?"
            )
        elif draws.count and len(draws.given) != draws.count and not draws.remarks:
            self.report.problems.append(
                f"torch draws {draws.count} dropout masks, the JAX function {len(draws.given)}: is the model meant to "
                "be in training mode?"
            )
        return True

    # One JAX function

    def _compare(self, side: JaxSide, low_draws: Draws, high_draws: Draws) -> None:
        opinion = side.name != "jax"
        complain = (self.report.notes if opinion else self.report.problems).append
        try:
            theirs = side.results(self.ours, False).outputs
            deterministic = opinion or side.is_deterministic(self.ours)
        except Exception as error:
            what = f"engine {side.name!r} cannot trace the torch function:" if opinion else "the JAX function raises"
            complain(f"{what} {_said(error)}")
            return
        if not deterministic:
            complain("the JAX function is not deterministic: a second trace on the same inputs gave another program")
            return
        precision = self.precisions[side.name] = self._precision(side, high_draws)
        ours = self.ours.outputs(False, low_draws)
        both64 = None
        if precision.has_float64:
            both64 = self.ours.outputs(True, high_draws), side.results(self.ours, True).outputs
        pairs = self._rows(side.name, "outputs", ours, theirs, both64, precision)
        if pairs is None or not (self.gradients or self.ours.batch):
            return
        try:
            self._derivatives(side, pairs, low_draws, high_draws, precision)
        except Exception as error:
            asks = isinstance(error, jax.errors.JAXTypeError)  # NumPy, float(x), `if`
            hint = ". It asks for values, so JAX cannot differentiate it: pass gradients=False" if asks else ""
            complain(f"derivatives against {side.name!r} could not be compared: {_said(error)}{hint}")

    def _derivatives(
        self, side: JaxSide, pairs: list[int], low_draws: Draws, high_draws: Draws, precision: Precision
    ) -> None:
        highs = (False, True) if precision.has_float64 else (False,)
        sections: dict[str, Callable[[bool, Draws], tuple[PyTree, PyTree]]] = {}
        weights = self.ours.weights(low_draws, self.seed)
        # A function that has its parameters built in says nothing about their gradients.
        known = self.ours.labels() if side.variables else self.ours.labels()[len(self.ours.trainable) :]
        only = lambda found: {label: found[label] for label in known}
        if self.gradients:
            sections["gradients"] = lambda high, draws: (
                only(self.ours.gradient(high, draws, weights)),
                side.gradient(self.ours, high, weights, pairs),
            )
        if self.hvp:
            direction = self.ours.direction(self.seed)
            sections["hvp"] = lambda high, draws: (
                only(self.ours.hvp(high, draws, weights, direction)),
                side.hvp(self.ours, high, weights, pairs, direction),
            )
        if self.ours.batch and low_draws.count:
            self.report.notes.append("per-example gradients were not compared: the functions draw random numbers")
        elif self.ours.batch and not self.ours.rows():
            self.report.notes.append("per-example gradients were not compared: there are no examples")
        elif self.ours.batch:
            rows = self.ours.row_weights(low_draws, self.seed)
            sections["per-example gradients"] = lambda high, draws: (
                only(self.ours.row_gradients(high, draws, rows)),
                side.row_gradients(self.ours, high, rows, pairs),
            )
        for section, run in sections.items():
            results = [run(high, high_draws if high else low_draws) for high in highs]
            self._rows(side.name, section, *results[0], results[1] if len(results) > 1 else None, precision)

    def _rows(
        self,
        against: str,
        section: str,
        ours: PyTree,
        theirs: PyTree,
        both64: tuple[PyTree, PyTree] | None,
        precision: Precision,
    ) -> list[int] | None:
        """Add the rows of one section; return where torch's leaves stand among JAX's, if all have a counterpart."""
        mine, other = _leaves(ours), _leaves(theirs)
        names = [p for p, _ in mine], [p for p, _ in other]
        places = _places(*names)
        if section == "outputs" and places == list(range(len(mine))) and names[0] != names[1]:
            both = f"{', '.join(names[0])} in torch, {', '.join(names[1])} in JAX"
            self.report.notes.append(f"the outputs have other names ({both}): they were compared in their order")
        if both64 is None:
            fine: tuple[list[Any], list[Any]] = [], []
        else:
            fine = [x for _, x in _leaves(both64[0])], [x for _, x in _leaves(both64[1])]
            if (len(fine[0]), len(fine[1])) != (len(mine), len(other)):
                self.report.problems.append(f"{section}: other leaves in float64 than in the dtypes given")
                return None
        matched = [i for i, place in enumerate(places) if place is not None]
        scale = largest_value(
            [mine[i][1] for i in matched],
            [other[p][1] for p in places if p is not None],
            [fine[0][i] for i in matched] if fine[0] else (),
        )
        for i, (path, value) in enumerate(mine):
            place = places[i]
            if place is None:
                self.report.rows.append(Row(against, section, path, "missing", detail="only in torch"))
                continue
            pair64 = (fine[0][i], fine[1][place]) if fine[0] else None
            pair = value, other[place][1]
            self.report.rows.append(compare_leaf(against, section, path, pair, pair64, scale, precision))
        extra = [path for j, (path, _) in enumerate(other) if j not in places]
        self.report.rows += [Row(against, section, path, "missing", detail="only in JAX") for path in extra]
        if extra or None in places:
            return None
        known = [place for place in places if place is not None]
        same = [as_numpy(v).shape == as_numpy(other[p][1]).shape for (_, v), p in zip(mine, known, strict=True)]
        return known if all(same) else None

    def _precision(self, side: JaxSide, draws: Draws) -> Precision:
        """Tell whether both run in float64, and how coarse both are within."""
        notes = self.report.notes
        try:
            torch_dtypes = self.ours.coarse_dtypes(draws)
            closed = side.results(self.ours, True).closed
            jax_dtypes = {} if closed is None else coarse_operations(closed)
        except Exception as error:
            if side.name == "jax":
                notes.append(f"nothing was compared in float64, so small differences may pass: {_said(error)}")
            return Precision(None)
        coarsest = None
        for dtype, eps in _COARSE.items():
            in_torch, in_jax = dtype in torch_dtypes, dtype in jax_dtypes
            # float32 is what both run in anyway; a coarser dtype on one side alone is a difference like any other.
            if (in_torch and in_jax) or (eps == 2.0**-23 and (in_torch or in_jax)):
                coarsest = max(coarsest or 0.0, eps)
            if side.name == "jax" and (in_torch or in_jax):
                who = "both compute" if in_torch and in_jax else "torch computes" if in_torch else "JAX computes"
                where = f" ({jax_dtypes[dtype]})" if in_jax else f" ({torch_dtypes[dtype]})"
                if in_jax and not in_torch and self.ours.is_double():
                    self.report.problems.append(f"the arguments are float64, but JAX computes in {dtype}{where}")
                else:
                    cause = "" if in_torch else "; a Flax module does so unless it is built with dtype=None"
                    notes.append(f"{who} in {dtype} within the float64 run{where}{cause}")
        drawn = bool(draws.count)
        if coarsest is None:
            return Precision(draws=drawn)
        return Precision(coarsest, drawn, alone=not any(dtype in torch_dtypes for dtype in _COARSE))

    def _locate(self, sides: list[JaxSide], low: Draws, high: Draws) -> None:
        differing = [row for row in self.report.rows if row.verdict == "different" and row.against != "torch2jax"]
        wrong = [side for side in sides if any(row.against == side.name for row in differing)]
        notes = self.report.notes
        if not wrong:
            return
        if self.ours.module is None:
            notes.append("locate needs a torch.nn.Module, whose submodules it can name")
            return
        if not self.precisions[wrong[0].name].has_float64:
            notes.append("nothing was located: the functions do not run in float64")
            return
        if wrong[0].results(self.ours, True).closed is None:
            notes.append("nothing was located: the JAX function cannot be traced")
            return
        for i in range(_TRIES):
            try:
                location = self._search(self.ours if i == 0 else self._others(i), wrong[0], low, high)
            except Exception as error:
                if i == 0:
                    notes.append(f"nothing was located: {_said(error)}")
                    return
                continue  # other inputs may be none that the functions take
            if location is not None and (location.sure or self.report.location is None):
                self.report.location = location
            if location is not None and location.sure:
                return
        if self.report.location is None:
            sections = {row.section for row in differing if row.against == wrong[0].name}
            where = "the difference is in " + " and ".join(s for s in _SECTIONS if s in sections)
            if "outputs" in sections:
                where = "the difference in the outputs is too small to be searched for"
            notes.append(f"nothing was located: JAX computes the output of every submodule; {where}")

    def _others(self, i: int) -> TorchSide:
        return dataclasses.replace(self.ours, args=_random(self.ours.args, self.seed - i))

    def _search(self, ours: TorchSide, side: JaxSide, low: Draws, high: Draws) -> Location | None:
        """Find where the difference arises, on some inputs."""
        precision = self.precisions[side.name]
        results = dataclasses.replace(side, _results={}).results(ours, True)
        calls = ours.calls(True, high)
        coarsely = ours.calls(False, low) if precision.alone and not precision.draws else calls
        if [c.name for c in calls] != [c.name for c in coarsely]:
            raise ValueError("the torch function calls other submodules in float64 than in the dtypes given")
        with side.scope(True):
            judged = [tolerant(call, rough, precision) for call, rough in zip(calls, coarsely, strict=True)]
            return locate_difference(judged, results.closed, results.inputs)


def _leaves(tree: PyTree) -> list[tuple[str, Any]]:
    """Return the outputs by their paths; a single one is ``output``."""
    leaves = leaf_paths(to_jax_tree(tree))
    return [(path or "output", leaf) for path, leaf in leaves]


def _places(ours: list[str], theirs: list[str]) -> list[int | None]:
    """Find each of torch's leaves among JAX's: by path; by order where no path is shared but the count is."""
    index = {path: j for j, path in enumerate(theirs)}
    places = [index.get(path) for path in ours]
    if len(ours) == len(theirs) and all(place is None for place in places):
        return list(range(len(ours)))
    return places


def _incomparable(leaf: object) -> str:
    """Say what an output is that cannot be compared; nothing if it can be."""
    if isinstance(leaf, torch.Tensor):
        dense = leaf.layout == torch.strided and not leaf.is_meta and not leaf.is_quantized
        return "" if dense else "a tensor without dense data (sparse, quantized or meta)"
    return "" if isinstance(leaf, (bool, int, float, complex, np.ndarray, np.generic)) else f"a {type(leaf).__name__}"


def _same_bits(one: object, two: object) -> bool:
    a, b = as_numpy(one), as_numpy(two)
    return a.shape == b.shape and a.tobytes() == b.tobytes()


def _said(error: Exception) -> str:
    """Return an exception in one line."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:300]}" if text else type(error).__name__


def _random(args: PyTree, seed: int) -> PyTree:
    """Draw other inputs of the same shapes, dtypes and ranges."""
    generator = torch.Generator().manual_seed(seed)

    def other(leaf: object) -> object:
        if not isinstance(leaf, torch.Tensor) or not leaf.numel():
            return leaf
        if leaf.dtype == torch.bool:
            made = torch.rand(leaf.shape, generator=generator) < 0.5
        elif leaf.is_floating_point() or leaf.is_complex():
            spread = leaf.detach().abs().to(torch.float64).pow(2).mean().sqrt().item() or 1.0
            kind = torch.complex128 if leaf.is_complex() else torch.float64
            made = torch.randn(leaf.shape, generator=generator, dtype=kind) * spread
        else:
            made = torch.randint(int(leaf.min()), int(leaf.max()) + 1, leaf.shape, generator=generator)
        return made.to(leaf.dtype).to(leaf.device)

    return jax.tree.map(other, args)
