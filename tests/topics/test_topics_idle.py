"""The calls of a round do not grow with the number of idle partitions."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from support.topics.world import World, batch
from support.waiting import until
from tidemill.metastore.catalogue import TopicRow
from tidemill.topics.api import FetchRead, NotLeaderError
from tidemill.topics.lifecycle.checkpoint import PartitionsStage
from tidemill.topics.local_topics import LocalTopics
from tidemill.topics.partition.state_machine.state import PARTITION_BYTES
from tidemill.topics.status_report import OWN_STATUSES_MAX

WEEK_MS = 604_800_000


class Calls:
    """Consensus that counts calls by method."""

    def __init__(self, world: World) -> None:
        self.of: Counter[str] = Counter()
        for name in ("head", "scan", "log_head", "fence", "append", "read", "changed", "truncate"):
            setattr(world.consensus, name, self._counted(name, getattr(world.consensus, name)))

    def _counted(self, name: str, call: Any) -> Any:
        async def counted(*args: Any, **kwargs: Any) -> Any:
            self.of[name] += 1
            return await call(*args, **kwargs)

        return counted

    def taken(self) -> dict[str, int]:
        taken, self.of = dict(self.of), Counter()
        return taken


async def filled(world: World, topics: LocalTopics, count: int) -> list[TopicRow]:
    """Create topics with a retention of a week, with a record in their first partition and none in the second."""
    now_ms = world.clock.now_ms()
    rows = []
    for number in range(count):
        row = await world.catalogue.create_topic(f"t{number}", 2, config={"retention.ms": str(WEEK_MS)})
        await topics.produce_nowait(row.topic_id, 0, batch("v", timestamp_ms=now_ms))
        await topics.offsets(row.topic_id, 1)
        rows.append(row)
    return rows


@pytest.mark.parametrize("led", [True, False], ids=["led", "unopened"])
async def test_a_round_of_retention_asks_once_whatever_stands_still(led: bool) -> None:
    world = World()
    topics = world.node()
    rows = await filled(world, topics, 12)
    if not led:
        await topics.aclose()
        topics = world.node()
    await topics.refresh()
    calls = Calls(world)
    await topics.retainer.run_round(topics._rows.topics)
    calls.taken()
    for _ in range(3):
        await topics.retainer.run_round(topics._rows.topics)
        assert calls.taken() == {"changed": 1}
    other = world.node()
    await other.produce_nowait(rows[3].topic_id, 0, batch("w", timestamp_ms=world.clock.now_ms()))
    calls.taken()
    await topics.retainer.run_round(topics._rows.topics)
    taken = calls.taken()
    assert taken.pop("changed") == 1 and sum(taken.values()) <= 2, "the one that was written to"
    await world.aclose()


async def test_a_look_at_who_leads_asks_once_whatever_stands_still() -> None:
    world = World()
    topics = world.node()
    calls = Calls(world)
    await topics._partitions.heads.check_heads()
    assert calls.taken() == {}, "nothing is led"
    await filled(world, topics, 12)
    await topics._partitions.heads.check_heads()
    calls.taken()
    for _ in range(3):
        await topics._partitions.heads.check_heads()
        assert calls.taken() == {"changed": 1}
    assert all(led.is_open for led in topics._led.values()) and len(topics._led) == 24
    await world.aclose()


async def test_what_becomes_due_is_trimmed_though_nothing_was_written_since() -> None:
    world = World()
    topics = world.node()
    old_ms = world.clock.now_ms() - WEEK_MS - 1000
    row = await world.topic("t", 1)
    await topics.produce_nowait(row.topic_id, 0, batch("old", timestamp_ms=old_ms))
    await topics.refresh()
    await topics.retainer.run_round(topics._rows.topics)
    assert topics._led[row.topic_id, 0].state.log_start == 0, "it keeps everything"
    await world.catalogue.put(
        TopicRow(row.name, row.topic_id, 1, row.kind, row.created_ms, {"retention.ms": str(WEEK_MS)})
    )
    await topics.refresh()
    await topics.retainer.run_round(topics._rows.topics)
    await until(lambda: topics._led[row.topic_id, 0].state.log_start == 1)
    await world.aclose()


async def test_a_round_of_the_checkpoint_asks_once_whatever_stands_still() -> None:
    world = World()
    topics = world.node()
    rows = await filled(world, topics, 12)
    stage = PartitionsStage(world.consensus, world.objects, world.metastore, world.clock)
    await stage.load()
    assert len(await stage.gather()) == 12, "one that was opened and holds nothing needs no rows"
    stage.mark_written(set())
    calls = Calls(world)
    for _ in range(3):
        assert await stage.gather() == {}
        stage.mark_written(set())
        assert calls.taken() == {"changed": 1}
    await topics.produce_nowait(rows[5].topic_id, 0, batch("w"))
    calls.taken()
    assert list(await stage.gather()) == [f"{rows[5].topic_id}/0"]
    assert calls.taken() == {"changed": 1, "read": 1}
    await world.aclose()


async def test_what_a_late_partition_holds_is_gathered_again_though_it_stands_still() -> None:
    world = World()
    topics = world.node()
    (row,) = await filled(world, topics, 1)
    stage = PartitionsStage(world.consensus, world.objects, world.metastore, world.clock)
    await stage.load()
    name = f"{row.topic_id}/0"
    first = await stage.gather()
    stage.mark_written({name})
    assert await stage.gather() == first
    stage.mark_written(set())
    assert await stage.gather() == {}
    await world.aclose()


async def test_a_partition_that_was_let_go_is_followed_on_from_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidemill.topics.lifecycle.checkpoint.IDLE_ROUNDS_MAX", 2)
    world = World()
    topics = world.node()
    (row,) = await filled(world, topics, 1)
    stage = PartitionsStage(world.consensus, world.objects, world.metastore, world.clock)
    await stage.load()

    async def round() -> int:
        units = await stage.gather()
        groups = [group for unit in units.values() for group in unit]
        for group in groups:
            await world.metastore.commit(group)
        stage.mark_written(set())
        return len(groups)

    assert await round() == 2
    for _ in range(4):
        assert await round() == 0
    assert stage._followers == {}
    await topics.produce_nowait(row.topic_id, 0, batch("w"))
    assert await round() == 2, "one extent and the partition row"
    await world.aclose()


@pytest.mark.parametrize("count", [3, OWN_STATUSES_MAX + 5])
async def test_marks_are_the_sums_of_the_open_partitions_whatever_opened_moved_and_closed(count: int) -> None:
    world = World()
    topics = world.node()
    rows = [await world.topic(f"t{number}", 2) for number in range(count)]
    await topics.refresh()

    def position() -> int:
        topics.statuses.update()
        marks = [mark for mark in world.tracker.report("p", 0).marks if mark.name.startswith("topic")]
        assert all(mark.target == mark.position for mark in marks)
        assert len(marks) == (len({key[0] for key in topics._led}) if count <= OWN_STATUSES_MAX else 1)
        return sum(mark.position for mark in marks)

    for row in rows:
        await topics.produce_nowait(row.topic_id, 0, batch("a", "b"))
    assert position() == 2 * count
    await topics.produce_nowait(rows[0].topic_id, 1, batch("c"))
    topics._led[rows[1].topic_id, 0].close(NotLeaderError("moved by this test."))
    if count > OWN_STATUSES_MAX:
        assert position() == 2 * count - 1
    await topics.produce_nowait(rows[1].topic_id, 0, batch("d"))
    assert position() == 2 * count + 2
    states = [led.state for led in topics._led.values()]
    assert topics.memory.partitions_bytes == sum(state.memory_bytes for state in states) > PARTITION_BYTES * len(states)
    await world.aclose()


async def test_a_look_at_the_marks_adds_up_only_what_moved() -> None:
    world = World()
    topics = world.node()
    rows = await filled(world, topics, 8)
    topics.statuses.update()
    looked: list[Any] = []
    add = topics._sums._add
    topics._sums._add = lambda *given: (looked.append(given), add(*given))[1]  # type: ignore[method-assign,func-returns-value]
    topics.statuses.update()
    assert looked == []
    await topics.produce_nowait(rows[2].topic_id, 0, batch("w"))
    topics.statuses.update()
    assert {topic_id for topic_id, *_ in looked} == {rows[2].topic_id}
    await world.aclose()


async def test_a_fetch_that_nothing_moves_is_planned_once_and_one_that_is_woken_again() -> None:
    world = World()
    topics = world.node()
    rows = await filled(world, topics, 6)
    reads = [FetchRead(row.topic_id, partition, 1 - partition, 1 << 20) for row in rows for partition in (0, 1)]
    opened: list[int] = []
    real = topics._partitions.open_all

    async def counted(*given: Any) -> Any:
        opened.append(1)
        return await real(*given)

    topics._partitions.open_all = counted  # type: ignore[method-assign]

    async def fetched(wait_s: float) -> list[int]:
        found = await topics.fetch(reads, max_wait_s=wait_s, min_bytes=1, max_bytes=1 << 24)
        assert not any(each.error for each in found)
        return [len(each.batches) for each in found]

    assert await fetched(0.01) == [0] * 12 and len(opened) == 1
    waiting = asyncio.ensure_future(fetched(60.0))
    await until(lambda: len(opened) == 2)
    await topics.produce_nowait(rows[4].topic_id, 1, batch("w"))
    assert await waiting == [0] * 9 + [1, 0, 0] and len(opened) == 3
    assert not any(len(led.watchers) for led in topics._led.values())
    await world.aclose()


async def test_a_partition_is_opened_with_as_few_questions_as_what_it_holds_takes() -> None:
    world = World()
    topics = world.node()
    rows = await filled(world, topics, 1)
    await topics.aclose()
    topics = world.node()
    await topics.refresh()
    calls = Calls(world)
    await topics.offsets(rows[0].topic_id, 0)
    assert calls.taken() == {"log_head": 1, "fence": 1, "read": 1}
    assert (await topics.offsets(rows[0].topic_id, 1)).high_watermark == 0
    assert calls.taken() == {"log_head": 1, "fence": 1}
    await world.aclose()


async def test_an_unchanged_catalogue_is_dealt_with_once() -> None:
    world = World()
    topics = world.node()
    await world.topic("a")
    heard: list[int] = []
    topics.watch(lambda *_: None, lambda rows: heard.append(len(rows)))
    for _ in range(3):
        await topics.refresh()
    assert heard == [0, 1]
    await world.topic("b")
    await topics.refresh()
    assert heard == [0, 1, 2]
    await world.aclose()
