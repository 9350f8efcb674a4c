"""Determine the demands of all publications of a database, ours and others, on a table's REPLICA IDENTITY. Only reads.

PostgreSQL rejects each UPDATE and DELETE of a table that a publication contains (by name, by schema, FOR ALL TABLES, or
through a partitioned table above it) if the table's identity does not fit that publication:

    FULL                  not with a column list of any content (15 and newer), nor with generated columns that the
                          publication omits (18 and newer)
    a key, or an index    its columns must be in the column list, and those of the row filter among them; none of them
                          may be a generated column that the publication omits (18 and newer)
    NOTHING               never

Invariant (repeated check): an identity is checked in this way before it is set, again under the table's lock, and while
the capture's own one is in force (identity_withdrawal.py), because publications are altered without that lock.

Invariant (complete stream): what the capture's own publication omits of a table (a row filter, a column list) is in no
stream, so the table is not captured while that is the case.

https://www.postgresql.org/docs/current/logical-replication-col-lists.html, …/logical-replication-row-filter.html;
CheckCmdReplicaIdentity and RelationBuildPublicationDesc in PostgreSQL's source.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from tidemill.capture.config import CaptureConfig
from tidemill.capture.naming import table_name
from tidemill.capture.postgres.connection import PgConnection, identifier, literal, qualified_identifier

COLUMN_LISTS_VERSION = 150_000
"""First version in which publications have column lists, row filters and schemas."""
GENERATED_COLUMNS_VERSION = 180_000
"""First version in which a generated column that is not published makes statements fail."""

_FAILING_SQL = """
WITH RECURSIVE asked(root, oid, identity) AS ({asked}),
line AS (
    SELECT oid, oid AS held, 1::bigint AS level FROM asked
     UNION SELECT a.oid, p.relid, p.level FROM asked a, pg_partition_ancestors(a.oid) WITH ORDINALITY AS p(relid, level)
),
holds AS (
    SELECT l.oid, p.oid AS publication, p.pubname, p.pubviaroot, {stored} AS stored, max(l.level) AS level
      FROM line l JOIN pg_publication p ON (p.pubupdate OR p.pubdelete) AND (p.puballtables
           OR EXISTS (SELECT FROM pg_publication_rel r WHERE r.prpubid = p.oid AND r.prrelid = l.held){schemas})
     GROUP BY 1, 2, 3, 4, 5
),
judged AS (
    SELECT a.root, a.oid, a.identity, h.pubname, {cause} AS cause
      FROM asked a JOIN pg_class m ON m.oid = a.oid AND m.relkind <> 'p' JOIN holds h ON h.oid = a.oid
      LEFT JOIN line l ON h.pubviaroot AND l.oid = h.oid AND l.level = h.level
      LEFT JOIN pg_publication_rel r ON r.prpubid = h.publication AND r.prrelid = coalesce(l.held, h.oid)
     CROSS JOIN LATERAL (SELECT (
         SELECT array_agg(t.attname ORDER BY t.attnum) FROM pg_index i JOIN pg_class x ON x.oid = i.indexrelid
           JOIN pg_attribute t ON t.attrelid = a.oid AND t.attnum = ANY ((i.indkey::int2[])[0:i.indnkeyatts - 1])
          WHERE i.indrelid = a.oid AND i.indisvalid AND i.indimmediate AND CASE a.identity
                WHEN 'DEFAULT' THEN i.indisprimary ELSE a.identity = 'USING INDEX ' || quote_ident(x.relname) END
     ) AS names) k
)
SELECT root, oid, identity, pubname, cause FROM judged WHERE cause <> '' ORDER BY 1, 2, 3, 4
"""

_CAUSE_SQL = """CASE
    WHEN a.identity = 'FULL' THEN CASE {full} ELSE '' END
    WHEN k.names IS NULL THEN 'identity'
    {key}
    ELSE '' END"""
_FULL_LIST = "WHEN r.prattrs IS NOT NULL THEN 'column list'"
_FULL_GENERATED = """WHEN EXISTS (SELECT FROM pg_attribute t WHERE t.attrelid = a.oid AND NOT t.attisdropped
    AND (t.attgenerated = 'v' OR t.attgenerated = 's' AND NOT h.stored)) THEN 'generated column'"""
_KEY_LIST = """WHEN r.prqual IS NOT NULL AND EXISTS (
        SELECT FROM regexp_matches(r.prqual::text, ':varattno ([0-9]+)', 'g') v LEFT JOIN pg_attribute t
            ON t.attrelid = r.prrelid AND t.attnum = v[1]::int2
         WHERE t.attname IS NULL OR t.attname <> ALL (k.names)) THEN 'row filter'
    WHEN r.prattrs IS NOT NULL AND NOT k.names <@ (SELECT array_agg(t.attname) FROM pg_attribute t
        WHERE t.attrelid = r.prrelid AND t.attnum = ANY (r.prattrs::int2[])) THEN 'column list'"""
_KEY_GENERATED = """WHEN r.prattrs IS NULL AND NOT h.stored AND EXISTS (SELECT FROM pg_attribute t
        WHERE t.attrelid = a.oid AND t.attname = ANY (k.names) AND t.attgenerated <> '') THEN 'generated column'"""
_SCHEMAS = """
           OR EXISTS (SELECT FROM pg_publication_namespace s JOIN pg_class c ON c.relnamespace = s.pnnspid
                       WHERE s.pnpubid = p.oid AND c.oid = l.held)"""

_FULL_IDENTITIES_SQL = """
    WITH RECURSIVE tree(root, oid) AS (
        SELECT c.oid, c.oid FROM pg_class c WHERE c.relkind IN ('r', 'p') AND NOT c.relispartition
           AND c.relpersistence = 'p' AND c.oid >= 16384
         UNION ALL SELECT t.root, i.inhrelid FROM tree t JOIN pg_class p ON p.oid = t.oid AND p.relkind = 'p'
          JOIN pg_inherits i ON i.inhparent = t.oid)
    SELECT t.root, t.oid, 'FULL'::text FROM tree t JOIN pg_class m USING (oid) WHERE m.relkind = 'r' AND ({some})
