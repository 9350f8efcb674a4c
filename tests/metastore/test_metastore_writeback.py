"""Writing rows back into empty consensus: partitions, bindings and shards, and the counters related to them."""

from __future__ import annotations

from typing import Any

import pytest

from support.metastore.checkpoint_world import Restored, World, rows_of
from tidemill.base.clock import Rand
from tidemill.base.errors import InvalidError, UnknownOutcomeError
from tidemill.consensus.memory import MemoryConsensus
from tidemill.shards.bindings.remap import encode_binding
from tidemill.shards.registry import open_remap, open_shard
from tidemill.shards.state.restore import restore_bindings, restore_shard, restored_shard_id
from tidemill.topics.api import FetchRead
from tidemill.topics.lifecycle.restore import newest_epoch, restore_partition, restore_registers
from tidemill.topics.local_topics import LocalTopics
from tidemill.topics.partition.recovery import catch_up, partition_log
from tidemill.topics.partition.state_machine.state import PartitionState
from tidemill.topics.partition_reader import LogPartitionReader
from tidemill.topics.produce.producer_ids import ProducerIds


async def write_back(world: World, consensus: MemoryConsensus, attempt: str = "a1") -> Restored:
    restored = Restored(rows_of(world.shared[0]))
    for (topic_id, partition), state in restored.partitions.items():
        await restore_partition(consensus, world.objects, world.rand, topic_id, partition, state, attempt)
    for source, bindings in restored.bindings.items():
        await restore_bindings(consensus, source, [encode_binding(b) for b in bindings], attempt)
    for shard in restored.shards.values():
        await restore_shard(consensus, world.rand, shard, attempt)
    return restored


async def filled(world: World, steps: int = 12) -> None:
    for _ in range(steps):
        await world.step()
    await world.checkpointer().round()


async def test_a_restored_partition_serves_every_record_and_goes_on() -> None:
    async with World() as world:
        await filled(world)
        fresh = MemoryConsensus(world.clock)
        await write_back(world, fresh)
        topic_id = world.topic.topic_id
        topics = LocalTopics(fresh, world.objects, world.catalogue, clock=world.clock, rand=Rand(9))
        before = (await world.topics.offsets(topic_id, 0)).high_watermark
        assert (await topics.offsets(topic_id, 0)).high_watermark == before > 0
        [fetched] = await topics.fetch(
            [FetchRead(topic_id, 0, 0, 1 << 20)], max_wait_s=1, min_bytes=1, max_bytes=1 << 20
        )
        [original] = await world.topics.fetch(
            [FetchRead(topic_id, 0, 0, 1 << 20)], max_wait_s=1, min_bytes=1, max_bytes=1 << 20
        )
        assert fetched.error is None
        assert [bytes(b) for b in fetched.batches] == [bytes(b) for b in original.batches]
        # The producer of the last batch continues where it stopped, and a repetition of that batch is recognised.
        world.topics, old = topics, world.topics
        await world.produce()
        assert (await topics.offsets(topic_id, 0)).high_watermark == before + 3
        terms = (await catch_up(fresh, world.objects, partition_log(topic_id, 0), PartitionState()))[0].terms
        assert terms == sorted(terms) and terms[-1][0] > terms[0][0] + 1000
        world.topics = old
        await topics.aclose()


async def test_a_restored_shard_has_a_new_id_and_the_same_contents_and_takes_appends() -> None:
    async with World() as world:
        await filled(world)
        await world.compact(world.table)
        await world.checkpointer("n2").round()
        fresh = MemoryConsensus(world.clock)
        await write_back(world, fresh)
        shard = await open_shard(fresh, world.objects, world.clock, Rand(4), "table")
        assert shard.shard_id == restored_shard_id(world.table.shard_id, "a1") != world.table.shard_id
        since, upper = await world.table.frontiers()
        assert await shard.frontiers() == (since, upper)
        assert (await shard.snapshot(upper - 1)).equals(await world.table.snapshot(upper - 1))
        await shard.compare_and_append(upper, upper + 10, (), "")
        other = await open_shard(fresh, world.objects, world.clock, Rand(5), "table")
        assert await other.frontiers() == (since, upper + 10)
        await shard.aclose()
        await other.aclose()


async def test_restored_bindings_are_the_same_and_minting_goes_on() -> None:
    async with World() as world:
        await filled(world)
        fresh = MemoryConsensus(world.clock)
        await write_back(world, fresh)
        remap = await open_remap(fresh, world.clock, Rand(4), "topic/clicks")
        assert await remap.after(0) == await world.remap.after(0)
        latest = await remap.latest()
        assert latest is not None
        await remap.mint(type(latest)(latest.time_ms + 5, latest.offsets))


