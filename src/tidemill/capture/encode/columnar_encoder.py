"""Encode the rows of a block as keys and values of records, by columns, with the same bytes as RowEncoder,
EventEncoder and partition_writer.py row by row.

    column   ──► text ──► JSON of each value ──► one element-wise join with the names ──► key, value
    record   key length │ key │ value length │ value       the rest of a record depends on its place (batch_builder.py)
    event    key length │ key │ head                       … and so does the tail of the value (debezium_json.py)

Invariant (same bytes): the result has the same bytes as that of the per-row functions, or there is no result. Rows
that these might reject, or write differently, are left to them.
"""

from __future__ import annotations

import zlib
from bisect import bisect_left
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidemill.base.pgtypes.debezium import CLOCKS, MILLIS, NOT_JSON_NUMBERS, NUMBERS, escape
from tidemill.capture.changes import Column
from tidemill.capture.decode.columnar_tuples import (
    DELETE,
    INSERT,
    Bytes,
    Int64s,
    ValueSlices,
    build_string_array,
    gather_slices,
)
from tidemill.capture.decode.row_blocks import RowBlock
from tidemill.capture.encode.debezium_json import AFTER, BEFORE
from tidemill.capture.encode.row_encoder import MINUS_ZERO, Form, event_form, row_form
from tidemill.topics.batch.encode import join_fields, value_sizes
from tidemill.topics.batch.row_columns import MIN_ROWS, build_row_columns
from tidemill.topics.batch.varint import encode_varints

RECORD_OVERHEAD_BYTES = 80
TAIL_ROOM_BYTES = 4096
"""Reserve for the parts of an event other than its row: rows that exceed the limit with it are left to the per-row
functions.
"""
MIN_BLOCK_ROWS = MIN_ROWS // 4
"""Fewer rows of a block get no columns: they seldom become part of a batch that is large enough for columns."""
TOMBSTONE = ord("X")
"""Kind of the tombstone record after the event of a deleted row."""
_EMPTY = pa.scalar("")
_ESCAPED = (("\\", "\\\\"), ('"', '\\"'), ("\n", "\\n"), ("\r", "\\r"), ("\t", "\\t"), ("\b", "\\b"), ("\f", "\\f"))
"""The backslash comes first, because the other replacements add backslashes."""
_OTHER_CONTROLS = bytes(byte for byte in range(0x20) if chr(byte) not in "\n\r\t\b\f")
_SPECIAL_FLOATS = pa.array(sorted(NOT_JSON_NUMBERS))
_ZONED = r"^[0-9]{4}-[0-9]{2}-[0-9]{2} [0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]+)?\+00$"


class BlockRecords(NamedTuple):
    """The records of all rows of a block. `sizes`: as a partition writer counts them. `columns`: the rows as
    row_columns.py stores them; None for events, and for few rows.
    """

    keys: Any
    values: Any
    middles: Any
    sizes: Int64s
    columns: pa.RecordBatch | None = None


class PartitionRows:
    """The records of one partition, in the order of the stream: `rows` of the block, their `places`, `middles` (key and
    value with their lengths), and `sums` of their sizes, as a partition writer counts them, before each.

    For events: `heads` of the values, and `middles` are keys. A deleted row is present twice, the second time as its
    tombstone.
    """

    __slots__ = (
        "_keys",
        "_values",
        "bytes_per_row",
        "columns",
        "heads",
        "kinds",
        "middles",
        "places",
        "rows",
        "sums",
        "version",
    )

    def __init__(self, block: RowBlock, records: BlockRecords, rows: Int64s | None, kinds: Bytes | None = None) -> None:
        """`rows`: those of the partition; None = all. `kinds`: of events, if they differ from those of the block."""
        keys, values, middles, sizes, columns = records
        places = np.asarray(block.places, np.int64)
        if rows is not None:
            taken = pa.array(rows)
            middles, sizes, places = middles.take(taken), sizes[rows], places[rows]
            columns = columns.take(taken) if columns is not None else None
        self.rows: list[int] | range = range(len(block)) if rows is None else rows.tolist()
        self.heads: Any = None
        if kinds is not None:
            assert rows is not None
            self.heads = pc.if_else(pa.array(kinds == TOMBSTONE), pa.scalar(b""), values.take(taken))
            sizes = sizes + value_sizes(self.heads)
            self.kinds = kinds
        else:
            self.kinds = block.kinds if rows is None else block.kinds[rows]
        self.columns = columns
        self.bytes_per_row = columns.nbytes // max(len(columns), 1) if columns is not None else 0
        """Memory of a row's columns, on average."""
        self.places: Int64s = places
        self.version = block.relation.version
        self.middles = middles
        sums = np.zeros(len(sizes) + 1, np.int64)
        np.cumsum(sizes, out=sums[1:])
        self.sums: list[int] = sums.tolist()
        self._keys = keys
        self._values = values

    def key(self, index: int) -> bytes:
        return bytes(self._keys[self.rows[index]].as_py())

    def value(self, index: int) -> bytes | None:
        """Return the value of a record, None for a deleted row. For an event: its head, None for a tombstone."""
        gone = DELETE if self.heads is None else TOMBSTONE
        return None if self.kinds[index] == gone else bytes(self._values[self.rows[index]].as_py())


