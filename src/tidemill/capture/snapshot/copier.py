"""Copy tables into their topics chunk by chunk, on several connections, and record each table that is complete.

    reader ─► next chunk of any table ─► its rows, throttled ─► partition writers   a task per connection, one snapshot
    recorder ─► chunks whose records are durable ─► the table's row                 at most once per RECORD_S
             ─► yields to a session with a side topic                               after copy_aside_after_s

Invariant (durable chunks): a chunk is recorded as done only after its records are durable, so a session that resumes
the copy after SIGKILL misses none. A chunk that was written but not yet recorded is written twice, which is harmless
because records are keyed.

Invariant (safe resumption): a copy is resumed only under the lock of the table, after its files, columns and partitions
were compared (chunks.py), and by a producer of a newer epoch (partition_writer.py).

Invariant (matching schema): the registered schemas and the session's description of the table are read without the
table's lock. So a table whose columns differ under the lock is not copied: its rows would be written under the ids of
another schema, permanently.

A long copy yields: once a chunk of it is recorded, the copier interrupts it, and the next session resumes it like any
interrupted copy, with a side topic for the changes (side_topic.py). Completed tables stay complete.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import AsyncExitStack
from math import inf

import msgspec
import structlog
from msgspec.structs import replace

from tidemill.base.clock import Clock, Rand
from tidemill.base.errors import (
    ClosedError,
    ConflictError,
    CorruptError,
    FencedError,
    InvalidError,
    TidemillError,
    UnavailableError,
)
from tidemill.base.runtime.coop import CoopBudget
from tidemill.base.runtime.tasks import Tasks, error_sentence
from tidemill.capture.catalog.schema_versions import serialize_types
from tidemill.capture.catalog.table_discovery import TableInfo
from tidemill.capture.config import CaptureConfig
from tidemill.capture.postgres.connection import PgConnection, server_address
from tidemill.capture.postgres.errors import is_transient
from tidemill.capture.snapshot.chunks import ChunkPlan, CompletedPrefix, CopyThrottle, plan_chunks
from tidemill.capture.snapshot.exported_snapshot import ExportedSnapshot
from tidemill.capture.tables.copy_progress import SnapshotProgress
from tidemill.capture.tables.table_reasons import refusal_for
from tidemill.capture.tables.table_setup import captured_columns_of, has_whole_rows
from tidemill.capture.tables.table_states import TableStates
from tidemill.capture.topics.batch_sender import SendPace
from tidemill.capture.topics.captured_table import CapturedTable
from tidemill.capture.topics.partition_writer import PartitionWriter
from tidemill.capture.topics.topic_writer import TopicWriter
from tidemill.metastore.catalogue import CaptureTableRow, TableCopy, TableSnapshot
from tidemill.topics.api import TopicLog

log = structlog.get_logger()

RECORD_S = 1.0
MIN_REMAINING_SHARE = 1 / 3
"""Share of copy_aside_after_s: a copy that needs less time than this is finished without another session."""
MAX_ROWS_PER_TURN = 2048
"""Rows encoded per turn of the event loop, which the stream of the other tables shares."""
BACKLOG_BYTES = 2 << 20
"""Limit of bytes that wait to become durable. Writes of the stream for other tables queue behind them."""


class CopyPreemptedError(UnavailableError):
    """End of a copy that the next session resumes with a side topic."""


class _TableCopyTask:
    """Copy of one table. `plan` is its state when this session began with it."""

    def __init__(self, table: TableInfo, target: CapturedTable, plan: TableCopy, *, tells: bool) -> None:
        self.info = table
        self.target = target
        self.plan = plan
        self.tells = tells
        """True if completed chunks are recorded, which requires whole rows in the stream (chunks.py)."""
        self.chunks = ChunkPlan(plan.step_blocks, plan.count)
        self.durable = CompletedPrefix(plan.done, plan.rows)
        self.failed = False
        self._written: deque[tuple[int, int, list[tuple[PartitionWriter, int]]]] = deque()

    def record_written_chunk(self, number: int, rows: int) -> None:
        """Note the next offsets of the partitions after the last row of a chunk was written."""
        self._written.append((number, rows, [(writer, writer.next) for writer in self.target.writers]))

    def collect_durable_chunks(self) -> None:
        """Move written chunks whose records are durable to `durable`. Records of a partition land in order, so chunks
        become durable in the order in which they were completed.
        """
        while self._written and all(writer.expected_high_watermark >= end for writer, end in self._written[0][2]):
            number, rows, _ = self._written.popleft()
            self.durable.add(number, rows)

    @property
    def can_be_resumed(self) -> bool:
        """Return whether a later session finds, in each partition, the record that opens its epoch
        (partition_writer.py). Until then no chunk is recorded, because chunks may have no rows, and partitions no keys.
        """
        return all(writer.expected_high_watermark > 0 for writer in self.target.writers)

    def current_state(self, lsn: int) -> TableCopy:
        """Return the state of the copy, with chunks that were read in a snapshot at `lsn`."""
        settled_lsn = max(self.plan.settled_lsn, lsn) if self.durable.done > self.plan.done else self.plan.settled_lsn
        return replace(self.plan, done=self.durable.done, rows=self.durable.rows, settled_lsn=settled_lsn)


class CopyContext(msgspec.Struct, frozen=True):
    """Parts that all copies of a capture use."""

    config: CaptureConfig
    topics: TopicLog
    states: TableStates
    clock: Clock
    rand: Rand


async def copy_tables(
    context: CopyContext,
    tables: list[TableInfo],
    captured: dict[str, CapturedTable],
    progress: SnapshotProgress,
    *,
    gives_way: bool = False,
) -> list[str]:
    """Copy tables into their topics as of one moment, record each complete one, and return their names. An interrupted
    copy is resumed with a target of that copy's epoch. `gives_way`: a long copy yields to a session with a side topic.

    A table that cannot be copied or recorded is refused, and the others continue. Raises errors that do not belong to
    one table.
    """
    writer = TopicWriter(
        f"{context.config.mark}/copy", captured.values(), context.topics, context.rand, lambda boundaries: None,
        pace=SendPace(backlog_bytes=BACKLOG_BYTES),
    )  # fmt: skip
    async with AsyncExitStack() as opened:
        opened.push_async_callback(writer.aclose)
        copied = []
        for number, table in enumerate(tables, 1):
            progress.steps.begin_table_step("opening topics", number, len(tables))
            try:
                await writer.open_table(captured[table.name], None)
                copied.append(table)
            except (InvalidError, CorruptError) as error:
                await context.states.refuse_table(table.name, refusal_for(error), table.oid)
        copy = SnapshotCopy(context, captured, writer, progress, gives_way=gives_way)
        return await copy.run(copied, opened) if copied else []


class SnapshotCopy:
    """Copy of several tables in one snapshot."""

    def __init__(
        self,
        context: CopyContext,
        captured: dict[str, CapturedTable],
        writer: TopicWriter,
        progress: SnapshotProgress,
        *,
        gives_way: bool = False,
    ) -> None:
        self._config = config = context.config
        self._clock = clock = context.clock
        self._states = context.states
        self._gives_way_s = clock.monotonic_s() + config.copy_aside_after_s if gives_way else inf
        self._captured = captured
        self._writer = writer
        self._progress = progress
        self._pace = CoopBudget(clock)
        self._throttle = CopyThrottle(config.copy_rows_per_s, MAX_ROWS_PER_TURN, clock)
        self._tables: list[_TableCopyTask] = []
        self._source = f"postgres:{server_address(config.dsn)}"

    async def run(self, tables: list[TableInfo], opened: AsyncExitStack) -> list[str]:
        """Copy the tables; see `copy_tables`. `opened` closes the connections."""
        wire = await self._connect(opened)
        snapshot = ExportedSnapshot(wire, tables, self._progress)
        unread = await snapshot.open_snapshot()
        for table in tables:
            if table.name in unread:
                await self._refuse(table, unread[table.name])
        for number, table in enumerate(snapshot.tables, 1):
            self._progress.steps.begin_table_step("planning copies", number, len(snapshot.tables))
            planned = await self._plan_table(snapshot, table)
            if planned is not None:
                self._tables.append(planned)
                self._progress.add_table(planned.plan.rows, planned.plan.count, planned.plan.done)
        self._progress.estimate = await snapshot.estimate_rows()
        self._progress.steps.end()
        await self._read_all(snapshot, wire, opened)
        await snapshot.end()
        await self._writer.wait_drained()
        done = []
        for number, copied in enumerate(self._tables, 1):
            self._progress.steps.begin_table_step("recording copies", number, len(self._tables))
            if await self._record_complete(snapshot, copied):
                done.append(copied.info.name)
        self._progress.steps.end()
        self._progress.finish()
        log.info("snapshot complete", capture=self._config.name, tables=len(done), rows=self._progress.rows)
        return sorted(done)

    async def _connect(self, opened: AsyncExitStack) -> PgConnection:
        wire = await PgConnection.connect(self._config.dsn, purpose="snapshot", capture=self._config.name)
        opened.push_async_callback(wire.aclose)
        return wire

    async def _refuse(self, table: TableInfo, error: TidemillError) -> None:
        """Refuse a table immediately, because the copy of the others may take long."""
        await self._states.refuse_table(table.name, refusal_for(error), table.oid, going_on=is_transient(error))

    # plans ----------------------------------------------------------------------------------------
    async def _plan_table(self, snapshot: ExportedSnapshot, table: TableInfo) -> _TableCopyTask | None:
        """Plan the copy of a table, new or resumed. Returns None, after refusing the table, if it no longer matches
        what was copied or described before. It then starts over.
        """
        target = self._captured[table.name]
        found = snapshot.attributes[table.oid]
        row = self._states.rows[table.name]
        tells = has_whole_rows(self._config, table)
        as_begun = captured_columns_of(snapshot.relations[table.oid]) == row.columns
        if row.copy is None:
            if not as_begun:
                why = f"the table was altered right before its copy: table={table.name}."
                await self._refuse(table, InvalidError(why, fix="It is retried automatically."))
                return None
            chunks = plan_chunks(*await snapshot.count_blocks(table), self._config.copy_chunk_blocks)
            seen = snapshot.seen
            plan = TableCopy(
                seen.xmin, seen.xmax, tuple(sorted(seen.in_progress)), snapshot.lsn, 0, target.topic.topic_id,
                chunks.step_blocks, chunks.count, 0, 0, found.copy_fingerprint, found.count,
            )  # fmt: skip
            return _TableCopyTask(table, target, plan, tells=tells)
        plan = row.copy
        same = as_begun and (found.copy_fingerprint, found.count) == (plan.storage, plan.attributes)
        if not same or not tells or await snapshot.has_partition_attached_since(table, plan.xmin):
            why = f"the table was altered or rewritten while its copy was interrupted: table={table.name}."
            await self._refuse(table, InvalidError(why, fix="Its copy starts over automatically."))
            return None
        log.info("a copy is resumed", capture=self._config.name, table=table.name, chunks=plan.count, done=plan.done)
        return _TableCopyTask(table, target, plan, tells=tells)

    # reading --------------------------------------------------------------------------------------
    async def _read_all(self, snapshot: ExportedSnapshot, wire: PgConnection, opened: AsyncExitStack) -> None:
        chunks = sum(table.plan.count - table.plan.done for table in self._tables)
        wires = [wire]
        if (more := min(self._config.copy_connections, chunks) - 1) > 0:
            exported = await snapshot.export()
            for _ in range(more):
                another = await self._open_another_connection(snapshot, exported, opened)
                if another is None:
                    break
                wires.append(another)
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def fail(_: str, error: BaseException) -> None:
            if not ended.done():
                ended.set_exception(error)

        work, left = self._chunks_to_copy(), len(wires)

        async def read(wire: PgConnection) -> None:
            nonlocal left
            for table, number in work:
                await self._copy_chunk(snapshot, wire, table, number)
            left -= 1
            if not left and not ended.done():
                ended.set_result(None)

        async with Tasks(fail) as tasks:
            for each in wires:
                tasks.spawn(read(each), name="capture copy")
            tasks.spawn(self._record_chunks(snapshot), name="capture copy recorder")
            await ended
        for each in wires[1:]:  # no transaction stays open while the last records become durable
            await each.query("COMMIT")

    async def _open_another_connection(
        self, snapshot: ExportedSnapshot, exported: str, opened: AsyncExitStack
    ) -> PgConnection | None:
        """Open another connection that reads the same snapshot. None = the server has no free connection, and the
        others read all chunks.
        """
        try:
            wire = await self._connect(opened)
            await snapshot.join(wire, exported)
        except UnavailableError as error:
            log.warning("a copy has fewer connections than wanted", capture=self._config.name, cause=str(error))
            return None
        return wire

    def _chunks_to_copy(self) -> Iterator[tuple[_TableCopyTask, int]]:
        """Yield each chunk exactly once, whichever connection asks."""
        for table in self._tables:
            for number in range(table.plan.done, table.plan.count):
                if table.failed:
                    break
                yield table, number

    async def _copy_chunk(
        self, snapshot: ExportedSnapshot, wire: PgConnection, table: _TableCopyTask, number: int
    ) -> None:
        """Copy one chunk. After an error the rest of the server's output is read to its end first."""
        self._progress.table, self._progress.held_by = table.info.name, self._source
        relation = snapshot.relations[table.info.oid]
        failure: Exception | None = None
        rows = 0
        await wire.query("SAVEPOINT one_chunk")
        try:
            async for lines in snapshot.rows(wire, table.info, table.chunks.sql_condition(number)):
                if failure is not None or table.failed:
                    continue
                try:
                    for part in self._throttle.parts(lines):
                        await self._throttle.wait_turn(len(part))
                        if self._pace.is_used_up:
                            await self._pace.wait_for_turn()
                        self._progress.held_by = f"topic:{table.target.topic.name}"
                        now_ms = self._clock.now_ms()
                        await self._writer.write_copied_rows(table.target, relation, part, now_ms, table.plan.lsn)
                        rows += len(part)
                        self._progress.rows += len(part)
                        self._progress.held_by = self._source
                except Exception as error:
                    failure = error
            if failure is not None:
                raise failure
            await wire.query("RELEASE one_chunk")
            table.record_written_chunk(number, rows)
            self._progress.chunks_done += 1
        except (CorruptError, ConflictError, FencedError):
            raise
        except Exception as error:  # of any type: the cause is a row of this table
            if is_transient(error):
                raise
            await wire.query("ROLLBACK TO one_chunk")
            if not table.failed:
                table.failed = True
                what = f"the table cannot be copied: table={table.info.name} error={error_sentence(error)}"
                await self._refuse(table.info, InvalidError(what))

    # recording ------------------------------------------------------------------------------------
    async def _record_chunks(self, snapshot: ExportedSnapshot) -> None:
        """Record completed chunks until cancelled. Raises TableStateUnknownError, ClosedError if another session has
        the copy, and CopyPreemptedError.
        """
        while True:
            await asyncio.sleep(RECORD_S)
            for table in [table for table in self._tables if table.tells and not table.failed]:
                table.collect_durable_chunks()
                row = self._states.rows[table.info.name]
                reported = row.copy.done if row.copy is not None else 0
                if reported < table.durable.done < table.plan.count and table.can_be_resumed:
                    await self._record_progress(table, table.current_state(snapshot.lsn))
            if self._clock.monotonic_s() >= self._gives_way_s:
                await self._yield_to_side_topic(snapshot)

    async def _yield_to_side_topic(self, snapshot: ExportedSnapshot) -> None:
        """Yield to a session with a side topic. Raises CopyPreemptedError, once there is a table whose copy can be
        resumed.
        """
        rows = self._states.rows
        waits = [
            table.info.name
            for table in self._tables
            if not table.failed and (row := rows[table.info.name]).copy is not None and row.side_topic is None
        ]
        left_s = self._progress.left_s
        if not waits or (left_s is not None and left_s < MIN_REMAINING_SHARE * self._config.copy_aside_after_s):
            return
        for table in self._tables:
            table.collect_durable_chunks()
            if not table.failed and table.durable.done == table.plan.count:
                await self._record_complete(snapshot, table)
        raise CopyPreemptedError(f"changes of tables that are being copied go to side topics: table={','.join(waits)}.")

    async def _record_progress(self, table: _TableCopyTask, now: TableCopy) -> None:
        generation = self._states.rows[table.info.name].generation

        def with_progress(found: CaptureTableRow | None) -> CaptureTableRow | None:
            return (
                replace(found, copy=now) if found is not None and _is_same_copy(found, generation, now.epoch) else found
            )

        row = await self._states.update_row(table.info.name, with_progress)
        if row is None or row.copy != now:
            raise ClosedError(f"another session copies the table: table={table.info.name}.")

    async def _record_complete(self, snapshot: ExportedSnapshot, table: _TableCopyTask) -> bool:
        """Record that the table is completely in its topic. Returns False if it is refused or taken over."""
        if table.failed:
            return False
        table.collect_durable_chunks()
        name, oid, plan, now = table.info.name, table.info.oid, table.plan, table.current_state(snapshot.lsn)
        assert now.done == plan.count, (now, plan)
        taken = TableSnapshot(
            plan.xmin, plan.xmax, plan.xip, plan.lsn, now.rows, tuple(writer.next for writer in table.target.writers),
            now.settled_lsn if now.settled_lsn > plan.lsn else 0,
        )  # fmt: skip
        generation, ends = self._states.rows[name].generation, taken.offsets
        found_as = snapshot.attributes[oid]
        columns, attached = captured_columns_of(snapshot.relations[oid], found_as), snapshot.partitions.get(oid)

        def with_snapshot(found: CaptureTableRow | None) -> CaptureTableRow | None:
            # Another session may have started the copy over in the meantime; then this one is obsolete.
            if found is None or not _is_same_copy(found, generation, plan.epoch):
                return found
            found = replace(
                found, columns=columns, partitions=None if attached is None else tuple(attached),
                attached=tuple((attached or {}).values()), evolved=(), attributes=found_as.count,
                storage=found_as.storage, types=serialize_types(found_as),
            )  # fmt: skip
            if found.side_topic is not None:  # the changes in it come first (side_topic.py)
                return replace(found, copy=now, side_topic=replace(found.side_topic, ends=ends))
            return replace(found, snapshot=taken, copy=None, state="captured", reason="", fix="", since_ms=0)

        try:
            row = await self._states.update_row(name, with_snapshot)
        except InvalidError as error:
            await self._refuse(table.info, error)
            return False
        return row is not None and (
            row.snapshot == taken or (row.side_topic is not None and row.side_topic.ends == ends)
        )


def _is_same_copy(found: CaptureTableRow, generation: int, epoch: int) -> bool:
    held = found.copy.epoch if found.copy is not None else 0
    return found.generation == generation and found.state == "captured" and held == epoch and found.snapshot is None
