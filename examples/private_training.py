"""A training loop with per-example clipping and noise (DP-SGD), in Opacus and in microtome, side by side.

``python examples/private_training.py`` (``--help`` lists the options). The two loops differ in the marked lines.
Without noise they compute the same steps; where Opacus is not installed, the example runs microtome alone.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
import warnings
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from microtome import torch_api as mt


def network() -> nn.Module:
    layers = nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool2d(2)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(256, 10))


def train_with_opacus(options: argparse.Namespace, data: TensorDataset) -> nn.Module:
    from opacus import PrivacyEngine  # (1)

    torch.manual_seed(0)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=options.learning_rate)
    loader = DataLoader(data, batch_size=options.batch_size)
    model, optimizer, loader = PrivacyEngine().make_private(  # (2)
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        noise_multiplier=options.noise_multiplier,
        max_grad_norm=options.max_grad_norm,
        poisson_sampling=False,
    )
    for _ in range(options.epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()  # (3)
            optimizer.step()
    return model._module


def train_with_microtome(options: argparse.Namespace, data: TensorDataset) -> nn.Module:
    torch.manual_seed(0)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=options.learning_rate)
    loader = DataLoader(data, batch_size=options.batch_size)
    backward = mt.clipped_backward(  # (2)
        model,
        lambda model, images, labels: F.cross_entropy(model(images), labels),
        noise_multiplier=options.noise_multiplier,
        max_grad_norm=options.max_grad_norm,
        expected_batch_size=options.batch_size,
    )
    for _ in range(options.epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            backward(images, labels)  # (3)
            optimizer.step()
    return model


def accuracy(model: nn.Module, data: TensorDataset) -> float:
    images, labels = data.tensors
    with torch.no_grad():
        return float((model(images).argmax(1) == labels).float().mean())


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=1024)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--learning-rate", type=float, default=1.0)
    parser.add_argument("--max-grad-norm", type=float, default=1.0)
    parser.add_argument("--noise-multiplier", type=float, default=0.0, help="0 compares the two loops step by step")
    options = parser.parse_args(arguments)
    images, labels = load_digits(return_X_y=True)
    count = options.examples // options.batch_size * options.batch_size
    data = TensorDataset(
        torch.tensor(images[:count] / 16, dtype=torch.float32).reshape(-1, 1, 8, 8), torch.tensor(labels[:count])
    )
    loops = {"microtome": train_with_microtome}
    if importlib.util.find_spec("opacus") is not None:
        loops = {"opacus": train_with_opacus} | loops
    trained = {}
    for name, loop in loops.items():
        start = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Opacus warns of its random generator, and torch of Opacus's hooks
            trained[name] = loop(options, data)
        seconds = time.perf_counter() - start
        print(f"{name:10s} {seconds:6.1f} s, accuracy on what it was trained on {accuracy(trained[name], data):.1%}")
    if len(trained) == 2 and not options.noise_multiplier:
        pairs = zip(*(model.parameters() for model in trained.values()), strict=True)
        difference = max(float((a - b).detach().abs().max()) for a, b in pairs)
        print(f"largest difference between the two trained models {difference:.1e}")
    print("Neither loop computes an epsilon here: that needs an accountant and Poisson sampling.")


if __name__ == "__main__":
    main(sys.argv[1:])
