"""Conversion of PostgreSQL's types and text output to shard columns and Arrow arrays. Pure. The casts
of `cli/verify/canonical_values` and the defaults of `schema_evolution` must agree with this mapping.

    smallint integer bigint      int16 int32 int64        oid                 int64
    boolean                      bool                     bytea               binary ('hex' output)
    real, double precision       float32, float64         date                date
    numeric(p,s), 0 ≤ s ≤ p ≤ 38 decimal(p,s)             json, jsonb         json (text, as PostgreSQL prints it)
    timestamp with time zone     timestamp                timestamp           timestamp_ntz; see
                                 `with_existing_timestamps`
    everything else              string, PostgreSQL's text unchanged (uuid, inet, interval, time, money,
                                 enums, arrays, ranges, unconstrained numeric, …)

Text is that of DateStyle 'ISO', bytea_output 'hex', extra_float_digits ≥ 1 (the settings of a replication session).

±infinity: timestamps ±(2⁶³−1) µs, dates ±(2³¹−1) days, as DuckDB represents them. Years BC and beyond 9999 are stored
as numbers (Arrow and Spark hold them, Python's datetime does not). NaN in numeric(p,s) has no decimal and raises
InvalidError.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from decimal import Decimal
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec.structs import replace

from tidemill.base.errors import InvalidError
from tidemill.base.pgtypes.text import has_zone, read_bytea, read_date, read_timestamp, read_timestamptz
from tidemill.shards.api import Column, ShardSchema
from tidemill.shards.parts.numbers import decimal_texts_to_arrow, decimals_to_arrow, is_infinite
from tidemill.shards.parts.schema import TIMESTAMPS, arrow_type, canonical_type

_PLAIN = {
    "smallint": "int16",
    "integer": "int32",
    "bigint": "int64",
    "oid": "int64",
    "boolean": "bool",
    "real": "float32",
    "double precision": "float64",
    "date": "date",
    "bytea": "binary",
    "json": "json",
    "jsonb": "json",
}
_NUMERIC = re.compile(r"numeric\((\d+),(-?\d+)\)")
_TIMESTAMP = re.compile(r"timestamp(?:\(\d\))?( with time zone| without time zone)?")

_DIGITS = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_INFINITY = "^[+-]?inf(inity)?$"

TIMESTAMP_INFINITY = 2**63 - 1
DATE_INFINITY = 2**31 - 1

_NIBBLES = np.full(256, 255, dtype=np.uint8)
_NIBBLES[list(b"0123456789")] = range(10)
_NIBBLES[list(b"abcdef")] = _NIBBLES[list(b"ABCDEF")] = range(10, 16)

_HEX_MARK = np.frombuffer(b"\\x", dtype=np.uint8)

T = TypeVar("T")


def column_for(name: str, type_name: str) -> Column:
    """Return the shard column of a PostgreSQL column; `type_name` is format_type's text, e.g. `numeric(12,2)`."""
    if type_name in _PLAIN:
        return Column(name, _PLAIN[type_name])
    found = _TIMESTAMP.fullmatch(type_name)
    if found:
        return Column(name, "timestamp" if found[1] == " with time zone" else "timestamp_ntz")
    found = _NUMERIC.fullmatch(type_name)
    if found:
        precision, scale = int(found[1]), int(found[2])
        if 1 <= precision <= 38 and 0 <= scale <= precision:
            return Column(name, f"decimal({precision},{scale})")
    return Column(name, "string")


def with_existing_timestamps(columns: Iterable[Column], have: ShardSchema) -> tuple[Column, ...]:
    """Return columns of a captured table as an existing shard stores them.

    A shard created before shards had `timestamp_ntz` has `timestamp` instead, its digits read as UTC, and retains it
    (RFC 0007).
    """
    instants = {c.name for c in have.columns if c.type == "timestamp"}
    return tuple(
        replace(c, type="timestamp") if c.type == "timestamp_ntz" and c.name in instants else c for c in columns
    )


