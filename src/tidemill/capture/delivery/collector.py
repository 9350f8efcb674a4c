"""The collector: one queue and one task between the stream and its consumers.

    in      fragments and keepalives (in stream order), flush notices
    out     fragments to every tap and every sink, in commit order, one at a time; LSNs to confirm, through Status

Invariant (ordering): a sink's notice is a message in the same queue, never an inline call. A notice sent while a commit
is being handled is processed after that commit was registered with the tracker. So no notice arrives too early to be
recognised, and none is lost.

Invariant (registration): a consumer is registered for a commit only if the transaction was delivered to its sink, or
its tap owes a notice for it.

Invariant (keepalives in order): a keepalive queues behind the fragments that were read before it. Otherwise it could
confirm an undelivered commit.

Invariant (replays): a fragment at or below the last processed position is a replay. It is dropped, but its commit is
still registered. A fragment that straddles that position is an error: the stream was cut differently than before.

Invariant (batches): the transactions of a batch are delivered in one call, and registered once, at the last of them.
Another session may put them into other batches, so a batch that straddles the last processed position loses only the
transactions up to it.

Invariant (taps first): taps come before sinks, so they never wait for room in a sink, and their errors affect only
themselves (consumers.py).

Invariant (one open transaction): a fragment that begins no transaction belongs to the open one; any other is an error.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable

import msgspec

from tidemill.base.clock import Clock
from tidemill.base.errors import CorruptError, TidemillError, UnavailableError
from tidemill.base.lsn import BEFORE_ALL, ChangePosition, Lsn
from tidemill.base.runtime.tasks import error_sentence
from tidemill.capture.changes import Fragment
from tidemill.capture.decode.batches import drop_replayed
from tidemill.capture.decode.row_blocks import first_position
from tidemill.capture.delivery.consumers import Sink, TapRegistry
from tidemill.capture.delivery.flush_tracker import FlushTracker
from tidemill.capture.postgres.standby_status import Keepalive, ReplicationStatus

QUEUE_FRAGMENTS = 64
"""Maximum number of queued fragments. With the converter's FRAGMENT_BYTES this bounds the queue's memory, regardless of
the width of rows.
"""


class _FlushNotice(msgspec.Struct, frozen=True):
    consumer: str
    position: ChangePosition


class _KeepaliveItem(msgspec.Struct, frozen=True):
    keepalive: Keepalive
    inside_txn: bool


class Collector:
    """Queue and task between stream and consumers; implements consumers.FlushNotices.

    `on_keepalive(lsn, reply_requested)`: nothing up to the inclusive LSN is still to be delivered. `on_status()`:
    received or flushed may have moved, or the server requested an answer.
    """

    def __init__(
        self,
        sinks: Iterable[Sink],
        status: ReplicationStatus,
        clock: Clock,
        *,
        taps: TapRegistry | None = None,
        on_keepalive: Callable[[int, bool], None] = lambda lsn, reply_requested: None,
        on_status: Callable[[], None] = lambda: None,
        queue_changes: int = 20_000,
    ) -> None:
        self.tracker = FlushTracker()
        self.status = status
        self._clock = clock
        self._on_keepalive = on_keepalive
        self._on_status = on_status
        self._sinks = tuple(sinks)
        self._taps = taps or TapRegistry(clock)
        self._queue: deque[Fragment | _FlushNotice | _KeepaliveItem] = deque()
        self._arrived = asyncio.Event()
        self._room = asyncio.Event()
        self._queued_changes = 0
        self._queued_fragments = 0
        self._queue_changes = queue_changes
        self._last_processed = BEFORE_ALL
        self._open_lsn = 0
        """Commit LSN of the transaction that is not complete yet, or 0."""
        self._touched: set[str] = set()
        self.taken_changes = 0
        """Number of changes passed to every sink, in this session."""
        self.last_commit_lsn = 0
        self.last_commit_time_ms = 0
        self.received_time_ms = 0
        """Commit time of the last commit that was put; the reader resets it."""

    # from the stream ------------------------------------------------------------------------------
    async def put(self, fragment: Fragment) -> None:
        """Queue a fragment; waits while the queue is full, during which the socket is not read."""
        while self._queued_changes >= self._queue_changes or self._queued_fragments >= QUEUE_FRAGMENTS:
            self._room.clear()
            await self._room.wait()
        self._queued_changes += 1 + len(fragment.changes)
        self._queued_fragments += 1
        if fragment.commits:
            self.received_time_ms = fragment.commit_time_ms
        self._enqueue(fragment)

    def put_keepalive(self, keepalive: Keepalive, *, inside_txn: bool) -> None:
        """Queue a keepalive. `inside_txn`: whether a transaction was open when it was read."""
        last = self._queue[-1] if self._queue else None
        if isinstance(last, _KeepaliveItem) and last.inside_txn == inside_txn:
            # Keepalives that wait behind a blocked sink are merged.
            asked = keepalive.reply_requested or last.keepalive.reply_requested
            self._queue[-1] = _KeepaliveItem(Keepalive(keepalive.wal_end, asked), inside_txn)
            return
        self._enqueue(_KeepaliveItem(keepalive, inside_txn))

    # FlushNotices ---------------------------------------------------------------------------------
    def report_flushed(self, consumer: str, position: ChangePosition) -> None:
        self._enqueue(_FlushNotice(consumer, position))

    # task -----------------------------------------------------------------------------------------
    async def run(self) -> None:
        """Run until cancelled. Raises the errors of a sink, and CorruptError for a fragment that straddles the
        processed position.
        """
        while True:
            while self._queue:
                await self._process_item(self._queue.popleft())
            self._arrived.clear()
            await self._arrived.wait()

    async def _process_item(self, item: Fragment | _FlushNotice | _KeepaliveItem) -> None:
        match item:
            case Fragment():
                await self._process_fragment(item)
                self.taken_changes += len(item.changes)
                self._queued_changes -= 1 + len(item.changes)
                self._queued_fragments -= 1
                self._room.set()
            case _FlushNotice():
                self._confirm_lsn(self.tracker.record_flush(item.consumer, item.position, self._clock.now_ms()))
            case _KeepaliveItem():
                self._process_keepalive(item)

    async def _process_fragment(self, fragment: Fragment) -> None:
        if fragment.last <= self._last_processed:
            if fragment.commits:
                self._register_commit(fragment, ())
            return
        fragment = drop_replayed(fragment, self._last_processed.commit_lsn)
        first = first_position(fragment.changes)
        if first is not None and first <= self._last_processed:
            raise CorruptError(
                f"a fragment straddles what was processed: first={first} last={fragment.last}"
                f" processed={self._last_processed}."
            )
        if fragment.begins:
            self._touched = set()
        elif fragment.commit_lsn != self._open_lsn:
            raise CorruptError(
                f"a fragment of no open transaction: xid={fragment.xid} last={fragment.last} open={self._open_lsn}."
            )
        self._open_lsn = 0 if fragment.commits else fragment.commit_lsn
        self._touched |= self._taps.dispatch_fragment(fragment)
        for sink in self._sinks:
            self._touched.update(await self._deliver_to_sink(sink, fragment))
        self._last_processed = fragment.last
        if fragment.commits:
            delivered, self._touched = self._touched, set()
            self._register_commit(fragment, delivered)

    async def _deliver_to_sink(self, sink: Sink, fragment: Fragment) -> list[str]:
        """Deliver a fragment to a sink. Raises a sink's TidemillError unchanged, and any other error with the position
        at which it happened.
        """
        try:
            return await sink.deliver(fragment, self)
        except (TidemillError, asyncio.CancelledError):
            raise
        except Exception as error:
            tables = ",".join(sorted({change.relation.name for change in fragment.changes}))
            raise UnavailableError(
                f"a transaction cannot be delivered: xid={fragment.xid} commit={Lsn(fragment.commit_lsn)}"
                f" last={fragment.last} tables={tables} error={error_sentence(error)!r}."
            ) from error

    def _register_commit(self, fragment: Fragment, consumers: Iterable[str]) -> None:
        self.last_commit_lsn = max(self.last_commit_lsn, fragment.commit_lsn)
        self.last_commit_time_ms = max(self.last_commit_time_ms, fragment.commit_time_ms)
        # A transaction without waiting consumers is confirmed while it is handled, before it counts as seen.
        self._confirm_lsn(self.tracker.commit(fragment, consumers, self._clock.now_ms()))
        self.status.record_commit(fragment.commit_lsn)
        self._on_status()

    def _process_keepalive(self, item: _KeepaliveItem) -> None:
        self.status.record_keepalive(item.keepalive.wal_end, inside_txn=item.inside_txn)
        if not item.inside_txn:
            self._on_keepalive(item.keepalive.wal_end - 1, item.keepalive.reply_requested)
        self._on_status()

    def _confirm_lsn(self, lsn: int | None) -> None:
        if lsn is not None:
            self.status.record_flush_notice(lsn)
            self._on_status()

    def facts(self) -> dict[str, object]:
        """Return the sizes of the queue between the stream and the sinks, and their limits. The socket is not read
        while one is reached.
        """
        return {
            "queue_fragments": self._queued_fragments,
            "queue_fragments_limit": QUEUE_FRAGMENTS,
            "queue_changes": self._queued_changes,
            "queue_changes_limit": self._queue_changes,
        }

    def _enqueue(self, item: Fragment | _FlushNotice | _KeepaliveItem) -> None:
        self._queue.append(item)
        self._arrived.set()
