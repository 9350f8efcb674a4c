"""Stream topics: JSON objects by a declared schema → commands; unreadable records → dead letters.

value    JSON object. A field that is absent or null is null; unknown fields are ignored; a field of
         another type, a number out of range, a null key: dead letter
null     deletion of the record's key: plain text for a single string column, else JSON (a scalar for
         one column, an object for several)
types    timestamp: RFC 3339 text (a zone has minutes; none = UTC) or integer milliseconds, years 1 to 9999;
         timestamp_ntz: such text without a zone; date: ISO 8601 text; decimal: number or text, exact within its scale;
         json: any JSON value, as its text in the record; binary: text in base64, as for Spark's JSON reader;
         nested types: json/nested_values.py

An exception of any type while reading a record makes that record a dead letter and does not affect others.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from decimal import Decimal
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa

from tidemill.base.runtime.tasks import error_sentence, is_fault
from tidemill.shards.api import Column, ShardSchema
from tidemill.shards.nested.type_names import is_nested
from tidemill.shards.parts.numbers import decimals_to_arrow, narrow_to_float32
from tidemill.shards.parts.schema import arrow_type
from tidemill.spark.decode.block_decoder import Block, ObjectReader, join_blocks, read_plain_texts
from tidemill.spark.decode.dead_letter_rows import DeadLetter, dead_letter_table
from tidemill.spark.decode.json.dialect import DeclaredDialect
from tidemill.spark.decode.json.nested_values import decode_hook, nested_field, nested_to_arrow
from tidemill.spark.decode.newline_text import Places
from tidemill.spark.decode.partial_rows import OmittedColumns
from tidemill.spark.decode.records import Records
from tidemill.spark.decode.row_decoder import build_command_table, check_nesting, row_decoder, rows_to_columns
from tidemill.spark.merge.commands import Commands
from tidemill.topics.batch import RecordColumns

_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_MICROSECOND = datetime.timedelta(microseconds=1)
FIRST_US = (datetime.datetime(1, 1, 1, tzinfo=datetime.UTC) - _EPOCH) // _MICROSECOND
LAST_US = (datetime.datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=datetime.UTC) - _EPOCH) // _MICROSECOND
"""Range that every reader of a table can represent: the limits of Python's datetime, and so of Spark's rows in
Python."""


def _bounded_int(bits: int) -> Any:
    return Annotated[int, msgspec.Meta(ge=-(2 ** (bits - 1)), le=2 ** (bits - 1) - 1)] | None


_FIELDS: dict[str, Any] = {
    "string": str | None,
    "bool": bool | None,
    "int16": _bounded_int(16),
    "int32": _bounded_int(32),
    "int64": _bounded_int(64),
    "float32": float | None,
    "float64": float | None,
    "date": datetime.date | None,
    "timestamp": datetime.datetime | int | None,
    "timestamp_ntz": Annotated[datetime.datetime, msgspec.Meta(tz=False)] | None,
    "json": msgspec.Raw,
    "binary": bytes | None,
}
_NULLS = (None, msgspec.Raw(b"null"))
NULL_KEY = "a key column is null or absent"


class DecodedRows(NamedTuple):
    """Rows of records with a value, keys of records without one, and the places and reasons of dead letters.
    `truncated`: places of records that delete every row; `partial`: rows that lack values."""

    live: Block
    absent: Block
    dead: list[tuple[int, str]]
    truncated: Sequence[int] = ()
    partial: Sequence[OmittedColumns] = ()


class StreamDecoder:
    def __init__(self, schema: ShardSchema, *, text_keys: bool = True) -> None:
        """Create the decoder. `text_keys`: the key of a deletion is plain text if it is a single string column."""
        self.schema = schema
        self._columns = schema.columns
        self._key_at = [i for i, c in enumerate(schema.columns) if c.name in schema.key]
        self._key_columns = [schema.columns[i] for i in self._key_at]
        self._value = row_decoder(schema.columns, _FIELDS, Decimal | None)
        self._key = row_decoder(self._key_columns, _FIELDS, Decimal | None)
        self._one_key = len(self._key_columns) == 1
        self._text_key = text_keys and self._one_key and self._key_columns[0].type == "string"
        dialect = DeclaredDialect(schema.key, (FIRST_US, LAST_US))
        self._objects = ObjectReader(schema.columns, dialect) if DeclaredDialect.supports(schema.columns) else None
        self._keys = ObjectReader(self._key_columns, dialect) if DeclaredDialect.supports(self._key_columns) else None

    def decode(self, records: Records) -> tuple[Commands, pa.Table]:
        """Return (commands, dead letters as updates of DEAD_LETTERS)."""
        live, absent, dead, *_ = self.decode_rows(records.columns)
        table = build_command_table(self.schema, live.arrays, live.places, absent.arrays, absent.places, records)
        return Commands(table), dead_letter_table([*records.unread, *letters_of(records, dead)])

    def decode_rows(self, columns: RecordColumns) -> DecodedRows:
        """Decode the values, and the keys of records without a value."""
        valued = columns.value_bytes >= 0
        by_key = ~valued if self._key_columns else np.zeros(len(valued), dtype=bool)
        keyed = np.flatnonzero(by_key & (columns.key_bytes >= 0))
        blocks, slow = self._values_by_blocks(columns, np.flatnonzero(valued))
        gone, slow_keys = self._keys_by_blocks(columns, keyed)
        keyless = np.flatnonzero(by_key & (columns.key_bytes < 0))
        rows: list[Any] = []
        live_at: list[int] = []
        keys: list[Any] = []
        absent_at: list[int] = []
        dead: list[tuple[int, str]] = []
        key_fields = [f"c{i}" for i in self._key_at]
        for at in np.sort(np.concatenate([slow, slow_keys, keyless])).tolist():
            value = columns.value(at)
            try:
                if value is not None:
                    check_nesting(value)
                    row = self._value.decode(value)
                    if any(getattr(row, name) in _NULLS for name in key_fields):
                        raise UnreadableError(NULL_KEY)
                    rows.append(row)
                    live_at.append(at)
                else:
                    keys.append(self._decode_key(columns.key(at)))
                    absent_at.append(at)
            except BaseException as error:
                if not is_fault(error):
                    raise
                dead.append((at, reason_of(error)))
        alone, live_at = rows_to_columns(self._columns, rows, live_at, dead, _values_to_array)
        alone_gone, absent_at = rows_to_columns(self._key_columns, keys, absent_at, dead, _values_to_array)
        if not self._key_columns:  # the key is not in the records: each without a value deletes
            absent_at = np.flatnonzero(~valued).tolist()
        live = join_blocks([*blocks, Block(np.array(live_at, dtype=np.int64), alone)])
        absent = join_blocks([*gone, Block(np.array(absent_at, dtype=np.int64), alone_gone)])
        return DecodedRows(Block(live[1], live[0]), Block(absent[1], absent[0]), dead)

    def _values_by_blocks(self, columns: RecordColumns, live: Places) -> tuple[list[Block], Places]:
        if self._objects is None:
            return [], live
        return self._objects.read(columns.body, columns.value_at[live], columns.value_bytes[live], live)

    def _keys_by_blocks(self, columns: RecordColumns, keyed: Places) -> tuple[list[Block], Places]:
        at, sizes = columns.key_at[keyed], columns.key_bytes[keyed]
        if self._text_key:
            return read_plain_texts(self._key_columns[0], columns.body, at, sizes, keyed)
        return self._keys.read(columns.body, at, sizes, keyed) if self._keys is not None else ([], keyed)

    def _decode_key(self, key: bytes | None) -> Any:
        """Return a row with fields c0… of the key columns."""
        if key is None:
            raise UnreadableError("a deletion without a key")
        name = self._key_columns[0].name
        if self._text_key:
            try:
                key = msgspec.json.encode({name: key.decode()})
            except UnicodeDecodeError as error:
                raise UnreadableError("the key of a deletion is not UTF-8") from error
        elif self._one_key and not key.lstrip().startswith(b"{"):
            key = b"{" + msgspec.json.encode(name) + b":" + key + b"}"
        check_nesting(key)
        found = self._key.decode(key)
        if any(getattr(found, f"c{i}") in _NULLS for i in range(len(self._key_columns))):
            raise UnreadableError("a key column of a deletion is null or absent")
        return found


class UnreadableError(ValueError):
    """Error of a decoder of topics, reported without the name of its type."""


def reason_of(error: BaseException) -> str:
    """Return the reason of a dead letter."""
    return str(error) if isinstance(error, UnreadableError | msgspec.MsgspecError) else error_sentence(error)


def _values_to_array(values: Sequence[Any], column: Column) -> pa.Array:
    if is_nested(column.type):
        return nested_to_arrow(values, column.type, _values_to_array)
    if column.type == "timestamp":
        micros = [None if v is None else _timestamp_us(v) for v in values]
        return pa.array(micros, pa.int64()).cast(arrow_type(column.type))
    kind = arrow_type(column.type)
    if column.type == "json":
        return pa.array([None if v in _NULLS else bytes(v).decode() for v in values], pa.string())
    if pa.types.is_decimal(kind):
        return decimals_to_arrow(values, kind)
    if pa.types.is_float32(kind):
        found, beyond = narrow_to_float32(pa.array(values, pa.float64()))
        if beyond.any():
            raise ValueError("beyond a float32")
        return found
    return pa.array(values, kind)


def convert_plain_values(values: Sequence[Any], column: Column) -> pa.Array:
    """Convert texts and numbers that are not in JSON by the same rules. Raises exceptions of any type for a value that
    the column cannot hold."""
    kind = nested_field(column.type, lambda leaf: _FIELDS.get(leaf, Decimal | None))
    found = msgspec.convert(values, list[kind], dec_hook=decode_hook)  # type: ignore[valid-type]
    return _values_to_array(found, column)


def _timestamp_us(value: datetime.datetime | int) -> int:
    """Convert integer milliseconds or a datetime, which is UTC without a zone. Raises ValueError outside
    FIRST_US..LAST_US."""
    if isinstance(value, int):
        us = value * 1000
    else:
        aware = value.replace(tzinfo=datetime.UTC) if value.tzinfo is None else value
        us = (aware - _EPOCH) // _MICROSECOND
    if not FIRST_US <= us <= LAST_US:
        raise ValueError("not between the years 1 and 9999 in UTC")
    return us


def letters_of(records: Records, dead: list[tuple[int, str]]) -> list[DeadLetter]:
    """Return one letter for each record at these places."""
    out = []
    for at, reason in dead:
        value = records.columns.value(at)
        data = value if value is not None else records.columns.key(at)
        offset = int(records.offsets[at])
        partition = records.partition_of(at)
        out.append(DeadLetter(records.topic, partition, offset, offset, int(records.times[at]), reason, data))
    return out
