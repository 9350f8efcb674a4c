"""Bindings between the offsets of topics and times: minting, compaction, and slices of times."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from support.shards.world import World
from tidemill.base.clock import ManualClock, Rand
from tidemill.base.errors import ConflictError, InvalidError, UnavailableError
from tidemill.shards.api import Binding, BindingsPage, HistoryLostError
from tidemill.shards.bindings import remap as remap_module
from tidemill.shards.bindings.minter import BindingMinter
from tidemill.shards.bindings.reclock import missing_offsets
from tidemill.shards.bindings.remap import LogRemap
from tidemill.shards.registry import open_remap
from tidemill.spark.decode.records import cut_slices


async def opened(world: World, consensus: object = None) -> LogRemap:
    return await open_remap(consensus or world.consensus(), world.wall, world.rand, "topic/t")  # type: ignore[arg-type]


def at(time_ms: int, *offsets: int) -> Binding:
    return Binding(time_ms, {"t": offsets})


def time_of(bindings: Sequence[Binding], topic_id: str, partition: int, offset: int) -> int | None:
    """Return the time of the first binding that covers the record (rule B2), or None while it is unbound."""
    passing = (b for b in bindings if len(b.offsets.get(topic_id, ())) > partition)
    return next((b.time_ms for b in passing if b.offsets[topic_id][partition] > offset), None)


def test_a_record_gets_the_smallest_time_that_passes_it() -> None:
    bindings = [Binding(0, {}), at(1000, 10), at(2000, 10, 10)]
    assert time_of(bindings, "t", 0, 9) == 1000
    assert time_of(bindings, "t", 0, 10) is None
    assert time_of(bindings, "t", 1, 9) == 2000
    assert time_of(bindings, "other", 0, 0) is None


async def test_m4501_offsets_one_and_three_at_one_second() -> None:
    remap = await opened(World())
    await remap.mint(at(1000, 4))
    bindings = await remap.after(-1)
    assert [time_of(bindings, "t", 0, o) for o in (1, 3)] == [1000, 1000]
    assert time_of(bindings, "t", 0, 4) is None
    latest = await remap.latest()
    assert latest is not None and latest.time_ms + 1 == 1001, "who has read up to 4 has every time below 1001"


@pytest.mark.parametrize(
    ("now_ms", "latest_ms", "next_ms"),
    [(0, None, 0), (1, None, 1), (1000, None, 1000), (1125, 1000, 1125), (1125, 2000, 2001)],
)
async def test_m4502_a_minter_takes_the_first_free_time_from_now_on(
    now_ms: int, latest_ms: int | None, next_ms: int
) -> None:
    clock = ManualClock(now_ms)
    remap = await opened(World())
    if latest_ms is not None:
        await remap.mint(at(latest_ms, 1))
    minter = BindingMinter(remap, clock, interval_ms=1000)
    await minter.open()
    assert minter.due_in_s() == 0.0, "what was minted by another life is no reason to wait"
    assert await minter.mint_missing({"t": (5,)}, 0)
    assert minter.latest is not None and minter.latest.time_ms == next_ms
    clock.advance(124)
    assert round(minter.due_in_s() * 1000) == 876
    clock.advance(876)
    assert minter.due_in_s() == 0.0
    assert not await minter.mint_missing({"t": (5,)}, 0), "nothing is minted while nothing moved"


async def test_m4503_partitions_that_are_bound_one_after_the_other() -> None:
    remap = await opened(World())
    for binding in (at(1000, 10), at(2000, 10, 10)):
        await remap.mint(binding)
    # Partitions to read from each upper: all, all, the second, none.
    for upper, resume in ((0, ()), (1000, ()), (1001, (10,)), (2000, (10,)), (2001, (10, 10))):
        base = await remap.at(upper - 1)
        assert (base.offsets["t"] if base else ()) == resume
        slices = cut_slices(base, await remap.after(upper - 1), "t", "t")
        assert {s.partition for s in slices} == {p for p in range(2) if len(resume) <= p}
        for each in slices:
            times = each.times_of(np.arange(each.start, each.end)).tolist()
            assert times == [(1000, 2000)[each.partition]] * 10


async def test_m4504_replay_gives_the_same_times_in_another_process() -> None:
    world = World()
    remap = await opened(world)
    for binding in (at(0, 3), at(1000, 5)):
        await remap.mint(binding)
    other = await opened(world)
    bindings = await other.after(-1)
    assert [time_of(bindings, "t", 0, o) for o in (1, 2, 3, 4)] == [0, 0, 1000, 1000]


async def test_m4505_what_lies_below_a_forgotten_time_is_an_error_and_the_rest_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remap_module, "WHOLE_RECORD_INTERVAL", 1)
    world = World()
    remap = await opened(world)
    for binding in (at(0, 3), at(1000, 5), at(2000, 6)):
        await remap.mint(binding)
    before = cut_slices(await remap.at(1000), await remap.after(1000), "t", "t")
    assert await remap.truncate_before(1000) == 1
    for handle in (await opened(world), await opened(world)):
        assert await handle.at(1000) == at(1000, 5), "offsets 3 and 4 are told from what comes later"
        assert cut_slices(await handle.at(1000), await handle.after(1000), "t", "t") == before
        for lost in (handle.at(0), handle.after(0)):
            with pytest.raises(HistoryLostError):
                await lost


async def test_m4506_two_minters_bind_an_offset_once() -> None:
    world = World()
    a, b = await opened(world), await opened(world)
    await b.latest()
    await a.mint(at(1000, 3))
    with pytest.raises(ConflictError) as caught:
        await b.mint(at(1000, 5))
    winner = caught.value.current
    assert winner == at(1000, 3)
    left = missing_offsets(winner, {"t": (5,)})
    minted = await b.mint(Binding(11_000, left))
    assert minted == at(11_000, 5)
    bindings = await a.after(-1)
    assert [time_of(bindings, "t", 0, o) for o in (1, 2, 3, 4)] == [1000, 1000, 11_000, 11_000]


async def test_racing_minters_bind_every_offset_once_and_monotonically() -> None:
    world = World()
    remaps = [await opened(world) for _ in range(4)]
    wins = [0] * 4

    async def minter(number: int) -> None:
        latest = await remaps[number].latest()
        while latest is None or latest.offsets["t"][0] < 80:
            done = latest.offsets["t"][0] if latest else 0
            time_ms = (latest.time_ms if latest else 0) + 10
            try:
                latest = await remaps[number].mint(at(time_ms, done + 1 + number))
                wins[number] += 1
            except ConflictError:
                latest = await remaps[number].latest()

    await asyncio.gather(*(minter(i) for i in range(4)))
    all_of_them = await remaps[0].after(-1)
    assert len(all_of_them) == sum(wins)
    times = [b.time_ms for b in all_of_them]
    offsets = [b.offsets["t"][0] for b in all_of_them]
    assert times == sorted(set(times)) and offsets == sorted(set(offsets))
    assert all([await r.after(-1) == all_of_them for r in remaps])


@pytest.mark.parametrize("worse", [at(1000, 9), at(999, 9), at(2000, 4), Binding(2000, {"t": (9,)}, lsn=1)])
async def test_nothing_goes_back(worse: Binding) -> None:
    remap = await opened(World())
    await remap.mint(Binding(1000, {"t": (5,)}, lsn=7))
    with pytest.raises(ConflictError):
        await remap.mint(worse)
    assert [b.time_ms for b in await remap.after(-1)] == [1000]


async def test_a_binding_is_always_whole() -> None:
    remap = await opened(World())
    await remap.mint(Binding(10, {"a": (5,), "b": (1,)}, lsn=7, source_time_ms=3))
    assert await remap.mint(Binding(20, {"b": (2,)})) == Binding(20, {"a": (5,), "b": (2,)}, 7, 3)
    with pytest.raises(InvalidError):
        await remap.mint(Binding(30, {"b": ()}))


async def test_lost_answers_of_a_mint_are_resolved() -> None:
    world = World()
    consensus = world.consensus()
    remap = await opened(world, consensus)
    consensus.script = [(True, False)]
    assert await remap.mint(at(10, 1)) == at(10, 1)
    consensus.script = [(False, False)]
    with pytest.raises(UnavailableError):
        await remap.mint(at(20, 2))
    assert await remap.mint(at(20, 2)) == at(20, 2)
    assert [b.time_ms for b in await remap.after(-1)] == [10, 20]


async def test_history_beyond_the_window_is_found_by_bisection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remap_module, "WINDOW_BINDINGS", 20)
    world = World()
    remap = await opened(world)
    for i in range(1, 101):
        await remap.mint(at(i * 10, i))
    for handle in (remap, await opened(world)):
        assert [b.time_ms for b in await handle.after(0, limit=3)] == [10, 20, 30]
        assert [b.time_ms for b in await handle.after(505)] == [t * 10 for t in range(51, 101)]
        assert await handle.at(9) is None
        assert await handle.at(10) == at(10, 1)
        assert await handle.at(339) == at(330, 33)
        assert await handle.at(5000) == at(1000, 100)
        assert await handle.latest() == at(1000, 100)


async def test_a_page_is_what_after_at_and_latest_say_for_one_round_trip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remap_module, "WINDOW_BINDINGS", 20)
    world = World()
    consensus = world.consensus()
    remap = await opened(world, consensus)
    assert await remap.page(0) == BindingsPage(None, [], None)
    for i in range(1, 101):
        await remap.mint(at(i * 10, i))
    for lower in (0, 1, 10, 11, 505, 511, 990, 1000, 1001, 5000):
        base, later, newest = await remap.at(lower - 1), await remap.after(lower - 1, 7), await remap.latest()
        assert await remap.page(lower, 7) == BindingsPage(base, later, newest)
    before = consensus.requests
    await remap.page(991)
    assert consensus.requests == before + 1
    await remap.truncate_before(900)
    with pytest.raises(HistoryLostError):
        await remap.page(100)


async def test_wait_wakes_for_a_newer_binding() -> None:
    world = World()
    consensus = world.consensus()
    remap = await opened(world, consensus)
    assert not await remap.wait(0, 0.02)
    waiting = asyncio.ensure_future(remap.wait(5, 5))
    await remap.mint(at(5, 1))
    await asyncio.sleep(0.02)
    assert not waiting.done()
    await remap.mint(at(6, 2))
    assert await asyncio.wait_for(waiting, 2)
    assert await (await opened(world)).wait(5, 0)


async def test_a_wait_returns_the_newest_binding_for_one_wait_and_one_read() -> None:
    world = World()
    minter, consensus = await opened(world), world.consensus()
    remap = await opened(world, consensus)
    await remap.latest()
    for number in range(1, 6):
        await minter.mint(at(number * 10, number))
    before = consensus.requests
    assert await remap.wait(0, 5) == at(50, 5)
    assert consensus.requests == before + 2
    assert await remap.wait(40, 5) == at(50, 5)
    assert consensus.requests == before + 2, "what the handle knows costs nothing"


async def test_a_fresh_name_is_empty() -> None:
    world = World()
    remap = await opened(world)
    assert await remap.latest() is None
    assert await remap.at(10) is None
    assert await remap.after(-1) == []
    with pytest.raises(InvalidError):
        await open_remap(world.consensus(), world.wall, Rand(1), "")


async def test_an_lsn_goes_back_only_where_a_later_era_begins_and_no_minter_of_an_earlier_one_follows() -> None:
    world = World()
    remap, other = await opened(world), await opened(world)
    await remap.mint(Binding(1000, {"t": (4,)}, 500))
    behind = BindingMinter(other, world.wall, interval_ms=0)
    await behind.open()
    with pytest.raises(ConflictError, match="lsn=300"):
        await remap.mint(Binding(1001, {"t": (4,)}, 300))
    began = await remap.mint(Binding(1002, {}, 300, era=1))
    assert (began.lsn, began.era, began.offsets) == (300, 1, {"t": (4,)})
    with pytest.raises(UnavailableError, match="another minter is ahead"):
        await behind.mint(Binding(0, {"t": (9,)}, 900))
    await remap.mint(Binding(1003, {"t": (5,)}, 310, era=1))
    idle = await remap.advance(1004)
    assert idle is not None and (idle.lsn, idle.era) == (310, 1)
    # The same LSN in both eras, and what another process reads of all that.
    await remap.mint(Binding(1005, {}, 310, era=2))
    assert [(b.lsn, b.era) for b in await (await opened(world)).after(-1)] == [
        (500, 0), (300, 1), (310, 1), (310, 1), (310, 2),
    ]  # fmt: skip


def test_bindings_of_the_first_era_are_stored_as_they_always_were() -> None:
    first, second = Binding(1, {"t": (1,)}, 7, 5, "tag"), Binding(2, {"t": (2,)}, 8, 5)
    assert msgspec.msgpack.decode(remap_module.encode_binding(first)) == [1, 1, {"t": [1]}, 7, 5, "tag"]
    assert msgspec.msgpack.decode(remap_module.encode_delta(first, second, 1)) == [2, 1, 2, {"t": [2]}, 8, 0, ""]
