"""Report the progress of a run, and end a run that hangs: its threads and processes may hang anywhere, and the
facts known then are the verdict.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

from nodes import descendants

EVERY_S = 10.0


class Watch:
    """`progress` says a line every `every_s`; `overdue` is called once, after `limit_s`, and then the process and all
    that it started is gone, with exit code 1; so it is after SIGTERM."""

    def __init__(
        self, limit_s: float, progress: Callable[[], None], overdue: Callable[[], None], every_s: float = EVERY_S
    ) -> None:
        self._until_s = time.monotonic() + limit_s
        self._every_s = every_s
        self._progress = progress
        self._overdue = overdue
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def __enter__(self) -> Watch:
        self._before = signal.signal(signal.SIGTERM, lambda *_: end_process())
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        signal.signal(signal.SIGTERM, self._before)
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(self._every_s):
            if time.monotonic() < self._until_s:
                self._progress()
                continue
            try:
                self._overdue()
                sys.stdout.flush()
                faulthandler.dump_traceback(all_threads=True)
            finally:
                end_process()


def end_process() -> None:
    """End immediately, with all child processes: a library's thread may keep an interpreter alive."""
    for pid in list(descendants(os.getpid()))[1:]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    os._exit(1)
