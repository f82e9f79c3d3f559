"""What differs between releases of JAX in the programs that the transforms read, in one place."""

from __future__ import annotations

from typing import Any

import jax

__all__ = ["scan_counts"]


def scan_counts(parameters: dict[str, Any]) -> tuple[int, int]:
    """Return how many inputs of a scan are constants, and how many after them are carried from step to step."""
    if "num_consts" in parameters:  # up to jax 0.10
        return parameters["num_consts"], parameters["num_carry"]
    try:
        constants, carried, _ = parameters["ft_in"].unpack()
    except (KeyError, AttributeError) as error:
        raise RuntimeError(
            f"microtome does not know the form of lax.scan in jax {jax.__version__}; "
            "it works with jax 0.10 to 0.12: please install one of these."
        ) from error
    return len(constants), len(carried)
