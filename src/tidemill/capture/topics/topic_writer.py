"""The sink that writes topics: one topic per captured table, exactly once across crashes.

Offsets are assigned here (record_writer.py, partition_writer.py), before anything is sent, hence the offsets at each
commit boundary are known at the commit. Records are sent in rounds (batch_sender.py).

    fragment ─► partition writers ─► rounds ─► durable position ─► consumer.flushed ─► boundaries ─► Binder

Invariant (durable boundaries): a boundary reaches the binder only when every record up to it is durable.

Invariant (bound before confirmed): the tracker learns of a boundary only after the binding that covers it: confirmed ≤
bound ≤ durable. So the newest binding determines where the count of offsets restarts after a crash, regardless of the
tails.

Invariant (batches): a batch has one boundary, at its last transaction. If a table is paused at one of its transactions,
the ones before it have a boundary of their own, with the offsets from before the first record of that transaction, and
each later one has its own.

Invariant (paused tables): a table is paused at a commit LSN. No transaction at or above it is carried, in this session
or a later one. A row that cannot be written, for any reason, pauses only its table. `on_fault` makes that durable
before the transaction is delivered, hence before it is confirmed. Records that a paused transaction has already written
stay unbound.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from msgspec.structs import replace

from tidemill.base.clock import Rand
from tidemill.base.lsn import BEFORE_ALL, ChangePosition
from tidemill.base.runtime.tasks import is_fault
from tidemill.capture.changes import LSN_NEVER, Change, Fragment, Relation
from tidemill.capture.decode.batches import last_position, transaction_parts
from tidemill.capture.decode.row_blocks import ChangePart, RowBlock, SegmentRows, parts_of
from tidemill.capture.delivery.consumers import FlushNotices
from tidemill.capture.delivery.flush_alignment import FlushAlignment
from tidemill.capture.topics.batch_sender import BatchSender, SendPace
from tidemill.capture.topics.binder import CommitBoundary
from tidemill.capture.topics.captured_table import CapturedTable, OnFault
from tidemill.capture.topics.partition_tails import open_partition
from tidemill.capture.topics.partition_writer import PartitionWriter
from tidemill.capture.topics.record_writer import RecordWriter, TransactionStamp, later_position
from tidemill.topics.api import TopicLog

RETIRE_POLL_S = 0.02


async def _raise_fault(table: CapturedTable, lsn: int, error: BaseException) -> None:
    raise error


def _stamp(xid: int, commit_lsn: int, time_ms: int) -> TransactionStamp:
    return TransactionStamp(xid, commit_lsn, time_ms, b"%d" % xid)


class _OpenBatch:
    """The transactions of a batch that are written so far: `stamp` and `end` of the last one, and the partitions that
    they touched. `is_divided`: each of the later ones has its own boundary.
    """

    def __init__(self, is_divided: bool) -> None:
        self.is_divided = is_divided
        self.stamp: TransactionStamp | None = None
        self.end = BEFORE_ALL
        self.written: ChangePosition | None = None
        self.touched: dict[PartitionWriter, int] = {}


class TopicWriter:
    """Writer of the topics of captured tables. `on_durable(boundaries)` is called, in commit order, when boundaries
    have become durable.
    """

    def __init__(
        self,
        consumer_name: str,
        tables: Iterable[CapturedTable],
        topics: TopicLog,
        rand: Rand,
        on_durable: Callable[[Sequence[CommitBoundary]], None],
        on_fault: OnFault = _raise_fault,
        pace: SendPace = SendPace(),
    ) -> None:
        self.name = consumer_name
        self.notices: FlushNotices | None = None
        self._tables = {table.oid: table for table in tables}
        self._paused_lsns = {t.topic.topic_id: t.paused_lsn for t in self._tables.values() if t.paused_lsn < LSN_NEVER}
        self._on_fault = on_fault
        self._topics = topics
        self._on_durable = on_durable
        self._consumer = FlushAlignment()
        self._boundaries: deque[CommitBoundary] = deque()
        self._batch: _OpenBatch | None = None
        """The batch that is being written."""
        self._rounds = BatchSender(
            topics,
            rand,
            lambda position: self._pass_on_boundaries(self._consumer.record_flush(position)),
            pace,
        )
        self._records = RecordWriter(self._rounds)

    # opening --------------------------------------------------------------------------------------
    async def open_tables(
        self, bound: dict[str, tuple[int, ...]], bound_lsn: int, done: Callable[[int], None] = lambda _: None
    ) -> None:
        """Read every partition's tail. `bound`: offsets and LSN of the newest binding. `done(n)`: the nth table begins.

        Raises CorruptError (a topic lost bound records), MissingError (a topic does not exist), UnavailableError.
        """
        for number, table in enumerate(self._tables.values(), 1):
            done(number)
            offsets = bound.get(table.topic.topic_id)
            if offsets is not None:
                table.bound_lsn = bound_lsn
            elif table.snapshot is not None:
                offsets = table.snapshot.offsets
            await self.open_table(table, offsets)

    async def open_table(self, table: CapturedTable, offsets: tuple[int, ...] | None) -> None:
        """Open a table that only this writer writes. `offsets`: where the count of its partitions begins; None = its
        topic is new, or that of a resumed copy, whose count begins behind the existing records.

        Raises the errors of `open_tables`, CorruptError also if a new topic has records, InvalidError if a copy cannot
        be resumed.
        """
        for writer in table.writers:
            await open_partition(self._topics, writer, offsets)

    # Sink -----------------------------------------------------------------------------------------
    async def deliver(self, fragment: Fragment, notices: FlushNotices) -> list[str]:
        """Write a fragment; see consumers.Sink. Waits for room, never for durability. Raises the error that made the
        writer fail.
        """
        self._rounds.raise_failure()
        self.notices = notices
        if fragment.batch is not None:
            written = await self._write_batch(fragment)
        else:
            stamp = _stamp(fragment.xid, fragment.commit_lsn, fragment.commit_time_ms)
            written = await self._write_parts(parts_of(fragment.changes), stamp)
            if fragment.commits:
                tags = tuple(marker.content for marker in fragment.markers)
                self._add_boundary(stamp, fragment.last, written, self._records.touched, tags)
            else:
                self._consumer.record_fragment(written, fragment.last, commits=False)
        self._rounds.schedule_round(written)
        if fragment.markers:  # a reader waits for it
            self._rounds.send_now()
        await self._rounds.wait_for_room()
        return [self.name] if fragment.commits else []

    async def _write_batch(self, fragment: Fragment) -> ChangePosition | None:
        """Write the transactions of a batch, and add their boundaries; return the position of the last change that
        still has to be sent.
        """
        written: ChangePosition | None = None
        first, last = fragment.first_lsn, fragment.commit_lsn
        open_batch = self._batch = _OpenBatch(any(first < lsn <= last for lsn in self._paused_lsns.values()))
        touched = self._records.touched
        for xid, lsn, time_ms, parts in transaction_parts(fragment):
            stamp = _stamp(xid, lsn, time_ms)
            own = await self._write_parts(parts, stamp)
            written = later_position(written, own)
            end = last_position(parts[-1]) if parts else ChangePosition(lsn, 0)
            if open_batch.is_divided:
                self._add_boundary(stamp, end, own, touched)
                continue
            open_batch.stamp, open_batch.end, open_batch.written = stamp, end, written
            open_batch.touched.update(touched)
            touched.clear()
        if not open_batch.is_divided and open_batch.stamp is not None:
            self._add_boundary(open_batch.stamp, open_batch.end, written, open_batch.touched)
        self._batch = None
        return written

    async def _write_parts(self, parts: Iterable[ChangePart], stamp: TransactionStamp) -> ChangePosition | None:
        """Write changes of one transaction. Return the position of the last unsent one."""
        written: ChangePosition | None = None
        for part in parts:
            if isinstance(part, SegmentRows):
                for block, start, end in part.segment.block_ranges(part.start, part.end):
                    written = later_position(written, await self._write_block_rows(block, start, end, part, stamp))
            else:
                written = later_position(written, await self._write_change(part, stamp))
        return written

    async def _write_change(self, change: Change, stamp: TransactionStamp) -> ChangePosition | None:
        """Write a change; return its position if it still has to be sent."""
        table = self._tables.get(change.relation.oid)
        if table is None or table.needs_no_writing(stamp.xid, stamp.commit_lsn):
            return None
        try:
            return change.position if self._records.write_change(table, change, stamp) else None
        except BaseException as error:
            if not is_fault(error):
                raise
            await self._report_fault(table, stamp.commit_lsn, error)
            return None

    async def _report_fault(self, table: CapturedTable, lsn: int, error: BaseException) -> None:
        """Pause a table at a transaction of which a row cannot be written."""
        batch = self._batch
        if batch is not None and not batch.is_divided:
            batch.is_divided = True
            if batch.stamp is not None:
                # The table's earlier transactions stay bound, and of this one nothing is.
                before = {writer: self._records.touched.get(writer, writer.next) for writer in batch.touched}
                self._queue_boundary(batch.stamp, batch.end, batch.written, before)
        await self._on_fault(table, lsn, error)

    async def _write_block_rows(
        self, block: RowBlock, start: int, end: int, rows: SegmentRows, stamp: TransactionStamp
    ) -> ChangePosition | None:
        """Write the rows [start, end) of a block; return the position of the last one that still has to be sent."""
        table = self._tables.get(block.relation.oid)
        if table is None or table.needs_no_writing(stamp.xid, stamp.commit_lsn):
            return None
        encoded = table.encode_block(block)
        if encoded is None:
            written: ChangePosition | None = None
            for place in block.places[start:end]:
                written = later_position(written, await self._write_change(rows.decode_change_at(place), stamp))
            return written
        try:
            return self._records.write_encoded_rows(table, block.relation, encoded, start, end, rows, stamp)
        except BaseException as error:
            if not is_fault(error):
                raise
            await self._report_fault(table, stamp.commit_lsn, error)
            return None

    def record_keepalive(self, lsn: int, reply_requested: bool = False) -> None:
        """Process a keepalive outside transactions: WAL up to `lsn` (inclusive) has nothing that was not delivered.

        A server that shuts down requests a reply, and waits until its last commit is confirmed.
        """
        if reply_requested:
            self._rounds.send_now()
        last = ChangePosition(lsn, 0)
        if self._boundaries and not self._boundaries[-1].commit:
            self._boundaries.pop()
        self._boundaries.append(CommitBoundary(lsn, last, commit=False))
        self._pass_on_boundaries(self._consumer.record_fragment(None, last, commits=True))

    async def retire_table(self, oid: int) -> None:
        """Write nothing more for this table, and wait until nothing of it is in flight, because its topic will be
        deleted.
        """
        table = self._tables.pop(oid, None)
        self._rounds.send_now()
        for writer in table.writers if table is not None else ():
            while not writer.is_quiet:
                self._rounds.raise_failure()
                await asyncio.sleep(RETIRE_POLL_S)

    def update_schemas(self, oid: int, schemas: tuple[tuple[int, int], ...]) -> None:
        """Note that the table has these schemas (Source): the next rows may be under the newest ones."""
        table = self._tables.get(oid)
        if table is not None and table.source is not None and schemas:
            table.source = replace(table.source, schemas=schemas)

    def pause_table(self, oid: int, lsn: int) -> None:
        """Carry no transaction of this table at or above `lsn` from now on."""
        table = self._tables.get(oid)
        if table is not None:
            table.paused_lsn = self._paused_lsns[table.topic.topic_id] = min(table.paused_lsn, lsn)

    async def aclose(self) -> None:
        """Stop sending. Batches in flight end on their own; the next writer that opens the partitions finds or rejects
        them.
        """
        await self._rounds.aclose()

    # snapshot -------------------------------------------------------------------------------------
    async def write_copied_rows(
        self, table: CapturedTable, relation: Relation, lines: Sequence[bytes], now_ms: int, lsn: int = 0
    ) -> None:
        """Write rows of the initial snapshot, which is as of `lsn`, in COPY's text format, at positions (0, offset).
        Waits for room. Raises the error of a row that cannot be read or written.
        """
        self._rounds.raise_failure()
        self._records.write_copied_rows(table, relation, lines, now_ms, lsn)
        self._rounds.schedule_round()
        await self._rounds.wait_for_room()

    async def wait_drained(self) -> None:
        """Wait until everything written is durable. Raises the error that made the writer fail."""
        await self._rounds.wait_drained()

    async def failed(self) -> None:
        """Wait for the writer's failure and raise it."""
        await self._rounds.failed()

    # state for stage statuses ---------------------------------------------------------------------
    @property
    def blocking_topic(self) -> str:
        """Stage status name of a topic that currently does not accept its records, or ""."""
        writer = next(iter(self._rounds.repairing), None)
        return f"topic:{writer.topic}" if writer is not None else ""

    @property
    def landed_bytes(self) -> int:
        return self._rounds.landed_bytes

    def facts(self) -> dict[str, object]:
        return {**self._rounds.facts(), "boundaries_waiting": len(self._boundaries)}

    # commit boundaries ----------------------------------------------------------------------------
    def _add_boundary(
        self, stamp: TransactionStamp, end: ChangePosition, written: ChangePosition | None,
        touched: dict[PartitionWriter, int], tags: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        """Add the boundary of a transaction, or of a batch that ends with it, at the present offsets of the partitions
        that it touched.
        """
        self._queue_boundary(stamp, end, written, {writer: writer.next for writer in touched}, tags)
        touched.clear()

    def _queue_boundary(
        self, stamp: TransactionStamp, end: ChangePosition, written: ChangePosition | None,
        offsets: dict[PartitionWriter, int], tags: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        lsn = stamp.commit_lsn
        bound = [
            (writer.topic_id, writer.partition, offset)
            for writer, offset in offsets.items()
            if lsn < self._paused_lsns.get(writer.topic_id, LSN_NEVER)
        ]
        self._boundaries.append(CommitBoundary(lsn, end, True, stamp.time_ms, bound, tags))
        self._pass_on_boundaries(self._consumer.record_fragment(written, end, commits=True))

    def _pass_on_boundaries(self, position: ChangePosition | None) -> None:
        """Pass on the boundaries up to the commit boundary `position`, up to which everything is durable."""
        if position is None:
            return
        done: list[CommitBoundary] = []
        while self._boundaries and self._boundaries[0].last <= position:
            done.append(self._boundaries.popleft())
        if done:
            self._on_durable(done)
