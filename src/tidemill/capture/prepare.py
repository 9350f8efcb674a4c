"""From a locked, checked database to something that can stream: publication, slot, topics, catalogue rows, snapshot.

Where no table is there yet, all that can be taken are published, the slot is made and they are copied before the
stream begins. Later what is fresh is copied beside it (joining.py), so one table keeps no other waiting.

Every step is idempotent, and a table's row is written before what it no longer vouches for is touched:

    row without a snapshot  →  its topic deleted and created anew  →  copied  →  row with its snapshot

so a process that dies anywhere in between starts that table over cleanly (generation + 1), and no binding was
minted for its new topic.

A table whose snapshot is older than what the slot was confirmed to, and that no binding knows, starts over: changes
between the two are in no topic. A row that a restore wrote is compared with the slot in the same way: what the old
cluster had confirmed, and the restored bindings do not cover, is gone, and every table starts over.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import structlog
from msgspec.structs import replace

from tidemill.base.errors import Invalid, Unavailable
from tidemill.base.frontier import Lsn
from tidemill.capture.changes import NEVER, Relation
from tidemill.capture.config import CaptureConfig
from tidemill.capture.desk import Desk
from tidemill.capture.difference import against_catalogue
from tidemill.capture.entry import as_described, gone, producer_id, refusal_of, start_table, without_taken
from tidemill.capture.publication import create_publication, publish, published_tables
from tidemill.capture.setup import ServerFacts, SlotState, check_slot, create_slot, slot_state
from tidemill.capture.tables import Choice, Refusal, TableInfo, describe, list_tables, resolve
from tidemill.capture.topic_writer import CapturedTable
from tidemill.capture.wire.connection import Wire, identifier
from tidemill.metastore.catalogue import (
    CaptureRow,
    CaptureTableRow,
    Catalogue,
    TopicRow,
)
from tidemill.shards.front import Binding

log = structlog.get_logger()

FIRST_ATTEMPTS = 3
"""For the lock of one table while the whole capture waits; it is tried again beside the stream."""


class Prepared(msgspec.Struct, frozen=True):
    """`captured`: tables that the stream carries, at least up to where they are parked. `fresh`: of these, the ones
    to be copied before it begins. `tables`: what the database says of all that were chosen."""

    row: CaptureRow
    slot: SlotState
    tables: tuple[TableInfo, ...]
    captured: tuple[CapturedTable, ...]
    fresh: tuple[str, ...]
    relations: dict[int, Relation]


async def prepare(
    wire: Wire, config: CaptureConfig, facts: ServerFacts, catalogue: Catalogue, latest: Binding | None, desk: Desk
) -> Prepared:
    """The caller holds the capture's lock. `latest`: the newest binding.

    Raises Invalid (nothing can be captured, rights), SlotLost, SqlError, Unavailable. What is wrong with one table is
    that table's, and told by `desk`.
    """
    row = await catalogue.get(CaptureRow, config.name)
    if row is not None and row.system_id != facts.system_id:
        raise Invalid(
            f"this capture belongs to another database cluster: capture={config.name}"
            f" recorded={row.system_id} found={facts.system_id}.",
            fix="Correct the DSN, or start the capture over.",
        )
    found = await list_tables(wire)
    try:
        choice = resolve(config.tables, found, facts.version)
    except Invalid:
        # With a slot there is WAL to let go of, and tables may come again.
        if row is None:
            raise
        choice = Choice((), {})
    row = await _split(catalogue, row)
    rows = {table.table: table for table in await catalogue.tables(config.name)}
    published = await published_tables(wire, config.publication)
    rows = await _still_good(wire, config, catalogue, row, rows, choice, published, latest)
    if row is not None and row.restored:
        row = replace(row, restored=False)
        await catalogue.put(row)
    desk.know(rows)
    if any(table.snapshot is not None for table in rows.values()):
        assert row is not None
        return await _go_on(wire, config, catalogue, desk, row, choice, found)
    return await _begin(wire, config, facts, catalogue, desk, row, choice, published)


async def begin_anew(wire: Wire, config: CaptureConfig, rows: Iterable[CaptureTableRow]) -> None:
    """The slot cannot be decoded. Where nothing of it was confirmed since the first copy, what was copied is all there
    is: the publication is dropped, so that the next session makes both anew and copies again. Later it is the
    operator's to decide: a table that was copied just now beside the stream is younger than what is confirmed.

    Raises Unavailable when all begins anew."""
    slot = await slot_state(wire, config.slot)
    copied = [row.snapshot.lsn for row in rows if row.snapshot is not None]
    if slot is not None and copied and slot.confirmed_lsn > min(copied):
        return
    log.warning("the slot cannot be decoded, all tables start over", capture=config.name)
    await wire.query(f"DROP PUBLICATION IF EXISTS {identifier(config.publication)}")
    raise Unavailable(
        f"PostgreSQL cannot decode the replication slot that it made: slot={config.slot}.",
        fix="Another one is made, and the tables are copied anew.",
    )


async def _begin(
    wire: Wire,
    config: CaptureConfig,
    facts: ServerFacts,
    catalogue: Catalogue,
    desk: Desk,
    row: CaptureRow | None,
    choice: Choice,
    published: dict[int, str] | None,
) -> Prepared:
    """Nothing is there yet: publish, make the slot, and let everything be copied before the stream begins."""
    choice = await without_taken(config, catalogue, choice)
    if row is None and not choice.tables:
        _refuse_all(choice.refused.values())
    if published is None:
        await create_publication(wire, config.publication)
    done = await publish(wire, config, choice.tables, published or {}, attempts=1)
    refused = {n: e for n, e in done.failed.items() if isinstance(e, Invalid)}
    if row is None and choice.tables and len(refused) == len(choice.tables):
        # Nothing half-made is left behind by a refusal.
        await wire.query(f"DROP PUBLICATION {identifier(config.publication)}")
        raise next(iter(refused.values()))
    slot = await create_slot(wire, config)
    # The slot has waited for the transactions that were open: what they held may be free by now.
    waiting = [t for t in choice.tables if isinstance(done.failed.get(t.name), Unavailable)]
    again = await publish(wire, config, waiting, published or {}, attempts=FIRST_ATTEMPTS)
    failed = {**refused, **again.failed}
    relations = await describe(wire, [table.oid for table in choice.tables])
    taken = []
    for table in choice.tables:
        if table.name in failed:
            await desk.refuse(table.name, refusal_of(failed[table.name]), table.oid)
        elif table.oid in relations:  # else it was dropped meanwhile
            taken.append(table)
    for name, why in choice.refused.items():
        await desk.refuse(name, why)
    generation = row.generation + 1 if row is not None else 1
    row = CaptureRow(config.name, facts.system_id, config.slot, config.publication, generation, not taken)
    await catalogue.put(row)
    captured = []
    for table in taken:
        topic = await start_table(config, catalogue, desk, table, relations[table.oid])
        if topic is not None:
            captured.append(CapturedTable(table.name, topic, producer_id(config), oid=table.oid))
    fresh = tuple(table.name for table in captured)
    return Prepared(row, slot, choice.tables, tuple(captured), fresh, relations)


async def _go_on(
    wire: Wire,
    config: CaptureConfig,
    catalogue: Catalogue,
    desk: Desk,
    row: CaptureRow,
    choice: Choice,
    found: list[TableInfo],
) -> Prepared:
    """Some tables are there: stream these. The others are taken in beside it."""
    slot = check_slot(config, await slot_state(wire, config.slot))
    if not row.snapshot_done:
        row = replace(row, snapshot_done=True)
        await catalogue.put(row)
    wanted = {table.name: table for table in choice.tables}
    wal_end = Lsn.parse(await wire.value("SELECT pg_current_wal_insert_lsn()") or "0/0").value
    now = await describe(wire, [t.oid for t in found if t.name in desk.rows])
    for table in [t for t in desk.rows.values() if t.flows]:
        if table.table not in wanted:
            why = choice.refused.get(table.table)
            if why is not None and any((t.name, t.oid) == (table.table, table.oid) for t in found):
                await desk.park(table.table, wal_end, why.reason)
            else:
                await desk.park(table.table, wal_end, *gone(table, found), state="dropped")
        elif table.columns and table.oid in now:
            difference = against_catalogue(table.columns, now[table.oid])
            if difference:
                await desk.park(table.table, wal_end, f"its description changed: {difference}")
    for name, why in choice.refused.items():
        await desk.refuse(name, why)
    captured, relations = [], {}
    for table in desk.rows.values():
        beyond = table.parked_lsn and table.parked_lsn <= slot.confirmed_lsn
        if table.snapshot is None or beyond or table.state not in ("captured", "parked", "dropped"):
            continue
        topic = await catalogue.get(TopicRow, table.topic)
        if topic is None:
            await desk.park(table.table, slot.confirmed_lsn, f"its topic is gone: topic={table.topic}")
            continue
        item = CapturedTable(
            table.table, topic, producer_id(config), oid=table.oid, parked_lsn=table.parked_lsn or NEVER
        )
        item.snapshot = table.snapshot
        captured.append(item)
        relations[table.oid] = as_described(table, now.get(table.oid))
    return Prepared(row, slot, choice.tables, tuple(captured), (), relations)


async def _still_good(
    wire: Wire,
    config: CaptureConfig,
    catalogue: Catalogue,
    row: CaptureRow | None,
    rows: dict[str, CaptureTableRow],
    choice: Choice,
    published: dict[int, str] | None,
    latest: Binding | None,
) -> dict[str, CaptureTableRow]:
    """The tables' rows, without the snapshots that vouch for nothing any more. Written before anything is touched."""
    if row is None or not rows:
        return rows
    oids = {table.name: table.oid for table in choice.tables}
    slot = await slot_state(wire, config.slot)
    if published is None and any(table.snapshot is not None for table in rows.values()):
        # Decoding would fail for ever at WAL from before a new publication: slot and tables start over with it.
        log.warning("the publication is gone, all tables start over", capture=config.name)
    behind = row.restored and (slot is None or slot.confirmed_lsn - 1 > (latest.lsn if latest is not None else -1))
    if behind:
        # Commits are confirmed up to what some binding covered (topic_writer W2), so a slot that is further than the
        # newest restored binding has let go of changes that were in the lost part of the topics; or only of idle WAL,
        # where the capture did not end in order (Binder.settle), which nobody can tell from it.
        log.warning("the slot is ahead of what was restored, all tables start over", capture=config.name)
    bound = set(latest.offsets) if latest is not None else set()
    kept: dict[str, CaptureTableRow] = {}
    for name, table in rows.items():
        oid = table.oid or oids.get(name, 0)
        start_over = published is None or behind
        if table.snapshot is not None and not start_over and not table.parked_lsn:
            topic = await catalogue.get(TopicRow, table.topic, fresh=False)
            unbound = topic is None or topic.topic_id not in bound
            unpublished = published is not None and oid not in published and oids.get(name) == oid
            other = name in oids and oids[name] != oid
            missed = unbound and slot is not None and slot.confirmed_lsn > table.snapshot.lsn
            start_over = unpublished or other or missed
        wanted = replace(table, oid=oid)
        if start_over:
            wanted = replace(
                wanted, snapshot=None, state="captured", reason="", fix="", parked_lsn=0, recopy=False,
                oid=oids.get(name, oid),
            )  # fmt: skip
        if wanted != table:
            await catalogue.change_table(config.name, name, lambda _, wanted=wanted: wanted)  # type: ignore[misc]
        kept[name] = wanted
    return kept


async def _split(catalogue: Catalogue, row: CaptureRow | None) -> CaptureRow | None:
    """Give each table of an older version's row a row of its own, then empty its maps."""
    if row is None or not row.topics:
        return row
    for table in await catalogue.tables(row.name):
        await catalogue.change_table(row.name, table.table, lambda found, table=table: found or table)  # type: ignore[misc]
    row = replace(row, topics={}, snapshots={}, columns={})
    await catalogue.put(row)
    return row


def _refuse_all(refused: Iterable[Refusal]) -> None:
    for why in refused:
        raise Invalid(why.reason, fix=why.fix)
    raise Invalid("the capture's patterns leave no table.", fix="Correct `tables` of this capture.")
