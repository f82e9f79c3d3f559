"""Names of parameters in torch and in JAX, as words: how alike two of them are."""

from __future__ import annotations

import functools
import re
from collections import Counter

_SAME = {
    "weight": ("w", "kernel", "weights", "scale", "gamma", "g", "table", "matrix"),
    "bias": ("b", "beta", "offset"),
    "layer": ("layers", "block", "blocks", "h"),
    "norm": ("ln", "layernorm", "norms", "batchnorm", "bn", "groupnorm", "rmsnorm"),
    "attention": ("attn", "attns", "self"),
    "query": ("q", "wq", "bq"),
    "key": ("k", "wk", "bk"),
    "value": ("v", "wv", "bv"),
    "input": ("ih", "wi", "bi", "wx", "bx"),
    "hidden": ("hh", "wh", "bh", "recurrent"),
    "out": ("o", "wo", "bo", "output"),
    "embed": ("emb", "embedding", "embeddings", "wte", "tok", "token"),
    "position": ("pos", "wpe", "positional"),
    "mlp": ("ffn", "ff", "feedforward"),
    "linear": ("dense", "fc", "proj", "lin", "projection"),
    "head": ("lm", "classifier", "unembed", "readout"),
}
_WORD = {alias: word for word, aliases in _SAME.items() for alias in aliases}
_LETTER = {"w": "weight", "b": "bias"}


@functools.lru_cache(maxsize=4096)
def words(name: str) -> list[str]:
    """Return a name as words, aliases replaced: ``blocks.0.wq`` is layer, 0, query, weight."""
    found = []
    for part in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+", name):
        part = part.lower()
        found.append(_WORD.get(part, part))
        if len(part) == 2 and part[0] in _LETTER and part[1] in "qkvoihx":
            found.append(_LETTER[part[0]])
    return found


def likeness(one: list[str], two: list[str]) -> float:
    """Tell how alike two names are: the words that they share, the numbers in their order, and the letters."""
    shared = sum((Counter(one) & Counter(two)).values())
    numbers = [[w for w in each if w.isdigit()] for each in (one, two)]
    same_kind = (one[-1:] == ["bias"]) == (two[-1:] == ["bias"])
    letters = [_pairs(" ".join(each)) for each in (one, two)]
    common = len(letters[0] & letters[1]) / max(1, len(letters[0] | letters[1]))
    return 2 * shared / max(1, len(one) + len(two)) + (numbers[0] == numbers[1]) + 0.5 * same_kind + 0.3 * common


@functools.lru_cache(maxsize=4096)
def _pairs(text: str) -> frozenset[str]:
    return frozenset(text[i : i + 2] for i in range(len(text) - 1))


def kind(path: str) -> str:
    """Return what the leaves of one kind in all layers have in common: the words without numbers."""
    return " ".join(w for w in words(path) if not w.isdigit() and w != "layer")
