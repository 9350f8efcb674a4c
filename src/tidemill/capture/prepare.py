"""From a locked, checked database to something that can stream: publication, slot, topics, catalogue row, snapshot.

Every step is idempotent, and the catalogue row is written before what it no longer vouches for is touched:

    row without the snapshots of tables that start over  →  their topics deleted and created anew  →  copied
    →  row with their snapshots

so a process that dies anywhere in between starts those tables over cleanly (generation + 1), and no binding was
minted for their new topics.

A row that a restore wrote is compared with the slot first: changes that the old cluster had confirmed, and the
restored bindings do not cover, are gone from the slot, and every table starts over.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import msgspec
import structlog
from msgspec.structs import replace

from tidemill.base.clock import Clock
from tidemill.base.errors import Conflict, Invalid, Missing
from tidemill.capture.changes import Relation
from tidemill.capture.config import CaptureConfig
from tidemill.capture.setup import (
    ServerFacts,
    SlotState,
    check_slot,
    create_slot,
    drop_slot,
    publish,
    published_tables,
    slot_state,
)
from tidemill.capture.snapshot import Snapshot, SnapshotProgress
from tidemill.capture.tables import TableInfo, describe, list_tables, resolve
from tidemill.capture.topic_writer import CapturedTable, TopicWriter
from tidemill.capture.wire.connection import Wire, identifier
from tidemill.metastore.catalogue import (
    CapturedColumn,
    CaptureRow,
    Catalogue,
    TableSnapshot,
    TopicRow,
    check_topic_name,
)
from tidemill.shards.front import Binding

log = structlog.get_logger()

PRODUCER_ID_BASE = 1 << 62
"""Producer ids of captures: far above those handed to Kafka producers, one per capture name, for ever."""


class Prepared(msgspec.Struct, frozen=True):
    """`fresh`: tables whose snapshot has still to be taken."""

    row: CaptureRow
    slot: SlotState
    tables: tuple[TableInfo, ...]
    captured: tuple[CapturedTable, ...]
    fresh: tuple[str, ...]
    relations: dict[int, Relation]


def producer_id(config: CaptureConfig) -> int:
    return PRODUCER_ID_BASE | zlib.crc32(config.name.encode())


async def prepare(
    wire: Wire, config: CaptureConfig, facts: ServerFacts, catalogue: Catalogue, latest: Binding | None
) -> Prepared:
    """The caller holds the capture's lock. `latest`: the newest binding.

    Raises Invalid (tables, rights), SlotLost, SqlError, Unavailable.
    """
    tables = resolve(config.tables, await list_tables(wire))
    for table in tables:
        await _check_topic(config, table, catalogue)
    row = await catalogue.get(CaptureRow, config.name)
    if row is not None and row.system_id != facts.system_id:
        raise Invalid(
            f"this capture belongs to another database cluster: capture={config.name}"
            f" recorded={row.system_id} found={facts.system_id}.",
            fix="Correct the DSN, or start the capture over.",
        )
    if row is not None and row.restored:
        row = await _compared(wire, config, row, latest)
    names = {table.name for table in tables}
    if row is not None and not set(row.snapshots) <= names:
        # Before the publication drops them: a table that comes back must start over.
        row = replace(row, snapshots={n: s for n, s in row.snapshots.items() if n in names})
        await catalogue.put(row)
    if await published_tables(wire, config.publication) is None and row is not None and row.snapshots:
        # Decoding would fail for ever at WAL from before a new publication: slot and tables start over with it.
        log.warning("the publication is gone, all tables start over", capture=config.name)
        row = replace(row, snapshots={})
        await catalogue.put(row)
    newly = await publish(wire, config, tables)
    known = row.snapshots if row is not None else {}
    fresh = tuple(t.name for t in tables if t.name not in known or t.name in newly)
    if len(fresh) == len(tables):
        slot = await create_slot(wire, config)
    else:
        slot = check_slot(config, await slot_state(wire, config.slot))
    relations = await describe(wire, [table.oid for table in tables])
    row = await _record(config, facts, catalogue, row, tables, fresh, relations)
    topics = await _topics(config, catalogue, row, fresh)
    captured = []
    for table in tables:
        item = CapturedTable(table.name, topics[table.name], producer_id(config))
        item.snapshot = row.snapshots.get(table.name)
        captured.append(item)
    return Prepared(row, slot, tuple(tables), tuple(captured), fresh, relations)


async def take_snapshot(
    config: CaptureConfig,
    prepared: Prepared,
    writer: TopicWriter,
    catalogue: Catalogue,
    progress: SnapshotProgress,
    clock: Clock,
) -> CaptureRow:
    """Copy the fresh tables into their topics, then record that they are complete."""
    tables = [table for table in prepared.tables if table.name in prepared.fresh]
    captured = {table.name: table for table in prepared.captured}
    wire = await Wire.connect(config.dsn, purpose=f"snapshot {config.name}")
    try:
        snapshot = Snapshot(wire, tables)
        point = await snapshot.begin()
        progress.estimate = await snapshot.estimate()
        counts: dict[str, int] = {}
        for table in tables:
            progress.table = table.name
            target = captured[table.name]
            before = progress.rows
            async for rows in snapshot.rows(table):
                await writer.write_rows(target, snapshot.relations[table.oid], rows, clock.now_ms())
                progress.rows += len(rows)
            counts[table.name] = progress.rows - before
        await snapshot.end()
    finally:
        await wire.aclose()
    await writer.drained()
    done = {}
    columns = {}
    for table in tables:
        target = captured[table.name]
        described = snapshot.relations[table.oid].columns
        columns[table.name] = tuple(CapturedColumn(c.name, c.type_name, c.key_index) for c in described)
        offsets = tuple(lane.next for lane in target.lanes)
        target.snapshot = TableSnapshot(point.xmin, point.xmax, point.xip, point.lsn, counts[table.name], offsets)
        done[table.name] = target.snapshot
    row = replace(
        prepared.row,
        snapshots={**prepared.row.snapshots, **done},
        columns={**prepared.row.columns, **columns},
        snapshot_done=True,
        snapshot_lsn=point.lsn,
    )
    await catalogue.put(row)
    progress.finish()
    log.info("snapshot complete", capture=config.name, tables=len(tables), rows=progress.rows)
    return row


async def forget(config: CaptureConfig, catalogue: Catalogue) -> None:
    """Start over from nothing: drop slot and publication, delete the capture's topics and row. Bindings stay: time
    goes on. Raises LockHeld while somebody captures."""
    wire = await Wire.connect(config.dsn, purpose=f"forget {config.name}")
    try:
        await drop_slot(wire, config.slot)
        await wire.query(f"DROP PUBLICATION IF EXISTS {identifier(config.publication)}")
    finally:
        await wire.aclose()
    row = await catalogue.get(CaptureRow, config.name)
    if row is None:
        return
    for topic in row.topics.values():
        await _delete_topic(catalogue, topic)
    await catalogue.delete(CaptureRow, config.name)


async def _compared(wire: Wire, config: CaptureConfig, row: CaptureRow, latest: Binding | None) -> CaptureRow:
    """The row of a restored capture, as it may go on. Not stored here: what follows writes it before it acts on it.

    A slot is confirmed up to what some binding covered (topic_writer W2), so one that is further than the newest
    restored binding has let go of changes that were in the lost part of the topics.
    """
    slot = await slot_state(wire, config.slot)
    bound = latest.lsn if latest is not None else -1
    if slot is not None and slot.confirmed_lsn - 1 <= bound:
        return replace(row, restored=False)
    log.warning(
        "the slot is ahead of what was restored, all tables start over",
        capture=config.name,
        slot=slot.confirmed_lsn if slot is not None else None,
        bound=bound,
    )
    return replace(row, restored=False, snapshots={})


async def _check_topic(config: CaptureConfig, table: TableInfo, catalogue: Catalogue) -> None:
    """Before anything is made: the table's topic can have its name, and no Kafka producer owns it."""
    name = config.topic_of(table.schema, table.table)
    try:
        check_topic_name(name)
    except Invalid as error:
        raise Invalid(
            f"a table's name cannot be a topic's: table={table.name}.",
            fix=f'Rename it to a-z A-Z 0-9 . _ - only, or exclude it with "!{table.name}".',
        ) from error

    topic = await catalogue.get(TopicRow, name)
    if topic is not None and topic.kind != "capture":
        raise Invalid(
            f"a topic of this name belongs to Kafka producers: topic={name}.", fix="Delete it, or rename the capture."
        )


