"""Identical drivers of one pipeline: whether they run here, and which of them ended on purpose.

The drivers of one pipeline and one label belong to one supervisor: no other process starts them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from pathlib import Path

import msgspec

from tidemill.base.status.drivers import is_silent, label_and_number, pipeline_of
from tidemill.base.status.status import StatusReport, this_process

DRIVER_MODULE = "tidemill.spark.pipeline.driver"


def is_driver(pid: int) -> bool:
    """Return whether the pid is a driver on this machine. A pid may have been reused by another program."""
    try:
        return DRIVER_MODULE.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False


def is_local_live_driver(report: StatusReport) -> bool:
    """Return whether the report comes from a live driver on this machine."""
    return report.host == this_process()[1] and is_driver(report.pid)


class OwnDrivers(msgspec.Struct):
    """Drivers of one supervisor: those of `pipelines` with `label`. `started`: names of all processes that it started;
    None while not known."""

    pipelines: Collection[str] = ()
    label: str = ""
    started: Collection[str] | None = None

    def find_stale(self, reports: Iterable[StatusReport], now_ms: int) -> list[str]:
        """Return processes that were this supervisor's drivers, are dead, and are no longer started.

        A frozen driver is not dead. Drivers of other machines cannot be checked from here.
        """
        if self.started is None:
            return []
        host = this_process()[1]
        return [
            r.process
            for r in reports
            if pipeline_of(r.process) in self.pipelines
            and label_and_number(r.process)[0] == self.label
            and r.process not in self.started
            and is_silent(r, now_ms)
            and r.host == host
            and not is_driver(r.pid)
        ]


def forgettable_drivers(reports: Iterable[StatusReport], ended: Collection[str], now_ms: int) -> list[str]:
    """Return which of the drivers that ended on purpose to forget: all of them if a peer continues, otherwise all
    but the first, which stays and turns blind. A pipeline without any driver must never look healthy."""
    ended_of: dict[str, list[str]] = defaultdict(list)
    living = set()
    for report in reports:
        if report.process in ended:
            ended_of[pipeline_of(report.process)].append(report.process)
        elif not is_silent(report, now_ms):
            living.add(pipeline_of(report.process))
    ended_of.pop("", None)
    out: list[str] = []
    for pipeline, processes in ended_of.items():
        out += sorted(processes, key=label_and_number)[0 if pipeline in living else 1 :]
    return out
