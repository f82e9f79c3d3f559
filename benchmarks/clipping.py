"""Per-example clipping against its peers and against the plain gradient, in one process: time and temporary memory.

Prints tables, saves them as ``build/clipping.md`` and ``build/clipping.json`` and plots them in ``build/clipping.png``.
The limit is the plain gradient of the same batch: one forward and one backward pass, no norms. Clipping has to do two
things more, the norms and the weighting of a factor; ``operations`` is what XLA counts for programs without loops, so
that ``operations / plain`` is the ratio that time could reach. Rows of JAX time compiled programs of one function, rows
of torch the same network written as a module (:mod:`clipping_modules`); every row's ratio is to the plain gradient of
its own framework, the last column to microtome's time. On a busy machine torch's rows suffer most: its threads spin.
"""

from __future__ import annotations

import argparse
import gc
import json
import pathlib
import time
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax_privacy.clipping
import numpy as np
import optax
import torch
import torch.nn.functional as F
from clipping_models import MODELS
from clipping_modules import MODULES
from matplotlib.figure import Figure
from run import table
from torch import nn

from microtome import jax_impl
from microtome import torch_api as mt

BATCH = {"MLP": 512, "CNN": 512, "transformer": 128, "LSTM": 128, "embedding": 512, "ResNet": 128}
Ways = dict[str, Callable[[], Any]]


def norm(grads: Any) -> Any:
    return jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(grads)))


def clip(grads: Any) -> Any:
    scale = jnp.minimum(1, 1 / norm(grads))
    return jax.tree.map(lambda g: g * scale, grads)


def jax_ways(name: str, batch: int) -> tuple[dict[str, Any], tuple[Any, ...]]:
    """Compiled programs of one loss: the plain gradient, microtome, and peers."""
    loss, p, x, y = MODELS[name](batch)
    several = {"batch_argnums": (1, 2)}
    part = min(batch, 64)
    funs = {
        "plain gradient": jax.grad(loss),
        "microtome": jax_impl.clipped_grad(loss, l2_clip_norm=1.0, **several),
        f"microtome, microbatch {part}": jax_impl.clipped_grad(loss, l2_clip_norm=1.0, microbatch_size=part, **several),
        f"jax_privacy, microbatch {part}": jax_privacy.clipping.clipped_grad(
            loss, l2_clip_norm=1.0, microbatch_size=part, **several
        ),
        f"optax, microbatch {part}": optax.microbatching.micro_grad(
            loss, microbatch_size=part, transform_fn=clip, **several
        ),
    }
    return {k: jax.jit(lambda *a, f=f: f(*a)).lower(p, x, y).compile() for k, f in funs.items()}, (p, x, y)


