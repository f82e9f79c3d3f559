"""Locks, semaphores and barriers: a function may hold one while it runs, and leaves it as it was."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

_LOCK: type = type(threading.Lock())
_RLOCK: Any = type(threading.RLock())
LOCKS = (_LOCK, _RLOCK, threading.Condition, threading.Semaphore, threading.Event, threading.Barrier, asyncio.Event)
# Code that mentions one of these may ask for what a lock says, or change it.
MOVES = frozenset({"acquire", "release", "locked", "wait", "abort", "reset", "broken", "n_waiting", "_value"})


def state(lock: Any) -> object:
    """What a lock answers to the one who asks."""
    if isinstance(lock, threading.Semaphore):
        return lock._value
    if isinstance(lock, threading.Barrier):
        return lock.n_waiting, lock.broken
    if isinstance(lock, threading.Condition):
        inner: Any = lock
        return state(inner._lock)
    return lock._is_owned() if isinstance(lock, _RLOCK) else lock.locked()


def put_back(lock: Any, before: Any) -> None:
    """Make a lock answer as it did before."""
    if state(lock) == before:
        return
    if isinstance(lock, threading.Semaphore):
        lock._value = before
    elif isinstance(lock, threading.Barrier):
        lock.reset()
    else:
        (lock.acquire if before else lock.release)()
