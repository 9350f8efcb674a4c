"""Shapes that outlive their capture process: the real store on its real file, on one machine or two, and clients that
follow a shape by its handle, independent of the process that serves it.

Faults: a flush takes effect or not, and is reported as successful or not; a disk fails for a while, also for longer
than any client waits; reads fail; a process dies in the middle of that, or leaves in order, and the next process runs
on either machine: the files remain where they are.
Oracle: a client that is up to date has exactly the rows of a SELECT as of the LSN reported to it, across all processes;
a handle is given out once; no shape ends with an unexpected fault; a file that the capture's row names has everything
that was confirmed; once nothing moves, every client arrives at the contents of the table, and the last commit is
confirmed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import apsw
import msgspec

from sim.scenarios.capture_database import Database
from sim.scenarios.capture_oracle import NAME
from sim.scenarios.capture_shapes import WHERES, Shapes, filter_of, read
from sim.world import CURRENT, Actor, Down, NotLive, Violated, World, swapped
from tidemill.base.errors import TidemillError, UnavailableError
from tidemill.base.runtime.tasks import run_unit
from tidemill.base.status.status import StatusTracker
from tidemill.metastore.catalogue import CaptureRow, Catalogue
from tidemill.metastore.factory import create_metastore
from tidemill.shapes.definition.planner import FieldError, ShapeRequest
from tidemill.shapes.live_shape import LiveShape
from tidemill.shapes.log import log_set
from tidemill.shapes.log import sqlite_file as file_module
from tidemill.shapes.log import store as store_module
from tidemill.shapes.log.chunks import split_chunk
from tidemill.shapes.log.disk_log import DiskLog, LogRoom
from tidemill.shapes.log.log import LogLimits
from tidemill.shapes.log.log_offset import BEFORE_ALL, LogOffset
from tidemill.shapes.log.saved_shape import SavedTableShape
from tidemill.shapes.log.sqlite_file import FileThreads, Flush, ShapeFile, StoredItem, StoredShape
from tidemill.shapes.log.store import ShapeStore
from tidemill.shapes.memory_budget import Budget

T = TypeVar("T")

BYTES = 1 << 40
BASE = "SELECT json FROM base WHERE id = ? ORDER BY chunk"
ITEMS = "SELECT json FROM items WHERE id = ? ORDER BY tx, op"
RETRY_S = 0.1


class Disk:
    """Disks of a world: some flushes and some reads fail; for a while all flushes fail. Each operation takes up to
    `slow_s` before and again after its effect."""

    def __init__(self, world: World) -> None:
        source = world.source
        self._world = world
        self._flushes = source.choice((0.0, 0.0, 0.05, 0.3))
        self._reads = source.choice((0.0, 0.0, 0.02))
        self.slow_s = source.choice((0.0, 0.05, 0.5))
        start_s = source.uniform(0, 5) if source.random() < 0.3 else float("inf")
        self._out = start_s, start_s + source.uniform(0, 5)

    def worsen(self) -> None:
        """Make the disk slow and failing, for faults that are visible only then."""
        start_s = self._world.source.uniform(2, 6)
        self._out, self.slow_s, self._flushes = (start_s, start_s + 10), 0.3, 0.3

    def flushes(self) -> str:
        """Draw the fault of a flush: "lost" (no effect), "untold" (effect, but reported as failed) or ""."""
        source, now_s = self._world.source, self._world.loop.time()
        if self._world.faults.healed:
            return ""
        if self._out[0] <= now_s < self._out[1] or source.random() < self._flushes:
            return source.choice(("lost", "untold"))
        return ""

    def read(self) -> None:
        """Raise UnavailableError if this read fails."""
        if not self._world.faults.healed and self._world.source.random() < self._reads:
            raise UnavailableError("the simulated disk does not read.")


class SimFile(ShapeFile):
    """Real file on a simulated disk."""

    def __init__(self, path: Path, world: World, disk: Disk) -> None:
        super().__init__(path)
        self._world = world
        self._disk = disk

    def flush(self, flush: Flush) -> None:
        fault = self._disk.flushes()
        self._world.trace(f"{self.path.stem} flush {fault} written={len(flush.written)} ended={len(flush.ended)}")
        if fault != "lost":
            super().flush(flush)
        if fault:
            raise UnavailableError(f"the simulated disk does not write: fault={fault}.")

    def read_shapes(self) -> list[StoredShape]:
        self._disk.read()
        return super().read_shapes()

    def read_base(self, key: int, chunk: int) -> bytes:
        self._disk.read()
        return super().read_base(key, chunk)

    def items(self, key: int, after: tuple[int, int], upto: tuple[int, int], size_bytes: int) -> list[StoredItem]:
        self._disk.read()
        return super().items(key, after, upto, size_bytes)


class SimThreads(FileThreads):
    """Threads that take as long as the disk."""

    slow_s = 0.0

    async def _run(self, threads: Executor, work: Callable[[], T]) -> T:
        source = CURRENT.get().source  # type: ignore[union-attr]
        await asyncio.sleep(source.uniform(0, self.slow_s))
        done = await super()._run(threads, work)
        await asyncio.sleep(source.uniform(0, self.slow_s))
        return done


class Machines:
    """Machines on which the captures run, one after another, and the files that remain when they die."""

    def __init__(self, db: Database, directory: Path, *, count: int) -> None:
        self._db = db
        self._world = db.world
        self._count = count
        self.alternate = 0
        """Number of machines that the lives use in turn; 0 for random choice."""
        self._directory = directory
        self.disk = Disk(db.world)
        self._files: dict[str, SimFile] = {}
        self._catalogue: Catalogue | None = None
        self._limits = LogLimits(chunk_bytes=db.world.source.choice((100, 1 << 20)))
        self.sees: dict[str, frozenset[int]] = {}
        """Handle → transactions that its initial rows contain."""
        self.followed = 0
        """Number of shapes that continued in another process."""

    def open(self, actor: Actor[Any]) -> ShapeStore:
        """Open the store for a new life of the capture, on any machine."""
        number = actor.life.number % self.alternate if self.alternate else self._world.source.randrange(self._count)
        name = f"machine{number}"
        if name in self._files:
            self._files[name].release()  # the lock and all open files ended with their process
        file = self._files[name] = SimFile(self._directory / f"{name}.db", self._world, self.disk)
        nobody = ThreadPoolExecutor(1)  # the simulated loop has no threads and uses none
        self._world.trace(f"{actor.life} on {name}")
        threads, room = SimThreads(nobody, nobody), LogRoom(self._limits, Budget(BYTES), Budget(BYTES))
        threads.slow_s = self.disk.slow_s
        rand, tracker = self._world.rand(), StatusTracker()
        return ShapeStore(file, threads, actor.clock, rand, tracker, "shapes:sim/disk", room)

    def close(self) -> None:
        for file in self._files.values():
            file.release()

    async def lives(self, capture: Actor[Any], count: int) -> None:
        """Run lives one after another, most of them until they stream; each dies at any moment, or leaves in order."""
        source, world = self._world.source, self._world
        for _ in range(count):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(source.choice((0.0, 10.0, 10.0))):
                    await world.until(lambda: capture.ready and capture.node.capture.streaming, every_s=0.02)
            await asyncio.sleep(source.uniform(0, 1.2) ** 2)
            if source.random() < 0.2:
                with contextlib.suppress(Down, TimeoutError):
                    async with asyncio.timeout(5.0):
                        await capture.enter(lambda node: node.leave())
            capture.crash()
            await self.check()
            await asyncio.sleep(source.uniform(0, 0.1))
            await capture.start()

    async def check(self) -> None:
        """Check, while no process runs, that files that may be restored have every confirmed change once."""
        if self._catalogue is None:
            world = self._world
            self._catalogue = Catalogue(
                create_metastore(world.consensus, world.objects, world.clock, world.rand(), holder="oracle"),
                world.clock, world.rand(),
            )  # fmt: skip
        row = await self._catalogue.get(CaptureRow, NAME)
        # If no table was copied, the capture and its shapes begin again.
        goes_on = any(table.snapshot is not None for table in await self._catalogue.tables(NAME))
        for file in self._files.values():
            file.release()
            db = apsw.Connection(str(file.path), flags=apsw.SQLITE_OPEN_READONLY)
            found = db.execute("SELECT name FROM owner").fetchall()
            if row is not None and goes_on and found[0][0] in row.taps:
                self._check_file(db, self._db.confirmed or 0)
            db.close()

    def _check_file(self, db: apsw.Connection, confirmed: int) -> None:
        shapes: list[tuple[Any, ...]] = db.execute("SELECT id, handle, record, tx FROM shapes").fetchall()
        for key, handle, record, last in shapes:
            kept = SavedTableShape.decode(record)
            rows: dict[str, dict[str, Any]] = {}
            base: list[tuple[Any, ...]] = db.execute(BASE, (key,)).fetchall()
            items: list[tuple[Any, ...]] = db.execute(ITEMS, (key,)).fetchall()
            for item in split_chunk([joined for (joined,) in (*base, *items) if joined]):
                read(json.loads(item), rows, handle)
            check_rows(self._db, self.sees[handle], kept.relation.oid, kept.request, max(confirmed, last), rows,
                       f"a stored shape lacks confirmed changes: handle={handle}")  # fmt: skip


def check_rows(
    db: Database, sees: frozenset[int], oid: int, request: ShapeRequest, lsn: int, rows: dict[str, Any], wrong: str
) -> None:
    where = filter_of(db, oid, request)
    due = {key: row for key, row in db.select(oid, sees, lsn).items() if where is None or where.matches(row)}
    held = {str(row["id"]): row for row in rows.values()}
    if held != due:
        raise Violated(f"{wrong} of=t{oid} where={request.where!r} lsn={lsn} held={held} due={due}")


class Answer(msgspec.Struct, frozen=True):
    """Answer to a client. `seen` is the LSN as of which it is up to date; None if there is more."""

    items: list[bytes]
    end: LogOffset
    seen: int | None


class KeptShapes(Shapes):
    """Stored shapes of one process, served as by a node (service.py, http/routes.py)."""

    def __init__(self, machines: Machines, *args: Any, store: ShapeStore, late: bool) -> None:
        super().__init__(*args, late=late, store=store)
        self.source.sees = machines.sees
        self._machines = machines
        self._store = store
        self._served: dict[str, LiveShape] = {}
        self._pumps: list[asyncio.Task[None]] = []

    def start(self, readers: int) -> None:
        async def pump() -> None:
            await self._tables.restore("sim", self._take_in_again)
            await self._sink.run()

        for body in (pump, self._store.run):
            kept = run_unit("shapes:sim", body, tracker=StatusTracker(), clock=self._clock)
            self._pumps.append(self._tasks.spawn(kept, name="shapes"))
        self._run(readers)

    async def leave(self) -> None:
        """Stop in order, after the capture has stopped."""
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)
        await self._store.aclose()

    def _take_in_again(self, saved: StoredShape, kept: SavedTableShape, log: DiskLog) -> LiveShape:
        shape = LiveShape(saved.handle, kept.definition, kept.schema_json, log)
        shape.restored = True
        self._served[shape.handle] = shape
        self._machines.followed += 1
        self._world.trace(f"shape {shape.handle} is followed on from {log.end}")
        return shape

    async def open(self, oid: int, request: ShapeRequest) -> str:
        """Return the handle of a new loaded shape; "" if the table is not captured now. Raises the errors of `plan`."""
        try:
            plan = await self._tables.plan_request(request)
        except FieldError:
            return ""
        shape = self._shape(plan, LogLimits())
        self._served[shape.handle] = shape
        self._world.trace(f"shape {shape.handle} of t{oid} where {request.where!r}")
        try:
            await plan.build(shape)
        except TidemillError:
            self._end(shape, "it cannot be loaded")
            raise
        if self._checked(shape) is None:
            raise UnavailableError(f"the shape has ended: {shape.end_reason}.")
        return shape.handle

    async def fetch(self, handle: str, offset: LogOffset) -> Answer | None:
        """Return the next items, or None for must-refetch. Raises UnavailableError."""
        if self._sink.restoring:
            raise UnavailableError("the shapes of an earlier life are being restored.")
        shape = self._checked(self._served.get(handle))
        if shape is None:
            return None
        if offset > shape.log.end and offset.tx > self._tables.last_seen(shape):
            if not shape.restored:
                raise Violated(f"a client is ahead of its shape: handle={handle} offset={offset} end={shape.log.end}")
            raise UnavailableError("the changes up to this offset come again after a restart.")
        chunk = await shape.log.fetch(offset)
        if self._checked(shape) is None:
            return None
        seen = max(self._tables.last_seen(shape), chunk.end.tx) if chunk.complete else None
        return Answer(list(split_chunk(chunk.items)), chunk.end, seen)

    async def delete(self, handle: str) -> None:
        shape = self._served.get(handle)
        if shape is not None:
            self._end(shape, "deleted on request")

    def _checked(self, shape: LiveShape | None) -> LiveShape | None:
        """Return the shape, or None if it has ended. Raises Violated if it broke."""
        if shape is not None and shape.broken:
            raise Violated(f"a shape broke: handle={shape.handle} error={shape.error}")
        if shape is not None and shape.has_ended:
            self._served.pop(shape.handle, None)
            self._tables.detach(shape)
        return None if shape is None or shape.has_ended else shape


class Followers:
    """Clients that live as long as the world."""

    def __init__(self, db: Database, capture: Actor[Any], machines: Machines) -> None:
        self._db = db
        self._world = db.world
        self._capture = capture
        self._machines = machines
        self._handles: set[str] = set()
        self._seen: dict[int, int] = {}
        """Client number → LSN as of which it is up to date, and was verified."""
        self.refetches = 0

    async def follow(self, number: int) -> None:
        """Follow one shape after another, forever."""
        source = self._world.source
        self._seen[number] = 0
        while True:
            oid = source.choice(self._db.captured)
            request = ShapeRequest(f"t{oid}", source.choice(WHERES), replica=source.choice(("default", "full")))
            handle = await self._ask(lambda shapes, oid=oid, request=request: shapes.open(oid, request))  # type: ignore[misc]
            if not handle:
                continue
            if handle in self._handles:
                raise Violated(f"a handle was given twice: handle={handle}")
            self._handles.add(handle)
            await self._read(number, handle, oid, request)

    async def _read(self, number: int, handle: str, oid: int, request: ShapeRequest) -> None:
        source, rows, offset = self._world.source, dict[str, dict[str, Any]](), BEFORE_ALL
        for _ in range(source.choice((20, 1_000_000, 1_000_000))):
            answer = await self._ask(lambda shapes, offset=offset: shapes.fetch(handle, offset))  # type: ignore[misc]
            if answer is None:
                self.refetches += 1
                return
            for item in answer.items:
                read(json.loads(item), rows, handle)
            offset = answer.end
            if answer.seen is not None:
                check_rows(self._db, self._machines.sees[handle], oid, request, answer.seen, rows,
                           f"a client's rows are not the table's: handle={handle}")  # fmt: skip
                self._seen[number] = answer.seen
                await asyncio.sleep(source.uniform(0, source.choice((0.2, 0.4, 5.0))))
        await self._ask(lambda shapes: shapes.delete(handle))

    async def _ask(self, question: Callable[[KeptShapes], Awaitable[T]]) -> T:
        """Ask the process that serves, until one answers."""
        while True:
            with contextlib.suppress(TidemillError, Down):
                return await self._capture.enter(lambda node: question(node.shapes))
            await asyncio.sleep(self._world.source.uniform(0, 2 * RETRY_S))

    async def settled(self, lsn: int, within_s: float) -> None:
        """Wait until all clients are up to date with this LSN. Raises NotLive."""
        try:
            async with asyncio.timeout(within_s):
                await self._world.until(lambda: min(self._seen.values(), default=lsn) >= lsn)
        except TimeoutError as error:
            raise NotLive(f"clients do not reach the end: seen={self._seen} last={lsn}") from error


@contextlib.contextmanager
def quickened(world: World, *, harsh: bool, patient: bool) -> Iterator[None]:
    """Flush within a world's time, on a disk without power failures; often with `harsh`. With `patient`, the store
    waits until a fault of the disk ends."""
    source = world.source
    with contextlib.ExitStack() as stack:
        for module, name, value in (
            (file_module, "SYNCHRONOUS", "OFF"),
            (store_module, "FLUSH_S", 0.02 if harsh else source.choice((0.02, 0.3, 1.0))),
            (log_set, "FLUSH_BYTES", source.choice((1, 1 << 20))),
            (store_module, "RETRY_S", RETRY_S),
            (store_module, "ABANDON_AFTER_S", 10.0 if patient else 0.3),
        ):
            stack.enter_context(swapped(module, name, value))
        yield
