"""Calls of the bucket library that are under way, and the end of the interpreter.

Problem: the library runs on threads that it starts itself. One of them sets the result of each call, for which it takes
the interpreter's lock. If the interpreter ends at that moment, CPython up to 3.13 ends the thread inside the library,
which aborts the process (SIGABRT): a command that had succeeded ends with exit code 134. The caller continues as soon
as the result is set, before that thread has left the interpreter, so it happens at the end of a command whose last call
reads a bucket, most often on a busy machine.

State: the futures of the library, held weakly. The library holds each of them strongly until its threads have finished
with it, also after a cancellation.

Algorithm: when the interpreter ends, wait until no future is left, for at most EXIT_WAIT_S. The library drops its last
reference without the lock and completes that at its next call, hence `_complete_drops`.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
import weakref
from collections.abc import Awaitable
from typing import TypeVar

from obstore.store import MemoryStore

T = TypeVar("T")

EXIT_WAIT_S = 1.0
POLLS_PER_S = 1000

_pending: weakref.WeakSet[asyncio.Future[object]] = weakref.WeakSet()


async def wait_for_call(call: Awaitable[T]) -> T:
    """Return the result of a call of the library, or raise its error."""
    if isinstance(call, asyncio.Future):
        _pending.add(call)
    try:
        return await call
    finally:
        del call  # the traceback of an error may live longer than the call


def count_pending_calls() -> int:
    """Return the number of calls with which the library has not finished."""
    _complete_drops()
    return len(_pending)


def _complete_drops() -> None:
    MemoryStore()  # any call


def _wait_at_exit() -> None:
    never = threading.Event()
    for _ in range(round(EXIT_WAIT_S * POLLS_PER_S)):
        if not count_pending_calls():
            return
        never.wait(1 / POLLS_PER_S)


atexit.register(_wait_at_exit)
os.register_at_fork(after_in_child=_pending.clear)  # the library's threads are not in the child
