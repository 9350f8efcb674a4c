"""Prepare a locked and checked database for streaming: publication, slot, topics, catalogue rows, snapshot.

The first session publishes all tables that can be captured, creates the slot, and copies the tables before the stream
begins. Later, a fresh table is copied concurrently with the stream (table_adder.py), so that it delays no other table.
The slot is retained as long as it and the publication are valid, even while no table is copied.

Every step is idempotent. The row of a table is written before anything that the old row vouched for is touched:

    row without a snapshot  →  its topic deleted and re-created  →  copied  →  row with its snapshot

A process that dies in between therefore starts that table over cleanly (generation + 1), and no binding was minted for
its new topic. If chunks of the copy were recorded (copier.py), the next session resumes the copy concurrently with the
stream.

A table starts over if its snapshot is older than the confirmed LSN of the slot and no binding covers it, because the
changes between the two are in no topic. Tables also start over if the database, the slot or the publication has moved
(continuity_check.py). If a restore wrote the capture's row and the slot is ahead of the restored bindings, all tables
start over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Container, Iterable, Mapping, Sequence

import structlog
from msgspec.structs import replace

from tidemill.base.errors import InvalidError, TidemillError, UnavailableError
from tidemill.base.lsn import Lsn
from tidemill.capture.capture_row import FencedCaptureRow
from tidemill.capture.catalog.columns import TableAttributes, read_attributes
from tidemill.capture.catalog.foreign_publications import find_objections
from tidemill.capture.catalog.relations import describe_tables
from tidemill.capture.catalog.schema_diff import diff_against_catalogue
from tidemill.capture.catalog.schema_versions import plan_next_version, targets_of_attributes
from tidemill.capture.catalog.table_choice import NoTablesError, Refusal, TableChoice, choose_tables
from tidemill.capture.catalog.table_discovery import TableInfo, list_tables
from tidemill.capture.changes import LSN_NEVER, Relation
from tidemill.capture.config import CaptureConfig
from tidemill.capture.postgres.connection import PgConnection, identifier
from tidemill.capture.session.continuity_check import (
    ContinuityResult,
    check_continuity,
    record_history,
    validate_rows,
)
from tidemill.capture.session.set_up_context import PreparedSession, ServerState, SetUpContext
from tidemill.capture.setup.identity_withdrawal import find_unwanted_full_identities, withdraw_identity
from tidemill.capture.setup.publication import (
    PublishRequest,
    PublishResult,
    create_publication,
    not_published_error,
    publish_tables,
    read_published_tables,
)
from tidemill.capture.setup.server_checks import (
    SlotState,
    check_slot,
    create_slot,
    is_slot_usable,
    read_slot_state,
    start_over_instruction,
)
from tidemill.capture.snapshot.copier import CopyContext, copy_tables
from tidemill.capture.snapshot.side_topic import delete_unused_side_topics, join_completed_copies, prepare_side_topic
from tidemill.capture.tables.auto_recopy import can_copy_resolve
from tidemill.capture.tables.copy_progress import SnapshotProgress
from tidemill.capture.tables.table_reasons import PauseCause, accept_instruction, explain_missing_table, refusal_for
from tidemill.capture.tables.table_setup import (
    create_copy_target,
    event_source_of,
    refuse_taken_topics,
    relation_of_row,
    start_table,
    stream_producer_id,
    update_topic_config,
)
from tidemill.capture.topics.captured_table import CapturedTable
from tidemill.metastore.catalogue import (
    CaptureRow,
    CaptureTableRow,
    TopicRow,
)

log = structlog.get_logger()

SLOT_FREE_POLL_S = 0.2
SLOT_FREE_ATTEMPTS = 400
"""The same wait as that of a session that starts to stream (session_lock.SLOT_ATTEMPTS)."""
FIRST_LOCK_ATTEMPTS = 3
"""Attempts to lock one table while the whole capture waits. The lock is retried concurrently with the stream."""


async def prepare_session(context: SetUpContext) -> PreparedSession:
    """Prepare a session: decide which tables continue, which start over, and which are new.

    Raises InvalidError (nothing can be captured, or a privilege is missing), SlotLostError, SqlError, UnavailableError.
    """
    row = await context.own.read()
    if row is not None and row.system_id != context.facts.system_id:
        raise InvalidError(
            f"this capture belongs to another database cluster: capture={context.config.name}"
            f" recorded={row.system_id} found={context.facts.system_id}.",
            fix="Correct the DSN, or start the capture over.",
        )
    found, choice = await _choose_tables(context)
    if row is not None:  # `wire` answered after the row was read, so this session still had the lock (capture_row.py)
        await context.own.claim()
    rows, server = await _read_state(context, found, choice)
    resumes = False
    if context.own.row is not None:
        rows, server, resumes = await _compare_positions(context, rows, server)
    context.steps.begin_phase("deleting topics of dropped tables")
    context.states.replace_rows(rows)
    await delete_unused_side_topics(context.catalogue, context.states)
    if resumes or any(table.snapshot is not None or table.copy is not None for table in rows.values()):
        return await _prepare_next_session(context, server, await _join_copies(context, server))
    return await _prepare_first_session(context, server)


# what the server has ------------------------------------------------------------------------------
async def _choose_tables(context: SetUpContext) -> tuple[list[TableInfo], TableChoice]:
    """Return the tables of the database, and those to capture. Identities that no capture needs are withdrawn first."""
    wire, config, steps = context.wire, context.config, context.steps
    steps.begin_phase("reading publications")
    objected = await find_objections(wire, config)
    if context.own.row is not None:
        # Before taking any lock that would block the withdrawal (identity_withdrawal.py).
        rows = await context.catalogue.tables(config.name)
        for one in await find_unwanted_full_identities(wire, config, rows, objected):
            await withdraw_identity(wire, config, one)
    steps.begin_phase("listing tables")
    found = await list_tables(wire)
    try:
        choice = choose_tables(
            config.tables, found, context.facts.version, whole=config.requires_full_identity, objections=objected
        )
    except InvalidError:
        # An existing slot retains WAL that has to be released, and tables may appear later.
        if context.own.row is None:
            raise
        choice = TableChoice((), {})
    return found, choice


async def _read_state(
    context: SetUpContext, found: list[TableInfo], choice: TableChoice
) -> tuple[dict[str, CaptureTableRow], ServerState]:
    """Return the rows of the tables, and the state of publication, slot and bindings."""
    wire, config, catalogue = context.wire, context.config, context.catalogue
    context.steps.begin_phase("reading the catalogue's tables")
    rows = {table.table: table for table in await catalogue.tables(config.name)}
    context.steps.begin_phase("reading the slot")
    published = await read_published_tables(wire, config.publication, manual=config.manual)
    slot = await read_slot_state(wire, config.slot)
    return rows, ServerState(found, choice, published, slot, await context.remap.latest())


async def _compare_positions(
    context: SetUpContext, rows: dict[str, CaptureTableRow], server: ServerState
) -> tuple[dict[str, CaptureTableRow], ServerState, bool]:
    """Return the valid rows, the state with the newest binding of this history, and whether the capture resumes even
    with no table copied.
    """
    context.steps.begin_phase("comparing positions")
    was_complete = context.own.current.snapshot_done
    moved = await check_continuity(context, rows, server)
    rows, reason = await validate_rows(context, rows, server, moved)
    latest = await record_history(context, server, moved, reason)
    _report_history(context, moved, reason)
    # Shapes may follow a table whose copy was abandoned, and a new slot would end them.
    is_usable = server.published is not None and is_slot_usable(server.slot)
    resumes = bool(rows) and was_complete and not reason and is_usable
    return rows, replace(server, latest=latest), resumes


def _report_history(context: SetUpContext, moved: ContinuityResult, reason: str) -> None:
    """Report a failover, and why tables are copied again."""
    states, fork_lsn = context.states, moved.fork_lsn
    if reason or fork_lsn is not None:
        lost_nothing = f"nothing that was captured is lost: timeline={context.line.number} fork={Lsn(fork_lsn or 0)}."
        states.history = (
            reason or f"the captured database failed over to another timeline, {lost_nothing}",
            context.clock.now_ms(),
        )
    if fork_lsn is not None:
        states.statuses.clear_capture_failures()


async def _join_copies(context: SetUpContext, server: ServerState) -> SlotState:
    """Let completed copies join the stream. Return the slot."""
    wire, config, states = context.wire, context.config, context.states
    slot = check_slot(config, await read_slot_state(wire, config.slot))
    has_ended_side_topic = any(row.side_topic is not None and row.side_topic.ends for row in states.rows.values())
    if slot.active_pid is not None and has_ended_side_topic:
        # The predecessor's last status may still be in flight, and the position at which a table joins depends on it.
        slot = await _wait_for_free_slot(wire, config)
    context.steps.begin_phase("joining completed copies")
    await join_completed_copies(config, context.catalogue, states, context.topics, server.latest, slot, context.clock)
    return slot


async def start_over_undecodable(wire: PgConnection, config: CaptureConfig, rows: Iterable[CaptureTableRow]) -> None:
    """Start over with a slot that PostgreSQL cannot decode. If nothing was confirmed since the first copy, the copies
    are the only content: the publication is dropped, so that the next session re-creates it and the slot and copies all
    tables again. Otherwise an operator has to decide, because a table that was copied recently, concurrently with the
    stream, is newer than the confirmed LSN.

    Raises UnavailableError if everything starts over, InvalidError if the capture is manual and an operator has to drop
    the slot.
    """
    slot = await read_slot_state(wire, config.slot)
    copied = [row.snapshot.lsn for row in rows if row.snapshot is not None]
    if slot is not None and copied and slot.confirmed_lsn > min(copied):
        return
    if config.manual:
        raise InvalidError(
            f"PostgreSQL cannot decode the replication slot: slot={config.slot}.", fix=start_over_instruction(config)
        )
    log.warning("the slot cannot be decoded, so all tables start over", capture=config.name)
    await wire.query(f"DROP PUBLICATION IF EXISTS {identifier(config.publication)}")
    raise UnavailableError(
        f"PostgreSQL cannot decode its own replication slot: slot={config.slot}.",
        fix="A new slot is created and the tables are copied again automatically.",
    )


# the first session --------------------------------------------------------------------------------
async def _prepare_first_session(context: SetUpContext, server: ServerState) -> PreparedSession:
    """Start from nothing: publish the tables, create the slot, and have every table copied before the stream begins."""
    choice = await refuse_taken_topics(context.config, context.catalogue, server.choice)
    if context.own.row is None and not choice.tables:
        _raise_no_tables(choice.refused.values())
    published = server.published or {}
    if server.published is None:
        await _create_publication(context)
    done = await _publish(context, choice.tables, published, attempts=1)
    context.steps.end()
    refused = {n: e for n, e in done.failed.items() if isinstance(e, InvalidError)}
    await _raise_if_all_refused(context, choice, refused)
    context.steps.begin_phase("creating the slot")
    slot = await create_slot(context.wire, context.config)
    # Creating the slot waited for the open transactions, so the locks that they held may be free now.
    waiting = [t for t in choice.tables if isinstance(done.failed.get(t.name), UnavailableError)]
    retried = await _publish(context, waiting, published, attempts=FIRST_LOCK_ATTEMPTS)
    context.steps.begin_phase("describing tables")
    relations = await describe_tables(context.wire, [table.oid for table in choice.tables])
    accepted = await _refuse_failed(context, choice, {**refused, **retried.failed}, relations)
    await _record_first_row(context, server, has_tables=bool(accepted))
    captured = await _create_topics(context, accepted, relations)
    fresh = tuple(table.name for table in captured)
    return PreparedSession(slot, choice.tables, tuple(captured), fresh, relations)


async def _create_publication(context: SetUpContext) -> None:
    if context.config.manual:
        raise not_published_error(context.config.publication, context.facts.version)
    await create_publication(context.wire, context.config.publication)


async def _publish(
    context: SetUpContext, tables: Sequence[TableInfo], published: Collection[int], *, attempts: int
) -> PublishResult:
    def begin_table(number: int) -> None:
        context.steps.begin_table_step("publishing tables", number, len(tables))

    request = PublishRequest(tables, published, settle=published, attempts=attempts)
    return await publish_tables(context.wire, context.config, request, context.states, begin_table)


async def _raise_if_all_refused(
    context: SetUpContext, choice: TableChoice, refused: Mapping[str, InvalidError]
) -> None:
    """Raise the error of the first table if a new capture has no other table."""
    if context.own.row is None and choice.tables and len(refused) == len(choice.tables):
        if not context.config.manual:
            # A refusal leaves nothing half-created behind.
            await context.wire.query(f"DROP PUBLICATION {identifier(context.config.publication)}")
        raise next(iter(refused.values()))


async def _refuse_failed(
    context: SetUpContext, choice: TableChoice, failed: Mapping[str, TidemillError], relations: Container[int]
) -> list[TableInfo]:
    """Report the tables that cannot be captured, and return the others."""
    accepted = []
    for table in choice.tables:
        if table.name in failed:
            await context.states.refuse_table(table.name, refusal_for(failed[table.name]), table.oid)
        elif table.oid in relations:  # otherwise it was dropped in the meantime
            accepted.append(table)
    await context.states.refuse_all(choice.refused)
    return accepted


async def _record_first_row(context: SetUpContext, server: ServerState, *, has_tables: bool) -> None:
    """Write the capture's row, with a new generation."""
    row, config = context.own.row, context.config
    generation = row.generation + 1 if row is not None else 1
    # A publication that was dropped since belongs to the creator of the next one. "given" is retained while it exists.
    given = config.manual or (row is not None and row.given_publication and server.published is not None)
    begun = CaptureRow(
        config.name, context.facts.system_id, config.slot, config.publication, generation, not has_tables,
        given_publication=given, history=context.line.history,
    )  # fmt: skip
    if row is not None:
        begun = replace(begun, era=row.era, recopied=row.recopied, recopied_ms=row.recopied_ms)
    await context.own.replace_row(begun)


