"""Connections of clients: the limit of concurrent requests, and whether a client has disconnected.

The number is limited from the first byte of a request to the last byte of its response. Long polls, event streams and
slow readers are included. Requests beyond the limit get 503 with Retry-After, after which the protocol's client
retries. ASGI reports through `receive` that the client of a long poll has disconnected.
"""

from __future__ import annotations

import asyncio
from typing import Any, Self

import structlog
from starlette.requests import Request

from tidemill.base.runtime.tasks import Tasks, error_sentence


class AdmissionSlot:
    """The place of one request; `release` is idempotent."""

    def __init__(self, admission: AdmissionControl, initial: bool) -> None:
        self._admission: AdmissionControl | None = admission
        self._initial = initial

    def release(self) -> None:
        admission, self._admission = self._admission, None
        if admission is not None:
            admission.under_way[self._initial] -= 1


class AdmissionControl:
    """Counts requests. `max_initial`: limit of requests for initial rows; `max_existing`: limit of all others."""

    def __init__(self, max_initial: int, max_existing: int) -> None:
        self._limits = {True: max_initial, False: max_existing}
        self.under_way = {True: 0, False: 0}
        self.refused = 0

    def reserve(self, initial: bool) -> AdmissionSlot | None:
        """Reserve a place; return None if the limit is reached."""
        if self.under_way[initial] >= self._limits[initial]:
            self.refused += 1
            return None
        self.under_way[initial] += 1
        return AdmissionSlot(self, initial)


_log = structlog.get_logger()


class DisconnectWatcher:
    """Watches for a disconnect: in `async with DisconnectWatcher(request) as d`, `d.future` is done and
    `d.has_happened` is true after it."""

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
