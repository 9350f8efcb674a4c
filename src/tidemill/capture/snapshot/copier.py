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
from tidemill.base.runtime.tasks import Tasks, sentence
from tidemill.capture.catalog.schema_versions import types_as
from tidemill.capture.catalog.table_discovery import TableInfo
from tidemill.capture.config import CaptureConfig
from tidemill.capture.postgres.connection import Wire, server
from tidemill.capture.postgres.errors import may_pass
from tidemill.capture.snapshot.chunks import Chunks, Prefix, cut
from tidemill.capture.snapshot.exported_snapshot import Snapshot
from tidemill.capture.snapshot.throttle import Throttle
from tidemill.capture.tables.copy_progress import SnapshotProgress
from tidemill.capture.tables.table_setup import columns_of, refusal_of, says_whole_rows
from tidemill.capture.tables.table_states import TableStates
from tidemill.capture.topics.partition_writer import PartitionWriter
from tidemill.capture.topics.topic_writer import CapturedTable, TopicWriter
from tidemill.metastore.catalogue import CaptureTableRow, TableCopy, TableSnapshot
from tidemill.topics.api import TopicLog

log = structlog.get_logger()

RECORD_S = 1.0
LEAST_LEFT_SHARE = 1 / 3
"""Share of copy_aside_after_s: a copy that needs less time than this is finished without another session."""
MOST_ROWS = 2048
"""Rows encoded per turn of the event loop, which the stream of the other tables shares."""
BACKLOG_BYTES = 2 << 20
"""Limit of bytes that wait to become durable. Writes of the stream for other tables queue behind them."""


class CopyPreemptedError(UnavailableError):
    """End of a copy that the next session resumes with a side topic."""


class _Table:
    """Copy of one table. `plan` is its state when this session began with it."""

    def __init__(self, table: TableInfo, target: CapturedTable, plan: TableCopy, *, tells: bool) -> None:
        self.info = table
        self.target = target
        self.plan = plan
        self.tells = tells
        """True if completed chunks are recorded, which requires whole rows in the stream (chunks.py)."""
        self.chunks = Chunks(plan.step_blocks, plan.count)
        self.durable = Prefix(plan.done, plan.rows)
        self.failed = False
        self._written: deque[tuple[int, int, list[tuple[PartitionWriter, int]]]] = deque()

    def wrote(self, number: int, rows: int) -> None:
        """Note the next offsets of the partitions after the last row of a chunk was written."""
        self._written.append((number, rows, [(lane, lane.next) for lane in self.target.lanes]))

    def settle(self) -> None:
        """Move written chunks whose records are durable to `durable`. Records of a partition land in order, so chunks
        become durable in the order in which they were completed.
        """
        while self._written and all(lane.expected >= end for lane, end in self._written[0][2]):
            number, rows, _ = self._written.popleft()
            self.durable.add(number, rows)

    @property
    def reopens(self) -> bool:
        """Return whether a later session finds, in each partition, the record that opens its epoch
        (partition_writer.py). Until then no chunk is recorded, because chunks may have no rows, and partitions no keys.
        """
        return all(lane.expected > 0 for lane in self.target.lanes)

    def now(self, lsn: int) -> TableCopy:
        """Return the state of the copy, with chunks that were read in a snapshot at `lsn`."""
        settled_lsn = max(self.plan.settled_lsn, lsn) if self.durable.done > self.plan.done else self.plan.settled_lsn
        return replace(self.plan, done=self.durable.done, rows=self.durable.rows, settled_lsn=settled_lsn)


