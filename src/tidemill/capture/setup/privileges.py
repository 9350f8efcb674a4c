"""Report missing privileges of a role for its capture as the statements that an administrator has to run. Only reads.

A role that owns its tables and may CREATE in the database needs none of them. A role with only LOGIN, REPLICATION and
SELECT can capture as well, if an administrator has created the publication, added the tables to it and given them a
full identity. `tidemill doctor` prints the missing statements, in the order in which they have to run. For a manual
capture it prints all missing statements, regardless of the role's privileges.

https://www.postgresql.org/docs/current/sql-createpublication.html, …/logical-replication-security.html
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Literal

import msgspec

from tidemill.base.errors import InvalidError, TidemillError, UnavailableError
from tidemill.capture.catalog.foreign_publications import Objection, find_objections
from tidemill.capture.catalog.table_choice import choose_tables
from tidemill.capture.catalog.table_discovery import TableInfo, list_tables
from tidemill.capture.config import CaptureConfig
from tidemill.capture.postgres.connection import PgConnection, literal
from tidemill.capture.setup.publication import Identities, find_partial_identities
from tidemill.capture.setup.server_checks import (
    FAILOVER_VERSION,
    OLDEST_VERSION,
    ServerFacts,
    check_server,
    find_server_problems,
    find_stream_problems,
    read_server_facts,
)
from tidemill.capture.setup.statements import find_missing_statements, full_identity_statement


async def check_database(
    dsn: str, tables: Sequence[str] = ("public.*",), identity: Literal["full", "as-is"] = "full"
) -> str:
    """Check before `up` whether the database can be captured, and return one line about it. Raises InvalidError or
    UnavailableError.
    """
    wire = await PgConnection.connect(dsn, purpose="check")
    try:
        config = CaptureConfig(name="check", dsn=dsn, tables=tuple(tables), identity=identity)
        return (await _check_tables(wire, config, await check_server(wire, config))).line
    finally:
        await wire.aclose()


StoreIdentities = Callable[[dict[str, Identities]], Awaitable[None]]
"""keep(by table: the identities of it and its partitions before an administrator sets them to FULL)"""


async def check_capture(config: CaptureConfig, keep: StoreIdentities | None = None) -> str:
    """Check that the database can be captured and that no statement is left for an administrator. Raises the first
    problem of `diagnose_capture`, and its errors.
    """
    line, problems = await diagnose_capture(config, keep)
    if problems:
        raise problems[0]
    return line


async def diagnose_capture(
    config: CaptureConfig, keep: StoreIdentities | None = None
) -> tuple[str, list[TidemillError]]:
    """Return for `tidemill doctor` a line about the database and every problem that prevents its capture: settings and
    rights, the slot, other publications, and statements that are left for an administrator.

    Raises UnavailableError if the database does not answer, and the errors of `keep`.
    """
    wire = await PgConnection.connect(config.dsn, purpose="doctor")
    try:
        problems: list[TidemillError] = [problem.error for problem in await find_server_problems(wire, config)]
        if wire.server_version < OLDEST_VERSION:
            return "", problems
        facts = await read_server_facts(wire)
        if not any(isinstance(problem, UnavailableError) for problem in problems):  # a standby has no WAL position
            problems += await find_stream_problems(wire, config)
        try:
            found = await _check_tables(wire, config, facts)
        except InvalidError as error:  # no pattern matches
            return "", [*problems, error]
        missing = await find_missing_statements(wire, config, found.able)
        asked = await find_replaced_identities(wire, config, found.able, missing)
        if config.failover and facts.version >= FAILOVER_VERSION:
            try:
                await check_standbys(wire)
            except InvalidError as error:
                problems.append(error)
    finally:
        await wire.aclose()
    if asked and keep is not None:
        await keep(asked)
    run = _format_fix(missing, asked) if missing else ""
    if found.objected:
        first, more = found.objected[0], len(found.objected) - 1
        said = f"{first.reason.rstrip('.')} more={more}." if more else first.reason
        problems.append(InvalidError(said, fix=f"{first.fix} {run}".strip()))
    elif missing:
        problems.append(
            InvalidError(
                f"the role {'must not' if config.manual else 'may not'} do everything that its capture needs:"
                f" capture={config.name} statements={len(missing)}.",
                fix=run,
            )
        )
    return found.line, problems


async def check_standbys(wire: PgConnection) -> None:
    """Check whether a standby may be behind the capture when it is promoted: PostgreSQL sends a failover slot only what
    the slots named in `synchronized_standby_slots` have confirmed. Raises InvalidError.
    https://www.postgresql.org/docs/current/runtime-config-replication.html
    """
    named = await wire.value("SELECT current_setting('synchronized_standby_slots')") or ""
    slots = {name or "" for (name,) in await wire.query("SELECT slot_name FROM pg_replication_slots"
        " WHERE slot_type = 'physical' AND NOT temporary")}  # fmt: skip
    wanted = {name.strip().strip('"') for name in named.split(",") if name.strip()}
    if slots and not wanted:
        raise InvalidError(
            f"a promoted standby may be behind the capture: synchronized_standby_slots=''"
            f" physical_slots={','.join(sorted(slots))}.",
            fix=f"Run ALTER SYSTEM SET synchronized_standby_slots = {_format_slot_names(slots)};"
            " SELECT pg_reload_conf(); with the slots of the standbys that may be promoted.",
        )
    if wanted - slots:
        raise InvalidError(
            "PostgreSQL sends nothing to the capture while a standby's slot is missing:"
            f" synchronized_standby_slots={named!r} missing={','.join(sorted(wanted - slots))}.",
            fix="Create the physical slot for its standby, or remove it from synchronized_standby_slots.",
        )


def _format_slot_names(slots: set[str]) -> str:
    return ", ".join(literal(name).strip() for name in sorted(slots))


async def find_replaced_identities(
    wire: PgConnection, config: CaptureConfig, tables: Sequence[TableInfo], statements: Sequence[str]
) -> dict[str, Identities]:
    """Return, by table, the identities that the statements replace."""
    if not config.requires_full_identity or not statements:
        return {}
    found: dict[str, Identities] = {}
    for table in tables:
        identities = (await find_partial_identities(wire, table.oid)).items()
        replaced = {
            oid: (name, before) for oid, (name, before) in identities if full_identity_statement(name) in statements
        }
        if replaced:
            found[table.name] = replaced
    return found


def _format_fix(missing: Sequence[str], asked: Mapping[str, Identities]) -> str:
    """Return the missing statements, then the statements that restore the replaced replica identities. Each is a
    line."""
    back = [
        f"ALTER TABLE {name} REPLICA IDENTITY {before}" for each in asked.values() for name, before in each.values()
    ]
    lines = ["Have an administrator run:", *(f"  {statement};" for statement in missing)]
    if back:
        lines += ["Once the capture is dropped, these restore the tables:", *(f"  {statement};" for statement in back)]
    return "\n".join(lines)


class _DatabaseCheck(msgspec.Struct, frozen=True):
    """Result of a check. `line`: a sentence about the database. `able`: tables that can be captured, possibly after a
    change of identity. `objected`: objections of publications to the others.
    """

    line: str
    able: tuple[TableInfo, ...]
    objected: list[Objection]


async def _check_tables(wire: PgConnection, config: CaptureConfig, facts: ServerFacts) -> _DatabaseCheck:
    found = await list_tables(wire)
    objected = await find_objections(wire, config)
    choice = choose_tables(
        config.tables, found, wire.server_version, whole=config.requires_full_identity, objections=objected
    )
    wanted = choose_tables(config.tables, found, wire.server_version).tables
    refusing = {oid: each for oid, each in objected.items() if each.refuses}
    left = f", not captured: {', '.join(sorted(choice.refused))}" if choice.refused else ""
    odd = ", encoding SQL_ASCII: values that are not UTF-8 pause their table" if wire.is_encoding_unchecked else ""
    return _DatabaseCheck(
        f"PostgreSQL {facts.version // 10_000}.{facts.version % 10_000}, {len(choice.tables)} tables{left}{odd}",
        tuple(table for table in wanted if table.oid not in refusing),
        [refusing[table.oid] for table in wanted if table.oid in refusing],
    )