class EncodedBlock:
    """The records of a block: the rows of each partition. With several partitions, also the partition of each row and
    its index there, if every row is one record.
    """

    __slots__ = ("_index_of", "_partition_of", "partitions")

    def __init__(self, partitions: list[PartitionRows], partition_of: list[int], index_of: list[int]) -> None:
        self.partitions = partitions
        self._partition_of = partition_of
        self._index_of = index_of

    def partition_ranges(self, start: int, end: int) -> Iterator[tuple[int, PartitionRows, int, int]]:
        """Yield (partition, its rows, first, last) for the rows [start, end) of the block."""
        if len(self.partitions) == 1 and isinstance(self.partitions[0].rows, range):
            yield 0, self.partitions[0], start, end
        elif not self._partition_of or end - start > 4 * len(self.partitions):
            for partition, own in enumerate(self.partitions):
                first = bisect_left(own.rows, start)
                last = bisect_left(own.rows, end, first)
                if first < last:
                    yield partition, own, first, last
        else:
            for row in range(start, end):
                partition, index = self._partition_of[row], self._index_of[row]
                yield partition, self.partitions[partition], index, index + 1


ENCODE_PER_ROW = object()
"""Marker of a block that cannot be encoded by columns: its rows are for the per-row functions."""


class EventFormat(Protocol):
    """Format of events: the bytes before the old row, before the new row, and in place of a missing one. If
    `encode_keys_and_rows` or `rows` return None or raise ArrowInvalid, the per-row functions have to encode the rows.
    """

    @property
    def before(self) -> bytes: ...
    @property
    def after(self) -> bytes: ...
    @property
    def null(self) -> bytes: ...

    def encode_keys_and_rows(self, block: RowBlock) -> tuple[Any, Any] | None: ...
    def rows(self, block: RowBlock, rows: ValueSlices, count: int) -> Any | None: ...


class JsonEventFormat:
    before, after, null = BEFORE, AFTER, b"null"

    def encode_keys_and_rows(self, block: RowBlock) -> tuple[Any, Any] | None:
        return _encode_json(block, event_form)

    def rows(self, block: RowBlock, rows: ValueSlices, count: int) -> Any | None:
        return _encode_row_objects(block, rows, count, event_form)


def encode_block(
    block: RowBlock, partitions: int, limit_bytes: int, events: EventFormat | None = None
) -> EncodedBlock | None:
    """Encode a block. `events` None: records are rows. Returns None if a row needs the per-row functions: it is larger
    than `limit_bytes`, or has a text that no type prints.
    """
    texts: list[pa.StringArray] = []
    try:
        made = _encode_json(block, row_form, texts) if events is None else events.encode_keys_and_rows(block)
        if made is None:
            return None
        if events is not None:
            heads = _encode_heads(block, events, made[1])
            return None if heads is None else _encode_events(block, partitions, limit_bytes, made[0], heads)
    except pa.ArrowInvalid:  # a date or time that only PostgreSQL can write
        return None
    keys, values = made
    key_sizes, sizes_of_values = value_sizes(keys), value_sizes(values)
    deleted = block.kinds == DELETE
    if deleted.any():
        sizes_of_values = np.where(deleted, 0, sizes_of_values)
        values_written = pc.if_else(pa.array(deleted), pa.scalar(b""), values)
        value_lengths = encode_varints(np.where(deleted, -1, sizes_of_values))
    else:
        values_written, value_lengths = values, encode_varints(sizes_of_values)
    if int((key_sizes + sizes_of_values).max()) > limit_bytes:
        return None
    middles = join_fields(encode_varints(key_sizes), keys, value_lengths, values_written)
    sizes = key_sizes + sizes_of_values + RECORD_OVERHEAD_BYTES
    columns = (
        build_row_columns([column.name for column in block.relation.columns], block.relation.version, ~deleted, texts)
        if len(block) >= MIN_BLOCK_ROWS
        else None
    )
    records = BlockRecords(keys, values, middles, sizes, columns)
    if partitions == 1:
        return EncodedBlock([PartitionRows(block, records, None)], [], [])
    partition_of = _partitions_of(keys, partitions)
    index_of = np.empty(len(partition_of), np.int64)
    found = []
    for partition in range(partitions):
        (rows,) = np.nonzero(partition_of == partition)
        index_of[rows] = np.arange(len(rows))
        found.append(PartitionRows(block, records, rows))
    return EncodedBlock(found, partition_of.tolist(), index_of.tolist())


