"""Checkpoint stages that combine several rooms, because shards do not know the metastore's rows.

partitions  topics.lifecycle.checkpoint
bindings    shards.state.checkpoint, by the sources that the catalogue names
shards      shards.state.checkpoint, by the shards' registers; derived tables before their inputs
"""

from __future__ import annotations

from collections.abc import Sequence, Set

from tidemill.base.clock import Clock
from tidemill.base.errors import TidemillError
from tidemill.base.status.status import StatusTracker
from tidemill.consensus.api import Consensus
from tidemill.consensus.change_journal import ChangedLogs
from tidemill.maintenance.checkpoint.registers import RegistersStage
from tidemill.metastore.backup.checkpoint import Checkpointer, Group, Unit, gather_readable
from tidemill.metastore.backup.restore import attempt_of
from tidemill.metastore.metastore import Metastore
from tidemill.metastore.rows import BINDINGS, CAPTURES, PIPELINES, SHARD_BATCHES, SHARDS, TOPICS
from tidemill.metastore.rows.catalogue import PipelineRow, source_of
from tidemill.metastore.rows.shards import BindingRow, ShardBatchRow, ShardRow
from tidemill.objects.store import ObjectStore
from tidemill.shards.bindings.remap import LOG_PREFIX, decode_record
from tidemill.shards.registry import read_registrations, table_of_tombstones
from tidemill.shards.state.checkpoint import (
    BindingFollower,
    ShardFollower,
    ShardGroup,
    StoredBinding,
    decode_header,
    encode_header,
)
from tidemill.shards.state.commands import Create
from tidemill.shards.state.restore import restored_shard_id
from tidemill.topics.lifecycle.checkpoint import PartitionsStage

BINDINGS_PER_GROUP = 256
BATCHES_PER_GROUP = 4096
"""Number of rows in one group of deletions of a dropped shard."""


def build_checkpointer(
    consensus: Consensus,
    objects: ObjectStore,
    metastore: Metastore,
    clock: Clock,
    *,
    holder: str,
    interval_s: float,
    tracker: StatusTracker | None = None,
) -> Checkpointer:
    """Build the checkpoint job from its stages, in their order."""
    stages = (
        PartitionsStage(consensus, objects, metastore, clock),
        BindingsStage(consensus, metastore),
        ShardsStage(consensus, metastore),
        RegistersStage(consensus, metastore),
    )
    return Checkpointer(metastore, stages, clock, holder=holder, interval_s=interval_s, tracker=tracker)


