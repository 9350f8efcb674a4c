"""A stateful model: handles append, hold, compact, collect, sweep, roll up and reopen, against a plain list.

Oracle: for every handle, contents at every readable time always equal the sequential multiset, and every other time is
refused. The batches that a reader chose under its hold stay available. A listener sees each update exactly once. Since
and upper never move backwards.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from support.shards.world import SCHEMA, Row, World, append, contents_of, summed, tuples
from tidemill.base.errors import ConflictError, UnavailableError
from tidemill.maintenance.scheduler import JobContext, Retention, StepBudget
from tidemill.maintenance.shards.orphans import OrphanCollector
from tidemill.maintenance.shards.upkeep import collect_garbage
from tidemill.shards import handle
from tidemill.shards.api import Batch, HistoryLostError
from tidemill.shards.compaction import compaction
from tidemill.shards.handle import LogShard
from tidemill.shards.parts.consolidate import sum_contents
from tidemill.shards.read.part_reader import PartReader
from tidemill.shards.state import state_machine
from tidemill.shards.state.state import check_invariants

HANDLES = st.integers(0, 2)


class Listener:
    def __init__(self, who: int, deltas: Any, lower: int) -> None:
        self.who, self.deltas, self.lower, self.frontier = who, deltas, lower, lower
        self.seen: list[Row] = []


class ShardModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.world = World()
        self.rows: list[Row] = []
        self.live: dict[int, str] = {}
        self.since = self.upper = 0
        self.listeners: list[Listener] = []
        self.readers: list[tuple[str, int, list[Batch]]] = []
        """Holds, their times, and the batches chosen under them."""
        self.holds = 0

    def run(self, coroutine: Any) -> Any:
        return self.loop.run_until_complete(coroutine)

    @initialize()
    def start(self) -> None:
        self.shards: list[LogShard] = [self.run(self.world.open(writer=f"w{i}")) for i in range(3)]

    def changes(self, keys: dict[int, str | None], time: int) -> list[Row]:
        rows: list[Row] = []
        for key, value in keys.items():
            if key in self.live:
                rows.append((key, self.live.pop(key), time, -1))
            if value is not None:
                self.live[key] = value
                rows.append((key, value, time, 1))
        return rows

    @rule(
        who=HANDLES,
        steps=st.lists(
            st.dictionaries(st.integers(0, 4), st.none() | st.text(max_size=3), max_size=3), min_size=1, max_size=5
        ),
        whole=st.booleans(),
        compact=HANDLES,
        lost=st.sampled_from([None, None, (True, False), (False, False)]),
    )
    def appends(self, who: int, steps: list[dict[int, str | None]], whole: bool, compact: int, lost: Any) -> None:
        """Append one batch of several times, or one batch per time; the answer of the first may be lost. Merges
        follow."""
        shard = self.shards[who]
        if lost:
            shard._machine._log._consensus.script = [lost]  # type: ignore[attr-defined]
        for group in [steps] if whole else [[s] for s in steps]:
            rows = [r for offset, keys in enumerate(group) for r in self.changes(keys, self.upper + offset)]
            upper = self.upper + len(group)
            assert self.run(append(shard, self.upper, upper, rows)) == upper
            self.upper = upper
            self.rows += rows
        for _ in range(compact):
            self.compacts(compact)

    @rule(who=HANDLES, behind=st.integers(1, 3))
    def a_laggard_is_refused(self, who: int, behind: int) -> None:
        lower = self.upper - behind
        if lower < 0:
            return
        try:
            self.run(append(self.shards[who], lower, self.upper + 1, [(9, "laggard", self.upper, 1)]))
        except ConflictError as error:
            assert error.current == self.upper  # noqa: PT017
        else:
            raise AssertionError("a laggard was let in")

    def compacts(self, who: int) -> None:
        self.run(compaction.compact_once(self.shards[who], self.world.objects, self.world.rand))

    @rule(who=HANDLES, ahead=st.integers(0, 5))
    def downgrades(self, who: int, ahead: int) -> None:
        since = self.run(self.shards[who].downgrade_since("model", 1, self.since + ahead))
        assert self.since <= since <= self.least_hold(since)
        self.since = since

    @rule(who=HANDLES, share=st.floats(0, 0.99))
    def a_reader_holds_and_chooses(self, who: int, share: float) -> None:
        if self.since >= self.upper or len(self.readers) > 3:
            return
        as_of = self.since + int((self.upper - self.since) * share)
        self.holds += 1
        name = f"reader-{self.holds}"
        self.run(self.shards[who].set_hold(name, as_of, 10**9))
        self.readers.append((name, as_of, self.run(self.shards[who].batches_until(as_of))))
        self.settle(self.shards[who])

    @rule(who=HANDLES, which=st.integers(0, 3), ends=st.booleans())
    def a_reader_reads_what_it_chose(self, who: int, which: int, ends: bool) -> None:
        if not self.readers:
            return
        name, as_of, chosen = self.readers[which % len(self.readers)]
        uncached = PartReader(self.world.objects, SCHEMA)
        updates = self.run(uncached.read_batches(chosen, 0, as_of + 1))
        assert contents_of(sum_contents(SCHEMA, updates)) == summed(self.rows, as_of)
        if ends:
            self.readers.pop(which % len(self.readers))
            self.run(self.shards[who].release_hold(name))
            self.settle(self.shards[who])

    @rule(who=HANDLES)
    def collects(self, who: int) -> None:
        self.run(collect_garbage(self.shards[who], self.world.objects, self.world.wall, after_ms=-1, persisted=1 << 60))

    @rule(who=HANDLES)
    def sweeps(self, who: int) -> None:
        nobody: Any = None
        context = JobContext(
            self.world.consensus(), self.world.objects, nobody, self.world.wall, self.world.rand,
            Retention(orphans_after_s=0),
        )  # fmt: skip
        self.run(OrphanCollector(context).run(StepBudget(self.world.wall, 1)))

    def settle(self, shard: LogShard) -> None:
        assert self.since <= shard.state.since <= self.least_hold(shard.state.since)
        self.since = shard.state.since

    @rule(who=HANDLES)
    def rolls_up(self, who: int) -> None:
        self.run(self.shards[who].rollup())

    @rule(who=HANDLES)
    def reopens(self, who: int) -> None:
        self.run(self.shards[who].aclose())
        self.shards[who] = self.run(self.world.open(schema=None, writer=f"w{who}-again"))
        for listener in self.listeners:
            if listener.who == who:
                # A reader of the restarted process continues at its former position.
                listener.deltas = self.shards[who].listen(listener.frontier)

    @rule(which=st.integers(0, 2), who=HANDLES)
    def a_listener_starts_or_goes_on_from_another_handle(self, which: int, who: int) -> None:
        if which >= len(self.listeners):
            lower = self.since + 1 if self.since else 0
            self.listeners.append(Listener(who, self.shards[who].listen(lower), lower))
            self.hold(len(self.listeners) - 1)
            return
        listener = self.listeners[which]
        listener.who, listener.deltas = who, self.shards[who].listen(listener.frontier)

    @rule(which=st.integers(0, 2), steps=st.integers(1, 4))
    def a_listener_advances(self, which: int, steps: int) -> None:
        if not self.listeners:
            return
        which %= len(self.listeners)
        listener = self.listeners[which]
        for _ in range(steps):
            if listener.frontier >= self.upper:
                break
            try:
                delta = self.run(anext(listener.deltas))
            except HistoryLostError:
                # It holds its time, but what it had chosen before its hold moved on may be collected: it chooses again.
                listener.deltas = self.shards[listener.who].listen(listener.frontier)
                delta = self.run(anext(listener.deltas))
            assert delta.lower == listener.frontier < delta.upper
            listener.seen += tuples(delta.rows)
            listener.frontier = delta.upper
        self.hold(which)

    def hold(self, which: int) -> None:
        """Return the time of a listener's lease: one tick behind its frontier, to distinguish frontier - 1 from
        frontier."""
        listener = self.listeners[which]
        shard = self.shards[listener.who]
        self.run(shard.set_hold(f"listener-{which}", max(0, listener.frontier - 1), 10**9))
        # Since follows the least hold, so a lease that moves on may release it.
        self.settle(shard)

    def least_hold(self, otherwise: int) -> int:
        held = [max(0, x.frontier - 1) for x in self.listeners] + [as_of for _, as_of, _ in self.readers]
        return min(held, default=otherwise)

    @invariant()
    def listeners_saw_each_update_once(self) -> None:
        for listener in self.listeners:
            expected = [r for r in self.rows if listener.lower <= r[2] < listener.frontier]
            assert sorted(listener.seen, key=repr) == sorted(expected, key=repr)

    @invariant()
    def contents_are_exact_at_every_readable_time(self) -> None:
        if not hasattr(self, "shards"):
            return
        for shard in self.shards[:2]:
            assert self.run(shard.frontiers()) == (self.since, self.upper)
            check_invariants(shard.state)
        step = max(1, (self.upper - self.since) // 6)
        for as_of in {*range(self.since, self.upper, step), self.upper - 1}:
            if self.since <= as_of < self.upper:
                assert contents_of(self.run(self.shards[0].snapshot(as_of))) == summed(self.rows, as_of)
        with pytest.raises(UnavailableError):
            self.run(self.shards[0].snapshot(self.upper, timeout_s=0))
        if self.since:
            with pytest.raises(HistoryLostError):
                self.run(self.shards[0].snapshot(self.since - 1))

    def teardown(self) -> None:
        async def end() -> None:
            for listener in self.listeners:
                await listener.deltas.aclose()
            for shard in getattr(self, "shards", []):
                await shard.aclose()

        self.run(end())
        self.loop.close()


@pytest.mark.parametrize("inline_bytes", [16 << 10, 0])
def test_shards_equal_a_sequential_multiset(monkeypatch: pytest.MonkeyPatch, inline_bytes: int) -> None:
    monkeypatch.setattr(handle, "INLINE_PART_BYTES", inline_bytes)
    monkeypatch.setattr(compaction, "INLINE_PART_BYTES", inline_bytes)
    monkeypatch.setattr(compaction, "SMALLEST_CLASS_BYTES", 4 << 10)
    monkeypatch.setattr(compaction, "FAN_IN", 3)
    monkeypatch.setattr(state_machine, "ROLLUP_AFTER_RECORDS", 9)
    run_state_machine_as_test(ShardModel, settings=settings(max_examples=25, stateful_step_count=25, deadline=None))