def parse_column(values: Sequence[str | None], column: Column) -> pa.Array:
    """Parse PostgreSQL text (None = NULL) into one Arrow array of the column's type, vectorised where possible.

    Raises InvalidError with the column and the first value that is not of its type.
    """
    kind = canonical_type(column.type)
    if kind in ("string", "json"):
        return pa.array(values, pa.string())
    try:
        return cast_text(pa.array(values, pa.string()), kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return _parse_values(values, column, kind, arrow_type(kind))


def cast_text(text: pa.Array, kind: str) -> pa.Array:
    """Cast an Arrow array of text by columns, for ordinary values.

    Arrow's own parsers accept exactly what PostgreSQL prints for these. Raises ArrowInvalid or ArrowNotImplementedError
    if a value is not ordinary.
    """
    target = arrow_type(kind)
    if kind in ("string", "json"):
        return text
    if kind == "binary":
        return _parse_bytea(text)
    if kind == "bool":
        true, false = pc.equal(text, "t"), pc.equal(text, "f")
        if pc.any(pc.invert(pc.or_(true, false))).as_py():
            raise pa.ArrowInvalid("not a boolean")
        return true
    if kind == "timestamp":  # a `timestamp_ntz` takes one cast, which rejects a zone
        # If every value has a zone, Arrow applies it; if none has one, the digits are read as UTC.
        try:
            return text.cast(target)
        except pa.ArrowInvalid:
            return text.cast(pa.timestamp("us")).cast(target)
    if pa.types.is_decimal(target):
        return decimal_texts_to_arrow(text, target)
    found = text.cast(target)
    if pa.types.is_floating(target) and (beyond := is_infinite(found)).any():
        said = text.filter(pa.array(beyond))
        if not pc.all(pc.match_substring_regex(said, _INFINITY, ignore_case=True)).as_py():
            raise pa.ArrowInvalid(f"beyond a {kind}")
    return found


def _parse_bytea(text: pa.Array) -> pa.Array:
    _, offsets, data = text.buffers()
    places = np.frombuffer(offsets, dtype=np.int32)[text.offset : text.offset + len(text) + 1]
    begins, sizes = places[:-1], np.diff(places)
    present = np.flatnonzero(sizes) if text.null_count else slice(None)  # a null has no bytes
    digits = np.maximum(sizes - 2, 0)
    characters = np.frombuffer(data if data is not None else b"", dtype=np.uint8)
    marks = np.add.outer(begins[present], np.arange(2))
    if (
        np.count_nonzero(sizes > 1) != len(text) - text.null_count
        or (digits & 1).any()
        or (characters[marks] != _HEX_MARK).any()
    ):
        raise pa.ArrowInvalid("not in the hex format")
    kept = np.ones(int(places[-1]), dtype=bool)
    kept[: int(places[0])] = False
    kept[marks] = False
    nibbles = _NIBBLES[characters[: len(kept)][kept]]
    if (nibbles > 15).any():
        raise pa.ArrowInvalid("not in the hex format")
    ends = np.zeros(len(places), dtype=np.int32)
    np.cumsum(digits >> 1, out=ends[1:])
    joined = pa.py_buffer((nibbles[0::2] << 4) | nibbles[1::2])
    found = pa.Array.from_buffers(pa.binary(), len(text), [None, pa.py_buffer(ends), joined])
    return pc.if_else(text.is_valid(), found, None) if text.null_count else found


def _parse_values(values: Sequence[str | None], column: Column, kind: str, target: pa.DataType) -> pa.Array:
    """Parse value by value: finds the invalid one, and reads values that only PostgreSQL writes (infinity, BC, year
    10000).
    """
    if kind in TIMESTAMPS:
        read = _timestamp_us if kind == "timestamp" else _clock_us
        numbers = [None if v is None else _parse_value(read, v, column) for v in values]
        return pa.array(numbers, pa.int64()).view(target)
    if kind == "date":
        numbers = [None if v is None else _parse_value(_date_days, v, column) for v in values]
        return pa.array(numbers, pa.int32()).view(target)
    if kind == "binary":
        return pa.array([None if v is None else _parse_value(read_bytea, v, column) for v in values], target)
    if pa.types.is_decimal(target):
        return pa.concat_arrays(
            [
                pa.nulls(1, target) if v is None else _parse_value(lambda v: _decimal(v, target), v, column)
                for v in values
            ]
        )
    for value in values:
        if value is not None:
            _parse_value(lambda v: cast_text(pa.array([v], pa.string()), kind), value, column)
    raise InvalidError(f"values do not fit one array: column={column.name} type={column.type}.")


def _parse_value(parse: Callable[[str], T], value: str, column: Column) -> T:
    try:
        return parse(value)
    except (ValueError, pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise InvalidError(
            f"not a {column.type}: column={column.name} value={value[:80]!r}.",
            fix="Give the column a type that holds the value, or string.",
        ) from error


def _decimal(text: str, kind: pa.Decimal128Type) -> pa.Array:
    if _DIGITS.fullmatch(text) is None:
        raise ValueError("no digits")
    return decimals_to_arrow([Decimal(text)], kind)


def _number(value: int | float, infinity: int) -> int:
    if isinstance(value, float):
        return infinity if value > 0 else -infinity
    if abs(value) >= infinity:
        raise ValueError("out of range")
    return value


def _date_days(text: str) -> int:
    return _number(read_date(text), DATE_INFINITY)


def _timestamp_us(text: str) -> int:
    return _number(read_timestamptz(text), TIMESTAMP_INFINITY)


def _clock_us(text: str) -> int:
    """Parse a timestamp without a zone.

    PostgreSQL ignores a zone in such a text; here it is an error, so nothing is lost.
    """
    if has_zone(text):
        raise ValueError("it has a zone")
    return _number(read_timestamp(text), TIMESTAMP_INFINITY)
