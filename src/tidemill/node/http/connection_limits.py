"""Connections of one address beyond its share are closed, within CHECK_S, and those that have had their time.

The server accepts in native code and does not say who connects. So we look at what this process has open: a descriptor
is duplicated first and judged by what the duplicate says of itself, so one that is closed and used anew meanwhile is
never mistaken. `shutdown` ends the connection for the server too; the descriptor stays the server's to close.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator, Set

OPEN = "/proc/self/fd"
CHECK_S = 1.0


def connections(port: int) -> set[int]:
    """The connections to `port` of this process, by the numbers of their sockets. Linux; none elsewhere."""
    found = set()
    for _, connection in _connections(_open(), port):
        with connection:
            found.add(os.fstat(connection.fileno()).st_ino)
    return found


def close_connections(port: int, numbers: Set[int]) -> int:
    """Shut down those of them that are still there; how many."""
    closed = 0
    for _, connection in _connections(_open() if numbers else [], port):
        with connection:
            if os.fstat(connection.fileno()).st_ino in numbers:
                closed += _shut(connection)
    return closed


def close_crowds(port: int, limit: int) -> int:
    """Shut down connections to `port` of this process beyond `limit` of one address; how many. Linux; 0 elsewhere."""
    names = _open()
    if len(names) <= limit:
        return 0
    counts: dict[str, int] = {}
    closed = 0
    for address, connection in _connections(names, port):
        with connection:
            counts[address] = counts.get(address, 0) + 1
            if counts[address] > limit:
                closed += _shut(connection)
    return closed


def close_copies(listening: socket.socket) -> int:
    """Replace copies of the descriptor of `listening` in this process by /dev/null; return their number. The
    descriptors stay allocated until their owners close them. A thread that polls a copy is not woken. Linux; 0
    elsewhere.

    Call it when no other thread closes descriptors of `listening`: one that is closed and reused between the check and
    the replacement would be lost."""
    number, closed = os.fstat(listening.fileno()).st_ino, 0
    with open(os.devnull, "rb") as nothing:
        for descriptor in map(int, _open()):
            try:
                found = os.fstat(descriptor)
            except OSError:  # closed meanwhile
                continue
            if stat.S_ISSOCK(found.st_mode) and found.st_ino == number and descriptor != listening.fileno():
                os.dup2(nothing.fileno(), descriptor, inheritable=False)
                closed += 1
    return closed


def _open() -> list[str]:
    try:
        return os.listdir(OPEN)
    except FileNotFoundError:
        return []


def _connections(names: list[str], port: int) -> Iterator[tuple[str, socket.socket]]:
    """(peer's address, duplicate), oldest descriptors first; whoever takes one closes it."""
    for descriptor in sorted(int(name) for name in names):
        try:
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            duplicate = socket.socket(fileno=os.dup(descriptor))
        except OSError:  # closed meanwhile
            continue
        try:
            ours = duplicate.family in (socket.AF_INET, socket.AF_INET6) and duplicate.getsockname()[1] == port
            peer = str(duplicate.getpeername()[0]) if ours else ""
        except OSError:  # it listens, or its peer went
            peer = ""
        if peer:
            yield peer, duplicate
        else:
            duplicate.close()


def _shut(connection: socket.socket) -> int:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:  # gone by itself
        return 0
    return 1
