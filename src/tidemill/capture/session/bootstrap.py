"""From a locked, checked database to something that can stream: publication, slot, topics, catalogue rows, snapshot.

At the first session all tables that can be taken are published, the slot is made, and they are copied before the
stream begins. Later a fresh table is copied beside the stream (table_adder.py), so one table keeps no other waiting.
The slot is kept as long as it and the publication are good, even while no table is copied.

Every step is idempotent, and a table's row is written before what it no longer vouches for is touched:

    row without a snapshot  →  its topic deleted and created anew  →  copied  →  row with its snapshot

so a process that dies anywhere in between starts that table over cleanly (generation + 1), and no binding was
minted for its new topic. Where chunks of the copy were recorded (copier.py), the next session goes on with it, beside
the stream.

A table whose snapshot is older than what the slot was confirmed to, and that no binding knows, starts over: changes
between the two are in no topic. So do tables of which the database, the slot or the publication has moved since
(continuity_check.py), and, where a restore wrote the capture's row, all of them when the slot is ahead of the restored
bindings.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import msgspec
import structlog
from msgspec.structs import replace

from tidemill.base.clock import Clock
from tidemill.base.errors import InvalidError, UnavailableError
from tidemill.base.lsn import Lsn
from tidemill.capture.capture_row import FencedCaptureRow
from tidemill.capture.catalog.columns import Attributes, attributes_of
from tidemill.capture.catalog.foreign_publications import objections
from tidemill.capture.catalog.schema_diff import against_catalogue
from tidemill.capture.catalog.schema_versions import next_version, targets_of
from tidemill.capture.catalog.table_discovery import (
    Choice,
    NoTablesError,
    Refusal,
    TableInfo,
    describe,
    list_tables,
    resolve,
)
from tidemill.capture.changes import NEVER, Relation
from tidemill.capture.config import CaptureConfig
from tidemill.capture.postgres.connection import Wire, identifier
from tidemill.capture.postgres.timeline import Timeline
from tidemill.capture.session.continuity_check import Moved, begin_era, bind_confirmed, compare, let_go
from tidemill.capture.setup.publication import (
    Entry,
    create_publication,
    not_published,
    publish,
    published_tables,
    unpublished,
)
from tidemill.capture.setup.server_checks import (
    ServerFacts,
    SlotState,
    check_slot,
    create_slot,
    is_good,
    slot_state,
    start_over,
)
from tidemill.capture.snapshot.side_topic import carried_aside, join_ended, sweep
from tidemill.capture.tables.auto_recopy import heals
from tidemill.capture.tables.copy_progress import Steps
from tidemill.capture.tables.identity_withdrawal import withdraw, withheld
from tidemill.capture.tables.table_setup import (
    as_described,
    gone,
    kept_so,
    producer_id,
    refusal_of,
    source_of,
    start_table,
    without_taken,
)
from tidemill.capture.tables.table_states import TableStates, accept
from tidemill.capture.topics.topic_writer import CapturedTable
from tidemill.metastore.catalogue import (
    CaptureRow,
    CaptureTableRow,
    Catalogue,
    TopicRow,
)
from tidemill.shards.api import Binding, Remap
from tidemill.topics.api import TopicLog

log = structlog.get_logger()

FREE_POLL_S = 0.2
FREE_ATTEMPTS = 400
"""As a session that begins to stream waits (locking.SLOT_ATTEMPTS)."""
FIRST_ATTEMPTS = 3
"""For the lock of one table while the whole capture waits; it is tried again beside the stream."""


class Prepared(msgspec.Struct, frozen=True):
    """`captured`: tables that the stream carries, at least up to where they are parked. `fresh`: of these, the ones
    to be copied before it begins. `aside`: by name, those whose changes are set aside while their copy goes on.
    `tables`: what the database says of all that were chosen. `attributes`: … of the columns of those that are known."""

    slot: SlotState
    tables: tuple[TableInfo, ...]
    captured: tuple[CapturedTable, ...]
    fresh: tuple[str, ...]
    relations: dict[int, Relation]
    aside: dict[str, CapturedTable] = {}
    attributes: dict[int, Attributes] = {}


async def prepare(
    wire: Wire,
    config: CaptureConfig,
    facts: ServerFacts,
    catalogue: Catalogue,
    own: FencedCaptureRow,
    remap: Remap,
    line: Timeline,
    desk: TableStates,
    topics: TopicLog,
    clock: Clock,
    steps: Steps,
) -> Prepared:
    """`wire` has the capture's lock. `own`: the capture's row, which is claimed here. `line`: of the server.

    Raises InvalidError (nothing can be captured, rights), SlotLost, SqlError, UnavailableError. What is wrong with one
    table is that table's, and told by `desk`.
    """
    row = await own.read()
    if row is not None and row.system_id != facts.system_id:
        raise InvalidError(
            f"this capture belongs to another database cluster: capture={config.name}"
            f" recorded={row.system_id} found={facts.system_id}.",
            fix="Correct the DSN, or start the capture over.",
        )
    steps.phase("publications are read")
    objected = await objections(wire, config)
    if row is not None:
        # Before any lock is taken that would stand in the way (identity_withdrawal.py, W1).
        for one in await withheld(wire, config, await catalogue.tables(config.name), objected):
            await withdraw(wire, config, one)
    steps.phase("tables are listed")
    found = await list_tables(wire)
    try:
        choice = resolve(config.tables, found, facts.version, whole=config.whole, objections=objected)
    except InvalidError:
        # With a slot there is WAL to let go of, and tables may come again.
        if row is None:
            raise
        choice = Choice((), {})
    if row is not None:  # `wire` answered since it was read (capture_row.py, N2)
        row = await own.claim()
    steps.phase("the catalogue's tables are read")
    row = await _split(catalogue, own)
    rows = {table.table: table for table in await catalogue.tables(config.name)}
    steps.phase("the slot is read")
    published = await published_tables(wire, config.publication, manual=config.manual)
    state = await slot_state(wire, config.slot)
    if row is not None and not row.history and state is not None and state.active_pid is not None:
        state = await _once_free(wire, config)  # idle WAL that an older version told of last may be on its way
    latest = await remap.latest()
    continues = False
    if row is not None:
        steps.phase("positions are compared")
        moved = await compare(config, row, rows, line, state, latest, catalogue, topics)
        rows, reason = await _still_good(wire, config, catalogue, rows, choice, published, state, latest, moved)
        # Even with no table copied: shapes may follow a table whose copy was given up, and a new slot would end them.
        continues = bool(rows) and row.snapshot_done and not reason and published is not None and is_good(state)
        row, latest = await _recorded(own, remap, clock, line, state, latest, moved, reason)
        if reason or moved.fork_lsn is not None:
            lost_nothing = f"nothing that was captured is lost: timeline={line.number} fork={Lsn(moved.fork_lsn or 0)}."
            desk.history = (
                reason or f"the captured database failed over to another timeline, {lost_nothing}",
                clock.now_ms(),
            )
        if moved.fork_lsn is not None:
            desk.heal_capture()
    steps.phase("topics of gone tables are deleted")
    desk.know(rows)
    await sweep(catalogue, desk)
    if continues or any(table.snapshot is not None or table.copy is not None for table in rows.values()):
        assert row is not None
        slot = check_slot(config, await slot_state(wire, config.slot))
        if slot.active_pid is not None and any(row.aside is not None and row.aside.ends for row in rows.values()):
            # What a predecessor told last may be on its way: where a table joins depends on it.
            slot = await _once_free(wire, config)
        steps.phase("ended copies are joined")
        await join_ended(config, catalogue, desk, topics, latest, slot, clock)
        return await _go_on(wire, config, catalogue, desk, own, choice, found, slot, steps)
    return await _begin(wire, config, facts, line, catalogue, desk, own, choice, published, steps)


async def begin_anew(wire: Wire, config: CaptureConfig, rows: Iterable[CaptureTableRow]) -> None:
    """The slot cannot be decoded. Where nothing of it was confirmed since the first copy, what was copied is all there
    is: the publication is dropped, so that the next session makes both anew and copies again. Later it is the
    operator's to decide: a table that was copied just now beside the stream is younger than what is confirmed.

    Raises UnavailableError when all begins anew, InvalidError where it is the operator's to drop it (manual)."""
    slot = await slot_state(wire, config.slot)
    copied = [row.snapshot.lsn for row in rows if row.snapshot is not None]
    if slot is not None and copied and slot.confirmed_lsn > min(copied):
        return
    if config.manual:
        raise InvalidError(
            f"PostgreSQL cannot decode the replication slot: slot={config.slot}.", fix=start_over(config)
        )
    log.warning("the slot cannot be decoded, all tables start over", capture=config.name)
    await wire.query(f"DROP PUBLICATION IF EXISTS {identifier(config.publication)}")
    raise UnavailableError(
        f"PostgreSQL cannot decode the replication slot that it made: slot={config.slot}.",
        fix="Another one is made, and the tables are copied anew.",
    )


