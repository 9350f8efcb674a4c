"""Moving into L1 in rounds: the batches that move, the state after a fault, and no visible difference for readers."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from functools import partial
from itertools import pairwise

import msgspec
import pytest

from support.topics.l1_world import L1World, produced
from support.topics.transactions import Coordinator, committed, data, open_node, planned, shown
from support.topics.world import Append, batch, fetch, values_of
from support.waiting import until
from tidemill.base.errors import ConflictError, CorruptError, UnavailableError, UnknownOutcomeError
from tidemill.consensus.api import LogHead
from tidemill.objects.store import Buffer
from tidemill.topics.api import Marker, OffsetOutOfRangeError, ProduceTransaction
from tidemill.topics.batch import Record, encode_batch
from tidemill.topics.batch.header import is_intact
from tidemill.topics.l1.object_planner import ROUND_BATCHES_TARGET, moved_share, next_interval_s, select_terms
from tidemill.topics.l1.reconciler import RoundResult
from tidemill.topics.local_topics import LocalTopics
from tidemill.topics.lost_objects import drop_lost_object, lost_ranges
from tidemill.topics.partition_reader import LogPartitionReader

EVERY = [(i, f"{n}{half}") for i, (n, half) in enumerate((n, half) for n in range(10) for half in "ab")]


async def filled(world: L1World, count: int = 10, **settings: object) -> tuple[LocalTopics, str]:
    """Fill partition 0 with `count` batches of two records: offsets 2n and 2n+1, timestamp 1000 + n."""
    row = await world.topic()
    node = world.node(**settings)
    await produced(node, row.topic_id, *[str(n) for n in range(count)])
    return node, row.topic_id


async def all_read(world: L1World, node: LocalTopics, topic_id: str) -> list[tuple[int, str]]:
    """Fetch all records from the leader. Check that a reader in another process finds the same from every offset."""
    found: list[tuple[int, str]] = []
    at = log_start = (await node.offsets(topic_id, 0)).log_start_offset
    while True:
        got = await fetch(node, topic_id, 0, at, max_bytes=200)
        assert got.error is None, got.error
        if not got.batches:
            break
        found += [each for each in values_of(got.batches) if each[0] >= at]
        at = found[-1][0] + 1
    for start in {0, 1, at // 2, at}:
        reader = LogPartitionReader(world.consensus, world.objects, world.l1)
        planned = await reader.read(await reader.plan(topic_id, 0, start, at))
        start = max(start, log_start)
        assert [each for each in values_of(planned) if each[0] >= start] == [each for each in found if each[0] >= start]
    return found


async def test_nothing_to_move_makes_no_object() -> None:
    async with L1World() as world:
        node, topic_id = await filled(world, 0)
        assert (await world.move(node, topic_id)).size_bytes == 0
        await produced(node, topic_id, "x")
        assert (await world.move(node, topic_id)).size_bytes > 0
        assert (await world.move(node, topic_id)).size_bytes == 0, "an empty second round"
        assert len(await world.keys("l1/")) == len(await world.object_rows(topic_id)) == 1


async def test_what_moved_is_read_from_l1_as_it_was_and_the_hot_state_is_empty() -> None:
    async with L1World(cache_bytes=0) as world:
        node, topic_id = await filled(world)
        before = await all_read(world, node, topic_id)
        done = await world.move(node, topic_id)
        assert done.failed is None and not done.full
        state = world.state(node, topic_id)
        assert (state.reconciled, len(state), state.object_keys) == (20, 0, [])
        assert await world.extents(topic_id) == [(0, 19)]
        await world.forget_l0(node)
        assert await world.keys("l0/") == []
        assert await all_read(world, node, topic_id) == before == EVERY
        await produced(node, topic_id, "new")
        assert (await all_read(world, node, topic_id))[18:] == [*EVERY[18:], (20, "newa"), (21, "newb")]


async def test_several_partitions_share_an_object() -> None:
    async with L1World() as world:
        node, topic_id = await filled(world, 2)
        await produced(node, topic_id, "x", "y", partition=1)
        await world.move(node, topic_id)
        [row] = await world.object_rows(topic_id)
        assert await world.extents(topic_id, 0) == await world.extents(topic_id, 1) == [(0, 3)]
        weights = [e.weight_bytes for p in (0, 1) for e in await world.extent_rows(topic_id, p)]
        assert (row.total_bytes, row.removed_bytes, row.registered) == (sum(weights), 0, True)
        read = await world.reader.read(await world.reader.plan(topic_id, 1, 0, 4))
        assert [value for _, value in values_of(read)] == ["xa", "xb", "ya", "yb"]


@pytest.mark.parametrize("room", [1, 150, 300])
async def test_a_small_budget_moves_it_in_several_objects_and_one_batch_always_fits(room: int) -> None:
    async with L1World(l1_object_bytes=room) as world:
        node, topic_id = await filled(world)
        await produced(node, topic_id, "x", "y", partition=1)
        rounds = 0
        while (await world.move(node, topic_id)).full:
            rounds += 1
        assert 12 * 75 // max(room, 75) - 2 <= rounds <= 12
        for partition, end in ((0, 20), (1, 4)):
            assert world.state(node, topic_id, partition).reconciled == end
            spans = await world.extents(topic_id, partition)
            assert spans[0][0] == 0 and spans[-1][1] == end - 1
            assert all(one[1] + 1 == other[0] for one, other in pairwise(spans))
        assert await all_read(world, node, topic_id) == EVERY


async def test_a_partition_whose_object_cannot_be_read_is_left_out_and_resumes() -> None:
    """One of three partitions fails; the next round moves it."""
    async with L1World(cache_bytes=0) as world:
        node, topic_id = await filled(world, 2)
        await produced(node, topic_id, "x", partition=1)
        broken = world.state(node, topic_id, 1).object_keys[0]
        real = world.objects.get_ranges

        async def get_ranges(key: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
            if key == broken:
                raise UnavailableError("the store is away.")
            return await real(key, ranges)

        world.objects.get_ranges = get_ranges  # type: ignore[method-assign]
        done = await world.move(node, topic_id)
        assert done.size_bytes and isinstance(done.failed, UnavailableError)
        assert world.state(node, topic_id, 0).reconciled == 4
        assert world.state(node, topic_id, 1).reconciled == 0
        world.objects.get_ranges = real  # type: ignore[method-assign]
        assert (await world.move(node, topic_id)).failed is None
        assert world.state(node, topic_id, 1).reconciled == 2


@pytest.mark.parametrize("at_rest", [False, True])
async def test_f251_bits_that_a_store_flips_in_an_answer_are_not_stored_for_good(at_rest: bool) -> None:
    """RC4: a second read is correct. If the object itself is damaged, its batch is copied unchanged."""
    async with L1World(cache_bytes=0) as world:
        node, topic_id = await filled(world, 3)
        broken = world.state(node, topic_id).object_keys[0]
        real, flips = world.objects.get_ranges, [True]

        async def get_ranges(key: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
            found = [bytearray(each) for each in await real(key, ranges)]
            if key == broken and (at_rest or flips):
                flips.clear()
                found[0][-1] ^= 1
            return [bytes(each) for each in found]

        world.objects.get_ranges = get_ranges  # type: ignore[method-assign]
        assert (await world.move(node, topic_id)).failed is None
        world.objects.get_ranges = real  # type: ignore[method-assign]
        assert world.state(node, topic_id).reconciled == 6
        got = await fetch(node, topic_id, 0, 0)
        assert [is_intact(each) for each in got.batches] == [not at_rest, True, True]
        if not at_rest:
            assert await all_read(world, node, topic_id) == EVERY[:6]


@pytest.mark.parametrize("which", [[0], [1], [2], [0, 1, 2], [1, 2]])
async def test_f250_what_was_lost_for_good_is_passed_over_once_it_is_let_go_and_not_before(which: list[int]) -> None:
    """Three batches are in three objects. Another partition is not delayed."""
    async with L1World(cache_bytes=0) as world:
        node, topic_id = await filled(world, 3)
        await produced(node, topic_id, "x", partition=1)
        state = world.state(node, topic_id)
        keys = [state.batch_ref(index).object_key for index in which]
        for key in keys:
            await world.objects.delete(key)
        found = await lost_ranges(world.objects, [(0, state), (1, world.state(node, topic_id, 1))])
        assert sorted((each.start, each.end, each.let_go) for each in found) == [
            (2 * n, 2 * n + 2, False) for n in which
        ]
        for _ in range(2):
            assert isinstance((await world.move(node, topic_id)).failed, CorruptError)
        assert state.reconciled == 0 and world.state(node, topic_id, 1).reconciled == 2
        assert isinstance((await fetch(node, topic_id, 0, 2 * which[0])).error, CorruptError)
        for key in keys[1:]:
            await drop_lost_object(world.objects, key)
        assert isinstance((await world.move(node, topic_id)).failed, CorruptError), "one of them may come back"
        for key in keys:
            await drop_lost_object(world.objects, key)
        assert isinstance((await fetch(node, topic_id, 0, 2 * which[0])).error, CorruptError), "nothing is read from it"
        assert all(each.let_go for each in await lost_ranges(world.objects, [(0, state)]))
        assert (await world.move(node, topic_id)).failed is None
        assert state.reconciled == 6 and await world.extents(topic_id) == [(0, 5)]
        await world.forget_l0(node)
        assert await world.keys("l0/") == []
        await produced(node, topic_id, "3")
        left = [(offset, value) for offset, value in EVERY[:8] if offset // 2 not in which]
        assert await all_read(world, node, topic_id) == left


async def test_an_object_that_is_there_is_not_let_go() -> None:
    async with L1World(cache_bytes=0) as world:
        node, topic_id = await filled(world, 1)
        [key] = world.state(node, topic_id).live_objects()
        with pytest.raises(ConflictError):
            await drop_lost_object(world.objects, key)
        assert await lost_ranges(world.objects, [(0, world.state(node, topic_id))]) == []
        assert await all_read(world, node, topic_id) == EVERY[:2]


async def test_an_upload_that_fails_moves_nothing_and_a_later_round_does() -> None:
    async with L1World() as world:
        node, topic_id = await filled(world)
        real = world.objects.put

        async def put(key: str, data: Buffer | Sequence[Buffer]) -> None:
            if key.startswith("l1/"):
                raise UnknownOutcomeError("the answer was lost.")
            await real(key, data)

        world.objects.put = put  # type: ignore[method-assign]
        done = await world.move(node, topic_id)
        assert isinstance(done.failed, UnknownOutcomeError) and world.state(node, topic_id).reconciled == 0
        [row] = await world.object_rows(topic_id)
        assert not row.registered, "it expires"
        world.objects.put = real  # type: ignore[method-assign]
        await world.move(node, topic_id)
        assert await all_read(world, node, topic_id) == EVERY


@pytest.mark.parametrize("landed", [True, False], ids=["it landed", "it did not"])
async def test_an_add_that_nobody_answers_is_corrected_by_the_next_round(landed: bool) -> None:
    async with L1World() as world:
        node, topic_id = await filled(world)
        await world.checkpoint()
        reconciler = world.reconciler(node)
        real = world.rows.add

        async def add(request: object) -> dict[int, int]:
            if landed:
                await real(request)  # type: ignore[arg-type]
            raise UnknownOutcomeError("nobody answers.")

        world.rows.add = add  # type: ignore[method-assign,assignment]
        assert isinstance((await reconciler.run_round(topic_id, range(2))).failed, UnknownOutcomeError)
        assert world.state(node, topic_id).reconciled == 0
        world.rows.add = real  # type: ignore[method-assign]
        done = await world.move(node, topic_id)
        assert (done.size_bytes == 0) == landed, "what landed is not moved again"
        assert world.state(node, topic_id).reconciled == 20
        assert await world.extents(topic_id) == [(0, 19)]
        assert await all_read(world, node, topic_id) == EVERY


async def test_a_log_that_is_not_told_is_told_by_the_next_leader() -> None:
    """The record with `reconciled` fails permanently: its leader steps down, and the next leader of the partition
    corrects the log."""
    async with L1World(append_budget_s=0.0) as world:
        node, topic_id = await filled(world)
        await world.checkpoint()

        async def refuse(_: Append) -> LogHead:
            raise UnavailableError("consensus is away.")

        led = node._led[topic_id, 0]
        world.consensus.on_append = refuse
        done = await world.round(node, topic_id)
        assert done.failed is None
        await until(lambda: led.closed_error is not None)
        world.consensus.on_append = None
        await until(lambda: (topic_id, 0) in node._led and node._led[topic_id, 0].is_open)
        assert world.state(node, topic_id).reconciled == 0
        again = await world.move(node, topic_id)
        assert again.size_bytes == 0 and world.state(node, topic_id).reconciled == 20
        assert await all_read(world, node, topic_id) == EVERY


async def test_f15_two_leaders_that_reconcile_at_once_copy_nothing_twice() -> None:
    async with L1World() as world:
        old, topic_id = await filled(world)
        await world.checkpoint()
        deposed = world.reconciler(old)
        new = world.node()
        await produced(new, topic_id, "x")  # fences the old one, which does not know it
        await world.checkpoint()
        done = await asyncio.gather(deposed.run_round(topic_id, range(2)), world.round(new, topic_id))
        assert [each.failed for each in done] == [None, None]
        await new._commits.drain(30.0)
        spans = await world.extents(topic_id)
        assert spans in ([(0, 19)], [(0, 21)])
        assert sum(row.total_bytes - row.removed_bytes for row in await world.object_rows(topic_id)) == sum(
            extent.weight_bytes for extent in await world.extent_rows(topic_id)
        )
        await world.move(new, topic_id)
        assert (await world.extents(topic_id))[-1][1] == 21
        assert await all_read(world, new, topic_id) == [*EVERY, (20, "xa"), (21, "xb")]


async def test_nothing_moves_that_its_checkpoint_row_does_not_hold_yet() -> None:
    """X1: after a restore, offsets beyond that row belong to other records, so L1 must not contain them."""
    async with L1World() as world:
        node, topic_id = await filled(world, 3)
        reconciler = world.reconciler(node)
        assert (await reconciler.run_round(topic_id, range(2))).size_bytes == 0
        await world.checkpoint()
        await produced(node, topic_id, "late")
        assert (await reconciler.run_round(topic_id, range(2))).size_bytes > 0
        await node._commits.drain(30.0)
        assert await world.extents(topic_id) == [(0, 5)] and world.state(node, topic_id).hot_start == 6


async def test_times_are_answered_over_both() -> None:
    async with L1World() as world:
        node, topic_id = await filled(world, 6)
        await world.move(node, topic_id)
        await produced(node, topic_id, "6", "7", at_ms=1006)
        await world.move(node, topic_id)
        await produced(node, topic_id, "8", "9", at_ms=1008)
        assert world.state(node, topic_id).reconciled == 16
        for at_ms in range(995, 1012):
            expected = (max(0, at_ms - 1000) * 2, max(1000, at_ms)) if at_ms <= 1009 else None
            assert await node.offset_for_time(topic_id, 0, at_ms) == expected, at_ms
        world.led_start = node._led[topic_id, 0].advance_log_start(7)  # type: ignore[attr-defined]
        await node._commits.drain(30.0)
        assert await node.offset_for_time(topic_id, 0, 0) == (7, 1003), "within a batch"
        assert await node.offset_for_time(topic_id, 0, 1008) == (16, 1008)


async def test_a_time_asked_for_while_its_records_move_is_told_to_come_again() -> None:
    async with L1World(cache_bytes=0) as world:
        node, topic_id = await filled(world, 3)
        get_ranges = world.objects.get_ranges

        async def late(key: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
            world.objects.get_ranges = get_ranges  # type: ignore[method-assign]
            await world.move(node, topic_id, world.objects)  # a read of the node's is under way
            await world.objects.delete(key)
            return await get_ranges(key, ranges)

        world.objects.get_ranges = late  # type: ignore[method-assign]
        with pytest.raises(UnavailableError):
            await node.offset_for_time(topic_id, 0, 0)
        assert await node.offset_for_time(topic_id, 0, 0) == (0, 1000)


async def test_the_greatest_time_is_found_over_both_and_after_its_extent_is_gone() -> None:
    async with L1World() as world:
        row = await world.topic(partitions=1)
        node, topic_id = world.node(), row.topic_id
        for at_ms in (9000, 3000, 5000):
            await produced(node, topic_id, str(at_ms), at_ms=at_ms)
            await world.move(node, topic_id)
        await produced(node, topic_id, "hot", at_ms=4000)
        assert await node.newest_timestamp(topic_id, 0) == (0, 9000)
        assert await node.delete_records(topic_id, 0, 2) == 2
        assert await node.newest_timestamp(topic_id, 0) == (4, 5000)
        assert await node.delete_records(topic_id, 0, 6) == 6
        assert await node.newest_timestamp(topic_id, 0) == (6, 4000)


async def test_terms_are_those_that_placed_the_records() -> None:
    async with L1World() as world:
        _, topic_id = await filled(world, 2)
        new = world.node()
        await produced(new, topic_id, "x", "y")
        await world.move(new, topic_id)
        newer = world.node()
        await produced(newer, topic_id, "z")
        await world.move(newer, topic_id)
        terms = [(row.term, row.first_offset) for row in await world.rows.terms(topic_id, 0)]
        assert terms == world.state(newer, topic_id).terms
        assert [first for _, first in terms] == [0, 4, 8]


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [
        (0, 5, ((1, 0), (3, 2))),
        (2, 5, ((3, 2),)),
        (3, 5, ((3, 3),)),
        (3, 6, ((3, 3), (4, 5))),
        (9, 12, ((4, 9),)),
        (0, 2, ((1, 0),)),
    ],
)
def test_terms_of_a_range(start: int, end: int, expected: tuple[tuple[int, int], ...]) -> None:
    assert select_terms([(1, 0), (3, 2), (4, 5)], start, end) == expected


def test_the_interval_moves_towards_what_fills_an_object() -> None:
    def after(interval_s: float, size: int, *, full: bool = False, took_s: float = 0.0) -> float:
        return next_interval_s(interval_s, moved_share(size, 1000, 0), 10, 600, full=full, took_s=took_s)

    assert after(100, 1000) == 100
    assert 10 < after(100, 4000) < 50, "quickly down"
    assert 100 < after(100, 500) < 150, "slowly up"
    assert after(100, 0) == 125, "what stands in the way of all is looked at a little later"
    assert after(10, 10**9) == 10 and after(600, 0) == 600
    assert after(600, 10**9, full=True, took_s=0.4) == 0.4, "it rests for as long as it worked"
    assert after(10, 1000, full=True, took_s=10_000) == 600
    assert after(0.4, 900) == 10, "and no sooner than the least again, once there is no more"


def test_many_small_batches_of_a_partition_fill_a_round_as_well() -> None:
    assert moved_share(10, 1000, ROUND_BATCHES_TARGET) == 1.0 and moved_share(1000, 1000, 1) == 1.0
    assert moved_share(10, 1000, 0) == 0.01 and moved_share(0, 1000, 0) == 0


async def test_a_topic_that_is_written_faster_than_an_object_an_interval_is_caught_up_with() -> None:
    """Sixty objects are written together. All of them are in L1 soon after one interval, not after sixty."""
    async with L1World(reconcile=True, reconcile_min_s=1.0, reconcile_max_s=60.0, l1_object_bytes=1) as world:
        row = await world.topic()
        node = world.reconciling()
        await node.start()
        await produced(node, row.topic_id, *map(str, range(60)))
        await world.checkpoint()
        await until(lambda: world.state(node, row.topic_id).reconciled == 120)
        assert len(await world.extents(row.topic_id)) == 60


async def test_retention_passes_extents_and_what_is_hot_alike() -> None:
    async with L1World(retention_check_s=3600) as world:
        row = await world.catalogue.create_topic("r", 1, config={"retention.ms": "1000"})
        node = world.node()
        await node.refresh()
        now_ms = world.clock.now_ms()
        await produced(node, row.topic_id, "a", "b", at_ms=now_ms - 9000)
        await world.move(node, row.topic_id)
        await produced(node, row.topic_id, "c", at_ms=now_ms - 8000)
        await world.move(node, row.topic_id)
        await produced(node, row.topic_id, "d", at_ms=now_ms - 7000)
        await produced(node, row.topic_id, "e", at_ms=now_ms + 10**6)
        assert await world.extents(row.topic_id) == [(0, 3), (4, 5)]
        await node.retainer.run_round(node._rows.topics)
        await node._commits.drain(30.0)
        assert world.state(node, row.topic_id).log_start == 8
        assert await all_read(world, node, row.topic_id) == [(8, "ea"), (9, "eb")]
        assert isinstance((await fetch(node, row.topic_id, 0, 3)).error, OffsetOutOfRangeError)
        await world.move(node, row.topic_id)
        assert await world.extents(row.topic_id) == [(8, 9)]
        assert await all_read(world, node, row.topic_id) == [(8, "ea"), (9, "eb")]


@pytest.mark.parametrize("limit", [0, 70, 150, 300, 500, 10_000])
async def test_retention_by_size_counts_both(limit: int) -> None:
    """The result equals that of a log without L1, except that the extent which holds the boundary is kept whole."""
    async with L1World(retention_check_s=3600, l1_object_bytes=150) as world:
        row = await world.catalogue.create_topic("r", 1, config={"retention.bytes": str(limit)})
        node = world.node()
        await node.refresh()
        await produced(node, row.topic_id, *"abcdefgh")
        size = len(batch("aa", "ab"))
        await world.move(node, row.topic_id)
        await world.move(node, row.topic_id)
        spans = await world.extents(row.topic_id)
        for _ in range(3):  # the rows of what went are still there: it goes once
            await node.retainer.run_round(node._rows.topics)
            await node._commits.drain(30.0)
        exact = max(0, 8 - -(-limit // size)) * 2
        expected = max([base for base, _ in spans if base <= exact], default=0) if exact < spans[-1][1] else exact
        assert world.state(node, row.topic_id).log_start == expected
        assert [offset for offset, _ in await all_read(world, node, row.topic_id)] == list(range(expected, 16))


@pytest.mark.parametrize("start", [1, 3, 5, 8, 13, 15, 20])
async def test_a_log_that_was_cut_anywhere_moves_on_from_there(start: int) -> None:
    """Cuts: before the first move, inside a batch, inside L1, beyond it, at the end."""
    async with L1World(l1_object_bytes=300) as world:
        node, topic_id = await filled(world)
        for cut_first in (True, False):
            if cut_first:
                node._led[topic_id, 0].advance_log_start(1)
                await node._commits.drain(30.0)
            else:
                node._led[topic_id, 0].advance_log_start(start)
                await node._commits.drain(30.0)
            await world.move(node, topic_id)
            await world.move(node, topic_id)
        for _ in range(10):
            await world.move(node, topic_id)
        assert world.state(node, topic_id).hot_start == 20
        assert await all_read(world, node, topic_id) == EVERY[start:]
        spans = await world.extents(topic_id)
        assert all(one[1] + 1 == other[0] for one, other in pairwise(spans))


async def test_offsets_of_l1_that_no_extent_holds_are_told_and_not_passed_over() -> None:
    async with L1World(cache_bytes=0) as world:
        node, topic_id = await filled(world)
        await world.move(node, topic_id)
        [extent] = await world.extent_rows(topic_id)
        await world.objects.delete(extent.object_key)
        world.l1._indexes.clear()
        assert isinstance((await fetch(node, topic_id, 0, 4)).error, CorruptError)
        with pytest.raises(CorruptError):
            await world.reader.plan(topic_id, 0, 0, 20)
        from tidemill.metastore.rows import L1_EXTENTS

        await world.metastore.commit([(L1_EXTENTS.key_of(extent), b"")])
        assert isinstance((await fetch(node, topic_id, 0, 4)).error, CorruptError)


async def test_a_fetch_under_way_when_its_records_move_is_answered_or_told_to_come_again() -> None:
    async with L1World(cache_bytes=0) as world:
        node, topic_id = await filled(world)
        real, gate = world.objects.get_ranges, asyncio.Event()
        entered = asyncio.Event()

        async def get_ranges(key: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
            if not entered.is_set():
                entered.set()
                await gate.wait()
            return await real(key, ranges)

        world.objects.get_ranges = get_ranges  # type: ignore[method-assign]
        async with asyncio.TaskGroup() as group:
            under_way = group.create_task(fetch(node, topic_id, 0, 4))
            await entered.wait()
            await world.move(node, topic_id, world.objects)  # a read of the node's is under way
            await world.forget_l0(node)
            gate.set()
        assert isinstance(under_way.result().error, UnavailableError)
        again = await fetch(node, topic_id, 0, 4)
        assert again.error is None and values_of(again.batches) == EVERY[4:]


async def test_a_state_that_was_rolled_up_remembers_what_is_in_l1() -> None:
    async with L1World(rollup_records=2) as world:
        node, topic_id = await filled(world)
        await world.move(node, topic_id)
        await produced(node, topic_id, *[f"n{i}" for i in range(8)])
        await until(lambda: world.state(node, topic_id).rollup_position > 15)
        other = world.node()
        await other.offsets(topic_id, 0)
        assert world.state(other, topic_id).reconciled == 20
        assert (await all_read(world, other, topic_id))[:20] == EVERY
        assert len(await read_all_with(world, topic_id)) == 36


async def read_all_with(world: L1World, topic_id: str) -> list[tuple[int, str]]:
    end = await world.reader.high_watermark(topic_id, 0)
    return values_of(await world.reader.read(await world.reader.plan(topic_id, 0, 0, end)))


async def test_topics_that_are_written_are_reconciled_by_themselves_and_idle_ones_are_left_alone() -> None:
    async with L1World(reconcile=True, reconcile_min_s=0.01, reconcile_max_s=0.05) as world:
        row = await world.topic()
        node = world.reconciling()
        await node.start()
        await produced(node, row.topic_id, "x")
        await world.checkpoint()
        await until(lambda: world.state(node, row.topic_id).reconciled == 2)
        rounds = node.reconciliation.scheduler
        assert rounds is not None
        await until(lambda: not rounds._listed and not rounds._interval_s)
        await produced(node, row.topic_id, "y")
        await world.checkpoint()
        await until(lambda: world.state(node, row.topic_id).reconciled == 4)


async def test_only_a_compacted_topic_is_moved_where_the_others_are_not_also_when_it_becomes_one() -> None:
    async with L1World(reconcile=False, reconcile_min_s=0.01, reconcile_max_s=0.05, catalogue_poll_s=0.01) as world:
        compact = {"cleanup.policy": "compact"}
        plain = await world.topic()
        later = await world.catalogue.create_topic("later", 2)
        made = await world.catalogue.create_topic("made", 2, config=compact)
        node = world.reconciling()
        await node.start()
        for row in (plain, later, made):
            await node.produce_nowait(row.topic_id, 0, bytearray(encode_batch([Record(b"k", b"v", timestamp_ms=1)])))
        await world.checkpoint()
        await until(lambda: world.state(node, made.topic_id).reconciled == 1)
        assert world.state(node, later.topic_id).reconciled == 0
        await world.catalogue.change_topic("later", lambda row: msgspec.structs.replace(row, config=compact))
        await until(lambda: world.state(node, later.topic_id).reconciled == 1)
        assert world.state(node, plain.topic_id).reconciled == 0


async def test_committed_readers_of_l1_are_shown_whole_transactions_only_and_open_ones_stay_hot() -> None:
    async with L1World(cache_bytes=0) as world:
        row = await world.topic()
        coordinator = Coordinator()
        node = open_node(world, coordinator)
        coordinator.open = {(1, 0), (2, 0), (3, 0)}

        async def produce(*values: str, pid: int) -> None:
            await node.produce_nowait(row.topic_id, 0, data(*values, pid=pid), within=ProduceTransaction("tx"))

        await produce("good", pid=1)
        await produce("bad", pid=2)
        await node.mark(row.topic_id, 0, Marker(1, 0, True))
        await node.mark(row.topic_id, 0, Marker(2, 0, False))
        await produce("open", pid=3)
        await node.produce_nowait(row.topic_id, 0, batch("plain"))
        before = [await committed(node, row.topic_id, at) for at in range(5)]
        await world.move(node, row.topic_id)
        assert world.state(node, row.topic_id).reconciled == 4 == world.state(node, row.topic_id).last_stable
        await world.forget_l0(node)
        after = [await committed(node, row.topic_id, at) for at in range(5)]
        assert [shown(each) for each in after] == [shown(each) for each in before]
        assert shown(after[0]) == ["good"] and after[0].aborted == [(2, 1)]
        assert await planned(world, row.topic_id) == ["good"]
        await node.mark(row.topic_id, 0, Marker(3, 0, True))
        await world.move(node, row.topic_id)
        assert world.state(node, row.topic_id).reconciled == 7
        assert await planned(world, row.topic_id) == ["good", "open", "plain"]


def _is_moved(world: L1World, node: LocalTopics, topic_id: str) -> bool:
    return world.state(node, topic_id).reconciled == 2


async def test_a_round_that_breaks_is_tried_again_and_keeps_no_other_topic_waiting() -> None:
    async with L1World(reconcile=True, reconcile_min_s=0.01, reconcile_max_s=0.02) as world:
        rows = [await world.catalogue.create_topic(name, 1) for name in ("breaks", "works")]
        node = world.reconciling()
        real, broke = node.reconciler.run_round, 0

        async def round_(topic_id: str, partitions: Collection[int]) -> RoundResult:
            nonlocal broke
            if topic_id == rows[0].topic_id and broke < 3:
                broke += 1
                raise ZeroDivisionError("a bug")
            return await real(topic_id, partitions)

        node.reconciler.run_round = round_  # type: ignore[method-assign]
        await node.start()
        for row in rows:
            await produced(node, row.topic_id, "x")
        await world.checkpoint()
        for row in reversed(rows):
            await until(partial(_is_moved, world, node, row.topic_id))
        assert broke == 3


async def test_what_is_hot_and_was_opened_by_nobody_since_the_start_is_moved() -> None:
    async with L1World(reconcile=True, reconcile_min_s=0.01, reconcile_max_s=0.05) as world:
        before, topic_id = await filled(world, 2)
        await world.checkpoint()
        await before.aclose()
        node = world.reconciling()
        await node.start()
        await until(lambda: (topic_id, 0) in node._led and world.state(node, topic_id).reconciled == 4)
        assert (topic_id, 1) not in node._led, "nothing was ever in it"
