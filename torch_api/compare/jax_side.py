"""The JAX side of a comparison: results and derivatives of a port, or of the torch function as an engine traces it."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import torch

from ...bridge import as_jax
from ...bridge.base.versions import enable_x64
from ...bridge.derive.primitives import Arrays
from ...bridge.memory.trees import Structure, is_tensor, to_jax_tree, to_torch_tree
from ...jax_impl.program.trees import PyTree, flatten
from . import mapping as mappings
from .differences import Precision, as_numpy, compare_leaf
from .mapping import Entry, Unmapped, is_parameter, leaf_paths
from .programs import Mask, compiled, is_same, probe, program_of
from .proposing import propose_mapping
from .report import Row
from .runs import Widened
from .torch_side import StateDict, TorchSide, Weights, cast, floats

T = TypeVar("T")
Parameters: TypeAlias = dict[str, Any]  # by their paths, arrays or tensors


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a JAX function returned, with the masks that it drew and its program (None where it cannot be traced)."""

    outputs: PyTree
    masks: list[Mask]
    closed: Any
    inputs: list[jax.Array]


@dataclasses.dataclass
class JaxSide:
    """A JAX function with parameters of its own layout, and the way between that and torch's.

    Attributes:
        name: ``"jax"``, or an engine.
        call: ``call(parameters, args)``; ``parameters`` by their paths.
        parameters: from torch's state, in the precision of a run, to the parameters.
        variables: the paths of the parameters to differentiate.
        made_of: the torch source of each variable.
        given: the values that the caller's parameters have, for comparison with their sources.
    """

    name: str
    call: Callable[[Parameters, PyTree], PyTree]
    parameters: Callable[[StateDict, bool], Parameters]
    variables: list[str]
    made_of: Mapping[str, Entry]
    given: Parameters = dataclasses.field(default_factory=dict)
    _results: dict[bool, Outcome] = dataclasses.field(default_factory=dict)

    def scope(self, high: bool) -> contextlib.AbstractContextManager[None]:
        """Return a run's scope: an engine's results are torch's, which needs 64-bit types; a port's own are not."""
        return enable_x64() if high or self.name != "jax" else contextlib.nullcontext()

    def parameter_rows(self, ours: TorchSide) -> list[Row]:
        """Compare the caller's parameters with their sources."""
        made = mappings.leaf_tensors(self.made_of, ours.full({k: t.detach() for k, t in ours.state.items()}))
        rows = []
        for path, value in self.given.items():
            if path in made:
                tensor = made[path].detach()
                array = as_numpy(value).astype(as_numpy(tensor).dtype)
                row = compare_leaf("jax", "parameters", path, (tensor, array), None, 0.0, Precision(None))
                square = tensor.dim() == 2 and tensor.shape[0] == tensor.shape[1]
                if row.verdict == "different" and square and np.allclose(as_numpy(tensor.double().T), array):
                    row = dataclasses.replace(row, detail="transposed")
                rows.append(row)
        return rows

    def program(self, ours: TorchSide, high: bool) -> tuple[Callable[..., PyTree], list[jax.Array]]:
        """Return the call as a flat function, and its inputs: parameters, then the tensors of the arguments."""
        state = {name: cast(tensor, high) for name, tensor in ours.state.items()}
        parameters = self.parameters(state, high)
        leaves, structure = Structure.split(ours.args, is_tensor)
        tensors = [cast(leaf, high) for leaf in leaves]

        def flat(*inputs: jax.Array) -> PyTree:
            named = dict(zip(parameters, inputs, strict=False))
            return to_jax_tree(self.call(named, to_torch_tree(structure.join(inputs[len(parameters) :]))))

        return flat, [jnp.asarray(as_numpy(x)) for x in (*parameters.values(), *tensors)]

    def results(self, ours: TorchSide, high: bool) -> Outcome:
        """Return the outputs, the masks that were drawn, and the program: computed once for each precision."""
        if high not in self._results:
            with self.scope(high):
                flat, inputs = self.program(ours, high)
                try:
                    closed, structure = program_of(flat, inputs)
                except jax.errors.JAXTypeError:  # it asks for values (NumPy, `if`): it runs as it is
                    self._results[high] = Outcome(_arrays(flat(*inputs)), [], None, inputs)
                else:
                    values, masks, _ = probe(closed, inputs)
                    outputs = structure.unflatten([as_numpy(value) for value in values])
                    self._results[high] = Outcome(outputs, masks, closed, inputs)
        return self._results[high]

    def is_deterministic(self, ours: TorchSide) -> bool:
        """Tell whether a second trace (or run, where it cannot be traced) gives the same program."""
        first = self.results(ours, False)
        with self.scope(False):
            flat, inputs = self.program(ours, False)
            if first.closed is not None:
                return is_same(first.closed, program_of(flat, inputs)[0])
            again = jax.tree.leaves(_arrays(flat(*inputs)))
        return [x.tobytes() for x in again] == [x.tobytes() for x in jax.tree.leaves(first.outputs)]

    def gradient(self, ours: TorchSide, high: bool, weights: Weights, places: Sequence[int]) -> dict[str, torch.Tensor]:
        """Compute the gradient of the weighted outputs, in torch's layout."""
        with self.scope(high):
            flat, inputs = self.program(ours, high)
            gradient, _ = self._gradient_fun(ours, flat, inputs, weights, places)
            found = self._jitted(gradient)(*inputs)
        return self._pull(ours, high, found)

    def row_gradients(
        self, ours: TorchSide, high: bool, weights: Weights, places: Sequence[int]
    ) -> dict[str, torch.Tensor]:
        """Compute the gradients of each example, in torch's layout."""
        rows = []
        with self.scope(high):
            flat, inputs = self.program(ours, high)
            gradient = self._jitted(self._gradient_fun(ours, flat, inputs, weights, places)[0])
            start = len(inputs) - len(ours.leaves())
            for i in range(ours.rows()):
                cut = [x[i : i + 1] if n - start in ours.batch else x for n, x in enumerate(inputs)]
                rows.append(gradient(*cut))
        pulled = [self._pull(ours.row(i), high, row) for i, row in enumerate(rows)]
        return {label: torch.stack([p[label] for p in pulled]) for label in (pulled[0] if pulled else ())}

    def hvp(
        self, ours: TorchSide, high: bool, weights: Weights, places: Sequence[int], direction: Mapping[str, np.ndarray]
    ) -> dict[str, torch.Tensor]:
        """Compute the Hessian of the weighted outputs times a direction, in torch's layout."""
        with self.scope(high):
            flat, inputs = self.program(ours, high)
            gradient, chosen = self._gradient_fun(ours, flat, inputs, weights, places)
            along = self._push(ours, high, direction)

            def of_chosen(*values: jax.Array) -> Arrays:
                full = list(inputs)
                for i, value in zip(chosen, values, strict=True):
                    full[i] = value
                return gradient(*full)

            product = lambda values, tangents: jax.jvp(of_chosen, tuple(values), tuple(tangents))[1]
            found = self._jitted(product)([inputs[i] for i in chosen], along) if chosen else []
        return self._pull(ours, high, found)

    def _gradient_fun(
        self,
        ours: TorchSide,
        flat: Callable[..., PyTree],
        inputs: list[jax.Array],
        weights: Weights,
        places: Sequence[int],
    ) -> tuple[Callable[..., Arrays], list[int]]:
        """Return the gradient of the weighted outputs, and the numbers of the inputs that it is with respect to."""
        start = len(inputs) - len(ours.leaves())
        paths = list(self.parameters({k: t.detach() for k, t in ours.state.items()}, False))
        chosen = [*map(paths.index, self.variables), *(start + n for n in ours.chosen)]

        def value(*inputs: jax.Array) -> jax.Array:
            outputs: list[jax.Array] = jax.tree.leaves(flat(*inputs))
            total: jax.Array | float = 0.0
            for weight, place in zip(weights, places, strict=True):
                if weight is not None:
                    output = outputs[place]
                    real = output.real + 0.5 * output.imag if jnp.iscomplexobj(output) else output
                    total = total + jnp.sum(real * jnp.asarray(weight, real.dtype))
            return jnp.asarray(total)

        return (jax.grad(value, tuple(chosen)) if chosen else lambda *inputs: []), chosen

    def _jitted(self, fun: Callable[..., T]) -> Callable[..., T]:
        """Compile the function; leave it as it is, where it asks for values (NumPy, ``if``)."""
        fast = compiled(fun)

        def call(*args: object) -> T:
            try:
                return fast(*args)
            except jax.errors.JAXTypeError:
                return fun(*args)

        return call

    def _push(self, ours: TorchSide, high: bool, direction: Mapping[str, np.ndarray]) -> list[jax.Array]:
        """Return a direction in torch's layout as one in JAX's."""
        state = {name: cast(tensor, high) for name, tensor in ours.state.items()}
        tangents = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        for name in ours.trainable:
            tangents[name] = torch.from_numpy(direction[name]).to(state[name])
        names = [n for n in state if floats(state[n])]

        def of(*values: torch.Tensor) -> dict[str, torch.Tensor]:
            return mappings.leaf_tensors(self.made_of, ours.full(state | dict(zip(names, values, strict=True))))

        pushed: dict[str, torch.Tensor] = {}
        if names:
            point = tuple(state[n] for n in names), tuple(tangents[n] for n in names)
            pushed = torch.func.jvp(of, *point)[1]
        labels = ours.labels()[len(ours.trainable) :]
        leaves = ours.leaves()
        along = [
            torch.from_numpy(direction[k]).to(cast(leaves[n], high)) for k, n in zip(labels, ours.chosen, strict=True)
        ]
        return [jnp.asarray(as_numpy(x)) for x in (*(pushed[path] for path in self.variables), *along)]

    def _pull(self, ours: TorchSide, high: bool, found: Iterable[jax.Array]) -> dict[str, torch.Tensor]:
        """Return gradients in JAX's layout as those of torch's parameters: by the mapping's derivative, transposed.

        JAX's gradients of complex numbers are the conjugates of torch's.
        """
        grads = [torch.from_numpy(np.conj(a)) if a.dtype.kind == "c" else from_numpy(a) for a in map(as_numpy, found)]
        count, labels = len(self.variables), ours.labels()
        pulled: dict[str, torch.Tensor] = {}
        if self.variables:
            state = {name: cast(tensor, high) for name, tensor in ours.state.items()}
            variables = [state[name].requires_grad_() for name in ours.trainable]
            made = mappings.leaf_tensors({p: self.made_of[p] for p in self.variables}, ours.full(state))
            with torch.enable_grad():
                reached = [(made[p], g.to(made[p])) for p, g in zip(self.variables, grads, strict=False)]
                moving = [(m, g) for m, g in reached if m.requires_grad]
                results = torch.autograd.grad(
                    [m for m, _ in moving], variables, [g for _, g in moving], allow_unused=True
                )
            pulled = {n: g for n, g in zip(ours.trainable, results, strict=True) if g is not None}
        return pulled | dict(zip(labels[len(ours.trainable) :], grads[count:], strict=True))


