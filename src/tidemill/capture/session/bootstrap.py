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
from collections.abc import Iterable

import msgspec
import structlog
from msgspec.structs import replace

from tidemill.base.clock import Clock, Rand
from tidemill.base.errors import InvalidError, UnavailableError
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
from tidemill.capture.postgres.timeline import Timeline
from tidemill.capture.session.continuity_check import (
    check_continuity,
    record_history,
    validate_rows,
)
from tidemill.capture.setup.publication import (
    PublishedTable,
    create_publication,
    not_published_error,
    publish_tables,
    read_published_tables,
)
from tidemill.capture.setup.server_checks import (
    ServerFacts,
    SlotState,
    check_slot,
    create_slot,
    is_slot_usable,
    read_slot_state,
    start_over_instruction,
)
from tidemill.capture.snapshot.copier import copy_tables
from tidemill.capture.snapshot.side_topic import delete_unused_side_topics, join_completed_copies, prepare_side_topic
from tidemill.capture.tables.auto_recopy import can_copy_resolve
from tidemill.capture.tables.copy_progress import SetUpSteps, SnapshotProgress
from tidemill.capture.tables.identity_withdrawal import find_unwanted_full_identities, withdraw_identity
from tidemill.capture.tables.table_reasons import accept_instruction, explain_missing_table, refusal_for
from tidemill.capture.tables.table_setup import (
    create_copy_target,
    event_source_of,
    refuse_taken_topics,
    relation_of_row,
    start_table,
    stream_producer_id,
    update_topic_config,
)
from tidemill.capture.tables.table_states import TableStates
from tidemill.capture.topics.captured_table import CapturedTable
from tidemill.metastore.catalogue import (
    CaptureRow,
    CaptureTableRow,
    Catalogue,
    TopicRow,
)
from tidemill.shards.api import Remap
from tidemill.topics.api import TopicLog

log = structlog.get_logger()

SLOT_FREE_POLL_S = 0.2
SLOT_FREE_ATTEMPTS = 400
"""The same wait as that of a session that starts to stream (session_lock.SLOT_ATTEMPTS)."""
FIRST_LOCK_ATTEMPTS = 3
"""Attempts to lock one table while the whole capture waits. The lock is retried concurrently with the stream."""


class PreparedSession(msgspec.Struct, frozen=True):
    """Result of the set-up.

    `captured`: tables that the stream carries, at least up to the position at which they are paused. `fresh`: those of
    them that are copied before the stream begins. `aside`: tables by name whose changes go to a side topic while their
    copy runs. `tables`: the database's description of all chosen tables. `attributes`: the column attributes of the
    known tables, by oid.
    """

    slot: SlotState
    tables: tuple[TableInfo, ...]
    captured: tuple[CapturedTable, ...]
    fresh: tuple[str, ...]
    relations: dict[int, Relation]
    aside: dict[str, CapturedTable] = {}
    attributes: dict[int, TableAttributes] = {}


async def prepare_session(
    wire: PgConnection,
    config: CaptureConfig,
    facts: ServerFacts,
    catalogue: Catalogue,
    own: FencedCaptureRow,
    remap: Remap,
    line: Timeline,
    desk: TableStates,
    topics: TopicLog,
    clock: Clock,
    steps: SetUpSteps,
) -> PreparedSession:
    """Prepare a session: decide which tables continue, which start over, and which are new.

    `wire` holds the capture's lock. `own` is the capture's row, which is claimed here. `line` is the server's timeline.

    Raises InvalidError (nothing can be captured, or a privilege is missing), SlotLost, SqlError, UnavailableError. A
    failure of one table affects that table only and is reported through `desk`.
    """
    row = await own.read()
    if row is not None and row.system_id != facts.system_id:
        raise InvalidError(
            f"this capture belongs to another database cluster: capture={config.name}"
            f" recorded={row.system_id} found={facts.system_id}.",
            fix="Correct the DSN, or start the capture over.",
        )
    steps.begin_phase("reading publications")
    objected = await find_objections(wire, config)
    if row is not None:
        # Before taking any lock that would block the withdrawal (identity_withdrawal.py).
        for one in await find_unwanted_full_identities(wire, config, await catalogue.tables(config.name), objected):
            await withdraw_identity(wire, config, one)
    steps.begin_phase("listing tables")
    found = await list_tables(wire)
    try:
        choice = choose_tables(
            config.tables, found, facts.version, whole=config.requires_full_identity, objections=objected
        )
    except InvalidError:
        # An existing slot retains WAL that has to be released, and tables may appear later.
        if row is None:
            raise
        choice = TableChoice((), {})
    if row is not None:  # `wire` answered after the row was read, so this session still had the lock (capture_row.py)
        row = await own.claim()
    steps.begin_phase("reading the catalogue's tables")
    rows = {table.table: table for table in await catalogue.tables(config.name)}
    steps.begin_phase("reading the slot")
    published = await read_published_tables(wire, config.publication, manual=config.manual)
    state = await read_slot_state(wire, config.slot)
    latest = await remap.latest()
    continues = False
    if row is not None:
        steps.begin_phase("comparing positions")
        moved = await check_continuity(config, row, rows, line, state, latest, catalogue, topics)
        rows, reason = await validate_rows(wire, config, catalogue, rows, choice, published, state, latest, moved)
        # Even with no table copied: shapes may follow a table whose copy was abandoned, and a new slot would end them.
        continues = bool(rows) and row.snapshot_done and not reason and published is not None and is_slot_usable(state)
        row, latest = await record_history(own, remap, clock, line, state, latest, moved, reason)
        if reason or moved.fork_lsn is not None:
            lost_nothing = f"nothing that was captured is lost: timeline={line.number} fork={Lsn(moved.fork_lsn or 0)}."
            desk.history = (
                reason or f"the captured database failed over to another timeline, {lost_nothing}",
                clock.now_ms(),
            )
        if moved.fork_lsn is not None:
            desk.clear_capture_failures()
    steps.begin_phase("deleting topics of dropped tables")
    desk.replace_rows(rows)
    await delete_unused_side_topics(catalogue, desk)
    if continues or any(table.snapshot is not None or table.copy is not None for table in rows.values()):
        assert row is not None
        slot = check_slot(config, await read_slot_state(wire, config.slot))
        if slot.active_pid is not None and any(row.aside is not None and row.aside.ends for row in rows.values()):
            # The predecessor's last status may still be in flight, and the position at which a table joins depends on
            # it.
            slot = await _wait_for_free_slot(wire, config)
        steps.begin_phase("joining completed copies")
        await join_completed_copies(config, catalogue, desk, topics, latest, slot, clock)
        return await _prepare_next_session(wire, config, catalogue, desk, own, choice, found, slot, steps)
    return await _prepare_first_session(wire, config, facts, line, catalogue, desk, own, choice, published, steps)


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


