"""A bell for several listeners, none of whom misses a ring between a look at the state and the wait."""

from __future__ import annotations

import asyncio


class Notifier:
    """`rings` only grows. Read it, look at the state, then wait for it to be passed."""

    def __init__(self) -> None:
        self.rings = 0
        self._event = asyncio.Event()

    def ring(self) -> None:
        self.rings += 1
        event, self._event = self._event, asyncio.Event()
        event.set()

    async def after(self, seen: int) -> int:
        """Returns `rings` once it is above `seen`; at once when it is already."""
        while self.rings <= seen:
            await self._event.wait()
        return self.rings
