"""Compare the database with what was captured of it, at the start of every session.

    what moved                               the sign                                       copied again
    the database: failover to a lagging      another history, or a WAL end below            tables with records or
    standby, point-in-time recovery          the newest binding                             state beyond the fork
    the slot: re-created, or advanced        it is confirmed beyond the newest binding,     all tables
                                             and a table continues from that binding
    the publication of a table               other rows than at its copy (publication.py)   that table

Invariant (signs are durable first): the compared values are durable before anything is built on them. History and
publication are in the rows of the capture and its tables before the stream or the copy begins, and a binding is durable
before its LSN is confirmed.

Invariant (repeatable order): the rows of tables that start over are written first, then the binding that begins the
era, then the history. If a session is interrupted in between, the next one repeats these steps with the same result.

Invariant (one history): the first binding of a new era repeats the offsets of the newest binding at the last LSN that
both histories share. From then on, every compared position belongs to this history
(docs/rfcs/0010-histories-that-fork.md).

The capture itself may move the slot beyond the newest binding while no table continues from that binding. A capture
that starts over creates its slot before it binds its copies, and a capture whose tables are all paused confirms WAL
without binding anything. Tables without a binding are judged by their own copies (validate_rows).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec
import structlog
from msgspec.structs import replace

from tidemill.base.clock import Clock
from tidemill.base.errors import UnavailableError
from tidemill.base.lsn import Lsn
from tidemill.capture.capture_row import FencedCaptureRow
from tidemill.capture.catalog.table_choice import TableChoice
from tidemill.capture.config import CaptureConfig
from tidemill.capture.postgres.connection import PgConnection
from tidemill.capture.postgres.control_connection import ControlConnection
from tidemill.capture.postgres.timeline import Timeline, find_fork
from tidemill.capture.setup.publication import PublishedTable, find_unpublished
from tidemill.capture.setup.server_checks import SlotState, read_slot_state
from tidemill.capture.topics.captured_table import CapturedTable
from tidemill.capture.topics.partition_tails import read_high_watermark, read_last_record, read_position
from tidemill.metastore.catalogue import CaptureRow, CaptureTableRow, Catalogue, TopicRow
from tidemill.shards.api import Binding, Remap
from tidemill.shards.bindings.minter import BindingMinter
from tidemill.topics.api import TopicLog

log = structlog.get_logger()


class ContinuityResult(msgspec.Struct, frozen=True):
    """Result of the comparison.

    `fork_lsn`: the LSN from which on the history differs; None = same history. `reason`: one sentence, "" = nothing is
    copied again. `everything`: True if all tables are copied again, otherwise only `tables`, by name.
    """

    fork_lsn: int | None = None
    reason: str = ""
    everything: bool = False
    tables: frozenset[str] = frozenset()

    def reason_for(self, table: str) -> str:
        """Return why this table is copied again; "" = it is not."""
        return self.reason if self.everything or table in self.tables else ""


def is_beyond_binding(slot: SlotState, bound_lsn: int) -> bool:
    """Return whether the slot is confirmed beyond the newest binding, which a session that writes a table never does.
    Pure.
    """
    return slot.confirmed_lsn - 1 > bound_lsn


def is_confirmed(slot: SlotState, lsn: int) -> bool:
    """Return whether commits at or above `lsn` may be confirmed already, so that the stream may not send them again."""
    return slot.confirmed_lsn > lsn


def has_unaccounted_wal(slot: SlotState | None, table: CapturedTable, latest: Binding | None) -> bool:
    """Return whether WAL is confirmed that neither the newest binding nor the table's own copy covers. Pure."""
    if slot is None or table.snapshot is None:
        return slot is None
    if latest is not None and table.topic.topic_id in latest.offsets:
        return is_beyond_binding(slot, latest.lsn)
    return is_confirmed(slot, table.snapshot.may_lack_from_lsn)


async def _is_slot_ahead(
    slot: SlotState, rows: Iterable[CaptureTableRow], latest: Binding | None, catalogue: Catalogue
) -> bool:
    """Return whether WAL after the newest binding is confirmed although some table, or its side topic, continues from
    that binding and needs it.
    """
    if latest is None or not is_beyond_binding(slot, latest.lsn):
        return False
    for table in rows:
        if table.aside is not None and table.aside.topic_id in latest.offsets:
            return True
        if table.snapshot is None or 0 < table.parked_lsn <= latest.lsn + 1:
            continue
        topic = await catalogue.get(TopicRow, table.topic)
        if topic is not None and topic.topic_id in latest.offsets:
            return True
    return False


