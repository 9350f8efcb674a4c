"""Collection of L0 objects: the scenarios of docs/internals/topics-scenarios.md that test_maintenance_topics.py does
not cover.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from support.maintenance.topics import World
from tidemill.base.errors import UnavailableError
from tidemill.maintenance.scheduler import StepBudget
from tidemill.maintenance.topics import l0_garbage
from tidemill.maintenance.topics.l0_garbage import L0GarbageCollector
from tidemill.metastore.catalogue import TopicRow


async def garbage_of(world: World, count: int) -> set[str]:
    """Create a topic whose partition no longer refers to `count` objects, but to the last. Return the objects that must
    stay.
    """
    row = await world.catalogue.create_topic("t", 1)
    node = world.node()
    for _ in range(count):
        await world.send(node, row, 0)
    await world.forget(node, row, 0)
    before = world.stored()
    await world.send(node, row, 0)
    return world.stored() - before


async def test_when_the_last_topic_is_deleted_every_object_goes() -> None:
    """F13: an empty catalogue retains no object."""
    world = World()
    row = await world.catalogue.create_topic("only", 2)
    node = world.node()
    for _ in range(3):
        await world.send(node, row, 0, 1)
    await world.catalogue.delete(TopicRow, "only")
    await node.refresh()
    await world.keep(300)
    assert world.stored() == set()
    await world.aclose()


async def test_an_idle_partition_holds_no_object_of_busy_ones() -> None:
    """F14: the partition once shared an object with others. Its leader is gone, and no client uses it."""
    world = World()
    row = await world.catalogue.create_topic("t", 2)
    first = world.node()
    await world.send(first, row, 0)
    await world.send(first, row, 1)
    await world.send(first, row, 0, 1)
    await world.forget(first, row, 1)
    await first.aclose()
    node = world.node()
    for _ in range(3):
        await world.send(node, row, 0)
    await world.forget(node, row, 0)
    before = world.stored()
    await world.send(node, row, 0)
    await world.keep(400)
    assert world.stored() == world.stored() - before
    assert (row.topic_id, 1) not in node._led
    await world.aclose()


async def test_without_a_word_of_its_partition_no_object_goes() -> None:
    """An object is deleted only with an epoch. Here the log has no entry about the writer's objects, and the leader
    cannot be asked.
    """
    world = World()
    stays = await garbage_of(world, 3)
    settle, asked = l0_garbage.settle_partition, 0

    async def refused(*_: Any) -> None:
        nonlocal asked
        asked += 1
        raise UnavailableError("not now.")

    (node,) = world.nodes
    (led,) = node._led.values()
    led.intake._enqueue_for_commit = lambda pending: None  # type: ignore[method-assign]
    sending = asyncio.ensure_future(world.send(node, await _row(world), 0))
    while len(world.stored()) < 5:
        await asyncio.sleep(0)
    (never,) = world.stored() - stays - set(led.state.live_objects()) - await _older(world, led)
    l0_garbage.settle_partition = refused  # type: ignore[assignment]
    try:
        for _ in range(40):
            world.clock.advance(10_000)
            await world.metastore.flush()
            try:
                await world.collector.run(StepBudget(world.clock, 1))
            except UnavailableError:
                continue
    finally:
        l0_garbage.settle_partition = settle
    assert asked and never in world.stored()
    sending.cancel()
    await world.keep(300)
    assert world.stored() == stays
    await world.aclose()


async def _row(world: World) -> TopicRow:
    (row,) = await world.catalogue.list(TopicRow)
    return row


async def _older(world: World, led: Any) -> set[str]:
    """Return the stored objects that the log no longer names."""
    return {key for key in world.stored() if key < min(led.state.live_objects())}


async def test_a_bucket_of_many_pages_is_collected_page_by_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(l0_garbage, "LISTING_BATCH", 3)
    monkeypatch.setattr(l0_garbage, "FOOTERS_MIN", 1)
    world = World()
    stays = await garbage_of(world, 11)
    for _ in range(80):
        world.clock.advance(10_000)
        await world.metastore.flush()
        while await world.collector.run(StepBudget(world.clock, 0)):
            pass
    assert world.stored() == stays
    assert world.collector.facts()["deleted_objects"] == 11
    await world.aclose()


@pytest.mark.parametrize("rounds", [0, 1, 4, 7])
async def test_a_reset_at_any_time_loses_nothing_and_collection_begins_anew(rounds: int) -> None:
    """The job moves to another node before it starts, while it waits, or while it runs, without any state in memory."""
    world = World()
    stays = await garbage_of(world, 4)
    await world.keep(rounds * 10)
    world.collector = L0GarbageCollector(world.collector._g, quiet_s=0)
    assert world.stored() >= stays
    await world.keep(200)
    assert world.stored() == stays
    await world.aclose()


async def test_two_that_collect_at_once_delete_the_same_and_nothing_more() -> None:
    """A node that was paused and still believes that it owns the job."""
    world = World()
    stays = await garbage_of(world, 6)
    other = L0GarbageCollector(world.collector._g, quiet_s=0)
    for _ in range(25):
        world.clock.advance(10_000)
        await world.metastore.flush()
        await asyncio.gather(*(each.run(StepBudget(world.clock, 1)) for each in (world.collector, other)))
    assert world.stored() == stays
    await world.aclose()


async def test_collection_that_is_cut_off_in_the_middle_goes_on_where_it_was() -> None:
    """A clean shutdown, or an unavailable store after any deletion: deleted objects stay deleted, and the next run
    deletes the rest.
    """
    world = World()
    stays = await garbage_of(world, 5)
    delete, failures = world.objects.delete, 0

    async def cut(key: str) -> None:
        nonlocal failures
        failures += 1
        if failures % 2:
            raise asyncio.CancelledError if failures % 3 else UnavailableError("the store is away.")
        await delete(key)

    world.objects.delete = cut  # type: ignore[method-assign]
    for _ in range(40):
        world.clock.advance(10_000)
        await world.metastore.flush()
        try:
            await world.collector.run(StepBudget(world.clock, 1))
        except (UnavailableError, asyncio.CancelledError):
            continue
    assert failures >= 9
    assert world.stored() == stays
    await world.aclose()


async def test_young_garbage_goes_as_soon_as_the_grace_is_over_and_not_before() -> None:
    world = World()
    stays = await garbage_of(world, 2)
    while not any(garbage.ready_s is not None for garbage in world.collector._garbage.values()):
        await world.keep(10)
    (ready_s,) = {garbage.ready_s for garbage in world.collector._garbage.values()}
    assert ready_s is not None
    grace_s = world.collector._g.retention.collect_after_s
    while not await world.collector._persisted.is_persisted_up_to(
        next(iter(world.collector._garbage.values())).horizon
    ):
        await asyncio.sleep(0.01)
    world.clock.advance(int((ready_s + grace_s - world.clock.monotonic_s()) * 1000) - 1)
    await world.collector.run(StepBudget(world.clock, 1))
    assert len(world.stored()) == 3
    world.clock.advance(1)
    await world.collector.run(StepBudget(world.clock, 1))
    assert world.stored() == stays
    await world.aclose()
