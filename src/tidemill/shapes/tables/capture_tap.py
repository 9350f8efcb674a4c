"""The tap of shapes on a capture: queues fragments in constant time, and evaluates them in the loop share of shapes.

    take (the capture's turn)    arrivals ──route──► inboxes of the consumers they can match ──evaluate──► logs
                                          (the pump: slices of LoopShare, consumers in turns of QUANTUM_S)

- Invariant (capture never waits): `process_fragment` only appends to a queue, however much work shapes have. If the
  backlog is more than half full, it also routes a few fragments.
- Invariant (no early confirm): if logs are stored (`store`), each commit is owed: its LSN is confirmed to PostgreSQL
  only after it was evaluated and its items are durable, which takes about a second. The bounded backlog limits the
  first delay, and a failing disk is abandoned (store.py), which limits the second. Without a store no confirmation
  waits for shapes.
- Invariant (replays): a transaction at or below the last committed one is a replay, and is dropped. A transaction that
  begins again after an interrupted delivery discards what the first attempt left.
- Invariant (batches): the transactions of a batch are routed together, and stay whole in every log. While logs are
  restored, batches are split, because only a part of their changes may be stored.
- Invariant (no gap): `recent` has the xids of the transactions delivered lately, including the open one. A snapshot
  taken for a shape that registered after them must see them all, as their changes were never offered to it. This gap is
  real: a commit is decoded from the WAL before it becomes visible to new snapshots.
- Invariant (isolated failures): any exception from evaluating for one consumer ends its shape only.
- Invariant (even halves): while fragments wait to be routed and changes wait to be evaluated, each gets half of the
  time, however long a fragment takes. Otherwise a large transaction of one table delays the few changes of the others.
- Invariant (bounded backlog): the backlog is bounded in bytes (the shapes that hold most of it end) and in age (of the
  late shapes the most expensive end first). Clients of an ended shape refetch. A bound ends only the shapes that exceed
  it: all fragments are routed before any shape ends for them. So a large transaction costs no shape of a table that it
  does not touch, not even one that holds an older change and waits for its turn.
- Invariant (age of live changes only): age counts from the time at which a change is routed to a shape, and only while
  the stream is live. It restarts after logs were restored, with each fragment that was written before the session
  began, and after a pause of the whole process.
- Invariant (restore first): until the logs of an earlier run are restored, fragments are queued and not routed, within
  the same bounds. Relation events of the stream in that time are recorded too: `resumable` has the relations whose logs
  can still be restored.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection

from tidemill.base.clock import Clock
from tidemill.base.errors import UnavailableError
from tidemill.base.lsn import ChangePosition
from tidemill.base.runtime.tasks import error_sentence, is_own_fault_of_await
from tidemill.capture.changes import Fragment
from tidemill.capture.decode.batches import drop_replayed, split_batch
from tidemill.capture.delivery.consumers import TapSession
from tidemill.shapes.log.store import ShapeStore
from tidemill.shapes.loop_share import LoopShare, Turn
from tidemill.shapes.tables.backlog import (
    Backlog,
    BacklogAge,
    BacklogLimits,
    InboxEntry,
    PendingFragment,
    Transaction,
    TransactionBatch,
    find_largest_relation,
)
from tidemill.shapes.tables.filter_index import FilterIndex
from tidemill.shapes.tables.table_consumer import ConsumerTurns, TableConsumer

RECENT_TRANSACTIONS = 4096
ROUTED_PER_TAKE = 2
"""Fragments that `process_fragment` routes per call while the backlog exceeds half of its bound. This way none is left
when the bound is reached, and no turn of the capture routes them all."""

LAST_ORDINAL = (1 << 62) - 1
"""Larger than the ordinal of every change of a transaction."""


class OwedCommits:
    """Commits that may be confirmed to PostgreSQL only after a flush. `stream`: the session, once it streams. `held`:
    the newest transaction that is durable here; owed commits up to it have been reported as flushed."""

    def __init__(self, store: ShapeStore | None, consumer: str, evaluated_position: Callable[[], int]) -> None:
        self.stream: TapSession | None = None
        self.held = 0
        self._owed = 0
        self._store = store
        self._consumer = consumer
        self._evaluated_position = evaluated_position

    def add(self, commit_lsn: int) -> None:
        if self._store is not None:
            self._owed = max(self._owed, commit_lsn)

    def reset(self) -> None:
        """Forget all commits: they belong to another history."""
        self._owed = self.held = 0

    def report_if_clean(self) -> None:
        """Report owed commits as flushed if there is nothing to write."""
        store = self._store
        if self._owed > self.held and store is not None and (store.clean or not store.waited_for):
            self.report_durable(self._evaluated_position())

    def report_flush(self, position: int) -> None:
        """Report a flush. Commits that arrived in the meantime and changed nothing waited for it, so they may be
        reported too."""
        self.report_durable(position)
        self.report_if_clean()

    def report_durable(self, position: int) -> None:
        if position <= self.held:
            return
        self.held = position
        if self.stream is not None and self._owed:
            self.stream.report_flushed(self._consumer, ChangePosition(position, LAST_ORDINAL))


class ShapeTap:
    """A capture tap for one database. The capture calls `process_fragment` and `mark_incomplete`; `run` is a task for
    as long as the database is served."""

    def __init__(
        self,
        clock: Clock,
        share: LoopShare,
        limits: BacklogLimits | None = None,
        *,
        consumer: str = "shapes",
        store: ShapeStore | None = None,
    ) -> None:
        """Create a tap. `consumer`: the name under which commits are owed."""
        self.router = FilterIndex()
        self.name = ""
        self.store = store
        self.restoring = store is not None and store.holds_shapes
        self._restored_from: int | None = None
        """Position up to which stored logs have everything, while they are restored, even if some of them end in that
        time."""
        self.resumable: frozenset[int] | None = None
        """Relations whose stored logs can be restored. None before the first session; after that it only shrinks."""
        self.parked_oids: frozenset[int] = frozenset()
        """Relations that are paused while shapes over some of their columns continue."""
        self.begun = asyncio.Event()
        """Set when the stream begins for the first time."""
        self.consumer = consumer
        self._taking = 0
        self._owed = OwedCommits(store, consumer, self.evaluated_position)
        if store is not None:
            store.position, store.durable = self.evaluated_position, self._owed.report_flush
            store.name, store.taken = self._write_file_name, lambda: self.taken
        self._clock = clock
        self._share = share
        self._limits = limits or BacklogLimits()
        self._arrived = asyncio.Event()
        self._transaction: Transaction | None = None
        self._touched: dict[TableConsumer, None] = {}
        """Consumers that got fragments of the open transaction, other than its last one."""
        self.turns = ConsumerTurns(clock, self._arrived, self.remove_consumer)
        self._backlog = Backlog()
        self._recent: deque[int] = deque(maxlen=RECENT_TRANSACTIONS)
        self.fell_behind = 0
        self._routing_ahead_s = 0.0
        """Time that routing used more than evaluation, while both had work (even halves)."""
        self._catch_up_lsn = 0
        """The end of the WAL when the session began."""
        self._age = BacklogAge(self._limits.age_s)
        self._leaves_out = False
        """True while logs are restored and only changes of resumable tables are stored."""
        self.taken = 0
        """Commit LSN of the last whole transaction that arrived."""
        self.routed = 0
        """Commit LSN of the last transaction that is in the inboxes of all consumers that it can match."""

    @property
    def held_bytes(self) -> int:
        return self._backlog.held_bytes

    @property
    def recent(self) -> frozenset[int]:
        return frozenset(self._recent)

    def last_seen_by(self, consumer: TableConsumer) -> int:
        """Return the newest transaction whose effect on this consumer's shape is in its log."""
        return consumer.floor if consumer.inbox else max(consumer.floor, self.routed)

    # -- called by the capture ---------------------------------------------------------------------------------

    def begin_session(self, last: Collection[str]) -> None:
        if self.store is None:
            return
        if not self.store.claim(last):
            self.restoring, self.resumable = False, frozenset()
            for consumer in self.router.consumers():
                self._end_shape(consumer, "changes were confirmed that this process did not receive")
        self.name = self.store.owner

    def begin_stream(self, stream: TapSession, confirmed_lsn: int, wal_end: int = 0) -> None:
        """Start a session: everything up to `confirmed_lsn` is in the logs, or concerns none."""
        self._owed.stream = stream
        self._catch_up_lsn = wal_end
        if not self._backlog.arrivals:
            self.routed = max(self.routed, confirmed_lsn)
        if self._restored_from is None:
            self._restored_from = self.routed
        self.begun.set()

    def process_fragment(self, fragment: Fragment) -> Collection[str]:
        """Queue a fragment in constant time; return the names under which its commit is owed."""
        self._taking = fragment.commit_lsn
        if fragment.commit_lsn > self.taken:
            if self.restoring:
                for each in split_batch(fragment, self.taken):
                    self._enqueue(each)
            else:
                self._enqueue(drop_replayed(fragment, self.taken))
        owed = fragment.commits and fragment.commit_lsn > self._owed.held and self._must_hold_commit
        if owed:
            self._owed.add(fragment.commit_lsn)
        if not self._backlog.arrivals:
            self._owed.report_if_clean()
        return (self.consumer,) if owed else ()

    @property
    def _must_hold_commit(self) -> bool:
        """True if some log would be incomplete after a restart without a commit that arrives now."""
        store = self.store
        kept = bool(self.router) or bool(self._backlog.arrivals) or self.restoring
        return store is not None and self.name != "" and store.waited_for and (kept or not store.clean)

    def _enqueue(self, fragment: Fragment) -> None:
        if fragment.batch is not None:
            self._recent.extend(fragment.batch.xids)
        elif fragment.begins:
            self._recent.append(fragment.xid)
        before = self.taken
        if fragment.commits:
            self.taken = fragment.commit_lsn
        if not self.router and not self._backlog.arrivals and not self.restoring:
            self._transaction = None
            if fragment.commits:
                self.routed = fragment.commit_lsn
            return
        kept: Fragment | None = fragment
        if self.restoring and self._leaves_out:
            kept = self._backlog.part_of_relations(fragment, self.resumable or frozenset())
        if kept is None:
            return
        if fragment.commit_lsn < self._catch_up_lsn:
            self._age.restart(self._clock.monotonic_s())
        self._backlog.append(kept, before)
        if 2 * self.held_bytes > self._limits.size_bytes and not self.restoring:
            for _ in range(min(ROUTED_PER_TAKE, len(self._backlog.arrivals))):
                self._route_next()
        if self.held_bytes > self._limits.size_bytes:
            self._enforce_size_limit()
        self._arrived.set()

    def mark_incomplete(self, reason: str) -> None:
        """End all shapes: the stream has a gap after what was taken so far."""
        self.resumable = frozenset()
        for consumer in self.router.consumers():
            self._end_shape(consumer, f"the stream of changes was interrupted: {reason}")
        self._touched.clear()
        self._transaction = None
        self._backlog = Backlog()
        # The rest of the open transaction does not arrive: it is owed until the shapes' ends are durable.
        self.taken = self.routed = max(self.taken, self._taking)
        if self._taking > self._owed.held:
            self._owed.add(self._taking)
        self._owed.report_if_clean()

    def reset_history(self) -> None:
        """Reset for another history of the database; stored logs belong to an earlier history that the capture's row no
        longer names."""
        self.restoring, self.resumable = False, frozenset()
        for consumer in self.router.consumers():
            self._end_shape(consumer, "the captured database has returned to an earlier state")
        self._touched.clear()
        self._recent.clear()
        self._transaction, self._backlog = None, Backlog()
        self.taken = self.routed = self._taking = 0
        self._owed.reset()
        self._restored_from = None
        if self.store is not None:
            self.store.reset_history()

    def set_carried_relations(self, oids: Collection[int]) -> None:
        """End the shapes of relations that are not among `oids`: their logs have a gap."""
        self.resumable = frozenset(oids) if self.resumable is None else self.resumable & frozenset(oids)
        self.parked_oids &= frozenset(oids)
        for oid in self.router.oids:
            if oid not in oids:
                for consumer in self.router.consumers_of(oid):
                    self._end_shape(consumer, "its table is re-snapshotted, or no longer captured")

    def lost(self, oid: int, reason: str, columns: frozenset[str] = frozenset()) -> bool:
        """End the shapes of a relation whose changes the stream omits; return whether some shapes continue.

        Live shapes that need only `columns` continue. A shape that is being loaded reads all columns, and ends.
        """
        self.resumable = (self.resumable or frozenset()) - {oid}
        for consumer in self.router.consumers_of(oid):
            needed = consumer.needed
            if consumer.shape.state != "live" or needed is None or not needed <= columns:
                self._end_shape(consumer, reason)
        goes_on = bool(self.router.consumers_of(oid))
        self.parked_oids = self.parked_oids | {oid} if goes_on else self.parked_oids - {oid}
        return goes_on

    # -- owed commits ------------------------------------------------------------------------------------------

    def evaluated_position(self) -> int:
        """Return the newest transaction that, with all before it, every consumer has evaluated.

        While logs are restored, none of them has evaluated anything since its file was written.
        """
        return (self._restored_from or 0) if self.restoring else self._backlog.evaluated_before(self.routed)

    async def _write_file_name(self, name: str) -> None:
        """Write a new file name into the capture's row. Raises UnavailableError between two streams, or what the
        metastore raises."""
        if self._owed.stream is None:
            raise UnavailableError("the capture does not stream.")
        self.name = name
        await self._owed.stream.store_tap_names()

    def finish_restore(self) -> None:
        """Start routing: the logs are restored, and the fragments queued since are routed now."""
        self.restoring = False
        self._age.restart(self._clock.monotonic_s())
        if not self._backlog.arrivals:  # omitted fragments concern no consumer
            self.routed = max(self.routed, self.taken)
        self._arrived.set()
        self._owed.report_if_clean()

    # -- consumers ---------------------------------------------------------------------------------------------

    def remove_consumer(self, consumer: TableConsumer) -> None:
        """Stop offering changes to the consumer. Idempotent."""
        self.router.remove(consumer)
        self._touched.pop(consumer, None)
        self.turns.discard(consumer)
        consumer.clear()
        self._backlog.drop_evaluated()

    def _end_shape(self, consumer: TableConsumer, reason: str) -> None:
        consumer.shape.drop(reason)
        self.remove_consumer(consumer)

    # -- the pump ----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Route and evaluate forever. A fault of the routing itself ends all shapes of this database, and is raised."""
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            try:
                await self._share.run_step(self.run_slice)
            except BaseException as error:
                if is_own_fault_of_await(error):  # an orderly stop leaves the stored logs unchanged
                    self.mark_incomplete(error_sentence(error))
                raise

    def run_slice(self, turn: Turn) -> bool:
        """Route arrivals for half the time, and evaluate for the other. Return True if there is more to do.

        A fragment may take longer to route than a whole turn: later turns then evaluate until they are even.
        """
        started_s = self._clock.monotonic_s()
        routes = bool(self._backlog.arrivals) and (self._routing_ahead_s <= 0 or not self.turns.has_ready)
        if routes:
            first_half = Turn(self._clock, (started_s + turn.until_s) / 2)
            while self._backlog.arrivals:
                self._route_next()
                if first_half.is_over:
                    break
            routed_s = self._clock.monotonic_s()
            self._routing_ahead_s = max(0.0, self._routing_ahead_s) + routed_s - started_s
            started_s = routed_s
        if not routes or not turn.is_over:
            self.turns.run(turn)
            self._routing_ahead_s -= self._clock.monotonic_s() - started_s
        if not self.turns.has_ready:
            self._routing_ahead_s = 0.0
        self._backlog.drop_evaluated()
        self._owed.report_if_clean()
        return bool(self._backlog.arrivals) or self.turns.has_ready

    def _route_next(self) -> None:
        self._route(*self._backlog.arrivals[0])
        self._backlog.arrivals.popleft()
        if not self._backlog.arrivals:
            self.routed = max(self.routed, self.taken)

    def _route(self, fragment: Fragment, work: PendingFragment) -> None:
        transaction = self._transaction
        if fragment.begins or transaction is None or transaction.commit_lsn != fragment.commit_lsn:
            transaction = self._transaction = Transaction(fragment.xid, fragment.commit_lsn)
            self._touched.clear()
        touched, commits, handed_bytes = self._touched, fragment.commits, 0
        batch = TransactionBatch(fragment.batch) if fragment.batch is not None else None
        now_s = self._clock.monotonic_s()
        for consumers, changes in self.router.route(fragment.changes):
            entry = InboxEntry(transaction, work, changes, commits, now_s, batch)
            handed_bytes += entry.size_bytes
            for consumer in consumers:
                if not commits:
                    touched[consumer] = None
                elif touched:
                    touched.pop(consumer, None)
                self.turns.offer(consumer, entry, self.routed)
        if commits:
            for consumer in touched:
                self.turns.offer(consumer, InboxEntry(transaction, work, (), True, now_s), self.routed)
            touched.clear()
            self.routed = fragment.commit_lsn
        work.shrink(handed_bytes)
        work.release()

    # -- bounds ------------------------------------------------------------------------------------------------

    def _enforce_size_limit(self) -> None:
        """Route all arrivals, then end the shapes that hold most of the backlog, until the rest fits."""
        while self.held_bytes > self._limits.size_bytes and self._backlog.arrivals:
            if self.restoring:
                self._shrink_while_restoring()
            else:
                self._route_next()
        while self.held_bytes > self._limits.size_bytes:
            holders = self.turns.find_largest()
            if not holders:
                break
            self.fell_behind += len(holders)
            for consumer in holders:
                self._end_shape(consumer, f"it fell behind: backlog_bytes={self._limits.size_bytes}")
        self._backlog.drop_evaluated()

    def _shrink_while_restoring(self) -> None:
        """Shrink the backlog while logs are restored and nothing can be routed.

        The first call drops changes of tables that are not resumable. Each further call ends the table with the largest
        share of the backlog.
        """
        resumable = self.resumable or frozenset()
        if self._leaves_out:
            over = find_largest_relation(self._backlog.arrivals, resumable)
            self.resumable = resumable - {over}
            for consumer in self.router.consumers_of(over):
                self.fell_behind += 1
                self._end_shape(consumer, f"it fell behind: backlog_bytes={self._limits.size_bytes}")
        self._leaves_out = True
        arrived, self._backlog = self._backlog.arrivals, Backlog()
        for fragment, work in arrived:
            found = self._backlog.part_of_relations(fragment, self.resumable or frozenset())
            if found is not None:
                self._backlog.append(found, work.before)

    def end_late_shapes(self) -> None:
        """End the most expensive of the shapes whose oldest change waits for too long; called once a second."""
        ending = self.turns.end_tick(self._age.find_late_before_s(self._clock.monotonic_s()))
        self.fell_behind += len(ending)
        for consumer in ending:
            self._end_shape(consumer, f"it fell behind: age_s={self._limits.age_s}")
