"""Transactions in a partition: open and committed records, visibility for readers, and permission to begin."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import crc32c
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.scenarios.topic_plants import planted
from support.topics.transactions import WITHIN, Coordinator, committed, data, open_node, planned, shown
from support.topics.world import World, batch, fetch
from support.waiting import until
from tidemill.base.errors import TidemillError, UnavailableError
from tidemill.metastore.rows.partitions import AbortedRow
from tidemill.topics.api import (
    InvalidProducerEpochError,
    InvalidRecordsError,
    InvalidTransactionError,
    Marker,
    NotLeaderError,
    OffsetOutOfRangeError,
    OutOfOrderSequenceError,
)
from tidemill.topics.batch.control_batch import encode_marker
from tidemill.topics.batch.header import parse_header
from tidemill.topics.config.configs import TopicConfig
from tidemill.topics.lifecycle.retention import retained_start
from tidemill.topics.partition.rollup import copy_state
from tidemill.topics.partition.state_machine.apply import Rejected, apply
from tidemill.topics.partition.state_machine.codec import decode_command, decode_state, encode_command, encode_state
from tidemill.topics.partition.state_machine.commands import Advance, PlaceBatches, Placeholder
from tidemill.topics.partition.state_machine.row_codec import (
    build_aborted_rows,
    build_extents,
    build_partition_row,
    rebuild_state,
)
from tidemill.topics.partition.state_machine.state import PartitionState
from tidemill.topics.partition.state_machine.transactions import ABORT, COMMIT, OPEN_LIMIT, PLAIN, TRANSACTIONAL

# one partition ------------------------------------------------------------------------------------


async def test_a_transaction_is_shown_as_a_whole_when_it_is_committed_and_never_when_it_is_aborted() -> None:
    world, coordinator = World(), Coordinator()
    topic_id = (await world.topic()).topic_id
    node = open_node(world, coordinator)
    coordinator.open |= {(1, 0), (2, 0)}
    await node.produce_nowait(topic_id, 0, batch("plain"))
    await node.produce_nowait(topic_id, 0, data("a1", "a2", pid=1), within=WITHIN)
    await node.produce_nowait(topic_id, 0, data("b1", pid=2), within=WITHIN)
    await node.produce_nowait(topic_id, 0, data("a3", pid=1, seq=2), within=WITHIN)
    await node.produce_nowait(topic_id, 0, batch("after"))
    assert coordinator.asked == 2  # once for each transaction
    offsets = await node.offsets(topic_id, 0)
    assert (offsets.high_watermark, offsets.last_stable) == (6, 1)
    before = await committed(node, topic_id)
    assert (before.high_watermark, before.last_stable, before.aborted, shown(before)) == (6, 1, (), ["plain"])
    assert (await committed(node, topic_id, 3)).batches == []  # above what is stable, no error
    assert len((await fetch(node, topic_id, 0, 0)).batches) == 5
    with pytest.raises(OffsetOutOfRangeError):
        await world.reader.plan(topic_id, 0, 0, 6)

    await node.mark(topic_id, 0, Marker(2, 0, False, 7))
    assert (await committed(node, topic_id)).last_stable == 1  # the other one holds it
    await node.mark(topic_id, 0, Marker(1, 0, True, 7))
    found = await committed(node, topic_id)
    assert (found.high_watermark, found.last_stable) == (8, 8)
    assert (list(found.aborted), shown(found)) == ([(2, 3)], ["plain", "a1", "a2", "a3", "after"])
    assert await planned(world, topic_id) == ["plain", "a1", "a2", "a3", "after"]
    assert (await fetch(node, topic_id, 0, 0)).aborted == ()
    # From the middle of it too: what an aborted one left behind the asked offset is named.
    assert list((await committed(node, topic_id, 3)).aborted) == [(2, 3)]
    assert list((await committed(node, topic_id, 7)).aborted) == []
    await world.aclose()


async def test_markers_are_kafkas_control_batches() -> None:
    world, coordinator = World(), Coordinator()
    topic_id = (await world.topic()).topic_id
    node = open_node(world, coordinator)
    for producer_id, commit in ((1, True), (2, False)):
        coordinator.open.add((producer_id, 0))
        await node.produce_nowait(topic_id, 0, data("x", pid=producer_id), within=WITHIN)
        await node.mark(topic_id, 0, Marker(producer_id, 0, commit, 5))
    batches = (await fetch(node, topic_id, 0, 0)).batches
    for at in (1, 3):
        header = parse_header(batches[at])
        assert (header.attributes, header.base_sequence, header.record_count, header.base_offset) == (
            0x30,
            -1,
            1,
            at,
        )
    from kafka.record.default_records import DefaultRecordBatch  # an implementation that is not ours

    for at, kind in ((1, 1), (3, 0)):
        theirs = DefaultRecordBatch(bytes(batches[at]))
        assert theirs.validate_crc() and theirs.is_control_batch and theirs.is_transactional
        (record,) = list(theirs)
        assert record.key == bytes((0, 0, 0, kind))
        assert record.value == bytes((0, 0, 0, 0, 0, 5))
    await world.aclose()


async def test_a_committed_long_poll_is_woken_by_the_marker_not_by_the_data() -> None:
    world, coordinator = World(), Coordinator()
    topic_id = (await world.topic()).topic_id
    node = open_node(world, coordinator)
    coordinator.open.add((1, 0))
    waiting = asyncio.ensure_future(committed(node, topic_id, wait_s=50.0))
    await node.produce_nowait(topic_id, 0, data("x", pid=1), within=WITHIN)
    assert not waiting.done()
    await node.mark(topic_id, 0, Marker(1, 0, True))
    assert shown(await waiting) == ["x"]
    await world.aclose()


async def test_a_batch_of_no_open_transaction_is_refused_and_the_next_one_is_asked_for_anew() -> None:
    world, coordinator = World(), Coordinator()
    topic_id = (await world.topic()).topic_id
    node = open_node(world, coordinator)
    with pytest.raises(InvalidTransactionError):
        await node.produce_nowait(topic_id, 0, data("x", pid=1), within=WITHIN)
    with pytest.raises(InvalidRecordsError):
        await node.produce_nowait(topic_id, 0, data("x", pid=1))
    coordinator.open.add((1, 0))
    coordinator.error = UnavailableError("consensus is away.")
    with pytest.raises(UnavailableError):
        await node.produce_nowait(topic_id, 0, data("x", pid=1), within=WITHIN)
    coordinator.error = None
    await node.produce_nowait(topic_id, 0, data("x", pid=1), within=WITHIN)
    with pytest.raises(InvalidTransactionError):  # concurrent with an open transaction of the same producer
        await node.produce_nowait(topic_id, 0, batch("y", pid=1, seq=1), within=WITHIN)
    assert (await node.offsets(topic_id, 0)).high_watermark == 1
    await world.aclose()


async def test_a_marker_overtakes_no_data_that_comes_later_is_taken() -> None:
    """The coordinator agreed, then ended the transaction: a late batch does not open it again."""
    world, coordinator = World(), Coordinator()
    topic_id = (await world.topic()).topic_id
    node = open_node(world, coordinator)
    coordinator.open.add((1, 0))
    coordinator.gate = asyncio.Event()
    late = node.produce_nowait(topic_id, 0, data("late", pid=1), within=WITHIN)
    await until(lambda: coordinator.asked == 1)
    await node.mark(topic_id, 0, Marker(1, 0, False))  # nothing is open here: nothing is written
    coordinator.gate.set()
    with pytest.raises(InvalidTransactionError):
        await late
    offsets = await node.offsets(topic_id, 0)
    assert (offsets.high_watermark, offsets.last_stable) == (0, 0)
    await world.aclose()


async def test_a_marker_is_told_done_only_by_the_leader_that_leads() -> None:
    """The log of a deposed node that does not know of its successor lacks the successor's records."""
    world, coordinator = World(), Coordinator()
    topic_id = (await world.topic()).topic_id
    old, new = open_node(world, coordinator), open_node(world, coordinator)
    coordinator.open.add((1, 0))
    assert (await old.offsets(topic_id, 0)).high_watermark == 0
    await new.produce_nowait(topic_id, 0, data("x", pid=1), within=WITHIN)
    with pytest.raises(TidemillError):
        await old.mark(topic_id, 0, Marker(1, 0, True))
    await new.aclose()
    await old.mark(topic_id, 0, Marker(1, 0, True))  # which leads again, and has read the log
    assert shown(await committed(old, topic_id)) == ["x"]
    await world.aclose()