"""
"""Tables, and the partitions of partitioned ones, as if their identity were FULL; only those to which a publication may
object.
"""
_SOME_LIST = """EXISTS (SELECT FROM pg_publication_rel WHERE prattrs IS NOT NULL)
       AND (m.relispartition OR m.oid IN (SELECT prrelid FROM pg_publication_rel WHERE prattrs IS NOT NULL))"""
_SOME_GENERATED = """EXISTS (SELECT FROM pg_publication p WHERE (p.pubupdate OR p.pubdelete) AND p.pubname <> {own})
       AND EXISTS (SELECT FROM pg_attribute t WHERE t.attrelid = m.oid AND t.attgenerated <> '')"""

_OMISSION_SQL = """CASE WHEN r.prqual IS NULL THEN 'column list' WHEN r.prattrs IS NULL THEN 'row filter'
    ELSE 'row filter and column list' END"""
_POSSIBLE_OBJECTIONS_SQL = """
SELECT r.prrelid, p.pubname = {own} AND (r.prqual IS NOT NULL OR r.prattrs IS NOT NULL), {left_out}
  FROM pg_publication p LEFT JOIN pg_publication_rel r ON r.prpubid = p.oid
   AND (r.prattrs IS NOT NULL OR r.prqual IS NOT NULL AND p.pubname = {own})
 WHERE (p.pubupdate OR p.pubdelete) AND ({others} OR r.oid IS NOT NULL)
