"""Files of shape logs that nobody can follow on any more: taken away.

A capture that moved to another node leaves its file behind. Whoever follows on writes its own names into the capture's
row, so what the file holds is over, whoever captures next.

LF1  A file goes when the capture's row does not have its name, or is gone. While the row has it the file stays: this
     node may be the next one to capture.
LF2  A file that is open has its lock taken, and is left alone. There is no await from the lock until the file is out of
     the way: whoever opens it next finds none, and makes a new one.
LF3  It is renamed first; its space is given back on a thread. What a crash left renamed goes the next time.
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

LOOK_S = 300.0
OVER = ".over"

Names = Callable[[str], Awaitable[Collection[str]]]
"""capture → what its row names; none of a capture that has no row"""


async def watch(directory: Path, names: Names) -> None:
    """For ever. Raises what `names` raises."""
    while True:
        await take_away(directory, names)
        await asyncio.sleep(LOOK_S)


async def take_away(directory: Path, names: Names) -> None:
    """Of a database that is served here, or may be restored, nothing goes. Raises what `names` raises."""
    for path in await asyncio.to_thread(_found, directory, ".db"):
        capture = unquote(path.stem)
        if _set_aside(path, await names(capture)):
            log.info("shape logs that another node followed on are taken away", database=capture, path=str(path))
    for path in await asyncio.to_thread(_found, directory, OVER):
        await asyncio.to_thread(path.unlink, missing_ok=True)


def _found(directory: Path, suffix: str) -> list[Path]:
    return sorted(directory.glob(f"*{suffix}"))


def _set_aside(path: Path, names: Collection[str]) -> bool:
    """LF2. What the disk does not do now is done the next time."""
    try:
        file = ShapeFile(path)
    except UnavailableError:
        return False
    try:
        if file.known_as() in names:
            return False
        file.remove(path.with_suffix(OVER))
        return True
    except UnavailableError as error:
        log.warning("shape logs of an earlier owner stay", path=str(path), error=str(error))
        return False
    finally:
        file.release()
