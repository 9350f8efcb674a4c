"""The binder of stream topics: woken by appends, idle otherwise, and a fault of one topic affects no other."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from support.waiting import DEADLINE_S, until
from tidemill.base.clock import Rand, SystemClock
from tidemill.base.errors import CorruptError, UnavailableError
from tidemill.base.runtime import tasks
from tidemill.base.status.status import StatusTracker
from tidemill.consensus.memory import MemoryConsensus, MemoryState
from tidemill.metastore.catalogue import TopicRow
from tidemill.node.topic_binder import TopicBinder
from tidemill.objects.memory import MemoryObjects
from tidemill.shards.api import Binding
from tidemill.shards.bindings.remap import LogRemap
from tidemill.topics.api import Marker, ProduceTransaction
from tidemill.topics.batch import Record, encode_batch
from tidemill.topics.batch.control_batch import as_transactional
from tidemill.topics.config.settings import TopicSettings
from tidemill.topics.local_topics import LocalTopics
from tidemill.topics.membership import SingleNodeAssignment
from tidemill.topics.partition_reader import LogPartitionReader


class Led:
    """The part of the topics room that a binder uses: rows, and the partitions that this node leads."""

    def __init__(self) -> None:
        self.ends: dict[tuple[str, int], int] = {}

    def watch(self, moved: Callable[[str, int], None], listed: Callable[[Mapping[str, TopicRow]], None]) -> None:
        self.moved, self.listed = moved, listed

    def last_stable(self, topic_id: str, partition: int) -> int | None:
        return self.ends.get((topic_id, partition))

    def append(self, topic_id: str, partition: int, end: int) -> None:
        self.ends[topic_id, partition] = end
        self.moved(topic_id, partition)


class Elsewhere:
    """Reader of the partitions that other nodes lead."""

    def __init__(self) -> None:
        self.ends: dict[tuple[str, int], int] = {}
        self.reads: Counter[str] = Counter()
        self.broken: set[str] = set()

    async def last_stable(self, topic_id: str, partition: int) -> int:
        self.reads[topic_id] += 1
        if topic_id in self.broken:
            raise CorruptError("a record cannot be read.")
        return self.ends.get((topic_id, partition), 0)


class World:
    def __init__(self) -> None:
        self.clock = SystemClock()
        self.state = MemoryState()
        self.tracker = StatusTracker()
        self.elsewhere = Elsewhere()

    def binder(self, led: Any) -> TopicBinder:
        async def remap(name: str) -> LogRemap:
            return self.remap(name)

        reader: Any = self.elsewhere
        return TopicBinder(led, lambda: reader, remap, self.clock, self.tracker)

    def remap(self, name: str) -> LogRemap:
        return LogRemap(MemoryConsensus(self.clock, self.state), name, self.clock, Rand())

    async def bound(self, name: str = "a") -> list[Binding]:
        return await self.remap(f"topic/{name}").after(-1)

    async def ends_at(self, offsets: tuple[int, ...], name: str = "a") -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not (found := await self.bound(name)) or list(found[-1].offsets.values()) != [offsets]:
                await asyncio.sleep(0.01)


def rows(*found: TopicRow) -> dict[str, TopicRow]:
    return {row.topic_id: row for row in found}


async def test_a_topic_gets_its_first_time_when_it_is_seen_and_the_next_when_it_moves() -> None:
    world, led = World(), Led()
    binder = world.binder(led)
    binder.start()
    world.elsewhere.ends["id", 1] = 7
    led.listed(rows(TopicRow("a", "id", 2), TopicRow("captured", "c", 1, "capture")))
    await world.ends_at((0, 7))
    led.append("id", 0, 3)
    await world.ends_at((3, 7))
    led.append("c", 0, 3)
    led.append("unknown", 0, 3)
    reads, times = world.elsewhere.reads["id"], [b.time_ms for b in await world.bound()]
    await asyncio.sleep(0.3)
    assert [b.time_ms for b in await world.bound()] == times
    assert world.elsewhere.reads["id"] == reads == 2, "what is led here is never read"
    assert await world.bound("captured") == []
    await binder.aclose()


async def test_two_nodes_bind_what_each_leads_and_neither_reads_the_others() -> None:
    world, one, two = World(), Led(), Led()
    binders = [world.binder(one), world.binder(two)]
    for binder, led in zip(binders, (one, two), strict=True):
        binder.start()
        led.listed(rows(TopicRow("a", "id", 2)))
    await world.ends_at((0, 0))
    reads = world.elsewhere.reads["id"]
    for n in range(1, 41):
        one.append("id", 0, n)
        two.append("id", 1, 2 * n)
        await asyncio.sleep(0.005)
    await world.ends_at((40, 80))
    found = await world.bound()
    for before, after in itertools.pairwise(found):
        assert all(a <= b for a, b in zip(before.offsets["id"], after.offsets["id"], strict=True))
    assert len(found) < 30, "paced"
    assert world.elsewhere.reads["id"] == reads
    for binder in binders:
        await binder.aclose()


async def test_what_a_dead_node_appended_is_bound_when_members_change() -> None:
    world, led = World(), Led()
    binder = world.binder(led)
    binder.start()
    led.listed(rows(TopicRow("a", "id", 2)))
    await world.ends_at((0, 0))
    world.elsewhere.ends["id", 1] = 9  # durable, and its node died before it minted
    binder.recheck_all_topics()
    await world.ends_at((0, 9))
    await binder.aclose()


async def test_a_topic_that_grows_is_bound_to_its_last_partition_also_beside_a_node_that_does_not_know() -> None:
    world, one, two = World(), Led(), Led()
    binders = [world.binder(one), world.binder(two)]
    for binder, led in zip(binders, (one, two), strict=True):
        binder.start()
        led.listed(rows(TopicRow("a", "id", 2)))
    one.append("id", 0, 3)
    await world.ends_at((3, 0))
    one.listed(rows(TopicRow("a", "id", 4)))
    one.append("id", 3, 5)
    await world.ends_at((3, 0, 0, 5))
    two.append("id", 1, 7)  # its view is older
    await world.ends_at((3, 7, 0, 5))
    assert world.tracker.failure("binding:topic/a") is None
    for binder in binders:
        await binder.aclose()


async def test_a_topic_that_is_gone_is_bound_no_longer_and_one_made_anew_is() -> None:
    world, led = World(), Led()
    binder = world.binder(led)
    binder.start()
    led.listed(rows(TopicRow("a", "old", 1)))
    led.append("old", 0, 5)
    await world.ends_at((5,))
    led.listed(rows(TopicRow("a", "new", 1)))
    led.append("old", 0, 6)
    led.append("new", 0, 1)
    await until(lambda: binder._bound["new"].task is not None and binder._bound["new"].task.done())
    last = (await world.bound())[-1]
    assert last.offsets == {"old": (5,), "new": (1,)}
    await binder.aclose()


async def test_f703_a_topic_whose_bindings_fail_is_told_and_heals_while_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tasks, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(tasks, "LONGEST_PAUSE_S", 0.02)
    monkeypatch.setattr(tasks.Backoff.__init__, "__defaults__", (0.01, 0.02, 20.0))
    world, led = World(), Led()
    world.elsewhere.broken = {"bad"}
    binder = world.binder(led)
    binder.start()
    led.listed(rows(TopicRow("bad", "bad", 1), TopicRow("a", "good", 1)))
    led.append("good", 0, 4)
    await world.ends_at((4,))
    await until(lambda: world.tracker.failure("binding:topic/bad") is not None)
    failure = world.tracker.failure("binding:topic/bad")
    assert failure is not None and failure.parked and failure.error == "a record cannot be read."
    world.elsewhere.broken.clear()
    await world.ends_at((0,), "bad")
    await until(lambda: world.tracker.failure("binding:topic/bad") is None)
    await binder.aclose()


class Counting(MemoryConsensus):
    """Consensus that counts calls about partitions and bindings, and refuses every append to bindings while `away`."""

    asked = 0
    away = False

    async def _submit(self, op: Any) -> Any:
        log = getattr(op, "log", "")
        if log.startswith(("remap/", "partition/")):
            self.asked += 1
            if self.away and log.startswith("remap/") and type(op).__name__ == "Append":
                raise UnavailableError("consensus is away.")
        return await super()._submit(op)


class Rows:
    def __init__(self, found: list[TopicRow]) -> None:
        self._found = found

    async def list(self, _: type) -> list[TopicRow]:
        return self._found


async def test_thousands_of_idle_partitions_cost_nothing_and_one_that_moves_is_bound_at_once() -> None:
    """The real topics room has 650 topics of 4 partitions. While all are idle, the binder makes no call to
    consensus."""
    world = World()
    consensus = Counting(world.clock, world.state)
    found = [TopicRow(f"t{n}", f"id-{n}", 4) for n in range(650)]
    catalogue: Any = Rows(found)
    objects = MemoryObjects(world.clock)
    topics = LocalTopics(
        consensus, objects, catalogue, clock=world.clock, rand=Rand(), assignment=SingleNodeAssignment(),
        settings=TopicSettings(catalogue_poll_s=1.0),
    )  # fmt: skip

    async def remap(name: str) -> LogRemap:
        return LogRemap(consensus, name, world.clock, Rand())

    binder = TopicBinder(topics, lambda: LogPartitionReader(consensus, objects), remap, world.clock, world.tracker)
    binder.start()
    await topics.start()
    await until(lambda: len(binder._bound) == 650 and all(b.task and b.task.done() for b in binder._bound.values()))
    consensus.asked = 0
    began_s, cpu_s = time.monotonic(), time.process_time()
    await asyncio.sleep(3.0)
    share = (time.process_time() - cpu_s) / (time.monotonic() - began_s)
    assert consensus.asked == 0
    assert share < 0.02, f"{share:.3f} of a core"
    consensus.away = True
    batch = encode_batch([Record(None, b"v", (), 1000)])
    await topics.produce_nowait("id-7", 2, batch)
    await asyncio.sleep(0.1)
    consensus.away = False
    async with asyncio.timeout(DEADLINE_S):
        while (await (await remap("topic/t7")).latest()).offsets["id-7"] != (0, 0, 1, 0):  # type: ignore[union-attr]
            await asyncio.sleep(0.01)
    await binder.aclose()
    await topics.aclose()


async def test_no_time_covers_a_transaction_before_it_has_ended() -> None:
    """The end of a transaction is known from the partition's leader, or in another process from the log."""
    world = World()
    consensus, objects = MemoryConsensus(world.clock, world.state), MemoryObjects(world.clock)
    catalogue: Any = Rows([TopicRow("t", "id", 1)])
    topics = LocalTopics(
        consensus, objects, catalogue, clock=world.clock, rand=Rand(), assignment=SingleNodeAssignment()
    )

    async def confirm(*_: object) -> None: ...

    async def remap(name: str) -> LogRemap:
        return LogRemap(consensus, name, world.clock, Rand())

    async def bound() -> tuple[int, ...]:
        latest = await (await remap("topic/t")).latest()
        return latest.offsets.get("id", ()) if latest is not None else ()

    async def until_bound(end: int) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while await bound() != (end,):
                await asyncio.sleep(0.01)

    topics.set_coordinator(confirm)
    binder = TopicBinder(topics, lambda: LogPartitionReader(consensus, objects), remap, world.clock, world.tracker)
    binder.start()
    await topics.start()
    batch = encode_batch([Record(None, b"v", (), 1000)])
    await topics.produce_nowait("id", 0, batch)
    await until_bound(1)
    mine = as_transactional(encode_batch([Record(None, b"v")], producer_id=1, producer_epoch=0, base_sequence=0))
    await topics.produce_nowait("id", 0, mine, within=ProduceTransaction("tx"))
    await topics.produce_nowait("id", 0, batch)
    binder.recheck_all_topics()
    other = TopicBinder(Led(), lambda: LogPartitionReader(consensus, objects), remap, world.clock, world.tracker)
    other.start()
    other._update_topics({"id": TopicRow("t", "id", 1)})
    await until(lambda: all(b.task is None or b.task.done() for each in (binder, other) for b in each._bound.values()))
    assert await bound() == (1,)
    await topics.mark("id", 0, Marker(1, 0, False))
    await until_bound(4)
    await other.aclose()
    await binder.aclose()
    await topics.aclose()
