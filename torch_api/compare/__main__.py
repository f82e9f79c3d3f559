"""The command ``python -m microtome.torch_api.compare``: a comparison for continuous integration."""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .comparison import compare

_EPILOG = """
exit status: 0 if the functions agree, 1 if they differ or could not be compared, 2 for a wrong command line.

The arrays of the file are the arguments, in the file's order, or by the names of the torch function's parameters where
all names match. An object that is no callable itself, such as params=module:object, is imported as it stands.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m microtome.torch_api.compare",
        description="Compare a torch function or module with its port to JAX.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("torch_fun", metavar="MODULE:TORCH_FUN", help="the torch function or module")
    parser.add_argument("jax_fun", metavar="MODULE:JAX_FUN", nargs="?", help="its port; without it, the engines alone")
    parser.add_argument("--inputs", required=True, metavar="FILE.npz", help="the arguments, as numpy.savez writes them")
    parser.add_argument(
        "--params", metavar="MODULE:OBJECT", help="the port's parameters, a pytree or a function of none"
    )
    parser.add_argument("--mapping", metavar="MODULE:OBJECT", help="the torch source of each parameter, a dict")
    parser.add_argument("--json", metavar="FILE", help="write the report to this file")
    parser.add_argument("--locate", action="store_true", help="name the first submodule that differs")
    parser.add_argument(
        "--engines", action="store_true", help="compare what microtome traces of the torch function too"
    )
    parser.add_argument("--hvp", action="store_true", help="compare a Hessian-vector product too")
    parser.add_argument("--no-gradients", action="store_true", help="compare outputs only")
    parser.add_argument("--batch-argnums", type=int, nargs="+", help="compare the gradient of each example of these")
    parser.add_argument("--random-inputs", type=int, default=0, metavar="N", help="compare on N random inputs as well")
    options = parser.parse_args(arguments)
    sys.path.insert(0, os.getcwd())
    try:  # whatever the modules raise is no verdict, so the status must not be that of one
        torch_fun = _load(options.torch_fun)
        jax_fun = None if options.jax_fun is None else _load(options.jax_fun)
        params = None if options.params is None else _load(options.params)
        mapping = None if options.mapping is None else _load(options.mapping)
        if inspect.isfunction(params):
            params = params()
        with open(options.inputs, "rb") as file:  # numpy leaves a damaged file open that it opened itself
            arrays = np.load(file)
            if not isinstance(arrays, np.lib.npyio.NpzFile):
                raise ValueError(f"{options.inputs} must be a file of named arrays, as numpy.savez writes them.")
            inputs = _ordered(torch_fun, dict(arrays))
        report = compare(
            torch_fun,
            jax_fun,
            *inputs,
            params=params,
            mapping=mapping,
            gradients=not options.no_gradients,
            batch_argnums=options.batch_argnums,
            hvp=options.hvp,
            engines=("record", "torch2jax") if options.engines or jax_fun is None else (),
            random_inputs=options.random_inputs,
            locate=options.locate,
        )
        if options.json is not None:
            report.to_json(options.json)
    except Exception as error:
        parser.error(f"{type(error).__name__}: {error}")
    print(report)
    return 0 if report.agrees else 1


def _load(name: str) -> Any:
    """Return the object that ``package.module:object.attribute`` names."""
    module, colon, path = name.partition(":")
    if not colon or not path:
        raise ValueError(f"{name!r} must have the form module:object.")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found


def _ordered(fun: Callable[..., object], arrays: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Order the arguments: by the names of the function's parameters if all are among them, else as in the file."""
    try:
        names = list(inspect.signature(getattr(fun, "forward", fun)).parameters)
    except (TypeError, ValueError):
        names = []
    if arrays and set(arrays) <= set(names):
        return [arrays[name] for name in names if name in arrays]
    return list(arrays.values())


if __name__ == "__main__":
    sys.exit(main())