async def test_a_deposed_leader_does_not_say_that_a_transaction_is_not_open() -> None:
    """The marker that ended the previous transaction is in the log of its successor."""
    world, coordinator = World(), Coordinator()
    topic_id = (await world.topic()).topic_id
    old, new = open_node(world, coordinator), open_node(world, coordinator)
    coordinator.open |= {(1, 0), (1, 1)}
    await old.produce_nowait(topic_id, 0, data("x", pid=1), within=WITHIN)
    await new.mark(topic_id, 0, Marker(1, 0, True))
    with pytest.raises(NotLeaderError):
        await old.produce_nowait(topic_id, 0, data("y", pid=1, epoch=1), within=WITHIN)
    await new.aclose()
    await old.produce_nowait(topic_id, 0, data("y", pid=1, epoch=1), within=WITHIN)
    await world.aclose()


async def test_marks_are_repeated_without_harm_and_a_newer_epoch_fences_the_producer() -> None:
    world, coordinator = World(), Coordinator()
    topic_id = (await world.topic()).topic_id
    node = open_node(world, coordinator)
    coordinator.open |= {(1, 0), (1, 1), (1, 2)}
    await node.produce_nowait(topic_id, 0, data("x", pid=1, seq=0), within=WITHIN)
    await asyncio.gather(*(node.mark(topic_id, 0, Marker(1, 1, False)) for _ in range(3)))
    assert (await node.offsets(topic_id, 0)).high_watermark == 2
    with pytest.raises(InvalidProducerEpochError):
        await node.produce_nowait(topic_id, 0, data("zombie", pid=1, seq=1), within=WITHIN)
    with pytest.raises(OutOfOrderSequenceError):
        await node.produce_nowait(topic_id, 0, data("gap", pid=1, epoch=1, seq=1), within=WITHIN)
    await node.produce_nowait(topic_id, 0, data("next", pid=1, epoch=1), within=WITHIN)
    await node.mark(topic_id, 0, Marker(1, 0, False))  # of an older epoch: it ends nothing of a newer one
    assert (await node.offsets(topic_id, 0)).last_stable == 2
    await node.mark(topic_id, 0, Marker(1, 1, True))
    assert shown(await committed(node, topic_id)) == ["next"]
    await world.aclose()


