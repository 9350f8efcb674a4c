"""Rows that processes cache: their periodic refresh, and idempotent writes.

The rows hold absolute values, so a write is retried until its outcome is known.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final, Protocol

import structlog

from tidemill.base.clock import Clock
from tidemill.base.errors import FencedError, TidemillError, UnavailableError, UnknownOutcomeError, ends_process
from tidemill.metastore.metastore import Metastore

log = structlog.get_logger()

WRITE_BUDGET_S: Final = 20.0
PAUSE_S: Final = 0.1


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


async def write_rows(metastore: Metastore, clock: Clock, rows: Sequence[tuple[bytes, bytes]], fix: str) -> None:
    """Write all rows (of one entity) atomically. Raises UnknownOutcomeError after WRITE_BUDGET_S, with `fix` for the
    caller."""
    if not rows:
        return
    until_s = clock.monotonic_s() + WRITE_BUDGET_S
    while True:
        try:
            await metastore.commit(rows)
            return
        except (FencedError, UnavailableError, UnknownOutcomeError) as error:
            if clock.monotonic_s() > until_s:
                raise UnknownOutcomeError(f"rows may have been written: cause={error.message!r}.", fix=fix) from error
        await asyncio.sleep(PAUSE_S)
