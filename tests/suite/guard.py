"""Fail a quick test that starts a process, even if the test or the product swallows the error."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest

EVENTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.spawn", "os.system"}


class ProcessStarted(RuntimeError):
    """Raised when a test that runs under --quick tries to start a process."""


class Guard:
    """An audit hook sees every way to start a process, asyncio's and those of libraries too. It cannot be removed, so
    it refuses only while a test runs."""

    def __init__(self) -> None:
        self._running = ""
        self._started: list[str] = []
        sys.addaudithook(self._audit)
        self._watch_multiprocessing()

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._running and event in EVENTS:
            self._refuse(event, repr(arguments[1] if event == "subprocess.Popen" else arguments[:1])[:200])

    def _watch_multiprocessing(self) -> None:
        """`multiprocessing` starts its children below the audited calls."""
        from multiprocessing import util

        start = util.spawnv_passfds

        def refused(path: Any, arguments: Any, descriptors: Any) -> int:
            if self._running:
                self._refuse("multiprocessing", repr(arguments)[:200])
            return start(path, arguments, descriptors)

        util.spawnv_passfds = refused

    def _refuse(self, event: str, program: str) -> None:
        message = (
            "A test that runs under --quick starts a process; mark it with pytest.mark.processes."
            f" event={event} program={program}"
        )
        self._started.append(message)
        raise ProcessStarted(message)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._running = item.nodeid
        self._started.clear()
        try:
            return (yield)
        finally:
            self._running = ""

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Iterator[None]:
        report = yield
        if report.failed:
            self._started.clear()  # the error of the start is already reported
        if self._started and report.when == "teardown":
            report.outcome = "failed"
            report.longrepr = self._started[0]
        return report
