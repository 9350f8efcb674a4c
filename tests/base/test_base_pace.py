"""One stretch in a turn of the loop, however many work."""

from __future__ import annotations

import asyncio
from collections import Counter

from tidemill.base.clock import ManualClock
from tidemill.base.pace import Pace


def test_all_work_of_one_kind_has_one_stretch_in_a_turn_and_goes_on_in_its_order() -> None:
    clock = ManualClock()
    pace = Pace(clock, 0.005)
    worked: Counter[int] = Counter()
    ended: list[int] = []
    turn = 0

    async def work(number: int) -> None:
        for _ in range(7):
            if pace.due:
                await pace.rest()
            clock.advance(1)
            worked[turn] += 1
        ended.append(number)

    async def scenario() -> None:
        nonlocal turn
        tasks = [asyncio.create_task(work(number)) for number in range(20)]
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0)
            turn += 1

    asyncio.run(scenario())
    assert sum(worked.values()) == 140
    assert max(worked.values()) <= 5
    assert ended == sorted(ended)
