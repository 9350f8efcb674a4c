"""The keeper's jobs: what takes away, moves up and merges in the background, one list, one scheduler.

    every node      competes for the jobs' leases; one node at a time runs the jobs of a lease
    a job           runs a bounded step (`Budget`), and says whether more waits: then it comes again at once, after
                    the others had their turn; else after its interval
    a failure       ends that step of that job: told under `keeper:JOB`, tried again by `base.tasks.keep`

J1  A lease decides who tries. Safety comes from what a step does: it must be harmless when two nodes run it at once
    and when it is cut off anywhere (commands that fence by `Budget.term`, deletions of what nothing may refer to).
J2  No step runs on the path of a commit, an acknowledgement or a mark.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from itertools import groupby

import msgspec

from tidemill.base.clock import Clock
from tidemill.base.runtime.tasks import Tasks, is_fault, keep
from tidemill.base.status.status import StatusTracker
from tidemill.consensus.api import Consensus, Lease
from tidemill.consensus.leader_election import lead

LEASE = "keeper"
STEP_S = 2.0
"""A step ends itself after about this long, so that jobs take turns and a lost lease is obeyed soon."""
STEP_BYTES = 256 << 20
"""What one step may read and write in all; its memory is bounded by what it holds at once, which is the job's."""
MORE_PAUSE_S = 0.05
"""Between two steps of one job that has more to do: the loop and the disk are the commits' first."""
LATE_AFTER_MS = 60_000
"""A job whose step takes this long beyond its interval is stuck."""


class Budget:
    """What one step may spend. `term` is the lease's: it grows with every change of node, so commands fence by it."""

    def __init__(self, clock: Clock, term: int, *, step_s: float = STEP_S, step_bytes: int = STEP_BYTES) -> None:
        self.term = term
        self._clock = clock
        self._until_s = clock.monotonic_s() + step_s
        self._bytes = step_bytes

    def spend(self, size_bytes: int) -> None:
        self._bytes -= size_bytes

    @property
    def left(self) -> bool:
        """Ask before each piece of work; a step that began with a budget always does one piece."""
        return self._bytes > 0 and self._clock.monotonic_s() < self._until_s


class Job(msgspec.Struct, frozen=True):
    """`run(budget)` does one step and returns whether more waits. `facts`: plain values, published with the marks."""

    name: str
    interval_s: float
    run: Callable[[Budget], Awaitable[bool]]
    facts: Callable[[], dict[str, object]] = dict
    lease: str = LEASE

    @property
    def mark(self) -> str:
        return f"keeper:{self.name}"


class Jobs:
    """`run` for ever. Never raises: a job's fault is told under the job's mark."""

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
        """{job: {steps, here, …its own}}; `here`: this node runs it just now."""
        return {
            job.name: {"steps": self._steps[job.name], "here": job.name in self._leading, **job.facts()}
            for job in self.jobs
        }

    async def run(self) -> None:
        async with Tasks(self._ended) as tasks:
            leases = [
                tasks.spawn(self._lease(lease, tuple(jobs)), name=f"keeper-{lease}")
                for lease, jobs in groupby(self.jobs, key=lambda job: job.lease)
            ]
            if leases:
                await asyncio.wait(leases)

    async def _lease(self, lease: str, jobs: tuple[Job, ...]) -> None:
        async def body() -> None:
            await lead(self._consensus, lease, self._holder, b"", led)

        async def led(held: Lease) -> None:
            async with Tasks(self._ended) as tasks:
                running = [tasks.spawn(self._job(job, held.term), name=job.mark) for job in jobs]
                await asyncio.wait(running)

        await keep(f"keeper:{lease}", body, tracker=self._tracker, clock=self._clock)

    async def _job(self, job: Job, term: int) -> None:
        self._leading.add(job.name)
        try:
            await keep(job.mark, lambda: self._steps_of(job, term), tracker=self._tracker, clock=self._clock)
        finally:
            self._leading.discard(job.name)
            # Another node tells from here on.
            self._tracker.remove(job.mark)
            self._tracker.heal(job.mark)
            self._tracker.clear(f"{job.mark}:")

    async def _steps_of(self, job: Job, term: int) -> None:
        budget_ms = LATE_AFTER_MS + int(job.interval_s * 1000)
        while True:
            done = self._steps[job.name]
            self._tracker.set(job.mark, done, done + 1, now_ms=self._clock.now_ms(), budget_ms=budget_ms, unit="steps")
            more = await job.run(Budget(self._clock, term))
            self._steps[job.name] = done = done + 1
            self._tracker.set(job.mark, done, done, now_ms=self._clock.now_ms(), budget_ms=budget_ms, unit="steps")
            self._tracker.heal(job.mark)
            await asyncio.sleep(MORE_PAUSE_S if more else job.interval_s)

    def _ended(self, name: str, error: BaseException) -> None:
        """`keep` catches every fault, so only what ends a process on purpose gets here."""
        if is_fault(error):
            self._tracker.fail(name, repr(error), now_ms=self._clock.now_ms())
