"""Iceberg schemas of a table's schema versions: field ids, types, defaults, published names, and the name mapping.

    field id  as in shards/nested/field_ids.py; the ids of `_hash`, `_time` and `_diff` are in no schema

Files of tables with nested columns carry the ids, since some readers find fields within a column only by them. All
others carry none: readers find columns by the name mapping, which names every column of the files. Readers differ in
what they do about a column that the mapping lacks, hence the reserved ids.

The default of an added column stands for the values of older files. Format 2 has no defaults, and format 3 has none of
nested types, NaN, infinities and dates outside the years 1 to 9999 (`inexpressible`). Such a default is not published:
maintenance rewrites the files that lack the column (`oldest_version`), and the table is not published before that.

Names that Iceberg reserves for metadata columns are published with `_` appended, since some readers would return the
metadata.

Sources: the table specification, "Schemas and Data Types", "Default Values", "Column Projection".
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC
from functools import lru_cache, partial
from typing import Any

import msgspec
import pyarrow as pa

from tidemill.base.config.sections import LakeSection
from tidemill.shards.api import DIFF, HASH, TIME, Column, ShardSchema
from tidemill.shards.compaction.compaction import OldestVersion, any_version
from tidemill.shards.nested.field_ids import FIRST_ID, ids_within
from tidemill.shards.nested.type_names import ArrayType, MapType, is_nested, nested_type
from tidemill.shards.parts.schema import arrow_type
from tidemill.shards.parts.schema_evolution import default_value

FILE_COLUMNS = (HASH, TIME, DIFF)
"""Columns of every file that no schema names, in the order of their field ids."""

METADATA_COLUMNS = frozenset(
    {
        "_file", "_pos", "_deleted", "_spec_id", "_partition", "_change_type", "_change_ordinal",
        "_commit_snapshot_id", "_row_id", "_last_updated_sequence_number",
    }
)  # fmt: skip

MAPPING_PROPERTY = "schema.name-mapping.default"

_TYPES = {
    "bool": "boolean",
    "int16": "int",
    "int32": "int",
    "int64": "long",
    "float32": "float",
    "float64": "double",
    "string": "string",
    "json": "string",
    "binary": "binary",
    "date": "date",
    "timestamp": "timestamptz",
    "timestamp_ntz": "timestamp",
}


class Field(msgspec.Struct, frozen=True, rename="kebab", omit_defaults=True):
    """A column. `required` is always false: NOT NULL is a rule of the source, which may drop it.

    `type`: the name of a primitive type, or the object of a nested one.
    """

    id: int
    name: str
    required: bool
    type: Any
    doc: str = ""
    initial_default: Any = None
    write_default: Any = None


class Schema(msgspec.Struct, frozen=True, rename="kebab"):
    """One version of a table's schema; `schema_id` is the version."""

    type: str
    schema_id: int
    fields: tuple[Field, ...]


def field_id(schema: ShardSchema, name: str) -> int:
    return FIRST_ID + next(at for at, column in enumerate(schema.columns) if column.name == name)


def last_column_id(schema: ShardSchema) -> int:
    """Return the greatest id of a column, or of a field within one."""
    nested = [at for at, column in enumerate(schema.columns) if is_nested(column.type)]
    if not nested:
        return FIRST_ID + len(schema.columns) - 1
    ids = ids_within(nested[-1])
    _field_type(schema.columns[nested[-1]].type, ids)
    return next(ids) - 1


def _field_type(type_name: str, ids: Iterator[int]) -> Any:
    """Return the type as JSON has it."""
    kind = nested_type(type_name)
    if kind is None:
        return iceberg_type(type_name)
    if isinstance(kind, ArrayType):
        number = next(ids)
        element = _field_type(kind.element, ids)
        return {"type": "list", "element-id": number, "element": element, "element-required": False}
    if isinstance(kind, MapType):
        key, value = next(ids), next(ids)
        return {
            "type": "map", "key-id": key, "key": _field_type(kind.key, ids), "value-id": value,
            "value": _field_type(kind.value, ids), "value-required": False,
        }  # fmt: skip
    numbers = [next(ids) for _ in kind.fields]
    return {
        "type": "struct",
        "fields": [
            {"id": number, "name": name, "required": False, "type": _field_type(inner, ids)}
            for number, (name, inner) in zip(numbers, kind.fields, strict=True)
        ],
    }


