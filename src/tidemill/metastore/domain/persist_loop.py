"""The persist trigger of a leader: when a domain's volatile rows are written to the bucket, and whether that works.

    applied ──▶ its age is recorded ──▶ flushed when the oldest row is a persist interval old, or the buffer is full

The bucket may refuse files for a while. The rows stay in the log, so the flush is repeated with growing pauses, and
`trouble` says why. Every other error of a flush ends the term.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

import structlog

from tidemill.base.errors import TidemillError, UnavailableError
from tidemill.metastore.domain.settings import DomainContext
from tidemill.metastore.lsm.database import Database

_log = structlog.get_logger()

RETRY_FIRST_S = 0.2
RETRY_MAX_S = 15.0
OVERDUE_S = 5.0
"""Time after a flush became due until the bucket counts as behind."""
TIMER_STEP_S = 0.001
"""A deadline this near counts as reached. A shorter timer may fire without the clock having advanced, in an endless
loop."""

AGE_RESOLUTION = 16
"""Precision of the age of the oldest unpersisted row: one part in AGE_RESOLUTION of the persist interval."""


class PersistLoop:
    """Persist trigger of one term. `failed` ends the term."""

    def __init__(self, context: DomainContext, database: Database, failed: Callable[[TidemillError], None]) -> None:
        self.trouble = ""
        """Error of the last flush, if the bucket accepted no files; else ""."""
        self._context = context
        self._interval_s = context.settings.persist_interval_s
        self._database = database
        self._failed = failed
        self._flush_now = asyncio.Event()
        self._ages: deque[tuple[float, int]] = deque()
        """(time of application, first seqno applied then), in order.

        Invariant: every applied row that no manifest names is at or above the first seqno, once persisted entries are
        dropped. Its time is at most one part in AGE_RESOLUTION of the interval later than the first of the entry.
        """

    async def run(self) -> None:
        """Flush when the oldest unpersisted row is a persist interval old, or when the volatile buffer is full."""
        pause_s = RETRY_FIRST_S
        while True:
            await self._wait_until_flush_due()
            self._flush_now.clear()
            try:
                await self._database.flush(self._context.settings.flush_timeout_s)
            except UnavailableError as error:
                self.trouble = error.message
                _log.warning("persisting failed", domain=self._context.name, cause=error.message)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, RETRY_MAX_S)
                self._flush_now.set()
                continue
            except TidemillError as error:
                self._failed(error)
                return
            pause_s, self.trouble = RETRY_FIRST_S, ""

    def request_flush(self) -> None:
        """Flush now: the volatile buffer is full."""
        self._flush_now.set()

    def record_age(self, first_seqno: int) -> None:
        """Record that rows from `first_seqno` on were applied now, to know the age of the oldest unpersisted row."""
        now_s = self._context.clock.monotonic_s()
        if not self._ages or now_s - self._ages[-1][0] > self._interval_s / AGE_RESOLUTION:
            self._ages.append((now_s, first_seqno))

    def is_overdue(self) -> bool:
        """Return whether the oldest unpersisted row should have been persisted by now."""
        self._drop_persisted_ages()
        if not self._ages:
            return False
        return self._context.clock.monotonic_s() - self._ages[0][0] > self._interval_s + OVERDUE_S

    async def _wait_until_flush_due(self) -> None:
        while True:
            self._drop_persisted_ages()
            left_s = self._interval_s
            if self._ages:
                left_s += self._ages[0][0] - self._context.clock.monotonic_s()
                if left_s < TIMER_STEP_S:
                    return
            try:
                async with asyncio.timeout(left_s):
                    await self._flush_now.wait()
                    return
            except TimeoutError:
                continue

    def _drop_persisted_ages(self) -> None:
        persisted, applied = self._database.max_persisted_seqno, self._database.max_applied_seqno
        ages = self._ages
        while ages and (ages[1][1] if len(ages) > 1 else applied + 1) <= persisted + 1:
            ages.popleft()
