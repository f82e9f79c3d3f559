"""Modules that several processes share: hooks fire where they would in torch, and what would miss them is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from helpers import printed_by

_RANK = """
import sys
import torch
from torch import nn
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from microtome import torch_api as mt

rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


class Net(nn.Module):
    def __init__(self, wrap):
        super().__init__()
        self.net = net()
        self.wrapped = [wrap(self.net)]  # in a list, so that it is no submodule a second time

    def forward(self, x):
        return self.wrapped[0](x)


def data(rank):
    return torch.randn(6, 3, generator=torch.Generator().manual_seed(rank))


def square(net):
    return lambda x: net(x).pow(2).mean()


wraps = {
    "as_torch": lambda net: mt.as_torch(mt.as_jax(square(net))),
    "microbatch": lambda net: mt.microbatch(square(net), 0, 2, mt.AccumulationType.MEAN),
    "chunked_vmap": lambda net: lambda x: mt.chunked_vmap(square(net), 4)(x).mean(),
}
for name, wrap in wraps.items():
    module = Net(wrap)
    parallel = DistributedDataParallel(module)
    for step in range(2):  # the second with what DDP has learnt of the order of gradients
        module.zero_grad()
        parallel(data(rank)).backward()
    plain = net()
    for r in range(2):
        (square(plain)(data(r)) / 2).backward()
    for ours, eager in zip(module.net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, eager.grad)
    assert any(p.grad.abs().max() > 1e-3 for p in module.net.parameters())
    print(name)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_two_processes_end_with_the_mean_of_their_gradients(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error::UserWarning", "-c", _RANK]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store")], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    for process in ranks:
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
        assert out.split() == ["as_torch", "microbatch", "chunked_vmap"]


_SHARED = """
import sys, warnings
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import distribute_module
from torch.nn.parallel import DistributedDataParallel
from microtome import torch_api as mt

warnings.simplefilter("ignore")
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
net = lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
x = torch.ones(2, 3)


def sharded():
    module = net()
    fully_shard(module, mesh=mesh)
    return module


def backward(model, loss=lambda model, x: model(x).sum()):
    mt.clipped_backward(model, loss, max_grad_norm=1.0)(x)


shared = [
    (DistributedDataParallel(net()), "DistributedDataParallel"),
    (FullyShardedDataParallel(net(), device_id=torch.device("cpu")), "FullyShardedDataParallel"),
    (sharded(), ("DTensor", "FSDPSequential")),
    (distribute_module(net(), mesh), "DTensor"),
]
for model, names in shared:
    around = nn.Sequential(model, nn.Tanh())
    plain = nn.Linear(3, 1)
    captured = lambda plain, x: plain(x).sum() + model(x).sum()
    for refused in (lambda: backward(model), lambda: backward(around), lambda: backward(plain, captured)):
        try:
            refused()
        except ValueError as error:
            assert str(error).startswith(names) and "all_reduce" in str(error), error
        else:
            raise AssertionError(names)
    assert all(p.grad is None for p in around.parameters())
dist.destroy_process_group()
print("refused")
"""


def test_clipped_gradients_of_shared_modules_are_refused_by_name(tmp_path: Path) -> None:
    assert printed_by(_SHARED, str(tmp_path / "store")).split() == ["refused"]