class CutOff(MemoryConsensus):
    """Consensus that dies at the n-th write; with `landed` the write took effect."""

    def __init__(self, world: World, state: Any, at: int, landed: bool) -> None:
        super().__init__(world.clock, state)
        self.left = at
        self.landed = landed

    async def _submit(self, op: Any) -> Any:
        if type(op).__name__ in ("Append", "Cas", "Truncate"):
            self.left -= 1
            if self.left == 0:
                if self.landed:
                    await super()._submit(op)
                raise RuntimeError("killed")
        return await super()._submit(op)


@pytest.mark.parametrize("landed", [False, True])
async def test_write_back_is_cut_off_at_every_write_and_run_again(landed: bool) -> None:
    async with World() as world:
        await filled(world, 3)
        whole = MemoryConsensus(world.clock)
        await write_back(world, whole)
        for at in range(1, 100):
            state = type(whole.state)()
            try:
                await write_back(world, CutOff(world, state, at, landed))
                break
            except RuntimeError:
                pass
            fresh = MemoryConsensus(world.clock, state)
            await write_back(world, fresh)
            reader = LogPartitionReader(fresh, world.objects)
            for partition in range(2):
                want = (await world.topics.offsets(world.topic.topic_id, partition)).high_watermark
                assert await reader.high_watermark(world.topic.topic_id, partition) == want
            shard = await open_shard(fresh, world.objects, world.clock, Rand(4), "table")
            assert await shard.frontiers() == await world.table.frontiers()
            remap = await open_remap(fresh, world.clock, Rand(4), "topic/clicks")
            assert await remap.after(0) == await world.remap.after(0)
            await shard.aclose()
        assert at > 8


async def test_lost_answers_are_resolved_by_what_stands_there() -> None:
    async with World() as world:
        await filled(world, 3)
        fresh = MemoryConsensus(world.clock)
        append = fresh.append
        lost = 0

        async def unheard(*args: Any) -> Any:
            nonlocal lost
            await append(*args)
            lost += 1
            raise UnknownOutcomeError("the answer was lost.")

        fresh.append = unheard  # type: ignore[method-assign]
        await write_back(world, fresh)
        assert lost >= 5


async def test_what_another_attempt_or_a_live_cluster_wrote_is_not_overwritten() -> None:
    async with World() as world:
        await filled(world, 3)
        fresh = MemoryConsensus(world.clock)
        await write_back(world, fresh)
        before = {log: head for log, head in fresh.state.heads.items()}
        with pytest.raises(InvalidError, match="log already"):
            await write_back(world, fresh, "a2")
        with pytest.raises(InvalidError, match="exists already"):
            await restore_bindings(fresh, "topic/clicks", [b"x"] * 9, "a2")
        assert fresh.state.heads == before


async def test_no_producer_id_or_object_epoch_is_ever_given_twice() -> None:
    async with World() as world:
        ids = ProducerIds(world.consensus, Rand(1))
        old = await ids.allocate()
        for epoch in (1, 2, 3, 700, 701, 5000):
            await world.objects.put(f"l0/{epoch:020d}/n1-{epoch}", b"x")
        assert await newest_epoch(world.objects) == 5000
        fresh = MemoryConsensus(world.clock)
        for _ in range(2):
            await restore_registers(fresh, world.objects, Rand(2), incarnation=3, node_ids={"n1": 4})
        assert await ProducerIds(fresh, Rand(1)).allocate() == 3 << 40 > old
        from tidemill.topics.membership import Membership, NodeInfo

        membership = Membership(fresh, "n1", NodeInfo(), world.clock, Rand(3))
        await membership.start()
        assert membership.epoch() > 5000
        assert [member.node_id for member in membership.members()] == [4]
        await membership.aclose()


async def test_the_newest_epoch_is_found_whatever_the_gaps() -> None:
    async with World() as world:
        rand = Rand(3)
        known = 0
        assert await newest_epoch(world.objects) == 0
        await world.objects.put("l0/README", b"nobody of ours wrote this")
        assert await newest_epoch(world.objects) == 0
        for _ in range(40):
            epoch = rand.below(1 << (1 + rand.below(40)))
            known = max(known, epoch)
            await world.objects.put(f"l0/{epoch:020d}/n-{rand.nonce()}", b"x")
            assert await newest_epoch(world.objects) == known
