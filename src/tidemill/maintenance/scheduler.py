"""Scheduler of the maintenance jobs, which delete, move and merge data in the background.

    every node      competes for the jobs' leases; one node at a time runs the jobs of a lease
    a job           runs a bounded step (`StepBudget`), and returns whether more work waits: then it runs again as soon
                    as the others had their turn, otherwise after its interval
    a failure       ends that step of that job: reported under `keeper:JOB`, retried by `base.runtime.tasks`. A job of
                    many units (shards, sources) reports each unit under its own stage (`UnitFailures`)

`JobContext` holds the dependencies of the jobs, `Retention` the limits they obey (`[retention]` of the configuration).

Invariant (safe steps): a lease only decides which node tries. A step must be harmless when two nodes run it
concurrently and when it is interrupted anywhere. Commands therefore fence by `StepBudget.term`, and deletions concern
only what nothing can refer to.

Invariant (background only): no step runs on the path of a commit, an acknowledgement or a status report.

Invariant (bounded report): at most a few dozen failing units of a job are reported. A status report is one register,
and must not grow with the number of simultaneous failures.
"""

from __future__ import annotations

import abc
import asyncio
from collections import deque
from collections.abc import Sequence
from itertools import groupby

import msgspec

from tidemill.base.clock import Clock, Rand
from tidemill.base.runtime.tasks import Tasks, error_sentence, is_fault, needs_operator, run_unit
from tidemill.base.status.status import StatusTracker
from tidemill.consensus.api import Consensus, Lease
from tidemill.consensus.leader_election import LeaseRequest, run_while_leading
from tidemill.metastore.metastore import Metastore
from tidemill.objects.store import ObjectStore
from tidemill.shards.api import RunCpuWork, run_inline
from tidemill.shards.compaction.compaction import OldestVersion, any_version

LEASE = "keeper"
STEP_S = 2.0
"""Time after which a step ends itself, so that jobs take turns and a lost lease is noticed soon."""
STEP_BYTES = 256 << 20
"""Bytes that one step may read and write in all. The job bounds its memory by what it holds at a time."""
MORE_PAUSE_S = 0.05
"""Pause between two steps of a job that has more to do: commits come first on the loop and the disk."""
LATE_AFTER_MS = 60_000
"""Time beyond its interval after which a job's step counts as stuck."""
REPORTED_UNITS_MAX = 50


class Retention(msgspec.Struct, frozen=True):
    """Times, in seconds, for which unused data stays.

    history_s        the past of a shard that can be read without a hold, and the bindings with it
    collect_after_s  time between the replacement of an object and its deletion: a shorter read needs no hold
    orphans_after_s  age of an object that was written and never referred to; a writer that was paused for longer
                     writes it again
    group_offsets_s  committed offsets of a group without members (Kafka's offsets.retention.minutes)
    """

    history_s: float = 60.0
    collect_after_s: float = 120.0
    orphans_after_s: float = 6 * 3600.0
    group_offsets_s: float = 7 * 86_400.0

    @property
    def history_ms(self) -> int:
        return int(self.history_s * 1000)

    @property
    def group_offsets_ms(self) -> int:
        return int(self.group_offsets_s * 1000)

    @property
    def step_ms(self) -> int:
        """Step of since. A shard's since may trail the history by less than this, because moving it is a write,
        worth it only for a quarter."""
        return self.history_ms // 4


class AgedValue:
    """A growing value of `age_s` ago by this process's monotonic clock. So an age does not depend on the times
    that are stored with the value: the clock that made them may have been wrong."""

    SAMPLES = 16
    """Number of values remembered: the age is exact up to this share of it, and to the distance of two calls."""

    def __init__(self, age_s: float) -> None:
        self._age_s = age_s
        self._seen: deque[tuple[float, int]] = deque()

    def observe(self, value: int, now_s: float) -> int:
        """Add the present value; return the newest value observed at least `age_s` ago, or 0."""
        if not self._seen or (value > self._seen[-1][1] and now_s - self._seen[-1][0] >= self._age_s / self.SAMPLES):
            self._seen.append((now_s, value))
        while len(self._seen) > 1 and now_s - self._seen[1][0] >= self._age_s:
            self._seen.popleft()
        since_s, aged = self._seen[0]
        return aged if now_s - since_s >= self._age_s else 0


class JobContext(msgspec.Struct, frozen=True):
    """Dependencies of a job. `cpu` runs the computation of merges off the loop that serves.

    `oldest_version` returns the schema version below which parts of a table are rewritten.
    """

    consensus: Consensus
    objects: ObjectStore
    metastore: Metastore
    clock: Clock
    rand: Rand
    retention: Retention
    cpu: RunCpuWork = run_inline
    oldest_version: OldestVersion = any_version


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


class MaintenanceJob(abc.ABC):
    """Work of a job. `_figures` counts it since this process started."""

    _figures: msgspec.Struct | None = None

    @abc.abstractmethod
    async def run(self, budget: StepBudget) -> bool:
        """Do one step; return whether more work waits."""

    def facts(self) -> dict[str, object]:
        """Return plain values, which are published with the status report."""
        return {} if self._figures is None else msgspec.structs.asdict(self._figures)


class Job(msgspec.Struct, frozen=True):
    """A job, its interval, and the lease under which it runs."""

    name: str
    interval_s: float
    work: MaintenanceJob
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
            job.name: {"steps": self._steps[job.name], "here": job.name in self._leading, **job.work.facts()}
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
            await run_while_leading(self._consensus, LeaseRequest(lease, self._holder), led)

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
            more = await job.work.run(StepBudget(self._clock, term))
            self._steps[job.name] = done = done + 1
            self._tracker.set(job.mark, done, done, now_ms=self._clock.now_ms(), budget_ms=budget_ms, unit="steps")
            self._tracker.clear_failure(job.mark)
            await asyncio.sleep(MORE_PAUSE_S if more else job.interval_s)

    def _task_ended(self, name: str, error: BaseException) -> None:
        """Record the error of a task. `run_unit` catches every fault: only an intended end of the process gets here."""
        if is_fault(error):
            self._tracker.fail(name, repr(error), now_ms=self._clock.now_ms())


class UnitFailures:
    """Failing units of one job. `count` is the number that fail now, reported or not."""

    def __init__(self, prefix: str, tracker: StatusTracker, clock: Clock) -> None:
        self._prefix = prefix
        self._tracker = tracker
        self._clock = clock
        self._failing: set[str] = set()
        self._reported: set[str] = set()

    @property
    def count(self) -> int:
        return len(self._failing)

    def failed(self, name: str, error: BaseException) -> None:
        """Report a failure. Raises `error` again when it is no fault of the unit, such as a cancellation or an exit."""
        if not is_fault(error):
            raise error
        self._failing.add(name)
        if name in self._reported or len(self._reported) < REPORTED_UNITS_MAX:
            self._reported.add(name)
            self._tracker.fail(
                f"{self._prefix}:{name}",
                error_sentence(error),
                now_ms=self._clock.now_ms(),
                parked=needs_operator(error),
            )

    def clear_failure(self, name: str) -> None:
        self._failing.discard(name)
        if name in self._reported:
            self._reported.discard(name)
            self._tracker.clear_failure(f"{self._prefix}:{name}")
