"""Report of `up` about its children: stages of those that do not start, and errors of their tables in the terminal.

A driver that cannot even start cannot report itself. The report is empty while every child runs. Drivers that ended on
purpose must not be missed: the reports of drivers that ended with their parent, or that it no longer starts, are
deleted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

import structlog

from tidemill.base.clock import Clock, Rand
from tidemill.base.errors import ClosedError, TidemillError
from tidemill.base.limits import MARK_PUBLISH_INTERVAL_S
from tidemill.base.runtime.tasks import is_fault, sentence
from tidemill.base.status.status import Report, StatusTracker
from tidemill.consensus.api import Consensus
from tidemill.consensus.factory import open_consensus
from tidemill.consensus.status.board import Board
from tidemill.node.supervise.driver_instances import not_missed, not_started

LOOK_EVERY = 3
"""Rounds between two reads of the drivers' reports."""
ADOPT_TIMEOUT_S = 3.0
RETIRE_TIMEOUT_S = 3.0

log = structlog.get_logger()


class SupervisorStatus:
    """Reporter of a supervisor. `run` runs until cancelled; call `adopt` before the first child starts, so that ages
    survive a restart of `up` too.

    The drivers of `pipelines` with `label` belong to this parent; it starts those of them whose processes are in
    `started`.
    """

    def __init__(
        self,
        name: str,
        url: str,
        tracker: StatusTracker,
        clock: Clock,
        rand: Rand,
        say: Callable[[str], None],
        *,
        pipelines: Collection[str] = (),
        label: str = "",
    ) -> None:
        self._process = f"up:{name}"
        self._url = url
        self._tracker = tracker
        self._clock = clock
        self._rand = rand
        self._say = say
        self._pipelines = pipelines
        self._label = label
        self.started: Collection[str] | None = None
        """Processes that were started; None while not known."""
        self._consensus: Consensus | None = None
        self._told = False
        self._said: dict[str, str] = {}

    async def adopt(self) -> None:
        try:
            async with asyncio.timeout(ADOPT_TIMEOUT_S):
                board = await self._board()
                for report in await board.reports():
                    if report.process == self._process:
                        self._tracker.adopt(report)
                        self._told = True
        except (TidemillError, TimeoutError) as error:
            self._told = True  # possibly: a report that is neither renewed nor deleted would turn blind
            log.info("the previous report is not available", cause=sentence(error))

    async def run(self) -> None:
        round_number = 0
        while True:
            await asyncio.sleep(MARK_PUBLISH_INTERVAL_S)
            round_number += 1
            try:
                await self._publish()
                if round_number % LOOK_EVERY == 0:
                    await self._look(await self._board())
            except BaseException as error:
                if isinstance(error, ClosedError):
                    await self._reopen()
                elif not is_fault(error):
                    raise
                log.debug("status not reported", error=sentence(error))

    async def _look(self, board: Board) -> None:
        reports = await board.reports()
        self._print(reports)
        if self.started is not None:
            now_ms = self._clock.now_ms()
            gone = not_started(reports, self._pipelines, self._label, self.started, now_ms)
            await _forget(board, not_missed(reports, gone, now_ms))

    async def retire(self, ended: Collection[str]) -> None:
        """Delete the reports of processes that ended with their parent on purpose."""
        try:
            async with asyncio.timeout(RETIRE_TIMEOUT_S):
                board = await self._board()
                gone = not_missed(await board.reports(), ended, self._clock.now_ms())
                for process in gone:  # its failure concerns no process any more
                    self._tracker.heal(process)
                    self._tracker.remove(process)
                await _forget(board, gone)
                await self._publish()
        except (TidemillError, TimeoutError) as error:
            log.info("ended drivers stay visible as blind for an hour", cause=sentence(error))

    async def aclose(self) -> None:
        if self._consensus is not None:
            await self._consensus.aclose()

    async def _reopen(self) -> None:
        """Open the consensus client again after it ended. The report relies on nothing that consensus may have lost."""
        ended, self._consensus = self._consensus, None
        if ended is not None:
            await ended.aclose()

    async def _board(self) -> Board:
        if self._consensus is None:
            self._consensus = await open_consensus(self._url, self._clock, self._rand)
        return Board(self._consensus, self._rand)

    async def _publish(self) -> None:
        report = self._tracker.report(self._process, self._clock.now_ms())
        if report.marks:
            self._told = True  # also when the outcome stays unknown
            await (await self._board()).publish(report)
        elif self._told:  # an empty report that is not renewed would turn blind
            await (await self._board()).forget(self._process)
            self._told = False

    def _print(self, reports: list[Report]) -> None:
        """Print the errors that drivers report for their units: each once, and again only after it changed or came
        back."""
        now: dict[str, str] = {}
        for report in reports:
            if report.process.startswith("pipeline:"):
                now |= {mark.name: mark.error for mark in report.marks if mark.error}
        for name, error in now.items():
            if self._said.get(name) != error:
                self._say(f"{name}: {error}")
        self._said = now


async def _forget(board: Board, processes: Collection[str]) -> None:
    for process in processes:
        log.info("driver forgotten: it ended on purpose", process=process)
        await board.forget(process)
