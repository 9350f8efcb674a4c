"""The flush property on the real collector: consumers come and go at any moment and flush at any time, notices and
keepalives wait in its queue, and the process dies and restarts at the position that was confirmed to the server.

A consumer that leaves reports, in the order of the collector's queue, that it holds everything it was sent. In the
middle of a transaction of which it has a part, it reports only after the commit (`consumers.Sink`: each returned name
will report `flushed`). Oracle: the contents of the consumers' storages.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from sim.scenarios.capture_plants import EqualityTracker, RawNotices, StaleStatus
from support.capture.fragments import at, fragment, relation
from tidemill.base.clock import SystemClock
from tidemill.base.lsn import ChangePosition
from tidemill.capture.changes import Change, Fragment
from tidemill.capture.delivery.collector import Collector
from tidemill.capture.delivery.consumers import FlushNotices
from tidemill.capture.delivery.flush_alignment import FlushAlignment
from tidemill.capture.delivery.flush_tracker import FlushTracker
from tidemill.capture.postgres.standby_status import Keepalive, ReplicationStatus

T = TypeVar("T")
TABLES = 3


def at_once(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never waits."""
    try:
        work.send(None)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
    raise AssertionError("it waits")


class Consumer:
    """An in-memory consumer in front of `durable`, which survives the process."""

    def __init__(self, durable: list[ChangePosition], since: int, logic: FlushAlignment) -> None:
        self.logic = logic
        self.durable = durable
        self.buffered: list[ChangePosition] = []
        self.since = since
        """First LSN of the transactions that it is sent."""
        self.sent = at(-1)


class Sink:
    """All consumers of one process. A `silent` sink removes consumers without a notice."""

    def __init__(self, *, silent: bool) -> None:
        self.consumers: dict[str, Consumer] = {}
        self.silent = silent
        self._part: set[str] = set()
        self._left: dict[str, ChangePosition] = {}
        """Consumers that left with a part of the open transaction."""

    def remove(self, name: str, notices: FlushNotices) -> None:
        consumer = self.consumers.pop(name)
        if self.silent:
            return
        if name in self._part:
            self._left[name] = consumer.sent
        elif consumer.sent > at(-1):
            notices.report_flushed(name, consumer.sent)

    async def deliver(self, fragment: Fragment, notices: FlushNotices) -> list[str]:
        if fragment.begins:
            self._part = set()
        touched = []
        for name, consumer in self.consumers.items():
            if fragment.commit_lsn < consumer.since:
                continue
            own = [c.position for c in fragment.changes if c.relation.table == f"t{int(name[1:]) % TABLES}"]
            if own:
                self._part.add(name)
                touched.append(name)
            held = [*consumer.durable, *consumer.buffered]
            consumer.buffered += [position for position in own if not held or position > held[-1]]
            if name not in self._part:
                continue
            if fragment.commits:
                consumer.sent = fragment.last
            notice = consumer.logic.record_fragment(own[-1] if own else None, fragment.last, commits=fragment.commits)
            if notice is not None:
                notices.report_flushed(name, notice)
            if own and not consumer.buffered:  # a replay of durable changes
                self.report(name, consumer.durable[-1], notices)
        if fragment.commits:
            left, self._left = self._left, {}
            for name in left:
                notices.report_flushed(name, fragment.last)
            self._part = set()
        return touched

    def report(self, name: str, position: ChangePosition, notices: FlushNotices) -> None:
        notice = self.consumers[name].logic.record_flush(position)
        if notice is not None:
            notices.report_flushed(name, notice)

    async def aclose(self) -> None:
        return None