async def check_continuity(
    config: CaptureConfig,
    row: CaptureRow,
    rows: Mapping[str, CaptureTableRow],
    line: Timeline,
    slot: SlotState | None,
    latest: Binding | None,
    catalogue: Catalogue,
    topics: TopicLog,
) -> ContinuityResult:
    """Compare the server and its slot with the rows and the newest binding. `slot` was read before `latest`, so
    everything that a predecessor confirmed until then is bound. Raises the errors of the catalogue and of the topics.
    """
    bound_lsn = latest.lsn if latest is not None else -1
    fork_lsn = find_fork(row.history, line.history) if row.history else None
    if fork_lsn is None and line.wal_end <= bound_lsn:
        fork_lsn = 0  # the files are an older copy: the LSN at which they diverge is unknown
    if fork_lsn is not None:
        return await _check_fork(config, rows, line, slot, latest, fork_lsn, catalogue, topics)
    if row.restored and (slot is None or is_beyond_binding(slot, bound_lsn)):
        reason = f"the slot is ahead of the restored state: slot={config.slot} bound={Lsn(max(0, bound_lsn))}."
        return ContinuityResult(None, reason, True)
    if row.history and slot is not None and await _is_slot_ahead(slot, rows.values(), latest, catalogue):
        reason = (
            f"the replication slot was re-created or advanced by another client: slot={config.slot}"
            f" confirmed={Lsn(slot.confirmed_lsn)} bound={Lsn(bound_lsn)}."
        )
        return ContinuityResult(None, reason, True)
    return ContinuityResult()


async def _check_fork(
    config: CaptureConfig,
    rows: Mapping[str, CaptureTableRow],
    line: Timeline,
    slot: SlotState | None,
    latest: Binding | None,
    fork_lsn: int,
    catalogue: Catalogue,
    topics: TopicLog,
) -> ContinuityResult:
    bound_lsn = latest.lsn if latest is not None else -1
    captured = f"captured={Lsn(max(0, bound_lsn))}"
    if not fork_lsn:
        said = "the captured database was replaced by an earlier copy of its files"
        return ContinuityResult(0, f"{said}: timeline={line.number} wal_end={Lsn(line.wal_end)} {captured}.", True)
    facts = f"timeline={line.number} fork={Lsn(fork_lsn)} {captured}"
    if slot is None or slot.wal_status == "lost" or not slot.confirmed_lsn:
        return ContinuityResult(
            fork_lsn, f"the captured database is on another timeline and its slot is gone: {facts}.", True
        )
    beyond_fork = latest is not None and is_beyond_binding(slot, fork_lsn - 1)
    if beyond_fork or await _is_slot_ahead(slot, rows.values(), latest, catalogue):
        said = "the captured database is on another timeline and its slot is ahead of the fork"
        return ContinuityResult(fork_lsn, f"{said}: {facts} confirmed={Lsn(slot.confirmed_lsn)}.", True)
    names = {
        name
        for name, table in rows.items()
        if table.snapshot is not None and await _is_affected(table, fork_lsn, latest, catalogue, topics)
    }
    if not names:
        return ContinuityResult(fork_lsn)
    return ContinuityResult(
        fork_lsn, f"the captured database went back to an earlier state: {facts}.", False, frozenset(names)
    )


def has_state_beyond(table: CaptureTableRow, fork_lsn: int) -> bool:
    """Return whether the row names a position that is not in this history. Pure."""
    snapshot = table.snapshot
    assert snapshot is not None
    joined_beyond = snapshot.joined_lsn >= fork_lsn or max(table.evolved, default=0) >= fork_lsn
    return snapshot.exact_lsn > fork_lsn or table.parked_lsn > fork_lsn or joined_beyond


async def _is_affected(
    table: CaptureTableRow, fork_lsn: int, latest: Binding | None, catalogue: Catalogue, topics: TopicLog
) -> bool:
    """Return whether the table's row or topic has something from beyond the fork. Positions grow within a partition, so
    its last record decides. If retention has removed that record, only a binding below the fork can.
    """
    if has_state_beyond(table, fork_lsn):
        return True
    if table.parked_lsn:
        return False  # its topic has nothing from there on, and never will
    topic = await catalogue.get(TopicRow, table.topic)
    if topic is None:
        return False  # bootstrap pauses it for that reason
    bound = latest.offsets.get(topic.topic_id, ()) if latest is not None and latest.lsn < fork_lsn else ()
    for partition in range(topic.partitions):
        end = await read_high_watermark(topics, topic.topic_id, partition)
        if not end or (partition < len(bound) and bound[partition] == end):
            continue
        last = await read_last_record(topics, topic.topic_id, partition, end)
        if last is None or read_position(last).commit_lsn >= fork_lsn:
            return True
    return False


async def check_slot_unmoved(
    control: ControlConnection, config: CaptureConfig, copied: Iterable[CapturedTable], latest: Binding | None
) -> None:
    """Check that no other session moved the slot, which is exclusively this session's from here on. A predecessor that
    was believed dead may have confirmed WAL since the tables were checked, and a table that no binding covers may lack
    those changes. Raises UnavailableError.
    """
    now = await control.run(lambda wire: read_slot_state(wire, config.slot))
    if any(has_unaccounted_wal(now, table, latest) for table in copied):
        raise UnavailableError(f"another session confirmed WAL during the set-up: slot={config.slot}.")