def iceberg_type(type_name: str) -> str:
    """Return the name of a primitive type."""
    if type_name in _TYPES:
        return _TYPES[type_name]
    kind = arrow_type(type_name)
    return f"decimal({kind.precision}, {kind.scale})"


@lru_cache(maxsize=1024)
def published_names(schema: ShardSchema) -> dict[str, str]:
    """Return the published name by column name. Names are distinct."""
    taken = {column.name for column in schema.columns}
    found: dict[str, str] = {}
    for column in schema.columns:
        name = column.name
        if name in METADATA_COLUMNS:
            while name in taken or name in METADATA_COLUMNS:
                name += "_"
            taken.add(name)
        found[column.name] = name
    return found


def publish_schema(schema: ShardSchema, version: int) -> Schema:
    """Return the Iceberg schema of format `version`. No file may lack a column that is `inexpressible`."""
    names = published_names(schema)
    fields = tuple(
        _publish_column(column, FIRST_ID + at, names[column.name], version) for at, column in enumerate(schema.columns)
    )
    return Schema("struct", schema.version, fields)


def _publish_column(column: Column, number: int, name: str, version: int) -> Field:
    default = default_json(column) if version >= 3 else None
    doc = f"absent in the source since schema version {column.retired}" if column.retired else ""
    kind = _field_type(column.type, ids_within(number - FIRST_ID))
    return Field(number, name, False, kind, doc, default, default)


def inexpressible(schema: ShardSchema, version: int) -> tuple[Column, ...]:
    """Return the columns with a default that format `version` cannot express."""
    return tuple(c for c in schema.columns if c.default is not None and (version < 3 or default_json(c) is None))


def oldest_version(schema: ShardSchema, version: int) -> int:
    """Return the schema version below which files lack a column that is `inexpressible`, or 0."""
    return max((column.version for column in inexpressible(schema, version)), default=0)


def oldest_versions(section: LakeSection) -> OldestVersion:
    """Return the function of a schema that gives the version below which maintenance rewrites files."""
    return partial(oldest_version, version=section.format) if section.enabled else any_version


def default_json(column: Column) -> Any:
    """Return the default of a column as the JSON value of its type; None if it has none, or no such value."""
    kind = arrow_type(column.type)
    if column.default is None or pa.types.is_nested(kind):
        return None  # readers of Iceberg have no defaults of nested types
    try:
        value = default_value(column).as_py()
        if pa.types.is_timestamp(kind):
            # A year beyond 9999 has no datetime, and raises.
            return value.astimezone(UTC).isoformat() if kind.tz else value.isoformat()
        if pa.types.is_date(kind):
            return value.isoformat()
    except (OverflowError, ValueError):
        return None
    if pa.types.is_decimal(kind):
        return f"{value:f}"
    if pa.types.is_binary(kind):
        return value.hex()
    if pa.types.is_floating(kind) and value - value != 0:
        return None  # NaN and infinities
    return value


def name_mapping(schema: ShardSchema) -> str:
    """Return the name mapping: every column of the files, with its id, as JSON."""
    entries: list[dict[str, Any]] = [
        {"field-id": number, "names": [name]} for number, name in enumerate(FILE_COLUMNS, 1)
    ]
    for at, column in enumerate(schema.columns):
        kind = _field_type(column.type, ids_within(at))
        entries.append(_mapped(FIRST_ID + at, column.name, kind))
    return json.dumps(entries, separators=(",", ":"))


def _mapped(number: int, name: str, kind: Any) -> dict[str, Any]:
    """Return the mapping of a field and of all fields within it, which have their names in the files."""
    entry: dict[str, Any] = {"field-id": number, "names": [name]}
    if isinstance(kind, str):
        return entry
    if kind["type"] == "struct":
        inner = [(field["id"], field["name"], field["type"]) for field in kind["fields"]]
    else:
        parts = ("element",) if kind["type"] == "list" else ("key", "value")
        inner = [(kind[f"{part}-id"], part, kind[part]) for part in parts]
    return entry | {"fields": [_mapped(*each) for each in inner]}
