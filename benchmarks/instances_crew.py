"""The drivers that the CLI runs, by what they report: who works, who is frozen, who was killed, what each did."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import msgspec

from hostile import Attacked
from tidemill.base.errors import ClosedError, MissingError, UnavailableError
from tidemill.base.limits import STATUS_BLIND_AFTER_MS
from tidemill.base.status.drivers import pipeline_of
from tidemill.base.status.status import PROCESS, StatusReport
from tidemill.consensus.status.board import StatusBoard
from tidemill.node.supervise.driver_instances import is_driver

FROZEN_S = (15.0, 35.0)
"""Longer than any lease, and than the age at which a report is blind."""
LONG_S = (70.0, 90.0)
"""Longer than the history that a shard keeps: one in LONG_IN freezes."""
LONG_IN = 5
FRESH_MS = 4_000
NAMED_AFTER_S = STATUS_BLIND_AFTER_MS / 1000 + 3
STOP_TIMEOUT_S = 60.0


class Frozen(msgspec.Struct):
    pid: int
    since_s: float
    until_s: float


class Crew:
    """`watch` once a second; `throw` kills or freezes one of pipeline `shop`, and freezes never the last that works."""

    def __init__(self, runner: Attacked, rand: random.Random) -> None:
        self.runner = runner
        self.rand = rand
        self.reports: dict[str, StatusReport] = {}
        self.frozen: dict[str, Frozen] = {}
        self.done: Counter[str] = Counter()
        self.named = 0
        self.unnamed: list[str] = []
        self.lives: dict[str, dict[int, tuple[int, int]]] = {}
        """process → pid → (appends that it won, that it lost)"""
        self._runs: list[asyncio.subprocess.Process] = []

    async def start(self, pipeline: str, *arguments: str) -> None:
        """`tidemill pipeline run`, as a person would."""
        environment = self.runner.environment
        command = [sys.executable, "-m", "tidemill", "pipeline", "run", pipeline, *arguments]
        log = environment.directory / "logs" / f"run-{pipeline}{''.join(arguments)}.log"
        log.parent.mkdir(exist_ok=True)
        with log.open("ab") as output:
            self._runs.append(
                await asyncio.create_subprocess_exec(
                    *command, "--config", str(environment.config_path),
                    stdout=output, stderr=output, start_new_session=True,
                )
            )  # fmt: skip

    async def stop(self) -> None:
        for run in self._runs:
            if run.returncode is None:
                run.terminate()
        for run in self._runs:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await run.wait()
        self._runs.clear()

    async def watch(self) -> None:
        board = StatusBoard(self.runner._consensus, self.runner._rand)
        while True:
            try:
                self.reports = {r.process: r for r in await board.reports() if pipeline_of(r.process)}
            except UnavailableError:
                self.done["look failed"] += 1
            except ClosedError:
                return
            for process, report in self.reports.items():
                if not is_driver(report.pid):
                    continue
                tables = [t for t in dict(report.facts.get("tables") or {}).values() if isinstance(t, dict)]
                each = sum(int(t["won"]) for t in tables), sum(int(t["lost"]) for t in tables)
                self.lives.setdefault(process, {})[report.pid] = each
            await asyncio.sleep(1)

    def runs(self, process: str) -> bool:
        """Does it live, with Spark, and are its tables open?"""
        report = self.reports.get(process)
        return bool(report and report.facts.get("spark") and report.facts.get("tables") and is_driver(report.pid))

    @property
    def working(self) -> list[str]:
        return sorted(
            process
            for process, report in self.reports.items()
            if pipeline_of(process) == "shop" and process not in self.frozen and is_driver(report.pid)
        )

    def works_on(self, table: str) -> bool:
        """Return whether a driver that was neither killed nor frozen recently has this table open."""
        now_ms = self.runner._clock.now_ms()
        return any(
            now_ms - self.reports[process].at_ms < FRESH_MS
            and table in dict(self.reports[process].facts.get("tables") or {})
            for process in self.working
        )

    def freeze(self, process: str, seconds: float) -> None:
        pid = self.reports[process].pid
        os.kill(pid, signal.SIGSTOP)
        self.frozen[process] = Frozen(pid, time.monotonic(), time.monotonic() + seconds)
        self.done["frozen"] += 1

    def thaw(self, *, all_of_them: bool = False) -> None:
        for process, frozen in list(self.frozen.items()):
            if not all_of_them and time.monotonic() < frozen.until_s:
                continue
            found = self.runner.marks.get(PROCESS + process)
            reported = found is not None and str(found.state) == "blind" and f"pid {frozen.pid} " in found.mark.held_by
            if time.monotonic() - frozen.since_s > NAMED_AFTER_S:
                self.named += reported
                if not reported:
                    self.unnamed.append(f"{process} pid {frozen.pid}: {found.state if found else 'no mark'}")
            del self.frozen[process]
            if is_driver(frozen.pid):
                os.kill(frozen.pid, signal.SIGCONT)

    def throw(self) -> None:
        self.thaw()
        free = self.working
        if len(free) > 1 and self.rand.random() < 0.5:
            long = self.rand.randrange(LONG_IN) == 0
            self.freeze(self.rand.choice(free), self.rand.uniform(*(LONG_S if long else FROZEN_S)))
        elif len(free) > 1 or (free and self.rand.random() < 0.3):
            os.kill(self.reports[self.rand.choice(free)].pid, signal.SIGKILL)
            self.done["killed"] += 1


class Uppers:
    """The longest stall of each table's upper, in total and while a driver worked on it.

    An upper that moves back is a separate failure.
    """

    def __init__(self, crew: Crew, tables: tuple[str, ...]) -> None:
        self.crew = crew
        self.tables = tables
        self.longest_s: dict[str, float] = {}
        self.worked_s: dict[str, float] = {}
        self.back: list[str] = []

    async def run(self) -> None:
        stood: dict[str, tuple[int, float, float]] = {}
        looked_s = time.monotonic()
        while True:
            now_s = time.monotonic()
            for name in self.tables:
                try:
                    _, upper = await (await self.crew.runner._open_shard(name)).frontiers()
                except (MissingError, UnavailableError):
                    continue
                before, all_s, worked_s = stood.get(name, (upper, 0.0, 0.0))
                if upper < before:
                    self.back.append(f"{name}: {before} → {upper}")
                still, passed_s = upper == before, now_s - looked_s
                all_s = all_s + passed_s if still else 0.0
                worked_s = worked_s + passed_s * self.crew.works_on(name) if still else 0.0
                stood[name] = upper, all_s, worked_s
                self.longest_s[name] = max(self.longest_s.get(name, 0.0), all_s)
                self.worked_s[name] = max(self.worked_s.get(name, 0.0), worked_s)
            looked_s = now_s
            await asyncio.sleep(0.5)


def scratch_of(directory: Path, instance: str) -> Path:
    return directory / "scratch" / f"shop-{instance}"
