"""Topics that accept produced batches only while a gate is open."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from tidemill.topics.api import ProduceResult


class Gate:
    """Topics that take what they are given only while the gate is open; what waits keeps its order."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._held: list[tuple[partial[asyncio.Future[ProduceResult]], asyncio.Future[ProduceResult]]] = []
        self.closed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def produce_nowait(self, *call: Any, **how: Any) -> asyncio.Future[ProduceResult]:
        produce = partial(self._inner.produce_nowait, *call, **how)
        if not self.closed:
            return produce()
        future: asyncio.Future[ProduceResult] = asyncio.get_running_loop().create_future()
        self._held.append((produce, future))
        return future

    def open(self) -> None:
        self.closed = False
        for produce, future in self._held:
            inner = produce()
            inner.add_done_callback(lambda ended, future=future: future.set_result(ended.result()))
        self._held = []
