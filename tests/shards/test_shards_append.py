"""Compare-and-append under races and lost answers: every retry is idempotent."""

from __future__ import annotations

import asyncio

import pytest

from support.shards.world import SCHEMA, World, append, contents_of, updates
from tidemill.base.errors import ClosedError, ConflictError, InvalidError, MissingError, UnavailableError
from tidemill.shards.api import Batch, Column, Part, ShardSchema
from tidemill.shards.state.apply import RejectedCommand, RejectionReason, apply
from tidemill.shards.state.commands import Append, Create
from tidemill.shards.state.state import ShardState, check_invariants


async def test_append_moves_upper_and_shows_the_batch() -> None:
    shard = await World().open()
    assert await shard.frontiers() == (0, 0)
    assert await append(shard, 0, 6, [(1, "a", 5, 1)]) == 6
    assert await shard.frontiers() == (0, 6)
    assert contents_of(await shard.snapshot(5)) == {(1, "a"): 1}
    assert contents_of(await shard.snapshot(4)) == {}


async def test_a_writer_at_the_wrong_upper_is_told_the_current_one_and_changes_nothing() -> None:
    world = World()
    one, two = await world.open(), await world.open()
    await append(one, 0, 6, [(1, "a", 5, 1)])
    before = world.durable.heads.copy()
    with pytest.raises(ConflictError) as caught:
        await append(two, 0, 6, [(1, "b", 5, 1)])
    assert caught.value.current == 6
    with pytest.raises(ConflictError) as caught:
        await append(two, 9, 12, [])
    assert caught.value.current == 6
    assert world.durable.heads == before
    assert contents_of(await two.snapshot(5)) == {(1, "a"): 1}


async def test_m4401_caa_unknown_that_did_not_land_commits_on_the_retry() -> None:
    world = World()
    consensus = world.consensus()
    shard = await world.open(consensus=consensus)
    consensus.script = [(False, False)]
    assert await append(shard, 0, 3, [(1, "a", 2, 1)], "token") == 3
    assert contents_of(await shard.snapshot(2)) == {(1, "a"): 1}
    assert len(shard.state.batches) == 1


async def test_m4401_caa_unknown_that_landed_is_a_success_without_a_new_record() -> None:
    world = World()
    consensus = world.consensus()
    shard = await world.open(consensus=consensus)
    consensus.script = [(True, False)]
    assert await append(shard, 0, 3, [(1, "a", 2, 1)], "token") == 3
    version = shard.state.version
    # The caller itself retries with its token: no-op, same version, from any handle.
    assert await append(shard, 0, 3, [(1, "a", 2, 1)], "token") == 3
    other = await world.open(writer="other")
    assert await append(other, 0, 3, [(1, "a", 2, 1)], "token") == 3
    assert (await world.open()).state.version == version
    assert contents_of(await shard.snapshot(2)) == {(1, "a"): 1}


async def test_m4401_caa_peer_raced_and_ours_had_not_landed_is_a_mismatch() -> None:
    world = World()
    consensus = world.consensus()
    mine, peer = await world.open(consensus=consensus), await world.open()
    await append(peer, 0, 4, [(1, "peer", 2, 1)])
    consensus.script = [(False, False)]
    with pytest.raises(ConflictError) as caught:
        await append(mine, 0, 3, [(1, "mine", 2, 1)], "token")
    assert caught.value.current == 4
    assert contents_of(await mine.snapshot(3)) == {(1, "peer"): 1}


async def test_m4401_caa_peer_went_on_and_ours_had_landed_is_a_success() -> None:
    world = World()
    mine, peer = await world.open(), await world.open()
    await append(mine, 0, 3, [(1, "mine", 2, 1)], "token")
    await append(peer, 3, 8, [(2, "peer", 5, 1)])
    assert await append(mine, 0, 3, [(1, "mine", 2, 1)], "token") == 3
    assert contents_of(await mine.snapshot(7)) == {(1, "mine"): 1, (2, "peer"): 1}


async def test_m4401_caa_old_bounds_without_an_earlier_unknown_are_a_mismatch() -> None:
    world = World()
    mine, peer = await world.open(), await world.open()
    await append(mine, 0, 3, [(1, "a", 2, 1)], "one")
    with pytest.raises(ConflictError) as caught:
        await append(mine, 0, 3, [(1, "a", 2, 1)], "two")
    assert caught.value.current == 3
    with pytest.raises(InvalidError, match="token"):
        await append(peer, 3, 5, [], "one")


async def test_unavailable_is_passed_on_and_certain() -> None:
    world = World()
    consensus = world.consensus()
    shard = await world.open(consensus=consensus)
    consensus.script = [(False, True)]
    with pytest.raises(UnavailableError):
        await append(shard, 0, 3, [(1, "a", 2, 1)], "token")
    assert await shard.frontiers() == (0, 0)