async def _create_topics(
    context: SetUpContext, tables: list[TableInfo], relations: Mapping[int, Relation]
) -> list[CapturedTable]:
    """Create the topics of tables that are copied before the stream begins."""
    wire, config, catalogue, states = context.wire, context.config, context.catalogue, context.states
    entries = await read_published_tables(wire, config.publication, manual=config.manual) or {}
    captured = []
    for number, table in enumerate(tables, 1):
        context.steps.begin_table_step("creating topics", number, len(tables))
        if table.oid not in entries:
            unpublished = f"the table was unpublished during the set-up: table={table.name}."
            await states.refuse_table(table.name, refusal_for(UnavailableError(unpublished)), table.oid)
            continue
        topic = await start_table(config, catalogue, states, table, relations[table.oid], entries[table.oid])
        if topic is not None:
            source = event_source_of(config, states.rows[table.name], wire.database)
            captured.append(CapturedTable(table.name, topic, stream_producer_id(config), oid=table.oid, source=source))
    return captured


async def take_first_snapshot(
    context: CopyContext, prepared: PreparedSession, own: FencedCaptureRow, progress: SnapshotProgress
) -> list[int]:
    """Take the first snapshot; the stream starts after it. A table that fails is left out of the stream. Return the
    oids of the tables.
    """
    config, rows = context.config, context.states.rows
    log.info("snapshot begins", capture=config.name, tables=list(prepared.fresh))
    fresh = [table for table in prepared.captured if table.name in prepared.fresh]
    tables = [table for table in prepared.tables if table.name in prepared.fresh]
    progress.cause = next((rows[name].reason for name in prepared.fresh if rows[name].reason), "")
    targets = {table.name: create_copy_target(config, rows[table.name], table.topic, table.source) for table in fresh}
    done = await copy_tables(context, tables, targets, progress)
    for table in fresh:
        table.snapshot = context.states.rows[table.name].snapshot if table.name in done else None
    await own.update(lambda found: replace(found, snapshot_done=True))
    return [table.oid for table in fresh]


