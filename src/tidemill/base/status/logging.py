"""Structured logs on stderr: readable lines on a terminal, JSON lines otherwise.

A broken log destination harms no caller: if the reader of stderr is gone, or the disk is full, lines are lost and no
unit ends.
"""

from __future__ import annotations

import contextlib
import logging
import sys

import structlog


class _Stderr:
    """A structlog logger that writes to the current stderr of the process."""

    def msg(self, message: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # ValueError: it is closed
            print(message, file=sys.stderr, flush=True)

    log = debug = info = warn = warning = error = critical = fatal = exception = msg


def configure_logs(level: str = "info") -> None:
    """Configure the logs of this process, from its next line on."""
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer() if sys.stderr.isatty() else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=lambda *_: _Stderr(),
    )
