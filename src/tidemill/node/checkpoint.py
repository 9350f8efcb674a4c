"""The stages of the checkpoint that no single room can make: shards do not know the metastore's rows.

partitions  topics.checkpoint
bindings    shards.checkpoint, by the sources that the catalogue names
shards      shards.checkpoint, by the shards' registers; derived tables before what they are derived from
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tidemill.base.clock import Clock
from tidemill.base.marks import Tracker
from tidemill.consensus.api import Consensus
from tidemill.metastore.checkpoint import Checkpointer, Group, Unit
from tidemill.metastore.metastore import Metastore
from tidemill.metastore.rows import BINDINGS, CAPTURES, PIPELINES, SHARD_BATCHES, SHARDS, TOPICS
from tidemill.metastore.rows.bindings import BindingRow
from tidemill.metastore.rows.shards import ShardBatchRow, ShardRow
from tidemill.node.checkpoint_registers import RegistersStage
from tidemill.objects.store import ObjectStore
from tidemill.shards.checkpoint import (
    BindingFollower,
    ShardFollower,
    ShardGroup,
    StoredBinding,
    decode_header,
    encode_header,
)
from tidemill.shards.open import created_shards
from tidemill.topics.checkpoint import PartitionsStage

BINDINGS_A_GROUP = 256


def checkpointer(
    consensus: Consensus,
    objects: ObjectStore,
    metastore: Metastore,
    clock: Clock,
    *,
    holder: str,
    interval_s: float,
    tracker: Tracker | None = None,
) -> Checkpointer:
    stages = (
        PartitionsStage(consensus, objects, metastore),
        BindingsStage(consensus, metastore),
        ShardsStage(consensus, metastore),
        RegistersStage(consensus, metastore),
    )
    return Checkpointer(metastore, stages, clock, holder=holder, interval_s=interval_s, tracker=tracker)


class BindingsStage:
    """The bindings of every capture and stream topic. Those of a topic that was deleted are deleted with it."""

    name = "bindings"

    def __init__(self, consensus: Consensus, metastore: Metastore) -> None:
        self._consensus = consensus
        self._metastore = metastore
        self._followers: dict[str, BindingFollower] = {}
        self._gone: set[str] = set()
        self._rows: set[str] = set()
        """Sources that have rows."""

    async def load(self) -> None:
        self._followers.clear()
        self._rows = set()
        async for keys, _ in self._metastore.prefix(BINDINGS.prefix()):
            self._rows.update(str(BINDINGS.decode_key(key)[0]) for key in keys)

    async def gather(self) -> list[Unit]:
        """Raises Corrupt, Unavailable."""
        sources = await sources_of(self._metastore)
        units: list[Unit] = []
        for source in sources:
            if source not in self._followers:
                self._followers[source] = BindingFollower(self._consensus, source, await self._last(source))
        found = await asyncio.gather(*(self._followers[source].gather() for source in sources))
        units += [binding_groups(source, bindings) for source, bindings in zip(sources, found, strict=True)]
        self._gone = (self._rows | self._followers.keys()) - set(sources)
        for source in sorted(self._gone):
            unit: Unit = []
            async for keys, _ in self._metastore.prefix(BINDINGS.prefix(source)):
                unit.append([(key, b"") for key in keys])
            units.append(unit)
        return [unit for unit in units if unit]

    def written(self) -> None:
        for source in self._gone:
            self._followers.pop(source, None)
        self._gone = set()
        self._rows = set(self._followers)
        for follower in self._followers.values():
            follower.written()

    async def _last(self, source: str) -> tuple[int, int] | None:
        async for keys, values in self._metastore.prefix(BINDINGS.prefix(source), reverse=True):
            row = BINDINGS.decode(keys[0], values[0])
            return row.time_ms, row.log_position
        return None


class ShardsStage:
    """Every shard that has a register: tables, derived tables and dead letters alike."""

    name = "shards"

    def __init__(self, consensus: Consensus, metastore: Metastore) -> None:
        self._consensus = consensus
        self._metastore = metastore
        self._followers: dict[str, ShardFollower] = {}

    async def load(self) -> None:
        self._followers.clear()

    async def gather(self) -> list[Unit]:
        """Outputs of other shards first; each then finds its inputs no older. Raises Corrupt, Unavailable."""
        created = {create.name: create for create in await created_shards(self._consensus)}
        derived = {
            name
            for row in await self._metastore.rows(PIPELINES)
            for name, source in row.tables.items()
            if source == "derived"
        }
        units: list[Unit] = []
        for name in sorted(created, key=lambda name: (name not in derived, name)):
            follower = self._followers.get(name)
            if follower is None:
                follower = self._followers[name] = await self._follower(name, created[name].shard_id)
            units.append([shard_group(name, follower.position, group) for group in await follower.gather()])
        # Written in the other order: inputs before what is derived from them.
        return [unit for unit in reversed(units) if unit]

    def written(self) -> None:
        for follower in self._followers.values():
            follower.written()

    async def _follower(self, name: str, shard_id: str) -> ShardFollower:
        row = await self._metastore.get(SHARDS, name, fresh=False)
        if row is None:
            return ShardFollower(self._consensus, shard_id)
        batches = {
            batch.lower: (batch.upper, batch.batch)
            for batch in await self._metastore.rows(SHARD_BATCHES, name, fresh=False)
        }
        return ShardFollower(self._consensus, shard_id, decode_header(row.header), batches)


async def sources_of(metastore: Metastore) -> list[str]:
    """Everything that mints bindings, by name."""
    captures = [f"capture/{row.name}" for row in await metastore.rows(CAPTURES)]
    topics = [f"topic/{row.name}" for row in await metastore.rows(TOPICS, fresh=False) if row.kind == "stream"]
    return sorted(captures + topics)


def binding_groups(source: str, bindings: Sequence[StoredBinding]) -> Unit:
    rows = [BINDINGS.encode(BindingRow(source, b.time_ms, b.position, b.data)) for b in bindings]
    return [rows[at : at + BINDINGS_A_GROUP] for at in range(0, len(rows), BINDINGS_A_GROUP)]


def shard_group(name: str, position: int, group: ShardGroup) -> Group:
    rows: Group = []
    for batch in group.batches:
        rows.append(SHARD_BATCHES.encode(ShardBatchRow(name, batch.lower, batch.upper, batch.data, batch.objects)))
    rows += [(SHARD_BATCHES.key(name, lower), b"") for lower in group.removed]
    header = group.header
    if header is not None:
        row = ShardRow(
            name, header.shard_id, header.since, header.upper, header.version, position, header.closed,
            encode_header(header),
        )  # fmt: skip
        rows.append(SHARDS.encode(row))
    return rows
