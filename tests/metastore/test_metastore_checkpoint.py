"""The checkpoint: at every moment that the bucket may preserve, inputs have reached outputs; only changes are
written."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from support.metastore.checkpoint_world import SCHEMA, Restored, Rows, World, family_rows, rows_of
from tidemill.base.clock import SystemClock
from tidemill.base.errors import CorruptError, FencedError, UnavailableError, UnknownOutcomeError
from tidemill.base.limits import METASTORE_BATCH_BYTES, METASTORE_BATCH_ROWS
from tidemill.base.runtime.coop import CoopBudget
from tidemill.consensus.memory import MemoryConsensus
from tidemill.maintenance.checkpoint import stages
from tidemill.metastore.backup import checkpoint
from tidemill.metastore.backup.checkpoint import Checkpointer, Group, pack_commits, slot_of
from tidemill.metastore.backup.restore import ATTEMPT_REGISTER, Attempt
from tidemill.metastore.cluster import domain_of
from tidemill.metastore.rows import CHECKPOINTS, EXTENTS, PARTITIONS, SHARD_BATCHES, SHARDS
from tidemill.metastore.rows.partitions import PartitionRow
from tidemill.shards.bindings.remap import encode_binding
from tidemill.shards.compaction.compaction import compact_once
from tidemill.shards.registry import drop_shard, list_created_shards, open_shard
from tidemill.shards.state.restore import restore_bindings, restore_shard
from tidemill.topics.lifecycle.checkpoint import PartitionFollower
from tidemill.topics.lifecycle.restore import restore_partition
from tidemill.topics.partition.recovery import catch_up, partition_log
from tidemill.topics.partition.state_machine.state import PartitionState


class Recorder:
    """Record the rows after every commit of one domain: a manifest might hold any of them."""

    def __init__(self, world: World) -> None:
        self.moments: list[Rows] = []
        for shared in world.shared:
            self._watch(world, shared)

    def _watch(self, world: World, shared: object) -> None:
        write = shared.write  # type: ignore[attr-defined]

        def recorded(rows: Group, expects: dict[bytes, int]) -> int:
            seqno = write(rows, expects)
            self.moments.append(rows_of(shared))  # type: ignore[arg-type]
            return int(seqno)

        shared.write = recorded  # type: ignore[attr-defined]


def check_all(recorder: Recorder) -> None:
    for rows in recorder.moments:
        Restored(rows).check()


def same_partition(a: PartitionState, b: PartitionState) -> None:
    for name in ("log_start", "high_watermark", "terms", "producers", "last_at_ms"):
        assert getattr(a, name) == getattr(b, name), name
    assert [a.batch_ref(i) for i in range(len(a))] == [b.batch_ref(i) for i in range(len(b))]
    assert list(a.highest_timestamps) == list(b.highest_timestamps)


async def check_restored_equals_live(world: World) -> None:
    rows: Rows = {}
    for shared in world.shared:
        rows |= rows_of(shared)
    restored = Restored(rows)
    restored.check()
    for (topic_id, partition), state in restored.partitions.items():
        log = partition_log(topic_id, partition)
        live, _ = await catch_up(world.consensus, world.objects, log, PartitionState())
        same_partition(state, live)
    assert restored.bindings["topic/clicks"] == await world.remap.after(0)
    for shard in (world.table, world.derived):
        await shard.frontiers()
        state = restored.shards[shard.name]
        for name in ("shard_id", "schema", "since", "upper", "batches", "holds", "writers", "rows", "size_bytes"):
            assert getattr(state, name) == getattr(shard.state, name), name


async def test_rows_hold_what_the_logs_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    async with World() as world:
        checkpointer = world.checkpointer()
        for _ in range(5):
            for _ in range(4):
                await world.step()
            await checkpointer.round()
            await check_restored_equals_live(world)


async def test_an_idle_round_writes_nothing() -> None:
    async with World() as world:
        await world.step()
        checkpointer = world.checkpointer()
        assert await checkpointer.round() > 0
        commits = world.shared[0].commits
        assert await checkpointer.round() == 0
        assert world.shared[0].commits == commits


async def test_a_round_writes_only_what_changed_and_reads_only_what_is_new() -> None:
    async with World() as world:
        checkpointer = world.checkpointer()
        for _ in range(20):
            await world.step()
        await checkpointer.round()
        seqno = world.shared[0].seqno
        reads: list[tuple[str, int]] = []
        read = world.consensus.read

        async def counted(log: str, start: int, *args: int, **kwargs: int) -> object:
            reads.append((log, start))
            return await read(log, start, *args, **kwargs)

        world.consensus.read = counted  # type: ignore[method-assign,assignment]
        await world.produce(partition=1)
        await checkpointer.round()
        changed = [key for key, row in world.shared[0].rows.items() if row.seqno > seqno]
        topic_id = world.topic.topic_id
        assert [key for key in changed if key.startswith(PARTITIONS.prefix())] == [PARTITIONS.key(topic_id, 1)]
        assert len([key for key in changed if key.startswith(EXTENTS.prefix())]) == 1
        assert not [key for key in changed if key.startswith(SHARD_BATCHES.prefix())]
        assert reads and all(start > 0 for _, start in reads), "a log was read from its start again"


async def test_crash_between_any_two_writes_keeps_inputs_at_or_beyond_outputs() -> None:
    """The world continues while each round gathers and writes. Every commit is a moment that may be restored."""
    async with World() as world:
        recorder = Recorder(world)
        moving = asyncio.ensure_future(world.move_on())
        checkpointer = world.checkpointer()
        for number in range(12):
            await checkpointer.round()
            await asyncio.sleep(0.002)
            if number % 4 == 3:
                await world.compact(world.table)
        moving.cancel()
        await asyncio.gather(moving, return_exceptions=True)
        restored = [Restored(rows) for rows in recorder.moments]
        for each in restored:
            each.check()
        assert len({r.shards["table"].upper for r in restored if "table" in r.shards}) > 8


async def test_a_round_in_many_small_commits_is_restorable_after_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "COMMIT_BYTES", 500)
    monkeypatch.setattr(checkpoint, "UNIT_BYTES", 500)
    async with World() as world:
        recorder = Recorder(world)
        checkpointer = world.checkpointer()
        for _ in range(4):
            for _ in range(10):
                await world.step(rows=2)
            await checkpointer.round()
        check_all(recorder)
        assert len(recorder.moments) > 40
        await check_restored_equals_live(world)


async def test_compaction_in_many_small_commits_is_restorable_after_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """The new since is written first, the new upper last: merged batches hold only times from the new since on."""
    monkeypatch.setattr(checkpoint, "COMMIT_BYTES", 300)
    monkeypatch.setattr(checkpoint, "UNIT_BYTES", 300)
    async with World() as world:
        recorder = Recorder(world)
        checkpointer = world.checkpointer()
        for _ in range(20):
            await world.step(rows=2)
        await checkpointer.round()
        before = len(recorder.moments)
        since, upper = await world.table.frontiers()
        await world.table.downgrade_since("test", 1, max(since, upper - 2))
        for _ in range(10):
            await world.step(rows=2)
        while await compact_once(world.table, world.objects, world.rand) is not None:
            pass
        await checkpointer.round()
        assert len(recorder.moments) > before + 5
        known = [b.lower for b in world.table.state.batches]
        for rows in recorder.moments[before:]:
            restored = Restored(rows)
            restored.check()
            table = restored.shards["table"]
            merged = [b for b in table.batches if b.parts and b.upper - b.lower > 1 and b.lower in known]
            assert table.since == world.table.state.since or not any(b.token == m.token for m in merged
                                                                     for b in world.table.state.batches)  # fmt: skip
        await check_restored_equals_live(world)


async def test_the_wrong_order_of_writing_is_found() -> None:
    """The check itself can fail: it detects outputs that were written first."""
    async with World() as world:
        recorder = Recorder(world)
        checkpointer = world.checkpointer()
        checkpointer._stages.reverse()
        await world.step()
        await checkpointer.round()
        with pytest.raises(AssertionError, match="ahead of its bindings"):
            check_all(recorder)


async def test_the_wrong_order_of_gathering_is_found() -> None:
    async with World() as world:
        recorder = Recorder(world)
        checkpointer = world.checkpointer()
        partitions, _, shards, _ = checkpointer._stages
        gather = shards.gather

        async def late() -> object:
            units = await partitions.gather()
            partitions.gather = _returning(units)  # type: ignore[method-assign]
            await world.step()
            return await gather()

        shards.gather = late  # type: ignore[method-assign,assignment]
        await world.step()
        await checkpointer.round()
        with pytest.raises(AssertionError, match="ahead of its topic"):
            check_all(recorder)


def _returning(units: object) -> Callable[[], Awaitable[object]]:
    async def gather() -> object:
        return units

    return gather


async def test_compacted_batches_replace_what_they_cover() -> None:
    async with World() as world:
        checkpointer = world.checkpointer()
        for _ in range(12):
            await world.step()
        await checkpointer.round()
        assert await world.compact(world.table)
        await world.step()
        await checkpointer.round()
        await check_restored_equals_live(world)
        assert world.table.state.since > 0


async def test_partitions_that_were_rolled_up_under_the_keeper_are_followed_on() -> None:
    async with World(rollup_records=8) as world:
        checkpointer = world.checkpointer()
        await world.step()
        await checkpointer.round()
        for _ in range(40):
            await world.produce()
        assert (await world.consensus.log_head(partition_log(world.topic.topic_id, 0))).start > 0
        await world.step()
        await checkpointer.round()
        await check_restored_equals_live(world)


async def test_a_new_keeper_goes_on_from_the_rows() -> None:
    async with World() as world:
        for _ in range(5):
            await world.step()
        await world.checkpointer("n1").round()
        for _ in range(5):
            await world.step()
        seqno = world.shared[0].seqno
        await world.checkpointer("n2").round()
        await check_restored_equals_live(world)
        old = [k for k, row in world.shared[0].rows.items() if row.seqno <= seqno and k.startswith(EXTENTS.prefix())]
        assert len(old) == 5, "extents that were there are not written again"


async def test_a_replaced_keeper_writes_nothing_any_more() -> None:
    async with World() as world:
        await world.step()
        old, new = world.checkpointer("old"), world.checkpointer("new", world.open())
        await old.round()
        await new.round()
        await world.step()
        seqno = world.shared[0].seqno
        with pytest.raises(FencedError):
            await old.round()
        assert world.shared[0].seqno == seqno
        await new.round()
        await check_restored_equals_live(world)


async def test_a_failed_commit_is_made_good_by_the_next_round() -> None:
    async with World() as world:
        checkpointer = world.checkpointer()
        await world.step()
        await checkpointer.round()
        await world.step()

        def refuse(_: Callable[[], int]) -> int:
            raise UnavailableError("the domain is away.")

        world.shared[0].fault = refuse
        with pytest.raises(UnavailableError):
            await checkpointer.round()
        await checkpointer.round()
        await check_restored_equals_live(world)


async def test_a_commit_of_unknown_outcome_is_looked_up_and_not_taken_for_another_keeper() -> None:
    async with World() as world:
        checkpointer = world.checkpointer()
        await world.step()
        await checkpointer.round()
        await world.step()

        def unheard(write: Callable[[], int]) -> int:
            write()
            raise UnknownOutcomeError("the answer was lost.")

        world.shared[0].fault = unheard
        with pytest.raises(UnknownOutcomeError):
            await checkpointer.round()
        await checkpointer.round()
        await check_restored_equals_live(world)


async def test_a_follower_keeps_no_batch_that_is_written_and_refuses_a_shorter_log() -> None:
    async with World() as world:
        for _ in range(6):
            await world.produce()
        place = (world.topic.topic_id, 0)
        follower = PartitionFollower(world.consensus, world.objects, *place, None, CoopBudget(world.clock))
        assert len(await follower.gather(world.metastore.prefix)) > 1
        assert len(follower._state) == 6
        follower.written()
        assert len(follower._state) == 0
        assert await follower.gather(world.metastore.prefix) == []
        await world.produce()
        [extent, row] = await follower.gather(world.metastore.prefix)
        assert EXTENTS.decode(*extent[0]).base_offset == 18
        follower.written()
        empty = PartitionFollower(
            MemoryConsensus(world.clock), world.objects, *place, PARTITIONS.decode(*row[0]), CoopBudget(world.clock)
        )
        with pytest.raises(CorruptError, match="holds less than its rows"):
            await empty.gather(world.metastore.prefix)


class Ticking(SystemClock):
    """A clock whose monotonic time advances by a millisecond per reading."""

    def __init__(self) -> None:
        self._ticks = itertools.count()

    def monotonic_s(self) -> float:
        return next(self._ticks) / 1_000


async def test_a_follower_of_a_long_log_leaves_others_their_turns() -> None:
    async with World() as world:
        for _ in range(100):
            await world.produce()
        place = (world.topic.topic_id, 0)
        follower = PartitionFollower(world.consensus, world.objects, *place, None, CoopBudget(Ticking(), 0.005))
        turns = 0

        async def others() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        other = asyncio.ensure_future(others())
        groups = await follower.gather(world.metastore.prefix)
        other.cancel()
        assert len(groups) > 100
        assert turns >= 2 * 100 / 5, "one for five records, in the replay and in the rows"


async def test_extents_of_a_lost_life_do_not_stand_among_those_of_the_restored_one() -> None:
    """A manifest held the first extents of a large unit, but not the partition row that counts them."""
    async with World() as world:
        topic_id = world.topic.topic_id
        for _ in range(3):
            await world.produce()
        await world.checkpointer().round()
        for _ in range(3):
            await world.produce()
        row = family_rows(PARTITIONS, rows_of(world.shared[0]))[0]
        follower = PartitionFollower(world.consensus, world.objects, topic_id, 0, row, CoopBudget(world.clock))
        lost = await follower.gather(world.metastore.prefix)
        world.shared[0].write([pair for group in lost[:-1] for pair in group], {})

        world.consensus = MemoryConsensus(world.clock)
        state = Restored(rows_of(world.shared[0])).partitions[topic_id, 0]
        assert state.high_watermark == 9
        await restore_partition(world.consensus, world.objects, world.rand, topic_id, 0, state, "attempt")
        old, world.topics = world.topics, world.open_topics()
        await old.aclose()
        world._sequences = {0: 9, 1: 0}
        await world.produce(count=5)
        checkpointer = world.checkpointer()
        await checkpointer.round()
        await world.produce(count=5)
        await checkpointer.round()
        again = Restored(rows_of(world.shared[0])).partitions[topic_id, 0]
        assert again.high_watermark == 19
        live, _ = await catch_up(world.consensus, world.objects, partition_log(topic_id, 0), PartitionState())
        same_partition(again, live)


async def test_the_rows_of_a_shard_that_was_restored_stay_until_those_of_the_restored_one_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The restored shard has another id. A manifest may be cut at any moment of the first checkpoint and be the only
    source of the next restore."""
    monkeypatch.setattr(checkpoint, "COMMIT_BYTES", 300)
    monkeypatch.setattr(checkpoint, "UNIT_BYTES", 300)
    async with World() as world:
        for _ in range(12):
            await world.step()
        await world.checkpointer().round()
        before = Restored(rows_of(world.shared[0]))
        fresh = MemoryConsensus(world.clock)
        attempt = Attempt("a1", "uuid", "key", (), 1)
        await fresh.cas(ATTEMPT_REGISTER, 0, msgspec.msgpack.encode(attempt), attempt.nonce)
        for (topic_id, partition), state in before.partitions.items():
            await restore_partition(fresh, world.objects, world.rand, topic_id, partition, state, attempt.nonce)
        for source, bindings in before.bindings.items():
            await restore_bindings(fresh, source, [encode_binding(each) for each in bindings], attempt.nonce)
        ids = {each.name: await restore_shard(fresh, world.rand, each, "a1") for each in before.shards.values()}
        old, world.consensus = [world.table, world.derived], fresh
        world.table, world.derived = [
            await open_shard(fresh, world.objects, world.clock, world.rand, shard.name, SCHEMA) for shard in old
        ]
        for shard in old:
            await shard.aclose()
        upper = (await world.table.frontiers())[1]
        await world.table.downgrade_since("test", 1, upper - 1)
        assert await compact_once(world.table, world.objects, world.rand) is not None

        recorder = Recorder(world)
        await world.checkpointer("n2").round()
        assert len(recorder.moments) > 3
        for rows in recorder.moments:
            found = Restored(rows).shards
            assert {name: (each.upper, each.rows) for name, each in found.items()} in (
                {name: (each.upper, each.rows) for name, each in before.shards.items()},
                {shard.name: (shard.state.upper, shard.state.rows) for shard in (world.table, world.derived)},
            )
        assert {row.name: row.shard_id for row in family_rows(SHARDS, rows_of(world.shared[0]))} == ids
        assert Restored(rows_of(world.shared[0])).shards["table"].batches == world.table.state.batches