async def _begin(
    wire: Wire,
    config: CaptureConfig,
    facts: ServerFacts,
    line: Timeline,
    catalogue: Catalogue,
    desk: TableStates,
    own: FencedCaptureRow,
    choice: Choice,
    published: dict[int, Entry] | None,
    steps: Steps,
) -> Prepared:
    """Nothing is there yet: publish, make the slot, and let everything be copied before the stream begins."""
    row = own.row
    choice = await without_taken(config, catalogue, choice)
    if row is None and not choice.tables:
        _refuse_all(choice.refused.values())
    if published is None and config.manual:
        raise not_published(config.publication, facts.version)
    if published is None:
        await create_publication(wire, config.publication)
    done = await publish(
        wire, config, choice.tables, published or {}, attempts=1, note=desk.note, settle=published or {},
        asked=desk.asked, done=lambda number: steps.step("tables are published", number, len(choice.tables)),
    )  # fmt: skip
    steps.end()
    refused = {n: e for n, e in done.failed.items() if isinstance(e, InvalidError)}
    if row is None and choice.tables and len(refused) == len(choice.tables):
        if not config.manual:
            # Nothing half-made is left behind by a refusal.
            await wire.query(f"DROP PUBLICATION {identifier(config.publication)}")
        raise next(iter(refused.values()))
    steps.phase("the slot is made")
    slot = await create_slot(wire, config)
    # The slot has waited for the transactions that were open: what they held may be free by now.
    waiting = [t for t in choice.tables if isinstance(done.failed.get(t.name), UnavailableError)]
    again = await publish(
        wire, config, waiting, published or {}, attempts=FIRST_ATTEMPTS, note=desk.note, settle=published or {},
        asked=desk.asked, done=lambda number: steps.step("tables are published", number, len(waiting)),
    )  # fmt: skip
    failed = {**refused, **again.failed}
    steps.phase("tables are described")
    relations = await describe(wire, [table.oid for table in choice.tables])
    taken = []
    for table in choice.tables:
        if table.name in failed:
            await desk.refuse(table.name, refusal_of(failed[table.name]), table.oid)
        elif table.oid in relations:  # else it was dropped meanwhile
            taken.append(table)
    await desk.refuse_all(choice.refused)
    generation = row.generation + 1 if row is not None else 1
    # One that was dropped since is the maker's of the next one; "given" is never forgotten while it stands.
    given = config.manual or (row is not None and row.given_publication and published is not None)
    begun = CaptureRow(
        config.name, facts.system_id, config.slot, config.publication, generation, not taken, given_publication=given,
        history=line.history,
    )  # fmt: skip
    if row is not None:
        begun = replace(begun, era=row.era, recopied=row.recopied, recopied_ms=row.recopied_ms)
    await own.begin(begun)
    entries = await published_tables(wire, config.publication, manual=config.manual) or {}
    captured = []
    for number, table in enumerate(taken, 1):
        steps.step("topics are made", number, len(taken))
        if table.oid not in entries:
            unpublished = f"the table was unpublished just now: table={table.name}."
            await desk.refuse(table.name, refusal_of(UnavailableError(unpublished)), table.oid)
            continue
        topic = await start_table(config, catalogue, desk, table, relations[table.oid], entries[table.oid])
        if topic is not None:
            source = source_of(config, desk.rows[table.name], wire.database)
            captured.append(CapturedTable(table.name, topic, producer_id(config), oid=table.oid, source=source))
    fresh = tuple(table.name for table in captured)
    return Prepared(slot, choice.tables, tuple(captured), fresh, relations)


