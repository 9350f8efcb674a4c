"""Finding topics, opening partitions, and failing uploads."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import structlog

from support.topics.world import World, batch, read_all
from support.waiting import until
from tidemill.base.errors import UnavailableError
from tidemill.consensus.api import LogHead
from tidemill.topics.api import FetchRead, NotLeaderError
from tidemill.topics.partition import rollup
from tidemill.topics.partition.recovery import partition_log
from tidemill.topics.partition.state_machine.codec import decode_command
from tidemill.topics.partition.state_machine.commands import Rollup
from tidemill.topics.status_report import OWN_STATUSES_MAX


async def test_a_topic_made_while_the_catalogue_is_being_read_is_found() -> None:
    """The read in progress began before the topic was created, so its answer does not count."""
    world = World()
    node = world.node()
    reads, gate = 0, asyncio.Event()
    whole = world.catalogue.list

    async def slow(kind: Any) -> Any:
        nonlocal reads
        reads += 1
        rows = await whole(kind)
        if reads == 1:
            await gate.wait()
        return rows

    world.catalogue.list = slow  # type: ignore[method-assign]
    early = asyncio.ensure_future(node.refresh())
    await until(lambda: reads == 1)
    row = await world.topic()
    produced = [node.produce_nowait(row.topic_id, p, batch("a")) for p in range(2)]
    await asyncio.sleep(0)
    gate.set()
    assert [(await each).base_offset for each in produced] == [0, 0]
    await early
    assert reads == 2, "those who asked meanwhile share the next read"
    await world.aclose()


async def test_a_partition_that_moved_while_it_waited_for_its_turn_to_open_fences_nobody() -> None:
    world = World()
    node = world.node()
    row = await world.topic()
    await node.refresh()
    node._partitions._openings = asyncio.Semaphore(0)
    waiting = asyncio.ensure_future(node.offsets(row.topic_id, 0))
    await until(lambda: len(node._led) == 1)
    (led,) = node._led.values()
    led.close(NotLeaderError("moved."))
    with pytest.raises(NotLeaderError):
        await waiting
    node._partitions._openings.release()
    await node._partitions._openings.acquire()  # it has had its turn
    assert await world.consensus.log_head(partition_log(row.topic_id, 0)) == LogHead(0, 0, 0)
    await world.aclose()


async def test_a_fetch_opens_its_partitions_side_by_side_and_waits_for_all_of_them_once() -> None:
    world = World()
    node = world.node()
    row = await world.topic(partitions=8)
    await node.refresh()
    asked, gate, head = 0, asyncio.Event(), world.consensus.log_head

    async def slow(log: str) -> Any:
        nonlocal asked
        asked += 1
        await gate.wait()
        return await head(log)

    world.consensus.log_head = slow  # type: ignore[method-assign]
    reads = [FetchRead(row.topic_id, partition, 0, 1) for partition in range(8)]
    begun_s = asyncio.get_running_loop().time()
    fetching = asyncio.ensure_future(node.fetch(reads, max_wait_s=0.0, min_bytes=0, max_bytes=1))
    await until(lambda: asked == 8)
    found = await fetching
    assert asyncio.get_running_loop().time() - begun_s < 3.0, "one second for all, not for each"
    assert all(isinstance(each.error, UnavailableError) for each in found)
    gate.set()
    found = await node.fetch(reads, max_wait_s=0.0, min_bytes=0, max_bytes=1)
    assert [each.error for each in found] == [None] * 8
    await world.aclose()


async def test_an_upload_that_breaks_ends_what_waited_for_it_and_frees_its_place() -> None:
    world = World(uploads_in_flight=1)
    node = world.node()
    row = await world.topic()
    put, broken = world.objects.put, [True]

    async def breaks(*given: Any) -> None:
        if broken:
            broken.clear()
            raise RuntimeError("a bug")
        await put(*given)

    world.objects.put = breaks  # type: ignore[method-assign]
    with structlog.testing.capture_logs() as logs, pytest.raises(UnavailableError, match="a bug"):
        await node.produce_nowait(row.topic_id, 0, batch("a"))
    assert [entry["error"] for entry in logs if entry["log_level"] == "error"] == ["RuntimeError: a bug"]
    assert (await node.produce_nowait(row.topic_id, 0, batch("b"))).base_offset == 0
    await world.aclose()


class Panic(BaseException):
    """An exception like those of native code, which are no subclasses of Exception."""


async def test_f208_a_partition_that_fails_is_told_tried_again_and_heals_by_itself_while_others_go_on() -> None:
    world = World()
    node = world.node()
    row = await world.topic(partitions=2)
    await node.start()
    for partition in (0, 1):
        await node.produce_nowait(row.topic_id, partition, batch("a"))
    sick = f"topic/{row.topic_id}/0"
    read, ill = world.consensus.read, [True]

    async def panics(log: str, *given: Any, **more: Any) -> Any:
        if ill and log == sick:
            raise Panic("nobody listed this")
        return await read(log, *given, **more)

    world.consensus.read = panics  # type: ignore[method-assign]
    node._led[row.topic_id, 0].close(NotLeaderError("opened anew by this test."))
    with pytest.raises(UnavailableError):
        await node.produce_nowait(row.topic_id, 0, batch("b"))
    for n in range(1, 20):
        assert (await node.produce_nowait(row.topic_id, 1, batch("c"))).base_offset == n
        node.statuses.update()
    mark = f"topic:{row.name}"
    await until(lambda: (failure := world.tracker.failure(mark)) is not None and failure.tries >= 3)
    failure = world.tracker.failure(mark)
    assert failure is not None and failure.error == "partition 0: Panic: nobody listed this"
    ill.clear()
    await until(lambda: (led := node._led.get((row.topic_id, 0))) is not None and led.is_open)
    assert (await node.produce_nowait(row.topic_id, 0, batch("d"))).base_offset == 1
    assert world.tracker.failure(mark) is not None, "one that opened a moment ago may fail again"
    await until(lambda: world.tracker.failure(mark) is None)
    await world.aclose()


def hold_rollups(world: World) -> asyncio.Event:
    """Block the storage of rollups until the event is set."""
    put, gate = world.objects.put, asyncio.Event()

    async def held(key: str, data: Any) -> None:
        if key.startswith("rollup/"):
            await gate.wait()
        await put(key, data)

    world.objects.put = held  # type: ignore[method-assign]
    return gate


async def test_f212_acknowledgements_do_not_wait_for_a_roll_up() -> None:
    world = World(rollup_records=4)
    node = world.node()
    row = await world.topic(partitions=1)
    gate = hold_rollups(world)
    for n in range(30):
        assert (await node.produce_nowait(row.topic_id, 0, batch(str(n), pid=7, seq=n))).base_offset == n
    log = f"topic/{row.topic_id}/0"
    assert (await world.consensus.log_head(log)).start == 0
    gate.set()
    await world.truncated(log)
    found = await world.consensus.read(log, (await world.consensus.log_head(log)).start, limit_records=1)
    command = decode_command(found.records[0].data)
    assert isinstance(command, Rollup) and len(command.tail) > 10, "what was placed beside it is in its tail"
    assert await read_all(world, row.topic_id) == [(n, str(n)) for n in range(30)]
    await node.aclose()
    node = world.node()
    assert (await node.produce_nowait(row.topic_id, 0, batch("29", pid=7, seq=29))).duplicate
    assert (await node.produce_nowait(row.topic_id, 0, batch("30", pid=7, seq=30))).base_offset == 30
    await world.aclose()


async def test_a_roll_up_with_too_long_a_tail_is_given_up_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(rollup_records=4)
    node = world.node()
    row = await world.topic(partitions=1)
    monkeypatch.setattr(rollup, "TAIL_BYTES", 100)
    monkeypatch.setattr(rollup, "RETRY_RECORDS", 10)
    gate = hold_rollups(world)
    log = f"topic/{row.topic_id}/0"
    for n in range(20):
        await node.produce_nowait(row.topic_id, 0, batch(str(n)))
    gate.set()
    for n in range(20, 60):
        await node.produce_nowait(row.topic_id, 0, batch(str(n)))
        await asyncio.sleep(0.002)
    await world.truncated(log)
    assert await read_all(world, row.topic_id) == [(n, str(n)) for n in range(60)]
    await world.aclose()


async def test_a_process_with_thousands_of_topics_reports_few_marks() -> None:
    world = World()
    node = world.node()
    rows = [await world.topic(f"t{n}", 1) for n in range(OWN_STATUSES_MAX + 20)]
    await node.start()
    for row in rows:
        await node.produce_nowait(row.topic_id, 0, batch("a"))
    node.statuses.update()
    names = {mark.name for mark in world.tracker.report("p", 0).marks if mark.name.startswith("topic")}
    assert names == {"topics"}
    world.objects.gated = True
    waiting = node.produce_nowait(rows[5].topic_id, 0, batch("b"))
    await until(lambda: len(world.objects.waiting) == 1)
    node.statuses.update()
    marks = {mark.name: mark for mark in world.tracker.report("p", 0).marks if mark.name.startswith("topic")}
    assert set(marks) == {"topics", "topic:t5"}
    assert (marks["topic:t5"].position, marks["topic:t5"].target) == (1, 2)
    assert marks["topics"].position == marks["topics"].target == len(rows) - 1
    await world.objects.let_go()
    await waiting
    await world.aclose()