async def _record(
    config: CaptureConfig,
    facts: ServerFacts,
    catalogue: Catalogue,
    row: CaptureRow | None,
    tables: Sequence[TableInfo],
    fresh: Sequence[str],
    relations: dict[int, Relation],
) -> CaptureRow:
    """The row before anything fresh is touched. Written only when it differs."""
    topics = {table.name: config.topic_of(table.schema, table.table) for table in tables}
    known = row.columns if row is not None else {}
    columns = _columns(relations, [t for t in tables if t.name in fresh or t.name not in known])
    if row is None:
        wanted = CaptureRow(
            config.name, facts.system_id, config.slot, config.publication, 1, False, topics, columns=columns
        )
    else:
        wanted = replace(
            row,
            generation=row.generation + 1 if fresh else row.generation,
            snapshot_done=not fresh,
            topics={**row.topics, **topics},
            columns={**row.columns, **columns},
            snapshots={name: s for name, s in row.snapshots.items() if name not in fresh},
        )
    if wanted != row:
        await catalogue.put(wanted)
    return wanted


def _columns(relations: dict[int, Relation], tables: Sequence[TableInfo]) -> dict[str, tuple[CapturedColumn, ...]]:
    return {
        table.name: tuple(CapturedColumn(c.name, c.type_name, c.key_index) for c in relations[table.oid].columns)
        for table in tables
        if table.oid in relations
    }


async def _topics(
    config: CaptureConfig, catalogue: Catalogue, row: CaptureRow, fresh: Sequence[str]
) -> dict[str, TopicRow]:
    """The topic of each table; those of fresh tables are new (a new id: nothing of an earlier attempt is in them)."""
    found: dict[str, TopicRow] = {}
    for table, name in row.topics.items():
        if table in fresh:
            await _delete_topic(catalogue, name)
            try:
                found[table] = await catalogue.create_topic(name, config.partitions, kind="capture")
            except Conflict as conflict:
                raise Invalid(
                    f"the topic of a captured table is taken: topic={name}.", fix="Delete it, or rename the capture."
                ) from conflict
        elif table in row.snapshots:
            topic = await catalogue.get(TopicRow, name)
            if topic is None:
                raise Missing(
                    f"the topic of a captured table is gone: topic={name} table={table}.",
                    fix="Start the capture over.",
                )
            found[table] = topic
    return found


async def _delete_topic(catalogue: Catalogue, name: str) -> None:
    if await catalogue.get(TopicRow, name) is not None:
        await catalogue.delete(TopicRow, name)
