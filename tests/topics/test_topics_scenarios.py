"""Scenarios of docs/internals/topics-scenarios.md without a more specific file: terms, openings, closings,
hand-overs."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from support.topics.l1_world import L1World, produced
from support.topics.transactions import WITHIN, Coordinator, committed, data, open_node, shown
from support.topics.world import World, batch, fetch, read_all, values_of
from support.waiting import until
from tidemill.base.errors import CorruptError, FencedError, MissingError
from tidemill.consensus.api import LogHead
from tidemill.metastore.catalogue import TopicRow
from tidemill.topics.api import (
    FetchRead,
    InvalidProducerEpochError,
    InvalidTransactionError,
    Marker,
    NotLeaderError,
    OutOfOrderSequenceError,
)
from tidemill.topics.partition.recovery import catch_up, partition_log
from tidemill.topics.partition.state_machine import state as partition_state
from tidemill.topics.partition.state_machine.apply import Rejected, apply
from tidemill.topics.partition.state_machine.codec import encode_command
from tidemill.topics.partition.state_machine.commands import Advance, PlaceBatches, Placeholder
from tidemill.topics.partition.state_machine.state import PartitionState
from tidemill.topics.produce import ProducerQueueCore, TicketState

# producer queue -----------------------------------------------------------------------------------


@pytest.mark.parametrize("line", [1, ("connection", 1)])
def test_auto_release_dropping_the_second_does_not_free_the_third_before_the_first(line: Any) -> None:
    queue = ProducerQueueCore()
    first, second, third = (queue.reserve(line) for _ in range(3))
    queue.abandon(second)
    assert third.state is (TicketState.POISONED if line == 1 else TicketState.WAITING)
    freed = queue.release(first)
    assert freed == ([] if line == 1 else [third])
    queue.release(third)
    assert len(queue) == 0


# terms: what the notes' cluster epochs guard ------------------------------------------------------


async def test_epochs_1_and_2_are_accepted_then_0_is_rejected() -> None:
    """An epoch is a term of the partition's log here."""
    async with World() as world:
        row = await world.topic()
        log = partition_log(row.topic_id, 0)
        for term in (1, 2):
            node = world.node()
            await node.produce_nowait(row.topic_id, 0, batch(str(term)))
            assert (await world.consensus.log_head(log)).term == term
        with pytest.raises(FencedError):
            await world.consensus.append(log, 1, 2, [b"late"], "n")
        with pytest.raises(FencedError):
            await world.consensus.fence(log, 1)
        assert await read_all(world, row.topic_id) == [(0, "1"), (1, "2")]


async def test_a_term_that_was_rejected_is_rejected_still_after_a_roll_up_and_a_restart() -> None:
    async with World(rollup_records=4) as world:
        row = await world.topic()
        log = partition_log(row.topic_id, 0)
        old, new = world.node(), world.node()
        await old.produce_nowait(row.topic_id, 0, batch("0"))
        for n in range(1, 9):
            await new.produce_nowait(row.topic_id, 0, batch(str(n)))
        await world.truncated(log)
        term = (await world.consensus.log_head(log)).term
        await new.aclose()
        with pytest.raises(NotLeaderError):
            await old.produce_nowait(row.topic_id, 0, batch("late"))
        again = world.node()
        assert (await again.produce_nowait(row.topic_id, 0, batch("9"))).base_offset == 9
        for late in range(1, term + 1):
            with pytest.raises(FencedError):
                await world.consensus.append(log, late, (await world.consensus.log_head(log)).next, [b"x"], "n")
        assert [value for _, value in await read_all(world, row.topic_id)] == [str(n) for n in range(10)]


async def test_a_restart_replays_a_log_cut_at_a_roll_up_and_at_any_position_behind_it() -> None:
    """A snapshot at the edge of the truncation, and a reader without state: both find the whole state."""
    async with World(rollup_records=4) as world:
        row = await world.topic()
        log = partition_log(row.topic_id, 0)
        node = world.node()
        for n in range(12):
            await node.produce_nowait(row.topic_id, 0, batch(str(n)))
        await world.truncated(log)
        await node.aclose()
        wiped, head = await catch_up(world.consensus, world.objects, log, PartitionState())
        assert wiped.high_watermark == 12
        for start in range(head.start, wiped.rollup_position + 1):
            await world.consensus.truncate(log, start)
            found, _ = await catch_up(world.consensus, world.objects, log, PartitionState())
            assert (found.high_watermark, found.applied) == (wiped.high_watermark, wiped.applied)
        again = world.node()
        assert (await again.produce_nowait(row.topic_id, 0, batch("12"))).base_offset == 12


