"""Which code is the user's own, and which belongs to a library or to microtome."""

from __future__ import annotations

import builtins
import functools
import gc
import os
import pathlib
import site
import sys
import types
from typing import Any, Literal

import jax
import torch

_PACKAGE = pathlib.Path(__file__).absolute().parents[2]
OWN = tuple(os.path.join(_PACKAGE, part, "") for part in ("bridge", "jax_impl", "torch_api"))
LIBRARIES = tuple(
    os.path.join(path, "")
    for path in {
        *site.getsitepackages(),
        os.path.dirname(os.__file__),
        *(os.path.dirname(os.path.dirname(module.__file__ or "")) for module in (jax, torch)),
    }
)
# What these read, they read for themselves: no value of it reaches the code that calls them.
_APART = frozenset(
    (
        *("torch", "jax", "jaxlib", "logging", "warnings", "linecache", "traceback", "threading", "queue", "asyncio"),
        *("concurrent", "multiprocessing", "tqdm", "rich", "loguru", "absl", "wandb", "tensorboard", "IPython"),
        *("ipykernel", "coverage", "bdb.py", "pdb.py", "cProfile.py", "profile.py"),
        *("linecache.py", "traceback.py", "warnings.py", "threading.py", "queue.py"),
    )
)
_HANDS_ON = os.path.join("torch", "serialization.py")  # torch.load


def is_users_file(name: str) -> bool:
    """Tell whether a file of source code is neither a library's nor microtome's."""
    return not name.startswith((*LIBRARIES, *OWN))


def _package(name: str) -> types.ModuleType | None:
    return sys.modules.get(name.partition(".")[0])


def _is_written_in_python(cls: type) -> bool:
    """Tell whether a class statement has made a class that has no functions; extensions written in C do not tell."""
    kind: type = type(cls)
    is_static = not cls.__flags__ & 1 << 9  # Py_TPFLAGS_HEAPTYPE
    if is_static or issubclass(cls, BaseException) or not (kind is type or is_users(kind)):
        return False
    has_fields = not vars(cls).keys().isdisjoint(("__dict__", "__weakref__", "__slots__"))
    return has_fields or any(map(is_users, cls.__bases__))


@functools.lru_cache(maxsize=4096)
def is_users(x: Any) -> bool:
    """Tell whether a class or a Python module is the user's own."""
    if isinstance(x, type):
        module = sys.modules.get(x.__module__)
        # Of a file that is run without becoming a module, or of code that is put together.
        if module is None or (module is builtins and getattr(builtins, x.__name__, None) is not x):
            codes = [f.__code__ for f in vars(x).values() if isinstance(f, types.FunctionType)]
            if codes:
                return any(is_users_file(code.co_filename) for code in codes)
            return _package(str(x.__module__)) in (None, builtins) and _is_written_in_python(x)
        x = module
    file = getattr(x, "__file__", None)
    if file is None:  # defined at a prompt, made by hand, or built in
        package = _package(x.__name__)
        is_part = package is not None and package is not x
        return is_users(package) if is_part else x.__name__ == "__main__" or x.__spec__ is None
    return is_users_file(os.path.abspath(file))


@functools.lru_cache(maxsize=4096)
def is_partly_users(cls: type) -> bool:
    """Tell whether the user wrote a class, or one that it derives from."""
    return any(is_users(base) for base in cls.__mro__)


@functools.lru_cache(maxsize=4096)
def reader(file: str) -> Literal["user", "library", "apart", "import"]:
    """Tell for whom a file's code reads: for the user, the code that called it, itself, or to import something."""
    if file.startswith("<frozen "):
        return "import" if file.startswith("<frozen importlib") else "library"
    if file.startswith(OWN) or file.startswith("<__"):
        return "apart"
    if is_users_file(file):
        return "user"
    folder = max((path for path in LIBRARIES if file.startswith(path)), key=len)
    inner = file[len(folder) :]
    return "apart" if inner.split(os.sep)[0] in _APART and not inner.endswith(_HANDS_ON) else "library"


def asked_by(frame: types.FrameType | None) -> types.CodeType | None:
    """Return the user's code for which a frame reads something, itself or through libraries; None where there is none.

    Nor is there one while something is imported, which happens once in plain torch too, or where the interpreter
    collects garbage in the midst of the user's code.
    """
    code, collecting = None, {id(getattr(call, "__code__", call)) for call in gc.callbacks}
    while frame is not None:
        kind = reader(frame.f_code.co_filename)
        if kind == "import" or (kind == "apart" and code is None):
            return None
        if frame.f_code.co_name == "__del__" or id(frame.f_code) in collecting:
            return None
        if kind == "user" and code is None:
            code = frame.f_code
        frame = frame.f_back
    return code
