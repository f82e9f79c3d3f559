"""Which code is the user's own, and which belongs to a library or to microtome."""

from __future__ import annotations

import os
import site

import jax
import torch

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
OWN = tuple(os.path.join(_PACKAGE, part, "") for part in ("bridge", "jax_impl", "torch_api"))
LIBRARIES = tuple(
    os.path.join(path, "")
    for path in {
        *site.getsitepackages(),
        os.path.dirname(os.__file__),
        *(os.path.dirname(os.path.dirname(module.__file__ or "")) for module in (jax, torch)),
    }
)


def is_users_file(name: str) -> bool:
    """Whether a file of source code is neither a library's nor microtome's."""
    return not name.startswith((*LIBRARIES, *OWN))
