"""Removes files of shape logs that no capture can continue.

A capture that moves to another node leaves its file behind. The node that continues the stream writes the names of its
own files into the capture's row, so the content of the old file is obsolete, whichever node captures next.

- Invariant (unreferenced only): a file is removed only if the capture's row does not have its name, or does not exist.
  While the row has the name, the file stays: this node may be the next one to capture.
- Invariant (not in use): an open file is locked, and is left alone. There is no await between taking the lock and
  renaming the file, so that a process that opens it next finds none and creates a new one.
- Invariant (crash-safe): the file is renamed first; its space is freed on a thread. A renamed file that a crash left
  behind is removed in the next round.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path
from urllib.parse import unquote

import structlog

from tidemill.base.errors import UnavailableError
from tidemill.shapes.log.sqlite_file import ShapeFile

log = structlog.get_logger()

INTERVAL_S = 300.0
STALE_SUFFIX = ".over"

NamesInRow = Callable[[str], Awaitable[Collection[str]]]
"""capture → the file names in its row; empty if the capture has no row"""


async def remove_periodically(directory: Path, names: NamesInRow) -> None:
    """Remove stale files periodically, forever. Raises what `names` raises."""
    while True:
        await remove_stale_files(directory, names)
        await asyncio.sleep(INTERVAL_S)


async def remove_stale_files(directory: Path, names: NamesInRow) -> None:
    """Remove the files of captures that cannot be continued. Files in use, or that may be restored, stay. Raises what
    `names` raises."""
    for path in await asyncio.to_thread(_list_files, directory, ".db"):
        capture = unquote(path.stem)
        if _rename_if_stale(path, await names(capture)):
            log.info("removed stale shape logs: another node continues the capture", database=capture, path=str(path))
    for path in await asyncio.to_thread(_list_files, directory, STALE_SUFFIX):
        await asyncio.to_thread(path.unlink, missing_ok=True)


def _list_files(directory: Path, suffix: str) -> list[Path]:
    return sorted(directory.glob(f"*{suffix}"))


def _rename_if_stale(path: Path, names: Collection[str]) -> bool:
    """Rename the file if its name is not in `names`; return whether it was. A failure is retried in the next round."""
    try:
        file = ShapeFile(path)
    except UnavailableError:
        return False
    try:
        if file.read_owner_name() in names:
            return False
        file.remove(path.with_suffix(STALE_SUFFIX))
        return True
    except UnavailableError as error:
        log.warning("cannot remove stale shape logs", path=str(path), error=str(error))
        return False
    finally:
        file.release()
