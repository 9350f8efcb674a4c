"""Bounded buffers: capture buffers up to its limits while topics accept nothing, however large a transaction is."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path

import pytest

from support.capture.gate import Gate
from support.capture.world import World
from support.waiting import until
from tidemill.capture.decode.transaction_builder import FRAGMENT_BYTES

pytestmark = pytest.mark.postgres

ROWS = 120_000
MEMORY_MIB = 120
"""Limit of the growth. A hundred and twenty thousand rows in memory would take twice that, three hundred thousand five
times.
"""


def resident_mib() -> float:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / (1 << 20)


@pytest.mark.parametrize(
    "statement",
    [
        f"INSERT INTO a SELECT g, 'a row' FROM generate_series(1, {ROWS}) g",
        f"DO $$ BEGIN FOR g IN 1..{ROWS} LOOP INSERT INTO a VALUES (g, 'a row'); COMMIT; END LOOP; END $$",
    ],
    ids=["one-large-transaction", "many-small-ones"],
)
async def test_f436_what_waits_is_bounded_and_the_bounds_are_facts(postgres_dsn: str, statement: str) -> None:
    async with World(postgres_dsn) as world:
        await world.sql("CREATE TABLE a (id int PRIMARY KEY, v text)")
        gate = Gate(world.topics)
        async with world.capture(topics=gate) as capture:
            await world.caught_up()
            gate.closed = True
            before_mib = resident_mib()
            await world.sql(statement)

            def full() -> bool:
                facts = capture.facts()
                return any(facts[f"queue_{what}"] >= facts[f"queue_{what}_limit"] for what in ("changes", "fragments"))  # type: ignore[operator]

            await until(full, "the queue is full, and the socket not read any more")
            await asyncio.sleep(0.5)
            facts = capture.facts()
            numbers = {name: value for name, value in facts.items() if isinstance(value, int)}
            # One fragment may be taken while the bound is not reached yet.
            assert numbers["queue_changes"] <= numbers["queue_changes_limit"] + 500
            assert numbers["queue_fragments"] <= numbers["queue_fragments_limit"]
            assert numbers["backlog_bytes"] <= numbers["backlog_bytes_limit"] + FRAGMENT_BYTES
            assert resident_mib() - before_mib < MEMORY_MIB
            assert await world.confirmed() <= await world.wal_end()
            gate.open()
            await world.caught_up()
            assert len(await world.records("a")) == ROWS
