"""The simulated loop: virtual time, seeded order, deadlocks named, dead lives silent."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from sim.clock import EPOCH_MS, SimClock
from sim.loop import Deadlock, Livelock, SimLoop


def run(seed: int, main: Callable[[], Awaitable[Any]], **options: Any) -> Any:
    loop = SimLoop(random.Random(seed), **options)
    try:
        return loop.run_until_complete(main())
    finally:
        loop.dispose()


def test_hours_of_waiting_take_no_time() -> None:
    async def main() -> float:
        await asyncio.sleep(3600)
        return asyncio.get_running_loop().time()

    started = time.perf_counter()
    assert run(1, main) >= 3600
    assert time.perf_counter() - started < 1


def test_a_clock_follows_virtual_time_and_its_own_skew() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        clock = SimClock(loop)
        assert clock.now_ms() == EPOCH_MS
        await asyncio.sleep(2.5)
        assert clock.now_ms() >= EPOCH_MS + 2_500
        before = clock.monotonic_s()
        clock.skew_ms = -60_000
        assert clock.now_ms() < EPOCH_MS
        assert clock.monotonic_s() == before

    run(1, main)


async def finishing_order() -> list[int]:
    order: list[int] = []

    async def worker(number: int) -> None:
        for _ in range(5):
            await asyncio.sleep(0)
        order.append(number)

    await asyncio.gather(*(worker(number) for number in range(6)))
    return order


def test_ready_callbacks_run_in_an_order_the_seed_decides() -> None:
    orders = {tuple(run(seed, finishing_order)) for seed in range(30)}
    assert len(orders) > 15
    assert run(7, finishing_order) == run(7, finishing_order)
    assert run(7, finishing_order, fifo=True) == list(range(6))


def test_a_reservation_inside_a_coroutine_is_seen_to_be_too_late() -> None:
    async def reserved_inside() -> list[int]:
        line: list[int] = []

        async def produce(number: int) -> None:
            line.append(number)

        await asyncio.gather(*(produce(number) for number in range(4)))
        return line

    assert len({tuple(run(seed, reserved_inside)) for seed in range(50)}) > 5


def test_a_deadlock_names_who_waits_and_where() -> None:
    async def main() -> None:
        never: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def stuck_here() -> None:
            await never

        async with asyncio.TaskGroup() as group:
            group.create_task(stuck_here(), name="the stuck one")
            await asyncio.sleep(1)

    with pytest.raises(Deadlock, match=r"the stuck one at .*test_sim_loop.py:\d+ in .*stuck_here"):
        run(1, main)


def test_going_round_for_ever_is_a_livelock() -> None:
    async def main() -> None:
        while True:
            await asyncio.sleep(0)

    with pytest.raises(Livelock, match="no end after"):
        run(1, main, steps_max=1_000)


def test_threads_are_refused_and_executors_simulated() -> None:
    async def main() -> list[int]:
        with pytest.raises(RuntimeError, match="no threads"):
            asyncio.get_running_loop().call_soon_threadsafe(print)
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 // 0)
        return await asyncio.gather(*(asyncio.to_thread(lambda n=n: n) for n in range(4)))

    assert run(1, main) == [0, 1, 2, 3]


def test_timeouts_fire_in_virtual_time() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(30):
                await asyncio.sleep(3600)
        return asyncio.get_running_loop().time()

    assert 30 <= run(1, main) < 31


def test_many_cancelled_timers_are_swept() -> None:
    async def main() -> int:
        for _ in range(2_000):
            async with asyncio.timeout(600):
                await asyncio.sleep(0)
        loop = asyncio.get_running_loop()
        return len(loop._scheduled)  # type: ignore[attr-defined]

    assert run(1, main) < 500


def test_sets_of_tasks_iterate_by_age() -> None:
    async def main() -> list[str]:
        tasks = {asyncio.ensure_future(asyncio.sleep(0)) for _ in range(50)}
        await asyncio.gather(*tasks)
        return [task.get_name() for task in tasks]

    assert run(1, main) == run(2, main)


def test_an_unhandled_error_in_a_callback_is_kept() -> None:
    loop = SimLoop(random.Random(1))

    async def main() -> None:
        loop.call_soon(lambda: 1 // 0)
        await asyncio.sleep(1)

    loop.run_until_complete(main())
    assert "ZeroDivisionError" in loop.failures[0]
    loop.dispose()
