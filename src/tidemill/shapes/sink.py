"""The tap of shapes on a capture: takes fragments in a moment, and has them evaluated in shapes' own share of the loop.

    take (capture's turn)        arrivals ──route──► inboxes of the consumers they can match ──evaluate──► logs
                                          (the pump: slices of LoopShare, consumers in turns of QUANTUM_S)

K1  A shape holds nothing back in capture. Logs live in memory, and after a restart every shape starts over
    under a new handle (409 must-refetch), so there is nothing whose durability the database's WAL would
    have to wait for. `take` only puts into a queue, whatever shapes have to do.
K2  A transaction at or below the last committed one is a replay and is dropped; a transaction that begins
    again after an interrupted delivery discards what the first attempt left.
K3  `recent` names the transactions delivered lately, the one under way included. A snapshot taken for a
    shape that registered after them must see them all: their changes were never offered to it. The gap is
    real: a commit is decoded from the WAL before it becomes visible to new snapshots.
K4  Whatever evaluation raises for one consumer, of whatever type, ends its shape and nothing else.
K5  What is not evaluated is bounded: in bytes (whoever holds the oldest fragment ends) and in age (the dearest of those
    that are late end first). Clients of an ended shape refetch.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence

import msgspec

from tidemill.base.clock import Clock
from tidemill.base.errors import TidemillError, Unavailable
from tidemill.base.tasks import is_fault, sentence
from tidemill.capture.changes import Change, Fragment
from tidemill.shapes.consumer import Entry, TableConsumer, Transaction, Work
from tidemill.shapes.router import Router
from tidemill.shapes.share import LoopShare, Turn

RECENT_TRANSACTIONS = 4096
QUANTUM_S = 0.001
"""One consumer works this long before the next one's turn."""

CHANGE_BYTES = 600
BYTES_FACTOR = 3
"""What a decoded change takes in memory: its dictionaries and objects, and its text as Python keeps it."""

CROWD = 10
"""Of the shapes that are late, one in so many ends at a time: the others may catch up without it."""


class BacklogLimits(msgspec.Struct, frozen=True):
    """Of one database: changes kept that not all shapes have evaluated."""

    size_bytes: int = 64 << 20
    age_s: float = 10.0


