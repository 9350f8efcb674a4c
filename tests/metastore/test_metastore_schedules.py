"""The engine under schedules that a seed chooses.

At every await other tasks may run, and every write and read may be slow or fail, while a writer, readers, flushes,
merges and collections run concurrently. A read must reflect some moment between its call and its return; a scan must
reflect exactly the moment of its call.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

import msgspec
import pytest

from sim.clock import SimClock
from sim.loop import SimLoop
from support.metastore.lsm_world import SMALL, World, collect, expected
from tidemill.base.clock import Rand
from tidemill.base.errors import UnavailableError
from tidemill.base.runtime.tasks import Tasks
from tidemill.metastore.lsm.database import Database
from tidemill.objects.memory import MemoryObjects

KEYS = [b"row/%03d" % number for number in range(60)]
OPTIONS = msgspec.structs.replace(
    SMALL, write_buffer_bytes=6_000, l0_compact=2, l0_slow=3, l0_stop=4, slice_rows=3, cache_bytes=4_000
)


class Life:
    """One writer of eighty batches, reopened now and then, with concurrent readers."""

    def __init__(self, seed: int, loop: SimLoop) -> None:
        self.source = random.Random(seed)
        clock = SimClock(loop)
        self.world = World(MemoryObjects(clock), OPTIONS)
        self.world.clock = clock  # type: ignore[assignment]
        self.world.rand = Rand(seed)
        self.failures = 0.05 * (seed % 3)
        self.history: dict[bytes, list[bytes | None]] = {key: [None] for key in KEYS}
        self.log: list[tuple[int, dict[bytes, bytes]]] = []
        self.database: Any = None
        self.over = False
        self.reads = 0

    async def slowly(self, key: str) -> None:
        await asyncio.sleep(self.source.uniform(0, 0.05))
        if self.source.random() < self.failures:
            raise UnavailableError("The bucket is busy: planted.")

    async def write(self) -> None:
        world, source = self.world, self.source
        self.database = await world.open(background=True)
        world.objects.before_put = world.objects.before_read = self.slowly
        for turn in range(80):
            await patiently(self.database.background.stall.wait)
            rows = {source.choice(KEYS): b"" if source.random() < 0.3 else b"%d" % turn for _ in range(5)}
            self.log.append((world.put(self.database, rows), rows))
            for key, value in rows.items():
                self.history[key].append(value or None)
            chance = source.random()
            if chance < 0.1:
                await patiently(self.database.flush)
            elif chance < 0.15:
                await patiently(self.database.background.compact)
            elif chance < 0.25:
                assert (await patiently(self.database.background.collect_garbage)).missing == ()
            elif chance < 0.28:
                await self.reopen()
            await asyncio.sleep(source.uniform(0, 0.01))
        self.over = True

    async def reopen(self) -> None:
        old, self.database = self.database, None
        await old.aclose()
        database = await patiently(lambda: self.world.open(background=True))
        for seqno, rows in self.log:
            if seqno > database.max_persisted_seqno:
                database.apply(seqno, list(rows), list(rows.values()))
        self.database = database

    async def read(self) -> None:
        source = self.source
        while not self.over:
            database = self.database
            if database is not None:
                try:
                    await self.read_once(database)
                except UnavailableError:
                    pass
                except Exception:
                    if database is self.database:  # else it was closed beneath the reader
                        raise
            await asyncio.sleep(source.uniform(0, 0.02))

    async def read_once(self, database: Database) -> None:
        source, rows = self.source, dict(self.world.rows)
        kind = source.randrange(4)
        if kind == 0:
            reverse = source.random() < 0.5
            assert await collect(database.scan(reverse=reverse)) == expected(rows, reverse=reverse)
        elif kind == 1:
            with database.snapshot() as snapshot:
                for _ in range(3):
                    await asyncio.sleep(source.uniform(0, 0.1))
                    keys = source.sample(KEYS, 5)
                    assert await snapshot.get_many(keys) == [rows.get(key) for key in keys]
                    assert await collect(snapshot.prefix(b"row/01")) == expected(rows, b"row/01", b"row/02")
        elif kind == 2:
            keys = source.sample(KEYS, 10)
            assert await database.get_many(keys) == [rows.get(key) for key in keys]
        else:
            key = source.choice(KEYS)
            since = len(self.history[key]) - 1
            value = await database.get(key)
            assert value in self.history[key][since:], (key, value, self.history[key])
        self.reads += 1

    async def run(self) -> None:
        async with Tasks(print) as tasks:
            reading = [tasks.spawn(self.read(), name=f"reader {number}") for number in range(3)]
            await self.write()
            await asyncio.gather(*reading)
        self.failures = 0.0
        assert await collect(self.database.scan()) == expected(self.world.rows)
        await self.database.aclose()
        assert self.reads > 20


async def patiently(call: Any) -> Any:
    while True:
        try:
            return await call()
        except UnavailableError:
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("seed", range(18))
def test_reads_writes_and_background_work_under_any_schedule(seed: int) -> None:
    loop = SimLoop(random.Random(1_000 + seed))
    life = Life(seed, loop)

    try:
        loop.run_until_complete(life.run())
        assert not loop.failures
    finally:
        loop.dispose()
