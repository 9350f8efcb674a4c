"""The flush property over all interleavings: nothing is confirmed early, and nothing stays pending permanently.

Model: fragment-mode consumers of one stream, each with a storage that flushes at any time (also in the middle of a
transaction), one queue that carries their notices to the tracker, consumers that join. Oracle: the contents of each
consumer's storage.

Planted faults (raw notices before the commit; == instead of ≥; no recompute after the commit) must be found by the same
property.
"""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import pytest
from hypothesis import HealthCheck, find, given, settings
from hypothesis import strategies as st

from sim.scenarios.capture_plants import EqualityTracker, RawNotices, StaleStatus
from support.capture.fragments import at, fragment
from tidemill.base.lsn import ChangePosition
from tidemill.capture.delivery.flush_alignment import FlushAlignment
from tidemill.capture.delivery.flush_tracker import FlushTracker
from tidemill.capture.postgres.standby_status import ReplicationStatus


class Violation(AssertionError):
    pass


class Consumer:
    def __init__(self, alignment: type[FlushAlignment]) -> None:
        self.logic = alignment()
        self.buffered: list[ChangePosition] = []
        self.durable = at(-1)
        self.owed: deque[tuple[int, ChangePosition]] = deque()
        """(commit LSN, last own change) of committed transactions that storage does not hold yet."""
        self.open_change: ChangePosition | None = None

    def undurable_commit(self) -> int | None:
        while self.owed and self.owed[0][1] <= self.durable:
            self.owed.popleft()
        return self.owed[0][0] if self.owed else None


class Model:
    def __init__(
        self,
        rng: random.Random,
        *,
        alignment: type[FlushAlignment] = FlushAlignment,
        tracker: type[FlushTracker] = FlushTracker,
        status: type[ReplicationStatus] = ReplicationStatus,
    ) -> None:
        self.rng = rng
        self.alignment = alignment
        self.tracker = tracker()
        self.status = status(0)
        self.consumers: dict[str, Consumer] = {f"c{i}": Consumer(alignment) for i in range(3)}
        self.queue: deque[tuple[str, ChangePosition]] = deque()
        self.lsn = 0
        self.ordinal = 0
        self.open = False
        self.touched: set[str] = set()
        self.names = 3

    # steps ----------------------------------------------------------------------------------------
    def fragment(self, commits: bool) -> None:
        if not self.open:
            self.lsn += self.rng.randint(1, 4)
            self.ordinal, self.open, self.touched = 0, True, set()
        writers = {name: self.rng.random() < 0.4 for name in self.consumers}
        written: dict[str, ChangePosition] = {}
        for _ in range(self.rng.randint(1, 4)):
            position = at(self.lsn, self.ordinal)
            self.ordinal += 2
            candidates = [name for name, writes in writers.items() if writes]
            if candidates and self.rng.random() < 0.6:
                name = self.rng.choice(candidates)
                written[name] = position
                self.consumers[name].buffered.append(position)
        last = at(self.lsn, self.ordinal - 2)
        for name, consumer in self.consumers.items():
            if name in written:
                self.touched.add(name)
                consumer.open_change = written[name]
            if name in self.touched:
                self.cast(name, consumer.logic.record_fragment(written.get(name), last, commits=commits))
        if commits:
            for name in self.touched & set(self.consumers):
                consumer = self.consumers[name]
                assert consumer.open_change is not None
                consumer.owed.append((self.lsn, consumer.open_change))
                consumer.open_change = None
            self.confirm(self.tracker.commit(fragment(self.lsn, last=last), self.touched & set(self.consumers), 0))
            self.status.record_commit(self.lsn)
            self.open = False
            self.check()

    def flush(self, name: str) -> None:
        """Make a prefix of a consumer's buffer durable and report it."""
        consumer = self.consumers[name]
        if not consumer.buffered:
            return
        count = self.rng.randint(1, len(consumer.buffered))
        consumer.durable = consumer.buffered[count - 1]
        del consumer.buffered[:count]
        reported = consumer.durable
        if not consumer.buffered and consumer.open_change is None and self.rng.random() < 0.3:
            # The consumer has no later change: its storage may report a little beyond its last record.
            reported = at(reported.commit_lsn, reported.ordinal + 1)
        self.cast(name, consumer.logic.record_flush(reported))

    def handle(self) -> None:
        if self.queue:
            name, position = self.queue.popleft()
            self.confirm(self.tracker.record_flush(name, position, 0))
        self.check()

    def add(self) -> None:
        if not self.open:
            self.consumers[f"c{self.names}"] = Consumer(self.alignment)
            self.names += 1

    def keepalive(self) -> None:
        self.status.record_keepalive(self.lsn + 1, inside_txn=self.open)
        self.check()

    # plumbing -------------------------------------------------------------------------------------
    def cast(self, name: str, position: ChangePosition | None) -> None:
        if position is not None:
            self.queue.append((name, position))

    def confirm(self, lsn: int | None) -> None:
        if lsn is not None:
            self.status.record_flush_notice(lsn)
        self.tracker.check_invariants()

    def check(self) -> None:
        """P1: nothing is confirmed that a consumer does not hold."""
        for name, consumer in self.consumers.items():
            owed = consumer.undurable_commit()
            if owed is not None and self.status.flushed >= owed:
                raise Violation(f"confirmed {self.status.flushed} while {name} lacks commit {owed}")
        if self.open and self.status.flushed >= self.lsn:
            raise Violation(f"confirmed {self.status.flushed} inside transaction {self.lsn}")

    def drain(self) -> None:
        """Everything commits, everything flushes, every notice is handled: then nothing may be pending."""
        if self.open:
            self.fragment(commits=True)
        for name, consumer in list(self.consumers.items()):
            while consumer.buffered:
                self.flush(name)
        while self.queue:
            self.handle()
        if self.tracker.pending_positions:
            raise Violation(f"pending for ever: {self.tracker.pending_positions}")
        if any(not consumer.logic.is_idle for consumer in self.consumers.values()):
            raise Violation("a consumer is not idle")
        if self.status.flushed < self.lsn:
            raise Violation(f"confirmed {self.status.flushed} of {self.lsn}")


