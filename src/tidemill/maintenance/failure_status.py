"""Failures of a job's many small units (shards, sources), each reported under its own stage, and at most a few
dozen: a status report is one register, and must not grow with the number of simultaneous failures."""

from __future__ import annotations

from tidemill.base.clock import Clock
from tidemill.base.runtime.tasks import error_sentence, is_fault, needs_operator
from tidemill.base.status.status import StatusTracker

REPORTED_UNITS_MAX = 50


class UnitFailures:
    """Failing units of one job. `count` is the number that fail now, reported or not."""

    def __init__(self, prefix: str, tracker: StatusTracker, clock: Clock) -> None:
        self._prefix = prefix
        self._tracker = tracker
        self._clock = clock
        self._failing: set[str] = set()
        self._told: set[str] = set()

    @property
    def count(self) -> int:
        return len(self._failing)

    def failed(self, name: str, error: BaseException) -> None:
        """Report a failure. Raises `error` again when it is no fault of the unit, such as a cancellation or an exit."""
        if not is_fault(error):
            raise error
        self._failing.add(name)
        if name in self._told or len(self._told) < REPORTED_UNITS_MAX:
            self._told.add(name)
            self._tracker.fail(
                f"{self._prefix}:{name}",
                error_sentence(error),
                now_ms=self._clock.now_ms(),
                parked=needs_operator(error),
            )

    def clear_failure(self, name: str) -> None:
        self._failing.discard(name)
        if name in self._told:
            self._told.discard(name)
            self._tracker.clear_failure(f"{self._prefix}:{name}")
