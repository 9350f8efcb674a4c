"""Measured list of tests that are too slow for the inner loop: `slow.txt` names them, `--quick` omits them.

    ./dev test --quick --measure

runs them too and writes the file again: tests that used more than `CPU_S` of their process, or took longer than
`WALL_S`. Measure on an idle machine. A test that is not in the file counts as quick until the next measurement.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

FILE = "tests/suite/slow.txt"
CPU_S, WALL_S = 0.08, 0.7
COST = "suite cost"


def named(root: Path) -> frozenset[str]:
    lines = (root / FILE).read_text().splitlines() if (root / FILE).exists() else []
    return frozenset(line for line in lines if line and not line.startswith("#"))


class Meter:
    """Plugin for both sides of a run: processes that run tests measure, and the controlling process writes the file."""

    def __init__(self, root: Path) -> None:
        self._file = root / FILE
        self._slow: set[str] = set()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._began = time.process_time(), time.monotonic()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Iterator[None]:
        report = yield
        if report.when == "teardown":
            cpu_s, wall_s = self._began
            report.user_properties.append((COST, [time.process_time() - cpu_s, time.monotonic() - wall_s]))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, cost in report.user_properties:
            if report.when == "teardown" and name == COST and (cost[0] > CPU_S or cost[1] > WALL_S):
                self._slow.add(report.nodeid)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if not hasattr(session.config, "workerinput"):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            head = "# Written by ./dev test --quick --measure: see slow.py\n"
            self._file.write_text(head + "".join(f"{name}\n" for name in sorted(self._slow)))
