"""Random schedules: several writers on one shard equal one sequential reader at every time.

A writer may lag, lose a race, lose an acknowledgement, or crash and rehydrate; batches begin and end anywhere.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.scenarios.shard_upserts import RestashingOperator
from support.spark.upsert_world import SCHEMA, ModelShard, Set, Writer, commands, oracle
from tidemill.spark.merge.commands import Truncate
from tidemill.spark.merge.mirror import Mirror
from tidemill.spark.merge.operator import UpsertOperator

TIMES = 12


@st.composite
def topics(draw: st.DrawFn) -> tuple[list[Set], list[Truncate]]:
    """A topic of one partition: offsets grow, and times never fall, as bindings make it."""
    sets: list[Set] = []
    truncates: list[Truncate] = []
    time = 0
    for order in range(draw(st.integers(0, 40))):
        time = min(time + draw(st.sampled_from([0, 0, 0, 1, 2])), TIMES - 1)
        if draw(st.integers(0, 19)) == 0:
            truncates.append(Truncate(time, 0, order))
            continue
        value = draw(st.one_of(st.none(), st.integers(0, 3)))
        sets.append((draw(st.integers(0, 4)), value, time, order))
    return sets, truncates


ACTIONS = st.lists(
    st.tuples(
        st.integers(0, 2), st.sampled_from(["step", "step", "step", "lost ack", "crash", "late"]), st.integers(1, 5)
    ),
    max_size=40,
)


class Racer:
    """A writer whose pending result may be computed now and tried later."""

    def __init__(
        self, shard: ModelShard, sets: list[Set], truncates: list[Truncate], operator_type: type[UpsertOperator]
    ) -> None:
        self.sets, self.truncates, self.operator_type = sets, truncates, operator_type
        self.writer = Writer(shard, operator_type=operator_type)
        self.ingested = 0

    def read_to(self, frontier: int) -> None:
        frontier = max(frontier, self.ingested)
        rows = [s for s in self.sets if self.ingested <= s[2] < frontier]
        cuts = [t for t in self.truncates if self.ingested <= t.time_ms < frontier]
        self.writer.operator.ingest(commands(rows, cuts))
        self.writer.operator.advance(frontier)
        self.ingested = frontier

    def crash(self) -> None:
        """Restart from the shard alone: at its upper, with a rehydrated mirror."""
        shard = self.writer.shard
        writer = Writer(shard, operator_type=self.operator_type)
        writer.sync()
        writer.operator = self.operator_type(SCHEMA, writer.operator.mirror)
        rows = writer.operator.mirror.live_rows()
        writer.operator = self.operator_type(SCHEMA, Mirror.hydrate(SCHEMA, rows, shard.upper))
        self.writer = writer
        self.ingested = shard.upper


def run(
    topic: tuple[list[Set], list[Truncate]], actions: list[tuple[int, str, int]], operator_type: type[UpsertOperator]
) -> ModelShard:
    sets, truncates = topic
    shard = ModelShard()
    racers = [Racer(shard, sets, truncates, operator_type) for _ in range(3)]
    held: dict[int, object] = {}
    for number, action, span in actions:
        racer = racers[number]
        if action == "crash":
            racer.crash()
            held.pop(number, None)
            continue
        racer.read_to(min(TIMES, racer.writer.operator.source_frontier + span))
        if action == "late":
            held[number] = racer.writer.operator.drain()
            continue
        pending = held.pop(number, None)
        if pending is None:
            racer.writer.sync()
            pending = racer.writer.operator.drain()
        if action == "lost ack" and pending.upper > pending.lower:  # type: ignore[attr-defined]
            shard.append(pending.lower, pending.upper, pending.updates)  # type: ignore[attr-defined]
            continue  # the writer never hears of it, and finds its own rows as a peer's
        if not racer.writer.commit(pending):  # type: ignore[arg-type]
            racer.writer.sync()
    for racer in racers:
        racer.writer.sync()
        racer.read_to(TIMES)
        racer.writer.sync()
        pending = racer.writer.operator.drain()
        racer.writer.commit(pending)
    return shard


@settings(max_examples=150, deadline=None)
@given(topic=topics(), actions=ACTIONS)
def test_three_writers_equal_one_reader_at_every_time(
    topic: tuple[list[Set], list[Truncate]], actions: list[tuple[int, str, int]]
) -> None:
    shard = run(topic, actions, UpsertOperator)
    assert shard.upper == TIMES, "no schedule pins the upper"
    for time in range(TIMES):
        assert shard.contents(time) == oracle(topic[0], time, topic[1])


def test_the_planted_fault_is_found_by_such_schedules() -> None:
    """The suite can fail: an operator with the planted fault freezes a lagging writer, although contents stay
    correct."""
    sets: list[Set] = [(0, 1, 5, 1), (1, 2, 7, 2), (2, 3, 10, 3)]
    shard = ModelShard()
    lagging, peer = (Racer(shard, sets, [], RestashingOperator) for _ in range(2))
    lagging.read_to(8)
    peer.read_to(10)
    assert peer.writer.commit(peer.writer.operator.drain())
    lagging.writer.sync()
    lagging.read_to(TIMES)
    pending = lagging.writer.operator.drain()
    assert pending.upper == 5 < shard.upper
    with pytest.raises(AssertionError):
        assert lagging.writer.commit(pending)


@settings(max_examples=60, deadline=None)
@given(topic=topics(), cuts=st.lists(st.integers(1, TIMES - 1), max_size=5))
def test_contents_do_not_depend_on_batch_boundaries(topic: tuple[list[Set], list[Truncate]], cuts: list[int]) -> None:
    sets, truncates = topic
    shard = ModelShard()
    writer = Writer(shard)
    lower = 0
    for upper in [*sorted(set(cuts)), TIMES]:
        rows = [s for s in sets if lower <= s[2] < upper]
        writer.step(rows, upper, [t for t in truncates if lower <= t.time_ms < upper])
        lower = upper
    for time in range(TIMES):
        assert shard.contents(time) == oracle(sets, time, truncates)
    live = {r["k"]: r["v"] for r in writer.operator.mirror.live_rows().to_pylist()}
    assert live == oracle(sets, TIMES, truncates)