def torch_ways(name: str, batch: int) -> tuple[Ways, dict[str, str]]:
    """The same network in torch; and which peers refuse it, with the reason."""
    make, inputs = MODULES[name]
    torch.manual_seed(0)
    model, x, y = make(), inputs(batch), torch.arange(batch) % 10
    params = {k: p.detach() for k, p in model.named_parameters()}
    chunk = min(batch, 64)

    def loss(p: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(torch.func.functional_call(model, p, (x,)), y, reduction="sum")

    def plain() -> Any:
        model.zero_grad()
        F.cross_entropy(model(x), y, reduction="sum").backward()
        return {k: p.grad for k, p in model.named_parameters()}

    def one(p: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        grads = torch.func.grad(loss)(p, x[None], y[None])
        scale = (1 / torch.sqrt(sum(g.square().sum() for g in grads.values()))).clamp(max=1)
        return {k: g * scale for k, g in grads.items()}

    mapped = torch.func.vmap(one, (None, 0, 0), chunk_size=chunk, randomness="different")
    ours = mt.clipped_grad(loss, l2_clip_norm=1.0, batch_argnums=(1, 2))
    ways: Ways = {
        "torch: plain gradient": plain,
        "torch: microtome": lambda: ours(params, x, y),
        f"torch.func.vmap(grad), chunk {chunk}": lambda: {k: g.sum(0) for k, g in mapped(params, x, y).items()},
    }
    for mode in ("hooks", "ghost"):
        if name == "LSTM":  # Opacus has an LSTM of its own, in Python, with other parameter names
            ways[f"Opacus, {mode}"] = lambda: (_ for _ in ()).throw(
                NotImplementedError("torch's LSTM is not supported")
            )
        else:
            ways[f"Opacus, {mode}"] = opacus_way(make, params, x, y, mode)
    return ways, {}


def opacus_way(make: Callable[[], nn.Module], params: Any, x: Any, y: Any, mode: str) -> Callable[[], Any]:
    from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    own = make()
    own.load_state_dict(params)
    ghost = mode == "ghost"
    kind: Any = GradSampleModuleFastGradientClipping if ghost else GradSampleModule
    model = kind(own, loss_reduction="sum", **({"max_grad_norm": 1.0, "use_ghost_clipping": True} if ghost else {}))
    steps: Any = DPOptimizerFastGradientClipping if ghost else DPOptimizer
    optimizer = steps(
        torch.optim.SGD(own.parameters(), lr=0.0), noise_multiplier=0.0, max_grad_norm=1.0,
        expected_batch_size=len(x), loss_reduction="sum",
    )  # fmt: skip
    criterion: Any = nn.CrossEntropyLoss(reduction="sum")
    if ghost:
        criterion = DPLossFastGradientClipping(model, optimizer, criterion, loss_reduction="sum")

    def run() -> Any:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        if ghost:
            return {k: p.grad for k, p in own.named_parameters()}
        optimizer.clip_and_accumulate()
        return {k: p.summed_grad for k, p in own.named_parameters()}

    return run


def medians(ways: Ways, repeats: int) -> dict[str, float]:
    """Milliseconds, measured in turn, after a first call of each; what takes seconds is measured less often."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    slow = {}
    for name, fun in ways.items():
        fun()
        start = time.perf_counter()
        fun()
        slow[name] = time.perf_counter() - start
    for i in range(repeats):
        for name, fun in ways.items():
            if i < 2 or slow[name] < 1.0:
                start = time.perf_counter()
                fun()
                times[name].append((time.perf_counter() - start) * 1e3)
    return {name: float(np.median(t)) for name, t in times.items()}


def agree(results: dict[str, Any], reference: str) -> None:
    """All ways clip alike, to single precision."""
    want = {k: np.asarray(v) for k, v in results[reference].items()}
    for name, found in results.items():
        if "plain" in name:
            continue
        for k, w in want.items():
            np.testing.assert_allclose(np.asarray(found[k]), w, atol=1e-3 * np.abs(w).max(), err_msg=f"{name}: {k}")


def flat(grads: Any) -> dict[str, Any]:
    grads = grads[0] if isinstance(grads, tuple) and len(grads) == 2 and hasattr(grads[1], "values") else grads
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(grads)}


def compare(name: str, batch: int, repeats: int) -> list[dict[str, Any]]:
    """A row for each way."""
    rows = []
    programs, args = jax_ways(name, batch)
    calls: Ways = {k: lambda f=f: jax.block_until_ready(f(*args)) for k, f in programs.items()}
    agree({k: flat(call()) for k, call in calls.items()}, "microtome")
    times = medians(calls, repeats)
    for k, f in programs.items():
        rows.append({
            "model": name, "batch": batch, "way": k, "ms": times[k], "ratio": times[k] / times["plain gradient"],
            "to_microtome": times[k] / times["microtome"],
            "bytes": f.memory_analysis().temp_size_in_bytes, "operations": operations(f),
        })  # fmt: skip
    ways, refused = torch_ways(name, batch)
    results = {}
    for k, call in list(ways.items()):
        try:
            results[k] = {n: g.detach().numpy().copy() for n, g in call().items()}
        except Exception as error:  # a peer that cannot do this model says so in its own way
            refused[k] = f"{type(error).__name__}: {error}".splitlines()[0]
            del ways[k]
    agree(results, "torch: microtome")
    times = medians(ways, repeats)
    for k in [*ways, *refused]:
        ms = times.get(k)
        rows.append({
            "model": name, "batch": batch, "way": k, "ms": ms,
            "ratio": None if ms is None else ms / times["torch: plain gradient"],
            "to_microtome": None if ms is None else ms / times["torch: microtome"],
            "bytes": None, "operations": None, "refused": refused.get(k),
        })  # fmt: skip
    return rows


def microbatches(name: str, batch: int, repeats: int) -> list[dict[str, Any]]:
    """Ours in microbatches of several sizes, beside the plain gradient of one microbatch."""
    loss, p, x, y = MODELS[name](batch)
    rows = []
    for size in sorted({16, 64, 256, batch}):
        if batch % size:
            continue
        plain = jax.jit(jax.grad(loss)).lower(p, x[:size], y[:size]).compile()
        fun = jax_impl.clipped_grad(loss, l2_clip_norm=1.0, batch_argnums=(1, 2), microbatch_size=size)
        ours = jax.jit(fun.fun).lower(p, x, y).compile()
        calls: Ways = {
            "plain": lambda f=plain, n=size: jax.block_until_ready([f(p, x[:n], y[:n])]),
            "ours": lambda f=ours: jax.block_until_ready(f(p, x, y)),
        }
        times = medians(calls, repeats)
        used = [f.memory_analysis().temp_size_in_bytes for f in (ours, plain)]
        rows.append({
            "model": name, "batch": batch, "size": size, "ms": times["ours"],
            "ratio": times["ours"] / (times["plain"] * batch / size), "bytes": used[0], "plain_bytes": used[1],
        })  # fmt: skip
    return rows


def operations(program: Any) -> float | None:
    """What XLA counts; it counts a loop's body once, so a program with loops has no figure."""
    return None if " while(" in program.as_text() else program.cost_analysis().get("flops")


def show(rows: list[dict[str, Any]]) -> str:
    """A table of one model."""
    first = rows[0]
    cell = lambda value, form, scale=1.0: "–" if value is None else format(value * scale, form)
    lines = []
    for row in rows:
        counted = row["operations"] and first["operations"]
        times = row["operations"] / first["operations"] if counted else None
        lines.append([
            row["way"], cell(row["ms"], ".1f") if row["ms"] else row["refused"][:60], cell(row["ratio"], ".2f"),
            cell(times, ".2f"), cell(row["bytes"], ".1f", 1e-6), cell(row["to_microtome"], ".2f"),
        ])  # fmt: skip
    head = ["way", "ms", "ratio to plain", "operations / plain", "temporary MB", "time / microtome's"]
    return table(f"Clipped gradients, {first['model']}, batch {first['batch']}", head, lines)


def show_sizes(rows: list[dict[str, Any]]) -> str:
    """A table of microbatch sizes."""
    head = ["model", "batch", "microbatch", "ms", "ratio to plain microbatches", "MB", "MB / plain's"]
    lines = [
        [
            r["model"], str(r["batch"]), str(r["size"]), f"{r['ms']:.1f}", f"{r['ratio']:.2f}",
            f"{r['bytes'] / 1e6:.1f}", f"{r['bytes'] / r['plain_bytes']:.2f}",
        ]
        for r in rows
    ]  # fmt: skip
    return table("Microbatches of microtome's clipped gradient", head, lines)


def plot(rows: list[dict[str, Any]], path: pathlib.Path) -> None:
    """Time of each way over the plain gradient of its framework."""
    names = list(dict.fromkeys(row["model"] for row in rows))
    ways = [w for w in dict.fromkeys(row["way"].split(", ")[0] for row in rows) if "plain" not in w]
    figure = Figure(figsize=(9, 4.5), layout="constrained", dpi=150)
    axes = figure.subplots()
    for j, way in enumerate(ways):
        found = [[r["ratio"] for r in rows if r["model"] == n and r["way"].split(", ")[0] == way] for n in names]
        heights = [min((r for r in ratios if r), default=0) for ratios in found]
        axes.bar([i + j * 0.8 / len(ways) for i in range(len(names))], heights, 0.8 / len(ways), label=way)
    axes.axhline(1, color="k", lw=0.8)
    axes.set_yscale("log")
    axes.set_xticks([i + 0.4 for i in range(len(names))], names)
    axes.set_ylabel("time / plain gradient of the framework")
    axes.legend(fontsize=8)
    figure.savefig(path)


def main() -> None:
    """Run all, print, save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--scale", type=float, default=1.0, help="of all batch sizes")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # Opacus and its hooks
    rows, sizes, parts = [], [], []
    for name in options.models:
        batch = max(16, int(BATCH[name] * options.scale))
        rows.append(compare(name, batch, options.repeats))
        parts.append(show(rows[-1]))
        print(parts[-1], flush=True)
        sizes += microbatches(name, batch, options.repeats)
        gc.collect()
    parts.append(show_sizes(sizes))
    print(parts[-1])
    folder = pathlib.Path("build")
    folder.mkdir(exist_ok=True)
    (folder / "clipping.md").write_text("\n".join(parts))
    everything = [row for group in rows for row in group]
    (folder / "clipping.json").write_text(json.dumps({"ways": everything, "microbatches": sizes}, indent=1))
    plot(everything, folder / "clipping.png")
    print(f"saved {folder / 'clipping.md'}, {folder / 'clipping.json'} and {folder / 'clipping.png'}")


if __name__ == "__main__":
    main()
