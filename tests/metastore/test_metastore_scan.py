"""Scans: bounds and directions over any mix of layers and files, bytes read, and independence from the loop's other
tasks."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.metastore.lsm_world import SMALL, Gate, World, collect, expected, failing, numbered
from support.metastore.lsm_world import objects as objects  # the fixture
from support.waiting import run, until
from tidemill.base.clock import SystemClock
from tidemill.base.errors import UnavailableError
from tidemill.metastore.lsm.database import Database
from tidemill.metastore.lsm.memtable import SORT_ROWS
from tidemill.metastore.lsm.merge_iterator import READ_BLOCKS, READ_BYTES
from tidemill.metastore.lsm.options import Options
from tidemill.metastore.lsm.scan import YIELD_SLICES
from tidemill.metastore.lsm.version import Edit, prefix_end
from tidemill.objects.memory import MemoryObjects
from tidemill.objects.store import ObjectStore


def memory() -> ObjectStore:
    return MemoryObjects(SystemClock())


async def reopened(world: World, **options: Any) -> Database:
    """Open the same files with an empty cache."""
    return await world.open(options=msgspec.structs.replace(world.options, **options))


keys = st.one_of(
    st.binary(min_size=1, max_size=3), st.integers(0, 99).map(lambda n: b"k%02d" % n), st.just(b"\xff\xff")
)
batches = st.dictionaries(keys, st.sampled_from([b"", b"x", b"y" * 50]), min_size=1, max_size=25)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    steps=st.lists(st.tuples(batches, st.sampled_from(["", "layer", "flush", "flush", "down"])), max_size=8),
    lower=st.just(b"") | keys,
    upper=st.none() | keys,
    block_bytes=st.sampled_from([1, 60, 4_000]),
    cache_bytes=st.sampled_from([0, 2_000, 1 << 20]),
)
def test_every_range_in_both_directions_over_layers_and_files(
    steps: list[tuple[dict[bytes, bytes], str]], lower: bytes, upper: bytes | None, block_bytes: int, cache_bytes: int
) -> None:
    async def body() -> None:
        world = World(memory(), msgspec.structs.replace(SMALL, block_bytes=block_bytes, cache_bytes=cache_bytes))
        database = await world.open()
        held = []
        for rows, then in steps:
            world.put(database, rows)
            if then == "layer":
                held.append(database.snapshot())
            elif then == "flush":
                await database.flush()
            elif then == "down":  # several levels, each with its files
                await database.background.compact()
                files = database.version.levels[-1]
                await database.commit_edit(
                    Edit(added=tuple((len(held) % 3 + 2, file) for file in files), removed=files)
                )
        for _ in range(2):  # cold and warm
            for reverse in (False, True):
                found = await collect(database.scan(lower, upper, reverse=reverse))
                assert found == expected(world.rows, lower, upper, reverse=reverse)
        for snapshot in held:
            snapshot.close()
        await database.aclose()

    run(body())


def test_prefix_end_is_the_first_key_after_all_with_the_prefix() -> None:
    assert [prefix_end(prefix) for prefix in (b"a", b"a\xff", b"a\xff\xff", b"\xff", b"", b"a\x00", b"\xfe\xff")] == [
        b"b",
        b"b",
        b"b",
        None,
        None,
        b"a\x01",
        b"\xff",
    ]


async def test_prefix_iterators_forward_and_reverse(objects: ObjectStore) -> None:
    world = World(objects)
    database = await world.open()
    rows = {b"%b/%03d" % (name, n): b"v" for name in (b"a", b"a\xff", b"b", b"\xff") for n in range(40)}
    world.put(database, dict(list(rows.items())[::2]))
    await database.flush()
    world.put(database, dict(list(rows.items())[1::2]))
    for prefix in (b"", b"a", b"a/", b"a\xff", b"b/01", b"\xff", b"\xff/039", b"nothing", b"\xff\xff"):
        for reverse in (False, True):
            found = await collect(database.prefix(prefix, reverse=reverse))
            assert found == expected(rows, prefix, prefix_end(prefix), reverse=reverse), (prefix, reverse)


async def test_an_empty_or_inverted_range_is_an_empty_scan_that_pins_nothing() -> None:
    world = World(memory())
    database = await world.open()
    world.put(database, numbered(range(9)))
    for lower, upper in ((b"a", b"a"), (b"b", b"a"), (b"zzz", None), (b"", b"")):
        scan = database.scan(lower, upper)
        assert await collect(scan) == []
    scan = database.scan(b"b", b"a")
    assert database.versions.pins == 0
    assert await collect(scan) == []


async def test_rows_put_after_the_call_are_not_seen_even_if_nothing_was_read_yet() -> None:
    world = World(memory())
    database = await world.open()
    world.put(database, numbered(range(9)))
    before = dict(world.rows)
    scan = database.scan()
    world.put(database, {**numbered(range(20), "new"), b"row/000000": b""})
    assert await collect(scan) == expected(before)
    assert await collect(database.scan()) == expected(world.rows)


async def test_chunks_are_the_callers_own() -> None:
    """Changing a chunk must not change the cache or a layer."""
    world = World(memory())
    database = await world.open()
    world.put(database, numbered(range(300)))
    for _ in range(2):
        for reverse in (False, True):
            async for chunk_keys, chunk_values in database.scan(reverse=reverse):
                chunk_keys.clear()
                chunk_values[0] = b"scribble"
        assert await collect(database.scan()) == expected(world.rows)
        await database.flush()


async def test_neighbouring_blocks_come_in_one_read_and_a_short_range_reads_little(objects: ObjectStore) -> None:
    world = World(objects, Options())
    database = await world.open()
    world.put(database, {b"%06d" % number: b"%0100d" % number for number in range(15_000)})
    await database.flush()
    file = database.version.levels[0][0]
    blocks = len((await database.tables.meta(file)).last_keys)
    assert blocks > 150
    for reverse in (False, True):
        await database.aclose()
        database = await reopened(world, cache_bytes=0)
        world.objects.ranges.clear()
        assert len(await collect(database.scan(reverse=reverse))) == 15_000
        reads = [found for found in world.objects.ranges if found[0] < file.meta_start]
        # One block, two, four and so on up to READ_BLOCKS; and no block twice.
        assert len(reads) <= READ_BLOCKS.bit_length() + blocks // READ_BLOCKS
        assert sum(end - start for start, end in reads) == file.meta_start
        await database.aclose()
        database = await reopened(world)
        world.objects.reads.clear()
        found = await collect(database.scan(b"007000", b"007100", reverse=reverse))
        assert len(found) == 100 and len(world.objects.reads) == 2  # filter with index, and two or three blocks
        assert await collect(database.scan(b"007000", b"007100", reverse=reverse)) == found
        assert len(world.objects.reads) == 2


async def test_one_read_of_large_values_is_bounded_in_bytes() -> None:
    world = World(memory(), Options())
    database = await world.open()
    source = random.Random(1)
    for turn in range(3):
        world.put(database, {b"%d/%d" % (turn, number): source.randbytes(200_000) for number in range(12)})
    await database.flush()
    for reverse in (False, True):
        await database.aclose()
        database = await reopened(world)
        world.objects.ranges.clear()
        assert await collect(database.scan(reverse=reverse)) == expected(world.rows, reverse=reverse)
        sizes = [end - start for start, end in world.objects.ranges]
        assert 200_000 < max(sizes) <= READ_BYTES


async def test_a_short_range_over_several_runs_comes_in_one_chunk() -> None:
    """Runs that end within the range cause no extra round: a scan of ten rows is one chunk."""
    world = World(memory(), Options())
    database = await world.open()
    for turn in range(3):
        world.put(database, numbered(range(turn, 3_000, 3)))
        await database.flush()
    world.put(database, numbered(range(0, 3_000, 7), "memory"))
    for _ in range(2):
        for reverse in (False, True):
            chunks = [chunk async for chunk in database.prefix(b"row/00123", reverse=reverse)]
            assert [len(keys) for keys, _ in chunks] == [10]


async def test_a_scan_opens_a_levels_files_as_it_gets_there() -> None:
    world = World(memory())
    database = await world.open()
    world.put(database, {b"%06d" % number: b"%050d" % number for number in range(2_000)})
    await database.background.compact()
    assert len(database.version.levels[-1]) > 5
    await database.aclose()
    database = await reopened(world)
    world.objects.reads.clear()
    async for _ in database.scan(b"001000"):
        break
    assert len(set(world.objects.reads)) == 1


async def test_a_long_scan_does_not_flush_the_cache() -> None:
    world = World(memory(), Options())
    database = await world.open()
    for turn in range(8):
        rows = {b"%d/%06d" % (turn, number): b"%0100d" % number for number in range(10_000)}
        world.put(database, rows)
        await database.flush()
    await database.aclose()
    database = await reopened(world, cache_bytes=1 << 20)
    hot = [b"3/%06d" % number for number in range(0, 2_000, 20)]
    for _ in range(2):
        await database.get_many(hot)
    world.objects.reads.clear()
    assert sum([len(chunk) async for chunk, _ in database.scan()]) == 80_000
    world.objects.reads.clear()
    assert database.tables.cache.used_bytes <= 1 << 20
    found = await database.get_many(hot)
    assert found == [world.rows[key] for key in hot]
    assert len(world.objects.reads) <= len(hot) / 10


async def test_a_scan_fills_a_cache_that_has_room() -> None:
    world = World(memory(), Options())
    database = await world.open()
    world.put(database, {b"%06d" % number: b"%0100d" % number for number in range(15_000)})
    await database.flush()
    await collect(database.scan())
    world.objects.reads.clear()
    await collect(database.scan())
    assert world.objects.reads == []


async def test_a_scan_gives_the_loop_its_turn_after_every_slice_of_rows() -> None:
    """The scan yields even if everything is cached and no read waits."""
    slice_rows = 100
    world = World(memory(), msgspec.structs.replace(SMALL, block_bytes=8_192, slice_rows=slice_rows))
    database = await world.open()
    world.put(database, numbered(range(0, 10_000, 2)))
    await database.flush()
    world.put(database, numbered(range(1, 10_000, 2)))
    await collect(database.scan())
    turns = 0

    async def tick() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    for reverse in (False, True):
        ticking = asyncio.create_task(tick())
        await asyncio.sleep(0)
        rows = turns = most = 0
        async for chunk, _ in database.scan(reverse=reverse):
            if turns:
                turns = rows = 0
            rows += len(chunk)
            most = max(most, rows)
        ticking.cancel()
        assert slice_rows < most <= 2 * YIELD_SLICES * slice_rows + 2_048  # and a chunk of each run


async def test_the_first_scan_of_a_large_layer_sorts_it_between_turns_of_the_loop() -> None:
    world = World(memory(), Options())
    database = await world.open()
    for turn in range(3):
        world.put(database, {b"%07d" % (number * 7919 % 60_000): b"v" for number in range(turn, 60_000, 3)})
    turns = 0

    async def tick() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    ticking = asyncio.create_task(tick())
    await anext(database.scan())
    ticking.cancel()
    assert turns >= 60_000 // SORT_ROWS


async def test_reads_of_several_runs_are_asked_at_once() -> None:
    world = World(memory())
    database = await world.open()
    for turn in range(4):
        world.put(database, numbered(range(turn, 90, 4)))
        await database.flush()
    await database.aclose()
    database = await reopened(world)
    gate = world.objects.before_read = Gate("/sst/")
    scanning = asyncio.create_task(collect(database.scan()))
    await until(lambda: gate.waiting == 4)
    gate.open.set()
    assert await scanning == expected(world.rows)


async def test_a_failed_read_ends_the_scan_and_its_pins() -> None:
    world = World(memory())
    database = await world.open()
    world.put(database, numbered(range(90)))
    await database.flush()
    world.objects.before_read = failing("/sst/", UnavailableError("no"))
    scan = database.scan()
    with pytest.raises(UnavailableError):
        await anext(scan)
    assert database.versions.pins == 0 and await collect(scan) == []
    assert await collect(database.scan()) == expected(world.rows)


async def test_a_cancelled_scan_lets_go() -> None:
    world = World(memory())
    database = await world.open()
    for turn in range(3):
        world.put(database, numbered(range(turn, 90, 3)))
        await database.flush()
    gate = world.objects.before_read = Gate("/sst/")
    scanning = asyncio.create_task(collect(database.scan()))
    await until(lambda: gate.waiting == 3)
    scanning.cancel()
    with pytest.raises(asyncio.CancelledError):
        await scanning
    assert database.versions.pins == 0
    gate.open.set()
    assert await collect(database.scan()) == expected(world.rows)
