"""Descriptors of this process: the limit is raised as far as the system lets us, and every use has a share of it.

    reserve      kept open on purpose by whoever must work when nothing is left (the sequencer); given up for a moment
    own          what a process needs whatever its clients do: stores, logs, children
    the rest     connections of clients, by the shares below

A share is a limit on connections: beyond it a newcomer is turned away, and everybody else goes on.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections.abc import Iterator

import msgspec

EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
"""What the system says when there is no descriptor, or no memory for what stands behind one."""

WANTED = 1 << 16
"""More than this nobody here can use; some systems have a hard limit of a thousand million, and tables sized by it."""

OWN = 256
"""Stores, listeners, logs, children, scratch files."""

RESERVE = 16
"""For the sequencer to open its database and its sockets again."""


class Shares(msgspec.Struct, frozen=True):
    """Connections each kind of client may have at once, in this process. `limit`: RLIMIT_NOFILE."""

    limit: int
    kafka: int
    http: int
    sequencer: int


def shares(limit: int) -> Shares:
    """A half of what is not needed otherwise for Kafka, a quarter for HTTP, an eighth for local processes."""
    free = max(64, limit - OWN - RESERVE)
    return Shares(limit, free // 2, free // 4, min(1_000, free // 8))


def raise_limit() -> Shares:
    """Raise the soft limit towards the hard one; the shares of what it is then. Raises nothing."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED if hard == resource.RLIM_INFINITY else min(hard, WANTED)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return current()


def current() -> Shares:
    """The shares of the limit as it is."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return shares(WANTED if soft == resource.RLIM_INFINITY else soft)


def open_count() -> int:
    """Descriptors that are open now; -1 where the system does not tell."""
    try:
        return len(os.listdir("/proc/self/fd")) - 1
    except OSError:
        return -1


def facts() -> dict[str, object]:
    """{"limit", "open", "kafka", "http", "sequencer"}: for a process's report."""
    return {"open": open_count(), **msgspec.to_builtins(current())}


class Reserve:
    """Some descriptors that can be given up for a moment. Belongs to one thread."""

    def __init__(self, count: int = RESERVE) -> None:
        self._count = count
        self._held: list[int] = []
        self.fill()

    def fill(self) -> None:
        """Take back what is missing, as far as there is any."""
        with contextlib.suppress(OSError):
            while len(self._held) < self._count:
                self._held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))

    @contextlib.contextmanager
    def released(self) -> Iterator[None]:
        """In this block there are as many to be had as the reserve held, unless another thread is faster."""
        self.close()
        try:
            yield
        finally:
            self.fill()

    def __len__(self) -> int:
        return len(self._held)

    def close(self) -> None:
        held, self._held = self._held, []
        for fd in held:
            os.close(fd)
