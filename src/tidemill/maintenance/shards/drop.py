"""Deletion of a shard: its name becomes free, nothing of it is read or written again, and its storage is released.

    1  the shard's own log      Drop: every handle on it, in any process, is refused from here on; its holds are gone
    2  its register             the name is free; a writer that opens it with a schema creates a new shard, with upper 0
    3  its log                  one rollup of an empty shard stays (some hundred bytes)
    4  its tombstones           the shards next to it (RFC 0013), in the same way, and those of interrupted drops
    later, by maintenance       rows of the checkpoint (`checkpoint/stages`), objects and bindings that only it used
                                (`upkeep`): only when no restore can need them any more; registers of streaming
                                queries that wrote it (`orphans`)

A pipeline that writes the shard creates it again from its source: the topic from its log start on; a captured table's
topic begins with the table's snapshot. An interrupted run is run again, and every step finds what was done. A shard of
the same name that was created in the meantime is left alone.
"""

from __future__ import annotations

import msgspec

from tidemill.base.clock import Clock, Rand
from tidemill.base.errors import CorruptError, MissingError
from tidemill.consensus.api import Consensus
from tidemill.metastore.catalogue import Catalogue, PipelineRow, TopicRow
from tidemill.metastore.metastore import Metastore
from tidemill.metastore.rows import PIPELINES
from tidemill.objects.store import ObjectStore
from tidemill.shards import registry
from tidemill.shards.registry import read_registration
from tidemill.shards.state.commands import Create, Drop
from tidemill.topics.api import PartitionReader


class DroppedShard(msgspec.Struct, frozen=True):
    """Result of a drop. `size_bytes` is the size of its parts, which will be deleted. `pipelines` are those that
    will create it again."""

    name: str
    shard_id: str
    rows: int
    size_bytes: int
    pipelines: tuple[str, ...] = ()


async def writing_pipelines(metastore: Metastore, name: str) -> tuple[str, ...]:
    """Return the pipelines that write the shard, by name."""
    rows = await metastore.rows(PIPELINES)
    table = registry.table_of_tombstones(name)[0] or name
    return tuple(sorted(row.name for row in rows if table in row.tables or name == row.dead_letters))


async def reading_derived_tables(metastore: Metastore, name: str) -> tuple[str, ...]:
    """Return the derived tables that read the shard, by name."""
    rows = await metastore.rows(PIPELINES)
    return tuple(sorted({table for row in rows for table, inputs in row.derived.items() if name in inputs}))


async def expired_records(catalogue: Catalogue, reader: PartitionReader, name: str) -> dict[str, int | None]:
    """Return the topics of the shard that no longer have all records: topic → how many offsets are below its log
    starts; None if the topic is gone or its log cannot be read. Raises UnavailableError."""
    rows = await catalogue.list(PipelineRow)
    sources = {row.tables[name] for row in rows if name in row.tables}
    found: dict[str, int | None] = {}
    for topic in sorted(source.removeprefix("topic:") for source in sources if source.startswith("topic:")):
        row = await catalogue.get(TopicRow, topic)
        try:
            if row is None:
                found[topic] = None
            elif expired := sum([await reader.log_start(row.topic_id, each) for each in range(row.partitions)]):
                found[topic] = expired
        except CorruptError:
            found[topic] = None
    return found


async def drop_shard(
    consensus: Consensus,
    objects: ObjectStore,
    metastore: Metastore,
    clock: Clock,
    rand: Rand,
    name: str,
    *,
    shard_id: str = "",
) -> DroppedShard:
    """Drop the shard `name`. With `shard_id` drop only the shard of that id, so that an interrupted run can be
    repeated.

    Raises MissingError (no such shard), UnavailableError, UnknownOutcomeError (call again with the shard id).
    """
    found = await read_registration(consensus, name)
    if found is None or (isinstance(found[0], Drop) and shard_id in ("", found[0].shard_id)):
        raise MissingError(f"no such table: table={name}.", fix="See `tidemill table list`.")
    created = found[0]
    if not isinstance(created, Create) or shard_id not in ("", created.shard_id):
        raise MissingError(f"the table was already dropped: table={name} id={shard_id}.")
    held = await registry.drop_shard(consensus, objects, clock, rand, created)
    found_tombstones = await registry.list_tombstones(consensus, name)
    # Read after the listing: a table that was created again in the meantime has its own tombstones.
    now = await read_registration(consensus, name)
    kept = now[0].shard_id if now is not None and isinstance(now[0], Create) else ""
    for tombstones in found_tombstones:
        if registry.table_of_tombstones(tombstones.name)[1] != kept:
            await registry.drop_shard(consensus, objects, clock, rand, tombstones)
    return DroppedShard(name, created.shard_id, held.rows, held.size_bytes, await writing_pipelines(metastore, name))
