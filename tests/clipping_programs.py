"""Small random programs whose per-example gradients have known ways to go wrong: `loss(params, x, i)` for a seed.

What a program does is drawn while it is traced, from a generator of its own and from the shapes alone: the same seed
gives the same program each time. Numbers stay moderate, so that norms can be compared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

ROWS = 3
_LENGTHS = (1, 1, 2, 2, 3, 4)
_LARGEST = 48  # entries of an array


def inputs(seed: int, x64: bool) -> tuple[dict[str, Any], Any, Any]:
    """Parameters, and examples with indices of which some are out of range."""
    rng = np.random.default_rng([seed, 1])
    width = np.float64 if x64 else np.float32
    params = {}
    for name in "abc":
        shape = tuple(rng.choice(_LENGTHS, rng.integers(1, 4)))
        dtype = [width, width, width, np.float32, jnp.bfloat16, np.float16][rng.integers(6)]
        params[name] = jnp.asarray(rng.normal(size=shape), dtype)
    x = jnp.asarray(rng.normal(size=(ROWS, 2, 3)), width)
    return params, x, jnp.asarray(rng.integers(-5, 5, (ROWS, 2, 3)), np.int32)


def loss(seed: int, params: dict[str, Any], x: Any, i: Any) -> Any:
    """The loss of one example ``x [2, 3]``, ``i [2, 3]``."""
    draw = _Draw(seed, x, i)
    pool = list(params.values())
    for _ in range(draw.rng.integers(2, 8)):
        # Later values more often, so that programs get deep.
        v = pool[len(pool) - 1 - min(draw.rng.integers(len(pool)), draw.rng.integers(len(pool)))]
        op = _OPS[draw.rng.integers(len(_OPS))]
        new = op(draw, v, pool)
        if 0 < new.size <= _LARGEST or (new.size == 0 and draw.rng.integers(4) == 0):
            pool.append(new)
    total: Any = 0.0
    for v in pool[-3:]:
        v = jnp.real(v).astype(x.dtype)
        v = [jnp.tanh, lambda v: v, lambda v: v * draw.like(v), jnp.square][draw.rng.integers(4)](v)
        total = total + jnp.sum(v) * (x.sum() if draw.rng.integers(2) else 1)
    return total


class _Draw:
    """What a program draws from: random numbers, and arrays of any shape from the example."""

    def __init__(self, seed: int, x: Any, i: Any) -> None:
        self.rng, self.x, self.i = np.random.default_rng([seed, 0]), x, i

    def like(self, v: Any, shape: Any = None, kinds: int = 5) -> Any:
        """Of this shape or another and the value's dtype: of the example, a constant, or a number repeated."""
        shape = v.shape if shape is None else tuple(shape)
        size = int(np.prod(shape))
        kind = self.rng.integers(kinds)
        if kind == 0:
            u = jnp.resize(self.x, (size,)).reshape(shape)
        elif kind == 1:
            u = jnp.asarray(self.rng.normal(size=shape))
        elif kind == 2:
            u = jnp.full(shape, self.rng.normal())
        elif kind == 3:
            u = jnp.broadcast_to(self.x[0, 1], shape)
        else:
            u = jnp.asarray([[0.5], [3], [-2]][self.rng.integers(3)][0])
        return u.astype(v.dtype) if jnp.issubdtype(v.dtype, jnp.inexact) else u

    def thinned(self, shape: Any) -> tuple[int, ...]:
        """A shape that is repeated to this one."""
        return tuple(n if self.rng.integers(2) else 1 for n in shape)

    def mask(self, shape: Any) -> Any:
        """Booleans of the shape."""
        kind = self.rng.integers(4)
        if kind == 0:
            return self.x[0, 0] > 0
        if kind == 1:
            return self.like(self.x, shape, 1) > 0
        return jnp.asarray(self.rng.integers(0, 2, shape).astype(bool))

    def axis(self, v: Any) -> int:
        """One of its axes."""
        return int(self.rng.integers(v.ndim))


def _binary(draw: _Draw, v: Any, pool: list[Any]) -> Any:
    other = pool[draw.rng.integers(len(pool))]
    try:
        np.broadcast_shapes(other.shape, v.shape)
    except ValueError:
        other = draw.like(v, draw.thinned(v.shape))
    if draw.rng.integers(2):
        other = draw.like(v, draw.thinned(v.shape))
    kind = draw.rng.integers(6)
    if kind < 3:
        return v * other
    if kind == 3:
        return v / (1 + jnp.square(jnp.abs(other)))
    return v - other if kind == 4 else other + v


def _grown(draw: _Draw, v: Any, pool: list[Any]) -> Any:
    """A product in which both operands are repeated."""
    shape = [n if n > 1 else draw.rng.choice(_LENGTHS) for n in v.shape]
    return v * draw.like(v, [n if draw.rng.integers(3) or m == 1 else 1 for n, m in zip(shape, v.shape, strict=True)])


