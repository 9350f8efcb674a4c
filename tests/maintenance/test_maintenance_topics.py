"""Deletion of topics' objects, of replaced rollups and of logs of deleted topics, and the objects that must stay."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from support.maintenance.topics import World
from tidemill.base.errors import CorruptError, UnavailableError
from tidemill.maintenance.scheduler import StepBudget
from tidemill.metastore.catalogue import TopicRow
from tidemill.metastore.rows import PARTITIONS
from tidemill.metastore.rows.partitions import PartitionRow
from tidemill.topics.lifecycle.restore import restore_partition
from tidemill.topics.lost_objects import drop_lost_object
from tidemill.topics.partition.recovery import catch_up, partition_log
from tidemill.topics.partition.state_machine.state import PartitionState


async def test_an_object_goes_when_the_last_of_its_partitions_is_past_it_and_after_the_grace() -> None:
    world = World()
    row = await world.catalogue.create_topic("t", 2)
    node = world.node()
    await world.send(node, row, 0)  # opens both, so that the next two batches share an object
    await world.send(node, row, 1)
    await world.send(node, row, 0, 1)
    assert len(world.stored()) == 3
    await world.forget(node, row, 0)
    await world.keep()
    (of_one, shared) = sorted(world.stored())
    await world.forget(node, row, 1)
    await world.keep(50)
    assert world.stored() == {of_one, shared}
    await world.keep(150)
    assert world.stored() == set()
    await world.aclose()


@pytest.mark.parametrize("jump_ms", [86_400_000, -86_400_000])
async def test_a_wall_clock_that_is_set_neither_shortens_nor_lengthens_the_grace(jump_ms: int) -> None:
    world = World()
    row = await world.catalogue.create_topic("t", 1)
    node = world.node()
    await world.send(node, row, 0)
    await world.send(node, row, 0)
    await world.forget(node, row, 0)
    while not any(garbage.horizon for garbage in world.collector._garbage.values()):
        await world.keep(10)
    world.clock.jump(jump_ms)
    await world.keep(40)
    assert world.stored()
    await world.keep(200)
    assert not world.stored()
    await world.aclose()


async def test_an_object_whose_batches_are_on_their_way_stays_however_long_it_takes() -> None:
    world = World()
    row = await world.catalogue.create_topic("t", 1)
    node = world.node()
    await world.send(node, row, 0)
    led = node._led[row.topic_id, 0]
    turned = led.intake._enqueue_for_commit
    held: list[Any] = []
    led.intake._enqueue_for_commit = held.append  # type: ignore[method-assign]
    sending = asyncio.create_task(world.send(node, row, 0))
    while not held:
        await asyncio.sleep(0)
    # A settle request arrives meantime; the leader's answer covers only objects that it has placed.
    led.settle_if_due(0.0)
    await asyncio.sleep(0)
    for _ in range(5):
        world.clock.advance(10_000)
        await world.collector.run(StepBudget(world.clock, 1))
    assert len(world.stored()) == 2
    turned(held[0])
    await sending
    await world.keep()
    assert len(world.stored()) == 2
    await world.aclose()


async def test_what_a_dead_writer_uploaded_and_never_placed_goes_and_the_partition_is_made_to_say_so() -> None:
    world = World()
    row = await world.catalogue.create_topic("t", 1)
    node = world.node()
    await world.send(node, row, 0)
    (placed,) = world.stored()
    led = node._led[row.topic_id, 0]
    led.intake._enqueue_for_commit = lambda pending: None  # type: ignore[method-assign]
    sending = asyncio.create_task(world.send(node, row, 0))
    while len(world.stored()) < 2:
        await asyncio.sleep(0)
    sending.cancel()
    await world.keep(300)
    assert world.stored() == {placed}
    assert world.collector.facts()["settled"] == 1
    # A leader that was paused all the time is fenced when it resumes with that object.
    head = await world.consensus.log_head(partition_log(row.topic_id, 0))
    assert head.term > led._appender.term
    await world.aclose()


async def test_an_object_of_a_writer_that_goes_on_writing_goes_and_nobody_is_made_to_say_so() -> None:
    """Another node leads the partition that the writer once led, and its last entry is older than the writer's newest
    object.
    """
    world = World()
    row = await world.catalogue.create_topic("t", 2)
    node, other = world.node(), world.node()
    await world.send(node, row, 0)
    await world.send(node, row, 1)
    before = world.stored()
    await world.send(node, row, 0, 1)
    (shared,) = world.stored() - before
    await world.send(other, row, 1)
    for partition, led_by in ((0, node), (1, other)):
        await world.forget(led_by, row, partition)
    for _ in range(20):
        await world.send(node, row, 0)
        await world.forget(node, row, 0)
        await world.send(other, row, 1)
        await world.forget(other, row, 1)
        await world.keep(10)
    assert shared not in world.stored()
    assert world.collector.facts()["settled"] == 0
    await world.aclose()


async def test_what_an_idle_partition_decided_once_is_not_asked_again_while_its_leader_writes_elsewhere() -> None:
    """A retry is uploaded and never placed. The partition's next entry is written when maintenance asks for
    it, once.
    """
    world = World()
    row = await world.catalogue.create_topic("t", 2)
    node = world.node()
    await world.send(node, row, 0)
    await world.send(node, row, 1, producer_id=7, producer_epoch=0, base_sequence=0)
    await world.forget(node, row, 1)
    before = world.stored()
    await world.send(node, row, 1, producer_id=7, producer_epoch=0, base_sequence=0)
    (retried,) = world.stored() - before
    for _ in range(40):
        await world.send(node, row, 0)
        await world.forget(node, row, 0)
        await world.keep(10)
    assert retried not in world.stored()
    assert world.collector.facts()["settled"] == 1
    await world.aclose()


async def test_f725_a_partition_that_cannot_be_read_ends_the_round_and_nothing_is_deleted() -> None:
    world = World()
    row = await world.catalogue.create_topic("t", 2)
    node = world.node(rollup_records=2)
    for _ in range(4):
        await world.send(node, row, 0)
    await world.send(node, row, 1)
    await world.forget(node, row, 1)
    before = world.stored()
    rollup = max(world.stored(f"rollup/topic/{row.topic_id}/0/"))
    data = world.objects._objects[rollup]
    world.objects._objects[rollup] = (b"damaged" * 20, data[1])
    for _ in range(30):
        world.clock.advance(10_000)
        with pytest.raises(CorruptError, match="rollup"):
            await world.collector.run(StepBudget(world.clock, 1))
    assert world.stored() == before
    world.objects._objects[rollup] = data
    await world.keep(300)
    assert len(world.stored()) == len(before) - 1
    await world.aclose()


async def test_an_object_stays_while_a_row_from_which_a_restore_begins_still_names_it() -> None:
    world = World()
    row = await world.catalogue.create_topic("t", 1)
    node = world.node()
    await world.send(node, row, 0)
    await world.metastore.commit([PARTITIONS.encode(PartitionRow(row.topic_id, 0, 0, 1))])
    await world.forget(node, row, 0)
    await world.keep(400)
    assert len(world.stored()) == 1
    await world.metastore.commit([PARTITIONS.encode(PartitionRow(row.topic_id, 0, 1, 1))])
    await world.keep(200)
    assert world.stored() == set()
    await world.aclose()


async def test_an_object_goes_though_its_log_is_cut_again_before_each_row_of_it_is_written() -> None:
    world = World()
    row = await world.catalogue.create_topic("busy", 1)
    node = world.node()
    for _ in range(20):
        await world.send(node, row, 0)
    led = node._led[row.topic_id, 0]
    for start in range(1, 19):
        # The row always shows the state of the round before.
        await world.metastore.commit([PARTITIONS.encode(PartitionRow(row.topic_id, 0, start - 1, 20))])
        led.advance_log_start(start)
        while led.state.log_start < start:
            await asyncio.sleep(0)
        await world.keep(10)
        assert len(world.stored()) >= 20 - (start - 1), "what the row names stays"
    assert len(world.stored()) <= 20 - (18 - 9), "of each the row is written one round later, the grace are six"
    await world.aclose()


async def test_of_a_deleted_topic_nothing_stays_but_the_heads_of_its_logs() -> None:
    world = World()
    row = await world.catalogue.create_topic("gone", 2)
    other = await world.catalogue.create_topic("stays", 1)
    node = world.node(rollup_records=3)
    for _ in range(5):
        await world.send(node, row, 0, 1)
    await world.send(node, other, 0)
    kept = sorted(world.stored())[-1]
    await world.catalogue.delete(TopicRow, "gone")
    await node.refresh()
    await world.keep(300)
    assert world.stored() == {kept}
    assert world.stored("rollup/topic/") == set()
    for partition in (0, 1):
        head = await world.consensus.log_head(partition_log(row.topic_id, partition))
        assert head.start == head.next > 0
    await world.aclose()


async def test_the_log_of_a_deleted_topic_is_ended_though_nothing_of_it_is_in_the_bucket() -> None:
    """The topic's objects had been deleted earlier, as after a move into L1, and it was never rolled up. A node that
    took the partition over, and does not know of the deletion, appends to the log; the log is then ended again.
    """
    world = World()
    row = await world.catalogue.create_topic("gone", 1)
    node = world.node()
    log = partition_log(row.topic_id, 0)
    await world.send(node, row, 0)
    await world.forget(node, row, 0)
    await world.keep()
    assert world.stored() == world.stored("rollup/") == set()
    await world.metastore.commit([PARTITIONS.encode(PartitionRow(row.topic_id, 0, 1, 1))])
    await world.catalogue.delete(TopicRow, "gone")
    await world.rollups.run(StepBudget(world.clock, 1))
    head = await world.consensus.log_head(log)
    assert head.start < head.next, "the checkpoint has not followed yet"
    await world.metastore.commit([(PARTITIONS.key(row.topic_id, 0), b"")])
    await world.rollups.run(StepBudget(world.clock, 1))
    head = await world.consensus.log_head(log)
    assert head.start == head.next > 0
    await world.consensus.append(log, head.term, head.next, [b"late"], "nonce")
    await world.rollups.run(StepBudget(world.clock, 1))
    late = await world.consensus.log_head(log)
    assert late.start == late.next == head.next + 1
    assert world.rollups.facts()["ended_logs"] == 2
    await world.aclose()


async def test_replaced_rollups_go_and_a_log_whose_truncation_was_cut_off_is_truncated() -> None:
    world = World()
    row = await world.catalogue.create_topic("t", 1)
    node = world.node(rollup_records=4)
    log = partition_log(row.topic_id, 0)
    for _ in range(4):
        await world.send(node, row, 0)
    head = await world.truncated(log, 0)
    (standing,) = world.stored("rollup/topic/")
    folder = standing.rpartition("/")[0]
    replaced, coming = (f"{folder}/{p:020d}-{'f' * 32}" for p in (0, head.next))
    for key in (replaced, coming):
        await world.objects.put(key, b"x")
    await world.rollups.run(StepBudget(world.clock, 1))
    assert world.stored("rollup/topic/") == {standing, coming}

    async def refuse(*_: Any) -> Any:
        raise UnavailableError("not now.")

    truncate, world.consensus.truncate = world.consensus.truncate, refuse  # type: ignore[method-assign]
    for _ in range(5):
        await world.send(node, row, 0)
    world.consensus.truncate = truncate  # type: ignore[method-assign]
    while await world.newest_rollup(log) == standing:
        await asyncio.sleep(0.001)
    assert (await world.consensus.log_head(log)).start == head.start
    for _ in range(2):  # the log first, then what it no longer names
        await world.rollups.run(StepBudget(world.clock, 1))
    assert (await world.consensus.log_head(log)).start > head.start
    (left,) = world.stored("rollup/topic/") - {coming}
    assert left != standing
    await catch_up(world.consensus, world.objects, log, PartitionState())
    await world.aclose()


async def test_the_rollup_of_a_log_that_a_restore_replaced_goes_and_its_log_is_not_searched() -> None:
    """The old rollup is beyond the end of the present log."""
    world = World()
    row = await world.catalogue.create_topic("t", 1)
    log = partition_log(row.topic_id, 0)
    await restore_partition(world.consensus, world.objects, world.rand, row.topic_id, 0, PartitionState(), "attempt")
    await world.send(world.node(), row, 0)
    (standing,) = world.stored("rollup/topic/")
    head = await world.consensus.log_head(log)
    folder = standing.rpartition("/")[0]
    old, coming = (f"{folder}/{p:020d}-{'f' * 32}" for p in (head.next + 1, head.next))
    await world.objects.put(old, b"x")
    asked: list[int] = []
    read = world.consensus.read

    async def watched(name: str, position: int, **limits: Any) -> Any:
        asked.append(position)
        return await read(name, position, **limits)

    world.consensus.read = watched  # type: ignore[method-assign]
    await world.rollups.run(StepBudget(world.clock, 1))
    assert world.stored("rollup/topic/") == {standing}
    assert asked == [head.start], "which one it names, and nothing else"
    await world.objects.put(coming, b"x")
    await world.rollups.run(StepBudget(world.clock, 1))
    assert world.stored("rollup/topic/") == {standing, coming}
    await world.aclose()


async def test_a_rollup_that_is_named_behind_what_it_copied_stands() -> None:
    world = World()
    row = await world.catalogue.create_topic("t", 1)
    node = world.node(rollup_records=8)
    log = partition_log(row.topic_id, 0)
    put, slow = world.objects.put, asyncio.Event()

    async def held(key: str, data: Any) -> None:
        if key.startswith("rollup/topic/"):
            await slow.wait()
        await put(key, data)

    world.objects.put = held  # type: ignore[method-assign]
    for _ in range(14):
        await world.send(node, row, 0)
    slow.set()
    head = await world.truncated(log, 8)
    (standing,) = world.stored("rollup/topic/")
    assert int(standing.rpartition("/")[2].partition("-")[0]) < head.start
    await world.objects.put(f"{standing.rpartition('/')[0]}/{0:020d}-{'f' * 32}", b"x")
    await world.rollups.run(StepBudget(world.clock, 1))
    assert world.stored("rollup/topic/") == {standing}
    await catch_up(world.consensus, world.objects, log, PartitionState())
    await world.aclose()


async def test_what_stands_in_for_a_lost_object_goes_as_the_object_would() -> None:
    world = World()
    row = await world.catalogue.create_topic("t", 2)
    node = world.node()
    await world.send(node, row, 0)
    await world.send(node, row, 0, 1)
    for key in world.stored():
        await world.objects.delete(key)
        await drop_lost_object(world.objects, key)
    await world.forget(node, row, 0)
    await world.keep()
    assert len(world.stored()) == 1, "the other partition has not passed it yet"
    await world.forget(node, row, 1)
    await world.keep()
    assert world.stored() == set()
    await world.aclose()


async def test_strange_objects_under_the_prefix_stay() -> None:
    world = World()
    await world.objects.put("l0/somebody-elses", b"hello")
    await world.keep()
    assert world.stored() == {"l0/somebody-elses"}
    assert world.collector.facts()["strange"] == 1
    await world.aclose()
