"""Importing and tracing leave torch, JAX and the process as they were."""

from __future__ import annotations

import pytest
from helpers import printed_by

_SNAPSHOT = """
import os, random, sys, warnings
import numpy as np
import torch, jax

def snapshot():
    modes = torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()
    return {
        "fast path": torch.backends.mha.get_fastpath_enabled(),
        "private backend": torch._C._get_privateuse1_backend_name(),
        "mkldnn": torch._C._get_mkldnn_enabled(),
        "environment": dict(os.environ),
        "config": {k: v for k, v in jax.config.values.items()},
        "default dtype": torch.get_default_dtype(),
        "grad": torch.is_grad_enabled(),
        "modes": modes,
        "torch rng": torch.get_rng_state().tolist(),
        "python rng": random.getstate(),
        "numpy rng": np.random.get_state()[1].tolist(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "validate": torch.distributions.Distribution._validate_args,
        "checkpoint": dict(vars(torch.utils.checkpoint)),
        "apply": vars(torch.utils.checkpoint.CheckpointFunction).get("apply"),
        "packet": torch._ops.OpOverloadPacket.__getattr__,
        "namespace": torch._ops._OpNamespace.__getattr__,
        "torchax": sorted(m for m in sys.modules if m.startswith("torchax")),
        "compiling": torch.compiler.is_compiling(),
        # torch loads sympy while it records, and sympy adds a filter for its own warnings alone.
        "filters": [f[:2] for f in warnings.filters if "sympy" not in f[2].__module__],
        "tensor": set(vars(torch.Tensor)),
    }
"""


def _run(code: str) -> str:
    return printed_by(_SNAPSHOT + code)


def test_importing_and_tracing_change_nothing() -> None:
    _run(
        """
import torch.utils.checkpoint
jax.devices()
before = snapshot()
import microtome, microtome.bridge, microtome.jax_impl, microtome.torch_api
from microtome import torch_api as mt
after_import = snapshot()
assert after_import == before, [k for k in before if before[k] != after_import[k]]
seeds = torch.manual_seed, torch.random.manual_seed  # two: torch._dynamo, which the import loads, wraps one
w = torch.ones(3, requires_grad=True)
mt.as_torch(mt.as_jax(lambda x: torch.tanh(x * w).sum()))(torch.ones(3)).backward()
try:
    mt.as_torch(mt.as_jax(lambda x: x if x.sum() > 0 else -x))(torch.ones(3))
except TypeError:
    pass
assert mt.as_torch(mt.as_jax(torch.tanh, engine="torch2jax"))(torch.ones(3)).shape == (3,)
with torch.random.fork_rng():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.5), torch.nn.BatchNorm1d(4))
port = lambda x: jax.numpy.tanh(x) * jax.random.bernoulli(jax.random.key(0), 0.5, (2, 4)).sum()
assert not mt.compare(model, port, torch.ones(2, 3), locate=True).agrees
assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
assert model[2].num_batches_tracked == 0
assert (torch.manual_seed, torch.random.manual_seed) == seeds
after = snapshot()
assert after == before, [k for k in before if before[k] != after[k]]
"""
    )


@pytest.mark.slow
def test_torchax_is_the_users_to_import() -> None:
    """On a torch that torchax cannot stand, it fails the same way with microtome loaded; else it does its own work."""
    attempt = """
try:
    import torchax
    print("imported", torch._C._get_privateuse1_backend_name())
except Exception as error:
    print(type(error).__name__, error)
"""
    trace = """
from microtome import torch_api as mt
mt.as_torch(mt.as_jax(torch.tanh))(torch.ones(3))
"""
    assert _run(attempt) == _run(trace + attempt)


@pytest.mark.slow
def test_a_forked_worker_loads_data_and_may_not_call() -> None:
    out = _run(
        """
import warnings
warnings.simplefilter("ignore")  # JAX warns of the fork itself
from microtome import torch_api as mt
f = mt.as_torch(mt.as_jax(lambda t: t + 1))
f(torch.ones(2))
class Plain(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, i): return torch.tensor(float(i))
print(sum(b.sum().item() for b in torch.utils.data.DataLoader(Plain(), num_workers=2)))
class Calls(Plain):
    def __getitem__(self, i): return f(torch.ones(2))
try:
    list(torch.utils.data.DataLoader(Calls(), num_workers=1))
except RuntimeError as error:
    print("forked after JAX had started" in str(error))
"""
    )
    assert out.split() == ["28.0", "True"]
