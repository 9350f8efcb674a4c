"""Entries that wait in a partition writer, and their batches: records that were encoded one by one, and ranges of rows
that are already encoded except for the parts that depend on their place in a batch.

record   length │ 0 │ time delta │ offset delta │ key length, key, value length, value │ headers
                                                  └─ a range's middles (columnar_encoder.py) ──┘
event                                             └ its middles ─┘                head, tail (debezium_json.py)
headers  tm.pos = <commit_lsn>_<ordinal>   tm.op   tm.xid   tm.version, from the second description of the table on
         (a record that was encoded alone may have more: record_writer.py)

Invariant (same bytes): a batch has the same bytes and is cut at the same records, whichever way its records were
encoded.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidemill.base.lsn import ChangePosition
from tidemill.capture.changes import ORDINAL_STEP
from tidemill.capture.decode.columnar_tuples import DELETE, INSERT, UPDATE, Int64s
from tidemill.capture.encode.columnar_encoder import RECORD_OVERHEAD_BYTES, TOMBSTONE, PartitionRows
from tidemill.capture.encode.debezium_json import OPS, EventTail
from tidemill.topics.batch import Record
from tidemill.topics.batch.columns_trailer import encode_trailer
from tidemill.topics.batch.encode import encode_record_columns, encode_records, frame_records, join_fields, value_sizes
from tidemill.topics.batch.row_columns import MIN_ROWS, VERSION, build_row_columns, encode_row_columns
from tidemill.topics.batch.varint import encode_varint, encode_varints

POSITION_HEADER, OP_HEADER, XID_HEADER, VERSION_HEADER = "tm.pos", "tm.op", "tm.xid", "tm.version"
UNCHANGED_HEADER, WAS_HEADER = "tm.unchanged", "tm.was"
Headers = tuple[tuple[str, bytes], ...]
MIN_COLUMNAR_ROWS = 48
"""Fewer rows of a batch are encoded faster one by one."""
_ROW_OPS = {INSERT: b"insert", UPDATE: b"update", DELETE: b"delete", TOMBSTONE: b"delete"}
_EVENT_OPS = {INSERT: OPS["insert"], UPDATE: OPS["update"], DELETE: OPS["delete"], TOMBSTONE: b""}
_POWERS_OF_TEN = 10 ** np.arange(1, 19, dtype=np.int64)


def build_headers(position: ChangePosition, op: bytes, xid: bytes, version: int) -> Headers:
    """Return the headers of a record. `version`: of the table's description under which the record is written."""
    at = b"%d_%d" % (position.commit_lsn, position.ordinal)
    headers = ((POSITION_HEADER, at), (OP_HEADER, op), (XID_HEADER, xid))
    return headers if version == 1 else (*headers, (VERSION_HEADER, b"%d" % version))


class RangeOrigin(NamedTuple):
    """Transaction of a range of rows, or the time of a copy. `shift`: ordinal of place 0."""

    commit_lsn: int
    shift: int
    xid: int
    time_ms: int


class RowRange:
    """The rows [start, end) of a partition's rows of one transaction, or of a copy. The ordinal of place p is `shift` +
    `step` · p. `tail`: of their events, if they are events.
    """

    __slots__ = ("commit_lsn", "end", "origin", "rows", "shift", "start", "step", "tail", "time_ms", "xid")

    def __init__(
        self, rows: PartitionRows, start: int, end: int, origin: RangeOrigin,
        tail: EventTail | None = None, step: int = ORDINAL_STEP,
    ) -> None:  # fmt: skip
        self.tail = tail
        self.rows = rows
        self.start = start
        self.end = end
        self.origin = origin
        self.commit_lsn, self.shift, self.xid, self.time_ms = origin
        self.step = step

    def __len__(self) -> int:
        return self.end - self.start

    @property
    def size_bytes(self) -> int:
        size = self.rows.sums[self.end] - self.rows.sums[self.start]
        return size if self.tail is None else size + int(self.tail_sizes().sum())

    def cumulative_sizes(self) -> tuple[list[int], int]:
        """Return the sums of the records' sizes before each row, and the row at which they begin."""
        if self.tail is None:
            return self.rows.sums, 0
        sums = np.array(self.rows.sums[self.start : self.end + 1])
        sums[1:] += np.cumsum(self.tail_sizes())
        return sums.tolist(), self.start

    def ordinals(self) -> Int64s:
        return self.shift + self.step * self.rows.places[self.start : self.end]

    def tail_sizes(self) -> Int64s:
        """Return the sizes of the events' tails; a tombstone has none."""
        assert self.tail is not None
        sizes = self.tail.size_bytes + 1 + np.searchsorted(_POWERS_OF_TEN, self.ordinals(), side="right")
        sizes[self.rows.kinds[self.start : self.end] == TOMBSTONE] = 0
        return sizes

    def position(self, row: int) -> ChangePosition:
        return ChangePosition(self.commit_lsn, self.shift + self.step * int(self.rows.places[row]))

    def subrange(self, start: int, end: int) -> RowRange:
        return RowRange(self.rows, start, end, self.origin, self.tail, self.step)

    def is_followed_by(self, after: RowRange) -> bool:
        """Return whether `after` follows directly, in the same transaction, with nothing between them that has an
        ordinal.
        """
        mine = (self.end, self.commit_lsn, self.shift, self.time_ms)
        return after.rows is self.rows and mine == (after.start, after.commit_lsn, after.shift, after.time_ms)

    def columns(self) -> pa.RecordBatch | None:
        """Return the rows as columns, if they have any."""
        return None if self.rows.columns is None else self.rows.columns.slice(self.start, len(self))

    def records(self) -> list[Record]:
        """Return the records, encoded one by one."""
        xid, rows = b"%d" % self.xid, self.rows
        return [
            Record(
                rows.key(row),
                self._value_at(row),
                build_headers(self.position(row), _ROW_OPS[int(rows.kinds[row])], xid, rows.version),
                self.time_ms,
            )
            for row in range(self.start, self.end)
        ]

    def _value_at(self, row: int) -> bytes | None:
        value = self.rows.value(row)
        if value is None or self.tail is None:
            return value
        return value + self.tail.encode(self.position(row).ordinal, _EVENT_OPS[int(self.rows.kinds[row])])