async def test_ten_who_open_a_partition_at_once_fence_it_once_and_all_succeed() -> None:
    """F9: no stampede."""
    async with World() as world:
        row = await world.topic()
        node = world.node()
        fence, fenced = world.consensus.fence, 0

        async def counted(log: str, term: int) -> LogHead:
            nonlocal fenced
            fenced += 1
            return await fence(log, term)

        world.consensus.fence = counted  # type: ignore[method-assign]
        sent = [node.produce_nowait(row.topic_id, 0, batch(str(n), pid=n, seq=0)) for n in range(10)]
        reads = [fetch(node, row.topic_id, 0, 0, wait_s=10.0) for _ in range(10)]
        assert sorted(one.base_offset for one in await asyncio.gather(*sent)) == [*range(10)]
        assert all(found.error is None for found in await asyncio.gather(*reads))
        assert fenced == 1


async def test_a_batch_of_an_earlier_leadership_is_rejected_after_leadership_came_back() -> None:
    """F8: the node leads again, and objects uploaded in its first term are not placed in its second."""
    async with World() as world:
        row = await world.topic()
        first, other = world.node(), world.node()
        await first.produce_nowait(row.topic_id, 0, batch("0", pid=9, seq=0))
        world.objects.gated = True
        stale = first.produce_nowait(row.topic_id, 0, batch("stale", pid=9, seq=1))
        await until(lambda: len(world.objects.waiting) == 1)
        await other.offsets(row.topic_id, 0)
        await first._led[row.topic_id, 0].prove_leadership()  # it learns that its term ended
        await first.offsets(row.topic_id, 0)  # it leads again
        assert first._led[row.topic_id, 0].is_open
        await world.objects.let_go(0)
        with pytest.raises(NotLeaderError):
            await stale
        world.objects.gated = False
        assert (await first.produce_nowait(row.topic_id, 0, batch("1", pid=9, seq=1))).base_offset == 1
        assert await read_all(world, row.topic_id) == [(0, "0"), (1, "1")]


async def test_a_refused_command_in_the_log_stops_no_replay() -> None:
    """F7: a command that was rejected when it was appended is rejected again, from wherever the log is read."""
    async with World() as world:
        row = await world.topic()
        log = partition_log(row.topic_id, 0)
        node = world.node()
        await node.produce_nowait(row.topic_id, 0, batch("0"))
        head = await world.consensus.log_head(log)
        gap = PlaceBatches(0, ("o",), (Placeholder(0, 0, 1, 7, 1, -1, -1, -1, 0),))
        beyond = Advance(0, 99, "w", 0)
        await world.consensus.append(log, head.term, head.next, [encode_command(gap), encode_command(beyond)], "n")
        again = world.node()
        assert (await again.produce_nowait(row.topic_id, 0, batch("1"))).base_offset == 1
        state = PartitionState()
        assert isinstance(apply(state, gap, 0, 1), Rejected) and isinstance(apply(state, beyond, 1, 1), Rejected)
        assert (state.applied, state.high_watermark, state.log_start) == (2, 0, 0)
        assert await read_all(world, row.topic_id) == [(0, "0"), (1, "1")]


def test_what_an_idle_partition_has_decided_moves_with_each_advance_and_never_back() -> None:
    """Advances to 5, 10 and 15: objects of the same writer below them are decided, of another writer those seen
    before."""
    state = PartitionState()
    for position, below in enumerate((5, 10, 15)):
        assert apply(state, Advance(0, 0, "w", below), position, 1) is None
        assert state.settled.is_settled("w", below - 1, 0) and not state.settled.is_settled("w", below, 0)
        assert state.settled.is_settled("other", 99, position) and not state.settled.is_settled(
            "other", 0, position + 1
        )


# idempotence and transactions ---------------------------------------------------------------------


