"""Detects that the client has disconnected while a long poll waits: ASGI reports it through `receive`."""

from __future__ import annotations

import asyncio
from typing import Any, Self

import structlog
from starlette.requests import Request

from tidemill.base.runtime.tasks import Tasks, error_sentence

_log = structlog.get_logger()


class DisconnectWatcher:
    """Watches for a disconnect: in `async with Disconnect(request) as d`, `d.future` is done and `d.happened` is true
    after it."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._tasks = Tasks(self._log_lost_connection)
        self.future: asyncio.Future[None]

    @property
    def has_happened(self) -> bool:
        return self.future.done()

    def _log_lost_connection(self, name: str, error: BaseException) -> None:
        """Treat a connection that cannot be watched any more as disconnected: `future` is done either way."""
        _log.debug("connection lost", error=error_sentence(error))

    async def _watch(self) -> None:
        while True:
            message = await self._request.receive()
            if message["type"] == "http.disconnect":
                return

    async def __aenter__(self) -> Self:
        self.future = self._tasks.spawn(self._watch(), name="disconnect")
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._tasks.aclose()


async def wait_any(futures: set[asyncio.Future[Any]], timeout_s: float) -> None:
    """Return when one future is done or the timeout expires; cancels nothing."""
    await asyncio.wait(futures, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
