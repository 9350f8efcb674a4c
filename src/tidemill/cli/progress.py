"""Progress bars, one per step, on stderr; nothing is shown when stderr is not a terminal."""

from __future__ import annotations

import sys
from typing import Any


class ProgressBars:
    """Progress bars of several steps; a context manager."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._progress = Progress(
            TextColumn("{task.description:28}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            console=Console(stderr=True), disable=not sys.stderr.isatty(),
        )  # fmt: skip
        self._tasks: dict[str, Any] = {}

    def show(self, what: str, done: int, total: int) -> None:
        """Show the progress of one step. A `total` of 0 is unknown."""
        if what not in self._tasks:
            self._tasks[what] = self._progress.add_task(what, total=total or None)
        self._progress.update(self._tasks[what], completed=done, total=total or None)

    def __enter__(self) -> ProgressBars:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