async def test_a_producer_whose_transaction_is_open_is_never_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition_state, "PRODUCERS_LIMIT", 3)
    async with World() as world:
        row = await world.topic()
        coordinator = Coordinator()
        coordinator.open = {(1, 0)}
        node = open_node(world, coordinator)
        await node.produce_nowait(row.topic_id, 0, data("a", pid=1), within=WITHIN)
        for pid in range(2, 8):
            await node.produce_nowait(row.topic_id, 0, batch("p", pid=pid, seq=0))
        assert set(node._led[row.topic_id, 0].state.producers) == {1, 6, 7}
        with pytest.raises(OutOfOrderSequenceError):
            await node.produce_nowait(row.topic_id, 0, data("c", pid=1, seq=5), within=WITHIN)
        await node.produce_nowait(row.topic_id, 0, data("b", pid=1, seq=1), within=WITHIN)


async def test_a_producer_with_a_batch_in_flight_keeps_its_order_though_its_state_was_evicted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(partition_state, "PRODUCERS_LIMIT", 2)
    async with World() as world:
        row = await world.topic()
        node = world.node()
        await node.produce_nowait(row.topic_id, 0, batch("a0", pid=1, seq=0))
        world.objects.gated = True
        first = node.produce_nowait(row.topic_id, 0, batch("a1", pid=1, seq=1))
        second = node.produce_nowait(row.topic_id, 0, batch("a2", pid=1, seq=2))
        await until(lambda: len(world.objects.waiting) >= 1)
        others = [node.produce_nowait(row.topic_id, 0, batch("p", pid=pid, seq=0)) for pid in (2, 3, 4)]
        await until(lambda: len(world.objects.waiting) >= 2)
        await world.objects.let_go(1)
        world.objects.gated = False
        await world.objects.let_go(0)
        await asyncio.gather(first, second, *others)
        mine = [value for _, value in await read_all(world, row.topic_id) if value.startswith("a")]
        assert mine == ["a0", "a1", "a2"]
        assert len(node._led[row.topic_id, 0].state.producers) <= 2


async def test_two_aborts_are_one_and_a_produce_after_an_abort_is_a_transaction_of_its_own() -> None:
    async with World() as world:
        row = await world.topic()
        coordinator = Coordinator()
        node = open_node(world, coordinator)
        coordinator.open = {(1, 0)}
        await node.produce_nowait(row.topic_id, 0, data("gone", pid=1), within=WITHIN)
        await node.mark(row.topic_id, 0, Marker(1, 0, False))
        end = (await node.offsets(row.topic_id, 0)).high_watermark
        await node.mark(row.topic_id, 0, Marker(1, 0, False))
        assert (await node.offsets(row.topic_id, 0)).high_watermark == end, "a second marker marks nothing"
        await node.produce_nowait(row.topic_id, 0, data("kept", pid=1, seq=1), within=WITHIN)
        assert shown(await committed(node, row.topic_id)) == []
        await node.mark(row.topic_id, 0, Marker(1, 0, True))
        assert shown(await committed(node, row.topic_id)) == ["kept"]


async def test_a_transaction_that_expired_without_data_leaves_nothing_and_its_late_batch_is_refused() -> None:
    async with World() as world:
        row = await world.topic()
        coordinator = Coordinator()
        node = open_node(world, coordinator)
        await node.produce_nowait(row.topic_id, 0, batch("plain"))
        await node.mark(row.topic_id, 0, Marker(1, 0, False))
        offsets = await node.offsets(row.topic_id, 0)
        assert (offsets.high_watermark, offsets.last_stable) == (1, 1)
        with pytest.raises(InvalidTransactionError):
            await node.produce_nowait(row.topic_id, 0, data("late", pid=1), within=WITHIN)
        assert shown(await committed(node, row.topic_id)) == ["plain"]


