"""A TopicLog in memory, for tests of the endpoint alone: partitions are lists of batches.

Keeps the front's promises that clients can see (order per call, contiguous offsets, idempotence with a window of
five, event-driven fetch) and can fail on demand: `faults` is asked before a batch is stored and once after.
"""

from __future__ import annotations

import asyncio
import struct
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence

import crc32c

from tidemill.base.errors import InvalidError
from tidemill.objects.store import Buffer
from tidemill.topics.api import (
    BatchRef,
    ConfirmTransaction,
    CorruptBatchError,
    Fetched,
    FetchRead,
    InvalidProducerEpochError,
    Marker,
    OffsetOutOfRangeError,
    OutOfOrderSequenceError,
    PartitionOffsets,
    ProduceResult,
    ProducerStatus,
    ProduceTransaction,
    TransactionSnapshot,
)
from tidemill.topics.fetch.timestamp_lookup import first_offset_at

Fault = Callable[[str, int, bytes, bool], Exception | None]
"""(topic id, partition, batch, stored already?) → the error to answer with, or None."""


class _Partition:
    def __init__(self) -> None:
        self.batches: list[bytes] = []
        self.bases: list[int] = []
        self.next = 0
        self.producers: dict[int, tuple[int, int, deque[tuple[int, int, int]]]] = {}


class FakeFollowing:
    """A follower that reads everything again each time, and reports the due reads."""

    def __init__(self, topics: FakeTopicLog) -> None:
        self._topics = topics
        self._reads: dict[Hashable, FetchRead] = {}
        self._reported: dict[Hashable, int] = {}

    def __len__(self) -> int:
        return len(self._reads)

    def reads(self) -> Iterator[tuple[Hashable, FetchRead]]:
        return iter(list(self._reads.items()))

    def read(self, key: Hashable) -> FetchRead | None:
        return self._reads.get(key)

    def put(self, key: Hashable, read: FetchRead) -> None:
        self._reads[key] = read

    def drop(self, key: Hashable) -> None:
        self._reads.pop(key, None)
        self._reported.pop(key, None)

    def close(self) -> None:
        self._reads.clear()

    async def fetch(self, *, max_wait_s: float, min_bytes: int, max_bytes: int) -> list[tuple[Hashable, Fetched]]:
        keys = list(self._reads)
        found = await self._topics.fetch(
            list(self._reads.values()), max_wait_s=max_wait_s, min_bytes=min_bytes, max_bytes=max_bytes
        )
        answers = []
        for key, got in zip(keys, found, strict=True):
            if got.batches or got.error or self._reported.get(key) != got.high_watermark:
                answers.append((key, got))
                self._reported[key] = got.high_watermark
        return answers


