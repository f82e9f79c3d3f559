"""The torch side of a comparison: results and derivatives of the eager function."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import jax
import numpy as np
import torch

from ...bridge.memory.trees import Structure, is_tensor, to_jax_tree, to_torch_tree
from ...jax_impl.program.trees import PyTree
from . import mapping as mappings
from .mapping import leaf_paths
from .runs import Draws, ModuleCall, Recorded, Watching, Widened, after

StateDict = dict[str, torch.Tensor]
Weights = list[np.ndarray | None]  # of each output leaf, None where it holds no floats

Positions: TypeAlias = int | Sequence[int] | None


def cast(tensor: torch.Tensor, high: bool) -> torch.Tensor:
    """Copy a tensor in the dtype of a run: float64, or as given, where float64 itself becomes float32."""
    dtype = tensor.dtype
    if dtype.is_floating_point:
        dtype = torch.float64 if high else torch.float32 if dtype == torch.float64 else dtype
    elif dtype.is_complex:
        dtype = torch.complex128 if high else torch.complex64
    return tensor.detach().to(dtype, copy=True)


def floats(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor holds real or complex floats."""
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

    call: Callable[[StateDict, PyTree], PyTree]
    module: torch.nn.Module | None
    state: StateDict
    aliases: dict[str, str]
    trainable: list[str]
    args: PyTree
    chosen: list[int]
    batch: list[int]

    @classmethod
    def of(
        cls,
        fun: Callable[..., PyTree],
        args: tuple[PyTree, ...],
        functional: bool,
        argnums: Positions,
        batch_argnums: Positions,
    ) -> TorchSide:
        """Take a module, a function of a dict of parameters and other arguments, or one of arguments alone."""
        module = fun if isinstance(fun, torch.nn.Module) else None
        first = 0
        if module is not None:
            state = dict(module.named_parameters()) | dict(module.named_buffers())
            canonical = {id(tensor): name for name, tensor in state.items()}
            aliases = {name: canonical[id(tensor)] for name, tensor in mappings.named_tensors(module).items()}
            call = lambda state, args: torch.func.functional_call(module, state, args)
            trainable = [name for name, p in module.named_parameters() if floats(p)]
        elif functional:
            if not args or not isinstance(args[0], dict) or not all(map(is_tensor, args[0].values())):
                raise TypeError(
                    "with params, a torch function that is no module must take its parameters first, as a dict from "
                    f"names to tensors; args[0] is a {type(args[0]).__name__ if args else 'nothing'}."
                )
            state, args, first = dict(args[0]), args[1:], 1
            aliases = {name: name for name in state}
            call = lambda state, args: fun(state, *args)
            trainable = [name for name, tensor in state.items() if floats(tensor)]
        else:
            state, aliases, trainable = {}, {}, []
            call = lambda state, args: fun(*args)
        numbers = _numbered(args)
        chosen = _positions("argnums", argnums, len(args), first)
        batch = _positions("batch_argnums", batch_argnums, len(args), first)
        leaves = [leaf for leaf in jax.tree.leaves(args) if is_tensor(leaf)]
        picked = range(len(leaves)) if chosen is None else [n for i in chosen for n in numbers[i]]
        rows = [n for i in batch or () for n in numbers[i]]
        lengths = {leaves[n].shape[0] if leaves[n].dim() else None for n in rows}
        if len(lengths) > 1 or None in lengths:
            raise ValueError(f"batch_argnums={batch_argnums}: batch arguments must have one length, got {lengths}.")
        if batch is not None and not rows:
            raise ValueError(f"batch_argnums={batch_argnums}: there is no tensor in these arguments.")
        return cls(call, module, state, aliases, trainable, args, [n for n in picked if floats(leaves[n])], rows)

    def tensors(self) -> list[torch.Tensor]:
        """Return all tensors of the state and the arguments."""
        return [*self.state.values(), *self.leaves()]

    def is_double(self) -> bool:
        """Tell whether float64 was given, so that a coarser dtype is no choice of the caller's."""
        return any(t.dtype in (torch.float64, torch.complex128) for t in self.tensors())

    def leaves(self) -> list[torch.Tensor]:
        """Return the tensors of the arguments."""
        return Structure.split(self.args, is_tensor)[0]

    def labels(self) -> list[str]:
        """Return the names of what is differentiated: parameters, then ``argument 0`` and so on."""
        paths = [path for path, leaf in leaf_paths(self.args) if is_tensor(leaf)]
        return [*self.trainable, *(f"argument {paths[n]}" for n in self.chosen)]

    def full(self, state: StateDict) -> StateDict:
        """Return the state under all its names."""
        return {name: state[canonical] for name, canonical in self.aliases.items()}

    def row(self, i: int) -> TorchSide:
        """Return this torch function with one example of the batch."""
        leaves, structure = Structure.split(self.args, is_tensor)
        cut = [leaf[i : i + 1] if n in self.batch else leaf for n, leaf in enumerate(leaves)]
        return dataclasses.replace(self, args=structure.join(cut))

    def rows(self) -> int:
        """Return the number of examples."""
        return int(self.leaves()[self.batch[0]].shape[0])

    # What torch computes

    def outputs(self, high: bool, draws: Draws) -> PyTree:
        """Compute the results, detached."""
        return to_torch_tree(jax.tree.map(_detached, self._run(high, draws)[0]))

    def calls(self, high: bool, draws: Draws) -> list[ModuleCall]:
        """Record the calls of the submodules."""
        assert self.module is not None
        recorded = Recorded(self.module)
        with recorded.run():
            _, variables = self._run(high, draws)
        seen = [s for call in recorded.calls for s in (*call.inputs, *call.outputs)]
        reached = after([s.node for s in seen], variables[: len(self.trainable)] or variables)
        mark = lambda each: [dataclasses.replace(s, learned=s.node in reached) for s in each]
        return [dataclasses.replace(c, inputs=mark(c.inputs), outputs=mark(c.outputs)) for c in recorded.calls]

    def coarse_dtypes(self, draws: Draws) -> dict[str, str]:
        """Return the dtypes coarser than float64 in which the float64 run computes, each with an operation."""
        watching = Watching()
        with watching:
            self._run(True, draws)
        return watching.found

    def gradient(self, high: bool, draws: Draws, weights: Weights) -> dict[str, torch.Tensor]:
        """Compute the gradient of the weighted outputs by label."""
        outputs, variables = self._run(high, draws)
        return dict(zip(self.labels(), _gradients(_torch_sum(outputs, weights), variables), strict=True))

    def hvp(
        self, high: bool, draws: Draws, weights: Weights, direction: Mapping[str, np.ndarray]
    ) -> dict[str, torch.Tensor]:
        """Compute the Hessian of the weighted outputs times a direction."""
        outputs, variables = self._run(high, draws)
        if any(v.is_complex() for v in variables):
            raise TypeError("Hessian-vector products of complex variables are not defined here.")
        first = _gradients(_torch_sum(outputs, weights), variables, create_graph=True)
        along = [torch.from_numpy(direction[label]).to(v) for label, v in zip(self.labels(), variables, strict=True)]
        slope = sum(((g * u).sum() for g, u in zip(first, along, strict=True)), torch.zeros((), requires_grad=True))
        return dict(zip(self.labels(), _gradients(slope, variables), strict=True))

    def row_gradients(self, high: bool, draws: Draws, weights: Weights) -> dict[str, torch.Tensor]:
        """Compute the gradients of each example, ``[batch, ...]`` each."""
        rows = [self.row(i).gradient(high, draws, weights) for i in range(self.rows())]
        return {label: torch.stack([row[label] for row in rows]) for label in self.labels()}

    def weights(self, draws: Draws, seed: int) -> Weights:
        """Draw random weights for each output."""
        generator = np.random.default_rng(seed)
        outputs = [x for _, x in leaf_paths(to_jax_tree(self.outputs(False, draws)))]
        moving = [torch.is_tensor(x) and floats(x) for x in outputs]
        return [generator.normal(size=tuple(x.shape)) if m else None for x, m in zip(outputs, moving, strict=True)]

    def row_weights(self, draws: Draws, seed: int) -> Weights:
        """Draw random weights for each output of one example."""
        return self.row(0).weights(draws, seed) if self.rows() else []

    def direction(self, seed: int) -> dict[str, np.ndarray]:
        """Draw a random direction in the space of what is differentiated."""
        generator, leaves = np.random.default_rng(seed + 1), self.leaves()
        shapes = [*(self.state[n].shape for n in self.trainable), *(leaves[n].shape for n in self.chosen)]
        return {label: generator.normal(size=tuple(s)) for label, s in zip(self.labels(), shapes, strict=True)}

    def _run(self, high: bool, draws: Draws) -> tuple[PyTree, list[torch.Tensor]]:
        """Compute the results, part of autograd; return them and the variables that they depend on."""
        state = {name: cast(tensor, high) for name, tensor in self.state.items()}
        given, structure = Structure.split(self.args, is_tensor)
        leaves = [cast(leaf, high) for leaf in given]
        variables = [*(state[name] for name in self.trainable), *(leaves[n] for n in self.chosen)]
        for variable in variables:
            variable.requires_grad_()
        with torch.enable_grad(), Widened() if high else contextlib.nullcontext(), draws.run():
            # A function may work in place on its arguments, which autograd allows on anything but its leaves.
            args = to_torch_tree(structure.join([leaf.clone() for leaf in leaves]))
            return to_jax_tree(self.call(state, args)), variables


def _detached(leaf: PyTree) -> PyTree:
    return leaf.detach() if is_tensor(leaf) else leaf


def _numbered(args: tuple[PyTree, ...]) -> list[list[int]]:
    """Return the numbers of the tensors of each argument."""
    numbers, count = [], 0
    for arg in args:
        held = sum(map(is_tensor, jax.tree.leaves(arg)))
        numbers.append(list(range(count, count + held)))
        count += held
    return numbers


def _positions(name: str, value: Positions, count: int, first: int) -> list[int] | None:
    """Return the positions among the arguments that follow the parameters."""
    if value is None:
        return None
    listed = [value] if isinstance(value, int) else list(value)
    total = count + first
    if any(not isinstance(i, int) or not -total <= i < total for i in listed):
        raise ValueError(f"{name} must be positions among {total} arguments, got {value!r}.")
    return [i % total - first for i in listed if i % total >= first]


def _torch_sum(outputs: PyTree, weights: Weights) -> torch.Tensor:
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
