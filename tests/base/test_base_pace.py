"""One stretch of work per turn of the loop, however many tasks work, and each of them in turn."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from itertools import groupby
from typing import Any

from tidemill.base.clock import ManualClock
from tidemill.base.runtime.coop import CoopBudget

STRETCH_MS = 5
TURNS_MAX = 5_000


class Mill(asyncio.SelectorEventLoop):
    """Work whose elements take a millisecond each; the clock moves by nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.pace = CoopBudget(self.clock, STRETCH_MS / 1000)
        self.turn = 0
        self.worked: Counter[int] = Counter()
        """Work units per turn of the loop."""
        self.steps: list[str] = []
        """Names of the workers, one per element of work."""
        self.ended: list[str] = []
        self.waits = 0
        self.asked = 0
        """Number of times the budget asked for a turn of the loop."""

    def _run_once(self) -> None:
        self.turn += 1
        assert self.turn < TURNS_MAX, "somebody waits for ever"
        super()._run_once()  # type: ignore[misc]

    def call_soon(self, callback: Callable[..., Any], *args: Any, context: Any = None) -> asyncio.Handle:  # type: ignore[override]
        self.asked += getattr(callback, "__self__", None) is self.pace
        return super().call_soon(callback, *args, context=context)

    def create_future(self) -> asyncio.Future[Any]:
        self.waits += 1
        return super().create_future()

    async def work(self, name: str, elements: int) -> None:
        for _ in range(elements):
            if self.pace.is_used_up:
                await self.pace.wait_for_turn()
            self.clock.advance(1)
            self.worked[self.turn] += 1
            self.steps.append(name)
        self.ended.append(name)

    def grind(self, scenario: Coroutine[Any, Any, None]) -> None:
        """Run the scenario, then check that no turn exceeded a stretch and that the budget asks nothing of an idle
        loop.
        """

        async def whole() -> None:
            await scenario
            await turns(4)
            asked = self.asked
            await turns(10)
            assert self.asked == asked
            assert not self.pace.is_used_up

        with asyncio.Runner(loop_factory=lambda: self) as runner:
            runner.run(whole())
        assert max(self.worked.values()) <= STRETCH_MS


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def begin(works: Iterable[Coroutine[Any, Any, None]]) -> list[asyncio.Task[None]]:
    return [asyncio.create_task(work) for work in works]


def test_all_work_of_one_kind_has_one_stretch_in_a_turn_and_goes_on_in_its_order() -> None:
    mill = Mill()
    names = [f"{number:02}" for number in range(20)]

    async def scenario() -> None:
        await asyncio.gather(*begin(mill.work(name, 7) for name in names))

    mill.grind(scenario())
    assert Counter(mill.steps) == dict.fromkeys(names, 7)
    runs = [name for name, _ in groupby(mill.steps)]
    rounds = [(runs[:at].count(name), name) for at, name in enumerate(runs)]
    assert rounds == sorted(rounds)


def test_a_short_work_that_comes_late_does_not_wait_for_the_end_of_a_long_one() -> None:
    mill = Mill()

    async def scenario() -> None:
        long = asyncio.create_task(mill.work("long", 1_000))
        await turns(20)
        before = len(mill.steps)
        await mill.work("short", 1)
        assert len(mill.steps) - before <= 2 * STRETCH_MS
        await long

    mill.grind(scenario())
    assert mill.ended == ["short", "long"]


def test_long_works_go_on_by_turns_a_stretch_each() -> None:
    mill = Mill()

    async def scenario() -> None:
        await asyncio.gather(*begin(mill.work(name, 50) for name in "abc"))

    mill.grind(scenario())
    stretches = ["".join(mill.steps[at : at + STRETCH_MS]) for at in range(0, len(mill.steps), STRETCH_MS)]
    assert stretches == [name * STRETCH_MS for name in "a" + "abc" * 9 + "bc"]  # `a` works first


def test_who_comes_new_every_turn_and_never_waits_holds_nobody_up_who_does() -> None:
    mill = Mill()

    async def scenario() -> None:
        def come() -> None:
            if not mill.pace.is_used_up:
                mill.clock.advance(STRETCH_MS)
                mill.worked[mill.turn] += STRETCH_MS
            if not mill.ended:
                mill.call_soon(come)

        mill.call_soon(come)
        before_ms = mill.clock.now_ms()
        await asyncio.create_task(mill.work("long", 4 * STRETCH_MS))
        assert mill.clock.now_ms() - before_ms <= 5 * STRETCH_MS  # its own work, and the work that had begun

    mill.grind(scenario())


def test_as_many_go_on_in_a_turn_as_its_stretch_has_room_for() -> None:
    mill = Mill()

    async def scenario() -> None:
        await asyncio.gather(*begin(mill.work(f"{number:03}", 1) for number in range(100)))

    mill.grind(scenario())
    assert mill.ended == sorted(mill.ended)
    assert len(mill.worked) <= 100 / STRETCH_MS + 3  # one turn serves many tasks
    assert mill.waits <= 4 * 100  # a turn does not wake every waiting task


def test_who_is_cancelled_while_waiting_or_when_its_turn_has_come_takes_nobodys_turn_with_it() -> None:
    for wait in range(8):
        mill = Mill()

        async def scenario(mill: Mill = mill, wait: int = wait) -> None:
            long, first, second, last = begin(mill.work(name, 20) for name in ("long", "first", "second", "last"))
            await turns(2 + wait)
            first.cancel()
            second.cancel()
            await asyncio.gather(long, last)
            assert first.cancelled() and second.cancelled()

        mill.grind(scenario())
        assert mill.ended == ["long", "last"]


def test_when_all_who_wait_are_cancelled_the_next_may_begin() -> None:
    for wait in range(8):
        mill = Mill()

        async def scenario(mill: Mill = mill, wait: int = wait) -> None:
            works = begin(mill.work(name, 1_000) for name in "abc")
            await turns(2 + wait)
            for work in works:
                work.cancel()
            await asyncio.wait(works)
            await mill.work("next", 1)

        mill.grind(scenario())
        assert mill.ended == ["next"]
