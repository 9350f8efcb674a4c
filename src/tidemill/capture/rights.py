"""What a role may not do for its capture, as the statements that an administrator runs instead. Only reads.

A role that owns its tables and may CREATE in the database needs none of them. One with nothing but LOGIN, REPLICATION
and SELECT captures as well, where an administrator has made the publication, put the tables into it and given them a
whole identity. `tidemill doctor` prints what of that is missing, in the order in which it is to be run. For a capture
that is manual it prints all that is missing, whatever its role may do.

https://www.postgresql.org/docs/current/sql-createpublication.html, …/logical-replication-security.html
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from tidemill.base.errors import Invalid
from tidemill.capture.config import CaptureConfig
from tidemill.capture.publication import add_table, creation, whole_identity, with_generated
from tidemill.capture.setup import check_server
from tidemill.capture.tables import GENERATED_PUBLISHED, TableInfo, list_tables, resolve
from tidemill.capture.wire.connection import Wire, identifier, literal, qualified

_TABLES = """
SELECT c.oid, pg_has_role(c.relowner, 'USAGE'), has_table_privilege(c.oid, 'SELECT'),
       has_schema_privilege(c.relnamespace, 'USAGE'),
       EXISTS (SELECT FROM pg_publication_rel r JOIN pg_publication p ON p.oid = r.prpubid
                WHERE p.pubname = {publication} AND r.prrelid = c.oid)
  FROM pg_class c WHERE c.oid IN ({oids})
"""

_PARTIAL = """
SELECT DISTINCT n.nspname, c.relname
  FROM unnest(ARRAY[{oids}]::oid[]) o, LATERAL (SELECT o UNION SELECT relid FROM pg_partition_tree(o)) t(oid)
  JOIN pg_class c USING (oid) JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE c.relreplident <> 'f' AND {mine} ORDER BY 1, 2
"""


async def check_database(
    dsn: str, tables: Sequence[str] = ("public.*",), identity: Literal["full", "as-is"] = "full"
) -> str:
    """One line that says the database can be captured, before `up`. Raises Invalid or Unavailable."""
    wire = await Wire.connect(dsn, purpose="check")
    try:
        config = CaptureConfig(name="check", dsn=dsn, tables=tuple(tables), identity=identity)
        return (await _looked_at(wire, config))[0]
    finally:
        await wire.aclose()


async def check_capture(config: CaptureConfig) -> str:
    """The same for `tidemill doctor`, and that nothing is left for an administrator. Raises Invalid or Unavailable."""
    wire = await Wire.connect(config.dsn, purpose="doctor")
    try:
        line, tables = await _looked_at(wire, config)
        missing = await statements(wire, config, tables)
        if config.failover:
            await check_standbys(wire)
    finally:
        await wire.aclose()
    if missing:
        raise Invalid(
            f"the role {'is not to' if config.manual else 'may not'} do all that its capture needs:"
            f" capture={config.name} statements={len(missing)}.",
            fix="Have an administrator run: " + "; ".join(missing) + ";",
        )
    return line


async def check_standbys(wire: Wire) -> None:
    """Whether a standby may be behind what is captured when it is promoted: PostgreSQL tells a failover slot nothing
    that the slots named in `synchronized_standby_slots` have not confirmed. Raises Invalid.
    https://www.postgresql.org/docs/current/runtime-config-replication.html"""
    named = await wire.value("SELECT current_setting('synchronized_standby_slots')") or ""
    slots = {name or "" for (name,) in await wire.query("SELECT slot_name FROM pg_replication_slots"
        " WHERE slot_type = 'physical' AND NOT temporary")}  # fmt: skip
    wanted = {name.strip().strip('"') for name in named.split(",") if name.strip()}
    if slots and not wanted:
        raise Invalid(
            f"a standby that is promoted may be behind what is captured: synchronized_standby_slots=''"
            f" physical_slots={','.join(sorted(slots))}.",
            fix=f"Run ALTER SYSTEM SET synchronized_standby_slots = {_list(slots)}; SELECT pg_reload_conf();"
            " with the slots of the standbys that may be promoted.",
        )
    if wanted - slots:
        raise Invalid(
            "PostgreSQL sends the capture nothing while a standby's slot is missing:"
            f" synchronized_standby_slots={named!r} missing={','.join(sorted(wanted - slots))}.",
            fix="Create the physical slot for its standby, or take it out of synchronized_standby_slots.",
        )


def _list(slots: set[str]) -> str:
    return ", ".join(literal(name).strip() for name in sorted(slots))


async def _looked_at(wire: Wire, config: CaptureConfig) -> tuple[str, tuple[TableInfo, ...]]:
    """What is said of the database, and the tables that can be captured, be it with another identity first."""
    facts, found = await check_server(wire, config), await list_tables(wire)
    choice = resolve(config.tables, found, wire.server_version, whole=config.whole)
    able = resolve(config.tables, found, wire.server_version).tables
    left = f", not captured: {', '.join(sorted(choice.refused))}" if choice.refused else ""
    return f"PostgreSQL {facts.version // 10_000}.{facts.version % 10_000}, {len(choice.tables)} tables{left}", able


async def statements(wire: Wire, config: CaptureConfig, tables: Sequence[TableInfo]) -> list[str]:
    """For an administrator, in order; [] = the role can do all of it itself, or it is done. `tables`: such as can be
    captured (resolve); of those whose identity is taken as it is and does not say the key, that is the first thing."""
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
    may_alter = (found[0][0] == "t" if found else may_create) and not config.manual
    oids = ", ".join(str(table.oid) for table in tables)
    query = _TABLES.format(publication=literal(config.publication), oids=oids)
    known = {int(oid or 0): [each == "t" for each in rest] for oid, *rest in await wire.query(query)}
    by_oid = [(table, known[table.oid]) for table in tables if table.oid in known]
    unusable = {table.schema for table, (_, _, usable, _) in by_oid if not usable}
    out = [f"GRANT USAGE ON SCHEMA {identifier(schema)} TO {role}" for schema in sorted(unusable)]
    out += [
        f"GRANT SELECT ON {qualified(table.schema, table.table)} TO {role}"
        for table, (_, readable, _, _) in by_oid
        if not readable
    ]
    if not found and not may_create:
        out.append(creation(config.publication, wire.server_version))
    elif found and found[0][1] != "t" and not may_alter:
        out.append(with_generated(config.publication))
    if not config.whole:
        # Before it is published: from then on its UPDATEs and DELETEs would fail.
        out += [table.lacking for table in tables if table.lacking]
    out += [
        add_table(config.publication, table)
        for table, (owned, _, _, published) in by_oid
        if not published and not (owned and may_alter)
    ]
    if not config.whole:
        return out
    mine = "true" if config.manual else "NOT pg_has_role(c.relowner, 'USAGE')"
    partial = await wire.query(_PARTIAL.format(oids=oids, mine=mine))
    return out + [whole_identity(qualified(schema or "", name or "")) for schema, name in partial]
