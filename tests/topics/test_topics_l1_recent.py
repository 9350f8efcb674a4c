"""Cache of looked-up extents: no scan for a known extent, and never an answer that the rows would not give."""

from __future__ import annotations

import pytest

from support.topics.l1_store import Faulty, add_of, added, opened
from tidemill.base.errors import CorruptError
from tidemill.metastore.rows.l1 import L1ExtentRow
from tidemill.objects.memory import MemoryObjects
from tidemill.topics.l1.extent_cache import LOOKUP_EXTENTS_MIN, ExtentCache
from tidemill.topics.l1.format import RegionIndex, decode_index, encode_index
from tidemill.topics.l1.reader import L1Reader, region_of


class Counted:
    """Counter of scans of the rows."""

    def __init__(self, rows: Faulty) -> None:
        self.scans = 0
        real = rows.first_extents

        async def some(
            topic_id: str, partition: int, offset: int, count: int, *, fresh: bool = True
        ) -> list[L1ExtentRow]:
            self.scans += 1
            return await real(topic_id, partition, offset, count, fresh=fresh)

        rows.first_extents = some  # type: ignore[method-assign]


async def base_at(recent: ExtentCache, offset: int, partition: int = 0) -> int | None:
    found = await recent.extent_at("t", partition, offset, fresh=False)
    return found.base_offset if found is not None else None


async def test_who_reads_on_scans_once_for_several_extents() -> None:
    async with opened() as rows:
        spans = [(10 * n, 10 * n + 9, 5) for n in range(LOOKUP_EXTENTS_MIN + 2)]
        await added(rows, add_of("o", *spans))
        counted, recent = Counted(rows), ExtentCache(rows)
        for offset in range(10 * LOOKUP_EXTENTS_MIN):
            assert await base_at(recent, offset) == offset // 10 * 10
        assert counted.scans == 1
        assert await base_at(recent, 10 * LOOKUP_EXTENTS_MIN) == 10 * LOOKUP_EXTENTS_MIN
        assert counted.scans == 2
        # Before what is known another one may lie.
        assert await base_at(recent, 0) == 0
        assert counted.scans == 3


async def test_a_thousand_small_extents_take_a_few_looks() -> None:
    async with opened() as rows:
        spans = [(n, n, 5) for n in range(1_000)]
        await added(rows, add_of("o", *spans))
        counted, recent = Counted(rows), ExtentCache(rows)
        for offset in range(1_000):
            found = await recent.extent_at("t", 0, offset, fresh=False, passed=offset)
            assert found is not None and found.base_offset == offset
        assert counted.scans <= 8


async def test_what_comes_and_what_goes_is_seen_at_once() -> None:
    async with opened() as rows:
        recent = ExtentCache(rows)
        assert await base_at(recent, 0) is None
        await added(rows, add_of("o", (0, 9, 5)))
        assert await base_at(recent, 3) == 0
        assert await base_at(recent, 10) is None
        await added(rows, add_of("p", (10, 14, 5)))
        assert await base_at(recent, 10) == 10
        await rows.set_start("t", 0, 10)
        assert await base_at(recent, 3) == 10


async def test_what_is_kept_stays_within_its_limit() -> None:
    async with opened() as rows:
        for partition in range(3):
            await added(rows, add_of(f"o{partition}", (0, 9, 5), (10, 19, 5), partition=partition))
        recent = ExtentCache(rows, extents_max=4)
        for partition in range(3):
            assert await base_at(recent, 0, partition) == 0
        assert [recent.peek("t", partition, 0) is not None for partition in range(3)] == [False, True, True]
        assert await base_at(recent, 0, 1) == 0
        assert await base_at(recent, 0, 0) == 0
        assert [recent.peek("t", partition, 0) is not None for partition in range(3)] == [True, False, True]


def extent_of(name: str, base: int, last: int) -> L1ExtentRow:
    """Return an extent with a batch of 5 bytes for each offset."""
    count = last - base + 1
    return L1ExtentRow("t", 0, base, last, 0, 0, name, 0, 5 * count, count, 5 * count, 10)


async def test_an_extent_that_takes_the_place_of_two_within_a_plan_gives_no_batch_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with opened() as rows:
        reader = L1Reader(rows, MemoryObjects(rows._clock))

        async def at(_: str, partition: int, offset: int, *, fresh: bool, passed: int = 0) -> L1ExtentRow:
            return extent_of("two", 0, 19) if passed else extent_of("one", 0, 9)

        async def index(extent: L1ExtentRow) -> RegionIndex:
            batches = [(n, n + 1, 5, 0) for n in range(extent.base_offset, extent.last_offset + 1)]
            return decode_index(encode_index(batches), region_of(extent))

        monkeypatch.setattr(reader._recent, "extent_at", at)
        monkeypatch.setattr(reader, "index", index)
        found = await reader.plan("t", 0, 3, 20)
        assert [ref.base_offset for ref in found] == list(range(3, 20))


async def test_an_object_without_what_its_extent_names_is_corrupt() -> None:
    async with opened() as rows:
        objects = MemoryObjects(rows._clock)
        reader, extent = L1Reader(rows, objects), extent_of("one", 0, 9)
        for state in ("missing", "shorter"):
            with pytest.raises(CorruptError, match=state):
                await reader.index(extent)
            with pytest.raises(CorruptError, match=state):
                await reader.data(extent)
            if state == "missing":
                await objects.put(extent.object_key, b"short")
