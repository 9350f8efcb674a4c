"""Callbacks that wait for a partition to move: each is called once, in the order of registration."""

from __future__ import annotations

import asyncio
from typing import Protocol


class Watcher(Protocol):
    def on_moved(self) -> None:
        """Handle the wake-up. A plain call."""
        ...


class Watchers:
    __slots__ = ("_watchers",)

    def __init__(self) -> None:
        self._watchers: dict[Watcher, None] = {}

    def __len__(self) -> int:
        return len(self._watchers)

    def add(self, watcher: Watcher) -> None:
        self._watchers[watcher] = None

    def discard(self, watcher: Watcher) -> None:
        self._watchers.pop(watcher, None)

    def wake_all(self) -> None:
        if self._watchers:
            watchers, self._watchers = self._watchers, {}
            for watcher in watchers:
                watcher.on_moved()

    async def wait_moved(self) -> None:
        waiting = _FutureWatcher()
        self.add(waiting)
        try:
            await waiting.future
        finally:
            self.discard(waiting)


class _FutureWatcher:
    def __init__(self) -> None:
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_moved(self) -> None:
        if not self.future.done():
            self.future.set_result(None)
