from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from support.topics.world import World, batch, fetch, values_of
from support.waiting import DEADLINE_S, until
from tidemill.base.errors import CorruptError, InvalidError, MissingError
from tidemill.base.limits import OBJECT_CONCURRENCY
from tidemill.topics.api import BatchRef, FetchRead, NotLeaderError, OffsetOutOfRangeError
from tidemill.topics.batch.header import patch_base_offset
from tidemill.topics.batch_reads import read_batches
from tidemill.topics.fetch import fetch_planner
from tidemill.topics.fetch.fetch_planner import COLD_OBJECTS_MAX
from tidemill.topics.local_topics import LocalTopics
from tidemill.topics.partition_reader import LogPartitionReader


async def filled(world: World, count: int = 10) -> tuple[LocalTopics, str]:
    """Fill partition 0 with `count` batches of two records: offsets 2n and 2n+1, max timestamp 1000 + n."""
    row = await world.topic()
    topics = world.node()
    for n in range(count):
        await topics.produce_nowait(row.topic_id, 0, batch(f"{n}a", f"{n}b", timestamp_ms=1000 + n))
    return topics, row.topic_id


async def test_a_long_poll_wakes_when_records_arrive() -> None:
    async with World() as world:
        topics, topic_id = await filled(world, 1)
        waiting = asyncio.ensure_future(fetch(topics, topic_id, 0, 2, wait_s=600.0))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        await topics.produce_nowait(topic_id, 0, batch("new"))
        assert values_of((await waiting).batches) == [(2, "new")]


