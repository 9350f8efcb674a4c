"""Ports for servers of development and tests."""

from __future__ import annotations

import contextlib
import random
import socket

FIRST, LAST = 10_000, 32_000
"""Below those that systems give to outgoing connections (from 32768 on Linux): such a one could be taken before the
server that it was chosen for listens on it, or while it is stopped for a moment."""


def free_port(count: int = 1) -> int:
    """A port of this machine that nobody listens on: the first of `count` such in a row. Raises OSError."""
    for _ in range(100):
        first = random.randrange(FIRST, LAST - count)
        with contextlib.ExitStack() as held, contextlib.suppress(OSError):
            for port in range(first, first + count):
                held.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first
    raise OSError(f"no {count} free ports in a row between {FIRST} and {LAST}")


def free_address() -> str:
    """host:port"""
    return f"127.0.0.1:{free_port()}"