def _expand(draw: _Draw, v: Any, pool: list[Any]) -> Any:
    shape = [draw.rng.choice(_LENGTHS) if n == 1 else n for n in v.shape]
    return jnp.broadcast_to(v, [*[draw.rng.choice(_LENGTHS)] * draw.rng.integers(2), *shape])


def _new_axis(draw: _Draw, v: Any, pool: list[Any]) -> Any:
    return jnp.expand_dims(v, draw.rng.integers(v.ndim + 1))


def _squeeze(draw: _Draw, v: Any, pool: list[Any]) -> Any:
    return jnp.squeeze(v)


def _slice(draw: _Draw, v: Any, pool: list[Any]) -> Any:
    def cut(n: int) -> Any:
        start = int(draw.rng.integers(n)) if n else 0
        kinds: list[Any] = [slice(None), slice(start, None), slice(None, start + 1), slice(None, None, -1)]
        kinds += [slice(start, None, 2), slice(0, 0), start if n else slice(None)]
        return kinds[draw.rng.choice(7, p=[0.35, 0.2, 0.15, 0.1, 0.1, 0.02, 0.08])]

    return v[tuple(cut(n) for n in v.shape)]


def _sum(draw: _Draw, v: Any, pool: list[Any]) -> Any:
    if not v.ndim:
        return v
    axes = tuple(sorted({draw.axis(v), draw.axis(v)}))
    kind = draw.rng.integers(4)
    return v.mean(axes) if kind == 0 and v.size else jnp.sum(v, axes, keepdims=bool(kind == 1))


def _reshape(draw: _Draw, v: Any, pool: list[Any]) -> Any:
    left, shape = v.size, []
    while left > 1:
        n = int(draw.rng.choice([d for d in range(2, left + 1) if left % d == 0]))
        shape += [1] * draw.rng.integers(2) + [n]
        left //= n
    return v.reshape(shape or v.shape) if v.size else v


def _transpose(draw: _Draw, v: Any, pool: list[Any]) -> Any:
    return jnp.transpose(v, draw.rng.permutation(v.ndim))


def _dot(draw: _Draw, v: Any, pool: list[Any]) -> Any:
    other = pool[draw.rng.integers(len(pool))]
    pairs = [(i, j) for i, n in enumerate(v.shape) for j, m in enumerate(other.shape) if m == n]
    if not pairs or draw.rng.integers(2):
        if not v.ndim:
            return v
        shape = [*v.shape[-1:], *draw.rng.choice(_LENGTHS, draw.rng.integers(3))]
        other, pairs = draw.like(v, shape, 4), [(v.ndim - 1, 0)]
    i, j = pairs[draw.rng.integers(len(pairs))]
    kind = draw.rng.integers(4)
    letters, others = list("stuvwxyz"[: v.ndim]), list("abcdefgh"[: other.ndim])
    others[j] = letters[i]
    rest = [c for c in others if c != letters[i]]
    out = [c for c in letters if c != letters[i]] + rest
    if kind == 0:  # a batch axis
        out = [letters[i], *out]
    if kind == 1:  # nothing in common
        others[j] = "q"
        out = [*letters, *others]
    wide = jnp.float32 if kind == 2 and jnp.promote_types(v.dtype, other.dtype) != jnp.float64 else None
    if jnp.issubdtype(v.dtype, jnp.complexfloating) or jnp.issubdtype(other.dtype, jnp.complexfloating):
        wide = None
    return jnp.einsum(f"{''.join(letters)},{''.join(others)}->{''.join(out)}", v, other, preferred_element_type=wide)


def _join(draw: _Draw, v: Any, pool: list[Any]) -> Any:
    if not v.ndim:
        return jnp.stack([v, v * 2])
    axis = draw.axis(v)
    other = draw.like(v, v.shape) * jnp.ones(v.shape, v.dtype) if draw.rng.integers(2) else v * 2
    if draw.rng.integers(2):
        return jnp.stack([v, other], axis)
    return jnp.concatenate([v, other, v][: draw.rng.integers(1, 4)], axis)