# later sessions -----------------------------------------------------------------------------------
async def _prepare_next_session(context: SetUpContext, server: ServerState, slot: SlotState) -> PreparedSession:
    """Resume: stream the tables that are already captured. The others are added concurrently with the stream."""
    wire, states = context.wire, context.states
    if not context.own.current.snapshot_done:
        await context.own.update(lambda found: replace(found, snapshot_done=True))
    context.steps.begin_phase("describing tables")
    wal_end = Lsn.parse(await wire.value("SELECT pg_current_wal_insert_lsn()") or "0/0").value
    known = [table.oid for table in server.found if table.name in states.rows]
    described = await describe_tables(wire, known)
    attributes = await read_attributes(wire, known)
    wanted = {table.name for table in server.choice.tables}
    for table in [table for table in states.rows.values() if table.is_streaming]:
        if table.table not in wanted:
            await _pause_unwanted(context, server, table, wal_end)
        elif table.columns and table.oid in described:
            await _pause_if_changed(context, table, described[table.oid], attributes.get(table.oid), wal_end)
    await states.refuse_all(server.choice.refused)
    captured = await _resume_tables(context, slot)
    relations = {table.oid: relation_of_row(states.rows[table.name], described.get(table.oid)) for table in captured}
    side_topics = {}
    for row in [row for row in states.rows.values() if row.table in wanted]:
        carried = await prepare_side_topic(
            context.config, context.catalogue, states, row, described.get(row.oid), wire.database
        )
        if carried is not None:
            side_topics[row.table], relations[row.oid] = carried
    return PreparedSession(
        slot, server.choice.tables, (*captured, *side_topics.values()), (), relations, side_topics, attributes
    )


