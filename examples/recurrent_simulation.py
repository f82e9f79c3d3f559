"""Fit the constants of a simulated pendulum through thousands of time steps, in torch.

``python examples/recurrent_simulation.py`` (``--help`` lists the options). The simulation is a loop of small torch
operations, run as one compiled program by ``mt.checkpoint_chunked_scan``. Its ``backward()`` keeps the state at the
start of each chunk alone, so that the memory of training grows with the root of the number of steps.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import torch
from matplotlib.figure import Figure

from microtome import jax_impl
from microtome import torch_api as mt

STEP = 0.01
TRUE = {"stiffness": 4.0, "friction": 0.15, "drive": 0.5}


def step(carry: dict[str, torch.Tensor], time: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """One step of a damped and driven pendulum, for a batch of them."""
    k = carry["constants"].exp()  # positive, whatever the optimizer does
    force = k[2] * torch.cos(time) - k[0] * torch.sin(carry["angle"]) - k[1] * carry["velocity"]
    velocity = carry["velocity"] + STEP * force
    angle = carry["angle"] + STEP * velocity
    return carry | {"angle": angle, "velocity": velocity}, angle


def start(constants: torch.Tensor, pendulums: int) -> dict[str, torch.Tensor]:
    angles = torch.linspace(-1.0, 1.0, pendulums)
    return {"constants": constants, "angle": angles, "velocity": torch.zeros(pendulums)}


def simulate(constants: torch.Tensor, pendulums: int, times: torch.Tensor) -> torch.Tensor:
    """The angles ``[steps, pendulums]``."""
    return mt.checkpoint_chunked_scan(step, start(constants, pendulums), times, chunk_size="auto")[1]


def by_loop(constants: torch.Tensor, pendulums: int, times: torch.Tensor) -> torch.Tensor:
    """The same by a Python loop under torch's autograd, to compare with."""
    carry, angles = start(constants, pendulums), []
    for time in times:
        carry, angle = step(carry, time)
        angles.append(angle)
    return torch.stack(angles)


def gradient(angles: torch.Tensor, constants: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(angles.square().mean(), constants)[0]


def memory(steps: int, pendulums: int, chunk_size: int) -> int:
    """Temporary bytes that XLA plans for the gradient, asked of JAX: what torch runs is compiled and gone."""
    carry, times = start(torch.zeros(3), pendulums), mt.to_jax(STEP * torch.arange(steps))
    traced = mt.as_jax(lambda values, time: tuple(step(dict(zip(carry, values, strict=True)), time)[0].values()))
    constants, *rest = mt.to_jax(tuple(carry.values()))

    def loss(constants: jax.Array) -> jax.Array:
        one_step = lambda values, time: (traced(values, time), None)
        (_, angle, _), _ = jax_impl.checkpoint_chunked_scan(one_step, (constants, *rest), times, chunk_size=chunk_size)
        return (angle**2).mean()

    compiled = jax.jit(jax.grad(loss)).lower(constants).compile()
    return int(compiled.memory_analysis().temp_size_in_bytes)


def plot(sizes: Sequence[int], used: Sequence[int], steps: int, output: Path) -> None:
    # A Figure of its own needs no display and leaves pyplot's state alone.
    figure = Figure(figsize=(6.4, 4.2), layout="constrained", dpi=150)
    axes = figure.subplots()
    axes.loglog(sizes, [b / 1e3 for b in used], "o-")
    axes.axvline(steps**0.5, color="C7", ls="--", label="√steps")
    axes.set_xlabel("steps of a chunk")
    axes.set_ylabel("temporary memory of the gradient [kB]")
    axes.set_title(f"Gradient through {steps} steps, as compiled")
    axes.grid(alpha=0.3)
    axes.legend()
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=2500, help="time steps of the simulation")
    parser.add_argument("--pendulums", type=int, default=16)
    parser.add_argument("--updates", type=int, default=150, help="updates of the constants")
    parser.add_argument("--output", type=Path, default=Path("build/recurrent_simulation.png"), help="the plot")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the example; 0 if the gradient is that of the loop and the constants were found."""
    options = parse(argv)
    times, count = STEP * torch.arange(options.steps), options.pendulums
    with torch.no_grad():
        observed = simulate(torch.tensor(list(TRUE.values())).log(), count, times)

    constants = torch.tensor([3.0, 0.3, 0.3]).log().requires_grad_()
    few = times[:200]
    expected = gradient(by_loop(constants, count, few), constants)
    error = (gradient(simulate(constants, count, few), constants) - expected).abs().max() / expected.abs().max()
    print(f"gradient through {len(few)} steps against a loop in torch: relative error {error:.1e}")

    optimizer = torch.optim.Adam([constants], lr=0.03)
    for update in range(options.updates):
        optimizer.zero_grad()
        # Early steps count more at first: a long simulation tells little as long as its constants are far off.
        weight = torch.exp(-times / (1 + 20 * update / options.updates))[:, None]
        loss = ((simulate(constants, count, times) - observed).square() * weight).mean()
        loss.backward()
        optimizer.step()
        if update % 25 == 0 or update == options.updates - 1:
            print(f"update {update:4d}: loss {loss.item():.2e}")
    found = dict(zip(TRUE, constants.detach().exp().tolist(), strict=True))
    for name, value in found.items():
        print(f"  {name:<10} {value:.4f} (true: {TRUE[name]})")
    worst = max(abs(value / TRUE[name] - 1) for name, value in found.items())

    root = round(options.steps**0.5)
    sizes = sorted({1, max(root // 5, 1), root, root * 5, options.steps})
    used = [memory(options.steps, count, size) for size in sizes]
    print(f"memory of the gradient through {options.steps} steps:")
    for size, number in zip(sizes, used, strict=True):
        print(f"  chunks of {size:5d} steps  {number / 1e3:9.1f} kB")
    plot(sizes, used, options.steps, options.output)
    print(f"plotted in {options.output}")
    return 0 if error < 1e-4 and worst < 0.05 else 1


if __name__ == "__main__":
    sys.exit(main())
