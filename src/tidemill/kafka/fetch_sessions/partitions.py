"""Partitions that one reader fetches, as Fetch names them, and the answer for each.

Invariant (authorized reads): nothing is returned that the client may not read. Authorization is checked when a
partition is named, and for all partitions again when the rules have changed: before a fetch, and before its answer.

Invariant (errors are rechecked): a partition that cannot be read (missing or not allowed) is resolved again at every
fetch and reported in every answer.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Final, cast

import structlog

from tidemill.base.errors import MissingError, TidemillError
from tidemill.kafka import error_codes
from tidemill.kafka.api.context import Context
from tidemill.kafka.metadata.topic_cache import SETTLE_ROUNDS
from tidemill.kafka.net.listener_security import ClientIdentity
from tidemill.kafka.schema.fetch import FetchPartition, FetchRequest, FetchTopic, PartitionRecords
from tidemill.metastore.catalogue import TopicRow
from tidemill.security.acls import Operation
from tidemill.topics.api import Fetched, FetchRead

log = structlog.get_logger()

READ_COMMITTED: Final = 1
_PERMANENT_CODES: Final = (
    error_codes.TOPIC_AUTHORIZATION_FAILED,
    error_codes.UNKNOWN_TOPIC_OR_PARTITION,
    error_codes.UNKNOWN_TOPIC_ID,
)

Key = tuple[str, int]
"""Topic name or id, as the client names it, and partition."""


class FetchedPartitions:
    def __init__(self, context: Context, visitor: ClientIdentity, *, by_id: bool) -> None:
        self._context = context
        self._visitor = visitor
        self.by_id = by_id
        self._committed = False
        self._following = context.topics.subscribe()
        self._refused: dict[Key, tuple[FetchPartition, int]] = {}
        """Partitions that cannot be read, each with its error code."""
        self._rules = self._context.access.rules

    def __len__(self) -> int:
        return len(self._following) + len(self._refused)

    @property
    def principal(self) -> str:
        return self._visitor.principal

    @property
    def host(self) -> str:
        return self._visitor.host

    async def add_topics(self, topics: Iterable[FetchTopic]) -> None:
        pace = self._context.pace
        for topic in topics:
            row = self._resolve(topic.topic)
            for asked in topic.partitions:
                self._add_partition(topic.topic, row, asked)
                if pace.is_used_up:
                    await pace.wait_for_turn()
        await self._await_missing()

    async def _await_missing(self) -> None:
        """Look for missing topics and partitions before the client receives an error.

        The correct answer to its first request is UNKNOWN_TOPIC_ID or UNKNOWN_TOPIC_OR_PARTITION, or records (KIP-516).
        """
        for _ in range(SETTLE_ROUNDS):
            if not (missing := self._missing()):
                return
            await self._resolve_again(missing)
            if not (missing := self._missing()):
                return
            await self._context.cache.await_refresh()
            await self._resolve_again(missing)

    def _missing(self) -> list[tuple[Key, FetchPartition]]:
        return [
            (key, asked) for key, (asked, code) in self._refused.items() if code == error_codes.NOT_LEADER_OR_FOLLOWER
        ]

    async def remove_topics(self, topics: Iterable[tuple[str, list[int]]]) -> None:
        pace = self._context.pace
        for topic, partitions in topics:
            for partition in partitions:
                self._following.drop((topic, partition))
                self._refused.pop((topic, partition), None)
                if pace.is_used_up:
                    await pace.wait_for_turn()

    async def refresh(self) -> None:
        """Resolve refused partitions again, and all partitions if the access rules have changed."""
        rules = self._context.access.rules
        again = [(key, asked) for key, (asked, _) in self._refused.items()]
        if rules is not self._rules:
            self._rules = rules
            again += [(cast(Key, key), _requested_partition(read)) for key, read in self._following.reads()]
        await self._resolve_again(again)

    async def _resolve_again(self, again: Iterable[tuple[Key, FetchPartition]]) -> None:
        rows: dict[str, TopicRow | int] = {}
        for (topic, _), asked in again:
            if topic not in rows:
                rows[topic] = self._resolve(topic)
            self._add_partition(topic, rows[topic], asked)
            if self._context.pace.is_used_up:
                await self._context.pace.wait_for_turn()

    async def fetch(self, fetch: FetchRequest) -> dict[Key, PartitionRecords]:
        """Return the answers of the partitions that have something to report.

        A partition that fails ends the wait, except for a permanent refusal: a client that keeps naming such a
        partition among others would fetch without a pause. No wait exceeds the idle timeout of a connection, so that a
        vanished client does not leave a request forever.
        """
        committed = fetch.isolation_level == READ_COMMITTED
        if committed != self._committed:
            self._committed = committed
            for key, read in self._following.reads():
                self._following.put(key, _partition_read(read.topic_id, _requested_partition(read), committed))
        found = {key: PartitionRecords(key[1], code) for key, (_, code) in self._refused.items()}
        if not len(self._following):
            return found
        max_wait_s = min(max(fetch.max_wait_ms, 0) / 1000, self._context.settings.idle_timeout_s)
        if any(answer.error_code not in _PERMANENT_CODES for answer in found.values()):
            max_wait_s = 0.0
        pace = self._context.pace
        answered = await self._read(fetch, max_wait_s)
        for key, got in answered:
            found[cast(Key, key)] = self._partition_answer(cast(Key, key), got)
            if pace.is_used_up:
                await pace.wait_for_turn()
        if any(isinstance(got.error, MissingError) for _, got in answered):
            await self._await_missing()
            gone = [cast(Key, key) for key, got in answered if isinstance(got.error, MissingError)]
            found |= {key: PartitionRecords(key[1], self._refused[key][1]) for key in gone if key in self._refused}
        while self._context.access.rules is not self._rules:  # they changed during the wait
            await self.refresh()
            found |= {key: PartitionRecords(key[1], code) for key, (_, code) in self._refused.items()}
        return found

    def close(self) -> None:
        self._following.close()
        self._refused.clear()

    def _resolve(self, topic: str) -> TopicRow | int:
        context = self._context
        row = context.cache.resolve(topic, is_id=self.by_id)
        if context.access.is_enforced:
            row = context.access.topic(self._visitor, Operation.READ, topic, row, is_id=self.by_id)
        return row

    def _add_partition(self, topic: str, row: TopicRow | int, asked: FetchPartition) -> None:
        key = (topic, asked.partition)
        if isinstance(row, int):
            self._refuse(key, asked, row)
        elif not 0 <= asked.partition < row.partitions:
            self._refuse(key, asked, self._context.cache.missing_partition_code(row, asked.partition))
        else:
            self._refused.pop(key, None)
            self._following.put(key, _partition_read(row.topic_id, asked, self._committed))

    def _refuse(self, key: Key, asked: FetchPartition, code: int) -> None:
        self._following.drop(key)
        self._refused[key] = asked, code

    async def _read(self, fetch: FetchRequest, max_wait_s: float) -> list[tuple[Hashable, Fetched]]:
        try:
            return await self._following.fetch(
                max_wait_s=max_wait_s,
                min_bytes=max(fetch.min_bytes, 0),
                max_bytes=min(max(fetch.max_bytes, 1), self._context.settings.fetch_bytes_max),
            )
        except TidemillError as error:
            return [(key, Fetched(-1, -1, [], error)) for key, _ in self._following.reads()]

    def _partition_answer(self, key: Key, got: Fetched) -> PartitionRecords:
        if got.error is None:
            offsets = (got.high_watermark, got.log_start_offset)
            aborted = got.aborted if self._committed else None
            return PartitionRecords(key[1], 0, *offsets, got.batches, got.last_stable, aborted)
        if isinstance(got.error, MissingError):
            # The row was stale, as in Produce.
            self._drop_stale_row(key)
            return PartitionRecords(key[1], error_codes.NOT_LEADER_OR_FOLLOWER)
        if not error_codes.is_expected(got.error):
            log.error("kafka.fetch_failed", topic=key[0], partition=key[1], error=repr(got.error))
        offsets = (got.high_watermark, got.log_start_offset)
        return PartitionRecords(key[1], error_codes.fetch_code_of(got.error), *offsets, last_stable=got.last_stable)

    def _drop_stale_row(self, key: Key) -> None:
        read = self._following.read(key)
        if read is not None:
            row = self._context.cache.by_id(read.topic_id)
            if row is not None:
                self._context.cache.remove(row)
            self._refuse(key, _requested_partition(read), error_codes.NOT_LEADER_OR_FOLLOWER)


def _partition_read(topic_id: str, asked: FetchPartition, committed: bool) -> FetchRead:
    return FetchRead(topic_id, asked.partition, asked.offset, max(asked.max_bytes, 1), committed)


def _requested_partition(read: FetchRead) -> FetchPartition:
    return FetchPartition(read.partition, read.offset, read.max_bytes)
