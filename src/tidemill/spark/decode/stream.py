"""Stream topics: JSON objects by a declared schema → commands; what cannot be read → dead letters.

value    JSON object. A field that is absent or null is null; unknown fields are ignored; a field of
         another type, a number out of range, a null key: dead letter
null     deletion of the record's key: the text itself for one string column, else JSON (a scalar for
         one column, an object for several)
types    timestamp: ISO 8601 text (no zone = UTC) or integer milliseconds; date: ISO 8601 text;
         decimal: number or text, exact within its scale
"""

from __future__ import annotations

import datetime
from decimal import Decimal
from functools import lru_cache
from typing import Annotated, Any

import msgspec
import numpy as np
import pyarrow as pa

from tidemill.shards.front import Column, ShardSchema
from tidemill.shards.schema import arrow_type, update_schema
from tidemill.spark.decode.build import command_table
from tidemill.spark.decode.records import Records
from tidemill.spark.upsert.commands import Commands

DEAD_LETTERS = ShardSchema(
    (
        Column("topic", "string"),
        Column("partition", "int32"),
        Column("offset", "int64"),
        Column("reason", "string"),
        Column("bytes", "binary"),
        Column("at", "timestamp"),
    ),
    ("topic", "partition", "offset"),
)
"""`at` is the record's tidemill time, so that every writer says the same."""

DEAD_BYTES_MAX = 64 << 10
"""A dead letter keeps at most this much of the record."""


_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_MICROSECOND = datetime.timedelta(microseconds=1)


def _sized(bits: int) -> Any:
    return Annotated[int, msgspec.Meta(ge=-(2 ** (bits - 1)), le=2 ** (bits - 1) - 1)] | None


_FIELDS: dict[str, Any] = {
    "string": str | None,
    "bool": bool | None,
    "int16": _sized(16),
    "int32": _sized(32),
    "int64": _sized(64),
    "float32": float | None,
    "float64": float | None,
    "date": datetime.date | None,
    "timestamp": datetime.datetime | int | None,
    "json": msgspec.Raw | None,
}


class StreamDecoder:
    def __init__(self, schema: ShardSchema) -> None:
        self.schema = schema
        self._columns = schema.columns
        self._key_at = [i for i, c in enumerate(schema.columns) if c.name in schema.key]
        self._key_columns = [schema.columns[i] for i in self._key_at]
        self._value: msgspec.json.Decoder[Any] = msgspec.json.Decoder(_struct(schema.columns))
        self._key: msgspec.json.Decoder[Any] = msgspec.json.Decoder(_struct(tuple(self._key_columns)))
        self._one_key = len(self._key_columns) == 1

    def decode(self, records: Records) -> tuple[Commands, pa.Table]:
        """(commands, dead letters as updates of DEAD_LETTERS)."""
        rows: list[Any] = []
        live_at: list[int] = []
        keys: list[Any] = []
        absent_at: list[int] = []
        dead: list[tuple[int, str]] = []
        decode = self._value.decode
        key_fields = [f"c{i}" for i in self._key_at]
        for at, value in enumerate(records.values):
            try:
                if value is not None:
                    row = decode(value)
                    if any(getattr(row, name) is None for name in key_fields):
                        raise ValueError("a key column is null or absent")
                    rows.append(row)
                    live_at.append(at)
                else:
                    keys.append(self._key_of(records.keys[at]))
                    absent_at.append(at)
            except (msgspec.MsgspecError, ValueError) as error:
                dead.append((at, str(error)))
        live, live_at = self._arrays(self._columns, rows, live_at, dead)
        absent, absent_at = self._arrays(tuple(self._key_columns), keys, absent_at, dead)
        table = command_table(
            self.schema,
            live,
            np.array(live_at, dtype=np.int64),
            absent,
            np.array(absent_at, dtype=np.int64),
            records.offsets,
            records.times,
            records.partition,
        )
        return Commands(table), dead_letters(records, sorted(dead))

    def _key_of(self, key: bytes | None) -> Any:
        """A struct with fields c0… of the key columns. Raises ValueError or MsgspecError."""
        if key is None:
            raise ValueError("a deletion without a key")
        if self._one_key and self._key_columns[0].type == "string":
            try:
                return self._key.decode(msgspec.json.encode({self._key_columns[0].name: key.decode()}))
            except UnicodeDecodeError as error:
                raise ValueError("the key of a deletion is not UTF-8") from error
        if self._one_key and not key.lstrip().startswith(b"{"):
            key = b'{"' + self._key_columns[0].name.encode() + b'":' + key + b"}"
        found = self._key.decode(key)
        if any(getattr(found, f"c{i}") is None for i in range(len(self._key_columns))):
            raise ValueError("a key column of a deletion is null or absent")
        return found

    def _arrays(
        self, columns: tuple[Column, ...], rows: list[Any], places: list[int], dead: list[tuple[int, str]]
    ) -> tuple[dict[str, pa.Array], list[int]]:
        """Columns of the rows; rows with a value that no Arrow array can hold join the dead."""
        while True:
            out: dict[str, pa.Array] = {}
            bad: dict[int, str] = {}
            for i, column in enumerate(columns):
                name = f"c{i}"
                values = [getattr(row, name) for row in rows]
                try:
                    out[column.name] = _array(values, column)
                except (pa.ArrowException, ValueError, OverflowError):
                    for at, value in enumerate(values):
                        try:
                            _array([value], column)
                        except (pa.ArrowException, ValueError, OverflowError) as error:
                            bad.setdefault(at, f"{column.name}: {error}")
                    if not bad:
                        raise
            if not bad:
                return out, places
            dead += [(places[at], reason) for at, reason in bad.items()]
            rows = [row for at, row in enumerate(rows) if at not in bad]
            places = [place for at, place in enumerate(places) if at not in bad]