@pytest.mark.parametrize(("lower", "upper"), [(0, 0), (3, 3), (5, 2), (-1, 4)])
async def test_bounds_errors_never_reach_the_network(lower: int, upper: int) -> None:
    world = World()
    consensus = world.consensus()
    shard = await world.open(consensus=consensus)
    requests = consensus.requests
    with pytest.raises(InvalidError):
        await shard.compare_and_append(lower, upper, [], "token")
    with pytest.raises(InvalidError):
        await shard.compare_and_append(0, 4, [Part(0, 0)], "token")
    assert consensus.requests == requests


async def test_empty_appends_publish_progress_and_do_not_grow_the_state() -> None:
    shard = await World().open()
    await append(shard, 0, 6, [(1, "a", 5, 1)])
    for upper in range(7, 40):
        await append(shard, upper - 1, upper, [])
    assert await shard.frontiers() == (0, 39)
    assert len(shard.state.batches) == 2
    check_invariants(shard.state)
    await append(shard, 39, 41, [(2, "b", 40, 1)])
    assert [(b.lower, b.upper) for b in shard.state.batches] == [(0, 6), (6, 39), (39, 41)]


async def test_orphan_parts_are_harmless() -> None:
    world = World()
    shard = await world.open()
    await shard.write_part(updates([(i, "x" * 100, 1, 1) for i in range(2000)]))
    assert len([m async for m in world.objects.list("shards/")]) == 1
    await append(shard, 0, 3, [(1, "a", 2, 1)])
    assert contents_of(await shard.snapshot(2)) == {(1, "a"): 1}


async def test_m4405_a_closed_shard_refuses_appends_and_stays_readable() -> None:
    world = World()
    shard = await world.open()
    await append(shard, 0, 3, [(1, "a", 2, 1)])
    await shard.close()
    await shard.close()
    version = shard.state.version
    with pytest.raises(ClosedError):
        await append(shard, 3, 4, [])
    with pytest.raises(ClosedError):
        await shard.snapshot(9)
    assert (await world.open()).state.version == version
    assert contents_of(await shard.snapshot(2)) == {(1, "a"): 1}
    assert [d.upper async for d in shard.listen(0)] == [3]


async def test_opening_refuses_another_schema_with_the_difference_and_a_missing_name() -> None:
    world = World()
    await world.open()
    await world.open(schema=None)
    other = ShardSchema((Column("k", "int32"), Column("w", "string")), ("k",))
    with pytest.raises(InvalidError, match=r"-v string, \+w string, k int64→int32"):
        await world.open(schema=other)
    with pytest.raises(MissingError):
        await world.open(name="absent", schema=None)
    with pytest.raises(InvalidError):
        await world.open(name="bad/name")
    assert [key for key in world.durable.registers] == ["shard/t"]


async def test_racing_creators_agree_on_one_shard() -> None:
    world = World()
    handles = await asyncio.gather(*(world.open() for _ in range(6)))
    assert len({h.shard_id for h in handles}) == 1
    assert {h.state.version for h in handles} == {1}


async def test_four_racing_writers_write_every_interval_exactly_once() -> None:
    world = World()
    shards = [await world.open(writer=f"w{i}") for i in range(4)]
    won: list[tuple[int, int]] = []

    async def race(number: int) -> None:
        shard = shards[number]
        at = 0
        while at < 60:
            rows = [(at, f"w{number}", at, 1)] + ([(at - 1, f"w{number}", at, 1)] if at % 3 == 0 else [])
            try:
                won.append((at, await append(shard, at, at + 1, rows)))
                at += 1
            except ConflictError as error:
                at = max(at + 1, int(str(error.current)))

    await asyncio.gather(*(race(i) for i in range(4)))
    assert sorted(won) == [(i, i + 1) for i in range(60)]
    check_invariants(shards[0].state)
    rows = (await shards[1].snapshot(59)).to_pylist()
    assert len(rows) == 60 + 20


def test_a_rejected_command_is_a_no_op() -> None:
    state = apply(None, Create("t", "id", SCHEMA))
    assert isinstance(state, ShardState)
    assert apply(None, Append(Batch(0, 1, ()))) == RejectedCommand(RejectionReason.ABSENT)
    rejected = apply(state, Append(Batch(3, 4, ())))
    assert isinstance(rejected, RejectedCommand) and rejected.reason is RejectionReason.UPPER
    exists = apply(state, Create("t", "other", SCHEMA))
    assert isinstance(exists, RejectedCommand) and exists.reason is RejectionReason.EXISTS


async def test_commit_cost_is_flat_in_the_number_of_batches() -> None:
    """The cost is counted, not timed: one record of a few hundred bytes, at 10 batches and at 1,500."""
    world = World()
    shard = await world.open()
    part = await shard.write_part(updates([(1, "a", 1, 1)]))
    sizes = []
    for at in range(1500):
        await shard.compare_and_append(at, at + 1, [part], "")
        if at in (10, 1499):
            log = world.durable.records[f"shard/{shard.shard_id}"]
            sizes.append(len(next(r for r in reversed(log) if len(r.data) < 100_000).data))
    assert abs(sizes[0] - sizes[1]) < 16
    reopened = await world.open()
    assert reopened.state == shard.state