@pytest.mark.parametrize("limit", ["of the partition", "of the answer", "batches", "cold objects"])
async def test_who_is_given_all_that_an_answer_may_have_does_not_wait_for_more(
    limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with World() as world:
        monkeypatch.setattr(fetch_planner, "BATCHES_MAX", 2 if limit == "batches" else 4_096)
        monkeypatch.setattr(fetch_planner, "COLD_OBJECTS_MAX", 2 if limit == "cold objects" else 64)
        topics, topic_id = await filled(world, 3)
        size = len(batch("0a", "0b"))
        two = 2 * size + 1
        most = two if limit == "of the partition" else 1 << 20
        whole = two if limit == "of the answer" else 1 << 20
        reader = world.node() if limit == "cold objects" else topics
        read = FetchRead(topic_id, 0, 0, most)
        async with asyncio.timeout(DEADLINE_S):
            found = await reader.fetch([read], max_wait_s=10 * DEADLINE_S, min_bytes=1 << 20, max_bytes=whole)
        assert len(found[0].batches) == 2
        # Of the others nothing is left out: they wait for more.
        read = FetchRead(topic_id, 0, 2, most)
        waiting = asyncio.ensure_future(reader.fetch([read], max_wait_s=600.0, min_bytes=2 * size + 1, max_bytes=whole))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        await reader.produce_nowait(topic_id, 0, batch("new"))
        assert len((await waiting)[0].batches) >= 2


async def test_a_long_poll_ends_empty_when_its_time_is_over() -> None:
    async with World() as world:
        topics, topic_id = await filled(world, 1)
        found = await fetch(topics, topic_id, 0, 2, wait_s=0.02)
        assert (found.batches, found.error, found.high_watermark) == ([], None, 2)


async def test_min_bytes_waits_for_enough() -> None:
    async with World() as world:
        topics, topic_id = await filled(world, 1)
        size = len(batch("x" * 500))
        reads = [FetchRead(topic_id, 0, 2, 1 << 20), FetchRead(topic_id, 1, 0, 1 << 20)]
        waiting = asyncio.ensure_future(topics.fetch(reads, max_wait_s=15.0, min_bytes=2 * size, max_bytes=1 << 20))
        await topics.produce_nowait(topic_id, 0, batch("x" * 500))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        await topics.produce_nowait(topic_id, 1, batch("y" * 500))
        found = await waiting
        assert [len(f.batches) for f in found] == [1, 1]


@pytest.mark.parametrize("cache_bytes", [0, 1 << 20])
async def test_byte_limits_hold_but_one_batch_always_comes(cache_bytes: int) -> None:
    async with World(cache_bytes=cache_bytes) as world:
        topics, topic_id = await filled(world)
        size = len(batch("0a", "0b"))
        assert values_of((await fetch(topics, topic_id, 0, 4, max_bytes=1)).batches) == [(4, "2a"), (5, "2b")]
        assert len((await fetch(topics, topic_id, 0, 0, max_bytes=3 * size)).batches) == 3
        await topics.produce_nowait(topic_id, 1, batch("other"))
        reads = [FetchRead(topic_id, 0, 0, 1 << 20), FetchRead(topic_id, 1, 0, 1 << 20)]
        found = await topics.fetch(reads, max_wait_s=0, min_bytes=1, max_bytes=1)
        assert [len(f.batches) for f in found] == [1, 0]


async def test_a_fetch_in_the_middle_of_a_batch_returns_the_whole_batch() -> None:
    async with World() as world:
        topics, topic_id = await filled(world)
        found = await fetch(topics, topic_id, 0, 5)
        assert values_of(found.batches)[0] == (4, "2a")


async def test_out_of_range_is_an_error_of_that_partition_alone() -> None:
    async with World() as world:
        topics, topic_id = await filled(world)
        reads = [FetchRead(topic_id, 0, 21, 999), FetchRead(topic_id, 0, 18, 999), FetchRead(topic_id, 0, -1, 999)]
        high, good, low = await topics.fetch(reads, max_wait_s=15.0, min_bytes=1 << 20, max_bytes=1 << 20)
        assert isinstance(high.error, OffsetOutOfRangeError) and isinstance(low.error, OffsetOutOfRangeError)
        assert high.high_watermark == 20
        assert good.error is None and len(good.batches) == 1
        unknown, elsewhere = await topics.fetch(
            [FetchRead("11111111-0000-4000-8000-000000000000", 0, 0, 9), FetchRead(topic_id, 7, 0, 9)],
            max_wait_s=0,
            min_bytes=1,
            max_bytes=9,
        )
        assert isinstance(unknown.error, MissingError) and isinstance(elsewhere.error, MissingError)


async def test_nothing_is_readable_before_it_is_durable() -> None:
    async with World() as world:
        topics, topic_id = await filled(world, 1)
        gate = asyncio.Event()

        async def hold(append):  # type: ignore[no-untyped-def]
            await gate.wait()
            return await append()

        world.consensus.on_append = hold
        sent = topics.produce_nowait(topic_id, 0, batch("new"))
        found = await fetch(topics, topic_id, 0, 2, wait_s=0.02)
        assert (found.high_watermark, found.batches) == (2, [])
        gate.set()
        await sent
        assert (await fetch(topics, topic_id, 0, 2)).high_watermark == 3


async def test_recent_batches_come_from_memory_and_old_ones_in_one_read_per_object() -> None:
    async with World(cache_bytes=0) as world:
        row = await world.topic()
        topics = world.node()
        sent = [topics.produce_nowait(row.topic_id, n % 2, batch(str(n))) for n in range(10)]
        await asyncio.gather(*sent)
        reads = [FetchRead(row.topic_id, p, 0, 1 << 20) for p in (0, 1)]
        found = await topics.fetch(reads, max_wait_s=0, min_bytes=1, max_bytes=1 << 20)
        assert [len(f.batches) for f in found] == [5, 5]
        assert world.objects.gets <= world.objects.puts
        warm = world.node(cache_bytes=1 << 20)
        await warm.produce_nowait(row.topic_id, 0, batch("10"))
        gets = world.objects.gets
        assert values_of((await fetch(warm, row.topic_id, 0, 5)).batches) == [(5, "10")]
        assert world.objects.gets == gets


@pytest.mark.parametrize("left", ["gone", "shorter"])
async def test_an_object_that_is_gone_fails_its_partition_alone(left: str) -> None:
    async with World(cache_bytes=0) as world:
        row = await world.topic()
        topics = world.node()
        await topics.produce_nowait(row.topic_id, 0, batch("0"))
        await topics.produce_nowait(row.topic_id, 1, batch("1"))
        (ref,) = await world.reader.plan(row.topic_id, 0, 0, 1)
        await world.objects.delete(ref.object_key)
        if left == "shorter":
            await world.objects.put(ref.object_key, b"short")
        reads = [FetchRead(row.topic_id, p, 0, 1 << 20) for p in (0, 1)]
        lost, fine = await topics.fetch(reads, max_wait_s=0, min_bytes=1, max_bytes=1 << 20)
        assert isinstance(lost.error, CorruptError) and left in lost.error.message and lost.batches == []
        assert values_of(fine.batches) == [(0, "1")]


async def test_a_fetch_waiting_on_a_lost_partition_is_told() -> None:
    async with World() as world:
        topics, topic_id = await filled(world, 1)
        waiting = asyncio.ensure_future(fetch(topics, topic_id, 0, 2, wait_s=15.0))
        await asyncio.sleep(0.01)
        other = world.node()
        await other.produce_nowait(topic_id, 0, batch("theirs"))
        with pytest.raises(NotLeaderError):
            await topics.produce_nowait(topic_id, 0, batch("ours"))
        found = await waiting
        assert isinstance(found.error, NotLeaderError) or values_of(found.batches) == [(2, "theirs")]


async def test_of_a_batch_of_one_record_the_index_says_the_time() -> None:
    world = World()
    row = await world.topic()
    topics = world.node(cache_bytes=0)
    for at_ms in (5, 9, 7):
        await topics.produce_nowait(row.topic_id, 0, batch("v", timestamp_ms=at_ms))
    found = [await topics.offset_for_time(row.topic_id, 0, at_ms) for at_ms in (0, 5, 6, 9, 10)]
    assert found == [(0, 5), (0, 5), (1, 9), (1, 9), None]
    assert await topics.newest_timestamp(row.topic_id, 0) == (1, 9)
    assert world.objects.gets == 0
    await topics.produce_nowait(row.topic_id, 0, batch("v", "w", timestamp_ms=20))
    assert await topics.offset_for_time(row.topic_id, 0, 20) == (3, 20)
    assert world.objects.gets == 1
    await world.aclose()


async def test_offsets_and_times() -> None:
    async with World() as world:
        topics, topic_id = await filled(world)
        offsets = await topics.offsets(topic_id, 0)
        assert (offsets.log_start_offset, offsets.high_watermark) == (0, 20)
        assert await topics.offset_for_time(topic_id, 0, 0) == (0, 1000)
        assert await topics.offset_for_time(topic_id, 0, 1003) == (6, 1003)
        assert await topics.offset_for_time(topic_id, 0, 1010) is None
        assert await topics.offset_for_time(topic_id, 1, 0) is None


# the reader of other processes ---------------------------------------------------------------------
async def test_the_reader_plans_whole_batches_that_overlap_the_range() -> None:
    async with World() as world:
        topics, topic_id = await filled(world)
        reader = world.reader
        assert await reader.high_watermark(topic_id, 0) == 20
        refs = await reader.plan(topic_id, 0, 3, 7)
        assert [(r.base_offset, r.record_count) for r in refs] == [(2, 2), (4, 2), (6, 2)]
        assert values_of(await reader.read(refs))[0] == (2, "1a")
        assert await reader.plan(topic_id, 0, 5, 5) == []
        await topics.produce_nowait(topic_id, 0, batch("late"))
        assert [r.base_offset for r in await reader.plan(topic_id, 0, 19, 21)] == [18, 20]
        with pytest.raises(OffsetOutOfRangeError):
            await reader.plan(topic_id, 0, 0, 22)


async def test_an_executor_reads_with_nothing_but_the_bucket() -> None:
    async with World() as world:
        _, topic_id = await filled(world)
        refs: list[BatchRef] = await world.reader.plan(topic_id, 0, 0, 20)
        executor = LogPartitionReader(None, world.objects)
        found = await executor.read(list(reversed(refs)))
        assert [v for _, v in values_of(found)][:2] == ["9a", "9b"]
        with pytest.raises(InvalidError):
            await executor.high_watermark(topic_id, 0)


async def test_objects_are_read_side_by_side() -> None:
    """A read of many objects takes the time of the slowest, not the sum: on a remote store each answer has a separate
    delay."""
    async with World() as world:
        under_way = most = 0
        _, topic_id = await filled(world)
        refs = await world.reader.plan(topic_id, 0, 0, 20)
        keys = {ref.object_key for ref in refs}
        read = world.objects.get_ranges

        async def slow(key: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
            nonlocal under_way, most
            under_way += 1
            most = max(most, under_way)
            await until(lambda: most == len(keys))
            under_way -= 1
            return await read(key, ranges)

        world.objects.get_ranges = slow  # type: ignore[method-assign]
        assert len(values_of(await world.reader.read(refs))) == 20
        assert most == len(keys) == 10


async def test_a_reader_left_behind_by_rollups_finds_its_way() -> None:
    async with World(rollup_records=3) as world:
        topics, topic_id = await filled(world, 1)
        assert await world.reader.high_watermark(topic_id, 0) == 2
        for n in range(30):
            await topics.produce_nowait(topic_id, 0, batch(str(n)))
        assert await world.reader.high_watermark(topic_id, 0) == 32
        refs = await world.reader.plan(topic_id, 0, 0, 32)
        assert [v for _, v in values_of(await world.reader.read(refs))] == ["0a", "0b", *(str(n) for n in range(30))]


async def test_readers_of_an_unwritten_partition_see_nothing() -> None:
    async with World() as world:
        row = await world.topic()
        assert await world.reader.high_watermark(row.topic_id, 0) == 0
        assert await world.reader.plan(row.topic_id, 0, 0, 0) == []


async def test_an_answer_waits_for_so_many_objects_of_others_and_readers_share_them() -> None:
    async with World() as world:
        count = COLD_OBJECTS_MAX + 10
        _, topic_id = await filled(world, count)
        other = world.node()
        before = world.objects.gets
        answers = await asyncio.gather(*(fetch(other, topic_id, 0, 0) for _ in range(3)))
        assert [len(each.batches) for each in answers] == [COLD_OBJECTS_MAX] * 3
        assert world.objects.gets - before == COLD_OBJECTS_MAX
        rest = await fetch(other, topic_id, 0, COLD_OBJECTS_MAX * 2)
        assert values_of([*answers[0].batches, *rest.batches]) == [
            (2 * n + m, f"{n}{name}") for n in range(count) for m, name in enumerate("ab")
        ]
        # Cached batches do not count towards the limit.
        again = await fetch(other, topic_id, 0, 0)
        assert len(again.batches) == count and world.objects.gets - before == count


async def test_of_thousands_of_objects_a_few_are_read_side_by_side() -> None:
    """The number of reading tasks is that of a store's concurrent requests. Each object is read once, and an unreadable
    one affects no other."""
    data = batch("v")
    asked: list[str] = []
    tasks: list[int] = []

    class Objects:
        async def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
            asked.append(key)
            await asyncio.sleep(0)
            tasks.append(len(asyncio.all_tasks()))
            if key == "1500":
                raise MissingError("gone.")
            return [bytes(data)]

    refs = [[BatchRef(str(n), 0, len(data), 0, 1, 0)] for n in range(3_000)]
    found = await read_batches(Objects(), refs)  # type: ignore[arg-type]
    assert sorted(asked) == sorted(str(n) for n in range(3_000))
    assert max(tasks) <= OBJECT_CONCURRENCY + 2
    assert [n for n, each in enumerate(found) if not isinstance(each, list)] == [1500]
    assert isinstance(found[1500], CorruptError)


class Stored:
    """A store of one object, which remembers the buffers that it returned."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.handed: list[bytes] = []

    async def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        self.handed = [self._data[start:end] for start, end in ranges]
        return self.handed


@pytest.mark.parametrize("epoch", [-1, 3])
@pytest.mark.parametrize("stored", [[7, 9], [7, 0]])
async def test_what_is_stored_as_it_is_read_is_not_copied(stored: list[int], epoch: int) -> None:
    parts = [bytearray(batch("a", "b")), bytearray(batch("c"))]
    for part, base_offset in zip(parts, stored, strict=True):
        patch_base_offset(part, 0, base_offset, epoch)
    objects = Stored(b"".join(parts))
    sizes = [len(part) for part in parts]
    refs = [BatchRef("k", 0, sizes[0], 7, 2, 0), BatchRef("k", sizes[0], sizes[1], 9, 1, 0)]
    (found,) = await read_batches(objects, [refs])  # type: ignore[arg-type]
    assert isinstance(found, list)
    for part, base_offset in zip(parts, (7, 9), strict=True):
        patch_base_offset(part, 0, base_offset)
    assert found == parts
    as_they_are = stored == [7, 9] and epoch == -1
    assert [isinstance(each, memoryview) and each.obj is objects.handed[0] for each in found] == [as_they_are] * 2
