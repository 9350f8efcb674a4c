"""Base of every client of the chaos lane: a thread that is started, asked to stop, and joined until a time.

A process of the lane ends with its parent.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Iterable


class Worker:
    """`failed`: what is wrong with it, for the verdict; that it broke, or does not end, is among it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.failed: list[str] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._guarded, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Asks it to; `join` waits."""
        self._stop.set()

    def join(self, until_s: float) -> None:
        """Wait at most until then, by the monotonic clock."""
        self._thread.join(max(0.0, until_s - time.monotonic()))
        if self.runs:
            self.failed.append("it does not end")

    @property
    def runs(self) -> bool:
        return self._thread.is_alive()

    def progress(self) -> str:
        """Return the progress in a word or two."""
        raise NotImplementedError

    def _guarded(self) -> None:
        try:
            self._run()
        except Exception as error:
            self.failed.append(f"it broke: {error!r}")

    def _run(self) -> None:
        raise NotImplementedError


def end_all(workers: Iterable[Worker], limit_s: float) -> None:
    """End all of them concurrently, within one time limit."""
    ending = list(workers)
    for worker in ending:
        worker.stop()
    until_s = time.monotonic() + limit_s
    for worker in ending:
        worker.join(until_s)


def end_with_parent() -> None:
    """End this process when its parent ends, even by SIGKILL."""
    parent = os.pidfd_open(os.getppid())

    def follow() -> None:
        select.select([parent], [], [])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=follow, name="parent", daemon=True).start()
