"""How much WAL the slot keeps, how fast that grows, and when PostgreSQL would take it away. Pure; the clock comes in.

    retained     WAL since the slot's restart position
    headroom     until max_slot_wal_keep_size invalidates it; None = unlimited, and the disk is the limit
    grows        over the last WINDOW_S at least: a checkpoint moves the restart position in steps
    full in      headroom / growth, while it grows

The restart position is not the confirmed one: decoding begins again with the oldest transaction that was open, so one
that stays open keeps all WAL since it began, however fast the capture confirms. Who that is, is asked for only once
PIN_BYTES lie between the two.
https://www.postgresql.org/docs/current/view-pg-replication-slots.html
"""

from __future__ import annotations

from collections import deque

WINDOW_S = 60.0
PIN_BYTES = 64 << 20
"""Four segments: below it, it is the distance of two checkpoints."""


class Retained:
    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._seen: deque[tuple[float, int]] = deque()
        self._headroom: int | None = None

    def saw(self, now_s: float, retained_bytes: int, headroom_bytes: int | None) -> None:
        """What the server told at `now_s`, of a clock that only goes on."""
        self._seen.append((now_s, retained_bytes))
        self._headroom = headroom_bytes
        while len(self._seen) > 2 and self._seen[1][0] <= now_s - self._window_s:
            self._seen.popleft()

    @property
    def grows_bytes_per_s(self) -> float:
        """0 while it does not, or is not known yet."""
        if not self._seen:
            return 0.0
        (first_s, first), (last_s, last) = self._seen[0], self._seen[-1]
        if last_s - first_s < self._window_s / 2:
            return 0.0
        return max(0.0, (last - first) / (last_s - first_s))

    @property
    def full_in_s(self) -> int | None:
        """None = never, as far as it looks."""
        growth = self.grows_bytes_per_s
        return int(max(0, self._headroom) / growth) if self._headroom is not None and growth > 0 else None
