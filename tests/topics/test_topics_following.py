"""Fetch subscriptions: in every history of its partitions, a reader gets the result of a plain fetch of all of them."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from typing import NamedTuple

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from support.topics.world import World, batch, values_of
from support.waiting import run, until
from tidemill.metastore.catalogue import TopicRow
from tidemill.topics.api import Fetched, FetchRead, Marker, NotLeaderError, ProduceTransaction
from tidemill.topics.batch.control_batch import as_transactional
from tidemill.topics.batch.header import parse_header
from tidemill.topics.fetch.fetch_interest import LocalFetchSubscription
from tidemill.topics.local_topics import LocalTopics

PARTITIONS = 3
WITHIN = ProduceTransaction("tx")

Step = tuple[str, int]
steps = st.lists(
    st.tuples(
        st.sampled_from(
            ["produce", "produce", "begin", "commit", "abort", "start", "anew", "follow", "forget", "back", "fetch",
             "fetch", "await"]
        ),
        st.integers(0, PARTITIONS - 1),
    ),
    max_size=40,
)  # fmt: skip


class Known(NamedTuple):
    high_watermark: int
    log_start: int
    last_stable: int


class Model:
    """One reader of a topic's partitions: its position and the last answer for each."""

    def __init__(self, topics: LocalTopics, row: TopicRow, *, committed: bool, max_bytes: int) -> None:
        self.topics, self.row = topics, row
        self.committed, self.max_bytes = committed, max_bytes
        self.following: LocalFetchSubscription = topics.subscribe()
        self.at: dict[int, int] = {}
        self.known: dict[int, Known] = {}
        self.open: dict[int, int] = {}
        """partition → sequence of its transaction's next batch"""
        self.written = 0

    async def step(self, what: str, partition: int) -> None:
        await getattr(self, what)(partition)

    async def produce(self, partition: int) -> None:
        self.written += 1
        await self.topics.produce_nowait(self.row.topic_id, partition, batch(f"v{self.written}"))

    async def begin(self, partition: int) -> None:
        sequence = self.open.get(partition, 0)
        data = as_transactional(batch("in", pid=7 + partition, epoch=0, seq=sequence))
        await self.topics.produce_nowait(self.row.topic_id, partition, data, within=WITHIN)
        self.open[partition] = sequence + 1

    async def end(self, partition: int, commit: bool) -> None:
        if self.open.get(partition):
            await self.topics.mark(self.row.topic_id, partition, Marker(7 + partition, 0, commit))

    async def commit(self, partition: int) -> None:
        await self.end(partition, True)

    async def abort(self, partition: int) -> None:
        await self.end(partition, False)

    async def start(self, partition: int) -> None:
        offsets = await self.topics.offsets(self.row.topic_id, partition)
        wanted = min(offsets.log_start_offset + 1, offsets.last_stable)
        await self.topics.delete_records(self.row.topic_id, partition, wanted)

    async def anew(self, partition: int) -> None:
        led = self.topics._led.get((self.row.topic_id, partition))
        if led is not None:
            led.close(NotLeaderError("moved by this test."))

    async def follow(self, partition: int) -> None:
        self.put(partition, self.at.get(partition, 0))

    def put(self, partition: int, offset: int) -> None:
        if partition not in self.at:
            self.known.pop(partition, None)
        self.at[partition] = offset
        self.following.put(partition, self.read(partition))

    def read(self, partition: int) -> FetchRead:
        return FetchRead(self.row.topic_id, partition, self.at[partition], 1 << 20, self.committed)

    async def forget(self, partition: int) -> None:
        self.following.drop(partition)
        self.at.pop(partition, None)

    async def back(self, partition: int) -> None:
        if partition in self.at:
            self.put(partition, max(0, self.at[partition] - 2))

    async def fetch(self, partition: int) -> None:
        reads = {each: self.read(each) for each in self.at}
        found = await self.topics.fetch(list(reads.values()), max_wait_s=0.0, min_bytes=1, max_bytes=self.max_bytes)
        plain = dict(zip(reads, found, strict=True))
        answers = await self.following.fetch(max_wait_s=0.0, min_bytes=1, max_bytes=self.max_bytes)
        self.compare(plain, dict(answers))  # type: ignore[arg-type]
        self.go_on(dict(answers))  # type: ignore[arg-type]

    async def _await(self, partition: int) -> None:
        """Poll. A long poll must end when something arrives, if nothing was there."""
        if partition not in self.at or self.open:
            return
        for _ in range(200):
            if not any(got.batches or got.error for _, got in await self._some()):
                break
        waiting = asyncio.ensure_future(self.following.fetch(max_wait_s=50.0, min_bytes=1, max_bytes=self.max_bytes))
        await asyncio.sleep(0)
        await self.produce(partition)
        answers = dict(await waiting)
        assert answers[partition].batches
        self.go_on(answers)  # type: ignore[arg-type]

    async def _some(self) -> list[tuple[int, Fetched]]:
        found = await self.following.fetch(max_wait_s=0.0, min_bytes=1, max_bytes=self.max_bytes)
        self.go_on(dict(found))  # type: ignore[arg-type]
        return found  # type: ignore[return-value]

    def compare(self, plain: dict[int, Fetched], answers: dict[int, Fetched]) -> None:
        assert set(answers) <= set(plain)
        whole = self.max_bytes > 1 << 20
        for partition, expected in plain.items():
            got = answers.get(partition)
            marks = Known(expected.high_watermark, expected.log_start_offset, expected.last_stable)
            if got is None:
                assert not expected.error and self.known[partition] == marks
                assert not (expected.batches and whole)
                continue
            assert type(got.error) is type(expected.error)
            assert Known(got.high_watermark, got.log_start_offset, got.last_stable) == marks
            if whole:
                assert [bytes(each) for each in got.batches] == [bytes(each) for each in expected.batches]
                assert list(got.aborted) == list(expected.aborted)
            reported_before = self.known.get(partition) == marks
            assert got.batches or got.error or not reported_before, "nothing changed"
        assert any(each.batches for each in plain.values()) == any(each.batches for each in answers.values())

    def go_on(self, answers: dict[int, Fetched]) -> None:
        for partition, got in answers.items():
            self.known[partition] = Known(got.high_watermark, got.log_start_offset, got.last_stable)
            if got.error is not None:
                self.known.pop(partition)
                self.put(partition, got.log_start_offset)
            elif got.batches:
                self.put(partition, parse_header(got.batches[-1]).next_offset)