BatchEntry = Record | RowRange


def record_size_bytes(record: Record) -> int:
    """Return the size of a record by which batches are cut."""
    return len(record.key or b"") + len(record.value or b"") + RECORD_OVERHEAD_BYTES


def cut_batches(entries: Sequence[BatchEntry], limit_bytes: int) -> Iterator[tuple[list[BatchEntry], int]]:
    """Yield batches and their numbers of records. A batch ends with the record that brings it to the limit."""
    batch: list[BatchEntry] = []
    count = size = 0
    for entry in entries:
        if isinstance(entry, Record):
            batch.append(entry)
            count, size = count + 1, size + record_size_bytes(entry)
            if size >= limit_bytes:
                yield batch, count
                batch, count, size = [], 0, 0
            continue
        start, (sums, base) = entry.start, entry.cumulative_sizes()
        while start < entry.end:
            at = start - base
            end = min(bisect_left(sums, sums[at] + limit_bytes - size, at + 1) + base, entry.end)
            batch.append(entry.subrange(start, end))
            count, size = count + end - start, size + sums[end - base] - sums[at]
            start = end
            if size >= limit_bytes:
                yield batch, count
                batch, count, size = [], 0, 0
    if batch:
        yield batch, count


def encode_entries_batch(
    entries: Sequence[BatchEntry], count: int, *, producer_id: int, base_sequence: int, epoch: int = 0
) -> bytes:
    """Encode one batch of `count` records."""
    ranged = sum(len(entry) for entry in entries if isinstance(entry, RowRange))
    if ranged < MIN_COLUMNAR_ROWS:
        entries = [each for entry in entries for each in (entry.records() if isinstance(entry, RowRange) else [entry])]
    times_ms = [entry.timestamp_ms if isinstance(entry, Record) else entry.time_ms for entry in entries]
    first_ms = times_ms[0]
    payload: list[bytes | memoryview] = []
    done = 0
    for alone, group in groupby(entries, lambda entry: isinstance(entry, Record)):
        some = list(group)
        if alone:
            payload.append(encode_records([entry for entry in some if isinstance(entry, Record)], done, first_ms))
            done += len(some)
        else:
            ranges = [entry for entry in some if isinstance(entry, RowRange)]
            payload.append(_encode_ranges(ranges, done, first_ms))
            done += sum(map(len, ranges))
    return frame_records(
        b"".join(payload), count, first_ms, max(times_ms), producer_id=producer_id, producer_epoch=epoch,
        base_sequence=base_sequence,
    )  # fmt: skip


def encode_columns_trailer(entries: Sequence[BatchEntry], count: int) -> bytes:
    """Return the trailer of a batch: its rows as columns; else b"". Rows without columns, such as the last ones of a
    receive, may be half of a batch at most, since it costs several times more to read them from their records.
    """
    if count < MIN_ROWS:
        return b""
    ranges = [None if isinstance(entry, Record) else entry.columns() for entry in entries]
    found = [columns for columns in ranges if columns is not None]
    if 2 * sum(map(len, found)) < count:
        return b""
    parts: list[pa.RecordBatch] = []
    for has_columns, group in groupby(zip(entries, ranges, strict=True), lambda pair: pair[1] is not None):
        if has_columns:
            parts += [columns for _, columns in group]
            continue
        records = [r for e, _ in group for r in ([e] if isinstance(e, Record) else e.records())]
        part = _columns_of_records(records, found[0].schema)
        if part is None:
            return b""
        parts.append(part)
    encoded = encode_row_columns(parts)
    return encode_trailer(encoded[0], count, encoded[1]) if encoded is not None else b""


