"""L0 objects in memory: recent uploads of this process, and shared reads of objects of other processes.

`ObjectCache` holds recent uploads, for all fetches of the process; it evicts the oldest, by a byte budget. The buffers
are those that were uploaded. Offsets are patched in place once they are known, at the latest when they are fetched.
Fetches return views into the buffers, so an evicted buffer is freed only with its last view.

`SharedReads` reads other objects. A node that has just taken partitions over reads thousands of small objects, each for
every group and every partition in it, while producers wait for the same store. Sharing avoids most of these requests:

    requested ──────────────────────────[ batches of p3 ]
    read      ────[ READ_BEFORE_BYTES ..  batches of p3 ]     probably requested next, without an additional request

- Memory: cached and in-flight bytes stay within `limit_bytes`; the object that was read first is evicted first.
- Errors: a failed read fails for all its waiters and is dropped: the next call asks the store again.
- Cancellation: a waiter that is cancelled does not affect the others.
- Concurrency: at most READS_IN_FLIGHT_MAX requests are in flight, so that other readers of the store do not queue
  behind thousands.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence

from tidemill.base.errors import TidemillError, UnavailableError
from tidemill.base.limits import COALESCE_GAP_BYTES, MIB, OBJECT_CONCURRENCY
from tidemill.base.runtime.tasks import Tasks
from tidemill.objects.reads import forward_notice
from tidemill.objects.store import Buffer, ObjectStore


class ObjectCache:
    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._buffers: dict[str, bytearray] = {}
        self.bytes_held = 0

    def __len__(self) -> int:
        return len(self._buffers)

    def add(self, object_key: str, buffer: bytearray) -> None:
        self._buffers[object_key] = buffer
        self.bytes_held += len(buffer)
        while self.bytes_held > self._budget_bytes and self._buffers:
            oldest = next(iter(self._buffers))
            self.bytes_held -= len(self._buffers.pop(oldest))

    def get(self, object_key: str) -> bytearray | None:
        return self._buffers.get(object_key)


LIMIT_BYTES = 16 * MIB
READS_IN_FLIGHT_MAX = OBJECT_CONCURRENCY // 2

READ_BEFORE_BYTES = COALESCE_GAP_BYTES
"""Bytes that cost less to read than a request. Read before a range only: the object's end is unknown."""

_ReadTask = asyncio.Task[Sequence[bytes] | TidemillError]


class _Piece:
    __slots__ = ("begin", "end", "number", "read")

    def __init__(self, begin: int, end: int, number: int, read: _ReadTask) -> None:
        self.begin = begin
        self.end = end
        self.number = number
        """Index among the ranges of `read`."""
        self.read = read


class SharedReads:
    """Shared reads of L0 objects. Implements `batch_reads.SharedRangeReader`."""

    def __init__(self, objects: ObjectStore, tasks: Tasks, *, limit_bytes: int = LIMIT_BYTES) -> None:
        self._objects = objects
        self._tasks = tasks
        self.limit_bytes = limit_bytes
        self.held_bytes = 0
        self._pieces: OrderedDict[str, list[_Piece]] = OrderedDict()
        self._turns = asyncio.Semaphore(READS_IN_FLIGHT_MAX)

    def has_range(self, key: str, begin: int, end: int) -> bool:
        """Return whether the range was read, or is being read."""
        return _find_covering(self._pieces.get(key, ()), begin, end) is not None

    async def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[Buffer]:
        """Read ranges as `ObjectStore.get_ranges`, with the same errors."""
        pieces = self._pieces.get(key, [])
        missing = [each for each in ranges if _find_covering(pieces, *each) is None]
        if missing:
            pieces = [*pieces, *self._start_read(key, missing)]
        found: list[Buffer] = []
        for begin, end in ranges:
            piece = _find_covering(pieces, begin, end)
            assert piece is not None
            data = await _await_piece(piece, key)
            found.append(memoryview(data)[begin - piece.begin : end - piece.begin])
        return found

    def discard(self, key: str) -> None:
        """Drop the object's bytes, which are damaged: the next read asks the store."""
        self.held_bytes -= _total_bytes(self._pieces.pop(key, []))

    def record_notice(self, what: str) -> None:
        forward_notice(self._objects, what)

    def _start_read(self, key: str, missing: Sequence[tuple[int, int]]) -> list[_Piece]:
        ranges: list[tuple[int, int]] = []
        for begin, end in sorted(missing):
            begin = max(0, begin - READ_BEFORE_BYTES)
            if ranges and begin <= ranges[-1][1]:
                ranges[-1] = (ranges[-1][0], max(ranges[-1][1], end))
            else:
                ranges.append((begin, end))
        read = self._tasks.spawn(self._read(key, ranges), name=f"read {key}")
        pieces = [_Piece(*each, number, read) for number, each in enumerate(ranges)]
        self._pieces.setdefault(key, []).extend(pieces)
        self.held_bytes += _total_bytes(pieces)
        read.add_done_callback(lambda _: self._on_read_ended(key, pieces))
        while self.held_bytes > self.limit_bytes:
            self.held_bytes -= _total_bytes(self._pieces.popitem(last=False)[1])
        return pieces

    async def _read(self, key: str, ranges: Sequence[tuple[int, int]]) -> Sequence[bytes] | TidemillError:
        try:
            async with self._turns:
                return await self._objects.get_ranges(key, ranges)
        except TidemillError as error:
            return error  # Each waiter raises it.

    def _on_read_ended(self, key: str, pieces: Sequence[_Piece]) -> None:
        read = pieces[0].read
        held = self._pieces.get(key, [])
        if pieces[0] not in held or not (read.cancelled() or read.exception() or isinstance(read.result(), Exception)):
            return
        left = [piece for piece in held if piece.read is not read]
        self.held_bytes -= _total_bytes(pieces)
        if left:
            self._pieces[key] = left
        else:
            del self._pieces[key]


def _find_covering(pieces: Sequence[_Piece], begin: int, end: int) -> _Piece | None:
    return next((piece for piece in pieces if piece.begin <= begin and end <= piece.end), None)


def _total_bytes(pieces: Sequence[_Piece]) -> int:
    return sum(piece.end - piece.begin for piece in pieces)


async def _await_piece(piece: _Piece, key: str) -> bytes:
    if not piece.read.done():
        await asyncio.wait([piece.read])
    if piece.read.cancelled() or piece.read.exception() is not None:
        raise UnavailableError(f"the read of an L0 object was interrupted: key={key}.", fix="Retry.")
    outcome = piece.read.result()
    if isinstance(outcome, TidemillError):
        raise outcome
    return outcome[piece.number]
