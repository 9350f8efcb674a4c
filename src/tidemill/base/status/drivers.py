"""Drivers of pipelines, as seen in published reports: which pipeline one belongs to, whether it is silent, and which
pipelines share it.

    pipeline:shop    pipeline:shop:2    pipeline:shop:b-2    processes of drivers of the pipeline shop
"""

from __future__ import annotations

from collections.abc import Iterable

from tidemill.base.limits import STATUS_BLIND_AFTER_MS
from tidemill.base.status.status import StatusReport

KIND = "pipeline"


def pipeline_of(process: str) -> str:
    """Return the pipeline whose driver a process is; "" if it is no driver."""
    kind, _, rest = process.partition(":")
    return rest.partition(":")[0] if kind == KIND else ""


def driver_reports(reports: Iterable[StatusReport], pipeline: str) -> list[StatusReport]:
    """Return the reports of the drivers of one pipeline, silent ones included."""
    return [report for report in reports if pipeline_of(report.process) == pipeline]


def is_silent(report: StatusReport, now_ms: int) -> bool:
    return now_ms - report.at_ms > STATUS_BLIND_AFTER_MS


def processes_sharing_driver(report: StatusReport, reports: Iterable[StatusReport], now_ms: int) -> list[str]:
    """Return the processes of other pipelines that share this one's driver (one pid). If only one of two is silent,
    it was an earlier process with the same pid."""
    return sorted(
        r.process
        for r in reports
        if (r.pid, r.host) == (report.pid, report.host)
        and r.process != report.process
        and pipeline_of(r.process)
        and is_silent(r, now_ms) == is_silent(report, now_ms)
    )
