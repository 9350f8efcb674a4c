"""Sockets of a database's sequencer: addresses that every process derives from the database's path, and access control.

The first choice is a socket next to the database (which also works for containers that share only that directory). A
path too long for sun_path (108 bytes with its NUL) goes through /proc/self/fd. A file system without sockets falls back
to a private directory under /tmp. Clients try the addresses in the same order.

Access control: the socket is created with mode 0600, and both ends ask the kernel for the peer's user (SO_PEERCRED).
The sequencer serves its own user and root; a client trusts its own user, root, and the owner of the database. The
fallback must be a real directory of this user that no other user may enter: a link there could lead to an impostor.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

from tidemill.base.errors import InvalidError

SUN_PATH_BYTES = 100
FALLBACK = f"/tmp/tidemill-{os.getuid()}"


def lock_path(database: Path) -> Path:
    return database.with_name(database.name + ".lock")


@contextlib.contextmanager
def socket_paths(database: Path, *, create: bool) -> Iterator[list[str]]:
    """Yield candidate socket paths, best first, usable within the context. `create` makes the fallback directory."""
    digest = hashlib.sha256(os.fsencode(os.path.realpath(database))).hexdigest()[:16]
    name = database.name + ".sock"
    if len(os.fsencode(name)) > 64:
        name = f"{digest}.sock"
    candidates: list[str] = []
    directory_fd = -1
    try:
        direct = os.path.join(database.parent, name)
        if len(os.fsencode(direct)) <= SUN_PATH_BYTES:
            candidates.append(direct)
        elif os.path.isdir("/proc/self/fd"):
            # The first sequencer creates the directory; until then it may be missing.
            with contextlib.suppress(OSError):
                directory_fd = os.open(database.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                candidates.append(f"/proc/self/fd/{directory_fd}/{name}")
        private = FALLBACK
        if create:
            with contextlib.suppress(OSError):
                os.mkdir(private, 0o700)
        with contextlib.suppress(OSError):
            found = os.lstat(private)
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077:
                candidates.append(f"{private}/{digest}.sock")
        yield candidates
    finally:
        if directory_fd >= 0:
            os.close(directory_fd)


def bind_listener(database: Path) -> tuple[socket.socket, str]:
    """Bind the best address that works; return the socket, and the path to unlink at the end.

    The caller holds the lock, so a file at any of the addresses is stale. Raises InvalidError.
    """
    reasons = []
    with socket_paths(database, create=True) as candidates:
        for path in candidates:
            with contextlib.suppress(FileNotFoundError, OSError):
                os.unlink(path)
        for path in candidates:
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            try:
                os.fchmod(listener.fileno(), 0o600)  # so that the path has this mode from its creation on (Linux)
                listener.bind(path)
                os.chmod(path, 0o600)
                listener.listen(128)
                return listener, os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
            except OSError as error:
                listener.close()
                reasons.append(f"{path}: {error}")
    raise InvalidError(
        f"no Unix socket can be created for the database: database={database} reasons={reasons}.",
        fix="Put the database in a directory on a local file system, with a shorter path.",
    )


def peer_uid(sock: socket.socket) -> int | None:
    """Return the user at the other end, as the kernel reports it; None if it cannot. Raises OSError."""
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        return None
    _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, option, struct.calcsize("3i")))
    return int(uid)


def is_served_user(uid: int | None) -> bool:
    """Return whether the sequencer of this process serves that user."""
    return uid is None or uid in (os.getuid(), 0)


def is_trusted_user(uid: int | None, database: Path) -> bool:
    """Return whether a client of this process trusts a sequencer of that user."""
    if uid is None or uid in (os.getuid(), 0):
        return True
    try:
        return os.lstat(database).st_uid == uid
    except OSError:
        return False