async def take_snapshot(
    config: CaptureConfig,
    tables: list[TableInfo],
    captured: dict[str, CapturedTable],
    topics: TopicLog,
    desk: TableStates,
    progress: SnapshotProgress,
    clock: Clock,
    rand: Rand,
    *,
    gives_way: bool = False,
) -> list[str]:
    """Copy tables into their topics as of one moment, record each complete one, and return their names. An interrupted
    copy is resumed with a target of that copy's epoch. `gives_way`: a long copy yields to a session with a side topic.

    A table that cannot be copied or recorded is refused, and the others continue. Raises errors that do not belong to
    one table.
    """
    writer = TopicWriter(
        f"{config.mark}/copy", captured.values(), topics, rand, lambda boundaries: None, backlog_bytes=BACKLOG_BYTES
    )
    async with AsyncExitStack() as opened:
        opened.push_async_callback(writer.aclose)
        copied = []
        for number, table in enumerate(tables, 1):
            progress.steps.step("opening topics", number, len(tables))
            try:
                await writer.open_table(captured[table.name], None)
                copied.append(table)
            except (InvalidError, CorruptError) as error:
                await desk.refuse(table.name, refusal_of(error), table.oid)
        copy = Copy(config, captured, writer, desk, progress, clock, gives_way=gives_way)
        return await copy.run(copied, opened) if copied else []


