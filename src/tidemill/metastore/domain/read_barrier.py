"""A barrier that those who wait at once share: one read of consensus, begun after the last of them had called."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from tidemill.base.errors import ClosedError, TidemillError
from tidemill.base.runtime.tasks import FailureHandler, Tasks


class Barrier:
    """`pass_through` is what one round does. A caller joins the round that has not begun, never the one under way:
    that one may have read before the caller's own cause was durable.
    """

    def __init__(self, pass_through: Callable[[], Awaitable[None]], name: str, on_failure: FailureHandler) -> None:
        """`on_failure`: the owner of what a round does; those who shared the round have heard of it already."""
        self._pass_through = pass_through
        self._name = name
        self._joinable: asyncio.Future[None] | None = None
        self._busy = False
        self._closed: TidemillError | None = None
        self._tasks = Tasks(on_failure)

    async def passed(self) -> None:
        """Raise what the round raised, to each who shared it; Closed."""
        if self._closed is not None:
            raise self._closed
        if self._joinable is None:
            self._joinable = asyncio.get_running_loop().create_future()
            if not self._busy:
                self._busy = True
                self._tasks.spawn(self._rounds(), name=self._name)
        await asyncio.shield(self._joinable)

    async def _rounds(self) -> None:
        try:
            while self._joinable is not None:
                joined, self._joinable = self._joinable, None
                await self._round(joined)
        finally:
            self._busy = False
            if self._joinable is not None:
                # Only where a round broke: those who had joined the next one must not wait for ever.
                joined, self._joinable = self._joinable, None
                _fail(joined, self._closed or ClosedError(f"The barrier broke: barrier={self._name}."))

    async def _round(self, joined: asyncio.Future[None]) -> None:
        try:
            await self._pass_through()
        except TidemillError as error:
            _fail(joined, error)
        except BaseException as error:
            _fail(joined, ClosedError(f"The barrier broke: barrier={self._name} reason={error!r}."))
            raise
        else:
            joined.set_result(None)

    async def aclose(self) -> None:
        self._closed = ClosedError(f"The barrier was closed: barrier={self._name}.")
        joinable, self._joinable = self._joinable, None
        await self._tasks.aclose()
        if joinable is not None:
            _fail(joinable, self._closed)


def _fail(joined: asyncio.Future[None], error: TidemillError) -> None:
    joined.set_exception(error)
    joined.exception()  # whoever still waits hears it; nobody may be left