def _partitions_of(keys: Any, partitions: int) -> Int64s:
    return np.array([zlib.crc32(key) % partitions for key in keys.to_pylist()], np.int64)


def _encode_events(block: RowBlock, partitions: int, limit_bytes: int, keys: Any, heads: Any) -> EncodedBlock | None:
    key_sizes, head_sizes = value_sizes(keys), value_sizes(heads)
    names = len(block.relation.schema) + len(block.relation.table)
    if int((key_sizes + head_sizes).max()) + TAIL_ROOM_BYTES + 6 * names > limit_bytes:
        return None
    records = BlockRecords(keys, heads, join_fields(encode_varints(key_sizes), keys), key_sizes + RECORD_OVERHEAD_BYTES)
    partition_of = _partitions_of(keys, partitions) if partitions > 1 else np.zeros(len(block), np.int64)
    times = np.where(block.kinds == DELETE, 2, 1)
    found = []
    for partition in range(partitions):
        (rows,) = np.nonzero(partition_of == partition)
        rows = np.repeat(rows, times[rows])
        kinds = block.kinds[rows]
        kinds[1:][rows[1:] == rows[:-1]] = TOMBSTONE
        found.append(PartitionRows(block, records, rows, kinds))
    return EncodedBlock(found, [], [])


def _encode_heads(block: RowBlock, events: EventFormat, values: Any) -> Any:
    """Return the heads of the events' values: the row before and after (EventEncoder.encode_head). None: the per-row
    functions have to encode them.
    """
    before = pa.array(np.arange(len(block)), mask=block.kinds == INSERT)
    rows = values
    if len(block.old.rows):
        objects = events.rows(block, block.old.values, len(block.old.rows))
        if objects is None:
            return None
        rows = pa.concat_arrays([values, objects])
        at = np.arange(len(block))
        at[block.old.rows] = len(block) + np.arange(len(block.old.rows))
        before = pa.array(at, mask=block.kinds == INSERT)
    deleted = pa.array(block.kinds == DELETE)
    after = pc.if_else(deleted, pa.scalar(None, pa.binary()), values)
    return pc.binary_join_element_wise(
        events.before,
        rows.take(before),
        events.after,
        after,
        b"",
        null_handling="replace",
        null_replacement=events.null,
    )


def _encode_json(block: RowBlock, form: Form, raw: list[pa.StringArray] | None = None) -> tuple[Any, Any] | None:
    """Return keys and values, binary columns; `raw` receives the text of each column."""
    texts: dict[str, tuple[str, Any]] = {}
    values = _encode_row_objects(block, block.values, len(block), form, texts, raw)
    if values is None:
        return None
    for column in block.relation.key_columns:
        if form(column) == "float":
            quote, text = texts[column.name]
            texts[column.name] = quote, pc.if_else(pc.equal(text, MINUS_ZERO), "0", text)
    keys = _join_objects([(column.name, *texts[column.name]) for column in block.relation.key_columns], len(block))
    return keys, values


def _encode_row_objects(
    block: RowBlock, rows: ValueSlices, count: int, form: Form, texts: dict[str, tuple[str, Any]] | None = None,
    raw: list[pa.StringArray] | None = None,
) -> Any:  # fmt: skip
    """Return the objects of all columns; `texts` receives the parts of each column, `raw` its text. None: the per-row
    functions have to encode them.
    """
    texts = {} if texts is None else texts
    for column, text, sizes, data in iter_text_columns(block, rows, count):
        made = _json_texts(form(column), text, data, sizes)
        if made is None:
            return None
        if raw is not None:
            raw.append(text)
        texts[column.name] = made
    return _join_objects([(column.name, *texts[column.name]) for column in block.relation.columns], count)


