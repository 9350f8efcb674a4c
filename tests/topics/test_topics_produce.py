"""Produce through the whole path: order, idempotence, faults of stores, and the race of redpanda #30429."""

from __future__ import annotations

import asyncio

import pytest

from sim.scenarios.topic_plants import planted
from support.topics.world import World, batch, fetch, read_all, values_of
from support.waiting import until
from tidemill.base.errors import MissingError, UnavailableError, UnknownOutcomeError
from tidemill.consensus.api import LogHead
from tidemill.topics.api import (
    CorruptBatchError,
    InvalidProducerEpochError,
    NotLeaderError,
    OutOfOrderSequenceError,
    ProduceResult,
)
from tidemill.topics.batch import Record, encode_batch
from tidemill.topics.l0.format import decode_footer


async def test_records_come_back_with_their_offsets() -> None:
    async with World() as world:
        row = await world.topic()
        topics = world.node()
        first = await topics.produce_nowait(row.topic_id, 0, batch("a", "b"))
        second = await topics.produce_nowait(row.topic_id, 0, batch("c", compression="zstd"))
        other = await topics.produce_nowait(row.topic_id, 1, batch("x"))
        assert (first.base_offset, first.last_offset, second.base_offset, other.base_offset) == (0, 1, 2, 0)
        found = await fetch(topics, row.topic_id, 0, 0)
        assert values_of(found.batches) == [(0, "a"), (1, "b"), (2, "c")]
        assert (found.high_watermark, found.log_start_offset, found.error) == (3, 0, None)
        assert await read_all(world, row.topic_id) == [(0, "a"), (1, "b"), (2, "c")]


async def test_batches_of_many_partitions_share_one_object() -> None:
    async with World() as world:
        row = await world.topic(partitions=8)
        topics = world.node()
        await asyncio.gather(*(topics.produce_nowait(row.topic_id, p, batch("warm")) for p in range(8)))
        puts = world.objects.puts
        sent = [topics.produce_nowait(row.topic_id, p, batch(f"v{p}")) for p in (3, 1, 3, 7, 1)]
        await asyncio.gather(*sent)
        assert world.objects.puts == puts + 1
        ref = (await world.reader.plan(row.topic_id, 7, 1, 2))[0]
        data = await world.objects.get(ref.object_key)
        regions = decode_footer(data[-200:])
        assert [(r.topic_id, r.partition) for r in regions] == [(row.topic_id, 3), (row.topic_id, 1), (row.topic_id, 7)]
        at = 0
        for region in regions:
            assert region.position == at
            at += region.length
        assert [v for _, v in await read_all(world, row.topic_id, 3)] == ["warm", "v3", "v3"]


# the seed ------------------------------------------------------------------------------------------
async def second_upload_first(world: World) -> list[ProduceResult | BaseException]:
    """Send two batches of a producer unknown to the partition; the upload of the second one ends first."""
    row = await world.topic()
    topics = world.node()
    await topics.offsets(row.topic_id, 0)
    world.objects.gated = True
    first = topics.produce_nowait(row.topic_id, 0, batch("1", pid=9, seq=0))
    await until(lambda: len(world.objects.waiting) >= 1)
    second = topics.produce_nowait(row.topic_id, 0, batch("2", pid=9, seq=1))
    await until(lambda: len(world.objects.waiting) >= 2)
    await world.objects.let_go(1)
    for _ in range(50):
        await asyncio.sleep(0)
    await world.objects.let_go(0)
    results = await asyncio.gather(first, second, return_exceptions=True)
    world.objects.gated = False
    if isinstance(results[0], OutOfOrderSequenceError):
        for _ in range(5):
            with pytest.raises(OutOfOrderSequenceError):
                await topics.produce_nowait(row.topic_id, 0, batch("1", pid=9, seq=0))
    return list(results)


async def test_seed_000_second_staging_finishes_first_and_both_idempotent_batches_succeed() -> None:
    """The race of redpanda #30429."""
    async with World() as world:
        first, second = await second_upload_first(world)
        assert isinstance(first, ProduceResult) and isinstance(second, ProduceResult)
        assert (first.base_offset, second.base_offset) == (0, 1)