async def _go_on(
    wire: Wire,
    config: CaptureConfig,
    catalogue: Catalogue,
    desk: TableStates,
    own: FencedCaptureRow,
    choice: Choice,
    found: list[TableInfo],
    slot: SlotState,
    steps: Steps,
) -> Prepared:
    """Some tables are there: stream these. The others are taken in beside it."""
    if not own.now.snapshot_done:
        await own.change(lambda found: replace(found, snapshot_done=True))
    steps.phase("tables are described")
    wanted = {table.name: table for table in choice.tables}
    wal_end = Lsn.parse(await wire.value("SELECT pg_current_wal_insert_lsn()") or "0/0").value
    now = await describe(wire, [t.oid for t in found if t.name in desk.rows])
    attributes = await attributes_of(wire, [t.oid for t in found if t.name in desk.rows])
    for table in [t for t in desk.rows.values() if t.flows]:
        if table.table not in wanted:
            why = choice.refused.get(table.table)
            if why is not None and any((t.name, t.oid) == (table.table, table.oid) for t in found):
                first = why.fix if why.again else ""
                await desk.park(table.table, wal_end, why.reason, again=why.again, first=first)
            else:
                await desk.park(table.table, wal_end, *gone(table, found), state="dropped")
        elif table.columns and table.oid in now:
            difference = against_catalogue(table.columns, now[table.oid])
            found_as = attributes.get(table.oid)
            step = next_version(table, targets_of(found_as), found_as) if difference and found_as is not None else ""
            if difference and isinstance(step, str):  # else the stream comes to it, or the watcher (schema_change.py)
                said = f"{difference}; {step}" if step else difference
                again = heals(table, found_as)
                described = f"its description changed: {said}"
                way = accept(table.table)
                await desk.park(table.table, wal_end, described, way, again=again, found=found_as)
    await desk.refuse_all(choice.refused)
    captured, relations = [], {}
    for number, table in enumerate(desk.rows.values(), 1):
        steps.step("topics are looked up", number, len(desk.rows))
        beyond = table.parked_lsn and table.parked_lsn <= slot.confirmed_lsn
        if table.snapshot is None or beyond or table.state not in ("captured", "parked", "dropped"):
            continue
        topic = await catalogue.get(TopicRow, table.topic)
        if topic is None:
            await desk.park(table.table, slot.confirmed_lsn, f"its topic is gone: topic={table.topic}")
            continue
        topic = await kept_so(config, catalogue, topic)
        if table.envelope != config.envelope:
            log.info("a table keeps its envelope until it is copied again", table=table.table, has=table.envelope)
        item = CapturedTable(
            table.table, topic, producer_id(config), oid=table.oid, parked_lsn=table.parked_lsn or NEVER,
            source=source_of(config, table, wire.database),
        )  # fmt: skip
        item.snapshot = table.snapshot
        captured.append(item)
        relations[table.oid] = as_described(table, now.get(table.oid))
    aside = {}
    for table in [table for table in desk.rows.values() if table.table in wanted]:
        carried = await carried_aside(config, catalogue, desk, table, now.get(table.oid), wire.database)
        if carried is not None:
            aside[table.table], relations[table.oid] = carried
    return Prepared(slot, choice.tables, (*captured, *aside.values()), (), relations, aside, attributes)


