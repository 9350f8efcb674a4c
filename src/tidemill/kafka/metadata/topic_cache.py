"""Topic rows by name and by id, readable in a plain call: Produce must resolve its topics before any await.

Filled at start, by every Metadata answer and by a refresh every few seconds; a miss asks for a refresh.

C1  A name, or a partition of it, is called unknown only after a refresh that began after it was missed: the topic may
    have been created, or grown, through another node a moment ago. A request that can wait waits for that refresh
    (`settle`), so its first answer is the right one, however rarely the client asks.
C2  Refreshes are shared and take a fraction of the time: what clients ask for that does not exist, or for all topics
    again and again, never costs a reading of the catalogue each.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeVar

import structlog

from tidemill.base.clock import Clock
from tidemill.base.errors import MissingError, TidemillError
from tidemill.kafka import error_codes
from tidemill.metastore.catalogue import Catalogue, TopicRow

SETTLE_S = 5.0
"""The longest wait of a request for a refresh: well below the 30 s after which clients give a request up."""

SETTLE_ROUNDS = 2
"""The first refresh may bring a topic, the second one a partition of it that was added since."""

_ABSENT_FOR_S = 0.5
_ABSENT_COUNT_MAX = 10_000
_RETRY_PAUSE_S = 0.5
_REST_FACTOR = 3
"""After a refresh on demand, rest for so many times as long as it took."""

log = structlog.get_logger()

T = TypeVar("T")


class TopicCache:
    def __init__(self, catalogue: Catalogue, clock: Clock) -> None:
        self._catalogue = catalogue
        self._clock = clock
        self._by_name: dict[str, TopicRow] = {}
        self._by_id: dict[str, TopicRow] = {}
        self._partitions = 0
        self.creating = 0
        """Partitions of topics that are being made just now, by whichever listener."""
        self.version = 0
        """Another one after every change of what is known here."""
        self._read_last: Sequence[TopicRow] | None = None
        """What the catalogue gave, while nothing was learnt or forgotten since."""
        self._missed: set[str] = set()
        self._absent: dict[str, float] = {}
        self._looking: list[asyncio.Future[None]] = []
        self._wake = asyncio.Event()
        self._one = asyncio.Lock()
        self._begun = 0
        self._ended: tuple[int, TidemillError | None] = (0, None)

    @property
    def partitions(self) -> int:
        """Of all topics that are known here."""
        return self._partitions

    @property
    def count(self) -> int:
        return len(self._by_name)

    def rows(self) -> list[TopicRow]:
        return list(self._by_name.values())

    def by_name(self, name: str) -> TopicRow | None:
        return self._by_name.get(name)

    def by_id(self, topic_id: str) -> TopicRow | None:
        return self._by_id.get(topic_id)

    def find(self, topic: str, *, is_id: bool) -> TopicRow | int | None:
        """The row of a name or id; the Kafka error code if there is none; None if nobody has looked yet (C1)."""
        row = self._by_id.get(topic) if is_id else self._by_name.get(topic)
        if row is not None:
            return row
        since = self._absent.get(topic)
        if since is not None and self._clock.monotonic_s() - since < _ABSENT_FOR_S:
            return error_codes.UNKNOWN_TOPIC_ID if is_id else error_codes.UNKNOWN_TOPIC_OR_PARTITION
        if len(self._missed) < _ABSENT_COUNT_MAX:
            self._missed.add(topic)
        self._wake.set()
        return None

    def grown(self, row: TopicRow) -> TopicRow | None:
        """Where somebody names a partition that `row` does not have: the row, if the topic has no more; None if nobody
        has looked yet (C1)."""
        key = f"{row.topic_id}/{row.partitions}"
        since = self._absent.get(key)
        if since is not None and self._clock.monotonic_s() - since < _ABSENT_FOR_S:
            return row
        if len(self._missed) < _ABSENT_COUNT_MAX:
            self._missed.add(key)
        self._wake.set()
        return None

    def no_partition(self, row: TopicRow, partition: int) -> int:
        """The code for a partition that `row` does not have: as `resolve`, retriable while it may be a new one."""
        looked = partition < 0 or self.grown(row) is not None
        return error_codes.UNKNOWN_TOPIC_OR_PARTITION if looked else error_codes.NOT_LEADER_OR_FOLLOWER

    def resolve(self, topic: str, *, is_id: bool) -> TopicRow | int:
        """As `find`, with NOT_LEADER_OR_FOLLOWER for what nobody has looked for: clients ask Metadata and retry."""
        row = self.find(topic, is_id=is_id)
        return error_codes.NOT_LEADER_OR_FOLLOWER if row is None else row

    async def with_row(self, name: str, partition: int, work: Callable[[TopicRow], Awaitable[T]]) -> T | int:
        """The result of `work` for the topic's row, or the error code where there is no such topic or partition.

        A row can be stale: its topic was deleted through another node, and perhaps created again under its name. Then
        `work` raises MissingError, and is called again with the row of the next refresh. Raises what `work` raises."""
        row = self._row_of(name, partition)
        if isinstance(row, int):
            return row
        try:
            return await work(row)
        except MissingError:
            if self._by_name.get(name) == row:
                self.forget(name)
            await self.settle([(name, partition)], is_id=False)
            row = self._row_of(name, partition)
            return row if isinstance(row, int) else await work(row)

    def _row_of(self, name: str, partition: int) -> TopicRow | int:
        row = self.resolve(name, is_id=False)
        if isinstance(row, int) or 0 <= partition < row.partitions:
            return row
        return self.no_partition(row, partition)

    def looked(self) -> asyncio.Future[None]:
        """Ends with the next successful refresh that begins after this call."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._looking.append(future)
        self._wake.set()
        return future

    async def settle(self, asked: Iterable[tuple[str, int]], *, is_id: bool) -> None:
        """Before a request resolves topics, each given with the highest partition that it names: wait for one shared
        refresh if any of them is missing here and was not looked for (C1)."""
        places = list(asked)
        for _ in range(SETTLE_ROUNDS):
            if not any([self._is_missed(topic, partition, is_id=is_id) for topic, partition in places]):
                return
            await self.settled()

    def _is_missed(self, topic: str, partition: int, *, is_id: bool) -> bool:
        row = self.find(topic, is_id=is_id)
        if isinstance(row, TopicRow):
            return partition >= row.partitions and self.grown(row) is None
        return row is None

    async def settled(self) -> None:
        """Wait for the next refresh, at most SETTLE_S: without a catalogue nothing is called unknown."""
        future = self.looked()
        try:
            await asyncio.wait([future], timeout=SETTLE_S)
        finally:
            future.cancel()  # the refresh under way may have taken it from the list

    def learn(self, row: TopicRow) -> None:
        old = self._by_name.get(row.name)
        if old == row:
            return
        if old is not None:
            self.forget(row.name)
        self._read_last = None
        self.version += 1
        self._partitions += row.partitions
        self._by_name[row.name] = row
        self._by_id[row.topic_id] = row
        self._absent.pop(row.name, None)
        self._absent.pop(row.topic_id, None)

    def forget(self, name: str) -> None:
        row = self._by_name.pop(name, None)
        if row is not None:
            self._read_last = None
            self.version += 1
            self._partitions -= row.partitions
            self._by_id.pop(row.topic_id, None)

    async def refresh(self) -> None:
        """Read all rows, or share a reading that begins after this call (C2). Raises what the catalogue raises; the
        cache is then as it was."""
        wanted = self._begun + 1
        async with self._one:
            number, error = self._ended
            if number < wanted:
                self._begun += 1
                number = self._begun
                try:
                    await self._read()
                    error = None
                except TidemillError as failed:
                    error = failed
                self._ended = (number, error)
        if error is not None:
            raise error

    async def _read(self) -> None:
        missed, self._missed = self._missed, set()
        looking, self._looking = self._looking, []
        try:
            rows = await self._catalogue.list(TopicRow)
        except BaseException:
            self._missed |= missed
            self._looking += [future for future in looking if not future.done()]
            raise
        if rows is not self._read_last:
            self._replace(rows)
        self._miss(missed)
        for future in looking:
            if not future.done():
                future.set_result(None)

    def _replace(self, rows: Sequence[TopicRow]) -> None:
        self._by_name = {row.name: row for row in rows}
        self._by_id = {row.topic_id: row for row in rows}
        self._partitions = sum(row.partitions for row in rows)
        self.version += 1
        self._read_last = rows

    def _miss(self, missed: Iterable[str]) -> None:
        """A refresh that began after these were missed has ended."""
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
            began_s = self._clock.monotonic_s()
            try:
                await self.refresh()
            except TidemillError as error:
                log.warning("kafka.topics_refresh_failed", error=str(error))
                await asyncio.sleep(min(interval_s, _RETRY_PAUSE_S))
                if self._looking or self._missed:
                    self._wake.set()
            else:
                await asyncio.sleep(_REST_FACTOR * (self._clock.monotonic_s() - began_s))