def _arrays(tree: PyTree) -> PyTree:
    """Return the leaves as NumPy arrays, Python's numbers in the dtypes that JAX gives them."""
    return jax.tree.map(lambda leaf: as_numpy(jnp.asarray(leaf)), tree)


def from_numpy(array: np.ndarray) -> torch.Tensor:
    """Return the array as a tensor of the same dtype, bfloat16 included."""
    if array.dtype.kind == "V" or array.dtype.name == "bfloat16":
        return torch.from_numpy(array.astype(np.float32)).to(torch.bfloat16)
    return torch.from_numpy(array)


def traced(ours: TorchSide, engine: str) -> JaxSide:
    """Return the torch function itself, traced by an engine."""
    if engine == "torch2jax" and ours.module is not None:  # it cannot take a module's parameters as arguments
        given, high = copy.deepcopy(ours.module), copy.deepcopy(ours.module).double()

        def captured(_: object, args: PyTree) -> PyTree:
            wide = any(leaf.dtype in (jnp.float64, jnp.complex128) for leaf in jax.tree.leaves(args))
            return as_jax(high if wide else given, "torch2jax")(*to_jax_tree(args))

        return JaxSide(engine, captured, lambda state, high: {}, [], {})

    def torch_fun(state: StateDict, args: PyTree) -> PyTree:
        given = [leaf.dtype for leaf in jax.tree.leaves(to_jax_tree((state, args))) if is_tensor(leaf)]
        # The float64 run makes its own tensors float64, as the eager one does.
        wide = torch.float64 in given or torch.complex128 in given
        with Widened() if wide else contextlib.nullcontext():
            return ours.call(state, args)

    fun = as_jax(torch_fun, engine)  # type: ignore[arg-type]
    # Dicts keep their order, and containers that only torch knows come back, without the detour through JAX's own.
    call = lambda parameters, args: fun(to_jax_tree(parameters), to_jax_tree(args))
    made_of = {name: name for name in ours.trainable}
    return JaxSide(engine, call, lambda state, high: dict(state), list(ours.trainable), made_of)


