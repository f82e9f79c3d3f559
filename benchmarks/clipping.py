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
from clipping_modules import MODULES, OPACUS
from matplotlib.figure import Figure
from run import table
from torch import nn

from microtome import jax_impl
from microtome import torch_api as mt

BATCH = {"MLP": 512, "CNN": 512, "transformer": 128, "LSTM": 128, "embedding": 512, "ResNet": 128}
SIZES = [(64, 64), (2048, 256)]  # further batches, and their microbatches
Ways = dict[str, Callable[[], Any]]


def norm(grads: Any) -> Any:
    return jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(grads)))


def clip(grads: Any) -> Any:
    scale = jnp.minimum(1, 1 / norm(grads))
    return jax.tree.map(lambda g: g * scale, grads)


def waiting(program: Any, *args: Any) -> Callable[[], Any]:
    """A call that returns when its result is there."""
    return lambda: jax.block_until_ready(program(*args))


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


def torch_ways(name: str, batch: int) -> Ways:
    """The same network in torch."""
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
    ours, in_parts = (
        mt.clipped_grad(loss, l2_clip_norm=1.0, batch_argnums=(1, 2), microbatch_size=size) for size in (None, chunk)
    )
    by_xla = mt.as_torch(lambda p, x, y: jax.grad(mt.as_jax(loss))(p, x, y))
    ways: Ways = {
        "torch: plain gradient": plain,
        "torch: plain gradient by XLA": lambda: by_xla(params, x, y),
        "torch: microtome": lambda: ours(params, x, y),
        f"torch: microtome, microbatch {chunk}": lambda: in_parts(params, x, y),
        f"torch.func.vmap(grad), chunk {chunk}": lambda: {k: g.sum(0) for k, g in mapped(params, x, y).items()},
    }
    for mode in ("hooks", "ghost"):
        ways[f"Opacus, {mode}"] = opacus_way(OPACUS.get(name, make), params, x, y, mode)
    return ways


def opacus_way(make: Callable[[], nn.Module], params: Any, x: Any, y: Any, mode: str) -> Callable[[], Any]:
    from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    own = make()
    own.load_state_dict(params, strict=False)  # the LSTM of Opacus has each parameter under two names
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


def fastest(ways: Ways, repeats: int) -> dict[str, float]:
    """Milliseconds of the fastest run, measured in turn, after a first call of each; seconds are measured less often.

    The fastest run is the one that the rest of the machine disturbed least. The pause lets the threads of the run
    before come to rest: torch's spin for a while.
    """
    times: dict[str, list[float]] = {name: [] for name in ways}
    for fun in ways.values():
        fun()
    for i in range(repeats):
        for name, fun in ways.items():
            if i < 2 or min(times[name]) < 1000:
                time.sleep(0.02)
                start = time.perf_counter()
                fun()
                times[name].append((time.perf_counter() - start) * 1e3)
    return {name: min(t) for name, t in times.items()}


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
    calls: Ways = {k: waiting(f, *args) for k, f in programs.items()}
    agree({k: flat(call()) for k, call in calls.items()}, "microtome")
    times = fastest(calls, repeats)
    for k, f in programs.items():
        rows.append({
            "model": name, "batch": batch, "way": k, "ms": times[k], "ratio": times[k] / times["plain gradient"],
            "to_microtome": times[k] / times["microtome"],
            "bytes": f.memory_analysis().temp_size_in_bytes, "operations": operations(f),
        })  # fmt: skip
    ways = torch_ways(name, batch)
    results, refused = {}, {}
    for k, call in list(ways.items()):
        try:
            results[k] = {n: g.detach().numpy().copy() for n, g in call().items()}
        except Exception as error:  # a peer that cannot do this model says so in its own way
            refused[k] = f"{type(error).__name__}: {error}".splitlines()[0]
            del ways[k]
    agree(results, "torch: microtome")
    times = fastest(ways, repeats)
    for k in [*ways, *refused]:
        ms = times.get(k)
        rows.append({
            "model": name, "batch": batch, "way": k, "ms": ms,
            "ratio": None if ms is None else ms / times["torch: plain gradient"],
            "to_microtome": None if ms is None else ms / times["torch: microtome"],
            "bytes": None, "operations": None, "refused": refused.get(k),
        })  # fmt: skip
    return rows


