"""A small world for topic tests: real rooms on memory stores, with gates and faults at their edges."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Self, TypeVar

from support.waiting import until
from tidemill.base.clock import ManualClock, Rand, SystemClock
from tidemill.base.errors import TidemillError
from tidemill.base.status.status import StatusTracker
from tidemill.consensus.api import LogHead
from tidemill.consensus.memory import MemoryConsensus, MemoryState
from tidemill.metastore.catalogue import Catalogue, TopicRow
from tidemill.metastore.factory import create_metastore
from tidemill.objects.memory import MemoryObjects
from tidemill.objects.store import Buffer
from tidemill.topics.api import Fetched, FetchRead
from tidemill.topics.batch import Record, decode_columns, encode_batch
from tidemill.topics.config.settings import TopicSettings
from tidemill.topics.local_topics import LocalTopics
from tidemill.topics.membership import Assignment, SingleNodeAssignment
from tidemill.topics.partition_reader import LogPartitionReader

T = TypeVar("T")


class GatedObjects(MemoryObjects):
    """Puts wait until the test lets them go, in any order; `fail` makes them raise instead."""

    def __init__(self) -> None:
        super().__init__(ManualClock())
        self.gated = False
        self.waiting: list[tuple[str, asyncio.Future[None]]] = []
        self.puts = 0
        self.gets = 0

    async def put(self, key: str, data: Buffer | Sequence[Buffer]) -> None:
        self.puts += 1
        if self.gated:
            gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.waiting.append((key, gate))
            await gate
        await super().put(key, data)

    async def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        self.gets += 1
        return await super().get_ranges(key, ranges)

    async def let_go(self, index: int = 0, error: TidemillError | None = None) -> None:
        await until(lambda: len(self.waiting) > max(index, 0))
        _, gate = self.waiting.pop(index)
        if error is None:
            gate.set_result(None)
        else:
            gate.set_exception(error)


Append = Callable[[], Awaitable[LogHead]]


class FaultyConsensus(MemoryConsensus):
    """`on_append`, when set, decides what each append does: it is given the real append to call or not."""

    def __init__(self, state: MemoryState | None = None) -> None:
        super().__init__(SystemClock(), state)
        self.on_append: Callable[[Append], Awaitable[LogHead]] | None = None
        self.appends = 0

    async def append(self, log: str, term: int, expected_next: int, records: Sequence[bytes], nonce: str) -> LogHead:
        self.appends += 1
        real = super().append
        if self.on_append is None:
            return await real(log, term, expected_next, records, nonce)
        return await self.on_append(lambda: real(log, term, expected_next, records, nonce))


class World:
    """Stores that outlive nodes, and helpers to speak to them."""

    def __init__(self, **settings: Any) -> None:
        self.objects = GatedObjects()
        self.consensus = FaultyConsensus()
        self.clock = SystemClock()
        self.rand = Rand(7)
        # The catalogue has separate clients: faults, gates and counts here concern the topic room alone.
        quiet = MemoryConsensus(self.clock, self.consensus.state)
        self.metastore = create_metastore(quiet, MemoryObjects(self.clock), self.clock, self.rand)
        self.catalogue = Catalogue(self.metastore, self.clock, self.rand)
        self.settings = TopicSettings(**({"retry_pause_s": 0.002} | settings))
        self.tracker = StatusTracker()
        self.nodes: list[LocalTopics] = []
        self.reader = LogPartitionReader(self.consensus, self.objects)

    async def topic(self, name: str = "t", partitions: int = 2) -> TopicRow:
        return await self.catalogue.create_topic(name, partitions)

    def node(self, assignment: Assignment | None = None, **settings: Any) -> LocalTopics:
        topics = LocalTopics(
            self.consensus,
            self.objects,
            self.catalogue,
            clock=self.clock,
            rand=self.rand,
            assignment=assignment or SingleNodeAssignment(f"n{len(self.nodes)}", len(self.nodes)),
            settings=TopicSettings(**({"retry_pause_s": 0.002} | settings)) if settings else self.settings,
            tracker=self.tracker,
        )
        self.nodes.append(topics)
        return topics

    async def truncated(self, log: str) -> None:
        """Return once the log no longer begins at its first record."""

        async def begins_later() -> bool:
            return (await self.consensus.log_head(log)).start > 0

        await until(begins_later, "the log is truncated")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        self.objects.gated = False
        for _, gate in self.objects.waiting:
            if not gate.done():
                gate.set_result(None)
        for node in self.nodes:
            await node.aclose()
        await self.metastore.aclose()


def batch(
    *values: str, pid: int = -1, epoch: int = 0, seq: int = 0, timestamp_ms: int = 1000, compression: str = "none"
) -> bytes:
    idempotent = pid >= 0
    return encode_batch(
        [Record(None, value.encode(), (), timestamp_ms) for value in values],
        producer_id=pid,
        producer_epoch=epoch if idempotent else -1,
        base_sequence=seq if idempotent else -1,
        compression=compression,
    )


async def fetch(
    topics: LocalTopics, topic_id: str, partition: int, offset: int, *, max_bytes: int = 1 << 20, wait_s: float = 0.0
) -> Fetched:
    (found,) = await topics.fetch(
        [FetchRead(topic_id, partition, offset, max_bytes)], max_wait_s=wait_s, min_bytes=1, max_bytes=1 << 24
    )
    return found


def values_of(batches: Sequence[Buffer]) -> list[tuple[int, str]]:
    found: list[tuple[int, str]] = []
    for each in batches:
        _, columns = decode_columns(each)
        found += [(o, (v or b"").decode()) for o, v in zip(columns.offsets.tolist(), columns.values, strict=True)]
    return found


async def read_all(world: World, topic_id: str, partition: int = 0) -> list[tuple[int, str]]:
    """Return the contents of the log and the bucket, without any node."""
    reader = LogPartitionReader(world.consensus, world.objects)
    end = await reader.high_watermark(topic_id, partition)
    return values_of(await reader.read(await reader.plan(topic_id, partition, 0, end)))
