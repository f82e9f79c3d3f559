"""The models of clipping_models.py as torch modules of the same sizes, in layers that Opacus knows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    """A transformer's layer, of linear layers."""

    def __init__(self, width: int = 128, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, t, width = x.shape
        q, k, v = (a.reshape(n, t, self.heads, -1).transpose(1, 2) for a in self.qkv(self.first(x)).chunk(3, -1))
        mixed = torch.softmax(q @ k.transpose(2, 3) / (width / self.heads) ** 0.5, -1) @ v
        x = x + self.out(mixed.transpose(1, 2).reshape(n, t, width))
        return x + self.down(F.gelu(self.up(self.second(x)), approximate="tanh"))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(1000, 128), nn.Embedding(32, 128)
        self.blocks, self.out = nn.ModuleList([Block(), Block()]), nn.Linear(128, 10, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.tokens(x) + self.places(torch.arange(x.shape[1]).expand(x.shape).contiguous())
        for block in self.blocks:
            h = block(h)
        return self.out(h.mean(1))


class Recurrent(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.out = layer, nn.Linear(128, 10, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.layer(x)[0][:, -1])


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20000, 64)
        self.hidden, self.out = nn.Linear(64, 128, bias=False), nn.Linear(128, 10, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.relu(self.hidden(self.embedding(x).mean(1))))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        widths = [(3, 16, 1), (16, 16, 1), (16, 32, 2), (32, 32, 1), (32, 64, 2), (64, 64, 1)]
        self.convs = nn.ModuleList([nn.Conv2d(i, o, 3, s, 1, bias=False) for i, o, s in widths])
        self.norms = nn.ModuleList([nn.GroupNorm(4, o) for _, o, _ in widths])
        self.out = nn.Linear(64, 10, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            h = torch.relu(norm(conv(x)))
            x = x + h if x.shape == h.shape else h
        return self.out(x.mean((2, 3)))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 10))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, 2, 3, bias=False), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 4, 2, 1, bias=False),
        nn.ReLU(), nn.Flatten(), nn.Linear(288, 32, bias=False), nn.ReLU(), nn.Linear(32, 10, bias=False),
    )  # fmt: skip


# name -> (module, a batch of its inputs)
MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any]]] = {
    "MLP": (mlp, lambda n: torch.randn(n, 256)),
    "CNN": (cnn, lambda n: torch.randn(n, 1, 28, 28)),
    "transformer": (Transformer, lambda n: torch.randint(1000, (n, 32))),
    "LSTM": (lambda: Recurrent(nn.LSTM(64, 128, batch_first=True)), lambda n: torch.randn(n, 32, 64)),
    "embedding": (Bag, lambda n: torch.randint(20000, (n, 64))),
    "ResNet": (ResNet, lambda n: torch.randn(n, 3, 32, 32)),
}


def _lstm_of_opacus() -> nn.Module:
    from opacus.layers import DPLSTM

    return Recurrent(DPLSTM(64, 128, batch_first=True))


# What Opacus needs other modules for: its hooks do not see into torch's LSTM.
OPACUS: dict[str, Callable[[], nn.Module]] = {"LSTM": _lstm_of_opacus}