async def test_seed_000_a_place_reserved_after_the_upload_is_out_of_order_for_ever() -> None:
    """The planted fault shows the race that the rule prevents."""
    with planted("seed000"):
        async with World() as world:
            first, second = await second_upload_first(world)
            assert isinstance(second, ProduceResult) and second.base_offset == 0
            assert isinstance(first, OutOfOrderSequenceError)


# places in line ------------------------------------------------------------------------------------
async def test_a_failed_upload_poisons_what_its_producer_has_in_line() -> None:
    """F2; the retry of both, in order, succeeds."""
    async with World() as world:
        row = await world.topic()
        topics = world.node()
        await topics.offsets(row.topic_id, 0)
        world.objects.gated = True
        send = topics.produce_nowait
        first = send(row.topic_id, 0, batch("1", pid=9, seq=0))
        await until(lambda: len(world.objects.waiting) >= 1)
        second = send(row.topic_id, 0, batch("2", pid=9, seq=1))
        other = send(row.topic_id, 0, batch("o", pid=8, seq=0))
        await world.objects.let_go(1)
        await asyncio.sleep(0.01)
        await world.objects.let_go(0, error=UnavailableError("503"))
        for future in (first, second):
            with pytest.raises(UnavailableError):
                await future
        assert (await other).base_offset == 0
        world.objects.gated = False
        with pytest.raises(UnavailableError):
            await send(row.topic_id, 0, batch("2", pid=9, seq=1))
        assert (await send(row.topic_id, 0, batch("1", pid=9, seq=0))).base_offset == 1
        assert (await send(row.topic_id, 0, batch("2", pid=9, seq=1))).base_offset == 2


async def test_a_batch_that_arrives_after_the_failure_waits_for_the_retry_of_the_failed_one() -> None:
    """The producer is unknown. Without the memory of the gap, sequence 1 would be accepted and 0 refused forever."""
    async with World() as world:
        row = await world.topic()
        topics = world.node()
        await topics.offsets(row.topic_id, 0)
        world.objects.gated = True
        first = topics.produce_nowait(row.topic_id, 0, batch("1", pid=9, seq=0))
        await world.objects.let_go(0, error=UnavailableError("503"))
        with pytest.raises(UnavailableError):
            await first
        world.objects.gated = False
        with pytest.raises(UnavailableError):
            await topics.produce_nowait(row.topic_id, 0, batch("2", pid=9, seq=1))
        await topics.produce_nowait(row.topic_id, 0, batch("1", pid=9, seq=0))
        await topics.produce_nowait(row.topic_id, 0, batch("2", pid=9, seq=1))
        assert await read_all(world, row.topic_id) == [(0, "1"), (1, "2")]


async def test_cancelling_the_caller_does_not_cancel_the_batch() -> None:
    async with World() as world:
        row = await world.topic()
        topics = world.node()
        world.objects.gated = True
        first = topics.produce_nowait(row.topic_id, 0, batch("1", pid=9, seq=0))
        second = topics.produce_nowait(row.topic_id, 0, batch("2", pid=9, seq=1))
        first.cancel()
        await world.objects.let_go(0)
        assert (await second).base_offset == 1
        assert await read_all(world, row.topic_id) == [(0, "1"), (1, "2")]


async def test_batches_keep_their_place_while_the_partition_is_being_opened() -> None:
    async with World() as world:
        row = await world.topic()
        topics = world.node()
        sent = [topics.produce_nowait(row.topic_id, 0, batch(str(n), pid=9, seq=n)) for n in range(20)]
        results = await asyncio.gather(*sent)
        assert [r.base_offset for r in results] == list(range(20))