setattr(Model, "await", Model._await)


@settings(max_examples=60, deadline=None)
@given(steps, st.booleans(), st.sampled_from([1 << 24, 1, 200]))
def test_whoever_follows_is_given_what_a_plain_fetch_gives(steps: list[Step], committed: bool, max_bytes: int) -> None:
    async def scenario() -> None:
        world = World()
        topics = world.node()

        async def confirm(*_: object) -> None:
            return None

        topics.set_coordinator(confirm)
        row = await world.topic("t", PARTITIONS)
        model = Model(topics, row, committed=committed, max_bytes=max_bytes)
        for what, partition in steps:
            await model.step(what, partition)
        for partition in range(PARTITIONS):
            await model.follow(partition)
        for _ in range(400):
            if not any(got.batches or got.error for _, got in await model._some()):
                break
        await model.fetch(0)
        for partition in range(PARTITIONS):
            offsets = await topics.offsets(row.topic_id, partition)
            assert model.at[partition] == (offsets.last_stable if committed else offsets.high_watermark)
        assert not model.following._due, "nothing is left to look at"
        model.following.close()
        assert not any(len(led.watchers) for led in topics._led.values())
        await world.aclose()

    run(scenario())


async def test_what_stands_still_is_not_looked_at_and_what_moves_alone_is() -> None:
    world = World()
    topics = world.node()
    row = await world.topic("t", 40)
    following = topics.subscribe()
    for partition in range(40):
        following.put(partition, FetchRead(row.topic_id, partition, 0, 1 << 20))
    looked: list[int] = []
    serving = following._serving
    real = serving.open_all

    async def counted(reads: list[FetchRead], until_s: float) -> object:
        looked.append(len(reads))
        return await real(reads, until_s)

    following._serving = msgspec.structs.replace(serving, open_all=counted)
    assert len(await following.fetch(max_wait_s=0.01, min_bytes=1, max_bytes=1 << 20)) == 40
    assert await following.fetch(max_wait_s=0.01, min_bytes=1, max_bytes=1 << 20) == []
    assert looked == [40, 0]
    waiting = asyncio.ensure_future(following.fetch(max_wait_s=50.0, min_bytes=1, max_bytes=1 << 20))
    await until(lambda: len(looked) == 3)
    await topics.produce_nowait(row.topic_id, 17, batch("v"))
    ((key, got),) = await waiting
    assert key == 17 and values_of(got.batches) == [(0, "v")]
    assert looked == [40, 0, 0, 1]
    await world.aclose()


async def test_what_arrives_while_it_waits_for_more_bytes_is_counted() -> None:
    world = World()
    topics = world.node()
    row = await world.topic("t", 2)
    following = topics.subscribe()
    for partition in range(2):
        following.put(partition, FetchRead(row.topic_id, partition, 0, 1 << 20))
    size = len(batch("v"))
    waiting = asyncio.ensure_future(following.fetch(max_wait_s=50.0, min_bytes=3 * size, max_bytes=1 << 20))
    for partition in (0, 1, 0):
        assert not waiting.done()
        await topics.produce_nowait(row.topic_id, partition, batch("v"))
    answers = dict(await waiting)
    assert [len(answers[partition].batches) for partition in range(2)] == [2, 1]
    await world.aclose()


async def test_a_partition_that_is_followed_takes_half_a_kilobyte() -> None:
    world = World()
    topics = world.node()
    row = await world.topic("t", 2_000)
    for partition in range(2_000):
        await topics.offsets(row.topic_id, partition)
    gc.collect()
    tracemalloc.start()
    try:
        following = topics.subscribe()
        for partition in range(2_000):
            following.put(("the-name-of-a-topic", partition), FetchRead(row.topic_id, partition, 0, 1 << 20))
        await following.fetch(max_wait_s=0.0, min_bytes=1, max_bytes=1 << 20)
        gc.collect()  # what it takes while it stands, not what the cycles of one fetch leave behind
        assert tracemalloc.get_traced_memory()[0] < 600 * 2_000
    finally:
        tracemalloc.stop()
    await world.aclose()


async def test_a_reader_that_ends_leaves_nobody_watched_and_one_that_waits_is_let_go() -> None:
    world = World()
    topics = world.node()
    row = await world.topic("t", 3)
    following = topics.subscribe()
    for partition in range(3):
        following.put(partition, FetchRead(row.topic_id, partition, 0, 1 << 20))
    waiting = asyncio.ensure_future(following.fetch(max_wait_s=50.0, min_bytes=1, max_bytes=1 << 20))
    await until(lambda: sum(len(led.watchers) for led in topics._led.values()) == 3)
    following.close()
    assert await waiting == []
    assert not any(len(led.watchers) for led in topics._led.values())
    await world.aclose()