class Capture(RuleBasedStateMachine):
    alignment: type[FlushAlignment] = FlushAlignment
    tracker: type[FlushTracker] = FlushTracker
    reports: type[ReplicationStatus] = ReplicationStatus
    silent = False

    def __init__(self) -> None:
        super().__init__()
        self.tables = [relation(f"t{number}", number + 1) for number in range(TABLES)]
        self.log: list[list[Fragment]] = []
        """Committed transactions, in fragments."""
        self.open: list[Fragment] = []
        self.lsn = self.ordinal = 0
        self.disks: dict[str, list[ChangePosition]] = {"c0": [], "c1": []}
        self.since = {"c0": 0, "c1": 0}
        self.names = 2
        self.confirmed = 0
        self.start()

    def start(self) -> None:
        """Start a process at the confirmed position; the server replays the later transactions."""
        self.sink = Sink(silent=self.silent)
        for name, disk in self.disks.items():
            self.sink.consumers[name] = Consumer(disk, self.since[name], self.alignment())
        self.status = self.reports(self.confirmed)
        self.collector = Collector([self.sink], self.status, SystemClock())
        self.collector.tracker = self.tracker()
        for fragments in self.log:
            if fragments[0].commit_lsn > self.confirmed:
                self.put(*fragments)
        self.put(*self.open)

    def put(self, *fragments: Fragment) -> None:
        for each in fragments:
            at_once(self.collector.put(each))

    # actions --------------------------------------------------------------------------------------
    @rule(changes=st.lists(st.integers(0, TABLES - 1), min_size=1, max_size=4), commits=st.booleans())
    def write(self, changes: list[int], commits: bool) -> None:
        if not self.open:
            self.lsn, self.ordinal = self.lsn + 2, 0
        made = []
        for table in changes:
            row = {"id": str(self.ordinal), "v": "x"}
            made.append(Change(self.tables[table], "insert", at(self.lsn, self.ordinal), row))
            self.ordinal += 2
        each = fragment(self.lsn, *made, begins=not self.open, commits=commits)
        self.open.append(each)
        self.put(each)
        if commits:
            self.log.append(self.open)
            self.open = []

    @rule()
    def handle_all(self) -> None:
        while self.collector._queue:
            self.handle()

    @rule()
    def handle(self) -> None:
        if self.collector._queue:
            at_once(self.collector._process_item(self.collector._queue.popleft()))

    @rule(which=st.integers(0, 10), part=st.integers(1, 5), further=st.booleans())
    def flush(self, which: int, part: int, further: bool) -> None:
        """Make some of a storage's buffer durable. With an empty buffer it may report a little beyond its
        last change.
        """
        waiting = sorted(name for name, consumer in self.sink.consumers.items() if consumer.buffered)
        if not waiting:
            return
        name = waiting[which % len(waiting)]
        consumer = self.sink.consumers[name]
        consumer.durable += consumer.buffered[:part]
        del consumer.buffered[:part]
        reported = consumer.durable[-1]
        if further and not consumer.buffered and name not in self.sink._part:
            reported = at(reported.commit_lsn, reported.ordinal + 1)
        self.sink.report(name, reported, self.collector)

    @rule(inside=st.booleans())
    def keepalive(self, inside: bool) -> None:
        wal_end = self.lsn + 1 if not self.open else self.lsn
        self.collector.put_keepalive(Keepalive(wal_end, False), inside_txn=bool(self.open))

    @rule()
    def add(self) -> None:
        """Add a consumer that sees transactions from now on, also after a crash."""
        name = f"c{self.names}"
        self.names += 1
        self.disks[name], self.since[name] = [], self.lsn + 1
        self.sink.consumers[name] = Consumer(self.disks[name], self.lsn + 1, self.alignment())

    @precondition(lambda self: len(self.disks) > 1)
    @rule(which=st.integers(0, 10))
    def remove(self, which: int) -> None:
        name = sorted(self.disks)[which % len(self.disks)]
        del self.disks[name]
        self.sink.remove(name, self.collector)

    @rule()
    def tell(self) -> None:
        self.confirmed = max(self.confirmed, self.status.reported_flush)

    @rule()
    def crash(self) -> None:
        self.start()

    # invariants ------------------------------------------------------------------------------------
    def due(self, name: str, up_to: int) -> list[ChangePosition]:
        table = f"t{int(name[1:]) % TABLES}"
        return [
            change.position
            for fragments in self.log
            if self.since[name] <= fragments[0].commit_lsn <= up_to
            for each in fragments
            for change in each.changes
            if change.relation.table == table
        ]

    @invariant()
    def nothing_is_confirmed_early(self) -> None:
        self.collector.tracker.check_invariants()
        for name, disk in self.disks.items():
            due = self.due(name, self.status.reported_flush)
            assert disk[: len(due)] == due, f"confirmed {self.status.reported_flush} while {name} holds {disk} of {due}"
        assert not self.open or self.status.reported_flush < self.lsn, "confirmed inside a transaction"

    def teardown(self) -> None:
        """Commit and flush everything and handle every notice: then nothing is pending."""
        if self.open:
            self.write([0], True)
        for _ in range(3):
            while self.collector._queue:
                self.handle()
            while any(consumer.buffered for consumer in self.sink.consumers.values()):
                self.flush(0, 5, True)
        while self.collector._queue:
            self.handle()
        self.nothing_is_confirmed_early()
        assert not self.collector.tracker.pending_positions, (
            f"pending for ever: {self.collector.tracker.pending_positions}"
        )
        assert self.status.reported_flush >= self.lsn, f"confirmed {self.status.reported_flush} of {self.lsn}"
        for name, disk in self.disks.items():
            assert disk == self.due(name, self.lsn), f"{name} misses or repeats changes"


def play(faults: dict[str, Any], examples: int) -> None:
    async def main() -> None:  # the collector's events belong to a loop
        kind = type("Planted", (Capture,), faults)
        run_state_machine_as_test(
            kind,
            settings=settings(
                max_examples=examples,
                stateful_step_count=40,
                deadline=None,
                database=None,
                phases=(Phase.generate,),
                suppress_health_check=list(HealthCheck),
                print_blob=False,
            ),
        )

    asyncio.run(main())


def test_over_all_interleavings_nothing_is_confirmed_early_and_nothing_stays_pending() -> None:
    play({}, 150)


@pytest.mark.parametrize(
    "fault",
    [{"alignment": RawNotices}, {"tracker": EqualityTracker}, {"reports": StaleStatus}, {"silent": True}],
    ids=["raw-notice", "equality", "no-recompute", "goes-without-a-word"],
)
def test_the_property_finds_planted_faults(fault: dict[str, Any]) -> None:
    with pytest.raises((AssertionError, BaseExceptionGroup)):
        play(fault, 1000)
