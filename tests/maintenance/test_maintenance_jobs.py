"""The scheduler of maintenance jobs: one node at a time, bounded steps, and isolation of a job's errors."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

import pytest

from support.waiting import until
from tidemill.base.clock import SystemClock
from tidemill.base.errors import CorruptError
from tidemill.base.runtime import tasks
from tidemill.base.status.status import StatusTracker
from tidemill.consensus.leader_election import LeaseRequest
from tidemill.consensus.memory import MemoryConsensus, MemoryState
from tidemill.maintenance import scheduler
from tidemill.maintenance.scheduler import (
    REPORTED_UNITS_MAX,
    Job,
    JobRunner,
    MaintenanceJob,
    StepBudget,
    UnitFailures,
)


class Panic(BaseException):
    """An exception of a library's native code, which does not derive from `Exception`."""


class Steps(MaintenanceJob):
    """A job whose step is one function."""

    def __init__(self, step: Callable[[StepBudget], Awaitable[bool]]) -> None:
        self._step = step

    async def run(self, budget: StepBudget) -> bool:
        return await self._step(budget)


def jobs_on(state: MemoryState, holder: str, tracker: StatusTracker, *jobs: Job) -> JobRunner:
    clock = SystemClock()
    return JobRunner(jobs, MemoryConsensus(clock, state), clock, holder=holder, tracker=tracker)


async def test_f701_a_job_that_raises_ends_its_own_step_is_told_and_heals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "FIRST_PAUSE_S", 0.01)
    tracker = StatusTracker()
    faults: list[BaseException] = [RecursionError("too deep"), Panic("native code"), ValueError("nobody listed me")]
    steps = {"bad": 0, "good": 0}
    reported: list[str] = []

    async def bad(budget: StepBudget) -> bool:
        failure = tracker.failure("keeper:bad")
        reported.append(failure.error if failure is not None else "")
        if faults:
            raise faults.pop(0)
        if steps["good"] <= 10:
            raise ValueError("the other job has not gone on")
        steps["bad"] += 1
        return False

    async def good(budget: StepBudget) -> bool:
        steps["good"] += 1
        return False

    jobs = jobs_on(MemoryState(), "a", tracker, Job("bad", 0.01, Steps(bad)), Job("good", 0.01, Steps(good)))
    running = asyncio.create_task(jobs.run())
    await until(lambda: steps["bad"] > 1)
    assert reported[:4] == [
        "", "RecursionError: too deep", "Panic: native code", "ValueError: nobody listed me",
    ]  # fmt: skip
    assert tracker.failure("keeper:bad") is None
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_one_node_at_a_time_runs_a_job_and_another_takes_over_with_a_newer_term(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scheduler, "LeaseRequest", partial(LeaseRequest, ttl_ms=1500))
    state, terms, at_once = MemoryState(), [], [0, 0]

    def job() -> Job:
        async def run(budget: StepBudget) -> bool:
            terms.append(budget.term)
            at_once[0] += 1
            at_once[1] = max(at_once)
            try:
                await asyncio.sleep(0.002)
            finally:
                at_once[0] -= 1
            return True

        return Job("job", 0.01, Steps(run))

    nodes = [asyncio.create_task(jobs_on(state, holder, StatusTracker(), job()).run()) for holder in "ab"]
    await until(lambda: len(terms) > 3)
    first = next(i for i, lease in enumerate("ab") if state.leases["keeper"].holder == lease)
    nodes[first].cancel()
    await until(lambda: terms[-1] > terms[0])
    assert at_once[1] == 1
    nodes[1 - first].cancel()
    await asyncio.gather(*nodes, return_exceptions=True)


def test_however_many_units_fail_only_a_few_dozen_are_told_and_all_are_counted() -> None:
    tracker, clock = StatusTracker(), SystemClock()
    reported = UnitFailures("keeper:shards", tracker, clock)
    for n in range(1000):
        reported.failed(f"s{n}", CorruptError("a record cannot be read."))
    assert reported.count == 1000 and len(tracker.report("n", 0).marks) == REPORTED_UNITS_MAX
    for n in range(10):
        reported.clear_failure(f"s{n}")
    reported.failed("s999", ValueError("again"))
    assert reported.count == 990 and len(tracker.report("n", 0).marks) == REPORTED_UNITS_MAX - 9
    with pytest.raises(asyncio.CancelledError):
        reported.failed("s5", asyncio.CancelledError())
