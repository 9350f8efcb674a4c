"""Storage of log records: recent ones as whole commit groups, older ones in chunks by log.

    append → recent     one row per group commit, for any number of logs; also held in memory
    settle → settled    some of the oldest groups, split into chunks by log
    sweep  → deleted    chunks below their log's start, a bounded number per commit

    recent.body     sealed (`schema.seal`) msgpack [[log id, position, term, nonce, data], …] in order
    settled.id      log id × 2^40 + position of the chunk's first record
    settled.body    sealed msgpack [[term, nonce, data], …], consecutive positions; settled.count = their number

So a commit of many logs writes few pages and one row; a table keyed by log would dirty a page per log. In each log,
positions below the first recent one are settled or swept, the others are recent and served from memory. A log's row in
`logs` may be older than its recent records; `head_with_recent` adds them. Records truncated before they settle are
never written again. Methods that write run inside the engine's transaction and do not change memory; `committed` does.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import apsw
import msgspec

from tidemill.base.errors import CorruptError
from tidemill.base.limits import MIB
from tidemill.consensus.api import LogHead, LogRecord
from tidemill.consensus.sqlite.schema import seal, unseal

POSITION_BITS = 40
LOG_IDS = 1 << (63 - POSITION_BITS)

RECENT_BYTES = 4 * MIB
"""Limit for recent records, which are held in memory and read at every start; above it, commits settle some of the
oldest.
"""

SETTLE_RECORDS = 1_024
SETTLE_BYTES = 1 * MIB
CHUNK_RECORDS = 256
SWEEP_CHUNKS = 64
GROUP_ROW_BYTES = 16 * MIB
RECORD_OVERHEAD_BYTES = 100


class PlacedRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A record with its log, as stored in `recent.body`."""

    log_id: int
    position: int
    term: int
    nonce: str
    data: bytes


class _CommitGroup(NamedTuple):
    id: int
    records: list[PlacedRecord]
    size_bytes: int


class _RecentRecords:
    """The recent records of one log, consecutive, oldest first. Removal from the front is amortised."""

    __slots__ = ("records", "taken")

    def __init__(self) -> None:
        self.records: list[PlacedRecord] = []
        self.taken = 0

    @property
    def first_position(self) -> int:
        """Position of the oldest record; only defined if there is one."""
        return self.records[self.taken].position

    def drop_oldest(self, count: int) -> bool:
        """Drop the `count` oldest records. True if none is left."""
        self.taken += count
        if self.taken == len(self.records):
            return True
        if self.taken > 256 and self.taken * 2 > len(self.records):
            del self.records[: self.taken]
            self.taken = 0
        return False


_encode = msgspec.msgpack.Encoder().encode
_decode_group = msgspec.msgpack.Decoder(list[PlacedRecord]).decode
_decode_chunk = msgspec.msgpack.Decoder(list[tuple[int, str, bytes]]).decode


