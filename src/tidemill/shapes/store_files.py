"""Opens the files of shape logs: one for each captured database, and one for all shards."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import structlog

from tidemill.base.clock import Clock, Rand
from tidemill.base.errors import UnavailableError
from tidemill.base.status.status import StatusTracker
from tidemill.shapes.log.disk_log import LogRoom
from tidemill.shapes.log.sqlite_file import FileThreads, ShapeFile
from tidemill.shapes.log.store import ShapeStore
from tidemill.shapes.memory_budget import Budget
from tidemill.shapes.settings import ShapeSettings

_log = structlog.get_logger()

READER_THREADS = 2
"""Threads that read log entries that are only on disk. Each store also has its own writer thread."""

SHARDS_FILE = "%shards"
"""File name for shapes over shards. It cannot collide with a capture's file: a `%` in those is followed by two
digits."""


class StoreFiles:
    """The directory of one process."""

    def __init__(
        self, settings: ShapeSettings, clock: Clock, rand: Rand, tracker: StatusTracker, budget: Budget, disk: Budget
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._rand = rand
        self._tracker = tracker
        self._budget = budget
        self._disk = disk
        self._readers = ThreadPoolExecutor(READER_THREADS, thread_name_prefix="shapes-read")

    def open(self, stem: str, name: str) -> ShapeStore | None:
        """Open the file `stem`.db. Return None if it cannot be opened or no directory is set: then shapes live in
        memory only."""
        if self._settings.directory is None:
            return None
        file: ShapeFile | None = None
        try:
            file = ShapeFile(self._settings.directory / f"{stem}.db")
            return ShapeStore(
                file,
                FileThreads(self._readers, ThreadPoolExecutor(1, thread_name_prefix="shapes-write")),
                self._clock,
                self._rand,
                self._tracker,
                disk_status_name(name),
                LogRoom(self._settings.limits, self._budget, self._disk),
            )
        except UnavailableError as error:
            if file is not None:
                file.release()
            _log.error("shapes are in memory only: their file cannot be opened", database=name, error=str(error))
            return None

    def close(self) -> None:
        self._readers.shutdown(wait=False)


def disk_status_name(database: str) -> str:
    return f"shapes:{database}/disk"
