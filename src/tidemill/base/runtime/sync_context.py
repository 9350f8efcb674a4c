"""An asynchronous context that synchronous code can stay in for any time."""

from __future__ import annotations

import asyncio
import contextlib
from concurrent.futures import CancelledError, Future
from contextlib import AbstractAsyncContextManager
from typing import Generic, TypeVar

import structlog

from tidemill.base.errors import ClosedError
from tidemill.base.runtime.blocking_portal import CLOSE_TIMEOUT_S, BlockingPortal
from tidemill.base.runtime.tasks import Tasks

T = TypeVar("T")

log = structlog.get_logger()


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
