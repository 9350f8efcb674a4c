"""Stage statuses of the tables of one capture that carry no changes or are being copied. A table that flows has none.

A status is published from the table's row. If the last attempt to add the table failed, its reason is added until the
table is past it.
"""

from __future__ import annotations

from collections.abc import Mapping

from tidemill.base.clock import Clock
from tidemill.base.status.status import StatusTracker
from tidemill.capture.catalog.table_choice import Refusal
from tidemill.capture.config import CaptureConfig
from tidemill.capture.tables.copy_progress import SnapshotProgress
from tidemill.capture.tables.table_reasons import MAX_REASON_CHARS
from tidemill.metastore.catalogue import CaptureTableRow


class TableStatuses:
    """Publisher of the statuses. It outlives the sessions of the capture."""

    def __init__(self, config: CaptureConfig, clock: Clock, tracker: StatusTracker) -> None:
        self._config = config
        self._clock = clock
        self._tracker = tracker
        self._published: set[str] = set()
        self._refusals: dict[str, Refusal] = {}
        """Result of the last attempt to add a table, until the table is past it."""

    def record_refusal(self, name: str, why: Refusal) -> None:
        self._refusals[name] = why

    def forget_refusal(self, name: str) -> None:
        self._refusals.pop(name, None)

    def blocker_of(self, name: str) -> str:
        """Return the blocker that prevented the last attempt to add the table, "" = none."""
        why = self._refusals.get(name)
        return why.held_by if why is not None else ""

    def publish_all(self, rows: Mapping[str, CaptureTableRow]) -> None:
        """Publish the statuses of these rows, and remove all others."""
        for name in [*self._published]:
            if name not in rows or rows[name].is_streaming:
                self.remove(name)
        for row in rows.values():
            self.publish(row)

    def publish(self, row: CaptureTableRow) -> None:
        why = self._refusals.get(row.table)
        if row.state == "left" or (row.state == "captured" and (why is None or not row.is_streaming)):
            return
        mark = self._config.table_mark(row.table)
        failure = self._tracker.failure(mark)
        if why is None or row.state == "refused":
            text = f"{row.reason} {row.fix}".strip()
        else:
            text = f"{row.reason} {why.reason[:MAX_REASON_CHARS]} {why.fix}".strip()
        self._tracker.set(mark, row.paused_lsn, row.paused_lsn + 1, now_ms=row.since_ms, unit="lsn",
            upstream=f"{self._config.mark}/topics")  # fmt: skip
        if failure is None or failure.error != text:
            # No operator has to act on a table that resumes automatically, unless it takes too long.
            parked = not row.is_streaming and not row.again_ms
            self._tracker.fail(mark, text, now_ms=row.since_ms or self._clock.now_ms(), parked=parked,
                held_by=why.held_by if why is not None else "")  # fmt: skip
        self._published.add(row.table)

    def publish_copy(self, name: str, reason: str, progress: SnapshotProgress) -> None:
        """Publish the status of a table that is copied concurrently with the stream: it moves with the copied rows.
        `reason`: of an earlier refusal, which is reported until it moves.
        """
        self._tracker.set(
            self._config.table_mark(name), progress.moved, max(progress.expected, progress.moved + 1),
            now_ms=self._clock.now_ms(), held_by=progress.held_by,
            reason=f"{progress.sentence}; {reason}" if reason else progress.sentence,
            budget_ms=self._config.budget_ms, unit="rows",
            progress=progress.moved + progress.chunks_done + progress.steps.count,
        )  # fmt: skip
        self._published.add(name)

    def end_copy(self, name: str) -> None:
        """Remove the status of a table whose copy ended, but not its failure."""
        self._tracker.remove(self._config.table_mark(name))
        self._published.discard(name)

    def remove(self, name: str) -> None:
        self.forget_refusal(name)
        self._tracker.clear_failure(self._config.table_mark(name))
        self.end_copy(name)

    def clear_capture_failures(self) -> None:
        """Clear the capture's failures: its positions belong to another history than those at which it failed."""
        for name in (self._config.mark, f"{self._config.mark}/topics"):
            self._tracker.clear_failure(name)
            self._tracker.remove(name)

    def close(self) -> None:
        """Remove all statuses, because another process may continue the capture."""
        for name in [*self._published]:
            self.remove(name)
