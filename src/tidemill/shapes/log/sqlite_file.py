"""The file of one captured database's shape logs. Synchronous; callers use it on a thread.

    owner   one row: the layout version, and the name of this file in the capture's row
    shapes  id · handle · record (opaque here) · snapshot that the base was read in ·
            chunks of the base · position of the newest item · sizes
    base    id · chunk → JSON objects, joined
    items   id · tx · op → JSON object
    crc     column of shapes, base and items: CRC32C of the record or JSON and of its key, as SQLite has no checksums

- Invariant (atomic flush): a flush is one transaction, and durable when it returns: new shapes with their base, items,
  ended shapes, and the owner's name.
- Invariant (row decides): a shape exists if its row exists. Rows of `base` and `items` without it are leftovers:
  they are never read, their ids are not reused while they exist, and `clear_leftovers` deletes them a few at a time.
- Invariant (disposable): a file that cannot be read, or has another layout, is deleted: its content can be fetched
  again.
- Invariant (no silent damage): damaged data is never read as something else. A shape whose record is damaged ends when
  it is restored; a shape whose rows are damaged ends at their first read (CorruptError).
- Invariant (one process): only one process at a time uses the file. The lock file next to it is released with the
  process.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import struct
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import apsw
import crc32c
import msgspec

from tidemill.base.errors import CorruptError, UnavailableError
from tidemill.base.runtime.private_directories import make_private_directory

T = TypeVar("T")

LAYOUT = 4
"""4: the checksum of a row depends on each number of its key, not on their sum."""
CREATE_TABLES_SQL = """
CREATE TABLE owner (one INTEGER PRIMARY KEY CHECK (one = 1), layout INTEGER, name TEXT);
CREATE TABLE shapes (id INTEGER PRIMARY KEY, handle TEXT, record BLOB, snapshot TEXT, chunks INTEGER,
                     tx INTEGER, op INTEGER, base_bytes INTEGER, log_bytes INTEGER, crc INTEGER);
CREATE TABLE base (id INTEGER, chunk INTEGER, json BLOB, crc INTEGER, PRIMARY KEY (id, chunk));
CREATE TABLE items (id INTEGER, tx INTEGER, op INTEGER, json BLOB, crc INTEGER, PRIMARY KEY (id, tx, op)) WITHOUT ROWID;
"""
LEFTOVERS_SQL = """
WITH RECURSIVE seen(id) AS (
    SELECT min(id) FROM {table}
    UNION ALL SELECT (SELECT min(id) FROM {table} WHERE id > seen.id) FROM seen WHERE seen.id IS NOT NULL)
SELECT id FROM seen WHERE id < ? AND NOT EXISTS (SELECT 1 FROM shapes WHERE shapes.id = seen.id)
"""
MAX_ID = (1 << 63) - 1

CLEAR_BATCH_ROWS = 2_000
"""Rows deleted in one transaction, so that a flush never waits for long."""

VACUUM_PAGES = 256
"""Pages returned to the file system after each such transaction."""

DAMAGED_RECORD = b""
"""Replacement for a record with a wrong checksum: it cannot be decoded."""

BUSY_MS = 5_000

SYNCHRONOUS = "FULL"
"""SQLite's `synchronous` setting: a flush that returned is durable even if the machine fails."""


class StoredItem(msgspec.Struct, frozen=True, gc=False):
    tx: int
    op: int
    json: bytes


class StoredShape(msgspec.Struct, frozen=True):
    """A shape as the file stores it. `end`: tx and op of its newest item, (0, 0) if it has none."""

    id: int
    handle: str
    record: bytes
    snapshot: str
    chunks: int
    end: tuple[int, int]
    base_bytes: int
    log_bytes: int


class ShapeWrite(msgspec.Struct, frozen=True):
    """The part of a flush that belongs to one shape. `saved`: its row, if it is new; before that it has a base
    only."""

    id: int
    base: Sequence[tuple[int, bytes]]
    items: Sequence[StoredItem]
    log_bytes: int
    saved: StoredShape | None = None


class Flush(msgspec.Struct, frozen=True):
    """One transaction of the file, which may first delete all shapes that it has."""

    owner: str
    anew: bool
    written: Sequence[ShapeWrite]
    ended: Sequence[int]


