"""Private directories below `node.data`: data, logs and passwords in them are readable only by their user."""

from __future__ import annotations

import os
from pathlib import Path

PRIVATE: int = 0o700


def make_private_directory(directory: Path) -> None:
    """Create missing directories with mode 0700, like mkdir -p; each new entry survives power loss.

    An existing directory keeps its mode, which is its user's choice. Raises OSError.
    """
    missing = []
    while not directory.exists():
        missing.append(directory)
        directory = directory.parent
    for child in reversed(missing):
        child.mkdir(mode=PRIVATE, exist_ok=True)
        fd = os.open(child.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