class Copy:
    """Copy of several tables in one snapshot."""

    def __init__(
        self,
        config: CaptureConfig,
        captured: dict[str, CapturedTable],
        writer: TopicWriter,
        desk: TableStates,
        progress: SnapshotProgress,
        clock: Clock,
        *,
        gives_way: bool = False,
    ) -> None:
        self._config = config
        self._gives_way_s = clock.monotonic_s() + config.copy_aside_after_s if gives_way else inf
        self._captured = captured
        self._writer = writer
        self._desk = desk
        self._progress = progress
        self._clock = clock
        self._pace = CoopBudget(clock)
        self._throttle = Throttle(config.copy_rows_per_s, MOST_ROWS, clock)
        self._tables: list[_Table] = []
        self._source = f"postgres:{server(config.dsn)}"

    async def run(self, tables: list[TableInfo], opened: AsyncExitStack) -> list[str]:
        """Copy the tables; see `take_snapshot`. `opened` closes the connections."""
        wire = await self._connect(opened)
        snapshot = Snapshot(wire, tables, self._progress)
        unread = await snapshot.begin()
        for table in tables:
            if table.name in unread:
                await self._refuse(table, unread[table.name])
        for number, table in enumerate(snapshot.tables, 1):
            self._progress.steps.step("planning copies", number, len(snapshot.tables))
            planned = await self._planned(snapshot, table)
            if planned is not None:
                self._tables.append(planned)
                self._progress.expect(planned.plan.rows, planned.plan.count, planned.plan.done)
        self._progress.estimate = await snapshot.estimate()
        self._progress.steps.end()
        await self._read_all(snapshot, wire, opened)
        await snapshot.end()
        await self._writer.drained()
        done = []
        for number, copied in enumerate(self._tables, 1):
            self._progress.steps.step("recording copies", number, len(self._tables))
            if await self._complete(snapshot, copied):
                done.append(copied.info.name)
        self._progress.steps.end()
        self._progress.finish()
        log.info("snapshot complete", capture=self._config.name, tables=len(done), rows=self._progress.rows)
        return sorted(done)

    async def _connect(self, opened: AsyncExitStack) -> Wire:
        wire = await Wire.connect(self._config.dsn, purpose="snapshot", capture=self._config.name)
        opened.push_async_callback(wire.aclose)
        return wire

    async def _refuse(self, table: TableInfo, error: TidemillError) -> None:
        """Refuse a table immediately, because the copy of the others may take long."""
        await self._desk.refuse(table.name, refusal_of(error), table.oid, going_on=may_pass(error))

    # plans ----------------------------------------------------------------------------------------
    async def _planned(self, snapshot: Snapshot, table: TableInfo) -> _Table | None:
        """Plan the copy of a table, new or resumed. Returns None, after refusing the table, if it no longer matches
        what was copied or described before. It then starts over.
        """
        target = self._captured[table.name]
        found = snapshot.attributes[table.oid]
        row = self._desk.rows[table.name]
        tells = says_whole_rows(self._config, table)
        as_begun = columns_of(snapshot.relations[table.oid]) == row.columns
        if row.copy is None:
            if not as_begun:
                why = f"the table was altered right before its copy: table={table.name}."
                await self._refuse(table, InvalidError(why, fix="It is retried automatically."))
                return None
            chunks = cut(*await snapshot.blocks(table), self._config.copy_chunk_blocks)
            seen = snapshot.seen
            plan = TableCopy(
                seen.xmin, seen.xmax, tuple(sorted(seen.in_progress)), snapshot.lsn, 0, target.topic.topic_id,
                chunks.step_blocks, chunks.count, 0, 0, found.copied_as, found.count,
            )  # fmt: skip
            return _Table(table, target, plan, tells=tells)
        plan = row.copy
        same = as_begun and (found.copied_as, found.count) == (plan.storage, plan.attributes)
        if not same or not tells or await snapshot.divided_since(table, plan.xmin):
            why = f"the table was altered or rewritten while its copy was interrupted: table={table.name}."
            await self._refuse(table, InvalidError(why, fix="Its copy starts over automatically."))
            return None
        log.info("a copy is resumed", capture=self._config.name, table=table.name, chunks=plan.count, done=plan.done)
        return _Table(table, target, plan, tells=tells)

    # reading --------------------------------------------------------------------------------------
    async def _read_all(self, snapshot: Snapshot, wire: Wire, opened: AsyncExitStack) -> None:
        chunks = sum(table.plan.count - table.plan.done for table in self._tables)
        wires = [wire]
        if (more := min(self._config.copy_connections, chunks) - 1) > 0:
            exported = await snapshot.export()
            for _ in range(more):
                another = await self._another(snapshot, exported, opened)
                if another is None:
                    break
                wires.append(another)
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def fail(_: str, error: BaseException) -> None:
            if not ended.done():
                ended.set_exception(error)

        work, left = self._work(), len(wires)

        async def read(wire: Wire) -> None:
            nonlocal left
            for table, number in work:
                await self._chunk(snapshot, wire, table, number)
            left -= 1
            if not left and not ended.done():
                ended.set_result(None)

        async with Tasks(fail) as tasks:
            for each in wires:
                tasks.spawn(read(each), name="capture copy")
            tasks.spawn(self._record(snapshot), name="capture copy recorder")
            await ended
        for each in wires[1:]:  # no transaction stays open while the last records become durable
            await each.query("COMMIT")

    async def _another(self, snapshot: Snapshot, exported: str, opened: AsyncExitStack) -> Wire | None:
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

    def _work(self) -> Iterator[tuple[_Table, int]]:
        """Yield each chunk exactly once, whichever connection asks."""
        for table in self._tables:
            for number in range(table.plan.done, table.plan.count):
                if table.failed:
                    break
                yield table, number

    async def _chunk(self, snapshot: Snapshot, wire: Wire, table: _Table, number: int) -> None:
        """Copy one chunk. After an error the rest of the server's output is read to its end first."""
        self._progress.table, self._progress.held_by = table.info.name, self._source
        relation = snapshot.relations[table.info.oid]
        failure: Exception | None = None
        rows = 0
        await wire.query("SAVEPOINT one_chunk")
        try:
            async for lines in snapshot.rows(wire, table.info, table.chunks.condition(number)):
                if failure is not None or table.failed:
                    continue
                try:
                    for part in self._throttle.parts(lines):
                        await self._throttle.turn(len(part))
                        if self._pace.due:
                            await self._pace.rest()
                        self._progress.held_by = f"topic:{table.target.topic.name}"
                        now_ms = self._clock.now_ms()
                        await self._writer.write_rows(table.target, relation, part, now_ms, table.plan.lsn)
                        rows += len(part)
                        self._progress.rows += len(part)
                        self._progress.held_by = self._source
                except Exception as error:
                    failure = error
            if failure is not None:
                raise failure
            await wire.query("RELEASE one_chunk")
            table.wrote(number, rows)
            self._progress.chunks_done += 1
        except (CorruptError, ConflictError, FencedError):
            raise
        except Exception as error:  # of any type: the cause is a row of this table
            if may_pass(error):
                raise
            await wire.query("ROLLBACK TO one_chunk")
            if not table.failed:
                table.failed = True
                what = f"the table cannot be copied: table={table.info.name} error={sentence(error)}"
                await self._refuse(table.info, InvalidError(what))

    # recording ------------------------------------------------------------------------------------
    async def _record(self, snapshot: Snapshot) -> None:
        """Record completed chunks until cancelled. Raises TableStateUnknownError, ClosedError if another session has
        the copy, and CopyPreemptedError.
        """
        while True:
            await asyncio.sleep(RECORD_S)
            for table in [table for table in self._tables if table.tells and not table.failed]:
                table.settle()
                row = self._desk.rows[table.info.name]
                told = row.copy.done if row.copy is not None else 0
                if told < table.durable.done < table.plan.count and table.reopens:
                    await self._tell(table, table.now(snapshot.lsn))
            if self._clock.monotonic_s() >= self._gives_way_s:
                await self._give_way(snapshot)

    async def _give_way(self, snapshot: Snapshot) -> None:
        """Yield to a session with a side topic. Raises CopyPreemptedError, once there is a table whose copy can be
        resumed.
        """
        rows = self._desk.rows
        waits = [
            table.info.name
            for table in self._tables
            if not table.failed and (row := rows[table.info.name]).copy is not None and row.aside is None
        ]
        left_s = self._progress.left_s
        if not waits or (left_s is not None and left_s < LEAST_LEFT_SHARE * self._config.copy_aside_after_s):
            return
        for table in self._tables:
            table.settle()
            if not table.failed and table.durable.done == table.plan.count:
                await self._complete(snapshot, table)
        raise CopyPreemptedError(f"changes of tables that are being copied go to side topics: table={','.join(waits)}.")

    async def _tell(self, table: _Table, now: TableCopy) -> None:
        generation = self._desk.rows[table.info.name].generation

        def told(found: CaptureTableRow | None) -> CaptureTableRow | None:
            return replace(found, copy=now) if found is not None and _is_ours(found, generation, now.epoch) else found

        row = await self._desk.change(table.info.name, told)
        if row is None or row.copy != now:
            raise ClosedError(f"another session copies the table: table={table.info.name}.")

    async def _complete(self, snapshot: Snapshot, table: _Table) -> bool:
        """Record that the table is completely in its topic. Returns False if it is refused or taken over."""
        if table.failed:
            return False
        table.settle()
        name, oid, plan, now = table.info.name, table.info.oid, table.plan, table.now(snapshot.lsn)
        assert now.done == plan.count, (now, plan)
        taken = TableSnapshot(
            plan.xmin, plan.xmax, plan.xip, plan.lsn, now.rows, tuple(lane.next for lane in table.target.lanes),
            now.settled_lsn if now.settled_lsn > plan.lsn else 0,
        )  # fmt: skip
        generation, ends = self._desk.rows[name].generation, taken.offsets
        found_as = snapshot.attributes[oid]
        columns, attached = columns_of(snapshot.relations[oid], found_as), snapshot.partitions.get(oid)

        def copied(found: CaptureTableRow | None) -> CaptureTableRow | None:
            # Another session may have started the copy over in the meantime; then this one is obsolete.
            if found is None or not _is_ours(found, generation, plan.epoch):
                return found
            found = replace(
                found, columns=columns, partitions=None if attached is None else tuple(attached),
                attached=tuple((attached or {}).values()), evolved=(), attributes=found_as.count,
                storage=found_as.storage, types=types_as(found_as),
            )  # fmt: skip
            if found.aside is not None:  # the changes in it come first (side_topic.py)
                return replace(found, copy=now, aside=replace(found.aside, ends=ends))
            return replace(found, snapshot=taken, copy=None, reason="")

        try:
            row = await self._desk.change(name, copied)
        except InvalidError as error:
            await self._refuse(table.info, error)
            return False
        return row is not None and (row.snapshot == taken or (row.aside is not None and row.aside.ends == ends))


def _is_ours(found: CaptureTableRow, generation: int, epoch: int) -> bool:
    held = found.copy.epoch if found.copy is not None else 0
    return found.generation == generation and found.state == "captured" and held == epoch and found.snapshot is None
