"""Expiry of consumer group offsets, and the offsets that it must leave."""

from __future__ import annotations

from typing import Self

from tidemill.base.clock import ManualClock, Rand
from tidemill.consensus.memory import MemoryConsensus
from tidemill.maintenance.scheduler import JobContext, Retention, StepBudget
from tidemill.maintenance.topics.group_offsets import EMPTY_GROUP_MS, GroupOffsetsExpiry
from tidemill.metastore.catalogue import Catalogue, TopicRow
from tidemill.metastore.factory import create_metastore
from tidemill.metastore.rows import GROUP_OFFSETS, GROUPS
from tidemill.metastore.rows.groups import GroupOffsetRow, GroupRow
from tidemill.objects.memory import MemoryObjects

DAY_MS = 86_400_000


class World:
    def __init__(self) -> None:
        self.clock, rand = ManualClock(), Rand(1)
        consensus, objects = MemoryConsensus(self.clock), MemoryObjects(self.clock)
        self.metastore = create_metastore(consensus, objects, self.clock, rand)
        self.catalogue = Catalogue(self.metastore, self.clock, rand)
        self.job = GroupOffsetsExpiry(JobContext(consensus, objects, self.metastore, self.clock, rand, Retention()))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.metastore.aclose()

    async def put(self, *rows: GroupOffsetRow | GroupRow) -> None:
        for row in rows:
            encoded = GROUPS.encode(row) if isinstance(row, GroupRow) else GROUP_OFFSETS.encode(row)
            await self.metastore.commit([encoded])

    async def work(self) -> None:
        while await self.job.run(StepBudget(self.clock, 1)):
            pass

    async def offsets(self) -> list[tuple[str, str, int]]:
        return [(row.group, row.topic_id, row.offset) for row in await self.metastore.rows(GROUP_OFFSETS)]


async def test_offsets_committed_to_a_deleted_topic_leave_their_group() -> None:
    async with World() as world:
        gone, stays = [await world.catalogue.create_topic(name, 1) for name in ("gone", "stays")]
        now = world.clock.now_ms()
        await world.put(GroupRow("g", members=1), GroupRow("only", since_ms=now))
        await world.put(*(GroupOffsetRow("g", t.topic_id, 0, 5, commit_ms=now) for t in (gone, stays)))
        await world.put(GroupOffsetRow("only", gone.topic_id, 0, 5, commit_ms=now))
        await world.work()
        assert len(await world.offsets()) == 3
        await world.catalogue.delete(TopicRow, "gone")
        await world.work()
        assert await world.offsets() == [("g", stays.topic_id, 5)]
        assert len(await world.metastore.rows(GROUPS)) == 2, "a group that is empty since a moment"


async def test_offsets_of_a_group_that_nobody_is_in_expire_and_then_the_group() -> None:
    async with World() as world:
        topic = (await world.catalogue.create_topic("t", 9)).topic_id
        now = world.clock.now_ms()
        await world.put(GroupRow("empty", since_ms=now), GroupRow("full", members=1, since_ms=now))
        await world.put(*(GroupOffsetRow(group, topic, 0, 1, commit_ms=now) for group in ("empty", "full")))
        await world.put(GroupOffsetRow("empty", topic, 1, 2, commit_ms=now, expire_ms=now + DAY_MS))
        world.clock.advance(DAY_MS)
        await world.work()
        assert await world.offsets() == [("empty", topic, 1), ("full", topic, 1)], "what asked for less goes before"
        await world.put(GroupOffsetRow("empty", topic, 2, 3, commit_ms=world.clock.now_ms()))
        world.clock.advance(6 * DAY_MS + 1)
        await world.work()
        assert await world.offsets() == [("empty", topic, 3), ("full", topic, 1)], "a later commit counts for itself"
        world.clock.advance(DAY_MS)
        await world.work()
        assert await world.offsets() == [("full", topic, 1)]
        assert [row.group for row in await world.metastore.rows(GROUPS)] == ["full"]
        assert EMPTY_GROUP_MS < DAY_MS


async def test_whoever_comes_meanwhile_wins() -> None:
    async with World() as world:
        topic = (await world.catalogue.create_topic("t", 9)).topic_id
        now = world.clock.now_ms()
        old = GroupOffsetRow("g", topic, 0, 1, commit_ms=now)
        await world.put(GroupRow("g", since_ms=now), old)
        world.clock.advance(8 * DAY_MS)
        commit = world.metastore.commit

        async def overtaken(rows: object, **more: object) -> int:
            # The group's coordinator commits between the job's check and its deletion.
            await commit([GROUP_OFFSETS.encode(GroupOffsetRow("g", topic, 0, 7, commit_ms=world.clock.now_ms()))])
            return await commit(rows, **more)  # type: ignore[arg-type]

        world.metastore.commit = overtaken  # type: ignore[method-assign]
        await world.work()
        world.metastore.commit = commit  # type: ignore[method-assign]
        assert await world.offsets() == [("g", topic, 7)]
        await world.work()
        assert await world.offsets() == [("g", topic, 7)]
