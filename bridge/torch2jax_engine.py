"""The second engine: torch2jax, which interprets torch functions on JAX tracers and lets JAX differentiate.

It shares nothing with the recorder, neither tracing nor lowerings nor derivatives, so that where both agree neither is
likely to be wrong. It knows far fewer ops (tanh in place of the exact GELU is one known difference), and is used only
where it is asked for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence

import jax
import torch

from .base import torch_internals as ti
from .base.errors import TraceError, user_line
from .record.nodes import Meta


class _Keys:
    """Random keys in the order in which they are asked for; the first one asks for the call's own key."""

    def __init__(self, make_key: Callable[[], jax.Array]) -> None:
        self.make_key, self.key = make_key, None

    def poop(self) -> jax.Array:  # the name that torch2jax calls
        self.key, drawn = jax.random.split(self.make_key() if self.key is None else self.key)
        return drawn


class InterpretedFunction:
    """A torch function run by torch2jax at every trace; the tensors that it captures are inputs."""

    mutated: Sequence[int] = ()
    moved: Collection[int] = ()

    def __init__(
        self, fun: Callable[..., Sequence[torch.Tensor]], metas: Sequence[Meta], captured: Sequence[torch.Tensor]
    ) -> None:
        self.fun, self.captured, self.count = fun, list(captured), len(metas)

    def call(self, make_key: Callable[[], jax.Array], arrays: Sequence[jax.Array]) -> list[jax.Array]:
        import torch2jax

        inputs = [torch2jax.Torchish(a) for a in arrays]
        stand_ins = dict(zip(map(id, self.captured), inputs[self.count :], strict=True))
        with (
            _named_refusal(),
            torch2jax.RngPooperContext(_Keys(make_key)),
            torch2jax.TorchishMode(),
            ti.Substitution(stand_ins),
        ):
            outputs = self.fun(*inputs[: self.count])
        if any(tensor.value is not array for tensor, array in zip(inputs, arrays, strict=True)):
            raise TypeError('engine="torch2jax" loses in-place updates of arguments and buffers; use engine="record"')
        return [
            o.value if isinstance(o, torch2jax.Torchish) else jax.numpy.asarray(o.detach().numpy()) for o in outputs
        ]


@contextlib.contextmanager
def _named_refusal() -> Iterator[None]:
    try:
        yield
    except NotImplementedError as error:
        raise TraceError(
            f'{user_line(error)}: engine="torch2jax" does not know what the function does there ({str(error)[:200]}); '
            'use engine="record"'
        ) from error
