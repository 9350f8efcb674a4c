"""A file that the bucket says is missing: one such answer is read again, and a lost file is corruption."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from support.metastore.domain_world import FOLLOWS, LEADS, DomainWorld
from tidemill.base.clock import SystemClock
from tidemill.base.errors import CorruptError, MissingError, TidemillError, UnavailableError
from tidemill.metastore.domain.domain import Domain
from tidemill.metastore.lsm.options import Options
from tidemill.objects.memory import MemoryObjects

UNCACHED = Options(cache_bytes=1, block_bytes=1_000)


class Denying(MemoryObjects):
    """A store that answers the next `denies` reads of files with 'no such object'."""

    denies = 0

    def _deny(self, key: str) -> None:
        if "/sst/" in key and self.denies:
            self.denies -= 1
            raise MissingError(f"no such object: key={key}.")

    async def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        self._deny(key)
        return await super().get(key, start, end)

    async def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        self._deny(key)
        return await super().get_ranges(key, ranges)


async def cold_node(world: DomainWorld, objects: Denying, *, leads: bool = True) -> Domain:
    """Return a node that has read none of the rows, all of which are in files."""
    writer = await world.node(objects=objects)
    for first in range(0, 4_000, 500):
        await writer.commit([(b"k%05d" % n, b"%05d" % n * 40) for n in range(first, first + 500)])
    await writer.flush(20)
    if leads:
        await writer.aclose()
    return await world.node(replace(LEADS if leads else FOLLOWS, options=UNCACHED), objects=objects)


async def test_a_lost_file_that_a_commit_compares_with_is_corruption_and_no_missing_row() -> None:
    async with DomainWorld() as world:
        objects = Denying(SystemClock())
        node = await cold_node(world, objects)
        objects.denies = 100
        with pytest.raises(CorruptError, match="not in the bucket"):
            await node.commit([(b"k00007", b"new")], expects={b"k00007": 1})


@pytest.mark.parametrize("leads", [True, False], ids=["leader", "follower"])
async def test_a_file_that_is_missing_in_one_answer_is_read_again(leads: bool) -> None:
    async with DomainWorld() as world:
        objects = Denying(SystemClock())
        node = await cold_node(world, objects, leads=leads)
        objects.denies = 1
        assert await node.get(b"k00007") == b"00007" * 40
        objects.denies = 1
        assert sum([len(keys) async for keys, _ in node.scan(b"k")]) == 4_000
        assert objects.denies == 0


@pytest.mark.parametrize("leads", [True, False], ids=["leader", "follower"])
async def test_a_file_that_stays_missing_is_corruption_and_never_a_missing_row(leads: bool) -> None:
    async with DomainWorld() as world:
        objects = Denying(SystemClock())
        node = await cold_node(world, objects, leads=leads)
        objects.denies = 1_000
        for read in (node.get(b"k00007"), node.get_row(b"k00007"), node.get_many([b"k00007"])):
            with pytest.raises(CorruptError, match="not in the bucket") as raised:
                await read
            assert "Restore" in raised.value.fix
        with pytest.raises(CorruptError):
            [keys async for keys, _ in node.scan(b"k")]
        assert not leads or node.leading


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("denies", "kind"), [(1, UnavailableError), (1_000, CorruptError)])
async def test_a_scan_that_has_given_rows_repeats_the_read_and_tells_whether_it_may_be_repeated(
    denies: int, kind: type[TidemillError], reverse: bool
) -> None:
    async with DomainWorld() as world:
        objects = Denying(SystemClock())
        node = await cold_node(world, objects)
        chunks = node.scan(b"k", reverse=reverse)
        await anext(chunks)
        objects.denies = denies
        with pytest.raises(kind, match="not in the bucket"):
            [keys async for keys, _ in chunks]
        assert denies > 1 or objects.denies == 0
