"""Properties of a table's columns in the database's catalogue that the stream does not carry: their numbers, the value
of older rows that lack one, and the files of the rows.

    number     a rename preserves it; a column that was dropped and re-created has another one
    missing    ADD COLUMN with a constant default writes nothing: older rows are always read with this value
    storage    a different one: every row was rewritten (a volatile default, an ALTER TYPE, VACUUM FULL, TRUNCATE)
    types      component types of the columns: altering one writes no row, and old values read differently
    written    the transaction that last wrote a column's row in pg_attribute, as a rename or an ALTER TYPE does
    leaves     the tables that contain the rows: for a partitioned one its partitions, and what attached them
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from tidemill.capture.catalog.table_discovery import carried_kinds, is_key_carried
from tidemill.capture.catalog.type_dependencies import FIRST_USER_OID, read_component_types, serialize_type
from tidemill.capture.postgres.connection import PgConnection

_MISSING_SQL = r"""
CASE WHEN t.list LIKE '{"%' THEN regexp_replace(substr(t.list, 3, length(t.list) - 4), E'\\\\(.)', E'\\1', 'g')
     ELSE substr(t.list, 2, length(t.list) - 2) END
"""
"""The only element of the array t.list. A cast to text[] would split it at commas, but the delimiter is that of the
type, ';' for a box, and an element with commas is then not quoted.
"""

_ATTRIBUTES_SQL = """
WITH RECURSIVE tree(root, oid, attached) AS (
    SELECT c.oid, c.oid, NULL::xid FROM pg_class c WHERE c.oid IN ({oids})
    UNION ALL SELECT t.root, i.inhrelid, i.xmin FROM tree t JOIN pg_class p ON p.oid = t.oid AND p.relkind = 'p'
      JOIN pg_inherits i ON i.inhparent = t.oid),
leaf AS (SELECT t.root, k.oid, k.relfilenode FROM tree t JOIN pg_class k USING (oid) WHERE k.relkind <> 'p')
SELECT c.oid, c.relkind, c.relnatts,
       (SELECT coalesce(max(d.attnum), 0) FROM pg_attribute d WHERE d.attrelid = c.oid AND d.attnum > 0
           AND d.attisdropped),
       (SELECT coalesce(md5(string_agg(l.oid || ':' || l.relfilenode, ' ' ORDER BY l.oid)), '-') FROM leaf l
         WHERE l.root = c.oid),
       (SELECT md5(string_agg(concat_ws(':', t.oid, t.attached), ' ' ORDER BY t.oid)) FROM tree t
         WHERE t.root = c.oid),
       a.xmin, a.attname, a.attnum, a.atttypid, a.atttypmod, format_type(a.atttypid, a.atttypmod),
       coalesce((SELECT k.place - 1 FROM pg_index i CROSS JOIN LATERAL unnest(i.indkey::int2[]) WITH ORDINALITY
           AS k(attnum, place) WHERE i.indrelid = c.oid AND i.indisprimary AND k.attnum = a.attnum
             AND k.place <= i.indnkeyatts AND {is_key_carried}), -1),
       m.kinds, m.missing
  FROM pg_class c
  JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated IN ({kinds})
 CROSS JOIN LATERAL (
     SELECT count(DISTINCT CASE WHEN x.atthasmissing THEN x.attmissingval::text ELSE '' END) AS kinds,
            min(CASE WHEN x.atthasmissing THEN {missing} END) AS missing
       FROM leaf l JOIN pg_attribute x ON x.attrelid = l.oid AND x.attname = a.attname AND NOT x.attisdropped
      CROSS JOIN LATERAL (SELECT x.attmissingval::text AS list) t
      WHERE l.root = c.oid) m
 WHERE c.oid IN ({oids})
 ORDER BY c.oid, a.attnum
"""


class ColumnAttributes(msgspec.Struct, frozen=True):
    """One column. `missing`: the value with which rows that lack it are read, in PostgreSQL's text; None = NULL.
    `mixed`: the partitions of its table differ in that.
    """

    name: str
    attnum: int
    type_oid: int
    type_mod: int
    type_name: str
    key_index: int
    missing: str | None = None
    mixed: bool = False
    written: str = ""


class TableAttributes(msgspec.Struct, frozen=True):
    """Columns of one table. `count`: the highest column number, including dropped columns. `dropped`: the highest
    number of a dropped column.
    """

    columns: tuple[ColumnAttributes, ...]
    count: int
    dropped: int
    storage: str
    partitioned: bool = False
    types: dict[int, dict[int, list[str]]] = {}
    """Component types of the columns (type_dependencies.py)."""
    leaves: str = ""

    @property
    def copy_fingerprint(self) -> str:
        """State that must be the same as at the start of a copy for the copy to be resumed."""
        types = sorted(f"{oid} {serialize_type(members)}" for oid, members in self.types.items())
        return " ".join([self.storage, *types])

    @property
    def by_name(self) -> dict[str, ColumnAttributes]:
        return {column.name: column for column in self.columns}

    @property
    def key(self) -> list[str]:
        return [c.name for c in sorted((c for c in self.columns if c.key_index >= 0), key=lambda c: c.key_index)]


async def read_attributes(wire: PgConnection, oids: Sequence[int]) -> dict[int, TableAttributes]:
    """Return the columns of tables by oid; a dropped table is absent. A key of which the stream lacks a column counts
    as none.
    """
    if not oids:
        return {}
    kinds, carried = carried_kinds(wire.server_version), is_key_carried(wire.server_version)
    listed = ", ".join(str(int(oid)) for oid in oids)
    rows = await wire.query(
        _ATTRIBUTES_SQL.format(kinds=kinds, is_key_carried=carried, missing=_MISSING_SQL, oids=listed)
    )
    columns: dict[int, list[ColumnAttributes]] = {}
    tables: dict[int, tuple[int, int, str, bool]] = {}
    leaves: dict[int, str] = {}
    for oid, kind, count, dropped, storage, leaf, xmin, *column in rows:
        name, attnum, type_oid, mod, type_name, key_index, kinds_, missing = column
        table = int(oid or 0)
        tables[table] = (int(count or 0), int(dropped or 0), storage or "", kind == "p")
        leaves[table] = leaf or ""
        columns.setdefault(table, []).append(
            ColumnAttributes(
                name or "", int(attnum or 0), int(type_oid or 0), int(mod or "-1"), type_name or "",
                int(key_index or "-1"), missing, int(kinds_ or 0) > 1, xmin or "",
            )
        )  # fmt: skip
    types = (
        await read_component_types(wire, oids)
        if any(c.type_oid >= FIRST_USER_OID for some in columns.values() for c in some)
        else {}
    )
    return {
        oid: TableAttributes(
            tuple(columns[oid]),
            *tables[oid],
            {c.type_oid: types[c.type_oid] for c in columns[oid] if c.type_oid in types},
            leaves[oid],
        )
        for oid in tables
    }


async def read_type_names(wire: PgConnection, types: Iterable[tuple[int, int]]) -> dict[tuple[int, int], str]:
    """Return format_type's text for each (type oid, type modifier)."""
    wanted = sorted(set(types))
    if not wanted:
        return {}
    asked = ", ".join(f"format_type({int(oid)}, {int(mod)})" for oid, mod in wanted)
    (row,) = await wire.query(f"SELECT {asked}")
    return dict(zip(wanted, (text or "" for text in row), strict=True))
