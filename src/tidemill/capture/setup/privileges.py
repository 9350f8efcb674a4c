"""What a role may not do for its capture, as the statements that an administrator runs instead. Only reads.

A role that owns its tables and may CREATE in the database needs none of them. One with nothing but LOGIN, REPLICATION
and SELECT captures as well, where an administrator has made the publication, put the tables into it and given them a
whole identity. `tidemill doctor` prints what of that is missing, in the order in which it is to be run. For a capture
that is manual it prints all that is missing, whatever its role may do.

https://www.postgresql.org/docs/current/sql-createpublication.html, …/logical-replication-security.html
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Literal

import msgspec

from tidemill.base.errors import InvalidError
from tidemill.capture.catalog.foreign_publications import Objection, objections
from tidemill.capture.catalog.table_discovery import TableInfo, list_tables, resolve
from tidemill.capture.config import CaptureConfig
from tidemill.capture.postgres.connection import Wire, literal
from tidemill.capture.setup.publication import Identities, not_full
from tidemill.capture.setup.server_checks import check_server
from tidemill.capture.setup.statements import statements, whole_identity


async def check_database(
    dsn: str, tables: Sequence[str] = ("public.*",), identity: Literal["full", "as-is"] = "full"
) -> str:
    """One line that says the database can be captured, before `up`. Raises InvalidError or Unavailable."""
    wire = await Wire.connect(dsn, purpose="check")
    try:
        config = CaptureConfig(name="check", dsn=dsn, tables=tuple(tables), identity=identity)
        return (await _looked_at(wire, config)).line
    finally:
        await wire.aclose()


Keep = Callable[[dict[str, Identities]], Awaitable[None]]
"""keep(by table, what it and its partitions have before an administrator gives them FULL)"""


async def check_capture(config: CaptureConfig, keep: Keep | None = None) -> str:
    """The same for `tidemill doctor`, and that nothing is left for an administrator. Raises InvalidError or
    Unavailable, and what `keep` raises."""
    wire = await Wire.connect(config.dsn, purpose="doctor")
    try:
        found = await _looked_at(wire, config)
        missing = await statements(wire, config, found.able)
        full = {table.name: await not_full(wire, table.oid) for table in found.able} if config.whole and missing else {}
        if config.failover:
            await check_standbys(wire)
    finally:
        await wire.aclose()
    asked = {name: _asked(identities, missing) for name, identities in full.items()}
    asked = {name: identities for name, identities in asked.items() if identities}
    if asked and keep is not None:
        await keep(asked)
    run = f"Have an administrator run: {'; '.join(missing)};" if missing else ""
    if found.objected:
        first, more = found.objected[0], len(found.objected) - 1
        said = f"{first.reason.rstrip('.')} more={more}." if more else first.reason
        raise InvalidError(said, fix=f"{first.fix} {run}".strip())
    if missing:
        raise InvalidError(
            f"the role {'is not to' if config.manual else 'may not'} do all that its capture needs:"
            f" capture={config.name} statements={len(missing)}{_way_back(asked)}.",
            fix=run,
        )
    return found.line


async def check_standbys(wire: Wire) -> None:
    """Whether a standby may be behind what is captured when it is promoted: PostgreSQL tells a failover slot nothing
    that the slots named in `synchronized_standby_slots` have not confirmed. Raises InvalidError.
    https://www.postgresql.org/docs/current/runtime-config-replication.html"""
    named = await wire.value("SELECT current_setting('synchronized_standby_slots')") or ""
    slots = {name or "" for (name,) in await wire.query("SELECT slot_name FROM pg_replication_slots"
        " WHERE slot_type = 'physical' AND NOT temporary")}  # fmt: skip
    wanted = {name.strip().strip('"') for name in named.split(",") if name.strip()}
    if slots and not wanted:
        raise InvalidError(
            f"a standby that is promoted may be behind what is captured: synchronized_standby_slots=''"
            f" physical_slots={','.join(sorted(slots))}.",
            fix=f"Run ALTER SYSTEM SET synchronized_standby_slots = {_list(slots)}; SELECT pg_reload_conf();"
            " with the slots of the standbys that may be promoted.",
        )
    if wanted - slots:
        raise InvalidError(
            "PostgreSQL sends the capture nothing while a standby's slot is missing:"
            f" synchronized_standby_slots={named!r} missing={','.join(sorted(wanted - slots))}.",
            fix="Create the physical slot for its standby, or take it out of synchronized_standby_slots.",
        )


def _list(slots: set[str]) -> str:
    return ", ".join(literal(name).strip() for name in sorted(slots))


def _asked(identities: Identities, missing: Sequence[str]) -> Identities:
    """Those that the statements replace."""
    return {oid: (name, before) for oid, (name, before) in identities.items() if whole_identity(name) in missing}


def _way_back(asked: dict[str, Identities]) -> str:
    back = [
        f"ALTER TABLE {name} REPLICA IDENTITY {before}" for each in asked.values() for name, before in each.values()
    ]
    return f" way_back={'; '.join(back)!r}" if back else ""


class _Looked(msgspec.Struct, frozen=True):
    """`line`: what is said of the database. `able`: tables that can be captured, be it with another identity first.
    `objected`: why others cannot, as publications hold them."""

    line: str
    able: tuple[TableInfo, ...]
    objected: list[Objection]


async def _looked_at(wire: Wire, config: CaptureConfig) -> _Looked:
    facts, found = await check_server(wire, config), await list_tables(wire)
    objected = await objections(wire, config)
    choice = resolve(config.tables, found, wire.server_version, whole=config.whole, objections=objected)
    wanted = resolve(config.tables, found, wire.server_version).tables
    refusing = {oid: each for oid, each in objected.items() if each.refuses}
    left = f", not captured: {', '.join(sorted(choice.refused))}" if choice.refused else ""
    return _Looked(
        f"PostgreSQL {facts.version // 10_000}.{facts.version % 10_000}, {len(choice.tables)} tables{left}",
        tuple(table for table in wanted if table.oid not in refusing),
        [refusing[table.oid] for table in wanted if table.oid in refusing],
    )
