"""The rules by which torch's autograd gives further derivatives: a function's products with J and with its transpose.

Both are torch functions, which are recorded in their turn. What a user's own backward pass does is not always
differentiable: under ``no_grad`` (``once_differentiable``) or after ``detach`` its derivative is lost, and where it
clamps, or a hook changes what passes, it is no transpose of a Jacobian. torch raises there or would give another
number, so such derivatives are refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch.autograd import forward_ad

from ..base import torch_internals as ti
from ..base.errors import NoForwardMode, TraceError, user_line
from ..record.captured import recording
from ..record.nodes import OF_FORM, Node, Ref
from ..record.recorder import Barrier, Recorder

Tensors: TypeAlias = Sequence[torch.Tensor]
TensorFunction: TypeAlias = Callable[..., Tensors]

# Ops whose result takes only its form from a tensor argument.
_FORM_ONLY = OF_FORM | {"aten.fill", "aten.zero"}
# Backward ops that take from an argument its form only: the op, and the place of the argument.
_FORM_ARGUMENT = {
    f"aten.{name}_backward": 1
    for name in (
        *("avg_pool2d", "avg_pool3d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "masked_scatter"),
        *(f"{kind}_pad{n}d" for kind in ("replication", "reflection") for n in (1, 2, 3)),
    )
}
# Ops whose derivative is zero where they have one.
_FLAT = frozenset(f"aten.{name}" for name in ("sign", "sgn", "round", "floor", "ceil", "trunc", "heaviside"))


def with_captured(
    fun: TensorFunction, count: int, captured: Sequence[torch.Tensor], mutated: set[int], *inputs: torch.Tensor
) -> Tensors:
    """Call ``fun`` with the captured tensors replaced by inputs, copies of those that it writes to."""
    # Buffers are written once, by the function itself, and not by its derivatives.
    inputs = tuple(t.clone() if i in mutated else t for i, t in enumerate(inputs))
    swaps = dict(zip(map(id, captured), inputs[count:], strict=True))
    substitution = ti.Substitution(swaps)
    with substitution, ti.entering_functorch(substitution.swap):
        return [swaps.get(id(output), output) for output in fun(*inputs[:count])]


def _tracked(inputs: Sequence[torch.Tensor], need: Sequence[bool]) -> list[torch.Tensor]:
    return [x if not n or x.requires_grad else x.detach().requires_grad_() for x, n in zip(inputs, need, strict=True)]


def vjp_rule(
    fun: TensorFunction, inputs: Tensors, cotangents: Tensors, need: Sequence[bool], moving: Sequence[int]
) -> Tensors:
    """Compute Jᵀ c for the inputs that are needed."""
    inputs = _tracked(inputs, need)
    wanted = [x for x, n in zip(inputs, need, strict=True) if n]
    outputs = fun(*inputs)
    pairs = [(outputs[i], c) for i, c in zip(moving, cotangents, strict=True) if outputs[i].requires_grad]
    if not pairs:
        return [torch.zeros_like(x) for x in wanted]
    flow = _Flow([c for _, c in pairs])
    found = torch.autograd.grad(
        [o for o, _ in pairs], wanted, [c for _, c in pairs], create_graph=True, allow_unused=True
    )
    line = flow.untracked(found, only_no_grad=True)
    if line is not None:
        raise TraceError(
            f"{line}: a backward pass runs without autograd (once_differentiable, no_grad), and a second derivative "
            "was asked for, which torch refuses too. Write it in ops that autograd records."
        )
    return [torch.zeros_like(x) if g is None else g for x, g in zip(wanted, found, strict=True)]


def jvp_rule(
    fun: TensorFunction, inputs: Tensors, tangents: Tensors, need: Sequence[bool], moving: Sequence[int]
) -> Tensors:
    """Compute J t as the derivative of the linear u -> Jᵀu: every op that torch can differentiate twice has it."""
    inputs = _tracked(inputs, need)
    wanted = [x for x, n in zip(inputs, need, strict=True) if n]
    found_outputs = fun(*inputs)
    outputs = [found_outputs[i] for i in moving]
    live = [o for o in outputs if o.requires_grad]
    if _has_own_jvp(live):
        with contextlib.suppress(RuntimeError):  # an op without forward mode; a gradient in a dual number
            return _pushed_forward(fun, inputs, tangents, need, moving)
    cotangents = [torch.zeros_like(o, requires_grad=True) for o in live]
    flow = _Flow(cotangents)
    found = torch.autograd.grad(live, wanted, cotangents, create_graph=True, allow_unused=True) if live else ()
    _refuse(flow.hooked() or flow.untracked(found))
    pairs = [(g, t) for g, t in zip(found, tangents, strict=False) if g is not None and g.requires_grad]
    if not pairs:
        return [torch.zeros_like(o) for o in outputs]
    try:
        pulled = torch.autograd.grad(
            [g for g, _ in pairs], cotangents, [t for _, t in pairs], create_graph=True, allow_unused=True
        )
    except RuntimeError as error:
        if "is not implemented" not in str(error):
            raise
        raise NoForwardMode(
            f"{user_line()}: forward mode (jvp, jacfwd, hessian, linearize) through an op that torch differentiates "
            f'only once ({error}). Use reverse mode (vjp, jacrev, jacobian(mode="reverse")).'
        ) from error
    _refuse(flow.reaching(pulled))
    rest = iter(pulled)
    moved = [next(rest) if o.requires_grad else None for o in outputs]
    return [torch.zeros_like(o) if p is None else p for o, p in zip(outputs, moved, strict=True)]


def _refuse(line: str | None) -> None:
    if line is not None:
        raise NoForwardMode(
            f"{line}: forward mode (jvp, jacfwd, hessian, linearize) needs the derivative of a backward pass that has "
            "none, or that is not linear: once_differentiable, no_grad, detach or a clamp in the backward pass of a "
            "torch.autograd.Function, or a hook that changes a gradient. Use reverse mode (vjp, jacrev, "
            'jacobian(mode="reverse")), write that backward pass in ops that autograd records, or give the Function a '
            "jvp."
        )


def _has_own_jvp(outputs: Iterable[torch.Tensor]) -> bool:
    """Tell whether a user's Function that says itself how tangents move stands behind some output."""
    seen: set[torch.autograd.graph.Node] = set()
    stack = [o.grad_fn for o in outputs]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        function: Any = getattr(node, "_forward_cls", None)
        if function is not None and function.jvp is not torch.autograd.Function.jvp:
            return True
        stack.extend(following for following, _ in node.next_functions)
    return False


