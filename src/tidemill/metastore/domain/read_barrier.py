"""Barrier shared by concurrent callers: one read of consensus, begun after the last of them had called."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from tidemill.base.errors import ClosedError, TidemillError
from tidemill.base.runtime.tasks import FailureHandler, Tasks


class Barrier:
    """Shared barrier. `pass_through` performs one round. A caller joins the round that has not begun, never the running
    one: that may have read consensus before the write that the caller wants to see was durable.
    """

    def __init__(self, pass_through: Callable[[], Awaitable[None]], name: str, on_failure: FailureHandler) -> None:
        """`on_failure` handles unexpected errors of a round; its callers have received the error already."""
        self._pass_through = pass_through
        self._name = name
        self._joinable: asyncio.Future[None] | None = None
        self._busy = False
        self._closed: TidemillError | None = None
        self._tasks = Tasks(on_failure)

    async def wait(self) -> None:
        """Wait for a round. Raises what the round raised, to each of its callers; Closed."""
        if self._closed is not None:
            raise self._closed
        if self._joinable is None:
            self._joinable = asyncio.get_running_loop().create_future()
            if not self._busy:
                self._busy = True
                self._tasks.spawn(self._run_rounds(), name=self._name)
        await asyncio.shield(self._joinable)

    async def _run_rounds(self) -> None:
        try:
            while self._joinable is not None:
                joined, self._joinable = self._joinable, None
                await self._run_round(joined)
        finally:
            self._busy = False
            if self._joinable is not None:
                # A round failed unexpectedly: callers that had joined the next one must not wait forever.
                joined, self._joinable = self._joinable, None
                _set_exception(joined, self._closed or ClosedError(f"the barrier failed: barrier={self._name}."))

    async def _run_round(self, joined: asyncio.Future[None]) -> None:
        try:
            await self._pass_through()
        except TidemillError as error:
            _set_exception(joined, error)
        except BaseException as error:
            _set_exception(joined, ClosedError(f"the barrier failed: barrier={self._name} reason={error!r}."))
            raise
        else:
            joined.set_result(None)

    async def aclose(self) -> None:
        self._closed = ClosedError(f"the barrier is closed: barrier={self._name}.")
        joinable, self._joinable = self._joinable, None
        await self._tasks.aclose()
        if joinable is not None:
            _set_exception(joinable, self._closed)


def _set_exception(joined: asyncio.Future[None], error: TidemillError) -> None:
    joined.set_exception(error)
    joined.exception()  # marks it as retrieved, in case no caller is left; waiting callers still get it