async def _prepare_first_session(
    wire: PgConnection,
    config: CaptureConfig,
    facts: ServerFacts,
    line: Timeline,
    catalogue: Catalogue,
    desk: TableStates,
    own: FencedCaptureRow,
    choice: TableChoice,
    published: dict[int, PublishedTable] | None,
    steps: SetUpSteps,
) -> PreparedSession:
    """Start from nothing: publish the tables, create the slot, and have every table copied before the stream begins."""
    row = own.row
    choice = await refuse_taken_topics(config, catalogue, choice)
    if row is None and not choice.tables:
        _raise_no_tables(choice.refused.values())
    if published is None and config.manual:
        raise not_published_error(config.publication, facts.version)
    if published is None:
        await create_publication(wire, config.publication)
    done = await publish_tables(
        wire, config, choice.tables, published or {}, attempts=1, note=desk.store_identities, settle=published or {},
        asked=desk.store_asked_identities, done=lambda number: steps.begin_table_step("publishing tables", number,
        len(choice.tables)),
    )  # fmt: skip
    steps.end()
    refused = {n: e for n, e in done.failed.items() if isinstance(e, InvalidError)}
    if row is None and choice.tables and len(refused) == len(choice.tables):
        if not config.manual:
            # A refusal leaves nothing half-created behind.
            await wire.query(f"DROP PUBLICATION {identifier(config.publication)}")
        raise next(iter(refused.values()))
    steps.begin_phase("creating the slot")
    slot = await create_slot(wire, config)
    # Creating the slot waited for the open transactions, so the locks that they held may be free now.
    waiting = [t for t in choice.tables if isinstance(done.failed.get(t.name), UnavailableError)]
    again = await publish_tables(
        wire, config, waiting, published or {}, attempts=FIRST_LOCK_ATTEMPTS, note=desk.store_identities,
        settle=published or {}, asked=desk.store_asked_identities, done=lambda number:
        steps.begin_table_step("publishing tables", number, len(waiting)),
    )  # fmt: skip
    failed = {**refused, **again.failed}
    steps.begin_phase("describing tables")
    relations = await describe_tables(wire, [table.oid for table in choice.tables])
    taken = []
    for table in choice.tables:
        if table.name in failed:
            await desk.refuse_table(table.name, refusal_for(failed[table.name]), table.oid)
        elif table.oid in relations:  # otherwise it was dropped in the meantime
            taken.append(table)
    await desk.refuse_all(choice.refused)
    generation = row.generation + 1 if row is not None else 1
    # A publication that was dropped since belongs to the creator of the next one. "given" is retained while it exists.
    given = config.manual or (row is not None and row.given_publication and published is not None)
    begun = CaptureRow(
        config.name, facts.system_id, config.slot, config.publication, generation, not taken, given_publication=given,
        history=line.history,
    )  # fmt: skip
    if row is not None:
        begun = replace(begun, era=row.era, recopied=row.recopied, recopied_ms=row.recopied_ms)
    await own.replace_row(begun)
    entries = await read_published_tables(wire, config.publication, manual=config.manual) or {}
    captured = []
    for number, table in enumerate(taken, 1):
        steps.begin_table_step("creating topics", number, len(taken))
        if table.oid not in entries:
            unpublished = f"the table was unpublished during the set-up: table={table.name}."
            await desk.refuse_table(table.name, refusal_for(UnavailableError(unpublished)), table.oid)
            continue
        topic = await start_table(config, catalogue, desk, table, relations[table.oid], entries[table.oid])
        if topic is not None:
            source = event_source_of(config, desk.rows[table.name], wire.database)
            captured.append(CapturedTable(table.name, topic, stream_producer_id(config), oid=table.oid, source=source))
    fresh = tuple(table.name for table in captured)
    return PreparedSession(slot, choice.tables, tuple(captured), fresh, relations)


