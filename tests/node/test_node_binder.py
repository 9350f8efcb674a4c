"""The binder of stream topics: it outlives a catalogue that is away, and its tasks follow the topics there are."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any

from tidemill.base.clock import SystemClock
from tidemill.base.errors import Conflict, Corrupt, Unavailable
from tidemill.metastore.catalogue import TopicRow
from tidemill.node.binder import Binder
from tidemill.shards.front import Binding

DEADLINE_S = 20


class Topics:
    """A catalogue, a reader and bindings, as much of them as a binder asks for."""

    def __init__(self) -> None:
        self.rows: list[TopicRow] = []
        self.away = 0
        self.broken: set[str] = set()
        self.minted: dict[str, list[Binding]] = defaultdict(list)
        self.asked: dict[str, int] = defaultdict(int)

    async def list(self, _: type) -> list[TopicRow]:
        if self.away:
            self.away -= 1
            raise Unavailable("the catalogue is away.")
        return list(self.rows)

    async def high_watermark(self, topic_id: str, partition: int) -> int:
        self.asked[topic_id] += 1
        if topic_id in self.broken:
            self.broken.discard(topic_id)
            raise Corrupt("a record cannot be read.")
        return 7

    async def open_remap(self, name: str) -> Any:
        return Remap(self.minted[name])


class Remap:
    def __init__(self, minted: list[Binding]) -> None:
        self._minted = minted

    async def latest(self) -> Binding | None:
        return self._minted[-1] if self._minted else None

    async def mint(self, binding: Binding) -> Binding:
        if self._minted and binding.time_ms <= self._minted[-1].time_ms:
            raise Conflict("another minter was first.")
        self._minted.append(binding)
        return binding


async def until(condition: Any) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.01)


def bound(topics: Topics) -> Binder:
    catalogue: Any = topics
    return Binder(catalogue, catalogue, topics.open_remap, SystemClock(), discover_s=0.02)


def test_topics_made_after_the_catalogue_was_away_get_their_time() -> None:
    async def scenario() -> None:
        topics = Topics()
        topics.away = 3
        binder = bound(topics)
        binder.start()
        await until(lambda: topics.away == 0)
        topics.rows.append(TopicRow("clicks", "id-1", 1))
        await until(lambda: topics.minted["topic/clicks"])
        assert topics.minted["topic/clicks"][0].offsets == {"id-1": (7,)}
        await binder.aclose()

    asyncio.run(scenario())


def test_a_topic_that_is_gone_is_bound_no_longer() -> None:
    async def scenario() -> None:
        topics = Topics()
        topics.rows = [TopicRow("a", "id-a", 1), TopicRow("b", "id-b", 1), TopicRow("c", "id-c", 1, "capture")]
        binder = bound(topics)
        binder.start()
        await until(lambda: topics.asked["id-a"] and topics.asked["id-b"])
        topics.rows = [TopicRow("b", "id-b", 1), TopicRow("a", "id-new", 1)]
        await until(lambda: topics.asked["id-new"])
        gone, kept = topics.asked["id-a"], topics.asked["id-b"]
        await until(lambda: topics.asked["id-b"] > kept + 3)
        assert topics.asked["id-a"] == gone
        assert "topic/c" not in topics.minted
        await binder.aclose()

    asyncio.run(scenario())


def test_a_binder_that_failed_is_started_anew() -> None:
    async def scenario() -> None:
        topics = Topics()
        topics.rows, topics.broken = [TopicRow("a", "id-a", 1)], {"id-a"}
        binder = bound(topics)
        binder.start()
        await until(lambda: topics.minted["topic/a"])
        await binder.aclose()

    asyncio.run(scenario())