async def test_a_newer_epoch_fences_what_the_older_one_produces_and_begins() -> None:
    """A begin fences produces, and a stale begin is fenced."""
    async with World() as world:
        row = await world.topic()
        coordinator = Coordinator()
        node = open_node(world, coordinator)
        coordinator.open = {(1, 0)}
        await node.produce_nowait(row.topic_id, 0, data("old", pid=1), within=WITHIN)
        await node.mark(row.topic_id, 0, Marker(1, 1, False))  # the coordinator gave the epoch to another
        coordinator.open = {(1, 1)}
        with pytest.raises((InvalidProducerEpochError, InvalidTransactionError)):
            await node.produce_nowait(row.topic_id, 0, data("late", pid=1, seq=1), within=WITHIN)
        await node.produce_nowait(row.topic_id, 0, data("new", pid=1, epoch=1), within=WITHIN)
        with pytest.raises((InvalidProducerEpochError, InvalidTransactionError)):
            await node.produce_nowait(row.topic_id, 0, data("later", pid=1, seq=1), within=WITHIN)
        await node.mark(row.topic_id, 0, Marker(1, 0, True))
        assert shown(await committed(node, row.topic_id)) == [], "a late marker ends nothing of a newer epoch"
        await node.mark(row.topic_id, 0, Marker(1, 1, True))
        assert shown(await committed(node, row.topic_id)) == ["new"]


# what cannot be read ------------------------------------------------------------------------------


async def test_an_object_that_is_gone_keeps_its_partition_alone_from_l1_and_nothing_of_it_is_passed_over() -> None:
    """F12: each round reports the loss; batches after it are not moved as if it did not exist."""
    async with L1World(cache_bytes=0) as world:
        row = await world.topic()
        node = world.node()
        for name in ("x", "y"):
            await produced(node, row.topic_id, name)
        await produced(node, row.topic_id, "z", partition=1)
        lost = world.state(node, row.topic_id, 0).object_keys[0]
        await world.objects.delete(lost)
        for _ in range(2):
            done = await world.move(node, row.topic_id)
            assert isinstance(done.failed, CorruptError)
            assert world.state(node, row.topic_id, 0).reconciled == 0
            assert world.state(node, row.topic_id, 1).reconciled == 2
        assert values_of((await fetch(node, row.topic_id, 0, 2)).batches) == [(2, "ya"), (3, "yb")]


# topics that go while something is under way ------------------------------------------------------


async def test_a_topic_deleted_under_a_reader_ends_its_fetch_as_missing_and_no_other() -> None:
    """F26."""
    async with World() as world:
        gone = await world.catalogue.create_topic("gone", 1)
        stays = await world.catalogue.create_topic("stays", 1)
        node = world.node()
        for row in (gone, stays):
            await node.produce_nowait(row.topic_id, 0, batch("v"))
        reads = [FetchRead(row.topic_id, 0, 1, 1 << 20) for row in (gone, stays)]
        waiting = asyncio.ensure_future(node.fetch(reads, max_wait_s=60.0, min_bytes=1, max_bytes=1 << 20))
        led = node._led[gone.topic_id, 0]
        await until(lambda: len(led.watchers) > 0)
        await world.catalogue.delete(TopicRow, "gone")
        await node.refresh()
        one, other = await waiting
        assert isinstance(one.error, MissingError)
        assert other.error is None
        assert values_of((await fetch(node, stays.topic_id, 0, 0)).batches) == [(0, "v")]


@pytest.mark.parametrize("while_it", ["uploads", "adds"])
async def test_a_topic_deleted_while_a_round_moves_it_is_not_looked_at_again(while_it: str) -> None:
    """F27: no task or entry is left that would search for the topic forever."""
    async with L1World(reconcile=True, reconcile_min_s=0.005, reconcile_max_s=0.01) as world:
        row = await world.topic()
        node = world.reconciling()
        reached, go = asyncio.Event(), asyncio.Event()
        room: Any = world.objects if while_it == "uploads" else node.reconciler._rows
        name = "put" if while_it == "uploads" else "add"
        real = getattr(room, name)

        async def held(*arguments: Any) -> Any:
            if while_it == "adds" or arguments[0].startswith("l1/"):
                reached.set()
                await go.wait()
            return await real(*arguments)

        setattr(room, name, held)
        await node.start()
        await produced(node, row.topic_id, "x")
        await world.checkpoint()
        await reached.wait()
        await world.catalogue.delete(TopicRow, row.name)
        await node.refresh()
        go.set()
        rounds = node.reconciliation.scheduler
        assert rounds is not None
        await until(lambda: not rounds._listed and not rounds._due and not rounds._moved)
        assert (row.topic_id, 0) not in node._led