class ShapeSink:
    """A capture Tap for one database. `take` and `ended` by the capture; `run` in a task while it is served."""

    def __init__(self, clock: Clock, share: LoopShare, limits: BacklogLimits | None = None) -> None:
        self.router = Router()
        self._clock = clock
        self._share = share
        self._limits = limits or BacklogLimits()
        self._arrivals: deque[tuple[Fragment, Work]] = deque()
        self._arrived = asyncio.Event()
        self._transaction: Transaction | None = None
        self._touched: dict[TableConsumer, None] = {}
        self._ready: deque[TableConsumer] = deque()
        self._works: deque[Work] = deque()
        self._recent: deque[int] = deque(maxlen=RECENT_TRANSACTIONS)
        self.held_bytes = 0
        self.fell_behind = 0
        self.taken = 0
        """Commit LSN of the last whole transaction that arrived."""
        self.routed = 0
        """… and of the last one that is in the inboxes of all whom it concerns."""

    @property
    def recent(self) -> frozenset[int]:
        return frozenset(self._recent)

    def seen(self, consumer: TableConsumer) -> int:
        """The newest transaction whose effect on this consumer's shape is in its log."""
        return consumer.floor if consumer.inbox else max(consumer.floor, self.routed)

    # -- capture's turn ----------------------------------------------------------------------------------------

    def take(self, fragment: Fragment) -> None:
        """Put the fragment in the queue; constant time."""
        if fragment.commit_lsn <= self.taken:
            return
        if fragment.begins:
            self._recent.append(fragment.xid)
        if fragment.commits:
            self.taken = fragment.commit_lsn
        if not self.router and not self._arrivals:
            self._transaction = None
            if fragment.commits:
                self.routed = fragment.commit_lsn
            return
        size = CHANGE_BYTES * (1 + len(fragment.changes)) + BYTES_FACTOR * fragment.size_bytes
        work = Work(size, self._clock.monotonic_s())
        self._arrivals.append((fragment, work))
        self._works.append(work)
        work.left = 1
        self.held_bytes += size
        if self.held_bytes > self._limits.size_bytes:
            self._shed()
        self._arrived.set()

    def ended(self, reason: str) -> None:
        """What was taken so far has a gap behind it: all shapes start over."""
        for consumer in self.router.consumers():
            self._end(consumer, f"the stream of changes broke off: {reason}")
        self._arrivals.clear()
        self._works.clear()
        self._touched.clear()
        self._transaction = None
        self.held_bytes = 0
        self.routed = self.taken

    # -- consumers ---------------------------------------------------------------------------------------------

    def add(self, consumer: TableConsumer) -> None:
        """It is offered every fragment that is not routed yet."""
        self.router.add(consumer)

    def remove(self, consumer: TableConsumer) -> None:
        """Idempotent."""
        self.router.remove(consumer)
        self._touched.pop(consumer, None)
        consumer.clear()
        self._trim()

    def _end(self, consumer: TableConsumer, reason: str) -> None:
        consumer.shape.drop(reason)
        self.remove(consumer)

    # -- the pump ----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """For ever. A fault of routing itself ends all shapes of this database, and is raised."""
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            try:
                await self._share.work(self.step)
            except BaseException as error:
                self.ended(sentence(error))
                raise

    def step(self, turn: Turn) -> bool:
        """Route what arrived, for at most half the turn, then evaluate. True = there is more to do."""
        first_half = turn.within((turn.until_s - self._clock.monotonic_s()) / 2)
        while self._arrivals:
            self._route(*self._arrivals[0])
            self._arrivals.popleft()
            if first_half.over:
                break
        while self._ready:
            consumer = self._ready.popleft()
            if self._evaluate(consumer, turn.within(QUANTUM_S)):
                self._ready.append(consumer)
            else:
                consumer.scheduled = False
            if turn.over:
                break
        self._trim()
        return bool(self._arrivals or self._ready)

    def _route(self, fragment: Fragment, work: Work) -> None:
        transaction = self._transaction
        if fragment.begins or transaction is None or transaction.commit_lsn != fragment.commit_lsn:
            transaction = self._transaction = Transaction(fragment.xid, fragment.commit_lsn)
            self._touched.clear()
        touched, untouched = self._touched, dict(self._touched) if fragment.commits else {}

        def offer(consumers: Iterable[TableConsumer], changes: Sequence[Change]) -> None:
            entry = Entry(transaction, work, changes, fragment.commits)
            for consumer in consumers:
                touched[consumer] = None
                untouched.pop(consumer, None)
                self._hand(consumer, entry)

        self.router.route(fragment.changes, offer)
        if fragment.commits:
            for consumer in untouched:
                self._hand(consumer, Entry(transaction, work, (), True))
            self._touched.clear()
            self.routed = fragment.commit_lsn
        work.left -= 1

    def _hand(self, consumer: TableConsumer, entry: Entry) -> None:
        consumer.offer(entry, self.routed)
        if not consumer.scheduled:
            consumer.scheduled = True
            self._ready.append(consumer)

    def _evaluate(self, consumer: TableConsumer, turn: Turn) -> bool:
        """THE boundary of a shape's own work on the stream (K4)."""
        started_s = self._clock.monotonic_s()
        try:
            more = consumer.evaluate(turn)
        except BaseException as error:
            if not is_fault(error) and not isinstance(error, asyncio.CancelledError):
                raise
            consumer.shape.fail(broken(error), broken=True)
            more = False
        if consumer.shape.gone:
            self.remove(consumer)
            more = False
        consumer.spent_s += self._clock.monotonic_s() - started_s
        return more

    # -- bounds ------------------------------------------------------------------------------------------------

    def _trim(self) -> None:
        while self._works and self._works[0].left <= 0:
            self.held_bytes -= self._works.popleft().size_bytes

    def _shed(self) -> None:
        """End who holds the oldest fragments, until what is left fits (K5)."""
        while self.held_bytes > self._limits.size_bytes and self._works:
            oldest = self._works[0]
            holders = [each for each in self.router.consumers() if each.inbox and each.inbox[0].work is oldest]
            if not holders:  # not even routed
                holders = self.router.consumers()
                self._arrivals.clear()
                self._works.clear()
                self._touched.clear()
                self.held_bytes, self.routed = 0, self.taken
            self.fell_behind += len(holders)
            for consumer in holders:
                self._end(consumer, f"it fell behind: backlog_bytes={self._limits.size_bytes}")

    def end_the_late(self) -> None:
        """Once a second: of those whose oldest change waits too long, the dearest end (K5)."""
        now_s = self._clock.monotonic_s()
        consumers = self.router.consumers()
        late = [each for each in consumers if each.inbox and now_s - each.inbox[0].work.arrived_s > self._limits.age_s]
        late.sort(key=lambda consumer: consumer.spent_s, reverse=True)
        ending = late[: -(-len(late) // CROWD)]
        self.fell_behind += len(ending)
        for consumer in ending:
            self._end(consumer, f"it fell behind: age_s={self._limits.age_s}")
        for consumer in consumers:
            consumer.spent_s /= 2


def broken(error: BaseException) -> TidemillError:
    """What clients are answered when a shape ended with a fault that nobody listed."""
    return Unavailable(f"the shape failed and starts over: error={sentence(error)}.")