@pytest.mark.parametrize("rollup_records", [2, 4096])
async def test_the_next_leader_and_readers_of_the_log_know_what_is_open_and_what_was_aborted(
    rollup_records: int,
) -> None:
    world, coordinator = World(rollup_records=rollup_records), Coordinator()
    topic_id = (await world.topic()).topic_id
    node = open_node(world, coordinator)
    coordinator.open |= {(pid, 0) for pid in range(1, 9)}
    for pid in range(1, 8):
        await node.produce_nowait(topic_id, 0, data(f"of {pid}", pid=pid), within=WITHIN)
        if pid != 4:
            await node.mark(topic_id, 0, Marker(pid, 0, pid % 2 == 0))
    await node.aclose()
    heir = open_node(world, coordinator)
    found = await committed(heir, topic_id)
    assert (found.last_stable, shown(found)) == (6, ["of 2"])
    asked = coordinator.asked
    await heir.produce_nowait(topic_id, 0, data("more of 4", pid=4, seq=1), within=WITHIN)
    assert coordinator.asked == asked  # it is open here
    await heir.mark(topic_id, 0, Marker(4, 0, True))
    assert shown(await committed(heir, topic_id)) == ["of 2", "of 4", "of 6", "more of 4"]
    assert await planned(world, topic_id) == ["of 2", "of 4", "of 6", "more of 4"]
    assert [(p.producer_id, p.open_since) for p in await heir.producers(topic_id, 0)][-1] == (4, -1)
    await world.aclose()


async def test_the_log_does_not_start_within_an_open_transaction_by_itself() -> None:
    world, coordinator = World(), Coordinator()
    topic_id = (await world.topic()).topic_id
    node = open_node(world, coordinator)
    coordinator.open |= {(1, 0), (2, 0)}
    await node.produce_nowait(topic_id, 0, data("gone", pid=1), within=WITHIN)
    await node.mark(topic_id, 0, Marker(1, 0, False))
    await node.produce_nowait(topic_id, 0, data("kept", pid=2), within=WITHIN)
    state = node._led[topic_id, 0].state
    assert retained_start(state, TopicConfig(retention_ms=1), 1 << 50) == 2
    state.set_log_start(2)
    assert (len(state.aborted), state.last_stable) == (0, 2)
    await world.aclose()