class ShapeFile:
    """The database file. Every method but `close` raises UnavailableError if the disk or SQLite fails. A flush that
    raised may have happened; repeating it does no harm."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._local = threading.local()
        self._readers: list[apsw.Connection] = []
        self._writer: apsw.Connection | None = None
        self.holds_shapes = False
        """True if the file had shapes when it was opened."""
        self.next_id = 1
        """Smallest id above all ids that were in any table of the file when it was opened."""
        try:
            make_private_directory(path.parent)
            self._lock = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise UnavailableError(
                f"the directory of shape logs cannot be used: path={path} error={error.strerror!r}."
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise UnavailableError(
                f"another process uses this file of shape logs: path={path}.", fix="Give each node its own name."
            ) from error

    # -- opening -----------------------------------------------------------------------------------------------

    def open(self) -> str:
        """Open the file and return its owner's name, "" if it is new. A file that cannot be read is replaced by an
        empty one."""
        try:
            return self._open_writer()
        except (apsw.CorruptError, apsw.NotADBError, _OtherLayoutError):
            self.remove()
        except apsw.Error as error:
            raise self._failed_error(error) from error
        try:
            return self._open_writer()
        except (apsw.Error, _OtherLayoutError) as error:
            raise self._failed_error(error) from error

    def read_owner_name(self) -> str:
        """Return the owner's name without opening the file; "" if it is empty or cannot be read."""
        if not self.path.exists():
            return ""
        connection: apsw.Connection | None = None
        try:
            connection = self._connect()
            connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)  # no checkpoint: it may be long
            return "".join(str(name) for (name,) in connection.execute("SELECT name FROM owner"))
        except (apsw.CorruptError, apsw.NotADBError, apsw.SQLError):
            return ""
        except apsw.Error as error:
            raise self._failed_error(error) from error
        finally:
            if connection is not None:
                connection.close(True)

    def _open_writer(self) -> str:
        writer = self._connect()
        self._writer = writer
        writer.execute("PRAGMA auto_vacuum = INCREMENTAL")
        writer.execute("PRAGMA journal_mode = WAL")
        writer.execute(f"PRAGMA synchronous = {SYNCHRONOUS}")
        writer.execute("PRAGMA journal_size_limit = 16777216")
        writer.execute("BEGIN IMMEDIATE")
        if not writer.execute("SELECT 1 FROM sqlite_schema WHERE name = 'owner'").fetchall():
            writer.execute(CREATE_TABLES_SQL)
            writer.execute("INSERT INTO owner VALUES (1, ?, '')", (LAYOUT,))
        layout, name = writer.execute("SELECT layout, name FROM owner").fetchall()[0]
        writer.execute("COMMIT")
        if layout != LAYOUT:
            raise _OtherLayoutError(f"layout={layout} known={LAYOUT}")
        newest = [_query_number(writer, f"SELECT max(id) FROM {table}") for table in ("shapes", "base", "items")]
        self.holds_shapes = newest[0] > 0
        self.next_id = 1 + max(newest)
        return str(name)

    def _connect(self) -> apsw.Connection:
        connection = apsw.Connection(str(self.path))
        connection.set_busy_timeout(BUSY_MS)
        return connection

    def read_shapes(self) -> list[StoredShape]:
        rows: list[tuple[Any, ...]] = self._query(
            "SELECT id, handle, record, snapshot, chunks, tx, op, base_bytes, log_bytes, crc FROM shapes ORDER BY id"
        )
        return [
            StoredShape(
                key, handle, record if _crc(record, key) == crc else DAMAGED_RECORD, snapshot, chunks, (tx, op),
                base_bytes, log_bytes,
            )
            for key, handle, record, snapshot, chunks, tx, op, base_bytes, log_bytes, crc in rows
        ]  # fmt: skip

    # -- writing -----------------------------------------------------------------------------------------------

    def flush(self, flush: Flush) -> None:
        """Write one flush in one transaction; it is durable when the call returns."""
        writer = self._writer_connection()
        try:
            writer.execute("BEGIN IMMEDIATE")
            try:
                if flush.anew:
                    writer.execute("DELETE FROM shapes")
                writer.executemany("DELETE FROM shapes WHERE id = ?", [(gone,) for gone in flush.ended])
                self._write(writer, flush.written)
                writer.execute("UPDATE owner SET name = ?", (flush.owner,))
                writer.execute("COMMIT")
            finally:
                if writer.in_transaction:
                    writer.execute("ROLLBACK")
        except apsw.Error as error:
            raise self._failed_error(error) from error

    @staticmethod
    def _write(writer: apsw.Connection, written: Sequence[ShapeWrite]) -> None:
        """Write the parts of all shapes together: a statement per shape would cost more than the rows."""
        bases = [(each.id, n, json, _crc(json, each.id, n)) for each in written for n, json in each.base]
        writer.executemany("INSERT OR REPLACE INTO base VALUES (?, ?, ?, ?)", bases)
        items = [
            (each.id, item.tx, item.op, item.json, _crc(item.json, each.id, item.tx, item.op))
            for each in written
            for item in each.items
        ]
        writer.executemany("INSERT OR REPLACE INTO items VALUES (?, ?, ?, ?, ?)", items)
        rows = [
            (s.id, s.handle, s.record, s.snapshot, s.chunks, *s.end, s.base_bytes, s.log_bytes, _crc(s.record, s.id))
            for s in (each.saved for each in written)
            if s is not None
        ]
        writer.executemany("INSERT OR REPLACE INTO shapes VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", rows)
        known = [each for each in written if each.saved is None]
        ends = [(each.items[-1].tx, each.items[-1].op, each.log_bytes, each.id) for each in known if each.items]
        writer.executemany("UPDATE shapes SET tx = ?, op = ?, log_bytes = ? WHERE id = ?", ends)

    def find_leftovers(self, before: int = MAX_ID) -> list[int]:
        """Return the ids below `before` that have rows in `base` or `items` but none in `shapes`. Takes one index
        step per id."""
        writer = self._writer_connection()
        found: set[int] = set()
        try:
            for table in ("base", "items"):
                found.update(int(key) for (key,) in writer.execute(LEFTOVERS_SQL.format(table=table), (before,)))
        except apsw.Error as error:
            raise self._failed_error(error) from error
        return sorted(found)

    def clear_leftovers(self, key: int) -> bool:
        """Delete some leftovers of an ended shape. Return whether there may be more."""
        writer = self._writer_connection()
        try:
            for table, order, rows in (("items", "tx, op", CLEAR_BATCH_ROWS), ("base", "chunk", 1)):
                some = f"SELECT {order} FROM {table} WHERE id = ? ORDER BY {order} LIMIT ?"
                writer.execute(f"DELETE FROM {table} WHERE id = ? AND ({order}) IN ({some})", (key, key, rows))
                if writer.changes():
                    writer.execute(f"PRAGMA incremental_vacuum({VACUUM_PAGES})").fetchall()
                    return True
        except apsw.Error as error:
            raise self._failed_error(error) from error
        return False

    # -- reading -----------------------------------------------------------------------------------------------

    def read_base(self, key: int, chunk: int) -> bytes:
        """Return a chunk of the base; b"" if it is deleted because its shape has ended. Raises CorruptError as well."""
        found = self._query("SELECT json, crc FROM base WHERE id = ? AND chunk = ?", (key, chunk))
        if not found:
            return b""
        json, crc = found[0]
        if _crc(json, key, chunk) != crc:
            raise self._damaged_error(f"id={key} chunk={chunk}")
        return bytes(json)

    def items(self, key: int, after: tuple[int, int], upto: tuple[int, int], size_bytes: int) -> list[StoredItem]:
        """Return items in order, after `after` and up to `upto`, until they have `size_bytes`; at least one, if any
        exists.

        Raises CorruptError as well.
        """
        connection, found, size = self._reader_connection(), list[StoredItem](), 0
        try:
            rows = connection.execute(
                "SELECT tx, op, json, crc FROM items WHERE id = ? AND (tx, op) > (?, ?) AND (tx, op) <= (?, ?)"
                " ORDER BY tx, op",
                (key, *after, *upto),
            )
            for tx, op, json, crc in rows:
                if _crc(json, key, tx, op) != crc:
                    raise self._damaged_error(f"id={key} tx={tx} op={op}")
                found.append(StoredItem(tx, op, bytes(json)))
                size += len(json)
                if size >= size_bytes:
                    break
            rows.close()
        except apsw.Error as error:
            raise self._failed_error(error) from error
        return found

    # -- closing -----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close all connections. Idempotent. No call may be in progress."""
        for connection in [*self._readers, *([self._writer] if self._writer is not None else [])]:
            with suppress(apsw.Error):
                connection.close(True)
        self._readers, self._writer, self._local = [], None, threading.local()

    def release(self) -> None:
        """Close the file and release its lock, so that another process can open it."""
        self.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def remove(self, aside: Path | None = None) -> None:
        """Close and delete the file, or rename it to `aside` if deleting would take long."""
        self.close()
        try:
            if aside is not None:
                self.path.replace(aside)
            for end in ("", "-wal", "-shm"):
                Path(f"{self.path}{end}").unlink(missing_ok=True)
        except OSError as error:
            raise UnavailableError(
                f"the file of shape logs cannot be removed: path={self.path} error={error.strerror!r}."
            ) from error

    def size_bytes(self) -> int:
        """Return the size of the file and its write-ahead log."""
        total = 0
        for end in ("", "-wal"):
            with suppress(FileNotFoundError):
                total += os.stat(f"{self.path}{end}").st_size
        return total

    def _writer_connection(self) -> apsw.Connection:
        if self._writer is None:
            self.open()
        assert self._writer is not None
        return self._writer

    def _reader_connection(self) -> apsw.Connection:
        """Return this thread's own connection."""
        connection: apsw.Connection | None = getattr(self._local, "connection", None)
        if self._lock < 0:
            raise UnavailableError("the file of shape logs is closed.")
        if connection is None:
            try:
                connection = self._connect()
            except apsw.Error as error:
                raise self._failed_error(error) from error
            self._local.connection = connection
            self._readers.append(connection)
        return connection

    def _query(self, sql: str, values: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        try:
            return self._reader_connection().execute(sql, values).fetchall()
        except apsw.Error as error:
            raise self._failed_error(error) from error

    def _damaged_error(self, where: str) -> CorruptError:
        return CorruptError(
            f"a shape's stored log is damaged: path={self.path} {where}.", fix="Check the health of its disk."
        )

    def _failed_error(self, error: Exception) -> UnavailableError:
        return UnavailableError(
            f"the file of shape logs failed: path={self.path} error={error}.",
            fix="Check the space and health of its disk.",
        )


class FileThreads:
    """The threads on which a file is used: `readers` of all files, and `writer`, one thread of this file alone."""

    def __init__(self, readers: Executor, writer: Executor) -> None:
        self._readers = readers
        self._writer = writer

    async def read(self, work: Callable[[], T]) -> T:
        return await self._run(self._readers, work)

    async def write(self, work: Callable[[], T]) -> T:
        return await self._run(self._writer, work)

    async def _run(self, threads: Executor, work: Callable[[], T]) -> T:
        """Run `work` on a thread. Raises UnavailableError also if no thread is available."""
        try:
            running = asyncio.get_running_loop().run_in_executor(threads, work)
        except RuntimeError as error:
            raise UnavailableError(f"no thread for the file of shape logs: error={error}.") from error
        return await running

    async def aclose(self) -> None:
        """End the writer."""
        await asyncio.get_running_loop().run_in_executor(None, self._writer.shutdown)


def _crc(data: bytes, *place: int) -> int:
    """Return the checksum of the row's key and then of its data. Each number of the key has its own bytes: a row that
    is stored at another place is damaged, whichever numbers differ."""
    return int(crc32c.crc32c(data, crc32c.crc32c(struct.pack(f"<{len(place)}q", *place))))


def _query_number(db: apsw.Connection, sql: str) -> int:
    ((value,),) = db.execute(sql).fetchall()
    return int(value or 0)


class _OtherLayoutError(Exception):
    pass
