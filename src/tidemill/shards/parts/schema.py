"""Mapping of ShardSchema to Arrow: the meaning of type strings, and the order of columns in a stored part.

    type string      Arrow                     remarks
    bool             bool
    int16 … int64    int16 … int64
    float32 float64  float, double
    string           string                    (never large_string: Spark rejects it)
    json             string                    text of one JSON value, unparsed
    binary           binary
    date             date32
    timestamp        timestamp(us, UTC)        the spelling `timestamp(us, UTC)` is accepted, too
    timestamp_ntz    timestamp(us)             local date and time without a zone (RFC 0007)
    decimal(p,s)     decimal128(p, s)          1 ≤ p ≤ 38, 0 ≤ s ≤ p
    array<T>         list<element: T>          grammar and limits of nested types: shards/nested/type_names.py
    struct<a:T,b:U>  struct<a: T, b: U>
    map<K,V>         map<K, V>                 entries in ascending order of their keys

Stored order: columns, `_time` int64 (ms), `_diff` int64, `_hash` uint64. All columns are nullable on disk: NOT NULL is
a rule of the source, and a source may drop it. Permitted changes of a schema: `schema_evolution`.
"""

from __future__ import annotations

import re
from functools import lru_cache

import pyarrow as pa

from tidemill.base.errors import InvalidError
from tidemill.shards.api import DIFF, HASH, TIME, Column, ShardSchema
from tidemill.shards.nested.type_names import ArrayType, MapType, canonical_nested, is_nested, nested_type
from tidemill.shards.nested.values import contains_map, inner_fields, normalize_maps
from tidemill.shards.parts.numbers import rescale_decimals

FLOATS = ("float32", "float64")

