"""Overview of a cluster, as the node's page polls it: counts, problems, flow, captures, processes, dead letters.

The size of an overview is limited for a cluster of any size: every list has a limit, and counts what it omits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tidemill.base.limits import NODE_BLIND_AFTER_MS, STATUS_BLIND_AFTER_MS
from tidemill.base.status.drivers import driver_reports, pipeline_of
from tidemill.base.status.status import NODE, PROCESS, DerivedStatus, StageState, StatusReport, derive_statuses
from tidemill.console.views.captures import capture_rows
from tidemill.console.views.events import restart_rows
from tidemill.console.views.flow import Catalogued, flow_graph
from tidemill.console.views.problems import problem_rows
from tidemill.console.views.stages import latency_summaries, merge_latencies

if TYPE_CHECKING:
    from tidemill.metastore.rows.captures import CaptureTableRow

CAPTURES_MAX = 50
PROCESSES_MAX = 100
SOURCES_MAX = 20
"""Sources whose latencies are shown."""


def overview(
    reports: Sequence[StatusReport], catalogued: Catalogued, tables: Sequence[CaptureTableRow], now_ms: int
) -> dict[str, Any]:
    """Return the overview of a cluster as of `now_ms`."""
    marks = derive_statuses(reports, now_ms)
    states = Counter(str(derived.state) for derived in marks.values())
    problems, more = problem_rows(marks)
    captures = capture_rows(tables, marks, reports)
    processes = process_rows(reports, marks)
    latencies = latency_summaries(merge_latencies(reports))
    return {
        "at_ms": now_ms,
        "counts": {str(state): states[str(state)] for state in StageState},
        "problems": problems,
        "problems_more": more,
        "restarts": restart_rows(reports, now_ms),
        "flow": flow_graph(marks, catalogued, reports),
        "captures": captures[:CAPTURES_MAX],
        "captures_more": max(0, len(captures) - CAPTURES_MAX),
        "processes": processes[:PROCESSES_MAX],
        "processes_more": max(0, len(processes) - PROCESSES_MAX),
        "dead_letters": dead_letter_tables(catalogued, reports),
        "latency": dict(list(latencies.items())[:SOURCES_MAX]),
        "blind_after_ms": {"node": NODE_BLIND_AFTER_MS, "other": STATUS_BLIND_AFTER_MS},
    }


def process_rows(reports: Sequence[StatusReport], marks: Mapping[str, DerivedStatus]) -> list[dict[str, Any]]:
    """Return one row for each reporting process, silent ones first."""
    rows = []
    for report in reports:
        derived = marks[PROCESS + report.process]
        memory = report.facts.get("memory")
        used, limit = memory.get("resident", (0, 0)) if isinstance(memory, dict) else (0, 0)
        rows.append(
            {
                "process": report.process,
                "kind": "node" if report.process.startswith(NODE) else "driver" if pipeline_of(report.process) else "",
                "state": str(derived.state),
                "reason": derived.mark.reason,
                "pid": report.pid,
                "host": report.host,
                "report_age_ms": derived.report_age_ms,
                "resident_bytes": used,
                "limit_bytes": limit,
                "stages": len(report.marks),
                "late": sum(mark.position < mark.target for mark in report.marks),
            }
        )
    return sorted(rows, key=lambda row: (row["state"] != StageState.BLIND, row["process"]))


def dead_letter_tables(catalogued: Catalogued, reports: Sequence[StatusReport]) -> list[dict[str, Any]]:
    """Return the table of dead letters of each pipeline, with the count that its drivers report; None if none does."""
    rows = []
    for row in catalogued.pipelines:
        if row.dead_letters:
            counts = [report.facts.get("dead_letters") for report in driver_reports(reports, row.name)]
            known = [count for count in counts if isinstance(count, int)]
            rows.append({"pipeline": row.name, "table": row.dead_letters, "count": max(known, default=None)})
    return rows