@pytest.mark.parametrize("commit", [True, False])
@pytest.mark.parametrize("start", [1, 3, 4])
async def test_a_log_made_to_start_within_an_open_transaction_shows_none_of_it_before_its_end(
    start: int, commit: bool
) -> None:
    """DeleteRecords may cut anywhere, also within a batch: one of the transaction or of another producer."""
    world, coordinator = World(), Coordinator()
    topic_id = (await world.topic()).topic_id
    node = open_node(world, coordinator)
    coordinator.open.add((1, 0))
    await node.produce_nowait(topic_id, 0, data("a", "b", "c", pid=1), within=WITHIN)
    await node.produce_nowait(topic_id, 0, batch("x", "y"))
    await node.delete_records(topic_id, 0, start)
    assert (await node.offsets(topic_id, 0)).last_stable == start
    for offset in (start, 5):
        found = await committed(node, topic_id, offset)
        assert (found.error, found.batches) == (None, [])
    await node.mark(topic_id, 0, Marker(1, 0, commit))
    found = await committed(node, topic_id, start)
    assert shown(found) == (["a", "b", "c"] if commit and start < 3 else []) + ["x", "y"], "a batch is not cut"
    await world.aclose()


# the pure state -----------------------------------------------------------------------------------

Step = tuple[int, int, int]
"""(producer, what it does: PLAIN, TRANSACTIONAL, COMMIT, ABORT, records)"""
steps = st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0, 1, 1, 1, 2, 3]), st.integers(1, 3)), max_size=40)


class Model:
    """Every record with its fate, computed from the steps alone."""

    def __init__(self) -> None:
        self.records: list[tuple[int, int, str]] = []
        """(producer, offset, "plain" | "open" | "committed" | "aborted" | "marker")"""
        self.sequences: dict[int, int] = {}

    def is_open(self, producer: int) -> bool:
        return any(p == producer and fate == "open" for p, _, fate in self.records)

    def step(self, producer: int, kind: int, count: int) -> bool:
        """Apply a step; return False if it is not permitted."""
        at = len(self.records)
        if kind in (COMMIT, ABORT):
            if not self.is_open(producer):
                return False
            fate = "committed" if kind == COMMIT else "aborted"
            self.records = [(p, o, fate if p == producer and f == "open" else f) for p, o, f in self.records]
            self.records.append((producer, at, "marker"))
            return True
        if kind == PLAIN and self.is_open(producer):
            return False
        self.records += [(producer, at + i, "open" if kind == TRANSACTIONAL else "plain") for i in range(count)]
        return True

    @property
    def last_stable(self) -> int:
        return min((o for _, o, f in self.records if f == "open"), default=len(self.records))


def place(state: PartitionState, model: Model, steps: Sequence[Step]) -> None:
    """Apply the permitted steps, one command each, and check that the others are rejected."""
    for producer, kind, count in steps:
        base = state.high_watermark
        marker = kind in (COMMIT, ABORT)
        count = 1 if marker else count
        sequence = -1 if marker else model.sequences.get(producer, 0)
        holder = Placeholder(0, base, 1, base, count, producer, 0, sequence, 0, kind)
        command = PlaceBatches(state.last_at_ms + 1, ("k",), (holder,))
        rejected = apply(state, command, state.applied, 1)
        assert (rejected is None) == model.step(producer, kind, count)
        if rejected is None and not marker:
            model.sequences[producer] = sequence + count
        assert state.last_stable == model.last_stable
        assert state.high_watermark == len(model.records)


def consumed(state: PartitionState, model: Model, start: int, end: int) -> list[int]:
    """Return the offsets in [start, end) that a consumer of Kafka's shows, given the aborted transactions of a
    committed fetch."""
    waiting = state.aborted.overlapping(start, end)
    aborted: set[int] = set()
    out: list[int] = []
    for producer, offset, fate in model.records[start:end]:
        while waiting and waiting[0][1] <= offset:
            aborted.add(waiting.pop(0)[0])
        if fate == "marker":
            aborted.discard(producer)
        elif fate == "plain" or producer not in aborted:
            out.append(offset)
    return out


