"""Columns of a captured table, as clients and the where evaluator need them, read from the catalog.

The columns are those of capture's relation (what the stream will carry). The catalog adds type names, modifiers, array
dimensions, the encoding, and whether the collation orders by code points.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from tidemill.base.errors import MissingError
from tidemill.capture.catalog.schema_versions import classify_type_change
from tidemill.capture.changes import Column, Relation
from tidemill.capture.postgres.connection import from_clause_name
from tidemill.shapes.where import Type
from tidemill.shapes.where.encodings import CODE_POINT_ORDERED
from tidemill.shapes.where.types import UTF8, Folding

_ORDERED_ENCODINGS = ", ".join(f"'{name}'" for name in sorted(CODE_POINT_ORDERED))

DESCRIBE_SQL = f"""
WITH d AS (SELECT to_jsonb(p) AS j FROM pg_database p WHERE datname = current_database())
SELECT a.attname::text,
       CASE WHEN et.oid IS NULL THEN bt.typname ELSE et.typname END::text AS type_name,
       CASE WHEN et.oid IS NULL THEN bt.typtype ELSE et.typtype END::text AS type_kind,
       CASE WHEN et.oid IS NULL THEN 0 ELSE greatest(a.attndims, 1) END AS dimensions,
       CASE WHEN t.typtype = 'd' THEN t.typtypmod ELSE a.atttypmod END AS type_mod,
       a.attnotnull,
       CASE WHEN c.collname IS NULL THEN true
            WHEN getdatabaseencoding() NOT IN ({_ORDERED_ENCODINGS}) THEN false
            WHEN c.collname = 'default'
            THEN coalesce(d.j->>'datlocprovider', 'c') = 'c' AND d.j->>'datcollate' ~* '^(C|POSIX|C.UTF-?8)$'
                 OR d.j->>'datlocprovider' = 'b'
            ELSE c.collname IN ('C', 'POSIX', 'ucs_basic', 'pg_c_utf8') END AS ordered,
       coalesce((to_jsonb(c)->>'collisdeterministic')::boolean, true) AS deterministic,
       CASE WHEN f.provider = 'i' OR (f.provider = 'b' AND f.locale = 'PG_UNICODE_FAST') THEN 'full'
            WHEN f.locale ~* '^(C|POSIX)$' THEN 'ascii'
            ELSE 'simple' END AS folding,
       (SELECT relkind = 'p' FROM pg_class WHERE oid = a.attrelid) AS partitioned,
       (SELECT array_agg(enumlabel::text ORDER BY enumsortorder)
        FROM pg_enum WHERE enumtypid = coalesce(et.oid, bt.oid)) AS labels,
       CASE WHEN c.collname <> 'default' THEN a.attcollation::regcollation::text ELSE '' END AS collation,
       getdatabaseencoding()::text AS encoding
FROM pg_attribute a
JOIN pg_type t ON t.oid = a.atttypid
JOIN pg_type bt ON bt.oid = CASE WHEN t.typtype = 'd' THEN t.typbasetype ELSE t.oid END
LEFT JOIN pg_type et ON et.oid = bt.typelem AND bt.typcategory = 'A'
LEFT JOIN pg_collation c ON c.oid = a.attcollation
CROSS JOIN d
CROSS JOIN LATERAL (
    SELECT CASE WHEN c.collname = 'default' THEN coalesce(d.j->>'datlocprovider', 'c')
                ELSE to_jsonb(c)->>'collprovider' END AS provider,
           CASE WHEN c.collname = 'default' THEN coalesce(d.j->>'datlocale', d.j->>'datctype')
                ELSE coalesce(to_jsonb(c)->>'colllocale', c.collctype::text) END AS locale
) f
WHERE a.attrelid = %s AND a.attnum > 0 AND NOT a.attisdropped
"""

PRESENT_SQL = """
SELECT attname::text, attgenerated <> '', atttypid::bigint, atttypmod FROM pg_attribute
WHERE attrelid = %s AND attnum > 0 AND NOT attisdropped
"""
"""Selects the columns that a table has now, as PresentColumn by name."""

_TIMES = frozenset({"time", "timetz", "timestamp", "timestamptz"})
_INTERVAL_FIELDS = (("YEAR", 2), ("MONTH", 1), ("DAY", 3), ("HOUR", 10), ("MINUTE", 11), ("SECOND", 12))


class ColumnInfo(msgspec.Struct, frozen=True):
    """One row of DESCRIBE_SQL. `partitioned`: whether its table is. `labels`: those of an enum, in order. `collation`,
    `encoding`: as in Type."""

    name: str
    type_name: str
    type_kind: str
    dimensions: int
    type_mod: int
    not_null: bool
    ordered: bool
    deterministic: bool
    folding: Folding = "simple"
    partitioned: bool = False
    labels: list[str] | None = None
    collation: str = ""
    encoding: str = UTF8

    @property
    def where_type(self) -> Type:
        if not self.deterministic:
            name = f"{self.type_name} with a nondeterministic collation"
            return Type(name, self.dimensions > 0, encoding=self.encoding)
        name = "enum" if self.type_kind == "e" else self.type_name
        labels = tuple(self.labels or ())
        return Type(
            name, self.dimensions > 0, self.ordered, self.folding, labels,
            collation=self.collation, encoding=self.encoding,
        )  # fmt: skip


class TableColumns(msgspec.Struct, frozen=True):
    relation: Relation
    columns: tuple[ColumnInfo, ...]
    """The columns, in the relation's order."""

    @property
    def scope(self) -> str:
        """The table's name for FROM and LOCK."""
        whole = any(column.partitioned for column in self.columns)
        return from_clause_name(self.relation.schema, self.relation.table, partitioned=whole)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(column.name for column in self.columns)

    @property
    def key(self) -> tuple[str, ...]:
        return tuple(column.name for column in self.relation.key_columns)

    @property
    def booleans(self) -> tuple[str, ...]:
        return tuple(c.name for c in self.columns if c.type_name == "bool" and not c.dimensions)

    def where_types(self) -> dict[str, Type]:
        return {column.name: column.where_type for column in self.columns}

    def schema_json(self, shown: tuple[str, ...]) -> bytes:
        """Return the electric-schema header: column → type, dims and modifiers. ASCII only, since it is an HTTP
        header."""
        key = {name: index for index, name in enumerate(self.key)}
        schema = {c.name: _column_schema(c, key.get(c.name)) for c in self.columns if not shown or c.name in shown}
        return json.dumps(schema, separators=(",", ":")).encode()


