"""A topic that is created, grows and is deleted under load, several times, next to the other topic of the room.

    create ─► produce ─► add a partition ─► read back the acknowledged records ─► delete, all of it concurrently

Oracle: no partition in the catalogue is ever reported as missing; acknowledged records stay until the topic is deleted;
of a deleted topic nothing is left in the end, even if a node learns of the deletion late: no record, object or row.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

from sim.world import Crew, Down, Link, Violated
from tidemill.base.errors import ConflictError, MissingError, TidemillError
from tidemill.metastore.catalogue import Catalogue, TopicRow
from tidemill.metastore.metastore import Metastore
from tidemill.metastore.rows import ABORTED, EXTENTS, L1_EXTENTS, L1_OBJECTS, L1_PARTITIONS, L1_TERMS, PARTITIONS
from tidemill.metastore.rows.row_family import Family
from tidemill.topics.batch import Record, decode_columns, encode_batch
from tidemill.topics.partition.recovery import partition_log
from tidemill.topics.partition_reader import LogPartitionReader

if TYPE_CHECKING:
    from sim.scenarios.topics import Cluster

T = TypeVar("T")

NAME = "passing"

FAMILIES: tuple[Family[Any], ...] = (PARTITIONS, EXTENTS, ABORTED, L1_PARTITIONS, L1_EXTENTS, L1_TERMS, L1_OBJECTS)
"""Row families of a topic in addition to its own row."""


class Lives:
    def __init__(self, cluster: Cluster, metastore: Metastore, reader: LogPartitionReader) -> None:
        self._cluster = cluster
        self._metastore = metastore
        self._reader = reader
        self._catalogue = Catalogue(metastore, cluster.world.clock, cluster.world.rand())
        self._source = random.Random(f"lives/{cluster.world.seed}")
        self._acknowledged: dict[int, dict[int, bytes]] = {}
        """Partition → offset → record, of the current topic."""
        self.gone: list[TopicRow] = []

    async def work(self) -> None:
        source = self._source
        for _ in range(source.randint(1, 3)):
            self._acknowledged = {}
            row = await self._surely(self._created, source.randint(1, 2))
            async with Crew() as crew:
                for partition in range(row.partitions):
                    crew.spawn(self._produce(row, partition))
                await asyncio.sleep(source.uniform(0, 1.5))
                row = await self._surely(self._grown, row.partitions + 1)
                crew.spawn(self._produce(row, row.partitions - 1))
                await asyncio.sleep(source.uniform(0, 1.5))
                await self._check(row)
                self.gone.append(row)
                await self._surely(self._deleted)
                self._cluster.world.trace(f"deleted {row.topic_id}")

    async def _surely(self, change: Callable[..., Awaitable[T]], *args: int) -> T:
        while True:
            try:
                return await change(*args)
            except TidemillError as error:
                self._cluster.world.trace(f"catalogue again: {type(error).__name__}")
            await asyncio.sleep(self._source.uniform(0.05, 0.3))

    async def _created(self, partitions: int) -> TopicRow:
        try:
            return await self._catalogue.create_topic(NAME, partitions)
        except ConflictError as ours:
            if not isinstance(ours.current, TopicRow):
                raise
            return ours.current

    async def _grown(self, partitions: int) -> TopicRow:
        row = await self._catalogue.get(TopicRow, NAME)
        assert row is not None
        return row if row.partitions == partitions else await self._catalogue.grow_topic(NAME, partitions)

    async def _deleted(self) -> None:
        with contextlib.suppress(MissingError):
            await self._catalogue.delete(TopicRow, NAME)

    async def _produce(self, row: TopicRow, partition: int) -> None:
        """Produce one record after another, until a node reports that the topic is gone, or no node can report it."""
        placed, at = self._acknowledged.setdefault(partition, {}), (row.topic_id, partition)
        number, late = 0, self._source.randint(0, 10)
        while late:
            gone = any(each.topic_id == row.topic_id for each in self.gone)
            late -= gone
            broker = self._cluster.pick(partition, row.topic_id)
            if broker is not None:
                value = f"{row.topic_id}/{partition}.{number}".encode()
                batch = encode_batch([Record(None, value, timestamp_ms=self._cluster.world.clock.now_ms())])
                link = Link(broker)
                try:
                    async with asyncio.timeout(3.0):
                        result = await link.request(lambda node: node.produce_nowait(*at, batch))  # noqa: B023
                    placed[result.base_offset] = value
                    number += 1
                except MissingError as error:
                    if not any(each.topic_id == row.topic_id for each in self.gone):
                        raise Violated(f"a partition that is there is said to be missing: {error}") from error
                    return
                except (TimeoutError, Down, TidemillError):
                    pass
                finally:
                    link.close()
            await asyncio.sleep(self._source.uniform(0.01, 0.4))

    async def _check(self, row: TopicRow) -> None:
        for partition in range(row.partitions):
            placed = dict(self._acknowledged.get(partition, {}))
            end = await self._reader.high_watermark(row.topic_id, partition)
            standing: dict[int, bytes] = {}
            for batch in await self._reader.read(await self._reader.plan(row.topic_id, partition, 0, end)):
                _, columns = decode_columns(batch)
                standing |= dict(zip(columns.offsets.tolist(), (v or b"" for v in columns.values), strict=True))
            start = await self._reader.log_start(row.topic_id, partition)  # the nemesis cuts this topic too
            if [at for at in standing if at >= start] != list(range(start, end)) or any(
                standing.get(at) != value for at, value in placed.items() if at >= start
            ):
                raise Violated(f"an acknowledged record is lost: {partition=} {start=} {placed=} {standing=}")

    async def left(self) -> list[str]:
        """Return the remains of deleted topics, except the head of a log, which stays and fences late nodes."""
        world = self._cluster.world
        found: list[str] = []
        for row in self.gone:
            for partition in range(row.partitions):
                log = partition_log(row.topic_id, partition)
                head = await world.consensus.log_head(log)
                found += [f"{log}[{head.start}:{head.next}]"] if head.start < head.next else []
            for prefix in (f"l1/{row.topic_id}/", f"rollup/topic/{row.topic_id}/"):
                found += [meta.key async for meta in world.objects.list(prefix)]
            for family in FAMILIES:
                async for keys, _ in self._metastore.prefix(family.prefix(row.topic_id)):
                    found += [f"{family.name} {row.topic_id}"] * len(keys)
        return found
