"""The synchronous engine: many operations that apply themselves, one transaction, one fsync.

    commit(ops)   decide each against stored and staged state → BEGIN IMMEDIATE … COMMIT → outcomes
    answer(op)    a read of committed, durable state

A rejected operation stages nothing. Heads and registers are cached between groups; the caches are cleared when SQLite's
data_version shows that another connection wrote.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import apsw

from tidemill.base.clock import Clock
from tidemill.base.errors import TidemillError, UnavailableError
from tidemill.consensus.api import Changes, LogHead, LogRecord, Versioned
from tidemill.consensus.change_journal import ChangeJournal
from tidemill.consensus.engine_state import UNWRITTEN, EngineClock, LeaseRow
from tidemill.consensus.operations import Append, Changed, Op, Read, WriteOp
from tidemill.consensus.sqlite import schema
from tidemill.consensus.sqlite.record_storage import LOG_IDS, PlacedRecord, RecordStorage
from tidemill.consensus.sqlite.schema import register_context, seal, unseal_register

Outcome = Any
"""A result, or the TidemillError that is the operation's outcome."""

CACHED_ENTRIES = 50_000
CACHED_VALUE_BYTES = 4_096

SPACE_RESERVE_BYTES = 32 << 20
"""Free space below which writes are rejected, before a COMMIT that runs out of space leaves an unknown outcome.

It fits the largest append and the checkpoint of SQLite's write-ahead log.
"""

SPACE_CHECK_INTERVAL_S = 0.25
"""Maximum age of the measured free space."""

FREE_PAGES = 1_024
SHRINK_PAGES = 256
"""Sizes for shrinking the file.

FREE_PAGES (4 MiB) stay free for new records. If more than a quarter of the file is free, SHRINK_PAGES (1 MiB) are
returned to the file system at each check of the free space, in the commit in progress.
"""


_LIFE_COUNTER = itertools.count()


class CommitOutcomeUnknownError(Exception):
    """COMMIT itself failed: whether the group happened is unknown until the file is reopened."""


class _StagedChanges:
    """State as one group of operations sees it: its changes, over the stored state (`engine_state.EngineState`)."""

    def __init__(self, engine: SqliteEngine) -> None:
        self._engine = engine
        self.registers: dict[str, Versioned | None] = {}
        self.heads: dict[str, LogHead] = {}
        self.leases: dict[str, LeaseRow] = {}
        self.appends: list[Append] = []
        self.marked: set[str] = set()

    def __bool__(self) -> bool:
        return bool(self.registers or self.heads or self.leases)

    def head(self, log: str) -> LogHead:
        return self.heads.get(log) or self._engine.read_head(log)

    def put_head(self, log: str, head: LogHead, appended: Append | None = None) -> None:
        self.heads[log] = head
        if appended is not None:
            self.appends.append(appended)
        else:
            self.marked.add(log)

    def records_of(self, op: Read, head: LogHead) -> list[LogRecord]:
        return self._engine.read_records(op, head)

    def changes(self, op: Changed) -> Changes:
        return self._engine.read_changes(op)

    def version(self, key: str) -> Versioned | None:
        return self.registers[key] if key in self.registers else self._engine.read_register(key)

    def put_version(self, key: str, version: Versioned | None) -> None:
        self.registers[key] = version

    def versions(self, prefix: str) -> list[tuple[str, Versioned]]:
        return self._engine.read_registers(prefix)

    def lease(self, name: str) -> LeaseRow | None:
        return self.leases.get(name) or self._engine.read_lease(name)

    def put_lease(self, row: LeaseRow) -> None:
        self.leases[row.name] = row

    def leases_of(self, prefix: str) -> list[LeaseRow]:
        return self._engine.read_leases(prefix)


