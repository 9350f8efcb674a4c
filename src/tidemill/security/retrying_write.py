"""Idempotent row writes: rows hold absolute values, so a write is retried until its outcome is known."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from tidemill.base.clock import Clock
from tidemill.base.errors import FencedError, UnavailableError, UnknownOutcomeError
from tidemill.metastore.metastore import Metastore

WRITE_BUDGET_S: Final = 20.0
PAUSE_S: Final = 0.1


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
