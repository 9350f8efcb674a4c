"""Determine which WAL PostgreSQL must retain for copies, and limit the side topics that make this unnecessary.

Invariant (WAL of a copy): while a table without a side topic is copied, the confirmed LSN stays at the start of the
copy. The next session, which begins when the copy is done or yields (copier.py), replays the table's changes in
between. The other tables find their place in that replay by their bindings. The hold starts with a session that finds
an interrupted copy. Once a table was added, this session confirms nothing more, and the next session confirms only once
each table that it carries, and each side topic, is in a binding. Otherwise its successor could not know which changes
were already confirmed, and the copy would be useless.

Invariant (bounded side topic): a side topic holds at most `copy_aside_max_mb`. When it is full, it ends at the WAL end.
That end is made durable while the stream's reader is paused, as for a paused table (context.py), and WAL is retained
from there on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from msgspec.structs import replace

from tidemill.base.clock import Clock
from tidemill.base.limits import MIB
from tidemill.capture.postgres.standby_status import ReplicationStatus
from tidemill.capture.tables.context import SideLoopContext
from tidemill.capture.tables.table_setup import delete_topic
from tidemill.capture.tables.table_states import TableStates
from tidemill.capture.topics.binder import Binder
from tidemill.capture.topics.captured_table import CapturedTable
from tidemill.capture.topics.topic_writer import TopicWriter
from tidemill.metastore.catalogue import CaptureTableRow, SideTopicState, TopicRow
from tidemill.shards.api import Binding

HOLD_POLL_S = 0.5
RECORD_S = 5.0
FIRST_RECORD_S = 1.0
"""First interval after the start of a session, whose knowledge of a side topic is what was last recorded."""


def tables_needing_wal(states: TableStates, carried: Sequence[CapturedTable], latest: Binding | None) -> list[str]:
    """Return the names of the tables for whose copy WAL is retained. Pure."""
    bound = latest.offsets if latest is not None else {}
    unbound = {table.name for table in carried if table.topic.topic_id not in bound and table.name in states.rows}
    return sorted(unbound | states.tables_retaining_wal())


class ConfirmedWal:
    """WAL that one session confirms, and whether it is held for copies.

    `carried`: tables that the session writes. `status` and `binder` are set once the stream begins.

    Invariant: while `status.hold` is set, the confirmed LSN does not exceed it. It is set in the event-loop turn in
    which a copy or the end of a side topic comes to need WAL, and removed only by `hold_wal(False)`.
    """

    def __init__(self, states: TableStates, due: asyncio.Event) -> None:
        self._states = states
        self._due = due
        self.carried: Sequence[CapturedTable] = ()
        self.status: ReplicationStatus | None = None
        self.binder: Binder | None = None

    @property
    def latest_binding(self) -> Binding | None:
        return self.binder.latest if self.binder is not None else None

    @property
    def flushed_lsn(self) -> int:
        """Return the LSN up to which every transaction is bound."""
        return self.status.flushed if self.status is not None else -1

    def begin_stream(self, status: ReplicationStatus) -> None:
        """Confirm WAL of a stream that begins, in accordance with the copies and the newest binding."""
        self.status = status
        self.hold_if_needed()
        if self.carried:  # Without a table there is no binding, and nothing can be lost.
            latest = self.latest_binding
            status.bound = max(status.flushed, latest.lsn if latest is not None else -1)

    def hold_if_needed(self) -> None:
        """Stop advancing the confirmed LSN if the copy of a table needs WAL. Called in the same event-loop turn in
        which the end of a side topic becomes durable, hence before the transaction at which the side topic ends is
        handed on.
        """
        status = self.status
        needs_wal = status is not None and status.hold is None
        if status is not None and needs_wal and tables_needing_wal(self._states, self.carried, self.latest_binding):
            status.hold = status.flushed

    def hold_wal(self, on: bool) -> None:
        """Stop the confirmed LSN from advancing, or resume it."""
        status = self.status
        if status is None:
            return
        if on and status.hold is None:
            status.hold = status.flushed
        elif not on and status.hold is not None:
            status.hold = None
            self._due.set()  # on an idle server nothing else triggers a status

    def record_stored_binding(self, lsn: int) -> None:
        """Raise the bound LSN that the status may confirm (binder.py)."""
        if self.status is not None and self.status.bound is not None:
            self.status.bound = max(self.status.bound, lsn)
            self._due.set()


class WalHold:
    """Hold of the confirmed LSN for copies. `side_topics`: tables with a side topic, by name."""

    def __init__(
        self,
        context: SideLoopContext,
        wal: ConfirmedWal,
        writer: TopicWriter,
        side_topics: dict[str, CapturedTable],
        clock: Clock,
    ) -> None:
        self._context = context
        self._states = context.states
        self._wal = wal
        self._writer = writer
        self._clock = clock
        self._copies = False
        self._needing: tuple[object, list[str]] | None = None
        self._side_topics = {name: (table, self._recorded_size(name).bytes) for name, table in side_topics.items()}
        self._appended: dict[str, int] = {}

    @property
    def tables(self) -> list[str]:
        """Tables for whose copies WAL is retained. The same list is returned until one of its inputs changes."""
        states, latest = self._states, self._wal.latest_binding
        state = (states.changes, tuple(states.copying), latest)
        if self._needing is None or self._needing[0] != state:
            self._needing = state, tables_needing_wal(states, self._wal.carried, latest)
        return self._needing[1]

    def set_copying(self, on: bool) -> None:
        """Note that a copy without a side topic begins, or that all such copies ended without adding a table."""
        self._copies = on
        self.update_hold()

    def update_hold(self) -> None:
        self._wal.hold_wal(self._copies or bool(self.tables))

    def record_appended(self, name: str, records: int) -> None:
        self._appended[name] = records

    def side_topic_size(self, name: str) -> SideTopicState | None:
        """Return the current size of a table's side topic."""
        row = self._states.rows.get(name)
        if row is None or row.side_topic is None:
            return None
        found = row.side_topic
        if name in self._side_topics and self._side_topics[name][0].topic.topic_id == found.topic_id:
            table, before = self._side_topics[name]
            records = sum(max(writer.expected_high_watermark, writer.held) for writer in table.writers)
            found = replace(found, records=records, bytes=before + sum(writer.made_bytes for writer in table.writers))
        return replace(found, appended=max(found.appended, self._appended.get(name, 0)))

    async def run(self) -> None:
        """Run until cancelled. Raises TableStateUnknownError, and errors of the control connection, the topics or the
        catalogue.
        """
        recorded_s = self._clock.monotonic_s() - RECORD_S + FIRST_RECORD_S
        while True:
            await asyncio.sleep(HOLD_POLL_S)
            self.update_hold()
            for name in [*self._side_topics]:
                await self._check_side_topic(name)
            if self._clock.monotonic_s() - recorded_s >= RECORD_S:
                recorded_s = self._clock.monotonic_s()
                for name in [*self._side_topics]:
                    await self._record_size(name)

    def _recorded_size(self, name: str) -> SideTopicState:
        row = self._states.rows.get(name)
        return row.side_topic if row is not None and row.side_topic is not None else SideTopicState("")

    async def _check_side_topic(self, name: str) -> None:
        table, _ = self._side_topics[name]
        if self._recorded_size(name).topic_id != table.topic.topic_id:
            # Its copy was abandoned, so its side topic is not needed any more.
            del self._side_topics[name]
            await self._writer.retire_table(table.oid)
            await self._delete_side_topic(table)
            return
        found = self.side_topic_size(name)
        limit_mb = self._context.config.copy_aside_max_mb
        if found is not None and not found.until_lsn and found.bytes > limit_mb * MIB:
            why = f"the side topic is full: bytes={found.bytes} copy_aside_max_mb={limit_mb}"
            async with self._context.reader_lock:
                await self._states.end_side_topic(name, await self._context.read_wal_end(), why)
                self.update_hold()

    async def _delete_side_topic(self, table: CapturedTable) -> None:
        topic = await self._context.catalogue.get(TopicRow, table.topic.name)
        if topic is not None and topic.topic_id == table.topic.topic_id:
            await delete_topic(self._context.catalogue, topic.name)

    async def _record_size(self, name: str) -> None:
        """Record the sizes for table listings and for the next session."""
        now = self.side_topic_size(name)

        def with_size(found: CaptureTableRow | None) -> CaptureTableRow | None:
            if found is None or found.side_topic is None or now is None or found.side_topic.topic_id != now.topic_id:
                return found
            side_topic = replace(found.side_topic, records=now.records, bytes=now.bytes, appended=now.appended)
            return replace(found, side_topic=side_topic)

        if now is not None and now != self._recorded_size(name):
            await self._states.update_row(name, with_size)
