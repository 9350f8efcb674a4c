"""Noticing that the client went away while a long poll waits: ASGI says so through `receive`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, Self

from starlette.requests import Request


class Disconnect:
    """`async with Disconnect(request) as d`: `d.future` is done, and `d.happened` true, once the client is gone."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self.future: asyncio.Future[None]

    @property
    def happened(self) -> bool:
        return self.future.done() and not self.future.cancelled()

    async def _watch(self) -> None:
        while True:
            message = await self._request.receive()
            if message["type"] == "http.disconnect":
                return

    async def __aenter__(self) -> Self:
        self.future = asyncio.ensure_future(self._watch())
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.future.cancel()
        await asyncio.gather(self.future, return_exceptions=True)


async def wait_any(futures: set[asyncio.Future[Any]], timeout_s: float) -> None:
    """Return when one is done or the time is over; cancels nothing."""
    waiting: Awaitable[Any] = asyncio.wait(futures, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    await waiting
