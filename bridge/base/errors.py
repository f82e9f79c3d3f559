"""The error of tracing, and the line of the user's that it names."""

from __future__ import annotations

import contextlib
import itertools
import re
import sys
import traceback
import types
import warnings
from collections.abc import Callable, Iterator

from .user_code import LIBRARIES, OWN


class TraceError(TypeError):
    """A torch function does something that a compiled program cannot express."""


def user_line(error: BaseException | None = None) -> str:
    """Find ``file.py:12`` of the innermost frame that belongs to no library (of a library's, where there is none)."""
    within = [] if error is None else list(traceback.walk_tb(error.__traceback__))
    frames = ((frame.f_code.co_filename, line) for frame, line in reversed(within))
    library = "?"
    for name, line in itertools.chain(frames, _frames(sys._getframe(1))):
        if not name.startswith((*OWN, "<frozen")):
            if not name.startswith(LIBRARIES):
                return f"{name}:{line}"
            library = f"{name}:{line}" if library == "?" else library
    return library


_SHOWN: dict[str | tuple[str, type[Warning], int], int] = {}


def warn(message: str) -> None:
    """Warn at the user's line, as Python does: once for each line and message."""
    file, _, line = user_line().rpartition(":")
    warnings.warn_explicit(message, UserWarning, file or "?", int(line) if file else 0, registry=_SHOWN)


_LOCATED = re.compile(r"\S:\d+(: |$)", re.MULTILINE)


def located(error: Exception) -> Exception:
    """Put the user's line before an error that microtome raised, where it names none yet; leave others as they are."""
    frames = list(traceback.walk_tb(error.__traceback__))
    own = bool(frames) and frames[-1][0].f_code.co_filename.startswith(OWN)
    if not own or type(error) not in (TypeError, ValueError, TraceError) or _LOCATED.search(str(error)):
        return error
    return type(error)(f"{user_line(error)}: {error}").with_traceback(error.__traceback__)


@contextlib.contextmanager
def noting_line() -> Iterator[None]:
    """Add the user's line as a note to an error of torch's own, whose text stays as it is."""
    try:
        yield
    except Exception as error:
        if not _LOCATED.search("\n".join((str(error), *getattr(error, "__notes__", ())))):
            error.add_note(f"while microtome traced {user_line(error)}")
        raise


def calling_object(method: Callable[..., object]) -> object:
    """Return the object of which this very method is running, or None."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not method.__code__:
        frame = frame.f_back
    return None if frame is None else next(iter(frame.f_locals.values()))


def is_raised_by_jax(error: BaseException) -> bool:
    """Tell whether an error came out of JAX's own code."""
    frames = list(traceback.walk_tb(error.__traceback__))
    return bool(frames) and (frames[-1][0].f_globals.get("__name__") or "").startswith(("jax.", "jax_"))


def _frames(frame: types.FrameType | None) -> Iterator[tuple[str, int]]:
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back


class FloatsAreStatic(Exception):
    """A torch function was given a float that a program takes as data: it needs the Python number."""


class NoForwardMode(TraceError):
    """The function has derivatives in reverse mode only."""


class WrittenArgument(TraceError):
    """The function writes in place to the tensor argument of this number."""

    def __init__(self, index: int) -> None:
        super().__init__(f"the function writes to its tensor argument {index} in place; clone it first.")
        self.index = index


class WrittenLeaf(TraceError):
    """The function writes in place to a tensor that requires grad."""


def frozen_number() -> TraceError:
    """Return the error for a draw from a generator that is not torch's."""
    return TraceError(
        "the function draws from Python's or NumPy's generator. A traced function runs once, and the number would be "
        "frozen: draw with torch, or pass the number in as an argument."
    )


def refused_backward(whose: str) -> TraceError:
    """Return the error for a ``backward()`` in a traced function that would write to a tensor from outside."""
    return TraceError(
        f"{user_line()}: .backward() inside a traced function would write to .grad of {whose}, which a call does not "
        "repeat. Name the tensors made inside that it is for (inputs=[...]), or use torch.autograd.grad."
    )


def refuse_seed(*args: object, **kwargs: object) -> None:
    """Refuse ``torch.manual_seed``, in whose place this stands while a function is traced."""
    raise TraceError(
        f"{user_line()}: torch.manual_seed inside a traced function: the function runs once, and each call of its "
        "program draws from a key of its own. Call torch.manual_seed before the call."
    )


def refuse_tracer(*args: object) -> None:
    """Refuse to enter a tracer of torch's: this stands in the place of entering one while a function is traced."""
    raise TraceError(
        f"{user_line()}: make_fx or torch.export inside a traced function would take its tensors for constants. Trace "
        "outside and call the result here; for derivatives use torch.func.jvp or vjp."
    )


def memory_refusal(line: str, what: str) -> TraceError:
    """Return the error for what asks where the elements of a tensor lie, or for the elements themselves."""
    return TraceError(
        f"{line}: {what} was asked of a tensor that depends on the arguments or is captured, which has no memory while "
        "its function is traced. Stay in torch ops (torch.stack for a tensor made of tensors), or do this outside and "
        "pass the result in."
    )


_NO_MEMORY = ("data pointer", "data ptr", "not allocated", "no data", "python storage", "storage of a tensor")


def asks_for_memory(error: Exception) -> bool:
    """Tell whether torch refused to give the memory of a tensor that has none."""
    message = str(error)
    return isinstance(error, (RuntimeError, NotImplementedError)) and any(part in message for part in _NO_MEMORY)
