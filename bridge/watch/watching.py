"""Sees what the user's code reads while it is traced, where its bytecode does not tell.

- A name that is put together (``getattr``, ``eval``, ``import_module``) counts from then on as one that the code holds,
  so that the walk over what the function captures follows it.
- What nobody can follow is refused: clocks, the randomness of the system, files, names in ``globals()``.

What libraries read for themselves, such as the time for a log, is left alone, and so is what other threads do.
"""

from __future__ import annotations

import asyncio
import atexit
import builtins
import contextlib
import datetime
import functools
import importlib
import inspect
import io
import os
import random
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import torch

from ...jax_impl.program.trees import Function
from ..base.errors import TraceError, user_line
from ..base.user_code import asked_by, is_users, reader
from .names import names_of, remember_read

FROZEN = "a traced function runs once, and what it was given would stay the same in all further calls"
_TIMES = ("time", "perf_counter", "monotonic", "process_time", "thread_time", "clock_gettime")
_OF_MODULES = {
    "time": {*_TIMES, *(f"{name}_ns" for name in _TIMES), "localtime", "gmtime", "ctime", "asctime", "strftime"},
    "posix": {"urandom", "getrandom", "times", "getloadavg"},
    "nt": {"urandom", "times"},
    "resource": {"getrusage"},
    "_uuid": {"generate_time_safe"},
    "sys": {"_getframe", "_current_frames"},
}
_OF_DATES = frozenset({"now", "utcnow", "today"})
_CALLED = frozenset().union(*_OF_MODULES.values(), _OF_DATES, {"seed", "get_state"})
_MODULES = frozenset({"time", "datetime", "uuid", "secrets", "timeit", "inspect"})
# Code that mentions one of these may read a clock.
_WORDS = (
    _MODULES
    | _OF_DATES
    | {"perf_counter", "monotonic", "time_ns", "default_timer", "getrusage", "getloadavg"}
    | {
        *(
            "urandom",
            "getrandom",
            "uuid1",
            "uuid4",
            "Random",
            "SystemRandom",
            "default_rng",
            "RandomState",
            "SeedSequence",
        ),
        *("_getframe", "currentframe", "times", "seed", "get_state"),
    }
)


def may_read_clocks(names: frozenset[str]) -> bool:
    """Whether code with these names may read a clock or the system's randomness."""
    return not _WORDS.isdisjoint(names)


def is_clock(x: object) -> bool:
    """Whether a captured function, class or Python module gives something else at each call."""
    if isinstance(x, types.ModuleType):
        return x.__name__ in _MODULES
    if isinstance(x, types.BuiltinFunctionType):
        return x.__name__ in _CALLED and _is_clock(x)
    return getattr(x, "__module__", None) in _MODULES


def _is_clock(x: types.BuiltinFunctionType) -> bool:
    owner = x.__self__
    if isinstance(owner, types.ModuleType):
        return x.__name__ in _OF_MODULES.get(owner.__name__, ())
    if x.__name__ in ("seed", "get_state"):
        return isinstance(owner, torch.Generator)
    return x.__name__ in _OF_DATES and isinstance(owner, type) and issubclass(owner, datetime.date)


class _Active(threading.local):
    depth = 0
    refusal: TraceError | None = None


_ACTIVE = _Active()
_LOCK = threading.Lock()
_installed = 0
_originals: list[tuple[object, str, object]] = []


@contextlib.contextmanager
def watching(clocks: bool) -> Iterator[None]:
    """While this thread runs the user's code: see what it reads. ``clocks``: its code may read one."""
    _install()
    _ACTIVE.depth += 1
    outer, _ACTIVE.refusal = _ACTIVE.refusal, None
    try:
        with _watching_clocks() if clocks else contextlib.nullcontext():
            yield
    finally:
        _ACTIVE.refusal = outer
        _ACTIVE.depth -= 1
        _remove()


def refused() -> TraceError | None:
    """What was refused of what the code read, which may have caught it."""
    return _ACTIVE.refusal


@contextlib.contextmanager
def _watching_clocks() -> Iterator[None]:
    before: Any = sys.getprofile()
    own = before if callable(before) else None

    def look(frame: types.FrameType, event: str, arg: Any) -> None:
        if own is not None:
            own(frame, event, arg)
        if event != "c_call" or arg.__name__ not in _CALLED or not (_is_clock(arg) or _is_seeded_anew(frame, arg)):
            return
        owner = arg.__self__
        if owner is sys and reader(frame.f_code.co_filename) != "user" and frame.f_globals is not vars(inspect):
            return  # to say which Python module a class is defined in
        if asked_by(frame) is not None:
            name = f"{getattr(owner, '__name__', type(owner).__name__)}.{arg.__name__}"
            _refuse(_what(name), "measure and draw outside, and pass the number in as an argument.")

    if before is not None and own is None:  # a profiler in C, which sys.setprofile cannot put back
        before.disable()
    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(own)
        if before is not None and own is None:
            before.enable()


