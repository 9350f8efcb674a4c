"""One event loop in one thread, callable from synchronous code (Spark drivers, CLI commands, executors), and
asynchronous contexts that such code can stay in for any time.

anyio's BlockingPortal cannot replace it. A context that anyio entered stays open after its last reference is dropped,
and cannot be left in the loop's own thread, where the garbage collector may run a finalizer. Closing waits forever for
a task that ignores its cancellation.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from concurrent.futures import CancelledError, Future
from contextlib import AbstractAsyncContextManager
from typing import Any, Generic, Self, TypeVar

import structlog

from tidemill.base.errors import ClosedError
from tidemill.base.runtime.daemon_threads import resolve_names_in_daemon_threads
from tidemill.base.runtime.tasks import Tasks

T = TypeVar("T")

log = structlog.get_logger()

CLOSE_TIMEOUT_S = 5.0
"""Time that cancelled work on the loop has to end when the portal is closed."""


class BlockingPortal:
    """Runner of coroutines on one event loop: `call(coroutine)` returns the result or raises the error.

    No caller outlives the loop: `close` cancels all work, and a thread that waits in `call` gets CancelledError.
    """

    def __init__(self, name: str = "tidemill-portal") -> None:
        self._loop = asyncio.new_event_loop()
        resolve_names_in_daemon_threads(self._loop)
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


class SyncContext(Generic[T]):
    """A `context` entered in a separate task, which stays in it until `exit`; `value` is the result of entering it.

    Without `exit`, it is left when the last reference is dropped, or when the portal closes. Raises as
    `BlockingPortal.call`.
    """

    def __init__(self, portal: BlockingPortal, context: AbstractAsyncContextManager[T]) -> None:
        self._portal = portal
        self._leaving = leaving = Future[None]()
        given = Future[T]()

        async def stay() -> None:
            try:
                async with context as value:
                    given.set_result(value)
                    await asyncio.wrap_future(leaving)
            except BaseException as error:
                if given.done():
                    raise
                given.set_exception(error)

        async def spawn_stay() -> Tasks:
            tasks = Tasks(lambda _, error: log.warning("left with an error", cause=str(error)))
            staying = tasks.spawn(stay(), name="entered")
            # A closing portal may cancel the task before its first step.
            staying.add_done_callback(lambda _: given.done() or given.cancel())
            return tasks

        self._tasks = portal.call(spawn_stay())
        try:
            self.value: T = given.result()
        except BaseException:
            self._start_exit()
            raise

    def exit(self) -> None:
        """Leave the context and wait for its end; the portal's own thread does not wait. Idempotent.

        A no-op after the portal was closed.
        """
        if self._start_exit() and not self._portal.is_loop_thread:
            with contextlib.suppress(ClosedError, CancelledError):
                self._portal.call(self._tasks.drain(CLOSE_TIMEOUT_S))

    def _start_exit(self) -> bool:
        """Start leaving without waiting: garbage may be collected in the portal's own thread, or after its end."""
        first = not self._leaving.done()
        if first:
            self._leaving.set_result(None)
        return first

    def __enter__(self) -> T:
        return self.value

    def __exit__(self, *exc: object) -> None:
        self.exit()

    def __del__(self) -> None:
        self._start_exit()
