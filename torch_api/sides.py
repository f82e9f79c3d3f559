"""The two sides of a comparison: results and derivatives of eager torch, and of a JAX function on the same numbers."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from ..bridge import as_jax
from ..bridge.trees import Structure, to_jax_tree, to_torch_tree
from ..bridge.versions import enable_x64
from . import mapping as mappings
from .differences import Precision, as_numpy, compare_leaf
from .mapping import Entry, Unmapped, is_parameter, leaf_paths
from .programs import Mask, compiled, is_same, run, trace
from .report import Row
from .runs import Draws, ModuleCall, Recorded, Watching, Widened

State = dict[str, torch.Tensor]
Weights = list[np.ndarray | None]  # of each output leaf, None where it holds no floats

def cast(tensor: torch.Tensor, high: bool) -> torch.Tensor:
    """A copy in the dtype of a run: float64, or as given, where float64 itself becomes float32."""
    dtype = tensor.dtype
    if dtype.is_floating_point:
        dtype = torch.float64 if high else torch.float32 if dtype == torch.float64 else dtype
    elif dtype.is_complex:
        dtype = torch.complex128 if high else torch.complex64
    return tensor.detach().to(dtype, copy=True)


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)


def _floats(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


@dataclasses.dataclass(frozen=True)
class TorchSide:
    """A torch function with its state and arguments.

    Attributes:
        call: ``call(state, args)``.
        module: the module, where the function is one.
        state: parameters and buffers, tied ones once.
        aliases: all names of the state, each with the one that ``state`` has it under.
        trainable: the names in ``state`` to differentiate.
        args: the arguments, as a tree that JAX can flatten.
        chosen: the tensors of ``args`` to differentiate, by number.
        batch: the tensors of ``args`` that hold a batch, by number.
    """

    call: Callable[[State, Any], Any]
    module: torch.nn.Module | None
    state: State
    aliases: dict[str, str]
    trainable: list[str]
    args: Any
    chosen: list[int]
    batch: list[int]

    @classmethod
    def of(cls, fun: Any, args: tuple[Any, ...], functional: bool, argnums: Any, batch_argnums: Any) -> TorchSide:
        """A module, a function of a dict of parameters and other arguments, or a function of arguments alone."""
        module = fun if isinstance(fun, torch.nn.Module) else None
        first = 0
        if module is not None:
            state = dict(module.named_parameters()) | dict(module.named_buffers())
            canonical = {id(tensor): name for name, tensor in state.items()}
            aliases = {name: canonical[id(tensor)] for name, tensor in mappings.named_tensors(module).items()}
            call = lambda state, args: torch.func.functional_call(module, state, args)
            trainable = [name for name, p in module.named_parameters() if _floats(p)]
        elif functional:
            if not args or not isinstance(args[0], dict) or not all(map(_is_tensor, args[0].values())):
                raise TypeError(
                    "with params, a torch function that is no module must take its parameters first, as a dict from "
                    f"names to tensors; args[0] is a {type(args[0]).__name__ if args else 'nothing'}."
                )
            state, args, first = dict(args[0]), args[1:], 1
            aliases = {name: name for name in state}
            call = lambda state, args: fun(state, *args)
            trainable = [name for name, tensor in state.items() if _floats(tensor)]
        else:
            state, aliases, trainable = {}, {}, []
            call = lambda state, args: fun(*args)
        numbers = _numbered(args)
        chosen = _positions("argnums", argnums, len(args), first)
        batch = _positions("batch_argnums", batch_argnums, len(args), first)
        leaves = [leaf for leaf in jax.tree.leaves(args) if _is_tensor(leaf)]
        picked = range(len(leaves)) if chosen is None else [n for i in chosen for n in numbers[i]]
        rows = [n for i in batch or () for n in numbers[i]]
        lengths = {leaves[n].shape[0] if leaves[n].dim() else None for n in rows}
        if len(lengths) > 1 or None in lengths:
            raise ValueError(f"batch_argnums={batch_argnums}: batch arguments must have one length, got {lengths}.")
        return cls(call, module, state, aliases, trainable, args, [n for n in picked if _floats(leaves[n])], rows)

    def tensors(self) -> list[torch.Tensor]:
        """All tensors of the state and the arguments."""
        return [*self.state.values(), *self.leaves()]

    def leaves(self) -> list[torch.Tensor]:
        """The tensors of the arguments."""
        return Structure.split(self.args, _is_tensor)[0]

    def labels(self) -> list[str]:
        """The names of what is differentiated: parameters, then ``argument 0`` and so on."""
        paths = [path for path, leaf in leaf_paths(self.args) if _is_tensor(leaf)]
        return [*self.trainable, *(f"argument {paths[n]}" for n in self.chosen)]

    def full(self, state: State) -> State:
        """The state under all its names."""
        return {name: state[canonical] for name, canonical in self.aliases.items()}

    def row(self, i: int) -> TorchSide:
        """The same function on one example."""
        leaves, structure = Structure.split(self.args, _is_tensor)
        cut = [leaf[i : i + 1] if n in self.batch else leaf for n, leaf in enumerate(leaves)]
        return dataclasses.replace(self, args=structure.join(cut))

    def rows(self) -> int:
        """The number of examples."""
        return int(self.leaves()[self.batch[0]].shape[0])

    # What torch computes

    def outputs(self, high: bool, draws: Draws) -> Any:
        """The results, detached."""
        return to_torch_tree(jax.tree.map(_detached, self._run(high, draws)[0]))

    def calls(self, draws: Draws) -> list[ModuleCall]:
        """The calls of the submodules, in float64."""
        assert self.module is not None
        recorded = Recorded(self.module)
        with recorded.run():
            self._run(True, draws)
        return recorded.calls

    def coarse_dtypes(self, draws: Draws) -> dict[str, str]:
        """The dtypes coarser than float64 in which the float64 run computes, each with an operation."""
        watching = Watching()
        with watching:
            self._run(True, draws)
        return watching.found

    def gradient(self, high: bool, draws: Draws, weights: Weights) -> dict[str, torch.Tensor]:
        """The gradient of the weighted outputs by label."""
        outputs, variables = self._run(high, draws)
        return dict(zip(self.labels(), _gradients(_torch_sum(outputs, weights), variables), strict=True))

    def hvp(
        self, high: bool, draws: Draws, weights: Weights, direction: Mapping[str, np.ndarray]
    ) -> dict[str, torch.Tensor]:
        """The Hessian of the weighted outputs times a direction."""
        outputs, variables = self._run(high, draws)
        if any(v.is_complex() for v in variables):
            raise TypeError("Hessian-vector products of complex variables are not defined here.")
        first = _gradients(_torch_sum(outputs, weights), variables, create_graph=True)
        along = [torch.from_numpy(direction[label]).to(v) for label, v in zip(self.labels(), variables, strict=True)]
        slope = sum(((g * u).sum() for g, u in zip(first, along, strict=True)), torch.zeros((), requires_grad=True))
        return dict(zip(self.labels(), _gradients(slope, variables), strict=True))

    def row_gradients(self, high: bool, draws: Draws, weights: Weights) -> dict[str, torch.Tensor]:
        """The gradients of each example, ``[batch, ...]`` each."""
        rows = [self.row(i).gradient(high, draws, weights) for i in range(self.rows())]
        return {label: torch.stack([row[label] for row in rows]) for label in self.labels()}

    def weights(self, draws: Draws, seed: int) -> Weights:
        """Random weights for each output."""
        generator = np.random.default_rng(seed)
        outputs = [x for _, x in leaf_paths(to_jax_tree(self.outputs(False, draws)))]
        moving = [torch.is_tensor(x) and _floats(x) for x in outputs]
        return [generator.normal(size=tuple(x.shape)) if m else None for x, m in zip(outputs, moving, strict=True)]

    def row_weights(self, draws: Draws, seed: int) -> Weights:
        """Random weights for each output of one example."""
        return self.row(0).weights(draws, seed) if self.rows() else []

    def direction(self, seed: int) -> dict[str, np.ndarray]:
        """A random direction in the space of what is differentiated."""
        generator, leaves = np.random.default_rng(seed + 1), self.leaves()
        shapes = [*(self.state[n].shape for n in self.trainable), *(leaves[n].shape for n in self.chosen)]
        return {label: generator.normal(size=tuple(s)) for label, s in zip(self.labels(), shapes, strict=True)}

    def _run(self, high: bool, draws: Draws) -> tuple[Any, list[torch.Tensor]]:
        """The results, part of autograd, and the variables that they depend on."""
        state = {name: cast(tensor, high) for name, tensor in self.state.items()}
        given, structure = Structure.split(self.args, _is_tensor)
        leaves = [cast(leaf, high) for leaf in given]
        variables = [*(state[name] for name in self.trainable), *(leaves[n] for n in self.chosen)]
        for variable in variables:
            variable.requires_grad_()
        args = to_torch_tree(structure.join(leaves))
        with torch.enable_grad(), Widened() if high else contextlib.nullcontext(), draws.run():
            return to_jax_tree(self.call(state, args)), variables


def _detached(leaf: Any) -> Any:
    return leaf.detach() if _is_tensor(leaf) else leaf


def _numbered(args: tuple[Any, ...]) -> list[list[int]]:
    """The numbers of the tensors of each argument."""
    numbers, count = [], 0
    for arg in args:
        held = sum(map(_is_tensor, jax.tree.leaves(arg)))
        numbers.append(list(range(count, count + held)))
        count += held
    return numbers


def _positions(name: str, value: Any, count: int, first: int) -> list[int] | None:
    """The positions among the arguments that follow the parameters."""
    if value is None:
        return None
    listed = [value] if isinstance(value, int) else list(value)
    total = count + first
    if any(not isinstance(i, int) or not -total <= i < total for i in listed):
        raise ValueError(f"{name} must be positions among {total} arguments, got {value!r}.")
    return [i % total - first for i in listed if i % total >= first]


def _torch_sum(outputs: Any, weights: Weights) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for output, weight in zip(jax.tree.leaves(outputs), weights, strict=True):
        if weight is not None and output.requires_grad:
            real = output.real + 0.5 * output.imag if output.is_complex() else output
            total = total + (real * torch.from_numpy(weight).to(real)).sum()
    return total


def _gradients(value: torch.Tensor, variables: list[torch.Tensor], create_graph: bool = False) -> list[torch.Tensor]:
    if not value.requires_grad or not variables:
        return [torch.zeros_like(v) for v in variables]
    found = torch.autograd.grad(value, variables, create_graph=create_graph, allow_unused=True)
    return [torch.zeros_like(v) if g is None else g for g, v in zip(found, variables, strict=True)]


@dataclasses.dataclass(frozen=True)
class Results:
    """What a JAX function returned, with the masks that it drew and its program (None where it cannot be traced)."""

    outputs: Any
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
    call: Callable[[dict[str, Any], Any], Any]
    parameters: Callable[[State, bool], dict[str, Any]]
    variables: list[str]
    made_of: Mapping[str, Entry]
    given: dict[str, Any] = dataclasses.field(default_factory=dict)
    _results: dict[bool, Results] = dataclasses.field(default_factory=dict)

    def scope(self, high: bool) -> Any:
        """Where a run happens: an engine's results are torch's, which needs 64-bit types; a port's own are not."""
        return enable_x64() if high or self.name != "jax" else contextlib.nullcontext()

    def parameter_rows(self, ours: TorchSide) -> list[Row]:
        """The caller's parameters against their sources."""
        made = mappings.apply(self.made_of, ours.full({k: t.detach() for k, t in ours.state.items()}))
        rows = []
        for path, value in self.given.items():
            if path in made:
                tensor = made[path].detach()
                array = as_numpy(value).astype(as_numpy(tensor).dtype)
                row = compare_leaf("jax", "parameters", path, (tensor, array), None, 0.0, Precision(None))
                if row.verdict == "different" and tensor.dim() == 2 and tensor.shape[0] == tensor.shape[1]:
                    if np.allclose(as_numpy(tensor.T.double()), array.astype(np.float64)):
                        row = dataclasses.replace(row, detail="transposed")
                rows.append(row)
        return rows

    def program(self, ours: TorchSide, high: bool) -> tuple[Callable[..., Any], list[jax.Array]]:
        """The call as a flat function, and its inputs: parameters, then the tensors of the arguments."""
        state = {name: cast(tensor, high) for name, tensor in ours.state.items()}
        parameters = self.parameters(state, high)
        leaves, structure = Structure.split(ours.args, _is_tensor)
        tensors = [cast(leaf, high) for leaf in leaves]

        def flat(*inputs: Any) -> Any:
            named = dict(zip(parameters, inputs, strict=False))
            return to_jax_tree(self.call(named, to_torch_tree(structure.join(inputs[len(parameters) :]))))

        return flat, [jnp.asarray(as_numpy(x)) for x in (*parameters.values(), *tensors)]

    def results(self, ours: TorchSide, high: bool) -> Results:
        """The outputs, the masks that were drawn, and the program: computed once for each precision."""
        if high not in self._results:
            with self.scope(high):
                flat, inputs = self.program(ours, high)
                try:
                    closed, structure = trace(flat, inputs)
                except jax.errors.JAXTypeError:  # it asks for values (NumPy, `if`): it runs as it is
                    self._results[high] = Results(jax.tree.map(as_numpy, flat(*inputs)), [], None, inputs)
                else:
                    values, masks, _ = run(closed, inputs)
                    outputs = structure.unflatten([as_numpy(value) for value in values])
                    self._results[high] = Results(outputs, masks, closed, inputs)
        return self._results[high]

    def is_deterministic(self, ours: TorchSide) -> bool:
        """Whether a second trace (or run, where it cannot be traced) gives the same program."""
        first = self.results(ours, False)
        with self.scope(False):
            flat, inputs = self.program(ours, False)
            if first.closed is not None:
                return is_same(first.closed, trace(flat, inputs)[0])
            again = jax.tree.leaves(jax.tree.map(as_numpy, flat(*inputs)))
        return [x.tobytes() for x in again] == [x.tobytes() for x in jax.tree.leaves(first.outputs)]

    def gradient(self, ours: TorchSide, high: bool, weights: Weights, places: Sequence[int]) -> dict[str, Any]:
        """The gradient of the weighted outputs, in torch's layout."""
        with self.scope(high):
            flat, inputs = self.program(ours, high)
            gradient, _ = self._gradient_fun(ours, flat, inputs, weights, places)
            found = self._jitted(gradient)(*inputs)
        return self._pull(ours, high, found)

    def row_gradients(self, ours: TorchSide, high: bool, weights: Weights, places: Sequence[int]) -> dict[str, Any]:
        """The gradients of each example, in torch's layout."""
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
    ) -> dict[str, Any]:
        """The Hessian of the weighted outputs times a direction, in torch's layout."""
        with self.scope(high):
            flat, inputs = self.program(ours, high)
            gradient, chosen = self._gradient_fun(ours, flat, inputs, weights, places)
            along = self._push(ours, high, direction)

            def of_chosen(*values: Any) -> Any:
                full = list(inputs)
                for i, value in zip(chosen, values, strict=True):
                    full[i] = value
                return gradient(*full)

            product = lambda values, tangents: jax.jvp(of_chosen, tuple(values), tuple(tangents))[1]
            found = self._jitted(product)([inputs[i] for i in chosen], along) if chosen else []
        return self._pull(ours, high, found)

    def _gradient_fun(
        self, ours: TorchSide, flat: Callable[..., Any], inputs: list[jax.Array], weights: Weights, places: Sequence[int]
    ) -> tuple[Callable[..., Any], list[int]]:
        """The gradient of the weighted outputs with respect to the inputs of the numbers returned."""
        start = len(inputs) - len(ours.leaves())
        paths = list(self.parameters({k: t.detach() for k, t in ours.state.items()}, False))
        chosen = [*map(paths.index, self.variables), *(start + n for n in ours.chosen)]

        def value(*inputs: Any) -> Any:
            outputs, total = jax.tree.leaves(flat(*inputs)), 0.0
            for weight, place in zip(weights, places, strict=True):
                if weight is not None:
                    output = outputs[place]
                    real = output.real + 0.5 * output.imag if jnp.iscomplexobj(output) else output
                    total = total + jnp.sum(real * jnp.asarray(weight, real.dtype))
            return jnp.asarray(total)

        return (jax.grad(value, tuple(chosen)) if chosen else lambda *inputs: []), chosen

    def _jitted(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        """The function compiled; as it is, where it asks for values (NumPy, ``if``)."""
        fast = compiled(fun)

        def call(*args: Any) -> Any:
            try:
                return fast(*args)
            except jax.errors.JAXTypeError:
                return fun(*args)

        return call

    def _push(self, ours: TorchSide, high: bool, direction: Mapping[str, np.ndarray]) -> list[jax.Array]:
        """A direction in torch's layout as one in JAX's."""
        state = {name: cast(tensor, high) for name, tensor in ours.state.items()}
        tangents = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        for name in ours.trainable:
            tangents[name] = torch.from_numpy(direction[name]).to(state[name])
        names = [n for n in state if _floats(state[n])]

        def of(*values: torch.Tensor) -> Any:
            return mappings.apply(self.made_of, ours.full(state | dict(zip(names, values, strict=True))))

        pushed: dict[str, torch.Tensor] = {}
        if names:
            _, pushed = torch.func.jvp(of, tuple(state[n] for n in names), tuple(tangents[n] for n in names))
        labels = ours.labels()[len(ours.trainable) :]
        leaves = ours.leaves()
        along = [torch.from_numpy(direction[k]).to(cast(leaves[n], high)) for k, n in zip(labels, ours.chosen, strict=True)]
        return [jnp.asarray(as_numpy(x)) for x in (*(pushed[path] for path in self.variables), *along)]

    def _pull(self, ours: TorchSide, high: bool, found: Iterable[Any]) -> dict[str, Any]:
        """Gradients in JAX's layout as those of torch's parameters: by the derivative of the mapping, transposed.

        JAX's gradients of complex numbers are the conjugates of torch's.
        """
        grads = [torch.from_numpy(np.conj(a)) if a.dtype.kind == "c" else _tensor(a) for a in map(as_numpy, found)]
        count, labels = len(self.variables), ours.labels()
        pulled: dict[str, Any] = {}
        if self.variables:
            state = {name: cast(tensor, high) for name, tensor in ours.state.items()}
            variables = [state[name].requires_grad_() for name in ours.trainable]
            made = mappings.apply({p: self.made_of[p] for p in self.variables}, ours.full(state))
            with torch.enable_grad():
                reached = [(made[p], g.to(made[p])) for p, g in zip(self.variables, grads, strict=False)]
                moving = [(m, g) for m, g in reached if m.requires_grad]
                results = torch.autograd.grad(
                    [m for m, _ in moving], variables, [g for _, g in moving], allow_unused=True
                )
            pulled = {n: g for n, g in zip(ours.trainable, results, strict=True) if g is not None}
        return pulled | dict(zip(labels[len(ours.trainable) :], grads[count:], strict=True))


def _tensor(array: np.ndarray) -> torch.Tensor:
    if array.dtype.kind == "V" or array.dtype.name == "bfloat16":
        return torch.from_numpy(array.astype(np.float32)).to(torch.bfloat16)
    return torch.from_numpy(array)


def traced(ours: TorchSide, engine: str) -> JaxSide:
    """The torch function itself, traced by an engine."""
    if engine == "torch2jax" and ours.module is not None:  # it cannot take a module's parameters as arguments
        given, high = copy.deepcopy(ours.module), copy.deepcopy(ours.module).double()

        def captured(_: Any, args: Any) -> Any:
            wide = any(leaf.dtype in (jnp.float64, jnp.complex128) for leaf in jax.tree.leaves(args))
            return as_jax(high if wide else given, "torch2jax")(*to_jax_tree(args))

        return JaxSide(engine, captured, lambda state, high: {}, [], {})

    def torch_fun(state: State, args: Any) -> Any:
        return ours.call(state, args)

    fun = as_jax(torch_fun, engine)  # type: ignore[arg-type]
    # Dicts keep their order, and containers that only torch knows come back, without the detour through JAX's own.
    call = lambda parameters, args: fun(to_jax_tree(parameters), to_jax_tree(args))
    made_of = {name: name for name in ours.trainable}
    return JaxSide(engine, call, lambda state, high: dict(state), list(ours.trainable), made_of)


def port(ours: TorchSide, jax_fun: Callable[..., Any], params: Any, mapping: Mapping[str, Entry] | None) -> JaxSide:
    """The caller's JAX function with its parameters.

    Raises:
        Unmapped: leaves of the parameters and the state dict do not match; with the side, if it can run all the same.
    """
    if params is None and any(is_parameter(leaf) for leaf in jax.tree.leaves(jax_fun)):
        params, jax_fun = jax_fun, lambda module, *args: module(*args)
    if params is None:
        return JaxSide("jax", lambda _, args: jax_fun(*args), lambda state, high: {}, [], {})
    full = ours.full({name: tensor.detach() for name, tensor in ours.state.items()})
    proposed = mapping is None
    entries = dict(mappings.propose_mapping(full, params) if mapping is None else mapping)
    wrong = mappings.problems(entries, full, params)
    bad = {path for path in entries if any(repr(path) in text for text in wrong)}
    entries = {path: entry for path, entry in entries.items() if path not in bad}
    leaves, structure = jax.tree.flatten(params)
    paths = [path for path, _ in leaf_paths(params)]
    values = dict(zip(paths, leaves, strict=True))
    given = {p: v for p, v in values.items() if is_parameter(v) and not isinstance(v, jax.ShapeDtypeStruct)}
    empty = [p for p, v in values.items() if isinstance(v, jax.ShapeDtypeStruct) and p not in entries]

    def parameters(state: State, high: bool) -> dict[str, Any]:
        filled = mappings.apply({p: e for p, e in entries.items() if p not in given}, ours.full(state))
        own = {p: cast(_tensor(as_numpy(v)), high) for p, v in given.items()}
        return {p: (own | filled)[p] for p in paths if p in own or p in filled}

    def call(parameters: dict[str, Any], args: Any) -> Any:
        return jax_fun(structure.unflatten([parameters.get(p, values[p]) for p in paths]), *args)

    side = JaxSide("jax", call, parameters, list(entries), entries, given)
    if wrong or empty:
        how = ["the mapping was proposed from shapes and names: pass mapping= to say what belongs together"]
        raise Unmapped([*wrong, *(how if proposed else [])], None if empty else side)
    return side
