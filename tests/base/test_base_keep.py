"""Supervision: an error ends only the unit that raised it, is reported under the unit's stage, and is retried."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from tidemill.base.clock import ManualClock, SystemClock
from tidemill.base.errors import CorruptError, InvalidError, UnavailableError
from tidemill.base.runtime.loop_lag import LoopLagMonitor
from tidemill.base.runtime.tasks import Backoff, RetryState, run_unit, run_unit_thread
from tidemill.base.status.status import StageState, StageStatus, StatusTracker, derive_status

QUICK = dict(first_s=0.001, longest_s=0.001)


class Panic(BaseException):
    """An exception of a library's native code, which does not derive from `Exception`."""


def shown(tracker: StatusTracker, now_ms: int = 0) -> list[StageStatus]:
    return list(tracker.report("p", now_ms).marks)


async def test_any_fault_ends_one_try_of_the_unit_and_is_told_until_it_heals() -> None:
    tracker, seen = StatusTracker(), []
    leaked: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    leaked.cancel()
    faults: list[BaseException | asyncio.Future[None]] = [
        InvalidError("the slot is gone.", fix="Start over."),
        CorruptError("a record cannot be read."),
        RecursionError("too deep"),
        Panic("native code"),
        leaked,
        UnavailableError("storage is away."),
    ]

    async def body() -> None:
        seen.append([(mark.held_by, mark.reason, mark.tries) for mark in shown(tracker)])
        if faults:
            fault = faults.pop(0)
            if isinstance(fault, BaseException):
                raise fault
            await fault

    async with asyncio.timeout(20):
        await run_unit("capture:shop", body, tracker=tracker, clock=SystemClock(), restarts=Backoff(**QUICK))
    assert seen == [
        [],
        [("operator", "the slot is gone. Start over.", 1)],
        [("operator", "a record cannot be read.", 2)],
        [("", "RecursionError: too deep", 3)],
        [("", "Panic: native code", 4)],
        [("", "CancelledError", 5)],
        [("", "storage is away.", 6)],
    ]
    assert shown(tracker) == []


@pytest.mark.parametrize("ends", [asyncio.CancelledError, KeyboardInterrupt, SystemExit])
async def test_what_ends_a_process_or_a_task_on_purpose_is_no_fault(ends: type[BaseException]) -> None:
    tracker, began = StatusTracker(), asyncio.Event()

    async def body() -> None:
        began.set()
        if ends is asyncio.CancelledError:
            await asyncio.Event().wait()
        raise ends

    running = run_unit("capture:shop", body, tracker=tracker, clock=SystemClock())
    if ends is not asyncio.CancelledError:
        with pytest.raises(ends):
            running.send(None)
        running.close()
    else:
        task = asyncio.ensure_future(running)
        await began.wait()
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
    assert shown(tracker) == []


async def test_a_unit_that_fails_while_it_is_cancelled_ends_and_is_not_begun_again() -> None:
    """An error from the clean-up replaces the cancellation. If the unit were restarted then, awaiting its end would
    hang.
    """
    tracker, begun = StatusTracker(), 0
    began = asyncio.Event()

    async def body() -> None:
        nonlocal begun
        begun += 1
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            raise UnavailableError("storage is away.")

    restarts = Backoff(**QUICK)
    task = asyncio.ensure_future(run_unit("t", body, tracker=tracker, clock=SystemClock(), restarts=restarts))
    await began.wait()
    task.cancel()
    await asyncio.wait([task], timeout=1.0)
    ended = task.cancelled()
    while not task.done():
        task.cancel()
        await asyncio.sleep(0)
    assert ended and begun == 1
    assert shown(tracker) == []


def states(tracker: StatusTracker, now_ms: int) -> list[StageState]:
    return [derive_status(mark, "p", now_ms, now_ms).state for mark in shown(tracker, now_ms)]


