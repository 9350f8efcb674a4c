"""Schedule the flushes of the shape logs of one captured database, and report the durable positions.

    changed ─┐                       ┌── thread ──┐
    recorded ─┼► due ─ FLUSH_S or    │  one       │   logs: mark_saved
    ended ───┘        FLUSH_BYTES ──►│ transaction│──► durable(position)
                                     └────────────┘

The store owns the file and the sets of logs that have something to write, were ended, or can release memory. Evaluation
of changes belongs to the tap, which provides `position` and receives `durable`.

- Invariant (consistent position): `position()` is read in the same step in which the logs of a flush are selected.
  Every change at or below it is in this flush or in an earlier one, or had no effect. `durable(position)` is called
  after the whole flush. A flush is written in parts of FLUSH_LOGS logs; each part has the state of its logs at that
  time.
- Invariant (row with its items): only a shape with a row exists after a restart, and its row is written together with
  everything that its readers were shown.
- Invariant (named files are complete): a file whose name is in the capture's row is complete, except for what the
  stream repeats. So a file that cannot be written for ABANDON_AFTER_S is abandoned before anything is confirmed without
  it: `name` writes a name into the row that no file has. Shapes are still served from memory. When the disk works
  again, the file gets a new name with a flush that contains everything, while commits wait for it again, and the row
  gets that name afterwards.
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
from tidemill.base.runtime.tasks import error_sentence
from tidemill.base.status.status import StatusTracker
from tidemill.shapes.log.chunks import ReadLease
from tidemill.shapes.log.disk_log import DiskLog
from tidemill.shapes.log.log import LogLimits
from tidemill.shapes.log.log_offset import LogOffset
from tidemill.shapes.log.sqlite_file import Flush, ShapeFile, ShapeWrite, StoredItem, StoredShape
from tidemill.shapes.memory_budget import Budget, reserve_in_all

log = structlog.get_logger()
T = TypeVar("T")

FLUSH_S = 1.0
"""Longest delay until a visible change is durable."""

FLUSH_BYTES = 1 << 20
"""A flush starts immediately if this much waits for it."""

FLUSH_LOGS = 500
"""Logs in one transaction, so that thousands of changed logs do not block the event loop."""

SORTED_LOGS = 16 * FLUSH_LOGS
"""Logs that are sorted by id together. Ids are the order of the file, so neighbours share its pages. Sorting this many
takes the event loop two milliseconds."""

READ_MEMORY_DIVISOR = 4
"""Divisor: data read from disk for slow readers may use this fraction of the memory."""

RETRY_S = 1.0
ABANDON_AFTER_S = 10.0
"""Time for which a failing disk may hold back a capture's WAL."""


class _FlushQueue:
    """Logs that a flush has taken over. If the flush fails, those not yet durable are put back. A failed part may have
    been written, and is overwritten."""

    def __init__(self, changed: dict[DiskLog, None], records: dict[DiskLog, StoredShape]) -> None:
        self.changed = changed
        self.records = records
        self._ordered: deque[DiskLog] = deque()

    def next_part(self) -> list[DiskLog]:
        if not self._ordered:
            self._ordered.extend(sorted(islice(self.changed, SORTED_LOGS), key=attrgetter("key")))
        return [self._ordered.popleft() for _ in range(min(FLUSH_LOGS, len(self._ordered)))]

    def done(self, part: Iterable[DiskLog]) -> None:
        for log in part:
            del self.changed[log]
            self.records.pop(log, None)


