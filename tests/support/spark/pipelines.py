"""Pipelines that run in threads of the test."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.waiting import DEADLINE_S, eventually
from tidemill.spark.pipeline.runner import PipelineRunner
from tidemill.spark.session.opener import SessionOpener
from tidemill.spark.settings import DriverSettings

ALIVE: list[threading.Thread] = []
"""Pipelines that should be running now."""


def until(check: Callable[[], bool], what: str) -> None:
    def looked() -> bool:
        assert all(thread.is_alive() for thread in ALIVE), f"a pipeline ended, waiting for: {what}"
        return check()

    eventually(looked, what)


@contextmanager
def running(harbour: Any, spark: Any, scratch: Path, file: Path, name: str = "p") -> Iterator[PipelineRunner]:
    stopping = threading.Event()
    settings = DriverSettings(name, file, harbour.urls, "local[2]", scratch, instance=scratch.name)
    runner = PipelineRunner(settings, stopping, SessionOpener(settings, spark=spark))
    failures: list[BaseException] = []

    def body() -> None:
        try:
            runner.run()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    ALIVE.append(thread)
    try:
        yield runner
    finally:
        ALIVE.remove(thread)
        stopping.set()
        thread.join(DEADLINE_S)
    assert not failures, failures
