"""Implementation of `capture drop`: revert everything that a capture created or changed, in PostgreSQL and in the
cluster.

    slot             dropped first: PostgreSQL retains no more WAL for it
    publication      dropped before any identity is altered: without it no statement needs one (publication.py). It is
                     left alone if it existed before the capture, if the capture is manual, or if the role may not
                     drop it
    identities       each table and partition gets back the identity that was recorded before it was set to FULL. If
                     another publication needs FULL, or the role may not alter the table, the statement is reported
                     for an administrator
    topics, rows     deleted, the capture's own row last: after a crash the next `drop` does the rest

Rejected without any change while a session captures (its advisory lock is held, or its slot is active), and while a
pipeline reads the capture.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from tidemill.base.errors import ConflictError, InvalidError, MissingError, TidemillError
from tidemill.capture.catalog.foreign_publications import find_identity_failures
from tidemill.capture.config import CaptureConfig
from tidemill.capture.postgres.connection import PgConnection, identifier, literal
from tidemill.capture.setup.blockers import find_lock_holder, find_slot_holder
from tidemill.capture.setup.publication import LOCK_ATTEMPTS, restore_identity
from tidemill.capture.setup.server_checks import ADVISORY_CLASS, advisory_lock_key, read_slot_state, try_advisory_lock
from tidemill.capture.tables.table_setup import delete_topics
from tidemill.metastore.catalogue import CaptureRow, CaptureTableRow, Catalogue, PipelineRow

ENDED_ATTEMPTS = 10
ENDED_POLL_S = 0.2


class TeardownResult(msgspec.Struct):
    """Result of a drop.

    `publication_left`: the publication does not belong to the capture. `identities`: relation → the restored identity.
    `for_administrator`: statement → why the capture may not run it. `left`: statement → why it failed. While there is
    such a failure, the capture's rows stay, and `drop` may be repeated.
    """

    publication: bool = False
    publication_left: bool = False
    slot: bool = False
    identities: dict[str, str] = {}
    for_administrator: dict[str, str] = {}
    topics: list[str] = []
    left: dict[str, str] = {}


async def list_reading_pipelines(catalogue: Catalogue, capture: str) -> list[str]:
    """Return the names of the pipelines that read tables of the capture."""
    source = f"capture:{capture}:"
    rows = await catalogue.list(PipelineRow)
    return sorted(row.name for row in rows if any(each.startswith(source) for each in row.tables.values()))


async def drop_capture(config: CaptureConfig, catalogue: Catalogue, *, really: bool = False) -> TeardownResult:
    """Drop the capture; see the module docstring. `really`: even if pipelines read it, or if its cluster is gone and
    this is another one.

    Raises MissingError for an unknown capture, ConflictError while it runs, InvalidError while it is read or if the
    cluster is another one, UnavailableError.
    """
    await _find_unread_capture(config, catalogue, really)
    wire = await PgConnection.connect(config.dsn, purpose="drop", capture=config.name)
    try:
        row, tables = await _lock_stopped_capture(wire, config, catalogue, really)
        done = TeardownResult()
        await _revert_database(wire, config, tables, done, given=row is not None and row.given_publication)
        if not done.left:
            # The lock is still held: a session that waits for it would re-create, under the same names, what is deleted
            # here.
            await _delete_local_state(catalogue, config, tables, done)
    finally:
        await wire.aclose()
    return done


async def plan_drop(config: CaptureConfig, catalogue: Catalogue, *, really: bool = False) -> TeardownResult:
    """Return what `drop_capture` would do, and change nothing. Raises the same errors.

    `identities` lists every identity that was recorded; whether the role may restore each is known at the drop.
    """
    await _find_unread_capture(config, catalogue, really)
    wire = await PgConnection.connect(config.dsn, purpose="drop", capture=config.name)
    try:
        row, tables = await _lock_stopped_capture(wire, config, catalogue, really)
        plan = TeardownResult(slot=await read_slot_state(wire, config.slot) is not None)
        publication = await _find_publication(wire, config)
        if publication is not None:
            owned, owner = publication
            plan.publication_left = (row is not None and row.given_publication) or not owned
            plan.publication = not plan.publication_left
            if plan.publication_left:
                _report_kept_publication(config, owner, plan)
        for table in tables:
            plan.identities |= {relation: before for relation, before in table.identities.values()}
        await _report_asked_identities(wire, tables, plan)
        plan.topics = [table.topic for table in tables if table.topic]
    finally:
        await wire.aclose()
    return plan


async def _find_unread_capture(
    config: CaptureConfig, catalogue: Catalogue, really: bool
) -> tuple[CaptureRow | None, Sequence[CaptureTableRow]]:
    """Return the rows of the capture. Raises MissingError if it is unknown, InvalidError while a pipeline reads it."""
    tables = await catalogue.tables(config.name)
    row = await catalogue.get(CaptureRow, config.name)
    if not tables and row is None:
        raise MissingError(f"no such capture: capture={config.name}.", fix="See tidemill capture list.")
    read_by = await list_reading_pipelines(catalogue, config.name)
    if read_by and not really:
        raise InvalidError(
            f"the capture is in use: capture={config.name} by={','.join(read_by)}.",
            fix="End those pipelines first; their tables keep their rows. To drop it anyway: --force",
        )
    return row, tables


async def _lock_stopped_capture(
    wire: PgConnection, config: CaptureConfig, catalogue: Catalogue, really: bool
) -> tuple[CaptureRow | None, Sequence[CaptureTableRow]]:
    """Acquire the lock of the capture, and wait until its slot is inactive. Return its rows: a session that had the
    lock until now may have added tables. Raises ConflictError while it runs, InvalidError for another cluster, and as
    `_find_unread_capture`."""
    if not await _retry_until_done(lambda: try_advisory_lock(wire, config)):
        holder = await find_lock_holder(wire, ADVISORY_CLASS, advisory_lock_key(config))
        raise ConflictError(
            f"the capture is running: capture={config.name} {holder or 'pid=gone'}.", fix=stop_first(config.name)
        )
    row, tables = await _find_unread_capture(config, catalogue, really)
    await _check_cluster(wire, config, row, really)
    # PostgreSQL would reject only the drop of an active slot, after other changes.
    if not await _retry_until_done(lambda: _is_slot_inactive(wire, config)):
        holder = await find_slot_holder(wire, config.slot)
        raise ConflictError(
            f"the slot of the capture is in use: capture={config.name} slot={config.slot} {holder or 'pid=gone'}.",
            fix="Run the command again when that session has ended. If its process is gone, PostgreSQL ends the session"
            " after wal_sender_timeout.",
        )
    return row, tables


def stop_first(capture: str) -> str:
    """Return the remedy for a capture that runs."""
    return (
        "Stop its node (Ctrl-C where `tidemill up` runs), and drop the capture when the node has ended. If the node has"
        f" to continue, remove [capture.{capture}] from tidemill.toml and restart it before."
    )


async def _retry_until_done(done: Callable[[], Awaitable[bool]]) -> bool:
    """Return whether `done` succeeds within ENDED_ATTEMPTS. PostgreSQL ends a session a moment after its client has
    closed it.
    """
    for attempt in range(ENDED_ATTEMPTS):
        if attempt:
            await asyncio.sleep(ENDED_POLL_S)
        if await done():
            return True
    return False


async def _check_cluster(wire: PgConnection, config: CaptureConfig, row: CaptureRow | None, really: bool) -> None:
    found = await wire.value("SELECT system_identifier FROM pg_control_system()")
    if row is not None and row.system_id != found and not really:
        raise InvalidError(
            f"this is not the cluster that was captured: capture={config.name} recorded={row.system_id} found={found}.",
            fix="Use the DSN of the captured cluster, whose slot retains WAL. If it no longer exists: --force",
        )


async def _revert_database(
    wire: PgConnection, config: CaptureConfig, tables: Sequence[CaptureTableRow], done: TeardownResult, *, given: bool
) -> None:
    if await read_slot_state(wire, config.slot) is not None:
        done.slot = await _try_statement(wire, f"SELECT pg_drop_replication_slot({literal(config.slot)})", done)
    if await _drop_publication(wire, config, done, given):
        for table in tables:
            for oid, (relation, before) in table.identities.items():
                await _restore_identity(wire, oid, relation, before, done)
        await _report_asked_identities(wire, tables, done)


async def _is_slot_inactive(wire: PgConnection, config: CaptureConfig) -> bool:
    slot = await read_slot_state(wire, config.slot)
    return slot is None or slot.active_pid is None


async def _drop_publication(wire: PgConnection, config: CaptureConfig, done: TeardownResult, given: bool) -> bool:
    """Return whether the publication was dropped, or is meant to stay."""
    found = await _find_publication(wire, config)
    if found is None:
        return True
    owned, owner = found
    if given or not owned:
        done.publication_left = True
        _report_kept_publication(config, owner, done)
        return True
    done.publication = await _try_statement(wire, _drop_statement(config), done)
    return done.publication


async def _find_publication(wire: PgConnection, config: CaptureConfig) -> tuple[bool, str] | None:
    """Return whether the role may drop the publication, and its owner; None if there is no publication."""
    rows = await wire.query(
        "SELECT pg_has_role(pubowner, 'USAGE'), pg_get_userbyid(pubowner) FROM pg_publication"
        f" WHERE pubname = {literal(config.publication)}"
    )
    return (rows[0][0] == "t", rows[0][1] or "") if rows else None


def _drop_statement(config: CaptureConfig) -> str:
    return f"DROP PUBLICATION {identifier(config.publication)}"


def _report_kept_publication(config: CaptureConfig, owner: str, done: TeardownResult) -> None:
    why = f"the publication was not created by the capture: owner={owner}"
    done.for_administrator[_drop_statement(config)] = why


async def _restore_identity(wire: PgConnection, oid: int, relation: str, before: str, done: TeardownResult) -> None:
    statement = f"ALTER TABLE {relation} REPLICA IDENTITY {before}"
    try:
        name = await restore_identity(wire, oid, before, attempts=LOCK_ATTEMPTS)
    except InvalidError as error:  # required, no privilege, a missing index: every retry would fail
        done.for_administrator[statement] = error.message
    except TidemillError as error:
        done.left[statement] = error.message
    else:
        if name:
            done.identities[name] = before


async def _report_asked_identities(wire: PgConnection, tables: Sequence[CaptureTableRow], done: TeardownResult) -> None:
    """Report how to revert identities that an administrator was asked to set."""
    asked = {oid: noted for table in tables for oid, noted in table.identities_asked.items()}
    if not asked:
        return
    oids = ", ".join(str(int(oid)) for oid in asked)
    for (oid,) in await wire.query(f"SELECT oid FROM pg_class WHERE relreplident = 'f' AND oid IN ({oids}) ORDER BY 1"):
        relation, before = asked[int(oid or 0)]
        found = await find_identity_failures(wire, [(int(oid or 0), before)])
        why = f"an administrator set it to FULL for the capture: relation={relation}"
        if found:
            why += f" needed_by={','.join(sorted({each.publication for each in found}))}"
        done.for_administrator[f"ALTER TABLE {relation} REPLICA IDENTITY {before}"] = why


async def _try_statement(wire: PgConnection, statement: str, done: TeardownResult) -> bool:
    try:
        await wire.query(statement)
    except TidemillError as error:
        done.left[statement] = error.message
        return False
    return True


async def _delete_local_state(
    catalogue: Catalogue, config: CaptureConfig, tables: Sequence[CaptureTableRow], done: TeardownResult
) -> None:
    for table in tables:
        if table.topic:
            await delete_topics(catalogue, table.topic)
            done.topics.append(table.topic)
        await catalogue.change_table(config.name, table.table, lambda _: None)
    if await catalogue.get(CaptureRow, config.name) is not None:
        await catalogue.delete(CaptureRow, config.name)