def port(
    ours: TorchSide, jax_fun: Callable[..., PyTree], params: PyTree, mapping: Mapping[str, Entry] | None
) -> JaxSide:
    """Return the caller's JAX function with its parameters.

    Raises:
        Unmapped: leaves of the parameters and the state dict do not match; with the side, if it can run all the same.
    """
    if params is None and any(is_parameter(leaf) for leaf in jax.tree.leaves(jax_fun)):
        params, jax_fun = jax_fun, lambda module, *args: module(*args)
    if params is None:
        return JaxSide("jax", lambda _, args: jax_fun(*args), lambda state, high: {}, [], {})
    full = ours.full({name: tensor.detach() for name, tensor in ours.state.items()})
    proposed = mapping is None
    entries = dict(propose_mapping(full, params) if mapping is None else mapping)
    wrong = mappings.problems(entries, full, params)
    bad = {path for path in entries if any(repr(path) in text for text in wrong)}
    entries = {path: entry for path, entry in entries.items() if path not in bad}
    leaves, structure = flatten(params)
    paths = [path for path, _ in leaf_paths(params)]
    values = dict(zip(paths, leaves, strict=True))
    given = {p: v for p, v in values.items() if is_parameter(v) and not isinstance(v, jax.ShapeDtypeStruct)}
    empty = [p for p, v in values.items() if isinstance(v, jax.ShapeDtypeStruct) and p not in entries]

    def parameters(state: StateDict, high: bool) -> Parameters:
        filled = mappings.leaf_tensors({p: e for p, e in entries.items() if p not in given}, ours.full(state))
        own = {p: cast(from_numpy(as_numpy(v)), high) for p, v in given.items()}
        return {p: (own | filled)[p] for p in paths if p in own or p in filled}

    def call(parameters: Parameters, args: PyTree) -> PyTree:
        return jax_fun(structure.unflatten([parameters.get(p, values[p]) for p in paths]), *args)

    side = JaxSide("jax", call, parameters, list(entries), entries, given)
    if wrong or empty:
        how = ["the mapping was proposed from shapes and names: pass mapping= to say what belongs together"]
        raise Unmapped([*wrong, *(how if proposed else [])], None if empty else side)
    return side
