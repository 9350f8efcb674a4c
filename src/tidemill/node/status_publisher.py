"""What a node says of itself, once a second: marks, facts, memory; and whether it is ready.

Telling is no reason to end: a fact that cannot be read is told as an error of its own, a report that cannot be
published leaves the node blind to others (M3) and itself at work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog
from msgspec import structs

from tidemill.base.clock import Clock
from tidemill.base.errors import ClosedError, TidemillError
from tidemill.base.limits import MARK_PUBLISH_INTERVAL_S
from tidemill.base.runtime.memory_budget import Budget, resident_bytes
from tidemill.base.runtime.tasks import is_fault, sentence
from tidemill.base.status.histogram import Stages
from tidemill.base.status.status import Report, StatusTracker
from tidemill.consensus.status.board import Board

log = structlog.get_logger()

NOTICES = 20
LEAST_PAUSE_S = 0.1
LEAVE_S = 2.0
"""The longest that a node which is stopped tells the others that it leaves, and the longest for its last report. Then
its lease has to run out."""
END_S = 10.0
"""The same for a node that ends for good: only its last report gives the reason, and its lease delays no other node."""

Facts = Callable[[], dict[str, object]]


class Reporting:
    """One per node. `facts[name]` is asked once a second, and so is `troubles[name]`: what the node stands on says
    in a sentence what does not work, which is told under a mark of that name, or ""."""

    def __init__(self, process: str, board: Board, tracker: StatusTracker, budget: Budget, clock: Clock) -> None:
        self.facts: dict[str, Facts] = {"memory": lambda: memory_facts(budget), "latency": self._latency}
        self.stages: dict[str, Stages] = {}
        """Of each source that this node captures now."""
        self.troubles: dict[str, Callable[[], str]] = {}
        self.notices: dict[str, Callable[[], str]] = {}
        """As `troubles`: what is wrong with a store that does its work."""
        self._process = process
        self._board = board
        self._tracker = tracker
        self._clock = clock
        self._last: Report | None = None

    async def adopt(self) -> None:
        """Remember what this node's earlier life said, so that what stands still since then does not look younger."""
        try:
            reports = await self._board.reports()
        except TidemillError as error:
            log.info("what this node said before it was restarted is not known", cause=sentence(error))
            return
        for report in reports:
            if report.process == self._process:
                self._tracker.adopt(report, self._clock.now_ms())

    async def run(self, superseded: Callable[[], BaseException | None]) -> None:
        """Until cancelled. Raises what `superseded` returns: two processes under one name would serve nobody; and
        Closed: a consensus client that failed for good is opened anew with the node."""
        while True:
            replaced = superseded()
            if replaced is not None:
                raise replaced
            began_s = self._clock.monotonic_s()
            self._look()
            self._last = self._tracker.report(self._process, self._clock.now_ms(), self._read())
            try:
                await self._board.publish(self._last)
            except BaseException as error:
                if not is_fault(error) or isinstance(error, ClosedError):
                    raise
                log.warning("marks not published", error=sentence(error))
            # From begin to begin: on a busy machine the time that publishing takes must not add to a report's age.
            took_s = self._clock.monotonic_s() - began_s
            await asyncio.sleep(max(LEAST_PAUSE_S, MARK_PUBLISH_INTERVAL_S - took_s))

    async def leave(self) -> None:
        """The node was stopped in order: its last report is published once more, as one that grows no older. Not what
        the marks are by now, for parts that have ended have none."""
        if self._last is not None:
            await self._publish_last(structs.replace(self._last, at_ms=self._clock.now_ms(), left=True), LEAVE_S)

    async def end(self, why: str) -> None:
        """Publish the last report of a node that ends for good: its mark fails with `why`."""
        now_ms = self._clock.now_ms()
        self._tracker.fail(self._process, why, now_ms=now_ms, parked=True)
        await self._publish_last(self._tracker.report(self._process, now_ms, self._read()), END_S)

    async def _publish_last(self, report: Report, within_s: float) -> None:
        try:
            async with asyncio.timeout(within_s):
                await self._board.publish(report)
        except (TidemillError, TimeoutError) as error:
            log.info("the last report is not published", error=sentence(error))

    def _look(self) -> None:
        now_ms = self._clock.now_ms()
        for name, ask in self.troubles.items():
            notice = self.notices[name]() if name in self.notices else ""
            self._tracker.works(name, ask(), now_ms=now_ms, notice=notice)

    def noticed(self) -> list[str]:
        """What fails in this process though it serves: a store that is not well, a captured database."""
        found = [(name, said) for name, ask in self.notices.items() if (said := ask())]
        return [f"{name}: {said}" for name, said in [*found, *self._tracker.failures("capture:")][:NOTICES]]

    def _latency(self) -> dict[str, object]:
        return {source: stages.plain() for source, stages in self.stages.items()}

    def _read(self) -> dict[str, object]:
        found: dict[str, object] = {}
        for name, read in self.facts.items():
            try:
                found[name] = read()
            except Exception as error:
                found[name] = {"error": sentence(error)}
        return found


def memory_facts(budget: Budget) -> dict[str, object]:
    """{share: (used bytes, limit bytes; 0 = none)}, with what the system says of the whole process as `resident`."""
    return {"resident": (resident_bytes(), budget.limit_bytes), **budget.shares()}
