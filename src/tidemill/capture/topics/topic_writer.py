"""The sink that writes topics: one topic per captured table, exactly once across crashes.

    key      JSON object of the primary key's columns; null for truncate
    value    JSON object of all columns but the unchanged ones; null for delete and truncate
    headers  tm.pos = <commit_lsn>_<ordinal>, tm.op, tm.xid          timestamp = commit time, ms
             tm.version of the table's description, from its second one on (schema_versions.py)
             tm.unchanged = JSON array of the columns that the value lacks, for an update whose old row is not in the
             stream: TOASTed values that it did not change. A consumer that stores the rows has them in the old row
             tm.was = the key that the row had before, for such an update that changed it

    change              records
    insert, update      upsert
    key-changing update tombstone of the old key @n, upsert @n+1
    delete              tombstone
      … of a key that another row already has (deferrable_keys.py): an upsert of that row in place of the tombstone
    truncate            one record, key and value null, tm.op=truncate, in every partition: all keys are deleted

If the table's envelope is Debezium's, values are events (debezium_json.py, in Avro debezium_avro.py) instead of rows:

    insert, update      c, u                               @n
    key-changing update d and a tombstone of the old key @n, c of the new key @n+1; each names the other key
    delete              d and a tombstone                  @n
      … of a key that another row already has: d and, in place of the tombstone, u of that row, which changes nothing
        in it
    truncate            t, without a key, in every partition

Rows that a fragment carries as ranges are encoded by columns (columnar_encoder.py, batch_builder.py), with the same
bytes. If that is not possible, they are decoded and written one by one, which decides which row cannot be written.

Offsets are assigned here, before anything is sent (partition_writer.py), hence the offsets at each commit boundary are
known at the commit. Records are sent in rounds (batch_sender.py).

    fragment ─► partition writers ─► rounds ─► durable position ─► consumer.flushed ─► boundaries ─► Binder

Invariant (durable boundaries): a boundary reaches the binder only when every record up to it is durable.

Invariant (bound before confirmed): the tracker learns of a boundary only after the binding that covers it: confirmed ≤
bound ≤ durable. So the newest binding determines where the count of offsets restarts after a crash, regardless of the
tails.

Invariant (paused tables): a table is paused at a commit LSN. No transaction at or above it is carried, in this session
or a later one. A row that cannot be written, for any reason, pauses only its table. `on_fault` makes that durable
before the transaction is delivered, hence before it is confirmed. Records that a paused transaction has already written
stay unbound.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import structlog
from msgspec.structs import replace

from tidemill.base.clock import Rand
from tidemill.base.errors import InvalidError
from tidemill.base.lsn import ChangePosition
from tidemill.base.runtime.tasks import is_fault
from tidemill.capture.changes import LSN_NEVER, Change, Fragment, Relation
from tidemill.capture.decode.copy_text import decode_block, decode_rows
from tidemill.capture.decode.row_blocks import RowBlock, SegmentRows, parts_of
from tidemill.capture.decode.transaction_builder import is_key_changed
from tidemill.capture.delivery.consumers import FlushNotices
from tidemill.capture.delivery.flush_alignment import FlushAlignment
from tidemill.capture.encode.columnar_encoder import (
    EncodedBlock,
)
from tidemill.capture.encode.debezium_avro import AvroEncoder
from tidemill.capture.encode.debezium_json import (
    NEW_KEY_HEADER,
    OLD_KEY_HEADER,
    OPS,
    SNAPSHOT_OP,
    EventEncoder,
)
from tidemill.capture.topics import captured_table
from tidemill.capture.topics.batch_builder import UNCHANGED_HEADER, WAS_HEADER, RangeOrigin, RowRange, build_headers
from tidemill.capture.topics.batch_sender import BACKLOG_BYTES, BatchSender
from tidemill.capture.topics.binder import CommitBoundary
from tidemill.capture.topics.captured_table import CapturedTable, OnFault
from tidemill.capture.topics.partition_tails import open_partition
from tidemill.capture.topics.partition_writer import PartitionWriter
from tidemill.topics.api import TopicLog
from tidemill.topics.batch import Record
from tidemill.topics.batch.records import Headers

log = structlog.get_logger()

RETIRE_POLL_S = 0.02


class _Stamp(NamedTuple):
    """Transaction of a record, or the time of a copy."""

    xid: bytes
    time_ms: int


async def _raise_fault(table: CapturedTable, lsn: int, error: BaseException) -> None:
    raise error


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
        *,
        backlog_bytes: int = BACKLOG_BYTES,
    ) -> None:
        self.name = consumer_name
        self.notices: FlushNotices | None = None
        self._tables = {table.oid: table for table in tables}
        self._parked = {t.topic.topic_id: t.parked_lsn for t in self._tables.values() if t.parked_lsn < LSN_NEVER}
        self._on_fault = on_fault
        self._topics = topics
        self._on_durable = on_durable
        self._consumer = FlushAlignment()
        self._boundaries: deque[CommitBoundary] = deque()
        self._rounds = BatchSender(
            topics,
            rand,
            lambda position: self._pass_on_boundaries(self._consumer.record_flush(position)),
            backlog_bytes,
        )
        self._touched: dict[PartitionWriter, None] = {}
        self._version = 1
        """Version of the description under which the current change is written."""

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
        for lane in table.lanes:
            await open_partition(self._topics, lane, offsets)

    # Sink -----------------------------------------------------------------------------------------
    async def deliver(self, fragment: Fragment, notices: FlushNotices) -> list[str]:
        """Write a fragment; see consumers.Sink. Waits for room, never for durability. Raises the error that made the
        writer fail.
        """
        self._rounds.raise_failure()
        self.notices = notices
        written: ChangePosition | None = None
        for part in parts_of(fragment.changes):
            if isinstance(part, SegmentRows):
                for block, start, end in part.segment.block_ranges(part.start, part.end):
                    written = later_position(written, await self._write_block_rows(block, start, end, part, fragment))
            else:
                written = later_position(written, await self._write_change(part, fragment))
        if fragment.commits:
            self._add_boundary(fragment, written)
        else:
            self._consumer.record_fragment(written, fragment.last, commits=False)
        self._rounds.schedule_round(written)
        await self._rounds.wait_for_room()
        return [self.name] if fragment.commits else []

    async def _write_change(self, change: Change, fragment: Fragment) -> ChangePosition | None:
        """Write a change; return its position if it still has to be sent."""
        table = self._tables.get(change.relation.oid)
        if table is None or table.needs_no_writing(fragment):
            return None
        try:
            return change.position if self._write_row_change(table, change, fragment) else None
        except BaseException as error:
            if not is_fault(error):
                raise
            await self._on_fault(table, fragment.commit_lsn, error)
            return None

    async def _write_block_rows(
        self, block: RowBlock, start: int, end: int, rows: SegmentRows, fragment: Fragment
    ) -> ChangePosition | None:
        """Write the rows [start, end) of a block; return the position of the last one that still has to be sent."""
        table = self._tables.get(block.relation.oid)
        if table is None or table.needs_no_writing(fragment):
            return None
        encoded = table.encode_block(block)
        if encoded is None:
            written: ChangePosition | None = None
            for place in block.places[start:end]:
                written = later_position(written, await self._write_change(rows.decode_change_at(place), fragment))
            return written
        try:
            return self._write_encoded_rows(table, block.relation, encoded, start, end, rows, fragment)
        except BaseException as error:
            if not is_fault(error):
                raise
            await self._on_fault(table, fragment.commit_lsn, error)
            return None

    def record_keepalive(self, lsn: int) -> None:
        """Process a keepalive outside transactions: WAL up to `lsn` (inclusive) has nothing that was not delivered."""
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
        for lane in table.lanes if table is not None else ():
            while not lane.is_quiet:
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
            table.parked_lsn = self._parked[table.topic.topic_id] = min(table.parked_lsn, lsn)

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
        block = decode_block(relation, lines) if table.source is None else None
        encoded = table.encode_block(block) if block is not None else None
        if encoded is not None:
            self._write_block(table, encoded, now_ms)
        else:
            self._write_rows_one_by_one(table, relation, lines, now_ms, lsn)
        self._rounds.schedule_round()
        await self._rounds.wait_for_room()

    def _write_block(self, table: CapturedTable, encoded: EncodedBlock, now_ms: int) -> None:
        for lane, own in zip(table.lanes, encoded.lanes, strict=True):
            if own.rows:
                own.places = np.arange(lane.next, lane.next + len(own.rows))
                taken = RowRange(own, 0, len(own.rows), RangeOrigin(0, 0, 0, now_ms), step=1)
                lane.assign_offsets(taken)
                self._rounds.add_rows(lane, taken)

    def _write_rows_one_by_one(
        self, table: CapturedTable, relation: Relation, lines: Sequence[bytes], now_ms: int, lsn: int
    ) -> None:
        events, encoder = table.event_encoder(relation), table.row_encoder(relation)
        tail = events.encode_tail(lsn, None, now_ms) if events is not None else None
        self._version = relation.version
        # Everything that can raise comes before the first offset is assigned: see _write.
        made = [
            (encoder.key(row), encoder.value(row))
            if events is None
            else (events.key(row), events.encode_head(None, row))
            for row in decode_rows(relation, lines)
        ]
        for key, value in made:
            self._check_size(table, key, value)
        for key, value in made:
            lane = table.partition_of(key)
            position = ChangePosition(0, lane.next)
            lane.assign_offset(position)
            whole = value if tail is None else value + tail.encode(position.ordinal, SNAPSHOT_OP)
            self._queue_record(lane, key, whole, position, b"insert", _Stamp(b"0", now_ms))

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
        lane = next(iter(self._rounds.repairing), None)
        return f"topic:{lane.topic}" if lane is not None else ""

    @property
    def landed_bytes(self) -> int:
        return self._rounds.landed_bytes

    def facts(self) -> dict[str, object]:
        return {**self._rounds.facts(), "boundaries_waiting": len(self._boundaries)}

    # writing --------------------------------------------------------------------------------------
    def _write_row_change(self, table: CapturedTable, change: Change, fragment: Fragment) -> bool:
        """Assign offsets to the change's records; return True if at least one still has to be sent.

        Everything that can raise comes before the first offset is assigned, because an offset without its record would
        be a gap.
        """
        events = table.event_encoder(change.relation)
        if events is not None:
            return self._write_event(table, events, change, fragment)
        encoder = table.row_encoder(change.relation)
        self._version = change.relation.version
        stamp = _Stamp(b"%d" % fragment.xid, fragment.commit_time_ms)
        if change.op == "truncate":
            fresh = [self._queue_if_new(lane, None, None, change.position, b"truncate", stamp) for lane in table.lanes]
            return any(fresh)
        stays = encoder.value(change.stays) if change.stays is not None else None
        left_op = b"delete" if stays is None else b"update"
        if change.op == "delete":
            assert change.old is not None
            key = encoder.key(change.old)
            self._check_size(table, key, stays or b"")
            return self._queue_if_new(table.partition_of(key), key, stays, change.position, left_op, stamp)
        assert change.new is not None
        key, value = encoder.key(change.new), encoder.value(change.new, change.unchanged)
        self._check_size(table, key, max(value, stays or b"", key=len))
        position, fresh_tombstone = change.position, False
        more = _unchanged_headers(change)
        # −0 and 0 are one key.
        old_key = encoder.key(change.old) if change.old is not None and is_key_changed(change) else key
        if old_key != key:
            more = (*more, (WAS_HEADER, old_key)) if more else ()
            fresh_tombstone = self._queue_if_new(table.partition_of(old_key), old_key, stays, position, left_op, stamp)
            position = ChangePosition(position.commit_lsn, position.ordinal + 1)
        lane = table.partition_of(key)
        return self._queue_if_new(lane, key, value, position, change.op.encode(), stamp, more) or fresh_tombstone

    def _write_event(
        self, table: CapturedTable, events: EventEncoder | AvroEncoder, change: Change, fragment: Fragment
    ) -> bool:
        """Write the change in Debezium's envelope; otherwise like `_write_row_change`."""
        self._version = change.relation.version
        at, stamp = change.position, _Stamp(b"%d" % fragment.xid, fragment.commit_time_ms)
        tail = events.encode_tail(at.commit_lsn, fragment.xid, fragment.commit_time_ms)
        old, new = change.old, change.new
        if change.op == "truncate":
            value = events.encode_head(None, None) + tail.encode(at.ordinal, OPS["truncate"])
            fresh = [self._queue_if_new(lane, None, value, at, b"truncate", stamp) for lane in table.lanes]
            return any(fresh)
        old_key = events.key(old) if old is not None and (new is None or is_key_changed(change)) else None
        gone = events.encode_head(old, None) + tail.encode(at.ordinal, OPS["delete"]) if old_key is not None else b""
        stays = None
        if change.stays is not None:
            stays = events.encode_head(change.stays, change.stays) + tail.encode(at.ordinal, OPS["update"])
        key = value = b""
        after = ChangePosition(at.commit_lsn, at.ordinal + 1) if old_key is not None else at
        if new is not None:
            op = OPS["insert"] if old_key is not None else OPS[change.op]
            key = events.key(new)
            value = events.encode_head(old if op == OPS["update"] else None, new) + tail.encode(after.ordinal, op)
        self._check_size(table, max(key, old_key or b"", key=len), max(value, gone, stays or b"", key=len))
        fresh = []
        if old_key is not None:
            lane, moved = table.partition_of(old_key), ((NEW_KEY_HEADER, key),) if new is not None else ()
            fresh.append(self._queue_if_new(lane, old_key, gone, at, b"delete", stamp, moved))
            left_op = b"delete" if stays is None else b"update"
            fresh.append(self._queue_if_new(lane, old_key, stays, at, left_op, stamp))
        if new is not None:
            moved = ((OLD_KEY_HEADER, old_key),) if old_key is not None else ()
            fresh.append(
                self._queue_if_new(table.partition_of(key), key, value, after, change.op.encode(), stamp, moved)
            )
        return any(fresh)

    def _write_encoded_rows(
        self, table: CapturedTable, relation: Relation, encoded: EncodedBlock, start: int, end: int, rows: SegmentRows,
        fragment: Fragment,
    ) -> ChangePosition | None:  # fmt: skip
        """Assign offsets to the rows' records, and queue those that still have to be sent. Return the position of the
        last.
        """
        written: ChangePosition | None = None
        xid, at_ms = fragment.xid, fragment.commit_time_ms
        origin = RangeOrigin(rows.commit_lsn, rows.shift, xid, at_ms)
        events = table.event_encoder(relation)
        tail = events.encode_tail(rows.commit_lsn, xid, at_ms) if events is not None else None
        for number, own, first, last in encoded.partition_ranges(start, end):
            lane = table.lanes[number]
            self._touched[lane] = None
            taken = RowRange(own, first, last, origin, tail)
            fresh = lane.assign_offsets(taken)
            if fresh < last:
                self._rounds.add_rows(lane, taken.subrange(fresh, last))
                written = later_position(written, taken.position(last - 1))
        return written

    @staticmethod
    def _check_size(table: CapturedTable, key: bytes, value: bytes) -> None:
        if len(key) + len(value) > captured_table.MAX_ROW_BYTES:
            of_avro = table.source is not None and table.source.schemas
            said = key[:200].hex() if of_avro else key[:200].decode(errors="replace")
            raise InvalidError(
                f"a row is too large for a record: table={table.name} key={said} bytes={len(key) + len(value)}"
                f" limit={captured_table.MAX_ROW_BYTES}.",
                fix="Shorten it, then re-snapshot the table.",
            )

    def _queue_if_new(
        self, lane: PartitionWriter, key: bytes | None, value: bytes | None, at: ChangePosition, op: bytes,
        stamp: _Stamp, more: Headers = (),
    ) -> bool:  # fmt: skip
        self._touched[lane] = None
        if not lane.assign_offset(at):
            return False
        self._queue_record(lane, key, value, at, op, stamp, more)
        return True

    def _queue_record(
        self, lane: PartitionWriter, key: bytes | None, value: bytes | None, at: ChangePosition, op: bytes,
        stamp: _Stamp, more: Headers = (),
    ) -> None:  # fmt: skip
        headers = (*build_headers(at, op, stamp.xid, self._version), *more)
        self._rounds.add(lane, Record(key, value, headers, stamp.time_ms))

    def _add_boundary(self, fragment: Fragment, written: ChangePosition | None) -> None:
        offsets = [
            (lane.topic_id, lane.partition, lane.next)
            for lane in self._touched
            if fragment.commit_lsn < self._parked.get(lane.topic_id, LSN_NEVER)
        ]
        self._touched.clear()
        tags = tuple(marker.content for marker in fragment.markers)
        self._boundaries.append(
            CommitBoundary(fragment.commit_lsn, fragment.last, True, fragment.commit_time_ms, offsets, tags)
        )
        self._pass_on_boundaries(self._consumer.record_fragment(written, fragment.last, commits=True))

    def _pass_on_boundaries(self, position: ChangePosition | None) -> None:
        """Pass on the boundaries up to the commit boundary `position`, up to which everything is durable."""
        if position is None:
            return
        done: list[CommitBoundary] = []
        while self._boundaries and self._boundaries[0].last <= position:
            done.append(self._boundaries.popleft())
        if done:
            self._on_durable(done)


def _unchanged_headers(change: Change) -> Headers:
    return ((UNCHANGED_HEADER, msgspec.json.encode(change.unchanged)),) if change.unchanged else ()


def later_position(one: ChangePosition | None, other: ChangePosition | None) -> ChangePosition | None:
    return one if other is None else other if one is None else max(one, other)
