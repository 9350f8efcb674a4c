"""Topic rows by name and by id, readable in a plain call: Produce must resolve its topics before any await.

Filled at start, by every Metadata answer and by a refresh every few seconds; a miss asks for a refresh.

C1  A name is called unknown only after a refresh that began after it was first missed; until then the
    answer is "not the leader", which clients retry after fetching Metadata (the topic may have been
    created through another node a moment ago).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import structlog

from tidemill.base.clock import Clock
from tidemill.base.errors import TidemillError
from tidemill.kafka import errors
from tidemill.metastore.catalogue import Catalogue, TopicRow

_ABSENT_FOR_S = 2.0
_ABSENT_COUNT_MAX = 10_000

log = structlog.get_logger()


class TopicCache:
    def __init__(self, catalogue: Catalogue, clock: Clock) -> None:
        self._catalogue = catalogue
        self._clock = clock
        self._by_name: dict[str, TopicRow] = {}
        self._by_id: dict[str, TopicRow] = {}
        self._missed: set[str] = set()
        self._absent: dict[str, float] = {}
        self._wake = asyncio.Event()

    def rows(self) -> list[TopicRow]:
        return list(self._by_name.values())

    def by_name(self, name: str) -> TopicRow | None:
        return self._by_name.get(name)

    def by_id(self, topic_id: str) -> TopicRow | None:
        return self._by_id.get(topic_id)

    def resolve(self, topic: str, *, is_id: bool) -> TopicRow | int:
        """The row of a name or id, or the Kafka error code to answer (C1)."""
        row = self._by_id.get(topic) if is_id else self._by_name.get(topic)
        if row is not None:
            return row
        since = self._absent.get(topic)
        if since is not None and self._clock.monotonic_s() - since < _ABSENT_FOR_S:
            return errors.UNKNOWN_TOPIC_ID if is_id else errors.UNKNOWN_TOPIC_OR_PARTITION
        if len(self._missed) < _ABSENT_COUNT_MAX:
            self._missed.add(topic)
        self._wake.set()
        return errors.NOT_LEADER_OR_FOLLOWER

    def learn(self, row: TopicRow) -> None:
        old = self._by_name.get(row.name)
        if old is not None and old.topic_id != row.topic_id:
            self._by_id.pop(old.topic_id, None)
        self._by_name[row.name] = row
        self._by_id[row.topic_id] = row
        self._absent.pop(row.name, None)
        self._absent.pop(row.topic_id, None)

    def forget(self, name: str) -> None:
        row = self._by_name.pop(name, None)
        if row is not None:
            self._by_id.pop(row.topic_id, None)

    async def refresh(self) -> None:
        """Read all rows. Raises what the catalogue raises; the cache is then as it was."""
        missed, self._missed = self._missed, set()
        try:
            rows = await self._catalogue.list(TopicRow)
        except BaseException:
            self._missed |= missed
            raise
        self.replace(rows, missed)

    def replace(self, rows: Iterable[TopicRow], missed: Iterable[str] = ()) -> None:
        rows = list(rows)
        self._by_name = {row.name: row for row in rows}
        self._by_id = {row.topic_id: row for row in rows}
        now = self._clock.monotonic_s()
        self._absent = {
            **{topic: since for topic, since in self._absent.items() if now - since < _ABSENT_FOR_S},
            **{topic: now for topic in missed if topic not in self._by_name and topic not in self._by_id},
        }

    async def run(self, interval_s: float) -> None:
        """Refresh for ever: every interval, and at once after a miss. A failing catalogue is logged and retried."""
        while True:
            try:
                async with asyncio.timeout(interval_s):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            try:
                await self.refresh()
            except TidemillError as error:
                log.warning("kafka.topics_refresh_failed", error=str(error))
                await asyncio.sleep(min(interval_s, 1.0))
