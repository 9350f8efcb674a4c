"""Open files and their cache: number of reads, sharing, failures, and the memory budget."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from support.metastore.sst_world import PREFIX, Rows, Watched, numbered_rows, on_memory_and_local, opener, write_sst
from tidemill.base.clock import ManualClock
from tidemill.base.errors import CorruptError, InvalidError, MissingError, UnavailableError
from tidemill.metastore.lsm.file_store import FileName, SstFiles
from tidemill.metastore.lsm.manifest import FileMeta
from tidemill.metastore.lsm.sst import FORMAT
from tidemill.metastore.lsm.table_cache import BlockCache, TableCache
from tidemill.objects.memory import MemoryObjects

ROWS = numbered_rows(10_000, value_bytes=100)
BUDGET = 64 << 20


class World:
    """One file of 10,000 rows in an observed store."""

    def __init__(self, budget_bytes: int = BUDGET) -> None:
        self.store = Watched(MemoryObjects(ManualClock()))
        self.files = SstFiles(self.store, PREFIX)
        self.tables = TableCache(self.files, BlockCache(budget_bytes))

    async def put(self, rows: Rows = ROWS, number: int = 1) -> FileMeta:
        data, summary = write_sst(rows)
        file = summary.named(1, number, "n")
        await self.files.put(file, data)
        return file

    async def settle(self) -> None:
        """Let every task run until it waits."""
        for _ in range(20):
            await asyncio.sleep(0)


async def _opened(world: World) -> tuple[FileMeta, int]:
    """Open the file. Return it with its number of blocks; reads are counted from here."""
    file = await world.put()
    blocks = len((await world.tables.meta(file)).rows)
    world.store.reads.clear()
    return file, blocks


@on_memory_and_local
async def test_a_cold_get_takes_two_reads_and_a_warm_one_none(kind: str, tmp_path: Path) -> None:
    opened: AbstractAsyncContextManager[MemoryObjects] = opener(kind, tmp_path)()  # type: ignore[assignment]
    async with opened as inner:
        world = World()
        world.store.inner = inner
        file = await world.put()
        for key, value, seqno in list(zip(*ROWS, strict=True))[::997]:
            meta = await world.tables.meta(file)
            assert meta.may_contain(key)
            block = await world.tables.block(file, meta.find(key))
            row = block.find(key)
            assert (block.values[row], block.seqno(row)) == (value, seqno)
            if key == ROWS[0][0]:
                assert len(world.store.reads) == 2
        before = len(world.store.reads)
        meta = world.tables.cached_meta(file)
        assert meta is not None and world.tables.cached_block(file, meta.find(ROWS[0][0])) is not None
        await world.tables.block(file, meta.find(ROWS[0][0]))
        assert len(world.store.reads) == before == world.tables.reads


async def test_neighbouring_blocks_come_in_one_read() -> None:
    world = World()
    file, count = await _opened(world)
    blocks = await world.tables.blocks(file, 0, count)
    assert world.store.reads == [(0, file.meta_start)]
    assert [key for block in blocks for key in block.keys] == ROWS[0]
    assert [value for block in blocks for value in block.values] == ROWS[1]
    assert [seqno for block in blocks for seqno in block.seqnos()] == ROWS[2]


async def test_cached_blocks_are_not_read_again() -> None:
    world = World()
    file, count = await _opened(world)
    starts = (await world.tables.meta(file)).starts
    three = await world.tables.block(file, 3)
    blocks = await world.tables.blocks(file, 1, 6)
    assert world.store.reads[1:] == [(starts[1], starts[3]), (starts[4], starts[7])]
    assert blocks[2] is three
    assert count > 7
    assert [block.keys[0] for block in blocks] == sorted(block.keys[0] for block in blocks)
    assert await world.tables.blocks(file, 0, 0) == []


async def test_readers_of_one_missing_block_share_one_read() -> None:
    world = World()
    file, _ = await _opened(world)
    world.store.gate = asyncio.Event()
    readers = [asyncio.ensure_future(world.tables.block(file, 5)) for _ in range(10)]
    readers.append(asyncio.ensure_future(world.tables.block(file, 6)))
    spanning = asyncio.ensure_future(world.tables.blocks(file, 4, 4))
    await world.settle()
    world.store.gate.set()
    found = await asyncio.gather(*readers)
    assert len({id(block) for block in found[:10]}) == 1
    starts = (await world.tables.meta(file)).starts
    assert sorted(world.store.reads) == [(starts[index], starts[index + 1]) for index in (4, 5, 6, 7)]
    assert (await spanning)[1] is found[0]


async def test_openers_of_one_file_share_one_read() -> None:
    world = World()
    file = await world.put()
    world.store.gate = asyncio.Event()
    openers = [asyncio.ensure_future(world.tables.meta(file)) for _ in range(5)]
    await world.settle()
    world.store.gate.set()
    assert len({id(meta) for meta in await asyncio.gather(*openers)}) == 1
    assert world.store.reads == [(file.meta_start, file.size_bytes)]


@pytest.mark.parametrize("what", ["meta", "block"])
async def test_a_failed_read_reaches_all_who_wait_and_is_not_kept(what: str) -> None:
    world = World()
    file = await world.put()
    if what == "block":
        await world.tables.meta(file)
    world.store.gate = asyncio.Event()
    world.store.failure = UnavailableError("The bucket is away.")
    read = (lambda: world.tables.meta(file)) if what == "meta" else (lambda: world.tables.block(file, 2))
    readers = [asyncio.ensure_future(read()) for _ in range(4)]
    await world.settle()
    world.store.gate.set()
    assert all(isinstance(r, UnavailableError) for r in await asyncio.gather(*readers, return_exceptions=True))
    reads = len(world.store.reads)
    world.store.failure = None
    assert await read() is not None
    assert len(world.store.reads) == reads + 1


@pytest.mark.parametrize("what", ["meta", "block"])
async def test_when_the_reader_is_cancelled_one_of_the_waiting_reads_instead(what: str) -> None:
    world = World()
    file = await world.put()
    if what == "block":
        await world.tables.meta(file)
    world.store.reads.clear()
    world.store.gate = asyncio.Event()
    read = (lambda: world.tables.meta(file)) if what == "meta" else (lambda: world.tables.block(file, 2))
    first, *others = [asyncio.ensure_future(read()) for _ in range(4)]
    await world.settle()
    first.cancel()
    await world.settle()
    world.store.gate.set()
    found = await asyncio.gather(*others)
    assert first.cancelled() and len({id(one) for one in found}) == 1
    assert len(world.store.reads) == 2


async def test_cancelling_one_who_waits_disturbs_nobody() -> None:
    world = World()
    file, _ = await _opened(world)
    world.store.gate = asyncio.Event()
    readers = [asyncio.ensure_future(world.tables.block(file, 2)) for _ in range(3)]
    await world.settle()
    readers[1].cancel()
    await world.settle()
    world.store.gate.set()
    first, cancelled, last = await asyncio.gather(*readers, return_exceptions=True)
    assert first is last and isinstance(cancelled, asyncio.CancelledError)
    assert len(world.store.reads) == 1


async def test_a_read_that_leaves_the_cache_alone() -> None:
    world = World()
    file, count = await _opened(world)
    used = world.tables.cache.used_bytes
    kept = await world.tables.block(file, 1)
    one_block = world.tables.cache.used_bytes - used
    blocks = await world.tables.blocks(file, 0, count, fill_cache=False)
    assert world.tables.cache.used_bytes == used + one_block and blocks[1] is kept
    assert world.tables.cached_block(file, 2) is None


async def test_the_budget_is_kept_and_every_read_still_answers() -> None:
    world = World(budget_bytes=300_000)
    files = [await world.put(numbered_rows(3_000, first=3_000 * number), number) for number in range(4)]
    for _ in range(3):
        for file in files:
            for index in range(len((await world.tables.meta(file)).rows)):
                await world.tables.block(file, index)
                cache = world.tables.cache
                assert cache.used_bytes == sum(entry.cost_bytes for entry in cache.entries.values())
                assert cache.used_bytes <= 300_000
    assert world.tables.cache.used_bytes > 200_000 and world.tables.cache.dropped > 20


async def test_a_long_scan_does_not_push_out_what_is_used_often() -> None:
    world = World(budget_bytes=600_000)
    file, count = await _opened(world)
    hot = [2, 3]
    for index in range(4, count):
        for used in hot:
            await world.tables.block(file, used)
        await world.tables.block(file, index)
    starts = (await world.tables.meta(file)).starts
    assert world.tables.cache.dropped > 50
    assert [world.store.reads.count((starts[index], starts[index + 1])) for index in hot] == [1, 1]


async def test_without_any_budget_reads_are_still_right() -> None:
    world = World(budget_bytes=0)
    file = await world.put()
    blocks = await world.tables.blocks(file, 0, 3)
    assert blocks[0].keys[0] == ROWS[0][0] and not world.tables.cache.entries


async def test_a_forgotten_file_leaves_nothing_behind() -> None:
    world = World()
    other = await world.put(numbered_rows(3_000), 2)
    await world.tables.blocks(other, 0, 3)
    used = world.tables.cache.used_bytes
    file, count = await _opened(world)
    await world.tables.blocks(file, 0, count)
    world.tables.drop_file(file)
    assert world.tables.cache.used_bytes == used and world.tables.cached_meta(file) is None
    assert world.tables.cached_block(other, 1) is not None
    world.tables.drop_file(file)


async def test_files_of_one_number_but_different_epochs_are_different() -> None:
    world = World()
    file = await world.put(numbered_rows(100))
    data, summary = write_sst(numbered_rows(100, first=500))
    newer = summary.named(2, 1, "n")
    await world.files.put(newer, data)
    assert (await world.tables.block(file, 0)).keys[0] == b"row/00000000"
    assert (await world.tables.block(newer, 0)).keys[0] == b"row/00000500"


class TestDamage:
    """Corrupt block, truncated file, missing object, newer format: each is distinguished, and affects nothing else."""

    async def _world(self, spoil) -> tuple[World, FileMeta]:  # type: ignore[no-untyped-def]
        world = World()
        data, summary = write_sst(ROWS)
        file = summary.named(1, 1, "n")
        spoiled = spoil(bytearray(data), file)
        if spoiled is not None:
            await world.files.put(file, bytes(spoiled))
        return world, file

    async def test_corrupt_block(self) -> None:
        def spoil(data: bytearray, file: FileMeta) -> bytearray:
            data[20_000] ^= 4
            return data

        world, file = await self._world(spoil)
        meta = await world.tables.meta(file)
        bad = next(index for index, start in enumerate(meta.starts) if start > 20_000) - 1
        for _ in range(2):
            with pytest.raises(CorruptError, match=f"section=block offset={meta.starts[bad]}") as found:
                await world.tables.block(file, bad)
            assert world.files.key(file) in str(found.value)
        assert (await world.tables.block(file, bad - 1)).keys and (await world.tables.block(file, bad + 1)).keys
        with pytest.raises(CorruptError):
            await world.tables.blocks(file, bad - 1, 3)

    @pytest.mark.parametrize("left", [0, 1, 30_000, -1, -40])
    async def test_truncated_sst(self, left: int) -> None:
        world, file = await self._world(lambda data, _: data[:left])
        with pytest.raises(CorruptError, match="shorter than its manifest says") as found:
            await world.tables.meta(file)
        assert world.files.key(file) in str(found.value)

    async def test_missing_object(self) -> None:
        world, file = await self._world(lambda data, _: None)
        with pytest.raises(MissingError, match="manifest names is not in the bucket") as found:
            await world.tables.meta(file)
        assert world.files.key(file) in str(found.value)

    async def test_missing_object_after_it_was_opened(self) -> None:
        world, file = await self._world(lambda data, _: data)
        kept = await world.tables.block(file, 0)
        await world.files.delete(FileName(1, 1, "n"))
        with pytest.raises(MissingError):
            await world.tables.blocks(file, 1, 2)
        assert await world.tables.block(file, 0) is kept

    async def test_newer_format(self) -> None:
        import crc32c

        def spoil(data: bytearray, file: FileMeta) -> bytearray:
            footer_bytes = int.from_bytes(data[-16:-14], "little")
            data[-14:-12] = (FORMAT + 1).to_bytes(2, "little")
            data[-4:] = crc32c.crc32c(bytes(data[-footer_bytes:-4])).to_bytes(4, "little")
            return data

        world, file = await self._world(spoil)
        with pytest.raises(InvalidError, match=f"format={FORMAT + 1} supported={FORMAT}") as found:
            await world.tables.meta(file)
        assert not isinstance(found.value, MissingError)
