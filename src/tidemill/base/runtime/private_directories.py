"""Private directories below `node.data`: data, logs and passwords in them are readable only by their user."""

from __future__ import annotations

import os
from pathlib import Path

from tidemill.base.errors import InvalidError

PRIVATE: int = 0o700


def is_present(path: Path) -> bool:
    """Return whether a file or directory exists. Raises InvalidError if this user cannot enter a directory above it."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise _unreadable(path, error) from error
    return True


def list_files(directory: Path, suffix: str) -> list[Path]:
    """Return the files with a suffix, by name; none if there is no directory. Raises InvalidError if this user cannot
    list it."""
    try:
        names = sorted(os.listdir(directory))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise _unreadable(directory, error) from error
    return [directory / name for name in names if name.endswith(suffix)]


def _unreadable(path: Path, error: OSError) -> InvalidError:
    return InvalidError(
        f"the data of the cluster cannot be read: path={path} reason={error.strerror}.",
        fix="Run the command as the user of the node.",
    )


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