def _pushed_forward(
    fun: TensorFunction, inputs: Tensors, tangents: Tensors, need: Sequence[bool], moving: Sequence[int]
) -> Tensors:
    """Compute J t by torch's own forward mode, which has one level."""
    current = recording()
    if current is None or current.recorder.pushes_forward:
        raise NoForwardMode(f"{user_line()}: forward mode over forward mode, through a Function with a jvp of its own.")
    current.recorder.pushes_forward = True
    rest = iter(tangents)
    # The tensors of a recording are no dual numbers of the caller's: its level is as good as a new one.
    with forward_ad.dual_level() if forward_ad._current_level < 0 else contextlib.nullcontext():
        outputs = fun(*(forward_ad.make_dual(x, next(rest)) if n else x for x, n in zip(inputs, need, strict=True)))
        moved = [forward_ad.unpack_dual(outputs[i]) for i in moving]
        return [torch.zeros_like(primal) if tangent is None else tangent for primal, tangent in moved]


class _Flow:
    """What becomes of the cotangents in a backward pass: what the recording shows, against what autograd says."""

    def __init__(self, cotangents: Sequence[torch.Tensor]) -> None:
        current = recording()
        assert current is not None  # derivatives are computed while they are recorded
        self.recorder: Recorder = current.recorder
        self.sources = {node for node in map(self.recorder.node_of, cotangents) if node is not None}
        self.cuts, self.hooks = len(self.recorder.cuts), len(self.recorder.hooked)

    def hooked(self) -> str | None:
        """Return the line of a hook that changed what passed."""
        return next(iter(self.recorder.hooked[self.hooks :]), None)

    def untracked(self, gradients: Sequence[torch.Tensor | None], only_no_grad: bool = False) -> str | None:
        """Return the line where gradients are made from the cotangents behind the back of autograd."""
        made = _made_from(self.recorder, self.sources)
        cuts = {
            cut.node: cut.line
            for cut in self.recorder.cuts[self.cuts :]
            if cut.node in made and (cut.without_grad or not only_no_grad)
        }
        if not only_no_grad:
            own = made & self.recorder.in_backward
            cuts |= {node: self.recorder.line_of(node) for node in own if self._is_flat(node)}
        nodes = {node for g in gradients if g is not None and (node := self.recorder.node_of(g)) is not None}
        if cuts and not nodes.isdisjoint(_made_from(self.recorder, set(cuts))):
            return next(iter(cuts.values()))
        lost = [g for g in gradients if g is not None and not g.requires_grad and self.recorder.node_of(g) in made]
        return user_line() if lost and not only_no_grad else None

    def _is_flat(self, index: int) -> bool:
        """Tell whether a result does not move with what it is made from, by little steps."""
        node = self.recorder.nodes[index]
        if node is None:
            return False
        whole = all(meta is None or not meta.differentiable for meta in node.results)
        return whole or (
            ti.op_name(node.op) in _FLAT and not any(m is not None and m.dtype.is_complex for m in node.results)
        )

    def reaching(self, tensors: Sequence[torch.Tensor | None]) -> str | None:
        """Return the line of an op by which a tensor is made of the cotangents, if a user's backward pass had them.

        torch's own backward passes are linear, also where they are not written so (``matrix_exp``).
        """
        made = _made_from(self.recorder, self.sources)
        if made.isdisjoint(self.recorder.in_backward):
            return None
        for tensor in tensors:
            node = None if tensor is None else self.recorder.node_of(tensor)
            if node in made:
                return self.recorder.line_of(node)
        return None


def _made_from(recorder: Recorder, sources: set[int]) -> set[int]:
    """Return the nodes whose values depend on those of some nodes."""
    found = set(sources)
    for i in range(min(sources, default=len(recorder.nodes)), len(recorder.nodes)):
        node = recorder.nodes[i]
        if node is None or i in found or ti.op_name(node.op) in _FORM_ONLY:
            continue
        if not found.isdisjoint(_read_by(node)):
            found.add(i)
    return found


def _read_by(node: Node) -> Iterable[int]:
    """Return the nodes whose values a node reads."""
    name = ti.op_name(node.op)
    if isinstance(node.op, Barrier):  # the last is waited for, not read
        return (leaf.node for leaf in node.leaves[:-1] if isinstance(leaf, Ref))
    if name != "aten.copy" and name != "aten.convolution_backward" and name not in _FORM_ARGUMENT:
        return node.refs()
    args = list(node.spec.unflatten(node.leaves)[0])
    if name == "aten.copy":
        args[0] = None
    elif name == "aten.convolution_backward":  # the input for the weight's gradient, and the other way round
        for place, wanted in ((1, args[-1][1]), (2, args[-1][0])):
            args[place] = args[place] if wanted else None
    else:
        args[_FORM_ARGUMENT[name]] = None
    return (arg.node for arg in args if isinstance(arg, Ref))
