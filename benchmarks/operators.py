"""Operators that torch composes, as XLA gets them, against the obvious JAX expression: time and temporary memory.

``python benchmarks/operators.py`` prints a table of what is above 1.2, and saves all of it as ``build/operators.md``;
``--memory`` leaves out the times (no noise, a minute). Each operator is compiled three ways: as it is, mapped over
eight examples, and its gradient. The limit is the JAX expression's own time: what is above it is a decomposition that
took an operator apart which XLA has whole.
"""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.nn.functional as F
from run import fastest, table

from microtome.bridge import as_jax

LIMIT = 1.2
N = 256
Case = tuple[Callable[..., Any], Callable[..., Any], tuple[tuple[int, ...], ...]]


def _einsum(subscripts: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    return lambda *xs: torch.einsum(subscripts, *xs), lambda *xs: jnp.einsum(subscripts, *xs)


def _pairs(a: jax.Array, b: jax.Array) -> jax.Array:
    squares = jnp.sum(a * a, -1)[:, None] + jnp.sum(b * b, -1)[None] - 2 * a @ b.T
    return jnp.sqrt(jnp.maximum(squares, 1e-30))


def _group_norm(x: jax.Array) -> jax.Array:
    return _standardized(x.reshape(x.shape[0], 4, -1), -1).reshape(x.shape)


def _attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jax.nn.softmax(q @ jnp.swapaxes(k, -1, -2) / np.sqrt(q.shape[-1])) @ v


def _convolution(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.lax.conv_general_dilated(x, w, (1,) * (x.ndim - 2), "VALID")


def _pool(x: jax.Array) -> jax.Array:
    return jax.lax.reduce_window(x, 0.0, jax.lax.add, (1, 1, 2, 2), (1, 1, 2, 2), "VALID") / 4


def _max_pool(x: jax.Array) -> jax.Array:
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")


def _unit(x: jax.Array, least: float) -> jax.Array:
    return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), least)


