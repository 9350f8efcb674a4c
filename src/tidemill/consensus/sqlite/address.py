"""Where the sequencer of a database listens: names every process derives alike from the database's path.

First choice is a socket beside the database (also right for containers that share only that directory). A
path too long for sun_path (108 bytes with its NUL) goes through /proc/self/fd; a file system without sockets
falls back to a private directory under /tmp. Clients try the addresses in the same order.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

SUN_PATH_BYTES = 100


def lock_path(database: Path) -> Path:
    return database.with_name(database.name + ".lock")


@contextlib.contextmanager
def addresses(database: Path, *, create: bool) -> Iterator[list[str]]:
    """Candidate socket paths, best first, usable while the context lasts. `create` makes the fallback directory."""
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
            # The directory is not there until the first sequencer makes it.
            with contextlib.suppress(OSError):
                directory_fd = os.open(database.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                candidates.append(f"/proc/self/fd/{directory_fd}/{name}")
        private = f"/tmp/tidemill-{os.getuid()}"
        if create:
            with contextlib.suppress(OSError):
                os.mkdir(private, 0o700)
        with contextlib.suppress(OSError):
            # Somebody else's directory of this name could host an impostor.
            if os.stat(private).st_uid == os.getuid():
                candidates.append(f"{private}/{digest}.sock")
        yield candidates
    finally:
        if directory_fd >= 0:
            os.close(directory_fd)