async def begin_era(
    remap: Remap, clock: Clock, era: int, latest: Binding | None, fork_lsn: int
) -> tuple[int, Binding | None]:
    """Return the era that begins and its first binding. `era` is the last recorded one. Raises the errors of
    BindingMinter.mint.
    """
    if latest is None:
        return era + 1, None
    lsn = max(1, min(latest.lsn, fork_lsn - 1))
    if latest.era > era and latest.lsn <= lsn:
        return latest.era, latest  # begun by a session that was interrupted before it recorded the history
    era = max(era, latest.era) + 1
    return era, await _bind_offsets(remap, clock, lsn, era)


async def _bind_offsets(remap: Remap, clock: Clock, lsn: int, era: int) -> Binding | None:
    """Mint a binding that repeats the offsets of the newest one."""
    minter = BindingMinter(remap, clock, interval_ms=0)
    await minter.open()
    await minter.mint(Binding(0, {}, lsn, era=era))
    return minter.latest


async def validate_rows(
    wire: PgConnection,
    config: CaptureConfig,
    catalogue: Catalogue,
    rows: dict[str, CaptureTableRow],
    choice: TableChoice,
    published: dict[int, PublishedTable] | None,
    slot: SlotState | None,
    latest: Binding | None,
    moved: ContinuityResult,
) -> tuple[dict[str, CaptureTableRow], str]:
    """Return the rows of the tables, without the snapshots that are no longer valid, and why some tables are copied
    again ("" = none is). The rows are written before anything else is touched.
    """
    oids = {table.name: table.oid for table in choice.tables}
    bound = set(latest.offsets) if latest is not None else set()
    missing = {oid for oid in oids.values() if published is not None and oid not in published}
    # None of these was dropped after the tables were listed.
    lacking = await find_unpublished(wire, config.publication, missing)
    reason = moved.reason
    kept: dict[str, CaptureTableRow] = {}
    for name, table in rows.items():
        oid = table.oid or oids.get(name, 0)
        entry = published.get(oid) if published is not None else None
        altered = entry is not None and bool(table.publication) and entry.rows != table.publication
        why = moved.reason_for(name)
        start_over = bool(why)
        if published is None:
            # Decoding WAL from before a new publication would always fail, so slot and tables start over with the
            # publication.
            start_over, why = True, f"the publication is missing: publication={config.publication}."
        elif table.snapshot is not None and not start_over and not table.parked_lsn:
            topic = await catalogue.get(TopicRow, table.topic, fresh=False)
            unbound = topic is None or topic.topic_id not in bound
            taken_out = oid in lacking and oids.get(name) == oid
            other = name in oids and oids[name] != oid
            missed = unbound and slot is not None and is_confirmed(slot, table.snapshot.may_lack_from_lsn)
            start_over = taken_out or altered or other or missed
            if taken_out or altered:
                why = f"the publication of the table was altered since its copy: publication={config.publication}."
        if why and table.snapshot is not None:
            reason = reason or why
            log.warning("a table is re-snapshotted", capture=config.name, table=name, cause=why)
        # An interrupted copy is resumed if the slot still has all WAL since its start (table_adder.py), or if the side
        # topic has what the slot released, up to where that topic ended (side_topic.py).
        aside = table.aside
        kept_aside = (
            aside is not None and slot is not None and aside.topic_id in bound
            and not (aside.until_lsn and is_confirmed(slot, aside.until_lsn))
        )  # fmt: skip
        going_on = (
            table.copy is not None and not start_over and table.snapshot is None and slot is not None
            and slot.wal_status != "lost" and (kept_aside or (slot.confirmed_lsn and not is_confirmed(slot,
            table.copy.lsn))) and entry is not None and not altered and oids.get(name) == oid and moved.fork_lsn is None
        )  # fmt: skip
        wanted = replace(table, oid=oid, copy=table.copy if going_on else None, aside=aside if going_on else None)
        if start_over:
            wanted = replace(
                wanted, snapshot=None, state="captured", reason=why, fix="", parked_lsn=0, recopy=False, again_ms=0,
                accepted=(), oid=oids.get(name, oid),
            )  # fmt: skip
        elif entry is not None and not table.publication:
            wanted = replace(wanted, publication=entry.rows)  # the row of an older version
        if wanted != table:
            await catalogue.change_table(config.name, name, lambda _, wanted=wanted: wanted)  # type: ignore[misc]
        kept[name] = wanted
    return kept, reason


async def record_history(
    own: FencedCaptureRow,
    remap: Remap,
    clock: Clock,
    line: Timeline,
    slot: SlotState | None,
    latest: Binding | None,
    moved: ContinuityResult,
    reason: str,
) -> tuple[CaptureRow, Binding | None]:
    """Return the capture's row and its newest binding, both of this session's history (continuity_check.py)."""
    row = own.current
    wanted = replace(row, restored=False, history=line.history)
    if moved.fork_lsn is not None:
        log.warning("the captured database is on another timeline", capture=row.name, fork=str(Lsn(moved.fork_lsn)))
        era, latest = await begin_era(remap, clock, row.era, latest, moved.fork_lsn)
        wanted = replace(wanted, era=era, taps=())
    if reason:
        wanted = replace(wanted, recopied=reason, recopied_ms=clock.now_ms())
    if wanted != row:
        row = await own.update(
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