def _is_seeded_anew(frame: types.FrameType, arg: object) -> bool:
    """Whether a generator of Python's is made without a seed: it takes one from the system."""
    return frame.f_code is random.Random.seed.__code__ and frame.f_locals.get("a") is None


def _what(name: str) -> str:
    module = name.split(".")[0]
    if name.endswith("get_state"):
        return "asks for the state of a torch.Generator"
    if "frame" in name:
        return f"looks at its callers by {name}"
    if module in ("posix", "nt", "Random", "Generator") and not name.endswith(("times", "getloadavg")):
        return f"draws from the randomness of the system by {name.replace('posix', 'os').replace('nt.', 'os.')}"
    return f"reads a clock by {name}"


def _refuse(what: str, way_out: str) -> NoReturn:
    _ACTIVE.refusal = TraceError(f"{user_line()}: the function {what}, but {FROZEN}: {way_out}")
    raise _ACTIVE.refusal


def _install() -> None:
    global _installed
    with _LOCK:
        _installed += 1
        if _installed > 1:
            return
        for owner, name, make in _WATCHED:
            original = getattr(owner, name)
            _originals.append((owner, name, original))
            setattr(owner, name, functools.wraps(original)(make(original)))


def _remove() -> None:
    global _installed
    with _LOCK:
        _installed -= 1
        while not _installed and _originals:
            setattr(*_originals.pop())


def _reads_attribute(original: Function) -> Function:
    frame_of = sys._getframe

    def read(*args: object) -> object:
        if _ACTIVE.depth and len(args) > 1:
            frame = frame_of(1)
            if reader(frame.f_code.co_filename) in ("user", "library"):
                _remember_attribute(frame, args[0], args[1])
        return original(*args)

    return read


def _remember_attribute(frame: types.FrameType, thing: object, name: object) -> None:
    if isinstance(name, str) and _is_followed_by_name(thing, name):
        code = asked_by(frame)
        if code is not None:
            remember_read(code, (name,))


def _is_followed_by_name(thing: object, name: str) -> bool:
    """Whether a walk follows only those attributes of a thing whose names it met."""
    if isinstance(thing, (type, types.ModuleType)):
        return is_users(thing) or (isinstance(thing, type) and any(map(is_users, thing.__mro__)))
    if isinstance(thing, torch.nn.Module):
        fields = thing.__dict__
        held = ("_parameters", "_buffers", "_modules")
        return name not in fields and not any(name in fields[kind] for kind in held if kind in fields)
    if isinstance(thing, torch.Tensor):
        return name in thing.__dict__
    kind: type = type(thing)
    return isinstance(thing, (types.SimpleNamespace, types.FunctionType)) or any(map(is_users, kind.__mro__))


@contextlib.contextmanager
def watching_fields(classes: Iterable[type], names: frozenset[str]) -> Iterator[None]:
    """While this thread runs the user's code: see what libraries and ``__repr__`` read of objects of his classes.

    ``names`` are those that the walk over the function follows already.
    """
    owner, patched = threading.get_ident(), []

    def read(thing: object, name: str) -> object:
        if name not in names and threading.get_ident() == owner and not name.startswith("__"):
            frame = sys._getframe(1)
            is_seen = reader(frame.f_code.co_filename) != "library" and frame.f_code.co_name != "__repr__"
            code = None if is_seen else _asked_by_repr(frame)
            if code is not None:
                remember_read(code, (name,))
        return object.__getattribute__(thing, name)

    try:
        for cls in classes:
            own: object = cls.__getattribute__
            if own is object.__getattribute__ and not issubclass(cls, torch.Tensor):
                with contextlib.suppress(TypeError, AttributeError):  # of a class that is closed
                    cls.__getattribute__ = read  # type: ignore[method-assign]
                    patched.append(cls)
        yield
    finally:
        for cls in patched:
            del cls.__getattribute__


def _asked_by_repr(frame: types.FrameType | None) -> types.CodeType | None:
    """The user's code for which a frame reads something, through ``__repr__`` too: no code names that it calls it."""
    code = asked_by(frame)
    while frame is not None and code is not None and code.co_name == "__repr__":
        frame = frame.f_back
        code = asked_by(frame)
    return code


