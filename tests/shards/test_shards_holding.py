"""Holds in use: renewed while needed, bounded in number, and without a write where no history can be lost."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from support.shards.world import World, append, contents_of, summed
from support.waiting import run
from tidemill.base.clock import ManualClock, SystemClock
from tidemill.base.errors import UnavailableError, UnknownOutcomeError
from tidemill.shards.api import Batch, HistoryLostError, Part
from tidemill.shards.read import read_handle
from tidemill.shards.read.holds import MovingHold, hold_during
from tidemill.shards.registry import open_shard
from tidemill.shards.state.apply import RejectedCommand, RejectionReason, apply
from tidemill.shards.state.commands import Append, Close, Create, SetHold
from tidemill.shards.state.state import HOLDS_MAX, ShardState

ROWS = [(n, "a", 5, 1) for n in range(50)]


async def test_a_hold_is_renewed_while_it_is_used_and_released_at_its_end() -> None:
    world = World()
    shard = await world.open()
    await append(shard, 0, 100, [(1, "a", 5, 1)])
    async with hold_during(shard, "verify/1", 30, ttl_ms=1500):
        await asyncio.sleep(0.9)
        await shard.downgrade_since("retention", 1, 90)
        assert (await shard.frontiers())[0] == 30
        versions = {hold.version for hold in shard.state.holds if hold.reader == "verify/1"}
        assert versions == {3} and shard.state.version > 4, "renewing keeps what was chosen long ago"
    await shard.downgrade_since("retention", 1, 90)
    assert (await shard.frontiers())[0] == 90
    with pytest.raises(RuntimeError, match="the reader"):
        async with shard.hold_during("verify", 95):
            raise RuntimeError("the reader failed")
    await shard.frontiers()
    assert [hold.reader for hold in shard.state.holds] == ["retention"]


async def test_there_are_only_so_many_holds_at_once() -> None:
    world = World()
    shard = await world.open()
    await append(shard, 0, 100, [(1, "a", 5, 1)])
    for n in range(HOLDS_MAX):
        await shard.set_hold(f"reader-{n}", 10, 60_000)
    with pytest.raises(UnavailableError, match="too many"):
        await shard.set_hold("one more", 10, 60_000)
    await shard.set_hold("reader-7", 20, 60_000)  # renewing is no new hold
    await shard.release_hold("reader-3")
    await shard.set_hold("one more", 10, 60_000)


async def test_a_moving_hold_writes_seldom_and_not_at_all_at_the_head() -> None:
    world, clock = World(), ManualClock()
    consensus = world.consensus()
    shard = await open_shard(consensus, world.objects, clock, world.rand, "t", (await world.open()).schema)
    await append(shard, 0, 1_000_000, [(1, "a", 5, 1)])
    hold = MovingHold(shard, "derived/1", clock, ttl_ms=300_000)
    before = consensus.appends
    await hold.move_to(999_999)
    assert consensus.appends == before, "since never passes the newest time"
    for second in range(600):
        clock.advance(1000)
        await hold.move_to(100_000 + second * 1000)
    assert 10 <= consensus.appends - before <= 25, "about every thirty seconds"
    await hold.release()
    await shard.frontiers()
    assert shard.state.holds == ()


async def test_a_kept_hold_is_renewed_where_it_stands_and_at_the_head() -> None:
    world = World()
    shard = await world.open()
    await append(shard, 0, 100, [(1, "a", 5, 1)])
    hold = MovingHold(shard, "stream/1", SystemClock(), ttl_ms=3000, kept=True)
    proposing, turns = shard.set_hold, asyncio.Queue[tuple[int, BaseException | None]]()

    async def watched(reader: str, since: int, ttl_ms: int) -> None:
        error: BaseException | None = None
        try:
            if turns_away:
                raise turns_away.pop()
            await proposing(reader, since, ttl_ms)
        except BaseException as raised:
            error = raised
            raise
        finally:
            turns.put_nowait((since, error))

    turns_away: list[BaseException] = []
    shard.set_hold = watched  # type: ignore[method-assign]
    keeping = asyncio.ensure_future(hold.renew_until_cancelled())
    await hold.move_to(99)
    assert await turns.get() == (99, None), "much may be written before its owner comes back"
    chosen_at = shard.state.holds[0].version
    await append(shard, 100, 200, [(2, "a", 150, 1)])
    await shard.downgrade_since("retention", 1, 150)
    turns_away.append(UnknownOutcomeError("the answer was lost."))
    since, error = await turns.get()
    assert since == 99 and isinstance(error, UnknownOutcomeError)
    assert await turns.get() == (99, None), "the next turn"
    assert (await shard.frontiers())[0] == 99
    assert next(h for h in shard.state.holds if h.reader == "stream/1").version == chosen_at

    await shard.release_hold("stream/1")  # as if it had lapsed
    await shard.downgrade_since("retention", 1, 160)
    since, error = await turns.get()
    assert since == 99 and isinstance(error, HistoryLostError) and not keeping.done()
    with pytest.raises(HistoryLostError):
        await hold.move_to(99)
    await hold.move_to(170)
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
    await shard.frontiers()
    assert "stream/1" in [h.reader for h in shard.state.holds], "its owner may come back"


async def test_a_large_read_holds_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_handle, "HOLD_ABOVE_BYTES", 100)
    world = World()
    shard = await world.open()
    await append(shard, 0, 100, ROWS)
    taken: list[str] = []
    proposing = shard.set_hold

    async def hold(reader: str, since: int, ttl_ms: int) -> None:
        taken.append(f"{reader.partition('/')[0]} {since}")
        await proposing(reader, since, ttl_ms)

    shard.set_hold = hold  # type: ignore[method-assign]
    assert contents_of(await shard.snapshot(50)) == summed(ROWS, 50)
    listener = shard.listen(0)
    assert (await anext(listener)).upper == 100
    await listener.aclose()  # type: ignore[attr-defined]
    assert taken == ["read 50", "listen 0"]
    await shard.frontiers()
    assert shard.state.holds == ()


def test_f704_a_command_that_would_break_the_shard_is_refused_and_changes_nothing() -> None:
    """These checks must also hold under -O, which removes `assert`."""
    state: ShardState | None = None
    schema = run(World().open()).schema
    for command in (Create("t", "id", schema), Append(Batch(0, 100, (), "w", "t"))):
        found = apply(state, command)
        assert isinstance(found, ShardState)
        state = found
    assert state is not None
    # A rollup of another version, with a since beyond its upper: no command may build on it.
    torn = replace(state, since=500)
    for command in (Append(Batch(100, 200, (), "w", "u")), SetHold("r", 600, 1000, 1), Close()):
        refused = apply(torn, command)
        assert isinstance(refused, RejectedCommand) and refused.reason is RejectionReason.BROKEN, refused
        assert "nothing is readable" in refused.detail
    negative = replace(state, rows=-5)
    part = Part(1, 10, 0, "", b"x" * 10)
    refused = apply(negative, Append(Batch(100, 200, (part,), "w", "u")))
    assert (
        isinstance(refused, RejectedCommand) and refused.reason is RejectionReason.BROKEN and "sums" in refused.detail
    )
