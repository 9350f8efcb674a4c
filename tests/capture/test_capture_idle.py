"""An idle capture costs nothing beyond its heartbeat: no write to consensus, no object, next to no CPU time.

It is measured in a separate process, so that client threads of other tests do not count.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from support.capture.world import World
from support.waiting import DEADLINE_S, until
from tidemill.base.clock import SystemClock
from tidemill.consensus.api import LogHead
from tidemill.consensus.memory import MemoryConsensus

pytestmark = pytest.mark.postgres

IDLE_S = 8.0
PROCESSOR_SHARE = 0.03


class Counting(MemoryConsensus):
    """A consensus that records the logs that were written."""

    def __init__(self) -> None:
        super().__init__(SystemClock())
        self.written: list[str] = []

    async def append(self, log: str, term: int, expected_next: int, records: Sequence[bytes], nonce: str) -> LogHead:
        self.written.append(log)
        return await super().append(log, term, expected_next, records, nonce)


async def idle(dsn: str) -> dict[str, Any]:
    consensus = Counting()
    async with World(dsn, consensus=consensus) as world:
        await world.sql(*[f"CREATE TABLE t{n} (id int PRIMARY KEY)" for n in range(20)])
        # The permitted cost of an idle capture: heartbeats, and the WAL that the server itself writes.
        async with world.capture(heartbeat_s=600.0, idle_binding_ms=600_000) as capture:
            await world.sql("INSERT INTO t0 VALUES (1)")
            await world.caught_up()
            written = 0

            async def quiet() -> bool:
                nonlocal written
                before, written = written, len(consensus.written)
                await asyncio.sleep(2.0)
                return before == written

            await until(quiet, "what was begun is done")
            consensus.written.clear()
            busy_s = time.process_time()
            await asyncio.sleep(IDLE_S)
            busy_s = time.process_time() - busy_s
            found = {"written": consensus.written[:], "busy_s": busy_s, "streaming": capture.streaming}
            if busy_s >= IDLE_S * PROCESSOR_SHARE:
                found["where"] = await asyncio.to_thread(where_it_runs)
            return found


def where_it_runs() -> list[str]:
    """Sample the stacks of every other thread for two seconds."""
    seen: Counter[str] = Counter()
    for _ in range(200):
        time.sleep(0.01)
        for frame in sys._current_frames().values():
            stack = traceback.extract_stack(frame)[-4:]
            seen[" < ".join(f"{Path(each.filename).name}:{each.lineno}" for each in reversed(stack))] += 1
    return [f"{count} {stack}" for stack, count in seen.most_common(8)]


def test_an_idle_capture_of_many_tables_writes_nothing_and_takes_no_processor_time(postgres_dsn: str) -> None:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, __file__, postgres_dsn]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["written"] == []
    assert found["busy_s"] < IDLE_S * PROCESSOR_SHARE, f"{found['busy_s'] / IDLE_S:.1%} of a core: {found}"
    assert found["streaming"]


if __name__ == "__main__":
    print(json.dumps(asyncio.run(idle(sys.argv[1]))))
