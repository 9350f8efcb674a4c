"""The live logs of one file: which of them have something to write, and which can release memory.

    changed, recorded, ended ─► take ─► parts of a flush ─► mark_saved, finish  |  put_back

Invariant (row with its items): only a shape with a row exists after a restart, and its row is written together with
everything that its readers were shown.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from itertools import islice
from operator import attrgetter

from tidemill.shapes.log.disk_log import DiskLog
from tidemill.shapes.log.sqlite_file import ShapeWrite, StoredShape

FLUSH_BYTES = 1 << 20
"""A flush starts immediately if this much waits for it."""

FLUSH_LOGS = 500
"""Logs in one transaction, so that thousands of changed logs do not block the event loop."""

SORTED_LOGS = 16 * FLUSH_LOGS
"""Logs that are sorted by id together. Ids are the order of the file, so neighbours share its pages. Sorting this many
takes the event loop two milliseconds."""


class FlushQueue:
    """Logs that a flush has taken over. If the flush fails, those not yet durable are put back. A failed part may have
    been written, and is overwritten.

    `ended`: ids of logs to delete. `warm`: logs with data in memory that was durable at the last flush.
    """

    def __init__(
        self,
        changed: dict[DiskLog, None],
        records: dict[DiskLog, StoredShape],
        ended: tuple[int, ...],
        warm: dict[DiskLog, None],
    ) -> None:
        self.changed = changed
        self.records = records
        self.ended = ended
        self.warm = warm
        self._ordered: deque[DiskLog] = deque()

    def next_part(self) -> list[DiskLog]:
        if not self._ordered:
            self._ordered.extend(sorted(islice(self.changed, SORTED_LOGS), key=attrgetter("key")))
        return [self._ordered.popleft() for _ in range(min(FLUSH_LOGS, len(self._ordered)))]

    def done(self, part: Iterable[DiskLog]) -> None:
        for log in part:
            del self.changed[log]
            self.records.pop(log, None)


class LogSet:
    """`due`: the file lacks something. `much`: so much that it should be written now."""

    def __init__(self) -> None:
        self.due = asyncio.Event()
        self.much = asyncio.Event()
        self.ended: set[int] = set()
        """Ids of logs that the file must not have any more."""
        self._known: dict[int, DiskLog] = {}
        self._changed: dict[DiskLog, None] = {}
        self._records: dict[DiskLog, StoredShape] = {}
        self._warm: dict[DiskLog, None] = {}
        """Logs with data in memory that is durable since the last flush."""
        self._waiting_bytes = 0
        self._is_failing = False
        self._room = asyncio.Event()

    def __contains__(self, key: int) -> bool:
        """Return whether a live log has this id."""
        return key in self._known

    @property
    def has_changes(self) -> bool:
        """True if the file lacks something."""
        return bool(self._changed or self.ended)

    def add(self, log: DiskLog) -> DiskLog:
        self._known[log.key] = log
        return log

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
            self.delete(log.key)
            self._room.set()

    def delete(self, key: int) -> None:
        """Delete what the file has of a log, with the next flush."""
        self.ended.add(key)
        self.due.set()

    def forget(self) -> None:
        """Forget all logs: drops from now on must not delete what the file has."""
        self._known, self.ended = {}, set()

    def mark_changed(self, log: DiskLog, size_bytes: int) -> None:
        if log.key not in self._known:
            return
        self._changed[log] = None
        self._waiting_bytes += size_bytes
        self.due.set()
        if self._waiting_bytes >= FLUSH_BYTES:
            self.much.set()

    async def wait_for_room(self, log: DiskLog) -> None:
        """Wait until the base that is loaded into this log is not too far ahead of the file."""
        while log.is_crowded and not self._is_failing:
            self._room.clear()
            self.much.set()
            await self._room.wait()

    # -- the flush ---------------------------------------------------------------------------------------------

    def take_unflushed(self) -> FlushQueue:
        """Hand over everything that the file lacks."""
        self.much.clear()
        self._waiting_bytes = 0
        taken = FlushQueue(self._changed, self._records, tuple(self.ended), self._warm)
        self._changed, self._records, self._warm = {}, {}, {}
        return taken

    def mark_saved(self, taken: FlushQueue, part: Iterable[DiskLog], written: Iterable[ShapeWrite]) -> None:
        """Note that a part is durable; release from memory what was durable a flush ago in the same logs."""
        taken.done(part)
        for each in written:
            log = self._known.get(each.id)
            if log is not None:
                log.release_durable()
                log.mark_saved(len(each.base), len(each.items))
                taken.warm.pop(log, None)
                self._warm[log] = None

    async def finish(self, taken: FlushQueue) -> None:
        """Release memory of the logs that did not change since the flush before."""
        self._warm |= taken.warm
        for number, log in enumerate(list(taken.warm)):
            log.release_durable()
            self._warm.pop(log, None)
            if number % FLUSH_LOGS == FLUSH_LOGS - 1:
                await asyncio.sleep(0)
        self._room.set()

    def writes_of(self, part: Iterable[DiskLog], taken: FlushQueue) -> list[ShapeWrite]:
        """Return what the file lacks of these logs."""
        return [self._shape_write(log, taken) for log in part if log.key in self._known]

    @staticmethod
    def _shape_write(log: DiskLog, taken: FlushQueue) -> ShapeWrite:
        chunks, items = log.unsaved()
        row = taken.records.get(log)
        if row is not None:
            # Items that were visible before the row was due are in an earlier flush.
            end = (log.end.tx, log.end.op) if log.end.tx else (0, 0)
            row = StoredShape(
                row.id, row.handle, row.record, row.snapshot, row.chunks, end, row.base_bytes, log.log_bytes,
            )  # fmt: skip
        return ShapeWrite(log.key, chunks, items, log.log_bytes, row)

    def put_back(self, taken: FlushQueue) -> None:
        """Take back what a flush did not write."""
        known = self._known
        self._changed = {log: None for log in (*taken.changed, *self._changed) if log.key in known}
        self._records = {**{log: row for log, row in taken.records.items() if log.key in known}, **self._records}
        self._warm |= taken.warm
        self.due.set()

    def set_failing(self, failing: bool) -> None:
        """Note whether the disk fails: then no log waits for room."""
        self._is_failing = failing
        self._room.set()