async def _pause_unwanted(context: SetUpContext, server: ServerState, row: CaptureTableRow, wal_end: int) -> None:
    """Pause a table that was dropped, or must not be captured in its present form."""
    why = server.choice.refused.get(row.table)
    if why is not None and any((table.name, table.oid) == (row.table, row.oid) for table in server.found):
        cause = PauseCause.of_refusal(why)
    else:
        cause = PauseCause(*explain_missing_table(row, server.found), state="dropped")
    await context.states.pause_table(row.table, wal_end, cause)


async def _pause_if_changed(
    context: SetUpContext, row: CaptureTableRow, relation: Relation, attributes: TableAttributes | None, wal_end: int
) -> None:
    """Pause a table whose description changed, unless the stream or the watcher can follow the change."""
    difference = diff_against_catalogue(row.columns, relation)
    if not difference:
        return
    step: object = ""
    if attributes is not None:
        step = plan_next_version(row, targets_of_attributes(attributes), attributes)
    if not isinstance(step, str):
        return
    cause = PauseCause(
        f"its description changed: {difference}; {step}" if step else f"its description changed: {difference}",
        accept_instruction(row.table),
        again=can_copy_resolve(row, attributes),
        found=attributes,
    )
    await context.states.pause_table(row.table, wal_end, cause)