class BindingsStage:
    """Bindings of every capture and stream topic. The bindings of a deleted topic are deleted with it."""

    name = "bindings"

    def __init__(self, consensus: Consensus, metastore: Metastore) -> None:
        self._consensus = consensus
        self._metastore = metastore
        self._logs = ChangedLogs(consensus, LOG_PREFIX)
        self._followers: dict[str, BindingFollower] = {}
        self._gathered: list[str] = []
        self._gone: set[str] = set()
        self._rows: set[str] = set()
        """Sources that have rows."""
        self._unseen: set[str] = set()
        """Sources that `load` found and no round has gathered yet."""
        self._found: dict[str, list[StoredBinding]] = {}
        self.unreadable: dict[str, TidemillError] = {}

    async def load(self) -> None:
        self._followers.clear()
        self._logs.reset()
        self._rows = set()
        async for keys, _ in self._metastore.prefix(BINDINGS.prefix()):
            self._rows.update(str(BINDINGS.decode_key(key)[0]) for key in keys)
        self._unseen = set(self._rows)

    async def gather(self) -> dict[str, Unit]:
        """Return the changes by source. Raises UnavailableError."""
        sources = set(await binding_sources(self._metastore))
        due = await self._logs.next_changed(sources.__contains__)
        self._gathered = sorted(due.keys() | (self._unseen & sources))
        for source in self._gathered:
            if source not in self._followers:
                self._followers[source] = BindingFollower(
                    self._consensus, source, await self._last_stored_binding(source)
                )
        self.unreadable = {}
        gathering = {source: self._followers[source].read_new_bindings() for source in self._gathered}
        self._found = await gather_readable(gathering, self.unreadable)
        units = {
            source: await self._forgotten_rows(source) + binding_groups(source, bindings)
            for source, bindings in self._found.items()
        }
        self._gone = (self._rows | self._followers.keys()) - sources
        for source in sorted(self._gone):
            unit = units[source] = []
            async for keys, _ in self._metastore.prefix(BINDINGS.prefix(source)):
                unit.append([(key, b"") for key in keys])
        return units

    def late_things(self, before: Set[str]) -> set[str]:
        """Return the unreadable sources, and those whose new bindings cover a topic that is late."""
        late = set(self.unreadable)
        if before:
            late |= {
                source
                for source, bindings in self._found.items()
                if any(not before.isdisjoint(decode_record(binding.data).binding.offsets) for binding in bindings)
            }
        return late

    def mark_written(self, late: Set[str]) -> None:
        for source in self._gathered:
            if source not in late:
                self._followers[source].mark_committed()
                self._logs.done([source])
                self._unseen.discard(source)
                self._rows.add(source)
            elif source in self.unreadable:
                del self._followers[source]
        for source in self._gone:
            self._followers.pop(source, None)
        self._rows -= self._gone
        self._unseen -= self._gone
        self._gone = set()
        self._found = {}

    async def _forgotten_rows(self, source: str) -> Unit:
        """Return deletions of the rows whose bindings the log has forgotten. A restore skips a row that was left
        over because the run was interrupted between two of these groups."""
        before_ms = self._followers[source].forgotten_ms
        if not before_ms:
            return []
        gone: Group = []
        async for keys, _ in self._metastore.prefix(BINDINGS.prefix(source)):
            old = [(key, b"") for key in keys if BINDINGS.decode_key(key)[1] < before_ms]  # type: ignore[operator]
            gone += old
            if len(old) < len(keys):
                break
        return [gone[at : at + BATCHES_PER_GROUP] for at in range(0, len(gone), BATCHES_PER_GROUP)]

    async def _last_stored_binding(self, source: str) -> tuple[int, int] | None:
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
        self._followers: dict[str, tuple[str, ShardFollower]] = {}
        """Name → (shard id, follower). A name that was dropped and created again is another shard."""
        self._rows: dict[str, str] = {}
        """Name → id of the shard that the rows under the name belong to, or of the shard that was restored from it; ""
        if only batches are left, whose removal was interrupted."""
        self._attempt = ""
        self._gone: set[str] = set()
        self._pipelines: list[PipelineRow] = []
        self.unreadable: dict[str, TidemillError] = {}

    async def load(self) -> None:
        self._followers.clear()
        self._rows = {}
        self._attempt = await attempt_of(self._consensus)
        # Under a name that is used again, batches of a dropped shard would be read as those of the new one.
        async for keys, _ in self._metastore.prefix(SHARD_BATCHES.prefix()):
            self._rows.update((str(SHARD_BATCHES.decode_key(key)[0]), "") for key in keys)
        self._rows.update((row.name, row.shard_id) for row in await self._metastore.rows(SHARDS))

    async def gather(self) -> dict[str, Unit]:
        """Return the changes by `shard <name>`. Outputs of other shards come first, so that each then finds its
        inputs no older. Raises UnavailableError."""
        registers = dict(await read_registrations(self._consensus))
        created = {name: found for name, found in registers.items() if isinstance(found, Create)}
        self._pipelines = await self._metastore.rows(PIPELINES)
        derived = {name for row in self._pipelines for name, source in row.tables.items() if source == "derived"}
        self.unreadable = {}
        units: dict[str, Unit] = {}
        for name in sorted(created, key=lambda name: (name not in derived, name)):
            shard_id = created[name].shard_id
            known, follower = self._followers.get(name, ("", None))
            if follower is None or known != shard_id:
                follower = await self._open_follower(name, shard_id)
                self._followers[name] = shard_id, follower
            groups = (await gather_readable({shard_unit_name(name): follower.read_changes()}, self.unreadable)).get(
                shard_unit_name(name), []
            )
            before = await self._removal_rows(name) if self._rows.get(name, shard_id) != shard_id and groups else []
            units[shard_unit_name(name)] = before + [shard_group(name, follower.position, group) for group in groups]
        # A name without any register is no dropped shard: consensus is a new one, and only these rows have the shard.
        self._gone = self._rows.keys() & (registers.keys() - created.keys())
        for name in self._gone:
            units[shard_unit_name(name)] = await self._removal_rows(name)
        # The writing order is reversed: inputs before the tables derived from them.
        return dict(reversed(units.items()))

    def late_things(self, before: Set[str]) -> set[str]:
        """Return tables and dead letters whose source is late; if there are any, also everything that may be made from
        tables.

        A shard outside every pipeline may be made from anything. Tombstones are no older than their table (RFC 0013):
        they are only late if they are unreadable, and then the table is, too.
        """
        late = set(self.unreadable)
        fed: set[str] = set()
        derived: set[str] = set()
        for row in self._pipelines:
            sources = {
                shard_unit_name(table): source_of(fed_by) for table, fed_by in row.tables.items() if fed_by != "derived"
            }
            derived |= {shard_unit_name(table) for table in row.tables} - sources.keys()
            if row.dead_letters:
                derived.add(shard_unit_name(row.dead_letters))
            fed |= sources.keys()
            late |= {table for table, source in sources.items() if source in before}
        tables = {name: table_of_tombstones(name)[0] for name in self._followers}
        late |= {shard_unit_name(table) for name, table in tables.items() if table and shard_unit_name(name) in late}
        others = {shard_unit_name(name) for name in self._followers.keys() - self._gone if not tables[name]} - fed
        if late:
            return late | others
        return others - derived if before else late

    def mark_written(self, late: Set[str]) -> None:
        for name in self._gone - {name for name in self._gone if shard_unit_name(name) in late}:
            self._followers.pop(name, None)
            del self._rows[name]
        self._gone = set()
        for name, (shard_id, follower) in list(self._followers.items()):
            if shard_unit_name(name) not in late:
                follower.mark_committed()
                self._rows[name] = shard_id
            elif shard_unit_name(name) in self.unreadable:
                del self._followers[name]  # the replica is broken

    async def _removal_rows(self, name: str) -> Unit:
        """Return deletions of all rows under the name of a dropped shard. Batches go with the header, or after it."""
        rows: Group = [(SHARDS.key(name), b"")]
        async for keys, _ in self._metastore.prefix(SHARD_BATCHES.prefix(name)):
            rows += [(key, b"") for key in keys]
        return [rows[at : at + BATCHES_PER_GROUP] for at in range(0, len(rows), BATCHES_PER_GROUP)]

    async def _open_follower(self, name: str, shard_id: str) -> ShardFollower:
        row = await self._metastore.get(SHARDS, name, fresh=False)
        if row is None or shard_id not in (row.shard_id, restored_shard_id(row.shard_id, self._attempt)):
            return ShardFollower(self._consensus, shard_id)
        # A restored shard continues from the rows of the old one: only they have it until its own rows are written.
        self._rows[name] = shard_id
        batches = {
            batch.lower: (batch.upper, batch.batch)
            for batch in await self._metastore.rows(SHARD_BATCHES, name, fresh=False)
        }
        return ShardFollower(self._consensus, shard_id, decode_header(row.header), batches)


async def binding_sources(metastore: Metastore) -> list[str]:
    """Return everything that mints bindings, by name."""
    captures = [f"capture/{row.name}" for row in await metastore.rows(CAPTURES)]
    topics = [f"topic/{row.name}" for row in await metastore.rows(TOPICS, fresh=False) if row.kind == "stream"]
    return sorted(captures + topics)


def shard_unit_name(shard: str) -> str:
    return f"table {shard}"


def binding_groups(source: str, bindings: Sequence[StoredBinding]) -> Unit:
    rows = [BINDINGS.encode(BindingRow(source, b.time_ms, b.position, b.data)) for b in bindings]
    return [rows[at : at + BINDINGS_PER_GROUP] for at in range(0, len(rows), BINDINGS_PER_GROUP)]


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
