"""Train a convolutional network on handwritten digits with clipped and noised per-example gradients.

``make demo`` runs it, and so does ``python examples/private_digits.py`` (``--help`` lists the options). Everything but
the gradient is plain torch: the model, the DataLoader, the optimizer. ``mt.micro_grad`` clips the gradient of each
example to a norm and sums them, a microbatch at a time, so that the gradients of a whole batch never exist together.

At the end it compares the first step with ``torch.func``, and shows how the memory of the compiled step depends on the
size of a microbatch.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

from microtome import torch_api as mt

Tensors = dict[str, torch.Tensor]
# Largest relative error that the comparison with torch.func allows, by the precision of microtome's run.
BOUNDS = {torch.float32: 1e-5, torch.float64: 1e-10}


def make_model() -> nn.Module:
    # GroupNorm, where a model would often have BatchNorm: that one mixes the examples of a batch, so that the gradient
    # of a single example would mean nothing (and micro_grad refuses it).
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.GroupNorm(4, 16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False),
        nn.GroupNorm(4, 32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


def load_data(seed: int, examples: int | None) -> tuple[TensorDataset, TensorDataset]:
    """Four fifths of the 1797 digits to train on (the first of them, if ``examples`` says so), the rest held out."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    split = len(labels) * 4 // 5
    train, test = order[:split][:examples], order[split:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def parameters(model: nn.Module) -> Tensors:
    return dict(model.named_parameters())


def norm_of(grads: Tensors) -> torch.Tensor:
    return torch.stack([grad.norm() for grad in grads.values()]).norm()


def clipped_gradient(model: nn.Module, clip_norm: float, microbatch_size: int) -> Callable[..., tuple[Tensors, Any]]:
    """``(parameters, images, labels) -> (sum of the clipped gradients, aux)``; ``aux.metrics`` has the norms."""

    def loss(params: Tensors, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(torch.func.functional_call(model, params, (images,)), labels)

    def clip(grads: Tensors) -> Tensors:
        scale = (clip_norm / norm_of(grads)).clamp(max=1.0)
        return {name: grad * scale for name, grad in grads.items()}

    return mt.micro_grad(
        loss,
        batch_argnums=(1, 2),
        microbatch_size=microbatch_size,
        transform_fn=clip,
        metrics_fn=norm_of,
    )


class Training(NamedTuple):
    """What the training loop leaves behind."""

    first_batch: list[torch.Tensor]
    first_grads: Tensors
    seconds: list[float]
    clipped: int
    seen: int


def train(model: nn.Module, batches: Iterable[list[torch.Tensor]], total: int, options: argparse.Namespace) -> Training:
    gradient = clipped_gradient(model, options.clip_norm, options.microbatch_size)
    optimizer = torch.optim.Adam(model.parameters(), lr=options.learning_rate)
    generator = torch.Generator().manual_seed(options.seed)
    noise = options.noise_multiplier * options.clip_norm
    first_batch, first_grads, seconds, clipped, seen = [], {}, [], 0, 0
    progress = tqdm(batches, total=total, unit="step", desc="training")
    for images, labels in progress:
        start = time.perf_counter()
        with torch.no_grad():  # what is wanted is a gradient, not also its derivative
            grads, aux = gradient(parameters(model), images, labels)
            if not first_grads:
                first_batch, first_grads = [images, labels], grads
            noised = {
                name: (grad + noise * torch.randn(grad.shape, generator=generator)) / len(labels)
                for name, grad in grads.items()
            }
        mt.assign_grads(model, noised)
        optimizer.step()
        seconds.append(time.perf_counter() - start)
        clipped += int((aux.metrics > options.clip_norm).sum())
        seen += len(labels)
        progress.set_postfix(loss=f"{aux.values.mean().item():.3f}", clipped=f"{clipped / seen:.0%}")
    return Training(first_batch, first_grads, seconds, clipped, seen)


def repeat(loader: DataLoader[tuple[torch.Tensor, ...]], epochs: int) -> Iterable[list[torch.Tensor]]:
    for _ in range(epochs):
        yield from loader


def torch_gradient(model: nn.Module, images: torch.Tensor, labels: torch.Tensor, clip_norm: float) -> Tensors:
    """The same sum without microtome: all per-example gradients at once, clipped by hand."""

    def loss(params: Tensors, image: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(torch.func.functional_call(model, params, (image[None],)), label[None])

    with torch.no_grad():
        grads = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(parameters(model), images, labels)
        norms = torch.stack([grad.flatten(1).norm(dim=1) for grad in grads.values()]).norm(dim=0)
        scale = (clip_norm / norms).clamp(max=1.0)
        return {name: torch.tensordot(scale, grad, 1) for name, grad in grads.items()}


def relative_error(actual: Tensors, expected: Tensors) -> float:
    """Over all parameters, the largest ``max|actual - expected| / max|expected|``."""
    return max(
        ((actual[name].double() - value).abs().max() / value.abs().max()).item() for name, value in expected.items()
    )


def check(model: nn.Module, training: Training, options: argparse.Namespace) -> dict[torch.dtype, float]:
    """Errors of the first step's gradient; ``model`` is the one before that step."""
    images, labels = training.first_batch
    exact = copy.deepcopy(model).double()
    expected = torch_gradient(exact, images.double(), labels, options.clip_norm)
    with torch.no_grad():
        gradient = clipped_gradient(exact, options.clip_norm, options.microbatch_size)
        in_double, _ = gradient(parameters(exact), images.double(), labels)
    plain = relative_error(torch_gradient(model, images, labels, options.clip_norm), expected)
    errors = {
        torch.float32: relative_error(training.first_grads, expected),
        torch.float64: relative_error(in_double, expected),
    }
    print("\nClipped gradient of the first step against torch.func.vmap(grad) in float64, clipped by hand;")
    print("the largest error of any entry, relative to the largest entry of the same parameter:")
    for dtype, error in errors.items():
        verdict = "ok" if error < BOUNDS[dtype] else "FAILED"
        name = str(dtype).removeprefix("torch.")
        print(f"  microtome in {name}   {error:.1e}   (required: below {BOUNDS[dtype]:.0e}, {verdict})")
    print(f"  torch.func in float32  {plain:.1e}   (for comparison)")
    return errors


class Row(NamedTuple):
    """One size of microbatch."""

    size: int
    temporary: int  # bytes
    seconds: float  # for one call


def measure(model: nn.Module, training: Training, options: argparse.Namespace) -> list[Row]:
    """Compile the step for microbatches of 1, 4, 16, ... examples, up to the whole batch."""
    images, labels = training.first_batch
    whole = len(labels)
    sizes = sorted({*(4**k for k in range(whole.bit_length()) if 4**k < whole), whole})
    rows = []
    for size in tqdm(sizes, unit="size", desc="measuring memory"):
        gradient = clipped_gradient(model, options.clip_norm, size)
        args = parameters(model), images, labels
        with torch.no_grad():
            temporary = gradient.compiled(*args).memory_analysis().temp_size_in_bytes
            seconds = []
            for _ in range(4):
                start = time.perf_counter()
                gradient(*args)
                seconds.append(time.perf_counter() - start)
        rows.append(Row(size, temporary, min(seconds)))
    return rows


def report_memory(rows: Sequence[Row], model: nn.Module, output: Path) -> None:
    floor = sum(p.numel() * p.element_size() for p in model.parameters())
    whole = rows[-1].size
    print(f"\nMemory of the compiled step, {whole} examples ({floor / 1e3:.1f} kB is one gradient):")
    print("  microbatch   temporary memory   time of a call")
    for row in rows:
        print(f"  {row.size:10d}   {row.temporary / 1e3:13.1f} kB   {row.seconds * 1e3:11.1f} ms")
    output.parent.mkdir(parents=True, exist_ok=True)
    plot(rows, floor, output)
    print(f"  plotted in {output}")


def plot(rows: Sequence[Row], floor: int, output: Path) -> None:
    sizes, kilobytes = [row.size for row in rows], [row.temporary / 1e3 for row in rows]
    one, all_of_them = floor / 1e3, rows[-1].size * floor / 1e3
    # A Figure of its own needs no display and leaves pyplot's state alone.
    figure = Figure(figsize=(6.4, 4.2), layout="constrained", dpi=150)
    axes = figure.subplots()
    axes.loglog(sizes, kilobytes, "o-")
    for level, style, text, left in (
        (all_of_them, "C3:", f"the gradients of all {rows[-1].size} examples", True),
        (one, "C7--", "floor: one gradient", False),
    ):
        axes.axhline(level, color=style[:2], ls=style[2:])
        place = {"x": 0.02, "ha": "left"} if left else {"x": 0.98, "ha": "right"}
        axes.text(y=level * 1.1, s=text, color=style[:2], transform=axes.get_yaxis_transform(), **place)
    axes.set_ylim(min(one, *kilobytes) / 1.8, max(all_of_them, *kilobytes) * 2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}".replace(",", " "))
    axes.grid(alpha=0.3)
    axes.set_xlabel("microbatch size [examples]")
    axes.set_ylabel("peak temporary memory [kB]")
    axes.set_title(f"Clipped gradient of a batch of {rows[-1].size} digits, as compiled")
    figure.savefig(output)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    def positive(text: str) -> int:
        if int(text) < 1:
            raise ValueError
        return int(text)

    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--epochs", type=positive, default=20)
    parser.add_argument("--batch-size", type=positive, default=256)
    parser.add_argument("--microbatch-size", type=positive, default=32, help="examples whose gradients exist at once")
    parser.add_argument("--clip-norm", type=float, default=1.0, help="largest norm of an example's gradient")
    parser.add_argument("--noise-multiplier", type=float, default=1.0, help="noise, in units of the clip norm")
    parser.add_argument("--learning-rate", type=float, default=0.005)
    parser.add_argument("--examples", type=positive, default=None, help="use only so many training digits")
    parser.add_argument("--workers", type=int, default=2, help="processes that load data")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("build/private_digits.png"), help="where the plot goes")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the example; 0 if the gradients agree with torch's."""
    options = parse(argv)
    torch.manual_seed(options.seed)
    training_set, test_set = load_data(options.seed, options.examples)
    loader = DataLoader(
        training_set,
        batch_size=min(options.batch_size, len(training_set)),
        shuffle=True,
        drop_last=True,  # every step has the same shapes, so one program serves all
        num_workers=options.workers,
        persistent_workers=options.workers > 0,
    )
    # This forks the workers now, before anything runs in JAX. A process that is forked once JAX has started its threads
    # can hang, and JAX warns of it; persistent_workers keeps these workers, where each epoch would fork new ones.
    # A loader that has to start later takes multiprocessing_context="forkserver", whose workers come from a process
    # without threads.
    iter(loader)

    model = make_model()
    initial = copy.deepcopy(model)
    print(
        f"{len(training_set)} digits to train on, {len(test_set)} held out; "
        f"{sum(p.numel() for p in model.parameters())} parameters\n"
        f"{options.epochs} epochs of {len(loader)} steps with {loader.batch_size} examples, in microbatches of "
        f"{options.microbatch_size}; clip norm {options.clip_norm:g}, noise multiplier {options.noise_multiplier:g}"
    )
    training = train(model, repeat(loader, options.epochs), options.epochs * len(loader), options)

    images, labels = test_set.tensors
    with torch.no_grad():
        right = int((model(images).argmax(1) == labels).sum())
    print(f"\n{'test accuracy':<24}{right / len(labels):.1%} ({right} of {len(labels)} held-out digits)")
    print(f"{'clipped examples':<24}{training.clipped / training.seen:.1%} of {training.seen} gradients")
    print(f"{'first step':<24}{training.seconds[0]:.2f} s, tracing and compilation included")
    if later := training.seconds[1:]:
        print(f"{'later steps':<24}{statistics.median(later) * 1e3:.1f} ms (median of {len(later)})")
    print(
        "privacy accounting      none: no epsilon is computed. It would have to assume batches drawn by Poisson\n"
        "                        sampling, and these are slices of a shuffled data set; nor is the generator of the\n"
        "                        noise a cryptographic one."
    )
    errors = check(initial, training, options)
    report_memory(measure(initial, training, options), initial, options.output)
    return 0 if all(error < BOUNDS[dtype] for dtype, error in errors.items()) else 1


if __name__ == "__main__":
    sys.exit(main())
