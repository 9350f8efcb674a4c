"""The collector: one queue, one task, between the stream and the sinks.

    in      fragments and keepalives (in stream order), flush notices, removals, sinks that come and go
    out     fragments to every sink, in commit order, one at a time; LSNs to confirm, through Status

The ordering axiom. A sink's notice is a message in the same queue, never an inline call: a notice sent while a
commit is being handled is handled after that commit was registered with the tracker. So no notice can be too
early to be known, and none is forgotten (seed 002).

    K1  A consumer is registered for a commit only if the transaction was delivered to its sink.
    K2  Keepalives take their place behind the fragments that were read before them: one that overtook an
        undelivered commit would confirm it.
    K3  A fragment at or below the last processed position is a replay: dropped, but its commit is still
        acknowledged. One that straddles it is an error: the stream was cut differently than before.
    K4  A sink added while a transaction is open joins with the next one; a removed one gets nothing more.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable

import msgspec

from tidemill.base.clock import Clock
from tidemill.base.errors import Corrupt
from tidemill.base.frontier import BEFORE_ALL, ChangePosition
from tidemill.capture.changes import Fragment
from tidemill.capture.flush_tracker import FlushTracker
from tidemill.capture.sinks import Sink
from tidemill.capture.wire.status import Keepalive, Status

QUEUE_FRAGMENTS = 64
"""With the converter's FRAGMENT_BYTES this bounds the queue's memory, however wide the rows are."""


class _Flushed(msgspec.Struct, frozen=True):
    consumer: str
    position: ChangePosition


class _Removed(msgspec.Struct, frozen=True):
    consumer: str


class _Progress(msgspec.Struct, frozen=True):
    keepalive: Keepalive
    inside_txn: bool


class _SinkRemoved(msgspec.Struct, frozen=True):
    sink: object


class Collector:
    """Implements sinks.FlushNotices. `on_keepalive(lsn)`: nothing up to the inclusive LSN is still to be delivered;
    `on_status(urgent)`: received or flushed may have moved (urgent: the server asked for an answer)."""

    def __init__(
        self,
        sinks: Iterable[Sink],
        status: Status,
        clock: Clock,
        *,
        on_keepalive: Callable[[int], None] = lambda _: None,
        on_status: Callable[[bool], None] = lambda _: None,
        queue_changes: int = 20_000,
        tracker: FlushTracker | None = None,
    ) -> None:
        self.tracker = tracker or FlushTracker()
        self.status = status
        self._clock = clock
        self._on_keepalive = on_keepalive
        self._on_status = on_status
        self._sinks: list[Sink] = list(sinks)
        self._joining: list[Sink] = []
        self._queue: deque[Fragment | _Flushed | _Removed | _Progress | _SinkRemoved] = deque()
        self._arrived = asyncio.Event()
        self._room = asyncio.Event()
        self._queued_changes = 0
        self._queued_fragments = 0
        self._queue_changes = queue_changes
        self._last_processed = BEFORE_ALL
        self._touched: dict[str, Sink] = {}
        self._of_sink: dict[str, Sink] = {}
        self._inside_txn = False
        self.last_commit_lsn = 0
        self.last_commit_time_ms = 0

    # from the stream ------------------------------------------------------------------------------
    async def put(self, fragment: Fragment) -> None:
        """Hand over a fragment; waits while the queue is full, so that the socket is not read meanwhile."""
        while self._queued_changes >= self._queue_changes or self._queued_fragments >= QUEUE_FRAGMENTS:
            self._room.clear()
            await self._room.wait()
        self._queued_changes += 1 + len(fragment.changes)
        self._queued_fragments += 1
        self._put(fragment)

    def keepalive(self, keepalive: Keepalive, *, inside_txn: bool) -> None:
        """`inside_txn` as of the moment it was read (K2)."""
        self._put(_Progress(keepalive, inside_txn))

    # FlushNotices ---------------------------------------------------------------------------------
    def flushed(self, consumer: str, position: ChangePosition) -> None:
        self._put(_Flushed(consumer, position))

    def removed(self, consumer: str) -> None:
        self._put(_Removed(consumer))

    # sinks ----------------------------------------------------------------------------------------
    def add_sink(self, sink: Sink) -> None:
        self._joining.append(sink)

    def remove_sink(self, sink: Sink) -> None:
        """It gets nothing more, and none of its consumers holds anything back."""
        self._joining = [each for each in self._joining if each is not sink]
        self._sinks = [each for each in self._sinks if each is not sink]
        self._put(_SinkRemoved(sink))

    # the one task ---------------------------------------------------------------------------------
    async def run(self) -> None:
        """For ever. Raises what a sink raises, and Corrupt (K3)."""
        while True:
            while self._queue:
                await self._handle(self._queue.popleft())
            self._arrived.clear()
            await self._arrived.wait()

    async def _handle(self, item: Fragment | _Flushed | _Removed | _Progress | _SinkRemoved) -> None:
        match item:
            case Fragment():
                await self._fragment(item)
                self._queued_changes -= 1 + len(item.changes)
                self._queued_fragments -= 1
                self._room.set()
            case _Flushed():
                self._confirm(self.tracker.flushed(item.consumer, item.position, self._clock.now_ms()))
            case _Removed():
                self._forget(item.consumer)
            case _SinkRemoved():
                for consumer in [name for name, sink in self._of_sink.items() if sink is item.sink]:
                    self._forget(consumer)
            case _Progress():
                self._progress(item)

    async def _fragment(self, fragment: Fragment) -> None:
        if fragment.last <= self._last_processed:
            if fragment.commits:
                self._inside_txn = False
                self._register(fragment, ())
            return
        if fragment.changes and fragment.changes[0].position <= self._last_processed:
            raise Corrupt(
                f"a fragment straddles what was processed: first={fragment.changes[0].position} last={fragment.last}"
                f" processed={self._last_processed}."
            )
        if fragment.begins:
            self._sinks += self._joining
            self._joining = []
            self._touched = {}
            self._inside_txn = True
        for sink in list(self._sinks):
            for consumer in await sink.deliver(fragment, self):
                self._touched[consumer] = sink
        self._last_processed = fragment.last
        if fragment.commits:
            self._inside_txn = False
            delivered = {name: sink for name, sink in self._touched.items() if sink in self._sinks}
            self._of_sink.update(delivered)
            self._touched = {}
            self._register(fragment, delivered)

    def _register(self, fragment: Fragment, consumers: Iterable[str]) -> None:
        self.last_commit_lsn = max(self.last_commit_lsn, fragment.commit_lsn)
        self.last_commit_time_ms = max(self.last_commit_time_ms, fragment.commit_time_ms)
        # A transaction nobody waits for is confirmed while it is handled, before it counts as seen.
        self._confirm(self.tracker.commit(fragment, consumers, self._clock.now_ms()))
        self.status.commit_handled(fragment.commit_lsn)
        self._on_status(False)

    def _progress(self, item: _Progress) -> None:
        self.status.keepalive(item.keepalive.wal_end, inside_txn=item.inside_txn)
        if not item.inside_txn:
            self._on_keepalive(item.keepalive.wal_end - 1)
        self._on_status(item.keepalive.reply_requested)

    def _forget(self, consumer: str) -> None:
        self._touched.pop(consumer, None)
        self._of_sink.pop(consumer, None)
        self._confirm(self.tracker.removed(consumer))

    def _confirm(self, lsn: int | None) -> None:
        if lsn is not None:
            self.status.flush_notice(lsn)
            self._on_status(False)

    def _put(self, item: Fragment | _Flushed | _Removed | _Progress | _SinkRemoved) -> None:
        self._queue.append(item)
        self._arrived.set()
