"""Collection of L1: unreferenced objects are deleted after their delay, once no restore would need them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tidemill.base.clock import ManualClock, Rand
from tidemill.consensus.memory import MemoryConsensus, MemoryState
from tidemill.maintenance.checkpoint.restore_horizon import RestoreHorizon
from tidemill.maintenance.scheduler import JobContext, Retention, StepBudget
from tidemill.maintenance.topics.l1_garbage import L1GarbageCollector
from tidemill.metastore.catalogue import Catalogue, TopicRow
from tidemill.metastore.factory import NODE, create_metastore
from tidemill.metastore.rows import L1_EXTENTS, L1_OBJECTS, L1_PARTITIONS, L1_TERMS, PARTITIONS
from tidemill.metastore.rows.l1 import l1_key
from tidemill.metastore.rows.partitions import PartitionRow
from tidemill.objects.memory import MemoryObjects
from tidemill.topics.l1.extent_store import ExtentStore
from tidemill.topics.l1.format import L1Region
from tidemill.topics.l1.row_transitions import AddRequest


class World:
    def __init__(self, persist_interval_s: float = 0.01) -> None:
        self.persists = persist_interval_s < 1
        self.clock = ManualClock(1_700_000_000_000)
        self.objects = MemoryObjects(self.clock)
        consensus, rand = MemoryConsensus(self.clock, MemoryState()), Rand(3)
        settings = NODE.__class__(lead=True, persist_interval_s=persist_interval_s)
        self.metastore = create_metastore(consensus, self.objects, self.clock, rand, settings=settings, holder="n/1")
        self.catalogue = Catalogue(self.metastore, self.clock, rand)
        retention = Retention(collect_after_s=60, orphans_after_s=6000)
        self.job = L1GarbageCollector(JobContext(consensus, self.objects, self.metastore, self.clock, rand, retention))
        self.rows = ExtentStore(self.metastore, self.clock, rand)
        self.topic: TopicRow

    async def __aenter__(self) -> World:
        self.topic = await self.catalogue.create_topic("t", 2)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.metastore.aclose()

    async def put(self, name: str) -> None:
        await self.objects.put(l1_key(self.topic.topic_id, name), b"x" * 100)

    async def add(self, name: str, *spans: tuple[int, int, int]) -> None:
        """An object with extents of (partition, base, last)."""
        await self.rows.register(self.topic.topic_id, name)
        await self.put(name)
        regions = tuple(L1Region(p, 0, 50, base, last, 0, 1, 50, 10) for p, base, last in spans)
        terms = {p: [(1, base)] for p, base, _ in reversed(spans)}
        await self.rows.add(AddRequest(self.topic.topic_id, name, 100, regions, terms))

    async def starts(self, partition: int, log_start: int) -> None:
        """Write the log start of a partition into the checkpoint's rows."""
        row = PartitionRow(self.topic.topic_id, partition, log_start, 1000)
        await self.metastore.commit([PARTITIONS.encode(row)])

    async def keep(self, seconds: int) -> None:
        step_s = max(10, seconds // 20)
        for _ in range(seconds // step_s):
            self.clock.advance(step_s * 1000)
            if self.persists:
                await self.metastore.flush()
            while await self.job.run(StepBudget(self.clock, 1)):
                pass

    async def stored(self) -> list[str]:
        return [meta.key.rpartition("/")[2] async for meta in self.objects.list("l1/")]

    async def left(self) -> dict[str, int]:
        families = (L1_PARTITIONS, L1_EXTENTS, L1_TERMS, L1_OBJECTS)
        return {family.name: len(await self.metastore.rows(family)) for family in families}


async def test_an_object_goes_with_the_last_extent_in_it_after_the_grace() -> None:
    async with World() as world:
        await world.add("a", (0, 0, 9), (1, 0, 9))
        await world.add("b", (0, 10, 19))
        await world.starts(0, 10)
        await world.keep(200)
        assert await world.stored() == ["a", "b"], "the other partition's extent lives"
        await world.starts(1, 15)
        await world.keep(50)
        assert await world.stored() == ["a", "b"]
        await world.keep(100)
        assert await world.stored() == ["b"]
        assert [row.object_id for row in await world.metastore.rows(L1_OBJECTS)] == ["b"]


async def test_extents_stay_until_the_checkpoint_says_that_their_log_begins_behind_them() -> None:
    async with World() as world:
        await world.add("a", (0, 0, 9))
        await world.keep(200)
        assert len(await world.metastore.rows(L1_EXTENTS)) == 1
        await world.starts(0, 9)
        await world.keep(200)
        assert await world.stored() == ["a"]


def test_what_is_in_no_manifest_yet_keeps_its_object(monkeypatch: pytest.MonkeyPatch) -> None:
    """A restore from the newest manifest still refers to it."""

    async def scenario() -> list[str]:
        async with World(persist_interval_s=3600) as world:
            await world.add("a", (0, 0, 9))
            await world.metastore.flush(30)
            await world.starts(0, 10)
            await world.keep(300)
            before = await world.stored()
            await world.metastore.flush(30)
            await world.keep(100)
            assert await world.stored() == []
            return before

    async def always(*_: object) -> bool:
        return True

    assert asyncio.run(scenario()) == ["a"]
    monkeypatch.setattr(RestoreHorizon, "is_row_persisted", always)
    assert asyncio.run(scenario()) == [], "the fault that this test is for"


async def test_a_registration_that_nobody_uses_expires_and_its_object_goes() -> None:
    async with World() as world:
        await world.rows.register(world.topic.topic_id, "a")
        await world.put("a")
        await world.keep(3000)
        [row] = await world.metastore.rows(L1_OBJECTS)
        assert not row.registered
        await world.keep(1500)
        assert await world.stored() == [] and await world.metastore.rows(L1_OBJECTS) == []


async def test_an_object_without_a_row_is_swept_when_it_is_old() -> None:
    async with World() as world:
        await world.put("a")
        await world.keep(5000)
        assert await world.stored() == ["a"]
        await world.keep(2000)
        assert await world.stored() == []


async def test_of_a_deleted_topic_nothing_stays() -> None:
    async with World() as world:
        await world.add("a", (0, 0, 9), (1, 0, 9))
        await world.add("b", (0, 10, 19))
        await world.catalogue.delete(TopicRow, "t")
        await world.keep(50)
        assert await world.left() == {"l1 partition": 2, "l1 extent": 3, "l1 term": 2, "l1 object": 2}
        await world.keep(300)
        assert await world.stored() == []
        assert not any((await world.left()).values())


@pytest.mark.parametrize("again", [False, True], ids=["alone", "with a late add"])
async def test_of_a_deleted_topic_whose_objects_went_before_no_leader_epoch_stays(again: bool) -> None:
    """Retention deleted all of its objects, so only the rows of its partitions refer to the topic. A reconciler that
    does not know of the deletion adds to L1, including epochs, between any two steps of the removal.
    """
    async with World() as world:
        await world.add("a", (0, 0, 9), (1, 0, 9))
        await world.starts(0, 10)
        await world.starts(1, 10)
        await world.keep(200)
        assert await world.left() == {"l1 partition": 2, "l1 extent": 0, "l1 term": 2, "l1 object": 0}
        await world.catalogue.delete(TopicRow, "t")
        late = iter(range(10, 15)) if again else iter(())
        commit = world.metastore.commit

        async def after_an_add(rows: Any, **options: Any) -> Any:
            base = next(late, None) if all(not value for _, value in rows) else None
            if base is not None:
                await world.add(f"late-{base}", (0, base, base))
            return await commit(rows, **options)

        world.metastore.commit = after_an_add  # type: ignore[method-assign]
        await world.keep(1000)
        assert next(late, None) is None, "every late add had its turn"
        assert not any((await world.left()).values())
        assert await world.stored() == []
