"""Chunks, scans and blocks against their peers, in one process: time, and the temporary memory that XLA planned.

Prints tables, saves them as ``build/slices.md``, and plots ratios, and memory against the size of a slice, in
``build/slices.png``. Peers run the same function, written once for both frameworks. A ratio is a peer's time over
microtome's: above 1, microtome is faster. A time is that of the fastest run, those of JAX measured in turn.

Where a ratio to a peer in JAX is below 1: powerpax and zodiax compute the same products in the same order, so ratios
between 0.95 and 1.05 are noise. A plain scan keeps what it would otherwise compute a second time, for 20 times the
memory. jax.vmap, jax.jacrev and jax.hessian compute all at once, which is faster while it fits into the cache, for 5 to
100 times the memory; without a chunk size, or with ``nbatches=1``, microtome does the same.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import powerpax
import torch
import torch.nn.functional as F
import zodiax
from jax.flatten_util import ravel_pytree
from matplotlib.figure import Figure
from run import fastest, table

from microtome import jax_impl
from microtome import torch_api as mt

JAX = SimpleNamespace(
    tanh=jnp.tanh,
    softmax=lambda x: jax.nn.softmax(x, -1),
    loss=lambda logits, y: -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], 1)),
)
TORCH = SimpleNamespace(tanh=torch.tanh, softmax=lambda x: torch.softmax(x, -1), loss=F.cross_entropy)


def logistic(lib: Any, p: Any, x: Any) -> Any:
    return x @ p["w"] + p["b"]


def mlp(lib: Any, p: Any, x: Any) -> Any:
    hidden = lib.tanh(lib.tanh(x @ p["w"] + p["b"]) @ p["v"] + p["c"])
    return hidden @ p["u"]


def attention(lib: Any, p: Any, x: Any) -> Any:
    tokens = x.reshape(len(x), 8, -1)
    queries, keys, values = tokens @ p["q"], tokens @ p["k"], tokens @ p["v"]
    mixed = lib.softmax(queries @ keys.swapaxes(1, 2) / 8**0.5) @ values
    return lib.tanh(mixed).reshape(len(x), -1) @ p["w"]


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32) / np.float32(shape[0] ** 0.5)


MODELS: dict[str, tuple[Callable[..., Any], dict[str, np.ndarray]]] = {
    "logistic regression": (logistic, {"w": normal(64, 10), "b": normal(10)}),
    "MLP": (mlp, {"w": normal(64, 12), "b": normal(12), "v": normal(12, 12), "c": normal(12), "u": normal(12, 10)}),
    "attention": (attention, {"q": normal(8, 8), "k": normal(8, 8), "v": normal(8, 8), "w": normal(64, 10)}),
}
X, Y = normal(128, 64) * 11, np.arange(128) % 10
Ways = dict[str, tuple[Callable[..., Any], Any]]  # name -> (function, arguments); JAX functions are compiled
RATIOS: dict[str, dict[str, float]] = {}  # of each table, for the plot


def losses(name: str) -> tuple[Any, Any, Any, Any]:
    """The loss of a model over all examples, in JAX and in torch, with its parameters."""
    model, p = MODELS[name]
    x, y, tx, ty = jnp.asarray(X), jnp.asarray(Y), torch.tensor(X), torch.tensor(Y)
    in_jax = lambda p: JAX.loss(model(JAX, p, x), y)
    in_torch = lambda p: TORCH.loss(model(TORCH, p, tx), ty)
    return in_jax, {k: jnp.asarray(v) for k, v in p.items()}, in_torch, {k: torch.tensor(v) for k, v in p.items()}


def compare(title: str, ours: str, ways: Ways, repeats: int = 7) -> str:
    """A table of times, ratios and memory; all ways have to agree."""
    calls, memory = {}, {}
    for name, (fun, args) in ways.items():
        if name.startswith("torch"):
            compiled = getattr(fun, "compiled", None)
            calls[name] = lambda fun=fun, args=args: fun(*args)
            memory[name] = compiled(*args).memory_analysis().temp_size_in_bytes if compiled else None
        else:
            program = jax.jit(fun).lower(*args).compile()
            calls[name] = lambda program=program, args=args: jax.block_until_ready(program(*args))
            memory[name] = program.memory_analysis().temp_size_in_bytes
    # By value: JAX sorts the keys of a dict, torch keeps their order, and jax.tree sorts both.
    results = [np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(call())]) for call in calls.values()]
    for result in results:
        np.testing.assert_allclose(result, results[0], atol=2e-4 * np.abs(results[0]).max())
    # Torch's threads keep a core busy for a while after each call, at the cost of whatever runs next.
    in_jax = [name for name in calls if not name.startswith("torch")]
    times = dict(zip(in_jax, fastest(*(calls[name] for name in in_jax), repeats=repeats), strict=True))
    times |= {name: fastest(calls[name], repeats=repeats)[0] for name in calls if name not in times}
    RATIOS[title] = {name: t / times[ours] for name, t in times.items() if name != ours}
    rows = []
    for name, t in times.items():
        bytes_ = memory[name]
        rows.append([name, f"{t:.2f}", f"{t / times[ours]:.2f}", "–" if bytes_ is None else f"{bytes_ / 1e6:.2f}"])
    return table(title, ["way", "ms", "ratio", "temporary MB"], rows)


def hessians() -> str:
    """In 8 blocks; the plain ones in one, and ours too for a comparison with them."""
    parts = []
    for name in MODELS:
        in_jax, p, in_torch, tp = losses(name)
        vector, unflatten = ravel_pytree(p)
        flat = torch.cat([tp[k].flatten() for k in sorted(tp)])

        def of_vector(v: torch.Tensor, in_torch: Any = in_torch, tp: Any = tp) -> torch.Tensor:
            named = sorted(tp)
            pieces = v.split([tp[k].numel() for k in named])
            return in_torch({k: piece.reshape(tp[k].shape) for k, piece in zip(named, pieces, strict=True)})

        ways: Ways = {
            "microtome": (lambda p, f=in_jax: jax_impl.hessian(f, p, 8)[0], (p,)),
            "zodiax": (lambda p, f=in_jax: zodiax.hessian(f, p, 8)[0], (p,)),
            "microtome, one block": (lambda p, f=in_jax: jax_impl.hessian(f, p)[0], (p,)),
            "jax.hessian": (lambda v, f=in_jax, u=unflatten: jax.hessian(lambda v: f(u(v)))(v), (vector,)),
            "torch: microtome": (lambda v, f=of_vector: mt.hessian(f, v, 8)[0], (flat,)),
            "torch.func.hessian": (torch.func.hessian(of_vector), (flat,)),
        }
        parts.append(compare(f"Hessian, {name}, {len(vector)} parameters", "microtome", ways, 9))
    return "\n".join(parts)


def chunks() -> str:
    """Gradients of each of 512 examples of the MLP, in chunks of 32; and of 500, which leave a remainder."""
    return "\n".join(map(gradients_of, (512, 500)))


def gradients_of(count: int) -> str:
    model, p = MODELS["MLP"]
    x, y = np.tile(X, (4, 1))[:count], np.tile(Y, 4)[:count]
    jp, tp = {k: jnp.asarray(v) for k, v in p.items()}, {k: torch.tensor(v) for k, v in p.items()}
    one = jax.grad(lambda p, x, y: JAX.loss(model(JAX, p, x[None]), y[None]))
    torch_one = torch.func.grad(lambda p, x, y: TORCH.loss(model(TORCH, p, x[None]), y[None]))
    by_torch = torch.func.vmap(torch_one, (None, 0, 0), chunk_size=32)
    ours = mt.chunked_vmap(torch_one, 32, in_dims=(None, 0, 0))
    args, torch_args = (jp, jnp.asarray(x), jnp.asarray(y)), (tp, torch.tensor(x), torch.tensor(y))
    ways: Ways = {
        "microtome": (jax_impl.chunked_vmap(one, 32, (None, 0, 0)), args),
        "powerpax": (lambda p, x, y: powerpax.chunked_vmap(lambda x, y: one(p, x, y), 32)(x, y), args),
        "jax.lax.map": (lambda p, x, y: jax.lax.map(lambda a: one(p, *a), (x, y), batch_size=32), args),
        "jax.vmap": (jax.vmap(one, (None, 0, 0)), args),
        "torch: microtome": (ours, torch_args),
        "torch.func.vmap": (by_torch, torch_args),
    }
    return compare(f"Gradients of {count} examples, MLP, chunks of 32", "microtome", ways, 31)


def jacobians() -> str:
    """The Jacobian of 16 examples' logits in the parameters of the attention model, in blocks of 16 rows."""
    model, p = MODELS["attention"]
    jp, tp = {k: jnp.asarray(v) for k, v in p.items()}, {k: torch.tensor(v) for k, v in p.items()}
    vector, unflatten = ravel_pytree(jp)
    x, tx, named = jnp.asarray(X[:16]), torch.tensor(X[:16]), sorted(p)
    f = lambda v: model(JAX, unflatten(v), x)

    def tf(v: torch.Tensor) -> torch.Tensor:
        pieces = zip(named, v.split([p[k].size for k in named]), strict=True)
        return model(TORCH, {k: piece.reshape(tp[k].shape) for k, piece in pieces}, tx)

    flat = torch.tensor(np.asarray(vector))
    ways: Ways = {
        "microtome": (lambda v: jax_impl.jacobian(f, v, batch_size=16)[0], (vector,)),
        "zodiax": (lambda v: zodiax.jacobian(f, v, 10)[0], (vector,)),
        "jax.jacrev": (jax.jacrev(f), (vector,)),
        "torch: microtome": (lambda v: mt.jacobian(tf, v, batch_size=16)[0], (flat,)),
        "torch.func.jacrev": (torch.func.jacrev(tf, chunk_size=16), (flat,)),
    }
    return compare(f"Jacobian [16, 10, {len(vector)}], attention, blocks of 16 rows", "microtome", ways, 21)


