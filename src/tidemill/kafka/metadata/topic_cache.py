"""Cache of topic rows by name and by id, readable without await: Produce must resolve its topics before any await.

The cache is filled at start, by every Metadata answer and by a refresh every few seconds. A miss triggers a refresh.

Invariant (no premature unknown): a topic, or a partition of it, is reported as unknown only after a refresh that began
after the miss, because it may have been created or added through another node a moment ago. A request that can wait
waits for that refresh (`settle_topics`), so its first answer is correct even if the client asks rarely.

Invariant (bounded reading): refreshes are shared and use a bounded fraction of the time. Requests for topics that do
not exist, or repeated requests for all topics, do not each read the catalogue.
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
"""Longest wait of a request for a refresh: well below the 30 s after which clients abandon a request."""

SETTLE_ROUNDS = 2
"""Number of refreshes to wait for: the first may bring a topic, the second a partition that was added to it since."""

_ABSENT_FOR_S = 0.5
_ABSENT_COUNT_MAX = 10_000
_RETRY_PAUSE_S = 0.5
_REST_FACTOR = 3
"""Length of the rest after a refresh on demand, in multiples of the duration of the refresh."""

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
        """Partitions of topics that any listener is creating now."""
        self.version = 0
        """Number that changes with every change of the cached rows."""
        self._read_last: Sequence[TopicRow] | None = None
        """Rows from the catalogue's last answer, if no row was added or removed since."""
        self._added: dict[str, TopicRow] = {}
        """Rows added since the last reading of the catalogue began, by name."""
        self._removed: set[str] = set()
        """Topic ids of the rows removed since then."""
        self._missed: set[str] = set()
        self._absent: dict[str, float] = {}
        self._looking: list[asyncio.Future[None]] = []
        self._wake = asyncio.Event()
        self._one = asyncio.Lock()
        self._begun = 0
        self._ended: tuple[int, TidemillError | None] = (0, None)

    @property
    def partitions(self) -> int:
        """Return the number of partitions of all cached topics."""
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
        """Return the row of a name or id, the Kafka error code if it does not exist, or None if unknown so far."""
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

    def check_growth(self, row: TopicRow) -> TopicRow | None:
        """Check for partitions that `row` does not have.

        Return `row` if a refresh found no more partitions, or None if no refresh has looked for them yet.
        """
        key = f"{row.topic_id}/{row.partitions}"
        since = self._absent.get(key)
        if since is not None and self._clock.monotonic_s() - since < _ABSENT_FOR_S:
            return row
        if len(self._missed) < _ABSENT_COUNT_MAX:
            self._missed.add(key)
        self._wake.set()
        return None

    def missing_partition_code(self, row: TopicRow, partition: int) -> int:
        """Return the code for a partition that `row` does not have: retriable while it may be a new one, as in
        `resolve`.
        """
        looked = partition < 0 or self.check_growth(row) is not None
        return error_codes.UNKNOWN_TOPIC_OR_PARTITION if looked else error_codes.NOT_LEADER_OR_FOLLOWER

    def resolve(self, topic: str, *, is_id: bool) -> TopicRow | int:
        """Return what `find` returns, but NOT_LEADER_OR_FOLLOWER for None: clients then request Metadata and retry."""
        row = self.find(topic, is_id=is_id)
        return error_codes.NOT_LEADER_OR_FOLLOWER if row is None else row

    async def call_with_row(self, name: str, partition: int, work: Callable[[TopicRow], Awaitable[T]]) -> T | int:
        """Return the result of `work` for the topic's row, or the error code if there is no such topic or partition.

        A row can be stale: its topic was deleted through another node, and perhaps re-created. Then `work` raises
        MissingError and is called again with the row of the next refresh. Raises what `work` raises.
        """
        row = self._row_of(name, partition)
        if isinstance(row, int):
            return row
        try:
            return await work(row)
        except MissingError:
            self.remove(row)
            await self.settle_topics([(name, partition)], is_id=False)
            row = self._row_of(name, partition)
            return row if isinstance(row, int) else await work(row)

    def _row_of(self, name: str, partition: int) -> TopicRow | int:
        row = self.resolve(name, is_id=False)
        if isinstance(row, int) or 0 <= partition < row.partitions:
            return row
        return self.missing_partition_code(row, partition)

    def next_refresh(self) -> asyncio.Future[None]:
        """Return a future that ends with the next successful refresh that begins after this call."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._looking.append(future)
        self._wake.set()
        return future

    async def settle_topics(self, asked: Iterable[tuple[str, int]], *, is_id: bool) -> None:
        """Wait for a shared refresh before a request resolves topics, if one of them is missing and not yet looked for.

        Each topic is given with the highest partition that the request names.
        """
        places = list(asked)
        for _ in range(SETTLE_ROUNDS):
            if not any([self._is_missing(topic, partition, is_id=is_id) for topic, partition in places]):
                return
            await self.await_refresh()

    def _is_missing(self, topic: str, partition: int, *, is_id: bool) -> bool:
        row = self.find(topic, is_id=is_id)
        if isinstance(row, TopicRow):
            return partition >= row.partitions and self.check_growth(row) is None
        return row is None

    async def await_refresh(self) -> None:
        """Wait for the next refresh, at most SETTLE_S.

        If the catalogue is unavailable, no topic is reported as unknown.
        """
        future = self.next_refresh()
        try:
            await asyncio.wait([future], timeout=SETTLE_S)
        finally:
            future.cancel()  # the running refresh may have removed it from the list

    def add(self, row: TopicRow) -> None:
        old = self._by_name.get(row.name)
        if old == row:
            return
        if old is not None:
            self.remove(old)
        self._read_last = None
        self.version += 1
        self._partitions += row.partitions
        self._by_name[row.name] = self._added[row.name] = row
        self._by_id[row.topic_id] = row
        self._removed.discard(row.topic_id)
        self._absent.pop(row.name, None)
        self._absent.pop(row.topic_id, None)

    def remove(self, row: TopicRow) -> None:
        """Remove a deleted topic. A later topic of the same name stays."""
        self._removed.add(row.topic_id)
        known = self._by_name.get(row.name)
        if known is None or known.topic_id != row.topic_id:
            return
        del self._by_name[row.name]
        self._by_id.pop(row.topic_id, None)
        self._added.pop(row.name, None)
        self._partitions -= known.partitions
        self._read_last = None
        self.version += 1

    async def refresh(self) -> None:
        """Read all rows, or share a read that begins after this call.

        Raises what the catalogue raises; the cache is then unchanged.
        """
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
        self._added, self._removed = {}, set()
        try:
            rows = await self._catalogue.list(TopicRow)
        except BaseException:
            self._missed |= missed
            self._looking += [future for future in looking if not future.done()]
            raise
        if rows is not self._read_last:
            self._replace(rows)
        self._record_missing(missed)
        for future in looking:
            if not future.done():
                future.set_result(None)

    def _replace(self, rows: Sequence[TopicRow]) -> None:
        """Replace the rows by the answer of the catalogue. Additions and removals during the reading are newer and
        remain."""
        by_name = {row.name: row for row in rows if row.topic_id not in self._removed}
        for row in self._added.values():
            there = by_name.get(row.name)
            if there is None or (there.topic_id == row.topic_id and there.partitions < row.partitions):
                by_name[row.name] = row
        self._by_name = by_name
        self._by_id = {row.topic_id: row for row in by_name.values()}
        self._partitions = sum(row.partitions for row in by_name.values())
        self.version += 1
        self._read_last = None if self._added or self._removed else rows

    def _record_missing(self, missed: Iterable[str]) -> None:
        """Record the topics that a completed refresh, which began after they were missed, did not find."""
        now = self._clock.monotonic_s()
        self._absent = {
            **{topic: since for topic, since in self._absent.items() if now - since < _ABSENT_FOR_S},
            **{topic: now for topic in missed if topic not in self._by_name and topic not in self._by_id},
        }

    async def run(self, interval_s: float) -> None:
        """Refresh forever, at every interval and immediately after a miss. Log and retry a failing catalogue."""
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
