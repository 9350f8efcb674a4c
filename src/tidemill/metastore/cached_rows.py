"""What a process holds of some rows for itself, read again for as long as it lives."""

from __future__ import annotations

import asyncio
from typing import Protocol

import structlog

from tidemill.base.errors import TidemillError, ends_process

log = structlog.get_logger()


class Refreshed(Protocol):
    async def refresh(self, *, fresh: bool = True) -> None:
        """Read the rows again. `fresh`: as of now. Raises Unavailable."""
        ...


async def refresh_for_ever(held: Refreshed, every_s: float, not_read: str) -> None:
    """A metastore that is away is logged, as the event `not_read`, and asked again."""
    while True:
        await asyncio.sleep(every_s)
        try:
            await held.refresh(fresh=False)
        except TidemillError as error:
            if ends_process(error):
                raise
            log.warning(not_read, error=str(error))
