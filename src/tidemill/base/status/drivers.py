"""Drivers of pipelines: the names of their processes, and as seen in published reports, whether one is silent and which
pipelines share it.

    pipeline:shop    pipeline:shop:2      drivers of `up`, and of `pipeline run shop`
    pipeline:shop:b  pipeline:shop:b-2    drivers of `pipeline run shop --label b`
"""

from __future__ import annotations

from collections.abc import Iterable

from tidemill.base.status.status import StatusReport, may_be_alive

KIND = "pipeline"


def pipeline_of(process: str) -> str:
    """Return the pipeline whose driver a process is; "" if it is no driver."""
    kind, _, rest = process.partition(":")
    return rest.partition(":")[0] if kind == KIND else ""


def instance_name(label: str, number: int) -> str:
    """Return the name of driver `number`, from 1; "" for the first one without a label."""
    return "-".join(part for part in (label, str(number) if number > 1 else "") if part)


def process_name(pipeline: str, instance: str) -> str:
    """Return the process name under which a driver reports."""
    return ":".join(part for part in (KIND, pipeline, instance) if part)


def label_and_number(process: str) -> tuple[str, int]:
    """Return (label, number) of a driver's process."""
    label, _, number = process.split(":", 2)[2].rpartition("-") if process.count(":") > 1 else ("", "", "1")
    if number.isdecimal():
        return label, int(number)
    return number, 1


def driver_reports(reports: Iterable[StatusReport], pipeline: str) -> list[StatusReport]:
    """Return the reports of the drivers of one pipeline, silent ones included."""
    return [report for report in reports if pipeline_of(report.process) == pipeline]


def is_silent(report: StatusReport, now_ms: int) -> bool:
    return not may_be_alive(report, now_ms)


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
