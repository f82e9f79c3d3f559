"""The Hessian of a small torch network before and after training: its spectrum, and what it takes to compute it.

``python examples/hessian_spectrum.py`` (``--help`` lists the options). The network is plain torch, given by
``torch.func.functional_call``. ``mt.hessian`` computes the matrix in blocks, into a tensor on the host, so that no more
than one block is ever on the device; ``mt.hvp`` multiplies by it without the matrix, and checks it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import nn

from microtome import torch_api as mt

Tensors = dict[str, torch.Tensor]


def load_data(examples: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Digits of 8 by 8 pixels, averaged to 4 by 4."""
    digits = load_digits()
    images = F.avg_pool2d(torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16, 2).flatten(1)
    chosen = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))[:examples]
    return images[chosen], torch.tensor(digits.target)[chosen]


def parameters(model: nn.Module) -> Tensors:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def train(model: nn.Module, images: torch.Tensor, labels: torch.Tensor, steps: int) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()


def full_hessian(loss: Callable[[Tensors], torch.Tensor], at: Tensors, batch_size: int) -> torch.Tensor:
    n = sum(p.numel() for p in at.values())
    matrix, _ = mt.hessian(loss, at, batch_size=batch_size, out=torch.empty(n, n), progress=True)
    return matrix


def largest_eigenvalue(loss: Callable[[Tensors], torch.Tensor], at: Tensors, steps: int = 100) -> float:
    """By the power method, which needs products alone (and finds the eigenvalue of largest magnitude)."""
    multiply = mt.hvp(loss, at)
    vector = torch.randn(sum(p.numel() for p in at.values()), generator=torch.Generator().manual_seed(0))
    value = 0.0
    for _ in range(steps):
        vector = vector / vector.norm()
        product = multiply(vector)
        value, vector = float(vector @ product), product
    return value


def plot(spectra: dict[str, torch.Tensor], output: Path) -> None:
    # A Figure of its own needs no display and leaves pyplot's state alone.
    figure = Figure(figsize=(6.4, 4.2), layout="constrained", dpi=150)
    axes = figure.subplots()
    for (name, values), style in zip(spectra.items(), ("C7-", "C0-"), strict=True):
        axes.plot(range(1, len(values) + 1), values.flip(0), style, label=name)
    axes.set_yscale("symlog", linthresh=1e-4)
    axes.set_xscale("log")
    axes.set_xlabel("rank")
    axes.set_ylabel("eigenvalue of the Hessian")
    axes.set_title("Spectrum of the loss of a small network")
    axes.grid(alpha=0.3)
    axes.legend()
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=32)
    parser.add_argument("--examples", type=int, default=500)
    parser.add_argument("--steps", type=int, default=300, help="training steps")
    parser.add_argument("--batch-size", type=int, default=64, help="columns of the Hessian at once")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("build/hessian_spectrum.png"), help="where the plot goes")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the example; 0 if the checks hold."""
    options = parse(argv)
    torch.manual_seed(options.seed)
    images, labels = load_data(options.examples, options.seed)
    model = nn.Sequential(nn.Linear(16, options.hidden), nn.Tanh(), nn.Linear(options.hidden, 10))

    def loss(params: Tensors) -> torch.Tensor:
        return F.cross_entropy(torch.func.functional_call(model, params, (images,)), labels)

    spectra, good = {}, True
    for name in ("before training", "after training"):
        at = parameters(model)
        matrix = full_hessian(loss, at, options.batch_size)
        spectra[name] = values = torch.linalg.eigvalsh((matrix + matrix.T) / 2)
        largest = values[values.abs().argmax()].item()
        asymmetry = ((matrix - matrix.T).abs().max() / matrix.abs().max()).item()
        found = largest_eigenvalue(loss, at)
        good = good and asymmetry < 1e-5 and abs(found - largest) < 0.02 * abs(largest)
        print(
            f"{name}: loss {loss(at):.4f}, Hessian {tuple(matrix.shape)}, asymmetry {asymmetry:.1e},\n"
            f"  largest eigenvalue {largest:.4f} (by products alone {found:.4f}), smallest {values[0]:.4f},\n"
            f"  {int((values.abs() > 0.01 * abs(largest)).sum())} of {len(values)} above 1% of the largest"
        )
        if name == "before training":
            train(model, images, labels, options.steps)
    plot(spectra, options.output)
    print(f"plotted in {options.output}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