def test_the_age_of_a_failure_survives_retries_and_ends_when_the_unit_moves_on() -> None:
    tracker = StatusTracker()
    tracker.set("table:a", 7, 9, now_ms=0, budget_ms=5_000)
    for now_ms in (1_000, 3_000, 6_500):
        tracker.fail("table:a", f"try of {now_ms}", now_ms=now_ms)
        tracker.set("table:a", 7, 9, now_ms=now_ms, budget_ms=5_000)
    assert states(tracker, 6_000) == [StageState.WAITING]
    assert states(tracker, 6_501) == [StageState.STUCK]
    (mark,) = shown(tracker)
    assert (mark.failing_since_ms, mark.tries, mark.reason) == (1_000, 3, "try of 6500")
    tracker.set("table:a", 8, 9, now_ms=7_000)
    assert states(tracker, 7_000) == [StageState.MOVING]


def test_a_unit_without_a_mark_fails_visibly_and_a_parked_one_is_stuck_at_once() -> None:
    tracker = StatusTracker()
    tracker.fail("shape:1", "ValueError", now_ms=1_000, parked=True)
    assert states(tracker, 1_000) == [StageState.STUCK]
    assert [(m.name, m.held_by) for m in shown(tracker)] == [("shape:1", "operator")]
    tracker.clear_failure("shape:1")
    assert shown(tracker) == []


def test_a_failing_unit_at_its_target_is_not_idle() -> None:
    tracker = StatusTracker()
    tracker.set("table:a", 9, 9, now_ms=0)
    tracker.fail("table:a", "ValueError", now_ms=0)
    assert states(tracker, 60_000) == [StageState.STUCK]


def test_pauses_double_to_a_limit_and_start_over_after_a_steady_run() -> None:
    restarts = Backoff(0.5, 4.0, steady_after_s=10.0)
    assert [restarts.pause_s(1.0) for _ in range(5)] == [0.5, 1.0, 2.0, 4.0, 4.0]
    assert restarts.pause_s(11.0) == 0.5
    assert restarts.pause_s(1.0, paused=True) == 4.0


@pytest.mark.parametrize(("may_pause", "pauses"), [(True, [4.0, 4.0, 4.0]), (False, [0.5, 1.0, 2.0])])
def test_only_a_loop_that_may_park_waits_longest_for_what_an_operator_mends(
    may_pause: bool, pauses: list[float]
) -> None:
    reported: list[tuple[str, bool]] = []
    restarts = Backoff(0.5, 4.0)
    attempts = RetryState("loop", lambda *what: reported.append(what), lambda: 0.0, restarts, may_pause=may_pause)
    assert [attempts.failed(InvalidError("one bad answer.")) for _ in range(3)] == pauses
    assert reported == [("one bad answer.", may_pause)] * 3


def test_the_longest_stall_is_seen_for_a_while_and_remembered() -> None:
    clock = ManualClock()
    watch, start_s = LoopLagMonitor(clock), clock.monotonic_s()
    watch.observe(0.2, start_s + 1, 0.05)
    assert watch.facts() == {"stall_ms": 200.0, "longest_stall_ms": 200.0, "longest_stall_cpu_ms": 50.0}
    for later_s in (31.0, 62.0, 93.0):
        watch.observe(0.001, start_s + later_s, 0.02)
    assert watch.facts() == {"stall_ms": 1.0, "longest_stall_ms": 200.0, "longest_stall_cpu_ms": 50.0}


def test_a_stall_is_measured_to_the_millisecond_and_an_idle_loop_is_not_woken_to_be_watched() -> None:
    async def run() -> tuple[float, int]:
        loop, turns = asyncio.get_running_loop(), 0
        selector = vars(loop)["_selector"]
        wait = selector.select

        def counted(timeout: float | None = None) -> Any:
            nonlocal turns
            turns += 1
            return wait(timeout)

        selector.select = counted
        watch = LoopLagMonitor(SystemClock())
        watching = asyncio.ensure_future(watch.run())
        await asyncio.sleep(0.05)
        before = turns
        await asyncio.sleep(0.5)
        idle = turns - before
        until_s = loop.time() + 0.06
        while loop.time() < until_s:
            pass
        await asyncio.sleep(0)
        facts = watch.facts()
        watching.cancel()
        await asyncio.wait([watching])
        assert selector.select is counted, "it leaves the loop as it was"
        assert float(str(facts["longest_stall_cpu_ms"])) <= float(str(facts["longest_stall_ms"]))
        return float(str(facts["stall_ms"])), idle

    stall_ms, idle = asyncio.run(run())
    assert stall_ms >= 60, "all of it, not all but a tick"
    assert idle <= 3


