"""Scheduler of the maintenance jobs, which delete, move and merge data in the background.

    every node      competes for the jobs' leases; one node at a time runs the jobs of a lease
    a job           runs a bounded step (`StepBudget`), and returns whether more work waits: then it runs again as soon
                    as the others had their turn, otherwise after its interval
    a failure       ends that step of that job: reported under `keeper:JOB`, retried by `base.tasks.run_unit`

Invariant (safe steps): a lease only decides which node tries. A step must be harmless when two nodes run it
concurrently and when it is interrupted anywhere. Commands therefore fence by `StepBudget.term`, and deletions concern
only what nothing can refer to.

Invariant (background only): no step runs on the path of a commit, an acknowledgement or a status report.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from itertools import groupby

import msgspec

from tidemill.base.clock import Clock
from tidemill.base.runtime.tasks import Tasks, is_fault, run_unit
from tidemill.base.status.status import StatusTracker
from tidemill.consensus.api import Consensus, Lease
from tidemill.consensus.leader_election import run_while_leading

LEASE = "keeper"
STEP_S = 2.0
"""Time after which a step ends itself, so that jobs take turns and a lost lease is noticed soon."""
STEP_BYTES = 256 << 20
"""Bytes that one step may read and write in all. The job bounds its memory by what it holds at a time."""
MORE_PAUSE_S = 0.05
"""Pause between two steps of a job that has more to do: commits come first on the loop and the disk."""
LATE_AFTER_MS = 60_000
"""Time beyond its interval after which a job's step counts as stuck."""


class StepBudget:
    """Budget of one step. `term` is that of the lease: it grows with every change of node, so commands fence by it."""

    def __init__(self, clock: Clock, term: int, *, step_s: float = STEP_S, step_bytes: int = STEP_BYTES) -> None:
        self.term = term
        self._clock = clock
        self._until_s = clock.monotonic_s() + step_s
        self._bytes = step_bytes

    def spend(self, size_bytes: int) -> None:
        self._bytes -= size_bytes

    @property
    def has_budget(self) -> bool:
        """True while budget remains. Check it before each piece of work; a step that began with a budget always does
        one piece."""
        return self._bytes > 0 and self._clock.monotonic_s() < self._until_s


class Job(msgspec.Struct, frozen=True):
    """One job. `run(budget)` does one step and returns whether more work waits. `facts` returns plain values, which
    are published with the status report."""

    name: str
    interval_s: float
    run: Callable[[StepBudget], Awaitable[bool]]
    facts: Callable[[], dict[str, object]] = dict
    lease: str = LEASE

    @property
    def mark(self) -> str:
        return f"keeper:{self.name}"


class JobRunner:
    """Runner of the jobs. `run` runs forever and never raises: a job's fault is reported under the job's stage."""

    def __init__(
        self, jobs: Sequence[Job], consensus: Consensus, clock: Clock, *, holder: str, tracker: StatusTracker
    ) -> None:
        self.jobs = tuple(sorted(jobs, key=lambda job: job.lease))
        self._consensus = consensus
        self._clock = clock
        self._holder = holder
        self._tracker = tracker
        self._steps: dict[str, int] = {job.name: 0 for job in jobs}
        self._leading: set[str] = set()

    def facts(self) -> dict[str, object]:
        """Return {job: {steps, here, … the job's facts}}. `here` is set if this node runs the job now."""
        return {
            job.name: {"steps": self._steps[job.name], "here": job.name in self._leading, **job.facts()}
            for job in self.jobs
        }

    async def run(self) -> None:
        async with Tasks(self._task_ended) as tasks:
            leases = [
                tasks.spawn(self._run_lease(lease, tuple(jobs)), name=f"keeper-{lease}")
                for lease, jobs in groupby(self.jobs, key=lambda job: job.lease)
            ]
            if leases:
                await asyncio.wait(leases)

    async def _run_lease(self, lease: str, jobs: tuple[Job, ...]) -> None:
        async def body() -> None:
            await run_while_leading(self._consensus, lease, self._holder, b"", led)

        async def led(held: Lease) -> None:
            async with Tasks(self._task_ended) as tasks:
                running = [tasks.spawn(self._run_job(job, held.term), name=job.mark) for job in jobs]
                await asyncio.wait(running)

        await run_unit(f"keeper:{lease}", body, tracker=self._tracker, clock=self._clock)

    async def _run_job(self, job: Job, term: int) -> None:
        self._leading.add(job.name)
        try:
            await run_unit(job.mark, lambda: self._run_steps(job, term), tracker=self._tracker, clock=self._clock)
        finally:
            self._leading.discard(job.name)
            # From here on another node reports it.
            self._tracker.remove(job.mark)
            self._tracker.clear_failure(job.mark)
            self._tracker.clear(f"{job.mark}:")

    async def _run_steps(self, job: Job, term: int) -> None:
        budget_ms = LATE_AFTER_MS + int(job.interval_s * 1000)
        while True:
            done = self._steps[job.name]
            self._tracker.set(job.mark, done, done + 1, now_ms=self._clock.now_ms(), budget_ms=budget_ms, unit="steps")
            more = await job.run(StepBudget(self._clock, term))
            self._steps[job.name] = done = done + 1
            self._tracker.set(job.mark, done, done, now_ms=self._clock.now_ms(), budget_ms=budget_ms, unit="steps")
            self._tracker.clear_failure(job.mark)
            await asyncio.sleep(MORE_PAUSE_S if more else job.interval_s)

    def _task_ended(self, name: str, error: BaseException) -> None:
        """Record the error of a task. `keep` catches every fault, so only an intended end of the process gets here."""
        if is_fault(error):
            self._tracker.fail(name, repr(error), now_ms=self._clock.now_ms())