async def _still_good(
    wire: Wire,
    config: CaptureConfig,
    catalogue: Catalogue,
    rows: dict[str, CaptureTableRow],
    choice: Choice,
    published: dict[int, Entry] | None,
    slot: SlotState | None,
    latest: Binding | None,
    moved: Moved,
) -> tuple[dict[str, CaptureTableRow], str]:
    """The tables' rows, without the snapshots that vouch for nothing any more, written before anything is touched; and
    why some are copied again, "" = none is."""
    oids = {table.name: table.oid for table in choice.tables}
    bound = set(latest.offsets) if latest is not None else set()
    missing = {oid for oid in oids.values() if published is not None and oid not in published}
    # None of these was dropped since the tables were listed.
    lacking = await unpublished(wire, config.publication, missing)
    reason = moved.reason
    kept: dict[str, CaptureTableRow] = {}
    for name, table in rows.items():
        oid = table.oid or oids.get(name, 0)
        entry = published.get(oid) if published is not None else None
        altered = entry is not None and bool(table.publication) and entry.rows != table.publication
        why = moved.why(name)
        start_over = bool(why)
        if published is None:
            # Decoding would fail for ever at WAL from before a new publication: slot and tables start over with it.
            start_over, why = True, f"the publication is gone: publication={config.publication}."
        elif table.snapshot is not None and not start_over and not table.parked_lsn:
            topic = await catalogue.get(TopicRow, table.topic, fresh=False)
            unbound = topic is None or topic.topic_id not in bound
            taken_out = oid in lacking and oids.get(name) == oid
            other = name in oids and oids[name] != oid
            missed = unbound and slot is not None and let_go(slot, table.snapshot.told_from_lsn)
            start_over = taken_out or altered or other or missed
            if taken_out or altered:
                why = f"the publication of the table was altered meanwhile: publication={config.publication}."
        if why and table.snapshot is not None:
            reason = reason or why
            log.warning("a table is copied again", capture=config.name, table=name, cause=why)
        # A copy that was cut off is gone on with where the slot still has all since it began (Joining), or what it let
        # go is set aside, up to where it ended (side_topic.py, Z1).
        aside = table.aside
        kept_aside = (
            aside is not None and slot is not None and aside.topic_id in bound
            and not (aside.until_lsn and let_go(slot, aside.until_lsn))
        )  # fmt: skip
        going_on = (
            table.copy is not None and not start_over and table.snapshot is None and slot is not None
            and slot.wal_status != "lost" and (kept_aside or (slot.confirmed_lsn and not let_go(slot, table.copy.lsn)))
            and entry is not None and not altered and oids.get(name) == oid and moved.fork_lsn is None
        )  # fmt: skip
        wanted = replace(table, oid=oid, copy=table.copy if going_on else None, aside=aside if going_on else None)
        if start_over:
            wanted = replace(
                wanted, snapshot=None, state="captured", reason=why, fix="", parked_lsn=0, recopy=False, again_ms=0,
                accepted=(), oid=oids.get(name, oid),
            )  # fmt: skip
        elif entry is not None and not table.publication:
            wanted = replace(wanted, publication=entry.rows)  # of a row of an older version
        if wanted != table:
            await catalogue.change_table(config.name, name, lambda _, wanted=wanted: wanted)  # type: ignore[misc]
        kept[name] = wanted
    return kept, reason


