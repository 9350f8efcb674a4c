"""Shared reads of foreign objects: concurrent requests are read once, and each reader gets its own ranges."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.waiting import run
from tidemill.base.clock import ManualClock
from tidemill.base.errors import MissingError, TidemillError, UnavailableError
from tidemill.base.runtime.tasks import Tasks
from tidemill.objects.memory import MemoryObjects
from tidemill.topics.l0 import object_cache
from tidemill.topics.l0.object_cache import READ_BEFORE_BYTES, READS_IN_FLIGHT_MAX, SharedReads

DATA = bytes(range(256)) * 1024
KEY = "l0/e/o"


class Counted(MemoryObjects):
    def __init__(self) -> None:
        super().__init__(ManualClock())
        self.asked: list[tuple[str, Sequence[tuple[int, int]]]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.error: BaseException | None = None

    async def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        self.asked.append((key, ranges))
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        return await super().get_ranges(key, ranges)


@asynccontextmanager
async def opened_reads(limit_bytes: int = 1 << 20) -> AsyncIterator[tuple[Counted, SharedReads]]:
    objects = Counted()
    await objects.put(KEY, DATA)
    async with Tasks(lambda *_: None) as tasks:
        yield objects, SharedReads(objects, tasks, limit_bytes=limit_bytes)


async def read(shared: SharedReads, *ranges: tuple[int, int], key: str = KEY) -> None:
    found = await shared.get_ranges(key, ranges)
    assert [bytes(each) for each in found] == [DATA[begin:end] for begin, end in ranges]


async def test_readers_of_one_moment_and_of_the_next_share_one_request() -> None:
    async with opened_reads() as (objects, shared):
        objects.gate.clear()
        readers = [asyncio.ensure_future(read(shared, (5_000, 6_000))) for _ in range(4)]
        readers.append(asyncio.ensure_future(read(shared, (100, 200), (5_500, 5_900))))
        await asyncio.sleep(0)
        objects.gate.set()
        await asyncio.gather(*readers)
        await read(shared, (0, 6_000))
        assert objects.asked == [(KEY, [(0, 6_000)])]


async def test_what_lies_before_comes_along_as_far_as_it_costs_no_request_and_only_what_is_missing_is_asked_for() -> (
    None
):
    async with opened_reads() as (objects, shared):
        far = READ_BEFORE_BYTES + 10_000
        await read(shared, (far, far + 5))
        await read(shared, (10_000, far + 5), (200_000, 200_007))
        await read(shared, (9_999, 10_001))
        assert objects.asked == [
            (KEY, [(10_000, far + 5)]),
            (KEY, [(200_000 - READ_BEFORE_BYTES, 200_007)]),
            (KEY, [(0, 10_001)]),
        ]


async def test_a_read_that_fails_fails_for_all_who_wait_and_for_nobody_after_them() -> None:
    async with opened_reads() as (objects, shared):
        await read(shared, (0, 10))
        objects.gate.clear()
        objects.error = UnavailableError("away.")
        readers = [asyncio.ensure_future(read(shared, (0, 10), (50, 60))) for _ in range(3)]
        await asyncio.sleep(0)
        objects.gate.set()
        assert await asyncio.gather(*readers, return_exceptions=True) == [objects.error] * 3
        assert len(objects.asked) == 2
        await read(shared, (0, 10))
        objects.error = None
        await read(shared, (50, 60))
        assert len(objects.asked) == 3 and shared.held_bytes == 10 + 60
        with pytest.raises(MissingError):
            await shared.get_ranges("l0/e/gone", [(0, 1)])
        assert shared.held_bytes == 70


async def test_a_fault_that_nobody_foresaw_is_told_to_all_who_wait() -> None:
    async with opened_reads() as (objects, shared):
        objects.error = RuntimeError("a bug")
        for _ in range(2):
            with pytest.raises(UnavailableError):
                await shared.get_ranges(KEY, [(0, 1)])
        assert len(objects.asked) == 2 and shared.held_bytes == 0


async def test_who_stops_waiting_disturbs_nobody() -> None:
    async with opened_reads() as (objects, shared):
        objects.gate.clear()
        first, second = (asyncio.ensure_future(read(shared, (0, 10))) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.sleep(0)
        objects.gate.set()
        await second
        assert first.cancelled() and len(objects.asked) == 1


async def test_so_many_requests_at_once_leave_the_store_to_others() -> None:
    async with opened_reads() as (objects, shared):
        names = [f"l0/e/{n}" for n in range(READS_IN_FLIGHT_MAX + 3)]
        for name in names:
            await objects.put(name, DATA)
        objects.gate.clear()
        readers = [asyncio.ensure_future(read(shared, (0, 10), key=name)) for name in names]
        for _ in range(5):
            await asyncio.sleep(0)
        assert len(objects.asked) == READS_IN_FLIGHT_MAX
        assert shared.has_range(names[-1], 2, 10) and not shared.has_range(names[-1], 2, 11)
        objects.gate.set()
        await asyncio.gather(*readers)
        assert len(objects.asked) == len(names)


async def test_nobody_waits_for_what_ended_with_its_node() -> None:
    objects = Counted()
    objects.gate.clear()
    tasks = Tasks(lambda *_: None)
    shared = SharedReads(objects, tasks)
    reader = asyncio.ensure_future(shared.get_ranges(KEY, [(0, 10)]))
    await asyncio.sleep(0)
    await tasks.aclose()
    with pytest.raises(UnavailableError):
        await reader


async def test_what_is_held_stays_below_its_limit_the_oldest_going_first() -> None:
    async with opened_reads(limit_bytes=1000) as (objects, shared):
        for name in "abc":
            await objects.put(name, DATA)
            await read(shared, (0, 400), key=name)
        assert shared.held_bytes == 800
        asked = len(objects.asked)
        await read(shared, (0, 400), key="c")
        await read(shared, (100, 400), key="b")
        assert len(objects.asked) == asked
        await read(shared, (0, 400), key="a")
        await read(shared, (0, 2_000), key="b")
        assert len(objects.asked) == asked + 2 and shared.held_bytes <= 1_000


Ranges = st.lists(
    st.tuples(st.integers(0, 3_000), st.integers(1, 500)).map(lambda each: (each[0], each[0] + each[1])),
    min_size=1,
    max_size=4,
)
Asked = st.lists(st.tuples(st.sampled_from("ab"), Ranges, st.booleans()), min_size=1, max_size=12)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("ab"), Ranges, st.booleans()), min_size=1, max_size=12), st.integers(1, 9_000)
)
def test_whatever_readers_ask_for_each_has_its_bytes(
    asked: list[tuple[str, list[tuple[int, int]], bool]], limit_bytes: int
) -> None:
    async def body() -> None:
        async with opened_reads(limit_bytes) as (objects, shared):
            for key in "ab":
                await objects.put(key, DATA)
            readers = []
            for key, ranges, fails in asked:
                objects.error = UnavailableError("away.") if fails else None
                readers.append(asyncio.ensure_future(read(shared, *ranges, key=key)))
                await asyncio.sleep(0)
            ended = await asyncio.gather(*readers, return_exceptions=True)
            assert all(each is None or isinstance(each, TidemillError) for each in ended)
            held = sum(piece.end - piece.begin for pieces in shared._pieces.values() for piece in pieces)
            assert held == shared.held_bytes <= limit_bytes

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(object_cache, "READ_BEFORE_BYTES", 100)
        run(body(), 60)
