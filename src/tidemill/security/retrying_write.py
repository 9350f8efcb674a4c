"""Writing rows that say what is, not what changes: made again until the outcome is told, for twice does no harm."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from tidemill.base.clock import Clock
from tidemill.base.errors import FencedError, UnavailableError, UnknownOutcomeError
from tidemill.metastore.metastore import Metastore

WRITE_BUDGET_S: Final = 20.0
PAUSE_S: Final = 0.1


async def write(metastore: Metastore, clock: Clock, rows: Sequence[tuple[bytes, bytes]], fix: str) -> None:
    """All of the rows, of one entity, or none. Raises UnknownOutcomeError after WRITE_BUDGET_S, with `fix` for who
    asks."""
    if not rows:
        return
    until_s = clock.monotonic_s() + WRITE_BUDGET_S
    while True:
        try:
            await metastore.commit(rows)
            return
        except (FencedError, UnavailableError, UnknownOutcomeError) as error:
            if clock.monotonic_s() > until_s:
                raise UnknownOutcomeError(f"Rows may have been written: cause={error.message!r}.", fix=fix) from error
        await asyncio.sleep(PAUSE_S)
