"""Report of `up` about its children: stages of those that do not start, and errors of their tables in the terminal.

A driver that cannot even start cannot report itself. The report also has the restarts of the last minutes. It is empty
while every child runs. Drivers that ended on
purpose must not be missed: the reports of drivers that ended with their parent, or that it no longer starts, are
deleted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence

import structlog

from tidemill.base.clock import Clock, Rand
from tidemill.base.errors import ClosedError, TidemillError
from tidemill.base.limits import STATUS_PUBLISH_INTERVAL_S
from tidemill.base.runtime.tasks import error_sentence, is_fault
from tidemill.base.status.status import RESTARTS, StatusReport, StatusTracker
from tidemill.consensus.api import Consensus
from tidemill.consensus.factory import open_consensus
from tidemill.consensus.status.board import StatusBoard
from tidemill.node.supervise.driver_instances import OwnDrivers, forgettable_drivers

ROUNDS_PER_READ = 3
"""Rounds between two reads of the drivers' reports."""
ADOPT_TIMEOUT_S = 3.0
RETIRE_TIMEOUT_S = 3.0

log = structlog.get_logger()


class SupervisorStatus:
    """Reporter of a supervisor. `run` runs until cancelled; call `adopt` before the first child starts, so that ages
    survive a restart of `up` too. `drivers` belong to this parent.
    """

    def __init__(
        self,
        name: str,
        url: str,
        tracker: StatusTracker,
        clock: Clock,
        rand: Rand,
        say: Callable[[str], None],
        drivers: OwnDrivers,
    ) -> None:
        self._process = f"up:{name}"
        self._url = url
        self._tracker = tracker
        self._clock = clock
        self._rand = rand
        self._say = say
        self._drivers = drivers
        self.announce: Callable[[Sequence[StatusReport]], bool] | None = None
        """Called with all reports every few seconds, until it returns True."""
        self.restarts: Callable[[], Mapping[str, object]] = dict
        """Returns the fact `restarts` of the report."""
        self._consensus: Consensus | None = None
        self._reported = False
        self._said: dict[str, str] = {}

    async def adopt(self) -> None:
        try:
            async with asyncio.timeout(ADOPT_TIMEOUT_S):
                board = await self._open_board()
                for report in await board.reports():
                    if report.process == self._process:
                        self._tracker.adopt_last_report(report)
                        self._reported = True
        except (TidemillError, TimeoutError) as error:
            self._reported = True  # possibly: a report that is neither renewed nor deleted would turn blind
            log.info("the previous report is not available", cause=error_sentence(error))

    async def run(self) -> None:
        round_number = 0
        while True:
            await asyncio.sleep(STATUS_PUBLISH_INTERVAL_S)
            round_number += 1
            try:
                await self._publish()
                if round_number % ROUNDS_PER_READ == 0:
                    await self._read_driver_reports(await self._open_board())
            except BaseException as error:
                if isinstance(error, ClosedError):
                    await self._reopen_consensus()
                elif not is_fault(error):
                    raise
                log.debug("status not reported", error=error_sentence(error))

    async def _read_driver_reports(self, board: StatusBoard) -> None:
        reports = await board.reports()
        self._print_errors(reports)
        if self.announce is not None and self.announce(reports):
            self.announce = None
        now_ms = self._clock.now_ms()
        gone = self._drivers.find_stale(reports, now_ms)
        await _forget_processes(board, forgettable_drivers(reports, gone, now_ms))

    async def forget_ended(self, ended: Collection[str]) -> None:
        """Delete the reports of processes that ended with their parent on purpose."""
        self.restarts = dict
        try:
            async with asyncio.timeout(RETIRE_TIMEOUT_S):
                board = await self._open_board()
                gone = forgettable_drivers(await board.reports(), ended, self._clock.now_ms())
                for process in gone:  # its failure concerns no process any more
                    self._tracker.clear_failure(process)
                    self._tracker.remove(process)
                await _forget_processes(board, gone)
                await self._publish()
        except (TidemillError, TimeoutError) as error:
            log.info("ended drivers stay visible as blind for an hour", cause=error_sentence(error))

    async def aclose(self) -> None:
        if self._consensus is not None:
            await self._consensus.aclose()

    async def _reopen_consensus(self) -> None:
        """Open the consensus client again after it ended. The report relies on nothing that consensus may have lost."""
        ended, self._consensus = self._consensus, None
        if ended is not None:
            await ended.aclose()

    async def _open_board(self) -> StatusBoard:
        if self._consensus is None:
            self._consensus = await open_consensus(self._url, self._clock, self._rand)
        return StatusBoard(self._consensus, self._rand)

    async def _publish(self) -> None:
        restarts = self.restarts()
        facts = {RESTARTS: dict(restarts)} if restarts else {}
        report = self._tracker.report(self._process, self._clock.now_ms(), facts)
        if report.marks or restarts:
            self._reported = True  # also when the outcome stays unknown
            await (await self._open_board()).publish(report)
        elif self._reported:  # an empty report that is not renewed would turn blind
            await (await self._open_board()).drop_report(self._process)
            self._reported = False

    def _print_errors(self, reports: list[StatusReport]) -> None:
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


async def _forget_processes(board: StatusBoard, processes: Collection[str]) -> None:
    for process in processes:
        log.info("driver forgotten: it ended on purpose", process=process)
        await board.drop_report(process)
