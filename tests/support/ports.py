"""Free ports for the servers that tests and benchmarks start, chosen so that no two processes choose the same one."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import socket
import threading

FIRST, LAST = 10_000, 32_000
"""Below the ports of outgoing connections (from 32768 on Linux): one of those could take the port before its server
listens, or during a restart of the server."""
BLOCK = 200

_lock = threading.Lock()
_blocks: dict[int, _Block] = {}


class _Block:
    """The ports that this process chooses from.

    No other process that uses this module has the same block, so a port is not chosen twice before its server listens.
    The reservation is a name in Linux's abstract namespace of sockets, which ends with the process. On other systems a
    block is random, and two processes may share it.
    """

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
        """Return the first of `count` consecutive unbound ports, chosen longest ago; None without a free block."""
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
    """Return the first of `count` consecutive ports that no process listens on. Raises OSError."""
    with _lock:
        process = os.getpid()  # a fork is another process, and needs another block
        if process not in _blocks:
            _blocks[process] = _Block()
        first = _blocks[process].choose(count)
    if first is None:
        raise OSError(f"no {count} free ports in a row between {FIRST} and {LAST}")
    return first


def free_address() -> str:
    """Return a free address as host:port."""
    return f"127.0.0.1:{free_port()}"
