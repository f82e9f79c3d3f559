"""One compilation of a JAX function for torch: the trace, its context, and the programs that come out of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.experimental.layout import Format, Layout

from .context import Call, running
from .trees import Structure, flatten, is_array, to_jax_tree
from .values import jax_device, jax_dtype, tensor_to_array
from .versions import enable_x64

Body = Callable[..., Any]
_KEY = jax.ShapeDtypeStruct((2,), "uint32")


class Trace:
    """The tensors, functions and JAX context of one compilation; nothing of it outlives that."""

    def __init__(self, body: Body, inputs: Sequence[torch.Tensor], count: int, device: torch.device) -> None:
        self.body, self.inputs, self.count = body, inputs, count
        self.call = Call({}, None, device)
        self.shape: Structure | None = None  # of the outputs
        self.moving: list[bool] = []
        where = jax.sharding.SingleDeviceSharding(jax_device(device))
        self.avals = [
            jax.ShapeDtypeStruct(
                t.shape, jax_dtype(t.dtype), sharding=where if order is None else _format(order, where)
            )
            for t, order in zip(inputs, map(memory_order, inputs), strict=True)
        ]

    def position(self, tensor: torch.Tensor) -> int:
        """Which input a captured tensor is."""
        return next(i for i, t in enumerate(self.inputs) if t is tensor and i >= self.count)

    def run(self, arrays: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Run the function on tracers: flat outputs, and the new values of buffers."""
        captured = zip(self.inputs[self.count :], arrays[self.count :], strict=True)
        self.call.tensors.update({id(t): a for t, a in captured})
        self.call.enter_body()
        outputs, self.shape = Structure.split(to_jax_tree(self.body(*arrays[: self.count])), is_array)
        return [jnp.asarray(x) for x in outputs], [v for _, v in self.call.mutations]

    def pull(self, need: tuple[bool, ...], key: Any, arrays: Sequence[Any]) -> Any:
        """``jax.vjp`` of the function in the inputs that ``need`` names."""
        self.call.key = key

        def run(*moving: Any) -> Any:
            rest = iter(moving)
            outputs, updates = self.run([next(rest) if n else a for n, a in zip(need, arrays, strict=True)])
            self.moving = [type(o) is type(moving[0]) for o in outputs]  # the others do not depend on ``moving``
            return outputs, updates

        return jax.vjp(run, *(a for n, a in zip(need, arrays, strict=True) if n), has_aux=True)

    def compile_forward(self) -> tuple[Any, ...]:
        """The program ``(key, *inputs) -> (outputs, updates of buffers, no residuals)``, in the form of the other."""

        def forward(key: Any, *arrays: Any) -> Any:
            self.call.key = key
            return *self.run(arrays), []

        with enable_x64(), running(self.call):
            lowered = jax.jit(forward).lower(_KEY, *self.avals)
            moving = [True] * len(lowered.out_info[0])
            return None if self.call.missing else lowered.compile(), [], moving, None

    def compile_backward(self, need: tuple[bool, ...]) -> tuple[Any, ...]:
        """(forward with residuals, the inputs among these, which outputs have gradients, backward)."""
        kept: list[Any] = []

        def forward(key: Any, *arrays: Any) -> Any:
            outputs, pull, updates = self.pull(need, key, arrays)
            leaves, treedef = flatten(pull)
            written = {self.position(t) for t, _ in self.call.mutations if not self.call.missing}
            # A residual that is an input is saved as the tensor, so that torch notices a write to it before backward.
            which = [next((i for i, a in enumerate(arrays) if a is leaf and i not in written), None) for leaf in leaves]
            kept[:] = [treedef, which]
            return outputs, updates, [leaf for leaf, i in zip(leaves, which, strict=True) if i is None]

        def backward(saved: Sequence[Any], residuals: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
            given, made = iter(saved), iter(residuals)
            pull = treedef.unflatten([next(made) if i is None else next(given) for i in which])
            return [jnp.conj(g) for g in pull(jax_cotangents(cotangents))]

        with enable_x64(), running(self.call):
            lowered = jax.jit(forward).lower(_KEY, *self.avals)
            treedef, which = kept
            saved = [i for i in which if i is not None]
            if self.call.missing:
                return None, saved, [], None
            outputs, _, residuals = lowered.out_info
            pulled = jax.jit(backward).lower([self.avals[i] for i in saved], residuals, outputs)
            return lowered.compile(), saved, self.moving, pulled.compile()


def memory_order(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """The order of the axes in memory that a program has to be compiled for; None for the usual one."""
    if tensor.layout is not torch.strided or tensor.is_contiguous():
        return None
    array: Any = tensor_to_array(tensor)
    order = tuple(array.format.layout.major_to_minor)
    return None if order == tuple(range(tensor.dim())) else order


def _format(order: tuple[int, ...], where: jax.sharding.Sharding) -> Format:
    return Format(Layout(order), where)


def is_differentiable(tensor: torch.Tensor) -> bool:
    """Whether torch would track gradients of the tensor."""
    return tensor.requires_grad and (tensor.is_floating_point() or tensor.is_complex())


def jax_cotangents(cotangents: Sequence[Any]) -> list[Any]:
    """JAX's cotangents: the conjugates of torch's, and none for integers."""
    return [
        jnp.conj(c) if jnp.issubdtype(c.dtype, jnp.inexact) else np.zeros(c.shape, jax.dtypes.float0)
        for c in cotangents
    ]


def common_device(tensors: Sequence[torch.Tensor]) -> torch.device:
    """The device on which a call runs; ValueError for tensors on several."""
    devices = {t.device for t in tensors}
    if len(devices) > 1:
        names = sorted(map(str, devices))
        raise ValueError(
            f"the tensors are on different devices ({', '.join(names)}); move them to one with .to(device)"
        )
    return devices.pop() if devices else torch.device("cpu")
