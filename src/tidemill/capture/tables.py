"""What the database's catalogue says about tables: which exist, their columns, keys and types.

Generated columns are left out everywhere: the stream of PostgreSQL before 18 does not carry them.
Partitions are represented by their root (`publish_via_partition_root`).
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

import msgspec

from tidemill.base.errors import Invalid, Missing
from tidemill.capture.changes import Column, Relation
from tidemill.capture.wire.connection import Wire

_TABLES = """
SELECT c.oid, n.nspname, c.relname, c.relkind, c.relpersistence, c.relreplident,
       EXISTS (SELECT FROM pg_index i WHERE i.indrelid = c.oid AND i.indisprimary)
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE c.relkind IN ('r', 'p') AND NOT c.relispartition AND c.relpersistence <> 't'
   AND n.nspname NOT IN ('pg_catalog', 'information_schema', 'tidemill') AND n.nspname !~ '^pg_(toast|temp)'
 ORDER BY n.nspname, c.relname
"""

_COLUMNS = """
SELECT c.oid, n.nspname, c.relname, a.attname, a.atttypid, a.atttypmod,
       format_type(a.atttypid, a.atttypmod), coalesce(k.place - 1, -1), a.attnotnull
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
  JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated = ''
  LEFT JOIN pg_index i ON i.indrelid = c.oid AND i.indisprimary
  LEFT JOIN LATERAL unnest(i.indkey::int2[]) WITH ORDINALITY AS k(attnum, place) ON k.attnum = a.attnum
 WHERE c.oid IN ({oids})
 ORDER BY c.oid, a.attnum
"""


class TableInfo(msgspec.Struct, frozen=True):
    """`kind`: r table, p partitioned. `identity`: d default, n nothing, f full, i index."""

    oid: int
    schema: str
    table: str
    kind: str
    persistence: str
    identity: str
    has_key: bool

    @property
    def name(self) -> str:
        return f"{self.schema}.{self.table}"


async def list_tables(wire: Wire) -> list[TableInfo]:
    """Every ordinary and partitioned table, in name order, outside the system's schemas and our own: consensus may
    live in the same database, and capturing it would feed on itself."""
    rows = await wire.query(_TABLES)
    return [
        TableInfo(int(r[0] or 0), r[1] or "", r[2] or "", r[3] or "", r[4] or "", r[5] or "", r[6] == "t") for r in rows
    ]


def resolve(patterns: Sequence[str], tables: Sequence[TableInfo]) -> list[TableInfo]:
    """The tables that the patterns name, in name order. Raises Missing for a plain name or a pattern without a
    match, Invalid for a table that cannot be captured (no primary key, unlogged)."""
    chosen: dict[int, TableInfo] = {}
    excluded = [_with_schema(p[1:]) for p in patterns if p.startswith("!")]
    for pattern in (p for p in patterns if not p.startswith("!")):
        full = _with_schema(pattern)
        hits = [t for t in tables if t.name == full] or [t for t in tables if fnmatchcase(t.name, full)]
        if not hits:
            raise Missing(f"no such table: table={pattern}.", fix="Create it, or correct `tables` of this capture.")
        is_pattern = any(c in full for c in "*?[")
        for table in hits:
            if any(fnmatchcase(table.name, e) for e in excluded) or (is_pattern and table.persistence == "u"):
                continue
            chosen[table.oid] = table
    for table in chosen.values():
        if table.persistence == "u":
            raise Invalid(
                f"an unlogged table has no WAL: table={table.name}.", fix=f"ALTER TABLE {table.name} SET LOGGED."
            )
        if not table.has_key:
            raise Invalid(
                f"a captured table needs a primary key: table={table.name}.",
                fix=f'Add a primary key to {table.name}, or exclude it with "!{table.name}".',
            )
    if not chosen:
        raise Missing("the capture's patterns leave no table.", fix="Correct `tables` of this capture.")
    return sorted(chosen.values(), key=lambda t: t.name)


async def describe(wire: Wire, oids: Sequence[int]) -> dict[int, Relation]:
    """Columns and keys of tables by oid; a table that is gone is absent."""
    if not oids:
        return {}
    rows = await wire.query(_COLUMNS.format(oids=", ".join(str(int(oid)) for oid in oids)))
    names: dict[int, tuple[str, str]] = {}
    columns: dict[int, list[Column]] = {}
    for oid, schema, table, name, type_oid, type_mod, type_name, key_index, not_null in rows:
        relation = int(oid or 0)
        names[relation] = (schema or "", table or "")
        columns.setdefault(relation, []).append(
            Column(
                name=name or "",
                type_oid=int(type_oid or 0),
                type_mod=int(type_mod or "-1"),
                type_name=type_name or "",
                key_index=int(key_index or "-1"),
                not_null=not_null == "t",
            )
        )
    return {oid: Relation(oid, *names[oid], tuple(cols)) for oid, cols in columns.items()}


def _with_schema(pattern: str) -> str:
    return pattern if "." in pattern else f"public.{pattern}"
