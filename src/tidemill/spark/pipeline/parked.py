"""Status of a pipeline of a shared driver that is not running at the moment.

    pipeline:NAME     fails with the error of its last attempt
    shard:TABLE       of its last report: fails too, blocked by the pipeline

It is published as the pipeline's own report, with the shared pid.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import structlog

from tidemill.base.clock import Clock, Rand, SystemClock
from tidemill.base.errors import TidemillError
from tidemill.base.limits import STATUS_PUBLISH_INTERVAL_S
from tidemill.base.runtime.memory_budget import resident_bytes
from tidemill.base.runtime.tasks import error_sentence, needs_operator
from tidemill.base.status.drivers import is_silent
from tidemill.base.status.status import StatusReport, StatusTracker, process_exists, this_process
from tidemill.consensus.api import Consensus
from tidemill.consensus.factory import open_consensus
from tidemill.consensus.status.board import StatusBoard
from tidemill.spark.settings import DriverSettings

OPEN_TIMEOUT_S = 3.0
NOT_RUNNING = "its pipeline does not run"

log = structlog.get_logger()


async def publish_failure(
    settings: DriverSettings, fault: BaseException, began_ms: int, over: Callable[[], bool]
) -> None:
    """Publish the status until `over()`, which is checked once a second. While consensus is unavailable nothing is
    published.

    `began_ms`: start of the process. Raises InvalidError if the URL of consensus is wrong.
    """
    clock, rand = SystemClock(), Rand()
    facts = {"began_ms": began_ms, "master": settings.master, "memory": {"resident": (resident_bytes(), 0)}}
    while not over():
        consensus: Consensus | None = None
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                consensus = await open_consensus(settings.urls.consensus, clock, rand)
        except (TidemillError, TimeoutError) as error:
            if needs_operator(error):
                raise
            log.warning("statuses not published", unit=f"pipeline:{settings.name}", error=error_sentence(error))
            await asyncio.sleep(STATUS_PUBLISH_INTERVAL_S)
            continue
        try:
            await _publish(StatusBoard(consensus, rand), settings, fault, clock, facts, over)
        except TidemillError as error:
            log.warning("statuses not published", unit=f"pipeline:{settings.name}", error=error_sentence(error))
            await asyncio.sleep(STATUS_PUBLISH_INTERVAL_S)
        finally:
            await consensus.aclose()


async def _publish(
    board: StatusBoard,
    settings: DriverSettings,
    fault: BaseException,
    clock: Clock,
    facts: Mapping[str, object],
    over: Callable[[], bool],
) -> None:
    while (last := await _last_report(board, settings.process)) is not None and _is_from_live_driver(
        last, clock.now_ms()
    ):
        if over():
            return
        await asyncio.sleep(STATUS_PUBLISH_INTERVAL_S)
    tracker = _failed_tracker(last, settings, fault, clock.now_ms())
    while not over():
        await board.publish(tracker.report(settings.process, clock.now_ms(), facts))
        await asyncio.sleep(STATUS_PUBLISH_INTERVAL_S)


async def _last_report(board: StatusBoard, process: str) -> StatusReport | None:
    return next((report for report in await board.reports() if report.process == process), None)


def _is_from_live_driver(report: StatusReport, now_ms: int) -> bool:
    """Return whether the report comes from another live driver on this machine, which has the pipeline's directory and
    reports itself. A silent one is gone, and its pid may have been reused."""
    pid, host = this_process()
    if report.host != host or report.pid == pid or is_silent(report, now_ms):
        return False
    return process_exists(report.pid)


def _failed_tracker(
    last: StatusReport | None, settings: DriverSettings, fault: BaseException, now_ms: int
) -> StatusTracker:
    """Return a tracker that starts from the pipeline's last report, from any process: its tables keep their
    positions."""
    tracker, mine = StatusTracker(settings.budget_ms), f"pipeline:{settings.name}"
    marks = {mark.name: mark for mark in last.marks} if last is not None else {}
    if last is not None:
        tracker.adopt_last_report(last)
    for name, mark in marks.items():
        if name == mine or name.startswith("shard:"):
            tracker.set(name, mark.position, mark.target, now_ms=now_ms, unit=mark.unit, upstream=mark.upstream)
    tracker.fail(mine, error_sentence(fault), now_ms=now_ms, parked=needs_operator(fault))
    for name in marks:
        if name.startswith("shard:"):
            tracker.fail(name, NOT_RUNNING, now_ms=now_ms, parked=needs_operator(fault), held_by=mine)
    return tracker