def _cosine(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.sum(_unit(a, 1e-8) * _unit(b, 1e-8), -1)  # as torch: the product of both norms may overflow


def _standardized(x: jax.Array, *axes: int) -> jax.Array:
    mean, var = jnp.mean(x, axes, keepdims=True), jnp.var(x, axes, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(var + 1e-5)


def _median(x: jax.Array) -> jax.Array:
    return jnp.sort(x, -1)[..., (x.shape[-1] - 1) // 2]  # of two the lower, as torch


def _huber(a: jax.Array, b: jax.Array) -> jax.Array:
    size = jnp.abs(a - b)
    return jnp.mean(jnp.where(size < 1, size * size / 2, size - 0.5))


def _cross_entropy(x: jax.Array) -> jax.Array:
    return -jnp.mean(jax.nn.log_softmax(x)[jnp.arange(x.shape[0]), jnp.arange(x.shape[0])])


def _unfold(x: jax.Array) -> jax.Array:
    patches = jax.lax.conv_general_dilated_patches(x, (3, 3), (1, 1), "VALID")
    return patches.reshape(*patches.shape[:2], -1)


M, V, L, B = (N, N), (N,), (64, 1024), (16, 64, 64)
CASES: dict[str, Case] = {
    "mv": (torch.mv, jnp.matmul, (M, V)),
    "vector times matrix": (torch.matmul, jnp.matmul, (V, M)),
    "dot": (torch.dot, jnp.dot, ((N * N,), (N * N,))),
    "vdot": (torch.vdot, jnp.vdot, ((N * N,), (N * N,))),
    "inner": (torch.inner, jnp.inner, (M, M)),
    "addmv": (torch.addmv, lambda c, a, b: c + a @ b, (V, M, V)),
    "addr": (torch.addr, lambda c, a, b: c + jnp.outer(a, b), (M, V, V)),
    "outer": (torch.outer, jnp.outer, (V, V)),
    "addmm": (torch.addmm, lambda c, a, b: c + a @ b, (M, M, M)),
    "mm": (torch.mm, jnp.matmul, (M, M)),
    "bmm": (torch.bmm, jnp.matmul, (B, B)),
    "baddbmm": (torch.baddbmm, lambda c, a, b: c + a @ b, (B, B, B)),
    "addbmm": (torch.addbmm, lambda c, a, b: c + jnp.einsum("bij,bjk->ik", a, b), ((64, 64), B, B)),
    "linear": (F.linear, lambda x, w, b: x @ w.T + b, (M, M, V)),
    "linear of three axes": (F.linear, lambda x, w: x @ w.T, (B, (128, 64))),
    "bilinear": (F.bilinear, lambda a, b, w: jnp.einsum("ni,oij,nj->no", a, w, b), ((64, 32), (64, 32), (16, 32, 32))),
    "tensordot": (lambda a, b: torch.tensordot(a, b, 2), lambda a, b: jnp.tensordot(a, b, 2), (B, (64, 64, 8))),
    "einsum of a trace": (*_einsum("bii->b"), (B,)),
    "einsum of two": (*_einsum("bij,bkj->bik"), (B, B)),
    "einsum of three": (*_einsum("ij,jk,kl->il"), (M, M, M)),
    "multi_dot": (lambda *xs: torch.linalg.multi_dot(xs), lambda a, b, c: jnp.linalg.multi_dot([a, b, c]), (M, M, M)),
    "chain_matmul": (torch.chain_matmul, lambda a, b, c: jnp.linalg.multi_dot([a, b, c]), (M, M, M)),
    "kron": (torch.kron, jnp.kron, ((16, 16), (16, 16))),
    "trace": (torch.trace, jnp.trace, (M,)),
    "norm": (torch.linalg.norm, lambda x: jnp.sqrt(jnp.sum(x * x)), (M,)),
    "norm along an axis": (lambda x: x.norm(dim=-1), lambda x: jnp.linalg.norm(x, axis=-1), (L,)),
    "norm of order 1": (lambda x: x.norm(p=1, dim=-1), lambda x: jnp.sum(jnp.abs(x), -1), (L,)),
    "norm of order inf": (lambda x: x.norm(p=torch.inf, dim=-1), lambda x: jnp.max(jnp.abs(x), -1), (L,)),
    "norm of order 3": (lambda x: x.norm(p=3, dim=-1), lambda x: jnp.sum(jnp.abs(x) ** 3, -1) ** (1 / 3), (L,)),
    "normalize": (F.normalize, lambda x: _unit(x, 1e-12), (L,)),
    "quotient by a sum": (
        lambda x: x / x.abs().sum(-1, keepdim=True),
        lambda x: x / jnp.abs(x).sum(-1, keepdims=True),
        (L,),
    ),
    "quotient by rows": (lambda x, d: x / d[:, None], lambda x, d: x / d[:, None], (L, L[:1])),
    "cdist of order 1": (
        lambda a, b: torch.cdist(a, b, p=1),
        lambda a, b: jnp.sum(jnp.abs(a[:, None] - b[None]), -1),
        ((64, 64), (64, 64)),
    ),
    "cdist": (torch.cdist, _pairs, ((128, 64), (128, 64))),
    "pairwise_distance": (F.pairwise_distance, lambda a, b: jnp.linalg.norm(a - b + 1e-6, axis=-1), (L, L)),
    "cosine_similarity": (F.cosine_similarity, _cosine, (L, L)),
    "softmax": (lambda x: x.softmax(-1), jax.nn.softmax, (L,)),
    "log_softmax": (lambda x: x.log_softmax(-1), jax.nn.log_softmax, (L,)),
    "logsumexp": (lambda x: x.logsumexp(-1), lambda x: jax.nn.logsumexp(x, -1), (L,)),
    "layer_norm": (lambda x: F.layer_norm(x, x.shape[-1:]), lambda x: _standardized(x, -1), (L,)),
    "instance_norm": (F.instance_norm, lambda x: _standardized(x, 2, 3), ((8, 16, 32, 32),)),
    "batch_norm": (
        lambda x: F.batch_norm(x, None, None, training=True),
        lambda x: _standardized(x, 0, 2, 3),
        ((8, 16, 32, 32),),
    ),
    "group_norm": (lambda x: F.group_norm(x, 4), _group_norm, ((8, 16, 32, 32),)),
    "rms_norm": (
        lambda x: F.rms_norm(x, x.shape[-1:], eps=1e-6),
        lambda x: x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6),
        (L,),
    ),
    "gelu": (F.gelu, lambda x: jax.nn.gelu(x, approximate=False), (L,)),
    "gelu by tanh": (lambda x: F.gelu(x, approximate="tanh"), jax.nn.gelu, (L,)),
    "silu": (F.silu, jax.nn.silu, (L,)),
    "softplus": (F.softplus, jax.nn.softplus, (L,)),
    "var": (lambda x: x.var(-1), lambda x: jnp.var(x, -1, ddof=1), (L,)),
    "std": (lambda x: x.std(-1), lambda x: jnp.std(x, -1, ddof=1), (L,)),
    "var_mean": (
        lambda x: torch.stack(torch.var_mean(x, -1)),
        lambda x: jnp.stack([jnp.var(x, -1, ddof=1), jnp.mean(x, -1)]),
        (L,),
    ),
    "median": (lambda x: x.median(-1).values, _median, (L,)),
    "mean": (lambda x: x.mean(-1), lambda x: jnp.mean(x, -1), (L,)),
    "cumsum": (lambda x: x.cumsum(-1), lambda x: jnp.cumsum(x, -1), (L,)),
    "cumprod": (lambda x: x.cumprod(-1), lambda x: jnp.cumprod(x, -1), ((64, 64),)),
    "logcumsumexp": (lambda x: x.logcumsumexp(-1), lambda x: jax.lax.cumlogsumexp(x, 1), (L,)),
    "glu": (F.glu, jax.nn.glu, (L,)),
    "elu": (F.elu, jax.nn.elu, (L,)),
    "attention": (F.scaled_dot_product_attention, _attention, (B, B, B)),
    "conv1d": (F.conv1d, _convolution, ((16, 16, 128), (16, 16, 5))),
    "conv2d": (F.conv2d, _convolution, ((4, 16, 32, 32), (16, 16, 3, 3))),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 2), _pool, ((8, 16, 32, 32),)),
    "max_pool2d": (lambda x: F.max_pool2d(x, 2), _max_pool, ((8, 16, 32, 32),)),
    "unfold": (lambda x: F.unfold(x, 3), _unfold, ((4, 16, 32, 32),)),
    "interpolate": (
        lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
        lambda x: jax.image.resize(x, (*x.shape[:2], 64, 64), "bilinear"),
        ((4, 16, 32, 32),),
    ),
    "mse_loss": (F.mse_loss, lambda a, b: jnp.mean((a - b) ** 2), (L, L)),
    "l1_loss": (F.l1_loss, lambda a, b: jnp.mean(jnp.abs(a - b)), (L, L)),
    "binary_cross_entropy_with_logits": (
        F.binary_cross_entropy_with_logits,
        lambda x, y: jnp.mean(jnp.maximum(x, 0) - x * y + jnp.log1p(jnp.exp(-jnp.abs(x)))),
        (L, L),
    ),
    "huber_loss": (F.huber_loss, _huber, (L, L)),
    "cross_entropy": (lambda x: F.cross_entropy(x, torch.arange(x.shape[0])), _cross_entropy, (L,)),
    "kl_div": (
        lambda a, b: F.kl_div(a, b, reduction="sum", log_target=True),
        lambda a, b: jnp.sum(jnp.exp(b) * (b - a)),
        (L, L),
    ),
}