"""
"""Quick query for possible objections, which are rare. The expensive query runs only if there may be some."""


class IdentityFailure(msgspec.Struct, frozen=True):
    """An UPDATE or DELETE of relation `oid`, which is `root` or a partition of it, fails with an identity that was
    passed in, because this publication contains it. `cause`: the part of the publication or the identity that does not
    fit.
    """

    root: int
    oid: int
    identity: str
    publication: str
    cause: str


class Objection(msgspec.Struct, frozen=True):
    """Objection of a publication to a table. `relations`: those that must not have FULL. `refuses`: the table cannot be
    captured in its capture's configuration, for this `reason`.
    """

    reason: str
    fix: str
    relations: frozenset[int] = frozenset()
    refuses: bool = True


Objections = Mapping[int, Objection]
"""Objections by oid of the table; for a partitioned one, of its root."""


async def find_identity_failures(wire: PgConnection, asked: Sequence[tuple[int, str]]) -> list[IdentityFailure]:
    """Return the publications with which an UPDATE or DELETE would fail, for tables and partitions with a given
    identity, in SQL form. [] = none.
    """
    rows = ", ".join(f"({int(oid)}::oid, {int(oid)}::oid, {literal(identity)}::text)" for oid, identity in asked)
    return await _query_identity_failures(wire, f"VALUES {rows}") if asked else []


async def find_objections(wire: PgConnection, config: CaptureConfig) -> Objections:
    """Return the objections to all existing tables."""
    if wire.server_version < COLUMN_LISTS_VERSION:
        return {}
    own, generated = literal(config.publication), wire.server_version >= GENERATED_COLUMNS_VERSION
    look = await wire.query(
        _POSSIBLE_OBJECTIONS_SQL.format(
            own=own, left_out=_OMISSION_SQL, others=f"p.pubname <> {own}" if generated else "false"
        )
    )
    narrowed = {int(oid or 0): what or "" for oid, ours, what in look if ours == "t"}
    found: dict[int, list[IdentityFailure]] = {}
    if look:
        some = [_SOME_LIST, *([_SOME_GENERATED.format(own=own)] if generated else [])]
        for each in await _query_identity_failures(wire, _FULL_IDENTITIES_SQL.format(some=" OR ".join(some))):
            found.setdefault(each.root, []).append(each)
    names = await _read_table_names(wire, [*found, *narrowed])
    out: dict[int, Objection] = {}
    for oid in sorted({*found, *narrowed} & names.keys()):
        relations = frozenset(each.oid for each in found.get(oid, ()))
        others = [each for each in found.get(oid, ()) if each.publication != config.publication]
        schema, table, kind = names[oid]
        if oid in narrowed:
            out[oid] = _own_objection(config, schema, table, kind, narrowed[oid], relations)
        elif others:
            out[oid] = _foreign_objection(config, table_name(schema, table), others[0], relations)
    return out


def _own_objection(
    config: CaptureConfig, schema: str, table: str, kind: str, what: str, relations: frozenset[int]
) -> Objection:
    publication, name = (
        identifier(config.publication),
        ("" if kind == "p" else "ONLY ") + qualified_identifier(schema, table),
    )
    return Objection(
        f"the capture's publication has a {what} for the table, so the stream is not complete:"
        f" table={table_name(schema, table)} publication={config.publication}.",
        f"Run ALTER PUBLICATION {publication} DROP TABLE {name}; ALTER PUBLICATION {publication} ADD TABLE {name};",
        relations,
    )


def _foreign_objection(config: CaptureConfig, name: str, one: IdentityFailure, relations: frozenset[int]) -> Objection:
    publication = identifier(one.publication)
    if one.cause == "column list":
        remedy = f"Remove the column list of the table from publication {publication}"
    else:
        remedy = f"Run ALTER PUBLICATION {publication} SET (publish_generated_columns = stored)"
    return Objection(
        f"REPLICA IDENTITY FULL would make the table's UPDATE and DELETE fail, because another publication"
        f" contains it and does not permit that: table={name} publication={one.publication} cause={one.cause!r}.",
        f'{remedy}, or capture the table with the identity that it has: capture.{config.name}.identity = "as-is".',
        relations,
        config.requires_full_identity,
    )


async def _query_identity_failures(wire: PgConnection, asked: str) -> list[IdentityFailure]:
    lists, generated = wire.server_version >= COLUMN_LISTS_VERSION, wire.server_version >= GENERATED_COLUMNS_VERSION
    full = (_FULL_LIST if lists else "WHEN false THEN ''") + (f" {_FULL_GENERATED}" if generated else "")
    key = (_KEY_LIST if lists else "") + (f" {_KEY_GENERATED}" if generated else "")
    rows = await wire.query(
        _FAILING_SQL.format(
            asked=asked, cause=_CAUSE_SQL.format(full=full, key=key), schemas=_SCHEMAS if lists else "",
            stored="p.pubgencols = 's'" if generated else "true",
        )
    )  # fmt: skip
    return [
        IdentityFailure(int(root or 0), int(oid or 0), identity or "", name or "", cause or "")
        for root, oid, identity, name, cause in rows
    ]


async def _read_table_names(wire: PgConnection, oids: Sequence[int]) -> dict[int, tuple[str, str, str]]:
    if not oids:
        return {}
    rows = await wire.query(
        "SELECT c.oid, n.nspname, c.relname, c.relkind FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
        f" WHERE c.oid IN ({', '.join(str(int(oid)) for oid in oids)})"
    )
    return {int(oid or 0): (schema or "", table or "", kind or "") for oid, schema, table, kind in rows}
