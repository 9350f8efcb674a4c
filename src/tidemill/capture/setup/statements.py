"""SQL statements that prepare a database for a capture, executed by the capture itself or by an administrator.

https://www.postgresql.org/docs/current/sql-createpublication.html, …/logical-replication-security.html
"""

from __future__ import annotations

from collections.abc import Sequence

from tidemill.capture.catalog.table_discovery import GENERATED_PUBLISHED, TableInfo
from tidemill.capture.config import CaptureConfig
from tidemill.capture.postgres.connection import PgConnection, identifier, literal, qualified_identifier

_TABLES_SQL = """
SELECT c.oid, pg_has_role(c.relowner, 'USAGE'), has_table_privilege(c.oid, 'SELECT'),
       has_schema_privilege(c.relnamespace, 'USAGE'),
       EXISTS (SELECT FROM pg_publication_rel r JOIN pg_publication p ON p.oid = r.prpubid
                WHERE p.pubname = {publication} AND r.prrelid = c.oid)
  FROM pg_class c WHERE c.oid IN ({oids})
"""

_DENIED_PARTITIONS_SQL = """
SELECT DISTINCT n.nspname, c.relname, has_schema_privilege(n.oid, 'USAGE'), has_table_privilege(c.oid, 'SELECT')
  FROM unnest(ARRAY[{oids}]::oid[]) o, LATERAL pg_partition_tree(o) t JOIN pg_class c ON c.oid = t.relid
  JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE t.level > 0 AND c.relkind = 'r'
   AND NOT (has_schema_privilege(n.oid, 'USAGE') AND has_table_privilege(c.oid, 'SELECT'))
 ORDER BY 1, 2
"""
"""Partitions that the role may not read directly, as it has to for a new one (`find_rows_before_attachment`)."""

_PARTIAL_IDENTITIES_SQL = """
SELECT DISTINCT n.nspname, c.relname
  FROM unnest(ARRAY[{oids}]::oid[]) o, LATERAL (SELECT o UNION SELECT relid FROM pg_partition_tree(o)) t(oid)
  JOIN pg_class c USING (oid) JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE c.relreplident <> 'f' AND {mine} ORDER BY 1, 2
"""


def publication_target(table: TableInfo) -> str:
    """Return the table as SQL names it in a publication. Without ONLY, tables that inherit from this one would be
    published too, without an identity.
    """
    return ("" if table.kind == "p" else "ONLY ") + qualified_identifier(table.schema, table.table)


def add_table_statement(publication: str, table: TableInfo) -> str:
    return f"ALTER PUBLICATION {identifier(publication)} ADD TABLE {publication_target(table)}"


def full_identity_statement(relation: str) -> str:
    return f"ALTER TABLE {relation} REPLICA IDENTITY FULL"


def generated_columns_statement(publication: str) -> str:
    return f"ALTER PUBLICATION {identifier(publication)} SET (publish_generated_columns = stored)"


def create_publication_statement(publication: str, version: int) -> str:
    """Return the statement that creates the publication, without tables."""
    options = "publish = 'insert, update, delete, truncate', publish_via_partition_root = true"
    if version >= GENERATED_PUBLISHED:
        options += ", publish_generated_columns = stored"
    return f"CREATE PUBLICATION {identifier(publication)} WITH ({options})"


async def find_missing_statements(wire: PgConnection, config: CaptureConfig, tables: Sequence[TableInfo]) -> list[str]:
    """Return the statements for an administrator, in order; [] = the role can execute all of them itself, or all is
    done. `tables` can be captured (resolve). If identities are used unchanged and the one of a table lacks the key,
    the first statement corrects that.
    """
    if not tables:
        return []
    role = identifier(await wire.value("SELECT current_user") or "")
    generated = "p.pubgencols = 's'" if wire.server_version >= GENERATED_PUBLISHED else "true"
    found = await wire.query(
        f"SELECT pg_has_role(p.pubowner, 'USAGE'), {generated} FROM pg_publication p"
        f" WHERE p.pubname = {literal(config.publication)}"
    )
    may_create = await wire.value("SELECT has_database_privilege(current_database(), 'CREATE')") == "t"
    may_create = may_create and not config.manual
    oids = ", ".join(str(table.oid) for table in tables)
    query = _TABLES_SQL.format(publication=literal(config.publication), oids=oids)
    known = {int(oid or 0): [each == "t" for each in rest] for oid, *rest in await wire.query(query)}
    by_oid = [(table, known[table.oid]) for table in tables if table.oid in known]
    # A publication has to exist before an administrator can add a table that the role does not own.
    may_create = may_create and all(owned for _, (owned, *_) in by_oid)
    may_alter = (found[0][0] == "t" if found else may_create) and not config.manual
    denied = await wire.query(_DENIED_PARTITIONS_SQL.format(oids=oids))
    unusable = {table.schema for table, (_, _, usable, _) in by_oid if not usable}
    unusable |= {schema or "" for schema, _, usable, _ in denied if usable != "t"}
    out = [f"GRANT USAGE ON SCHEMA {identifier(schema)} TO {role}" for schema in sorted(unusable)]
    out += [
        f"GRANT SELECT ON {qualified_identifier(table.schema, table.table)} TO {role}"
        for table, (_, readable, _, _) in by_oid
        if not readable
    ]
    out += [
        f"GRANT SELECT ON {qualified_identifier(schema or '', name or '')} TO {role}"
        for schema, name, _, readable in denied
        if readable != "t"
    ]
    if not found and not may_create:
        out.append(create_publication_statement(config.publication, wire.server_version))
    elif found and found[0][1] != "t" and not may_alter:
        out.append(generated_columns_statement(config.publication))
    if not config.requires_full_identity:
        # Before it is published, because afterwards its UPDATEs and DELETEs would fail.
        out += [table.lacking for table in tables if table.lacking]
    out += [
        add_table_statement(config.publication, table)
        for table, (owned, _, _, published) in by_oid
        if not published and not (owned and may_alter)
    ]
    if not config.requires_full_identity:
        return out
    mine = "true" if config.manual else "NOT pg_has_role(c.relowner, 'USAGE')"
    partial = await wire.query(_PARTIAL_IDENTITIES_SQL.format(oids=oids, mine=mine))
    return out + [full_identity_statement(qualified_identifier(schema or "", name or "")) for schema, name in partial]
