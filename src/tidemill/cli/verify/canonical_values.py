"""One plain Python value per cell, the same for both sides, reached on two different ways.

    shard column            canonical           from PostgreSQL, by SQL                  from the shard, by Arrow
    bool, ints              bool, int           the column                               the column
    float32, float64        float or NAN        ::float8 (binary transfer)               widened to float64
    decimal(p,s)            Decimal             the column                               the column
    timestamp, timestamp_ntz  int µs            extract(epoch) × 10⁶; ±(2⁶³−1) = ±∞      view as int64
    date                    int days            minus 1970-01-01; ±(2³¹−1) = ±∞          view as int32
    binary                  bytes               the column                               the column
    string, json            str                 the type's output text                   the column
    array of scalars        str: as JSON        an array of the elements as above        the elements as above
    other nested types      str: as JSON        none                                     the scalars inside as above

-0.0 becomes 0.0, except within a nested value, where the two differ. Order: numbers by value, text and bytes bytewise,
null last.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa

from tidemill.capture.postgres.connection import identifier
from tidemill.cli.verify.compare import NAN, Row
from tidemill.shards.api import Column, ShardSchema
from tidemill.shards.nested.type_names import is_nested
from tidemill.shards.nested.values import map_leaf_types
from tidemill.shards.parts.pg_columns import DATE_INFINITY, TIMESTAMP_INFINITY, element_type
from tidemill.shards.parts.schema import FLOATS, TIMESTAMPS, canonical_type


def ordered_columns(schema: ShardSchema) -> tuple[Column, ...]:
    """Return the columns in the order of values in a row: the key's columns in key order, then the others."""
    by_name = {c.name: c for c in schema.columns}
    return tuple(by_name[k] for k in schema.key) + tuple(c for c in schema.columns if c.name not in schema.key)


def select_expression(column: Column) -> str:
    """Return SQL that yields the canonical value."""
    name = identifier(column.name)
    return _array_expression(name, column.type) if is_nested(column.type) else _scalar_expression(name, column.type)


def _array_expression(name: str, kind: str) -> str:
    """Return SQL that yields an array of canonical elements.

    `unnest` in FROM would return the fields of composites. An array of more than one dimension, which no table holds,
    yields its elements twice, so that it equals nothing.
    """
    element = _scalar_expression("e", element_type(canonical_type(kind)))
    elements = f"ARRAY(SELECT {element} FROM (SELECT unnest({name}) AS e) AS elements)"
    return (
        f"CASE WHEN {name} IS NULL THEN NULL WHEN array_ndims({name}) > 1 THEN {elements} || {elements}"
        f" ELSE {elements} END"
    )


def _scalar_expression(name: str, kind: str) -> str:
    if kind in TIMESTAMPS:
        # A timestamp without a zone is read as UTC; the session's TimeZone is UTC, so both kinds cast alike.
        # PostgreSQL's last days are beyond int64. No shard holds them, so any number that no row has will do.
        finite = f"least(extract(epoch FROM {name}::timestamptz) * 1000000, {TIMESTAMP_INFINITY - 1})::int8"
        return _with_infinity(name, finite, TIMESTAMP_INFINITY, "int8")
    if kind == "date":
        return _with_infinity(name, f"({name} - DATE '1970-01-01')::int8", DATE_INFINITY, "int8")
    if kind in ("float32", "float64"):
        return f"{name}::float8"
    if kind == "int64":
        return f"{name}::int8"  # applies to oid, too
    if kind in ("string", "json"):
        return _text_expression(name)
    return name


def order_expression(column: Column) -> str:
    """Return SQL that sorts as the canonical value does."""
    name = identifier(column.name)
    return f'{_text_expression(name)} COLLATE "C"' if column.type in ("string", "json") else name


def _text_expression(name: str) -> str:
    """Return SQL for the text of the output function, as the stream carries it. A cast would trim char(n) and decorate
    inet. A composite whose fields are all null IS NULL, but is not null."""
    return f"CASE WHEN {name} IS NOT DISTINCT FROM NULL THEN NULL ELSE format('%s', {name}) END"


def _with_infinity(name: str, finite: str, infinity: int, kind: str) -> str:
    return (
        f"CASE WHEN {name} IS NULL THEN NULL WHEN isfinite({name}) THEN {finite}"
        f" WHEN {name} > 'epoch' THEN {infinity}::{kind} ELSE -{infinity}::{kind} END"
    )


def float_canonicalizer(columns: tuple[Column, ...]) -> Callable[[Row], Row] | None:
    """Return a function that makes the plain floats of a row canonical; None if no column is a float."""
    return _canonicalizer({i: _canonical_float for i, c in enumerate(columns) if c.type in FLOATS})


def source_canonicalizer(columns: tuple[Column, ...]) -> Callable[[Row], Row] | None:
    """Return a function that makes a row of `select_expression`s canonical; None if every row is."""
    floats = {i: _canonical_float for i, c in enumerate(columns) if c.type in FLOATS}
    return _canonicalizer(floats | {i: _nested_text for i, c in enumerate(columns) if is_nested(c.type)})


def _canonicalizer(by_place: Mapping[int, Callable[[Any], Any]]) -> Callable[[Row], Row] | None:
    if not by_place:
        return None

    def fix(row: Row) -> Row:
        values = list(row)
        for place, canonical in by_place.items():
            values[place] = canonical(values[place])
        return tuple(values)

    return fix


def _nested_text(value: Any) -> str | None:
    return None if value is None else json.dumps(value, default=_spell_scalar)


def canonical_column(column: pa.ChunkedArray, kind: Column) -> Any:
    """Return a shard column with its canonical integers, float64s or texts, still as Arrow (the spool stores it)."""
    if kind.type in TIMESTAMPS:
        return column.cast(pa.int64())
    if kind.type == "date":
        return column.cast(pa.int32())
    if kind.type == "float32":
        return column.cast(pa.float64())
    if is_nested(kind.type):
        values = column.cast(map_leaf_types(column.type, _canonical_type)).to_pylist()
        return pa.array(map(_nested_text, values), pa.string())
    return column


def _canonical_type(kind: pa.DataType) -> pa.DataType:
    """Return the type in which values within a nested one are compared. `_spell_scalar` prints decimals and bytes."""
    if pa.types.is_timestamp(kind):
        return pa.int64()
    if pa.types.is_date32(kind):
        return pa.int32()
    return pa.float64() if pa.types.is_float32(kind) else kind


def _spell_scalar(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)


def _canonical_float(value: float | None) -> Any:
    if value is None:
        return None
    return NAN if value != value else value + 0.0
