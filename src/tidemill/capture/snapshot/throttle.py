"""Limit a copy to a number of rows per second, over all connections that read it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

from tidemill.base.clock import Clock

PART_S = 0.25
"""Seconds of rows written at a time, so that waiting writes keep moving."""


class CopyThrottle:
    """Rate limit of a copy. `rows_per_s` 0 = unlimited. At most `most_rows` are written at a time in any case."""

    def __init__(self, rows_per_s: int, most_rows: int, clock: Clock) -> None:
        self._rows_per_s = rows_per_s
        self._most_rows = min(most_rows, max(1, int(rows_per_s * PART_S))) if rows_per_s else most_rows
        self._clock = clock
        self._next_s = 0.0

    def parts(self, lines: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
        for at in range(0, len(lines), self._most_rows):
            yield lines[at : at + self._most_rows]

    async def wait_turn(self, rows: int) -> None:
        """Wait until this number of rows may be written. Callers are served in order of arrival, and unused time is not
        saved up.
        """
        if not self._rows_per_s:
            return
        now_s = self._clock.monotonic_s()
        at_s = max(self._next_s, now_s)
        self._next_s = at_s + rows / self._rows_per_s
        if at_s > now_s:
            await asyncio.sleep(at_s - now_s)
