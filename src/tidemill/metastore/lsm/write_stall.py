"""Write stalls: how long a writer waits before its next batch.

From `l0_slow` files in level 0 on, each batch is delayed, more for each further file. Writers stop from `l0_stop` files
on, or when more than two write buffers are full. A waiting writer holds nothing that flush or compaction need, and
these two make room independently of writers, so there is no deadlock.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from tidemill.base.errors import UnavailableError
from tidemill.metastore.lsm.database_protocol import DatabaseProtocol

SLOW_STEP_S = 0.001
"""Delay of a batch for each file of level 0 from `l0_slow` on."""

BUFFERS_MAX = 2
"""Limit of rows in memory, including frozen ones, in write buffers."""

CHECK_INTERVAL_S = 1.0
"""Interval at which a stopped writer checks for failures that did not ring."""

STOP_ERROR_AFTER_S = 10.0
"""Duration of a stop after which the writer gets the error of the failing background work."""


class WorkProtocol(Protocol):
    """Background work that makes room."""

    compacts: bool
    failure: BaseException | None

    @property
    def last_error(self) -> object: ...


class WriteStall:
    """Write stall. It counts the stops and the time that writers waited."""

    def __init__(self, database: DatabaseProtocol, work: WorkProtocol) -> None:
        self._database = database
        self._work = work
        self.slowed = 0
        self.stopped = 0
        self.waited_s = 0.0

    @property
    def stop(self) -> bool:
        database = self._database
        if database.memtable.size_bytes > BUFFERS_MAX * database.options.write_buffer_bytes:
            return True
        # Without the compaction loop nothing would reduce level 0 and end the stop.
        return len(database.version.levels[0]) >= database.options.l0_stop and self._work.compacts

    async def wait(self) -> None:
        """Wait until writing may continue. Call it before each batch, outside of any lock that reads need.

        Returns immediately while level 0 and the memtable are small, with growing delay as level 0 grows, and only
        after a flush or a compaction once they are too large. May be cancelled. Raises UnavailableError if the stop
        lasts because flush or compaction fail or have ended.
        """
        database = self._database
        database.lifecycle.check_open()
        if database.lifecycle.read_only:
            return
        files = len(database.version.levels[0])
        if files < database.options.l0_slow and not self.stop:
            return
        started_s = database.clock.monotonic_s()
        if not self.stop:
            self.slowed += 1
            await asyncio.sleep(SLOW_STEP_S * (files - database.options.l0_slow + 1))
        else:
            self.stopped += 1
            rings = database.wake.rings
            while self.stop:
                self._raise_if_hopeless(database.clock.monotonic_s() - started_s)
                try:
                    async with asyncio.timeout(CHECK_INTERVAL_S):
                        rings = await database.wake.wait_after(rings)
                except TimeoutError:
                    rings = database.wake.rings
                database.lifecycle.check_open()
        self.waited_s += database.clock.monotonic_s() - started_s

    def _raise_if_hopeless(self, waited_s: float) -> None:
        database, work = self._database, self._work
        if work.failure is not None:
            raise UnavailableError(
                "no room for writes, and the background work that makes room has ended: "
                f"domain_uuid={database.domain_uuid} cause={work.failure!r}.",
                fix="Close and reopen the database.",
            ) from work.failure
        failing = work.last_error
        if failing and waited_s >= STOP_ERROR_AFTER_S:
            raise UnavailableError(
                "no room for writes, and the background work that makes room keeps failing: "
                f"domain_uuid={database.domain_uuid} waited_s={waited_s:.1f} cause={failing}.",
                fix="Check the object store.",
            )