async def _recorded(
    own: FencedCaptureRow,
    remap: Remap,
    clock: Clock,
    line: Timeline,
    slot: SlotState | None,
    latest: Binding | None,
    moved: Moved,
    reason: str,
) -> tuple[CaptureRow, Binding | None]:
    """The capture's row and its newest binding, as of this session's history (continuity_check.py, M2)."""
    row = own.now
    wanted = replace(row, restored=False, history=line.history)
    if moved.fork_lsn is not None:
        log.warning("the captured database is on another timeline", capture=row.name, fork=str(Lsn(moved.fork_lsn)))
        era, latest = await begin_era(remap, clock, row.era, latest, moved.fork_lsn)
        wanted = replace(wanted, era=era, taps=())
    elif not row.history and not moved.reason and slot is not None and latest is not None:
        latest = await bind_confirmed(remap, clock, slot, latest)
    if reason:
        wanted = replace(wanted, recopied=reason, recopied_ms=clock.now_ms())
    if wanted != row:
        row = await own.change(
            lambda found: replace(
                found,
                restored=wanted.restored,
                history=wanted.history,
                era=wanted.era,
                recopied=wanted.recopied,
                recopied_ms=wanted.recopied_ms,
                taps=wanted.taps,
            )
        )
    return row, latest


async def _once_free(wire: Wire, config: CaptureConfig) -> SlotState:
    """The slot, once nobody streams from it. A walsender whose client is gone notices that at its next write. Raises
    UnavailableError when it is not soon."""
    for _ in range(FREE_ATTEMPTS):
        slot = check_slot(config, await slot_state(wire, config.slot))
        if slot.active_pid is None:
            return slot
        await asyncio.sleep(FREE_POLL_S)
    raise UnavailableError(f"the slot is in use: slot={config.slot} pid={slot.active_pid}.")


async def _split(catalogue: Catalogue, own: FencedCaptureRow) -> CaptureRow | None:
    """Give each table of an older version's row a row of its own, then empty its maps."""
    row = own.row
    if row is None or not row.topics:
        return row
    for table in await catalogue.tables(row.name):
        await catalogue.change_table(row.name, table.table, lambda found, table=table: found or table)  # type: ignore[misc]
    return await own.change(lambda found: replace(found, topics={}, snapshots={}, columns={}))


def _refuse_all(refused: Iterable[Refusal]) -> None:
    for why in refused:
        raise NoTablesError(why.reason, fix=why.fix)
    raise NoTablesError("the capture's patterns leave no table.", fix="Correct `tables` of this capture.")
