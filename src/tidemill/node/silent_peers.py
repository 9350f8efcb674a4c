"""Silent peers: a line for each, below "ready" of `/readyz`.

A late lease makes a node suspect. The age of its report decides whether it is silent. While every node renews its
lease, no report is read. A report that was read more than FRESH_S ago proves nothing: consensus itself may not answer.
"""

from __future__ import annotations

import asyncio

import structlog

from tidemill.base.clock import Clock
from tidemill.base.errors import ClosedError
from tidemill.base.runtime.tasks import error_sentence, is_fault
from tidemill.base.status.status import NODE, StatusReport, derive_process
from tidemill.consensus.status.board import DROP_SILENT_AFTER_MS, StatusBoard
from tidemill.topics.membership import Membership

POLL_INTERVAL_S = 0.5
FRESH_S = 2.0

log = structlog.get_logger()


class SilentPeers:
    """Poller of the reports of suspect nodes."""

    def __init__(self, membership: Membership, board: StatusBoard, clock: Clock) -> None:
        self._membership = membership
        self._board = board
        self._clock = clock
        self._signs: dict[str, tuple[StatusReport, float]] = {}
        """Last report of each suspect, and the time of that read."""
        self._gone: set[str] = set()
        """Nodes with a late lease and no report. Each is skipped until it renews its lease."""

    async def run(self) -> None:
        """Poll until cancelled. Raises ClosedError, like `StatusPublisher.run`."""
        while True:
            await asyncio.sleep(POLL_INTERVAL_S)
            try:
                async with asyncio.timeout(FRESH_S):
                    await self._read_suspect_reports()
            except BaseException as error:
                if not is_fault(error) or isinstance(error, ClosedError):
                    raise
                log.debug("reports of other nodes could not be read", cause=error_sentence(error))

    async def _read_suspect_reports(self) -> None:
        late = self._membership.late_nodes()
        self._gone &= {*late}
        self._signs = {name: sign for name, sign in self._signs.items() if name in late}
        for name in late:
            if name in self._gone:
                continue
            report = await self._board.last_report_head(NODE + name)
            now_ms, now_s = self._clock.now_ms(), self._clock.monotonic_s()
            if report is None or report.left or now_ms - report.at_ms > DROP_SILENT_AFTER_MS:
                self._gone.add(name)
                self._signs.pop(name, None)
            else:
                self._signs[name] = (report, now_s)

    def silent_peer_lines(self) -> list[str]:
        """Return one sentence for each silent node. Never waits."""
        now_ms, now_s = self._clock.now_ms(), self._clock.monotonic_s()
        fresh = [report for report, read_s in self._signs.values() if now_s - read_s <= FRESH_S]
        found = [derive_process(report, now_ms).mark for report in fresh]
        return [f"{mark.name}: {mark.reason}, {mark.held_by}" for mark in found if mark.position < mark.target]