def general(batch: int, repeats: int) -> list[dict[str, Any]]:
    """A transform that needs every entry of each example's gradient, of the MLP: entries clipped one by one."""
    loss, p, x, y = MODELS["MLP"](batch)
    part = min(batch, 64)
    several: dict[str, Any] = {"batch_argnums": (1, 2), "microbatch_size": part}
    entries = lambda g: jax.tree.map(lambda v: jnp.clip(v, -1e-3, 1e-3), g)
    funs = {
        "plain gradient": jax.grad(loss),
        f"microtome, microbatch {part}": jax_impl.micro_grad(loss, transform_fn=entries, **several),
        f"optax, microbatch {part}": optax.microbatching.micro_grad(loss, transform_fn=entries, **several),
    }
    programs = {k: jax.jit(lambda *a, f=f: f(*a)).lower(p, x, y).compile() for k, f in funs.items()}
    calls: Ways = {k: waiting(f, p, x, y) for k, f in programs.items()}
    agree({k: flat(call()) for k, call in calls.items()}, f"microtome, microbatch {part}")

    make, inputs = MODULES["MLP"]
    torch.manual_seed(0)
    model, tx, ty = make().requires_grad_(False), inputs(batch), torch.arange(batch) % 10
    params = {k: v.detach() for k, v in model.named_parameters()}

    def torch_loss(p: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(torch.func.functional_call(model, p, (x,)), y, reduction="sum")

    clamp = lambda g: {k: v.clamp(-1e-3, 1e-3) for k, v in g.items()}
    one = lambda p, x, y: clamp(torch.func.grad(torch_loss)(p, x[None], y[None]))
    mapped = torch.func.vmap(one, (None, 0, 0), chunk_size=part)
    ours = mt.micro_grad(torch_loss, transform_fn=clamp, **several)
    calls |= {
        f"torch: microtome, microbatch {part}": lambda: ours(params, tx, ty)[0],
        f"torch.func.vmap(grad), chunk {part}": lambda: {k: g.sum(0) for k, g in mapped(params, tx, ty).items()},
    }
    agree({k: call() for k, call in list(calls.items())[3:]}, f"torch: microtome, microbatch {part}")
    times = fastest(calls, repeats)
    rows = []
    for k, ms in times.items():
        own = f"torch: microtome, microbatch {part}" if "torch" in k else f"microtome, microbatch {part}"
        program = programs.get(k)
        rows.append({
            "model": "MLP, entries clipped", "batch": batch, "way": k, "ms": ms, "ratio": ms / times["plain gradient"],
            "to_microtome": ms / times[own], "operations": program and operations(program),
            "bytes": program and program.memory_analysis().temp_size_in_bytes,
        })  # fmt: skip
    return rows


def microbatches(name: str, pairs: list[tuple[int, int]], repeats: int) -> list[dict[str, Any]]:
    """Ours for pairs of batch and microbatch, beside the plain gradient summed over the same microbatches."""
    rows = []
    for batch, size in pairs:
        loss, p, x, y = MODELS[name](batch)
        options: dict[str, Any] = {"batch_argnums": (1, 2), "microbatch_size": size}
        plain = jax.jit(jax_impl.micro_grad(loss, **options)).lower(p, x, y).compile()
        fun = jax_impl.clipped_grad(loss, l2_clip_norm=1.0, **options)
        ours = jax.jit(fun.fun).lower(p, x, y).compile()
        calls: Ways = {"plain": waiting(plain, p, x, y), "ours": waiting(ours, p, x, y)}
        times = fastest(calls, repeats)
        used = [f.memory_analysis().temp_size_in_bytes for f in (ours, plain)]
        rows.append({
            "model": name, "batch": batch, "size": size, "ms": times["ours"],
            "ratio": times["ours"] / times["plain"], "bytes": used[0], "plain_bytes": used[1],
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
    text = table(f"Clipped gradients, {first['model']}, batch {first['batch']}", head, lines)
    limits = [row["ratio"] for row in rows if row["way"] == "torch: plain gradient by XLA"]
    if limits and limits[0] > 1.2:
        text += (
            f"\nXLA's plain gradient of the torch module takes {limits[0]:.1f} times as long as torch's own, before "
            "anything is clipped: that much of the ratio of the torch rows is the backend's"
            f"{', whose convolutions are slow on CPU' if first['model'] in ('CNN', 'ResNet') else ''}.\n"
        )
    return text


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
    """Time of each way over the plain gradient of its framework, and temporary memory over JAX's plain gradient's."""
    names = list(dict.fromkeys(row["model"] for row in rows))
    own = lambda row: row["way"].split(", micro")[0].split(", chunk")[0]
    plain = {row["model"]: row["bytes"] for row in rows if row["way"] == "plain gradient"}
    for row in rows:
        row["memory_ratio"] = row["bytes"] and row["bytes"] / plain[row["model"]]
    figure = Figure(figsize=(9, 8), layout="constrained", dpi=150)
    labels = ("time / plain gradient of the framework", "temporary memory / plain gradient's")
    for axes, value, label in zip(figure.subplots(2), ("ratio", "memory_ratio"), labels, strict=True):
        ways = [w for w in dict.fromkeys(own(r) for r in rows if r[value]) if "plain" not in w]
        for j, way in enumerate(ways):
            found = [[r[value] for r in rows if r["model"] == n and own(r) == way and r[value]] for n in names]
            heights = [min(ratios, default=0) for ratios in found]
            axes.bar([i + j * 0.8 / len(ways) for i in range(len(names))], heights, 0.8 / len(ways), label=way)
        axes.axhline(1, color="k", lw=0.8)
        axes.set_yscale("log")
        axes.set_xticks([i + 0.4 for i in range(len(names))], names)
        axes.set_ylabel(label)
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

    def add(found: list[dict[str, Any]]) -> None:
        rows.append(found)
        parts.append(show(found))
        print(parts[-1], flush=True)
        gc.collect()

    scaled = lambda count: max(16, int(count * options.scale) // 16 * 16)
    for name in options.models:
        batch = scaled(BATCH[name])
        add(compare(name, batch, options.repeats))
        pairs = [(scaled(b), scaled(size)) for b, size in SIZES] + [(batch, size) for size in (16, 64, batch)]
        sizes += microbatches(name, sorted({(b, size) for b, size in pairs if b % size == 0}), options.repeats)
    if "MLP" in options.models:
        add(general(scaled(BATCH["MLP"]), options.repeats))
    parts.append(show_sizes(sizes))
    print(parts[-1])
    folder = pathlib.Path("build")
    folder.mkdir(exist_ok=True)
    (folder / "clipping.md").write_text("\n".join(parts))
    everything = [row for group in rows for row in group]
    (folder / "clipping.json").write_text(json.dumps({"ways": everything, "microbatches": sizes}, indent=1))
    plot([row for row in everything if row["model"] in MODELS], folder / "clipping.png")
    print(f"saved {folder / 'clipping.md'}, {folder / 'clipping.json'} and {folder / 'clipping.png'}")


if __name__ == "__main__":
    main()
