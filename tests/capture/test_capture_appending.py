"""Appending of a side topic: every record once and in order, across interruptions and concurrent appenders."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from support.capture.copies import stores
from tidemill.base.errors import CorruptError, UnavailableError, UnknownOutcomeError
from tidemill.base.runtime.coop import CoopBudget
from tidemill.capture.snapshot import side_topic_append
from tidemill.capture.snapshot.side_topic_append import SideTopicAppender
from tidemill.topics.api import FetchRead
from tidemill.topics.batch import Record, decode_batch, encode_batch

OWN, COPY, PARTITIONS = 7, 8, 2


async def written(world: Any, topic_id: str, partition: int) -> list[Record]:
    end = (await world.topics.offsets(topic_id, partition)).high_watermark
    out: list[Record] = []
    while len(out) < end:
        read = FetchRead(topic_id, partition, len(out), 1 << 20)
        (fetched,) = await world.topics.fetch([read], max_wait_s=1, min_bytes=1, max_bytes=1 << 20)
        for batch in fetched.batches:
            out += decode_batch(batch).records
    return out


async def produce(world: Any, topic_id: str, partition: int, keys: list[bytes], producer: int, sequence: int) -> None:
    records = [Record(key, b"v" + key, (("tm.op", b"insert"),), 1_000 + n) for n, key in enumerate(keys)]
    data = encode_batch(records, producer_id=producer, producer_epoch=0, base_sequence=sequence)
    await world.topics.produce_nowait(topic_id, partition, bytearray(data))


class Failing:
    """Topics that fail now and then, before or after a batch has landed."""

    def __init__(self, topics: Any, rng: random.Random) -> None:
        self._topics = topics
        self._rng = rng

    def __getattr__(self, name: str) -> Any:
        return getattr(self._topics, name)

    def produce_nowait(self, *args: Any, **_: Any) -> asyncio.Future[Any]:
        roll = self._rng.random()
        if roll < 0.2:
            failed: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            failed.set_exception(UnavailableError("no."))
            return failed
        real = self._topics.produce_nowait(*args)
        if roll > 0.4:
            return real
        lost: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def unknown(ended: asyncio.Future[Any]) -> None:
            ended.exception()
            if not lost.done():
                lost.set_exception(UnknownOutcomeError("lost."))

        real.add_done_callback(unknown)
        return lost


@pytest.mark.parametrize("seed", range(20))
async def test_what_was_set_aside_is_appended_once_and_in_order(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    rng = random.Random(seed)
    monkeypatch.setattr(side_topic_append, "READ_BYTES", rng.choice((1, 300, 1 << 20)))
    monkeypatch.setattr(side_topic_append, "PAUSE_S", 0.001)
    monkeypatch.setattr(side_topic_append, "PAUSE_MAX_S", 0.01)
    async with stores() as world:
        topic = (await world.catalogue.create_topic("t", PARTITIONS, kind="capture")).topic_id
        side_topic = (await world.catalogue.create_topic("t_xhaside", PARTITIONS, kind="capture")).topic_id
        ends, wanted, ordered = [], [], []
        for partition in range(PARTITIONS):
            copied = [b"copied%d" % n for n in range(rng.randint(1, 5))]
            await produce(world, topic, partition, copied, COPY, 0)
            ends.append(len(copied))
            later: list[bytes] = []
            for _ in range(rng.randint(3, 12)):
                some = [b"later%d" % (len(later) + n) for n in range(rng.randint(1, 6))]
                await produce(world, side_topic, partition, some, OWN, len(later))
                later += some
            wanted.append(copied + later)
            ordered.append(later)

        def made(topics: Any) -> SideTopicAppender:
            return SideTopicAppender(topics, topic, side_topic, ends, OWN, CoopBudget(world.clock))

        reported: list[int] = []
        while await made(world.topics).read_appended_count() < sum(map(len, ordered)):
            bounds = [rng.randint(0, len(later)) if rng.random() < 0.8 else len(later) for later in ordered]
            two = [made(Failing(world.topics, rng)) for _ in range(2)]
            running = [asyncio.ensure_future(one.append_up_to(bounds, reported.append)) for one in two]
            # interrupted as by SIGKILL: requests in flight land, or do not
            if rng.random() < 0.4:
                await asyncio.sleep(rng.random() * 0.01)
                for each in running:
                    each.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        for partition in range(PARTITIONS):
            found = await written(world, topic, partition)
            assert [record.key for record in found] == wanted[partition]
            assert [r.value for r in found[ends[partition] :]] == [b"v" + key for key in ordered[partition]]
        assert await made(world.topics).read_appended_count() == sum(map(len, ordered))
        with pytest.raises(CorruptError, match="shorter than its copy"):
            await SideTopicAppender(
                world.topics, topic, side_topic, [1000, 1000], OWN, CoopBudget(world.clock)
            ).read_appended_count()