def iter_text_columns(block: RowBlock, rows: ValueSlices, count: int) -> Iterator[tuple[Column, Any, Int64s, Any]]:
    """Yield (column, its texts, their sizes, −1 where it is null, their bytes back to back)."""
    starts, sizes = rows
    data, offsets = gather_slices(block.walker.body, block.walker.bytes, starts.ravel(), np.maximum(sizes, 0).ravel())
    whole = pa.py_buffer(data)
    for at, column in enumerate(block.relation.columns):
        mine = offsets[at * count : (at + 1) * count + 1]
        nulls = sizes[at] < 0
        text = build_string_array(whole, mine, ~nulls if nulls.any() else None)
        yield column, text, sizes[at], np.frombuffer(data, np.uint8)[mine[0] : mine[-1]]


def _join_objects(columns: list[tuple[str, str, Any]], count: int) -> Any:
    pieces: list[Any] = []
    literal = "{"
    for number, (name, quote, text) in enumerate(columns):
        pieces += [f"{literal}{',' if number else ''}{escape(name)}:{quote}", text]
        literal = quote
    if not pieces:
        return pa.array([b"{}"] * count, pa.binary())
    made = pc.binary_join_element_wise(*pieces, literal + "}", _EMPTY, null_handling="replace", null_replacement="null")
    return made.view(pa.binary())


def _json_texts(form: str, text: Any, data: Any, sizes: Int64s) -> tuple[str, Any] | None:
    """Return (the quote around every value, the JSON of each without it); nulls stay null. None, or ArrowInvalid: the
    per-row functions have to encode them.
    """
    if form == "number":
        return "", text
    if form in NUMBERS:
        return "", convert_to_numbers(form, text).cast(pa.string())
    if form == "float":
        special = pc.is_in(text, value_set=_SPECIAL_FLOATS)
        return "", pc.if_else(special, join_text('"', text, '"'), text) if pc.any(special).as_py() else text
    if form == "bool":
        if (sizes == 0).any():
            return None
        return "", pc.if_else(pc.starts_with(text, "t"), "true", "false")
    text = convert_text(form, text)
    if text is None:
        return None
    text = _escape_json(text, data)
    return ("", join_text('"', text, '"')) if text.null_count else ('"', text)


def convert_text(form: str, text: Any) -> Any | None:
    """Convert texts like base/pgtypes/debezium.string_writer. None: the per-row functions have to encode them."""
    if form == "hex":
        return pc.utf8_slice_codeunits(text, 2) if _all_true(pc.starts_with(text, "\\x")) else None
    if form == "zoned":
        if not _all_true(pc.match_substring_regex(text, _ZONED)):
            return None
        day, clock = pc.utf8_slice_codeunits(text, 0, 10), pc.utf8_slice_codeunits(text, 11, -3)
        return join_text(day, "T", clock, "Z")
    return text


def convert_to_numbers(form: str, text: Any) -> Any:
    """Convert dates and times to numbers. Raises ArrowInvalid for those that Arrow cannot read."""
    if form == "days":
        return text.cast(pa.date32()).cast(pa.int32())
    moments = join_text("1970-01-01 ", text) if form in CLOCKS else text
    micros = moments.cast(pa.timestamp("us")).cast(pa.int64())
    if form not in MILLIS:
        return micros
    valid = np.asarray(micros.is_valid())
    return pa.array(np.asarray(micros.fill_null(0)) // 1000, mask=~valid)


def _all_true(found: Any) -> bool:
    """Return whether all values are true; nulls count as true."""
    return pc.all(found, min_count=0).as_py() is not False


def join_text(*pieces: Any) -> Any:
    return pc.binary_join_element_wise(*pieces, _EMPTY)


def _escape_json(text: Any, data: Any) -> Any:
    """Escape like json.encoder.encode_basestring, without its quotes."""
    raw = data.tobytes()
    for plain, escaped in _ESCAPED:
        if plain.encode() in raw:
            text = pc.replace_substring(text, plain, escaped)
    if len(raw.translate(None, _OTHER_CONTROLS)) != len(raw):
        for byte in _OTHER_CONTROLS:
            if byte in raw:
                text = pc.replace_substring(text, chr(byte), f"\\u{byte:04x}")
    return text
