"""Read tables from the database's catalogue: which exist, their replica identities, partitions, and hazards.

Stored generated columns are carried from PostgreSQL 18 on (`publish_generated_columns`); the stream of older versions
lacks them. Partitions are represented by their root (`publish_via_partition_root`).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tidemill.base.errors import InvalidError
from tidemill.capture.catalog.type_dependencies import FIRST_USER_OID, TYPES_HASH_SQL
from tidemill.capture.naming import has_invalid_bytes, table_name, to_readable
from tidemill.capture.postgres.connection import PgConnection, identifier, literal, qualified_identifier

GENERATED_PUBLISHED = 180_000
"""First version in which stored generated columns can be published, and unpublished ones break REPLICA
IDENTITY FULL.
"""

PARTITION_CHECK_TIMEOUT_MS = 100
"""Timeout of the lock for a check of a new partition."""

_LACKS_KEY = """
CASE m.relreplident
  WHEN 'f' THEN false
  WHEN 'd' THEN NOT EXISTS (SELECT FROM pg_index i WHERE i.indrelid = m.oid AND i.indisprimary AND i.indimmediate)
  WHEN 'i' THEN NOT EXISTS (SELECT FROM pg_index i JOIN pg_index p ON p.indrelid = i.indrelid AND p.indisprimary
                                                                      AND p.indimmediate
                             WHERE i.indrelid = m.oid AND i.indisreplident AND i.indisvalid
                               AND (p.indkey::int2[])[0:p.indnkeyatts - 1]
                                   <@ (i.indkey::int2[])[0:i.indnkeyatts - 1])
  ELSE true END
"""
"""Condition that the WAL of relation m does not identify the row of an UPDATE or DELETE. This is the case with NOTHING;
with DEFAULT if the primary key is deferrable, and therefore no identity; with an index that lacks a column of the key
(an UPDATE of that column alone would not show the old key). Two rows may share a deferrable primary key, and only a
whole old row shows which one of them left it (deferrable_keys.py). INCLUDE columns belong to no key.
"""

_IDENTITY = """
CASE m.relreplident WHEN 'f' THEN 'FULL' WHEN 'd' THEN 'DEFAULT' WHEN 'i' THEN coalesce((
    SELECT 'USING INDEX ' || quote_ident(x.relname) FROM pg_index i JOIN pg_class x ON x.oid = i.indexrelid
     WHERE i.indrelid = m.oid AND i.indisreplident), 'NOTHING') ELSE 'NOTHING' END
"""
"""The identity of relation m in SQL form. A dropped index leaves the table with the effect of NOTHING."""

_KEY_IDENTITY_STATEMENT = """
format('ALTER TABLE %I.%I REPLICA IDENTITY %s', (SELECT nspname FROM pg_namespace WHERE oid = m.relnamespace),
       m.relname,
       CASE WHEN EXISTS (SELECT FROM pg_index i WHERE i.indrelid = m.oid AND i.indisprimary AND i.indimmediate)
            THEN 'DEFAULT' ELSE 'FULL' END)
"""
_GENERATED_KEY = """
 FROM pg_attribute g WHERE g.attrelid = i.indrelid AND g.attgenerated <> ''
  AND g.attnum = ANY ((i.indkey::int2[])[0:i.indnkeyatts - 1])
