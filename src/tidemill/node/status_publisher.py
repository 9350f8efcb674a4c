"""Report of a node, published once a second: stage statuses, facts, memory; and whether the node is ready.

Reporting never ends the node: a fact that cannot be read is reported as a separate error, and a report that cannot
be published leaves other processes blind to a node that still works.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog
from msgspec import structs

from tidemill.base.clock import Clock
from tidemill.base.errors import ClosedError, TidemillError
from tidemill.base.limits import STATUS_PUBLISH_INTERVAL_S
from tidemill.base.runtime.memory_budget import MemoryBudget, resident_bytes
from tidemill.base.runtime.tasks import error_sentence, is_fault
from tidemill.base.status.histogram import StageHistograms
from tidemill.base.status.status import StatusReport, StatusTracker
from tidemill.consensus.status.board import StatusBoard

log = structlog.get_logger()

NOTICES = 20
LEAST_PAUSE_S = 0.1
LEAVE_S = 2.0
"""Longest time that a stopping node spends to announce that it leaves, and the longest for its last report. After
that its lease has to expire."""
END_S = 10.0
"""The same for a node that ends for good: only its last report gives the reason, and its lease delays no other node."""

Facts = Callable[[], dict[str, object]]


class StatusPublisher:
    """Reporter, one per node. `facts[name]` and `troubles[name]` are called once a second. A trouble returns "" or a
    sentence that says what does not work in a dependency of the node; it is reported under a stage of that name."""

    def __init__(
        self, process: str, board: StatusBoard, tracker: StatusTracker, budget: MemoryBudget, clock: Clock
    ) -> None:
        self.facts: dict[str, Facts] = {"memory": lambda: memory_facts(budget), "latency": self._latency_facts}
        self.stages: dict[str, StageHistograms] = {}
        """Latency stages of each source that this node captures now."""
        self.troubles: dict[str, Callable[[], str]] = {}
        self.notices: dict[str, Callable[[], str]] = {}
        """Notices, like `troubles`: problems of a store that still does its work."""
        self._process = process
        self._board = board
        self._tracker = tracker
        self._clock = clock
        self._last: StatusReport | None = None

    async def adopt_previous_report(self) -> None:
        """Adopt the last report of this node's previous process, so that a stage that has been stalled since then
        does not look younger."""
        try:
            reports = await self._board.reports()
        except TidemillError as error:
            log.info("the report of this node's previous process is not available", cause=error_sentence(error))
            return
        for report in reports:
            if report.process == self._process:
                self._tracker.adopt_last_report(report, self._clock.now_ms())

    async def run(self, superseded: Callable[[], BaseException | None]) -> None:
        """Publish until cancelled. Raises what `superseded` returns, because two processes under one name would
        serve no client, and ClosedError: a consensus client that failed for good is opened again with the node."""
        while True:
            replaced = superseded()
            if replaced is not None:
                raise replaced
            began_s = self._clock.monotonic_s()
            self._check_dependencies()
            self._last = self._tracker.report(self._process, self._clock.now_ms(), self._read_facts())
            try:
                await self._board.publish(self._last)
            except BaseException as error:
                if not is_fault(error) or isinstance(error, ClosedError):
                    raise
                log.warning("status report not published", error=error_sentence(error))
            # The interval is measured from start to start: on a busy machine the time that publishing takes must not
            # add to a report's age.
            took_s = self._clock.monotonic_s() - began_s
            await asyncio.sleep(max(LEAST_PAUSE_S, STATUS_PUBLISH_INTERVAL_S - took_s))

    async def publish_leaving_report(self) -> None:
        """Publish the last report again after an orderly stop, marked so that it does not age. The current stage
        statuses would be wrong, because parts that have ended have none."""
        if self._last is not None:
            await self._publish_last(structs.replace(self._last, at_ms=self._clock.now_ms(), left=True), LEAVE_S)

    async def end(self, why: str) -> None:
        """Publish the last report of a node that ends for good: its stage fails with `why`."""
        now_ms = self._clock.now_ms()
        self._tracker.fail(self._process, why, now_ms=now_ms, parked=True)
        await self._publish_last(self._tracker.report(self._process, now_ms, self._read_facts()), END_S)

    async def _publish_last(self, report: StatusReport, within_s: float) -> None:
        try:
            async with asyncio.timeout(within_s):
                await self._board.publish(report)
        except (TidemillError, TimeoutError) as error:
            log.info("last report not published", error=error_sentence(error))

    def _check_dependencies(self) -> None:
        now_ms = self._clock.now_ms()
        for name, ask in self.troubles.items():
            notice = self.notices[name]() if name in self.notices else ""
            self._tracker.set_foundation(name, ask(), now_ms=now_ms, notice=notice)

    def current_problems(self) -> list[str]:
        """Return problems of this process although it serves: a degraded store, a failing captured database."""
        found = [(name, said) for name, ask in self.notices.items() if (said := ask())]
        return [f"{name}: {said}" for name, said in [*found, *self._tracker.failures("capture:")][:NOTICES]]

    def _latency_facts(self) -> dict[str, object]:
        return {source: stages.to_plain() for source, stages in self.stages.items()}

    def _read_facts(self) -> dict[str, object]:
        found: dict[str, object] = {}
        for name, read in self.facts.items():
            try:
                found[name] = read()
            except Exception as error:
                found[name] = {"error": error_sentence(error)}
        return found


def memory_facts(budget: MemoryBudget) -> dict[str, object]:
    """Return {share: (used bytes, limit bytes; 0 if none)}, with the memory of the whole process as `resident`."""
    return {"resident": (resident_bytes(), budget.limit_bytes), **budget.shares()}