def test_who_became_due_while_the_process_stood_still_was_late_and_waiting_for_others_is_no_stall() -> None:
    clock, late_ms = ManualClock(), 0

    def wait(timeout: float | None) -> None:
        clock.advance(int(1000 * (3600 if timeout is None else timeout)) + late_ms)

    watch = LoopLagMonitor(clock)
    select = watch.watch_select(wait)
    select(0.25)
    select(None)
    select(0)
    assert watch.facts()["longest_stall_ms"] == 0
    late_ms = 1000
    select(0.25)
    clock.advance(30)  # the loop works
    select(0)
    assert watch.facts()["longest_stall_ms"] == 1030.0


# threads ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("raised", [ValueError("odd"), SystemExit("leaving"), KeyboardInterrupt(), Exception()])
def test_whatever_a_thread_raises_is_told_and_tried_again_until_it_works(raised: BaseException) -> None:
    tracker, ending, runs = StatusTracker(), threading.Event(), []

    def body() -> None:
        runs.append(tracker.failure("shard:t"))
        if len(runs) < 3:
            raise raised

    restarts = Backoff(0.001, 0.002)
    run_unit_thread("shard:t", body, tracker=tracker, clock=SystemClock(), ending=ending, restarts=restarts)
    assert runs[0] is None and tracker.failure("shard:t") is None, "it worked in the end"
    first, then = runs[1], runs[2]
    assert first is not None and then is not None
    assert type(raised).__name__ in first.error
    assert (then.since_ms, first.tries, then.tries) == (first.since_ms, 1, 2)


def test_a_thread_that_only_an_operator_can_mend_is_parked_and_its_end_is_not_waited_for() -> None:
    tracker, ending = StatusTracker(), threading.Event()

    def body() -> None:
        raise InvalidError("no such table.", fix="Create it.")

    supervised = {"tracker": tracker, "clock": SystemClock(), "ending": ending}
    thread = threading.Thread(target=run_unit_thread, args=("shard:t", body), kwargs=supervised)
    thread.start()
    while tracker.failure("shard:t") is None:
        ending.wait(0.01)
    failure = tracker.failure("shard:t")
    assert failure is not None and failure.parked and failure.error == "no such table. Create it."
    ending.set()
    thread.join(5)
    assert not thread.is_alive()


def test_a_failure_that_stands_when_all_ends_is_in_the_last_report() -> None:
    """A report made between the end of the thread and the next check of its table once lost the failure (f323)."""
    tracker, ending = StatusTracker(), threading.Event()
    tracker.set("shard:t", 3, 3, now_ms=0)

    def body() -> None:
        tracker.fail("shard:t", "its newest records are all dead letters", now_ms=1, of_data=True)
        ending.set()

    run_unit_thread("shard:t", body, tracker=tracker, clock=SystemClock(), ending=ending)
    assert tracker.failure("shard:t") is not None
    (mark,) = tracker.report("pipeline", 2, {}).marks
    assert mark.name == "shard:t" and mark.error == "its newest records are all dead letters"


def test_what_a_thread_raises_while_all_ends_is_nobodys_fault() -> None:
    tracker, ending = StatusTracker(), threading.Event()

    def body() -> None:
        ending.set()
        raise RuntimeError("the stores are closed")

    run_unit_thread("shard:t", body, tracker=tracker, clock=SystemClock(), ending=ending)
    assert tracker.failure("shard:t") is None