def _gradient(fun: Callable[..., Any]) -> Callable[..., Any]:
    # Of the sum of squares: XLA would compute what takes time (a sine's derivative) anew for each that reads it.
    return lambda *xs: jax.grad(lambda *xs: jnp.sum(jnp.square(fun(*xs))), tuple(range(len(xs))))(*xs)


WAYS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "plain": lambda fun: fun,
    "vmap": jax.vmap,
    "gradient": _gradient,
}


def compiled(name: str, way: str) -> tuple[Any, Any, tuple[Any, ...]]:
    """The programs of an operator, microtome's and JAX's, and arguments for both."""
    torch_fun, jax_fun, shapes = CASES[name]
    rng = np.random.default_rng(0)
    shapes = tuple((8, *shape) for shape in shapes) if way == "vmap" else shapes
    args = tuple(jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)
    ours, theirs = (jax.jit(WAYS[way](f)).lower(*args).compile() for f in (as_jax(torch_fun), jax_fun))
    return ours, theirs, args


def _waiting(program: Any, args: tuple[Any, ...]) -> Callable[[], Any]:
    return lambda: jax.block_until_ready(program(*args))


def _bytes(program: Any) -> int:
    """Temporary memory; below a page two programs count as equal."""
    return max(int(program.memory_analysis().temp_size_in_bytes), 4096)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--memory", action="store_true", help="only temporary memory, no times")
    only_memory = parser.parse_args().memory
    rows = []
    for name in CASES:
        for way in WAYS:
            ours, theirs, args = compiled(name, way)
            memory = _bytes(ours) / _bytes(theirs)
            row = [name, way, f"{_bytes(ours)}", f"{memory:.2f}"]
            times = [1.0, 1.0]
            if not only_memory:
                times = fastest(*(_waiting(program, args) for program in (ours, theirs)), repeats=30)
                row += [f"{times[0] * 1e3:.0f}", f"{times[0] / times[1]:.2f}"]
            rows.append((max(memory, times[0] / times[1]), row))
    head = ["operator", "way", "bytes", "/ JAX", *([] if only_memory else ["µs", "/ JAX"])]
    print(table(f"Above {LIMIT}", head, [row for ratio, row in rows if ratio > LIMIT]))
    pathlib.Path("build").mkdir(exist_ok=True)
    pathlib.Path("build/operators.md").write_text(table("Operators against JAX", head, [row for _, row in rows]))


if __name__ == "__main__":
    main()
