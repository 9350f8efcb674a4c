"""Append the side topic of a table to its topic, behind the copied rows, partition by partition.

    side topic offset n   ►   topic offset ends + n        as its stream's producer, with that offset as the sequence

Invariant (exact place): because the sequence is the offset, the topic accepts a batch only at its place, even if
another process also appends. After an interruption the topic's high watermark says where to resume (side_topic.py).
After a failure the position is looked up there, and the batch is sent again.

Invariant (first batch alone): a partition accepts any sequence from a producer that it does not know. So the first
batch is sent alone: if it failed, the next one would be accepted in its place.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import crc32c
import structlog

from tidemill.base.errors import CorruptError, UnavailableError, UnknownOutcomeError
from tidemill.base.runtime.coop import CoopBudget
from tidemill.capture.topics.partition_writer import SEQUENCE_MODULUS
from tidemill.objects.store import Buffer
from tidemill.topics.api import FetchRead, OutOfOrderSequenceError, ProduceResult, TopicLog
from tidemill.topics.batch import decode_batch, encode_batch, parse_header
from tidemill.topics.batch.header import CRC_START, HEADER

log = structlog.get_logger()

READ_BYTES = 4 << 20
IN_FLIGHT = 3
"""Fewer than the five batches that a partition remembers per producer."""
ATTEMPTS = 20
PAUSE_S = 0.1
PAUSE_MAX_S = 2.0
_RETRIABLE = (UnavailableError, UnknownOutcomeError, OutOfOrderSequenceError)

Batch = tuple[int, int, bytearray]
"""Side topic offsets [start, end), and the bytes for the topic."""


class SideTopicAppender:
    """Append task of one table. `ends`: next offset per partition of its topic when its copy was complete."""

    def __init__(
        self,
        topics: TopicLog,
        topic_id: str,
        side_topic_id: str,
        ends: Sequence[int],
        producer_id: int,
        pace: CoopBudget,
    ) -> None:
        self._topics = topics
        self._topic_id = topic_id
        self._side_topic_id = side_topic_id
        self._ends = ends
        self._producer_id = producer_id
        self._pace = pace
        self.appended = [0] * len(ends)
        """Number of appended records per partition, as far as is known."""

    async def read_appended_count(self) -> int:
        """Return how many records are appended. Raises the topic's errors."""
        for partition in range(len(self._ends)):
            await self._read_appended(partition)
        return sum(self.appended)

    async def append_up_to(self, offsets: Sequence[int], moved: Callable[[int], None] = lambda _: None) -> int:
        """Append the side topic's records below these offsets, and return how many records were appended. `moved` is
        called with the total number of appended records as it grows. Raises UnavailableError, UnknownOutcomeError,
        CorruptError, MissingError.
        """
        before = await self.read_appended_count()
        for partition, end in enumerate(offsets):
            failures = 0
            while self.appended[partition] < end:
                known = self.appended[partition]
                try:
                    await self._append_batches(partition, end, moved)
                except _RETRIABLE as error:
                    log.warning("the side topic is not appended yet", topic=self._topic_id, cause=str(error))
                    await asyncio.sleep(min(PAUSE_MAX_S, PAUSE_S * 2 ** min(failures, 10)))
                    await self._read_appended(partition)
                    failures = failures + 1 if known == self.appended[partition] else 0
                    if failures == ATTEMPTS:
                        raise
        return sum(self.appended) - before

    async def _read_appended(self, partition: int) -> None:
        for attempt in range(ATTEMPTS):
            try:
                high = (await self._topics.offsets(self._topic_id, partition)).high_watermark
                break
            except (UnavailableError, UnknownOutcomeError):
                if attempt == ATTEMPTS - 1:
                    raise
                await asyncio.sleep(PAUSE_S)
        if high < self._ends[partition]:
            raise CorruptError(
                f"the topic of a copied table is shorter than its copy: topic={self._topic_id} partition={partition}"
                f" high_watermark={high} copied={self._ends[partition]}."
            )
        self.appended[partition] = high - self._ends[partition]

    async def _append_batches(self, partition: int, end: int, moved: Callable[[int], None]) -> None:
        """Append batches until all are appended, or one fails. No batch is in flight afterwards."""
        flying: deque[tuple[Batch, asyncio.Future[ProduceResult]]] = deque()
        try:
            at, known = self.appended[partition], False
            while at < end:
                for batch in self._renumber_batches(await self._fetch_batches(partition, at), partition, at, end):
                    if len(flying) == (IN_FLIGHT if known else 1):
                        await self._await_batch(partition, *flying.popleft(), moved)
                        known = True
                    future = self._topics.produce_nowait(self._topic_id, partition, batch[2])
                    flying.append((batch, future))
                    at = batch[1]
                    if self._pace.is_used_up:
                        await self._pace.wait_for_turn()
            while flying:
                await self._await_batch(partition, *flying.popleft(), moved)
        finally:
            # The batches after a failed one fail too: the position is looked up when all have ended.
            await asyncio.gather(*(future for _, future in flying), return_exceptions=True)

    async def _await_batch(
        self, partition: int, batch: Batch, future: asyncio.Future[ProduceResult], moved: Callable[[int], None]
    ) -> None:
        start, end, _ = batch
        found = (await future).base_offset
        if found != self._ends[partition] + start:
            raise CorruptError(
                f"another client wrote to a capture's topic: topic={self._topic_id} partition={partition}"
                f" expected={self._ends[partition] + start} found={found}.",
                fix="Let only the capture write to it; start the capture over.",
            )
        self.appended[partition] = max(self.appended[partition], end)
        moved(sum(self.appended))

    async def _fetch_batches(self, partition: int, at: int) -> Sequence[Buffer]:
        read = FetchRead(self._side_topic_id, partition, at, READ_BYTES)
        (fetched,) = await self._topics.fetch([read], max_wait_s=0.0, min_bytes=0, max_bytes=READ_BYTES)
        if fetched.error is not None:
            raise fetched.error
        if not fetched.batches:
            # Bound, hence durable: the partition's present leader has not yet read up to there.
            raise UnavailableError(f"the side topic is not readable yet: topic={self._side_topic_id} offset={at}.")
        return fetched.batches

    def _renumber_batches(self, found: Sequence[Buffer], partition: int, at: int, end: int) -> Iterator[Batch]:
        """Yield the batches from `at` up to `end`, in the form that the topic needs."""
        for data in found:
            header = parse_header(data)
            start, stop = max(header.base_offset, at), min(header.next_offset, end)
            if start >= stop:
                continue
            if start != at:
                raise CorruptError(f"the side topic has a gap: topic={self._side_topic_id} at={at} found={start}.")
            sequence = (self._ends[partition] + start) % SEQUENCE_MODULUS
            if (start, stop) == (header.base_offset, header.next_offset):
                yield start, stop, _renumber(data, self._producer_id, sequence)
            else:
                records = [record for record in decode_batch(data).records if start <= record.offset < stop]
                whole = encode_batch(
                    records, producer_id=self._producer_id, producer_epoch=0, base_sequence=sequence
                )  # fmt: skip
                yield start, stop, bytearray(whole)
            at = stop


def _renumber(data: Buffer, producer_id: int, sequence: int) -> bytearray:
    """Return the same records in a batch of this producer, epoch 0, with this sequence."""
    batch = bytearray(data)
    fields = list(HEADER.unpack_from(batch))
    fields[9:12] = producer_id, 0, sequence
    HEADER.pack_into(batch, 0, *fields)
    fields[4] = crc32c.crc32c(memoryview(batch)[CRC_START:])
    HEADER.pack_into(batch, 0, *fields)
    return batch