async def test_a_deleted_topic_leaves_no_rows() -> None:
    async with World() as world:
        checkpointer = world.checkpointer()
        await world.step()
        await checkpointer.round()
        await world.catalogue.delete(type(world.topic), "clicks")
        await checkpointer.round()
        left = Restored(rows_of(world.shared[0]))
        assert not left.partitions and not left.bindings
        assert not [key for key in rows_of(world.shared[0]) if key.startswith(EXTENTS.prefix())]
        await world.checkpointer("n2").round()


class Interrupted:
    """A domain that accepts some writes and then none, until `end`."""

    def __init__(self, world: World, writes: int) -> None:
        self._shared = world.shared[0]
        self._write, self.left = self._shared.write, writes
        self._shared.write = self._write_some  # type: ignore[method-assign]

    def _write_some(self, rows: Group, expects: dict[bytes, int]) -> int:
        if not self.left:
            raise UnavailableError("interrupted.")
        self.left -= 1
        return self._write(rows, expects)

    def end(self) -> None:
        self._shared.write = self._write  # type: ignore[method-assign]


async def interrupted_rounds(world: World, checkpointer: Checkpointer, writes: int) -> bool:
    """Run a round that is interrupted after some writes, then one of a successor. Return whether the first one was."""
    interrupted = Interrupted(world, writes)
    try:
        await checkpointer.round()
    except UnavailableError:
        return True
    finally:
        interrupted.end()
        await world.checkpointer("successor").round()
    return False