class SqliteEngine:
    """Engine of one database, owned by one thread.

    After CommitOutcomeUnknownError or CorruptError it must be closed and reopened.
    """

    def __init__(self, path: Path, clock: Clock) -> None:
        self._path = path
        self._db = schema.open_database(path)
        last_seen_ms = self._rows("SELECT clock_ms FROM meta")[0][0]
        self._clock = EngineClock(clock, last_seen_ms)
        self._steady = clock
        self._free_bytes = 0
        self._look_at_s = float("-inf")
        self._heads: dict[str, LogHead] = {}
        self._ids: dict[str, int] = {}
        self._versions: dict[str, Versioned] = {}
        self._data_version = self._rows("PRAGMA data_version")[0][0]
        self._records = RecordStorage(self._db)
        self._journal = self._new_journal()

    def _new_journal(self) -> ChangeJournal:
        """Start a new change journal: writes of another connection are not in the current one."""
        return ChangeJournal(f"{os.getpid()}.{next(_LIFE_COUNTER)}.{self._clock.now_ms()}")

    # writes --------------------------------------------------------------------------------------

    def commit(self, ops: list[WriteOp]) -> list[Outcome]:
        """Return one outcome per operation, durable on return.

        Raises CommitOutcomeUnknownError, or UnavailableError if nothing happened.
        """
        look = self._check_space()
        staged = _StagedChanges(self)
        try:
            self._db.execute("BEGIN IMMEDIATE")
            self._invalidate_if_changed()
            outcomes: list[Outcome] = []
            for op in ops:
                try:
                    outcomes.append(self._apply(op, staged))
                except TidemillError as refused:
                    outcomes.append(refused)
            if staged:
                self._write(staged)
            self._records.settle()
            self._records.sweep()
            if look:
                self._shrink()
        except apsw.Error as error:
            self._roll_back()
            raise schema.translate_sqlite_error(error, self._path) from error
        except BaseException:
            self._roll_back()
            raise
        try:
            self._db.execute("COMMIT")
        except apsw.Error as error:
            raise CommitOutcomeUnknownError(str(error)) from error
        self._update_caches(staged)
        return outcomes

    def _check_space(self) -> bool:
        """Return whether the free space was measured now. Raises UnavailableError if the disk is nearly full."""
        now_s = self._steady.monotonic_s()
        look = now_s >= self._look_at_s
        if look:
            found = os.statvfs(self._path.parent)
            self._free_bytes = found.f_bavail * found.f_frsize
            self._look_at_s = now_s + SPACE_CHECK_INTERVAL_S
        if self._free_bytes < SPACE_RESERVE_BYTES:
            raise UnavailableError(
                f"the disk is full: path={self._path} free_bytes={self._free_bytes} kept_bytes={SPACE_RESERVE_BYTES}.",
                fix="Free space on the database's disk.",
            )
        return look

    def _shrink(self) -> None:
        """Return some of the space of deleted records to the file system, if it is a large part of the file."""
        (free,), (pages,) = self._rows("PRAGMA freelist_count")[0], self._rows("PRAGMA page_count")[0]
        if free > FREE_PAGES and free > pages // 4:
            self._rows(f"PRAGMA incremental_vacuum({SHRINK_PAGES})")

    def _apply(self, op: Op[Any], staged: _StagedChanges) -> Any:
        return op.apply(staged, self._clock.now_ms())

    def _write(self, staged: _StagedChanges) -> None:
        execute = self._db.executemany
        ids = self._ids
        for name in staged.heads:
            if name not in ids:
                self._db.execute("INSERT INTO logs (name, term, start, next) VALUES (?, 0, 0, 0)", (name,))
                ids[name] = self._db.last_insert_rowid()
                if ids[name] >= LOG_IDS:
                    raise UnavailableError(f"the database has reached its maximum number of logs: logs={LOG_IDS}.")
        if staged.marked:
            # Logs that were only appended to need no write here: their records imply the head.
            marked = [(staged.heads[name], ids[name]) for name in sorted(staged.marked)]
            execute(
                "UPDATE logs SET term = ?, start = ?, next = ? WHERE id = ?",
                [(head.term, head.start, head.next, log_id) for head, log_id in marked],
            )
        if staged.appends:
            self._records.insert(
                [
                    PlacedRecord(ids[op.log], position, op.term, op.nonce, data)
                    for op in staged.appends
                    for position, data in enumerate(op.records, op.expected_next)
                ]
            )
        if staged.registers:
            execute(
                "INSERT INTO registers (key, seq, nonce, data) VALUES (?, ?, ?, ?)"
                " ON CONFLICT (key) DO UPDATE SET seq = excluded.seq, nonce = excluded.nonce, data = excluded.data",
                [
                    (key, v.seq, v.nonce, seal(v.data, register_context(key, v.seq, v.nonce)))
                    for key, v in staged.registers.items()
                    if v is not None
                ],
            )
            execute("DELETE FROM registers WHERE key = ?", [(key,) for key, v in staged.registers.items() if v is None])
        if staged.leases:
            execute(
                "REPLACE INTO leases (name, holder, term, ttl_ms, expires_ms, info) VALUES (?, ?, ?, ?, ?, ?)",
                [(r.name, r.holder, r.term, r.ttl_ms, r.expires_ms, r.info) for r in staged.leases.values()],
            )
            self._db.execute("UPDATE meta SET clock_ms = max(clock_ms, ?)", (self._clock.now_ms(),))

    def _update_caches(self, staged: _StagedChanges) -> None:
        """Update the caches after the commit; only durable state enters them."""
        self._records.committed()
        self._journal.record_changes(staged.heads)
        if len(self._versions) + len(self._heads) > CACHED_ENTRIES:
            self._versions.clear()
            self._heads.clear()
        for name, head in staged.heads.items():
            old = self._heads.get(name, UNWRITTEN)
            if head.start > old.start:
                self._records.unswept.add(self._ids[name])
            self._heads[name] = head
        for key, version in staged.registers.items():
            if version is not None and len(version.data) <= CACHED_VALUE_BYTES:
                self._versions[key] = version
            else:
                self._versions.pop(key, None)

    def _roll_back(self) -> None:
        if self._db.in_transaction:
            self._db.execute("ROLLBACK")
        self._clear_caches()

    def _clear_caches(self) -> None:
        """Clear all caches and reload from the file."""
        self._heads.clear()
        self._ids.clear()
        self._versions.clear()
        self._records.reload()
        self._journal = self._new_journal()

    # reads ---------------------------------------------------------------------------------------

    def execute_read(self, op: Op[Any]) -> Any:
        """Read committed state. Raises MissingError, CorruptError or UnavailableError."""
        if op.writes:
            raise UnavailableError(f"not a read: op={type(op).__name__}.")
        try:
            self._invalidate_if_changed()
            return self._apply(op, _StagedChanges(self))
        except apsw.Error as error:
            raise schema.translate_sqlite_error(error, self._path) from error

    def read_records(self, op: Read, head: LogHead) -> list[LogRecord]:
        return self._records.read(self._ids[op.log], head, op.start, op.limit_records, op.limit_bytes)

    def read_changes(self, op: Changed) -> Changes:
        return self._journal.changes_since(op, self._list_heads, self.read_head)

    def read_registers(self, prefix: str) -> list[tuple[str, Versioned]]:
        sql = "SELECT key, seq, nonce, data FROM registers WHERE {} ORDER BY key"
        rows = self._rows_with_prefix(sql, "key", prefix)
        return [(key, Versioned(seq, unseal_register(key, seq, nonce, data), nonce)) for key, seq, nonce, data in rows]

    def read_leases(self, prefix: str) -> list[LeaseRow]:
        sql = "SELECT name, holder, term, ttl_ms, expires_ms, info FROM leases WHERE {} ORDER BY name"
        return [LeaseRow(*row) for row in self._rows_with_prefix(sql, "name", prefix)]

    def _list_heads(self, prefix: str, after: str, limit: int) -> list[tuple[str, LogHead]]:
        sql = "SELECT name, id, term, start, next FROM logs WHERE name >= ? AND name < ? AND name > ?"
        bounds = (prefix, prefix + "\U0010ffff" * 4, after, limit)
        rows = self._rows(f"{sql} ORDER BY name LIMIT ?", bounds)
        return [(name, self._records.head_with_recent(log_id, LogHead(*head))) for name, log_id, *head in rows]

    def _rows_with_prefix(self, sql: str, column: str, prefix: str) -> list[tuple[Any, ...]]:
        """Return the rows whose column starts with `prefix`, by index range. No code point sorts above U+10FFFF."""
        if not prefix:
            return self._rows(sql.format("TRUE"))
        return self._rows(sql.format(f"{column} >= ? AND {column} < ?"), (prefix, prefix + "\U0010ffff" * 4))

    def _invalidate_if_changed(self) -> None:
        """Clear the caches if another connection committed."""
        data_version = self._rows("PRAGMA data_version")[0][0]
        if data_version != self._data_version:
            self._data_version = data_version
            self._clear_caches()

    def read_head(self, log: str) -> LogHead:
        head = self._heads.get(log)
        if head is None:
            rows = self._rows("SELECT id, term, start, next FROM logs WHERE name = ?", (log,))
            if not rows:
                return UNWRITTEN
            self._ids[log] = rows[0][0]
            head = self._heads[log] = self._records.head_with_recent(rows[0][0], LogHead(*rows[0][1:]))
        return head

    def read_register(self, key: str) -> Versioned | None:
        cached = self._versions.get(key)
        if cached is not None:
            return cached
        rows = self._rows("SELECT seq, data, nonce FROM registers WHERE key = ?", (key,))
        if not rows:
            return None
        seq, data, nonce = rows[0]
        return Versioned(seq, unseal_register(key, seq, nonce, data), nonce)

    def read_lease(self, name: str) -> LeaseRow | None:
        rows = self._rows("SELECT name, holder, term, ttl_ms, expires_ms, info FROM leases WHERE name = ?", (name,))
        return LeaseRow(*rows[0]) if rows else None

    def _rows(self, sql: str, bindings: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        rows: list[tuple[Any, ...]] = self._db.execute(sql, bindings).fetchall()
        return rows

    def close(self) -> None:
        self._db.close(True)
