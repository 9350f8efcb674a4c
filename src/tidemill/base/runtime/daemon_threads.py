"""Calls that wait for another machine and cannot be cancelled, such as the resolution of a name: each in a separate
daemon thread.

getaddrinfo(3) takes 10 s and more for each name while no DNS server answers. In the loop's executor, which has few
threads, such calls would delay all other work, also that of a stop, and the ends of the loop and of the interpreter
would join them. Nothing waits for a daemon thread. Use one only for a call that reads: it may end at any instruction.
`exit_now` ends a process without waiting for any thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")


async def call_in_daemon_thread(work: Callable[[], T], name: str) -> T:
    """Return the result of `work`, or raise its exception. A cancelled caller leaves the thread behind until `work`
    returns."""
    return await asyncio.wrap_future(_start(work, name))


def exit_now(code: int) -> NoReturn:
    """Exit without ending the interpreter, whose end waits for threads and runs `atexit`. A thread of a library that
    calls into it at that moment aborts the process."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # its reader is gone
            stream.flush()
    os._exit(code)


def _start(work: Callable[[], T], name: str) -> Future[T]:
    result: Future[T] = Future()
    result.set_running_or_notify_cancel()  # a caller that is cancelled does not cancel it: the thread still sets it

    def run() -> None:
        try:
            found = work()
        except BaseException as error:
            result.set_exception(error)
        else:
            result.set_result(found)

    threading.Thread(target=run, name=name, daemon=True).start()
    return result


def resolve_names_in_daemon_threads(loop: asyncio.AbstractEventLoop) -> None:
    """Let `loop` resolve the names of all connections in daemon threads. Called before the first one.

    Equal questions share one thread, so retries during an outage of DNS do not add threads.
    """
    asked: dict[tuple[Any, ...], Future[list[tuple[Any, ...]]]] = {}

    async def getaddrinfo(
        host: str | bytes | None, port: str | bytes | int | None, **hints: int
    ) -> list[tuple[Any, ...]]:
        question = (host, port, *sorted(hints.items()))
        answer = asked.get(question)
        if answer is None:
            answer = _start(lambda: list(socket.getaddrinfo(host, port, **hints)), "getaddrinfo")
            asked[question] = answer
            answer.add_done_callback(lambda _: asked.pop(question))
        return await asyncio.wrap_future(answer)

    loop.getaddrinfo = getaddrinfo  # type: ignore[method-assign]
