"""Topics written by capture → commands, dead letters, and the place where the table must stop.

key      JSON object of the key columns
value    JSON object of all columns; numbers and booleans as such, else PostgreSQL's text; null = deletion
headers  tm.op = "truncate": every live key of the table is gone at this place

A value that its column cannot hold (NaN in numeric(6,2), a timestamp past the year 294246) makes the row a dead
letter, and its key absent: an old value never stays as if it were current. The next good value of the key heals it.
A record with other columns than the table is no matter of one row: the table stops before its time, at a `Stop`.
So it does before a batch that cannot be read, for nobody knows which keys were in it.

Values, and the keys of deletions, are read by blocks (objects.py); what those leave out, and what may be a truncation,
record by record.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidemill.base.tasks import is_fault, sentence
from tidemill.shards.front import Column, ShardSchema
from tidemill.shards.pgtypes import cast_text, parse_column
from tidemill.shards.schema import arrow_type
from tidemill.spark.decode.build import command_table
from tidemill.spark.decode.fields import columns_of_rows, row_decoder
from tidemill.spark.decode.letters import Letter, letter_table
from tidemill.spark.decode.lines import Mask, Places, of_ranges
from tidemill.spark.decode.objects import Block, ObjectReader, bools, in_order, strange_floats
from tidemill.spark.decode.records import Records
from tidemill.spark.upsert.commands import Commands, Truncate
from tidemill.topics.batch import Columns

OP_HEADER = "tm.op"
TRUNCATE = b"truncate"

_NATIVE: dict[str, Any] = {
    "int16": int | str | None,
    "int32": int | str | None,
    "int64": int | str | None,
    "float32": float | str | None,
    "float64": float | str | None,
    "bool": bool | str | None,
}


class Stop(msgspec.Struct, frozen=True, order=True):
    """The table cannot be brought to `time_ms` or beyond; `reason` says what is there, and where."""

    time_ms: int
    partition: int
    offset: int
    reason: str
    fix: str


class Captured(msgspec.Struct, frozen=True):
    commands: Commands
    dead: pa.Table
    stop: Stop | None = None


class CapturedDecoder:
    """Of one table."""

    def __init__(self, schema: ShardSchema, table: str = "") -> None:
        self.schema = schema
        self.table = table
        self._key_columns = [c for c in schema.columns if c.name in schema.key]
        self._names = {c.name for c in schema.columns}
        self._value = row_decoder(schema.columns, _NATIVE, str | None, exact=True)
        self._key = row_decoder(self._key_columns, _NATIVE, str | None)
        self._values = ObjectReader(schema.columns, _Carried(exact=True))
        self._keys = ObjectReader(self._key_columns, _Carried(exact=False))

    def decode(self, records: Records) -> Captured:
        """The records before the stop, if there is one; else all."""
        stop = min((self._unread(letter) for letter in records.unread), default=None)
        live_at: list[int] = []
        rows: list[Any] = []
        absent_at: list[int] = []
        keys: list[Any] = []
        truncates: list[Truncate] = []
        dead: list[tuple[int, str]] = []
        columns = records.columns
        valued, deleted, others = _kinds(columns)
        blocks, slow = self._values.read(columns.body, columns.value_at[valued], columns.value_bytes[valued], valued)
        gone, slow_keys = self._keys.read(columns.body, columns.key_at[deleted], columns.key_bytes[deleted], deleted)
        for at in np.sort(np.concatenate([slow, slow_keys, others])).tolist():
            value = columns.value(at)
            try:
                if value is not None:
                    rows.append(self._value.decode(value))
                    live_at.append(at)
                elif columns.header_counts[at] and dict(columns.headers_of(at)).get(OP_HEADER) == TRUNCATE:
                    truncates.append(Truncate(int(records.times[at]), records.partition, int(records.offsets[at])))
                else:
                    keys.append(self._key_of(columns.key(at)))
                    absent_at.append(at)
            except BaseException as error:
                if not is_fault(error):
                    raise
                difference = self._difference(value)
                if difference:
                    found = self._differs(records, at, difference)
                    stop = found if stop is None else min(stop, found)
                    # In offset order, so in time order: what follows is beyond it.
                    blocks, gone = [b.before(at) for b in blocks], [b.before(at) for b in gone]
                    break
                dead.append((at, sentence(error)))
        alone, live_at = columns_of_rows(self.schema.columns, rows, live_at, dead, _array)
        # What a poisoned row was before is not what it is: its key is absent until a good value comes.
        for at, _ in dead:
            if columns.value(at) is not None:
                try:
                    keys.append(self._key_of(columns.key(at)))
                    absent_at.append(at)
                except BaseException as error:
                    if not is_fault(error):
                        raise
        named, keyless = {at for at, _ in dead}, list[tuple[int, str]]()
        alone_gone, absent_at = columns_of_rows(self._key_columns, keys, absent_at, keyless, _array)
        dead += [(at, reason) for at, reason in keyless if at not in named]
        live = in_order([*blocks, Block(np.array(live_at, dtype=np.int64), alone)])
        absent = in_order([*gone, Block(np.array(absent_at, dtype=np.int64), alone_gone)])
        table = command_table(self.schema, *live, *absent, records)
        letters = letter_table([self._letter(records, at, reason) for at, reason in dead])
        return Captured(Commands(table, tuple(truncates)), letters, stop)

    def _key_of(self, key: bytes | None) -> Any:
        if key is None:
            raise ValueError("record has neither key nor value")
        return self._key.decode(key)

    def _difference(self, value: bytes | None) -> str:
        """How the columns of a record differ from the table's; "" when they do not, or when it is no JSON object."""
        if value is None:
            return ""
        try:
            found = msgspec.json.decode(value, type=dict[str, msgspec.Raw]).keys()
        except BaseException as error:
            if not is_fault(error):
                raise
            return ""
        out = [f"+{name}" for name in found if name not in self._names]
        out += [f"-{name}" for name in sorted(self._names - found)]
        return " ".join(out)

    def _differs(self, records: Records, at: int, difference: str) -> Stop:
        place = f"topic={records.topic} partition={records.partition} offset={int(records.offsets[at])}"
        return Stop(
            int(records.times[at]),
            records.partition,
            int(records.offsets[at]),
            f"the source has other columns than the table: table={self.table} difference=[{difference}] {place}.",
            _start_over(self.table),
        )

    def _unread(self, letter: Letter) -> Stop:
        return Stop(
            letter.time_ms,
            letter.partition,
            letter.offset,
            f"records of a captured table cannot be read: table={self.table} topic={letter.topic}"
            f" partition={letter.partition} offsets={letter.offset}..{letter.last_offset} {letter.reason}.",
            _start_over(self.table),
        )

    def _letter(self, records: Records, at: int, reason: str) -> Letter:
        value, key = records.columns.value(at), records.columns.key(at)
        offset = int(records.offsets[at])
        place = f"table={self.table} {reason}" if self.table else reason
        return Letter(
            records.topic,
            records.partition,
            offset,
            offset,
            int(records.times[at]),
            place,
            value if value is not None else key,
            self.table,
            (key or b"").decode("utf-8", "replace"),
        )


