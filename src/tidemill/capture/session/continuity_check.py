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
from functools import partial

import msgspec
import structlog
from msgspec.structs import replace

from tidemill.base.clock import Clock
from tidemill.base.errors import UnavailableError
from tidemill.base.lsn import Lsn
from tidemill.capture.config import CaptureConfig
from tidemill.capture.postgres.control_connection import ControlConnection
from tidemill.capture.postgres.timeline import find_fork
from tidemill.capture.session.set_up_context import ServerState, SetUpContext
from tidemill.capture.setup.publication import PublishedTable, find_unpublished
from tidemill.capture.setup.server_checks import SlotState, read_slot_state
from tidemill.capture.topics.captured_table import CapturedTable
from tidemill.capture.topics.partition_tails import read_high_watermark, read_last_record, read_position
from tidemill.metastore.catalogue import CaptureTableRow, Catalogue, TopicRow
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
        if table.side_topic is not None and table.side_topic.topic_id in latest.offsets:
            return True
        if table.snapshot is None or 0 < table.paused_lsn <= latest.lsn + 1:
            continue
        topic = await catalogue.get(TopicRow, table.topic)
        if topic is not None and topic.topic_id in latest.offsets:
            return True
    return False


async def check_continuity(
    context: SetUpContext, rows: Mapping[str, CaptureTableRow], server: ServerState
) -> ContinuityResult:
    """Compare the server and its slot with the rows and the newest binding. Raises the errors of the catalogue and of
    the topics.
    """
    row, line, slot, latest = context.own.current, context.line, server.slot, server.latest
    bound_lsn = latest.lsn if latest is not None else -1
    fork_lsn = find_fork(row.history, line.history) if row.history else None
    if fork_lsn is None and line.wal_end <= bound_lsn:
        fork_lsn = 0  # the files are an older copy: the LSN at which they diverge is unknown
    if fork_lsn is not None:
        return await _check_fork(context, rows, server, fork_lsn)
    if row.restored and (slot is None or is_beyond_binding(slot, bound_lsn)):
        name = context.config.slot
        reason = f"the slot is ahead of the restored state: slot={name} bound={Lsn(max(0, bound_lsn))}."
        return ContinuityResult(None, reason, True)
    if row.history and slot is not None and await _is_slot_ahead(slot, rows.values(), latest, context.catalogue):
        reason = (
            f"the replication slot was re-created or advanced by another client: slot={context.config.slot}"
            f" confirmed={Lsn(slot.confirmed_lsn)} bound={Lsn(bound_lsn)}."
        )
        return ContinuityResult(None, reason, True)
    return ContinuityResult()


async def _check_fork(
    context: SetUpContext, rows: Mapping[str, CaptureTableRow], server: ServerState, fork_lsn: int
) -> ContinuityResult:
    line, slot, latest, catalogue = context.line, server.slot, server.latest, context.catalogue
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
        if table.snapshot is not None and await _is_affected(table, fork_lsn, latest, catalogue, context.topics)
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
    return snapshot.exact_lsn > fork_lsn or table.paused_lsn > fork_lsn or joined_beyond


async def _is_affected(
    table: CaptureTableRow, fork_lsn: int, latest: Binding | None, catalogue: Catalogue, topics: TopicLog
) -> bool:
    """Return whether the table's row or topic has something from beyond the fork. Positions grow within a partition, so
    its last record decides. If retention has removed that record, only a binding below the fork can.
    """
    if has_state_beyond(table, fork_lsn):
        return True
    if table.paused_lsn:
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


class _TableFacts(msgspec.Struct, frozen=True):
    """One captured table and its place in the database.

    `oid`: of the captured table. `chosen_oid`: of the table that has its name now, None if no table to capture has it.
    `entry`: its place in the publication. `was_unpublished`: it exists, and was removed from the publication.
    """

    row: CaptureTableRow
    oid: int
    chosen_oid: int | None
    entry: PublishedTable | None
    was_unpublished: bool

    @property
    def was_replaced(self) -> bool:
        """True if another table has its name now."""
        return self.chosen_oid is not None and self.chosen_oid != self.oid

    @property
    def is_publication_altered(self) -> bool:
        """True if the publication publishes it by other rows than at its copy."""
        return self.entry is not None and bool(self.row.publication) and self.entry.rows != self.row.publication


async def _find_facts(
    context: SetUpContext, rows: Mapping[str, CaptureTableRow], server: ServerState
) -> dict[str, _TableFacts]:
    published = server.published
    chosen = {table.name: table.oid for table in server.choice.tables}
    missing = {oid for oid in chosen.values() if published is not None and oid not in published}
    # None of these was dropped after the tables were listed.
    unpublished = await find_unpublished(context.wire, context.config.publication, missing)
    found = {}
    for name, row in rows.items():
        oid = row.oid or chosen.get(name, 0)
        entry = published.get(oid) if published is not None else None
        was_unpublished = oid in unpublished and chosen.get(name) == oid
        found[name] = _TableFacts(row, oid, chosen.get(name), entry, was_unpublished)
    return found


