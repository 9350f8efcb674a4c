"""Periodic refresh of metastore rows that a process caches."""

from __future__ import annotations

import asyncio
from typing import Protocol

import structlog

from tidemill.base.errors import TidemillError, ends_process

log = structlog.get_logger()


class Refreshable(Protocol):
    async def refresh(self, *, fresh: bool = True) -> None:
        """Read the rows again. `fresh`: as of now. Raises UnavailableError."""
        ...


async def refresh_forever(held: Refreshable, every_s: float, not_read: str) -> None:
    """Refresh every `every_s` seconds, indefinitely. A metastore failure is logged as the event `not_read` and
    retried."""
    while True:
        await asyncio.sleep(every_s)
        try:
            await held.refresh(fresh=False)
        except TidemillError as error:
            if ends_process(error):
                raise
            log.warning(not_read, error=str(error))