_PLAIN: dict[str, pa.DataType] = {
    "bool": pa.bool_(),
    "int16": pa.int16(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "float32": pa.float32(),
    "float64": pa.float64(),
    "string": pa.string(),
    "json": pa.string(),
    "binary": pa.binary(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "timestamp_ntz": pa.timestamp("us"),
}
TIMESTAMPS = frozenset({"timestamp", "timestamp_ntz"})
_SPARK_TYPES = (
    (pa.int8(), pa.int16()),
    (pa.large_string(), pa.string()),
    (pa.large_binary(), pa.binary()),
)
_DECIMAL = re.compile(r"decimal\(\s*(\d+)\s*,\s*(\d+)\s*\)")
_TIMESTAMP = re.compile(r"timestamp\(\s*us\s*,\s*utc\s*\)", re.IGNORECASE)
_RESERVED = frozenset({TIME, DIFF, HASH, "_order", "_partition", "_live", "_tm.unchanged", "_tm.key"})
"""Names of the additional columns of parts, of commands, and of streams of a table's records."""
_BUCKETS_MAX = 4096


def canonical_type(type_name: str) -> str:
    """Return the canonical spelling of a type string. Raises InvalidError for a type that shards do not have."""
    if type_name in _PLAIN:
        return type_name
    if is_nested(type_name):
        return canonical_nested(type_name, canonical_type)
    if _TIMESTAMP.fullmatch(type_name):
        return "timestamp"
    found = _DECIMAL.fullmatch(type_name)
    if found:
        precision, scale = int(found[1]), int(found[2])
        if 1 <= precision <= 38 and scale <= precision:
            return f"decimal({precision},{scale})"
    raise InvalidError(
        f"no such column type: type={type_name!r}.",
        fix=f"Use one of {' '.join(sorted(_PLAIN))} decimal(p,s) array<…> struct<…> map<…>.",
    )


def arrow_type(type_name: str) -> pa.DataType:
    """Return the Arrow type of a type string. Raises InvalidError."""
    name = canonical_type(type_name)
    return _canonical_arrow_type(name)


@lru_cache(maxsize=1024)
def _canonical_arrow_type(name: str) -> pa.DataType:
    if name in _PLAIN:
        return _PLAIN[name]
    kind = nested_type(name)
    if isinstance(kind, ArrayType):
        return pa.list_(pa.field("element", _canonical_arrow_type(kind.element)))
    if isinstance(kind, MapType):
        return pa.map_(_canonical_arrow_type(kind.key), _canonical_arrow_type(kind.value))
    if kind is not None:
        return pa.struct([pa.field(field, _canonical_arrow_type(inner)) for field, inner in kind.fields])
    found = _DECIMAL.fullmatch(name)
    assert found is not None
    return pa.decimal128(int(found[1]), int(found[2]))


def check_schema(schema: ShardSchema, *, defaults: bool = False) -> ShardSchema:
    """Return the schema as version 1, with canonical type strings. Raises InvalidError that names the wrong column.

    `defaults`: keep those of the columns, for a shard to which they are added. The columns of a new shard need none.
    """
    if not schema.columns:
        raise InvalidError("a table needs at least one column.", fix="Name its columns.")
    seen: set[str] = set()
    columns = []
    for column in schema.columns:
        check_name(column.name)
        if column.name in seen:
            raise InvalidError(f"column named twice: column={column.name}.", fix="Name each column once.")
        seen.add(column.name)
        columns.append(Column(column.name, canonical_type(column.type), column.default if defaults else None))
    for name in schema.key:
        if name not in seen:
            raise InvalidError(f"key column is not a column: key={name}.", fix="Name only columns of the table.")
    for column in columns:
        if is_nested(column.type) and (column.name in schema.key or not schema.key):
            raise InvalidError(
                f"a column of a nested type cannot be part of a key: column={column.name} type={column.type}.",
                fix="Use a key of scalar columns, for example of the fields that identify the row.",
            )
    if len(set(schema.key)) != len(schema.key):
        raise InvalidError(f"key names a column twice: key={','.join(schema.key)}.", fix="Name each key column once.")
    if not 1 <= schema.buckets <= _BUCKETS_MAX:
        raise InvalidError(f"bad bucket count: buckets={schema.buckets}.", fix=f"Use 1 to {_BUCKETS_MAX}.")
    return ShardSchema(tuple(columns), tuple(schema.key), schema.buckets)


def check_name(name: str) -> None:
    """Raise InvalidError if no column of a shard may have this name."""
    if not name or name in _RESERVED:
        raise InvalidError(f"reserved column name: column={name!r}.", fix="Rename the column.")


def describe_difference(have: ShardSchema, want: ShardSchema) -> str:
    """Describe the difference for people, or return "" if the two are the same."""
    out = []
    old = {c.name: c.type for c in have.columns}
    new = {c.name: c.type for c in want.columns}
    retired = {c.name for c in have.columns if c.retired}
    out += [f"-{name} {kind}" for name, kind in old.items() if name not in new and name not in retired]
    out += [f"+{name} {kind}" for name, kind in new.items() if name not in old]
    out += [f"{n} {old[n]}→{new[n]}" for n in old if n in new and old[n] != new[n]]
    if not out and [n for n in old if n in new or n not in retired] != list(new):
        out.append("column order")
    if have.key != want.key:
        out.append(f"key ({','.join(have.key)})→({','.join(want.key)})")
    if have.buckets != want.buckets:
        out.append(f"buckets {have.buckets}→{want.buckets}")
    return ", ".join(out)


@lru_cache(maxsize=256)
def contents_schema(schema: ShardSchema) -> pa.Schema:
    """Return the Arrow schema of contents: the shard's columns only."""
    return pa.schema([pa.field(c.name, arrow_type(c.type)) for c in schema.columns])


@lru_cache(maxsize=256)
def update_schema(schema: ShardSchema) -> pa.Schema:
    """Return the Arrow schema of updates: columns, `_time`, `_diff`."""
    return contents_schema(schema).append(pa.field(TIME, pa.int64())).append(pa.field(DIFF, pa.int64()))


@lru_cache(maxsize=256)
def part_schema(schema: ShardSchema) -> pa.Schema:
    """Return the Arrow schema of a stored part: columns, `_time`, `_diff`, `_hash`."""
    return update_schema(schema).append(pa.field(HASH, pa.uint64()))


def hash_columns(schema: ShardSchema) -> tuple[str, ...]:
    """Return the columns covered by `_hash`: the key, or without a key every column of schema version 1.

    So a row has one hash under every version, and a retraction meets its insertion.
    """
    return schema.key or tuple(c.name for c in schema.columns if c.version == 1)


def conform_rows(rows: pa.Table, target: pa.Schema) -> pa.Table:
    """Return `rows` with exactly the columns, order and types of `target`. Raises InvalidError that names the column.

    Casts are safe ones only (int32 → int64, but InvalidError for a value that does not fit). A timestamp with a zone is
    not cast to one without, or back, although Arrow would. Within nested values only the types are cast that Spark
    has for the same values. Maps get their normal form.
    """
    columns = []
    for field in target:
        index = rows.schema.get_field_index(field.name)
        if index < 0:
            raise InvalidError(f"rows lack a column: column={field.name}.", fix="Provide every column of the table.")
        column = rows.column(index)
        if not column.type.equals(field.type):
            try:
                if pa.types.is_nested(field.type) and not _has_same_values(column.type, field.type):
                    raise pa.ArrowInvalid("nested types are not cast")
                if pa.types.is_timestamp(field.type) and bool(field.type.tz) != bool(getattr(column.type, "tz", "")):
                    raise pa.ArrowInvalid("only one of the two has a zone")
                both = pa.types.is_decimal(field.type) and pa.types.is_decimal(column.type)
                column = rescale_decimals(column, field.type) if both else column.cast(field.type)
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
                raise InvalidError(
                    f"column does not fit: column={field.name} type={field.type} got={column.type} ({error}).",
                    fix="Cast the column before writing it.",
                ) from error
        columns.append(_with_normal_maps(field, column) if contains_map(field.type) else column)
    return pa.Table.from_arrays(columns, schema=target)


def _has_same_values(have: pa.DataType, want: pa.DataType) -> bool:
    """Return whether two types differ at most in nullability, in the names of elements, keys and values, and as
    `_is_spark_type_of` permits."""
    if not pa.types.is_nested(want) or have.id != want.id:
        return bool(have.equals(want)) or _is_spark_type_of(have, want)
    inner = list(zip(inner_fields(have), inner_fields(want), strict=False))
    alike = have.num_fields == want.num_fields and all(_has_same_values(a.type, b.type) for a, b in inner)
    return alike and (not pa.types.is_struct(want) or all(a.name == b.name for a, b in inner))


def _is_spark_type_of(have: pa.DataType, want: pa.DataType) -> bool:
    """Return whether Spark may pass values of the type `want` as `have`: instants with the session's zone, TINYINT, and
    large offsets (`spark.sql.execution.arrow.useLargeVarTypes`)."""
    if pa.types.is_timestamp(have) and pa.types.is_timestamp(want):
        return have.unit == want.unit and bool(have.tz) and bool(want.tz)
    return (have, want) in _SPARK_TYPES


def _with_normal_maps(field: pa.Field, column: pa.ChunkedArray) -> pa.ChunkedArray:
    try:
        return pa.chunked_array([normalize_maps(chunk) for chunk in column.chunks], field.type)
    except ValueError as error:
        raise InvalidError(
            f"column does not fit: column={field.name} ({error}).", fix="Write each key of a map once."
        ) from error
