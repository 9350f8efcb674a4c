"""Where log records lie: fresh ones in order of arrival, older ones clustered by log.

    append → recent_records, and in memory      a group commit of many logs fills few pages, not one per log
    settle → settled_records                    the oldest of the recent, sorted, a page or more per log at once
    sweep  → gone                               settled rows below a log's start, a bounded number per commit

Per log, positions below the first recent one are settled (or swept), the rest is recent and served from memory.
Rows truncated before they settle are never written again. All methods that write run inside the engine's
transaction; `committed` applies to memory what they did, `reload` starts over from the file.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import apsw

from tidemill.base.errors import Corrupt
from tidemill.base.limits import MIB
from tidemill.consensus.api import LogHead, LogRecord

POSITION_BITS = 40
"""A settled row's id is log id × 2^40 + position: one integer key, and each log's rows lie together."""

LOG_IDS = 1 << (63 - POSITION_BITS)

RECENT_BYTES = 4 * MIB
"""Held in memory and read back at every start; above it each commit settles some of the oldest."""

SETTLE_ROWS = 1_024
SETTLE_BYTES = 1 * MIB
SWEEP_ROWS = 500

ROW_OVERHEAD_BYTES = 100


class _Arrival(NamedTuple):
    id: int
    log_id: int
    record: LogRecord

    @property
    def size_bytes(self) -> int:
        return len(self.record.data) + ROW_OVERHEAD_BYTES


class _Tail:
    """The recent records of one log, consecutive, oldest first; taking from the front is amortised."""

    __slots__ = ("records", "taken")

    def __init__(self) -> None:
        self.records: list[LogRecord] = []
        self.taken = 0

    @property
    def first(self) -> int:
        """Position of the oldest; only when there is any."""
        return self.records[self.taken].position

    def __len__(self) -> int:
        return len(self.records) - self.taken

    def take(self) -> None:
        self.taken += 1
        if self.taken > 256 and self.taken * 2 > len(self.records):
            del self.records[: self.taken]
            self.taken = 0

    def slice(self, start: int, limit: int) -> list[LogRecord]:
        at = self.taken + max(0, start - self.first)
        return self.records[at : at + limit]


class Records:
    def __init__(self, db: apsw.Connection) -> None:
        self._db = db
        self.reload()

    def reload(self) -> None:
        """Forget memory and read the recent rows from the file."""
        self._tails: dict[int, _Tail] = {}
        self._arrivals: deque[_Arrival] = deque()
        self._recent_bytes = 0
        self._staged: list[_Arrival] = []
        self._settling = 0
        rows = self._rows("SELECT id, log, position, term, nonce, data FROM recent_records ORDER BY id")
        for row_id, log_id, position, term, nonce, data in rows:
            self._remember(_Arrival(row_id, log_id, LogRecord(position, term, nonce, data)))
        self._next_id = self._arrivals[-1].id + 1 if self._arrivals else 1
        self.unswept: set[int] = {row[0] for row in self._rows("SELECT id FROM logs WHERE swept < start")}

    # inside the transaction ----------------------------------------------------------------------

    def insert(self, rows: list[tuple[int, LogRecord]]) -> None:
        """Records by log id, each log's consecutive and following what it has."""
        self._staged = [_Arrival(self._next_id + i, log_id, record) for i, (log_id, record) in enumerate(rows)]
        self._db.executemany(
            "INSERT INTO recent_records (id, log, position, term, nonce, data) VALUES (?, ?, ?, ?, ?, ?)",
            [(a.id, a.log_id, a.record.position, a.record.term, a.record.nonce, a.record.data) for a in self._staged],
        )

    def settle(self) -> None:
        """Move some of the oldest recent rows to where they stay, if there are too many."""
        if self._recent_bytes <= RECENT_BYTES:
            return
        oldest: list[_Arrival] = []
        size_bytes = 0
        for arrival in self._arrivals:
            if len(oldest) >= SETTLE_ROWS or (oldest and size_bytes >= SETTLE_BYTES):
                break
            oldest.append(arrival)
            size_bytes += arrival.size_bytes
        starts = self._starts({arrival.log_id for arrival in oldest})
        rows = [
            ((a.log_id << POSITION_BITS) | a.record.position, a.record.term, a.record.nonce, a.record.data)
            for a in oldest
            if a.record.position >= starts[a.log_id]
        ]
        rows.sort(key=lambda row: row[0])
        self._db.executemany("INSERT INTO settled_records (id, term, nonce, data) VALUES (?, ?, ?, ?)", rows)
        self._db.execute("DELETE FROM recent_records WHERE id <= ?", (oldest[-1].id,))
        self._settling = len(oldest)

    def sweep(self) -> None:
        """Delete some settled rows that were truncated away."""
        if not self.unswept:
            return
        log_id = min(self.unswept)
        start, swept = self._rows("SELECT start, swept FROM logs WHERE id = ?", (log_id,))[0]
        upto = min(start, swept + SWEEP_ROWS)
        base = log_id << POSITION_BITS
        self._db.execute("DELETE FROM settled_records WHERE id >= ? AND id < ?", (base | swept, base | upto))
        self._db.execute("UPDATE logs SET swept = ? WHERE id = ?", (upto, log_id))
        self._swept_all = log_id if upto == start else 0

    _swept_all = 0

    def _starts(self, log_ids: set[int]) -> dict[int, int]:
        find = "SELECT start FROM logs WHERE id = ?"
        return {log_id: self._rows(find, (log_id,))[0][0] for log_id in sorted(log_ids)}

    def _rows(self, sql: str, bindings: tuple[int, ...] = ()) -> list[tuple[Any, ...]]:
        rows: list[tuple[Any, ...]] = self._db.execute(sql, bindings).fetchall()
        return rows

    # after it ------------------------------------------------------------------------------------

    def committed(self) -> None:
        for _ in range(self._settling):
            arrival = self._arrivals.popleft()
            self._recent_bytes -= arrival.size_bytes
            tail = self._tails[arrival.log_id]
            tail.take()
            if not len(tail):
                del self._tails[arrival.log_id]
        self._settling = 0
        for arrival in self._staged:
            self._remember(arrival)
        self._next_id += len(self._staged)
        self._staged = []
        self.unswept.discard(self._swept_all)
        self._swept_all = 0

    def _remember(self, arrival: _Arrival) -> None:
        self._arrivals.append(arrival)
        self._recent_bytes += arrival.size_bytes
        tail = self._tails.get(arrival.log_id)
        if tail is None:
            tail = self._tails[arrival.log_id] = _Tail()
        tail.records.append(arrival.record)

    # reading -------------------------------------------------------------------------------------

    def read(self, log_id: int, head: LogHead, start: int, limit_records: int, limit_bytes: int) -> list[LogRecord]:
        """Consecutive records from `start` ≥ head.start; at least one if any is there."""
        tail = self._tails.get(log_id)
        first_recent = tail.first if tail is not None else head.next
        records: list[LogRecord] = []
        total = 0
        if start < first_recent:
            base = log_id << POSITION_BITS
            rows: Any = self._db.execute(
                "SELECT id, term, nonce, data FROM settled_records WHERE id >= ? AND id < ? ORDER BY id LIMIT ?",
                (base | start, base | first_recent, limit_records),
            )
            for row_id, term, nonce, data in rows:
                total += len(data)
                if records and total > limit_bytes:
                    return records
                records.append(LogRecord(row_id - base, term, nonce, data))
        if tail is not None:
            for record in tail.slice(start + len(records), limit_records - len(records)):
                total += len(record.data)
                if records and total > limit_bytes:
                    break
                records.append(record)
        if records and records[0].position != start:
            raise Corrupt(f"A record is missing: log_id={log_id} position={start} found={records[0].position}.")
        return records
