"""How the torch side of a comparison runs: in another precision, with given dropout masks, watched for its dtypes."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as torch_pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ...jax_impl.program.trees import PyTree
from .programs import Mask

_FACTORIES = {torch.zeros, torch.ones, torch.full, torch.empty, torch.eye, torch.linspace, torch.logspace, torch.arange}
_FACTORIES |= {torch.tensor, torch.as_tensor, torch.scalar_tensor, torch.rand, torch.randn}
_DRAWS = ("bernoulli_", "bernoulli", "native_dropout")
# Operations that move numbers, or make exact ones, and so never round.
_MOVES = frozenset(
    re.findall(
        r"\w+",
        """
    _unsafe_view alias arange as_strided cat clone constant_pad_nd copy_ detach empty empty_like empty_strided expand
    expand_as eye fill fill_ flip full full_like gather index index_put index_select lift_fresh masked_fill
    masked_fill_ narrow new_empty new_full new_ones new_zeros ones ones_like permute repeat reshape roll scalar_tensor
    select slice split split_with_sizes squeeze stack t transpose tril triu unbind unsqueeze view where zero_ zeros
    zeros_like neg abs sign maximum minimum clamp max min amax amin bernoulli bernoulli_ sort
""",
    )
)


class Widened(TorchFunctionMode):
    """A mode that makes a function's other tensors float64, as its arguments are.

    Those are the ones that it creates without naming a dtype, and, where torch does not promote by itself (products of
    matrices), those that it captured.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: PyTree = (), kwargs: PyTree = None
    ) -> object:
        kwargs = kwargs or {}
        try:
            made = func(*args, **kwargs)
        except RuntimeError:
            written = args[0] if args and getattr(func, "__name__", "").endswith("_") else None
            tensors = [x for x in torch_pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
            if {torch.float32, torch.float64} - {x.dtype for x in tensors} or _bytes(written) == 4:
                raise
            args, kwargs = torch_pytree.tree_map_only(torch.Tensor, _widened, (args, kwargs))
            return func(*args, **kwargs)
        if func in _FACTORIES and kwargs.get("dtype") is None and made.dtype == torch.get_default_dtype():
            return func(*args, **{**kwargs, "dtype": torch.float64})
        return made


class Draws(TorchDispatchMode):
    """A mode that gives dropout the JAX function's masks, or else the masks of this object's first run again.

    Attributes:
        count: the masks asked for in this run.
        others: random operations that are no dropout.
        remarks: what does not fit together.
    """

    def __init__(self, masks: Sequence[Mask] = ()) -> None:
        super().__init__()
        self.given, self.made = list(masks), list[torch.Tensor]()
        self.count, self.others, self.remarks = 0, set[str](), list[str]()

    @contextlib.contextmanager
    def run(self) -> Iterator[None]:
        """Begin a run of the function, from the first mask."""
        self.count = 0
        with self:
            yield

    def __torch_dispatch__(
        self, func: torch._ops.OpOverload, types: object, args: PyTree = (), kwargs: PyTree = None
    ) -> object:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        if name not in _DRAWS:
            if torch.Tag.nondeterministic_seeded in func.tags:
                self.others.add(name)
            return func(*args, **kwargs)
        if name == "native_dropout":
            tensor, rate, training = (*args, True)[:3]
            if not training:
                return func(*args, **kwargs)
            mask = self._mask(tensor, 1 - rate, func)
            return tensor * mask / (1 - rate), mask
        keep = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
        if isinstance(keep, torch.Tensor) or "Tensor" in func._overloadname or (name == "bernoulli" and len(args) == 1):
            self.others.add(name)
            return func(*args, **kwargs)
        mask = self._mask(args[0], float(keep), func)
        return args[0].copy_(mask) if name == "bernoulli_" else mask.to(args[0].dtype)

    def _mask(self, like: torch.Tensor, keep: float, func: object) -> torch.Tensor:
        """Return the next mask, True for what is kept."""
        place, self.count = self.count, self.count + 1
        if place < len(self.given):
            drawn = self.given[place]
            values = torch.from_numpy(drawn.values.copy()).to(like.device)
            if drawn.probability is not None and abs(drawn.probability - keep) > 1e-6:
                if abs(drawn.probability - (1 - keep)) <= 1e-6:
                    values = ~values  # JAX drew what is dropped
                else:
                    self._say(f"dropout {place}: torch keeps {keep:.6g} of the values, JAX {drawn.probability:.6g}")
            if values.numel() == like.numel():
                return values.reshape(like.shape)
            self._say(
                f"dropout {place}: torch draws a mask of shape {list(like.shape)}, JAX one of {list(values.shape)}"
            )
        elif self.given:
            self._say(f"torch draws {place + 1} dropout masks or more, JAX {len(self.given)}")
        while len(self.made) <= place:
            self.made.append(torch.empty(0))
        if self.made[place].shape != like.shape or not like.numel():
            self.made[place] = torch.rand(like.shape, device=like.device) < keep
        return self.made[place]

    def _say(self, remark: str) -> None:
        if remark not in self.remarks:
            self.remarks.append(remark)


class Watching(TorchDispatchMode):
    """A mode that notes the dtypes coarser than float64 in which a function computes."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, str] = {}

    def __torch_dispatch__(
        self, func: torch._ops.OpOverload, types: object, args: PyTree = (), kwargs: PyTree = None
    ) -> object:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if name not in _MOVES:
            wide = any(_bytes(x) >= 8 for x in args if isinstance(x, torch.Tensor))
            for tensor in out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(tensor, torch.Tensor) and 0 < _bytes(tensor) < 8 and (name != "_to_copy" or wide):
                    self.found.setdefault(str(tensor.dtype).removeprefix("torch."), name)
        return out


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.dtype == torch.float32 else tensor


def _bytes(tensor: torch.Tensor | None) -> int:
    """Return the size of a floating number of the tensor, 0 where it holds none."""
    if tensor is None or not (tensor.is_floating_point() or tensor.is_complex()):
        return 0
    return tensor.element_size() // (2 if tensor.is_complex() else 1)


@dataclasses.dataclass(frozen=True)
class Seen:
    """A tensor as it was when a module was called, and its place in autograd's graph.

    Attributes:
        value: the tensor.
        node: its node in the graph, None without one.
        learned: whether a parameter reaches it.
        tolerance: the error, relative to its largest number, up to which a value of JAX's is the same.
    """

    value: torch.Tensor
    node: Node | None
    learned: bool = True
    tolerance: float = 1e-10


@dataclasses.dataclass(frozen=True)
class ModuleCall:
    """One call of a submodule."""

    name: str
    module: torch.nn.Module
    inputs: list[Seen]
    outputs: list[Seen]


class Recorded:
    """The calls of a model's submodules, in the order in which they finish: a child's before its parent's."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.calls: list[ModuleCall] = []
        self._model = model

    @contextlib.contextmanager
    def run(self) -> Iterator[None]:
        """Record what runs inside."""
        handles = []
        for name, module in self._model.named_modules():
            started: list[list[Seen]] = []
            # The inputs are read before the call: a module that works in place has overwritten them after it.
            before = lambda module, args, kwargs, s=started: s.append(_seen((args, kwargs)))
            after = lambda module, args, kwargs, out, s=started, n=name: self.calls.append(
                ModuleCall(n, module, s.pop(), _seen(out))
            )
            handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            handles.append(module.register_forward_hook(after, with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _seen(tree: PyTree) -> list[Seen]:
    leaves = torch_pytree.tree_leaves(tree)
    return [Seen(x.detach().clone(), _node(x)) for x in leaves if isinstance(x, torch.Tensor)]


def _node(tensor: torch.Tensor) -> Node | None:
    """Return the tensor's node in autograd's graph; of a leaf, the one that gathers its gradient."""
    if tensor.grad_fn is None and tensor.requires_grad and torch.is_grad_enabled():
        return tensor.view_as(tensor).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    return tensor.grad_fn


def before(nodes: Iterable[Node | None]) -> set[Node]:
    """Return these nodes of autograd's graph and all that they were computed from."""
    reached: set[Node] = set()
    waiting = [node for node in nodes if node is not None]
    while waiting:
        node = waiting.pop()
        if node not in reached:
            reached.add(node)
            waiting += [following for following, _ in node.next_functions if following is not None]
    return reached


def after(nodes: Iterable[Node | None], variables: Sequence[torch.Tensor]) -> set[Node]:
    """Return those of the nodes, and of the nodes before them, that were computed from the variables."""
    ids, following = set(map(id, variables)), dict[Node | None, list[Node]]()
    nodes = before(nodes)
    for node in nodes:
        for given, _ in node.next_functions:
            following.setdefault(given, []).append(node)
    reached: set[Node] = set()
    waiting = [node for node in nodes if id(getattr(node, "variable", None)) in ids]
    while waiting:
        node = waiting.pop()
        if node not in reached:
            reached.add(node)
            waiting += following.get(node, ())
    return reached