class _Carried:
    """See objects.Dialect: columns as capture writes them."""

    def __init__(self, *, exact: bool) -> None:
        self.exact = exact

    def read_as(self, column: Column, seen: bytes) -> pa.DataType:
        if column.type not in _NATIVE or (column.type == "int64" and seen[:1] == b'"'):  # an oid
            return pa.string()
        return pa.float64() if column.type == "float32" else arrow_type(column.type)

    def typed(self, column: Column, array: pa.Array, odd: Mask) -> pa.Array:
        if pa.types.is_string(array.type):
            if column.type in ("date", "timestamp") or column.type.startswith("decimal"):
                strange = _unusual(array, moment=column.type in ("date", "timestamp"))
                if strange.any():
                    odd |= strange
                    array = pc.if_else(pa.array(strange), None, array)
            return cast_text(array, column.type)
        if column.type in ("float32", "float64"):
            odd |= strange_floats(array)
        return array.cast(pa.float32(), safe=False) if column.type == "float32" else array


def _unusual(texts: pa.Array, *, moment: bool) -> Mask:
    """Which texts are what only PostgreSQL writes: NaN, infinity, years of another length, BC."""
    _, offsets, data = texts.buffers()
    places = np.frombuffer(offsets, dtype=np.int32)[texts.offset : texts.offset + len(texts) + 1]
    if places[0] == places[-1]:
        return bools(texts.is_valid())
    text, sizes = np.frombuffer(data, dtype=np.uint8), np.diff(places)
    begins = np.minimum(places[:-1], len(text) - 1)
    first = text[begins]
    strange: Mask = (sizes == 0) | ((first - ord("0") > 9) & (moment | (first != ord("-"))))
    if moment:
        strange |= (text[np.minimum(begins + 4, len(text) - 1)] != ord("-")) | (text[places[1:] - 1] == ord("C"))
    return strange & bools(texts.is_valid()) if texts.null_count else strange


def _kinds(columns: Columns) -> tuple[Places, Places, Places]:
    """Places of the records with a value, of deletions for certain, of the others."""
    valued = columns.value_bytes >= 0
    deleted = ~valued & (columns.key_bytes >= 0)
    with_headers = np.flatnonzero(deleted & (columns.header_counts > 0))
    if len(with_headers):
        # The headers of a record end before the key of the next one; of the last one nobody knows where.
        ends = np.append(columns.key_at, -1)[with_headers + 1]
        known = ends >= 0
        deleted[with_headers[~known]] = False
        with_headers, ends = with_headers[known], ends[known]
    if len(with_headers):
        begins, all_of_them = columns.headers_at[with_headers], np.ones(len(ends), dtype=bool)
        headers = of_ranges(pa.py_buffer(columns.body), begins, ends, all_of_them)
        deleted[with_headers] = ~bools(pc.match_substring(headers, TRUNCATE))
    return np.flatnonzero(valued), np.flatnonzero(deleted), np.flatnonzero(~valued & ~deleted)


def _start_over(table: str) -> str:
    return f"Run `tidemill capture recopy {table}`, or `tidemill shard drop` for a shard of another make."


def _array(values: Sequence[Any], column: Column) -> pa.Array:
    if column.type not in _NATIVE:
        return parse_column(values, column)
    if any(type(v) is str for v in values):  # NaN, Infinity, an oid: text where JSON has no number
        return parse_column([None if v is None else _text(v) for v in values], column)
    return pa.array(values, arrow_type(column.type))


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "t" if value else "f"
    return value if isinstance(value, str) else repr(value)