"""
"""Generated columns g of the key of index i, without its INCLUDE columns."""

MAX_STATEMENTS_SHOWN = 5
"""Maximum number of statements per table in one message."""
_LACKING = (
    f"coalesce(array_to_string((array_agg({_KEY_IDENTITY_STATEMENT}) FILTER (WHERE {_LACKS_KEY}))"
    f"[1:{MAX_STATEMENTS_SHOWN}], '; '), '')"
)
"""Aggregate over a group of relations m."""

_TABLES_SQL = f"""
SELECT c.oid, n.nspname, c.relname, c.relkind, c.relpersistence, w.identity,
       EXISTS (SELECT FROM pg_index i WHERE i.indrelid = c.oid AND i.indisprimary),
       coalesce((SELECT string_agg(DISTINCT a.attgenerated::text, '') FROM pg_attribute a
                  WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped), ''),
       coalesce((SELECT (SELECT string_agg(g.attname::text, ', ' ORDER BY g.attnum) {_GENERATED_KEY})
                   FROM pg_index i WHERE i.indrelid = c.oid AND i.indisprimary), ''),
       CASE WHEN c.relkind = 'p' THEN coalesce((
           WITH RECURSIVE tree(oid) AS (SELECT i.inhrelid FROM pg_inherits i WHERE i.inhparent = c.oid UNION ALL
                SELECT i.inhrelid FROM pg_inherits i JOIN tree t ON i.inhparent = t.oid)
           SELECT min(k.relname::text) FROM tree JOIN pg_class k USING (oid)
            WHERE k.relkind = 'f' OR k.relpersistence <> 'p'), '') ELSE '' END,
       (SELECT md5(string_agg(concat_ws(' ', a.attname, a.attnum, a.atttypid, a.atttypmod, a.attgenerated), E'\\t'
                                  ORDER BY a.attnum))
          FROM pg_attribute a WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped)
       || coalesce((SELECT array_to_string((i.indkey::int2[])[0:i.indnkeyatts - 1], ' ') FROM pg_index i
                     WHERE i.indrelid = c.oid AND i.indisprimary), '')
       || concat_ws(' ', '', c.relnatts, c.relfilenode)
       || CASE WHEN EXISTS (SELECT FROM pg_attribute a WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
                               AND a.atttypid >= {FIRST_USER_OID}) THEN {TYPES_HASH_SQL} ELSE '' END
       || CASE WHEN c.relkind = 'p' THEN coalesce((
           WITH RECURSIVE tree(oid, attached) AS (
                SELECT i.inhrelid, i.xmin FROM pg_inherits i WHERE i.inhparent = c.oid UNION ALL
                SELECT i.inhrelid, i.xmin FROM pg_inherits i JOIN tree t ON i.inhparent = t.oid)
           SELECT md5(string_agg(concat_ws(' ', oid, k.relfilenode, attached), ' ' ORDER BY oid))
             FROM tree JOIN pg_class k USING (oid)), '') ELSE '' END,
       w.lacking
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
 CROSS JOIN LATERAL (
     WITH RECURSIVE tree(oid) AS (SELECT c.oid UNION ALL SELECT i.inhrelid FROM tree t
          JOIN pg_class p ON p.oid = t.oid AND p.relkind = 'p' JOIN pg_inherits i ON i.inhparent = t.oid)
     SELECT string_agg(DISTINCT {_IDENTITY}, ', ') AS identity, {_LACKING} AS lacking
       FROM tree JOIN pg_class m USING (oid)) w
 WHERE c.relkind IN ('r', 'p', 'f') AND NOT c.relispartition AND c.relpersistence <> 't'
   AND n.nspname NOT IN ('pg_catalog', 'information_schema', 'tidemill') AND n.nspname !~ '^pg_(toast|temp)'
 ORDER BY n.nspname, c.relname
"""

_TABLES_UNLESS_UNCHANGED_SQL = f"""
WITH t AS MATERIALIZED ({_TABLES_SQL.replace("{", "{{").replace("}", "}}")}),
     h AS (SELECT md5(coalesce(string_agg(t::text, E'\\n'), '')) AS hash FROM t)
SELECT h.hash, t.* FROM h LEFT JOIN t ON h.hash <> {{known}} ORDER BY t.nspname, t.relname
"""

_HAZARDS_SQL = """
WITH RECURSIVE tree(root, oid) AS (
    SELECT r.prrelid, r.prrelid FROM pg_publication_rel r JOIN pg_publication p ON p.oid = r.prpubid
     WHERE p.pubname = {publication}
    UNION ALL SELECT t.root, i.inhrelid FROM pg_inherits i JOIN tree t ON i.inhparent = t.oid
      JOIN pg_class k ON k.oid = i.inhparent AND k.relkind = 'p')
SELECT c.oid, n.nspname, c.relname, c.relkind, bool_or(f.virtual), bool_or(m.relkind <> 'p' AND (
           m.relreplident = 'n'
           OR m.relreplident = 'd' AND NOT EXISTS (
               SELECT FROM pg_index i WHERE i.indrelid = m.oid AND i.indisprimary AND i.indimmediate)
           OR m.relreplident = 'i' AND NOT EXISTS (
               SELECT FROM pg_index i WHERE i.indrelid = m.oid AND i.indisreplident AND i.indisvalid))),
       {lacking}
  FROM tree JOIN pg_class m ON m.oid = tree.oid JOIN pg_class c ON c.oid = tree.root
  JOIN pg_namespace n ON n.oid = c.relnamespace
 CROSS JOIN LATERAL (SELECT EXISTS (SELECT FROM pg_attribute a WHERE a.attrelid = m.oid AND a.attgenerated = 'v'
                                       AND NOT a.attisdropped) AS virtual) f
 WHERE {wanting} OR f.virtual
 GROUP BY c.oid, n.nspname, c.relname, c.relkind
"""

_KEYLESS_SQL = f"""
WITH RECURSIVE tree(root, oid) AS (SELECT o, o FROM unnest(ARRAY[{{oids}}]::oid[]) o
    UNION ALL SELECT t.root, i.inhrelid FROM tree t JOIN pg_class p ON p.oid = t.oid AND p.relkind = 'p'
      JOIN pg_inherits i ON i.inhparent = t.oid)