def _columns_of_records(records: Sequence[Record], schema: pa.Schema) -> pa.RecordBatch | None:
    """Return the rows of records that were encoded one by one. None: a record is no plain row of this description."""
    version = int(schema.metadata[VERSION])
    names = schema.names[1:]
    header_count = 3 if version == 1 else 4  # more headers name what the row lacks, or an old key
    rows: list[dict[str, str | None]] = []
    for record in records:
        headers = dict(record.headers)
        row = record.key if record.value is None else record.value
        if len(headers) != header_count or int(headers.get(VERSION_HEADER) or b"1") != version or row is None:
            return None
        found = msgspec.json.decode(row, type=dict[str, msgspec.Raw])
        rows.append({name: _text_of_json(bytes(value)) for name, value in found.items()})
    if any(row.keys() - set(names) for row in rows):
        return None
    texts = [pa.array([row.get(name) for row in rows], pa.string()) for name in names]
    return build_row_columns(names, version, [record.value is not None for record in records], texts)


def _text_of_json(value: bytes) -> str | None:
    """Return PostgreSQL's text of a value of a record (row_encoder.py)."""
    if value == b"null":
        return None
    if value in (b"true", b"false"):
        return chr(value[0])
    return msgspec.json.decode(value, type=str) if value[:1] == b'"' else value.decode()


def _encode_ranges(ranges: list[RowRange], first: int, first_ms: int) -> memoryview:
    counts = [len(each) for each in ranges]
    of_range = pa.array(np.repeat(np.arange(len(ranges)), counts)) if len(ranges) > 1 else None

    def repeat_per_record(values: list[bytes]) -> Any:
        """Return a constant of every range, repeated for each of its records."""
        column = pa.array(values, pa.binary())
        return column.take(of_range) if of_range is not None else pa.repeat(column[0], counts[0])

    places = np.concatenate([entry.rows.places[entry.start : entry.end] for entry in ranges])
    steps = np.repeat([entry.step for entry in ranges], counts)
    ordinals = np.repeat([entry.shift for entry in ranges], counts) + steps * places
    numbers = pa.array(ordinals).cast(pa.string()).view(pa.binary())
    commits = repeat_per_record([b"%d_" % entry.commit_lsn for entry in ranges])
    middles = pa.concat_arrays([entry.rows.middles[entry.start : entry.end] for entry in ranges])
    kinds = np.concatenate([entry.rows.kinds[entry.start : entry.end] for entry in ranges])
    values = [] if ranges[0].tail is None else _encode_event_values(ranges, repeat_per_record, numbers, kinds)
    rests = [
        middles, *values, repeat_per_record([_COUNTS[entry.rows.version > 1] + _encode_name(POSITION_HEADER) for entry
        in ranges]), encode_varints(value_sizes(numbers) + value_sizes(commits)), commits, numbers,
        _OP_COLUMN.take(pa.array(_OP_AT[kinds])),
        repeat_per_record([_encode_field(b"%d" % entry.xid) + _encode_version_header(entry.rows.version) for entry in
        ranges]),
    ]  # fmt: skip
    times = np.repeat([entry.time_ms - first_ms for entry in ranges], counts)
    return encode_record_columns(first, times, rests)


def _encode_event_values(
    ranges: Sequence[RowRange], each: Callable[[list[bytes]], Any], numbers: Any, kinds: Any
) -> list[Any]:
    """Return the values of events, with their lengths."""
    heads = pa.concat_arrays([entry.rows.heads[entry.start : entry.end] for entry in ranges])
    tails = [entry.tail for entry in ranges if entry.tail is not None]
    ops = _EVENT_COLUMN.take(pa.array(_OP_AT[kinds]))
    places = []
    if tails[0].around:
        around = np.repeat([t.around for t in tails], [len(entry) for entry in ranges])
        places = [encode_varints(around + value_sizes(numbers)), each([t.place for t in tails])]
    values = join_fields(heads, each([t.first for t in tails]), *places, numbers, each([t.second for t in tails]), ops,
                  each([t.third for t in tails]))  # fmt: skip
    deleted = kinds == TOMBSTONE
    if not deleted.any():
        return [encode_varints(value_sizes(values)), values]
    values = pc.if_else(pa.array(deleted), pa.scalar(b""), values)
    return [encode_varints(np.where(deleted, -1, value_sizes(values))), values]


def _encode_name(header: str) -> bytes:
    return _encode_field(header.encode())


def _encode_field(content: bytes) -> bytes:
    return encode_varint(len(content)) + content


def _encode_version_header(version: int) -> bytes:
    return _encode_name(VERSION_HEADER) + _encode_field(b"%d" % version) if version > 1 else b""


_COUNTS = (encode_varint(3), encode_varint(4))
_OP_AT = np.zeros(256, np.int64)
_OP_AT[list(_ROW_OPS)] = np.arange(len(_ROW_OPS))
_EVENT_COLUMN = pa.array(list(_EVENT_OPS.values()), pa.binary())
_OP_COLUMN = pa.array(
    [_encode_name(OP_HEADER) + _encode_field(op) + _encode_name(XID_HEADER) for op in _ROW_OPS.values()], pa.binary()
)
