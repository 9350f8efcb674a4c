"""`tidemill pipeline restart`: end each driver on this machine and wait for its replacement."""

from __future__ import annotations

import ast
import asyncio
import os
import signal
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated

import typer

from tidemill.base.clock import Clock
from tidemill.base.errors import InvalidError, MissingError, UnavailableError
from tidemill.base.status.drivers import driver_reports, processes_sharing_driver
from tidemill.base.status.status import StatusReport, this_process
from tidemill.cli.context import DRY_RUN, ConfigOption, DryRunOption, OpenStores, open_stores
from tidemill.cli.output.output import TABLE, Output
from tidemill.consensus.status.board import StatusBoard
from tidemill.node.supervise.driver_instances import is_driver, is_local_live_driver

RESTART_TIMEOUT_S = 90.0
POLL_INTERVAL_S = 0.2
PROGRESS_INTERVAL_S = 5.0
"""Interval at which an unchanged wait is printed again."""

Name = Annotated[str, typer.Argument(help="Pipeline name.")]


def restart(
    name: Name,
    instance: Annotated[str, typer.Option("--instance", help="Restart only this driver, named as in `describe`.")] = "",
    dry_run: DryRunOption = False,
    config: ConfigOption = None,
    out: Output = TABLE,
) -> None:
    """Restart the drivers of a pipeline on this machine, one after the other.

    The command ends each driver, and its supervisor starts it again. The next driver is ended only after the previous
    one reports again, so that some of several identical drivers always work. Pipelines that share a driver restart
    together; the others are listed. Stderr shows what the command waits for, for at most 90 seconds per driver.
    """
    done: list[dict[str, object]] = []
    with open_stores(config) as opened:
        reports = opened.portal.call(StatusBoard(opened.consensus, opened.rand).reports())
        found = driver_reports(reports, name)
        if instance:
            found = [r for r in found if instance in (r.process, r.process.removeprefix(f"pipeline:{name}:"))]
        else:  # drivers of other machines, and dead drivers whose report remains, cannot be ended from here
            found = [r for r in found if is_local_live_driver(r)] or found[:1]
        if not found:
            raise MissingError(
                f"no such driver is reporting: pipeline={name}{f' instance={instance}' if instance else ''}.",
                fix="Start it: tidemill up."
                if name in opened.config.pipeline and not instance
                else "See `tidemill pipeline list`.",
            )
        section = opened.config.pipeline.get(name)
        _require_parsing_file(section.file if section is not None else "")
        for report in found:
            others = processes_sharing_driver(report, reports, opened.clock.now_ms())
            if dry_run:
                _require_local_driver(report)
                done.append({"process": report.process, "before": report.pid, "with": sorted(others)})
                continue
            if others and out.is_text:
                notice = f"its driver, pid {report.pid}, also runs {', '.join(others)}: all of them restart"
                print(f"{report.process}: {notice}", flush=True)
            done.append(restart_driver(opened, report, others))
            if out.is_text:
                print(f"{report.process}: pid {done[-1]['before']} → {done[-1]['pid']}", flush=True)
    if dry_run and out.is_text:
        print("dry run: restart these drivers")
    elif dry_run:
        done = [{**DRY_RUN, **row} for row in done]
    if dry_run or not out.is_text:
        out.rows(done)