class RecordStorage:
    """The records of all logs. Raises apsw.Error, and CorruptError if a body is unreadable or a record is missing."""

    def __init__(self, db: apsw.Connection) -> None:
        self._db = db
        self.reload()

    def reload(self) -> None:
        """Clear memory and reload from the file."""
        self._tails: dict[int, _RecentRecords] = {}
        self._groups: deque[_CommitGroup] = deque()
        self._recent_bytes = 0
        self._staged: list[_CommitGroup] = []
        self._settling: list[_CommitGroup] = []
        self._swept = 0
        self._next_id = 1
        for group_id, body in self._rows("SELECT id, body FROM recent ORDER BY id"):
            try:
                records = _decode_group(unseal(body, f"a group of records is damaged: id={group_id}"))
            except msgspec.MsgspecError as error:
                raise CorruptError(f"a group of records cannot be read: id={group_id} reason={error}.") from error
            self._add_recent(_CommitGroup(group_id, records, _size_bytes(records)))
        self.unswept: set[int] = {row[0] for row in self._rows("SELECT id FROM logs WHERE swept < start")}

    def head_with_recent(self, log_id: int, stored: LogHead) -> LogHead:
        """Return a log's head, from its row and its recent records, whose terms and positions only grow."""
        tail = self._tails.get(log_id)
        if tail is None:
            return stored
        last = tail.records[-1]
        return LogHead(max(stored.term, last.term), stored.start, max(stored.next, last.position + 1))

    # inside the transaction ----------------------------------------------------------------------

    def insert(self, records: list[PlacedRecord]) -> None:
        """Insert a group of records. Those of each log are consecutive and follow its newest one."""
        group_id = self._next_id
        for part in _split_group(records):
            self._db.execute("INSERT INTO recent (id, body) VALUES (?, ?)", (group_id, seal(_encode(part))))
            self._staged.append(_CommitGroup(group_id, part, _size_bytes(part)))
            group_id += 1

    def settle(self) -> None:
        """Move some of the oldest groups to `settled`, if the recent records exceed their limit."""
        if self._recent_bytes <= RECENT_BYTES:
            return
        count = size_bytes = 0
        logs: dict[int, list[PlacedRecord]] = {}
        for group in self._groups:
            if count >= SETTLE_RECORDS or (count and size_bytes >= SETTLE_BYTES):
                break
            self._settling.append(group)
            count += len(group.records)
            size_bytes += group.size_bytes
            for record in group.records:
                logs.setdefault(record.log_id, []).append(record)
        chunks: list[tuple[int, int, bytes]] = []
        for log_id in sorted(logs):
            start = self._rows("SELECT start FROM logs WHERE id = ?", (log_id,))[0][0]
            kept = [record for record in logs[log_id] if record.position >= start]
            for at in range(0, len(kept), CHUNK_RECORDS):
                part = kept[at : at + CHUNK_RECORDS]
                body = seal(_encode([(record.term, record.nonce, record.data) for record in part]))
                chunks.append(((log_id << POSITION_BITS) | part[0].position, len(part), body))
        self._db.executemany("INSERT INTO settled (id, count, body) VALUES (?, ?, ?)", chunks)
        self._db.executemany(
            "UPDATE logs SET term = max(term, ?), next = max(next, ?) WHERE id = ?",
            [(records[-1].term, records[-1].position + 1, log_id) for log_id, records in logs.items()],
        )
        self._db.execute("DELETE FROM recent WHERE id <= ?", (self._settling[-1].id,))

    def sweep(self) -> None:
        """Delete some chunks that were truncated."""
        if not self.unswept:
            return
        log_id = min(self.unswept)
        base = log_id << POSITION_BITS
        start = self._rows("SELECT start FROM logs WHERE id = ?", (log_id,))[0][0]
        doomed = self._rows(
            "SELECT id FROM settled WHERE id >= ? AND id + count <= ? AND id < ? ORDER BY id LIMIT ?",
            (base, base | start, base | start, SWEEP_CHUNKS),
        )
        if doomed:
            self._db.execute("DELETE FROM settled WHERE id >= ? AND id <= ?", (base, doomed[-1][0]))
        if len(doomed) < SWEEP_CHUNKS:
            self._db.execute("UPDATE logs SET swept = ? WHERE id = ?", (start, log_id))
            self._swept = log_id

    # after the transaction -----------------------------------------------------------------------

    def committed(self) -> None:
        if self._settling:
            taken: dict[int, int] = {}
            for group in self._settling:
                self._groups.popleft()
                self._recent_bytes -= group.size_bytes
                for record in group.records:
                    taken[record.log_id] = taken.get(record.log_id, 0) + 1
            for log_id, count in taken.items():
                if self._tails[log_id].drop_oldest(count):
                    del self._tails[log_id]
            self._settling = []
        for group in self._staged:
            self._add_recent(group)
        self._staged = []
        self.unswept.discard(self._swept)
        self._swept = 0

    def _add_recent(self, group: _CommitGroup) -> None:
        self._groups.append(group)
        self._next_id = group.id + 1
        self._recent_bytes += group.size_bytes
        tails = self._tails
        for record in group.records:
            tail = tails.get(record.log_id)
            if tail is None:
                tail = tails[record.log_id] = _RecentRecords()
            tail.records.append(record)

    # reading -------------------------------------------------------------------------------------

    def read(self, log_id: int, head: LogHead, start: int, limit_records: int, limit_bytes: int) -> list[LogRecord]:
        """Return consecutive records from `start` (head.start ≤ start < head.next), at least one."""
        tail = self._tails.get(log_id)
        first_recent = tail.first_position if tail is not None else head.next
        records: list[LogRecord] = []
        total = 0
        if start < first_recent:
            for record in self._read_settled(log_id, start, first_recent):
                total += len(record.data)
                if records and (total > limit_bytes or len(records) == limit_records):
                    return records
                records.append(record)
        if tail is not None:
            at = tail.taken + max(0, start - tail.first_position)
            for placed in tail.records[at : at + limit_records - len(records)]:
                total += len(placed.data)
                if records and total > limit_bytes:
                    break
                records.append(LogRecord(placed.position, placed.term, placed.nonce, placed.data))
        if not records or records[0].position != start:
            raise CorruptError(f"a record is missing from the database: log_id={log_id} position={start}.")
        return records

    def _read_settled(self, log_id: int, start: int, end: int) -> Any:
        """Yield the settled records of [start, end), reading chunks lazily."""
        base = log_id << POSITION_BITS
        chunks: Any = self._db.execute(
            "SELECT id, body FROM settled WHERE id >= (SELECT max(id) FROM settled WHERE id >= ? AND id <= ?)"
            " AND id < ? ORDER BY id",
            (base, base | start, base | end),
        )
        for chunk_id, body in chunks:
            try:
                rows = _decode_chunk(unseal(body, f"a chunk of records is damaged: id={chunk_id}"))
            except msgspec.MsgspecError as error:
                raise CorruptError(f"a chunk of records cannot be read: id={chunk_id} reason={error}.") from error
            for position, (term, nonce, data) in enumerate(rows, chunk_id - base):
                if position >= start:
                    yield LogRecord(position, term, nonce, data)

    def _rows(self, sql: str, bindings: tuple[int, ...] = ()) -> list[tuple[Any, ...]]:
        rows: list[tuple[Any, ...]] = self._db.execute(sql, bindings).fetchall()
        return rows


def _size_bytes(records: list[PlacedRecord]) -> int:
    return sum([len(record.data) for record in records]) + RECORD_OVERHEAD_BYTES * len(records)


def _split_group(records: list[PlacedRecord]) -> list[list[PlacedRecord]]:
    """Return one part, or several if one row would be too large."""
    if _size_bytes(records) <= GROUP_ROW_BYTES:
        return [records]
    parts: list[list[PlacedRecord]] = [[]]
    size_bytes = 0
    for record in records:
        if parts[-1] and size_bytes + len(record.data) > GROUP_ROW_BYTES:
            parts.append([])
            size_bytes = 0
        parts[-1].append(record)
        size_bytes += len(record.data) + RECORD_OVERHEAD_BYTES
    return parts
