"""A pipeline that runs inside the test, without a JVM: everything but Spark's own part."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.waiting import DEADLINE_S
from tidemill.base.clock import Rand
from tidemill.base.status.status import StageStatus
from tidemill.consensus.status.board import StatusBoard
from tidemill.spark.pipeline.runner import PipelineRunner
from tidemill.spark.settings import DriverSettings


def started(
    harbour: Any, tmp_path: Path, text: str, *, session: bool = False, **more: Any
) -> tuple[PipelineRunner, threading.Event, threading.Thread]:
    """`session`: the driver opens its Spark session as it would. `more`: settings of the driver."""
    file = tmp_path / "pipeline.py"
    file.write_text(text)
    stopping = threading.Event()
    settings = DriverSettings("p", file, harbour.urls, "local[1]", tmp_path / "scratch", **more)
    runner = PipelineRunner(settings, stopping)
    if not session:
        runner._open_session = lambda: None  # type: ignore[method-assign]  # as if it were still starting
    thread = threading.Thread(target=runner.run)
    thread.start()
    return runner, stopping, thread


@contextmanager
def pipeline(harbour: Any, directory: Path, text: str) -> Iterator[PipelineRunner]:
    directory.mkdir(exist_ok=True)
    runner, stopping, thread = started(harbour, directory, text)
    try:
        yield runner
    finally:
        stopping.set()
        thread.join(DEADLINE_S)
    assert not thread.is_alive()


def mark(harbour: Any, name: str) -> StageStatus | None:
    reports = harbour.portal.call(StatusBoard(harbour.stores.consensus, Rand()).reports())
    return next((m for r in reports for m in r.marks if m.name == name), None)


def error_of(harbour: Any, name: str) -> str:
    found = mark(harbour, name)
    return found.error if found is not None else ""
