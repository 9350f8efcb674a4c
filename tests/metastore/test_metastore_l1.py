"""The deep check reads L1's objects, and a restore from the bucket alone recovers them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from msgspec.structs import replace

from support.metastore.checkpoint_world import Rows, World, family_rows, keys, rows_of
from support.metastore.l1 import moved
from tidemill.base.clock import Rand
from tidemill.consensus.memory import MemoryConsensus
from tidemill.maintenance.check.deep_check import deep_check
from tidemill.maintenance.restore.restore import Restorer
from tidemill.maintenance.scheduler import JobContext, Retention, StepBudget
from tidemill.maintenance.topics.l1_garbage import L1GarbageCollector
from tidemill.metastore.metastore import Metastore
from tidemill.metastore.rows import EXTENTS, L1_EXTENTS, L1_OBJECTS, L1_PARTITIONS, PARTITIONS
from tidemill.topics.batch import decode_columns
from tidemill.topics.config.settings import TopicSettings
from tidemill.topics.l0.object_cache import ObjectCache
from tidemill.topics.l1.extent_store import ExtentStore, PartitionRows
from tidemill.topics.l1.reader import L1Reader
from tidemill.topics.l1.reconciler import Reconciler
from tidemill.topics.partition.state_machine.row_codec import rebuild_state
from tidemill.topics.partition_reader import LogPartitionReader


async def forget_l0(world: World) -> int:
    """Delete L0 objects that no extent row names, as collection does."""
    named = {extent.object_key for extent in await world.metastore.rows(EXTENTS)}
    gone = [key for key in await keys(world, "l0/") if key not in named]
    for key in gone:
        await world.objects.delete(key)
    return len(gone)


async def everything(world: World, consensus: Any, metastore: Metastore) -> list[list[tuple[int, bytes | None]]]:
    """Return offsets and values of both partitions."""
    reader = LogPartitionReader(
        consensus, world.objects, L1Reader(ExtentStore(metastore, world.clock, Rand()), world.objects)
    )
    found: list[list[tuple[int, bytes | None]]] = []
    for partition in range(2):
        end = await reader.high_watermark(world.topic.topic_id, partition)
        each: list[tuple[int, bytes | None]] = []
        for batch in await reader.read(await reader.plan(world.topic.topic_id, partition, 0, end)):
            _, columns = decode_columns(batch)
            each += zip(columns.offsets.tolist(), columns.values, strict=True)
        assert [offset for offset, _ in each] == list(range(end))
        found.append(each)
    return found


async def lines(world: World) -> list[str]:
    found = await deep_check(world.consensus, world.objects, world.clock, world.rand)
    return [str(finding) for finding in found.findings.broken]


@pytest.mark.parametrize("domains", [1, 3])
async def test_a_restore_finds_hot_and_l1_extents_that_meet(domains: int) -> None:
    async with World(real=True, domains=domains) as world:
        await moved(world)
        assert await forget_l0(world) > 0
        before = await everything(world, world.consensus, world.metastore)
        assert sum(map(len, before)) == 24
        old, new = world.consensus, MemoryConsensus(world.clock)
        done = await Restorer(new, world.objects, world.clock, Rand()).run()
        assert done.findings.clean, done.findings.broken
        world.consensus = new
        metastore = Metastore(new, world.open_domain, world.clock, world.rand)
        try:
            assert await everything(world, new, metastore) == before
        finally:
            await metastore.aclose()
            world.consensus = old


async def test_rows_of_the_checkpoint_hold_what_is_hot_alone() -> None:
    async with World(real=True) as world:
        await moved(world)
        for partition in range(2):
            copy = await world.metastore.get(PARTITIONS, world.topic.topic_id, partition)
            row = await world.metastore.get(L1_PARTITIONS, world.topic.topic_id, partition)
            hot = await world.metastore.rows(EXTENTS, world.topic.topic_id, partition)
            assert copy is not None and row is not None
            assert 0 < copy.reconciled == row.next == hot[0].base_offset < copy.next_offset
            assert copy.size_bytes == sum(extent.size_bytes for extent in hot)


async def test_the_deep_check_is_silent_on_what_is_whole() -> None:
    async with World(real=True) as world:
        await moved(world)
        await forget_l0(world)
        assert await lines(world) == []


async def _hole(world: World, extent: Any, row: Any) -> None:
    await world.metastore.commit([(L1_EXTENTS.key_of(extent), b"")])


async def _behind(world: World, extent: Any, row: Any) -> None:
    await world.metastore.commit([L1_PARTITIONS.encode(replace(row, next=row.next - 1))])


async def _late(world: World, extent: Any, row: Any) -> None:
    await world.metastore.commit([L1_PARTITIONS.encode(replace(row, start=3))])


async def _gone(world: World, extent: Any, row: Any) -> None:
    await world.metastore.commit([(L1_PARTITIONS.key_of(row), b"")])


async def _object(world: World, extent: Any, row: Any) -> None:
    await world.objects.delete(extent.object_key)


async def _charged(world: World, extent: Any, row: Any) -> None:
    [known] = await world.metastore.rows(L1_OBJECTS, extent.topic_id)
    await world.metastore.commit([L1_OBJECTS.encode(replace(known, removed_bytes=1))])


async def _unnamed(world: World, extent: Any, row: Any) -> None:
    [known] = await world.metastore.rows(L1_OBJECTS, extent.topic_id)
    await world.metastore.commit([(L1_OBJECTS.key_of(known), b"")])


@pytest.mark.parametrize(
    ("damage", "reported"),
    [
        (_hole, "L1 has 0 extents"),
        (_behind, "L1 ends at"),
        (_late, "L1 begins at 3"),
        (_gone, "L1 has no row"),
        (_object, "the object is missing"),
        (_charged, "are referred to, its row says"),
        (_unnamed, "it has no row"),
    ],
)
async def test_what_is_broken_is_named(damage: Callable[[World, Any, Any], Awaitable[None]], reported: str) -> None:
    async with World(real=True) as world:
        await moved(world)
        topic_id = world.topic.topic_id
        [extent, *_] = await world.metastore.rows(L1_EXTENTS, topic_id, 0)
        row = await world.metastore.get(L1_PARTITIONS, topic_id, 0)
        await damage(world, extent, row)
        assert [line for line in await lines(world) if reported in line]


class Ahead(AssertionError):
    """Raised for rows from which no restore could start."""


def check_rows_meet(rows: Rows) -> int:
    """Check rule X1 on the rows of one possible manifest. Return the number of partitions with data in L1."""
    found = 0
    known = {(row.topic_id, row.partition): row for row in family_rows(L1_PARTITIONS, rows)}
    for row in family_rows(PARTITIONS, rows):
        mine = {k: v for k, v in rows.items() if k.startswith(EXTENTS.prefix(row.topic_id, row.partition))}
        rebuild_state(row, family_rows(EXTENTS, mine))
        l1 = known.pop((row.topic_id, row.partition), None)
        if l1 is None:
            if row.reconciled > row.log_start:
                raise Ahead(f"L1 knows nothing of {row}")
            continue
        found += 1
        if not row.reconciled <= l1.next <= row.next_offset or l1.start > row.log_start:
            raise Ahead(f"{row} {l1}")
        in_l1 = {k: v for k, v in rows.items() if k.startswith(L1_EXTENTS.prefix(row.topic_id, row.partition))}
        at = l1.start
        for extent in family_rows(L1_EXTENTS, in_l1):
            if extent.base_offset > at:
                raise Ahead(f"a gap before {extent}")
            at = max(at, extent.last_offset + 1)
        if at != l1.next:
            raise Ahead(f"extents end at {at}: {l1}")
    if known:
        raise Ahead(f"no checkpoint of {known}")
    return found


async def rows_after_every_commit(seed: int, *, bound: bool = True) -> int:
    """Produce, cut, checkpoint, reconcile and trim concurrently in any order. Return the number of commits that were
    checked."""
    source, looked = random.Random(seed), 0
    async with World() as world:
        [shared] = world.shared
        real = shared.write

        def write(rows: Any, expects: Any) -> int:
            nonlocal looked
            seqno = real(rows, expects)
            looked += check_rows_meet(rows_of(shared)) > 0
            return seqno

        shared.write = write  # type: ignore[method-assign]
        rows = ExtentStore(world.metastore, world.clock, Rand())
        if not bound:
            real_places = rows.partition_rows

            async def places(topic_id: str, partitions: Any) -> dict[int, PartitionRows]:
                found = await real_places(topic_id, partitions)
                return {
                    p: replace(each, checkpoint=replace(each.checkpoint, next_offset=1 << 40, log_start=1 << 40))
                    for p, each in found.items()
                    if each.checkpoint is not None
                }

            rows.partition_rows = places  # type: ignore[method-assign]
        settings = TopicSettings(l1_object_bytes=source.choice((1, 200, 1 << 20)))
        reconciler = Reconciler(
            rows,
            replace(world.topics._around, settings=settings),
            world.objects,
            ObjectCache(0),
            world.topics._led,
        )
        context = JobContext(
            world.consensus, world.objects, world.metastore, world.clock, world.rand, Retention(collect_after_s=0)
        )
        checkpointer, collecting = world.checkpointer(), L1GarbageCollector(context)

        async def cut() -> None:
            for led in world.topics._led.values():
                led.advance_log_start(source.randint(0, led.state.high_watermark))

        steps: list[Callable[[], Awaitable[object]]] = [
            lambda: world.produce(source.randint(1, 3), source.randint(0, 1)),
            cut,
            checkpointer.round,
            lambda: reconciler.run_round(world.topic.topic_id, range(2)),
            lambda: collecting.run(StepBudget(world.clock, 1)),
        ]
        weights = (8, 1, 4, 4, 2)
        for _ in range(40):
            chosen = dict.fromkeys(source.choices(range(len(steps)), weights, k=source.randint(1, 3)))
            await asyncio.gather(*(steps[each]() for each in chosen))
        await world.topics._commits.drain(30)
    return looked


@pytest.mark.parametrize("seed", range(6))
def test_rows_after_every_commit_restore_to_hot_and_l1_extents_that_meet(seed: int) -> None:
    assert asyncio.run(asyncio.wait_for(rows_after_every_commit(seed), 90)) > 10


def test_without_the_bound_of_the_checkpoint_row_some_do_not() -> None:
    """The test above can fail: without the bound it detects the fault."""

    async def some() -> None:
        for seed in range(20):
            await rows_after_every_commit(seed, bound=False)

    with pytest.raises(Ahead):
        asyncio.run(asyncio.wait_for(some(), 90))
