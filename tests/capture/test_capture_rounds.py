"""Send rounds: the positions up to which they go, and the events that end them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from support.waiting import until
from tidemill.base.clock import Rand
from tidemill.base.errors import UnavailableError
from tidemill.base.lsn import ChangePosition
from tidemill.capture.topics.batch_sender import SMALL_ROUND_BYTES, BatchSender, SendPace
from tidemill.capture.topics.partition_writer import PartitionWriter
from tidemill.topics.api import ProduceResult
from tidemill.topics.batch import Record

RECORD = Record(b"k", b"v", (), 0)


class Topics:
    """A topic log that collects batches; `answer` acknowledges them."""

    def __init__(self) -> None:
        self.offsets = list(range(10))
        self.taken: list[tuple[int, asyncio.Future[ProduceResult]]] = []

    def produce_nowait(
        self, topic_id: str, partition: int, batch: bytearray, **_: Any
    ) -> asyncio.Future[ProduceResult]:
        future: asyncio.Future[ProduceResult] = asyncio.get_running_loop().create_future()
        self.taken.append((len(self.taken), future))
        return future

    def answer(self) -> None:
        for offset, future in self.taken:
            if not future.done():
                future.set_result(ProduceResult(self.offsets[offset], offset, 0))


def at(ordinal: int) -> ChangePosition:
    return ChangePosition(10, ordinal)


@asynccontextmanager
async def batch_sender(linger_s: float = 0.0) -> AsyncIterator[tuple[BatchSender, Any, list[ChangePosition]]]:
    durable: list[ChangePosition] = []
    topics: Any = Topics()
    rounds = BatchSender(topics, Rand(), durable.append, pace=SendPace(linger_s))
    try:
        yield rounds, topics, durable
    finally:
        await rounds.aclose()


async def turn() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


def writer() -> PartitionWriter:
    made = PartitionWriter("t", "id", 0, 1)
    made.start_at(0, 0, None)
    return made


async def test_a_round_that_left_before_its_position_was_known_is_told_of_it() -> None:
    """A caller waits after `add` (for a table that is being paused), and a round is sent in between."""
    async with batch_sender() as (rounds, topics, durable):
        one = writer()
        one.assign_offset(at(0))
        rounds.add(one, RECORD)
        rounds.schedule_round()  # scheduled by another caller
        await turn()
        assert len(topics.taken) == 1
        rounds.schedule_round(at(0))
        topics.answer()
        await turn()
        assert durable == [at(0)]


async def test_what_is_durable_already_when_its_position_is_told_is_reported_at_once() -> None:
    async with batch_sender() as (rounds, topics, durable):
        one = writer()
        one.assign_offset(at(0))
        rounds.add(one, RECORD)
        rounds.schedule_round()
        await turn()
        topics.answer()
        await turn()
        assert at(0) not in durable
        rounds.schedule_round(at(0))
        assert durable[-1] == at(0)


async def test_a_round_that_cannot_be_encoded_ends_the_writer() -> None:
    async with batch_sender() as (rounds, _, durable):
        one = writer()
        one.assign_offset(at(0))
        one.close_batches = lambda _: 1 // 0  # type: ignore[method-assign,assignment,return-value]
        rounds.add(one, RECORD)
        rounds.schedule_round(at(0))
        with pytest.raises(UnavailableError, match="cannot be encoded"):
            async with asyncio.timeout(5):
                await rounds.failed()
        assert durable == []


async def test_a_record_that_something_waits_for_ends_the_gap() -> None:
    async with batch_sender(linger_s=3600.0) as (rounds, topics, durable):
        one = writer()
        for ordinal in range(3):
            one.assign_offset(at(ordinal))
            rounds.add(one, RECORD)
            rounds.schedule_round(at(ordinal))
            await turn()
        assert len(topics.taken) == 1, "after silence; the others wait for an hour"
        rounds.send_now()
        await turn()
        assert len(topics.taken) == 2
        topics.offsets = [0, 1]
        topics.answer()
        await turn()
        assert durable[-1] == at(2)


async def test_waiting_until_all_is_durable_ends_the_gap() -> None:
    async with batch_sender(linger_s=3600.0) as (rounds, topics, durable):
        one = writer()
        for ordinal in range(2):
            one.assign_offset(at(ordinal))
            rounds.add(one, RECORD)
            rounds.schedule_round(at(ordinal))
            await turn()
        drained = asyncio.ensure_future(rounds.wait_drained())
        await until(lambda: len(topics.taken) == 2)
        topics.offsets = [0, 1]
        topics.answer()
        await drained
        assert durable[-1] == at(1)


async def test_small_rounds_keep_a_gap_and_travel_together_and_a_large_one_leaves_at_once() -> None:
    async with batch_sender(linger_s=1.0) as (rounds, topics, durable):
        one, ordinal = writer(), 0

        async def put(record: Record = RECORD) -> int:
            nonlocal ordinal
            one.assign_offset(at(ordinal))
            rounds.add(one, record)
            rounds.schedule_round(at(ordinal))
            ordinal += 1
            await turn()
            return len(topics.taken)

        loop = asyncio.get_running_loop()
        assert await put() == 1, "after silence"
        began_s = loop.time()
        assert [await put() for _ in range(3)] == [1, 1, 1]
        await until(lambda: len(topics.taken) != 1)
        assert loop.time() - began_s >= 0.5
        assert await put() == 2
        assert await put(Record(b"k", bytes(SMALL_ROUND_BYTES), (), 0)) == 3
        topics.offsets = [0, 1, 4]
        topics.answer()
        await turn()
        assert durable[-1] == at(ordinal - 1)