def _pad(draw: _Draw, v: Any, pool: list[Any]) -> Any:
    widths = []
    for n in v.shape:
        low, high, inner = map(int, draw.rng.integers([-1, -1, 0], [2, 2, 2]))
        widths.append((max(low, -(n // 2)), max(high, -(n // 2)), inner * (n > 1)))
    return jax.lax.pad(v, jnp.asarray(draw.rng.integers(2) * 0.5, v.dtype), widths)


def _where(draw: _Draw, v: Any, pool: list[Any]) -> Any:
    kind = draw.rng.integers(4)
    other = [jax.lax.stop_gradient(v), jnp.zeros_like(v), draw.like(v), v * 2][kind]
    mask = draw.mask(draw.thinned(v.shape))
    return jnp.where(mask, v, other) if draw.rng.integers(2) else jnp.where(mask, other, v)


def _double_where(draw: _Draw, v: Any, pool: list[Any]) -> Any:
    """A derivative that is infinite or NaN where it is not selected."""
    positive = jnp.real(v) > 0
    safe = jnp.where(positive, v, 1)
    return jnp.where(positive, jnp.sqrt(safe), 0)


def _gather(draw: _Draw, v: Any, pool: list[Any]) -> Any:
    if not v.ndim or 0 in v.shape:
        return v
    kind, axis = draw.rng.integers(7), draw.axis(v)
    index = [draw.i[0, 0], draw.i[0], draw.i, draw.i[:1, :1], draw.i[1].astype(jnp.int8)][draw.rng.integers(5)]
    mode = ["clip", "fill", "promise_in_bounds", "drop", None][draw.rng.integers(5)]
    if kind == 0:
        return v[index]
    if kind == 1:
        return v[(slice(None),) * axis + (index,)]
    if kind == 2 and v.ndim > 1:
        return v.at[draw.i[0], draw.i[1]].get(mode=mode, fill_value=0.5)
    if kind == 3:
        return jnp.take(v, index, axis, mode=["clip", "fill", "wrap"][draw.rng.integers(3)], fill_value=0.5)
    if kind == 4:
        start = draw.i[0, 0] if draw.rng.integers(2) else int(draw.rng.integers(-1, 3))
        return jax.lax.dynamic_slice_in_dim(v, start, int(draw.rng.integers(1, v.shape[axis] + 1)), axis)
    if kind == 5:
        return v.at[index].set(jnp.asarray(0.5, v.dtype)) if draw.rng.integers(2) else v.at[index].add(v[0])
    return v.at[index].get(mode=mode, fill_value=0.5)


def _cast(draw: _Draw, v: Any, pool: list[Any]) -> Any:
    if jnp.issubdtype(v.dtype, jnp.complexfloating):
        return [jnp.real, jnp.imag, jnp.abs, jnp.conj, lambda v: v.real.astype(jnp.bfloat16)][draw.rng.integers(5)](v)
    kind = draw.rng.integers(8)
    if kind == 0:
        return jax.lax.complex(v, v * 2) if v.dtype in (jnp.float32, jnp.float64) else v.astype(jnp.complex64)
    if kind == 1:
        return v * jnp.exp(1j * draw.x[0, 0]).astype(jnp.complex64)
    if kind == 2:
        return v.astype(jnp.int32).astype(v.dtype) + v
    if kind == 3:
        return v + (v > 0)
    return v.astype([jnp.bfloat16, jnp.float16, draw.x.dtype, jnp.float32][kind - 4])


def _unary(draw: _Draw, v: Any, pool: list[Any]) -> Any:
    kind = draw.rng.integers(6)
    size = jnp.abs(v)
    if kind == 0:
        return jnp.sqrt(size + 0.5)
    if kind == 1:
        return v / jnp.sqrt(jnp.sum(jnp.square(size)) + 1)
    if kind == 2:
        return jnp.square(size) if draw.rng.integers(2) else v**2
    return [jnp.tanh, jnp.negative, lambda v: jnp.flip(v)][kind - 3](v)


def _scan(draw: _Draw, v: Any, pool: list[Any]) -> Any:
    """A loop over the axis of one array, which another is used in."""
    if not v.ndim or 0 in v.shape:
        return v
    w = pool[draw.rng.integers(len(pool))]
    w = w if w.ndim and w.size else v[0]
    w = (w if jnp.issubdtype(v.dtype, jnp.complexfloating) else jnp.real(w)).astype(v.dtype)
    kind = draw.rng.integers(3)

    def step(carry: Any, row: Any) -> tuple[Any, Any]:
        if kind == 0:
            return carry + jnp.sum(row) * w, row * draw.x[0, 0].astype(row.dtype)
        if kind == 1:
            return carry, row * jnp.sum(w)
        return jnp.tanh(carry * jnp.mean(row) + w), row * 2

    start = jnp.zeros(w.shape, v.dtype)
    step = jax.checkpoint(step) if draw.rng.integers(3) == 0 else step
    last, rows = jax.lax.scan(step, start, v, unroll=1)
    return last if draw.rng.integers(2) and kind != 1 else rows


_OPS: list[Callable[[_Draw, Any, list[Any]], Any]] = [
    *[_binary] * 5, *[_grown] * 2, *[_expand] * 2, _new_axis, _squeeze, *[_slice] * 2, *[_sum] * 2, *[_reshape] * 2,
    *[_transpose] * 2, *[_dot] * 3, *[_join] * 2, *[_pad] * 2, *[_where] * 2, _double_where, *[_gather] * 2,
    *[_cast] * 3, *[_unary] * 2, _scan,
]  # fmt: skip