@settings(max_examples=200, deadline=None)
@given(before=steps, after=steps, cut=st.integers(0, 60), through=st.sampled_from(["rollup", "copy", "none"]))
def test_what_is_open_stable_and_aborted_is_what_the_records_say(
    before: list[Step], after: list[Step], cut: int, through: str
) -> None:
    state, model = PartitionState(), Model()
    place(state, model, before)
    if through != "none":
        state = decode_state(encode_state(copy_state(state) if through == "copy" else state), "key")
    place(state, model, after)
    start, end = min(cut, state.last_stable), state.last_stable
    state.set_log_start(start)
    wanted = [offset for _, offset, fate in model.records[:end] if fate in ("plain", "committed")]
    for at in range(start, end + 1):
        assert consumed(state, model, at, end) == [offset for offset in wanted if offset >= at]
    for index in range(state.batch_end_index(end)):
        ref = state.committed_batch_ref(index)
        producer, _, fate = model.records[ref.base_offset]
        if fate in ("committed", "aborted"):
            assert (producer in ref.aborted) == (fate == "aborted")


@settings(max_examples=150, deadline=None)
@given(before=steps, after=steps, cut=st.integers(0, 60))
def test_what_was_aborted_is_forgotten_where_compaction_has_taken_it_and_nowhere_else(
    before: list[Step], after: list[Step], cut: int
) -> None:
    state, model = PartitionState(), Model()
    place(state, model, before)
    clean = min(cut, state.last_stable)
    assert isinstance(apply(state, Advance(0, 0, "w", 0, clean, clean + 1), state.applied, 1), Rejected)
    assert apply(state, Advance(0, 0, "w", 0, clean, clean), state.applied, 1) is None
    state = decode_state(encode_state(copy_state(state)), "key")
    gone = {offset for _, offset, fate in model.records[:clean] if fate == "aborted"}
    assert all(last >= clean for last in state.aborted.lasts)
    place(state, model, after)
    end = state.last_stable
    wanted = [offset for _, offset, fate in model.records[:end] if fate in ("plain", "committed")]
    for at in range(end + 1):
        shown = [offset for offset in consumed(state, model, at, end) if offset not in gone]
        assert shown == [offset for offset in wanted if offset >= at]
    row = build_partition_row(state, "t", 0)
    stale = [AbortedRow("t", 0, 0, 1, 0, 1), *build_aborted_rows(state, "t", 0, 0)] if clean else []
    back = rebuild_state(row, build_extents(state, "t", 0, 0), stale)
    assert clean == 0 or back.aborted.lasts[: len(state.aborted)] == state.aborted.lasts


@settings(max_examples=100, deadline=None)
@given(some=steps, cut=st.integers(0, 60))
def test_rows_bring_back_what_was_decided_and_abort_what_was_open(some: list[Step], cut: int) -> None:
    state, model = PartitionState(), Model()
    place(state, model, some)
    state.set_log_start(min(cut, state.last_stable))
    row = build_partition_row(state, "t", 0)
    back = rebuild_state(row, build_extents(state, "t", 0, 0), build_aborted_rows(state, "t", 0, 0))
    assert back.last_stable == back.high_watermark == state.high_watermark
    kept = [back.aborted[at] for at in range(len(state.aborted))]
    assert kept == [state.aborted[at] for at in range(len(state.aborted))]
    ended = {back.aborted[at].producer_id for at in range(len(state.aborted), len(back.aborted))}
    assert ended == set(state.transactions)
    for index in range(len(back)):
        producer, offset, _ = model.records[back.bases[index]]
        if producer in state.transactions and offset >= state.transactions[producer].first_offset:
            assert producer in back.committed_batch_ref(index).aborted


def test_records_written_before_there_were_transactions_are_read() -> None:
    old = msgspec.msgpack.encode([1, 5, ["k"], [[0, 0, 10, 0, 2, 7, 0, 0, 99]]])
    state = PartitionState()
    assert apply(state, decode_command(old), 0, 1) is None
    assert (state.high_watermark, state.last_stable) == (2, 2)
    body = encode_state(state)[5:-4]
    plain = {k: v for k, v in msgspec.msgpack.decode(body).items() if k not in ("transactions", "aborted")}
    again = b"TMPR\x01" + msgspec.msgpack.encode(plain)
    found = decode_state(again + int(crc32c.crc32c(again)).to_bytes(4, "little"), "key")
    assert (found.last_stable, len(found.aborted), found.transactions) == (2, 0, {})
    assert encode_command(decode_command(old)) != old  # the kind is appended


