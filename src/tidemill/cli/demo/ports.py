"""Ports for servers of development and tests."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import socket
import threading

FIRST, LAST = 10_000, 32_000
"""Below those that systems give to outgoing connections (from 32768 on Linux): such a one could be taken before the
server that it was chosen for listens on it, or while it is stopped for a moment."""
BLOCK = 200

_lock = threading.Lock()
_blocks: dict[int, _Block] = {}


class _Block:
    """The ports that this process chooses from. No other process that chooses by this module has the same block, so
    a port is not chosen twice before its server listens on it. The reservation is a name in Linux's abstract
    namespace of sockets, which ends with the process; elsewhere a block is random and may be shared."""

    def __init__(self) -> None:
        self._held = socket.socket(socket.AF_UNIX)
        starts = list(range(FIRST, LAST - BLOCK + 1, BLOCK))
        random.shuffle(starts)
        for self._first in starts:
            with contextlib.suppress(OSError, ValueError):
                self._held.bind(f"\0tidemill-ports-{self._first}")
                break
        self._next = itertools.cycle(range(BLOCK))

    def choose(self, count: int) -> int | None:
        """The first of `count` ports in a row, none of which is bound now: those that were chosen longest ago."""
        for at in itertools.islice(self._next, BLOCK):
            first = self._first + at
            if at + count > BLOCK or not _are_free(first, count):
                continue
            for _ in range(count - 1):
                next(self._next)
            return first
        return None


def _are_free(first: int, count: int) -> bool:
    with contextlib.ExitStack() as held:
        try:
            for port in range(first, first + count):
                held.enter_context(socket.socket()).bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def free_port(count: int = 1) -> int:
    """A port of this machine that nobody listens on: the first of `count` such in a row. Raises OSError."""
    with _lock:
        process = os.getpid()  # a fork is another process, and needs a block of its own
        if process not in _blocks:
            _blocks[process] = _Block()
        first = _blocks[process].choose(count)
    if first is None:
        raise OSError(f"no {count} free ports in a row between {FIRST} and {LAST}")
    return first


def free_address() -> str:
    """host:port"""
    return f"127.0.0.1:{free_port()}"
