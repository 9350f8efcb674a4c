"""A cluster restored from its bucket alone: memory and directory objects, memory and SQLite consensus."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import crc32c
import msgspec
import pytest

from support.metastore.checkpoint_world import World, damage, keys, manifest_of, persisted
from tidemill.base.clock import Rand, SystemClock
from tidemill.base.errors import ClusterReplacedError, CorruptError, InvalidError, MissingError, UnknownOutcomeError
from tidemill.base.status.status import StatusReport
from tidemill.consensus import leader_election
from tidemill.consensus.api import LogHead, Versioned
from tidemill.consensus.factory import open_consensus
from tidemill.consensus.memory import MemoryConsensus
from tidemill.consensus.status.board import StatusBoard
from tidemill.maintenance.restore.restore import Restorer
from tidemill.metastore.bucket_claim import greatest_claim
from tidemill.metastore.catalogue import CaptureRow, CaptureTableRow, Catalogue, TableSnapshot, TopicRow
from tidemill.metastore.cluster import read_cluster
from tidemill.metastore.cluster_manifest import ALIVE_PREFIX, CLUSTER_PREFIX, Presence, newest_manifest
from tidemill.metastore.domain import domain
from tidemill.metastore.factory import create_metastore
from tidemill.metastore.lsm.file_store import FileName, SstFiles
from tidemill.metastore.metastore import Metastore
from tidemill.metastore.rows import GROUP_MEMBERS, GROUP_OFFSETS, GROUPS, PARTITIONS
from tidemill.metastore.rows.groups import GroupMemberRow, GroupOffsetRow, GroupRow
from tidemill.metastore.rows.partitions import PartitionRow
from tidemill.objects.factory import open_objects
from tidemill.objects.memory import MemoryObjects
from tidemill.shards.registry import open_remap, open_shard
from tidemill.topics.api import FetchRead, InvalidProducerEpochError, OutOfOrderSequenceError
from tidemill.topics.batch import Record, encode_batch
from tidemill.topics.local_topics import LocalTopics
from tidemill.topics.membership import Membership, NodeInfo

T = TypeVar("T")
Body = Callable[[World], Awaitable[None]]


@asynccontextmanager
async def restored_world(world: World, consensus: Any) -> AsyncIterator[tuple[Metastore, Any, LocalTopics]]:
    """Open a process of the restored cluster: metastore, catalogue, topics."""
    world.consensus = consensus
    metastore = Metastore(consensus, world.open_domain, world.clock, world.rand)
    catalogue: Any = Catalogue(metastore, world.clock, world.rand)
    topics = LocalTopics(consensus, world.objects, catalogue, clock=world.clock, rand=world.rand)
    try:
        yield metastore, catalogue, topics
    finally:
        await topics.aclose()
        await metastore.aclose()


async def check_everything_is_back(world: World, consensus: Any) -> None:
    old_topics, table, derived, remap = world.topics, world.table, world.derived, world.remap
    async with restored_world(world, consensus) as (_, catalogue, topics):
        [topic] = await catalogue.list(TopicRow)
        assert topic == world.topic
        for partition in range(2):
            high = (await old_topics.offsets(topic.topic_id, partition)).high_watermark
            assert (await topics.offsets(topic.topic_id, partition)).high_watermark == high
            read = [FetchRead(topic.topic_id, partition, 0, 1 << 20)]
            [old] = await old_topics.fetch(read, max_wait_s=1, min_bytes=1, max_bytes=1 << 20)
            [new] = await topics.fetch(read, max_wait_s=1, min_bytes=1, max_bytes=1 << 20)
            assert [bytes(b) for b in new.batches] == [bytes(b) for b in old.batches]
        for shard in (table, derived):
            again = await open_shard(consensus, world.objects, world.clock, world.rand, shard.name)
            since, upper = await shard.frontiers()
            assert await again.frontiers() == (since, upper)
            assert (await again.snapshot(upper - 1)).equals(await shard.snapshot(upper - 1))
            await again.aclose()
        bindings = await open_remap(consensus, world.clock, world.rand, "topic/clicks")
        assert await bindings.after(0) == await remap.after(0)


@pytest.mark.parametrize("consensus", ["memory", "sqlite"])
@pytest.mark.parametrize("objects", ["memory", "directory"])
@pytest.mark.parametrize("domains", [1, 3])
def test_everything_persisted_is_there_again(tmp_path: Path, consensus: str, objects: str, domains: int) -> None:
    def url(name: str) -> str:
        return "memory:" if consensus == "memory" else f"sqlite://{tmp_path}/{name}.db"

    everything_is_there_again(url, "memory:" if objects == "memory" else f"file://{tmp_path}/objects", domains)


@pytest.mark.postgres
def test_everything_persisted_is_there_again_on_postgresql(tmp_path: Path, new_database: Callable[[], str]) -> None:
    everything_is_there_again(lambda _: new_database(), f"file://{tmp_path}/objects", 2)


def everything_is_there_again(url: Callable[[str], str], objects: str, domains: int) -> None:
    async def main() -> None:
        clock, rand = SystemClock(), Rand()
        store = await open_objects(objects, clock, rand)
        old, new = await open_consensus(url("old"), clock, rand), await open_consensus(url("new"), clock, rand)
        async with World(domains, real=True, consensus=old, objects=store) as world:
            await persisted(world)
            before = await world.metastore.cluster()
            done = await Restorer(new, store, clock, rand).run()
            assert done.findings.clean, done.findings.broken
            assert (done.partitions, done.shards) == (2, 2)
            assert done.cluster.label == before.uuid != done.cluster.uuid
            assert (done.cluster.incarnation, done.cluster.domains, done.cluster.restoring) == (2, domains, "")
            await check_everything_is_back(world, new)
            found = await newest_manifest(store)
            assert found is not None and found.manifest.cluster_uuid == done.cluster.uuid
            world.consensus = old
        for each in (old, new, store):
            await each.aclose()

    asyncio.run(main())


async def test_the_restored_cluster_goes_on_and_can_be_restored_again() -> None:
    async with World(real=True) as world:
        await persisted(world)
        second, third = MemoryConsensus(world.clock), MemoryConsensus(world.clock)
        await Restorer(second, world.objects, world.clock, world.rand).run()
        original = world.topics, world.consensus, world.metastore, world.catalogue
        async with restored_world(world, second) as (metastore, catalogue, topics):
            await catalogue.create_topic("more", 1)
            world.metastore, world.topics, world.catalogue = metastore, topics, catalogue
            world.table = await open_shard(second, world.objects, world.clock, world.rand, "table")
            world.derived = await open_shard(second, world.objects, world.clock, world.rand, "derived")
            world.remap = await open_remap(second, world.clock, world.rand, "topic/clicks")
            await persisted(world, 5)
            done = await Restorer(third, world.objects, world.clock, world.rand).run()
            assert done.findings.clean and done.cluster.incarnation == 3
            frontiers = await world.table.frontiers()
            shard = await open_shard(third, world.objects, world.clock, world.rand, "table")
            assert await shard.frontiers() == frontiers
            await shard.aclose()
        world.topics, world.consensus, world.metastore, world.catalogue = original


async def test_what_was_not_persisted_is_lost_and_nothing_else() -> None:
    async with World(real=True) as world:
        await persisted(world)
        upper = (await world.table.frontiers())[1]
        ends = [(await world.topics.offsets(world.topic.topic_id, p)).high_watermark for p in range(2)]
        for _ in range(6):
            await world.step()
        await world.checkpointer("n2").round()  # in the log, but in no manifest
        fresh = MemoryConsensus(world.clock)
        await Restorer(fresh, world.objects, world.clock, world.rand).run()
        shard = await open_shard(fresh, world.objects, world.clock, world.rand, "table")
        assert (await shard.frontiers())[1] == upper < (await world.table.frontiers())[1]
        async with restored_world(world, fresh) as (_, _, topics):
            assert [(await topics.offsets(world.topic.topic_id, p)).high_watermark for p in range(2)] == ends
        await shard.aclose()


class Killed(Exception):
    pass


class CutOff(MemoryConsensus):
    """Consensus of a process that dies at its n-th write: later calls fail. `landed`: that write took effect."""

    def __init__(self, clock: Any, state: Any, at: int, landed: bool) -> None:
        super().__init__(clock, state)
        self.left = at
        self.landed = landed
        self.dead = asyncio.Event()

    async def _submit(self, op: Any) -> Any:
        if type(op).__name__ in ("Append", "Cas", "Truncate", "Fence", "Acquire"):
            self.left -= 1
            if self.left == 0 and self.landed:
                await super()._submit(op)
        if self.left <= 0:
            self.dead.set()
            await asyncio.Event().wait()
        return await super()._submit(op)


@pytest.mark.parametrize("landed", [False, True])
async def test_a_restore_cut_off_at_every_write_is_finished_by_running_it_again(
    landed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (domain, leader_election):
        monkeypatch.setattr(module, "RELEASE_TIMEOUT_S", 0.01)  # the dead are not waited for
    async with World(real=True) as world:
        await persisted(world, 2)
        original = world.consensus
        at, finished = 0, False
        while not finished:
            at += 1
            dying = CutOff(world.clock, type(original.state)(), at, landed)
            running = asyncio.ensure_future(Restorer(dying, world.objects, world.clock, world.rand).run())
            dead = asyncio.ensure_future(dying.dead.wait())
            await asyncio.wait([running, dead], return_when=asyncio.FIRST_COMPLETED)
            finished = not dying.dead.is_set()
            running.cancel()
            dead.cancel()
            await asyncio.gather(running, dead, return_exceptions=True)
            dying.state.waiters.clear()
            fresh = MemoryConsensus(world.clock, dying.state)
            if not finished and (await read_restored(fresh)) != "":
                done = await Restorer(fresh, world.objects, world.clock, world.rand).run()
                assert done.findings.clean
            await check_everything_is_back(world, fresh)
            world.consensus = original
        assert at > 12


async def read_restored(consensus: MemoryConsensus) -> str:
    """Return the state of the restore, which is empty once it has finished."""
    found = await read_cluster(consensus)
    return found[0].restoring if found is not None else "not begun"


async def test_nodes_cannot_open_a_cluster_whose_restore_has_not_finished() -> None:
    async with World(real=True) as world:
        await persisted(world, 3)
        fresh = MemoryConsensus(world.clock)
        restorer = Restorer(fresh, world.objects, world.clock, world.rand)

        async def die(*_: object) -> None:
            raise Killed

        restorer._restore_shards = die  # type: ignore[method-assign,assignment]
        with pytest.raises(Killed):
            await restorer.run()
        metastore = Metastore(fresh, world.open_domain, world.clock, world.rand)
        with pytest.raises(InvalidError, match="has not finished"):
            await metastore.start()
        await metastore.aclose()
        done = await Restorer(fresh, world.objects, world.clock, world.rand).run()
        assert done.findings.clean
        await check_everything_is_back(world, fresh)


async def test_consensus_that_is_not_empty_is_refused_and_named() -> None:
    async with World(real=True) as world:
        await persisted(world, 3)
        with pytest.raises(InvalidError, match=r"not empty.*metastore/cluster"):
            await Restorer(world.consensus, world.objects, world.clock, world.rand).run()
        other = MemoryConsensus(world.clock)
        await other.cas("something/else", 0, b"x", "n")
        with pytest.raises(InvalidError, match="something/else"):
            await Restorer(other, world.objects, world.clock, world.rand).run()


class OtherMachine(SystemClock):
    """A clock of another machine: its wall clock differs from ours, and its monotonic clock is unrelated to ours."""

    def __init__(self, off_ms: int) -> None:
        super().__init__()
        self._off_ms = off_ms

    def now_ms(self) -> int:
        return super().now_ms() + self._off_ms


@pytest.mark.parametrize("off_ms", [-600_000, 0, 600_000])
async def test_f520_a_restore_beside_a_live_cluster_is_refused_whatever_the_clocks_of_the_machines_say(
    off_ms: int,
) -> None:
    async with World(real=True) as world:
        await persisted(world, 3)
        manifest = await manifest_of(world)
        presence = Presence(world.objects, OtherMachine(off_ms), world.rand, "n1", interval_s=0.1)
        await presence.publish(manifest)

        async def live() -> None:
            while True:
                await asyncio.sleep(0.1)
                await presence.publish(manifest)

        fresh = MemoryConsensus(world.clock)
        living = asyncio.ensure_future(live())
        with pytest.raises(
            InvalidError, match=r"cluster is alive, it wrote a sign of life.*node=n1.*Stop all its nodes"
        ):
            await Restorer(fresh, world.objects, world.clock, world.rand).run()
        living.cancel()
        await asyncio.gather(living, return_exceptions=True)
        assert await fresh.scan("") == []
        assert await greatest_claim(world.objects) == 0
        # It is dead, and its last sign is watched for three of its intervals, also one that is "of tomorrow".
        began_s = world.clock.monotonic_s()
        await Restorer(fresh, world.objects, world.clock, world.rand).run()
        assert world.clock.monotonic_s() - began_s >= 0.3
        assert await greatest_claim(world.objects) == 2


async def test_of_two_restores_of_one_bucket_one_wins_and_the_other_writes_nothing_into_it() -> None:
    async with World(real=True) as world:
        await persisted(world, 3)
        uuid = (await manifest_of(world)).domains[0]
        one, two = MemoryConsensus(world.clock), MemoryConsensus(world.clock)
        lost: list[ClusterReplacedError] = []

        async def restore(into: MemoryConsensus) -> None:
            try:
                await Restorer(into, world.objects, world.clock, world.rand).run()
            except ClusterReplacedError as error:
                lost.append(error)

        await asyncio.gather(restore(one), restore(two))
        [said] = lost
        assert "the bucket belongs to another cluster" in str(said)
        assert "bucket_incarnation=2" in str(said)
        manifests = await keys(world, f"metastore/{uuid}/manifest/")
        found = {each: await read_cluster(each) for each in (one, two)}
        [loser] = [each for each, cluster in found.items() if cluster is None or cluster[0].restoring]
        with pytest.raises(ClusterReplacedError):
            await Restorer(loser, world.objects, world.clock, world.rand).run()
        assert await keys(world, f"metastore/{uuid}/manifest/") == manifests


async def test_the_old_cluster_finds_that_it_was_replaced() -> None:
    async with World(real=True) as world:
        await persisted(world, 3)
        mine = await manifest_of(world)
        await Restorer(MemoryConsensus(world.clock), world.objects, world.clock, world.rand).run()
        with pytest.raises(ClusterReplacedError, match=r"has been replaced.*incarnation=1.*bucket_incarnation=2"):
            await Presence(world.objects, world.clock, world.rand, "n1").publish(mine)


async def test_an_empty_bucket_has_nothing_to_restore() -> None:
    clock = SystemClock()
    with pytest.raises(MissingError, match="contains no cluster"):
        await Restorer(MemoryConsensus(clock), MemoryObjects(clock), clock, Rand()).run()


async def test_a_damaged_newest_manifest_is_named_and_an_older_one_can_be_chosen() -> None:
    async with World(real=True) as world:
        await persisted(world, 3)
        uuid = (await manifest_of(world)).domains[0]
        [older, *_] = await keys(world, f"metastore/{uuid}/manifest/")
        upper = (await world.table.frontiers())[1]
        await persisted(world, 3)
        newest = (await keys(world, f"metastore/{uuid}/manifest/"))[-1]
        assert newest != older
        await damage(world, newest)
        fresh = MemoryConsensus(world.clock)
        with pytest.raises(CorruptError, match=newest):
            await Restorer(fresh, world.objects, world.clock, world.rand).run()
        assert await fresh.scan("") == []
        for wrong in ("metastore/nobody/manifest/1", "l0/1/x"):
            with pytest.raises(InvalidError, match="not a manifest of this cluster"):
                await Restorer(fresh, world.objects, world.clock, world.rand).run([wrong])
        await Restorer(fresh, world.objects, world.clock, world.rand).run([older])
        shard = await open_shard(fresh, world.objects, world.clock, world.rand, "table")
        assert (await shard.frontiers())[1] == upper
        await shard.aclose()
        # and what was passed over is passed over by the next restore as well
        third = MemoryConsensus(world.clock)
        await Restorer(third, world.objects, world.clock, world.rand).run()
        shard = await open_shard(third, world.objects, world.clock, world.rand, "table")
        assert (await shard.frontiers())[1] == upper
        await shard.aclose()


@pytest.mark.parametrize("prefix", [CLUSTER_PREFIX, ALIVE_PREFIX])
async def test_a_damaged_cluster_object_is_named(prefix: str) -> None:
    async with World(real=True) as world:
        await persisted(world, 2)
        await Presence(world.objects, world.clock, world.rand, "n1").publish(await manifest_of(world))
        key = (await keys(world, prefix))[-1]
        await damage(world, key)
        with pytest.raises(CorruptError, match=key):
            await Restorer(MemoryConsensus(world.clock), world.objects, world.clock, world.rand).run()


async def test_captures_wait_to_be_compared_and_tables_that_came_back_short_start_over() -> None:
    async with World(real=True) as world:
        for name in ("shop.public.whole", "shop.public.short"):
            await world.catalogue.create_topic(name, 1, kind="capture")
        snapshot = TableSnapshot(1, 2, (), 3, 0, (0,))
        short = TableSnapshot(1, 2, (), 3, 5, (5,))
        await world.catalogue.put(CaptureRow("shop", "1", "s", "p", 1, True))
        for name, at in (("whole", snapshot), ("short", short)):
            row = CaptureTableRow("shop", f"public.{name}", f"shop.public.{name}", snapshot=at)
            await world.catalogue.change_table("shop", row.table, lambda _, row=row: row)  # type: ignore[misc]
        await persisted(world, 2)
        fresh = MemoryConsensus(world.clock)
        done = await Restorer(fresh, world.objects, world.clock, world.rand).run()
        assert done.captures_marked == 1
        async with restored_world(world, fresh) as (_, catalogue, _):
            [back] = await catalogue.list(CaptureRow)
            assert (back.restored, back.snapshot_done) == (True, False)
            tables = {table.table: table.snapshot for table in await catalogue.tables("shop")}
            assert tables == {"public.whole": snapshot, "public.short": None}


async def test_a_run_that_was_paused_marks_no_capture_of_the_cluster_that_has_gone_on() -> None:
    """Another run of the attempt has finished the restore, and nodes have started: they own the row now."""
    async with World(real=True) as world:
        from msgspec.structs import replace

        row = CaptureRow("shop", "1", "s", "p", 1, True)
        await world.catalogue.put(row)
        await persisted(world, 1)
        fresh = MemoryConsensus(world.clock)
        paused = Restorer(fresh, world.objects, world.clock, world.rand)
        mark, there, going = paused._mark_captures, asyncio.Event(), asyncio.Event()

        async def slowly(*args: Any) -> int:
            there.set()
            await going.wait()
            return await mark(*args)

        paused._mark_captures = slowly  # type: ignore[method-assign,assignment]
        first = asyncio.ensure_future(paused.run())
        await there.wait()
        # Simulate that the first run's process is frozen: take its lease away.
        for lease in await fresh.leases("metastore/"):
            await fresh.release(lease.name, lease.holder, lease.term)
        await Restorer(fresh, world.objects, world.clock, world.rand).run()
        async with restored_world(world, fresh) as (_, catalogue, _):
            [back] = await catalogue.list(CaptureRow)
            await catalogue.put(replace(back, restored=False, snapshot_done=True, generation=9))
            going.set()
            await asyncio.wait([first])
            [now] = await catalogue.list(CaptureRow)
            assert (now.restored, now.snapshot_done, now.generation) == (False, True, 9)


async def test_nothing_is_collected_while_a_restore_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    async with World(real=True) as world:
        await persisted(world, 2)
        delays: list[int] = []
        open_domain = domain.Domain.open

        async def noted(*args: Any, **options: Any) -> domain.Domain:
            opened = await open_domain(*args, **options)
            delays.append(opened._settings.options.gc_delay_ms)
            return opened

        monkeypatch.setattr(domain.Domain, "open", noted)
        await Restorer(MemoryConsensus(world.clock), world.objects, world.clock, world.rand).run()
        assert delays and min(delays) >= 12 * 3_600_000


async def test_committed_offsets_come_back_and_none_is_beyond_its_partition() -> None:
    async with World(real=True) as world:
        topic_id = world.topic.topic_id
        for _ in range(4):
            await world.step()
        end = (await world.topics.offsets(topic_id, 0)).high_watermark
        kept = [
            GroupOffsetRow("kept", topic_id, 0, end - 1, 3, "note", 77, 99),
            GroupOffsetRow("kept", topic_id, 1, 0),
            GroupOffsetRow("old", topic_id, 0, end),
        ]
        head = GroupRow("kept", protocol_type="consumer", generation=4, leader="m", members=1)
        member = GroupMemberRow("kept", "m", None, "c", "/h", 1, 1, (("range", b"x"),), b"y")
        ahead = GroupOffsetRow("ahead", topic_id, 0, end + 70)
        await world.metastore.commit(
            [*map(GROUP_OFFSETS.encode, kept[:2]), GROUPS.encode(head), GROUP_MEMBERS.encode(member)]
        )
        # Groups of the time before head rows.
        await world.metastore.commit([GROUP_OFFSETS.encode(kept[2])])
        await world.metastore.commit([GROUP_OFFSETS.encode(ahead)])
        await persisted(world, 1)
        await world.metastore.flush(30)
        end = (await world.topics.offsets(topic_id, 0)).high_watermark
        fresh = MemoryConsensus(world.clock)
        done = await Restorer(fresh, world.objects, world.clock, world.rand).run()
        assert done.group_offsets_cut == 1
        metastore = create_metastore(fresh, world.objects, world.clock, world.rand)
        try:
            cut = msgspec.structs.replace(ahead, offset=end)
            assert await metastore.rows(GROUP_OFFSETS) == [cut, *kept]
            heads = {row.group: row for row in await metastore.rows(GROUPS)}
            assert heads.keys() == {"ahead", "kept", "old"} and heads["kept"] == head
            assert await metastore.rows(GROUP_MEMBERS) == [member]
        finally:
            await metastore.aclose()


async def test_a_topic_that_grew_after_its_row_was_persisted_keeps_the_partitions_that_came_back() -> None:
    async with World(real=True, domains=3) as world:
        topic = world.topic
        await persisted(world, 2)
        beyond = PartitionRow(topic.topic_id, topic.partitions + 1, 0, 0)
        await world.metastore.commit([PARTITIONS.encode(beyond)])
        await world.metastore.flush(30)
        fresh = MemoryConsensus(world.clock)
        done = await Restorer(fresh, world.objects, world.clock, world.rand).run()
        assert done.findings.clean, done.findings.broken
        async with restored_world(world, fresh) as (_, catalogue, topics):
            [back] = await catalogue.list(TopicRow)
            assert (back.partitions, back.topic_id) == (topic.partitions + 2, topic.topic_id)
            record = encode_batch([Record(None, b"v")])
            assert (await topics.produce_nowait(topic.topic_id, topic.partitions + 1, record)).base_offset == 0


async def test_idempotent_producers_go_on_after_their_tail_was_lost() -> None:
    """A retry of a restored batch is recognised as a duplicate. A lost batch is reported as a gap until the producer
    sends it again or begins a new epoch."""
    async with World(real=True) as world:
        topic_id, sequences = world.topic.topic_id, iter(range(1000))

        async def produce(topics: LocalTopics, first: int, count: int = 1, epoch: int = 0) -> int:
            record = Record(None, b"v", (), 1000 + next(sequences))
            batch = encode_batch([record] * count, producer_id=77, producer_epoch=epoch, base_sequence=first)
            return (await topics.produce_nowait(topic_id, 0, batch)).base_offset

        await produce(world.topics, 0)
        kept = await produce(world.topics, 1)
        await persisted(world, 1)
        end = (await world.topics.offsets(topic_id, 0)).high_watermark
        for first in (2, 3, 4):
            await produce(world.topics, first)
        fresh = MemoryConsensus(world.clock)
        await Restorer(fresh, world.objects, world.clock, world.rand).run()
        async with restored_world(world, fresh) as (_, _, topics):
            assert await produce(topics, 1) == kept
            with pytest.raises(OutOfOrderSequenceError):
                await produce(topics, 5)
            assert (await topics.offsets(topic_id, 0)).high_watermark == end, "nothing of it was taken"
            assert await produce(topics, 2) == end
            assert await produce(topics, 3) == end + 1
            with pytest.raises(OutOfOrderSequenceError):
                await produce(topics, 5)
            assert await produce(topics, 0, epoch=1) == end + 2
            assert await produce(topics, 1, epoch=1) == end + 3
            with pytest.raises(InvalidProducerEpochError):
                await produce(topics, 4)


class Loses(MemoryConsensus):
    """Consensus that loses the first answer to every write of a restore, before or after its effect."""

    def __init__(self, clock: Any, landed: bool) -> None:
        super().__init__(clock)
        self._landed = landed
        self.lost: set[str] = set()

    async def append(self, log: str, *args: Any) -> LogHead:
        return await self._maybe(log, super().append(log, *args), log.startswith("metastore/"))

    async def cas(self, key: str, *args: Any) -> Versioned:
        return await self._maybe(key, super().cas(key, *args), False)

    async def _maybe(self, name: str, write: Awaitable[T], spared: bool) -> T:
        if spared or name in self.lost:
            return await write
        self.lost.add(name)
        if self._landed:
            await write
        else:
            write.close()  # type: ignore[attr-defined]
        raise UnknownOutcomeError(f"The answer was lost: name={name}.")


@pytest.mark.parametrize("landed", [False, True])
async def test_a_lost_answer_is_neither_an_error_nor_taken_for_somebody_else(landed: bool) -> None:
    async with World(real=True) as world:
        await persisted(world, 2)
        fresh = Loses(world.clock, landed)
        done = await Restorer(fresh, world.objects, world.clock, world.rand).run()
        assert done.findings.clean and len(fresh.lost) > 10
        await check_everything_is_back(world, fresh)


async def test_node_ids_come_back() -> None:
    async with World(real=True) as world:
        membership = Membership(world.consensus, "n7", NodeInfo(), world.clock, world.rand)
        await membership.start()
        await membership.aclose()
        await persisted(world, 1)
        fresh = MemoryConsensus(world.clock)
        await Restorer(fresh, world.objects, world.clock, world.rand).run()
        for name, node_id in (("n8", 2), ("n7", 1)):
            again = Membership(fresh, name, NodeInfo(), world.clock, world.rand)
            await again.start()
            assert [m.node_id for m in again.members()] == [node_id]
            await again.aclose()


async def test_a_restored_domain_is_above_every_epoch_that_names_anything_in_its_bucket() -> None:
    async with World(real=True) as world:
        await persisted(world, 2)
        [uuid] = (await manifest_of(world)).domains
        left_over = FileName(70, 3, "deadbeef")
        await SstFiles(world.objects, f"metastore/{uuid}/").put(left_over, b"of a leader that nobody saw end")
        fresh = MemoryConsensus(world.clock)
        await Restorer(fresh, world.objects, world.clock, world.rand).run()
        async with restored_world(world, fresh) as (metastore, _, _):
            [domain] = await metastore.domains()
            await domain.wait_until_leading(10)  # type: ignore[attr-defined]
            assert domain.state.epoch(domain.term) > 70  # type: ignore[attr-defined]
            assert domain.state.manifest.epoch > 70  # type: ignore[attr-defined]


async def test_reports_of_nodes_that_found_consensus_empty_do_not_prevent_the_restore_that_they_ask_for() -> None:
    async with World(real=True) as world:
        await persisted(world, 2)
        fresh = MemoryConsensus(world.clock)
        board = StatusBoard(fresh, world.rand)
        facts: dict[str, object] = {"error": "consensus has no cluster, but the bucket has one"}
        await board.publish(StatusReport("node:n1", world.clock.now_ms(), (), facts))
        assert await fresh.scan("")
        restorer = Restorer(fresh, world.objects, world.clock, world.rand)
        await restorer.run()
        await board.publish(StatusReport("node:n1", world.clock.now_ms(), (), facts))
        with pytest.raises(InvalidError, match=r"not empty.*metastore/cluster"):
            await restorer.run()


async def test_an_object_of_a_newer_format_is_told_from_a_damaged_one() -> None:
    async with World(real=True) as world:
        await persisted(world, 1)
        [key] = await keys(world, CLUSTER_PREFIX)
        data = (await world.objects.get(key))[:-4]
        data = data[:4] + (9).to_bytes(2, "little") + data[6:]
        await world.objects.delete(key)
        await world.objects.put(key, data + int(crc32c.crc32c(data)).to_bytes(4, "little"))
        with pytest.raises(InvalidError, match=f"newer version.*object={key} format=9 known=1"):
            await Restorer(MemoryConsensus(world.clock), world.objects, world.clock, world.rand).run()


async def test_the_register_of_an_unfinished_restore_says_where_from() -> None:
    async with World(real=True) as world:
        await persisted(world, 2)
        fresh = MemoryConsensus(world.clock)
        await Restorer(fresh, world.objects, world.clock, world.rand).run()
        found = await read_cluster(fresh)
        assert found is not None and found[0].label == (await world.metastore.cluster()).uuid
        with pytest.raises(InvalidError, match="not empty"):
            await Restorer(fresh, world.objects, world.clock, world.rand).run()