async def take_first_snapshot(
    config: CaptureConfig,
    prepared: PreparedSession,
    desk: TableStates,
    own: FencedCaptureRow,
    topics: TopicLog,
    progress: SnapshotProgress,
    clock: Clock,
    rand: Rand,
) -> list[int]:
    """Take the first snapshot; the stream starts after it. A table that fails is left out of the stream. Return the
    oids of the tables.
    """
    log.info("snapshot begins", capture=config.name, tables=list(prepared.fresh))
    fresh = [table for table in prepared.captured if table.name in prepared.fresh]
    tables = [table for table in prepared.tables if table.name in prepared.fresh]
    rows = desk.rows
    progress.cause = next((rows[name].reason for name in prepared.fresh if rows[name].reason), "")
    targets = {table.name: create_copy_target(config, rows[table.name], table.topic, table.source) for table in fresh}
    done = await copy_tables(config, tables, targets, topics, desk, progress, clock, rand)
    for table in fresh:
        table.snapshot = desk.rows[table.name].snapshot if table.name in done else None
    await own.update(lambda found: replace(found, snapshot_done=True))
    return [table.oid for table in fresh]


async def _prepare_next_session(
    wire: PgConnection,
    config: CaptureConfig,
    catalogue: Catalogue,
    desk: TableStates,
    own: FencedCaptureRow,
    choice: TableChoice,
    found: list[TableInfo],
    slot: SlotState,
    steps: SetUpSteps,
) -> PreparedSession:
    """Continue: stream the tables that are already captured. The others are added concurrently with the stream."""
    if not own.current.snapshot_done:
        await own.update(lambda found: replace(found, snapshot_done=True))
    steps.begin_phase("describing tables")
    wanted = {table.name: table for table in choice.tables}
    wal_end = Lsn.parse(await wire.value("SELECT pg_current_wal_insert_lsn()") or "0/0").value
    now = await describe_tables(wire, [t.oid for t in found if t.name in desk.rows])
    attributes = await read_attributes(wire, [t.oid for t in found if t.name in desk.rows])
    for table in [t for t in desk.rows.values() if t.is_streaming]:
        if table.table not in wanted:
            why = choice.refused.get(table.table)
            if why is not None and any((t.name, t.oid) == (table.table, table.oid) for t in found):
                first = why.fix if why.again else ""
                await desk.pause_table(table.table, wal_end, why.reason, again=why.again, first=first)
            else:
                await desk.pause_table(table.table, wal_end, *explain_missing_table(table, found), state="dropped")
        elif table.columns and table.oid in now:
            difference = diff_against_catalogue(table.columns, now[table.oid])
            found_as = attributes.get(table.oid)
            step = (
                plan_next_version(table, targets_of_attributes(found_as), found_as)
                if difference and found_as is not None
                else ""
            )
            if difference and isinstance(step, str):  # else the stream or the watcher handles it
                said = f"{difference}; {step}" if step else difference
                again = can_copy_resolve(table, found_as)
                described = f"its description changed: {said}"
                way = accept_instruction(table.table)
                await desk.pause_table(table.table, wal_end, described, way, again=again, found=found_as)
    await desk.refuse_all(choice.refused)
    captured, relations = [], {}
    for number, table in enumerate(desk.rows.values(), 1):
        steps.begin_table_step("looking up topics", number, len(desk.rows))
        beyond = table.parked_lsn and table.parked_lsn <= slot.confirmed_lsn
        if table.snapshot is None or beyond or table.state not in ("captured", "parked", "dropped"):
            continue
        topic = await catalogue.get(TopicRow, table.topic)
        if topic is None:
            await desk.pause_table(table.table, slot.confirmed_lsn, f"its topic is missing: topic={table.topic}")
            continue
        topic = await update_topic_config(config, catalogue, topic)
        if table.envelope != config.envelope:
            log.info("a table retains its envelope until it is re-snapshotted", table=table.table, has=table.envelope)
        item = CapturedTable(
            table.table, topic, stream_producer_id(config), oid=table.oid, parked_lsn=table.parked_lsn or LSN_NEVER,
            source=event_source_of(config, table, wire.database),
        )  # fmt: skip
        item.snapshot = table.snapshot
        captured.append(item)
        relations[table.oid] = relation_of_row(table, now.get(table.oid))
    aside = {}
    for table in [table for table in desk.rows.values() if table.table in wanted]:
        carried = await prepare_side_topic(config, catalogue, desk, table, now.get(table.oid), wire.database)
        if carried is not None:
            aside[table.table], relations[table.oid] = carried
    return PreparedSession(slot, choice.tables, (*captured, *aside.values()), (), relations, aside, attributes)


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
