"""Which logs of a captured database have something to write, when it is written, and what is told then.

    changed ─┐                       ┌── thread ──┐
    recorded ─┼► due ─ FLUSH_S or    │  one       │   logs: cool, was_saved
    ended ───┘        FLUSH_BYTES ──►│ transaction│──► durable(position)
                                     └────────────┘

T1  `position()` is asked in the same moment in which it is decided which logs a flush takes: what is at or below it is
    in the flush, or was in an earlier one, or had no effect. `durable(position)` is called when the whole flush is.
    It is put together and written FLUSH_LOGS logs at a time, each of them as it is then.
T2  Only what has a row is there after a restart, and its row is written with all that its readers were shown.
T3  A file whose name the capture's row has is complete, but for what the stream brings again. So one that cannot be
    written for PATIENCE_S is given up before anything is confirmed without it: `name` writes a name into the row that
    no file has. What is in memory is served on. The file gets a name of its own again with a flush that holds all
    there is, made while it is waited for, and the row gets that name after it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Container, Iterable, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from itertools import islice
from operator import attrgetter
from typing import TypeVar
from weakref import WeakValueDictionary, finalize

import structlog

from tidemill.base.clock import Clock, Rand
from tidemill.base.errors import TidemillError, UnavailableError
from tidemill.base.runtime.tasks import sentence
from tidemill.base.status.status import StatusTracker
from tidemill.shapes.log.disk_log import DiskLog
from tidemill.shapes.log.log import LogLimits, ReadLease
from tidemill.shapes.log.log_offset import LogOffset
from tidemill.shapes.log.sqlite_file import Flush, Item, Saved, ShapeFile, Written
from tidemill.shapes.memory_budget import Budget, take_of_all

log = structlog.get_logger()
T = TypeVar("T")

FLUSH_S = 1.0
"""What is shown is durable after so long."""

FLUSH_BYTES = 1 << 20
"""… or at once, when so much waits."""

FLUSH_LOGS = 500
"""In one transaction, so that the loop does not stand still for logs that changed by the thousand."""

ORDERED_LOGS = 16 * FLUSH_LOGS
"""As many are written in the order of their ids, which is the file's: rows side by side share its pages. To order them
takes the loop two milliseconds."""

LENT_OF_MEMORY = 4
"""What is read for readers who are slow to take it may hold so small a part of the memory."""

RETRY_S = 1.0
PATIENCE_S = 10.0
"""For so long a capture's WAL waits for a disk that fails."""


class _Taken:
    """What a flush takes; put back when it fails, but for what was durable then. What failed may have happened, and is
    written over."""

    def __init__(self, changed: dict[DiskLog, None], records: dict[DiskLog, Saved]) -> None:
        self.changed = changed
        self.records = records
        self._ordered: deque[DiskLog] = deque()

    def part(self) -> list[DiskLog]:
        if not self._ordered:
            self._ordered.extend(sorted(islice(self.changed, ORDERED_LOGS), key=attrgetter("key")))
        return [self._ordered.popleft() for _ in range(min(FLUSH_LOGS, len(self._ordered)))]

    def done(self, part: Iterable[DiskLog]) -> None:
        for log in part:
            del self.changed[log]
            self.records.pop(log, None)


