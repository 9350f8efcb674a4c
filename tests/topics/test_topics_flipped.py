"""Batches with bits that a store flips in an answer: readers get the original, and the store records a notice."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from support.topics.l1_world import L1World, produced
from support.topics.world import fetch, values_of
from tidemill.topics.batch.header import is_intact
from tidemill.topics.l1.read_ahead import ReadAhead
from tidemill.topics.local_topics import LocalTopics
from tidemill.topics.partition_reader import LogPartitionReader

WRITTEN = [(i, f"{n}{half}") for i, (n, half) in enumerate((n, half) for n in range(6) for half in "ab")]


class Flips:
    """Flip a bit in the next `count` answers of the store of `world`."""

    def __init__(self, world: L1World, count: int, byte: int = -1) -> None:
        self.left, self.byte, self.notices = count, byte, list[str]()
        self._get, self._get_ranges = world.objects.get, world.objects.get_ranges
        world.objects.get = self.get  # type: ignore[method-assign]
        world.objects.get_ranges = self.get_ranges  # type: ignore[method-assign]
        world.objects.record_notice = self.notices.append  # type: ignore[attr-defined]

    def flipped(self, data: bytes) -> bytes:
        if self.left <= 0 or not data:
            return data
        self.left -= 1
        found = bytearray(data)
        found[self.byte] ^= 1
        return bytes(found)

    async def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        return self.flipped(await self._get(key, start, end))

    async def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        first, *rest = await self._get_ranges(key, ranges)
        return [self.flipped(first), *rest]


async def filled(world: L1World) -> tuple[LocalTopics, str]:
    row = await world.topic()
    node = world.node()
    await produced(node, row.topic_id, *[str(n) for n in range(6)])
    return node, row.topic_id


async def everything(node: LocalTopics, topic_id: str) -> list[tuple[int, str]]:
    """Fetch everything from the leader, batch by batch."""
    found: list[tuple[int, str]] = []
    while len(found) < len(WRITTEN):
        got = await fetch(node, topic_id, 0, len(found), max_bytes=1)
        assert got.error is None
        found += values_of(got.batches)
    return found


@pytest.mark.parametrize("moved", [False, True])
async def test_f620_a_fetch_of_an_answer_with_a_flipped_bit_serves_what_was_written(moved: bool) -> None:
    async with L1World(cache_bytes=0) as world:
        node, topic_id = await filled(world)
        if moved:
            assert (await world.move(node, topic_id)).failed is None
            world.l1._indexes.clear()
        flips = Flips(world, 1)
        assert await everything(node, topic_id) == WRITTEN
        [said] = flips.notices
        assert "answered a read with damaged bytes, and then with valid ones" in said
        assert ("key=l1/" if moved else "key=l0/") in said
        flips.left = 1
        reader = LogPartitionReader(world.consensus, world.objects, world.l1)
        planned = await reader.plan(topic_id, 0, 0, len(WRITTEN))
        assert values_of(await reader.read(planned)) == WRITTEN, "a pipeline"


@pytest.mark.parametrize("byte", [8, 11, 16])
async def test_a_flipped_bit_of_the_header_before_the_checksum_is_seen(byte: int) -> None:
    """The length and the magic are damaged here; a wrong base offset or leader epoch would be overwritten."""
    async with L1World(cache_bytes=0) as world:
        node, topic_id = await filled(world)
        reader = LogPartitionReader(world.consensus, world.objects, world.l1)
        planned = await reader.plan(topic_id, 0, 0, len(WRITTEN))
        flips = Flips(world, 1, byte)
        assert values_of(await reader.read(planned)) == WRITTEN
        assert len(flips.notices) == 1
        assert await everything(node, topic_id) == WRITTEN


async def test_what_is_read_ahead_with_a_flipped_bit_is_read_again_for_every_reader() -> None:
    async with L1World(cache_bytes=0) as world:
        node, topic_id = await filled(world)
        await world.move(node, topic_id)
        node._ahead = ahead = ReadAhead(world.objects, node._tasks)
        world.l1.ahead = ahead
        await everything(node, topic_id)
        ahead._spans.clear()
        ahead._begins.clear()
        ahead.held_bytes = 0
        flips = Flips(world, 1)
        for _ in range(3):
            assert await everything(node, topic_id) == WRITTEN
        assert len(flips.notices) == 1


async def test_f620_a_batch_that_its_object_holds_damaged_is_served_as_it_is_and_the_store_is_named() -> None:
    async with L1World(cache_bytes=0) as world:
        node, topic_id = await filled(world)
        flips = Flips(world, 1_000)
        got = await fetch(node, topic_id, 0, 0, max_bytes=1)
        assert [is_intact(each) for each in got.batches] == [False]
        [said] = flips.notices
        assert "an object is damaged, or the object store damages its answers: reads=2 key=l0/" in said
