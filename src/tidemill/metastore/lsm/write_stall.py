"""Back-pressure: how long a writer waits before its next batch.

Slow from `l0_slow` files in level 0, by a little more for each; stop from `l0_stop` files, or when
more than two write buffers are full. A writer that waits holds nothing that flush or compaction need: those
two make room whatever writers do, so nobody waits for himself.
"""

from __future__ import annotations

import asyncio

from tidemill.base.errors import UnavailableError
from tidemill.metastore.lsm.database_protocol import DatabaseProtocol

SLOW_STEP_S = 0.001
"""One batch waits so long for each file of level 0 from `l0_slow` on."""

BUFFERS_MAX = 2
"""Rows in memory, frozen ones too, in write buffers."""

LOOK_S = 1.0
"""A stopped writer looks again so often for a failure that nobody rang for."""

PATIENCE_S = 10.0
"""A stop that lasts because the background work keeps failing is told to the writer after so long."""


class WriteStall:
    """Counts the stops and the time that writers waited."""

    def __init__(self, database: DatabaseProtocol) -> None:
        self._database = database
        self.slowed = 0
        self.stopped = 0
        self.waited_s = 0.0

    @property
    def stop(self) -> bool:
        database = self._database
        if database.memtable.size_bytes > BUFFERS_MAX * database.options.write_buffer_bytes:
            return True
        # Without the loop that merges level 0 nothing would end the stop.
        return len(database.version.levels[0]) >= database.options.l0_stop and database.compacts

    async def wait(self) -> None:
        """Raise UnavailableError when the stop lasts because flush or compaction fail, or what ended one of them."""
        database = self._database
        if database.read_only:
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
                self._complain(database.clock.monotonic_s() - started_s)
                try:
                    async with asyncio.timeout(LOOK_S):
                        rings = await database.wake.after(rings)
                except TimeoutError:
                    rings = database.wake.rings
                database.check()
        self.waited_s += database.clock.monotonic_s() - started_s

    def _complain(self, waited_s: float) -> None:
        database = self._database
        if database.failure is not None:
            raise UnavailableError(
                "No room for writes, and the work that makes room has ended: "
                f"domain_uuid={database.domain_uuid} cause={database.failure!r}.",
                fix="Close the database and open it again.",
            ) from database.failure
        failing = database.struggle
        if failing and waited_s >= PATIENCE_S:
            raise UnavailableError(
                "No room for writes, and the work that makes room keeps failing: "
                f"domain_uuid={database.domain_uuid} waited_s={waited_s:.1f} cause={failing}.",
                fix="Look at the object store.",
            )
