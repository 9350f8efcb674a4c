"""Writes what became of each test into a file as the run proceeds, so that an interrupted run loses nothing.

`--record FILE` appends one JSON object a line; `--continue-record` leaves out the tests whose outcome is in it already.
`seconds` includes the fixtures that were set up for the test.

    {"test": ID, "outcome": "passed" | "failed" | "skipped" | "crashed", "seconds": NUMBER, "output": TEXT}
    {"test": "", "outcome": "broken", "output": TEXT}        a file that cannot be collected
    {"test": "", "outcome": "ended", "status": EXIT_STATUS}  the last line of a run that came to its end
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

OUTPUT_CHARACTERS = 200_000
CRASHED_PHASE = "???"
"""Phase in which pytest-xdist reports the test during which a worker ended."""

DONE = pytest.StashKey[frozenset[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("suite")
    group.addoption("--record", type=Path, metavar="FILE", help="append each test's outcome")
    group.addoption("--continue-record", action="store_true", help="only tests without an outcome in the record")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[DONE] = frozenset(getattr(config, "workerinput", {}).get("recorded", ()))
    if config.option.record and not hasattr(config, "workerinput"):
        if config.option.continue_record:
            config.stash[DONE] = frozenset(read(config.option.record).outcomes)
        config.pluginmanager.register(Recorder(config.option.record), "suite-recorder")


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Send the recorded outcomes to a worker that pytest-xdist starts. All workers must collect the same tests, also
    one that replaces another during the run, so they do not read the file themselves."""
    node.workerinput["recorded"] = sorted(node.config.stash[DONE])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    done = [item for item in items if item.nodeid in config.stash[DONE]]
    if done:
        items[:] = [item for item in items if item.nodeid not in config.stash[DONE]]
        config.hook.pytest_deselected(items=done)


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[Any]:
    """Make a report again if it failed, because that would end the whole run.

    Two causes: CPython 3.11 raises SystemError when two threads parse source at the same time, as the formatting of
    tracebacks does; a test's timeout can expire while its failure is formatted.
    """
    try:
        return (yield)
    except (SystemError, pytest.fail.Exception):
        return pytest.TestReport.from_item_and_call(item, call)


class Recorder:
    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._written: set[str] = set()
        self._seconds: dict[str, float] = {}

    def _write(self, **line: Any) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write(test="", outcome="broken", output=report.longreprtext[-OUTPUT_CHARACTERS:])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write one line per test: the first phase that failed, else the outcome of its call."""
        seconds = self._seconds[report.nodeid] = self._seconds.get(report.nodeid, 0.0) + report.duration
        if report.when == CRASHED_PHASE:
            self._write_test(report, "crashed", seconds, report.longreprtext)
        elif report.failed and report.nodeid not in self._written:
            self._write_test(report, "failed", seconds, _output(report))
        elif report.skipped and report.nodeid not in self._written:
            self._write_test(report, "skipped", seconds, report.longreprtext)
        if report.when == "teardown":
            if report.nodeid not in self._written:
                self._write_test(report, "passed", seconds, "")
            self._written.discard(report.nodeid)
            del self._seconds[report.nodeid]

    def _write_test(self, report: pytest.TestReport, outcome: str, seconds: float, output: str) -> None:
        self._write(test=report.nodeid, outcome=outcome, seconds=round(seconds, 2), output=output)
        self._written.add(report.nodeid)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self._write(test="", outcome="ended", status=int(exitstatus))


def _output(report: pytest.TestReport) -> str:
    parts = [report.longreprtext, *(f"--- {title}\n{text}" for title, text in report.sections)]
    return f"phase={report.when}\n" + "\n".join(parts)[-OUTPUT_CHARACTERS:]


@dataclass
class Record:
    """Contents of a record file. `status` is None if the run was interrupted."""

    outcomes: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    """The output of each failed test's first failure."""
    broken: list[str] = field(default_factory=list)
    """Files that could not be collected, and tests during which a process of the run ended."""
    status: int | None = None


def read(path: Path) -> Record:
    return parse(path.read_text().splitlines()) if path.exists() else Record()


def parse(lines: Iterable[str]) -> Record:
    found = Record()
    for text in lines:
        try:
            line = json.loads(text)
        except ValueError:  # the run was killed while it wrote
            continue
        match line["outcome"]:
            case "ended":
                found.status = line["status"]
            case "broken" | "crashed":
                found.broken.append(f"{line['test']}\n{line['output']}".strip())
            case outcome:
                found.outcomes[line["test"]] = outcome
                if outcome == "failed":
                    found.failed.setdefault(line["test"], line["output"])
    return found
