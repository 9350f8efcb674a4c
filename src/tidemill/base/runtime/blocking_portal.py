"""One event loop in one thread, callable from synchronous code (Spark drivers, CLI commands, executors)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, Self, TypeVar

from tidemill.base.errors import ClosedError

T = TypeVar("T")

CLOSE_TIMEOUT_S = 5.0
"""Time that cancelled work on the loop has to end when the portal is closed."""


class BlockingPortal:
    """Runner of coroutines on one event loop: `call(coroutine)` returns the result or raises the error.

    No caller outlives the loop: `close` cancels all work, and a thread that waits in `call` gets CancelledError.
    """

    def __init__(self, name: str = "tidemill-portal") -> None:
        self._loop = asyncio.new_event_loop()
        self._lock = threading.RLock()  # a finalizer may make a call inside another call
        self._waiting: set[Future[Any]] = set()
        self._closing = False
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    @property
    def is_loop_thread(self) -> bool:
        """True if the caller runs in the loop's own thread, as a finalizer may.

        There, waiting for the loop would deadlock.
        """
        return threading.current_thread() is self._thread

    def call(self, coroutine: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run a coroutine on the loop and wait for its result.

        Raises the coroutine's error, TimeoutError, ClosedError if the portal is closed, CancelledError if it closes
        during the call, and RuntimeError in the loop's own thread, which would wait for itself.
        """
        if self.is_loop_thread:
            coroutine.close()
            raise RuntimeError("the loop's own thread would wait for itself")
        with self._lock:  # a concurrent `close` either sees this call, or rejects it
            if self._closing:
                coroutine.close()
                raise ClosedError("the event loop of this process is closed.")
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
            self._waiting.add(future)
        try:
            return future.result(timeout_s)
        except BaseException:
            future.cancel()
            raise
        finally:
            self._waiting.discard(future)

    def close(self) -> None:
        with self._lock:
            if self._closing:
                return
            self._closing = True
        asyncio.run_coroutine_threadsafe(self._end_tasks(), self._loop)
        self._thread.join(timeout=2 * CLOSE_TIMEOUT_S)
        for future in list(self._waiting):  # of tasks that did not end when they were cancelled
            future.cancel()
        if not self._thread.is_alive():
            self._loop.close()

    async def _end_tasks(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_TIMEOUT_S)
        self._loop.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
