"""Rules of since: how far it moves, how holds stop it, and how a newer epoch fences an older holder."""

from __future__ import annotations

import pytest

from support.shards.world import SCHEMA, World, append
from tidemill.base.errors import FencedError, InvalidError
from tidemill.shards.api import Batch, HistoryLostError
from tidemill.shards.state.apply import RejectedCommand, apply
from tidemill.shards.state.commands import Append, Command, Create, DowngradeSince, ReleaseHold, SetHold
from tidemill.shards.state.state import ShardState


def after(*commands: Command) -> ShardState:
    state: ShardState | None = None
    for command in (Create("t", "id", SCHEMA), Append(Batch(0, 100, (), "w", "t")), *commands):
        result = apply(state, command)
        assert isinstance(result, ShardState), result
        state = result
    assert state is not None
    return state


def test_m4402_since_downgrade_mixed() -> None:
    leased = SetHold("leased", 0, 10_000, 1)
    state = after(leased, DowngradeSince("critical", 1, 2, 1), SetHold("leased", 3, 10_000, 1))
    assert state.since == 2
    state2 = apply(state, DowngradeSince("critical", 1, 5, 1))
    assert isinstance(state2, ShardState) and state2.since == 3
    state3 = apply(state2, SetHold("leased", 10, 10_000, 1))
    assert isinstance(state3, ShardState) and state3.since == 5


def test_leased_readers_alone_never_forget_history() -> None:
    assert after(SetHold("a", 10, 1000, 1), SetHold("a", 50, 1000, 1)).since == 0
    assert after(SetHold("a", 10, 1000, 1), ReleaseHold("a", 1)).since == 0


def test_since_never_goes_back_and_never_reaches_upper() -> None:
    state = after(DowngradeSince("critical", 1, 40, 1), DowngradeSince("critical", 1, 20, 1))
    assert state.since == 40
    assert after(DowngradeSince("critical", 1, 5000, 1)).since == 99
    refused = apply(state, SetHold("late", 39, 1000, 1))
    assert isinstance(refused, RejectedCommand)


def test_an_expired_lease_no_longer_holds_since() -> None:
    state = after(SetHold("reader", 10, 1000, 1), DowngradeSince("critical", 1, 60, 1))
    assert state.since == 10
    moved = apply(state, DowngradeSince("critical", 1, 60, 1001))
    assert isinstance(moved, ShardState) and moved.since == 60 and [h.reader for h in moved.holds] == ["critical"]


async def test_a_newer_epoch_takes_a_critical_hold_over_and_fences_the_older() -> None:
    world = World()
    old, new = await world.open(), await world.open()
    await append(old, 0, 100, [(1, "a", 5, 1)])
    assert await old.downgrade_since("pipeline", 1, 10) == 10
    assert await new.downgrade_since("pipeline", 2, 20) == 20
    with pytest.raises(FencedError):
        await old.downgrade_since("pipeline", 1, 30)
    assert await new.frontiers() == (20, 100)


async def test_reads_below_since_are_refused_and_a_hold_keeps_them() -> None:
    world = World()
    shard = await world.open()
    await append(shard, 0, 100, [(1, "a", 5, 1), (1, "a", 50, -1)])
    await shard.set_hold("reader", 30, 60_000)
    assert await shard.downgrade_since("pipeline", 1, 80) == 30
    assert (await shard.snapshot(30)).num_rows == 1
    await shard.release_hold("reader")
    assert await shard.downgrade_since("pipeline", 1, 80) == 80
    with pytest.raises(InvalidError, match="history is lost"):
        await shard.snapshot(30)
    with pytest.raises(InvalidError, match="history is lost"):
        await shard.set_hold("reader", 30, 60_000)
    with pytest.raises(InvalidError, match="history is lost"):
        async for _ in shard.listen(80):
            pass
    listener = shard.listen(81)
    assert (await anext(listener)).lower == 81


async def test_batches_are_chosen_only_from_history_that_is_still_told_apart() -> None:
    """Updates below a since of 80 may carry the time 80: a delta from 80 on would contain all of them."""
    shard = await World().open()
    await append(shard, 0, 100, [(1, "a", 5, 1), (1, "a", 50, -1), (2, "b", 90, 1)])
    assert len(await shard.batches(0)) == len(await shard.batches(80)) == 1
    assert await shard.downgrade_since("pipeline", 1, 80) == 80
    for lower in (-1, 0, 79, 80):
        with pytest.raises(HistoryLostError):
            await shard.batches(lower)
    assert len(await shard.batches(81)) == 1
    with pytest.raises(HistoryLostError):
        await shard.batches_until(79)
    assert len(await shard.batches_until(80)) == 1