async def test_many_producers_keep_their_order_through_overlapping_uploads() -> None:
    async with World(object_bytes=400, uploads_in_flight=4, group_batches=7) as world:
        row = await world.topic(partitions=3)
        topics = world.node()
        world.objects.gated = True
        futures = [
            topics.produce_nowait(row.topic_id, n % 3, batch(f"{pid}.{n}", pid=pid, seq=n // 3))
            for n in range(60)
            for pid in range(4)
        ]
        turn = 0
        while not all(f.done() for f in futures):
            if world.objects.waiting:
                turn += 1
                await world.objects.let_go(turn % len(world.objects.waiting))
            await asyncio.sleep(0)
        for partition in range(3):
            values = [v for _, v in await read_all(world, row.topic_id, partition)]
            for pid in range(4):
                mine = [int(v.split(".")[1]) for v in values if v.startswith(f"{pid}.")]
                assert mine == [n for n in range(60) if n % 3 == partition]


# idempotence ---------------------------------------------------------------------------------------
async def test_a_duplicate_gets_its_original_offsets_also_after_a_restart() -> None:
    async with World() as world:
        row = await world.topic()
        topics = world.node()
        for n in range(6):
            await topics.produce_nowait(row.topic_id, 0, batch(str(n), pid=9, seq=n))
        again = await topics.produce_nowait(row.topic_id, 0, batch("5", pid=9, seq=5))
        assert (again.base_offset, again.duplicate) == (5, True)
        await topics.aclose()
        topics = world.node()
        again = await topics.produce_nowait(row.topic_id, 0, batch("3", pid=9, seq=3))
        assert (again.base_offset, again.duplicate) == (3, True)
        with pytest.raises(OutOfOrderSequenceError):
            await topics.produce_nowait(row.topic_id, 0, batch("0", pid=9, seq=0))
        assert (await topics.offsets(row.topic_id, 0)).high_watermark == 6


async def test_a_duplicate_in_flight_shares_the_result() -> None:
    async with World() as world:
        row = await world.topic()
        topics = world.node()
        world.objects.gated = True
        one = topics.produce_nowait(row.topic_id, 0, batch("1", pid=9, seq=0))
        two = topics.produce_nowait(row.topic_id, 0, batch("1", pid=9, seq=0))
        one.cancel()
        await world.objects.let_go(0)
        assert (await two).base_offset == 0
        assert world.objects.puts == 1
        assert (await topics.offsets(row.topic_id, 0)).high_watermark == 1


async def test_non_idempotent_beside_idempotent() -> None:
    async with World() as world:
        row = await world.topic()
        topics = world.node()
        sent = []
        for n in range(5):
            sent.append(topics.produce_nowait(row.topic_id, 0, batch(f"i{n}", pid=9, seq=n)))
            sent.append(topics.produce_nowait(row.topic_id, 0, batch(f"p{n}")))
        offsets = sorted(r.base_offset for r in await asyncio.gather(*sent))
        assert offsets == list(range(10))


async def test_a_gap_is_refused_and_an_old_epoch_is_fenced() -> None:
    async with World() as world:
        row = await world.topic()
        topics = world.node()
        await topics.produce_nowait(row.topic_id, 0, batch("1", pid=9, epoch=1, seq=0))
        with pytest.raises(OutOfOrderSequenceError):
            await topics.produce_nowait(row.topic_id, 0, batch("3", pid=9, epoch=1, seq=2))
        with pytest.raises(InvalidProducerEpochError):
            await topics.produce_nowait(row.topic_id, 0, batch("1", pid=9, epoch=0, seq=1))
        assert (await topics.produce_nowait(row.topic_id, 0, batch("n", pid=9, epoch=2, seq=0))).base_offset == 1


async def test_out_of_order_is_never_said_by_a_leader_that_was_replaced() -> None:
    """The old leader misses batch 1, which the new one accepted; it must not report batch 2 as out of order."""
    async with World() as world:
        row = await world.topic()
        old, new = world.node(), world.node()
        await old.produce_nowait(row.topic_id, 0, batch("0", pid=9, seq=0))
        await new.produce_nowait(row.topic_id, 0, batch("1", pid=9, seq=1))
        with pytest.raises(NotLeaderError):
            await old.produce_nowait(row.topic_id, 0, batch("2", pid=9, seq=2))


# appends -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("took_effect", [True, False])
async def test_a_lost_acknowledgement_of_the_append_is_resolved(took_effect: bool) -> None:
    async with World() as world:
        row = await world.topic()
        topics = world.node()
        await topics.produce_nowait(row.topic_id, 0, batch("0", pid=9, seq=0))

        async def lose(append) -> LogHead:  # type: ignore[no-untyped-def]
            world.consensus.on_append = None
            if took_effect:
                await append()
            raise UnknownOutcomeError("connection lost")

        world.consensus.on_append = lose
        assert (await topics.produce_nowait(row.topic_id, 0, batch("1", pid=9, seq=1))).base_offset == 1
        assert (await topics.produce_nowait(row.topic_id, 0, batch("2", pid=9, seq=2))).base_offset == 2
        assert await read_all(world, row.topic_id) == [(0, "0"), (1, "1"), (2, "2")]


async def test_an_append_that_lands_late_is_found_by_its_nonce() -> None:
    """The outcome is unknown and the record absent; then the first attempt takes effect during the second one."""
    async with World() as world:
        row = await world.topic()
        topics = world.node()
        await topics.offsets(row.topic_id, 0)
        late: list[object] = []

        async def slow(append) -> LogHead:  # type: ignore[no-untyped-def]
            if not late:
                late.append(append)
                raise UnknownOutcomeError("timeout")
            world.consensus.on_append = None
            await late[0]()  # type: ignore[operator]
            return await append()  # type: ignore[no-any-return]

        world.consensus.on_append = slow
        assert (await topics.produce_nowait(row.topic_id, 0, batch("1", pid=9, seq=0))).base_offset == 0
        assert await read_all(world, row.topic_id) == [(0, "1")]


async def test_an_append_whose_fate_is_told_late_is_made_again_by_the_same_leader() -> None:
    """Consensus was unreachable for the whole budget and is back: no other node has to take over."""
    async with World(append_budget_s=0.03) as world:
        row = await world.topic()
        topics = world.node()
        await topics.produce_nowait(row.topic_id, 0, batch("0", pid=9, seq=0))
        led = topics._led[row.topic_id, 0]
        real_head, begun_s = world.consensus.log_head, world.clock.monotonic_s()

        async def lose(append) -> LogHead:  # type: ignore[no-untyped-def]
            world.consensus.on_append = None
            raise UnknownOutcomeError("connection lost")

        async def late(log: str) -> LogHead:
            await until(lambda: world.clock.monotonic_s() > begun_s + 0.03)
            return await real_head(log)

        world.consensus.on_append = lose
        world.consensus.log_head = late  # type: ignore[method-assign]
        assert (await topics.produce_nowait(row.topic_id, 0, batch("1", pid=9, seq=1))).base_offset == 1
        assert topics._led[row.topic_id, 0] is led and led.is_open
        assert await read_all(world, row.topic_id) == [(0, "0"), (1, "1")]


async def test_an_append_that_never_lands_is_given_up_though_the_log_is_read() -> None:
    async with World(append_budget_s=0.03) as world:
        row = await world.topic()
        topics = world.node()
        await topics.offsets(row.topic_id, 0)

        async def lose(append) -> LogHead:  # type: ignore[no-untyped-def]
            raise UnknownOutcomeError("connection lost")

        world.consensus.on_append = lose
        with pytest.raises(UnknownOutcomeError):
            await topics.produce_nowait(row.topic_id, 0, batch("0"))


async def test_an_append_whose_fate_stays_unknown_is_told_as_unknown_and_the_retry_is_recognised() -> None:
    async with World(append_budget_s=0.03) as world:
        row = await world.topic()
        topics = world.node()
        await topics.offsets(row.topic_id, 0)
        landed = []

        async def lose(append) -> LogHead:  # type: ignore[no-untyped-def]
            if not landed:
                landed.append(await append())
            raise UnknownOutcomeError("connection lost")

        world.consensus.on_append = lose
        real_head, world.consensus.log_head = world.consensus.log_head, _unavailable  # type: ignore[method-assign,assignment]
        first = topics.produce_nowait(row.topic_id, 0, batch("1", pid=9, seq=0))
        with pytest.raises(UnknownOutcomeError):
            await first
        world.consensus.on_append = None
        world.consensus.log_head = real_head  # type: ignore[method-assign]
        again = await topics.produce_nowait(row.topic_id, 0, batch("1", pid=9, seq=0))
        assert (again.base_offset, again.duplicate) == (0, True)
        assert (await topics.produce_nowait(row.topic_id, 0, batch("2", pid=9, seq=1))).base_offset == 1


async def _unavailable(log: str) -> LogHead:
    raise UnavailableError("no answer")


async def test_an_unavailable_log_is_retried_and_then_given_up_without_guessing() -> None:
    async with World(append_budget_s=0.03) as world:
        row = await world.topic()
        topics = world.node()
        await topics.produce_nowait(row.topic_id, 0, batch("0", pid=9, seq=0))
        refused = 0

        async def refuse(append) -> LogHead:  # type: ignore[no-untyped-def]
            nonlocal refused
            refused += 1
            raise UnavailableError("starting up")

        world.consensus.on_append = refuse
        sent = [topics.produce_nowait(row.topic_id, 0, batch(str(n), pid=9, seq=n)) for n in (1, 2)]
        for future in sent:
            with pytest.raises(NotLeaderError):
                await future
        assert refused > 1
        world.consensus.on_append = None
        sent = [topics.produce_nowait(row.topic_id, 0, batch(str(n), pid=9, seq=n)) for n in (1, 2)]
        assert [r.base_offset for r in await asyncio.gather(*sent)] == [1, 2]


async def test_what_queues_during_an_append_shares_the_next_one() -> None:
    async with World() as world:
        row = await world.topic()
        topics = world.node()
        await topics.offsets(row.topic_id, 0)
        gate = asyncio.Event()

        async def wait(append) -> LogHead:  # type: ignore[no-untyped-def]
            await gate.wait()
            return await append()  # type: ignore[no-any-return]

        world.consensus.on_append = wait
        sent = [topics.produce_nowait(row.topic_id, 0, batch("0", pid=9, seq=0))]
        await until(lambda: world.consensus.appends == 1)
        for n in range(1, 30):
            sent.append(topics.produce_nowait(row.topic_id, 0, batch(str(n), pid=9, seq=n)))
            await asyncio.sleep(0)
        led = topics._led[row.topic_id, 0]
        await until(lambda: len(led.intake.turned) == 29)
        gate.set()
        assert [r.base_offset for r in await asyncio.gather(*sent)] == list(range(30))
        assert world.consensus.appends == 2


# rollups, restart, failover -------------------------------------------------------------------------
async def test_a_restart_reads_everything_back_with_and_without_rollups() -> None:
    for rollup_records in (1, 3, 4096):
        async with World(rollup_records=rollup_records) as world:
            row = await world.topic()
            topics = world.node()
            for n in range(10):
                await topics.produce_nowait(row.topic_id, 0, batch(str(n), pid=9, seq=n))
            await topics.aclose()
            topics = world.node()
            assert values_of((await fetch(topics, row.topic_id, 0, 0)).batches) == [(n, str(n)) for n in range(10)]
            assert (await topics.produce_nowait(row.topic_id, 0, batch("10", pid=9, seq=10))).base_offset == 10
            assert await read_all(world, row.topic_id) == [(n, str(n)) for n in range(11)]


async def test_rollups_truncate_the_log_and_leave_one_object() -> None:
    async with World(rollup_records=4) as world:
        row = await world.topic()
        topics = world.node()
        for n in range(40):
            await topics.produce_nowait(row.topic_id, 0, batch(str(n)))
        head = await world.consensus.log_head(f"topic/{row.topic_id}/0")
        assert head.next - head.start < 20
        assert len([m async for m in world.objects.list("rollup/")]) == 1
        assert len(await read_all(world, row.topic_id)) == 40


async def test_failover_keeps_every_acknowledged_record_and_fences_the_old_leader() -> None:
    async with World() as world:
        row = await world.topic()
        old, new = world.node(), world.node()
        for n in range(5):
            await old.produce_nowait(row.topic_id, 0, batch(str(n), pid=9, seq=n))
        found = await fetch(new, row.topic_id, 0, 0)
        assert [v for _, v in values_of(found.batches)] == ["0", "1", "2", "3", "4"]
        with pytest.raises(NotLeaderError):
            await old.produce_nowait(row.topic_id, 0, batch("5", pid=9, seq=5))
        assert (await new.produce_nowait(row.topic_id, 0, batch("5", pid=9, seq=5))).base_offset == 5
        assert (await new.produce_nowait(row.topic_id, 0, batch("4", pid=9, seq=4))).duplicate
        assert [v for _, v in await read_all(world, row.topic_id)] == ["0", "1", "2", "3", "4", "5"]


async def test_uploads_under_way_when_leadership_ends_are_not_leader_and_never_placed() -> None:
    async with World() as world:
        row = await world.topic()
        old, new = world.node(), world.node()
        await old.produce_nowait(row.topic_id, 0, batch("0", pid=9, seq=0))
        await new.offsets(row.topic_id, 0)
        world.objects.gated = True
        slow = old.produce_nowait(row.topic_id, 0, batch("1", pid=9, seq=1))
        await until(lambda: len(world.objects.waiting) >= 1)
        fast = old.produce_nowait(row.topic_id, 0, batch("x", pid=8, seq=0))
        await world.objects.let_go(1)
        for future in (fast, slow):
            with pytest.raises(NotLeaderError):
                await future
        await world.objects.let_go(0)
        assert await read_all(world, row.topic_id) == [(0, "0")]


async def test_closing_ends_every_waiting_request() -> None:
    async with World() as world:
        row = await world.topic()
        topics = world.node()
        await topics.offsets(row.topic_id, 0)
        world.objects.gated = True
        sent = [topics.produce_nowait(row.topic_id, p, batch("v")) for p in (0, 0, 1)]
        waiting = asyncio.ensure_future(fetch(topics, row.topic_id, 0, 0, wait_s=60.0))
        await until(lambda: len(world.objects.waiting) >= 1)
        await topics.aclose()
        for future in sent:
            with pytest.raises(UnavailableError):
                await future
        assert isinstance((await waiting).error, NotLeaderError)
        with pytest.raises(NotLeaderError):
            await topics.produce_nowait(row.topic_id, 0, batch("late"))


# refusals ------------------------------------------------------------------------------------------
async def test_unknown_topics_partitions_and_corrupt_batches_are_refused() -> None:
    async with World() as world:
        row = await world.topic(partitions=1)
        topics = world.node()
        good = batch("v")
        with pytest.raises(MissingError):
            await topics.produce_nowait("00000000-0000-4000-8000-000000000000", 0, good)
        with pytest.raises(MissingError):
            await topics.produce_nowait(row.topic_id, 1, good)
        with pytest.raises(CorruptBatchError):
            await topics.produce_nowait(row.topic_id, 0, good[:-1])
        flipped = bytearray(good)
        flipped[-1] ^= 1
        with pytest.raises(CorruptBatchError):
            await topics.produce_nowait(row.topic_id, 0, flipped)
        assert world.objects.puts == 0
        assert (await topics.produce_nowait(row.topic_id, 0, good)).base_offset == 0


async def test_a_deleted_topic_is_missing_and_its_successor_starts_at_zero() -> None:
    async with World() as world:
        row = await world.topic()
        topics = world.node()
        await topics.produce_nowait(row.topic_id, 0, batch("old"))
        await world.catalogue.delete(type(row), "t")
        await topics.refresh()
        with pytest.raises(MissingError):
            await topics.produce_nowait(row.topic_id, 0, batch("v"))
        again = await world.topic()
        assert (await topics.produce_nowait(again.topic_id, 0, batch("new"))).base_offset == 0


async def test_too_much_staged_is_unavailable_and_a_stale_batch_never_enters_an_object() -> None:
    async with World(staged_bytes=300, uploads_in_flight=1, staged_expiry_s=0.5) as world:
        row = await world.topic()
        topics = world.node()
        await topics.offsets(row.topic_id, 0)
        world.objects.gated = True
        first = topics.produce_nowait(row.topic_id, 0, batch("1"))
        await until(lambda: len(world.objects.waiting) >= 1)
        stale = topics.produce_nowait(row.topic_id, 0, batch("2"))
        with pytest.raises(UnavailableError):
            await topics.produce_nowait(row.topic_id, 0, batch("3" * 300))
        await asyncio.sleep(0.55)
        await world.objects.let_go(0)
        assert (await first).base_offset == 0
        with pytest.raises(UnavailableError):
            await stale
        assert world.objects.puts == 1


async def test_a_lingering_writer_collects() -> None:
    async with World(linger_s=0.5, object_bytes=2000) as world:
        row = await world.topic()
        topics = world.node()
        await topics.offsets(row.topic_id, 0)
        loop = asyncio.get_running_loop()
        begun = loop.time()
        one = topics.produce_nowait(row.topic_id, 0, batch("1"))
        await asyncio.sleep(0.01)
        two = topics.produce_nowait(row.topic_id, 0, batch("2"))
        await asyncio.gather(one, two)
        assert loop.time() - begun >= 0.45
        assert world.objects.puts == 1


async def test_a_full_object_does_not_wait_for_more() -> None:
    async with World(linger_s=600.0, object_bytes=2000) as world:
        row = await world.topic()
        data = encode_batch([Record(None, b"x" * 3000, (), 1)])
        assert (await world.node().produce_nowait(row.topic_id, 0, data)).base_offset == 0


async def test_marks_say_what_is_reserved_and_which_upload_holds_it() -> None:
    async with World() as world:
        row = await world.topic()
        topics = world.node()
        await topics.produce_nowait(row.topic_id, 0, batch("1", "2"))
        topics.statuses.update()
        (mark,) = world.tracker.report("p", 0).marks
        assert (mark.name, mark.position, mark.target, mark.held_by) == ("topic:t", 2, 2, "")
        assert mark.share, "another node may lead other partitions of it"
        world.objects.gated = True
        topics.produce_nowait(row.topic_id, 0, batch("3"))
        await until(lambda: len(world.objects.waiting) >= 1)
        topics.statuses.update()
        (mark,) = world.tracker.report("p", 0).marks
        assert (mark.position, mark.target) == (2, 3)
        assert mark.held_by == f"upload:{world.objects.waiting[0][0]}"


# batching ------------------------------------------------------------------------------------------
async def test_what_waits_is_cut_into_near_equal_objects_within_the_upload_limit() -> None:
    async with World(object_bytes=1000, uploads_in_flight=3) as world:
        row = await world.topic()
        topics = world.node()
        await topics.offsets(row.topic_id, 0)
        world.objects.gated = True
        sent = [topics.produce_nowait(row.topic_id, 0, batch("x" * 31)) for _ in range(50)]
        await until(lambda: len(world.objects.waiting) == 3)
        await asyncio.sleep(0.01)
        assert len(world.objects.waiting) == 3
        while not all(f.done() for f in sent):
            if world.objects.waiting:
                await world.objects.let_go(0)
            await asyncio.sleep(0)
        sizes = [meta.size_bytes async for meta in world.objects.list("l0/")]
        assert len(sizes) in (5, 6)
        assert min(sizes) > 600 and max(sizes) < 1400


async def test_an_idle_writer_uploads_at_once_and_a_busy_one_collects() -> None:
    async with World(uploads_in_flight=1) as world:
        row = await world.topic()
        topics = world.node()
        await topics.offsets(row.topic_id, 0)
        world.objects.gated = True
        sent = [topics.produce_nowait(row.topic_id, 0, batch("first"))]
        await until(lambda: len(world.objects.waiting) == 1)
        for n in range(20):
            sent.append(topics.produce_nowait(row.topic_id, n % 2, batch(str(n))))
            await asyncio.sleep(0)
        await world.objects.let_go(0)
        await world.objects.let_go(0)
        await asyncio.gather(*sent)
        assert world.objects.puts == 2


async def test_uploads_overlap_before_the_first_one_ends() -> None:
    async with World() as world:
        row = await world.topic()
        topics = world.node()
        await topics.offsets(row.topic_id, 0)
        world.objects.gated = True
        sent = []
        for n in range(4):
            sent.append(topics.produce_nowait(row.topic_id, 0, batch(str(n), pid=9, seq=n)))
            await until(lambda n=n: len(world.objects.waiting) == n + 1)  # type: ignore[misc]
        for _ in range(4):
            await world.objects.let_go(-1)
            await asyncio.sleep(0)
        assert [r.base_offset for r in await asyncio.gather(*sent)] == [0, 1, 2, 3]
