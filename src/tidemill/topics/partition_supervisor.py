"""Restart failed partitions.

A partition is an independent unit: a failure is reported under its topic's stage status, and the partition is opened
again after a pause, even without requests. No other unit is affected.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

from tidemill.base.clock import Clock
from tidemill.base.errors import UnavailableError
from tidemill.base.runtime.tasks import Backoff, Tasks, error_sentence, needs_operator
from tidemill.base.status.status import StatusTracker

PartitionKey = tuple[str, int]

FIRST_REOPEN_S, LONGEST_REOPEN_S = 0.1, 2.0
"""Pauses before a failed partition is opened again, after a first immediate attempt. Most faults are an unavailable
store."""

PAUSED_RETRY_S = 10.0
"""Pause before each retry of a fault that only an operator can repair."""

STEADY_S = 5.0
"""Time that a partition must stay open after a failure to count as recovered. If it fails sooner, its backoff
continues."""


OWN_STATUS_MAX = 50
"""Limit of failing topics with their own status entry; the rest share `topics`. An unavailable store fails all of
them."""

SHARED_STATUS = "topics"


class _Failing:
    def __init__(self) -> None:
        self.mark = ""
        self.restarts = Backoff(FIRST_REOPEN_S, LONGEST_REOPEN_S)
        self.tries = 0
        self.error = ""
        self.paused = False
        self.waiting = False
        self.opened_s = 0.0


class PartitionSupervisor:
    """Supervision of one process's partitions. `reopen(key)` leads the partition again if it is still assigned here."""

    def __init__(
        self,
        clock: Clock,
        tracker: StatusTracker | None,
        tasks: Tasks,
        mark_of: Callable[[PartitionKey], str],
        reopen: Callable[[PartitionKey], None],
    ) -> None:
        self._clock = clock
        self._tracker = tracker
        self._tasks = tasks
        self._mark_of = mark_of
        self._reopen = reopen
        self._failing: dict[PartitionKey, _Failing] = {}
        self._reported: Counter[str] = Counter()
        """Status entry to the number of failing partitions that it reports."""

    def check_available(self, key: PartitionKey) -> None:
        """Raise UnavailableError while the partition waits for its next attempt."""
        failing = self._failing.get(key)
        if failing is not None and failing.waiting:
            raise UnavailableError(f"the partition failed: {key[0]}/{key[1]} cause={failing.error}", fix="Retry.")

    def marks(self) -> set[str]:
        """Return the names of the status entries that report failing partitions."""
        return set(self._reported)

    def _status_for(self, key: PartitionKey) -> str:
        own = self._mark_of(key)
        return own if own in self._reported or len(self._reported) < OWN_STATUS_MAX else SHARED_STATUS

    def failed(self, key: PartitionKey, fault: BaseException) -> None:
        failing = self._failing.setdefault(key, _Failing())
        if not failing.mark:
            failing.mark = self._status_for(key)
            self._reported[failing.mark] += 1
        failing.tries += 1
        failing.error, failing.paused, failing.waiting = error_sentence(fault), needs_operator(fault), failing.tries > 1
        self._publish_failure(key, failing)
        ran_s = self._clock.monotonic_s() - failing.opened_s
        pause_s = PAUSED_RETRY_S if failing.paused else failing.restarts.pause_s(ran_s)
        pause_s = pause_s if failing.waiting else 0.0
        self._tasks.spawn(self._reopen_later(key, failing, pause_s), name=f"reopen {key[0]}/{key[1]}")

    async def _reopen_later(self, key: PartitionKey, failing: _Failing, pause_s: float) -> None:
        await asyncio.sleep(pause_s)
        failing.waiting, failing.opened_s = False, self._clock.monotonic_s()
        if self._failing.get(key) is failing:
            self._reopen(key)

    def report_opened(self, key: PartitionKey) -> None:
        failing = self._failing.get(key)
        if failing is not None:
            self._tasks.spawn(self._clear_when_steady(key, failing, failing.opened_s), name=f"steady {key[0]}/{key[1]}")

    async def _clear_when_steady(self, key: PartitionKey, failing: _Failing, opened_s: float) -> None:
        await asyncio.sleep(STEADY_S)
        if not failing.waiting and failing.opened_s == opened_s and self._failing.get(key) is failing:
            self.clear_failure(key)

    def clear_failure(self, key: PartitionKey) -> None:
        """Clear the failure: the partition works, or is no longer led here."""
        healed = self._failing.pop(key, None)
        if healed is None:
            return
        self._reported[healed.mark] -= 1
        if self._reported[healed.mark]:
            self._publish_failure(*next((k, f) for k, f in self._failing.items() if f.mark == healed.mark))
            return
        del self._reported[healed.mark]
        if self._tracker is not None:
            self._tracker.clear_failure(healed.mark)

    def _publish_failure(self, key: PartitionKey, failing: _Failing) -> None:
        if self._tracker is not None:
            which = (
                f"partition {key[1]}" if failing.mark != SHARED_STATUS else f"{self._mark_of(key)} partition {key[1]}"
            )
            error = f"{which}: {failing.error}"
            self._tracker.fail(failing.mark, error, now_ms=self._clock.now_ms(), parked=failing.paused)