class FakeTopicLog:
    def __init__(self, node: str = "n1", delay_s: float = 0.0) -> None:
        self.node = node
        self.delay_s = delay_s
        self.partitions: dict[tuple[str, int], _Partition] = defaultdict(_Partition)
        self.faults: Fault | None = None
        self.calls: list[tuple[str, int, int]] = []
        """(topic id, partition, first sequence) in call order."""
        self.fetching = self.fetching_most = 0
        """Reads under way, now and at most."""
        self.leadership = 0
        self._arrived = asyncio.Event()

    def produce_nowait(
        self,
        topic_id: str,
        partition: int,
        batch: Buffer,
        *,
        sender: object = None,
        within: ProduceTransaction | None = None,
        trailer: bytes = b"",
    ) -> asyncio.Future[ProduceResult]:
        future: asyncio.Future[ProduceResult] = asyncio.get_running_loop().create_future()
        data = bytes(batch)
        self.calls.append((topic_id, partition, struct.unpack_from(">i", data, 53)[0]))

        def store() -> None:
            if future.cancelled():
                return
            try:
                result = self._store(topic_id, partition, data)
            except InvalidError as error:
                future.set_exception(error)
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        asyncio.get_running_loop().call_later(self.delay_s, store)
        return future

    def _store(self, topic_id: str, partition: int, data: bytes) -> ProduceResult:
        if crc32c.crc32c(data[21:]) != struct.unpack_from(">I", data, 17)[0]:
            raise CorruptBatchError("bad crc.")
        error = self.faults(topic_id, partition, data, False) if self.faults else None
        if error is not None:
            raise error
        log = self.partitions[topic_id, partition]
        count = struct.unpack_from(">i", data, 23)[0] + 1
        producer, epoch, first = struct.unpack_from(">qhi", data, 43)
        last = (first + count - 1) & 0x7FFFFFFF
        if producer >= 0:
            known = log.producers.get(producer)
            if known is not None:
                known_epoch, known_last, window = known
                if epoch < known_epoch:
                    raise InvalidProducerEpochError("old epoch.")
                if epoch == known_epoch:
                    for seen_first, seen_last, base in window:
                        if (seen_first, seen_last) == (first, last):
                            return ProduceResult(base, base + count - 1, 0, duplicate=True)
                    if first != (known_last + 1) & 0x7FFFFFFF:
                        raise OutOfOrderSequenceError("gap.")
                elif first != 0:
                    raise OutOfOrderSequenceError("new epoch must start at 0.")
                else:
                    window.clear()
            window = known[2] if known else deque(maxlen=5)
            window.append((first, last, log.next))
            log.producers[producer] = (epoch, last, window)
        base = log.next
        log.batches.append(struct.pack(">q", base) + data[8:])
        log.bases.append(base)
        log.next += count
        self._arrived.set()
        error = self.faults(topic_id, partition, data, True) if self.faults else None
        if error is not None:
            raise error
        return ProduceResult(base, base + count - 1, 0)

    async def fetch(
        self, reads: Sequence[FetchRead], *, max_wait_s: float, min_bytes: int, max_bytes: int
    ) -> list[Fetched]:
        self.fetching += 1
        self.fetching_most = max(self.fetching_most, self.fetching)
        try:
            return await self._fetch(reads, max_wait_s, min_bytes, max_bytes)
        finally:
            self.fetching -= 1

    async def _fetch(
        self, reads: Sequence[FetchRead], max_wait_s: float, min_bytes: int, max_bytes: int
    ) -> list[Fetched]:
        deadline = asyncio.get_running_loop().time() + max_wait_s
        while True:
            self._arrived.clear()
            found = self._read(reads, max_bytes)
            left = deadline - asyncio.get_running_loop().time()
            size = sum(len(b) for f in found for b in f.batches)
            if size >= max(min_bytes, 1) or left <= 0 or any(f.error for f in found):
                return found
            try:
                async with asyncio.timeout(left):
                    await self._arrived.wait()
            except TimeoutError:
                pass

    def _read(self, reads: Sequence[FetchRead], max_bytes: int) -> list[Fetched]:
        answers = []
        for read in reads:
            log = self.partitions[read.topic_id, read.partition]
            if not 0 <= read.offset <= log.next:
                answers.append(Fetched(log.next, 0, [], OffsetOutOfRangeError("out of range.")))
                continue
            batches: list[Buffer] = []
            room = min(read.max_bytes, max_bytes)
            for base, batch in zip(log.bases, log.batches, strict=True):
                if base + struct.unpack_from(">i", batch, 23)[0] < read.offset:
                    continue
                if len(batch) > room and (batches or any(a.batches for a in answers)):
                    break
                batches.append(batch)
                room -= len(batch)
                max_bytes -= len(batch)
            answers.append(Fetched(log.next, 0, batches, last_stable=log.next))
        return answers

    def subscribe(self) -> FakeFollowing:
        return FakeFollowing(self)

    async def offsets(self, topic_id: str, partition: int, *, proved: bool = False) -> PartitionOffsets:
        end = self.partitions[topic_id, partition].next
        return PartitionOffsets(0, end, end)

    async def transaction_snapshot(self, topic_id: str, partition: int, producer_id: int) -> TransactionSnapshot:
        return (-1, None)

    async def mark(
        self, topic_id: str, partition: int, marker: Marker, here: TransactionSnapshot | None = None
    ) -> None: ...

    def set_coordinator(self, confirm: ConfirmTransaction) -> None: ...

    async def producers(self, topic_id: str, partition: int) -> list[ProducerStatus]:
        return []

    async def offset_for_time(self, topic_id: str, partition: int, timestamp_ms: int) -> tuple[int, int] | None:
        log = self.partitions[topic_id, partition]
        for base, batch in zip(log.bases, log.batches, strict=True):
            max_ms = struct.unpack_from(">q", batch, 35)[0]
            if max_ms >= timestamp_ms:
                count = struct.unpack_from(">i", batch, 57)[0]
                return first_offset_at(batch, BatchRef("", 0, len(batch), base, count, max_ms), timestamp_ms)
        return None

    async def newest_timestamp(self, topic_id: str, partition: int) -> tuple[int, int] | None:
        times = [struct.unpack_from(">q", batch, 35)[0] for batch in self.partitions[topic_id, partition].batches]
        return await self.offset_for_time(topic_id, partition, max(times)) if times else None

    async def delete_records(self, topic_id: str, partition: int, before_offset: int) -> int:
        end = self.partitions[topic_id, partition].next
        wanted = end if before_offset == -1 else before_offset
        if not 0 <= wanted <= end:
            raise OffsetOutOfRangeError("out of range.")
        return wanted

    async def refresh(self) -> None: ...

    def leader_of(self, topic_id: str, partition: int) -> str:
        return self.node