class ShapeStore:
    """Flushes logs: `run` in a task, `aclose` at the end. `position` and `durable` are set by the tap of the
    database."""

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
        """Open the file. Raises UnavailableError.

        `writer`: one thread, used by this store only. `mark`: the stage status that reports a failing disk.
        """
        self.file = file
        self.owner = file.open()
        self.position: Callable[[], int] = lambda: 0
        self.taken: Callable[[], int] = lambda: 0
        self._era = 0
        """Number of times that positions became those of another history; a flush's position is void after such a
        change."""
        self.durable: Callable[[int], None] = lambda _: None
        self.name: Callable[[str], Awaitable[None]] | None = None
        self.waited_for = True
        """False while commits do not wait for this file, because its disk fails."""
        self._unnamed = False
        """True while the file's name is not in the capture's row."""
        self._named_from = 0
        """Position that must be evaluated and durable before the name is written: the newest one that arrived while
        commits did not wait for the file."""
        self._readers = readers
        self._writer = writer
        self._clock = clock
        self._rand = rand
        self._tracker = tracker
        self._mark = mark
        self._limits = limits
        self._memory = memory
        self.lent = Budget(memory.limit_bytes // READ_MEMORY_DIVISOR, whose="all that is read from disk for readers")
        self._bases: WeakValueDictionary[tuple[int, int], ReadLease] = WeakValueDictionary()
        """(log, chunk of its base) → the copy that some reader has"""
        self._disk = disk
        self.holds_shapes = file.holds_shapes
        """True if the file has shapes of an earlier run."""
        self._first_key = self._next_key = file.next_id
        self._known: dict[int, DiskLog] = {}
        self._changed: dict[DiskLog, None] = {}
        self._records: dict[DiskLog, StoredShape] = {}
        self._ended: set[int] = set()
        self._anew = False
        self._leftovers: dict[int, None] = {}
        self._unswept = file.next_id > 1
        """True while leftovers of earlier runs may be missing in `_leftovers`."""
        self._warm: dict[DiskLog, None] = {}
        """Logs with data in memory that is durable since the last flush."""
        self._waiting_bytes = 0
        self._flushing = False
        self._forgotten: set[int] = set()
        self._due = asyncio.Event()
        self._much = asyncio.Event()
        self._room = asyncio.Event()
        self._failing_s: float | None = None
        if self._unswept:
            self._due.set()

    # -- the name of the file ----------------------------------------------------------------------------------

    def claim(self, last: Collection[str]) -> bool:
        """Return whether the file can be continued.

        `last`: names of the files that have everything that the stream delivered before its current start. A file that
        is not among them is obsolete: its shapes are deleted, and it gets a new name.
        """
        if self.owner in last:
            return True
        self.owner = self._new_name()
        self._anew = True
        self._unswept = True
        self._due.set()
        return False

    def reset_history(self) -> None:
        """Invalidate all positions: from now on they belong to another history."""
        self._named_from = 0
        self._era += 1

    def discard_shapes(self) -> None:
        """Discard all shapes of the file under a new name. Until the row has that name it has the old one, and no file
        matches it. The name is written with the next flush."""
        self.claim(())
        self._unnamed = True

    def _new_name(self) -> str:
        return f"{self._rand.below(1 << 64):016x}"

    async def read_saved(self) -> list[StoredShape]:
        """Return the shapes that the file has; none if it got a new name."""
        return [] if self._anew else await self._run_on_thread(self._readers, self.file.read_shapes)

    def delete_saved(self, saved: StoredShape) -> None:
        """Delete a shape that cannot continue; effective with the next flush."""
        self._forgotten.add(saved.id)
        self._ended.add(saved.id)
        self._due.set()

    def is_deleted(self, saved: StoredShape) -> bool:
        return saved.id in self._forgotten

    # -- logs --------------------------------------------------------------------------------------------------

    def create_log(self) -> DiskLog:
        key, self._next_key = self._next_key, self._next_key + 1
        return self._register_log(DiskLog(key, self, self._limits, self._memory, self._disk))

    def restore_log(self, saved: StoredShape) -> DiskLog:
        """Return the log of a stored shape. Raises OverBudgetError."""
        return self._register_log(DiskLog(saved.id, self, self._limits, self._memory, self._disk, saved))

    def _register_log(self, made: DiskLog) -> DiskLog:
        self._known[made.key] = made
        return made

    def save_record(self, log: DiskLog, handle: str, record: bytes, snapshot: str) -> None:
        """Store a shape's record with the next flush; from then on the shape exists after a restart."""
        if log.key in self._known:
            self._records[log] = StoredShape(log.key, handle, record, snapshot, log.chunks, (0, 0), log.base_bytes, 0)
            self.mark_changed(log, 0)

    def end(self, log: DiskLog) -> None:
        """Delete a log with the next flush. Idempotent."""
        if self._known.pop(log.key, None) is not None:
            self._changed.pop(log, None)
            self._records.pop(log, None)
            self._ended.add(log.key)
            self._due.set()
            self._room.set()

    @property
    def live_log_ids(self) -> Container[int]:
        """Ids of the live logs."""
        return self._known

    @property
    def clean(self) -> bool:
        """True if the file contains everything."""
        return not (self._flushing or self._changed or self._ended or self._anew)

    def mark_changed(self, log: DiskLog, size_bytes: int) -> None:
        if log.key not in self._known:
            return
        self._changed[log] = None
        self._waiting_bytes += size_bytes
        self._due.set()
        if self._waiting_bytes >= FLUSH_BYTES:
            self._much.set()

    async def wait_for_room(self, log: DiskLog) -> None:
        """Wait until the base that is loaded into this log is not too far ahead of the file."""
        while log.is_crowded and self._failing_s is None:
            self._room.clear()
            self._much.set()
            await self._room.wait()

    # -- reading -----------------------------------------------------------------------------------------------

    async def read_base(self, key: int, chunk: int) -> Sequence[bytes]:
        """Return a chunk of the base, () if it is deleted. Raises UnavailableError, OverBudgetError."""
        place = (key, chunk)
        lent = self._bases.get(place)
        if lent is None:
            read = await self._run_on_thread(self._readers, lambda: self.file.read_base(key, chunk))
            lent = self._bases.get(place)  # another reader may have been faster
            if lent is None and read:
                lent = self._bases[place] = self.lend_items([read])
        return lent if lent is not None else ()

    async def items(self, key: int, after: LogOffset, upto: LogOffset, size_bytes: int) -> list[StoredItem]:
        places = (after.tx, after.op), (upto.tx, upto.op)
        return await self._run_on_thread(self._readers, lambda: self.file.items(key, *places, size_bytes))

    def lend_items(self, items: Sequence[bytes]) -> ReadLease:
        """Count items as read from disk until their last reader releases them. Raises OverBudgetError."""
        size = sum(map(len, items))
        reserve_in_all(size, self.lent, self._memory)
        lent = ReadLease(items)
        finalize(lent, self._release_lent, size).atexit = False
        return lent

    def _release_lent(self, size_bytes: int) -> None:
        self.lent.release(size_bytes)
        self._memory.release(size_bytes)

    # -- the flush ---------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Flush forever. A failure of the disk is reported and retried; other errors are raised."""
        while True:
            await self._due.wait()
            with suppress(TimeoutError):
                async with asyncio.timeout(FLUSH_S):
                    await self._much.wait()
            self._due.clear()
            self._much.clear()  # also if nothing is flushed: a set event would turn this into a busy loop
            try:
                if not self.waited_for:
                    await self._resume_file()
                elif not self.clean:
                    await self.flush()
                if self._unnamed and self.clean and self.position() >= self._named_from:
                    await self._write_name(self.owner)
                    self._unnamed = False
                elif self._unnamed:
                    self._due.set()
                await self._clear_leftovers()
            except UnavailableError as error:
                await self._handle_failure(error)
            else:
                if self._failing_s is not None:
                    self._failing_s = None
                    self._tracker.clear_failure(self._mark)

    async def flush(self) -> None:
        """Write all changes. Raises UnavailableError; what is not known to be durable is written again by the next
        flush."""
        self._much.clear()
        self._waiting_bytes = 0
        position, era = self.position(), self._era
        taken = _FlushQueue(self._changed, self._records)
        self._changed, self._records = {}, {}
        owner, ended, anew = self.owner, tuple(self._ended), self._anew
        warm, self._warm = self._warm, {}
        self._flushing = True
        try:
            while True:
                part = taken.next_part()
                written = [self._shape_write(log, taken) for log in part if log.key in self._known]
                flush = Flush(owner, anew, written, ended)
                await self._run_on_thread(self._writer, lambda flush=flush: self.file.flush(flush))  # type: ignore[misc]
                taken.done(part)
                self._mark_saved(written, warm)
                self._ended.difference_update(ended)
                self._leftovers |= dict.fromkeys(ended)
                self._anew = self._anew and not anew
                ended, anew = (), False
                if not taken.changed:
                    break
        except BaseException:
            self._requeue(taken)
            self._due.set()
            raise
        finally:
            self._flushing = False
            self._warm |= warm
        await self._release_warm(warm)
        self._room.set()
        if self._era == era:
            self.durable(position)

    def _mark_saved(self, written: Iterable[ShapeWrite], warm: dict[DiskLog, None]) -> None:
        """Note that these are durable; release from memory what was durable a flush ago in the same logs."""
        for each in written:
            log = self._known.get(each.id)
            if log is not None:
                log.release_durable()
                log.mark_saved(len(each.base), len(each.items))
                warm.pop(log, None)
                self._warm[log] = None

    async def _release_warm(self, warm: dict[DiskLog, None]) -> None:
        """Release memory of the logs that did not change since."""
        for number, log in enumerate(list(warm)):
            log.release_durable()
            self._warm.pop(log, None)
            if number % FLUSH_LOGS == FLUSH_LOGS - 1:
                await asyncio.sleep(0)

    @staticmethod
    def _shape_write(log: DiskLog, taken: _FlushQueue) -> ShapeWrite:
        chunks, items = log.unsaved()
        row = taken.records.get(log)
        if row is not None:
            # Items that were visible before the row was due are in an earlier flush.
            end = (log.end.tx, log.end.op) if log.end.tx else (0, 0)
            row = StoredShape(
                row.id, row.handle, row.record, row.snapshot, row.chunks, end, row.base_bytes, log.log_bytes,
            )  # fmt: skip
        return ShapeWrite(log.key, chunks, items, log.log_bytes, row)

    def _requeue(self, taken: _FlushQueue) -> None:
        known = self._known
        self._changed = {log: None for log in (*taken.changed, *self._changed) if log.key in known}
        self._records = {**{log: row for log, row in taken.records.items() if log.key in known}, **self._records}

    async def _clear_leftovers(self) -> None:
        """Delete leftovers of ended shapes, for as long as there is nothing to write."""
        if self._unswept and self.clean:
            self._unswept = False
            try:
                found = await self._run_on_thread(self._writer, lambda: self.file.find_leftovers(self._first_key))
            except BaseException:
                self._unswept = True
                raise
            self._leftovers |= dict.fromkeys(found)
        while self._leftovers and self.clean:
            key = next(reversed(self._leftovers))
            if not await self._run_on_thread(self._writer, lambda key=key: self.file.clear_leftovers(key)):  # type: ignore[misc]
                del self._leftovers[key]

    async def _handle_failure(self, error: UnavailableError) -> None:
        now_s = self._clock.monotonic_s()
        if self._failing_s is None:
            self._failing_s = now_s
        self._room.set()
        self._tracker.fail(self._mark, str(error), now_ms=self._clock.now_ms())
        if self.waited_for and now_s - self._failing_s >= ABANDON_AFTER_S:
            await self._abandon_file(error)
        await asyncio.sleep(RETRY_S)
        self._due.set()
        self._much.set()

    async def _abandon_file(self, cause: UnavailableError) -> None:
        """Stop waiting for a failing disk, after the row has a name that no file has (invariant: named files are
        complete)."""
        try:
            await self._write_name(self._new_name())
        except UnavailableError as error:
            log.warning("cannot abandon the file of shape logs", mark=self._mark, error=str(error))
            self._unnamed = True  # the name in the row is unknown
            return
        log.error("shapes are in memory only: the disk of their logs fails", mark=self._mark, error=str(cause))
        self._stop_waiting()

    async def _resume_file(self) -> None:
        """Start to use the file again, under a new name: a flush with unknown outcome must not leave a name that the
        row may get. Raises UnavailableError."""
        self.owner = self._new_name()
        self.waited_for = True
        self._named_from = self.taken()
        try:
            await self.flush()
        except BaseException:
            self._stop_waiting()
            raise
        self._unnamed = True

    def _stop_waiting(self) -> None:
        self.waited_for = False
        self.durable(self.position())

    async def _write_name(self, name: str) -> None:
        """Write a name into the capture's row. Raises UnavailableError; the name may have been written even then."""
        if self.name is None:
            raise UnavailableError("the capture does not stream.")
        try:
            await self.name(name)
        except TidemillError as error:
            raise UnavailableError(f"the capture's row was not changed: error={error_sentence(error)}.") from error

    async def aclose(self) -> None:
        """Write everything that is not written yet, and release the file. `run` has ended."""
        try:
            if not self.clean:
                await self.flush()
        except UnavailableError as error:
            log.warning("the last changes of shapes were not written", mark=self._mark, error=str(error))
        finally:
            self._known, self._ended = {}, set()  # drops from now on must not delete what the file has
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(None, self._writer.shutdown)
            await loop.run_in_executor(None, self.file.release)

    async def _run_on_thread(self, threads: Executor, work: Callable[[], T]) -> T:
        """Run `work` on a thread. Raises UnavailableError also if no thread is available."""
        try:
            running = asyncio.get_running_loop().run_in_executor(threads, work)
        except RuntimeError as error:
            raise UnavailableError(f"no thread for the file of shape logs: error={error}.") from error
        return await running