def scans() -> str:
    """A recurrence of 1024 steps on [32, 64]: every 32nd output, and the gradient with checkpoints."""
    w, c = jnp.asarray(normal(64, 64)), jnp.asarray(normal(32, 64))
    step = lambda c, _: ((h := jnp.tanh(c @ w)), h)
    sliced: Ways = {
        "microtome": (lambda c: jax_impl.sliced_scan(step, c, None, 1024, step=32)[1], (c,)),
        "powerpax": (lambda c: powerpax.sliced_scan(step, c, None, 1024, step=32)[1], (c,)),
        "scan, then slice": (lambda c: jax.lax.scan(step, c, None, 1024)[1][::32], (c,)),
    }
    final = lambda scan: jax.grad(lambda c: scan(lambda c, _: (step(c, _)[0], None), c)[0].sum())
    checkpointed: Ways = {
        "microtome": (
            final(lambda f, c: jax_impl.checkpoint_chunked_scan(f, c, None, 1024, chunk_size="auto")),
            (c,),
        ),
        "powerpax": (final(lambda f, c: powerpax.checkpoint_chunked_scan(f, c, None, 1024, chunk_size=32)), (c,)),
        "plain scan": (final(lambda f, c: jax.lax.scan(f, c, None, 1024)), (c,)),
    }
    return "\n".join(
        [
            compare("Every 32nd of 1024 steps", "microtome", sliced, 15),
            compare("Gradient through 1024 steps", "microtome", checkpointed, 15),
        ]
    )


