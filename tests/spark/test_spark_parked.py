"""Reports of a shared driver for a pipeline that does not run, without Spark."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from support.spark.running import error_of, mark
from support.waiting import DEADLINE_S, eventually
from tidemill.base.clock import Rand
from tidemill.base.errors import InvalidError
from tidemill.base.status.status import StageStatus, StatusReport, this_process
from tidemill.consensus.status.board import StatusBoard
from tidemill.spark.pipeline.parked import _is_from_live_driver, publish_failure
from tidemill.spark.pipeline.shared_driver import SharedDriver
from tidemill.spark.settings import DriverSettings, StoreUrls

FAULT = InvalidError("the file does not import.")


def said(pid: int, at_ms: int) -> StatusReport:
    """Return a report of the driver `pid` of this machine."""
    return StatusReport(
        "pipeline:p",
        at_ms,
        (StageStatus("pipeline:p", 5, 6), StageStatus("shard:t", 5, 6)),
        pid=pid,
        host=this_process()[1],
    )


def test_a_pipeline_is_told_though_the_pid_of_its_last_driver_is_somebody_elses_by_now(
    harbour: Any, tmp_path: Path
) -> None:
    last = said(os.getppid(), harbour.stores.clock.now_ms() - 3_600_000)
    harbour.portal.call(StatusBoard(harbour.stores.consensus, Rand()).publish(last))
    over = threading.Event()
    settings = DriverSettings("p", tmp_path / "p.py", harbour.urls, "local[1]", tmp_path / "scratch")
    thread = threading.Thread(target=lambda: asyncio.run(publish_failure(settings, FAULT, 0, over.is_set)))
    thread.start()
    try:
        eventually(lambda: "does not import" in error_of(harbour, "pipeline:p"))
        found = mark(harbour, "shard:t")
        assert found is not None and (found.position, found.held_by) == (5, "pipeline:p")
    finally:
        over.set()
        thread.join(60)
    assert not thread.is_alive()


def test_a_driver_that_runs_elsewhere_on_this_machine_speaks_for_itself_until_it_is_silent() -> None:
    assert _is_from_live_driver(said(os.getppid(), 100_000), 100_500)
    assert not _is_from_live_driver(said(os.getppid(), 100_000), 200_000)
    assert not _is_from_live_driver(said(os.getpid(), 100_000), 100_500)


def test_a_driver_whose_consensus_has_a_name_without_an_answer_ends_when_it_is_asked_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, ending, stopping = threading.Event(), threading.Event(), threading.Event()

    def getaddrinfo(*_: Any, **__: Any) -> None:
        asked.set()
        ending.wait()
        raise socket.gaierror("the test has ended")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    urls = StoreUrls(f"file://{tmp_path}/objects", "postgresql://tidemill@nowhere.invalid/tidemill")
    missing, session = (DriverSettings(n, tmp_path / "p.py", urls, "local", tmp_path / n) for n in ("p", "all"))
    driver = threading.Thread(target=SharedDriver([missing], session, stopping).run)
    driver.start()
    try:
        assert asked.wait(DEADLINE_S)
        stopping.set()
        driver.join(DEADLINE_S)
        assert [t.name for t in threading.enumerate() if t is driver or t.name == "pipeline-p"] == []
    finally:
        stopping.set()
        ending.set()
