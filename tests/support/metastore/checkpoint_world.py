"""A small cluster on memory stores whose topics, bindings and shards keep moving, and what its rows restore to."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from support.metastore.memory_rows import Shared, opener
from tidemill.base.clock import Rand, SystemClock
from tidemill.base.status.status import StatusTracker
from tidemill.consensus.factory import open_consensus
from tidemill.consensus.memory import MemoryConsensus
from tidemill.maintenance.checkpoint.stages import build_checkpointer
from tidemill.metastore.backup.checkpoint import Checkpointer
from tidemill.metastore.catalogue import Catalogue, PipelineRow, TopicRow
from tidemill.metastore.cluster import Cluster, domain_name
from tidemill.metastore.cluster_manifest import ClusterManifest, Presence
from tidemill.metastore.domain.domain import Domain
from tidemill.metastore.domain.settings import DomainContext
from tidemill.metastore.metastore import Metastore
from tidemill.metastore.rows import BINDINGS, EXTENTS, PARTITIONS, SHARD_BATCHES, SHARDS, TOPICS
from tidemill.objects.factory import open_objects
from tidemill.objects.memory import MemoryObjects
from tidemill.shards.api import DIFF, TIME, Binding, Column, ShardSchema
from tidemill.shards.bindings.remap import LogRemap, decode_binding, decode_record
from tidemill.shards.compaction.compaction import compact_once
from tidemill.shards.handle import LogShard
from tidemill.shards.registry import open_remap, open_shard
from tidemill.shards.state.checkpoint import assemble_state, decode_header
from tidemill.shards.state.codec import decode_batch
from tidemill.shards.state.state import ShardState, check_invariants
from tidemill.topics.batch import Record, encode_batch
from tidemill.topics.config.settings import TopicSettings
from tidemill.topics.local_topics import LocalTopics
from tidemill.topics.partition.state_machine.row_codec import rebuild_state
from tidemill.topics.partition.state_machine.state import PartitionState

SCHEMA = ShardSchema((Column("k", "int64"), Column("v", "int64")), ("k",))
Rows = dict[bytes, bytes]


class World:
    """`clicks` (two partitions) feeds the shard `table`, from which `derived` is made."""

    def __init__(
        self, domains: int = 1, *, real: bool = False, consensus: Any = None, objects: Any = None, **settings: Any
    ) -> None:
        """`real`: replicated domains over `consensus` and `objects` instead of rows in memory."""
        self.clock = SystemClock()
        self.rand = Rand()
        self.consensus: Any = consensus or MemoryConsensus(self.clock)
        self.objects: Any = objects or MemoryObjects(self.clock)
        self.real = real
        self.shared = [Shared() for _ in range(domains)]
        self.metastore = self.open()
        self.catalogue: Any = Catalogue(self.metastore, self.clock, self.rand)
        self.tracker = StatusTracker()
        self._settings = settings
        self.topics = self.open_topics()
        self.remap: LogRemap
        self.table: LogShard
        self.derived: LogShard
        self.topic: TopicRow
        self._seq = 0
        self._sequences = {0: 0, 1: 0}

    def open(self) -> Metastore:
        if self.real:
            return Metastore(self.consensus, self.open_domain, self.clock, self.rand, domains=len(self.shared))
        return Metastore(self.consensus, opener(self.shared), self.clock, self.rand, domains=len(self.shared))  # type: ignore[arg-type]

    def open_topics(self) -> LocalTopics:
        return LocalTopics(
            self.consensus,
            self.objects,
            self.catalogue,
            clock=self.clock,
            rand=self.rand,
            settings=TopicSettings(**({"retry_pause_s": 0.002} | self._settings)),
        )

    async def open_domain(self, cluster: Cluster, index: int) -> Domain:
        return await Domain.open(
            DomainContext(
                self.consensus, self.objects, domain_name(index), holder="test", clock=self.clock, rand=self.rand
            )
        )

    async def __aenter__(self) -> World:
        self.topic = await self.catalogue.create_topic("clicks", 2)
        await self.catalogue.put(PipelineRow("p", {"table": "topic:clicks", "derived": "derived"}))
        self.remap = await open_remap(self.consensus, self.clock, self.rand, "topic/clicks")
        self.table = await open_shard(self.consensus, self.objects, self.clock, self.rand, "table", SCHEMA)
        self.derived = await open_shard(self.consensus, self.objects, self.clock, self.rand, "derived", SCHEMA)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.table.aclose()
        await self.derived.aclose()
        await self.topics.aclose()
        await self.metastore.aclose()

    def checkpointer(self, holder: str = "n1", metastore: Metastore | None = None) -> Checkpointer:
        return build_checkpointer(
            self.consensus, self.objects, metastore or self.metastore, self.clock,
            holder=holder, interval_s=0.01, tracker=self.tracker,
        )  # fmt: skip

    # the world moves ------------------------------------------------------------------------------
    async def produce(self, count: int = 3, partition: int = 0) -> None:
        batch = encode_batch(
            [Record(None, b"v", (), 1000 + self._seq)] * count,
            producer_id=5 + partition,
            producer_epoch=0,
            base_sequence=self._sequence(partition, count),
        )
        await self.topics.produce_nowait(self.topic.topic_id, partition, batch)

    def _sequence(self, partition: int, count: int) -> int:
        first = self._sequences[partition]
        self._sequences[partition] += count
        return first

    async def bind(self) -> Binding:
        offsets = []
        for partition in range(2):
            offsets.append((await self.topics.offsets(self.topic.topic_id, partition)).high_watermark)
        latest = await self.remap.latest()
        time_ms = max(self.clock.now_ms(), latest.time_ms + 1 if latest else 0)
        return await self.remap.mint(Binding(time_ms, {self.topic.topic_id: tuple(offsets)}))

    async def follow(self, shard: LogShard, end: int, *, rows: int = 1) -> None:
        """Append [upper, end) with some rows, or none."""
        _, upper = await shard.frontiers()
        if end <= upper:
            return
        parts = []
        if rows:
            self._seq += 1
            found = {"k": [self._seq] * rows, "v": list(range(rows)), TIME: [end - 1] * rows, DIFF: [1] * rows}
            parts.append(await shard.write_part(pa.table(found)))
        await shard.compare_and_append(upper, end, parts, "")

    async def step(self, *, rows: int = 1) -> None:
        """A record, its binding, the table up to it, the derived table up to the table."""
        await self.produce(partition=int(self._sequences[0] > self._sequences[1]))
        binding = await self.bind()
        await self.follow(self.table, binding.time_ms + 1, rows=rows)
        await self.follow(self.derived, (await self.table.frontiers())[1], rows=rows)

    async def compact(self, shard: LogShard) -> bool:
        since, upper = await shard.frontiers()
        await shard.downgrade_since("test", 1, max(since, upper - 2))
        return await compact_once(shard, self.objects, self.rand) is not None

    async def move_on(self) -> None:
        """Advance all stages concurrently and without end, each ahead of the one that follows it."""
        while True:
            await self.step()
            await asyncio.sleep(0)


async def manifest_of(world: World) -> ClusterManifest:
    cluster = await world.metastore.cluster()
    uuids = tuple(domain.domain_uuid for domain in await world.metastore.domains())  # type: ignore[attr-defined]
    return ClusterManifest(cluster.uuid, cluster.label, cluster.incarnation, uuids, cluster.created_ms)


async def persisted(world: World, steps: int = 8) -> None:
    """Some steps, checkpointed and in the bucket, and the cluster manifest with them; no sign of life."""
    for _ in range(steps):
        await world.step()
    await world.checkpointer().round()
    await world.metastore.flush(30)
    presence = Presence(world.objects, world.clock, world.rand, "n1")
    await presence.publish(await manifest_of(world))
    await presence.withdraw()


async def keys(world: World, prefix: str) -> list[str]:
    return [found.key async for found in world.objects.list(prefix)]


async def damage(world: World, key: str) -> None:
    data = bytearray(await world.objects.get(key))
    data[len(data) // 2] ^= 1
    await world.objects.delete(key)
    await world.objects.put(key, bytes(data))


def rows_of(shared: Shared) -> Rows:
    return {key: row.value for key, row in shared.rows.items() if row.value}


def family_rows(family: Any, rows: Mapping[bytes, bytes]) -> list[Any]:
    prefix = family.prefix()
    return [family.decode(key, rows[key]) for key in sorted(rows) if key.startswith(prefix)]


class Restored:
    """The state that these rows restore. Raises CorruptError if a part of it is torn."""

    def __init__(self, rows: Rows) -> None:
        self.topics = {row.topic_id: row for row in family_rows(TOPICS, rows)}
        self.partitions: dict[tuple[str, int], PartitionState] = {}
        for row in family_rows(PARTITIONS, rows):
            mine = {k: v for k, v in rows.items() if k.startswith(EXTENTS.prefix(row.topic_id, row.partition))}
            self.partitions[row.topic_id, row.partition] = rebuild_state(row, family_rows(EXTENTS, mine))
        self.bindings: dict[str, list[Binding]] = {}
        for row in family_rows(BINDINGS, rows):
            found = self.bindings.setdefault(row.source, [])
            if found or not decode_record(row.binding).back:  # as a restore passes those by
                found.append(decode_binding(row.binding, found[-1] if found else None))
        self.shards: dict[str, ShardState] = {}
        for row in family_rows(SHARDS, rows):
            mine = {k: v for k, v in rows.items() if k.startswith(SHARD_BATCHES.prefix(row.name))}
            batches = [decode_batch(batch.batch) for batch in family_rows(SHARD_BATCHES, mine)]
            self.shards[row.name] = assemble_state(decode_header(row.header), batches)

    def check(self) -> None:
        """CP1: inputs at or beyond outputs."""
        for state in self.shards.values():
            check_invariants(state)
        latest = self.bindings.get("topic/clicks", [])
        bound = latest[-1].time_ms + 1 if latest else 0
        table, derived = self.shards.get("table"), self.shards.get("derived")
        assert (table.upper if table else 0) <= bound, "a shard is ahead of its bindings"
        assert (derived.upper if derived else 0) <= (table.upper if table else 0), "a derived table leads its input"
        for binding in latest:
            for topic_id, offsets in binding.offsets.items():
                for partition, offset in enumerate(offsets):
                    state = self.partitions.get((topic_id, partition))
                    assert (state.high_watermark if state else 0) >= offset, "a binding is ahead of its topic"


def command(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {k: v for k, v in os.environ.items() if not k.startswith("TIDEMILL_")}
    line = [sys.executable, "-m", "tidemill", *arguments]
    return subprocess.run(line, capture_output=True, text=True, cwd=directory, env=environ, timeout=120)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A cluster's data directory after some work, nothing running."""
    (tmp_path / "tidemill.toml").write_text(f'[node]\ndata = "{tmp_path}/data"\n')
    (tmp_path / "data").mkdir()

    async def main() -> None:
        clock, rand = SystemClock(), Rand()
        consensus = await open_consensus(f"sqlite://{tmp_path}/data/consensus.db", clock, rand)
        objects = await open_objects(f"file://{tmp_path}/data/objects", clock, rand)
        async with World(real=True, consensus=consensus, objects=objects) as world:
            await persisted(world)
        await consensus.aclose()
        await objects.aclose()

    asyncio.run(main())
    return tmp_path
