"""The whole engine against a plain dict: after any operations in any order, every read returns what the dict holds.

A follower is fed from the same batches at a separate pace and refreshed at any time. Snapshots and half-read scans stay
open across flushes, merges, collections and reopenings.
"""

from __future__ import annotations

import asyncio
import tempfile
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from support.metastore.lsm_world import World, collect, expected
from support.metastore.strategies import batches, bounds, keys, options
from tidemill.base.clock import Rand, SystemClock
from tidemill.metastore.lsm.database import Database
from tidemill.metastore.lsm.memtable import Memtable
from tidemill.metastore.lsm.options import Options
from tidemill.metastore.lsm.scan import Scan
from tidemill.metastore.lsm.snapshot import Snapshot
from tidemill.metastore.lsm.version import prefix_end
from tidemill.objects.local import LocalObjects
from tidemill.objects.memory import MemoryObjects

Rows = dict[bytes, bytes]


class Engine(RuleBasedStateMachine):
    snapshots = Bundle("snapshots")
    scans = Bundle("scans")
    on_disk = False

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.database: Any = None
        self.follower: Any = None
        self.folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, coroutine: Any) -> Any:
        async def bounded() -> Any:
            async with asyncio.timeout(60):
                return await coroutine

        return self.runner.run(bounded())

    @initialize(options=options, background=st.booleans())
    def start(self, options: Options, background: bool) -> None:
        if self.on_disk:
            self.folder = tempfile.TemporaryDirectory()
            self.world = World(LocalObjects.open(self.folder.name, SystemClock(), Rand(1)), options)
        else:
            self.world = World(MemoryObjects(SystemClock()), options)
        self.background = background
        self.log: list[tuple[int, list[tuple[bytes, bytes]]]] = []
        self.fed = 0
        self.database = self.run(self.world.open(background=background))
        self.follower = self.run(self.world.open(follower=True))

    @property
    def rows(self) -> Rows:
        return self.world.rows

    @rule(rows=batches)
    def put(self, rows: list[tuple[bytes, bytes]]) -> None:
        self.run(self.database.background.stall.wait())
        self.log.append((self.world.put(self.database, rows), rows))

    @rule()
    def flush(self) -> None:
        assert self.run(self.database.flush()) == self.world.seqno

    @rule()
    def compact(self) -> None:
        self.run(self.database.background.compact())

    @rule()
    def collect_garbage(self) -> None:
        assert self.run(self.database.background.collect_garbage()).missing == ()

    @rule(times=st.integers(1, 20))
    def let_others_run(self, times: int) -> None:
        async def pause() -> None:
            for _ in range(times):
                await asyncio.sleep(0)

        self.run(pause())

    @rule()
    def reopen(self) -> None:
        """Open as a new leader: from the newest manifest, and the later batches of the log."""
        self.run(self.database.aclose())
        self.database = self.run(self.world.open(background=self.background))
        persisted = self.database.max_persisted_seqno
        for seqno, rows in self.log:
            if seqno > persisted:
                self.database.apply(seqno, [key for key, _ in rows], [value for _, value in rows])

    # reads -------------------------------------------------------------------------------------------

    @rule(key=keys)
    def get(self, key: bytes) -> None:
        assert self.run(self.database.get(key)) == self.rows.get(key)

    @rule(wanted=st.lists(keys, max_size=20))
    def get_many(self, wanted: list[bytes]) -> None:
        assert self.run(self.database.get_many(wanted)) == [self.rows.get(key) for key in wanted]

    @rule(key=keys)
    def get_row(self, key: bytes) -> None:
        row = self.run(self.database.get_row(key))
        if key not in self.rows:
            assert row is None
        else:
            seqno = max(seqno for seqno, rows in self.log if key in dict(rows))
            assert tuple(row) == (seqno, self.rows[key])

    @rule(lower=bounds, upper=st.none() | bounds, reverse=st.booleans())
    def scan(self, lower: bytes, upper: bytes | None, reverse: bool) -> None:
        found = self.run(collect(self.database.scan(lower, upper, reverse=reverse)))
        assert found == expected(self.rows, lower, upper, reverse=reverse)

    @rule(
        prefix=st.sampled_from([b"", b"a", b"a\xff", b"k/", b"k/1", b"long/", b"\xff", b"none"]), reverse=st.booleans()
    )
    def prefix(self, prefix: bytes, reverse: bool) -> None:
        found = self.run(collect(self.database.prefix(prefix, reverse=reverse)))
        assert found == expected(self.rows, prefix, prefix_end(prefix), reverse=reverse)

    # things kept open ----------------------------------------------------------------------------------

    @rule(target=snapshots)
    def take_snapshot(self) -> tuple[Database, Snapshot, Rows]:
        return self.database, self.database.snapshot(), dict(self.rows)

    @rule(taken=snapshots, key=keys, lower=bounds, reverse=st.booleans())
    def read_snapshot(self, taken: tuple[Database, Snapshot, Rows], key: bytes, lower: bytes, reverse: bool) -> None:
        database, snapshot, rows = taken
        if database is self.database:
            assert self.run(snapshot.get(key)) == rows.get(key)
            assert self.run(snapshot.get_many([key, lower or b"x"])) == [
                rows.get(key),
                rows.get(lower or b"x"),
            ]
            assert self.run(collect(snapshot.scan(lower, reverse=reverse))) == expected(rows, lower, reverse=reverse)
            prefix = key[:2]
            wished = expected(rows, prefix, prefix_end(prefix), reverse=reverse)
            assert self.run(collect(snapshot.prefix(prefix, reverse=reverse))) == wished

    @rule(taken=consumes(snapshots))
    def close_snapshot(self, taken: tuple[Database, Snapshot, Rows]) -> None:
        taken[1].close()

    @rule(target=scans, lower=bounds, reverse=st.booleans())
    def begin_scan(self, lower: bytes, reverse: bool) -> Any:
        scan = self.database.scan(lower, reverse=reverse)
        return [self.database, scan, expected(self.rows, lower, reverse=reverse)]

    @rule(target=scans, begun=consumes(scans))
    def go_on_scanning(self, begun: list[Any]) -> Any:
        database, scan, rest = begun
        if database is not self.database:
            return multiple()
        chunk = self.run(anext_or_none(scan))
        if chunk is None:
            assert rest == []
            return multiple()
        rows = list(zip(*chunk, strict=True))
        assert rest[: len(rows)] == rows
        return [database, scan, rest[len(rows) :]]

    # the follower --------------------------------------------------------------------------------------

    @rule(count=st.integers(1, 5))
    def feed_follower(self, count: int) -> None:
        for seqno, rows in self.log[self.fed : self.fed + count]:
            self.follower.apply(seqno, [key for key, _ in rows], [value for _, value in rows])
        self.fed = min(len(self.log), self.fed + count)

    @rule()
    def refresh_follower(self) -> None:
        self.run(self.follower.refresh())

    @rule(lower=bounds, reverse=st.booleans(), key=keys)
    def read_follower(self, lower: bytes, reverse: bool, key: bytes) -> None:
        # The follower's files are not pinned: it must refresh after a collection.
        self.run(self.follower.refresh())
        seen = max(self.follower.max_persisted_seqno, self.log[self.fed - 1][0] if self.fed else 0)
        rows: Rows = {}
        for seqno, batch in self.log:
            if seqno <= seen:
                rows.update(batch)
        rows = {key: value for key, value in rows.items() if value}
        assert self.run(self.follower.get(key)) == rows.get(key)
        assert self.run(collect(self.follower.scan(lower, reverse=reverse))) == expected(rows, lower, reverse=reverse)

    # always --------------------------------------------------------------------------------------------

    @invariant()
    def the_stack_stays_shallow(self) -> None:
        if self.database is not None:
            memtable: Memtable = self.database.memtable
            assert len(memtable.layers) <= 2 + 2 * max(1, memtable.rows).bit_length()
            assert self.database.max_persisted_seqno <= self.database.max_applied_seqno

    def teardown(self) -> None:
        async def end() -> None:
            for database in (self.database, self.follower):
                if database is not None:
                    await database.aclose()
            if self.database is not None:
                await self.world.objects.aclose()  # waits for writes whose callers were cancelled

        self.runner.run(end())
        self.runner.close()
        if self.folder is not None:
            self.folder.cleanup()


async def anext_or_none(scan: Scan) -> Any:
    async for chunk in scan:
        return chunk
    return None


class EngineOnDisk(Engine):
    on_disk = True


TestEngineInMemory = Engine.TestCase
TestEngineInMemory.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestEngineOnDisk = EngineOnDisk.TestCase
TestEngineOnDisk.settings = settings(
    max_examples=15, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
