"""Compute how much WAL the slot retains, how fast that grows, and when PostgreSQL would remove it. Pure; time is
passed in.

    retained     WAL since the slot's restart position
    headroom     until max_slot_wal_keep_size invalidates it; None = unlimited, and the disk is the limit
    grows        over the last WINDOW_S at least: a checkpoint moves the restart position in steps
    full in      headroom / growth, while it grows

The restart position is not the confirmed one. Decoding restarts with the oldest transaction that was open, so a
transaction that stays open retains all WAL since it began, however fast the capture confirms. The session that has it
open is queried only once PIN_BYTES are between the two positions.
https://www.postgresql.org/docs/current/view-pg-replication-slots.html
"""

from __future__ import annotations

from collections import deque

WINDOW_S = 60.0
PIN_BYTES = 64 << 20
"""Four segments: a smaller distance can be that of two checkpoints."""


class WalRetention:
    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._seen: deque[tuple[float, int]] = deque()
        self._headroom: int | None = None

    def record(self, now_s: float, retained_bytes: int, headroom_bytes: int | None) -> None:
        """Note what the server reported at `now_s`, of a monotonic clock."""
        self._seen.append((now_s, retained_bytes))
        self._headroom = headroom_bytes
        while len(self._seen) > 2 and self._seen[1][0] <= now_s - self._window_s:
            self._seen.popleft()

    @property
    def grows_bytes_per_s(self) -> float:
        """Growth in bytes per second; 0 while it does not grow, or is not known yet."""
        if not self._seen:
            return 0.0
        (first_s, first), (last_s, last) = self._seen[0], self._seen[-1]
        if last_s - first_s < self._window_s / 2:
            return 0.0
        return max(0.0, (last - first) / (last_s - first_s))

    @property
    def full_in_s(self) -> int | None:
        """Seconds until the headroom is used up at the present growth; None = no limit, or no growth."""
        growth = self.grows_bytes_per_s
        return int(max(0, self._headroom) / growth) if self._headroom is not None and growth > 0 else None