def _runs_code(original: Function) -> Function:
    def run(
        source: str | bytes | types.CodeType,
        globals: dict[str, Any] | None = None,
        locals: object = None,
        **options: object,
    ) -> object:
        frame = sys._getframe(1)
        if globals is None:
            globals = frame.f_globals
            locals = dict(frame.f_locals) if frame.f_code.co_flags & 1 and locals is None else locals or frame.f_locals
        code = asked_by(frame) if _ACTIVE.depth else None
        if code is not None:
            with contextlib.suppress(SyntaxError, ValueError, TypeError):
                made = source if isinstance(source, types.CodeType) else compile(source, "<string>", "exec")
                remember_read(code, names_of(made))
        return original(source, globals, locals, **options)

    return run


def _imports(original: Function) -> Function:
    def import_module(name: str, package: str | None = None) -> types.ModuleType:
        module = original(name, package)
        code = asked_by(sys._getframe(1)) if _ACTIVE.depth and is_users(module) else None
        if code is not None:
            remember_read(code, (module.__name__,))
        return module

    return import_module


def _globals(original: Function) -> Function:
    def globals() -> dict[str, Any]:
        frame = sys._getframe(1)
        if _ACTIVE.depth and asked_by(frame) is not None:
            _refuse("asks for globals()", "write the name out, or look it up in a dict of your own.")
        return frame.f_globals

    return globals


def _reads_file(original: Function) -> Function:
    def open(file: object, mode: str = "r", *args: object, **kwargs: object) -> object:
        if _ACTIVE.depth and ("r" in mode or "+" in mode) and asked_by(sys._getframe(1)) is not None:
            _refuse(f"reads the file {file!r}", "read it before the call.")
        return original(file, mode, *args, **kwargs)

    return open


def _opens(original: Function) -> Function:
    def open(path: object, flags: int, *args: object, **kwargs: object) -> object:
        if _ACTIVE.depth and not flags & (os.O_WRONLY | os.O_RDWR) and asked_by(sys._getframe(1)) is not None:
            _refuse(f"reads the file {path!r}", "read it before the call.")
        return original(path, flags, *args, **kwargs)

    return open


def _moves_event(original: Function) -> Function:
    def move(event: threading.Event | asyncio.Event) -> None:
        if _ACTIVE.depth and event.is_set() != (original.__name__ == "set") and asked_by(sys._getframe(1)) is not None:
            _refuse(
                f"sets or clears a {type(event).__module__.partition('.')[0]}.Event, which it would do once",
                "do that outside of the function.",
            )
        original(event)

    return move


def _registers(original: Function) -> Function:
    def register(*args: Any, **kwargs: Any) -> object:
        if _ACTIVE.depth and reader(sys._getframe(1).f_code.co_filename) == "user":
            _refuse(
                f"registers a call by {original.__qualname__.removesuffix('.__init__')}, which it would do once",
                "do that outside of it.",
            )
        return original(*args, **kwargs)

    return register


def _asks_outside(what: str) -> Callable[[Function], Function]:
    def make(original: Function) -> Function:
        def ask(*args: object, **kwargs: object) -> object:
            if _ACTIVE.depth and asked_by(sys._getframe(1)) is not None:
                _refuse(f"asks {what}", "ask before the call, and pass the answer in as an argument.")
            return original(*args, **kwargs)

        return ask

    return make


_ASKS_STATE = {"get_state", "set_state", "initial_seed", "seed", "manual_seed"}
_PASSED_THROUGH = (torch.random.__file__, contextlib.__file__)  # from fork_rng to what it calls


class _DefaultGenerator:
    """torch's own generator, as ``torch.random`` has it: the user's code may neither ask for its state nor set it."""

    def __init__(self, original: torch.Generator) -> None:
        self._original = original

    def __getattr__(self, name: str) -> Any:
        if _ACTIVE.depth and name in _ASKS_STATE:
            frame: types.FrameType | None = sys._getframe(1)
            while frame is not None and frame.f_code.co_filename in _PASSED_THROUGH:
                frame = frame.f_back
            if asked_by(frame) is not None:  # checkpoints do so too
                way_out = "each call of its program draws from a key of its own. Do that outside of the function."
                _refuse("asks for the state of torch's generator, or sets it", way_out)
        return getattr(self._original, name)


_WATCHED: list[tuple[object, str, Function]] = [
    *((builtins, name, _reads_attribute) for name in ("getattr", "hasattr")),
    *((builtins, name, _runs_code) for name in ("eval", "exec")),
    (builtins, "globals", _globals),
    (importlib, "import_module", _imports),
    *((owner, "open", _reads_file) for owner in (builtins, io)),
    *((owner, name, _moves_event) for owner in (threading.Event, asyncio.Event) for name in ("set", "clear")),
    (weakref.finalize, "__init__", _registers),
    (atexit, "register", _registers),
    (builtins, "input", _asks_outside("the user")),
    (os, "open", _opens),
    (torch.random, "default_generator", _DefaultGenerator),
    *((os, name, _asks_outside("the file system")) for name in ("stat", "listdir", "scandir")),
]
