"""``backward()``, ``.grad`` and hooks in a traced function: for the tensors that it makes, and refused for others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ..base.errors import TraceError, refused_backward, user_line
from .captured import Captured, is_traced_tensor
from .recorder import Recorder

Hook = Callable[[torch.Tensor], torch.Tensor | None]


def fill_grads(
    captured: Captured,
    tensors: torch.Tensor | Sequence[torch.Tensor],
    grad_tensors: torch.Tensor | Sequence[torch.Tensor | None] | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    grad_variables: object = None,
    inputs: torch.Tensor | Sequence[torch.Tensor] | None = None,
) -> None:
    """Do what ``torch.autograd.backward`` does, for leaves that the function has made."""
    tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    leaves = list(_leaves(tensors) if inputs is None else [inputs] if isinstance(inputs, torch.Tensor) else inputs)
    if not leaves:
        raise RuntimeError(f"{user_line()}: no tensor from which backward() starts requires grad or has a grad_fn")
    with torch._C.DisableTorchFunction():
        for leaf in leaves:
            if any(leaf is argument for argument in captured.arguments):
                raise refused_backward("an argument")
            if captured.stand_in(leaf) is not leaf or any(leaf is t for t in captured.leaves.values()):
                raise refused_backward("a tensor that it captures")
    found = torch.autograd.grad(tensors, leaves, grad_tensors, retain_graph, create_graph, allow_unused=True)
    for leaf, gradient in zip(leaves, found, strict=True):
        with torch._C.DisableTorchFunction(), torch.no_grad():
            if gradient is None or leaf.retains_grad:  # which torch.autograd.grad fills in
                continue
            if leaf.grad is None or create_graph:
                leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient
            else:
                leaf.grad += gradient
            hooks: Any = leaf._post_accumulate_grad_hooks if leaf.is_leaf else None
        for hook in list((hooks or {}).values()):
            hook(leaf)


def refuse_grad(captured: Captured, tensor: torch.Tensor, how: str) -> None:
    """Refuse to read or write the ``.grad`` of what the call passes in or the function captures."""
    is_argument = any(tensor is argument for argument in captured.arguments)
    with torch._C.DisableTorchFunction():
        is_own = is_traced_tensor(tensor) or id(tensor) in captured.recorder.where
    if how == "reads" and not is_own:
        raise TraceError(
            f"{user_line()}: the function reads .grad of a tensor that it captures, which is another one at each "
            "call. Pass the gradient in as an argument."
        )
    if how == "writes" and (is_argument or not is_own):
        whose = "an argument" if is_argument else "a tensor that it captures"
        raise TraceError(
            f"{user_line()}: the function writes to .grad of {whose}, which a call does not repeat. Return the "
            "gradient, and assign it outside."
        )


def noting(recorder: Recorder, hook: Hook) -> Hook:
    """Return the hook, which is remembered where it changes a gradient."""
    line = user_line()

    def noted(gradient: torch.Tensor) -> torch.Tensor | None:
        result = hook(gradient)
        if result is not None and result is not gradient:
            recorder.hooked.append(line)
        return result

    return noted


def _leaves(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the leaves that a backward pass from the tensors goes to."""
    found: dict[int, torch.Tensor] = {}
    with torch._C.DisableTorchFunction():
        stack: list[Any] = [t.grad_fn for t in tensors]
        found.update((id(t), t) for t in tensors if t.grad_fn is None and t.requires_grad)
    seen: set[object] = {None}
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found[id(node.variable)] = node.variable
        stack += [following for following, _ in node.next_functions]
    return list(found.values())
