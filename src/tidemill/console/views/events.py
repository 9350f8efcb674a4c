"""Restarts of processes, as their supervisors report them. A driver that is back within seconds is no problem any more,
but people want to know that it ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tidemill.base.status.status import PROCESS, RESTARTS, StatusReport
from tidemill.console.views.sentences import describe_name

RESTARTS_MAX = 6


def restart_rows(reports: Sequence[StatusReport], now_ms: int) -> list[dict[str, Any]]:
    """Return the processes that ended unexpectedly in the last minutes, newest first. `is_back`: it reports again."""
    reported_ms = {report.process: report.at_ms for report in reports}
    rows = []
    for report in reports:
        facts = report.facts.get(RESTARTS)
        for process, fact in facts.items() if isinstance(facts, dict) else ():
            rows.append(
                {
                    "process": process,
                    "name": describe_name(PROCESS + process),
                    "reason": fact["reason"],
                    "count": fact["count"],
                    "ended_ms": max(0, now_ms - fact["at_ms"]),
                    "is_back": reported_ms.get(process, 0) > fact["at_ms"],
                }
            )
    return sorted(rows, key=lambda row: row["ended_ms"])[:RESTARTS_MAX]