def _is_resumable(row: CaptureTableRow, slot: SlotState) -> bool:
    """Return whether the stream still carries changes of a copied table. Pure."""
    is_paused_before_slot = bool(row.paused_lsn) and row.paused_lsn <= slot.confirmed_lsn
    return row.snapshot is not None and not is_paused_before_slot and row.state in ("captured", "parked", "dropped")


async def _resume_tables(context: SetUpContext, slot: SlotState) -> list[CapturedTable]:
    """Return the copied tables with their topics. A table without its topic is paused."""
    config, catalogue, states = context.config, context.catalogue, context.states
    captured = []
    for number, row in enumerate(states.rows.values(), 1):
        context.steps.begin_table_step("looking up topics", number, len(states.rows))
        if not _is_resumable(row, slot):
            continue
        topic = await catalogue.get(TopicRow, row.topic)
        if topic is None:
            cause = PauseCause(f"its topic is missing: topic={row.topic}")
            await states.pause_table(row.table, slot.confirmed_lsn, cause)
            continue
        topic = await update_topic_config(config, catalogue, topic)
        if row.envelope != config.envelope:
            log.info("a table retains its envelope until it is re-snapshotted", table=row.table, has=row.envelope)
        table = CapturedTable(
            row.table, topic, stream_producer_id(config), oid=row.oid, paused_lsn=row.paused_lsn or LSN_NEVER,
            source=event_source_of(config, row, context.wire.database),
        )  # fmt: skip
        table.snapshot = row.snapshot
        captured.append(table)
    return captured


async def _wait_for_free_slot(wire: PgConnection, config: CaptureConfig) -> SlotState:
    """Return the slot once no connection streams from it. A walsender whose client is gone notices that at its next
    write. Raises UnavailableError if the slot stays active for too long.
    """
    for _ in range(SLOT_FREE_ATTEMPTS):
        slot = check_slot(config, await read_slot_state(wire, config.slot))
        if slot.active_pid is None:
            return slot
        await asyncio.sleep(SLOT_FREE_POLL_S)
    raise UnavailableError(f"the slot is in use: slot={config.slot} pid={slot.active_pid}.")


def _raise_no_tables(refused: Iterable[Refusal]) -> None:
    for why in refused:
        raise NoTablesError(why.reason, fix=why.fix)
    raise NoTablesError("no table matches the capture's patterns.", fix="Correct `tables` of this capture.")
