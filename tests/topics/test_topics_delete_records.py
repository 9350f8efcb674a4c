"""DeleteRecords: the start of the log moves immediately and durably, but never past records that a reader still
needs."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from support.topics.l1_world import L1World
from support.topics.world import World, batch, fetch, values_of
from support.waiting import until
from tidemill.base.errors import UnavailableError
from tidemill.metastore.catalogue import TopicRow
from tidemill.topics.api import NotLeaderError, OffsetOutOfRangeError, RecordsStillNeededError
from tidemill.topics.batch import Record, encode_batch
from tidemill.topics.local_topics import LocalTopics


async def filled(world: World, count: int = 5) -> tuple[LocalTopics, TopicRow]:
    row = await world.topic(partitions=1)
    node = world.node()
    for n in range(count):
        await node.produce_nowait(row.topic_id, 0, batch(f"v{n}", timestamp_ms=1000 * n))
    return node, row


async def test_the_start_moves_for_readers_at_once_and_for_whoever_leads_next() -> None:
    world = World()
    node, row = await filled(world)
    assert await node.delete_records(row.topic_id, 0, 2) == 2
    found = await fetch(node, row.topic_id, 0, 1)
    assert isinstance(found.error, OffsetOutOfRangeError)
    assert found.log_start_offset == 2
    assert await node.delete_records(row.topic_id, 0, 1) == 2, "never back"
    successor = world.node()
    assert values_of((await fetch(successor, row.topic_id, 0, 2)).batches)[0] == (2, "v2")
    assert await successor.delete_records(row.topic_id, 0, -1) == 5
    assert (await successor.offsets(row.topic_id, 0)).log_start_offset == 5
    await successor.produce_nowait(row.topic_id, 0, batch("next"))
    assert values_of((await fetch(successor, row.topic_id, 0, 5)).batches) == [(5, "next")]
    await world.aclose()


async def test_an_offset_beyond_the_log_is_refused_and_changes_nothing() -> None:
    world = World()
    node, row = await filled(world)
    for offset in (6, -2, 2**62):
        with pytest.raises(OffsetOutOfRangeError):
            await node.delete_records(row.topic_id, 0, offset)
    assert await node.delete_records(row.topic_id, 0, 0) == 0
    await world.aclose()


async def test_what_somebody_has_yet_to_read_stays() -> None:
    world = World()
    node, row = await filled(world)
    held: Mapping[int, int] | None = {0: 3}

    async def holds(topic: TopicRow) -> Mapping[int, int] | None:
        if held == {}:
            raise UnavailableError("cannot be told")
        return held

    node.retainer.holds = holds
    with pytest.raises(RecordsStillNeededError, match="read_to=3"):
        await node.delete_records(row.topic_id, 0, -1)
    assert await node.delete_records(row.topic_id, 0, 3) == 3
    held = None
    with pytest.raises(RecordsStillNeededError, match="read_to=0"):
        await node.delete_records(row.topic_id, 0, 4)
    held = {}
    with pytest.raises(UnavailableError):
        await node.delete_records(row.topic_id, 0, 4)
    assert (await node.offsets(row.topic_id, 0)).log_start_offset == 3
    captured = await world.catalogue.create_topic("captured", 1, kind="capture")
    await node.produce_nowait(captured.topic_id, 0, batch("a"))
    with pytest.raises(RecordsStillNeededError, match="captured"):
        await node.delete_records(captured.topic_id, 0, -1)
    await world.aclose()


async def test_a_reader_that_waits_hears_of_it_and_a_deleter_hears_that_its_leader_is_gone() -> None:
    world = World()
    node, row = await filled(world)
    waiting = asyncio.create_task(fetch(node, row.topic_id, 0, 5, wait_s=30.0))
    await until(lambda: len(node._led[row.topic_id, 0].watchers) > 0)
    assert await node.delete_records(row.topic_id, 0, -1) == 5
    await node.produce_nowait(row.topic_id, 0, batch("x"))
    assert values_of((await waiting).batches) == [(5, "x")]

    async def never(*_: object) -> object:
        await asyncio.sleep(3600)
        raise AssertionError

    world.consensus.on_append = never  # type: ignore[assignment]
    deleting = asyncio.create_task(node.delete_records(row.topic_id, 0, -1))
    await until(lambda: node._led[row.topic_id, 0]._committing)
    node._led[row.topic_id, 0].close(NotLeaderError("moved."))
    with pytest.raises(NotLeaderError):
        await deleting
    world.consensus.on_append = None
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        if "commit" in task.get_name():
            task.cancel()
    await world.aclose()


@pytest.mark.parametrize("moved", [False, True], ids=["hot", "in L1"])
async def test_a_time_is_answered_from_where_the_log_starts_within_a_batch(moved: bool) -> None:
    """The batch's greatest time may be that of a record below the start; then a later batch answers."""
    async with L1World() as world:
        row = await world.topic(partitions=1)
        node = world.node()
        for times in ([9000, 1000, 2000], [2500], [9500]):
            records = [Record(None, b"v", timestamp_ms=at_ms) for at_ms in times]
            await node.produce_nowait(row.topic_id, 0, encode_batch(records))
        if moved:
            await world.move(node, row.topic_id)
        assert await node.delete_records(row.topic_id, 0, 1) == 1
        asked = (0, 1500, 2500, 2501, 9501)
        answers = [await node.offset_for_time(row.topic_id, 0, at_ms) for at_ms in asked]
        assert answers == [(1, 1000), (2, 2000), (3, 2500), (4, 9500), None]


async def test_the_record_with_the_greatest_time_is_found_wherever_it_is() -> None:
    world = World()
    row = await world.topic(partitions=1)
    node = world.node()
    assert await node.newest_timestamp(row.topic_id, 0) is None
    for time_ms in (5000, 9000, 7000, 9000):
        await node.produce_nowait(row.topic_id, 0, batch("a", "b", timestamp_ms=time_ms))
    assert await node.newest_timestamp(row.topic_id, 0) == (2, 9000), "the first of those that share it"
    await node.delete_records(row.topic_id, 0, 4)
    assert await node.newest_timestamp(row.topic_id, 0) == (6, 9000)
    await node.delete_records(row.topic_id, 0, -1)
    assert await node.newest_timestamp(row.topic_id, 0) is None
    await world.aclose()
