"""Conversion of PostgreSQL's types and text output to shard columns and Arrow arrays. Pure. The casts
of `cli/verify/canonical_values` and the defaults of `schema_evolution` must agree with this mapping.

    smallint integer bigint      int16 int32 int64        oid                 int64
    boolean                      bool                     bytea               binary ('hex' output)
    real, double precision       float32, float64         date                date
    numeric(p,s), 0 ≤ s ≤ p ≤ 38 decimal(p,s)             json, jsonb         json (text, as PostgreSQL prints it)
    timestamp with time zone     timestamp                timestamp           timestamp_ntz; see
                                 `with_existing_types`
    array of a type above        array<…> of its type; of json, array<string>
    array of any other type      array<string> of the elements' text; `box[]` and others with another delimiter than
                                 the comma are string
    everything else              string, PostgreSQL's text unchanged (uuid, inet, interval, time, money, enums,
                                 composites, ranges, domains also over arrays, unconstrained numeric, …)

An array has one dimension; its lower bound is not stored. A value of more dimensions raises InvalidError. In a key, and
in a table without one, an array is a string.

Text is that of DateStyle 'ISO', bytea_output 'hex', extra_float_digits ≥ 1 (the settings of a replication session).

±infinity: timestamps ±(2⁶³−1) µs, dates ±(2³¹−1) days, as DuckDB represents them. Years BC and beyond 9999 are stored
as numbers (Arrow and Spark hold them, Python's datetime does not). NaN in numeric(p,s) has no decimal and raises
InvalidError.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from decimal import Decimal
from typing import Protocol, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec.structs import replace

from tidemill.base.errors import InvalidError
from tidemill.base.pgtypes.text import has_zone, read_bytea, read_date, read_timestamp, read_timestamptz
from tidemill.shards.api import Column, ShardSchema
from tidemill.shards.nested.pg_arrays import (
    DimensionsError,
    list_array,
    lists_of,
    map_elements,
    split_array,
    split_arrays,
)
from tidemill.shards.nested.type_names import ArrayType, array_name, is_nested, nested_type
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
_OTHER_DELIMITER = re.compile(r"(?:.*\.)?(?:box|geometry|geography)(?:\(.*\))?", re.DOTALL)
"""Types whose arrays are not delimited by commas: PostgreSQL's box (;), and those of PostGIS (:)."""

_DIGITS = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_INFINITY = "^[+-]?inf(inity)?$"

TIMESTAMP_INFINITY = 2**63 - 1
DATE_INFINITY = 2**31 - 1

_NIBBLES = np.full(256, 255, dtype=np.uint8)
_NIBBLES[list(b"0123456789")] = range(10)
_NIBBLES[list(b"abcdef")] = _NIBBLES[list(b"ABCDEF")] = range(10, 16)

_HEX_MARK = np.frombuffer(b"\\x", dtype=np.uint8)

T = TypeVar("T")


class DescribedColumn(Protocol):
    """A column of a captured table. `type_name`: format_type's text; `key_index`: its place in the key, or −1."""

    @property
    def name(self) -> str: ...
    @property
    def type_name(self) -> str: ...
    @property
    def key_index(self) -> int: ...


def columns_for(described: Sequence[DescribedColumn], as_text: Collection[str] | None = ()) -> tuple[Column, ...]:
    """Return the shard columns of a captured table. `as_text`: arrays that are text; None = all."""
    keyed = any(c.key_index >= 0 for c in described)
    return tuple(
        column_for(
            c.name,
            c.type_name,
            arrays=keyed and c.key_index < 0 and as_text is not None and c.name not in as_text,
        )
        for c in described
    )


def column_for(name: str, type_name: str, *, arrays: bool = True) -> Column:
    """Return the shard column of a PostgreSQL column; `type_name` is format_type's text, e.g. `numeric(12,2)`.

    `arrays`: whether an array is one in the shard, too, or its text.
    """
    if type_name.endswith("[]"):
        kind = type_name.removesuffix("[]")
        if not arrays or _OTHER_DELIMITER.fullmatch(kind):
            return Column(name, "string")
        element = _scalar_type(kind)
        return Column(name, array_name("string" if element == "json" else element))
    return Column(name, _scalar_type(type_name))


def _scalar_type(type_name: str) -> str:
    if type_name in _PLAIN:
        return _PLAIN[type_name]
    found = _TIMESTAMP.fullmatch(type_name)
    if found:
        return "timestamp" if found[1] == " with time zone" else "timestamp_ntz"
    found = _NUMERIC.fullmatch(type_name)
    if found:
        precision, scale = int(found[1]), int(found[2])
        if 1 <= precision <= 38 and 0 <= scale <= precision:
            return f"decimal({precision},{scale})"
    return "string"


def with_existing_types(columns: Iterable[Column], have: ShardSchema) -> tuple[Column, ...]:
    """Return columns of a captured table as an existing shard stores them.

    timestamp    instead of `timestamp_ntz`, its digits read as UTC, in a shard of before that type (RFC 0007)
    string       instead of an array, its text, in a shard of before arrays or one that was declared so
    """
    held = {c.name: c.type for c in have.columns}
    return tuple(replace(c, type=held[c.name]) if _keeps_type(c, held.get(c.name, "")) else c for c in columns)


def _keeps_type(column: Column, held: str) -> bool:
    return (column.type, held) == ("timestamp_ntz", "timestamp") or (is_nested(column.type) and held == "string")


def has_other_forms(schema: ShardSchema) -> bool:
    """Return whether an existing shard may store a column of the schema with another type: `with_existing_types`."""
    return any(c.type == "timestamp_ntz" or is_nested(c.type) for c in schema.columns)


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


def element_type(kind: str) -> str:
    """Return the type of the elements of a canonical array type."""
    found = nested_type(kind)
    if not isinstance(found, ArrayType):
        raise InvalidError(f"PostgreSQL's text is not read as this type: type={kind}.", fix="Use an array of a scalar.")
    return found.element


def cast_text(text: pa.Array, kind: str) -> pa.Array:
    """Cast an Arrow array of text by columns, for ordinary values.

    Arrow's own parsers accept exactly what PostgreSQL prints for these. Raises ArrowInvalid or ArrowNotImplementedError
    if a value is not ordinary.
    """
    if is_nested(kind):
        lists, wrong = split_arrays(text)
        if wrong.any():
            raise pa.ArrowInvalid("not an array of one dimension")
        return map_elements(lists, lambda elements: cast_text(elements, element_type(kind)))
    target = arrow_type(kind)
    if kind in ("string", "json") or not len(text):
        return text.cast(target)
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
    if is_nested(kind):
        lists = [None if v is None else _parse_value(split_array, v, column) for v in values]
        counts, elements, valid = lists_of(lists)
        return list_array(counts, parse_column(elements, replace(column, type=element_type(kind))), valid)
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
    except DimensionsError as error:
        raise InvalidError(
            f"an array of more than one dimension: column={column.name} value={value[:80]!r}.",
            fix=f"Store the column as text: as_text={column.name!r} of the captured table in the pipeline's file.",
        ) from error
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