class ShapeStore:
    """`run` in a task, `aclose` at the end. `position` and `durable` belong to the sink of the database's changes."""

    def __init__(
        self,
        file: ShapeFile,
        readers: Executor,
        writer: Executor,
        clock: Clock,
        rand: Rand,
        tracker: StatusTracker,
        mark: str,
        limits: LogLimits,
        memory: Budget,
        disk: Budget,
    ) -> None:
        """Opens the file: raises UnavailableError. `writer`: one thread, this store's own. `mark`: under which a disk
        that fails is told."""
        self.file = file
        self.owner = file.open()
        self.position: Callable[[], int] = lambda: 0
        self.taken: Callable[[], int] = lambda: 0
        self._era = 0
        """How often positions became those of another history: what a flush says of one is void in the next."""
        self.durable: Callable[[int], None] = lambda _: None
        self.name: Callable[[str], Awaitable[None]] | None = None
        self.waited_for = True
        """False: nothing is held back for this file (T3)."""
        self._unnamed = False
        """The file's name is not in the row yet."""
        self._named_from = 0
        """It will be, once all that came while nothing waited for the file is evaluated, and in it."""
        self._readers = readers
        self._writer = writer
        self._clock = clock
        self._rand = rand
        self._tracker = tracker
        self._mark = mark
        self._limits = limits
        self._memory = memory
        self.lent = Budget(memory.limit_bytes // LENT_OF_MEMORY, whose="all that is read from disk for readers")
        self._bases: WeakValueDictionary[tuple[int, int], ReadLease] = WeakValueDictionary()
        """(log, chunk of its base) → what some reader has of it"""
        self._disk = disk
        self.holds_shapes = file.holds_shapes
        """From an earlier life."""
        self._first_key = self._next_key = file.next_id
        self._known: dict[int, DiskLog] = {}
        self._changed: dict[DiskLog, None] = {}
        self._records: dict[DiskLog, Saved] = {}
        self._ended: set[int] = set()
        self._anew = False
        self._leftovers: dict[int, None] = {}
        self._unswept = file.next_id > 1
        """There may be leftovers of earlier lives that are not among these."""
        self._warm: dict[DiskLog, None] = {}
        """They have something in memory that is durable since the last flush."""
        self._waiting_bytes = 0
        self._flushing = False
        self._forgotten: set[int] = set()
        self._due = asyncio.Event()
        self._much = asyncio.Event()
        self._room = asyncio.Event()
        self._failing_s: float | None = None
        if self._unswept:
            self._due.set()

    # -- whose it is -------------------------------------------------------------------------------------------

    def claim(self, last: Collection[str]) -> bool:
        """`last`: the files that have all that the stream brought before it begins now. False: this one is not among
        them, so that all it holds is over, and it has another name."""
        if self.owner in last:
            return True
        self.owner = self._new_name()
        self._anew = True
        self._unswept = True
        self._due.set()
        return False

    def went_back(self) -> None:
        """Positions are those of another history from here on."""
        self._named_from = 0
        self._era += 1

    def start_over(self) -> None:
        """Nothing that the file holds is there any more. The row has its name until it gets this one's, and finds no
        shape under it: that is written with the next flush."""
        self.claim(())
        self._unnamed = True

    def _new_name(self) -> str:
        return f"{self._rand.below(1 << 64):016x}"

    async def saved(self) -> list[Saved]:
        """What the file holds; nothing of a file that has another name now."""
        return [] if self._anew else await self._on_thread(self._readers, self.file.saved)

    def forget(self, saved: Saved) -> None:
        """A shape that cannot go on is not there any more, as soon as that is durable."""
        self._forgotten.add(saved.id)
        self._ended.add(saved.id)
        self._due.set()

    def forgets(self, saved: Saved) -> bool:
        return saved.id in self._forgotten

    # -- logs --------------------------------------------------------------------------------------------------

    def new_log(self) -> DiskLog:
        key, self._next_key = self._next_key, self._next_key + 1
        return self._keep(DiskLog(key, self, self._limits, self._memory, self._disk))

    def old_log(self, saved: Saved) -> DiskLog:
        """Raises Full."""
        return self._keep(DiskLog(saved.id, self, self._limits, self._memory, self._disk, saved))

    def _keep(self, made: DiskLog) -> DiskLog:
        self._known[made.key] = made
        return made

    def record(self, log: DiskLog, handle: str, record: bytes, snapshot: str) -> None:
        """From the next flush on it is there after a restart (T2)."""
        if log.key in self._known:
            self._records[log] = Saved(log.key, handle, record, snapshot, log.chunks, (0, 0), log.base_bytes, 0)
            self.changed(log, 0)

    def end(self, log: DiskLog) -> None:
        """It is not there after a restart, as soon as that is durable. Idempotent."""
        if self._known.pop(log.key, None) is not None:
            self._changed.pop(log, None)
            self._records.pop(log, None)
            self._ended.add(log.key)
            self._due.set()
            self._room.set()

    @property
    def logs(self) -> Container[int]:
        """Ids of those that live."""
        return self._known

    @property
    def clean(self) -> bool:
        """The file holds all there is to hold."""
        return not (self._flushing or self._changed or self._ended or self._anew)

    def changed(self, log: DiskLog, size_bytes: int) -> None:
        if log.key not in self._known:
            return
        self._changed[log] = None
        self._waiting_bytes += size_bytes
        self._due.set()
        if self._waiting_bytes >= FLUSH_BYTES:
            self._much.set()

    async def room(self, log: DiskLog) -> None:
        """Until the base that is being read into this log is not too far ahead of the file."""
        while log.crowded and self._failing_s is None:
            self._room.clear()
            self._much.set()
            await self._room.wait()

    # -- Pieces ------------------------------------------------------------------------------------------------

    async def base(self, key: int, chunk: int) -> Sequence[bytes]:
        """() when it is gone. Raises UnavailableError, Full."""
        place = (key, chunk)
        lent = self._bases.get(place)
        if lent is None:
            read = await self._on_thread(self._readers, lambda: self.file.base(key, chunk))
            lent = self._bases.get(place)  # another reader may have been first
            if lent is None and read:
                lent = self._bases[place] = self.lend([read])
        return lent if lent is not None else ()

    async def items(self, key: int, after: LogOffset, upto: LogOffset, size_bytes: int) -> list[Item]:
        places = (after.tx, after.op), (upto.tx, upto.op)
        return await self._on_thread(self._readers, lambda: self.file.items(key, *places, size_bytes))

    def lend(self, items: Sequence[bytes]) -> ReadLease:
        """Raises Full."""
        size = sum(map(len, items))
        take_of_all(size, self.lent, self._memory)
        lent = ReadLease(items)
        finalize(lent, self._lent_back, size).atexit = False
        return lent

    def _lent_back(self, size_bytes: int) -> None:
        self.lent.give(size_bytes)
        self._memory.give(size_bytes)

    # -- the flush ---------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """For ever. What the disk refuses is told and tried again; anything else is raised."""
        while True:
            await self._due.wait()
            with suppress(TimeoutError):
                async with asyncio.timeout(FLUSH_S):
                    await self._much.wait()
            self._due.clear()
            self._much.clear()  # also where nothing is flushed: a wait that never waits would keep the loop
            try:
                if not self.waited_for:
                    await self._take_up_again()
                elif not self.clean:
                    await self.flush()
                if self._unnamed and self.clean and self.position() >= self._named_from:
                    await self._write_name(self.owner)
                    self._unnamed = False
                elif self._unnamed:
                    self._due.set()
                await self._clear_away()
            except UnavailableError as error:
                await self._failed(error)
            else:
                if self._failing_s is not None:
                    self._failing_s = None
                    self._tracker.heal(self._mark)

    async def flush(self) -> None:
        """Raises UnavailableError; whatever is not known to be durable is written again then."""
        self._much.clear()
        self._waiting_bytes = 0
        position, era = self.position(), self._era
        taken = _Taken(self._changed, self._records)
        self._changed, self._records = {}, {}
        owner, ended, anew = self.owner, tuple(self._ended), self._anew
        warm, self._warm = self._warm, {}
        self._flushing = True
        try:
            while True:
                part = taken.part()
                written = [self._written(log, taken) for log in part if log.key in self._known]
                flush = Flush(owner, anew, written, ended)
                await self._on_thread(self._writer, lambda flush=flush: self.file.flush(flush))  # type: ignore[misc]
                taken.done(part)
                self._saved(written, warm)
                self._ended.difference_update(ended)
                self._leftovers |= dict.fromkeys(ended)
                self._anew = self._anew and not anew
                ended, anew = (), False
                if not taken.changed:
                    break
        except BaseException:
            self._put_back(taken)
            self._due.set()
            raise
        finally:
            self._flushing = False
            self._warm |= warm
        await self._cool(warm)
        self._room.set()
        if self._era == era:
            self.durable(position)

    def _saved(self, written: Iterable[Written], warm: dict[DiskLog, None]) -> None:
        """These are durable; of the same logs what was durable a flush ago leaves memory."""
        for each in written:
            log = self._known.get(each.id)
            if log is not None:
                log.cool()
                log.was_saved(len(each.base), len(each.items))
                warm.pop(log, None)
                self._warm[log] = None

    async def _cool(self, warm: dict[DiskLog, None]) -> None:
        """Those that did not change since."""
        for number, log in enumerate(list(warm)):
            log.cool()
            self._warm.pop(log, None)
            if number % FLUSH_LOGS == FLUSH_LOGS - 1:
                await asyncio.sleep(0)

    @staticmethod
    def _written(log: DiskLog, taken: _Taken) -> Written:
        chunks, items = log.unsaved()
        made = [Item(item.offset.tx, item.offset.op, item.json) for item in items]
        row = taken.records.get(log)
        if row is not None:
            # Items that were shown before its row was due are in an earlier flush.
            end = (log.end.tx, log.end.op) if log.end.tx else (0, 0)
            row = Saved(
                row.id, row.handle, row.record, row.snapshot, row.chunks, end, row.base_bytes, log.log_bytes,
            )  # fmt: skip
        return Written(log.key, chunks, made, log.log_bytes, row)

    def _put_back(self, taken: _Taken) -> None:
        known = self._known
        self._changed = {log: None for log in (*taken.changed, *self._changed) if log.key in known}
        self._records = {**{log: row for log, row in taken.records.items() if log.key in known}, **self._records}

    async def _clear_away(self) -> None:
        """What is left of shapes that are over, for as long as nothing is to be written."""
        if self._unswept and self.clean:
            self._unswept = False
            try:
                found = await self._on_thread(self._writer, lambda: self.file.leftovers(self._first_key))
            except BaseException:
                self._unswept = True
                raise
            self._leftovers |= dict.fromkeys(found)
        while self._leftovers and self.clean:
            key = next(reversed(self._leftovers))
            if not await self._on_thread(self._writer, lambda key=key: self.file.clear(key)):  # type: ignore[misc]
                del self._leftovers[key]

    async def _failed(self, error: UnavailableError) -> None:
        now_s = self._clock.monotonic_s()
        if self._failing_s is None:
            self._failing_s = now_s
        self._room.set()
        self._tracker.fail(self._mark, str(error), now_ms=self._clock.now_ms())
        if self.waited_for and now_s - self._failing_s >= PATIENCE_S:
            await self._give_up(error)
        await asyncio.sleep(RETRY_S)
        self._due.set()
        self._much.set()

    async def _give_up(self, cause: UnavailableError) -> None:
        """T3."""
        try:
            await self._write_name(self._new_name())
        except UnavailableError as error:
            log.warning("shapes' file cannot be given up", mark=self._mark, error=str(error))
            self._unnamed = True  # what the row names is not known
            return
        log.error("shapes are not kept over a restart: their disk fails", mark=self._mark, error=str(cause))
        self._let_go()

    async def _take_up_again(self) -> None:
        """T3: a flush of unknown outcome must not leave a name that the row may get. Raises UnavailableError."""
        self.owner = self._new_name()
        self.waited_for = True
        self._named_from = self.taken()
        try:
            await self.flush()
        except BaseException:
            self._let_go()
            raise
        self._unnamed = True

    def _let_go(self) -> None:
        self.waited_for = False
        self.durable(self.position())

    async def _write_name(self, name: str) -> None:
        """Raises UnavailableError; it may be written all the same."""
        if self.name is None:
            raise UnavailableError("the capture does not stream.")
        try:
            await self.name(name)
        except TidemillError as error:
            raise UnavailableError(f"the capture's row is not changed: error={sentence(error)}.") from error

    async def aclose(self) -> None:
        """Write what is not written yet, and let go of the file. `run` is over."""
        try:
            if not self.clean:
                await self.flush()
        except UnavailableError as error:
            log.warning("some of the shapes' changes are read again", mark=self._mark, error=str(error))
        finally:
            self._known, self._ended = {}, set()  # whoever drops a log from now on does not mean what the file holds
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(None, self._writer.shutdown)
            await loop.run_in_executor(None, self.file.release)

    async def _on_thread(self, threads: Executor, work: Callable[[], T]) -> T:
        """Raises UnavailableError also when there is no thread to be had."""
        try:
            running = asyncio.get_running_loop().run_in_executor(threads, work)
        except RuntimeError as error:
            raise UnavailableError(f"no thread for the shapes' file: error={error}.") from error
        return await running
