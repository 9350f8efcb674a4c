"""File descriptors of this process: the limit is raised as far as possible, and every use has a share of it.

    reserve      kept open by components that must work when no descriptor is left (the sequencer); released briefly
    own          needs of the process that are independent of its clients: stores, logs, children
    the rest     connections of clients, by the shares below

A share is a limit on connections: above it a new client is rejected, and all others continue.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections.abc import Iterator

import msgspec

EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
"""System errors for a lack of descriptors, or of memory for the object of one."""

LIMIT_MAX = 1 << 16
"""Limit above which more descriptors are useless here. Some systems allow a thousand million, and size tables by it."""

OWN_DESCRIPTORS = 256
"""Descriptors for stores, listeners, logs, children, scratch files."""

RESERVE_DESCRIPTORS = 16
"""Descriptors for the sequencer to reopen its database and sockets."""


class DescriptorShares(msgspec.Struct, frozen=True):
    """Concurrent connections per kind of client in this process. `limit` is RLIMIT_NOFILE."""

    limit: int
    kafka: int
    http: int
    sequencer: int


def shares_of_limit(limit: int) -> DescriptorShares:
    """Divide the descriptors that are not needed otherwise: half for Kafka, a quarter for HTTP, an eighth for local
    processes.
    """
    free = max(64, limit - OWN_DESCRIPTORS - RESERVE_DESCRIPTORS)
    return DescriptorShares(limit, free // 2, free // 4, min(1_000, free // 8))


def raise_limit() -> DescriptorShares:
    """Raise the soft limit towards the hard one; return the resulting shares. Never raises."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = LIMIT_MAX if hard == resource.RLIM_INFINITY else min(hard, LIMIT_MAX)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return current_shares()


def current_shares() -> DescriptorShares:
    """Return the shares of the current limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return shares_of_limit(LIMIT_MAX if soft == resource.RLIM_INFINITY else soft)


def open_count() -> int:
    """Return the number of open descriptors; -1 if the system does not report it."""
    try:
        return len(os.listdir("/proc/self/fd")) - 1
    except OSError:
        return -1


def descriptor_facts() -> dict[str, object]:
    """Return {"limit", "open", "kafka", "http", "sequencer"} for a process's report."""
    return {"open": open_count(), **msgspec.to_builtins(current_shares())}


class DescriptorReserve:
    """Descriptors that can be released briefly. Belongs to one thread."""

    def __init__(self, count: int = RESERVE_DESCRIPTORS) -> None:
        self._count = count
        self._held: list[int] = []
        self.fill()

    def fill(self) -> None:
        """Refill the reserve as far as descriptors are available."""
        with contextlib.suppress(OSError):
            while len(self._held) < self._count:
                self._held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))

    @contextlib.contextmanager
    def released(self) -> Iterator[None]:
        """Release the reserve inside the context, for use there unless another thread is faster."""
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
