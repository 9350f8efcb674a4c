"""Topics written by capture → commands. These records are our own: one that cannot be read is Corrupt.

key      JSON object of the key columns
value    JSON object of all columns; numbers and booleans as such, else PostgreSQL's text; null = deletion
headers  tm.op = "truncate": every live key of the table is gone at this place
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from tidemill.base.errors import Corrupt, Invalid
from tidemill.shards.front import Column, ShardSchema
from tidemill.shards.pgtypes import parse_column
from tidemill.shards.schema import arrow_type
from tidemill.spark.decode.build import command_table
from tidemill.spark.decode.records import Records
from tidemill.spark.upsert.commands import Commands, Truncate

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


class CapturedDecoder:
    """Of one table. Columns that a record lacks are null; columns that the schema lacks are ignored."""

    def __init__(self, schema: ShardSchema) -> None:
        self.schema = schema
        self._key_columns = [c for c in schema.columns if c.name in schema.key]
        self._value = _decoder("Value", schema.columns)
        self._key = _decoder("Key", self._key_columns)

    def decode(self, records: Records) -> Commands:
        """All records as commands and truncations."""
        live_at: list[int] = []
        rows: list[Any] = []
        absent_at: list[int] = []
        keys: list[Any] = []
        truncates: list[Truncate] = []
        for at, value in enumerate(records.values):
            if value is not None:
                live_at.append(at)
                rows.append(self._read(self._value, value, records, at))
            elif records.headers[at] and dict(records.headers[at]).get(OP_HEADER) == TRUNCATE:
                truncates.append(Truncate(int(records.times[at]), records.partition, int(records.offsets[at])))
            elif records.keys[at] is not None:
                absent_at.append(at)
                keys.append(self._read(self._key, records.keys[at], records, at))
            else:
                raise Corrupt(f"record has neither key nor value: {_place(records, at)}.")
        table = command_table(
            self.schema,
            _held(self.schema.columns, rows, records),
            np.array(live_at, dtype=np.int64),
            _held(self._key_columns, keys, records),
            np.array(absent_at, dtype=np.int64),
            records.offsets,
            records.times,
            records.partition,
        )
        return Commands(table, tuple(truncates))

    @staticmethod
    def _read(decoder: msgspec.json.Decoder[Any], data: bytes | None, records: Records, at: int) -> Any:
        try:
            return decoder.decode(data or b"")
        except msgspec.MsgspecError as error:
            raise Corrupt(f"captured record is unreadable: {_place(records, at)} ({error}).") from error


def _place(records: Records, at: int) -> str:
    return f"topic={records.topic} partition={records.partition} offset={int(records.offsets[at])}"


def _decoder(name: str, columns: list[Column] | tuple[Column, ...]) -> msgspec.json.Decoder[Any]:
    """Into a struct with fields c0, c1, …: a column's name need not be a Python name."""
    fields = [(f"c{i}", _NATIVE.get(c.type, str | None), None) for i, c in enumerate(columns)]
    names = {f"c{i}": c.name for i, c in enumerate(columns)}
    return msgspec.json.Decoder(msgspec.defstruct(name, fields, rename=names, gc=False))


def _held(columns: list[Column] | tuple[Column, ...], rows: list[Any], records: Records) -> dict[str, pa.Array]:
    """As columns of the table. What PostgreSQL has and the table cannot hold is the data's fault, not the pipeline's:
    Corrupt, for Invalid would say that its configuration is wrong, and end everything beside it."""
    try:
        return _arrays(columns, rows)
    except Invalid as error:
        first, last = int(records.offsets[0]), int(records.offsets[-1])
        raise Corrupt(
            f"the table cannot hold a captured value: topic={records.topic} partition={records.partition}"
            f" offsets={first}..{last} {error.message}",
            fix="Correct the value and start the capture over; numeric without precision holds any.",
        ) from error


def _arrays(columns: list[Column] | tuple[Column, ...], rows: list[Any]) -> dict[str, pa.Array]:
    out = {}
    for i, column in enumerate(columns):
        field = f"c{i}"
        values = [getattr(row, field) for row in rows]
        if column.type not in _NATIVE:
            out[column.name] = parse_column(values, column)
            continue
        if any(type(v) is str for v in values):  # NaN, Infinity, an oid: text where JSON has no number
            values = [None if v is None else _text(v) for v in values]
            out[column.name] = parse_column(values, column)
        else:
            out[column.name] = pa.array(values, arrow_type(column.type))
    return out


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "t" if value else "f"
    return value if isinstance(value, str) else repr(value)