STEPS = ("fragment", "fragment", "commit", "flush", "flush", "handle", "handle", "add", "keepalive")


def play(script: list[int], seed: int, **faults: Any) -> None:
    model = Model(random.Random(seed), **faults)
    for number in script:
        match STEPS[number]:
            case "fragment":
                model.fragment(commits=False)
            case "commit":
                model.fragment(commits=True)
            case "flush":
                model.flush(model.rng.choice(sorted(model.consumers)))
            case "handle":
                model.handle()
            case "add":
                model.add()
            case "keepalive":
                model.keepalive()
    model.drain()


SCRIPTS = st.lists(st.integers(0, len(STEPS) - 1), max_size=60)
SEEDS = st.integers(0, 2**32)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(SCRIPTS, SEEDS)
def test_nothing_is_confirmed_early_and_nothing_stays_pending(script: list[int], seed: int) -> None:
    play(script, seed)


def violates(**faults: Any):  # type: ignore[no-untyped-def]
    def check(example: tuple[list[int], int]) -> bool:
        try:
            play(*example, **faults)
        except AssertionError:  # the oracle, or the tracker's own invariants
            return True
        return False

    return check


@pytest.mark.parametrize(
    "fault",
    [{"alignment": RawNotices}, {"tracker": EqualityTracker}, {"status": StaleStatus}],
    ids=["raw-notice", "equality", "no-recompute"],
)
def test_the_property_finds_planted_faults(fault: dict[str, Any]) -> None:
    script, seed = find(
        st.tuples(SCRIPTS, SEEDS), violates(**fault), settings=settings(max_examples=5000, deadline=None)
    )
    assert script is not None and seed >= 0
