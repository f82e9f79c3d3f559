"""What the walking skeleton costs, in one process: crossings of the bridge, a call's overhead, per-example clipping.

Prints tables and saves them as ``build/benchmarks.md``. Ratios are taken side by side; a figure is the time of the
fastest run, the one that the rest of the machine disturbed least.
"""

from __future__ import annotations

import math
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import torch
import torch.nn.functional as F
from torch import nn

from microtome import torch_api as mt
from microtome.bridge.memory.values import array_to_tensor, tensor_to_array


def fastest(*funs: Callable[[], Any], repeats: int = 15) -> list[float]:
    """Milliseconds of each function, measured in turn so that a drift of the machine hits all alike.

    On a busy machine the fastest of a few runs may still be a slow one. So runs go on until the last ``repeats`` have
    improved no figure by more than a hundredth, at most ten times as many.
    """
    best = [math.inf for _ in funs]
    for fun in funs:
        fun()
    left, most = repeats, 10 * repeats
    while left and most:
        left, most = left - 1, most - 1
        for i, fun in enumerate(funs):
            start = time.perf_counter()
            fun()
            taken = (time.perf_counter() - start) * 1e3
            if taken < 0.99 * best[i]:
                left = repeats
            best[i] = min(best[i], taken)
    return best


def table(title: str, head: list[str], rows: list[list[str]]) -> str:
    lines = [f"## {title}", "", "| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows), ""])


def crossings() -> str:
    """The limit is the DLPack capsule itself: about 1 µs; the rest is Python."""
    tensor = torch.randn(256, 256)
    array = tensor_to_array(tensor)
    ways: dict[str, Callable[[], Any]] = {
        "`tensor_to_array`": lambda: tensor_to_array(tensor),
        "`jax.dlpack.from_dlpack`": lambda: jax.dlpack.from_dlpack(tensor),
        "`array_to_tensor`": lambda: array_to_tensor(array),
        "`torch.from_dlpack`": lambda: torch.from_dlpack(array),
    }
    many = [lambda f=f: [f() for _ in range(200)] for f in ways.values()]
    rows = [[name, f"{t / 200 * 1e3:.1f}"] for name, t in zip(ways, fastest(*many), strict=True)]
    return table("One float32 256×256 tensor across the bridge", ["way", "µs"], rows)


def overhead() -> str:
    """A call with 200 parameters beyond the compiled program, as arguments and in a module of 100 layers.

    The limit is what the program takes with arguments that lie in torch's memory: 0.4 ms for 200 NumPy views, which
    XLA checks one by one. Above it, in this order: to look through the module for what may have changed since the last
    call, to make the views, to look up the program by dtypes, shapes and devices.
    """
    parameters = [torch.randn(64) for _ in range(200)]
    model, x = nn.Sequential(*(nn.Linear(8, 8) for _ in range(100))).requires_grad_(False), torch.randn(2, 8)
    call, module = mt.as_torch(mt.as_jax(lambda ps: sum(p.sum() for p in ps))), mt.as_torch(mt.as_jax(model))
    arrays = [jnp.asarray(p.numpy()) for p in parameters]
    layers = {k: jnp.asarray(p.numpy()) for k, p in model.named_parameters()}

    @jax.jit
    def layered(p: Any, x: Any) -> Any:
        for i in range(100):
            x = x @ p[f"{i}.weight"].T + p[f"{i}.bias"]
        return x

    program, jx = jax.jit(lambda ps: sum(jnp.sum(p) for p in ps)), jnp.asarray(x.numpy())
    ways: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "as arguments": (lambda: call(parameters), lambda: program(arrays).block_until_ready()),
        "in a module": (lambda: module(x), lambda: layered(layers, jx).block_until_ready()),
    }
    rows = []
    for name, pair in ways.items():
        ours, alone = fastest(*pair, repeats=300)
        rows.append([name, f"{ours:.2f}", f"{alone:.2f}", f"{ours - alone:.2f}"])
    return table("A call with 200 parameters", ["they are", "microtome, ms", "program alone, ms", "overhead, ms"], rows)


def clipping() -> str:
    """Per-example clipping of an MLP; the limit is the plain gradient of the batch, which reads no gradient twice."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 10))
    params = {k: v.detach() for k, v in model.named_parameters()}
    x, y = torch.randn(256, 64), torch.randint(0, 10, (256,))

    def loss(p: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(torch.func.functional_call(model, p, (x,)), y)

    def clip(g: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        norm = torch.sqrt(sum(v.pow(2).sum() for v in g.values()))
        return {k: v / norm.clamp(min=1.0) for k, v in g.items()}

    def by_torch(p: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        one = lambda p, x, y: clip(torch.func.grad(loss)(p, x[None], y[None]))
        return {k: v.sum(0) for k, v in torch.func.vmap(one, (None, 0, 0), chunk_size=64)(p, x, y).items()}

    options: dict[str, Any] = {"batch_argnums": (1, 2), "microbatch_size": 64, "transform_fn": clip}
    ours = mt.micro_grad(loss, **options)
    optax_grad = mt.lift(optax.microbatching.micro_grad)(loss, **options)
    plain = torch.func.grad(loss)
    ways = {
        "microtome `micro_grad`, microbatch 64": lambda: ours(params, x, y),
        "optax `micro_grad` through `lift`, microbatch 64": lambda: optax_grad(params, x, y),
        "`torch.func.vmap(grad)`, chunk 64": lambda: by_torch(params, x, y),
        "plain gradient, torch": lambda: plain(params, x, y),
    }
    times = fastest(*ways.values(), repeats=7)
    memory = {size: mt.micro_grad(loss, **(options | {"microbatch_size": size})) for size in (16, 64, 256)}
    rows = [[name, f"{t:.1f}", f"{t / times[0]:.2f}"] for name, t in zip(ways, times, strict=True)]
    used = [
        [str(size), f"{f.compiled(params, x, y).memory_analysis().temp_size_in_bytes / 1e6:.1f}"]
        for size, f in memory.items()
    ]
    title = "Clipped gradients of an MLP with 85 k parameters, batch 256"
    return (
        table(title, ["way", "ms", "ratio to microtome"], rows)
        + "\n"
        + table("Its compiled temporary memory", ["microbatch", "MB"], used)
    )


def main() -> None:
    """Run all, print, save."""
    text = "\n".join(part() for part in (crossings, overhead, clipping))
    print(text)
    path = pathlib.Path("build/benchmarks.md")
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    print(f"saved {path}")


if __name__ == "__main__":
    main()
