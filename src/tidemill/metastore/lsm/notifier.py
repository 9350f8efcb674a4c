"""Notification of several listeners. None misses a notification between checking the state and waiting."""

from __future__ import annotations

import asyncio


class Notifier:
    """Counter of notifications. Read `rings`, check the state, then wait until the count is exceeded."""

    def __init__(self) -> None:
        self.rings = 0
        self._event = asyncio.Event()

    def ring(self) -> None:
        self.rings += 1
        event, self._event = self._event, asyncio.Event()
        event.set()

    async def wait_after(self, seen: int) -> int:
        """Wait until `rings` is above `seen` and return it; return immediately if it already is."""
        while self.rings <= seen:
            await self._event.wait()
        return self.rings
