"""A copy that is not to be faster than so many rows a second, however many connections read it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

from tidemill.base.clock import Clock

PART_S = 0.25
"""So much of a second is written at once, so that what waits moves all the while."""


class Throttle:
    """`rows_per_s` 0 = as fast as it goes; `most_rows` are written at once in any case."""

    def __init__(self, rows_per_s: int, most_rows: int, clock: Clock) -> None:
        self._rows_per_s = rows_per_s
        self._most_rows = min(most_rows, max(1, int(rows_per_s * PART_S))) if rows_per_s else most_rows
        self._clock = clock
        self._next_s = 0.0

    def parts(self, lines: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
        for at in range(0, len(lines), self._most_rows):
            yield lines[at : at + self._most_rows]

    async def turn(self, rows: int) -> None:
        """Until so many rows may be written. Who comes first takes its time first; nothing is saved up."""
        if not self._rows_per_s:
            return
        now_s = self._clock.monotonic_s()
        at_s = max(self._next_s, now_s)
        self._next_s = at_s + rows / self._rows_per_s
        if at_s > now_s:
            await asyncio.sleep(at_s - now_s)
