from __future__ import annotations

import asyncio

import pytest

from support.topics.world import World, batch, fetch, read_all, values_of
from support.waiting import until
from tidemill.base.errors import TidemillError
from tidemill.metastore.catalogue import TopicRow
from tidemill.topics.api import OffsetOutOfRangeError
from tidemill.topics.config.configs import TopicConfig
from tidemill.topics.lifecycle.retention import retained_start
from tidemill.topics.local_topics import LocalTopics
from tidemill.topics.partition.recovery import catch_up, partition_log
from tidemill.topics.partition.state_machine.apply import apply
from tidemill.topics.partition.state_machine.codec import decode_state, encode_state
from tidemill.topics.partition.state_machine.commands import Advance, PlaceBatches, Placeholder
from tidemill.topics.partition.state_machine.state import PartitionState

DAY_MS = 86_400_000


def placed(*batches: tuple[int, int, int, str]) -> PartitionState:
    """Return a state with one command per batch: (records, bytes, newest time, object)."""
    state = PartitionState()
    for count, size, time, key in batches:
        holder = Placeholder(0, 0, size, state.high_watermark, count, -1, -1, -1, time)
        assert apply(state, PlaceBatches(0, (key,), (holder,)), state.applied, 1) is None
    return state


def columns(state: PartitionState) -> object:
    return (
        state.log_start, state.high_watermark, state.terms, state.object_keys, list(state.bases), list(state.objects),
        list(state.sizes), list(state.max_timestamps), list(state.highest_timestamps), state.settled,
    )  # fmt: skip


def test_by_time_whole_batches_go_oldest_first_and_a_younger_one_holds_back_what_is_behind_it() -> None:
    state = placed((2, 10, 100, "a"), (3, 10, 300, "b"), (1, 10, 50, "c"), (4, 10, 400, "d"))
    for now_ms, start in ((199, 0), (200, 0), (201, 2), (400, 2), (401, 6), (501, 10)):
        assert retained_start(state, TopicConfig(retention_ms=100), now_ms) == start, now_ms
    assert retained_start(state, TopicConfig(), 10**15) == 0


def test_records_without_a_time_are_as_old_as_the_newest_append() -> None:
    state = placed((1, 10, -1, "a"), (1, 10, -1, "b"))
    state.last_at_ms = 1_000
    config = TopicConfig(retention_ms=100)
    for now_ms, start in ((1_000, 0), (1_100, 0), (1_101, 2)):
        assert retained_start(state, config, now_ms) == start, now_ms
    followed = placed((1, 10, -1, "a"), (1, 10, 500, "b"), (1, 10, 990, "c"))
    followed.last_at_ms = 1_000
    for now_ms, start in ((600, 0), (601, 2), (1_090, 2), (1_091, 3)):
        assert retained_start(followed, config, now_ms) == start, now_ms


def test_by_size_what_is_left_never_falls_below_the_limit() -> None:
    state = placed((1, 10, 0, "a"), (1, 20, 0, "b"), (1, 30, 0, "c"))
    for limit, start in ((60, 0), (51, 0), (50, 1), (31, 1), (30, 2), (1, 2), (0, 3)):
        assert retained_start(state, TopicConfig(retention_bytes=limit), 0) == start, limit


def test_the_log_start_never_goes_back_and_never_passes_the_end() -> None:
    state = placed((2, 10, 1, "a"), (2, 10, 2, "a"), (2, 10, 3, "b"))
    assert apply(state, Advance(0, 4, "w", 2), 3, 1) is None
    assert (state.log_start, state.object_keys, list(state.bases)) == (4, ["b"], [4])
    assert apply(state, Advance(0, 2, "w", 3), 4, 1) is None
    assert state.log_start == 4
    before = columns(state)
    assert apply(state, Advance(0, 7, "w", 9), 5, 1) is not None
    assert columns(state) == before
    assert apply(state, Advance(0, 6, "w", 3), 6, 1) is None
    assert len(state) == 0 and state.object_keys == [] and state.batch_index(6) == 0


def test_leader_epochs_that_nothing_left_was_written_in_are_forgotten() -> None:
    state = placed((1, 1, 1, "a"))
    for term in range(2, 40):
        holder = Placeholder(0, 0, 1, state.high_watermark, 1, -1, -1, -1, term)
        assert apply(state, PlaceBatches(0, (f"o{term}",), (holder,)), state.applied, term) is None
        assert apply(state, Advance(0, state.high_watermark, "w", term), state.applied, term) is None
    assert state.terms == [(39, 38)]


def test_a_state_after_retention_is_the_same_from_its_rollup() -> None:
    state = placed(*((1 + i % 3, 10 + i, 1000 - i, f"o{i // 4}") for i in range(40)))
    apply(state, Advance(5, 33, "n-1", 7), state.applied, 1)
    again = decode_state(encode_state(state), "k")
    assert columns(again) == columns(state)


