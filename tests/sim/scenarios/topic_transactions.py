"""Producer whose batches are in transactions, and a consumer of committed records, on the real topic room.

The producer is its own coordinator: it ends each transaction by a marker, which it sends until it is in the log, and
begins the next one in a new epoch (KIP-890), which fences the last transaction's batches in flight.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from sim.world import Down, Link, Violated
from tidemill.base.errors import CorruptError, TidemillError
from tidemill.topics.api import (
    FetchRead,
    InvalidProducerEpochError,
    Marker,
    OffsetOutOfRangeError,
    OutOfOrderSequenceError,
    ProduceTransaction,
)
from tidemill.topics.batch import Record, decode_columns, encode_batch
from tidemill.topics.batch.control_batch import as_transactional, is_commit_marker
from tidemill.topics.batch.header import CONTROL, HEADER_BYTES, TRANSACTIONAL
from tidemill.topics.local_topics import LocalTopics

if TYPE_CHECKING:
    from sim.scenarios.topics import Cluster

T = TypeVar("T")

WITHIN = ProduceTransaction("t")


async def confirmed(*_: object) -> None:
    """Answer for the coordinator: the producer's transaction is open."""


def batch_of(records: Sequence[Record], identity: tuple[int, int], sequence: int) -> bytes:
    """Return a batch of records of one transaction; `identity` is (producer id, epoch)."""
    producer_id, epoch = identity
    return as_transactional(
        encode_batch(records, producer_id=producer_id, producer_epoch=epoch, base_sequence=sequence)
    )


class Transactor:
    def __init__(self, cluster: Cluster, name: str, partition: int, producer_id: int) -> None:
        self._cluster = cluster
        self._name = name
        self._partition = partition
        self._producer_id = producer_id

    async def work(self) -> None:
        source, topic_id, partition = self._cluster.extra, self._cluster.topic.topic_id, self._partition
        sent = self._cluster.sent[self._name, partition] = []
        self._cluster.idempotent[self._name] = False  # records of aborted transactions are never acknowledged
        for epoch in range(source.randint(1, 5)):
            commit = source.random() < 0.5
            sequence, placed = 0, list[tuple[bytes, tuple[int, int]]]()
            for number in range(source.randint(1, 2)):
                values = [f"{self._name}:{epoch}.{number}.{i}".encode() for i in range(source.randint(1, 3))]
                self._cluster.fates |= dict.fromkeys(values, False)
                records = [Record(self._cluster.key(value), value, timestamp_ms=self._now_ms()) for value in values]
                batch = batch_of(records, (self._producer_id, epoch), sequence)
                sequence += len(values)
                sent += values
                result = await self._until(
                    lambda node, batch=batch: node.produce_nowait(topic_id, partition, batch, within=WITHIN)  # type: ignore[misc]
                )
                placed += [(value, (partition, result.base_offset + i)) for i, value in enumerate(values)]
            marker = Marker(self._producer_id, epoch, commit=commit)
            self._cluster.fates |= dict.fromkeys((value for value, _ in placed), commit)
            await self._until(lambda node, marker=marker: node.mark(topic_id, self._partition, marker))  # type: ignore[misc]
            if commit:
                self._cluster.acknowledged |= dict(placed)
            self._cluster.world.trace(f"{self._name} transaction {epoch} ended commit={commit}")

    def _now_ms(self) -> int:
        return self._cluster.world.clock.now_ms()

    async def _until(self, work: Callable[[LocalTopics], Awaitable[T]]) -> T:
        """Repeat the request until it succeeds."""
        while True:
            broker = self._cluster.pick(self._partition)
            if broker is not None:
                link = Link(broker)
                try:
                    async with asyncio.timeout(3.0):
                        return await link.request(work)
                except (OutOfOrderSequenceError, InvalidProducerEpochError) as error:
                    raise Violated(f"a good transaction was refused: producer={self._name} error={error}") from error
                except (TimeoutError, Down, TidemillError) as error:
                    self._cluster.world.trace(f"{self._name} tries again: {type(error).__name__}")
                finally:
                    link.close()
            await asyncio.sleep(self._cluster.extra.uniform(0.05, 0.3))


async def consume_committed(cluster: Cluster, partition: int, stop: asyncio.Event) -> None:
    """Read forward like a client in `read_committed` (KIP-98): skip a producer's records from the first offset of an
    aborted transaction, which a fetch names, to its abort marker."""
    position = 0
    while not stop.is_set():
        broker = cluster.pick(partition)
        if broker is not None:
            read = FetchRead(cluster.topic.topic_id, partition, position, 1 << 16, committed=True)
            link = Link(broker)
            try:
                async with asyncio.timeout(5.0):
                    [found] = await link.request(
                        lambda node, read=read: node.fetch([read], max_wait_s=0.2, min_bytes=1, max_bytes=1 << 20)  # type: ignore[misc]
                    )
                if isinstance(found.error, OffsetOutOfRangeError):
                    position = max(position, found.log_start_offset)
                elif isinstance(found.error, CorruptError):
                    raise Violated(f"acknowledged records are gone: partition={partition} error={found.error}")
                position = _passed(cluster, partition, position, found.batches, list(found.aborted))
                cluster.positions["committed", partition] = position
                cluster.durable.vouch(partition, position, "a consumer learns of it")
            except (TimeoutError, Down, TidemillError):
                pass
            finally:
                link.close()
        await asyncio.sleep(cluster.extra.uniform(0.05, 0.5))


def _passed(cluster: Cluster, partition: int, position: int, batches: list[bytes], named: list[tuple[int, int]]) -> int:
    aborted: set[int] = set()
    for batch in batches:
        header, columns = decode_columns(batch)
        if header.base_offset > position and not cluster.compacted:
            raise Violated(
                f"a fetch skipped offsets: partition={partition} from={position} to={header.base_offset} committed=True"
            )
        while named and named[0][1] < header.next_offset:
            aborted.add(named.pop(0)[0])
        if header.attributes & CONTROL:
            if not is_commit_marker(bytes(batch[HEADER_BYTES:])):
                aborted.discard(header.producer_id)
        else:
            given = not (header.attributes & TRANSACTIONAL and header.producer_id in aborted)
            for offset, value in zip(columns.offsets.tolist(), columns.values, strict=True):
                if offset >= position and cluster.fates.get(value or b"", True) != given:
                    raise Violated(
                        f"a reader of what is committed was {'' if given else 'not '}given what was "
                        f"{'not' if given else 'committed'}: partition={partition} offset={offset} record={value!r}"
                    )
        position = header.next_offset
    return position
