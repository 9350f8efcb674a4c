"""Add fresh tables concurrently with the stream of all others.

    every table_poll_s    the catalogue is compared with what is captured (catalog_watcher.py); sooner if a client
                          requests a table that is not captured (`is_being_added`), or finds that a table changed
                          (`check_tables_soon`)
    every REPAIR_POLL_S   the publication is repaired (publication_repair.py)

    new, re-created, recopy requested, refused before  →  published  →  topic re-created  →  copied  →  in the stream
    paused for a reason that a copy repairs            →  re-snapshotted automatically (auto_recopy.py)
    its copy was interrupted                           →  resumed, with a side topic (side_topic.py)  →  the side topic
                                                          is appended  →  in the stream

Invariant (isolated failures): a copy that fails is reported for its table and retried after a pause that doubles. If a
lock blocked it, it is retried as soon as the reported blocker no longer holds the table. An interrupted copy is resumed
where it stopped unless the table itself was at fault. After MAX_FRUITLESS_ATTEMPTS attempts without progress
(table_states.py) it starts over, and its WAL is released.

Invariant (side topics first): tables with a side topic are copied first, one at a time, because a copy without one
retains WAL for its whole duration (wal_hold.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Container, Sequence
from contextlib import suppress

import structlog

from tidemill.base.errors import (
    ClosedError,
    ConflictError,
    FencedError,
    MissingError,
    TidemillError,
    UnavailableError,
    UnknownOutcomeError,
)
from tidemill.base.runtime.tasks import Backoff, error_sentence, is_fault
from tidemill.capture.catalog.relations import describe_tables
from tidemill.capture.catalog.table_choice import Refusal
from tidemill.capture.catalog.table_discovery import TableInfo
from tidemill.capture.postgres.connection import PgConnection
from tidemill.capture.postgres.errors import is_transient
from tidemill.capture.session.relation_tracker import RelationTracker
from tidemill.capture.setup.blockers import find_table_blocker
from tidemill.capture.setup.publication import LOCK_ATTEMPTS, PublishedTable, PublishRequest, publish_tables
from tidemill.capture.setup.server_checks import emit_heartbeat
from tidemill.capture.snapshot.copier import CopyContext, CopyPreemptedError, copy_tables
from tidemill.capture.snapshot.side_topic import allows_side_topics, create_appender, is_ready_to_join
from tidemill.capture.snapshot.wal_hold import ConfirmedWal, WalHold
from tidemill.capture.tables.auto_recopy import AutoRecopy
from tidemill.capture.tables.catalog_watcher import CatalogWatcher, is_publication_altered
from tidemill.capture.tables.context import SideLoopContext
from tidemill.capture.tables.copy_progress import SnapshotProgress
from tidemill.capture.tables.publication_repair import PublicationRepair
from tidemill.capture.tables.schema_change import PendingSchema
from tidemill.capture.tables.table_reasons import PauseCause, refusal_for
from tidemill.capture.tables.table_setup import create_copy_target, event_source_of, resume_copy, start_table
from tidemill.capture.tables.table_states import TableStateUnknownError
from tidemill.capture.topics.captured_table import CapturedTable
from tidemill.capture.topics.topic_writer import TopicWriter
from tidemill.metastore.catalogue import TopicRow

log = structlog.get_logger()

REPAIR_POLL_S = 1.0
LONGEST_PAUSE_S = 300.0
MAX_REMAINING_RECORDS = 2_000
"""Maximum number of records that the last append may leave for the next session to append."""
APPEND_POLL_S = 0.1
CHECK_PAUSE_S = 0.3
"""Minimum pause between two checks that client requests triggered …"""

CHECK_PAUSE_FACTOR = 10
"""… or this multiple of the duration of a check, so that requests for missing tables use at most a tenth of the
database's time.
"""


class SessionRestartError(UnavailableError):
    """End of a session, so that the next one starts with tables that were copied, or that now need a side topic."""


class TableAdder:
    """Task that adds tables. `wal` confirms the WAL of the stream, `writer` writes its topics, `descriptions` is what
    followers see, and `side_topics` has the tables with a side topic, by name.
    """

    def __init__(
        self,
        copies: CopyContext,
        context: SideLoopContext,
        wal: ConfirmedWal,
        writer: TopicWriter,
        descriptions: RelationTracker,
        side_topics: dict[str, CapturedTable],
    ) -> None:
        self._copies = copies
        self._context = context
        self._wal = wal
        self._writer = writer
        self._config = config = copies.config
        self._clock = clock = copies.clock
        self._control = control = context.control
        self._states = states = context.states
        self._catalogue = context.catalogue
        self.publication_repair = PublicationRepair(context)
        self._pending_schema = PendingSchema(
            states, control, self._flushed_lsn, context.reader_lock, descriptions.show_pending_description,
            descriptions.outdated,
        )  # fmt: skip
        self.watcher = CatalogWatcher(context, self.publication_repair, self._pending_schema, self._flushed_lsn)
        self.wal_hold = WalHold(context, wal, writer, side_topics, clock)
        self._auto_recopy = AutoRecopy(config, control, states, clock)
        self._pauses: dict[str, tuple[Backoff, float, int]] = {}
        """Pause by table name: back-off, its end, and the oid of the table that failed. Another table of the same name
        does not wait.
        """
        self._tried_side_topic = frozenset(states.interrupted_copies)
        self._waits_since_s: float | None = None
        self._wake = asyncio.Event()
        self._sought = asyncio.Event()
        self._next_look: asyncio.Future[frozenset[str] | None] | None = asyncio.get_running_loop().create_future()
        """Result of a check of `add_tables` that has not begun yet; None = the task has ended."""
        self.progress = SnapshotProgress(clock)

    def _flushed_lsn(self) -> int:
        return self._wal.flushed_lsn

    @property
    def copying_tables(self) -> tuple[str, ...]:
        """Tables that are being added."""
        return tuple(self._states.copying)

    def check_tables_soon(self) -> None:
        """Trigger a check now, because a client found that a captured table was replaced or dropped."""
        self._wake.set()
        self._sought.set()

    async def is_being_added(self, name: str) -> bool | None:
        """Return whether this table is being added, now or as soon as possible, according to a check that begins after
        this call. Concurrent callers share one check. None: this session has ended.
        """
        look = self._next_look
        if look is None:
            return None
        self._sought.set()
        coming = await asyncio.shield(look)
        return None if coming is None else name in coming

    def mark(self) -> None:
        """Publish the progress of the copy in its stage status."""
        for name in self.copying_tables:
            self.progress.side_topic = self.wal_hold.side_topic_size(name)
        self._states.publish_copy_status(self.progress)

    # the two loops --------------------------------------------------------------------------------
    async def watch_catalogue(self) -> None:
        """Run until cancelled. Raises errors of the control connection and of the catalogue."""
        while True:
            began_s = self._clock.monotonic_s()
            names = {table.name for table in await self.watcher.compare_catalogue()}
            for name in self._pauses.keys() - names:
                del self._pauses[name]
            pause_s = self._config.table_poll_s
            next_s = self._clock.monotonic_s() + (
                min(pause_s, REPAIR_POLL_S) if self._pending_schema.waits else pause_s
            )
            while not self._wake.is_set() and (left_s := next_s - self._clock.monotonic_s()) > 0:
                await self.publication_repair.repair()
                try:
                    async with asyncio.timeout(min(left_s, REPAIR_POLL_S)):
                        await self._wake.wait()
                except TimeoutError:
                    pass
            await asyncio.sleep(max(0.0, min(pause_s, CHECK_PAUSE_S) - (self._clock.monotonic_s() - began_s)))
            self._wake.clear()

    async def add_tables(self) -> None:
        """Run until a table was added, then raise SessionRestartError."""
        pause_s = self._config.table_poll_s
        try:
            while True:
                began_s = self._clock.monotonic_s()
                asked, self._next_look = self._next_look, asyncio.get_running_loop().create_future()
                self._sought.clear()
                try:
                    coming, pending = await self._find_tables_to_add(await self._context.tables.fetch())
                except BaseException:
                    _resolve_check(asked, None)
                    raise
                _resolve_check(asked, coming)
                took_s = self._clock.monotonic_s() - began_s
                if pending and await self._add_pending_tables(pending):
                    raise SessionRestartError(f"tables were added: capture={self._config.name}.")
                self.wal_hold.set_copying(False)
                self._restart_for_side_topic()
                least_s = min(pause_s, max(CHECK_PAUSE_S, CHECK_PAUSE_FACTOR * took_s))
                await asyncio.sleep(least_s)
                with suppress(TimeoutError):
                    async with asyncio.timeout(pause_s - least_s):
                        await self._sought.wait()
        finally:
            asked, self._next_look = self._next_look, None
            _resolve_check(asked, None)

    def _restart_for_side_topic(self) -> None:
        """Hand a copy that this session interrupted to a session with a side topic. While such a copy waits to be
        resumed, WAL is retained for it, so after copy_aside_after_s the session restarts. Raises SessionRestartError.
        """
        names = [
            row.table
            for row in self._states.rows.values()
            if row.copy is not None
            and row.side_topic is None
            and not row.recopy
            and row.table not in self._tried_side_topic
        ]
        now_s = self._clock.monotonic_s()
        if not names or not allows_side_topics(self._config):
            self._waits_since_s = None
        elif self._waits_since_s is None:
            self._waits_since_s = now_s
        elif now_s - self._waits_since_s >= self._config.copy_aside_after_s:
            raise SessionRestartError(
                f"changes of a table whose copy waits go to a side topic: table={','.join(names)}."
            )

    # adding tables --------------------------------------------------------------------------------
    async def _find_tables_to_add(self, found: list[TableInfo]) -> tuple[frozenset[str], list[TableInfo]]:
        """Return the names of the tables to be added, and those of them that can be added now."""
        asked = {t.table for t in await self._catalogue.tables(self._config.name, fresh=False) if t.recopy}
        asked |= await self._auto_recopy.find_due_tables()
        choice = await self._context.choose_tables(found)
        # Before `is_being_added` answers, so that a request finds the reason even if `compare` has not run yet.
        await self._states.refuse_all(choice.refused)
        for name in self._states.interrupted_copies.keys() - {table.name for table in choice.tables}:
            await self._states.abandon_copy(name)
        rows = self._states.rows
        coming, pending = set[str](), []
        for table in choice.tables:
            row = rows.get(table.name)
            fresh = row is None or row.snapshot is None or row.state == "dropped" or table.name in asked
            anew = row is not None and row.oid != table.oid and bool(row.oid)
            if fresh or anew:
                coming.add(table.name)
                if await self._is_due(table):
                    pending.append(table)
        # A renamed table waits until the stream has no more changes under its old name: both names have the same oid.
        flushed = self._wal.flushed_lsn
        busy = {(r.oid, r.table) for r in rows.values() if r.is_streaming or r.paused_lsn - 1 > flushed}
        free = [t for t in pending if not any(oid == t.oid and name != t.name for oid, name in busy)]
        return frozenset(coming), free

    async def _is_due(self, table: TableInfo) -> bool:
        """Return whether the table's pause has ended, or the lock that blocked it is free."""
        _, until_s, oid = self._pauses.get(table.name, (None, 0.0, table.oid))
        if oid != table.oid or self._clock.monotonic_s() >= until_s:
            return True
        held_by = self._states.statuses.blocker_of(table.name)
        if not held_by:
            return False
        holder = await self._control.run(lambda wire: find_table_blocker(wire, table.oid))
        return holder is None or holder.name != held_by

    async def _add_pending_tables(self, pending: list[TableInfo]) -> bool:
        """Publish and copy these tables; True if at least one is complete. A failure of any type is these
        tables' failure and not the session's. The exception is TableStateUnknownError, which ends the session before
        anything else is confirmed.
        """
        done: list[str] = []
        with_side_topic = [table for table in pending if self._has_side_topic(table)]
        pending = with_side_topic[:1] or pending
        self._states.copying = {table.name: table.oid for table in pending}
        self.progress = SnapshotProgress(self._clock)
        try:
            if not with_side_topic or not self._is_copied(with_side_topic[0].name):
                self.wal_hold.set_copying(not with_side_topic)
                done = await self._publish_and_copy(pending)
            if with_side_topic and self._is_copied(with_side_topic[0].name):
                done = [with_side_topic[0].name] if await self._append_side_topic(with_side_topic[0].name) else []
        except CopyPreemptedError as given:
            raise SessionRestartError(given.message) from given
        except BaseException as error:
            if not is_fault(error) or isinstance(error, TableStateUnknownError):
                raise
            log.warning("tables were not added", capture=self._config.name, cause=error_sentence(error))
            why = Refusal(
                "refused", f"the table is not copied yet: {error_sentence(error)}", "It is retried automatically."
            )
            for name, oid in [*self._states.copying.items()]:
                await self._states.refuse_table(name, why, oid, going_on=is_transient(error))
        finally:
            self._states.finish_copy()
        self._back_off([table for table in pending if table.name not in done])
        return bool(done)

    def _has_side_topic(self, table: TableInfo) -> bool:
        row = self._states.rows.get(table.name)
        return row is not None and row.side_topic is not None and row.oid == table.oid and not row.recopy

    def _is_copied(self, name: str) -> bool:
        """Return whether the copy is complete and only the side topic is missing."""
        row = self._states.rows.get(name)
        return row is not None and row.side_topic is not None and bool(row.side_topic.ends)

    async def _append_side_topic(self, name: str) -> bool:
        """Append the side topic until the next session can append the little that is left
        (`side_topic.join_completed_copies`). Returns False if the table's copy was abandoned in the meantime.
        """
        row = self._states.rows[name]
        topic = await self._catalogue.get(TopicRow, row.topic)
        if topic is None or row.copy is None or topic.topic_id != row.copy.topic_id:
            await self._states.abandon_copy(name)
            return False
        appending = create_appender(self._config, row, self._copies.topics, self._clock)
        self.progress.append(name, f"topic:{row.topic}")
        await self._control.run(emit_heartbeat)  # so that an idle stream is bound beyond the newest snapshot
        while True:
            now, latest = self._states.rows.get(name), self._wal.latest_binding
            if now is None or now.side_topic is None or now.copy != row.copy:
                return False
            offsets = latest.offsets.get(now.side_topic.topic_id) if latest is not None else None
            moved = 0
            if offsets is not None:
                moved = await appending.append_up_to(
                    offsets, lambda records: self.wal_hold.record_appended(name, records)
                )
            if offsets is not None and moved <= MAX_REMAINING_RECORDS and is_ready_to_join(now, latest):
                return True
            if moved <= MAX_REMAINING_RECORDS:
                await asyncio.sleep(APPEND_POLL_S)

    async def _publish_and_copy(self, pending: list[TableInfo]) -> list[str]:
        """Return the names of the tables that are complete. WAL is retained for those without a side topic."""
        log.info("adding tables", capture=self._config.name, tables=[t.name for t in pending])
        wire = await PgConnection.connect(self._config.dsn, purpose="join", capture=self._config.name)
        try:
            # Not on the copy's connection: see PublicationRepair._unpublish_parked.
            published = await self._context.read_published()
            if published is None:
                raise MissingError("the publication is missing.")
            # A copy whose table was unpublished in the meantime is not resumed: the stream lacks some of its changes.
            cut_off = {
                table.oid
                for table in pending
                if table.name in self._states.interrupted_copies
                and not is_publication_altered(self._states.rows[table.name], published)
            }
            if any(table.oid not in cut_off for table in pending):
                self.wal_hold.set_copying(True)
            left = await self._publish_tables(wire, pending, published, settle=published.keys() - cut_off)
            relations = await describe_tables(wire, [table.oid for table in left])
            entries = await self._context.query_published(wire) or {}
            taken, captured = [], {}
            for number, table in enumerate(left, 1):
                self.progress.steps.begin_table_step("creating topics", number, len(left))
                if table.oid not in relations or table.oid not in entries:
                    # Dropped in the meantime: the changes of its old copy are carried up to there.
                    continue
                row = self._states.rows.get(table.name)
                if row is not None and row.is_streaming:
                    # Re-created, or recopy was requested while it flows: this session carries nothing more of the old
                    # one.
                    await self._context.pause_at_wal_end(table.name, PauseCause("it is being re-snapshotted"))
                place = (self._config, self._catalogue, self._states, table, relations[table.oid])
                topic = None
                if table.oid in cut_off:
                    topic = await resume_copy(*place)
                    if topic is None:  # it starts over, so its identity and publication are set up after all
                        self.wal_hold.set_copying(True)
                        await self._states.abandon_copy(table.name)
                        if not await self._publish_tables(wire, [table], published, settle=published):
                            continue
                if topic is None:
                    if row is not None and row.oid:
                        await self._writer.retire_table(row.oid)
                    topic = await start_table(*place, entries[table.oid])
                if topic is not None:
                    taken.append(table)
                    row = self._states.rows[table.name]
                    source = event_source_of(self._config, row, wire.database)
                    captured[table.name] = create_copy_target(self._config, row, topic, source)
            return await self._take_snapshot(taken, captured) if taken else []
        finally:
            await wire.aclose()

    async def _publish_tables(
        self,
        wire: PgConnection,
        tables: list[TableInfo],
        published: dict[int, PublishedTable],
        *,
        settle: Container[int],
    ) -> list[TableInfo]:
        """Publish these tables and return them without those that failed, which are refused."""

        def begin_table(number: int) -> None:
            self.progress.steps.begin_table_step("publishing tables", number, len(tables))

        request = PublishRequest(tables, published, settle, LOCK_ATTEMPTS)
        done = await publish_tables(wire, self._config, request, self._states, begin_table)
        for table in [table for table in tables if table.name in done.failed]:
            error = done.failed[table.name]
            await self._states.refuse_table(table.name, refusal_for(error), table.oid, going_on=is_transient(error))
        return [table for table in tables if table.name not in done.failed]

    async def _take_snapshot(self, tables: list[TableInfo], captured: dict[str, CapturedTable]) -> list[str]:
        try:
            return await copy_tables(
                self._copies, tables, captured, self.progress, gives_way=allows_side_topics(self._config)
            )
        except (UnavailableError, UnknownOutcomeError, ClosedError, ConflictError, FencedError):
            raise
        except TidemillError as error:
            for table in tables:
                await self._states.refuse_table(table.name, refusal_for(error), table.oid)
            return []

    def _back_off(self, failed: Sequence[TableInfo]) -> None:
        """Double the pause of the tables that failed."""
        for table in failed:
            restarts, _, oid = self._pauses.get(table.name, (None, 0.0, 0))
            if restarts is None or oid != table.oid:
                restarts = Backoff(self._config.table_poll_s, LONGEST_PAUSE_S)
            self._pauses[table.name] = (restarts, self._clock.monotonic_s() + restarts.pause_s(0.0), table.oid)


def _resolve_check(asked: asyncio.Future[frozenset[str] | None] | None, coming: frozenset[str] | None) -> None:
    if asked is not None and not asked.done():
        asked.set_result(coming)