async def test_an_interrupted_deletion_of_a_topic_leaves_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "COMMIT_BYTES", 1)
    monkeypatch.setattr(checkpoint, "UNIT_BYTES", 1)
    for writes in itertools.count():
        async with World() as world:
            checkpointer, recorder = world.checkpointer(), Recorder(world)
            for _ in range(3):
                await world.step()
                await checkpointer.round()
            await world.catalogue.delete(type(world.topic), "clicks")
            more = await interrupted_rounds(world, checkpointer, writes)
            left = rows_of(world.shared[0])
            assert not [key for key in left if key[0] in (PARTITIONS.tag, EXTENTS.tag)]
            for rows in recorder.moments:  # a partition row never counts offsets without extents
                Restored(rows)
        if not more:
            break
    assert writes >= 3


async def test_the_deletion_of_a_topic_with_many_producers_fits_into_commits() -> None:
    async with World() as world:
        rows = [PartitionRow("gone", number, 0, 10, producers=b"p" * 30_000) for number in range(300)]
        for row in rows:
            await world.metastore.commit([PARTITIONS.encode(row)])
        write, sizes = world.shared[0].write, []

        def measured(written: Group, expects: dict[bytes, int]) -> int:
            sizes.append(sum(len(key) + len(value) for key, value in written))
            return write(written, expects)

        world.shared[0].write = measured  # type: ignore[method-assign]
        await world.checkpointer().round()
        assert not [key for key in rows_of(world.shared[0]) if key.startswith(PARTITIONS.prefix("gone"))]
        assert max(sizes) < METASTORE_BATCH_BYTES