@lru_cache(maxsize=64)
def _struct(columns: tuple[Column, ...]) -> type:
    fields = [(f"c{i}", _FIELDS.get(c.type, Decimal | None), None) for i, c in enumerate(columns)]
    return msgspec.defstruct("Row", fields, rename={f"c{i}": c.name for i, c in enumerate(columns)}, gc=False)


def _array(values: list[Any], column: Column) -> pa.Array:
    if column.type == "timestamp":
        micros = [None if v is None else _timestamp_us(v) for v in values]
        return pa.array(micros, pa.int64()).cast(arrow_type(column.type))
    if column.type == "json":
        return pa.array([None if v is None else bytes(v).decode() for v in values], pa.string())
    return pa.array(values, arrow_type(column.type))


def _timestamp_us(value: datetime.datetime | int) -> int:
    """Integer milliseconds or a datetime, without zone taken as UTC."""
    if isinstance(value, int):
        return value * 1000
    aware = value.replace(tzinfo=datetime.UTC) if value.tzinfo is None else value
    return (aware - _EPOCH) // _MICROSECOND


def dead_letters(records: Records, dead: list[tuple[int, str]]) -> pa.Table:
    """Updates of the dead-letter shard for records at these places, each with its reason."""
    if not dead:
        return no_dead_letters()
    at = np.array([place for place, _ in dead], dtype=np.int64)
    raw = [records.values[place] if records.values[place] is not None else records.keys[place] for place, _ in dead]
    times = records.times[at]
    n = len(dead)
    arrays = [
        pa.array([records.topic] * n, pa.string()),
        pa.array([records.partition] * n, pa.int32()),
        pa.array(records.offsets[at], pa.int64()),
        pa.array([reason[:500] for _, reason in dead], pa.string()),
        pa.array([(data or b"")[:DEAD_BYTES_MAX] for data in raw], pa.binary()),
        pa.array(times * 1000, pa.int64()).cast(pa.timestamp("us", tz="UTC")),
        pa.array(times, pa.int64()),
        pa.array(np.ones(n, dtype=np.int64)),
    ]
    return pa.Table.from_arrays(arrays, schema=update_schema(DEAD_LETTERS))


@lru_cache(maxsize=1)
def no_dead_letters() -> pa.Table:
    return update_schema(DEAD_LETTERS).empty_table()