def restart_driver(opened: OpenStores, report: StatusReport, others: Collection[str] = ()) -> dict[str, object]:
    """End a driver and wait until it and `others`, which share its process, report again. Return {process, before, pid,
    with}.

    Raises InvalidError if the driver runs on another machine or is gone, or its successor cannot run, and
    UnavailableError if no supervisor restarts it. SIGTERM ends it at a batch boundary. A stopped driver (SIGSTOP) would
    not receive SIGTERM and gets SIGKILL, which loses no data. Prints to stderr what it waits for.
    """
    _require_local_driver(report)
    progress = Progress(report.process, opened.clock)
    progress.print_progress(f"waiting until pid {report.pid} has finished its batch and ends")
    os.kill(report.pid, signal.SIGKILL if _is_stopped(report.pid) else signal.SIGTERM)
    board, portal = StatusBoard(opened.consensus, opened.rand), opened.portal
    until_s = opened.clock.monotonic_s() + RESTART_TIMEOUT_S
    while opened.clock.monotonic_s() < until_s:
        reports = portal.call(board.reports())
        back = {r.process: r.pid for r in reports if r.pid != report.pid}
        if back.keys() >= {report.process, *others}:
            pid = back[report.process]
            return {"process": report.process, "before": report.pid, "pid": pid, "with": sorted(others)}
        if not is_driver(report.pid):
            _raise_if_paused(report, reports)
        waiting = sorted({report.process, *others} - back.keys())
        progress.print_progress(describe_wait(report.pid, waiting, starts=report.process not in waiting))
        portal.call(asyncio.sleep(POLL_INTERVAL_S))
    if is_driver(report.pid):
        raise UnavailableError(
            f"the driver has not ended: process={report.process} pid={report.pid} waited_s={RESTART_TIMEOUT_S:.0f}.",
            fix=f"It ends after its current batch; see `tidemill logs`. To end it now: kill -9 {report.pid}",
        )
    raise UnavailableError(
        f"the driver ended and was not restarted: process={report.process}.",
        fix="Run it supervised: tidemill up, or tidemill pipeline run.",
    )


def _raise_if_paused(ended: StatusReport, reports: Collection[StatusReport]) -> None:
    """Raise InvalidError if the supervisor of a driver that ended has paused it: no new driver can run."""
    for mark in (mark for report in reports if report.process != ended.process for mark in report.marks):
        if mark.name == ended.process and mark.parked:
            raise InvalidError(
                f"the driver ended, and a new one cannot run: process={ended.process} error={mark.error!r}.",
                fix="Correct it; the driver starts when its file changes.",
            )


def _require_parsing_file(file: str) -> None:
    """Raise InvalidError for a pipeline file that does not parse: the drivers that run are better than none."""
    path = Path(file)
    if not file or not path.exists():
        return
    try:
        ast.parse(path.read_bytes(), file)
    except (SyntaxError, ValueError) as error:
        line = f" line={error.lineno}" if isinstance(error, SyntaxError) else ""
        raise InvalidError(
            f"nothing was restarted, because the pipeline file does not parse: file={file}{line}.",
            fix="Correct it: tidemill pipeline check FILE.",
        ) from error


def describe_wait(pid: int, waiting: Sequence[str], *, starts: bool) -> str:
    """Return what a restart waits for: the end of the old driver, or the first reports of the new one."""
    if is_driver(pid):
        return f"waiting until pid {pid} has finished its batch and ends"
    if not starts:
        return f"pid {pid} has ended; waiting until its supervisor has started a new driver"
    return f"a new driver has started; waiting for the first report of {', '.join(waiting)}"


class Progress:
    """Lines on stderr about a wait: each new text immediately, an unchanged one every PROGRESS_INTERVAL_S."""

    def __init__(self, subject: str, clock: Clock) -> None:
        self._subject = subject
        self._clock = clock
        self._text = ""
        self._began_s = self._shown_s = clock.monotonic_s()

    def print_progress(self, text: str) -> None:
        now_s = self._clock.monotonic_s()
        if text == self._text and now_s - self._shown_s < PROGRESS_INTERVAL_S:
            return
        self._text, self._shown_s = text, now_s
        print(f"{self._subject}: {text} ({now_s - self._began_s:.0f} s)", file=sys.stderr, flush=True)


def _require_local_driver(report: StatusReport) -> None:
    """Raise InvalidError if the driver runs on another machine or is gone."""
    _, host = this_process()
    if report.host != host:
        raise InvalidError(
            f"the driver runs on another machine: process={report.process} host={report.host}.",
            fix=f"Run `tidemill pipeline restart` on {report.host}.",
        )
    if not is_driver(report.pid):
        raise InvalidError(
            f"the driver is gone: process={report.process} pid={report.pid}.",
            fix="A running `tidemill up` or `pipeline run` starts it again; otherwise run one of them. A run in the"
            " session of another program is restarted there.",
        )


def _is_stopped(pid: int) -> bool:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2]
        return fields.split()[0] in ("T", "t")
    except OSError:
        return False