def test_a_group_of_rows_beyond_a_batch_is_reported_and_delays_only_its_thing() -> None:
    large = [(b"%06d" % number, bytes(METASTORE_BATCH_BYTES // 100)) for number in range(101)]
    assert list(checkpoint.find_too_large({"one": [large], "two": [large[:50], large[50:]]})) == ["one"]


@pytest.mark.parametrize("again", [False, True])
async def test_an_interrupted_removal_of_a_shard_leaves_no_batches(
    again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`again`: the name is used again before the successor's first round."""
    monkeypatch.setattr(checkpoint, "COMMIT_BYTES", 1)
    monkeypatch.setattr(checkpoint, "UNIT_BYTES", 1)
    monkeypatch.setattr(stages, "BATCHES_PER_GROUP", 1)
    for writes in itertools.count():
        async with World() as world:
            checkpointer = world.checkpointer()
            for _ in range(4):
                await world.step()
            await checkpointer.round()
            created = next(each for each in await list_created_shards(world.consensus) if each.name == "derived")
            await drop_shard(world.consensus, world.objects, world.clock, world.rand, created)
            interrupted = Interrupted(world, writes)
            try:
                await checkpointer.round()
                more = False
            except UnavailableError:
                more = True
            interrupted.end()
            if again:
                await world.derived.aclose()
                world.derived = await open_shard(
                    world.consensus, world.objects, world.clock, world.rand, "derived", SCHEMA
                )
                await world.step()
            await world.checkpointer("successor").round()
            rows = rows_of(world.shared[0])
            if again:
                assert Restored(rows).shards["derived"].batches == world.derived.state.batches
            else:
                assert not [key for key in rows if key.startswith(SHARD_BATCHES.prefix("derived"))]
        if not more:
            break
    assert writes >= 3


async def test_rows_are_never_overwritten_by_an_empty_consensus() -> None:
    """A new consensus with an old bucket and without a restore: the rows may be the only remaining copy."""
    async with World() as world:
        await world.step()
        await world.checkpointer().round()
        world.consensus = MemoryConsensus(world.clock)
        before = rows_of(world.shared[0])
        with pytest.raises(CorruptError, match="replaced without"):
            await world.checkpointer().round()
        after = rows_of(world.shared[0])
        key = CHECKPOINTS.key(slot_of(0, 1))
        assert {k: v for k, v in after.items() if k != key} == {k: v for k, v in before.items() if k != key}


async def test_over_several_domains_a_stage_is_durable_before_the_next_one_writes() -> None:
    """Each domain persists only when flushed; the flushed rows of all domains together respect the order."""
    async with World(domains=3) as world:
        flushed: list[Rows] = [{} for _ in world.shared]
        moments: list[Rows] = []
        for index, domain in enumerate(await world.metastore.domains()):

            async def flush(timeout_s: float | None = None, index: int = index) -> int:
                flushed[index] = rows_of(world.shared[index])
                moments.append({k: v for rows in flushed for k, v in rows.items()})
                return world.shared[index].seqno

            domain.flush = flush  # type: ignore[method-assign]
        moving = asyncio.ensure_future(world.move_on())
        checkpointer = world.checkpointer()
        for _ in range(6):
            await checkpointer.round()
            await asyncio.sleep(0.002)
        moving.cancel()
        await asyncio.gather(moving, return_exceptions=True)
        for each in moments:
            Restored(each).check()
        assert len(moments) > 20


def test_every_domain_has_a_slot_of_its_own() -> None:
    for domains in (1, 2, 3, 7):
        for domain in range(domains):
            assert domain_of(CHECKPOINTS.key(slot_of(domain, domains)), domains) == domain


def test_units_are_written_whole_while_they_fit() -> None:
    def group(name: bytes, size: int) -> Group:
        return [(name, b"x" * size)]

    units = [[group(b"a", 100), group(b"b", 100)], [group(b"c", 300), group(b"d", 300)], [group(b"e", 10)]]
    assert [[key for key, _ in rows] for rows in pack_commits(units, 600, 600)] == [[b"a", b"b"], [b"c"], [b"d", b"e"]]
    assert [[key for key, _ in rows] for rows in pack_commits(units, 300, 900)] == [[b"a", b"b"], [b"c", b"d"], [b"e"]]
    twice = [[[(b"k", b"1")], [(b"k", b"2")]]]
    assert list(pack_commits(twice, 600, 600)) == [[(b"k", b"2")]]


@pytest.mark.parametrize("rows_a_group", [1, 500, 12_000])
def test_a_commit_has_no_more_rows_than_a_batch_takes(rows_a_group: int) -> None:
    """The deletions of a large topic: few bytes, many rows."""
    deleted = [(b"%06d" % number, b"") for number in range(27_000)]
    unit = [deleted[at : at + rows_a_group] for at in range(0, len(deleted), rows_a_group)]
    commits = list(pack_commits([unit], checkpoint.COMMIT_BYTES, checkpoint.UNIT_BYTES))
    assert [row for rows in commits for row in rows] == deleted
    assert max(map(len, commits)) + 2 <= METASTORE_BATCH_ROWS


async def test_the_mark_says_how_old_the_checkpoint_is_and_who_holds_it_back() -> None:
    async with World() as world:
        checkpointer: Checkpointer = world.checkpointer()
        await world.step()
        await checkpointer.round()
        [mark] = [m for m in world.tracker.report("p", 0).marks if m.name == checkpoint.STAGE_NAME]
        assert mark.position == mark.target > 0
        age_ms = checkpointer.facts()["checkpoint_age_ms"]
        assert isinstance(age_ms, int) and age_ms < 10_000

        def refuse(_: Callable[[], int]) -> int:
            raise UnavailableError("the domain is away.")

        await world.step()
        world.shared[0].fault = refuse
        running = asyncio.ensure_future(checkpointer.run())
        while True:
            await asyncio.sleep(0.001)
            [mark] = [m for m in world.tracker.report("p", 0).marks if m.name == checkpoint.STAGE_NAME]
            if "away" in mark.reason:
                break
        assert mark.position < mark.target and mark.held_by == "metastore"
        while mark.position < mark.target or mark.reason:
            await asyncio.sleep(0.001)
            [mark] = [m for m in world.tracker.report("p", 0).marks if m.name == checkpoint.STAGE_NAME]
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