async def test_the_transactions_of_a_partition_are_bounded() -> None:
    world, coordinator = World(), Coordinator()
    topic_id = (await world.topic()).topic_id
    node = open_node(world, coordinator)
    coordinator.open |= {(pid, 0) for pid in range(OPEN_LIMIT + 1)}
    sent = [node.produce_nowait(topic_id, 0, data("x", pid=pid), within=WITHIN) for pid in range(OPEN_LIMIT + 1)]
    results = await asyncio.gather(*sent, return_exceptions=True)
    assert sum(isinstance(result, InvalidTransactionError) for result in results) == 1
    row = build_partition_row(node._led[topic_id, 0].state, topic_id, 0)
    assert len(row.transactions) < 48 << 10
    await world.aclose()


async def test_a_marker_of_a_batch_that_fails_to_upload_is_told_so_and_may_be_sent_again() -> None:
    world, coordinator = World(), Coordinator()
    topic_id = (await world.topic()).topic_id
    node = open_node(world, coordinator)
    coordinator.open.add((1, 0))
    await node.produce_nowait(topic_id, 0, data("x", pid=1), within=WITHIN)
    world.objects.gated = True
    marking = asyncio.ensure_future(node.mark(topic_id, 0, Marker(1, 0, True)))
    await world.objects.let_go(0, UnavailableError("full."))
    with pytest.raises(TidemillError):
        await marking
    world.objects.gated = False
    await node.mark(topic_id, 0, Marker(1, 0, True))
    assert shown(await committed(node, topic_id)) == ["x"]
    assert parse_header(encode_marker(Marker(1, 0, True), 5)).base_timestamp_ms == 5
    await world.aclose()


@pytest.mark.parametrize("fault", ["", "late-marker"])
@pytest.mark.parametrize("began", [True, False])
async def test_a_late_marker_ends_no_later_transaction_of_its_epoch(fault: str, began: bool) -> None:
    """Two coordinators complete the first transaction. After one of them has, the producer continues in the same
    epoch."""
    with planted(fault):
        world, coordinator = World(), Coordinator()
        topic_id = (await world.topic()).topic_id
        node = open_node(world, coordinator)
        coordinator.open.add((1, 0))
        await node.produce_nowait(topic_id, 0, data("a", pid=1), within=WITHIN)
        slow = await node.transaction_snapshot(topic_id, 0, 1)
        await node.mark(topic_id, 0, Marker(1, 0, True), await node.transaction_snapshot(topic_id, 0, 1))
        if began:
            await node.produce_nowait(topic_id, 0, data("b", pid=1, seq=1), within=WITHIN)
        if fault:
            await node.mark(topic_id, 0, Marker(1, 0, True), slow)
        else:
            with pytest.raises(UnavailableError, match="Check the transaction and retry"):
                await node.mark(topic_id, 0, Marker(1, 0, True), slow)
        if began:
            assert shown(await committed(node, topic_id)) == (["a", "b"] if fault else ["a"])
            await node.mark(topic_id, 0, Marker(1, 0, False), await node.transaction_snapshot(topic_id, 0, 1))
        # Of nothing at all it ends nothing, however often it is sent.
        await node.mark(topic_id, 0, Marker(1, 0, True), await node.transaction_snapshot(topic_id, 0, 1))
        assert shown(await committed(node, topic_id)) == (["a", "b"] if fault and began else ["a"])
        await world.aclose()


async def test_a_marker_ends_what_it_saw_though_its_producer_asks_for_more() -> None:
    world, coordinator = World(), Coordinator()
    topic_id = (await world.topic()).topic_id
    node = open_node(world, coordinator)
    coordinator.open.add((1, 0))
    await node.produce_nowait(topic_id, 0, data("a", pid=1), within=WITHIN)
    here = await node.transaction_snapshot(topic_id, 0, 1)
    await node.produce_nowait(topic_id, 0, data("b", pid=1, seq=1), within=WITHIN)
    await node.mark(topic_id, 0, Marker(1, 0, True), here)
    assert shown(await committed(node, topic_id)) == ["a", "b"]
    await world.aclose()
