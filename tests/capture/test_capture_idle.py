"""An idle capture costs nothing beyond its heartbeat: no write to consensus, no object, next to no processor time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import pytest
from capture_world import World, until

from tidemill.base.clock import SystemClock
from tidemill.consensus.api import LogHead
from tidemill.consensus.memory import MemoryConsensus

pytestmark = pytest.mark.postgres

IDLE_S = 8.0
PROCESSOR_SHARE = 0.03


class Counting(MemoryConsensus):
    """Remembers which logs were written."""

    def __init__(self) -> None:
        super().__init__(SystemClock())
        self.written: list[str] = []

    async def append(self, log: str, term: int, expected_next: int, records: Sequence[bytes], nonce: str) -> LogHead:
        self.written.append(log)
        return await super().append(log, term, expected_next, records, nonce)


def test_an_idle_capture_of_many_tables_writes_nothing_and_takes_no_processor_time(postgres_dsn: str) -> None:
    async def main() -> None:
        consensus = Counting()
        async with World(postgres_dsn, consensus=consensus) as world:
            await world.sql(*[f"CREATE TABLE t{n} (id int PRIMARY KEY)" for n in range(20)])
            # Heartbeats, and what the server itself writes to its WAL, are what an idle capture may cost.
            async with world.capture(heartbeat_s=600.0, idle_binding_ms=600_000) as capture:
                await world.sql("INSERT INTO t0 VALUES (1)")
                await world.caught_up()
                written = 0

                async def quiet() -> bool:
                    nonlocal written
                    before, written = written, len(consensus.written)
                    await asyncio.sleep(2.0)
                    return before == written

                await until(quiet, "what was begun is done", 30)
                consensus.written.clear()
                busy_s = time.process_time()
                await asyncio.sleep(IDLE_S)
                busy_s = time.process_time() - busy_s
                assert consensus.written == []
                assert busy_s < IDLE_S * PROCESSOR_SHARE, f"{busy_s / IDLE_S:.1%} of a core"
                assert capture.streaming

    asyncio.run(main())
