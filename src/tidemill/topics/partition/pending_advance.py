"""The next Advance of a led partition: what retention, L1 and time have requested since the last one.

Requests only raise offsets, so any number of them becomes one log record.
"""

from __future__ import annotations

from tidemill.topics.partition.state_machine.commands import Advance
from tidemill.topics.partition.state_machine.state import PartitionState


class PendingAdvance:
    def __init__(self) -> None:
        self.is_due = False
        self._log_start = 0
        """Log start that retention allows."""
        self._reconciled = 0
        """Offset below which L1 is known to hold everything."""
        self._aborted_start = 0
        self._placed_s: float | None = None
        """Time of the first batch placed since the last Advance."""

    def request_log_start(self, log_start: int) -> None:
        self._log_start = max(self._log_start, log_start)
        self.is_due = True

    def request_reconciled(self, offset: int, aborted_start: int) -> None:
        self._reconciled = max(self._reconciled, offset)
        self._aborted_start = max(self._aborted_start, aborted_start)
        self.is_due = True

    def request_if_placed(self, now_s: float, after_s: float) -> bool:
        """Request an Advance if the first batch since the last one was placed `after_s` ago; return whether."""
        if self._placed_s is None or now_s - self._placed_s < after_s:
            return False
        self.is_due = True
        return True

    def record_placed(self, now_s: float) -> None:
        if self._placed_s is None:
            self._placed_s = now_s

    def pop_command(self, state: PartitionState, now_ms: int, writer: str, below: int) -> Advance:
        """Return the command, and begin to collect the next one."""
        self.is_due, self._placed_s = False, None
        log_start = min(max(self._log_start, state.log_start), state.high_watermark)
        reconciled = min(max(self._reconciled, state.reconciled), state.high_watermark)
        aborted_start = min(max(self._aborted_start, state.aborted_start), reconciled)
        return Advance(max(now_ms, state.last_at_ms), log_start, writer, below, reconciled, aborted_start)