def bytes_of(fun: Callable[..., Any], *args: Any) -> float:
    """Megabytes of temporary memory, as compiled."""
    return float(jax.jit(fun).lower(*args).compile().memory_analysis().temp_size_in_bytes / 1e6)


def plot(path: pathlib.Path) -> None:
    """Times against the peers', and temporary memory against the number or size of slices."""
    figure = Figure(figsize=(12, 8), layout="constrained", dpi=130)
    (ratios, blocks), (chunks, checkpoints) = figure.subplots(2, 2)
    names = [(title, peer) for title, peers in RATIOS.items() for peer in peers]
    values = [RATIOS[title][peer] for title, peer in names]
    ratios.barh([f"{peer}: {title.split(',')[0]}" for title, peer in names], values, color="C0")
    ratios.axvline(1, color="black", linewidth=1)
    ratios.set(xscale="log", xlabel="time / microtome's time", title="Times")
    ratios.invert_yaxis()
    ratios.tick_params("y", labelsize=6)

    in_jax, p, _, _ = losses("MLP")
    numbers = [1, 2, 4, 8, 16, 32]
    ours = [bytes_of(lambda p, k=k: jax_impl.hessian(in_jax, p, k)[0], p) for k in numbers]
    _lines(
        blocks,
        numbers,
        {
            "zodiax": [bytes_of(lambda p, k=k: zodiax.hessian(in_jax, p, k)[0], p) for k in numbers],
            "microtome": ours,
            "one block / number of blocks": [ours[0] / k for k in numbers],
        },
    )
    blocks.set(xlabel="number of blocks", title="Hessian of an MLP")

    model, _ = MODELS["MLP"]
    one = jax.grad(lambda p, x, y: JAX.loss(model(JAX, p, x[None]), y[None]))
    x, y = jnp.tile(jnp.asarray(X), (4, 1)), jnp.tile(jnp.asarray(Y), 4)
    sizes = [4, 8, 16, 32, 64, 128, 256]
    each: dict[str, Callable[[int], Callable[..., Any]]] = {
        "powerpax": lambda k: lambda p, x, y: powerpax.chunked_vmap(lambda x, y: one(p, x, y), k)(x, y),
        "jax.lax.map": lambda k: lambda p, x, y: jax.lax.map(lambda a: one(p, *a), (x, y), batch_size=k),
        "microtome": lambda k: jax_impl.chunked_vmap(one, k, (None, 0, 0)),
    }
    _lines(chunks, sizes, {name: [bytes_of(way(k), p, x, y) for k in sizes] for name, way in each.items()})
    chunks.set(xlabel="chunk", title="Gradients of 512 examples of an MLP")

    w, c = jnp.asarray(normal(64, 64)), jnp.asarray(normal(32, 64))
    step = lambda c, _: (jnp.tanh(c @ w), None)
    final = lambda k: jax.grad(lambda c: jax_impl.checkpoint_chunked_scan(step, c, None, 1024, chunk_size=k)[0].sum())
    plain = bytes_of(jax.grad(lambda c: jax.lax.scan(step, c, None, 1024)[0].sum()), c)
    sizes = [2, 4, 8, 16, 32, 64, 128, 256]
    lines = {"plain scan": [plain] * len(sizes), "microtome": [bytes_of(final(k), c) for k in sizes]}
    _lines(checkpoints, sizes, lines)
    checkpoints.set(xlabel="chunk", title="Gradient through a scan of 1024 steps")
    figure.savefig(path)


def _lines(axes: Any, places: list[int], lines: dict[str, list[float]]) -> None:
    for name, values in lines.items():
        style = "o-" if name == "microtome" else "s--"
        axes.loglog(places, values, style, label=name, color="C0" if name == "microtome" else None)
    axes.set_xticks(places, [str(k) for k in places])
    axes.set_ylabel("temporary memory [MB]")
    axes.grid(alpha=0.3)
    axes.legend()


def main() -> None:
    """Run all, print, save."""
    parts = []
    for part in (chunks, scans, jacobians, hessians):
        parts.append(part())
        print(parts[-1], flush=True)
    folder = pathlib.Path("build")
    folder.mkdir(exist_ok=True)
    (folder / "slices.md").write_text("\n".join(parts))
    plot(folder / "slices.png")
    print(f"saved {folder / 'slices.md'} and {folder / 'slices.png'}")


if __name__ == "__main__":
    main()
