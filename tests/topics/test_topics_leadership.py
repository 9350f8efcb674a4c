from __future__ import annotations

import asyncio

import pytest
from topics_world import World, batch, eventually, read_all, run

from tidemill.base.clock import Rand, SystemClock
from tidemill.topics.front import NotLeader
from tidemill.topics.leadership import Membership, NodeInfo, rendezvous
from tidemill.topics.producer_ids import BLOCK, ProducerIds


async def member(world: World, name: str, ttl_ms: int = 2000) -> Membership:
    membership = Membership(
        world.consensus, name, NodeInfo("h", 9092, f"http://{name}"), SystemClock(), Rand(), ttl_ms=ttl_ms, poll_s=0.02
    )
    await membership.start()
    return membership


def test_a_node_that_leaves_moves_only_its_own_partitions() -> None:
    names = ["a", "b", "c", "d"]
    before = {p: rendezvous(names, "t", p) for p in range(200)}
    after = {p: rendezvous(["a", "b", "d"], "t", p) for p in range(200)}
    assert all(after[p] == before[p] for p in before if before[p] != "c")
    counts = [list(before.values()).count(name) for name in names]
    assert min(counts) > 20
    assert rendezvous([], "t", 0) == ""


def test_members_see_each_other_and_agree_on_leaders_and_ids() -> None:
    async def scenario() -> None:
        world = World()
        a = await member(world, "a")
        b = await member(world, "b")
        changes: list[int] = []
        a.on_change(lambda: changes.append(len(a.members())))
        await eventually(lambda: len(a.members()) == 2)
        assert changes == [2]
        assert a.members() == b.members()
        assert [(m.name, m.node_id, m.http_url) for m in a.members()] == [("a", 1, "http://a"), ("b", 2, "http://b")]
        assert [a.leader_of("t", p) for p in range(50)] == [b.leader_of("t", p) for p in range(50)]
        assert b.epoch() > a.epoch()
        await a.aclose()
        await eventually(lambda: [m.name for m in b.members()] == ["b"])
        again = await member(world, "a")
        assert [m.node_id for m in again.members()] == [1, 2]
        assert again.epoch() > b.epoch()
        await again.aclose()
        await b.aclose()

    run(scenario())


def test_a_restarted_node_takes_its_name_at_once_and_the_old_process_stops_leading() -> None:
    async def scenario() -> None:
        world = World()
        old = await member(world, "a", ttl_ms=300)
        new = await member(world, "a", ttl_ms=60_000)
        assert new.leader_of("t", 0) == "a"
        await eventually(lambda: old.members() == [])
        assert old.leader_of("t", 0) == ""
        (lease,) = await world.consensus.leases("node/")
        assert lease.live and lease.ttl_ms == 60_000
        assert old.superseded is not None and new.superseded is None
        await old.aclose()
        (lease,) = await world.consensus.leases("node/")
        assert lease.live, "the old process gives up nothing that is not its own"
        await new.aclose()

    run(scenario())


def test_a_dead_node_is_replaced_when_its_lease_runs_out() -> None:
    async def scenario() -> None:
        world = World()
        a = await member(world, "a", ttl_ms=150)
        b = await member(world, "b")
        await eventually(lambda: len(b.members()) == 2)
        await a._tasks.aclose()
        await eventually(lambda: [m.name for m in b.members()] == ["b"])
        await b.aclose()

    run(scenario())


def test_partitions_follow_the_members_and_nothing_acknowledged_is_lost() -> None:
    async def scenario() -> None:
        world = World()
        row = await world.topic(partitions=16)
        a = await member(world, "a")
        topics_a = world.node(a)
        sent: dict[int, list[str]] = {p: [] for p in range(16)}

        async def produce(partition: int, value: str) -> None:
            number = len(sent[partition])
            while True:
                for topics in list(world.nodes):
                    try:
                        data = batch(value, pid=partition, seq=number)
                        await topics.produce_nowait(row.topic_id, partition, data)
                        sent[partition].append(value)
                        return
                    except NotLeader:
                        continue
                await asyncio.sleep(0.005)

        for partition in range(16):
            await produce(partition, "one")
        b = await member(world, "b")
        topics_b = world.node(b)
        for partition in range(16):
            await produce(partition, "two")
        await eventually(lambda: len(a.members()) == 2)
        for partition in range(16):
            await produce(partition, "three")
        leaders = {topics_b.leader_of(row.topic_id, p) for p in range(16)}
        assert leaders == {"a", "b"}
        theirs = next(p for p in range(16) if b.leader_of(row.topic_id, p) == "b")
        with pytest.raises(NotLeader) as refused:
            await topics_a.produce_nowait(row.topic_id, theirs, batch("x"))
        assert refused.value.leader == "b"
        await topics_a.aclose()
        await a.aclose()
        world.nodes.remove(topics_a)
        for partition in range(16):
            await produce(partition, "four")
        for partition in range(16):
            assert [v for _, v in await read_all(world, row.topic_id, partition)] == sent[partition]
            assert sent[partition] == ["one", "two", "three", "four"]
        await world.aclose()
        await b.aclose()

    run(scenario())


def test_producer_ids_are_unique_over_processes() -> None:
    async def scenario() -> None:
        world = World()
        one, two = ProducerIds(world.consensus, Rand()), ProducerIds(world.consensus, Rand())
        ids = await asyncio.gather(*(source.allocate() for _ in range(BLOCK) for source in (one, two)))
        assert len(set(ids)) == 2 * BLOCK
        assert min(ids) > 0

    run(scenario())
