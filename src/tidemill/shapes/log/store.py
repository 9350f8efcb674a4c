"""Schedule the flushes of the shape logs of one captured database, and report the durable positions.

    changed ─┐                       ┌── thread ──┐
    recorded ─┼► due ─ FLUSH_S or    │  one       │   logs: mark_saved
    ended ───┘        FLUSH_BYTES ──►│ transaction│──► durable(position)
                                     └────────────┘

The store owns the file and the order of its flushes; `log_set` has what the file lacks. Evaluation of changes belongs
to the tap, which provides `position` and receives `durable`.

- Invariant (consistent position): `position()` is read in the same step in which the logs of a flush are selected.
  Every change at or below it is in this flush or in an earlier one, or had no effect. `durable(position)` is called
  after the whole flush. A flush is written in parts of FLUSH_LOGS logs; each part has the state of its logs at that
  time.
- Invariant (named files are complete): a file whose name is in the capture's row is complete, except for what the
  stream repeats. So a file that cannot be written for ABANDON_AFTER_S is abandoned before anything is confirmed without
  it: `name` writes a name into the row that no file has. Shapes are still served from memory. When the disk works
  again, the file gets a new name with a flush that contains everything, while commits wait for it again, and the row
  gets that name afterwards.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable
from contextlib import suppress

import structlog

from tidemill.base.clock import Clock, Rand
from tidemill.base.errors import TidemillError, UnavailableError
from tidemill.base.runtime.tasks import error_sentence
from tidemill.base.status.status import StatusTracker
from tidemill.shapes.log.chunks import LogReader
from tidemill.shapes.log.disk_log import DiskLog, LogRoom
from tidemill.shapes.log.log_set import LogSet
from tidemill.shapes.log.sqlite_file import FileThreads, Flush, ShapeFile, StoredShape

log = structlog.get_logger()

FLUSH_S = 1.0
"""Longest delay until a visible change is durable."""

RETRY_S = 1.0
ABANDON_AFTER_S = 10.0
"""Time for which a failing disk may hold back a capture's WAL."""


class EndedLogSweep:
    """Deletion of what ended shapes have in the file: a flush only marks them as ended.

    Invariant (sweep while idle): a step deletes a bounded number of rows, and begins only while there is nothing to
    write. Keys that an earlier run did not finish are found in the file, below the first key of this run.
    """

    def __init__(self, file: ShapeFile, threads: FileThreads, is_idle: Callable[[], bool]) -> None:
        self._file = file
        self._threads = threads
        self._is_idle = is_idle
        self._first_key = file.next_id
        self._keys: dict[int, None] = {}
        self.must_search = file.next_id > 1
        """True while keys of earlier runs may be missing in `_keys`."""

    def add(self, keys: Iterable[int]) -> None:
        """Add shapes whose end is durable."""
        self._keys |= dict.fromkeys(keys)

    async def run(self) -> None:
        """Delete until nothing is left, or there is something to write. Raises UnavailableError."""
        if self.must_search and self._is_idle():
            self.must_search = False
            try:
                found = await self._threads.write(lambda: self._file.find_leftovers(self._first_key))
            except BaseException:
                self.must_search = True
                raise
            self.add(found)
        while self._keys and self._is_idle():
            key = next(reversed(self._keys))
            if not await self._threads.write(lambda key=key: self._file.clear_leftovers(key)):  # type: ignore[misc]
                del self._keys[key]


