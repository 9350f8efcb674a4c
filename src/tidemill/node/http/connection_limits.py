"""Limit of connections per address: those beyond it, and connections that have reached their end time, are closed
within CHECK_S.

The server accepts in native code and does not report peers. So the module inspects the open descriptors of this
process. A descriptor is duplicated first and judged by its duplicate, so a number that is closed and reused in between
is never mistaken. `shutdown` ends the connection for the server too; the server still closes its descriptor.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator, Set

DESCRIPTORS_PATH = "/proc/self/fd"
CHECK_S = 1.0


def list_connections(port: int) -> set[int]:
    """Return the connections of this process to `port`, by the inode numbers of their sockets. Linux only; empty
    elsewhere."""
    found = set()
    for _, connection in _iterate_connections(_open_descriptors(), port):
        with connection:
            found.add(os.fstat(connection.fileno()).st_ino)
    return found


def close_connections(port: int, numbers: Set[int]) -> int:
    """Shut down those connections that still exist. Return their number."""
    closed = 0
    for _, connection in _iterate_connections(_open_descriptors() if numbers else [], port):
        with connection:
            if os.fstat(connection.fileno()).st_ino in numbers:
                closed += _shutdown_connection(connection)
    return closed


def close_excess_connections(port: int, limit: int) -> int:
    """Shut down the connections of this process to `port` beyond `limit` per address. Return their number. Linux
    only; 0 elsewhere."""
    names = _open_descriptors()
    if len(names) <= limit:
        return 0
    counts: dict[str, int] = {}
    closed = 0
    for address, connection in _iterate_connections(names, port):
        with connection:
            counts[address] = counts.get(address, 0) + 1
            if counts[address] > limit:
                closed += _shutdown_connection(connection)
    return closed


def close_descriptor_copies(listening: socket.socket) -> int:
    """Replace copies of the descriptor of `listening` in this process by /dev/null; return their number.

    The descriptors stay allocated until their owners close them. A thread that polls a copy is not woken. Linux only; 0
    elsewhere. Call it when no other thread closes descriptors of `listening`: one that is closed and reused between the
    check and the replacement would be lost.
    """
    number, closed = os.fstat(listening.fileno()).st_ino, 0
    with open(os.devnull, "rb") as nothing:
        for descriptor in map(int, _open_descriptors()):
            try:
                found = os.fstat(descriptor)
            except OSError:  # closed in the meantime
                continue
            if stat.S_ISSOCK(found.st_mode) and found.st_ino == number and descriptor != listening.fileno():
                os.dup2(nothing.fileno(), descriptor, inheritable=False)
                closed += 1
    return closed


def _open_descriptors() -> list[str]:
    try:
        return os.listdir(DESCRIPTORS_PATH)
    except FileNotFoundError:
        return []


def _iterate_connections(names: list[str], port: int) -> Iterator[tuple[str, socket.socket]]:
    """Yield (peer's address, duplicate), oldest descriptors first. The caller closes each duplicate."""
    for descriptor in sorted(int(name) for name in names):
        try:
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            duplicate = socket.socket(fileno=os.dup(descriptor))
        except OSError:  # closed in the meantime
            continue
        try:
            ours = duplicate.family in (socket.AF_INET, socket.AF_INET6) and duplicate.getsockname()[1] == port
            peer = str(duplicate.getpeername()[0]) if ours else ""
        except OSError:  # a listening socket, or its peer is gone
            peer = ""
        if peer:
            yield peer, duplicate
        else:
            duplicate.close()


def _shutdown_connection(connection: socket.socket) -> int:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:  # already closed
        return 0
    return 1