def test_an_own_object_is_covered_by_number_and_anothers_by_position() -> None:
    state = placed((1, 1, 1, "a"))
    apply(state, Advance(0, 0, "w", 5), 1, 1)
    assert state.settled.is_settled("w", 4, 99) and not state.settled.is_settled("w", 5, 0)
    assert state.settled.is_settled("other", 99, 1) and not state.settled.is_settled("other", 0, 2)


async def _topic(world: World, **config: str) -> tuple[LocalTopics, TopicRow]:
    row = await world.catalogue.create_topic("t", 1, config=config)
    node = world.node(retention_check_s=0.01, rollup_records=8)
    await node.start()
    return node, row


async def test_the_leader_moves_the_start_and_clients_below_it_are_told() -> None:
    world = World()
    now_ms = world.clock.now_ms()
    node, row = await _topic(world, **{"retention.ms": str(DAY_MS)})
    for at_ms, value in ((now_ms - 2 * DAY_MS, "old"), (now_ms - 2 * DAY_MS, "older"), (now_ms, "new")):
        await node.produce_nowait(row.topic_id, 0, batch(value, timestamp_ms=at_ms))
    led = node._led[row.topic_id, 0]
    await until(lambda: led.state.log_start == 2)
    assert (await node.offsets(row.topic_id, 0)).log_start_offset == 2
    found = await fetch(node, row.topic_id, 0, 1)
    assert isinstance(found.error, OffsetOutOfRangeError) and found.log_start_offset == 2
    assert values_of((await fetch(node, row.topic_id, 0, 2)).batches) == [(2, "new")]
    assert await read_all(world, row.topic_id) == [(2, "new")]
    await world.aclose()


async def test_an_unopened_partition_is_trimmed_by_its_leader_and_left_unfenced_while_nothing_is_due() -> None:
    world = World()
    now_ms = world.clock.now_ms()
    node, row = await _topic(world, **{"retention.ms": str(DAY_MS)})
    await node.produce_nowait(row.topic_id, 0, batch("a", timestamp_ms=now_ms - DAY_MS + 3_000))
    await node.aclose()
    term = (await world.consensus.log_head(partition_log(row.topic_id, 0))).term
    again = world.node(retention_check_s=0.01)
    await again.start()
    await asyncio.sleep(0.2)  # twenty rounds in which nothing is due
    assert (await world.consensus.log_head(partition_log(row.topic_id, 0))).term == term
    async with asyncio.timeout(40):
        while await read_all(world, row.topic_id):
            await asyncio.sleep(0.05)
    state, _ = await catch_up(world.consensus, world.objects, partition_log(row.topic_id, 0), PartitionState())
    assert state.log_start == 1
    await world.aclose()


async def test_a_hold_keeps_what_was_not_read_and_one_that_cannot_be_told_keeps_everything() -> None:
    world = World()
    node, row = await _topic(world, **{"retention.bytes": "0"})
    answers: list[dict[int, int] | TidemillError | None] = [TidemillError("cannot be told."), None, {0: 2}]
    asked = 0

    async def holds(topic: TopicRow) -> dict[int, int] | None:
        nonlocal asked
        asked += 1
        answer = answers[min(asked, len(answers)) - 1]
        if isinstance(answer, TidemillError):
            raise answer
        return answer

    node.retainer.holds = holds
    for value in ("a", "b", "c"):
        await node.produce_nowait(row.topic_id, 0, batch(value))
    led = node._led[row.topic_id, 0]
    await until(lambda: asked >= 8)
    assert led.state.log_start == 2
    assert await read_all(world, row.topic_id) == [(2, "c")]
    await world.aclose()


async def test_the_topic_of_a_captured_table_is_never_trimmed() -> None:
    world = World()
    row = await world.catalogue.create_topic("t", 1, kind="capture", config={"retention.bytes": "0"})
    node = world.node(retention_check_s=0.001)
    await node.start()
    await node.produce_nowait(row.topic_id, 0, batch("a"))
    await asyncio.sleep(0.1)
    assert await read_all(world, row.topic_id) == [(0, "a")]
    await world.aclose()


@pytest.mark.parametrize("records", [40])
async def test_the_log_in_consensus_stays_short_under_retention(records: int) -> None:
    world = World()
    node, row = await _topic(world, **{"retention.bytes": "0"})
    for i in range(records):
        await node.produce_nowait(row.topic_id, 0, batch(f"r{i}"))
    head = await world.consensus.log_head(partition_log(row.topic_id, 0))
    assert head.next - head.start <= 20
    await world.aclose()
