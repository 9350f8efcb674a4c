"""Restart of one driver on this machine: end it and wait for its replacement."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Collection
from pathlib import Path

from tidemill.base.errors import InvalidError, UnavailableError
from tidemill.base.status.status import StatusReport, this_process
from tidemill.cli.context import OpenStores
from tidemill.consensus.status.board import StatusBoard
from tidemill.node.supervise.driver_instances import is_driver

RESTART_TIMEOUT_S = 90.0
POLL_INTERVAL_S = 0.2


def restart_driver(opened: OpenStores, report: StatusReport, others: Collection[str] = ()) -> dict[str, object]:
    """End a driver and wait until it and `others`, which share its process, report again. Return {process, before, pid,
    with}.

    Raises InvalidError if the driver runs on another machine or is gone, and UnavailableError if no supervisor restarts
    it. SIGTERM ends it at a batch boundary. A stopped driver (SIGSTOP) would not receive SIGTERM and gets SIGKILL,
    which loses no data.
    """
    _, host = this_process()
    if report.host != host:
        raise InvalidError(
            f"the driver runs on another machine: process={report.process} host={report.host}.",
            fix=f"Run `tidemill pipeline restart` on {report.host}.",
        )
    if not is_driver(report.pid):
        raise InvalidError(
            f"the driver is gone: process={report.process} pid={report.pid}.", fix="Start it: tidemill pipeline run."
        )
    os.kill(report.pid, signal.SIGKILL if _is_stopped(report.pid) else signal.SIGTERM)
    board, portal = StatusBoard(opened.consensus, opened.rand), opened.portal
    until_s = opened.clock.monotonic_s() + RESTART_TIMEOUT_S
    while opened.clock.monotonic_s() < until_s:
        back = {r.process: r.pid for r in portal.call(board.reports()) if r.pid != report.pid}
        if back.keys() >= {report.process, *others}:
            pid = back[report.process]
            return {"process": report.process, "before": report.pid, "pid": pid, "with": sorted(others)}
        portal.call(asyncio.sleep(POLL_INTERVAL_S))
    raise UnavailableError(
        f"the driver ended and was not restarted: process={report.process}.",
        fix="Run it supervised: tidemill up, or tidemill pipeline run.",
    )


def _is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    except OSError:
        return False