async def _has_missed_changes(context: SetUpContext, row: CaptureTableRow, server: ServerState) -> bool:
    """Return whether changes after the table's copy are confirmed that no binding covers."""
    slot, latest = server.slot, server.latest
    topic = await context.catalogue.get(TopicRow, row.topic, fresh=False)
    is_bound = topic is not None and latest is not None and topic.topic_id in latest.offsets
    if is_bound or slot is None or row.snapshot is None:
        return False
    return is_confirmed(slot, row.snapshot.may_lack_from_lsn)


async def _find_start_over_cause(
    context: SetUpContext, facts: _TableFacts, server: ServerState, moved: ContinuityResult
) -> str | None:
    """Return why a table starts over; "" = for a reason that its new row does not mention, None = it does not."""
    publication = context.config.publication
    if server.published is None:
        # Decoding WAL from before a new publication would always fail, so slot and tables start over with the
        # publication.
        return f"the publication is missing: publication={publication}."
    if cause := moved.reason_for(facts.row.table):
        return cause
    if facts.row.snapshot is None or facts.row.paused_lsn:
        return None
    if facts.was_unpublished or facts.is_publication_altered:
        return f"the publication of the table was altered since its copy: publication={publication}."
    return "" if facts.was_replaced or await _has_missed_changes(context, facts.row, server) else None


def _has_complete_side_topic(row: CaptureTableRow, server: ServerState) -> bool:
    """Return whether the side topic has what the slot released, up to where that topic ended (side_topic.py). Pure."""
    side_topic, slot, latest = row.side_topic, server.slot, server.latest
    if side_topic is None or slot is None or latest is None or side_topic.topic_id not in latest.offsets:
        return False
    return not (side_topic.until_lsn and is_confirmed(slot, side_topic.until_lsn))


def _can_resume_copy(facts: _TableFacts, server: ServerState, moved: ContinuityResult) -> bool:
    """Return whether an interrupted copy of the same table can be resumed (table_adder.py): the slot still has all WAL
    since its start, or the side topic has it. Pure.
    """
    row, slot = facts.row, server.slot
    if row.copy is None or row.snapshot is not None or slot is None or slot.wal_status == "lost":
        return False
    has_wal = bool(slot.confirmed_lsn) and not is_confirmed(slot, row.copy.lsn)
    is_same_table = facts.entry is not None and not facts.is_publication_altered and facts.chosen_oid == facts.oid
    return (has_wal or _has_complete_side_topic(row, server)) and is_same_table and moved.fork_lsn is None


def _valid_row(facts: _TableFacts, cause: str | None, *, can_resume: bool) -> CaptureTableRow:
    """Return the row of a table that starts over because of `cause` or continues (None). Pure."""
    row = facts.row
    if cause is not None:
        oid = facts.oid if facts.chosen_oid is None else facts.chosen_oid
        return replace(
            row, oid=oid, copy=None, side_topic=None, snapshot=None, state="captured", reason=cause, fix="",
            paused_lsn=0, recopy=False, again_ms=0, accepted=(),
        )  # fmt: skip
    valid = replace(row, oid=facts.oid)
    if not can_resume:
        valid = replace(valid, copy=None, side_topic=None)
    if facts.entry is not None and not row.publication:
        valid = replace(valid, publication=facts.entry.rows)  # the row of an older version
    return valid


def _valid_row_of(
    facts: _TableFacts, cause: str | None, can_resume: bool, found: CaptureTableRow | None
) -> CaptureTableRow:
    """Return the valid row, derived from the row that is stored now. A command may have changed it after it was read.

    Pure.
    """
    return _valid_row(replace(facts, row=found or facts.row), cause, can_resume=can_resume)


async def validate_rows(
    context: SetUpContext, rows: Mapping[str, CaptureTableRow], server: ServerState, moved: ContinuityResult
) -> tuple[dict[str, CaptureTableRow], str]:
    """Return the rows of the tables, without the snapshots that are no longer valid, and why some tables are copied
    again ("" = none is). The rows are written before anything else is touched.
    """
    reason, config = moved.reason, context.config
    valid: dict[str, CaptureTableRow] = {}
    for name, facts in (await _find_facts(context, rows, server)).items():
        cause = await _find_start_over_cause(context, facts, server, moved)
        if cause and facts.row.snapshot is not None:
            reason = reason or cause
            log.warning("a table is re-snapshotted", capture=config.name, table=name, cause=cause)
        can_resume = _can_resume_copy(facts, server, moved)
        valid[name] = _valid_row(facts, cause, can_resume=can_resume)
        if valid[name] != facts.row:
            changed = partial(_valid_row_of, facts, cause, can_resume)
            valid[name] = await context.catalogue.change_table(config.name, name, changed) or valid[name]
    return valid, reason


async def record_history(
    context: SetUpContext, server: ServerState, moved: ContinuityResult, reason: str
) -> Binding | None:
    """Write the capture's row, and return the newest binding, both of this session's history (continuity_check.py)."""
    row, clock, latest = context.own.current, context.clock, server.latest
    wanted = replace(row, restored=False, history=context.line.history)
    if moved.fork_lsn is not None:
        log.warning("the captured database is on another timeline", capture=row.name, fork=str(Lsn(moved.fork_lsn)))
        era, latest = await begin_era(context.remap, clock, row.era, latest, moved.fork_lsn)
        wanted = replace(wanted, era=era, taps=())
    if reason:
        wanted = replace(wanted, recopied=reason, recopied_ms=clock.now_ms())
    if wanted != row:
        await context.own.update(
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
    return latest