SELECT t.root, {_KEY_IDENTITY_STATEMENT} FROM tree t JOIN pg_class m USING (oid) WHERE {_LACKS_KEY} ORDER BY t.root, 2
"""


def carried_kinds(version: int) -> str:
    """Return the values of attgenerated, in SQL, whose columns the stream of this server carries."""
    return "'', 's'" if version >= GENERATED_PUBLISHED else "''"


def is_key_carried(version: int) -> str:
    """Return the SQL condition that the stream of this server carries all columns that make primary key i unique.
    Without one of them, different rows of the table would share a key, so such a key counts as none.
    """
    return "true" if version >= GENERATED_PUBLISHED else f"NOT EXISTS (SELECT {_GENERATED_KEY})"


class TableInfo(msgspec.Struct, frozen=True):
    """A table of the database. `kind`: r table, p partitioned, f foreign.

    identity        its REPLICA IDENTITY in SQL form; all of them, if its partitions have different ones
    lacking         the statements that set an identity with the primary key for it and its partitions, "" = not needed
    odd             the first of its names that is not UTF-8, "" = none
    generated       kinds of its generated columns: s stored, v virtual
    generated_key   generated columns of its primary key, "" = none
    odd_partition   a partition without WAL, "" = none
    digest          of its columns, their types, its key, partitions, their attachments and the files of its rows:
                    a different one requires a closer check
    """

    oid: int
    schema: str
    table: str
    kind: str
    persistence: str
    identity: str
    has_key: bool
    generated: str = ""
    generated_key: str = ""
    odd_partition: str = ""
    digest: str = ""
    lacking: str = ""
    odd: str = ""

    @property
    def name(self) -> str:
        return table_name(self.schema, self.table)


class Hazard(msgspec.Struct, frozen=True):
    """A published table with a part whose changes lack old rows, or whose statements fail because it is published.
    `lacking`: as in TableInfo.
    """

    table: TableInfo
    name: str
    """name in the form of ALTER PUBLICATION"""
    virtual: bool
    breaks: bool
    lacking: str

    @property
    def oid(self) -> int:
        return self.table.oid


async def list_tables(wire: PgConnection) -> list[TableInfo]:
    """Return every ordinary, partitioned and foreign table, in name order, outside the schemas of the system and of
    tidemill: consensus may be in the same database, and capturing it would feed on itself.
    """
    return (await list_tables_if_changed(wire, "", []))[1]


async def list_tables_if_changed(
    wire: PgConnection, known: str, tables: list[TableInfo]
) -> tuple[str, list[TableInfo]]:
    """Return the hash of the existing tables, and the tables; the very object `tables` if the hash equals `known`."""
    rows = await wire.query(_TABLES_UNLESS_UNCHANGED_SQL.format(known=literal(known)))
    found = rows[0][0] or ""
    if found == known:
        return known, tables
    odd_names = await _find_undecodable_names(wire) if wire.is_encoding_unchecked else {}
    return found, [
        TableInfo(
            int(r[1] or 0), r[2] or "", r[3] or "", r[4] or "", r[5] or "", r[6] or "", r[7] == "t", r[8] or "",
            r[9] or "", r[10] or "", r[11] or "", r[12] or "",
            next((to_readable(name) for name in [f"{r[2]}.{r[3]}", r[6] or ""] if has_invalid_bytes(name)), "")
            or odd_names.get(int(r[1] or 0), ""),
        )
        for r in rows
        if r[1] is not None  # there are no tables
    ]  # fmt: skip


async def _find_undecodable_names(wire: PgConnection) -> dict[int, str]:
    """Return, by table, the name of a column, of its type or of a partition that is not UTF-8."""
    rows = await wire.query(
        "SELECT a.attrelid, a.attname, format_type(a.atttypid, a.atttypmod) FROM pg_attribute a"
        " JOIN pg_class c ON c.oid = a.attrelid JOIN pg_namespace n ON n.oid = c.relnamespace"
        " WHERE c.relkind IN ('r', 'p', 'f') AND a.attnum > 0 AND NOT a.attisdropped"
        " AND n.nspname NOT IN ('pg_catalog', 'information_schema', 'tidemill')"
        " UNION ALL SELECT pg_partition_root(c.oid)::oid, n.nspname, c.relname FROM pg_class c"
        " JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.relispartition AND c.relkind IN ('r', 'p', 'f')"
    )
    return {
        int(oid or 0): to_readable(name or "")
        for oid, *names in rows
        for name in names
        if has_invalid_bytes(name or "")
    }


async def find_hazards(wire: PgConnection, publication: str, whole: bool) -> list[Hazard]:
    """Return the published tables with hazards. `whole`: FULL is required; otherwise an identity that includes the key
    suffices.
    """
    wanting = "m.relreplident <> 'f'" if whole else _LACKS_KEY
    rows = await wire.query(_HAZARDS_SQL.format(publication=literal(publication), lacking=_LACKING, wanting=wanting))
    return [
        Hazard(
            TableInfo(int(oid or 0), schema or "", table or "", kind or "", "p", "", True),
            ("" if kind == "p" else "ONLY ") + qualified_identifier(schema or "", table or ""),
            virtual == "t",
            breaks == "t",
            lacking or "",
        )
        for oid, schema, table, kind, virtual, breaks, lacking in rows
    ]


async def find_keyless_identities(wire: PgConnection, oids: Sequence[int]) -> dict[int, list[str]]:
    """Return, by table, the statements that set an identity with the primary key for it and its partitions. A table
    that needs none is absent.
    """
    if not oids:
        return {}
    rows = await wire.query(_KEYLESS_SQL.format(oids=", ".join(str(int(oid)) for oid in oids)))
    found: dict[int, list[str]] = {}
    for root, statement in rows:
        found.setdefault(int(root or 0), []).append(statement or "")
    return found


async def list_partitions(wire: PgConnection, oid: int) -> dict[int, int]:
    """Return the partitions of a partitioned table, at all levels, each with the transaction that attached it, ordered
    by oid; empty for any other table. A partition that is being detached (CONCURRENTLY) is excluded, because its
    changes are no longer changes of the table.
    """
    rows = await wire.query(
        f"WITH RECURSIVE tree(oid, attached) AS (SELECT {oid}::oid, NULL::xid UNION ALL SELECT i.inhrelid, i.xmin"
        " FROM tree t JOIN pg_class p ON p.oid = t.oid AND p.relkind = 'p'"
        " JOIN pg_inherits i ON i.inhparent = t.oid AND NOT i.inhdetachpending)"
        f" SELECT oid, attached FROM tree WHERE oid <> {oid} ORDER BY oid"
    )
    return {int(found or 0): int(attached or 0) for found, attached in rows}


async def list_ancestors(wire: PgConnection, oid: int) -> tuple[int, ...]:
    """Return the partitioned tables of which this is a partition, at all levels; empty if it is no partition, or was
    dropped.
    """
    rows = await wire.query(
        f"WITH RECURSIVE up(oid) AS (SELECT inhparent FROM pg_inherits WHERE inhrelid = {oid} UNION"
        " SELECT i.inhparent FROM up u JOIN pg_inherits i ON i.inhrelid = u.oid)"
        " SELECT oid FROM up JOIN pg_class c USING (oid) WHERE c.relkind = 'p'"
    )
    return tuple(int(found or 0) for (found,) in rows)


async def find_rows_before_attachment(wire: PgConnection, partition: int) -> str:
    """Return the name of a partition that has a row at least as old as its attachment, otherwise "". Such rows were in
    no change of the root. Raises SqlError if its lock is not available now or the query takes too long, and
    InvalidError if the role may not read it, because a privilege on the root does not cover the partition itself.
    Checking whether it is empty needs no privilege.

    A row of more than 2^31 transactions ago has a negative age (pg_snapshot.since), so only rows with an age in between
    are younger.
    """
    names = await wire.query(
        "SELECT n.nspname, c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
        f" WHERE c.oid = {partition} AND c.relkind = 'r'"
    )
    if not names:
        return ""
    schema, table = names[0][0] or "", names[0][1] or ""
    await wire.query("BEGIN")
    try:
        await wire.query(f"SET LOCAL lock_timeout = {PARTITION_CHECK_TIMEOUT_MS}")
        await wire.query(f"SET LOCAL statement_timeout = {PARTITION_CHECK_TIMEOUT_MS * 20}")
        ((size, allowed, role),) = await wire.query(
            f"SELECT pg_relation_size(oid), has_schema_privilege(relnamespace, 'USAGE') AND"
            f" has_table_privilege(oid, 'SELECT'), current_user FROM pg_class WHERE oid = {partition}"
        ) or [("0", "t", "")]
        if size == "0":
            return ""
        if allowed != "t":
            raise InvalidError(
                f"the role may not read it: partition={table_name(schema, table)} role={role}.",
                fix=f"Run GRANT SELECT ON {qualified_identifier(schema, table)} TO {identifier(role or '')};",
            )
        old = await wire.value(
            f"SELECT EXISTS (SELECT FROM ONLY {qualified_identifier(schema, table)} r"
            " WHERE NOT (age(r.xmin) >= 0 AND age(r.xmin) < (SELECT min(age(i.xmin)) FROM pg_inherits i"
            f" WHERE i.inhrelid IN (SELECT relid FROM pg_partition_ancestors({partition})))))"
        )
    finally:
        await wire.query("ROLLBACK")
    return table_name(schema, table) if old == "t" else ""