class PresentColumn(NamedTuple):
    """A column of a table that is captured, as the database has it now."""

    generated: bool
    type_oid: int
    type_mod: int


def read_present_columns(rows: Iterable[Sequence[Any]]) -> dict[str, PresentColumn]:
    """Return the rows of PRESENT_SQL by name."""
    return {name: PresentColumn(*column) for name, *column in rows}


def changed_columns(relation: Relation, present: Mapping[str, PresentColumn], *, exact: bool = True) -> list[str]:
    """Return the names of the relation's columns that the table lacks now, or has with another type. Without `exact`, a
    wider type is no other one: it has the same values. The columns of a relation that an older tidemill stored have no
    types.
    """

    def is_changed(column: Column) -> bool:
        found = present.get(column.name)
        if found is None or not column.type_oid:
            return found is None
        former, now = (column.type_oid, column.type_mod), (found.type_oid, found.type_mod)
        return former != now and (exact or not classify_type_change(former, now)[0])

    return [column.name for column in relation.columns if is_changed(column)]


def build_table_columns(relation: Relation, rows: list[ColumnInfo]) -> TableColumns:
    """Combine a relation with the catalog's rows. Raises MissingError if the catalog lacks columns of the relation."""
    by_name = {row.name: row for row in rows}
    missing = [column.name for column in relation.columns if column.name not in by_name]
    if missing:
        raise MissingError(f"the table was dropped or lost columns: table={relation.name} columns={','.join(missing)}.")
    return TableColumns(relation, tuple(by_name[column.name] for column in relation.columns))


def _column_schema(column: ColumnInfo, key_index: int | None) -> dict[str, object]:
    """Return a column's schema. Arrays omit `not_null`: the published client applies it to their elements, and rejects
    rows with a NULL element."""
    schema: dict[str, object] = {"type": column.type_name, "dims": column.dimensions}
    if key_index is not None:
        schema["pk_index"] = key_index
    if column.not_null and not column.dimensions:
        schema["not_null"] = True
    return schema | _type_modifiers(column.type_name, column.type_mod)


def _type_modifiers(name: str, mod: int) -> dict[str, object]:
    """Decode pg_attribute.atttypmod by type: lengths include 4 bytes of header, numeric packs two numbers."""
    if mod < 0:
        return {}
    if name == "varchar":
        return {"max_length": mod - 4}
    if name == "bpchar":
        return {"length": mod - 4}
    if name in ("bit", "varbit"):
        return {"length": mod}
    if name == "numeric":
        packed = mod - 4
        return {"precision": (packed >> 16) & 0xFFFF, "scale": ((packed & 0x7FF) ^ 0x400) - 0x400}
    if name in _TIMES:
        return {"precision": mod}
    if name == "interval":
        return _interval_modifiers(mod)
    return {}


def _interval_modifiers(mod: int) -> dict[str, object]:
    fields_mask, precision = (mod >> 16) & 0x7FFF, mod & 0xFFFF
    out: dict[str, object] = {} if precision == 0xFFFF else {"precision": precision}
    if fields_mask != 0x7FFF:
        units = [unit for unit, bit in _INTERVAL_FIELDS if fields_mask >> bit & 1]
        out["fields"] = units[0] if len(units) == 1 else f"{units[0]} TO {units[-1]}"
    return out