class ShapeStore:
    """Flushes logs: `run` in a task, `aclose` at the end. `position` and `durable` are set by the tap of the
    database."""

    def __init__(
        self,
        file: ShapeFile,
        threads: FileThreads,
        clock: Clock,
        rand: Rand,
        tracker: StatusTracker,
        mark: str,
        room: LogRoom,
    ) -> None:
        """Open the file. Raises UnavailableError. `mark`: the stage status that reports a failing disk."""
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
        self._threads = threads
        self._clock = clock
        self._rand = rand
        self._tracker = tracker
        self._mark = mark
        self._room = room
        self.reader = LogReader(file, threads, room.memory)
        self.logs = LogSet()
        self.holds_shapes = file.holds_shapes
        """True if the file has shapes of an earlier run."""
        self._next_key = file.next_id
        self._anew = False
        self._sweep = EndedLogSweep(file, threads, lambda: self.clean)
        self._flushing = False
        self._forgotten: set[int] = set()
        self._failing_s: float | None = None
        if self._sweep.must_search:
            self.logs.due.set()

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
        self._sweep.must_search = True
        self.logs.due.set()
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
        return [] if self._anew else await self._threads.read(self.file.read_shapes)

    def delete_saved(self, saved: StoredShape) -> None:
        """Delete a shape that cannot continue; effective with the next flush."""
        self._forgotten.add(saved.id)
        self.logs.delete(saved.id)

    def is_deleted(self, saved: StoredShape) -> bool:
        return saved.id in self._forgotten

    # -- logs --------------------------------------------------------------------------------------------------

    def create_log(self) -> DiskLog:
        key, self._next_key = self._next_key, self._next_key + 1
        return self.logs.add(DiskLog(key, self.logs, self.reader, self._room))

    def restore_log(self, saved: StoredShape) -> DiskLog:
        """Return the log of a stored shape. Raises OverBudgetError."""
        return self.logs.add(DiskLog(saved.id, self.logs, self.reader, self._room, saved))

    @property
    def clean(self) -> bool:
        """True if the file contains everything."""
        return not (self._flushing or self._anew or self.logs.has_changes)

    # -- the flush ---------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Flush forever. A failure of the disk is reported and retried; other errors are raised."""
        while True:
            await self.logs.due.wait()
            with suppress(TimeoutError):
                async with asyncio.timeout(FLUSH_S):
                    await self.logs.much.wait()
            self.logs.due.clear()
            self.logs.much.clear()  # also if nothing is flushed: a set event would turn this into a busy loop
            try:
                if not self.waited_for:
                    await self._resume_file()
                elif not self.clean:
                    await self.flush()
                if self._unnamed and self.clean and self.position() >= self._named_from:
                    await self._write_name(self.owner)
                    self._unnamed = False
                elif self._unnamed:
                    self.logs.due.set()
                await self._sweep.run()
            except UnavailableError as error:
                await self._handle_failure(error)
            else:
                if self._failing_s is not None:
                    self._failing_s = None
                    self.logs.set_failing(False)
                    self._tracker.clear_failure(self._mark)

    async def flush(self) -> None:
        """Write all changes. Raises UnavailableError; what is not known to be durable is written again by the next
        flush."""
        position, era = self.position(), self._era
        taken = self.logs.take_unflushed()
        owner, ended, anew = self.owner, taken.ended, self._anew
        self._flushing = True
        try:
            while True:
                part = taken.next_part()
                written = self.logs.writes_of(part, taken)
                flush = Flush(owner, anew, written, ended)
                await self._threads.write(lambda flush=flush: self.file.flush(flush))  # type: ignore[misc]
                self.logs.mark_saved(taken, part, written)
                self.logs.ended.difference_update(ended)
                self._sweep.add(ended)
                self._anew = self._anew and not anew
                ended, anew = (), False
                if not taken.changed:
                    break
        except BaseException:
            self.logs.put_back(taken)
            raise
        finally:
            self._flushing = False
        await self.logs.finish(taken)
        if self._era == era:
            self.durable(position)

    async def _handle_failure(self, error: UnavailableError) -> None:
        now_s = self._clock.monotonic_s()
        if self._failing_s is None:
            self._failing_s = now_s
        self.logs.set_failing(True)
        self._tracker.fail(self._mark, str(error), now_ms=self._clock.now_ms())
        if self.waited_for and now_s - self._failing_s >= ABANDON_AFTER_S:
            await self._abandon_file(error)
        await asyncio.sleep(RETRY_S)
        self.logs.due.set()
        self.logs.much.set()

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
            self.logs.forget()
            await self._threads.aclose()
            await asyncio.get_running_loop().run_in_executor(None, self.file.release)
