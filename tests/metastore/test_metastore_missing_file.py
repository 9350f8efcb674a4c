"""A file that the bucket says is missing: one such answer is read again, and a lost file is corruption."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from support.metastore.domain_world import FOLLOWS, LEADS, DomainWorld
from support.waiting import until
from tidemill.base.clock import SystemClock
from tidemill.base.errors import CorruptError, MissingError, TidemillError, UnavailableError
from tidemill.metastore.domain.domain import Domain
from tidemill.metastore.domain.forwarding import server
from tidemill.metastore.lsm.options import Options
from tidemill.objects.memory import MemoryObjects

UNCACHED = Options(cache_bytes=1, block_bytes=1_000)


class Denying(MemoryObjects):
    """A store that answers the next `denies` reads of files, and all of the `lost` ones, with 'no such object'."""

    denies = 0
    lost: frozenset[str] = frozenset()

    def _deny(self, key: str) -> None:
        if key in self.lost:
            raise MissingError(f"no such object: key={key}.")
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


@pytest.mark.parametrize("forwarded", [False, True])
async def test_a_lost_file_that_a_commit_compares_with_is_corruption_and_no_missing_row(forwarded: bool) -> None:
    async with DomainWorld() as world:
        objects = Denying(SystemClock())
        node = await cold_node(world, objects)
        if forwarded:
            node = await world.node(FOLLOWS, objects=objects)
            await node.commit([(b"other", b"1")])
        objects.denies = 100
        with pytest.raises(CorruptError, match="not in the bucket") as raised:
            await node.commit([(b"k00007", b"new")], expects={b"k00007": 1})
        assert "Restore" in raised.value.fix


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


@pytest.mark.parametrize("leads", [True, False], ids=["leader", "follower"])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("denies", "kind"), [(1, UnavailableError), (1_000, CorruptError)])
async def test_a_scan_that_has_given_rows_repeats_the_read_and_tells_whether_it_may_be_repeated(
    denies: int, kind: type[TidemillError], reverse: bool, leads: bool
) -> None:
    async with DomainWorld() as world:
        objects = Denying(SystemClock())
        node = await cold_node(world, objects, leads=leads)
        chunks = node.scan(b"k", reverse=reverse)
        await anext(chunks)
        objects.denies = denies
        with pytest.raises(kind, match="not in the bucket"):
            [keys async for keys, _ in chunks]
        assert denies > 1 or objects.denies == 0


async def test_a_lost_file_that_has_the_position_of_forwarded_requests_does_not_end_the_leader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "LOAD_RETRY_S", 0.01)
    async with DomainWorld() as world:
        objects = Denying(SystemClock())
        first = await world.node(objects=objects)
        await first.commit([(b"a%03d" % n, b"%03d" % n * 40) for n in range(100)])
        await (await world.node(FOLLOWS, objects=objects)).commit([(b"forwarded", b"1")])
        await first.flush(20)
        await first.aclose()
        objects.lost = frozenset([meta.key async for meta in objects.list("") if "/sst/" in meta.key])
        node = await world.node(replace(LEADS, options=UNCACHED), objects=objects)
        term = node.term
        await until(lambda: "Requests of other processes wait" in node.trouble())
        assert "Restore" in node.trouble()
        await node.commit([(b"own", b"2")])
        assert (await node.get(b"own"), node.term) == (b"2", term)
        follower = await world.node(FOLLOWS, objects=objects)
        waiting = asyncio.ensure_future(follower.commit([(b"forwarded", b"3")]))
        objects.lost = frozenset()
        await waiting
        assert (await node.get(b"forwarded"), node.term, node.trouble()) == (b"3", term, "")
