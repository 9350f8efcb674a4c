"""Write the changes and copied rows of captured tables as records: encode them, assign offsets, and queue every
record that is not sent yet. Synchronous.

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

Invariant (no gap): everything that can raise comes before the first offset of a change is assigned, because an offset
without its record would be a gap.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from tidemill.base.lsn import ChangePosition
from tidemill.capture.changes import Change, Relation
from tidemill.capture.decode.copy_text import decode_block, decode_rows
from tidemill.capture.decode.row_blocks import SegmentRows
from tidemill.capture.decode.transaction_builder import is_key_changed
from tidemill.capture.encode.columnar_encoder import EncodedBlock
from tidemill.capture.encode.debezium_avro import AvroEncoder
from tidemill.capture.encode.debezium_json import NEW_KEY_HEADER, OLD_KEY_HEADER, OPS, SNAPSHOT_OP, EventEncoder
from tidemill.capture.topics.batch_builder import UNCHANGED_HEADER, WAS_HEADER, RangeOrigin, RowRange, build_headers
from tidemill.capture.topics.batch_sender import BatchSender
from tidemill.capture.topics.captured_table import CapturedTable
from tidemill.capture.topics.partition_writer import PartitionWriter
from tidemill.topics.batch import Record
from tidemill.topics.batch.records import Headers


class TransactionStamp(NamedTuple):
    """Transaction of a record, or the time of a copy."""

    xid: int
    commit_lsn: int
    time_ms: int
    xid_text: bytes


class RecordWriter:
    """Writer of records to the partitions of captured tables, which `rounds` sends."""

    def __init__(self, rounds: BatchSender) -> None:
        self._rounds = rounds
        self.touched: dict[PartitionWriter, int] = {}
        """Partitions that have records of the open transaction, and the offset of the first of them."""
        self._version = 1
        """Version of the description under which the current change is written."""

    # snapshot -------------------------------------------------------------------------------------
    def write_copied_rows(
        self, table: CapturedTable, relation: Relation, lines: Sequence[bytes], now_ms: int, lsn: int
    ) -> None:
        """Write rows of the initial snapshot; see TopicWriter.write_copied_rows."""
        block = decode_block(relation, lines) if table.source is None else None
        encoded = table.encode_block(block) if block is not None else None
        if encoded is not None:
            self._write_block(table, encoded, now_ms)
        else:
            self._write_rows_one_by_one(table, relation, lines, now_ms, lsn)

    def _write_block(self, table: CapturedTable, encoded: EncodedBlock, now_ms: int) -> None:
        for writer, own in zip(table.writers, encoded.partitions, strict=True):
            if own.rows:
                own.places = np.arange(writer.next, writer.next + len(own.rows))
                taken = RowRange(own, 0, len(own.rows), RangeOrigin(0, 0, 0, now_ms), step=1)
                writer.assign_offsets(taken)
                self._rounds.add_rows(writer, taken)

    def _write_rows_one_by_one(
        self, table: CapturedTable, relation: Relation, lines: Sequence[bytes], now_ms: int, lsn: int
    ) -> None:
        events, encoder = table.event_encoder(relation), table.row_encoder(relation)
        tail = events.encode_tail(lsn, None, now_ms) if events is not None else None
        self._version = relation.version
        made = [
            (encoder.key(row), encoder.value(row))
            if events is None
            else (events.key(row), events.encode_head(None, row))
            for row in decode_rows(relation, lines)
        ]
        for key, value in made:
            table.check_size(key, value)
        for key, value in made:
            writer = table.partition_of(key)
            position = ChangePosition(0, writer.next)
            writer.assign_offset(position)
            whole = value if tail is None else value + tail.encode(position.ordinal, SNAPSHOT_OP)
            self._queue_record(writer, key, whole, position, b"insert", TransactionStamp(0, 0, now_ms, b"0"))

    # stream -----------------------------------------------------------------------------------------
    def write_change(self, table: CapturedTable, change: Change, stamp: TransactionStamp) -> bool:
        """Assign offsets to the change's records; return True if at least one still has to be sent."""
        events = table.event_encoder(change.relation)
        if events is not None:
            return self._write_event(table, events, change, stamp)
        encoder = table.row_encoder(change.relation)
        self._version = change.relation.version
        if change.op == "truncate":
            fresh = [
                self._queue_if_new(writer, None, None, change.position, b"truncate", stamp) for writer in table.writers
            ]
            return any(fresh)
        stays = encoder.value(change.stays) if change.stays is not None else None
        left_op = b"delete" if stays is None else b"update"
        if change.op == "delete":
            assert change.old is not None
            key = encoder.key(change.old)
            table.check_size(key, stays or b"")
            return self._queue_if_new(table.partition_of(key), key, stays, change.position, left_op, stamp)
        assert change.new is not None
        key, value = encoder.key(change.new), encoder.value(change.new, change.unchanged)
        table.check_size(key, max(value, stays or b"", key=len))
        position, fresh_tombstone = change.position, False
        more = _unchanged_headers(change)
        # −0 and 0 are one key.
        old_key = encoder.key(change.old) if change.old is not None and is_key_changed(change) else key
        if old_key != key:
            more = (*more, (WAS_HEADER, old_key)) if more else ()
            fresh_tombstone = self._queue_if_new(table.partition_of(old_key), old_key, stays, position, left_op, stamp)
            position = ChangePosition(position.commit_lsn, position.ordinal + 1)
        writer = table.partition_of(key)
        return self._queue_if_new(writer, key, value, position, change.op.encode(), stamp, more) or fresh_tombstone

    def _write_event(
        self, table: CapturedTable, events: EventEncoder | AvroEncoder, change: Change, stamp: TransactionStamp
    ) -> bool:
        """Write the change in Debezium's envelope; otherwise like `write_change`."""
        self._version = change.relation.version
        at = change.position
        tail = events.encode_tail(at.commit_lsn, stamp.xid, stamp.time_ms)
        old, new = change.old, change.new
        if change.op == "truncate":
            value = events.encode_head(None, None) + tail.encode(at.ordinal, OPS["truncate"])
            fresh = [self._queue_if_new(writer, None, value, at, b"truncate", stamp) for writer in table.writers]
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
        table.check_size(max(key, old_key or b"", key=len), max(value, gone, stays or b"", key=len))
        fresh = []
        if old_key is not None:
            writer, moved = table.partition_of(old_key), ((NEW_KEY_HEADER, key),) if new is not None else ()
            fresh.append(self._queue_if_new(writer, old_key, gone, at, b"delete", stamp, moved))
            left_op = b"delete" if stays is None else b"update"
            fresh.append(self._queue_if_new(writer, old_key, stays, at, left_op, stamp))
        if new is not None:
            moved = ((OLD_KEY_HEADER, old_key),) if old_key is not None else ()
            fresh.append(
                self._queue_if_new(table.partition_of(key), key, value, after, change.op.encode(), stamp, moved)
            )
        return any(fresh)

    def write_encoded_rows(
        self, table: CapturedTable, relation: Relation, encoded: EncodedBlock, start: int, end: int, rows: SegmentRows,
        stamp: TransactionStamp,
    ) -> ChangePosition | None:  # fmt: skip
        """Assign offsets to the rows' records, and queue the unsent ones. Return the position of the
        last.
        """
        written: ChangePosition | None = None
        xid, at_ms = stamp.xid, stamp.time_ms
        origin = RangeOrigin(rows.commit_lsn, rows.shift, xid, at_ms)
        events = table.event_encoder(relation)
        tail = events.encode_tail(rows.commit_lsn, xid, at_ms) if events is not None else None
        for number, own, first, last in encoded.partition_ranges(start, end):
            writer = table.writers[number]
            self.touched.setdefault(writer, writer.next)
            taken = RowRange(own, first, last, origin, tail)
            fresh = writer.assign_offsets(taken)
            if fresh < last:
                self._rounds.add_rows(writer, taken.subrange(fresh, last))
                written = later_position(written, taken.position(last - 1))
        return written

    def _queue_if_new(
        self, writer: PartitionWriter, key: bytes | None, value: bytes | None, at: ChangePosition, op: bytes,
        stamp: TransactionStamp, more: Headers = (),
    ) -> bool:  # fmt: skip
        self.touched.setdefault(writer, writer.next)
        if not writer.assign_offset(at):
            return False
        self._queue_record(writer, key, value, at, op, stamp, more)
        return True

    def _queue_record(
        self, writer: PartitionWriter, key: bytes | None, value: bytes | None, at: ChangePosition, op: bytes,
        stamp: TransactionStamp, more: Headers = (),
    ) -> None:  # fmt: skip
        headers = build_headers(at, op, stamp.xid_text, self._version) + more
        self._rounds.add(writer, Record(key, value, headers, stamp.time_ms))


def _unchanged_headers(change: Change) -> Headers:
    return ((UNCHANGED_HEADER, msgspec.json.encode(change.unchanged)),) if change.unchanged else ()


def later_position(one: ChangePosition | None, other: ChangePosition | None) -> ChangePosition | None:
    return one if other is None else other if one is None else max(one, other)
