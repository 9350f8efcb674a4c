"""A broker in a thread with its own event loop, so that blocking clients run in the test's thread."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from fake_topics import FakeTopicLog

from tidemill.base.clock import Rand, SystemClock
from tidemill.base.portal import Portal
from tidemill.consensus.memory import MemoryConsensus
from tidemill.kafka import KafkaServer, KafkaSettings
from tidemill.metastore.catalogue import Catalogue, TopicRow

T = TypeVar("T")


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    async def bounded() -> T:
        async with asyncio.timeout(30):
            return await coroutine

    return asyncio.run(bounded())


def eventually(check: Callable[[], T], within_s: float = 10.0) -> T:
    """The first true value of `check`, which is asked until the deadline."""
    deadline = time.monotonic() + within_s
    while True:
        value = check()
        if value or time.monotonic() > deadline:
            assert value, "deadline passed"
            return value
        time.sleep(0.02)


class FakeBroker:
    """The endpoint over `FakeTopicLog` and in-memory consensus."""

    def __init__(self, settings: KafkaSettings | None = None, delay_s: float = 0.0) -> None:
        self.settings = settings or KafkaSettings()
        self.portal = Portal("kafka-test")
        self.topics = self.portal.call(self._make_topics(delay_s))
        self.consensus = MemoryConsensus(SystemClock())
        self.catalogue = Catalogue(self.consensus, SystemClock(), Rand())
        self.server: KafkaServer | None = None
        self.port = 0
        self.start()

    async def _make_topics(self, delay_s: float) -> FakeTopicLog:
        return FakeTopicLog(delay_s=delay_s)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        """Also after `stop`: the same port again."""
        self.server = KafkaServer(
            topics=self.topics,
            catalogue=self.catalogue,
            consensus=self.consensus,
            nodes=None,
            clock=SystemClock(),
            rand=Rand(),
            name="n1",
            node_id=1,
            port=self.port,
            settings=self.settings,
        )
        self.port = self.portal.call(self.server.start())

    def stop(self) -> None:
        if self.server is not None:
            self.portal.call(self.server.aclose())
            self.server = None

    def create_topic(self, name: str, partitions: int = 4, **more: Any) -> TopicRow:
        return self.portal.call(self.catalogue.create_topic(name, partitions, **more))

    def close(self) -> None:
        self.stop()
        self.portal.close()
