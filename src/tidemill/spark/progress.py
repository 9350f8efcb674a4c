"""Progress figures that a pipeline's driver publishes with its stage statuses."""

from __future__ import annotations

from tidemill.base.clock import Clock

RATE_OVER_S = 10.0


class CatchUpProgress:
    """Catch-up of a table: records read by this process, records remaining, and the estimated time.

    `read` never decreases, so a stage status can show it as movement while one time takes long (status.progress).
    """

    def __init__(self, clock: Clock) -> None:
        self.read = 0
        self.to_go = 0
        self._clock = clock
        self._since_s = clock.monotonic_s()
        self._at_since = 0
        self._per_s = 0.0

    def start(self, to_go: int) -> None:
        self.to_go = to_go

    def add(self, records: int) -> None:
        self.read += records
        self.to_go = max(0, self.to_go - records)
        passed_s = self._clock.monotonic_s() - self._since_s
        if passed_s > RATE_OVER_S or (self._per_s == 0.0 and passed_s > 0.5):
            self._per_s = (self.read - self._at_since) / passed_s
            self._since_s, self._at_since = self._clock.monotonic_s(), self.read

    @property
    def eta_s(self) -> float | None:
        return self.to_go / self._per_s if self._per_s > 0 else None

    def sentence(self) -> str:
        """Return the progress as a sentence, "" if nothing remains."""
        eta_s = self.eta_s
        about = f", about {eta_s:.0f} s" if eta_s is not None else ""
        return f"catching up: {self.read:,} records read, {self.to_go:,} to go{about}" if self.to_go else ""
