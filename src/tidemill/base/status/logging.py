"""Structured logs on stderr: readable lines on a terminal, JSON lines otherwise.

A broken log destination harms no caller: if the reader of stderr is gone, or the disk is full, lines are lost and no
unit ends.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from pathlib import Path

import structlog

LOG_BYTES = 32 << 20
"""Size at which NAME.log becomes NAME.log.1, replacing an older one."""


def _discard_buffered() -> None:
    """Discard text that stderr could not write: Python writes it again at exit, and exits with 120 if that fails."""
    with contextlib.suppress(OSError, ValueError):
        descriptor = sys.stderr.fileno()
        before = os.dup(descriptor)
        try:
            with open(os.devnull, "wb") as nothing:
                os.dup2(nothing.fileno(), descriptor)
            sys.stderr.flush()
        finally:
            os.dup2(before, descriptor)
            os.close(before)


class _Stderr:
    """A structlog logger that writes to the current stderr of the process."""

    def msg(self, message: str) -> None:
        try:
            print(message, file=sys.stderr, flush=True)
        except (OSError, ValueError):  # ValueError: it is closed
            _discard_buffered()

    log = debug = info = warn = warning = error = critical = fatal = exception = msg


class _File(_Stderr):
    """A structlog logger that appends to a file, which is opened for each line: a foreground command logs little."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def msg(self, message: str) -> None:
        with contextlib.suppress(OSError):
            if self._path.exists() and self._path.stat().st_size > LOG_BYTES:
                self._path.replace(self._path.with_suffix(".log.1"))
            with self._path.open("a", encoding="utf-8") as file:
                print(message, file=file)

    log = debug = info = warn = warning = error = critical = fatal = exception = msg


def configure_logs(level: str = "info", file: Path | None = None) -> None:
    """Configure the logs of this process, from its next line on: on stderr, or JSON lines in a file."""
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer() if file is None and sys.stderr.isatty() else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=lambda *_: _Stderr() if file is None else _File(file),
    )
