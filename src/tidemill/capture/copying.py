"""Tables copied into their topics as of one moment, each recorded once it is complete."""

from __future__ import annotations

import structlog
from msgspec.structs import replace

from tidemill.base.clock import Clock
from tidemill.base.errors import Closed, Corrupt, Invalid, TidemillError, Unavailable, Unknown
from tidemill.base.tasks import sentence
from tidemill.capture.config import CaptureConfig
from tidemill.capture.desk import Desk
from tidemill.capture.entry import columns_of, refusal_of
from tidemill.capture.snapshot import Snapshot, SnapshotProgress
from tidemill.capture.tables import TableInfo
from tidemill.capture.topic_writer import CapturedTable, TopicWriter
from tidemill.capture.wire.connection import Wire, server
from tidemill.metastore.catalogue import CapturedColumn, CaptureTableRow, TableSnapshot

log = structlog.get_logger()


async def take_snapshot(
    config: CaptureConfig,
    tables: list[TableInfo],
    captured: dict[str, CapturedTable],
    writer: TopicWriter,
    desk: Desk,
    progress: SnapshotProgress,
    clock: Clock,
) -> list[str]:
    """Copy tables into their topics as of one moment, then record each that is complete; returns their names.

    A table that cannot be copied or recorded is refused, and the others go on. Raises what is not one table's.
    """
    wire = await Wire.connect(config.dsn, purpose=f"snapshot {config.name}")
    done: dict[str, int] = {}

    async def failed(table: TableInfo, error: TidemillError) -> None:
        """Told at once: the copy of the others may take long."""
        await desk.refuse(table.name, refusal_of(error), table.oid)

    try:
        snapshot = Snapshot(wire, tables, progress)
        unread = await snapshot.begin()
        for table in tables:
            if table.name in unread:
                await failed(table, unread[table.name])
        progress.estimate = await snapshot.estimate()
        for table in snapshot.tables:
            progress.table, progress.held_by = table.name, f"postgres:{server(config.dsn)}"
            before = progress.rows
            await wire.query("SAVEPOINT one_table")
            try:
                await _copy(snapshot, table, captured[table.name], writer, progress, clock)
                done[table.name] = progress.rows - before
            except (Unavailable, Unknown, Closed, Corrupt):
                raise
            except Exception as error:  # of whatever type: it is about a row of this table
                await wire.query("ROLLBACK TO one_table")
                what = f"the table cannot be copied: table={table.name} error={sentence(error)}"
                await failed(table, Invalid(what))
        await snapshot.end()
    finally:
        await wire.aclose()
    await writer.drained()
    for table in [table for table in snapshot.tables if table.name in done]:
        target = captured[table.name]
        offsets = tuple(lane.next for lane in target.lanes)
        seen, rows = snapshot.seen, done[table.name]
        taken = TableSnapshot(seen.xmin, seen.xmax, tuple(sorted(seen.in_progress)), snapshot.lsn, rows, offsets)
        generation = desk.rows[table.name].generation
        columns = columns_of(snapshot.relations[table.oid])
        partitions = snapshot.partitions.get(table.oid)

        def copied(
            found: CaptureTableRow | None,
            taken: TableSnapshot = taken,
            generation: int = generation,
            columns: tuple[CapturedColumn, ...] = columns,
            partitions: tuple[int, ...] | None = partitions,
        ) -> CaptureTableRow | None:
            # Another session may have begun to copy it anew meanwhile: then this copy is nobody's.
            if found is None or found.generation != generation or found.state != "captured":
                return found
            return replace(found, snapshot=taken, columns=columns, partitions=partitions)

        try:
            await desk.change(table.name, copied)
        except Invalid as error:
            await failed(table, error)
            del done[table.name]
            continue
        target.snapshot = taken
    progress.finish()
    log.info("snapshot complete", capture=config.name, tables=len(done), rows=progress.rows)
    return sorted(done)


async def _copy(
    snapshot: Snapshot,
    table: TableInfo,
    target: CapturedTable,
    writer: TopicWriter,
    progress: SnapshotProgress,
    clock: Clock,
) -> None:
    """One table. Whatever fails, what the server sends of it is read to its end first."""
    failure: Exception | None = None
    source = progress.held_by
    async for rows in snapshot.rows(table):
        if failure is not None:
            continue
        progress.held_by = f"topic:{target.topic.name}"
        try:
            await writer.write_rows(target, snapshot.relations[table.oid], rows, clock.now_ms())
            progress.rows += len(rows)
            progress.held_by = source
        except Exception as error:
            failure = error
    if failure is not None:
        raise failure
