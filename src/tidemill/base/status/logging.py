"""Structured logs on stderr: JSON lines when not a terminal, readable lines when one.

Whoever logs is not harmed by where logs go: a reader of stderr that went away, or a full disk behind it, loses
lines and ends no unit.
"""

from __future__ import annotations

import contextlib
import logging
import sys

import structlog


class _Stderr:
    """A structlog logger on the process's stderr as it is at that moment."""

    def msg(self, message: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # ValueError: it is closed
            print(message, file=sys.stderr, flush=True)

    log = debug = info = warn = warning = error = critical = fatal = exception = msg


def configure_logs(level: str = "info") -> None:
    """For this process, from its next line on."""
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
