"""Read-ahead: a sequential reader of an object does not wait for the store, and unused bytes take bounded memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.waiting import run
from tidemill.base.clock import ManualClock
from tidemill.base.errors import TidemillError, UnavailableError
from tidemill.base.runtime.tasks import Tasks
from tidemill.objects.memory import MemoryObjects
from tidemill.topics.l1.read_ahead import ReadAhead

DATA = bytes(range(256)) * 40
KEY = "l1/t/o"


class Counted(MemoryObjects):
    def __init__(self) -> None:
        super().__init__(ManualClock())
        self.asked: list[tuple[int, int]] = []
        self.ahead: list[tuple[int, int]] = []
        self.gate: asyncio.Event | None = None
        self.error: TidemillError | None = None

    async def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        self.asked += ranges
        return await super().get_ranges(key, ranges)

    async def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        self.ahead.append((start, end or 0))
        if self.gate is not None:
            await self.gate.wait()
        if self.error is not None:
            raise self.error
        return await super().get(key, start, end)


@asynccontextmanager
async def opened_ahead(limit_bytes: int = 4_000) -> AsyncIterator[tuple[Counted, ReadAhead]]:
    objects = Counted()
    await objects.put(KEY, DATA)

    def fail(name: str, error: BaseException) -> None:
        raise AssertionError(name) from error

    async with Tasks(fail) as tasks:
        yield objects, ReadAhead(objects, tasks, limit_bytes=limit_bytes, span_bytes=1_000)


async def read(ahead: ReadAhead, begin: int, end: int, limit: int = len(DATA)) -> None:
    ahead.announce_read(KEY, begin, end, limit)
    [data] = await ahead.get_ranges(KEY, [(begin, end)])
    assert bytes(data) == DATA[begin:end]


async def test_who_goes_on_reads_what_is_there_already_and_who_jumps_does_not() -> None:
    async with opened_ahead() as (objects, ahead):
        await read(ahead, 0, 300)
        assert objects.ahead == []
        await read(ahead, 300, 600)
        for begin in range(600, 9_000, 300):
            await read(ahead, begin, begin + 300)
        assert objects.asked == [(0, 300), (300, 600)]
        assert objects.ahead[:2] == [(600, 1_600), (1_600, 2_600)]
        asked = len(objects.ahead)
        for begin in (9_100, 50, 4_000):
            await read(ahead, begin, begin + 10)
        assert len(objects.ahead) == asked


async def test_the_end_of_a_region_is_the_end_of_reading_ahead() -> None:
    async with opened_ahead() as (objects, ahead):
        for begin in range(0, 1_500, 100):
            await read(ahead, begin, begin + 100, 1_500)
        assert objects.ahead == [(200, 1_200), (1_200, 1_500)]


async def test_a_reader_that_comes_before_its_span_waits_for_it_and_reads_once() -> None:
    async with opened_ahead() as (objects, ahead):
        objects.gate = asyncio.Event()
        await read(ahead, 0, 100)
        await read(ahead, 100, 200)
        readers = [asyncio.create_task(read(ahead, 200, 300)) for _ in range(3)]
        await asyncio.sleep(0)
        assert not any(reader.done() for reader in readers)
        objects.gate.set()
        await asyncio.gather(*readers)
        assert objects.asked == [(0, 100), (100, 200)]


async def test_a_span_that_cannot_be_read_is_forgotten_and_its_reader_reads_for_itself() -> None:
    async with opened_ahead() as (objects, ahead):
        objects.error = UnavailableError("away.")
        for begin in range(0, 500, 100):
            await read(ahead, begin, begin + 100)
            await asyncio.sleep(0)
        assert len(objects.asked) == 5 and ahead.held_bytes <= 1_000
        objects.error = None
        await read(ahead, 500, 600)
        await read(ahead, 600, 700)
        assert objects.asked[-1] == (500, 600)


@pytest.mark.parametrize("limit_bytes", [0, 900, 2_500])
async def test_what_is_held_stays_within_its_limit(limit_bytes: int) -> None:
    async with opened_ahead(limit_bytes=limit_bytes) as (_, ahead):
        for begin in range(0, 9_000, 450):
            for reader in range(3):
                await read(ahead, begin + reader * 10, begin + reader * 10 + 450)
            assert ahead.held_bytes <= limit_bytes
            assert ahead.held_bytes == sum(span.end - span.begin for span in ahead._spans.values())


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9_000), st.lists(st.integers(1, 700), max_size=12)), max_size=6))
def test_whatever_is_read_in_whatever_order_is_what_the_object_holds(walks: list[tuple[int, list[int]]]) -> None:
    async def body() -> None:
        async with opened_ahead() as (_, ahead):

            async def walk(at: int, steps: list[int]) -> None:
                for step in steps:
                    end = min(at + step, len(DATA))
                    if end > at:
                        await read(ahead, at, end)
                    at = end

            await asyncio.gather(*(walk(*each) for each in walks))

    run(body())
